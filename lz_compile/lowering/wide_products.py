"""Products and convolutions of 16 bits, on CPUs without instructions for them, in float32.

PyTorch's own loops take twenty to a hundred times as long.

Both sum in float32 and round once, so that only the order of a sum differs. Factors are widened piece by piece, in a cache:
a float32 copy of a large weight would be new memory in every call, which takes longer than reading it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.work import is_looped

_ATEN, _CAST = torch.ops.aten, torch.ops.prims.convert_element_type.default
#: Products, and where the two factors stand in their arguments.
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}
#: Products of groups: rows, columns or sums of which one factor holds many, and the other one for each.
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_CONVOLUTIONS = (_ATEN.convolution.default, _ATEN.convolution_backward.default)
#: Numbers of one piece: of both factors and the result.
_PIECE = 1 << 20
#: Rows of a piece, for which one of the other factor is widened once, and the fewest columns, which lie in a row of memory.
_ROWS, _COLUMNS = 1024, 256
#: Rows and multiplications from which widening pays, where the columns of the right factor lie side by side in memory: of a
#: few rows PyTorch reads these as fast as float32. Elsewhere its loops take many times as long (an EPYC with AVX2).
_FEW, _LEAST, _ACROSS = 8, 1 << 21, 8


def widen_products(graph: fx.Graph) -> None:
    """Let products and convolutions of 16 bits be computed in float32, in place, where loops would take longer."""
    for target, first in _PRODUCTS.items():
        for call in graph.find_nodes(op="call_function", target=target):
            added, (left, right) = call.args[:first], call.args[first : first + 2]
            factors = [call.kwargs.get(name, 1) for name in ("beta", "alpha")]
            if any(isinstance(each, fx.Node) for each in factors):
                continue
            if _is_looped(left.meta["val"]) and _pays(left.meta["val"], right.meta["val"]):
                factors = [*map(float, factors)]  # C++ that calls an operator takes an int for the bits of a float
                call.target = torch.ops.layerzero.wide_product_kernel.default
                call.args, call.kwargs = (left, right, *(added or (None,)), *factors), {}
    for call in [node for node in graph.nodes if node.op == "call_function" and str(node.target) in _GROUPED]:
        (left, right, *rest), others = call.args, dict(call.kwargs)
        ends = rest.pop(0) if rest else others.pop("offs", None)
        is_plain = isinstance(ends, fx.Node) and all(each is None for each in (*rest, *others.values()))
        held = [each.meta["val"] for each in (left, right, ends)] if is_plain else []
        if is_plain and _is_looped(held[0]) and _groups_pay(*held):
            call.target = torch.ops.layerzero.wide_groups_kernel.default
            call.args, call.kwargs = (left, right, ends), {}
    for target in _CONVOLUTIONS:
        for call in graph.find_nodes(op="call_function", target=target):
            if _is_looped(call.args[0].meta["val"]):
                _surround(call)


def _surround(call: fx.Node) -> None:
    """Widen what a call is given, and round what it gives, one tensor or several."""
    held, results = call.meta["val"], [call]
    with call.graph.inserting_before(call):
        call.args = tuple(_cast(each, torch.float32) if isinstance(each, fx.Node) else each for each in call.args)
    if not isinstance(held, Tensor):
        results = [each for each in call.users if held[each.args[1]] is not None]
        call.meta = {**call.meta, "val": tuple(None if each is None else each.float() for each in held)}
    for each in results:
        tensor = each.meta["val"]
        each.meta = {**each.meta, "val": tensor.float()}
        with call.graph.inserting_after(each):
            rounded = _cast(each, tensor.dtype)
        each.replace_all_uses_with(rounded, delete_user_cb=rounded.__ne__)


def _cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    held = node.meta["val"]
    if not isinstance(held, Tensor) or held.dtype == dtype:  # groups may be a size
        return node
    cast = node.graph.call_function(_CAST, (node, dtype))
    cast.meta = {**node.meta, "val": held.to(dtype)}
    return cast


def _pays(left: Tensor, right: Tensor) -> bool:
    """Whether widening does; it may where sizes are symbols, so that each call is asked again."""
    sizes, stride = (*left.shape, right.shape[-1]), right.stride(-2)
    if not all(isinstance(each, int) for each in (*sizes, stride)):
        return True
    if left.dim() == 3 and 1 in (sizes[1], sizes[3]):  # of batches of vectors Inductor makes loops of its own
        return False
    is_across = stride != 1
    return bool((is_across or sizes[-3] >= _FEW) and math.prod(sizes) * (_ACROSS if is_across else 1) >= _LEAST)


def _is_looped(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and is_looped(tensor.dtype)


def _wide_product(left: Tensor, right: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    """``beta * added + alpha * (left @ right)`` of ``[..., M, K]`` and ``[..., K, N]`` with one batch dimension or none."""
    if not _pays(left, right):
        return _looped(left, right, added, beta, alpha)
    found = _fake(left, right, added, beta, alpha)
    shape = (1,) * (3 - found.dim()) + tuple(found.shape)
    left, right, result = (each.reshape(shape[0], *each.shape[-2:]) for each in (left, right, found))
    rest = None if added is None else added.expand(found.shape).reshape(shape)
    memory: list[Tensor] = [left.new_empty(0, dtype=torch.float32)] * 2
    for place in _pieces(result.shape, left.shape[2]):
        batches, rows, columns = place
        if not columns.start:
            some = _widened(left[batches, rows], 0, memory)
        others = _widened(right[batches, :, columns], 1, memory)
        if rest is None:
            result[place] = torch.bmm(some, others)
        else:
            result[place] = torch.baddbmm(rest[place].float(), some, others, beta=beta, alpha=alpha)
    return found


def _widened(piece: Tensor, place: int, memory: list[Tensor]) -> Tensor:
    """A piece of a factor in float32, in memory that the next one takes over, and in the order that it has."""
    if piece.numel() > memory[place].numel():
        memory[place] = piece.new_empty(piece.numel(), dtype=torch.float32)
    flat = memory[place][: piece.numel()]
    if piece.stride(-1) == 1:
        return flat.view(piece.shape).copy_(piece)
    return flat.view(piece.mT.shape).copy_(piece.mT).mT


def _pieces(shape: torch.Size, inner: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of a result ``[batch, rows, columns]`` that are computed at once, all columns of some rows after each other."""
    batch, rows, columns = shape
    at_once = _PIECE // max(inner * (rows + columns) + rows * columns, 1)
    many = rows if at_once else min(rows, _ROWS)
    wide = columns if at_once else max(_PIECE // (inner + many), _COLUMNS)
    for first in range(0, batch, max(at_once, 1)):
        for row in range(0, rows, max(many, 1)):
            for column in range(0, columns, max(wide, 1)):
                yield slice(first, first + max(at_once, 1)), slice(row, row + many), slice(column, column + wide)


def _wide_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """One product for each group ``end[i - 1]`` to ``end[i]``, of the rows ``[M, K]`` of the left factor with ``[G, K, N]``.

    Or of the columns ``[K, N]`` of the right one with ``[G, M, K]``; of ``[M, K]`` and ``[K, N]`` they are groups of the
    sum, and the result is ``[G, M, N]``.
    """
    return _by_groups(left, right, ends, widens=_groups_pay(left, right, ends))


def _groups_pay(left: Tensor, right: Tensor, ends: Tensor) -> bool:
    """Whether widening does for groups of the mean size, which may be a symbol."""
    of_rows, of_columns, groups = right.dim() == 3, left.dim() == 3, ends.shape[0]
    size = right.shape[-1] if of_columns else left.shape[0 if of_rows else 1]
    if not isinstance(size, int):
        return True
    part = slice(size // max(groups, 1))
    return _pays(*_group(left, right, part, 0)) if groups else False


def _group(left: Tensor, right: Tensor, part: slice, place: int) -> tuple[Tensor, Tensor]:
    """The factors of one group."""
    if right.dim() == 3:
        return left[part], right[place]
    return (left[place], right[:, part]) if left.dim() == 3 else (left[:, part], right[part])


def _by_groups(left: Tensor, right: Tensor, ends: Tensor, *, widens: bool) -> Tensor:
    result, start = _fake_groups(left, right, ends), 0
    for place, end in enumerate(ends.tolist()):
        part = slice(start, end)
        if start == end and left.dim() != right.dim():
            continue
        factors = _group(left, right, part, place)
        found = result[part] if right.dim() == 3 else result[:, part] if left.dim() == 3 else result[place]
        if widens and _pays(*factors):
            found.copy_(_wide_product(*factors, None, 1, 1))
        else:
            torch.mm(*factors, out=found)
        start = end
    if left.dim() != right.dim():  # what belongs to no group
        (result[start:] if right.dim() == 3 else result[:, start:]).zero_()
    return result


def _fake_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    groups = ends.shape if left.dim() == right.dim() else ()
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _looped_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return _by_groups(left, right, ends, widens=False)


def _fake(left: Tensor, right: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _looped(left: Tensor, right: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    if added is None:
        return left @ right
    return (torch.addmm if left.dim() == 2 else torch.baddbmm)(added, left, right, beta=beta, alpha=alpha)


opaque("wide_product", _wide_product, _fake, fallback=_looped)
opaque("wide_groups", _wide_groups, _fake_groups, fallback=_looped_groups)
