"""Private names of Dynamo and Inductor; the rest is in ``dynamo.py`` and ``finished_code.py``. Checked with torch 2.13."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from inspect import signature
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]  # not in its stubs
from torch._dynamo import config as dynamo_config
from torch._dynamo.decorators import run
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import tls as tracing_here
from torch._dynamo.utils import counters, get_metrics_context
from torch._dynamo.variables import (
    BaseListVariable,
    ConstDictVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext, Guard, GuardSource, Source, TracingContext
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import (
    VecISA,
    pick_vec_isa,
    supported_vec_isa_list,
    valid_vec_isa_list,
    x86_isa_checker,
)
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler._cache import CacheArtifactManager
from torch.fx._symbolic_trace import _Patcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from lz_compile.ground import events
from lz_compile.ground.machine import code_runs_on
from lz_compile.ground.store import Store
from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.lowering.joined_kernels import joined, may_be_joined, numbered, shared_out
from lz_compile.lowering.regions import has_regions, untangle, writing_to_no_operand
from lz_compile.lowering.value_guards import Frame, KnownValues, has_values, look_at, tells_writes

if TYPE_CHECKING:
    import sympy

#: What Inductor raises to have Dynamo trace again, with what it found out: no fault, and to be passed on.
RESTARTS = (RestartAnalysis,)
#: A context without the transforms of ``torch.func`` that the program is in.
without_transforms = temporarily_clear_interpreter_stack


def config_of(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for a mode or options, checked by Inductor itself.

    Raises:
        RuntimeError: an unknown mode or option, as torch words it.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options or None, None)
    config: dict[str, Any] = wrapper.config
    return config


class _Fingerprint(CustomGraphPass):
    """Changes no graph: puts our source and our decisions into Inductor's cache keys, around a pass of the user's."""

    def __init__(self, key: str, inner: Any) -> None:
        self._key = key
        self._inner = tuple(inner) if isinstance(inner, (list, tuple)) else (inner,) * (inner is not None)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._inner:
            each(graph)

    def uuid(self) -> Any:
        own = [getattr(each, "uuid", None) for each in self._inner]
        inner = [each() if callable(each) else None for each in own]
        return None if None in inner else (self._key, *inner)  # a pass without uuid bypasses the cache, as ever


class _Untangling(_Fingerprint):
    """Lets regions hand out nothing that lies in other memory, behind a pass of the user's."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        untangle(graph)


#: Functions that Inductor's C++ (2.13) computes by other code in vectors than where there are none: at their ends, where it
#: takes vectors for slower. Those of angles even ask what the other elements of a vector are.
_OF_VECTORS = (
    *"exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh".split(),
    *"sigmoid erf erfc erfinv pow fmod hypot lgamma digamma i0 i0e".split(),
)
#: Results of 16 bits are rounded also where what reads them is computed along, and nothing is rounded otherwise for speed.
_ROUNDED_ALIKE = {
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}


