"""What a selection asks of symbolic sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Symbols(Protocol):
    """The symbolic sizes of a match (``compile/symbolic_sizes.py``)."""

    @property
    def symbols(self) -> Mapping[str, Any]:
        """Every symbol that can be asked about, by name."""

    @property
    def hidden(self) -> Mapping[str, Any]:
        """Every symbol that cannot, because data decides it."""

    def at(self, values: Mapping[str, int]) -> dict[str, int]:
        """Every size, with the symbols at ``values``."""

    def names_in(self, dims: tuple[str, ...]) -> list[str]:
        """The symbols that the sizes of some dims depend on."""
