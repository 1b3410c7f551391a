"""What is different between two reports of one model: yesterday's and today's, or those of two machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lz_compile.ground.records import Record
from lz_compile.report.layout import amount, duration, short
from lz_compile.report.schema import checked
from lz_compile.report.summary import grouped, without_numbers

#: Latencies and times that differ by less, in parts of the smaller one, are the same.
_CLOSE = 0.1
#: Of seconds that differ by less nothing is told.
_LEAST_S = 0.05

Told = Mapping[str, Any]


@dataclass(frozen=True)
class Change(Record):
    """One thing that differs: ``subject`` says what, ``places`` where; empty ``before`` or ``after`` means there was none."""

    kind: str
    subject: str
    before: str
    after: str
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = f"{len(self.places)} x " if len(self.places) > 1 else ""
        return f"{count}{self.subject}: {self.before or 'none'} -> {self.after or 'none'}"


def changes(before: Told, after: Told) -> list[Change]:
    """What differs between two reports as :meth:`Report.to_dict` tells them; alike changes of several places are one.

    Matches are the same one where they are the same op in the same module, in the same order; near misses where their module
    and cause are. Line numbers are no difference.

    Raises:
        ArgumentError: one of them is no report; the text names the field that is wrong.
    """
    before, after = checked(before, "changes", "before"), checked(after, "changes", "after")
    found = [*_environment(before, after)]
    loops = _kept(before, after, "loops", "rolled", lambda each: f"{each['steps']} steps")
    size = "{count} times the same {calls} calls"
    layers = _kept(before, after, "layers", "folded", lambda each: size.format(**each))
    for part in (_matches(before, after), _near_misses(before, after), loops, layers, _events(before, after)):
        found += _together(part)
    return [*found, *_times(before, after)]


def _together(found: Iterable[Change]) -> Iterator[Change]:
    for alike in grouped(found, lambda each: (each.kind, each.subject, each.before, each.after)):
        places = tuple(place for each in alike for place in each.places)
        yield Change(alike[0].kind, alike[0].subject, alike[0].before, alike[0].after, places)


def all_of(told: Told, name: str) -> list[Any]:
    """What every graph of a report has under a name."""
    return [each for graph in told.get("graphs", ()) for each in graph.get(name, ())]


def _environment(before: Told, after: Told) -> Iterator[Change]:
    sides = [environment_of(told) for told in (before, after)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = (str(side.get(name, "")) for side in sides)
        if old != new and old and new:
            yield Change("environment", name, old, new)
    counts = [len(told.get("graphs", ())) for told in (before, after)]
    if counts[0] != counts[1]:
        yield Change("environment", "graphs", str(counts[0]), str(counts[1]))


def environment_of(told: Told) -> dict[str, str]:
    """Versions, where a report has them, and the device that kernels were chosen for."""
    known = {name: str(value) for name, value in told.get("environment", {}).items()}
    for match in all_of(told, "matches"):
        hardware = (match.get("context") or {}).get("hardware")
        if hardware:
            return {**known, "device": f"{hardware['device_name']} ({hardware['signature']})"}
    return known


def _matches(before: Told, after: Told) -> Iterator[Change]:
    old, new = (_keyed(told) for told in (before, after))
    for key in dict.fromkeys([*old, *new]):
        one, other = old.get(key), new.get(key)
        told = other or one or {}
        subject, place = key[1], (str(told.get("module") or short(told.get("where", ""))),)
        if one is None or other is None:
            was, now = (
                state(each) if each is not None else _absent(key[0], *told)
                for each, told in ((one, (before, after)), (other, (after, before)))
            )
            yield Change("match", f"{subject} is recognised", was, now, place)
            continue
        decided = [(state(each), without_numbers(each.get("why", ""))) for each in (one, other)]
        if decided[0] != decided[1]:
            yield Change("match", subject, _chosen(one), _chosen(other), place)
        for what, tell in _ASPECTS:
            was, now = tell(one), tell(other)
            if was != now:
                yield Change("match", f"{subject} {what}", was, now, place)
        times = [latency(each) for each in (one, other)]
        was_us, now_us = times
        if was_us is not None and now_us is not None and _differ(was_us, now_us):
            yield Change("latency", f"{subject} by {other['kernel']}", duration(was_us), duration(now_us), place)


def _keyed(told: Told) -> dict[tuple[str, str, int], Told]:
    """Matches by module (or file, outside of modules) and op, counted."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for match in all_of(told, "matches"):
        key = (match.get("module") or _file(match["where"]), match["op"])
        found[(*key, seen[key])] = match
        seen[key] += 1
    return found


