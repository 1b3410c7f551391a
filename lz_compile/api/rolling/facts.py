"""What a loop is given when it is come to: how many steps it has, what they read, and the like of what was proven."""

from __future__ import annotations

from builtins import (  # noqa: UP029
    all,
    any,
    bool,
    float,
    int,
    isinstance,
    len,
    list,
    max,
    min,
    next,
    range,
    set,
    slice,
    tuple,
    type,
    zip,
)
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, arange, is_autocast_enabled
from torch import bool as truth
from torch.compiler import is_compiling
from torch.fx.experimental.symbolic_shapes import has_static_value

from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.api.rolling.trees import leaves, structure

#: Fewer steps than this are traced one by one.
LEAST_STEPS = 4
#: A tensor, the dimension that is read along, and where: the place of a range, and functions of what it counts; and which
#: tests must be answered how for a step to read it.
Given: TypeAlias = "tuple[Tensor, int, int | None, Callable[[int], int] | None, Any, Sequence[tuple[int, bool]]]"
#: What a branch asks of a counter: the place of a range, a function of what it counts, and how that compares with zero.
Test: TypeAlias = "tuple[int, Callable[[int], int | None], str]"
#: What branches are told in the first step, in those after it, and in the last; None of what is no number.
Answers: TypeAlias = "tuple[Sequence[bool | None], Sequence[bool | None], Sequence[bool | None]]"
#: What a loop is given: its first state, ranges, reads, tests, what it writes (whether, to what name, where), what else its
#: steps read, and the module whose method it is in.
Facts: TypeAlias = "tuple[Any, Sequence[Counted], Sequence[Given], Sequence[Test], Sequence[Any], Sequence[Any], Any]"


@dataclass(frozen=True)
class Counted:
    """A range whose length may be a symbol; None where it has no end."""

    start: int
    step: int
    length: int | None


class Places:
    """``[item] * count``, a count that may be a symbol."""

    def __init__(self, item: Any, count: int) -> None:
        self.count, self._item, self._written = count, item, {}  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return self.count

    def __setitem__(self, place: int, item: Any) -> None:
        self._written[self._at(place)] = item

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(self.count)[place]]
        return self._written.get(self._at(place), self._item)

    def _at(self, place: int) -> int:
        at = place if place >= 0 else place + self.count
        if at < 0 or at >= self.count:
            raise IndexError("list index out of range")
        return at


def size_of(held: Any, dim: int) -> int:
    """How many places a tensor has along a dimension, or a list."""
    if isinstance(held, Tensor):
        return held.shape[dim]
    return held.count if isinstance(held, Places) else len(held)


def steps_of(ranges: Sequence[Counted], reads: Sequence[Given]) -> int:
    """How many steps there are: as many as the shortest part has; none where nothing says."""
    lengths = [each.length for each in ranges if each.length is not None]
    lengths += [
        tensor.shape[dim]
        for tensor, dim, place, *_ in reads
        if place is None and tensor is not None and not isinstance(tensor, Counted) and _is_tensor(tensor)
    ]
    if not lengths:
        return 0
    least = lengths[0]
    for each in lengths[1:]:
        least = each if each < least else least
    return least


def is_known(found: Any) -> bool:
    """Whether places of it can be read; None is what a step does not come to read."""
    return found is None or isinstance(found, (Tensor, Counted))


def _is_tensor(found: Any) -> bool:
    if not isinstance(found, Tensor):
        raise NotRolledError(f"it reads places of a {type(found).__name__}")
    return True


def device_of(init: tuple[Any, ...], reads: Sequence[Given]) -> torch.device | None:
    """Where a loop computes."""
    every = (*leaves(init), *(tensor for tensor, *_ in reads))
    return next((each.device for each in every if isinstance(each, Tensor)), None)


def answers_of(tests: Sequence[Test], ranges: Sequence[Counted], steps: int) -> Answers | None:
    """What branches are told in the first step, in the last, and in those between; None where it is not the same in these."""
    found: tuple[list[bool | None], list[bool | None], list[bool | None]] = [], [], []
    for place, function, order in tests:
        start, by = ranges[place].start, ranges[place].step
        then, before = function(start + by), function(start + by * (steps - 2))
        if then is None or before is None:
            for answers in found:
                answers.append(None)
            continue
        is_same = order not in ("Eq", "NotEq") or (_sign(then) < 0) == (_sign(before) < 0)
        if not is_same or _answer(then, order) != _answer(before, order):
            return None
        for answers, at in zip(found, (start, start + by, start + by * (steps - 1)), strict=True):
            answers.append(_answer(function(at), order))
    return found


