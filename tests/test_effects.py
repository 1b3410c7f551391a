"""Overwritten tensors and changed modes, against what really happens in memory."""

# ruff: noqa: PLW0108 - a lambda names the inputs that it is given, and Dynamo traces it as a user's function

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import checkpoint

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, ambient_context, faking
from lz_compile.passes.graph.view import tensor_of
from tests.graphs import call_named, capture, effects_of, in_order, output_of, outputs_of, placeholders

X = torch.rand(4, 6) + 1


class _History(fx.Interpreter):
    """Every tensor of a graph as it is after every node (``after[position][node]``), and who shares whose memory."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.after: list[dict[fx.Node, Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        live = {node: held for node, held in [*self.env.items(), (n, value)] if isinstance(held, Tensor)}
        self.after.append({node: held.clone() for node, held in live.items()})
        self.memory = {node: held.untyped_storage().data_ptr() for node, held in live.items()}
        return value


def history_of(module: fx.GraphModule, *inputs: Tensor) -> _History:
    history = _History(module)
    history.run(*[value.clone() for value in inputs])
    return history


def check_against_memory(module: fx.GraphModule, *inputs: Tensor) -> None:
    """Whoever reads a tensor sees what ``current`` and ``is_opaque`` say that it sees."""
    effects, history = effects_of(module), history_of(module, *inputs)
    for reader in module.graph.nodes:
        position = effects.position[reader]
        for node in reader.all_input_nodes:
            if tensor_of(node) is None:
                continue
            seen = history.after[position - 1][node]
            current = effects.current(node, reader)
            if effects.is_opaque(current, reader):
                continue
            made = history.after[effects.position[current]][current]
            assert torch.equal(seen, made), f"{reader.name} does not see {node.name} as {current.name} made it"


def check_overwrites(module: fx.GraphModule, *inputs: Tensor) -> None:
    """A tensor that changes between two nodes is reported as overwritten there."""
    effects, history = effects_of(module), history_of(module, *inputs)
    nodes = [node for node in module.graph.nodes if tensor_of(node) is not None]
    for node in nodes:
        for start in nodes:
            if effects.position[start] < effects.position[node]:
                continue
            for stop in nodes:
                if effects.position[stop] <= effects.position[start]:
                    continue
                before = history.after[effects.position[start]][node]
                changed = not torch.equal(before, history.after[effects.position[stop] - 1][node])
                if changed:
                    assert effects.overwritten_after(node, start, stop) is not None


# ---- single facts ---------------------------------------------------------------------------------------------------


def test_without_writes_everybody_sees_what_was_made() -> None:
    module = capture(lambda x: (x * 2).exp() + x, X)
    effects = effects_of(module)
    made = call_named(module, "mul").node
    assert effects.current(made, output_of(module)) is made
    assert not effects.is_opaque(made, output_of(module))
    assert effects.overwritten_after(made, made, output_of(module)) is None


def test_readers_see_the_last_of_a_chain_of_in_place_operations() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        before = y + 1
        y.add_(1)
        y.mul_(3)
        return before + y

    module = capture(fn, X)
    effects = effects_of(module)
    nodes = {node.name: node for node in module.graph.nodes}
    made, chain, before = nodes["y"], [nodes["add_"], nodes["mul_"]], nodes["before"]
    assert effects.current(made, before) is made
    assert effects.current(made, chain[0]) is made
    assert effects.current(made, chain[1]) is chain[0]
    assert effects.current(made, output_of(module)) is chain[1]
    assert not effects.is_opaque(made, output_of(module))
    assert effects.overwritten_after(made, before, output_of(module)) is chain[0]
    assert effects.overwritten_after(made, chain[0], output_of(module)) is chain[1]
    assert effects.overwritten_after(made, chain[1], output_of(module)) is None
    assert effects.owner(chain[1]) is made


def test_a_write_through_a_view_makes_the_whole_opaque() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.view(-1).mul_(3)
        return y + 1

    module = capture(fn, X)
    effects, reader = effects_of(module), output_of(module)
    made = reader.args[0]
    assert effects.current(made, reader) is made
    assert effects.is_opaque(made, reader)


def test_a_write_into_the_whole_makes_an_earlier_view_opaque() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(-1)
        y.mul_(3)
        return view + 1

    module = capture(fn, X)
    assert effects_of(module).is_opaque(call_named(module, "view").node, output_of(module))


def test_a_view_made_after_the_write_is_not_opaque() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(3)
        return y.view(-1) + 1

    module = capture(fn, X)
    assert not effects_of(module).is_opaque(call_named(module, "view").node, output_of(module))


def test_assignment_to_a_slice_makes_the_tensor_opaque_for_later_readers_only() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        before = y + 1
        y[:, 1:3] = 0
        return before + y

    module = capture(fn, X)
    effects, reader = effects_of(module), output_of(module)
    before, made = reader.args
    assert not effects.is_opaque(made, before)
    assert effects.is_opaque(made, reader)
    assert effects.overwritten_after(made, before, reader) is call_named(module, "setitem").node


def test_writes_into_one_chunk_leave_the_others_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        first, second = (x * 2).chunk(2, dim=1)
        first.mul_(3)
        return first + second

    module = capture(fn, X)
    effects, reader = effects_of(module), output_of(module)
    first, second = call_named(module, "chunk").node.users
    assert effects.current(first, reader).name == "mul_"
    assert not effects.is_opaque(second, reader)
    assert effects.is_opaque(call_named(module, "chunk").input, reader)


def test_chunks_of_an_expanded_tensor_are_not_disjoint() -> None:
    def fn(x: Tensor) -> Tensor:
        first, second = (x * 2).expand(2, 4, 6).chunk(2)
        first.mul_(3)
        return first + second

    check_against_memory(capture(fn, X), X)


def test_writes_into_inputs_are_seen_by_readers_of_the_input() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x + 1
        x.mul_(2)
        return before + x

    module = capture(fn, X)
    effects, reader = effects_of(module), output_of(module)
    (x,) = placeholders(module)
    assert effects.current(x, reader).name == "mul_"
    assert effects.owner(effects.current(x, reader)) is x
    assert effects.overwritten_after(x, reader.args[0], reader) is not None


def test_out_arguments_are_written() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        torch.add(x, 1, out=y)
        return y + x

    check_against_memory(capture(fn, X), X)


def test_operators_with_a_schema_write_what_it_says() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        torch.ops.aten.add_.Tensor(y, x)
        torch.ops.aten.mul.out(x, y, out=y)
        return y + x

    check_against_memory(capture(fn, X), X)


def test_a_write_inside_a_nested_graph_is_a_write() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        z = checkpoint(lambda inner: inner.mul_(3).sum(), y, use_reentrant=False)
        return y + z

    module = capture(fn, X)
    reader = output_of(module)
    made = next(node for node in reader.all_input_nodes if node.op == "call_function" and tensor_of(node).dim() == 2)
    effects = effects_of(module)
    assert effects.current(made, reader) is not made or effects.is_opaque(made, reader)


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(-1),
    "view_dtype": lambda y: y.view(torch.int32),
    "reshape": lambda y: y.reshape(6, 4),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.ravel(),
    "unflatten": lambda y: y.unflatten(1, (2, 3)),
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "H": lambda y: y.H,
    "t": lambda y: y.t(),
    "adjoint": lambda y: y.adjoint(),
    "transpose": lambda y: y.transpose(0, 1),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "permute": lambda y: y.permute(1, 0),
    "movedim": lambda y: torch.movedim(y, 0, 1),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "squeeze": lambda y: y.squeeze(),
    "expand": lambda y: y.expand(2, 4, 6),
    "broadcast_to": lambda y: y.broadcast_to(2, 4, 6),
    "expand_as": lambda y: y.expand_as(torch.zeros(2, 4, 6)),
    "getitem": lambda y: y[1:, None],
    "select": lambda y: y.select(0, 1),
    "narrow": lambda y: y.narrow(0, 1, 2),
    "chunk": lambda y: y.chunk(2)[1],
    "split": lambda y: y.split(2)[0],
    "split_sizes": lambda y: torch.split(y, [1, 3])[1],
    "tensor_split": lambda y: y.tensor_split(2)[0],
    "hsplit": lambda y: y.hsplit(2)[0],
    "unbind": lambda y: y.unbind(0)[2],
    "diagonal": lambda y: y.diagonal(),
    "unfold": lambda y: y.unfold(0, 2, 1),
    "as_strided": lambda y: y.as_strided((2, 2), (6, 1)),
    "contiguous": lambda y: y.contiguous(),
    "detach": lambda y: y.detach(),
    "to_same_dtype": lambda y: y.to(torch.float32),
    "to_same_device": lambda y: y.to("cpu"),
    "cpu": lambda y: y.cpu(),
    "float": lambda y: y.float(),
    "type_as": lambda y: y.type_as(torch.zeros(1)),
    "type": lambda y: y.type(torch.float32),
    "positive": lambda y: torch.positive(y),
    "unary_plus": lambda y: +y,
    "real": lambda y: y.real,
    "conj": lambda y: y.conj(),
    "resolve_conj": lambda y: y.resolve_conj(),
    "dropout_in_eval": lambda y: F.dropout(y, 0.5, training=False),
    "dropout_of_nothing": lambda y: F.dropout(y, 0.0),
    "einsum_of_one": lambda y: torch.einsum("ij->ji", y),
    "broadcast_tensors": lambda y: torch.broadcast_tensors(torch.zeros(2, 1, 1), y)[1],
    "atleast_3d": lambda y: torch.atleast_3d(y),
    "clone": lambda y: y.clone(),
    "repeat": lambda y: y.repeat(2, 1),
    "to_double": lambda y: y.double(),
    "exp": lambda y: y.exp(),
    "aten_view": lambda y: torch.ops.aten.view.default(y, [24]),
    "aten_slice": lambda y: torch.ops.aten.slice.Tensor(y, 0, 1, 3),
    "aten_numpy_T": lambda y: torch.ops.aten.numpy_T(y),
    "aten_matrix_H": lambda y: torch.ops.aten.matrix_H(y),
    "aten_alias": lambda y: torch.ops.aten.alias.default(y),
}


@pytest.mark.parametrize("case", ALIASES)
def test_whatever_shares_memory_has_the_same_owner(case: str) -> None:
    """And, where a write through one is seen through the other, ``is_opaque`` says so."""
    module = capture(lambda x: (x * 2, ALIASES[case](x * 3))[1] + 0, X)
    history = history_of(module, X)
    alias = output_of(module).args[0]
    (made,) = [n for n in module.graph.nodes if n.op == "call_function" and n.args[1:] == (3,)]
    effects = effects_of(module)
    if history.memory[alias] == history.memory[made]:
        assert effects.owner(alias) is made


@pytest.mark.parametrize(
    "case",
    ["positive", "unary_plus", "dropout_in_eval", "einsum_of_one", "broadcast_tensors", "T", "narrow", "expand_as"],
)
def test_a_write_into_the_owner_is_seen_through_every_alias(case: str) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        alias = ALIASES[case](y)
        y.mul_(3)
        return alias + 1

    check_against_memory(capture(fn, X), X)


# ---- programs -------------------------------------------------------------------------------------------------------

VIEWS = [
    "{0}.view(-1)",
    "{0}.flatten()",
    "{0}.reshape(2, -1)",
    "{0}[0:1]",
    "{0}[1:]",
    "{0}.unsqueeze(0)",
    "{0}.chunk(2)[0]",
    "{0}.chunk(2)[1]",
    "{0}.transpose(0, -1)",
    "{0}.float()",
    "{0}.detach()",
    "{0}.contiguous()",
]
COPIES = ["{0} + 1", "{0} * 0.5", "{0}.exp()", "{0}.clone()", "{0}.sum() + {1}"]
WRITES = [
    "{0}.mul_(1.5)",
    "{0}.add_(0.25)",
    "{0}.add_({1}.sum())",
    "{0}.neg_()",
    "{0}.masked_fill_({0} > 1, 0.125)",
    "{0}.copy_({0} * 3)",
    "{0}.fill_(0.75)",
    "{0}.exp_()",
    "{0}.clamp_(max=0.5)",
    "F.relu({0}, inplace=True)",
]
STATEMENTS = [
    "{0}[0] = 3.5",
    "{0}[0:1] = {1}.sum()",
    "{0}.view(-1)[0] = 2.5",
    "{0} += 0.5",
    "{0} *= 2",
    "{0} -= {1}.sum()",
]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Code that makes views and copies of two inputs and writes through any of them, as text."""
    lines, names = [], ["x", "y"]
    for index in range(draw(st.integers(2, 7))):
        first, second = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        kind = draw(st.sampled_from([VIEWS, COPIES, WRITES, WRITES, STATEMENTS]))
        text = draw(st.sampled_from(kind)).format(first, second)
        if kind is STATEMENTS:
            lines.append(text)
            continue
        names.append(f"v{index}")
        lines.append(f"v{index} = {text}")
    total = " + ".join(f"{name}.sum()" for name in names)
    return "def program(x, y):\n" + "".join(f"    {line}\n" for line in lines) + f"    return {total}"


