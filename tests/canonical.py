"""Graphs and reports as short text, the same on every machine: for snapshots that a reader takes for documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from backends import Rewriting
from torch import Tensor, fx
from torch.fx.graph import dtype_abbrs

from lz_compile.report.findings import LoopReport, MissReport
from lz_compile.report.report import MatchReport, Report

#: Where something is, after its name.
_PLACE = re.compile(r" \((\w+ at )?\S+\.py:\d+\)| at \S+\.py:\d+")
#: The files of snapshots as they were compiled: they may be written anew while they run.
_LINES = {str(path): path.read_text().splitlines() for path in Path(__file__).parent.glob("test_snapshots_*.py")}


def graph_text(module: fx.GraphModule) -> str:
    """A line for each node, named by what it calls, then the graphs that it uses, each by its name."""
    names = _names(module.graph)
    lines = [_line(node, names) for node in module.graph.nodes if node.op != "get_attr" or _inner(module, node) is None]
    used = {names[node]: _inner(module, node) for node in module.graph.nodes if node.users}
    inner = [f"{name}:\n{_indented(graph_text(graph))}" for name, graph in used.items() if graph is not None]
    return "\n".join([*lines, *inner])


def report_text(report: Report) -> str:
    """What was recognised, missed, rolled and could not be proven; without times, machines and what was not chosen."""
    told = [*map(_loop, report.loops), *map(_match, report.matches), *map(_miss, report.near_misses)]
    told += [f"unproven: {reason}" for reason in report.unproven]
    told += [f"event: [{event.code}] {event.message}" for event in report.events]
    return without_places("\n".join(told))


def without_places(text: str) -> str:
    """A reason without the lines of the source that it names."""
    return _PLACE.sub("", text)


class Seen(Rewriting):
    """The backend without Inductor, which also prints the graph as it comes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: list[str] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(graph_text(module))
        return super().__call__(module, inputs)


def compiled(function: Callable[..., Any], *inputs: Any, **options: Any) -> Seen:
    """The backend that has compiled a function, which gives the same as in eager mode."""
    torch._dynamo.reset()
    backend = Seen(**options)
    want = function(*(each.clone() for each in inputs))
    got = torch.compile(function, backend=backend, fullgraph=True)(*(each.clone() for each in inputs))
    torch.testing.assert_close(got, want)
    return backend


def rewritten(function: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The graph before, the graph after and the report of a function in which every match must be rewritten."""
    backend = compiled(function, *inputs, **options)
    report = report_of(backend)
    return _sections(backend.before[0], graph_text(backend.graphs[0]), report)


def report_of(backend: Seen) -> str:
    """The report, in which every match must be rewritten."""
    assert backend.report.matches, backend.why_not()
    assert all(match.rewritten for match in backend.report.matches), backend.why_not()
    return report_text(backend.report)


def missed(function: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The near misses of a function, which must keep its graph."""
    backend = compiled(function, *inputs, **options)
    assert backend.before == [graph_text(graph) for graph in backend.graphs], "a near miss changes nothing"
    assert backend.report.near_misses, "nothing was nearly recognised"
    return _PLACE.sub("", "\n".join(map(_miss, backend.report.near_misses)))


def edited(stage: Callable[[fx.GraphModule], object], function: Callable[..., Any], *inputs: Any) -> str:
    """A graph before and after one stage, which must change it, and give the same."""
    before, after = [], []

    def backend(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        before.append(graph_text(module))
        stage(module)
        module.graph.lint()
        module.recompile()
        after.append(graph_text(module))
        return module.forward

    torch._dynamo.reset()
    want = function(*(each.clone() for each in inputs))
    got = torch.compile(function, backend=backend, fullgraph=True)(*(each.clone() for each in inputs))
    torch.testing.assert_close(got, want)
    assert before != after, "the stage changes nothing"
    return _sections(before[0], after[0])


def _sections(before: str, after: str, report: str = "") -> str:
    parts = {"before": before, "after": after, "report": report}
    return "\n".join(f"{name}:\n{_indented(text)}" for name, text in parts.items() if text)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# ---- graphs ------------------------------------------------------------------------------------------------------------


def _names(graph: fx.Graph) -> Mapping[fx.Node, str]:
    """Inputs by their names in the source, all else by what is called, numbered where that is called again."""
    counts: Counter[str] = Counter()
    names = {}
    for node in graph.nodes:
        name = _plain(node.name) if node.op == "placeholder" else _called(node)
        counts[name] += 1
        names[node] = name if counts[name] == 1 else f"{name}_{counts[name]}"
    return names


def _called(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return _plain(node.target).rpartition(".")[2]
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).strip("_")


def _plain(name: str) -> str:
    """``l_x_`` as ``x``, for Dynamo says where an input comes from; what was numbered without a name is ``arg``."""
    if re.fullmatch(r"(arg\d+|child)(_\d+)?", name):
        return "arg"
    found = re.fullmatch(r"[lL]_(\w+?)_*", name)
    return found[1] if found else name


def _line(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0], names)}"
    kind = _kind(node.meta.get("example_value", node.meta.get("val")))
    if node.op in ("placeholder", "get_attr"):
        return f"{names[node]}{kind}"
    given = [_value(each, names) for each in node.args]
    given += [f"{key}={_value(each, names)}" for key, each in node.kwargs.items()]
    return f"{names[node]}{kind} = {_called(node)}({', '.join(given)})"


def _kind(value: Any) -> str:
    return f": {dtype_abbrs[value.dtype]}{list(value.shape)}" if isinstance(value, Tensor) else ""


def _value(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_value(each, names) for each in value)}]"
    if isinstance(value, slice):
        ends = [_value(end, names) if end is not None else "" for end in (value.start, value.stop)]
        return ":".join([*ends, *([] if value.step is None else [_value(value.step, names)])])
    if value is Ellipsis or (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}", value)):  # attributes, by a hash
        return "..."
    return str(value)


def _inner(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    found = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


# ---- reports -----------------------------------------------------------------------------------------------------------


def _match(match: MatchReport) -> str:
    state = "rewritten" if match.rewritten else "left"
    facts = {
        "attributes": ", ".join(_attributes(match.attributes)),
        "formula": match.formula,
        "mask": match.mask,
        "why": match.why,
    }
    reasons = [f"  {reason}" for reason in (*match.mask_reasons, *match.reasons)]
    return "\n".join([
        f"{match.op}: {match.kernel}, {state}, at `{_source(match.where)}`",
        *(f"  {name}: {text}" for name, text in facts.items() if text),
        *reasons,
    ])  # fmt: skip


def _attributes(attributes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in attributes.items():
        if value is not False and value is not None:
            yield name if value is True else f"{name}={value}"


def _miss(miss: MissReport) -> str:
    return f"near miss of {miss.op} at `{_source(miss.where)}`\n  {miss.reason}\n  -> {miss.edit}"


def _loop(loop: LoopReport) -> str:
    state = "rolled" if loop.rolled else f"kept: {loop.reason}"
    facts = {"carried": loop.carried, "streams": loop.streams, "outputs": loop.outputs}
    return "\n".join([
        f"loop: {loop.steps} steps of {loop.calls} calls, {state}, at `{_source(loop.where)}`",
        *(f"  {name}: {'; '.join(texts)}" for name, texts in facts.items() if texts),
    ])  # fmt: skip


def _source(where: str) -> str:
    """The line of a place, which stays the same when others come before it."""
    file, _, line = where.rpartition(":")
    if file not in _LINES:  # a line of the package's own
        return Path(file).name
    return _LINES[file][int(line) - 1].strip()
