"""Meanings of masks as tensors again: every claim is compared with what the traced function computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from canonical import without_places
from graphs import Symbols, at, capture, effects_of, in_order, number_of, output_of, parameters_of, symbols
from torch import Tensor, fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import Size, product, shape_of
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks.meaning import Axes, Meaning
from lz_compile.passes.masks.reading import Masks

HEADS = 2
#: The dimensions that are symbolic, and sizes (batch, queries, and tokens before them) to compare at.
DYNAMIC = (0, 1)
SIZES = ((3, 7, 5), (2, 13, 6), (4, 5, 9), (3, 2, 2))


@dataclass(frozen=True)
class Asked:
    """A mask of a traced function, with the axes of its dimensions."""

    module: fx.GraphModule
    node: fx.Node
    dims: Dims
    axes: Axes
    keeps: bool

    def read(self) -> Meaning | Reason:
        """What is claimed of it."""
        return Masks(effects_of(self.module)).read(self.node, self.dims, self.axes, keeps=self.keeps)


def ask(
    fn: Callable[..., Any],
    named: Mapping[str, Tensor],
    layout: str = "qk",
    *,
    dynamic: bool | Sequence[int] | None = False,
    keeps: bool = True,
) -> Asked:
    """Trace ``fn`` and take its result for a mask.

    Args:
        fn: what makes the mask.
        named: its arguments.
        layout: a letter per dimension of the result: ``b``, ``h``, ``q``, ``k``, ``1`` or ``n`` (batch times heads).
        dynamic: as for :func:`graphs.capture`.
        keeps: whether True keeps.
    """
    module = capture(fn, *named.values(), dynamic=dynamic)
    node = output_of(module)
    sizes = shape_of(_tensor(node))
    own = {letter: _axes(size) for letter, size in zip(layout, sizes, strict=True) if letter in "bhqk"}
    if "n" in layout:
        batch = sympy.cancel(sympy.sympify(sizes[0]) / HEADS)
        own |= {"b": _axes(int(batch) if batch.is_Integer else batch), "h": _axes(HEADS)}
    groups = {letter: own.get(letter, ()) for letter in "bhqk"}
    dims = tuple((*groups["b"], *groups["h"]) if letter == "n" else groups.get(letter, ()) for letter in layout)
    return Asked(module, node, dims, Axes(*groups.values()), keeps)


def _axes(size: Size) -> tuple[Axis, ...]:
    return () if size == 1 else (Axis(size),)


def _tensor(node: fx.Node) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None, f"{node.name} is no tensor"
    return tensor


def _arguments(module: fx.GraphModule, named: Mapping[str, Tensor]) -> tuple[list[Any], Symbols]:
    """The graph's inputs, sizes of tensors that it does not take included, and the number behind every symbol."""
    known: dict[Any, int] = dict(symbols(module, *in_order(module, named)))
    given: list[Any] = []
    for node in (each for each in module.graph.nodes if each.op == "placeholder"):
        source = node._dynamo_source
        value = eval(source.name if isinstance(source.name, str) else source.name(), {"L": named})
        given.append(value)
        if isinstance(node.meta["example_value"], torch.SymInt):
            known[node.meta["example_value"].node.expr] = value
    return given, known


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value, as it is when all is done."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def record(self, arguments: Sequence[Any]) -> dict[fx.Node, Any]:
        """The value of every node."""
        self.run(*arguments)
        return self.env


