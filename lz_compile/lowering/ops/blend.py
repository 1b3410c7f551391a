"""Blends of a seed with its host, as grafting does it: ``alpha * seed + (1 - alpha) * host``, or ``host + alpha * seed``.

Canonical layout, in which every kernel takes and returns it:

    host         [N or 1, C or 1, S or 1], never differentiated
    seed         [N, C, S]
    alpha        [N or 1, C or 1, 1], one number for all, for each channel ``C`` or for each row ``N``
    host_weight  [N or 1, C or 1, 1], in place of ``1 - alpha`` where a soft gate gives both weights
    logits       [N, K], where ``has_gate``: the classes by whose margin ``alpha`` is gated
    result       [N, C, S] in ``attrs.out_dtype``; for a margin alone [N]

The gate of a row is ``sigmoid(gain * margin - offset)``, where the margin is the largest logit minus the second largest, and
``alpha`` times the gate is held between ``low`` and ``high``: numbers, tensors without dimensions, or None. ``C`` is the
class dimension where the blend is followed by a softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

#: Names of modes; ``margin`` is the difference of the two largest logits alone.
Mode: TypeAlias = Literal["convex", "residual", "channel", "confidence", "logit", "soft_gate", "margin"]
#: What the blend is followed by, over its channels.
Normalised: TypeAlias = Literal["none", "softmax", "log_softmax"]
#: A number, or a tensor without dimensions.
Scalar: TypeAlias = float | torch.Tensor

LAYOUT = "NCS"
EAGER_KERNEL = "torch.blend"
EXACT_DIMS: tuple[str, ...] = ()
BUCKETED_DIMS = (("num_rows",), ("num_channels",), ("inner_size",), ("num_classes",))
TIMELESS_FEATURES: frozenset[str] = frozenset({"distinct_margin", "residual", "host_weight"})


@dataclass(frozen=True)
class BlendAttrs(OpAttributes):
    """The attributes of one blend.

    ``mode`` is its name; what is computed follows from the other attributes and from the operands that are given. With
    ``is_distinct`` the margin is that to the next *different* logit, otherwise it is zero where two logits share the maximum.
    ``is_sorted`` says that the source finds it by sorting, as ``topk`` does. With ``is_differentiated`` it has gradients, to
    one largest and one second largest logit, however many of them are equal.
    ``compute_dtype`` is the widest dtype in which the source computes anything; a kernel may round less, never more.
    """

    mode: Mode = "convex"
    is_residual: bool = False
    has_gate: bool = False
    has_host_weight: bool = False
    is_distinct: bool = False
    is_sorted: bool = False
    is_differentiated: bool = False
    normalised: Normalised = "none"
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32


Attributes = BlendAttrs
DIFFERENTIABLE: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlendFacts:
    """Sizes, dtype (of the seed) and device of one blend, for kernel selection; ``num_classes`` is 1 without a gate.

    ``alpha_needs_grad`` says that weights or logits want gradients, and not the seed alone.
    """

    num_rows: Size
    num_channels: Size
    inner_size: Size
    num_classes: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    alpha_needs_grad: bool = False


SHAPES: Mapping[str, str] = {
    "host": "N|1 C|1 S|1",
    "seed": "N C S",
    "alpha": "N|1 C|1 1",
    "host_weight": "N|1 C|1 1",
    "logits": "N K",
    **dict.fromkeys(("gain", "offset", "low", "high"), ""),
}
#: What operands are that are no tensors of floating-point numbers, or may be numbers.
KINDS: Mapping[str, str] = dict.fromkeys(("alpha", "gain", "offset", "low", "high"), "scalar")
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {each: {"mode": each} for each in get_args(Mode)}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "num_rows": (64,),
    "num_channels": (256, 1024),
    "inner_size": (1, 64),
    "num_classes": (1000,),
}


@operands
class Operands(base.Operands):
    """Host and seed, how they are weighed, and the gate; shapes as in the module's legend."""

    host: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    alpha: Scalar = 1.0
    host_weight: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    gain: Scalar = 1.0
    offset: Scalar = 0.0
    low: Scalar | None = None
    high: Scalar | None = None

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and seed of what is no margin."""
        assert self.host is not None, "a blend has a host"
        assert self.seed is not None, "a blend has a seed"
        return self.host, self.seed


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[BlendAttrs, BlendFacts]:
    """The attributes, of which some are given, and the facts of a blend over tensors (real or fake).

    The mode is what the operands make it, unless it is given.
    """
    mode = given.get("mode") or _mode(x)
    needed = ("logits",) if mode == "margin" else ("host", "seed", *_NEEDED.get(mode, ()))
    missing = [name for name in needed if getattr(x, name) is None]
    if missing:
        raise MisfitError("blend", missing[0], f"to be given in mode {mode}", "none")
    main = x.logits if mode == "margin" else x.seed
    assert main is not None, "it was looked for"
    weights = [each for each in (main, x.alpha, x.host_weight) if isinstance(each, torch.Tensor)]
    wide = functools.reduce(torch.promote_types, (each.dtype for each in weights))
    found = {"compute_dtype": wide, "out_dtype": main.dtype, **given}
    found.setdefault("is_residual", mode == "residual")
    found.setdefault("normalised", "softmax" if mode == "logit" else "none")
    told = {"mode": mode, "has_gate": x.logits is not None, "has_host_weight": x.host_weight is not None}
    rows, channels, inner, classes = (sizes[each] for each in "NCSK")
    wants = x.wants_gradient(), x.wants_gradient("alpha", "host_weight", "logits")
    facts = BlendFacts(rows, channels, inner, classes, main.dtype, main.device.type, *wants)
    return BlendAttrs(**{**found, **told}), facts


#: Operands that a mode has beside host and seed.
_NEEDED: Mapping[str, tuple[str, ...]] = {"confidence": ("logits",), "soft_gate": ("host_weight",)}


def _mode(x: Operands) -> Mode:
    if x.logits is not None:
        return "margin" if x.seed is None and x.host is None else "confidence"
    if x.host_weight is not None:
        return "soft_gate"
    is_by_channel = isinstance(x.alpha, torch.Tensor) and x.alpha.dim() == 3 and x.alpha.shape[1] > 1
    return "channel" if is_by_channel else "convex"


def fake(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """An empty result, contiguous as kernels give it."""
    if attrs.mode == "margin":
        assert x.logits is not None, "a margin is that of logits"
        return x.logits.new_empty(x.logits.shape[:1], dtype=attrs.out_dtype)
    seed = x.pair[1]
    return seed.new_empty(seed.shape, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of its seed (float64 is the ground truth of every test)."""
    given = x.seed if x.seed is not None else x.logits
    assert given is not None, "a blend has a seed, a margin has logits"
    wide = torch.promote_types(torch.promote_types(given.dtype, attrs.compute_dtype), torch.float32)
    return compute(x, replace(attrs, compute_dtype=wide), sorted_margin)


