"""Windows that are read of random programs of slices, strides and indices are what these programs give."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture, effects_of, outputs_of
from torch import Tensor, fx

from lz_compile.passes.formula.axes import atoms, fresh
from lz_compile.passes.masks.constants import Constants
from lz_compile.passes.masks.index_reading import read_window
from lz_compile.passes.masks.meaning import Window

SHAPE = (2, 3, 14, 2)
Step = Callable[[Tensor], Tensor]


def _steps(draw: random.Random, rank: int) -> dict[str, Step]:
    """Operations with numbers of their own, for a tensor of some rank."""
    one, other = draw.sample(range(rank), 2)
    pieces, gap, begin = draw.randint(2, 4), draw.choice((1, 1, 1, 2)), draw.randint(0, 2)
    starts = [begin + gap * i for i in range(pieces)]
    if draw.random() < 0.2:
        draw.shuffle(starts)

    def cut(x: Tensor, start: int) -> Tensor:
        return x.narrow(one, start, x.shape[one] - max(starts))

    def strided(x: Tensor) -> Tensor:
        x = x if draw_transposed else x.contiguous()
        sizes, strides = list(x.shape), list(x.stride())
        sizes[one] = max(sizes[one] - pieces * gap + 1, 1)
        return x.as_strided((*sizes, pieces), (*strides, strides[one] * gap), begin * 0)

    draw_transposed = draw.random() < 0.5
    return {
        "transpose": lambda x: x.transpose(one, other),
        "unfold": lambda x: x.unfold(one, pieces, gap),
        "stack": lambda x: torch.stack([cut(x, start) for start in starts], other),
        "cat": lambda x: torch.cat([cut(x, start).unsqueeze(one) for start in starts], one),
        "cat_long": lambda x: torch.cat([cut(x, start) for start in starts], other),
        "strided": strided,
        "narrow": lambda x: x.narrow(one, min(begin, x.shape[one] - 1), x.shape[one] - min(begin, x.shape[one] - 1)),
        "flip": lambda x: x.flip(one),
        "index": lambda x: x[
            (slice(None),) * one + (torch.arange(x.shape[one] - pieces + 1)[:, None] + torch.arange(pieces),)
        ],
        "scaled": lambda x: x * 2,
        "flatten": lambda x: x.flatten(min(one, other), min(one, other) + 1),
    }


def program(seed: int, x: Tensor) -> tuple[Callable[[Tensor], tuple[Tensor]], Tensor]:
    """A few operations after each other, and what they give for ``x``; those whose numbers do not fit are left out."""
    draw, chosen = random.Random(seed), []
    for _ in range(draw.randint(1, 4)):
        steps = _steps(draw, x.dim())
        step = steps[draw.choice(sorted(steps))]
        try:
            x = step(x)
        except (RuntimeError, IndexError):
            continue
        chosen.append(step)

    def run(x: Tensor) -> tuple[Tensor]:
        for step in chosen:
            x = step(x)
        return (x,)

    return run, x


class _Values(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def run_node(self, node: fx.Node) -> Any:
        self.values: dict[fx.Node, Any] = getattr(self, "values", {})
        self.values[node] = super().run_node(node)
        return self.values[node]


def shown(window: Window, whole: Tensor, sizes: list[int], query: int, key: int, order: list[Any]) -> Tensor:
    """What a window says that a tensor is, from what it shows: an index for each dimension."""
    places = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    index = []
    for dim in window.dims:
        place = torch.zeros(sizes, dtype=torch.long)
        for axis in atoms(dim):
            own = places[query] + places[key] + window.start if axis is window.along else places[order.index(axis)]
            place = place * axis.size + own
        index.append(place)
    return whole[tuple(index)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_is_read_of_any_program_is_what_it_gives(first: int) -> None:
    count, total = 0, 0
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for seed in range(first, 240, 3):
        function, want = program(seed, x)
        if want is x or 0 in want.shape or want.dim() < 2:
            continue
        module = capture(function, x)
        (node,) = outputs_of(module)
        effects, values = effects_of(module), _Values(module)
        values.run(x)
        dims = fresh(want.shape)
        places = [place for place, dim in enumerate(dims) if dim]
        order = [dim[0] if dim else None for dim in dims]
        for query, key in itertools.permutations(places, 2):
            total += 1
            found = read_window(effects, Constants(effects), node, dims, order[query], order[key])
            if found is not None:
                count += 1
                got = shown(found, values.values[found.node], list(want.shape), query, key, order)
                torch.testing.assert_close(got, want)
    assert count > 5, f"{count} windows of {total}"


@pytest.mark.parametrize("is_within", [True, False])
def test_strides_that_lead_beside_a_tensor_show_no_window_of_it(is_within: bool) -> None:
    def strided(x: Tensor) -> Tensor:
        part = x[:4]
        return part.as_strided((2 if is_within else 4, 3, 2), (2, 2, 1)) + 0.0

    module = capture(strided, torch.randn(8, 2))
    effects = effects_of(module)
    (node,) = [node for node, call in effects.calls.items() if call is not None and call.name == "as_strided"]
    dims = fresh(node.meta["example_value"].shape)
    found = read_window(effects, Constants(effects), node, dims, dims[0][0], dims[1][0])
    assert (found is not None) is is_within


def test_a_window_over_a_tensor_that_lies_transposed_is_one() -> None:
    module = capture(lambda x: (x.transpose(0, 1).as_strided((2, 3, 5), (5, 5, 1)) + 0.0,), torch.randn(4, 5))
    effects = effects_of(module)
    (node,) = [node for node, call in effects.calls.items() if call is not None and call.name == "as_strided"]
    dims = fresh((2, 3, 5))
    found = read_window(effects, Constants(effects), node, dims, dims[0][0], dims[1][0])
    assert found is not None
