"""A SQLite file that many processes share: opened, brought to our schema, and set aside where it is corrupt.

SQLite opens and removes the ``-wal`` and ``-shm`` files by name. A connection that opened them while the file is being
renamed would share them with the new file. So whoever opens or closes holds a shared lock on ``<file>.lock``, and whoever
renames the file an exclusive one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeAlias

from lz_compile.ground import events

try:
    import fcntl
except ImportError:  # Windows, where a file that is in use cannot be renamed anyway
    fcntl = None  # type: ignore[assignment]

BUSY_TIMEOUT_S = 5.0
_ATTEMPTS = 3
_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6

Identity: TypeAlias = tuple[int, int]  # device and inode
Migration: TypeAlias = Callable[[sqlite3.Connection], None]


@dataclass(frozen=True)
class Layout:
    """What a file of ours holds: ``migrations[i]`` leads from schema ``i`` to ``i + 1``, ``columns`` is the result."""

    table: str
    columns: tuple[str, ...]
    migrations: Sequence[Migration]

    @property
    def version(self) -> int:
        """The schema's number, in ``PRAGMA user_version``."""
        return len(self.migrations)


@dataclass(frozen=True)
class Opened:
    """A connection and the file that it belongs to, which has no identity when it is in memory."""

    connection: sqlite3.Connection
    path: Path
    identity: Identity | None
    journal_mode: str

    def is_current(self) -> bool:
        """Whether the file at the path is still the one that was opened."""
        return self.identity is None or self.identity == identity(self.path)


class NewerSchemaError(sqlite3.DatabaseError):
    """The file was written by a newer version of this package."""


class ForeignSchemaError(sqlite3.DatabaseError):
    """The file says that it has our schema, but has other tables."""


def open_file(path: Path, layout: Layout) -> Opened:
    """The file at ``path`` with our schema, created or migrated where need be.

    A corrupt one is set aside. One of a newer schema is left alone and a file beside it taken. Where neither can be
    written, a copy in memory. Each of these is an event.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _open_on_disk(path, layout)
    except (OSError, sqlite3.Error) as error:
        return open_in_memory(path, layout, error)


def open_in_memory(path: Path, layout: Layout, error: Exception) -> Opened:
    """A database of this process with what can be read at ``path``, after ``error`` kept us from writing there."""
    code = "PERFDB_BUSY" if is_busy(error) else "PERFDB_UNWRITABLE"
    events.record(code, f"{path}: measurements of this process stay in its memory", error)
    connection = _connect(":memory:")
    try:
        if path.is_file() and not is_busy(error):
            _copy_readable(path, connection)
        _prepare(connection, layout)
    except (OSError, sqlite3.Error) as unreadable:
        events.record("PERFDB_UNREADABLE", f"{path}: begun empty in memory", unreadable)
        connection.close()
        connection = _connect(":memory:")
        _prepare(connection, layout)
    return Opened(connection, path, None, "memory")


def close(opened: Opened) -> None:
    """Close the connection. SQLite removes the WAL where it is the last one and its file has not been renamed."""
    try:
        with contextlib.nullcontext() if opened.identity is None else _locked(opened.path, exclusive=False):
            opened.connection.close()
    except OSError:  # the directory is gone, or somebody renames for longer than we wait
        opened.connection.close()


def set_aside(path: Path, corrupt: Identity | None, error: Exception) -> None:
    """Rename the file and its WAL to ``<name>.corrupt-<time>``, unless somebody has already done so."""
    with _locked(path, exclusive=True):
        if corrupt is None or identity(path) != corrupt:
            return
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = path.with_name(f"{path.name}.corrupt-{stamp}")
        for suffix in ("-wal", "-shm", ""):  # the file last: a new one must never meet an old WAL
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    events.record("PERFDB_CORRUPT", f"{path} was set aside as {aside.name} and a new one begun", error)


def identity(path: Path) -> Identity | None:
    """Device and inode of the file, None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def size_bytes(path: Path) -> int:
    """The size of the file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_busy(error: Exception) -> bool:
    """Whether another process held the file for longer than we wait."""
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error) or "busy" in str(error)
    return isinstance(error, BlockingIOError)  # the lock on its name


def is_corrupt(error: Exception) -> bool:
    """Whether the content is at fault: no database, a malformed one, not our tables, or rows that do not migrate."""
    if isinstance(error, sqlite3.OperationalError):  # also refused permissions, full disks, locks
        return any(text in str(error) for text in ("no such table", "no such column", "decode", "file format"))
    return type(error) in (sqlite3.DatabaseError, sqlite3.IntegrityError, ForeignSchemaError)


def user_version(connection: sqlite3.Connection) -> int:
    """The schema's number in the file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def refuse_newer(version: int, layout: Layout) -> None:
    """Raise NewerSchemaError for a version that is not ours to read."""
    if version > layout.version:
        raise NewerSchemaError(f"schema {version}, this version of the package reads {layout.version}")