def _file(where: str) -> str:
    return short(where).rpartition(":")[0]


def state(match: Told) -> str:
    """What became of a match: the kernel, and why that is not one of ours."""
    codes = ", ".join(dict.fromkeys(reason["code"] for reason in match["reasons"]))
    return f"{match['kernel']}, {'rewritten' if match['rewritten'] else codes or 'not rewritten'}"


def _chosen(match: Told) -> str:
    """What became of a match and what decided that: a lock that is gone is a change, another latency is none."""
    return f"{state(match)} ({match['why']})" if match.get("why") else state(match)


def latency(match: Told, kernel: str | None = None) -> float | None:
    """The measured latency of a match's kernel (or of another one) in µs, None where none was measured."""
    wanted = match["kernel"] if kernel is None else kernel
    for each in match["candidates"]:
        if each["kernel"] == wanted and each.get("origin") == "measured":
            return float(each["median_us"])
    return None


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > _CLOSE * min(one, other)


_ASPECTS: Sequence[tuple[str, Callable[[Told], str]]] = (
    ("mask", lambda match: str(match.get("mask") or "")),
    ("formula", lambda match: str(match.get("formula") or "")),
    ("dtype", lambda match: str((match.get("context") or {}).get("dtype", ""))),
    ("guards", lambda match: ", ".join(match.get("guards", ()))),
)


def _near_misses(before: Told, after: Told) -> Iterator[Change]:
    def causes(told: Told) -> Counter[tuple[str, str, str]]:
        return Counter(
            (each.get("module") or _file(each["where"]), each["op"], each["reason"]["code"])
            for each in all_of(told, "near_misses")
        )

    old, new = causes(before), causes(after)
    for module, op, code in dict.fromkeys([*old, *new]):
        counts = [side[module, op, code] for side in (old, new)]
        if counts[0] != counts[1]:
            was, now = (
                amount(count, "near miss") if count else _absent(module, *told)
                for count, told in zip(counts, ((before, after), (after, before)), strict=True)
            )
            yield Change("near miss", f"near miss {op} [{code}]", was, now, (module,))


def _absent(module: str, here: Told, there: Told) -> str:
    """Why nothing of a module is told here: it is a module of the other report alone; empty where that is not so."""
    known, others = ({each["path"] for each in all_of(told, "modules")} for told in (here, there))
    return "this module is not there" if known and module in others - known else ""


def _kept(before: Told, after: Told, name: str, done: str, size: Any) -> Iterator[Change]:
    """Loops or layers, the same one where their file and order are."""

    def states(told: Told) -> dict[tuple[str, int], str]:
        seen: Counter[str] = Counter()
        found = {}
        for each in all_of(told, name):
            file, reason = _file(each["where"]), each.get("reason")
            became = done if each[done] else f"kept [{reason['code'] if reason else ''}]"
            found[file, seen[file]] = f"{size(each)}, {became}"
            seen[file] += 1
        return found

    old, new = states(before), states(after)
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key, ""), new.get(key, "")
        if was != now:
            yield Change(name, name, was, now, (key[0],))


def _events(before: Told, after: Told) -> Iterator[Change]:
    texts = {each["code"]: short(each["message"]) for told in (after, before) for each in all_of(told, "events")}
    old, new = (Counter(each["code"] for each in all_of(told, "events")) for told in (before, after))
    for code, text in texts.items():
        if old[code] != new[code]:
            counts = ["" if not count else amount(count, "event") for count in (old[code], new[code])]
            yield Change("event", f"[{code}] {text}", counts[0], counts[1])


def _times(before: Told, after: Told) -> Iterator[Change]:
    old, new = (seconds_of(told) for told in (before, after))
    for each in (old, new):
        each["all of it"] = sum(each.values())
    for stage in dict.fromkeys([*old, *new]):
        was, now = old.get(stage, 0.0), new.get(stage, 0.0)
        if abs(was - now) > _LEAST_S and _differ(max(was, 1e-9), max(now, 1e-9)):
            yield Change("time", f"compiling: {stage}", f"{was:.2f} s", f"{now:.2f} s")


def seconds_of(told: Told) -> dict[str, float]:
    """The time of every stage, over all graphs."""
    found: dict[str, float] = {}
    graphs: Sequence[Told] = told.get("graphs", ())
    for graph in graphs:
        for stage, seconds in graph["seconds"].items():
            found[stage] = found.get(stage, 0.0) + seconds
    return found
