"""What a compiled graph follows from, as text: the graph and its inputs, settings, versions and the machine.

What is not known to be told in full makes the graph one that is compiled in every process.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lz_compile.compile.options import Options
from lz_compile.ground import health, store
from lz_compile.ground.machine import code_runs_on, environment
from lz_compile.lowering import dynamo
from lz_compile.passes.graph.places import read_by_place
from lz_compile.passes.graph.refusal import source_of
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.tables import loaded as loaded_tables


class CompiledAnewError(Exception):
    """Why a graph is compiled in every process."""


#: What is written as it is; of its type exactly, since a subclass may be told as something else.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
#: Whose functions PyTorch's version and ours stand for.
_ROOTS = frozenset({"torch", "_operator", "math", "builtins", "lz_compile"})
_NAMESPACES = frozenset({"aten", "prims", "prim", "layerzero"})
#: What is noted of a call that changes how it is compiled.
_MARKS = ("autograd_backward", "phase", "custom", "recompute", "ac_graph_id", "is_wrapped", "user_cache_hash")


def key_of(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Options,
    rest: Mapping[str, Any],
    policy: Policy,
) -> str:
    """A hash of all that the code of a graph follows from.

    Raises:
        CompiledAnewError: why there is none.
    """
    lines = [*_settings(mode, options, rest, policy), *_state(), *_inputs(module, inputs), *_calls(module.graph)]
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()


def _refuse(is_so: object, why: str) -> None:
    if is_so:
        raise CompiledAnewError(why)


def _settings(mode: str | None, options: Options, rest: Mapping[str, Any], policy: Policy) -> Iterator[str]:
    _refuse(options.dump is not None or options.verify != "off", "its graph is asked for (dump, verify)")
    _refuse(policy.settings.deterministic == "batch_invariant", "its report follows from how often it was compiled")
    _refuse(_has_ranks(), "ranks agree on its kernels")
    _refuse(not dynamo.is_cached(), "PyTorch is to keep nothing, or to keep it otherwise")
    _refuse(registry.has_foreign(), "kernels were registered by the program")
    _refuse(health.retirements(), "a kernel is retired")
    _refuse(dynamo.has_custom_passes(), "passes of the program's change it")
    table = None if options.dispatch_table is None else Path(options.dispatch_table).expanduser()
    _refuse(table is not None and not table.is_file(), "its dispatch table cannot be read")
    yield f"{store.version()} {platform.python_version()} {sys.implementation.cache_tag} {code_runs_on()}"
    yield f"{environment('cpu')} {registry.digest()} {options.policy(policy).digest}"
    yield f"{mode} {replace(options, lock={}, dispatch_table=None)!r} {_told(dict(rest))}"
    yield "" if table is None else hashlib.sha256(table.read_bytes()).hexdigest()
    yield json.dumps([each.table.to_dict() for each in loaded_tables.active()], sort_keys=True)
    yield from dynamo.settings()


def _has_ranks() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    # It imports Inductor. What was not imported has joined nobody.
    agree = sys.modules.get("lz_compile.runtime.ranks.agree")
    return agree is not None and agree.is_joined()


def _einsum() -> tuple[Any, ...]:
    """In which order ``torch.einsum`` multiplies more than two tensors."""
    chosen: Any = torch.backends.opt_einsum
    return chosen.is_available() and chosen.enabled, chosen.strategy


def _state() -> Iterator[str]:
    """What a program has switched for the whole process or thread."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    _refuse(modes or torch._C._functorch.peek_interpreter_stack() is not None, "modes or transforms are active")
    casts = [
        (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
        for name in torch._C._autocast_supported_devices()
    ]
    yield repr([casts, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()])
    deterministic: Any = torch.utils.deterministic
    yield repr([
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory, torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(),
    ])  # fmt: skip
    backends = torch.backends
    flags = [
        backends.mkldnn.is_available() and backends.mkldnn.enabled, backends.mkldnn.deterministic,
        backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(),
        *_einsum(),
    ]  # fmt: skip
    precisions = [
        getattr(getattr(backends.mkldnn, kind, None), "fp32_precision", "") for kind in ("matmul", "conv", "rnn")
    ]
    yield repr([flags, precisions, getattr(backends, "fp32_precision", "")])


def _inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    places: dict[int, int] = {}
    nodes = module.graph.find_nodes(op="placeholder")
    _refuse(read_by_place(module.graph), "an input is read by places of its memory, which is guarded as it is compiled")
    _refuse(len(nodes) != len(inputs), "its inputs are not those of its graph")
    for node, value in zip(nodes, inputs, strict=True):
        _refuse(_is_symbolic(value), "a size is symbolic")
        _refuse(type(value) not in (torch.Tensor, torch.nn.Parameter), "an input is no plain tensor")
        _refuse(value.device.type != "cpu" or value.layout != torch.strided, "an input is on another device than a CPU")
        _refuse(torch.is_grad_enabled() and value.requires_grad, "a backward pass follows")
        noted = node.meta.get("example_value")
        _refuse(not isinstance(noted, torch.Tensor), "an input is no plain tensor")
        memory = places.setdefault(value.untyped_storage()._cdata, len(places))
        tags = node.meta.get("tensor_dict") or {}  # what a program has written to a parameter
        yield repr([
            node.name, source_of(node), type(value).__name__, type(noted).__name__, *_facts(value), *_facts(noted),
            memory, value._base is not None,
            sorted((name, repr(tag) if type(tag) in _PLAIN else "") for name, tag in tags.items()),
        ])  # fmt: skip


def _is_symbolic(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return any(not isinstance(size, int) for size in sizes)


def _facts(value: Any) -> tuple[Any, ...]:
    lies = (tuple(value.shape), value.stride(), value.storage_offset())
    return (value.dtype, *lies, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())


def _calls(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        _refuse(any(node.meta.get(mark) for mark in _MARKS), "marks say how a call is to be compiled")
        _refuse(any(map(_is_symbolic, tree_leaves(node.meta.get("example_value")))), "a size is symbolic")
        if node.op == "placeholder":
            continue
        _refuse(node.op in ("get_attr", "call_module"), "it holds a tensor or a graph")
        target = _function(node.target) if node.op == "call_function" else str(node.target)
        around = list((node.meta.get("nn_module_stack") or {}).values())
        yield f"{node.name} {node.op} {target} {_told(node.args)} {_told(node.kwargs)}"
        yield f"{node.meta.get('stack_trace')} {[str(each) for each in around]}"


def _function(target: Any) -> str:
    """The name of a function that this name finds."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        _refuse(name.partition(".")[0] not in _NAMESPACES, f"it calls {name}, of the program's own")
        return name
    _refuse(isinstance(target, torch._ops.HigherOrderOperator), "it calls another graph")
    name = fx.node._get_qualified_name(target)
    root, *rest = name.split(".") if "." in name else ("builtins", name)
    found: Any = sys.modules.get(root)
    for part in rest:
        found = getattr(found, part, None)
    _refuse(root not in _ROOTS or found is not target, f"it calls {name}, which may be another one elsewhere")
    return name


def _told(value: Any) -> str:
    """An argument, told so that no other one is told alike."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"{'(' if isinstance(value, tuple) else '['}{','.join(map(_told, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_told(name)}:{_told(each)}" for name, each in value.items()) + "}"
    if kind in (slice, range):
        return f"{kind.__name__}({_told(value.start)},{_told(value.stop)},{_told(value.step)})"
    raise CompiledAnewError(f"an argument is a {kind.__name__}")
