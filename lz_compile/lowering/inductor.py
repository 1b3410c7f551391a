"""Private names of Dynamo and Inductor; the rest is in ``dynamo.py`` and ``finished_code.py``. Checked with torch 2.13."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.ir import FallbackKernel
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from lz_compile.ground import events
from lz_compile.ground.fingerprint import source_hash
from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.lowering.configured import configuration, let_subclasses_in
from lz_compile.lowering.cpp_builds import element_by_element, kernels_joined, know_instructions
from lz_compile.lowering.dropping import keep_seeds, mark_masks, mix_masks
from lz_compile.lowering.frames import RESTARTS, allow_counters, apart, hinted
from lz_compile.lowering.overwritten_inputs import (
    copy_what_is_overwritten,
    hand_over_copies,
    keep_results_apart,
    keep_what_was,
)
from lz_compile.lowering.regions import has_regions, untangle, writing_to_no_operand
from lz_compile.lowering.spelled_for_inductor import choose_by_masks, spell_out_factors
from lz_compile.lowering.wide_products import widen_products


class _Fingerprint(CustomGraphPass):
    """Puts our source and our decisions into Inductor's cache keys, and a change of ours behind a pass of the user's."""

    def __init__(self, key: str, inner: Any, change: Callable[[fx.Graph], None] | None = None) -> None:
        self._key = key
        self._change = () if change is None else (change,)
        self._inner = tuple(inner) if isinstance(inner, (list, tuple)) else (inner,) * (inner is not None)

    def __call__(self, graph: fx.Graph) -> None:
        for each in (*self._inner, *self._change):
            each(graph)

    def uuid(self) -> Any:
        own = [getattr(each, "uuid", None) for each in self._inner]
        inner = [each() if callable(each) else None for each in own]
        return None if None in inner else (self._key, *inner)  # a pass without uuid bypasses the cache, as ever


#: Results of 16 bits are rounded also where what reads them is computed along, and nothing is rounded otherwise for speed.
_ROUNDED_ALIKE = {
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    config: dict[str, Any],
    cache_key: str,
    *,
    rounds_alike: bool = False,
    hastens: bool = True,
) -> Callable[..., Any]:
    """Hand a graph to Inductor; ``cache_key`` becomes part of its cache keys.

    ``rounds_alike``: on CPUs an element has the same bits anywhere; ``hastens``: what these are slow at is done otherwise.
    """
    know_instructions(inputs)
    mend = partial(_mend, hastens=hastens)
    patches = {**config, **_around("post_grad_custom_pre_pass", mend, config, f"{cache_key}{rounds_alike}{hastens}")}
    patches |= _ROUNDED_ALIKE if rounds_alike else {}
    patches |= _around("joint_custom_pre_pass", copy_what_is_overwritten, config, cache_key)
    patches |= _around("joint_custom_post_pass", _keep, config, cache_key)
    folded = ExitStack()
    if has_regions(module):
        patches |= _around("post_grad_custom_post_pass", untangle, config, cache_key)
        # A region's backward pass (2.13) writes to operands whose numbers are those of what the whole graph may write to.
        folded.enter_context(functorch_config.patch(donated_buffer=False))
        folded.enter_context(writing_to_no_operand(module))
    if _has_scans(module):
        allow_counters()
        # Inductor (2.13) writes over what a loop's body carries while it is still read: gradients of an sLSTM came out wrong.
        patches["inplace_buffers"] = False
    known = _bases(module, inputs)  # as long as it lives
    rounded = element_by_element() if rounds_alike else nullcontext()
    with folded, _without_recomputation(module), rounded, kernels_joined():
        compiled = cast("Callable[..., Any]", compile_fx(module, inputs, _compile_inner, config_patches=patches))
    del known
    return let_subclasses_in(compiled, inputs)


#: Changes of a graph that Inductor compiles next, in place: a forward, a backward, or what has none.
before_lowering: list[Callable[[fx.GraphModule], None]] = []


def _unwatched(compiled: Any) -> Any:
    """Let the first call be as the others.

    PyTorch (2.13) watches it operator by operator, in Python, for custom ones whose results share memory with operands.
    Of a loop that is every step: ten times what 4,096 of them take otherwise.
    """
    call = getattr(compiled, "current_callable", None)
    if call is None:
        return compiled

    def first(inputs: Sequence[Any]) -> Any:
        compiled.current_callable = call
        is_watched = type(_get_current_dispatch_mode()).__name__ == "_AnalyzeCustomOpInputOutputMode"
        with _pop_mode_temporarily() if is_watched else nullcontext():
            return call(inputs)

    compiled.current_callable = first
    return compiled


def _has_foreign_operators(module: fx.GraphModule) -> bool:
    """Whether a graph, or one within it, calls an operator that is neither PyTorch's nor ours."""
    targets = (node.target for graph in _graphs(module) for node in graph.nodes)
    operators = (each for each in targets if isinstance(each, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)))
    return any(str(each).split(".")[0] not in ("aten", "prims", "prim", "layerzero") for each in operators)