def compiled(text: str) -> Callable[..., Any] | None:
    """The program, or None where it does not run."""
    scope: dict[str, Any] = {"F": F, "torch": torch}
    exec(text, scope)
    try:
        scope["program"](torch.rand(4, 6), torch.rand(3, 2))
    except (RuntimeError, IndexError):
        return None
    return scope["program"]


@settings(max_examples=50)
@given(programs())
def test_readers_in_random_programs_see_what_effects_say(text: str) -> None:
    program = compiled(text)
    if program is None:
        return
    inputs = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)), torch.rand(3, 2)
    module = capture(program, *inputs)
    values = in_order(module, {"x": inputs[0], "y": inputs[1]})
    check_against_memory(module, *values)
    check_overwrites(module, *values)


# ---- modes ----------------------------------------------------------------------------------------------------------


def test_outside_of_every_region_the_ambient_is_empty() -> None:
    module = capture(lambda x: x + 1, X)
    assert effects_of(module).ambient(output_of(module)) == Ambient()


def test_autocast_holds_between_its_entry_and_its_exit() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x.exp()
        return before + inside.tanh()

    module = capture(fn, X)
    effects = effects_of(module)
    inside = effects.ambient(call_named(module, "exp").node)
    assert [region[:3] for region in inside.autocast] == [("cpu", torch.bfloat16, True)]
    assert effects.ambient(call_named(module, "tanh").node) == Ambient()
    assert effects.ambient(output_of(module)) == Ambient()


