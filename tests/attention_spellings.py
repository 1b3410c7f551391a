"""Random equivalent spellings of attention, composed from independent choices, and their float64 reference.

A `Spelling` is one value per choice (layout of the inputs, contraction, scale, mask, softmax, ...). `build()` returns
a function that computes attention spelled that way, `reference()` the same value from the mathematics. Which choices go
together is said once, in `RULES`; the Hypothesis strategy `spellings()` draws only combinations that obey them.

**Axes** are named by letters: b batch, w window, h head (key-value head beside g), g query heads per key-value head,
f batch and head in one, q query position, k key position, d head dim, e value head dim.

All built functions share one code object: call `torch._dynamo.reset()` between two that are compiled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

Domains = Mapping[str, tuple[Any, ...]]

LOG2_E = math.log2(math.e)
WINDOW = 7
WINDOWS = 7
HALF = (torch.bfloat16, torch.float16)
# Largest absolute and relative error against the reference; values are of order one.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def choice(*options: Any) -> Any:
    """A dataclass field with these options; the first is the plainest and the default."""
    return field(default=options[0], metadata={"options": options})


@dataclass(frozen=True)
class Spelling:
    """One way to write attention down; every field is an independent choice within `RULES`."""

    # What decides most of the others comes first, since the strategy draws in this order.
    contraction: str = choice(
        "operator", "torch_matmul", "tensor_matmul", "bmm", "baddbmm", "einsum", "einsum_swapped", "einsum_ellipsis",
        "broadcast_sum",
    )  # fmt: skip
    layout: str = choice(
        "bhsd", "bshd", "hbsd", "merged", "flat", "single", "matrix", "windows", "packed_unbind", "packed_select",
        "packed_view", "packed_permute", "packed_chunk", "packed_split", "packed_slice", "packed_interleaved",
    )  # fmt: skip
    form: str = choice("bhqd", "bqhd", "hbqd", "fqd", "bqd", "qd", "bwhqd", "bhgqd")
    # Sizes: no two of different meaning are equal.
    dtype: torch.dtype = choice(torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: RUF009 - a field
    batch: int = choice(5, 1)
    lengths: tuple[int, int] = choice((19, 19), (19, 23), (1, 23))
    heads: tuple[int, int] = choice((6, 6), (4, 4), (6, 3), (6, 2), (6, 1), (4, 1), (1, 1))
    head_dims: tuple[int, int] = choice((8, 8), (16, 16), (8, 12), (16, 10))
    # From the layout to the form in which the operands are contracted.
    heads_split_by: str = choice("none", "view", "reshape", "unflatten")
    heads_moved_by: str = choice("none", "transpose", "permute", "movedim", "swapaxes", "transpose_contiguous")
    flattened_by: str = choice("none", "reshape", "contiguous_view", "flatten")
    key_built: str = choice("plain", "transposed")
    sharing: str = choice(
        "none", "expand_reshape", "repeat_interleave", "unsqueeze_flatten", "tile", "broadcast", "first_head",
        "grouped_einsum", "grouped_broadcast",
    )  # fmt: skip
    # Scores.
    key_turned_by: str = choice(
        "transpose", "transpose_positive", "transpose_commuted", "swapaxes", "mT", "permute", "none"
    )  # fmt: skip
    order: str = choice("qk", "kq", "qhk", "khq")
    letters: str = choice("none", "plain", "renamed", "upper")
    scale_at: str = choice("scores", "query", "key", "query_and_key", "alpha", "none")
    scale_value: str = choice("rsqrt", "custom", "none")
    scale_by: str = choice(
        "times_float", "float_times", "times_power", "torch_mul", "tensor_mul", "mul_inplace", "times_equals",
        "divided_by_float", "divided_by_math_sqrt", "divided_by_tensor_sqrt", "tensor_div", "torch_div", "div_inplace",
        "tensor_argument", "none",
    )  # fmt: skip
    # Added bias and mask.
    bias: str = choice("none", "learned", "relative_table", "relative_embedding", "alibi")
    bias_axes: str = choice("none", "qk", "hqk", "11qk", "1hqk", "b11k", "b1qk", "bhqk")
    bias_dtype: str = choice("none", "same", "float32")
    bias_added_by: str = choice("none", "scores_first", "bias_first", "torch_add", "tensor_add", "inplace", "baddbmm")
    bias_before_scale: bool = choice(False, True)
    mask: str = choice(
        "none", "keep", "drop", "integer", "additive_min", "additive_inf", "tril", "triu", "arange", "arange_window",
        "tril_and_padding", "tril_then_padding",
    )  # fmt: skip
    mask_axes: str = choice("none", "qk", "hqk", "11qk", "b11k", "b1qk", "bhqk")
    mask_apply: str = choice(
        "none", "masked_fill", "torch_masked_fill", "masked_fill_inplace", "where_keep", "where_drop", "where_method",
        "where_tensor", "mix", "add", "zeros_filled", "where_zero", "one_minus", "times_fill",
    )  # fmt: skip
    mask_dtype: str = choice("none", "scores", "float32")
    negated_by: str = choice("none", "invert", "logical_not", "equals_zero")
    fill: str = choice("none", "-inf", "min", "-1e9", "-1e4")
    mask_added_by: str = choice("none", "scores_first", "bias_first", "torch_add", "tensor_add", "inplace", "baddbmm")
    mask_before_scale: bool = choice(False, True)
    bias_last: bool = choice(False, True)
    rows_fully_masked: bool = choice(False, True)
    flat_mask: str = choice("none", "mask_expanded", "scores_unflattened")
    # Probabilities.
    upcast: str = choice("none", "operands", "product", "scores", "softmax_argument")
    softmax: str = choice("functional", "torch", "method", "module", "handwritten", "logsumexp", "log_softmax")
    softmax_dim: str = choice("negative", "positive")
    exponential: str = choice("none", "torch_exp", "method_exp", "exp2", "exp2_folded")
    shift: str = choice("none", "amax", "torch_amax", "max_values", "max_index", "amax_detached")
    reduced_by: str = choice("none", "keepdim", "unsqueeze")
    normalised_by: str = choice("none", "division", "reciprocal", "deferred")
    cast: str = choice("none", "to_query", "type_as_query", "to_value", "upcast_value")
    dropout: str = choice("none", "functional_p0", "functional_eval", "torch_eval", "module_eval", "module_p0")
    # Output.
    output_contraction: str = choice(
        "operator", "torch_matmul", "tensor_matmul", "bmm", "einsum", "einsum_swapped", "einsum_ellipsis",
        "broadcast_sum",
    )  # fmt: skip
    output_axes: str = choice("lead", "token")
    output: str = choice("left", "token_major", "transpose_reshape", "contiguous_view", "permute_flatten")

    def __post_init__(self) -> None:
        for text, rule in RULES.items():
            if not rule(*(getattr(self, name) for name in _parameters(rule))):
                got = ", ".join(f"{name}={getattr(self, name)!r}" for name in _parameters(rule))
                raise ValueError(f"invalid spelling: {text}; got {got}")

    @property
    def lead(self) -> str:
        """Axes before the last two of the contracted operands."""
        return "".join(letter for letter in self.form if letter not in "qd")

    @property
    def score_axes(self) -> str:
        """Axes of the scores in the order in which this spelling keeps them."""
        return {"qk": self.lead + "qk", "kq": self.lead + "kq", "qhk": "bqhk", "khq": "bkhq"}[self.order]

    @property
    def result_axes(self) -> str:
        """Axes of the second contraction's result."""
        return "bqhe" if self.output_axes == "token" else self.lead + "qe"

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads[0] // self.heads[1]

    @property
    def factor(self) -> float:
        """What the query-key product is multiplied by, as spelled (with log2(e) where exp2 needs it)."""
        value: float = {"rsqrt": self.head_dims[0] ** -0.5, "custom": 0.37, "none": 1.0}[self.scale_value]
        return value * LOG2_E if self.exponential == "exp2_folded" else value

    @property
    def raw_kv_heads(self) -> int:
        """Key-value heads of the inputs; more than are used where only the first is."""
        return 3 if self.sharing == "first_head" else self.heads[1]

    @property
    def has_raw_transposed_key(self) -> bool:
        """Whether the key is given as [..., d, k]."""
        return self.key_built == "transposed" and self.layout in RAW_KEY

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the built function's arguments, in order."""
        names = ["packed"] if self.layout in PACKED else ["query", "key", "value"]
        names += ["scale"] if self.scale_by == "tensor_argument" else []
        names += ["bias"] if self.bias != "none" else []
        names += ["mask"] if self.mask in USER_MASKS else []
        names += ["padding"] if self.mask in PADDED else []
        return tuple(names)

    def describe(self) -> str:
        """The choices that differ from the plainest spelling."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    def build(self) -> Callable[..., Tensor]:
        """A function of `input_names` that computes attention spelled this way; Dynamo traces it in one graph."""
        from tests.attention_spelled import built

        return built(self)

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Random arguments for the built function."""
        from tests.attention_reference import drawn

        named = drawn(self, seed)
        return tuple(named[name] for name in self.input_names)

    def reference(self, *inputs: Tensor) -> Tensor:
        """softmax(scale q kᵀ + bias, masked) v in float64, with the axes of the built function's result."""
        from tests.attention_reference import computed

        return computed(self, dict(zip(self.input_names, inputs, strict=True)))


