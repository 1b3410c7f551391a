"""Tiles: which keys they have, what memory they take, and the operator that goes through them.

That it computes attention, and its gradients, is in test_kernels.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lz_compile import reports
from lz_compile.backend import layerzero
from lz_compile.ground import events
from lz_compile.lowering import cpp_builds
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.bands import Band, Reach
from lz_compile.lowering.kernels.attention import cpp_scores, tiled
from lz_compile.lowering.kernels.attention.bit_fills import fill_where
from lz_compile.lowering.kernels.attention.tiles import TILE_BYTES, Problem, Tile
from lz_compile.lowering.kernels.attention.token_major import Operands
from lz_compile.lowering.ops import attention as attention_op

WINDOW = AttentionAttrs(band=Band(-63, 0))


def problem(length: int, attrs: AttentionAttrs, *, batch: int = 1, heads: int = 2, **operands: Any) -> Problem:
    return Problem(Operands(*torch.randn(3, batch, length, heads, 16).unbind(), **operands), attrs)


def tiles(given: Problem) -> list[Tile]:
    return [tile for heads in given.heads() for tile in heads.tiles()]


def share(given: Problem) -> float:
    """Of all scores, those that are computed."""
    batch, queries, heads, _ = given.x.query.shape
    return sum(tile.memory("any", torch.float32).numel() for tile in tiles(given)) / (
        batch * heads * queries * given.x.key.shape[1]
    )


# ---- what happens to scores ------------------------------------------------------------------------------------------

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min, 1e30, -200.0, -87.4, 1e-40])


@pytest.fixture(params=["C++", "PyTorch"])
def scores_by(request, monkeypatch):
    """The two ways to a softmax and a soft cap of a tile; without a compiler it is PyTorch's, and an event says so."""
    if request.param == "C++":
        assert cpp_scores._functions(cpp_builds.vector_bits() // 32), "tests need a C++ compiler"
        yield
        return

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    cpp_scores._functions.cache_clear()
    monkeypatch.setattr(cpp_builds, "load_cpp", refuse)
    with events.collect() as happened:
        yield
    assert [event.code for event in happened] == ["TILES_WITHOUT_CPP"]
    cpp_scores._functions.cache_clear()


@pytest.mark.usefixtures("scores_by")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 5, 8), (2, 4, 41), (1, 40, 1000)])
def test_a_softmax_of_a_tile_is_one(shape: tuple[int, ...]) -> None:
    eighths = torch.randint(-300, 300, shape, generator=torch.Generator().manual_seed(0))  # whose differences are exact
    found, expected = eighths / 8, torch.softmax(eighths.double() / 8, -1)
    cpp_scores.softmax_(found)
    torch.testing.assert_close(found.double(), expected, rtol=8e-7, atol=1e-37)


@pytest.mark.usefixtures("scores_by")
@pytest.mark.parametrize("keys", [1, 7, 8, 9, 40])
def test_rows_that_are_not_finite_have_the_softmax_that_pytorch_gives_them(keys: int) -> None:
    rows = [torch.full((keys,), float(number)) for number in SPECIAL]  # of this alone
    for place in {0, keys // 2, keys - 1}:  # one among others
        for number in SPECIAL:
            rows.append(torch.linspace(-1, 1, keys))
            rows[-1][place] = number
    both = torch.linspace(-1, 1, keys)
    both[:: max(keys - 1, 1)] = torch.tensor([math.nan, -math.inf])[: len(both[:: max(keys - 1, 1)])]
    scores = torch.stack([*rows, both])[None].contiguous()
    expected, found = torch.softmax(scores, -1), scores.clone()
    cpp_scores.softmax_(found)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-37, equal_nan=True)


