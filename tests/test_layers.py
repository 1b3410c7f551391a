"""Repeated layers as calls of one region: found by structure, equal to the last bit, or kept with a reason."""

from __future__ import annotations

import dataclasses
import io
import operator
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
import zoo
from backends import Beside, Rewriting, Traced
from rich.console import Console
from tiers import IS_THOROUGH, examples
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.shapes import SHAPES, Size, build
from lz_compile.ground import events
from lz_compile.lowering import inductor
from lz_compile.lowering.regions import INVOKE, untangle, writing_to_no_operand
from lz_compile.passes.layers import fold
from lz_compile.passes.layers.fold import fold_layers
from lz_compile.report.report import reports

REGION = torch.ops.higher_order.invoke_subgraph
D = 16


class Block(nn.Module):
    """A small layer, with as many matrix products as a feed-forward one has."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.silu(self.gate(y).clamp(-3, 3)) * self.up(y).tanh()
        y = self.down(y * 0.5 + 0.1).sin()
        return x + y * 0.7


class Stack(nn.Module):
    """Blocks one behind the other."""

    def __init__(self, count: int = 5, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for block in self.blocks:
            x = block(x)
        return x.exp()


def calls_of(backend: Rewriting) -> int:
    """How often regions are called in the graphs that were made."""
    return sum(len(graph.graph.find_nodes(op="call_function", target=REGION)) for graph in backend.graphs)


def run(
    model: Callable[..., Any], *inputs: Any, by: type[Rewriting] = Traced, dynamic: bool | None = None, **options: Any
) -> tuple[Any, Rewriting]:
    """What a model gives, and the backend that compiled it."""
    torch._dynamo.reset()
    backend = by(**{"layers": "fold", **options})
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        return (compiled(**inputs[0]) if inputs and isinstance(inputs[0], dict) else compiled(*inputs)), backend


def both(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any) -> tuple[Any, Traced]:
    """What a model gives whose layers may be folded, the same bits as with all of them kept, and the backend of the first."""
    torch._dynamo.reset()
    backend, kept = Traced(**options), Rewriting(**{**options, "layers": "keep"})
    compiled = torch.compile(model, backend=Beside(backend, kept), dynamic=dynamic)
    with torch.no_grad():
        result = compiled(**inputs[0]) if inputs and isinstance(inputs[0], dict) else compiled(*inputs)
    assert kept.graphs
    assert not calls_of(kept)
    return result, backend


def folded(model: Callable[..., Any], *inputs: Any, regions: int, **settings: Any) -> Any:
    """What a model gives whose layers are calls of regions, equal to what it gives without them.

    A region may begin in the middle of a layer: there is one less then.
    """
    result, backend = both(model, *inputs, **{"layers": "fold", **settings})
    assert calls_of(backend) in (regions - 1, regions), [*backend.report.layers, *backend.report.events]
    assert not backend.report.events
    return result


def reason(model: Callable[..., Any], *inputs: Any, **settings: Any) -> str:
    """Why the layers of a model are kept."""
    result, backend = run(model, *inputs, by=Rewriting, **settings)
    assert not calls_of(backend)
    torch.testing.assert_close(result, model(*inputs))
    (layers,) = backend.report.layers
    assert not layers.folded
    return str(layers.reason)


@pytest.mark.sampled("t5", "models.encoder")
@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_models_are_calls_of_one_region(name: str):
    model, inputs = build(name, Size(64, 5 if name == "t5" else 6, 64))
    _, backend = both(model, inputs, layers="auto")
    assert not backend.report.events
    assert calls_of(backend) >= (8 if name == "t5" else 5)


def test_a_report_says_how_many_layers_became_one():
    _, backend = run(Stack(9), torch.randn(2, 8, D), layers="auto")
    (layers,) = backend.report.layers
    assert (layers.count, layers.folded) == (8, True)
    console = Console(file=io.StringIO(), width=200)
    for shown in (backend.report, backend.report.in_full()):
        console.print(shown)
    text = console.file.getvalue()
    assert f"8 of {layers.calls} calls" in text
    assert text.count("one region") == 2


def test_every_layer_has_its_own_parameters_and_the_running_value():
    model = Stack()
    x = torch.randn(2, 8, D)
    torch.testing.assert_close(folded(model, x, regions=5), model(x))


def test_layers_of_two_kinds_in_turn_are_one_region_of_both():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(8, 8), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(self.mix(x.mT.contiguous()).mT.relu().contiguous()).cos() * 0.3

    kinds = iter([Block, Other] * 5)

    def next_block() -> nn.Module:
        return next(kinds)()

    folded(Stack(10, next_block), torch.randn(2, 8, D), regions=5)


def test_products_that_would_be_computed_otherwise_keep_layers():
    class Transposed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.mix(x.mT).mT)

    assert "ANOTHER_PRODUCT" in reason(Stack(5, Transposed), torch.randn(2, 8, D))
    folded(Stack(5, Transposed).requires_grad_(False), torch.randn(2, 8, D), regions=5)


def test_a_first_and_a_last_layer_that_differ_stay_outside():
    widths = iter([1, *[2] * 5, 3])

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = next(widths)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    folded(Stack(7, Scaled), torch.randn(2, 8, D), regions=5)


def test_what_a_layer_gives_besides_is_read_by_others_far_away():
    class Unet(Stack):
        def forward(self, x: Tensor) -> Tensor:
            found = []
            for block in self.blocks[:5]:
                x = block(x)
                found.append(x)
            for block in self.blocks[5:]:
                x = block(x + found.pop())
            return x

    model, x = Unet(10), torch.randn(2, 8, D)
    torch.testing.assert_close(folded(model, x, regions=9), model(x))


def test_a_decoders_layers_read_what_the_encoders_layers_gave():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = x + self.one(memory.sin() * 0.5).tanh() * x.cos()
            return x - self.two(x.sigmoid() * 0.1 + 1).relu() * 0.3

    class Both(Stack):
        def __init__(self) -> None:
            super().__init__(5)
            self.readers = nn.ModuleList([Reader() for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            memories = [x]
            for block in self.blocks:
                memories.append(block(memories[-1]))
            for reader, memory in zip(self.readers, memories[1:], strict=True):
                x = reader(x, memory)
            return x

    model, x = Both(), torch.randn(2, 8, D)
    result, backend = run(model, x)
    assert not backend.report.events
    assert calls_of(backend) >= 8
    torch.testing.assert_close(result, model(x))


def test_two_operands_that_are_one_tensor_in_the_first_layer_only():
    class Residual(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = x = x.tanh()
            for block in self.blocks:
                x = block(x) + first
            return x

    model, x = Residual(), torch.randn(2, 8, D)
    torch.testing.assert_close(folded(model, x, regions=5), model(x))


@pytest.mark.parametrize("same", [lambda x: x.to(x.dtype), lambda x: x.contiguous(), lambda x: x.view_as(x)])
def test_two_operands_that_are_one_tensor_by_two_names(same: Callable[[Tensor], Tensor]):
    class Residual(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x @ x.mT @ x
            first = same(x)
            for block in self.blocks:
                x = first.sin() @ block.gate.weight[:D] + block(x)
            return x

    model, x = Residual(), torch.randn(2, 8, D)
    torch.testing.assert_close(folded(model, x, regions=5), model(x))


def test_a_tensor_that_all_layers_read_is_handed_to_each():
    class Shifted(Stack):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            shift = shift.sin()
            for block in self.blocks:
                x = block(x * shift)
            return x

    folded(Shifted(), torch.randn(2, 8, D), torch.randn(D), regions=5)


def test_symbolic_sizes_are_handed_to_regions():
    class Reshaped(Block):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            heads = x.reshape(batch, length, 2, -1).transpose(1, 2)
            return super().forward((heads * length).transpose(1, 2).reshape(batch, length, -1) / length)

    model = Stack(5, Reshaped)
    torch._dynamo.reset()
    backend = Traced(layers="fold")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (8, 9, 13):
            x = torch.randn(2, length, D)
            torch.testing.assert_close(compiled(x), model(x))
    assert calls_of(backend) in (4, 5)
    assert not backend.report.events


def test_under_an_outer_autocast_layers_compute_in_its_dtype():
    model, x = Stack(), torch.randn(2, 8, D)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        result, backend = run(model, x)
    assert calls_of(backend) in (4, 5)
    assert result.dtype is expected.dtype
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.enable_grad])
def test_layers_under_a_mode_that_the_graph_enters_around_all_of_them_are_kept(mode: Callable[[], Any]):
    class Inside(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with mode():
                return super().forward(x)

    assert "MODES" in reason(Inside().requires_grad_(False), torch.randn(2, 8, D))


class Counting(Block):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Cached(Block):
    """Keeps what it was given in a cache that is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 8, D))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, :4] = x[:, :4]
        return super().forward(x + self.cache)


