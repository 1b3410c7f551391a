"""Files that others read or wrote meanwhile: read up to a size, so that a wrong path costs no memory, and written whole."""

from __future__ import annotations

import tempfile
from pathlib import Path


class TooLargeError(Exception):
    """A file is larger than what it is taken for can be."""


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


def write_whole(path: Path, text: str) -> None:
    """Write a file whole and rename it into place, in a directory that is made where need be.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
