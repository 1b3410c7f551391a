"""A warm start in one file: what a process compiled, built, proved and measured, for others that begin with empty caches.

A zip archive. ``manifest.json`` names every member with its hash, and where it was made. Members are PyTorch's own cache
artifacts (Inductor, AOTAutograd, Triton); the C++ libraries that Inductor built for this process, which PyTorch's artifacts
leave out; finished graphs as a whole; our records of proofs and rates; and measurements. What a member needs to be of use
here is compared with what is here, and it is left out, with its reason, where that differs.

Libraries and PyTorch's artifacts are code: load files that you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from lz_compile.compile import finished
from lz_compile.errors import ArgumentError, ArtifactError
from lz_compile.ground import events, store
from lz_compile.ground.files import cache_directory, path_given, write_whole
from lz_compile.ground.machine import code_runs_on, environment
from lz_compile.ground.records import Record, Shown
from lz_compile.lowering import dynamo
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.policy import policy

if TYPE_CHECKING:
    import os


FORMAT = 1
#: What reading a damaged archive raises; RuntimeError stands for what is encrypted.
_DAMAGE = (OSError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError)
_MANIFEST, _MEASUREMENTS = "manifest.json", "all.json"
#: Of what is unpacked: a member that says it is larger is none of ours.
_MOST_BYTES = 4 << 30
#: By kind, what a member's name is below its origin and kind.
_NAMES = {
    "torch": re.compile(r"\w+\.bin"),
    "libraries": re.compile(r"\w+/[\w.]+\.so"),
    "records": re.compile(r"\w+/[\w-]+\.json"),
    "finished": re.compile(r"[0-9a-f]{64}"),
    "measurements": re.compile(re.escape(_MEASUREMENTS)),
}
_OTHERS = {
    "machine": "built for another processor or by another compiler",
    "records": "made by another version of lz_compile or torch",
}
#: By kind, what of its origin has to be here as well. Measurements name their environment one by one.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "python"),
    "libraries": ("torch", "python", "machine"),
    "records": ("records",),
    "finished": ("torch", "python", "machine", "records"),
    "measurements": (),
}


@dataclass(frozen=True)
class Origin:
    """Where members were made: versions of torch and Python, what our records are valid for, and the processor."""

    torch: str
    python: str
    records: str
    machine: str

    @property
    def name(self) -> str:
        """A short hash of all of it."""
        return _digest(json.dumps(asdict(self), sort_keys=True).encode())[:12]


@dataclass(frozen=True)
class _Manifest:
    format: int
    origins: dict[str, Origin]
    members: dict[str, str]  #: the SHA-256 of each, by its name


@dataclass(frozen=True)
class Part(Record):
    """Members of one kind and origin; ``left_out`` says of how many of them, and why, by reason."""

    kind: str
    torch: str
    count: int
    size_bytes: int
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class Artifacts(Record, Shown):
    """What is in a file of artifacts."""

    shown_by = "lz_compile.report.render:artifacts"

    path: str
    parts: tuple[Part, ...]

    @property
    def left_out(self) -> int:
        """How many members are of no use here."""
        return sum(sum(part.left_out.values()) for part in self.parts)


def save_artifacts(path: str | os.PathLike[str]) -> Artifacts:
    """Write what this process has compiled, built, proved and measured to one file.

    A file that is there is replaced whole, or left as it is where this fails or the process is killed.

    Args:
        path: of the file.

    Returns:
        what was written.

    Raises:
        OSError: it cannot be written.
    """
    origin = _here()
    found = {f"{origin.name}/{kind}/{name}": data for kind, name, data in _made_here()}
    return _write(path_given("save_artifacts", "path", path), {origin.name: origin}, found)


def load_artifacts(path: str | os.PathLike[str]) -> Artifacts:
    """Put what is in a file into the caches of this process's user, before anything is compiled.

    Libraries and PyTorch's artifacts are code: load files that you trust.

    Args:
        path: of a file that :func:`save_artifacts` or :func:`merge_artifacts` wrote.

    Returns:
        what is in it, and what of that was left out and why: damaged, or made by other versions or on another machine.

    Raises:
        ArtifactError: there is no such file, it is none of ours, or a newer version's.
    """
    with _open(path_given("load_artifacts", "path", path)) as archive:
        found = archive.parts(load=True)
    for part in found.parts:
        for reason, count in part.left_out.items():
            events.record("ARTIFACT_LEFT_OUT", f"{found.path}: {count} of {part.count} {part.kind}: {reason}")
    return found


def inspect_artifacts(path: str | os.PathLike[str]) -> Artifacts:
    """What is in a file, and what of it would be left out here; nothing is loaded.

    Raises:
        ArtifactError: there is no such file, it is none of ours, or a newer version's.
    """
    with _open(path_given("inspect_artifacts", "path", path)) as archive:
        return archive.parts(load=False)


def merge_artifacts(output: str | os.PathLike[str], paths: Sequence[str | os.PathLike[str]]) -> Artifacts:
    """Write one file with the members of several, of any machines and versions; of equal names the last one's stays.

    Raises:
        ArtifactError: one of them is no such file, or is damaged.
        OSError: ``output`` cannot be written.
    """
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise ArgumentError("merge_artifacts", "paths", "several", repr(paths))
    origins: dict[str, Origin] = {}
    members: dict[str, bytes] = {}
    for path in paths:
        with _open(path_given("merge_artifacts", "paths", path)) as archive:
            origins |= archive.manifest.origins
            for name in archive.manifest.members:
                data, why = archive.member(name)
                if why:
                    raise ArtifactError(
                        f"merging {path}", f"{name} whole", why, "Leave the file out, or write it again"
                    )
                is_list = name.endswith(f"/measurements/{_MEASUREMENTS}") and name in members
                members[name] = _joined(members[name], data) if is_list else data
    return _write(path_given("merge_artifacts", "output", output), origins, members)


# ---- what is here ----------------------------------------------------------------------------------------------------


def _here() -> Origin:
    return Origin(str(torch.__version__), platform.python_version(), store.version(), code_runs_on())


def _environments() -> set[str]:
    devices = ["cpu", *([torch.accelerator.current_accelerator()] if torch.accelerator.is_available() else [])]
    return {environment(device) for device in devices if device is not None}


def _made_here() -> Iterator[tuple[str, str, bytes]]:
    """The kind, name and content of everything that there is to save."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is not None:
        yield "torch", f"{_digest(saved[0])[:16]}.bin", saved[0]
    for key, found in finished.made_here():
        yield "finished", key, found
    root = dynamo.cache_root()
    libraries = sorted({*dynamo.built_libraries(), *finished.libraries()})
    for kind, name, path in (
        *(("libraries", path.relative_to(root).as_posix(), path) for path in libraries),
        *(("records", f"{path.parent.parent.name}/{path.name}", path) for path in sorted(store.used)),
    ):
        try:
            yield kind, name, path.read_bytes()
        except OSError as error:  # somebody clears the cache meanwhile
            events.record("ARTIFACT_LEFT_OUT", f"{name} cannot be read and is not saved", error)
    measured = _database().of(sorted(_environments()))
    if measured:
        yield "measurements", _MEASUREMENTS, msgspec.json.encode(measured)