class Dropping(Counting):
    """Writes to a buffer, by the name of a dropout that drops nothing."""

    def forward(self, x: Tensor) -> Tensor:
        F.dropout(self.calls, 0.5, training=False).add_(1)
        return Block.forward(self, x + 0 * self.calls)


class Adding(Block):
    """Writes in place to what it has made itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y += x
        y[:, 0] = 0.5
        return y.relu_()


class Parallel(nn.Module):
    """Two branches that read one value, each behind a dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        one, other = (F.dropout(F.linear(each(x), each.up.weight[:D]), 0.1, False) for each in (self.one, self.other))
        return x + one + other


class Mixed(Block):
    """Computes in bfloat16 inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Random(Block):
    """Drops out."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=True) * 0 + x)


class Views(Block):
    """Hands a view of its result to others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(0))


def deeper(value: Any, layers: int, name: str = "") -> Any:
    """Settings of a family with more layers."""
    if isinstance(value, dict):
        return {key: deeper(each, layers, key) for key, each in value.items()}
    is_count = "layers" in name and "feat" not in name and value == 2 and not isinstance(value, bool)
    return layers if is_count else value


@pytest.mark.sampled("mixtral", "deberta_v2")
@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox",
        "falcon",
        "mixtral",
        "qwen3_moe",
        "gemma2",
        "deberta_v2",
        "xlm",
        "nystromformer",
        "beit",
        "moonshine",
        "blip",
        "xlnet",
    ],
)
def test_layers_of_real_models_are_folded_to_the_same_bits(name: str):
    family = zoo.family(name)
    family = dataclasses.replace(family, settings=deeper(dict(family.settings), 6 if IS_THOROUGH else 5))
    model, inputs = family.build()
    _, backend = both(model, inputs, layers="auto", dynamic=False)
    assert calls_of(backend) >= 4, [*backend.report.layers, *backend.report.events]
    assert not backend.report.events


@pytest.mark.parametrize("block", [Adding, Parallel])
def test_writes_to_own_memory_and_dropouts_that_drop_nothing_move_into_a_region(block: type[nn.Module]):
    model, x = Stack(6, block), torch.randn(2, 8, D)
    result = folded(model, x, regions=6, layers="auto")
    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (Counting, "WRITTEN_INSIDE"),
        (Cached, "WRITTEN_INSIDE"),
        (Dropping, "WRITTEN_INSIDE"),
        (Mixed, "MODE"),
        (Random, "RANDOM"),
    ],
)
def test_what_may_not_move_into_a_region_keeps_layers(block: type[nn.Module], code: str):
    model, x = Stack(5, block), torch.randn(2, 8, D)
    result, backend = run(model, x, by=Rewriting)
    found = [str(layers.reason) for layers in backend.report.layers if not layers.folded]
    assert found
    assert all(code in text for text in found), found
    if block is not Random:
        torch.testing.assert_close(result, model(x))


def gradients(model: nn.Module, x: Tensor, backend: Any, **options: Any) -> list[Tensor]:
    """Of the parameters and the input, and the result."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    result = torch.compile(model, backend=backend, **options)(x)
    return [result.detach(), *torch.autograd.grad(result.sum(), [x, *model.parameters()])]


