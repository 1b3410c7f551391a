"""The same function with its loops over time as scans, from its source: a new function over the same globals and cells."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from lz_compile.api.rolling.calls import Called
from lz_compile.api.rolling.containers import Stacked, is_stacked_only
from lz_compile.api.rolling.loops import read_loop
from lz_compile.api.rolling.ownership import listed, made, made_tensors, numbered, rebound, repeated
from lz_compile.api.rolling.parts import Condition, Loop, Scope, Written
from lz_compile.api.rolling.places import Counter, Read, if_counted
from lz_compile.api.rolling.running import Support
from lz_compile.api.rolling.slots import Slot
from lz_compile.api.rolling.spelling import counted_while, replace_value, with_plain_names
from lz_compile.api.rolling.syntax import (
    KNOWN,
    PREFIX,
    SUPPORT,
    TWIN,
    NotRolledError,
    changed_in_place,
    first_read,
    is_named_call,
    live,
    loads,
    parsed,
    placed,
    stores,
    surely_assigned,
    values_read,
)
from lz_compile.api.rolling.syntax import support as call_of
from lz_compile.api.rolling.twins import State, Twins, carried_by, on_twins, with_states


def rolled(
    function: types.FunctionType,
    support: Support,
    place: Callable[[types.FunctionType], int | None],
    attributes: Collection[str] = (),
    kinds: Collection[type] = (),
    twins: Twins | None = None,
) -> types.FunctionType | None:
    """``function`` with loops as scans where ``support`` says so; None where it has no loop that can be one.

    Why loops stay as they are is told to ``support``.

    Args:
        function: a function written in Python.
        support: what the new function calls.
        place: the number of a function that is called and has such loops.
        attributes: names of modules' attributes that are functions with such loops.
        kinds: classes of the modules that there are.
        twins: what a step needs twins of, by the function and the statements of the step.
    """
    try:
        tree = parsed(function)
    except (OSError, TypeError, SyntaxError) as error:
        support.refuse(
            function.__code__.co_filename, function.__code__.co_firstlineno, f"its source is not at hand: {error}"
        )
        return None
    if tree is None:
        return None
    why_not, has_loop = _why_not(function, tree), _has_loop(tree)
    if why_not:
        if has_loop:
            code = function.__code__
            support.refuse(code.co_filename, tree.lineno, why_not, home=code.co_firstlineno)
        return None
    calls = Called(function, tree, place, attributes, kinds)
    calls.visit(tree)
    if not has_loop and not calls.count:
        return None
    editor = _Editor(function, support, tree, twins)
    editor.edit()
    return _compiled(function, tree, support) if editor.found or calls.count else None


def _has_loop(tree: ast.AST) -> bool:
    return any(isinstance(each, (ast.For, ast.While)) for each in ast.walk(tree))


class _Editor:
    """Loops of one function, outer ones first."""

    def __init__(
        self, function: types.FunctionType, support: Support, tree: ast.FunctionDef, twins: Twins | None
    ) -> None:
        self._function, self._twins = function, twins
        self._file, self._home = function.__code__.co_filename, function.__code__.co_firstlineno
        self._support, self._tree, self.found = support, tree, 0
        arguments = tree.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self._given = {each.arg for each in every if each is not None}
        inner = (
            each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.Lambda)) and each is not tree
        )
        self._inner = loads(*inner)
        with_plain_names(tree)

    def edit(self) -> None:
        self._tree.body = self._block(self._tree.body, Scope({*self._given}, {*self._given}, after={*self._inner}))

    def _block(self, body: Sequence[ast.stmt], names: Scope) -> list[ast.stmt]:
        """Statements with loops in them edited; ``names.after`` is read behind them."""
        found: list[ast.stmt] = []
        rest, around = list(body), names.after
        names.around = around
        while rest:
            statement = rest.pop(0)
            names.after = live(rest, around)
            if isinstance(statement, (ast.For, ast.While)):
                found += self._loop(statement, names, rest)
            else:
                if isinstance(statement, ast.Try) and _has_loop(statement):
                    self._refuse(NotRolledError("exceptions are caught around it", statement.lineno))
                else:
                    self._blocks(statement, names)
                found.append(statement)
            names.before |= stores(statement)
            names.sure |= surely_assigned(statement)
            names.own -= values_read(statement) | rebound(statement)
            names.own |= made(statement)
            names.tensors = (names.tensors & names.own) - stores(statement) | made_tensors(statement)
            touched = (stores(statement) | loads(statement)) - numbered(statement)
            names.lists = (names.lists - touched) | listed(statement, is_empty=True)
            names.started = (names.started - touched) | listed(statement, is_empty=False)
            kept = {name: each for name, each in names.repeated.items() if name in names.started - touched}
            names.repeated = {**kept, **repeated(statement)}
        return found

    def _blocks(self, statement: ast.stmt, names: Scope) -> None:
        """Edit the loops inside of a statement."""
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            return
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and inner:
                again = loads(statement) if isinstance(statement, ast.While) else set()
                setattr(statement, name, self._block(inner, names.inside(names.after | again)))

    def _loop(self, node: ast.For | ast.While, names: Scope, rest: list[ast.stmt]) -> list[ast.stmt]:
        """A loop, as a scan where it can be one."""
        try:
            if (self._file, node.lineno) in self._support.refused:
                raise NotRolledError(self._support.refused[self._file, node.lineno], node.lineno)
            counted = counted_while(node) if isinstance(node, ast.While) else node
            loop, states = self._read(counted, replace(names, own=names.own - self._inner))
            late = changed_in_place(*rest) & {*loop.carried, *loop.late}
            if late:
                raise NotRolledError(f"{min(late)} is changed in place behind it", node.lineno)
        except NotRolledError as error:
            self._refuse(error, node.lineno)
            if isinstance(node, ast.While) or any(is_named_call(each, "range") for each in ast.walk(node.iter)):
                self._support.files.add(self._file)  # where loops are counted, all are told
            if isinstance(node, ast.While):
                self._blocks(node, names)
            else:  # what is read by the next turn is read behind its body
                target = stores(node.target)
                inner = names.inside(names.after | first_read(node.body, target), target)
                node.body = self._block(node.body, replace(inner, own=set()))
            return [node]
        self.found += 1
        key = self._support.loop(self._file, node.lineno)
        outs = [*loop.carried, *loop.late]
        self._support.owned[key] = [outs.index(each.name) for each in states]
        self._support.read_behind[key] = [i for i, each in enumerate(outs) if each in names.after]
        lists = names.lists | names.started
        rows = {each.name for each in loop.written if each.name in lists and each.joined is None} - self._inner
        rows = {name for name in rows if name not in names.around and is_stacked_only(name, rest)}
        for name in rows:
            if name in names.repeated:
                made_by, value = names.repeated[name]
                replace_value(made_by, value, placed(call_of("repeated", value.left, value.right), value))
            rest[:] = [Stacked(name).visit(each) for each in rest]
        is_method = [each.arg for each in self._tree.args.args[:1]] == ["self"]
        owner = ast.Name("self", ast.Load()) if is_method else ast.Constant(None)
        given = ast.Lambda(_NO_ARGUMENTS, _tuple([*_given(loop), *_facts(loop), owner]))
        test = call_of("rolls", ast.Constant(key), ast.Constant(self._where(node)), given)
        rolled = [*_scan(loop, key, rows), *(_last(each, loop, node) for each in loop.behind)]
        rolled = with_states(rolled, states, self._where(node))
        return [placed(ast.If(test, rolled, [node]), node)]

    def _where(self, node: ast.stmt) -> str:
        return f"{self._file}:{node.lineno}"

    def _read(self, node: ast.For, names: Scope) -> tuple[Loop, list[State]]:
        """What a loop does, and the attributes of modules that it carries."""
        parts = (
            self._twins(self._function, node.body) if self._twins is not None and "self" in loads(*node.body) else ()
        )
        if not parts:
            return read_loop(node, names), []
        self._support.parts[self._where(node)] = parts
        states = carried_by(parts)
        known = {each.name for each in states}
        body = on_twins(node.body, parts, states, self._where(node))
        names = replace(names, before=names.before | known, sure=names.sure | known, own=names.own | {TWIN})
        loop = read_loop(placed(ast.For(node.target, node.iter, body, node.orelse), node), names)
        loop.slots += [Slot(each.name, each.read("self")) for each in states]
        return loop, states

    def _refuse(self, error: NotRolledError, line: int = 0) -> None:
        self._support.refuse(self._file, line or error.line, str(error), error.line, self._home)


def _scan(loop: Loop, key: int, rows: set[str]) -> list[ast.stmt]:
    """The statements that are a loop."""
    outs = [*loop.carried, *loop.late]
    params = [
        *outs,
        *(f"{PREFIX}b{i}" for i in range(len(loop.tests))),
        *(f"{PREFIX}s{i}" for i in range(len(loop.streams))),
        *(f"{PREFIX}x{i}" for i in range(len(loop.reads))),
    ]
    arguments = ast.arguments([], [ast.arg(each) for each in params], None, [], [], None, [])
    targets = [
        ast.Assign([copy.deepcopy(target)], ast.Name(f"{PREFIX}s{i}", ast.Load()))
        for i, (target, _) in enumerate(loop.streams)
    ]
    ys = [_under(ast.Name(f"{PREFIX}y{i}", ast.Load()), each) for i, each in enumerate(loop.written)]
    result = ast.Return(_tuple([_tuple([ast.Name(each, ast.Load()) for each in outs]), _tuple(ys)]))
    name = f"{PREFIX}step{key}"
    step = ast.FunctionDef(name, arguments, [*targets, *loop.body, result], [], None)
    given = [ast.Constant(key), ast.Name(name, ast.Load()), *_given(loop), ast.Constant(bool(loop.late))]
    flags = [_tuple([each.under or ast.Constant(value=True), ast.Constant(each.name)]) for each in loop.written]
    given.append(_tuple(flags))
    made = [ast.Name(f"{PREFIX}z{i}", ast.Store()) for i in range(len(ys))]
    target = _tuple(
        [_tuple([ast.Name(each, ast.Store()) for each in outs], ast.Store()), _tuple(made, ast.Store())], ast.Store()
    )
    statements: list[ast.stmt] = [step, ast.Assign([target], call_of("scan", *given))]
    for i, written in enumerate(loop.written):
        made_of = _handed_on(written, ast.Name(f"{PREFIX}z{i}", ast.Load()), loop, written.name in rows)
        statements.append(made_of if written.under is None else ast.If(written.under, [made_of], []))
    return statements


def _under(y: ast.expr, written: Written) -> ast.expr:
    """What a step hands out, among others: nothing where it does not."""
    if written.under is None:
        return y
    return ast.Starred(ast.IfExp(written.under, _tuple([y]), _tuple([])), ast.Load())


def _handed_on(written: Written, value: ast.expr, loop: Loop, is_row: bool) -> ast.stmt:
    """The statement that does what all steps of a loop do with what they hand out."""
    name = ast.Name(written.name, ast.Load())
    if written.read is not None:
        call = call_of("placed" if is_row else "filled", name, value, _tuple(loop.ranges), _read(written.read))
        return ast.Assign([ast.Name(written.name, ast.Store())], call) if is_row else ast.Expr(call)
    if written.joined is not None:
        call = call_of("joined", name, value, written.joined)
    else:
        makers = ("inserted", "listed_in_front") if written.in_front else ("appended", "listed")
        call = call_of(makers[0] if is_row else makers[1], value, name)
    return ast.Assign([ast.Name(written.name, ast.Store())], call)


_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])


def _given(loop: Loop) -> list[ast.expr]:
    """What a loop begins with, what counts, and what is read."""
    initial = {slot.name: slot.initial for slot in loop.slots}
    init = [initial.get(each, ast.Name(each, ast.Load())) for each in loop.carried]
    init += [ast.Constant(None) for _ in loop.late]
    reads = [_read(each) for each in (*(read for _, read in loop.streams), *loop.reads)]
    tests = [_condition(each) for each in loop.tests]
    return [copy.deepcopy(_tuple(each)) for each in (init, loop.ranges, reads, tests)]


def _facts(loop: Loop) -> list[ast.expr]:
    """What else a proof holds for: where steps write, and to which names, and what they read of what does not change."""
    writes = []
    for each in loop.written:
        place = (
            ast.Constant(None) if each.read is None else _read(replace(each.read, base=ast.Name(each.name, ast.Load())))
        )
        flag = each.under or ast.Constant(value=True)
        writes.append(_tuple([flag, ast.Constant(each.name), place]))
    free = [ast.Name(each, ast.Load()) for each in loop.free]
    return [copy.deepcopy(_tuple(each)) for each in (writes, free)]


def _condition(condition: Condition) -> ast.expr:
    """``(place of the range, what is held against zero as a function of the counter, how)``."""
    argument = ast.arguments([], [ast.arg(condition.counter.name)], None, [], [], None, [])
    function = ast.Lambda(argument, if_counted(condition.difference, condition.counter.name))
    return _tuple([ast.Constant(condition.counter.place), function, ast.Constant(condition.order)])


def _last(counter: Counter, loop: Loop, node: ast.For | ast.While) -> ast.stmt:
    """A counter as a loop leaves it."""
    given = _given(loop)[1:3]
    call = call_of("last", *given, ast.Constant(counter.place), ast.Constant(isinstance(node, ast.While)))
    return ast.Assign([ast.Name(counter.name, ast.Store())], call)


def _why_not(function: types.FunctionType, tree: ast.FunctionDef) -> str:
    """What keeps all loops of a function as they are."""
    own = stores(tree) | {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
    if own & {"range", "zip", "enumerate", "reversed", "len", "list", "tuple", "super"}:
        return "it has names of its own for what Python counts with"
    if function.__code__.co_name != tree.name:
        return f"its source is that of {tree.name}"
    for each in ast.walk(tree):
        if isinstance(each, (ast.Global, ast.Nonlocal)):
            return "the function writes to names outside of it"
        name = getattr(each, "attr", getattr(each, "id", ""))
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            return f"the function reads a private name ({name})"
    return ""


def _read(read: Read) -> ast.expr:
    """``(tensor, dimension, place of the range, where as a function of the counter, up to where, tests with answers)``."""
    nothing = ast.Constant(None)
    if read.counter is None:
        return _tuple([read.base, ast.Constant(read.dim), nothing, nothing, read.end or nothing, _tuple([])])
    argument = ast.arguments([], [ast.arg(read.counter.name)], None, [], [], None, [])
    places = [None if each is None else if_counted(each, read.counter.name) for each in (read.place, read.end)]
    ends = [None if each is None else ast.Lambda(argument, each) for each in places]
    shown = [nothing if each is None else each for each in ends]
    base = read.base if read.under is None else ast.IfExp(read.under, read.base, nothing)
    asked = _tuple([_tuple([ast.Constant(i), ast.Constant(wanted)]) for i, wanted in read.asked])
    return _tuple([base, ast.Constant(read.dim), ast.Constant(read.counter.place), *shown, asked])


def _tuple(items: Sequence[ast.expr], context: ast.expr_context | None = None) -> ast.expr:
    return ast.Tuple(list(items), context or ast.Load())


def _compiled(function: types.FunctionType, tree: ast.FunctionDef, support: Support) -> types.FunctionType:
    """A function of a tree, over the globals, cells and defaults of the old one."""
    free = function.__code__.co_freevars
    tree = copy.deepcopy(tree)
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [None if each is None else ast.Constant(None) for each in tree.args.kw_defaults]
    for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg):
        if each is not None:
            each.annotation = None
    tree.body = [ast.ImportFrom("lz_compile.api.rolling", [ast.alias("traced", SUPPORT)], 0), *tree.body]
    tree.name = f"{PREFIX}new"  # by its own name it calls what is called so outside
    outer = ast.arguments([], [ast.arg(each) for each in (KNOWN, *free)], None, [], [], None, [])
    factory = ast.FunctionDef(f"{PREFIX}factory", outer, [tree, ast.Return(ast.Name(tree.name, ast.Load()))], [], None)
    module = ast.Module([placed(factory, tree)], [])
    ast.fix_missing_locations(module)
    made = compile(module, function.__code__.co_filename, "exec", dont_inherit=True, flags=_future(function))
    (whole,) = (each for each in made.co_consts if isinstance(each, types.CodeType))
    code = next(each for each in whole.co_consts if isinstance(each, types.CodeType) and each.co_name == tree.name)
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    closure = tuple(types.CellType(support) if name == KNOWN else cells[name] for name in code.co_freevars)
    code = code.replace(co_name=function.__code__.co_name)
    found = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(found, function)
    del found.__wrapped__  # type: ignore[attr-defined]  # Dynamo would look through to the source
    return found


def _future(function: types.FunctionType) -> int:
    mask = 0
    for name in __future__.all_feature_names:
        mask |= getattr(__future__, name).compiler_flag
    return function.__code__.co_flags & mask
