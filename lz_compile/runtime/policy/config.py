"""Configuration as data: the keys of ``layerzero.yaml`` and of ``configure()``, checked, as a layer of a policy.

A wrong key, type or name is an error that says where it stands and what would be right. A key whose value asks for
something that does not exist yet is an error as well: nothing that is written down is ignored.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lz_compile.errors import ConfigError, no_such
from lz_compile.ground.files import TooLargeError, read_bounded
from lz_compile.runtime.policy import names, rules
from lz_compile.runtime.policy.names import Invalid, below, dotted
from lz_compile.runtime.policy.rules import Lock, Rule, Statement
from lz_compile.runtime.policy.settings import CacheSettings, Layer, PerfDBSettings, RanksSettings, Settings, Value

if TYPE_CHECKING:
    import yaml

KeyPath = tuple[str | int, ...]
VERSION = 1
#: Of a file; one with every key has two thousand.
MAX_BYTES = 1 << 20

#: Keys that can have one value here, and why. With that one they are accepted: other implementations have a choice there.
_ONE_VALUE: Mapping[str, tuple[object, str]] = {
    "version": (VERSION, "there is no other version of this file"),
    "explain_enabled": (True, "reports are always made"),
    "plan_mode": (False, "kernels are chosen for one operation and what they compute along, not for a whole model"),
    "allow_adaptation": (True, "adapters change layouts where a kernel needs it, and are measured with that"),
    "graph_strict_mode": (False, "kernels are not captured on trial"),
    "backend_isolation": ("in_process", "kernels run in this process"),
    "auto_tune_on_warmup": (False, "lz.warmup runs what is chosen; measure with lz.tune, or set perfdb.auto_tune"),
}


def _keys(name: str, types: Mapping[str, Any]) -> Any:
    """Keys with the types of their values. Each may be left out, which is told apart from its default."""
    listed = [(key, Union[kind, UnsetType], UNSET) for key, kind in types.items()]  # noqa: UP007 Any knows no |
    return msgspec.defstruct(name, listed, forbid_unknown_fields=True)


class RuleKeys(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of one entry of ``rules``."""

    match: dict[str, Any]
    prefer: str | list[str] = []
    avoid: str | list[str] = []
    forbid: str | list[str] = []
    prefer_sources: list[str] = []
    avoid_sources: list[str] = []
    lock: str | UnsetType = UNSET


#: Types of settings that have bounds, whichever group they are in.
_BOUNDED: Mapping[str, Any] = {
    **dict.fromkeys(("tune_samples", "max_size", "max_reports"), Annotated[int, Meta(ge=1)]),
    **dict.fromkeys(("ttl_seconds", "timeout_s", "lease_s"), Annotated[float, Meta(gt=0)]),
    "memory_headroom_mb": Annotated[int, Meta(ge=0)] | None,
}
_perfdb, _cache, _ranks, _settings = (
    {name: _BOUNDED.get(name, of) for name, of in get_type_hints(kind).items()}
    for kind in (PerfDBSettings, CacheSettings, RanksSettings, Settings)
)
#: How ranks choose, by the names that other implementations have for it.
_SELECTIONS: Mapping[str, str] = {"rank0_broadcast": "agree", "independent": "alone"}
#: Keys under ``perfdb``, ``cache`` and ``ranks``, and of the whole: those of the settings, of their types.
PerfDBKeys: Any = _keys("PerfDBKeys", {**_perfdb, "path": Any})
CacheKeys: Any = _keys("CacheKeys", _cache)
RanksKeys: Any = _keys("RanksKeys", _ranks)
Keys: Any = _keys(
    "Keys",
    {
        "version": Any,
        **{name: kind for name, kind in _settings.items() if name not in ("debug", "perfdb", "cache", "ranks")},
        "tune_samples": _perfdb["tune_samples"],  # by another name
        **dict.fromkeys(_ONE_VALUE, Any),
        "distributed_selection": Literal["rank0_broadcast", "independent"],  # by another name
        "prefer_sources": list[str],
        "avoid_sources": list[str],
        "locks": dict[str, Any],
        "perfdb": PerfDBKeys,
        "cache": CacheKeys,
        "ranks": RanksKeys,
        "rules": list[RuleKeys],
    },
)


#: Keys that are no settings but say something about kernels.
_ABOUT_KERNELS = ("prefer_sources", "avoid_sources", "locks", "rules")


