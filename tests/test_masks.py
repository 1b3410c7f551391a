"""What masks mean: every class in many spellings, what is refused, and that nothing is claimed that is not so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from canonical import without_places
from hypothesis import HealthCheck, given, settings
from mask_oracle import DYNAMIC, HEADS, SIZES, Asked, Concrete, ask, asked, check, told
from mask_spellings import Recipe, build, inputs, recipes
from tiers import examples
from torch import Tensor, fx
from transformers import masking_utils

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Axis, fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks.meaning import Axes, Meaning
from lz_compile.passes.masks.reading import Masks

LOWEST = torch.finfo(torch.float32).min


# ---- the classes --------------------------------------------------------------------------------------------------


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries (a column) and keys (a row)."""
    return torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None]


def compared(x: Tensor) -> Tensor:
    query, key = rows(x)
    return key <= query


def filled_triangle(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), LOWEST).triu(1)


def one_minus_triangle(x: Tensor) -> Tensor:
    return (1.0 - torch.tril(torch.ones(x.shape[1], x.shape[1]))) * LOWEST


def infinity_times_ones(x: Tensor) -> Tensor:
    return torch.triu(torch.ones(x.shape[1], x.shape[1]) * -math.inf, diagonal=1)


def filled_where_zero(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1], x.shape[1])
    return torch.zeros_like(ones).masked_fill(ones.tril() == 0, -math.inf)


def in_place(x: Tensor) -> Tensor:
    mask = torch.empty(x.shape[1], x.shape[1])
    mask.fill_(-math.inf)
    mask.triu_(1)
    return mask


def in_place_by_comparison(x: Tensor) -> Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), LOWEST)
    columns = torch.arange(mask.size(-1))
    mask.masked_fill_(columns < (columns + 1).view(mask.size(-1), 1), 0)
    return mask.to(torch.float32)


def of_two_masks(x: Tensor) -> Tensor:
    query, key = rows(x)
    return torch.where(key > query, LOWEST, 0.0) + torch.where(key > query + 2, LOWEST, 0.0)


def after_a_cache(x: Tensor, past: Tensor) -> Tensor:
    before = past.shape[1]
    query, key = torch.arange(x.shape[1]) + before, torch.arange(x.shape[1] + before)
    return key[None, None, None] <= query[None, None, :, None]


def window_after_a_cache(x: Tensor, past: Tensor) -> Tensor:
    before = past.shape[1]
    query, key = torch.arange(before, before + x.shape[1])[:, None], torch.arange(x.shape[1] + before)
    return (key <= query) & (query - key < 3)


def around(x: Tensor) -> Tensor:
    query, key = rows(x)
    return (query - key).abs() <= 2


def padded(x: Tensor, padding: Tensor) -> Tensor:
    return compared(x) & padding.bool()[:, None, None, :]


