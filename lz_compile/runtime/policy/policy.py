"""What the user wants of selection: settings, locks, preferences, rules, and who said so.

Strongest first: options of one compile, context managers, environment variables, ``configure()`` and ``lock()``, the file,
defaults. A policy matters when a graph is compiled, and at each call of an eager op. Context managers hold in the thread
or task that enters them. What is compiled keeps the decision under which it was compiled.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from lz_compile.errors import ConfigError
from lz_compile.ground import events, forks, hooks
from lz_compile.ground.files import path_given
from lz_compile.runtime.policy import environment, names
from lz_compile.runtime.policy.names import Invalid
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.policy.rules import Kind, Lock, Statement
from lz_compile.runtime.policy.settings import Layer, Value


@dataclass(frozen=True, eq=False)
class _State:
    """What holds in every thread. ``loaded`` is the file that ``load_config`` was asked for."""

    variables: environment.Snapshot
    environment: Layer
    code: Layer
    file: Layer
    file_name: str | None
    loaded: str | None = None


@dataclass(frozen=True, eq=False)
class _Local:
    """What the context managers of a thread or task say; ``below`` is what held before the last one was entered."""

    serial: int
    layer: Layer | None = None
    below: _Local | None = None

    def layers(self) -> tuple[Layer, ...]:
        """Strongest first."""
        return () if self.layer is None or self.below is None else (self.layer, *self.below.layers())


Checked = TypeVar("Checked")
_OUTSIDE = _Local(0)
_serials = itertools.count(1)
_local: ContextVar[_Local] = ContextVar("layerzero_policy", default=_OUTSIDE)
_state: _State | None = None
_STEP = 1 << 32  # versions of the process count in steps that leave room for the serials of threads and tasks
_version = 0
_mutex = threading.RLock()
forks.renewed(sys.modules[__name__], _mutex=threading.RLock)


def current() -> Policy:
    """The policy that holds here and now. Notices changes of environment variables (about 15 µs).

    Raises:
        ConfigError: a variable, or the file that ``LAYERZERO_CONFIG`` names, is wrong.
    """
    return _composed(_present(), _local.get())


def version() -> int:
    """A number that differs between any two policies, in 0.1 µs.

    Environment variables that change are noticed by the next ``current()`` or ``refresh()``, not here.
    """
    return _version + _local.get().serial


def debugging() -> bool:
    """Whether ``LAYERZERO_DEBUG`` was on when the policy last changed, in 0.2 µs."""
    return _debugging(version())


@lru_cache(maxsize=64)
def _debugging(_version: int) -> bool:
    return current().settings.debug


def refresh() -> None:
    """Read environment variables and files again.

    Raises:
        ConfigError: one of them is wrong; what held before still holds.
    """
    with _mutex:
        _read(*_told(_state))


def reset() -> None:
    """Forget everything that code, files and the environment said, and the context managers of the caller."""
    global _state, _version
    with _mutex:
        _state, _version = None, _version + _STEP
        environment.forget()
    _local.set(_OUTSIDE)


def configure(**values: Any) -> None:
    """Change settings of this process, by the keys of ``layerzero.yaml``: ``configure(prefer_sources=["flash_attn"])``.

    A later call changes only what it names; a list or mapping replaces the one given before.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a name that there is not; nothing is changed.
    """
    from lz_compile.runtime.policy import config

    given = config.arguments(values)
    parts = {"prefer_sources": "prefer", "avoid_sources": "avoid", "locks": "locks", "rules": "rules"}
    _change_code(lambda code: code.updated(given, {parts[key] for key in values if key in parts}))


def load_config(path: str | os.PathLike[str] | None = None) -> None:
    """Take the configuration from a YAML file, instead of from the one read before.

    Args:
        path: the file; None: the default one, ``$LAYERZERO_CONFIG`` or ``layerzero.yaml`` in the user's config directory.

    Raises:
        ConfigError: with file, line and key; what held before still holds.
    """
    with _mutex:
        asked = None if path is None else str(path_given("load_config", "path", path).absolute())
        _read(asked, _told(_state)[1])


class Override:
    """What ``lock``, ``prefer``, ``avoid`` and ``disabled`` return: a context manager for one thread or task."""

    def __init__(self, layer: Layer, withdraw: Callable[[], None] | None) -> None:
        self._layer, self._withdraw = layer, withdraw

    def __enter__(self) -> None:
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()
        _push(self._layer)

    def __exit__(self, *_: object) -> None:
        _pop(self._layer)


def lock(operation: str, kernel_id: str) -> Override:
    """Always use one kernel for an operation in this whole process; in a ``with`` statement, inside it in its thread or task.

    Other threads can see the lock for the moment between the call and the entry of a ``with`` statement.

    Raises:
        ConfigError: no such operation or kernel.
    """
    kernel_id = _checked(f"locking '{operation}'", partial(names.locked, operation, kernel_id))
    new = Lock(operation, kernel_id, "lz.lock()")
    replaced: list[Lock] = []

    def add(code: Layer) -> Layer:
        gone = [old for old in code.locks if _superseded(old, operation)]
        replaced[:] = gone
        return replace(code, locks=(*(old for old in code.locks if old not in gone), new))

    def remove(code: Layer) -> Layer:
        if new not in code.locks:
            return code
        return replace(code, locks=(*(old for old in code.locks if old != new), *replaced))

    _change_code(add)
    return Override(Layer(locks=(new,)), lambda: _change_code(remove))


def _superseded(old: Lock, operation: str) -> bool:
    return old.operation == operation or (old.kernel_id is None and names.covers(operation, old.operation))


def unlock(operation: str) -> None:
    """Take back the locks of an operation (and of its variants) that ``lock``, ``configure`` or a file set.

    Raises:
        ConfigError: no such operation, or an environment variable or a context manager locks it.
    """
    _checked("unlocking", partial(names.ops_covered, operation))
    state = _present()
    for held in _stronger(operation, state):
        raise ConfigError(
            f"unlocking '{operation}': {held.origin} locks it to {held.kernel_id}, and only there can that be undone"
        )

    def remove(code: Layer) -> Layer:
        kept = [old for old in code.locks if not names.covers(operation, old.operation)]
        masks = any(_overlap(operation, old.operation) for old in (*kept, *state.file.locks))
        masks = masks or any(rule.lock is not None for rule in state.file.rules)
        return replace(code, locks=(*kept, *([Lock(operation, None, "lz.unlock()")] if masks else [])))

    _change_code(remove)


def _stronger(operation: str, state: _State) -> Iterator[Lock]:
    """The locks of an operation that ``unlock`` does not reach."""
    for layer in (*_local.get().layers(), state.environment):
        yield from (held for held in layer.locks if _overlap(operation, held.operation))
    for rule in state.code.rules:
        if rule.lock is not None and any(_overlap(operation, pattern) for pattern in rule.operations):
            yield Lock(operation, rule.lock, rule.origin)


def _overlap(one: str, other: str) -> bool:
    return names.covers(one, other) or names.covers(other, one)


def prefer(*patterns: str) -> Override:
    """Prefer kernels, by id, glob or source, the first most; in this thread or task, from here on or inside ``with``.

    For the whole process there is ``configure(prefer_sources=[...])``.

    Raises:
        ConfigError: no such kernel or source.
    """
    return _wished("prefer", patterns)


def avoid(*patterns: str) -> Override:
    """Avoid kernels, by id, glob or source: they lose 50 points (100 are Inductor's speed); as ``prefer`` in everything else.

    Raises:
        ConfigError: no such kernel or source.
    """
    return _wished("avoid", patterns)


def disabled() -> Override:
    """A context manager: everything that is compiled or called inside is left to Inductor or to the reference."""
    return Override(Layer(values=(Value("enabled", False, "lz.disabled()"),)), None)


def _wished(kind: Kind, patterns: tuple[str, ...]) -> Override:
    if not patterns:
        raise ConfigError(f"lz.{kind}(): expected the name of a kernel or source, received none")
    checked = [_checked(f"lz.{kind}()", partial(names.checked_kernels, pattern)) for pattern in patterns]
    layer = Layer(statements=tuple(Statement(kind, pattern, f"lz.{kind}()") for pattern in checked))
    _push(layer)
    return Override(layer, lambda: _pop(layer))


def _checked(doing: str, check: Callable[[], Checked]) -> Checked:
    try:
        return check()
    except Invalid as problem:
        raise ConfigError(f"{doing}: {problem}") from None


def _push(layer: Layer) -> None:
    _local.set(_pushed(_local.get(), layer))


def _pop(layer: Layer) -> None:
    """Take the uppermost such layer away; one that this thread or task does not have is none of its business."""
    above, local = [], _local.get()
    while local.layer is not None and local.below is not None and local.layer != layer:
        above.append(local.layer)
        local = local.below
    if local.below is None:
        return
    local = local.below
    for each in reversed(above):
        local = _pushed(local, each)
    _local.set(local)


@lru_cache(maxsize=1024)
def _pushed(below: _Local, layer: Layer) -> _Local:
    """Entering the same again gives the same: what was decided under a version is found again."""
    return _Local(next(_serials), layer, below)


@lru_cache(maxsize=128)
def _composed(state: _State, local: _Local) -> Policy:
    layers = (*local.layers(), state.environment, state.code, state.file)
    return Policy(tuple(layer for layer in layers if layer != Layer()), state.file_name)


def _present() -> _State:
    state = _state
    variables = environment.snapshot()
    if state is None or state.variables != variables:
        with _mutex:
            before = _state
            if before is not None and before.variables == variables:  # another thread was here first
                return before
            if before is None or _configured(before.variables) != _configured(variables):
                return _read(*_told(before))
            return _hold(replace(before, variables=variables, environment=environment.read(variables)))
    return state


def _configured(variables: environment.Snapshot) -> str | None:
    """The file that a variable names."""
    return dict(variables).get(environment.CONFIG)


def _told(state: _State | None) -> tuple[str | None, Layer]:
    """What a reading anew keeps: the file that was asked for, and what code said."""
    return (None, Layer()) if state is None else (state.loaded, state.code)


def _change_code(change: Callable[[Layer], Layer]) -> None:
    with _mutex:
        state = _present()
        _hold(replace(state, code=change(state.code)))


def _hold(state: _State) -> _State:
    """From now on this holds."""
    global _state, _version
    _state, _version = state, _version + _STEP
    return state


def _read(loaded: str | None, code: Layer) -> _State:
    """Everything that is read from outside, anew."""
    variables = environment.snapshot()
    layer, name = _file(loaded, _configured(variables))
    return _hold(_State(variables, environment.read(variables), code, layer, name, loaded))


def _file(loaded: str | None, configured: str | None) -> tuple[Layer, str | None]:
    """The layer of the file that is asked for, or of the user's own if there is one; a fault of the latter is an event."""
    if asked := loaded or configured:
        from lz_compile.runtime.policy import config

        return config.read(asked), str(Path(asked).expanduser().absolute())
    own = Path(platformdirs.user_config_dir("layerzero", appauthor=False)) / "layerzero.yaml"
    if not own.exists():
        return Layer(), None
    try:
        from lz_compile.runtime.policy import config

        return config.read(own), str(own)
    except ConfigError as error:
        events.record("CONFIG_INVALID", "the user's configuration is not followed, defaults hold", error)
        return Layer(), None


hooks.answer(is_debugging=debugging, falls_back=lambda: current().settings.fallback_enabled)
