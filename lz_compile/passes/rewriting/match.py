"""What recognisers yield: a match, in three parts; how most are emitted, by a table; and the driver of most recognisers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import Size, product
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import Operands
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import Failure, MutatedError, NearMiss, RefusedError, refusal_of, where_of
from lz_compile.passes.graph.view import EMITTED
from lz_compile.passes.rewriting.builder import Builder, Groups

if TYPE_CHECKING:
    from lz_compile.passes.rewriting.core import Core


class Emitter(Protocol):
    """How a match is put into a kernel's form: canonical operands in, the original's layout out."""

    def operands(self, builder: Builder) -> Any:
        """The op's operands in its canonical layout."""

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's result in the layout and dtype of the node that it replaces; a tuple where there are several."""

    def attributes_at(self, sizes: Mapping[Axis, int]) -> OpAttributes:
        """The op's attributes for a proof at other sizes."""

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What an implied input holds at other sizes; ``given`` is a random tensor in its place."""


@dataclass(frozen=True)
class Input:
    """A node at the edge of a match: its axes, and what is known of its values.

    ``fill`` is set where it may hold masking constants: True if they are known to be finite. ``keeps`` is set of boolean
    masks: True if True keeps. Any slice along the axes in ``rows`` may hold NaN without the rest of the result noticing; of
    those in ``dropped``, one that masks drop which ``selects`` marks. ``implied`` says how the attributes imply the values:
    the replacement reads them for the rest of what they say, or not at all.

    For proofs, ``range`` are the least number that it may hold and one that it does not reach, ``counts`` the axis of which
    it is the index (in any order where it ``is_shuffled``), and random values are multiplied by ``scale``, so that what is
    multiplied again and again neither grows nor dies.
    """

    dims: Dims
    fill: bool | None = None
    keeps: bool | None = None
    selects: bool = False
    rows: tuple[Axis, ...] = ()
    dropped: tuple[Axis, ...] = ()
    implied: str | None = None
    range: tuple[float, float] | None = None
    counts: Axis | None = None
    is_shuffled: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Site:
    """What is replaced, and where.

    ``core`` are the nodes that a rewrite makes superfluous, in graph order, ``output`` last; ``read`` every node between edge
    and output with the axes of its dimensions. ``extra_outputs`` are further nodes whose values the kernel gives: of the
    emitter's result, ``output`` is the first then. ``hoisted`` are those that are to be computed before all of these.
    """

    output: fx.Node
    output_dims: Dims
    core: tuple[fx.Node, ...]
    ambient: Ambient
    where: str
    read: Mapping[fx.Node, Dims] = field(default_factory=dict)
    extra_outputs: tuple[fx.Node, ...] = ()
    hoisted: tuple[fx.Node, ...] = ()

    @classmethod
    def of(cls, core: Core, output_dims: Dims, read: Mapping[fx.Node, Dims]) -> Site:
        """The place of what has one output, the last node of its core."""
        return cls(core.output, output_dims, core.nodes, core.ambient, where_of(core.output), dict(read))


@dataclass(frozen=True)
class Found:
    """What was found: the op's own description of sizes and dtypes for kernel selection (``facts``), and its operands.

    ``formula`` says for people what is computed. ``source_kernel`` is the kernel that the source itself calls. ``buffers``
    are those on whose values it rests that inputs are implied. ``masks_mean`` names what was proven of the masks,
    ``notes`` say what a user may want to know: why masks are general ones, why keys are copied, or weights unpacked.
    """

    attributes: OpAttributes
    facts: Any
    inputs: Mapping[fx.Node, Input]
    operands: Mapping[str, fx.Node]
    emitter: Emitter
    formula: str = ""
    source_kernel: str | None = None
    buffers: tuple[fx.Node, ...] = ()
    masks_mean: str = ""
    notes: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Trial:
    """What a proof tries, and at which sizes.

    ``limited`` are the axes (of features) on whose sizes kernels put limits: a proof of such a kernel keeps them. ``pinned``
    are those whose sizes the source may spell out as numbers: every proof keeps them. ``ties`` are axes that are others by
    another name, and have their size. ``least`` are the smallest sizes at which a proof means anything, ``literal_sizes``
    integers among the source's arguments that are the size of an axis, and change with it.

    Operands are of size 1 and ``largest``. ``magnitudes`` are further sizes, ``points`` numbers at which a function may have
    a corner, to be tried exactly. ``masked_rows_count`` is False where the source's rounding alone decides what a row
    without any kept element gives, ``masked_rows_are_finite`` True where such a row gives finite numbers.
    """

    limited: frozenset[Axis] = frozenset()
    pinned: frozenset[Axis] = frozenset()
    ties: Mapping[Axis, Axis] = field(default_factory=dict)
    least: Mapping[Axis, int] = field(default_factory=dict)
    literal_sizes: Mapping[int, Axis] = field(default_factory=dict)
    largest: float = 12.0
    magnitudes: tuple[float, ...] = ()
    points: tuple[float, ...] = ()
    masked_rows_count: bool = True
    masked_rows_are_finite: bool = False


@dataclass(frozen=True)
class Match:
    """A subgraph that computes ``op``: what is replaced, what was found there, and how that is to be tried.

    A match that equals an earlier one but for its place has that as its ``prototype``; ``renamed`` gives, for the nodes of
    the prototype, its own, and the emitter speaks of the prototype's.
    """

    op: str
    site: Site
    found: Found
    trial: Trial = Trial()
    prototype: Match | None = None
    renamed: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> Mapping[fx.Node, Dims]:
        """The nodes at its edge with their axes."""
        return {node: each.dims for node, each in self.found.inputs.items()}

    @property
    def core(self) -> tuple[fx.Node, ...]:
        """What a rewrite makes superfluous."""
        return self.site.core

    @property
    def read(self) -> Mapping[fx.Node, Dims]:
        """Every node between, with its axes."""
        return self.site.read

    @property
    def literal_sizes(self) -> Mapping[int, Axis]:
        """Numbers that are sizes."""
        return self.trial.literal_sizes

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Every node whose value the kernel gives, ``output`` first."""
        return (self.site.output, *self.site.extra_outputs)

    @property
    def kind(self) -> Match:
        """The first of the matches that are equal but for their place."""
        return self.prototype or self

    def moved(self, names: Mapping[fx.Node, fx.Node], prototype: Match, renamed: Mapping[fx.Node, fx.Node]) -> Match:
        """The same of other nodes, which ``names`` gives; what is an input there need not be hoisted."""
        site, found, output = self.site, self.found, names[self.site.output]
        site = replace(
            site,
            output=output,
            extra_outputs=tuple(names[node] for node in site.extra_outputs),
            hoisted=tuple(names[node] for node in site.hoisted if node in names and names[node].op != "placeholder"),
            core=tuple(names[node] for node in site.core),
            read={names[node]: dims for node, dims in site.read.items() if node in names},
            where=where_of(output),
        )
        found = replace(
            found,
            inputs={names[node]: each for node, each in found.inputs.items()},
            operands={name: names.get(node, node) for name, node in found.operands.items()},
            buffers=tuple(names.get(node, node) for node in found.buffers),
        )
        return replace(self, site=site, found=found, prototype=prototype, renamed=renamed)

    def assuming_finite(self) -> Match:
        """The same for inputs without NaN and infinities."""
        inputs = {node: replace(each, rows=(), dropped=(), selects=False) for node, each in self.found.inputs.items()}
        attributes = self.found.attributes.assuming_finite()
        return replace(self, found=replace(self.found, attributes=attributes, inputs=inputs))