def _database() -> Any:
    return perfdb.database(policy.current().settings.perfdb.path)


# ---- the file --------------------------------------------------------------------------------------------------------


def _write(path: Path, origins: dict[str, Origin], members: dict[str, bytes]) -> Artifacts:
    manifest = _Manifest(FORMAT, origins, {name: _digest(data) for name, data in members.items()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_MANIFEST, msgspec.json.encode(manifest))
        for name, data in members.items():
            file.writestr(name, data)
    write_whole(path, buffer.getvalue())
    return inspect_artifacts(path)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[_Archive]:
    doing = f"reading artifacts of {path}"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(zipfile.ZipFile(path))
            manifest = msgspec.json.decode(file.read(_MANIFEST), type=_Manifest)
        except (*_DAMAGE, msgspec.MsgspecError) as error:
            expected = "a file that save_artifacts wrote"
            raise ArtifactError(doing, expected, str(error), "Is it the right file?") from error
        if manifest.format != FORMAT:
            expected = f"format {FORMAT}, as this version reads"
            raise ArtifactError(doing, expected, f"format {manifest.format}", "Write it again with this version")
        yield _Archive(path, file, manifest)


@dataclass
class _Archive:
    """A file of artifacts, open."""

    path: Path
    file: zipfile.ZipFile
    manifest: _Manifest
    here: Origin = field(default_factory=_here)

    def parts(self, *, load: bool) -> Artifacts:
        """What is in the file, loaded as far as it is of use, if asked for."""
        found: dict[tuple[str, str], list[_Loaded]] = defaultdict(list)
        for name in self.manifest.members:
            origin, kind, rest = (*name.split("/", 2), "", "")[:3]
            data, why = self.member(name)
            loaded = _Loaded(1, [why]) if why else self._loaded(origin, kind, rest, data, load=load)
            found[origin, kind].append(replace(loaded, size_bytes=len(data)))
        return Artifacts(str(self.path), tuple(starmap(self._part, found.items())))

    def _part(self, place: tuple[str, str], found: Sequence[_Loaded]) -> Part:
        made = self.manifest.origins.get(place[0])
        left_out = Counter(reason for each in found for reason in each.left_out)
        sizes = sum(each.count for each in found), sum(each.size_bytes for each in found)
        return Part(place[1], "unknown" if made is None else made.torch, *sizes, left_out)

    def member(self, name: str) -> tuple[bytes, str]:
        """The content of a member, and why it cannot be trusted: empty if it can."""
        try:
            if self.file.getinfo(name).file_size > _MOST_BYTES:
                return b"", "larger than anything that is written here"
            data = self.file.read(name)
        except _DAMAGE as error:
            return b"", f"damaged: {type(error).__name__}"
        return data, "" if _digest(data) == self.manifest.members[name] else "damaged: another content than was written"

    def _loaded(self, origin: str, kind: str, name: str, data: bytes, *, load: bool) -> _Loaded:
        """What of a member is left out; loaded where it is not, if asked for."""
        made, pattern = self.manifest.origins.get(origin), _NAMES.get(kind)
        if made is None or made.name != origin or pattern is None or not pattern.fullmatch(name):
            return _Loaded(1, ["no member that this version writes"])
        for need in _NEEDS[kind]:
            there, here = getattr(made, need), getattr(self.here, need)
            if there != here:
                told = _OTHERS.get(need, f"made with another {need}: {there}, here it is {here}")
                return _Loaded(1, [told])
        return _LOADERS[kind](name, data, load)


@dataclass(frozen=True)
class _Loaded:
    """How many things a member holds, and why some of them are left out."""

    count: int
    left_out: Sequence[str]
    size_bytes: int = 0


def _load_torch(_name: str, data: bytes, load: bool) -> _Loaded:
    is_unread = load and torch.compiler.load_cache_artifacts(data) is None
    return _Loaded(1, ["PyTorch cannot read it"] if is_unread else [])


def _load_library(name: str, data: bytes, load: bool) -> _Loaded:
    return _put(dynamo.cache_root() / name, data, mode=0o755) if load else _Loaded(1, [])


def _load_record(name: str, data: bytes, load: bool) -> _Loaded:
    kind, _, key = name.partition("/")
    return _put(cache_directory() / kind / store.version() / key, data) if load else _Loaded(1, [])


def _load_finished(name: str, data: bytes, load: bool) -> _Loaded:
    try:
        if load:
            finished.offer(name, data)
    except msgspec.MsgspecError as error:
        return _Loaded(1, [str(error)])
    return _Loaded(1, [])


def _load_measurements(_name: str, data: bytes, load: bool) -> _Loaded:
    try:
        found = msgspec.json.decode(data, type=list[PerfRecord])
    except msgspec.MsgspecError as error:
        return _Loaded(1, [str(error)])
    known = _environments()
    useful = [each for each in found if each.environment in known]
    if load:
        _database().put(useful)
    return _Loaded(len(found), ["measured in another environment"] * (len(found) - len(useful)))


_LOADERS = {
    "torch": _load_torch,
    "libraries": _load_library,
    "records": _load_record,
    "finished": _load_finished,
    "measurements": _load_measurements,
}


def _put(path: Path, data: bytes, mode: int = 0o644) -> _Loaded:
    """Write a file that is not there yet."""
    try:
        if not path.exists():
            write_whole(path, data, mode)
    except OSError as error:
        return _Loaded(1, [str(error)])
    return _Loaded(1, [])


def _joined(one: bytes, other: bytes) -> bytes:
    """Two lists of measurements as one: the newest of a key stays when they are put into the database."""
    found = [each for data in (one, other) for each in msgspec.json.decode(data, type=list[PerfRecord])]
    return msgspec.json.encode(list(dict.fromkeys(found)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
