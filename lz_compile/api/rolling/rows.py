"""Lists that loops fill, as one tensor with a first dimension of steps, for what stacks them."""

from __future__ import annotations

from builtins import bool, isinstance, len, range  # noqa: UP029
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch import cat as joined
from torch import stack as stacked

from lz_compile.api.rolling.facts import Places
from lz_compile.api.rolling.scanning import own


class Rows:
    """A list of what a loop added, one tensor with a first dimension of steps, and of what is in front or behind that."""

    def __init__(self, whole: Tensor, before: Sequence[Tensor] = (), behind: Sequence[Tensor] = ()) -> None:
        self.whole, self.before, self.behind = whole, [*before], [*behind]

    def __getitem__(self, item: slice) -> Any:
        if (item.start, item.stop, item.step) == (None, None, -1):
            return self.turned()
        begin = item.start or 0
        is_rest = item.stop is None and item.step is None and 0 <= begin <= len(self.before)
        return Rows(self.whole, self.before[begin:], self.behind) if is_rest else _list(self)[item]

    def turned(self) -> Rows:
        """The other way round."""
        return Rows(self.whole.flip(0), self.behind[::-1], self.before[::-1])


def appended(found: Any, before: Sequence[Tensor]) -> Any:
    """What a loop appended, to be stacked."""
    return Rows(found, before)


def holds(found: Any) -> bool:
    """Whether a list has anything in it."""
    return isinstance(found, Rows) or bool(found)


def inserted(found: Any, behind: Sequence[Tensor]) -> Any:
    """What a loop put in front, step by step, to be stacked."""
    return Rows(found.flip(0), (), behind)


def listed_in_front(found: Any, behind: Sequence[Any]) -> Any:
    """The same, as a list."""
    return [*listed(found.flip(0)), *behind]


def turned(found: Any) -> Any:
    """A list the other way round."""
    return found.turned() if isinstance(found, Rows) else found[::-1]


def listed(found: Any, before: Sequence[Any] = ()) -> Any:
    """What a loop appended, as a list."""
    return [*before, *(found[i] for i in range(len(found)))]  # of unbind, none could be written to


def stack(found: Any, *given: Any, **named: Any) -> Tensor:
    """``torch.stack``."""
    if not isinstance(found, Rows) or named.keys() - {"dim"}:
        return stacked(_list(found), *given, **named)
    dim = given[0] if given else named.get("dim", 0)
    rest = own(found.whole.movedim(0, dim))
    ends = [[stacked(each, dim)] if each else [] for each in (found.before, found.behind)]
    return joined([*ends[0], rest, *ends[1]], dim) if ends[0] or ends[1] else rest


def cat(found: Any, *given: Any, **named: Any) -> Tensor:
    """``torch.cat``."""
    if not isinstance(found, Rows) or named.keys() - {"dim"}:
        return joined(_list(found), *given, **named)
    dim = given[0] if given else named.get("dim", 0)
    at = dim if dim >= 0 else dim + found.whole.dim() - 1
    rest = own(found.whole.movedim(0, at).flatten(at, at + 1))
    return joined([*found.before, rest, *found.behind], dim) if found.before or found.behind else rest


def _list(found: Any) -> Any:
    if isinstance(found, Places):
        return found[:]
    return [*found.before, *found.whole.unbind(0), *found.behind] if isinstance(found, Rows) else found