@contextmanager
def _element_by_element() -> Iterator[None]:
    """In C++ that is written inside, a function gives an element the same bits wherever it stands: never in vectors."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    kept = {name: vars(CppVecOverrides)[name] for name in _OF_VECTORS if name in vars(CppVecOverrides)}
    try:
        for name in kept:
            alone = CppVecOverrides._scalarize(_of_values(getattr(CppOverrides, name)))
            alone.__name__ = name  # under it, Inductor finds what it calls for scalars
            setattr(CppVecOverrides, name, staticmethod(alone))
        yield
    finally:
        for name, function in kept.items():
            setattr(CppVecOverrides, name, function)


def _of_values(function: Callable[..., str]) -> Callable[..., str]:
    """C++ of a function of elements of arrays, as values: the type of an element itself is a reference."""

    @wraps(function)
    def of_values(*elements: str) -> str:
        return function(*(f"+{each}" for each in elements))

    return of_values


#: Whether the C++ kernels that are met in this thread now are built together.
_is_joining: ContextVar[bool] = ContextVar("lz_compile_kernels_joined", default=False)
_pybinding = AsyncCompile.cpp_pybinding


@contextmanager
def _kernels_joined() -> Iterator[None]:
    """C++ kernels of graphs that are compiled inside, or come from a cache, are built in few libraries, not one each."""
    # It does what it did elsewhere.
    AsyncCompile.cpp_pybinding = _joined_pybinding  # type: ignore[method-assign, assignment]  # the first one's name
    token = _is_joining.set(True)
    try:
        yield
    finally:
        _is_joining.reset(token)


def _joined_pybinding(compiling: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
    """A kernel of a generated module. Where one thread compiles, Inductor builds each at once, and asks for none later."""
    threads = getattr(async_compile, "get_compile_threads", lambda: inductor_config.compile_threads)
    if not _is_joining.get() or not may_be_joined(source_code) or (threads() or 1) <= 1:
        return _pybinding(compiling, argtypes, source_code)
    kernels = vars(compiling).setdefault("_lz_kernels", _Kernels(compiling.submit))
    return LambdaFuture(kernels.add(argtypes, source_code))


class _Kernels:
    """The kernels of a generated module, built when the first is asked for: Inductor has told all of them by then."""

    def __init__(self, submit: Callable[..., Any]) -> None:
        self._submit = submit
        self._told: list[tuple[list[str], str]] = []

    def add(self, argtypes: list[str], source: str) -> Callable[[], Any]:
        """What gives the kernel."""
        self._told.append((argtypes, source))
        return partial(self._ask, len(self._told) - 1)

    def _ask(self, place: int) -> Any:
        return self._built[place]()

    @cached_property
    def _built(self) -> list[Callable[[], Any]]:
        return [each for part in shared_out([source for _, source in self._told]) for each in self._library(part)]

    def _library(self, part: range) -> list[Callable[[], Any]]:
        """What gives some kernels; they are being built from here on."""
        base = CppPythonBindingsCodeCache
        if len(part) == 1:
            return [base.load_pybinding_async(*self._told[part[0]], submit_fn=self._submit)]
        spelled = [_with_bindings(*self._told[place], number) for number, place in enumerate(part)]
        library = base.load_async(joined(spelled, base.entry_function), submit_fn=self._submit)
        return [partial(self._kernel, library, number, place) for number, place in enumerate(part)]

    def _kernel(self, library: Callable[[], Any], number: int, place: int) -> Callable[..., Any]:
        bindings = _bindings(number)
        try:
            first = library()
            module = bindings._load_library_inner(first.__file__, first.key) if number else first
            return cast("Callable[..., Any]", getattr(module, bindings.entry_function))
        except (CppCompileError, ImportError, OSError) as error:
            events.record("KERNELS_NOT_JOINED", "a kernel is built in a library of its own", error)
            return cast("Callable[..., Any]", CppPythonBindingsCodeCache.load_pybinding(*self._told[place]))


def _bindings(number: int, **changed: Any) -> type[CppPythonBindingsCodeCache]:
    """What Inductor builds and loads a kernel by, for that of a number in a joined source."""
    name = numbered(CppPythonBindingsCodeCache.entry_function, number)
    return type(name, (CppPythonBindingsCodeCache,), {"entry_function": name, **changed})


def _with_bindings(argtypes: Sequence[str], source: str, number: int) -> str:
    """A kernel with what makes it a function of Python, as Inductor spells it."""
    told: list[str] = []
    _bindings(number, load_async=lambda code, *_, **__: told.append(code)).load_pybinding_async(argtypes, source)
    return told[0]


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    config: dict[str, Any],
    cache_key: str,
    *,
    rounds_alike: bool = False,
) -> Callable[..., Any]:
    """Hand a graph to Inductor; ``cache_key`` becomes part of its cache keys.

    ``rounds_alike`` lets pointwise code on CPUs give an element the same bits wherever it stands.
    """
    _know_instructions(inputs)
    patches = {**config, **_around("post_grad_custom_pre_pass", _Fingerprint, config, f"{cache_key}{rounds_alike}")}
    patches |= _ROUNDED_ALIKE if rounds_alike else {}
    folded = ExitStack()
    if has_regions(module):
        patches |= _around("post_grad_custom_post_pass", _Untangling, config, cache_key)
        # A region's backward pass (2.13) writes to operands whose numbers are those of what the whole graph may write to.
        folded.enter_context(functorch_config.patch(donated_buffer=False))
        folded.enter_context(writing_to_no_operand(module))
    if _has_scans(module):
        allow_counters()
        # Inductor (2.13) writes over what a loop's body carries while it is still read: gradients of an sLSTM came out wrong.
        patches["inplace_buffers"] = False
    known = _bases(module, inputs)  # as long as it lives
    rounded = _element_by_element() if rounds_alike else nullcontext()
    with folded, _without_recomputation(module), rounded, _kernels_joined():
        compiled = cast("Callable[..., Any]", compile_fx(module, inputs, _compile_inner, config_patches=patches))
    del known
    return compiled


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
        with _kernels_joined():
            return _compile_loops(module, inputs, **given)
    finally:
        _tell_strides(kept)


def _compile_loops(module: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
    if given.get("cpp_wrapper") or not _is_looping(module) or _has_quotes(module):
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
    from torch._inductor.virtualized import V

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
            is_same = all(_hint(size) == 1 or _hint(traced) == real for size, traced, real in dims)
            told[i] = None if is_same else strides


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


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


def _around(name: str, kind: type[_Fingerprint], config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A pass of ours around the user's."""
    return {name: kind(key, config.get(name, getattr(inductor_config, name)))}


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


