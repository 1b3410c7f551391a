"""Random equivalent spellings of RMSNorm, LayerNorm and their kin, composed from independent choices, and their reference.

A `Spelling` is one value per choice. `build()` returns a function of `inputs()` that normalises rows spelled that way,
`reference()` the same in float64 from the mathematics, `attributes()` what a recogniser must say of it. Which choices go
together is said once, in `RULES`; the Hypothesis strategy `spellings()` draws only combinations that obey them.

All built functions share one code object: call `torch._dynamo.reset()` between two that are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
# Largest absolute and relative error against the reference; values are of order one.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
GROUPS = 3
EPS = {"none": 0.0, "inside": 3e-3, "outside": 2e-2, "floor": 1e-2}
GAIN = 2.5


#: Sums of squares of rows by one product.
PRODUCTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda x: torch.einsum("...d,...d->...", x, x)[..., None],
    "vecdot": lambda x: torch.linalg.vecdot(x, x).unsqueeze(-1),
    "matmul": lambda x: (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1),
}


def choice(*options: Any) -> Any:
    """A dataclass field with these options; the first is the plainest and the default."""
    return field(default=options[0], metadata={"options": options})


@dataclass(frozen=True)
class Spelling:
    """One way to normalise rows; every field is an independent choice within `RULES`."""

    call: str = choice("none", "F.layer_norm", "nn.LayerNorm", "F.rms_norm", "nn.RMSNorm", "F.normalize")
    is_centred: bool = choice(False, True)
    over: str = choice("last", "last_two", "second", "second_moved", "groups", "heads", "heads_moved")
    shape: tuple[int, ...] = choice((5, 7, 24), (11, 24), (24,), (1, 24), (5, 1, 24), (2, 5, 4, 24))
    dtype: torch.dtype = choice(torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: RUF009 - a field
    # What the row is.
    row: str = choice("given", "residual", "gated", "copied")
    upcast: str = choice("none", "float", "to", "statistic", "statistic_and_back")
    # Its second moment.
    statistic: str = choice("mean_square", "var", "std", "norm", "moments")
    squared_by: str = choice("none", "pow", "square", "times", "operator", "torch_pow", "abs_pow", *PRODUCTS)
    averaged_by: str = choice("none", "mean", "torch_mean", "sum_over_number", "sum_over_shape", "sum_times", "sum")
    kept_by: str = choice("keepdim", "unsqueeze", "index")
    variance_by: str = choice("none", "method", "torch", "var_mean", "correction")
    norm_by: str = choice("none", "method", "linalg", "vector_norm")
    is_unbiased: bool = choice(False, True)
    dims: str = choice("negative", "positive", "tuple")
    # Its inverse root.
    eps_at: str = choice("inside", "outside", "floor", "none")
    floored_by: str = choice("none", "clamp", "clamp_min", "torch_clamp", "maximum")
    root: str = choice("rsqrt", "torch_rsqrt", "one_over_sqrt", "division", "power", "reciprocal", "root_power")
    product: str = choice("row_first", "row_last", "torch_mul", "inplace", "both_terms")
    # What comes after.
    scale: str = choice("none", "number_first", "number_last", "scalar", "one_element")
    weight: str = choice("none", "plain", "first", "offset", "offset_last", "float32", "expanded")
    bias: bool = choice(False, True)
    affine_by: str = choice("operators", "inplace", "addcmul", "last_axis_only")
    cast_at: str = choice("none", "before_weight", "after_weight", "type_as")
    flattened: bool = choice(False, True)
    gate: str = choice("none", "silu", "plain")

    # ---- what it means -----------------------------------------------------------------------------------------

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions that are normalised over, of what is normalised."""
        return {"last_two": (-2, -1), "second": (1,)}.get(self.over, (-1,))

    @property
    def hidden(self) -> tuple[int, ...]:
        """Their sizes."""
        if self.over == "groups":
            return (self.shape[-1] // GROUPS,)
        return tuple(self.shape[position] for position in ((1,) if self.over == "second_moved" else self.positions))

    @property
    def size(self) -> int:
        """How many elements one row has."""
        return math.prod(self.hidden)

    @property
    def has_own_root(self) -> bool:
        """Whether the statistic is a root already."""
        return self.statistic in ("std", "norm")

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The input, another of the same shape (a residual or a gate), weight, bias and a scalar."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32)

        weights = self.hidden if self.over != "groups" else self.shape[-1:]
        if self.affine_by == "last_axis_only":
            weights = weights[-1:]
        weight_dtype = torch.float32 if self.weight == "float32" else self.dtype
        scalar = random(1) if self.scale == "one_element" else random(1).reshape(())
        first = (random(*self.shape) + 0.5).to(self.dtype)
        return first, random(*self.shape).to(self.dtype), random(*weights).to(weight_dtype), random(*weights).to(weight_dtype), scalar.to(self.dtype)  # fmt: skip

    def reference(self, x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, scalar: Tensor) -> Tensor:
        """The value in float64."""
        x, other, weight, bias, scalar = (each.double() for each in (x, other, weight, bias, scalar))
        row = x + other if self.row == "residual" else x * F.silu(other) if self.row == "gated" else x
        given = row
        if self.over == "groups":
            row, weight, bias = (
                row.unflatten(-1, (GROUPS, -1)),
                *(w.unflatten(-1, (GROUPS, -1)) for w in (weight, bias)),
            )
        moved = self.over in ("second", "second_moved")
        row = row.movedim(1, -1) if moved else row
        centre = row - row.mean(self._own, keepdim=True) if self.is_centred else row
        variance = centre.square().sum(self._own, keepdim=True) / (self.size - self.correction)
        out = (
            centre
            * self._inverse(variance)
            * self.factor
            * (scalar if self.scale in ("scalar", "one_element") else 1.0)
        )
        if self.weight != "none":
            out = out * (weight + (1.0 if self.weight.startswith("offset") else 0.0))
        if self.bias:
            out = out + bias
        if moved and self.over == "second":
            out = out.movedim(-1, 1)
        out = out.flatten(-2) if self.over == "groups" else out
        out = out * F.silu(other) if self.gate == "silu" else out * other if self.gate == "plain" else out
        return out + given if self.row == "residual" else out

    @property
    def _own(self) -> tuple[int, ...]:
        return (-2, -1) if self.over == "last_two" else (-1,)

    @property
    def correction(self) -> int:
        """What is taken from the number of elements."""
        return int(self.is_unbiased)

    @property
    def factor(self) -> float:
        """The number that the normalised row is multiplied by."""
        factor = GAIN if self.scale.startswith("number") else 1.0
        return factor / self.size**0.5 if self.is_sum else factor

    @property
    def is_sum(self) -> bool:
        """Whether the row is divided by its length, not by the root of a mean."""
        return self.statistic == "norm" or self.call == "F.normalize" or self.averaged_by == "sum"

    def _inverse(self, variance: Tensor) -> Tensor:
        """The inverse root, of the variance as the source has it; the row that it multiplies is scaled by `factor`."""
        if self.is_sum:
            variance = variance * self.size
        eps = EPS[self.eps_at]
        if self.eps_at == "outside":
            inverse = 1 / (variance.sqrt() + eps)
        elif self.eps_at == "floor":
            inverse = 1 / (variance.clamp(min=eps).sqrt() if self.floors_square else variance.sqrt().clamp(min=eps))
        else:
            inverse = (variance + eps).rsqrt()
        return inverse * self.size**0.5 if self.is_sum else inverse

    @property
    def floors_square(self) -> bool:
        """Whether it is the variance that is floored, not its root."""
        return self.eps_at == "floor" and not self.has_own_root and self.call == "none"

    @property
    def eps(self) -> float:
        """Epsilon beside the variance (where it is inside) or its root, both of means."""
        beside_square = EPS[self.eps_at] ** (1 if self.eps_at in ("inside", "none") or self.floors_square else 2)
        if self.is_sum:
            beside_square /= self.size
        if self.is_unbiased:
            beside_square *= (self.size - 1) / self.size
        return beside_square if self.eps_at in ("inside", "none") else beside_square**0.5

    def attributes(self) -> dict[str, Any]:
        """What a recogniser must say beside :attr:`eps`."""
        spans_row = self.over != "groups" and (self.affine_by != "last_axis_only" or self.hidden[0] == 1)
        is_plain = self.scale == "none" and self.factor == 1 and not self.is_unbiased
        return {
            "is_centred": self.is_centred,
            "eps_at": "inside" if self.eps_at == "none" else self.eps_at,
            "has_weight": spans_row and self.weight != "none",
            "has_bias": spans_row and self.bias and (self.weight != "none" or is_plain),
            "weight_offset": 1.0 if spans_row and is_plain and self.weight.startswith("offset") else 0.0,
        }

    # ---- how it is spelled -------------------------------------------------------------------------------------

    def build(self) -> Callable[..., Tensor]:
        """A function of `inputs()`."""
        module = _module(self)

        def run(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, scalar: Tensor) -> Tensor:
            row = _row(self, x, other)
            out = _arranged(self, row, weight, bias, scalar, module)
            if self.gate != "none":
                out = out * (F.silu(other) if self.gate == "silu" else other)
            return row + out if self.row == "residual" else out

        return run


def _module(spelling: Spelling) -> Any:
    """The module that normalises; its own weight is one, the given one is applied afterwards."""
    eps = EPS[spelling.eps_at]
    if spelling.call == "nn.LayerNorm":
        return nn.LayerNorm(spelling.hidden, eps=eps, elementwise_affine=False)
    return nn.RMSNorm(spelling.hidden, eps=eps, elementwise_affine=False) if spelling.call == "nn.RMSNorm" else None


def _row(s: Spelling, x: Tensor, other: Tensor) -> Tensor:
    if s.row == "residual":
        return x + other
    if s.row == "gated":
        return x * F.silu(other)
    return x.clone() if s.row == "copied" else x


def _arranged(s: Spelling, row: Tensor, weight: Tensor, bias: Tensor, scalar: Tensor, module: Any) -> Tensor:
    """Bring the elements of a row to the dimensions that are normalised over, and back."""
    if s.over == "groups":
        groups = row.view(*row.shape[:-1], GROUPS, row.shape[-1] // GROUPS)
        if not s.flattened:
            weight, bias = (each.view(GROUPS, -1) for each in (weight, bias))
            return _normalised(s, groups, weight, bias, scalar, module).flatten(-2)
        return _normalised(s, groups, weight, bias, scalar, module)
    if s.over == "second":
        spread = (-1,) + (1,) * (row.dim() - 2)
        return _normalised(s, row, weight.view(spread), bias.view(spread), scalar, module)
    if s.over == "second_moved":
        return _normalised(s, row.movedim(1, -1), weight, bias, scalar, module)
    if s.over == "heads_moved":
        return _normalised(s, row.transpose(-2, -3), weight, bias, scalar, module).transpose(-2, -3)
    return _normalised(s, row, weight, bias, scalar, module)


def _normalised(s: Spelling, row: Tensor, weight: Tensor, bias: Tensor, scalar: Tensor, module: Any) -> Tensor:
    dtype = row.dtype
    if s.call != "none":
        out = _called(s, row, module)
    else:
        wide = row.float() if s.upcast == "float" else row.to(torch.float32) if s.upcast == "to" else row
        out = _divided(s, wide)
    if s.scale != "none":
        factor = GAIN if s.scale.startswith("number") else scalar
        out = out * factor if s.scale == "number_last" else factor * out
    if s.flattened:
        out = out.flatten(-2)
    if s.cast_at == "before_weight":
        out = out.to(dtype)
    out = _affine(s, out, weight, bias)
    if s.cast_at == "after_weight":
        out = out.to(dtype)
    return out.type_as(row) if s.cast_at == "type_as" else out


def _called(s: Spelling, row: Tensor, module: Any) -> Tensor:
    eps = EPS[s.eps_at]
    if module is not None:
        out: Tensor = module(row)
        return out
    if s.call == "F.layer_norm":
        return F.layer_norm(row, s.hidden, None, None, eps)
    if s.call == "F.rms_norm":
        return F.rms_norm(row, s.hidden, eps=eps)
    return F.normalize(row, p=2.0, dim=s.positions[0], eps=eps)


def _dims(s: Spelling, row: Tensor) -> Any:
    if s.dims == "positive":
        positive = [position % row.dim() for position in s.positions]
        return positive if len(positive) > 1 else positive[0]
    return s.positions if s.dims == "tuple" or len(s.positions) > 1 else s.positions[0]


def _divided(s: Spelling, row: Tensor) -> Tensor:
    """The row, less its mean, divided by the root of its second moment."""
    dims = _dims(s, row)
    if s.statistic == "var" and s.variance_by == "var_mean":
        variance, mean = torch.var_mean(row, dims, keepdim=True, unbiased=s.is_unbiased)
        return _times(s, row - mean, row, mean, variance)
    mean = row.mean(dims, keepdim=True) if s.is_centred else None
    centre = row if mean is None else row - mean
    if s.upcast.startswith("statistic"):
        wide = centre.to(torch.float32)
        return _times(s, centre, row, mean, _averaged(s, wide, dims))
    if s.statistic == "mean_square":
        return _times(s, centre, row, mean, _averaged(s, centre, dims))
    if s.statistic == "moments":
        assert mean is not None
        return _times(s, centre, row, mean, _averaged(s, row, dims) - mean * mean)
    if s.statistic == "var":
        return _times(s, centre, row, mean, _variance(s, row, dims))
    if s.statistic == "std":
        return _times(s, centre, row, mean, row.std(dims, keepdim=True, unbiased=s.is_unbiased))
    if s.norm_by == "vector_norm":
        return _times(s, centre, row, mean, torch.linalg.vector_norm(centre, dim=dims, keepdim=True))
    if s.norm_by == "linalg":
        return _times(s, centre, row, mean, torch.linalg.norm(centre, dim=dims, keepdim=True))
    return _times(s, centre, row, mean, centre.norm(2, dim=dims, keepdim=True))


def _variance(s: Spelling, row: Tensor, dims: Any) -> Tensor:
    if s.variance_by == "correction":
        return row.var(dims, keepdim=True, correction=s.correction)
    if s.variance_by == "torch":
        return torch.var(row, dims, unbiased=s.is_unbiased, keepdim=True)
    return row.var(dims, unbiased=s.is_unbiased, keepdim=True)


def _squared(s: Spelling, x: Tensor) -> Tensor:
    spelled: Mapping[str, Callable[[], Tensor]] = {
        "pow": lambda: x.pow(2),
        "square": x.square,
        "times": lambda: x * x,
        "operator": lambda: x**2,
        "torch_pow": lambda: torch.pow(x, 2.0),
        "abs_pow": lambda: x.abs().pow(2),
    }
    return spelled[s.squared_by]()


def _averaged(s: Spelling, row: Tensor, dims: Any) -> Tensor:
    """The mean of the squares, or their sum."""
    if s.squared_by in PRODUCTS:
        return _share(s, PRODUCTS[s.squared_by](row), row)
    x = _squared(s, row)
    if s.kept_by != "keepdim":
        averaged = x.mean(dims) if s.averaged_by == "mean" else torch.mean(x, dims)
        return averaged.unsqueeze(-1) if s.kept_by == "unsqueeze" else averaged[..., None]
    if s.averaged_by == "mean":
        return x.mean(dims, keepdim=True)
    if s.averaged_by == "torch_mean":
        return torch.mean(x, dim=dims, keepdim=True)
    return _share(s, x.sum(dim=dims, keepdim=True), x)


def _share(s: Spelling, total: Tensor, x: Tensor) -> Tensor:
    if s.averaged_by == "sum":
        return total
    if s.averaged_by == "sum_over_shape":
        return total / math.prod([x.shape[position] for position in s.positions])
    return total * (1.0 / s.size) if s.averaged_by == "sum_times" else total / s.size


def _floored(s: Spelling, x: Tensor, eps: float) -> Tensor:
    spelled: Mapping[str, Callable[[], Tensor]] = {
        "clamp": lambda: x.clamp(min=eps),
        "clamp_min": lambda: x.clamp_min(eps),
        "torch_clamp": lambda: torch.clamp(x, eps),
        "maximum": lambda: torch.maximum(x, torch.tensor(eps, dtype=x.dtype)),
    }
    return spelled[s.floored_by]()


def _times(s: Spelling, centre: Tensor, row: Tensor, mean: Tensor | None, statistic: Tensor) -> Tensor:
    """The centred row times the inverse root of its statistic."""
    eps = EPS[s.eps_at]
    if s.eps_at == "floor":
        statistic = _floored(s, statistic, eps)
    elif s.eps_at == "inside":
        statistic = statistic + eps if s.product != "row_last" else eps + statistic
    if s.has_own_root or s.eps_at == "outside":
        root = statistic if s.has_own_root else torch.sqrt(statistic)
        root = root + eps if s.eps_at == "outside" else root
        if s.root == "division":
            return centre / root
        inverse = 1.0 / root if s.root == "one_over_sqrt" else root.reciprocal() if s.root == "reciprocal" else root**-1
    elif s.root == "division":
        return centre / statistic.sqrt()
    else:
        spelled: Mapping[str, Callable[[], Tensor]] = {
            "rsqrt": statistic.rsqrt,
            "torch_rsqrt": lambda: torch.rsqrt(statistic),
            "one_over_sqrt": lambda: 1.0 / torch.sqrt(statistic),
            "power": lambda: statistic**-0.5,
            "reciprocal": lambda: statistic.sqrt().reciprocal(),
            "root_power": lambda: torch.pow(torch.pow(statistic, 0.5), -1),
        }
        inverse = spelled[s.root]()
        if s.upcast == "statistic_and_back":
            inverse = inverse.to(centre.dtype)
    if s.product == "both_terms" and mean is not None:
        return row * inverse - mean * inverse
    if s.product == "row_last":
        return inverse * centre
    if s.product == "inplace" and (s.is_centred or s.row != "given" or s.upcast != "none"):
        return (centre + 0.0).mul_(inverse)
    return torch.mul(centre, inverse) if s.product == "torch_mul" else centre * inverse


def _affine(s: Spelling, out: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if s.weight == "none":
        return out + bias if s.bias else out
    if s.weight == "offset":
        weight = 1.0 + weight
    if s.weight == "offset_last":
        weight = weight + 1
    if s.weight == "expanded":
        weight = weight.expand_as(out)
    if s.affine_by == "addcmul" and s.bias:
        return torch.addcmul(bias, weight, out)
    if s.affine_by == "inplace":
        out = out.to(torch.promote_types(out.dtype, weight.dtype)) * 1.0
        out = out.mul_(weight)
        return out.add_(bias) if s.bias else out
    out = weight * out if s.weight == "first" else out * weight
    return out + bias if s.bias else out


# ---- which choices go together -------------------------------------------------------------------------------------

Rule = Callable[[Mapping[str, Any], Any], bool]


def _where(condition: Callable[[Mapping[str, Any]], bool]) -> Rule:
    """``none`` exactly where the condition does not hold."""
    return lambda given, option: (option != "none") == condition(given)


def _is_plain(given: Mapping[str, Any]) -> bool:
    return bool(given["call"] == "none")


RULES: Mapping[str, Rule] = {
    "is_centred": lambda g, o: o == (g["call"] in ("F.layer_norm", "nn.LayerNorm")) or g["call"] == "none",
    "over": lambda g, o: g["call"] == "none" or (o != "second") or g["call"] == "F.normalize",
    "shape": lambda g, o: (
        len(o) >= {"last": 1, "last_two": 3, "second": 3, "second_moved": 3, "groups": 1, "heads": 4, "heads_moved": 4}[g["over"]]
        and not (g["over"] in ("second", "second_moved") and o[1] == 1)
        and not (g["over"] == "last_two" and g["call"] == "F.normalize")
    ),
    "row": lambda g, o: o != "residual" or g["over"] not in ("second_moved",),
    "upcast": lambda g, o: o == "none" or (_is_plain(g) and g["dtype"] in HALF),
    "statistic": lambda g, o: (
        (o == "mean_square" or _is_plain(g)) and (g["is_centred"] or o in ("mean_square", "norm"))
        and not (o == "moments" and g["dtype"] in HALF and g["upcast"] == "none")
        and (o == "mean_square" or not g["upcast"].startswith("statistic"))
    ),
    "squared_by": lambda g, o: (
        (o != "none") == (_is_plain(g) and g["statistic"] in ("mean_square", "moments"))
        and not (o in PRODUCTS and g["over"] in ("last_two", "second"))
    ),
    "averaged_by": lambda g, o: (
        (o != "none") == (_is_plain(g) and g["statistic"] in ("mean_square", "moments"))
        and not (o == "sum" and g["statistic"] == "moments")
        and not (o in ("mean", "torch_mean") and g["squared_by"] in PRODUCTS)
    ),
    "kept_by": lambda g, o: (
        o == "keepdim" or (g["averaged_by"] in ("mean", "torch_mean") and g["over"] not in ("last_two", "second"))
    ),
    "variance_by": _where(lambda g: g["statistic"] == "var"),
    "norm_by": lambda g, o: (
        (o != "none") == (g["statistic"] == "norm") and not (o == "linalg" and g["over"] == "last_two")
    ),
    "is_unbiased": lambda g, o: not o or g["statistic"] in ("var", "std"),
    "dims": lambda g, o: o == "negative" or _is_plain(g),
    "eps_at": lambda g, o: (
        o == "floor" if g["call"] == "F.normalize"
        else o == "inside" if not _is_plain(g)
        else o != "inside" if g["statistic"] in ("std", "norm")
        else True
    ),
    "floored_by": _where(lambda g: _is_plain(g) and g["eps_at"] == "floor"),
    "root": lambda g, o: (
        o == "rsqrt" if not _is_plain(g)
        else o in ("one_over_sqrt", "division", "power", "reciprocal")
        if g["statistic"] in ("std", "norm") or g["eps_at"] == "outside"
        else True
    ),
    "product": lambda g, o: (
        o == "row_first" or (_is_plain(g) and (g["is_centred"] or o != "both_terms") and g["root"] != "division")
    ) and not (o == "both_terms" and g["dtype"] in HALF and g["upcast"] == "none"),
    "scale": lambda g, o: o == "none" or g["dtype"] not in HALF or not o.startswith("s") or g["upcast"] == "none",
    "bias": lambda g, o: not o or g["weight"] != "none" or g["is_centred"],
    "affine_by": lambda g, o: (
        o == "operators" or (o == "last_axis_only" and g["over"] == "last_two")
        or (o in ("inplace", "addcmul") and g["weight"] != "none" and (g["bias"] or o == "inplace")
            and not (g["dtype"] in HALF and (g["upcast"] != "none" or g["weight"] == "float32")))
    ),
    "cast_at": lambda g, o: g["upcast"] in ("none", "statistic_and_back") or o != "none",
    "flattened": lambda g, o: o == (g["over"] == "groups") or (not o and g["over"] == "groups"),
    "gate": lambda g, o: o == "none" or (
        math.prod(g["shape"]) > g["shape"][-1] and g["row"] != "residual" and g["over"] != "second_moved"
    ),
}  # fmt: skip


@st.composite
def spellings(draw: st.DrawFn, **fixed: Any) -> Spelling:
    """Spellings that obey `RULES`, with some choices fixed."""
    given: dict[str, Any] = {}
    for each in fields(Spelling):
        options = [
            option
            for option in each.metadata["options"]
            if fixed.get(each.name, option) == option
            and RULES.get(each.name, lambda _given, _option: True)(given, option)
        ]
        if not options:
            reject()
        given[each.name] = draw(st.sampled_from(options))
    return Spelling(**given)
