"""What was decided, proven and emitted in one graph, once for each kind of match."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from lz_compile.compile.problems import left_as, of_match, symbolic_sizes
from lz_compile.ground.records import Reason
from lz_compile.ground.store import Store
from lz_compile.lowering import configured
from lz_compile.passes.fusion.fusion import Fusion
from lz_compile.passes.proof.validate import Validation, validate
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import Recipes
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.policy import policy
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.ranks import agree
from lz_compile.runtime.ranks.job import WhyNot
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.loaded import Loaded


@dataclass
class Choices:
    """By the kind of match (and kernel); ``copied`` are results that must be copies, ``is_dry``: nobody is to follow."""

    policy: Policy = field(default_factory=policy.current)
    tables: Sequence[Loaded] = field(default_factory=loaded_tables.active)
    fusions: Mapping[fx.Node, Fusion] = field(default_factory=dict)
    fused: dict[tuple[fx.Node, str], Match] = field(default_factory=dict)
    problems: dict[tuple[int, tuple[str, ...]], Problem] = field(default_factory=dict)
    decisions: dict[tuple[int, tuple[str, ...]], Decision] = field(default_factory=dict)
    verdicts: dict[tuple[int, str], Validation] = field(default_factory=dict)
    recipes: Recipes = field(default_factory=Recipes)
    copied: set[fx.Node] = field(default_factory=set)
    is_dry: bool = False

    def problem(self, match: Match) -> Problem:
        """What a kernel is to be chosen for."""
        key = self.key(match)
        if key not in self.problems:
            context = of_match(
                match.kind, is_cuda_graph_capturing=configured.captures_cuda_graphs(match.found.facts.device)
            )
            context = replace(context, fusable=key[1])
            symbols = symbolic_sizes(match.kind)
            # Inductor's patterns know no scale that is computed from a symbolic size.
            by_inductor = left_as(match.kind) if symbols is None else None
            self.problems[key] = Problem(
                context,
                match.found.source_kernel,
                symbols=symbols,
                left_as=by_inductor,
                attributes=json.dumps(match.kind.found.attributes.to_dict(), sort_keys=True, default=str),
            )
        return self.problems[key]

    def key(self, match: Match) -> tuple[int, tuple[str, ...]]:
        """What is the same for equal matches: their kind, and what comes directly before them."""
        fusion = self.fusions.get(match.site.output)
        return id(match.kind), () if fusion is None else fusion.ops

    def decide(self, match: Match, why_not: WhyNot | None = None) -> Decision:
        """The kernel for a match; ``why_not`` proves it where other ranks are to follow."""
        key = self.key(match)
        if key not in self.decisions:
            given = self.problem(match), self.policy, self.tables
            self.decisions[key] = agree.decide(*given, writes=not self.is_dry, why_not=why_not)
        return self.decisions[key]

    def choice(self, match: Match) -> Decision:
        """What would be decided now by this rank alone."""
        return select(self.problem(match), self.policy, self.tables)

    def in_turn(
        self, match: Match, why_failed: Callable[[], Reason], why_not: WhyNot
    ) -> Iterator[tuple[KernelSpec, Decision]]:
        """The kernel for a match, and what to try instead whenever one has failed, which ``why_failed`` says."""
        given = self.problem(match), self.policy, self.tables
        return agree.in_turn(self.decide(match), why_failed, *given, why_not=why_not)

    def subject(self, match: Match, kernel: KernelSpec) -> Match:
        """What a kernel replaces: the match, with those before it that the kernel computes along."""
        if not kernel.fuses_ops:
            return match
        key = (match.site.output, kernel.kernel_id)
        if key not in self.fused:
            self.fused[key] = self.fusions[match.site.output].of(kernel.fuses_ops)
        return self.fused[key]

    def prove(self, match: Match, kernel: KernelSpec) -> Validation:
        """Whether a kernel may replace a match."""
        assert kernel.call is not None, "leaving a match alone needs no proof"
        key = (id(match.kind), kernel.kernel_id)
        if key in self.verdicts:
            return replace(self.verdicts[key], origin="memory", seconds=0.0)
        proven = functools.partial(kernel.call, **kernel.validation_arguments)
        subject = match.kind
        if not kernel.limits_head_dim:
            subject = replace(subject, trial=replace(subject.trial, limited=frozenset()))
        store = Store("validation") if kernel.is_reproducible else None
        self.verdicts[key] = validate(subject, kernel, proven, store)
        return self.verdicts[key]
