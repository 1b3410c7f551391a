"""Runs the C++ of a scan over tensors: what each operand looks like to the loop, how columns are shared among threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.calls import Layout, layouts, without_memory
from lz_compile.lowering.kernels.scan.cpp_program import Program, vectors_for
from lz_compile.lowering.kernels.scan.cpp_terms import Recipe, leaf_of
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, ScanSizes, common_dtype, factor_kind, sizes_of

#: Of the compiler, beside Inductor's own flags: no result depends on what they allow but for the rounding of ``a * b + c``.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")
#: The state of a panel of columns should stay in the nearest cache.
PANEL_BYTES = 16 << 10
#: Elements of state and step below which a thread is not worth its start.
THREAD_WORK = 1 << 15

Results: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_COLUMNS_SHARE = frozenset({"left", "erase", "query"})


@dataclass(frozen=True)
class Launch:
    """One scan over real tensors on a CPU.

    Args:
        x: canonical operands.
        attrs: of the op.
        chunk: steps from one checkpoint to the next.
        recipe: how operands are computed whose memory is not read.
        leaves: what of, ``[B, H, T, K, V]`` or broadcasting to that.
    """

    x: Operands
    attrs: ScanAttrs
    chunk: int
    recipe: Recipe = field(default_factory=Recipe)
    leaves: Sequence[torch.Tensor] = ()

    @cached_property
    def operands(self) -> Mapping[str, torch.Tensor]:
        """Those that there are."""
        return self.x.given()

    @cached_property
    def sizes(self) -> ScanSizes:
        """Of the scan."""
        return sizes_of(self.x)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """Of the state and of sums: float64 where anything is, else float32."""
        wide = torch.promote_types(common_dtype(self.x), self.attrs.compute_dtype)
        return torch.float64 if wide == torch.float64 else torch.float32

    # ---- the two directions ---------------------------------------------------------------------------------------

    def results(self, keeps: bool) -> Results:
        """Memory for reads ``[B, T, H, Q, V]``, a last state if read, and checkpoints if kept ``[B, H, chunks, K, V]``."""
        sizes, like = self.sizes, self.x.like
        batch, heads, length, rows, columns = sizes[:5]
        chunks = (length + self.chunk - 1) // self.chunk if keeps else 0
        return (
            like.new_empty((batch, length, heads, sizes.reads, columns), dtype=self.attrs.out_dtype),
            like.new_empty((batch, heads, rows if self.recipe.last else 0, columns), dtype=self.attrs.state_dtype),
            like.new_empty((batch, heads, chunks, rows, columns), dtype=self.compute_dtype),
        )

    def backward(
        self, checkpoints: torch.Tensor, reads: torch.Tensor, last: torch.Tensor, wanted: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """The gradients of the wanted operands, from those of reads ``[B, H, T, Q, V]`` and of the last state."""
        batch, heads, _, rows, columns = self.sizes[:5]
        if 0 in (batch, heads, rows, columns):
            return {name: torch.zeros_like(self.operands[name]) for name in wanted}
        buffers = {name: self._buffer(name) for name in self.x.names if name in wanted}
        gradients = [buffers.get(name) for name in self.x.names]
        tensors = [*self.x.flat(), checkpoints, reads, last.unsqueeze(2), *gradients]
        function, numbers = _backward(layouts(tensors), self.attrs, self.chunk, wanted, torch.get_num_threads())
        function(calls.addresses(tensors), numbers)
        return {name: self._reduced(name, buffer) for name, buffer in buffers.items()}

    def prepare(self, others: Sequence[torch.Tensor | None], wanted: frozenset[str], *, backward: bool) -> Any:
        """The compiled function, and its last argument: sizes and strides."""
        program = self.program(wanted)
        panel, threads = self._shares
        numbers = [*self.sizes[:5], self.chunk, panel, threads]
        given = [self._seen(name) if name in self.operands else None for name in self.x.names]
        for tensor in (*given, *others, *self.leaves):
            numbers += [0] * 6 if tensor is None else _strides(tensor)
        return function_of(program, backward), calls.integers(numbers)

    # ---- what the code is written for -----------------------------------------------------------------------------

    def program(self, gradients: frozenset[str]) -> Program:
        """What the code is written for."""
        sizes = self.sizes
        return Program(
            decay=factor_kind(self.x.decay),
            drive=factor_kind(self.x.drive),
            rank=sizes.rank,
            reads=sizes.reads,
            has=frozenset(self.operands),
            constant=frozenset(name for name in self.operands if self._is_constant(name)),
            gradients=gradients,
            reads_before=self.attrs.reads == "before",
            drops=self.attrs.drops,
            dtypes=tuple((name, each.dtype) for name, each in sorted(self.operands.items())),
            compute_dtype=self.compute_dtype,
            out_dtype=self.attrs.out_dtype,
            state_dtype=self.attrs.state_dtype,
            lanes=self._lanes,
            vectors=vectors_for(sizes.value_dim, self._lanes),
            recipe=self.recipe,
            leaves=tuple(map(leaf_of, self.leaves)),
        )

    @cached_property
    def _lanes(self) -> int:
        return cpp_builds.vector_bits() // 8 // self.compute_dtype.itemsize

    @cached_property
    def _shares(self) -> tuple[int, int]:
        """The columns of a panel, and the threads."""
        sizes, block = self.sizes, self._lanes * vectors_for(self.sizes.value_dim, self._lanes)
        work = sizes.batch * sizes.heads * max(sizes.length, 1) * sizes.key_dim * sizes.value_dim
        threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK))
        blocks = max(1, -(-sizes.value_dim // block))
        fitting = max(1, PANEL_BYTES // (max(1, sizes.key_dim) * block * self.compute_dtype.itemsize))
        panels = max(-(-blocks // fitting), min(blocks, -(-threads // max(1, sizes.batch * sizes.heads))))
        return -(-blocks // panels) * block, threads

    @property
    def _panels(self) -> int:
        return max(1, -(-self.sizes.value_dim // self._shares[0]))

    @property
    def _chunks(self) -> int:
        return -(-self.sizes.length // self.chunk)

    def _is_constant(self, name: str) -> bool:
        return name != "state" and self.operands[name].shape[2] == 1 and self.sizes.length != 1

    def _seen(self, name: str) -> torch.Tensor:
        """An operand as the loop sees it: five dimensions, the last two of full size where it asks for that."""
        tensor, sizes = self.operands[name], self.sizes
        if name == "state":
            return tensor.expand(*tensor.shape[:2], sizes.key_dim, sizes.value_dim).unsqueeze(2)
        if name in ("decay", "drive"):
            return tensor
        rows = sizes.reads if name == "query" else sizes.rank
        columns = sizes.value_dim if name == "right" else sizes.key_dim
        return tensor.expand(*tensor.shape[:3], rows, columns)

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> torch.Tensor:
        """Memory for a gradient, for each batch and head of its own; first the panels where they have one each."""
        sizes, seen = self.sizes, self._seen(name)
        steps = seen.shape[2] if name == "state" else self._chunks if self._is_constant(name) else sizes.length
        shape = (sizes.batch, sizes.heads, steps, *seen.shape[3:])
        panels = self._panels if name in _COLUMNS_SHARE or (name in ("decay", "drive") and seen.shape[4] == 1) else 1
        operand = self.operands[name].unsqueeze(2) if name == "state" else self.operands[name]
        if panels == 1 and shape == operand.shape:
            return torch.empty_like(operand, dtype=self.compute_dtype).unsqueeze(0)
        return torch.empty((panels, *shape), dtype=self.compute_dtype)

    def _reduced(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """A gradient with the shape, strides and dtype of its operand (of what ``empty_like`` makes of it)."""
        operand = self.operands[name]
        found = buffer[0] if buffer.shape[0] == 1 else buffer.sum(0)
        found = found.squeeze(2) if name == "state" else found
        dims = [dim for dim, size in enumerate(operand.shape) if size == 1 and found.shape[dim] != 1]
        found = found.sum(dims, keepdim=True) if dims else found
        result = torch.empty_like(operand)
        is_like = found.dtype == result.dtype and found.stride() == result.stride()
        return found if is_like else result.copy_(found)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of batch, head, step and the last two dimensions, 0 where one element serves all; at last that of panels."""
    part = tensor.stride(0) if tensor.dim() == 6 else 0
    strides, sizes = tensor.stride()[-5:], tensor.shape[-5:]
    return [*(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)), part]


