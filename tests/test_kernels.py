"""Every kernel against the reference of its op, over drawn shapes, masks, layouts and dtypes; and what it says of itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lz_compile import reports
from lz_compile.api import eager as _eager  # noqa: F401 it answers what lz.dispatch asks
from lz_compile.backend import layerzero
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.bands import Band, Reach
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops.attention import Operands, features, reference
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.kernels.registry import KernelSpec, kernels
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import of_facts

#: Absolute and relative error against float64 that a kernel may have.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)
#: Gradients are sums over rows, and their terms were rounded once more.
GRADIENT_SLACK = 4


def runs_here(spec: KernelSpec) -> bool:
    """Whether a kernel runs on the CPU, whatever the problem has.

    Those of GPU libraries are in test_library_adapters.py, the one that is for documents in test_packed.py.
    """
    is_here = bool({"*", "cpu"} & spec.platforms) and spec.availability() is None
    return (
        is_here
        and spec.implementation is not None
        and spec.requires_features.get("*", frozenset()) <= {"masked_row_gradient"}
    )


KERNELS = {spec.kernel_id: spec for spec in kernels("attention").values() if runs_here(spec)}
for_every_kernel = pytest.mark.parametrize("kernel", KERNELS)
for_every_trainable_kernel = pytest.mark.parametrize(
    "kernel", [name for name, spec in KERNELS.items() if "training" in spec.supports]
)
for_every_kernel_of_bands = pytest.mark.parametrize(
    "kernel", [name for name, spec in KERNELS.items() if {"causal_at_end", "sliding_window"} <= spec.supports]
)
_PAIRS = [
    (name, dtype) for name in KERNELS for dtype in DTYPES if str(dtype).removeprefix("torch.") in KERNELS[name].dtypes
]
for_every_kernel_in_every_dtype = pytest.mark.parametrize(
    ("kernel", "dtype"), _PAIRS, ids=lambda each: str(each).removeprefix("torch.")
)
drawn = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Case:
    """One attention to compute: extents, attributes and the extents that its masks have (the others are 1)."""

    batch: int = 2
    kv_heads: int = 2
    groups: int = 1
    queries: int = 5
    keys: int = 7
    head_dim: int = 4
    value_dim: int = 4
    attrs: AttentionAttrs = field(default_factory=AttentionAttrs)
    mask_is_full: tuple[bool, ...] = (True, True, True, True)
    bias_is_full: tuple[bool, ...] = (True, True, True, True)
    sinks_are_full: tuple[bool, ...] = (False, True, False)
    documents_are_full: bool = True
    rows_fully_masked: bool = False
    is_token_major: bool = False
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys


def _operands(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*extents: int) -> Tensor:
        return torch.randn(extents, generator=generator, dtype=torch.float64).to(dtype)

    def heads_of(count: int, length: int, dim: int) -> Tensor:
        if case.is_token_major:
            return normal(case.batch, length, count, dim).transpose(1, 2)
        return normal(case.batch, count, length, dim)

    found = {
        "query": heads_of(case.heads, case.queries, case.head_dim),
        "key": heads_of(case.kv_heads, case.keys, case.head_dim),
        "value": heads_of(case.kv_heads, case.keys, case.value_dim),
    }
    if case.attrs.has_mask:
        found["mask"] = _keep(case, case.mask_is_full, generator)
    if case.attrs.reach is not None:
        found["mask"] = found["mask"] & _reached(case.attrs.reach, case.queries, case.keys)
    if case.attrs.masked_rows == "fill":
        found["fill"] = normal(*_chosen(case.scores, case.bias_is_full)) * 4 - 8
    if case.attrs.has_bias:
        bias = normal(*_chosen(case.scores, case.bias_is_full)).to(case.attrs.score_dtype)
        if not case.attrs.bias_is_finite:
            bias = bias.masked_fill(~_keep(case, case.bias_is_full, generator), -math.inf)
        found["bias"] = bias
    if case.attrs.has_sinks:
        found["sinks"] = normal(*_chosen(case.scores[:3], case.sinks_are_full), 1)
    if case.attrs.has_slopes:
        found["slopes"] = normal(*_chosen((*case.scores[:2], 1, 1), case.bias_is_full))
    if case.attrs.has_documents:
        found["query_documents"], found["key_documents"] = _documents(case, generator)
    return found


def _documents(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four documents of which a query has one, its own among the keys unless rows may be masked completely."""
    batch = case.batch if case.documents_are_full else 1
    queries, keys = (torch.randint(0, 4, (batch, length), generator=generator) for length in (case.queries, case.keys))
    if not case.rows_fully_masked:
        queries = keys.gather(1, torch.arange(case.queries)[None].clamp_max(case.keys - 1).expand(batch, -1))
    return queries, keys


