"""Loops over time as scans: generated loops, modules, and what stays as it is, with the reason."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import pickle
import sys
import textwrap

import pytest
import torch
from backends import Rewriting, Traced
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import nn
from torch.utils.checkpoint import checkpoint

import lz_compile as lz
from lz_compile.errors import ArgumentError
from lz_compile.ground.events import collect, logger
from lz_compile.lowering.checkpointed_scan import checkpointed_scan

generated = settings(
    max_examples=examples(5, 40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
_names = itertools.count()


class Graphs:
    """A backend that runs graphs as they are, and counts scans and nodes in them."""

    def __init__(self) -> None:
        self.scans = self.nodes = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]):
        self.nodes += len(graph.graph.nodes)
        self.scans += sum("scan" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward


def written(tmp_path, text):
    """The function ``loop`` of a source."""
    path = tmp_path / f"written{next(_names)}.py"
    path.write_text("import torch\n\n\n" + textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.loop


def compiled(function, *inputs, trains=False):
    """What is computed, and its graphs; PyTorch traces the gradients of a scan in every call that records them."""
    torch._dynamo.reset()
    graphs = Graphs()
    with torch.set_grad_enabled(trains):
        return torch.compile(function, backend=graphs)(*inputs), graphs


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


READS = {
    "place": ("for t in range(x.shape[1]):", "x[:, t]", "a[:, t]"),
    "first": ("for t in range(x.shape[0]):", "x[t]", "a[t]"),
    "ellipsis": ("for t in range(x.size(1)):", "x[..., t, :]", "a[..., t, :]"),
    "slice": ("for t in range(x.size(1)):", "x[:, t : t + 1].squeeze(1)", "a[:, t, :]"),
    "part": ("for t in range(x.size(1)):", "x[:, t, None][:, 0]", "a[:, t, 0:1]"),
    "strided": ("for t in range(1, x.shape[1], 2):", "x[:, t]", "a[:, t - 1]"),
    "reversed": ("for t in range(x.shape[1] - 1, -1, -1):", "x[:, t]", "a[:, t]"),
    "before": ("for t in range(1, x.shape[1]):", "x[:, t]", "x[:, t - 1].sigmoid()"),
    "unbind": ("for x_t, a_t in zip(x.unbind(1), torch.unbind(a, dim=1)):", "x_t", "a_t"),
    "enumerate": ("for t, x_t in enumerate(x.unbind(1)):", "x_t", "a[:, t]"),
    "counted from": ("for t, x_t in enumerate(x.unbind(1), 0):", "x_t", "a[:, t]"),
    "while": ("t = 0\nwhile t < x.shape[1]:\n    t += 1", "x[:, t - 1]", "a[:, t - 1]"),
    "while down": ("t = x.shape[1] - 1\nwhile 0 <= t:\n    t = t - 1", "x[:, t + 1]", "a[:, t + 1]"),
    "range reversed": ("for t in reversed(range(x.shape[1])):", "x[:, t]", "a[:, t]"),
    "turned": ("for x_t, a_t in zip(reversed(x.unbind(1)), reversed(a.unbind(dim=1))):", "x_t", "a_t"),
    "tensor": ("for t, x_t in enumerate(x.transpose(0, 1)):", "x_t", "a[:, t]"),
    "split": ("for x_t, a_t in zip(x.split(1, dim=1), torch.split(a, 1, -2)):", "x_t[:, 0]", "a_t.squeeze(1)"),
    "named": ("xs, gates = x.unbind(1), list(a.unbind(1))\nfor t in range(len(xs)):", "xs[t]", "gates[t]"),
    "next": (
        "steps = x.shape[1]\nfor t in range(steps):",
        "x[:, t]",
        "(a[:, t + 1] if t + 1 < steps else 0 * a[:, 0])",
    ),
    "previous": ("for t in range(x.shape[1]):", "x[:, t]", "(x[:, t - 1] if t > 0 else 2 * x[:, 0]).sigmoid()"),
    "named, gone over": ("xs = x.unbind(-2)\nfor t, x_t in enumerate(xs):", "x_t", "a[:, t]"),
}
STEPS = {
    "affine": ("h = torch.zeros(2, 3)", "h = {a} * h + {x}", "h"),
    "tanh": ("h = x.new_zeros(2, 3)", "new = torch.tanh({a} * h + {x})\n    h = new", "h"),
    "in place": ("h = torch.zeros(2, 3)", "h *= {a}\n    h += {x}", "h.clone()"),
    "two": ("h, c = torch.zeros(2, 3), torch.ones(2, 3)", "h, c = {a} * c + {x}, 0.5 * h", "h * c"),
    "tuple": ("s = (torch.zeros(2, 3), torch.ones(2, 3))", "s = ({a} * s[1] + {x}, 0.5 * s[0])", "s[0]"),
    "list": ("s = [torch.zeros(2, 3), torch.ones(2, 3)]", "for i in range(2):\n        s[i] = {a} * s[1 - i] + {x}", "s[1]"),
    "dict": ("s = {{'h': torch.zeros(2, 3)}}", "s['h'] = {a} * s['h'] + {x}", "s['h']"),
    "none": ("h = None", "h = {x} if h is None else {a} * h + {x}", "h"),
    "number": ("h = 0.0", "h = {a} * h + {x}", "h"),
    "branch": ("h, on = torch.zeros(2, 3), True", "if on:\n        h = h + {x}\n    else:\n        h = h * {a}", "h"),
    "numbered": ("h = torch.zeros(2, 3)", "h = {a} * h + {x} * (t / 8) - t", "h"),
    "first": ("late = None", "if t == {first}:\n        h = {x}\n    else:\n        h = {a} * h + {x}", "h"),
    "then": ("h = torch.zeros(2, 3)", "h = h + ({x} if t != {first} else {a}) if t > -9 else h - 1", "h"),
    "late": ("h = torch.zeros(2, 3)", "new = {a} * h + {x}\n    h = new.relu()", "new"),
    "final": ("h = torch.zeros(2, 3)", "h = {a} * h + {x}\n    if t == {last}:\n        h = 2 * h", "h"),
    "written": ("h = torch.zeros(2, 3)", "h.mul_({a}).add_({x})", "h.clone()"),
    "copied": ("h = torch.zeros(2, 3)", "h.copy_({a} * h + {x})", "2 * h"),
    "whole": (
        "h, n = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)",
        "h = {a} * h + {x}\n    n = n + (h.sum(1) > 0).long()",
        "h * n[:, None]",
    ),
}  # fmt: skip
ENDS = {
    "stack": ("out = []", "out.append({y})", "return torch.stack(out, 1), {y}"),
    "stack first": ("out = list()", "out.append({y})", "return torch.stack(out), {y}"),
    "cat": ("out = []", "out.append(({y}).unsqueeze(1))", "return torch.cat(out, dim=1), {y}"),
    "list": ("out = []", "out.append({y})", "return out[-1], len(out), torch.stack(out, -1)"),
    "more": ("out = []", "out.append({y})", "out.append({y})\nreturn torch.stack(out, 1)"),
    "last": ("pass", "pass", "return {y}"),
    "added": ("out = []", "out += [{y}]", "return torch.stack(out, 1)"),
    "counter": ("pass", "pass", "return {y}, t"),
    "joined": ("out = torch.zeros(2, 0, 3)", "out = torch.cat([out, ({y}).unsqueeze(1)], dim=1)", "return out"),
    "joined first": ("out = torch.tensor([])", "out = torch.cat((out, {y}))", "return out"),
    "filled": ("out = torch.zeros(2, 9, 3)", "out[:, t] = {y}", "return out"),
    "in front": ("out = []", "out.insert(0, {y})", "return torch.stack(out, 1), {y}"),
    "in front of it": ("out = []", "out = [{y}] + out", "return torch.cat(out, dim=1)"),
    "turned": ("out = []", "out.append({y})", "out.reverse()\nreturn torch.stack(out, 1)"),
    "turned, cut": ("out = []", "out.append({y})", "return torch.stack(out[::-1]), torch.cat(list(reversed(out)), 1)"),
    "pairs": (
        "out = []",
        "out.append(({y}, 2 * ({y})))",
        "one, two = zip(*out)\nreturn torch.stack(one, 1), torch.stack(two)",
    ),
    "items": ("out = []", "out.append({{'y': {y}, 'z': 3 * ({y})}})", "return torch.stack([o['z'] for o in out], 1)"),
    "lists": (
        "out = {'y': [], 'z': []}",
        "out['y'].append({y})\n    out['z'].append(({y}) + 1)",
        "return {{k: torch.stack(v, 1) for k, v in out.items()}}",
    ),
}


FIRST = {
    "strided": "1",
    "range reversed": "x.shape[1] - 1",
    "reversed": "x.shape[1] - 1",
    "before": "1",
    "while": "1",
    "while down": "x.shape[1] - 2",
}
LAST = {
    "strided": "7",
    "range reversed": "0",
    "reversed": "0",
    "while": "x.shape[1]",
    "while down": "-1",
    "first": "x.shape[0] - 1",
}
COUNTS = {"final", "numbered", "first", "then", "filled", "counter"}


def source(read, step, end):
    (head, x, a), (init, body, y), (before, hand_out, after) = READS[read], STEPS[step], ENDS[end]
    body = body.format(x=x, a=a, first=FIRST.get(read, "0"), last=LAST.get(read, "x.shape[1] - 1"))
    lines = [init.format(), before, head, *(f"    {each}" for each in (body, hand_out.format(y=y)))]
    text = "\n".join([*lines, after.format(y=y)])
    return "def loop(x, a):\n" + textwrap.indent(text, "    ")


@generated
@given(read=st.sampled_from(sorted(READS)), step=st.sampled_from(sorted(STEPS)), end=st.sampled_from(sorted(ENDS)))
def test_loops_are_scans_with_the_same_results(tmp_path_factory, read, step, end):
    if {step, end} & COUNTS and " t " not in READS[read][0].replace(",", " "):
        return
    if end == "filled" and read.startswith("while"):
        return
    torch.manual_seed(0)
    function = written(tmp_path_factory.mktemp("loops"), source(read, step, end))
    shape = (9, 2, 3) if read == "first" else (2, 9, 3)
    x, a = torch.randn(shape), torch.rand(shape)
    expected = function(x, a)
    with collect() as events:
        rolled = lz.roll_loops(function, x, a)
    assert not events, f"{source(read, step, end)}\n{events}"
    found, graphs = compiled(rolled, x, a)
    same(found, expected)
    assert graphs.scans == 1, source(read, step, end)


# ---- what stays ------------------------------------------------------------------------------------------------------

STAYS = {
    "in turns": ("for t in range(x.shape[1]):\n    if t % 2 == 0:\n        h = h + x[:, t]", "not the same for all steps (t % 2 == 0)"),
    "halves": ("for t in range(x.shape[1]):\n    h = h + (x[:, t] if t < 4 else 1)", "not the same for all steps"),
    "one of them": ("for t in range(x.shape[1]):\n    if t == 4:\n        h = h + x[:, t]", "not the same for all steps"),
    "endless": ("t = 0\nwhile t < 5:\n    h = h + x[:, t]\n    t += 1\n    t += 1", "does not count t once"),
    "by another": ("t, n = 0, 8\nwhile t < n:\n    h = h + x[:, t]\n    t += 1\n    n -= 1", "does not count t once"),
    "while by data": ("while h.sum() < 0:\n    h = h + x[:, 0]", "compares no counter"),
    "break": ("for t in range(x.shape[1]):\n    h = h + x[:, t]\n    if t == 3:\n        break", "it is left by a break"),
    "the past": ("for t in range(1, x.shape[1]):\n    h = h + x[:, :t].sum(1)", "reads more with every step"),
    "grows": ("for t in range(x.shape[1]):\n    h = torch.cat([h, 2 * h[:, :1]], 1) + x[0, t, 0]", "changes its shape or dtype"),
    "from the end": ("for t in range(x.shape[1]):\n    h = 2 * h + x[:, t - 1]", "from the end of a tensor"),
    "by data": ("for t in range(x.shape[1]):\n    if h.sum() > 0:\n        h = h - x[:, t]\n    h = h + x[:, t]", "not traced"),
    "written and read": ("x = x.clone()\nfor t in range(2, x.shape[1]):\n    x[:, t] = x[:, t - 2] + 1\nh = x", "written to, and read"),
    "read in front": ("x = x.clone()\nfor t in range(x.shape[1]):\n    x[:, t] = x[:, t] + 1\nh = x", "written to, and read"),
    "one list": ("out = []\nfor t in range(x.shape[1]):\n    h += x[:, t]\n    out.append(h)\nh = torch.stack(out)", "other results"),
    "several": ("for t in range(x.shape[1]):\n    h = h + x[:, t, t % 3, None]", "no slice along one dimension"),
    "three": ("for t in range(3):\n    h = h + x[:, t]", "fewer than 4"),
    "squares": ("for t in range(4):\n    h = 2 * h + x[:, t * t - 2 * t + 1]", "not evenly apart"),
    "around": ("for t in range(9):\n    h = 2 * h + x[:, t % 8]", "not evenly apart"),
    "by a list": ("order = [0, 1, 3, 2, 4]\nfor t in range(5):\n    h = 2 * h + x[:, order[t]]", "not evenly apart"),
    "moved on": ("k = 0\nfor t in range(4):\n    k = 1\n    h = 2 * h + x[:, t + k]", "a step changes k"),
    "in place": ("for t in range(x.shape[1]):\n    x[:, t].add_(h)", "in place, by add_"),
    "printed": ("for t in range(x.shape[1]):\n    h = h + x[:, t]\n    print(t)", "it calls print"),
    "attribute": ("for t in range(x.shape[1]):\n    h = h + x[:, t]\n    h.seen = True", "assigns the attribute seen"),
    "counts": ("n = 0\nfor t in range(x.shape[1]):\n    h = h + x[:, t]\n    n += 1\nh = h * n", "something else than tensors"),
    "ends early": ("for t in range(x.shape[1]):\n    if t % 2:\n        continue\n    h = h + x[:, t]", "by continue"),
    "another list": ("out = []\nsame = out\nfor t in range(x.shape[1]):\n    out.append(x[:, t])\nh = torch.stack(same)", "no list that was made"),
    "some steps": ("out = []\nfor t in range(x.shape[1]):\n    if h is None:\n        out.append(h)\n    h = h + x[:, t]", "not every step"),
}  # fmt: skip


def test_what_a_trial_raises_goes_into_the_log_with_its_traceback(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(logger, "info", lambda *_, exc_info=None: heard.append(exc_info))
    text = "def loop(x):\n    h = torch.zeros(2, 3)\n    for t in range(x.shape[1]):\n        h = h + x[:, t]\n    return h @ h"
    with collect() as events:
        lz.roll_loops(written(tmp_path, text), torch.randn(2, 9, 3))
    assert "it cannot be tried: RuntimeError" in events[0].message
    assert [type(error) for error in heard if error is not None] == [RuntimeError]
    assert heard[0].__traceback__ is not None


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_understood_stays_with_its_reason(tmp_path, name, capsys):
    text, reason = STAYS[name]
    function = written(
        tmp_path, "def loop(x):\n    h = torch.zeros(2, 3)\n" + textwrap.indent(text + "\nreturn h", "    ")
    )
    x = torch.randn(2, 9, 3)
    with collect() as events:
        rolled = lz.roll_loops(function, x)
    assert [event.code for event in events] == ["LOOP_NOT_ROLLED"]
    assert reason in events[0].message, events
    assert "written" in events[0].message
    torch.manual_seed(1)
    expected = function(x)
    torch.manual_seed(1)
    same(rolled(x), expected)


# ---- modules, gradients, lengths -------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Cells over each other, called step by step, by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.RNNCell(4, 4), nn.RNNCell(4, 4)])
        self.gate = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ys, state = self.run_over(x)
        return self.head(ys * self.gate), state

    def run_over(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        state = [x.new_zeros(x.shape[0], 4) for _ in self.cells]
        found = []
        for x_t in x.unbind(1):
            y = x_t
            for i, cell in enumerate(self.cells):
                y = state[i] = cell(y, state[i])
            found.append(y)
        return torch.stack(found, dim=1), state


@functools.cache
def _proven():
    return lz.roll_loops(Stacked(), torch.randn(2, 5, 4))


def proven():
    """Cells whose loop was proven once: a copy is rolled, too."""
    return copy.deepcopy(_proven())


def test_modules_are_changed_in_place_and_train():
    torch.manual_seed(0)
    module = Stacked()
    names, keys = [name for name, _ in module.named_parameters()], list(module.state_dict())
    x = torch.randn(2, 12, 4)
    with collect() as events:
        assert lz.roll_loops(module, x[:, :6]) is module
    assert not events
    assert [name for name, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == keys
    module(x)[0].sum().backward()
    expected = [each.grad.clone() for each in module.parameters()]
    module.zero_grad()
    (found, state), graphs = compiled(module, x, trains=True)
    found.sum().backward()
    assert graphs.scans == 1
    same(found, module(x)[0])
    same(state, module(x)[1])
    same([each.grad for each in module.parameters()], expected)


@pytest.mark.usefixtures("proofs_of_results")
def test_the_first_call_proves_where_no_example_is_given():
    module = lz.roll_loops(Stacked())
    x = torch.randn(2, 7, 4)
    _, graphs = compiled(module, x)
    assert graphs.scans == 0  # nothing is proven yet
    module(x)
    _, graphs = compiled(module, x)
    assert graphs.scans == 1


@pytest.mark.usefixtures("proofs_of_results")
def test_graphs_do_not_grow_with_time_and_one_compile_serves_all_lengths():
    module = proven()
    sizes = {steps: compiled(module, torch.randn(2, steps, 4))[1].nodes for steps in (16, 64)}
    assert sizes[16] == sizes[64]
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(module, backend=graphs, dynamic=True)
    for steps in (16, 100, 33, 5):
        x = torch.randn(2, steps, 4)
        with torch.no_grad():
            same(run(x), module(x))
    assert graphs.scans == 1


def rotated(q, k, decay):
    state, found = q.new_zeros(q.shape[0], q.shape[-1], k.shape[-1]), []
    for t in range(q.shape[1]):
        state = decay[:, t, None, None] * state + torch.einsum("bi,bj->bij", q[:, t], k[:, t])
        found.append(state.sum(1))
    return torch.stack(found, 1), state


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_calls_check_the_loops_own_state_and_none_of_what_those_call():
    """A guard for each helper, ours and PyTorch's, took 12 of 60 us in every call; what a user may change is still asked."""

    def guarded(entries):
        names.extend(each.name for each in entries)
        return [True] * len(entries)

    names = []
    function = lz.roll_loops(decayed, torch.randn(2, 8, 4))
    torch.compile(function, backend="layerzero", options={"guard_filter_fn": guarded})(torch.randn(2, 16, 4))
    assert not [each for each in names if "rolling" in each or "higher_order" in each or "pytree'" in each]
    assert [each for each in names if each.endswith(".state")]
    assert "given[0]" in names


