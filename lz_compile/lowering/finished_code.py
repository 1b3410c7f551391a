"""Compiled code as another process can take it up, without Inductor: what PyTorch's caches hold of it, and its libraries.

Inductor's result is a Python module that calls libraries. To be loaded from PyTorch's caches it imports Inductor, asks what
instructions this processor has, and hashes the C++ of each kernel to find its library. Here the module is kept without its
C++, with the names of its libraries. AOTAutograd's part is what it puts around that module. Checked with torch 2.13.
"""

from __future__ import annotations

import ast
import copy
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch._functorch._aot_autograd.aot_autograd_result import AOTAutogradResult, FxGraphCacheLoadable
from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache, PyCodeCache
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool

from lz_compile.lowering import dynamo

#: Where the generated module takes from what is given to it here.
_COMPILER, _PRODUCTS = "torch._inductor.async_compile", "torch._inductor.select_algorithm"
#: What other kernels are built by: of Triton and halide, and whole modules of C++.
_OTHERS = frozenset({"async_compile", "AsyncCompile", "CppWrapperCodeCache"})
#: What a generated module is measured by, when it is run as a program.
_PROGRAM = frozenset({"get_args", "benchmark_compiled_module"})


_NO_GUARDS = (None, "", "True")
#: What only PyTorch's logs tell, or only its caches look for.
_GRAPH_TEXTS = (
    "source_code", "runnable_graph_str", "inductor_post_grad_graph_str", "inductor_provenance_mapping_str",
    "inductor_provenance_stack_traces_str", "cache_linemap", "_triton_bundle",
)  # fmt: skip
_ENTRY_TEXTS = ("compiled_fw", "aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str")


class NotKeepableError(Exception):
    """Why another process cannot take up what was compiled."""


@dataclass(frozen=True)
class Kernel:
    """A function of a library: ``library`` is below Inductor's directory, ``module`` what it is called in Python."""

    library: str
    module: str
    function: str


@dataclass(frozen=True)
class Code:
    """Compiled code: ``pickled`` is PyTorch's, ``source`` the generated module; what that calls, by its names there.

    ``products`` are functions of ``torch``, ``operators`` those of ours (``layerzero::<name>``).
    """

    source: str
    kernels: Mapping[str, Kernel]
    products: tuple[str, ...]
    operators: tuple[str, ...]


def entry_of(compiled: Callable[..., Any]) -> Any:
    """What AOTAutograd keeps of what it gave.

    Raises:
        NotKeepableError: it keeps nothing, or what depends on symbols or has a backward.
    """
    serialize = getattr(compiled, "serialize", None)
    entry = None if serialize is None else serialize()
    if not isinstance(entry, AOTAutogradResult) or not isinstance(entry.compiled_fw, FxGraphCacheLoadable):
        raise NotKeepableError("PyTorch keeps it in no cache")
    if entry.compiled_bw is not None or entry.maybe_subclass_meta is not None:
        raise NotKeepableError("it has a backward, or takes tensor subclasses")
    if entry.guards_expr not in _NO_GUARDS or entry.compiled_fw.fx_graph_guard_expr not in _NO_GUARDS:
        raise NotKeepableError("it depends on symbolic sizes")
    return entry


def written(entry: Any) -> tuple[Code, bytes]:
    """What the code of an entry is made of, and PyTorch's part of it.

    Raises:
        NotKeepableError: why it cannot be kept.
    """
    key = entry.compiled_fw.fx_graph_cache_info[0]
    found = (graph for graph, _, _ in FxGraphCache.iterate_over_candidates(True, None, key))
    graph = next((each for each in found if each.guards_expr in _NO_GUARDS), None)
    if graph is None:
        raise NotKeepableError("PyTorch's cache has lost it")
    path = dynamo.generated_module(graph.cache_key)
    live = next((each for each in PyCodeCache.modules if each.__file__ == path), None)
    bundle = graph._triton_bundle
    has_triton = bundle is not None and bool(bundle.kernel_artifacts or bundle.static_autotuners)
    if live is None or graph.frozen_param_names or graph.torchbind_constants or has_triton:
        raise NotKeepableError("its module is gone, or holds what only this process has")
    code = _Reader(live).code(graph.source_code)
    for holder, texts in ((graph, _GRAPH_TEXTS), (entry := copy.copy(entry), _ENTRY_TEXTS)):
        for name in texts:
            setattr(holder, name, None)
    return code, pickle.dumps((entry, graph))


