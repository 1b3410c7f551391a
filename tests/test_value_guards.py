"""Values of buffers: read while a graph is compiled, and guarded, so that a moved or changed buffer compiles again."""

from __future__ import annotations

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from lz_compile.lowering import value_guards
from lz_compile.lowering.frames import buffer_value, guard_values
from lz_compile.lowering.value_guards import KnownValues


class Relying:
    """A backend whose code keeps the values that buffers had when it was compiled: wrong without a guard."""

    def __init__(self) -> None:
        self.relied_on: list[list[Tensor]] = []
        self.is_guarded: list[bool] = []

    def __call__(self, module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        placeholders = module.graph.find_nodes(op="placeholder")
        buffers = [node for node in placeholders if buffer_value(node) is not None]
        values = {node: buffer_value(node) for node in buffers}
        constants = {index: values[node].clone() for index, node in enumerate(placeholders) if node in values}
        self.is_guarded.append(guard_values(buffers))
        self.relied_on.append(list(constants.values()))

        def run(*inputs: Any) -> Any:
            return module.forward(*(constants.get(index, each) for index, each in enumerate(inputs)))

        return run

    @property
    def compiles(self) -> int:
        return len(self.relied_on)


class Masked(nn.Module):
    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6, 6).tril() if mask is None else mask)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight @ self.mask


class Listed(nn.Module):
    """Masks that are no registered buffers, in containers and in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [torch.ones(6, 6).tril(), torch.ones(6, 6).triu()]
        self.named = {"last": torch.eye(6)}
        self.inner = Masked()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.masks[0] @ self.masks[1] @ self.named["last"])


X = torch.arange(12.0).reshape(2, 6)


def compiled(module: nn.Module | Callable[..., Any], backend: Relying, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def check(run: Callable[..., Tensor], module: Callable[..., Tensor], *inputs: Tensor) -> None:
    torch.testing.assert_close(run(*inputs), module(*inputs), rtol=0, atol=0)


def move_away_and_back(module: Masked) -> None:
    module.to("meta")
    module.mask = torch.ones(6, 6).triu()
    module.weight = nn.Parameter(torch.ones(6))


CHANGES: dict[str, Callable[[Masked], Any]] = {
    "fill": lambda module: module.mask.fill_(2),
    "one element": lambda module: module.mask.__setitem__((0, 5), 1),
    "a view of it": lambda module: module.mask[0].add_(1),
    "in inference mode": lambda module: torch.inference_mode()(module.mask.fill_)(2),
    "data of another tensor": lambda module: setattr(module.mask, "data", torch.ones(6, 6).triu()),
    "data in another arrangement": lambda module: setattr(module.mask, "data", module.mask.data.t()),
    "set": lambda module: module.mask.set_(torch.ones(6, 6).triu()),
    "reassigned": lambda module: setattr(module, "mask", torch.ones(6, 6).triu()),
    "registered again": lambda module: module.register_buffer("mask", torch.ones(6, 6).triu()),
    "state loaded": lambda module: module.load_state_dict(Masked(torch.ones(6, 6).triu()).state_dict()),
    "state assigned": lambda module: module.load_state_dict(Masked(torch.ones(6, 6).triu()).state_dict(), assign=True),
    "another type": lambda module: module.double(),
    "moved": move_away_and_back,
}


@pytest.fixture(params=[False, True])
def dictionary_tags(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without Dynamo passing over modules whose dictionaries are unchanged, as PyTorch 2.11 does by default."""
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=request.param):
        yield


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("dictionary_tags")
@torch.no_grad()
def test_a_change_is_noticed(change):
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    for _ in range(3):
        check(run, module, X)
    CHANGES[change](module)
    x = X.to(module.mask.dtype)
    check(run, module, x)
    assert backend.compiles == 2
    check(run, module, x)
    assert backend.compiles == 2
    assert len(backend.relied_on[0]) == 1


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_what_does_not_change_compiles_nothing(dynamic):
    module, backend = Masked(), Relying()
    run = compiled(module, backend, dynamic=dynamic)
    for _ in range(20):
        check(run, module, X)
    assert backend.compiles == 1
    assert backend.is_guarded == [True]