def test_one_compile_serves_all_lengths_of_a_range():
    def inputs(steps):
        return torch.randn(2, steps, 4), torch.randn(2, steps, 4), torch.rand(2, steps)

    rolled = lz.roll_loops(rotated, *inputs(5))
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(rolled, backend=graphs, dynamic=True)
    for steps in (16, 100, 33, 5):
        given_ = inputs(steps)
        same(run(*given_), rotated(*given_))
    assert graphs.scans == 1


def as_long_as_the_loop(x):
    (steps,) = x.shape[1:2]
    beliefs, states, means = [torch.empty(0)] * (steps + 1), (steps + 1) * [torch.empty(0)], []
    beliefs[0], states[0] = x[:, 0], x[:, 1]
    states[0] = beliefs[0] * 2
    for t in range(steps):
        beliefs[t + 1] = torch.tanh(beliefs[t] + x[:, t] * states[t])
        means.append(beliefs[t + 1] * 2)
        states[t + 1] = means[-1] - states[t]
    return torch.stack(beliefs[1:], 1), torch.stack(states), torch.stack(means, 1)


@pytest.mark.usefixtures("proofs_of_results")
def test_one_compile_serves_lists_that_are_as_long_as_the_loop():
    rolled = lz.roll_loops(as_long_as_the_loop, torch.randn(2, 5, 3))
    torch._dynamo.reset()
    graphs = Graphs()
    run, sizes = torch.compile(rolled, backend=graphs, dynamic=True), []
    for steps in (16, 100, 33, 5, 3):
        x = torch.randn(2, steps, 3)
        same(run(x), as_long_as_the_loop(x))
        same(rolled(x), as_long_as_the_loop(x))
        sizes.append(graphs.nodes)
    assert graphs.scans == 1
    assert sizes[0] == sizes[3]


