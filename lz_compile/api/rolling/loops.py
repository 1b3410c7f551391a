"""What a loop in Python's syntax does: what it reads for each step, carries from step to step, and hands out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace

from lz_compile.api.rolling.parts import Loop, Scope
from lz_compile.api.rolling.places import Counter, Read, plain
from lz_compile.api.rolling.slots import with_slots
from lz_compile.api.rolling.spelling import unbound
from lz_compile.api.rolling.step import Branches, Reads, Transposed, WrittenOut, written_in_place
from lz_compile.api.rolling.syntax import (
    PREFIX,
    TWIN,
    NotRolledError,
    changed_in_place,
    first_read,
    is_named_call,
    is_path,
    is_store,
    loads,
    number,
    placed,
    stores,
    support,
    surely_assigned,
    values_read,
)

_REFUSED: dict[type[ast.AST], str] = {
    ast.Break: "it is left by a break",
    ast.Continue: "a step may end early, by continue",
    ast.Return: "it is left by a return",
    ast.Yield: "it yields",
    ast.YieldFrom: "it yields",
    ast.Await: "it awaits",
    ast.Global: "it writes to global names",
    ast.Nonlocal: "it writes to names of an outer function",
    ast.Delete: "it deletes names",
    ast.Try: "it catches exceptions",
    ast.Match: "it matches patterns",
    ast.While: "it holds a while",
    ast.FunctionDef: "it defines a function",
    ast.ClassDef: "it defines a class",
    ast.NamedExpr: "it assigns within an expression",
    ast.Import: "it imports",
    ast.ImportFrom: "it imports",
}
_CHANGING = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem", "discard"}
)
_OUTSIDE = frozenset({"print", "input", "open", "super", "locals", "exec", "eval", "setattr", "delattr"})


def read_loop(node: ast.For, names: Scope) -> Loop:  # noqa: PLR0915  # one question after the other
    """What a loop does.

    Args:
        node: the loop.
        names: what is known of names in front of it and behind it.

    Raises:
        NotRolledError: it stays as it is, with the reason.
    """
    body = [written_in_place(copy.deepcopy(each), names) for each in node.body]
    _check(node, body)
    before, after = names.before, names.after
    foreign = changed_in_place(*body) - names.own - names.lists - names.started
    if foreign:
        raise NotRolledError(f"{min(foreign)} is changed in place, and may be others' too", node.lineno)
    loop = Loop(node)
    counters = {each.name: each for each in _iterated(loop, node.iter, node.target)}
    changed = stores(*body)
    clash = changed & counters.keys()
    if clash:
        raise NotRolledError(f"{min(clash)} counts, and is assigned", node.lineno)
    loop.behind = [each for name, each in counters.items() if name in after]
    copies, loop.slots = with_slots(plain(body, counters, after), counters, loop.ranges, names.started)
    held = {each.name for each in loop.slots}
    names = replace(names, before=before | held, sure=names.sure | held)
    before = names.before
    body = [WrittenOut(loop, counters, names, copies).visit(each) for each in copies]
    body = [Branches(loop, counters, stores(*body), names).visit(each) for each in body]
    body = [Reads(loop, counters, stores(*body)).visit(each) for each in body]
    body = [Transposed().visit(each) for each in body]
    _refuse_numbers(body, counters, stores(*body, *(target for target, _ in loop.streams)))
    for name in sorted(loads(*body) & counters.keys()):  # as a number: one of a tensor that counts
        numbers = copy.deepcopy(loop.ranges[counters[name].place])
        loop.streams.append((ast.Name(name, ast.Store()), Read(numbers, 0, None)))
    targets = stores(*(target for target, _ in loop.streams))
    changed, first = stores(*body), first_read(body, targets)
    bases = [read.base for read in (*loop.reads, *(read for _, read in loop.streams))]
    both = {each.name for each in loop.written} & (values_read(*body, *bases) | changed)
    both |= {each.name for each in loop.written if each.joined is not None} & loads(*body, *bases)
    if both:
        raise NotRolledError(f"{min(both)} is written to, and read", node.lineno)
    loop.carried = sorted((changed - targets) & ((first & before) | (after & names.sure)))
    loop.late = sorted((changed | targets) & after - {*loop.carried, *counters})
    loop.late += sorted((first & changed) - {*loop.carried, *loop.late} - targets)
    always = set[str]().union(*map(surely_assigned, body)) | targets
    perhaps = ((first & changed & before) - names.sure) | (({*loop.late} & before) - always)
    if perhaps:
        raise NotRolledError(f"{min(perhaps)} may have no value in front of the loop, or keep it", node.lineno)
    moved = set[str]().union(*(loads(each.joined) for each in loop.written if each.joined is not None)) & changed
    if moved:
        raise NotRolledError(f"a step changes {min(moved)}, along which it joins", node.lineno)
    loop.free = sorted((loads(*body) & names.sure) - changed - targets - {*loop.carried, *loop.late})
    loop.body = body
    return loop


def _refuse_numbers(body: list[ast.stmt], counters: dict[str, Counter], tensors: set[str]) -> None:
    """A counter may be computed with as a tensor where a tensor takes part: else it is a number that others look at."""
    parents = {id(child): node for part in body for node in ast.walk(part) for child in ast.iter_child_nodes(node)}
    for name in (each for part in body for each in ast.walk(part) if isinstance(each, ast.Name)):
        if name.id not in counters or is_store(name):
            continue
        top: ast.AST = name
        while isinstance(parents.get(id(top)), (ast.BinOp, ast.UnaryOp, ast.Compare)):
            parent = parents[id(top)]
            if isinstance(parent, ast.BinOp) and not isinstance(parent.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
                break
            top = parent
        if not {each for each in loads(top) if each in tensors or each.startswith(PREFIX)}:
            raise NotRolledError(f"{name.id} is used as a number ({ast.unparse(top)})", name.lineno)


def _check(node: ast.For, body: list[ast.stmt]) -> None:
    if node.orelse:
        raise NotRolledError("it has an else", node.lineno)
    for each in (each for statement in body for each in ast.walk(statement)):
        line = getattr(each, "lineno", node.lineno)
        call = each.value if isinstance(each, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add":
            raise NotRolledError("it changes a container, by add", line)  # of a tensor it would be of no use
        if type(each) in _REFUSED:
            raise NotRolledError(_REFUSED[type(each)], line)
        if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load) and TWIN not in loads(each):
            raise NotRolledError(f"it assigns the attribute {each.attr}", line)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in _OUTSIDE:
            raise NotRolledError(f"it calls {each.func.id}", line)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            name = each.func.attr
            if name.endswith("_") and not name.endswith("__") and not _is_new(each.func.value):
                raise NotRolledError(f"it writes to a tensor in place, by {name}", line)
            is_written = name == "append" or (name == "insert" and len(each.args) == 2 and number(each.args[0]) == 0)
            if name in _CHANGING and not (is_written and isinstance(each.func.value, ast.Name)):
                raise NotRolledError(f"it changes a container, by {name}", line)


def _is_new(node: ast.expr) -> bool:
    """Whether it is a result that has no name yet."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_new(node.func.value)
    return isinstance(node, (ast.BinOp, ast.UnaryOp))


