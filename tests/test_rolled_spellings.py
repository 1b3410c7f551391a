"""Loops as people write them: reinforcement learning, decoding, filters, spikes. Each is rolled, and compiled once for all lengths."""

from __future__ import annotations

import copy

import pytest
import torch
from test_roll_loops import Graphs, compiled, same
from torch import Tensor, nn

import lz_compile as lz
from lz_compile.ground.events import collect


def advantages(rewards, values, dones, next_value, next_done):
    found, last = torch.zeros_like(rewards), 0
    steps = rewards.shape[0]
    for t in reversed(range(steps)):
        if t == steps - 1:
            alive, following = 1.0 - next_done, next_value
        else:
            alive, following = 1.0 - dones[t + 1], values[t + 1]
        delta = rewards[t] + 0.99 * following * alive - values[t]
        found[t] = last = delta + 0.99 * 0.95 * alive * last
    return found, found + values


def discounted(rewards, dones):
    total, found = torch.zeros_like(rewards[0]), []
    for reward, done in zip(reversed(rewards.unbind(0)), reversed(dones.unbind(0))):  # noqa: B905 tensors of one length
        total = reward + 0.99 * total * (1 - done)
        found.insert(0, total)
    return torch.stack(found)


def neighbours(x):
    h, found, n = x.new_zeros(x.shape[0], 4), [], x.shape[1]
    for t in range(n):
        later = x[:, t + 1] if t + 1 < n else torch.zeros_like(x[:, 0])
        earlier = x[:, t - 1] if t > 0 else torch.ones_like(x[:, 0])
        h = torch.tanh(h + later - earlier * x[:, t])
        found.append(h)
    return torch.stack(found, dim=1)


def inside_of_both_ends(rewards, values):
    n = rewards.shape[1]
    found, total = torch.zeros_like(rewards), values[:, -1]
    for i in range(n - 1, -1, -1):
        if i != n - 1 and i > 0:
            total = total * 0.9 + 0.1 * values[:, i + 1]
        total = rewards[:, i] + 0.9 * total
        found[:, i] = total
    return found


def backwards_in_time(x):
    h, found = x.new_zeros(x.shape[0], 4), [x[:, 0]]
    for x_t in reversed(x.unbind(1)):
        h = torch.tanh(h + x_t)
        found.insert(0, h)
    return torch.stack(list(reversed(found)), dim=1), h


def best_path(scores, moves):
    best, back, positive = scores[:, 0], [], []
    for t in range(1, scores.shape[1]):
        most, index = (best[:, :, None] + moves[None]).max(1)
        best = most + scores[:, t]
        back.append(index * 2**55 + 3)  # more than a float holds
        positive.append(best > 0)
    return best, torch.stack(back, 1), torch.stack(positive, 1)


def counting(x):
    n, h, found = torch.zeros(x.shape[0], dtype=torch.long), x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        n = n + (h.sum(1) > 0).long()
        found.append(n)
    return h, n, torch.stack(found, 1)


def in_place(x):
    h, found = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        h.mul_(0.9)
        h.add_(x[:, t], alpha=0.1).clamp_(max=1.0)
        found[:, t].copy_(h)
    return found, h


def spikes(x):
    v, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.size(1)):
        v.mul_(0.5).add_(x[:, t])
        fired = (v > 0.3).float()
        v.masked_fill_(fired.bool(), 0.0)
        found.append(fired)
    return torch.stack(found, 1), v


def written_over(x, share):
    y = x.clone()
    for t in range(1, x.shape[1]):
        y[:, t] = share * y[:, t - 1] + (1 - share) * x[:, t]
    return y


def masked_pairs(x, mask):
    h = c = x.new_zeros(x.shape[0], 4)
    found = []
    for x_t, m_t in zip(x.unbind(1), mask.unbind(1)):  # noqa: B905 tensors of one length
        new = torch.tanh(x_t + h)
        h = m_t[:, None] * new + (1 - m_t[:, None]) * h
        c = torch.where(m_t[:, None] > 0.5, c + new, c)
        found.append((h, c))
    hs, cs = zip(*found)  # noqa: B905 tensors of one length
    return torch.stack(hs, 1), torch.stack(cs, 1)


def stacked_pairs(x):
    h = c = x.new_zeros(x.shape[0], 4)
    found = []
    for t in range(x.shape[1]):
        h, c = torch.tanh(h + x[:, t]), c + h
        found.append([h, c])
    a, b = map(torch.stack, zip(*found))  # noqa: B905 tensors of one length
    return a, b, h


def each_of_pairs(x):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        found.append((h, 2 * h))
    return tuple(torch.stack(part, 1) for part in zip(*found))  # noqa: B905 tensors of one length


def named_parts(x):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        found.append({"h": h, "y": h * 2})
    return {name: torch.stack([each[name] for each in found], 1) for name in ("h", "y")}


def lists_by_name(x):
    h, found = x.new_zeros(x.shape[0], 4), {"a": [], "b": []}
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        found["a"].append(h)
        found["b"].append(h * 2)
    return {name: torch.stack(each, 1) for name, each in found.items()}


def transposed(x, w):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ w.T + x[:, t] @ w.mT - h @ w)
        found.append(h)
    return torch.stack(found, 1)


def _sequence(steps: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, steps, 4),)


def _episodes(steps: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(steps, 3),
        torch.randn(steps, 3),
        (torch.randn(steps, 3) > 1).float(),
        torch.randn(3),
        torch.ones(3),
    )


