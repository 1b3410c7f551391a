"""Capabilities descriptors: what every kernel can do, as data. Unknown keys, missing limits and other versions are refused.

A descriptor is a JSON file beside an adapter of the same name. Its schema is published as
``lowering/kernels.schema.json``; :func:`write_schema` renews it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from lz_compile.errors import CapabilitiesError, FormulaError, no_such
from lz_compile.ground import formulas
from lz_compile.ground.files import TooLargeError, read_bounded
from lz_compile.lowering import ops
from lz_compile.runtime.problem.context import SelectionContext, dim_names, operations

SCHEMA_VERSION = "1.0"
#: Of a descriptor.
MAX_BYTES = 4 << 20
SCHEMA = Path(__file__).resolve().parents[2] / "lowering" / "kernels.schema.json"

ANY = "*"
Platform: TypeAlias = Literal["cpu", "cuda", "rocm", "xpu", "mps", "*"]
Dtype: TypeAlias = Literal[
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
    "uint8",
    "*",
]
#: The end of a text for Python and for JSON Schema: ``$`` stands before a last newline, too, in Python.
_END = r"(?![\s\S])"
Layout: TypeAlias = Annotated[
    str, Meta(pattern=rf"^([A-Z]+|\*){_END}", max_length=20)
]  # a letter per dimension; of which, the op says
Scalar: TypeAlias = bool | int | float | str

#: Fields of other formats from which nothing would follow here, and why.
WITHOUT_MEANING: Mapping[str, str] = {
    "transform_cost_hint": "what another layout costs is part of what is measured",
    "produces_layout": "an adapter gives its result in the op's layout",
}
#: Platforms on which SM versions and generations mean something.
GPUS = frozenset({"cuda", "rocm"})

Count = Annotated[int, Meta(ge=1)]
Formula = Annotated[str, Meta(min_length=1, max_length=200, description="integers, names of sizes, + - * // min max")]
Name = Annotated[str, Meta(pattern=f"^[a-z][a-z0-9_]*{_END}", max_length=100)]
Feature: TypeAlias = Annotated[str, Meta(pattern=rf"^(\*|[a-z][a-z0-9_]*){_END}", max_length=100)]


class Prior(Struct, frozen=True, forbid_unknown_fields=True):
    """What to expect of a kernel before anything was measured here: latency relative to Inductor's own code."""

    # Of several rows that fit, the last one counts.

    platform: Platform
    dtypes: Annotated[frozenset[Dtype], Meta(min_length=1)]
    relative_latency: Annotated[float, Meta(gt=0)]
    features: Annotated[frozenset[Name], Meta(description="what a problem must have")] = frozenset()
    features_absent: Annotated[frozenset[Name], Meta(description="what a problem must not have")] = frozenset()
    limits: Annotated[dict[Name, tuple[int, int | None]], Meta(description="the least and the most of sizes")] = {}
    isa: Annotated[frozenset[Name], Meta(description="instruction sets that a CPU must have")] = frozenset()
    isa_absent: Annotated[frozenset[Name], Meta(description="instruction sets that a CPU must not have")] = frozenset()
    is_captured: Annotated[
        bool, Meta(description="only where a CUDA graph is captured: the host's time counts for nothing")
    ] = False

    def fits(self, context: SelectionContext, sizes: Mapping[str, int]) -> bool:
        """Whether this row speaks of a problem: of its platform, dtype, features and sizes."""
        return (
            self.platform in ("*", context.hardware.platform)
            and bool({"*", context.dtype_name} & self.dtypes)
            and self.features <= context.features.keys()
            and not self.features_absent & context.features.keys()
            and self.isa <= context.hardware.isa
            and not self.isa_absent & context.hardware.isa
            and (context.is_cuda_graph_capturing or not self.is_captured)
            and all(
                least <= sizes.get(name, 0) and (most is None or sizes.get(name, 0) <= most)
                for name, (least, most) in self.limits.items()
            )
        )


class Grid(Struct, frozen=True, forbid_unknown_fields=True):
    """How many blocks a CUDA kernel launches along each dimension, and how many threads a block has."""

    x: Formula
    y: Formula | None = None
    z: Formula | None = None
    threads: Formula | None = None


