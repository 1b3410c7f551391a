"""What Dynamo calls while it traces a rolled function: their results are constants, and no guards are of them.

What they look up changes only where ``Support.state`` does, which is guarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground.events import record

if TYPE_CHECKING:
    from lz_compile.api.rolling.running import Support


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
def is_like(known: Support, key: int, kind: str) -> bool:
    """Whether the like of a loop was proven, or is tried now; modules are those in the ``facts`` of who asks."""
    from lz_compile.lowering.frames import traced_modules

    return known.takes(key, kind, traced_modules("facts"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_undifferentiated(known: Support) -> bool:
    """Whether loops were proven without gradients."""
    return known.is_undifferentiated


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trains(known: Support) -> bool:
    """Whether a parameter is trained."""
    return known.root is not None and any(each.requires_grad for each in known.root.parameters())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_peeled(known: Support, key: int) -> bool:
    """Whether the first step of a loop is one by itself."""
    return key in known.peeled


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def whole_of(known: Support, key: int, place: int) -> torch.dtype | None:
    """The dtype of what steps hand out, if that is no float."""
    return known.whole.get((key, place))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def chunk_of(known: Support) -> str | None:
    """Steps from one kept state to the next, as Dynamo makes no symbol of it."""
    return known.chunk


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plan_of(known: Support, where: str) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Of what a step needs twins of: where it is, and which attributes it has, by name."""
    return tuple((each.path, each.states, each.others, each.items, each.bound) for each in known.parts.get(where, ()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def twin_of(known: Support, where: str, place: int) -> type:
    """The class of a twin."""
    return known.parts[where][place].twin
