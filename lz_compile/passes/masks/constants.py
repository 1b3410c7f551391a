"""Tensors that only constants make: their values, by running what makes them.

A mask of fixed size that is built from ``torch.ones``, ``arange``, lists or registered buffers has the same values at every
call. Whatever a user's input, a parameter, chance or uninitialised memory has a part in is not run; neither is anything of
symbolic size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason
from lz_compile.lowering import frames
from lz_compile.passes.formula.expressions import Known
from lz_compile.passes.graph.effects import Effects, Look
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, memories_of, read, tensor_of, value_of
from lz_compile.passes.proof.agreement import is_same
from lz_compile.passes.proof.running import NotRunnableError, run

#: Larger tensors are not computed while compiling.
_LARGEST = 2**27
#: What a mask may be made with: deterministic, and without side effects but on its first argument.
DETERMINISTIC = frozenset(
    "tensor as_tensor scalar_tensor arange linspace full full_like new_full new_tensor zeros zeros_like new_zeros ones "
    "ones_like new_ones eye tril triu tril_indices triu_indices where masked_fill masked_scatter fill fill_diagonal zero "
    "add sub rsub mul div floordiv floor_divide truediv remainder mod neg abs pow sqrt rsqrt reciprocal exp exp2 log log2 "
    "sign floor ceil round trunc square maximum minimum max min amax amin argmax argmin clamp clamp_min clamp_max le lt ge "
    "gt eq ne not and or xor logical_xor bitwise_xor bitwise_and bitwise_or rshift lshift bitwise_right_shift "
    "bitwise_left_shift isinf isneginf isposinf isnan isfinite nan_to_num any all sum prod "
    "mean cumsum cumprod cummax diff cat stack hstack vstack block_diag pad flip roll rot90 getitem setitem select narrow "
    "index_select gather scatter take_along_dim index_fill index_copy copy slice transpose t mT T permute movedim view "
    "reshape flatten unflatten ravel view_as reshape_as expand expand_as unsqueeze squeeze contiguous clone alias detach "
    "repeat tile repeat_interleave chunk split unbind tensor_split split_with_sizes diagonal diag diag_embed unfold "
    "meshgrid broadcast_tensors kron bucketize searchsorted sort argsort getattr positive to float half bfloat16 "
    "double type_as type bool int long short byte char cuda cpu one_hot lift_fresh detach".split()
)
#: Calls that autocast runs in another dtype than their inputs have.
_CAST = frozenset("pow rsqrt reciprocal exp log log2 sum prod cumsum cumprod".split())


class Constants:
    """Values of one graph's constant tensors, computed once."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._known: dict[tuple[fx.Node, fx.Node | None], tuple[Known | Reason, Look]] = {}
        self._is_constant: dict[fx.Node, Reason | None] = {}

    def value(self, node: fx.Node, reader: fx.Node | None = None) -> Known | Reason:
        """The value of ``node`` when it is made, or as ``reader`` finds it where it was overwritten in the meantime."""
        if (node, reader) not in self._known:
            with self._effects.watched() as look:
                found = evaluate(self._effects, node, reader, self._is_constant)
            self._known[node, reader] = (found, look)
        found, look = self._known[node, reader]
        self._effects.note(look)  # a twin must meet equal nodes
        return found


def evaluate(
    effects: Effects, node: fx.Node, reader: fx.Node | None = None, known: dict[fx.Node, Reason | None] | None = None
) -> Known | Reason:
    """The value of a tensor that only constants make, or the reason why it is none."""
    stop = None if reader is None else effects.position[reader]
    order = _replay(effects, node, stop, {} if known is None else known)
    if isinstance(order, Reason):
        return order
    wanted = tensor_of(node)
    assert wanted is not None, f"{node.name} is no tensor"
    value = _run(effects, node, order)
    if isinstance(value, Reason):
        return value
    if effects.has_mutations:
        other = _as_eager(effects, node, order, effects.position[node] + 1 if stop is None else stop)
        if isinstance(other, Reason):
            return other
        if not is_same(value, other):
            return _refusal(f"{told(node)} is another one if all that is constant before it is computed")
    if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (tuple(wanted.shape), wanted.dtype):
        return _refusal(f"{told(node)} came out in another shape or dtype than it was traced with")
    return Known(value, tuple(each for each in order if each.op == "placeholder"))


