"""Libraries that normalise rows, as modules with recorded signatures that compute on the CPU (see ``library_fakes.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.library_fakes import Library, with_signature


def normalised(given: Tensor, eps: float, *, is_centred: bool = False) -> Tensor:
    """Rows in float32."""
    row = given.float()
    row = row - row.mean(-1, keepdim=True) if is_centred else row
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)


def _nested(*names: str) -> dict[str, ModuleType]:
    """Modules, each an attribute of the one before."""
    modules = [ModuleType(name) for name in names]
    for outer, inner in pairwise(modules):
        setattr(outer, inner.__name__.rpartition(".")[2], inner)
    return dict(zip(names, modules, strict=True))


class Liger(Library):
    """``liger_kernel.ops``: functions of autograd, which refuse rows of more than 65536."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        names = ("rms_norm", "layer_norm")
        package = _nested("liger_kernel", "liger_kernel.ops")
        bodies = (("LigerRMSNormFunction", self._rms), ("LigerLayerNormFunction", self._layer))
        for name, (function, body) in zip(names, bodies, strict=True):
            module = package[f"liger_kernel.ops.{name}"] = ModuleType(f"liger_kernel.ops.{name}")
            setattr(module, function, _function(module.__name__, f"{function}.forward", body))
        return package

    def _rms(self, given: Mapping[str, Any]) -> Tensor:
        x, weight = given["X"], given["W"]
        self.ran("rms_norm", x)
        assert x.shape[-1] <= 65536
        assert given["casting_mode"] == "gemma", "every other mode rounds the row before the weight"
        assert given["in_place"] is False, "the gradient is somebody else's"
        row = normalised(x, given["eps"])
        return (row if weight is None else row * (weight.float() + given["offset"])).to(x.dtype)

    def _layer(self, given: Mapping[str, Any]) -> Tensor:
        x, weight, bias = given["X"], given["W"], given["B"]
        self.ran("layer_norm", x)
        assert weight.shape == bias.shape == x.shape[-1:]
        return (normalised(x, given["eps"], is_centred=True) * weight.float() + bias.float()).to(x.dtype)


def _function(module: str, name: str, body: Callable[[Mapping[str, Any]], Tensor]) -> type:
    """A class with ``apply``, called without the context that ``forward`` has."""
    call = with_signature(module, name, body)
    return type(name, (), {"apply": staticmethod(lambda *args: call(None, *args))})


class FlashInferNorm(Library):
    """``flashinfer.norm``: writes into ``out``; input and weight have one dtype."""

    def modules(self) -> dict[str, ModuleType]:
        found = _nested("flashinfer", "flashinfer.norm")
        for name, offset in (("rmsnorm", 0.0), ("gemma_rmsnorm", 1.0)):
            body = lambda given, name=name, offset=offset: self._run(name, given, offset)  # noqa: E731 one per name
            setattr(found["flashinfer.norm"], name, with_signature("flashinfer.norm", name, body))
        return found

    def _run(self, name: str, given: Mapping[str, Any], offset: float) -> Tensor:
        x, weight, out = given["input"], given["weight"], given["out"]
        self.ran(name, x, weight, out)
        assert x.dtype == weight.dtype == out.dtype
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.dim() == 2
        return out.copy_(normalised(x, given["eps"]) * (weight.float() + offset))


class Quack(Library):
    """``quack``: any of three dtypes for everything."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        module = ModuleType("quack")
        module.rmsnorm = with_signature("quack", "rmsnorm", self._run)
        return {"quack": module}

    def _run(self, given: Mapping[str, Any]) -> Tensor:
        x, weight, bias = given["x"], given["weight"], given["bias"]
        self.ran("rmsnorm", x)
        for each in (x, weight, bias):
            assert each is None or each.dtype in (torch.float32, torch.float16, torch.bfloat16)
        assert weight is not None or (bias is None and not given["weight_offset"])
        assert (given["residual"], given["prenorm"]) == (None, False)
        row = normalised(x, given["eps"])
        row = row if weight is None else row * (weight.float() + given["weight_offset"])
        return (row if bias is None else row + bias.float()).to(given["out_dtype"] or x.dtype)


class Apex(Library):
    """``apex.normalization.fused_layer_norm``: one dtype for all, in which the row is rounded before the weight."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        found = _nested("apex", "apex.normalization", "apex.normalization.fused_layer_norm")
        module = found["apex.normalization.fused_layer_norm"]
        for name in ("fused_rms_norm", "fused_rms_norm_affine", "fused_layer_norm", "fused_layer_norm_affine"):
            body = lambda given, name=name: self._run(name, given)  # noqa: E731 one per name
            setattr(module, name, with_signature(module.__name__, name, body))
        return {**found, "fused_layer_norm_cuda": ModuleType("fused_layer_norm_cuda")}

    def _run(self, name: str, given: Mapping[str, Any]) -> Tensor:
        x, weight, bias = given["input"], given.get("weight"), given.get("bias")
        self.ran(name, x)
        assert given["normalized_shape"] == (x.shape[-1],)
        assert not given["memory_efficient"]
        assert all(each is None or each.dtype == x.dtype for each in (weight, bias))
        row = normalised(x, given["eps"], is_centred="layer" in name).to(x.dtype)
        row = row if weight is None else row * weight
        return row if bias is None else row + bias