def listed_backwards(x, first):
    found, others = [*first] * x.shape[1], [torch.empty(0)] * x.shape[1]
    h = x.new_zeros(2, 3)
    for t in reversed(range(x.shape[1])):
        h = torch.tanh(h + x[:, t])
        others[t] = h
        found[t] = h * 2
    return torch.stack(found, 1), torch.cat(others)


@pytest.mark.usefixtures("proofs_of_results")
def test_lists_that_are_filled_from_behind_or_repeat_several_items():
    one = [torch.zeros(2, 3)]
    rolled = lz.roll_loops(listed_backwards, torch.randn(2, 5, 3), one)
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(rolled, backend=graphs, dynamic=True)
    for steps, first in ((7, one), (9, one * 2), (30, one)):
        x = torch.randn(2, steps, 3)
        same(run(x, first), listed_backwards(x, first))
        same(rolled(x, first), listed_backwards(x, first))
    assert graphs.scans


def scheduled(x, decay):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.tanh(decay * h + x[:, t])
    return h


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_a_number_that_changes_from_call_to_call_leaves_the_loop():
    rolled = lz.roll_loops(scheduled, torch.randn(2, 5, 3), 0.5)
    torch._dynamo.reset()
    run = torch.compile(rolled, backend="layerzero")
    with collect() as events:
        for decay in (0.5, 0.25, 0.125):
            x = torch.randn(2, 9, 3)
            same(run(x, decay), scheduled(x, decay))
    assert "a Python number changes" in " ".join(event.message for event in events)


