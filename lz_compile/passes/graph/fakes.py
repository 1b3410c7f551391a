"""Example values of new nodes, computed under the fake mode of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher


@contextmanager
def faking(mode: Any) -> Iterator[None]:
    """A fake mode in which symbolic sizes stay symbols: functions in C++ that ask for sizes would make numbers of them."""
    with mode, enable_python_dispatcher():
        yield
