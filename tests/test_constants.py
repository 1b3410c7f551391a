"""Masks of constants and buffers: read by their values where the graph alone does not tell what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from canonical import without_places
from graphs import capture, effects_of, output_of
from mask_oracle import SIZES, asked, check, told
from torch import Tensor, fx, nn

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.expressions import Known
from lz_compile.passes.formula.polynomial import ZERO, Variable, number, variable
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks import constant_patterns, constants
from lz_compile.passes.masks.constants import Constants, evaluate
from lz_compile.passes.masks.meaning import Axes, Meaning
from lz_compile.passes.masks.reading import Masks

LOWEST = torch.finfo(torch.float32).min


class Buffered(nn.Module):
    """A mask sliced from a registered buffer, as GPT-2 had it."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask[None, None])

    def forward(self, x: Tensor) -> Tensor:
        """The part for the tokens of ``x``, additive."""
        tokens = x.shape[1]
        return torch.where(self.mask[:, :, 3 : 3 + tokens, : 3 + tokens], 0.0, LOWEST)


def read_inside(module: nn.Module, *arguments: Tensor, dynamic: bool) -> tuple[Meaning | Reason, list[str]]:
    """What the result of a module means, read while it is compiled, and the buffers that this rests on."""
    found: list[Any] = []

    def backend(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        node = output_of(graph)
        dims = fresh(shape_of(tensor_of(node)))  # type: ignore[arg-type]
        meaning = Masks(Effects(graph.graph)).read(node, dims, Axes(*dims))
        found.extend([meaning, [] if isinstance(meaning, Reason) else [each.name for each in meaning.buffers]])
        return graph

    torch.compile(module, backend=backend, dynamic=dynamic)(*arguments)
    return found[0], found[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_buffer_is_read_by_its_values(dynamic: bool) -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril().triu(-5)
    found, buffers = read_inside(Buffered(mask), torch.zeros(2, 9), dynamic=dynamic)
    assert told(found) == "sliding window, -5..0 from the end"
    assert buffers == ["l_self_buffers_mask_"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_value_of_a_buffer_makes_the_difference(dynamic: bool) -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    mask[5, 8] = True
    found, _ = read_inside(Buffered(mask), torch.zeros(2, 9), dynamic=dynamic)
    assert isinstance(found, Reason) or not found.is_exact


def test_a_mask_whose_writes_are_missed_is_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value by what takes part in it is held against all constant calls ahead, in their order."""

    def made(x: Tensor) -> Tensor:
        mask = torch.zeros(9, 9)
        corner = mask[:4]
        corner[:, 4:] = -100.0
        return mask + 0.0

    graph = capture(made, torch.zeros(2, 9))
    node, effects = output_of(graph), effects_of(graph)
    found = evaluate(effects, node)
    assert isinstance(found, Known)
    assert torch.equal(found.value, made(torch.zeros(2, 9)))
    monkeypatch.setattr(constants, "_writers", lambda *_: iter(()))
    missed = evaluate(effects, node)
    assert isinstance(missed, Reason)
    assert "writes to memory" in missed.message
    monkeypatch.setattr(Effects, "writes_made", property(lambda _: ()))
    missed = evaluate(effects, node)
    assert isinstance(missed, Reason)
    assert "is another one if all that is constant before it is computed" in missed.message


def scattered(x: Tensor) -> Tensor:
    mask = torch.zeros(200, 200 + 0 * x.shape[1], dtype=torch.bool)
    mask[:100, :100] = True
    mask[100:, 100:] = True
    return mask


def of_a_prefix(x: Tensor) -> Tensor:
    query, key = torch.arange(200)[:, None], torch.arange(200)[None]
    return torch.logical_or(key < 10 + 0 * x.shape[1], key <= query)


def in_blocks(x: Tensor) -> Tensor:
    query, key = torch.arange(200 + 0 * x.shape[1])[:, None], torch.arange(200)[None]
    return key // 64 == query // 64


@pytest.mark.parametrize(
    ("make", "meaning"),
    [
        (in_blocks, "block, floordiv_1 = floordiv, reach ((0, 64), (64, 128), (128, 192), (192, 200))"),
        (scattered, "mask, reach ((0, 100), (0, 200), (100, 200), (100, 200)), in part"),
        (of_a_prefix, "prefix, reach ((0, 64), (0, 128), (0, 192), (0, 200)), in part"),
    ],
)
def test_of_a_constant_mask_it_is_told_how_far_it_reaches(make: Callable[..., Tensor], meaning: str) -> None:
    question = asked(make)
    found = question.read()
    assert told(found) == meaning
    assert isinstance(found, Meaning)
    check(make, question, found, SIZES[:1])


def without_the_last_key_of_the_first_query(x: Tensor) -> Tensor:
    mask = torch.ones(7, 9 + 0 * x.shape[1], dtype=torch.bool)
    mask[0, 8] = False
    return mask


def without_the_first_key_of_the_last_query(x: Tensor) -> Tensor:
    mask = torch.ones(7, 9 + 0 * x.shape[1], dtype=torch.bool)
    mask[6, 0] = False
    return mask


@pytest.mark.parametrize(
    ("make", "meaning"),
    [
        (without_the_last_key_of_the_first_query, "sliding window, ..7"),
        (without_the_first_key_of_the_last_query, "sliding window, -5.."),
    ],
)
def test_a_constant_drops_a_single_corner(make: Callable[..., Tensor], meaning: str) -> None:
    question = asked(make)
    found = question.read()
    assert told(found) == meaning
    assert isinstance(found, Meaning)
    check(make, question, found, SIZES[:1])


def test_a_mask_of_any_size_is_not_computed_to_be_read() -> None:
    def huge(x: Tensor) -> Tensor:
        query, key = torch.arange(2**20 + 0 * x.shape[1])[:, None], torch.arange(2**20)[None]
        return (key <= query) & (query - key < 256)

    assert told(asked(huge).read()) == "sliding window, -255..0"


def test_numbers_beyond_what_a_float_holds_are_no_positions() -> None:
    def rounded(x: Tensor) -> Tensor:
        places = torch.arange(3000 + 0 * x.shape[1], dtype=torch.float16)
        return places[None] <= places[:, None]

    def held(x: Tensor) -> Tensor:
        places = torch.arange(2000 + 0 * x.shape[1], dtype=torch.float16)
        return places[None] <= places[:, None]

    assert told(asked(held).read()) == "causal, ..0"
    found, real = asked(rounded).read(), rounded(torch.zeros(3, 7))
    assert not torch.equal(real, torch.ones_like(real).tril())
    assert isinstance(found, Reason) or not found.is_exact


# ---- evaluation ---------------------------------------------------------------------------------------------------


def valued(fn: Callable[..., Tensor], *arguments: Tensor, dynamic: bool = False) -> Known | Reason:
    module = capture(fn, *arguments, dynamic=dynamic)
    return evaluate(effects_of(module), output_of(module))


def written_once(x: Tensor) -> Tensor:
    """A mask of which a part was written in place."""
    mask = torch.zeros(x.shape[1], 4)
    mask[1:, 0] = 2
    return torch.kron(mask, torch.ones(1, 2)).cumsum(0)


def written_and_read_twice(x: Tensor) -> Tensor:
    """The mask of shifted windows: numbers of regions, written in place, then compared with each other."""
    regions = torch.zeros(x.shape[1], 4)
    regions[1:, :2] = 1
    regions[1:, 2:] = 2
    regions = regions.view(-1)
    distance = regions[None] - regions[:, None]
    return distance.masked_fill(distance != 0, -100.0).masked_fill(distance == 0, 0.0)


@pytest.mark.parametrize("make", [written_once, written_and_read_twice])
def test_what_constants_make_is_computed(make: Callable[..., Tensor]) -> None:
    found = valued(make, torch.zeros(2, 3))
    assert isinstance(found, Known)
    assert torch.equal(found.value, make(torch.zeros(2, 3)))


@pytest.mark.parametrize(
    ("make", "text", "dynamic"),
    [
        (lambda x: torch.ones(3) + x, "l_x_ is an input", False),
        (lambda x: torch.rand(x.shape[1], 3), "rand is rand", False),
        (lambda x: torch.empty(x.shape[1], 3) * 0, "empty is empty", False),
        (lambda x: torch.arange(x.shape[1]), "arange has a symbolic size", True),
        (lambda x: torch.zeros(x.shape[1], 2**14, 2**14), "zeros has", False),
        (lambda x: torch.zeros(x.shape[1]).copy_(x[0]), "is an input", False),
    ],
)
def test_what_else_has_a_part_in_a_value_is_named(make: Callable[..., Tensor], text: str, dynamic: bool) -> None:
    found = valued(make, torch.zeros(2, 3), dynamic=dynamic)
    assert isinstance(found, Reason)
    assert text in without_places(found.message)


def test_a_value_that_is_overwritten_is_what_its_reader_finds() -> None:
    def made(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(x.shape[1])
        before = mask + 1
        mask[0] = 5
        return before, mask + 1

    module = capture(made, torch.zeros(2, 3))
    constants = Constants(effects_of(module))
    first, second = next(node for node in module.graph.nodes if node.op == "output").args[0]
    found = [constants.value(node) for node in (first, second)]
    assert [each.value.tolist() for each in found if isinstance(each, Known)] == [[1.0, 1.0, 1.0], [6.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, 2, 4]),
        torch.tensor([0.0, torch.nan]),
        torch.tensor([True, False, True, False]),
        torch.tensor([[1, 0], [0, 1]]).repeat(2, 2).bool(),
        torch.tensor([0.0, 1.0, 2.0, 0.0]),
    ],
)
def test_values_that_make_no_pattern_are_none(value: Tensor) -> None:
    places = [variable(Variable(f"i{dim}", ZERO, number(value.shape[dim] - 1), 1)) for dim in range(value.dim())]
    assert constant_patterns.read(value, places) is None


def _written(dropped: bool | float) -> Tensor:
    """A mask that keeps the first four keys, and of the fourth query none."""
    made = torch.zeros(11, 11, dtype=torch.bool if dropped is True else None)
    made[:, 4:] = dropped
    made[3] = dropped
    return made


def _in_windows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query and the three before it, of which those before the first do not count."""
    keys, values = (F.pad(each, (0, 0, 3, 0)).unfold(2, 4, 1) for each in (key, value))
    dropped = torch.zeros(query.shape[2], 4, dtype=torch.bool)
    for place in range(3):
        dropped[place, : 3 - place] = True
    scores = torch.einsum("bhld,bhldw->bhlw", query, keys).masked_fill(dropped, -1e9)
    return torch.einsum("bhlw,bhldw->bhld", scores.softmax(-1), values)


WRITTEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "filled": lambda q, k, v: (q @ k.mT).masked_fill(_written(True), -1e9).softmax(-1) @ v,
    "added": lambda q, k, v: (q @ k.mT + _written(-1e9)).softmax(-1) @ v,
    "zeros": lambda q, k, v: (q @ k.mT).masked_fill(_written(True), -math.inf).softmax(-1).nan_to_num() @ v,
    "windows": _in_windows,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mask_that_is_written_in_place_is_what_is_written(name: str) -> None:
    """What was made before that drops nothing: no row would be without a key, and a window would show all of its places."""
    inputs = [torch.randn(2, 3, 11, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    backend, results = Rewriting(lock={"attention": "lz.blocked"}), []
    for each in (torch.compile(WRITTEN[name], backend=backend, fullgraph=True), WRITTEN[name]):
        found = each(*inputs)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)
