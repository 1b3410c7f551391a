"""``roll_loops``: loops over time that Dynamo does not unroll."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from lz_compile.api.rolling.calls import is_ours
from lz_compile.api.rolling.comparing import are_close, contents, held_by, random_numbers, watching
from lz_compile.api.rolling.methods import methods_of, plain, reached, with_methods
from lz_compile.api.rolling.running import Support, refusals
from lz_compile.api.rolling.source import rolled
from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.api.rolling.twins import Part, parts_of
from lz_compile.errors import ArgumentError
from lz_compile.ground.events import record, trace

T = TypeVar("T", bound="Callable[..., Any]")


def roll_loops(target: T, *example: Any, eager: bool = True, chunk: int | None = None, **named: Any) -> T:
    """``target`` with its loops over time as scans wherever it is compiled: a compiler sees one step instead of all.

    A loop over time counts by ``range``, or goes over ``x.unbind(dim)``, also by ``zip`` and ``enumerate``. It may read
    tensors at the place that it has come to (``x[:, t]``), carry tensors from step to step, append to a list that is empty
    in front of it, or write to places of a tensor. All else stays as it is, with an event ``LOOP_NOT_ROLLED`` that says why.

    Before scans are used, results and gradients are held against the loops': on the example, if one is given, else in the
    first call that is not compiled. Until then, and wherever nothing is compiled, loops run as they are written.

    Args:
        target: a module, which is changed in place (its parameters, hooks and state dict stay), or a function.
        example: arguments of a call, of at least four steps.
        eager: whether loops of 256 steps and more are compiled by themselves where the model is called as it is.
        chunk: steps from one kept state to the next under ``backend="layerzero"``: gradients take memory of
            ``steps / chunk + chunk`` states instead of all, and compile longer. Kernels for affine states have their own.
        named: arguments of that call, by name.

    Returns:
        The module, or a function in place of the given one.

    Raises:
        ArgumentError: ``target`` is neither a module nor a function written in Python, or ``chunk`` no number of steps.
    """
    if chunk is not None and (type(chunk) is not int or chunk < 2):
        raise ArgumentError("roll_loops", "chunk", "as a whole number of steps, 2 or more", repr(chunk))
    session: _Session
    if isinstance(target, nn.Module):
        session = _Modules(target)
    elif isinstance(target, types.FunctionType):
        session = _Function(target)
    else:
        kind = type(target).__name__
        raise ArgumentError("roll_loops", "target", "as a module or a function written in Python", f"a {kind}")
    session.support.is_eager, session.support.chunk = eager, None if chunk is None else str(chunk)
    found = session.edit()
    if example or named:
        session.prove(example, named)
    return cast("T", found)


class _Session:
    """One target: its rolled functions share what is known of their loops."""

    def __init__(self) -> None:
        self.support = Support()
        self._made: dict[types.FunctionType, types.FunctionType | None] = {}
        self.is_done, self.why = False, ""
        self.root: nn.Module | None = None

    def edit(self) -> Any:
        """The target with rolled functions."""
        raise NotImplementedError

    def fresh(self, *, is_edited: bool, is_flipped: bool) -> tuple[Callable[..., Any], nn.Module | None]:
        """Something to call as often as one likes, of the target as it was or as it is, in the other mode of training."""
        raise NotImplementedError

    def made(self, function: types.FunctionType) -> types.FunctionType | None:
        """The rolled function in place of one; None where it has no loop over time."""
        if function not in self._made:
            self._made[function] = None  # one that calls itself
            self._made[function] = found = rolled(
                function, self.support, self._place, self._functions(), self._kinds(), self._twins
            )
            if found is not None:
                self.support.callees.append((function, found))
        return self._made[function]

    def _place(self, function: types.FunctionType) -> int | None:
        """The number of a function with loops."""
        if self.made(function) is None:
            return None
        return [old for old, _ in self.support.callees].index(function)

    def _functions(self) -> Collection[str]:
        """Names of attributes of modules that are functions with loops."""
        return ()

    def _kinds(self) -> Collection[type]:
        return ()

    def _twins(self, _function: types.FunctionType, _body: list[ast.stmt]) -> tuple[Part, ...]:
        """What steps need twins of."""
        return ()

    def prove(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Try the scans, and use those that are right."""
        self.is_done, support = True, self.support
        while support.places:
            before = len(support.refused)
            if self._is_right(given, named) and len(support.refused) == before:
                support.is_proven = True
                support.settle()
                self._try_other_mode(given, named)
                break
            if len(support.refused) == before and not self._each_alone(given, named):
                break
            self._made.clear()
            support.callees.clear()
            support.places.clear()
            self.edit()  # without what was refused, and with loops inside of that
        if support.homes and not support.ran:
            self._is_right(given, named)  # which functions run at all
        if support.is_proven:
            for key in set(range(len(support.places))) - support.tried.keys():
                support.refuse(*support.places[key], "the example does not come to it")
        for text in refusals(support):
            record("LOOP_NOT_ROLLED", f"the loop at {text}")
        if not support.is_proven and not support.refused:
            record("LOOP_NOT_ROLLED", "no loop over time was met")

    def _each_alone(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Refuse what is not right, where it is not known which of several loops that is; whether there was any."""
        before, every = len(self.support.refused), {*self.support.tried}
        for key in sorted(every):
            self.support.resting = every - {key}
            self._is_right(given, named)
        self.support.resting = set()
        if len(self.support.refused) == before:
            for key in sorted(every):
                self.support.refuse(*self.support.places[key], "it is right alone, and not with the other loops")
        return len(self.support.refused) > before

    def _try_other_mode(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Whether the same holds with training switched; a refusal there is none here."""
        if isinstance(self, _Function):
            return
        tried, refused = dict(self.support.tried), dict(self.support.refused)
        if self._is_right(given, named, is_flipped=True):
            for key, kinds in tried.items():
                known = self.support.tried.get(key, ())
                self.support.tried[key] = (*known, *(each for each in kinds if each not in known))
            return
        mode = "the other mode of training"
        for place in self.support.tried.keys() | tried.keys():
            why = self.support.refused.get(self.support.places[place], self.why)
            record("LOOP_NOT_ROLLED", f"the loop at {':'.join(map(str, self.support.places[place]))}, in {mode}: {why}")
        self.support.tried, self.support.refused = tried, refused

    def _is_right(self, given: tuple[Any, ...], named: dict[str, Any], *, is_flipped: bool = False) -> bool:
        """Whether results are the same: in Python, and of the scans as they are traced."""
        self.support.tried.clear()
        with self._trying(), random_numbers() as again:
            try:
                with watching(self.support.ran):
                    expected = self._expected(given, named, is_flipped=is_flipped)
                ends = again()
                pairs = zip(ends, again(), strict=True)
                self.support.is_random |= not all(torch.equal(one, other) for one, other in pairs)
                expected += ends
            except Exception as error:  # noqa: BLE001  # what cannot be copied, or called so, is not proven
                self.support.homes.clear()
                return self._refuse("it cannot be tried", error)
            if not self.support.places:
                return False
            self.support.try_()
            try:
                for compiles in (False, True):
                    found = self._run(given, named, is_edited=True, is_flipped=is_flipped, compiles=compiles)
                    if not are_close(expected, [*found, *again()]):
                        return self._refuse("a scan gives other results")
            except NotRolledError as error:
                return self._refuse(str(error))
            except Exception as error:  # noqa: BLE001  # whatever a compiler says to a scan, the loop stays
                return self._refuse("it is not traced as a scan", error)
        return bool(self.support.tried)

    def _expected(self, given: tuple[Any, ...], named: dict[str, Any], *, is_flipped: bool) -> list[Any]:
        """What the loops give; without gradients, where they have none: they write over what those need."""
        try:
            return self._run(given, named, is_edited=False, is_flipped=is_flipped)
        except RuntimeError:
            if self.support.is_undifferentiated:
                raise
        self.support.is_undifferentiated = True
        try:
            return self._run(given, named, is_edited=False, is_flipped=is_flipped)
        except RuntimeError:
            self.support.is_undifferentiated = False
            raise

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Copies of the target are what loops run in, and are tried as scans, inside of this only."""
        try:
            yield
        finally:
            self.support.root = self.root
            self.support.settle()

    def _refuse(self, why: str, error: Exception | None = None) -> bool:
        """Refuse the loop that ran, or all where none did; of several it is not known which it is."""
        if error is not None:
            trace(f"a loop is not rolled: {why}", error)
            why = f"{why}: {_text(error)}"
        if len(self.support.tried) < 2:
            for key in self.support.tried or range(len(self.support.places)):
                self.support.refuse(*self.support.places[key], why)
        self.why = why
        return False

    def _run(
        self,
        given: tuple[Any, ...],
        named: dict[str, Any],
        *,
        is_edited: bool,
        is_flipped: bool,
        compiles: bool = False,
    ) -> list[Any]:
        """Results, gradients, and what arguments and modules hold afterwards, of copies."""
        function, module = self.fresh(is_edited=is_edited, is_flipped=is_flipped)
        self.support.root = module
        scans: list[fx.Node] = []
        if compiles:
            function = torch.compile(function, backend=functools.partial(_counted, scans), dynamic=False)
        arguments, by_name = copied = copy.deepcopy(pytree.tree_map_only(Tensor, Tensor.detach, (given, named)))
        leaves = [each for each in pytree.tree_leaves(copied) if isinstance(each, Tensor) and each.is_floating_point()]
        modules = [each for each in pytree.tree_leaves(copied) if isinstance(each, nn.Module)]
        modules += [] if module is None else [module]
        differentiates = not self.support.is_undifferentiated
        wanted = [each.requires_grad_(differentiates) for each in leaves]
        wanted += [each for owner in modules for each in owner.parameters() if each.requires_grad]
        with torch.set_grad_enabled(differentiates):
            found = function(*arguments, **by_name)
        if compiles and len(scans) < len(self.support.tried):
            raise NotRolledError("no scan was traced")
        found = contents(found)
        results = [each for each in found if isinstance(each, Tensor)]
        grads: list[Tensor | None] = [None] * len(wanted)  # what has no gradients is the like of zeros
        with torch.enable_grad():
            sums = [(each.to(torch.float64) + 1).cos().sum() for each in results if each.requires_grad]
            if sums and wanted:
                grads = list(torch.autograd.grad(torch.stack(sums).sum(), wanted, allow_unused=True))
        held = pytree.tree_leaves([copied, [held_by(each) for owner in modules for each in owner.modules()]])
        return [*found, *grads, *held]


def _counted(scans: list[fx.Node], graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that runs a graph as it is, and notes its scans."""
    scans += graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    return graph.forward


def _text(error: Exception) -> str:
    """The first line of what a compiler says, and its explanation."""
    lines = [each.strip() for each in str(error).splitlines()] or [""]
    more = [each for each in lines[1:] if each.startswith(("Explanation:", "Unsupported:"))]
    return f"{type(error).__name__}: {' '.join([lines[0], *more[:1]])[:300]}"


class _Function(_Session):
    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        self._function = self.current = function
        self.support.files = {inspect.unwrap(function).__code__.co_filename}

    def edit(self) -> Any:
        self.current = self.made(self._function) or self._function
        session = self

        @functools.wraps(self._function)
        def call(*given: Any, **named: Any) -> Any:
            if not is_compiling() and not session.is_done:
                session.prove(given, named)
            return session.current(*given, **named)

        del call.__wrapped__  # Dynamo would look through
        return call

    def fresh(self, *, is_edited: bool, is_flipped: bool) -> tuple[Callable[..., Any], nn.Module | None]:
        return self.current if is_edited else self._function, None


class _Modules(_Session):
    """Modules get a class of their own, with rolled methods: a copy of such a module is one of that class, too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = self.root = self.support.root = module
        methods = (each for found in reached(module).values() for each in found.values())
        self.support.files = {each.__code__.co_filename for each in methods if isinstance(each, types.FunctionType)}
        self._remove = module.register_forward_pre_hook(self._first_call, with_kwargs=True).remove

    def __getstate__(self) -> dict[str, Any]:
        return {}  # the hook of a module that is stored

    def edit(self) -> Any:
        classes: dict[type, type] = {}
        every = reached(self._module)
        for module in self._module.modules():
            kind = plain(type(module))
            if kind not in classes:
                found = {}
                for name, method in every[kind].items():
                    is_wrapped = isinstance(method, (staticmethod, classmethod))
                    function = self.made(method.__func__ if is_wrapped else method)
                    if function is not None:
                        found[name] = type(method)(function) if is_wrapped else function
                classes[kind] = with_methods(kind, found) if found else kind
            module.__class__ = classes[kind]
        return self._module

    def _kinds(self) -> Collection[type]:
        return {plain(type(each)) for each in self._module.modules()}

    def _twins(self, function: types.FunctionType, body: list[ast.stmt]) -> tuple[Part, ...]:
        kinds = {kind: methods_of(kind) for kind in self._kinds()}
        owners = [each for each in self._module.modules() if function in kinds[plain(type(each))].values()]
        found = [parts_of(each, function, body) for each in owners]
        if any(each != found[0] for each in found):
            raise NotRolledError("modules of its class keep their state in other attributes each")
        return found[0] if found else ()

    def _functions(self) -> Collection[str]:
        every = ((name, each) for module in self._module.modules() for name, each in vars(module).items())
        return {name for name, each in every if is_ours(each) and self.made(each) is not None}

    def prove(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._remove()
        super().prove(given, named)

    def fresh(self, *, is_edited: bool, is_flipped: bool) -> tuple[Callable[..., Any], nn.Module | None]:
        module = copy.deepcopy(self._module)
        if not is_edited:
            for each in module.modules():
                each.__class__ = plain(type(each))
        return module.train(self._module.training != is_flipped) if is_flipped else module, module

    def _first_call(self, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if "support" in vars(self) and not is_compiling():
            self.prove(given, named)
