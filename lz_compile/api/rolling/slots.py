"""State that a loop keeps by places of a list or tensor: each step reads what the one before has written."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lz_compile.api.rolling.places import Counter, indexed, is_place, place_of
from lz_compile.api.rolling.syntax import (
    PREFIX,
    NotRolledError,
    called,
    is_name,
    is_whole,
    number,
    placed,
    support,
    values_read,
)


@dataclass(frozen=True)
class Slot:
    """The name that stands for what the step before has written, and what that is in the first step."""

    name: str
    initial: ast.expr


def with_slots(
    body: list[ast.stmt], counters: dict[str, Counter], ranges: Sequence[ast.expr], started: set[str]
) -> tuple[list[ast.stmt], list[Slot]]:
    """Statements that read a state by a name instead of by its place; ``started`` are lists that are not empty.

    What is written and read in another way is left as it is.
    """
    slots: list[Slot] = []
    every = [each for statement in body for each in ast.walk(statement)]
    grown = {name for each in every if (name := appended_to(each)) is not None}
    kept = {each.value.id for each in every if is_place(each, counters) and isinstance(each.ctx, ast.Store)}  # type: ignore[attr-defined]
    for name in sorted(kept | grown):
        uses = _Uses(name, counters, len(slots))
        try:
            found = uses.visit(ast.Module([copy.deepcopy(each) for each in body], [])).body
        except NotRolledError:
            continue
        if len(uses.writes) != 1 or name in values_read(*found):
            continue
        if not uses.reads:  # but what the step itself has written
            body = found
            continue
        (write,), (old, new) = uses.writes, uses.names
        if not _follow(uses, write, ranges) or name in grown - started:
            continue
        body = [_assigned(new, ast.Name(old, ast.Load())), *found, _assigned(old, ast.Name(new, ast.Load()))]
        for each in body:
            placed(each, found[0])
        slots.append(Slot(old, placed(_initial(name, uses, ranges), found[0])))
    return body, slots


def appended_to(node: ast.AST) -> str | None:
    """The name of a list that a statement appends to."""
    owner, given = called(node, "append")
    return owner if len(given) == 1 else None


def inserted_to(node: ast.AST) -> str | None:
    """The name of a list that a statement inserts to at its beginning."""
    owner, given = called(node, "insert")
    return owner if len(given) == 2 and number(given[0]) == 0 else None


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


@dataclass(frozen=True)
class _Place:
    """Where, along which dimension: as far from the counter; the last of a list, where there is no counter."""

    counter: Counter | None = None
    dim: int = 0
    offset: int = 0


class _Uses(ast.NodeTransformer):
    """Reads and writes of a name by place: a read is one of a name, for the step before or for this one."""

    def __init__(self, name: str, counters: dict[str, Counter], number: int) -> None:
        self._name, self._counters = name, counters
        self.names = f"{PREFIX}c{number}", f"{PREFIX}w{number}"
        self.reads: list[_Place] = []
        self.writes: list[_Place] = []

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        """``out[t] = y``, after what it reads."""
        node.value = self.visit(node.value)
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript) or not is_name(target.value, self._name):
            node.targets = [self.visit(each) for each in node.targets]
            return node
        if not is_place(target, self._counters):
            raise NotRolledError("it is written to elsewhere")
        place, rest = self._place(target)
        if not all(map(is_whole, rest)):
            raise NotRolledError("a part of it is written to")
        return self._written(node, place, node.value)

    def visit_If(self, node: ast.If) -> ast.AST:
        """A write under a condition: of names only, which a proof holds for."""
        count = len(self.writes)
        self.generic_visit(node)
        if len(self.writes) > count and any(isinstance(each, ast.Attribute) for each in ast.walk(node.test)):
            raise NotRolledError("it is written to under a condition")
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        """``out.append(y)``."""
        if appended_to(node) != self._name or not isinstance(node.value, ast.Call):
            return self.generic_visit(node)
        node.value.args = [self.visit(node.value.args[0])]
        return self._written(node, _Place(), node.value.args[0])

    def _written(self, node: ast.Assign | ast.Expr, place: _Place, value: ast.expr) -> list[ast.AST]:
        new = self.names[1]
        self.writes.append(place)
        held = placed(_assigned(new, value), node)
        name = ast.copy_location(ast.Name(new, ast.Load()), node)
        if isinstance(node, ast.Assign):
            node.value = name
        elif isinstance(node.value, ast.Call):
            node.value.args = [name]
        return [held, node]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``out[t - 1]``, ``out[-1]``."""
        if not isinstance(node.value, ast.Name) or node.value.id != self._name or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        if is_place(node, self._counters):
            place, rest = self._place(node)
        elif ast.unparse(node.slice) == "-1":
            place, rest = _Place(), []
        else:
            raise NotRolledError("it is read elsewhere")
        is_new = place in self.writes
        if not is_new:
            self.reads.append(place)
        return indexed(ast.copy_location(ast.Name(self.names[is_new], ast.Load()), node), rest)

    def _place(self, node: ast.Subscript) -> tuple[_Place, list[ast.expr]]:
        read, rest = place_of(node, self._counters)
        offset = _offset(read.place, read.counter)
        if offset is None or read.end is not None:
            raise NotRolledError("where is not known")
        return _Place(read.counter, read.dim, offset), rest


def _offset(place: ast.expr | None, counter: Counter | None) -> int | None:
    """``c`` of ``t + c``."""
    if place is None or counter is None:
        return None
    if isinstance(place, ast.Name):
        return 0
    if not isinstance(place, ast.BinOp) or not isinstance(place.op, (ast.Add, ast.Sub)):
        return None
    for one, other in ((place.left, place.right), (place.right, place.left)):
        if isinstance(other, ast.Constant) and type(other.value) is int:
            inner = _offset(one, counter)
            is_less = isinstance(place.op, ast.Sub)
            if inner is not None and not (is_less and other is place.left):
                return inner - other.value if is_less else inner + other.value
    return None


def _follow(uses: _Uses, write: _Place, ranges: Sequence[ast.expr]) -> bool:
    """Whether all that is read is what the step before has written."""
    if write.counter is None:
        return all(each == write for each in uses.reads)
    step = _step(ranges[write.counter.place])
    return step is not None and all(each == replace(write, offset=write.offset - step) for each in uses.reads)


def _step(counted: ast.expr) -> int | None:
    """By how much a range goes on, where that is written."""
    if not isinstance(counted, ast.Call) or not isinstance(counted.func, ast.Attribute):
        return None
    by = counted.args[2] if len(counted.args) == 3 else ast.Constant(1)
    try:
        found = ast.literal_eval(by)
    except ValueError:
        return None
    return -found if counted.func.attr == "backwards" else found  # type: ignore[no-any-return]


def _initial(name: str, uses: _Uses, ranges: Sequence[ast.expr]) -> ast.expr:
    """What a name holds where the first step reads it."""
    place, base = uses.reads[0], ast.Name(name, ast.Load())
    if place.counter is None:
        return support("at", base, ast.Constant(0), ast.Constant(None), ast.Constant(0))
    given = [base, ast.Constant(place.dim), ranges[place.counter.place], ast.Constant(place.offset)]
    return support("at", *given)
