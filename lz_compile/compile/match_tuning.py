"""Measuring the kernels that a match may become, in the code around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.compile.measuring import is_measured, measure_forms, runnable
from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import symbolic_size
from lz_compile.lowering import ops
from lz_compile.passes.graph.view import value_of
from lz_compile.passes.proof.surroundings import Binding, Surrounded, surrounded, symbols
from lz_compile.runtime.choose.calls import DISPATCH
from lz_compile.runtime.choose.given import POWERS
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.problem.context import Symbols

if TYPE_CHECKING:
    from torch import fx

    from lz_compile.passes.fusion.fusion import Fusion
    from lz_compile.passes.graph.effects import Effects
    from lz_compile.passes.rewriting.match import Match
    from lz_compile.runtime.kernels.kernel import KernelSpec
    from lz_compile.runtime.policy.resolved import Policy

Sizes = Mapping[str, int]
#: A size that nobody has run here is measured up to this product of all sizes (scores of 256 MiB in float32), or four times
#: that of the traced sizes: the memory for more may not be there.
MAX_ELEMENTS = 1 << 26
#: Seconds for a graph where everything is to be measured, and the most where a little is: the share of what compiling takes.
BUDGET_S, _MOST_S, _SHARE = 60.0, 5.0, 0.1
#: What compiling takes at least, in seconds for each call of a graph (benchmarks/compile_time.py, cold caches), and what it
#: takes for one form of an attention and its timing. A usual machine will do: both grow alike on a slower one.
_CALL_S, _FORM_S = 0.03, 2.0
LEAST_S = 2 * _FORM_S
#: Calls of a graph after which measuring it has paid.
_CALLS = 1000


def little(graph: fx.Graph) -> float:
    """Seconds in which a graph may be measured without being asked: a tenth of what compiling it will take."""
    calls = len([node for node in graph.nodes if node.op.startswith("call_")])
    return min(_SHARE * _CALL_S * calls, _MOST_S)


def open_question(decision: Decision, problem: Problem, times: int, left_s: float) -> list[str]:
    """The best kernel and what may be better, where estimates cannot tell which is faster and finding out pays; else none.

    Args:
        decision: what would be chosen.
        problem: what for.
        times: how often it is in the graph.
        left_s: for measuring.
    """
    same = {DISPATCH, problem.alone}  # as leaving it alone, which is there as well
    best = [each for each in decision.candidates if not each.against and each.kernel.kernel_id not in same]
    best = [*best[:1], *sorted(best[1:], key=lambda each: each.estimate.least)[:1]]
    parts = [each.estimate.parts_us for each in best if each.estimate.parts_us is not None]
    if problem.symbols is not None or len(parts) < 2 or any(each.notes for each in best):  # a wish tells
        return []
    first, second = (each.estimate for each in best)
    if second.least > first.relative_latency * (1 + first.noise):
        return []
    once_s = 1e-6 * max(sum(each.values()) for each in parts)
    names = [each.kernel.kernel_id for each in best]
    forms = len({INDUCTOR, *names}) * (2 if problem.context.is_training else 1)
    costs_s, saves_s = forms * (_FORM_S + 3 * once_s), _CALLS * times * first.noise * once_s
    return names if costs_s <= min(left_s, saves_s) else []


def tune_match(
    match: Match,
    effects: Effects,
    problem: Problem,
    policy_: Policy,
    deadline: float,
    fusion: Fusion | None = None,
    only: Collection[str] | None = None,
) -> Problem:
    """Measure a match with its surroundings, where that is not done yet and no lock decides.

    Where sizes are symbolic it is measured at powers of two around those that it was traced with, the nearest first, as far
    as memory certainly goes.

    Args:
        match: what was recognised.
        effects: of its graph.
        problem: what to choose a kernel for.
        policy_: forbids some kernels, and says how many samples to take.
        deadline: on the clock of ``time.perf_counter``; nothing is begun after it.
        fusion: what kernels may compute along: every kernel is measured on all of it then.
        only: the kernels to measure beside leaving the match alone (None: all that can run).

    Returns:
        the problem with its surroundings.
    """
    along = () if fusion is None else fusion.ops
    found = surrounded(match if fusion is None else fusion.of(along), effects)
    found = replace(found, surroundings=" ".join((*along, found.surroundings)))
    problem = replace(problem, surroundings=found.surroundings)
    resolved_policy = policy_.resolved_policy(problem.context)
    candidates = [spec for spec in runnable(problem.context) if resolved_policy.excluded(spec.kernel_id) is None]
    wanted = [spec for spec in candidates if only is None or spec.kernel_id in (INDUCTOR, *only)]
    specs = [spec for spec in wanted if spec.kernel_id != problem.source_kernel]
    if len(specs) == 1 or resolved_policy.lock in [spec.kernel_id for spec in candidates]:
        return problem
    for binding, sizes in _bindings(match, found, problem):
        if is_measured(problem.context, specs, sizes, alone=problem.alone, surroundings=found.surroundings):
            continue
        if time.perf_counter() > deadline:
            text = f"{match.op} at {match.site.where} at {dict(sizes)}: the tuning budget is used up"
            events.record("NOT_MEASURED", text)
            break
        with isolated() as outside, outside.entered(), torch.set_grad_enabled(problem.context.is_training):
            measure_forms(
                problem.context,
                specs,
                partial(_form, found, match, fusion, specs),
                found.make_inputs(binding),
                sizes,
                alone=problem.alone,
                surroundings=found.surroundings,
                deadline=None if only is None else deadline,
                budget_s=max(deadline - time.perf_counter(), 1.0),
            )
    return problem


def _form(
    found: Surrounded, match: Match, fusion: Fusion | None, specs: Sequence[KernelSpec], call: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The surroundings with a kernel in place of the match, and of what it computes along."""
    if fusion is None or call is None:
        return found.function(call)
    spec = next(spec for spec in specs if spec.call is call)
    return found.function(call, fusion.of(spec.fuses_ops) if spec.fuses_ops else match)


