"""An attention that is computed block by block, by hand, is told as one.

Each block of keys has exponentials of its own, which are not divided by their sum. What a piece lacks, the whole does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.view import Call, reached

#: Calls that put blocks together, besides arithmetic.
_JOINTS = frozenset(
    {"stack", "cat", "sum", "amax", "max", "logsumexp", "logaddexp", "sigmoid", "softmax", "unbind", "chunk", "split"}
)
#: How many nodes behind a piece, or before it, are looked at.
_FAR = 512
#: How many nodes behind a softmax are looked at for its scores.
_NEAR = 16


@dataclass(frozen=True)
class Missed:
    """A product of values that was refused, and what its weights come from: calls of softmax, exponentials."""

    miss: NearMiss
    softmaxes: frozenset[fx.Node]


@dataclass(frozen=True)
class Blocks:
    """Tells the pieces of attentions by blocks as one."""

    effects: Effects

    def told(self, missed: Sequence[Missed]) -> list[NearMiss]:
        """All that was refused, with every attention by blocks in the place of what it consists of."""
        pieces = [each for each in missed if self._is_piece(each)]
        wholes = list(self._wholes([each.miss for each in pieces]))
        known = frozenset[fx.Node]().union(*(whole.pieces for whole in wholes))
        rest = [each.miss for each in missed if not each.softmaxes & known and each.miss.node not in known]
        return [*wholes, *rest]

    def _is_piece(self, missed: Missed) -> bool:
        code = missed.miss.reason.code
        return code == "NOT_NORMALISED" or (
            code == "INTERIOR_USED" and any(map(self._is_summed_beside, missed.softmaxes))
        )

    def _wholes(self, pieces: Sequence[NearMiss]) -> Iterator[NearMiss]:
        left = [(piece, self._joints(piece.node)) for piece in pieces]
        while left:
            first, nodes = left.pop(0)
            count = 1
            while (more := next((each for each in left if nodes & each[1]), None)) is not None:
                left.remove(more)
                nodes, count = nodes | more[1], count + 1
            is_loop = any(map(_is_loop, nodes))
            if count > 1 or is_loop:
                yield self._whole(first, nodes, "a loop over blocks" if is_loop else f"{count} blocks")

    def _whole(self, first: NearMiss, joints: set[fx.Node], blocks: str) -> NearMiss:
        text = f"an attention is computed in {blocks}, whose exponentials are put together afterwards"
        edit = "write plain attention, softmax(q @ k.T) @ v: kernels go over blocks by themselves"
        pieces = frozenset((*joints, *self._behind(joints)))
        return replace(first, reason=Reason("ATTENTION_BY_BLOCKS", text), edit=edit, pieces=pieces, is_whole=True)

    def _joints(self, product: fx.Node) -> set[fx.Node]:
        """What a product of values is put together with others by, up to and including a division, and layouts behind it."""
        found, queue = {product}, [(product, False)]
        while queue and len(found) < _FAR:
            node, is_divided = queue.pop()
            for user in node.users:
                call = self.effects.calls.get(user)
                if user in found or call is None:
                    continue
                if is_divided and not (call.name in ("cat", "stack") or layout.rearranges(call)):
                    continue
                if is_divided or self._may_join(call):
                    found.add(user)
                    queue.append((user, is_divided or call.name == "div"))
        return found

    def _behind(self, joints: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """What is put together, up to the products of queries and keys: the running maximum is among it."""

        def joined(node: fx.Node) -> Iterator[fx.Node]:
            calls = map(self.effects.calls.get, node.all_input_nodes)
            return (call.node for call in calls if call is not None and self._may_join(call))

        return reached((each for joint in joints for each in joined(joint)), joined, _FAR)

    def _may_join(self, call: Call) -> bool:
        return is_pointwise(call) or layout.rearranges(call) or call.name in _JOINTS or _is_loop(call.node)

    def _is_summed_beside(self, softmax: fx.Node) -> bool:
        """Whether the logarithm of the sum of the same exponentials is computed, too."""

        def above(node: fx.Node) -> list[fx.Node]:
            call = self.effects.calls.get(node)
            is_passed = call is not None and (is_pointwise(call) or layout.rearranges(call))
            return node.all_input_nodes if is_passed else []

        near = reached(softmax.all_input_nodes, above, _NEAR)
        return any(self.effects.name(user) == "logsumexp" for node in near for user in node.users)


def _is_loop(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and "scan" in node.target.name()
