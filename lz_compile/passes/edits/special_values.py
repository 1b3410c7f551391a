"""Whether a value may be NaN or infinite although what it is computed from is not: a root of a negative number, say."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes import layout
from lz_compile.passes.algebra import is_pointwise
from lz_compile.passes.edits.snapshot import Was
from lz_compile.passes.edits.trial_run import NotRunnableError, random_inputs, run
from lz_compile.passes.effects import Ambient
from lz_compile.passes.view import read
from lz_compile.runtime.isolation import isolated

_JOINS = frozenset({"stack", "cat", "getitem", "select", "unbind", "split", "chunk", "flip", "narrow"})
_MOST = 256


def may_be_special(node: fx.Node) -> bool:
    """Compute a value from normal random numbers, back to where it is no function of single elements; True if in doubt."""
    calls, leaves = _above(node)
    try:
        with isolated(), torch.no_grad():
            inputs = random_inputs(leaves, 0, positive=False, doubled=True, with_grad=False)
            (value,) = run([Was.of(each) for each in calls], [node], inputs, Ambient(), _no_attribute).values
    except (NotRunnableError, RuntimeError, TypeError, ValueError):
        return True
    return not bool(value.isfinite().all())


def _no_attribute(path: str) -> None:
    raise NotRunnableError(f"it reads {path}")


def _above(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls that give a value element by element, in order, and what they read."""
    calls, leaves, queue = set[fx.Node](), set[fx.Node](), [node]
    while queue:
        each = queue.pop()
        call = read(each)
        moves = call is not None and (is_pointwise(call) or layout.rearranges(call) or call.name in _JOINS)
        if call is None or call.is_inplace or not moves or len(calls) == _MOST:
            leaves.add(each)
        elif each not in calls:
            calls.add(each)
            queue.extend(each.all_input_nodes)
    return sorted(calls), sorted(leaves)
