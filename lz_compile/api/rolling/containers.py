"""Lists of tuples or dictionaries, and dictionaries of lists, as one list for each part: what loops fill and stack."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from lz_compile.api.rolling.places import Meant
from lz_compile.api.rolling.syntax import (
    PREFIX,
    SUPPORT,
    called,
    is_name,
    is_named_call,
    is_store,
    loads,
    placed,
    support,
    uses,
)


def with_one_list_for_each_part(tree: ast.FunctionDef) -> None:
    """Let ``ys.append((h, c))`` fill two lists, where parts are all that is read of it: ``zip(*ys)``, ``[y[0] for y in ys]``.

    Likewise ``outs["h"].append(h)`` of ``outs = {"h": [], "c": []}``.
    """
    _Apart().visit(tree)
    inner = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.Lambda)) and each is not tree]
    given = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
    for statement in list(ast.walk(tree)):
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        (target,) = statement.targets
        if not isinstance(target, ast.Name) or target.id in given | loads(*inner):
            continue
        keys = _lists_by_key(statement.value) or _parts_appended(tree, target.id, statement.value)
        if not keys:
            continue
        names = uses(target.id, tree)
        parts = _Parts(target.id, keys, tree, is_list=not isinstance(statement.value, ast.Dict))
        parts.visit(copy.deepcopy(tree))
        if sum(map(is_store, names)) == 1 and parts.count == len(names):
            parts.visit(tree)


class _Apart(ast.NodeTransformer):
    """``h, ys = f(x), []`` as ``ys = []; h = f(x)``."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        """Two statements, where one is of containers that hold nothing."""
        target, value = node.targets[0], node.value
        if len(node.targets) > 1 or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
            return node
        pairs = list(zip(target.elts, value.elts, strict=False))
        empty = [
            (one, other)
            for one, other in pairs
            if isinstance(one, ast.Name) and (_is_empty(other) or _lists_by_key(other))
        ]
        names = [one.id for one, _ in empty]
        has_star = any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))
        is_read = sum(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node)) > len(names)
        if not empty or len(target.elts) != len(value.elts) or has_star or is_read:
            return node
        rest = [pair for pair in pairs if pair not in empty]
        made: list[ast.stmt] = [ast.Assign([one], other) for one, other in empty]
        if len(rest) == 1:
            made.append(ast.Assign([rest[0][0]], rest[0][1]))
        elif rest:
            target.elts, value.elts = [one for one, _ in rest], [other for _, other in rest]
            made.append(node)
        return [placed(ast.copy_location(each, node), node) for each in made]

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        """``{key: f(key) for key in ("h", "c")}`` as what it says."""
        self.generic_visit(node)
        (generator, *more) = node.generators
        target, items = generator.target, generator.iter
        is_written = isinstance(items, (ast.Tuple, ast.List)) and all(
            isinstance(each, ast.Constant) for each in items.elts
        )
        if more or generator.ifs or not isinstance(target, ast.Name) or not is_written:
            return node
        if not _is_plain(target.id, node.key, node.value):
            return node
        each_key = [Meant(target.id, each).visit for each in items.elts]  # type: ignore[attr-defined]
        pairs = [(own(copy.deepcopy(node.key)), own(copy.deepcopy(node.value))) for own in each_key]
        return placed(ast.Dict([one for one, _ in pairs], [other for _, other in pairs]), node)


def _is_empty(value: ast.expr) -> bool:
    is_call = is_named_call(value, "list") and not value.args  # type: ignore[attr-defined]
    return (isinstance(value, ast.List) and not value.elts) or is_call


def _lists_by_key(value: ast.expr) -> list[object]:
    """The keys of a dictionary of empty lists."""
    if not isinstance(value, ast.Dict) or not all(
        isinstance(each, ast.List) and not each.elts for each in value.values
    ):
        return []
    return _keys_of(value) or []


def _parts_appended(tree: ast.FunctionDef, name: str, value: ast.expr) -> list[object]:
    """The keys of what is appended to an empty list, where that is always a tuple or a dictionary of the same ones."""
    if not _is_empty(value):
        return []
    found = [_keys_of(each) for statement in ast.walk(tree) if (each := _appended(statement, name)) is not None]
    return found[0] or [] if found and all(each == found[0] for each in found) else []


def _appended(statement: ast.AST, name: str) -> ast.expr | None:
    """What ``name.append(...)`` appends."""
    owner, given = called(statement, "append")
    return given[0] if owner == name and len(given) == 1 else None


def _keys_of(display: ast.expr) -> list[object] | None:
    """Places of a tuple that is written out, or keys of a dictionary."""
    if isinstance(display, (ast.Tuple, ast.List)):
        has_star = any(isinstance(each, ast.Starred) for each in display.elts)
        return None if has_star else [*range(len(display.elts))]
    if isinstance(display, ast.Dict) and all(isinstance(each, ast.Constant) for each in display.keys):
        keys: list[object] = [each.value for each in display.keys if isinstance(each, ast.Constant)]
        return keys if len(set(keys)) == len(keys) else None
    return None


class _Parts(ast.NodeTransformer):
    """Uses of a container as uses of its parts; ``count`` says of how many uses that is known."""

    def __init__(self, name: str, keys: list[object], tree: ast.FunctionDef, *, is_list: bool) -> None:
        self._name, self._keys, self._tree, self._is_list, self.count = name, keys, tree, is_list, 0
        self._meant: dict[str, object] = {}

    def _part(self, key: object, context: ast.expr_context | None = None) -> ast.Name:
        return ast.Name(f"{PREFIX}{self._name}_{self._keys.index(key)}", context or ast.Load())

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        """``ys = []``; ``hs, cs = zip(*ys)``."""
        target = node.targets[0]
        if len(node.targets) == 1 and is_name(target, self._name):
            self.count += 1
            made = [ast.Assign([self._part(key, ast.Store())], ast.List([], ast.Load())) for key in self._keys]
            return [placed(ast.copy_location(each, node), node) for each in made]
        if len(node.targets) == 1 and isinstance(target, ast.Tuple) and self._is_unzipped(node.value):
            names = [each.id for each in target.elts if isinstance(each, ast.Name)]
            is_whole = len(names) == len(self._keys) == len(target.elts) and self._is_filled_before(node)
            if is_whole and all(map(self._is_stacked_only, names)):
                self.count += 1
                self._meant.update(zip(names, self._keys, strict=True))
                return ast.copy_location(ast.Pass(), node)
        if len(node.targets) == 1 and isinstance(target, ast.Tuple) and self._maps(node.value):
            self.count += 1
            function = node.value.args[0]  # type: ignore[attr-defined]
            calls = [ast.Call(copy.deepcopy(function), [self._part(key)], []) for key in self._keys]
            node.value = placed(ast.Tuple(list[ast.expr](calls), ast.Load()), node)
            return node
        return self.generic_visit(node)

    def _maps(self, node: ast.expr) -> bool:
        """``map(torch.stack, zip(*ys))``."""
        is_map = is_named_call(node, "map") and len(node.args) == 2  # type: ignore[attr-defined]
        return is_map and self._is_unzipped(node.args[1]) and ast.unparse(node.args[0]) in _STACKING  # type: ignore[attr-defined]

    def _is_filled_before(self, node: ast.stmt) -> bool:
        """Whether all that is appended is, in front of a statement, and no exception of that is caught."""
        every = list(ast.walk(self._tree))
        appended = [
            each.lineno for each in every if isinstance(each, ast.stmt) and _appended(each, self._name) is not None
        ]
        around = (each for each in every if isinstance(each, (ast.For, ast.While, ast.Try)))
        is_inside = any(each.lineno <= node.lineno <= (each.end_lineno or each.lineno) for each in around)
        return not is_inside and max(appended, default=0) < node.lineno

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """``hs``."""
        return placed(self._part(self._meant[node.id]), node) if node.id in self._meant and not is_store(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        """``ys.append((h, c))``."""
        appended = _appended(node, self._name)
        if appended is None or not self._is_list:
            return self.generic_visit(node)
        self.count += 1
        values = appended.values if isinstance(appended, ast.Dict) else appended.elts  # type: ignore[attr-defined]
        calls = [
            ast.Expr(ast.Call(ast.Attribute(self._part(key), "append", ast.Load()), [self.visit(value)], []))
            for key, value in zip(self._keys, values, strict=True)
        ]
        return [placed(ast.copy_location(each, node), node) for each in calls]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``outs["h"]``."""
        is_part = not self._is_list and is_name(node.value, self._name) and isinstance(node.ctx, ast.Load)
        if is_part and isinstance(node.slice, ast.Constant) and node.slice.value in self._keys:
            self.count += 1
            return placed(self._part(node.slice.value), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``torch.stack([y[0] for y in ys])``, ``map(torch.stack, zip(*ys))``."""
        if _is_stacking(node) and node.args and isinstance(node.args[0], (ast.ListComp, ast.GeneratorExp)):
            key = self._key_of(node.args[0])
            if key is not None:
                self.count += 1
                node.args[0] = placed(self._part(*key), node)
        elif (
            is_named_call(node, "tuple", "list") and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp)
        ):
            made = self._for_each(node.args[0])
            node.args = node.args if made is None else [made]
        return self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        """``[torch.stack(part, 1) for part in zip(*ys)]``."""
        return self._for_each(node) or self.generic_visit(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        """``{key: torch.stack(part, 1) for key, part in outs.items()}``."""
        (generator, *more) = node.generators
        target, items = generator.target, generator.iter
        is_it = not more and not generator.ifs and not self._is_list and ast.unparse(items) == f"{self._name}.items()"
        if not is_it or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            return self.generic_visit(node)
        key, value = target.elts
        if not (isinstance(key, ast.Name) and isinstance(value, ast.Name) and _stacks_only(node.value, value.id)):
            return self.generic_visit(node)
        if not all(_is_plain(each, node.key, node.value) for each in (key.id, value.id)):
            return self.generic_visit(node)
        self.count += 1
        made = []
        for each in self._keys:
            own = Meant(key.id, ast.Constant(each)).visit  # type: ignore[arg-type]
            part = Meant(value.id, self._part(each)).visit
            made.append((own(copy.deepcopy(node.key)), part(own(copy.deepcopy(node.value)))))
        return placed(ast.Dict([one for one, _ in made], [other for _, other in made]), node)

    def _for_each(self, node: ast.ListComp | ast.GeneratorExp) -> ast.expr | None:
        """A list of what is made of each part; of none where nothing was appended to tuples."""
        (generator, *more) = node.generators
        target, items = generator.target, generator.iter
        is_unzipped = self._is_unzipped(items)
        is_all = is_unzipped or (not self._is_list and ast.unparse(items) == f"{self._name}.values()")
        if more or generator.ifs or not isinstance(target, ast.Name) or not is_all:
            return None
        if not _stacks_only(node.elt, target.id) or not _is_plain(target.id, node.elt):
            return None
        self.count += 1
        parts = [Meant(target.id, self._part(key)).visit(copy.deepcopy(node.elt)) for key in self._keys]
        made: ast.expr = ast.List(parts, ast.Load())
        if is_unzipped:
            made = ast.IfExp(support("holds", self._part(self._keys[0])), made, ast.List([], ast.Load()))
        return placed(made, node)

    def _key_of(self, node: ast.ListComp | ast.GeneratorExp) -> tuple[object] | None:
        """``k`` of ``[y[k] for y in ys]``, or of ``[c for h, c in ys]``."""
        (generator, *more) = node.generators
        if more or generator.ifs or not self._is_list or not is_name(generator.iter, self._name):
            return None
        target, elt = generator.target, node.elt
        if isinstance(target, ast.Tuple) and isinstance(elt, ast.Name) and len(target.elts) == len(self._keys):
            places = [i for i, each in enumerate(target.elts) if is_name(each, elt.id)]
            return (self._keys[places[0]],) if len(places) == 1 and self._keys[0] == 0 else None
        if not isinstance(target, ast.Name) or not isinstance(elt, ast.Subscript) or not is_name(elt.value, target.id):
            return None
        key = elt.slice.value if isinstance(elt.slice, ast.Constant) else None
        return (key,) if key in self._keys else None

    def _is_unzipped(self, node: ast.expr) -> bool:
        """``zip(*ys)``, of tuples."""
        if not is_named_call(node, "zip") or not self._is_list or len(node.args) != 1 or self._keys[0] != 0:  # type: ignore[attr-defined]
            return False
        (only,) = node.args  # type: ignore[attr-defined]
        return isinstance(only, ast.Starred) and is_name(only.value, self._name)

    def _is_stacked_only(self, name: str) -> bool:
        names = uses(name, self._tree)
        stores = sum(map(is_store, names))
        return stores == 1 and len(names) == 1 + sum(_is_stack_of(each, name) for each in ast.walk(self._tree))


def _is_plain(name: str, *nodes: ast.expr) -> bool:
    """Whether a name means the same everywhere in expressions, and now."""
    every = [each for node in nodes for each in ast.walk(node)]
    inner = [each.target for each in every if isinstance(each, ast.comprehension)]
    return not uses(name, *inner) and not any(isinstance(each, (ast.Lambda, ast.NamedExpr)) for each in every)


_STACKING: Sequence[str] = ("torch.stack", "torch.cat", "torch.concat")


def _is_stacking(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _STACKING


def _is_stack_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _is_stacking(node) and bool(node.args) and is_name(node.args[0], name)


def _stacks_only(node: ast.expr, name: str) -> bool:
    """Whether a name is no more than stacked in an expression."""
    return len(uses(name, node)) == sum(_is_stack_of(each, name) for each in ast.walk(node))


# ---- what is made of a list that a loop fills ------------------------------------------------------------------------


def is_stacked_only(name: str, statements: Sequence[ast.stmt]) -> bool:
    """Whether a list is no more than stacked or concatenated."""
    every = [each for statement in statements for each in ast.walk(statement)]
    return len(uses(name, *statements)) == sum(
        _stacks(each, name) or _is_turning(each, name) or _is_asked(each, name) for each in every
    )


def _stacks(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    return is_name(node.func.value, "torch") and node.func.attr in ("stack", "cat") and _is_of(node.args[0], name)


def _is_of(held: ast.expr, name: str) -> bool:
    """Whether it is a list, a slice of it, or either the other way round."""
    turned = _turned(held)
    if turned is not None:
        return _is_of(turned, name)
    held = held.value if isinstance(held, ast.Subscript) and isinstance(held.slice, ast.Slice) else held
    return is_name(held, name)


def _turned(held: ast.expr) -> ast.expr | None:
    """``xs`` of ``reversed(xs)`` or ``list(reversed(xs))``."""
    if is_named_call(held, "list", "tuple") and len(held.args) == 1:  # type: ignore[attr-defined]
        return _turned(held.args[0])  # type: ignore[attr-defined]
    is_turned = is_named_call(held, "reversed") and len(held.args) == 1  # type: ignore[attr-defined]
    return held.args[0] if is_turned else None  # type: ignore[attr-defined]


def _is_asked(node: ast.AST, name: str) -> bool:
    """Whether it asks whether a list has anything in it."""
    is_ours = isinstance(node, ast.Call) and ast.unparse(node.func) == f"{SUPPORT}.holds"
    return is_ours and is_name(node.args[0], name)  # type: ignore[attr-defined]


def _is_turning(node: ast.AST, name: str) -> bool:
    """Whether it is ``xs.reverse()``."""
    return called(node, "reverse") == (name, [])


class Stacked(ast.NodeTransformer):
    """``torch.stack(outs, 1)`` of what a loop appended, without taking it apart first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Stacking or concatenating."""
        self.generic_visit(node)
        if _stacks(node, self._name) and isinstance(node.func, ast.Attribute):
            node.func.value = ast.copy_location(ast.Name(SUPPORT, ast.Load()), node.func)
            turned = _turned(node.args[0])
            node.args[0] = node.args[0] if turned is None else placed(support("turned", turned), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """``outs.reverse()``."""
        if not _is_turning(node, self._name):
            return self.generic_visit(node)
        made = ast.Assign([ast.Name(self._name, ast.Store())], support("turned", ast.Name(self._name, ast.Load())))
        return placed(made, node)
