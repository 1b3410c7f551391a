"""The legend of an op's module, which people read, says of every operand what its table ``SHAPES``, which is checked, says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lz_compile.lowering import ops

#: Names, then what is said of them in brackets: ``u, vh   [E, R], [R, D]``.
_ROW = re.compile(r"^\s{4}(?P<names>[a-z_]+(?:, [a-z_]+)*) +(?P<rest>.*)$")
_SHAPE = re.compile(r"\[([^\]]*)\]")
#: Several operands side by side in one row.
_BESIDE = re.compile(r"(\w+) +\[([^\]]*)\]")


def told(op: str) -> dict[str, list[str]]:
    """Every shape that the legend gives an operand."""
    module = ops.module(op)
    names = {*module.Operands.names}
    found: dict[str, list[str]] = {}
    for line in legend(module.__doc__ or ""):
        row = _ROW.match(line)
        beside = [(name, shape) for name, shape in _BESIDE.findall(line) if name in names]
        if len(beside) > 1:
            for name, shape in beside:
                found.setdefault(name, []).append(shape)
        elif row is not None and set(row["names"].split(", ")) <= names:
            listed, shapes = row["names"].split(", "), _SHAPE.findall(row["rest"])
            for place, name in enumerate(listed):
                found.setdefault(name, []).extend(shapes if len(listed) == 1 else shapes[place : place + 1])
    return found


def legend(text: str) -> Iterator[str]:
    """The indented block that gives the canonical layout."""
    after = text.partition("Canonical layout")[2]
    block = after.partition("\n\n")[2].partition("\n\n")[0]
    yield from block.splitlines()


def letters(shape: str) -> tuple[str, ...]:
    """The sizes of a legend's shape without what only says that they may be one."""
    return tuple(re.sub(r"\s*(\||or) *1$", "", part.strip()) for part in shape.split(","))


def may_be_one(shape: str) -> set[int]:
    """Which dimensions a legend's shape says may be one."""
    return {place for place, part in enumerate(shape.split(",")) if re.search(r"(\||or) *1$", part.strip())}


@pytest.mark.parametrize("op", ops.names())
def test_the_legend_gives_every_operand_the_sizes_of_its_table(op: str) -> None:
    module, found = ops.module(op), told(op)
    for name, dims in module.SHAPES.items():
        sizes = tuple(each.removesuffix("|1") for each in dims.split())
        shapes = [letters(shape) for shape in found.get(name, [])]
        if sizes[:1] == ("...",):
            assert {shape[-len(sizes) + 1 :] for shape in shapes} == {sizes[1:]}, name
        elif shapes:
            assert shapes[0] == sizes, name
        else:  # a number, or like another operand, which the legend says
            assert not sizes or (op, name) in {("attention", "fill"), ("rope", "sin")}, name


@pytest.mark.parametrize("op", ["blend", "rope", "sampling"])
def test_the_legend_says_what_may_be_one(op: str) -> None:
    found = told(op)
    for name, dims in ops.module(op).SHAPES.items():
        own = {place for place, each in enumerate(dims.split()) if each.endswith("|1")}
        assert all(may_be_one(shape) == own for shape in found.get(name, [])), name


def test_a_legend_that_contradicts_its_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.module("norm").SHAPES, "weight", "N")
    with pytest.raises(AssertionError, match="weight"):
        test_the_legend_gives_every_operand_the_sizes_of_its_table("norm")
