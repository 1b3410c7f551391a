"""One attention, spelled out: eager, Inductor, layerzero's choice, and every kernel of layerzero's by itself.

Forms, over 8 heads of 64 by default:

- ``causal``: a mask made inside as transformers makes it, with 0 or the dtype's lowest number to be added;
- ``bias``: the same mask given as an input, so that nobody can know what it says;
- ``full``: no mask;
- ``window``: causal, and of the keys before only the last 256;
- ``padding``: causal, and the last tenth of each sequence is padding, which an input of shape ``[B, T]`` says;
- ``left padding``: the same of the first tenth, whose rows see no key at all;
- ``prefix``: causal, and everyone sees the first quarter;
- ``documents``: causal within documents (eight of equal length), which an input of shape ``[B, T]`` names;
- ``dropout``: causal, and a tenth of the weights is dropped, other ones in each call and by each kernel;
- ``alibi``: causal, with a bias that is linear in the distance;
- ``decode``: one query, as many keys as ``--keys`` says, no mask.

    python -m benchmarks.attention [--forms causal full] [--lengths 512 2048] [--dtypes bfloat16] [--training] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, Function, Run, Variant, compiled, measure, prepare
from benchmarks.publish import Publication, summary_table, timing_table
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.estimate import INDUCTOR as LEFT_TO_INDUCTOR

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
FORMS = (
    "causal", "bias", "full", "window", "padding", "left padding", "prefix", "documents", "dropout", "alibi", "decode",
)  # fmt: skip
WINDOW, DOCUMENTS, DROPOUT = 256, 8, 0.1


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Attention as transformers spells it (``eager_attention_forward``), for ``[B, H, T, D]``."""
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout, training=True) if dropout else weights
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def additive_mask(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A causal mask as transformers makes it (``eager_mask``)."""
    keep = torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]
    return added(keep, dtype)


def added(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that only those remain where ``keep`` is True."""
    zero = torch.zeros((), dtype=dtype, device=keep.device)
    return torch.where(keep, zero, torch.finfo(dtype).min).reshape(-1, 1, *keep.shape[-2:])


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention under a mask that is made here."""
    return attention(query, key, value, additive_mask(query.shape[2], key.shape[2], query.dtype, query.device))


def dropping_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in training as BERT and GPT-2 are configured."""
    mask = additive_mask(query.shape[2], key.shape[2], query.dtype, query.device)
    return attention(query, key, value, mask, DROPOUT)


def positions(query: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries ``[T, 1]`` and of keys ``[1, T]``."""
    each = torch.arange(query.shape[2], device=query.device)
    return each[:, None], each[None]


def window_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention to the last :data:`WINDOW` keys."""
    rows, columns = positions(query)
    return attention(query, key, value, added((columns <= rows) & (columns > rows - WINDOW), query.dtype))


def padded_attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> Tensor:
    """Causal attention to the keys that ``kept`` ``[B, T]`` marks."""
    rows, columns = positions(query)
    return attention(query, key, value, added((columns <= rows) & kept[:, None, :], query.dtype))


def prefix_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, but for the first quarter, which everyone sees."""
    rows, columns = positions(query)
    return attention(query, key, value, added((columns <= rows) | (columns < query.shape[2] // 4), query.dtype))


def document_attention(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    """Causal attention within the documents that ``ids`` ``[B, T]`` names."""
    rows, columns = positions(query)
    return attention(query, key, value, added((columns <= rows) & (ids[:, :, None] == ids[:, None, :]), query.dtype))


def alibi_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """Causal attention with a bias of ``slopes`` ``[H]`` times the distance."""
    rows, columns = positions(query)
    bias = slopes[:, None, None] * (columns - rows)
    return attention(query, key, value, added(columns <= rows, query.dtype) + bias.to(query.dtype))


FUNCTIONS: dict[str, Function] = {
    "causal": causal_attention,
    "window": window_attention,
    "padding": padded_attention,
    "left padding": padded_attention,
    "prefix": prefix_attention,
    "documents": document_attention,
    "dropout": dropping_attention,
    "alibi": alibi_attention,
}


@dataclass(frozen=True)
class Case:
    """One form at one length, in one dtype."""

    form: str
    dtype: torch.dtype
    length: int

    def build(self, settings: argparse.Namespace) -> tuple[Function, list[Tensor]]:
        """The function, and its inputs."""
        queries = 1 if self.form == "decode" else self.length
        generator = torch.Generator(settings.device).manual_seed(0)

        def draw(tokens: int) -> Tensor:
            shape = (settings.batch, settings.heads, tokens, settings.head_dim)
            tensor = torch.randn(shape, generator=generator, device=settings.device).to(self.dtype)
            return tensor.requires_grad_(settings.training)

        inputs = [draw(queries), draw(self.length), draw(self.length)]
        if self.form == "bias":
            return attention, [*inputs, additive_mask(queries, self.length, self.dtype, settings.device)]
        return FUNCTIONS.get(self.form, attention), [*inputs, *self._given(settings)]

    def _given(self, settings: argparse.Namespace) -> list[Tensor]:
        """What a form is told beside query, key and value."""
        tokens = torch.arange(self.length, device=settings.device).expand(settings.batch, -1)
        if self.form == "padding":
            return [tokens < self.length - self.length // 10]
        if self.form == "left padding":
            return [tokens >= self.length // 10]
        if self.form == "documents":
            return [tokens // max(self.length // DOCUMENTS, 1)]
        heads = torch.arange(1, settings.heads + 1, device=settings.device)
        return [0.5**heads] if self.form == "alibi" else []

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"form": self.form, "dtype": str(self.dtype).removeprefix("torch."), "length": self.length}


def runner(inputs: Sequence[Tensor], *, is_training: bool, is_random: bool = False) -> Run:
    """Run a function on the inputs; in training, also backward from a fixed gradient. What is random is not compared."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad] if is_training else []

    def run(function: Function) -> list[Tensor]:
        output = function(*inputs)
        gradients = torch.autograd.grad(output, wanted, torch.ones_like(output)) if is_training else ()
        return [] if is_random else [output, *gradients]

    return run


def locked_elsewhere(variant: Variant) -> bool:
    """Whether a kernel was locked and another one ran, because the locked one refused."""
    return variant.name not in (EAGER, INDUCTOR, LAYERZERO) and variant.kernels != f"1x {variant.name}"


def run_case(case: Case, settings: argparse.Namespace, publication: Publication) -> None:
    """Check, time and keep one case."""
    torch._dynamo.reset()
    function, inputs = case.build(settings)
    locks = [kernel for kernel in kernels("attention") if kernel != LEFT_TO_INDUCTOR]
    run = runner(inputs, is_training=settings.training, is_random=case.form == "dropout")
    prepared = prepare(compiled(function, locks), run)
    refused = {variant.name: variant.refusals for variant in prepared.variants if locked_elsewhere(variant)}
    prepared = prepared.without(refused)
    timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    publication.add_timings(case.to_dict(), prepared, timings, refused=refused)


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--keys", type=int, default=2048, help="keys of the decode form")
    options.add_argument("--training", action="store_true", help="time forward and backward together")
    settings = parse(options, LENGTHS)
    name = "attention_training" if settings.training else "attention"
    sizes = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
    publication = Publication(name, settings.device, is_quick=settings.quick, **sizes)
    for form, dtype in itertools.product(settings.forms, settings.dtypes):
        for length in [settings.keys] if form == "decode" else settings.lengths:
            with torch.set_grad_enabled(settings.training):
                run_case(Case(form, dtype, length), settings, publication)
    publication.show(timing_table(name, publication.rows), summary_table(publication.rows))


if __name__ == "__main__":
    main()