@pytest.fixture
def trusted(monkeypatch):
    """A PyTorch whose backward pass through regions was tried, and is right."""
    monkeypatch.setattr(fold, "why_not_differentiated", lambda device: "")


def test_layers_with_gradients_are_kept_where_their_backward_pass_is_wrong(monkeypatch):
    monkeypatch.setattr(fold, "why_not_differentiated", lambda device: f"it is off by 0.5 on {device}")
    backend = Rewriting(layers="fold")
    gradients(Stack(), torch.randn(2, 8, D), backend)
    (layers,) = backend.report.layers
    assert not calls_of(backend)
    assert "GRADIENTS" in str(layers.reason)
    assert "it is off by 0.5 on cpu" in str(layers.reason)


def test_no_backward_pass_is_tried_for_layers_that_are_kept_anyway(monkeypatch):
    tried = []
    monkeypatch.setattr(fold, "why_not_differentiated", lambda device: tried.append(device) or "")
    gradients(Stack(8, Random), torch.randn(2, 8, D), backend := Rewriting())
    assert "RANDOM" in str(backend.report.layers[0].reason)
    assert not tried
    gradients(Stack(8), torch.randn(2, 8, D), Traced())
    assert tried


class Scaled(Stack):
    """Switches gradients off and on again in front of its layers, as rotary embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mean().tanh()
        return super().forward(x * scale)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["auto", "fold"])
@pytest.mark.parametrize("stack", [Stack, Scaled])
def test_layers_with_gradients_are_calls_of_one_region(trusted, stack, policy: str):
    model, x = stack(8 if policy == "auto" else 5), torch.randn(2, 8, D)
    found = gradients(model, x, backend := Traced(layers=policy))
    assert len(model.blocks) - calls_of(backend) in (0, 1), backend.report.layers
    for one, other in zip(found, gradients(model, x, Rewriting(layers="keep")), strict=True):
        torch.testing.assert_close(one, other)


class Heads(nn.Module):
    """A layer whose backward pass needs what it is handed, what it gives, and three views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.feed = Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).split(D, -1))
        x = x + self.out((q @ k.mT).tanh().matmul(v).transpose(1, 2).flatten(2))
        return self.feed(x)


