"""What recognisers yield where there is no match and why, with the names that the author of a model gave its modules."""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.passes.graph.view import read

#: How Dynamo names what a module holds (``L['self']._modules['layers']``), and what it comes from.
_HELD = re.compile(
    r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]|\.__closure__\[\d+\]\.cell_contents"
)
#: The model itself, in its own forward and in what PyTorch wraps around that of its own modules.
_MODELS = ("self", "fn")
_ROOT = re.compile(r"^[LG]\['([^']*)'\]\.?")


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """The modules around a call, the outermost first: path (``layers.3.self_attn``, "" for the model) and class."""
    stack = node.meta.get("nn_module_stack") or {}
    pairs = [each for each in stack.values() if isinstance(each, tuple) and len(each) == 2]
    return [(path_of(str(path)), getattr(kind, "__name__", str(kind))) for path, kind in pairs]


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that a call is in; empty where that is the model itself, or a function."""
    return next((path for path, _ in reversed(modules_of(node))), "")


@lru_cache(maxsize=4096)
def path_of(source: str) -> str:
    """A name of Dynamo's as a path: ``L['self']._modules['layers']._modules['0']`` is ``layers.0``."""
    root = _ROOT.match(source)
    rest = source if root is None else source[root.end() :]
    name = "" if root is None or root[1] in _MODELS else root[1]
    parts = _HELD.sub(lambda found: "." + next(filter(None, found.groups()), ""), rest).strip(".")
    return ".".join(part for part in (name, *parts.split(".")) if part)


def source_of(placeholder: fx.Node) -> str:
    """What Dynamo calls what an input comes from (``L['self']._modules['norm']``); empty where it says none."""
    return str(getattr(getattr(placeholder.meta.get("grapharg"), "source", None), "name", ""))


def where_of(node: fx.Node) -> str:
    """``file:line`` of the user's code that made this node, ``<unknown>`` where Dynamo kept none.

    The innermost line that is not our own: calls of our functions are made somewhere.
    """
    trace = node.meta.get("stack_trace") or ""
    own = ""
    for line in reversed(trace.strip().splitlines()):
        text = line.strip()
        if not text.startswith('File "'):
            continue
        path, _, rest = text[6:].partition('", line ')
        place = f"{path}:{rest.split(',')[0]}"
        if not path.startswith(_OURS):
            return place
        own = own or place
    return own or "<unknown>"


#: Where this package is.
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"


def told(node: fx.Node) -> str:
    """What reasons call a node: an input or a weight by its path, a value by its name in the source and its line.

    Dynamo names a value after the variable that it is assigned to, else after its function, and counts.
    """
    if node.op == "placeholder":
        return path_of(source_of(node)) or node.name
    where, call = where_of(node), read(node)
    if where == "<unknown>":
        return node.name
    name = re.sub(r"_[0-9]+$", "", node.name)
    by = "" if call is None or name in call.name or call.name in name else f"{call.name} at "
    return f"{name} ({by}{where})"


# ---- what a module holds ---------------------------------------------------------------------------------------------


def hold(owner: fx.GraphModule | None, name: str, graph: fx.GraphModule) -> str:
    """Put a graph into the module of another one, under a name of its own that begins with ``name``; the whole name."""
    assert owner is not None, f"the graph that {name} is put beside belongs to no module"
    path = next(path for path in (f"{name}_{i}" for i in itertools.count()) if not hasattr(owner, path))
    owner.add_module(path, graph)
    return path


def held_by(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """What the module of a graph holds of what these nodes name."""
    names = [node for node in nodes if node.op == "get_attr"]
    return {str(node.target): operator.attrgetter(str(node.target))(node.graph.owning_module) for node in names}


class RefusedError(Exception):
    """Raised inside a recogniser where it gives up on an anchor; becomes a :class:`NearMiss`."""

    def __init__(self, code: str, message: str, edit: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)
        self.edit = edit


class MutatedError(Exception):
    """A value that cannot be named, because an alias of it was overwritten before it is read."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"overwritten in place by {node.name}")
        self.node = node


#: What to do about a value that was overwritten before it is read.
OUT_OF_PLACE = "use the out-of-place form of that operation"


def reshaped(node: fx.Node, writer: fx.Node) -> RefusedError:
    """That a tensor has another shape by now, which is all that Dynamo tells of it, than it had when it was read."""
    text = f"{told(node)} changes its shape in place by {told(writer)}, after it is read"
    return RefusedError("OPERAND_RESHAPED", text, f"use the out-of-place form of {str(writer.target).rstrip('_')}")


def mutated(text: str) -> RefusedError:
    """What is read was overwritten by then."""
    return RefusedError("OPERAND_MUTATED", text, OUT_OF_PLACE)


def refusal_of(error: RefusedError | MutatedError, edit: str = "use its out-of-place form") -> RefusedError:
    """A refusal as it is; a value that was overwritten before it is read, as one."""
    return error if isinstance(error, RefusedError) else RefusedError("OPERAND_MUTATED", f"a value is {error}", edit)


@dataclass(frozen=True)
class NearMiss:
    """A subgraph with the op's anchor that was refused, and the smallest edit that would make it match.

    ``pieces`` are all calls that it is made of, where those may turn out to be pieces of something else; they do not where it
    ``is_whole``: then whatever else is missed among them is a piece of this. ``cause`` is what stood in the way of a probe.
    """

    op: str
    node: fx.Node
    reason: Reason
    edit: str
    where: str
    pieces: frozenset[fx.Node] = frozenset()
    is_whole: bool = False
    cause: BaseException | None = None

    @classmethod
    def of(cls, op: str, node: fx.Node, refusal: RefusedError, edit: str | None = None) -> NearMiss:
        """What was refused at ``node``; with an edit of one's own."""
        return cls(op, node, refusal.reason, refusal.edit if edit is None else edit, where_of(node))


@dataclass(frozen=True)
class Failure:
    """An anchor at which a recogniser raised, by a fault of ours; the others are read all the same."""

    op: str
    where: str
    error: Exception