@torch.no_grad()
def test_writing_the_same_values_compiles_nothing():
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    check(run, module, X)
    module.load_state_dict(Masked().state_dict())
    check(run, module, X)
    module.load_state_dict(Masked().state_dict(), assign=True)
    check(run, module, X)
    module.float().cpu()
    check(run, module, X)
    assert backend.compiles == 1


@torch.no_grad()
def test_another_size_of_an_input_relies_on_an_unchanged_buffer_again():
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    for rows in (2, 3, 4, 5):
        check(run, module, torch.randn(rows, 6))
    assert backend.compiles == 2  # the second one has symbolic sizes
    assert [len(values) for values in backend.relied_on] == [1, 1]


def fill(module: Masked, step: int) -> None:
    module.mask.fill_(step)


def assign(module: Masked, step: int) -> None:
    module.mask = torch.full((6, 6), float(step))


def set_data(module: Masked, step: int) -> None:
    module.mask.data = torch.full((6, 6), float(step))


def load(module: Masked, step: int) -> None:
    module.load_state_dict(Masked(torch.full((6, 6), float(step))).state_dict())


@pytest.mark.parametrize("change", [fill, assign, set_data, load])
@torch.no_grad()
def test_a_buffer_that_changes_at_every_call_compiles_once_more_only(change):
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    for step in range(12):
        check(run, module, X)
        change(module, step)
    assert backend.compiles == 2
    assert [len(values) for values in backend.relied_on] == [1, 0]


@torch.no_grad()
def test_a_buffer_that_is_written_at_every_call_with_what_it_has_compiles_once_more_only():
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    for _ in range(value_guards.MOST_CHANGES + 8):
        check(run, module, X)
        module.mask.copy_(module.mask.clone())
    assert backend.compiles == 2
    assert [len(values) for values in backend.relied_on] == [1, 0]


@torch.no_grad()
def test_a_buffer_that_is_made_at_every_call_is_compared_a_limited_number_of_times(monkeypatch):
    monkeypatch.setattr(value_guards, "MOST_COMPARISONS", 5)
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    for _ in range(12):
        check(run, module, X)
        module.mask = module.mask.clone()
    assert backend.compiles == 2
    assert [len(values) for values in backend.relied_on] == [1, 0]


@torch.no_grad()
def test_masks_that_take_turns_compile_a_limited_number_of_times():
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    masks = [torch.full((6, 6), float(value)) for value in range(6)]
    for _ in range(3):
        for mask in masks:
            module.mask = mask
            check(run, module, X)
    assert backend.compiles == value_guards.MOST_VALUES + 1
    assert [len(values) for values in backend.relied_on] == [1, 1, 0]


def block(x: Tensor, module: Masked) -> Tensor:
    """One function for all layers, as a compiled block of a model is."""
    return module(x)


@pytest.mark.usefixtures("dictionary_tags")
@torch.no_grad()
def test_layers_with_equal_masks_share_their_code():
    layers, backend = [Masked() for _ in range(12)], Relying()
    run = compiled(block, backend)
    for _ in range(3):
        for layer in layers:
            check(run, block, X, layer)
    assert backend.compiles == 1
    layers[3].mask.fill_(3)
    for layer in layers:
        check(run, block, X, layer)
    assert backend.compiles == 2


@torch.no_grad()
def test_two_kinds_of_layers_compile_twice_and_rely_on_both():
    layers, backend = [Masked(), Masked(torch.ones(6, 6).triu())] * 6, Relying()
    run = compiled(block, backend)
    for layer in layers:
        check(run, block, X, layer)
    assert backend.compiles == 2
    assert [len(values) for values in backend.relied_on] == [1, 1]


@torch.no_grad()
def test_a_copy_of_a_model_shares_its_code():
    module, backend = Masked(), Relying()
    check(compiled(module, backend), module, X)
    twin = copy.deepcopy(module)
    check(compiled(twin, backend), twin, X)
    assert backend.compiles == 1


@pytest.mark.usefixtures("dictionary_tags")
@torch.no_grad()
def test_tensors_that_are_kept_in_modules_count_and_are_guarded_each():
    module, backend = Listed(), Relying()
    run = compiled(module, backend)
    check(run, module, X)
    assert len(backend.relied_on[0]) == 4
    for change in (
        lambda: module.masks[1].fill_(2),
        lambda: module.masks.__setitem__(0, torch.ones(6, 6)),
        lambda: module.named.__setitem__("last", torch.ones(6, 6)),
        module.inner.mask.zero_,
    ):
        before = backend.compiles
        change()
        check(run, module, X)
        assert backend.compiles == before + 1
    check(run, module, X)
    assert backend.compiles == 5