def test_an_autocast_region_of_a_device_that_no_tensor_is_on_is_none() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16, enabled=False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x
            z = x.sin()
        return y + z.cos()

    module = capture(f, torch.randn(4, 4))
    effects = effects_of(module)
    assert [region[0] for region in effects.ambient(call_named(module, "matmul").node).autocast] == ["cpu"]
    assert effects.ambient(call_named(module, "sin").node) == effects.ambient(call_named(module, "cos").node)


def test_nested_autocast_regions_are_told_apart() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outer = x.exp()
            with torch.autocast("cpu", enabled=False):
                inner = x.sin()
            again = x.cos()
        return outer + inner + again

    module = capture(fn, X)
    effects = effects_of(module)
    outer, inner, again = (effects.ambient(call_named(module, name).node) for name in ("exp", "sin", "cos"))
    assert len(outer.autocast) == 1
    assert len(inner.autocast) == 2
    assert outer == again != inner


@pytest.mark.parametrize("manager", [torch.no_grad, torch.enable_grad, lambda: torch.set_grad_enabled(False)])
def test_gradient_modes_hold_inside_of_their_region(manager: Callable[[], Any]) -> None:
    def fn(x: Tensor) -> Tensor:
        before = x.sin()
        with manager():
            inside = x.exp()
        return before + inside.tanh()

    module = capture(fn, X.clone().requires_grad_())
    effects = effects_of(module)
    names = [getattr(node.target, "__name__", "") for node in module.graph.nodes]
    before, inside, after = (effects.ambient(call_named(module, name).node) for name in ("sin", "exp", "tanh"))
    if "_set_grad_enabled" in names:
        assert before != inside != after
        assert after.grad is torch.is_grad_enabled()


