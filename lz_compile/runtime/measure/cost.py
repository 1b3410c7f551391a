"""Latency from first principles: what a kernel does (:mod:`lz_compile.lowering.work`) times what that takes on this machine.

The rates of a machine are measured once for each dtype, in a second or two, by PyTorch's own operators at two sizes each:
nothing is compiled for that, and nothing of it comes from another machine, unless this one is too busy to tell.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from lz_compile.ground import events, forks, machine
from lz_compile.ground.hardware import hardware, has_short_products
from lz_compile.ground.isolation import isolated
from lz_compile.ground.store import Store
from lz_compile.lowering import frames
from lz_compile.lowering.work import KEPT, USUAL, Kind, Work, is_looped, product_dtype
from lz_compile.runtime.problem.context import SelectionContext, name_of

#: What two estimates may differ by without one being faster: the model's own error.
NOISE = 0.15
#: Rows, and keys, between which rates are interpolated; PyTorch's fused backward takes larger blocks from 768 rows on.
_ROWS, _KEYS, _MANY_ROWS = (64, 512), (256, 4096), 1024
_HEADS, _DIM, _GROUP = 8, 64, 4
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEAST_S = 1e-3
#: How often all is measured, and where rates do not agree; no further pass begins after so many seconds, and after those.
_PASSES, _MOST_PASSES = 6, 12
_ENOUGH_S, _MOST_S = 1.0, 3.0
#: What the two best measurements of a rate may differ by.
_AGREE = 1.6
#: The share of the time that a thread has at least where nothing else runs: one of three on two cores has 0.67.
#: A machine that gives less by so much more than chance is not waited for.
_OWN, _CHANCE = 0.8, 0.1
#: Bytes that are new memory at every call, as far as sizes tell.
_LARGE = KEPT + (1 << 23)
_lock = threading.Lock()
forks.renewed(sys.modules[__name__], _lock=threading.Lock)
_is_impersonal: ContextVar[bool] = ContextVar("lz_compile_usual_rates", default=False)


@dataclass(frozen=True)
class Rates:
    """µs per unit of work, by kind: ``(size, rate)`` where they depend on a size."""

    by_kind: dict[str, list[tuple[float, float]]]

    def told(self) -> str:
        """The rates of large problems, for people."""
        products, fused, new = (self.by_kind[kind][-1][1] for kind in ("product", "fused", "fresh"))
        return f"products {1e-3 / products:.3g}, fused attention {1e-3 / fused:.3g} GFLOP/s, new memory {1e-3 / new:.3g} GB/s"

    def is_sound(self, kinds: Collection[str]) -> bool:
        """Whether there is a rate of each of some kinds, as a file may not have it."""
        return self.by_kind.keys() == set(kinds) and all(
            points and all(rate > 0 and size > 0 for size, rate in points) for points in self.by_kind.values()
        )

    def us(self, work: Work) -> dict[str, float]:
        """What each kind of work takes, in µs."""
        return {kind: amount * self._rate(kind, work.size.get(kind, 1.0)) for kind, amount in work.amounts.items()}

    def _rate(self, kind: Kind, size: float) -> float:
        """That at a size: geometrically between those that were measured, the nearest beyond them."""
        points = self.by_kind["fresh" if kind == "unheld" else kind]
        for (low, first), (high, last) in pairwise(points):
            if size < high:
                share = math.log(max(size, low) / low) / math.log(high / low)
                return float(first * (last / first) ** share)
        return points[-1][1]


def parts(kernel_id: str, context: SelectionContext, sizes: Mapping[str, int]) -> Mapping[str, float] | None:
    """What a kernel's work takes, in µs by kind, here or (for another CPU) on a usual one; None where nothing says it."""
    stated = _stated(context.op) if context.device_type == "cpu" else None
    given, isa = {**sizes, "copies": context.copies}, USUAL if _is_impersonal.get() else context.hardware.isa
    work = None if stated is None else stated(kernel_id, context.dtype, frozenset(context.features), given, isa)
    if work is None:
        return None
    is_here = context.hardware == hardware("cpu") and not _is_impersonal.get()
    return (rates(context.dtype) if is_here else usual(context.dtype, isa)).us(work)


