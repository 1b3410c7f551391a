"""Decisions as a file: the dispatch table of a model that was solved, or a lock file of what one process decided.

A table holds for machines with one hardware signature and the same kernels. A lock file holds wherever the kernels that it
names have the same capabilities and versions. Anything else is refused, never bent to fit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lz_compile.errors import DispatchTableError, nearest
from lz_compile.ground.files import TooLargeError, read_bounded, write_whole
from lz_compile.ground.hardware import hardware
from lz_compile.ground.records import Reason
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.problem.context import dim_names, operations
from lz_compile.runtime.problem.decision_tree import Node
from lz_compile.runtime.tables.trees import only_within

SCHEMA_VERSION = "1.0"
#: Of a file; a decision takes about 1 KiB.
MAX_BYTES = 64 << 20


class Kind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What problems of one kind have in common, beside sizes."""

    op: str
    platform: str
    dtype: str
    features: tuple[str, ...]
    source_kernel: str | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """All of it."""
        return self.op, self.platform, self.dtype, self.features, self.source_kernel


class PlannedOp(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision for one problem: what identifies it, its kernel, and where in the source it stands.

    ``hardware`` are the kinds of device on which it was made (``Hardware.kind``), ``able`` the kernels that can run it on
    all of these.
    """

    kernel_id: str
    symbolic: tuple[str, ...]
    dims: dict[str, int]
    why: str
    where: tuple[str, ...]
    hardware: tuple[str, ...] = ()
    able: tuple[str, ...] = ()


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions for one combination of buckets; a lock file has a single plan, of no bucket."""

    bucket: dict[str, int]
    ops: tuple[PlannedOp, ...]
    jit_artifacts: tuple[str, ...] = ()


class KindTree(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions for one kind of problem, over the sizes in which its problems differ.

    ``dims`` are the sizes that a problem must have exactly, ``symbolic`` those that must be symbols (None: does not
    matter). ``tree`` is a decision tree; where its leaf has no kernel, the table does not speak. ``hardware`` are the kinds
    of device that it is for (None: all).
    """

    symbolic: tuple[str, ...] | None
    dims: dict[str, int]
    tree: dict[str, Any]
    hardware: tuple[str, ...] | None = None

    def node(self) -> Node:
        """The tree, with the exact sizes as questions."""
        exact = {dim: (size, size) for dim, size in self.dims.items()}
        return only_within(exact, decision_tree.from_dict(self.tree))

    def is_of(self, op: PlannedOp) -> bool:
        """Whether a planned op is of this kind, whatever its sizes."""
        is_same = self.kind == op.kind and self.symbolic in (None, op.symbolic)
        return is_same and _meet(self.hardware, op.hardware)


class KernelIdentity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kernel was when the decisions were made; ``version`` is that of its library.

    ``hardware`` are the kinds of device on which it must be there (None: on all).
    """

    op: str
    kernel_id: str
    capabilities_hash: str
    version: str | None
    hardware: tuple[str, ...] | None = None

    @classmethod
    def of(cls, spec: KernelSpec) -> KernelIdentity:
        """The identity of a kernel that there is."""
        op = spec.operation.partition(".")[0]
        return cls(op=op, kernel_id=spec.kernel_id, capabilities_hash=spec.capabilities_hash, version=spec.version)

    def difference(self) -> Reason | None:
        """How the kernel that there is now differs; None if it does not."""
        spec = registry.kernels(self.op).get(self.kernel_id)
        if spec is None:
            return Reason("KERNEL_MISSING", f"{self.kernel_id} is not there")
        if spec.version != self.version:
            text = (
                f"{self.kernel_id} of version {self.version or 'none'} expected, {spec.version or 'none'} is installed"
            )
            return Reason("BACKEND_VERSION_UNSUPPORTED", text)
        if spec.capabilities_hash != self.capabilities_hash:
            hashes = f"{self.capabilities_hash[:12]} expected, {spec.capabilities_hash[:12]} found"
            return Reason("CAPABILITIES_HASH_MISMATCH", f"{self.kernel_id} has other capabilities ({hashes})")
        return None

    def hindrance(self) -> Reason | None:
        """Why the decisions for this kernel cannot be followed here; None if they can."""
        return self.difference() or registry.kernels(self.op)[self.kernel_id].availability()


class Fallback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done where the table does not speak."""

    mode: Literal["runtime_select"] = "runtime_select"


class DispatchTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decisions for a model over buckets of sizes (``lz.solve``), or all decisions of a process (``lz.save_decisions``).

    A bucket stands for all sizes up to it and above the previous one; sizes beyond the last are left to runtime selection.
    """

    schema_version: str = SCHEMA_VERSION
    kind: Literal["dispatch_table", "lock"] = "dispatch_table"
    model_id: str
    hardware_signature: str | None
    capabilities_hash: str | None
    shape_buckets: dict[str, tuple[int, ...]]
    plans: tuple[Plan, ...]
    trees: tuple[KindTree, ...]
    kernels: tuple[KernelIdentity, ...]
    fallback: Fallback = Fallback()
    environment: dict[str, str]
    layerzero_version: str
    torch_version: str
    created_at: str

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, whole and renamed into place."""
        write_whole(Path(path).expanduser(), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DispatchTable:
        """The table in a file, if it holds on this machine.

        Raises:
            DispatchTableError: it cannot be read, is of another schema, contradicts itself, or was made for other hardware
                or other kernels.
        """
        table = read(path)
        table.check(path)
        return table

    def check(self, path: str | os.PathLike[str]) -> None:
        """Whether the table holds here and now.

        Raises:
            DispatchTableError: it does not; the text names what differs.
        """
        problem = next(self._problems(), None)
        if problem is not None:
            raise DispatchTableError(path, problem, self.kind)

    def ops(self) -> Iterator[tuple[str, PlannedOp]]:
        """Every planned op, with its place in the file."""
        for plan_index, plan in enumerate(self.plans):
            for index, op in enumerate(plan.ops):
                yield f"plans[{plan_index}].ops[{index}]", op

    def kernels_at(self, planned: Iterable[PlannedOp]) -> Iterator[str | None]:
        """The kernel that the trees give for each problem; None where they do not speak."""
        nodes = [(kind, kind.node()) for kind in self.trees]
        for op in planned:
            found = (decision_tree.choose(node, op.dims).kernel for kind, node in nodes if kind.is_of(op))
            yield next((kernel_id for kernel_id in found if kernel_id is not None), None)

    # ---- what may be wrong ----------------------------------------------------------------------------------------

    def _problems(self) -> Iterator[str]:
        yield from self._unknown_names()
        yield from self._contradictions()
        yield from self._lock_problems() if self.kind == "lock" else self._table_problems()

    def _unknown_names(self) -> Iterator[str]:
        listed = {(each.op, each.kernel_id) for each in self.kernels if each.hardware is not None}
        named = [(where, op.op, op.kernel_id) for where, op in self.ops()]
        for index, kind in enumerate(self.trees):
            kernel_ids = decision_tree.outcomes(decision_tree.from_dict(kind.tree))
            named += [(f"trees[{index}]", kind.op, kernel_id) for kernel_id in kernel_ids if kernel_id is not None]
        for where, operation, kernel_id in named:
            if operation not in operations():
                hint = nearest(operation, operations())
                yield f"{where}: expected one of the operations {', '.join(operations())}, received '{operation}'{hint}"
                continue
            valid = list(registry.kernels(operation))
            if kernel_id not in valid and (operation.partition(".")[0], kernel_id) not in listed:
                hint = nearest(kernel_id, valid)
                yield f"{where}: expected a kernel for {operation}, received '{kernel_id}'{hint}, which is not there"

    def _contradictions(self) -> Iterator[str]:
        for index, kind in enumerate(self.trees):
            expected = dim_names(kind.op.partition(".")[0])
            asked = decision_tree.edges(kind.node())
            unknown = [dim for dim in asked if dim not in expected]
            if unknown:
                yield f"trees[{index}]: expected sizes named {', '.join(expected)}, received '{unknown[0]}'"
        places = list(self.ops())
        for where, op in places:
            missing = [dim for dim in dim_names(op.op.partition(".")[0]) if dim not in op.dims]
            if missing:
                yield f"{where}: expected a size for {missing[0]}, received {op.dims}"
        given = self.kernels_at(op for _, op in places)
        for (where, op), kernel_id in zip(places, given, strict=True):
            if kernel_id != op.kernel_id:
                yield f"{where}: expected {op.kernel_id} in the tree of its kind, received {kernel_id or 'no kernel'}"

    def _table_problems(self) -> Iterator[str]:
        if self.hardware_signature is None or self.capabilities_hash is None:
            yield "expected a hardware signature and a capabilities hash, received null"
            return
        platform = self.hardware_signature.partition("_")[0]
        signature = hardware("cuda" if platform == "rocm" else platform).signature()
        if signature != self.hardware_signature:
            yield f"expected the hardware that it was solved on, {self.hardware_signature}, received {signature}"
        if self.capabilities_hash != registry.digest():
            differences = [str(found) for each in self.kernels if (found := each.difference()) is not None]
            what = "; ".join(differences) or "kernels came, went or changed that it does not name"
            hashes = f"{self.capabilities_hash[:12]}, received {registry.digest()[:12]}"
            yield f"expected kernels with the capabilities hash {hashes}: {what}"

    def _platforms(self) -> list[str]:
        """The types of device that it is about, as torch calls them."""
        named = dict.fromkeys(op.platform for _, op in self.ops())
        return ["cuda" if platform == "rocm" else platform for platform in named]

    def _lock_problems(self) -> Iterator[str]:
        known = {(each.op, each.kernel_id) for each in self.kernels}
        for where, op in self.ops():
            key = (op.op.partition(".")[0], op.kernel_id)
            if key not in known and op.kernel_id != "inductor":
                yield f"{where}: expected {op.kernel_id} among its kernels, received {_names(self.kernels)}"
        here = tuple(hardware(platform).kind() for platform in self._platforms())
        covered = {kind for each in self.kernels for kind in each.hardware or ()}
        needed = [each for each in self.kernels if covered.isdisjoint(here) or _meet(each.hardware, here)]
        hindrances = [str(found) for each in needed if (found := each.hindrance()) is not None]
        if hindrances:
            yield f"expected the kernels that it was made with, received {'; '.join(hindrances)}"


def _meet(wanted: tuple[str, ...] | None, given: tuple[str, ...]) -> bool:
    """Whether what is for some kinds of device (None: all) is for one of those given."""
    return wanted is None or not {*wanted}.isdisjoint(given)


def read(path: str | os.PathLike[str]) -> DispatchTable:
    """The table in a file, whether it holds here or not.

    Raises:
        DispatchTableError: the file cannot be read, or is no dispatch table of this schema.
    """
    try:
        data = read_bounded(Path(path).expanduser(), MAX_BYTES)
    except (OSError, TooLargeError) as error:
        raise DispatchTableError(path, f"expected a file of decisions, received {error}") from error
    try:
        record = msgspec.json.decode(data)
        version = record.get("schema_version") if isinstance(record, dict) else None
        if version != SCHEMA_VERSION:
            raise DispatchTableError(path, f"expected schema_version '{SCHEMA_VERSION}', received {version!r}")
        table = msgspec.convert(record, DispatchTable)
        for kind in table.trees:
            decision_tree.from_dict(kind.tree)
    except DispatchTableError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DispatchTableError(path, f"expected a dispatch table as JSON, received one with: {error}") from error
    return table


def _names(kernels: Sequence[KernelIdentity]) -> str:
    return ", ".join(each.kernel_id for each in kernels) or "none"
