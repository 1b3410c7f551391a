"""Calls a registered function of attention: with the op's own operands, or as ``f(q, k, v, scale=None, causal=True)``.

In the second form the parameters say what the function can do; masks of the op become one ``attn_mask``, as in
``torch.nn.functional.scaled_dot_product_attention``. Unless a function may be traced, it runs as an opaque operator.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from lz_compile.errors import RegistrationError, nearest
from lz_compile.lowering.ops.attention import AttentionAttrs, reference

#: What a function may take beside query, key and value.
PARAMETERS = ("scale", "causal", "is_causal", "attn_mask", "dropout_p", "enable_gqa", "softcap", "sinks")
#: The operands of the op that a function with ``attrs`` may take beside query, key and value.
OPERANDS = ("mask", "bias", "fill", "sinks", "slopes", "query_documents", "key_documents")

#: Features of attention, the parameters of which a function needs one, and the operand that one with ``attrs`` needs.
FEATURES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "causal": (("causal", "is_causal"), None),
    "causal_rectangular": (("causal", "is_causal"), None),
    "dynamic_causal": (("causal", "is_causal"), None),
    "causal_at_end": (("attrs",), None),
    "sliding_window": (("attrs",), None),
    "gqa": ((), None),
    "bool_mask": (("attn_mask",), "mask"),
    "float_mask": (("attn_mask",), "bias"),
    "bias_gradient": (("attn_mask",), "bias"),
    "dropout": (("dropout_p",), None),
    "alibi": (("attrs",), "slopes"),
    "documents": (("attrs",), "query_documents"),
    "softcap": (("softcap",), None),
    "sinks": (("sinks",), "sinks"),
    "masked_row_fill": (("fill",), "fill"),
    "masked_row_gradient": ((), None),
    "training": ((), None),
    "value_dim": ((), None),
    "masked_nan": (("attn_mask",), "mask"),
    "masked_nan_keys": (("attn_mask",), "mask"),
    "nan_rows": ((), None),
    "nan_in_few_keys": ((), None),
}
_GRADIENTS = frozenset({"training", "bias_gradient", "masked_row_gradient"})
#: Features of which a function that runs as one call is not told.
_TRACED = frozenset({"alibi", "documents"})
#: Features that a function of ``attention.causal`` has by its operation, whatever its parameters are.
_CAUSALITY = frozenset({"causal", "causal_rectangular", "dynamic_causal"})


@dataclass(frozen=True)
class Convention:
    """How a function of attention is called: with the op's operands and ``attrs``, or by the ``names`` that it takes."""

    kernel_id: str
    operation: str
    names: frozenset[str]
    takes_attrs: bool
    is_traceable: bool

    @classmethod
    def of(cls, kernel_id: str, operation: str, function: Callable[..., Any], *, is_traceable: bool) -> Convention:
        """What the signature of a function says.

        Raises:
            RegistrationError: it needs something that nobody gives it.
        """
        parameters = list(inspect.signature(function).parameters.values())
        takes_attrs = any(parameter.name == "attrs" for parameter in parameters)
        known = (*OPERANDS, "attrs") if takes_attrs else PARAMETERS
        named = parameters[3:]
        if len(parameters) < 3 or any(
            p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters[:3]
        ):
            raise RegistrationError(kernel_id, "expected a function that begins with query, key and value")
        for parameter in named:
            is_needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if is_needed and parameter.name not in known:
                hint = nearest(parameter.name, known)
                text = (
                    f"nothing is known to give for its parameter '{parameter.name}'{hint}; known are {', '.join(known)}"
                )
                raise RegistrationError(kernel_id, text)
        names = frozenset(parameter.name for parameter in named if parameter.name in known)
        return cls(kernel_id, operation, names, takes_attrs, is_traceable)

    @property
    def causal_name(self) -> str | None:
        """The parameter for causality, if there is one."""
        return next((name for name in ("causal", "is_causal") if name in self.names), None)

    def supports(self, declared: Iterable[str]) -> frozenset[str]:
        """The features that a function has: those declared, and causality where its parameters say so.

        Raises:
            RegistrationError: a declared one does not exist, or no parameter of the function can express it.
        """
        found = set()
        for feature in declared:
            self._check(feature)
            found.add(feature)
        is_causal = self.operation.endswith(".causal") or (not self.takes_attrs and self.causal_name is not None)
        if is_causal and not self.operation.endswith(".full"):
            found |= {"causal"} if self.is_traceable else {"causal", "dynamic_causal"}
        return frozenset(found)

    def _check(self, feature: str) -> None:
        if feature not in FEATURES:
            hint = nearest(feature, list(FEATURES))
            raise RegistrationError(self.kernel_id, f"no feature '{feature}'{hint}; valid are {', '.join(FEATURES)}")
        if feature in _GRADIENTS and not self.is_traceable:
            text = f"'{feature}' needs is_traceable=True: a function that runs as one call has no gradient"
            raise RegistrationError(self.kernel_id, text)
        if feature in _TRACED and not self.is_traceable:
            raise RegistrationError(self.kernel_id, f"'{feature}' needs is_traceable=True: its operands are traced")
        names, operand = FEATURES[feature]
        needed = names if not self.takes_attrs else (() if operand is None else (operand,))
        is_given = self.operation.endswith(".causal") and feature in _CAUSALITY
        if needed and not is_given and not self.names & set(needed):
            text = f"'{feature}' is declared, but the function has no parameter {' or '.join(map(repr, needed))}"
            raise RegistrationError(self.kernel_id, text)

    @property
    def supports_scale(self) -> bool:
        """Whether another scale than ``head_dim ** -0.5`` can be given."""
        return self.takes_attrs or "scale" in self.names

    def arguments(self, attrs: AttentionAttrs, *operands: Any) -> dict[str, Any]:
        """The keyword arguments of one call; where the function takes no ``attrs``, the mask is its ``attn_mask``.

        Args:
            attrs: of the attention.
            operands: the first of :data:`OPERANDS`, in their order.
        """
        given = {
            **dict.fromkeys(OPERANDS),
            **dict(zip(OPERANDS, operands, strict=False)),
            "attrs": attrs,
            "attn_mask": operands[0] if operands else None,
            "scale": attrs.scale,
            "causal": attrs.is_causal,
            "is_causal": attrs.is_causal,
            "dropout_p": attrs.dropout_p,
            "enable_gqa": attrs.enable_gqa,
            "softcap": attrs.softcap,
        }
        return {name: given[name] for name in self.names}


