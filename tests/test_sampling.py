"""Drawing tokens: the op against its definition, the distribution against the conditional one, limits, seeds, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lz_compile as lz
from lz_compile.api import speculation
from lz_compile.domains import Domain, DomainMask, DomainScore
from lz_compile.domains.mask import pack
from lz_compile.errors import ConstraintError, TokenArgumentError
from lz_compile.ground import events
from lz_compile.lowering.kernels.sampling import cpp_sampling, torch_sampling
from lz_compile.lowering.ops import sampling as op
from lz_compile.runtime.kernels import registry

KERNELS = {"lz.cpp_sampling": cpp_sampling.sampling, "torch.sampling": torch_sampling.sampling}
LIMITS = ("bitmask", "bias", "temperature", "top_k", "top_p", "min_p")


def problem(rows, vocab, names, *, dtype=torch.float32, seed=0):
    """Operands by name, of which those in ``names`` and the logits are given."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return torch.rand(rows, generator=generator) * (high - low) + low

    words = -(-vocab // 32)
    operands = {
        "logits": (torch.randn(rows, vocab, generator=generator) * 3).to(dtype),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, words), generator=generator, dtype=torch.int32),
        "bias": torch.randn(1, vocab, generator=generator).to(dtype),
        "temperature": uniform(0.3, 2.0),
        "top_k": torch.randint(0, vocab + 1, (rows,), generator=generator, dtype=torch.int32),
        "top_p": uniform(0.05, 1.0),
        "min_p": uniform(0.0, 0.3),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
    }
    operands["bitmask"][:, 0] |= 1  # the first token is always allowed
    operands["temperature"][rows // 2] = 0
    return {name: operands[name] for name in ("logits", *names)}


def wide(operands):
    return {name: each.double() if each.is_floating_point() else each for name, each in operands.items()}


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=12, deadline=None)
@given(
    names=st.lists(st.sampled_from((*LIMITS, "seeds")), unique=True),
    vocab=st.sampled_from((1, 5, 32, 33, 100, 1000)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 2**20),
)
def test_kernels_draw_what_the_definition_draws(kernel, names, vocab, dtype, seed):
    names = [name for name in op.Operands.names if name in names]
    operands = problem(16, vocab, names, dtype=dtype, seed=seed)
    attrs = op.SamplingAttrs.of(operands, "ids", torch.float32)
    expected = op.reference(op.Operands(**wide(operands)), attrs)
    found = KERNELS[kernel](op.Operands(**operands), attrs)
    assert found.dtype == torch.int32
    assert found.tolist() == expected.tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("result", ["scores", "probs"])
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=8, deadline=None)
@given(
    names=st.lists(st.sampled_from(LIMITS), unique=True),
    vocab=st.sampled_from((1, 31, 64, 700)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**20),
)
def test_kernels_give_the_scores_and_probabilities_of_the_definition(kernel, result, names, vocab, dtype, seed):
    names = [name for name in op.Operands.names if name in names]
    operands = problem(8, vocab, names, dtype=dtype, seed=seed)
    attrs = op.SamplingAttrs.of(operands, result, dtype)
    expected = op.reference(op.Operands(**wide(operands)), op.SamplingAttrs.of(operands, result, torch.float64))
    found = KERNELS[kernel](op.Operands(**operands), attrs)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 0.1)
    assert torch.equal(
        found > (-math.inf if result == "scores" else 0), expected > (-math.inf if result == "scores" else 0)
    )


def distribution_of(tokens, vocab):
    return torch.bincount(tokens.flatten().long(), minlength=vocab).double()


def chi_square(counts, probabilities):
    """The statistic over what is likely enough to be expected five times, and its degrees of freedom."""
    expected = probabilities * counts.sum()
    usual = expected >= 5
    rest = ~usual
    found = ((counts - expected)[usual] ** 2 / expected[usual]).sum()
    if expected[rest].sum() >= 5:
        found += (counts[rest].sum() - expected[rest].sum()) ** 2 / expected[rest].sum()
        return float(found), int(usual.sum())
    return float(found), int(usual.sum()) - 1


