"""Structural edits: made as a whole and proven, or not made. What raises half-way leaves a graph as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lz_compile.compile import pipeline, reading, replacing, stages
from lz_compile.compile.options import Options
from lz_compile.compile.pipeline import _everywhere
from lz_compile.compile.stages import State, run
from lz_compile.ground import events
from lz_compile.passes.editing import edit, edit_proof
from lz_compile.passes.editing.dead import drop_dead
from lz_compile.passes.editing.edit import MayEdit, RefutedError, Rewrite, apply, apply_places
from lz_compile.passes.editing.edit_proof import Verdict, difference
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import Failure
from lz_compile.passes.graph.share import share_equal
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.inlining.inline import inline
from lz_compile.passes.inlining.values import with_values
from lz_compile.passes.loops.recurrence import distribute as distributing
from lz_compile.passes.loops.recurrence.distribute import distribute
from lz_compile.passes.loops.roll import reroll as rolling
from lz_compile.passes.loops.roll.forward_stores import forward_stores
from lz_compile.passes.loops.roll.reroll import reroll
from lz_compile.passes.loops.roll.scan_outputs import (
    attach_states,
    drop_steps,
    give_results,
    give_symbols,
    order_gradients,
)
from lz_compile.passes.loops.roll.unbatch import unbatch
from lz_compile.passes.proof.trial_run import may_be_special
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import Recipes, splice
from lz_compile.report.report import GraphReport
from lz_compile.runtime.kernels.registry import kernels
from tests.test_subclasses import Int8Weight

T = 8


# ---- graphs in which there is something to do for every stage ----------------------------------------------------------


def mapped(x: Tensor, a: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * a.sum() + 1)(x)


def selected(x: Tensor, a: Tensor) -> Tensor:
    scores = x[0] * 2
    scores[scores < scores.topk(2).values[:, -1:]] = -torch.inf
    return scores.softmax(-1) + a


def stored(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, T):
        out[:, t] = torch.tanh(out[:, t - 1]) + x[:, t] * a
    x = x * 1
    for t in range(1, T):
        x[:, t] += 0.5 * x[:, t - 1]
    return out + x


def looped(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    h, c, outs = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = a * h + torch.sin(x[:, t])
        c = 0.5 * c + h * h
        outs.append(h + c)
    return torch.stack(outs, 1), h


def stepped(x: Tensor, a: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(T):
        h = torch.tanh(a * h + x[:, t])
    return h


def swept(x: Tensor, a: Tensor) -> Tensor:
    x = x * 1
    x[:, 1::2] += a * x[:, ::2]
    x[:, 3::4] += a * a * x[:, 1::4]
    return x


def attended(x: Tensor, a: Tensor) -> Tensor:
    for _ in range(2):
        where = torch.arange(T)
        far = (where[:, None] - where[None]).abs() > 3
        scores = (x * a) @ x.transpose(-2, -1)
        x = scores.masked_fill(far, -torch.inf).softmax(-1) @ x
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    (x * 3).sum()
    return x


LAYER = torch.nn.MultiheadAttention(4, 2, batch_first=True)


def called(x: Tensor, a: Tensor) -> Tensor:
    return LAYER(x, x, x * a, need_weights=False)[0]


PROGRAMS = (mapped, selected, stored, looped, stepped, swept, attended, called)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, a = (torch.rand(2, T, 4, generator=generator) for _ in range(2))
    return x.requires_grad_(), a[0, 0]


# ---- stages, each of which sees what those before it made ---------------------------------------------------------------


def tidied(module: fx.GraphModule) -> None:
    share_equal(module.graph)
    give_results(module)
    order_gradients(module)
    attach_states(module)
    give_symbols(module)
    drop_steps(module)


def spliced(module: fx.GraphModule) -> int:
    """Put a kernel in the place of everything that is recognised; what cannot be is left."""
    effects = Effects(module.graph)
    found = [each for recognise in recognisers().values() for each in recognise(module.graph, effects)]
    matches = [each for each in found if isinstance(each, Match)]
    for match in sorted(matches, key=lambda match: -effects.position[match.site.output]):
        call = next((kernel.call for kernel in kernels(match.op).values() if kernel.kernel_id in KERNELS), None)
        if call is not None and match.site.output.users:
            splice(module.graph, match, call, Recipes())
            BETWEEN.append(written(module))
    return len(matches)


#: Graphs between two edits of one stage: what it may leave behind if a later edit raises.
BETWEEN: list[Any] = []
KERNELS = frozenset({"lz.blocked", "torch.norm", "lz.rolled_scan", "torch.sampling"})


def _raised(found: Any) -> Any:
    for each in found:
        if isinstance(each, Failure):
            raise each.error
    return found


STAGES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "dead": lambda module: drop_dead(module.graph),
    "inline": lambda module: inline(module.graph, strict=True),
    "values": lambda module: with_values(module.graph),
    "unbatch": lambda module: unbatch(module.graph),
    "forward stores": lambda module: forward_stores(module.graph),
    "roll": lambda module: _raised(reroll(module, "roll")),
    "distribute": lambda module: _raised(list(distribute(module))),
    "splice": spliced,
    "tidy": tidied,
}
#: Stages that make their own edits safe; the others are made inside of the door.
OWN = frozenset({"roll", "distribute", "splice"})


class PlantedError(Exception):
    pass


@contextmanager
def planted(at: int) -> Iterator[list[int]]:
    """The ``at``-th node that is made inside raises; counts those that are made."""
    made = [0]
    create = fx.Graph.create_node

    def counting(self: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        made[0] += 1
        if made[0] == at:
            raise PlantedError(f"node {at}")
        return create(self, *args, **kwargs)

    fx.Graph.create_node = counting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        fx.Graph.create_node = create  # type: ignore[method-assign]


def written(module: fx.GraphModule) -> list[Any]:
    """Everything that a graph module holds: nodes with names, arguments and metadata, and the modules beside them."""
    found: list[Any] = []
    for name, child in module.named_modules():
        if isinstance(child, fx.GraphModule):
            for node in child.graph.nodes:
                meta = {key: id(value) for key, value in node.meta.items()}
                users = sorted(user.name for user in node.users)
                found.append((name, node.name, node.op, str(node.target), repr((node.args, node.kwargs)), meta, users))
    return [*found, sorted((name, id(child)) for name, child in module.named_modules())]


def _stage(name: str, module: fx.GraphModule) -> None:
    BETWEEN[:] = [written(module)]
    if name in OWN:
        STAGES[name](module)
    else:
        apply(module, Rewrite(name, partial(STAGES[name], module), shown="the test compares"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_fault_at_any_node_of_any_stage_leaves_the_graph_as_it_was(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: dict[str, int] = {}

    def noted(module: fx.GraphModule) -> Snapshot:
        BETWEEN.append(written(module))
        return Snapshot(module)

    def told(before: Snapshot, module: fx.GraphModule) -> Verdict:
        verdict = difference(before, module)
        BETWEEN.append(written(module))
        return verdict

    monkeypatch.setattr(edit, "Snapshot", noted)
    monkeypatch.setattr(edit, "difference", told)

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        for name in STAGES:
            at = 1
            while True:
                with planted(at) as made:
                    try:
                        _stage(name, module)
                    except Exception as error:
                        if not isinstance(error, PlantedError) and "node " not in f"{error} {error.__cause__}":
                            raise
                if made[0] < at:  # there was no such node: the stage is done
                    break
                module.graph.lint()
                assert written(module) in BETWEEN, f"{name}, fault at node {at}"
                tried[name] = at
                at += 1 if at < 24 else 7
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    x, a = inputs()
    got = torch.compile(program, backend=backend)(x, a)
    torch.testing.assert_close(got, program(x, a), rtol=1e-4, atol=1e-5)
    assert EXPECTED[program.__name__] <= tried.keys(), tried


EXPECTED = {
    "mapped": set[str](),  # nothing is made: calls are renamed
    "selected": {"values"},
    "stored": {"forward stores", "roll"},
    "looped": {"roll", "distribute"},
    "stepped": {"roll", "tidy"},
    "swept": set[str](),
    "attended": {"splice"},
    "called": {"inline"},
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_graphs_are_changed_behind_the_door_only(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside, changed = [0], list[str](), [0]
    known: set[int] = set()
    door = edit.apply

    def entered(*given: Any) -> Any:
        inside[0] += 1
        try:
            return door(*given)
        finally:
            inside[0] -= 1

    def watched(kind: type, name: str) -> None:
        change = getattr(kind, name)

        def noted(self: Any, *given: Any, **named: Any) -> Any:
            if id(self if kind is fx.Graph else self.graph) in known:
                changed[0] += 1
                outside.extend([] if inside[0] else [name])
            return change(self, *given, **named)

        monkeypatch.setattr(kind, name, noted)

    for room in (edit, reading, replacing, stages, distributing, rolling):
        if hasattr(room, "apply"):
            monkeypatch.setattr(room, "apply", entered)
    for kind, name in ((fx.Graph, "create_node"), (fx.Graph, "erase_node"), (fx.Node, "replace_all_uses_with")):
        watched(kind, name)

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        known.update(id(child.graph) for _, child, _ in pipeline.graphs(module))
        options = Options(loops="roll", lock={"attention": "lz.blocked", "norm": "torch.norm"})
        pipeline.rewrite(module, options, GraphReport(0))
        return module.forward

    torch._dynamo.reset()
    x, a = inputs()
    torch.testing.assert_close(torch.compile(program, backend=backend)(x, a), program(x, a), rtol=1e-4, atol=1e-5)
    assert not outside
    assert changed[0] or not EXPECTED[program.__name__]


# ---- what the door lets through -----------------------------------------------------------------------------------------


def edited(
    program: Callable[..., Any], edit: Callable[[fx.GraphModule], None], *given: Tensor, what: str = "an edit"
) -> tuple[str, list[str]]:
    """What refutes an edit (empty: nothing, and it is made), and why it is unproven; the graph is the same if refuted."""
    told: list[str] = []
    unproven: list[Any] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        before = written(module)
        try:
            apply(module, Rewrite(what, partial(edit, module)), unproven)
        except RefutedError as error:
            told.append(str(error))
            assert written(module) == before
        return module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*given)
    return "".join(told), [str(reason) for reason in unproven]


def node_of(module: fx.GraphModule, target: Any) -> fx.Node:
    return next(node for node in module.graph.nodes if node.target in (target, getattr(target, "__name__", "")))


def made(node: fx.Node, like: fx.Node) -> fx.Node:
    """A new node with an example value."""
    node.meta["example_value"] = like.meta["example_value"]
    return node


def by(target: Any, other: Callable[[fx.Graph, fx.Node], fx.Node]) -> Callable[[fx.GraphModule], None]:
    """An edit that puts something else in the place of the first call of a function."""

    def edit(module: fx.GraphModule) -> None:
        node = node_of(module, target)
        known = set(module.graph.nodes)
        with module.graph.inserting_before(node.next):
            result = made(other(module.graph, node), node)
        node.replace_all_uses_with(result, delete_user_cb=known.__contains__)

    return edit


def scaled(number: float) -> Callable[[fx.GraphModule], None]:
    return by(torch.sin, lambda graph, node: graph.call_function(operator.mul, (node, number)))


def sines(x: Tensor, a: Tensor) -> Tensor:
    return torch.cos(torch.sin(x) * a)


def test_an_edit_that_computes_the_same_is_made() -> None:
    assert edited(sines, scaled(1.0), *inputs()) == ("", [])


@pytest.mark.parametrize("number", [1.001, 0.0, float("nan")])
def test_an_edit_that_computes_something_else_is_refuted(number: float) -> None:
    told, _ = edited(sines, scaled(number), *inputs())
    assert "an edit is not made: sin is " in told


def without_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_method("detach", (node,))


def test_a_gradient_that_is_lost_refutes_an_edit() -> None:
    told, _ = edited(sines, by(torch.sin, without_gradient), *inputs())
    assert "requires_grad False" in told


def by_a_constant(x: Tensor, a: Tensor) -> Tensor:
    return x * a.detach()


def test_a_gradient_that_one_of_two_inputs_loses_refutes_an_edit() -> None:
    def products(x: Tensor, a: Tensor) -> Tensor:
        return torch.cos(torch.mul(x, a))

    x, a = inputs()
    edit = by(torch.mul, lambda graph, node: graph.call_function(by_a_constant, node.args))
    told, _ = edited(products, edit, x, a.requires_grad_())
    assert "is none, and was there" in told


def test_under_no_grad_there_is_none_to_lose() -> None:
    with torch.no_grad():
        assert edited(sines, by(torch.sin, without_gradient), *inputs()) == ("", [])


def test_another_dtype_refutes_an_edit() -> None:
    told, _ = edited(sines, by(torch.sin, lambda graph, node: graph.call_method("double", (node,))), *inputs())
    assert "sin has dtype torch.float64, and had torch.float32" in told


def test_strides_refute_an_edit_where_they_are_seen() -> None:
    def turned(graph: fx.Graph, node: fx.Node) -> fx.Node:
        first = made(graph.call_method("transpose", (node, 0, 1)), node)
        return graph.call_method("transpose", (made(graph.call_method("contiguous", (first,)), node), 0, 1))

    def summed(x: Tensor, a: Tensor) -> Tensor:
        return torch.sin(x).sum() * a

    told, _ = edited(sines, by(torch.sin, turned), *inputs())
    assert "strides" in told
    assert edited(summed, by(torch.sin, turned), *inputs()) == ("", [])


def test_memory_that_is_written_behind_is_looked_at() -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        one = torch.sin(x)
        two = one.clone()
        one.add_(1.0)
        return two * a

    alias = by(torch.Tensor.clone, lambda graph, node: graph.call_method("view_as", (node.args[0], node.args[0])))
    told, _ = edited(program, alias, *(each.detach() for each in inputs()))
    assert "is off by" in told


def test_a_result_that_becomes_a_view_of_an_input_refutes_an_edit() -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        return (x * a).clone(), x.clone()

    def edit(module: fx.GraphModule) -> None:
        node = [node for node in module.graph.nodes if node.target == "clone"][1]
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert "shares memory with" in told


# ---- places that have nothing to do with each other -----------------------------------------------------------------


def residual(x: Tensor, a: Tensor) -> Tensor:
    x = x * 1
    for power in range(1, 4):
        x = x.add_(torch.tanh(x * a**power))
        x = x + torch.sin(x)
    return x


def out_of_place(module: fx.GraphModule, *, wrong: int | None = None) -> None:
    """Sums by themselves instead of those in place, one of them a difference."""
    for place, node in enumerate([node for node in module.graph.nodes if node.target == "add_"]):
        first, second = node.args
        with module.graph.inserting_before(node):
            new = made(module.graph.call_function(torch.sub if place == wrong else torch.add, (first, second)), node)
        for reader in [*first.users, *node.users]:
            if reader > node:
                reader.replace_input_with(node, new)
                reader.replace_input_with(first, new)
        module.graph.erase_node(node)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of what is run, though an edit is small: once before, and once after it, if that is the same."""
    monkeypatch.setattr(edit_proof, "_MANY_BYTES", 0)
    monkeypatch.setattr(edit_proof, "_LOOKED_FOR", 1)
    found: list[int] = []
    ran = edit_proof._Trial.difference

    def difference(trial: edit_proof._Trial, **kinds: Any) -> str:
        found.append(len(trial._stretch.before))
        return ran(trial, **kinds)

    monkeypatch.setattr(edit_proof._Trial, "difference", difference)
    return found