class RegisteredFunction:
    """A kernel over the op's canonical operands that calls a user's function.

    Args:
        function: the user's.
        convention: how it is called.
        is_token_major: it takes ``[B, S, H, D]``.
        gives_token_major: it gives ``[B, S, H, E]``.
        takes_float_mask: its ``attn_mask`` may be additive.
        is_cuda_graph_safe: CUDA graphs may capture it.
        name: of its operators, a different one for each function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        convention: Convention,
        *,
        is_token_major: bool,
        gives_token_major: bool,
        takes_float_mask: bool,
        is_cuda_graph_safe: bool,
        name: str,
    ) -> None:
        self._function = function
        self._convention = convention
        self._is_token_major = is_token_major
        self._gives_token_major = gives_token_major
        self._takes_float_mask = takes_float_mask
        self._is_cuda_graph_safe = is_cuda_graph_safe
        self._name = name
        self._operators: dict[AttentionAttrs, Callable[..., Any]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        fill: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        query_documents: torch.Tensor | None = None,
        key_documents: torch.Tensor | None = None,
        attrs: AttentionAttrs,
    ) -> torch.Tensor:
        """Attention in the op's canonical layout (see ``lowering/ops/attention.py``)."""
        if self._convention.takes_attrs:
            traced = (slopes, query_documents, key_documents) if self._convention.is_traceable else ()
            return self._run(query, key, value, (mask, bias, fill, sinks, *traced), attrs)
        merged = _merge(query, key, mask, bias, attrs, takes_float=self._takes_float_mask)
        is_causal = attrs.is_causal and (merged is None or self._convention.causal_name is None)
        out = self._run(query, key, value, (merged, None, None, sinks), replace(attrs, is_causal=is_causal))
        return _mark_masked_rows(out, merged, attrs)

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        operands: tuple[Any, ...],
        attrs: AttentionAttrs,
    ) -> torch.Tensor:
        if self._is_token_major:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        call = functools.partial(self._call, attrs) if self._convention.is_traceable else self._operator(attrs)
        out: torch.Tensor = call(query, key, value, *operands)
        return out.transpose(1, 2) if self._gives_token_major else out

    def _call(self, attrs: AttentionAttrs, query: Any, key: Any, value: Any, *operands: Any) -> Any:
        return self._function(query, key, value, **self._convention.arguments(attrs, *operands))

    def _operator(self, attrs: AttentionAttrs) -> Callable[..., Any]:
        if attrs not in self._operators:
            self._operators[attrs] = self._define(attrs)
        return self._operators[attrs]

    def _define(self, attrs: AttentionAttrs) -> Callable[..., Any]:
        """The function with these attributes as an opaque operator, with the op's reference to fall back on."""
        from lz_compile.lowering.opaque import opaque

        def run(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            bias: torch.Tensor | None,
            fill: torch.Tensor | None,
            sinks: torch.Tensor | None,
        ) -> torch.Tensor:
            out = self._call(attrs, query, key, value, mask, bias, fill, sinks)
            expected = tuple(self._shape(query, value))
            if not isinstance(out, torch.Tensor) or tuple(out.shape) != expected or out.dtype != query.dtype:
                found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
                raise ValueError(f"{self._name}: expected a {query.dtype} tensor {expected}, received {found}")
            return out.contiguous()

        def fake(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            bias: torch.Tensor | None,
            fill: torch.Tensor | None,
            sinks: torch.Tensor | None,
        ) -> torch.Tensor:
            return query.new_empty(self._shape(query, value))

        def fallback(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            bias: torch.Tensor | None,
            fill: torch.Tensor | None,
            sinks: torch.Tensor | None,
        ) -> torch.Tensor:
            if mask is not None and mask.dtype != torch.bool:  # an ``attn_mask``
                mask, bias = None, mask
            if self._is_token_major:
                query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            out = reference(query, key, value, mask=mask, bias=bias, fill=fill, sinks=sinks, attrs=attrs).to(
                query.dtype
            )
            return (out.transpose(1, 2) if self._gives_token_major else out).contiguous()

        return opaque(
            f"{self._name}_{hashlib.sha256(repr(attrs).encode()).hexdigest()[:12]}",
            run,
            fake,
            fallback=fallback,
            kernel_id=self._convention.kernel_id,
            is_cuda_graph_safe=self._is_cuda_graph_safe,
        )

    def _shape(self, query: torch.Tensor, value: torch.Tensor) -> list[Any]:
        """Of what the function gives."""
        batch, first, second, _ = query.shape
        is_turned = self._is_token_major != self._gives_token_major
        return [batch, second, first, value.shape[-1]] if is_turned else [batch, first, second, value.shape[-1]]


def _merge(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    attrs: AttentionAttrs,
    *,
    takes_float: bool,
) -> torch.Tensor | None:
    """The op's masks, causality included, as one: boolean where nothing is added, additive otherwise."""
    if mask is None and bias is None:
        return None
    if attrs.is_causal:
        causal = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril()
        mask = causal if mask is None else torch.logical_and(mask, causal)
    if bias is not None and bias.dtype != query.dtype:
        bias = bias.to(query.dtype)
    if mask is None:
        return bias
    has_finite_fill = attrs.masked_rows == "mean"
    if bias is None and not (has_finite_fill and takes_float):
        return mask
    fill = torch.finfo(query.dtype).min if has_finite_fill else -math.inf
    kept = torch.zeros_like(mask, dtype=query.dtype) if bias is None else bias
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
