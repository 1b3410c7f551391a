"""What a verdict on a rewrite is remembered by: everything that it depends on, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.ground import machine
from lz_compile.ground.isolation import Outside
from lz_compile.passes.formula.axes import axes_of
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.modules import held_by
from lz_compile.passes.graph.view import target_name, tensor_of
from lz_compile.passes.proof.resize import representative_sizes, shape
from lz_compile.passes.proof.subgraph import Sizes, Subgraph
from lz_compile.passes.rewriting.match import Match


def verdict_key(match: Match, source: Subgraph, kernel_id: str, real: Sizes | None) -> str:
    """A hash of everything that the verdict depends on, and of nothing else (no names; real sizes if they are tried).

    What runs the kernel is part of it: its code may differ between instruction sets and compilers. ``source`` is what is
    replaced, at small sizes.
    """
    sizes = representative_sizes(match)
    order: dict[fx.Node, str] = {}
    lines = [f"{match.op} {kernel_id} {match.attributes!r} {match.ambient!r} {grad_enabled(match.ambient)}"]
    lines += [repr(Outside.now()), *sorted({machine.proven_on(device) for device in devices_of(match)})]
    for index, (node, known) in enumerate(match.found.inputs.items()):
        order[node] = f"i{index}"
        tensor = tensor_of(node)
        kind = "number" if tensor is None else f"{tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
        lines.append(f"i{index} {kind} {shape(match.inputs[node], sizes)} {known.fill}")
        lines += [] if real is None else [f"{shape(match.inputs[node], real)}"]
        lines.append(f"{bool(known.rows)} {bool(known.dropped)} {known.selects}")
        lines.append(f"{known.keeps} {known.implied} {known.range} {known.scale}")
    calls = [*source.inputs, *source.nodes]
    lines += [*described(calls, source.held), str([calls.index(node) for node in source.outputs])]
    axes = {axis: f"a{i}" for i, axis in enumerate(sizes)}
    for node, known in match.found.inputs.items():
        counted = known.counts and (axes[known.counts], known.is_shuffled)
        lines.append(f"{order[node]} {[[axes[a] for a in axes_of((dim,))] for dim in known.dims]} {counted}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def devices_of(match: Match) -> set[torch.device]:
    """Where the inputs and outputs of a match are."""
    return {tensor.device for tensor in map(tensor_of, (*match.inputs, *match.outputs)) if tensor is not None}


def described(nodes: Iterable[fx.Node], held: Mapping[str, Any], given: Iterable[fx.Node] = ()) -> Iterator[str]:
    """What calls compute of what is given, whatever they are called; what else they read is named."""
    names = {node: f"i{index}" for index, node in enumerate(given)}
    for index, node in enumerate(nodes):
        names[node] = f"n{index}"
        arguments = fx.map_arg((node.args, node.kwargs), lambda each: names.get(each, each.name))
        yield f"n{index} {node.op} {target_name(node.op, node.target)} {arguments}"
        if node.op == "get_attr":
            yield from _value(held[str(node.target)])


def _value(value: Any) -> Iterator[str]:
    """What the body of a loop computes; of a tensor, its values."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(repr(value.tolist()).encode()).hexdigest()}"
    elif isinstance(value, fx.GraphModule):
        yield from described(value.graph.nodes, held_by(value.graph.nodes))
    else:
        yield repr(value)
