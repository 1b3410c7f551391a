"""State that modules keep in attributes: steps work on twins of the modules, whose attributes are carried by a scan.

A twin has the methods of a module and the same values, but what is assigned to it nobody else sees. Twins are needed of
modules that assign attributes in a step, and of those that hold such modules.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules import module as torch_module

from lz_compile.api.rolling.calls import names_in
from lz_compile.api.rolling.facts import has_hooks
from lz_compile.api.rolling.methods import methods_of, plain
from lz_compile.api.rolling.syntax import PARTS, STATE, TWIN, NotRolledError, is_store, parsed, placed, support

_CONTAINERS = (nn.ModuleList, nn.Sequential)
#: What a twin has not, or another way round.
_OWN = frozenset({"__setattr__", "__getattr__", "__getattribute__", "__delattr__", "__call__", "__slots__"})


@dataclass(frozen=True)
class Part:
    """A module below another one, with a twin: its attributes that a step may assign, and others that it reads."""

    path: tuple[str, ...]
    kind: type
    twin: type = field(compare=False)
    states: tuple[str, ...]
    others: tuple[str, ...]
    items: tuple[str, ...] = ()  # of a list of modules, in order
    bound: tuple[tuple[str, str], ...] = ()  # attributes that are methods of its own, and those

    def fits(self, module: nn.Module) -> bool:
        """Whether a module has such a part."""
        found: Any = module
        for name in self.path:
            found = getattr(found, name, None)
        is_it = found is not None and plain(type(found)) is self.kind
        is_it = is_it and all(hasattr(found, name) for name in self.others)
        return is_it and all(_bound(found, name) == method for name, method in self.bound)


#: What a step needs twins of.
Twins: TypeAlias = "Callable[[types.FunctionType, list[ast.stmt]], tuple[Part, ...]]"


@dataclass(frozen=True)
class State:
    """The name that a scan carries for an attribute of a module below ``self``."""

    name: str
    place: int
    path: tuple[str, ...]
    attribute: str

    def read(self, owner: str) -> ast.expr:
        """The attribute, of ``self`` or its twin."""
        return support(
            "held",
            ast.Name(owner, ast.Load()),
            ast.Tuple([ast.Constant(each) for each in self.path], ast.Load()),
            ast.Constant(self.attribute),
        )


def carried_by(parts: tuple[Part, ...]) -> list[State]:
    """Attributes that a step may assign, in order."""
    found = [(i, part.path, name) for i, part in enumerate(parts) for name in part.states]
    return [State(f"{STATE}{i}", *each) for i, each in enumerate(found)]


def on_twins(body: list[ast.stmt], parts: tuple[Part, ...], states: list[State], where: str) -> list[ast.stmt]:
    """Statements of a step that assign to attributes of a twin, which hold names, and become those."""
    moved = OnTwin(parts)
    names = ast.Tuple([ast.Name(each.name, ast.Load()) for each in states], ast.Load())
    made = support("twin", ast.Constant(where), ast.Name(PARTS, ast.Load()), names)
    found: list[ast.stmt] = [ast.Assign([ast.Name(TWIN, ast.Store())], made)]
    found += [moved.visit(copy.deepcopy(each)) for each in body]
    found += [ast.Assign([ast.Name(each.name, ast.Store())], each.read(TWIN)) for each in states]
    return [placed(each, body[0]) for each in found]


def with_states(scan: list[ast.stmt], states: list[State], where: str) -> list[ast.stmt]:
    """The statements of a scan, with attributes read in front of it and assigned behind it."""
    if not states:
        return scan
    parts = support("parts", ast.Constant(where), ast.Name("self", ast.Load()))
    behind = [
        support(
            "put_back",
            ast.Name(PARTS, ast.Load()),
            ast.Constant(each.place),
            ast.Constant(each.attribute),
            ast.Name(each.name, ast.Load()),
        )
        for each in states
    ]
    return [ast.Assign([ast.Name(PARTS, ast.Store())], parts), *scan, *map(ast.Expr, behind)]


class Several:
    """The twin of a list of modules."""

    items: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self.items])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: Any) -> Any:
        return [getattr(self, name) for name in self.items][place]


class Chain(Several):
    """The twin of ``nn.Sequential``."""

    def __call__(self, found: Any) -> Any:
        """One after the other."""
        for name in self.items:
            found = getattr(self, name)(found)
        return found


def parts_of(module: nn.Module, function: types.FunctionType, body: list[ast.stmt]) -> tuple[Part, ...]:
    """Twins that a step needs which is ``body``, in a method of a module; none where no attribute is assigned.

    Raises:
        NotRolledError: others may see what is assigned, or it is more than assigned.
    """
    every = {path: (each, methods_of(plain(type(each)))) for path, each in module.named_modules(remove_duplicate=False)}
    reached = _reached(body, {path: found for path, (_, found) in every.items()}, function)
    direct = _assigned(body, "self")
    states = {path: _states(found, reached[path], function) for path, (_, found) in every.items()}
    for names in direct:
        owner = ".".join(names[:-1])
        if owner not in every:
            raise NotRolledError(f"it assigns the attribute {names[-1]} of what is no module")
        states[owner] |= {names[-1]}
    states = {path: found for path, found in states.items() if found}
    kept = sorted({tuple(path.split(".")[:i]) if path else () for path in states for i in range(path.count(".") + 2)})
    known = [id(every[path][0]) for path in every if _path(path) in kept]
    if len({*known}) < len(known):
        raise NotRolledError("a module that keeps its state in attributes is there twice")
    read = names_read(body)
    made = []
    for path in kept:
        each, found = every[".".join(path)]
        inside = {below[len(path)] for below in kept if len(below) == len(path) + 1 and below[: len(path)] == path}
        own = frozenset(states.get(".".join(path), set()))
        made.append(_part(path, each, plain(type(each)), found, own, inside, read))
    return tuple(made)


def _path(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _part(
    path: tuple[str, ...],
    module: nn.Module,
    kind: type,
    methods: dict[str, Any],
    states: frozenset[str],
    inside: set[str],
    read: set[str],
) -> Part:
    where = ".".join(("self", *path))
    is_watched = has_hooks(module) or module._backward_hooks or module._backward_pre_hooks
    if (path and is_watched) or torch_module._has_any_global_hook():
        raise NotRolledError(f"hooks may see the attributes of {where}")
    if kind in _CONTAINERS:
        others = tuple(name for name in module._modules if name not in inside)
        return Part(path, kind, Chain if kind is nn.Sequential else Several, (), others, tuple(module._modules))
    every = [each for each in kind.__mro__ if each not in nn.Module.__mro__]
    if any(_OWN & vars(each).keys() for each in every) or kind.__module__.startswith("torch.nn."):
        raise NotRolledError(f"{where} is a {kind.__name__}, which assigns attributes in its own way")
    bad = [name for name in sorted(states) if hasattr(kind, name) and hasattr(getattr(kind, name), "__set__")]
    bad += [name for name in sorted(states) if name in module._parameters or name in module._modules]
    if bad:
        raise NotRolledError(f"{bad[0]} of {where} is more than an attribute")
    functions = [each for each in methods.values() if isinstance(each, types.FunctionType)]
    names = read.union(*map(names_in, functions)) - states - inside
    held = {*vars(module)} - {*vars(nn.Module())} | {
        "training",
        *module._parameters,
        *module._buffers,
        *module._modules,
    }
    namespace = {name: value for each in reversed(every) for name, value in vars(each).items() if name[:2] != "__"}
    twin = type(kind.__name__, (), {**namespace, "__call__": _call, "__module__": kind.__module__})
    bound = {name: method for name in sorted(names & held) if (method := _bound(module, name))}
    others = tuple(sorted(names & held - bound.keys()))
    return Part(path, kind, twin, tuple(sorted(states)), others, bound=tuple(bound.items()))


def _bound(module: nn.Module, name: str) -> str:
    """The name of the method of a module that an attribute of it is; nothing where it is none."""
    found = vars(module).get(name)
    is_own = isinstance(found, types.MethodType) and found.__self__ is module
    method = found.__func__.__name__ if is_own else ""  # type: ignore[union-attr]
    return method if hasattr(type(module), method) else ""


def _call(twin: Any, *given: Any, **named: Any) -> Any:
    return twin.forward(*given, **named)


def _reached(
    body: list[ast.stmt], every: dict[str, dict[str, Any]], function: types.FunctionType
) -> dict[str, set[str]]:
    """Names of methods that a step may come to, by module, as far as names tell: of ``forward``, where a module is named."""
    known, before = names_read(body), set[str]()
    is_any = _calls_a_local(body, function)  # which may be each of them
    while known != before:
        before = known
        called = {path: known | {"forward"} if is_any or known & {*path.split(".")} else known for path in every}
        methods = [found[name] for path, found in every.items() for name in called[path] & found.keys()]
        functions = [each for each in methods if isinstance(each, types.FunctionType) and each is not function]
        known = known.union(*map(names_in, functions))
    return called


def _calls_a_local(body: list[ast.stmt], function: types.FunctionType) -> bool:
    code = function.__code__
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    calls = (each.func for statement in body for each in ast.walk(statement) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Name) and each.id in own for each in calls)


def _states(methods: dict[str, Any], reached: Iterable[str], function: types.FunctionType) -> set[str]:
    """Attributes that methods assign."""
    found = set[str]()
    for name in {*reached} & methods.keys():
        method = methods[name]
        if not isinstance(method, types.FunctionType) or method is function:
            continue
        try:
            tree = parsed(method)
        except (OSError, TypeError, SyntaxError):
            continue  # what it assigns is seen where the scan is tried
        if tree is not None and tree.args.args:
            found |= {path[0] for path in _assigned(tree.body, tree.args.args[0].arg) if len(path) == 1}
    return found


def _assigned(body: list[ast.stmt], owner: str) -> list[tuple[str, ...]]:
    """Attributes of a name that are assigned, with those that lead there."""
    found = []
    for each in (each for statement in body for each in ast.walk(statement)):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            path, base = [each.attr], each.value
            while isinstance(base, ast.Attribute):
                path.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id == owner:
                found.append(tuple(reversed(path)))
    return found


def names_read(body: list[ast.stmt]) -> set[str]:
    """Names of attributes that statements read."""
    return {each.attr for statement in body for each in ast.walk(statement) if isinstance(each, ast.Attribute)}


class OnTwin(ast.NodeTransformer):
    """``self`` as its twin, but where a step reads what is the same of both."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._same = parts[0].others  # those of ``self``

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """``self.lif``."""
        is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        return node if is_self and node.attr in self._same else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """``self.h += x`` writes to memory that others may hold."""
        if isinstance(node.target, ast.Attribute):
            raise NotRolledError(f"it changes the attribute {node.target.attr} in place", node.lineno)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """``self``."""
        if node.id != "self":
            return node
        if is_store(node):
            raise NotRolledError("it assigns self", node.lineno)
        return placed(ast.Name(TWIN, ast.Load()), node)
