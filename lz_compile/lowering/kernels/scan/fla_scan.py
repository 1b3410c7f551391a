"""flash-linear-attention's chunked kernels, as one node of a graph each, where a call of the library's own breaks it.

The library wants logarithms of decays, and the delta rules among its kernels want a key and its strength, of which this op
has products: ``left = beta * key``, ``erase = decay * key``. Both are facts of the data. So the data is looked at before
every call: decays that are zero, negative, above one, or so small that the gradient of a logarithm loses their digits, and
updates that do not write along what they erase, are computed by PyTorch in chunks. Looking waits for the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import torch

from lz_compile.lowering.kernel_operator import Kernel, asked, fresh, kernel_operator
from lz_compile.lowering.kernels.scan.chunked_scan import in_few_steps
from lz_compile.lowering.ops import scan as op
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, sizes_of

#: The smallest decay that is given as a logarithm: gradients of logarithms are divided by the decay.
SMALLEST_DECAY = 2.0**-10
#: The most rows of a state (``K <= 256`` in every kernel here).
LARGEST_KEY = 256
#: What an update may have beside the direction that is erased, over its own length, in roundings of its dtype.
ASIDE = 4.0

#: By its name in the op, every operand ``[B, T, H, K | V | 1]``, and the state ``[B, H, K, V]`` in float32.
Given: TypeAlias = dict[str, torch.Tensor]
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: What a function of the library takes, by position.
Arguments: TypeAlias = tuple[torch.Tensor | None, ...]


def _scan_by(call: Callable[[Given], Results], *, is_factored: bool) -> Kernel:
    """The op by one of the library's kernels."""

    def scan(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
        prepared = _prepared(x, is_factored=is_factored)
        if prepared is None:
            return in_few_steps(x, attrs)
        reads, last = call(prepared)
        return reads.transpose(1, 2).unsqueeze(3), last

    return fresh(op, scan)


def _prepared(x: Operands, *, is_factored: bool) -> Given | None:
    """The operands in the library's layout, with ``log_decay`` and (where factored) ``key`` and ``beta``.

    None: the library cannot take them.
    """
    sizes = sizes_of(x)
    if sizes.key_dim > LARGEST_KEY or 0 in sizes[:5]:
        return None
    last = {"left": sizes.key_dim, "erase": sizes.key_dim, "query": sizes.key_dim, "right": sizes.value_dim}
    there = {name: each for name, each in x.given().items() if name in last}
    dtype = reduce(torch.promote_types, [each.dtype for each in there.values()])
    shape = (sizes.batch, sizes.heads, sizes.length)
    found = {
        name: each.expand(*shape, 1, last[name]).squeeze(3).transpose(1, 2).to(dtype) for name, each in there.items()
    }
    facts, decay = [], None
    if x.decay is not None:
        decay = x.decay.expand(*shape, -1, -1).squeeze(4).transpose(1, 2).float()
        facts.append((decay.detach() >= SMALLEST_DECAY).all() & (decay.detach() <= 1).all())
        found["log_decay"] = decay.log()
    if is_factored:
        key, beta, fits = _factored(found, decay)
        found["key"], found["beta"] = key.to(dtype), beta
        facts.append(fits)
    if facts and not bool(torch.stack(facts).all()):
        return None
    if x.state is not None:
        found["state"] = x.state.expand(sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim).float()
    return found


def _factored(found: Given, decay: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key, strength, and whether what is written lies along what is erased.

    Where it does, gradients through these formulas are those of the key and the strength that the source has, unless the
    key is zero: no product tells the strength then.
    """
    left, erase = found["left"].float(), found["erase"].float()
    key = erase if decay is None else erase / decay.clamp(min=SMALLEST_DECAY)
    square = key.square().sum(-1)
    beta = (left * key).sum(-1) / torch.where(square == 0, 1.0, square)
    with torch.no_grad():
        aside = (left - beta.unsqueeze(-1) * key).norm(dim=-1)
        allowed = ASIDE * torch.finfo(found["left"].dtype).eps * left.norm(dim=-1)
        fits = (aside <= allowed).all()
        return key, beta, fits & (square != 0).all() if left.requires_grad else fits


# ---- calls -----------------------------------------------------------------------------------------------------------


def _dplr(x: Given) -> Arguments:
    """``S' = diag(exp(gk)) S + b (a^T S) + k v^T``: what is written need not lie along what is erased."""
    query, left = x["query"], x["left"]
    decay = x["log_decay"].expand_as(query) if "log_decay" in x else torch.zeros_like(query)
    return query, left, x["right"], x["erase"], -left, decay


def _per_head(x: Given) -> torch.Tensor | None:
    """Logarithms of decays that are one for each head."""
    return x["log_decay"].squeeze(-1) if "log_decay" in x else None


def _adapter(module: str, name: str, given: Callable[[Given], Arguments], *, is_factored: bool = False) -> Kernel:
    """The op by a function of the library, of what it is ``given``: reads and the last state. Its query is scaled already."""

    def call(x: Given) -> Results:
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        reads, last = function(*given(x), scale=1.0, initial_state=x.get("state"), output_final_state=True)
        return reads, last

    scan, kernel_id = _scan_by(call, is_factored=is_factored), f"fla.{name}"
    return kernel_operator(
        f"fla_{name}", op, scan, backward=asked(op, scan), fallback=in_few_steps, kernel_id=kernel_id
    )


simple_gla = _adapter("simple_gla", "chunk_simple_gla", lambda x: (x["query"], x["left"], x["right"], _per_head(x)))
gla = _adapter("gla", "chunk_gla", lambda x: (x["query"], x["left"], x["right"], x["log_decay"]))
kda = _adapter(
    "kda", "chunk_kda", lambda x: (x["query"], x["key"], x["right"], x["log_decay"], x["beta"]), is_factored=True
)
gated_delta_rule = _adapter(
    "gated_delta_rule",
    "chunk_gated_delta_rule",
    lambda x: (x["query"], x["key"], x["right"], _per_head(x), x["beta"]),
    is_factored=True,
)
delta_rule = _adapter(
    "delta_rule",
    "chunk_delta_rule",
    lambda x: (x["query"], x["key"], x["right"], x["beta"].to(x["key"].dtype)),
    is_factored=True,
)
dplr_delta_rule = _adapter("generalized_delta_rule", "chunk_dplr_delta_rule", _dplr)
