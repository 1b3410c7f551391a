"""Functions as one node of a compiled graph: what PyTorch asks of an operator, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.errors import GradientUnsupportedError, OperatorRedefinedError
from lz_compile.ground import events, health
from lz_compile.lowering import inductor
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.attention import Operands
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import EMITTED
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.rewrite import Recipes, splice


def weighted(left: Tensor, right: Tensor, scale: float | None, is_negated: bool = False, *, power: int = 1) -> Tensor:
    product = left @ right * (1.0 if scale is None else scale) ** power
    return -product if is_negated else product


def weighted_fake(
    left: Tensor, right: Tensor, scale: float | None, is_negated: bool = False, *, power: int = 1
) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def split_in_two(rows: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return rows[:at].clone(), rows[at:].clone()


def split_in_two_fake(rows: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty((at, *rows.shape[1:])), rows.new_empty((rows.shape[0] - at, *rows.shape[1:]))


WEIGHTED = opaque("weighted_for_tests", weighted, weighted_fake)
SPLIT = opaque("split_for_tests", split_in_two, split_in_two_fake)
#: The error that the next calls raise, if any.
BROKEN: list[str] = []


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    if BROKEN:
        raise RuntimeError(BROKEN[0])
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def attend_fake(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return (query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1) @ value


ATTEND = opaque("attend_for_tests", attend, attend_fake, fallback=attend_plainly, kernel_id="tests.attend")
DIRECTLY = torch.ops.layerzero.attend_for_tests_kernel.default.directly


def gated(left: Tensor, right: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    return left * right * gate * scale


def gated_fake(left: Tensor, right: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    return torch.empty_like(left)


def gated_gradients(
    gradient: Tensor, left: Tensor, right: Tensor, gate: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """By autograd, of the function itself."""
    leaves = (left.requires_grad_(), right.requires_grad_())
    of_left, of_right = torch.autograd.grad(gated(*leaves, gate, scale), leaves, gradient)
    return of_left, of_right


GATED = opaque("gated_for_tests", gated, gated_fake, backward=gated_gradients)


def squared(x: Tensor) -> Tensor:
    return x * x


def squared_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def squared_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient * x * 2


SQUARED = opaque("squared_for_tests", squared, squared_fake, backward=squared_gradient)


@pytest.fixture(autouse=True)
def _whole_again() -> Iterator[None]:
    BROKEN.clear()
    yield
    BROKEN.clear()
    if health.retired("tests.attend"):
        health.restore("tests.attend")


def kernel(x: Operands, attrs: Any) -> Any:
    return ATTEND(x.query, x.key, x.value, attrs.scale)


def backend(seen: list[fx.GraphModule] | None = None) -> Callable[..., Any]:
    """Inductor, with every attention replaced by the opaque one."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recipes = Recipes()
        for match in list(recognisers()["attention"](module.graph, Effects(module.graph))):
            splice(module.graph, match, kernel, recipes)
        module.recompile()
        if seen is not None:
            seen.append(module)
        return inductor.compile_graph(module, inputs, {}, "tests")

    return compile_graph


def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query * 2, key, value, scale=0.5) + 1


def operands(length: int = 5) -> list[Tensor]:
    return [torch.randn(2, 3, length, 4), torch.randn(2, 3, length + 2, 4), torch.randn(2, 3, length + 2, 6)]


# ---- as an operator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "arguments", "constants"),
    [
        (WEIGHTED, (torch.randn(3, 4), torch.randn(4, 5), None), {}),
        (WEIGHTED, (torch.randn(2, 3, 4), torch.randn(4, 5), 0.5, True), {"power": 2}),
        (SPLIT, (torch.randn(5, 2), 3), {}),
        (ATTEND, (*operands(), 0.3), {}),
        (GATED, (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4), 0.5), {}),
        (SQUARED, (torch.randn(3, 4),), {}),
    ],
)
def test_an_opaque_function_passes_pytorchs_checks_of_operators(operator, arguments, constants):
    results = torch.library.opcheck(operator, arguments, constants)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4
    results = torch.library.opcheck(_inner(operator), arguments, constants)
    assert set(results.values()) == {"SUCCESS"}


def _inner(operator: Any) -> Any:
    name = operator._schema.name.partition("::")[2]
    return getattr(torch.ops.layerzero, f"{name}_kernel").default


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, 0.5]), st.booleans(), st.integers(1, 3))
def test_it_gives_what_the_function_gives(rows, columns, scale, is_negated, power):
    left, right = torch.randn(rows, 3), torch.randn(3, columns)
    expected = weighted(left, right, scale, is_negated, power=power)
    torch.testing.assert_close(WEIGHTED(left, right, scale, is_negated, power=power), expected)


def test_the_schema_is_the_functions_own():
    schema = "layerzero::weighted_for_tests(Tensor left, Tensor right, float? scale, bool is_negated=False, *, SymInt power=1)"
    assert str(WEIGHTED._schema) == f"{schema} -> Tensor"


