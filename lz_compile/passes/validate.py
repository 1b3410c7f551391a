"""Prove a rewrite numerically before it is accepted.

The original subgraph and its replacement run at small sizes on adversarial inputs: rows that are masked completely, large
magnitudes, unusual strides, extents of one. Both are held against the original in float64. The replacement may round
less than the original, never noticeably more; where gradients are on, the same holds for them.

Results are remembered by structure, in memory and on disk, so that equal layers and later processes pay nothing.
"""

from __future__ import annotations

import hashlib
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import fx

from lz_compile.lowering import ops
from lz_compile.passes.axes import Axis, Dims, axes_of
from lz_compile.passes.effects import grad_enabled
from lz_compile.passes.match import Match
from lz_compile.passes.proof_run import run as run_side
from lz_compile.passes.proof_run import run_kernel
from lz_compile.passes.resize import Sizes, original, real_sizes, replacement, representative_sizes, shape
from lz_compile.passes.rewrite import KernelCall
from lz_compile.passes.view import hint_of, target_name, tensor_of, value_of
from lz_compile.runtime import machine
from lz_compile.runtime.isolation import Outside, isolated
from lz_compile.runtime.kernel import KernelSpec
from lz_compile.runtime.store import Store

#: Absolute and relative slack against the float64 reference, by dtype. On top of it a replacement may err :data:`SLACK`
#: times as much as the original itself does. ARCHITECTURE.md tells users. Integers are equal to those of one of the two.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
}


#: Two correct orders of the same sums differ by a few times what either differs from the truth.
SLACK = 4

_Error = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Validation:
    """The verdict on one rewrite.

    ``error`` and ``source_error`` are the largest absolute deviations from float64 (of outputs) of the replacement and of
    the original; ``grad_error`` that of gradients. ``reason`` says what failed. ``origin`` is ``"run"``, ``"memory"`` or
    ``"disk"``, ``seconds`` what it cost now.
    """

    ok: bool
    error: float = 0.0
    source_error: float = 0.0
    grad_error: float | None = None
    cases: int = 0
    reason: str = ""
    origin: str = "run"
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            "ok": self.ok,
            "error": self.error,
            "source_error": self.source_error,
            "grad_error": self.grad_error,
            "cases": self.cases,
            "reason": self.reason,
            "origin": self.origin,
            "seconds": round(self.seconds, 4),
        }


@dataclass(frozen=True)
class Case:
    """One set of adversarial inputs.

    Operands are of size ``magnitude``: what rounding does to the result grows with a power of that which the op says
    (``ROUNDING_POWER``), by no more than the result itself does where it says none.

    ``is_poisoned``: a row of the query is NaN, and so are keys that a selecting mask drops. ``points`` are numbers that
    some of the elements are, exactly.
    """

    name: str
    magnitude: float = 1.0
    masked_rows: bool = False
    infinite: bool = False
    is_strided: bool = False
    ones: bool = False
    is_poisoned: bool = False
    gradients: bool = False
    points: tuple[float, ...] = ()


_memory: dict[str, Validation] = {}


def forget() -> None:
    """Drop what was remembered in memory (not on disk)."""
    _memory.clear()


def validate(match: Match, kernel: KernelSpec, call: KernelCall, store: Store | None) -> Validation:
    """Whether ``call``, which is that of a kernel, may replace ``match``.

    It is remembered by structure, dtypes, attributes, modes, machine, kernel and source version; what is not shipped with
    this package is also tried at the real sizes, and remembered for these.

    Raises:
        TrialError: the kernel failed, or nothing can be found out about it.
        Exception: what the kernel raises.
    """
    real = None if kernel.is_shipped else real_sizes(match)
    return recalled(_key(match, kernel.identity, real), store, lambda: _run(match, kernel, call, real))


