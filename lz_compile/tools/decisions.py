"""From what was decided for matches (their reports) to the plans and trees of a dispatch table or of a lock file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lz_compile.ground import events
from lz_compile.ground.hardware import hardware
from lz_compile.lowering import ops
from lz_compile.report.report import MatchReport
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import INDUCTOR
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.problem.decision_tree import Node, Range
from lz_compile.runtime.tables.dispatch_table import DispatchTable, Kind, KindTree, PlannedOp
from lz_compile.runtime.tables.trees import of_points, of_regions

_GUARD = re.compile(r"(\w+) (<|>=) (\d+)")

Bucket = Mapping[str, int]


@dataclass(frozen=True)
class Decided:
    """The decision for one match; ``ranges`` are the sizes that are symbols, with the values that it was made for."""

    op: PlannedOp
    ranges: Mapping[str, Range]

    @classmethod
    def of(cls, match: MatchReport) -> Decided | None:
        """What was decided for a match; None where nothing was, or where its guards are about no size alone (an event)."""
        if match.context is None:
            return None
        dims: dict[str, Any] = match.context["dims"]
        symbols = {name: dim for name, dim in dims.items() if not isinstance(dim, int)}
        ranges = _ranges(symbols, match.guards)
        if ranges is None:
            text = f"{match.op} at {match.where}: its guards ({'; '.join(match.guards)}) are about no size alone"
            events.record("DECISION_NOT_SAVED", text)
            return None
        platform = match.context["hardware"]["platform"]
        planned = PlannedOp(
            op=match.context["operation"],
            kernel_id=match.kernel,
            platform=platform,
            dtype=match.context["dtype"],
            features=tuple(sorted(match.context["features"])),
            symbolic=tuple(sorted(symbols)),
            source_kernel=match.context["source_kernel"],
            dims={name: dim if isinstance(dim, int) else dim["hint"] for name, dim in dims.items()},
            why=match.why,
            where=(match.where,),
            hardware=(hardware("cuda" if platform == "rocm" else platform).kind(),),
            able=tuple(sorted(each["kernel"] for each in match.candidates if not each["against"])),
        )
        return cls(planned, ranges)


def _ranges(symbols: Mapping[str, Mapping[str, Any]], guards: Sequence[str]) -> dict[str, Range] | None:
    """The values of symbolic sizes between guards; None where a guard's symbol is no size by itself."""
    found = {name: (dim["lower"], dim["upper"]) for name, dim in symbols.items()}
    for guard in guards:
        parts = _GUARD.fullmatch(guard)
        about = [name for name, dim in symbols.items() if parts is not None and dim["name"] == parts[1]]
        if parts is None or not about:
            return None
        for name in about:
            found = decision_tree.narrowed(found, name, int(parts[3]), is_below=parts[2] == "<")
    return found


def merged(planned: Iterable[PlannedOp]) -> tuple[PlannedOp, ...]:
    """Equal decisions as one, with all of their places and kinds of device, and the kernels that all of these can run."""
    found: dict[str, PlannedOp] = {}
    for op in planned:
        key = repr((op.kind, op.symbolic, sorted(op.dims.items()), op.kernel_id))
        known = found.get(key, op)
        found[key] = msgspec.structs.replace(
            known,
            where=tuple(dict.fromkeys((*known.where, *op.where))),
            hardware=tuple(sorted({*known.hardware, *op.hardware})),
            able=tuple(sorted({*known.able} & {*op.able})),
        )
    return tuple(found.values())


def as_in_trees(
    table: DispatchTable, planned: Sequence[PlannedOp], why: Callable[[PlannedOp], str]
) -> tuple[PlannedOp, ...]:
    """Decisions with the kernels that the trees of a table give, and why where that is another one."""
    pairs = zip(planned, table.kernels_at(planned), strict=True)
    return merged(
        op if kernel_id in (None, op.kernel_id) else msgspec.structs.replace(op, kernel_id=kernel_id, why=why(op))
        for op, kernel_id in pairs
    )


def kernels_of(planned: Iterable[PlannedOp], *, named_only: bool = False) -> list[KernelSpec]:
    """The kernels for the ops of decisions, or those alone that decisions name (beside Inductor, which is everywhere)."""
    planned = list(planned)
    named = {op.kernel_id for op in planned} - {INDUCTOR}
    all_ops = dict.fromkeys(op.op.partition(".")[0] for op in planned)
    specs = [spec for op in all_ops for spec in registry.kernels(op).values()]
    return [spec for spec in specs if not named_only or spec.kernel_id in named]


