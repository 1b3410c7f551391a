"""The kernels that there are: those of this package, those of plugins, and those that a program registered.

``lowering/kernels/<name>.json`` says what kernels can do (fail closed: what is not listed is not supported) and
``lowering/kernels/<name>.py`` holds their functions, named like the op. Adding a kernel edits no list. Neither adapters
nor libraries are imported before a kernel is used.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lz_compile.errors import RegistrationError, UnknownOperationError
from lz_compile.ground import events, forks
from lz_compile.ground.records import Reason, Record
from lz_compile.runtime.kernels import first_import, libraries
from lz_compile.runtime.kernels.kernel import ADAPTERS, KernelSpec
from lz_compile.runtime.kernels.libraries import LazyFunction
from lz_compile.runtime.problem.context import operations

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.capabilities import Descriptor, Kernel


__all__ = [
    "KERNELS", "KernelInfo", "KernelSpec", "digest", "has_foreign", "kernels", "list_kernels", "register",
    "register_descriptor", "reload", "unregister_kernel", "version",
]  # fmt: skip

KERNELS = Path(__file__).resolve().parents[2] / "lowering" / "kernels"

#: By op and kernel id, in the order in which they were found.
_Table = dict[tuple[str, str], KernelSpec]


class _State:
    """What was found and what was registered. Every change counts ``version`` up and starts ``views`` anew."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.found: _Table | None = None
        self.finder: int | None = None  # the thread that is finding them
        self.plugged: _Table = {}
        self.registered: _Table = {}
        self.is_loading_plugins = False
        self.version = 0
        self.views: dict[str, Mapping[str, KernelSpec]] = {}
        self.digest: str | None = None

    def everything(self) -> _Table:
        return {**_found(), **self.plugged, **self.registered}

    def found_by_a_copy(self) -> _Table | None:
        """What a forked process takes over: not what another thread was still finding, which it finds by itself."""
        return self.found if self.finder in (None, threading.get_ident()) else None

    def open_table(self) -> _Table:
        """Where a kernel goes that is registered now."""
        return self.plugged if self.is_loading_plugins else self.registered

    def changed(self) -> None:
        self.version += 1
        self.views = {}
        self.digest = None


_state = _State()
forks.renewed(_state, lock=threading.RLock, found=_state.found_by_a_copy)


def kernels(operation: str) -> Mapping[str, KernelSpec]:
    """Every kernel for an operation by its id, ``inductor`` first.

    Of an op with variants, these are those of all variants; of a variant (``attention.causal``), its own and the op's.
    A descriptor or plugin that fails is an event.
    """
    known = _state.views.get(operation)
    if known is not None:
        return known
    op = operation.partition(".")[0]
    with _state.lock:
        view = {
            kernel_id: spec
            for (of, kernel_id), spec in _state.everything().items()
            if of == op and (operation == op or spec.operation in (op, operation))
        }
        _state.views[operation] = view
    return view


def version() -> int:
    """A number that changes whenever a kernel comes or goes: part of the keys of what was decided in this process."""
    return _state.version + first_import.late_answers()


def digest() -> str:
    """A hash of every kernel, its limits and the version installed, the same in every process that has the same ones."""
    with _state.lock:
        if _state.digest is None:
            everything = _state.everything().items()
            lines = sorted(f"{op}/{name}/{spec.capabilities_hash}/{spec.version}" for (op, name), spec in everything)
            _state.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return _state.digest


def has_foreign() -> bool:
    """Whether there are kernels of plugins, or that the program registered."""
    with _state.lock:
        _found()
        return bool(_state.plugged or _state.registered)


def reload() -> None:
    """Read descriptors, plugins and installed libraries again; what the program itself registered stays."""
    with _state.lock:
        libraries.forget()
        _state.found = None
        _state.plugged = {}
        _state.changed()


# ---- finding ---------------------------------------------------------------------------------------------------------


def descriptors() -> list[Path]:
    """Those of this package, Inductor's first, then by file name."""
    return sorted(KERNELS.rglob("*.json"), key=lambda path: (path.stem != "inductor", path.stem))


def adapter(path: Path) -> str:
    """The dotted name of the module beside a descriptor of this package."""
    return ".".join([ADAPTERS, *path.relative_to(KERNELS).with_suffix("").parts])


