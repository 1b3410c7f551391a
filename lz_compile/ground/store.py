"""Small JSON records on disk, safe under many processes: one file per key, written whole and renamed into place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from lz_compile.ground import events
from lz_compile.ground.files import cache_directory, write_whole
from lz_compile.ground.fingerprint import source_hash

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record")
Made = TypeVar("Made", bound="DataclassInstance")
#: A file with more bytes is none of ours.
_MOST_BYTES = 1 << 20
#: The files of all records that this process has read or written.
used: set[Path] = set()


def version() -> str:
    """What records of this package are valid for: its source, and torch."""
    return f"{torch.__version__}-{source_hash()[:16]}"


class Store:
    """Records of one ``kind``, valid for one version of this package's source and of torch.

    Disk trouble is never fatal: what cannot be read or written is an event, and the record is computed again.
    """

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        self.directory = (directory or cache_directory()) / kind / version()

    def load(self, key: str, kind: type[Record]) -> Record | None:
        """The record, None where there is none, or none that is of that ``kind`` (an event): nothing is converted."""
        path = self.directory / f"{key}.json"
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
            if len(text) > _MOST_BYTES:
                raise ValueError(f"{key}.json has more than {_MOST_BYTES} bytes")
            record = msgspec.json.decode(text, type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors too
            events.record("STORE_UNREADABLE", f"{self.directory.parent.name}: {error}; it is made again")
            return None
        used.add(path)
        return record

    def recall(self, facts: str, kind: type[Made], make: Callable[[], Made]) -> Made:
        """The record of what follows from ``facts``; where there is none, it is made, and kept."""
        key = hashlib.sha256(facts.encode()).hexdigest()
        found = self.load(key, kind)
        if found is None:
            found = make()
            self.save(key, asdict(found))
        return found

    def save(self, key: str, record: dict[str, Any]) -> None:
        """Write the record; the last of several writers wins."""
        path = self.directory / f"{key}.json"
        try:
            write_whole(path, json.dumps(record))
            used.add(path)
        except OSError as error:
            text = f"{self.directory.parent.name}: {error}. Set LAYERZERO_CACHE_DIR to a folder that can be written"
            events.record("STORE_UNWRITABLE", text)