@pytest.mark.usefixtures("no_code_generation")
def test_a_loop_inside_of_a_transform_or_a_checkpoint_stays():
    rolled = lz.roll_loops(squashed, torch.randn(2, 5, 3))
    torch._dynamo.reset()
    x = torch.randn(4, 2, 9, 3)
    with collect() as events:
        found = torch.compile(torch.vmap(rolled), backend="layerzero")(x)
    assert {event.code for event in events} == {"LOOP_NOT_ROLLED"}
    same(found, torch.stack(list(map(squashed, x))))
    given_ = x[0].requires_grad_()
    run = torch.compile(lambda x: checkpoint(rolled, x, use_reentrant=False), backend="layerzero")
    grads = [torch.autograd.grad(each(given_).sin().sum(), given_) for each in (run, squashed)]
    same(*grads)
    with torch.no_grad():
        found, graphs = compiled(lambda x: checkpoint(rolled, x, use_reentrant=False), given_)
    same(found, squashed(given_))
    assert graphs.nodes
    assert compiled(rolled, given_)[1].scans == 1


def squashed(x):
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.usefixtures("no_code_generation")
def test_complex_states_stay(caplog):
    x = torch.randn(2, 5, 3, dtype=torch.complex64)
    rolled = lz.roll_loops(scheduled, x, 0.5)
    assert "its numbers are complex: Inductor compiles no scan over those" in caplog.text
    same(torch.compile(rolled, backend="layerzero")(x, 0.5), scheduled(x, 0.5))


@pytest.mark.usefixtures("proofs_of_results")
def test_few_steps_are_traced_one_by_one():
    module = proven()
    x = torch.randn(2, 2, 4)
    found, graphs = compiled(module, x)
    assert graphs.scans == 0
    same(found, module(x))


def test_a_kernel_takes_over_what_was_rolled():
    def decayed(x, a):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)

    x, a = torch.randn(2, 40, 8), torch.rand(2, 40, 8)
    rolled = lz.roll_loops(decayed, x[:, :6], a[:, :6])
    torch._dynamo.reset()
    lz.clear_reports()
    with torch.no_grad():
        same(torch.compile(rolled, backend="layerzero")(x, a), decayed(x, a))
    matches = [match for report in lz.reports() for match in report.matches]
    assert [(match.op, match.rewritten) for match in matches] == [("scan", True)]


@pytest.mark.usefixtures("proofs_of_results")
def test_closures_and_defaults_are_kept():
    factor = torch.tensor(0.5)

    def summed(x, start=1.0, *, sign=-1):
        h = torch.full((2, 3), start)
        for t in range(x.shape[1]):
            h = factor * h + sign * x[:, t]
        return h

    x = torch.randn(2, 6, 3)
    rolled = lz.roll_loops(summed, x)
    same(rolled(x), summed(x))
    factor = torch.tensor(0.25)
    same(rolled(x, 2.0, sign=1), summed(x, 2.0, sign=1))
    assert rolled.__name__ == "summed"


def test_what_has_no_source_is_told():
    names = {}
    exec("def loop(x):\n    for t in range(x.shape[1]):\n        y = x[:, t]\n    return y", names)
    with collect() as events:
        rolled = lz.roll_loops(names["loop"], torch.randn(2, 6, 3))
    assert "its source is not at hand" in events[0].message
    assert rolled(torch.ones(1, 4)) == 1


def test_what_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="target as a module or a function written in Python, received a builtin"):
        lz.roll_loops(torch.sin)


# ---- what a proof does not hold for ----------------------------------------------------------------------------------


def runs_like(function, rolled, *inputs):
    """Whether a rolled function gives what the other does, compiled as well; how many scans there were."""
    expected = function(*inputs)
    same(rolled(*inputs), expected)
    found, graphs = compiled(rolled, *inputs)
    same(found, expected)
    return graphs.scans


def decayed(x, m=None, start=None, first=0):
    h = start
    for t in range(first, x.shape[1]):
        h = x[:, t] if h is None else 0.5 * h + (x[:, t] if m is None else x[:, t] * m[:, t])
    return h


@pytest.mark.usefixtures("proofs_of_results")
def test_other_kinds_of_arguments_run_the_loop():
    x, h = torch.randn(2, 6, 3), torch.randn(2, 3)
    rolled = lz.roll_loops(decayed, x, x, h)
    assert runs_like(decayed, rolled, torch.randn(2, 9, 3), torch.rand(2, 9, 3), h) == 1
    assert runs_like(decayed, rolled, x, None, h) == 0
    assert runs_like(decayed, rolled, x, x, None) == 0
    assert runs_like(decayed, rolled, x, x, torch.randn(1, 3)) == 0
    assert runs_like(decayed, rolled, x, x, 0.0) == 0
    assert runs_like(decayed, rolled, x.double(), x.double(), h.double()) == 0
    for steps in (1, 2, 3):
        assert runs_like(decayed, rolled, x[:, :steps], x, h) == 0


def directed(x, first, last, step):
    h, out = torch.zeros(2, 3), torch.zeros_like(x)
    for t in range(first, last, step):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return out


@pytest.mark.parametrize("given_", [(0, 6, 1), (5, -1, -1), (5, 0, -2)])
def test_places_are_filled_in_either_direction(given_):
    x = torch.randn(2, 9, 3)
    with collect() as events:
        rolled = lz.roll_loops(directed, x, *((8, -1, -2) if given_[2] == -2 else given_))
    assert not events
    assert runs_like(directed, rolled, x, *given_) == (0 if given_[2] == -2 else 1)