def _found() -> _Table:
    if _state.found is None:
        _state.found, _state.plugged, _state.finder = {}, {}, threading.get_ident()
        try:
            for path in descriptors():
                _add_descriptor(_state.found, path, adapter(path))
            _load_plugins()
        except BaseException:  # Ctrl-C: the rest would never be found
            _state.found = None
            raise
        finally:
            _state.finder = None
    return _state.found


def _load_plugins() -> None:
    _state.is_loading_plugins = True
    try:
        for plugin in _plugins():
            before = dict(_state.plugged)
            try:
                for path, module in plugin.run(sys.modules[__name__]):
                    register_descriptor(path, module)
            except Exception as error:  # noqa: BLE001 a broken plugin disables itself, never the compiler
                _state.plugged = before
                events.record("BACKEND_IMPORT_FAILED", f"{plugin} is disabled", error)
    finally:
        _state.is_loading_plugins = False
        _state.changed()


def register_descriptor(path: str | Path, module: str) -> None:
    """Add the kernels of a descriptor; one that is wrong is an event, and none of its kernels is added.

    Args:
        path: the JSON file (see ``lowering/kernels.schema.json``).
        module: the adapter's dotted name; it holds a function for every op, named like it, and is imported on first use.
    """
    with _state.lock:
        _found()
        _add_descriptor(_state.open_table(), Path(path), module)
        _state.changed()


def _add_descriptor(table: _Table, path: Path, module: str) -> None:
    from lz_compile.runtime.kernels import capabilities

    try:
        specs = specs_of(capabilities.read(path), module)
        taken = _state.everything()
        for key, spec in specs.items():
            if key in taken:
                raise RegistrationError(spec.kernel_id, f"{taken[key].source} has a kernel of that name for {key[0]}")
    except Exception as error:  # noqa: BLE001 a broken descriptor disables itself, never the compiler
        events.record("CAPABILITIES_SCHEMA_MISMATCH", f"kernel descriptor {path.name} is disabled", error)
        return
    table.update(specs)


def specs_of(descriptor: Descriptor, module: str) -> _Table:
    """The kernels that a descriptor describes, by op and id, with their functions in ``module``."""
    from lz_compile.runtime.kernels import capabilities

    found: _Table = {}
    capabilities_hash = capabilities.digest(descriptor)
    for operation, kernel in descriptor.kernels():
        op = operation.partition(".")[0]
        found[op, kernel.kernel_id] = _spec(descriptor, operation, kernel, capabilities_hash, module)
    return found


def _spec(descriptor: Descriptor, operation: str, kernel: Kernel, capabilities_hash: str, module: str) -> KernelSpec:
    function = kernel.function
    name = function if function is None or isinstance(function, str) else operation.partition(".")[0]
    same: dict[str, Any] = {each: getattr(kernel, each) for each in kernel.__struct_fields__ if each != "function"}
    return KernelSpec(
        operation=operation,
        source=descriptor.backend,
        provenance=descriptor.source,
        package=descriptor.package,
        backend_version=descriptor.backend_version,
        implementation=None if name is None else LazyFunction(module, name, descriptor.module),
        capabilities_hash=capabilities_hash,
        **same,
    )


# ---- registering -----------------------------------------------------------------------------------------------------


def register(spec: KernelSpec) -> None:
    """Add a kernel; one of the same id is replaced, which is an event.

    Raises:
        UnknownOperationError: there is no such operation.
        RegistrationError: the id is ``inductor``, which always leaves an operation to Inductor.
    """
    doing = f"registering kernel '{spec.kernel_id}'"
    if spec.operation not in operations():
        raise UnknownOperationError(doing, spec.operation, operations())
    if spec.kernel_id == "inductor":
        raise RegistrationError(spec.kernel_id, "that name leaves an operation to Inductor. Choose another one")
    key = (spec.operation.partition(".")[0], spec.kernel_id)
    with _state.lock:
        old = _state.everything().get(key)
        if old is not None:
            events.record("KERNEL_REPLACED", f"{spec.kernel_id} for {old.operation} of {old.source} is replaced")
        _state.open_table()[key] = spec
        _state.changed()