def padded_twice(x: Tensor, padding: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    causal = torch.zeros(ones.shape).masked_fill(~ones.tril(), LOWEST)
    dropped = torch.zeros(padding.shape).masked_fill(padding == 0, LOWEST)
    return causal + dropped[:, None, None, :]


def only_padded(padding: Tensor) -> Tensor:
    return torch.where(padding[:, None, None, :] == 0, -math.inf, 0.0)


def padded_history(x: Tensor, past: Tensor, history: Tensor) -> Tensor:
    return after_a_cache(x, past) & history.ne(0)[:, None, None, :]


def packed(positions: Tensor) -> Tensor:
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence, tokens = jumps.cumsum(-1), positions.shape[1]
    batch = torch.arange(positions.shape[0])[:, None, None, None]
    query, key = torch.arange(tokens)[None, None, :, None], torch.arange(tokens)[None, None, None, :]
    same = sequence[batch, query] == sequence[batch, key]
    return (
        same
        & (positions[batch, key] <= positions[batch, query])
        & (positions[batch, key] > positions[batch, query] - 3)
    )


def packed_plainly(x: Tensor) -> Tensor:
    return packed(torch.arange(x.shape[1])[None].expand(x.shape[0], -1))


def of_ids(ids: Tensor) -> Tensor:
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


def chunked(x: Tensor) -> Tensor:
    query, key = rows(x)
    return (key <= query) & (key // 4 == query // 4)


def sloped(x: Tensor, slopes: Tensor) -> Tensor:
    return slopes[:, None, None] * torch.arange(x.shape[1])[None, None]


def sloped_backwards(x: Tensor, slopes: Tensor) -> Tensor:
    query, key = rows(x)
    return torch.where(key > query, -math.inf, -0.5 * slopes.view(1, -1, 1, 1) * (query - key).abs())


def sloped_by_constants(x: Tensor) -> Tensor:
    slopes = torch.pow(2.0, -torch.arange(1, HEADS + 1).float())
    relative = torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]
    return filled_triangle(x) + slopes[None, :, None, None] * relative


def sloped_by_counting(x: Tensor, slopes: Tensor) -> Tensor:
    tokens = torch.ones(x.shape[0], x.shape[1], dtype=torch.int64)
    places = ((tokens.cumsum(-1) - 1) * tokens)[:, None, :]
    return (slopes[..., None] * places).reshape(x.shape[0] * HEADS, 1, x.shape[1])


def of_ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)


def one_query(past: Tensor) -> Tensor:
    return torch.arange(past.shape[1] + 1)[None] <= torch.arange(1)[:, None] + past.shape[1]


def joined(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1], 2, dtype=torch.bool)
    query, key = rows(x)
    return torch.cat([ones, key <= query], dim=-1)


def of_a_transformer_layer(x: Tensor, padding: Tensor) -> Tensor:
    """As ``nn.Transformer`` and ``nn.MultiheadAttention`` make and merge masks."""
    tokens = x.shape[1]
    causal = (torch.triu(torch.ones(tokens, tokens)) == 1).transpose(0, 1)
    causal = causal.float().masked_fill(causal == 0, float("-inf")).masked_fill(causal == 1, 0.0)
    dropped = torch.zeros(padding.shape).masked_fill_(padding.bool(), float("-inf"))
    dropped = dropped.view(x.shape[0], 1, 1, tokens).expand(-1, HEADS, -1, -1).reshape(x.shape[0] * HEADS, 1, tokens)
    return causal.unsqueeze(0) + dropped


def chunked_by_transformers(x: Tensor, padding: Tensor) -> Tensor:
    left_padding = (padding.cumsum(-1) == 0).sum(-1)
    function = masking_utils.chunked_causal_mask_function(4, left_padding)
    return masking_utils.sdpa_mask(*x.shape, x.shape[1], mask_function=function, allow_is_causal_skip=False)


def windowed_by_transformers(x: Tensor, past: Tensor) -> Tensor:
    function = masking_utils.sliding_window_causal_mask_function(3)
    keys, before = x.shape[1] + past.shape[1], past.shape[1]
    return masking_utils.eager_mask(*x.shape, keys, q_offset=before, mask_function=function, dtype=torch.float32)


def around_by_transformers(x: Tensor) -> Tensor:
    function = masking_utils.sliding_window_bidirectional_mask_function(2)
    return masking_utils.sdpa_mask(*x.shape, x.shape[1], mask_function=function, allow_is_causal_skip=False)


def padded_by_an_outer_product(x: Tensor, padding: Tensor) -> Tensor:
    kept = padding.bool().float()
    return torch.einsum("bi,bj->bij", kept, kept)[:, None] > 0.5


def padded_by_a_product_of_matrices(x: Tensor, padding: Tensor) -> Tensor:
    kept = padding.bool().float()
    return torch.bmm(kept[:, :, None], kept[:, None, :]).unsqueeze(1).bool()


def rolled_and_back(x: Tensor) -> Tensor:
    query, key = rows(x)
    return (key <= query).roll((2, -1), (0, 1)).roll((-2, 1), (0, 1))