def assert_drawn_from(tokens, probabilities):
    """Within six standard deviations of chi-square (Wilson and Hilferty's normal form), and never what is impossible."""
    counts = distribution_of(tokens, probabilities.numel())
    assert counts[probabilities == 0].sum() == 0
    statistic, freedom = chi_square(counts, probabilities)
    if freedom > 0:
        share = 2 / (9 * freedom)
        assert ((statistic / freedom) ** (1 / 3) - 1 + share) / math.sqrt(share) < 6


@pytest.mark.parametrize("kernel", ["lz.cpp_sampling", "torch.sampling"])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.7},
    ],
)
def test_draws_are_distributed_as_the_conditional_distribution(kernel, limits):
    generator = torch.Generator().manual_seed(1)
    vocab, rows = 50, 20_000
    logits = torch.randn(vocab, generator=generator) * 2
    allowed = torch.rand(vocab, generator=generator) < 0.6
    bias = torch.randn(vocab, generator=generator)
    with lz.lock("sampling", kernel):
        tokens = lz.sample(logits.expand(rows, -1), bitmask=pack(allowed), bias=bias, seeds=12345, **limits)
    z = (logits.double() + bias.double()) / limits.get("temperature", 1.0)
    p = torch.where(allowed, z.softmax(-1), 0.0)
    p = p / p.sum()
    if "top_k" in limits:
        p = torch.where(p >= p.sort(descending=True).values[limits["top_k"] - 1], p, 0.0)
        p = p / p.sum()
    if "top_p" in limits:
        ordered = p.sort(descending=True)
        keep = ordered.values.cumsum(-1) - ordered.values < limits["top_p"]
        p = torch.zeros_like(p).scatter(-1, ordered.indices[keep], p[ordered.indices[keep]])
    if "min_p" in limits:
        p = torch.where(p >= limits["min_p"] * p.max(), p, 0.0)
    assert_drawn_from(tokens, p / p.sum())


def test_consecutive_seeds_and_tokens_are_independent():
    """Neighbouring rows of seeds, and pairs of them, are uniform: no stream is another one shifted."""
    tokens = lz.sample(torch.zeros(40_000, 16), seeds=7)
    assert_drawn_from(tokens, torch.full((16,), 1 / 16, dtype=torch.float64))
    pairs = tokens[:-1].long() * 16 + tokens[1:]
    assert_drawn_from(pairs, torch.full((256,), 1 / 256, dtype=torch.float64))
    high = lz.sample(torch.zeros(40_000, 16), seeds=torch.arange(40_000) << 32)
    assert_drawn_from(high, torch.full((16,), 1 / 16, dtype=torch.float64))


