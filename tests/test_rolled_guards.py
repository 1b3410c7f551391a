"""What Dynamo asks in every call of a rolled function, beyond what it asks of the loop as it is written, and PyTorch in the first."""

import pytest
import torch
import torch._dynamo  # before what follows, which imports it in a circle
from torch._functorch._aot_autograd import runtime_wrappers

import lz_compile as lz
from benchmarks.rolled_loops import MODELS
from lz_compile.lowering.dynamo import drop_fixed_guards

pytestmark = pytest.mark.usefixtures("no_code_generation", "one_mode_of_training")

#: Half of them are PyTorch's own scan's. There were 150.
MOST = 16
OURS = ("lz", "session", "__closure__", "is_compiling", "builtins", "_pytree", "higher_order")


def asked_of(function, given):
    """Names of what is asked; sizes are not among them."""

    def kept(entries):
        names.update(each.name for each in entries)
        return [True] * len(entries)

    def backend(graph, _given):
        assert graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
        drop_fixed_guards()
        return graph.forward

    names = set()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True, options={"guard_filter_fn": kept})(*given)
    return names


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [each for each in MODELS if each != "gated units"])
def test_a_rolled_loop_asks_little_more_than_the_loop_itself(name):
    make, inputs = MODELS[name]
    asked = asked_of(lz.roll_loops(make(), *inputs(5)), inputs(20))
    ours = sorted(name for name in asked if any(part in name for part in OURS))
    assert [each for each in ours if each.endswith(".state")]
    assert len(ours) <= MOST, ours


def test_modules_that_no_step_reads_are_not_asked_for_their_modes():
    class Deep(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Dropout(0.5) for _ in range(layers)])

        def forward(self, x):
            h, found = x.new_zeros(x.shape[0]), []
            for t in range(x.shape[1]):
                h = 0.5 * h + x[:, t]
                found.append(h)
            return torch.stack(found, 1)

    few, many = (asked_of(lz.roll_loops(Deep(n), torch.randn(2, 6)), (torch.randn(2, 20),)) for n in (1, 9))
    assert len(few) == len(many)


@torch.library.custom_op("first_call_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def settled(x, weight):
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ weight + x[:, t])  # a product, which Inductor's own loop runs
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.through_inductor
@pytest.mark.parametrize("is_foreign", [False, True], ids=["PyTorch's own", "a foreign operator"])
def test_the_first_call_of_a_loop_is_watched_where_somebody_elses_operator_may_share_memory(is_foreign, monkeypatch):
    """PyTorch (2.13) watches first calls operator by operator, in Python: of a loop that is every step."""
    watched = []
    watch = runtime_wrappers._AnalyzeCustomOpInputOutputMode.__torch_dispatch__
    monkeypatch.setattr(
        runtime_wrappers._AnalyzeCustomOpInputOutputMode,
        "__torch_dispatch__",
        lambda self, function, *others: watched.append(function) or watch(self, function, *others),
    )
    x, weight = torch.randn(2, 30, 3), torch.randn(3, 3)
    rolled = lz.roll_loops(settled, x[:, :6], weight)
    run = (lambda x, weight: rolled(doubled(x), weight)) if is_foreign else rolled
    torch._dynamo.reset()
    call = torch.compile(run, backend="layerzero")
    watched.clear()
    for _ in range(2):
        torch.testing.assert_close(call(x, weight), settled(doubled(x) if is_foreign else x, weight))
    assert bool(watched) is is_foreign


def test_numbers_that_steps_read_of_modules_are_constants_in_training_and_nowhere_else():
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale = torch.nn.LayerNorm(4), 0.3

        def forward(self, x):
            h, found = x.new_zeros(x.shape[0], 4), []
            for t in range(x.shape[1]):
                h = self.norm(h + x[:, t])
                found.append(h)
            return torch.stack(found, 1) * self.scale

    graphs = []

    def backend(graph, _given):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = lz.roll_loops(Normalised(), torch.randn(2, 6, 4))
    run = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    x = torch.randn(3, 20, 4, requires_grad=True)
    found = run(x)
    expected = Normalised()(x)
    torch.testing.assert_close(found, expected)
    (graph,) = graphs
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert any("scale" in str(node.target) for node in graph.graph.find_nodes(op="placeholder"))
    assert not torch._dynamo.config.specialize_float