def _answer(difference: int | None, order: str) -> bool:
    sign = _sign(difference)
    found: bool = {"Lt": sign < 0, "LtE": sign <= 0, "Gt": sign > 0, "GtE": sign >= 0, "Eq": sign == 0}.get(
        order, sign != 0
    )
    return found


def _sign(difference: int | None) -> int:
    """A plain number, also of a symbol: Dynamo compares no symbolic answers with each other."""
    assert difference is not None, "all are numbers, or none is"
    if difference < 0:
        return -1
    return 0 if difference == 0 else 1


@dataclass(frozen=True)
class Items:
    """What the first step reads, those after it, the last, or two of these, one after the other along a first dimension."""

    read: Tensor
    reads: tuple[bool, bool, bool]

    def at(self, step: int, steps: int) -> Tensor | None:
        """What a step reads."""
        if not self.reads[0 if step == 0 else 2 if step == steps - 1 else 1]:
            return None
        return self.read[step if self.reads[0] else step - 1 if self.reads[1] else 0]


def reads_it(items: Tensor | Items | None, which: int) -> bool:
    """Whether the first step (0), those after it (1) or the last (2) read something."""
    return items is not None and (not isinstance(items, Items) or items.reads[which])


def middle(items: Tensor | Items, peels: bool, ends: bool) -> Tensor:
    """What is read by the steps that are not taken out of a loop, at its beginning and its end."""
    found = items
    if isinstance(items, Items):
        found, peels, ends = items.read, peels and items.reads[0], ends and items.reads[2]
    assert isinstance(found, Tensor), "those of a tensor"
    found = found[1:] if peels else found
    return found[:-1] if ends else found


def items_of(
    given: Given, ranges: Sequence[Counted], steps: int, device: torch.device | None, answers: Answers
) -> Tensor | Items | None:
    """What is read, one step after the other along a first dimension: a view of the tensor.

    Raises:
        NotRolledError: it is none, for what is read is no tensor, or places are from its end, or not even.
    """
    tensor, dim, place, function, end, _ = given
    if tensor is None or True not in _reads_it(given, answers):
        return None
    if isinstance(tensor, Counted):
        return arange(steps, device=device) * tensor.step + tensor.start
    _is_tensor(tensor)
    if not is_compiling() and (problem := _problem(given, ranges, steps, answers)):  # compiled, `kind_of` has asked
        raise NotRolledError(problem)
    dim = dim if dim >= 0 else dim + tensor.dim()
    if place is None or function is None:
        found = tensor.narrow(dim, 0, steps).movedim(dim, 0)
        return found if end is None else found.unsqueeze(dim + 1)
    lowest, highest = _steps_reading(given, steps, answers)
    first, by = ranges[place].start + ranges[place].step * lowest, ranges[place].step
    at, stride, last = (
        function(first),
        function(first + by) - function(first),
        function(first + by * (highest - lowest)),
    )
    if stride > 0:
        found = tensor[(*(slice(None),) * dim, slice(at, last + 1, stride))]
    else:
        index = arange(at, last - 1, stride, device=tensor.device)
        found = tensor.index_select(dim, index)
    found = found.movedim(dim, 0)
    found = found if end is None else found.unsqueeze(dim + 1)
    reads = _reads_it(given, answers)
    return Items(found, reads) if False in reads else found


def _steps_reading(given: Given, steps: int, answers: Answers) -> tuple[int, int]:
    """The first and the last step that reads something."""
    first, between, last = _reads_it(given, answers)
    return (0 if first else 1 if between else steps - 1), (steps - 1 if last else steps - 2 if between else 0)


def _reads_it(given: Given, answers: Answers) -> tuple[bool, bool, bool]:
    """Whether the first step reads something, those after it, and the last, as far as a counter tells."""
    if not given[5]:  # as nearly always, and Dynamo takes 10 ms for what follows
        return True, True, True
    first, between, last = (all(each[i] == wanted for i, wanted in given[5]) for each in answers)
    return first, between, last


