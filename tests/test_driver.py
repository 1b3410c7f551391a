"""What every recogniser does with its anchors: one walk, near misses of refusals, and faults that cost one anchor alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import Failure, MutatedError, NearMiss, RefusedError
from lz_compile.passes.graph.view import EMITTED
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Driver, Found, Match, Outcome, Site, TableEmitter


def _waves(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.sin(torch.cos(x)))


def _sines() -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.symbolic_trace(_waves).graph
    return graph, [node for node in graph.nodes if _is_sine(node)]


def _is_sine(node: fx.Node) -> bool:
    return node.target is torch.sin


def _match(node: fx.Node, *inner: fx.Node) -> Match:
    site = Site.of(Core((*inner, node), Ambient()), (), {})
    return Match("norm", site, Found(None, None, {}, {}, TableEmitter()))  # type: ignore[arg-type]  # nobody asks for them


def _raises(error: Exception) -> Callable[[fx.Node], Match]:
    def read(_node: fx.Node) -> Match:
        raise error

    return read


def _walked(driver: Driver, graph: fx.Graph, read: Callable[[fx.Node], Match | NearMiss | None]) -> list[Outcome]:
    return list(driver.walk(reversed(graph.nodes), _is_sine, read))


def test_what_a_match_covers_is_no_anchor_of_another() -> None:
    graph, (inner, outer) = _sines()
    read = {outer: _match(outer, inner), inner: _match(inner)}
    assert _walked(Driver("norm"), graph, read.__getitem__) == [read[outer]]


def test_what_a_kernel_emitted_is_no_anchor() -> None:
    graph, (inner, outer) = _sines()
    outer.meta[EMITTED] = True
    assert [found.site.output for found in _walked(Driver("norm"), graph, _match) if isinstance(found, Match)] == [
        inner
    ]


@pytest.mark.parametrize("overwrites", [False, True])
def test_what_is_refused_or_overwritten_is_a_near_miss(overwrites: bool) -> None:
    graph, (inner, outer) = _sines()
    error = MutatedError(inner) if overwrites else RefusedError("NO_NORM", "it is none", "write one")
    found = _walked(Driver("norm"), graph, _raises(error))
    assert [(each.node, each.reason.code, each.edit) for each in found if isinstance(each, NearMiss)] == [
        (node, *(("OPERAND_MUTATED", "use its out-of-place form") if overwrites else ("NO_NORM", "write one")))
        for node in (outer, inner)
    ]


@pytest.mark.parametrize("error", [LayoutError("no axes"), RefusedError("NO_NORM", "it is none", "write one")])
def test_what_was_not_meant_is_not_told(error: Exception) -> None:
    graph, _ = _sines()
    assert not _walked(Driver("norm", is_meant=lambda *_: False), graph, _raises(error))


def test_a_fault_at_one_anchor_costs_no_other() -> None:
    graph, (inner, outer) = _sines()
    first, second = _walked(Driver("norm"), graph, lambda node: _match(node) if node is inner else _match(None))  # type: ignore[arg-type]
    assert isinstance(first, Failure)
    assert isinstance(first.error, AttributeError), outer
    assert isinstance(second, Match)
