"""Filters of scores before a draw: recognised however they are spelled, with the same results; others are refused by name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_spellings import AFTER, BEFORE, DROPS, MIN_P, TOP_K, TOP_P, Spelling, spellings
from tiers import examples
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as processors

import lz_compile as lz

KERNEL = "torch.sampling"
INF = math.inf


def compiled(function, *inputs, kernel=KERNEL, dynamic=None):
    """The result of a function with our kernel in it, of a seed, and what was reported."""
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": kernel})
    torch.manual_seed(1)
    given_ = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    found = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*given_)
    return found, backend


def check(function, *inputs, formula=None, kernel=KERNEL, dynamic=None, matches=1):
    """Assert that all of it is rewritten as ``matches`` ops, and that the results are the source's."""
    torch.manual_seed(1)
    expected = function(*(each.clone() if isinstance(each, torch.Tensor) else each for each in inputs))
    found, backend = compiled(function, *inputs, kernel=kernel, dynamic=dynamic)
    own = [match for match in backend.report.matches if match.op == "sampling"]
    assert [match.rewritten for match in own] == [True] * matches, backend.why_not()
    if formula is not None:
        assert own[-1].formula == formula
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    return own


def scores(*shape, dtype=torch.float32):
    torch.manual_seed(7)
    return (torch.randn(*shape) * 2).to(dtype)


def masks(*shape):
    torch.manual_seed(8)
    kept = torch.rand(*shape) < 0.7
    kept[..., 0] = True
    return kept


# ---- spellings -------------------------------------------------------------------------------------------------------

EACH = [
    *(Spelling("nothing", (("top_k", name),), "masked_fill", "scores") for name in TOP_K),
    *(Spelling("nothing", (("top_p", name),), "masked_fill", "softmax") for name in TOP_P),
    *(Spelling("nothing", (("min_p", name),), "where", "scores") for name in MIN_P),
    *(Spelling("nothing", (("top_k", "topk"),), name, "softmax") for name in DROPS),
    *(Spelling(name, (("top_k", "topk"),), "where", "softmax") for name in BEFORE),
    *(Spelling("temperature", (("top_k", "topk"), ("min_p", "scores")), "where", name) for name in AFTER),
]


@pytest.mark.parametrize("spelling", EACH, ids=str)
def test_every_spelling_is_rewritten(spelling):
    check(spelling, scores(3, 70), masks(3, 70))


