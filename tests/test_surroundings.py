"""An excerpt: a match with the pointwise chain around it, which computes what that part of the graph computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_spellings import TOLERANCES, Spelling, spellings
from graphs import capture, in_order, parameters_of, placeholders, run
from hypothesis import HealthCheck, Phase, given, settings
from tiers import examples
from torch import Tensor, fx

from lz_compile.compile.problems import of_match
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import read, value_of
from lz_compile.passes.proof.surroundings import Surrounded, surrounded, symbols
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import Recipes, splice
from lz_compile.runtime.kernels.registry import kernels

OPAQUE, VISIBLE = "torch.sdpa", "lz.blocked"


def excerpts(module: fx.GraphModule) -> list[Surrounded]:
    effects = Effects(module.graph)
    return [
        surrounded(each, effects)
        for each in recognisers()["attention"](module.graph, effects)
        if isinstance(each, Match)
    ]


def of(function: Callable[..., Any], *inputs: Any, **options: Any) -> Surrounded:
    """The excerpt around the only attention."""
    (found,) = excerpts(capture(function, *inputs, **options))
    return found


def held(found: Surrounded) -> list[str]:
    """The operations around the match, by name."""
    names = []
    for node in found.nodes:
        call = read(node)
        if call is not None and node not in found.match.core and node not in found.match.read:
            names.append(call.name)
    return names


def tensors(*shape: int, count: int = 3, **options: Any) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64, **options) for _ in range(count)]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def check(function: Callable[..., Any], *inputs: Tensor, tolerance: float = 1e-9) -> list[Surrounded]:
    """The excerpts of a function, once each gave what the function gives there: left alone, and with every kernel."""
    module = capture(function, *inputs)
    compare(module, in_order(module, dict(zip(parameters_of(function), inputs, strict=True))), tolerance)
    return excerpts(module)


def compare(module: fx.GraphModule, inputs: Sequence[Tensor], tolerance: float = 1e-9) -> None:
    values = run(module, *inputs)
    for found in excerpts(module):
        specs = [kernels("attention")[name] for name in (OPAQUE, VISIBLE)]
        calls = [None, *(spec.call for spec in specs if not spec.check(of_match(found.match)))]
        for call in calls:
            given_values = [_copied(values[node]) for node in found.inputs]
            results = found.function(call)(*given_values)
            for got, node in zip(results, found.outputs, strict=True):
                torch.testing.assert_close(got, values[node], rtol=tolerance, atol=tolerance, equal_nan=True)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# ---- what is taken in --------------------------------------------------------------------------------------------------


def test_the_pointwise_and_layout_operations_before_and_after_are_taken_in():
    def block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in F.linear(x, weight).chunk(3, -1))
        gate = torch.sigmoid(gate)
        out = attention(torch.tanh(query) * 2, key, value)
        return F.linear(gate * out.transpose(1, 2).reshape(x.shape) + 1, weight[:32])

    (found,) = check(block, *tensors(2, 12, 32, count=2), *tensors(96, 32, count=1))
    names = held(found)
    assert "linear" not in names
    everything = {read(node).name for node in found.nodes}
    assert {"tanh", "reshape", "mul", "add", "chunk", "unflatten"} <= everything
    assert "sigmoid" not in names, "the gate is computed by itself: after the match only what reads it is taken in"
    assert [read(node).name for node in found.outputs] == ["add"]


def test_a_split_is_taken_in_whole_or_its_parts_are_inputs():
    def packed(packed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, gate = torch.tanh(packed).split([16, 16, 16, 8], -1)
        return attention(query, key, value), (gate @ weight).cumsum(-1)

    def alone(packed: Tensor, weight: Tensor) -> Tensor:
        query, key, value = torch.tanh(packed).split([16, 16, 24], -1)
        return attention(query, key, value) + weight.sum()

    inputs = (*tensors(2, 3, 20, 56, count=1), *tensors(8, 8, count=1))
    (found,) = check(packed, *inputs)
    assert found.surroundings == ""
    assert all(isinstance(value_of(node), Tensor) for node in found.inputs)
    (found,) = check(alone, *inputs)
    assert {"tanh", "split"} <= {read(node).name for node in found.nodes}


def test_what_others_read_too_is_not_taken_in_before_the_match():
    def shared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, key = torch.tanh(query), torch.exp(key)
        return attention(query, key, value), query.sum()

    found = of(shared, *tensors(2, 3, 8, 16))
    assert held(found) == ["exp"]
    assert [node.name for node in found.inputs if read(node) is not None] == ["query"]


def test_what_is_read_by_others_after_the_match_is_taken_in_and_given_out():
    def twice(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = attention(query, key, value) + 1
        return F.linear(out, out[0, 0]), torch.tanh(out)

    inputs = tensors(2, 3, 16, 16)
    (found,) = check(twice, *inputs)
    assert read(found.outputs[0]).name == "add"
    assert {"add", "tanh"} <= set(held(found))


def test_the_match_alone_gives_its_output_and_has_no_surroundings():
    inputs = tensors(2, 3, 8, 16)
    (found,) = check(attention, *inputs)
    assert (found.surroundings, found.outputs) == ("", (found.match.site.output,))
    assert set(found.inputs) == set(found.match.inputs)


def test_what_needs_something_computed_later_is_not_taken_in():
    def later(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value)
        return torch.tanh(out) + out.cumsum(-1)

    inputs = tensors(2, 3, 8, 16)
    (found,) = check(later, *inputs)
    assert held(found) == ["tanh"]
    assert {read(node).name for node in found.outputs} >= {"tanh"}


def test_a_long_chain_is_taken_in_in_part():
    def chain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value)
        for _ in range(40):
            out = torch.tanh(out)
        return out

    inputs = tensors(2, 3, 8, 16)
    (found,) = check(chain, *inputs)
    assert held(found) == ["tanh"] * 16


def test_in_a_graph_that_overwrites_anything_nothing_is_taken_in():
    def inplace(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.tanh(query) @ key.transpose(-2, -1)
        scores.mul_(0.3)
        return torch.tanh(scores.softmax(-1) @ value)

    inputs = tensors(2, 3, 8, 16)
    (found,) = check(inplace, *inputs)
    assert (held(found), found.surroundings) == ([], "")


def test_a_mask_that_layers_share_is_an_input_of_each():
    def layers(x: Tensor, mask: Tensor) -> Tensor:
        keep = torch.logical_not(mask)[:, None]
        for _ in range(2):
            scores = (x @ x.transpose(-2, -1) * 0.3).masked_fill(keep, -1e9)
            x = torch.tanh(scores.softmax(-1) @ x)
        return x

    inputs = (*tensors(2, 3, 8, 16, count=1), torch.rand(2, 8, 8) > 0.3)
    found = check(layers, *inputs)
    assert len(found) == 2
    assert len({each.surroundings for each in found[1:]}) == 1
    for each in found:
        assert not {"logical_not", "not"} & set(held(each))
        assert torch.bool in [value_of(node).dtype for node in each.inputs]


def test_nothing_is_taken_in_from_other_modes():
    def modes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(torch.tanh(query), key, value)
        return torch.tanh(out)

    inputs = [each.float() for each in tensors(2, 3, 8, 16)]
    (found,) = check(modes, *inputs, tolerance=2e-2)
    assert held(found) == ["tanh"]
    assert value_of(found.outputs[0]).dtype == torch.bfloat16


# ---- twins, symbols, strides -------------------------------------------------------------------------------------------


def layers(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Equal layers."""
    for weight in (first, second, third):
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (x @ weight).chunk(3, -1))
        x = x + torch.tanh(attention(query, key, value).transpose(1, 2).reshape(x.shape))
    return x


