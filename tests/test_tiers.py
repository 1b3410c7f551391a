"""Of the cases of a test, the first tier has those that its mark says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import left_out


class Item:
    """A collected case with its marks."""

    def __init__(self, name: str, *marks: Any) -> None:
        self.name, self.nodeid, self.marks = name, f"tests/test_a.py::{name}", marks

    def iter_markers(self, name: str) -> list[Any]:
        return [mark.mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next(iter(self.iter_markers(name)), None)


def kept(*items: Item) -> list[str]:
    later = left_out(items)
    return [item.name for item in items if item not in later]


def test_every_third_case_meets_all_values_of_a_grid_of_twos():
    mark = pytest.mark.sampled(3)
    grid = [Item(f"test_a[{one}-{other}]", mark) for one in range(4) for other in "xy"]
    assert kept(*grid, Item("test_b")) == ["test_a[0-x]", "test_a[1-y]", "test_a[3-x]", "test_b"]


def test_a_grid_is_covered_by_as_few_cases_as_its_longest_side():
    grid = []
    for one, other, third in itertools.product(range(4), range(3), range(2)):
        grid.append(Item(f"test_a[{one}-{other}-{third}]", pytest.mark.sampled))
        grid[-1].callspec = SimpleNamespace(params={"one": one, "other": other, "third": third})
    assert kept(*grid) == ["test_a[0-0-0]", "test_a[1-1-1]", "test_a[2-2-0]", "test_a[3-0-1]"]


def test_cases_are_kept_by_name_whatever_stands_in_it():
    items = [Item(f"test_a[{name}]", pytest.mark.sampled("x::y", "a[0]")) for name in ("a", "x::y", "a[0]")]
    assert kept(*items) == ["test_a[x::y]", "test_a[a[0]]"]


def test_a_thorough_case_is_left_out_of_what_is_sampled_too():
    cases = [Item("test_a[0]", pytest.mark.sampled(2), pytest.mark.thorough), Item("test_a[1]"), Item("test_a[2]")]
    assert kept(*cases) == ["test_a[2]"]
    assert kept(Item("test_b", pytest.mark.thorough)) == []


def test_a_name_that_is_no_case_is_an_error():
    with pytest.raises(pytest.UsageError, match=r"test_a: of \('x', 'z'\), these are cases: \['test_a\[x\]'\]"):
        kept(*[Item(f"test_a[{name}]", pytest.mark.sampled("x", "z")) for name in "xy"])
