"""The performance database: measured latencies of kernels, by workload and environment, shared by all processes.

One row is one kernel on one workload in one environment; measuring again replaces it. SQLite in WAL mode, so that
readers wait for nobody. Trouble with the file is never fatal: it is an event, and measurements stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_type_hints

from lz_compile.ground import events, sqlite_file
from lz_compile.ground.files import cache_directory
from lz_compile.runtime.measure.perf_record import (
    COLUMNS,
    PerfRecord,
    canonical,
    checked_values,
    fragments,
    from_values,
    meets,
    now,
)

__all__ = ["PerfDB", "PerfRecord", "canonical", "database", "path_of"]

_Result = TypeVar("_Result")
_MEMO_ENTRIES = 1024
_ATTEMPTS = 3


_KEY = ("operation", "environment", "dtype", "workload", "surroundings", "kernel_id")
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM perf_records WHERE valid"
_ORDER = " ORDER BY workload, surroundings, kernel_id"
# The newer measurement stays. A row from the future, of a clock that was wrong, gives way to any.
_PUT = f"""
    INSERT INTO perf_records ({", ".join(COLUMNS)}) VALUES ({", ".join("?" * len(COLUMNS))})
    ON CONFLICT ({", ".join(_KEY)}) DO UPDATE SET
    {", ".join(f"{name}=excluded.{name}" for name in COLUMNS if name not in _KEY)}
    WHERE excluded.measured_at >= measured_at OR measured_at > ?