def compute(x: Operands, attrs: BlendAttrs, margin: Callable[[torch.Tensor, bool], torch.Tensor]) -> torch.Tensor:
    """The op with every step in ``attrs.compute_dtype`` and the margins that ``margin`` gives."""

    def cast(value: Any) -> Any:
        is_tensor = hasattr(value, "dtype")
        return value.to(attrs.compute_dtype) if is_tensor and value.dtype != attrs.compute_dtype else value

    x = x.map(cast)
    difference = None if x.logits is None else margin(x.logits, attrs.is_distinct)
    if attrs.mode == "margin":
        assert difference is not None, "a margin is that of logits"
        return _rounded(difference, attrs)
    weight: Any = x.alpha
    if difference is not None:
        weight = weight * gate(difference, x.gain, x.offset)[:, None, None]
        weight = bounded(weight, x.low, x.high)
    host, seed = x.pair
    if attrs.is_residual:
        blended = host + weight * seed
    else:
        blended = weight * seed + (1 - weight if x.host_weight is None else x.host_weight) * host
    if attrs.normalised == "softmax":
        blended = torch.softmax(blended, 1)
    elif attrs.normalised == "log_softmax":
        blended = torch.log_softmax(blended, 1)
    return _rounded(blended, attrs)


def _rounded(value: torch.Tensor, attrs: BlendAttrs) -> torch.Tensor:
    return value if value.dtype == attrs.out_dtype else value.to(attrs.out_dtype)


def gate(margin: torch.Tensor, gain: Scalar, offset: Scalar) -> torch.Tensor:
    """``sigmoid(gain * margin - offset)``."""
    return torch.sigmoid(gain * margin - offset)


def bounded(value: torch.Tensor, low: Scalar | None, high: Scalar | None) -> torch.Tensor:
    """``value`` held between two bounds, each a number, a tensor without dimensions or None; NaN stays NaN."""
    for bound, is_tensor, clamp in ((low, torch.maximum, torch.clamp_min), (high, torch.minimum, torch.clamp_max)):
        if bound is not None:
            value = clamp(value, bound) if isinstance(bound, (int, float)) else is_tensor(value, bound)
    return value


def sorted_margin(logits: torch.Tensor, is_distinct: bool = False) -> torch.Tensor:
    """The largest minus the second largest along the last dimension, ``[N, K]`` to ``[N]``, by sorting."""
    ordered = logits.sort(-1, descending=True).values
    if not is_distinct:
        return ordered[..., 0] - ordered[..., 1]
    largest = ordered[..., :1]
    return largest[..., 0] - torch.where(ordered == largest, -math.inf, ordered).amax(-1)


