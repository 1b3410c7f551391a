"""The page itself: what a report tells, put into the template; never more than two megabytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lz_compile.report.changes import Change, Told, all_of, changes, environment_of, seconds_of
from lz_compile.report.html import parts
from lz_compile.report.html.room import Bodies, Room, rooms
from lz_compile.report.html.tree import Branch, Op, tree
from lz_compile.report.layout import amount, short
from lz_compile.report.schema import checked
from lz_compile.report.summary import grouped, without_numbers

if TYPE_CHECKING:
    from jinja2 import Template

#: Bytes of a page at most.
MOST_BYTES = 2_000_000
#: Letters of names in the header.
_LONGEST_NAME = 300
_HERE = Path(__file__).parent


def page(told: Told, since: Told | None = None, title: str = "lz_compile") -> str:
    """A report, as :meth:`~lz_compile.report.report.Report.to_dict` tells it, as one HTML page.

    Source lines are read where their files are on this machine. A large page is packed: its script unpacks what is behind
    the header. What even so has no room is left out, and the page says so, with where to find it.

    Args:
        told: the report.
        since: an earlier one: what changed stands first.
        title: of the page.

    Raises:
        ArgumentError: one of them is no report; the text names the field that is wrong.
    """
    told = checked(told, "page", "told")
    content = _content(told, since)
    text = ""
    for room in rooms(len(content["kinds"]) + len(content["misses"])):
        text = _page(told, content, title, room)
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def _content(told: Told, since: Told | None) -> dict[str, Any]:
    """What stands behind the header, of everything."""
    seconds = seconds_of(told)
    return {
        "kinds": parts.kinds(all_of(told, "matches")),
        "misses": parts.causes(all_of(told, "near_misses"), all_of(told, "matches")),
        "loops": [_loop(each) for each in all_of(told, "loops")],
        "layers": [_layers(each) for each in all_of(told, "layers")],
        "unproven": [(each["code"], short(each["message"])) for each in all_of(told, "unproven")],
        "events": _events(told),
        "stages": parts.stages(seconds),
        "seconds": sum(seconds.values()),
        "changes": None if since is None else _by_kind(changes(since, told)),
    }


def _page(told: Told, content: Mapping[str, Any], title: str, room: Room) -> str:
    bodies = Bodies(is_packed=room.is_packed)
    own = {"cut": room.cut, "fitting": room.fitting, "without": room.without, "keep": bodies.keep}
    main = _template("main").render(content, **own, model=_model(told, content, room))
    script = _file("page.js")
    return _template("page").render(
        cut=Room(longest=_LONGEST_NAME).cut,
        title=title,
        style=_file("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        environment=environment_of(told),
        summary=_summary(told),
        seconds=content["seconds"],
        changes=content["changes"],
        left_out=room.left_out,
        packed=bodies.packed(main) if room.is_packed else "",
        main=Markup(main),
    )


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_file(f"{name}.html.j2"))


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


def _model(told: Told, content: Mapping[str, Any], room: Room) -> Branch:
    kinds, misses = room.fitting(content["kinds"]), room.fitting(content["misses"])
    ops = [(each.module, Op(kind.label, kind.state, kind.id)) for kind in kinds for each in room.fitting(kind.places)]
    ops += [(each.module, Op(miss.op, "missed", miss.id)) for miss in misses for each in room.fitting(miss.places)]
    return tree(room.fitting(all_of(told, "modules")), ops)


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
