"""What Dynamo knows of the frame that it traces, and what it is told; without importing Inductor. Checked with torch 2.13."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.decorators import run
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import tls as tracing_here
from torch._dynamo.utils import get_metrics_context
from torch._dynamo.variables import (
    BaseListVariable,
    ConstDictVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext, Guard, GuardSource, Source, TracingContext
from torch._logging._internal import trace_structured
from torch.fx._symbolic_trace import _Patcher

from lz_compile.ground.sizes import range_of
from lz_compile.lowering.value_guards import Frame, KnownValues, has_values, look_at, tells_writes

#: What Inductor raises to have Dynamo trace again, with what it found out: no fault, and to be passed on.
RESTARTS = (RestartAnalysis,)
#: A context without the transforms of ``torch.func`` that the program is in.
without_transforms = temporarily_clear_interpreter_stack


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


def break_reason(module: fx.GraphModule) -> str | None:
    """``file:line (reason)`` of the graph break that ended a Dynamo graph; None where it ended by itself."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    reason = str(found.reason).strip().partition("\n")[0]
    return f"{found.user_stack[-1].filename}:{found.user_stack[-1].lineno} ({reason})" if found.user_stack else reason


def unlimited_recompiles() -> AbstractContextManager[Any]:
    """Dynamo's recompile limit set aside: past it, it would run a function eagerly without asking a backend."""
    found: AbstractContextManager[Any] = dynamo_config.patch(
        recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30
    )
    return found


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


def guard_offsets(placeholders: Iterable[fx.Node]) -> None:
    """Make the compiled code hold only for tensors that begin where these begin in their memory: Dynamo does not ask that."""
    for placeholder in placeholders:
        argument: Any = placeholder.meta.get("grapharg")
        if getattr(argument, "source", None) is not None and TracingContext.try_get() is not None:
            install_guard(Guard(argument.source, partial(_begins_at, argument.example.storage_offset())))


def _begins_at(offset: int, builder: GuardBuilder, guard: Guard) -> None:
    text = f"{guard.name} begins at element {offset} of its memory"
    manager, told = builder.get_guard_manager(guard), get_verbose_code_parts(text, guard)
    manager.add_lambda_guard(lambda tensor: tensor.storage_offset() == offset, told, guard.user_stack)


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


def hinted(size: int | torch.SymInt) -> int | None:
    """A size as it is in the call that is traced; None where only data tell."""
    return size if isinstance(size, int) else range_of(size).hint
