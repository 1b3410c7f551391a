"""The dispatch tables that decisions follow: those loaded in this process, and that of one compile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lz_compile import __version__
from lz_compile.errors import DispatchTableError
from lz_compile.ground import events
from lz_compile.ground.files import path_given
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.problem.context import SelectionContext
from lz_compile.runtime.problem.decision_tree import Leaf, Node, choose, outcomes, restrict

if TYPE_CHECKING:
    from lz_compile.runtime.tables.dispatch_table import DispatchTable


#: What a problem and a table's tree must have in common: its kind, and which sizes are symbols (None: does not matter).
Key: TypeAlias = "tuple[tuple[Any, ...], tuple[str, ...] | None]"
#: The sizes that a tree wants exactly, the tree, and the kinds of device that it is for (None: all).
Tree: TypeAlias = "tuple[Mapping[str, int], Node, tuple[str, ...] | None]"


@dataclass(frozen=True)
class Loaded:
    """A table with the file that it is from, and its trees by kind, each with the sizes that it wants exactly."""

    path: str
    table: DispatchTable
    trees: Mapping[Key, Sequence[Tree]]

    def tree(self, context: SelectionContext, source_kernel: str | None) -> Node | None:
        """The decision for a problem, over those of its sizes that are symbols; None where the table does not speak of it."""
        if self.table.hardware_signature not in (None, context.hardware.signature()):
            return None
        numbers = {name: dim for name, dim in context.dims.items() if isinstance(dim, int)}
        symbolic = tuple(sorted(name for name in context.dims if name not in numbers))
        features = tuple(sorted(context.features))
        kind = (context.operation, context.hardware.platform, context.dtype_name, features, source_kernel)
        for wanted in (symbolic, None):
            found: Node = Leaf(None)
            for exact, node, devices in self.trees.get((kind, wanted), ()):
                if devices is not None and context.hardware.kind() not in devices:
                    continue
                if all(numbers.get(name, size) == size for name, size in exact.items()):
                    found = filled(found, restrict(node, {name: (size, size) for name, size in numbers.items()}))
            if outcomes(found) != [None]:
                return found
        return None


def filled(node: Node, other: Node) -> Node:
    """The tree with another one in place of the leaves that have no kernel."""
    if isinstance(node, Leaf):
        return other if node.kernel is None else node
    return type(node)(node.dim, node.at, filled(node.below, other), filled(node.above, other))


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables: tuple[Loaded, ...] = ()
        self.version = 0
        self.files: dict[str, tuple[tuple[int, ...], Loaded]] = {}


_state = _State()
_are_set_aside: ContextVar[bool] = ContextVar("lz_compile_tables_set_aside", default=False)


def load_dispatch_table(path: str | os.PathLike[str]) -> DispatchTable:
    """Follow the decisions in a file from now on, in everything that this process compiles.

    Of several tables the one loaded last is asked first; a file that is loaded again replaces what it said before. What
    was compiled already stays as it is.

    Args:
        path: written by :meth:`DispatchTable.save` or :func:`lz.save_decisions`.

    Raises:
        DispatchTableError: the file cannot be followed here; the text says why.
    """
    path_given("load_dispatch_table", "path", path)
    loaded = _loaded(path)
    with _state.lock:
        _state.tables = (loaded, *(each for each in _state.tables if each.path != loaded.path))
        _state.version += 1
    return loaded.table


def unload_dispatch_table(path: str | os.PathLike[str] | None = None) -> None:
    """Follow a table no longer; without a path, none of those that were loaded.

    Raises:
        DispatchTableError: no table of that path is loaded.
    """
    with _state.lock:
        kept = () if path is None else tuple(each for each in _state.tables if each.path != str(path))
        if path is not None and len(kept) == len(_state.tables):
            known = ", ".join(each.path for each in _state.tables) or "none"
            raise DispatchTableError(path, f"it is to be unloaded, but is not loaded; loaded are: {known}")
        _state.tables = kept
        _state.version += 1


def active() -> tuple[Loaded, ...]:
    """The tables of this process, the one to ask first in front."""
    return () if _are_set_aside.get() else _state.tables


def version() -> int:
    """A number that changes whenever a table comes or goes: part of the keys of what was decided in this process."""
    return _state.version


def of_compile(path: str | os.PathLike[str] | None, *, strict: bool = False) -> tuple[Loaded, ...]:
    """The tables of one compile: its own before those of the process. A refused one is an event.

    Raises:
        DispatchTableError: the table is refused and ``strict`` is set.
    """
    if path is None or _are_set_aside.get():
        return active()
    try:
        return (_loaded(path), *active())
    except DispatchTableError as error:
        if strict:
            raise
        events.record("DISPATCH_TABLE_REFUSED", str(error))
        return active()


@contextmanager
def set_aside() -> Iterator[None]:
    """Decisions inside follow no table of the process (those that are to become one)."""
    token = _are_set_aside.set(True)
    try:
        yield
    finally:
        _are_set_aside.reset(token)


def find(
    context: SelectionContext, source_kernel: str | None, tables: Sequence[Loaded]
) -> tuple[Loaded, Node] | tuple[None, None]:
    """The first table that speaks of a problem, and its decision over the sizes that are symbols."""
    for loaded in tables:
        node = loaded.tree(context, source_kernel)
        if node is not None:
            return loaded, node
    return None, None


def covers(context: SelectionContext, source_kernel: str | None, tables: Sequence[Loaded]) -> bool:
    """Whether a table speaks of a problem at the sizes that it was traced with."""
    node = find(context, source_kernel, tables)[1]
    return node is not None and choose(node, context.hints()).kernel is not None


def _loaded(path: str | os.PathLike[str]) -> Loaded:
    """A file's table, read and checked once for every state of the file, of the kernels and of threads."""
    from lz_compile.runtime.tables.dispatch_table import read

    key = os.fspath(path)
    try:
        status = Path(key).expanduser().stat()
        file = (status.st_mtime_ns, status.st_size, status.st_ino)
    except OSError:
        file = (0, 0, 0)
    state = (*file, registry.version(), torch.get_num_threads())
    known = _state.files.get(key)
    if known is None or known[0] != state:
        table = read(key)
        table.check(key)
        _tell_versions(key, table)
        known = _state.files[key] = (state, Loaded(key, table, _trees(table)))
    return known[1]


def _tell_versions(path: str, table: DispatchTable) -> None:
    """Decisions of other versions are right, though maybe no longer the fastest: an event."""
    expected = {"layerzero": table.layerzero_version, "torch": table.torch_version}
    found = {"layerzero": __version__, "torch": str(torch.__version__)}
    if expected != found:
        text = ", ".join(f"{name} {expected[name]} (here {found[name]})" for name in found)
        events.record("DISPATCH_TABLE_OTHER_VERSIONS", f"{path} was made with {text}; its decisions are followed")


def _trees(table: DispatchTable) -> dict[Key, list[Tree]]:
    found: dict[Key, list[Tree]] = {}
    for each in sorted(table.trees, key=lambda tree: tree.hardware is None):
        found.setdefault((each.kind, each.symbolic), []).append((each.dims, each.node(), each.hardware))
    return found