def test_a_choice_of_attention_backend_is_a_mode() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x.exp()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            inside = F.scaled_dot_product_attention(before, before, before)
        return inside

    module = capture(fn, torch.rand(1, 1, 4, 6))
    effects = effects_of(module)
    inside = call_named(module, "scaled_dot_product_attention").node
    assert effects.ambient(inside) != effects.ambient(call_named(module, "exp").node)


def test_vectorised_code_is_a_region_of_its_own() -> None:
    module = capture(lambda x: torch.vmap(lambda row: row.exp())(x.sin()).cos(), X)
    effects = effects_of(module)
    before, inside, after = (effects.ambient(call_named(module, name).node) for name in ("sin", "exp", "cos"))
    assert before == after
    assert inside != before


def test_the_context_of_an_ambient_brings_it_about() -> None:
    ambient = Ambient((("cpu", torch.bfloat16, True, True),), grad=False)
    autocast, grad = ambient_context(ambient)
    was_enabled = torch.is_grad_enabled()
    with autocast:
        assert (X @ X.T).dtype == torch.bfloat16
    with grad:
        assert not torch.is_grad_enabled()
    torch.set_grad_enabled(was_enabled)
    assert ambient_context(Ambient()) == []


@pytest.mark.parametrize("size", [DimDynamic.STATIC, DimDynamic.DYNAMIC])
def test_what_calls_with_symbols_gave_is_not_kept(size: DimDynamic) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.from_tensor(X, symbolic_context=StatelessSymbolicContext([size, DimDynamic.STATIC]))
    with faking(mode):
        assert mode.cache_enabled is (size is DimDynamic.STATIC)
    assert mode.cache_enabled


