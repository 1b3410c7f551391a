"""Calls of a graph run eagerly on random inputs that lie in memory, and require gradients, as those of the graph do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.passes.graph.modes import Ambient, ambient_context
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.graph.view import inner_tensors, rebuilt
from lz_compile.passes.graph.writes import is_pure
from lz_compile.passes.proof import running
from lz_compile.passes.proof.running import SCAN, NotRunnableError, no_attribute, run_operator, run_steps

#: A plain loop, one with gradients as the operator ``scan`` has them whatever its steps do with them, or the operator itself.
Scans: TypeAlias = Literal["loop", "like", "operator"]

_MOST_DRAWN = 999_983  # a prime: rows do not repeat


@dataclass
class Inputs:
    """Random values for nodes; ``leaves`` are what gradients are taken of.

    Tensors that share memory do so here: each is a view of one tensor that stands for that memory.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)


def random_inputs(
    nodes: Sequence[fx.Node],
    seed: int,
    *,
    positive: bool,
    doubled: bool,
    with_grad: bool,
    below: int = 2,
    scale: Callable[[int], float] | None = None,
) -> Inputs:
    """Values like the example values of ``nodes``: the same for the same seed.

    Args:
        nodes: what is wanted, tensors or symbolic numbers or tuples of such.
        seed: of the generator.
        positive: real numbers between 0.1 and 1 instead of normal ones.
        doubled: real numbers in float64, whatever they are in the graph.
        with_grad: whether what requires a gradient in the graph requires one.
        below: what integers are less than.
        scale: what real numbers are multiplied by, of how many there are.

    Raises:
        NotRunnableError: one is no strided tensor on a device that is there, or of a size that nobody knows.
    """
    made = Inputs()
    draw = _Draw(torch.Generator().manual_seed(seed), positive, below, scale)
    memories: dict[int, list[torch.Tensor]] = {}
    examples = {node: _example(node) for node in nodes}
    for value in pytree.tree_leaves(list(examples.values())):
        for _, tensor in inner_tensors(value) if isinstance(value, torch.Tensor) else ():
            memories.setdefault(_memory(tensor), []).append(tensor)
    tensors: dict[int, torch.Tensor] = {}
    for shared in memories.values():
        tensors.update(_realised(shared, draw, made, doubled, with_grad))

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _number(value)
        return rebuilt(value, (tensors[id(tensor)] for _, tensor in inner_tensors(value)))

    made.values = {node: pytree.tree_map(real, example) for node, example in examples.items()}
    return made


def _example(node: fx.Node) -> Any:
    if "example_value" not in node.meta:
        raise NotRunnableError(f"{told(node)} is no tensor")
    return node.meta["example_value"]


def _memory(value: torch.Tensor) -> int:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise NotRunnableError("a tensor is sparse, nested or quantised")
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:
        raise NotRunnableError("a tensor is mapped over a dimension that is hidden") from None


def _number(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        hint = value.node.hint if value.node.has_hint() else None
        if hint is None:
            raise NotRunnableError("a size is known when it runs only")
        return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](hint)
    if isinstance(value, (int, float, complex, bool, str, torch.dtype, torch.device, type(None))):
        return value
    raise NotRunnableError(f"a {type(value).__name__} is handed in")


def _realised(
    shared: Sequence[torch.Tensor], draw: _Draw, made: Inputs, doubled: bool, with_grad: bool
) -> dict[int, torch.Tensor]:
    """Tensors that lie in one memory, as views of one tensor that is no leaf: it may be written over."""
    lies = [(sizes_of(each.shape), sizes_of(each.stride()), int(_number(each.storage_offset()))) for each in shared]
    dtype = shared[0].dtype
    if any(each.dtype != dtype or type(each) is not type(shared[0]) for each in shared):
        raise NotRunnableError("tensors of several dtypes share memory")
    start = min(offset for _, _, offset in lies)  # what lies before nobody reads
    lies = [(size, stride, offset - start) for size, stride, offset in lies]
    extent = max(_extent(*each) for each in lies)
    is_doubled = doubled and dtype.is_floating_point
    whole = draw(extent, torch.float64 if is_doubled else dtype, shared[0].device)
    if with_grad and any(each.requires_grad for each in shared):
        made.leaves.append(whole.requires_grad_())
        whole = whole.clone()
    kept = whole.detach()
    return {
        id(each): (whole if with_grad and each.requires_grad else kept).as_strided(*lie)
        for each, lie in zip(shared, lies, strict=True)
    }


