"""Registered functions as kernels: ``f(x, attrs)`` of every op, or of attention ``f(q, k, v, scale=None, causal=True)``.

In the second form the parameters say what the function can do; masks of the op become one ``attn_mask``, as in
``torch.nn.functional.scaled_dot_product_attention``. Unless a function may be traced, it runs as an opaque operator.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, ModuleType
from typing import Any

import torch

from lz_compile.errors import RegistrationError, nearest, no_such
from lz_compile.lowering import ops
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import Kernel, kernel_operator
from lz_compile.lowering.kernels.attention import token_major
from lz_compile.lowering.ops import attention
from lz_compile.lowering.ops.attention import Operands

#: What a function of the second form may take beside query, key and value.
PARAMETERS = ("scale", "causal", "is_causal", "attn_mask", "dropout_p", "enable_gqa", "softcap", "sinks")

_FIRST_FORM = ("attrs",)
#: Features of attention, and the parameters of which a function needs one; the first form says nothing of any.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "causal_rectangular": ("causal", "is_causal"),
    "dynamic_causal": ("causal", "is_causal"),
    "causal_at_end": _FIRST_FORM,
    "sliding_window": _FIRST_FORM,
    "gqa": (),
    "bool_mask": ("attn_mask",),
    "float_mask": ("attn_mask",),
    "bias_gradient": ("attn_mask",),
    "wide_bias": ("attn_mask",),
    "dropout": ("dropout_p",),
    "eager_dropout": ("dropout_p",),
    "alibi": _FIRST_FORM,
    "documents": _FIRST_FORM,
    "softcap": ("softcap",),
    "sinks": ("sinks",),
    "masked_row_fill": _FIRST_FORM,
    "masked_row_gradient": (),
    "training": (),
    "value_dim": (),
    "masked_nan": ("attn_mask",),
    "masked_nan_keys": ("attn_mask",),
    "nan_rows": (),
    "nan_in_few_keys": (),
}
#: Features of any op that a function which runs as one call cannot have.
_GRADIENTS = frozenset({"training", "bias_gradient", "masked_row_gradient"})
#: Features that a function of ``attention.causal`` has by its operation, whatever its parameters are.
_CAUSALITY = frozenset({"causal", "causal_rectangular", "dynamic_causal"})


@dataclass(frozen=True)
class Form:
    """How a function is called: with operands and attributes, or (attention) by the ``names`` that it takes."""

    kernel_id: str
    operation: str
    names: frozenset[str] | None
    is_traceable: bool

    @classmethod
    def of(cls, kernel_id: str, operation: str, function: Callable[..., Any], *, is_traceable: bool) -> Form:
        """What the signature of a function says.

        Raises:
            RegistrationError: it has neither form, or needs something that nobody gives it.
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise RegistrationError(
                kernel_id, f"expected a function with a signature; {error}. Wrap it in one"
            ) from None
        needed = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
        op = operation.partition(".")[0]
        if [each.name for each in needed][1:] == ["attrs"] and all(each.kind in _POSITIONAL for each in needed):
            return cls(kernel_id, operation, None, is_traceable)
        if op != "attention" or "attrs" in (each.name for each in parameters):
            raise RegistrationError(kernel_id, _about_form(op, function))
        _check_named(kernel_id, parameters, [each.name for each in needed])
        names = frozenset(each.name for each in parameters[3:] if each.name in PARAMETERS)
        return cls(kernel_id, operation, names, is_traceable)

    @property
    def takes_operands(self) -> bool:
        """Whether it is ``f(x, attrs)``."""
        return self.names is None

    @property
    def takes_causality(self) -> bool:
        """Whether a function of the second form can be told that the future is hidden."""
        return self.names is not None and not self.names.isdisjoint(("causal", "is_causal"))

    @property
    def supports_scale(self) -> bool:
        """Whether another scale than ``head_dim ** -0.5`` can be given."""
        return self.names is None or "scale" in self.names

    def supports(self, declared: Iterable[str]) -> frozenset[str]:
        """The features that a function has: those declared, and causality where its parameters say so.

        Raises:
            RegistrationError: a declared one does not exist, or no parameter of the function can express it.
        """
        found = set(declared)
        for feature in sorted(found):
            self._check(feature)
        is_causal = self.operation.endswith(".causal") or self.takes_causality
        if is_causal and not self.operation.endswith(".full"):
            found |= {"causal"} if self.is_traceable else {"causal", "dynamic_causal"}
        return frozenset(found)

    def _check(self, feature: str) -> None:
        is_attention = self.operation.partition(".")[0] == "attention"
        if is_attention and feature not in FEATURES:
            raise RegistrationError(self.kernel_id, no_such("feature", feature, FEATURES))
        if feature in _GRADIENTS and not self.is_traceable:
            text = f"'{feature}' needs is_traceable=True: a function that runs as one call has no gradient"
            raise RegistrationError(self.kernel_id, text)
        is_given = self.operation.endswith(".causal") and feature in _CAUSALITY
        needed = () if self.names is None or is_given else FEATURES[feature]
        if needed and self.names is not None and self.names.isdisjoint(needed):
            text = f"'{feature}' is declared, but the function has no parameter {' or '.join(map(repr, needed))}"
            raise RegistrationError(self.kernel_id, text)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _about_form(op: str, function: Callable[..., Any]) -> str:
    names = ", ".join(f"x.{name}" for name in ops.module(op).Operands.names)
    other = ", or def kernel(q, k, v, scale=None, causal=True, attn_mask=None, ...)" if op == "attention" else ""
    received = f"def kernel{inspect.signature(function)}"
    return (
        f"expected 'def kernel(x, attrs)' with the op's operands in one object{other}, received '{received}'. "
        f"Read the operands from x: {names}; one that is not given is None"
    )


