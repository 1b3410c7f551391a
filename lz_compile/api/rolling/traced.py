"""What rolled functions call, in Python and where Dynamo traces them.

Dynamo asks in every call whether the names of what it has traced stand for what they did. The backend takes those of this
package away. Hence Python's own functions and PyTorch's are names of these modules here, and what is known of a loop is asked
for in :mod:`lz_compile.api.rolling.asked`, whose answers are constants.
"""

from __future__ import annotations

from builtins import all, any, bool, enumerate, float, getattr, int, isinstance, len, list, range, slice, tuple, zip  # noqa: UP029
from collections.abc import Callable, Sequence
from typing import Any

from torch import SymInt, Tensor, compiler, full_like, is_grad_enabled, zeros_like
from torch import cat as in_a_row
from torch.compiler import is_compiling

from lz_compile.api.rolling.asked import (
    chunk_of,
    is_confined,
    is_like,
    is_peeled,
    is_undifferentiated,
    let_inductor_count,
    plan_of,
    tell,
    trains,
    twin_of,
    whole_of,
)
from lz_compile.api.rolling.facts import (
    Counted,
    Facts,
    Given,
    Places,
    Test,
    answers_of,
    changes_numbers,
    device_of,
    has_hooks,
    items_of,
    kind_of,
    modules_in,
    needs_gradients,
    rank_of,
    size_of,
    steps_of,
)
from lz_compile.api.rolling.rows import Rows, appended, cat, holds, inserted, listed, listed_in_front, stack, turned
from lz_compile.api.rolling.running import LOOPS, SCANS, Run, Support
from lz_compile.api.rolling.scanning import Step, scanned
from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.runtime.kernels.constraints import TORCH

__all__ = ["appended", "cat", "holds", "inserted", "listed", "listed_in_front", "stack", "turned"]

#: A state without a gradient in front of PyTorch's scan gets none in it, silently: there the first step is by itself.
_LOSES_GRADIENTS = TORCH < (2, 13)


def rolls(known: Support, key: int, place: str, given: Callable[[], Facts]) -> bool:
    """Whether a loop is a scan now: while it is tried, and where it is compiled, if the like of this was proven.

    Its place is a literal of the source: Dynamo takes nothing else for a constant, in every version.
    """
    # By the module's name: Dynamo traces no function of its own that has none of PyTorch's.
    if not compiler.is_compiling():
        return known.rolls(key, given)
    if known.state == LOOPS:
        return False
    facts = given()
    if known.state == SCANS:
        if is_undifferentiated(known.name) and is_grad_enabled() and (needs_gradients(facts) or trains(known.name)):
            tell(place, "it is differentiated here, and had no gradients where it was proven")
            return False
        if changes_numbers(facts):
            tell(place, "a Python number changes from call to call; hand in a tensor")
            return False
        if is_confined(place):
            return False
    *_, module = facts
    if any(has_hooks(owner_of(module, path)) for path, *_ in plan_of(known.name, place) if path):
        tell(place, "hooks may see attributes that it assigns")
        return False
    kind = kind_of(facts)
    if kind is None:
        return False
    if not compiler.is_dynamo_compiling():  # ``torch.export`` runs this in Python
        return known.takes(key, kind, modules_in(facts))
    return bool(is_like(known.name, key, kind))


def owner_of(module: Any, path: Sequence[str]) -> Any:
    """What is below a module."""
    for name in path:
        module = getattr(module, name)
    return module


def held(module: Any, path: Sequence[str], name: str) -> Any:
    """An attribute of what is below a module; None where it has none yet."""
    return getattr(owner_of(module, path), name, None)


def put_back(shared: Sequence[tuple[Any, Sequence[Any]]], place: int, name: str, value: Any) -> None:
    """Assign an attribute of a module of which steps had a twin."""
    setattr(shared[place][0], name, value)


