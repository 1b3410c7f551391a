"""``layerzero.verify``: the graph as it was runs beside the compiled one, on the real inputs, and its results count.

What is compared are the values of a call: outputs, and inputs that the graph overwrites; and in training the gradients of
those with respect to all inputs, parameters included. For these both run once more on copies, so that the backward pass is
none of the user's. A graph that draws random numbers is not compared, since compiled code draws others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.compile.options import Options
from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.isolation import Outside, generators, isolated
from lz_compile.ground.records import Reason
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.proof.agreement import SLACK, TOLERANCE
from lz_compile.passes.proof.trial_run import weights_of
from lz_compile.report.report import GraphReport

#: Gradients of weights are sums over all that the weights were used for: they may differ by so much more.
_GRADIENT_SLACK = 4.0


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
        versions = [_version(value) for value in inputs]
        differences = [] if expected is None else self._gradients(compiled, inputs)
        result = compiled(*inputs)
        if expected is None or before is None:
            return result, True
        outputs, after = expected
        overwritten = self._overwritten(inputs)
        told = {
            **{f"output {index}": pair for index, pair in enumerate(pairs(outputs, result))},
            **{f"input {index} afterwards": (after[index], inputs[index]) for index in overwritten},
        }
        written = [index for index, value in enumerate(inputs) if _version(value) != versions[index]]
        differences += [
            f"input {index} is written to, and what it held is lost" for index in written if index not in overwritten
        ]
        differences += [f"{name} {text}" for name, (ours, theirs) in told.items() if (text := difference(ours, theirs))]
        if not differences:
            return result, True
        text = f"the compiled graph does not give what the graph gave before it was rewritten: {'; '.join(differences)}"
        events.record("VERIFY_FAILED", f"{text}. That one runs from now on, without being compiled")
        with torch.no_grad():
            for index in overwritten:
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

    def _gradients(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
        """How gradients differ, where there are any; what cannot be compared is an event."""
        if not torch.is_grad_enabled() or not any(_is_tensor(value) and value.requires_grad for value in inputs):
            return []
        try:
            expected = self._differentiated(self._module.forward, inputs)
        except Exception as error:  # noqa: BLE001 a check that is impossible must not break the call
            events.record("NOT_VERIFIED", "gradients are not verified: as it was, the graph gives none here", error)
            return []
        try:
            found = self._differentiated(compiled, inputs, expected)
        except Exception as error:  # noqa: BLE001 it will be raised where the user asks for gradients; here it is a difference
            return [f"its backward pass raises {type(error).__name__}: {error}"]
        lost = [f"result {index} has no gradient" for index in expected.graded - found.graded]
        lost += [f"result {index} has a gradient, and had none" for index in found.graded - expected.graded]
        kinds = {*expected.ends.values(), *(dtype for _, dtype in Outside.now().autocast)}
        told: dict[int, str] = {}
        for index, ours in expected.gradients.items():
            coarsest = max({ours.dtype, *kinds}, key=lambda kind: TOLERANCE.get(kind, TOLERANCE[torch.bfloat16]))
            told[index] = difference(ours, found.gradients[index], coarsest, _GRADIENT_SLACK)
        return [*lost, *(f"the gradient of input {index} {text}" for index, text in told.items() if text)]

    def _differentiated(
        self, function: Callable[..., Any], inputs: Sequence[Any], like: _Differentiated | None = None
    ) -> _Differentiated:
        """Run a function forward and back on copies; ``like`` says which results to begin with (all, if there is none)."""
        overwritten = self._overwritten(inputs)
        given, leaves = self._copies(inputs), dict[int, torch.Tensor]()
        for index, value in enumerate(inputs):
            if _is_tensor(value) and value.requires_grad:
                leaves[index] = given[index].requires_grad_()
                if index in overwritten and not value.is_leaf:
                    given[index] = _apart_from(given, index)
        with isolated() as outside:
            with outside.entered():
                outputs = function(*given)
            results = pytree.tree_leaves([outputs, [given[index] for index in overwritten]])
            ends = {index: each for index, each in enumerate(results) if _is_tensor(each) and each.requires_grad}
            graded = frozenset(ends)
            ends = {index: each for index, each in ends.items() if like is None or index in like.ends}
            begin = [weights_of(each) for each in ends.values()]
            found = torch.autograd.grad([*ends.values()], [*leaves.values()], begin, allow_unused=True) if ends else ()
        zeros = {index: torch.zeros_like(leaf, requires_grad=False) for index, leaf in leaves.items()}
        gradients = zeros | {index: each for index, each in zip(leaves, found, strict=False) if each is not None}
        return _Differentiated({index: each.dtype for index, each in ends.items()}, gradients, graded)

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
            with torch.inference_mode(False):  # they are overwritten outside of it
                copies[index] = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, *place)
        return copies


@dataclass(frozen=True)
class _Differentiated:
    """The dtypes of results that are differentiated, and the gradient of each input, by position; all that could be."""

    ends: Mapping[int, torch.dtype]
    gradients: Mapping[int, torch.Tensor]
    graded: frozenset[int]


def _apart_from(given: Sequence[Any], index: int) -> torch.Tensor:
    """A copy that is no leaf, for a graph that overwrites it, and lies in memory as it did.

    Raises:
        ValueError: there is no such copy.
    """
    value: torch.Tensor = given[index]
    copy = value.clone()
    shared = [each for each in given if _is_tensor(each) and _address(each) == _address(value)]
    if len(shared) > 1 or copy.stride() != value.stride():
        raise ValueError(f"input {index}, which is overwritten, shares memory, or lies in a part of it")
    return copy


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
        events.record("NOT_VERIFIED", "looking for what the graph overwrites", error)
        return f"what it overwrites is not known ({type(error).__name__}: {error})"
    if any(owner.op == "get_attr" for owner in owners):
        return "it overwrites what is no input of it"
    return [index for index, node in enumerate(placeholders) if node in owners]


def pairs(expected: Any, actual: Any) -> list[tuple[Any, Any]]:
    """What is in two results, side by side; the results themselves where they hold unlike many things."""
    ours, theirs = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else [(expected, actual)]


def difference(expected: Any, actual: Any, kind: torch.dtype | None = None, slack: float = 1.0) -> str:
    """How a result differs by more than a dtype (its own, if ``kind`` is None) explains, empty where it does not."""
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
    limit = slack * SLACK * scale * TOLERANCE.get(kind or expected.dtype, TOLERANCE[torch.bfloat16])
    error = (ours - theirs).abs()
    is_near = (error <= limit) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(is_near.all()):
        return ""
    return f"is off by {float(error.nan_to_num(torch.inf).max()):.3g}, where {limit:.3g} is rounding"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _version(value: Any) -> int:
    """How often a tensor was written to, as far as PyTorch counts that."""
    return value._version if _is_tensor(value) and not value.is_inference() else 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