# Which choices go together. A rule's parameters are the fields that it is about.

MATMULS = frozenset({"operator", "torch_matmul", "tensor_matmul", "bmm", "baddbmm"})
EINSUMS = frozenset({"einsum", "einsum_swapped", "einsum_ellipsis"})
NAMED_EINSUMS = frozenset({"einsum", "einsum_swapped"})
NATURAL = {  # layout: axes of the query when the layout is undone
    "bhsd": "bhqd", "hbsd": "hbqd", "bshd": "bqhd", "merged": "bqhd", "flat": "fqd", "single": "bqd", "matrix": "qd",
    "windows": "bwhqd", "packed_unbind": "bqhd", "packed_select": "bqhd", "packed_view": "bqhd",
    "packed_permute": "bhqd", "packed_chunk": "bqhd", "packed_split": "bqhd", "packed_slice": "bqhd",
    "packed_interleaved": "bqhd",
}  # fmt: skip
REACHED = {"bhqd": ("bhqd", "fqd", "bhgqd"), "bqhd": ("bhqd", "bqhd", "fqd", "bhgqd", "hbqd")}
PACKED = frozenset(name for name in NATURAL if name.startswith("packed"))
UNEVENLY_PACKED = frozenset({"packed_split", "packed_slice"})
SPLIT = frozenset({"merged", "packed_chunk", "packed_split", "packed_slice"})
RAW_KEY = frozenset({"bhsd", "hbsd", "flat", "single", "matrix", "windows"})
REPEATED = frozenset({"expand_reshape", "repeat_interleave", "unsqueeze_flatten", "tile"})
BROADCAST = frozenset({"broadcast", "first_head"})
GROUPED = frozenset({"grouped_einsum", "grouped_broadcast"})
INPLACE_SCALES = frozenset({"mul_inplace", "times_equals", "div_inplace"})
ROOT_SCALES = frozenset({"times_power", "divided_by_math_sqrt", "divided_by_tensor_sqrt"})
ADDITIVE_INPUTS = frozenset({"additive_min", "additive_inf"})
USER_MASKS = ADDITIVE_INPUTS | {"keep", "drop", "integer"}
PADDED = frozenset({"tril_and_padding", "tril_then_padding"})
DROPS = frozenset({"drop", "triu"})
WANTS_DROP = frozenset(
    {"masked_fill", "torch_masked_fill", "masked_fill_inplace", "where_drop", "zeros_filled", "times_fill"}
)
ADDENDS = frozenset({"zeros_filled", "where_zero", "one_minus", "times_fill"})
ARITHMETIC = frozenset({"one_minus", "times_fill", "mix"})
BUILTIN = frozenset({"functional", "torch", "method", "module"})