def test_places_that_nothing_connects_are_run_by_themselves_and_equal_ones_once(lengths: list[int]) -> None:
    assert edited(residual, out_of_place, *(each.detach() for each in inputs())) == ("", [])
    assert lengths == [1]


def test_what_is_read_instead_may_be_made_anywhere(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        other = torch.cos(x)
        first = torch.exp(torch.sin(x) * 2)
        second = torch.exp(torch.sin(x + a) * 3)
        return first * second + other

    def edit(module: fx.GraphModule) -> None:
        other = node_of(module, torch.cos)
        for node in module.graph.find_nodes(op="call_function", target=torch.sin):
            node.replace_all_uses_with(other)
            module.graph.erase_node(node)

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert "is off by" in told


def test_places_with_other_numbers_are_not_equal(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        return torch.sin(torch.mul(x, 2.0)) + torch.sin(torch.mul(x, 3.0)) * a

    def edit(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.mul):
            with module.graph.inserting_before(node):
                new = made(module.graph.call_function(torch.add, (node.args[0], node.args[0])), node)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert lengths[:2] == [1, 1]
    assert "mul_1 is off by" in told


@pytest.mark.parametrize("wrong", range(3))
def test_one_wrong_place_of_several_refutes_an_edit(wrong: int, lengths: list[int]) -> None:
    told, _ = edited(residual, partial(out_of_place, wrong=wrong), *(each.detach() for each in inputs()))
    assert "is off by" in told
    assert lengths[:2] == [1, 1] if wrong else lengths[0] == 1
    assert max(lengths) > 1, "what is refuted in parts is run as a whole"


def test_an_edit_that_is_too_large_to_be_run_is_proven_in_parts(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, a = (each.detach() for each in inputs())
    monkeypatch.setattr(edit_proof, "_MOST_BYTES", 3 * x.nbytes)
    assert edited(residual, out_of_place, x, a) == ("", [])
    monkeypatch.setattr(edit_proof, "_MANY_BYTES", 1 << 30)
    _, (unproven,) = edited(residual, out_of_place, x, a)
    assert "a run would take" in unproven


def test_strides_that_a_call_in_between_would_see_are_seen(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        sines = torch.sin(x)
        return torch.cos(x).sum() * a + sines.as_strided((1, 4), (4, 1), 8).sum()

    def edit(module: fx.GraphModule) -> None:
        by(torch.sin, lambda graph, node: graph.call_function(turned, node.args))(module)
        node = node_of(module, turned)
        node.meta["example_value"] = node.meta["example_value"].transpose(0, 1).contiguous().transpose(0, 1)
        row = (slice(0, 1), 1)  # what lies in that memory from its eighth place on
        by("as_strided", lambda graph, node: graph.call_function(operator.getitem, (node.args[0], row)))(module)
        for target in ("as_strided", torch.sin):
            module.graph.erase_node(node_of(module, target))

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert lengths[:2] == [1, 5]
    assert "as_strided is off by" in told


def turned(x: Tensor) -> Tensor:
    """Sines whose strides are those of the other order of dimensions."""
    return torch.sin(x).transpose(0, 1).contiguous().transpose(0, 1)


def test_modes_are_no_places_by_themselves(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        with torch.no_grad():
            sines = torch.sin(x)
        return sines * a

    def edit(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
            module.graph.erase_node(node)

    told, _ = edited(program, edit, *inputs())
    assert "has requires_grad True" in told


def test_what_is_drawn_behind_a_draw_that_goes_belongs_to_its_place(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        torch.rand(4)
        return torch.cos(torch.rand(4)) * torch.sin(x)

    def edit(module: fx.GraphModule) -> None:
        module.graph.erase_node(node_of(module, torch.rand))
        by(torch.sin, lambda graph, node: graph.call_function(torch.sin, node.args))(module)

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert "is off by" in told


def test_the_same_calls_shared_otherwise_between_before_and_after_are_not_equal(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        x, y = x * 1, x * 2
        x.mul_(4)
        x = torch.sin(x)
        y.mul_(4)
        y.mul_(2)
        return torch.sin(y) * x

    def edit(module: fx.GraphModule) -> None:
        for node, factors in zip(
            module.graph.find_nodes(op="call_method", target="mul_"), ((2, 2), (), (2,)), strict=True
        ):
            with module.graph.inserting_before(node):
                for factor in factors:
                    made(module.graph.call_method("mul_", (node.args[0], factor)), node)
            module.graph.erase_node(node)

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert lengths[:2] == [1, 2]
    assert "is off by" in told


def doubled(x: Tensor) -> Tensor:
    """Twice a tensor, if it is a plain one."""
    return x.stored * x.scale if isinstance(x, Int8Weight) else x + x


def test_tensors_of_another_class_are_no_equal_place(lengths: list[int]) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(torch.mul(x, 2)) + torch.sin(torch.mul(weight, 2))

    def edit(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.mul):
            with module.graph.inserting_before(node):
                new = made(module.graph.call_function(doubled, node.args[:1]), node)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)

    weight = Int8Weight(torch.full((4, 4), 3, dtype=torch.int8), torch.ones(4, 1), torch.float32)
    told, _ = edited(program, edit, torch.randn(4, 4), weight)
    assert lengths[:2] == [1, 1]
    assert "mul_1 is off by" in told


def test_places_whose_proofs_are_as_long_as_the_whole_are_proven_together(lengths: list[int]) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        out = torch.zeros(25, *x.shape)
        for step in range(24):
            out[step + 1] = torch.sin(out[step] + x)
        return out

    def edit(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
            with module.graph.inserting_before(node):
                new = made(module.graph.call_function(torch.select, (node.args[0], 0, node.args[1])), node)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)

    assert edited(program, edit, *inputs()) == ("", [])
    count = 24 * 4  # calls
    assert lengths[0] < count / 2 < lengths[-1]
    assert sum(lengths) < 3.1 * count, "in parts, then as a whole"


def test_a_graph_of_many_small_calls_is_proven_as_a_whole(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_proof, "_LOOKED_FOR", 1 << 15)
    assert edited(residual, out_of_place, *(each.detach() for each in inputs())) == ("", [])
    assert lengths[0] > 1, "to look for each place would take longer"


def test_what_memory_holds_is_known_by_name() -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        value = torch.sin(x[:, 0])
        out[:, 0] = value
        return torch.cos(out[:, 0]) * a

    def edit(module: fx.GraphModule) -> None:
        load = node_of(module, torch.cos).args[0]
        load.replace_all_uses_with(node_of(module, torch.sin))
        module.graph.erase_node(load)

    assert edited(program, edit, *inputs()) == ("", [])


@pytest.mark.parametrize(("place", "refutes"), [(0, False), (2, True)])
def test_what_is_written_again_before_it_is_read_may_have_been_anything(place: int, refutes: bool) -> None:
    def program(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(x)
        out[:, :1] = torch.cos(x[:, :1])
        out[:, 1:] = a
        out[:, :1] = torch.sin(x[:, :1])
        return out, out[:, :1]

    def edit(module: fx.GraphModule) -> None:
        stores = [node for node in module.graph.nodes if node.target is operator.setitem]
        module.graph.erase_node(stores[place])

    told, _ = edited(program, edit, *(each.detach() for each in inputs()))
    assert ("is off by" in told) == refutes


def test_what_is_written_again_behind_a_call_that_cannot_be_run_refutes_an_edit() -> None:
    def program(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(x)
        out[:, :1] = torch.cos(x[:, :1])
        factor = torch.linalg.cholesky(out[0, :2, :2] * 0 + x[0, :2, :2])  # of few random numbers
        out[:, 1:] = a
        return out, factor

    def edit(module: fx.GraphModule) -> None:
        module.graph.erase_node(node_of(module, operator.setitem))

    x = torch.eye(4).expand(2, -1, -1)
    told, unproven = edited(program, edit, x, torch.ones(4))
    assert "is off by" in told
    assert not unproven


@pytest.mark.parametrize("name", ["by a view", "by itself", "never"])
def test_memory_that_nobody_reads_again_may_hold_anything(name: str) -> None:
    """What is written out of place leaves the memory as it was, which a view of it shows, however little runs."""

    def program(x: Tensor, a: Tensor) -> Tensor:
        values = x.sort(-1).values
        row = values[0]
        small = values.gather(-1, 50 - a.to(torch.int64) * 50 + torch.zeros_like(x, dtype=torch.int64))  # not of any a
        values.masked_fill_(values < small, -1.0)
        return {"by a view": row, "by itself": values, "never": x}[name] + values.clone()

    def edit(module: fx.GraphModule) -> None:
        write, clone = node_of(module, torch.Tensor.masked_fill_), node_of(module, torch.Tensor.clone)
        with module.graph.inserting_before(write):
            value = made(module.graph.call_method("masked_fill", write.args), write)
        clone.args = (value, *clone.args[1:])
        module.graph.erase_node(write)

    told, unproven = edited(program, edit, torch.randn(2, 9), torch.ones(1))
    assert (bool(told), unproven) == (name != "never", [])


def test_a_nan_gradient_must_stay_nan() -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        return torch.where(x > 0.5, torch.sqrt(x - 0.5), a)

    def safe(graph: fx.Graph, node: fx.Node) -> fx.Node:
        condition, root, other = node.args
        inner = made(graph.call_method("abs", root.args), root)
        return graph.call_function(
            torch.where, (condition, made(graph.call_function(torch.sqrt, (inner,)), root), other)
        )

    told, _ = edited(program, by(torch.where, safe), *inputs())
    assert "the gradient of input 0 is NaN" in told


def test_a_table_of_one_row_is_looked_up_in() -> None:
    def looked_up(x: Tensor, n: Tensor) -> Tensor:
        return torch.sin(x)[n]

    index = torch.zeros(3, dtype=torch.long)
    assert edited(looked_up, scaled(1.0), torch.randn(1, 4), index) == ("", [])
    assert "an edit is not made: " in edited(looked_up, scaled(0.5), torch.randn(1, 4), index)[0]


def test_what_cannot_be_run_carries_the_reason() -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        return torch.sin(x)[a.long()] * 2

    out_of_bounds = (torch.rand(1, 3), torch.zeros(4))
    told, unproven = edited(program, scaled(1.0), *out_of_bounds)
    assert told == ""
    assert unproven == [] or "does not run on random inputs" in unproven[0]


def test_a_refuted_edit_is_an_event_and_the_graph_computes_what_it_did() -> None:
    def wrong(graph: fx.Graph, _may_edit: Any) -> int:
        scaled(2.0)(graph.owning_module)
        return 1

    found: list[Any] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        state = State(module, "", Options(), GraphReport(0), ())
        with events.collect() as happened:
            run([_everywhere("doubling", "LOOPS_FAILED", wrong, "loops")], state)
        found.extend(happened)
        assert not state.is_changed
        return module.forward

    torch._dynamo.reset()
    x, a = inputs()
    torch.testing.assert_close(torch.compile(sines, backend=backend)(x, a), sines(x, a))
    assert [event.code for event in found] == ["EDIT_REFUTED"]
    assert "doubling is not made: sin is off by" in found[0].message


@pytest.mark.parametrize(("fault", "kind"), [(2.0, RefutedError), (None, PlantedError)])
def test_a_place_at_fault_is_left_out_and_named_and_the_others_are_edited(fault: float | None, kind: type) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        for number in range(9):
            x = torch.sin(x) + number
        return x * a

    bad = "sin_5"

    def stage(graph: fx.Graph, may_edit: MayEdit) -> int:
        places = [node for node in graph.nodes if node.target is torch.sin]
        allowed = [place for place in places if may_edit(place)]
        for place in allowed:
            factor = fault if place.name == bad else 1.0
            if factor is None:
                raise PlantedError
            with graph.inserting_before(place):
                value = made(graph.call_method("sin", place.args), place)
                value = made(graph.call_function(operator.mul, (value, factor)), place)
            place.replace_all_uses_with(value)
        for place in allowed:
            graph.erase_node(place)
        return len(allowed)

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        assert bad in {node.name for node in module.graph.nodes}
        count, faults = apply_places(module, "renaming", stage, [], Snapshot(module))
        assert (count, [place for place, _ in faults]) == (8, [bad])
        assert isinstance(faults[0][1], kind)
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    x, a = inputs()
    torch.testing.assert_close(torch.compile(program, backend=backend, fullgraph=True)(x, a), program(x, a))


def test_a_graph_is_put_back_again_and_again_as_it_was() -> None:
    module = fx.symbolic_trace(lambda x: torch.sin(x) * 2)
    first = next(iter(module.graph.nodes))
    first.meta["example_value"] = "as it was"
    before = Snapshot(module)
    for _ in range(3):
        next(iter(module.graph.nodes)).meta["example_value"] = "edited"
        before.restore()
        assert next(iter(module.graph.nodes)).meta["example_value"] == "as it was"


PLACES = torch.zeros(3, dtype=torch.int64)
BEHIND = PLACES + 1


def _decomposed(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(torch.diag_embed(x))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: torch.where(x > 0, torch.sqrt(x), 1.0), False),
        (torch.sqrt, True),
        (lambda x: torch.sqrt(torch.where(x > 0, x, 1.0)), False),
        (lambda x: torch.log(x.abs()[:, 0]), False),
        (lambda x: torch.stack([x[:, 0] / (x[:, 1] - x[:, 1]), x[:, 0]]), True),
        (lambda x: x[:1][PLACES], False),
        (lambda x: x[:1].sqrt()[PLACES], True),
        (lambda x: x[:1][2 - 2 * BEHIND], True),  # of zero it is no index, either
        (_decomposed, True),
    ],
)
def test_values_that_may_be_nan_are_seen_by_running_what_they_come_from(
    program: Callable[[Tensor], Tensor], expected: bool
) -> None:
    found: list[bool] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        (result,) = module.graph.output_node().args[0]
        found.append(may_be_special(result))
        return module.forward

    torch._dynamo.reset()
    with events.collect() as happened:
        torch.compile(program, backend=backend, fullgraph=True)(inputs()[0])
    assert found == [expected]
    assert all(each.code == "PROBE_FAILED" and "LinAlgError" in each.message for each in happened)
    assert len(happened) == (program is _decomposed)  # what raises on random numbers is in doubt, and told