def sizes_of(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers: symbolic ones are what they were traced with.

    Raises:
        NotRunnableError: nobody knows one.
    """
    return tuple(int(_number(size)) for size in sizes)


def _extent(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    if 0 in size:
        return offset
    return offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


@dataclass(frozen=True)
class _Draw:
    """Random numbers, as `random_inputs` is asked for them."""

    generator: torch.Generator
    positive: bool
    below: int
    scale: Callable[[int], float] | None

    def __call__(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """That many numbers; of very many, the same ones again and again."""
        if device.type == "meta":
            raise NotRunnableError("a tensor has no memory")
        drawn = min(count, _MOST_DRAWN)
        if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
            value = torch.randint(0, 2 if dtype == torch.bool else self.below, (drawn,), generator=self.generator)
        elif dtype.is_complex:
            value = torch.randn(drawn, generator=self.generator, dtype=dtype)
        else:
            wide = torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)
            value = torch.randn(drawn, generator=self.generator, dtype=wide)
            value = value.abs().clamp(0.1, 1.0) if self.positive else value
        if self.scale is not None and (dtype.is_floating_point or dtype.is_complex):
            value = value * self.scale(count)  # before they are stored: nothing multiplies eight bits
        value = value.to(device, dtype)
        return value if drawn == count else value.repeat(-(-count // drawn))[:count].clone()


@dataclass
class Ran:
    """What a run gave: values, the inputs after it, and gradients of the leaves (None: none reaches it).

    ``gradients`` is None where the backward pass raises, from whatever it begins; ``raising`` has the places of values
    from which it does where others have gradients, and ``error`` what the calls raised, if they did.
    """

    values: list[Any]
    inputs: dict[fx.Node, Any]
    gradients: list[torch.Tensor | None] | None
    error: str = ""
    #: The floating-point dtypes of what was computed.
    kinds: frozenset[torch.dtype] = frozenset()
    raising: frozenset[int] = frozenset()


def run(
    calls: Sequence[Was],
    read: Sequence[fx.Node],
    inputs: Inputs,
    ambient: Ambient,
    attribute: Callable[[str], Any],
    *,
    seen: Collection[fx.Node] = (),
    without: Collection[int] = (),
    scans: Scans = "loop",
) -> Ran:
    """Run calls one after the other under the modes that they begin in.

    Args:
        calls: in order; they read one another and ``inputs``.
        read: whose values are wanted.
        inputs: what they read of others.
        ambient: the modes that the first one runs under.
        attribute: what a ``get_attr`` node stands for.
        seen: those of ``inputs`` that somebody reads behind: gradients come from there, too.
        without: the places of values, ``seen`` behind ``read``, from which no gradients are taken.
        scans: how those among the calls are run.
    """
    with ExitStack() as stack:
        for manager in ambient_context(ambient):
            stack.enter_context(manager)
        values = running.run(calls, inputs.values, attribute=partial(_held, attribute), adapt=_RUNNING[scans])
    found = [values[node] for node in read]
    tensors = pytree.tree_leaves([value for node, value in values.items() if node not in inputs.values])
    kinds = {each.dtype for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point()}
    given = {node: values[node] for node in inputs.values}
    ends = [None if at in without else each for at, each in enumerate([*found, *(values[node] for node in seen)])]
    gradients, raising = _gradients(ends, inputs), frozenset[int]()
    if gradients is None:  # as where a tensor is overwritten that its backward needs: it raises in eager code as well
        raising = frozenset(at for at, each in enumerate(ends) if _gradients([each], inputs) is None)
        gradients = _gradients([each for at, each in enumerate(ends) if at not in raising], inputs)
    return Ran(found, given, gradients, kinds=frozenset(kinds), raising=raising)


def _held(attribute: Callable[[str], Any], path: str) -> Any:
    """What a graph holds; a tensor as a copy, for a run may write to it."""
    held = attribute(path)
    return held.detach().clone() if isinstance(held, torch.Tensor) else held


def _alike_operator(
    was: Was, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if was.target is not SCAN or kwargs:
        return was.target, args, kwargs

    def operator_of(step: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        return _of_operator(run_steps(_StepOfOperator(step), *given), [*given[0], *given[1], *given[2]])

    return operator_of, args, kwargs


def _operator(was: Was, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return run_operator if was.target is SCAN else was.target, args, kwargs


_RUNNING: Mapping[Scans, running.Adapt | None] = {"loop": None, "like": _alike_operator, "operator": _operator}


@dataclass(frozen=True)
class _StepOfOperator:
    """One step, through which a gradient always goes: where it has none zeros do, which NaN does not leave at that."""

    step: fx.GraphModule

    def __call__(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        return _of_operator(tuple(self.step.forward(*operands)), operands)


def _of_operator(results: tuple[torch.Tensor, ...], operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """All results have gradients if an operand has, and every operand gets one, be it zero."""
    given = [each for each in operands if isinstance(each, torch.Tensor) and each.requires_grad]
    if not given or not torch.is_grad_enabled():
        return results
    return _Operator.apply(len(results), *results, *given)  # type: ignore[no-any-return, no-untyped-call]


class _Operator(torch.autograd.Function):
    """The results as they are; zeros for what was handed in besides."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shapes = [each.shape for each in tensors[count:]]
        return tuple(each.clone() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *gradients, *(gradients[0].new_zeros(shape) for shape in ctx.shapes)


def _gradients(found: Sequence[Any], inputs: Inputs) -> list[torch.Tensor | None] | None:
    """Of everything that is read behind, as it is now; None where the backward pass raises."""
    if not inputs.leaves:
        return []
    ends = [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]
    ends = [each for each in ends if each.requires_grad]
    if not ends:
        return [None] * len(inputs.leaves)
    weights = [weights_of(end) for end in ends]
    try:
        return list(torch.autograd.grad(ends, inputs.leaves, weights, allow_unused=True, retain_graph=True))
    except RuntimeError:
        return None


def weights_of(end: torch.Tensor) -> torch.Tensor:
    """What a gradient of all elements of a tensor begins with: numbers between 0.5 and 1.5, none like its neighbours."""
    count = max(end.numel(), 1)
    spread = torch.arange(count, dtype=torch.float64, device=end.device).mul_(0.754877666).remainder_(1.0).add_(0.5)
    return spread[: end.numel()].view(end.shape).to(end.dtype)


_MOST = 256


def may_be_special(node: fx.Node) -> bool:
    """Compute a value from normal random numbers in the place of inputs (or far above); True if in doubt."""
    calls, leaves = _above(node)
    for below in (2, 1):  # where one is no index, zero is
        try:
            with isolated(), torch.no_grad():
                inputs = random_inputs(leaves, 0, positive=False, doubled=True, with_grad=False, below=below)
                (value,) = run([Was.of(each) for each in calls], [node], inputs, Ambient(), no_attribute).values
            return not bool(value.isfinite().all())
        except IndexError:
            continue
        except Exception as error:  # noqa: BLE001 whatever else a run on random numbers raises is doubt
            text = f"{node.name} is taken to be NaN or infinite somewhere: it does not run on random numbers"
            events.record("PROBE_FAILED", text, error, level=logging.INFO)
            return True
    return True


def _above(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls that give a value, in order, and what they read."""
    calls, leaves, queue = set[fx.Node](), set[fx.Node](), [node]
    while queue:
        each = queue.pop()
        if len(calls) == _MOST or each.op not in ("call_function", "call_method") or not is_pure(each):
            leaves.add(each)
        elif each not in calls:
            calls.add(each)
            queue.extend(each.all_input_nodes)
    return sorted(calls), sorted(leaves)