def _compile_inner(module: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
    """Compile a forward or a backward; with loops, on a CPU, C++ calls the kernels: some 10 µs a step instead of 30."""
    kept = [] if given.get("is_inference") or given.get("is_backward") else _keep_strides(module)
    if not given.get("cpp_wrapper") and not inductor_config.cpp_wrapper:
        for change in before_lowering:
            change(module)
    try:
        with kernels_joined(), _reading_in_time():
            return _compile_loops(module, inputs, **given)
    finally:
        _tell_strides(kept)


_set_name = FallbackKernel.set_python_kernel_name


def _name_directly(kernel: FallbackKernel, name: str | None) -> None:
    """Let generated Python call operators of ours without PyTorch's dispatcher (see ``opaque``)."""
    _set_name(kernel, name)
    is_python = not (V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False))
    if name is None and is_python and hasattr(kernel.op_overload, "directly"):
        kernel.python_kernel_name = f"{kernel.python_kernel_name}.directly"


FallbackKernel.set_python_kernel_name = _name_directly  # type: ignore[method-assign, assignment]

_is_fusable = getattr(Scheduler, "fusable_weak_dep", None)
_is_reading_in_time = ContextVar("_is_reading_in_time", default=False)


@contextmanager
def _reading_in_time() -> Iterator[None]:
    """What is compiled inside reads no input where the same kernel has overwritten it."""
    if _is_fusable is not None:  # elsewhere it does what it did
        Scheduler.fusable_weak_dep = _reads_in_time  # type: ignore[method-assign, assignment]
    token = _is_reading_in_time.set(True)
    try:
        yield
    finally:
        _is_reading_in_time.reset(token)


def _reads_in_time(
    scheduler: Scheduler, dependence: WeakDep, before: BaseSchedulerNode, write: BaseSchedulerNode
) -> bool:
    """Whether a kernel may read memory and overwrite it: each place itself only.

    PyTorch (2.13) does not look at reads behind an earlier write in place: ``x[:, places] = 1; x.copy_(x.roll(1))``.
    """
    assert _is_fusable is not None, "it takes its place"
    if not (fusable := _is_fusable(scheduler, dependence, before, write)) or not _is_reading_in_time.get():
        return bool(fusable)
    memory = scheduler.mutation_real_name[dependence.mutating_buf]
    versions = {name for name, of in scheduler.mutation_real_name.items() if of == memory} - {dependence.mutating_buf}
    (place,) = [cast("MemoryDep", each) for each in write.read_writes.writes if each.name == dependence.mutating_buf]
    reads = [each for each in before.read_writes.reads if each.name in versions]
    return all(isinstance(each, MemoryDep) and (each.index, each.size) == (place.index, place.size) for each in reads)