# ---- opening -------------------------------------------------------------------------------------------------------


def _open_on_disk(path: Path, layout: Layout) -> Opened:
    for _ in range(_ATTEMPTS):
        with _locked(path, exclusive=False):
            before = identity(path)
            try:
                return _open_prepared(path, layout)
            except NewerSchemaError as error:
                fault: sqlite3.DatabaseError = error
            except sqlite3.DatabaseError as error:
                if not is_corrupt(error):
                    raise
                fault = error
        if isinstance(fault, NewerSchemaError):
            beside = path.with_name(f"{path.stem}.schema{layout.version}{path.suffix}")
            events.record("PERFDB_NEWER_SCHEMA", f"{path} is left to the newer version, {beside.name} used", fault)
            path = beside
        else:
            set_aside(path, before, fault)
    raise sqlite3.OperationalError(f"opening {path}: corrupt {_ATTEMPTS} times in a row")


def _open_prepared(path: Path, layout: Layout) -> Opened:
    connection = _connect(str(path))
    try:
        refuse_newer(user_version(connection), layout)
        mode = _journal_mode(connection)
        connection.execute("PRAGMA synchronous=NORMAL")  # with WAL: safe against every crash but the machine's
        _prepare(connection, layout)
    except BaseException:
        connection.close()
        raise
    if mode != "wal":
        events.record("PERFDB_NOT_WAL", f"{path}: this file system allows journal mode '{mode}' only")
    return Opened(connection, path, identity(path), mode)


def _connect(target: str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(target, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri)


def _journal_mode(connection: sqlite3.Connection) -> str:
    """WAL, or what SQLite gives instead. Changing it needs the file for itself and does not wait by its own."""
    mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while mode != "wal":
        try:
            return str(connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    return mode


def _prepare(connection: sqlite3.Connection, layout: Layout) -> None:
    """Migrate in one transaction, and check that the table is what its version says."""
    if user_version(connection) < layout.version:
        with transaction(connection):
            version = user_version(connection)  # read again: another may have been faster
            refuse_newer(version, layout)
            for migrate in layout.migrations[version:]:
                migrate(connection)
            connection.execute(f"PRAGMA user_version={layout.version}")
    found = {row[1] for row in connection.execute(f"PRAGMA table_info({layout.table})")}
    if found != set(layout.columns):
        raise ForeignSchemaError(f"{layout.table} has columns {sorted(found)}, expected {sorted(layout.columns)}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: all of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have rolled back already
            connection.execute("ROLLBACK")
        raise


def _copy_readable(path: Path, target: sqlite3.Connection) -> None:
    """The content of a file that we may read but not write; ``immutable`` where even its locks are out of reach."""

    def refuse_to_wait(status: int, _remaining: int, _total: int) -> None:
        if status in (_SQLITE_BUSY, _SQLITE_LOCKED):  # it would try again without end
            raise sqlite3.OperationalError(f"reading {path}: locked")

    for options in ("mode=ro", "mode=ro&immutable=1"):
        try:
            with contextlib.closing(_connect(f"{path.resolve().as_uri()}?{options}", uri=True)) as source:
                source.backup(target, progress=refuse_to_wait)
                return
        except sqlite3.OperationalError:
            if "immutable" in options:
                raise


@contextlib.contextmanager
def _locked(path: Path, *, exclusive: bool) -> Iterator[None]:
    """The lock on the name ``path``, waited for as long as on a busy database."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                events.record("PERFDB_UNLOCKED", f"{path}: this file system has no locks", error)
                break
        yield
    finally:
        os.close(descriptor)