def test_twins_have_equal_excerpts_of_their_own():
    found = check(layers, *tensors(2, 12, 32, count=1), *tensors(32, 96, count=3))
    assert [each.match.prototype is None for each in found] == [True, False, False]
    assert len({each.surroundings for each in found[:2]}) == 1
    assert len({node for each in found for node in each.nodes}) == sum(len(each.nodes) for each in found)


def test_symbolic_shapes_take_the_numbers_of_a_binding():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return torch.tanh(attention(query, key, value).transpose(1, 2).reshape(x.shape))

    inputs = (*tensors(2, 12, 32, count=1), *tensors(32, 96, count=1))
    module = capture(block, *inputs, dynamic=True)
    compare(module, in_order(module, dict(zip(("x", "weight"), inputs, strict=True))))
    (found,) = excerpts(module)
    wanted = symbols([value_of(node) for node in found.inputs])
    assert len(wanted) >= 2
    for batch, length in ((3, 5), (2, 64)):
        lengths = {12: length, 2: batch}
        environment = next(v for v in map(value_of, found.inputs) if isinstance(v, Tensor)).fake_mode.shape_env
        binding = {symbol: lengths.get(_hint(environment, symbol), _hint(environment, symbol)) for symbol in wanted}
        made = found.make_inputs(binding)
        (alone,), (kernel,) = found.function(None)(*made), found.function(kernels("attention")[OPAQUE].call)(*made)
        assert alone.shape[:2] == (batch, length)
        torch.testing.assert_close(kernel, alone)


