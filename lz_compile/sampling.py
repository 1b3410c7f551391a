"""Drawing tokens: ``lz.sample`` and its kin, masks of bits, the fusion of constraint domains, speculative verification.

Every draw is a function of a seed for its row: equal wherever in a batch the row stands, on every device, compiled or not.
Without compiling, a call runs the kernel that is expected to be the fastest here; in a function that is compiled it is one
operator, ``layerzero::sampling``, for which the kernel is chosen where it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from lz_compile.arguments import Arguments, is_plain
from lz_compile.domains.mask import DomainMask
from lz_compile.domains.soft import DomainScore
from lz_compile.errors import ArgumentError, TokenArgumentError
from lz_compile.lowering.ops.sampling import OPERANDS, Result, SamplingAttrs, SamplingFacts, mixed_seed
from lz_compile.lowering.token_bits import pack, unpack, word_count
from lz_compile.runtime import context as contexts
from lz_compile.runtime import eager, fingerprint, policy

__all__ = ["apply_token_bitmask", "domain_fusion", "sample", "sample_topk", "sample_topp", "sampling_probs"]

#: A number for all rows, or one for each.
PerRow = float | torch.Tensor
_MOST_SEED = 2**63 - 1
#: Temperatures above zero: colder or hotter ones make finite scores infinite, or all equal.
TEMPERATURES = (1e-6, 1e6)
#: The seeds of rows differ by multiples of this, which 62 bits hold.
_ROW = 0x2545F491
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: So many numbers are read off as quickly as they are reduced.
_FEW = 64
_MOST_WEIGHT = torch.finfo(torch.float32).max


def sample(
    logits: torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from ``softmax((logits + bias) / temperature)`` of the tokens that are kept.

    Kept are those that the mask allows; of them the ``top_k`` largest; of those the fewest whose probabilities reach
    ``top_p``; of those the ones at least ``min_p`` times as probable as the likeliest. Equally likely tokens are kept
    together.

    Args:
        logits: floating point.
        temperature: 0 takes the likeliest token; others are from 1e-6 to 1e6.
        top_k: 0 keeps all.
        top_p: above 0; 1 keeps all.
        min_p: from 0 to 1.
        bitmask: bit ``t % 32`` of word ``t // 32`` allows token ``t``.
        bias: added to the logits.
        seeds: of the draws, one for each row, used as they are; from a number, such as that of a step, the seeds of rows are
            mixed, so that two numbers have none in common. By default they are drawn.
        generator: that draws seeds, by default that of PyTorch (``torch.manual_seed``).

    Shapes:
        logits ``[..., V]``; temperature, top_k, top_p and min_p numbers or ``[...]``; bitmask ``[ceil(V / 32)]`` or
        ``[..., ceil(V / 32)]`` int32; bias ``[V]`` or ``[..., V]``; seeds ``[...]`` int64; the result ``[...]`` int32.

    Raises:
        TokenArgumentError: (a ConstraintError) shapes or ranges do not fit; or (on a CPU, where it is not compiled) a row has
            no token to draw, or NaN or plus infinity among its logits. On other devices, and compiled, its token is -1.

    **Source** Gumbel-max: Yellott, 1977; top-p: Holtzman et al., 2020; min-p: Nguyen et al., 2024.
    """
    operands = _Operands("sample", logits)
    operands.add_limits(temperature, top_k, top_p, min_p)
    operands.add_constraints(bitmask, bias)
    return operands.drawn(seeds, generator)


