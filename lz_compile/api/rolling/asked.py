"""What Dynamo calls while it traces a rolled function: their results are constants, and no guards are of them.

What they look up changes only where ``Support.state`` does, which is guarded. They are given constants alone, for Dynamo
hands objects to such functions from PyTorch 2.13 on only: what is known of loops has a name.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from lz_compile.ground.events import record

if TYPE_CHECKING:
    from lz_compile.api.rolling.running import Support

_numbers = count()
_known: WeakValueDictionary[str, Support] = WeakValueDictionary()


def named(known: Support) -> str:
    """The name by which something new is asked for."""
    name = f"loops {next(_numbers)}"
    _known[name] = known
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def let_inductor_count() -> bool:
    """What Inductor needs for a scan, under whatever backend it is traced."""
    from lz_compile.lowering.frames import allow_counters

    allow_counters()
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def see_assignments(is_behind: bool) -> bool:
    """That attributes may be assigned behind a scan, called in front of it and behind."""
    from lz_compile.lowering import frames

    frames.see_assignments(is_behind=is_behind)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_confined(place: str) -> bool:
    """Whether PyTorch compiles no scan where this is traced."""
    from lz_compile.lowering.frames import confines_scans

    found = confines_scans()
    if found:
        tell(place, "it is inside of a transform of torch.func, or of a checkpoint with gradients")
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def tell(place: str, why: str) -> bool:
    """That a loop is traced as it is written."""
    record("LOOP_NOT_ROLLED", f"the loop at {place}: {why}")
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_like(name: str, key: int, kind: str) -> bool:
    """Whether the like of a loop was proven, or is tried now; modules are those in the ``facts`` of who asks."""
    from lz_compile.lowering.frames import traced_modules

    return _known[name].takes(key, kind, traced_modules("facts"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_undifferentiated(name: str) -> bool:
    """Whether loops were proven without gradients."""
    return _known[name].is_undifferentiated


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trains(name: str) -> bool:
    """Whether a parameter is trained."""
    root = _known[name].root
    return root is not None and any(each.requires_grad for each in root.parameters())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_peeled(name: str, key: int) -> bool:
    """Whether the first step of a loop is one by itself."""
    return key in _known[name].peeled


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def whole_of(name: str, key: int, place: int) -> torch.dtype | None:
    """The dtype of what steps hand out, if that is no float."""
    return _known[name].whole.get((key, place))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def chunk_of(name: str) -> str | None:
    """Steps from one kept state to the next, as Dynamo makes no symbol of it."""
    return _known[name].chunk


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plan_of(name: str, where: str) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Of what a step needs twins of: where it is, and which attributes it has, by name."""
    return tuple(
        (each.path, each.states, each.others, each.items, each.bound) for each in _known[name].parts.get(where, ())
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def twin_of(name: str, where: str, place: int) -> type:
    """The class of a twin."""
    return _known[name].parts[where][place].twin