def forward(
    operands: Sequence[torch.Tensor | None],
    attrs: str,
    chunk: int,
    *,
    keeps: bool,
    recipe: str | None = None,
    leaves: Sequence[torch.Tensor] = (),
) -> Results:
    """A scan over real tensors on a CPU; results as of :meth:`Launch.results`. What depends on layouts is done once.

    The operands are all of the op's, in its order: compiled code comes by for every token, so no object is made of them, nor
    of the attributes and the recipe, which are encoded. Operands of a recipe are None.
    """
    key = layouts(operands), attrs, chunk, keeps, torch.get_num_threads(), recipe, layouts(leaves)
    function, numbers, (reads, last, checkpoints) = _forward(*key)
    results = cpp_builds.empty_cpu(*reads), cpp_builds.empty_cpu(*last), cpp_builds.empty_cpu(*checkpoints)
    function(calls.addresses((*operands, *(results if keeps else (*results[:2], None)), *leaves)), numbers)
    return results


def by_address(
    x: Operands, attrs: ScanAttrs, chunk: int, reads: Sequence[int] | None = None, last: Sequence[int] | None = None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The scan over operands that lie in memory as these do, without gradients; all else is worked out once.

    Of what it is called with only the first address is read: the tensors that the operands are views of will do. Results are
    contiguous, reads ``[B, T, H, Q, V]`` and the last state ``[B, H, K, V]``, or in other shapes of as many elements.
    """
    key = layouts(x.flat()), encode(attrs), chunk, False, torch.get_num_threads()
    prepared: list[tuple[Any, ...]] = []

    def run(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        # Here, where a missing compiler is seen to. Several threads may come by, and all find the same.
        if not prepared:
            function, numbers, memory = _forward(*key)
            given = zip(memory, (reads, last), strict=False)
            prepared.append((function, numbers, *[_contiguous(*each) for each in given]))
        function, numbers, of_reads, of_last = prepared[0]
        results = cpp_builds.empty_cpu(*of_reads), cpp_builds.empty_cpu(*of_last)
        function(calls.addresses((*tensors, *results, None)), numbers)
        return results

    return run


def _contiguous(layout: Layout, shape: Sequence[int] | None) -> Layout:
    """The same memory in another shape, if there is one."""
    if shape is None:
        return layout
    return tuple(shape), torch.empty(shape, device="meta").stride(), layout[2]


@lru_cache(maxsize=1024)
def _forward(
    given: tuple[Layout | None, ...],
    attrs: str,
    chunk: int,
    keeps: bool,
    _threads: int,
    recipe: str | None = None,
    leaves: tuple[Layout | None, ...] = (),
) -> Any:
    """The compiled function, its last argument, and the layouts of its results, for operands with these layouts."""
    launch = Launch(Operands(*without_memory(given)), decode(ScanAttrs, attrs), chunk)
    if recipe is not None:
        tensors, known = [each for each in without_memory(leaves) if each is not None], decode(Recipe, recipe)
        launch = replace(launch, x=replace(launch.x, **known.of(tensors)), recipe=known, leaves=tensors)
    reads, last, checkpoints = results = launch.results(keeps)
    others = (reads.transpose(1, 2), last.unsqueeze(2), checkpoints if keeps else None)
    memory = [(tuple(each.shape), each.stride(), each.dtype) for each in results]
    return *launch.prepare(others, frozenset(), backward=False), memory


@lru_cache(maxsize=1024)
def _backward(
    given: tuple[Layout | None, ...], attrs: ScanAttrs, chunk: int, wanted: frozenset[str], _threads: int
) -> Any:
    """The same of a backward, whose results are tensors like all others."""
    tensors, count = without_memory(given), len(Operands.names)
    return Launch(Operands(*tensors[:count]), attrs, chunk).prepare(tensors[count:], wanted, backward=True)


def forget() -> None:
    """Prepare everything again: limits of this module have changed."""
    for cache in (_forward, _backward, function_of):
        cache.cache_clear()


@lru_cache(maxsize=256)
def function_of(program: Program, backward: bool) -> Any:
    """The compiled function."""
    return calls.function(f"scan_{'backward' if backward else 'forward'}", program.source(backward=backward), FLAGS)
