"""What is asked of an op's attributes, a frozen dataclass per op, and those as text.

Operators of a graph take numbers, strings and tensors, but no dataclass.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from typing_extensions import Self

Attributes = TypeVar("Attributes")

_DTYPE = "torch."


class OpAttributes:
    """The attributes of an op, whose dataclass says what differs: most are not random, and do not assume finite numbers."""

    @property
    def variant(self) -> str:
        """The variant of the op that has these attributes, as ``VARIANT_ATTRIBUTES`` of its module tells them."""
        made: Mapping[str, Mapping[str, Any]] = vars(sys.modules[type(self).__module__])["VARIANT_ATTRIBUTES"]
        return next(name for name, own in made.items() if all(getattr(self, each) == own[each] for each in own))

    def deterministic(self) -> Self:
        """The same without anything random."""
        return self

    def assuming_finite(self) -> Self:
        """The same for operands without NaN or infinities; most kernels keep NaN anyway."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Names and values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # subclasses are
        return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in values.items()}


def encode(attrs: Any) -> str:
    """The attributes (a frozen dataclass) as JSON."""
    return _encoded(attrs)


# Dynamo cannot trace ``json``. As ``torch.compiler.assume_constant_result`` does, which would import Dynamo and Triton.
vars(encode)["_dynamo_marked_constant"] = True


@lru_cache(maxsize=1024)  # eager calls encode the same ones again and again, which takes 24 us each
def _encoded(attrs: Any) -> str:
    return json.dumps(asdict(attrs), default=_written)


def _written(value: Any) -> Any:
    """What JSON has no form for: a dtype, or a value of another library (equal ones of Python find the same text again)."""
    return value.item() if hasattr(value, "item") else str(value)


@lru_cache(maxsize=1024)
def decode(kind: type[Attributes], text: str) -> Attributes:
    """The inverse of :func:`encode`."""
    found: Attributes = _made(kind, json.loads(text))
    return found


def _made(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{name: _decoded(kind, name, value) for name, value in values.items()})


def _decoded(kind: Any, name: str, value: Any) -> Any:
    """A field's value; JSON knows neither dtypes nor tuples nor dataclasses."""
    if isinstance(value, dict):
        (nested,) = filter(is_dataclass, typing.get_args(typing.get_type_hints(kind)[name]))
        return _made(nested, value)
    if isinstance(value, list):
        return tuple(_decoded(kind, name, each) for each in value)
    is_dtype = isinstance(value, str) and value.startswith(_DTYPE)
    return getattr(torch, value.removeprefix(_DTYPE)) if is_dtype else value