def recalled(key: str, store: Store | None, run: Callable[[], Validation]) -> Validation:
    """The verdict that is known under a key, in memory or on disk; else that of ``run``, which is known from then on."""
    start = time.perf_counter()
    known = _memory.get(key)
    if known is not None:
        return replace(known, origin="memory", seconds=time.perf_counter() - start)
    verdict = None if store is None else _stored(store, key)
    if verdict is not None:
        _memory[key] = verdict
        return replace(verdict, origin="disk", seconds=time.perf_counter() - start)
    verdict = run()
    _memory[key] = verdict
    if store is not None:
        store.save(key, verdict.to_dict())
    return replace(verdict, seconds=time.perf_counter() - start)


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A verdict on disk: :meth:`Validation.to_dict`, of a run that tried something."""

    ok: bool
    error: _Error
    source_error: _Error
    grad_error: _Error | None
    cases: Annotated[int, msgspec.Meta(ge=1)]
    reason: str
    origin: Literal["run"]
    seconds: _Error


def _stored(store: Store, key: str) -> Validation | None:
    record = store.load(key, _Record)
    return None if record is None else Validation(**msgspec.structs.asdict(record))


def cases(match: Match) -> Iterator[Case]:
    """The input sets that a match is tried on."""
    wants_grad = any(_wants_grad(node) for node in match.inputs) and grad_enabled(match.ambient)
    has_mask = any(_is_mask(node) or node in match.fills for node in match.inputs)
    yield Case("plain", gradients=wants_grad)
    # In half precision larger scores are rounded by whole units, and which key wins a row is a matter of luck.
    is_half = any(
        tensor.dtype.itemsize == 2 for tensor in map(tensor_of, match.operands.values()) if tensor is not None
    )
    yield Case(
        "large", magnitude=4.0 if is_half else 12.0, is_strided=True, is_poisoned=bool(match.rows or match.dropped)
    )
    is_apart = len(set(match.operands.values())) == len(match.operands) and "key_documents" not in match.operands
    if is_apart:  # a tensor in two roles has each extent twice, and documents are those of the same tokens
        yield Case("ones", ones=True)
    if match.points:
        yield Case("corners", points=match.points, gradients=wants_grad)
    yield from (Case(f"magnitude {size:.0e}", magnitude=size, gradients=wants_grad) for size in match.magnitudes)
    if has_mask and match.masked_rows_count:
        # A row that is masked by -inf has NaN gradients, whatever computes them.
        yield Case("masked rows", masked_rows=True, gradients=wants_grad and match.masked_rows_are_finite)
    if match.masked_rows_count and any(not is_finite for is_finite in match.fills.values()):
        yield Case("infinite fills", masked_rows=True, infinite=True)


def _run(match: Match, kernel: KernelSpec, call: KernelCall, real: Sizes | None) -> Validation:
    total = Validation(ok=True)
    tried = list(cases(match))  # which gradients are wanted, is decided outside
    if real is not None:
        tried.append(replace(tried[0], name="real sizes"))
    with isolated() as outside:
        for case in tried:
            small = representative_sizes(match, ones=_some_axes(match) if case.ones else frozenset())
            sizes = real if real is not None and case is tried[-1] else small
            total = _merge(total, _run_case(match, kernel, call, case, sizes, outside))
            if not total.ok:
                break
    return total


def _merge(total: Validation, case: Validation) -> Validation:
    grads = [error for error in (total.grad_error, case.grad_error) if error is not None]
    return replace(
        total,
        ok=case.ok,
        error=max(total.error, case.error),
        source_error=max(total.source_error, case.source_error),
        grad_error=max(grads) if grads else None,
        cases=total.cases + 1,
        reason=case.reason,
    )


def _run_case(
    match: Match, kernel: KernelSpec, call: KernelCall, case: Case, sizes: Sizes, outside: Outside
) -> Validation:
    inputs = _inputs(match, sizes, case)
    replaced = partial(run_side, replacement(match, call, sizes), match, inputs, sizes)
    ours = run_kernel(kernel, _devices(match), partial(replaced, gradients=case.gradients, outside=outside))
    given = run_side(original(match, sizes).forward, match, inputs, sizes, gradients=case.gradients, outside=outside)
    exact = original(match, sizes, torch.float64).forward  # calling the module prints what the graph raises
    truth = run_side(exact, match, _as_float64(inputs), sizes, gradients=case.gradients)
    if ours.written:
        return Validation(ok=False, reason=f"it writes into {', '.join(ours.written)}, with {case.name}")
    if ours.is_view and not given.is_view:
        return Validation(ok=False, reason=f"its result lies in the memory of an input, with {case.name}")
    return _compared(match, case, truth.values, given.values, ours.values)


def _compared(
    match: Match,
    case: Case,
    truth: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    ours: Sequence[torch.Tensor],
) -> Validation:
    """The verdict on results: float64's, the source's and the kernel's."""
    outputs = [tensor_of(node) for node in match.outputs]
    grown = max(case.magnitude, 1.0) ** getattr(ops.module(match.op), "ROUNDING_POWER", 0)
    verdict = Validation(ok=True)
    for index, (name, expected, base, actual) in enumerate(zip(_names(match, case), truth, given, ours, strict=True)):
        output = outputs[index] if index < len(outputs) else None
        slack = TOLERANCE.get(base.dtype if output is None else output.dtype, 0.0) * grown
        # A lowest number that is added to float16 scores may overflow by rounding; one that is filled in does not.
        outcome = compare(expected, base, actual, slack, not case.masked_rows, not match.fills, case.is_poisoned)
        if output is not None:
            errors = max(verdict.error, outcome[0]), max(verdict.source_error, outcome[1])
            verdict = replace(verdict, error=errors[0], source_error=errors[1])
        else:
            verdict = replace(verdict, grad_error=max(verdict.grad_error or 0.0, outcome[0]))
        if not outcome[2]:
            text = f"{name} with {case.name}: off by {outcome[0]:.3g} where the source is off by {outcome[1]:.3g}"
            return replace(verdict, ok=False, reason=text)
    return verdict