def _is_negation(mask: str, mask_apply: str) -> bool:
    return (mask in DROPS) != (mask_apply in WANTS_DROP)


def _is_inplace_safe(dtype: torch.dtype, added: str, upcast: str) -> bool:
    return dtype not in HALF or added != "float32" or upcast in ("operands", "product")


def _is_float32(dtype: torch.dtype, upcast: str) -> bool:
    return dtype == torch.float32 or (dtype in HALF and upcast != "none")


def _is_stable(softmax: str, shift: str, exponential: str) -> bool:
    return softmax == "handwritten" and shift != "none" and exponential in ("torch_exp", "method_exp")


def _is_uniform_when_masked(dtype: torch.dtype, mask_apply: str, fill: str, mask: str) -> bool:
    """Whether a row without any key has the same weights in this precision as in float64."""
    if mask != "additive_min" and mask_apply not in ADDENDS:
        return fill != "-inf"
    if dtype == torch.float64:  # keeps the scores beside -1e4 and loses them beside the smallest number
        return fill not in ("-inf", "-1e9")
    return dtype != torch.float16 and (mask == "additive_min" or fill == "min")


RULES: dict[str, Callable[..., bool]] = {
    "a packed projection is self-attention": lambda layout, lengths: layout not in PACKED or lengths[0] == lengths[1],
    "equal parts hold equal heads and dims": lambda layout, heads, head_dims, sharing: (
        layout not in PACKED - UNEVENLY_PACKED or (len({*heads}) == len({*head_dims}) == 1 and sharing != "first_head")
    ),
    "the form is reached from the layout": lambda layout, form: (
        form in REACHED.get(NATURAL[layout], (NATURAL[layout],))
    ),
    "no head axis, one head": lambda form, heads: (form in ("qd", "bqd")) == (heads == (1, 1)),
    "a matrix has no batch": lambda layout, batch: layout != "matrix" or batch == 1,
    "heads are split from a merged axis": lambda layout, heads_split_by: (
        (layout in SPLIT) == (heads_split_by != "none")
    ),
    "heads move from behind the positions": lambda layout, form, key_built, heads_moved_by: (
        (NATURAL[layout] == "bqhd" and form not in ("bqhd", "hbqd")) == (heads_moved_by != "none")
    ),
    "batch and heads are flattened": lambda layout, form, flattened_by: (
        (form == "fqd" and layout != "flat") == (flattened_by != "none")
    ),
    "a transposed key is given or permuted": lambda key_built, layout, form: (
        key_built == "plain" or layout in RAW_KEY or (NATURAL[layout] == "bqhd" and form in ("bhqd", "fqd", "bhgqd"))
    ),
    "heads are shared if fewer": lambda heads, sharing: (heads[0] == heads[1]) == (sharing == "none"),
    "only one head broadcasts": lambda heads, sharing: sharing not in BROADCAST or heads[1] == 1,
    "grouped means a group axis": lambda form, sharing: (form == "bhgqd") == (sharing in GROUPED),
    "a flat layout shares no heads": lambda layout, sharing: layout != "flat" or sharing == "none",
    "a flat form cannot broadcast": lambda form, sharing: form != "fqd" or sharing not in BROADCAST,
    "bmm does not broadcast": lambda sharing, contraction, output_contraction: (
        sharing not in BROADCAST | {"grouped_broadcast"} or "bmm" not in (contraction, output_contraction)
    ),
    "baddbmm is flat": lambda contraction, form, order: contraction != "baddbmm" or (form == "fqd" and order == "qk"),
    "group letters need einsum": lambda sharing, contraction, output_contraction: (
        sharing != "grouped_einsum" or {contraction, output_contraction} <= NAMED_EINSUMS
    ),
    "token-major operands need einsum": lambda form, contraction, output_contraction: (
        form != "bqhd" or {contraction, output_contraction} <= NAMED_EINSUMS
    ),
    "heads between positions come from einsum": lambda form, order, contraction: (
        order in ("qk", "kq") or (form in ("bhqd", "bqhd") and contraction in NAMED_EINSUMS)
    ),
    "the key is turned for a matmul": lambda contraction, key_built, key_turned_by: (
        (contraction in MATMULS and key_built == "plain") == (key_turned_by != "none")
    ),
    "a turned key is contracted once": lambda key_built, contraction, order: (
        key_built == "plain" or contraction in EINSUMS or (contraction in MATMULS and order == "qk")
    ),
    "letters belong to einsum": lambda contraction, output_contraction, letters: (
        ({contraction, output_contraction} & EINSUMS != set()) == (letters != "none")
    ),
    "alpha belongs to baddbmm": lambda scale_at, contraction: scale_at != "alpha" or contraction == "baddbmm",
    "a scale has a value": lambda scale_at, scale_value: (scale_at == "none") == (scale_value == "none"),
    "a scale is spelled": lambda scale_at, scale_by: (scale_at in ("none", "alpha")) == (scale_by == "none"),
    "only scores are scaled in place": lambda scale_at, scale_by: (
        scale_by not in INPLACE_SCALES or scale_at == "scores"
    ),
    "roots of the head dim": lambda scale_by, scale_value: scale_by not in ROOT_SCALES or scale_value == "rsqrt",
    "one scale argument": lambda scale_at, scale_by: scale_at != "query_and_key" or scale_by != "tensor_argument",
    "a bias is described": lambda bias, bias_axes, bias_dtype, bias_added_by: (
        {bias == "none"} == {bias_axes == "none", bias_dtype == "none", bias_added_by == "none"}
    ),
    "relative positions are per head": lambda bias, bias_axes: bias in ("none", "learned") or bias_axes == "hqk",
    "a half bias is added in place to half": lambda dtype, bias_dtype, upcast, bias_added_by: (
        bias_added_by != "inplace" or _is_inplace_safe(dtype, bias_dtype, upcast)
    ),
    "float32 biases are for half operands": lambda dtype, bias_dtype, mask_dtype: (
        dtype in (torch.bfloat16, torch.float16) or "float32" not in (bias_dtype, mask_dtype)
    ),
    "a mask has axes and a spelling": lambda mask, mask_axes, mask_apply: (
        {mask == "none"} == {mask_axes == "none", mask_apply == "none"}
    ),
    "a causal mask has no heads": lambda mask, mask_axes: (
        mask in USER_MASKS | {"none"} or mask_axes == ("b1qk" if mask == "tril_and_padding" else "qk")
    ),
    "a float mask is added": lambda mask, mask_apply: (mask in ADDITIVE_INPUTS) == (mask_apply == "add"),
    "a bool mask fills": lambda mask_apply, fill: (mask_apply in ("none", "add")) == (fill == "none"),
    "products with infinity are nan": lambda mask_apply, fill: mask_apply not in ARITHMETIC or fill != "-inf",
    "float16 ends at 65504": lambda dtype, fill, upcast: (
        dtype != torch.float16 or fill != "-1e9" or upcast in ("operands", "product")
    ),
    "masks made of numbers have a dtype": lambda mask_apply, mask_dtype: (
        (mask_apply in ADDENDS | {"add", "mix"}) == (mask_dtype != "none")
    ),
    "masks made of numbers are added": lambda mask_apply, mask_added_by: (
        (mask_apply in ADDENDS | {"add"}) == (mask_added_by != "none")
    ),
    "a half mask is added in place to half": lambda dtype, mask_dtype, upcast, mask_added_by: (
        mask_added_by != "inplace" or _is_inplace_safe(dtype, mask_dtype, upcast)
    ),
    "negation is spelled where polarity differs": lambda mask, mask_apply, negated_by: (
        (mask_apply not in ("none", "add") and _is_negation(mask, mask_apply)) == (negated_by != "none")
    ),
    "integers are negated by comparison": lambda mask, negated_by: (
        mask != "integer" or negated_by in ("none", "equals_zero")
    ),
    "baddbmm adds one operand": lambda contraction, bias_added_by, mask_added_by: (
        [bias_added_by, mask_added_by].count("baddbmm") <= (contraction == "baddbmm")
    ),
    "baddbmm adds a float input": lambda mask_added_by, mask: mask_added_by != "baddbmm" or mask in ADDITIVE_INPUTS,
    "baddbmm adds its own dtype (bias)": lambda dtype, upcast, bias_added_by, bias_dtype: (
        bias_added_by != "baddbmm" or (bias_dtype == "float32") == (dtype in HALF and upcast == "operands")
    ),
    "baddbmm adds its own dtype (mask)": lambda dtype, upcast, mask_added_by, mask_dtype: (
        mask_added_by != "baddbmm" or (mask_dtype == "float32") == (dtype in HALF and upcast == "operands")
    ),
    "only scaled scores have a before (bias)": lambda scale_at, bias, bias_added_by, bias_before_scale: (
        not bias_before_scale
        or (bias != "none" and (scale_at == "scores" or (scale_at == "alpha" and bias_added_by == "baddbmm")))
    ),
    "only scaled scores have a before (mask)": lambda scale_at, mask, mask_added_by, mask_before_scale: (
        not mask_before_scale
        or (mask != "none" and (scale_at == "scores" or (scale_at == "alpha" and mask_added_by == "baddbmm")))
    ),
    "baddbmm adds before the scores are scaled (bias)": lambda scale_at, bias_added_by, bias_before_scale: (
        scale_at != "scores" or bias_added_by != "baddbmm" or bias_before_scale
    ),
    "baddbmm adds before the scores are scaled (mask)": lambda scale_at, mask_added_by, mask_before_scale: (
        scale_at != "scores" or mask_added_by != "baddbmm" or mask_before_scale
    ),
    "a fill times an unknown scale may be anything": lambda scale_by, mask_before_scale, mask: (
        scale_by != "tensor_argument" or not mask_before_scale or mask == "additive_min"
    ),
    "an order needs two": lambda bias, mask, bias_last: not bias_last or "none" not in (bias, mask),
    "a masked row is the user's": lambda rows_fully_masked, mask, mask_apply, fill, dtype: (
        not rows_fully_masked
        or (mask in USER_MASKS - {"additive_inf"} and _is_uniform_when_masked(dtype, mask_apply, fill, mask))
    ),
    "an integer mask is not known to be zeros and ones, so it cannot scale the scores": lambda mask, mask_apply: (
        mask != "integer" or mask_apply != "mix"
    ),
    "the smallest float64 overflows when it is folded into a power of two": lambda dtype, fill, exponential: (
        dtype != torch.float64 or fill != "min" or exponential not in ("exp2", "exp2_folded")
    ),
    "a masked row is stable": lambda rows_fully_masked, softmax, shift, exponential, bias: (
        not rows_fully_masked or (bias == "none" and (softmax in BUILTIN or _is_stable(softmax, shift, exponential)))
    ),
    "flat scores meet the mask": lambda form, mask, flat_mask: (
        (form == "fqd" and mask != "none") == (flat_mask != "none")
    ),
    "baddbmm takes flat masks": lambda mask_added_by, flat_mask: (
        mask_added_by != "baddbmm" or flat_mask == "mask_expanded"
    ),
    "float64 stays": lambda dtype, upcast: dtype != torch.float64 or upcast == "none",
    "softmax takes a dtype": lambda softmax, upcast: upcast != "softmax_argument" or softmax in BUILTIN - {"module"},
    "only a handwritten softmax has parts": lambda softmax, exponential, normalised_by: (
        {softmax == "handwritten"} == {exponential != "none", normalised_by != "none"}
    ),
    "only a handwritten softmax is shifted": lambda softmax, shift: shift == "none" or softmax == "handwritten",
    "handwritten sums are kept or unsqueezed": lambda softmax, reduced_by: (
        (softmax in ("handwritten", "logsumexp")) == (reduced_by != "none")
    ),
    "float16 needs the shift": lambda dtype, softmax, shift, upcast, normalised_by: (
        dtype != torch.float16
        or softmax != "handwritten"
        or shift != "none"
        or (upcast != "none" and normalised_by != "deferred")
    ),
    "log2(e) is folded into a float": lambda exponential, scale_at, scale_by: (
        exponential != "exp2_folded" or (scale_at != "none" and scale_by not in ROOT_SCALES | {"tensor_argument"})
    ),
    "log2(e) folded scales the bias too": lambda exponential, bias, bias_before_scale: (
        exponential != "exp2_folded" or bias == "none" or bias_before_scale
    ),
    "deferred sums line up": lambda normalised_by, order, output_axes: (
        normalised_by != "deferred" or (order, output_axes) in (("qk", "lead"), ("qhk", "token"))
    ),
    "weights meet the value's dtype": lambda dtype, upcast, bias_dtype, mask_dtype, cast: (
        cast != "none" or dtype not in HALF or (upcast == "none" and "float32" not in (bias_dtype, mask_dtype))
    ),
    "the value is upcast to float32": lambda dtype, upcast, cast: cast != "upcast_value" or _is_float32(dtype, upcast),
    "ellipsis stands for equal leading axes": lambda contraction, output_contraction, form, sharing, order: (
        contraction != "einsum_ellipsis" or (form != "bqhd" and sharing != "grouped_einsum" and order in ("qk", "kq"))
    ),
    "ellipsis stands for the weights' leading axes": lambda output_contraction, order, sharing: (
        output_contraction != "einsum_ellipsis" or (sharing != "grouped_einsum" and order in ("qk", "kq"))
    ),
    "token-major results come from einsum": lambda output_axes, form, output_contraction: (
        output_axes == "lead" or (form in ("bhqd", "bqhd") and output_contraction in NAMED_EINSUMS)
    ),
    "heads are merged if there are any": lambda output, form: output == "left" or form not in ("qd", "bqd"),
}
OFTEN_PLAIN = frozenset({"bias", "upcast"})  # plain in about half of all cases, for what is possible only then
DOMAINS: Domains = {f.name: f.metadata["options"] for f in fields(Spelling)}


