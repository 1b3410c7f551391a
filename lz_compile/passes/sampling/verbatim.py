"""A filter as its source spelled it, to be run where kernels leave open which of several equal scores are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.kernels.sampling import open_ties
from lz_compile.lowering.spelled import spelled
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import is_symbolic, tensor_of, value_of
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.proof.resize import resized, whole
from lz_compile.passes.proof.subgraph import Subgraph
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.sampling.excerpt import Excerpt


def verbatim(found: Excerpt, sizes: Mapping[Axis, int] | None = None) -> tuple[str, list[fx.Node]]:
    """The text of what computes the exit, at other ``sizes`` if there are any, and the nodes that it is a function of.

    Numbers among these are given as tensors.

    Raises:
        ValueError: it calls what has no name that every process knows.
    """
    subgraph = _as_spelled(found) if sizes is None else resized(whole(found), sizes)
    given = [*(subgraph if sizes is None else found).inputs]
    graph, copies = subgraph.copied()
    graph.output_node().args = (copies[subgraph.outputs[0]],)
    placeholders = graph.find_nodes(op="placeholder")
    for node, placeholder in zip(given, placeholders, strict=True):
        if tensor_of(node) is None:
            users = [*placeholder.users]
            with graph.inserting_after(placeholders[-1]):
                number = graph.call_method("item", (placeholder,))
            placeholder.replace_all_uses_with(number, delete_user_cb=users.__contains__)
    return spelled(graph), given


def _as_spelled(found: Excerpt) -> Subgraph:
    """All of it at its own sizes; values besides that it reads are inputs."""
    own = {*found.core, *found.read}

    def is_given(node: fx.Node) -> bool:
        is_value = tensor_of(node) is not None or is_symbolic(node)
        return node in found.inputs or (node not in own and (is_value or not node.op.startswith("call")))

    nodes = needed(found.core, found.inputs, lambda node: (each for each in node.all_input_nodes if not is_given(each)))
    others = (each for node in nodes for each in node.all_input_nodes if is_given(each))
    return Subgraph(inputs=dict.fromkeys((*found.inputs, *others), ()), nodes=tuple(nodes), outputs=found.outputs)


def check_repeatable(found: Excerpt, *, wants_grad: bool) -> None:
    """Refuse what cannot be run again as it is spelled.

    Raises:
        RefusedError: it cannot.
    """
    why = "gradients flow through what is kept" if wants_grad else None
    try:
        verbatim(found)
    except ValueError as error:
        why = str(error)
    if why is not None:
        raise RefusedError(
            "TIES_UNSPECIFIED",
            f"which of several equal scores are kept is up to a sort, which is not asked again: {why}",
            "compare with the k-th largest score, or sort with stable=True",
        )


def filled(found: Excerpt, builder: Builder, value: Any, dim: int) -> Any:
    """``value``, a kernel's result in the layout of the exit, with the rows that it leaves open, tokens along ``dim``."""
    text, nodes = verbatim(found, builder.sizes)
    given = [builder.value(node) for node in nodes]
    for at, node in enumerate(nodes):
        if tensor_of(node) is None:
            kind = torch.float64 if isinstance(value_of(node), torch.SymFloat) else torch.int64
            given[at] = value.new_full((), given[at], dtype=kind)
    open_ties.fill(value, given, dim, text)
    return value