def _iterated(loop: Loop, iterated: ast.expr, target: ast.expr) -> Iterator[Counter]:
    """The names that count; what is read in turn goes to the loop."""
    line, is_turned = iterated.lineno, is_named_call(iterated, "reversed")
    if is_turned and isinstance(iterated, ast.Call) and len(iterated.args) == 1:
        is_range = is_named_call(iterated.args[0], "range")
        iterated = iterated.args[0] if is_range else iterated
    if isinstance(iterated, ast.Call) and not iterated.keywords and isinstance(iterated.func, ast.Name):
        if iterated.func.id == "range" and isinstance(target, ast.Name):
            call = support("backwards" if is_turned else "counted", *iterated.args)
            loop.ranges.append(placed(call, iterated))
            yield Counter(target.id, len(loop.ranges) - 1)
            return
        if iterated.func.id in ("zip", "enumerate"):
            parts = iterated.args
            if iterated.func.id == "enumerate":
                start = parts[1] if len(parts) > 1 else ast.Constant(0)
                parts = [placed(support("count_from", start), iterated), *parts[:1]]
            if not isinstance(target, ast.Tuple) or len(target.elts) != len(parts):
                raise NotRolledError("what is iterated over has no name for each part", line)
            for part, each in zip(parts, target.elts, strict=True):
                if part is parts[0] and iterated.func.id == "enumerate":
                    if not isinstance(each, ast.Name):
                        raise NotRolledError("what counts has no name", line)
                    loop.ranges.append(part)
                    yield Counter(each.id, len(loop.ranges) - 1)
                else:
                    yield from _iterated(loop, part, each)
            return
    found = unbound(iterated)
    if found is None and not _may_be_tensor(iterated):
        raise NotRolledError("it goes over neither a range nor an unbound tensor", line)
    base, dim, keeps = (iterated, 0, False) if found is None else found
    loop.streams.append((target, Read(base, dim, None, end=ast.Constant(value=True) if keeps else None)))


#: Methods that give another view, or other numbers, of the same tensor.
_VIEWS = frozenset("transpose permute movedim moveaxis swapaxes swapdims flip t contiguous float double to".split())


def _may_be_tensor(iterated: ast.expr) -> bool:
    """Whether it may be a tensor, which is gone over by its first dimension."""
    if isinstance(iterated, ast.Call):
        is_view = isinstance(iterated.func, ast.Attribute) and iterated.func.attr in _VIEWS
        return is_view and _may_be_tensor(iterated.func.value)  # type: ignore[attr-defined]
    return is_path(iterated) or (isinstance(iterated, ast.Attribute) and iterated.attr in ("T", "mT"))