"""


class PerfDB:
    """The measurements at ``path``, by default of this user; opened at the first use.

    Threads may share one. A forked child opens a connection of its own.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or path_of(None)
        self._lock = threading.RLock()
        self._opened: sqlite_file.Opened | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._data_version = -1
        self._memo: dict[tuple[str | None, ...], list[PerfRecord]] = {}
        _instances.add(self)

    def __enter__(self) -> PerfDB:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def exists(self) -> bool:
        """Whether there is anything to look up: reading alone makes no file."""
        return self._opened is not None or self.path.exists()

    def put(self, records: Iterable[PerfRecord]) -> None:
        """Store ``records``, all or none; each replaces an older measurement of the same key.

        Raises: MeasurementError for a latency that is none, or a workload that is not canonical.
        """
        stamp = now()
        rows = [(*checked_values(record), stamp) for record in records]
        if rows:
            self._write(lambda connection: connection.executemany(_PUT, rows), None)

    def lookup(
        self,
        operation: str,
        dtype: str,
        environment: str,
        *,
        workload: str | Mapping[str, Any] | None = None,
        surroundings: str | None = None,
    ) -> list[PerfRecord]:
        """The valid measurements, of any workload or surroundings where they are not given.

        Ordered by workload, surroundings and kernel.
        """
        text = workload if workload is None or isinstance(workload, str) else canonical(workload)
        return self._remembered((operation, environment, dtype, text, surroundings), {})

    def curve(self, operation: str, dtype: str, environment: str, match: Mapping[str, Any]) -> list[PerfRecord]:
        """The valid measurements whose workload has the entries of ``match``, whatever its others: to interpolate.

        A mapping inside ``match`` is met entry by entry as well; every other value must be equal, type included.
        Ordered as by ``lookup``.
        """
        return self._remembered((operation, environment, dtype, None, None), json.loads(canonical(match)))

    def of(self, environments: Iterable[str]) -> list[PerfRecord]:
        """All valid measurements of some environments."""
        if not self.exists:
            return []
        return [each for name in environments for each in self._remembered((None, name, None, None, None), {})]

    def everything(self) -> list[PerfRecord]:
        """All valid measurements."""
        return self._remembered((None,) * len(_KEY), {}) if self.exists else []

    def statistics(self) -> dict[str, Any]:
        """What the database holds and where, for people."""

        def read(connection: sqlite3.Connection) -> dict[str, Any]:
            counts = connection.execute(
                "SELECT count(*), coalesce(sum(valid), 0), count(DISTINCT kernel_id), count(DISTINCT environment)"
                " FROM perf_records"
            ).fetchone()
            found = dict(zip(("rows", "valid_rows", "kernels", "environments"), counts, strict=True))
            assert self._opened is not None, "_run opens before it calls"
            path = self._opened.path
            files = [path, path.with_name(f"{path.name}-wal")] if self._opened.identity else []
            found["bytes"] = sum(sqlite_file.size_bytes(file) for file in files)
            found["path"] = str(path)
            found["journal_mode"] = self._opened.journal_mode
            found["schema_version"] = sqlite_file.user_version(connection)
            return found

        return self._run(read, {"rows": 0, "path": str(self.path), "journal_mode": "unknown"})

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._finalizer = self._opened = None

    # ---- connection ------------------------------------------------------------------------------------------------

    def _remembered(self, key: tuple[str | None, ...], match: Mapping[str, Any]) -> list[PerfRecord]:
        asked = (*key, canonical(match))

        def read(connection: sqlite3.Connection) -> list[PerfRecord]:
            if asked not in self._memo:
                if len(self._memo) >= _MEMO_ENTRIES:
                    self._memo.clear()
                self._memo[asked] = _select(connection, key, match)
            return list(self._memo[asked])

        return self._run(read, [])

    def _write(self, action: Callable[[sqlite3.Connection], _Result], otherwise: _Result) -> _Result:
        def write(connection: sqlite3.Connection) -> _Result:
            with sqlite_file.transaction(connection):
                sqlite_file.refuse_newer(sqlite_file.user_version(connection), _LAYOUT)
                result = action(connection)
            self._memo.clear()
            return result

        return self._run(write, otherwise)

    def _run(self, action: Callable[[sqlite3.Connection], _Result], otherwise: _Result) -> _Result:
        """The result of ``action`` on the open database, ``otherwise`` where others keep it busy for too long.

        Corrupt, it is set aside and the action done on a new one; unwritable, on a copy in memory.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                opened = self._current()
                try:
                    self._notice_changes(opened.connection)
                    return action(opened.connection)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
                        raise
                    if sqlite_file.is_busy(error):
                        events.record("PERFDB_BUSY", f"{opened.path}: gave up waiting", error)
                        return otherwise
                    self._replace(opened, error)
            events.record("PERFDB_UNWRITABLE", f"{self.path}: failed {_ATTEMPTS} times in a row")
            return otherwise

    def _current(self) -> sqlite_file.Opened:
        """The open file, opened again where another has taken its place."""
        if self._opened is not None and not self._opened.is_current():
            self.close()
        if self._opened is None:
            self._adopt(sqlite_file.open_file(self.path, _LAYOUT))
        assert self._opened is not None, "adopted above"
        return self._opened

    def _adopt(self, opened: sqlite_file.Opened) -> None:
        self._opened = opened
        self._finalizer = weakref.finalize(self, sqlite_file.close, opened)
        self._data_version = -1

    def _replace(self, opened: sqlite_file.Opened, error: Exception) -> None:
        """Make ready for another attempt after ``error``."""
        try:
            if sqlite_file.is_corrupt(error):
                sqlite_file.set_aside(opened.path, opened.identity, error)
                self.close()
                return
        except OSError as unmovable:
            error = unmovable
        self.close()
        if not isinstance(error, sqlite_file.NewerSchemaError):
            self._adopt(sqlite_file.open_in_memory(opened.path, _LAYOUT, error))

    def _notice_changes(self, connection: sqlite3.Connection) -> None:
        data_version = connection.execute("PRAGMA data_version").fetchone()[0]
        if data_version != self._data_version:
            sqlite_file.refuse_newer(sqlite_file.user_version(connection), _LAYOUT)
            self._data_version = data_version
            self._memo.clear()


def path_of(setting: str | Path | None) -> Path:
    """Where the measurements are: as set, by default in this user's cache directory."""
    return cache_directory() / "perfdb.sqlite" if setting is None else Path(setting).expanduser()


