"""What was measured, as charts: latency over a size for each kernel, with the chosen one and the edges of buckets.

Drawn by matplotlib, which is optional (``pip install lz-compile[charts]``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lz_compile.errors import ArgumentError
from lz_compile.report.changes import Told

#: Panels of one chart at most; others are counted in its title.
MOST_PANELS = 12
_ENDINGS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Sample:
    """The latencies of kernels for one problem in µs, and the kernel that is chosen for it.

    ``problem`` is what is no size: operation, dtype, features.
    """

    problem: tuple[str, ...]
    sizes: Mapping[str, int]
    latency_us: Mapping[str, float]
    chosen: str


@dataclass
class Panel:
    """The samples of one problem that differ in one size (``axis``) alone; ``rest`` are the other sizes."""

    problem: tuple[str, ...]
    axis: str
    rest: Mapping[str, int]
    samples: list[Sample] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What is measured."""
        return (
            f"{' '.join(filter(None, self.problem))}\n{' '.join(f'{name}={size}' for name, size in self.rest.items())}"
        )

    def edges(self) -> list[float]:
        """Between which two sizes the chosen kernel changes: their geometric mean."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [
            (one.sizes[self.axis] * other.sizes[self.axis]) ** 0.5 for one, other in pairs if one.chosen != other.chosen
        ]


def check_ending(path: Path, function: str) -> None:
    """Refuse a path that no chart can be written to, before what is drawn is measured.

    Raises:
        ArgumentError: it ends in something else.
    """
    if path.suffix not in _ENDINGS:
        raise ArgumentError(function, "a chart", f"ending in {', '.join(_ENDINGS)}", str(path))


@contextmanager
def figure(path: Path, function: str, description: str = "", **options: Any) -> Iterator[Any]:
    """A figure of matplotlib that is saved at the end, as SVG in equal bytes for equal drawings.

    Raises:
        ArgumentError: the path ends in nothing that can be drawn, or matplotlib is not installed.
    """
    check_ending(path, function)
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "Install it: pip install 'lz-compile[charts]'"
        raise ArgumentError(function, "a chart", "to be drawn by matplotlib", f"{error}", advice) from error
    with mpl.rc_context({"svg.hashsalt": "lz_compile", "svg.fonttype": "none", "font.size": 9}):
        made = Figure(layout="constrained", **options)
        FigureCanvasAgg(made)  # no window, whatever the program draws elsewhere
        yield made
        metadata = {"Date": None, "Description": description} if path.suffix == ".svg" else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, metadata=metadata)


def latencies(samples: Iterable[Sample], path: Path, function: str, edges: Mapping[str, Sequence[float]] = {}) -> int:
    """Draw latency over size, a panel for each problem; how many there are.

    Args:
        path: its ending says how: ``.svg``, ``.png`` or ``.pdf``.
        function: for errors.
        edges: where a decision tree is cut, by the name of the size; elsewhere the chosen kernel's changes are marked.

    Raises:
        ArgumentError: there is nothing to draw, the path ends in something else, or matplotlib is not installed.
    """
    found = panels(samples)
    if not found:
        advice = "To measure, tune takes --no-resume, and solve --tune on-miss"
        raise ArgumentError(function, "something that was measured", "to be drawn", "nothing", advice)
    shown = found[:MOST_PANELS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    with figure(path, function, figsize=(4.2 * columns, 3.4 * rows + 0.4)) as made:
        for panel, axis in zip(shown, made.subplots(rows, columns, squeeze=False).flat, strict=False):
            _draw(panel, axis, edges.get(panel.axis))
        for axis in made.axes[len(shown) :]:
            axis.remove()
        left_out = f"; {len(found) - len(shown)} more problems are not shown" if len(found) > len(shown) else ""
        made.suptitle(
            f"latency in µs; rings mark what is chosen, dotted lines where that changes{left_out}", fontsize=10
        )
    return len(found)


def panels(samples: Iterable[Sample]) -> list[Panel]:
    """Samples by problem; the axis is the size with the most values, the longest where several have as many."""
    by_problem: dict[tuple[str, ...], list[Sample]] = {}
    for sample in samples:
        if sample.latency_us and sample.sizes:
            by_problem.setdefault(sample.problem, []).append(sample)
    found: dict[Any, Panel] = {}
    for problem, own in by_problem.items():
        values = {name: {sample.sizes.get(name) for sample in own} for name in own[0].sizes}
        axis = max(values, key=lambda name: (len(values[name]), max(filter(None, values[name]), default=0)))
        tied = {name for name in values if all(each.sizes.get(name) == each.sizes.get(axis) for each in own)}
        for sample in own:
            rest = {name: size for name, size in sample.sizes.items() if name not in tied}
            panel = found.setdefault((problem, *rest.items()), Panel(problem, axis, rest))
            panel.samples.append(sample)
    for panel in found.values():
        unique = {sample.sizes[panel.axis]: sample for sample in panel.samples}
        panel.samples = [unique[size] for size in sorted(unique)]
    return list(found.values())


def _draw(panel: Panel, axis: Any, edges: Sequence[float] | None) -> None:
    kernels = sorted({kernel for sample in panel.samples for kernel in sample.latency_us})
    for number, kernel in enumerate(kernels):
        points = [
            (each.sizes[panel.axis], each.latency_us[kernel]) for each in panel.samples if kernel in each.latency_us
        ]
        axis.plot(*zip(*points, strict=True), marker=".", color=f"C{number}", label=kernel)
    chosen = [
        (each.sizes[panel.axis], each.latency_us[each.chosen])
        for each in panel.samples
        if each.chosen in each.latency_us
    ]
    if chosen:
        axis.plot(*zip(*chosen, strict=True), "o", markersize=9, markerfacecolor="none", color="black")
    for edge in panel.edges() if edges is None else edges:
        axis.axvline(edge, linestyle=":", color="black", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel=panel.axis)
    axis.set_title(panel.title, fontsize=8)
    sizes = [each.sizes[panel.axis] for each in panel.samples]
    axis.set_xticks(sizes, [str(size) for size in sizes], rotation=45 if len(sizes) > 6 else 0)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def of_problem(context: Told, latency_us: Mapping[str, float], chosen: str) -> Sample:
    """A sample of a problem, as a context tells itself."""
    problem = (context["operation"], context["dtype"], *sorted(context["features"].values()))
    sizes = {name: size["hint"] if isinstance(size, dict) else size for name, size in context["dims"].items()}
    return Sample(problem, sizes, latency_us, chosen)


def of_matches(matches: Iterable[Told]) -> Iterator[Sample]:
    """What was measured or estimated for matches of reports, where anything was."""
    for match in matches:
        known = {each["kernel"]: _latency(each) for each in match["candidates"] if not each["against"]}
        told = {kernel: time for kernel, time in known.items() if time is not None}
        if match["context"] is not None and told:
            yield of_problem(match["context"], told, match["kernel"])


def _latency(candidate: Told) -> float | None:
    if candidate["origin"] == "measured":
        return float(candidate["median_us"])
    return sum(candidate["parts_us"].values()) if candidate["origin"] == "estimated" else None
