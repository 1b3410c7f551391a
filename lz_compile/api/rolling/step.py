"""A step as a function: what it hands out, asks of counters and reads, as names."""

from __future__ import annotations

import ast
import copy
from dataclasses import replace

from lz_compile.api.rolling.parts import Condition, Loop, Scope, Written
from lz_compile.api.rolling.places import Counter, Read, indexed, is_affine, is_size, place_of
from lz_compile.api.rolling.slots import appended_to, inserted_to
from lz_compile.api.rolling.syntax import (
    PREFIX,
    NotRolledError,
    changed_in_place,
    is_name,
    is_path,
    is_single,
    is_whole,
    loads,
    placed,
    stores,
    support,
)


class _Flagged(ast.NodeTransformer):
    """Goes through a step, and knows under which conditions: those that are the same for all steps, and None for others."""

    def __init__(self, varying: set[str]) -> None:
        self._varying, self._flags = varying, list[ast.expr | None]()
        self._asked: list[tuple[tuple[int, bool], ...]] = []

    def visit_For(self, node: ast.For | ast.With) -> ast.AST:
        """A loop or a block in a step."""
        self._flags.append(None)
        node = self.generic_visit(node)  # type: ignore[assignment]
        self._flags.pop()
        return node

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        """``if self.keeps: out.append(y)``, ``x[:, t] if self.keeps else y``."""
        node.test = self.visit(node.test)
        names = loads(node.test)
        is_fixed = not names & self._varying and not any(each.startswith(PREFIX) for each in names)
        is_fixed = is_fixed and all(is_size(each) for each in ast.walk(node.test) if isinstance(each, ast.Call))
        for name, test in (("body", node.test), ("orelse", placed(ast.UnaryOp(ast.Not(), node.test), node))):
            self._flags.append(copy.deepcopy(test) if is_fixed else None)
            self._asked.append(_answered(node.test, name == "body"))
            inner = getattr(node, name)
            setattr(node, name, [self.visit(each) for each in inner] if isinstance(inner, list) else self.visit(inner))
            self._flags.pop()
            self._asked.pop()
        return node

    visit_With, visit_IfExp = visit_For, visit_If

    def _under(self) -> ast.expr | None:
        """The conditions that are the same for all steps, as one."""
        fixed = [each for each in self._flags if each is not None]
        return placed(ast.BoolOp(ast.And(), fixed), fixed[0]) if len(fixed) > 1 else fixed[0] if fixed else None