@pytest.mark.slow
@settings(max_examples=examples(6, 40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(spellings(), st.sampled_from([(3, 70), (2, 3, 64), (1, 50), (4, 1, 33)]))
def test_chains_of_any_spellings_are_one_operation(spelling, shape):
    check(spelling, scores(*shape), masks(*shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    check(Spelling("nothing", (("top_k", "topk"),), "where", "softmax"), scores(3, 70, dtype=dtype), masks(3, 70))


def test_logits_in_half_precision_are_read_as_they_are():
    def function(logits):
        x = logits.float() / 0.7
        return x.masked_fill(x < x.topk(9).values[..., -1:], -INF).softmax(-1)

    (match,) = check(function, scores(3, 70, dtype=torch.bfloat16), formula="softmax(top_k(logits / 0.7, 9))")
    assert match.context["dtype"] == "bfloat16"


def test_another_dimension_than_the_last_one():
    def function(logits):
        least = logits.topk(9, dim=0).values[-1]
        return torch.where(logits < least, -INF, logits).softmax(0)

    check(function, scores(70, 3))


def test_one_row_without_a_dimension():
    def function(logits):
        return torch.where(logits < logits.topk(9).values[-1], -INF, logits).softmax(-1)

    check(function, scores(70))


# ---- as it is written elsewhere --------------------------------------------------------------------------------------


def written_over(logits):
    logits = logits[:, -1, :] / 0.8
    values, _ = torch.topk(logits, min(20, logits.size(-1)))
    logits[logits < values[:, [-1]]] = -float("Inf")
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)


def top_p_of_probabilities(logits):
    probs = torch.softmax(logits[:, -1] / 0.7, dim=-1)
    ordered, places = torch.sort(probs, dim=-1, descending=True)
    mask = torch.cumsum(ordered, dim=-1) - ordered > 0.8
    ordered[mask] = 0.0
    ordered.div_(ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(ordered).scatter_(-1, places, ordered)


def exponential_race(logits):
    logits = logits[:, -1] / max(0.9, 1e-5)
    pivot = torch.topk(logits, min(30, logits.size(-1)))[0].select(-1, -1).unsqueeze(-1)
    probs = F.softmax(torch.where(logits < pivot, -float("Inf"), logits), dim=-1)
    return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=True)


@pytest.mark.parametrize("function", [written_over, top_p_of_probabilities, exponential_race])
def test_decoding_steps_of_small_projects(function):
    check(function, scores(3, 2, 70))


def test_limits_that_differ_from_row_to_row():
    """One sort for top-k and top-p, in place, with a tensor of limits, as serving engines spell it."""

    def function(logits, k, p, t):
        logits = logits / t.unsqueeze(1)
        ordered, places = logits.sort(dim=-1, descending=False)
        least = ordered.gather(1, (ordered.size(1) - k.to(torch.long)).unsqueeze(dim=1))
        ordered.masked_fill_(ordered < least, -float("inf"))
        shares = ordered.softmax(dim=-1)
        total = torch.cumsum(shares, dim=-1, out=shares)
        dropped = total <= 1 - p.unsqueeze(dim=1)
        dropped[:, -1] = False
        ordered.masked_fill_(dropped, -float("inf"))
        return ordered.scatter(dim=-1, index=places, src=ordered)

    limits = torch.tensor([5, 9, 40]), torch.tensor([0.5, 0.9, 0.7]), torch.tensor([0.5, 1.0, 1.3])
    (match,) = check(function, scores(3, 70), *limits)
    assert match.attributes["has_temperature"]
    check(function, scores(3, 70), *limits, kernel="lz.cpp_sampling")


def test_the_processors_of_transformers_in_a_decoding_step():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 301}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)).eval()
    chain = processors.LogitsProcessorList(
        [
            processors.RepetitionPenaltyLogitsProcessor(1.2),
            processors.SuppressTokensLogitsProcessor([3, 5]),
            processors.TemperatureLogitsWarper(0.7),
            processors.TopKLogitsWarper(40),
            processors.TopPLogitsWarper(0.9),
            processors.MinPLogitsWarper(0.03),
        ]
    )

    @torch.no_grad()
    def step(ids):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1, :].to(copy=True, dtype=torch.float32)
        return torch.multinomial(F.softmax(chain(ids, logits), dim=-1), num_samples=1)

    (match,) = check(step, torch.randint(0, 301, (3, 9)))
    assert "min_p(top_p(top_k(" in match.formula


def test_masks_before_a_softmax_are_one_intersection():
    def function(logits, first, second, last):
        x = logits.masked_fill(~first, -INF)
        x = torch.where(second, x, -INF).masked_fill(last, -INF)
        return torch.multinomial(F.softmax(x / 0.8, dim=-1), 1)

    given_ = masks(3, 70), masks(70), ~masks(1, 70)
    (match,) = check(function, scores(3, 70), *given_, kernel="lz.cpp_sampling")
    assert match.formula == "softmax(logits / 0.8 where ~l_last_ and l_second_ and l_first_)"


def test_a_mask_of_bits():
    def function(logits, words):
        allowed = ((words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1).flatten(-2)[:, :70].bool()
        x = logits.masked_fill(~allowed, -INF)
        return torch.where(x < x.topk(9).values[..., -1:], -INF, x).softmax(-1)

    torch.manual_seed(3)
    (match,) = check(function, scores(3, 70), torch.randint(-(2**31), 2**31, (3, 3), dtype=torch.int32))
    assert match.attributes["has_bitmask"]


@pytest.mark.parametrize("share", [0.366, 0.3685, 0.37])
def test_a_limit_is_not_taken_for_another_number_that_is_near(share):
    """The exponential of -1, which says what the last dimension is, is 0.3679."""
    check(lambda x: x.masked_fill(TOP_P["least"](x, share), -INF), scores(3, 70), formula=f"top_p(logits, {share})")
    check(lambda x: x.masked_fill(MIN_P["scores"](x, share), -INF), scores(3, 70), formula=f"min_p(logits, {share})")


# ---- order -----------------------------------------------------------------------------------------------------------


def _top_k(x, k=9):
    return x.masked_fill(x < x.topk(k).values[..., -1:], -INF)


def _min_p(x, m=0.1):
    return x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(m), -INF)


