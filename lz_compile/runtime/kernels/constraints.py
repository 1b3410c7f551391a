"""What speaks against running a problem on a kernel: every reason, not only the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from lz_compile.errors import FormulaError
from lz_compile.ground import events, formulas
from lz_compile.ground.records import Reason
from lz_compile.runtime.problem.context import Dim, SelectionContext, lower, upper

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec

#: Limits of a launch, the same for every SM version since 7.5 (CUDA C++ programming guide, compute capabilities).
MAX_BLOCKS: Mapping[str, int] = {"x": 2**31 - 1, "y": 65535, "z": 65535}
MAX_THREADS = 1024
#: Major and minor version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

#: Layouts that every adapter turns into one another with a transpose, which moves nothing.
TRANSPOSED = frozenset({"BHSD", "BSHD"})


def reasons(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    """Every reason why a kernel cannot run a problem, from the outside in."""
    for check in (_operation, _hardware, _dtype, _sizes, _features, _memory_order, _execution, _memory, _launch):
        yield from check(kernel, context)
    unavailable = kernel.availability()
    if unavailable is not None:
        yield unavailable
    yield from _extra(kernel, context)


def faults_of_torch(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    """Why a compiled graph must not hold a kernel in this version of PyTorch, though the kernel itself could run."""
    is_double = context.dtype_name == "float64" and context.hardware.platform == "cpu" and context.is_training
    if kernel.kernel_id == "torch.sdpa" and is_double and TORCH < (2, 13):
        text = "Inductor before PyTorch 2.13 compiles no gradients of SDPA in float64 on a CPU (expected Double, found Float)"
        yield Reason("TORCH_TOO_OLD", text)


def _operation(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    if kernel.operation not in (context.op, context.operation):
        yield Reason("VARIANT_UNSUPPORTED", f"{kernel.kernel_id} computes {kernel.operation}, not {context.operation}")
    missing = ", ".join(sorted({*kernel.fuses_ops} - {*context.fusable}))
    if missing:
        text = f"{kernel.kernel_id} computes {missing} along, which does not come directly before or beside"
        yield Reason("NOTHING_TO_FUSE", text)


def _hardware(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    device, name = context.hardware, kernel.kernel_id
    if not {"*", device.platform} & kernel.platforms:
        text = f"{name} runs on {_listed(kernel.platforms)}, not {device.platform}"
        yield Reason("PLATFORM_MISMATCH", text)
        return
    if device.platform == "cuda":
        yield from _architecture(kernel, context)
    is_gpu = device.platform in ("cuda", "rocm")
    if is_gpu and kernel.supported_generations and device.generation not in kernel.supported_generations:
        generation = device.generation or "an unknown generation"
        text = f"{name} supports {_listed(kernel.supported_generations)}, not {generation}"
        yield Reason("GPU_GENERATION_UNSUPPORTED", text)
    if device.platform == "cpu" and not kernel.requires_isa <= device.isa:
        text = (
            f"{name} needs {_listed(kernel.requires_isa - device.isa)}, this CPU has {_listed(device.isa) or 'nothing'}"
        )
        yield Reason("ISA_UNSUPPORTED", text)


def _architecture(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    device, name = context.hardware, kernel.kernel_id
    version = device.sm_version
    have = "a device that reports none" if version is None else f"SM{version}"
    if kernel.min_sm is not None and (version is None or version < kernel.min_sm):
        yield Reason("SM_TOO_OLD", f"{name} requires SM{kernel.min_sm}+, this is {have}")
    if kernel.max_sm is not None and (version is None or version >= kernel.max_sm):
        yield Reason("SM_TOO_NEW", f"{name} requires SM<{kernel.max_sm}, this is {have}")
    least, found = kernel.min_tensor_core_generation, device.tensor_core_generation
    if least is not None and (found is None or found < least):
        text = f"{name} requires tensor cores of generation {least}+, this has {found or 'none that is known'}"
        yield Reason("TENSOR_CORE_GEN_UNSUPPORTED", text)
    if kernel.instruction_set is not None and kernel.instruction_set not in device.instruction_sets:
        text = f"{name} uses {kernel.instruction_set}, {have} has {_listed(device.instruction_sets) or 'none that is known'}"
        yield Reason("INSTRUCTION_SET_MISMATCH", text)


def _dtype(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    if not {"*", context.dtype_name} & kernel.dtypes:
        text = f"{kernel.kernel_id} takes {_listed(kernel.dtypes)}, not {context.dtype_name}"
        yield Reason("DTYPE_UNSUPPORTED", text)


def _sizes(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    name = kernel.kernel_id
    head_dim = context.dims.get("head_dim")
    value_dim = context.dims.get("value_dim", head_dim)
    wanted = {"head_dim": head_dim, **({} if value_dim == head_dim else {"value_dim": value_dim})}
    least, most, multiple = kernel.min_head_dim or 0, kernel.max_head_dim, kernel.head_dim_multiple
    is_limited = kernel.min_head_dim is not None or most is not None
    for label, dim in wanted.items():
        if dim is None:
            if is_limited or multiple > 1:
                yield Reason("HEAD_DIM_INVALID", f"{name} has limits for {label}, which this problem does not have")
            continue
        if is_limited and not _is_within(dim, least, most):
            text = f"{label} {dim}, {name} takes {least}..{'any' if most is None else most}"
            yield Reason("HEAD_DIM_INVALID", text)
        if not _is_multiple(dim, multiple):
            yield Reason("HEAD_DIM_ALIGNMENT", f"{label} {dim}, {name} takes multiples of {multiple}")
    for label, of in kernel.multiples.items():
        dim = context.dims.get(label)
        if dim is None or not _is_multiple(dim, of):
            yield Reason("SIZE_ALIGNMENT", f"{label} {dim}, {name} takes multiples of {of}")
    for label, (least, most) in kernel.limits.items():
        dim = context.dims.get(label)
        if dim is None or not _is_within(dim, least, most):
            yield Reason("SIZE_INVALID", f"{label} {dim}, {name} takes {least}..{'any' if most is None else most}")
    for label in ("seq_len_q", "seq_len_k") if kernel.max_seq_len is not None else ():
        dim = context.dims.get(label)
        if dim is None or not _is_within(dim, 0, kernel.max_seq_len):
            yield Reason("SEQ_TOO_LONG", f"{label} {dim}, {name} takes up to {kernel.max_seq_len}")


def _features(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    name = kernel.kernel_id
    if "*" not in kernel.supports:
        # Of a registered function every proof shows what it makes of NaN; nobody needs to declare that.
        known = kernel.supports if kernel.is_described else {*kernel.supports, "nan_rows", "nan_in_few_keys"}
        for feature, cause in context.features.items():
            if feature not in known:
                yield Reason(f"{feature.upper()}_UNSUPPORTED", f"{name} does not take {cause}")
    present = context.features.keys() | ({"batch_invariant"} if context.requires_batch_invariant else set())
    for feature, needed in kernel.requires_features.items():
        missing = ", ".join(sorted(needed - present))
        if missing and feature == "*":
            yield Reason("FEATURE_MISSING", f"{name} is for {missing}")
        elif missing and feature in context.features:
            yield Reason("FEATURE_MISSING", f"{name} takes {context.features[feature]} only together with {missing}")
    if context.has_custom_scale and not kernel.supports_scale:
        yield Reason("SCALE_UNSUPPORTED", f"{name} does not take a scale other than head_dim ** -0.5")


def _memory_order(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    name, taken = kernel.kernel_id, kernel.requires_layouts
    is_transposed = context.layout in TRANSPOSED and bool(taken & TRANSPOSED)
    if not {"*", context.layout} & taken and not is_transposed:
        yield Reason("LAYOUT_UNSUPPORTED", f"{name} takes {_listed(taken)}, not {context.layout}")
    if kernel.requires_last_dim_stride1 and not context.is_last_dim_contiguous:
        yield Reason("STRIDE_LAST_DIM", f"{name} needs stride 1 in the last dimension of query, key and value")


def _execution(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    if context.is_cuda_graph_capturing and not kernel.is_cuda_graph_safe:
        yield Reason("CUDA_GRAPH_UNSAFE", f"{kernel.kernel_id} is not safe to capture in a CUDA graph")
    if context.requires_deterministic and not kernel.deterministic:
        yield Reason("NON_DETERMINISTIC", f"{kernel.kernel_id} does not give the same bits for the same inputs")
    if context.requires_batch_invariant and not (kernel.batch_invariant and kernel.split_invariant):
        yield Reason("NOT_BATCH_INVARIANT", f"{kernel.kernel_id} may give a row other bits in another batch")


def _memory(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    headroom = context.memory_headroom_bytes
    if headroom is None:
        return
    try:
        needed = kernel.workspace_bytes(context)
    except FormulaError as error:
        yield Reason("CONSTRAINT_FAILED", f"{kernel.kernel_id}: workspace: {error}")
        return
    if needed > headroom:
        text = f"{kernel.kernel_id} needs {needed} bytes of workspace, the headroom is {headroom}"
        yield Reason("MEMORY_HEADROOM_EXCEEDED", text)


def _launch(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    """Every reason why CUDA would refuse the launch: blocks along a dimension, threads in a block."""
    grid = kernel.grid
    if grid is None or context.hardware.platform not in ("cuda", "rocm"):
        return
    sizes = context.sizes()
    limits = [
        (axis, getattr(grid, axis), most, "CUDA_GRID_DIM_EXCEEDED", "blocks") for axis, most in MAX_BLOCKS.items()
    ]
    limits.append(("threads", grid.threads, MAX_THREADS, "CUDA_BLOCK_LIMIT_EXCEEDED", "threads"))
    for axis, formula, most, code, unit in limits:
        if formula is None:
            continue
        try:
            count = formulas.evaluate(formula, sizes)
        except FormulaError as error:
            yield Reason("CONSTRAINT_FAILED", f"{kernel.kernel_id}: grid: {error}")
            continue
        if count > most:
            where = "a block" if unit == "threads" else f"grid dimension {axis}"
            yield Reason(code, f"{kernel.kernel_id} needs {count} {unit} in {where}, the limit is {most}")


def _extra(kernel: KernelSpec, context: SelectionContext) -> Iterator[Reason]:
    if kernel.extra_check is None:
        return
    try:
        yield from list(kernel.extra_check(context))
    except Exception as error:  # noqa: BLE001 a check of someone else's that fails refuses, it breaks no compile
        text = f"the check of {kernel.kernel_id} failed"
        events.record("CONSTRAINT_FAILED", text, error)
        yield Reason("CONSTRAINT_FAILED", f"{text}: {type(error).__name__}: {error}")


def _is_within(dim: Dim, least: int, most: int | None) -> bool:
    """Whether a size lies within limits, whatever a symbol turns out to be."""
    largest = upper(dim)
    return lower(dim) >= least and (most is None or (largest is not None and largest <= most))


def _is_multiple(dim: Dim, of: int) -> bool:
    return dim % of == 0 if isinstance(dim, int) else dim.divisor % of == 0


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