def test_every_bit_of_a_mixed_seed_depends_on_every_bit_of_its_number():
    numbers = torch.randint(-(2**62), 2**62, (2_000,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(64)
    flipped = numbers[:, None] ^ (torch.ones((), dtype=torch.int64) << places)
    changed = op.mixed_seed(numbers)[:, None] ^ op.mixed_seed(flipped)
    share = ((changed[..., None] >> places[:62]) & 1).double().mean(0)  # [bit of the number, bit of the seed]
    assert 0.4 < share.min() <= share.max() < 0.6


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_draws_the_same_wherever_it_stands(kernel):
    logits, seeds = torch.randn(9, 300), torch.randint(0, 2**62, (9,))
    order = torch.randperm(9)
    with lz.lock("sampling", kernel):
        whole = lz.sample(logits, seeds=seeds, top_p=0.9)
        moved = lz.sample(logits[order], seeds=seeds[order], top_p=0.9)
        alone = [int(lz.sample(logits[i], seeds=seeds[i], top_p=0.9)) for i in range(9)]
    assert moved.tolist() == whole[order].tolist()
    assert alone == whole.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_read_operands_wherever_they_lie_in_memory(kernel, dtype):
    given = problem(6, 70, ("bitmask", "bias", "temperature", "top_p", "seeds"), dtype=dtype)
    given["bias"] = given["bias"][0]
    apart = {name: torch.stack((each, each), -1)[..., 0] for name, each in given.items()}
    columns = {name: each.T.contiguous().T if each.dim() == 2 else each for name, each in given.items()}
    with lz.lock("sampling", kernel):
        expected = lz.sample(**given)
        assert lz.sample(**apart).tolist() == lz.sample(**columns).tolist() == expected.tolist()


def test_seeds_are_drawn_where_none_are_given():
    logits = torch.randn(64, 100)
    torch.manual_seed(3)
    first = lz.sample(logits)
    second = lz.sample(logits)
    torch.manual_seed(3)
    assert torch.equal(lz.sample(logits), first)
    assert not torch.equal(first, second)
    drawn = [lz.sample(logits, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*drawn)


def test_temperature_zero_takes_the_likeliest_in_its_rows_alone():
    logits = torch.randn(1, 50).expand(200, 50)
    temperature = torch.ones(200)
    temperature[::2] = 0
    tokens = lz.sample(logits, temperature=temperature, seeds=0)
    assert set(tokens[::2].tolist()) == {int(logits[0].argmax())}
    assert len(set(tokens[1::2].tolist())) > 5
    probabilities = lz.sampling_probs(logits, temperature=temperature)
    assert probabilities[0].max() == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_equally_likely_tokens_are_kept_together(kernel):
    logits = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, -2.0]])
    with lz.lock("sampling", kernel):
        assert (lz.sampling_probs(logits, top_k=2) > 0).tolist() == [[True, False, True, False, True, False]]
        assert (lz.sampling_probs(logits, top_p=0.3) > 0).tolist() == [[True, False, True, False, True, False]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "logits",
    [[math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0], [-math.inf] * 3],
)
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_rows_without_a_distribution_are_refused_by_their_number(kernel, logits, limits):
    rows = torch.tensor([[0.0, 1.0, 2.0], logits])
    with lz.lock("sampling", kernel):
        with pytest.raises(ConstraintError, match=r"expected logits with.* in row 1"):
            lz.sample(rows, seeds=0, **limits)
        assert lz.sampling_probs(rows, **limits).isnan().all(-1).tolist() == [False, True]


def test_a_masked_nan_is_no_harm():
    logits = torch.tensor([[math.nan, 1.0, 2.0]])
    tokens = lz.sample(logits.expand(50, 3), bitmask=torch.tensor([6], dtype=torch.int32), seeds=0)
    assert set(tokens.tolist()) <= {1, 2}


