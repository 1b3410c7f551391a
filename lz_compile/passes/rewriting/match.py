"""What recognisers yield: a match, a near miss with its reason, or the failure of reading one anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.effects import Ambient
from lz_compile.passes.graph.view import where_of

if TYPE_CHECKING:
    from lz_compile.passes.rewriting.builder import Builder


class Attributes(Protocol):
    """The attributes of an op: a frozen dataclass that prints itself as JSON-able values."""

    def to_dict(self) -> dict[str, Any]:
        """Names and values for reports."""

    def assuming_finite(self) -> Attributes:
        """The same without what asks for NaN and infinities to be treated as the source does."""

    def deterministic(self) -> Attributes:
        """The same without what is random (dropout), for comparisons."""


class Emitter(Protocol):
    """How a match is put into a kernel's form: canonical operands in, the original's layout out."""

    def operands(self, builder: Builder) -> Any:
        """The op's operands in its canonical layout."""

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's result in the layout and dtype of the node that it replaces; a tuple where there are several."""

    def attributes_at(self, sizes: Mapping[Axis, int]) -> Attributes:
        """The op's attributes for a proof at other sizes."""

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What an implied input holds at other sizes; ``given`` is a random tensor in its place."""


@dataclass(frozen=True)
class Match:
    """A subgraph that computes ``op``.

    ``inputs`` are the nodes at its edge with their axes, ``core`` the nodes that a rewrite makes superfluous (in graph
    order, ``output`` last), ``also`` further nodes whose values the kernel gives (of the emitter's result, ``output`` is the
    first then), ``brought`` those that are to be computed before all of these, ``read`` every node between edge and output
    with the axes of its dimensions, and ``facts`` the op's own description of sizes and dtypes for kernel selection.
    ``formula`` says for people what is computed. ``fills`` names the inputs that may hold masking constants, with True where
    they are known to be finite, ``masks`` the boolean ones, with True where True keeps.

    ``source_kernel`` is the kernel that the source itself calls. ``masked_rows_count`` is False where the source's
    rounding alone decides what a row without any kept element gives, ``masked_rows_are_finite`` is True where such a row
    gives finite numbers. ``rows`` and ``dropped`` name operands of which a slice along these axes may hold NaN
    without the rest of the result noticing: any slice, or one that the masks in ``selecting`` drop.

    ``implied`` are the inputs whose values the attributes imply, with a text that says how: the replacement reads them
    for the rest of what they say, or not at all. ``buffers`` are the buffers on whose values that rests. ``masks_mean``
    names what was proven of the masks, ``mask_reasons`` say why they are general ones.

    ``limited`` are the axes (of features) on whose sizes kernels put limits: a proof of such a kernel keeps them. ``fixed``
    are those whose sizes the source may spell out as numbers: every proof keeps them. ``ties`` are axes that are others by
    another name, and have their size in a proof. ``at_least`` are the smallest sizes at which a proof means anything, and
    ``spelled`` integers among the source's arguments that are the size of an axis, and change with it.

    ``magnitudes`` are further sizes of operands to try, ``points`` numbers at which a function may have a corner, to be tried
    exactly, ``scales`` by what random values of an input are multiplied, so that what is multiplied again and again neither
    grows nor dies, ``ranges`` the least and the largest number that an input may hold.

    A match that equals an earlier one but for its place has that as its ``prototype``; ``renamed`` gives, for the nodes of
    the prototype, its own, and the emitter speaks of the prototype's.
    """

    op: str
    attributes: Attributes
    facts: Any
    inputs: Mapping[fx.Node, Dims]
    operands: Mapping[str, fx.Node]
    fills: Mapping[fx.Node, bool]
    masks: Mapping[fx.Node, bool]
    output: fx.Node
    output_dims: Dims
    core: tuple[fx.Node, ...]
    read: Mapping[fx.Node, Dims]
    emitter: Emitter
    ambient: Ambient
    where: str
    source_kernel: str | None = None
    masked_rows_count: bool = True
    masked_rows_are_finite: bool = False
    also: tuple[fx.Node, ...] = ()
    brought: tuple[fx.Node, ...] = ()
    rows: Mapping[fx.Node, tuple[Axis, ...]] = field(default_factory=dict)
    dropped: Mapping[fx.Node, tuple[Axis, ...]] = field(default_factory=dict)
    selecting: frozenset[fx.Node] = frozenset()
    limited: frozenset[Axis] = frozenset()
    fixed: frozenset[Axis] = frozenset()
    ties: Mapping[Axis, Axis] = field(default_factory=dict)
    magnitudes: tuple[float, ...] = ()
    scales: Mapping[fx.Node, float] = field(default_factory=dict)
    points: tuple[float, ...] = ()
    at_least: Mapping[Axis, int] = field(default_factory=dict)
    spelled: Mapping[int, Axis] = field(default_factory=dict)
    ranges: Mapping[fx.Node, tuple[float, float]] = field(default_factory=dict)
    implied: Mapping[fx.Node, str] = field(default_factory=dict)
    buffers: tuple[fx.Node, ...] = ()
    masks_mean: str = ""
    mask_reasons: tuple[Reason, ...] = ()
    formula: str = ""
    prototype: Match | None = None
    renamed: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Every node whose value the kernel gives, ``output`` first."""
        return (self.output, *self.also)

    @property
    def kind(self) -> Match:
        """The first of the matches that are equal but for their place."""
        return self.prototype or self

    def assuming_finite(self) -> Match:
        """The same for inputs without NaN and infinities."""
        return replace(self, attributes=self.attributes.assuming_finite(), rows={}, dropped={}, selecting=frozenset())


class RefusedError(Exception):
    """Raised inside a recogniser where it gives up on an anchor; becomes a :class:`NearMiss`."""

    def __init__(self, code: str, message: str, edit: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)
        self.edit = edit


@dataclass(frozen=True)
class NearMiss:
    """A subgraph with the op's anchor that was refused, and the smallest edit that would make it match.

    ``pieces`` are all calls that it is made of, where those may turn out to be pieces of something else; they do not where it
    ``is_whole``: then whatever else is missed among them is a piece of this.
    """

    op: str
    node: fx.Node
    reason: Reason
    edit: str
    where: str
    pieces: frozenset[fx.Node] = frozenset()
    is_whole: bool = False

    @classmethod
    def of(cls, op: str, node: fx.Node, refusal: RefusedError, edit: str | None = None) -> NearMiss:
        """What was refused at ``node``; with an edit of one's own."""
        return cls(op, node, refusal.reason, refusal.edit if edit is None else edit, where_of(node))


@dataclass(frozen=True)
class Failure:
    """An anchor at which a recogniser raised, by a fault of ours; the others are read all the same."""

    op: str
    where: str
    error: Exception
