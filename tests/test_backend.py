"""`torch.compile(..., backend=layerzero)` under everything that torch.compile offers, and what a fault of ours does."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from backends import Traced, reads_autograd_functions, trains_attention_in_float64
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

from lz_compile import reports
from lz_compile.backend import layerzero
from lz_compile.compile import choices, pipeline, reading, replacing
from lz_compile.compile.compiler import process
from lz_compile.compile.options import Options
from lz_compile.errors import OptionError, RewriteFailedError, UnknownKernelError
from lz_compile.lowering import inductor
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops.attention import Operands
from lz_compile.passes.proof import validate
from lz_compile.report.report import MatchReport, new_report
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import policy

pytestmark = pytest.mark.usefixtures("sdpa_first")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Kernels are planted here: no verdict may be left for another test."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "layerzero"))
    validate.forget()
    counters.clear()
    yield
    validate.forget()


@pytest.fixture
def uncached():
    """Inductor must run, not answer from its cache."""
    with inductor_config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def compiled_graphs(monkeypatch) -> list[fx.GraphModule]:
    """The graphs that are handed to Inductor, as they are then."""
    seen: list[fx.GraphModule] = []
    original = inductor.compile_graph

    def compile_graph(module: fx.GraphModule, *args: Any, **named: Any) -> Callable[..., Any]:
        seen.append(module)
        return original(module, *args, **named)

    monkeypatch.setattr(inductor, "compile_graph", compile_graph)
    return seen


@pytest.fixture
def planted(monkeypatch):
    """Replaces the code of the kernel `torch.sdpa`."""

    def plant(call: Callable[..., Any]) -> None:
        monkeypatch.setattr(torch_sdpa, "attention", call)
        registry.reload()

    yield plant
    monkeypatch.undo()
    registry.reload()


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def softplus_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.softplus(query @ key.transpose(-2, -1)).softmax(-1) @ value


#: Lets SDPA take masks that select, too.
FINITE = {"layerzero.assume_finite": True}


def operands(length: int = 7, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> list[Tensor]:
    shapes = (2, 3, length, 16), (2, 3, length + 12, 16), (2, 3, length + 12, 16)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def matches() -> list[MatchReport]:
    return [match for report in reports() for match in report.matches]


def assert_fired(count: int = 1) -> None:
    assert [match.rewritten for match in matches()] == [True] * count, reports()


def event_codes() -> list[str]:
    return [event.code for report in reports() for event in report.events]


def compiled(function: Callable[..., Any] = attention, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=layerzero, **options)


def traced(function: Callable[..., Any] = attention, *, options: dict[str, Any] | None = None, **named: Any) -> Any:
    """The same without code generation, where that is not the subject."""
    ours = {name.removeprefix("layerzero."): value for name, value in (options or {}).items()}
    return torch.compile(function, backend=Traced(**ours), **named)


# ---- modes and options ---------------------------------------------------------------------------------------------


class Probe(CustomGraphPass):
    """Notes Inductor's configuration while Inductor runs."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(inductor_config.max_autotune)

    def uuid(self) -> str:
        return "probe"


def test_a_mode_reaches_inductor(uncached):
    probe, args = Probe(), operands()
    policy.configure(perfdb={"enabled": False})  # the mode also measures kernels, and then chooses by that
    with inductor_config.patch(post_grad_custom_post_pass=probe):
        actual = compiled(mode="max-autotune")(*args)
    assert_fired()
    assert probe.seen == [True]
    torch.testing.assert_close(actual, attention(*args))


def test_options_of_inductor_and_ours_go_together(uncached):
    probe, args = Probe(), operands()
    options = {"layerzero.strict": True, "max_autotune": True, "post_grad_custom_post_pass": probe}
    actual = compiled(options=options)(*args)
    assert_fired()
    assert probe.seen == [True]
    torch.testing.assert_close(actual, attention(*args))