class Masked(nn.Module):
    """Drops numbers in training."""

    def __init__(self, is_told=False) -> None:
        super().__init__()
        self.drop, self.is_told = nn.Dropout(0.5), is_told

    def forward(self, x):
        h = torch.zeros(2, 3)
        for t in range(x.shape[1]):
            h = 0.5 * h + self.drop(x[:, t])
            if self.training and self.is_told and h.sum() > 0:
                h = h - 1
        return h


def test_a_mode_that_is_not_proven_is_told():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        module = lz.roll_loops(Masked(is_told=True).eval(), x)
    assert ["in the other mode of training: it is not traced" in event.message for event in events] == [True]
    assert runs_like(module, module, x) == 1


def twice_over(x):
    for _ in range(2):
        h, found = torch.zeros(2, 3), []
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            found.append(h)
        x = torch.stack(found, 1)
    return x


def test_loops_inside_of_one_that_stays_are_scans():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(twice_over, x)
    assert len(events) == 1, events
    assert runs_like(twice_over, rolled, x) == 2


def spiking(x):
    potential, spikes = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        potential = 0.9 * potential + x[:, t]
        spike = (potential > 1.0).to(x.dtype)
        spikes[:, t] = spike
        potential = potential * (1.0 - spike)
    return spikes


def test_what_has_no_gradients_is_a_scan_too():
    x = torch.randn(2, 6, 3)
    assert runs_like(spiking, lz.roll_loops(spiking, x), x) == 1


def each_for_itself(x):
    out = []
    for t in range(x.shape[1]):
        out.append(x[:, t].sin())
    return torch.stack(out, 1).view(x.shape[0], -1)


def test_loops_that_carry_nothing_are_scans_too():
    x = torch.randn(2, 6, 3)
    assert runs_like(each_for_itself, lz.roll_loops(each_for_itself, x), x) == 1


def ordered(x, s):
    for t in range(x.shape[1]):
        s = {"h": 0.5 * s["c"] + x[:, t], "c": torch.tanh(s["h"])}
    return s["h"], s["c"]


@pytest.mark.usefixtures("proofs_of_results")
def test_keys_in_another_order_are_no_other_state():
    x, h, c = torch.randn(2, 6, 3), torch.randn(2, 3), torch.randn(2, 3)
    rolled = lz.roll_loops(ordered, x, {"h": h, "c": c})
    assert runs_like(ordered, rolled, x, {"h": h, "c": c}) == 1
    assert runs_like(ordered, rolled, x, {"c": c, "h": h}) == 0


def either(x, flag):
    h = torch.zeros(2, 3)
    if flag:
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
    else:
        for t in range(x.shape[1]):
            h = 0.25 * h - x[:, t]
    return h


@pytest.mark.usefixtures("proofs_of_results")
def test_loops_that_the_example_does_not_come_to_are_told():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(either, x, True)
    assert "the example does not come to it" in events[0].message
    assert (runs_like(either, rolled, x, True), runs_like(either, rolled, x, False)) == (1, 0)


class Kept(nn.Module):
    """A state that outlives a call, in memory that the loop writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(2, 3))
        self.factor = 1.0

    def forward(self, x):
        h = self.held
        for t in range(x.shape[1]):
            h += x[:, t]
        return h * self.factor


def test_memory_of_others_is_written_by_the_loop():
    x = torch.ones(2, 6, 3)
    with collect() as events:
        module = lz.roll_loops(Kept(), x)
    assert "h is changed in place, and may be others' too" in events[0].message
    assert [float(module(x).sum()) for _ in range(2)] == [36, 72]


def doubled(function):
    @functools.wraps(function)
    def call(*given):
        return 2 * function(*given)

    return call


@doubled
def wrapped(x):
    h = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
    return h


@pytest.mark.usefixtures("proofs_of_results")
def test_decorators_are_not_lost():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(wrapped, x)
    assert not events
    assert runs_like(wrapped, rolled, x) == 1


@pytest.mark.usefixtures("proofs_of_results")
def test_copies_and_files_of_modules_are_modules_of_their_own():
    x = torch.randn(2, 6, 4)
    module = lz.roll_loops(Stacked(), x)
    other = copy.copy(module)
    other.gate = nn.Parameter(3 * torch.ones(4))
    same(other.head(module.run_over(x)[0] * 3), other(x)[0])
    for each in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        pickle.loads(pickle.dumps(lz.roll_loops(Stacked()))),
    ):
        assert isinstance(each, Stacked)
        each.load_state_dict(module.state_dict())
        same(each(x), module(x))
    assert runs_like(module, copy.deepcopy(module), x) == 1


def test_both_modes_of_training_are_proven():
    x = torch.randn(2, 6, 4)
    module = lz.roll_loops(Stacked(), x).eval()
    assert runs_like(module, module, x) == 1


# ---- functions that are called, random numbers -----------------------------------------------------------------------


def run_over(cell, x, h):
    found = []
    for x_t in x.unbind(1):
        h = cell(x_t, h)
        found.append(h)
    return found, h


def in_between(cell, x, h):
    found, h = run_over(cell, x, h)
    return torch.stack(found, 1), h


class Base(nn.Module):
    """Cells by a function at module level."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(4, 4)

    def forward(self, x):
        return in_between(self.cell, x, x.new_zeros(x.shape[0], 4))


class Derived(Base):
    def forward(self, x):
        ys, h = super().forward(x)
        return ys + 1, h


class Named(Base):
    def forward(self, x):
        return Base.forward(self, x)


class Held(Base):
    def __init__(self) -> None:
        super().__init__()
        self.run = in_between

    def forward(self, x):
        return self.run(self.cell, x, x.new_zeros(x.shape[0], 4))


class Static(Base):
    @staticmethod
    def over(cell, x, h):
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
        return h

    @classmethod
    def twice(cls, cell, x, h):
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
        return h

    def forward(self, x):
        return self.over(self.cell, x, x.new_zeros(x.shape[0], 4)) + self.twice(self.cell, x, x[:, 0])


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
@pytest.mark.parametrize(
    ("kind", "scans"),
    [pytest.param(Base, 1, marks=pytest.mark.thorough), (Derived, 1), (Named, 1), (Held, 1), (Static, 2)],
)
def test_functions_that_are_called_are_rolled_too(kind, scans):
    x = torch.randn(2, 6, 4)
    plain = kind()
    module = copy.deepcopy(plain)
    with collect() as events:
        lz.roll_loops(module, x)
    assert not events
    assert runs_like(plain, module, torch.randn(2, 9, 4)) == scans


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
def test_a_function_that_is_replaced_is_called():
    x = torch.randn(2, 6, 4)
    module = Held()
    lz.roll_loops(module, x)
    module.run = lambda cell, x, h: (x * 2, h)
    assert runs_like(module, module, x) == 0
    same(module(x)[0], x * 2)


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
def test_loops_over_layers_are_no_loops_over_time():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Base(), Base()])

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    x = torch.randn(2, 6, 4)
    with collect() as events:
        module = lz.roll_loops(Layers(), x)
    assert not events
    assert runs_like(copy.deepcopy(module), module, x) == 2


def one_of_two(x):
    h = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        if h.sum() > 0:
            h = h - 1
        h = h + x[:, t]
    y = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        y = 0.5 * y + x[:, t]
    return h, y, t