def _compile_loops(module: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
    is_wrapped = torch.__version__ < "2.12" or bool(given.get("cpp_wrapper"))  # 2.11 hands a loop too few inputs there
    if is_wrapped or not _is_looping(module) or _has_quotes(module):
        return compile_fx_inner(module, inputs, **given)
    kept = module
    try:
        kept = copy.deepcopy(module, {id(each): each for each in _held(module)})  # passes change it
        is_watched = _has_foreign_operators(module)
        with inductor_config.patch(cpp_wrapper=True):
            compiled = compile_fx_inner(module, inputs, **{**given, "cpp_wrapper": True})
        return compiled if is_watched else _unwatched(compiled)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 whatever it is, it is no fault of the graph's
        events.record("LOOP_WRAPPER_FAILED", "a graph with loops calls its kernels from Python", error)
        return compile_fx_inner(kept, inputs, **given)


def kernels_code(module: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any]) -> str:
    """Python that calls the kernels of a graph of ATen operations, as Inductor writes it; nothing of it is built."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering

    (mode,) = {each.fake_mode for each in inputs if isinstance(each, FakeTensor)}
    own = copy.deepcopy(module)
    graph = GraphLowering(own, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
    setting = inductor_config.patch(config)
    with DebugContext(), V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), setting:
        graph.run(*inputs)
        code: str = graph.codegen()[0].value
    return code[code.index("from ctypes") :]  # which number a graph has is no part of what it computes


def _has_quotes(module: fx.GraphModule) -> bool:
    """Whether a call is given a text that Inductor's C++ (2.13) would end in the middle of, as our operators are."""
    return any(isinstance(each, str) and '"' in each for node in module.graph.nodes for each in node.args)


def _keep_strides(module: fx.GraphModule) -> list[torch.Tensor | None]:
    """Let a forward keep tensors for its backward with the strides that they were traced with, where sizes are symbols.

    AOTAutograd (2.13) tells the backward of other strides as numbers, those of the first call: with any other size it failed.
    """
    output = module.graph.output_node()
    results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    values = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in results]
    tensors = [each if isinstance(each, torch.Tensor) else None for each in values]
    if not any(isinstance(size, torch.SymInt) for each in tensors if each is not None for size in each.stride()):
        return []
    output.meta["user_visible_output_idxs"] = [*range(len(results))]
    return tensors


def _tell_strides(kept: Sequence[torch.Tensor | None]) -> None:
    """Where results lie as they were traced, but for dimensions of one, tell the backward these strides, symbols and all."""
    context = TracingContext.try_get()
    told = context.output_strides if kept and context is not None else None
    for i, (tensor, strides) in enumerate(zip(kept, told or (), strict=False)):
        if told is not None and tensor is not None and strides is not None:
            dims = zip(tensor.shape, tensor.stride(), strides, strict=True)
            is_same = all(hinted(size) == 1 or hinted(traced) == real for size, traced, real in dims)
            told[i] = None if is_same else strides


