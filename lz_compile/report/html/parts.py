"""What a page tells of each kind of match and near miss, as plain values for the template."""

from __future__ import annotations

import json
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lz_compile.report.changes import Told, latency
from lz_compile.report.layout import amount, duration, short
from lz_compile.report.mask_picture import ASKED, ASKED_OF_KEYS, DROPPED, KEPT, PARTLY
from lz_compile.report.render import attributes_text, latency_text, problem_text, proof_text, sorted_out
from lz_compile.report.summary import grouped, without_numbers

#: Reasons for leaving a match as it is that are choices, not troubles.
_CHOICES = frozenset(
    {"LEFT_TO_INDUCTOR", "ALREADY_THIS_KERNEL", "SELECTS_ITSELF", "PART_OF_ANOTHER", "NOT_PROVEN", "NOT_FUSED"}
)
#: Lines of source around the one that a report names.
_AROUND = 4
#: What of a match is its own and not its kind's.
_OWN = ("where", "graph", "module", "validation", "before", "after")
#: What to do about reasons, where their messages do not say it.
_HELPS: Mapping[str, str] = {
    "VALIDATION_FAILED": "Nothing: the kernel gives other numbers than float64 here. Please report it.",
    "OVERWRITTEN_LATER": "Do not write in place to what it reads, or run it without gradients.",
    "VALUE_NOT_GUARDED": "Make the mask an input, or compute it in the forward.",
    "NOT_INSTALLED": "Install the library: python -m lz_compile doctor --fix prints how.",
    "BACKEND_NOT_TRIED_YET": "Compile again later, or wait for it: python -m lz_compile doctor.",
    "BACKEND_IMPORT_FAILED": "Mend the installation: python -m lz_compile doctor --fix prints how.",
    "NOT_PROVEN": "Nothing: a dry run replaces nothing. lz.explain tries the kernel.",
    "ALREADY_THIS_KERNEL": "Nothing: the source calls the fastest kernel itself.",
}
#: Of a picture of a mask: its marks, their colour, and what they say.
_LEGEND = (
    (KEPT, "kept", "kept"),
    (PARTLY, "partly", "kept in part"),
    (ASKED, "asked", "decided by values of each call"),
    (ASKED_OF_KEYS, "asked", "keys that values of each call keep or drop, the same for every query"),
    (DROPPED, "dropped", "dropped"),
)
#: A bar is full at this many times Inductor's latency.
_WIDEST = 2.0


@dataclass(frozen=True)
class Place:
    """Where something is: module, nested graph, ``file:line``, and how it was proven there."""

    module: str
    graph: str
    where: str
    proof: str = ""


@dataclass(frozen=True)
class Bar:
    """A candidate: what it takes in percent of the widest bar, how that is known, and what speaks against it."""

    kernel: str
    is_chosen: bool
    width: float
    origin: str
    text: str
    against: str


@dataclass(frozen=True)
class Line:
    """A source line; ``is_it`` marks the one that is meant."""

    number: int
    text: str
    is_it: bool


