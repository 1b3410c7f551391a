"""Environment variables as a layer of configuration. An empty variable counts as one that is not set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lz_compile.errors import ConfigError, nearest
from lz_compile.ground import events
from lz_compile.runtime.policy import names
from lz_compile.runtime.policy.names import Invalid
from lz_compile.runtime.policy.rules import Kind, Lock, Statement
from lz_compile.runtime.policy.settings import Layer, Value
from lz_compile.runtime.problem.context import operations

PREFIX = "LAYERZERO_"
LOCK = PREFIX + "LOCK_"
CONFIG = PREFIX + "CONFIG"

#: Switches, with the setting that each one gives and whether it gives the opposite.
SWITCHES: Mapping[str, tuple[str, bool]] = {
    PREFIX + "DISABLED": ("enabled", True),
    PREFIX + "VERBOSE": ("log_selections", False),
    PREFIX + "DETERMINISTIC": ("deterministic", False),
    PREFIX + "DEBUG": ("debug", False),
}
LISTS: Mapping[str, Kind] = {PREFIX + "AVOID": "avoid", PREFIX + "PREFER": "prefer"}
#: Variables that are read where they are used.
ELSEWHERE = (CONFIG, PREFIX + "DUMP", PREFIX + "CACHE_DIR")

_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_reported: set[str] = set()

Snapshot = tuple[tuple[str, str], ...]


def snapshot() -> Snapshot:
    """Every variable of ours that is set, as of now (about 10 µs)."""
    return tuple([(name, os.environ[name]) for name in os.environ if name.startswith(PREFIX) and os.environ[name]])


def read(variables: Snapshot) -> Layer:
    """What the variables say. One that we do not know is an event, once.

    Raises:
        ConfigError: a value cannot be read, or names a kernel or an operation that there is not.
    """
    values: list[Value] = []
    locks: list[Lock] = []
    statements: list[Statement] = []
    for name, text in sorted(variables):
        origin = f"environment {name}"
        try:
            if name in SWITCHES:
                setting, opposite = SWITCHES[name]
                is_named = setting == "deterministic" and text.strip().lower() == "batch_invariant"
                given = "batch_invariant" if is_named else _switch(text) is not opposite
                values.append(Value(setting, given, origin))
            elif name in LISTS:
                statements += _statements(LISTS[name], text, origin, statements)
            elif name.startswith(LOCK):
                locks.append(_lock(name, text.strip(), origin))
            elif name not in ELSEWHERE:
                _report(name)
        except Invalid as problem:
            raise ConfigError(f"reading {origin}='{text}': {problem}") from None
    return Layer(tuple(values), tuple(locks), tuple(statements))


def forget() -> None:
    """Report unknown variables again."""
    _reported.clear()


def _switch(text: str) -> bool:
    try:
        return _TRUTH[text.strip().lower()]
    except KeyError:
        raise Invalid((), f"expected one of {', '.join(_TRUTH)}, received '{text}'") from None


def _statements(kind: Kind, text: str, origin: str, others: list[Statement]) -> list[Statement]:
    found = []
    for pattern in (part.strip() for part in text.split(",")):
        if not pattern:
            raise Invalid((), "expected names with commas between them, received an empty name")
        pattern = names.checked_kernels(pattern)  # noqa: PLW2901 by its id from now on
        if any(other.pattern == pattern for other in others):
            raise Invalid(
                (), f"'{pattern}' stands in the variables for both preference and avoidance; keep one of them"
            )
        found.append(Statement(kind, pattern, origin))
    return found


def _lock(name: str, kernel_id: str, origin: str) -> Lock:
    variables = _lock_variables()
    if name not in variables:
        raise Invalid((), f"no operation to lock by that name{nearest(name, list(variables))}; {_valid(variables)}")
    return Lock(variables[name], names.locked(variables[name], kernel_id), origin)


def _lock_variables() -> dict[str, str]:
    return {LOCK + operation.upper().replace(".", "_"): operation for operation in operations()}


def _report(name: str) -> None:
    if name not in _reported:
        _reported.add(name)
        valid = [*SWITCHES, *LISTS, *ELSEWHERE, *_lock_variables()]
        events.record("CONFIG_INVALID", f"no environment variable {name}{nearest(name, valid)}; {_valid(valid)}")


def _valid(variables: Mapping[str, str] | list[str]) -> str:
    return f"valid are {', '.join(sorted(variables))}"
