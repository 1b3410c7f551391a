"""What several machines measured or decided, in one file: databases of measurements, and lock files."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lz_compile.errors import CommandError, DispatchTableError
from lz_compile.ground.records import Record
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.measure.perfdb import PerfDB
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.tables.dispatch_table import DispatchTable, KernelIdentity, KindTree, Plan, PlannedOp, read
from lz_compile.runtime.tables.loaded import filled
from lz_compile.tools import decisions


@dataclass(frozen=True)
class MergedMeasurements(Record):
    """What was merged into the database at ``path``: how many measurements were read of each file, and what it holds."""

    path: str
    read: dict[str, int]
    holds: int

    def __str__(self) -> str:
        files = ", ".join(f"{count} of {name}" for name, count in self.read.items())
        return f"{self.path} holds {self.holds} measurements; read {files}"


def merge_measurements(output: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]]) -> MergedMeasurements:
    """Put the valid measurements of databases into one, which may be there already; of two of one thing the newer stays.

    Measurements belong to the environment that they were made in, so those of unlike machines stand beside each other.

    Raises:
        CommandError: a file is not there, or holds no measurements.
    """
    records = {os.fspath(file): list(_records(Path(file).expanduser())) for file in files}
    with PerfDB(Path(output).expanduser()) as database:
        for found in records.values():
            database.put(found)
        holds = int(database.statistics().get("valid_rows", 0))
    return MergedMeasurements(os.fspath(output), {name: len(found) for name, found in records.items()}, holds)


def _records(path: Path) -> list[PerfRecord]:
    """The valid measurements in a file, read from a copy: a look changes nothing."""
    if not path.is_file():
        raise CommandError(f"merging measurements: expected a database at {path}, received no such file")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / path.name
        try:
            with (
                contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(copy)) as target,
            ):
                source.execute("SELECT environment FROM perf_records LIMIT 1")
                source.backup(target)
        except sqlite3.Error as error:
            raise CommandError(f"merging measurements: expected a database of them, {path}: {error}") from error
        with PerfDB(copy) as database:
            return database.everything()


# ---- lock files ------------------------------------------------------------------------------------------------------


def merge_decisions(output: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]]) -> DispatchTable:
    """One lock file for several kinds of device, of lock files that were saved on each.

    A problem has one decision on all of them: that of the first file whose kernel all can run. Where there is no such
    kernel, each kind of device keeps its own.

    Raises:
        DispatchTableError: a file cannot be read, or is no lock file that says where it was made.
    """
    tables = [_lock(file) for file in files]
    trees = [tree for same in _together(tables) for tree in _merged(same)]
    planned = [op for table in tables for _, op in table.ops()]
    merged = replace(
        tables[0], plans=(Plan(bucket={}, ops=tuple(planned)),), trees=tuple(trees), kernels=tuple(_identities(tables))
    )
    ops = decisions.as_in_trees(merged, planned, lambda op: f"as merged; there {op.kernel_id}: {op.why}")
    table = replace(merged, plans=(Plan(bucket={}, ops=ops),))
    table.save(output)
    return table


def _lock(file: str | os.PathLike[str]) -> DispatchTable:
    table = read(file)
    if table.kind != "lock":
        raise DispatchTableError(
            file, "expected a lock file to merge, received a dispatch table, which is for one device"
        )
    if not all(op.hardware for _, op in table.ops()):
        raise DispatchTableError(
            file, "expected decisions that say on which kind of device they were made, received others"
        )
    return table


def _together(tables: Sequence[DispatchTable]) -> list[list[tuple[DispatchTable, KindTree]]]:
    """Trees of several files that are about the same problems."""
    groups: dict[str, list[tuple[DispatchTable, KindTree]]] = {}
    for table in tables:
        for tree in table.trees:
            key = repr(replace(tree, tree={}, hardware=None, dims=dict(sorted(tree.dims.items()))))
            groups.setdefault(key, []).append((table, tree))
    return list(groups.values())


def _merged(same: Sequence[tuple[DispatchTable, KindTree]]) -> Iterator[KindTree]:
    """One tree for all kinds of device, or one for each."""
    able = [_able(table, tree) for table, tree in same]
    nodes = [decision_tree.from_dict(tree.tree) for _, tree in same]
    everywhere = [node for node in nodes if all({*decision_tree.outcomes(node)} - {None} <= names for names in able)]
    if everywhere:  # the first decides, the others where it is silent
        yield replace(same[0][1], tree=decision_tree.to_dict(reduce(filled, everywhere)), hardware=None)
        return
    for table, tree in same:
        yield replace(tree, hardware=tree.hardware or _kinds(op for _, op in table.ops() if _is_about(tree, op)))


def _able(table: DispatchTable, tree: KindTree) -> set[str]:
    """The kernels that can run the problems of a tree on the devices of its file."""
    about = [{*op.able} for _, op in table.ops() if _is_about(tree, op)]
    return set.intersection(*about) if about else set()


def _is_about(tree: KindTree, op: PlannedOp) -> bool:
    return tree.is_of(op) and all(op.dims[name] == size for name, size in tree.dims.items())


def _kinds(planned: Iterable[PlannedOp]) -> tuple[str, ...]:
    return tuple(sorted({kind for op in planned for kind in op.hardware}))


def _identities(tables: Iterable[DispatchTable]) -> Iterator[KernelIdentity]:
    """What kernels were on each kind of device."""
    found: dict[Any, KernelIdentity] = {}
    for table in tables:
        kinds = _kinds(op for _, op in table.ops())
        for each in table.kernels:
            key = each.op, each.kernel_id, each.capabilities_hash, each.version
            before = found[key].hardware or () if key in found else ()
            found[key] = replace(each, hardware=tuple(sorted({*before, *(each.hardware or kinds)})))
    yield from found.values()
