"""Example values of new nodes, computed under the fake mode of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher

from lz_compile.passes.graph.modes import Ambient, ambient_context


@contextmanager
def faking(mode: Any, ambient: Ambient | None = None) -> Iterator[None]:
    """A fake mode, under the modes of ``ambient``, in which symbolic sizes stay symbols.

    Functions in C++ that ask for sizes would make numbers of them.
    """
    with ExitStack() as stack:
        for manager in () if ambient is None else ambient_context(ambient):
            stack.enter_context(manager)
        with mode, enable_python_dispatcher():
            yield
