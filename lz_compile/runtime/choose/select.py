"""Choose a kernel: filter by what can run, expect a latency for each, and decide, with a reason for every candidate.

Policy comes first (locks, exclusions), then capabilities, health and memory, then latencies: measured where there are
measurements, the shipped priors elsewhere. Leaving the subgraph to Inductor is a candidate like any other and the one
that is taken when nothing is better by more than the noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lz_compile.errors import NoKernelFoundError
from lz_compile.ground import health
from lz_compile.ground.records import Reason
from lz_compile.lowering import ops
from lz_compile.runtime.choose.agreed import Agreed
from lz_compile.runtime.choose.calls import DISPATCH, call_estimates, eager_kernel, needs_compile
from lz_compile.runtime.choose.given import notes, points, records_of, span, with_settings
from lz_compile.runtime.choose.problem import MARGIN, Candidate, Decision, Problem
from lz_compile.runtime.kernels import constraints
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR, Estimate, estimates
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.policy.resolved import Policy, ResolvedPolicy
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.problem.bucket_limits import Unanswerable, compiles_are_scarce, grown, limit, within
from lz_compile.runtime.problem.buckets import Sample, winner
from lz_compile.runtime.problem.context import Symbols
from lz_compile.runtime.problem.decision_tree import Leaf, Node, choose
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.loaded import Loaded
from lz_compile.runtime.tables.trees import MAX_SIZE, over_symbols

#: Points of a preference or an aversion; 100 points are Inductor's speed.
PREFERRED, AVOIDED = 20.0, -50.0
#: Kernels that one symbol may lead to: Dynamo compiles that often, and gives up at eight.
MAX_OUTCOMES = 6


def select(
    problem: Problem,
    policy: Policy,
    tables: Sequence[Loaded] | None = None,
    *,
    elsewhere: Mapping[str, Reason] = MappingProxyType({}),
    agreed: Agreed | None = None,
) -> Decision:
    """The kernel for a problem under a policy, and under dispatch tables (None: those that this process loaded).

    Args:
        tables: dispatch tables, the one to ask first in front.
        elsewhere: why kernels cannot run on other ranks of the job, so that none takes them; not those that always run.
        agreed: what the ranks of the job agreed on, which is followed where this one can.

    Raises:
        NoKernelFoundError: nothing can run an eager call; in a compiled graph, Inductor always can.
    """
    tables = loaded_tables.active() if tables is None else tables
    return _Selection(problem, policy, tables, elsewhere, agreed).decide()


class _Selection:
    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        tables: Sequence[Loaded],
        elsewhere: Mapping[str, Reason],
        agreed: Agreed | None,
    ) -> None:
        self.problem, self.policy, self.elsewhere, self.agreed = problem, policy, elsewhere, agreed
        self.incumbent = eager_kernel(problem.context.op) if problem.is_eager else INDUCTOR
        self.context = with_settings(problem.context, policy)
        self.resolved_policy: ResolvedPolicy = policy.resolved_policy(self.context)
        self.specs = list(kernels(self.context.operation).values())
        self.against = {spec.kernel_id: tuple(self._against(spec)) for spec in self.specs}
        self.records = self._records()
        spelled_out = replace(problem, source_kernel=None, left_as=None)
        self.spelled_out = [] if problem.alone is None else self._records(spelled_out)
        self.table, self.table_tree = self._table(tables)
        self.asked: list[str] = []
        #: Of kernels that are equally fast, the first one is taken.
        self.preference = [spec.kernel_id for spec in sorted(self.specs, key=lambda spec: -spec.priority)]

    def decide(self) -> Decision:
        """Locks, then what ranks agreed on, then dispatch tables, then latencies."""
        sizes = self.context.hints()
        candidates = self._candidates(sizes)
        refused = None
        if self.resolved_policy.lock is not None:
            lock, origin = self.resolved_policy.lock, self.resolved_policy.lock_origin
            locked = self._taken(lock, candidates, f"locked by {origin}")
            if isinstance(locked, Decision):
                return replace(locked, refused_table=self._outvoted(locked.kernel))
            refused = Reason("LOCK_NOT_POSSIBLE", f"{lock} ({origin}): {locked}")
        decision, refused_agreed = self._by_agreement(candidates)
        refused_table = None
        if decision is None:
            decision, refused_table = self._by_table(candidates)
        if decision is None:
            decision = self._by_latency(sizes, candidates)
        return replace(decision, refused_lock=refused, refused_table=refused_table, refused_agreed=refused_agreed)

    def _taken(
        self, kernel_id: str, candidates: Sequence[Candidate], why: str, tree: Node | None = None
    ) -> Decision | str:
        """The decision for a kernel that was named, or why it cannot be."""
        named = next((each for each in candidates if each.kernel.kernel_id == kernel_id), None)
        if named is None or named.against:
            return "; ".join(reason.message for reason in named.against) if named else "no such kernel here"
        return Decision(named.kernel, why, tuple(candidates), tree=tree, asked=tuple(self.asked))

    def _by_latency(self, sizes: Mapping[str, int], candidates: Sequence[Candidate]) -> Decision:
        if self.problem.symbols is not None and (self._guardable() or self.problem.symbols.hidden):
            return self._over_symbols(self.problem.symbols, candidates)
        if all(self.against.values()):
            raise NoKernelFoundError(self.context.operation, self.against)
        kernel_id = winner(self._sample(sizes), self.incumbent, MARGIN, self.preference)
        return Decision(self._spec(kernel_id), self._why(candidates, kernel_id), tuple(candidates))

    # ---- one size -----------------------------------------------------------------------------------------------

    def _candidates(self, sizes: Mapping[str, int]) -> list[Candidate]:
        expected = self._estimates(sizes)
        found = [
            Candidate(
                spec,
                self.against[spec.kernel_id],
                expected[spec.kernel_id],
                self._score(spec, expected[spec.kernel_id]),
                notes(self.resolved_policy, spec.kernel_id),
            )
            for spec in self.specs
        ]
        return sorted(found, key=lambda each: (bool(each.against), -each.score, -each.kernel.priority))

    def _estimates(self, sizes: Mapping[str, int]) -> dict[str, Estimate]:
        problem = self.problem
        if problem.is_eager:
            return call_estimates(self.context, self.specs, sizes, self.records, self.spelled_out)
        return estimates(
            self.context,
            self.specs,
            sizes,
            self.records,
            source_kernel=problem.source_kernel,
            surroundings=problem.surroundings,
            spelled_out=self.spelled_out,
            left_as=problem.left_as,
        )

    def _sample(
        self,
        sizes: Mapping[str, int],
        dims: Mapping[str, int] | None = None,
        expected: Mapping[str, Estimate] | None = None,
    ) -> Sample:
        """The candidates that can run, with the latencies that their scores stand for."""
        expected = expected or self._estimates(sizes)
        runnable = [spec for spec in self.specs if not self.against[spec.kernel_id] and spec.kernel_id != DISPATCH]
        return Sample(
            dict(sizes if dims is None else dims),
            {spec.kernel_id: 100 / self._score(spec, expected[spec.kernel_id]) for spec in runnable},
            {
                spec.kernel_id: expected[spec.kernel_id].noise
                for spec in runnable
                if spec.kernel_id != self.incumbent or expected[spec.kernel_id].is_measured
            },
        )

    def _score(self, spec: KernelSpec, estimate: Estimate) -> float:
        if spec.kernel_id == DISPATCH or (self.context.requires_batch_invariant and not spec.batch_invariant):
            return 1.0
        score = 100 / estimate.relative_latency
        preference = self.resolved_policy.preference(spec.kernel_id)
        if preference is not None:
            score += max(PREFERRED - preference[0], 1.0)
        if self.resolved_policy.avoided(spec.kernel_id) is not None:
            score += AVOIDED
        return max(score, 1.0)

    def _why(self, candidates: Sequence[Candidate], kernel_id: str) -> str:
        estimate = next(each.estimate for each in candidates if each.kernel.kernel_id == kernel_id)
        preference = self.resolved_policy.preference(kernel_id)
        by = f" (preferred by {preference[1]})" if preference is not None else ""
        base = "Inductor's own code" if self.incumbent == INDUCTOR else self.incumbent
        if kernel_id == self.incumbent:
            if all(each.against for each in candidates if each.kernel.kernel_id not in (self.incumbent, DISPATCH)):
                return f"no kernel but {base} can run this{by}"
            return f"nothing is expected to be faster than {base}{self._nearly(candidates)}{by}"
        if estimate.origin == "assumed":
            return f"never measured here, assumed to be as fast as {base}{by}"
        of = "Inductor's" if self.incumbent == INDUCTOR else f"{self.incumbent}'s"
        return f"{'measured' if estimate.is_measured else 'expected'} at {estimate.relative_latency:.3g} of {of} latency{by}"

    def _nearly(self, candidates: Sequence[Candidate]) -> str:
        """The kernel that would be faster, but by no more than chance explains."""
        incumbent = next(each for each in candidates if each.kernel.kernel_id == self.incumbent)
        best = next((each for each in candidates if not each.against and each.score > incumbent.score), incumbent)
        text = f" by more than the noise ({best.kernel.kernel_id}: {best.estimate.relative_latency:.3g})"
        return "" if best is incumbent else text

    # ---- symbolic sizes -------------------------------------------------------------------------------------------

    def _guardable(self) -> list[str]:
        """The symbols that a decision may depend on: those of the op's bucketed sizes, lengths before batch and heads."""
        symbols = self.problem.symbols
        if symbols is None:
            return []
        groups = sorted(ops.module(self.context.op).BUCKETED_DIMS, key=len)
        names = (name for dims in groups for name in symbols.names_in(dims))
        return [name for name in dict.fromkeys(names) if name in symbols.symbols or name in symbols.hidden][:2]

    def _over_symbols(self, symbols: Symbols, candidates: Sequence[Candidate]) -> Decision:
        names, known = self._guardable(), {**symbols.symbols, **symbols.hidden}
        hints = {name: symbol.hint for name, symbol in known.items()}
        samples, spoken_of = [], []
        for point in points({name: known[name] for name in names}):
            expected = self._estimates(symbols.at({**hints, **point}))
            samples.append(self._sample(point, point, expected))
            spoken_of.append(self._is_spoken_of(expected))
        found = grown(samples, spoken_of, names, INDUCTOR, MARGIN, self.preference)
        found = self._undivided(found, symbols, {name: hints[name] for name in names}, samples)
        found = limit(found, samples, MAX_OUTCOMES)
        can_dispatch = self.against.get(DISPATCH) == ()
        try:
            leaf = self._answer(found, symbols)
        except Unanswerable as question:
            closed = {name: span(known[name]) for name in names if name in symbols.hidden or compiles_are_scarce()}
            undivided = within(found, closed, {name: hints[name] for name in names}, samples)
            if can_dispatch and self._dispatch_pays(Leaf(INDUCTOR) if symbols.hidden else undivided, samples):
                return self._dispatched(str(question), candidates, found)
            found, leaf = undivided, self._answer(undivided, symbols)
        if leaf.kernel is None and can_dispatch:
            return self._dispatched(leaf.why, candidates, found)
        kernel_id = leaf.kernel or INDUCTOR
        if symbols.hidden and kernel_id != INDUCTOR:  # PyTorch traces no attention whose length may be zero
            if can_dispatch and self._dispatch_pays(Leaf(INDUCTOR), samples):
                return self._dispatched(f"data decides {', '.join(symbols.hidden)}", candidates, found)
            kernel_id = INDUCTOR
        why = f"{self._why(candidates, kernel_id)}{self._while()}"
        return Decision(self._spec(kernel_id), why, tuple(candidates), tree=found, asked=tuple(self.asked))

    def _dispatch_pays(self, instead: Node, samples: Sequence[Sample]) -> bool:
        """Whether choosing at each call, among kernels that are one call, beats what would be taken instead."""
        calls = [s.kernel_id for s in self.specs if s.is_opaque and not self.against[s.kernel_id]]
        able = [[sample.log_ratio(name, INDUCTOR) for name in calls if name in sample.latency_us] for sample in samples]
        if not all(able):
            return False
        taken = [choose(instead, sample.dims).kernel or INDUCTOR for sample in samples]
        alone = [sample.log_ratio(name, INDUCTOR) for name, sample in zip(taken, samples, strict=True)]
        return sum(map(min, able)) < sum(alone)

    def _is_spoken_of(self, expected: Mapping[str, Estimate]) -> bool:
        """Whether anything is known of the kernels that can run, beside that they exist, or one of them is preferred."""
        able = [name for name, reasons in self.against.items() if not reasons]
        is_wished = any(self.resolved_policy.preference(name) is not None for name in able)
        return is_wished or any(expected[name].origin != "assumed" for name in able)

    def _dispatched(self, because: str, candidates: Sequence[Candidate], node: Node) -> Decision:
        why = f"the kernel is chosen at each call: {because}{self._while()}"
        return Decision(self._spec(DISPATCH), why, tuple(candidates), tree=node, asked=tuple(self.asked))

    def _undivided(self, node: Node, symbols: Symbols, at: Mapping[str, int], samples: Sequence[Sample] = ()) -> Node:
        """The tree without questions inside of declared ranges; without samples, these get the kernel for ``at``."""
        asked = [symbols.symbols[name] for name in at if name in symbols.symbols]
        declared = {symbol.name: span(symbol) for symbol in asked if symbol.is_declared}
        return within(node, declared, at, samples) if declared else node

    def _answer(self, node: Node, symbols: Symbols) -> Leaf:
        """The leaf of the sizes that are compiled for; every question becomes a guard.

        Raises:
            Unanswerable: data decides a size that is asked for, or no guard can be afforded.
        """

        def is_below(name: str, edge: int) -> bool:
            if name in symbols.hidden:
                raise Unanswerable(f"data decides {name}, nothing can be asked about it")
            if compiles_are_scarce():
                raise Unanswerable(f"Dynamo soon gives up compiling this function, {name} < {edge} is not asked")
            answer = bool(symbols.symbols[name].is_below(edge))
            self.asked.append(f"{name} {'<' if answer else '>='} {edge}")
            return answer

        return decision_tree.evaluate(node, is_below)

    def _while(self) -> str:
        return f" while {' and '.join(self.asked)}" if self.asked else ""

    # ---- other ranks ---------------------------------------------------------------------------------------------

    def _by_agreement(self, candidates: Sequence[Candidate]) -> tuple[Decision | None, Reason | None]:
        """What ranks agreed on; None, with a reason, where this one cannot run that."""
        if self.agreed is None:
            return None, None
        kernel_id, node, symbols = self.agreed.kernel, None, self.problem.symbols
        if symbols is not None and not symbols.hidden and kernel_id != DISPATCH:
            node = self.agreed.node({name for names in self.context.dims for name in symbols.names_in((names,))})
        if symbols is not None and node is not None:
            with contextlib.suppress(Unanswerable):  # for all sizes then, what was taken for those of the first rank
                unknown = DISPATCH if self.against.get(DISPATCH) == () else INDUCTOR
                kernel_id = self._answer(node, symbols).kernel or unknown
        found = self._taken(kernel_id, candidates, self.agreed.why, node)
        if isinstance(found, str):
            return None, Reason("AGREED_KERNEL_NOT_POSSIBLE", f"{kernel_id} (agreed by ranks): {found}")
        return found, None

    # ---- dispatch tables ------------------------------------------------------------------------------------------

    def _table(self, tables: Sequence[Loaded]) -> tuple[Loaded | None, Node | None]:
        """The first table that speaks of the problem, and its decision over symbolic sizes."""
        if not self.policy.settings.enabled or self.problem.is_eager:  # tables are about compiled graphs
            return None, None
        return loaded_tables.find(self.context, self.problem.source_kernel, tables)

    def _by_table(self, candidates: Sequence[Candidate]) -> tuple[Decision | None, Reason | None]:
        """What the table says; None, with a reason if that kernel cannot run, where runtime selection is to decide."""
        if self.table is None or self.table_tree is None:
            return None, None
        symbols, node = self.problem.symbols, self.table_tree
        if symbols is None:
            leaf = decision_tree.choose(node, self.context.hints())
        else:
            over = self._table_over_symbols(node, symbols)
            if over is None:
                return None, None
            try:
                node, leaf = over, self._answer(over, symbols)
            except Unanswerable:
                return None, None
        if leaf.kernel is None:
            return None, None
        found = self._taken(leaf.kernel, candidates, f"by dispatch table {self.table.path}{self._while()}", node)
        return (None, self._not_possible(leaf.kernel, found)) if isinstance(found, str) else (found, None)

    def _table_over_symbols(self, node: Node, symbols: Symbols) -> Node | None:
        """The table's decision over symbols; of a declared range, the kernel of its largest size."""
        if any(name not in symbols.symbols for name in symbols.names_in(tuple(self.context.dims))):
            return None
        over = over_symbols(node, symbols)
        if over is None:
            return None
        known = symbols.symbols
        largest = {name: MAX_SIZE if symbol.upper is None else symbol.upper for name, symbol in known.items()}
        return self._undivided(over, symbols, largest)

    def _outvoted(self, locked: KernelSpec) -> Reason | None:
        """That a lock names another kernel than the table."""
        if self.table is None or self.table_tree is None:
            return None
        kernel_id = decision_tree.choose(self.table_tree, self.context.hints()).kernel
        if kernel_id in (None, locked.kernel_id):
            return None
        return self._not_possible(kernel_id, f"{locked.kernel_id} is locked by {self.resolved_policy.lock_origin}")

    def _not_possible(self, kernel_id: str | None, why: str) -> Reason:
        path = "" if self.table is None else self.table.path
        return Reason("TABLE_KERNEL_NOT_POSSIBLE", f"{kernel_id} (dispatch table {path}): {why}")

    # ---- what speaks for and against ------------------------------------------------------------------------------

    def _against(self, spec: KernelSpec) -> list[Reason]:
        if spec.kernel_id == INDUCTOR and not self.problem.is_eager:
            return []
        if not self.policy.settings.enabled:
            return [Reason("POLICY_DISABLED", f"selection is switched off ({self._origin('enabled')})")]
        reasons = list(spec.check(self.context))
        reasons += needs_compile(spec) if self.problem.is_eager else constraints.faults_of_torch(spec, self.context)
        retired = health.retired(spec.kernel_id)
        if retired is not None:
            reasons.append(retired)
        origin = self.resolved_policy.excluded(spec.kernel_id)
        if origin is not None:
            reasons.append(Reason("POLICY_EXCLUDED", f"{spec.kernel_id} is forbidden by {origin}"))
        if spec.kernel_id in self.elsewhere and spec.kernel_id != self.incumbent:
            reasons.append(self.elsewhere[spec.kernel_id])
        return reasons

    def _origin(self, setting: str) -> str:
        value = self.policy.values.get(setting)
        return "default" if value is None else value.origin

    def _spec(self, kernel_id: str) -> KernelSpec:
        return next(spec for spec in self.specs if spec.kernel_id == kernel_id)

    def _records(self, problem: Problem | None = None) -> list[PerfRecord]:
        settings = self.policy.settings.perfdb
        runnable = [name for name, reasons in self.against.items() if not reasons]
        if not settings.enabled or not self.policy.settings.enabled or {*runnable} <= {INDUCTOR, DISPATCH}:
            return []
        return records_of(problem or self.problem, self.context, settings.path)
