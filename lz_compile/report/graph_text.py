"""Graphs as Python that people read: by module and source line, parameters by their paths, what is ours set apart."""

from __future__ import annotations

import difflib
import linecache
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.graph import dtype_abbrs  # type: ignore[attr-defined]  # it is there, and tests use it

from lz_compile.ground import events
from lz_compile.passes.graph.refusal import modules_of, path_of, source_of, where_of
from lz_compile.passes.graph.view import EMITTED, target_name, value_of
from lz_compile.report.layout import short

#: Letters of a constant that are shown.
_LONGEST = 80
#: Calls of a match that are shown.
_MOST = 60
_INFIX: Mapping[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=", operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=",
}  # fmt: skip
_PREFIX: Mapping[Any, str] = {operator.neg: "-", operator.invert: "~", operator.not_: "not "}
_SHORTER = {"torch._C._nn": "F", "torch.nn.functional": "F", "None": "torch", "torch._C._linalg": "torch.linalg"}


def graph_text(module: fx.GraphModule) -> str:
    """A graph and those that it uses, as statements under comments with the module and the source line of each."""
    own, *nested = _texts("", module, set())
    return "\n\n\n".join([own, *nested]) + "\n"


def unified_diff(before: str, after: str, name: str) -> str:
    """What is different between two texts of one graph."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"{name}.before.py", f"{name}.after.py"
    )
    return "".join(lines)


def statements(nodes: Iterable[fx.Node]) -> list[str]:
    """A line for each call, without comments, up to :data:`_MOST`."""
    names: dict[fx.Node, str] = {}
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    rest = [f"# and {len(calls) - _MOST} more calls"] if len(calls) > _MOST else []
    try:
        return [*(_statement(node, names) for node in calls[:_MOST]), *rest]
    except Exception as error:  # noqa: BLE001 an argument that cannot be printed must not cost a match
        events.record("REPORT_INCOMPLETE", "printing the calls of a match", error)
        return []


def _texts(name: str, module: fx.GraphModule, seen: set[str]) -> Iterator[str]:
    names: dict[fx.Node, str] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    head = [f"# graph {name}" if name else "# graph", *(f"#   {_name(node, names)}: {_type(node)}" for node in inputs)]
    yield "\n".join([*head, *_body(module.graph, names)])
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        child = operator.attrgetter(target)(module)
        if isinstance(child, fx.GraphModule) and f"{name}.{target}" not in seen:
            seen.add(f"{name}.{target}")
            yield from _texts(f"{name}.{target}" if name else target, child, seen)


def _body(graph: fx.Graph, names: dict[fx.Node, str]) -> Iterator[str]:
    module, place, is_ours = "", "", False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_ours != bool(node.meta.get(EMITTED)):
            yield "# <<< lz_compile" if is_ours else "# >>> lz_compile"
            is_ours = not is_ours
        around, where = modules_of(node), where_of(node)
        if around and around[-1][0] != module:
            module = around[-1][0]
            yield f"\n# {module or 'the model'} ({around[-1][1]})"
        if where not in (place, "<unknown>"):
            place = where
            yield f"# {short(where)}: {source_line(where)}"
        yield _statement(node, names)
    if is_ours:
        yield "# <<< lz_compile"
    yield f"return {_shown(graph.output_node().args[0], names)}"


def source_line(where: str) -> str:
    """The text of a source line, empty where its file is not there."""
    path, _, line = where.rpartition(":")
    return linecache.getline(path, int(line)).strip() if line.isdigit() else ""


def _name(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """What a node is called; what the model holds by its path, as an expression."""
    if node not in names:
        names[node] = node.name
        source = source_of(node)
        if source and "._" in source:
            names[node] = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"self.{path_of(source)}")
        elif node.op == "get_attr":
            names[node] = f"self.{node.target}"
    return names[node]


def _statement(node: fx.Node, names: dict[fx.Node, str]) -> str:
    told = _type(node)
    return f"{node.name}{f': {told}' if told else ''} = {_call(node, names)}"


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    args = [_shown(value, names) for value in node.args]
    if node.op == "call_function" and not node.kwargs:
        if node.target in _INFIX and len(args) == 2:
            return f"{args[0]} {_INFIX[node.target]} {args[1]}"
        if node.target in _PREFIX and len(args) == 1:
            return f"{_PREFIX[node.target]}{args[0]}"
        if node.target is operator.getitem:
            index = node.args[1]
            told = ", ".join(_shown(each, names) for each in index) if isinstance(index, tuple) and index else args[1]
            return f"{args[0]}[{told}]"
    args += [f"{name}={_shown(value, names)}" for name, value in node.kwargs.items()]
    if node.op == "call_method" and args:
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{_function(node)}({', '.join(args)})"


def _function(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    if node.op != "call_function":
        return f"self.{node.target}"
    owner, _, name = target_name(node.op, node.target).rpartition(".")
    return f"{_SHORTER.get(owner, owner)}.{name}".strip(".")


def _shown(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return _name(value, names)
    if isinstance(value, torch.Tensor):  # of constants, no values
        return f"tensor{list(value.shape)}"
    if isinstance(value, slice):
        parts = ["" if each is None else _shown(each, names) for each in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_shown(each, names) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(each, names)}' for name, each in value.items())}}}"
    text = "..." if value is Ellipsis else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _type(node: fx.Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype_abbrs.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]{device}"
    return type(value).__name__ if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""
