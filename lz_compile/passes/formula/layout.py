"""Layout operations read backwards: from the axes of a result to the axes of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import Shape, Size, as_size, product, shape_of, strides_of
from lz_compile.passes.formula.axes import (
    Dims,
    LayoutError,
    atoms,
    axes_of,
    broadcast_from,
    fresh,
    quotient,
    regroup,
    take,
)
from lz_compile.passes.graph.view import Call, known_tensor, memories_of, reached, read, tensor_of, tensors_in, value_of

Reader = Callable[[Call, Shape, Dims], Dims]


def _wrap(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _permuted(order: tuple[int, ...], dims: Dims) -> Dims:
    source = [()] * len(order)  # type: list[tuple[Any, ...]]
    for position, origin in enumerate(order):
        source[_wrap(origin, len(order))] = dims[position]
    return tuple(source)


def _transpose(call: Call, shape: Shape, dims: Dims) -> Dims:
    rank = len(shape)
    first, second = _wrap(call.get("dim0"), rank), _wrap(call.get("dim1"), rank)
    swapped = list(dims)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return tuple(swapped)


def _permute(call: Call, _shape: Shape, dims: Dims) -> Dims:
    order = call.get("dims") or call.positional()
    return _permuted(tuple(order), dims)


def _movedim(call: Call, shape: Shape, dims: Dims) -> Dims:
    rank = len(shape)
    source, destination = call.get("source"), call.get("destination")
    sources = [_wrap(d, rank) for d in (source if isinstance(source, (tuple, list)) else (source,))]
    targets = [_wrap(d, rank) for d in (destination if isinstance(destination, (tuple, list)) else (destination,))]
    placed = dict(zip(targets, sources, strict=True))
    others = iter(d for d in range(rank) if d not in sources)
    order = tuple(placed[position] if position in placed else next(others) for position in range(rank))
    return _permuted(order, dims)


def _unsqueeze(call: Call, shape: Shape, dims: Dims) -> Dims:
    position = _wrap(call.get("dim"), len(shape) + 1)
    return dims[:position] + dims[position + 1 :]


def _repeat_interleave(call: Call, shape: Shape, dims: Dims) -> Dims:
    repeats, dim = call.get("repeats"), call.get("dim")
    if not isinstance(value_of(repeats), (int, torch.SymInt)) or not isinstance(dim, int):
        raise LayoutError("repeat_interleave by a tensor or without a dim")
    position = _wrap(dim, len(shape))
    kept = take(list(atoms(dims[position])), shape[position])
    return (*dims[:position], kept, *dims[position + 1 :])


def _repeat(call: Call, shape: Shape, dims: Dims) -> Dims:
    source = []
    for dim, size in zip(dims[len(dims) - len(shape) :], shape, strict=True):
        queue = list(atoms(dim))
        total = product(axis.size for axis in queue)
        repeats = quotient(total, size)
        if repeats is None:
            raise LayoutError(f"{size} does not divide {total}")
        take(queue, repeats)
        source.append(tuple(queue))
    return tuple(source)


def _getitem(call: Call, shape: Shape, dims: Dims) -> Dims:
    items = spelled_out(call.arguments.get("#1"), len(shape))
    if items is None:
        raise LayoutError("an index by masks")
    source: list[Any] = []
    position = 0
    for item in items:
        if item is None:
            position += 1
        elif isinstance(item, slice) and _is_whole(item, shape[len(source)]):
            source.append(dims[position])
            position += 1
        elif item in (0, -1) and shape[len(source)] == 1:  # the one place that there is
            source.append(())
        else:
            raise LayoutError("an index that selects")
    return (*source, *dims[position:])


def spelled_out(index: Any, rank: int) -> list[Any] | None:
    """The items of a subscript, the ellipsis and dimensions that are not named as whole slices; None for truth values."""
    items = list(index) if isinstance(index, tuple) else [index]
    plain = [item for item in items if not isinstance(item, fx.Node)]
    if any(isinstance(item, bool) for item in plain) or plain.count(Ellipsis) > 1:
        return None
    named = sum(1 for item in items if isinstance(item, fx.Node) or (item is not None and item is not Ellipsis))
    whole = [slice(None)] * (rank - named)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    return [*items, *whole] if at is None else [*items[:at], *whole, *items[at + 1 :]]


def elements_of(index: Any, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """An index with an element for each dimension (None: a new one), no ellipsis; None where it is not that simple."""
    given = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, (list, torch.Tensor, fx.Node)) for each in given):
        return None
    elements = spelled_out(index, tensor.dim())
    return None if elements is None else tuple(elements)


#: Calls that return several tensors, parts of the input.
SPLITS = frozenset({"chunk", "split", "unbind", "tensor_split", "split_with_sizes"})
#: All of a dimension.
WHOLE = slice(None)

#: The node that a reader sees under a name: the last version, and one node for what is the same in every step.
Resolve = Callable[[fx.Node, Any], Any]


def named_dim(call: Call, default: Any = None) -> tuple[int, Size] | None:
    """The dimension of the input that a call names, and its extent."""
    source, dim = tensor_of(call.input), call.get("dim", default)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or source is None or not source.dim():
        return None
    return dim % source.dim(), as_size(source.shape[dim])


def index_of(call: Call, resolve: Resolve = lambda _, value: value) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """The tensor that a call cuts something out of, and the index that does so, as :func:`elements_of` gives it."""
    source = resolve(call.node, call.input)
    parts, made = value_of(source), read(source) if isinstance(source, fx.Node) else None
    element: Any = None
    if call.name == "getitem" and made is not None and isinstance(parts, (tuple, list)):
        number, named = call.node.args[1], named_dim(made, 0)  # of what ``unbind`` or ``split`` gave
        if named is None or made.name not in SPLITS or not isinstance(number, int):
            return None
        sizes = [1 if made.name == "unbind" else part.shape[named[0]] for part in parts]
        if all(isinstance(size, int) for size in sizes):
            start = sum(sizes[: number % len(parts)])
            element = start if made.name == "unbind" else slice(start, start + sizes[number])
        source = resolve(source, made.input)
    elif call.name == "getitem":
        elements = None if tensor_of(source) is None else elements_of(call.node.args[1], known_tensor(source))
        return None if elements is None else (source, elements)
    elif call.name == "slice":  # of ATen
        named, element = named_dim(call, 0), slice(*map(call.get, ("start", "end", "step")))
    else:
        named, length = named_dim(call) if call.name in ("select", "narrow") else None, call.get("length", 1)
        element = call.get("index" if call.name == "select" else "start")
        if named is not None and isinstance(element, int) and isinstance(length, int):
            element += named[1] if element < 0 and isinstance(named[1], int) else 0
            element = element if call.name == "select" else slice(element, element + length)
    tensor = tensor_of(source)
    if tensor is None or named is None or not isinstance(element, (int, slice)):
        return None
    return source, (*[WHOLE] * named[0], element, *[WHOLE] * (tensor.dim() - named[0] - 1))


def places_of(element: Any, size: int | None) -> tuple[range, bool] | None:
    """The places that an element of an index selects, and whether that drops the dimension; None where no numbers say so."""
    if isinstance(element, int) and not isinstance(element, bool) and (size or element >= 0):
        start = element % size if size else element
        return range(start, start + 1), True
    ends = (element.start, element.stop, element.step) if isinstance(element, slice) else ()
    is_known = size is not None and ends and all(each is None or isinstance(each, int) for each in ends)
    return (range(*element.indices(size)), False) if is_known else None


def single_cut(index: Any, tensor: torch.Tensor) -> tuple[int, range, bool] | None:
    """The one dimension that an index cuts, the places that it selects there, and whether it drops it; None for others."""
    cuts = [(dim, each) for dim, each in enumerate(elements_of(index, tensor) or ()) if each != WHOLE]
    if len(cuts) != 1 or cuts[0][1] is None:
        return None
    ((dim, element),) = cuts
    size = shape_of(tensor)[dim]
    found = places_of(element, size) if isinstance(size, int) else None
    return None if found is None else (dim, *found)


def _is_whole(item: slice, size: Any) -> bool:
    known = value_of(item.stop)
    stop = as_size(known) if isinstance(known, (int, torch.SymInt)) else None
    covers = stop is None or stop == size or (isinstance(stop, int) and isinstance(size, int) and stop >= size)
    return item.start in (None, 0) and item.step in (None, 1) and covers


#: Operations that give the same elements, in their order, another shape.
REGROUPING = ("view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as")
_READERS: Mapping[str, Reader] = {
    "transpose": _transpose,
    **dict.fromkeys(("t", "mT"), lambda _call, _shape, dims: (*dims[:-2], *dims[:-3:-1])),
    "T": lambda _call, _shape, dims: dims[::-1],
    "permute": _permute,
    "movedim": _movedim,
    **dict.fromkeys((*REGROUPING, "squeeze"), lambda _call, shape, dims: regroup(axes_of(dims), shape)),
    **dict.fromkeys(("expand", "expand_as"), lambda _call, shape, dims: broadcast_from(dims, shape)),
    "unsqueeze": _unsqueeze,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("contiguous", "clone", "alias", "positive", "detach"), lambda _call, _shape, dims: dims),
    "getitem": _getitem,
}

#: Operations that only change the layout.
NAMES = frozenset(_READERS)

#: Operations whose arguments hold extents; re-running them at other sizes needs new ones.
SIZED = frozenset("view reshape unflatten expand repeat tile repeat_interleave view_as reshape_as expand_as".split())


def is_view(call: Call) -> bool:
    """Whether the call only rearranges, and its result may share memory with its input."""
    return _is_named(call) and call.name not in ("contiguous", "clone", "repeat", "tile", "repeat_interleave")


def stride_order(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Dimensions from the farthest to the nearest step in memory, and the order that takes a tensor back from there."""
    strides = strides_of(tensor)
    order = sorted(range(len(strides)), key=lambda dim: -_number(strides[dim]))
    return order, [order.index(dim) for dim in range(len(strides))]


