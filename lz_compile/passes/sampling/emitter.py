"""Recognised filters of scores: their operands in the op's canonical layout, and the result in the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from lz_compile.lowering.kernels.sampling import open_ties
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, SamplingFacts, Ties
from lz_compile.lowering.spelled import spelled
from lz_compile.lowering.token_bits import pack
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import hint_of, is_symbolic, known_tensor, needed, tensor_of, value_of
from lz_compile.passes.proof.resize import resized, whole
from lz_compile.passes.proof.running import Subgraph
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, TableEmitter, Trial
from lz_compile.passes.sampling.excerpt import Excerpt, Scores
from lz_compile.passes.sampling.kept import Limit, Limits
from lz_compile.passes.sampling.logit_processors import LogitProcessors, Part


@dataclass(frozen=True)
class SamplingEmitter(TableEmitter):
    """``op(logits, bitmask, bias, temperature, top_k, top_p, min_p)`` over rows and tokens."""

    result_shape: ClassVar = "N V"

    processors: LogitProcessors
    limits: Limits
    found: Excerpt
    output: Scores
    attrs: SamplingAttrs

    @classmethod
    def of(cls, processors: LogitProcessors, limits: Limits, found: Excerpt, output: Scores) -> SamplingEmitter:
        """What was read."""
        out = known_tensor(output.node)
        assert limits.result != "parts", "probabilities are divided by their sum"
        processed = {
            "bitmask": bool(processors.masks),
            "bias": bool(processors.bias),
            "temperature": processors.temperature != 1 or bool(processors.divisors),
        }
        given = {*limits.named, *(name for name, is_there in processed.items() if is_there)}

        def ties(own: Ties) -> Ties:
            return "open" if limits.is_any and own != "all" else own

        attrs = replace(
            SamplingAttrs.of(given, limits.result, out.dtype),
            top_k_ties=ties(limits.top_k_ties),
            top_p_ties=ties(limits.top_p_ties),
        )
        return cls(processors, limits, found, output, attrs)

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Rows and tokens."""
        return {"N": self.output.rows, "V": (self.output.vocab,)}

    def operands(self, builder: Builder) -> Operands:
        """Logits, and what there is besides."""
        processors = self.processors
        logits = builder.arrange(builder.value(processors.logits.node), processors.logits.dims, self.groups)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        found: dict[str, Any] = {"logits": logits}
        if processors.masks:
            found["bitmask"] = pack(self._allowed(builder))
        if processors.bias:
            found["bias"] = self._sum(builder)
        if self.attrs.has_temperature:
            found["temperature"] = self._temperature(builder, logits, kind)
        for name, limit in self.limits.named.items():
            found[name] = self._limit(builder, limit, logits, torch.int32 if name == "top_k" else kind)
        return Operands(**found)

    def _allowed(self, builder: Builder) -> Any:
        """One intersection of all masks."""
        total: Any = None
        for part in self.processors.masks:
            value = self._by_row(builder, part, is_wide=True)
            value = value.logical_not() if part.is_inverted else value
            total = value if total is None else total.logical_and(value)
        return total

    def _sum(self, builder: Builder) -> Any:
        total: Any = None
        for part in self.processors.bias:
            value = self._by_row(builder, part)
            value = -value if part.is_inverted else value
            total = value if total is None else total + value
        return total

    def _by_row(self, builder: Builder, part: Part, *, is_wide: bool = False) -> Any:
        """``[N or 1, V]``."""
        value = builder.arrange(builder.value(part.node), part.dims, self.groups)
        is_narrow = self.output.vocab not in axes_of(part.dims)
        return value.expand(-1, builder.size((self.output.vocab,))) if is_wide and is_narrow else value

    def _temperature(self, builder: Builder, logits: Any, kind: torch.dtype) -> Any:
        """``[N or 1]``; a row that the source divides by zero is no distribution."""
        processors = self.processors
        total = logits.new_full((1,), processors.temperature, dtype=kind)
        for part in processors.divisors:
            value = builder.value(part.node)
            if axes_of(part.dims):
                dims = tuple(dim for dim in part.dims if self.output.vocab not in dim)
                value = builder.arrange(
                    value.reshape(self._extents(builder, dims)), dims, (self.output.rows,), expand=True
                )
            else:
                value = value.reshape(1)
            total = total * value.to(kind)
        if processors.divisors:
            is_one = total > 0 if processors.masks else total != 0
            total = torch.where(is_one, total, float("nan"))
        return total

    @staticmethod
    def _extents(builder: Builder, dims: Dims) -> list[Any]:
        return [builder.size(dim) if dim else 1 for dim in dims]

    def _limit(self, builder: Builder, limit: Limit, logits: Any, kind: torch.dtype) -> Any:
        """``[N or 1]``."""
        if limit.leaf is None:
            return logits.new_full((1,), int(limit.number) if kind == torch.int32 else limit.number, dtype=kind)
        value = builder.value(limit.leaf)
        if tensor_of(limit.leaf) is None:
            value = logits.new_full((1,), value, dtype=kind)
        else:
            dims = self.found.leaves[limit.leaf]
            own = tuple(dim for dim in dims if dim)
            value = value.reshape(self._extents(builder, own)) if own else value.reshape(1)
            value = builder.arrange(value, own, (self.output.rows,), expand=True) if own else value
        before = builder.size((self.output.vocab,)) if limit.of_vocab else limit.number
        before = int(before) if kind == torch.int32 and isinstance(before, float) else before
        value = before - value if limit.sign < 0 else value + before if before else value
        return value.to(kind)

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's ``[N, V]`` in the layout of the node that it replaces."""
        restored = builder.restore(value, self.groups, self.output.dims)
        if not self.attrs.leaves_ties_open:
            return restored
        dim = next(at for at, each in enumerate(self.output.dims) if self.output.vocab in each)
        return filled(self.found, builder, restored, dim)

    def match(self, op: str, core: Core) -> Match:
        """The finished match."""
        vocab = self._proof_vocab()
        keeps = {part.node: not part.is_inverted for part in self.processors.masks}
        ranges = self._ranges(vocab)
        inputs = {
            node: Input(dims, keeps=keeps.get(node), range=ranges.get(node)) for node, dims in self.found.inputs.items()
        }
        operands = {
            "logits": self.processors.logits.node,
            **{f"bias{i}": each.node for i, each in enumerate(self.processors.bias)},
        }
        return Match(
            op,
            Site.of(core, self.output.dims, self.found.read),
            Found(self.attrs, self._facts(core), inputs, operands, self, self._formula()),
            Trial(least={self.output.vocab: vocab}, literal_sizes=self.found.literal_sizes),
        )

    def _proof_vocab(self) -> int:
        """As many tokens as the limits were seen at, and more than a symbolic number keeps."""
        counts = [int(hint_of(leaf)) for leaf in self.found.leaves if is_symbolic(leaf)]
        size = self.output.vocab.size
        least = max([self.limits.vocab, *(2 * count + 1 for count in counts)])
        return min(least, size) if isinstance(size, int) else least

    def _ranges(self, vocab: int) -> dict[fx.Node, tuple[float, float]]:
        found = {part.node: (0.3, 2.0) for part in self.processors.divisors}
        for name, limit in self.limits.named.items():
            if limit.leaf is not None:
                found[limit.leaf] = (2.0, vocab / 2) if name == "top_k" else (0.05, 0.95)
        return found

    def _facts(self, core: Core) -> SamplingFacts:
        logits = known_tensor(self.processors.logits.node)
        rows, vocab = self.extents("N V")
        return SamplingFacts(rows, vocab, logits.dtype, logits.device.type, core.wants_grad(self.found.inputs))

    def _formula(self) -> str:
        processors = self.processors
        text = "logits" + "".join(f" {'-' if part.is_inverted else '+'} {part.node.name}" for part in processors.bias)
        if self.attrs.has_temperature:
            names = [*(part.node.name for part in processors.divisors)]
            number = [f"{processors.temperature:g}"] if processors.temperature != 1 else []
            text = f"({text})" if processors.bias else text
            text = f"{text} / {' * '.join([*number, *names])}"
        if processors.masks:
            masks = (f"{'~' if part.is_inverted else ''}{part.node.name}" for part in processors.masks)
            text = f"{text} where {' and '.join(masks)}"
        for name, limit in self.limits.named.items():
            text = f"{name}({text}, {limit})"
        return f"softmax({text})" if self.attrs.result == "probs" else text


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


def check_repeatable(found: Excerpt, *, wants_grad: bool, is_differentiated: bool) -> None:
    """Refuse what cannot be run again as it is spelled: whatever has a gradient, also where nobody differentiates it.

    Raises:
        RefusedError: it cannot.
    """
    why, edit = None, "compare with the k-th largest score, or sort with stable=True"
    if wants_grad:
        why = "gradients flow through what is kept"
    if wants_grad and not is_differentiated:
        why, edit = "its scores have a gradient, which nothing asks for", "draw under torch.no_grad()"
    try:
        verbatim(found)
    except ValueError as error:
        why = str(error)
    if why is not None:
        raise RefusedError(
            "TIES_UNSPECIFIED",
            f"which of several equal scores are kept is up to a sort, which is not asked again: {why}",
            edit,
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
