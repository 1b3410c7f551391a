"""Loops whose step is C++ kernels of Inductor's: they are called by a loop in C++, at addresses that move on.

Inductor's own loop (2.13) makes tensors of all that a step reads and writes: 1 to 2 us a step, of which a small kernel takes
20 ns. Its kernels are taken as they are, and so is the order of calls: a step is run once on memory of its own, and what it
would call is written down.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.lowering import inductor
from lz_compile.lowering.opaque import opaque

#: Shape, strides and dtype of a tensor.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

_KERNEL = re.compile(r"\bvoid\s+kernel\b")
_ALIGNED = 64
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
)


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
        """A kernel of the module."""
        name = f"kernel_{len(self.sources)}"
        self.sources[name] = tuple(types), _KERNEL.sub(f"void {name}", source)
        return lambda *arguments: self.calls.append(_Call(name, tuple(types), arguments))

    def wait(self, _names: Mapping[str, Any]) -> None:
        """Nothing is being built."""

    def empty_strided_cpu(self, *layout: Any) -> torch.Tensor:
        """Memory of a step."""
        self.memory.append(inductor.empty_cpu(*layout))
        return self.memory[-1]


class _Torch:
    """PyTorch's names without its operators, which are no kernels."""

    def __getattr__(self, name: str) -> Any:
        if name == "ops":
            raise NotKernelsError("a step calls an operator")
        return getattr(torch, name)


class _Refusing:
    def __getattr__(self, name: str) -> Any:
        raise NotKernelsError(f"a step calls {name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotKernelsError("a step makes memory in another way")


@dataclass(frozen=True)
class _Module:
    """What Inductor has written of a step."""

    call: Callable[[list[Any]], Sequence[Any]]
    recorder: _Recorder

    def run(self, arguments: list[Any]) -> tuple[list[Any], list[_Call], list[torch.Tensor]]:
        """Results, calls and memory of a step."""
        self.recorder.calls, self.recorder.memory = [], []
        results = list(self.call(arguments))
        return results, self.recorder.calls, self.recorder.memory


@lru_cache(maxsize=256)
def _module(code: str) -> _Module:
    recorder = _Recorder()
    header, *rest = code.split("async_compile = AsyncCompile()")
    names: dict[str, Any] = {"__name__": "step", "async_compile": recorder}
    exec(compile(header, "<step>", "exec"), names)  # noqa: S102  # Inductor's own code
    refused = ("aten", "inductor_ops", "_quantized", "alloc_from_pool", "extern_kernels")
    names |= {**dict.fromkeys(refused, _Refusing()), "empty_strided_cpu": recorder.empty_strided_cpu}
    body = "".join(rest).split("\nif __name__ ==")[0]
    exec(compile(body, "<step>", "exec"), names)  # noqa: S102
    names["torch"] = _Torch()
    return _Module(names["call"], recorder)


# ---- the loop in C++ ----------------------------------------------------------------------------------------------------


@dataclass
class _Loop:
    """The source of a loop, its numbers, and how much memory it needs beside operands and results."""

    steps: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)

    def number(self, value: int) -> str:
        """A number that the source is given."""
        self.numbers.append(int(value))
        return f"n[{len(self.numbers)}]"

    def memory(self, size: int) -> str:
        """Some bytes for as long as the loop runs."""
        self.scratch.append(size)
        return f"m{len(self.scratch) - 1}"

    def copy(self, to: str, source: str, size: int) -> None:
        """Copy at the end of each step."""
        self.steps.append(f"std::memcpy({to}, {source}, {self.number(size)});")


