"""Kernel libraries that are not installed: modules with their recorded signatures that compute on the CPU what they would.

``data/library_signatures.json`` holds the parameters of every function that an adapter calls, as its library's source has
them, with distribution, version and file.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

RECORDS: list[dict[str, str]] = json.loads((Path(__file__).parent / "data" / "library_signatures.json").read_text())


def parameters_in(source: str, name: str) -> str:
    """The parameters of a function (or method, with its class's name) in Python source, without annotations."""
    owner, _, function = name.rpartition(".")
    body = ast.parse(source).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    arguments = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function][-1].args
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)


def with_signature(module: str, name: str, body: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """A function with a recorded signature that passes its arguments on by name."""
    record = next(each for each in RECORDS if (each["module"], each["name"]) == (module, name))
    scope: dict[str, Any] = {"body": body}
    exec(f"def function({record['parameters']}):\n    return body(dict(locals()))", scope)
    return scope["function"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    softcap: float | None,
    window: tuple[int, int] = (-1, -1),
    *,
    starts_at_first: bool = False,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention over ``[B, S, H, D]`` in float64; the last query meets the last key, or the first one the first."""
    q, k, v = (x.transpose(1, 2).double() for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    offset = 0 if starts_at_first else k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - offset
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * distance.abs()
    left, right = window
    keep = (distance >= (-left if left >= 0 else -torch.inf)) & (distance <= (right if right >= 0 else torch.inf))
    scores = scores.masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).to(query.dtype)


class Library:
    """A module that stands for a library; ``calls`` counts what ran in it, ``fails`` makes the next call raise.

    ``copies``: the library itself copies operands whose last dimension has gaps.
    """

    copies = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    def modules(self) -> dict[str, ModuleType]:
        """What ``import`` is to find."""
        raise NotImplementedError

    def ran(self, name: str, *tensors: Tensor) -> None:
        """Note a call, or fail as a library does."""
        self.calls.append(name)
        assert self.copies or all(tensor.stride(-1) == 1 for tensor in tensors), f"{name} takes no gaps in the last dim"
        if self.fails:
            raise RuntimeError(f"{name}: no kernel image is available")


class FlashAttention(Library):
    """``flash_attn``: windows are aligned at the last query and key, the result has the query's strides."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        module = ModuleType("flash_attn")
        module.flash_attn_func = with_signature("flash_attn", "flash_attn_func", self._run)
        return {"flash_attn": module}

    def _run(self, given: Mapping[str, Any]) -> Tensor:
        q, k, v = given["q"], given["k"], given["v"]
        self.ran("flash_attn_func", q, k, v)
        assert v.shape == k.shape
        assert given["dropout_p"] == 0
        slopes = given["alibi_slopes"]
        if slopes is not None:
            assert slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32"
            assert slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension"
            assert slopes.shape in ((q.shape[2],), (q.shape[0], q.shape[2]))
        window = window_of(given)
        out = attend(q, k, v, given["softmax_scale"], given["softcap"], window, alibi_slopes=slopes)
        return torch.empty_like(q).copy_(out)


def window_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """The window that FlashAttention takes: causality is one without keys to the right."""
    left, right = given["window_size"]
    return (left, 0) if given["causal"] else (left, right)


class FlashAttention3(Library):
    """``flash_attn_interface``: like FlashAttention 2; some versions give the logsumexp as well."""

    copies = True

    def __init__(self, gives_lse: bool = False) -> None:
        super().__init__()
        self.gives_lse = gives_lse

    def modules(self) -> dict[str, ModuleType]:
        module = ModuleType("flash_attn_interface")
        module.flash_attn_func = with_signature("flash_attn_interface", "flash_attn_func", self._run)
        return {"flash_attn_interface": module}

    def _run(self, given: Mapping[str, Any]) -> Any:
        q, k, v = given["q"], given["k"], given["v"]
        self.ran("flash_attn_func", q, k, v)
        out = attend(q, k, v, given["softmax_scale"], given["softcap"], window_of(given))
        return (out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])) if self.gives_lse else out