@contextmanager
def usual_rates() -> Iterator[None]:
    """What is estimated inside is the same on every machine."""
    token = _is_impersonal.set(True)
    try:
        yield
    finally:
        _is_impersonal.reset(token)


@cache
def _stated(op: str) -> Callable[..., Work | None] | None:
    """The formulas of an op's kernels, None if there are none."""
    name = f"lz_compile.lowering.kernels.{op}.cost"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name).work


def rates(dtype: torch.dtype) -> Rates:
    """Those of this machine, measured where they were not before; where something else keeps it busy, usual ones.

    So where the program switched off what is to be measured.
    """
    if not (torch.backends.cuda.flash_sdp_enabled() and cast("bool", torch.backends.mkldnn.enabled)):
        return _usual_here(dtype)
    with _lock:
        return _rates(dtype, machine.environment("cpu"))


def kept() -> dict[str, Rates]:
    """Those that were measured on this machine, by the name of the dtype; nothing is measured for that."""
    where = machine.environment("cpu")
    found = {name_of(dtype): Store("rates").load(_key(dtype, where), Rates) for dtype in _DTYPES}
    return {name: each for name, each in found.items() if each is not None}


def _key(dtype: torch.dtype, environment: str) -> str:
    return f"{environment}-{name_of(dtype)}"


@cache
def _rates(dtype: torch.dtype, environment: str) -> Rates:
    store, key = Store("rates"), _key(dtype, environment)
    found = store.load(key, Rates)
    if found is None or not found.is_sound(_usual_here(dtype).by_kind):
        try:
            found = _alone(dtype)
        except Exception as error:  # noqa: BLE001 a choice that costs nothing to be wrong about fails for nothing
            events.record("RATES_NOT_MEASURED", f"what this machine does in {dtype}: usual rates are taken", error)
            return _usual_here(dtype)
        if found is None:
            events.record(
                "MACHINE_BUSY",
                f"other work has the processor, so its rates in {dtype} vary too much to be kept: usual ones are taken",
                level=logging.INFO,
            )
            return _usual_here(dtype)
        store.save(key, asdict(found))
    return found


def _alone(dtype: torch.dtype) -> Rates | None:
    # Not in a thread of its own: OpenMP starts new threads there, for which the old ones leave no core.
    with frames.without_transforms(), isolated():
        return measured(dtype)


def _usual_here(dtype: torch.dtype) -> Rates:
    return usual(dtype, hardware("cpu").isa)


@cache
def usual(dtype: torch.dtype, isa: frozenset[str] = USUAL) -> Rates:
    """The rates of a usual machine with these instruction sets, which the file beside this one names.

    They matter in 16 bits: with AMX products are fast, with AVX2 alone PyTorch's loops take a hundred times as long.
    """
    text = Path(__file__).with_name("usual_rates.json").read_bytes()
    tables: dict[str, Any] = msgspec.json.decode(text)["rates"]
    narrow = "bfloat16" if "amx" in isa else f"bfloat16 without {'tiles' if has_short_products(isa) else 'AVX-512'}"
    return msgspec.convert({"by_kind": tables["float32" if dtype.itemsize > 2 else narrow]}, Rates)


def measured(dtype: torch.dtype) -> Rates | None:
    """Measure them now. Of a rate, the best counts that another pass comes near: what else is run only adds to it.

    None where there is no such, or where others have the processor meanwhile: this thread never waits for anything else.
    """
    clock, own = time.perf_counter(), time.thread_time()
    passes: list[Mapping[str, Sequence[tuple[float, float]]]] = []
    for count in range(_MOST_PASSES):
        spent = time.perf_counter() - clock
        is_enough = count >= _PASSES or spent > _ENOUGH_S
        if count >= 2 and is_enough and (spent > _MOST_S or _agree(passes)):
            break
        if spent > _ENOUGH_S and time.thread_time() - own < (_OWN - _CHANCE) * spent:
            return None
        passes.append(_pass(dtype))
    if time.thread_time() - own < _OWN * (time.perf_counter() - clock) or not _agree(passes):
        return None
    return _best(passes)


