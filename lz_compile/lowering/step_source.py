"""The source of a loop in C++ that calls the kernels of a step, from what Inductor writes of the step.

Inductor's Python is run once, on memory of its own, with kernels that are written down instead of called. What they are
given says where each address comes from: a state, a slice that moves on, what stays, memory of the step.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds

_KERNEL = re.compile(r"\bvoid\s+kernel\b")

_MEMORY = """
struct Memory {
  static constexpr std::align_val_t kAlign{64};
  char* const start;
  explicit Memory(size_t bytes) : start(static_cast<char*>(::operator new(bytes, kAlign))) {}
  ~Memory() { ::operator delete(start, kAlign); }
};
"""


class NotKernelsError(RuntimeError):
    """A step does something beside calling kernels in C++."""


@dataclass(frozen=True)
class _Call:
    name: str
    types: tuple[str, ...]
    arguments: tuple[Any, ...]


@dataclass
class _Recorder:
    """What a generated module is run with: kernels that are written down, memory that is kept."""

    sources: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)

    def cpp_pybinding(self, types: Sequence[str], source: str) -> Callable[..., None]:
        name = f"kernel_{len(self.sources)}"
        self.sources[name] = tuple(types), _KERNEL.sub(f"void {name}", source)
        return lambda *arguments: self.calls.append(_Call(name, tuple(types), arguments))

    def wait(self, _names: Mapping[str, Any]) -> None:
        """Nothing is being built."""

    def empty_strided_cpu(self, *layout: Any) -> torch.Tensor:
        self.memory.append(cpp_builds.empty_cpu(*layout))
        return self.memory[-1]


class _Torch:
    """PyTorch's names, of whose operators there are none but views: others are no kernels."""

    def __getattr__(self, name: str) -> Any:
        return _Views() if name == "ops" else getattr(torch, name)


class _Views:
    @property
    def aten(self) -> _Views:
        return self

    @property
    def view(self) -> Any:
        return torch.ops.aten.view

    def __getattr__(self, name: str) -> Any:
        raise NotKernelsError(f"a step calls an operator ({name})")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotKernelsError("a step makes memory in another way")


@dataclass(frozen=True)
class Written:
    """What Inductor has written of a step."""

    call: Callable[[list[Any]], Sequence[Any]]
    recorder: _Recorder
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, arguments: list[Any]) -> tuple[list[Any], list[_Call], list[torch.Tensor]]:
        """Results, calls and memory of a step."""
        with self.lock:
            self.recorder.calls, self.recorder.memory = [], []
            results = list(self.call(arguments))
            return results, self.recorder.calls, self.recorder.memory


@lru_cache(maxsize=256)
def written(code: str) -> Written:
    """The module that Inductor has written."""
    recorder = _Recorder()
    header, *rest = code.split("async_compile = AsyncCompile()")
    names: dict[str, Any] = {"__name__": "step", "async_compile": recorder}
    exec(compile(header, "<step>", "exec"), names)  # Inductor's own code
    refused = ("aten", "inductor_ops", "_quantized", "alloc_from_pool", "extern_kernels")
    names |= {**dict.fromkeys(refused, _Views()), "empty_strided_cpu": recorder.empty_strided_cpu}
    body = "".join(rest).split("\nif __name__ ==")[0]
    exec(compile(body, "<step>", "exec"), names)
    names["torch"] = _Torch()
    return Written(names["call"], recorder)


# ---- the loop in C++ ----------------------------------------------------------------------------------------------------


@dataclass
class _Loop:
    """The source of a loop, its numbers, and those of the bytes that it needs beside operands and results."""

    steps: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)

    def number(self, value: int) -> str:
        self.numbers.append(int(value))
        return f"n[{len(self.numbers) - 1}]"

    def memory(self, size: int) -> str:
        """Some bytes for as long as the loop runs."""
        self.scratch.append(self.number(size))
        return f"m{len(self.scratch) - 1}"

    def copy(self, to: str, source: str, size: int) -> None:
        """Copy at the end of each step."""
        self.steps.append(f"std::memcpy({to}, {source}, {self.number(size)});")