def allow_counters() -> None:
    """Let Inductor count steps of scans in what is traced: it reads the number off a tensor, against Dynamo's default."""
    context = TracingContext.try_get()
    shapes = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if shapes is not None:  # as it is under ``fullgraph``
        shapes.settings = dataclasses.replace(shapes.settings, allow_scalar_outputs=True)


def confines_scans() -> bool:
    """Whether Dynamo traces what may hold no scan (2.13): a transform of ``torch.func``, or a checkpoint with gradients.

    The first mixes up strides there, and a checkpoint knows no such operator.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    translator: Any = getattr(tracing_here, "current_tx", None)  # none where torch.export traces without Dynamo
    tracer = translator.output.current_tracer if translator is not None and torch.is_grad_enabled() else None
    while tracer is not None:
        if tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


#: What Dynamo knows of objects in front of scans that it traces, outer ones first.
_objects: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def see_assignments(*, is_behind: bool) -> None:
    """Make Dynamo (2.13) see what is assigned to objects behind a scan that it traces; else that is lost, silently.

    A scan is traced with what is known of objects, behind it a copy goes on that was made in front of it: views of
    attributes are still of the former, and objects that were met inside are unknown. To be called in front and behind.
    """
    translator: Any = getattr(tracing_here, "current_tx", None)
    if translator is None:
        return
    output = translator.output
    if not is_behind:
        _objects.setdefault(translator, []).append(output.side_effects)
        _take_floats_for_constants(translator)
        return
    known, met = output.side_effects, _objects[translator].pop()
    if not _objects[translator]:
        _float_symbols_again(translator)
    for held in met.keepalive:
        variable = met.id_to_variable.get(id(held))
        kinds = (AttributeMutationExisting, ValueMutationExisting)
        if held not in known and isinstance(getattr(variable, "mutation_type", None), kinds):
            known.id_to_variable[id(held)] = variable
            known.keepalive.append(held)
    for variable in known.id_to_variable.values():
        if isinstance(variable, UserDefinedObjectVariable):
            variable.dict_vt = None


#: Who traces a scan meanwhile.
_of_constants: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()


def _take_floats_for_constants(translator: Any) -> None:
    """Let floats that a step reads of modules be no symbols (2.13): inside of a scan nothing is known of those.

    What needs their values, as the gradient of a layer norm does, broke the graph in the middle of the scan.
    """
    if not dynamo_config.specialize_float and translator not in _of_constants:
        dynamo_config.specialize_float = True
        restore = partial(setattr, dynamo_config, "specialize_float", False)
        _of_constants[translator] = weakref.finalize(translator, restore)  # also where tracing ends in between


def _float_symbols_again(translator: Any) -> None:
    restore = _of_constants.pop(translator, None)
    if restore is not None:
        restore()


def traced_modules(name: str) -> list[torch.nn.Module]:
    """Modules in the containers that a local name of the function stands for which Dynamo traces just now, in order.

    Asking Dynamo itself for their modes would guard those of all that is inside of them.
    """
    translator: Any = getattr(tracing_here, "current_tx", None)
    frame = None if translator is None else translator.output.current_tx
    return [] if frame is None else list(_modules_in(frame.symbolic_locals[name]))


def _modules_in(variable: Any) -> Iterator[torch.nn.Module]:
    found = variable.realize()
    if isinstance(found, UnspecializedNNModuleVariable):
        module: Any = found.value
        yield module
    elif isinstance(found, (BaseListVariable, ConstDictVariable)):
        for each in found.items if isinstance(found, BaseListVariable) else found.items.values():
            yield from _modules_in(each)


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


def compile_apart(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a function for given inputs by Inductor, apart from the graph that is being compiled now (to measure it).

    A backward is compiled when it first runs: that too has to be done inside of :func:`apart`.
    """
    _know_instructions(inputs)
    with apart():
        module = make_fx(function)(*inputs)
        return cast("Callable[..., Any]", compile_fx(module, inputs, config_patches=configuration()))


