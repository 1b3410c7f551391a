"""C++ as Inductor builds it: which instructions it is for, several kernels as one library. Checked with torch 2.13."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, cast

import torch
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]  # not in its stubs
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.cpu_vec_isa import (
    VecISA,
    pick_vec_isa,
    supported_vec_isa_list,
    valid_vec_isa_list,
    x86_isa_checker,
)
from torch._inductor.exc import CppCompileError

from lz_compile.ground import events
from lz_compile.ground.machine import code_runs_on
from lz_compile.ground.store import Store
from lz_compile.lowering.configured import configuration
from lz_compile.lowering.joined_kernels import PREFIX, joined, may_be_joined, numbered, shared_out

#: Functions that Inductor's C++ (2.13) computes by other code in vectors than where there are none: at their ends, where it
#: takes vectors for slower. Those of angles even ask what the other elements of a vector are.
_OF_VECTORS = (
    *"exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh".split(),
    *"sigmoid erf erfc erfinv pow fmod hypot lgamma digamma i0 i0e".split(),
)


@contextmanager
def element_by_element() -> Iterator[None]:
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
def kernels_joined() -> Iterator[None]:
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


@dataclass(frozen=True)
class _Instructions:
    """What was tried, and whether it could be built and loaded: the widest instruction set of a processor, or code for it."""

    tried: str
    works: bool


def know_instructions(inputs: Sequence[Any]) -> None:
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
    is_told = configuration().get("cpp.vec_isa_ok", inductor_config.cpp.vec_isa_ok) is not None
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


class _AfterInductorsHeader(CppCodeCache):
    """Of sources with the header of Inductor's kernels, which is compiled once for all of them: in a third of the time."""

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        return CppPythonBindingsCodeCache._get_uncompiled_header(device)


def load_cpp(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile and load C++ as Inductor does its own: the same compiler, flags (more may be given) and cache on disk.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    _ask_for_the_widest_instructions()
    builds = _AfterInductorsHeader if PREFIX in source else CppCodeCache
    found: ctypes.CDLL = builds.load(source, extra_flags=tuple(flags))
    return found


def empty_cpu(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for real results, as Inductor's own code takes it: in a third of the time of ``torch.empty_strided``."""
    found: torch.Tensor = _empty_strided_cpu(shape, strides, dtype)
    return found
