"""What looks like a loop that can be rolled, or like a part of one, and is something else: found by a reader who wanted wrong results.

Each is tried on an example that does not show the difference, and called with arguments that do.
"""

from __future__ import annotations

import pytest
import torch
from test_roll_loops import compiled, same
from torch import nn

import lz_compile as lz
from lz_compile.ground.events import collect

pytestmark = pytest.mark.usefixtures("no_code_generation", "proofs_of_results")

X = torch.randn(6, 3)


def good(x):
    h, found = x.new_zeros(3), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        found.append(h)
    return torch.stack(found)


def buffers_of_others(x, buffers):
    h, found = x.new_zeros(3), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        found.append(h)
    for i in range(len(buffers)):
        buffers[i].copy_(h * (i + 1))
    return torch.stack(found)


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_others_hold_is_written_to(kind):
    rolled = lz.roll_loops(buffers_of_others, X, kind([torch.zeros(3), torch.zeros(3)]))
    one, other = torch.zeros(3), torch.zeros(3)
    rolled(X, kind([one]))
    buffers_of_others(X, kind([other]))
    assert one.any()
    same(one, other)


def items_copied(x, dtype, size):
    out = [torch.zeros(size, 3, dtype=dtype) for _ in range(x.shape[0])]
    h = x.new_zeros(1, 3)
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        out[t].copy_(h)
    return torch.stack(out)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self._cache = [torch.zeros(3) for _ in range(9)]

    def forward(self, x):
        buffers, h, found = list(self._cache), torch.zeros(3), []
        for t in range(x.shape[0]):
            h = torch.tanh(h + x[t])
            buffers[t].copy_(h)
            found.append(h)
        return torch.stack(found)


def test_items_of_a_cache_are_written_to():
    plain, rolled = Cached(), lz.roll_loops(Cached(), X)
    for run in (plain, rolled):
        run(X)
    assert plain._cache[0].any()
    same(rolled._cache, plain._cache)


def by_an_index(x, flag, index, kept):
    found = good(x)
    if flag:
        for _ in range(2):
            kept[index].copy_(found[0])  # a copy, where the index is a tensor
    return found, kept


def one_memory(x, flag):
    found, h, held = good(x), torch.zeros(3), []
    for t in range(x.shape[0]):
        h.add_(x[t])
        if flag:
            held.append(h)
        if t > 100:
            break
    return found, held, h


def summed(h, x):
    h = torch.zeros_like(h)
    for t in range(x.shape[0]):
        h.add_(x[t])
    return h


def clamped(x, h):
    h = torch.zeros_like(h)
    for t in range(x.shape[0]):
        h.add_(x[t]).clamp_(max=200)
    return h


def overflowing(x, h):
    h = torch.zeros_like(h)
    for t in range(x.shape[0]):
        h.add_(x[t]).clamp_(max=60000).mul_(0.5)
    return h


def compared(x, h):
    h = torch.zeros_like(h)
    for t in range(x.shape[0]):
        h.add_(x[t]).gt_(0).add_(x[t] > 1)
    return h


def exchanged(x, count, flag):
    found = good(x)
    if flag:
        now = [found[0], found[1]]
        for _ in range(count):
            before, now = now, []
            for each in before:
                now.append(each + 1)
        return found, now
    return found, found


def unzipped_then_more(x, flag):
    h, found = x.new_zeros(3), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        found.append((h, 2 * h))
    one, other = zip(*found)  # noqa: B905 of one length
    if flag:
        found.append((h, h))
    return torch.stack(one), torch.stack(other)


def in_turn(x, flag):
    h, found = x.new_zeros(3), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        found.append((h, 2 * h))
    stacked = map(torch.stack, zip(*found))  # noqa: B905 of one length
    return next(stacked) if flag else tuple(stacked)


def all_of_none(x):
    h, found = x.new_zeros(3), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        found.append((h, 2 * h))
    return [torch.stack(part) for part in zip(*found)]  # noqa: B905 of one length


