"""Scans that are differentiated, by an operator that computes steps again backwards instead of keeping what they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.reasons import Reason
from lz_compile.lowering.checkpointed_scan import CHUNK_NOTE, checkpointed_scan
from lz_compile.passes.editing.edit import RefutedError, Rewrite
from lz_compile.passes.graph.modes import ambient_of
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.writes import is_pure
from lz_compile.passes.loops.roll.roll import SCAN
from lz_compile.passes.loops.roll.scan_outputs import is_graded
from lz_compile.passes.proof.running import NotRunnableError
from lz_compile.passes.proof.trial_run import random_inputs

#: Steps that are tried, and those of a chunk: chunks that are even, and with some over.
_TRIED, _CHUNK = (6, 7), 2
#: How far apart results may be, of the largest: in float64 but for casts of a step's own, and where it takes no other dtypes.
_TOLERANCE, _OWN_TOLERANCE = 1e-3, 5e-2


def checkpoints(module: fx.GraphModule, unproven: list[Reason]) -> Iterator[Rewrite[None]]:
    """Replacements of such scans, each held against its loop: values and gradients, on few steps.

    PyTorch's operator (2.13) keeps all that a step makes, in memory of all steps that it copies in every step. It stays under
    autocast, which a step that is computed again backwards would not see, and where a step cannot be tried.

    Raises:
        RefutedError: one would compute something else.
    """
    modes = ambient_of(module.graph.nodes)
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        step = node.args[0]
        body = module.get_submodule(str(step.target)) if isinstance(step, fx.Node) else None
        if not isinstance(body, fx.GraphModule) or not is_graded(node) or not _can_be_repeated(body):
            continue
        if modes[node].autocast or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            continue
        chunk = (node.meta.get("custom") or {}).get(CHUNK_NOTE)
        try:
            _try(node, body)
        except (NotRunnableError, RuntimeError, TypeError) as error:
            unproven.append(Reason("EDIT_UNPROVEN", f"PyTorch's operator for the loop {told(node)} stays: {error}"))
            continue
        make = partial(_replace, node, None if chunk is None else int(chunk))
        yield Rewrite("computing steps again backwards", make, shown="held against its loop", undoes_itself=True)


def _replace(node: fx.Node, chunk: int | None) -> None:
    node.target, node.args = checkpointed_scan, (*node.args, chunk)


def _can_be_repeated(body: fx.GraphModule) -> bool:
    """Whether a step gives the same whenever it is computed, and holds no graph of its own."""
    return all(is_pure(node) for node in body.graph.nodes if node.op in ("call_function", "call_method", "call_module"))


def _try(node: fx.Node, body: fx.GraphModule) -> None:
    try:
        _compare(node, body, doubled=True)
    except (RuntimeError, TypeError):  # casts of its own, which float64 does not go with
        _compare(node, body, doubled=False)


def _compare(node: fx.Node, body: fx.GraphModule, *, doubled: bool) -> None:
    parts: list[list[Any]] = [list(each) for each in node.args[1:]]  # type: ignore[arg-type]
    nodes = [each for part in parts for each in part if isinstance(each, fx.Node)]
    tolerance = _TOLERANCE if doubled else _OWN_TOLERANCE
    with isolated(), torch.enable_grad():
        known = random_inputs(nodes, 0, positive=False, doubled=doubled, with_grad=False).values
        given = [[known.get(each, each) for each in part] for part in parts]
        for steps in _TRIED:
            expected = _results(partial(_looped, body), given, steps)
            found = _results(partial(_checkpointed, body), given, steps)
            for one, other in zip(expected, found, strict=True):
                if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * _size(one), equal_nan=True):
                    raise RefutedError("a loop is another one where steps are computed again backwards")


def _size(found: Tensor) -> float:
    return float(found.abs().nan_to_num(posinf=0.0).max()) if found.numel() else 0.0


def _looped(body: Callable[..., Any], init: list[Any], xs: list[Any], additional: list[Any]) -> list[Tensor]:
    carry, found = init, []
    for now in zip(*(each.unbind(0) for each in xs), strict=True):
        made = body(*carry, *now, *additional)
        carry = list(made[: len(init)])
        found.append(made[len(init) :])
    return [*carry, *(torch.stack(each) for each in zip(*found, strict=True))]


def _checkpointed(body: Any, init: list[Any], xs: list[Any], additional: list[Any]) -> tuple[Tensor, ...]:
    return checkpointed_scan(body, init, xs, additional, _CHUNK)


def _results(run: Callable[..., Any], given: list[list[Any]], steps: int) -> list[Tensor]:
    """Results and gradients of copies of the operands, on few steps."""
    init, xs, additional = ([each.clone() if isinstance(each, Tensor) else each for each in part] for part in given)
    xs = [each[:steps].clone() for each in xs]
    leaves = [each for each in (*init, *xs, *additional) if isinstance(each, Tensor) and each.is_floating_point()]
    for each in leaves:
        each.requires_grad_()
    found = [each for each in run(init, xs, additional) if isinstance(each, Tensor)]
    ends = [(each.double() * (1 + i)).cos().sum() for i, each in enumerate(found) if each.requires_grad]
    grads = (
        torch.autograd.grad(torch.stack(ends).sum(), leaves, allow_unused=True, materialize_grads=True) if ends else ()
    )
    return [*(each.detach() for each in found), *grads]
