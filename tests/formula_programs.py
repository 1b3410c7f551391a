"""Random programs of index expressions, as graphs with real values."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lz_compile.passes.graph.view import tensor_of

#: No value of a program has more elements or dimensions.
_LARGEST, _RANK = 240, 4


class Program:
    """A graph that is run while it grows: every node holds its value as an example."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.graph = fx.Graph()
        self.values: list[fx.Node] = []
        torch.manual_seed(seed)
        for shape in ((4, 6), (2, 3, 4), (6,)):
            node = self.graph.placeholder(f"x{len(self.values)}")
            node.meta["example_value"] = torch.randint(-3, 4, shape).double()
            self.values.append(node)
        self.flags = self.graph.placeholder("flags")
        self.flags.meta["example_value"] = torch.rand(4, 6) < 0.5

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function, or of a method by its name."""
        given, named = fx.node.map_arg((args, kwargs), lambda each: each.meta["example_value"])
        is_method = isinstance(target, str)
        value = getattr(given[0], target)(*given[1:], **named) if is_method else target(*given, **named)
        make = self.graph.call_method if is_method else self.graph.call_function
        node = make(target, args, kwargs)
        node.meta["example_value"] = value
        return node

    def step(self, name: str) -> bool:
        """Take a step of that name from an earlier value; whether there was one that it takes."""
        node = self.pick()
        try:
            made = STEPS[name](self, node)
        except (IndexError, ValueError, TypeError, RuntimeError):  # the value has not what the step, or PyTorch, wants
            return False
        tensor = tensor_of(made)
        is_fit = tensor is not None and 0 < tensor.numel() <= _LARGEST and tensor.dim() <= _RANK
        if is_fit:
            self.values.append(made)
        return is_fit

    def pick(self) -> fx.Node:
        """A value, one of the last rather than the first."""
        return self.values[max(self.rng.randrange(len(self.values)) for _ in range(2))]

    def dim(self, node: fx.Node, least: int = 1) -> int:
        """A dimension of at least so many elements, counted from either end."""
        shape = value(node).shape
        dim = self.rng.choice([d for d, size in enumerate(shape) if size >= least])
        return dim if self.rng.random() < 0.5 else dim - len(shape)

    def positions(self, size: int, most: int) -> fx.Node:
        """An affine index: ``size`` positions that stay below ``most``."""
        stride = self.rng.randint(0, max((most - 1) // max(size - 1, 1), 0))
        first = self.rng.randrange(most - stride * (size - 1))
        scaled = self.call(operator.mul, self.call(torch.arange, size), stride)
        return self.call(operator.add, scaled, first)

    def condition(self, node: fx.Node) -> fx.Node:
        """A condition of the shape of a value, on positions or on data."""
        shape = value(node).shape
        if shape == value(self.flags).shape and self.rng.random() < 0.5:
            return self.flags
        rows = self.call(torch.arange, shape[-1])
        columns = self.call("unsqueeze", self.call(torch.arange, shape[-2] if len(shape) > 1 else 1), -1)
        shifted = self.call(operator.add, columns, self.rng.randint(-2, 2))
        found = self.call(self.rng.choice([operator.le, operator.gt, operator.eq, operator.ne]), rows, shifted)
        return self.call("expand", found, *shape)

    def like(self, node: fx.Node) -> fx.Node:
        """Another value of the same shape, or the same value."""
        same = [each for each in self.values if value(each).shape == value(node).shape]
        return self.rng.choice(same)


def value(node: fx.Node) -> Tensor:
    """What a node was when it was made."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node.name} is no tensor"
    return tensor


# ---- steps --------------------------------------------------------------------------------------------------------


def _factored(rng: random.Random, count: int) -> list[int]:
    """A shape of so many elements."""
    sizes = []
    while count > 1 and len(sizes) < _RANK - 1 and rng.random() < 0.8:
        sizes.append(rng.choice([each for each in range(1, count + 1) if count % each == 0]))
        count //= sizes[-1]
    return [*sizes, count]


def _subscript(program: Program, node: fx.Node) -> fx.Node:
    rng, items = program.rng, list[Any]()
    for size in value(node).shape:
        first = rng.randrange(size)
        kinds = [
            slice(None),
            slice(first, None),
            slice(None, None, rng.randint(1, 3)),
            slice(first - size, None, 2),
            first,
        ]
        items.append(rng.choice([*kinds, first - size]))
    if rng.random() < 0.3:
        items.insert(rng.randint(0, len(items)), None)
    if rng.random() < 0.3:
        items[rng.randrange(len(items)) :] = [Ellipsis]
    return program.call(operator.getitem, node, tuple(items))


