"""Scans of every structure, at random: operands that broadcast, with strides of any kind, and the op's reference for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lz_compile.lowering.ops import scan as op

Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]
KINDS: Mapping[str, tuple[bool, bool]] = {
    "scalar": (False, False),
    "key": (True, False),
    "value": (False, True),
    "full": (True, True),
}


@dataclass(frozen=True)
class Problem:
    """Operands of a scan (float64, without gradients) and its attributes."""

    operands: op.Operands
    attrs: op.ScanAttrs

    def leaves(self, dtype: torch.dtype) -> op.Operands:
        """Operands in a dtype, with the same strides, of which gradients are asked."""
        return self.operands.map(lambda each: copied(each, dtype).requires_grad_())

    def in_dtype(self, dtype: torch.dtype) -> Problem:
        """The same with results in another dtype."""
        return replace(self, attrs=replace(self.attrs, out_dtype=dtype, state_dtype=dtype, compute_dtype=wide(dtype)))


@dataclass(frozen=True)
class Outcome:
    """What a kernel gives, and the gradients of its operands for random gradients of both results."""

    reads: torch.Tensor
    last: torch.Tensor
    gradients: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        return {"reads": self.reads, "last": self.last, **{f"of {k}": each for k, each in self.gradients.items()}}


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in."""
    return torch.promote_types(dtype, torch.float32)


def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the strides that it has."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    like = torch.zeros(max(span, 0), dtype=dtype).as_strided(tensor.shape, tensor.stride())
    return like.copy_(tensor)


def problem(seed: int, *, broadcasts: bool = True, **given: Any) -> Problem:
    """A scan drawn at random, but for what is ``given``.

    Args:
        seed: of everything that is drawn.
        broadcasts: operands may have the size 1 in batch, heads and time.
        given: ``decay``, ``drive`` (kinds, or None), ``rank``, ``erases``, ``reads`` (0: the trajectory), ``has_state``,
            ``at`` (``after`` or ``before``) and the sizes ``B``, ``H``, ``T``, ``K``, ``V``.
    """
    chance = random.Random(seed)
    drawn = {
        "decay": chance.choice([None, *KINDS]),
        "drive": chance.choice([None, None, *KINDS]),
        "rank": chance.choice([0, 1, 1, 2, 3]),
        "erases": chance.random() < 0.6,
        "reads": chance.choice([0, 1, 1, 2]),
        "has_state": chance.random() < 0.5,
        "at": chance.choice(["after", "after", "before"]),
        "B": chance.choice([1, 2]),
        "H": chance.choice([1, 3]),
        "T": chance.choice([1, 2, 9, 17]),
        "K": chance.choice([1, 3, 8, 13]),
        "V": chance.choice([1, 5, 8, 19, 40]),
        **given,
    }
    if not drawn["reads"]:
        drawn["K"] = 1
    if not drawn["rank"] and drawn["drive"] is None:
        drawn["drive"] = "full"
    return Problem(op.Operands(**_operands(drawn, chance, broadcasts)), _attributes(drawn))


def _attributes(drawn: Mapping[str, Any]) -> op.ScanAttrs:
    double = torch.float64
    return op.ScanAttrs(drawn["at"], bool(drawn["rank"]) and drawn["erases"], double, double, double)


def _operands(drawn: Mapping[str, Any], chance: random.Random, broadcasts: bool) -> dict[str, torch.Tensor]:
    sizes = {**drawn, "R": drawn["rank"], "Q": drawn["reads"]}
    dims: dict[str, str] = {}
    for name in ("decay", "drive"):
        if drawn[name] is not None:
            rows, columns = KINDS[drawn[name]]
            dims[name] = "BHT" + ("K" if rows else "1") + ("V" if columns else "1")
    if drawn["rank"]:
        dims |= {"left": "BHTRK", "right": "BHTRV", **({"erase": "BHTRK"} if drawn["erases"] else {})}
    if drawn["reads"]:
        dims["query"] = "BHTQK"
    if drawn["has_state"]:
        dims["state"] = "BHKV"
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    found = {}
    for place, (name, order) in enumerate(dims.items()):
        keeps_all = not broadcasts or place == 0
        shape = [
            1 if each == "1" or (not keeps_all and each in "BHTR" and chance.random() < 0.15) else sizes[each]
            for each in order
        ]
        found[name] = _strided(_values(name, shape, drawn, generator), chance)
    return found


def _values(name: str, shape: list[int], drawn: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """Such that a state neither explodes nor dies."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "decay":
        return torch.sigmoid(values + 1) * torch.where(values > 1.5, -1.0, 1.0) * (values > -1.5)
    if name in ("left", "erase"):
        return values * (0.8 / (shape[-1] * max(drawn["rank"], 1)) ** 0.5)
    return values


def _strided(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """The same values, contiguous, with dimensions in another order in memory, or as part of something larger."""
    kind = chance.choice(["contiguous", "permuted", "part"])
    if kind == "permuted":
        order = list(range(tensor.dim()))
        chance.shuffle(order)
        return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])
    if kind == "part":
        whole = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        part = whole[..., 1 : 1 + tensor.shape[-1]] if chance.random() < 0.5 else whole[..., 1::2]
        return part.copy_(tensor)
    return tensor


def run(problem: Problem, call: Call, dtype: torch.dtype = torch.float64, **arguments: Any) -> Outcome:
    """The results of a kernel and all gradients, in a dtype."""
    problem = problem.in_dtype(dtype)
    x = problem.leaves(dtype)
    leaves = x.given()
    reads, last = call(x, problem.attrs, **arguments)
    generator = torch.Generator().manual_seed(reads.numel() + last.numel())
    given = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype) for each in (reads, last)]
    outputs, given = zip(
        *(pair for pair in zip((reads, last), given, strict=True) if pair[0].requires_grad), strict=True
    )
    found = torch.autograd.grad(outputs, list(leaves.values()), given, materialize_grads=True)
    return Outcome(reads.detach(), last.detach(), dict(zip(leaves, found, strict=True)))


def errors(got: Outcome, exact: Outcome) -> dict[str, float]:
    """The largest error of each tensor, over its largest value (or one, where that is below one)."""
    pairs = zip(got.tensors().items(), exact.tensors().values(), strict=True)
    return {
        name: float((one.double() - other).abs().max() / other.abs().max().clamp(min=1.0)) if one.numel() else 0.0
        for (name, one), other in pairs
    }