class _Writer:
    """Writes the loop of a step that was run on ``arguments``: states, slices, then what stays."""

    def __init__(self, module: _Module, arguments: Sequence[Any], states: int, strides: Sequence[int]) -> None:
        self.module, self.states, self.loop = module, states, _Loop()
        self.results, self.calls, self.memory = module.run(list(arguments))
        if not all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in self.results):
            raise NotKernelsError("a step gives something that is no tensor, or is none of its own")
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self.names = {_base(each): f"s{i}" for i, each in enumerate(tensors)}
        self.loop.names = [f"s{i}" for i in range(len(tensors))]
        self.strides = dict(enumerate(strides, states))

    def write(self) -> tuple[str, list[int], list[int]]:
        """The source, its numbers, and bytes of further memory."""
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
        return self._source(ys), loop.numbers, loop.scratch

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
        return f"({name} + {self.loop.number(offset)})" if offset else name

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
        names = [*loop.names, *(f"m{i}" for i in range(len(loop.scratch))), *ys, *(f"f{i}" for i in range(self.states))]
        given = [f"char* {name} = p[{i}];" for i, name in enumerate(names)]
        lines = [
            *("#include <cstring>", "#include <string>", "#include <utility>", *kernels),
            'extern "C" const char* run(char** p, const int64_t* n) {',
            *("static thread_local std::string error;", "try {", *given),
            *("for (int64_t t = 0; t < n[0]; ++t) {", *loop.steps, *loop.moves, "}"),
            *(*loop.ends, "return nullptr;"),
            "} catch (const std::exception& caught) { error = caught.what(); return error.c_str(); }",
            *("}", ""),
        ]
        return "\n".join(lines)


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Program:
    """A loop for operands with certain layouts, built."""

    function: Any
    numbers: tuple[int, ...]
    scratch: tuple[int, ...]
    total: int