def _hint(environment: Any, symbol: Any) -> int:
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return int(known[symbol])


def test_symbols_in_strides_alone_are_found():
    def windows(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(torch.cumsum(x, -1)[:, :, :8], key, value)

    x = torch.randn(2, 3, 20, 16, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 2)
    module = capture(windows, x, *tensors(2, 3, 8, 16, count=2), dynamic=[2])
    (found,) = excerpts(module)
    values = [value_of(node) for node in found.inputs]
    used = {
        s
        for v in values
        if isinstance(v, Tensor)
        for n in v.stride()
        if not isinstance(n, int)
        for s in n.node.expr.free_symbols
    }
    assert used <= symbols(values)
    if used:
        found.function(None)(*found.make_inputs(dict.fromkeys(symbols(values), 8)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1, 1, 8, 16, requires_grad=True).expand(2, 3, 8, 16),
        lambda: torch.randn(2, 8, 3, 16, requires_grad=True).transpose(1, 2),
        lambda: torch.randn(2, 3, 16, 32, requires_grad=True)[:, :, ::2, ::2],
        lambda: torch.randn(2, 3, 23, requires_grad=True).unfold(2, 16, 1),
        lambda: torch.randn(2, 3, 8, 16, dtype=torch.bfloat16),
        lambda: torch.randn(2, 3, 8, 16, requires_grad=True),
    ],
    ids=["expanded", "transposed", "strided", "overlapping", "bfloat16", "leaf"],
)
def test_inputs_are_made_in_the_layout_and_dtype_of_the_real_ones(make: Callable[[], Tensor]):
    query = make()
    found = of(attention, query, *(torch.randn(2, 3, 8, 16, dtype=query.dtype) for _ in range(2)))
    place = [node.name for node in found.inputs].index("l_query_")
    made = found.make_inputs({})[place]
    assert (made.shape, made.stride(), made.dtype, made.is_leaf) == (query.shape, query.stride(), query.dtype, True)
    assert made.requires_grad == query.requires_grad
    assert made.unique().numel() > 30, "random, and not all one number"
    assert found.function(kernels("attention")[OPAQUE].call)(*found.make_inputs({}))[0].isfinite().all()


def test_masks_drop_some_keys_and_integers_are_indices():
    def gathered(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, table: Tensor, index: Tensor) -> Tensor:
        scores = (query @ key.transpose(-2, -1) * 0.3 + table[index]).masked_fill(~keep, -1e9)
        return scores.softmax(-1) @ value

    keep, table, index = torch.rand(2, 3, 40, 40) > 0.5, torch.randn(5), torch.randint(5, (40, 40))
    found = of(gathered, *(each.float() for each in tensors(2, 3, 40, 16)), keep, table, index)
    made = dict(zip((value_of(node).dtype for node in found.inputs), found.make_inputs({}), strict=True))
    assert 0 < made[torch.bool].double().mean() < 1
    assert torch.int64 not in made or not made[torch.int64].any()