@contextmanager
def apart() -> Iterator[None]:
    """What is compiled inside is no part of the compilation that goes on, neither of its tracing nor of its metrics.

    Dynamo's metrics of one compilation may be set once: a second one inside of it would make either fail.
    """
    context = get_metrics_context()
    outer = dict(vars(context))
    vars(context).update(vars(MetricsContext(on_exit=lambda *_: None)))
    try:
        with torch._guards.tracing(None):
            yield
    finally:
        vars(context).clear()
        vars(context).update(outer)


def compile_isolated(
    model: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None
) -> Callable[..., Any]:
    """``torch.compile`` whose entries in Dynamo's cache do not count against the recompile limit of other compiles.

    PyTorch before 2.13 has no such thing; entries count there.
    """
    has_regions = "isolate_recompiles" in signature(torch.compile).parameters
    apart: dict[str, Any] = {"isolate_recompiles": True} if has_regions else {}
    return torch.compile(model, backend=backend, dynamic=dynamic, **apart)


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
        with torch._guards.tracing(None), inductor_config.patch({**_configuration.get(), **own}):
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


def break_reason(module: fx.GraphModule) -> str | None:
    """``file:line (reason)`` of the graph break that ended a Dynamo graph; None where it ended by itself."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    reason = str(found.reason).strip().partition("\n")[0]
    return f"{found.user_stack[-1].filename}:{found.user_stack[-1].lineno} ({reason})" if found.user_stack else reason


@dataclass(frozen=True)
class _Instructions:
    """What was tried, and whether it could be built and loaded: the widest instruction set of a processor, or code for it."""

    tried: str
    works: bool


def _know_instructions(inputs: Sequence[Any]) -> None:
    """Of what runs on a CPU; a number there may belong to a graph of another device."""
    if any(isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.dim() for each in inputs):
        _ask_for_the_widest_instructions()


@lru_cache(maxsize=1)
def _ask_for_the_widest_instructions() -> None:
    """Spare Inductor trying PyTorch's vectors by every instruction set of this processor: the widest stands for all.

    It (2.13) builds a library for each, 4 s the first time, and loads it in a process of its own, 0.5 s each time that a
    program starts. What it tries besides, of bfloat16, VNNI and AMX, it does once for each code, processor and compiler.
    """
    flags = set(x86_isa_checker())
    widest = next((each for each in supported_vec_isa_list if flags.issuperset(str(each).split())), None)
    is_told = _configuration.get().get("cpp.vec_isa_ok", inductor_config.cpp.vec_isa_ok) is not None
    if widest is None:
        return
    facts = f"{widest} {inductor_config.cpp.cxx} {code_runs_on()}"
    for each in supported_vec_isa_list:
        each.check_build = partial(_is_built_once, each.check_build, facts)  # type: ignore[method-assign]
    if is_told or valid_vec_isa_list.cache_info().currsize:
        return
    try:
        known = Store("instructions").recall(facts, _Instructions, lambda: _Instructions(str(widest), _loads(widest)))
    except Exception as error:  # noqa: BLE001 without a compiler; what needs one says so itself
        events.record("INSTRUCTIONS_NOT_TRIED", f"by {widest}: Inductor asks for each", error, level=logging.INFO)
        return
    if known.works:
        # Code generation asks again, of each instruction set that it meets.
        widest.check_build = partial(_is_built, widest.check_build)  # type: ignore[method-assign]
        with inductor_config.patch({"cpp.vec_isa_ok": True}):
            valid_vec_isa_list()


def _is_built(asked: Callable[[str], bool], code: str) -> bool:
    """What is known of PyTorch's own trial, and asked of any other."""
    return code == VecISA._avx_code or asked(code)