def parts(known: Support, where: str, module: Any) -> list[tuple[Any, list[Any]]]:
    """Modules that steps have twins of, and what these share with them.

    They are read in front of a scan: Dynamo (2.13) forgets what is assigned to modules that it comes to inside or behind it.
    """
    owners = [owner_of(module, path) for path, *_ in plan_of(known.name, where)]
    plan = plan_of(known.name, where)
    return [(owner, [getattr(owner, name) for name in each[2]]) for owner, each in zip(owners, plan, strict=True)]


def twin(known: Support, where: str, shared: Sequence[tuple[Any, Sequence[Any]]], states: Sequence[Any]) -> Any:
    """Twins of modules, the first one with the others below it, whose attributes nobody else sees."""
    made: dict[Any, Any] = {}
    left = [*states]
    for i, (path, names, others, items, bound) in enumerate(plan_of(known.name, where)):
        found: Any = twin_of(known.name, where, i)()
        for name, value in zip(others, shared[i][1], strict=True):
            setattr(found, name, value)
        for name in names:
            setattr(found, name, left.pop(0))
        for name, method in bound:
            setattr(found, name, getattr(found, method))
        if items:
            found.items = items
        made[path] = found
        if path:
            setattr(made[path[:-1]], path[-1], found)
    return made[()]


def called(known: Support, function: Any) -> Any:
    """What is called in place of a function: the same with its loops as scans."""
    for old, new in known.callees:
        if function is old:
            return new
    return function


def inherited(known: Support, place: int) -> Any:
    """What is called in place of a method of a base."""
    return known.callees[place][1]


def counts(*values: Any) -> bool:
    """Whether something can be counted by."""
    return all(isinstance(each, (int, float, SymInt)) for each in values)


def like(old: Any, new: Any) -> Any:
    """What ``old += x`` gives: in the dtype of ``old``, and of its shape.

    Raises:
        RuntimeError: it would be of another shape, or is no number of that dtype.
    """
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return new
    if old.dim() != new.dim() or any(one != other for one, other in zip(old.shape, new.shape, strict=True)):
        text = f"output with shape {list(old.shape)} doesn't match the broadcast shape {list(new.shape)}"
        raise RuntimeError(text)
    if old.dtype == new.dtype:
        return new
    if rank_of(new.dtype) > rank_of(old.dtype):
        raise RuntimeError(f"result type {new.dtype} can't be cast to the desired output type {old.dtype}")
    return new.to(old.dtype)


