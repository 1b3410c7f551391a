"""An excerpt that is run at other sizes, on values that tell what it does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.passes.formula.axes import Axis, axes_of
from lz_compile.passes.graph.view import tensor_of, value_of
from lz_compile.passes.proof.resize import resized, shape, whole
from lz_compile.passes.proof.running import Subgraph
from lz_compile.passes.sampling.excerpt import Excerpt, Scores


@dataclass
class Tried:
    """An excerpt, and what it raised when it was run."""

    found: Excerpt
    failures: list[Exception] = field(default_factory=list)
    _resized: dict[tuple[int, ...], Subgraph] = field(default_factory=dict)

    def run(
        self, scores: torch.Tensor, values: Mapping[fx.Node, Any], sizes: Mapping[Axis, int]
    ) -> torch.Tensor | None:
        """The exit in float64, for float64 ``scores`` of these sizes and a value for every leaf.

        None where it raises: whatever runs into its limits at other sizes is nothing that is known.
        """
        key = tuple(sizes[axis] for axis in axes_of(self.found.entry.dims))
        try:
            if key not in self._resized:
                self._resized[key] = resized(whole(self.found), sizes, torch.float64)
            found: torch.Tensor
            (found,) = self._resized[key].run(scores.clone(), *(values[leaf] for leaf in self.found.leaves))
        except Exception as error:  # noqa: BLE001 the source may raise anything; it is told once
            self.failures.append(error)
            return None
        return found

    def tell_failures(self) -> None:
        """Record that it did not run at other sizes."""
        text = (
            f"what {self.found.exit.name} makes of {self.found.entry.node.name} is not known for sure: "
            f"it was run at a small size and failed, {len(self.failures)} times"
        )
        events.record("PROBE_FAILED", text, self.failures[0], level=logging.INFO)


def sizes_for(entry: Scores, vocab: int) -> dict[Axis, int]:
    """A few rows of ``vocab`` tokens."""
    rows = iter((2, 3, 1, 2))
    known: dict[Any, int] = {}
    for axis in entry.rows:
        if axis.size not in known:
            known[axis.size] = next(rows, 1)
    return {axis: vocab if axis is entry.vocab else known[axis.size] for axis in axes_of(entry.dims)}


def random_leaves(found: Excerpt, sizes: Mapping[Axis, int], vocab: int) -> dict[fx.Node, Any]:
    """A value for each leaf: integers from 2 to half of the vocabulary, numbers from 0.3 to 0.95."""
    values: dict[fx.Node, Any] = {}
    for leaf, dims in found.leaves.items():
        tensor = tensor_of(leaf)
        extents = shape(dims, sizes)
        if tensor is None:
            is_integer = isinstance(value_of(leaf), torch.SymInt)
            values[leaf] = int(torch.randint(2, vocab // 2, ())) if is_integer else float(torch.rand(())) * 0.65 + 0.3
        elif tensor.is_floating_point():
            values[leaf] = torch.rand(extents, dtype=torch.float64) * 0.65 + 0.3
        elif tensor.dtype == torch.bool:
            values[leaf] = torch.rand(extents) < 0.5
        else:
            values[leaf] = torch.randint(2, vocab // 2, extents).to(tensor.dtype)
    return values
