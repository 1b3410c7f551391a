"""Two tiers: ``make test`` runs a covering sample of cases that are drawn or paired, ``make test-thorough`` all of them.

``@pytest.mark.thorough`` leaves a test to the second tier. ``@pytest.mark.sampled`` keeps as many cases of a grid in the first
as meet every value of every parameter; ``@pytest.mark.sampled(3)`` every third; ``@pytest.mark.sampled("a", "b")`` those of
these names. `examples` is the same for Hypothesis, `shallow` for layers of models. ``LZ_TEST_THOROUGH=1`` runs both tiers.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

IS_THOROUGH = bool(os.environ.get("LZ_TEST_THOROUGH"))


def examples(sample: int, thorough: int) -> int:
    """How many examples Hypothesis draws in this run."""
    return thorough if IS_THOROUGH else sample


def shallow(family: Any) -> Any:
    """A family of models (``zoo.py``) as this run asks for it: one layer where layers are alike, or all of them."""
    return family if IS_THOROUGH else family.with_one_layer()


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those of the collected tests that only the second tier runs.

    Raises:
        pytest.UsageError: a mark keeps no case at all, or names one that does not exist.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [item for name, group in cases.items() for item in _left_out(name, group)]


def _left_out(name: str, group: list[pytest.Item]) -> Iterable[pytest.Item]:
    marks = {mark.args for item in group for mark in item.iter_markers("sampled")}
    (kept,) = marks or {(1,)}
    if not kept:
        sampled = _covering(group)
    elif isinstance(kept[0], int):
        sampled = group[:: kept[0]]
    else:
        sampled = [item for item in group if item.nodeid.partition("[")[2][:-1] in kept]
        if len(sampled) != len(kept):
            raise pytest.UsageError(f"{name}: of {kept}, these are cases: {[item.name for item in sampled]}")
    return (item for item in group if item not in sampled or item.get_closest_marker("thorough"))


def _covering(group: list[Any]) -> list[pytest.Item]:
    """One after the other that which has most values that none before it has; of those, that whose values others have least."""
    first = [item for item in group if not item.get_closest_marker("thorough")]
    wanted = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in first}
    sampled: list[pytest.Item] = []
    met: Counter[tuple[str, int]] = Counter()
    while missing := set().union(*wanted.values()) - met.keys():
        rank = {item: (len(each & missing), -sum(met[value] for value in each)) for item, each in wanted.items()}
        sampled.append(max(rank, key=lambda item: rank[item]))
        met.update(wanted[sampled[-1]])
    return sampled
