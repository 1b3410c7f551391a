"""Which values of a graph are the largest or the second largest of a tensor along a dimension, whatever they were found by.

What lies between an ordering of a tensor and a value of one element per row is run on a few rows at a small size, and held
against the two largest. How it is spelled (``topk``, ``sort``, ``kthvalue``, a maximum of what a maximum was masked in) does
not matter. A run proposes, the proof of the blend decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.blend.gate import Rank
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.snapshot import described
from lz_compile.passes.graph.view import known_tensor, reached, read, tensor_of
from lz_compile.passes.sampling.excerpt import Affected, Excerpt, Scores, excerpt
from lz_compile.passes.sampling.ordering import is_ordering, ordered_dim
from lz_compile.passes.sampling.tried import Tried, sizes_for

#: What takes one element of a row, or gives one.
_PICKS = frozenset({"getitem", "select", "narrow", "amax", "where", "diff"})
#: What gives a maximum, beside other things.
_ROOTS = frozenset({"topk", "sort", "msort", "kthvalue", "max", "amax"})
#: So many calls above a value an ordering is looked for; what is no more than so many steps below one comes into question.
_REACH, _STEPS = 32, 6
#: Larger numbers count nothing.
_MOST = 2**20
#: Of more classes than this, so many are tried, if the source names no other number.
_FEW = 64
#: What is filled in so that it is no maximum.
_BOTTOM = -1e30
#: Those of the largest and of the second largest: each alone, and the margin.
_FORMS = ((1, 0), (0, 1), (1, -1), (-1, 1))


def has_ranks(effects: Effects) -> bool:
    """Whether a graph calls anything that gives a maximum."""
    return any(effects.name(node) in _ROOTS for node in effects.calls)


@dataclass
class TriedRanks:
    """The order statistics of one graph, by what is found between an ordering and a value when it is run."""

    effects: Effects
    _found: dict[fx.Node, Rank | None] = field(default_factory=dict)
    _affected: dict[fx.Node, Affected] = field(default_factory=dict)
    _forms: dict[tuple[object, ...], tuple[int, int, bool] | None] = field(default_factory=dict)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self.of(node) is not None

    def of(self, node: fx.Node) -> Rank | None:
        """Which statistic a value is; None for others."""
        if node not in self._found:
            ranks = (self._probed(node, *each) for each in reversed(self._sources(node)))
            self._found[node] = next((rank for rank in ranks if rank is not None and not self._is_written(rank)), None)
        return self._found[node]

    @cached_property
    def _near(self) -> frozenset[fx.Node]:
        """What is computed from something ordered in a few steps."""
        found = set[fx.Node]()
        for node, call in self.effects.calls.items():
            if call is not None and ordered_dim(call) is not None:
                edge = own = {node}
                for _ in range(_STEPS):
                    edge = {user for each in edge for user in each.users} - own
                    own = own | edge
                found |= own
        return frozenset(found)

    def _is_written(self, rank: Rank) -> bool:
        effects = self.effects
        last = max(rank.nodes, key=effects.position.__getitem__)
        return effects.has_mutations and effects.overwritten_after(rank.source, rank.source, last) is not None

    def _sources(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """The tensors above that are ordered along a dimension, and have as many other elements; the nearest first."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        if call is None or call.is_inplace or call.name not in _PICKS or tensor is None:
            return []
        if not tensor.is_floating_point() or node not in self._near:
            return []
        wanted, found = [size for size in shape_of(tensor) if size != 1], dict[tuple[fx.Node, int], None]()
        for above in map(self.effects.calls.get, reached([node], most=_REACH)):
            dim = None if above is None else ordered_dim(above)
            if above is None or dim is None:
                continue
            if [size for place, size in enumerate(_shape(above.input)) if size != 1 and place != dim] == wanted:
                found[above.input, dim] = None
        return list(found)

    def _probed(self, node: fx.Node, source: fx.Node, dim: int) -> Rank | None:
        if source not in self._affected:
            self._affected[source] = Affected(self.effects, source)
        dims = fresh(_shape(source))
        found = excerpt(self.effects, Scores(source, dims, dims[dim][0]), self._affected[source], node)
        if found is None or found.leaves or not _is_exact(found):
            return None
        classes, is_spelled = _classes(found)
        nodes = sorted({*found.core, *found.read})
        key = (dim, classes, *map(_kind, (source, *nodes)), *described(nodes, {}, [source]))
        if key not in self._forms:  # equal layers are run once
            tried = Tried(found)
            with isolated():
                self._forms[key] = _form_of(tried, dim, classes)
            if tried.failures:
                tried.tell_failures()
        form = self._forms[key]
        if form is None:
            return None
        is_sorted = any(map(is_ordering, found.core))
        return Rank(node, source, dim, *form[:2], frozenset(found.core), form[2], is_sorted, is_spelled)


