"""What dropout drops, as a function of a seed and of an element's place: whole numbers, which compiled code mixes in vectors.

Inductor's own generator on CPUs (Philox) makes one number after the other, which takes 30 times as long as a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from lz_compile.lowering.opaque import opaque

_CAST, _TEST = torch.ops.prims.convert_element_type.default, torch.ops.aten.gt.Scalar
#: Sixteen random bits decide about an element.
LEVELS = 2**16
_LOW = LEVELS - 1
#: Elements from which a mask is mixed, and columns that it has at least: those of several dimensions where one has fewer.
_LEAST, _COLUMNS = 1 << 16, 64
#: Levels that are dropped, or kept, at least: a share is off by half a level.
_RARE = 64
#: A share of memory under which no more is kept for a backward than has to be.
_LITTLE = 1e-9
#: What marked random numbers are known by.
_MARK = "layerzero_dropout"


def share(dropout_p: float) -> tuple[int, float]:
    """How many of all levels are dropped, and what the other elements are multiplied with."""
    dropped = round(dropout_p * LEVELS)
    return dropped, LEVELS / max(LEVELS - dropped, 1)


def words(like: torch.Tensor, sizes: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words of each row ``[3, B, H, Sq, 1]`` and of each column ``[3, 1, 1, 1, Sk]`` of scores of some sizes."""
    batch, heads, rows, columns = sizes
    high, low = (torch.rand_like(like.new_zeros(2, dtype=torch.float32)) * 2**24).to(torch.int64).unbind(0)
    of_rows, of_columns = _words((high << 31) + low, batch * heads * rows, columns)
    return of_rows.reshape(3, batch, heads, rows, 1), of_columns.reshape(3, 1, 1, 1, columns)


def dropped(weights: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Weights ``[B, H, Sq, Sk]`` after dropout: zero, or larger. NaN remain."""
    return weights * (_kept(of_rows, of_columns, dropout_p).to(weights.dtype) * share(dropout_p)[1])


def keep_seeds(graph: fx.Graph, budget: float) -> None:
    """Let a backward pass draw by the seeds of its forward, also where only a share of memory is kept for it.

    PyTorch (2.13) makes other seeds then: gradients are those of another dropout.
    """
    for seeds in graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_seeds.default):
        seeds.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if budget == 0:  # it would keep nothing at all
            seeds.meta["memory_budget"] = _LITTLE


def mark_masks(graph: fx.Graph) -> None:
    """Mark the random numbers of a whole graph that a dropout alone reads, for its forward and its backward to agree on.

    One of these may draw again what the other draws, and read less of it. Where sizes are symbols nothing is marked, and
    nothing where levels are too coarse for how rarely elements are dropped, or kept.
    """
    for random in _drawn(graph):
        (sizes, _, kind), test = random.args, _chain(random)[-1]
        is_plain = kind == "rand" and random.meta["val"].is_cpu
        if is_plain and test.target is _TEST and isinstance(test.args[1], (int, float)):
            share = min(test.args[1], 1 - test.args[1])
            is_sized = all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= _LEAST
            if is_sized and (share == 0 or share * LEVELS >= _RARE):
                random.meta[_MARK] = True


def _drawn(graph: fx.Graph) -> list[Any]:
    generator = torch.ops.prims.inductor_random.default  # which Inductor defines
    return list(graph.find_nodes(op="call_function", target=generator))


def _chain(random: fx.Node) -> list[Any]:
    """Random numbers, what these are cast to, and what reads that, if that is one node."""
    chain = [random]
    while len(chain[-1].users) == 1 and (chain[-1] is random or chain[-1].target is _CAST):
        chain += chain[-1].users
    return chain


def mix_masks(graph: fx.Graph, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
    """Let Inductor's dropout on CPUs, ``random > p``, be mixed of its seed instead, in place, in a graph of its operators.

    Nobody else reads those that are marked.
    """
    for random in _drawn(graph):
        chain = _chain(random)
        if _MARK not in random.meta or chain[-1].target is not _TEST:
            continue
        sizes, seed, _ = random.args
        test = chain[-1]
        traced = _traced(seed.meta["val"], sizes, test.args[1], decompositions)
        (given,) = traced.find_nodes(op="placeholder")
        with graph.inserting_before(test):
            mask = graph.graph_copy(traced, {given: seed})
        test.replace_all_uses_with(mask)
        for each in reversed(chain):
            graph.erase_node(each)


def _traced(
    seed: torch.Tensor, sizes: Sequence[int], dropout_p: float, decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.Graph:
    def mask(given: torch.Tensor) -> torch.Tensor:
        return _mask(given, sizes, dropout_p)

    with seed.fake_mode:  # type: ignore[attr-defined]
        return make_fx(mask, dict(decompositions))(seed).graph


def _mask(seed: torch.Tensor, sizes: Sequence[int], dropout_p: float) -> torch.Tensor:
    """Which elements of a tensor of some sizes are kept."""
    columns = 1
    for size in reversed(sizes):
        columns *= size if columns < _COLUMNS else 1
    of_rows, of_columns = _words(seed, math.prod(sizes) // columns, columns)
    return _kept(of_rows[..., None], of_columns[:, None], dropout_p).reshape(sizes)


def _kept(of_rows: torch.Tensor, of_columns: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which places of rows and columns are kept.

    One word of a place is uniform by itself; the product of two others leaves no pattern in blocks of rows and columns.
    No number leaves 32 bits, so that all machines agree on it.
    """
    first, second, third = torch.bitwise_xor(of_rows, of_columns).unbind(0)
    return ((((first * second) >> 8) ^ third) & _LOW) >= share(dropout_p)[0]


def _words_kernel(seed: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words of sixteen bits around one of fifteen, of each row ``[3, rows]`` and of each column ``[3, columns]``."""
    found = []
    for start, count in ((0, rows), (0x2545F491, columns)):
        first, second = (_mixed((half & 0x7FFFFFFF) ^ start) for half in (seed, seed >> 31))
        one = _mixed(torch.arange(1, count + 1, device=seed.device) + first)
        other = _mixed(one ^ second)
        found.append(torch.stack([each.to(torch.int32) for each in (one & _LOW, one >> 16, other & _LOW)]))
    return found[0], found[1]


def _words_fake(seed: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = (seed.new_empty((3, count), dtype=torch.int32) for count in (rows, columns))
    return one, other


def _mixed(number: torch.Tensor) -> torch.Tensor:
    """A permutation of numbers of 31 bits; each product has at most 62."""
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        number = ((number ^ (number >> 15)) * factor) & 0x7FFFFFFF
    return number ^ (number >> 16)


# In a graph these would be spelled by Inductor at every place that reads them: three times the compile of a BERT.
_words = opaque("dropout_words", _words_kernel, _words_fake)