@pytest.mark.parametrize("vocab", [31, 32, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_bitmask_is_applied_to_logits_of_any_shape(vocab, dtype):
    logits = torch.randn(2, 3, vocab).to(dtype)
    allowed = torch.rand(2, 3, vocab) < 0.5
    expected = logits.masked_fill(~allowed, -math.inf)
    assert torch.equal(lz.apply_token_bitmask(logits, pack(allowed)), expected)
    assert torch.equal(
        lz.apply_token_bitmask(logits, pack(allowed[0, 0])), logits.masked_fill(~allowed[0, 0], -math.inf)
    )
    assert lz.apply_token_bitmask(logits, torch.zeros(-(-vocab // 32), dtype=torch.int32)).max() == -math.inf


def test_domains_are_fused_at_once():
    vocab = 70
    logits = torch.randn(4, vocab, dtype=torch.float64)
    flags = [torch.rand(vocab) < 0.8, torch.rand(4, vocab) < 0.8]
    mask = DomainMask.from_bools(Domain.TYPES, torch.rand(vocab) < 0.9)
    scores = [torch.rand(vocab) * 2 - 1, torch.rand(4, vocab) * 2 - 1]
    soft = [*scores, DomainScore(Domain.SEMANTICS, scores[0], weight=0.5)]
    found = lz.domain_fusion(logits, [pack(flags[0]), flags[1], mask], soft, [1.0, -2.0, 3.0], temperature=0.5)
    together = flags[0] & flags[1] & torch.tensor([token in mask for token in range(vocab)])
    adjusted = logits + (scores[0].double() - 2 * scores[1].double() + 1.5 * scores[0].double()) / 0.5
    torch.testing.assert_close(found, adjusted.masked_fill(~together, -math.inf), rtol=1e-6, atol=1e-6)
    backwards = lz.domain_fusion(logits, [mask, flags[1], pack(flags[0])], soft, [1.0, -2.0, 3.0], temperature=0.5)
    assert torch.equal(found, backwards)


def test_gradients_flow_through_distributions_and_masks():
    logits = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(40, dtype=torch.float64, requires_grad=True)
    mask = pack(torch.rand(40) < 0.7)
    weights = torch.randn(3, 40, dtype=torch.float64)

    def run(logits, bias):
        probabilities = lz.sampling_probs(logits, temperature=0.7, top_k=9, bitmask=mask, bias=bias)
        return (probabilities * weights).sum()

    assert torch.autograd.gradcheck(run, (logits, bias), check_forward_ad=True)
    narrow = logits.detach().float()  # which kernels take that have no derivatives
    gradient = torch.func.grad(run)(narrow, bias.float())
    with events.collect() as happened:
        _, tangent = torch.func.jvp(lambda x: run(x, bias.float()), (narrow,), (narrow,))
    assert not happened  # no kernel was asked
    torch.testing.assert_close(tangent, (gradient * narrow).sum(), check_dtype=False)
    total = lz.apply_token_bitmask(logits, mask)
    (gradient,) = torch.autograd.grad(total[total > -math.inf].sum(), logits)
    assert torch.equal(gradient != 0, total > -math.inf)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: lz.sample(x.long()), r"expected logits \[\.\.\., V\] of floating-point numbers"),
        (lambda x: lz.sample(x[:, :0]), "over at least one token"),
        (lambda x: lz.sample(x, temperature=-1), "temperature as 0, or from 1e-06 to 1e\\+06, received -1"),
        (lambda x: lz.sample(x, temperature=math.nan), "temperature as 0, or from"),
        (lambda x: lz.sample(x, top_k=-1), "top_k as a whole number from 0"),
        (lambda x: lz.sample(x, top_p=0.0), "top_p as a finite number above 0, up to 1"),
        (lambda x: lz.sample(x, top_p=1.5), "top_p as a finite number above 0, up to 1"),
        (lambda x: lz.sample(x, min_p=2.0), "min_p as a finite number from 0 to 1"),
        (lambda x: lz.sample(x, temperature=torch.tensor([1.0, -1.0])), "temperature as 0, or from .* received -1"),
        (
            lambda x: lz.sample(x, temperature=torch.tensor([1.0, math.nan])),
            "temperature as 0, or from .* received nan",
        ),
        (lambda x: lz.sample(x, top_k=torch.tensor([1, -1])), "top_k as a whole number from 0"),
        (lambda x: lz.sample(x, top_k=torch.tensor([1.5, 2.5])), "top_k .*of integers, received torch.float32"),
        (lambda x: lz.sample(x, top_k=1.5), "top_k as a whole number .* received"),
        (
            lambda x: lz.sample(x, top_p=torch.tensor([0.0, 1.0])),
            "top_p as a finite number above 0, up to 1, received 0",
        ),
        (lambda x: lz.sample(x, min_p=torch.tensor([0.0, 1.5])), "min_p as a finite number from 0 to 1, received 1.5"),
        (lambda x: lz.sample(x, seeds=1.5), "seeds as a whole number or a tensor of int64, received 1.5"),
        (lambda x: lz.sample(x, top_p=torch.ones(3)), r"top_p as a number or of shape \[2\], received \[3\]"),
        (lambda x: lz.sample(x, seeds=torch.zeros(3, dtype=torch.int64)), r"seeds .* int64 of shape \[2\]"),
        (lambda x: lz.sample(x, seeds=torch.zeros(2)), "seeds .* int64"),
        (
            lambda x: lz.sample(x, bitmask=torch.zeros(2, dtype=torch.int32)),
            r"bitmask of words, of shape \[1\] or \[2, 1\]",
        ),
        (lambda x: lz.sample(x, bitmask=torch.zeros(1)), "bitmask of int32 words or booleans"),
        (lambda x: lz.sample(x, bias=torch.zeros(3)), "bias of shape"),
        (lambda x: lz.apply_token_bitmask(x, torch.zeros(1, dtype=torch.int64)), "int32 words or booleans"),
        (lambda x: lz.domain_fusion(x, soft=[torch.full((8,), 1.5)]), "soft with scores from -1 to 1, received 1.5"),
        (
            lambda x: lz.domain_fusion(x, soft=[torch.full((8,), math.nan)]),
            "soft with scores from -1 to 1, received nan",
        ),
        (lambda x: lz.domain_fusion(x, soft=[torch.zeros(8)], weights=[1, 2]), "weights as one for each of 1 scores"),
        (lambda x: lz.domain_fusion(x, temperature=0), "temperature as a finite number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ConstraintError, match=message):
        call(torch.randn(2, 8))


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "layerzero"])
def test_a_compiled_draw_is_the_same_draw(backend):
    logits = torch.randn(5, 200)
    mask = pack(torch.rand(5, 200) < 0.5)

    def step(logits, mask, seeds):
        return lz.sample(logits * 2, temperature=0.7, top_p=0.9, bitmask=mask, seeds=seeds)

    seeds = torch.arange(5)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert torch.equal(compiled(logits, mask, seeds), step(logits, mask, seeds))


def test_a_compiled_draw_takes_other_batches_without_another_compile():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, s: lz.sample(x, top_k=5, seeds=s), backend=counter)
    for rows in (3, 4, 7):
        logits, seeds = torch.randn(rows, 90), torch.arange(rows)
        torch._dynamo.mark_dynamic(logits, 0)
        torch._dynamo.mark_dynamic(seeds, 0)
        assert torch.equal(step(logits, seeds), lz.sample(logits, top_k=5, seeds=seeds))
    assert counter.frame_count == 1


# ---- speculation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_verified_tokens_are_distributed_as_the_target_draws_them(count):
    rows, vocab = 30_000, 6
    generator = torch.Generator().manual_seed(2)
    q = torch.rand(count, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    p = (torch.rand(count + 1, vocab, generator=generator, dtype=torch.float64) * 3).softmax(-1)
    drafted = (
        torch.stack([torch.multinomial(row, rows, replacement=True, generator=generator) for row in q], 1)
        if count
        else (torch.empty(rows, 0, dtype=torch.int64))
    )
    found = lz.speculative_verify(drafted, q.expand(rows, count, vocab), p.expand(rows, count + 1, vocab), seeds=0)
    assert found.tokens.dtype == torch.int32
    for place in range(count + 1):
        reached = found.accepted >= place
        assert_drawn_from(found.tokens[reached, place], p[place])  # steps are independent of each other here
        assert (found.tokens[~reached, place] == -1).all()
    overlap = torch.minimum(p[:count], q).sum(-1).cumprod(-1)
    for place in range(count):
        share = (found.accepted > place).double().mean()
        assert abs(float(share - overlap[place])) < 0.02


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_whole_sequences_are_distributed_as_the_target_draws_them(count):
    """Both models are Markov chains, so that rows differ in their drafts and distributions; what is left, the target draws."""
    rows, vocab = 30_000, 3
    generator = torch.Generator().manual_seed(count)
    p, q = (torch.randn(vocab, vocab, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))

    def follow(chain, token):
        return torch.multinomial(chain[token], 1, generator=generator)[:, 0]

    first = torch.zeros(rows, dtype=torch.int64)
    drafts = [first]
    for _ in range(count):
        drafts.append(follow(q, drafts[-1]))
    before = torch.stack(drafts, 1)
    found = lz.speculative_verify(before[:, 1:], q[before[:, :count]], p[before], seeds=torch.arange(rows) * 7919)
    sequence, last = [], first
    for place in range(count + 1):
        own = found.tokens[:, place].long()
        last = torch.where(own >= 0, own, follow(p, last))
        sequence.append(last)
    exact = p[0]
    for _ in range(count):
        exact = (exact[:, None] * p.repeat(exact.numel() // vocab, 1)).flatten()
    places = vocab ** torch.arange(count, -1, -1)
    assert_drawn_from((torch.stack(sequence, 1) * places).sum(-1), exact)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_one_pass_of_code_verifies_as_pytorch_does(count, greedy):
    rows, vocab = 200, 37
    generator = torch.Generator().manual_seed(count)
    q, p = (torch.randn(rows, count + more, vocab, generator=generator).mul(2).softmax(-1) for more in (0, 1))
    p[3, :, :] = 0
    p[3, :, 5] = 1  # all of the target on one token
    draws = [torch.multinomial(q[:, place], 1, generator=generator) for place in range(count)]
    drafted = torch.cat(draws, 1) if count else torch.empty(rows, 0, dtype=torch.int64)
    given = (drafted, None if greedy else q, p)
    seeds = torch.arange(rows) * 2**40 - 7
    bound = speculation._bind(given, True)
    assert bound.func is speculation._at_once
    assert bound.args[0](*given, seeds) is not None
    found = lz.speculative_verify(*given, seeds=seeds)
    for ours, theirs in zip(found, speculation._looked_at(True, *given, seeds), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_and_their_verification_may_share_seeds(count):
    """The last draw must not repeat the clocks of a draft that was refused: where they are the same, it avoids that token."""
    rows, vocab = 60_000, 5
    generator = torch.Generator().manual_seed(count)
    p, q = ((torch.rand(vocab, generator=generator, dtype=torch.float64) * 3).softmax(-1) for _ in range(2))
    for seeds in (17, torch.arange(rows) * 31 + 5):
        drafted = torch.stack([lz.sample(q.log().expand(rows, vocab), seeds=seeds) for _ in range(count)], 1)
        found = lz.speculative_verify(
            drafted, q.expand(rows, count, vocab), p.expand(rows, count + 1, vocab), seeds=seeds
        )
        assert_drawn_from(found.tokens[:, 0], p)  # the first one is not told by others
        assert_drawn_from(found.tokens[found.accepted == 0, 0], (p - q).clamp(min=0) / (p - q).clamp(min=0).sum())


def test_numbers_next_to_each_other_give_seeds_that_have_nothing_in_common():
    logits = torch.randn(1, 4000).expand(3000, 4000)
    first, second = (lz.sample(logits, seeds=step) for step in (8, 9))
    assert not torch.equal(first[1:], second[:-1])
    chance = float((torch.softmax(logits[0].double(), -1) ** 2).sum())  # that two draws are the same token
    for shift in range(3):
        same = (first[shift:] == second[: len(second) - shift]).double().mean()
        assert abs(float(same) - chance) < 5 * math.sqrt(chance / len(first))
    low, high = lz.sample(logits[:4], seeds=-(2**63)), lz.sample(logits[:4], seeds=2**63 - 1)
    assert not torch.equal(low, high)
    with pytest.raises(
        TokenArgumentError, match=r"seeds as a whole number that int64 holds, .* received 9223372036854775808"
    ):
        lz.sample(logits[:4], seeds=2**63)


def test_a_number_gives_the_same_seeds_in_compiled_code_without_another_compile():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x, s: lz.sample(x, seeds=s), backend=counter, fullgraph=True)
    logits = torch.randn(6, 300)
    for number in (3, 4, 2**40, -5):
        assert torch.equal(step(logits, number), lz.sample(logits, seeds=number))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("logits", "given", "message"),
    [
        (
            [3e38, 0.0],
            {"temperature": 0.5},
            "logits whose sum with bias, divided by temperature, is finite .*3e\\+38 in row 0",
        ),
        (
            [0.0, 1.0],
            {"bitmask": torch.zeros(1, dtype=torch.int32)},
            "bitmask that allows a token, received none in row 0",
        ),
        ([0.0, 1.0], {"bias": torch.tensor([math.nan, 0.0])}, "bias without NaN"),
        ([0.0, 1.0], {"temperature": math.inf}, "temperature as 0, or from 1e-06 to"),
        ([0.0, 1.0], {"temperature": 1e-38}, "temperature as 0, or from 1e-06 to"),
        ([0.0, 1.0], {"temperature": torch.tensor([1e-38])}, "temperature as 0, or from 1e-06 to"),
    ],
)
def test_a_row_without_a_token_to_draw_says_which_argument_is_why(logits, given, message):
    with pytest.raises(TokenArgumentError, match=message.replace("\\\\", "\\")):
        lz.sample(torch.tensor([logits]), seeds=0, **given)


def test_a_verification_is_the_same_wherever_its_row_stands():
    q, p = torch.randn(20, 3, 9).softmax(-1), torch.randn(20, 4, 9).softmax(-1)
    drafted = torch.stack([torch.multinomial(q[:, place], 1)[:, 0] for place in range(3)], 1)
    seeds, order = torch.arange(20) << 33, torch.randperm(20)
    whole = lz.speculative_verify(drafted, q, p, seeds=seeds)
    moved = lz.speculative_verify(drafted[order], q[order], p[order], seeds=seeds[order])
    assert torch.equal(moved.tokens, whole.tokens[order])
    assert torch.equal(moved.accepted, whole.accepted[order])


def test_a_greedy_draft_is_verified_exactly():
    rows, vocab = 30_000, 5
    p = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1], [0.2] * 5], dtype=torch.float64)
    found = lz.speculative_verify(torch.zeros(rows, 1, dtype=torch.int64), None, p.expand(rows, 2, vocab), seeds=11)
    assert_drawn_from(found.tokens[:, 0], p[0])
    assert abs(float(found.accepted.double().mean()) - 0.5) < 0.02


def test_equal_models_accept_everything():
    q = torch.rand(50, 4, 9).softmax(-1)
    drafted = torch.stack([torch.multinomial(q[:, place], 1)[:, 0] for place in range(4)], 1)
    found = lz.speculative_verify(drafted, q, torch.cat((q, q[:, :1]), 1), seeds=0)
    assert found.accepted.tolist() == [4] * 50
    assert torch.equal(found.tokens[:, :4].long(), drafted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), None, torch.zeros(2, 4, 5)), r"draft_tokens \[B, K\] of integers"),
        ((torch.zeros(2, 3).long(), None, torch.zeros(2, 3, 5)), r"target_probs \[B, K \+ 1, V\], at 4 places"),
        (
            (torch.zeros(2, 3).long(), torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)),
            r"draft_probs \[B, K, V\] of shape \(2, 3, 5\)",
        ),
        ((torch.zeros(2, 3).bool(), None, torch.zeros(2, 4, 5)), r"draft_tokens \[B, K\] of integers"),
        ((torch.zeros(2, 3).long(), None, torch.zeros(2, 4, 5).long()), "target_probs .*of floating-point numbers"),
        ((torch.zeros(2, 0).long(), None, torch.zeros(2, 1, 0)), "over at least one token"),
        ((torch.full((2, 3), 5), None, torch.zeros(2, 4, 5)), r"draft_tokens within 0\.\.4, received 5\.\.5"),
        ((torch.full((2, 3), -1), None, torch.zeros(2, 4, 5)), r"draft_tokens within 0\.\.4, received -1\.\.-1"),
        (
            (torch.zeros(2, 3).long(), torch.full((2, 3, 5), math.nan), torch.full((2, 4, 5), 0.2)),
            "draft_probs of probabilities, none negative, received nan",
        ),
        ((torch.zeros(2, 3).long(), torch.ones(2, 3, 5).long(), torch.full((2, 4, 5), 0.2)), "draft_probs .*floating"),
        (
            (torch.zeros(2, 3).long(), torch.tensor([0.0, 1.0]).expand(2, 3, 2), torch.full((2, 4, 2), 0.5)),
            r"draft_tokens that draft_probs gives a chance, received one without, at \[0, 0\]",
        ),
        ((torch.zeros(2, 3).long(), None, torch.full((2, 4, 5), 0.3)), "target_probs with rows that sum up to 1"),
        (
            (torch.zeros(2, 3).long(), None, torch.full((2, 4, 5), -0.5)),
            "target_probs of probabilities, none negative, received -0.5",
        ),
        (
            (torch.zeros(2, 3).long(), torch.full((2, 3, 5), math.nan), torch.ones(2, 4, 5)),
            "target_probs with rows that sum up to 1, received sums from 5",
        ),
    ],
)
def test_speculation_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConstraintError, match=message):
        lz.speculative_verify(*arguments)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"seeds .* int64 of shape \[2\]"),
        (torch.zeros(2), "seeds .* int64 of shape .* torch.float32"),
        (1.5, "seeds as a whole number or a tensor of int64, received 1.5"),
    ],
)
def test_speculation_from_what_is_no_seed_is_refused(seeds, message):
    with pytest.raises(ConstraintError, match=message):
        lz.speculative_verify(torch.zeros(2, 3).long(), None, torch.full((2, 4, 5), 0.2), seeds=seeds)


