"""RMSNorm and LayerNorm in all of their spellings.

The anchor is a statistic of a row, such as a mean of squares. The row is what its polynomial is in; everything pointwise
that follows is an expression in the row and its moments (:mod:`moments`), which is a normalisation if it is
``gain * (row - mean) / sqrt(variance + eps) + shift``, with gain and shift from weights only. The last such result is taken.
What becomes superfluous, and what that is to a kernel, is asked of what was found (:mod:`matching`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import sympy
from torch import fx

from lz_compile.ground.sizes import Size, product, shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.edge import Edge, behind_casts
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.moments import (
    CALLS,
    FUNCTIONS,
    LARGEST,
    MEAN,
    MEAN_ABSOLUTE,
    MEAN_SQUARE,
    ROW,
    STATISTICS,
    Moments,
)
from lz_compile.passes.formula.normal_form import NormalForm, normal_form
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.formula.statistics import as_mean, is_of_rows, row_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, NearMiss, RefusedError, refusal_of, told
from lz_compile.passes.graph.view import Call, is_floating, reached, tensor_of, tensor_operands

OP = "norm"
#: How many operations may lie between a row and its statistic, how many results of a statistic are looked at, and how
#: many tensors are tried as the row.
_BEFORE, _AFTER, _SOURCES = 6, 24, 8
#: What the squares that are averaged may be computed by at last.
_SQUARES = frozenset({"pow", "square", "mul", "div"})
_ROOTS = (
    frozenset("rsqrt sqrt log log2 log10 std std_mean norm linalg_norm linalg_vector_norm normalize".split())
    | CALLS.keys()
)
#: By what rows are divided that are no normalised ones.
_MAGNITUDES = (MEAN_SQUARE, MEAN_ABSOLUTE, LARGEST)


def is_worth_reading(effects: Effects, anchor: fx.Node, results: list[fx.Node]) -> bool:
    """Whether what is reduced may be squares, and a root is taken of it."""
    calls = [call for call in map(effects.calls.get, (anchor, *results)) if call is not None]
    inner = _reduced(effects, calls[0])
    if inner is not None and inner.name == "abs":
        return calls[0].name in ("mean", "sum", "amax") and any(call.name in ("div", "reciprocal") for call in calls)
    if not any(call.name in _ROOTS or (call.name == "pow" and not _is_whole(call.get("exponent"))) for call in calls):
        return False
    return _may_be_of_squares(effects, calls[0])


def _reduced(effects: Effects, statistic: Call) -> Call | None:
    """What computes that which a statistic reduces."""
    inner = effects.calls.get(row_of(statistic))
    while inner is not None and (is_cast(inner) or layout.rearranges(inner)):
        inner = effects.calls.get(inner.input)
    return inner


def _may_be_of_squares(effects: Effects, statistic: Call) -> bool:
    inner = _reduced(effects, statistic)
    is_plain = statistic.name in ("mean", "sum", "amax")
    return not is_plain or (statistic.name != "amax" and inner is not None and inner.name in _SQUARES)


def _is_of_squares(effects: Effects, call: Call | None) -> bool:
    return call is not None and call.name in STATISTICS and _may_be_of_squares(effects, call)


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent == int(exponent)


def sources(effects: Effects, anchor: fx.Node) -> Iterator[fx.Node]:
    """What the row may be, the likeliest first; looks no further than it is asked."""
    return islice(_sources(effects, anchor), _SOURCES)


def _sources(effects: Effects, anchor: fx.Node) -> Iterator[fx.Node]:
    """What the row may be: tensors before the anchor, behind pointwise operations; the nearest first, before any cast.

    What is centred comes before the centred: the tensor whose mean was subtracted.
    """
    call = effects.calls[anchor]
    assert call is not None, "an anchor is a call"
    seen: set[fx.Node] = set()
    level = [row_of(call)]
    for depth in range(_BEFORE):
        following: list[fx.Node] = []
        for node in level:
            inner = effects.calls.get(behind_casts(effects, node))
            is_read = inner is not None and (is_pointwise(inner) or layout.rearranges(inner) or inner.name in FUNCTIONS)
            operands = tensor_operands(inner.node) if inner is not None and is_read and not _is_of_pairs(inner) else []
            following += operands
            is_square = depth == 0 and call.name in ("mean", "sum")  # a mean of the row itself is no second moment
            found = [] if call.name in CALLS else [_averaged(effects, each) for each in operands]
            for each in (*found, None if is_square else node):
                source = None if each is None else behind_casts(effects, each)
                if source is not None and source not in seen and is_floating(source):
                    seen.add(source)
                    yield source
        level = following if call.name not in CALLS else []


def _is_of_pairs(call: Call | None) -> bool:
    return call is not None and call.name == "sub" and contraction.is_outer(call)


def _averaged(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The tensor whose mean ``node`` is, or whose sum over a number."""
    call = effects.calls.get(node)
    while call is not None and (is_cast(call) or layout.rearranges(call) or call.name in ("getitem", "mul", "div")):
        operands = tensor_operands(call.node) if call.name in ("mul", "div") else [call.input]
        call = effects.calls.get(operands[0]) if len(operands) == 1 else None
    is_named = call is not None and (call.name in ("mean", "sum", "var_mean", "std_mean") or as_mean(call) is not None)
    return row_of(call) if call is not None and (is_named or is_of_rows(call)) else None


