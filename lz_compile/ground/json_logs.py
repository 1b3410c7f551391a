"""The log as JSON, an object in each line, for whoever collects logs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

from lz_compile.errors import ArgumentError
from lz_compile.ground.events import logger

#: Where fields of a record are kept by whoever logs.
FIELDS = "lz_compile"


class JsonFormatter(logging.Formatter):
    """One line of JSON for a record: time, level, process, code, message, error, and the fields of a selection."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "thread": record.threadName,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            told["error"] = type(record.exc_info[1]).__name__
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """The one that :func:`log_as_json` adds."""


def log_as_json(stream: TextIO | None = None, level: int | str = logging.INFO) -> None:
    """Write what this package logs (events, selections, near misses) as lines of JSON; again for another stream.

    ``TORCH_LOGS="+lz_compile"`` goes on to write text, to its own handlers.

    Args:
        stream: by default the error stream.
        level: the least; at ``INFO`` every selection is told, at ``WARNING`` what went wrong.

    Raises:
        ArgumentError: nothing can be written to the stream, or there is no such level.
    """
    if stream is not None and not callable(getattr(stream, "write", None)):
        raise ArgumentError("log_as_json", "stream", "as a file to write text to", repr(stream))
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    try:
        handler.setLevel(level)
    except (TypeError, ValueError) as error:  # what logging raises
        expected = "as a number or a name of logging, such as INFO or WARNING"
        raise ArgumentError("log_as_json", "level", expected, repr(level)) from error
    for known in [each for each in logger.handlers if isinstance(each, _Handler)]:
        logger.removeHandler(known)
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > handler.level:
        logger.setLevel(handler.level)