@pytest.mark.usefixtures("scores_by")
@pytest.mark.parametrize("count", [1, 8, 4005, 40005])
def test_a_cap_of_a_tile_is_one_to_a_few_units_in_the_last_place(count: int) -> None:
    scores = torch.cat([SPECIAL, torch.linspace(-600, 600, count), torch.logspace(-30, 2, count)])
    expected, found, tanhs = torch.tanh(scores.double() / 50), scores.clone(), torch.empty_like(scores)
    cpp_scores.cap_(found, 50.0, tanhs)
    torch.testing.assert_close(tanhs.double(), expected, rtol=5e-7, atol=1e-44, equal_nan=True)
    torch.testing.assert_close(found.double(), expected * 50, rtol=6e-7, atol=1e-43, equal_nan=True)
    assert not tanhs[~tanhs.isnan()].abs().max() > 1


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.float64])
def test_scores_are_capped_and_normalised_in_cpp_where_they_are_float32(score_dtype, monkeypatch):
    asked: list[str] = []
    function = cpp_scores._function

    def noted(name: str, scores: Tensor) -> Any:
        found = function(name, scores)
        asked.append(f"{name} {found is not None}")
        return found

    monkeypatch.setattr(cpp_scores, "_function", noted)
    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=score_dtype).unbind()
    tiled.attention(attention_op.Operands(query, key, value), AttentionAttrs(softcap=3.0, score_dtype=score_dtype))
    is_ours = score_dtype == torch.float32
    assert set(asked) == {f"cap {is_ours}", f"softmax {is_ours}"}


def test_a_tile_in_float64_has_its_softmax_and_its_cap_in_float64():
    scores = torch.randn(1, 3, 9, dtype=torch.float64)
    expected, tanhs = 2 * torch.tanh(scores / 2), torch.empty_like(scores)
    found = scores.clone()
    cpp_scores.cap_(found, 2.0, tanhs)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)
    cpp_scores.softmax_(found)
    torch.testing.assert_close(found, torch.softmax(expected, -1), rtol=1e-14, atol=0)


# ---- what is dropped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -math.inf, "least"])
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 7, 9), (1, 3, 1, 9), (2, 3, 7, 1)])
def test_scores_are_filled_by_bits_as_masked_fill_fills_them(dtype, value, shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, 7, 12, generator=generator).to(dtype)
    whole[0, 0, :, 3:6] = torch.tensor([math.nan, math.inf, -math.inf])
    number = torch.finfo(dtype).min if value == "least" else value
    mask = torch.rand(shape, generator=generator) > 0.5
    wanted = whole.clone()
    wanted[..., 2:11].masked_fill_(mask, number)
    fill_where(whole[..., 2:11], mask, number)
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kept", "may_be_empty"), [("some", False), ("all", False), ("none", True)])
def test_a_mask_over_keys_says_of_each_row_of_the_batch_whether_it_has_any(kept, may_be_empty):
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    mask[1] = {"all": torch.ones(64), "none": torch.zeros(64), "some": torch.arange(64) % 3 == 0}[kept].bool()
    given = problem(64, AttentionAttrs(has_mask=True, masked_rows="mean"), batch=2, mask=mask)
    assert {tile.may_be_empty for tile in tiles(given) if tile.heads.index == 1} == {may_be_empty}
    assert not any(tile.may_be_empty for tile in tiles(given) if tile.heads.index == 0)


# ---- what is skipped -------------------------------------------------------------------------------------------------


def test_a_window_leaves_out_the_keys_before_and_after_it():
    assert share(problem(4096, AttentionAttrs())) == 1.0
    assert share(problem(4096, AttentionAttrs(is_causal=True))) < 0.55
    assert share(problem(4096, WINDOW)) < 0.05


