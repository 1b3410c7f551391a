"""Splice a kernel into a graph in place of a match; the graph is untouched everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import strides_of
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.moves import strides_matter
from lz_compile.passes.graph.emitter import provenance
from lz_compile.passes.graph.modes import faking
from lz_compile.passes.graph.view import known_tensor, read, tensor_of
from lz_compile.passes.graph.writes import writes
from lz_compile.passes.rewriting.builder import Builder, GraphBuilder, Making
from lz_compile.passes.rewriting.match import Match

KernelCall = Callable[..., Any]


class RewriteError(Exception):
    """The replacement does not look like what it replaces (shape, dtype or device)."""


@dataclass(frozen=True)
class _Recipe:
    """The nodes that were emitted for one match; ``given`` are the prototype's names of what they read."""

    steps: tuple[tuple[fx.Node, Any, Any], ...]
    results: tuple[fx.Node, ...]
    given: Mapping[fx.Node, fx.Node]
    shows_strides: tuple[bool, ...]


class Recipes:
    """What was emitted in one graph for matches that have twins, by match and kernel."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, KernelCall], _Recipe] = {}

    def keep(
        self,
        match: Match,
        call: KernelCall,
        created: Sequence[fx.Node],
        results: tuple[fx.Node, ...],
        shows: tuple[bool, ...],
    ) -> None:
        """Note what was emitted, if it reads nothing but the match's own nodes and inputs of the graph."""
        own = {mine: node for node, mine in match.renamed.items()} or {n: n for n in {**match.inputs, **match.read}}
        read = {operand for node in created for operand in node.all_input_nodes}.difference(created)
        if all(node in own or node.op == "placeholder" for node in read):
            steps = tuple((node, node.args, node.kwargs) for node in created)
            self._found[id(match.kind), call] = _Recipe(steps, results, own, shows)

    def follow(
        self, graph: fx.Graph, match: Match, call: KernelCall, shows: tuple[bool, ...]
    ) -> tuple[fx.Node, ...] | None:
        """The nodes again for a twin, at the graph's insertion point; None where there is no recipe that fits."""
        recipe = self._found.get((id(match.kind), call))
        if recipe is None or recipe.shows_strides != shows:
            return None
        made: dict[fx.Node, fx.Node] = {}

        def local(node: fx.Node) -> fx.Node:
            named = recipe.given.get(node, node)
            return made.get(node) or match.renamed.get(named, named)

        try:
            for node, *arguments in recipe.steps:
                args, kwargs = fx.map_arg(arguments, local)
                made[node] = graph.create_node(node.op, node.target, args, kwargs)
                made[node].meta = {**node.meta, **provenance(match.site.output)}
        except BaseException:
            _unmade(graph, list(made.values()))
            raise
        return tuple(local(node) for node in recipe.results)


