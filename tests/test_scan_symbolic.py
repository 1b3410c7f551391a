"""Recurrences whose batch, heads or widths are symbolic: one compile for all sizes, read and run as with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from loop_spellings import OUTERS, READS
from recurrent_zoo import FAMILIES
from step_spellings import KNOWN, B, Family, inputs
from test_scan_steps import Compiler, eager, loop
from torch import Tensor
from torch.utils import _pytree as pytree

import lz_compile as lz
from lz_compile import reports
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.loops.recurrence.step_sizes import StepSizes

#: Batches that a graph was compiled for, and others that it must serve.
FIRST, OTHERS = 11, (2, 5)
#: Spellings that write the batch out as a number, so that Dynamo keeps it.
_NUMBERED = {"kda_bmm"}
#: One family of every structure; Dynamo takes two seconds for each.
_QUICK = {"spike_kda_silent_heads", "gated_delta", "mamba1", "token_shift", "two_ema", "rwkv6"}
_FAMILIES = [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.thorough)
    for name in sorted(KNOWN.keys() - _NUMBERED)
]


def sized(family: Family, batch: int) -> Family:
    """The family with another batch."""

    def of(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple((batch, *shape[1:]) if shape[0] == B else shape for shape in shapes)

    return replace(family, init=of(family.init), given=of(family.given))


@pytest.mark.parametrize("name", _FAMILIES)
def test_every_family_is_read_with_a_symbolic_batch_and_serves_others(name: str) -> None:
    family = KNOWN[name]
    torch._dynamo.reset()
    compiler = Compiler()
    function = torch.compile(loop(family), backend=compiler, fullgraph=True)
    for batch in (FIRST, *OTHERS):
        init, given = inputs(sized(family, batch))
        for tensors, dim in ((init, 0), (given, 1)):
            for tensor in tensors if batch == FIRST else ():
                torch._dynamo.mark_dynamic(tensor, dim)
        got, want = function(init, given), eager(family, init, given)
        assert compiler.structure == family.structure, (
            compiler.misses
        )  # found in the first compile, and in no other one
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_number_of_steps_may_be_symbolic_where_a_loop_comes_apart() -> None:
    family = KNOWN["token_shift"]
    torch._dynamo.reset()
    backend = Rewriting()
    function = torch.compile(loop(family), backend=backend, fullgraph=True)
    for batch, length in ((11, 17), (13, 19), (2, 5), (3, 140)):
        init, given = inputs(sized(family, batch), length=length)
        for tensor in (*init, *given) if batch == FIRST else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        for tensor in given if batch == FIRST else ():
            torch._dynamo.mark_dynamic(tensor, 1)
        for one, two in zip(function(init, given), eager(family, init, given), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert len(backend.graphs) == 1
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()


# ---- loops as they are written -----------------------------------------------------------------------------------------


def attention(
    read: Callable[..., Tensor], outer: Callable[..., Tensor], *, merges: bool, erases: bool
) -> Callable[..., Any]:
    """A fast weight loop in one spelling; ``merges`` keeps batch and heads in one dimension of the state."""

    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, heads, keys = q.shape
        values = v.shape[-1]
        state = q.new_zeros(batch * heads, keys, values) if merges else q.new_zeros(batch, heads, keys, values)
        outputs = []
        for t in range(length):
            whole = state.view(batch, heads, keys, values) if merges else state
            whole = torch.sigmoid(a[:, t])[..., None] * whole
            given = v[:, t] - read(k[:, t], whole) if erases else v[:, t]
            whole = whole + outer(k[:, t], b[:, t, :, None] * given)
            outputs.append(read(q[:, t], whole))
            state = whole.reshape(batch * heads, keys, values) if merges else whole
        return torch.stack(outputs, 1), state

    return run


def bmm(q: Tensor, state: Tensor) -> Tensor:
    batch, heads, keys, values = state.shape
    found = torch.bmm(q.reshape(batch * heads, 1, keys), state.reshape(batch * heads, keys, values))
    return found.view(batch, heads, values)


def problem(batch: int, heads: int = 3, keys: int = 4, values: int = 5, length: int = 9) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(batch, length, heads, size) for size in (keys, keys, values, keys)] + [(batch, length, heads)]
    q, k, v, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(each.requires_grad_() for each in (q, F.normalize(k, dim=-1), v, a, torch.sigmoid(b)))


def compare(
    function: Callable[..., Any], compiled: Callable[..., Any], given: Sequence[Tensor], tolerance: float
) -> None:
    """Results and gradients of both."""
    results = []
    for each in (compiled, function):
        outputs = pytree.tree_leaves(each(*given))
        loss = torch.stack([output.double().square().sum() for output in outputs]).sum()
        results.append([*outputs, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)])
    for one, two in zip(*results, strict=True):
        scale = float(two.detach().abs().max().clamp(min=1))
        torch.testing.assert_close(one / scale, two / scale, rtol=tolerance, atol=tolerance)


def scans(backend: Rewriting) -> list[str]:
    """The kernels of scans, in the order of compiles."""
    return [match.kernel for match in backend.report.matches if match.op == "scan" and match.rewritten]


_SPELLINGS = [
    (read, outer, merges, erases)
    for number, read in enumerate((*(each for each in READS if each.__name__ != "read_bmm"), bmm))
    for merges, erases, outer in ((number % 2 == 0, number < 2, OUTERS[number % 3]),)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("read", "outer", "merges", "erases"), _SPELLINGS)
def test_loops_keep_their_kernel_for_batches_that_come_later(
    read: Callable[..., Tensor], outer: Callable[..., Tensor], merges: bool, erases: bool
) -> None:
    function = attention(read, outer, merges=merges, erases=erases)
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for batch in (2, 3, 5):
        compare(function, compiled, problem(batch), 1e-9)
    assert len(backend.graphs) == 2, "the second batch makes it symbolic, and the others follow"
    assert scans(backend) == ["lz.rolled_scan"] * 2, backend.why_not()


def test_a_batch_of_one_is_served_as_dynamo_compiles_it() -> None:
    function = attention(bmm, OUTERS[2], merges=True, erases=True)
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch in (2, 1, 4):
        compare(function, compiled, problem(batch), 1e-9)
    assert len(backend.graphs) == 2  # one is a number of its own
    assert scans(backend) == ["lz.rolled_scan"] * 2, backend.why_not()


def test_every_size_may_be_symbolic() -> None:
    function = attention(bmm, OUTERS[1], merges=True, erases=True)
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for sizes in ((2, 3, 4, 5), (3, 5, 7, 4), (6, 2, 3, 9)):
        compare(function, compiled, problem(*sizes), 1e-9)
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()


@pytest.mark.sampled("count_from_one", "halves")
@pytest.mark.parametrize("count", ["count_from_one", "count_by_two", "halves"])
def test_sizes_that_are_counted_are_those_that_guards_say_them_to_be(count: str) -> None:
    """``arange`` of floats has a size of its own, which broadcasting holds to be another one."""
    counts: dict[str, Callable[[int], Tensor]] = {
        "count_from_one": lambda n: torch.arange(1.0, n + 1, dtype=torch.float64),
        "count_by_two": lambda n: torch.arange(0, 2 * n, 2).double(),
        "halves": lambda n: torch.arange(0.5, n, dtype=torch.float64),
    }

    def function(x: Tensor, delta: Tensor, b: Tensor) -> Tensor:
        a = -counts[count](b.shape[-1])
        decay, state, found = torch.exp(delta[..., None] * a), x.new_zeros(*x[:, 0].shape, b.shape[-1]), []
        for t in range(12):
            state = decay[:, t] * state + x[:, t, :, None] * b[:, t, None, :]
            found.append(state.sum(-1))
        return torch.stack(found, 1)

    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch, width, size in ((2, 3, 4), (3, 5, 7), (5, 2, 3)):
        x, delta, b = torch.randn(batch, 12, width), torch.rand(batch, 12, width), torch.randn(batch, 12, size)
        given = [each.double() for each in (x, delta, b)]
        torch.testing.assert_close(compiled(*given), function(*given), rtol=1e-9, atol=1e-9)
    assert len(backend.graphs) == 1
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()


# ---- kernels in plain PyTorch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("erases", "kernel"),
    [(True, "lz.chunked_scan"), (True, "lz.associative_matrix_scan"), (False, "lz.associative_scan")],
)
def test_kernels_in_plain_pytorch_serve_every_batch_with_one_compile(erases: bool, kernel: str) -> None:
    function = attention(READS[0], OUTERS[0], merges=False, erases=erases)
    torch._dynamo.reset()
    backend = Rewriting(lock={"scan": kernel})
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for batch in (3, 5, 2):
        given = problem(batch)
        for each in given if batch == 3 else ():
            torch._dynamo.mark_dynamic(each, 0)  # which fails if a size becomes a number
        compare(function, compiled, given, 1e-9)
    assert len(backend.graphs) == 1
    assert scans(backend) == [kernel], backend.why_not()


def test_widths_that_are_symbols_go_to_a_kernel_that_takes_them() -> None:
    function = attention(READS[0], OUTERS[0], merges=False, erases=True)
    torch._dynamo.reset()
    backend = Rewriting(lock={"scan": "lz.chunked_scan"})
    compiled = torch.compile(function, backend=backend, dynamic=True)
    compare(function, compiled, problem(2, 3, 4, 5), 1e-9)
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()
    assert "lz.chunked_scan does not take symbolic widths of the state" in backend.why_not()


def call(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return lz.kda(q, k, v, torch.sigmoid(a), b)


@pytest.mark.parametrize("kernel", ["lz.rolled_scan", "lz.chunked_scan", "lz.associative_matrix_scan"])
def test_a_call_takes_any_number_of_steps_whatever_kernel_is_wished(kernel: str) -> None:
    torch._dynamo.reset()
    backend = Rewriting(lock={"scan": kernel})
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for batch, length in ((3, 12), (4, 150), (2, 3)):
        given = problem(batch, length=length)
        for each in given if batch == 3 else ():
            torch._dynamo.mark_dynamic(each, (0, 1))
        compare(call, compiled, given, 1e-9)
    assert len(backend.graphs) == 1
    (match,) = (each for each in backend.report.matches if each.op == "scan")
    assert match.kernel == "lz.rolled_scan"
    if kernel != "lz.rolled_scan":
        assert f"{kernel} does not take a symbolic number of steps" in backend.why_not()


def test_what_a_step_calls_beside_its_state_leaves_sizes_as_they_are() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(a[:, t]) * state + F.pad(x[:, t, 1:], (0, 1))
            outputs.append(F.pad(state, (1, 0)))
        return torch.stack(outputs, 1)

    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for batch in (3, 5, 2):
        given = [torch.randn(batch, 18, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for each in given if batch == 3 else ():
            torch._dynamo.mark_dynamic(each, 0)
        compare(function, compiled, given, 1e-9)
    assert len(backend.graphs) == 1
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()


# ---- sizes as numbers --------------------------------------------------------------------------------------------------


def pointwise(step: Callable[[Tensor, Tensor], Tensor], read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = step(state, x[:, t])
            outputs.append(read(state))
        return torch.stack(outputs, 1)

    return run


def dynamic(function: Callable[..., Any], **options: Any) -> Rewriting:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for width in (7, 5):
        given = torch.randn(3, 20, width, dtype=torch.float64, requires_grad=True)
        compare(function, compiled, [given], 1e-9)
    assert len(backend.graphs) == 1
    return backend


@pytest.mark.parametrize(
    ("step", "read"),
    [
        (lambda s, x: 0.5 * s + x * x.mean(-1, keepdim=True), lambda s: s * 2),
        (lambda s, x: 0.5 * s + x, lambda s: s.mean(-1)),
        (lambda s, x: 0.5 * s + x * x.shape[-1], lambda s: s / s.shape[-1]),
        (lambda s, x: 0.5 * s + x * x.shape[-1] ** -0.5, lambda s: s * 1.0),
    ],
    ids=["mean_of_an_input", "mean_of_what_is_read", "size_as_a_factor", "root_of_a_size"],
)
def test_a_size_beside_the_state_may_be_a_number(step: Callable[..., Tensor], read: Callable[..., Tensor]) -> None:
    backend = dynamic(pointwise(step, read))
    assert scans(backend) == ["lz.rolled_scan"], backend.why_not()


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda s, x: 0.5 * (s - s.mean(-1, keepdim=True)) + x, "mean multiplies the state by a symbolic size"),
        (lambda s, x: s / s.shape[-1] + x, "div multiplies the state by a symbolic size"),
    ],
    ids=["mean_of_the_state", "state_over_a_size"],
)
def test_a_state_that_a_size_multiplies_is_refused(step: Callable[..., Tensor], name: str) -> None:
    backend = dynamic(pointwise(step, lambda s: s * 1.0))
    assert not scans(backend)
    assert any(name in str(miss.reason) for miss in backend.report.near_misses), backend.why_not()


# ---- where sizes are read ----------------------------------------------------------------------------------------------


@pytest.fixture
def symbols() -> list[torch.SymInt]:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    return [
        environment.create_symintnode(
            environment.create_symbol(hint, ConstantSource(f"s{hint}"), DimDynamic.DYNAMIC), hint=hint
        )
        for hint in (6, 10, 14)
    ]


def test_sizes_are_read_of_operands_as_products_and_quotients(symbols: list[torch.SymInt]) -> None:
    one, two, three = symbols
    given = [one * two * 4, two, three * 2, 15]
    sizes = StepSizes.of(given)
    for size in (one * two * 4, one * two, two, three * 2, two * three * 30, one, one * 3):
        assert sizes.hint(size.node.expr) == size.node.hint
        found = sizes.extent(size.node.expr, lambda place: given[place.operand])
        assert found.node.expr == size.node.expr
    assert sizes.hint(15) == 15


def test_a_size_that_no_operand_shows_is_refused_by_its_text(symbols: list[torch.SymInt]) -> None:
    one, two, three = symbols
    sizes = StepSizes.of([one, two + three])
    assert sizes.hint((2 * one).node.expr) == 12
    assert sizes.hint((two + three).node.expr) == 24
    with pytest.raises(RefusedError, match=r"the symbolic size .* is no product of sizes of what it is given"):
        sizes.hint(three.node.expr)


# ---- whole models, and Inductor ----------------------------------------------------------------------------------------


@pytest.mark.sampled("mamba")
@pytest.mark.slow  # a model of transformers, twice
@pytest.mark.parametrize("name", ["recurrent_gemma", "mamba"])
def test_models_keep_their_kernels_for_other_batches(name: str) -> None:
    torch._dynamo.reset()
    backend = Rewriting()
    family = FAMILIES[name]
    if name == "mamba":  # its layers are alike
        family = replace(family, config={**family.config, "num_hidden_layers": 1})
    model, _ = family.build(length=16, batch=2)
    compiled = torch.compile(model, backend=backend)
    for batch in (2, 3, 5):
        _, given = family.build(length=16, batch=batch)
        with torch.no_grad():
            got, want = compiled(**given).logits, model(**given).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(backend.graphs) == 2
    found = [[m.kernel for m in graph.matches if m.op == "scan" and m.rewritten] for graph in backend.report.graphs]
    assert found[0], backend.why_not()
    assert found[0] == found[1], backend.why_not()


@pytest.mark.slow  # compiled by Inductor, with gradients
def test_compiled_kernels_and_their_gradients_serve_other_batches() -> None:
    function = attention(READS[0], OUTERS[0], merges=False, erases=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="layerzero", dynamic=True)
    for batch in (8, 2, 7):
        given = [each.detach().float().requires_grad_() for each in problem(batch)]
        compare(function, compiled, given, 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (graph,) = reports()[-1:]
    assert [match.kernel for match in graph.matches if match.rewritten] == ["lz.rolled_scan"]


@pytest.mark.slow  # compiled by Inductor, with gradients
def test_a_loop_that_is_not_affine_compiles_with_a_symbolic_batch() -> None:
    function = pointwise(lambda s, x: torch.tanh(0.5 * s + x), lambda s: s * 2)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="layerzero", dynamic=True, options={"layerzero.loops": "roll"})
    for batch in (3, 2, 6):
        compare(function, compiled, [torch.randn(batch, 10, 4, requires_grad=True)], 1e-4)
    (graph,) = reports()[-1:]
    assert [each.rolled for each in graph.loops] == [True]
    assert not [event for event in graph.events if event.code in ("COMPILE_FAILED", "FALLBACK")], graph.events


def test_linear_algebra_in_a_step_keeps_a_symbolic_batch() -> None:
    """Batched over time, PyTorch would make a number of the batch: the loop is left as it is."""

    def solved(given: Tensor, keys: Tensor) -> Tensor:
        state, found = given.new_zeros(given.shape[0], 4), []
        for t in range(given.shape[1]):
            matrix = 2 * torch.eye(4, dtype=given.dtype) + 0.1 * keys[:, t, :, None] * keys[:, t, None]
            state = 0.5 * state + torch.linalg.solve_ex(matrix, given[:, t, :, None])[0][..., 0]
            found.append(2 * state)
        return torch.stack(found, 1)

    torch._dynamo.reset()
    backend = Rewriting()
    function = torch.compile(solved, backend=backend, fullgraph=True)
    for batch in (3, 5):
        operands = torch.randn(2, batch, 18, 4, dtype=torch.float64).unbind()
        for each in operands:
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(function(*operands), solved(*operands))
    assert len(backend.report.graphs) == 1
    assert "SIZE_UNKNOWN" in {miss.reason.code for miss in backend.report.near_misses}


def test_an_operand_of_a_symbolic_size_that_a_step_makes_is_refused_by_its_text() -> None:
    """``expand`` of indices has a size that no operand of the step shows."""

    def gathered(given: Tensor, other: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        batch, steps, width = given.shape
        state = torch.zeros(width, batch, dtype=given.dtype).t()
        stored = given.new_empty(batch, steps, width).fill_(0.5)
        for t in range(steps):
            factor = given[:, t].gather(1, ids[:, t, None].expand(batch, width))
            state = factor * state + (other.mean(1) - given[:, t])
            stored[:, t] = state
        return state, [stored[:, t].clone() for t in range(steps)], F.one_hot(ids[:, 0], width)

    torch._dynamo.reset()
    backend = Rewriting(loops="roll", lock={"scan": "inductor"})
    operands = *torch.randn(2, 2, 5, 2, dtype=torch.float64).unbind(), torch.randint(2, (2, 5))
    found = torch.compile(gathered, backend=backend, dynamic=True)(*operands)
    torch.testing.assert_close(found, gathered(*operands))
    assert any(loop.rolled for loop in backend.report.loops), backend.report.loops
    assert not backend.report.events, backend.report.events
