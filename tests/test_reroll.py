"""Loops that Dynamo unrolls become scans: in any spelling, with the same results, or are left alone with a reason."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from loop_spellings import spelled
from torch import fx
from torch.utils import _pytree as pytree

import lz_compile
from lz_compile import reports
from lz_compile.lowering import inductor
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.loops.roll.reroll import IsSpecial, RolledLoop, never, reroll
from lz_compile.passes.loops.roll.scan_outputs import attach_states

B, T, D = 3, 8, 5


class Rolling:
    """A backend that rolls loops, also those of steps, and runs eagerly."""

    def __init__(self, policy: str = "roll", is_special: IsSpecial = never) -> None:
        self._policy = policy
        self._is_special = is_special
        self.loops: list[RolledLoop] = []
        self.misses: list[NearMiss] = []
        self.module: fx.GraphModule | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for child in module.modules():
            if isinstance(child, fx.GraphModule):
                found = reroll(child, self._policy, self._is_special)
                attach_states(child)
                child.graph.lint()
                child.recompile()
                self.loops.extend(each for each in found if isinstance(each, RolledLoop))
                self.misses.extend(each for each in found if isinstance(each, NearMiss))
        self.module = module
        return module.forward

    @property
    def steps(self) -> list[int]:
        """The numbers of steps of what was rolled."""
        return [loop.steps for loop in self.loops if loop.scan is not None]

    @property
    def reasons(self) -> str:
        """Everything that speaks against rolling."""
        return "\n".join(f"{miss.reason} -> {miss.edit}" for miss in self.misses)

    @property
    def calls(self) -> int:
        """How many calls there are in the graph, those in steps not counted."""
        assert self.module is not None
        return sum(node.op in ("call_function", "call_method") for node in self.module.graph.nodes)


def rolled(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool | None = None, **options: Any) -> Rolling:
    """Run both and compare; what was rolled."""
    torch._dynamo.reset()
    backend = Rolling(**options)
    expected = function(*[x.clone() for x in inputs])
    found = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*[x.clone() for x in inputs])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert [x.stride() for x in pytree.tree_leaves(found)] == [x.stride() for x in pytree.tree_leaves(expected)]
    return backend


def sequences(*shape: int, count: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape or (B, T, D), dtype=torch.float64).sigmoid().to(dtype) for _ in range(count)]


def zeros() -> torch.Tensor:
    return torch.zeros(B, D, dtype=torch.float64)


# ---- spellings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_is_rolled_however_it_is_spelled(seed):
    case = spelled(seed)
    backend = rolled(case.function, *case.inputs)
    assert backend.steps == [case.steps], (case.notes, backend.reasons)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 72))
def test_many_more_loops_are_rolled(seed):
    case = spelled(seed, length=6 + seed % 5)
    if case.steps >= 4:
        assert rolled(case.function, *case.inputs).steps == [case.steps], case.notes


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_gradients_through_a_rolled_loop_are_those_of_the_loop(seed):
    case = spelled(seed, grad=True, length=6)
    backend = Rolling()
    found = pytree.tree_leaves(torch.compile(case.function, backend=backend, fullgraph=True)(*case.inputs))
    expected = pytree.tree_leaves(case.function(*case.inputs))
    assert backend.steps == [case.steps], (case.notes, backend.reasons)
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(
            [x for x in outputs if x.requires_grad],
            case.inputs,
            [w for x, w in zip(outputs, weights, strict=True) if x.requires_grad],
            allow_unused=True,
            materialize_grads=True,
        )
        for outputs in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


class Spellings:
    """Loops, each with the numbers of steps that are to be found, those of outer loops first."""

    @staticmethod
    def begins_with_a_number(x, a, expect=(8,)):
        h, kept = 0, []
        for t in range(T):
            h = a[:, t] * h + x[:, t]
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def begins_with_another_shape(x, a, expect=(7,)):
        h, kept = torch.zeros(1, D, dtype=x.dtype), []
        for t in range(T):
            h = a[:, t] * h + x[:, t]
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def first_step_apart(x, a, expect=(7,)):
        kept = [x[:, 0]]
        for t in range(1, T):
            kept.append(a[:, t] * kept[-1] + x[:, t])
        return torch.stack(kept, 1)

    @staticmethod
    def last_step_does_more(x, a, expect=(8,)):
        h, kept = zeros(), []
        for t in range(T):
            h = a[:, t] * h - x[:, t]
            if t == T - 1:
                h = h.relu() + 1
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def two_steps_back(x, a, expect=(8,)):
        one, two, kept = zeros(), zeros() + 1, []
        for t in range(T):
            one, two = torch.tanh(one * 0.5 + 0.3 * two + x[:, t]), one
            kept.append(one)
        return torch.stack(kept, 1), two

    @staticmethod
    def counter_as_a_factor(x, a, expect=(8,)):
        h, kept = zeros(), []
        for t in range(T):
            h = h * 0.9**t + x[:, t] * (t + 1)
            kept.append(h / (1 - 0.9 ** (t + 1)))
        return torch.stack(kept, 1)

    @staticmethod
    def period_of_two(x, a, expect=(4,)):
        h, kept = zeros(), []
        for t in range(T):
            h = a[:, t] * h + x[:, t]
            if t % 2:
                h = h * 0.5
            kept.append(h)
        return torch.stack(kept, 1), h

    @staticmethod
    def two_cells_of_one_kind(x, a, expect=(8,)):
        one, two, kept = zeros(), zeros(), []
        for t in range(T):
            one = torch.tanh(one + x[:, t])
            two = torch.tanh(two + one)
            kept.append(two)
        return torch.stack(kept, 1)

    @staticmethod
    def one_loop_after_another(x, a, expect=(8, 8)):
        h, g, there, back = zeros(), zeros(), [], []
        for t in range(T):
            h = a[:, t] * h + x[:, t]
            there.append(h)
        for t in reversed(range(T)):
            g = a[:, t] * g + there[t]
            back.append(g)
        return torch.stack(back[::-1], 1)

    @staticmethod
    def computed_before_the_loop(x, a, expect=(8,)):
        ready = [F.relu(x[:, t] - 0.5).cos() for t in range(T)]
        h, kept = zeros(), []
        for t in range(T):
            h = a[:, t] * h + ready[t]
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def in_some_order(x, a, expect=(8,)):
        h, kept = zeros(), []
        for t, other in enumerate([3, 1, 0, 2, 7, 6, 4, 5]):
            h = a[:, other] * h + x[:, t]
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def overlapping_windows(x, a, expect=(6,)):
        h, kept = zeros(), []
        for t in range(T - 2):
            h = 0.5 * h + x[:, t : t + 3].mean(1)
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def state_overwritten_and_returned(x, a, expect=(8,)):
        h = zeros()
        for t in range(T):
            h.mul_(a[:, t])
            h.add_(x[:, t])
        return h, h + 1

    @staticmethod
    def shift_register_overwritten(x, a, expect=(8,)):
        s, kept = torch.zeros(B, 4, D, dtype=x.dtype), []
        for t in range(T):
            s[:, :-1] = s[:, 1:].clone()
            s[:, -1] = x[:, t]
            kept.append((s * a[:, t : t + 1]).sum(1))
        return torch.stack(kept, 1), s

    @staticmethod
    def part_of_a_buffer(x, a, expect=(8,)):
        h, out = zeros(), torch.full((B, T + 2, D), 7.0, dtype=x.dtype)
        for t in range(T):
            h = a[:, t] * h + x[:, t]
            out[:, t + 1] = h
        return out * 2, h

    @staticmethod
    def every_other_entry_backwards(x, a, expect=(8,)):
        h, out = zeros(), torch.zeros(2 * T, B, D, dtype=x.dtype)
        for t in reversed(range(T)):
            h = a[:, t] * h + x[:, t]
            out[2 * t] = h
            out[2 * t + 1] = -h
        return out

    @staticmethod
    def states_read_behind_the_loop(x, a, expect=(8,)):
        h, states, kept = zeros(), [], []
        for t in range(T):
            h = a[:, t] * h - x[:, t]
            states.append(h)
            kept.append(h * 2)
        return torch.stack(kept, 1), states[3], states[-1] + states[1], torch.stack(states[2:6])

    @staticmethod
    def overwritten_behind_the_loop(x, a, expect=(8,)):
        h = zeros()
        for t in range(T):
            h = a[:, t] * h - x[:, t]
        k = h.t()
        h.add_(1)
        return h, k * 2

    @staticmethod
    def the_token_before(x, a, expect=(7,)):  # of the last step, nobody reads what it would hand on
        h, before, kept = zeros(), zeros(), []
        for t in range(T):
            h, before = a[:, t] * h + x[:, t] - before, x[:, t]
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def one_step_differs_in_the_middle(x, a, expect=(4, 4)):
        h, kept = zeros(), []
        for t in range(T + 1):
            now = x[:, t % T]
            h = (now - a[:, t % T] * h) if t == T // 2 else (a[:, t % T] * h - now)
            kept.append(h)
        return torch.stack(kept, 1)

    @staticmethod
    def written_into_an_input(x, a, expect=(8,)):
        h = zeros()
        for t in range(T):
            h = a[:, t] * h + 1
            x[:, t] = h
        return x * 1

    @staticmethod
    def both_ways_in_one_loop(x, a, expect=(8,)):
        there, back, one, two = zeros(), zeros(), [], []
        for t in range(T):
            there = a[:, t] * there + x[:, t]
            back = a[:, T - 1 - t] * back + x[:, T - 1 - t]
            one.append(there)
            two.append(back)
        return torch.stack(one, 1), torch.stack(two[::-1], 1)

    @staticmethod
    def running_mean_by_lerp(x, a, expect=(8,)):
        h = zeros()
        for t in range(T):
            h = torch.lerp(h, x[:, t], 1 / (t + 1))
        return h

    @staticmethod
    def counter_as_alpha(x, a, expect=(8,)):
        h = zeros()
        for t in range(T):
            h = torch.sub(h * a[:, t], x[:, t], alpha=0.5 * t).add_(a[:, t], alpha=t)
        return h


CASES = [getattr(Spellings, name) for name in vars(Spellings) if not name.startswith("_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_loop_of_this_kind_is_rolled(case):
    backend = rolled(case, *sequences())
    assert sorted(backend.steps) == sorted(case.__defaults__[0]), backend.reasons


def test_loops_over_chunks_with_a_loop_inside_are_rolled_twice():
    def function(x, w):
        state, out = zeros(), torch.zeros_like(x)
        for c in range(4):
            chunk, h, kept = x[:, 6 * c : 6 * c + 6], zeros(), []
            for j in range(6):
                h = 0.5 * h + chunk[:, j] * state
                kept.append(h)
            state = torch.tanh(state @ w + 1) + h
            out[:, 6 * c : 6 * c + 6] = torch.stack(kept, 1)
        return out, state

    backend = rolled(function, *sequences(B, 24, D, count=1), torch.randn(D, D, dtype=torch.float64) / D)
    assert backend.steps[0] == 4
    assert backend.steps[1] >= 5
    assert backend.calls < 20


def test_a_symbolic_batch_stays_symbolic():
    def function(x, a):
        h, kept = torch.zeros(x.shape[0], D, dtype=x.dtype), []
        for t in range(T):
            h = a[:, t] * h + x[:, t].view(x.shape[0], -1)
            kept.append(h)
        return torch.stack(kept, 1)

    torch._dynamo.reset()
    backend = Rolling()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for batch in (3, 6, 7):
        x, a = sequences(batch, T, D)
        torch.testing.assert_close(compiled(x, a), function(x, a), rtol=1e-12, atol=1e-12)
    assert backend.steps == [T]


# ---- what is left alone ------------------------------------------------------------------------------------------------


def drops(x, a):
    h = zeros()
    for t in range(T):
        h = a[:, t] * h - F.dropout(x[:, t], 0.5, training=True) * 0
    return h


def grows(x, a):
    h = zeros()
    for t in range(T):
        h = h * 0.5 + x[:, : t + 1].sum(1)
    return h


def switches_gradients(x, a):
    h = zeros()
    for t in range(T):
        with torch.no_grad():
            h = a[:, t] * h
        h = h + x[:, t]
    return h


def overwrites_a_part(x, a):
    h, s = x.clone(), zeros()
    for t in range(T):
        h[:, 0] *= a[:, t]
        s = s * 0.5 + h[:, 0]
    return s, h


def overwrites_an_input(x, a):
    h = x[:, 0] * 1
    for t in range(T):
        x.mul_(a).add_(h.unsqueeze(1))
        h = x[:, t].clone()
    return x * 1


def overwrites_through_two_views(x, a):
    h = x.clone()
    for t in range(1, T):
        view = h[:, t].t()
        h[:, t] += a[:, t] * h[:, t - 1]
        h[:, t - 1] = view.t()
    return h


def moves_in_two_places(x, a):
    h, table = zeros(), x.unsqueeze(1) * x.unsqueeze(2)
    for t in range(T):
        h = a[:, t] * h + table[:, t, t]
    return h


def counts_in_a_size(x, a):
    h = zeros()
    for t in range(T):
        h = torch.roll(h, t, 1) + x[:, t]
    return h


def overwritten_among_the_kept(x, a):
    h, kept = zeros(), []
    for t in range(T):
        h = a[:, t] * h.cos() + x[:, t]
        kept.append(h)
    kept[3].add_(1)
    return torch.stack(kept, 1)


REFUSED = [
    (drops, "[RANDOM] dropout"),
    (grows, "[SHAPE_CHANGES]"),
    (switches_gradients, "[MODE_CHANGES_INSIDE]"),
    (overwrites_a_part, "through a view"),
    (overwrites_an_input, "[INPUT_OVERWRITTEN]"),
    (overwrites_through_two_views, "[OPERAND_MUTATED]"),
    (moves_in_two_places, "[COUNTER_USED] getitem"),
    (counts_in_a_size, "[COUNTER_USED] roll"),
    (overwritten_among_the_kept, "[OVERWRITTEN_LATER]"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_no_scan_is_left_alone_with_a_reason(function, reason):
    backend = Rolling()
    x, a = sequences()
    torch.manual_seed(0)
    expected = function(x.clone(), a)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x.clone(), a), expected)
    assert not backend.steps
    assert reason in backend.reasons


def test_what_was_computed_before_a_loop_under_other_modes_stays_there():
    def function(x, a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gates = [x[:, t] @ a for t in range(T)]
        h = torch.zeros_like(x[:, 0])
        for t in range(T):
            h = gates[t] * h + x[:, t]
        return h

    backend = rolled(function, torch.rand(B, T, D), torch.rand(D, D))
    assert backend.steps == [T], backend.reasons


def test_layers_are_no_loop_and_no_near_miss():
    layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(6))

    def function(x):
        for layer in layers:
            x = x + layer(x).relu()
        return x

    backend = Rolling()
    torch.compile(function, backend=backend)(torch.randn(2, D))
    assert not backend.loops
    assert not backend.misses


def faulty(fault: str, at: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """A loop of which one step is not like the others, or whose state or index is used in another way."""

    def function(x: torch.Tensor, a: torch.Tensor) -> Any:
        h, kept, states = zeros(), [], []
        order = [at if fault == "index" and t == 5 else t for t in range(T)]
        for t in order:
            scale = 0.25 if fault == "constant" and t == at else 0.5
            if fault == "swapped" and t == at:
                h = torch.sub(x[:, t], h * scale)
            elif fault == "other call" and t == at:
                h = torch.sub(h.cos() * scale, x[:, t])
            elif fault == "other slice" and t == at:
                h = torch.sub(h * scale, a[:, t])
            else:
                h = torch.sub(h * scale, x[:, t])
            if fault == "more" and t == at:
                h = h * 2
            if fault == "data" and t == at:
                h = h + x.index_select(1, (x[0, t, :1] > 0.5).long()).squeeze(1)
            states.append(h)
            kept.append(h.sin())
        if fault == "overwritten":
            states[at].mul_(2)
        return torch.stack(kept, 1), states[at] if fault == "used" else h

    return function


FAULTS = ("none", "swapped", "other call", "other slice", "constant", "more", "data", "index", "used", "overwritten")


@hypothesis_settings(max_examples=20)
@given(st.sampled_from(FAULTS), st.integers(0, T - 1))
def test_a_loop_with_a_fault_planted_in_it_computes_the_same(fault, at):
    backend = rolled(faulty(fault, at), *sequences())
    if fault in ("none", "used", "index", "constant"):
        assert backend.steps == [T], backend.reasons
    assert all(steps <= T for steps in backend.steps)


# ---- policy, report, failures ------------------------------------------------------------------------------------------


def moving_average(length: int, more: int = 0) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(length):
            h = a[:, t] * h + x[:, t]
            for _ in range(more):
                h = h.sin()
        return h

    return function


STEPS = {
    "product": lambda a, h: a @ h,
    "sum": lambda a, h: a * (a * h).sum(-1, keepdim=True),
    "pointwise": lambda a, h: a * h,
}


@pytest.mark.parametrize(("steps", "kind", "policy", "has_gradient", "is_rolled"), [
    (8, "product", "auto", False, True), (7, "product", "auto", False, False), (17, "pointwise", "auto", False, False),
    (17, "pointwise", "keep", False, True), (15, "sum", "auto", False, False), (16, "sum", "auto", False, True),
    (8, "sum", "auto", True, True), (8, "sum", "keep", False, True),
])  # fmt: skip
def test_by_default_a_kernel_takes_the_place_of_many_launches_only(steps, kind, policy, has_gradient, is_rolled):
    def function(x, a):
        h, found = x.new_zeros(B, D, D), []
        for t in range(steps):
            h = STEPS[kind](a[:, t], h) + x[:, t]
            found.append(h)
        return torch.stack(found, 1)

    torch._dynamo.reset()
    backend = Rolling(policy, lambda _scan, _ambient: True)
    x, a = sequences(B, steps, D, D)
    torch.compile(function, backend=backend)(x.requires_grad_(has_gradient), a)
    assert backend.steps == ([steps] if is_rolled else [])


def test_a_loop_is_rolled_where_its_graph_would_take_minutes_to_compile(monkeypatch):
    function, inputs = moving_average(13, more=18), sequences(B, 13, D)
    assert [loop.kept.code for loop in rolled(function, *inputs, policy="auto").loops] == ["LOOP_SHORT"]
    monkeypatch.setattr("lz_compile.passes.loops.roll.worthwhile.MANY_CALLS", 260)
    assert rolled(function, *inputs, policy="auto").steps == [13]


def test_loops_that_make_constants_are_no_loops_that_were_missed():
    def windows(x):
        mask, count = torch.zeros(1, 16, 16, 1), 0
        for rows in (slice(0, -4), slice(-4, -2), slice(-2, None)):
            for columns in (slice(0, -4), slice(-4, -2), slice(-2, None)):
                mask[:, rows, columns, :] = count
                count += 1
        return x + mask[0, ..., 0]

    def bands(x):
        mask = x.new_full((16, 16), float("-inf"))
        for row in range(16):
            mask[row, max(0, row - 3) : row + 1] = 0
        return (x + mask).softmax(-1)

    def grown(x):
        parts = [x[0]]
        for row in range(1, 16):
            parts.append(torch.cat([parts[-1], x[row]]))
        return parts[-1]

    for function in (windows, bands):
        assert not rolled(function, torch.randn(16, 16)).misses
    assert rolled(grown, torch.randn(16, 16)).misses


def test_only_what_goes_along_a_dimension_is_a_loop_that_was_missed():
    convolutions = torch.nn.Sequential(
        *(each for _ in range(6) for each in (torch.nn.Conv1d(4, 4, 3, stride=2), torch.nn.GELU()))
    )
    tables = torch.nn.ModuleList(torch.nn.Embedding(9, 4) for _ in range(8))

    def pooled(x):
        for _ in range(5):
            x = x.unflatten(-1, (-1, 2)).amax(-1)
        return x

    def embedded(x):
        index = (x * 3).long().clamp(0, 8)
        return sum(table(index[:, place]) for place, table in enumerate(tables))

    def joined(x):
        held, kept = x[:, 0], []
        for step in range(1, 9):
            held = torch.cat([held, x[:, step]], -1)
            kept.append(held.sum(-1))
        return torch.stack(kept)

    for function, shape in ((convolutions, (2, 4, 400)), (pooled, (2, 64)), (embedded, (2, 8))):
        assert not rolled(function, torch.randn(*shape)).misses
    assert rolled(joined, torch.randn(2, 9, 3)).misses


def test_short_loops_are_kept_unless_their_step_is_special():
    function, inputs = moving_average(17), sequences(B, 17, D)
    backend = rolled(function, *inputs, policy="keep")
    assert [loop.kept.code for loop in backend.loops] == ["LOOPS_KEPT"]
    assert "nothing is known of its step" in backend.loops[0].kept.message
    function, few = moving_average(13), sequences(B, 13, D)
    (loop,) = rolled(function, *few, policy="keep", is_special=lambda *_: pytest.fail("it is too short")).loops
    assert "kernels are for loops over time, of 8 steps or more (16 where none has a product)" in loop.kept.message
    function = moving_average(17)
    asked: list[fx.Node] = []

    def is_special(scan: fx.Node, _ambient: object) -> bool:
        asked.append(scan)
        return True

    assert rolled(function, *inputs, policy="keep", is_special=is_special).steps == [17]
    (scan,) = asked
    step = getattr(scan.graph.owning_module, scan.args[0].target)
    assert [len(operands) for operands in scan.args[1:]] == [1, 2, 0]
    assert len(step.graph.find_nodes(op="placeholder")) == 3


def test_long_loops_are_rolled_unless_all_are_to_be_kept(monkeypatch):
    monkeypatch.setattr("lz_compile.passes.loops.roll.worthwhile.MANY_CALLS", 260)
    function, inputs = moving_average(13, more=18), sequences(B, 13, D)
    assert rolled(function, *inputs, policy="auto").steps == [13]
    kept = rolled(function, *inputs, policy="keep")
    assert not kept.steps
    assert [loop.kept.code for loop in kept.loops] == ["LOOPS_KEPT"]


def test_the_report_tells_of_loops():
    def function(x, a):
        h = zeros()
        for t in range(T):
            h = torch.tanh(a[:, t] * h) + x[:, t]
        return h

    backend = Rewriting(loops="roll")
    torch.compile(function, backend=backend)(*sequences())
    (loop,) = backend.report.loops
    assert loop.rolled
    assert (loop.steps, loop.calls, loop.carried, loop.streams) == (8, 3, ("float64[3, 5]",), ("slices", "slices"))
    assert backend.report.to_dict()["graphs"][0]["loops"][0]["steps"] == T


def filled_in_parts(length):
    """Short loops that fill one tensor, one after the other."""

    def function(x, a):
        out, h = torch.zeros_like(x), zeros()
        for t in range(length):
            h = torch.tanh(h) if t % 7 else x[:, t].sin()
            out[:, t] = h
        return out

    return function


@pytest.mark.parametrize("kind", [moving_average, filled_in_parts])
def test_growth_with_the_number_of_steps_is_linear(kind):
    def cost(length: int) -> int:
        modules: list[fx.GraphModule] = []

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            modules.append(module)
            return module.forward

        torch._dynamo.reset()
        torch.compile(kind(length), backend=backend)(*sequences(B, length, D))
        made = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal made
            made += event == "call"

        gc.collect()  # what earlier tests left behind runs finalisers, which would be counted
        gc.disable()
        sys.setprofile(count)
        try:
            found = reroll(modules[0], "roll" if kind is moving_average else "keep")
        finally:
            sys.setprofile(None)
            gc.enable()
        assert sum(loop.steps for loop in found) == (length if kind is moving_average else length // 7 * 6)
        return made

    assert cost(112) - cost(56) < 2.7 * (cost(56) - cost(28))


def test_what_inductor_cannot_compile_is_compiled_unrolled(monkeypatch):
    compile_graph = inductor.compile_graph

    def without_scans(module: fx.GraphModule, *rest: Any, **named: Any) -> Any:
        if module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
            raise RuntimeError("no scans here")
        return compile_graph(module, *rest, **named)

    monkeypatch.setattr(inductor, "compile_graph", without_scans)

    def function(x, a):
        h = zeros()
        for t in range(4):
            h = torch.tanh(a[:, t] * h) + x[:, t]
        return h

    inputs = sequences()
    compiled = torch.compile(function, backend="layerzero", options={"layerzero.loops": "roll"})
    torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-12, atol=1e-12)
    assert [event.code for event in reports()[-1].events] == ["COMPILE_FAILED"]
    assert [loop.rolled for loop in reports()[-1].loops] == [False]


@pytest.mark.parametrize("is_training", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_rolled_loop_goes_through_inductor(is_training):
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=is_training)

    def function(x, a):
        h, kept = zeros(), []
        for t in range(T):
            h = torch.tanh(F.linear(h, weight) * a[:, t]) + x[:, t]
            kept.append(h * 0.9**t)
        return torch.stack(kept, 1)

    inputs = [x.requires_grad_(is_training) for x in sequences()]
    found = torch.compile(function, backend="layerzero", options={"layerzero.loops": "roll"})(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert [loop.rolled for loop in lz_compile.reports()[-1].loops] == [True]
    assert not reports()[-1].events
    if is_training:
        ways = torch.randn_like(expected)
        gradients = [torch.autograd.grad(y, [*inputs, weight], ways) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


#: Steps that detach what they read of a state, which has its gradient another way, or only passes one on.
DETACHED = {
    "a spike resets": lambda m, s, x: (0.9 * m + x - s.detach(), torch.sigmoid(4 * (m - 1)), s),
    "a gate by the last value": lambda m, s, x: (m * ((k := x.tanh()) * s.detach()).sigmoid() + k, k, m),
    "a trace": lambda m, s, x: (torch.tanh(m + x), 0.9 * s.detach() + m, m * s),
    "a running mean": lambda m, s, x: (n := torch.tanh(m + x), 0.9 * s.detach() + 0.1 * n, m),
}


@pytest.mark.parametrize("name", DETACHED)
def test_loops_that_detach_a_state_are_rolled_where_no_zeros_are_sent(name):
    def function(x, a):
        m, s, outs = x[:, 0] * 0, x[:, 0] * 0, []
        for t in range(T):
            m, s, out = DETACHED[name](m, s, x[:, t])
            outs.append(out)
        return torch.stack(outs, 1), m, s

    backend = Rewriting(loops="roll")
    leaf, a = sequences()
    found = []
    for run in (function, torch.compile(function, backend=backend)):
        x = leaf.clone().requires_grad_()
        results = run(x, a)
        found.append((*results, torch.autograd.grad(sum(each.sum() for each in results), x)[0]))
    assert [loop.rolled for loop in backend.report.loops] == [True], backend.why_not()
    torch.testing.assert_close(*found)


#: What a loop computes besides its state, and nobody differentiates: of the rows it stores, a result of its own.
UNDIFFERENTIATED = {
    "stored for nobody": lambda rows: (),
    "read detached": lambda rows: (rows[:, 1:].detach() * 2,),
    "compared": lambda rows: (rows > 0,),
    "read under no_grad": lambda rows: (_without_gradients(rows),),
}


@torch.no_grad()
def _without_gradients(rows):
    return rows.cumsum(1)


@pytest.mark.sampled
@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("name", UNDIFFERENTIATED)
def test_what_nobody_differentiates_of_a_loop_gets_no_zeros(name, is_stacked):
    """Neither zeros for ``weight``, which eager code gives nothing, nor NaN for ``x``: zero times the slope of a root at zero."""

    def function(x, a, weight):
        h, rows, stored = x[:, 0], [], torch.zeros_like(x)
        for t in range(T):
            h = torch.tanh(a[:, t] * h) + x[:, t]
            row = torch.sqrt(F.linear(h - h, weight))
            if is_stacked:
                rows.append(row)
            else:
                stored[:, t] = row
        return h, *UNDIFFERENTIATED[name](torch.stack(rows, 1) if is_stacked else stored)

    backend = Rewriting(loops="roll")
    leaf, a = sequences()
    found = []
    for run in (function, torch.compile(function, backend=backend)):
        x, weight = leaf.clone().requires_grad_(), torch.ones(D, D, dtype=torch.float64, requires_grad=True)
        h, *rest = run(x, a, weight)
        assert not any(each.requires_grad for each in rest)
        found.append((h, *rest, *torch.autograd.grad(h.sum(), [x, weight], allow_unused=True)))
    assert [loop.rolled for loop in backend.report.loops] == [True], backend.why_not()
    assert found[0][-1] is found[1][-1] is None
    torch.testing.assert_close(found[1][:-1], found[0][:-1])


def test_a_step_with_a_check_that_gives_nothing_stays_and_says_so():
    def function(x, a):
        h, rows = x.new_zeros(B, D, D), []
        for t in range(T):
            h = torch.linalg.inv(3 * torch.eye(D, dtype=x.dtype) + h + a[:, t, None] * x[:, t, :, None] / 9)
            rows.append(h)
        return torch.stack(rows, 1)

    backend = Rewriting(loops="roll")
    x, a = sequences()
    torch.testing.assert_close(torch.compile(function, backend=backend)(x, a), function(x, a))
    assert not backend.report.loops
    assert [miss.reason.code for miss in backend.report.near_misses] == ["EFFECT_INSIDE"], backend.why_not()


def test_rows_without_a_gradient_are_stored_without_one():
    def function(x, a):
        h, stored = x[:, 0], torch.zeros_like(a)
        for t in range(T):
            h = torch.tanh(a[:, t] * h) + x[:, t]
            stored[:, t] = a[:, t - 1].cos()
        return h, stored

    backend = Rewriting(loops="roll")
    x, a = sequences()
    found = torch.compile(function, backend=backend)(x.requires_grad_(), a)
    assert [loop.rolled for loop in backend.report.loops] == [True], backend.why_not()
    assert [each.requires_grad for each in found] == [True, False]
    torch.testing.assert_close(found, function(x, a))


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_length_changes_where_an_input_and_a_view_of_it_are_inputs(is_first: bool):
    def norms(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        state = start if is_first else start + 1
        for t in range(0, x.shape[1], 2):
            state = F.layer_norm(state + x[:, t], (2,))
        return state

    compiled = torch.compile(norms, backend="layerzero", options={"layerzero.loops": "roll"})
    for length in (9, 8):
        x = torch.randn(2, length, 2, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, x[:, 0]), norms(x, x[:, 0]))
        (loop,) = reports()[-1].loops
        assert loop.rolled
        assert not reports()[-1].events