def _answered(test: ast.expr, answer: bool) -> tuple[tuple[int, bool], ...]:
    """What tests of a counter are answered where a condition holds, or does not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answered(test.operand, not answer)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == answer:
        return tuple(found for each in test.values for found in _answered(each, answer))
    is_test = isinstance(test, ast.Name) and test.id.startswith(f"{PREFIX}b")
    return ((int(test.id.removeprefix(f"{PREFIX}b")), answer),) if is_test else ()  # type: ignore[attr-defined]


class WrittenOut(_Flagged):
    """Appending to a list, or writing to places of a tensor, as a value that the step hands out."""

    def __init__(self, loop: Loop, counters: dict[str, Counter], names: Scope, body: list[ast.stmt]) -> None:
        super().__init__(stores(*body, loop.node.target) | counters.keys())
        self._loop, self._counters, self._before = loop, counters, names.before
        self._lists, self._changed = names.lists | names.started, changed_in_place(*body)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """``out.append(y)``, ``out.insert(0, y)``."""
        name, inserted = appended_to(node), inserted_to(node)
        if (name is None and inserted is None) or not isinstance(node.value, ast.Call):
            return node
        found = name or inserted or ""
        if found not in self._lists:
            raise NotRolledError(f"{found} is no list that was made in front of the loop", node.lineno)
        return self._handed_out(node, Written(found, in_front=name is None), node.value.args[-1])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """``h += x`` as ``h = h + x``: a scan's state is no memory to write to."""
        if not isinstance(node.target, ast.Name):
            return node
        if node.target.id in self._lists and is_single(node.value):
            return self._handed_out(node, Written(node.target.id), node.value.elts[0])  # type: ignore[attr-defined]
        old = ast.Name(node.target.id, ast.Load())
        held = support("like", old, ast.BinOp(old, node.op, node.value))
        return ast.copy_location(ast.Assign([node.target], held), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """``out[:, t] = y``, ``out = torch.cat([out, y], 1)``, ``out = out + [y]``."""
        target, value = node.targets[0], node.value
        if len(node.targets) == 1 and isinstance(target, ast.Name):
            joined = _joined(target.id, value)
            if joined is not None and target.id in self._before:
                return self._handed_out(node, Written(target.id, joined=joined[1]), joined[0])
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and target.id in self._lists:
                for one, other, in_front in ((value.left, value.right, False), (value.right, value.left, True)):
                    if is_name(one, target.id) and isinstance(other, (ast.List, ast.Tuple)) and is_single(other):
                        return self._handed_out(node, Written(target.id, in_front=in_front), other.elts[0])
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return node
        if not loads(target.slice) & self._counters.keys():
            return node
        read, rest = place_of(target, self._counters)
        if any(not is_whole(each) for each in rest) or read.end is not None:
            raise NotRolledError("it writes to a part of a place of a tensor", node.lineno)
        return self._handed_out(node, Written(target.value.id, read), node.value)

    def _handed_out(self, node: ast.stmt, written: Written, value: ast.expr) -> ast.AST:
        if isinstance(value, ast.Name) and value.id in self._changed:
            raise NotRolledError(f"{value.id} is handed out, and changed in place later: other results", node.lineno)
        if None in self._flags:
            raise NotRolledError("not every step hands something out", node.lineno)
        under, others = self._under(), [each for each in self._loop.written if each.name == written.name]
        if others and (under is None or any(each.under is None for each in others)):
            raise NotRolledError(f"a step hands out to {written.name} more than once", node.lineno)
        self._loop.written.append(replace(written, under=under))
        name = ast.Name(f"{PREFIX}y{len(self._loop.written) - 1}", ast.Store())
        return ast.copy_location(ast.Assign([name], value), node)


_JOINING = ("torch.cat", "torch.concat", "torch.concatenate")


def _joined(name: str, value: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """What is joined to ``name``, and along which dimension: ``torch.cat([name, y], dim)``."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in _JOINING:
        return None
    named = {each.arg: each.value for each in value.keywords}
    dim = value.args[1] if len(value.args) == 2 else named.pop("dim", ast.Constant(0))
    match value.args[:1]:
        case [ast.List(elts=[first, joined]) | ast.Tuple(elts=[first, joined])] if not named and is_name(first, name):
            return joined, dim
    return None


class Branches(ast.NodeTransformer):
    """What branches of a step ask of a counter, as names: it is the same for all steps but the first."""

    def __init__(self, loop: Loop, counters: dict[str, Counter], changed: set[str], names: Scope) -> None:
        self._loop, self._counters, self._changed, self._is_asked = loop, counters, changed, False
        self._perhaps = names.before - names.sure

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        """``if t == 0:``, ``a if t > 0 else b``."""
        self._is_asked = True
        node.test = self.visit(node.test)
        self._is_asked = False
        outside = [each for each in ast.walk(node.test) if isinstance(each, ast.Subscript)]
        if (loads(node.test) - loads(*outside)) & self._counters.keys():
            text = ast.unparse(node.test)
            raise NotRolledError(
                f"what a branch asks of the counter is not the same for all steps ({text})", node.lineno
            )
        for name, each in ast.iter_fields(node):
            if name != "test":
                parts = each if isinstance(each, list) else [each]
                made = [self.visit(part) for part in parts]
                setattr(node, name, made if isinstance(each, list) else made[0])
        return node

    visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """``t < n``."""
        names = loads(node) & self._counters.keys()
        if not self._is_asked or len(names) != 1 or len(node.ops) != 1 or type(node.ops[0]) not in _ORDERS:
            return node
        (name,) = names
        sides = (node.left, node.comparators[0])
        if not all(is_affine(each, name) for each in sides) or loads(node) & self._changed:
            return node
        if loads(node) & self._perhaps:
            raise NotRolledError(
                f"{min(loads(node) & self._perhaps)} may have no value in front of the loop", node.lineno
            )
        difference = placed(ast.BinOp(sides[0], ast.Sub(), sides[1]), node)
        self._loop.tests.append(Condition(self._counters[name], difference, type(node.ops[0]).__name__))
        return placed(ast.Name(f"{PREFIX}b{len(self._loop.tests) - 1}", ast.Load()), node)


_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class Reads(_Flagged):
    """What a step reads at places that a counter gives, as names."""

    def __init__(self, loop: Loop, counters: dict[str, Counter], changed: set[str]) -> None:
        super().__init__(changed | stores(loop.node.target) | counters.keys())
        self._loop, self._counters, self._changed = loop, counters, changed

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``x[:, t]``."""
        if not isinstance(node.ctx, ast.Load) or not loads(node.slice) & self._counters.keys():
            return self.generic_visit(node)
        if not is_path(node.value) or loads(node.value) & (self._changed | self._counters.keys()):
            raise NotRolledError(f"a step reads a place of {ast.unparse(node.value)}, which it changes", node.lineno)
        read, rest = place_of(node, self._counters)
        moved = loads(*(each for each in (read.place, read.end) if each is not None)) & self._changed
        if moved:
            raise NotRolledError(f"a step changes {min(moved)}, and reads a place by it", node.lineno)
        place = next((i for i, each in enumerate(self._loop.reads) if _same(each, read)), len(self._loop.reads))
        under, asked = self._under(), tuple(each for part in self._asked for each in part)
        if place == len(self._loop.reads):
            self._loop.reads.append(replace(read, under=under, asked=asked))
        known = self._loop.reads[place]
        either = (
            None if under is None or known.under is None else placed(ast.BoolOp(ast.Or(), [known.under, under]), node)
        )
        both = tuple(each for each in known.asked if each in asked)
        self._loop.reads[place] = replace(known, under=either, asked=both)
        return indexed(ast.copy_location(ast.Name(f"{PREFIX}x{place}", ast.Load()), node), rest)


class Transposed(ast.NodeTransformer):
    """``w.T`` as a call: an attribute is taken in front of a scan (2.13), which refuses it beside the tensor itself."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """``w.T``, ``w.mT``."""
        self.generic_visit(node)
        if node.attr not in ("T", "mT") or not isinstance(node.ctx, ast.Load):
            return node
        return placed(support("transposed", node.value, ast.Constant(node.attr)), node)


def written_in_place(statement: ast.stmt, names: Scope) -> ast.stmt:
    """``h.mul_(a).add_(b)`` as ``h = h.mul(a); h = h.add(b)``, and ``out[t].copy_(y)`` as ``out[t] = y``.

    Of tensors that are nobody else's; whether other names of them are read in a step is left to the proof.
    """
    for name in ("body", "orelse"):
        inner = getattr(statement, name, None)
        if isinstance(statement, (ast.If, ast.With)) and isinstance(inner, list):
            setattr(statement, name, [written_in_place(each, names) for each in inner])
    links = _links(statement.value) if isinstance(statement, ast.Expr) else []
    if not links:
        return statement
    owner, (first, *more) = links[0].func.value, links  # type: ignore[attr-defined]
    if isinstance(owner, ast.Subscript) and isinstance(owner.value, ast.Name):
        is_copied = first.func.attr == "copy_" and len(first.args) == 1 and not first.keywords and not more  # type: ignore[attr-defined]
        if owner.value.id not in names.tensors or not is_copied:
            return statement
        target = ast.Subscript(owner.value, owner.slice, ast.Store())
        return placed(ast.copy_location(ast.Assign([target], first.args[0]), statement), statement)
    if not isinstance(owner, ast.Name) or owner.id not in names.tensors:
        return statement
    held: ast.expr = ast.Name(owner.id, ast.Load())
    for link in links:
        held = support("written", held, ast.Constant(link.func.attr), ast.Tuple(link.args, ast.Load()), _named(link))  # type: ignore[attr-defined]
    return placed(ast.copy_location(ast.Assign([ast.Name(owner.id, ast.Store())], held), statement), statement)


#: Methods that draw random numbers, or change what a tensor is.
_OTHER = frozenset(
    "bernoulli_ normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ requires_grad_ detach_ resize_ set_ "
    "transpose_ t_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ retain_grad_ share_memory_".split()
)


def _links(node: ast.expr) -> list[ast.Call]:
    """Methods that write to a tensor, one after the other; none where it is anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    name, owner = node.func.attr, node.func.value
    is_one = name.endswith("_") and not name.endswith("__") and name not in _OTHER
    is_one = is_one and all(each.arg is not None for each in node.keywords)
    is_one = is_one and not any(isinstance(each, ast.Starred) for each in node.args)
    before = [] if isinstance(owner, (ast.Name, ast.Subscript)) else _links(owner)
    return [*before, node] if is_one and (before or isinstance(owner, (ast.Name, ast.Subscript))) else []


def _named(call: ast.Call) -> ast.expr:
    return ast.Dict([ast.Constant(each.arg) for each in call.keywords], [each.value for each in call.keywords])


def _same(one: Read, other: Read) -> bool:
    parts = [(each.base, each.place, each.end) for each in (one, other)]
    texts = [[None if part is None else ast.dump(part) for part in each] for each in parts]
    return one.dim == other.dim and one.counter == other.counter and texts[0] == texts[1]