def results_of(effects: Effects, anchor: fx.Node) -> list[fx.Node]:
    """What is computed from a statistic by pointwise operations, in graph order."""

    def users(node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if _is_read(effects.calls.get(user)))

    found = filter(is_floating, reached([anchor], users, _AFTER))
    return sorted(found, key=effects.position.__getitem__)


def _is_read(call: Call | None) -> bool:
    return call is not None and (
        is_pointwise(call) or layout.rearranges(call) or call.name in STATISTICS or call.name in FUNCTIONS
    )


#: What is made of a normalisation that was found.
Made = TypeVar("Made")


@dataclass(frozen=True)
class Normalised:
    """A row, the source of ``moments``, that is normalised as ``form`` says; ``output`` has the result."""

    moments: Moments
    form: NormalForm
    output: fx.Node
    output_dims: Dims


@dataclass(frozen=True)
class Read:
    """What a result is in a row, the source of ``moments``, and in its statistics."""

    moments: Moments
    expression: sympy.Expr
    dims: Dims

    @classmethod
    def of(cls, effects: Effects, source: fx.Node, output: fx.Node) -> Read:
        """The result ``output`` in the row ``source``.

        Raises:
            RefusedError: a reduction of the row has no reading in moments.
            LayoutError: the layout has no exact form in axes.
        """
        dims = fresh(shape_of(tensor_of(output)))  # type: ignore[arg-type]
        moments = Moments(effects, source)
        return cls(moments, moments.read(output, dims), dims)


def recognise(
    effects: Effects, anchor: fx.Node, results: list[fx.Node], made: Callable[[Normalised], Made]
) -> Made | NearMiss | None:
    """What is ``made`` of the last of ``results`` that is a normalised row, which may refuse it, or why there is none."""
    refused: RefusedError | None = None
    known: dict[tuple[fx.Node, fx.Node], Read | None] = {}
    for source in sources(effects, anchor):
        edge = Edge(effects, source)
        wanted = _size(source)
        for output in reversed([each for each in results if _size(each) == wanted and edge.encloses(each)]):
            known[source, output] = None
            try:
                known[source, output] = read = Read.of(effects, source, output)
                return made(_normalised(read, output, anchor))
            except (RefusedError, MutatedError) as error:
                refusal = refusal_of(error)
                if refusal.reason.code != "NO_NORM":
                    refused = refused or refusal
            except LayoutError:
                continue
    for (_, output), known_read in known.items() if refused is None else ():
        try:
            if known_read is not None:
                return made(_normalised(known_read, output, anchor, is_by_rows=True))
        except (RefusedError, MutatedError):
            continue
    refused = _of_several(effects, anchor, results, known) or refused
    return None if refused is None else NearMiss.of(OP, anchor, refused)


