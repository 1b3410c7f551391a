"""What a user gives of an op: its operands by name or in the op's order, and its attributes by name, for every op alike.

``lz.which``, ``explain``, ``validate`` and eager calls read it here. What an op takes stands in one table of its module
(``SHAPES``, ``KINDS``), from which checks, messages and documentation follow. Nothing runs: fake tensors do as well.
"""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from lz_compile.api.arguments import Arguments, Kind
from lz_compile.errors import ArgumentError, UnknownOperationError, nearest
from lz_compile.lowering import ops
from lz_compile.lowering.operands import MisfitError
from lz_compile.runtime.problem import context as contexts
from lz_compile.runtime.problem.context import SelectionContext

#: What elements are, by an op's name for it; integers of another width are taken, too.
_ELEMENTS: Mapping[str, Kind] = {
    "boolean": "boolean",
    "int32": "integer",
    "int64": "integer",
    "stored": "stored",
    "bytes": "bytes",
    "real": "real",
}
#: The operands whose layout in memory kernels ask for.
_LAID_OUT = ("query", "key", "value")


@dataclass(frozen=True)
class Given:
    """A problem of an op over tensors: its canonical operands, its attributes, and what a kernel is chosen for."""

    op: str
    x: Any
    attrs: Any
    context: SelectionContext

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are wanted."""
        return self.context.is_training


def read(function: str, operation: str, tensors: Sequence[Any], named: Mapping[str, Any]) -> Given:
    """What is given to a public function that takes any operation.

    Args:
        function: its public name.
        operation: an op, or one of its variants (``norm.rms``), which sets the attributes that make it.
        tensors: operands in the op's order.
        named: the others by name, attributes (``is_causal`` also as ``causal``), and ``layout``.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: an operand or attribute is unknown, missing, or does not fit; the text says what the op takes.
    """
    check_operation(f"calling lz.{function}", operation)
    op, _, variant = operation.partition(".")
    module = ops.module(op)
    reader = _Reader(function, op)
    operands, attributes = reader.sorted(tensors, named)
    layout = attributes.pop("layout", module.LAYOUT)
    reader.one_of("layout", layout, (module.LAYOUT, *getattr(module, "CALL_LAYOUTS", ())))
    if hasattr(module, "canonical"):
        operands = module.canonical(operands, layout)
    reader.check_operands(operands)
    made = module.VARIANT_ATTRIBUTES[variant] if variant else {}
    for name, value in attributes.items():
        if name in made and value != made[name]:
            raise reader.wrong(name, f"as {made[name]!r}, which makes {operation}", repr(value))
        reader.check_attribute(name, value)
    x = module.Operands(**{name: each for name, each in operands.items() if each is not None})
    try:
        attrs, facts = module.from_operands(x, reader.sizes, **attributes, **made)
    except MisfitError as error:
        raise reader.wrong(error.operand, error.expected, error.received, error.advice) from None
    if variant and attrs.variant != variant:
        raise reader.wrong("operands", f"of {operation}", f"those of {op}.{attrs.variant}")
    for name, value in attributes.items():
        if getattr(attrs, name) != value:
            raise reader.wrong(name, f"as {getattr(attrs, name)!r}, which the operands tell", repr(value))
    return Given(op, x, attrs, _context(op, x, attrs, facts, layout))


def check_operation(doing: str, operation: object) -> None:
    """Refuse what is no operation."""
    if not isinstance(operation, str) or operation not in contexts.operations():
        raise UnknownOperationError(doing, operation, contexts.operations())


def _context(op: str, x: Any, attrs: Any, facts: Any, layout: str) -> SelectionContext:
    device = x.tensors[0].device
    laid_out = [getattr(x, name) for name in _LAID_OUT if op == "attention"]
    return replace(
        contexts.of_facts(op, attrs, facts, device=device),
        layout=layout,
        is_last_dim_contiguous=all(each.stride(-1) == 1 for each in laid_out),
        is_cuda_graph_capturing=device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.is_current_stream_capturing(),
    )


class _Reader(Arguments):
    """Checks operands and attributes of one op; its errors say what it takes, where that is in doubt."""

    def __init__(self, function: str, op: str) -> None:
        super().__init__(function)
        self.op, self.module = op, ops.module(op)
        self._are_in_order = False

    @property
    def sizes(self) -> Mapping[str, int]:
        """By the letters of dimensions; what only broadcasts is 1."""
        return defaultdict(lambda: 1, self._sizes)

    def wrong(self, argument: str, expected: str, received: object, advice: str = "") -> ArgumentError:
        """The error that says so: with all that the op takes where a name is wrong or missing, or with the order given by."""
        is_known = argument in (*self.module.Operands.names, *attribute_types(self.module), "layout")
        if received == "None" or not (is_known or "did you mean" in str(received)):
            advice = ". ".join(filter(None, (advice, taken(self.op))))
        elif self._are_in_order and argument in self.module.Operands.names:
            order = f"In order, {self.op} takes {', '.join(self.module.Operands.names)}"
            advice = ". ".join(filter(None, (advice, order)))
        return super().wrong(argument, expected, received, advice)

    def sorted(self, tensors: Sequence[Any], named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Operands and attributes by their own names."""
        names, self._are_in_order = self.module.Operands.names, len(tensors) > 1
        if len(tensors) > len(names):
            raise self.wrong("operands", f"of {self.op}, {len(names)} at most", f"{len(tensors)} tensors")
        operands: dict[str, Any] = dict(zip(names, tensors, strict=False))
        attributes = {}
        known = attribute_types(self.module)
        for name, value in named.items():
            if name in operands:
                raise self.wrong(name, "once", "two, one of them by its position")
            own = name if name in known else f"is_{name}"
            if name in names:
                operands[name] = value
            elif own in known or name == "layout":
                attributes[own if own in known else name] = value
            else:
                hint = nearest(name, [*names, *known, "layout"])
                raise self.wrong("arguments", f"by names that {self.op} has", f"'{name}'{hint}")
        return operands, attributes

    def check_operands(self, operands: Mapping[str, Any]) -> None:
        """Refuse what lacks, or has another kind or shape, or is on another device than those before it."""
        kinds = getattr(self.module, "KINDS", {})
        for name in self.module.Operands.names:
            value, kind = operands.get(name), kinds.get(name, "floating")
            if value is None and name in self.module.Operands.optional:
                continue
            if kind == "count":
                self.number(name, value, 1, whole=True)
            elif kind == "scalar" and not isinstance(value, torch.Tensor):
                self.number(name, value)
            else:
                is_scalar = kind == "scalar" and isinstance(value, torch.Tensor) and value.dim() == 0
                dims = "" if is_scalar else self.module.SHAPES[name]
                self.tensor(name, value, dims, _ELEMENTS.get(kind, "floating"), anywhere=is_scalar)
        if not any(isinstance(each, torch.Tensor) for each in operands.values()):
            raise self.wrong("operands", f"of {self.op}, one at least", "none")

    def check_attribute(self, name: str, value: Any) -> None:
        """Refuse a value of another type than the attribute's."""
        kind = attribute_types(self.module)[name]
        options = typing.get_args(kind)
        is_optional = type(None) in options
        plain = next((each for each in options if each is not type(None)), kind) if is_optional else kind
        if typing.get_origin(plain) is typing.Literal:
            self.one_of(name, value, typing.get_args(plain))
        elif plain is bool:
            self.flag(name, value)
        elif plain in (int, float):
            self.number(name, value, whole=plain is int, optional=is_optional)
        elif isinstance(plain, type) and not isinstance(value, plain) and not (value is None and is_optional):
            raise self.wrong(name, f"as a {plain.__name__}", repr(value))