@functools.cache
def _parameters(rule: Callable[..., bool]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


@functools.cache
def _supported(text: str, options: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """The options of a rule's fields that occur in at least one combination which obeys it."""
    allowed = [combination for combination in itertools.product(*options) if RULES[text](*combination)]
    return tuple(tuple(o for o in column if any(c[i] == o for c in allowed)) for i, column in enumerate(options))


@functools.cache
def _rules_about(name: str) -> frozenset[str]:
    return frozenset(text for text, rule in RULES.items() if name in _parameters(rule))


def pruned(domains: Domains, **chosen: tuple[Any, ...]) -> Domains:
    """The domains without the options that some rule excludes, given the others; an empty one means a contradiction.

    Only what follows from the `chosen` fields is looked at, if there are any.
    """
    left = {**domains, **chosen}
    pending = {text for name in chosen or left for text in _rules_about(name)}
    while pending:
        text = pending.pop()
        names = _parameters(RULES[text])
        for name, options in zip(names, _supported(text, tuple(left[name] for name in names)), strict=True):
            if options != left[name]:
                left[name] = options
                pending |= _rules_about(name)
    return left


@st.composite
def spellings(draw: st.DrawFn, /, **restrict: Any) -> Spelling:
    """A valid spelling; a keyword fixes a field to a value or to a set of values: `mask={"keep", "drop"}`."""
    fixed = {
        name: tuple(o for o in DOMAINS[name] if o in value) if isinstance(value, set | frozenset) else (value,)
        for name, value in restrict.items()
    }
    domains = pruned({**DOMAINS, **fixed})
    if not all(domains.values()):
        raise ValueError(f"no spelling has {restrict}; left after the rules: {domains}")
    for name in DOMAINS:
        plainest = DOMAINS[name][:1] if name in OFTEN_PLAIN and DOMAINS[name][0] in domains[name] else ()
        domains = pruned(domains, **{name: (draw(st.sampled_from(domains[name] + plainest * 3)),)})
        if not all(domains.values()):
            reject()
    return Spelling(**{name: options[0] for name, options in domains.items()})
