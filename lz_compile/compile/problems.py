"""The problem that a match is, for the choice of its kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import as_size
from lz_compile.ground.store import Store
from lz_compile.lowering import configured, inductor
from lz_compile.passes.formula.axes import atoms, axes_of
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.proof.cases import Case, inputs_of
from lz_compile.passes.proof.resize import representative_sizes, resized, whole
from lz_compile.passes.proof.running import Sizes, Subgraph
from lz_compile.passes.proof.validate import verdict_key
from lz_compile.passes.rewriting.match import Match
from lz_compile.runtime.problem.context import SelectionContext, of_facts


def of_match(match: Match, *, deterministic: bool = False, is_cuda_graph_capturing: bool = False) -> SelectionContext:
    """The context of a match, from its facts and the fake tensors of its operands; adds no guard.

    Args:
        match: what was recognised.
        deterministic: kernels must give the same bits for the same inputs (also where torch itself is set so).
        is_cuda_graph_capturing: the compiled graph will be captured.
    """
    facts = match.facts
    tensors = [tensor for tensor in map(tensor_of, match.operands.values()) if tensor is not None]
    device = next((tensor.device for tensor in tensors if tensor.device.type == facts.device), facts.device)
    context = of_facts(match.op, match.attributes, facts, device=device, tensors=tensors, deterministic=deterministic)
    return replace(
        context,
        is_last_dim_contiguous=_is_last_dim_contiguous(match),
        is_cuda_graph_capturing=is_cuda_graph_capturing,
    )


@dataclass(frozen=True)
class Asked:
    """Whether Inductor's own patterns make PyTorch's fused attention of a match."""

    is_fused: bool


def left_as(match: Match) -> str | None:
    """The kernel that Inductor makes of a match by itself, as its own patterns say; None if they do not know it.

    Not asked where there is dropout, which a proof's excerpt leaves out, nor of other devices, where no answer was
    ever held against what Inductor does.
    """
    is_asked = match.op == "attention" and match.facts.device == "cpu" and match.found.source_kernel is None
    if not is_asked or "dropout_p" in match.attributes.to_dict():
        return None
    sizes = representative_sizes(match)
    with isolated() as outside, outside.entered():
        try:
            source = resized(whole(match), sizes)
            facts = verdict_key(match, source, f"inductor {configured.settings_digest()}", None)
            found = Store("patterns").recall(facts, Asked, lambda: Asked(_is_fused(match, source, sizes)))
        except Exception as error:  # noqa: BLE001 a question that nobody can answer costs a choice by less, and says so
            events.record("INDUCTOR_NOT_ASKED", f"what Inductor makes of the attention at {match.where}", error)
            return None
    return "torch.sdpa" if found.is_fused else None


def _is_fused(match: Match, source: Subgraph, sizes: Sizes) -> bool:
    inputs, device = inputs_of(match, sizes, Case("plain")), torch.device(match.facts.device)
    return inductor.fuses_attention(source.run, inputs, device, match.facts.needs_grad)


def _is_last_dim_contiguous(match: Match) -> bool:
    """Whether the features of query, key and value each lie next to one another in memory.

    The features of query and key are the axes that these two share and value does not; those of value are the axes that
    it shares with the result and not with query.
    """
    roles = [match.operands.get(name) for name in ("query", "key", "value")]
    if any(node is None or node not in match.inputs for node in roles):
        return True
    query, key, value = (match.inputs[node] for node in roles if node is not None)
    features = (set(axes_of(query)) & set(axes_of(key))) - set(axes_of(value))
    value_features = (set(axes_of(value)) & set(axes_of(match.output_dims))) - set(axes_of(query))
    wanted = (features, features, value_features)
    return all(_is_innermost(match, node, axes) for node, axes in zip(roles, wanted, strict=True))


def _is_innermost(match: Match, node: Any, axes: set[Any]) -> bool:
    """Whether a dimension of stride one ends with one of ``axes``."""
    tensor = tensor_of(node)
    if tensor is None or not axes:
        return True
    return any(
        as_size(stride) == 1 and set(atoms(dim)[-1:]) & axes
        for stride, dim in zip(tensor.stride(), match.inputs[node], strict=True)
    )
