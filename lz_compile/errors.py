"""Every error of this package. Each says what was being done, what was expected, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class LayerZeroError(Exception):
    """Base of all errors."""


class OptionError(LayerZeroError, ValueError):
    """An option of ours that does not exist or has a wrong value."""


class UnknownKernelError(OptionError):
    """A lock names a kernel that an operation does not have."""

    def __init__(self, operation: str, kernel_id: object, valid: Sequence[str]) -> None:
        hint = nearest(str(kernel_id), valid)
        super().__init__(f"locking {operation}: no kernel '{kernel_id}'{hint}; valid are {', '.join(sorted(valid))}")


class RewriteFailedError(LayerZeroError):
    """In strict mode: something of ours failed that would otherwise fall back to Inductor."""


def nearest(name: str, valid: Sequence[str]) -> str:
    """``" (did you mean 'x'?)"``, or nothing where no valid name is close."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