def _agree(passes: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> bool:
    """Whether the best of every rate is no chance: the second best is near."""
    for kind, points in passes[0].items():
        for place in range(len(points)):
            best, second = sorted(each[kind][place][1] for each in passes)[:2]
            if second > _AGREE * best:
                return False
    return True


def _best(passes: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> Rates:
    return Rates(
        {
            kind: [(size, min(each[kind][place][1] for each in passes)) for place, (size, _) in enumerate(points)]
            for kind, points in passes[0].items()
        }
    )


def _pass(dtype: torch.dtype) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for rows in _ROWS:
        for kind, rate in _at_rows(dtype, rows).items():
            found.setdefault(kind, []).append((rows, rate))
    found["fused_training"].append((_MANY_ROWS, _fused_training(_operands(dtype, _MANY_ROWS, _MANY_ROWS))))
    for keys in _KEYS:
        for kind, rate in _of_one_row(dtype, keys).items():
            found.setdefault(kind, []).append((keys, rate))
    new = _us(lambda: new_memory(_LARGE).fill_(1), is_warm=True) / _LARGE
    few = torch.ones(1, 1, 8, dtype=dtype)
    return {**found, "fresh": [(1, new)], "call": [(1, _us(torch.softmax, few, -1))]}


def _at_rows(dtype: torch.dtype, rows: int) -> dict[Kind, float]:
    operands, own_dtype = _operands(dtype, rows, rows), product_dtype(dtype)
    flops = _flops(rows)
    own = _products(*_operands(own_dtype, rows, rows))
    products = own if own_dtype == dtype or is_looped(dtype) else _products(*operands)  # loops are not what we compile
    scores = torch.full((_HEADS, rows, rows), 0.1, dtype=dtype)
    softmax = _us(partial(torch.softmax, dim=-1, out=torch.empty_like(scores)), scores)
    forward = _us(_attention, *operands)
    return {
        "product": products / flops,
        "own_product": own / flops,
        "pointwise": softmax / scores.numel(),
        "fused": forward / flops,
        "fused_training": _fused_training(operands),
    }


def _flops(rows: int) -> float:
    return 4.0 * _HEADS * rows * rows * _DIM


def _fused_training(operands: list[torch.Tensor]) -> float:
    leaves = [each.requires_grad_() for each in operands]
    both = _us(lambda: torch.autograd.grad(_attention(*leaves).sum(), leaves), is_warm=True)
    return both / _flops(leaves[0].shape[-2])


def _products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    scores = torch.bmm(query, key.mT)
    return _us(partial(torch.bmm, out=torch.empty_like(scores)), query, key.mT) + _us(torch.bmm, scores, value)


def _of_one_row(dtype: torch.dtype, keys: int) -> dict[Kind, float]:
    query, key, value = wide = _operands(torch.float32, 1, keys)
    held = key.numel() + value.numel()
    products = _us(lambda: torch.bmm(torch.bmm(query, key.mT), value))  # keys and values take turns in the cache
    few, keys_of, values = (each.to(dtype) for each in (query.expand(-1, _GROUP, -1), key, value))
    grouped = _us(lambda: torch.bmm(torch.bmm(few, keys_of.mT), values))
    fused = _us(_attention, *(each.to(dtype) for each in wide))
    return {"row": products / held, "group": grouped / held, "fused_row": fused / held}


def new_memory(size: int) -> torch.Tensor:
    """So many bytes straight from the operating system: what a heap holds by chance may be large enough for any size."""
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _operands(dtype: torch.dtype, queries: int, keys: int) -> list[torch.Tensor]:
    return [torch.full((_HEADS, rows, _DIM), 0.1, dtype=dtype) for rows in (queries, keys, keys)]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])


def _us(call: Callable[..., object], *args: Any, is_warm: bool = False) -> float:
    """What a call takes. ``is_warm`` says that one ahead of it changes nothing: it takes new memory every time."""
    if not is_warm:
        call(*args)
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < _LEAST_S:
        call(*args)
        count += 1
    return 1e6 * (time.perf_counter() - start) / count
