"""Weights of linear layers in few bits, by ``torchao``, with the error measured: ``lz.quantize_`` and ``lz.dequantize_``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import nn

from lz_compile.api.arguments import Arguments
from lz_compile.errors import IntegrationError
from lz_compile.ground.hardware import hardware
from lz_compile.ground.records import Record
from lz_compile.runtime.kernels import libraries
from lz_compile.runtime.kernels.libraries import LazyFunction


@dataclass(frozen=True)
class _Format:
    """A format of weights: its bits, and the first SM version of NVIDIA's GPUs that has it (None: everything has)."""

    bits: int
    least_sm: int | None = None
    is_grouped: bool = False


#: **Source** torchao 0.18; OCP Microscaling Formats 1.0; NVIDIA's Blackwell for products in mxfp4 and nvfp4.
FORMATS: Mapping[str, _Format] = {
    "int8": _Format(8),
    "int4": _Format(4, is_grouped=True),
    "float8_e4m3": _Format(8),
    "float8_e5m2": _Format(8),
    "mxfp4": _Format(4, least_sm=100, is_grouped=True),
    "nvfp4": _Format(4, least_sm=100, is_grouped=True),
}


@dataclass(frozen=True)
class QuantizedLayer(Record):
    """A linear layer: its name, the error of its weight over that weight's size (2-norms), and bytes before and after."""

    name: str
    error: float
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class QuantizedModel(Record):
    """What was quantised; prints itself as a table."""

    format: str
    layers: tuple[QuantizedLayer, ...]

    @property
    def before_bytes(self) -> int:
        """Of all weights, before."""
        return sum(each.before_bytes for each in self.layers)

    @property
    def after_bytes(self) -> int:
        """Of all weights with their scales, after."""
        return sum(each.after_bytes for each in self.layers)

    @property
    def worst_error(self) -> float:
        """The largest error of a layer."""
        return max((each.error for each in self.layers), default=0.0)

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        table = Table("layer", "error", "MiB before", "after", title=f"weights in {self.format}")
        for each in self.layers:
            sizes = (f"{size / 2**20:.2f}" for size in (each.before_bytes, each.after_bytes))
            table.add_row(each.name, f"{each.error:.2e}", *sizes)
        yield table


def quantize_(
    model: nn.Module,
    format: str = "int8",
    *,
    group_size: int | None = None,
    only: Callable[[nn.Module, str], bool] | None = None,
) -> QuantizedModel:
    """Put the weights of a model's linear layers into few bits, in place.

    Compiled with ``backend="layerzero"`` their products are recognised, and a few rows are multiplied by kernels that read
    the stored weight. Activations stay what they are.

    Args:
        model: of which every ``nn.Linear`` gets other weights.
        format: ``int8`` (a scale for each row), ``int4`` (for each group; torchao keeps a number in a byte), ``float8_e4m3``
            or ``float8_e5m2``.
        group_size: of ``int4``, by default 128; layers whose columns it does not divide are left alone.
        only: which layers, by module and name.

    Raises:
        ArgumentError: there is no such format, or this device does not have it.
        IntegrationError: torchao is missing.

    **Source** torchao, ``quantize_``.
    """
    given = Arguments("quantize_")
    if not isinstance(model, nn.Module):
        raise given.wrong("model", "as an nn.Module", type(model).__name__)
    given.one_of("format", format, list(FORMATS))
    known = FORMATS[format]
    given.number("group_size", group_size, 2, whole=True, optional=True)
    if group_size is not None and not known.is_grouped:
        raise given.wrong("group_size", "for formats with groups (int4)", f"{format}", "Leave it out")
    _check_device(given, model, format, known)
    width = (group_size or 128) if known.is_grouped else 1
    wanted = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer.in_features % width == 0 and (only is None or only(layer, name))
    }
    before = {name: layer.weight.detach() for name, layer in wanted.items()}
    chosen = {id(layer) for layer in wanted.values()}
    quantize = _torchao()
    quantize.quantize_(model, _config(quantize, format, width), filter_fn=lambda layer, _: id(layer) in chosen)
    return QuantizedModel(format, tuple(_measured(name, before[name], wanted[name]) for name in wanted))


def dequantize_(model: nn.Module) -> int:
    """Give linear layers plain weights again, those that :func:`quantize_` made of theirs; how many there were.

    Raises:
        ArgumentError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise Arguments("dequantize_").wrong("model", "as an nn.Module", type(model).__name__)
    count = 0
    for layer in model.modules():
        weight = getattr(layer, "weight", None) if isinstance(layer, nn.Linear) else None
        if weight is not None and type(weight.data) is not torch.Tensor and hasattr(weight, "dequantize"):
            layer.weight = nn.Parameter(weight.dequantize().detach().clone(), requires_grad=False)
            count += 1
    return count


def _check_device(given: Arguments, model: nn.Module, format: str, known: _Format) -> None:
    if known.least_sm is None:
        return
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    found = hardware(device)
    if found.platform != "cuda" or (found.sm_version or 0) < known.least_sm:
        needed = f"an NVIDIA GPU of sm_{known.least_sm} or newer"
        expected = f"as one that this device has: products in {format} need {needed}"
        raise given.wrong("format", expected, f"{format} on {found.platform}", "Take int8 or int4")
    expected = f"as one of {', '.join(name for name, each in FORMATS.items() if each.least_sm is None)}"
    raise given.wrong("format", expected, format, "Its products were never run here: take torchao's own calls")


def _torchao() -> Any:
    trial = libraries.try_first(LazyFunction("torchao.quantization", "quantize_", "torchao"), "torchao")
    if trial is not None and not trial.is_harmless:
        raise IntegrationError("torchao", "that can be imported", f"one whose import {trial.outcome} ({trial.text})")
    try:
        quantization: Any = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise IntegrationError("torchao", ">=0.17", f"{error}") from error
    return quantization


def _config(quantization: Any, format: str, group_size: int) -> Any:
    if format == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    if format == "int4":
        kind: Any = vars(torch)["int4"]
        return quantization.IntxWeightOnlyConfig(kind, quantization.granularity.PerGroup(group_size))
    kind = torch.float8_e4m3fn if format == "float8_e4m3" else torch.float8_e5m2
    return quantization.Float8WeightOnlyConfig(weight_dtype=kind, set_inductor_config=False)


def _measured(name: str, before: torch.Tensor, layer: nn.Linear) -> QuantizedLayer:
    weight: Any = layer.weight
    exact, after = before.double(), weight.dequantize().detach().double()
    error = float((after - exact).norm() / exact.norm().clamp(min=1e-30))
    inside = [getattr(weight, each) for each in weight.__tensor_flatten__()[0]]
    return QuantizedLayer(name, error, before.nbytes, sum(each.nbytes for each in inside))
