"""Arguments of a sampling as the op's canonical operands, each checked as it is given, and the result as it is given back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import Arguments, is_plain
from lz_compile.domains.mask import DomainMask
from lz_compile.errors import ArgumentError, TokenArgumentError
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, Result, SamplingAttrs
from lz_compile.lowering.random_bits import mixed_seed
from lz_compile.lowering.token_bits import pack, unpack, word_count


def run(x: Operands, result: Result, out_dtype: torch.dtype) -> torch.Tensor:
    """The result of a sampling, in the op's canonical layout."""
    found: torch.Tensor = (_traced if torch.compiler.is_compiling() else _selected)(x, result, out_dtype)
    return found


def bind(
    x: Operands, result: Result, out_dtype: torch.dtype, is_traced: bool = False
) -> Callable[[Operands], torch.Tensor]:
    """The sampling of operands like these, by the kernel that is chosen for them."""
    attrs, facts = eager.problem_of(x, result=result, out_dtype=out_dtype)
    own = partial(_own, attrs=attrs)
    return eager.through_kernel(x, attrs, facts, own, is_traced=is_traced) if facts.num_rows else own


def _selected(x: Operands, result: Result, out_dtype: torch.dtype) -> torch.Tensor:
    given = x.flat()
    if not is_plain(*given):
        return bind(x, result, out_dtype, is_traced=True)(x)
    names = (result, out_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in given])
    return eager.bound("sampling", names, partial(bind, x, result, out_dtype))(x)