def lock_trees(decided: Iterable[Decided]) -> tuple[KindTree, ...]:
    """The decisions for exactly the sizes that they were made for; the later of two counts."""
    groups: dict[str, list[Decided]] = {}
    for each in decided:
        exact = {name: size for name, size in each.op.dims.items() if name not in each.ranges}
        groups.setdefault(repr((each.op.kind, each.op.symbolic, sorted(exact.items()))), []).append(each)
    found = []
    for group in groups.values():
        op, symbolic = group[0].op, group[0].op.symbolic
        exact = {name: size for name, size in op.dims.items() if name not in symbolic}
        node = of_regions((each.ranges, each.op.kernel_id) for each in group)
        found.append(_kind_tree(op, symbolic, exact, node))
    return tuple(found)


def bucket_trees(solved: Sequence[tuple[Bucket, Sequence[PlannedOp]]]) -> tuple[KindTree, ...]:
    """The decisions for buckets of sizes: a tree for each kind of op, over the sizes that follow the buckets.

    These are the sizes of one place in the source that differ between buckets. Where there was one bucket only, they are
    those that equal it. Of different decisions for the same problem (places measured with other surroundings), the most
    frequent one counts, which is an event.
    """
    places: dict[str, list[tuple[Bucket, PlannedOp]]] = {}
    for bucket, planned in solved:
        seen: Counter[str] = Counter()
        for op in planned:
            exact = {name: op.dims[name] for name in ops.module(op.op.partition(".")[0]).EXACT_DIMS}
            key = repr((op.kind, exact, op.where))
            places.setdefault(f"{key} {seen[key]}", []).append((bucket, op))
            seen[key] += 1
    groups: dict[str, tuple[list[str], list[PlannedOp]]] = {}
    for place in places.values():
        moving = _moving(place)
        op = place[0][1]
        exact = {name: size for name, size in op.dims.items() if name not in moving}
        group = groups.setdefault(repr((op.kind, sorted(exact.items()))), (moving, []))
        group[1].extend(planned for _, planned in place)
    trees = [_bucket_tree(moving, planned) for moving, planned in groups.values()]
    return tuple(sorted(trees, key=lambda kind: -len(kind.dims)))  # the first one that speaks decides: the narrowest


def _moving(place: Sequence[tuple[Bucket, PlannedOp]]) -> list[str]:
    """The sizes of one place that follow the buckets, lengths first."""
    op = place[0][1]
    bucketed = [name for names in ops.module(op.op.partition(".")[0]).BUCKETED_DIMS for name in names]
    lone = {sizes.pop() for name in place[0][0] if len(sizes := {bucket[name] for bucket, _ in place}) == 1}
    found = [
        name
        for name in op.dims
        if len({planned.dims[name] for _, planned in place}) > 1 or (name in bucketed and op.dims[name] in lone)
    ]
    return sorted(found, key=lambda name: (name not in bucketed, bucketed.index(name) if name in bucketed else 0))


def _bucket_tree(moving: Sequence[str], planned: Sequence[PlannedOp]) -> KindTree:
    votes: dict[tuple[int, ...], Counter[str]] = {}
    for op in planned:
        votes.setdefault(tuple(op.dims[name] for name in moving), Counter())[op.kernel_id] += 1
    for sizes, counter in votes.items():
        if len(counter) > 1:
            text = f"{planned[0].op} at {dict(zip(moving, sizes, strict=True))} has several decisions: {dict(counter)}"
            events.record("DECISIONS_DIFFER", f"{text}; the most frequent one is kept")
    points = [(dict(zip(moving, sizes, strict=True)), counter.most_common(1)[0][0]) for sizes, counter in votes.items()]
    exact = {name: size for name, size in planned[0].dims.items() if name not in moving}
    return _kind_tree(planned[0], None, exact, of_points(points, moving))


def _kind_tree(op: PlannedOp, symbolic: tuple[str, ...] | None, exact: dict[str, int], node: Node) -> KindTree:
    same = {name: getattr(op, name) for name in Kind.__struct_fields__}
    return KindTree(**same, symbolic=symbolic, dims=exact, tree=decision_tree.to_dict(node))
