"""Loops whose step is C++ kernels of Inductor's: they are called by a loop in C++, at addresses that move on.

Inductor's own loop (2.13) makes tensors of all that a step reads and writes: 1 to 2 us a step, of which a small kernel takes
20 ns. Its kernels are taken as they are, and so is the order of calls: a step is run once on memory of its own, and what it
would call is written down.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import cpp_builds, inductor
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.step_source import LoopWriter, NotKernelsError, written

_ALIGNED = 64
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
    """A loop for operands with certain layouts, built; what it gives: last states, and a step's part of each result."""

    function: Any
    numbers: tuple[int, ...]
    scratch: tuple[int, ...]
    total: int
    finals: tuple[_Like, ...]
    ys: tuple[_Like, ...]


@lru_cache(maxsize=1024)
def _program(step: str, layouts: tuple[Any, ...], states: int, strides: tuple[int, ...]) -> _Program:
    """The loop for states, slices and what stays with these layouts; of the latter some are numbers."""
    made = [
        each if isinstance(each, int) else cpp_builds.empty_cpu(tuple(each[0]), tuple(each[1]), each[2])
        for each in layouts
    ]
    with isolated():
        source, numbers, scratch = LoopWriter(written(json.loads(step)["code"]), made, states, strides).write()
    function = cpp_builds.load_cpp(source).run
    function.restype = ctypes.c_char_p
    places, total = [], 0
    for size in scratch:
        places.append(total)
        total += -(-size // _ALIGNED) * _ALIGNED
    finals = tuple((tuple(each[0]), each[2]) for each in layouts[:states])
    shapes = [each[0] for each in layouts if not isinstance(each, int)]
    return _Program(function, tuple(numbers), tuple(places), total, finals, _of_a_step(shapes, _told(step)))


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
    length = xs[0].shape[0]
    others = _ordered(given, numbers, _told(step)["kinds"])
    layouts = (
        *[(each.shape, each.stride(), each.dtype) for each in init],
        *[(each.shape[1:], each.stride()[1:], each.dtype) for each in xs],
        *[each if isinstance(each, int) else (each.shape, each.stride(), each.dtype) for each in others],
    )
    program = _program(step, layouts, len(init), tuple(each.stride(0) * each.itemsize for each in xs))
    finals = [torch.empty(shape, dtype=kind) for shape, kind in program.finals]
    ys = [torch.empty((length, *shape), dtype=kind) for shape, kind in program.ys]
    scratch = torch.empty(program.total + _ALIGNED, dtype=torch.uint8) if program.scratch else None
    start = 0 if scratch is None else -(-scratch.data_ptr() // _ALIGNED) * _ALIGNED
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


def _of_a_step(shapes: Sequence[Sequence[Any]], told: Mapping[str, Any]) -> tuple[_Like, ...]:
    """What a step gives, by the shapes of the states, of what it reads, and of what stays."""
    sizes = ([each if isinstance(each, int) else shapes[each[0]][each[1]] for each in own] for _, own in told["ys"])
    return tuple((tuple(own), getattr(torch, kind)) for own, (kind, _) in zip(sizes, told["ys"], strict=True))


def _fake(
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    numbers: Sequence[int],  # as the operator takes it
    step: str,
) -> list[torch.Tensor]:
    shapes = [*(each.shape for each in init), *(each.shape[1:] for each in xs), *(each.shape for each in given)]
    finals = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in init]
    ys = (xs[0].new_empty((xs[0].shape[0], *own), dtype=kind) for own, kind in _of_a_step(shapes, _told(step)))
    return [*finals, *ys]


opaque("step_loop", _run, _fake)


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
                torch.ops.layerzero.step_loop_kernel.default, (init, xs, tensors, numbers, step)
            )
        found.meta.update(node.meta)
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
    step = json.dumps({"ys": ys, "kinds": kinds, "code": code})
    strides = tuple(_hint(each.stride(0)) * each.itemsize for each in slices)
    _program(step, tuple(map(_expected, given)), len(states), strides)  # to see that it can be, and to build it
    return step


def _expected(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return _hint(operand)
    return tuple(map(_hint, operand.shape)), tuple(map(_hint, operand.stride())), operand.dtype


def _hint(size: Any) -> int:
    """A size as the first call has it."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    if not isinstance(found, int):
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
