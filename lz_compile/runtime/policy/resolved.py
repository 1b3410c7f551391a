"""What layers of configuration say together: settings, and which kernels one problem may, should and should not have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import names
from lz_compile.runtime.policy.rules import Kind, Lock, Statement
from lz_compile.runtime.policy.settings import WITHOUT_EFFECT_ON_DECISIONS, Layer, Settings, Value
from lz_compile.runtime.problem.context import SelectionContext

Entry = tuple[str, str]  # a kernel's id, and who said it


@dataclass(frozen=True)
class ResolvedPolicy:
    """What a policy says about the kernels of one problem.

    Kernels are listed by their ids, each under ``prefer`` or ``avoid`` at most: the strongest origin that names it decides.
    ``exclude`` is final; the others order the kernels that can run. ``prefer_places`` counts the statements behind
    ``prefer``: kernels of one library that was preferred as a whole share a place.
    """

    lock: str | None = None
    lock_origin: str = ""
    exclude: tuple[Entry, ...] = ()
    prefer: tuple[Entry, ...] = ()
    avoid: tuple[Entry, ...] = ()
    prefer_places: tuple[int, ...] = ()

    def excluded(self, kernel_id: str) -> str | None:
        """Who excludes a kernel; None: nobody. Nobody can exclude ``inductor``."""
        return dict(self.exclude).get(kernel_id)

    def avoided(self, kernel_id: str) -> str | None:
        """Who wants a kernel to be avoided; None: nobody."""
        return dict(self.avoid).get(kernel_id)

    def preference(self, kernel_id: str) -> tuple[int, str] | None:
        """The place of a kernel among those preferred (0 is first) and who prefers it; None: it is not preferred."""
        places = zip(self.prefer, self.prefer_places, strict=True)
        return next(((place, origin) for (name, origin), place in places if name == kernel_id), None)


_NOTHING = ResolvedPolicy()


@dataclass(frozen=True, eq=False)
class Policy:
    """Layers of configuration, the strongest first. Immutable."""

    layers: tuple[Layer, ...] = ()
    file: str | None = None

    def overlaid(self, layer: Layer) -> Policy:
        """The same under a layer that is stronger than all others."""
        return Policy((layer, *self.layers), self.file)

    def with_locks(self, locks: Mapping[str, str], origin: str = "options['layerzero.lock']") -> Policy:
        """The same with the locks of one compile (kernel ids by operation)."""
        return self.overlaid(Layer(locks=tuple(Lock(*each, origin) for each in locks.items()))) if locks else self

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Every setting that somebody gave, by its dotted name, with who did."""
        return {value.name: value for layer in reversed(self.layers) for value in layer.values}

    @cached_property
    def settings(self) -> Settings:
        """Every setting, given or default."""
        return Settings().replaced({name: value.value for name, value in self.values.items()})

    @cached_property
    def digest(self) -> str:
        """A hash of everything that may change a decision: not of who said it, nor of what only changes telling."""
        settings = {k: v for k, v in self.settings.flat().items() if k not in WITHOUT_EFFECT_ON_DECISIONS}
        return hashlib.sha256(json.dumps([settings, self._said], sort_keys=True).encode()).hexdigest()

    @cached_property
    def wishes(self) -> str:
        """A hash of what is said about kernels alone: ranks with other files and other measurements may share it."""
        settings = self.settings.enabled, self.settings.deterministic
        return hashlib.sha256(json.dumps([settings, self._said]).encode()).hexdigest()[:16]

    @property
    def _said(self) -> list[Any]:
        return [found for layer in self.layers if (found := layer.canonical())]

    def saying(self, name: str, value: bool | int | float | str | None, origin: str) -> Policy:
        """The same with one setting, which is stronger than all others."""
        return self.overlaid(Layer(values=(Value(name, value, origin),)))

    def resolved_policy(self, subject: SelectionContext) -> ResolvedPolicy:
        """What this policy says about a problem: its operation, hardware, dtype and dims (a ``SelectionContext``).

        A symbolic size meets the conditions of rules by its hint.
        """
        if not self._says_anything:
            return _NOTHING
        kernels = list(registry.kernels(subject.operation.partition(".")[0]).values())
        level, lock = self._lock(subject)
        exclude: dict[str, str] = {}
        order: dict[str, tuple[Kind, int, str]] = {}
        place = 0
        for strength, layer in enumerate(self.layers):
            spared = {names.INCUMBENT, lock.kernel_id if lock is not None and level < strength else None}
            for statement in _said(layer, subject):
                place += statement.kind == "prefer"
                for kernel_id in (each.kernel_id for each in kernels if names.covers_kernel(statement.pattern, each)):
                    if statement.kind != "forbid":
                        order.setdefault(kernel_id, (statement.kind, place - 1, statement.origin))
                    elif kernel_id not in spared:
                        exclude.setdefault(kernel_id, statement.origin)
        return _resolved(lock, exclude, order)

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON: every setting with its value and origin, and what is said about kernels."""
        settings = {
            name: {"value": value, "origin": self.values[name].origin if name in self.values else "default"}
            for name, value in self.settings.flat().items()
        }
        statements = [statement for layer in self.layers for statement in layer.statements]
        return {
            "digest": self.digest,
            "file": self.file,
            "settings": settings,
            "locks": [
                {"operation": lock.operation, "kernel": lock.kernel_id, "origin": lock.origin}
                for layer in self.layers
                for lock in layer.locks
            ],
            **{
                kind: [{"name": s.pattern, "origin": s.origin} for s in statements if s.kind == kind]
                for kind in ("prefer", "avoid")
            },
            "rules": [{"origin": rule.origin, **rule.to_dict()} for layer in self.layers for rule in layer.rules],
        }

    @cached_property
    def _says_anything(self) -> bool:
        return any(layer.locks or layer.statements or layer.rules for layer in self.layers)

    def _lock(self, subject: SelectionContext) -> tuple[int, Lock | None]:
        """The strongest lock, and its layer. In one layer rules are stronger than locks, and narrow names than wide ones."""
        for level, layer in enumerate(self.layers):
            for rule in layer.rules:
                if rule.lock is not None and rule.holds(subject):
                    return level, Lock(subject.operation, rule.lock, rule.origin)
            fitting = [lock for lock in layer.locks if names.covers(lock.operation, subject.operation)]
            if fitting:
                return level, max(fitting, key=lambda lock: (not names.is_glob(lock.operation), len(lock.operation)))
        return len(self.layers), None


def _said(layer: Layer, subject: SelectionContext) -> Iterator[Statement]:
    """What a layer says about a subject, the strongest first: rules in their order, then what holds always."""
    for rule in layer.rules:
        if rule.holds(subject):
            yield from rule.statements
    yield from layer.statements


def _resolved(
    lock: Lock | None, exclude: Mapping[str, str], order: Mapping[str, tuple[Kind, int, str]]
) -> ResolvedPolicy:
    prefer = [(kernel_id, place, origin) for kernel_id, (kind, place, origin) in order.items() if kind == "prefer"]
    places = sorted({place for _, place, _ in prefer})
    return ResolvedPolicy(
        lock=None if lock is None else lock.kernel_id,
        lock_origin="" if lock is None or lock.kernel_id is None else lock.origin,
        exclude=tuple(exclude.items()),
        prefer=tuple((kernel_id, origin) for kernel_id, _, origin in prefer),
        avoid=tuple((kernel_id, origin) for kernel_id, (kind, _, origin) in order.items() if kind == "avoid"),
        prefer_places=tuple(places.index(place) for _, place, _ in prefer),
    )