def test_one_loop_that_is_not_traced_leaves_the_other():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(one_of_two, x)
    assert len(events) == 1, events
    assert "it is not traced as a scan" in events[0].message
    found, graphs = compiled(rolled, x)
    same(found, one_of_two(x))
    assert graphs.scans == 1


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.thorough), "layerzero"])
def test_random_numbers_are_drawn_in_every_step(backend):
    x = torch.ones(1, 200, 3)
    with collect() as events:
        module = lz.roll_loops(Masked(), x[:, :6])
    assert not events
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend)
    with torch.no_grad(), torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(3)
        expected = module(x)
        torch.manual_seed(3)
        same(run(x), expected)


def test_a_proof_leaves_generators_as_they_were():
    x = torch.ones(2, 6, 3)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    lz.roll_loops(Masked(), x)
    same(torch.rand(3), expected)


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.parametrize(("steps", "told"), [(120, True), (80, False)])
def test_loops_that_were_unrolled_are_told(steps, told):
    x, a = torch.randn(2, steps, 3), torch.rand(2, steps, 3)
    torch._dynamo.reset()
    lz.clear_reports()
    with torch.no_grad():
        torch.compile(decayed, backend=Rewriting(loops="auto"))(x, a)
    misses = [miss for report in lz.reports() for miss in report.near_misses if miss.reason.code == "LOOP_UNROLLED"]
    assert len(misses) == told
    if told:
        assert misses[0].reason.message.startswith("Dynamo traced 119 steps one by one: about 1 s of this compile")
        assert "lz_compile.roll_loops(model)" in misses[0].edit


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_a_report_shows_loops_that_were_rolled():
    module = proven()
    torch._dynamo.reset()
    report = lz.explain(module, torch.randn(2, 50, 4))
    (loop,) = report.loops
    assert (loop.steps, loop.calls, loop.around, loop.rolled) == (50, 5, 8, True)
    assert loop.carried == ("float32[2, 4]", "float32[2, 4]")
    assert loop.outputs == ("[2, 4]",)


def fewer(x, steps):
    """Calls itself, and keeps some outputs by a flag."""
    if steps > 1:
        return fewer(x, steps - 1) + 1
    h = torch.zeros(2, 3)
    for x_t in reversed(x.unbind(1)):
        h = 0.5 * h + x_t
    return h


def flagged(x, keeps, keeps_more=False):
    h, kept, more = torch.zeros(2, 3), [], []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if keeps:
            kept.append(h)
            if keeps_more:
                more.append(2 * h)
        else:
            more.append(h)
    return h, torch.stack(kept or more, 1), more[-1:]


def branched(x, kind):
    """A name that other branches assign, too."""
    if kind == 0:
        y = x
    else:
        h, ys = torch.zeros(2, 3), []
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            y = h.relu()
            ys.append(y + 1)
        y = torch.stack(ys, 1)
    return y


def of_a_kind(x):
    out = torch.zeros(x.shape).to(x)
    h = (x[:, 0] * 2).mul_(2)
    for t in range(x.shape[1]):
        h = (h * 0.5).add_(x[:, t])
        out[:, t] = h.to(out.dtype).view(out.shape[0], -1)
    return out


def either_way(x, is_first):
    """Reads along another dimension by a flag, as far as it goes."""
    h = torch.zeros(2, 3)
    for t in range(x.size(0 if is_first else 1)):
        if is_first:
            now = x[t]
        else:
            now = x[:, t]
        h = 0.5 * h + now + (x[t] if is_first else 1)
    return h


def perhaps_two(x, c=None):
    """A second state that is there, or nothing."""
    h, found = torch.zeros(2, 3), []
    for t in range(x.shape[1]):
        if c is not None:
            c = 0.5 * c + x[:, t]
        h = 0.5 * h + x[:, t] + (0 if c is None else c)
        found.append(h)
    return torch.stack(found, 1), c


def with_cell(cell, x):
    h, order = x.new_zeros(2, 3), range(x.shape[1])
    for t in order:
        h = cell(x[:, t], h)
    return h


def by_places(x, more=None):
    """As PlaNet's transition model is written."""
    steps = x.shape[1] + 1
    beliefs, states, means, others = (
        [torch.empty(0)] * steps,
        [torch.empty(0)] * steps,
        [torch.empty(0)] * steps,
        [None] * steps,
    )
    beliefs[0], states[0], others[0] = x[:, 0], x[:, 1], x[:, 2]
    for t in range(steps - 1):
        state = states[t] if more is None else others[t]
        beliefs[t + 1] = torch.tanh(0.5 * beliefs[t] + x[:, t] * state)
        means[t + 1], shift = torch.chunk(torch.cat([beliefs[t + 1], state], 1), 2, dim=1)
        states[t + 1] = means[t + 1] + 0.1 * shift
        if more is not None:
            k = t - 1
            others[t + 1] = states[t + 1] * more[:, k + 1]
    found = [torch.stack(beliefs[1:], dim=1), torch.stack(states[1:], 1), torch.stack(means[1:], 1)]
    return [*found, torch.stack(others[1:], 1)] if more is not None else found


def of_itself(x):
    """A tensor that is read where the step before has written, and a list that begins with something."""
    h, ys = torch.zeros(x.shape[0], x.shape[1] + 1, 3), [x[:, 0]]
    h[:, 0] = x[:, 0]
    for t in range(x.shape[1]):
        h[:, t + 1] = 0.5 * h[:, t] + x[:, t]
        ys.append(torch.tanh(ys[-1] + h[:, t + 1]))
    return h, torch.stack(ys, 1), torch.cat(ys[1:], 1)


def backwards(x):
    """Advantages, as they are estimated from behind."""
    found, last = torch.zeros_like(x), 0
    for t in reversed(range(x.shape[1] - 1)):
        found[:, t] = last = x[:, t] - x[:, t + 1] + 0.9 * last
    back = torch.zeros_like(x)
    for t in range(x.shape[1] - 2, -1, -1):
        back[:, t] = x[:, t] + 0.9 * back[:, t + 1]
    return found, back


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (by_places, ()),
        (by_places, (torch.ones(2, 9, 3),)),
        (of_itself, ()),
        (either_way, (False,)),
        (perhaps_two, ()),
        (perhaps_two, (torch.ones(2, 3),)),
        (fewer, (1,)),
        (flagged, (True,)),
        (flagged, (True, True)),
        (flagged, (False,)),
        (branched, (1,)),
        (of_a_kind, ()),
    ],
)
def test_what_libraries_write(function, more):
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(function, x, *more)
    assert not events
    assert runs_like(function, rolled, torch.randn(2, 9, 3), *more) == 1


@pytest.mark.usefixtures("one_mode_of_training")
@pytest.mark.filterwarnings("ignore")
def test_loops_of_pytorch_itself():
    plain = torch.ao.nn.quantizable.LSTM(3, 4, 1)
    rolled = lz.roll_loops(copy.deepcopy(plain), torch.randn(6, 2, 3))
    x = torch.randn(9, 2, 3)
    found, graphs = compiled(rolled, x)
    same(found, plain(x))
    assert graphs.scans == 1