# ---- Triton ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("result", op.VARIANT_ATTRIBUTES)
@pytest.mark.parametrize(("backend", "arch", "warp"), [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
def test_triton_compiles_for_a_gpu(result, backend, arch, warp, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton, which compiles for a GPU without one")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton without its interpreter: unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lz_compile.lowering.kernels.sampling.triton_source import _sample

    flags = {name for name in _sample.arg_names if name.startswith(("HAS_", "IS_"))}
    constants = {**dict.fromkeys(flags, True), "RESULT": result, "BLOCK": 1024}
    pointers = {"logits": "*bf16", "mask": "*i32", "bias": "*bf16", "top_k": "*i32", "seeds": "*i64"}
    pointers |= {
        "temperature": "*fp32",
        "top_p": "*fp32",
        "min_p": "*fp32",
        "out": "*i32" if result == "ids" else "*fp32",
    }
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in _sample.arg_names}
    values = {(_sample.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(_sample, signature, values), target=GPUTarget(backend, arch, warp))
    assert compiled.asm["cubin" if backend == "cuda" else "hsaco"]


def test_every_kernel_of_the_op_is_tested_here():
    known = {spec.kernel_id for spec in registry.kernels("sampling").values()} - {"inductor"}
    libraries = {spec.kernel_id for spec in registry.kernels("sampling").values() if spec.package is not None}
    assert known - libraries == {*KERNELS, "lz.triton_sampling"}  # libraries: test_sampling_adapters.py


def test_random_bits_are_one_call_where_they_are_compiled():
    """Written out, Inductor computes what is mixed twice at every step: minutes for a verification."""
    probabilities = torch.rand(3, 3, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])

    def verified(seed):
        return lz.speculative_verify(tokens, probabilities[:, :2], probabilities, seeds=seed)

    for seeds in (7, torch.tensor([3, 1 << 40, -5])):
        torch._dynamo.reset()
        backend = torch._dynamo.testing.EagerAndRecordGraphs()
        found = torch.compile(verified, backend=backend, fullgraph=True)(seeds)
        called = {str(node.target) for graph in backend.graphs for node in graph.graph.nodes}
        assert "layerzero.random_bits.default" in called
        assert ("layerzero.mixed_seed.default" in called) == isinstance(seeds, int)
        for each, other in zip(found, verified(seeds), strict=True):
            assert torch.equal(each, other)