class _Reader:
    """Reads a generated module: takes out its C++, and what asks for Inductor."""

    def __init__(self, live: ModuleType) -> None:
        self._live = vars(live)

    def code(self, source: str) -> Code:
        """The module as it is kept."""
        tree = ast.parse(source)
        body = [each for each in tree.body if not _is_compilers(each) and not _is_program(each)]
        kernels = {name: self._kernel(name) for each in tree.body for name in _built(each)}
        tree.body = [each for each in body if not _built(each)]
        names = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
        if any(each.id in _OTHERS for each in names):
            raise NotKeepableError("it has kernels that are no C++")
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
        products = sorted({each.attr for each in calls if ast.unparse(each.value) == "extern_kernels"})
        there = self._live["extern_kernels"]
        if sum(each.id == "extern_kernels" for each in names) != sum(
            ast.unparse(each.value) == "extern_kernels" for each in calls
        ) or any(getattr(torch, each, None) is not getattr(there, each) for each in products):
            raise NotKeepableError("it calls functions of Inductor's own")
        operators = sorted({each.attr for each in calls if ast.unparse(each.value) == "torch.ops.layerzero"})
        return Code(ast.unparse(tree), kernels, tuple(products), tuple(operators))

    def _kernel(self, name: str) -> Kernel:
        function = self._live[name]
        module = getattr(function, "__self__", None)
        path = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or path is None:
            raise NotKeepableError(f"{name} is in no library")
        return Kernel(dynamo.below_cache_root(path), module.__name__, function.__name__)


def _is_compilers(statement: ast.stmt) -> bool:
    """Whether a statement only hands C++ to be compiled, or imports what does."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module in (_COMPILER, _PRODUCTS) and len(statement.names) == 1
    text = ast.unparse(statement)
    return text in ("async_compile = AsyncCompile()", "async_compile.wait(globals())", "del async_compile")


def _is_program(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name in _PROGRAM
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


def _built(statement: ast.stmt) -> list[str]:
    """The names of kernels that a statement has built."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return []
    is_built = ast.unparse(statement.value.func) == "async_compile.cpp_pybinding"
    return [ast.unparse(each) for each in statement.targets] if is_built else []


# ---- taking it up ----------------------------------------------------------------------------------------------------


def loaded(code: Code, pickled: bytes, inputs: list[Any]) -> Callable[..., Any]:
    """Compiled code, ready to be called as what was written.

    Raises:
        Exception: whatever PyTorch raises for what it did not write itself.
    """
    entry, graph = cast("tuple[AOTAutogradResult, CompiledFxGraph]", pickle.load(io.BytesIO(pickled)))
    constants = CompiledFxGraphConstants()
    scope = _run_module(code, graph.cache_key, constants.unwrap(graph))
    graph.current_callable = scope["call"]
    graph.recursively_apply_fns, graph.compiled_fn_runner = scope.get("recursively_apply_fns"), scope.get("runner")
    given: Any = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": False,
    }
    graph.post_compile(inputs, constants, given)
    config: Any = entry.sanitized_aot_config
    entry.compiled_fw = cast("Any", _Loaded(_called(graph.current_callable)))
    run = entry.wrap_post_compile(inputs, config, given)

    def compiled(*arguments: Any) -> Any:
        return run([*arguments])

    return compiled


@dataclass(frozen=True)
class _Loaded:
    """A forward pass that is there, as AOTAutograd asks for what lies in Inductor's cache."""

    call: Callable[..., Any]

    def load(self, _inputs: list[Any]) -> Callable[..., Any]:
        return self.call

    def post_compile(self, call: Callable[..., Any], _given: Any) -> Callable[..., Any]:
        return call


def _called(function: Any) -> Callable[..., Any]:
    """The code as AOTAutograd's wrappers call it: without PyTorch's record of calls, which imports Inductor's debugger."""

    def call(inputs: list[Any]) -> Any:
        return function(inputs)

    return call


def _run_module(code: Code, key: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    module = ModuleType(f"lz_compile.finished.{key}")
    scope = vars(module)
    scope["extern_kernels"] = SimpleNamespace(**{name: getattr(torch, name) for name in code.products})
    scope.update({name: _function(kernel) for name, kernel in code.kernels.items()})
    exec(compile(code.source, f"<{key}>", "exec"), scope)
    scope.update(constants)  # for the module itself they are None
    return scope


def _function(kernel: Kernel) -> Any:
    """A function of a library, loaded as Inductor loads its own: its module is named by hash and entry."""
    folder, _, entry = kernel.module.rpartition(".")
    bindings: Any = type(entry, (CppPythonBindingsCodeCache,), {"entry_function": entry})
    path = str(dynamo.cache_root() / kernel.library)
    return getattr(bindings._load_library_inner(path, folder), kernel.function)
