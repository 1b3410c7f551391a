"""Whether a library is there, in which version, and whether importing it would end this process, without importing it."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.runtime.kernels import first_import
from lz_compile.runtime.kernels.first_import import Asked, Tried

#: Modules of this package.
_OURS = "lz_compile."


@dataclass(frozen=True)
class LazyFunction:
    """``module.name``, imported when it is first asked for, after the ``library`` that it needs."""

    module: str
    name: str
    library: str | None = None

    def resolve(self) -> Callable[..., Any]:
        """The function as its module has it now; a module's ``check_library()`` says what its library was built without.

        Raises:
            Exception: whatever the imports and the check raise.
        """
        if self.library is not None:
            importlib.import_module(self.library)
        module = importlib.import_module(self.module)
        getattr(module, "check_library", lambda: None)()
        function: Callable[..., Any] = getattr(module, self.name)
        return function

    def source_digest(self) -> str:
        """A hash of the file that the module was loaded from; empty where there is none that can be read."""
        path = getattr(sys.modules.get(self.module), "__file__", None)
        try:
            return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            return ""


_failures: dict[LazyFunction, Reason] = {}
_not_yet_told: set[LazyFunction] = set()


def import_failure(function: LazyFunction) -> Reason | None:
    """Why an earlier :func:`load` failed; None if none did."""
    return _failures.get(function)


def load(function: LazyFunction, package: str | None = None, *, waits: bool = False) -> Reason | None:
    """Import a function; why that is not possible is remembered, and an event the first time.

    A library that this process has not imported yet is tried in another one first. Where that takes long, it is not used
    yet, unless one ``waits``.
    """
    if function not in _failures:
        try:
            trial = try_first(function, package, waits=waits)
            if trial is not None and not trial.is_answer:
                return _not_yet(function, trial)
            if trial is not None and not trial.is_harmless:
                reason = Reason("BACKEND_IMPORT_FAILED", _refusal(function, trial))
                events.record(reason.code, reason.message)
                _failures[function] = reason
                return reason
            function.resolve()
        except Exception as error:  # noqa: BLE001 a broken library disables its kernels, never the compiler
            text = f"{function.module}.{function.name} cannot be imported"
            events.record("BACKEND_IMPORT_FAILED", text, error)
            _failures[function] = Reason("BACKEND_IMPORT_FAILED", f"{text}: {type(error).__name__}: {error}")
    return _failures.get(function)


def _not_yet(function: LazyFunction, trial: Tried) -> Reason:
    text = f"{trial.library} is not used yet: its first import goes on in a process of its own ({trial.text})"
    advice = "What is compiled after it may use it. To wait for it: python -m lz_compile doctor"
    reason = Reason("BACKEND_NOT_TRIED_YET", f"{text}. {advice}")
    if function not in _not_yet_told:
        _not_yet_told.add(function)
        events.record(reason.code, reason.message)
    return reason


def try_first(
    function: LazyFunction, package: str | None = None, *, again: bool = False, waits: bool = True
) -> Tried | None:
    """What came of importing a library's function in another process; None where this one has imported the library already.

    What is this package's own needs no trial. Without ``waits`` it may still go on.
    """
    library = function.library or function.module
    if library.startswith(_OURS) or library.partition(".")[0] in sys.modules:
        return None
    version = "" if package is None else installed_version(package) or ""
    asked = Asked(function.module, function.name, library, version)
    return first_import.tried(asked, function.resolve, again=again, waits=waits or _has_ranks())


def _has_ranks() -> bool:
    """Whether other ranks choose with this one: all wait for an answer, so that they choose alike."""
    ranks = sys.modules.get("torch.distributed")
    return ranks is not None and ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def _refusal(function: LazyFunction, trial: Tried) -> str:
    told = f"importing {function.module} {trial.outcome}, as a process of its own showed ({trial.text})"
    return f"{told}. Reinstall {trial.library} for torch {trial.torch}: python -m lz_compile doctor --fix"


@cache
def installed_version(package: str) -> str | None:
    """The version of a distribution; None where it is not installed (or its metadata has none)."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


@cache
def missing(package: str, versions: str | None) -> Reason | None:
    """Why a distribution does not do: it is not installed, or in a version outside of ``versions`` (PEP 440)."""
    found = installed_version(package)
    if found is None:
        return Reason("NOT_INSTALLED", f"{package} is not installed")
    if versions is None:
        return None
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        fits = SpecifierSet(versions).contains(found, prereleases=True)
    except (InvalidSpecifier, InvalidVersion) as error:
        return Reason("BACKEND_VERSION_UNSUPPORTED", f"{package} {found} against '{versions}': {error}")
    if fits:
        return None
    return Reason("BACKEND_VERSION_UNSUPPORTED", f"requires {package} {versions}, {found} is installed")


def forget() -> None:
    """Look again at what is installed, and try again what could not be imported."""
    _failures.clear()
    _not_yet_told.clear()
    installed_version.cache_clear()
    missing.cache_clear()