def read(path: str | os.PathLike[str]) -> Layer:
    """The layer that a YAML file describes.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be followed; with file, line and key.
    """
    import yaml

    file = Path(path).expanduser().absolute()
    try:
        loader = yaml.SafeLoader(read_bounded(file, MAX_BYTES))
        try:
            node = loader.get_single_node()
            lines = {} if node is None else dict(_lines(node))
            data = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        return layer({} if data is None else data, str(file), file.parent)
    except OSError as error:
        raise ConfigError(f"reading the configuration {file}: {error.strerror}") from error
    except TooLargeError as error:
        raise ConfigError(f"reading the configuration {file}: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"reading {file}: nested too deeply; the keys of a configuration are four levels deep"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"reading {file}{_mark(error)}: not plain YAML: {_cause(error)}") from error
    except _Duplicate as problem:
        raise ConfigError(f"reading {file}, line {problem.line}: {problem}") from None
    except Invalid as problem:
        raise ConfigError(f"reading {file}{_line(lines, problem.path)}: {problem}") from None


def arguments(values: Mapping[str, Any]) -> Layer:
    """The layer that the arguments of ``configure`` describe.

    Raises:
        ConfigError: a name or a value is wrong.
    """
    try:
        return layer(values, "lz.configure()", Path.cwd())
    except Invalid as problem:
        raise ConfigError(f"configuring {problem}") from None


def layer(data: object, origin: str, directory: Path) -> Layer:
    """The layer that the data describe.

    Args:
        data: keys as in ``layerzero.yaml``.
        origin: where they come from, for reports.
        directory: against which relative paths are meant.

    Raises:
        Invalid: with the path of the key.
    """
    keys = _converted(data)
    values = [Value(name, value, origin) for name, value in _values(keys, directory)]
    sources = {name: getattr(keys, name) or [] for name in ("avoid_sources", "prefer_sources")}
    return Layer(tuple(values), _locks(keys, origin), _statements(sources, origin), _rules(keys, origin))


def _converted(data: object) -> Any:
    try:
        return msgspec.convert(data, Keys)
    except msgspec.ValidationError as error:
        text, _, location = str(error).partition(" - at `")
        path = _parsed(location.rstrip("`"))
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL):
            valid = _struct(path).__struct_fields__
            raise Invalid((*path, unknown[1]), no_such("key", unknown[1], valid)) from None
        if "key" in location.partition("$")[0]:
            raise Invalid(path, "expected keys that are text") from None
        if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
            raise Invalid(path, f"expected a key '{missing[1]}', received none") from None
        received = _at(data, path)
        raise Invalid(path, f"{_expected(text)}, received {_shown(received)}") from None


def _shown(value: object) -> str:
    """A value of a wrong type, which may hold itself a thousand times over (aliases in YAML)."""
    return f"{type(value).__name__} {_repr.repr(value)}"


_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 120

_TERMS = {"object": "a mapping", "array": "a list", "null": "None"}


def _expected(text: str) -> str:
    """What msgspec expected, in words of YAML and Python."""
    wanted = re.sub(r", got `.*", "", text).replace("`", "").replace("Expected", "expected")
    return re.sub(r"\b(object|array|null)\b", lambda match: _TERMS[match[1]], wanted).replace(" | ", " or ")