def test_another_order_than_the_operations_is_two_operations():
    check(lambda x: _top_k(_min_p(x)).softmax(-1), scores(3, 70), matches=2)
    check(lambda x: (_top_k(x) / 0.7).softmax(-1), scores(3, 70), formula="top_k(logits, 9)")
    check(lambda x: _top_k(_top_k(x, 20), 9), scores(3, 70), matches=2)


@pytest.mark.parametrize("number", [-0.7, 0.0])
def test_a_number_that_is_no_temperature_stays_where_it_is(number):
    (match,) = check(lambda x: _top_k(x * number), scores(3, 70), formula="top_k(logits, 9)")
    assert not match.attributes["has_temperature"]


def test_scores_that_are_read_between_are_still_there():
    check(lambda x: (y := _top_k(x), _min_p(y).softmax(-1)), scores(3, 70), matches=2)
    check(lambda x: (y := x / 0.7, _top_k(y).softmax(-1)), scores(3, 70), formula="softmax(top_k(logits, 9))")
    check(lambda x: (y := _top_k(x), y.softmax(-1)), scores(3, 70), formula="top_k(logits, 9)")


def test_probabilities_that_are_read_otherwise_are_still_there():
    def function(x):
        probs = x.softmax(-1)
        kept = torch.where(probs < 0.1 * probs.amax(-1, keepdim=True), 0.0, probs)
        return kept / kept.sum(-1, keepdim=True), probs

    check(function, scores(3, 70), formula="softmax(min_p(logits, 0.1))")


def test_gradients_flow_through_what_is_kept():
    def function(x):
        return (_top_k(x * 2).softmax(-1) * torch.linspace(0, 1, 70)).sum()

    x, other = scores(3, 70).requires_grad_(), scores(3, 70).requires_grad_()
    function(x).backward()
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": KERNEL})
    torch.compile(function, backend=backend, fullgraph=True)(other).backward()
    assert backend.report.matches[0].rewritten, backend.why_not()
    torch.testing.assert_close(other.grad, x.grad)


# ---- sizes that are not known ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["upwards", "least"])
def test_any_batch_and_any_limit_without_another_compile(name):
    def function(logits, k, p):
        x = _top_k(logits, k)
        return x.masked_fill(TOP_P[name](x, p), -INF).softmax(-1)

    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": KERNEL})
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for rows, k, p in ((3, 9, 0.9), (5, 12, 0.8), (2, 30, 0.5)):
        x = scores(rows, 70)
        torch.testing.assert_close(run(x, k, p), function(x, k, p))
    assert len(backend.report.graphs) == 1
    assert backend.report.matches[0].rewritten, backend.why_not()


# ---- refusals --------------------------------------------------------------------------------------------------------


def typical(x):
    logs = F.log_softmax(x, -1)
    surprise = (-(logs * logs.exp()).sum(-1, keepdim=True) + logs).abs()
    ordered, places = torch.sort(surprise)
    count = (x.gather(-1, places).softmax(-1).cumsum(-1) < 0.9).sum(-1).clamp_(max=69)
    dropped = ordered > ordered.gather(1, count.view(-1, 1))
    return x.masked_fill(dropped.scatter(1, places, dropped), -INF)


def three_at_least(x):
    ordered, places = torch.sort(x)
    dropped = ordered.softmax(-1).cumsum(-1) <= 0.1
    dropped[..., -3:] = False
    return x.masked_fill(dropped.scatter(1, places, dropped), -INF)


def drawn_in_order(x):
    ordered, places = torch.sort(torch.softmax(x, -1), descending=True)
    ordered[torch.cumsum(ordered, -1) - ordered > 0.9] = 0.0
    ordered.div_(ordered.sum(-1, keepdim=True))
    return torch.gather(places, -1, torch.multinomial(ordered, num_samples=1))


def not_normalised(x):
    probs = x.softmax(-1)
    return torch.where(probs < 0.1 * probs.amax(-1, keepdim=True), 0.0, probs)


def finite(x):
    return x.masked_fill(x < x.topk(9).values[..., -1:], -1e9)


def in_half(x):
    x = x.bfloat16()
    probs = x.softmax(-1)
    return x.masked_fill(probs < 0.1 * probs.amax(-1, keepdim=True), -INF)


