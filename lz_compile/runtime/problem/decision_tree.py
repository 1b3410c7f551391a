"""Decisions over sizes as a tree: each split asks whether a dim is below an edge, each leaf names a kernel.

Asked of symbolic sizes inside the backend, every question becomes a guard of Dynamo. So a tree is walked from the root
(:func:`evaluate`), nothing is asked twice or that follows from earlier answers, and nothing off the path is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Leaf:
    """A decision. ``kernel`` is None beyond the measurements, and ``why`` says so. Leaves with the same kernel are equal."""

    kernel: str | None
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Split:
    """``dim < at`` leads to ``below``, anything else to ``above``."""

    dim: str
    at: int
    below: Node
    above: Node


Node: TypeAlias = "Leaf | Split"
Range: TypeAlias = "tuple[int, int | None]"
"""Smallest and largest size, both included; None where there is no largest."""

ANY: Range = (0, None)
#: Questions from the root of a tree to a leaf: trees are walked recursively, in the middle of a compile.
MAX_DEPTH = 200


def choose(node: Node, dims: Mapping[str, int]) -> Leaf:
    """The leaf for known sizes.

    Raises:
        ValueError: the tree asks for a dim that is not given.
    """

    def is_below(dim: str, at: int) -> bool:
        if dim not in dims:
            raise ValueError(f"choosing from a tree: expected the size of {dim}, received sizes of {', '.join(dims)}")
        return dims[dim] < at

    return evaluate(node, is_below)


def evaluate(node: Node, is_below: Callable[[str, int], bool]) -> Leaf:
    """The leaf that is reached by asking ``is_below(dim, at)``, at most once each and only what is not known by then."""
    ranges: dict[str, Range] = {}
    while isinstance(node, Split):
        answer = _known(ranges.get(node.dim, ANY), node.at)
        if answer is None:
            answer = is_below(node.dim, node.at)
            ranges = narrowed(ranges, node.dim, node.at, is_below=answer)
        node = node.below if answer else node.above
    return node


def leaves(node: Node) -> Iterator[Leaf]:
    """Every leaf, from below to above."""
    if isinstance(node, Leaf):
        yield node
    else:
        yield from leaves(node.below)
        yield from leaves(node.above)


def splits(node: Node) -> Iterator[Split]:
    """Every split, a parent before its children."""
    if isinstance(node, Split):
        yield node
        yield from splits(node.below)
        yield from splits(node.above)


def outcomes(node: Node) -> list[str | None]:
    """The distinct kernels of the leaves, in their order."""
    return list(dict.fromkeys(leaf.kernel for leaf in leaves(node)))


def told(node: Node, asked: tuple[str, ...] = ()) -> Iterator[str]:
    """A line for each leaf: the answers that lead to it, and its kernel."""
    if isinstance(node, Leaf):
        yield f"{' and '.join(asked) or 'any size'}: {node.kernel or 'beyond the measurements'}"
    else:
        yield from told(node.below, (*asked, f"{node.dim} < {node.at}"))
        yield from told(node.above, (*asked, f"{node.dim} >= {node.at}"))


def edges(node: Node) -> dict[str, list[int]]:
    """By dim, where the tree is split, in ascending order."""
    found: dict[str, set[int]] = {}
    for split in splits(node):
        found.setdefault(split.dim, set()).add(split.at)
    return {dim: sorted(ats) for dim, ats in found.items()}


def restrict(node: Node, ranges: Mapping[str, Range]) -> Node:
    """The tree without the questions that the ranges, or the questions before them, answer already."""
    if isinstance(node, Leaf):
        return node
    answer = _known(ranges.get(node.dim, ANY), node.at)
    if answer is not None:
        return restrict(node.below if answer else node.above, ranges)
    below = restrict(node.below, narrowed(ranges, node.dim, node.at, is_below=True))
    above = restrict(node.above, narrowed(ranges, node.dim, node.at, is_below=False))
    return Split(node.dim, node.at, below, above)


def simplify(node: Node) -> Node:
    """A tree that chooses the same with fewer questions: none that is answered already, none between equal neighbours.

    Neighbours along a dim need not be siblings: a run of splits on one dim is laid out as intervals, equal ones are joined,
    and the rest is balanced.
    """
    return _merged(restrict(node, {}))


def narrowed(ranges: Mapping[str, Range], dim: str, at: int, *, is_below: bool) -> dict[str, Range]:
    """The ranges after the answer to ``dim < at``."""
    low, high = ranges.get(dim, ANY)
    if is_below:
        return {**ranges, dim: (low, at - 1 if high is None else min(high, at - 1))}
    return {**ranges, dim: (max(low, at), high)}


def contains(ranges: Mapping[str, Range], dims: Mapping[str, int]) -> bool:
    """Whether sizes lie in all of the ranges; a dim without a size does not."""
    return all(
        dim in dims and low <= dims[dim] and (high is None or dims[dim] <= high) for dim, (low, high) in ranges.items()
    )


def intervals(node: Node, dim: str) -> tuple[list[int], list[Node]]:
    """The edges of the run of splits on a dim at the top of a tree, and the trees between them."""
    if isinstance(node, Leaf) or node.dim != dim:
        return [], [node]
    below_ats, below = intervals(node.below, dim)
    above_ats, above = intervals(node.above, dim)
    return [*below_ats, node.at, *above_ats], [*below, *above]


def from_intervals(dim: str, ats: Sequence[int], parts: Sequence[Node]) -> Node:
    """A balanced run of splits on a dim, with equal neighbours joined."""
    kept_ats, kept = [], [parts[0]]
    for at, part in zip(ats, parts[1:], strict=True):
        if part != kept[-1]:
            kept_ats.append(at)
            kept.append(part)
    return _balanced(dim, kept_ats, kept)


def to_dict(node: Node) -> dict[str, Any]:
    """As stable JSON."""
    if isinstance(node, Leaf):
        return {"kernel": node.kernel, "why": node.why}
    return {"dim": node.dim, "at": node.at, "below": to_dict(node.below), "above": to_dict(node.above)}


def from_dict(record: Any, depth: int = 0) -> Node:
    """The tree that :func:`to_dict` wrote.

    Raises:
        ValueError: the record is not one, or asks more than :data:`MAX_DEPTH` questions in a row.
    """
    if depth > MAX_DEPTH:
        raise ValueError(
            f"reading a decision tree: expected at most {MAX_DEPTH} questions in a row. Write the table again"
        )
    match record:
        case {"kernel": (str() | None) as kernel, "why": str(why), **rest} if not rest:
            return Leaf(kernel, why)
        case {"dim": str(dim), "at": int(at), "below": below, "above": above, **rest} if not (
            rest or isinstance(at, bool)
        ):
            return Split(dim, at, from_dict(below, depth + 1), from_dict(above, depth + 1))
    raise ValueError(
        "reading a decision tree: expected a leaf (kernel, why) or a split (dim, at, below, above), received "
        f"{record!r:.200}. Write the table again"
    )


def _known(allowed: Range, at: int) -> bool | None:
    """Whether every size of a range is below the edge, or none (False); None where it depends on the size."""
    low, high = allowed
    if high is not None and high < at:
        return True
    return False if low >= at else None


def _merged(node: Node) -> Node:
    if isinstance(node, Leaf):
        return node
    return from_intervals(
        node.dim, *intervals(Split(node.dim, node.at, _merged(node.below), _merged(node.above)), node.dim)
    )


def _balanced(dim: str, ats: Sequence[int], parts: Sequence[Node]) -> Node:
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    below = _balanced(dim, ats[: middle - 1], parts[:middle])
    return Split(dim, ats[middle - 1], below, _balanced(dim, ats[middle:], parts[middle:]))
