"""Walks from nodes to what they need, or to what is made of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

from torch import fx


def operands_of(node: fx.Node) -> Iterable[fx.Node]:
    """What a node reads, sizes included."""
    return node.all_input_nodes


def reached(
    start: Iterable[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]] = operands_of,
    most: int = sys.maxsize,
) -> Iterator[fx.Node]:
    """Some nodes and what follows, each once, the nearest first; once ``most`` are known, nothing is followed any more."""
    known = dict.fromkeys(start)
    queue = deque(known)
    while queue:
        node = queue.popleft()
        yield node
        for each in following(node) if len(known) < most else ():
            if each not in known:
                known[each] = None
                queue.append(each)


def needed(
    wanted: Iterable[fx.Node],
    given: Container[fx.Node],
    operands: Callable[[fx.Node], Iterable[fx.Node]] = operands_of,
) -> list[fx.Node]:
    """Some nodes and everything that they need, back to what is ``given``, in graph order."""
    start = (node for node in wanted if node not in given)
    return sorted(reached(start, lambda node: (each for each in operands(node) if each not in given)))