@pytest.mark.parametrize("expanded", [False, True])
def test_packed_sequences_are_measured_with_several_documents(expanded: bool):
    def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.3
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return scores.masked_fill(~same, -torch.inf).softmax(-1) @ v

    ids = torch.zeros(1, 32, dtype=torch.int64).expand(2, 32) if expanded else torch.zeros(2, 32, dtype=torch.int64)
    found = of(packed, *tensors(2, 3, 32, 8), ids)
    assert found.match.found.attributes.has_documents
    made = dict(zip(found.inputs, found.make_inputs({}), strict=True))[found.match.found.operands["query_documents"]]
    assert made.unique(return_counts=True)[1].tolist() == [2 * 4] * 8
    assert (made.diff(dim=1) >= 0).all()


def test_empty_inputs_can_be_made():
    inputs = [torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 0)]
    for found in excerpts(capture(attention, *inputs)):
        assert [made.shape for made in found.make_inputs({})] == [value_of(node).shape for node in found.inputs]


# ---- the graph's own form ----------------------------------------------------------------------------------------------


def _targets(module: fx.GraphModule) -> list[str]:
    return [str(read(node).name) for node in module.graph.nodes if read(node) is not None]


def test_a_kernel_is_put_into_an_excerpt_as_it_is_put_into_the_graph(monkeypatch):
    """Whether strides are restored depends on the readers, and in an excerpt some of them are cut off."""

    def block(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        out = attention(query, key, value)
        return F.linear(out.transpose(1, 2).reshape(2, 8, 48), weight)

    inputs = [*tensors(2, 3, 8, 16), *tensors(48, 48, count=1)]
    module = capture(block, *inputs)
    (found,) = excerpts(module)
    sdpa = kernels("attention")[OPAQUE].call

    def call(*operands: Any, **options: Any) -> Any:
        """Its result lies token by token, as that of most libraries."""
        return sdpa(*operands, **options).transpose(1, 2).contiguous().transpose(1, 2)

    made: list[fx.GraphModule] = []
    original = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: (made.append(self), original(self))[1])
    found.function(call)
    splice(module.graph, found.match, call, Recipes())
    whole = [name for name in _targets(module) if name != "linear"]
    assert _targets(made[-1]) == whole
    assert whole.count("contiguous") == 1, "the kernel's own"


def test_making_a_function_leaves_the_graph_alone():
    module = capture(layers, *tensors(2, 12, 32, count=1), *tensors(32, 96, count=3))
    before = str(module.graph)
    for found in excerpts(module):
        for call in (None, kernels("attention")[OPAQUE].call):
            found.function(call)
    assert str(module.graph) == before


def test_other_surroundings_have_another_hash():
    def around(before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> str:
        def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return after(attention(before(query), key, value))

        return of(block, *tensors(2, 3, 8, 16)).surroundings

    def same(x: Tensor) -> Tensor:
        return x

    bias, row = torch.randn(2, 3, 8, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    found = [
        around(same, same),
        around(torch.tanh, same),
        around(same, torch.tanh),
        around(torch.tanh, torch.tanh),
        around(same, torch.exp),
        around(same, lambda x: torch.tanh(torch.tanh(x))),
        around(same, lambda x: x.float()),
        around(same, lambda x: x + bias),
        around(same, lambda x: x + row),
        around(same, lambda x: x * 2 + x),
        around(same, lambda x: x * 2 + bias),
    ]
    assert len(set(found)) == len(found)
    assert around(same, torch.tanh) == around(same, lambda x: x.tanh()) == around(same, F.tanh)


# ---- any spelling ------------------------------------------------------------------------------------------------------


@given(spelling=spellings())
@settings(
    max_examples=examples(6, 40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_an_excerpt_of_any_spelling_computes_what_the_graph_computes(spelling: Spelling):
    inputs = spelling.inputs(0)
    function = spelling.build()

    def surrounded(*operands: Tensor) -> Tensor:
        return torch.tanh(function(*operands)) * 2

    module = capture(surrounded, *inputs)
    given_inputs = [inputs[int(node.name.split("_")[-2])] for node in placeholders(module)]
    compare(module, given_inputs, tolerance=4 * TOLERANCES[spelling.dtype])
    found = excerpts(module)
    assert len(found) == 1
    for each in found:
        made = each.make_inputs({})
        for real, node in zip(made, each.inputs, strict=True):
            if isinstance(real, Tensor):
                assert (real.shape, real.stride()) == (value_of(node).shape, value_of(node).stride())