def _chosen(extents: tuple[int, ...], is_full: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(extent if full else 1 for extent, full in zip(extents, is_full, strict=True))


def _keep(case: Case, is_full: tuple[bool, ...], generator: torch.Generator) -> Tensor:
    keep = torch.rand(_chosen(case.scores, is_full), generator=generator) < 0.6
    keep[..., 0] = True
    if case.rows_fully_masked:
        keep.view(-1, keep.shape[-1])[::2] = False
    return keep


def _reached(reach: Reach, queries: int, keys: int) -> Tensor:
    columns = torch.arange(keys)
    spans = [reach.spans[row // reach.tile] for row in range(queries)]
    return torch.stack([(columns >= first) & (columns < last) for first, last in spans])


def _doubled(operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}


def _assert_near(actual: Tensor, expected: Tensor, case: Case, slack: float = 1.0) -> None:
    is_rounded = case.attrs.score_dtype in (torch.float16, torch.bfloat16)
    tolerance = slack * max(TOLERANCE[actual.dtype], TOLERANCE[case.attrs.score_dtype]) * (4 if is_rounded else 1)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def _small(kernel: str) -> Callable[..., Tensor]:
    """A kernel that cuts small sizes as it does large ones."""
    return partial(KERNELS[kernel].call, **KERNELS[kernel].validation_arguments)


def _runs_right(kernel: str, case: Case, dtype: torch.dtype) -> None:
    case = replace(case, attrs=replace(case.attrs, score_dtype=torch.promote_types(case.attrs.score_dtype, dtype)))
    operands = _operands(case, dtype)
    actual = _small(kernel)(Operands(**operands), case.attrs)
    assert actual.dtype == dtype
    _assert_near(actual, reference(Operands(**_doubled(operands)), _in_float64(case.attrs)), case)


def _in_float64(attrs: AttentionAttrs) -> AttentionAttrs:
    return replace(attrs, score_dtype=torch.float64)


@pytest.mark.parametrize("is_full", [(True, True, True, True), (False, False, True, True), (True, False, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["mean", "mean_of_groups", "nan", "bias", "slopes"])
def test_beside_the_cpu_sdpa_is_given_masks_that_any_fused_kernel_reads_right(monkeypatch, mask, dtype, is_full):
    """Whole dense rows of the operands' own dtype, and no number that is minus infinity when multiplied by log2(e)."""
    monkeypatch.setattr(torch_sdpa, "_TAKES_ANY_MASK", frozenset())
    groups, mask = (2, "mean") if mask == "mean_of_groups" else (1, mask)
    rows = mask if mask in ("mean", "nan") else "zero"
    given = {"mean": {"has_mask": True}, "nan": {"has_mask": True}, "bias": {"has_bias": True, "bias_is_finite": True}}
    attrs = AttentionAttrs(masked_rows=rows, score_dtype=torch.float32, **given.get(mask, {"has_slopes": True}))
    attrs = replace(attrs, enable_gqa=groups > 1)
    full = {"mask_is_full": is_full, "bias_is_full": is_full}
    case = Case(attrs=attrs, groups=groups, rows_fully_masked=mask == "mean", **full)
    seen, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *each, **named: seen.append((each, named)) or sdpa(*each, **named)
    )
    _runs_right("torch.sdpa", case, dtype)
    (((query, key, _), named),) = seen
    given_mask = named["attn_mask"]
    assert given_mask.dtype in (torch.bool, query.dtype)
    assert given_mask.shape[-1] == key.shape[2]
    assert given_mask.stride(-1) == 1
    assert not named["enable_gqa"], "beside masks, heads that share keys are left to slow operators"
    if mask == "mean":
        assert (given_mask.float() * 1.4427).isfinite().all()
        assert query.dtype == dtype, "float32 is a tenth as fast there"


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_the_cpu_a_row_of_the_lowest_number_in_a_bias_is_the_mean(monkeypatch, dtype, is_finite):
    """Fused kernels there multiply scores by log2(e), and give zero for rows of minus infinity alone."""
    monkeypatch.setattr(torch_sdpa, "_TAKES_ANY_MASK", frozenset())
    x = {name: torch.randn(1, 1, 5, 4).to(dtype) for name in ("query", "key", "value")}
    bias = torch.randn(1, 1, 5, 5).to(dtype)
    bias[:, :, 2] = torch.finfo(dtype).min
    bias[:, :, 3, 1:] = -math.inf
    bias[:, :, 4] = 0.0 if is_finite else -math.inf

    def fused(x, attrs, is_causal):
        assert x.query.dtype == x.bias.dtype == dtype, "float32 is a tenth as fast there"
        scores = (x.query.float() @ x.key.mT.float() / 2 + x.bias.float()) * math.log2(math.e)
        shares = torch.exp2(scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0))
        return (shares @ x.value.float() / shares.sum(-1, keepdim=True).clamp_min(1e-30)).to(dtype)

    of_bias = {"has_bias": True, "bias_can_mask": True, "bias_is_finite": is_finite}
    attrs = AttentionAttrs(scale=0.5, score_dtype=dtype, rounds_bias=True, **of_bias)
    found = torch_sdpa.through(fused, Operands(**x, bias=bias.float()), attrs)  # as the sum of two terms is
    scores = x["query"].float() @ x["key"].mT.float() / 2 + bias.float()
    expected = torch.softmax(scores, -1) @ x["value"].float()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@for_every_kernel
def test_large_constant_float16_values_do_not_overflow(kernel: str) -> None:
    operands = _operands(Case(keys=300), torch.float16)
    operands["value"] = torch.full_like(operands["value"], 6e4)
    actual = KERNELS[kernel].call(Operands(**operands), AttentionAttrs())
    torch.testing.assert_close(actual, torch.full_like(actual, 6e4), rtol=1e-3, atol=0.0)


@for_every_kernel
def test_float16_products_beyond_its_range_are_scaled_into_it(kernel: str) -> None:
    operands = _operands(Case(head_dim=16), torch.float16)
    operands["query"][..., 0], operands["key"][..., 0] = 600.0, 300.0
    attrs = AttentionAttrs(scale=2**-12, score_dtype=torch.float16)
    actual = KERNELS[kernel].call(Operands(**operands), attrs)
    expected = reference(Operands(**_doubled(operands)), _in_float64(attrs))
    torch.testing.assert_close(actual.double(), expected, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@for_every_kernel_in_every_dtype
def test_a_scale_may_be_zero_or_negative_under_a_causal_mask(kernel: str, dtype: torch.dtype, scale: float) -> None:
    attrs = AttentionAttrs(scale=scale, is_causal=True, score_dtype=torch.promote_types(torch.float32, dtype))
    _runs_right(kernel, Case(queries=9, keys=9, attrs=attrs), dtype)


@for_every_kernel_in_every_dtype
def test_one_query_of_nan_leaves_the_other_rows_alone(kernel: str, dtype: torch.dtype) -> None:
    operands = _operands(Case(keys=20), dtype)
    clean = KERNELS[kernel].call(Operands(**operands), AttentionAttrs())
    operands["query"][0, 0, 0] = math.nan
    actual = KERNELS[kernel].call(Operands(**operands), AttentionAttrs())
    clean[0, 0, 0] = math.nan
    torch.testing.assert_close(actual, clean, equal_nan=True)


_FULL = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


@st.composite
def _bands(draw: st.DrawFn, queries: int, keys: int) -> Band:
    """Any band under which every query sees a key."""
    at_end = draw(st.booleans())
    offset = keys - queries if at_end else 0
    lower = draw(st.none() | st.integers(0, 6).map(lambda further: keys - queries - offset - further))
    least = -offset if lower is None else max(-offset, lower)
    return Band(lower, draw(st.none() | st.integers(0, 6).map(lambda further: least + further)), at_end)


@st.composite
def _reaches(draw: st.DrawFn, queries: int, keys: int) -> Reach:
    tile = draw(st.sampled_from([1, 4, 8, 64]))
    ends = st.tuples(st.integers(0, keys), st.integers(0, keys)).map(lambda pair: (min(pair), max(pair)))
    return Reach(tile, tuple(draw(ends) for _ in range(-(-queries // tile))))


@st.composite
def _restricted(draw: st.DrawFn, supports: frozenset[str]) -> Case:
    """A case in which more than a mask says which keys a query sees: bands, spans, documents, and ALiBi."""
    case = draw(_cases(supports))
    has_documents, has_slopes = draw(st.booleans()), draw(st.booleans())
    attrs = replace(
        case.attrs,
        is_causal=False,
        band=draw(_bands(case.queries, case.keys)),
        reach=draw(_reaches(case.queries, case.keys)) if case.attrs.has_mask and draw(st.booleans()) else None,
        has_documents=has_documents and "documents" in supports,
        has_slopes=has_slopes and "alibi" in supports,
    )
    return replace(case, attrs=attrs, documents_are_full=draw(st.booleans()))


@st.composite
def _cases(draw: st.DrawFn, supports: frozenset[str]) -> Case:
    def maybe(feature: str) -> bool:
        return feature in supports and draw(st.booleans())

    head_dim = draw(st.integers(1, 8))
    has_mask, has_bias = maybe("bool_mask"), maybe("float_mask")
    is_causal = not has_mask and not has_bias and maybe("causal")
    outcomes = ["nan", "mean", "zero", *(["fill"] if has_mask and "masked_row_fill" in supports else [])]
    groups = draw(st.integers(2, 3)) if maybe("gqa") else 1
    attrs = AttentionAttrs(
        scale=draw(st.sampled_from([None, 0.3, -0.5, 1.0])),
        is_causal=is_causal,
        softcap=2.0 if maybe("softcap") else None,
        masked_rows=draw(st.sampled_from(outcomes)),
        has_mask=has_mask,
        has_bias=has_bias,
        has_sinks=maybe("sinks"),
        bias_is_finite=draw(st.booleans()),
        enable_gqa=groups > 1,
    )
    return Case(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        groups=groups,
        queries=draw(st.sampled_from([1, 2, 5, 16, 17, 33])),
        keys=draw(st.sampled_from([1, 2, 3, 7, 18])),
        head_dim=head_dim,
        value_dim=draw(st.integers(1, 6)) if maybe("value_dim") else head_dim,
        attrs=attrs,
        mask_is_full=draw(_FULL),
        bias_is_full=draw(_FULL),
        sinks_are_full=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        rows_fully_masked=draw(st.booleans()),
        is_token_major=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


# ---- numerics ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@for_every_kernel_in_every_dtype
def test_a_kernel_gives_what_the_reference_gives_in_float64(kernel, dtype):
    @drawn
    @given(_cases(KERNELS[kernel].supports))
    def holds(case: Case) -> None:
        _runs_right(kernel, case, dtype)

    holds()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@for_every_kernel_of_bands
def test_bands_spans_documents_and_slopes_are_those_of_the_reference(kernel, dtype):
    @drawn
    @given(_restricted(KERNELS[kernel].supports))
    def holds(case: Case) -> None:
        _runs_right(kernel, case, dtype)

    holds()


@for_every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_scores_may_be_rounded_where_the_source_rounds_them(kernel, dtype):
    @drawn
    @given(_cases(KERNELS[kernel].supports - {"sinks"}))
    def holds(case: Case) -> None:
        _runs_right(kernel, replace(case, attrs=replace(case.attrs, score_dtype=dtype)), dtype)

    holds()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@for_every_trainable_kernel
def test_gradients_are_those_of_the_reference_in_float64(kernel, dtype):
    if (kernel, dtype) not in _PAIRS:
        pytest.skip("the kernel does not take this dtype")

    @drawn
    @given(_cases(KERNELS[kernel].supports))
    def holds(case: Case) -> None:
        attrs = replace(case.attrs, bias_is_finite=True)
        can_be_empty = attrs.masked_rows != "nan" and "masked_row_gradient" in KERNELS[kernel].supports
        case = replace(case, attrs=attrs, rows_fully_masked=case.rows_fully_masked and can_be_empty)
        _trains_right(kernel, case, dtype)

    holds()


@pytest.mark.parametrize("kernel", [name for name, spec in KERNELS.items() if "masked_row_gradient" in spec.supports])
def test_gradients_under_bands_spans_documents_and_slopes_are_those_of_the_reference(kernel):
    @drawn
    @given(_restricted(KERNELS[kernel].supports))
    def holds(case: Case) -> None:
        attrs = replace(case.attrs, bias_is_finite=True)
        if attrs.masked_rows == "nan" and (attrs.has_mask or attrs.has_documents):  # the gradient is NaN, too
            attrs = replace(attrs, masked_rows="mean")
        _trains_right(kernel, replace(case, attrs=attrs), dtype)

    dtype = torch.float64 if (kernel, torch.float64) in _PAIRS else torch.float32
    holds()


def _trains_right(kernel: str, case: Case, dtype: torch.dtype) -> None:
    case = replace(case, attrs=replace(case.attrs, score_dtype=dtype))
    operands = _operands(case, dtype)
    names = _trained(kernel, operands)
    expected = _gradients(reference, _doubled(operands), _in_float64(case.attrs), names)
    for name, gradient in _gradients(_small(kernel), operands, case.attrs, names).items():
        _assert_near(gradient, expected[name], case, GRADIENT_SLACK)


def _trained(kernel: str, operands: Mapping[str, Tensor]) -> list[str]:
    """The operands of which a kernel gives gradients."""
    gives_others = "bias_gradient" in KERNELS[kernel].supports
    return [
        name
        for name, each in operands.items()
        if each.is_floating_point() and (gives_others or name in ("query", "key", "value"))
    ]


def _gradients(
    call: Callable[..., Tensor], operands: Mapping[str, Tensor], attrs: AttentionAttrs, names: Iterable[str]
) -> dict[str, Tensor]:
    leaves = {name: operands[name].detach().clone().requires_grad_() for name in names if name in operands}
    out = call(Operands(**{**operands, **leaves}), attrs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weight), strict=True))


@pytest.mark.parametrize("masked_rows", ["nan", "mean", "zero"])
@for_every_kernel_in_every_dtype
def test_a_row_without_keys_gives_what_the_source_would_give(kernel, dtype, masked_rows):
    attrs = AttentionAttrs(has_mask=True, masked_rows=masked_rows)
    case = Case(attrs=attrs, rows_fully_masked=True)
    operands = _operands(case, dtype)
    actual = KERNELS[kernel].call(
        Operands(**operands), replace(attrs, score_dtype=torch.promote_types(torch.float32, dtype))
    )
    row = actual[0, 0, 0]
    assert not operands["mask"][0, 0, 0].any()
    if masked_rows == "nan":
        assert row.isnan().all()
    elif masked_rows == "zero":
        assert (row == 0).all()
    else:
        torch.testing.assert_close(row, operands["value"][0, 0].mean(0), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


_CAUSAL_AND = {
    "mask": AttentionAttrs(is_causal=True, has_mask=True),
    "mask_with_mean": AttentionAttrs(is_causal=True, has_mask=True, masked_rows="mean"),
    "mask_with_zero": AttentionAttrs(is_causal=True, has_mask=True, masked_rows="zero"),
    "mask_with_fill": AttentionAttrs(is_causal=True, has_mask=True, masked_rows="fill"),
    "bias": AttentionAttrs(is_causal=True, has_bias=True, bias_is_finite=True),
    "mask_and_bias": AttentionAttrs(is_causal=True, has_mask=True, has_bias=True, bias_is_finite=True),
}


@pytest.mark.parametrize("attrs", _CAUSAL_AND.values(), ids=_CAUSAL_AND)
@for_every_kernel
def test_causality_goes_together_with_every_mask_that_a_kernel_takes(kernel, attrs):
    _skip_if_refused(kernel, attrs)
    _runs_right(kernel, Case(queries=33, keys=33, attrs=attrs, rows_fully_masked=True), torch.float32)


@pytest.mark.parametrize("attrs", _CAUSAL_AND.values(), ids=_CAUSAL_AND)
@for_every_trainable_kernel
def test_causality_goes_together_with_the_gradient_of_every_mask(kernel, attrs):
    _skip_if_refused(kernel, attrs)
    case = Case(attrs=attrs)
    operands = _operands(case, torch.float32)
    names = _trained(kernel, operands)
    expected = _gradients(reference, _doubled(operands), _in_float64(attrs), names)
    for name, gradient in _gradients(KERNELS[kernel].call, operands, attrs, names).items():
        _assert_near(gradient, expected[name], case, GRADIENT_SLACK)


def _skip_if_refused(kernel: str, attrs: AttentionAttrs) -> None:
    needed = set(features(attrs, _facts()))
    if not needed <= KERNELS[kernel].supports:
        pytest.skip(f"{kernel} does not claim {sorted(needed - KERNELS[kernel].supports)}")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(513, 513), (700, 300), (530, 2), (1, 600), (64, 65)])
@for_every_kernel
def test_long_sequences_are_cut_into_blocks_without_a_seam(kernel, queries, keys, is_causal):
    attrs = AttentionAttrs(is_causal=is_causal, enable_gqa=True)
    _runs_right(kernel, Case(1, 1, 2, queries, keys, 3, 2, attrs=attrs), torch.float32)


@for_every_kernel
def test_large_scores_do_not_overflow(kernel):
    operands = {name: x * 300 for name, x in _operands(Case(), torch.float32).items()}
    attrs = AttentionAttrs(scale=1.0)
    actual = KERNELS[kernel].call(Operands(**operands), attrs)
    torch.testing.assert_close(actual.double(), reference(Operands(**_doubled(operands)), attrs), atol=1.0, rtol=1e-3)


def test_the_reference_agrees_with_pytorch():
    case = Case(groups=3, value_dim=6, attrs=AttentionAttrs(is_causal=True, enable_gqa=True, masked_rows="zero"))
    operands = _operands(case, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(**operands, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference(Operands(**operands), case.attrs), expected)


# ---- what a kernel says of itself ----------------------------------------------------------------------------------


def _facts(**changes: Any) -> AttentionFacts:
    default = AttentionFacts(
        batch=2,
        heads=2,
        kv_heads=2,
        query_len=5,
        key_len=17,
        head_dim=4,
        value_dim=4,
        dtype=torch.float32,
        device="cpu",
    )
    return replace(default, **changes)


def _drops_some_and_keeps_the_mean(kernel: str) -> None:
    attrs = AttentionAttrs(dropout_p=0.5)
    operands = _operands(Case(queries=64, keys=64, attrs=attrs), torch.float32)
    operands["value"] = torch.ones_like(operands["value"])
    torch.manual_seed(0)
    out = torch.stack([KERNELS[kernel].call(Operands(**operands), attrs) for _ in range(16)])
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.02


def _follows_symbolic_lengths(kernel: str) -> None:
    attrs = AttentionAttrs(is_causal=True)

    def call(*tensors: Tensor) -> Tensor:
        return KERNELS[kernel].call(Operands(*tensors), attrs)

    def inputs(length: int) -> list[Tensor]:
        return list(_operands(Case(queries=length, keys=length, attrs=attrs), torch.float32).values())

    graph = make_fx(call, tracing_mode="symbolic")(*inputs(6))
    for length in (5, 9, 40, 70):
        torch.testing.assert_close(graph(*inputs(length)), reference(Operands(*inputs(length)), attrs))


def _runs(**changes: Any) -> Callable[[str], None]:
    return lambda kernel: _runs_right(kernel, Case(**changes), torch.float32)


def _adds_wider(kernel: str) -> None:
    case = Case(attrs=replace(_BIASED, score_dtype=torch.float32))
    operands = _operands(case, torch.bfloat16)
    operands["bias"] = 100 + torch.randn(operands["bias"].shape)  # of which bfloat16 would keep halves
    actual = KERNELS[kernel].call(Operands(**operands), case.attrs)
    _assert_near(actual, reference(Operands(**_doubled(operands)), _in_float64(case.attrs)), case)


def _trains(*names: str) -> Callable[[str], None]:
    def demonstrate(kernel: str) -> None:
        attrs = AttentionAttrs(has_bias="bias" in names, bias_is_finite=True)
        operands = _operands(Case(attrs=attrs), torch.float32)
        expected = _gradients(reference, _doubled(operands), attrs, names)
        actual = _gradients(KERNELS[kernel].call, operands, attrs, names)
        for name in names:
            torch.testing.assert_close(actual[name].double(), expected[name], atol=1e-4, rtol=1e-4)

    return demonstrate


def _trains_where_rows_are_masked(kernel: str) -> None:
    attrs = AttentionAttrs(has_mask=True, masked_rows="mean")
    operands = _operands(Case(attrs=attrs), torch.float32)
    operands["mask"] = operands["mask"].clone()
    operands["mask"][..., :2, :] = False
    expected = _gradients(reference, _doubled(operands), attrs, ("query", "key", "value"))
    actual = _gradients(KERNELS[kernel].call, operands, attrs, ("query", "key", "value"))
    for name in expected:
        torch.testing.assert_close(actual[name].double(), expected[name], atol=1e-4, rtol=1e-4)


def _ignores_nan_in_masked_keys(kernel: str) -> None:
    attrs = AttentionAttrs(has_mask=True, selects_masked=True)
    operands = _operands(Case(attrs=attrs), torch.float32)
    operands["mask"][..., -1] = False
    expected = KERNELS[kernel].call(Operands(**operands), attrs)
    operands["key"][:, :, -1] = math.nan
    torch.testing.assert_close(KERNELS[kernel].call(Operands(**operands), attrs), expected)


def _ignores_nan_in_padding(kernel: str) -> None:
    attrs = replace(_SELECTED, masks_keys=True)
    operands = _operands(Case(attrs=attrs, mask_is_full=(True, False, False, True)), torch.float32)
    operands["mask"][..., -1] = False
    expected = KERNELS[kernel].call(Operands(**operands), attrs)
    operands["key"][:, :, -1] = math.nan
    torch.testing.assert_close(KERNELS[kernel].call(Operands(**operands), attrs), expected)


def _gives_for_a_query_of_nan(number: float, **extents: Any) -> Callable[[str], None]:
    def demonstrate(kernel: str) -> None:
        attrs = extents.get("attrs", AttentionAttrs())
        operands = _operands(Case(**extents), torch.float32)
        expected = KERNELS[kernel].call(Operands(**operands), attrs)
        operands["query"][0, 0, 0] = math.nan
        expected[0, 0, 0] = number
        torch.testing.assert_close(KERNELS[kernel].call(Operands(**operands), attrs), expected, equal_nan=True)

    return demonstrate


@dataclass(frozen=True)
class Feature:
    """What asks for a feature, and what shows that a kernel has it."""

    attrs: AttentionAttrs
    facts: AttentionFacts
    demonstrate: Callable[[str], None]


_SYMBOLIC = sympy.Symbol("s0", integer=True, positive=True)
_CAUSAL, _GQA = AttentionAttrs(is_causal=True), AttentionAttrs(enable_gqa=True)
_CAPPED, _SINKS = AttentionAttrs(softcap=1.5), AttentionAttrs(has_sinks=True)
_MASKED, _BIASED = AttentionAttrs(has_mask=True), AttentionAttrs(has_bias=True)
_SELECTED = AttentionAttrs(has_mask=True, selects_masked=True)
_ZEROED = AttentionAttrs(has_mask=True, masked_rows="zero", zeroes_nan=True)
_FILLED = AttentionAttrs(has_mask=True, masked_rows="fill")
_AT_END, _WINDOW = AttentionAttrs(band=Band(upper=0, at_end=True)), AttentionAttrs(band=Band(-2, 0))
_ALIBI, _DOCUMENTS = AttentionAttrs(has_slopes=True), AttentionAttrs(has_documents=True)

FEATURES: Mapping[str, Feature] = {
    "causal": Feature(_CAUSAL, _facts(query_len=7), _runs(attrs=_CAUSAL)),
    "gqa": Feature(_GQA, _facts(heads=6), _runs(groups=3, attrs=_GQA)),
    "bool_mask": Feature(_MASKED, _facts(), _runs(attrs=_MASKED, rows_fully_masked=True)),
    "float_mask": Feature(_BIASED, _facts(), _runs(attrs=_BIASED, rows_fully_masked=True)),
    "masked_row_fill": Feature(_FILLED, _facts(), _runs(attrs=_FILLED, rows_fully_masked=True)),
    "masked_nan": Feature(_SELECTED, _facts(), _ignores_nan_in_masked_keys),
    "nan_rows": Feature(_ZEROED, _facts(), _gives_for_a_query_of_nan(0.0, attrs=_ZEROED)),
    "nan_in_few_keys": Feature(AttentionAttrs(), _facts(key_len=7), _gives_for_a_query_of_nan(math.nan, keys=7)),
    "dropout": Feature(AttentionAttrs(dropout_p=0.5), _facts(), _drops_some_and_keeps_the_mean),
    "softcap": Feature(_CAPPED, _facts(), _runs(attrs=_CAPPED)),
    "sinks": Feature(_SINKS, _facts(), _runs(attrs=_SINKS)),
    "training": Feature(AttentionAttrs(), _facts(needs_grad=True), _trains("query", "key", "value")),
    "masked_row_gradient": Feature(
        AttentionAttrs(has_mask=True, masked_rows="mean"), _facts(needs_grad=True), _trains_where_rows_are_masked
    ),
    "bias_gradient": Feature(_BIASED, _facts(bias_needs_grad=True), _trains("bias")),
    "wide_bias": Feature(_BIASED, _facts(device="cuda", bias_is_wide=True), _adds_wider),
    "value_dim": Feature(AttentionAttrs(), _facts(value_dim=6), _runs(value_dim=6)),
    "causal_rectangular": Feature(_CAUSAL, _facts(query_len=4, key_len=7), _runs(queries=4, keys=7, attrs=_CAUSAL)),
    "causal_at_end": Feature(_AT_END, _facts(query_len=4, key_len=7), _runs(queries=4, keys=7, attrs=_AT_END)),
    "sliding_window": Feature(_WINDOW, _facts(key_len=5), _runs(keys=5, attrs=_WINDOW)),
    "alibi": Feature(_ALIBI, _facts(), _runs(attrs=_ALIBI, bias_is_full=(False, True, False, False))),
    "documents": Feature(_DOCUMENTS, _facts(), _runs(attrs=_DOCUMENTS)),
    "masked_nan_keys": Feature(replace(_SELECTED, masks_keys=True), _facts(), _ignores_nan_in_padding),
    "dynamic_causal": Feature(_CAUSAL, _facts(query_len=_SYMBOLIC), _follows_symbolic_lengths),
}


@for_every_kernel
def test_rows_that_overlap_in_memory_are_read_right(kernel):
    attrs = AttentionAttrs()
    query = torch.randn(2, 3, 23).unfold(2, 16, 1)
    key, value = torch.randn(2, 2, 3, 20, 16).unbind()
    for _ in range(20):  # what is left uninitialised is wrong now and then only
        got = KERNELS[kernel].call(Operands(query, key, value), attrs)
        want = reference(Operands(query.double(), key.double(), value.double()), _in_float64(attrs))
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_the_table_of_features_above_is_complete():
    everything = features(
        AttentionAttrs(
            is_causal=True,
            enable_gqa=True,
            has_mask=True,
            has_bias=True,
            has_slopes=True,
            has_documents=True,
            dropout_p=0.1,
            softcap=1.0,
            has_sinks=True,
            masked_rows="fill",
            bias_can_mask=True,
            selects_masked=True,
            zeroes_nan=True,
        ),
        _facts(query_len=_SYMBOLIC, value_dim=6, needs_grad=True, bias_needs_grad=True),
    )
    everything |= features(AttentionAttrs(band=Band(-2, 0, at_end=True)), _facts())
    everything |= features(replace(_SELECTED, masks_keys=True), _facts())
    everything |= features(AttentionAttrs(), _facts(key_len=7)) | features(
        _BIASED, _facts(device="cuda", bias_is_wide=True)
    )
    assert set(everything) == set(FEATURES)
    assert features(AttentionAttrs(), _facts()) == {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_claims_only_features_that_the_op_knows(kernel):
    assert KERNELS[kernel].supports <= set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
@for_every_kernel
def test_a_claimed_feature_works_and_one_not_claimed_is_refused_with_a_reason(kernel, feature):
    row = FEATURES[feature]
    against = _against(kernel, row.attrs, row.facts)
    if feature in KERNELS[kernel].supports:
        assert f"{feature.upper()}_UNSUPPORTED" not in against
        row.demonstrate(kernel)
    else:
        cause = features(row.attrs, row.facts)[feature]
        assert against[f"{feature.upper()}_UNSUPPORTED"] == f"{kernel} does not take {cause}"


def _against(kernel: str, attrs: AttentionAttrs, facts: AttentionFacts) -> dict[str, str]:
    return {reason.code: reason.message for reason in KERNELS[kernel].check(of_facts("attention", attrs, facts))}


@for_every_kernel
def test_a_dtype_that_is_not_claimed_is_refused_with_a_reason(kernel):
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.complex64):
        against = _against(kernel, AttentionAttrs(), _facts(dtype=dtype))
        assert f"not {str(dtype).removeprefix('torch.')}" in against["DTYPE_UNSUPPORTED"]


@pytest.mark.parametrize("kernel", [name for name, spec in KERNELS.items() if "*" not in spec.platforms])
def test_a_platform_that_is_not_claimed_is_refused_with_a_reason(kernel):
    assert "not hpu" in _against(kernel, AttentionAttrs(), _facts(device="hpu"))["PLATFORM_MISMATCH"]


def test_inductor_takes_what_no_other_kernel_takes():
    everything = AttentionAttrs(softcap=1.0, has_sinks=True, is_causal=True)
    facts = _facts(dtype=torch.int8, device="hpu")
    problem = Problem(of_facts("attention", everything, facts))
    assert select(problem, policy.current()).kernel.kernel_id == "inductor"


# ---- in a compiled model -------------------------------------------------------------------------------------------


def _grouped(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ key.transpose(-2, -1) * 0.4).masked_fill(~keep, -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.sampled
@for_every_kernel_in_every_dtype
def test_a_locked_kernel_runs_in_a_compiled_model(kernel, dtype):
    if "*" in KERNELS[kernel].requires_features:
        pytest.skip("the kernel is for training: test_fused_training.py")
    case = Case(batch=2, kv_heads=2, groups=2, queries=9, keys=11, head_dim=16, value_dim=16, attrs=_MASKED)
    operands = list(_operands(case, dtype).values())
    options = {"layerzero.lock": {"attention": kernel}, "layerzero.assume_finite": True}
    compiled = torch.compile(_grouped, backend=layerzero, options=options)
    actual = compiled(*operands)
    (match,) = reports()[-1].matches
    assert (match.kernel, match.rewritten, match.why) == (kernel, True, "locked by options['layerzero.lock']")
    exact = _grouped(*(x.double() if x.is_floating_point() else x for x in operands))
    source_error = (_grouped(*operands).double() - exact).abs().max().item()
    tolerance = TOLERANCE[dtype] + 2 * source_error
    torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=tolerance)


# ---- completeness --------------------------------------------------------------------------------------------------


def test_every_kernel_of_attention_is_one_that_this_file_tests():
    assert {name for name, spec in kernels("attention").items() if runs_here(spec)} == set(KERNELS)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_a_kernel_claims_the_dtypes_that_this_file_tests(spec: KernelSpec):
    assert spec.dtypes <= {str(dtype).removeprefix("torch.") for dtype in DTYPES}


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("lower", "upper"), [(None, 0), (-3, 0), (-2, 3), (-4, None), (None, 2)])
def test_a_band_spans_the_keys_that_its_queries_see_and_no_other(lower: int | None, upper: int | None, at_end: bool):
    band, queries, keys = Band(lower, upper, at_end), 9, 12
    whole = band.mask(torch.zeros(1), queries, keys, band.offset(queries, keys))
    for start, stop in itertools.combinations(range(queries + 1), 2):
        (seen,) = whole[start:stop].any(0).nonzero(as_tuple=True)
        assert band.span(start, stop, queries, keys) == (int(seen[0]), int(seen[-1]) + 1)
