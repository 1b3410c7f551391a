"""Fewer questions at a known price: at most so many leaves, and none inside a declared range."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from lz_compile.runtime.problem.buckets import INCUMBENT, MARGIN, REACH, Sample, log_regret, tree
from lz_compile.runtime.problem.decision_tree import (
    Leaf,
    Node,
    Range,
    Split,
    choose,
    contains,
    from_intervals,
    intervals,
    leaves,
    narrowed,
    restrict,
    simplify,
    splits,
)

MAX_OUTCOMES = 6
"""Dynamo recompiles a function 8 times by default and then runs it eagerly."""

BEYOND_REGRET = 0.02
"""What dropping an edge of the measurements counts, in mean log regret: the neighbouring kernel is then used without end.

Half of it at the lower end, where there is an end and less time to lose."""

_NO_KERNEL_REGRET = 1.0  # mean log regret of leaving to a dispatching call what no single kernel can run

_Pruned = tuple[float, Node]
_Joined = tuple[float, tuple[int, ...], tuple[Node, ...]]
_IMPOSSIBLE: _Joined = (math.inf, (), ())


def limit(node: Node, samples: Sequence[Sample], max_outcomes: int = MAX_OUTCOMES) -> Node:
    """The tree with at most so many leaves that adds the least regret over the samples.

    Along a run of splits on one dim any neighbours may be joined, with the best kernel for their samples, and a leaf beyond
    the measurements may give way to its neighbour; the best such choice is found by dynamic programming. Every leaf counts,
    for each is a compilation of its own.

    Raises:
        ValueError: fewer than one leaf is allowed.
    """
    if max_outcomes < 1:
        raise ValueError(f"limiting a decision tree: expected at least 1 outcome, received {max_outcomes}")
    if sum(1 for _ in leaves(node)) <= max_outcomes:
        return node
    total = sum(sample.weight for sample in samples) or 1.0
    return simplify(_prunings(simplify(node), samples, max_outcomes, total)[-1][1])


def _prunings(node: Node, samples: Sequence[Sample], count: int, total: float) -> list[_Pruned]:
    """The best trees with at most 1, 2, ..., ``count`` leaves, with their summed regret."""
    if isinstance(node, Leaf):
        return [(sum(sample.weight * log_regret(sample, node.kernel) for sample in samples), node)] * count
    run = _Run(*intervals(node, node.dim), node.dim, samples, count, total)
    return [(added, from_intervals(node.dim, ats, parts)) for added, ats, parts in run.joined()]


class _Run:
    """The intervals of a dim, to be joined so that few leaves remain."""

    def __init__(
        self, ats: Sequence[int], parts: Sequence[Node], dim: str, samples: Sequence[Sample], count: int, total: float
    ) -> None:
        self.ats, self.parts, self.count, self.total = ats, parts, count, total
        self.inside: list[list[Sample]] = [[] for _ in parts]
        for sample in samples:
            self.inside[bisect.bisect_right(ats, sample.dims[dim])].append(sample)
        self.own = [_prunings(part, found, count, total) for part, found in zip(parts, self.inside, strict=True)]

    def joined(self) -> list[_Joined]:
        """The best groupings of neighbours with at most 1, 2, ..., ``count`` leaves: regret, edges, trees."""
        size = len(self.parts)
        # best[first][allowed]: of the intervals from the first one on
        best: list[list[_Joined]] = [[_IMPOSSIBLE] * (self.count + 1) for _ in range(size)]
        best.append([(0.0, (), ())] * (self.count + 1))
        for first in reversed(range(size)):
            for last in range(first, size):
                edge = self.ats[last : last + 1]
                for used, (added, joined) in enumerate(self._group(first, last), 1):
                    for allowed in range(used, self.count + 1):
                        more, ats, parts = best[last + 1][allowed - used]
                        if added + more < best[first][allowed][0]:
                            best[first][allowed] = (added + more, (*edge, *ats), (joined, *parts))
        return best[0][1:]

    def _group(self, first: int, last: int) -> list[_Pruned]:
        """One tree for the intervals from the first to the last, with at most 1, 2, ... leaves."""
        if first == last:
            return self.own[first]
        numbers = range(first, last + 1)
        ends = [leaf for number in numbers for leaf in leaves(self.parts[number])]
        dropped = (
            BEYOND_REGRET * self.total * (sum(leaf.kernel is None for leaf in ends) - self._starts_beyond(first) / 2)
        )
        samples = [sample for number in numbers for sample in self.inside[number]]
        found = [_collapsed(ends, samples, dropped, self.total)]
        measured = [number for number in numbers if not self._is_beyond(number)]
        if len(measured) == 1:
            dropped = BEYOND_REGRET * self.total * (last - first - self._starts_beyond(first) / 2)
            found += [(added + dropped, tree) for added, tree in self.own[measured[0]]][1:]
        return found

    def _starts_beyond(self, first: int) -> bool:
        return first == 0 and self._is_beyond(0)

    def _is_beyond(self, number: int) -> bool:
        return self.parts[number] == Leaf(None) and not self.inside[number]


def _collapsed(ends: Sequence[Leaf], samples: Sequence[Sample], dropped: float, total: float) -> _Pruned:
    """One leaf in place of several."""
    if all(leaf.kernel is None for leaf in ends):
        return 0.0, ends[0]
    if not samples:
        return dropped, next(leaf for leaf in ends if leaf.kernel is not None)
    kernels = _common(samples)
    if not kernels:
        return _NO_KERNEL_REGRET * total, Leaf(None, f"no kernel runs at all of {len(samples)} measured points")
    costs = {kernel: sum(sample.weight * log_regret(sample, kernel) for sample in samples) for kernel in kernels}
    kernel = min(costs, key=costs.__getitem__)
    return costs[kernel] + dropped, Leaf(kernel)


def within(
    node: Node,
    ranges: Mapping[str, Range],
    hint: Mapping[str, int],
    samples: Sequence[Sample],
    incumbent: str = INCUMBENT,
    margin: float = MARGIN,
) -> Node:
    """The tree without any question about the dims that have a declared range, inside which no guard may lie.

    Where the range leaves several kernels, one is taken for all of it: of those that run at every sample in the range, the
    one with the least mean log regret. A kernel that loses more than the margin to the incumbent somewhere is passed over
    where the incumbent's own worst loss to it is smaller. Without samples in the range it is the kernel for ``hint``.

    Args:
        ranges: smallest and largest size by dim, both included.
        hint: a size for each of these dims.
    """
    declared = ranges.keys()

    def without(node: Node, ranges: dict[str, Range]) -> Node:
        asked = [split for split in splits(node) if split.dim not in declared]
        if asked:
            dim, at = asked[0].dim, asked[0].at
            sides = (narrowed(ranges, dim, at, is_below=is_below) for is_below in (True, False))
            return Split(dim, at, *(without(restrict(node, side), side) for side in sides))
        inside = [sample for sample in samples if contains(ranges, sample.dims)]
        return node if isinstance(node, Leaf) else _single(inside, incumbent, margin) or choose(node, hint)

    return simplify(without(restrict(node, ranges), dict(ranges)))


def _single(samples: Sequence[Sample], incumbent: str, margin: float) -> Leaf | None:
    """The kernel for all of the samples; None where there are none, or no kernel runs at each."""
    kernels = _common(samples)
    if incumbent in kernels:
        kernels = [kernel for kernel in kernels if not _loses(kernel, samples, incumbent, margin)]
    if not kernels:
        return None
    costs = {k: sum(sample.weight * log_regret(sample, k) for sample in samples) for k in kernels}
    return Leaf(min(costs, key=lambda k: (costs[k], k != incumbent)))


def _loses(kernel: str, samples: Sequence[Sample], incumbent: str, margin: float) -> bool:
    """Whether a kernel loses more than the margin to the incumbent, and more than the incumbent to it."""
    losses = [sample.log_ratio(kernel, incumbent) for sample in samples]
    return max(losses) > math.log1p(margin) and max(losses) > -min(losses)


def _common(samples: Sequence[Sample]) -> list[str]:
    """The kernels that were measured at every sample, as the first lists them."""
    return [k for k in samples[0].latency_us if all(k in s.latency_us for s in samples)] if samples else []


# ---- sizes that cannot be asked about, and sizes of which nothing is known -------------------------------------------


#: Compilations of a function that questions leave to other reasons to compile it again (dtype, gradients, modules).
SPARE_COMPILES = 2


class Unanswerable(Exception):
    """A question about a size that no guard can, or should, answer; the text says why. The decision is then taken without."""


def compiles_are_scarce() -> bool:
    """Whether Dynamo has compiled the present function so often that no more guards can be afforded.

    Past its limit it runs a function eagerly without a word.
    """
    from lz_compile.lowering import frames

    left = frames.compiles_left()
    return left is not None and left < SPARE_COMPILES


def grown(
    samples: Sequence[Sample],
    spoken_of: Sequence[bool],
    names: Sequence[str],
    incumbent: str,
    margin: float,
    preference: Sequence[str],
) -> Node:
    """The decision tree over symbols. Where nothing is known of any kernel, far from all that is, it names none.

    Args:
        samples: one for each point.
        spoken_of: whether a measurement or prior speaks of a point.
        incumbent: the kernel to take where no other is better.
        margin: by how much another must be.
        preference: of kernels that are equally fast, the first one is taken.
    """
    known = [sample for sample, is_known in zip(samples, spoken_of, strict=True) if is_known]
    is_everywhere = len(known) in (0, len(samples))
    reach = math.inf if is_everywhere else REACH
    return tree(samples if is_everywhere else known, names, incumbent, margin, preference=preference, reach=reach)