def test_documents_and_padding_leave_out_what_only_the_data_says():
    documents = (torch.arange(1024) // 128)[None]
    packed = problem(1024, AttentionAttrs(has_documents=True), query_documents=documents, key_documents=documents)
    assert share(packed) <= 0.25
    padding = (torch.arange(1024) < 100)[None, None, None]
    assert share(problem(1024, AttentionAttrs(has_mask=True), mask=padding)) == pytest.approx(100 / 1024)


@pytest.mark.parametrize(
    ("changes", "is_full"),
    [
        ({"masked_rows": "nan"}, False),
        ({"masked_rows": "zero"}, False),
        ({"masked_rows": "mean"}, False),
        ({"masked_rows": "mean", "dropout_p": 0.5}, True),
    ],
)
def test_a_row_without_keys_decides_what_may_be_left_out(changes, is_full):
    attrs = replace(AttentionAttrs(has_mask=True), **changes)
    mask = torch.zeros(1, 1, 300, 300, dtype=torch.bool)
    assert (share(problem(300, attrs, mask=mask)) == 1.0) is is_full


def test_a_tile_of_which_nothing_is_seen_has_one_key():
    attrs = AttentionAttrs(has_mask=True, reach=Reach(128, ((0, 0), (128, 200), (250, 256))))
    found = tiles(problem(384, attrs, mask=torch.ones(1, 1, 384, 384, dtype=torch.bool)))
    assert [(tile.keys.start, tile.keys.stop) for tile in found] == [(0, 1), (128, 200), (250, 256)]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 2048, 8192, 32768])
def test_a_tile_fits_into_the_caches_of_the_threads(length):
    largest = max(
        tile.memory("any", torch.float32).nbytes for tile in tiles(problem(length, AttentionAttrs(), heads=16))
    )
    fewest_rows = 16 * length * 4
    assert largest <= max(torch.get_num_threads() * TILE_BYTES, fewest_rows)


def test_what_all_tiles_share_grows_no_faster_than_the_sequence():
    def held(length: int) -> int:
        given = problem(length, AttentionAttrs(softcap=2.0), heads=1)
        for tile in tiles(given):
            tile.weights()
        return sum(tensor.nbytes for tensor in given._scratch.values())

    assert held(8192) <= 2.2 * held(4096)


# ---- the operator ----------------------------------------------------------------------------------------------------


