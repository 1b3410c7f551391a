"""Files that others read or wrote meanwhile: read up to a size, so that a wrong path costs no memory, and written whole.

Imports no torch, so that tools that only read them start at once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lz_compile.errors import ArgumentError


class TooLargeError(Exception):
    """A file is larger than what it is taken for can be."""


def cache_directory() -> Path:
    """Where this package keeps files of its own: ``$LAYERZERO_CACHE_DIR``, or the user's cache directory of the platform."""
    configured = os.environ.get("LAYERZERO_CACHE_DIR")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_cache_dir("layerzero", appauthor=False))


def path_given(function: str, argument: str, value: object) -> Path:
    """The path that a public function is given, with the user's directory for ``~``.

    Raises:
        ArgumentError: it is none.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(function, argument, "a path, as text or os.PathLike", repr(value))
    return Path(os.path.expanduser(text))  # pathlib raises where there is no such user


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read.
        TooLargeError: it has more than ``most`` bytes; no more than these are read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLargeError(
            f"expected at most {most >> 20} MiB, received {path.stat().st_size >> 20}. Is it the right file?"
        )
    return data


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file whole and rename it into place, in a directory that is made where need be.

    Args:
        content: text is written as UTF-8.
        mode: its permissions; by default the owner's alone.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    file = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115 closed below
    try:
        with file:
            file.write(data)
        if mode is not None:
            Path(file.name).chmod(mode)
        Path(file.name).replace(path)
    except BaseException:  # a full disk must not be filled with parts of files
        Path(file.name).unlink(missing_ok=True)
        raise
