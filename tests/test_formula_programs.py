"""The formula core: what is read of any program of index expressions is what it computes."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch
from formula_programs import STEPS, Program, generate, value
from formula_values import Formula
from tiers import examples

_PAGE = Path(__file__).parents[1] / "scripts" / "operator_table.py"
_spec = importlib.util.spec_from_file_location("operator_table", _PAGE)
assert _spec is not None, _PAGE
assert _spec.loader is not None, _PAGE
operator_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(operator_table)

#: Where a number that may be NaN drops out of a formula, as in ``lerp(x, x, w)``, there is none.
_CANCELS = {"pointwise": {"lerp", "sub"}, "select by condition": {"mul"}}


def check(program: Program, points: int = 6) -> frozenset[str]:
    """Hold the formula of the last value against the graph's; the operators at which reading gave up."""
    formula = Formula(program, program.values[-1])
    expected = value(formula.node)
    for point in formula.points(program.rng, points):
        assert formula.at(point) == pytest.approx(expected[point].item(), abs=1e-9), f"{program.graph}\nat {point}"
    return formula.gave_up()


def test_any_program_of_index_expressions_is_read_for_what_it_computes() -> None:
    count, whole, gave_up = examples(200, 1500), 0, Counter[str]()
    for seed in range(count):
        stops = check(generate(seed))
        gave_up.update(stops)
        whole += not stops
    assert whole > 0.8 * count, f"of {count} programs, {whole} are read to their inputs; reading gave up at {gave_up}"


def test_a_formula_says_at_which_operator_reading_gave_up() -> None:
    program = Program(0)
    sines = program.call(torch.sin, program.values[0])
    program.values.append(program.call(torch.flip, sines, [0]))
    assert check(program) == {"sin"}


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_operation_is_read(name: str) -> None:
    read = 0
    for seed in range(30):
        program = Program(seed)
        if program.step(name):
            assert check(program) <= _CANCELS.get(name, set())
            read += 1
    assert read > 3


def test_the_table_of_operators_is_what_the_core_reads() -> None:
    assert operator_table.page() == operator_table.PAGE.read_text()
    assert not operator_table.unlisted()
