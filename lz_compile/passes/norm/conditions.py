"""What a normalisation must keep to: gain and shift from weights, and nobody else who needs what is inside."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch import fx

from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import axes_of
from lz_compile.passes.formula.moments import Moments
from lz_compile.passes.formula.normal_form import NormalForm
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.rewriting.core import Core

#: Functions of weights that can be written out again.
_OF_WEIGHTS = frozenset({sympy.exp, sympy.log, sympy.tanh})


def leaf_nodes(region: Region) -> set[fx.Node]:
    """The tensors and numbers that a region is of."""
    return {leaf.node for leaf in region.leaves.values()}


def check_weights(region: Region, form: NormalForm, moments: Moments) -> None:
    """Gain and shift must come from weights: tensors that are given, and are not one per row."""
    rows = set(axes_of(moments.dims)) - set(moments.hidden)
    functions = {each.func for part in (form.gain, form.shift) for each in part.atoms(sympy.Function)}
    if not functions <= _OF_WEIGHTS:
        raise RefusedError(
            "NO_NORM", "a weight is a function of which kernels know nothing", "multiply by it afterwards"
        )
    for symbol in (form.gain.free_symbols | form.shift.free_symbols) & region.leaves.keys():
        leaf = region.leaves[symbol]
        if tensor_of(leaf.node) is None:  # a number
            continue
        is_given = leaf.node.op in ("placeholder", "get_attr")
        own = set(axes_of(leaf.dims))
        if not is_given or (rows and rows <= own) or not own <= set(axes_of(moments.dims)):
            raise RefusedError("NO_NORM", f"{told(leaf.node)} is no weight of the row", "multiply by it afterwards")


def check_surroundings(effects: Effects, core: Core, region: Region, source: fx.Node, moments: Moments) -> None:
    """Refuse where someone else needs what follows the statistics, a mode changes, or an operand is overwritten."""
    first = min(effects.position[node] for node in moments.squared)
    late = tuple(node for node in core.nodes if effects.position[node] >= first)
    edge = [node for node in {source, *leaf_nodes(region)} if node not in core.nodes]
    readers = {node: region.readers.get(node, core.nodes[0]) for node in edge}
    try:
        replace(core, nodes=late).check(effects, readers)
    except RefusedError as refusal:
        if refusal.reason.code == "INTERIOR_USED":
            refusal.edit = "do not return or reuse the statistics, or what is between them and the result"
        raise
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
