"""The operands and attributes that a command describes: shapes by operand name, attributes by theirs, random elements."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lz_compile.api.given import taken
from lz_compile.errors import CommandError
from lz_compile.ground.hardware import default_device
from lz_compile.lowering import ops

if TYPE_CHECKING:
    import argparse

#: Options about attention, and what they are where they are not given.
_OF_ATTENTION: Mapping[str, Any] = {
    "kv_shape": None,
    "layout": None,
    "causal": False,
    "mask": "none",
    "scale": None,
    "dropout": None,
}


def operation_of(arguments: argparse.Namespace, default: str | None = "attention") -> str | None:
    """The operation that is named by its position or by ``--op``; ``--causal`` is its variant."""
    by_position = getattr(arguments, "operation", None)
    if by_position and arguments.op and by_position != arguments.op:
        raise CommandError(f"--op {arguments.op} contradicts {by_position}; give one of them")
    operation: str | None = by_position or arguments.op or default
    if operation is None or not arguments.causal or operation.endswith(".causal"):
        return operation
    if "." in operation:
        raise CommandError(f"--causal contradicts {operation}; ask for {operation.partition('.')[0]}.causal")
    return f"{operation}.causal"


def named_of(arguments: argparse.Namespace, operation: str, *, are_fake: bool = False) -> dict[str, Any]:
    """Operands (fake ones take no memory) and attributes by name."""
    op = operation.partition(".")[0]
    if op not in ops.names():
        return {}  # what is asked says which there are
    shapes = _shapes(arguments, op)
    wants = arguments.training
    with FakeTensorMode() if are_fake else nullcontext():
        found: dict[str, Any] = {name: _random(op, name, shape, arguments) for name, shape in shapes.items()}
        for each in found.values():
            each.requires_grad_(wants and each.is_floating_point())
        if arguments.mask != "none":
            found["mask"] = _mask(arguments, shapes, are_fake=are_fake)
    others = {"scale": arguments.scale, "dropout_p": arguments.dropout, "layout": arguments.layout}
    found |= {name: value for name, value in others.items() if value is not None}
    return {**found, **{name: _value(name, text) for name, text in arguments.set}}


def _shapes(arguments: argparse.Namespace, op: str) -> dict[str, Sequence[int]]:
    """By operand; a shape without a name is that of the first, and in attention of query, key and value."""
    if not arguments.shape and not arguments.set:
        raise CommandError(f"expected tensors: give --shape, by name as --shape input=64,128. {taken(op)}")
    wrong = [name for name, value in _OF_ATTENTION.items() if op != "attention" and getattr(arguments, name) != value]
    if wrong:
        raise CommandError(f"--{wrong[0].replace('_', '-')} is about attention, not {op}. {taken(op)}")
    names = ops.module(op).Operands.names
    found = {name or names[0]: shape for name, shape in arguments.shape}
    unknown = next((name for name in found if name not in names), None)
    if unknown is not None:
        raise CommandError(f"--shape {unknown}: {op} has no such operand. {taken(op)}")
    if op == "attention" and "query" in found:
        keys = arguments.kv_shape or found["query"]
        found = {"query": found["query"], "key": keys, "value": keys, **found}
    return found


def _random(op: str, name: str, shape: Sequence[int], arguments: argparse.Namespace) -> torch.Tensor:
    from lz_compile.passes.proof.eager_proof import varied_like

    kind = getattr(ops.module(op), "KINDS", {}).get(name, "floating")
    dtype = {"boolean": torch.bool, "int32": torch.int32, "int64": torch.int64}.get(kind, dtype_of(arguments.dtype))
    return varied_like(name, torch.zeros(shape, dtype=dtype, device=device_of(arguments.device)))


def _mask(arguments: argparse.Namespace, shapes: Mapping[str, Sequence[int]], *, are_fake: bool) -> torch.Tensor:
    query, key = shapes.get("query", ()), shapes.get("key", ())
    layout = arguments.layout or "BHSD"
    if len(query) != 4 or len(key) != 4:
        raise CommandError(f"expected four dimensions ({layout}), received --shape {query}")
    length = layout.index("S")
    shape = (query[0], 1, query[length], key[length])
    device, dtype = device_of(arguments.device), dtype_of(arguments.dtype)
    if are_fake:
        return torch.empty(shape, dtype=torch.bool if arguments.mask == "bool" else dtype, device=device)
    keep = torch.rand(shape, device=device) > 0.1
    keep[..., 0] = True
    return keep if arguments.mask == "bool" else torch.zeros(shape, dtype=dtype, device=device).masked_fill(~keep, -1e4)


def _value(name: str, text: str) -> Any:
    """A number, a truth value, a dtype where the name says so, or the text itself."""
    if name.endswith("dtype") or name == "rounded_to":
        return dtype_of(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def dtype_of(name: str) -> torch.dtype:
    """By its name."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CommandError(f"expected a dtype, as float32, received '{name}'")
    return found


def device_of(name: str | None) -> torch.device:
    """By its name, if it is there; by default the accelerator, or the CPU."""
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
        raise CommandError(f"--device {name}: {' '.join(str(error).split()).partition('. ')[0]}") from error
    return device
