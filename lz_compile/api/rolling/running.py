"""What rolled functions call: the loop as a scan where it is traced, step by step where it is tried."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.api.arguments import is_plain
from lz_compile.api.rolling.asked import is_confined, let_inductor_count, tell
from lz_compile.api.rolling.facts import (
    LEAST_STEPS,
    Answers,
    Counted,
    Given,
    Items,
    Places,
    Test,
    answers_of,
    changes_numbers,
    device_of,
    has_hooks,
    is_known,
    items_of,
    kind_of,
    needs_gradients,
    rank_of,
    size_of,
    steps_of,
)
from lz_compile.api.rolling.rows import Lists, Rows
from lz_compile.api.rolling.scanning import Step, scanned
from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.ground.events import record

#: From so many steps on a loop is compiled, in seconds, where the model is not.
EAGER_STEPS = 256


@dataclass
class Support(Lists):
    """One for all functions of a target: their loops, which of them are scans, and why others are not."""

    places: list[tuple[str, int]] = field(default_factory=list)
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    peeled: set[int] = field(default_factory=set)
    whole: dict[tuple[int, int], torch.dtype] = field(default_factory=dict)  # what steps hand out that are no floats
    resting: set[int] = field(default_factory=set)
    homes: dict[tuple[str, int], int] = field(default_factory=dict)
    ran: set[tuple[str, int]] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    callees: list[tuple[types.FunctionType, types.FunctionType]] = field(default_factory=list)
    root: torch.nn.Module | None = None
    compiled: dict[int, Callable[..., Any] | None] = field(default_factory=dict)
    is_eager: bool = True
    is_random: bool = False
    chunk: str | None = None  # a number that Dynamo makes no symbol of
    is_proven: bool = False
    is_undifferentiated: bool = False  # it was proven without gradients
    is_tried: bool = False
    tried: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def loop(self, file: str, line: int) -> int:
        """The number of a loop."""
        if (file, line) not in self.places:
            self.places.append((file, line))
        return self.places.index((file, line))

    def refuse(self, file: str, line: int, why: str, at: int = 0, home: int = 0) -> None:
        """Leave a loop as it is; one of a function that begins at a line, ``home``, is told if that has run."""
        if home and (file, line) not in self.refused:
            self.homes[file, line] = home
        self.refused.setdefault((file, line), why if at in (0, line) else f"{why} (line {at})")

    def rolls(self, key: int, place: str, given: Callable[[], tuple[Any, ...]]) -> bool:
        """Whether a loop is a scan now: while it is tried, and where it is compiled, if the like of this was proven.

        Its place is a literal of the source: Dynamo takes nothing else for a constant, in every version.
        """
        if self.is_tried:
            return key not in self.resting and self._is_tried(key, given())
        if not self.is_proven or key not in self.tried:
            return False
        if not torch.compiler.is_compiling():
            return (
                self.is_eager
                and not self.is_random
                and self.compiled.get(key, self) is not None
                and self._is_long(key, given())
            )
        facts = given()
        if self.is_undifferentiated and torch.is_grad_enabled() and needs_gradients(facts, self.root):
            tell(place, "it is differentiated here, and had no gradients where it was proven")
            return False
        if changes_numbers(facts):
            tell(place, "a Python number changes from call to call; hand in a tensor")
            return False
        kind = None if is_confined(place) else kind_of(facts, self.root)
        return kind is not None and kind in self.tried[key]

    def _is_long(self, key: int, given: tuple[Any, ...]) -> bool:
        """Whether a loop of a model that is not compiled is compiled by itself: nobody looks on at what it does.

        Not where gradients are recorded: what is compiled keeps less for those than a backward may ask of it.
        """
        init, ranges, reads, *_ = given
        if torch.is_grad_enabled() or not all(is_known(tensor) for tensor, *_ in reads):
            return False
        if steps_of(ranges, reads) < EAGER_STEPS:
            return False
        if self.root is not None and any(map(has_hooks, self.root.modules())):
            return False
        tensors = [
            each for each in (*pytree.tree_leaves(init), *(each for each, *_ in reads)) if isinstance(each, Tensor)
        ]
        return is_plain(*tensors) and kind_of(given, self.root) in self.tried[key]

    def _is_tried(self, key: int, given: tuple[Any, ...]) -> bool:
        """Whether to try a scan: not of what turns out to be a loop over layers."""
        others = [tensor for tensor, *_ in given[2] if not is_known(tensor)]
        if others:
            is_list = any(isinstance(each, Tensor) for each in pytree.tree_leaves(others))
            self.refuse(*self.places[key], f"it reads places of a {type(others[0]).__name__}" if is_list else "")
            return False
        held = pytree.tree_leaves([given[0], [tensor for tensor, *_ in given[2]]])
        if any(isinstance(each, Tensor) and each.is_complex() for each in held):
            self.refuse(*self.places[key], "its numbers are complex: Inductor compiles no scan over those")
            return False
        kind, known = kind_of(given, self.root), self.tried.get(key, ())
        self.tried[key] = known if kind in known else (*known, kind)
        return True

    def called(self, function: Any) -> Any:
        """What is called in place of a function: the same with its loops as scans."""
        for old, new in self.callees:
            if function is old:
                return new
        return function

    def inherited(self, place: int) -> Any:
        """What is called in place of a method of a base."""
        return self.callees[place][1]

    @staticmethod
    def counts(*values: Any) -> bool:
        """Whether something can be counted by."""
        return all(isinstance(each, (int, float, torch.SymInt)) for each in values)

    @staticmethod
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

    @staticmethod
    def written(old: Tensor, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """What a method that writes to a tensor leaves: ``old.add_(x)``."""
        if method in ("copy_", "fill_"):
            (new,) = given
            return new.to(old).expand_as(old) if isinstance(new, Tensor) else torch.full_like(old, new)
        if method == "zero_":
            return torch.zeros_like(old)
        found: Tensor = Support.like(old, getattr(old, method[:-1])(*given, **named))
        return found

    @staticmethod
    def transposed(found: Any, name: str) -> Any:
        """``found.T``, ``found.mT``."""
        is_matrix = isinstance(found, Tensor) and (name == "mT" or found.dim() == 2)
        return found.transpose(-2, -1) if is_matrix else getattr(found, name)

    @staticmethod
    def backwards(*given: int) -> Counted:
        """A ``range`` in reverse."""
        found = Support.counted(*given)
        assert found.length is not None, "a range has an end"
        return Counted(found.start + found.step * (found.length - 1), -found.step, found.length)

    @staticmethod
    def last(ranges: Sequence[Counted], reads: Sequence[Given], place: int, is_beyond: bool) -> int:
        """What a counter holds behind a loop."""
        counted = ranges[place]
        return counted.start + counted.step * (steps_of(ranges, reads) - (0 if is_beyond else 1))

    @staticmethod
    def joined(tensor: Tensor, found: Tensor, dim: int) -> Tensor:
        """``torch.cat`` of a tensor and of what the steps of a loop have joined to it."""
        return torch.cat([tensor, Support.cat(Rows(found), dim)], dim)

    @staticmethod
    def count_from(start: int) -> Counted:
        """What ``enumerate`` counts."""
        return Counted(start, 1, None)

    @staticmethod
    def counted(*given: int) -> Counted:
        """A ``range``, whose length may be a symbol."""
        start, stop = (0, given[0]) if len(given) == 1 else given[:2]
        step = given[2] if len(given) == 3 else 1
        if step == 0 or any(isinstance(each, float) for each in given):
            return Counted(start, 1, 0)
        length = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
        return Counted(start, step, length if length > 0 else 0)

    def scan(
        self,
        key: int,
        step: Step,
        init: tuple[Any, ...],
        ranges: Sequence[Counted],
        reads: Sequence[Given],
        tests: Sequence[Test],
        peels: bool,
        handed: Sequence[tuple[Any, str]],
    ) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
        """What is carried out of a loop, and what its steps hand out, along a first dimension; None for what they do not."""
        try:
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
            peels = peels or answers[0] != answers[1]
            if self.is_tried and not torch.compiler.is_compiling():
                carry, ys = self._tried(key, step, init, answers, items, steps, peels)
                self.whole.update(
                    {(key, i): y.dtype for i, y in zip(there, ys, strict=True) if not y.dtype.is_floating_point}
                )
            else:
                run = scanned if torch.compiler.is_compiling() else functools.partial(self._compiled, key)
                whole = [self.whole.get((key, i)) for i in there]
                carry, ys = run(step, init, answers, items, steps, peels or key in self.peeled, whole, self.chunk)
            left = list(ys)
            return carry, tuple(left.pop(0) if flag else None for flag, _ in handed)
        except NotRolledError as error:
            if self.is_tried and not torch.compiler.is_compiling():
                self.refuse(*self.places[key], str(error))
            raise

    def _compiled(self, key: int, step: Step, init: Any, answers: Any, items: Any, *given: Any) -> Any:
        """The scan of a model that is not compiled; step by step where it cannot be."""
        if key not in self.compiled:
            code = scanned.__code__.replace()  # of its own: Dynamo counts how often it compiles one
            function = types.FunctionType(code, scanned.__globals__, scanned.__name__)
            self.compiled[key] = torch.compile(function, backend="layerzero", dynamic=True)
        run = self.compiled[key]
        try:
            assert run is not None, "one that failed is not rolled again"
            return run(step, init, answers, items, *given)
        except Exception as error:  # noqa: BLE001  # whatever a compiler says, the steps are what they are
            self.compiled[key] = None
            text = (str(error).splitlines() or [""])[0]
            record("LOOP_NOT_COMPILED", f"the loop at {':'.join(map(str, self.places[key]))}: {text}")
        return self._tried(key, step, init, answers, items, given[0], given[1])

    def _tried(
        self,
        key: int,
        step: Step,
        init: tuple[Any, ...],
        answers: Answers,
        items: Sequence[Tensor | Items | None],
        steps: int,
        peels: bool,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The scan's own semantics, in Python: what is carried has the same shape and dtype in every step."""
        if steps < LEAST_STEPS:
            raise NotRolledError(f"{steps} steps were tried, which is fewer than {LEAST_STEPS}")
        carry, out = init, []
        kinds: list[Any] = [None if peels else _kinds(init)]
        for i in range(steps):
            told = answers[0 if i == 0 else 2 if i == steps - 1 else 1]
            with _NoEffects() if self.is_tried else nullcontext():  # type: ignore[no-untyped-call]  # torch leaves it so
                carry, ys = step(*_fresh(carry), *told, *(_item(each, i, steps) for each in items))
            kinds.append(_kinds(carry))
            out.append(ys)
        if any(each is None for each in kinds[1:]):
            raise NotRolledError("it carries something else than tensors")
        if any(each != kinds[1] for each in kinds[2:]):
            raise NotRolledError("what it carries changes its shape or dtype")
        if kinds[0] != kinds[1]:
            self.peeled.add(key)
        found = [[ys[j] for ys in out] for j in range(len(out[0]))]
        if any(not isinstance(y, Tensor) or _kinds((y,)) != _kinds((each[0],)) for each in found for y in each):
            raise NotRolledError("what its steps hand out changes its shape or dtype, or is no tensor")
        return carry, tuple(torch.stack(each) for each in found)

    @staticmethod
    def at(held: Any, dim: int, counted: Counted | None, offset: int) -> Any:
        """What is held at the place that the first step reads, the last one if nothing counts; None beyond its ends."""
        place = -1 if counted is None else counted.start + offset
        size = size_of(held, dim)
        if not -size <= place < size:
            return None
        return held.select(dim, place) if isinstance(held, Tensor) else held[place]

    @staticmethod
    def repeated(one: Any, other: Any) -> Any:
        """``[item] * count``, or ``count * [item]``."""
        items, count = (one, other) if isinstance(one, list) else (other, one)
        return items * count if isinstance(count, Tensor) else Places(items[0], count)

    @staticmethod
    def placed(held: Any, found: Any, ranges: Sequence[Counted], given: Given) -> Any:
        """What a loop wrote to the rest of a list, to be stacked."""
        at, stride = _where_written(ranges, given)
        whole = found if stride > 0 else found.flip(0)
        at = at if stride > 0 else at - (len(found) - 1)
        is_rest = not isinstance(held, Tensor) and size_of(held, 0) == at + len(found)
        if is_rest and stride in (1, -1):
            return Rows(whole, [held[i] for i in range(at)])
        Support.filled(held, found, ranges, given)
        return held

    @staticmethod
    def filled(tensor: Any, found: Any, ranges: Sequence[Counted], given: Given) -> None:
        """Write what the steps of a loop would have written, all at once."""
        dim, (at, stride) = given[1], _where_written(ranges, given)
        if stride < 0:
            at, stride, found = at + stride * (len(found) - 1), -stride, found.flip(0)
        if not isinstance(tensor, Tensor):
            for i, item in enumerate(Support.listed(found)):
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


