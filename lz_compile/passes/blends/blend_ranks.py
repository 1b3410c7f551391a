"""Which values of a graph are the largest or the second largest of a tensor along a dimension."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from lz_compile.passes.blends import blend_sorted
from lz_compile.passes.blends.blend_maxima import Maxima
from lz_compile.passes.blends.blend_pieces import call_of
from lz_compile.passes.blends.blend_statistics import Rank
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import Call, tensor_of

#: What gives a maximum, beside other things.
_ROOTS = frozenset({"topk", "sort", "msort", "kthvalue", "max", "amax"})


def has_ranks(effects: Effects) -> bool:
    """Whether a graph calls anything that gives a maximum."""
    return any(call is not None and call.name in _ROOTS for call in effects.calls.values())


@dataclass
class Ranks:
    """The order statistics of one graph."""

    effects: Effects
    _found: dict[fx.Node, Rank | None] = field(default_factory=dict)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self.of(node) is not None

    def of(self, node: fx.Node) -> Rank | None:
        """Which statistic a value is; None for others."""
        if node not in self._found:
            self._found[node] = None
            call = self.effects.calls.get(node)
            found = None if call is None or call.is_inplace else self._read(call)
            self._found[node] = found if found is None or not self._is_written(found) else None
        return self._found[node]

    def _is_written(self, rank: Rank) -> bool:
        effects = self.effects
        last = max(rank.nodes, key=effects.position.__getitem__)
        return effects.has_mutations and effects.overwritten_after(rank.source, rank.source, last) is not None

    def _read(self, call: Call) -> Rank | None:
        if tensor_of(call.node) is None:
            return None
        maxima = Maxima(self.effects, self.of)
        if call.name == "amax":
            return maxima.maximum(call, call)
        if call.name == "where":
            return maxima.counted(call)
        if call.name == "diff":
            return blend_sorted.difference(self.effects, call)
        if call.name == "getitem" and call.get("#1") == 0 and (outer := call_of(self.effects, call.input)) is not None:
            if outer.name == "max" and isinstance(outer.get("dim"), int):
                return maxima.maximum(outer, call)
            if outer.name == "kthvalue":
                return blend_sorted.kth(outer, call)
        return blend_sorted.picked(self.effects, call)