def _some_axes(match: Match) -> frozenset[Axis]:
    """Half of the row axes of the output: the broadcasts that a size of one may turn on."""
    axes = [axis for axis in axes_of(match.output_dims) if axis.size != 1 and axis not in match.fixed]
    return frozenset(axes[::2])


def compare(
    truth: torch.Tensor,
    given: torch.Tensor,
    ours: torch.Tensor,
    tolerance: float,
    may_overflow: bool,
    keeps_nan: bool,
    is_poisoned: bool,
) -> tuple[float, float, bool]:
    """Largest error of ours and of the original against float64, and whether ours is acceptable everywhere.

    Where the original overflows (``may_overflow``: nothing but overflow makes infinities or NaN here), ours may be finite.
    Where it does not, ours is NaN where the original is, even if float64 is not (``keeps_nan``), and the NaN of what
    ``is_poisoned`` stays, unless everything is NaN.
    """
    is_counted = not given.dtype.is_floating_point and not given.is_complex()
    truth, given, ours = truth.double(), given.double(), ours.double()
    source_error = 0.0 if is_counted else _finite_max((given - truth).abs())
    slack = SLACK * source_error + tolerance * (1 + truth.abs())
    near = ((ours - truth).abs() <= slack) | ((ours - given).abs() <= tolerance * (1 + given.abs()))
    if keeps_nan and not may_overflow:
        near &= ~given.isnan()
    same_special = (ours.isnan() & (truth.isnan() | given.isnan())) | (ours == truth) | (ours == given)
    overflowed = ours.isfinite() & ~(truth.isfinite() & given.isfinite()) if may_overflow else torch.zeros_like(near)
    if not (is_poisoned and truth.isnan().all()):
        overflowed &= ~truth.isnan()  # NaN in float64 is no overflow
    return _finite_max((ours - truth).abs()), source_error, bool((near | same_special | overflowed).all())