def written(old: Tensor, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """What a method that writes to a tensor leaves: ``old.add_(x)``."""
    if method in ("copy_", "fill_"):
        (new,) = given
        return new.to(old).expand_as(old) if isinstance(new, Tensor) else full_like(old, new)
    if method == "zero_":
        return zeros_like(old)
    found: Tensor = like(old, getattr(old, method[:-1])(*given, **named))
    return found


def transposed(found: Any, name: str) -> Any:
    """``found.T``, ``found.mT``."""
    is_matrix = isinstance(found, Tensor) and (name == "mT" or found.dim() == 2)
    return found.transpose(-2, -1) if is_matrix else getattr(found, name)


def backwards(*given: int) -> Counted:
    """A ``range`` in reverse."""
    found = counted(*given)
    assert found.length is not None, "a range has an end"
    return Counted(found.start + found.step * (found.length - 1), -found.step, found.length)


def last(ranges: Sequence[Counted], reads: Sequence[Given], place: int, is_beyond: bool) -> int:
    """What a counter holds behind a loop."""
    counted = ranges[place]
    return counted.start + counted.step * (steps_of(ranges, reads) - (0 if is_beyond else 1))


def joined(tensor: Tensor, found: Tensor, dim: int) -> Tensor:
    """``torch.cat`` of a tensor and of what the steps of a loop have joined to it."""
    return in_a_row([tensor, cat(Rows(found), dim)], dim)


def count_from(start: int) -> Counted:
    """What ``enumerate`` counts."""
    return Counted(start, 1, None)


def counted(*given: int) -> Counted:
    """A ``range``, whose length may be a symbol."""
    start, stop = (0, given[0]) if len(given) == 1 else given[:2]
    step = given[2] if len(given) == 3 else 1
    if step == 0 or any(isinstance(each, float) for each in given):
        return Counted(start, 1, 0)
    length = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
    return Counted(start, step, length if length > 0 else 0)


def scan(known: Support, key: int, *given: Any) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """What is carried out of a loop, and what its steps hand out, along a first dimension; None for what they do not."""
    if is_compiling():
        return _scan(known, key, *given)
    with known.refusing(key):
        return _scan(known, key, *given)


def _scan(
    known: Support,
    key: int,
    step: Step,
    init: tuple[Any, ...],
    ranges: Sequence[Counted],
    reads: Sequence[Given],
    tests: Sequence[Test],
    peels: bool,
    handed: Sequence[tuple[Any, str]],
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    let_inductor_count()
    steps = steps_of(ranges, reads)
    device = device_of(init, reads)
    answers = answers_of(tests, ranges, steps)
    if answers is None:
        raise NotRolledError("what a branch asks of the counter is not the same for all steps")
    items = [items_of(given, ranges, steps, device, answers) for given in reads]
    there = [i for i, (flag, _) in enumerate(handed) if flag]
    if len({handed[i][1] for i in there}) < len(there):
        raise NotRolledError("a step hands out to the same list more than once")
    peels = peels or answers[0] != answers[1] or (_LOSES_GRADIENTS and is_grad_enabled())
    if is_compiling():
        whole = [whole_of(known.name, key, i) for i in there]
        peels = peels or is_peeled(known.name, key)
        carry, ys = scanned(step, init, answers, items, steps, peels, whole, chunk_of(known.name))
    else:
        carry, ys = known.scan(key, Run(step, init, answers, items, steps, peels), there)
    left = list(ys)
    return carry, tuple([left.pop(0) if flag else None for flag, _ in handed])


def at(held: Any, dim: int, counted: Counted | None, offset: int) -> Any:
    """What is held at the place that the first step reads, the last one if nothing counts; None beyond its ends."""
    place = -1 if counted is None else counted.start + offset
    size = size_of(held, dim)
    if not -size <= place < size:
        return None
    return held.select(dim, place) if isinstance(held, Tensor) else held[place]


def repeated(one: Any, other: Any) -> Any:
    """``[item] * count``, or ``count * [item]``."""
    items, count = (one, other) if isinstance(one, list) else (other, one)
    return items * count if isinstance(count, Tensor) else Places(items[0], count)


def placed(held: Any, found: Any, ranges: Sequence[Counted], given: Given) -> Any:
    """What a loop wrote to the rest of a list, to be stacked."""
    at, stride = _where_written(ranges, given)
    whole = found if stride > 0 else found.flip(0)
    at = at if stride > 0 else at - (len(found) - 1)
    is_rest = not isinstance(held, Tensor) and size_of(held, 0) == at + len(found)
    if is_rest and stride in (1, -1):
        return Rows(whole, [held[i] for i in range(at)])
    filled(held, found, ranges, given)
    return held


def filled(tensor: Any, found: Any, ranges: Sequence[Counted], given: Given) -> None:
    """Write what the steps of a loop would have written, all at once."""
    dim, (at, stride) = given[1], _where_written(ranges, given)
    if stride < 0:
        at, stride, found = at + stride * (len(found) - 1), -stride, found.flip(0)
    if not isinstance(tensor, Tensor):
        for i, item in enumerate(listed(found)):
            tensor[at + stride * i] = item
        return
    dim = dim if dim >= 0 else dim + tensor.dim()
    where = (*(slice(None),) * dim, slice(at, at + stride * (len(found) - 1) + 1, stride))
    tensor[where] = found.movedim(0, dim)


def _where_written(ranges: Sequence[Counted], given: Given) -> tuple[int, int]:
    """The first place that a loop writes to, and how far the next one is."""
    _, _, place, function, *_ = given
    if place is None or function is None:
        raise NotRolledError("no counter says where it is written")
    first, by = ranges[place].start, ranges[place].step
    return function(first), function(first + by) - function(first)
