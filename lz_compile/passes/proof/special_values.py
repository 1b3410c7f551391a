"""Whether a value may be NaN or infinite although what it is computed from is not: a root of a negative number, say."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.purity import is_pure
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.proof.running import no_attribute
from lz_compile.passes.proof.trial_run import random_inputs, run

_MOST = 256


def may_be_special(node: fx.Node) -> bool:
    """Compute a value from normal random numbers in the place of inputs (or far above); True if in doubt."""
    calls, leaves = _above(node)
    for below in (2, 1):  # where one is no index, zero is
        try:
            with isolated(), torch.no_grad():
                inputs = random_inputs(leaves, 0, positive=False, doubled=True, with_grad=False, below=below)
                (value,) = run([Was.of(each) for each in calls], [node], inputs, Ambient(), no_attribute).values
            return not bool(value.isfinite().all())
        except IndexError:
            continue
        except Exception:  # noqa: BLE001 whatever else a run on random numbers raises is doubt
            return True
    return True


def _above(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls that give a value, in order, and what they read."""
    calls, leaves, queue = set[fx.Node](), set[fx.Node](), [node]
    while queue:
        each = queue.pop()
        if len(calls) == _MOST or each.op not in ("call_function", "call_method") or not is_pure(each):
            leaves.add(each)
        elif each not in calls:
            calls.add(each)
            queue.extend(each.all_input_nodes)
    return sorted(calls), sorted(leaves)