def test_two_loops_backwards():
    x = torch.randn(2, 6, 3)
    with collect() as events:
        rolled = lz.roll_loops(backwards, x)
    assert not events
    assert runs_like(backwards, rolled, torch.randn(2, 9, 3)) == 2


def test_a_module_may_be_an_argument():
    x, cell = torch.randn(2, 6, 3), nn.GRUCell(3, 3)
    with collect() as events:
        rolled = lz.roll_loops(with_cell, cell, x)
    assert not events
    assert runs_like(with_cell, rolled, cell, torch.randn(2, 9, 3)) == 1


# ---- models that are called as they are, other compilers ---------------------------------------------------------------


def decayed_over(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1), h


def compiled_loops(run):
    lz.clear_reports()
    found = run()
    return found, [loop.steps for report in lz.reports() for loop in report.loops]


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_a_long_loop_is_compiled_where_the_model_is_not():
    x, a = torch.randn(2, 400, 3), torch.rand(2, 400, 3)
    rolled = lz.roll_loops(decayed_over, x[:, :6], a[:, :6])
    with torch.no_grad():
        found, loops = compiled_loops(lambda: rolled(x, a))
        assert loops
        same(found, decayed_over(x, a))
        shorter = torch.rand(2, 300, 3), torch.rand(2, 300, 3)
        found, loops = compiled_loops(lambda: rolled(*shorter))
        assert not loops  # one compile for all lengths
        same(found, decayed_over(*shorter))
    _, loops = compiled_loops(lambda: rolled(x, a))
    assert not loops  # gradients are recorded


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_hooks_that_are_added_later_are_called():
    module, seen = proven(), []
    x = torch.randn(2, 300, 4)
    with torch.no_grad():
        expected = module(x)
        module.cells[0].register_forward_hook(lambda *given_: seen.append(1))
        same(module(x), expected)
    assert len(seen) == 300


@pytest.mark.usefixtures("no_code_generation", "proofs_of_results")
def test_nothing_is_compiled_where_somebody_looks_on_or_nobody_asks():
    x, a = torch.randn(2, 400, 3), torch.rand(2, 400, 3)
    rolled = lz.roll_loops(decayed_over, x[:, :6], a[:, :6])
    plain = lz.roll_loops(decayed_over, x[:, :6], a[:, :6], eager=False)
    runs = (
        lambda: torch.func.vmap(rolled)(x[None], a[None])[1][0],
        lambda: plain(x, a)[1],
        lambda: rolled(x[:, :100], a[:, :100])[1] * 0 + decayed_over(x, a)[1],
    )
    for run in runs:
        with torch.no_grad():
            found, loops = compiled_loops(run)
        assert not loops
        same(found, decayed_over(x, a)[1])


@pytest.mark.usefixtures("proofs_of_results")
def test_a_loop_that_cannot_be_compiled_runs_step_by_step(monkeypatch):
    x, a = torch.randn(2, 400, 3), torch.rand(2, 400, 3)
    rolled = lz.roll_loops(decayed_over, x[:, :6], a[:, :6])

    def fails(*given_, **named):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *given_, **named: fails)
    with collect() as events, torch.no_grad():
        same(rolled(x, a), decayed_over(x, a))
        same(rolled(x, a), decayed_over(x, a))
    assert [event.code for event in events] == ["LOOP_NOT_COMPILED"]
    assert "no compiler" in events[0].message


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
def test_exported_programs_hold_a_scan_for_all_lengths():
    class Exported(nn.Module):
        def forward(self, x, a):
            h, out = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = torch.tanh(a[:, t] * h + x[:, t])
                out.append(h)
            return torch.stack(out, 1), h

    x, a = torch.randn(2, 9, 3), torch.rand(2, 9, 3)
    plain = Exported()
    module = lz.roll_loops(Exported(), x, a)
    steps = torch.export.Dim("steps", min=4, max=10_000)
    program = torch.export.export(module, (x, a), dynamic_shapes=({1: steps}, {1: steps}))
    assert sum("scan" in str(node.target) for node in program.graph.nodes if node.op == "call_function") == 1
    for count in (9, 33):
        given_ = torch.randn(2, count, 3), torch.rand(2, count, 3)
        same(program.module()(*given_), plain(*given_))


# ---- what a reviewer found -------------------------------------------------------------------------------------------


def by_default(x, order=None):
    h = torch.zeros(2, 3)
    if order is None:
        order = range(x.shape[1])
    for t in order:
        h = 0.5 * h + x[:, t]
    return h


def first_replaced(x, is_first):
    xs = list(x.unbind(1))
    if is_first:
        xs[0] = torch.zeros(2, 3)
    h = torch.ones(2, 3)
    for x_t in xs:
        h = 0.5 * h + x_t
    return h


def perhaps_there(x, has):
    h = torch.zeros(2, 3)
    if has:
        c = torch.ones(2, 3)
    for t in range(x.shape[1]):
        if has:
            c = 0.5 * c + x[:, t]
            h = h + c
        h = h + x[:, t]
    return h


def wide(x, width):
    h = torch.zeros(2, 3)
    for t in range(6):
        h = 0.5 * h + x[:, t : t + width].sum(1)
    return h


def written_elsewhere(x, k):
    out, h = [torch.zeros(2, 3)] * 20, torch.zeros(2, 3)
    for t in range(2, x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[t - k] = h
    return torch.stack(out)


def sized(x, most):
    out, h = torch.zeros(2, 0, 3), torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if out.size(1) > most:
            h = h * 0.1
        out = torch.cat([out, h.unsqueeze(1)], 1)
    return out


def looked_at(x, most):
    h = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t] * (1 + 2**t) + (t > most) + (t > 2 * most)
    return h


def sometimes(x, gates):
    h = torch.zeros(2, 3)
    if gates:
        g = torch.full((2, 3), 0.5)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if gates:
            h = h * g
    return h


def weighted(x, w):
    h = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h = torch.tanh(h * w + x[:, t])
    return h


def handed_back(x, is_told):
    z, out = None, None
    if is_told is not None:
        out, h = [], torch.zeros(2, 3)
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            out.append(h)
        z = torch.stack(out)
    return (z, out) if is_told else (z, None)


def owned(x, h0):
    h = torch.zeros(2, 3)
    if h0 is not None:
        h = h0
    for t in range(x.shape[1]):
        h += x[:, t]
    return h


def of_itself_or_not(x, is_same):
    x = x.clone()
    out = x if is_same else x.clone()
    for t in range(1, x.shape[1]):
        out[:, t] = 2 * x[:, t - 1]
    return out


def of_lists(x, n):
    states = [torch.zeros(2, 3) for _ in range(2)]
    for t in range(x.shape[1]):
        states = [0.5 * state + x[:, t] for state in states]
    return states


def followed(x, out):
    out[0] = x[:, 0]
    for t in range(1, x.shape[1]):
        out[t] = 0.5 * out[t - 1] + x[:, t]
    return torch.stack(out, axis=1)


