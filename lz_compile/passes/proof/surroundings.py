"""A match with the pointwise chain around it, as a graph of its own: what a kernel is measured in.

Inductor fuses the pointwise and layout operations before and after an op into its own code. A kernel that it cannot see
into breaks that fusion and must pay for it, so candidates are measured with what surrounds them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import ambient_context
from lz_compile.passes.graph.refusal import held_by
from lz_compile.passes.graph.view import is_symbolic, needed, read, tensor_of, value_of
from lz_compile.passes.proof.running import Subgraph
from lz_compile.passes.proof.sizes import all_axes
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import KernelCall, Recipes, splice

#: How many operations are taken in before the match, and after it.
_REACH = 16
#: In a sequence of documents whose ids nobody knows before the data comes.
_DOCUMENTS = 8

Binding = Mapping[sympy.Symbol, int]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, kw_only=True)
class Surrounded(Subgraph):
    """A match and what Inductor may fuse with it; ``outputs`` are what others read.

    ``surroundings`` is a hash of the operations around the match, empty where there are none.
    """

    match: Match
    surroundings: str

    def function(self, call: KernelCall | None, part: Match | None = None) -> Callable[..., Any]:
        """This as a function of its inputs, with the match run by ``call`` (None: as the source spells it).

        ``part`` is what ``call`` computes of a match that is several in one, where that is not all of it.
        """
        match = part or self.match
        module, copies = self.module()
        for node in self.inputs:
            copies[node].meta = copy.copy(node.meta)
        if call is not None:
            kind = match.kind
            own = {*kind.inputs, *kind.read, *kind.core, *kind.found.operands.values()}
            renamed = {node: copies[match.renamed.get(node, node)] for node in own}
            splice(module.graph, match.moved(copies, kind, renamed), call, Recipes(), original=match.outputs)
            module.recompile()
        managers = self.match.site.ambient

        def run(*inputs: Any) -> Any:
            with ExitStack() as stack:
                for manager in ambient_context(managers):
                    stack.enter_context(manager)
                return module.forward(*inputs)  # calling the module prints what the graph raises

        return run

    def make_inputs(self, binding: Binding) -> list[Any]:
        """Random inputs of the real sizes, layouts and dtypes, with numbers in place of symbols.

        What names documents names :data:`_DOCUMENTS` of equal length: how many there are decides what can be skipped. Masks
        that kernels do not read, as they are implied, hold what implies them.
        """
        found = [_make_input(value_of(node), binding) for node in self.inputs]
        documents = {self.match.found.operands.get(name) for name in ("query_documents", "key_documents")}
        for node, value in zip(self.inputs, found, strict=True):
            if node in documents:
                _name_documents(value)
        known = {axis: axis.size for axis in all_axes(self.match)}
        sizes = {
            axis: size if isinstance(size, int) else int(size.xreplace(dict(binding))) for axis, size in known.items()
        }
        values = dict(zip(self.inputs, found, strict=True))
        builder = Builder(values.__getitem__, sizes=sizes)
        for node in self.inputs:
            if node in _implied(self.match):
                value = self.match.found.emitter.implied_value(node, builder, values[node], sizes)
                once = _once(values[node])
                values[node].detach()[once] = value.detach().expand(values[node].shape)[once]
        return found


def surrounded(match: Match, effects: Effects) -> Surrounded:
    """A match with its surroundings, as far as they are pointwise or change the layout, under the match's own modes."""
    core = _between(match)
    held = dict.fromkeys(core)
    if not effects.has_mutations:
        _take_before(match, effects, held)
        _take_after(match, effects, held)
    nodes = tuple(node for node in match.site.output.graph.nodes if node in held)
    inputs = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in held)
    inputs |= dict.fromkeys(node for node in match.inputs if node not in held)  # also those that only a kernel reads
    outputs = tuple(node for node in nodes if any(user not in held for user in node.users)) or (nodes[-1],)
    return Surrounded(
        inputs=dict.fromkeys(inputs, ()),
        nodes=nodes,
        outputs=outputs,
        held=held_by(nodes),
        match=match,
        surroundings=_digest([node for node in nodes if node not in core], core),
    )