def _own(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace cannot record the bits of floats
        return op.reference(x, attrs)
    from lz_compile.lowering.kernels.sampling import torch_sampling

    return torch_sampling.sampling(x, attrs)


_traced = call_operator("sampling", op, _selected, result=str, out_dtype=torch.dtype)


#: A number for all rows, or one for each.
PerRow = float | torch.Tensor
#: Temperatures above zero: colder or hotter ones make finite scores infinite, or all equal.
TEMPERATURES = (1e-6, 1e6)
_MOST_SEED = 2**63 - 1
#: The seeds of rows differ by multiples of this, which 62 bits hold.
_ROW = 0x2545F491
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: So many numbers are read off as quickly as they are reduced.
_FEW = 64


class _Range(NamedTuple):
    """Which numbers may be given for an operand of one dimension, and the one that changes nothing."""

    dtype: torch.dtype
    off: float
    least: float
    most: float
    above: bool = False

    def check(self, given: Arguments, name: str, value: Any) -> None:
        """Refuse what is no such number."""
        whole = not self.dtype.is_floating_point
        given.number(name, value, self.least, self.most, above=self.above, whole=whole)

    def check_tensor(self, given: Arguments, name: str, value: torch.Tensor) -> None:
        """Refuse what holds another one, NaN included."""
        low, high = range_of(value, unknown=(self.off, self.off))
        if self.least <= low and high <= self.most and not (self.above and low == self.least):
            return
        for number in (low, high):
            self.check(given, name, number if self.dtype.is_floating_point else int(number))
        raise given.wrong(name, "without NaN", f"{low:g} to {high:g}")


_RANGES = {
    "temperature": _Range(torch.float32, 1.0, 0.0, TEMPERATURES[1]),
    "top_k": _Range(torch.int32, 0, 0, 2**31 - 1),
    "top_p": _Range(torch.float32, 1.0, 0.0, 1.0, above=True),
    "min_p": _Range(torch.float32, 0.0, 0.0, 1.0),
}


class SamplingArguments:
    """Canonical operands of a sampling over logits ``[..., V]``, checked as they are given; some have ``aliases``."""

    def __init__(self, doing: str, logits: torch.Tensor, aliases: Mapping[str, str] | None = None) -> None:
        self._doing, self._aliases, self._own = doing, aliases or {}, logits
        is_dense = type(logits) is torch.Tensor and not (logits.is_sparse or logits.is_nested)
        is_fit = is_dense and logits.dtype in _FLOATS and logits.dim() > 0
        if not is_fit or not logits.shape[-1]:
            given = self.arguments
            if not logits.shape[-1]:
                raise given.wrong("logits", "[..., V] over at least one token", tuple(logits.shape))
        self._rows = logits.shape[:-1]
        self._vocab = logits.shape[-1]
        flat = logits if logits.dim() == 2 else logits.reshape(-1, self._vocab)
        self._given: dict[str, torch.Tensor] = {"logits": flat}
        self._is_plain = is_plain(logits)

    @property
    def arguments(self) -> Arguments:
        """What says which argument does not fit, and that the others are to be where the logits are."""
        given = Arguments(self._doing, TokenArgumentError)
        given.tensor("logits", self._own, "... V")
        return given

    @property
    def _logits(self) -> torch.Tensor:
        return self._given["logits"]

    def add_limits(self, temperature: PerRow, top_k: int | torch.Tensor, top_p: PerRow, min_p: PerRow) -> None:
        """Temperature and what is kept; what changes nothing is left out."""
        low, high = TEMPERATURES
        if isinstance(temperature, torch.Tensor):
            self.arguments.tensor("temperature", temperature, kind="real", anywhere=True)
            low, high = range_of(temperature, unknown=TEMPERATURES)
        if not isinstance(temperature, torch.Tensor) or not (TEMPERATURES[0] <= low and high <= TEMPERATURES[1]):
            self._check_temperature(temperature)
        for name, value in zip(_RANGES, (temperature, top_k, top_p, min_p), strict=True):
            self._add(name, value)

    def _check_temperature(self, temperature: PerRow) -> None:
        """Refuse what makes finite scores infinite; zero is another thing."""
        least, most = TEMPERATURES
        found: Any = temperature
        if isinstance(temperature, torch.Tensor):
            out = temperature[(temperature != 0) & ~((temperature >= least) & (temperature <= most))]
            if not out.numel():
                return
            found = float(out.flatten()[0])
        elif not isinstance(temperature, (int, float)) or temperature == 0 or least <= temperature <= most:
            return  # of another type: the next check says so
        raise self.arguments.wrong("temperature", f"as 0, or from {least:g} to {most:g}", found)

    def _add(self, name: str, value: PerRow) -> None:
        allowed = _RANGES[name]
        if type(value) in (int, float) and value == allowed.off:
            return
        # The usual numbers, which need no second look.
        if type(value) is float and allowed.least < value <= allowed.most and name != "top_k":
            self._given[name] = self._as_tensor(value, allowed.dtype)
            return
        given, shown = self.arguments, self._aliases.get(name, name)
        if isinstance(value, torch.Tensor):
            given.tensor(shown, value, kind="integer" if name == "top_k" else "real", anywhere=True)
            if value.dim() and tuple(value.shape) != tuple(self._rows):
                raise given.wrong(shown, f"as a number or of shape {list(self._rows)}", list(value.shape))
            allowed.check_tensor(given, shown, value)
            self._given[name] = value.to(self._logits.device, allowed.dtype).reshape(-1)
            return
        allowed.check(given, shown, value)
        if value != allowed.off:
            self._given[name] = self._as_tensor(value, allowed.dtype)

    def _as_tensor(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """One number for all rows."""
        device = self._logits.device
        if self._is_plain and device.type == "cpu" and type(value) in (int, float):
            return _number_on_cpu(value, dtype)
        return torch.full((1,), value, dtype=dtype, device=device)

    def add_constraints(self, bitmask: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """A mask of bits, and what is added to logits."""
        if bitmask is not None:
            self._given["bitmask"] = self.words_of(bitmask)
        if bias is not None:
            self.arguments.tensor("bias", bias, anywhere=True)
            self._given["bias"] = self._by_row("bias", "", bias, self._vocab)

    def words_of(self, mask: torch.Tensor | DomainMask, name: str = "bitmask") -> torch.Tensor:
        """A mask as words ``[N or 1, W]``."""
        if (
            type(mask) is torch.Tensor
            and mask.dtype == torch.int32
            and mask.device == self._logits.device
            and not mask.is_sparse
        ):
            return self._by_row(name, "of words, ", mask, word_count(self._vocab))
        given = self.arguments
        if isinstance(mask, DomainMask) and mask.vocab_size != self._vocab:
            found = f"one of {mask.vocab_size} for {mask.domain.name}"
            raise given.wrong(name, f"as a mask of {self._vocab} tokens", found)
        words = mask.words if isinstance(mask, DomainMask) else mask
        given.tensor(name, words, kind="real", anywhere=True)
        if words.dtype == torch.bool:
            words = pack(self._by_row(name, "of booleans, ", words, self._vocab))
        if words.dtype != torch.int32:
            raise given.wrong(name, "of int32 words or booleans", words.dtype, "Cast it, as by .bool()")
        return self._by_row(name, "of words, ", words, word_count(self._vocab))

    def _by_row(self, name: str, what: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
        """``[N, width]``, or ``[1, width]`` for all rows."""
        shape = tuple(tensor.shape)
        if shape not in ((width,), (1, width), (*self._rows, width)):
            expected = f"{what}of shape {[width]} or {[*self._rows, width]}"
            raise self.arguments.wrong(name, expected, list(shape))
        device = self._logits.device
        moved = tensor if tensor.device == device else tensor.to(device)
        return moved if moved.dim() == 2 else moved.reshape(-1, width)

    def drawn(self, seeds: torch.Tensor | int | None, generator: torch.Generator | None) -> torch.Tensor:
        """A token for each row, by a seed for each."""
        device = self._logits.device
        if (
            generator is None
            and type(seeds) is torch.Tensor
            and seeds.dtype == torch.int64
            and seeds.dim() == 1
            and seeds.shape == self._rows
            and seeds.device == device
            and seeds.layout is torch.strided
        ):
            self._given["seeds"] = seeds
        else:
            self._given["seeds"] = row_seeds(self.arguments, self._rows, seeds, generator, device)
        return self.run("ids")

    def run(self, result: Result, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The result, with the rows that were given."""
        out_dtype = torch.promote_types(self._logits.dtype, torch.float32) if dtype is None else dtype
        found = run(Operands(**self._given), result, out_dtype)
        if result != "ids":
            return found if len(self._rows) == 1 else found.reshape(*self._rows, self._vocab)
        can_be_read = not torch.compiler.is_compiling() and found.device.type == "cpu" and is_plain(found)
        if can_be_read and found.numel() and _least(found) < 0:
            raise self._not_drawn(found)
        return found if len(self._rows) == 1 else found.reshape(self._rows)

    def _not_drawn(self, tokens: torch.Tensor) -> ArgumentError:
        """Which rows are no distribution, and why the first is none."""
        bad = (tokens < 0).nonzero().flatten().tolist()
        rows = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        row = {
            name: each if each.shape[0] == 1 and name != "logits" else each[bad[0] : bad[0] + 1]
            for name, each in self._given.items()
            if name in ("logits", "bitmask", "bias", "temperature")
        }
        allowed = unpack(row["bitmask"], self._vocab) if "bitmask" in row else torch.ones_like(row["logits"]).bool()
        seen = row["logits"][allowed]
        name, expected, found = "logits", "with a finite number for a token that is allowed", "minus infinity for all"
        if not allowed.any():
            name, expected, found = "bitmask", "that allows a token", "none"
        elif seen.isnan().any() or (seen == math.inf).any():
            expected, found = "without NaN and plus infinity where tokens are allowed", "NaN or infinite logits"
        elif "bias" in row and not (row["bias"].expand_as(allowed)[allowed] < math.inf).all():
            name, expected, found = "bias", "without NaN and plus infinity where tokens are allowed", "such"
        elif (seen > -math.inf).any():
            expected, found = (
                "whose sum with bias, divided by temperature, is finite in float32",
                f"{float(seen.max()):g}",
            )
        return self.arguments.wrong(name, expected, f"{found} in row {rows}", "There is no token to draw")


@lru_cache(maxsize=256)
def _number_on_cpu(value: float, dtype: torch.dtype) -> torch.Tensor:
    """One number, which every call that is given it reads."""
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device="cpu")


def _least(tokens: torch.Tensor) -> int:
    """The least of some numbers; of few, without a kernel."""
    return min(tokens.tolist()) if tokens.numel() <= _FEW else int(tokens.min())


def row_seeds(
    given: Arguments,
    rows: Sequence[Any],
    seeds: torch.Tensor | int | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> torch.Tensor:
    """A seed ``[N]`` for each row: as they are, mixed from one number and the row's own, or drawn.

    Raises:
        ArgumentError: they are no seeds.
    """
    count = math.prod(rows)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise given.wrong("generator", "as a torch.Generator", type(generator).__name__)
    if seeds is None:
        own = device if generator is None else generator.device
        return torch.randint(0, _MOST_SEED, (count,), generator=generator, device=own).to(device)
    if isinstance(seeds, torch.Tensor):
        given.tensor("seeds", seeds, kind="real", anywhere=True)
        if seeds.is_meta and device.type != "meta":
            raise given.wrong("seeds", f"on {device}", seeds.device)
        if tuple(seeds.shape) != tuple(rows) or seeds.dtype not in (torch.int64, torch.int32):
            expected = f"as a whole number, or as int64 of shape {list(rows)}"
            raise given.wrong("seeds", expected, f"{seeds.dtype} of shape {list(seeds.shape)}")
        return seeds.to(device, torch.int64).reshape(-1)
    if not isinstance(seeds, (int, torch.SymInt)) or isinstance(seeds, bool):
        raise given.wrong("seeds", "as a whole number or a tensor of int64", repr(seeds)[:80])
    if torch.compiler.is_compiling():  # a number that changes must not be compiled in
        base: Any = mixed_seed(torch.full((), seeds, dtype=torch.int64, device=device))
    elif -_MOST_SEED - 1 <= seeds <= _MOST_SEED:
        base = mixed_seed(seeds)
    else:
        raise given.wrong("seeds", "as a whole number that int64 holds, from -2**63 to 2**63 - 1", seeds)
    if isinstance(base, int) and count <= _FEW:
        return torch.tensor([row * _ROW ^ base for row in range(count)], dtype=torch.int64, device=device)
    found: torch.Tensor = torch.arange(count, device=device) * _ROW ^ base
    return found


def range_of(values: torch.Tensor, *, unknown: tuple[float, float]) -> tuple[float, float]:
    """The least and the largest; what is given for them where looking would wait for a device, or is traced."""
    if not is_plain(values) or values.device.type != "cpu" or not values.numel():
        return unknown
    known = values.detach()
    low, high = (known.long() if known.dtype in _UNCOMPARED else known).aminmax()
    return float(low), float(high)


#: Whole numbers that PyTorch holds, but finds no least of.
_UNCOMPARED = (torch.uint16, torch.uint32, torch.uint64)
