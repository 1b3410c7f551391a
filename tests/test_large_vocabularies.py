"""Vocabularies up to 262,144 tokens, whose ids need more than 16 bits: fused, packed, masked, drawn, in batches of masks."""

from __future__ import annotations

import math

import pytest
import torch

import lz_compile as lz
from lz_compile.domains import Domain, DomainMask, DomainScore, FusionConfig, IntensityLevel, fuse
from lz_compile.domains.mask import ids_of, pack, unpack

#: What Gemma and multilingual models have, one more (a word with a single bit), and what is no multiple of 32.
SIZES = (131_073, 262_144, 262_145)
LARGEST = 262_144
HALF = 131_072
HARD = (Domain.SYNTAX, Domain.TYPES, Domain.IMPORTS)
KERNELS = ("lz.cpp_sampling", "torch.sampling")


def flags_of(size, share, seed=0):
    """Tokens that are allowed, with the first and the last among them."""
    allowed = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
    allowed[0] = allowed[-1] = True
    return allowed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_ids_bits_and_booleans_agree(size, share):
    allowed = flags_of(size, share)
    ids = allowed.nonzero().flatten()
    own = DomainMask.from_bools(Domain.SYNTAX, allowed)
    assert torch.equal(unpack(pack(allowed), size), allowed)
    assert torch.equal(DomainMask.from_ids(Domain.SYNTAX, ids.int(), size).words, own.words)
    assert torch.equal(own.ids, ids.int())
    assert torch.equal(ids_of(own.words, size), ids.int())
    assert (own.count, size - 1 in own, size in own) == (ids.numel(), True, False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_domains_are_fused(size, dtype):
    allowed = [flags_of(size, share, seed) for seed, share in enumerate((0.02, 0.5, 0.9))]
    scores = [torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 2 - 1 for seed in (7, 8)]
    masks = [DomainMask.from_bools(domain, flags) for domain, flags in zip(HARD, allowed, strict=True)]
    soft = [DomainScore(Domain.CONTROL_FLOW, scores[0], 0.5), DomainScore(Domain.SEMANTICS, scores[1])]
    result = fuse(masks, soft, FusionConfig(IntensityLevel.EXHAUSTIVE, soft_temperature=0.5))
    together = torch.stack(allowed).all(0)
    assert result.feasible_tokens.dtype == torch.int32
    assert torch.equal(result.feasible_tokens, together.nonzero().flatten().int())
    assert int(result.feasible_tokens[-1]) == size - 1
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(9)).to(dtype)
    exact = logits.double() + (0.5 * scores[0].double() + scores[1].double()) / 0.5
    wanted = exact.masked_fill(~together, -math.inf)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(result.apply(logits).double(), wanted, rtol=tolerance, atol=tolerance)
    batched = lz.domain_fusion(logits, masks, soft, temperature=0.5)
    torch.testing.assert_close(batched.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_batch_have_masks_of_their_own(size, kernel, dtype):
    allowed = torch.stack([flags_of(size, share, seed) for seed, share in enumerate((1e-4, 0.5, 1.0))])
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with lz.lock("sampling", kernel):
        found = lz.apply_token_bitmask(logits, pack(allowed))
        probabilities = lz.sampling_probs(logits, bitmask=pack(allowed), temperature=0.5)
    masked = logits.masked_fill(~allowed, -math.inf)
    assert torch.equal(found, masked)
    torch.testing.assert_close(probabilities.double(), torch.softmax(masked.double() / 0.5, -1), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{}, {"top_k": 200}, {"top_p": 0.9}])
def test_tokens_of_the_upper_half_are_drawn_as_often_as_they_should_be(dtype, limits):
    """Of two hundred tokens, equally likely, a hundred have ids above 131,072; nothing else is ever drawn."""
    rows, few = 64, torch.cat((torch.arange(100) * 1_300, HALF + 1 + torch.arange(100) * 1_310))
    logits = torch.full((LARGEST,), -30.0, dtype=dtype)
    logits[few] = 5.0
    logits[-1] = 40.0  # forbidden: the last bit of the last word
    allowed = torch.ones(LARGEST, dtype=torch.bool)
    allowed[-1] = False
    tokens = lz.sample(logits.expand(rows, -1), bitmask=pack(allowed), seeds=3, **limits)
    assert tokens.dtype == torch.int32
    assert set(tokens.tolist()) <= set(few.tolist())
    assert abs(int((tokens > HALF).sum()) - rows / 2) < 4 * math.sqrt(rows) / 2
    assert len(set(tokens.tolist())) > rows / 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_seed_draws_the_same_large_token_wherever_its_row_stands(kernel):
    allowed = torch.stack([flags_of(LARGEST, share, seed) for seed, share in enumerate((0.001, 0.1, 0.9, 0.5))])
    allowed[:, :HALF] = False
    logits = torch.randn(4, LARGEST, generator=torch.Generator().manual_seed(2))
    seeds = torch.tensor([1, 2**40, -5, 7])
    order = torch.tensor([2, 0, 3, 1])
    with lz.lock("sampling", kernel):
        whole = lz.sample(logits, bitmask=pack(allowed), seeds=seeds)
        moved = lz.sample(logits[order], bitmask=pack(allowed)[order], seeds=seeds[order])
        alone = [int(lz.sample(logits[i], bitmask=pack(allowed[i]), seeds=seeds[i])) for i in range(4)]
    assert whole.min() > HALF
    assert allowed.gather(-1, whole.long()[:, None]).all()
    assert moved.tolist() == whole[order].tolist()
    assert alone == whole.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{}, {"top_k": 1000}, {"top_p": 0.95}])
def test_kernels_draw_the_same_large_tokens(dtype, limits):
    logits = (torch.randn(3, LARGEST, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    mask = pack(torch.stack([flags_of(LARGEST, 0.4, seed) for seed in range(3)]))
    drawn = []
    for kernel in KERNELS:
        with lz.lock("sampling", kernel):
            drawn.append(lz.sample(logits, bitmask=mask, temperature=0.8, seeds=11, **limits).tolist())
    assert drawn[0] == drawn[1]


def test_speculation_accepts_and_draws_large_tokens():
    p = torch.full((16, 3, LARGEST), 1e-12)
    p[:, :, -1] = 0.5
    p[:, :, HALF + 3] = 0.5
    drafted = torch.full((16, 2), LARGEST - 1)
    found = lz.speculative_verify(drafted, None, p, seeds=0)
    assert set(found.tokens.unique().tolist()) == {-1, HALF + 3, LARGEST - 1}
    assert 0 < int(found.accepted.sum()) < 32