def _check_named(kernel_id: str, parameters: list[inspect.Parameter], needed: list[str]) -> None:
    if len(parameters) < 3 or any(each.kind not in _POSITIONAL for each in parameters[:3]):
        text = "expected a function that begins with query, key and value, or 'def kernel(x, attrs)'"
        raise RegistrationError(kernel_id, text)
    first = {each.name for each in parameters[:3]}
    for name in needed:
        if name not in first and name not in PARAMETERS:
            hint, known = nearest(name, PARAMETERS), ", ".join(PARAMETERS)
            raise RegistrationError(
                kernel_id, f"nothing is known to give for its parameter '{name}'{hint}; known are {known}"
            )


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layouts:
    """Of a function of the second form: whether it takes, and whether it gives, tokens before heads."""

    takes_tokens: bool = False
    gives_tokens: bool = False


@dataclass(frozen=True)
class Registered:
    """A function that was registered, and what is known of it beside its form.

    ``name`` is that of its operator, a different one for each function.
    """

    form: Form
    function: Callable[..., Any]
    name: str
    is_cuda_graph_safe: bool = False
    takes_float_mask: bool = False
    layouts: Layouts = Layouts()

    def kernel(self) -> Kernel:
        """The function over the op's canonical operands and its attributes."""
        if self.form.names is None:
            module = ops.module(self.form.operation.partition(".")[0])
            return self.function if self.form.is_traceable else self._operator(module, self.function)
        in_tokens = self.layouts.gives_tokens and not self.form.is_traceable
        call = self._by_names(self.form.names, in_tokens)
        if self.form.is_traceable:
            return self._with_one_mask(call)
        operator = self._operator(token_major if in_tokens else attention, call)
        return self._with_one_mask(token_major.through(operator) if in_tokens else operator)

    def _operator(self, op: ModuleType, function: Kernel) -> Kernel:
        """A function as an opaque operator of an op, to which its result is held; the op's reference to fall back on."""

        def kernel(x: Any, attrs: Any) -> Any:
            return _held(self.name, function(x, attrs), op.fake(x, attrs))

        safe, kernel_id = self.is_cuda_graph_safe, self.form.kernel_id
        return kernel_operator(self.name, op, kernel, kernel_id=kernel_id, is_cuda_graph_safe=safe)

    def _by_names(self, names: frozenset[str], in_tokens: bool) -> Kernel:
        """The function over operands, tokens before heads or not, of which a mask or a bias is its ``attn_mask``."""

        def call(x: Operands, attrs: AttentionAttrs) -> Any:
            is_turned = self.layouts.takes_tokens != in_tokens
            tensors = (each.transpose(1, 2) if is_turned else each for each in (x.query, x.key, x.value))
            given = {
                "attn_mask": x.bias if x.mask is None else x.mask,
                "scale": attrs.scale,
                "causal": attrs.is_causal,
                "is_causal": attrs.is_causal,
                "dropout_p": attrs.dropout_p,
                "enable_gqa": attrs.enable_gqa,
                "softcap": attrs.softcap,
                "sinks": x.sinks,
            }
            out = self.function(*tensors, **{name: given[name] for name in names})
            return out.transpose(1, 2) if self.layouts.gives_tokens != in_tokens else out

        return call

    def _with_one_mask(self, call: Kernel) -> Kernel:
        """A kernel that is given the op's masks as one, and causality beside none."""

        def masked(x: Operands, attrs: AttentionAttrs) -> Any:
            merged = _merge(x, attrs, takes_float=self.takes_float_mask)
            is_causal = attrs.is_causal and (merged is None or not self.form.takes_causality)
            masks = {} if merged is None else {"mask" if merged.dtype == torch.bool else "bias": merged}
            given = Operands(x.query, x.key, x.value, sinks=x.sinks, **masks)
            return _mark_masked_rows(call(given, replace(attrs, is_causal=is_causal)), merged, attrs)

        return masked