def _piece(program: Program, node: fx.Node) -> fx.Node:
    dim = program.dim(node, 2)
    size = value(node).shape[dim]
    first = program.rng.randint(1, size - 1)
    parts = program.rng.choice(
        [("split", [first, size - first]), ("chunk", 2), ("unbind",), ("split", first), ("tensor_split", 2)]
    )
    name, *given = parts
    made = program.call(name, node, *given, dim=dim)
    return program.call(operator.getitem, made, program.rng.randrange(len(made.meta["example_value"])))


def _gathered(program: Program, node: fx.Node) -> fx.Node:
    dim, shape = program.dim(node, 2), value(node).shape
    count = program.rng.randint(1, 4)
    index = program.positions(count, shape[dim])
    kind = program.rng.choice(["index_select", "getitem", "gather", "take_along_dim", "embedding"])
    if kind == "index_select":
        return program.call(torch.index_select, node, dim, index)
    if kind == "embedding" and len(shape) == 2:
        return program.call(F.embedding, program.positions(count, shape[0]), node)
    placed = [1] * len(shape)
    placed[dim] = count
    if kind == "take_along_dim":
        return program.call(torch.take_along_dim, node, program.call("view", index, placed), dim)
    if kind == "gather":
        wanted = [count if d == dim % len(shape) else size for d, size in enumerate(shape)]
        return program.call(
            torch.gather, node, dim, program.call("expand", program.call("view", index, placed), *wanted)
        )
    return program.call(operator.getitem, node, (*(slice(None) for _ in range(dim % len(shape))), index))


def _two_gathered(program: Program, node: fx.Node) -> fx.Node:
    """Two indices that are spread against each other."""
    rows, columns, *_ = value(node).shape
    one = program.call("unsqueeze", program.positions(program.rng.randint(1, 3), rows), 1)
    return program.call(operator.getitem, node, (one, program.positions(program.rng.randint(1, 3), columns)))


def _joined(program: Program, node: fx.Node) -> fx.Node:
    other = program.like(node)
    if program.rng.random() < 0.5:
        return program.call(torch.stack, [node, other, node], dim=program.rng.randint(0, value(node).dim()))
    return program.call(torch.cat, [node, other], dim=program.dim(node))


def _padded(program: Program, node: fx.Node) -> fx.Node:
    pads = [program.rng.randint(-1, 2) for _ in range(2 * program.rng.randint(1, value(node).dim()))]
    return program.call(F.pad, node, pads, value=float(program.rng.randint(0, 1)))