def _digest(around: Sequence[fx.Node], core: set[fx.Node]) -> str:
    """A hash of the operations around a match that is the same in every process, whatever nodes are called there."""
    labels = {**dict.fromkeys(core, "match"), **{node: str(index) for index, node in enumerate(around)}}
    lines = []
    for node in around:
        call = read(node)
        assert call is not None, f"{node.name} is taken in and is no call"
        operands = (labels.get(operand) or _kind(operand) for operand in node.all_input_nodes)
        lines.append(f"{call.name}({', '.join(operands)}) {_kind(node)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def _kind(node: fx.Node) -> str:
    value = value_of(node)
    return f"{value.dtype} {value.dim()}" if isinstance(value, torch.Tensor) else type(value).__name__


def _between(match: Match) -> set[fx.Node]:
    """Everything that the match's output needs, back to its inputs; sizes are inputs like any other."""

    def is_given(node: fx.Node) -> bool:
        is_input = node.op == "placeholder" or (node.op == "get_attr" and tensor_of(node) is not None)
        return is_input or node in match.inputs or is_symbolic(node)

    found = needed(match.outputs, (), lambda node: (each for each in node.all_input_nodes if not is_given(each)))
    return {*found, *match.core}


def _take_before(match: Match, effects: Effects, held: dict[fx.Node, None]) -> None:
    """What only the match reads, upwards from its inputs; what masks are made of stays outside where these are implied."""
    implied = _implied(match)
    queue = [node for node in match.inputs if node not in implied]
    if implied:  # they may be made of integers, as of lengths
        queue = [node for node in queue if (own := tensor_of(node)) is not None and own.is_floating_point()]
    taken = 0
    while queue and taken < _REACH:
        node = queue.pop(0)
        if (
            node in held
            or node in implied
            or not _is_fusible(node, match, effects)
            or any(user not in held for user in node.users)
        ):
            continue
        held[node] = None
        taken += 1
        queue.extend(node.all_input_nodes)
    for node in list(held):  # parts of something that is not taken in are inputs, the whole cannot be one
        if any(_is_split(operand) and operand not in held for operand in node.all_input_nodes):
            del held[node]


def _take_after(match: Match, effects: Effects, held: dict[fx.Node, None]) -> None:
    queue = [user for node in match.outputs for user in node.users]
    taken = 0
    while queue and taken < _REACH:
        node = queue.pop(0)
        if node in held or _is_split(node) or not _is_fusible(node, match, effects):
            continue
        strangers = [each for each in node.all_input_nodes if each not in held and tensor_of(each) is not None]
        if any(effects.position[each] > effects.position[match.site.output] for each in strangers):
            continue
        held[node] = None
        taken += 1
        queue.extend(node.users)


def _implied(match: Match) -> set[fx.Node]:
    return {node for node, each in match.found.inputs.items() if each.implied is not None}


def _is_fusible(node: fx.Node, match: Match, effects: Effects) -> bool:
    call = read(node)
    if call is None or call.is_inplace or effects.ambient(node) != match.site.ambient:
        return False
    if _is_split(node):
        return call.name in SPLITS
    if tensor_of(node) is None:
        return False
    return is_pointwise(call) or layout.is_view(call) or layout.rearranges(call)


def _is_split(node: fx.Node) -> bool:
    """Whether a node gives several tensors at once, as ``chunk`` and ``split`` do."""
    return isinstance(value_of(node), (tuple, list)) and not isinstance(value_of(node), torch.Size)


def _make_input(value: Any, binding: Binding) -> Any:
    if isinstance(value, torch.Size):
        return torch.Size([_number(size, binding) for size in value])
    if not isinstance(value, torch.Tensor):
        return _number(value, binding)
    shape = [_number(size, binding) for size in value.shape]
    strides = [_number(stride, binding) for stride in value.stride()]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    memory = _random(0 if 0 in shape else reach, value)  # may be shared by elements, as in what was expanded
    return memory.as_strided(shape, strides).detach().requires_grad_(value.requires_grad)


def _random(count: int, like: torch.Tensor) -> torch.Tensor:
    """Booleans of which some are False, numbers of order one, and integers that are in the range of every index."""
    if like.dtype == torch.bool:
        return torch.rand(count, device=like.device) > 0.1
    if like.is_floating_point() or like.is_complex():
        return torch.randn(count, device=like.device, dtype=torch.float32).to(like.dtype)
    return torch.zeros(count, device=like.device, dtype=like.dtype)


def _name_documents(ids: torch.Tensor) -> None:
    """Number documents of equal length along the longest dimension, in place; elements may share memory."""
    along = max(range(ids.dim()), key=lambda dim: ids.shape[dim], default=0)
    own = ids[_once(ids)]
    if ids.dim() and own.shape[along] > 1:
        numbers = torch.arange(own.shape[along], device=ids.device) * _DOCUMENTS // own.shape[along]
        own.copy_(numbers.reshape([-1 if dim == along else 1 for dim in range(ids.dim())]).to(ids.dtype))


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """A part that holds everything and shares no memory with itself."""
    return tuple(slice(None) if stride else slice(1) for stride in tensor.stride())


def _number(value: Any, binding: Binding) -> Any:
    if not isinstance(value, _SYMBOLIC):
        return value
    number = value.node.expr.xreplace(dict(binding))
    if isinstance(value, torch.SymFloat):
        return float(number)
    return int(number) if isinstance(value, torch.SymInt) else bool(number)


def symbols(values: Sequence[Any]) -> set[sympy.Symbol]:
    """The symbols in the sizes and strides of tensors, in shapes and in symbolic numbers."""
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            numbers += [*value.shape, *value.stride()]
        else:
            numbers += value if isinstance(value, torch.Size) else [value]
    return {symbol for each in numbers if isinstance(each, _SYMBOLIC) for symbol in each.node.expr.free_symbols}
