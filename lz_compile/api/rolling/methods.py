"""Methods of modules: of which classes they are, which may be reached, and classes with others in their place."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from lz_compile.api.rolling.calls import names_in

#: The class that a rolled one was made of.
_PLAIN: dict[type, type] = {}


def plain(kind: type) -> type:
    """The class that one was made of, or itself."""
    return _PLAIN.get(kind, kind)


def with_methods(kind: type, methods: Mapping[str, Any]) -> type:
    """A class with some methods replaced, which looks like the old one, and is stored as that."""

    def reduced(module: nn.Module, _protocol: int) -> tuple[Any, ...]:
        return kind.__new__, (kind,), vars(module)

    def copied(module: nn.Module, memo: dict[int, Any]) -> Any:
        made = memo[id(module)] = type(module).__new__(type(module))
        vars(made).update(copy.deepcopy(vars(module), memo))
        return made

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {} if hasattr(kind, "__deepcopy__") else {"__deepcopy__": copied}
    found = type(kind.__name__, (kind,), {**names, **methods, **own, "__reduce_ex__": reduced})
    _PLAIN[found] = kind
    return found


def reached(module: nn.Module) -> dict[type, dict[str, Any]]:
    """Of the classes of modules, the methods that ``forward`` may come to, as far as their names tell."""
    every = {kind: methods_of(kind) for kind in {plain(type(each)) for each in module.modules()}}
    own = every[plain(type(module))]
    wanted, known = {"forward"} if "forward" in own else {*own}, set[str]()
    while wanted:
        name = wanted.pop()
        known.add(name)
        for method in (found[name] for found in every.values() if name in found):
            is_wrapped = isinstance(method, (staticmethod, classmethod))
            wanted |= names_in(method.__func__ if is_wrapped else method) - known
    return {kind: {name: each for name, each in found.items() if name in known} for kind, found in every.items()}


def methods_of(kind: type[nn.Module]) -> dict[str, Any]:
    """What a class of modules that is not PyTorch's own defines, the nearest of each name."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each is nn.Module:
            break
        if not each.__module__.startswith("torch.nn."):
            for name, value in vars(each).items():
                found.setdefault(name, value)
    kinds = (types.FunctionType, staticmethod, classmethod)
    return {name: value for name, value in found.items() if isinstance(value, kinds)}