def test_without_options_inductor_keeps_its_defaults(uncached):
    probe = Probe()
    with inductor_config.patch(post_grad_custom_post_pass=probe):
        compiled()(*operands())
    assert probe.seen == [False]


@pytest.mark.parametrize("is_global", [True, False])
def test_a_pass_of_the_user_at_the_place_of_our_fingerprint_still_runs(uncached, is_global):
    probe, args = Probe(), operands()
    if is_global:
        with inductor_config.patch(post_grad_custom_pre_pass=probe):
            compiled()(*args)
    else:
        compiled(options={"post_grad_custom_pre_pass": probe})(*args)
    assert_fired()
    assert probe.seen == [False]


def test_an_unknown_option_of_ours_names_the_valid_ones_and_the_nearest():
    with pytest.raises(BackendCompilerFailed) as failure:
        compiled(options={"layerzero.strickt": True})(*operands())
    assert isinstance(failure.value.inner_exception, OptionError)
    assert "no option 'layerzero.strickt' (did you mean 'layerzero.strict'?)" in str(failure.value)


def test_an_unknown_option_of_inductor_is_reported_in_inductors_words():
    with pytest.raises(RuntimeError) as expected:
        torch.compile(attention, backend="inductor", options={"max_autotunne": True})(*operands())
    with pytest.raises(BackendCompilerFailed) as failure:
        compiled(options={"max_autotunne": True})(*operands())
    assert type(failure.value.inner_exception) is type(expected.value)
    assert str(failure.value.inner_exception) == str(expected.value)


def test_a_lock_on_inductor_leaves_the_match_alone():
    args = operands()
    actual = compiled(options={"layerzero.lock": {"attention": "inductor"}})(*args)
    (match,) = matches()
    assert (match.kernel, match.rewritten, match.why) == ("inductor", False, "locked by options['layerzero.lock']")
    torch.testing.assert_close(actual, attention(*args))


def test_a_lock_on_an_unknown_op_is_an_error():
    with pytest.raises(BackendCompilerFailed, match="no op 'attentoin' to lock \\(did you mean 'attention'\\?\\)"):
        compiled(options={"layerzero.lock": {"attentoin": "torch.sdpa"}})(*operands())


def test_a_lock_on_an_unknown_kernel_is_an_error():
    with pytest.raises(BackendCompilerFailed) as failure:
        compiled(options={"layerzero.lock": {"attention": "torch.spda"}})(*operands())
    assert isinstance(failure.value.inner_exception, UnknownKernelError)
    assert "no kernel 'torch.spda' (did you mean 'torch.sdpa'?)" in str(failure.value)


def test_a_locked_kernel_that_cannot_run_is_passed_over_with_its_reason():
    def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (torch.tanh(query @ key.transpose(-2, -1) / 5) * 5).softmax(-1) @ value

    args = operands()
    actual = traced(capped, options={"layerzero.lock": {"attention": "torch.sdpa"}})(*args)
    (match,) = matches()
    (locked,) = [row for row in match.candidates if row["kernel"] == "torch.sdpa"]
    assert match.kernel != "torch.sdpa"
    assert [reason["code"] for reason in locked["against"]] == ["SOFTCAP_UNSUPPORTED"]
    torch.testing.assert_close(actual, capped(*args))


def test_the_name_layerzero_is_registered_when_the_package_is_installed():
    try:
        importlib.metadata.distribution("lz-compile")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs an installed lz-compile (pip install -e .): the name is an entry point")
    args = operands()
    assert "layerzero" in torch.compiler.list_backends()
    actual = torch.compile(attention, backend="layerzero")(*args)
    assert_fired()
    torch.testing.assert_close(actual, attention(*args))


