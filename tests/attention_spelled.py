"""How each choice of a `Spelling` is written: the tables of phrases, and the computation that strings them together.

Axes are named as in `attention_spellings`. Sizes are read from the tensors, so the functions also trace dynamically.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attention_spellings import (
    ARITHMETIC,
    EINSUMS,
    LOG2_E,
    NATURAL,
    PACKED,
    SPLIT,
    UNEVENLY_PACKED,
    USER_MASKS,
    WINDOW,
    Spelling,
)


def _times_equals(x: Tensor, factor: float) -> Tensor:
    x *= factor
    return x


def _plus_equals(x: Tensor, addend: Tensor) -> Tensor:
    x += addend
    return x


Phrases = Mapping[str, Callable[..., Tensor]]

SPLIT_HEADS: Phrases = {
    "view": lambda x, heads: x.view(x.shape[0], x.shape[1], heads, -1),
    "reshape": lambda x, heads: x.reshape(*x.shape[:2], heads, x.shape[-1] // heads),
    "unflatten": lambda x, heads: x.unflatten(-1, (heads, -1)),
}
MOVED_HEADS: Phrases = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "movedim": lambda x: x.movedim(2, 1),
    "swapaxes": lambda x: torch.swapaxes(x, -3, -2),
    "transpose_contiguous": lambda x: x.transpose(1, 2).contiguous(),
}
FLATTENED: Phrases = {
    "reshape": lambda x: x.reshape(-1, *x.shape[2:]),
    "contiguous_view": lambda x: x.contiguous().view(x.shape[0] * x.shape[1], x.shape[2], x.shape[3]),
    "flatten": lambda x: x.flatten(0, 1),
}
THREE: Mapping[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
    "packed_unbind": lambda x, heads: x.unbind(2),
    "packed_select": lambda x, heads: (x[:, :, 0], x[:, :, 1], x[:, :, 2]),
    "packed_view": lambda x, heads: x.view(*x.shape[:2], 3, heads, -1).unbind(dim=-3),
    "packed_permute": lambda x, heads: x.reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0),
    "packed_chunk": lambda x, heads: x.chunk(3, dim=-1),
    "packed_interleaved": lambda x, heads: x.view(*x.shape[:2], heads, -1).chunk(3, dim=-1),
}
TURNED: Phrases = {
    "transpose": lambda x: x.transpose(-2, -1),
    "transpose_positive": lambda x: x.transpose(x.dim() - 2, x.dim() - 1),
    "transpose_commuted": lambda x: torch.transpose(x, -1, -2),
    "swapaxes": lambda x: x.swapaxes(-1, -2),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(*range(x.dim() - 2), x.dim() - 1, x.dim() - 2),
}
PRODUCTS: Phrases = {
    "operator": lambda a, b: a @ b,
    "torch_matmul": torch.matmul,
    "tensor_matmul": lambda a, b: a.matmul(b),
    "bmm": lambda a, b: (
        torch.bmm(a, b)
        if a.dim() == 3
        else a.reshape(-1, *a.shape[-2:]).bmm(b.reshape(-1, *b.shape[-2:])).view(*a.shape[:-1], b.shape[-1])
    ),
}
LETTERS = {  # tables, because Dynamo traces neither str.upper nor str.translate
    "plain": dict(zip("bwhgqkdef", "bwhgqkdef", strict=True)),
    "renamed": dict(zip("bwhgqkdef", "nxmrijcvz", strict=True)),
    "upper": dict(zip("bwhgqkdef", "BWHGQKDEF", strict=True)),
}
SCALED: Phrases = {  # x * factor, where factor = root ** -0.5
    "times_float": lambda x, factor, root: x * factor,
    "float_times": lambda x, factor, root: factor * x,
    "times_power": lambda x, factor, root: x * root**-0.5,
    "torch_mul": lambda x, factor, root: torch.mul(x, factor),
    "tensor_mul": lambda x, factor, root: x.mul(factor),
    "mul_inplace": lambda x, factor, root: x.mul_(factor),
    "times_equals": lambda x, factor, root: _times_equals(x, factor),
    "divided_by_float": lambda x, factor, root: x / (1 / factor),
    "divided_by_math_sqrt": lambda x, factor, root: x / math.sqrt(root),
    "divided_by_tensor_sqrt": lambda x, factor, root: (
        x / torch.sqrt(torch.tensor(root, dtype=x.dtype, device=x.device))
    ),
    "tensor_div": lambda x, factor, root: x.div(1 / factor),
    "torch_div": lambda x, factor, root: torch.div(x, 1 / factor),
    "div_inplace": lambda x, factor, root: x.div_(1 / factor),
}
ADDED: Phrases = {
    "scores_first": lambda x, m: x + m,
    "bias_first": lambda x, m: m + x,
    "torch_add": torch.add,
    "tensor_add": lambda x, m: x.add(m),
    "inplace": _plus_equals,
    "baddbmm": lambda x, m: x,  # already added by the contraction
}
CAUSAL: Phrases = {  # of query positions q and key positions k that end together
    "tril": lambda q, k, device: torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q),
    "triu": lambda q, k, device: torch.triu(torch.ones(q, k, device=device), diagonal=k - q + 1).bool(),
    "arange": lambda q, k, device: (
        torch.arange(k, device=device)[None, :] <= torch.arange(q, device=device)[:, None] + (k - q)
    ),
    "arange_window": lambda q, k, device: (_distance(q, k, device) >= 0) & (_distance(q, k, device) < WINDOW),
}
NEGATED: Phrases = {
    "invert": lambda m: ~m,
    "logical_not": torch.logical_not,
    "equals_zero": lambda m: m == 0,
    "none": lambda m: m,
}
FILLS: Mapping[str, Callable[[torch.dtype], float]] = {
    "-inf": lambda dtype: float("-inf"),
    "min": lambda dtype: torch.finfo(dtype).min,
    "-1e9": lambda dtype: -1e9,
    "-1e4": lambda dtype: -10000.0,
}
FILLED: Phrases = {  # m is true where the scores are dropped in WANTS_DROP, where they are kept otherwise
    "masked_fill": lambda x, m, fill: x.masked_fill(m, fill),
    "torch_masked_fill": torch.masked_fill,
    "masked_fill_inplace": lambda x, m, fill: x.masked_fill_(m, fill),
    "where_keep": lambda x, m, fill: torch.where(m, x, fill),
    "where_drop": lambda x, m, fill: torch.where(m, fill, x),
    "where_method": lambda x, m, fill: x.where(m, fill),
    "where_tensor": lambda x, m, fill: torch.where(m, x, torch.full([], fill, dtype=x.dtype, device=x.device)),
}
ADDEND: Phrases = {  # a float tensor that is 0 where the scores are kept and `fill` where they are dropped
    "zeros_filled": lambda m, dtype, fill: torch.zeros(m.shape, dtype=dtype, device=m.device).masked_fill_(m, fill),
    "where_zero": lambda m, dtype, fill: torch.where(m, torch.zeros((), dtype=dtype, device=m.device), fill),
    "one_minus": lambda m, dtype, fill: (1.0 - m.to(dtype)) * fill,
    "times_fill": lambda m, dtype, fill: m.to(dtype) * fill,
}
SOFTMAXES: Phrases = {
    "functional": lambda x, dim, dtype: F.softmax(x, dim=dim, **dtype),
    "torch": lambda x, dim, dtype: torch.softmax(x, dim, **dtype),
    "method": lambda x, dim, dtype: x.softmax(dim, **dtype),
    "log_softmax": lambda x, dim, dtype: F.log_softmax(x, dim=dim).exp(),
}
EXPONENTIALS: Phrases = {
    "torch_exp": torch.exp,
    "method_exp": lambda x: x.exp(),
    "exp2": torch.exp2,
    "exp2_folded": lambda x: x.exp2(),
}
SHIFTS: Phrases = {
    "amax": lambda x, dim, keepdim: x.amax(dim, keepdim=keepdim),
    "torch_amax": lambda x, dim, keepdim: torch.amax(x, dim=dim, keepdim=keepdim),
    "max_values": lambda x, dim, keepdim: torch.max(x, dim=dim, keepdim=keepdim).values,
    "max_index": lambda x, dim, keepdim: x.max(dim, keepdim=keepdim)[0],
    "amax_detached": lambda x, dim, keepdim: x.amax(dim=dim, keepdim=keepdim).detach(),
}
DROPOUTS: Phrases = {
    "none": lambda p: p,
    "functional_p0": lambda p: F.dropout(p, p=0.0),
    "functional_eval": lambda p: F.dropout(p, p=0.1, training=False),
    "torch_eval": lambda p: torch.dropout(p, 0.1, False),
}
CASTS: Phrases = {
    "none": lambda p, query, value: p,
    "to_query": lambda p, query, value: p.to(query.dtype),
    "type_as_query": lambda p, query, value: p.type_as(query),
    "to_value": lambda p, query, value: p.to(dtype=value.dtype),
    "upcast_value": lambda p, query, value: p,
}


def _distance(q: int, k: int, device: torch.device) -> Tensor:
    """How far each key lies before each query; both end at the same position."""
    return torch.arange(k - q, k, device=device)[:, None] - torch.arange(k, device=device)[None, :]


def _modules(s: Spelling) -> dict[str, Callable[[Tensor], Tensor]]:
    """The parts that this spelling writes as modules."""
    dim = s.score_axes.index("k")
    dim = dim - len(s.score_axes) if s.softmax_dim == "negative" else dim
    rate = 0.0 if s.dropout == "module_p0" else 0.1
    return {"softmax": nn.Softmax(dim=dim), "dropout": nn.Dropout(rate).train(s.dropout == "module_p0")}


def built(s: Spelling) -> Callable[..., Tensor]:
    """The function that computes attention in this spelling."""
    modules = _modules(s)

    def attention(*inputs: Tensor) -> Tensor:
        named = dict(zip(s.input_names, inputs, strict=True))
        query, key, value = _operands(s, named)
        weights, total = _weights(s, _scores(s, named, query, key), modules)
        return _result(s, query, _weights_cast(s, weights, query, value, modules), total, value)

    return attention


def _operands(s: Spelling, named: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in the axes of `s.form`."""
    (h, hkv), (d, e) = s.heads, s.head_dims
    parts: tuple[Tensor, ...]
    if s.layout not in PACKED:
        parts = (named["query"], named["key"], named["value"])
    elif s.layout in UNEVENLY_PACKED:
        raw, x = s.raw_kv_heads, named["packed"]
        a, b = h * d, h * d + raw * d
        split = s.layout == "packed_split"
        parts = x.split([a, raw * d, raw * e], dim=-1) if split else (x[..., :a], x[..., a:b], x[..., b:])
    else:
        parts = THREE[s.layout](named["packed"], h)
    if s.layout in SPLIT:
        counts = (h, s.raw_kv_heads, s.raw_kv_heads)
        parts = tuple(SPLIT_HEADS[s.heads_split_by](x, n) for x, n in zip(parts, counts, strict=True))
    query, key, value = (_formed(s, x, role) for x, role in zip(parts, ("query", "key", "value"), strict=True))
    if s.form == "bhgqd":
        query = (
            query.unflatten(1, (hkv, h // hkv))
            if s.heads_split_by == "unflatten"
            else query.reshape(query.shape[0], hkv, h // hkv, *query.shape[2:])
        )
    return query, key, value


def _formed(s: Spelling, x: Tensor, role: str) -> Tensor:
    """One operand, moved from the layout's axes to the form's, with key and value heads shared."""
    if NATURAL[s.layout] == "bqhd" and s.form == "hbqd":
        x = x.permute(2, 0, 1, 3)
    elif NATURAL[s.layout] == "bqhd" and s.form != "bqhd":
        x = x.permute(0, 2, 3, 1) if role == "key" and s.key_built == "transposed" else MOVED_HEADS[s.heads_moved_by](x)
    if role != "query":
        x = _shared(s, x, {"bqhd": 2, "hbqd": 0, "bwhqd": 2}.get(s.form, 1))
    return FLATTENED[s.flattened_by](x) if s.flattened_by != "none" else x


def _shared(s: Spelling, x: Tensor, dim: int) -> Tensor:
    """Key or value with as many heads along `dim` as the query has, or with a size that broadcasts."""
    every, groups, shape = (slice(None),) * dim, s.groups, x.shape
    if s.sharing == "expand_reshape":
        expanded = x[(*every, slice(None), None)].expand(*shape[: dim + 1], groups, *shape[dim + 1 :])
        return expanded.reshape(*shape[:dim], shape[dim] * groups, *shape[dim + 1 :])
    if s.sharing == "unsqueeze_flatten":
        return x.unsqueeze(dim + 1).expand(*[-1] * (dim + 1), groups, *[-1] * (x.dim() - dim - 1)).flatten(dim, dim + 1)
    if s.sharing == "repeat_interleave":
        return x.repeat_interleave(groups, dim=dim)
    if s.sharing == "tile":
        return x.repeat(*[groups if i == dim else 1 for i in range(x.dim())])
    if s.sharing == "first_head":
        return x[(*every, slice(0, 1))]
    return x[:, :, None] if s.sharing == "grouped_broadcast" else x


def _key_axes(s: Spelling) -> str:
    """Axes of the key as it is contracted."""
    axes = s.form.replace("q", "k").replace("g", "" if s.sharing == "grouped_einsum" else "g")
    return axes.replace("kd", "dk") if s.key_built == "transposed" else axes


def _value_axes(s: Spelling) -> str:
    return s.form.replace("q", "k").replace("d", "e").replace("g", "" if s.sharing == "grouped_einsum" else "g")


def _einsum(s: Spelling, how: str, a: Tensor, b: Tensor, axes: tuple[str, str, str]) -> Tensor:
    """The einsum of two operands; `axes` are theirs and the result's."""
    if how == "einsum_ellipsis":
        axes = ("..." + axes[0][-2:], "..." + axes[1][-2:], "..." + axes[2][-2:])
    left, right, result = ("".join(LETTERS[s.letters].get(a, a) for a in text) for text in axes)
    if how == "einsum_swapped":
        return torch.einsum(f"{right},{left}->{result}", b, a)
    return torch.einsum(f"{left}, {right} -> {result}", a, b)


def _product(s: Spelling, named: Mapping[str, Tensor], query: Tensor, key: Tensor) -> Tensor:
    """Query times key in the axes `s.score_axes`, contracted over the head dim."""
    if s.contraction in EINSUMS:
        return _einsum(s, s.contraction, query, key, (s.form, _key_axes(s), s.score_axes))
    rows, columns = (query, key) if s.order == "qk" else (key, query)
    if s.contraction == "broadcast_sum":
        return (rows[..., :, None, :] * columns[..., None, :, :]).sum(-1)
    columns = TURNED[s.key_turned_by](columns) if s.key_turned_by != "none" else columns
    if s.contraction != "baddbmm":
        return PRODUCTS[s.contraction](rows, columns)
    alpha = s.factor if s.scale_at == "alpha" else 1.0
    sizes = {"f": query.shape[0], "q": query.shape[1], "k": columns.shape[2]}
    if s.bias_added_by == "baddbmm":
        addend, axes, is_scaled = _bias(s, named, sizes["q"], sizes["k"]), s.bias_axes, s.bias_before_scale
    elif s.mask_added_by == "baddbmm":
        addend, axes, is_scaled = named["mask"], s.mask_axes, s.mask_before_scale
    else:
        addend = torch.empty(sizes["f"], sizes["q"], sizes["k"], dtype=query.dtype, device=query.device)
        return torch.baddbmm(addend, rows, columns, beta=0.0, alpha=alpha)
    addend = _fitted(s, addend, axes, "fqk", sizes)
    return torch.baddbmm(addend, rows, columns, beta=alpha if is_scaled else 1.0, alpha=alpha)


def _scaled(s: Spelling, named: Mapping[str, Tensor], x: Tensor, head_dim: int) -> Tensor:
    """One operand or the scores times the scale, or times its square root where both operands take a part."""
    if s.scale_by == "tensor_argument":
        return x * named["scale"]
    is_half = s.scale_at == "query_and_key"
    root = math.sqrt(head_dim) if is_half else head_dim
    return SCALED[s.scale_by](x, math.sqrt(s.factor) if is_half else s.factor, root)


def _scores(s: Spelling, named: Mapping[str, Tensor], query: Tensor, key: Tensor) -> Tensor:
    """Scaled, biased and masked scores, in this spelling's order of steps."""
    d = query.shape[-1]
    if s.upcast == "operands":
        query, key = query.float(), key.float()
    query = _scaled(s, named, query, d) if s.scale_at in ("query", "query_and_key") else query
    key = _scaled(s, named, key, d) if s.scale_at in ("key", "query_and_key") else key
    x = _product(s, named, query, key)
    x = x.float() if s.upcast == "product" else x
    added = ("mask", "bias") if s.bias_last else ("bias", "mask")
    early = {"mask": s.mask_before_scale, "bias": s.bias_before_scale}
    for step in (*(a for a in added if early[a]), "scale", *(a for a in added if not early[a])):
        if step == "scale" and s.scale_at == "scores":
            x = _scaled(s, named, x, d)
        elif step == "bias" and s.bias != "none":
            x = _biased(s, named, x)
        elif step == "mask" and s.mask != "none":
            x = _masked(s, named, x)
    return x.float() if s.upcast == "scores" else x


def _fitted(s: Spelling, mask: Tensor, axes: str, target: str, sizes: Mapping[str, int]) -> Tensor:
    """A mask or bias with axes b, h, q, k (from the right; 1 where absent), reshaped to broadcast against `target`."""
    present = "bhqk"[4 - len(axes) :]
    if "f" in target and mask.dim() > 2:
        h, batch = s.heads[0], sizes["f"] // s.heads[0]
        mask, present = mask.expand(batch, h, sizes["q"], sizes["k"]).reshape(-1, sizes["q"], sizes["k"]), "fqk"
    if "g" in target and mask.dim() > 2:
        mask = mask.unflatten(-3, (s.heads[1], s.groups)) if axes[-3] == "h" else mask.unsqueeze(-3)
        present = present.replace("h", "hg")
    for letter in present:
        if letter not in target:
            mask, present = mask.select(present.index(letter), 0), present.replace(letter, "")
    wanted = "".join(letter for letter in target if letter in present)
    if wanted != present:
        mask = mask.permute(*(present.index(letter) for letter in wanted))
    index = tuple(slice(None) if letter in present else None for letter in target[target.index(wanted[0]) :])
    return mask[index] if None in index else mask


def _bias(s: Spelling, named: Mapping[str, Tensor], q: int, k: int) -> Tensor:
    """The bias in the axes `s.bias_axes`: given, gathered from a table [q + k - 1, h], or slope × distance."""
    given = named["bias"]
    if s.bias == "learned":
        return given
    distance = _distance(q, k, given.device)
    if s.bias == "alibi":
        return given[:, None, None] * -distance.to(given.dtype)
    index = distance + (q - 1)
    gathered = given[index] if s.bias == "relative_table" else F.embedding(index, given)
    return gathered.permute(2, 0, 1)


def _biased(s: Spelling, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
    sizes = dict(zip(s.score_axes, x.shape, strict=True))
    if s.bias_added_by == "baddbmm":
        return x
    bias = _fitted(s, _bias(s, named, sizes["q"], sizes["k"]), s.bias_axes, s.score_axes, sizes)
    return ADDED[s.bias_added_by](x, bias)


def _masked(s: Spelling, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The scores with every mask of this spelling applied."""
    sizes = dict(zip(s.score_axes, x.shape, strict=True))
    q, k = sizes["q"], sizes["k"]
    if s.mask in USER_MASKS:
        masks = [(named["mask"], s.mask_axes)]
    elif s.mask == "tril_and_padding":
        masks = [(CAUSAL["tril"](q, k, x.device) & named["padding"][:, None, None, :], "b1qk")]
    elif s.mask == "tril_then_padding":
        masks = [(CAUSAL["tril"](q, k, x.device), "qk"), (named["padding"][:, None, None, :], "b11k")]
    else:
        masks = [(CAUSAL[s.mask](q, k, x.device), "qk")]
    for mask, axes in masks:
        x = _masked_once(s, x, mask, axes)
    return x


def _masked_once(s: Spelling, x: Tensor, mask: Tensor, axes: str) -> Tensor:
    target = s.score_axes
    if s.flat_mask == "scores_unflattened":
        x, target = x.view(-1, s.heads[0], *x.shape[1:]), target.replace("f", "bh")
    mask = _fitted(s, mask, axes, target, dict(zip(target, x.shape, strict=True)))
    dtype = torch.float32 if s.mask_dtype == "float32" else x.dtype
    if s.mask == "integer" and s.negated_by == "none" and s.mask_apply not in ARITHMETIC:
        mask = mask.bool()
    if s.mask_apply == "add":
        x = ADDED[s.mask_added_by](x, mask)
    elif s.mask_apply in ADDEND:
        addend = ADDEND[s.mask_apply](NEGATED[s.negated_by](mask), dtype, FILLS[s.fill](dtype))
        x = ADDED[s.mask_added_by](x, addend)
    elif s.mask_apply == "mix":
        keep = NEGATED[s.negated_by](mask).to(dtype)
        x = x * keep + (1 - keep) * FILLS[s.fill](dtype)
    else:
        x = FILLED[s.mask_apply](x, NEGATED[s.negated_by](mask), FILLS[s.fill](x.dtype))
    return x.view(-1, *x.shape[2:]) if s.flat_mask == "scores_unflattened" else x


def _weights(s: Spelling, x: Tensor, modules: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The softmax over keys; where the division is deferred, the exponentials and their sums."""
    dim = s.score_axes.index("k")
    dim = dim - x.dim() if s.softmax_dim == "negative" else dim
    if s.softmax == "module":
        return modules["softmax"](x), None
    if s.softmax in SOFTMAXES:
        return SOFTMAXES[s.softmax](x, dim, {"dtype": torch.float32} if s.upcast == "softmax_argument" else {}), None
    is_kept = s.reduced_by == "keepdim"
    if s.softmax == "logsumexp":
        total = torch.logsumexp(x, dim, keepdim=is_kept)
        return torch.exp(x - (total if is_kept else total.unsqueeze(dim))), None
    x = x * LOG2_E if s.exponential == "exp2" else x
    if s.shift != "none":
        largest = SHIFTS[s.shift](x, dim, is_kept)
        x = x - (largest if is_kept else largest.unsqueeze(dim))
    powers = EXPONENTIALS[s.exponential](x)
    total = powers.sum(dim, keepdim=True) if is_kept else torch.sum(powers, dim).unsqueeze(dim)
    if s.normalised_by == "deferred":
        return powers, total
    return (powers / total if s.normalised_by == "division" else powers * total.reciprocal()), None


def _weights_cast(s: Spelling, p: Tensor, query: Tensor, value: Tensor, modules: Mapping[str, Any]) -> Tensor:
    p = CASTS[s.cast](p, query, value)
    return DROPOUTS[s.dropout](p) if s.dropout in DROPOUTS else modules["dropout"](p)


def _result(s: Spelling, query: Tensor, p: Tensor, total: Tensor | None, value: Tensor) -> Tensor:
    """Weights times value, normalised if that was deferred, in the query's dtype and this spelling's output layout."""
    value = value.float() if s.cast == "upcast_value" else value
    if s.output_contraction in EINSUMS:
        x = _einsum(s, s.output_contraction, p, value, (s.score_axes, _value_axes(s), s.result_axes))
    else:
        aligned = s.lead + "qk"
        if s.order == "kq":
            p = p.transpose(-2, -1)
        elif s.order != "qk":
            p = p.permute(*(s.score_axes.index(letter) for letter in aligned))
        is_broadcast = s.output_contraction == "broadcast_sum"
        x = (
            (p[..., None] * value[..., None, :, :]).sum(-2)
            if is_broadcast
            else PRODUCTS[s.output_contraction](p, value)
        )
    x = x if total is None else x / total
    return _output(s, x.to(query.dtype) if s.cast != "none" else x)


def _output(s: Spelling, x: Tensor) -> Tensor:
    """The result as it is, with heads behind positions, or with heads merged into the last axis."""
    if s.output == "left":
        return x
    axes = s.result_axes
    if "f" in axes:
        x = x.view(-1, s.heads[0], *x.shape[1:])
    elif "g" in axes:
        x = x.flatten(1, 2)
    elif axes == "hbqe":
        x = x.transpose(0, 1)
    if axes != "bqhe":
        order = (0, 1, 3, 2, 4) if "w" in axes else (0, 2, 1, 3)
        x = x.permute(*order) if s.output == "permute_flatten" else x.transpose(-3, -2)
    if s.output == "token_major":
        return x
    if s.output == "permute_flatten":
        return x.flatten(-2)
    return x.reshape(*x.shape[:-2], -1) if s.output == "transpose_reshape" else x.contiguous().view(*x.shape[:-2], -1)
