"""From measurements to decisions over sizes: who wins a sample, and the decision tree that gives every sample its winner.

What a choice costs at a sample is its *log regret* against the winner; a kernel within the noise of the winner, or measured
no slower, costs nothing. :func:`tree` looks for the axis-aligned tree with the fewest leaves that costs nothing: exactly,
by dynamic programming over the boxes that cuts can make, where there are at most :data:`EXACT_BOXES` of them, else greedily
as in CART (the cut that leaves the least cost first). What a model then does to its trees, so that they ask fewer questions,
is in ``bucket_limits.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lz_compile.runtime.problem.decision_tree import Leaf, Node, Split, choose, simplify

INCUMBENT = "inductor"
MARGIN = 0.03
REACH = 2.0
"""A tree answers for sizes within this factor of the smallest and the largest measured one."""

EXACT_BOXES = 5_000
_ABSENT = 10.0  # log regret of a kernel where it did not run: worse than any that ran


@dataclass(frozen=True)
class Sample:
    """Latencies measured at one point. A kernel that cannot run there is left out.

    ``noise`` is the relative spread of a kernel's measurements, 0 where it is not given. ``weight`` says how much the point
    counts beside others.

    Raises:
        ValueError: a latency is not positive and finite, or there is none.
    """

    dims: Mapping[str, int]
    latency_us: Mapping[str, float]
    noise: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        wrong = {kernel: us for kernel, us in self.latency_us.items() if not 0 < us < math.inf}
        if wrong or not self.latency_us:
            raise ValueError(
                f"sample at {dict(self.dims)}: expected positive latencies in us, received {wrong or 'none'}. Leave out a "
                "kernel that cannot run"
            )

    def noise_between(self, first: str, second: str) -> float:
        """The relative difference of two kernels that their noise explains: independent spreads add as squares."""
        return math.hypot(self.noise.get(first, 0.0), self.noise.get(second, 0.0))

    def log_ratio(self, kernel: str, other: str) -> float:
        """How much slower a kernel is than another, as a logarithm."""
        return math.log(self.latency_us[kernel] / self.latency_us[other])


def winner(sample: Sample, incumbent: str = INCUMBENT, margin: float = MARGIN, preference: Sequence[str] = ()) -> str:
    """The kernel to take at a sample.

    That is the fastest of those that save more of the incumbent's time than the margin and than the noise, else the
    incumbent. Of several within the noise and the margin of the fastest, the first in ``preference`` (else as the sample
    lists them): what is further away is more likely slower, whatever the noise.
    """
    latency = sample.latency_us
    base = latency.get(incumbent)
    better = list(latency)
    if base is not None:
        better = [
            kernel
            for kernel in latency
            if kernel != incumbent and 1 - latency[kernel] / base > max(margin, sample.noise_between(kernel, incumbent))
        ]
        if not better:
            return incumbent
    fastest = min(better, key=latency.__getitem__)
    tied = [k for k in better if latency[k] <= latency[fastest] * (1 + min(margin, sample.noise_between(k, fastest)))]
    return min(tied, key=_order(preference, latency).__getitem__)


def log_regret(sample: Sample, kernel: str | None) -> float:
    """How much slower a kernel is than the fastest of the sample, as a logarithm.

    A leaf beyond the measurements costs nothing; a kernel that did not run there costs as much as ten logs.
    """
    if kernel is None:
        return 0.0
    if kernel not in sample.latency_us:
        return _ABSENT
    return sample.log_ratio(kernel, min(sample.latency_us, key=sample.latency_us.__getitem__))


def tree(
    samples: Sequence[Sample],
    dims: Sequence[str],
    incumbent: str = INCUMBENT,
    margin: float = MARGIN,
    *,
    preference: Sequence[str] = (),
    reach: float = REACH,
) -> Node:
    """The smallest decision tree over ``dims`` that gives every sample its winner, or what costs no more.

    Samples that differ in other dims only count as one, with the geometric mean of their latencies. A split between two
    neighbouring measured sizes lies where the latency curves of the two kernels cross in log-log space (with the margin that
    the incumbent has). More than ``reach`` away from the measured sizes the leaf has no kernel.

    Raises:
        ValueError: a sample lacks one of the dims, or the margin is not in [0, 1).
    """
    if not 0 <= margin < 1:
        raise ValueError(f"growing a decision tree: expected a margin in [0, 1), received {margin}")
    points = _projected(samples, dims)
    if not points:
        return Leaf(None, "nothing was measured")
    growth = _Growth(points, tuple(dims), incumbent, margin, tuple(preference))
    return _within_reach(simplify(growth.node(growth.all)), points, dims, reach)


def _projected(samples: Sequence[Sample], dims: Sequence[str]) -> list[Sample]:
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        missing = [dim for dim in dims if dim not in sample.dims]
        if missing:
            raise ValueError(
                f"growing a decision tree: expected samples with {', '.join(missing)}, received {sample.dims}"
            )
        groups.setdefault(tuple(sample.dims[dim] for dim in dims), []).append(sample)
    return [_merged(dict(zip(dims, sizes, strict=True)), group) for sizes, group in sorted(groups.items())]


def _merged(dims: Mapping[str, int], group: Sequence[Sample]) -> Sample:
    listed = dict.fromkeys(kernel for sample in group for kernel in sample.latency_us)
    everywhere = [kernel for kernel in listed if all(kernel in sample.latency_us for sample in group)]
    weight = sum(sample.weight for sample in group)
    latency, noise = {}, {}
    for kernel in everywhere or listed:
        ran = [sample for sample in group if kernel in sample.latency_us]
        latency[kernel] = math.exp(sum(math.log(sample.latency_us[kernel]) for sample in ran) / len(ran))
        noise[kernel] = max(sample.noise.get(kernel, 0.0) for sample in ran)
    return Sample(dims, latency, noise, weight)


def _within_reach(node: Node, points: Sequence[Sample], dims: Sequence[str], reach: float) -> Node:
    for dim in reversed(dims):
        sizes = [point.dims[dim] for point in points]
        first = math.ceil(min(sizes) / reach)
        if first > 1:
            node = Split(dim, first, Leaf(None, f"{dim} below {first}, the smallest measured is {min(sizes)}"), node)
        if reach < math.inf:
            last = math.floor(max(sizes) * reach)
            node = Split(dim, last + 1, node, Leaf(None, f"{dim} above {last}, the largest measured is {max(sizes)}"))
    return simplify(node)


@dataclass(frozen=True)
class _Cut:
    """A place where a dim can be split; ``below`` has a bit for every point that is below."""

    dim: str
    below: int


@dataclass
class _Growth:
    """Growing a tree on points. A box of points is an integer with a bit for each."""

    points: Sequence[Sample]
    dims: tuple[str, ...]
    incumbent: str
    margin: float
    preference: tuple[str, ...]

    def __post_init__(self) -> None:
        self.all = (1 << len(self.points)) - 1
        self.winners = [winner(point, self.incumbent, self.margin, self.preference) for point in self.points]
        listed = dict.fromkeys(kernel for point in self.points for kernel in point.latency_us)
        order = _order(self.preference, listed)
        self.kernels = sorted(listed, key=lambda kernel: (kernel != self.incumbent, order[kernel]))
        self.costs = {
            kernel: [self._cost(index, kernel) for index in range(len(self.points))] for kernel in self.kernels
        }
        self.free = {
            kernel: sum(1 << index for index, cost in enumerate(costs) if cost == 0)
            for kernel, costs in self.costs.items()
        }
        self.cuts = [
            _Cut(dim, sum(1 << index for index, point in enumerate(self.points) if point.dims[dim] < size))
            for dim in self.dims
            for size in sorted({point.dims[dim] for point in self.points})[1:]
        ]
        self._best: dict[int, tuple[int, int, _Cut | None]] = {}

    def node(self, box: int) -> Node:
        """The tree for a box."""
        cut = self._smallest(box)[2]
        if cut is None:
            return self._leaf(box)
        below, above = self.node(box & cut.below), self.node(box & ~cut.below)
        return Split(cut.dim, self._edge(box, cut, below, above), below, above)

    def _cost(self, index: int, kernel: str) -> float:
        point, best = self.points[index], self.winners[index]
        if kernel not in point.latency_us:
            return _ABSENT * point.weight
        ratio = point.latency_us[kernel] / point.latency_us[best]
        return 0.0 if ratio <= 1 + point.noise_between(kernel, best) else math.log(ratio) * point.weight

    @cached_property
    def _is_exact(self) -> bool:
        sizes = [len({point.dims[dim] for point in self.points}) for dim in self.dims]
        return math.prod(size * (size + 1) // 2 for size in sizes) <= EXACT_BOXES

    def _smallest(self, box: int) -> tuple[int, int, _Cut | None]:
        """Leaves and depth of the smallest tree that costs nothing, and its first cut."""
        found = self._best.get(box)
        if found is None:
            found = self._best[box] = self._search(box)
        return found

    def _search(self, box: int) -> tuple[int, int, _Cut | None]:
        if any(not box & ~free for free in self.free.values()):
            return 1, 0, None
        cuts = list({box & cut.below: cut for cut in self.cuts if 0 != box & cut.below != box}.values())
        if not self._is_exact:
            cuts = [min(cuts, key=lambda cut: self._box_cost(box & cut.below) + self._box_cost(box & ~cut.below))]
        best: tuple[int, int, _Cut | None] = (len(self.points) + 1, 0, None)
        for cut in cuts:
            below, above = self._smallest(box & cut.below), self._smallest(box & ~cut.below)
            size = (below[0] + above[0], max(below[1], above[1]) + 1)
            if size < best[:2]:
                best = (*size, cut)
        return best

    def _box_cost(self, box: int) -> float:
        inside = self._indices(box)
        return min(sum(costs[index] for index in inside) for costs in self.costs.values())

    def _indices(self, box: int) -> list[int]:
        return [index for index in range(len(self.points)) if box >> index & 1]

    def _leaf(self, box: int) -> Leaf:
        """The incumbent where it costs nothing, else the fastest on the whole of those that cost nothing."""
        points = [self.points[index] for index in self._indices(box)]
        free = [kernel for kernel in self.kernels if not box & ~self.free[kernel]]
        if self.incumbent in free:
            kernel = self.incumbent
        else:
            kernel = min(free, key=lambda k: sum(math.log(point.latency_us[k]) * point.weight for point in points))
        return Leaf(kernel)

    def _edge(self, box: int, cut: _Cut, below: Node, above: Node) -> int:
        """Where to split between the largest size below and the smallest above: the mean of the crossings of all lines."""
        low_points = [self.points[index] for index in self._indices(box & cut.below)]
        high_points = [self.points[index] for index in self._indices(box & ~cut.below)]
        low, high = max(p.dims[cut.dim] for p in low_points), min(p.dims[cut.dim] for p in high_points)
        opposite = {_line(point, cut.dim): point for point in high_points if point.dims[cut.dim] == high}
        crossings = []
        for point in low_points:
            other = opposite.get(_line(point, cut.dim))
            if point.dims[cut.dim] != low or other is None:
                continue
            first, second = choose(below, point.dims).kernel, choose(above, other.dims).kernel
            if first is not None and second is not None and first != second:
                crossings.append(self._crossing(cut.dim, point, other, first, second))
        logs = [math.log(at) for at in crossings] or [_middle(low, high)]
        return min(max(round(math.exp(sum(logs) / len(logs))), low + 1), high)

    def _crossing(self, dim: str, low: Sample, high: Sample, first: str, second: str) -> float:
        """Between two neighbours on a line, the size from which the second kernel takes over."""
        start, end = low.dims[dim], high.dims[dim]
        runs_below, runs_above = second in low.latency_us, first in high.latency_us
        if not runs_below and runs_above:
            return end
        if runs_below and not runs_above:
            return start + 1
        position = _middle(start, end)
        if runs_below:
            lead = -math.log(1 - self.margin)
            needed = lead if first == self.incumbent else -lead if second == self.incumbent else 0.0
            before, after = low.log_ratio(first, second) - needed, high.log_ratio(first, second) - needed
            if before < after and before <= 0 <= after:
                begin = math.log(max(start, 1))
                position = begin + (math.log(end) - begin) * -before / (after - before)
        return min(max(math.exp(position), start + 1), max(end - 1, start + 1))


def _middle(low: int, high: int) -> float:
    return (math.log(max(low, 1)) + math.log(high)) / 2


def _line(point: Sample, dim: str) -> tuple[tuple[str, int], ...]:
    """What a point shares with those that differ from it in one dim only."""
    return tuple((other, size) for other, size in point.dims.items() if other != dim)


def _order(preference: Sequence[str], listed: Iterable[str]) -> dict[str, int]:
    return {kernel: rank for rank, kernel in enumerate(dict.fromkeys([*preference, *listed]))}