@dataclass(frozen=True)
class Case:
    """A mask and what it means."""

    make: Callable[..., Tensor]
    meaning: str
    layout: str = "qk"
    dynamic: str | None = None  # where that is another meaning
    keeps: bool = True


CASES = (
    Case(compared, "causal, ..0"),
    Case(filled_triangle, "causal, ..0"),
    Case(one_minus_triangle, "causal, ..0"),
    Case(infinity_times_ones, "causal, ..0"),
    Case(filled_where_zero, "causal, ..0"),
    Case(in_place, "causal, ..0"),
    Case(in_place_by_comparison, "causal, ..0"),
    Case(of_two_masks, "causal, ..0"),
    Case(after_a_cache, "causal, ..0 from the end", "11qk"),
    Case(window_after_a_cache, "sliding window, -2..0 from the end"),
    Case(around, "sliding window, -2..2"),
    Case(padded, "causal and key padding, ..0, bool_1", "b1qk"),
    Case(padded_twice, "causal and key padding, ..0, in part", "b1qk"),
    Case(only_padded, "key padding, not eq", "b11k"),
    Case(padded_history, "causal and key padding, ..0 from the end, ne", "b1qk"),
    Case(packed, "sliding window and document, -2..0, sequence = sequence", "b1qk"),
    Case(packed_plainly, "sliding window, -2..0", "b1qk"),
    Case(of_ids, "causal and document, ..0, l_ids_ = l_ids_", "b1qk"),
    Case(chunked, "causal and block, ..0, floordiv_1 = floordiv"),
    Case(sloped, "alibi, 1 * l_slopes_", "h1k"),
    Case(sloped_backwards, "causal and alibi, ..0, 0.5 * l_slopes_", "1hqk"),
    Case(sloped_by_constants, "causal and alibi, ..0, 1 * slopes", "1hqk"),
    Case(sloped_by_counting, "alibi, 1 * l_slopes_", "n1k"),
    Case(of_ones, "none", "b1qk"),
    Case(one_query, "none", "1k"),
    Case(of_a_transformer_layer, "causal and key padding, ..0, not bool_1", "nqk"),
    Case(chunked_by_transformers, "causal and document, ..0, floordiv_1 = floordiv", "b1qk"),
    Case(windowed_by_transformers, "sliding window, -2..0 from the end", "b1qk"),
    Case(around_by_transformers, "sliding window, -2..2", "b1qk"),
    Case(padded_by_an_outer_product, "query padding and key padding, bool_1, bool_1", "b1qk"),
    Case(padded_by_a_product_of_matrices, "query padding and key padding, bool_1, bool_1", "b1qk"),
    Case(rolled_and_back, "causal, ..0"),
)


#: Of sizes that are numbers a sample: symbolic ones are compared at more of them, the same code reads both.
READ = [
    pytest.param(case, dynamic, marks=() if dynamic or place % 4 == 0 else pytest.mark.thorough)
    for place, case in enumerate(CASES)
    for dynamic in (False, True)
]


@pytest.mark.parametrize(
    ("case", "dynamic"), READ, ids=lambda value: value.make.__name__ if isinstance(value, Case) else None
)
def test_a_mask_is_read_for_what_it_means(case: Case, dynamic: bool) -> None:
    question = asked(case.make, case.layout, dynamic=dynamic, keeps=case.keeps)
    (environment,) = {
        tensor.fake_mode.shape_env for tensor in map(tensor_of, question.module.graph.nodes) if tensor is not None
    }  # type: ignore[attr-defined]
    before = len(environment.guards)
    found = question.read()
    assert len(environment.guards) == before, "reading asks nothing of symbolic sizes"
    assert told(found) == ((case.dynamic if dynamic else None) or case.meaning)
    assert isinstance(found, Meaning)
    check(case.make, question, found, SIZES if dynamic else SIZES[:1])