def test_layers_whose_operand_is_overwritten_behind_them_are_kept_with_gradients(trusted):
    model, backend = Stack(), Rewriting(layers="fold")

    def writing(x: Tensor, scale: Tensor) -> Tensor:
        found = x
        for block in model.blocks:
            found = block(found) * scale.sin()
        scale.zero_()
        return found

    torch._dynamo.reset()
    torch.compile(writing, backend=backend)(torch.randn(2, 8, D), torch.ones(D))
    (layers,) = backend.report.layers
    assert not layers.folded
    assert "OVERWRITTEN_LATER" in str(layers.reason)


@pytest.mark.thorough
@pytest.mark.slow
def test_gradients_through_regions_are_right_by_inductor(trusted):
    model, x = Stack(4, Heads), torch.randn(2, 8, D)
    with torch._inductor.config.patch(force_disable_caches=True, disable_padding_cpu=False):  # as on a GPU
        found = gradients(model, x, "layerzero", options={"layerzero.layers": "fold"})
    (layers,) = reports()[-1].layers
    assert layers.folded, layers.reason
    expected = gradients(model, x, "eager")
    off = [float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True)]
    assert max(off) < 1e-4, off


@pytest.mark.slow
def test_the_trial_of_a_backward_pass_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    device = torch.device("cpu")
    with torch.random.fork_rng():
        state = torch.random.get_rng_state()
        assert not fold.why_not_differentiated(device)
        assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(fold, "_try", lambda device: "tried again")
    assert not fold.why_not_differentiated(device)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "other"))
    assert fold.why_not_differentiated(device) == "tried again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param("results in other memory", marks=pytest.mark.thorough), "donated buffers"]
)
def test_the_trial_of_a_backward_pass_finds_each_fault(monkeypatch, tmp_path, fault: str):
    """Where PyTorch is right without what mends it, that can go."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    if fault == "donated buffers":
        without = SimpleNamespace(patch=lambda **given: nullcontext(), activation_memory_budget=1.0)
        monkeypatch.setattr(inductor, "functorch_config", without)
    else:
        monkeypatch.setattr(inductor, "untangle", lambda graph: None)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "it is off by" in fold.why_not_differentiated(torch.device("cpu"))


def test_a_trial_of_a_backward_pass_that_raises_is_an_event_and_no_trust(monkeypatch, tmp_path):
    def fails(device: torch.device) -> str:
        raise RuntimeError(f"nothing runs on {device}")

    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fold, "_try", fails)
    with events.collect() as happened:
        assert "nothing runs on cpu" in fold.why_not_differentiated(torch.device("cpu"))
    assert [each.code for each in happened] == ["REGIONS_NOT_TRIED"]
    assert "RuntimeError: nothing runs on cpu" in happened[0].message


def test_what_a_region_hands_out_twice_is_made_outside_of_it():
    def region(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.ops.aten.mm.default(x, w)
        one, other = (torch.ops.aten.slice.Tensor(y, 1, start, start + 2) for start in (0, 2))
        return torch.ops.aten.sin.default(x), x, torch.ops.aten.t.default(w), one, other

    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "xw"]
    call = graph.call_function(REGION, (graph.get_attr("region"), "layer_region_0", *given))
    graph.output(tuple(graph.call_function(operator.getitem, (call, place)) for place in range(5)))
    module = fx.GraphModule({"region": fx.symbolic_trace(region)}, graph)
    operands = [torch.randn(4, 4), torch.randn(4, 4)]
    with FakeTensorMode() as mode:
        fakes = list(map(mode.from_tensor, operands))
        for each in (module.region, module):
            Values(each).run(*fakes)
    expected = region(*operands)
    untangle(graph)
    module.recompile()
    for one, other in zip(module(*operands), expected, strict=True):
        torch.testing.assert_close(one, other)
    (output,) = module.region.graph.find_nodes(op="output")
    assert [getattr(each, "name", None) for each in output.args[0]] == [
        "sin_default",
        None,
        None,
        None,
        None,
        "mm_default",
    ]


@pytest.mark.parametrize("names", [("layer_region_0",), ("layer_region_0", "another")])
def test_regions_of_others_are_looked_at_for_writes_to_their_operands(names: tuple[str, ...]):
    """2.13 traces a region at each call with gradients to see whether it writes: ours are known not to."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    for name in names:
        given = graph.call_function(
            operator.getitem, (graph.call_function(INVOKE, (graph.get_attr("r"), name, given)), 0)
        )
    graph.output(given)
    with writing_to_no_operand(fx.GraphModule({"r": fx.symbolic_trace(lambda x: (x.sin(),))}, graph)):
        assert INVOKE._supports_training_input_mutation == (len(names) == 1)
    assert not INVOKE._supports_training_input_mutation