def _run(effects: Effects, node: fx.Node, order: list[fx.Node]) -> Any:
    """What a node is after some calls, or why that cannot be told."""
    try:
        with isolated() as outside, outside.entered(), torch.no_grad():
            return run(order, _buffers(effects, order), adapt=_on_cpu)[node]
    except (NotRunnableError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return _refusal(f"{told(node)} could not be computed while compiling: {error}")


def _as_eager(effects: Effects, node: fx.Node, order: list[fx.Node], stop: int) -> Any:
    """The value once more, by all constant calls ahead as the source makes them, whichever of them take part in it.

    What takes part is told by names; who writes to which memory is asked of PyTorch here.
    """
    memories = {memory for each in order for memory in memories_of(each)}
    for writer, target in effects.writes_made:
        if effects.position[writer] < stop and writer not in order and not memories.isdisjoint(memories_of(target)):
            return _refusal(f"{told(writer)} writes to memory of {told(node)}")
    constant: dict[fx.Node, None] = {}
    for each, place in effects.position.items():
        is_made = place < stop and all(operand in constant for operand in each.all_input_nodes)
        # Read anew: what is looked at here is no part of the reading, which equal layers share.
        if is_made and each.op != "output" and _why_not(effects, each, read(each)) is None:
            constant[each] = None
    return _run(effects, node, [*constant])


def _refusal(text: str) -> Reason:
    return Reason("MASK_NOT_CONSTANT", text)


def _replay(
    effects: Effects, node: fx.Node, stop: int | None, known: dict[fx.Node, Reason | None]
) -> list[fx.Node] | Reason:
    """Every node that has a part in the value, in the order of the graph."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        while stack:
            each = stack.pop()
            if each in needed:
                continue
            effects.calls.get(each)  # noted, also where the answer is known
            if each not in known:
                known[each] = _why_not(effects, each, effects.calls[each])
            reason = known[each]
            if reason is not None:
                return reason
            needed[each] = None
            stack.extend(each.all_input_nodes)
        if any(effects.is_overwritten(each) for each in needed):
            stack.extend(_writers(effects, needed, effects.position[node] + 1 if stop is None else stop))
    return sorted(needed, key=effects.position.__getitem__)


def _writers(effects: Effects, needed: dict[fx.Node, None], stop: int) -> Iterator[fx.Node]:
    """The calls before ``stop`` that overwrite memory of what is needed and are not known yet."""
    for node, position in effects.position.items():
        if position >= stop:
            return
        call = effects.calls.get(node)
        is_writer = call is not None and node not in needed
        if is_writer and any(effects.writes(node, each) for each in needed if effects.position[each] < position):
            yield node


def _why_not(effects: Effects, node: fx.Node, call: Call | None) -> Reason | None:
    """Why a node is no constant by itself, None where it is."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        if not all(isinstance(size, int) for size in value.shape):
            return _refusal(f"{told(node)} has a symbolic size")
        if value.numel() > _LARGEST:
            return _refusal(f"{told(node)} has {value.numel()} elements")
        if value.layout != torch.strided or value.is_quantized:
            return _refusal(f"{told(node)} is no plain tensor")
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _refusal(f"{told(node)} is symbolic")
    if call is None:
        is_known = frames.buffer_value(node) is not None and not effects.is_overwritten(node)
        return None if is_known else _refusal(f"{told(node)} is an input, or had other values in a call before")
    if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
        return _refusal(f"{told(node)} calls another graph")
    is_autocast = effects.ambient(node).autocast or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if call.name in _CAST and is_autocast and isinstance(value, torch.Tensor) and value.is_floating_point():
        return _refusal(f"{told(node)} runs under autocast")
    return (
        None if call.name in DETERMINISTIC and "out" not in call.arguments else _refusal(f"{told(node)} is {call.name}")
    )


def _buffers(effects: Effects, nodes: Iterable[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """The values of those that are buffers."""
    given = {node: frames.buffer_value(node) for node in nodes if node.op == "placeholder"}
    return {
        node: buffer.detach().to("cpu", copy=effects.has_mutations)
        for node, buffer in given.items()
        if buffer is not None
    }


def _on_cpu(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    args, kwargs = _moved(args), _moved(kwargs)
    return ("cpu", args[:1], kwargs) if node.target == "cuda" else (node.target, args, kwargs)


def _moved(value: Any) -> Any:
    """Arguments with every device replaced."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "xpu", "mps"):
        return "cpu"
    if isinstance(value, (tuple, list)):
        return type(value)(map(_moved, value)) if type(value) in (tuple, list) else value
    return {name: _moved(each) for name, each in value.items()} if isinstance(value, dict) else value


def hold_the_same(buffer: fx.Node, other: fx.Node) -> bool:
    """Whether two buffers have equal values."""
    first, second = frames.buffer_value(buffer), frames.buffer_value(other)
    return buffer is other or (first is not None and second is not None and torch.equal(first, second))