def _bindings(match: Match, found: Surrounded, problem: Problem) -> Iterator[tuple[Binding, Sizes]]:
    """Numbers for every symbol, with the sizes that they give."""
    values = [value_of(node) for node in found.inputs]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    hints = {symbol: symbolic_size(symbol, tensors).hint for symbol in symbols(values)}
    traced: dict[Any, int] = {symbol: size for symbol, size in hints.items() if size is not None}
    if problem.symbols is None:
        yield traced, problem.context.hints()
        return
    known = {**problem.symbols.symbols, **problem.symbols.hidden}
    traced |= {symbol.expression: symbol.hint for symbol in known.values()}
    bucketed = ops.module(match.op).BUCKETED_DIMS
    moving = [known[name] for name in _moving(problem.symbols, known, bucketed)]
    largest = max(4 * _elements(bucketed, problem.symbols.at({})), MAX_ELEMENTS)
    for size in _around(moving) if moving else [None]:
        binding = {**traced, **{symbol.expression: size for symbol in moving if size is not None}}
        sizes = problem.symbols.at({str(symbol): value for symbol, value in binding.items()})
        if size in (None, moving[0].hint) or _elements(bucketed, sizes) <= largest:
            yield binding, sizes


def _moving(sizes: Symbols, known: Mapping[str, Any], bucketed: Iterable[tuple[str, ...]]) -> list[str]:
    """The symbol to be varied, lengths first, with the other lengths that were traced equal: those of self-attention are."""
    groups = sorted(bucketed, key=len)
    names = list(dict.fromkeys(name for dims in groups for name in sizes.names_in(dims)))
    lengths = {name for dims in groups if len(dims) == 1 for name in sizes.names_in(dims)}
    equal = [name for name in names if {name, names[0]} <= lengths and known[name].hint == known[names[0]].hint]
    return equal or names[:1]


def _elements(bucketed: Iterable[Iterable[str]], sizes: Sizes) -> int:
    return math.prod(sizes[name] for names in bucketed for name in names)


def _around(symbols: Sequence[Any]) -> list[int]:
    """Powers of two in the range of symbols that were traced with one size, the nearest to that first."""
    lower = max(symbol.lower for symbol in symbols)
    upper = min(POWERS[-1] if symbol.upper is None else symbol.upper for symbol in symbols)
    inside, hint = [size for size in POWERS if lower <= size <= upper], symbols[0].hint
    return sorted(inside or [hint], key=lambda size: abs(math.log2(size / max(hint, 1))))