def test_effects_of_an_empty_graph_are_empty() -> None:
    graph = fx.Graph()
    graph.output(())
    assert Effects(graph).position.keys() == {next(iter(graph.nodes))}


def test_a_call_that_makes_a_leaf_gives_no_value():
    graph = fx.Graph()
    x, leaf = graph.placeholder("x"), torch.randn(3, 3)
    made = graph.call_function(torch.tanh, (x,))
    graph.call_method("requires_grad_", (made,))  # Dynamo notes no result of it
    reader = graph.call_function(torch.matmul, (made, x))
    for node in (x, made, reader):
        node.meta["example_value"] = leaf.clone()
    effects = Effects(graph)
    assert effects.current(made, reader) is made
    assert effects.is_opaque(made, reader)


@pytest.mark.parametrize(
    "copy", [lambda x: x.to(torch.bool), lambda x: x.float(), lambda x: x[torch.arange(2)], lambda x: x[x > 0]]
)
@pytest.mark.parametrize("view", [lambda x: x.to(torch.int64), lambda x: x[:2], lambda x: x[torch.tensor(1)]])
def test_a_cast_to_another_dtype_and_elements_by_a_tensor_share_no_memory_with_what_is_written(copy, view):
    """Of an input that may be the one that is written in a later call, too. One place by a tensor is a view."""

    def write(x: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
        copied, seen = copy(x), view(x)
        counter.add_(1)
        return copied * 2, seen * 2

    x = torch.arange(3)
    assert copy(x).data_ptr() != x.data_ptr() <= view(x).data_ptr() < x.data_ptr() + x.nbytes
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        graph = capture(write, x, torch.zeros((), dtype=torch.int64))
    effects = effects_of(graph)
    copied, seen = (node.all_input_nodes[0] for node in outputs_of(graph))
    assert not effects.is_overwritten(copied)
    assert effects.owner(copied) is copied
    assert effects.is_overwritten(seen)
