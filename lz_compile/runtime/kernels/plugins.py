"""Kernels of other distributions, announced under the entry-point group ``layerzero.backends``.

An entry point is a function that takes the registry (``registry.py``) or nothing. It registers kernels,
or returns a descriptor and its adapter's module, ``(path, "my_package.adapter")``, or a list of such pairs. One that fails,
as it does where what it needs is not installed, is an event and adds nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from lz_compile.ground import events
from lz_compile.runtime.kernels import libraries
from lz_compile.runtime.kernels.libraries import LazyFunction

GROUP = "layerzero.backends"


@dataclass(frozen=True)
class Plugin:
    """One announced function."""

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


def found() -> list[Plugin]:
    """Every plugin that is installed, in the order of their names; metadata that cannot be read is an event."""
    try:
        entries = sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    except Exception as error:  # noqa: BLE001 metadata that somebody else's installer wrote must not break a compile
        events.record("BACKEND_IMPORT_FAILED", f"reading the entry points of {GROUP}; no plugin is loaded", error)
        return []
    return [Plugin(entry) for entry in entries]
