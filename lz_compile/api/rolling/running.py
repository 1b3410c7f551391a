"""What is known of the loops of a target: which of them are scans, and why others are not; and their steps in Python."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lz_compile.api.arguments import is_plain
from lz_compile.api.rolling.asked import named
from lz_compile.api.rolling.facts import (
    LEAST_STEPS,
    Answers,
    Facts,
    Items,
    has_hooks,
    is_known,
    kind_of,
    modes_of,
    modules_in,
    steps_of,
)
from lz_compile.api.rolling.scanning import Step, scanned
from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.api.rolling.trees import leaves
from lz_compile.api.rolling.twins import Part
from lz_compile.ground.events import record
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.writes import WithoutEffects

#: From so many steps on a loop is compiled, in seconds, where the model is not.
EAGER_STEPS = 256
#: What Dynamo traces: loops as they are, trials of scans, or those that were proven.
LOOPS, TRIAL, SCANS = "loops", "trial ", "scans"


class Run(NamedTuple):
    """A scan, as :func:`~lz_compile.api.rolling.scanning.scanned` takes it."""

    step: Step
    init: tuple[Any, ...]
    answers: Answers
    items: Sequence[Tensor | Items | None]
    steps: int
    peels: bool


@dataclass
class Support:
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
    owned: dict[int, list[int]] = field(default_factory=dict)  # which of what a loop carries are attributes
    read_behind: dict[int, list[int]] = field(default_factory=dict)  # and which names are read behind it
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)  # by places of loops
    compiled: dict[int, Callable[..., Any] | None] = field(default_factory=dict)
    is_eager: bool = True
    is_random: bool = False
    chunk: str | None = None  # a number that Dynamo makes no symbol of
    is_proven: bool = False
    is_undifferentiated: bool = False  # it was proven without gradients
    state: str = LOOPS  # all that Dynamo guards
    trials: int = 0
    tried: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = named(self)

    def loop(self, file: str, line: int) -> int:
        """The number of a loop."""
        if (file, line) not in self.places:
            self.places.append((file, line))
        return self.places.index((file, line))

    def where(self, key: int) -> str:
        """The place of a loop, as text."""
        return ":".join(map(str, self.places[key]))

    def refuse(self, file: str, line: int, why: str, at: int = 0, home: int = 0) -> None:
        """Leave a loop as it is; one of a function that begins at a line, ``home``, is told if that has run."""
        if home and (file, line) not in self.refused:
            self.homes[file, line] = home
        self.refused.setdefault((file, line), why if at in (0, line) else f"{why} (line {at})")

    def rolls(self, key: int, given: Callable[[], Facts]) -> bool:
        """Whether a loop is a scan where nothing is compiled: while it is tried, and where it is compiled by itself."""
        if self.is_tried:
            return key not in self.resting and self._is_tried(key, given())
        may_be = self.is_proven and self.is_eager and not self.is_random and key in self.tried
        if not may_be or self.where(key) in self.parts or self.compiled.get(key, self) is None:
            return False
        return self._is_long(key, given())

    def takes(self, key: int, kind: str, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether a loop is a scan where it is compiled: the like of it was proven, or is tried now."""
        parts = self.parts.get(self.where(key), ())
        if parts and not (modules and all(part.fits(modules[-1]) for part in parts)):
            return False
        kind += modes_of(modules) + self._modes()
        known = self.tried.get(key, ())
        if not self.is_tried:
            return kind in known
        if key in self.resting:
            return False
        self.tried[key] = known if kind in known else (*known, kind)
        return True

    def try_(self) -> None:
        """Loops are tried from now on, by themselves: nothing that was compiled before holds."""
        self.trials += 1
        self.state = f"{TRIAL}{self.trials}"

    def settle(self) -> None:
        """No loop is tried any more."""
        self.state = SCANS if self.is_proven else LOOPS

    @property
    def is_tried(self) -> bool:
        """Whether loops are tried now."""
        return self.state.startswith(TRIAL)

    def _is_long(self, key: int, given: tuple[Any, ...]) -> bool:
        """Whether a loop of a model that is not compiled is compiled by itself: nobody looks on at what it does.

        Not where gradients are recorded: what is compiled keeps less for those than a backward may ask of it.
        """
        init, ranges, reads, *_ = given
        if torch.is_grad_enabled() or not all(is_known(tensor) for tensor, *_ in reads):
            return False
        if steps_of(ranges, reads) < EAGER_STEPS:
            return False
        watched = [
            *modules_in(given),
            *([] if self.root is None else [self.root]),
        ]  # the root of a copy is the original
        if any(has_hooks(each) for module in watched for each in module.modules()):
            return False
        tensors = [
            each for each in (*pytree.tree_leaves(init), *(each for each, *_ in reads)) if isinstance(each, Tensor)
        ]
        return is_plain(*tensors) and self._kind(given) in self.tried[key]

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
        kind, known = self._kind(given), self.tried.get(key, ())
        self.tried[key] = known if kind in known else (*known, kind)
        return True

    def _kind(self, given: Facts) -> str | None:
        """What a proof holds for."""
        kind = kind_of(given)
        return None if kind is None else kind + modes_of(modules_in(given)) + self._modes()

    def _modes(self) -> str:
        return "" if self.root is None else f" of {modes_of([self.root])}"

    @contextmanager
    def refusing(self, key: int) -> Iterator[None]:
        """Refuse a loop that turns out to be no scan while it is tried."""
        try:
            yield
        except NotRolledError as error:
            if self.is_tried:
                self.refuse(*self.places[key], str(error))
            raise

    def scan(self, key: int, run: Run, there: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A scan where nothing is compiled; ``there`` are the places of what steps hand out."""
        if self.is_tried:
            carry, ys = self._tried(key, run)
            pairs = zip(there, ys, strict=True)
            self.whole.update({(key, i): y.dtype for i, y in pairs if not y.dtype.is_floating_point})
            return carry, ys
        peeled = run._replace(peels=run.peels or key in self.peeled)
        return self._compiled(key, peeled, [self.whole.get((key, i)) for i in there])

    def _compiled(self, key: int, run: Run, whole: Sequence[torch.dtype | None]) -> tuple[Any, Any]:
        """The scan of a model that is not compiled; step by step where it cannot be."""
        if key not in self.compiled:
            code = scanned.__code__.replace()  # of its own: Dynamo counts how often it compiles one
            function = types.FunctionType(code, scanned.__globals__, scanned.__name__)
            self.compiled[key] = torch.compile(function, backend="layerzero", dynamic=True)
        compiled = self.compiled[key]
        try:
            assert compiled is not None, "one that failed is not rolled again"
            carry, ys = compiled(*run, whole, self.chunk)
            return carry, ys
        except Exception as error:  # noqa: BLE001  # whatever a compiler says, the steps are what they are
            self.compiled[key] = None
            record("LOOP_NOT_COMPILED", f"the loop at {self.where(key)}", error)
        return self._tried(key, run)

    def _tried(self, key: int, run: Run) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The scan's own semantics, in Python: what is carried has the same shape and dtype in every step."""
        step, init, answers, items, steps, peels = run
        if steps < LEAST_STEPS:
            raise NotRolledError(f"{steps} steps were tried, which is fewer than {LEAST_STEPS}")
        carry, out = init, []
        kinds: list[Any] = [None if peels else _kinds(init)]
        for i in range(steps):
            told = answers[0 if i == 0 else 2 if i == steps - 1 else 1]
            with _without_effects() if self.is_tried else nullcontext():
                held = pytree.tree_map(lambda each: each, carry)  # containers of their own, around the same tensors
                carry, ys = step(*held, *told, *(_item(each, i, steps) for each in items))
            kinds.append(_kinds(carry))
            out.append(ys)
        if any(each is None for each in kinds[1:]):
            raise NotRolledError("it carries something else than tensors")
        if any(each != kinds[1] for each in kinds[2:]):
            raise NotRolledError("what it carries changes its shape or dtype")
        if kinds[0] != kinds[1]:
            self.peeled.add(key)
        self._check_attributes(key, init, carry, items)
        found = [[ys[j] for ys in out] for j in range(len(out[0]))]
        if any(not isinstance(y, Tensor) or _kinds((y,)) != _kinds((each[0],)) for each in found for y in each):
            raise NotRolledError("what its steps hand out changes its shape or dtype, or is no tensor")
        return carry, tuple(torch.stack(each) for each in found)

    def _check_attributes(self, key: int, init: Any, carry: tuple[Any, ...], items: Any) -> None:
        """Refuse attributes that are left as what others hold: behind a scan they have memory of their own."""
        places = self.owned.get(key, [])
        others = [each.read if isinstance(each, Items) else each for each in items]
        others += [] if self.root is None or not places else [*self.root.parameters(), *self.root.buffers()]
        known = _memory([init, others, [carry[i] for i in self.read_behind.get(key, [])]])
        for i in places:
            own = _memory(carry[i])
            if own & known:
                raise NotRolledError("an attribute is left as something that has another name")
            known |= own


def _memory(tree: Any) -> set[int]:
    tensors = (each for each in leaves(tree) if isinstance(each, Tensor) and each.numel())
    return {each.untyped_storage().data_ptr() for each in tensors}


@contextmanager
def _without_effects() -> Iterator[None]:
    try:
        with WithoutEffects():  # type: ignore[no-untyped-call]  # torch leaves it so
            yield
    except RefusedError as refusal:
        raise NotRolledError(str(refusal)) from refusal


def _item(items: Tensor | Items | None, step: int, steps: int) -> Tensor | None:
    return items.at(step, steps) if isinstance(items, Items) else None if items is None else items[step]


def _kinds(found: Any) -> Any:
    """Shapes and dtypes of what is carried; None where some of it is neither a tensor nor nothing."""
    leaves, spec = pytree.tree_flatten(found)
    if not all(each is None or isinstance(each, Tensor) for each in leaves):
        return None
    return str(spec), [None if each is None else (tuple(each.shape), each.dtype, each.device) for each in leaves]


def refusals(support: Support) -> Iterator[str]:
    """Why loops stay as they are, with their places."""
    for (file, line), why in support.refused.items():
        home = support.homes.get((file, line), 0)
        if why and (not home or ((file, home) in support.ran and file in support.files)):
            yield f"{file}:{line}: {why}"
