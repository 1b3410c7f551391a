"""What operators see: how often things happened, and spans around the work of a compile.

Counts are numbers in a dictionary. Spans go to a tracer where somebody set one (``lz.instrument``); without it they cost a
call of a function. Nothing of this is in the path of a call that was decided: counts are made by compiles and by events.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lz_compile.ground import forks

Labels = tuple[tuple[str, str], ...]

_lock = threading.Lock()
_counts: Counter[tuple[str, Labels]] = Counter()
_tracer: Any = None
_failed: Callable[[Exception], None] | None = None
forks.renewed(sys.modules[__name__], _lock=threading.Lock)


def count(name: str, amount: int = 1, **labels: str) -> None:
    """Count something that happened, by what tells it apart."""
    with _lock:
        _counts[name, tuple(sorted(labels.items()))] += amount


def counts(name: str) -> dict[Labels, int]:
    """How often it happened in this process, by labels."""
    with _lock:
        return {labels: number for (known, labels), number in _counts.items() if known == name}


class Span:
    """A span that may be there or not: attributes and happenings go to the tracer's, if there is one."""

    def __init__(self, real: Any = None) -> None:
        self._real = real

    def set(self, **attributes: Any) -> None:
        """Say more about what the span is around."""
        if self._real is not None:
            _guarded(lambda: self._real.set_attributes(_named(attributes)))

    def note(self, name: str, **attributes: Any) -> None:
        """Something that happened within."""
        if self._real is not None:
            _guarded(lambda: self._real.add_event(name, attributes=_named(attributes)))


_NONE = Span()


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Span]:
    """A span around what is inside; a fault of the tracer is an event, and changes nothing of that."""
    if _tracer is None:
        yield _NONE
        return
    tracer = _tracer
    context = _guarded(lambda: tracer.start_as_current_span(f"lz_compile.{name}", attributes=_named(attributes)))
    real = None if context is None else _guarded(context.__enter__)
    if context is None or real is None:
        yield _NONE
        return
    try:
        yield Span(real)
    except BaseException as error:
        ending = (type(error), error, error.__traceback__)
        _guarded(lambda: context.__exit__(*ending), lets=error)
        raise
    _guarded(lambda: context.__exit__(None, None, None))


def trace_with(tracer: Any, failed: Callable[[Exception], None]) -> None:
    """Send spans to a tracer of OpenTelemetry, None for none; ``failed`` is told what it raises."""
    global _tracer, _failed
    _tracer, _failed = tracer, failed


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"lz_compile.{name}": value for name, value in attributes.items() if value is not None}


def _guarded(call: Callable[[], Any], lets: BaseException | None = None) -> Any:
    """What a tracer gives; None and a word to whoever set it where it raises something of its own."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 an exporter that fails must not stop a compile; it is told
        if error is not lets and _failed is not None:
            _failed(error)
        return None