def shifted_by_windows(x: Tensor) -> Tensor:
    """Row by row, a window of one vector, one step further back."""
    size = x.shape[1]
    return (torch.arange(2 * size - 1) < size).unfold(0, size, 1).flip(0)


def test_windows_of_one_vector_are_a_band() -> None:
    """PyTorch takes the size of a window for a number, so that there are no symbolic ones."""
    question = asked(shifted_by_windows)
    found = question.read()
    assert told(found) == "causal, ..0"
    assert isinstance(found, Meaning)
    check(shifted_by_windows, question, found, SIZES[:1])


def test_what_is_added_where_it_drops_is_told() -> None:
    found = [asked(fn).read() for fn in (compared, filled_triangle, infinity_times_ones, of_two_masks)]
    assert [(each.kept, each.dropped) for each in found if isinstance(each, Meaning)] == [
        (1.0, 0.0),
        (0.0, LOWEST),
        (0.0, -math.inf),
        (0.0, LOWEST),
    ]


def test_a_mask_of_true_where_it_drops_is_the_opposite() -> None:
    found = asked(compared, keeps=False, dynamic=True).read()
    assert told(found) == "le is a band under which a query may see no key"
    assert told(asked(lambda x: ~compared(x), keeps=False).read()) == "causal, ..0"


# ---- refusals -----------------------------------------------------------------------------------------------------


def infinity_times_zero(x: Tensor) -> Tensor:
    return torch.triu(torch.ones(x.shape[1], x.shape[1]), 1) * -math.inf


def whole_given(x: Tensor, given: Tensor) -> Tensor:
    return compared(x) & given if x.dim() == 3 else given & given


def biased(scores: Tensor) -> Tensor:
    return scores * 2


def different_heads(x: Tensor, slopes: Tensor) -> Tensor:
    return (slopes[:, None, None] * torch.arange(x.shape[1])) ** 2


def unknown_start(x: Tensor, start: Tensor) -> Tensor:
    query, key = rows(x)
    return key <= query + start


def strict(x: Tensor) -> Tensor:
    query, key = rows(x)
    return key < query


def prefixed(x: Tensor) -> Tensor:
    query, key = rows(x)
    return (key < 3) | (key <= query)


def blocks_before(x: Tensor) -> Tensor:
    query, key = rows(x)
    return key // 4 <= query // 4


def in_half_precision(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).to(torch.float16)
    return places[None] <= places[:, None]


def user_ones(padding: Tensor) -> Tensor:
    return (1.0 - padding.float()[:, None, None, :]) * LOWEST


def wrapping(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).to(torch.uint8)
    return places[:, None] - places[None] >= 0


def nothing(x: Tensor) -> Tensor:
    query, key = rows(x)
    return (key < query) & (key > query)


