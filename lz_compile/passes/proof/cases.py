"""What a match is tried on: rows that are masked completely, large magnitudes, unusual strides, extents of one, NaN.

One side of a proof, the source or a kernel, is run on these inputs, for its results and for what it does to the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lz_compile.errors import TrialError
from lz_compile.ground import events, health
from lz_compile.ground.isolation import Outside
from lz_compile.lowering import child
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.graph.gradients import has_gradient
from lz_compile.passes.graph.modes import ambient_context, grad_enabled
from lz_compile.passes.graph.view import hint_of, is_boolean, tensor_of, value_of
from lz_compile.passes.proof.agreement import is_same
from lz_compile.passes.proof.resize import shape
from lz_compile.passes.proof.running import Sizes
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Input, Match

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec


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


def cases(match: Match) -> Iterator[Case]:
    """The input sets that a match is tried on."""
    is_trained = any(has_gradient(node) for node in match.inputs) and grad_enabled(match.site.ambient)
    known, operands, trial = match.found.inputs, match.found.operands, match.trial
    has_mask = any(is_boolean(node) or each.fill is not None for node, each in known.items())
    yield Case("plain", gradients=is_trained)
    # In half precision larger scores are rounded by whole units, and which key wins a row is a matter of luck.
    is_half = any(each.dtype.itemsize == 2 for each in map(tensor_of, operands.values()) if each is not None)
    is_poisoned = any(each.rows or each.dropped for each in known.values())
    yield Case(
        "large",
        magnitude=min(trial.largest, 4.0) if is_half else trial.largest,
        is_strided=True,
        is_poisoned=is_poisoned,
    )
    is_apart = len(set(operands.values())) == len(operands) and "key_documents" not in operands
    if is_apart:  # a tensor in two roles has each extent twice, and documents are those of the same tokens
        yield Case("ones", ones=True)
    if trial.points:
        yield Case("corners", points=trial.points, gradients=is_trained)
    yield from (Case(f"magnitude {size:.0e}", magnitude=size, gradients=is_trained) for size in trial.magnitudes)
    if has_mask and trial.masked_rows_count:
        # A row that is masked by -inf has NaN gradients, whatever computes them.
        yield Case("masked rows", masked_rows=True, gradients=is_trained and trial.masked_rows_are_finite)
    if trial.masked_rows_count and any(each.fill is False for each in known.values()):
        yield Case("infinite fills", masked_rows=True, infinite=True)


def some_axes(match: Match) -> frozenset[Axis]:
    """Half of the row axes of the output: the broadcasts that a size of one may turn on."""
    axes = [axis for axis in axes_of(match.site.output_dims) if axis.size != 1 and axis not in match.trial.pinned]
    return frozenset(axes[::2])


def inputs_of(match: Match, sizes: Sizes, case: Case) -> list[Any]:
    """Random inputs for a case, at the sizes of a proof."""
    return [_input(match, node, sizes, case) for node in match.inputs]


def _input(match: Match, node: fx.Node, sizes: Sizes, case: Case) -> Any:
    example = value_of(node)
    if not isinstance(example, torch.Tensor):
        return hint_of(node)
    known, operands = match.found.inputs[node], match.found.operands
    extents = shape(known.dims, sizes)
    if example.dtype == torch.bool or known.keeps is not None:
        keep = _mask(extents, example.device, case.masked_rows)
        if case.is_poisoned and known.selects:
            for position in _dropped(match, sizes):
                if position.keys() & set(axes_of(known.dims)):
                    _at(keep, known.dims, position, sizes).fill_(False)
        return (~keep if known.keeps is False else keep).to(example.dtype)
    if node in (operands.get("query_documents"), operands.get("key_documents")):
        return _documents(extents, example, is_random=case.masked_rows)
    if known.counts is not None or known.range is not None:
        found = _held(known, extents, sizes)
        found = found if example.dtype.is_floating_point else found.floor()
        return found.to(example.device, example.dtype)
    magnitude = (case.magnitude if node in operands.values() else 1.0) * known.scale
    value = torch.randn(extents, dtype=torch.complex64 if example.is_complex() else torch.float32) * magnitude
    if known.fill is not None and case.masked_rows:
        fill = -math.inf if case.infinite and not known.fill else _finite_fill(match, node, example.dtype)
        value = torch.zeros(extents, dtype=torch.float64).masked_fill(~_mask(extents, value.device, True), fill)
    if case.points and node in operands.values():
        points = [point for point in case.points if abs(point) <= torch.finfo(example.dtype).max / 2]
        # Of each operand other elements: a gradient at a corner of one shows only where the others are no zeros.
        places = torch.randperm(value.numel())[::2]
        value.view(-1)[places] = torch.tensor(points)[torch.arange(len(places)) % len(points)]
    value = value.to(example.device, example.dtype)
    if case.is_poisoned:
        _poison(value, match, known, sizes)
    if case.is_strided and value.dim() > 1:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    if case.gradients and example.requires_grad:
        value.requires_grad_()
    return value


def _held(known: Input, extents: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    """The index of an axis, or numbers of a range."""
    if known.counts is None:
        low, high = known.range or (0.0, 0.0)
        return torch.rand(extents, dtype=torch.float64) * (high - low) + low
    axes = axes_of(known.dims)
    (below,) = shape((axes[axes.index(known.counts) + 1 :],), sizes)
    found = torch.arange(math.prod(extents)) // below
    return (found[torch.randperm(len(found))] if known.is_shuffled else found).reshape(extents)


def _documents(extents: tuple[int, ...], example: torch.Tensor, *, is_random: bool) -> torch.Tensor:
    """Documents of three tokens, counted from the last one; or any, so that some queries see no key."""
    if is_random:
        return torch.randint(0, 3, extents).to(example.device, example.dtype)
    along = max(range(len(extents)), key=extents.__getitem__, default=0)
    length = extents[along] if extents else 1
    ids = (torch.arange(length) - length).div(3, rounding_mode="floor")
    ids = ids.reshape([length if dim == along else 1 for dim in range(len(extents))])
    return ids.expand(extents).contiguous().to(example.device, example.dtype)


def _poison(value: torch.Tensor, match: Match, known: Input, sizes: Sizes) -> None:
    """NaN in the first of the ``rows``; NaN and infinities in what is ``dropped``."""
    if known.rows:
        _at(value, known.dims, dict.fromkeys(known.rows, 0), sizes).fill_(math.nan)
    if known.dropped:
        for position, number in zip(_dropped(match, sizes), (math.nan, math.inf), strict=False):
            _at(value, known.dims, position, sizes).fill_(number)


def _dropped(match: Match, sizes: Sizes) -> list[Mapping[Axis, int]]:
    """Positions that a selecting mask drops: the last one, and the one before where that is not the first."""
    axes = next((each.dropped for each in match.found.inputs.values() if each.dropped), ())
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
    fills = [each for each, known in match.found.inputs.items() if known.fill is not None]
    if dtype == torch.float16 and len(fills) > 1:
        lowest /= 2
    return lowest if node is fills[0] else -1e4


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


@dataclass(frozen=True)
class ProofRun:
    """Outputs, followed by the gradients of the inputs that want one, where these were asked for.

    ``written`` are the inputs that hold something else afterwards; ``is_view``: an output lies in the memory of an input.
    """

    values: Sequence[torch.Tensor]
    written: Sequence[str] = ()
    is_view: bool = False


def run(
    function: Callable[..., Any],
    match: Match,
    inputs: Sequence[Any],
    sizes: Sizes,
    *,
    gradients: bool,
    outside: Outside | None = None,
) -> ProofRun:
    """Run a side under the match's own modes; in float64, which knows no autocast, without ``outside``."""
    with ExitStack() as stack:
        if outside is not None:
            for manager in (outside.entered(), *ambient_context(match.site.ambient)):
                stack.enter_context(manager)
        stack.enter_context(torch.set_grad_enabled(gradients))
        values = _with_implied(match, inputs, sizes)
        given = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        found = function(*given)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    results = [output.detach() for output in outputs]
    if gradients:
        results += gradients_of(
            outputs, [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        )
    tensors = [
        (node.name, *each)
        for node, *each in zip(match.inputs, values, given, strict=True)
        if isinstance(each[0], torch.Tensor)
    ]
    written = tuple(name for name, before, after in tensors if not is_same(before, after))
    return ProofRun(results, written, lies_in(outputs, [after for _, _, after in tensors]))


def run_kernel(kernel: KernelSpec, devices: set[torch.device], run_it: Callable[[], ProofRun]) -> ProofRun:
    """A kernel's side. What is not shipped with this package is run apart, where it can end no process but its own.

    Raises:
        TrialError: the kernel is retired, or it failed, which its own fallback does not make good: not the kernel ran then.
        Exception: what it raises.
    """
    retired = health.retired(kernel.kernel_id)
    if retired is not None:  # its fallback would run
        raise TrialError(kernel.kernel_id, f"is retired ({retired.message})", is_fatal=False)
    with events.collect() as happened:
        if kernel.is_shipped:
            found = run_it()
        else:
            found = ProofRun(*tried(kernel, devices, lambda: astuple(run_it())))
    failures = _failures(happened)
    if failures:
        raise TrialError(kernel.kernel_id, f"failed, and something else gave the result: {failures[0]}", is_fatal=False)
    return found


def tried(kernel: KernelSpec, devices: set[torch.device], run_it: Callable[[], Any]) -> Any:
    """What a kernel that is not shipped gives in a process of its own; one that ends or holds up that one is retired.

    Raises:
        TrialError: it failed.
        Exception: what it raises where it cannot be tried apart.
    """
    with events.collect() as happened:
        try:
            return child.attempt(kernel.kernel_id, run_it, devices)
        except TrialError as error:
            if error.is_fatal:
                health.retire(kernel.kernel_id, error)
            raise
        finally:
            for message in _failures(happened)[:1]:  # it was retired there, and there only
                health.retire(kernel.kernel_id, message)


def _failures(happened: Iterable[events.Event]) -> list[str]:
    """What failed while a fallback went on."""
    return [event.message for event in happened if event.code in health.FAILURE_EVENTS]


def _with_implied(match: Match, inputs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The inputs, with masks that were proven made again, from those that they depend on: gradients flow to these."""
    values = dict(zip(match.inputs, inputs, strict=True))
    builder = Builder(values.__getitem__, sizes=sizes)
    return [
        match.found.emitter.implied_value(node, builder, value, sizes)
        if match.found.inputs[node].implied is not None
        else value
        for node, value in values.items()
    ]


def gradients_of(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of a weighted sum of the outputs; zeros where none flows."""
    # Of several outputs, any may be one through which no gradient flows.
    reached = [output for output in outputs if output.requires_grad]
    weights = [_weights(output) for output in reached]
    found = torch.autograd.grad(reached, leaves, weights, allow_unused=True) if reached else [None] * len(leaves)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Between -1 and 1, in an order in which sums stay small on their way: of large ones PyTorch's kernels lose digits."""
    places = torch.arange(output.numel(), dtype=torch.float64, device="cpu")
    return (places * 0.6180339887 % 1 * 2 - 1).reshape(output.shape).to(output)


def lies_in(outputs: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> bool:
    """Whether an output lies in memory that was given."""
    memory = {each.untyped_storage().data_ptr() for each in given}
    return any(each.numel() and each.untyped_storage().data_ptr() in memory for each in outputs)
