"""The page itself: what a report tells, put into the template; never more than two megabytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lz_compile.report.changes import Change, Told, all_of, changes, environment_of, seconds_of
from lz_compile.report.html import parts
from lz_compile.report.html.tree import Branch, Op, tree
from lz_compile.report.layout import amount, short
from lz_compile.report.summary import grouped, without_numbers

if TYPE_CHECKING:
    from jinja2 import Template

#: Bytes of a page at most.
MOST_BYTES = 2_000_000
_HERE = Path(__file__).parent
#: What is left out of a page that would be larger, one after the other.
_LEFT_OUT = ("calls", "source", "candidates", "places", "details")


def page(told: Told, since: Told | None = None, title: str = "lz_compile") -> str:
    """A report, as :meth:`~lz_compile.report.report.Report.to_dict` tells it, as one HTML page.

    Source lines are read where their files are on this machine. What no page has room for is left out, and the page says so.

    Args:
        told: the report.
        since: an earlier one: what changed stands first.
        title: of the page.
    """
    left_out: list[str] = []
    text = _page(told, since, title, left_out)
    for part in _LEFT_OUT:
        if len(text.encode()) <= MOST_BYTES:
            break
        left_out.append(part)
        text = _page(told, since, title, left_out)
    return text


def _page(told: Told, since: Told | None, title: str, left_out: list[str]) -> str:
    kinds, misses = parts.kinds(all_of(told, "matches")), parts.causes(all_of(told, "near_misses"))
    script = _file("page.js")
    seconds = seconds_of(told)
    return _template().render(
        title=title,
        style=_file("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        environment=environment_of(told),
        summary=_summary(told),
        kinds=kinds,
        misses=misses,
        model=_model(told, kinds, misses),
        loops=[_loop(each) for each in all_of(told, "loops")],
        layers=[_layers(each) for each in all_of(told, "layers")],
        unproven=[(each["code"], short(each["message"])) for each in all_of(told, "unproven")],
        events=_events(told),
        stages=parts.stages(seconds),
        seconds=sum(seconds.values()),
        changes=None if since is None else _by_kind(changes(since, told)),
        left_out=left_out,
    )


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_file("page.html.j2"))


def _summary(told: Told) -> list[str]:
    matches = all_of(told, "matches")
    replaced = sum(match["rewritten"] for match in matches)
    found = [
        f"{amount(len(matches), 'operation')} recognised, {replaced} replaced",
        amount(len(all_of(told, "near_misses")), "near miss"),
        amount(len(told["graphs"]), "graph"),
    ]
    for name, what in (("events", "event"), ("loops", "loop"), ("unproven", "unproven edit")):
        if all_of(told, name):
            found.append(amount(len(all_of(told, name)), what))
    return found


def _model(told: Told, kinds: list[parts.Kind], misses: list[parts.Misses]) -> Branch:
    ops = [(place.module, Op(kind.operation, kind.state, kind.id)) for kind in kinds for place in kind.places]
    ops += [(place.module, Op(miss.op, "missed", miss.id)) for miss in misses for place in miss.places]
    return tree(all_of(told, "modules"), ops)


def _loop(loop: Told) -> dict[str, Any]:
    reads = [f"{loop['streams'].count(name)} {name}" for name in dict.fromkeys(loop["streams"])]
    reads += [f"{loop['around']} from around"] if loop["around"] else []
    return {
        "where": short(loop["where"]),
        "state": "rewritten" if loop["rolled"] else "refused",
        "became": "one step, rolled" if loop["rolled"] else f"kept: {_reason(loop)}",
        "steps": loop["steps"],
        "facts": {
            "a step": f"{loop['calls']} calls",
            "carried": "\n".join(loop["carried"]),
            "reads": ", ".join(reads),
            "gives": "\n".join(loop["outputs"]),
        },
        "source": parts.source(loop["where"]),
    }


def _layers(layers: Told) -> dict[str, Any]:
    return {
        "where": short(layers["where"]),
        "state": "rewritten" if layers["folded"] else "chosen",
        "count": layers["count"],
        "calls": layers["calls"],
        "became": "one region, compiled once" if layers["folded"] else f"kept apart: {_reason(layers)}",
    }


def _reason(told: Told) -> str:
    reason = told.get("reason")
    return "no reason was noted" if reason is None else f"[{reason['code']}] {reason['message']}"


def _events(told: Told) -> list[tuple[int, str, str]]:
    groups = grouped(all_of(told, "events"), lambda each: (each["code"], without_numbers(each["message"])))
    return [(len(each), each[0]["code"], short(each[0]["message"])) for each in groups]


def _by_kind(found: list[Change]) -> Mapping[str, list[Change]]:
    return {each[0].kind: each for each in grouped(found, lambda change: change.kind)}