SPELLINGS = [
    (advantages, _episodes),
    (discounted, lambda steps: (torch.randn(steps, 3), (torch.randn(steps, 3) > 1).float())),
    (neighbours, _sequence),
    (inside_of_both_ends, lambda steps: (torch.randn(3, steps), torch.randn(3, steps))),
    (backwards_in_time, _sequence),
    (best_path, lambda steps: (torch.randn(3, steps, 5), torch.randn(5, 5))),
    (counting, _sequence),
    (in_place, _sequence),
    (spikes, _sequence),
    (written_over, lambda steps: (torch.randn(3, steps, 4), torch.tensor(0.9))),
    (masked_pairs, lambda steps: (torch.randn(3, steps, 4), (torch.randn(3, steps) > 0).float())),
    (stacked_pairs, _sequence),
    (each_of_pairs, _sequence),
    (named_parts, _sequence),
    (lists_by_name, _sequence),
    (transposed, lambda steps: (torch.randn(3, steps, 4), torch.randn(4, 4))),
]


@pytest.mark.parametrize(("function", "inputs"), SPELLINGS, ids=lambda each: getattr(each, "__name__", ""))
def test_what_people_write_is_rolled_once_for_all_lengths(function, inputs):
    with collect() as events:
        rolled = lz.roll_loops(function, *inputs(7))
    assert not events
    torch._dynamo.reset()
    graphs, count = Graphs(), []

    def backend(graph, given):
        count.append(graph)
        return graphs(graph, given)

    run = torch.compile(rolled, backend=backend, dynamic=True)
    for steps in (9, 12, 30):
        given = inputs(steps)
        expected = function(*given)
        same(run(*given), expected)
        same(rolled(*given), expected)
    assert len(count) == graphs.scans == 1


@pytest.mark.parametrize(
    ("function", "inputs"),
    [SPELLINGS[0], *SPELLINGS[2:4], SPELLINGS[5]],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_they_are_trained(function, inputs):
    rolled = lz.roll_loops(function, *inputs(7))
    given = [each.requires_grad_() for each in inputs(9)]

    def gradients(run):
        found = run(*given)
        parts = [each for each in (found if isinstance(found, tuple) else (found,)) if each.requires_grad]
        return torch.autograd.grad(sum(each.sin().sum() for each in parts), given, allow_unused=True)

    for one, other in zip(
        gradients(lambda *all_: compiled(rolled, *all_, trains=True)[0]), gradients(function), strict=True
    ):
        if one is not None and other is not None:
            same(one, other)
        else:  # what a loop gives no gradient to, a scan may give zeros
            assert not any(each is not None and each.any() for each in (one, other))


def test_a_loop_whose_gradients_fail_is_rolled_where_none_are_wanted():
    x, share = torch.randn(3, 9, 4), torch.tensor(0.9)
    rolled = lz.roll_loops(written_over, x, share)
    assert compiled(rolled, x, share)[1].scans == 1
    with torch.no_grad():
        assert compiled(rolled, x.requires_grad_(), share)[1].scans == 1
    with collect() as events:
        found, graphs = compiled(rolled, x, share, trains=True)
    assert graphs.scans == 0
    assert "it is differentiated here" in " ".join(event.message for event in events)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    same(gradient, torch.autograd.grad(written_over(x, share).sum(), x)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compiled(rolled, x, share.requires_grad_(), trains=True)[0].sum().backward()


def seen_by_another_name(x):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.size(1)):
        same_h = h
        h.mul_(0.5).add_(x[:, t])
        found.append(same_h * 2)
    return torch.stack(found, 1)


def seen_by_a_view(x):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.size(1)):
        part = h[:, :2]
        h.add_(x[:, t])
        found.append(part * 2)
    return torch.stack(found, 1)


def of_others(x):
    found = []
    for t in range(x.size(1)):
        x[:, 0].add_(x[:, t])
        found.append(2 * x[:, t])
    return torch.stack(found, 1)


def inverted(x):
    h, found = torch.eye(4).repeat(x.shape[0], 1, 1), []
    for t in range(x.size(1)):
        h = torch.linalg.inv(h + x[:, t, :, None])
        found.append(h)
    return torch.stack(found, 1)


def kept_pairs(x):
    h, found = x.new_zeros(x.shape[0], 4), []
    for t in range(x.size(1)):
        h = torch.tanh(h + x[:, t])
        found.append((h, 2 * h))
    return found


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (seen_by_another_name, "other results"),
        (seen_by_a_view, "other results"),
        (of_others, "in place, by add_"),
        (inverted, "_linalg_check_errors"),
        (kept_pairs, "is no tensor"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_stays_is_what_it_was(function, reason):
    x = torch.randn(3, 9, 4)
    with collect() as events:
        rolled = lz.roll_loops(copy.deepcopy(function) if isinstance(function, nn.Module) else function, x)
    assert reason in " ".join(event.message for event in events)
    found, graphs = compiled(rolled, x.clone())
    assert graphs.scans == 0
    same(found, function(x.clone()))


def test_strides_of_what_is_kept_for_a_backward_are_symbols():
    """AOTAutograd (2.13) tells the backward those of the first call; any other length failed."""
    rolled = lz.roll_loops(inside_of_both_ends, *(torch.randn(3, 7) for _ in range(2)))
    torch._dynamo.reset()
    run = torch.compile(rolled, backend="layerzero", dynamic=True)
    for steps in (9, 12):
        given = [torch.randn(3, steps, requires_grad=True) for _ in range(2)]
        grads = [torch.autograd.grad(each(*given).sin().sum(), given) for each in (run, inside_of_both_ends)]
        same(*grads)