def database(setting: str | Path | None = None) -> PerfDB:
    """This process's database where it is set to be, by default in this user's cache directory."""
    chosen = path_of(setting)
    with _databases_lock:
        if chosen not in _databases:
            _databases[chosen] = PerfDB(chosen)
        return _databases[chosen]


def _select(connection: sqlite3.Connection, key: tuple[str | None, ...], match: Mapping[str, Any]) -> list[PerfRecord]:
    """The rows with ``key`` (None: any) and the entries of ``match``, whose text SQLite looks for before we parse."""
    chosen = {name: value for name, value in zip(_KEY, key, strict=False) if value is not None}
    texts = list(fragments(match))
    statement = _SELECT + "".join(f" AND {name}=?" for name in chosen) + " AND instr(workload, ?)" * len(texts)
    rows = connection.execute(statement + _ORDER, (*chosen.values(), *texts))
    found = [from_values(row) for row in rows]
    return [record for record in found if meets(record.entries(), match)] if texts else found


# ---- schema --------------------------------------------------------------------------------------------------------


_COLUMN_TYPES = {
    str: "TEXT NOT NULL", int: "INTEGER NOT NULL", float: "REAL NOT NULL", bool: "BOOLEAN NOT NULL",
    str | None: "TEXT", int | None: "INTEGER", float | None: "REAL",
}  # fmt: skip


def _create(connection: sqlite3.Connection) -> None:
    """Schema 1, the fields of a record. A table of that name that is there already is not ours, which its columns tell."""
    columns = ", ".join(f"{name} {_COLUMN_TYPES[kind]}" for name, kind in get_type_hints(PerfRecord).items())
    # Clustered by its key, which serves every lookup: what a lookup fixes comes first, so its rows lie together.
    key = f"PRIMARY KEY ({', '.join(_KEY)})"
    connection.execute(f"CREATE TABLE IF NOT EXISTS perf_records ({columns}, {key}) WITHOUT ROWID")


_LAYOUT = sqlite_file.Layout("perf_records", COLUMNS, (_create,))


# ---- one per process -----------------------------------------------------------------------------------------------

_instances: weakref.WeakSet[PerfDB] = weakref.WeakSet()
_databases: dict[Path, PerfDB] = {}
_databases_lock = threading.Lock()
_held: list[PerfDB] = []


def _before_fork() -> None:
    """Close every file: SQLite counts locks per process, and a child would believe to hold those of its parent."""
    _databases_lock.acquire()
    for instance in list(_instances):
        instance._lock.acquire()
        _held.append(instance)
        if instance._opened is not None and instance._opened.identity is not None:
            instance.close()


def _after_fork() -> None:
    for instance in _held:
        instance._lock.release()
    _held.clear()
    _databases_lock.release()


with contextlib.suppress(AttributeError):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


# ---- what decisions ask, noted: the same answers in another process are the same decisions ---------------------------


@dataclass(frozen=True)
class Question:
    """What a decision asked of the measurements at ``path``: those whose workload has the entries of ``match`` (JSON)."""

    path: str | None
    operation: str
    dtype: str
    environment: str
    match: str

    def answers(self) -> list[PerfRecord]:
        """The measurements."""
        there = database(self.path)
        if not there.exists:  # nothing was ever measured
            return []
        return there.curve(self.operation, self.dtype, self.environment, json.loads(self.match))

    def digest(self) -> str:
        """A hash of what is answered now."""
        told = [dataclasses.astuple(replace(each, measured_at="", conditions=None)) for each in self.answers()]
        return hashlib.sha256(repr(told).encode()).hexdigest()


_asked: ContextVar[set[Question] | None] = ContextVar("lz_compile_measurements_asked", default=None)


@contextmanager
def noting() -> Iterator[set[Question]]:
    """What is asked inside."""
    found: set[Question] = set()
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def ask(question: Question) -> list[PerfRecord]:
    """The answers, and a note that they were asked for."""
    noted = _asked.get()
    if noted is not None:
        noted.add(question)
    return question.answers()