def operands(attrs: AttentionAttrs, length: int = 40) -> tuple[Any, ...]:
    """What the operator takes, with everything that it knows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    tokens = (normal(2, length, 4, 8), normal(2, length, 2, 8), normal(2, length, 2, 6))
    floats = (normal(1, 4, length, length), normal(1, 4, 1, 1), normal(1, 4, 1, 1))
    documents = (torch.arange(length) // 10)[None]
    mask = torch.rand(2, 1, 1, length, generator=generator) < 0.9
    mask[..., ::10] = True
    seed = torch.rand(2, generator=generator)
    x = Operands(*tokens, *floats, mask, query_documents=documents, key_documents=documents, seed=seed, rows=8)
    return *x.flat(), encode(attrs)


ATTRS = AttentionAttrs(
    softcap=3.0, has_mask=True, has_bias=True, has_sinks=True, has_slopes=True, has_documents=True, bias_is_finite=True
)


@pytest.mark.parametrize("attrs", [ATTRS, replace(ATTRS, dropout_p=0.25)], ids=["plain", "dropout"])
def test_the_operator_is_what_pytorch_asks_of_one(attrs):
    torch.library.opcheck(torch.ops.layerzero.tiled_attention.default, operands(attrs))


def test_gradients_with_dropout_are_those_of_the_same_function():
    attrs = replace(ATTRS, dropout_p=0.25)
    given = [x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
             for x in operands(replace(attrs, score_dtype=torch.float64), 20)]  # fmt: skip
    place = Operands.names.index("seed")
    given[place] = given[place].detach()
    assert torch.autograd.gradcheck(torch.ops.layerzero.tiled_attention, given, fast_mode=True)


def test_attributes_survive_being_written_out():
    attrs = replace(ATTRS, band=Band(-3, None, at_end=True), reach=Reach(8, ((0, 4), (2, 9))), scale=0.1)
    assert decode(AttentionAttrs, encode(attrs)) == attrs


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped(seed: Tensor, dropout_p: float) -> Tensor:
    given = problem(256, AttentionAttrs(dropout_p=dropout_p), heads=4, seed=seed)
    noises = [tile.noise().clone() for tile in tiles(given)]  # type: ignore[union-attr]
    return torch.cat([noise.flatten() for noise in noises])


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_dropout_drops_its_share_and_keeps_the_mean(dropout_p):
    noise = dropped(torch.tensor([0.25, 0.75]), dropout_p)
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / noise.numel())
    assert abs((noise == 0).double().mean().item() - dropout_p) <= 5 * deviation + 2**-16
    if dropout_p < 1:
        assert abs(noise.double().mean().item() - 1) <= 5 * deviation / (1 - dropout_p) + 1e-6


def test_noise_depends_on_the_seed_and_on_the_tile():
    first, again = (dropped(torch.tensor([0.25, 0.75]), 0.5) for _ in range(2))
    other = dropped(torch.tensor([0.25, 0.5]), 0.5)
    assert torch.equal(first, again)
    assert abs((first == other).double().mean() - 0.5) < 0.02
    halves = first.view(2, -1)
    assert abs((halves[0] == halves[1]).double().mean() - 0.5) < 0.02


# ---- symbolic lengths ------------------------------------------------------------------------------------------------


def test_one_compiled_graph_skips_at_every_length():
    def window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = torch.arange(query.shape[2])
        keep = (positions <= positions[:, None]) & (positions > positions[:, None] - 64)
        return (query @ key.mT * 0.25).masked_fill(~keep, -math.inf).softmax(-1) @ value

    options = {"layerzero.lock": {"attention": "lz.tiled"}}
    compiled = torch.compile(window, backend=layerzero, dynamic=True, options=options)
    for length in (200, 300, 431):
        query, key, value = torch.randn(3, 1, 2, length, 16).unbind()
        torch.testing.assert_close(compiled(query, key, value), window(query, key, value), atol=1e-5, rtol=1e-5)
    (match,) = (match for report in reports() for match in report.matches)
    assert (match.kernel, match.rewritten) == ("lz.tiled", True)


@pytest.mark.parametrize("is_trained", [False, True])
def test_without_keys_results_and_gradients_are_zeros(is_trained):
    query, key, value = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 0, 8).unbind()
    operands = [each.requires_grad_(is_trained) for each in (query, key, value)]
    found = tiled.attention(attention_op.Operands(*operands), AttentionAttrs())
    torch.testing.assert_close(found, torch.zeros(1, 2, 5, 8))
    if is_trained:
        gradients = torch.autograd.grad(found, operands, torch.ones_like(found))
        torch.testing.assert_close(list(gradients), [torch.zeros_like(each) for each in operands])


@pytest.mark.parametrize("band", [None, Band(None, 0)], ids=["mask", "mask_and_band"])
def test_a_row_of_nan_that_masks_every_key_gives_queries_and_keys_no_gradient(band: Band | None) -> None:
    """As ``where`` gives none to what it drops; the values get NaN."""
    attrs = AttentionAttrs(has_mask=True, selects_masked=True, band=band)
    mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[..., 2, :] = False
    given = [each.requires_grad_() for each in torch.randn(3, 1, 2, 6, 4).unbind()]
    outcomes = []
    for function in (attention_op.reference, tiled.attention):
        result = function(attention_op.Operands(*given, mask=mask), attrs)
        outcomes.append([result, *torch.autograd.grad(result.sum(), given)])
    torch.testing.assert_close(*outcomes, equal_nan=True)
    assert not outcomes[1][1].isnan().any()
    assert outcomes[1][3].isnan().all()


@pytest.mark.parametrize("selects_masked", [True, False])
def test_a_key_of_nan_gives_no_gradient_to_keys_that_no_query_sees_beside_it(selects_masked: bool) -> None:
    attrs = AttentionAttrs(selects_masked=selects_masked, band=Band(-2, 0))
    query, key, value = torch.randn(3, 1, 2, 10, 4, generator=torch.Generator().manual_seed(0)).unbind()
    key[..., 3, :] = torch.nan
    given = [each.requires_grad_() for each in (query, key, value)]
    outcomes = []
    for function in (attention_op.reference, tiled.attention):
        result = function(attention_op.Operands(*given), attrs)
        outcomes.append([result, *torch.autograd.grad(result.sum(), given)])
    torch.testing.assert_close(*outcomes, equal_nan=True)
    assert not outcomes[1][2][..., 6:, :].isnan().any()
