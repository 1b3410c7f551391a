"""The formula core: what is read of any program of index expressions is what it computes."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from formula_programs import STEPS, Formula, Program, generate, value

#: Operators that random programs bring to where no formula is, and why.
GIVEN_UP: dict[str, str] = {}
_SECONDS = 15.0


def check(program: Program, points: int = 6) -> frozenset[str]:
    """Hold the formula of the last value against the graph's; the operators at which reading gave up."""
    formula = Formula(program, program.values[-1])
    expected = value(formula.node)
    for point in formula.points(program.rng, points):
        assert formula.at(point) == pytest.approx(expected[point].item(), abs=1e-9), f"{program.graph}\nat {point}"
    return formula.gave_up()


def test_any_program_of_index_expressions_is_read_for_what_it_computes() -> None:
    began, seed, gave_up = time.perf_counter(), 0, Counter[str]()
    while seed < 40 or time.perf_counter() - began < _SECONDS:
        gave_up.update(check(generate(seed)))
        seed += 1
    assert set(gave_up) <= GIVEN_UP.keys(), f"of {seed} programs, reading gave up at {gave_up}"


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_operation_is_read(name: str) -> None:
    read = 0
    for seed in range(30):
        program = Program(seed)
        if program.step(name):
            assert not check(program)
            read += 1
    assert read > 3