class FlashInfer(Library):
    """``flashinfer``: one sequence ``[S, H, D]``, or a batch of them end to end that was planned before."""

    def modules(self) -> dict[str, ModuleType]:
        library, name = self, "BatchPrefillWithRaggedKVCacheWrapper"

        class Wrapper:
            __init__ = with_signature("flashinfer", f"{name}.__init__", library._init)
            plan = with_signature("flashinfer", f"{name}.plan", library._plan)
            run = with_signature("flashinfer", f"{name}.run", library._run)

        module = ModuleType("flashinfer")
        module.single_prefill_with_kv_cache = with_signature("flashinfer", "single_prefill_with_kv_cache", self._single)
        module.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
        return {"flashinfer": module}

    def _single(self, given: Mapping[str, Any]) -> Tensor:
        q, k, v = given["q"], given["k"], given["v"]
        self.ran("single_prefill_with_kv_cache", q, k, v)
        assert given["kv_layout"] == "NHD"
        return self._attend(q[None], k[None], v[None], given)[0]

    def _init(self, given: Mapping[str, Any]) -> None:
        assert given["kv_layout"] == "NHD"
        assert given["float_workspace_buffer"].dtype == torch.uint8

    def _plan(self, given: Mapping[str, Any]) -> None:
        self.calls.append("plan")
        assert given["qo_indptr"].dtype == torch.int32
        given["self"].planned = given

    def _run(self, given: Mapping[str, Any]) -> Tensor:
        planned = given["self"].planned
        q, k, v = given["q"], given["k"], given["v"]
        self.ran("run", q, k, v)
        heads, kv_heads, head_dim = (planned[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk"))
        assert q.shape[1:] == (heads, head_dim)
        assert k.shape[1:] == (kv_heads, head_dim)
        assert q.dtype == planned["q_data_type"]
        assert v.shape[-1] == planned["head_dim_vo"]
        rows, keys = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
        parts = [
            self._attend(q[None, start:stop], k[None, first:last], v[None, first:last], planned)[0]
            for start, stop, first, last in zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True)
        ]
        return torch.cat(parts)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> Tensor:
        window = (given["window_left"], 0 if given["causal"] else -1)
        return attend(q, k, v, given["sm_scale"], given["logits_soft_cap"], window)


class XFormers(Library):
    """``xformers.ops``: equal heads in four dimensions, groups of heads in a fifth, no broadcasting."""

    has_kernels = True

    def modules(self) -> dict[str, ModuleType]:
        names = ("xformers", "xformers._cpp_lib", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
        package, build, module, fmha, biases = modules = [ModuleType(name) for name in names]
        build._built_with_cuda = self.has_kernels
        package.ops, module.fmha, fmha.attn_bias = module, fmha, biases
        init = with_signature("xformers.ops", "LowerTriangularMask.__init__", lambda given: None)
        self.first = module.LowerTriangularMask = type("LowerTriangularMask", (), {"__init__": init})
        self.last = biases.LowerTriangularFromBottomRightMask = type("LowerTriangularFromBottomRightMask", (), {})
        name = "memory_efficient_attention_forward"
        module.memory_efficient_attention_forward = with_signature("xformers.ops", name, self._run)
        return dict(zip(names, modules, strict=True))

    def _run(self, given: Mapping[str, Any]) -> Tensor:
        q, k, v = given["query"], given["key"], given["value"]
        self.ran("memory_efficient_attention_forward", q, k, v)
        assert (q.shape[0], q.shape[2:]) == (k.shape[0], k.shape[2:]), "xformers does not broadcast"
        assert given["p"] == 0
        bias = given["attn_bias"]
        assert bias is None or type(bias) in (self.first, self.last)
        flat = [x.flatten(2, 3) if x.dim() == 5 else x for x in (q, k, v)]
        window = (-1, -1) if bias is None else (-1, 0)
        out = attend(*flat, given["scale"], None, window, starts_at_first=isinstance(bias, self.first))
        return out.reshape(*q.shape[:-1], v.shape[-1])


@contextmanager
def installed(library: Library) -> Iterator[Library]:
    """The library can be imported, and no other of its name; what else is imported meanwhile stays."""
    modules = library.modules()
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield library
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
