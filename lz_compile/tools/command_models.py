"""The model that a command is about: what ``module:callable`` returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lz_compile.errors import CommandError


class ModelError(Exception):
    """The model that was given fails by itself."""


def model_of(subject: str) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """What ``module:callable`` gives: a model with its inputs, and keyword inputs where it gives three things."""
    module, _, name = subject.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"{subject}: expected module:callable that can be imported, received {error}") from error
    if not callable(factory):
        raise CommandError(f"{subject}: expected a function that returns (model, inputs), received {factory!r:.100}")
    try:
        made = factory()
    except Exception as error:
        raise ModelError(f"calling {subject}: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise CommandError(f"{subject}: expected it to return (model, inputs) or (model, inputs, keyword inputs)")
    model, inputs, keywords = (*made, {}) if len(made) == 2 else made
    if not isinstance(keywords, Mapping) or not all(isinstance(name, str) for name in keywords):
        raise CommandError(f"{subject}: expected keyword inputs by name, received {keywords!r:.100}")
    return model, inputs if isinstance(inputs, (tuple, list)) else (inputs,), dict(keywords)
