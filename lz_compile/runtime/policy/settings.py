"""The settings of a policy with their defaults, and one layer of configuration: what one origin says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from lz_compile.runtime.policy.rules import Lock, Rule, Statement


@dataclass(frozen=True)
class PerfDBSettings:
    """The database of measurements. ``path`` None: in the user's cache directory.

    ``auto_tune`` measures what is missing; None: where two kernels are close and the measuring pays.
    """

    enabled: bool = True
    path: str | None = None
    auto_tune: bool | None = None
    tune_samples: int = 20


@dataclass(frozen=True)
class CacheSettings:
    """The cache of decisions in memory."""

    enabled: bool = True
    max_size: int = 10_000
    ttl_seconds: float = 60.0


@dataclass(frozen=True)
class RanksSettings:
    """How the ranks of one job come to their kernels (``docs/distributed.md``).

    ``timeout_s`` is how long the job's store may take for an answer, and how long ranks that say nothing are waited for,
    once. A rank that measures loses its turn when nothing was heard of it for ``lease_s``. ``versions`` says what follows
    where ranks run different versions.
    """

    selection: Literal["agree", "alone"] = "agree"
    timeout_s: float = 5.0
    lease_s: float = 15.0
    versions: Literal["warn", "lowest", "refuse"] = "warn"


@dataclass(frozen=True)
class Settings:
    """Everything that is not about single kernels; ``memory_headroom_mb`` counts 2**20 bytes.

    ``deterministic`` admits kernels alone that give the same bits twice, ``"batch_invariant"`` those alone whose rows do not
    depend on the rest of the batch. ``max_reports`` is how many reports of compiled graphs this process keeps, the last ones.
    """

    enabled: bool = True
    fallback_enabled: bool = True
    log_selections: bool = False
    deterministic: bool | Literal["batch_invariant"] = False
    strict_mode: bool = False
    memory_headroom_mb: int | None = None
    max_reports: int = 1000
    debug: bool = False
    perfdb: PerfDBSettings = field(default_factory=PerfDBSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    ranks: RanksSettings = field(default_factory=RanksSettings)

    @property
    def memory_headroom_bytes(self) -> int | None:
        """The largest workspace that a kernel may take; None: nobody said."""
        return None if self.memory_headroom_mb is None else self.memory_headroom_mb * 2**20

    def replaced(self, values: Mapping[str, Any]) -> Settings:
        """The same with other values, by dotted names (``cache.max_size``)."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group, _, leaf = name.rpartition(".")
            groups.setdefault(group, {})[leaf] = value
        changed = groups.pop("", {})
        return replace(self, **changed, **{g: replace(getattr(self, g), **v) for g, v in groups.items()})

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted name."""
        found: dict[str, Any] = {}
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if is_dataclass(value):
                found.update({f"{field_.name}.{leaf.name}": getattr(value, leaf.name) for leaf in fields(value)})
            else:
                found[field_.name] = value
        return found


#: Settings that change what is told or how fast it is found, never what is chosen.
WITHOUT_EFFECT_ON_DECISIONS = frozenset(
    "log_selections max_reports debug cache.enabled cache.max_size cache.ttl_seconds ranks.timeout_s ranks.lease_s".split()
)


@dataclass(frozen=True)
class Value:
    """A setting that a layer gives, by its dotted name."""

    name: str
    value: bool | int | float | str | None
    origin: str


@dataclass(frozen=True)
class Layer:
    """What one origin says: a file, the environment, code, a context manager. Hashable; nothing in it changes."""

    values: tuple[Value, ...] = ()
    locks: tuple[Lock, ...] = ()
    statements: tuple[Statement, ...] = ()
    rules: tuple[Rule, ...] = ()

    def updated(self, newer: Layer, replaces: Iterable[str] = ()) -> Layer:
        """This layer after ``newer`` was said by the same origin.

        Args:
            newer: wins where both speak of the same.
            replaces: parts of which nothing older stays: ``locks``, ``rules``, ``prefer``, ``avoid``.
        """
        gone = set(replaces)
        renamed = {value.name for value in newer.values}
        relocked = {lock.operation for lock in newer.locks}
        restated = {statement.pattern for statement in newer.statements}
        return Layer(
            values=(*(value for value in self.values if value.name not in renamed), *newer.values),
            locks=(*(k for k in self.locks if "locks" not in gone and k.operation not in relocked), *newer.locks),
            statements=(
                *newer.statements,
                *(s for s in self.statements if s.kind not in gone and s.pattern not in restated),
            ),
            rules=(*newer.rules, *(() if "rules" in gone else self.rules)),
        )

    def canonical(self) -> list[Any]:
        """What this layer says about kernels, as stable JSON without origins; empty if nothing."""
        locks = sorted([lock.operation, lock.kernel_id] for lock in self.locks)
        statements = [[statement.kind, statement.pattern] for statement in self.statements]
        rules = [rule.to_dict() for rule in self.rules]
        return [locks, statements, rules] if locks or statements or rules else []