# ---- gradients and modes of execution ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=[trains_attention_in_float64, pytest.mark.thorough]), torch.float32]
)
def test_forward_and_backward_agree_with_eager(dtype):
    args = operands(dtype=dtype, requires_grad=True)
    expected = attention(*args)
    weight = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, args, weight)
    actual = compiled()(*args)
    assert_fired()
    assert matches()[0].validation["grad_error"] is not None
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, args, weight), expected_grads)


def test_only_the_operands_that_ask_for_gradients_get_them():
    args = operands()
    args[1].requires_grad_()
    actual = traced()(*args)
    assert_fired()
    expected = torch.autograd.grad(attention(*args).sum(), args[1])
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args[1]), expected)


@pytest.mark.parametrize(
    "operand", [*(pytest.param(each, marks=trains_attention_in_float64) for each in ("query", "key", "value")), "bias"]
)
def test_an_attention_may_read_what_another_attention_gives(operand):
    def chained(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = attention(query, key, value)
        if operand == "bias":
            return (query @ key.transpose(-2, -1) + first).softmax(-1) @ value
        return attention(**{"query": query, "key": key, "value": value, operand: first})

    # SDPA is no candidate for gradients of a bias that may mask.
    args = [torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=operand != "bias") for _ in range(3)]
    actual = traced(chained)(*args)
    assert_fired(2)
    torch.testing.assert_close(actual, chained(*args))
    if operand == "bias":
        return
    expected = torch.autograd.grad(chained(*args).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)


