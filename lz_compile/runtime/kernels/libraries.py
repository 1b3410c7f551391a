"""Whether a library is there, and in which version, without importing it."""

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
from lz_compile.ground.reasons import Reason


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


def import_failure(function: LazyFunction) -> Reason | None:
    """Why an earlier :func:`load` failed; None if none did."""
    return _failures.get(function)


def load(function: LazyFunction) -> Reason | None:
    """Import a function; why that is not possible is remembered, and an event the first time."""
    if function not in _failures:
        try:
            function.resolve()
        except Exception as error:  # noqa: BLE001 a broken library disables its kernels, never the compiler
            text = f"{function.module}.{function.name} cannot be imported"
            events.record("BACKEND_IMPORT_FAILED", text, error)
            _failures[function] = Reason("BACKEND_IMPORT_FAILED", f"{text}: {type(error).__name__}: {error}")
    return _failures.get(function)


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
    installed_version.cache_clear()
    missing.cache_clear()
