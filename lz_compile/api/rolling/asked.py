"""What Dynamo calls while it traces a rolled function: their results are constants, and no guards are of them."""

from __future__ import annotations

import torch

from lz_compile.ground.events import record


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def let_inductor_count() -> bool:
    """What Inductor needs for a scan, under whatever backend it is traced: it is called by Dynamo."""
    from lz_compile.lowering.inductor import allow_counters

    allow_counters()
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_confined(place: str) -> bool:
    """Whether PyTorch compiles no scan where this is traced: it is called by Dynamo."""
    from lz_compile.lowering.inductor import confines_scans

    found = confines_scans()
    if found:
        tell(place, "it is inside of a transform of torch.func, or of a checkpoint with gradients")
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def tell(place: str, why: str) -> bool:
    """That a loop is traced as it is written: it is called by Dynamo."""
    record("LOOP_NOT_ROLLED", f"the loop at {place}: {why}")
    return True