@dataclass(frozen=True)
class Cell:
    """One operand: a tensor, or a formula of the leaves of ``region``, as a tensor with one dimension per group of axes.

    Axes of a group that a tensor lacks are repeated where it ``is_whole``, and its gradient ends here where it
    ``is_detached``. A formula is computed in ``dtype``.
    """

    what: Leaf | sympy.Expr
    groups: Groups
    is_whole: bool = False
    is_detached: bool = False
    region: Region | None = None
    dtype: torch.dtype = torch.float32

    def value(self, builder: Builder) -> Any:
        """The operand in its canonical layout."""
        if isinstance(self.what, Leaf):
            value = builder.arrange(builder.value(self.what.node), self.what.dims, self.groups, expand=self.is_whole)
            return value.detach() if self.is_detached else value
        assert self.region is not None, "a formula speaks of the leaves of a region"
        return builder.evaluate(self.what, self.region.leaves, self.groups, self.dtype)


class TableEmitter:
    """What is alike in emitters: operands by :meth:`table`, and a result that only moves.

    The attributes are the same at all sizes, and imply nothing about the values of inputs. What is different overrides it.
    ``result_shape`` are the dimensions of the kernel's result by the letters of the op's ``SHAPES``, as operands' are there.
    """

    kind: ClassVar[type[Operands]]
    result_shape: ClassVar[str] = ""
    attrs: Any
    output_dims: Dims

    def table(self) -> Mapping[str, Cell]:
        """What each operand is; an emitter that makes its operands itself has no table."""
        return {}

    @property
    def runs(self) -> Mapping[str, tuple[Axis, ...]]:
        """The axes that each letter of the op's legend stands for."""
        return {}

    def axes(self, letters: str) -> tuple[tuple[Axis, ...], ...]:
        """The axes of some dimensions, one group for each; that of one element has none."""
        runs = self.runs
        return tuple(() if letter == "1" else runs[letter.removesuffix("|1")] for letter in letters.split())

    def extents(self, letters: str) -> list[Size]:
        """The sizes of some dimensions."""
        return [product(axis.size for axis in group) for group in self.axes(letters)]

    @property
    def groups(self) -> Groups:
        """The axes of the kernel's result, one group for each of its dimensions."""
        return self.axes(self.result_shape)

    def operands(self, builder: Builder) -> Any:
        """The op's operands in its canonical layout, in the order of the table."""
        return self.kind(**{name: cell.value(builder) for name, cell in self.table().items()})

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's result in the layout of the node that it replaces."""
        return builder.restore(value, self.groups, self.output_dims)

    def attributes_at(self, _sizes: Mapping[Axis, int]) -> Any:
        """The attributes for a proof at other sizes: the same."""
        return self.attrs

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """Nothing is implied here.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"{node.name} is implied by no attribute")


Outcome = Match | NearMiss | Failure


def always(_anchor: fx.Node, _refusal: RefusedError) -> bool:
    """Every refusal is worth telling."""
    return True


@dataclass
class Driver:
    """Reads the anchors of one graph for ``op``.

    What reads an anchor returns a match, a near miss, or None where nothing speaks for the op. :class:`RefusedError` and
    :class:`MutatedError` become near misses, where ``is_meant`` says that the op was meant. :class:`LayoutError` is no word
    worth telling: what has no exact form in axes is not the op. All else is a :class:`Failure` of this anchor alone.

    ``covered`` are the nodes of matches so far: none of them is an anchor of another.
    """

    op: str
    is_meant: Callable[[fx.Node, RefusedError], bool] = always
    covered: set[fx.Node] = field(default_factory=set)

    def walk(
        self,
        nodes: Iterable[fx.Node],
        is_anchor: Callable[[fx.Node], bool],
        read: Callable[[fx.Node], Match | NearMiss | None],
    ) -> Iterator[Outcome]:
        """What every anchor among ``nodes`` is; what kernels emitted is none."""
        for node in nodes:
            if node not in self.covered and EMITTED not in node.meta and is_anchor(node):
                yield from self.at(node, read)

    def at(self, anchor: fx.Node, read: Callable[..., Match | NearMiss | None], *arguments: Any) -> Iterator[Outcome]:
        """What ``read(anchor, *arguments)`` says that one anchor is."""
        found: Outcome | None
        try:
            found = read(anchor, *arguments)
        except (RefusedError, MutatedError) as error:
            refusal = refusal_of(error)
            found = NearMiss.of(self.op, anchor, refusal) if self.is_meant(anchor, refusal) else None
        except LayoutError:
            found = None
        except Exception as error:  # noqa: BLE001 the pipeline makes an event of it, or raises it where that is wanted
            found = Failure(self.op, where_of(anchor), error)
        if isinstance(found, Match):
            self.covered.update(found.core)
        if found is not None:
            yield found
