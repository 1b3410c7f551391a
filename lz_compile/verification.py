"""``layerzero.verify``: the graph as it was runs beside the compiled one, on the real inputs, and its results count.

What is compared are the values of a call: outputs, and inputs that the graph overwrites. Gradients are proven while compiling
only: to compare them here, a backward would have to run that nobody asked for. A graph that draws random numbers is not
compared, since compiled code draws others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.errors import RewriteFailedError
from lz_compile.options import Options
from lz_compile.passes.effects import Effects
from lz_compile.passes.validate import SLACK, TOLERANCE
from lz_compile.reasons import Reason
from lz_compile.runtime import events
from lz_compile.runtime.isolation import generators, isolated
from lz_compile.runtime.report import GraphReport


def keep(module: fx.GraphModule) -> Original | None:
    """A graph as it is now, to be compared with what becomes of it; None, with an event, where it cannot be copied."""
    try:
        return Original(module)
    except Exception as error:  # noqa: BLE001 a check that is impossible must not break a compile
        events.record("NOT_VERIFIED", "the compiled graph is not verified: as it is, it cannot be kept", error)
        return None


class Original:
    """A graph as it is now, apart from the module, which is rewritten in place."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = _apart(module)
        self._written = _written(self._module.graph)

    def verifying(self, compiled: Callable[..., Any], report: GraphReport, options: Options) -> Callable[..., Any]:
        """``compiled``, the first call of which (or every one) is compared with the graph as it was.

        After a difference, which is an event, that one runs instead. (When called) it raises ``RewriteFailedError`` for that
        if ``options.strict`` is set.
        """
        runs_original, is_verified = False, False

        def run(*inputs: Any) -> Any:
            nonlocal runs_original, is_verified
            if runs_original:
                return self._module.forward(*inputs)
            if is_verified:
                return compiled(*inputs)
            with events.collect() as happened:
                result, is_same = self._compared(compiled, inputs)
            report.events.extend(happened)
            runs_original, is_verified = not is_same, options.verify == "first-call"
            if not is_same:
                _refute(report)
                if options.strict:
                    raise RewriteFailedError(next(each.message for each in happened if each.code == "VERIFY_FAILED"))
            return result

        return run

    def _compared(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, bool]:
        """What a call gives, and whether it is what the graph gave as it was."""
        expected = self._reference(inputs)
        before = None if expected is None else self._copies(inputs)
        result = compiled(*inputs)
        if expected is None or before is None:
            return result, True
        outputs, after = expected
        told = {
            **{f"output {index}": pair for index, pair in enumerate(_pairs(outputs, result))},
            **{f"input {index} afterwards": (after[index], inputs[index]) for index in self._overwritten(inputs)},
        }
        differences = [f"{name} {text}" for name, (ours, theirs) in told.items() if (text := _difference(ours, theirs))]
        if not differences:
            return result, True
        text = f"the compiled graph does not give what the graph gave before it was rewritten: {'; '.join(differences)}"
        events.record("VERIFY_FAILED", f"{text}. That one runs from now on, without being compiled")
        with torch.no_grad():
            for index in self._overwritten(inputs):
                inputs[index].copy_(before[index])
        return self._module.forward(*inputs), False

    def _reference(self, inputs: Sequence[Any]) -> tuple[Any, list[Any]] | None:
        """The outputs, and the inputs afterwards; None, with an event, where nothing can be said."""
        if isinstance(self._written, str):
            events.record("NOT_VERIFIED", f"the compiled graph is not verified: {self._written}")
            return None
        try:
            copies = self._copies(inputs)
            with isolated() as outside, outside.entered():
                states = [generator.get_state() for generator in generators()]
                outputs = self._module.forward(*copies)
                moved = any(
                    not torch.equal(each.get_state(), state) for each, state in zip(generators(), states, strict=True)
                )
        except Exception as error:  # noqa: BLE001 a check that is impossible must not break the call
            events.record("NOT_VERIFIED", "the compiled graph is not verified: as it was, it does not run here", error)
            return None
        if moved:
            events.record("NOT_VERIFIED", "the compiled graph is not verified: it draws random numbers")
            return None
        return outputs, copies

    def _overwritten(self, inputs: Sequence[Any]) -> list[int]:
        """The inputs in memory that the graph overwrites."""
        memory = {_address(inputs[index]) for index in self._written if isinstance(index, int)}
        return [index for index, value in enumerate(inputs) if _is_tensor(value) and _address(value) in memory]

    def _copies(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs without gradients: copies where they are overwritten, which share memory as the inputs do."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies = [value.detach() if _is_tensor(value) else value for value in inputs]
        for index in self._overwritten(inputs):
            value = copies[index]
            storage = storages.setdefault(_address(value), value.untyped_storage().clone())
            place = (value.storage_offset(), value.size(), value.stride())
            copies[index] = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, *place)
        return copies


def _refute(report: GraphReport) -> None:
    for match in report.matches:
        if match.rewritten:
            match.kernel, match.rewritten = "inductor", False
            match.reasons.append(
                Reason("VERIFY_FAILED", "the graph as it was runs instead, for its results are others")
            )


def _apart(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and the graphs that it calls, over the same tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    names = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    values: Mapping[str, Any] = {name: operator.attrgetter(name)(module) for name in names}
    return fx.GraphModule(
        {name: _apart(each) if isinstance(each, fx.GraphModule) else each for name, each in values.items()}, graph
    )


def _written(graph: fx.Graph) -> list[int] | str:
    """The positions of the inputs that a graph overwrites, or why that cannot be told."""
    placeholders = graph.find_nodes(op="placeholder")
    try:
        effects = Effects(graph)
        owners = {effects.owner(target) for _, target in effects.writes_made}
    except Exception as error:  # noqa: BLE001 a fault of ours must not break the call
        return f"what it overwrites is not known ({type(error).__name__}: {error})"
    if any(owner.op == "get_attr" for owner in owners):
        return "it overwrites what is no input of it"
    return [index for index, node in enumerate(placeholders) if node in owners]


def _pairs(expected: Any, actual: Any) -> list[tuple[Any, Any]]:
    ours, theirs = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else [(expected, actual)]


def _difference(expected: Any, actual: Any) -> str:
    """How a result differs by more than its dtype explains, empty where it does not."""
    if not _is_tensor(expected) or not _is_tensor(actual):
        return "" if expected == actual else f"is {actual!r}, expected {expected!r}"
    kinds = [f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, expected {kinds[1]}"
    if not expected.is_floating_point() and not expected.is_complex():
        wrong = int((expected != actual).sum())
        return f"has {wrong} of {expected.numel()} elements wrong" if wrong else ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    ours, theirs = expected.detach().to(wide), actual.detach().to(wide)
    finite = ours[ours.isfinite()].abs()
    scale = 1 + (float(finite.max()) if finite.numel() else 0.0)
    limit = SLACK * scale * TOLERANCE.get(expected.dtype, TOLERANCE[torch.bfloat16])
    error = (ours - theirs).abs()
    is_near = (error <= limit) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(is_near.all()):
        return ""
    return f"is off by {float(error.nan_to_num(torch.inf).max()):.3g}, where {limit:.3g} is rounding"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