FOUND = {
    "a default": (by_default, (), [(None,), (range(0, 6, 2),)], 0),
    "an item replaced": (first_replaced, (False,), [(True,), (False,)], 0),
    "perhaps a name": (perhaps_there, (True,), [(False,), (True,)], 0),
    "a width": (wide, (1,), [(2,), (1,)], 1),
    "places of a list": (written_elsewhere, (0,), [(3,), (-2,), (0,)], 2),
    "a size": (sized, (20,), [(4,)], 0),
    "numbers": (looked_at, (20,), [(2,)], 0),
    "a flag": (sometimes, (True,), [(False,), (True,)], 1),
    "another rank": (weighted, (torch.rand(3),), [(torch.rand(2, 3),), (torch.rand(3).double(),), (2.0,), (torch.rand(3),)], 1),
    "a list handed back": (handed_back, (False,), [(True,), (False,)], 2),
    "memory of others": (owned, (None,), [(torch.ones(2, 3),)], 0),
    "the same memory": (of_itself_or_not, (False,), [(True,), (False,)], 0),
    "lists of states": (of_lists, (1,), [(1,)], 1),
    "a list that is given": (followed, ([torch.zeros(2, 3)] * 6,), [([torch.zeros(2, 3)] * 9,)], 0),
}  # fmt: skip


@pytest.mark.usefixtures("proofs_of_results")
@pytest.mark.parametrize("name", FOUND)
def test_other_arguments_than_those_of_the_proof(name):
    function, example, others, scans = FOUND[name]
    rolled = lz.roll_loops(function, torch.randn(2, 6, 3), *copy.deepcopy(example))
    count = 0
    for other in others:
        x = torch.randn(2, 9, 3)
        here, there, inside = (copy.deepcopy((x, *other)) for _ in range(3))
        expected = function(*here)
        same(rolled(*there), expected)
        found, graphs = compiled(rolled, *inside)
        same(found, expected)
        same(
            [each for each in there if isinstance(each, torch.Tensor)],
            [each for each in here if isinstance(each, torch.Tensor)],
        )
        same(
            [each for each in inside if isinstance(each, torch.Tensor)],
            [each for each in here if isinstance(each, torch.Tensor)],
        )
        count += graphs.scans
    assert count == scans


def masked(x, mask):
    h = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h = torch.where(mask[:, t, None], 0.5 * h + x[:, t], h)
    return h


def test_masks_and_examples_without_gradients():
    x, mask = torch.randn(2, 6, 3), torch.rand(2, 6) > 0.3
    with collect() as events, torch.no_grad():
        rolled = lz.roll_loops(masked, x, mask)
    assert not events
    assert runs_like(masked, rolled, x, mask) == 1


class Normed(nn.Module):
    """Goes over what a layer with statistics gives, by a function that knows no mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(3), nn.GRUCell(3, 3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 3)
        for x_t in self.norm(x.transpose(1, 2)).unbind(2):
            h = self.cell(x_t, h)
        return h


def test_what_a_loop_goes_over_is_computed_once():
    x = torch.randn(2, 9, 3)
    plain = Normed()
    module = lz.roll_loops(copy.deepcopy(plain), x[:, :6])
    same(module(x), plain(x))
    same(module.norm.running_mean, plain.norm.running_mean)
    assert runs_like(copy.deepcopy(plain).eval(), module.eval(), x) == 1


class Left(Base):
    def forward(self, x):
        return super().forward(x)


class Right(Base):
    def forward(self, x):
        found, h = super().forward(x)
        return found + 1, h


class Both(Left, Right):
    pass


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
def test_bases_are_those_of_the_class():
    x = torch.randn(2, 6, 4)
    module = Both()
    expected = module(x)
    lz.roll_loops(module, x)
    same(module(x), expected)
    same(compiled(module, x)[0], expected)


class EitherOf(nn.Module):
    """One class by itself, and as a base of another, which puts one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.both = Left(), Both()

    def forward(self, x, is_left):
        return self.left(x) if is_left else self.both(x)


@pytest.mark.usefixtures("one_mode_of_training", "proofs_of_results")
def test_a_class_in_between_is_not_passed_over():
    x = torch.randn(2, 6, 4)
    module = EitherOf()
    expected = module(x, False)
    lz.roll_loops(module, x, True)
    same(module(x, False), expected)
    same(compiled(module, x, False)[0], expected)


def test_chunks_are_numbers_of_steps():
    with pytest.raises(ArgumentError, match="expected chunk as a whole number of steps, 2 or more, received 1"):
        lz.roll_loops(Stacked(), chunk=1)


@pytest.mark.usefixtures("one_mode_of_training")
@pytest.mark.sampled("9-None", "11-4")
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("steps", [9, 12, 11, 31])
def test_gradients_compute_steps_again(chunk, steps):
    torch.manual_seed(0)
    plain = Stacked().double()
    module = lz.roll_loops(copy.deepcopy(plain), torch.randn(2, 5, 4).double(), chunk=chunk)
    x = torch.randn(2, steps, 4).double().requires_grad_()
    torch._dynamo.reset()
    backend = Traced()
    with collect() as events:
        ys, state = torch.compile(module, backend=backend)(x)
        (ys.cos().sum() + (state[0] + state[1]).sum()).backward()
    assert not events
    scans = [
        each
        for graph in backend.graphs
        for each in graph.graph.find_nodes(op="call_function", target=checkpointed_scan)
    ]
    assert [scan.args[4] for scan in scans] == (
        [None, None] if chunk is None else [chunk]
    )  # one for each cell, or for both
    found = [x.grad, *(each.grad for each in module.parameters())]
    x.grad = None
    ys, state = plain(x)
    (ys.cos().sum() + (state[0] + state[1]).sum()).backward()
    torch.testing.assert_close(found, [x.grad, *(each.grad for each in plain.parameters())])


def two_of_one(x):
    h = c = torch.zeros(2, 3)
    for t in range(x.shape[1]):
        h, c = torch.tanh(h + x[:, t]), torch.tanh(c - h + x[:, 0])
    return h, c


@pytest.mark.parametrize("trains", [False, True])
def test_states_that_begin_as_one_tensor_are_compiled(trains):
    x = torch.randn(2, 6, 3, requires_grad=trains)
    rolled = lz.roll_loops(two_of_one, x)
    torch._dynamo.reset()
    with collect() as events:
        same(torch.compile(rolled, backend=Traced())(x), two_of_one(x))
    assert not events


@pytest.mark.usefixtures("one_mode_of_training")
def test_gradients_under_autocast_are_those_of_pytorchs_operator():
    torch.manual_seed(0)
    plain = Stacked()
    x = torch.randn(2, 9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = lz.roll_loops(copy.deepcopy(plain), x)
    backend = Traced()
    torch._dynamo.reset()
    for model in (torch.compile(module, backend=backend), plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ys, _ = model(x)
        ys.float().cos().sum().backward()
    found = [node.target for graph in backend.graphs for node in graph.graph.nodes if "scan" in str(node.target)]
    assert torch.ops.higher_order.scan in found
    assert checkpointed_scan not in found
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=5e-2, atol=5e-2)