class _NoEffects(TorchDispatchMode):
    """Refuses what has no results, such as the check that a matrix had an inverse: AOTAutograd (2.13) loses count of them."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        if not operator._schema.returns and not operator._schema.is_mutable:
            raise NotRolledError(f"it calls {operator}, which gives nothing: PyTorch's scan cannot")
        return operator(*args, **(kwargs or {}))


def _item(items: Tensor | Items | None, step: int, steps: int) -> Tensor | None:
    return items.at(step, steps) if isinstance(items, Items) else None if items is None else items[step]


def _kinds(found: Any) -> Any:
    """Shapes and dtypes of what is carried; None where some of it is neither a tensor nor nothing."""
    leaves, spec = pytree.tree_flatten(found)
    if not all(each is None or isinstance(each, Tensor) for each in leaves):
        return None
    return str(spec), [None if each is None else (tuple(each.shape), each.dtype, each.device) for each in leaves]


def _fresh(carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Containers of their own, around the same tensors."""
    leaves, spec = pytree.tree_flatten(carry)
    found: tuple[Any, ...] = pytree.tree_unflatten(leaves, spec)
    return found


def refusals(support: Support) -> Iterator[str]:
    """Why loops stay as they are, with their places."""
    for (file, line), why in support.refused.items():
        home = support.homes.get((file, line), 0)
        if why and (not home or ((file, home) in support.ran and file in support.files)):
            yield f"{file}:{line}: {why}"
