"""How many norms, rotary embeddings and gated MLPs a model runs, counted where its own code says so by its names.

What is counted does not look at graphs: calls of modules that are called norms, of functions that apply rotary embeddings
(one for each tensor that they give back), and of modules that have a gate and an up projection.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

#: Children of a gated MLP, in one of these sets of names.
GATED = ({"gate_proj", "up_proj"}, {"gate_up_proj"}, {"wi_0", "wi_1"}, {"w1", "w2", "w3"}, {"w12", "w3"})
_NORM = re.compile(r"Norm(Layer|1d|2d)?$")
_NO_NORM = re.compile(r"Batch|WeightNorm|Group|Instance|AdaLayer|ActNorm")
_ROTARY = re.compile(r"apply_\w*rotary\w*|rotate_every_two_apply")


def occurrences(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Counter[str]:
    """Calls in one forward pass of ``model``, by op."""
    found: Counter[str] = Counter()
    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            for op in _ops_of(module):
                handle = module.register_forward_hook(_counting(found, op))
                stack.callback(handle.remove)
        stack.enter_context(_rotary_counted(model, found))
        model(**inputs)
    return found


def _ops_of(module: nn.Module) -> Iterator[str]:
    name, children = type(module).__name__, {child for child, _ in module.named_children()}
    if _NORM.search(name) and not _NO_NORM.search(name):
        yield "norm"
    if any(gated <= children for gated in GATED):
        yield "mlp"


def _counting(found: Counter[str], op: str) -> Callable[..., None]:
    def count(*_: Any) -> None:
        found[op] += 1

    return count


@contextmanager
def _rotary_counted(model: nn.Module, found: Counter[str]) -> Iterator[None]:
    """Functions (and static methods of module classes) that apply rotary embeddings, counting what they give back."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            found["rope"] += len(result) if isinstance(result, tuple) else 1
            return result

        return run

    classes = {type(module) for module in model.modules()}
    sources = [sys.modules[name] for name in {each.__module__ for each in classes} if name in sys.modules]
    with ExitStack() as stack:
        for holder in (*sources, *classes):
            for name, value in list(vars(holder).items()):
                function = value.__func__ if isinstance(value, staticmethod) else value
                is_plain = isinstance(value, staticmethod) or not isinstance(holder, type)
                if _ROTARY.fullmatch(name) and callable(function) and is_plain:
                    counted: Any = wrapped(function)
                    stack.enter_context(
                        mock.patch.object(holder, name, staticmethod(counted) if isinstance(holder, type) else counted)
                    )
        yield