def _of_several(
    effects: Effects, anchor: fx.Node, results: list[fx.Node], known: Mapping[tuple[fx.Node, fx.Node], Read | None]
) -> RefusedError | None:
    """Why a row that is divided by a root of squares of its own and of another tensor is no normalised one.

    ``known`` are results that were read already, or could not be.
    """
    at, calls = effects.position, effects.calls
    others = (node for node in at if at[node] > at[anchor] and _is_of_squares(effects, calls.get(node)))
    first = min((at[node] for node in others), default=None)
    late = [each for each in reversed(results) if first is not None and at[each] > first]
    counts = Counter(effects.numbers.values())
    for source in sources(effects, anchor):
        is_twice = counts[effects.numbers.get(source, -1)] > 1  # then reading tells that both meet in a result
        for output in (each for each in (results[::-1] if is_twice else late) if _size(each) == _size(source)):
            try:
                read = known[source, output] if (source, output) in known else Read.of(effects, source, output)
            except (RefusedError, MutatedError, LayoutError):
                continue
            other = _beside_squares(read) if read is not None and read.expression.has(ROW) else None
            if other is not None and at[other] > at[anchor]:  # told once, by the first
                text = f"{source.name} is divided by a root of its own squares together with {other.name}, another tensor's"
                edit = "normalise the concatenation of all of them, and split the result"
                return RefusedError("SEVERAL_TENSORS", text, edit)
    return None


def _beside_squares(read: Read) -> fx.Node | None:
    """The first mean of squares of another tensor that stands under the same root as that of the row."""
    moments = read.moments
    roots = [power.base for power in read.expression.atoms(sympy.Pow) if not power.exp.is_integer]
    leaves = moments.region.leaves_in(*(base for base in roots if base.has(MEAN_SQUARE))).values()

    def summands(node: fx.Node) -> list[fx.Node]:  # what does not depend on the row is read no further
        call = moments.effects.calls.get(node)
        return tensor_operands(node) if call is not None and is_pointwise(call) else []

    near = reached((leaf.node for leaf in leaves), summands, _AFTER)
    found = [node for node in near if _is_of_squares(moments.effects, moments.effects.calls.get(node))]
    return min(found, key=moments.effects.position.__getitem__, default=None)


def _size(node: fx.Node) -> Size:
    return product(shape_of(tensor_of(node)))  # type: ignore[arg-type]


def _normalised(read: Read, output: fx.Node, anchor: fx.Node, *, is_by_rows: bool = False) -> Normalised:
    """The normalisation of a row that ends in ``output``; ``is_by_rows``: weights may be one per row.

    Raises:
        RefusedError: it is none, with the reason; ``NO_NORM`` where nothing speaks for one.
    """
    moments, region = read.moments, read.moments.region
    form = normal_form(read.expression)
    is_read = anchor in {*moments.squared, *region.interior, *leaf_nodes(region)}
    is_of_rows = bool(moments.reduced and moments.squared and is_read)
    if form is None or not is_of_rows:
        edit = "divide the row by the root of its mean square"
        if is_of_rows and _is_divided(read) and not _is_rounded(read, output):
            beside = _beside_magnitudes(read)
            if beside and normal_form(read.expression.xreplace(dict.fromkeys(beside, sympy.S(_SOME)))) is not None:
                raise _without_epsilon(read, beside)
            names = {symbol: sympy.Symbol(leaf.node.name) for symbol, leaf in region.leaves.items()}
            formula = str(read.expression.xreplace(names))[:_MOST_TEXT]
            raise RefusedError(
                "NOT_OVER_A_ROOT", f"{formula} is no row over the root of its mean square or variance", edit
            )
        raise RefusedError("NO_NORM", "the result is no normalised row", edit)
    form = replace(form, gain=moments.by_leaves(form.gain), shift=moments.by_leaves(form.shift))
    _check_weights(region, form, moments, is_by_rows=is_by_rows)
    return Normalised(moments, form, output, read.dims)