class Concrete:
    """The values of one run, over an index of batch, heads, queries and keys."""

    def __init__(self, asked: Asked, arguments: Sequence[Any], known: Symbols) -> None:
        self.asked, self.known = asked, known
        self.values = _Recorder(asked.module).record(arguments)
        self.order = [axis for group in asked.axes.groups for axis in group]
        sizes = [number_of(product(axis.size for axis in group), self.known) for group in asked.axes.groups]
        self.shape = torch.Size(sizes)

    @classmethod
    def of(cls, asked: Asked, named: Mapping[str, Tensor]) -> Concrete:
        """The values for arguments by their names."""
        return cls(asked, *_arguments(asked.module, named))

    def at(self, node: fx.Node, dims: Dims) -> Tensor:
        """A tensor of the graph at every index."""
        return at(self.values[node], dims, self.order, self.known).reshape(self.shape)

    def inside(self, found: Meaning) -> Tensor:
        """Where the band lets through."""
        queries, keys = self.shape[2:]
        row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
        inside = torch.ones(self.shape, dtype=torch.bool)
        if found.band is not None:
            distance = column - row - found.band.offset(queries, keys)
            if found.band.upper is not None:
                inside &= distance <= found.band.upper
            if found.band.lower is not None:
                inside &= distance >= found.band.lower
            assert inside.any(-1).all(), f"a query sees no key under {found.band} at {tuple(self.shape)}"
        return inside

    def reached(self, found: Meaning) -> Tensor:
        """Where the reach lets through."""
        kept = torch.ones(self.shape, dtype=torch.bool)
        for row in range(self.shape[2]) if found.reach is not None else ():
            first, last = found.reach.span(row, row + 1)  # type: ignore[union-attr]
            kept[:, :, row, :first] = False
            kept[:, :, row, last:] = False
        return kept

    def kept(self, found: Meaning) -> Tensor:
        """Where an exact meaning keeps."""
        kept = self.inside(found)
        for flag in found.flags:
            kept = kept & (self.at(flag.node, flag.dims) == flag.keeps)
        if found.documents is not None:
            same = found.documents
            kept = kept & (self.at(same.query.node, same.query.dims) == self.at(same.key.node, same.key.dims))
        return kept

    def check(self, found: Meaning) -> None:
        """Everything that is claimed, against the mask itself."""
        given = self.at(self.asked.node, self.asked.dims)
        if given.dtype == torch.bool:
            given = (given == self.asked.keeps).to(torch.float64)
        given = given.to(torch.float64)
        dropped = torch.inf if found.dropped is None else found.dropped
        outside = ~(self.inside(found) & self.reached(found))
        assert (given[outside] <= dropped).all(), "the mask keeps where it is said to drop"
        if not found.is_exact:
            return
        kept = self.kept(found)
        assert kept.all() or found.dropped is not None, "something is dropped after all"
        assert not (kept & ~self.reached(found)).any(), "the mask keeps what is out of reach"
        assert (given[~kept] <= dropped).all(), "the mask keeps where it is said to drop"
        if found.flags or found.documents is not None:
            assert (given[~kept] == dropped).all(), "rows without keys would differ"
        if found.slopes is None:
            assert (given[kept] == found.kept).all(), "the mask drops where it is said to keep"
        else:
            self._check_slopes(found, given, kept)

    def _check_slopes(self, found: Meaning, given: Tensor, kept: Tensor) -> None:
        assert found.slopes is not None, "asked where there are slopes"
        slope = self.at(found.slopes.node, found.slopes.dims).to(torch.float64) * found.slopes.factor
        rest = given - slope * torch.arange(self.shape[3])
        spread = torch.where(kept, rest, -torch.inf).amax(-1) - torch.where(kept, rest, torch.inf).amin(-1)
        seen = kept.any(-1)
        assert (spread[seen] <= 1e-4 * given[kept].abs().amax().clamp(min=1.0)).all(), "not linear with these slopes"


# ---- functions of named arguments -------------------------------------------------------------------------------------


def pool(batch: int, queries: int, past: int, seed: int = 0) -> Mapping[str, Tensor]:
    """Arguments by name: tokens, a cache before them, and what belongs to all keys."""
    random = torch.Generator().manual_seed(seed)
    keys = queries + past
    positions = torch.arange(queries).repeat(batch, 1)
    positions[:, queries // 2 :] -= queries // 2
    return {
        "x": torch.zeros(batch, queries),
        "past": torch.zeros(batch, past),
        "padding": torch.randint(0, 2, (batch, queries), generator=random),
        "history": torch.randint(0, 2, (batch, keys), generator=random),
        "ids": torch.randint(0, 3, (batch, queries), generator=random),
        "positions": positions,
        "start": torch.tensor(past),
        "given": torch.randint(0, 2, (batch, 1, queries, queries), generator=random).bool(),
        "scores": torch.randn(batch, 1, queries, queries, generator=random),
        "slopes": torch.rand(HEADS, generator=random),
    }


def named(fn: Callable[..., Any], sizes: Sequence[int], seed: int = 0) -> Mapping[str, Tensor]:
    """The arguments of a function."""
    values = pool(*sizes, seed=seed)  # type: ignore[misc]
    return {name: values[name] for name in parameters_of(fn)}


def asked(fn: Callable[..., Any], layout: str = "qk", *, dynamic: bool = False, keeps: bool = True) -> Asked:
    """The mask that a function of these arguments makes."""
    return ask(fn, named(fn, SIZES[0]), layout, dynamic=DYNAMIC if dynamic else False, keeps=keeps)


def told(found: Meaning | Reason) -> str:
    """A meaning in a line."""
    if isinstance(found, Reason):
        return without_places(found.message)
    parts = [found.label]
    if found.band is not None:
        lower, upper = ("" if bound is None else bound for bound in (found.band.lower, found.band.upper))
        parts.append(f"{lower}..{upper}" + (" from the end" if found.band.at_end else ""))
    parts += [f"{'' if flag.keeps else 'not '}{flag.node.name}" for flag in found.flags]
    if found.documents is not None:
        parts.append(f"{found.documents.query.node.name} = {found.documents.key.node.name}")
    if found.slopes is not None:
        parts.append(f"{found.slopes.factor:g} * {found.slopes.node.name}")
    if found.reach is not None:
        parts.append(f"reach {found.reach.spans}")
    return ", ".join([*parts, *([] if found.is_exact else ["in part"])])


def check(fn: Callable[..., Any], question: Asked, found: Meaning, sizes: Sequence[Sequence[int]]) -> None:
    """Compare the claim with the mask, at every one of these sizes."""
    for seed, size in enumerate(sizes):
        Concrete.of(question, named(fn, size, seed)).check(found)