def test_parameters_arguments_and_what_needs_gradients_are_no_buffers():
    module, backend = Masked(), Relying()
    module.mask.requires_grad_()
    check(compiled(module, backend), module, X)
    assert backend.relied_on == [[]]


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "make", [lambda: torch.inference_mode()(torch.ones)(6, 6), lambda: torch.ones(6, 6).as_subclass(Subclass)]
)
@torch.no_grad()
def test_subclasses_and_tensors_without_a_version_are_not_relied_on(make):
    module, backend = Masked(make()), Relying()
    check(compiled(module, backend), module, X)
    assert backend.relied_on == [[]]
    module.mask = torch.ones(6, 6)


@torch.no_grad()
def test_nothing_is_guarded_outside_of_a_compilation():
    graphs = []
    torch.compile(Masked(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)(X)
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    assert [buffer_value(node) for node in placeholders] == [None] * len(placeholders)
    assert not guard_values(placeholders)
    assert guard_values([])


@torch.no_grad()
def test_after_a_reset_nothing_is_known():
    module, backend = Masked(), Relying()
    for step in range(5):
        torch._dynamo.reset()
        check(compiled(module, backend), module, X)
        module.mask = torch.full((6, 6), float(step))
    assert [len(values) for values in backend.relied_on] == [1] * 5


@torch.no_grad()
def test_a_recompile_says_which_buffer_changed(caplog):
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    check(run, module, X)
    module.mask.fill_(2)
    torch._logging.set_logs(recompiles=True)
    log = logging.getLogger("torch._dynamo.guards.__recompiles")
    log.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG):
            check(run, module, X)
    finally:
        log.removeHandler(caplog.handler)
        torch._logging.set_logs()
    assert "mask" in caplog.text
    assert "has the values that the graph was made from" in caplog.text


@torch.no_grad()
def test_a_moved_buffer_does_not_stay_in_memory():
    module, backend = Masked(), Relying()
    run = compiled(module, backend)
    check(run, module, X)
    old = weakref.ref(module.mask)
    module.mask = torch.ones(6, 6).triu()
    backend.relied_on.clear()
    gc.collect()
    assert old() is None
    check(run, module, X)


@torch.no_grad()
def test_two_graphs_of_one_model_guard_the_same_buffer():
    class Broken(Masked):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    module, backend = Broken(), Relying()
    run = torch.compile(module, backend=backend)
    check(run, module, X)
    assert [len(values) for values in backend.relied_on] == [1, 1]
    module.mask.fill_(2)
    check(run, module, X)
    check(run, module, X)
    assert [len(values) for values in backend.relied_on] == [1, 1, 0, 0]


def test_writes_that_leave_no_trace_are_not_noticed():
    """What a version counter does not see: as documented. Autograd does not notice them either."""
    tensor = torch.ones(3)
    known = KnownValues(tensor)
    tensor.data.fill_(2)
    assert known.held_by(tensor)
    np.asarray(tensor)[:] = 3
    assert known.held_by(tensor)


def test_memory_is_not_mistaken_for_the_same_when_it_is_used_again():
    tensor = torch.zeros(64)
    known = KnownValues(tensor)
    for _ in range(100):
        tensor.data = torch.ones(64)
        tensor.data = torch.ones(64)
        assert not known.held_by(tensor)


def test_a_tensor_that_died_is_forgotten():
    first, second = torch.zeros(64), torch.zeros(64)
    known = KnownValues(first)
    assert known.held_by(second)
    assert known.has_holder()
    del first, second
    gc.collect()
    assert not known.has_holder()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.ones(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, 4).t(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(1).expand(4),
    ],
)
def test_values_of_every_kind_are_compared(tensor):
    known = KnownValues(tensor)
    assert known.held_by(tensor.clone())
    if tensor.numel():
        assert not known.held_by(torch.zeros_like(tensor))


def test_asking_costs_about_a_microsecond():
    tensor = torch.ones(64, 64)
    known = KnownValues(tensor)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            known.held_by(tensor)
        times.append((time.perf_counter() - start) / 2000)
    assert min(times) < 5e-6  # 0.3 µs on an idle machine
