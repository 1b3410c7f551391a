"""What is computed of parameters alone, computed once: a kernel's call whose operands are kept from call to call.

A graph gives a kernel its weight in another form than the model stores: packed numbers are unpacked, columns are put in
another order. That form is kept beside the stored tensor, for as long as that lives, and looked up by what it was made from:

- the same tensors (the objects), which nobody gave another memory (their addresses);
- unchanged since: every write that autograd knows of, in place or by ``load_state_dict``, advances a tensor's version;
- equal in some of their elements, of every row and every column: a write behind autograd's back (``weight.data.copy_()``,
  ``weight.data[3] = 0``) changes no version. On other devices than a CPU such a look would wait: nothing is kept there.

What differs in any of these is computed anew, in that call. A write through ``.data`` to single elements is not noticed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.spelled import function
from lz_compile.lowering.value_guards import ByIdentity, tells_writes

#: About so many elements of a tensor are compared at every call, where more of them are in no longer row or column.
_MOST = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor when something was made from it. ``some`` shows its memory, which is not given to another tensor."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    some: Tensor
    values: Tensor

    @classmethod
    def now(cls, tensor: Tensor) -> _Stored:
        """A tensor as it is."""
        some = _spread(tensor.detach())
        some = some if some.is_complex() else some.view(_INTEGERS[some.element_size()])  # NaN is itself
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), some, some.clone())

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, as it was."""
        is_same = self.tensor() is tensor and self.version == tensor._version and self.address == tensor.data_ptr()
        return is_same and torch.equal(self.some, self.values)


def _spread(tensor: Tensor) -> Tensor:
    """Elements of every row and every column ``[n]``; of a grid of them where a tensor has gaps."""
    if not tensor.is_contiguous():
        each = max(1, int(_MOST ** (1 / tensor.dim())))
        return tensor[tuple(slice(None, None, max(1, math.ceil(size / each))) for size in tensor.shape)]
    columns = tensor.shape[-1] if tensor.dim() else 1
    step = max(min(tensor.numel() // max(columns, 1), columns), tensor.numel() // _MOST, 1)
    while math.gcd(step, columns) > 1:  # one that meets a column in every row, and each of them in turn
        step -= 1
    return tensor.view(-1)[:: max(step, 1)]


@dataclass(frozen=True, slots=True)
class _Kept:
    stored: tuple[_Stored, ...]
    values: tuple[Tensor, ...]


#: By the first of the tensors that values were made from, and by the text of what made them.
_kept: ByIdentity[dict[str, _Kept]] = ByIdentity()


def made_of(given: Sequence[Tensor], source: str) -> tuple[Tensor, ...]:
    """What ``source``, a text of :func:`spelled`, gives for tensors; known if it was asked before."""
    entries = _kept.get(given[0])
    kept = None if entries is None else entries.get(source)
    if kept is not None and all(one.is_still(other) for one, other in zip(kept.stored, given, strict=True)):
        return kept.values
    if not all(map(tells_writes, given)):
        return tuple(function(source)(None, *given))
    with torch.inference_mode(False), torch.no_grad():  # what is kept may be used in any mode
        stored = tuple(map(_Stored.now, given))
        values = tuple(each.detach() for each in function(source)(None, *given))
    if entries is None:
        _kept.set(given[0], entries := {})
    entries[source] = _Kept(stored, values)
    return values


def _call(
    operands: list[Tensor | None], places: list[int], given: list[Tensor], source: str, operator: str, attrs: str
) -> Tensor:
    """``layerzero::<operator>`` over operands, of which those at some places are made by ``source`` of what is given."""
    return _called(operands, places, made_of(given, source), operator, attrs)


def _fake(
    operands: list[Tensor | None], places: list[int], given: list[Tensor], source: str, operator: str, attrs: str
) -> Tensor:
    return _called(operands, places, function(source)(None, *given), operator, attrs)


def _called(
    operands: Sequence[Tensor | None], places: Sequence[int], made: Sequence[Tensor], operator: str, attrs: str
) -> Tensor:
    filled = [*operands]
    for place, value in zip(places, made, strict=True):
        filled[place] = value
    found: Tensor = getattr(torch.ops.layerzero, f"{operator}_kernel").default(*filled, attrs)
    return found


def kernel_behind(name: str, arguments: Sequence[Any]) -> str:
    """The operator that a call of ``layerzero::<name>`` runs: another one where that gives it what is kept."""
    return str(arguments[4]) if name.startswith("kept_call") else name


#: ``call(operands, places, given, source, operator, attrs)``, in a graph.
call: Any = opaque("kept_call", _call, _fake)