def _is_exact(found: Excerpt) -> bool:
    """Whether nothing between is rounded, or detached."""
    tensors = map(tensor_of, (found.entry.node, *found.core))
    kinds = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return len(kinds) == 1 and not any(call.name == "detach" for call in map(read, found.core) if call is not None)


def _classes(found: Excerpt) -> tuple[int, bool]:
    """At how many elements every number of the source has its meaning, and whether that is a number of the source."""
    size = found.entry.vocab.size
    counts = [abs(int(number)) for number in found.numbers if abs(number) < _MOST and number == int(number)]
    if isinstance(size, int) and any(size - 2 <= count <= size for count in counts):
        return size, True
    least = max([_FEW + 1, *(2 * count + 1 for count in counts)])
    return (min(least, size) if isinstance(size, int) else least), False


def _form_of(tried: Tried, dim: int, classes: int) -> tuple[int, int, bool] | None:
    """How often the largest and the second largest are in the value, and whether equal ones count once."""
    runs = []
    for x in _inputs(tried.found, dim, classes):
        value = _value(tried, x, dim)
        if value is None:
            return None
        runs.append((x, value))
    for is_distinct in (False, True):
        for first, second in _FORMS:
            expected = (_expected(x, dim, first, second, is_distinct) for x, _ in runs)
            # Where all are equal, what a source fills in is left: nobody reads it.
            if all(bool(((value == e) | e.isinf()).all()) for (_, value), e in zip(runs, expected, strict=True)):
                return first, second, is_distinct
    return None


def _inputs(found: Excerpt, dim: int, classes: int) -> Iterator[torch.Tensor]:
    """Rows near zero, near one another and as low (and as high) as anything that is filled in may hide; with equal ones."""
    sizes = sizes_for(found.entry, classes)
    x = torch.randn([sizes[own[0]] if own else 1 for own in found.entry.dims], dtype=torch.float64)
    kind = known_tensor(found.entry.node).dtype
    lowest = max(_BOTTOM, torch.finfo(kind).min / 2)
    spread = 0.5 + 0.4 * torch.rand_like(x)
    yield from (x, x * 1e-9, lowest * spread, -lowest * spread)
    for count in range(2, min(classes, 4)):
        yield x.scatter(dim, x.argsort(dim).narrow(dim, 0, count - 1), x.amax(dim, keepdim=True).expand_as(x))
    if classes == 2:
        yield torch.ones_like(x)


def _expected(x: torch.Tensor, dim: int, first: int, second: int, is_distinct: bool) -> torch.Tensor:
    top = x.topk(2, dim).values
    largest, other = top.unbind(dim)
    if is_distinct:
        other = x.masked_fill(x == top.narrow(dim, 0, 1), -torch.inf).amax(dim)
    return first * largest + second * other if second else largest


def _value(tried: Tried, x: torch.Tensor, dim: int) -> torch.Tensor | None:
    """What the source gives of ``x``, without the dimension of the classes; None where it is no number for each row."""
    value, rows = tried.run(x, {}, sizes_for(tried.found.entry, x.shape[dim])), [*x.shape[:dim], *x.shape[dim + 1 :]]
    is_one = value is not None and [size for size in value.shape if size != 1] == [size for size in rows if size != 1]
    return value.reshape(rows) if value is not None and is_one else None


def _kind(node: fx.Node) -> tuple[object, ...]:
    tensor = tensor_of(node)
    return () if tensor is None else (tensor.dtype, *shape_of(tensor))


def _shape(node: fx.Node) -> tuple[object, ...]:
    return shape_of(known_tensor(node))
