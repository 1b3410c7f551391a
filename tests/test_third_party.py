"""Models of other projects, as their own code spells them: what is recognised in each is what its source reads as."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import lz_compile
from benchmarks.third_party import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_instances_are_those_of_the_source(row: Row) -> None:
    if lacks := row.lacks():
        pytest.skip(lacks)
    torch.manual_seed(0)
    with torch.no_grad():
        graphs = lz_compile.explain(row.build().eval(), *row.inputs()).graphs
    found = Counter(match.op for graph in graphs for match in graph.matches)
    told = Counter(miss.reason.code for graph in graphs for miss in graph.near_misses if miss.op == "attention")
    assert {op: found[op] for op in row.expected} == row.expected
    assert told == Counter(row.told)
