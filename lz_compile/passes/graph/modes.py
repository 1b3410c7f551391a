"""The modes that calls run under, autocast and gradients, and how they are brought about again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import disable_fake_tensor_cache

from lz_compile.passes.graph.view import tensor_of


@dataclass(frozen=True)
class Ambient:
    """The modes under which a node runs: open autocast regions (their arguments) and the gradient mode set inside."""

    autocast: tuple[tuple[Any, ...], ...] = ()
    grad: bool | None = None
    other: tuple[str, ...] = ()

    @property
    def is_transformed(self) -> bool:
        """Whether this is inside of a transform of ``torch.func``: tensors are wrappers there."""
        return any("_increment_nesting" in name for name in self.other)


def ambient_behind(nodes: Iterable[fx.Node]) -> Ambient:
    """The modes that follow on the first nodes of a graph."""
    *_, last = (Ambient(), *ambient_of(nodes).values())
    return last


def changes_mode(node: fx.Node) -> bool:
    """Whether a call computes nothing: it begins or ends what :class:`Ambient` tells of."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    begins = ("_enter_", "_exit_", "_set_grad_enabled", "_sdpa_kernel")
    return name.startswith(begins) or name.endswith(("_increment_nesting", "_decrement_nesting"))


def ambient_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Ambient]:
    """The modes that each node leaves behind, of the first nodes of a graph."""
    ambient: dict[fx.Node, Ambient] = {}
    autocast: list[tuple[Any, ...]] = []
    other: list[str] = []
    grad: bool | None = None
    nodes = list(nodes)
    of_graph = nodes[0].graph.nodes if nodes else ()
    devices = {tensor.device.type for tensor in map(tensor_of, of_graph) if tensor is not None}
    for node in nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_enter_autocast":
            autocast.append(tuple(node.args))
        elif name == "_exit_autocast" and autocast:
            autocast.pop()
        elif name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name.startswith(("_enter_", "_sdpa_kernel")) or name.endswith("_increment_nesting"):
            other.append(node.name)
        elif (name.startswith("_exit_") or name.endswith("_decrement_nesting")) and other:
            other.pop()
        touching = tuple(
            region for region in autocast if region[0] in devices
        )  # that of another device does nothing here
        ambient[node] = Ambient(touching, grad, tuple(other))
    return ambient


def grad_enabled(ambient: Ambient) -> bool:
    """Whether gradients are recorded under ``ambient``."""
    return torch.is_grad_enabled() if ambient.grad is None else ambient.grad


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Like ``torch.set_grad_enabled``, which takes effect as soon as it is made."""
    with torch.set_grad_enabled(enabled):
        yield


def ambient_context(ambient: Ambient) -> list[Any]:
    """Context managers that bring about ``ambient`` (its autocast regions and gradient mode), outermost first."""
    managers: list[Any] = [
        torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        for device, dtype, enabled, cache_enabled in ambient.autocast
    ]
    if ambient.grad is not None:
        managers.append(_grad_mode(ambient.grad))
    return managers


# ---- example values --------------------------------------------------------------------------------------------------


@contextmanager
def faking(mode: Any, ambient: Ambient | None = None) -> Iterator[None]:
    """A fake mode, under the modes of ``ambient``, in which symbolic sizes stay symbols.

    Functions in C++ that ask for sizes would make numbers of them. Of a call with symbols PyTorch would keep what it gave,
    and make that once more to see whether it can, which costs more than the call; few of ours come twice.
    """
    with ExitStack() as stack:
        for manager in () if ambient is None else ambient_context(ambient):
            stack.enter_context(manager)
        if mode.shape_env is not None and mode.shape_env.var_to_range:
            stack.enter_context(disable_fake_tensor_cache(mode))
        with mode, enable_python_dispatcher():
            yield
