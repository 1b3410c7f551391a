"""What every recogniser does with its anchors: reads each, skips what is covered, and tells why one was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.graph.effects import MutatedError
from lz_compile.passes.graph.refusal import Failure, NearMiss, RefusedError
from lz_compile.passes.graph.view import EMITTED, where_of
from lz_compile.passes.rewriting.match import Match

Outcome = Match | NearMiss | Failure


def always(_anchor: fx.Node, _refusal: RefusedError) -> bool:
    """Every refusal is worth telling."""
    return True


def refusal_of(error: RefusedError | MutatedError, edit: str = "use its out-of-place form") -> RefusedError:
    """A refusal as it is; a value that was overwritten before it is read, as one."""
    return error if isinstance(error, RefusedError) else RefusedError("OPERAND_MUTATED", f"a value is {error}", edit)


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