def test_a_result_that_is_detached_needs_no_gradient():
    args = operands(requires_grad=True)
    actual = traced(lambda *args: attention(*args).detach())(*args)
    assert_fired()
    assert not actual.requires_grad
    torch.testing.assert_close(actual, attention(*args).detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_rewrite_fires_too(mode):
    args = operands(requires_grad=True)
    with mode():
        actual = compiled()(*args)
        torch.testing.assert_close(actual, attention(*args))
    assert_fired()
    assert not actual.requires_grad
    assert matches()[0].validation["grad_error"] is None


def test_no_grad_inside_of_the_function_is_kept():
    def partly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            first = attention(query, key, value)
        return first + attention(query + 1, key, value)

    args = operands(requires_grad=True)
    actual = traced(partly)(*args)
    assert_fired(2)
    torch.testing.assert_close(actual, partly(*args))
    expected = torch.autograd.grad(partly(*args).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)


def test_a_graph_break_gives_two_graphs_and_two_reports():
    def broken(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = attention(query, key, value)
        torch._dynamo.graph_break()
        return attention(first, key, value)

    args = operands()
    actual = traced(broken)(*args)
    assert [len(report.matches) for report in reports()] == [1, 1]
    assert_fired(2)
    torch.testing.assert_close(actual, broken(*args))


def test_matches_are_counted_where_dynamo_counts():
    def three(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = attention(query, key, value) + attention(query + 1, key, value)
        return both + softplus_attention(query, key, value)

    traced(three)(*operands())
    assert counters["layerzero"] == {"attention": 2, "attention.rewritten": 2, "attention.near_miss": 1}


# ---- symbolic shapes -----------------------------------------------------------------------------------------------

LENGTHS = (5, 9, 17, 40, 100, 300)


def test_symbolic_lengths_compile_once():
    function = compiled(dynamic=True)
    for length in LENGTHS:
        args = operands(length)
        torch.testing.assert_close(function(*args), attention(*args), atol=1e-5, rtol=1e-5)
    assert_fired()


def test_lengths_that_turn_out_to_change_compile_twice():
    function = traced()
    for length in LENGTHS:
        args = operands(length)
        torch.testing.assert_close(function(*args), attention(*args), atol=1e-5, rtol=1e-5)
    assert_fired(2)


def test_a_marked_dimension_stays_symbolic():
    function = traced(fullgraph=True)
    for length in LENGTHS:
        args = operands(length)
        for arg in args:
            torch._dynamo.mark_dynamic(arg, 2, min=2, max=512)
        torch.testing.assert_close(function(*args), attention(*args), atol=1e-5, rtol=1e-5)
    assert_fired()


@trains_attention_in_float64
def test_symbolic_lengths_train():
    function = compiled(dynamic=True)
    for length in LENGTHS[:4]:
        args = operands(length, torch.float64, requires_grad=True)
        expected = torch.autograd.grad(attention(*args).square().sum(), args)
        torch.testing.assert_close(torch.autograd.grad(function(*args).square().sum(), args), expected)
    assert_fired()


def test_a_causal_mask_over_symbolic_lengths_is_right():
    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys = query.shape[2], key.shape[2]
        keep = torch.arange(queries)[:, None] >= torch.arange(keys)
        scores = (query @ key.transpose(-2, -1) * 0.3).masked_fill(~keep, -math.inf)
        return scores.softmax(-1) @ value

    function = traced(causal, dynamic=True, options=FINITE)
    for length in LENGTHS:
        args = operands(length)
        torch.testing.assert_close(function(*args), causal(*args), atol=1e-5, rtol=1e-5)
    assert_fired()


def test_merged_heads_over_a_symbolic_batch_are_right():
    def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        return torch.bmm(torch.bmm(query, key.mT).softmax(-1), value).unflatten(0, (-1, 3))

    function = traced(merged, dynamic=True)
    for batch in (2, 4, 7):
        args = [torch.randn(batch, 3, length, 16) for length in (5, 9, 9)]
        torch.testing.assert_close(function(*args), merged(*args))
    assert_fired()


# ---- autocast ------------------------------------------------------------------------------------------------------


def _errors(function: Callable[..., Tensor], actual: Tensor, args: list[Tensor]) -> tuple[float, float]:
    """The largest errors against float64: of the compiled result and of eager's."""
    with torch.autocast("cpu", enabled=False):
        exact = attention(*(arg.double() for arg in args))
    return tuple((result.double() - exact).abs().max().item() for result in (actual, function(*args)))


def test_autocast_around_the_call_is_followed():
    args = operands()
    with torch.autocast("cpu", torch.bfloat16):
        actual = traced()(*args)
        assert_fired()
        assert actual.dtype == attention(*args).dtype
        ours, eager = _errors(attention, actual, args)
    assert ours <= 2 * eager + 1e-3


def test_autocast_inside_of_the_function_is_followed():
    def cast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            inner = attention(query, key, value)
        return inner.float()

    args = operands()
    actual = traced(cast)(*args)
    assert_fired()
    assert actual.dtype == torch.float32
    ours, eager = _errors(cast, actual, args)
    assert ours <= 2 * eager + 1e-3


def test_training_under_autocast_gives_gradients_as_good_as_eagers():
    args = operands(requires_grad=True)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(*args).float().square().sum()
        return torch.autograd.grad(loss, args)

    exact_args = [arg.detach().double().requires_grad_() for arg in args]
    exact = torch.autograd.grad(attention(*exact_args).square().sum(), exact_args)
    eager, actual = gradients(attention), gradients(compiled())
    assert_fired()
    for ours, theirs, truth in zip(actual, eager, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 1e-3


def test_a_subgraph_that_straddles_an_autocast_region_is_left_alone():
    def straddling(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = query @ key.transpose(-2, -1)
        return scores.float().softmax(-1) @ value

    args = operands()
    actual = traced(straddling)(*args)
    assert matches() == []
    assert [miss.reason.code for miss in reports()[0].near_misses] == ["MODE_CHANGES_INSIDE"]
    torch.testing.assert_close(actual, straddling(*args), atol=2e-2, rtol=2e-2)


# ---- nested graphs -------------------------------------------------------------------------------------------------


@trains_attention_in_float64
def test_activation_checkpointing_is_rewritten_inside():
    def checkpointed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return checkpoint(attention, query, key, value, use_reentrant=False).sin()

    args = operands(dtype=torch.float64, requires_grad=True)
    actual = compiled(checkpointed)(*args)
    assert_fired()
    assert matches()[0].graph == "wrap_body_0"
    torch.testing.assert_close(actual, checkpointed(*args))
    expected = torch.autograd.grad(attention(*args).sin().sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)


def test_both_bodies_of_a_cond_are_rewritten():
    def chosen(flag: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cond(flag, attention, lambda q, k, v: attention(q + 1, k, v), (query, key, value))

    args = operands()
    function = traced(chosen)
    for flag in (True, False):
        expected = attention(args[0] + (0 if flag else 1), *args[1:])
        torch.testing.assert_close(function(torch.tensor(flag), *args), expected)
    assert_fired(2)
    assert sorted(match.graph for match in matches()) == ["cond_false_0", "cond_true_0"]


@reads_autograd_functions
def test_the_body_of_an_autograd_function_keeps_its_own_backward():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(query, key, value)
            return attention(query, key, value)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
            return tuple(2 * saved * gradient.sum() for saved in ctx.saved_tensors)

    args = operands(dtype=torch.float64, requires_grad=True)
    actual = traced(Doubled.apply)(*args)
    assert_fired()
    torch.testing.assert_close(actual, attention(*args))
    gradients = torch.autograd.grad(actual.sum(), args)
    torch.testing.assert_close(gradients, tuple(2 * arg.detach() * actual.numel() for arg in args))


# ---- modules -------------------------------------------------------------------------------------------------------


class Causal(nn.Module):
    """One head with parameters and a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(24, 72)
        self.register_buffer("keep", torch.ones(32, 32, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 12)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        length = x.shape[1]
        scores = query @ key.transpose(-2, -1) / math.sqrt(12)
        scores = scores.masked_fill(~self.keep[:length, :length], -math.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_a_module_with_parameters_and_buffers_is_followed():
    module, x = Causal(), torch.randn(3, 10, 24)
    function = traced(module, options=FINITE)
    torch.testing.assert_close(function(x), module(x))
    assert_fired()
    with torch.no_grad():
        module.packed.weight.mul_(0.5)
        module.keep.logical_or_(torch.ones(32, 32, dtype=torch.bool))
    torch.testing.assert_close(function(x), module(x))
    assert_fired(2)  # the mask was proven by its value: another one compiles again


@pytest.mark.parametrize("kernel", ["torch.sdpa", "inductor"])
def test_parameters_stay_known_as_parameters(monkeypatch, kernel):
    """Read when Inductor gets the graph: Dynamo forgets these afterwards. Without a rewrite the same is to be seen."""
    known = {}

    def read(module: fx.GraphModule, *_: Any, **_named: Any) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node.target] = ("grapharg" in node.meta, node._dynamo_source.name)
        return module.forward

    monkeypatch.setattr(inductor, "compile_graph", read)
    compiled(Causal(), options={"layerzero.lock": {"attention": kernel}, **FINITE})(torch.randn(3, 10, 24))
    assert [match.rewritten for match in matches()] == [kernel != "inductor"]
    assert known == {
        "L_self_modules_packed_parameters_weight_": (True, "L['self']._modules['packed']._parameters['weight']"),
        "L_self_modules_packed_parameters_bias_": (True, "L['self']._modules['packed']._parameters['bias']"),
        "L_x_": (True, "L['x']"),
        "L_self_buffers_keep_": (True, "L['self']._buffers['keep']"),
    }


def test_new_nodes_carry_the_metadata_of_what_they_replace(compiled_graphs):
    args = operands()
    compiled(lambda *args: attention(*args).cos())(*args)
    assert_fired()
    (graph,) = compiled_graphs
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    assert any(node.target is F.scaled_dot_product_attention for node in calls)
    fake_modes = {node.meta["example_value"].fake_mode for node in graph.graph.nodes if node.op != "output"}
    assert len(fake_modes) == 1
    for node in calls:
        assert (
            "(query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value" in node.meta["stack_trace"]
            or "cos" in node.name
        )
        assert node.meta["example_value"].shape[0] == 2
    graph.graph.lint()


def test_an_argument_that_is_overwritten_later_is_still_overwritten():
    def writing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query, key, value)
        query.mul_(2)
        return out + query

    args = operands()
    again = [arg.clone() for arg in args]
    actual = compiled(writing)(*args)
    assert_fired()
    torch.testing.assert_close(actual, writing(*again))
    torch.testing.assert_close(args[0], again[0])


def test_strides_of_results_are_those_of_eager():
    def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attention(query, key, value)

    args = [x.transpose(1, 2).contiguous() for x in operands()]
    actual = compiled(transposed)(*args)
    assert_fired()
    assert actual.stride() == transposed(*args).stride()


# ---- twice ---------------------------------------------------------------------------------------------------------


def _masked(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).masked_fill(~keep, -math.inf).softmax(-1) @ value


def _biased(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3 + keep.float()).softmax(-1) @ value


def _unmasked(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return attention(query, key, value)


@pytest.mark.parametrize("kernel", ["torch.sdpa", "lz.blocked"])
@pytest.mark.parametrize("function", [_unmasked, _masked, _biased])
def test_rewriting_twice_changes_nothing(function, kernel):
    codes = []

    def twice(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for _ in range(2):
            pipeline.rewrite(module, Options(lock={"attention": kernel}, assume_finite=True), new_report())
            codes.append(module.code)
        return module.forward

    args = [*operands(40), torch.rand(2, 1, 40, 52) < 0.8]
    torch.testing.assert_close(torch.compile(function, backend=twice)(*args), function(*args))
    assert reports()[0].matches[0].rewritten
    assert reports()[0].matches[0].kernel == kernel
    assert codes[0] == codes[1]
    assert not any(match.rewritten for match in reports()[1].matches)


def test_resetting_dynamo_forgets_what_was_proven_in_memory():
    compiled()(*operands())
    compiled(lambda *args: attention(*args).sin())(*operands())
    torch._dynamo.reset()
    compiled()(*operands())
    assert_fired(3)
    assert [match.validation["origin"] for match in matches()] == ["run", "memory", "disk"]


def test_resetting_dynamo_compiles_anew():
    function, args = compiled(), operands()
    for _ in range(2):
        function(*args)
    assert len(reports()) == 1
    torch._dynamo.reset()
    function(*args)
    assert len(reports()) == 2


# ---- faults of ours ------------------------------------------------------------------------------------------------


def _raise(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")


def _raise_late(*_: Any, **__: Any) -> Any:
    yield from ()
    raise ZeroDivisionError("planted")


def _raise_in_a_graph(x: Operands, attrs: Any) -> Any:
    """Right on tensors, and in a graph it fails when half of its nodes are there."""
    scores = x.query @ x.key.transpose(-2, -1) * attrs.scale
    if isinstance(x.query, fx.Proxy):
        raise ZeroDivisionError("planted")
    return scores.softmax(-1) @ x.value


def _with_another_shape(x: Operands, attrs: Any) -> Any:
    out = (x.query @ x.key.transpose(-2, -1) * attrs.scale).softmax(-1) @ x.value
    return out.unsqueeze(0) if isinstance(x.query, fx.Proxy) else out


FAULTS = {
    "recogniser": "RECOGNISER_FAILED",
    "recogniser_midway": "RECOGNISER_FAILED",
    "effects": "RECOGNISER_FAILED",
    "selection": "REWRITE_FAILED",
    "kernel": "REWRITE_FAILED",
    "kernel_in_a_graph": "REWRITE_FAILED",
    "shape": "REWRITE_FAILED",
    "splice": "REWRITE_FAILED",
    "validation": "REWRITE_FAILED",
}


@pytest.fixture
def broken(monkeypatch, planted):
    def plant(fault: str) -> None:
        if fault.startswith("recogniser"):
            recogniser = _raise_late if fault.endswith("midway") else _raise
            monkeypatch.setattr(reading, "recognisers", lambda: {"attention": recogniser})
        elif fault in ("kernel", "kernel_in_a_graph", "shape"):
            planted({"kernel": _raise, "kernel_in_a_graph": _raise_in_a_graph, "shape": _with_another_shape}[fault])
        else:
            room, name = {
                "effects": (reading, "Effects"),
                "selection": (choices.agree, "decide"),
                "splice": (replacing, "splice"),
                "validation": (choices, "validate"),
            }[fault]
            monkeypatch.setattr(room, name, _raise)

    return plant


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_ours_leaves_the_graph_to_inductor_with_the_reason(broken, compiled_graphs, fault):
    args = operands(requires_grad=True)
    broken(fault)
    actual = compiled()(*args)
    torch.testing.assert_close(actual, attention(*args))
    expected = torch.autograd.grad(attention(*args).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)
    (report,) = reports()
    assert [event.code for event in report.events] == [FAULTS[fault]]
    assert ("planted" if fault != "shape" else "expected a") in report.events[0].message
    assert not any(match.rewritten for match in report.matches)
    assert all(match.kernel == "inductor" and match.reasons for match in report.matches)
    names = [
        getattr(node.target, "__name__", node.target)
        for node in compiled_graphs[0].graph.nodes
        if node.op.startswith("call")
    ]
    assert names == ["transpose", "matmul", "mul", "softmax", "matmul"]


@pytest.mark.parametrize("fault", FAULTS)
def test_strict_mode_raises_for_a_fault_of_ours(broken, fault):
    broken(fault)
    with pytest.raises(BackendCompilerFailed) as failure:
        compiled(options={"layerzero.strict": True})(*operands())
    assert isinstance(failure.value.inner_exception, RewriteFailedError)
    assert ("planted" if fault != "shape" else "expected a") in str(failure.value)
    assert event_codes() == [FAULTS[fault]]


def test_one_match_that_fails_does_not_stop_the_others(monkeypatch):
    original, calls = replacing.splice, []

    def splice(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return _raise() if len(calls) == 1 else original(*args, **kwargs)

    monkeypatch.setattr(replacing, "splice", splice)
    args = operands()
    both = compiled(lambda q, k, v: attention(q, k, v) + attention(q + 1, k, v))
    torch.testing.assert_close(both(*args), attention(*args) + attention(args[0] + 1, *args[1:]))
    assert [match.rewritten for match in matches()] == [True, False]
    assert event_codes() == ["REWRITE_FAILED"]


@pytest.mark.parametrize("fault", ["kernel", "kernel_in_a_graph"])
def test_a_kernel_that_fails_makes_way_for_the_next_one(broken, fault):
    broken(fault)
    args = operands()
    with policy.prefer("torch.sdpa", "lz.blocked"), policy.avoid("inductor"):
        torch.testing.assert_close(compiled()(*args), attention(*args))
    (match,) = matches()
    assert (match.kernel, match.rewritten) == ("lz.blocked", True)
    assert [reason.code for reason in match.reasons] == ["REWRITE_FAILED"]
    assert event_codes() == ["REWRITE_FAILED"]


def test_a_failed_report_does_not_stop_the_compile(tmp_path):
    (tmp_path / "file").write_text("")
    args = operands()
    actual = compiled(options={"layerzero.dump": str(tmp_path / "file" / "below")})(*args)
    assert_fired()
    assert set(event_codes()) == {"DUMP_UNWRITABLE"}
    torch.testing.assert_close(actual, attention(*args))


class Fails(CustomGraphPass):
    """Fails deep inside of Inductor, as often as it is told to."""

    def __init__(self, times: float = 1) -> None:
        self.left = times

    def __call__(self, graph: fx.Graph) -> None:
        if self.left > 0:
            self.left -= 1
            raise ZeroDivisionError("planted")

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_rewritten_graph_that_inductor_refuses_is_compiled_as_it_was(uncached, requires_grad):
    args = operands(requires_grad=requires_grad)
    with inductor_config.patch(post_grad_custom_post_pass=Fails()):
        actual = compiled()(*args)
    (report,) = reports()
    assert [event.code for event in report.events] == ["COMPILE_FAILED"]
    assert "planted" in report.events[0].message
    (match,) = report.matches
    assert (match.kernel, match.rewritten) == ("inductor", False)
    torch.testing.assert_close(actual, attention(*args))
    if requires_grad:
        expected = torch.autograd.grad(attention(*args).sum(), args)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)


def test_a_module_whose_rewritten_graph_inductor_refuses_keeps_its_parameters(uncached):
    module, x = Causal(), torch.randn(3, 10, 24)
    function = compiled(module, options=FINITE)
    with inductor_config.patch(post_grad_custom_post_pass=Fails()):
        actual = function(x)
    assert event_codes() == ["COMPILE_FAILED"]
    torch.testing.assert_close(actual, module(x))
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), list(module.parameters())), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("spelled", [attention, F.scaled_dot_product_attention], ids=["rewritten", "sdpa"])
def test_checkpoints_without_gradients_compile_around_sdpa(spelled, reentrant):
    """SDPA may draw random numbers, as far as AOTAutograd knows: it refuses that in a checkpoint of an inference graph."""
    args = operands()
    actual = compiled(lambda *args: checkpoint(spelled, *args, use_reentrant=reentrant))(*args)
    assert event_codes() == []
    (match,) = matches()
    assert match.rewritten == (spelled is attention), match.reasons
    torch.testing.assert_close(actual, spelled(*args))


def test_a_checkpointed_body_that_inductor_refuses_is_compiled_as_it_was(uncached):
    args = operands(requires_grad=True)
    function = compiled(lambda *args: checkpoint(attention, *args, use_reentrant=False))
    with inductor_config.patch(post_grad_custom_post_pass=Fails()):
        actual = function(*args)
    assert event_codes() == ["COMPILE_FAILED"]
    torch.testing.assert_close(actual, attention(*args))
    expected = torch.autograd.grad(attention(*args).sum(), args)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), args), expected)


def test_strict_mode_raises_where_inductor_refuses_the_rewritten_graph(uncached):
    with (
        inductor_config.patch(post_grad_custom_post_pass=Fails()),
        pytest.raises(BackendCompilerFailed, match="planted") as failure,
    ):
        compiled(options={"layerzero.strict": True})(*operands())
    assert isinstance(failure.value.inner_exception, RewriteFailedError)


@pytest.mark.parametrize("function", [attention, softplus_attention], ids=["rewritten", "untouched"])
def test_what_inductor_cannot_compile_raises_inductors_own_error(uncached, function):
    messages = []
    for backend in ("inductor", layerzero):
        torch._dynamo.reset()
        with (
            inductor_config.patch(post_grad_custom_post_pass=Fails(math.inf)),
            pytest.raises(Exception, match="planted") as failure,
        ):
            torch.compile(function, backend=backend)(*operands())
        messages.append((type(failure.value), type(getattr(failure.value, "inner_exception", None))))
    assert messages[0] == messages[1]


def test_an_interruption_is_not_taken_for_a_fault(monkeypatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(choices.agree, "decide", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled()(*operands())


def test_the_stages_run_without_inductor_too():
    found = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(graph: fx.GraphModule, inputs: Any, report: Any) -> Callable[..., Any]:
            found.append(report)
            return graph.forward

        return process(module, inputs, Options(), run)

    args = operands()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*args), attention(*args))
    assert found == reports()
    assert_fired()