class Values(fx.Interpreter):
    """Notes what every node gives as AOTAutograd does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


@torch._inductor.config.patch(freezing=True)
def test_frozen_weights_are_packed_one_by_one():
    assert "NO_REGIONS" in reason(Stack(), torch.randn(2, 8, D))


def test_layers_whose_beginning_would_cut_a_fusion_are_kept_by_default():
    def pointwise(x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = (x.sin() + other.cos()) * torch.sigmoid(x) - other.tanh() * 0.1 + x.exp().log1p()
            x = x.cos() * other - x.tanh().exp() + other.sin()
        return x

    inputs = [torch.randn(4, D) for _ in range(8)]
    assert "CUTS_FUSIONS" in reason(pointwise, *inputs, layers="auto")
    folded(pointwise, *inputs, regions=calls_of(run(pointwise, *inputs)[1]))


def test_short_layers_are_kept_by_default():
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x.sin().cos() * 2).tanh().relu().exp().neg()

    assert "FEW_CALLS" in reason(Stack(4, Short), torch.randn(2, D), layers="auto")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_layers_are_no_layers(count: int):
    _, backend = run(Stack(count), torch.randn(2, 8, D), by=Rewriting)
    assert not calls_of(backend)
    assert not backend.report.layers


def test_numbers_that_differ_from_layer_to_layer_keep_them():
    numbers = iter(range(100))

    class Numbered(Block):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / (self.number + 1))

    model, x = Stack(5, Numbered), torch.randn(2, 8, D)
    result, backend = run(model, x, by=Rewriting)
    assert not calls_of(backend)
    torch.testing.assert_close(result, model(x))


def test_a_graph_with_regions_that_does_not_compile_is_compiled_without_them():
    class Picky(Traced):
        def compiled(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            if graph.graph.find_nodes(op="call_function", target=REGION):
                raise NotImplementedError("no regions here")
            return super().compiled(graph, inputs)

    class Normed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight)

    model, x = Stack(5, Normed), torch.randn(2, 8, D)
    torch._dynamo.reset()
    backend = Picky(layers="fold", lock={"norm": "torch.norm"})
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (event,) = backend.report.events
    assert "compiling the graph with regions; the one without them is tried" in event.message
    assert "no regions here" in event.message
    assert [layers.folded for layers in backend.report.layers] == [False]
    assert sum(match.rewritten for match in backend.report.matches if match.op == "norm") == 5


def test_a_fault_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch):
    original, made = torch.fx.Graph.call_function, []

    def failing(self: torch.fx.Graph, target: Any, *given: Any, **named: Any) -> Any:
        made.append(target)
        if len(made) == 4:
            raise ZeroDivisionError("planted")
        return original(self, target, *given, **named)

    texts: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        texts.append(str(module.graph))
        with monkeypatch.context() as patch:
            patch.setattr(torch.fx.Graph, "call_function", failing)
            with pytest.raises(ZeroDivisionError):
                fold_layers(module, "fold")
        texts.append(str(module.graph))
        assert not [name for name, _ in module.named_children() if name.startswith("layer_region")]
        return module.forward

    model, x = Stack(), torch.randn(2, 8, D)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert len(made) == 4
    assert texts[0] == texts[1]


def _random_model(rng: random.Random) -> Callable[..., Any]:
    """A function of random layers: what each computes, what they hand on, and what is read of them later are drawn."""
    count, calls = rng.randint(4, 7), rng.randint(6, 14)
    steps = [
        (rng.choice(["linear", "sin", "add", "mul", "skip", "shared", "norm"]), rng.random()) for _ in range(calls)
    ]
    steps += [("linear", 0.0), ("add", 0.5)]
    reads = rng.sample(range(count), rng.randint(0, 2))
    odd = rng.choice([None, None, 0, count - 1, count // 2])

    def model(x: Tensor, shared: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        found, first = [], x
        for layer in range(count):
            before = [x, x]
            for kind, share in steps:
                y = before[int(share * len(before))]
                if kind == "linear":
                    x = x @ weights[layer].tanh()
                elif kind == "sin":
                    x = torch.sin(y)
                elif kind == "add":
                    x = x + y
                elif kind == "mul":
                    x = x * y.sigmoid()
                elif kind == "skip":
                    x = x - first * 0.1
                elif kind == "shared":
                    x = x * shared.cos()
                else:
                    x = F.layer_norm(x, (D,))
                before.append(x)
            found.append(x)
            if layer == odd:
                x = x * 3
        return (x, *(found[layer] for layer in reads))

    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(0, 60, 12))
def test_random_layers_compute_what_they_did_and_most_are_folded(first: int):
    made = {}
    for seed in range(first, first + examples(5, 12)):
        torch.manual_seed(0)
        model = _random_model(random.Random(seed))
        inputs = [torch.randn(3, D, dtype=torch.float64) for _ in range(2)]
        inputs += [torch.randn(D, D, dtype=torch.float64) for _ in range(7)]
        result, backend = run(model, *inputs)
        assert not backend.report.events, seed
        torch.testing.assert_close(
            result, model(*inputs), rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}: {{}}".format
        )
        made[seed] = calls_of(backend)
    assert sum(map(bool, made.values())) >= len(made) // 2, made


def test_inductor_compiles_layers_once_to_the_same_bits():
    model, x = Stack(), torch.randn(2, 8, D)
    results = {}
    for layers in ("fold", "keep"):
        torch._dynamo.reset()
        options = {"layerzero.layers": layers, "layerzero.strict": True}
        with torch.no_grad():
            results[layers] = torch.compile(model, backend="layerzero", options=options)(x)
        assert [each.folded for each in reports()[-1].layers] == [True] * (layers == "fold")
    torch.testing.assert_close(results["fold"], results["keep"], rtol=0, atol=0)