def splice(
    graph: fx.Graph,
    match: Match,
    call: KernelCall,
    recipes: Recipes,
    *,
    original: tuple[fx.Node, ...] | None = None,
    copied: Collection[fx.Node] = (),
) -> tuple[fx.Node, ...]:
    """Replace the outputs of ``match`` by the kernel's nodes and erase what became superfluous.

    The kernel goes where the first of the outputs is, for others may read that one directly afterwards; what the match
    names as hoisted goes before it.

    Either the whole replacement is made or, on any exception, the graph computes what it did.

    Args:
        graph: the graph that the match was found in.
        match: what to replace.
        call: the kernel, a function of the op's canonical operands and ``attrs`` (see ``lowering/ops``).
        recipes: what was emitted for equal matches of this graph.
        original: of a match in an excerpt, its outputs in the whole graph, whose readers decide about strides.
        copied: outputs that must be copies: of what is overwritten later, a kernel may keep its result for the backward.

    Returns:
        what took the place of the outputs.

    Raises:
        RewriteError: the replacement's shape, dtype or device differs, or it reads what is computed later.
    """
    shows_strides = tuple(strides_matter(node) for node in original or match.outputs)
    place = min(match.outputs)
    moved = [(node, node.next) for node in match.site.hoisted if node > place]
    try:
        for node, _ in moved:
            place.prepend(node)
        late = [node for node in match.inputs if node > place]
        if late:
            raise RewriteError(
                f"rewriting {match.op} at {match.site.where}: {late[0].name} is computed after {place.name}"
            )
        with graph.inserting_before(place):
            results = recipes.follow(graph, match, call, shows_strides)
            if results is None:
                results, created = _emit(graph, match, call, place, shows_strides)
                recipes.keep(match, call, created, results, shows_strides)
            results = tuple(
                _copied(graph, result) if node in copied else result
                for node, result in zip(match.outputs, results, strict=True)
            )
    except BaseException:
        for node, behind in reversed(moved):
            behind.prepend(node)
        raise
    for node, result in zip(match.outputs, results, strict=True):
        node.replace_all_uses_with(result)
    superfluous = set(match.core)
    for node in reversed(match.core):
        _erase_if_unused(graph, node)
    for node in reversed(list(match.read)):
        step = None if node in superfluous or node.users else read(node)
        if step is not None and layout.rearranges(step) and not step.is_inplace:
            graph.erase_node(node)
    return results


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy of a new node, by arithmetic: Inductor drops clones, and what it copies may be merged with another one."""
    tensor = known_tensor(node)
    copy = graph.call_method("clone", (node,)) if tensor.dtype == torch.bool else graph.call_method("sub", (node, 0))
    with faking(tensor.fake_mode):  # type: ignore[attr-defined]
        copy.meta = {**node.meta, "example_value": tensor.clone()}
    return copy


def emit(builder: Builder, match: Match, call: KernelCall, attributes: OpAttributes) -> Any:
    """Operands, kernel and result, over the tensors or proxies of ``builder``."""
    return match.found.emitter.result(builder, call(match.found.emitter.operands(builder), attributes))


def _emit(
    graph: fx.Graph, match: Match, call: KernelCall, place: fx.Node, shows_strides: tuple[bool, ...]
) -> tuple[tuple[fx.Node, ...], list[fx.Node]]:
    """The nodes that replace the match's outputs, and every node that was made for them."""
    kind = match.kind
    outside = {node: dims for node, dims in kind.read.items() if node not in kind.core}
    early = {node: dims for node, dims in outside.items() if match.renamed.get(node, node) < place}
    sources = {**kind.inputs, **early}
    builder = GraphBuilder(graph, place, match.site.ambient, sources, match.renamed)
    try:
        with Making(builder):
            results = _replacements(builder, match, call, shows_strides)
    except BaseException:
        _unmade(graph, builder.created)
        raise
    needed = {*results, *(node for node in builder.created if _is_done_for_more(node))}
    unused = [node for node in reversed(builder.created) if node not in needed and _erase_if_unused(graph, node)]
    return results, [node for node in builder.created if node not in unused]


def _is_done_for_more(node: fx.Node) -> bool:
    """Whether a call does something beside what it gives, such as to write into a tensor that a kernel made."""
    call = read(node)
    return node.is_impure(impure_random=False) or (call is not None and writes(call))


def _unmade(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """As if nodes had never been made, nor the graphs beside this one that they name."""
    owner = graph.owning_module
    for node in reversed(nodes):
        graph.erase_node(node)
        is_named = any(each.target == node.target for each in graph.find_nodes(op="get_attr"))
        if node.op == "get_attr" and owner is not None and not is_named:
            owner.delete_submodule(str(node.target))


def _replacements(
    builder: GraphBuilder, match: Match, call: KernelCall, shows_strides: tuple[bool, ...]
) -> tuple[fx.Node, ...]:
    value = emit(builder, match, call, match.found.attributes)
    results = value if match.site.extra_outputs else (value,)
    return tuple(
        _as_before(match, node, result, shows)
        for node, result, shows in zip(match.outputs, results, shows_strides, strict=True)
    )


def _as_before(match: Match, output: fx.Node, result: fx.Proxy, shows_strides: bool) -> fx.Node:
    """A result with the strides of the node that it replaces, where they matter to someone."""
    old, new = tensor_of(output), tensor_of(result.node)
    if old is None or new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise RewriteError(
            f"rewriting {match.op} at {match.site.where}: expected a {_describe(old)}, the kernel gives a {_describe(new)}"
        )
    if shows_strides and strides_of(new) != strides_of(old):
        result = laid_out(result, old)
    return result.node


def laid_out(value: fx.Proxy, like: torch.Tensor) -> fx.Proxy:
    """The value with its dimensions in memory in the order of another tensor's, without gaps."""
    order, back = layout.stride_order(like)
    return value.permute(order).contiguous().permute(back)


def _describe(tensor: torch.Tensor | None) -> str:
    return (
        "value that is no tensor"
        if tensor is None
        else f"{tensor.dtype} tensor {tuple(tensor.shape)} on {tensor.device}"
    )


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that nobody reads, and what only they read."""
    stack = [node for node in dict.fromkeys(nodes) if not node.users]
    while stack:
        node = stack.pop()
        call = read(node)
        if node.users or call is None or call.is_inplace or node._erased or node.is_impure():
            continue
        operands = node.all_input_nodes
        graph.erase_node(node)
        stack.extend(operand for operand in operands if not operand.users)


def _erase_if_unused(graph: fx.Graph, node: fx.Node) -> bool:
    if node.users:
        return False
    graph.erase_node(node)
    return True