def _finite_max(error: torch.Tensor) -> float:
    finite = error[error.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


# ---- inputs --------------------------------------------------------------------------------------------------------


def _inputs(match: Match, sizes: Sizes, case: Case) -> list[Any]:
    return [_input(match, node, sizes, case) for node in match.inputs]


def _input(match: Match, node: fx.Node, sizes: Sizes, case: Case) -> Any:
    example = value_of(node)
    if not isinstance(example, torch.Tensor):
        return hint_of(node)
    extents = shape(match.inputs[node], sizes)
    if example.dtype == torch.bool:
        keep = _mask(extents, example.device, case.masked_rows)
        if case.is_poisoned and node in match.selecting:
            for position in _dropped(match, sizes):
                if position.keys() & set(axes_of(match.inputs[node])):
                    _at(keep, match.inputs[node], position, sizes).fill_(False)
        return keep if match.masks.get(node, True) else ~keep
    if node in (match.operands.get("query_documents"), match.operands.get("key_documents")):
        return _documents(extents, example, is_random=case.masked_rows)
    if node in match.ranges:
        low, high = match.ranges[node]
        drawn = torch.rand(extents, dtype=torch.float64) * (high - low) + low
        return drawn.to(example.device, example.dtype)
    magnitude = (case.magnitude if node in match.operands.values() else 1.0) * match.scales.get(node, 1.0)
    value = torch.randn(extents, dtype=torch.complex64 if example.is_complex() else torch.float32) * magnitude
    if node in match.fills and case.masked_rows:
        fill = -math.inf if case.infinite and not match.fills[node] else _finite_fill(match, node, example.dtype)
        value = torch.zeros(extents, dtype=torch.float64).masked_fill(~_mask(extents, value.device, True), fill)
    if case.points and node in match.operands.values():
        points = [point for point in case.points if abs(point) <= torch.finfo(example.dtype).max / 2]
        corners = value.view(-1)[::2]
        corners.copy_(torch.tensor(points)[torch.randint(len(points), corners.shape)])
    value = value.to(example.device, example.dtype)
    if case.is_poisoned:
        _poison(value, match, node, sizes)
    if case.is_strided and value.dim() > 1:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    if case.gradients and example.requires_grad:
        value.requires_grad_()
    return value


def _documents(extents: tuple[int, ...], example: torch.Tensor, *, is_random: bool) -> torch.Tensor:
    """Documents of three tokens, counted from the last one; or any, so that some queries see no key."""
    if is_random:
        return torch.randint(0, 3, extents).to(example.device, example.dtype)
    along = max(range(len(extents)), key=extents.__getitem__, default=0)
    length = extents[along] if extents else 1
    ids = (torch.arange(length) - length).div(3, rounding_mode="floor")
    ids = ids.reshape([length if dim == along else 1 for dim in range(len(extents))])
    return ids.expand(extents).contiguous().to(example.device, example.dtype)


def _poison(value: torch.Tensor, match: Match, node: fx.Node, sizes: Sizes) -> None:
    """NaN in the first of the ``rows``; NaN and infinities in what is ``dropped``."""
    if node in match.rows:
        _at(value, match.inputs[node], dict.fromkeys(match.rows[node], 0), sizes).fill_(math.nan)
    if node in match.dropped:
        for position, number in zip(_dropped(match, sizes), (math.nan, math.inf), strict=False):
            _at(value, match.inputs[node], position, sizes).fill_(number)


def _dropped(match: Match, sizes: Sizes) -> list[Mapping[Axis, int]]:
    """Positions that a selecting mask drops: the last one, and the one before where that is not the first."""
    axes = next(iter(match.dropped.values()), ())
    last = {axis: sizes[axis] - 1 for axis in axes}
    if not axes or sizes[axes[-1]] <= 2:
        return [last] if axes else []
    return [last, {**last, axes[-1]: sizes[axes[-1]] - 2}]


def _at(value: torch.Tensor, dims: Dims, position: Mapping[Axis, int], sizes: Sizes) -> torch.Tensor:
    """The slice of ``value`` at a position along some of its axes, as a view."""
    axes = axes_of(dims)
    return value.view([sizes[axis] for axis in axes])[tuple(position.get(axis, slice(None)) for axis in axes)]


def _finite_fill(match: Match, node: fx.Node, dtype: torch.dtype) -> float:
    """The lowest number for one of the masks, a usual one for others, so that they do not add up to infinity."""
    lowest = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min
    if dtype == torch.float16 and len(match.fills) > 1:
        lowest /= 2
    return lowest if node is next(iter(match.fills)) else -1e4


def _mask(extents: tuple[int, ...], device: torch.device, masked_rows: bool) -> torch.Tensor:
    """True keeps: random, the first key always kept; or with every third row masked, every third one kept."""
    keep = torch.rand(extents) > 0.3
    if keep.dim() == 0:
        return torch.ones_like(keep, device=device)
    if masked_rows:
        rows = keep.view(-1, extents[-1])
        rows[::3] = False
        rows[1::3] = True
    else:
        keep[..., 0] = True
    return keep.to(device)


def _as_float64(inputs: list[Any]) -> list[Any]:
    converted = []
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            converted.append(value.detach().double().requires_grad_(value.requires_grad))
        else:
            converted.append(value)
    return converted


def _is_mask(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype == torch.bool


def _wants_grad(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.requires_grad


def _names(match: Match, case: Case) -> list[str]:
    outputs = [f"output {node.name}" for node in match.outputs] if match.also else ["output"]
    if not case.gradients:
        return outputs
    return [*outputs, *(f"gradient of {node.name}" for node in match.inputs if _wants_grad(node))]


# ---- structure -----------------------------------------------------------------------------------------------------


def _key(match: Match, kernel_id: str, real: Sizes | None) -> str:
    """A hash of everything that the verdict depends on, and of nothing else (no names; real sizes if they are tried).

    What runs the kernel is part of it: its code may differ between instruction sets and compilers.
    """
    sizes = representative_sizes(match)
    order: dict[fx.Node, str] = {}
    lines = [f"{match.op} {kernel_id} {match.attributes!r} {match.ambient!r} {grad_enabled(match.ambient)}"]
    lines += [repr(Outside.now()), *sorted({machine.proven_on(device) for device in _devices(match)})]
    for index, node in enumerate(match.inputs):
        order[node] = f"i{index}"
        tensor = tensor_of(node)
        kind = "number" if tensor is None else f"{tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
        lines.append(f"i{index} {kind} {shape(match.inputs[node], sizes)} {match.fills.get(node)}")
        lines += [] if real is None else [f"{shape(match.inputs[node], real)}"]
        lines.append(f"{node in match.rows} {node in match.dropped} {node in match.selecting}")
        lines.append(f"{match.masks.get(node)} {match.implied.get(node)}")
    source = original(match, sizes)
    names = {node: f"n{index}" for index, node in enumerate(source.graph.nodes)}
    for node, name in names.items():
        arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(f"{name} {node.op} {target_name(node.op, node.target)} {arguments}")
        if node.op == "get_attr":
            lines += _body(operator.attrgetter(str(node.target))(source))
    axes = {axis: f"a{i}" for i, axis in enumerate(sizes)}
    for node, dims in match.inputs.items():
        lines.append(f"{order[node]} {[[axes[a] for a in axes_of((dim,))] for dim in dims]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _devices(match: Match) -> set[torch.device]:
    return {tensor.device for tensor in map(tensor_of, (*match.inputs, *match.outputs)) if tensor is not None}


def _body(value: Any) -> list[str]:
    """What the body of a loop computes, whatever its nodes are called; of a tensor, its values."""
    if isinstance(value, torch.Tensor):
        return [f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(repr(value.tolist()).encode()).hexdigest()}"]
    if not isinstance(value, fx.GraphModule):
        return [repr(value)]
    names = {node: f"b{index}" for index, node in enumerate(value.graph.nodes)}
    lines = []
    for node, name in names.items():
        arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(f"{name} {node.op} {target_name(node.op, node.target)} {arguments}")
        if node.op == "get_attr":
            lines += _body(operator.attrgetter(str(node.target))(value))
    return lines