def _beside_magnitudes(read: Read) -> set[sympy.Symbol]:
    """What is not known while compiling, under a root or a fraction with a magnitude of the row: of tensors, no factors."""
    powers = [power for power in read.expression.atoms(sympy.Pow) if power.has(*_MAGNITUDES)]
    products = [each for power in powers for each in power.base.atoms(sympy.Mul) if each.has(*_MAGNITUDES)]
    factors = {symbol for each in products for symbol in each.free_symbols} & read.moments.region.leaves.keys()
    return {symbol for power in powers for symbol in power.free_symbols} - factors - {ROW, MEAN, *_MAGNITUDES}


def _without_epsilon(read: Read, beside: set[sympy.Symbol]) -> RefusedError:
    """Why a row over the root of a mean square is no norm yet: its epsilon is no number."""
    leaves = read.moments.region.leaves
    tensors = [told(leaves[symbol].node) for symbol in sorted(beside & leaves.keys(), key=str)]
    if tensors:
        text = f"the epsilon beside the root of a mean square comes from {' and '.join(tensors)}, and has no value yet"
        return RefusedError("EPSILON_UNKNOWN", text, "give the epsilon as a number")
    text = f"the epsilon beside the root of a mean square depends on the size {min(beside, key=str)}"
    return RefusedError("SIZE_UNKNOWN", text, "mark that dimension as static (torch._dynamo.mark_static)")


#: A value, for one that is not known.
_SOME = 7
#: So much is told of a formula.
_MOST_TEXT = 100


def _is_divided(read: Read) -> bool:
    """Whether a result is affine in the row, by a factor that falls with its magnitude; a direction between points is not."""
    if _is_of_pairs(read.moments.effects.calls.get(read.moments.source)):
        return False
    slope = sympy.diff(read.expression, ROW)
    powers = slope.atoms(sympy.Pow)
    return not slope.has(ROW) and any(each.exp.is_negative and each.has(*_MAGNITUDES) for each in powers)


def _is_rounded(read: Read, output: fx.Node) -> bool:
    """Whether a row is scaled to be rounded: it is quantised."""
    return any(read.moments.effects.name(user) in ("round", "floor", "trunc") for user in output.users)


#: Functions of weights that can be written out again.
_OF_WEIGHTS = frozenset({sympy.exp, sympy.log, sympy.tanh})


def leaf_nodes(region: Region) -> set[fx.Node]:
    """The tensors and numbers that a region is of."""
    return {leaf.node for leaf in region.leaves.values()}


def _check_weights(region: Region, form: NormalForm, moments: Moments, *, is_by_rows: bool) -> None:
    """Gain and shift must come from weights: tensors that are given, and are not one per row, unless ``is_by_rows``."""
    rows = set(axes_of(moments.dims)) - set(moments.hidden)
    functions = {each.func for part in (form.gain, form.shift) for each in part.atoms(sympy.Function)}
    if not functions <= _OF_WEIGHTS:
        raise RefusedError(
            "NO_NORM", "a weight is a function of which kernels know nothing", "multiply by it afterwards"
        )
    places = Counter(leaf.node for leaf in region.leaves_in(form.gain, form.shift).values())
    for leaf in region.leaves_in(form.gain, form.shift).values():
        if tensor_of(leaf.node) is None:  # a number
            continue
        if places[leaf.node] > 1:
            text = f"{told(leaf.node)} weights both rows and their elements"
            raise RefusedError("NO_NORM", text, "multiply by it afterwards")
        is_given = leaf.node.op in ("placeholder", "get_attr")
        own = set(axes_of(leaf.dims))
        if not is_given or (rows and rows <= own and not is_by_rows) or not own <= set(axes_of(moments.dims)):
            raise RefusedError("NO_NORM", f"{told(leaf.node)} is no weight of the row", "multiply by it afterwards")
