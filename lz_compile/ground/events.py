"""Things that happened and that somebody may want to know: fallbacks, refusals by faults, quarantined kernels.

Events of a compile are collected into its report; all of them are logged (``TORCH_LOGS="+lz_compile"``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lz_compile.ground import telemetry
from lz_compile.ground.records import Record, first_line

logger = logging.getLogger("lz_compile")


@dataclass(frozen=True)
class Event(Record):
    """``code`` is stable, ``message`` says what happened with the values."""

    code: str
    message: str


class _Sinks(threading.local):
    def __init__(self) -> None:
        self.open: list[list[Event]] = []


_sinks = _Sinks()


def record(code: str, message: str, error: BaseException | None = None, *, level: int = logging.WARNING) -> None:
    """Note an event; with ``error``, its type and text are part of the message (once) and its traceback goes to the log.

    ``level`` is that of the log: CRITICAL for what must stop whoever listens.
    """
    told = "" if error is None else first_line(error)
    text = message if error is None or (told and told in message) else f"{message}: {type(error).__name__}: {error}"
    logger.log(level, "[%s] %s", code, text, exc_info=error, extra={"lz_compile": {"code": code}})
    telemetry.count("events", code=code)
    for sink in _sinks.open:
        sink.append(Event(code, text))


def trace(what: str, error: BaseException) -> None:
    """Put the traceback of an error into the log that became a reason in words: what that says is told with the reason."""
    logger.info("%s", what, exc_info=error)


def pass_on(happened: Iterable[tuple[str, str]]) -> None:
    """Hand over events, as codes and messages, that another process has recorded (and logged) already."""
    found = [Event(code, message) for code, message in happened]
    for event in found:
        telemetry.count("events", code=event.code)
    for sink in _sinks.open:
        sink.extend(found)


@contextmanager
def collect() -> Iterator[list[Event]]:
    """The events of this thread that happen inside."""
    found: list[Event] = []
    _sinks.open.append(found)
    try:
        yield found
    finally:
        _sinks.open.pop()
