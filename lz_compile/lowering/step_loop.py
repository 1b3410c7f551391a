"""Loops whose step is C++ kernels of Inductor's: they are called by a loop in C++, at addresses that move on.

Inductor's own loop (2.13) makes tensors of all that a step reads and writes: 1 to 2 us a step, of which a small kernel takes
20 ns. Its kernels are taken as they are, and so is the order of calls: a step is run once on memory of its own, and what it
would call is written down.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import cpp_builds, inductor
from lz_compile.lowering.frames import hinted
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.step_source import LoopWriter, NotKernelsError, written

#: The text of a step begins with its digest, of so many letters: 5 kB are neither hashed nor compared at every call.
_NAME = 32
#: Of a step: a thread is worth waiting for from so many elements on; what is given is not written to, and has known strides.
_CONFIG = {"cpp.min_chunk_size": 1 << 13, "inplace_buffers": False, "size_asserts": True}
#: What libraries compute: such a step would be refused after it was compiled.
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
)


#: A shape and a dtype.
_Like: TypeAlias = tuple[tuple[Any, ...], torch.dtype]


@dataclass(frozen=True)
class _Program:
    """A loop for operands with certain layouts, built, and what it gives: shapes (of one step), strides (of all), dtypes."""

    function: Any
    numbers: Any
    pointers: Any
    finals: tuple[tuple[Any, ...], ...]
    ys: tuple[tuple[Any, ...], ...]


#: What is known of steps, by the names that their texts begin with.
_known: dict[str, Mapping[str, Any]] = {}


def _told(step: str) -> Mapping[str, Any]:
    name = step[:_NAME]
    if name not in _known:
        _known[name] = json.loads(step[_NAME:])
    return _known[name]


@lru_cache(maxsize=1024)
def _program(name: str, layouts: tuple[Any, ...], moves: tuple[int, ...], numbers: tuple[int, ...]) -> _Program:
    """The loop over states, slices and other tensors of a step, of these layouts; slices are ``moves`` elements apart."""
    told = _known[name]
    states, tensors = told["states"], [cpp_builds.empty_cpu(tuple(each[0]), *each[1:]) for each in layouts]
    slices = tensors[states : states + len(moves)]
    others, counts = iter(tensors[states + len(moves) :]), iter(numbers)
    given = [*tensors[:states], *slices, *(next(others if kind == "t" else counts) for kind in told["kinds"])]
    strides = [move * each.itemsize for move, each in zip(moves, slices, strict=True)]
    with isolated():
        source, sizes = LoopWriter(written(told["code"]), given, states, strides).write()
    function = cpp_builds.load_cpp(source).run
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], ctypes.c_char_p
    ys = [(shape, _strides(1, *shape), kind) for shape, kind in _of_a_step([each.shape for each in tensors], told)]
    finals = [(tuple(each.shape), _strides(*each.shape), each.dtype) for each in tensors[:states]]
    pointers = ctypes.c_void_p * (len(tensors) + len(ys) + len(finals))
    return _Program(function, (ctypes.c_int64 * max(len(sizes), 1))(*sizes), pointers, tuple(finals), tuple(ys))


def _strides(*shape: int) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


# ---- the operator -------------------------------------------------------------------------------------------------------


def _run(tensors: Sequence[torch.Tensor], numbers: Sequence[int], step: str) -> list[torch.Tensor]:
    """Last states and what all steps give, of states, slices of all steps and what stays. Every call pays for its lines."""
    told = _told(step)
    states, end = told["states"], told["states"] + told["slices"]
    slices = tensors[states:end]
    layouts = [(each.shape, each.stride(), each.dtype) for each in tensors]
    layouts[states:end] = [(each.shape[1:], each.stride()[1:], each.dtype) for each in slices]
    program = _program(step[:_NAME], tuple(layouts), tuple([each.stride(0) for each in slices]), tuple(numbers))
    length = slices[0].shape[0]
    ys = [cpp_builds.empty_cpu((length, *shape), strides, kind) for shape, strides, kind in program.ys]
    finals = [cpp_builds.empty_cpu(*each) for each in program.finals]
    addresses = [each.data_ptr() for each in (*tensors, *ys, *finals)]
    error = program.function(program.pointers(*addresses), program.numbers, length)
    if error is not None:
        raise RuntimeError(error.decode())
    return [*finals, *ys]


def _of_a_step(shapes: Sequence[Sequence[Any]], told: Mapping[str, Any]) -> tuple[_Like, ...]:
    """What a step gives, by the shapes of the states, of what it reads, and of what stays."""
    sizes = ([each if isinstance(each, int) else shapes[each[0]][each[1]] for each in own] for _, own in told["ys"])
    return tuple((tuple(own), getattr(torch, kind)) for own, (kind, _) in zip(sizes, told["ys"], strict=True))


def _fake(tensors: Sequence[torch.Tensor], numbers: Sequence[int], step: str) -> list[torch.Tensor]:
    told = _told(step)
    states, end = told["states"], told["states"] + told["slices"]
    shapes = [each.shape[int(states <= i < end) :] for i, each in enumerate(tensors)]
    finals = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors[:states]]
    first = tensors[states]
    return [*finals, *(first.new_empty((first.shape[0], *own), dtype=kind) for own, kind in _of_a_step(shapes, told))]


opaque("step_loop", _run, _fake, has_exact_strides=True)  # which the code of a step asserts


# ---- scans that become such loops ---------------------------------------------------------------------------------------


def call_kernels(module: fx.GraphModule) -> None:
    """Let loops in C++ call the steps of scans that are kernels, in place, in a graph that Inductor compiles next."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        _store_what_is_spread(node)
        callee, init, xs, additional = node.args
        try:
            step = _step(getattr(module, callee.target), init, xs, additional, node.meta["val"])
        except NotKernelsError as reason:  # products, mostly
            events.logger.debug("a loop's step is called by Inductor's own loop: %s", reason)
            continue
        except Exception as error:  # noqa: BLE001  # whatever it is, Inductor's own loop does it
            events.record("LOOP_STEPS_FAILED", "a loop's step is called by Inductor's own loop", error)
            continue
        tensors = [each for each in additional if not _is_number(each)]
        numbers = [each for each in additional if _is_number(each)]
        with module.graph.inserting_before(node):
            found = module.graph.call_function(
                torch.ops.layerzero.step_loop_kernel.default, ([*init, *xs, *tensors], numbers, step)
            )
        found.meta.update(node.meta)
        found.meta["eager_input_vals"] = fx.map_arg(found.args, _value), {}
        node.replace_all_uses_with(found)
        module.graph.erase_node(node)
        if not callee.users:
            module.graph.erase_node(callee)
            module.delete_submodule(callee.target)
    module.recompile()