class LoopWriter:
    """Writes the loop of a step that was run on ``arguments``: states, slices, then what stays."""

    def __init__(self, module: Written, arguments: Sequence[Any], states: int, strides: Sequence[int]) -> None:
        self.module, self.states, self.loop = module, states, _Loop()
        self.results, self.calls, self.memory = module.run(list(arguments))
        if not all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in self.results):
            raise NotKernelsError("a step gives something that is no tensor, or is none of its own")
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self.names = {_base(each): f"s{i}" for i, each in enumerate(tensors)}
        self.loop.names = [f"s{i}" for i in range(len(tensors))]
        self.strides = dict(enumerate(strides, states))

    def write(self) -> tuple[str, list[int]]:
        """The source and its numbers."""
        loop, carried, given = self.loop, self.results[: self.states], self.results[self.states :]
        ys = [f"y{i}" for i in range(len(given))]
        copies = [(name, each) for name, each in zip(ys, given, strict=True) if not self._place(each, name)]
        swaps: list[tuple[str, str]] = []
        pairs: dict[int, tuple[str, str]] = {}
        for i, each in enumerate(carried):
            if self.names.get(_base(each)) == f"s{i}":
                continue  # it stays what it was
            if self.names.get(_base(each)) in ys:
                continue  # the next step reads it where it was handed out
            pair = loop.memory(each.nbytes), loop.memory(each.nbytes)
            if not self._place(each, pair[0]):
                pairs[i] = pair
            swaps.append(pair)
        for buffer in self.memory:
            if _base(buffer) not in self.names:
                self.names[_base(buffer)] = loop.memory(buffer.untyped_storage().nbytes())
        loop.steps += [self._call(each) for each in self.calls]
        for name, each in copies:
            loop.copy(name, self._address(each), each.nbytes)
        for i, (place, _) in pairs.items():
            loop.copy(place, self._address(carried[i]), carried[i].nbytes)
        for i, each in enumerate(carried):
            place = pairs[i][0] if i in pairs else self._address(each)
            loop.moves += [] if place == f"s{i}" else [f"char* const h{i} = {place};"]
            loop.ends.append(f"std::memcpy(f{i}, s{i}, {loop.number(each.nbytes)});")
        moved = [line.split()[2] for line in loop.moves]
        loop.moves += [f"s{name[1:]} = {name};" for name in moved]
        loop.moves += [f"std::swap({one}, {other});" for one, other in swaps]
        loop.moves += [f"s{i} += {loop.number(stride)};" for i, stride in self.strides.items()]
        loop.moves += [f"{name} += {loop.number(each.nbytes)};" for name, each in zip(ys, given, strict=True)]
        return self._source(ys), loop.numbers

    def _place(self, result: torch.Tensor, name: str) -> bool:
        """Let memory that a result fills be where it goes."""
        base = _base(result)
        is_whole = result.untyped_storage().nbytes() == result.nbytes and result.storage_offset() == 0
        if base in self.names or not is_whole or not result.numel():
            return False
        self.names[base] = name
        return True

    def _address(self, tensor: torch.Tensor) -> str:
        name = self.names.get(_base(tensor))
        if name is None:
            raise NotKernelsError("a step reads memory that it was not given")
        offset = tensor.storage_offset() * tensor.itemsize
        return f"({name} + {self.loop.number(int(offset))})" if offset else name

    def _call(self, call: _Call) -> str:
        if len(call.types) != len(call.arguments):
            raise NotKernelsError("a kernel is called with something else than it takes")
        found = []
        for kind, each in zip(call.types, call.arguments, strict=True):
            if isinstance(each, torch.Tensor):
                found.append(f"({kind})({self._address(each)})")
            elif isinstance(each, int) and not isinstance(each, bool):
                found.append(self.loop.number(each))
            else:
                raise NotKernelsError(f"a kernel takes a {type(each).__name__}")
        return f"{call.name}({', '.join(found)});"

    def _source(self, ys: Sequence[str]) -> str:
        loop, used = self.loop, {each.name for each in self.calls}
        kernels = [source for name, (_, source) in self.module.recorder.sources.items() if name in used]
        names = [*loop.names, *ys, *(f"f{i}" for i in range(self.states))]
        given = [f"char* {name} = p[{i}];" for i, name in enumerate(names)]
        given += [f"Memory own{i}({size}); char* m{i} = own{i}.start;" for i, size in enumerate(loop.scratch)]
        lines = [
            *("#include <cstring>", "#include <new>", "#include <string>", "#include <utility>", _MEMORY, *kernels),
            'extern "C" const char* run(char** p, const int64_t* n, int64_t steps) {',
            *("static thread_local std::string error;", "try {", *given),
            *("for (int64_t t = 0; t < steps; ++t) {", *loop.steps, *loop.moves, "}"),
            *(*loop.ends, "return nullptr;"),
            "} catch (const std::exception& caught) { error = caught.what(); return error.c_str(); }",
            *("}", ""),
        ]
        return "\n".join(lines)


def _base(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