def _is_built_once(asked: Callable[[str], bool], facts: str, code: str) -> bool:
    """Of what PyTorch tries beside its vectors it is kept that it was built and loaded: that is up to the compiler."""
    if code == VecISA._avx_code:
        return asked(code)
    store, key = Store("instructions"), hashlib.sha256(f"{facts} {code}".encode()).hexdigest()
    if store.load(key, _Instructions) is None:
        if not asked(code):  # which may be for want of time, in PyTorch's limit
            return False
        store.save(key, dataclasses.asdict(_Instructions(facts, works=True)))
    return True


def _loads(instructions: VecISA) -> bool:
    """Whether what PyTorch tries them by can be built and loaded, with the header that Inductor precompiles for kernels.

    Inductor tries it without that header, which takes four times as long where a machine has it.
    """
    trial = f'{instructions._avx_code}\nextern "C" void kernel() {{ __avx_chk_kernel(); }}'
    try:
        with inductor_config.patch({"cpp.vec_isa_ok": True, "cpp.simdlen": instructions.bit_width()}):
            CppPythonBindingsCodeCache.load_pybinding([], trial)
    except (CppCompileError, ImportError, OSError) as error:
        events.record("INSTRUCTIONS_FAIL", f"{instructions}: Inductor asks for the others", error, level=logging.INFO)
        return False
    finally:
        valid_vec_isa_list.cache_clear()  # of those that were all taken to work
    return True


def vector_bits() -> int:
    """The size of a vector register in the code that Inductor writes for this CPU; 128 where it writes none for vectors."""
    _ask_for_the_widest_instructions()
    return _vector_bits(inductor_config.cpp.simdlen)


@lru_cache(maxsize=4)
def _vector_bits(_simdlen: int | None) -> int:
    """Of the instructions that are picked under a setting: to pick them takes longer than many a kernel."""
    return pick_vec_isa().bit_width() or 128