class Kernel(Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel for one operation. What is not listed is not supported; ``*`` stands for everything."""

    kernel_id: Annotated[str, Meta(pattern=rf"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)*{_END}", max_length=100)]
    platforms: Annotated[frozenset[Platform], Meta(min_length=1)]
    dtypes: Annotated[frozenset[Dtype], Meta(min_length=1)]
    requires_layouts: Annotated[
        frozenset[Layout],
        Meta(min_length=1, description="layouts that the library takes; an adapter transposes between BHSD and BSHD"),
    ]
    function: Annotated[
        str | UnsetType | None,
        Meta(description="in the adapter; the op's name by default, null for a kernel that leaves the subgraph alone"),
    ] = UNSET
    supports: frozenset[Feature] = frozenset()
    requires_features: Annotated[
        dict[Feature, Annotated[frozenset[Name], Meta(min_length=1)]],
        Meta(description="what a problem must have besides a feature of it; under * whatever it has"),
    ] = {}
    min_sm: Annotated[int, Meta(ge=1, description="SM version, 80 for 8.0")] | None = None
    max_sm: Annotated[int, Meta(ge=1, description="the first SM version that is too new")] | None = None
    supported_generations: Annotated[frozenset[str], Meta(description="empty: all")] = frozenset()
    min_tensor_core_generation: Count | None = None
    instruction_set: Literal["mma.sync", "wgmma", "tcgen05.mma"] | None = None
    requires_isa: Annotated[frozenset[Name], Meta(description="of a CPU, all of them")] = frozenset()
    min_head_dim: Count | None = None
    max_head_dim: Count | None = None
    head_dim_multiple: Count = 1
    multiples: Annotated[dict[Name, Count], Meta(description="what other sizes must be multiples of")] = {}
    limits: Annotated[dict[Name, tuple[int, int | None]], Meta(description="the least and the most of sizes")] = {}
    max_seq_len: Count | None = None
    requires_last_dim_stride1: bool = False
    is_cuda_graph_safe: bool = False
    deterministic: Annotated[
        bool,
        Meta(description="same bits for same inputs, at least while torch.use_deterministic_algorithms is on"),
    ] = False
    batch_invariant: Annotated[
        bool,
        Meta(
            description="the bits of a row depend neither on the other rows and their number, nor on chunks of a prefill"
        ),
    ] = False
    split_invariant: Annotated[
        bool, Meta(description="the bits of a row do not depend on how many threads or blocks share its keys")
    ] = False
    is_opaque: Annotated[bool, Meta(description="a call that Inductor cannot fuse into")] = True
    priority: Annotated[int, Meta(ge=0, le=100)] = 50
    fuses_ops: tuple[str, ...] = ()
    workspace: Annotated[Formula, Meta(description="bytes beside operands and result")] = "0"
    grid: Grid | None = None
    validation_arguments: Annotated[
        dict[str, Scalar], Meta(description="make the small sizes of a proof meet what large ones meet")
    ] = {}
    prior: tuple[Prior, ...] = ()
    prior_source: str = ""


class Descriptor(Struct, frozen=True, forbid_unknown_fields=True):
    """The kernels of one source.

    ``package`` is the distribution that must be installed, ``backend_version`` the versions of it that will do (PEP 440),
    ``module`` what must import before the adapter is used. An operation is an op, a variant of one, or ``*`` for every op.
    """

    schema_version: Literal["1.0"]
    backend: Annotated[str, Meta(pattern=f"^[a-z][a-z0-9_.]*{_END}", max_length=100)]
    source: Annotated[str, Meta(min_length=10, description="what this is and where its limits were read")]
    ops: Annotated[dict[str, Annotated[tuple[Kernel, ...], Meta(min_length=1)]], Meta(min_length=1)]
    package: str | None = None
    module: str | None = None
    backend_version: str | None = None

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Every kernel with its operation, one for each op where the operation is ``*``."""
        for operation, kernels in self.ops.items():
            for each in ops.names() if operation == ANY else [operation]:
                yield from ((each, kernel) for kernel in kernels)


class _Head(Struct):
    schema_version: Any = None


_head = msgspec.json.Decoder(_Head)
_descriptor = msgspec.json.Decoder(Descriptor)


def read(path: Path) -> Descriptor:
    """The descriptor in a file.

    Raises:
        CapabilitiesError: it is not there, of another version, or says something wrong.
    """
    try:
        return parse(read_bounded(path, MAX_BYTES), path.name)
    except (OSError, TooLargeError) as error:
        raise CapabilitiesError(path.name, f"{type(error).__name__}: {error}") from error


def parse(text: bytes, name: str) -> Descriptor:
    """A descriptor from JSON; ``name`` is what errors call it.

    Raises:
        CapabilitiesError: it is of another version, or says something wrong.
    """
    try:
        version = _head.decode(text).schema_version
        if version != SCHEMA_VERSION:
            raise CapabilitiesError(name, f"expected schema_version {SCHEMA_VERSION}, received {version}")
        descriptor = _descriptor.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        refused = (
            f". Leave it out: {why}" for field, why in WITHOUT_MEANING.items() if f"field `{field}`" in str(error)
        )
        raise CapabilitiesError(name, f"{error}{next(refused, '')}") from error
    for problem in _problems(descriptor):
        raise CapabilitiesError(name, problem)
    return descriptor


def build(values: Mapping[str, Any]) -> Descriptor:
    """A descriptor from Python values.

    Raises:
        ValueError: with what is wrong.
    """
    descriptor = msgspec.convert({"schema_version": SCHEMA_VERSION, **values}, Descriptor)
    for problem in _problems(descriptor):
        raise ValueError(problem)
    return descriptor


def digest(descriptor: Descriptor) -> str:
    """A hash of what a descriptor says; formatting and the order of keys make no difference."""
    return hashlib.sha256(msgspec.json.encode(descriptor, order="deterministic")).hexdigest()


def _problems(descriptor: Descriptor) -> Iterator[str]:
    """What the types of the fields cannot say."""
    for operation in descriptor.ops:
        if operation != ANY and operation not in operations():
            yield no_such("operation", operation, operations())
            return
        for kernel in descriptor.ops[operation] if operation != ANY else ():
            yield from _layout_problems(operation.partition(".")[0], kernel)
    seen: set[tuple[str, str]] = set()
    for operation, kernel in descriptor.kernels():
        op = operation.partition(".")[0]
        if (op, kernel.kernel_id) in seen:
            yield f"kernel_id '{kernel.kernel_id}' stands twice for {op}"
        seen.add((op, kernel.kernel_id))
        yield from (f"{kernel.kernel_id}: {problem}" for problem in _kernel_problems(op, kernel))
    if descriptor.backend_version is not None and descriptor.package is None:
        yield "backend_version needs the package whose version it is about"


_BOUNDS = (("min_sm", "max_sm"), ("min_head_dim", "max_head_dim"))


def _kernel_problems(op: str, kernel: Kernel) -> Iterator[str]:
    for field in ("platforms", "dtypes", "requires_layouts", "supports"):
        values = getattr(kernel, field)
        if ANY in values and len(values) > 1:
            yield f"'*' in {field} stands for everything and so stands alone"
    if not GPUS & kernel.platforms:
        for field in "min_sm max_sm supported_generations min_tensor_core_generation instruction_set grid".split():
            if getattr(kernel, field):
                yield f"{field} needs the platform cuda or rocm"
    if "cpu" not in kernel.platforms and kernel.requires_isa:
        yield "requires_isa needs the platform cpu"
    bounds = [(a, getattr(kernel, a), b, getattr(kernel, b)) for a, b in _BOUNDS]
    bounds += [(f"limits: the least {name}", of[0], "the most", of[1]) for name, of in kernel.limits.items()]
    for least, first, most, last in bounds:
        if first is not None and last is not None and first > last:
            yield f"{least} {first} is above {most} {last}"
    named = {("prior", name) for row in kernel.prior for name in row.limits}
    named |= {(field, name) for field in ("multiples", "limits") for name in getattr(kernel, field)}
    for field, name in sorted(each for each in named if each[1] not in dim_names(op)):
        yield f"{field}: {no_such('size', name, dim_names(op))}"
    grid = kernel.grid or Grid("0")
    for formula in (kernel.workspace, grid.x, grid.y, grid.z, grid.threads):
        if formula is not None:
            try:
                formulas.check(formula, (*dim_names(op), "dtype_bytes"))
            except FormulaError as error:
                yield str(error)


def _layout_problems(op: str, kernel: Kernel) -> Iterator[str]:
    """Layouts that are neither the op's own nor those of libraries."""
    module = ops.module(op)
    valid = (module.LAYOUT, *getattr(module, "LIBRARY_LAYOUTS", ()))
    for name in sorted({*kernel.requires_layouts} - {ANY, *valid}):
        yield f"{kernel.kernel_id}: {no_such('layout', name, valid)}"


def schema() -> dict[str, Any]:
    """The JSON Schema of descriptors (draft 2020-12)."""
    found = msgspec.json.schema(Descriptor)
    for definition in found["$defs"].values():  # Python 3.13 dedents docstrings by itself
        definition["description"] = inspect.cleandoc(definition["description"])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Capabilities of kernels for lz_compile",
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({**head, **found}, order="deterministic"))
    return plain


def write_schema() -> None:
    """Renew the published schema."""
    SCHEMA.write_bytes(msgspec.json.format(msgspec.json.encode(schema()), indent=2) + b"\n")
