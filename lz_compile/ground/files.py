"""Files that somebody else wrote are read up to a size, so that a wrong path costs no memory."""

from __future__ import annotations

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