def _number(stride: Size) -> int:
    """A stride, or what it is where every symbol is large: to be compared, which must add no guard."""
    if isinstance(stride, int):
        return stride
    return int(stride.xreplace(dict.fromkeys(stride.free_symbols, sympy.Integer(8192))))


def is_returned(node: fx.Node) -> bool:
    """Whether a tensor, or one that may be a view of it, leaves the graph."""

    def names(shown: fx.Node) -> Iterator[fx.Node]:
        memory, calls = {*memories_of(shown)}, (call for call in map(read, shown.users) if call is not None)
        return (x.node for x in calls if x.is_inplace or rearranges(x) or not memory.isdisjoint(memories_of(x.node)))

    return any(user.op == "output" for shown in reached([node], names) for user in shown.users)


def stops_gradient(call: Call) -> bool:
    """Whether a call detaches what may have a gradient, or gets one of its own; else the result is what it is of.

    Of tensors inside of a transform nothing is noted.
    """
    ends = [end for end in (call.input, call.node) if isinstance(end, fx.Node)] if call.name == "detach" else []
    return any(not memories_of(end) or any(each.requires_grad for each in tensors_in(value_of(end))) for end in ends)


def rearranges(call: Call) -> bool:
    """Whether the call is a layout operation by its name."""
    return _is_named(call) or call.name == "getattr"


