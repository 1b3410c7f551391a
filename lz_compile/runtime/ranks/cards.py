"""What each rank says of itself: its versions, its devices, and which kernels it has. Who differs is a table."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from lz_compile import __version__
from lz_compile.errors import RanksDifferError
from lz_compile.ground import events, health
from lz_compile.ground.fingerprint import source_hash
from lz_compile.ground.hardware import hardware
from lz_compile.ground.records import Reason, Record
from lz_compile.lowering import ops
from lz_compile.runtime.choose.agreed import Agreed
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.libraries import LazyFunction

#: Fields of a card that say which version a rank runs, as people call them.
VERSIONS: Mapping[str, str] = {
    "layerzero": "lz_compile",
    "torch": "torch",
    "kernels": "kernel table",
    "source": "source of lz_compile",
}
#: What ranks may differ in as well, which changes what they choose.
_BESIDE: Mapping[str, str] = {"wishes": "policy"}


class Card(Struct, frozen=True, kw_only=True):
    """One rank: where it is, its versions, the kinds of device that it computes on, and the table of kernels it can load."""

    rank: int
    host: str
    process: int
    layerzero: str
    torch: str
    kernels: str
    source: str
    wishes: str
    kinds: tuple[str, ...]
    table: str

    @classmethod
    def of(cls, rank: int, wishes: str, kinds: Iterable[str], table: str) -> Card:
        """This process's own."""
        return cls(
            rank=rank,
            host=socket.gethostname(),
            process=os.getpid(),
            layerzero=__version__,
            torch=str(torch.__version__),
            kernels=registry.digest()[:16],
            source=source_hash()[:16],
            wishes=wishes,
            kinds=tuple(kinds),
            table=table,
        )


#: Identities of the kernels that a rank has, by op and kernel.
Table = Mapping[str, Mapping[str, str]]


def own_table() -> Table:
    """Every kernel whose library is there and that is not retired, with what it is."""
    return {
        op: {
            kernel_id: identity(spec)
            for kernel_id, spec in registry.kernels(op).items()
            if spec.availability() is None and health.retired(kernel_id) is None
        }
        for op in ops.names()
    }


def identity(spec: KernelSpec) -> str:
    """What a kernel is: its limits, its library's version and its code; equal on ranks that have the same one."""
    code = spec.implementation
    source = _source(code.module) if isinstance(code, LazyFunction) and spec.is_shipped else ""
    text = f"{spec.kernel_id} {spec.version} {spec.capabilities_hash} {source}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _source(module: str) -> str:
    """A hash of an adapter's file, whether it was imported by now or not."""
    found = importlib.util.find_spec(module)
    return "" if found is None or found.origin is None else hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def encoded(table: Table) -> tuple[str, bytes]:
    """A table as it is kept, and the name under which: its hash, so that equal ones are kept once."""
    data = msgspec.json.encode(table, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16], data


def kinds_here() -> tuple[str, ...]:
    """The kinds of device of this process, as far as they are known without waking any."""
    found = [hardware("cpu").kind()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(hardware("cuda").kind())
    return tuple(found)


# ---- who differs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference(Record):
    """Something in which ranks differ: its name, and the ranks that have each value."""

    what: str
    ranks: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        parts = (f"{value} on {listed(ranks)}" for value, ranks in self.ranks.items())
        return f"{self.what}: {', '.join(parts)}"


def differences(cards: Iterable[Card]) -> list[Difference]:
    """In what the ranks differ; none if in nothing."""
    found = []
    listed_cards = sorted(cards, key=lambda card: card.rank)
    for name, what in {**VERSIONS, **_BESIDE}.items():
        values: dict[str, tuple[int, ...]] = {}
        for card in listed_cards:
            value = getattr(card, name)
            values[value] = (*values.get(value, ()), card.rank)
        if len(values) > 1:
            found.append(Difference(what, values))
    return found


def tell(found: Iterable[Difference], policy: str) -> None:
    """Say who differs, as an event.

    Raises:
        RanksDifferError: ``policy`` is ``refuse``, and they differ in a version.
    """
    rows = list(found)
    text = "; ".join(map(str, rows))
    if policy == "refuse" and any(row.what in VERSIONS.values() for row in rows):
        raise RanksDifferError(text)
    if rows:
        follows = (
            "kernels that are the same on all of them are used" if policy == "lowest" else "they agree all the same"
        )
        events.record("RANKS_DIFFER", f"{text}; {follows}")


def not_everywhere(
    op: str, own: int, cards: Iterable[Card], tables: Mapping[str, Table], policy: str
) -> dict[str, Reason]:
    """Why kernels of an op are not for all of some ranks: one lacks it, or has another one of that name (``lowest``)."""
    found: dict[str, Reason] = {}
    here = {name: identity(spec) for name, spec in registry.kernels(op).items()} if policy == "lowest" else {}
    tabled: dict[str, Card] = {}
    for card in sorted(cards, key=lambda card: card.rank):
        tabled.setdefault(card.table, card)
    for card in tabled.values():
        there = tables.get(card.table, {}).get(op)
        if card.rank == own or there is None:
            continue
        for kernel_id in registry.kernels(op):
            text = ""
            if kernel_id not in there:
                text = f"rank {card.rank} does not have {kernel_id}, or cannot load it"
            elif policy == "lowest" and there[kernel_id] != here[kernel_id]:
                text = f"rank {card.rank} has another {kernel_id} than this one"
            if text:
                found.setdefault(kernel_id, Reason("NOT_ON_ALL_RANKS", text))
    return found


def listed(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def passed_over(held: Mapping[str, tuple[int, str]]) -> dict[str, Reason]:
    """Why kernels are for nobody that a rank cannot run, by what is kept of it."""
    return {
        name: Reason("NOT_ON_ALL_RANKS", f"rank {rank} cannot run {name} ({why})") for name, (rank, why) in held.items()
    }


# ---- what a rank has heard -------------------------------------------------------------------------------------------


class News(Struct, frozen=True, kw_only=True):
    """Something that a rank said after it had joined: its card is another one, or the job moved on from a kernel."""

    rank: int
    key: str = ""
    kernel: str = ""
    why: str = ""


@dataclass
class Heard:
    """What is known of the others by now; ``seen`` counts the news that were read, ``settled`` are decisions by key.

    ``taken`` are the kernels that this rank has compiled, by key; ``is_told`` says that nobody came since it was told who
    differs.
    """

    cards: dict[int, Card] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    settled: dict[str, Agreed] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    seen: int = 0
    has_waited: bool = False
    taken: dict[str, set[str]] = field(default_factory=dict)
    is_told: bool = True