def read_inside(x):
    least = x.topk(9).values[..., -1:]
    return x.masked_fill(x < least, -INF), least


def written_back(x):
    """As vLLM filters, into what it was handed."""
    ordered, places = x.sort(-1)
    ordered.masked_fill_(ordered < ordered[..., -9:-8], -INF)
    return x.scatter_(-1, places, ordered).softmax(-1)


REFUSED = {
    written_back: "SCORES_WRITTEN_BACK",
    three_at_least: "LIMIT_UNKNOWN",
    drawn_in_order: "DRAWN_IN_ORDER",
    not_normalised: "NOT_NORMALISED",
    finite: "FILL_FINITE",
    in_half: "SUMS_IN_HALF",
    read_inside: "INTERIOR_USED",
}


@pytest.mark.parametrize(("function", "code"), REFUSED.items(), ids=lambda each: getattr(each, "__name__", each))
def test_what_is_not_taken_says_why(function, code):
    x = scores(3, 70)
    torch.manual_seed(1)
    expected = function(x.clone())
    found, backend = compiled(function, x)
    torch.testing.assert_close(found, expected)
    assert code in [miss.reason.code for miss in backend.report.near_misses], backend.why_not()
    assert not backend.report.matches


def _draw(x):
    return x.softmax(-1).multinomial(1)


def likely_enough(x):
    """Epsilon sampling."""
    return _draw(x.masked_fill(x.softmax(-1) < 0.01, -INF))


def without_the_likeliest(x):
    """XTC: of all that are likely enough, the least likely one stays."""
    ordered, places = x.softmax(-1).sort(-1, descending=True)
    over = ordered > 0.1
    dropped = over & torch.cat([over[:, 1:], torch.zeros_like(over[:, :1])], -1)
    return _draw(x.masked_fill(torch.zeros_like(dropped).scatter(-1, places, dropped), -INF))


def raced(x):
    """Probabilities that are dropped before a race of exponential clocks."""
    kept = x.softmax(-1) * (x > x.mean(-1, keepdim=True))
    clocks = torch.empty_like(kept)
    clocks.exponential_(1)
    return (kept / clocks).argmax(-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _draw(typical(x)),
        likely_enough,
        without_the_likeliest,
        raced,
        lambda x: _draw(least_likely(x)),
    ],
)
def test_a_draw_of_what_another_rule_keeps_is_told(function):
    x = scores(3, 70)
    torch.manual_seed(1)
    expected = function(x)
    torch.manual_seed(1)
    found, backend = compiled(function, x)
    torch.testing.assert_close(found, expected)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["FILTER_UNKNOWN"], backend.why_not()


def penalised(x):
    return _draw(torch.where(x < 0, x * 1.3, x / 1.3))


def of_words(x):
    return _draw(torch.where((torch.arange(70) % 3 > 0).roll(1), x, -INF) / 0.7)


def gumbel(x):
    return (x - torch.log(-torch.log(torch.rand_like(x)))).argmax(-1)


def greedy(x):
    return x.masked_fill(x < 0.3, -INF).argmax(-1)


@pytest.mark.parametrize("function", [penalised, of_words, gumbel, greedy], ids=lambda each: each.__name__)
def test_a_draw_that_drops_no_token_by_its_score_is_no_near_miss(function):
    _, backend = compiled(function, scores(3, 70))
    assert not backend.report.near_misses, backend.why_not()


def absolute(x):
    return x.masked_fill(x < 0.3, -INF).softmax(-1)


def least_likely(x):
    return x.masked_fill(x > x.topk(9, largest=False).values[..., -1:], -INF)


def normalised_by_the_largest(x):
    return (x / x.amax(-1, keepdim=True)).softmax(-1)


def of_another_row(x):
    return x.masked_fill(x < x.flip(0).topk(9).values[..., -1:], -INF)


def of_another_tensor(x):
    other = torch.linspace(-1, 1, 70).expand(3, 70)
    return x.masked_fill(other < other.topk(9).values[..., -1:], -INF)


def sparse_weights(x):
    weights, places = x.softmax(-1).topk(9)
    return weights / weights.sum(-1, keepdim=True), places