def names_within(x):
    found = good(x)
    later = {k: (lambda: len(k)) for k in ("a", "bb")}  # noqa: B023 what is tested
    return found, {k: [k for k in range(2)] for k in ("a", "bb")}, [each() for each in later.values()]  # noqa: C416


def reset_at(x, k):
    h, found = x.new_zeros(x.shape[1]), []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        if k is not None and t == k:
            h = h * 0
        found.append(h)
    return torch.stack(found)


def reset_perhaps(x, flag):
    h, found = x.new_zeros(x.shape[1]), []
    if flag:
        k = x.shape[0] - 1
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        if flag and t == k:
            h = h * 0
        found.append(h)
    return torch.stack(found)


BYTES, HALVES = torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.float16)
LOOKALIKES = {
    "another dtype of items": (items_copied, (X, torch.float32, 1), (X, torch.float64, 1)),
    "whole numbers": (items_copied, (X, torch.float32, 1), (X, torch.int64, 1)),
    "a larger place": (items_copied, (X, torch.float32, 1), (X, torch.float32, 4)),
    "an index": (
        by_an_index,
        (X, False, torch.tensor([0]), torch.zeros(2, 3)),
        (X, True, torch.tensor([0]), torch.zeros(2, 3)),
    ),
    "one memory": (one_memory, (X, False), (X, True)),
    "bytes": (
        clamped,
        (torch.arange(6)[:, None].expand(6, 3), BYTES),
        (90 + torch.arange(6)[:, None].expand(6, 3), BYTES),
    ),
    "halves": (overflowing, (X, HALVES), (4e4 * X, HALVES)),
    "comparisons": (compared, (-X.abs(), X[0]), (X, X[0])),
    "exchanged": (exchanged, (X, 2, False), (X, 2, True)),
    "unzipped": (unzipped_then_more, (X, False), (X, True)),
    "in turn": (in_turn, (X, False), (X, True)),
    "no steps": (all_of_none, (X,), (X[:0],)),
    "names": (names_within, (X,), (X,)),
    "none": (reset_at, (X, 0), (X, None)),
    "none, long": (reset_at, (X, 0), (torch.randn(300, 3), None)),
    "in the middle": (reset_at, (X, 0), (X, 3)),
    "no name": (reset_perhaps, (X, True), (torch.randn(300, 3), False)),
}


#: How many loops stay as they are. The others are scans: their proof has traced them, or would have said that it could not.
STAY = dict.fromkeys(("another dtype of items", "whole numbers", "a larger place", "unzipped", "in turn", "no name"), 1)
STAY |= {"an index": 1, "one memory": 1, "exchanged": 2}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_it_gives_what_it_gave(name):
    function, example, later = LOOKALIKES[name]
    with collect() as events:
        rolled = lz.roll_loops(function, *example)
    assert ["the loop at" in event.message for event in events] == [True] * STAY.get(name, 0)
    with torch.no_grad():
        expected = function(*later)
        same(rolled(*later), expected)
        found, graphs = compiled(rolled, *later)
        same(found, expected)
    assert graphs.scans or name not in ("bytes", "halves", "comparisons", "names")  # called like the example
    if name == "one memory":
        assert len({id(each) for each in rolled(*later)[1]}) == 1


@pytest.mark.parametrize(
    ("state", "x"),
    [(torch.zeros(3, dtype=torch.int64), X), (torch.zeros(1, 3), torch.randn(6, 4, 3))],
    ids=["dtype", "shape"],
)
def test_what_cannot_be_written_is_an_error(state, x):
    rolled = lz.roll_loops(summed, state, x[:, :1].to(state.dtype) if x.dim() > 2 else x.to(state.dtype))
    for run in (summed, rolled):
        with pytest.raises(RuntimeError, match=r"can't be cast|doesn't match the broadcast shape"):
            run(state, x)
