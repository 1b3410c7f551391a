"""Loops whose steps keep state in attributes of modules: scans that carry these, or loops as they were."""

import copy

import pytest
import torch
from test_roll_loops import Graphs, same
from torch import nn

import lz_compile as lz
from lz_compile.ground.events import collect


class Membrane(nn.Module):
    """A leaky neuron as spiking libraries write it."""

    def __init__(self):
        super().__init__()
        self.decay, self.potential = nn.Parameter(torch.tensor(0.9)), None

    def reset(self):
        self.potential = None

    def forward(self, x):
        if self.potential is None:
            self.potential = torch.zeros_like(x)
        self.potential = self.decay * self.potential + x
        spike = torch.sigmoid(4 * (self.potential - 1))
        self.potential = self.potential - spike
        return spike


class Network(nn.Module):
    """Resets, then goes over time."""

    def __init__(self):
        super().__init__()
        self.first, self.neuron, self.second, self.last = nn.Linear(4, 5), Membrane(), nn.Linear(5, 3), Membrane()

    def forward(self, x):
        self.neuron.reset()
        self.last.reset()
        found = []
        for t in range(x.shape[1]):
            found.append(self.last(self.second(self.neuron(self.first(x[:, t])))))
        return torch.stack(found, 1)


class Own(nn.Module):
    """Goes on where the call before has ended."""

    def __init__(self):
        super().__init__()
        self.cell, self.h, self.keeps = nn.GRUCell(4, 4), torch.zeros(2, 4), True

    def forward(self, x):
        found = []
        for x_t in x.unbind(1):
            self.h = self.cell(x_t, self.h)
            if self.keeps:
                found.append(self.h)
        self.h = self.h.detach()
        return torch.stack(found, 1)


class Layers(nn.Module):
    """Neurons in containers, reset in front of the loop by a name of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Membrane()) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            layer[1].potential = torch.zeros_like(x[:, 0])
        found = []
        for x_t in x.unbind(1):
            y = x_t
            for layer in self.layers:
                y = layer(y)
            found.append(y)
        return torch.stack(found, 1)


class Chosen(nn.Module):
    """An attribute is one of its own methods, which reads the state, as in snntorch; the state begins without a size."""

    class Neuron(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("h", torch.zeros(0), False)
            self.update = self.leak

        def leak(self, x):
            return 0.9 * self.h + x

        def forward(self, x, h):
            self.h = h if h.shape == x.shape else torch.zeros_like(x)
            self.h = self.update(x)
            return torch.sigmoid(self.h), self.h

    def __init__(self):
        super().__init__()
        self.neuron = self.Neuron()

    def forward(self, x):
        h, found = torch.zeros(0), []
        for t in range(x.shape[1]):
            y, h = self.neuron(x[:, t], h)
            found.append(y)
        return torch.stack(found, 1)


class Inner(nn.Module):
    """The loop is in a method of a module inside."""

    def __init__(self):
        super().__init__()
        self.own = Own()

    def forward(self, x):
        return self.own(2 * x) + 1


class InFront(nn.Module):
    """What ``forward`` assigns is no state of the loop in another method, whose steps come to no ``forward`` but the cell's."""

    def __init__(self):
        super().__init__()
        self.cell, self.count, self.before = nn.Linear(4, 4), 2, None

    def forward(self, x):
        self.count = 2 if self.count == 2 else 3
        self.before = x[:, 0].clone()
        return self.over(x, torch.zeros_like(x[:, 0]))

    def over(self, x, h):
        found = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(h) + x[:, t])
            found.append(h)
        return torch.stack(found, 1)


class ByAnotherName(nn.Module):
    """A step calls a module by a name of the function's own."""

    def __init__(self):
        super().__init__()
        self.neuron = Membrane()

    def forward(self, x):
        self.neuron.potential = torch.zeros_like(x[:, 0])
        fire, found = self.neuron, []
        for x_t in x.unbind(1):
            found.append(fire(x_t))
        return torch.stack(found, 1)


def states(module):
    names = ("potential", "h", "seen", "before")
    return [getattr(each, name) for each in module.modules() for name in names if hasattr(each, name)]


def rolled_and_events(module, x):
    with collect() as events:
        found = lz.roll_loops(copy.deepcopy(module), x)
    return found, " ".join(event.message for event in events)


def compiled(module):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(module, backend=graphs, dynamic=True), graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Network, Own, Layers, Inner, Chosen, InFront])
def test_attributes_are_carried_by_a_scan_and_hold_the_same_behind_it(kind):
    torch.manual_seed(0)
    module = kind()
    rolled, _ = rolled_and_events(module, torch.randn(2, 6, 4))
    run, graphs = compiled(rolled)
    for steps in (9, 17):  # the second goes on with what the first has left
        x = torch.randn(2, steps, 4)
        found, expected = run(x), module(x)
        same(found, expected)
        same(states(rolled), states(module))
        if [*module.parameters()]:
            found.square().sum().backward()
            expected.square().sum().backward()
        same([each.grad for each in rolled.parameters()], [each.grad for each in module.parameters()])
    assert graphs.scans > 0


class Watched(Own):
    """A property is more than an attribute."""

    @property
    def h(self):
        return self._h

    @h.setter
    def h(self, value):
        self._h = value


