"""New tensors that are filled part by part are joins: of any parts, in any order and layout, and nothing else is."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Rewriting
from graphs import capture
from torch import Tensor, fx

from lz_compile.passes.loops.roll.filled_parts import join_parts

Function = Callable[..., Any]


def joined(function: Function, *inputs: Tensor, dynamic: Any = None) -> tuple[int, fx.GraphModule]:
    """How many tensors became joins; what comes out and its gradients are as before, and lie in memory as before."""
    module = capture(function, *inputs, dynamic=dynamic)
    before, after = (run(module, inputs) for _ in range(2))
    count = join_parts(module.graph)
    module.graph.lint()
    module.recompile()
    after = run(module, inputs)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        assert other.stride() == one.stride()
    return count, module


def run(module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    named = {node.name.removeprefix("l_").rstrip("_"): node for node in module.graph.find_nodes(op="placeholder")}
    values = [value for name, value in zip("abc", given, strict=False) if name in named]
    sizes = [node for node in named.values() if not isinstance(node.meta["example_value"], Tensor)]
    results = list(module(*[values[0].shape[0]] * len(sizes), *values))
    leaves = [each for each in given if each.requires_grad]
    total = sum(each.double().pow(2).sum() for each in [*results, *leaves] if each.requires_grad)
    return [*results, *(torch.autograd.grad(total, leaves, materialize_grads=True) if leaves else [])]


def filling(seed: int) -> tuple[Function, list[Tensor]]:
    """A random function that fills a tensor made of one of its inputs, and the inputs."""
    rng = random.Random(seed)
    shape = [rng.choice((2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
    dim = rng.randrange(len(shape))
    form, count = rng.choice(("behind", "in turn", "one by one")), rng.randint(2, 4)
    if form == "one by one":  # more are steps of a loop
        shape[dim] = rng.randint(2, 3)
    least = 2 if count == 4 else 1
    lengths = [1] * shape[dim] if form == "one by one" else [rng.randint(least, 3) for _ in range(count)]
    shape[dim] = sum(lengths) if form == "behind" else shape[dim] * (count if form == "in turn" else 1)
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    cuts: list[Any] = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    if form == "in turn":
        cuts = [slice(start, None, count) for start in range(count)]
    if form == "one by one":
        cuts = [place - rng.choice((0, shape[dim])) for place in range(shape[dim])]
    if form == "behind":
        cuts[0], cuts[-1] = slice(None, cuts[0].stop), slice(cuts[-1].start, rng.choice((None, 100)))
    dots, swaps = rng.random() < 0.5 and dim == len(shape) - 1, rng.random() < 0.5
    make = rng.choice(("empty", "empty_like", "new_zeros", "zeros_like"))
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    order, copies = (
        rng.sample(range(len(cuts)), len(cuts)),
        rng.choices(("set", "index", "narrow"), (6, 3, 2), k=len(cuts)),
    )
    used = [rng.choice("ab") for _ in cuts]

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        like = a.transpose(0, -1) if swaps else a
        new = {
            "empty": lambda: torch.empty(like.shape, dtype=dtype),
            "empty_like": lambda: torch.empty_like(like, dtype=dtype),
            "new_zeros": lambda: like.new_zeros(like.shape, dtype=dtype),
            "zeros_like": lambda: torch.zeros_like(like, dtype=dtype),
        }[make]()
        for place in order:
            index = (..., cuts[place]) if dots else (*[slice(None)] * dim, cuts[place])
            value = (like if used[place] == "a" else (b.transpose(0, -1) if swaps else b))[index] * (place + 2)
            if copies[place] == "index":
                new[index].copy_(value)
            elif copies[place] == "narrow" and form == "behind":
                new.narrow(dim, starts[place], lengths[place]).copy_(value)
            else:
                new[index] = value
        return new, new * 2

    given = [torch.randn(shape).requires_grad_(rng.random() < 0.5) for _ in range(2)]
    return function, [
        each.detach().transpose(0, -1).contiguous().requires_grad_(each.requires_grad) if swaps else each
        for each in given
    ]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_whatever_fills_a_tensor_is_joined(first: int) -> None:
    for seed in range(first, first + 20):
        function, inputs = filling(seed)
        count, module = joined(function, *inputs)
        assert count == 1, seed
        assert not [node for node in module.graph.nodes if node.target in (operator.setitem, "copy_")], seed


def _by_chunks(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty_like(a)
    first, second = new.chunk(2, 1)
    first.copy_(b[:, :3])
    second.copy_(a[:, 3:])
    return (new,)


def _by_places(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty(5, 2)
    new.select(1, 1).copy_(b[:, 0])
    new.select(1, 0).copy_(a[:, 0])
    return (new,)


@pytest.mark.parametrize("function", [_by_chunks, _by_places])
def test_parts_may_be_views_by_any_call(function: Function) -> None:
    count, module = joined(function, torch.randn(5, 6), torch.randn(5, 6))
    assert count == 1
    assert "copy_" not in {node.target for node in module.graph.nodes}


def _by_rows_of_places(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty_like(a)
    new[:, torch.arange(0, 6, 2)] = b[:, :3]
    new[:, [1, 3, 5]] = a[:, 3:]
    return (new,)


def _by_copies_of_rows(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty_like(a)
    new.index_copy_(-1, torch.arange(2, 6), b[:, :4])
    new.index_copy_(1, torch.arange(2), a[:, 3:5])
    return (new,)


@pytest.mark.parametrize("function", [_by_rows_of_places, _by_copies_of_rows])
def test_places_may_be_listed_or_counted(function: Function) -> None:
    count, module = joined(function, torch.randn(5, 6, requires_grad=True), torch.randn(5, 6))
    assert count == 1
    assert not {"index_copy_", operator.setitem} & {node.target for node in module.graph.nodes}


def _out_of_order(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.empty(5, 4)
    new[:, [1, 0]] = b[:, :2]
    new[:, [2, 3]] = a[:, :2]
    return (new,)


def _counted_on(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new, places = torch.zeros(5, 4), torch.arange(2)
    places.add_(1)
    new[:, places] = b[:, :2]
    new[:, 2:] = a[:, :2]
    return (new,)


def _by_flags(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros(5, 2)
    new[:, [False, True]] = b[:, :1]
    new[:, [True, False]] = a[:, :1]
    return (new,)


def _named_otherwise(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros(5, 4)
    new[:, torch.arange(2, end=4)] = b[:, :2]
    new[:, torch.arange(end=2)] = a[:, :2]
    return (new,)


def _of_one_number(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros(())
    new.index_copy_(0, torch.arange(1), a[0, 0])
    new.index_copy_(0, torch.arange(1), b[0, 0])
    return (new,)


@pytest.mark.parametrize("function", [_out_of_order, _counted_on, _by_flags, _named_otherwise, _of_one_number])
def test_other_places_stay(function: Function) -> None:
    assert joined(function, torch.randn(5, 6), torch.randn(5, 6))[0] == 0


def test_sizes_that_are_not_cut_may_be_symbols() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        new = torch.empty_like(a)
        new[..., ::2] = b[..., ::2]
        new[..., 1::2] = -a[..., ::2]
        return (new,)

    count, _ = joined(function, torch.randn(5, 3, 8), torch.randn(5, 3, 8), dynamic=(0,))
    assert count == 1


def _partly(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :2], new[:, 3:] = b[:, :2], b[:, 3:]
    return (new,)


def _not_to_the_end(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :2], new[:, 2:5] = b[:, :2], b[:, 2:5]
    return (new,)


def _twice(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :3], new[:, 2:] = b[:, :3], a[:, 2:]
    return (new,)


def _along_two(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :3], new[:2] = b[:, :3], a[:2]
    return (new,)


def _another_part_is_read(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    first, second, third = new.split((2, 2, 2), 1)
    first.copy_(b[:, :2])
    second.copy_(a[:, :2])
    new[:, 4:] = b[:, 4:]
    return new, third


def _read_between(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :3] = b[:, :3]
    total = new.sum()
    new[:, 3:] = a[:, 3:] + total
    return (new,)


def _seen_before(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    row = new[0]
    new[:, :3], new[:, 3:] = b[:, :3], a[:, 3:]
    return new, row


def _written_later(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :3], new[:, 3:] = b[:, :3], a[:, 3:]
    other = new * 2
    new[0].mul_(3)
    return new, other


def _value_changes(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new, value = torch.zeros_like(a), b * 2
    new[:, :3] = value[:, :3]
    value.mul_(2)
    new[:, 3:] = value[:, 3:]
    return (new,)


def _broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, :3], new[:, 3:] = b[:, :1], a[:, 3:]
    return (new,)


def _given(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = a.view(-1).view(a.shape)
    new[:, :3], new[:, 3:] = b[:, :3], b[:, 3:]
    return (new,)


def _unlike_steps(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    new = torch.zeros_like(a)
    new[:, ::2], new[:, 1::3] = b[:, ::2], a[:, 1::3]
    return (new,)


OTHERS = [
    _partly, _not_to_the_end, _twice, _along_two, _read_between, _another_part_is_read, _seen_before, _value_changes, _broadcast, _given, _unlike_steps,
]  # fmt: skip


def test_what_is_filled_is_joined_though_it_is_written_to_later() -> None:
    count, _ = joined(_written_later, torch.randn(4, 6), torch.randn(4, 6))
    assert count == 1


@pytest.mark.parametrize("function", OTHERS, ids=lambda each: each.__name__)
def test_what_is_not_filled_once_and_for_all_stays(function: Function) -> None:
    count, _ = joined(function, torch.randn(4, 6), torch.randn(4, 6))
    assert count == 0


def test_a_part_without_gradients_has_none() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        new = torch.empty_like(a)
        with torch.no_grad():
            new[:, :3] = b[:, :3]
        new[:, 3:] = a[:, 3:]
        return (new,)

    joined(function, torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True))


@pytest.mark.parametrize("step", [1, 2])
def test_rotations_that_are_written_in_place_are_recognised(step: int) -> None:
    def function(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        new, half = torch.empty_like(query), query.shape[-1] // 2
        one, other = (slice(None, None, 2), slice(1, None, 2)) if step == 2 else (slice(half), slice(half, None))
        new[..., one] = query[..., one] * cos - query[..., other] * sin
        new[..., other] = query[..., other] * cos + query[..., one] * sin
        return new

    inputs = torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(5, 8), torch.randn(5, 8)
    backend = Rewriting(lock={"rope": "torch.rope"})
    found = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [("rope", True)], backend.why_not()
    torch.testing.assert_close(found, function(*inputs))
    assert found.stride() == function(*inputs).stride()


def test_weights_that_are_unpacked_into_a_new_tensor_are_read() -> None:
    def function(x: Tensor, packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        rows = packed.shape[0]
        weight = torch.empty(2 * rows, packed.shape[1])
        weight[:rows] = (packed & 0xF0) >> 4
        weight[rows:] = packed & 0x0F
        weight = (weight.reshape(-1, 16) - zeros.reshape(-1, 1)) * scales.reshape(-1, 1)
        return x @ weight.reshape(2 * rows, -1).t()

    packed = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    inputs = torch.randn(3, 64), packed, torch.randint(0, 16, (32, 4)).float(), torch.rand(32, 4)
    backend = Rewriting()
    with torch.no_grad():
        found = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [("linear", True)], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-4)