def _is_named(call: Call) -> bool:
    return call.name in _READERS and not stops_gradient(call)


def read_input_dims(call: Call, dims: Dims) -> Dims | None:
    """The dims of ``call.input`` where ``call`` only rearranges, given the dims of its result; None where it does more.

    Raises:
        LayoutError: it rearranges, but the axes do not factor.
    """
    source = tensor_of(call.input)
    if source is None:
        return None
    name = call.name
    if name == "getattr" and call.arguments.get("#1") in ("mT", "T"):
        name = str(call.arguments["#1"])
    reader = _READERS.get(name)
    is_cast = name == "view" and any(isinstance(value, torch.dtype) for value in call.arguments.values())
    if (
        reader is None or is_cast or call.is_inplace or stops_gradient(call)
    ):  # in place, the input's shape is no longer known
        return None
    if name == "getitem" and not shows_whole(call):
        return None
    return reader(call, shape_of(source), dims)


def is_in_axes(call: Call) -> bool:
    """Whether a call changes the layout of a tensor and nothing else, in a way that axes can tell."""
    tensor = tensor_of(call.node)
    if tensor is None or not rearranges(call):
        return False
    try:
        return read_input_dims(call, fresh(shape_of(tensor))) is not None
    except (LayoutError, IndexError):
        return False


def shows_whole(call: Call) -> bool:
    """Whether a ``getitem`` only inserts or drops dimensions of one element and keeps whole ones."""
    source = tensor_of(call.input)
    if source is None:
        return False
    try:
        _getitem(call, shape_of(source), tuple(() for _ in range(source.dim() + 8)))
    except (LayoutError, IndexError):
        return False
    return True


# ---- index notation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notation:
    """The tensors of an ``einsum``, the labels of their dimensions, and those of the result."""

    operands: tuple[fx.Node, ...]
    labels: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]


def notation(call: Call) -> Notation | None:
    """What an ``einsum`` says; None where it is given otherwise than by an equation and tensors."""
    equation, operands = call.input, [value for name, value in call.arguments.items() if name != "input"]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or any(tensor_of(operand) is None for operand in operands):
        return None
    labels, result = _parse(equation, [known_tensor(operand).dim() for operand in operands])
    return Notation(tuple(operands), tuple(map(tuple, labels)), tuple(result))


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Labels per operand and of the result; the dims of an ellipsis are labelled ``.0``, ``.1``, ... from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    labels = [_labels(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if not arrow:
        plain = [label for term in labels for label in term if not label.startswith(".")]
        output = "..." * ("..." in inputs) + "".join(sorted(label for label in set(plain) if plain.count(label) == 1))
    hidden = max((sum(label.startswith(".") for label in term) for term in labels), default=0)
    return labels, _labels(output, len(output.replace("...", "")) + (hidden if "..." in output else 0))


def _labels(term: str, rank: int) -> list[str]:
    head, dots, tail = term.partition("...")
    count = rank - len(head) - len(tail)
    return list(head) + ([f".{count - 1 - i}" for i in range(count)] if dots else []) + list(tail)
