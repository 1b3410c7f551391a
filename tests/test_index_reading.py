"""Tensors as functions of their index: what is read of any program of positions is what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from backends import rewritten
from graphs import effects_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_oracle import DYNAMIC, SIZES, Asked, Concrete, ask, named
from tiers import examples
from torch import Tensor

from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.formula.piecewise import Piecewise, Value
from lz_compile.passes.formula.polynomial import Polynomial, Variable
from lz_compile.passes.formula.predicates import AtLeast, Constant, Every, Given, Predicate, Some, Zero
from lz_compile.passes.masks.constants import Constants
from lz_compile.passes.masks.index_reading import Reader

# ---- values at every index ----------------------------------------------------------------------------------------


class Numbers:
    """What a value comes to at every index of one run."""

    def __init__(self, concrete: Concrete) -> None:
        self.concrete = concrete

    def variable(self, each: Variable) -> Tensor:
        """A variable at every index."""
        shape = self.concrete.shape
        if isinstance(each.source, Axis):
            dim = [group[0] if group else None for group in self.concrete.asked.axes.groups].index(each.source)
            return torch.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(4)]).expand(shape)
        if isinstance(each.source, tuple):
            inner, divisor = each.source
            return torch.div(self.polynomial(inner), divisor, rounding_mode="floor")
        return torch.full(shape, int(each.source.subs(self.concrete.known)))

    def polynomial(self, value: Polynomial) -> Tensor:
        """A polynomial at every index."""
        total = torch.zeros(self.concrete.shape, dtype=torch.float64)
        for monomial, factor in value.terms.items():
            term = torch.full(self.concrete.shape, float(Fraction(factor)), dtype=torch.float64)
            for each in monomial:
                term = term * self.variable(each)
            total = total + term
        return total

    def predicate(self, value: Predicate) -> Tensor:
        """A condition at every index."""
        match value:
            case Constant(holds):
                return torch.full(self.concrete.shape, holds)
            case AtLeast(inner):
                return self.polynomial(inner) >= 0
            case Zero(inner, holds):
                return (self.polynomial(inner) == 0) == holds
            case Every(parts):
                return torch.stack([self.predicate(part) for part in parts]).all(0)
            case Some(parts):
                return torch.stack([self.predicate(part) for part in parts]).any(0)
            case Given():
                raise AssertionError("nothing here is data")

    def check(self, value: Value, expected: Tensor) -> None:
        """Every case of the value against the tensor."""
        if not isinstance(value, Piecewise):
            assert torch.equal(self.predicate(value), expected.bool())
            return
        covered = torch.zeros(self.concrete.shape, dtype=torch.int64)
        for where, each in value.cases:
            inside = self.predicate(where)
            covered += inside
            numbers = self.polynomial(each) if isinstance(each, Polynomial) else torch.full_like(covered, each)  # type: ignore[arg-type]
            assert torch.equal(numbers[inside].double(), expected.double()[inside])
        assert (covered == 1).all(), "exactly one case holds"


def data_in(value: Value) -> bool:
    """Whether a value depends on what only data tell."""
    if isinstance(value, Piecewise):
        return any(each.is_data for each in value.variables)
    match value:
        case Given():
            return True
        case Every(parts) | Some(parts):
            return any(data_in(part) for part in parts)
        case AtLeast(inner) | Zero(inner):
            return any(each.is_data for each in inner.variables)
    return False


def read(question: Asked) -> Value:
    """The value of the result at its index."""
    effects = effects_of(question.module)
    reader = Reader(effects, Constants(effects), (*question.axes.queries, *question.axes.keys))
    for group in question.axes.groups:
        reader.give((group,))
    return reader.read(question.node, question.dims)


def compare(make: Callable[..., Tensor], *, dynamic: bool) -> bool:
    """Check what is read against what is computed; whether anything was read at all."""
    question = ask(make, named(make, SIZES[0]), dynamic=DYNAMIC if dynamic else False)
    value = read(question)
    if data_in(value):
        return False
    for sizes in SIZES if dynamic else SIZES[:1]:
        concrete = Concrete.of(question, named(make, sizes))
        Numbers(concrete).check(value, concrete.at(question.node, question.dims))
    return True


# ---- any program --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """An operation on earlier results, which are taken by their number (modulo how many there are)."""

    name: str
    first: int
    second: int
    number: int


def _number(value: Tensor) -> Tensor:
    return value.long() if value.dtype == torch.bool else value


def _condition(value: Tensor) -> Tensor:
    return value if value.dtype == torch.bool else value > 0


def _square(value: Tensor) -> Tensor:
    """The larger part of a matrix that both dimensions have."""
    return value


STEPS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda a, b, n: _number(a) + _number(b),
    "sub": lambda a, b, n: _number(a) - _number(b),
    "scale": lambda a, b, n: _number(a) * (n - 3),
    "shift": lambda a, b, n: n - _number(a),
    "divide": lambda a, b, n: _number(a) // (n + 1),
    "remainder": lambda a, b, n: _number(a) % (n + 1),
    "absolute": lambda a, b, n: _number(a).abs(),
    "maximum": lambda a, b, n: torch.maximum(_number(a), _number(b)),
    "minimum": lambda a, b, n: torch.minimum(_number(a), _number(b)),
    "clamp": lambda a, b, n: _number(a).clamp(-n, n),
    "indicator": lambda a, b, n: _condition(a).long(),
    "float": lambda a, b, n: (_number(a).double() * 0.5).mul(2).long(),
    "short": lambda a, b, n: _number(a).to(torch.int16).long(),
    "less": lambda a, b, n: _number(a) < _number(b),
    "at most": lambda a, b, n: _number(a) <= _number(b) + (n - 3),
    "equal": lambda a, b, n: _number(a) == _number(b),
    "unequal": lambda a, b, n: _number(a) != n,
    "fraction": lambda a, b, n: _number(a).double() > n - 2.5,
    "and": lambda a, b, n: _condition(a) & _condition(b),
    "or": lambda a, b, n: _condition(a) | _condition(b),
    "not": lambda a, b, n: ~_condition(a),
    "xor": lambda a, b, n: _condition(a) ^ _condition(b),
    "where": lambda a, b, n: torch.where(_condition(a), _number(b), n - 3),
    "fill": lambda a, b, n: _number(a).masked_fill(_condition(b), n),
    "lower": lambda a, b, n: _number(a).tril(n - 3),
    "upper": lambda a, b, n: a.triu(n - 3),
    "flip": lambda a, b, n: a.flip(n % 2),
    "roll by cat": lambda a, b, n: torch.cat([a[1:], a[:1]]),
    "pad": lambda a, b, n: torch.nn.functional.pad(_number(a)[:, 1:], (1, 0), value=n),
    "transpose": lambda a, b, n: a[:, None].transpose(0, 2).permute(2, 1, 0)[:, 0],
    "reshape": lambda a, b, n: a.reshape(-1).reshape(a.shape),
    "differences": lambda a, b, n: torch.diff(_number(a), prepend=_number(a)[:, :1] - n, dim=-1),
    "gather": lambda a, b, n: a[torch.arange(a.shape[0])[:, None], torch.arange(a.shape[1])[None]],
    "stack": lambda a, b, n: torch.stack([_number(a), _number(b)])[n % 2],
    "repeat": lambda a, b, n: a.repeat(2, 1)[: a.shape[0]],
}
steps = st.builds(Step, st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 6))


def program(given_: tuple[Step, ...]) -> Callable[..., Tensor]:
    """The function that takes these steps from positions and returns the last result."""

    def run(x: Tensor, past: Tensor) -> Tensor:
        queries, keys = x.shape[1], x.shape[1] + past.shape[1]
        query = torch.arange(queries)[:, None].expand(queries, keys)
        values = [query, torch.arange(keys)[None].expand(queries, keys)]
        for step in given_:
            first, second = values[step.first % len(values)], values[step.second % len(values)]
            values.append(STEPS[step.name](first, second, step.number))
        return values[-1]

    return run


drawn = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@settings(drawn, max_examples=examples(30, 160))
@given(st.lists(steps, min_size=1, max_size=10), st.booleans())
def test_any_program_of_positions_is_read_for_what_it_computes(given_: list[Step], dynamic: bool) -> None:
    compare(program(tuple(given_)), dynamic=dynamic)


#: Not read where sizes are symbolic: what a narrow dtype holds is not enough, and an axis would be cut at a symbolic size.
_UNREAD = frozenset({"short", "repeat"})


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", sorted(set(STEPS)))
def test_every_operation_is_read(name: str, dynamic: bool) -> None:
    sum_then = (Step("add", 0, 1, 0), Step(name, 2, 1, 4))
    was_read = compare(program(sum_then), dynamic=dynamic)
    assert was_read == (name not in _UNREAD or not dynamic)


def test_what_depends_on_very_many_conditions_is_not_read() -> None:
    def tangled(x: Tensor, past: Tensor) -> Tensor:
        query, key = torch.arange(x.shape[1])[:, None], torch.arange(past.shape[1])[None]
        found = key <= query
        for step in range(2, 40):
            found = found ^ (key * step <= query * (step + 1) + 3)
        return found

    start = time.process_time()  # the processor's: others may have it meanwhile
    assert data_in(read(ask(tangled, named(tangled, SIZES[0]), dynamic=DYNAMIC)))
    assert time.process_time() - start < 10


def test_what_is_computed_in_very_many_steps_is_not_read() -> None:
    def long(x: Tensor, past: Tensor) -> Tensor:
        query, key = torch.arange(x.shape[1])[:, None], torch.arange(past.shape[1])[None]
        for _ in range(150):
            query = query + 1
        return key <= query

    assert data_in(read(ask(long, named(long, SIZES[0]), dynamic=DYNAMIC)))


@pytest.mark.parametrize("rows", [1, 4])
def test_keys_that_are_joined_to_an_empty_cache_are_keys(rows: int) -> None:
    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (torch.cat([torch.tensor([]), each], -2) for each in (key, value))
        return (query @ key.mT * 0.25).softmax(-1) @ value

    operands = [torch.randn(2, 3, size, 8) for size in (rows, 5, 5)]
    torch.testing.assert_close(rewritten(attended, *operands, strict=True), attended(*operands))
