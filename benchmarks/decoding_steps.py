"""What is done to scores before a draw, as decoding loops spell it: recognised and rewritten, over eager and Inductor.

The claim: a step with top-p is faster than by Inductor, which sorts the vocabulary; no step is slower than by Inductor.

Steps give probabilities, so that all variants can be held against eager. ``transformers`` is the chain of its processors,
``serving`` one sort for limits that differ from row to row.

    python -m benchmarks.decoding_steps [--steps top_k transformers] [--rows 1 16] [--vocab 32000] [--locks lz.cpp_sampling]
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.harness import compiled, measure, prepare
from benchmarks.publish import Publication, timing_table
from lz_compile.runtime.problem.context import name_of

ROWS, VOCABULARIES = (1, 8, 64), (1000, 32_000, 128_256)
Step = Callable[[Tensor, Tensor], Tensor]
INF = math.inf


def masks(logits: Tensor, mask: Tensor) -> Tensor:
    """Two masks and a temperature."""
    x = logits.float().masked_fill(~mask, -INF)
    return F.softmax(torch.where(mask.roll(1, 0), x, -INF) / 0.8, dim=-1)


def top_k(logits: Tensor, mask: Tensor) -> Tensor:
    """The 50 largest, by comparing with the last of them."""
    x = logits.float() / 0.8
    return F.softmax(torch.where(x < torch.topk(x, 50).values[..., -1:], -INF, x), dim=-1)


def top_k_places(logits: Tensor, mask: Tensor) -> Tensor:
    """The 50 largest, put back into their places."""
    values, places = (logits.float() / 0.8).topk(50, dim=-1)
    return torch.full(logits.shape, -INF, device=logits.device).scatter(-1, places, values).softmax(-1)


def top_p(logits: Tensor, mask: Tensor) -> Tensor:
    """The fewest that reach 0.9 together."""
    return F.softmax(_top_p(logits.float() / 0.8), dim=-1)


def min_p(logits: Tensor, mask: Tensor) -> Tensor:
    """Those that are a twentieth as likely as the likeliest."""
    return F.softmax(_min_p(logits.float() / 0.8), dim=-1)


def transformers(logits: Tensor, mask: Tensor) -> Tensor:
    """A mask and the three limits in a chain."""
    x = logits.float().masked_fill(~mask, -INF) / 0.8
    x = x.masked_fill(x < torch.topk(x, 50)[0][..., -1, None], -INF)
    return F.softmax(_min_p(_top_p(x)), dim=-1)


def serving(logits: Tensor, mask: Tensor) -> Tensor:
    """Top-k and top-p of each row, by one sort."""
    k, p = 10 + mask[:, 64:104].sum(-1), 0.5 + 0.4 * mask[:, 64:104].float().mean(-1)
    ordered, places = logits.float().sort(dim=-1)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, (ordered.size(1) - k).unsqueeze(1)), -INF)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p.unsqueeze(1)
    dropped[:, -1] = False
    return ordered.masked_fill(dropped, -INF).scatter(-1, places, ordered.masked_fill(dropped, -INF)).softmax(-1)


def _top_p(x: Tensor) -> Tensor:
    ordered, places = torch.sort(x)
    dropped = ordered.softmax(-1).cumsum(-1) <= 0.1
    dropped[..., -1:] = False
    return x.masked_fill(dropped.scatter(-1, places, dropped), -INF)


def _min_p(x: Tensor) -> Tensor:
    shares = x.softmax(-1)
    return x.masked_fill(shares < 0.05 * shares.amax(-1, keepdim=True), -INF)


STEPS: Mapping[str, Step] = {
    each.__name__: each for each in (masks, top_k, top_k_places, top_p, min_p, transformers, serving)
}


def run_case(
    name: str, dtype: torch.dtype, rows: int, vocab: int, settings: argparse.Namespace, publication: Publication
) -> None:
    """Check, time and keep one step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab) * 3).to(settings.device, dtype)
    mask = torch.rand(rows, vocab, device=settings.device) < 0.5
    mask[:, :64] = True
    with torch.no_grad():
        functions = compiled(STEPS[name], settings.locks, "sampling")
        prepared = prepare(functions, lambda function: function(logits, mask))
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    case = {"step": name, "dtype": name_of(dtype), "rows": rows, "vocab": vocab}
    publication.add_timings(case, prepared, timings)


def main() -> None:
    """Run every step."""
    options = parser(__doc__)
    options.set_defaults(dtypes=[torch.float32])
    options.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    options.add_argument("--rows", nargs="+", type=int)
    options.add_argument("--vocab", nargs="+", type=int)
    options.add_argument("--locks", nargs="+", default=[], help="kernels to time, too")
    settings = parse(options, [0])
    settings.rows = settings.rows or list(ROWS[: 1 if settings.quick else None])
    settings.vocab = settings.vocab or list(VOCABULARIES[: 2 if settings.quick else None])
    publication = Publication("decoding_steps", settings.device, is_quick=settings.quick)
    for case in itertools.product(settings.steps, settings.dtypes, settings.rows, settings.vocab):
        run_case(*case, settings, publication)
    publication.show(timing_table("decoding steps", publication.rows))


if __name__ == "__main__":
    main()
