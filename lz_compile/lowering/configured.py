"""Inductor's configuration in the compile that goes on. Checked with torch 2.13."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def config_of(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a mode or options, checked by Inductor itself.

    Raises:
        RuntimeError: an unknown mode or option, as torch words it.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options or None, None)
    return wrapper.config


#: The configuration of the compile that goes on in this thread, beyond Inductor's defaults.
_configuration: ContextVar[Mapping[str, Any]] = ContextVar(
    "lz_compile_inductor_configuration", default=MappingProxyType({})
)


def has_option(name: str) -> bool:
    """Whether Inductor has an option of a name."""
    return hasattr(inductor_config, name)


@contextmanager
def compiling_with(config: Mapping[str, Any]) -> Iterator[None]:
    """What is measured inside is compiled as the graph itself will be."""
    token = _configuration.set(config)
    try:
        yield
    finally:
        _configuration.reset(token)


def configuration() -> dict[str, Any]:
    """The configuration of the compile that goes on, beyond Inductor's defaults."""
    return dict(_configuration.get())


def draws_as_eager() -> bool:
    """Whether the compile that goes on is to draw the random numbers that it would draw uncompiled."""
    return bool(_configuration.get().get("fallback_random", inductor_config.fallback_random))


def configuration_digest() -> str:
    """A hash of the configuration of the compile that goes on; empty under Inductor's defaults."""
    lines = [f"{name}={value!r}" for name, value in sorted(_configuration.get().items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def settings_digest() -> str:
    """A hash of all of Inductor's settings in the compile that goes on, its defaults included.

    Raises:
        Exception: whatever a setting of the user's raises that can be neither copied nor printed.
    """
    with inductor_config.patch(configuration()):
        settings = inductor_config.save_config_portable()  # passes of the user's are none of them
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def why_no_regions() -> str:
    """Why no graph should be called by another in the compile that goes on (read in 2.13); empty if it may be."""
    config = {
        name: _configuration.get().get(name, getattr(inductor_config, name)) for name in ("cpp_wrapper", "freezing")
    }
    if config["cpp_wrapper"]:
        return "Inductor's C++ wrapper calls no graph"
    return "Inductor packs weights only where it sees which ones they are (freezing)" if config["freezing"] else ""


def captures_cuda_graphs(device: str) -> bool:
    """Whether the compile that goes on puts what runs on ``device`` into CUDA graphs."""
    return device == "cuda" and bool(_configuration.get().get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def let_subclasses_in(compiled: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """What was compiled for ``inputs``, so that it may be called with tensors of a class of their own.

    PyTorch (2.13) watches the first call for operators whose results share memory with operands, and every operator that is
    called on such a tensor raises there: Inductor's own products, and the kernels that we call.
    """
    name = "check_custom_op_aliasing"
    if not hasattr(functorch_config, name) or not any(map(_is_plain_subclass, inputs)):
        return compiled

    def unwatched(*args: Any) -> Any:
        with functorch_config.patch({name: False}):
            return compiled(*args)

    return unwatched


def _is_plain_subclass(value: object) -> bool:
    """Whether it is a tensor of the user's class that holds no others, as most do that only carry something along."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return isinstance(value, torch.Tensor) and type(value) not in kinds and not is_traceable_wrapper_subclass(value)