def _problem(given: Given, ranges: Sequence[Counted], steps: int, answers: Answers) -> str:
    """Why places of a tensor or list are not those of a scan."""
    held, dim, place, function, end, _ = given
    if place is None or function is None or True not in _reads_it(given, answers):
        return ""
    lowest, highest = _steps_reading(given, steps, answers)
    first, by, count = ranges[place].start + ranges[place].step * lowest, ranges[place].step, highest - lowest
    at, then, last = function(first), function(first + by), function(first + by * count)
    if at is None or (end is not None and end(first) is None):
        return "it reads places by something that is no number"
    if then == at or last != at + (then - at) * count:
        return "it reads places that are not evenly apart"
    if end is not None and (end(first) != at + 1 or end(first + by) != then + 1):
        return "it reads several places in a step"
    size = size_of(held, dim)
    if min(at, last) < 0 or max(at, last) >= size:
        return "it reads places from the end of a tensor, or beyond it"
    return ""


def kind_of(facts: Facts) -> str | None:
    """What a proof holds for, beyond sizes and modes: ranks, dtypes, sizes of one; None where it holds for none.

    None is also the answer of fewer steps than are worth it, and of places that are not those of a scan.
    """
    init, ranges, reads, tests, writes, free, _ = facts
    if not (ranges or reads) or not all(is_known(tensor) for tensor, *_ in reads):
        return None
    steps = steps_of(ranges, reads)
    if steps < LEAST_STEPS:
        return None
    carried = leaves(init)
    text, answers = structure(init), answers_of(tests, ranges, steps)
    written = [where for flag, _, where in writes if flag and where is not None]
    names = [name for flag, name, _ in writes if flag]
    if answers is None or len(set(names)) < len(names):
        return None
    if not all(isinstance(held, (Tensor, list, Places)) for held, *_ in written):
        return None
    text += " ".join([*names, *("tensor" if isinstance(held, Tensor) else "list" for held, *_ in written)])
    for given in (*reads, *written):
        where = _where(given, ranges, steps, answers)
        if where is None:
            return None
        text += where
    for each in (*carried, *[given[0] for given in reads], *free):
        if not _is_taken(each):
            return None
    for each in (*carried, *[given[0] for given in reads], *leaves(free)):
        text += " " + _pattern(each)
    for answer in (*answers[0], *answers[1], *answers[2], is_autocast_enabled("cpu"), is_autocast_enabled("cuda")):
        text += " none" if answer is None else " yes" if answer else " no"
    return text


def needs_gradients(facts: Facts) -> bool:
    """Whether anything that a loop computes with is differentiated."""
    init, _, reads, _, writes, free, _ = facts
    held = [tensor for tensor, *_ in reads], [where[0] for _, _, where in writes if where is not None]
    every = [each for each in leaves([init, *held, free]) if isinstance(each, Tensor)]
    return any(each.requires_grad for each in every)


def rank_of(dtype: torch.dtype) -> int:
    """What casts to what of a higher rank alone, as ``torch.can_cast`` has it, which Dynamo does not trace."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype != truth)


def changes_numbers(facts: Facts) -> bool:
    """Whether a loop computes with a Python number that Dynamo has a symbol for."""
    init, *_, free, _ = facts
    return any(isinstance(each, float) and not has_static_value(each) for each in (*leaves(init), *free))


def _is_taken(found: Any) -> bool:
    """Whether a scan takes it: PyTorch's (2.13) no number that Dynamo has a symbol for, Inductor's no complex ones."""
    if isinstance(found, Tensor):
        return not found.is_complex()
    return not isinstance(found, float) or has_static_value(found)


def _where(given: Given, ranges: Sequence[Counted], steps: int, answers: Answers) -> str | None:
    """In which direction places are; None where they are not those of a scan."""
    held, _, place, function, *_ = given
    if held is None or isinstance(held, Counted) or place is None or function is None:
        return ""
    if _problem(given, ranges, steps, answers):
        return None
    first, by = ranges[place].start, ranges[place].step
    return " up" if function(first) < function(first + by) else " down"


def modules_in(facts: Facts) -> list[torch.nn.Module]:
    """Modules that a step reads by name, and the one whose method it is in."""
    *_, free, module = facts
    return [each for each in (*leaves(free), module) if isinstance(each, torch.nn.Module)]


def modes_of(modules: Iterable[torch.nn.Module]) -> str:
    """Which of some modules, and of those inside, are in training."""
    return " ".join("".join("+" if each.training else "-" for each in module.modules()) for module in modules)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody looks on at calls of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _pattern(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"{found}" if isinstance(found, bool) else type(found).__name__
    text = f"{found.device.type} {found.dtype} "
    for size in found.shape:
        text += "1" if size == 1 else "n"
    return text