@pytest.mark.parametrize(
    "function",
    [typical, absolute, least_likely, normalised_by_the_largest, of_another_row, of_another_tensor, sparse_weights],
    ids=lambda each: each.__name__,
)
def test_what_only_looks_like_a_filter_is_left_alone(function):
    x = scores(3, 70)
    found, backend = compiled(function, x)
    torch.testing.assert_close(found, function(x))
    assert not backend.report.matches


def test_a_step_that_is_not_finite_stays_so():
    x = scores(4, 70)
    x[0, 3], x[1, 5], x[2] = math.nan, INF, -INF
    for function in (lambda y: _top_k(y / 0.7).softmax(-1), lambda y: _min_p(y).softmax(-1)):
        check(function, x)


class Experts(nn.Module):
    """A router that keeps the gates of a few experts, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)

    def forward(self, x):
        weights, places = self.gate(x).softmax(-1).topk(2, -1)
        return torch.zeros(*x.shape[:-1], 8).scatter(-1, places, weights / weights.sum(-1, keepdim=True))


def test_a_router_of_experts_gives_what_it_gave():
    x = scores(5, 16)
    with torch.no_grad():
        model = Experts()
        found, _backend = compiled(model, x)
        torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("vocab", [1024, 70])
@pytest.mark.parametrize("kernel", ["torch.sampling", "lz.cpp_sampling"])
def test_calls_of_the_functions_are_the_operation(kernel, vocab):
    """A vocabulary that fills its last word is proven at another size, one that does not at its own."""

    def function(logits, words, seeds):
        tokens = lz.sample(logits, temperature=0.8, top_k=5, bitmask=words, seeds=seeds)
        return tokens, lz.sampling_probs(logits, top_p=0.9), lz.apply_token_bitmask(logits, words)

    torch.manual_seed(4)
    words = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), dtype=torch.int32)
    given_ = scores(4, vocab), words, torch.arange(4)
    found, backend = compiled(function, *given_, kernel=kernel)
    assert [match.kernel for match in backend.report.matches] == [kernel] * 3, backend.why_not()
    assert not backend.report.events
    torch.testing.assert_close(found, function(*given_))


def test_a_call_that_is_left_alone_says_what_it_selects_and_where_it_is():
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": "inductor"})
    torch.compile(lambda logits: lz.sampling_probs(logits, top_p=0.9), backend=backend)(scores(4, 70))
    (match,) = backend.report.matches
    assert not match.rewritten
    assert "SELECTS_ITSELF" in [reason.code for reason in match.reasons]
    assert match.where.startswith(__file__)


# ---- what is not seen at a few rows, or is written where others look ---------------------------------------------------


def more_rows(x):
    dropped = (x < x.topk(9).values[..., -1:]).clone()
    dropped[20:] = False
    return x.masked_fill(dropped, -INF)


def one_row_of_many(x):
    values = x.topk(20).values
    is_other = (torch.arange(40) == 33)[:, None]
    return x.masked_fill(x < torch.where(is_other, values[:, 4:5], values[:, -1:]), -INF)


def bounded(x):
    y = x.clamp(-60, 60)
    return x.masked_fill(y < y.topk(9).values[..., -1:], -INF)


def rounded_shares(x):
    shares = (x.softmax(-1) + 1e-6).log()
    return x.masked_fill(shares < shares.topk(9).values[..., -1:], -INF)


def rounded_scores(x):
    y = (x / 1e4 + 1).half()
    return x.masked_fill(y < y.topk(9).values[..., -1:], -INF)


def dropped_out(x):
    return x.masked_fill(x < F.dropout(x, 0.5).topk(9).values[..., -1:], -INF)


def dropped_out_between(x):
    probs = x.softmax(-1)
    kept = F.dropout(torch.where(probs < probs.topk(9).values[..., -1:], 0.0, probs), 0.3)
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "function",
    [more_rows, one_row_of_many, bounded, rounded_shares, rounded_scores, dropped_out, dropped_out_between],
    ids=lambda each: each.__name__,
)
def test_what_a_few_rows_of_usual_scores_do_not_show_is_seen(function):
    x = scores(40, 70) * 40
    torch.manual_seed(1)
    expected = function(x)
    found, backend = compiled(function, x)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not backend.report.matches


def test_probabilities_divided_by_their_sum_are_followed():
    def top_k_of(probs):
        kept = torch.where(probs < probs.topk(9).values[..., -1:], 0.0, probs)
        return kept / kept.sum(-1, keepdim=True)

    check(lambda x: top_k_of(x.softmax(-1)), scores(3, 70), formula="softmax(top_k(logits, 9))")


def test_what_runs_into_its_limits_at_other_sizes_prints_nothing(capfd):
    def function(x):
        groups = x.view(-1, 8, 16).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(groups).scatter(1, groups.topk(4, -1).indices, 1.0)
        return x * kept.unsqueeze(-1).expand(-1, 8, 16).reshape(-1, 128)

    x = scores(3, 128)
    found, _backend = compiled(function, x)
    torch.testing.assert_close(found, function(x))
    assert "Traceback" not in capfd.readouterr().err


def written_by_another_name(x):
    shares = x.softmax(-1)
    total = torch.cumsum(shares, -1, out=shares)
    total.masked_fill_(total > 0.5, -1.0)
    return shares


def written_into_the_data(x):
    y = x * 2
    y.data.mul_(3)
    return y


def written_without_gradients(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def written_number_beyond_the_dtype(x):
    y = x.half() * 1
    y[y > 0] = -1e9
    return y


def written_with_a_wider_number(x):
    return x.sum().div_(torch.tensor(3.0, dtype=torch.float64))


def written_booleans(x):
    return (x * 1).logical_and_(x)


def written_every_other(x):
    return (x * 1)[:, ::2].mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        written_by_another_name,
        written_into_the_data,
        written_without_gradients,
        written_number_beyond_the_dtype,
        written_with_a_wider_number,
        written_booleans,
        written_every_other,
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_written_in_place_stays_where_a_new_value_would_differ(function):
    def with_an_order(x):
        return function(x), x.topk(2).values

    is_graded = function is written_without_gradients
    x = scores(3, 70).requires_grad_(is_graded)
    expected = with_an_order(x)
    torch._dynamo.reset()
    backend = Rewriting()
    found = torch.compile(with_an_order, backend=backend)(x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, check_stride=True)
        assert ours.requires_grad == theirs.requires_grad
    assert not backend.report.events


def test_many_writes_are_values_without_recursion():
    def function(x):
        y = x * 1
        for step in range(150):
            y.add_(step * 0.01)
        return y.masked_fill_(y < y.topk(9).values[..., -1:], -INF).softmax(-1)

    check(function, scores(3, 70))


def test_a_number_that_may_be_that_of_a_row_is_not_passed_over(monkeypatch):
    """Rows beyond those that can be tried may be treated otherwise: that is refused, and here it is so."""
    monkeypatch.setattr("lz_compile.passes.sampling.limits._MOST_SCORES", 500)

    def function(x):
        dropped = x < x.topk(9).values[..., -1:]
        dropped[50:] = False
        return x.masked_fill(dropped, -INF)

    x = scores(60, 70)
    found, backend = compiled(function, x)
    torch.testing.assert_close(found, function(x))
    assert "ROWS_UNKNOWN" in [miss.reason.code for miss in backend.report.near_misses]
    assert not backend.report.matches


def _filled_top_k(x):
    return x.masked_fill(x < x.topk(9).values[..., -1:], -torch.finfo(x.dtype).max).softmax(-1)


def _scattered_top_k(x):
    values, places = x.topk(9, -1)
    return torch.full_like(x, -INF).scatter(-1, places, values).softmax(-1)


@pytest.mark.parametrize("function", [_filled_top_k, _scattered_top_k])
def test_top_k_attention_is_no_sampling(function):
    def attention(query, key, value):
        return F.dropout(function(query @ key.mT * 0.3), 0.1, training=False) @ value

    inputs = [torch.randn(2, 3, length, 8) for length in (40, 70, 70)]
    backend = Rewriting()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    assert not [match for match in backend.report.matches if match.op == "sampling"]
    assert not [miss for miss in backend.report.near_misses if miss.op == "sampling"], backend.why_not()


def test_a_draw_by_weights_that_a_product_reads_as_well_is_sampling():
    def step(x, values):
        weights = _scattered_top_k(x)
        return torch.multinomial(weights, 1), weights @ values

    backend = Rewriting()
    torch.compile(step, backend=backend)(scores(3, 70), torch.randn(70, 5))
    assert [match.op for match in backend.report.matches] == ["sampling"], backend.why_not()
