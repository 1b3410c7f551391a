"""Inductor's configuration in the compile that goes on. Checked with torch 2.13."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch._inductor import config as inductor_config


def config_of(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a mode or options, checked by Inductor itself.

    Raises:
        RuntimeError: an unknown mode or option, as torch words it.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options or None, None)
    return wrapper.config


#: The configuration of the compile that goes on in this thread, beyond Inductor's defaults.
_configuration: ContextVar[Mapping[str, Any]] = ContextVar(
    "lz_compile_inductor_configuration",
    default=MappingProxyType({}),
)


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