class Setting(Own):
    """It assigns attributes in its own way."""

    def __setattr__(self, name, value):
        super().__setattr__(name, 2 * value if name == "h" else value)


class InPlace(Own):
    """Others may hold what is written to."""

    def forward(self, x):
        found = []
        for x_t in x.unbind(1):
            self.h += self.cell(x_t, self.h)
            found.append(self.h.clone())
        self.h = self.h.detach()
        return torch.stack(found, 1)


class Shifted(Own):
    """The last input stays in an attribute: whoever writes to the input changes it."""

    def forward(self, x):
        found, self.before = [], torch.zeros_like(x[:, 0])
        for x_t in x.unbind(1):
            found.append(x_t - self.before)
            self.before = x_t
        return torch.stack(found, 1)


class Twice(nn.Module):
    """Two attributes that are one tensor behind the loop."""

    def __init__(self):
        super().__init__()
        self.h = self.seen = torch.zeros(2, 4)

    def forward(self, x):
        found = []
        for x_t in x.unbind(1):
            self.h = torch.tanh(self.h + x_t)
            self.seen = self.h
            found.append(2 * self.h)
        return torch.stack(found, 1)


class Shared(nn.Module):
    """One neuron by two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = Membrane()

    def forward(self, x):
        self.one.reset()
        found = []
        for x_t in x.unbind(1):
            found.append(self.other(self.one(x_t)))
        return torch.stack(found, 1)


class Counting(Own):
    """A number that grows."""

    seen = 0

    def forward(self, x):
        found = []
        for x_t in x.unbind(1):
            self.seen = self.seen + 1
            self.h = torch.tanh(self.h + x_t) * self.seen
            found.append(self.h)
        return torch.stack(found, 1)


class InPlaceInside(nn.Module):
    """A module that is called writes to its state."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.zeros(2, 4)

        def forward(self, x):
            self.h += x
            return torch.tanh(self.h)

    def __init__(self):
        super().__init__()
        self.cell = self.Cell()

    def forward(self, x):
        found = []
        for x_t in x.unbind(1):
            found.append(self.cell(x_t))
        return torch.stack(found, 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Watched, "is more than an attribute"),
        (Setting, "in its own way"),
        (InPlace, "in place"),
        (Shifted, "has another name"),
        (Twice, "has another name"),
        (Shared, "is there twice"),
        (Counting, "something else than tensors"),
        (InPlaceInside, "LOOP_NOT_ROLLED"),
        (ByAnotherName, "LOOP_NOT_ROLLED"),
    ],
)
def test_a_loop_stays_where_others_see_its_attributes_or_they_are_more(kind, reason):
    module = kind()
    rolled, told = rolled_and_events(module, torch.randn(2, 6, 4))
    if reason != "LOOP_NOT_ROLLED":
        assert reason in told
    run, graphs = compiled(rolled)
    x = torch.randn(2, 9, 4)
    same(run(x), module(x))
    same(states(rolled), states(module))
    assert graphs.scans == 0


@pytest.mark.usefixtures("one_mode_of_training")
def test_a_hook_that_is_added_before_compiling_is_called_in_every_step():
    rolled, _ = rolled_and_events(Network(), torch.randn(2, 6, 4))
    seen = []
    rolled.neuron.register_forward_hook(lambda *_: seen.append(1))
    run, graphs = compiled(rolled)
    run(torch.randn(2, 9, 4))
    assert len(seen) == 9
    assert graphs.scans == 0


def test_of_a_module_with_hooks_the_loop_stays():
    module = Network()
    module.neuron.register_forward_hook(lambda *_: None)
    _, told = rolled_and_events(module, torch.randn(2, 6, 4))
    assert "hooks may see the attributes of self.neuron" in told


class Late(nn.Module):
    """What is met in a step first is assigned behind the loop, if at all."""

    def __init__(self):
        super().__init__()
        self.cell, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cell.seen = self.other.seen = None

    def forward(self, x, marks=False):
        h, found = torch.zeros_like(x[:, 0]), []
        if marks:
            self.other.seen = h
        for x_t in x.unbind(1):
            h = torch.tanh(self.cell(x_t) + self.other(h))
            found.append(h)
        if marks:
            self.cell.seen = self.other.seen = h
        return torch.stack(found, 1)


@pytest.mark.usefixtures("one_mode_of_training")
def test_what_is_assigned_behind_a_scan_is_not_lost():
    """Dynamo (2.13) loses it without a word; an example that does not assign proves nothing of that."""
    module = Late()
    rolled, _ = rolled_and_events(module, torch.randn(2, 6, 4))
    run, graphs = compiled(rolled)
    x = torch.randn(2, 9, 4)
    same(run(x, marks=True), module(x, marks=True))
    assert graphs.scans == 1
    same([rolled.cell.seen, rolled.other.seen], [module.cell.seen, module.other.seen])


@pytest.mark.usefixtures("one_mode_of_training")
def test_an_exception_half_way_leaves_attributes_as_they_were():
    module = lz.roll_loops(Own(), torch.randn(2, 6, 4))
    before = module.h.clone()
    run, _ = compiled(module)
    with pytest.raises(Exception, match=r"size|shape|mat"):
        run(torch.randn(2, 9, 3))
    same(module.h, before)
