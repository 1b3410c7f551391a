"""The page itself: what a report tells, put into the template; never more than two megabytes."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

from lz_compile.report.changes import Change, Told, all_of, changes, environment_of, seconds_of
from lz_compile.report.html import parts
from lz_compile.report.layout import amount, short
from lz_compile.report.schema import checked
from lz_compile.report.summary import grouped, without_numbers

if TYPE_CHECKING:
    from jinja2 import Template


# ---- the modules of a model as a tree, alike siblings together, with what became of the ops in them ----------------------


#: Modules in modules at most; what is deeper is one name.
_DEEPEST = 60


@dataclass(frozen=True)
class Op:
    """An operation in a module: its name, what became of it (``state``), and where the page tells more."""

    name: str
    state: str
    target: str


@dataclass
class Branch:
    """A module: its name in its parent, its path and class, the calls directly in it, its ops and the modules below."""

    name: str
    path: str
    kind: str = ""
    calls: int = 0
    ops: list[Op] = field(default_factory=list)
    below: dict[str, Branch] = field(default_factory=dict)

    @property
    def counts(self) -> list[tuple[Op, int]]:
        """The ops here and below, alike ones together."""
        found: dict[tuple[str, str], list[str]] = {}
        for op in self.all_ops():
            found.setdefault((op.name, op.state), []).append(op.target)
        return [(Op(*key, targets[0] if len({*targets}) == 1 else ""), len(targets)) for key, targets in found.items()]

    @property
    def text(self) -> str:
        """What a search finds."""
        return f"{self.path} {self.kind} {' '.join(op.name for op in self.ops)}".lower()

    def all_ops(self) -> Iterator[Op]:
        """The ops here and below."""
        yield from self.ops
        for child in self.below.values():
            yield from child.all_ops()

    def form(self) -> tuple[object, ...]:
        """What is the same of modules that are alike."""
        told = tuple((op.name, op.state) for op in self.ops)
        return self.kind, told, tuple((name, child.form()) for name, child in self.below.items())

    @property
    def groups(self) -> list[Group]:
        """The modules below, neighbours of one class together."""
        found: list[Group] = []
        for child in self.below.values():
            if found and child.kind and found[-1].members[-1].kind == child.kind and child.name.isdigit():
                found[-1].members.append(child)
            else:
                found.append(Group([child]))
        return found


@dataclass
class Group:
    """Neighbours of one class: ``24 x LlamaDecoderLayer``."""

    members: list[Branch]

    @property
    def is_one(self) -> bool:
        """Whether it is a single module."""
        return len(self.members) == 1

    @property
    def counts(self) -> list[tuple[Op, int]]:
        """The ops in all of them."""
        whole = Branch("", "", below={str(n): each for n, each in enumerate(self.members)})
        return whole.counts

    @property
    def forms(self) -> int:
        """How many kinds of them there are."""
        return len({each.form() for each in self.members})


def tree(modules: Iterable[Mapping[str, Any]], ops: Sequence[tuple[str, Op]]) -> Branch:
    """The model.

    Args:
        modules: path, class and calls of each, as :class:`~lz_compile.report.findings.ModuleReport` tells them.
        ops: the path of the module that each is in, and the op.
    """
    root = Branch("model", "")
    for module in modules:
        found = _at(root, module["path"])
        found.kind, found.calls = module["kind"], found.calls + module["calls"]
    for path, op in ops:
        _at(root, path).ops.append(op)
    return root


def _at(root: Branch, path: str) -> Branch:
    here = root
    for name in path.split(".", _DEEPEST) if path else ():
        whole = f"{here.path}.{name}" if here.path else name
        here = here.below.setdefault(name, Branch(name, whole))
    return here


# ---- how much of a report one page shows: all where there is room, as text or packed, else as much as fits -----------------


T = TypeVar("T")

#: Items of a page that nobody reads to the end; a browser takes seconds for more.
_MANY = 4_000
#: What is told of parts that are left out.
_PARTS = {
    "calls": "the calls before and after (`before` and `after` of each match)",
    "source": "the source around places",
    "candidates": "the kernels that were compared (`candidates` of each match)",
    "places": "all places after the first 8 of a kind (`where` and `module`)",
}


@dataclass(frozen=True)
class Room:
    """What a page shows.

    ``is_packed``: what is behind the header is compressed, and the page's script unpacks it. ``without`` are parts that are
    left out, ``longest`` letters of a text are shown, and ``most`` of each list.
    """

    is_packed: bool = False
    without: frozenset[str] = frozenset()
    longest: int | None = None
    most: int | None = None

    @property
    def left_out(self) -> list[str]:
        """What is told of it."""
        found = [text for name, text in _PARTS.items() if name in self.without]
        if self.longest is not None:
            found.append(f"what texts have after {self.longest:,} letters")
        if self.most is not None:
            found.append(f"everything after the first {self.most:,} of each list")
        return found

    def cut(self, text: str) -> str:
        """A text, as far as it is shown."""
        if self.longest is None or text is None or len(text) <= self.longest:
            return text
        return f"{text[: self.longest]} ... ({len(text) - self.longest:,} letters more in the JSON)"

    def fitting(self, found: Sequence[T], most: int | None = None) -> Sequence[T]:
        """Those of a list that are shown."""
        limits = [each for each in (most, self.most) if each is not None]
        return found[: min(limits)] if limits else found


def rooms(count: int) -> Iterator[Room]:
    """From the largest on, for so many items. Why something was refused, what helps, cost and masks are cut last."""
    room = Room(most=None if count <= _MANY else _MANY // 2)
    yield room
    room = replace(room, is_packed=True)
    yield room
    for longest, part in ((20_000, ""), (4_000, ""), (4_000, "calls"), (1_000, "source"), (500, "candidates")):
        room = replace(room, longest=longest, without=room.without | ({part} if part else set()))
        yield room
    room = replace(room, without=room.without | {"places"})
    for most in (1_000, 500, 250, 100, 30, 10):
        yield replace(room, most=most)


class Bodies:
    """What is shown once something is opened: at once a part of the page, or one of those that are packed."""

    def __init__(self, *, is_packed: bool) -> None:
        self._is_packed, self.texts = is_packed, list[str]()

    def keep(self, text: str) -> str:
        """What stands in its place; both are HTML."""
        from markupsafe import Markup

        if not self._is_packed:
            return Markup(text)
        self.texts.append(str(text))
        return Markup(f'<div class="later" data-body="{len(self.texts) - 1}"></div>')

    def packed(self, main: str) -> str:
        """The page behind its header, and the bodies, as the script unpacks them."""
        whole = json.dumps({"main": main, "bodies": self.texts})
        return base64.b64encode(zlib.compress(whole.encode(), 9)).decode()


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
        since: an earlier one: what changed stands first.

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