@cache
def attribute_types(module: ModuleType) -> dict[str, Any]:
    """The attributes of an op that can be given, with their types: operands tell the others."""
    hints = typing.get_type_hints(module.Attributes)
    names = (each.name for each in fields(module.Attributes) if each.name not in module.Operands.names)
    return {name: hints[name] for name in names if not name.startswith("has_")}


def operand_shapes(op: str) -> dict[str, str]:
    """Every operand of an op with its shape, as documentation and messages say it."""
    module = ops.module(op)
    kinds = getattr(module, "KINDS", {})

    def shown(name: str) -> str:
        dims, kind = ", ".join(module.SHAPES[name].split()), kinds.get(name, "")
        text = "a number" if kind == "count" or (kind == "scalar" and not dims) else f"[{dims}]"
        if kind == "scalar" and dims:
            return f"{text} or a number"
        return f"{text} {kind}" if kind in _ELEMENTS else text

    return {name: shown(name) for name in module.Operands.names}


def taken(op: str) -> str:
    """What an op takes, in a sentence."""
    optional = ops.module(op).Operands.optional
    told = [f"{name} {text}{' (optional)' if name in optional else ''}" for name, text in operand_shapes(op).items()]
    return f"Operands of {op} are {', '.join(told)}; attributes are {', '.join(attribute_types(ops.module(op)))}"
