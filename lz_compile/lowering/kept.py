"""What is computed of parameters alone, computed once: a kernel's call whose operands are kept from call to call.

A graph gives a kernel its weight in another form than the model stores: packed numbers are unpacked, columns are put in
another order. That form is kept beside the stored tensor, for as long as that lives, and looked up by what it was made from:

- the same tensors (the objects), which nobody gave another memory (their addresses);
- unchanged since: every write that autograd knows of, in place or by ``load_state_dict``, advances a tensor's version;
- on a CPU, equal in some of their elements, spread over all of them: a write behind autograd's back
  (``weight.data.copy_()``) changes no version, and other weights differ nearly everywhere.

What differs in any of these is computed anew, in that call. A write through ``.data`` to few elements is not noticed.
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

#: Elements of a tensor that are compared at every call.
_SOME = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor when something was made from it. ``some`` shows its memory, which is not given to another tensor."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    some: Tensor
    values: Tensor | None

    @classmethod
    def now(cls, tensor: Tensor) -> _Stored:
        """A tensor as it is."""
        each = max(1, int(_SOME ** (1 / max(tensor.dim(), 1))))
        some = tensor.detach()[tuple(slice(None, None, max(1, math.ceil(size / each))) for size in tensor.shape)]
        some = some if some.is_complex() else some.view(_INTEGERS[some.element_size()])  # NaN is itself
        values = some.clone() if tensor.device.type == "cpu" else None  # elsewhere, comparing waits for the device
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), some, values)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, as it was."""
        is_same = self.tensor() is tensor and self.version == tensor._version and self.address == tensor.data_ptr()
        return is_same and (self.values is None or torch.equal(self.some, self.values))


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
        for device in {each.device for each in values if each.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # other streams may use it
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