def _parsed(location: str) -> KeyPath:
    """A path as msgspec writes it: ``$.rules[0].prefer``."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", location)
    return tuple(int(index) if index else name for name, index in parts)


def _struct(path: KeyPath) -> Any:
    by_name = {"perfdb": PerfDBKeys, "cache": CacheKeys, "ranks": RanksKeys, "rules": RuleKeys}
    return by_name[str(path[0])] if path else Keys


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part] if isinstance(data, Mapping) else list(data)[int(part)]  # a set has no places
    return data


def _values(keys: Any, directory: Path) -> Iterator[tuple[str, Any]]:
    given = msgspec.structs.asdict(keys)
    for name, (only, why) in _ONE_VALUE.items():
        value = given.pop(name)
        if value is not UNSET and (type(value) is not type(only) or value != only):
            raise Invalid((name,), f"expected {only!r}, received {_shown(value)}: {why}")
    for name, value in given.items():
        if value is UNSET or name in _ABOUT_KERNELS:
            continue
        if name == "tune_samples":
            yield f"perfdb.{name}", value
        elif name == "distributed_selection":
            yield "ranks.selection", _SELECTIONS[value]
        elif isinstance(value, msgspec.Struct):
            group = msgspec.structs.asdict(value)
            yield from (
                (f"{name}.{leaf}", _path(v, directory) if leaf == "path" else v)
                for leaf, v in group.items()
                if v is not UNSET
            )
        else:
            yield name, value


def _path(value: object, directory: Path) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise Invalid(("perfdb", "path"), f"expected a path, received {_shown(value)}")
    return str(directory / Path(value).expanduser())


def _locks(keys: Any, origin: str) -> tuple[Lock, ...]:
    found = []
    for operation, kernel_id in ({} if keys.locks is UNSET else keys.locks).items():
        if not isinstance(kernel_id, str):
            raise Invalid(("locks", operation), f"expected the id of a kernel, received {_shown(kernel_id)}")
        with below("locks", operation):
            found.append(Lock(operation, names.locked(operation, kernel_id), origin))
    return tuple(found)


def _statements(listed: Mapping[str, str | list[str]], origin: str) -> tuple[Statement, ...]:
    """The statements of one place, checked; the keys are those of a rule."""
    found: dict[str, Statement] = {}
    for key, wanted in listed.items():
        kind = rules.KINDS[key.removesuffix("_sources")]
        for index, pattern in enumerate([wanted] if isinstance(wanted, str) else wanted):
            path = (key,) if isinstance(wanted, str) else (key, index)
            pattern = _checked(kind, key, pattern, path)  # noqa: PLW2901 by its name here from now on
            if found.setdefault(pattern, Statement(kind, pattern, origin)).kind != kind:
                raise Invalid(path, f"'{pattern}' stands under '{found[pattern].kind}' as well; keep one of them")
    return tuple(found.values())


def _checked(kind: str, key: str, pattern: str, path: KeyPath) -> str:
    with below(*path):
        pattern = (names.checked_source if key.endswith("_sources") else names.checked_kernels)(pattern)
    if kind == "forbid" and pattern == names.INCUMBENT:
        raise Invalid(path, f"'{pattern}' cannot be forbidden: it is what runs where nothing else may; use 'avoid'")
    return pattern


def _rules(keys: Any, origin: str) -> tuple[Rule, ...]:
    found = []
    for index, entry in enumerate([] if keys.rules is UNSET else keys.rules):
        with below("rules", index):
            found.append(_rule(entry, f"rule {index + 1} of {origin}"))
    return tuple(found)


def _rule(entry: RuleKeys, origin: str) -> Rule:
    if not entry.match:
        raise Invalid(("match",), "expected a condition, received none; what holds always stands outside of rules")
    with below("match"):
        conditions = tuple(rules.condition(key, wanted) for key, wanted in sorted(entry.match.items()))
    listed = {key: getattr(entry, key) for key in ("forbid", "avoid", "avoid_sources", "prefer", "prefer_sources")}
    statements = _statements(listed, origin)
    if entry.lock is UNSET and not statements:
        raise Invalid((), f"the rule says nothing; expected one of {', '.join(listed)}, lock")
    rule = Rule(origin, conditions, statements)
    return rule if entry.lock is UNSET else replace(rule, lock=_locked(rule, entry.lock))


def _locked(rule: Rule, kernel_id: str) -> str:
    """A rule locks the operations that it matches, and must say which these are."""
    if not rule.operations:
        raise Invalid(("lock",), "expected 'operation' among the conditions of a rule that locks, received none")
    with below("lock"):
        return {names.locked(operation, kernel_id) for operation in rule.operations}.pop()


class _Duplicate(Exception):
    def __init__(self, path: KeyPath, line: int, first: int) -> None:
        super().__init__(f"the key '{dotted(path)}' stands twice, first in line {first}; keep one of them")
        self.line = line


def _lines(node: yaml.Node, path: KeyPath = (), seen: set[int] | None = None) -> Iterator[tuple[KeyPath, int]]:
    """The line of every key and entry; what an alias repeats is read once."""
    from yaml import MappingNode, SequenceNode

    seen = set() if seen is None else seen
    yield path, node.start_mark.line + 1
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for index, child in enumerate(node.value):
            yield from _lines(child, (*path, index), seen)
    elif isinstance(node, MappingNode):
        first: dict[str, int] = {}
        for key, child in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                raise _Duplicate((*path, name), line, first[name])
            first[name] = line
            yield from _lines(child, (*path, name), seen)
            yield (*path, name), line


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> str:
    while path and path not in lines:
        path = path[:-1]
    return f", line {lines[path]}" if path in lines else ""


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _cause(error: yaml.YAMLError) -> str:
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    return ", ".join(part for part in parts if part) or str(error)
