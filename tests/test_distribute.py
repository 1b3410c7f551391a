"""Loops taken apart: into scans that follow each other, and what is computed for all steps at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Traced
from step_spellings import KNOWN, STATE, B, Family, H, K, T, V, inputs
from test_scan_steps import Compiler, compiled, eager
from torch import fx
from torch._higher_order_ops import scan

from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.passes.editing.edit import RefutedError, Rewrite, apply
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.loops.recurrence import plan as scan_plan
from lz_compile.passes.loops.recurrence.distribute import Distributed, distribute, shown_on_few_steps, why_unknown
from lz_compile.passes.loops.recurrence.step_trace import SCAN
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.scan.matching import matches


class Apart:
    """A backend that takes loops apart and runs eagerly."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.again: list[Any] = []
        self.module: fx.GraphModule | None = None

    def __call__(self, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.found = list(distribute(module))
        self.again = list(distribute(module))
        module.graph.lint()
        module.recompile()
        self.module = module
        return module.forward

    @property
    def scans(self) -> list[fx.Node]:
        assert self.module is not None
        return [node for node in self.module.graph.nodes if node.target is SCAN]

    def calls_inside(self) -> set[str]:
        """The operations that are left in steps."""
        bodies = [getattr(self.module, str(node.args[0].target)) for node in self.scans]
        nodes = [node for body in bodies for node in body.graph.nodes if node.op == "call_function"]
        return {node.target.overloadpacket.__name__ for node in nodes}


PARTS = {
    "spike_kda": (2, 0),
    "spike_kda_arithmetic": (2, 0),
    "kda_gates_inside": (1, 0),
    "linear_attention": (2, 0),
    "token_shift": (1, 1),
    "two_ema": (2, 0),
    "mlstm": (3, 0),
    "lif_and_gla": (2, 0),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_loop_becomes_its_parts_with_the_same_results(name):
    family = KNOWN[name]
    init, given = inputs(family)
    backend = Apart()
    with torch.no_grad():
        got = compiled(family, backend, init, given)
    (found,) = backend.found
    assert isinstance(found, Distributed)
    assert (found.scans, found.delays) == PARTS[name]
    assert len(backend.scans) == found.scans
    assert backend.again == []
    for one, other in zip(got, eager(family, init, given), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_needs_no_state_is_done_for_all_steps_at_once():
    family = KNOWN["kda_gates_inside"]
    init, given = inputs(family)
    backend = Apart()
    with torch.no_grad():
        compiled(family, backend, init, given)
    assert not backend.calls_inside() & {"sigmoid", "linalg_vector_norm", "silu", "rsqrt", "exp"}


def test_a_loop_that_is_one_recurrence_stays_as_it_is():
    family = KNOWN["kda_einsum"]
    init, given = inputs(family)
    backend = Apart()
    with torch.no_grad():
        compiled(family, backend, init, given)
    assert backend.found == []


def _refused(step: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> str:
    texts: list[str] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        assert list(distribute(module)) == []
        (node,) = module.graph.find_nodes(op="call_function", target=SCAN)
        miss = why_unknown(node, Effects(node.graph).ambient(node))
        found = list(matches(module.graph, Effects(module.graph)))
        assert miss is not None
        assert not any(isinstance(each, Match) for each in found)
        texts.append(miss.reason.message)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda: scan(step, torch.zeros(2, 3), given), backend=backend, fullgraph=True)()
    return texts[0]


def test_random_numbers_are_not_drawn_all_at_once():
    def step(h, x):
        h = 0.9 * h + torch.rand_like(x[0])
        return h, h.clone()

    assert "draws random numbers" in _refused(step, (torch.randn(4, 2, 3),))


def test_a_nested_loop_is_not_looked_into():
    def step(h, x):
        inner, _ = scan(lambda c, y: (c + y, c.clone()), h, x[0])
        return 0.5 * inner, inner.clone()

    assert "is not looked into" in _refused(step, (torch.randn(4, 2, 2, 3),))


def test_tokens_that_are_dropped_may_hold_nan():
    family = KNOWN["spike_kda"]
    init, given = inputs(family)
    drop = given[-1]
    dirty = tuple(
        each if each is drop else each.masked_fill(drop.reshape(T, B, *(1 for _ in each.shape[2:])), float("nan"))
        for each in given
    )
    compiler = Compiler()
    with torch.no_grad():
        got = compiled(family, compiler, init, dirty)
    assert len(compiler.matches) == 2
    for one, other in zip(got, eager(family, init, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_state_that_never_changes_is_an_operand():
    def step(carry, x):
        S, gain = carry
        q, k, v, a, _ = x
        S = a[..., None] * S + (gain * k)[..., None] * v[..., None, :]
        return (S, gain.clone()), torch.einsum("bhk,bhkv->bhv", q, S)

    family = Family(step, (STATE, (B, H, K)), KNOWN["gla"].given, ("key",))
    init, given = inputs(family)
    compiler = Compiler()
    with torch.no_grad():
        got = compiled(family, compiler, init, given)
    assert compiler.structure == ("key",)
    assert compiler.misses == []
    for one, other in zip(got, eager(family, init, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewrites_are_proven_in_the_dtypes_of_models(dtype):
    for name in ("kda_einsum", "spike_kda", "mamba1"):
        family = KNOWN[name]
        init, given = inputs(family, dtype)
        compiler = Compiler(proves=True)
        with torch.no_grad():
            got = compiled(family, compiler, init, given)
        assert [(verdict.ok, verdict.reason) for verdict in compiler.verdicts] == [(True, "")] * len(family.structure)
        wide = [[each.double() if each.is_floating_point() else each for each in group] for group in (init, given)]
        for one, other in zip(got, eager(family, *wide), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=3e-2, atol=3e-2)
            assert one.dtype == dtype


def test_the_formula_says_what_was_found():
    family = KNOWN["spike_kda"]
    compiler = Compiler()
    with torch.no_grad():
        compiled(family, compiler, *inputs(family))
    first, second = (match.found.formula for match in compiler.matches)
    assert first == (
        "S[b,h,k,v] = where(given_5[b], 1, given_3[b,h,k]) S[b,h,k,v] + where(given_5[b], 0, given_1[b,h,k] given_4[b,h]) "
        "(given_2[b,h,v] - given_1[b,h,k'] given_3[b,h,k'] S[b,h,k',v]); "
        "y[b,h,v] = where(given_5[b], 0, given_0[b,h,k]) S[b,h,k,v]"
    )
    assert second == "S[b,h,v] = given_5[b] S[b,h,v] + scan_1[b,h,v]; y[b,h,v] = S[b,h,v]"
    assert V == 5


def test_loops_of_equal_layers_are_read_once(monkeypatch):
    family = KNOWN["kda_gates_inside"]
    traced: list[object] = []
    inner = scan_plan.trace_step

    def counting(*arguments: Any) -> Any:
        traced.append(arguments)
        return inner(*arguments)

    monkeypatch.setattr(scan_plan, "trace_step", counting)
    init, (q, k, v, a, b) = inputs(family)

    def layers(q: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            _, q = scan(family.step, init[0], (q.contiguous()[..., :K], k, v, a, b))
            q = torch.nn.functional.pad(q, (0, 1))
        return q

    compiler = Compiler()
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(layers, backend=compiler, fullgraph=True)(q)
    assert compiler.structure == ("key e",) * 3
    assert len(traced) <= 4  # of each the first, and the scan that is left of it
    want = q
    for _ in range(3):
        want = torch.nn.functional.pad(eager(family, init, (want[..., :K], k, v, a, b))[1], (0, 1))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_inputs_that_are_overwritten_behind_are_kept_for_gradients():
    """For all steps at once, an index is a gather, whose gradient looks at its operand."""

    def program(x, y, n):
        h = torch.ones_like(y.select(1, 0))
        for t in range(x.shape[1]):
            h = h + torch.index_select(y[:, t], 1, n[0, :1])
        y[:, 1:] = x[:, :-1]
        return h

    backend = Traced(loops="roll")
    x, leaf, n = torch.randn(2, 12, 3), torch.randn(2, 12, 3, requires_grad=True), torch.zeros(2, 12, dtype=torch.long)
    gradients = []
    for run in (program, torch.compile(program, backend=backend)):
        gradients.append(torch.autograd.grad(run(x, leaf.clone(), n).sum(), leaf)[0])
    assert not backend.report.events
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()
    torch.testing.assert_close(*gradients)


#: Updates of a state that no kernel knows.
OPAQUE = {
    "log-space maximum": lambda m, f, i: torch.maximum(m + f, i),
    "tanh": lambda m, f, i: torch.tanh(m) * f + i,
    "reset": lambda m, f, i: torch.where(m > 0.5, i, m + f),
}
#: What an affine state reads of it: before and after the step.
READS = {
    "both": lambda before, after, h, i: torch.exp(before - after).clamp(max=2.0) * h + torch.exp(i - after),
    "after": lambda before, after, h, i: torch.sigmoid(after) * h + i,
    "before": lambda before, after, h, i: 0.5 * h + before * i,
}


@pytest.mark.sampled
@pytest.mark.parametrize("is_graded", [False, True])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("update", OPAQUE)
def test_what_no_kernel_takes_of_a_long_loop_runs_step_by_step_again(update, reads, is_graded, monkeypatch):
    for name, number in {"WORTHWHILE_CALLS": 80, "MANY_CALLS": 100}.items():
        monkeypatch.setattr(f"lz_compile.passes.loops.roll.worthwhile.{name}", number)

    def program(f, i, start):
        m, h, late, out = start, start * 0.5, start * 0, torch.zeros_like(f)
        for t in range(f.shape[1]):
            after = OPAQUE[update](m, f[:, t], i[:, t])
            h = READS[reads](m, after, h, i[:, t])
            out[:, t] = (h * after + late).sin() * i[:, t].cos() + (h - m).sigmoid()
            late, m = m, after
        return out, m, h, late

    generator = torch.Generator().manual_seed(7)
    f, i = (torch.randn(2, 12, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    start = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    backend = Traced(loops="auto", lock={"scan": "lz.rolled_scan"})
    found = []
    for run in (program, torch.compile(program, backend=backend, fullgraph=True)):
        torch._dynamo.reset()
        leaves = [each.clone().requires_grad_(is_graded) for each in (f, i, start)]
        results = run(*leaves)
        gradients = torch.autograd.grad(sum(each.sum() for each in results), leaves) if is_graded else ()
        found.append(((*results, *gradients), [each.stride() for each in results]))
    assert not backend.report.events, backend.why_not()
    assert [loop.rolled for loop in backend.report.loops] == [True]
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()
    scans = [node for graph in backend.graphs for node in graph.graph.nodes if node.target in (SCAN, checkpointed_scan)]
    assert len(scans) == is_graded  # a backward of single steps takes Inductor far longer
    (want, strides), (got, found_strides) = found
    assert strides == found_strides
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def wkv(k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """RWKV's weighted mean, with a running maximum."""

    def step(states: tuple[torch.Tensor, ...], now: tuple[torch.Tensor, ...]) -> Any:
        above, below, most = states
        after = torch.maximum(most + w, now[0])
        kept, new = torch.exp(most + w - after), torch.exp(now[0] - after)
        above, below = kept * above + new * now[1], kept * below + new
        return (above, below, after), above / below

    zero = torch.zeros_like(k[0])
    return scan(step, (zero, zero.clone(), zero - 1e38), (k, v))[1]


@pytest.mark.parametrize(("threads", "is_graded", "scans"), [(2, False, 1), (16, False, 3), (2, True, 3)])
def test_a_running_maximum_is_one_loop_of_few_threads_where_nothing_is_differentiated(
    threads, is_graded, scans, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    k, v, w = torch.randn(9, 2, 3, requires_grad=is_graded), torch.randn(9, 2, 3), -torch.rand(3)
    torch._dynamo.reset()
    backend = Apart()
    found = torch.compile(wkv, backend=backend, fullgraph=True)(k, v, w)
    assert len(backend.scans) == scans
    weights = torch.stack([(k + w * (t - torch.arange(9))[:, None, None])[: t + 1].logsumexp(0) for t in range(9)])
    wanted = [
        (torch.exp(k + w * (t - torch.arange(9))[:, None, None] - weights[t]) * v)[: t + 1].sum(0) for t in range(9)
    ]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-4, atol=1e-5)


def gru(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Two layers, the second of which reads the first."""

    def step(states: tuple[torch.Tensor, ...], now: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        first = _cell(states[0], now, w, u)
        second = _cell(states[1], first, w, u)
        return (first.clone(), second.clone()), second.clone()

    init = (x.new_zeros(x.shape[1:]), x.new_ones(x.shape[1:]))
    return scan(step, init, x)[1]


def _cell(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    reset, update, new = (x @ w).chunk(3, -1)
    held = (h @ u).chunk(3, -1)
    gate = torch.sigmoid(update + held[1])
    return (1 - gate) * torch.tanh(new + torch.sigmoid(reset + held[0]) * held[2]) + gate * h


def _loop(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    first, second, found = x.new_zeros(x.shape[1:]), x.new_ones(x.shape[1:]), []
    for now in x:
        first = _cell(first, now, w, u)
        second = _cell(second, first, w, u)
        found.append(second)
    return torch.stack(found)


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [12, 200, 300])
@pytest.mark.parametrize("scale", [1.0, 0.25], ids=["chaotic", "calm"])
def test_products_without_the_state_leave_loops_that_no_kernel_knows(steps, scale):
    generator = torch.Generator().manual_seed(0)
    x, w, u = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((steps, 2, 8), (8, 24), (8, 24))
    )
    leaves = [x.requires_grad_(), w.mul_(scale).requires_grad_(), u.mul_(scale).requires_grad_()]
    backend = Apart()
    torch._dynamo.reset()
    got = torch.compile(gru, backend=backend, fullgraph=True)(*leaves)
    assert [(each.scans, each.delays) for each in backend.found] == [(2, 0)]
    assert backend.again == []
    bodies = [getattr(backend.module, str(node.args[0].target)) for node in backend.scans]
    assert [sum("mm" in str(node.target) for node in body.graph.nodes) for body in bodies] == [1, 1]
    want = _loop(*leaves)
    torch.testing.assert_close(got[:20], want[:20], rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(each[:12].sin().sum(), leaves) for each in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-7)


def test_products_stay_where_they_would_take_far_more_memory():
    def step(h: torch.Tensor, now: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = now
        h = torch.tanh(h + torch.bmm(k[:, :, None], v[:, None]))
        return h, torch.bmm(q[:, None], h)[:, 0]

    backend = Apart()
    torch._dynamo.reset()
    given = tuple(torch.randn(20, 2, 64) for _ in range(3))
    with torch.no_grad():
        torch.compile(lambda *xs: scan(step, torch.zeros(2, 64, 64), xs)[1], backend=backend, fullgraph=True)(*given)
    assert backend.found == []
    (scan_,) = backend.scans
    body = getattr(backend.module, str(scan_.args[0].target))
    assert sum(node.target is torch.bmm for node in body.graph.nodes) == 2


def _turned(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        turned = node.graph.call_method("flip", (node.args[2][0], 0))
    turned.meta = {"example_value": node.args[2][0].meta["example_value"].flip(0)}
    node.args = (*node.args[:2], [turned], *node.args[3:])


def test_a_loop_that_amplifies_rounding_is_still_refuted_where_it_is_another_one():
    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        (node,) = module.graph.find_nodes(op="call_function", target=SCAN)

        def other() -> None:
            first, second = node.args[1]
            node.args = (node.args[0], [second, first], *node.args[2:])

        with pytest.raises(RefutedError, match="is off by"):
            apply(module, Rewrite("beginning otherwise", other))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(gru, backend=backend, fullgraph=True)(
            torch.randn(200, 2, 8), torch.randn(8, 24), torch.randn(8, 24)
        )


@pytest.mark.parametrize("steps", [256, 257])
def test_what_is_done_to_a_long_loop_is_tried_on_few_steps(steps):
    told: list[Any] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        (node,) = module.graph.find_nodes(op="call_function", target=SCAN)
        told.append(shown_on_few_steps(node, Ambient(), "nothing", lambda _: None))
        told.append(shown_on_few_steps(node, Ambient(grad=False), "nothing", lambda _: None))
        if told[0]:
            with pytest.raises(RefutedError):
                shown_on_few_steps(node, Ambient(), "other slices", _turned)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(gru, backend=backend, fullgraph=True)(
            torch.randn(steps, 2, 8), torch.randn(8, 24), torch.randn(8, 24)
        )
    assert told == ["held against the loop on 7 steps" if steps > 256 else "", ""]