def written_after_use(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    used = mask.float()
    mask.fill_(True)
    return mask, used


@pytest.mark.parametrize(
    ("make", "text", "layout", "dynamic"),
    [
        (infinity_times_zero, "mul holds NaN", "qk", False),
        (whole_given, "and_ depends on l_given_, which only data tell", "b1qk", True),
        (biased, "mul is a bias that is no mask and not linear in the distance", "b1qk", True),
        (different_heads, "pow is a bias that is no mask and not linear in the distance", "h1k", True),
        (unknown_start, "le depends on l_start_, which only data tell", "qk", True),
        (strict, "lt is a band under which a query may see no key", "qk", True),
        (prefixed, "or_ is no conjunction of a band, padding and documents", "qk", True),
        (blocks_before, "le is no conjunction of a band, padding and documents", "qk", True),
        (in_half_precision, "le is no function of positions that is understood", "qk", True),
        (user_ones, "mul is a bias that is no mask and not linear in the distance", "b11k", True),
        (wrapping, "ge is no function of positions that is understood", "qk", True),
        (nothing, "and_ drops everything", "qk", True),
        (written_after_use, "mask is overwritten in place after it is used", "qk", True),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_not_proven_is_refused(make: Callable[..., Any], text: str, layout: str, dynamic: bool) -> None:
    found = asked(make, layout, dynamic=dynamic).read()
    assert isinstance(found, Reason), told(found)
    assert without_places(found.message) == text


# ---- reading once -------------------------------------------------------------------------------------------------


def test_a_mask_that_layers_share_is_read_once() -> None:
    question = asked(padded, "b1qk")
    effects = Effects(question.module.graph)
    masks = Masks(effects)
    first = masks.read(question.node, question.dims, question.axes)
    groups = [tuple(Axis(axis.size) for axis in group) for group in question.axes.groups]
    others = dict(zip([a for g in question.axes.groups for a in g], [a for g in groups for a in g], strict=True))
    dims = tuple(tuple(others[axis] for axis in dim) for dim in question.dims)
    start = time.perf_counter()
    with effects.watched() as look:
        again = masks.read(question.node, dims, Axes(*groups))
    assert time.perf_counter() - start < 1e-3
    assert isinstance(first, Meaning)
    assert isinstance(again, Meaning)
    assert [axis for dim in again.flags[0].dims for axis in dim] == [*groups[0], *groups[3]]
    assert question.node in look.nodes
    assert len(look.nodes) > 5


def test_axes_that_are_cut_later_leave_what_was_read_alone() -> None:
    question = asked(padded, "b1qk")
    masks = Masks(Effects(question.module.graph))
    masks.read(question.node, question.dims, question.axes)
    (keys,) = question.axes.keys
    keys.parts = (Axis(1), Axis(keys.size))
    again = masks.read(question.node, question.dims, question.axes)
    assert told(again) == "causal and key padding, ..0, bool_1"


# ---- axes ---------------------------------------------------------------------------------------------------------


def test_heads_and_queries_may_be_several_axes() -> None:
    def grouped(x: Tensor, padding: Tensor) -> Tensor:
        mask = padded(x, padding)[:, :, None].expand(-1, 2, 3, -1, -1)
        return mask.reshape(x.shape[0], 6, x.shape[1] * x.shape[1])

    question = ask(grouped, {"x": torch.zeros(3, 8), "padding": torch.ones(3, 8)}, "bhk")
    batch, heads, kv_heads = Axis(3), Axis(3), Axis(2)
    above, below, keys = Axis(2), Axis(4), Axis(8)
    dims = ((batch,), (kv_heads, heads), (above, below, keys))
    axes = Axes((batch,), (kv_heads, heads), (above, below), (keys,))
    found = Masks(Effects(question.module.graph)).read(question.node, dims, axes)
    assert told(found) == "causal and key padding, ..0, bool_1"
    assert isinstance(found, Meaning)
    assert found.flags[0].dims == ((batch,), (keys,))


def test_a_mask_of_other_axes_is_refused() -> None:
    question = asked(compared)
    found = Masks(Effects(question.module.graph)).read(question.node, ((Axis(7),), (Axis(7),)), question.axes)
    assert told(found) == "le has axes that scores have not"


@pytest.mark.parametrize("is_one_row", [True, False])
def test_positions_of_other_rows_say_nothing_of_a_document(is_one_row: bool) -> None:
    """Jumps are counted along the first dimension, so that the row of the batch comes after it."""
    other = 1 if is_one_row else 0

    def make(places: Tensor) -> Tensor:
        document = (torch.diff(places, prepend=places[:1] - 1, dim=0) != 1).cumsum(0).t()
        same = document[:, None, :, None] == document.unsqueeze(other)[:, :, None]
        return same & (places.t().unsqueeze(other)[:, :, None] <= places.t()[:, None, :, None])

    rows = [[0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [0, 1, 0, 1, 0, 1, 2]]
    question = ask(make, {"places": torch.tensor(rows).t()}, "bhqk")
    batch, heads, queries, keys = question.axes.groups
    axes = Axes((*batch, *heads), (), queries, keys)
    found = Masks(Effects(question.module.graph)).read(question.node, question.dims, axes)
    whole = "causal and document, ..0, cumsum = cumsum"
    assert told(found) == (whole if is_one_row else "and_ depends on l_places_, which only data tell")


# ---- models -------------------------------------------------------------------------------------------------------


def attention_masks(name: str, attention: str, *, dynamic: bool) -> list[tuple[Asked, list[Any]]]:
    """The masks of a model's attentions, with the arguments of its graph."""
    model, tensors = zoo.family(name).build(attention)
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((graph, [each.node.hint if isinstance(each, torch.SymInt) else each for each in given]))
        return graph

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic)(**tensors)
    found: dict[fx.Node, tuple[Asked, list[Any]]] = {}
    for graph, given_ in graphs:
        for call in graph.graph.nodes:
            if call.target is not F.scaled_dot_product_attention:
                continue
            mask = call.kwargs.get("attn_mask")
            if mask is not None and mask not in found:
                found[mask] = (_of_call(graph, call, mask), given_)
    return list(found.values())


def _of_call(graph: fx.GraphModule, call: fx.Node, mask: fx.Node) -> Asked:
    batch, heads, queries, _ = fresh(shape_of(tensor_of(call.args[0])))  # type: ignore[arg-type]
    keys = fresh(shape_of(tensor_of(call.args[1])))[2]  # type: ignore[arg-type]
    groups = (batch, heads, queries, keys)
    dims = tuple(() if size == 1 else group for size, group in zip(shape_of(tensor_of(mask)), groups, strict=True))  # type: ignore[arg-type]
    return Asked(graph, mask, dims, Axes(*groups), True)


@pytest.mark.parametrize(
    ("name", "dynamic", "meanings"),
    [
        pytest.param("llama", False, ["causal, ..0"], marks=pytest.mark.thorough),
        ("llama", True, ["causal, ..0"]),
        ("llama_left_padded", True, ["causal and key padding, ..0, attention_mask"]),
        ("llama_packed", True, ["causal and document, ..0, packed_sequence_mask = packed_sequence_mask"]),
        ("llama_chunk", True, ["causal, ..0 from the end"]),
        ("mistral_decode", False, ["sliding window, -6.. from the end"]),
        (
            "modernbert",
            False,
            ["sliding window and key padding, -4..4, attention_mask_2", "key padding, attention_mask"],
        ),
    ],
)
def test_masks_of_models_are_what_they_are_called(name: str, dynamic: bool, meanings: list[str]) -> None:
    found = attention_masks(name, "sdpa", dynamic=dynamic)
    assert [told(question.read()) for question, _ in found] == meanings
    for question, arguments in found:
        meaning = question.read()
        assert isinstance(meaning, Meaning)
        known = {
            node.meta["example_value"].node.expr: value
            for node, value in zip(
                [n for n in question.module.graph.nodes if n.op == "placeholder"], arguments, strict=True
            )
            if isinstance(node.meta["example_value"], torch.SymInt)
        }
        Concrete(question, arguments, known).check(meaning)


# ---- any mask -----------------------------------------------------------------------------------------------------


def agrees(recipe: Recipe) -> None:
    """What is claimed of a recipe's mask is so at every size, and of a plain one all of it is claimed."""
    question = ask(
        build(recipe),
        inputs(recipe, *SIZES[0]),
        recipe.layout,
        dynamic=DYNAMIC if recipe.dynamic else False,
        keeps=recipe.keeps,
    )
    found = question.read()
    if isinstance(found, Reason):
        assert not recipe.must_be_exact, found.message
        return
    assert found.is_exact or not recipe.must_be_exact, told(found)
    for seed, sizes in enumerate(SIZES if recipe.dynamic else SIZES[:1]):
        Concrete.of(question, inputs(recipe, *sizes, seed=seed)).check(found)


drawn = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@settings(drawn, max_examples=examples(30, 80))
@given(recipes())
def test_any_mask_means_what_it_computes(recipe: Recipe) -> None:
    agrees(recipe)
