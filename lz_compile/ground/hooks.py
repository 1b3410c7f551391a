"""What lower rooms ask of higher ones, which fill it in when they are imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def is_debugging() -> bool:
    """Whether ``LAYERZERO_DEBUG`` is on."""
    return _answers["is_debugging"]()  # type: ignore[no-any-return]  # by name


def falls_back() -> bool:
    """Whether a kernel that fails is followed by another one (``fallback_enabled``)."""
    return _answers["falls_back"]()  # type: ignore[no-any-return]  # by name


def attend(x: Any, is_causal: bool, scale: float | None) -> Any:
    """An eager call of attention by the kernel that it selects (``api/eager.py``), tokens before heads."""
    if "attend" not in _answers:  # a compiled graph may ask before anyone has called attention eagerly
        import_module("lz_compile.api.eager")
    return _answers["attend"](x, is_causal, scale)


def answer(**answers: Callable[..., Any]) -> None:
    """Answer questions of this module, by their names."""
    _answers.update(answers)


_answers: dict[str, Callable[..., Any]] = {"is_debugging": lambda: False, "falls_back": lambda: True}
