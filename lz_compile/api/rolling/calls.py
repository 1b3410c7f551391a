"""Functions that a function calls, and that may have loops over time: found by their names, replaced in its source."""

from __future__ import annotations

import ast
import builtins
import inspect
import sysconfig
import types
from collections.abc import Callable, Collection
from typing import Any

from lz_compile.api.rolling.syntax import is_named_call, placed, stores, support

_STANDARD = sysconfig.get_paths()["stdlib"]
#: Whose loops are not over time.
_FOREIGN = frozenset({"torch", "numpy", "einops", "math", "typing", "functools", "lz_compile", builtins.__name__})


class Called(ast.NodeTransformer):
    """Calls of functions, as calls of what there is in their place; ``count`` of them were found.

    ``place`` gives the number of a rolled function, None where one has no loops over time.
    """

    def __init__(
        self,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        place: Callable[[types.FunctionType], int | None],
        attributes: Collection[str],
        kinds: Collection[type] = (),
    ) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if _is_filled(cell)}
        arguments = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
        self._function, self._own = function, stores(tree) | arguments
        self._place, self._attributes, self._kinds, self.count = place, attributes, kinds, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``helper(x)``, ``ops.helper(x)``, ``Base.forward(self, x)``, ``super().forward(x)``, ``self.function(x)``."""
        self.generic_visit(node)
        func = node.func
        if isinstance(func, ast.Attribute) and is_named_call(func.value, "super"):
            function = self._inherited(func.attr)
            place = None if function is None else self._place(function)
            if place is not None:
                self.count += 1
                node.func = support("inherited", ast.Constant(place))
                node.args = [ast.Name("self", ast.Load()), *node.args]
                return placed(node, func)
            return node
        is_attribute = isinstance(func, ast.Attribute) and func.attr in self._attributes
        found = self._value(func)
        if is_attribute or (is_ours(found, self._function) and self._place(found) is not None):
            self.count += 1
            node.func = placed(support("called", func), func)
        return node

    def _value(self, path: ast.expr) -> Any:
        """What a path of names stands for, through modules and classes only; None where it is not known."""
        if isinstance(path, ast.Attribute):
            owner = self._value(path.value)
            return getattr(owner, path.attr, None) if isinstance(owner, (types.ModuleType, type)) else None
        if not isinstance(path, ast.Name) or path.id in self._own:
            return None
        return self._cells[path.id].cell_contents if path.id in self._cells else self._function.__globals__.get(path.id)

    def _inherited(self, name: str) -> types.FunctionType | None:
        cell = self._cells.get("__class__")
        if cell is None or "self" not in self._own:
            return None
        own = cell.cell_contents
        behind = [kind.__mro__[kind.__mro__.index(own) + 1 :] for kind in self._kinds if own in kind.__mro__]
        every = [next((vars(each)[name] for each in mro if name in vars(each)), None) for mro in behind]
        found = every[0] if every and all(each is every[0] for each in every) else None
        return found if is_ours(found, self._function) else None


def is_ours(found: Any, caller: types.FunctionType | None = None) -> bool:
    """Whether it is a function whose loops may be over time, called from another: not what libraries call of others."""
    if not isinstance(found, types.FunctionType):
        return False
    package, file = str(found.__module__).partition(".")[0], found.__code__.co_filename
    if package in _FOREIGN or (file.startswith(_STANDARD) and not _is_installed(file)):
        return False
    is_free = caller is None or not _is_installed(caller.__code__.co_filename)
    return is_free or str(caller.__module__).partition(".")[0] == package


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def names_in(function: types.FunctionType) -> set[str]:
    """Names that a function reads of modules and objects, those inside of it and inside of its decorators too."""
    codes, found = [inspect.unwrap(function).__code__, function.__code__], set[str]()
    while codes:
        code = codes.pop()
        found |= {*code.co_names}
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty one raises
    except ValueError:
        return False
    return True