def load_cpp(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile and load C++ as Inductor does its own: the same compiler, flags (more may be given) and cache on disk.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    _ask_for_the_widest_instructions()
    library: ctypes.CDLL = CppCodeCache.load(source, extra_flags=tuple(flags))
    return library


def empty_cpu(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for real results, as Inductor's own code takes it: in a third of the time of ``torch.empty_strided``."""
    found: torch.Tensor = _empty_strided_cpu(shape, strides, dtype)
    return found


@contextmanager
def cache_artifacts() -> Iterator[list[str]]:
    """The keys of what Inductor puts into its caches, or finds there, inside; all are there on leaving.

    What ``torch.compiler.save_cache_artifacts`` gives is the same as without.
    """
    keys: list[str] = []
    with CacheArtifactManager.with_fresh_cache():
        yield keys
        recorded = {kind: list(found) for kind, found in CacheArtifactManager._new_cache_artifacts.items()}
    for kind, found in recorded.items():
        keys.extend(f"{kind}/{artifact.key}" for artifact in found)
        for artifact in found:
            if artifact not in CacheArtifactManager._seen_artifacts:
                CacheArtifactManager._seen_artifacts.add(artifact)
                CacheArtifactManager._new_cache_artifacts[kind].append(artifact)


def unlimited_recompiles() -> AbstractContextManager[Any]:
    """Dynamo's recompile limit set aside: past it, it would run a function eagerly without asking a backend."""
    manager: AbstractContextManager[Any] = dynamo_config.patch(
        recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30
    )
    return manager


def run_only(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What was compiled, never compiled again: the function runs eagerly where its guards do not hold."""
    found: Callable[..., Any] = run(compiled)
    return found


_patch_method = _Patcher.patch_method
_patches_lock = threading.Lock()
_patching_threads: list[int] = []


@contextmanager
def traces_apart() -> Iterator[None]:
    """What FX patches in ``nn.Module`` while this thread traces holds for this thread; in others, modules are called as ever.

    FX (2.13) patches the class for the whole process: a module that another thread calls meanwhile would be asked for its
    name in the graph.
    """
    owner = threading.get_ident()
    with _patches_lock:
        _patching_threads.append(owner)
        _Patcher.patch_method = _patch_method_apart  # type: ignore[method-assign, assignment]  # the name of an argument
    try:
        yield
    finally:
        with _patches_lock:
            _patching_threads.remove(owner)
            if not _patching_threads:
                _Patcher.patch_method = _patch_method  # type: ignore[method-assign]


def _patch_method_apart(
    patcher: _Patcher, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True
) -> None:
    before, owner = getattr(cls, name), threading.get_ident()

    @wraps(new)
    def apart(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == owner else before)(*args, **kwargs)

    _patch_method(patcher, cls, name, apart if owner in _patching_threads else new, deduplicate)


def compiles_left() -> int | None:
    """How often Dynamo compiles the present function again before it gives up; None outside of a compilation."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_compile_id is None:
        return None
    return max(dynamo_config.recompile_limit - 1 - compile_id.frame_compile_id, 0)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Put a text into the structured trace, where tlparse shows it."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


@dataclass(frozen=True)
class SymbolicSize:
    """What is known of a symbolic size: the one of the trace (None for one that data decides), the least and the most."""

    hint: int | None = None
    lower: int = 0
    upper: int | None = None


def range_of(size: torch.SymInt) -> SymbolicSize:
    """What is known of a symbolic integer, its declared range (``mark_dynamic(min=, max=)``) and guards included."""
    return _known(size.node.expr, size.node.shape_env)


def symbolic_size(expression: sympy.Expr, tensors: Iterable[torch.Tensor]) -> SymbolicSize:
    """What is known of an expression over the symbols of fake tensors; adds no guard."""
    environments = (getattr(getattr(tensor, "fake_mode", None), "shape_env", None) for tensor in tensors)
    environment = next((each for each in environments if each is not None), None)
    return SymbolicSize() if environment is None else _known(expression, environment)


def _known(expression: sympy.Expr, environment: Any) -> SymbolicSize:
    if hasattr(environment, "guarding_hint_or_throw"):  # since 2.12; the older name warns there
        hint = environment.guarding_hint_or_throw(expression) if environment.has_guarding_hint(expression) else None
    else:
        hint = environment.size_hint(expression, allow_none=True)
    bounds = environment.bound_sympy(expression)
    least = max(_finite(bounds.lower) or 0, 0)
    return SymbolicSize(None if hint is None else int(hint), least, _finite(bounds.upper))


def _finite(bound: Any) -> int | None:
    """A bound as a number, None where it is infinite or stands for that (``sys.maxsize``)."""
    return int(bound) if bound.is_Integer and abs(bound) < 1 << 62 else None


#: By the number of a function: the context of its first compilation, and what is known of its buffers.
_frames: dict[int, tuple[weakref.ref[TracingContext], Frame]] = {}


def buffer_value(placeholder: fx.Node) -> torch.Tensor | None:
    """The tensor behind a placeholder that stands for a module's buffer, or for another tensor kept in a module.

    None for parameters, arguments and subclasses, and for a buffer that changes, which nothing should rely on. What is
    read from it holds only if :func:`guard_values` says so.
    """
    found = _buffer(placeholder)
    return None if found is None else found.tensor


def guard_values(placeholders: Iterable[fx.Node]) -> bool:
    """Make the compiled code hold only while these buffers keep their values: moving or changing one compiles again.

    The same code may be called with other modules, if their buffers have the same values. False where nothing can be
    guarded: then nothing may be concluded from values.
    """
    found = [_buffer(placeholder) for placeholder in placeholders]
    buffers = [buffer for buffer in found if buffer is not None]
    return len(buffers) == len(found) and all(buffer.guard() for buffer in buffers)


@dataclass(frozen=True)
class _Buffer:
    """A tensor of a module, in the function that is being compiled."""

    tensor: torch.Tensor
    source: Source
    frame: Frame

    def guard(self) -> bool:
        """Guard the values, once in a compilation; False if Dynamo was told to install no guard."""
        known = self.frame.values(self.tensor, self.source.name)
        guards = TracingContext.get().guards_context.dynamo_guards
        if any(_guarded(guard) is known and guard.originating_source == self.source for guard in guards):
            return True
        guard = Guard(self.source, partial(_buffer_values, known))
        install_guard(guard)
        return guard in guards.inner


def _buffer(placeholder: fx.Node) -> _Buffer | None:
    argument = placeholder.meta.get("grapharg") if placeholder.op == "placeholder" else None
    source, frame = getattr(argument, "source", None), _frame()
    if argument is None or source is None or frame is None:
        return None
    if not source.guard_source.is_unspecialized_nn_module() or not has_values(argument.example):
        return None
    look_at(argument.example)
    is_reliable = frame.is_reliable(argument.example, source.name)
    return _Buffer(argument.example, source, frame) if is_reliable else None


def is_held(placeholder: fx.Node) -> bool:
    """Whether a placeholder stands for a tensor that a module (or a global name) holds, which tells when it is written to."""
    argument = placeholder.meta.get("grapharg") if placeholder.op == "placeholder" else None
    source = getattr(getattr(argument, "source", None), "guard_source", None)
    if source is None or not (source.is_unspecialized_nn_module() or source is GuardSource.GLOBAL):
        return False
    return isinstance(argument.example, torch.Tensor) and tells_writes(argument.example)  # type: ignore[union-attr]


def _frame() -> Frame | None:
    """The function that is being compiled; None where its code is for other processes, in which identities mean nothing.

    Functions are numbered anew after a reset: then the context of the first compilation is another one.
    """
    compile_id, context = CompileContext.current_compile_id(), TracingContext.try_get()
    if compile_id is None or compile_id.frame_id is None or context is None or dynamo_config.caching_precompile:
        return None
    first, frame = _frames.get(compile_id.frame_id, (None, Frame()))
    if first is None or (compile_id.frame_compile_id == 0 and first() is not context):
        frame = Frame()
        _frames[compile_id.frame_id] = (weakref.ref(context), frame)
    return frame


def _guarded(guard: Guard) -> KnownValues | None:
    function = guard.create_fn
    return function.args[0] if isinstance(function, partial) and function.func is _buffer_values else None


def _buffer_values(known: KnownValues, builder: GuardBuilder, guard: Guard) -> None:
    """Dynamo's guard on values.

    A tensor's guards are skipped while the dictionary that holds it is unchanged, unless more is asked of the tensor
    than itself: hence the guard manager of its version.
    """
    builder.get_guard_manager_from_source(AttrSource(guard.originating_source, "_version"))
    text = f"{guard.name} has the values that the graph was made from"
    builder.get_guard_manager(guard).add_lambda_guard(
        known.held_by, get_verbose_code_parts(text, guard), guard.user_stack
    )
