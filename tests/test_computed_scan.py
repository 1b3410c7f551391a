"""Scans that compute their factors and summands: the C++ against PyTorch, and which calls of a graph they stand for."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lz_compile as lz
from lz_compile.ground import events
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernels.scan import cpp_ahead, cpp_launch, rolled
from lz_compile.lowering.kernels.scan.computed import compute_while_scanning
from lz_compile.lowering.kernels.scan.cpp_terms import FUNCTIONS, Recipe
from lz_compile.lowering.ops.scan import Operands, ScanAttrs

B, T, D, N = 2, 7, 19, 4
COMPUTED = torch.ops.layerzero.computed_scan_forward_kernel.default
GIVEN = torch.ops.layerzero.rolled_scan_forward_kernel.default

# ---- the C++ ---------------------------------------------------------------------------------------------------------


def lines(chance: random.Random, leaves: int) -> tuple[Any, ...]:
    """Some lines, the last of which reads every leaf; what is exponentiated stays small."""
    found: list[Any] = []
    for i in range(leaves):
        found.append((chance.choice(["exp", "sigmoid", "neg"]), f"x{i}"))
    for i in range(1, leaves):
        name = chance.choice(["add", "sub", "mul"])
        found.append((name, f"y{len(found) - 1}" if i > 1 else "y0", f"y{i}"))
    last = f"y{len(found) - 1}"
    return (*found, *chance.choice([(), (("mul", last, 0.5),), (("sub", 1, last),), (("div", last, 2.0),)]))


def leaf(chance: random.Random, dtype: torch.dtype) -> Tensor:
    """Of a scan, with a random set of its dimensions and random strides, smaller than all of them."""
    sizes = (B, 2, T, N, D)
    kept = chance.choice([(0, 1, 2, 4), (2, 3), (3, 4), (0, 1, 2, 3), (4,), (0, 2), ()])
    shape = [size if place in kept else 1 for place, size in enumerate(sizes)]
    order = chance.sample(range(5), 5)
    value = torch.randn([shape[place] for place in order]).clamp(-2, 2).to(dtype)
    return value.permute([order.index(place) for place in range(5)])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_lines_over_any_leaves_give_what_pytorch_computes(seed: int, dtype: torch.dtype) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    count = chance.choice([2, 3])
    kinds = [dtype] * count if chance.random() < 0.5 else [dtype, *([torch.bfloat16] * (count - 1))]
    leaves = [torch.randn(B, 2, T, N, 1, dtype=dtype), torch.randn(1, 1, T, 1, D, dtype=dtype)]
    leaves += [leaf(chance, each) for each in kinds]
    names = chance.choice([("decay",), ("drive",), ("decay", "drive"), ("right",), ("decay", "right")])
    recipe = Recipe(last=chance.random() < 0.7, **{name: (*lines(chance, len(leaves)),) for name in names})
    left = {"left": torch.randn(B, 2, T, N, N, dtype=dtype)} if "right" in names else {}
    query = torch.randn(B, 2, T, 1, N, dtype=dtype)
    x = Operands(
        query=query, **left, **({"decay": torch.rand(B, 2, T, N, 1, dtype=dtype)} if "decay" not in names else {})
    )
    attrs = ScanAttrs(compute_dtype=dtype, out_dtype=dtype, state_dtype=dtype)
    given = (*x.flat(), leaves, encode(recipe), encode(attrs), 3, True)
    with events.collect() as happened:
        found = rolled._computed(*given)
    bound = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    for one, other in zip(found, rolled._computed_fallback(*given), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **bound)
    assert not happened


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2.5e-7), (torch.float64, 4.5e-16)])
def test_exponentials_are_within_two_units_of_the_last_place_wherever_they_are(
    dtype: torch.dtype, bound: float
) -> None:
    widest = 90.0 if dtype == torch.float32 else 711.0
    edges = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, widest, -widest, -1e30, 1e30])
    values = torch.cat([edges.double(), torch.linspace(-widest, widest, 4086, dtype=torch.float64)]).to(dtype)
    rows = values.reshape(1, 1, 64, 1, 64)
    recipe = Recipe(drive=(("add", "x0", "x1"), ("exp", "y0")), decay=(("mul", "x1", 0.0), ("mul", "y0", 0.0)))
    attrs = ScanAttrs(compute_dtype=dtype, out_dtype=dtype, state_dtype=dtype)
    leaves, query = (
        [rows, torch.zeros(1, 1, 64, 2, 1, dtype=dtype)],
        torch.full((1, 1, 1, 1, 2), 0.5, dtype=dtype),
    )
    found = rolled._computed(*Operands(query=query).flat(), leaves, encode(recipe), encode(attrs), 64, False)[0]
    wanted, seen = values.exp(), []
    state = torch.zeros(64, dtype=dtype)
    for each, row in zip(wanted.reshape(64, 64), found.reshape(64, 64), strict=True):
        state = state * 0.0 + each  # a NaN stays, as an infinity does
        seen.append((row, state.clone()))
    for row, expected in seen:
        torch.testing.assert_close(
            row, expected, rtol=bound, atol=3e-45 if dtype == torch.float32 else 1e-323, equal_nan=True
        )


def test_code_is_built_while_the_rest_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cpp_ahead, "_started", set())
    monkeypatch.setattr(cpp_ahead, "_pool", SimpleNamespace(submit=lambda _, program, backward: asked.append(program)))
    leaves, query = [torch.rand(B, 1, T, N, 1), torch.rand(B, 1, T, 1, D)], torch.rand(B, 1, T, 1, N)
    recipe, attrs = Recipe(decay=(("mul", "x0", "x1"),), drive=(("add", "x0", "x1"),)), ScanAttrs()
    with FakeTensorMode() as mode:
        fake, asking = [mode.from_tensor(each) for each in leaves], mode.from_tensor(query)
        rolled._computed_fake(*Operands(query=asking).flat(), fake, encode(recipe), encode(attrs), 64, False)
    x = Operands(query=query, **recipe.of(leaves))
    assert asked == [cpp_launch.Launch(x, attrs, 64, recipe, leaves).program(frozenset())]


def test_every_function_is_one_of_atens() -> None:
    from lz_compile.lowering.kernels.scan import computed

    assert set(computed._ARITHMETIC.values()) == FUNCTIONS.keys()


# ---- which calls they stand for --------------------------------------------------------------------------------------


def scanned(decay: Tensor, fed: Tensor, c: Tensor) -> Tensor:
    """A scan over ``[B, T, N, D]``, as the recogniser emits it."""
    x = Operands(decay=decay.unsqueeze(1), drive=fed.unsqueeze(1), query=c[:, None, :, None, :])
    return rolled.scan(x, ScanAttrs())[0]


Model = Callable[..., Any]


def traced(model: Model, given: tuple[Tensor, ...], mode: str = "fake") -> tuple[fx.GraphModule, fx.GraphModule]:
    """A graph as Inductor gets it, and as it is after the change."""
    with torch.no_grad():
        before, after = (
            make_fx(torch.func.functionalize(model), select_decomp_table(), mode)(*given) for _ in range(2)
        )
    for each in (before, after):
        each.graph.eliminate_dead_code()
    compute_while_scanning(after)
    after.graph.lint()
    return before, after


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(B, T, D), torch.rand(B, T, D), torch.randn(B, T, N), torch.randn(B, T, N), -torch.rand(D, N)


def plain(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay, fed = torch.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, :, None]
    return scanned(decay.transpose(2, 3), fed.transpose(2, 3), c)


def in_place(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = dt.unsqueeze(-1).expand(B, T, D, N).clone()
    decay.mul_(a).exp_()
    fed = dt[..., None] * b[:, :, None] * x[..., None]
    return scanned(decay.transpose(2, 3), fed.transpose(2, 3), c)


def channels_first(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    x, dt = x.transpose(1, 2), dt.transpose(1, 2)
    decay = torch.exp(a[None, :, None, :] * dt[:, :, :, None])
    fed = dt[:, :, :, None] * b[:, None].float() * x[:, :, :, None].float()
    return scanned(decay.permute(0, 2, 3, 1), fed.permute(0, 2, 3, 1), c)


def by_einsum(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay, fed = torch.einsum("btd,dn->btnd", dt, a).exp(), torch.einsum("btd,btn,btd->btnd", dt, b, x)
    return scanned(decay, fed, c)


def shared(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = torch.exp(dt[..., None] * a)
    fed = (decay - 1) / a * b[:, :, None] * x[..., None]
    return scanned(decay.transpose(2, 3), fed.transpose(2, 3), c)


def gated(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = torch.sigmoid(dt[..., None] + a)
    fed = (1 - decay) * -(x[..., None] * b[:, :, None].reciprocal())
    return scanned(decay.transpose(2, 3), fed.transpose(2, 3), c)


def written_over(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    found = plain(x, dt, b, c, a)
    dt.zero_()
    return found


def narrow(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    return plain(x.bfloat16().float(), dt, b.bfloat16().float(), c, a)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "model",
    [plain, in_place, channels_first, by_einsum, shared, gated, written_over, narrow],
    ids=lambda each: each.__name__,
)
def test_what_is_made_of_smaller_tensors_is_computed_by_the_scan(model: Model, mode: str) -> None:
    given = inputs()
    before, after = traced(model, given, mode)
    (call,) = after.graph.find_nodes(op="call_function", target=COMPUTED)
    names = dict(zip(Operands.names, call.args, strict=False))
    assert names["decay"] is None
    assert names["drive"] is None
    assert not any(
        isinstance(each.meta.get("val"), Tensor) and each.meta["val"].numel() >= B * T * D * N
        for each in after.graph.nodes
    )
    twice = [[each.clone() for each in given] for _ in range(2)]
    torch.testing.assert_close(after(*twice[0]), before(*twice[1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*twice)


def read_again(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Any:
    decay, fed = torch.exp(dt[..., None] * a).transpose(2, 3), (x[..., None] * b[:, :, None]).transpose(2, 3)
    return scanned(decay, fed, c), decay.sum()


def made_of_two(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """Two tensors as large as their product would be written to memory in place of it."""
    decay = torch.exp(dt[..., None, :] * a.T.contiguous())  # columns side by side
    return scanned(decay.cumsum(1) * decay.cos(), (x[..., None] * b[:, :, None]).transpose(2, 3), c)


def column_by_column(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """Of a tensor as large as it, in another order: read where it lies, every number would come by itself."""
    decay = torch.exp(-(dt[..., None] * a).cumsum(1)).transpose(2, 3)
    return scanned(decay, (x[..., None] * b[:, :, None]).transpose(2, 3), c)


def rounded(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = torch.exp((dt[..., None] * a).bfloat16().float())
    return scanned(decay.transpose(2, 3), (x[..., None] * b[:, :, None]).transpose(2, 3), c)


def unknown(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = torch.where(dt[..., None, :] > 0.5, torch.tanh(dt[..., None, :] * a.T), 0.0)
    return scanned(decay, (x[..., None] * b[:, :, None]).transpose(2, 3), c)


def cut(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """Rows and columns are joined, and cut at other places."""
    decay = torch.exp(dt[..., None] * a).reshape(B, T, N, D)
    return scanned(decay, (x[..., None] * b[:, :, None]).transpose(2, 3), c)


def infinite(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay = torch.exp(dt[..., None] * a * torch.inf)
    return scanned(decay.transpose(2, 3), (x[..., None] * b[:, :, None]).transpose(2, 3), c)


@pytest.mark.parametrize(
    "model",
    [read_again, made_of_two, column_by_column, rounded, unknown, cut, infinite],
    ids=lambda each: each.__name__,
)
def test_what_somebody_else_reads_or_is_no_arithmetic_is_given(model: Model) -> None:
    given = inputs()
    before, after = traced(model, given)
    (call,) = after.graph.find_nodes(op="call_function", target=COMPUTED)
    assert isinstance(call.args[Operands.names.index("decay")], fx.Node)
    assert call.args[Operands.names.index("drive")] is None
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-4, atol=1e-5, equal_nan=True)


def expanded(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """Nothing but the expanded summand says how many steps and columns there are."""
    fed = (x[:, :1, None, :1].expand(B, T, N, D) * 2.0 + 1.0)[:, None]
    return rolled.scan(Operands(drive=fed, query=c[:, :1, None, None]), ScanAttrs())[0]


def expanded_by_steps(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    fed = (x[:, :1, None].expand(B, T, N, D) * 2.0)[:, None]
    return rolled.scan(Operands(drive=fed, query=c[:, :1, None, None]), ScanAttrs())[0]


def larger_elsewhere(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """All of one operand, and a factor of another one, which is larger."""
    gate = dt[0] * 0.5
    return rolled.scan(Operands(decay=gate[None, None, :, None], drive=(gate * x)[:, None, :, None]), ScanAttrs())[0]


def seen_twice(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """A leaf by a view, and by a view of that."""
    near, far = x[..., None], x[..., None, None].squeeze(-1)
    return scanned(torch.sigmoid(near * a).transpose(2, 3), (far * a + near).transpose(2, 3), c)


@pytest.mark.parametrize(
    "model", [expanded, expanded_by_steps, larger_elsewhere, seen_twice], ids=lambda each: each.__name__
)
def test_expanded_leaves_tell_no_size_and_leaves_stay(model: Model) -> None:
    given = inputs()
    for _ in range(6):  # nodes come in any order out of a set
        before, after = traced(model, given)
    (call,) = after.graph.find_nodes(op="call_function", target=COMPUTED)
    recipe = decode(Recipe, call.args[len(Operands.names) + 1])
    names = {expanded: set(), expanded_by_steps: set(), larger_elsewhere: {"drive"}, seen_twice: {"decay", "drive"}}
    assert recipe.given().keys() == names[model]
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-4, atol=1e-5)


def test_a_graph_that_writes_to_memory_before_the_scan_is_left_alone() -> None:
    given = inputs()
    with torch.no_grad():
        module = make_fx(written_over, select_decomp_table(), "fake")(*given)
    first = next(each for each in module.graph.nodes if each.op != "placeholder")
    with module.graph.inserting_before(first):
        module.graph.call_function(torch.ops.aten.zero_.default, (first.args[0],))
    compute_while_scanning(module)
    assert module.graph.find_nodes(op="call_function", target=GIVEN)


def test_factors_that_two_scans_share_and_those_that_rows_share_stay_as_they_are() -> None:
    def twice(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
        decay, fed = torch.exp(dt[..., None] * a).transpose(2, 3), (x[..., None] * b[:, :, None]).transpose(2, 3)
        return scanned(decay, fed, c) + scanned(decay, fed, b)

    def for_all_rows(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
        """Computed by the scan, each would be computed for every row again."""
        return scanned(torch.exp(dt * x)[:, :, None], torch.sigmoid(dt)[:, :, None], c)

    for model in (twice, for_all_rows):
        _, after = traced(model, inputs())
        for call in after.graph.find_nodes(op="call_function", target=COMPUTED):
            assert decode(Recipe, call.args[len(Operands.names) + 1]) == Recipe(last=False)


def averaged(x: Tensor, dt: Tensor) -> Any:
    decay = 1 - dt
    return rolled.scan(Operands(decay=decay[:, None, :, None], drive=(dt * x)[:, None, :, None]), ScanAttrs())


def gated_average(x: Tensor, dt: Tensor) -> Any:
    """The gate takes longer to compute than to read, and is computed once."""
    gate = torch.sigmoid(dt)
    return rolled.scan(Operands(decay=(1 - gate)[:, None, :, None], drive=(gate * x)[:, None, :, None]), ScanAttrs())


def updated(x: Tensor, dt: Tensor) -> Any:
    keys = x[:, None, :, None, :N]
    return rolled.scan(Operands(left=keys, right=(dt * x - x)[:, None, :, None], query=keys), ScanAttrs())


@pytest.mark.parametrize("reads_last", [False, True])
@pytest.mark.parametrize(
    ("model", "names"),
    [(averaged, {"decay", "drive"}), (gated_average, {"decay", "drive"}), (updated, {"right"})],
    ids=["averaged", "gated", "updated"],
)
def test_what_is_as_large_is_computed_by_the_scan_and_a_last_state_is_left_out(
    model: Model, names: set[str], reads_last: bool
) -> None:
    given = inputs()[:2]
    before, after = traced(model if reads_last else lambda *given: model(*given)[0], given)
    (call,) = after.graph.find_nodes(op="call_function", target=COMPUTED)
    recipe = decode(Recipe, call.args[len(Operands.names) + 1])
    assert recipe.given().keys() == names
    assert recipe.last == reads_last
    assert len(after.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)) == (
        model is gated_average
    )
    torch.testing.assert_close(after(*given), before(*given), rtol=1e-5, atol=1e-6)
    assert call.target(*rolled_inputs(call, after, given))[1].shape[2] == (
        recipe.last and (N if "right" in names else 1)
    )


def rolled_inputs(call: fx.Node, module: fx.GraphModule, given: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What a call is given."""
    found: list[Any] = []

    class Reading(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n is call:
                found.append(self.fetch_args_kwargs_from_env(n)[0])
            return super().run_node(n)

    Reading(module).run(*given)
    return found[0]


# ---- compiled --------------------------------------------------------------------------------------------------------


def mamba(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    decay, fed = torch.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, :, None, :]
    state, found = x.new_zeros(x.shape[0], x.shape[-1], b.shape[-1]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + fed[:, t]
        found.append(torch.matmul(state, c[:, t, :, None])[..., 0])
    return torch.stack(found, 1)


def sizes(batch: int, steps: int) -> tuple[Tensor, ...]:
    wide, narrow = torch.rand(2, batch, steps, 33), torch.randn(2, batch, steps, 5)
    return (*wide.unbind(), *narrow.unbind(), -torch.rand(33, 5))


def test_a_state_without_rows_is_scanned() -> None:
    x = Operands(drive=torch.rand(B, 1, T, 0, D), query=torch.rand(B, 1, T, 1, 0))
    with events.collect() as happened:
        reads, last = rolled.scan(x, ScanAttrs())
    assert not happened
    assert torch.equal(reads, torch.zeros(B, 1, T, 1, D))
    assert last.shape == (B, 1, 0, D)


def test_a_loop_is_compiled_once_for_all_lengths_and_trains_as_before() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lz.roll_loops(mamba, *sizes(2, 6)), backend="layerzero", dynamic=True)
    with events.collect() as happened:
        with torch.no_grad():
            _, code = run_and_get_code(compiled, *sizes(2, 12))
            for batch, steps in ((2, 70), (3, 9)):
                given = sizes(batch, steps)
                torch.testing.assert_close(compiled(*given), mamba(*given), rtol=1e-4, atol=1e-5)
        given = tuple(each.requires_grad_() for each in sizes(2, 12))
        found, wanted = compiled(*given), mamba(*given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(each.sin().sum(), given) for each in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert sum("computed_scan_forward_kernel" in each for each in code) == 1
    assert not happened
