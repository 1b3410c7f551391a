"""What is run in order to learn something: apart from the program around, and never silently given up."""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext

import pytest
import torch
from backends import Rewriting
from graphs import capture, effects_of
from torch import Tensor, fx

from lz_compile.ground.isolation import isolated
from lz_compile.passes.graph.view import needed
from lz_compile.passes.proof import running
from lz_compile.passes.proof.resize import shape
from lz_compile.passes.proof.running import NotRunnableError, Subgraph, run
from lz_compile.passes.proof.sizes import all_axes, representative_sizes
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match


def between(module: fx.GraphModule, names: list[str]) -> Subgraph:
    """What computes a function's result from these inputs."""
    inputs = [node for node in module.graph.nodes if node.name in names]
    outputs = list(module.graph.output_node().all_input_nodes)
    return Subgraph(inputs=dict.fromkeys(inputs, ()), nodes=tuple(needed(outputs, inputs)), outputs=tuple(outputs))


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x.exp(), y, alpha=2).mul(3)


def test_a_subgraph_and_its_copies_compute_what_the_graph_computes() -> None:
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    found = between(capture(mixed, x, y), ["l_x_", "l_y_"])
    with isolated():
        (result,) = found.run(x, y)
    module, copies = found.module()
    assert torch.equal(result, mixed(x, y))
    assert torch.equal(module(x, y)[0], result)
    assert set(copies) == {*found.inputs, *found.nodes}


def test_nothing_is_run_inside_the_modes_of_the_program_around() -> None:
    x = torch.randn(2, 3)
    found = between(capture(mixed, x, x + 1), ["l_x_", "l_y_"])
    with pytest.raises(AssertionError, match="isolated"):
        found.run(x, x)


def test_a_run_says_what_it_cannot_run() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    held = graph.get_attr("weight", type_expr=None)
    with isolated():
        with pytest.raises(NotRunnableError, match="x is a placeholder"):
            run([node], {})
        with pytest.raises(NotRunnableError, match="it reads weight"):
            run([held], {})


def test_what_is_needed_ends_at_what_is_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(operator.neg, (x,))
    second = graph.call_function(operator.add, (first, x))
    assert needed([second], {first}) == [x, second]
    assert needed([second], {first, x}) == [second]
    assert needed([first, second], ()) == [x, first, second]


def by_row(scores: Tensor) -> Tensor:
    """A filter that names its eight rows: with fewer it does not run."""
    least = scores.topk(5).values[:, -1:]
    rows = zip(scores.unbind(0), least.unbind(0), strict=True)
    return torch.stack([row.masked_fill(row < limit, -torch.inf) for row, limit in rows]).softmax(-1)


def test_what_does_not_run_at_other_sizes_is_told() -> None:
    backend, scores = Rewriting(), torch.randn(8, 300)
    with torch.no_grad():
        result = torch.compile(by_row, backend=backend)(scores)
    torch.testing.assert_close(result, by_row(scores))
    codes = [event.code for event in backend.report.events]
    assert codes == ["PROBE_FAILED"], backend.report.events


def test_made_up_indices_never_abort_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the CPU every operator is looked at before it runs, and memory that nobody has written holds valid indices."""
    entered = []

    class Recorded(nullcontext):  # type: ignore[type-arg]
        def __enter__(self) -> None:
            entered.append(self)

    def function(x: Tensor) -> Tensor:
        places = torch.empty_like(x, dtype=torch.long)
        return x[places]

    monkeypatch.setattr(running, "InRange", Recorded)
    graph = capture(function, torch.randn(4)).graph
    (given,), *_, result = graph.find_nodes(op="placeholder"), *(node for node in graph.nodes if node.op != "output")
    with isolated():
        found = run(list(graph.nodes)[1:-1], {given: torch.tensor([1.0, 2.0, 3.0])})
        assert found[result].tolist() == [2.0] * 3
        assert not entered
        run(list(graph.nodes)[1:-1], {given: torch.empty(4, device="meta")})
    assert len(entered) == 1


def test_what_has_many_axes_is_tried_at_sizes_that_fit_into_memory() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).softmax(-1) @ value

    module = capture(attention, torch.empty(3, 5, 7, 9, 11, 4), *[torch.empty(3, 5, 7, 9, 13, 4)] * 2, dynamic=range(5))
    (match,) = recognisers()["attention"](module.graph, effects_of(module))
    assert isinstance(match, Match)
    sizes = representative_sizes(match)
    assert (
        len({sizes[axis] for axis in all_axes(match) if not isinstance(axis.size, int)}) == 6
    )  # different ones stay so
    assert math.prod(sizes[axis] for axis in all_axes(match)) <= 1 << 28


def test_windows_of_images_of_any_size_are_proven_at_sizes_that_take_no_time() -> None:
    """Each pixel attends to those around it, which are gathered for it: an operand has all axes but one."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1) for x in (k, v))
        weights = torch.einsum("bhyxd,bhyxdij->bhyxij", q, keys).flatten(-2).softmax(-1).unflatten(-1, (3, 3))
        return torch.einsum("bhyxij,bhyxdij->bhyxd", weights, values)

    inputs = [torch.randn(2, 3, 10, 12, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    module = capture(attention, *inputs, dynamic=True)
    (match,) = recognisers()["attention"](module.graph, effects_of(module))
    assert isinstance(match, Match)
    sizes = representative_sizes(match)
    assert max(math.prod(shape(dims, sizes)) for dims in match.inputs.values()) < 1 << 22
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"}, strict=True)
    result = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)(*inputs)
    torch.testing.assert_close(result, attention(*inputs), rtol=1e-4, atol=1e-5)
    assert [each.rewritten for each in backend.report.matches] == [True], backend.why_not()