def test_cuda_graphs_may_capture_only_what_is_said_to_be_safe():
    def safe(x: Tensor) -> Tensor:
        return x + 1

    def empty(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    kernel_of_safe = _inner(opaque("safe_for_tests", safe, empty, is_cuda_graph_safe=True))
    assert torch.Tag.cudagraph_unsafe not in kernel_of_safe.tags
    assert torch.Tag.cudagraph_unsafe in _inner(WEIGHTED).tags
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order} <= set(_inner(WEIGHTED).tags)


# ---- definitions -----------------------------------------------------------------------------------------------------


def test_defining_the_same_again_gives_the_same_operator():
    assert opaque("weighted_for_tests", weighted, weighted_fake) is WEIGHTED
    assert opaque("attend_for_tests", attend, attend_fake, fallback=attend_plainly, kernel_id="tests.attend") is ATTEND


def test_functions_with_equal_code_over_equal_values_are_equal():
    def made(offset: int) -> Callable[..., Tensor]:
        def shifted(x: Tensor) -> Tensor:
            return x + offset

        return shifted

    def empty(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    first = opaque("shifted_for_tests", made(1), empty)
    assert opaque("shifted_for_tests", made(1), empty) is first
    with pytest.raises(
        OperatorRedefinedError, match=r"shifted_for_tests as .*the name already stands for another function"
    ):
        opaque("shifted_for_tests", made(2), empty)


@pytest.mark.parametrize(
    "changed",
    [
        {"fake": split_in_two_fake},
        {"function": split_in_two},
        {"fallback": weighted},
        {"backward": gated_gradients},
        {"kernel_id": "other"},
    ],
)
def test_a_name_is_not_given_twice(changed):
    arguments = {"function": weighted, "fake": weighted_fake, **changed}
    with pytest.raises(OperatorRedefinedError, match="Give the operator a name of its own"):
        opaque("weighted_for_tests", **arguments)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_inputs_that_want_a_gradient_are_refused():
    left, right = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    message = (
        r"calling layerzero::weighted_for_tests: expected inputs without gradients.* argument 1 requires one.*no_grad"
    )
    for operator in (WEIGHTED, _inner(WEIGHTED)):
        with pytest.raises(GradientUnsupportedError, match=message):
            operator(left, right, None)
        with torch.no_grad():
            assert not operator(left, right, None).requires_grad
    assert not WEIGHTED(left, right.detach(), None).requires_grad


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("operator", [WEIGHTED, SQUARED], ids=["without a backward", "with one"])
def test_inputs_that_have_a_tangent_are_refused(operator, mode):
    x, others = torch.randn(4, 4), (torch.randn(4, 4), None) if operator is WEIGHTED else ()
    message = r"_for_tests(_kernel)?: expected inputs without tangents.* argument 0 has one"
    with mode(), pytest.raises(GradientUnsupportedError, match=message):
        torch.func.jvp(lambda x: operator(x, *others), (x,), (x,))
    with mode(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (operator, _inner(operator).directly):
            with pytest.raises(GradientUnsupportedError, match=message):
                call(dual, *others)
        assert torch.equal(operator(x, *others), _inner(operator)(x, *others))  # nothing of it has a tangent
        with torch.inference_mode():  # where nothing has
            _inner(operator).directly(dual, *others)


def test_compiled_code_refuses_tangents_and_not_what_has_none():
    x = torch.randn(3, 4)
    with forward_ad.dual_level(), torch.no_grad():
        run = torch.compile(lambda x: SQUARED(x.sin()) + SQUARED(x), backend=backend())
        for _ in range(2):  # the first call is watched by PyTorch
            torch.testing.assert_close(run(x), x.sin().square() + x.square())
        with pytest.raises(GradientUnsupportedError, match="argument 0 has one"):
            run(forward_ad.make_dual(x, x))


def test_inputs_that_want_a_gradient_are_refused_in_compiled_code():
    query, key, value = operands()
    with pytest.raises(Exception, match="expected inputs without gradients"):
        torch.compile(model, backend=backend())(query.requires_grad_(), key, value)


def test_gradients_flow_around_it():
    query, key, value = operands()
    other = torch.randn(2, 3, 5, 6, requires_grad=True)
    compiled = torch.compile(lambda *x: model(*x[:3]) * x[3], backend=backend())
    (actual,) = torch.autograd.grad(compiled(query, key, value, other).sum(), other)
    torch.testing.assert_close(actual, model(query, key, value))


# ---- with a backward -------------------------------------------------------------------------------------------------


def leaves(count: int) -> list[Tensor]:
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_a_backward_gives_the_gradients_that_are_wanted(wanted):
    given = [leaf.requires_grad_(is_wanted) for leaf, is_wanted in zip(leaves(2), wanted, strict=True)]
    gate = torch.randn(3, 4)
    wants = [leaf for leaf in given if leaf.requires_grad]
    actual = torch.autograd.grad(GATED(*given, gate, 0.5).cos().sum(), wants)
    expected = torch.autograd.grad(gated(*given, gate, 0.5).cos().sum(), wants)
    torch.testing.assert_close(actual, expected)
    assert not GATED(*(leaf.detach() for leaf in given), gate).requires_grad
    with torch.no_grad():
        assert not GATED(*given, gate).requires_grad


def test_one_gradient_needs_no_tuple():
    (x,) = leaves(1)
    (actual,) = torch.autograd.grad(SQUARED(x).sum(), x)
    torch.testing.assert_close(actual, 2 * x)


def test_gradients_that_a_backward_does_not_give_are_refused():
    *given, gate = leaves(3)
    with pytest.raises(GradientUnsupportedError, match=r"expected inputs without gradients.* argument 2 requires one"):
        GATED(*given, gate)
    (gradient,) = torch.autograd.grad(GATED(*given, gate.detach()).sum(), given[:1])
    torch.testing.assert_close(gradient, given[1] * gate)


def test_gradients_of_gradients_are_refused():
    (x,) = leaves(1)
    with pytest.raises(
        GradientUnsupportedError, match=r"squared_for_tests_backward: expected inputs without gradients"
    ):
        torch.autograd.grad(SQUARED(x).sum(), x, create_graph=True)


def test_compiled_code_calls_the_kernel_forward_and_the_backward_backward():
    given = leaves(2)
    gate = torch.randn(3, 4)

    def step(left: Tensor, right: Tensor) -> Tensor:
        return (GATED(left.exp(), right, gate, 0.5) + 1).sin()

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.compile(step, fullgraph=True)(*given).sum(), given)

    with fresh_cache():
        actual, codes = run_and_get_code(run)
        torch.testing.assert_close(actual, torch.autograd.grad(step(*given).sum(), given))
        calls = [
            [name for name in ("kernel", "backward") if f"gated_for_tests_{name}.default.directly(" in code]
            for code in codes
        ]
        assert calls == [["kernel"], ["backward"]]
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(run(), actual)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


# ---- in a graph ------------------------------------------------------------------------------------------------------


def test_it_is_one_node_with_complete_metadata():
    seen: list[fx.GraphModule] = []
    query, key, value = operands()
    with torch.no_grad(), fresh_cache():
        actual, (code,) = run_and_get_code(torch.compile(model, backend=backend(seen)), query, key, value)
    torch.testing.assert_close(actual, model(query, key, value))
    (node,) = [node for node in seen[0].graph.nodes if node.target is ATTEND]
    assert node.meta[EMITTED]
    assert node.meta["stack_trace"]
    assert node.meta["example_value"].shape == (2, 3, 5, 6)
    assert "torch.ops.layerzero.attend_for_tests_kernel.default.directly(" in code
    assert "torch.ops.layerzero.attend_for_tests.default(" not in code


class Seen(TorchDispatchMode):
    """Names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_compiled_code_passes_the_dispatcher_by_where_nobody_listens():
    compiled = torch.compile(model, backend=backend())
    query, key, value = operands()
    with torch.no_grad(), fresh_cache():
        expected = compiled(query, key, value)
        with mock.patch.object(torch._ops.OpOverload, "__call__", side_effect=AssertionError("dispatched")):
            torch.testing.assert_close(compiled(query, key, value), expected, rtol=0, atol=0)
        with torch.profiler.profile() as profiled:
            torch.testing.assert_close(compiled(query, key, value), expected, rtol=0, atol=0)
        with Seen() as seen:
            found = DIRECTLY(query, key, value, None)
    torch.testing.assert_close(found, attend_plainly(query, key, value, None))
    assert "layerzero::attend_for_tests_kernel" in {event.name for event in profiled.events()}
    assert seen.names == ["layerzero.attend_for_tests_kernel.default"]
    with pytest.raises(GradientUnsupportedError):
        DIRECTLY(query.requires_grad_(), key, value, None)


def test_one_compilation_serves_every_length():
    seen: list[fx.GraphModule] = []
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend(seen), dynamic=True)
        for length in (5, 9, 12):
            given = operands(length)
            torch.testing.assert_close(compiled(*given), model(*given))
    assert len(seen) == 1


def test_both_caches_of_inductor_hold_it():
    given = operands()
    with fresh_cache(), torch.no_grad():
        torch.compile(model, backend=backend())(*given)
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(torch.compile(model, backend=backend())(*given), model(*given))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_function_that_raises_is_completed_by_its_fallback_and_retired(is_compiled):
    given = operands()
    with torch.no_grad(), events.collect() as happened:
        call = torch.compile(model, backend=backend()) if is_compiled else lambda *x: ATTEND(x[0] * 2, *x[1:], 0.5) + 1
        torch.testing.assert_close(call(*given), model(*given))
        assert not happened
        BROKEN.append("no such kernel")
        torch.testing.assert_close(call(*given), model(*given))
    assert "no such kernel" in str(health.retired("tests.attend"))
    assert next(event.code for event in happened) == "KERNEL_FAILED"


def test_without_a_fallback_the_error_is_the_callers():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        WEIGHTED(torch.randn(2, 3), torch.randn(2, 3), None)
    assert not health.retired("weighted_for_tests")