def _held(module: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Tensors that a graph and those in it hold."""
    for child in module.modules():
        yield from (each for each in tree_leaves([child._parameters, child._buffers, vars(child)]) if _is_tensor(each))


def _is_looping(module: fx.GraphModule) -> bool:
    """Whether a graph runs loops, all on a CPU, and calls no other graphs: those the C++ wrapper does not."""
    nodes = [node for graph in _graphs(module) for node in graph.nodes]
    loops = {node for node in nodes if node.target is torch.ops.higher_order.scan}
    called = {user for node in module.graph.find_nodes(op="get_attr") if _is_graph(module, node) for user in node.users}
    values = [each for node in nodes for each in tree_leaves(node.meta.get("val")) if _is_tensor(each)]
    return bool(loops) and called <= loops and all(each.device.type == "cpu" for each in values)


def _is_graph(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(attrgetter(str(node.target))(module), fx.GraphModule)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _bases(module: fx.GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Inputs as AOTAutograd is to know them while this list lives: those that Dynamo took for the base of a view.

    Of an input that it meets before a view of it, Dynamo (2.13) keeps the note "base of that view", and no guard can be
    written for the sizes that are made of that; the other note is still where it keeps all of them.
    """
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if context is None or mode is None or mode.shape_env is None:
        return []
    noted = {each.source: each.symbolic_context for each in mode.shape_env.tracked_fakes or ()}
    found: list[torch.Tensor] = []
    for node, each in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        source = getattr(node.meta.get("grapharg"), "source", None)
        kept = context.tensor_to_context.get(each) if isinstance(each, torch.Tensor) else None
        if source in noted and kept is not None and kept.tensor_source != source:
            found.append(mode.from_tensor(each, symbolic_context=noted[source], source=source, trace=False))
    return found


def _mend(graph: fx.Graph, *, hastens: bool = True) -> None:
    """What Inductor's passes over a forward or a backward would make wrong values of, or code that takes much longer."""
    hand_over_copies(graph)
    spell_out_factors(graph)
    choose_by_masks(graph)
    if hastens:
        widen_products(graph)
        mix_masks(graph, select_decomp_table())


def _keep(graph: fx.Graph) -> None:
    """What its passes over a whole graph have put into one memory, and what both halves of it have to agree on."""
    for change in (keep_results_apart, keep_what_was, mark_masks):
        change(graph)
    keep_seeds(graph, functorch_config.activation_memory_budget)


def _around(
    name: str, change: Callable[[fx.Graph], None], config: Mapping[str, Any], key: str
) -> dict[str, _Fingerprint]:
    """A pass of ours around the user's."""
    return {name: _Fingerprint(key, config.get(name, getattr(inductor_config, name)), change)}


def _has_scans(module: fx.GraphModule) -> bool:
    kinds = (torch.ops.higher_order.scan, checkpointed_scan)
    return any(graph.find_nodes(op="call_function", target=kind) for graph in _graphs(module) for kind in kinds)


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    return (child.graph for child in module.modules() if isinstance(child, fx.GraphModule))


def _without_recomputation(module: fx.GraphModule) -> AbstractContextManager[Any]:
    """Nothing is computed again for a backward that the graph does not hold.

    Of a graph without gradients AOTAutograd (2.13) refuses a checkpoint around anything that may draw random numbers, as
    every SDPA may, before it asks whether there is a backward to compute it again for.
    """
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    nodes = (node for graph in _graphs(module) for node in graph.nodes)
    has_backward = any(node.meta.get("autograd_backward") or "phase" in node.meta.get("custom", ()) for node in nodes)
    if has_backward or not hasattr(functorch_config, name):
        return nullcontext()
    return cast("AbstractContextManager[Any]", functorch_config.patch({name: False}))


def compile_apart(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a function for given inputs by Inductor, apart from the graph that is being compiled now (to measure it).

    A backward is compiled when it first runs: that too has to be done inside of :func:`apart`.
    """
    know_instructions(inputs)
    patches = configuration() | _around("post_grad_custom_pre_pass", _mend, configuration(), source_hash())
    patches |= _around("joint_custom_post_pass", _keep, configuration(), source_hash())
    with apart():
        return cast("Callable[..., Any]", compile_fx(make_fx(function)(*inputs), inputs, config_patches=patches))


def fuses_attention(
    function: Callable[..., Any], inputs: Sequence[Any], device: torch.device, is_training: bool = False
) -> bool:
    """Whether Inductor itself makes PyTorch's fused attention of what a function does: its own patterns are asked.

    With ``is_training`` of the function with its gradients, which is what they see then. The user's passes are not asked.
    """

    def with_gradients(tangent: torch.Tensor, *values: Any) -> Any:
        leaves = [
            each.requires_grad_() for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()
        ]
        found = function(*values)
        return found, torch.autograd.grad(found, leaves, tangent, allow_unused=True)

    counted, own = counters["inductor"].copy(), {"joint_custom_pre_pass": None, "joint_custom_post_pass": None}
    given = {"input_device": device} if "input_device" in signature(joint_graph_passes).parameters else {}
    try:
        with torch._guards.tracing(None), inductor_config.patch({**configuration(), **own}):
            traced, given_to = (with_gradients, (function(*inputs), *inputs)) if is_training else (function, inputs)
            with torch.set_grad_enabled(is_training):
                module = make_fx(traced, select_decomp_table(), tracing_mode="fake")(*given_to)
            module.graph.eliminate_dead_code()  # its decompositions leave calls that nobody reads
            for each in module.graph.find_nodes(op="placeholder"):  # some patterns bring tensors of their own
                if isinstance(each.meta.get("val"), FakeTensor):
                    each.meta["val"].fake_mode.allow_non_fake_inputs = True
            joint_graph_passes(module, **given)
    finally:
        counters["inductor"].clear()  # a question is no compile
        counters["inductor"].update(counted)
    return any("scaled_dot_product" in str(node.target) for node in module.graph.nodes)