def _strided(program: Program, node: fx.Node) -> fx.Node:
    dense = program.call("contiguous", node)
    count, shape = value(node).numel(), [program.rng.randint(1, 4) for _ in range(2)]
    strides = [program.rng.randint(0, max((count - 1) // (2 * size), 0)) for size in shape]
    last = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    return program.call(torch.as_strided, dense, shape, strides, program.rng.randrange(count - last))


def _einsum(program: Program, node: fx.Node) -> fx.Node:
    sizes: dict[str, int] = {}
    terms, nodes = [], [node, *(program.pick() for _ in range(program.rng.randint(0, 2)))]
    for each in nodes:
        term = ""
        for size in value(each).shape:
            known = [name for name, other in sizes.items() if other == size and name not in term]
            name = program.rng.choice(known) if known and program.rng.random() < 0.7 else "abcdefghijkl"[len(sizes)]
            sizes[name] = size
            term += name
        terms.append(term)
    kept = [name for name in sizes if program.rng.random() < 0.5]
    program.rng.shuffle(kept)
    return program.call(torch.einsum, f"{','.join(terms)}->{''.join(kept)}", *nodes)


def _matmul(program: Program, node: fx.Node) -> fx.Node:
    shape = value(node).shape
    others = [each for each in program.values if value(each).dim() == 2 and value(each).shape[0] == shape[-1]]
    if others and len(shape) > 1 and program.rng.random() < 0.7:
        return program.call(program.rng.choice([torch.matmul, operator.matmul]), node, program.rng.choice(others))
    return program.call(operator.matmul, node, program.call(torch.transpose, node, -1, -2))


def _reduced(program: Program, node: fx.Node) -> fx.Node:
    keeps = program.rng.random() < 0.4
    return program.call(program.rng.choice([torch.sum, torch.mean]), node, dim=program.dim(node), keepdim=keeps)


def _pointwise(program: Program, node: fx.Node) -> fx.Node:
    number = program.rng.randint(-2, 3)
    other: Any = program.rng.choice([number, program.like(node)])
    kind = program.rng.choice(["add", "sub", "rsub", "mul", "neg", "div", "addcmul", "lerp", "square"])
    if kind == "rsub":
        return program.call(torch.rsub, node, other, alpha=2)
    if kind in ("neg", "square"):
        return program.call(kind, node)
    if kind == "div":
        return program.call(operator.truediv, node, 4)
    if kind == "addcmul":
        return program.call(torch.addcmul, node, program.like(node), program.like(node), value=2)
    if kind == "lerp":
        return program.call(torch.lerp, node, program.like(node), 0.5)
    return program.call(kind, node, other)


def _selected(program: Program, node: fx.Node) -> fx.Node:
    where = program.condition(node)
    if program.rng.random() < 0.3:
        return program.call("masked_fill", node, where, float(program.rng.randint(-1, 1)))
    if program.rng.random() < 0.3:
        return program.call(operator.mul, node, program.call("double", where))
    return program.call(torch.where, where, node, program.rng.choice([program.like(node), 0.0]))


def _expanded(program: Program, node: fx.Node) -> fx.Node:
    wide = program.call("unsqueeze", node, program.rng.randint(0, value(node).dim()))
    shape = [3 if size == 1 and program.rng.random() < 0.7 else -1 for size in value(wide).shape]
    return program.call("expand", wide, *shape)


def _permuted(program: Program, node: fx.Node) -> fx.Node:
    order = list(range(value(node).dim()))
    program.rng.shuffle(order)
    return program.call("permute", node, *order)


def _rolled(program: Program, node: fx.Node) -> fx.Node:
    dims = program.rng.sample(range(value(node).dim()), program.rng.randint(1, value(node).dim()))
    return program.call(torch.roll, node, [program.rng.randint(-3, 3) for _ in dims], dims)


def _stored(program: Program, node: fx.Node) -> fx.Node:
    dim = program.rng.randrange(value(node).dim())
    size = value(node).shape[dim]
    start = program.rng.randrange(size)
    stop = program.rng.randint(start + 1, size)
    part = program.call("flip", program.call("narrow", node, dim, 0, stop - start), (dim,))
    if stop == start + 1 and program.rng.random() < 0.5:
        return program.call(torch.select_scatter, node, program.call("select", part, dim, 0), dim, start - size)
    if program.rng.random() < 0.3:
        return program.call(torch.index_copy, node, dim, program.call(torch.arange, start, stop), part)
    return program.call(torch.slice_scatter, node, part, dim, start, stop)


def _diagonal(program: Program, node: fx.Node) -> fx.Node:
    one, two = program.rng.sample(range(value(node).dim()), 2)
    return program.call("diagonal", node, program.rng.randint(-1, 1), one, two)


def _windows(program: Program, node: fx.Node) -> fx.Node:
    dim = program.dim(node, 2)
    size = program.rng.randint(1, value(node).shape[dim])
    return program.call("unfold", node, dim, size, program.rng.randint(1, 2))


def _triangle(program: Program, node: fx.Node) -> fx.Node:
    return program.call(program.rng.choice([torch.tril, torch.triu]), node, program.rng.randint(-2, 2))


def _repeated(program: Program, node: fx.Node) -> fx.Node:
    if program.rng.random() < 0.5:
        return program.call("repeat_interleave", node, 2, dim=program.dim(node))
    return program.call("repeat", node, *(program.rng.randint(1, 2) for _ in value(node).shape))


def _outer(program: Program, node: fx.Node) -> fx.Node:
    return program.call(torch.outer, program.call("flatten", node), program.values[2])


STEPS: Mapping[str, Callable[[Program, fx.Node], fx.Node]] = {
    "reshape": lambda program, node: program.call("reshape", node, _factored(program.rng, value(node).numel())),
    "permute": _permuted,
    "expand": _expanded,
    "subscript": _subscript,
    "narrow": lambda program, node: program.call("narrow", node, program.dim(node, 2), 1, 1),
    "select": lambda program, node: program.call("select", node, program.dim(node), -1),
    "piece": _piece,
    "flip": lambda program, node: program.call("flip", node, [program.dim(node)]),
    "roll": _rolled,
    "store": _stored,
    "gather": _gathered,
    "two indices": _two_gathered,
    "join": _joined,
    "pad": _padded,
    "unfold": _windows,
    "diagonal": _diagonal,
    "as_strided": _strided,
    "einsum": _einsum,
    "matmul": _matmul,
    "reduce": _reduced,
    "pointwise": _pointwise,
    "select by condition": _selected,
    "triangle": _triangle,
    "repeat": _repeated,
    "outer": _outer,
}


def generate(seed: int, length: int = 6) -> Program:
    """A program of a few steps."""
    program = Program(seed)
    taken = 0
    for _ in range(length * 8):
        taken += program.step(program.rng.choice(sorted(STEPS)))
        if taken == length:
            break
    program.graph.output(program.values[-1])
    return program