class Kind:
    """Matches that differ in nothing but their places."""

    def __init__(self, matches: Sequence[Told], number: int, measured_us: float) -> None:
        self.matches, self.first, self.id = matches, matches[0], f"match-{number}"
        self.count, self._measured_us = len(matches), measured_us

    @property
    def operation(self) -> str:
        """With its variant."""
        return str(self.first["op"] if self.first["context"] is None else self.first["context"]["operation"])

    @property
    def label(self) -> str:
        """The operation as the tree has it: with its mask, where the variant does not say it."""
        mask = short(self.first["mask"] or "")
        return self.operation if not mask or self.operation.endswith(f".{mask}") else f"{self.operation}, {mask}"

    @property
    def state(self) -> str:
        """``rewritten``, ``chosen`` (left to what is there by choice), or ``refused``."""
        return state_of(self.first)

    @property
    def verdict(self) -> str:
        """What became of it, in a few words."""
        kernel, codes = self.first["kernel"], [reason["code"] for reason in self.first["reasons"]]
        if self.first["rewritten"]:
            return f"replaced by {kernel}"
        told = {"ALREADY_THIS_KERNEL": f"is {kernel} already", "NOT_PROVEN": f"{kernel} would be tried"}
        return next((told[code] for code in codes if code in told), f"left to {kernel}")

    @cached_property
    def facts(self) -> dict[str, str]:
        """Names beside what there is to say."""
        first = self.first
        mask = first["mask"] or ("none: every query sees every key" if first["op"] == "attention" else "")
        time = latency(first)
        found = {
            "why": first["why"],
            "reasons": "\n".join(f"[{reason['code']}] {reason['message']}" for reason in first["reasons"]),
            "what helps": "" if first["rewritten"] else self._helps(),
            "computes": first["formula"],
            "mask": "\n".join([mask, *(f"[{each['code']}] {each['message']}" for each in first["mask_reasons"])]),
            "problem": "" if first["context"] is None else problem_text(first["context"]),
            "attributes": attributes_text(first["attributes"]),
            "proof": self._proof,
            "guards": ", ".join(first["guards"]),
            "buckets": "\n".join(first.get("buckets", ())),
            "run time": "" if time is None else self._run_time(time),
        }
        return {name: text.strip() for name, text in found.items() if text.strip()}

    def _helps(self) -> str:
        """What would bring a kernel here, as far as that is known."""
        codes = [reason["code"] for reason in self.first["reasons"]]
        found = [_HELPS[code] for code in codes if code in _HELPS]
        is_measured = any(each.get("origin") == "measured" for each in self.first["candidates"])
        if "LEFT_TO_INDUCTOR" in codes and not is_measured:
            found.append(f"Measuring may say otherwise: python -m lz_compile tune {self.operation}.")
        graded = [each["kernel"] for each in self.first["candidates"] if _is_of_gradients(each["against"])]
        if graded:
            found.append(f"Compiled without gradients (torch.no_grad()), {', '.join(graded)} could run this.")
        able = [each["kernel"] for each in self.first["candidates"] if not each["against"]]
        able = [kernel for kernel in able if kernel != "inductor"]
        if "LEFT_TO_INDUCTOR" in codes and able:
            lock = f"options={{'layerzero.lock': {{'{self.first['op']}': '{able[0]}'}}}}"
            time = next(each for each in self.first["candidates"] if each["kernel"] == able[0])
            known = time["origin"] not in ("assumed", None)
            expected = f" It is expected to take {latency_text(time, self.first['context'])}." if known else ""
            found.append(f"To have a kernel all the same: {lock}.{expected}")
        return "\n".join(dict.fromkeys(found))

    @property
    def _proof(self) -> str:
        found = self.first["validation"] or {}
        if found and not found.get("ok"):
            return f"{found.get('kernel')} failed: {found.get('reason')}"
        return proof_text(found) or ("" if self.first["rewritten"] else "none: nothing was replaced")

    def _run_time(self, time: float) -> str:
        own = time * self.count
        share = f", {own / self._measured_us:.0%} of all that was measured here" if self._measured_us else ""
        return f"{amount(self.count, 'call')} of {duration(time)}: {duration(own)}{share}"

    @cached_property
    def bars(self) -> list[Bar]:
        """The candidates of which there is something to tell, the best first."""
        return [self._bar(row) for row in self._sorted[0]]

    @property
    def others(self) -> dict[str, str]:
        """The names of the other candidates, by what is the matter with them."""
        return {text: ", ".join(names) for text, names in self._sorted[1].items() if names}

    @cached_property
    def _sorted(self) -> tuple[list[Told], dict[str, list[str]]]:
        rows, rest = sorted_out(self.first["candidates"], self.first["kernel"], self.first["context"])
        return sorted(rows, key=lambda row: row["kernel"] != self.first["kernel"]), rest

    def _bar(self, row: Told) -> Bar:
        against = [reason["message"] for reason in row["against"]]
        told = [*against, *(reason["message"] for reason in row.get("notes", ()))]
        width = 0.0 if against else min(100.0, 100 * row["relative_latency"] / _WIDEST)
        text = "" if against else latency_text(row, self.first["context"])
        is_chosen = row["kernel"] == self.first["kernel"]
        return Bar(row["kernel"], is_chosen, round(width, 1), row["origin"], text, "\n".join(told))

    @property
    def picture(self) -> str:
        """The mask, a line for each row."""
        return "\n".join(self.first.get("picture", ()))

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Colours of the picture, and what they say."""
        return [(cell, text) for marks, cell, text in _LEGEND if {*marks} & {*self.picture}]

    @property
    def axes(self) -> str:
        """How many queries and keys the picture has."""
        dims = (self.first["context"] or {}).get("dims", {})
        sizes = [each["hint"] if isinstance(each, dict) else each for each in map(dims.get, ("seq_len_q", "seq_len_k"))]
        return f"{sizes[0]} queries (down), {sizes[1]} keys (across)"

    @property
    def before(self) -> str:
        """The calls that were recognised."""
        return _text(self.matches, "before")

    @property
    def after(self) -> str:
        """The calls that are there instead."""
        return _text(self.matches, "after")

    @property
    def places(self) -> list[Place]:
        """Of every match."""
        return [
            Place(each.get("module", ""), each["graph"], short(each["where"]), self._proven(each))
            for each in self.matches
        ]

    def _proven(self, match: Told) -> str:
        return proof_text(match["validation"]) if match["rewritten"] and self.count > 1 else ""

    @cached_property
    def source(self) -> list[Line]:
        """The code around the first of them."""
        return source(self.first["where"])


def _is_of_gradients(against: Sequence[Told]) -> bool:
    codes = [reason["code"] for reason in against]
    return bool(codes) and all(code == "TRAINING_UNSUPPORTED" or "GRADIENT" in code for code in codes)


def _text(matches: Iterable[Told], name: str) -> str:
    return "\n".join(next((match[name] for match in matches if match.get(name)), ()))


def mask_text(match: Told) -> str:
    """The mask of an attention, to be put behind what is said of it."""
    return "" if match["op"] != "attention" else f" (mask: {short(match['mask'])})" if match["mask"] else " (no mask)"


class Misses:
    """Near misses of one cause."""

    def __init__(self, misses: Sequence[Told], number: int, matches: Sequence[Told]) -> None:
        self.misses, self.first, self.id, self._matches = misses, misses[0], f"miss-{number}", matches
        self.count, self.op, self.code = len(misses), misses[0]["op"], misses[0]["reason"]["code"]
        self.message, self.edit = short(misses[0]["reason"]["message"]), misses[0]["edit"]

    @property
    def cost(self) -> str:
        """What a kernel brings where the same op was recognised: of what was not, nothing is known."""
        times = Counter(
            f"{match['kernel']}, {latency_text(each, match['context'])}{mask_text(match)}"
            for match in self._matches
            if match["op"] == self.op and match["rewritten"]
            for each in match["candidates"]
            if each["kernel"] == match["kernel"] and not each["against"]
        )
        if not times:
            return "not known: what was not recognised is not measured"
        told = "\n".join(f"{count} x {text}" for text, count in times.items())
        return f"not measured here; where {self.op} was replaced in this model:\n{told}"

    @property
    def mask(self) -> str:
        """Of an attention that was not recognised no mask is read; empty of other ops."""
        masks = Counter(short(match["mask"] or "none") for match in self._matches if match["op"] == "attention")
        if self.op != "attention":
            return ""
        others = ", ".join(f"{count} x {mask}" for mask, count in masks.items())
        text = "not known: it is read last, and this attention was refused before"
        return text + (f". Masks of those that were recognised here: {others}" if others else "")

    @property
    def places(self) -> list[Place]:
        """Of every one."""
        return [Place(each.get("module", ""), "", short(each["where"])) for each in self.misses]

    @cached_property
    def source(self) -> list[Line]:
        """The code around the first of them."""
        return source(self.first["where"])


def state_of(match: Told) -> str:
    """What became of a match, as one of three."""
    if match["rewritten"]:
        return "rewritten"
    codes = {reason["code"] for reason in match["reasons"]}
    return "chosen" if codes <= _CHOICES else "refused"


def kinds(matches: Sequence[Told]) -> list[Kind]:
    """Matches that are alike together, those that were replaced first."""
    times = [latency(match) or 0.0 for match in matches]

    def key(match: Told) -> str:
        return json.dumps({**match, **dict.fromkeys(_OWN)}, sort_keys=True, default=str)

    order = ("refused", "rewritten", "chosen")
    found = sorted(grouped(matches, key), key=lambda each: order.index(state_of(each[0])))
    return [Kind(each, number, sum(times)) for number, each in enumerate(found)]


def causes(misses: Sequence[Told], matches: Sequence[Told]) -> list[Misses]:
    """Near misses of one cause together, the most frequent first; ``matches`` tell what they may cost."""

    def key(miss: Told) -> tuple[str, ...]:
        return miss["op"], miss["reason"]["code"], without_numbers(miss["reason"]["message"]), miss["edit"]

    found = sorted(grouped(misses, key), key=len, reverse=True)
    return [Misses(each, number, matches) for number, each in enumerate(found)]


def source(where: str) -> list[Line]:
    """The lines around ``file:line`` where the file is on this machine, else none."""
    path, _, line = where.rpartition(":")
    is_code = path.endswith(".py") or path in linecache.cache  # a report of somebody else's names any file
    is_place = line.isdecimal() and len(line) < 10 and "\0" not in path
    return list(_lines(path, int(line))) if is_place and is_code else []


def _lines(path: str, line: int) -> Iterator[Line]:
    for number in range(max(1, line - _AROUND), line + _AROUND + 1):
        text = linecache.getline(path, number)
        if text:
            yield Line(number, text.rstrip("\n"), number == line)


def stages(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Name, seconds and percent of the longest of every stage that took any time."""
    most = max(seconds.values(), default=0.0)
    return [(name, time, 100 * time / most) for name, time in seconds.items() if time >= 5e-4]
