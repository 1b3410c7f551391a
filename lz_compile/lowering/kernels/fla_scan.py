"""flash-linear-attention's chunked kernels, as one node of a graph each, where a call of the library's own breaks it.

The library wants logarithms of decays, and the delta rules among its kernels want a key and its strength, of which this op
has products: ``left = beta * key``, ``erase = decay * key``. Both are facts of the data. So the data is looked at before
every call: decays that are zero, negative, above one, or so small that the gradient of a logarithm loses their digits, and
updates that do not write along what they erase, are computed by PyTorch in chunks. Looking waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.opaque_scan import decoded, fake, fallback, given, gradients_by, in_torch, scan_by, together
from lz_compile.lowering.ops.scan import sizes_of

#: The smallest decay that is given as a logarithm: gradients of logarithms are divided by the decay.
SMALLEST_DECAY = 2.0**-10
#: The most rows of a state (``K <= 256`` in every kernel here).
LARGEST_KEY = 256
#: What an update may have beside the direction that is erased, over its own length, in roundings of its dtype.
ASIDE = 4.0

#: By its name in the op, every operand ``[B, T, H, K | V | 1]``, and the state ``[B, H, K, V]`` in float32.
Given: TypeAlias = dict[str, torch.Tensor]
Call: TypeAlias = Callable[[Given], tuple[torch.Tensor, torch.Tensor]]


def _call_by(call: Call, *, is_factored: bool = False) -> Callable[..., torch.Tensor]:
    """A function of the parameters of :func:`fake` by one of the library's kernels."""

    def run(
        state: torch.Tensor,
        decay: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        erase: torch.Tensor,
        drive: torch.Tensor,
        query: torch.Tensor,
        attrs: str,
    ) -> torch.Tensor:
        form = decoded(attrs)
        operands = given((state, decay, left, right, erase, drive, query))
        prepared = _prepared(operands, is_factored=is_factored)
        if prepared is None:
            return together(in_torch(operands, form), form)
        reads, last = call(prepared)
        return together((reads.transpose(1, 2).unsqueeze(3), last), form)

    return run


def _prepared(operands: dict[str, torch.Tensor | None], *, is_factored: bool) -> Given | None:
    """The operands in the library's layout, with ``log_decay`` and (where factored) ``key`` and ``beta``.

    None: the library cannot take them.
    """
    sizes = sizes_of(operands)
    if sizes.key_dim > LARGEST_KEY or 0 in sizes[:5]:
        return None
    last = {"left": sizes.key_dim, "erase": sizes.key_dim, "query": sizes.key_dim, "right": sizes.value_dim}
    there = {name: each for name, each in operands.items() if each is not None}
    dtype = torch.bfloat16
    for index, name in enumerate(name for name in last if name in there):
        dtype = there[name].dtype if index == 0 else torch.promote_types(dtype, there[name].dtype)
    shape = (sizes.batch, sizes.heads, sizes.length)
    found = {
        name: each.expand(*shape, 1, last[name]).squeeze(3).transpose(1, 2).to(dtype)
        for name, each in there.items()
        if name in last
    }
    facts = []
    if "decay" in there:
        decay = there["decay"].expand(*shape, -1, -1).squeeze(4).transpose(1, 2).float()
        facts.append((decay.detach() >= SMALLEST_DECAY).all() & (decay.detach() <= 1).all())
        found["log_decay"] = decay.log()
    if is_factored:
        key, beta, fits = _factored(found, decay if "decay" in there else None)
        found["key"], found["beta"] = key.to(dtype), beta
        facts.append(fits)
    if facts and not bool(torch.stack(facts).all()):
        return None
    if "state" in there:
        found["state"] = there["state"].expand(sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim).float()
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


def _simple_gla(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.simple_gla import chunk_simple_gla

    decay = operands.get("log_decay")
    found: tuple[torch.Tensor, torch.Tensor] = chunk_simple_gla(
        operands["query"], operands["left"], operands["right"], g=None if decay is None else decay.squeeze(-1),
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _gla(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.gla import chunk_gla

    found: tuple[torch.Tensor, torch.Tensor] = chunk_gla(
        operands["query"], operands["left"], operands["right"], operands["log_decay"],
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _kda(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.kda import chunk_kda

    found: tuple[torch.Tensor, torch.Tensor] = chunk_kda(
        operands["query"], operands["key"], operands["right"], operands["log_decay"], operands["beta"],
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _gated_delta_rule(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    found: tuple[torch.Tensor, torch.Tensor] = chunk_gated_delta_rule(
        operands["query"], operands["key"], operands["right"], operands["log_decay"].squeeze(-1), operands["beta"],
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _delta_rule(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    from fla.ops.delta_rule import chunk_delta_rule

    found: tuple[torch.Tensor, torch.Tensor] = chunk_delta_rule(
        operands["query"], operands["key"], operands["right"], operands["beta"].to(operands["key"].dtype),
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _dplr_delta_rule(operands: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """``S' = diag(exp(gk)) S + b (a^T S) + k v^T``: what is written need not lie along what is erased."""
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    query, left = operands["query"], operands["left"]
    decay = operands["log_decay"].expand_as(query) if "log_decay" in operands else torch.zeros_like(query)
    found: tuple[torch.Tensor, torch.Tensor] = chunk_dplr_delta_rule(
        query, left, operands["right"], operands["erase"], -left, decay,
        scale=1.0, initial_state=operands.get("state"), output_final_state=True,
    )  # fmt: skip
    return found


def _adapter(name: str, call: Call, *, is_factored: bool = False) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    run = _call_by(call, is_factored=is_factored)
    backward = gradients_by(run)
    operator = opaque(f"fla_{name}", run, fake, fallback=fallback, backward=backward, kernel_id=f"fla.{name}")
    return scan_by(operator)


simple_gla = _adapter("chunk_simple_gla", _simple_gla)
gla = _adapter("chunk_gla", _gla)
kda = _adapter("chunk_kda", _kda, is_factored=True)
gated_delta_rule = _adapter("chunk_gated_delta_rule", _gated_delta_rule, is_factored=True)
delta_rule = _adapter("chunk_delta_rule", _delta_rule, is_factored=True)
dplr_delta_rule = _adapter("chunk_dplr_delta_rule", _dplr_delta_rule)
