"""An op's attributes as text: operators of a graph take numbers, strings and tensors, but no dataclass."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, TypeVar

import torch

Attributes = TypeVar("Attributes")

_DTYPE = "torch."


def encode(attrs: Any) -> str:
    """The attributes (of a dataclass with ``to_dict``) as JSON."""
    return json.dumps(attrs.to_dict())


@lru_cache(maxsize=1024)
def decode(kind: type[Attributes], text: str) -> Attributes:
    """The inverse of :func:`encode`."""
    values: dict[str, Any] = json.loads(text)
    return kind(**{name: _decoded(value) for name, value in values.items()})


def _decoded(value: Any) -> Any:
    is_dtype = isinstance(value, str) and value.startswith(_DTYPE)
    return getattr(torch, value.removeprefix(_DTYPE)) if is_dtype else value