def sample_topk(
    logits: torch.Tensor,
    k: int | torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from the ``k`` likeliest: :func:`sample` with ``top_k``, which says the rest.

    Shapes:
        logits ``[..., V]``; the result ``[...]`` int32.

    Raises:
        ConstraintError: as :func:`sample`.
    """
    operands = _Operands("sample_topk", logits, {"top_k": "k"})
    operands.add_limits(temperature, k, 1.0, 0.0)
    return operands.drawn(seeds, generator)


def sample_topp(
    logits: torch.Tensor,
    p: PerRow,
    *,
    temperature: PerRow = 1.0,
    seeds: torch.Tensor | int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token for each row, drawn from the fewest that are as likely as ``p`` together: :func:`sample` with ``top_p``.

    Shapes:
        logits ``[..., V]``; the result ``[...]`` int32.

    Raises:
        ConstraintError: as :func:`sample`.
    """
    operands = _Operands("sample_topp", logits, {"top_p": "p"})
    operands.add_limits(temperature, 0, p, 0.0)
    return operands.drawn(seeds, generator)


def sampling_probs(
    logits: torch.Tensor,
    *,
    temperature: PerRow = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    bitmask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution that :func:`sample` draws from; differentiable in logits and bias.

    Shapes:
        as of :func:`sample`; the result is like the logits, in float32 at least. A row without a distribution is NaN.

    Raises:
        ConstraintError: shapes or ranges do not fit.
    """
    operands = _Operands("sampling_probs", logits)
    operands.add_limits(temperature, top_k, top_p, min_p)
    operands.add_constraints(bitmask, bias)
    return operands.run("probs")


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with minus infinity for every token that the mask does not allow.

    Shapes:
        logits ``[..., V]``; bitmask ``[ceil(V / 32)]`` or ``[..., ceil(V / 32)]`` int32, bit ``t % 32`` of word ``t //
        32`` allows token ``t``, as xgrammar and llguidance fill it; the result is like the logits.

    Raises:
        ConstraintError: the shapes do not fit.
    """
    operands = _Operands("apply_token_bitmask", logits)
    operands.add_constraints(bitmask, None)
    return operands.run("scores", logits.dtype)


def domain_fusion(
    logits: torch.Tensor,
    hard: Sequence[torch.Tensor | DomainMask] = (),
    soft: Sequence[torch.Tensor | DomainScore] = (),
    weights: Sequence[float] | torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Logits under all constraint domains at once: one intersection of the hard ones, one sum of the soft ones.

    ``logits + sum(weight * score) / temperature`` where every hard mask allows the token. One softmax of it is the
    model's distribution given the constraints; a score never brings back a token that a mask has taken away.

    Args:
        logits: of the model.
        hard: masks, as words of bits (int32), as booleans, or of a domain.
        soft: scores from -1 to 1, or of a domain, with its weight.
        weights: of the scores, by default 1; finite numbers.
        temperature: of the scores, a number above 0.

    Shapes:
        logits ``[..., V]``; masks ``[ceil(V / 32)]`` or ``[..., ceil(V / 32)]`` int32, or ``[V]`` or ``[..., V]`` bool;
        scores ``[V]`` or ``[..., V]``; the result is like the logits.

    Raises:
        ConstraintError: shapes or vocabularies do not fit, a domain is given twice or is of the wrong tier, there is not a
            finite weight for each score, or (on a CPU, where it is not compiled) a score is not within -1 and 1.
    """
    operands = _Operands("domain_fusion", logits)
    given, vocab = operands.arguments, logits.shape[-1]
    _check_opinions(given, hard, soft)
    if weights is not None and not isinstance(weights, (list, tuple, torch.Tensor)):
        raise given.wrong("weights", "as a list of numbers or a tensor", type(weights).__name__)
    if isinstance(weights, torch.Tensor):
        given.tensor("weights", weights, "S", "real", anywhere=True)
    factors = [1.0] * len(soft) if weights is None else list(weights)
    if len(factors) != len(soft):
        raise given.wrong("weights", f"as one for each of {len(soft)} scores", f"{len(factors)}")
    for factor in factors:
        _check_number(given, "weights", factor)
    _check_number(given, "temperature", temperature, 0.0, above=True)
    bias: torch.Tensor | None = None
    for each, factor in zip(soft, factors, strict=True):
        score = each.scores if isinstance(each, DomainScore) else each
        if isinstance(each, torch.Tensor):
            _check_scores(given, each, vocab)
        weight = (factor * each.weight if isinstance(each, DomainScore) else factor) / temperature
        _check_number(given, "weights / temperature", weight)
        part = score.to(logits.device, torch.promote_types(score.dtype, torch.float32)) * weight
        bias = part if bias is None else bias + part
    words: torch.Tensor | None = None
    for mask in hard:
        own = operands.words_of(mask, "hard")
        words = own if words is None else words & own
    operands.add_constraints(words, bias)
    return operands.run("scores", logits.dtype)


# ---- operands --------------------------------------------------------------------------------------------------------


class _Operands:
    """Canonical operands of a sampling over logits ``[..., V]``, checked as they are given; some have ``aliases``."""

    def __init__(self, doing: str, logits: torch.Tensor, aliases: Mapping[str, str] | None = None) -> None:
        self._doing, self._aliases, self._own = doing, aliases or {}, logits
        is_fit = type(logits) is torch.Tensor and logits.dtype in _FLOATS and logits.dim() > 0 and not logits.is_sparse
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
        if isinstance(temperature, torch.Tensor):
            self.arguments.tensor("temperature", temperature, kind="real", anywhere=True)
            if _may_be_out(temperature, *TEMPERATURES):
                self._check_temperature(temperature)
        else:
            self._check_temperature(temperature)
        self._add("temperature", temperature, torch.float32, unless=1.0, least=0.0, most=TEMPERATURES[1])
        self._add("top_k", top_k, torch.int32, unless=0, least=0, most=2**31 - 1)
        self._add("top_p", top_p, torch.float32, unless=1.0, least=0.0, most=1.0, above=True)
        self._add("min_p", min_p, torch.float32, unless=0.0, least=0.0, most=1.0)

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

    def _add(
        self,
        name: str,
        value: PerRow,
        dtype: torch.dtype,
        *,
        unless: float,
        least: float,
        most: float,
        above: bool = False,
    ) -> None:
        if type(value) in (int, float) and value == unless:
            return
        if type(value) is float and least < value <= most and name != "top_k":
            self._given[name] = self._as_tensor(value, dtype)
            return
        given, shown = self.arguments, self._aliases.get(name, name)
        if isinstance(value, torch.Tensor):
            given.tensor(shown, value, kind="integer" if name == "top_k" else "real", anywhere=True)
            if value.dim() and tuple(value.shape) != tuple(self._rows):
                raise given.wrong(shown, f"as a number or of shape {list(self._rows)}", list(value.shape))
            low, high = _range(value, unknown=(unless, unless))
            if not (least <= low and high <= most) or (above and low == least):  # also where they are NaN
                for number in (low, high):
                    found = int(number) if name == "top_k" else number
                    given.number(shown, found, least, most, above=above, whole=name == "top_k")
                raise given.wrong(shown, "without NaN", f"{low:g} to {high:g}")
            self._given[name] = value.to(self._logits.device, dtype).reshape(-1)
            return
        given.number(shown, value, least, most, above=above, whole=name == "top_k")
        if value != unless:
            self._given[name] = self._as_tensor(value, dtype)

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
        logits = self._logits
        given: dict[str, Any] = {name: self._given.get(name) for name in OPERANDS}
        out_dtype = torch.promote_types(logits.dtype, torch.float32) if dtype is None else dtype
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            source = fingerprint.traced_source()
            found: torch.Tensor = torch.ops.layerzero.sampling.default(*given.values(), result, out_dtype, source)
        else:
            found = _selected(**given, result=result, out_dtype=out_dtype)
        if result != "ids":
            return found if len(self._rows) == 1 else found.reshape(*self._rows, self._vocab)
        can_be_read = not is_compiling and found.device.type == "cpu" and is_plain(found)
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


def draw_of(logits: torch.Tensor, seeds: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What draws a token for each row of ``logits [N, V]`` like these, -1 where there is none, by ``seeds [N]``."""
    return _bind({"logits": logits, "seeds": seeds}, "ids", torch.float32)


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


def _check_opinions(
    given: Arguments, hard: Sequence[torch.Tensor | DomainMask], soft: Sequence[torch.Tensor | DomainScore]
) -> None:
    """Masks are hard, scores are soft, and a domain has one of them."""
    domains = []
    for name, kind, opinions in (("hard", DomainMask, hard), ("soft", DomainScore, soft)):
        if not isinstance(opinions, (list, tuple)):
            raise given.wrong(
                name, f"as a list of tensors or {kind.__name__}", type(opinions).__name__, "Put it in a list"
            )
        for each in opinions:
            if isinstance(each, kind):
                domains.append(each.domain)
            elif not isinstance(each, torch.Tensor):
                raise given.wrong(name, f"as a tensor or a {kind.__name__}", type(each).__name__)
    twice = [domain.name for number, domain in enumerate(domains) if domain in domains[:number]]
    if twice:
        raise given.wrong("hard and soft", "as one opinion of each domain", f"two of {', '.join(twice)}")


def _check_number(
    given: Arguments, name: str, value: float | torch.Tensor, least: float = -_MOST_WEIGHT, *, above: bool = False
) -> None:
    if isinstance(value, torch.Tensor):
        given.tensor(name, value, kind="real", anywhere=True)
        if value.numel() != 1:
            raise given.wrong(name, "as a number", f"a tensor of shape {list(value.shape)}")
        value = _range(value, unknown=(1.0, 1.0))[0]
    given.number(name, value, least, _MOST_WEIGHT, above=above)


def _check_scores(given: Arguments, scores: torch.Tensor, vocab: int) -> None:
    given.tensor("soft", scores, anywhere=True)
    if not scores.dim() or scores.shape[-1] != vocab:
        raise given.wrong("soft", f"with scores of {vocab} tokens", list(scores.shape))
    low, high = _range(scores, unknown=(0.0, 0.0))
    if not (low >= -1 and high <= 1):  # also where they are NaN
        raise given.wrong("soft", "with scores from -1 to 1", f"{low:g} to {high:g}", "Scale or clamp them")


def _may_be_out(values: torch.Tensor, least: float, most: float) -> bool:
    low, high = _range(values, unknown=(least, most))
    return not (least <= low and high <= most)


def _range(values: torch.Tensor, *, unknown: tuple[float, float]) -> tuple[float, float]:
    """The least and the largest; what is given for them where looking would wait for a device, or is traced."""
    if not is_plain(values) or values.device.type != "cpu" or not values.numel():
        return unknown
    low, high = values.detach().aminmax()
    return float(low), float(high)


# ---- choosing and running --------------------------------------------------------------------------------------------


def _selected(
    logits: torch.Tensor,
    bitmask: torch.Tensor | None,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor | None,
    result: str,
    out_dtype: torch.dtype,
    source: str = "",
) -> torch.Tensor:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced."""
    del source  # for caches: see traced_source
    values = (logits, bitmask, bias, temperature, top_k, top_p, min_p, seeds)
    operands = {name: each for name, each in zip(OPERANDS, values, strict=True) if each is not None}
    found: torch.Tensor
    if not is_plain(*values):
        found = _bind(operands, result, out_dtype, is_traced=True)(**operands)
        return found
    names = (result, out_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in values])
    found = eager.bound("sampling", names, partial(_bind, operands, result, out_dtype))(**operands)
    return found


def _bind(
    operands: Mapping[str, torch.Tensor], result: str, out_dtype: torch.dtype, is_traced: bool = False
) -> Callable[..., Any]:
    """The sampling over operands like these, by the kernel that is chosen for them."""
    logits = operands["logits"]
    attrs = SamplingAttrs.of(operands, result, out_dtype)  # type: ignore[arg-type]  # a Result, as schemas spell it
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in operands.values())
    rows, vocab = (contexts.known_size(size) for size in logits.shape)
    facts = SamplingFacts(rows, vocab, logits.dtype, logits.device.type, needs_grad)
    given = None if is_traced else operands
    kernel = eager.kernel_for("sampling", attrs, facts, logits.device, given) if rows else None
    own = partial(_own, attrs)
    if kernel is None or kernel.call is None:
        return own
    bind = None if is_traced or needs_grad else getattr(kernel.call, "bind", None)
    call = None if bind is None else bind(attrs, operands)
    if call is None:
        call = partial(kernel.call, attrs=attrs)
    return eager.guarded(kernel, call, own, fallback_enabled=policy.current().settings.fallback_enabled)


def _own(attrs: SamplingAttrs, **operands: Any) -> torch.Tensor:
    from lz_compile.lowering.kernels.torch_sampling import sampling as composed

    return composed(**operands, attrs=attrs)


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
_LIBRARY.define(
    "sampling" + torch.library.infer_schema(_selected, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("sampling", _selected, "CompositeImplicitAutograd")