def unregister_kernel(kernel_id: str) -> None:
    """Take a registered kernel away again, whatever operation it is for; one of this package that it replaced is back.

    Raises:
        RegistrationError: no kernel of that id was registered.
    """
    with _state.lock:
        _found()
        tables = [table for table in (_state.plugged, _state.registered) if any(key[1] == kernel_id for key in table)]
        if not tables:
            known = ", ".join(sorted({name for _, name in (*_state.plugged, *_state.registered)})) or "none"
            raise RegistrationError(kernel_id, f"it is to be removed, but was not registered; registered are: {known}")
        for table in tables:
            for key in [key for key in table if key[1] == kernel_id]:
                del table[key]
        _state.changed()


# ---- telling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelInfo(Record):
    """One kernel, for people: ``version`` is the installed one, ``unavailable`` why it cannot be used here (None: it can)."""

    kernel_id: str
    operation: str
    source: str
    version: str | None
    platforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    supports: tuple[str, ...]
    priority: int
    is_opaque: bool
    provenance: str
    unavailable: Reason | None

    @property
    def is_available(self) -> bool:
        """Whether its library is there, as far as can be told without importing it."""
        return self.unavailable is None

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {**super().to_dict(), "is_available": self.is_available}


def list_kernels(operation: str | None = None) -> list[KernelInfo]:
    """Every kernel there is for an operation (an op, or a variant of one), or for all of them.

    Raises:
        UnknownOperationError: there is no such operation.
    """
    if operation is not None and not (isinstance(operation, str) and operation in operations()):
        raise UnknownOperationError("listing kernels", operation, operations())
    wanted = [name for name in operations() if "." not in name] if operation is None else [operation]
    return [_info(spec) for name in wanted for spec in kernels(name).values()]


def _info(spec: KernelSpec) -> KernelInfo:
    told = {each.name: getattr(spec, each.name) for each in fields(KernelInfo) if each.name != "unavailable"}
    told |= {name: tuple(sorted(told[name])) for name in ("platforms", "dtypes", "supports")}
    return KernelInfo(**told, unavailable=spec.availability())


# ---- plugins ---------------------------------------------------------------------------------------------------------


GROUP = "layerzero.backends"


@dataclass(frozen=True)
class Plugin:
    """One announced function, an entry point of the group ``layerzero.backends`` of another distribution.

    It takes this registry or nothing. It registers kernels, or returns a descriptor and its adapter's module,
    ``(path, "my_package.adapter")``, or a list of such pairs. One that fails, as it does where what it needs is not
    installed, is an event and adds nothing.
    """

    entry: metadata.EntryPoint

    def __str__(self) -> str:
        distribution = f" of {self.entry.dist.name}" if self.entry.dist is not None else ""
        return f"plugin {self.entry.name}{distribution} ({self.entry.value})"

    def run(self, registry: ModuleType) -> list[tuple[Any, str]]:
        """Call the function; the descriptors that it returned, each with the name of its adapter's module.

        Args:
            registry: what a function is given that takes anything.

        Raises:
            Exception: whatever it raises.
            ImportError: importing it would end this process.
            TypeError: it returned something else.
        """
        function = self._function()
        takes_registry = bool(inspect.signature(function).parameters)
        result = function(registry) if takes_registry else function()
        pairs = [result] if isinstance(result, tuple) else list(result or ())
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], str)):
                raise TypeError(f"expected pairs (path, module name) or nothing, received {pair!r}")
        return pairs

    def _function(self) -> Any:
        """The announced function, imported in another process first.

        Raises:
            ImportError: that process ended, hung, or needs longer than anybody waits for it.
        """
        name = self.entry.attr.partition(".")[0]
        package = None if self.entry.dist is None else self.entry.dist.name
        trial = libraries.try_first(LazyFunction(self.entry.module, name), package, waits=False)
        if trial is not None and not trial.is_answer:
            raise ImportError(f"its first import takes long ({trial.text}); a later process loads it")
        if trial is not None and not trial.is_harmless:
            raise ImportError(f"importing it {trial.outcome}, as a process of its own showed ({trial.text})")
        return self.entry.load()


def _plugins() -> list[Plugin]:
    """Every plugin that is installed, in the order of their names; metadata that cannot be read is an event."""
    try:
        entries = sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    except Exception as error:  # noqa: BLE001 metadata that somebody else's installer wrote must not break a compile
        events.record("BACKEND_IMPORT_FAILED", f"reading the entry points of {GROUP}; no plugin is loaded", error)
        return []
    return [Plugin(entry) for entry in entries]