@lru_cache(maxsize=1024)
def _program(step: str, layouts: tuple[Any, ...], states: int, strides: tuple[int, ...]) -> _Program:
    """The loop for states, slices and what stays with these layouts; of the latter some are numbers."""
    made = [each if isinstance(each, int) else torch.empty_strided(each[0], each[1], dtype=each[2]) for each in layouts]
    source, numbers, scratch = _Writer(_module(json.loads(step)["code"]), made, states, strides).write()
    function = inductor.load_cpp(source).run
    function.restype = ctypes.c_char_p
    places, total = [], 0
    for size in scratch:
        places.append(total)
        total += -(-size // _ALIGNED) * _ALIGNED
    return _Program(function, tuple(numbers), tuple(places), total)


# ---- the operator -------------------------------------------------------------------------------------------------------


def _ordered(given: Sequence[torch.Tensor], numbers: Sequence[int], kinds: str) -> Iterator[Any]:
    """What stays, tensors (t) and numbers (n), as the step takes it."""
    tensors, others = iter(given), iter(numbers)
    return (next(tensors if kind == "t" else others) for kind in kinds)


def _run(
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    numbers: Sequence[int],
    step: str,
) -> list[torch.Tensor]:
    told = _told(step)
    length = xs[0].shape[0]
    layouts = (
        *((tuple(each.shape), each.stride(), each.dtype) for each in init),
        *((tuple(each.shape[1:]), each.stride()[1:], each.dtype) for each in xs),
        *(
            each if isinstance(each, int) else (tuple(each.shape), each.stride(), each.dtype)
            for each in _ordered(given, numbers, told["kinds"])
        ),
    )
    program = _program(step, layouts, len(init), tuple(each.stride(0) * each.itemsize for each in xs))
    finals, ys = _results(init, xs, given, told)
    scratch = torch.empty(program.total + _ALIGNED, dtype=torch.uint8)
    start = -(-scratch.data_ptr() // _ALIGNED) * _ALIGNED
    operands = [each.data_ptr() for each in (*init, *xs, *given)]
    pointers = [*operands, *(start + each for each in program.scratch), *(each.data_ptr() for each in (*ys, *finals))]
    counts = (ctypes.c_int64 * (1 + len(program.numbers)))(length, *program.numbers)
    error = program.function((ctypes.c_void_p * len(pointers))(*pointers), counts)
    if error is not None:
        raise RuntimeError(error.decode())
    return [*finals, *ys]


@lru_cache(maxsize=256)
def _told(step: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(step)
    return found


def _results(
    init: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], told: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Memory for the last states, and for what the steps give."""
    shapes = [*(each.shape for each in init), *(each.shape[1:] for each in xs), *(each.shape for each in given)]
    ys = []
    for kind, sizes in told["ys"]:
        shape = [size if isinstance(size, int) else shapes[size[0]][size[1]] for size in sizes]
        ys.append(xs[0].new_empty((xs[0].shape[0], *shape), dtype=getattr(torch, kind)))
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in init], ys


def _fake(
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    numbers: Sequence[int],  # noqa: ARG001  # as the operator takes it
    step: str,
) -> list[torch.Tensor]:
    finals, ys = _results(init, xs, given, _told(step))
    return [*finals, *ys]


opaque("step_loop", _run, _fake)


# ---- scans that become such loops ---------------------------------------------------------------------------------------


def call_kernels(module: fx.GraphModule) -> None:
    """Let loops in C++ call the steps of scans that are kernels, in place, in a graph that Inductor compiles next."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        callee, init, xs, additional = node.args
        try:
            step = _step(getattr(module, callee.target), init, xs, additional, node.meta["val"])
        except NotKernelsError:  # a step with products, mostly
            continue
        except Exception as error:  # noqa: BLE001  # whatever it is, Inductor's own loop does it
            events.record("LOOP_STEPS_FAILED", "a loop's step is called by Inductor's own loop", error)
            continue
        tensors = [each for each in additional if not _is_number(each)]
        numbers = [each for each in additional if _is_number(each)]
        with module.graph.inserting_before(node):
            found = module.graph.call_function(
                torch.ops.layerzero.step_loop_kernel.default, (init, xs, tensors, numbers, step)
            )
        found.meta.update(node.meta)
        node.replace_all_uses_with(found)
        module.graph.erase_node(node)
        if not callee.users:
            module.graph.erase_node(callee)
            module.delete_submodule(callee.target)
    module.recompile()


def _is_number(operand: Any) -> bool:
    return not isinstance(operand, fx.Node) or not isinstance(operand.meta["val"], torch.Tensor)


def _step(body: fx.GraphModule, init: Any, xs: Any, additional: Any, results: Sequence[torch.Tensor]) -> str:
    """What the operator is told of a step.

    Raises:
        NotKernelsError: it is no C++ kernels.
    """
    if any(each.target in _PRODUCTS for each in body.graph.nodes):
        raise NotKernelsError("a step computes products of matrices")
    states, slices, others = ([_value(each) for each in part] for part in (init, xs, additional))
    tensors = [each for each in (*states, *slices, *results, *others) if isinstance(each, torch.Tensor)]
    if any(each.device.type != "cpu" or each.layout != torch.strided for each in tensors):
        raise NotKernelsError("it is for a CPU")
    if not all(each.is_contiguous() for each in (*states, *results)):
        raise NotKernelsError("a state or a result has gaps")
    given = [*states, *(each.select(0, 0) for each in slices), *others]
    known = {_size(size): (i, dim) for i, each in enumerate(_tensors(given)) for dim, size in enumerate(each.shape)}
    ys = [
        (str(each.dtype).removeprefix("torch."), [_told_size(size, known) for size in each.shape[1:]])
        for each in results[len(states) :]
    ]
    code = inductor.kernels_code(body, given)
    kinds = "".join("t" if isinstance(each, torch.Tensor) else "n" for each in others)
    return json.dumps({"ys": ys, "kinds": kinds, "code": code})


def _value(operand: Any) -> Any:
    return operand.meta["val"] if isinstance(operand, fx.Node) else operand


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in given if isinstance(each, torch.Tensor)]


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _told_size(size: Any, known: Mapping[Any, tuple[int, int]]) -> Any:
    """A size as a number, or as that of an operand."""
    if isinstance(size, int):
        return size
    if _size(size) not in known:
        raise NotKernelsError("a size of a result is that of no operand")
    return known[_size(size)]


inductor.before_lowering.append(call_kernels)
