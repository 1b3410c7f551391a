"""Attentions that a graph break tears apart: no graph holds one, so that no recogniser sees it.

Followed are the tensors that leave one graph of a model and enter a later one: scores (a product of two activations) and
probabilities (a softmax over scores). Where such a tensor is multiplied in another graph, the break between is a near miss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.lowering import frames
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.graph.refusal import where_of
from lz_compile.passes.graph.view import read
from lz_compile.report.findings import MissReport
from lz_compile.report.report import GraphReport

_EXPONENTIALS = frozenset({"softmax", "exp", "exp2"})
_EDIT = "take the cause of the break out of the attention (TORCH_LOGS=graph_breaks tells all of them)"


class _Level(IntEnum):
    SCORES = 1
    PROBABILITIES = 2


@dataclass(frozen=True)
class _Value:
    """How far an attention has come in a tensor, where scores and softmax are computed, and the break since the scores."""

    level: _Level
    where: str
    softmax: str = ""
    since: str | None = None


@dataclass(frozen=True)
class _Step:
    name: str
    kind: str
    call: str
    inputs: tuple[str, ...]
    where: str


#: Takes what runs a graph, and its report; gives what runs it.
Watch: TypeAlias = "Callable[[Callable[..., Any], GraphReport], Callable[..., Any]]"


class GraphBreaks:
    """What left the graphs of one model so far."""

    def __init__(self) -> None:
        self._left: list[tuple[weakref.ref[torch.Tensor], torch.Size, _Value]] = []
        self._told: set[tuple[str, str]] = set()
        self.reports: list[GraphReport] = []

    def watched(self, module: fx.GraphModule) -> Watch:
        """Wraps what runs a graph, such that what tears an attention becomes a near miss of its report.

        To be called before the graph is rewritten.
        """
        steps, cause = tuple(map(_step, module.graph.nodes)), frames.break_reason(module)

        def watch(run: Callable[..., Any], report: GraphReport) -> Callable[..., Any]:
            self.reports.append(report)

            def call(*inputs: Any) -> Any:
                results = run(*inputs)
                with events.collect() as happened:
                    try:
                        torn = list(self._follow(steps, cause, inputs, results))
                        report.near_misses.extend(torn)
                    except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
                        events.record("RECOGNISER_FAILED", "looking for what graph breaks tear apart", error)
                report.events.extend(happened)
                return results

            return call

        return watch

    def _follow(
        self, steps: Sequence[_Step], cause: str | None, inputs: Sequence[Any], results: Any
    ) -> Iterator[MissReport]:
        values: dict[str, _Value] = {}
        weights: set[str] = set()
        given = iter(inputs)
        for step in steps:
            if step.kind == "placeholder":
                argument = next(given)
                if isinstance(argument, torch.nn.Parameter):
                    weights.add(step.name)
                elif isinstance(argument, torch.Tensor) and (found := self._entered(argument)) is not None:
                    values[step.name] = found
            elif step.kind == "output":
                self._leave(step, values, results, cause)
            else:
                yield from self._compute(step, values, weights)

    def _compute(self, step: _Step, values: dict[str, _Value], weights: set[str]) -> Iterator[MissReport]:
        if all(name in weights for name in step.inputs):
            weights.update([step.name] if step.inputs or step.kind == "get_attr" else [])
            return
        found = max((values[name] for name in step.inputs if name in values), key=lambda each: each.level, default=None)
        if step.call not in PRODUCTS:
            if found is not None and step.call in _EXPONENTIALS:
                found = replace(found, level=_Level.PROBABILITIES, softmax=step.where)
            if found is not None:
                values[step.name] = found
            return
        is_projection = any(name in weights for name in step.inputs)
        if found is None or found.level == _Level.SCORES:
            if not is_projection:
                values[step.name] = found or _Value(_Level.SCORES, step.where)
        elif found.since is not None and not is_projection:
            self._explain_away(found)
            if (found.where, found.since) not in self._told:
                self._told.add((found.where, found.since))
                text = (
                    f"its scores and its values are in different graphs, since {found.since} breaks the graph between"
                )
                yield MissReport("attention", found.where, Reason("GRAPH_BREAK", text), _EDIT)

    def _explain_away(self, found: _Value) -> None:
        """What the graph with the softmax is told by itself, that there are no values, is no news any more."""
        for report in self.reports:
            report.near_misses = [
                miss
                for miss in report.near_misses
                if (miss.reason.code, miss.where) != ("NO_VALUES", found.softmax or found.where)
            ]

    def _leave(self, step: _Step, values: Mapping[str, _Value], results: Any, cause: str | None) -> None:
        self._left = [each for each in self._left if each[0]() is not None]
        for name, result in zip(step.inputs, results if isinstance(results, (tuple, list)) else (), strict=False):
            if name in values and isinstance(result, torch.Tensor):
                value = replace(values[name], since=values[name].since or cause or "something")
                self._left.append((weakref.ref(result), result.shape, value))

    def _entered(self, tensor: torch.Tensor) -> _Value | None:
        """What a tensor is that comes from outside: one that left a graph, or probabilities made of scores that did."""
        for left, _, value in self._left:
            if left() is tensor:
                return value
        alike = [value for _, shape, value in self._left if shape == tensor.shape and value.level == _Level.SCORES]
        return replace(alike[-1], level=_Level.PROBABILITIES) if alike and _is_distribution(tensor) else None


def _step(node: fx.Node) -> _Step:
    call = read(node)
    names = tuple(each.name for each in node.all_input_nodes)
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        names = tuple(each.name if isinstance(each, fx.Node) else "" for each in results)
    return _Step(node.name, node.op, "" if call is None else call.name, names, where_of(node))


def _is_distribution(tensor: torch.Tensor) -> bool:
    """Whether a tensor with data holds numbers that sum to one along its last dimension."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    sums = tensor.detach().double().sum(-1)
    return bool((tensor >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)