def _store_what_is_spread(scan: fx.Node) -> None:
    """Let a scan read copies of what has fewer elements in memory than in its shape, which Inductor may store as it likes."""
    for operand in scan.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or not any(
            stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True)
        ):
            continue
        whole: dict[str, Any] = {"memory_format": torch.contiguous_format}
        with scan.graph.inserting_before(scan):
            stored = scan.graph.call_function(torch.ops.aten.clone.default, (operand,), whole)
        stored.meta["val"] = torch.ops.aten.clone.default(value, **whole)
        scan.replace_input_with(operand, stored)


def _is_number(operand: Any) -> bool:
    return not isinstance(operand, fx.Node) or not isinstance(operand.meta["val"], torch.Tensor)


def _step(body: fx.GraphModule, init: Any, xs: Any, additional: Any, results: Sequence[torch.Tensor]) -> str:
    """What the operator is told of a step.

    Raises:
        NotKernelsError: it is no C++ kernels.
    """
    if any(each.target in _PRODUCTS for each in body.graph.nodes):
        raise NotKernelsError("a step computes products of matrices")
    if any(torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ()) for each in body.graph.nodes):
        raise NotKernelsError("a step draws random numbers")
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
    code = inductor.kernels_code(body, given, _CONFIG)
    kinds = "".join("t" if isinstance(each, torch.Tensor) else "n" for each in others)
    told = json.dumps({"states": len(states), "slices": len(slices), "ys": ys, "kinds": kinds, "code": code})
    step = hashlib.sha256(told.encode()).hexdigest()[:_NAME] + told
    _told(step)
    layouts = tuple((_hints(each.shape), _hints(each.stride()), each.dtype) for each in _tensors(given))
    numbers = _hints(each for each in others if not isinstance(each, torch.Tensor))
    # To see that it can be, and build it.
    _program(step[:_NAME], layouts, _hints(each.stride(0) for each in slices), numbers)
    return step


def _hints(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_hint, sizes))


def _hint(size: Any) -> int:
    """A size as the first call has it."""
    found = hinted(size)
    if found is None:
        raise NotKernelsError("a size is known when the code runs, and not before")
    return found


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