def top2_margin(logits: torch.Tensor, is_distinct: bool = False) -> torch.Tensor:
    """The largest minus the second largest along the last dimension, ``[N, K]`` to ``[N]``, by two maxima.

    Where several share the maximum, the second largest is the largest; unless ``is_distinct``: then it is the next one.
    """
    largest = logits.amax(-1, keepdim=True)
    is_largest = logits == largest
    second = torch.where(is_largest, -math.inf, logits).amax(-1)
    largest = largest.squeeze(-1)
    if not is_distinct:
        count = is_largest.to(torch.float32).sum(-1)  # in integers it takes longer than both maxima
        second = torch.where(count > 1, largest, second)
    return largest - second


def picked_margin(logits: torch.Tensor, is_distinct: bool = False) -> torch.Tensor:
    """The largest minus the second largest along the last dimension, ``[N, K]`` to ``[N]``, with a sort's gradient.

    A maximum shares its gradient out among equal logits, and of :func:`top2_margin` none is left then. Its backward takes
    long, too: 60 times as long as that of ``topk``, compiled, for 1,000 classes in float32 on one core of a busy machine.
    """
    assert not is_distinct, "a sort takes equal logits one by one"
    largest = logits.topk(2, -1).values
    return largest[..., 0] - largest[..., 1]


def features(attrs: BlendAttrs, facts: BlendFacts) -> dict[str, str]:
    """What a kernel must support for this blend: feature name (``supports`` in descriptors) and what asks for it."""
    is_wider = attrs.out_dtype.itemsize > facts.dtype.itemsize
    needed = {
        "gate": attrs.has_gate and "a gate by the margin of logits",
        "sorted": attrs.is_sorted and "logits that the source sorts",
        "distinct_margin": attrs.is_distinct and "a margin to the next different logit",
        "residual": attrs.is_residual and "a host that is kept whole",
        "host_weight": attrs.has_host_weight and "a weight of the host's own",
        "normalised": attrs.normalised != "none" and f"a {attrs.normalised} of the blend",
        "wide_result": is_wider and f"a {attrs.out_dtype} result of a {facts.dtype} seed",
        "training": facts.needs_grad and "gradients",
        "alpha_gradient": facts.alpha_needs_grad and "gradients of the weights",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _written(attrs: BlendAttrs, *given: torch.Tensor) -> torch.Tensor:
    operands = _named(attrs.mode, given)
    if "logits" in operands:
        top = operands["logits"].topk(2, dim=-1).values
        margin: torch.Tensor = top[:, 0] - top[:, 1]
        if attrs.mode == "margin":
            return margin
        scaled = operands["gain"] * margin - operands["offset"]
        operands["alpha"] = (operands["alpha"] * torch.sigmoid(scaled)[:, None, None]).clamp(0.0, 1.0)
    host: torch.Tensor = operands["host"]
    seed: torch.Tensor = operands["seed"]
    alpha: torch.Tensor = operands["alpha"]
    if attrs.is_residual:
        return host + alpha * seed
    of_host: torch.Tensor = operands["host_weight"] if attrs.has_host_weight else 1 - alpha
    blended = alpha * seed + of_host * host
    return blended if attrs.normalised == "none" else torch.softmax(blended, 1)


def _named(mode: Mode, given: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The tensors of a sample by name."""
    names = ("logits",) if mode == "margin" else ("host", "seed", "alpha", *_NEEDED.get(mode, ()))
    gate = {"gain": 4.0, "offset": 0.8, "low": 0.0, "high": 1.0} if mode == "confidence" else {}
    return {**dict(zip(names, given, strict=True)), **gate}


@sampler("convex")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs."""
    rows, channels, inner = asked.of("num_rows", "num_channels", "inner_size")
    mode: Mode = asked.variant  # type: ignore[assignment]  # its variants are the modes
    is_gated = mode in ("confidence", "margin")
    weights = torch.rand((1, channels, 1) if mode == "channel" else (1, 1, 1), device=asked.device).to(asked.dtype)
    inputs = [asked.random(rows, channels, inner, seeks=seeks) for seeks in (False, True)] + [weights]
    inputs = [] if mode == "margin" else inputs
    inputs += [asked.random(rows, asked.sizes["num_classes"], seeks=mode == "margin")] if is_gated else []
    inputs += [1 - weights] if mode == "soft_gate" else []
    is_differentiated = mode == "margin" and asked.is_training
    told = {"mode": mode, "is_sorted": is_gated, "is_differentiated": is_differentiated}
    return Sample.of(inputs, lambda *given: Operands(**_named(mode, given)), _written, **told)