def _held(name: str, found: Any, expected: Any) -> Any:
    """What a function gives, in the memory order of the op's kernels.

    Raises:
        ValueError: it has another shape or dtype than it should have.
    """
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(found) == len(expected):
        return tuple(_held(name, one, other) for one, other in zip(found, expected, strict=True))
    if expected is None and found is None:
        return None
    if _described(found) != _described(expected):
        raise ValueError(f"{name}: expected {_described(expected)}, received {_described(found)}")
    is_ordered = found.stride() == expected.stride() or (found.is_contiguous() and expected.is_contiguous())
    return found if is_ordered else expected.copy_(found)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _merge(x: Operands, attrs: AttentionAttrs, *, takes_float: bool) -> torch.Tensor | None:
    """The op's masks, causality included, as one: boolean where nothing is added, additive otherwise."""
    mask, bias, dtype = x.mask, x.bias, x.query.dtype
    if mask is None and bias is None:
        return None
    if attrs.is_causal:
        causal = x.query.new_ones((x.query.shape[2], x.key.shape[2]), dtype=torch.bool).tril()
        mask = causal if mask is None else torch.logical_and(mask, causal)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if mask is None:
        return bias
    has_finite_fill = attrs.masked_rows == "mean"
    if bias is None and not (has_finite_fill and takes_float):
        return mask
    fill = torch.finfo(dtype).min if has_finite_fill else -math.inf
    kept = torch.zeros_like(mask, dtype=dtype) if bias is None else bias
    return torch.where(mask, kept, fill)


def _mark_masked_rows(out: torch.Tensor, merged: torch.Tensor | None, attrs: AttentionAttrs) -> torch.Tensor:
    """What the op gives for rows whose every key is masked, whatever the function makes of them."""
    if merged is None or attrs.masked_rows not in ("nan", "zero") or (attrs.bias_is_finite and not attrs.has_mask):
        return out
    if attrs.has_bias:
        is_kept = merged.amax(-1, keepdim=True) != -math.inf
    else:
        is_kept = merged.any(-1, keepdim=True)
    return torch.where(is_kept, out, math.nan if attrs.masked_rows == "nan" else 0.0)


def operator_name(kernel_id: str, function: Callable[..., Any], generation: int) -> str:
    """A name for a function's operators: the same in every process, another one for another function."""
    suffix = f"_{generation}" if generation else ""
    return f"registered_{re.sub('[^a-z0-9_]', '_', kernel_id.lower())}_{code_digest(function)[:12]}{suffix}"


def code_digest(function: Callable[..., Any]) -> str:
    """A hash of a function's code, the same in every process; of other callables, of the name of their type."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    text = repr(_stable(code)) if code is not None else f"{type(function).__module__}.{type(function).__qualname__}"
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(constant: Any) -> Any:
    """Code as what it does, without addresses, file names and line numbers."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, constant.co_varnames, [_stable(each) for each in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return constant
