"""Questions about symbolic sizes become guards: as many compilations as decisions, and none that cannot be afforded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Rewriting
from torch import Tensor, nn

import lz_compile as lz
from lz_compile.backend import layerzero
from lz_compile.compile import choices
from lz_compile.ground.machine import environment
from lz_compile.runtime.choose import given, select
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SelectionContext

DISPATCH = "lz.dispatch"

#: Kernels change between 32 and 64, 128 and 256, 512 and 1024: 24 lengths on both sides of each.
LENGTHS = (
    8, 9, 17, 20, 25, 32, 64, 65, 75, 100, 115, 128, 256, 260, 300, 350, 450, 512, 1024, 1025, 1500, 1750, 2000, 2048
)  # fmt: skip


def is_fast(length: int) -> bool:
    """Where SDPA is said to be faster than Inductor's code."""
    return 64 <= length < 256 or length >= 1024


class Attention(nn.Module):
    """Two heads of twelve features, spelled out. Its weights make every size but the length static, and none equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (2, 12)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        weights = (query @ key.transpose(2, 3) * 12**-0.5).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)


class Selected(Attention):
    """An attention over the tokens that a mask selects: data decides how many."""

    def forward(self, x: Tensor, is_selected: Tensor) -> Tensor:
        return super().forward(x[:, is_selected.nonzero().squeeze(1)])


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[Path]:
    """A database of measurements that nothing is in."""
    policy.reset()
    policy.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield tmp_path / "perfdb.sqlite"
    policy.reset()


class Spy:
    """Keeps the problems that kernels are chosen for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[Problem] = []
        monkeypatch.setattr(choices.agree, "decide", self)

    def __call__(self, problem: Problem, *args: Any, **_: Any) -> select.Decision:
        self.problems.append(problem)
        return select.select(problem, *args)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Rewriting], Any],
    fast: Callable[[int], bool],
    lengths: tuple[int, ...] = given.POWERS,
) -> None:
    """Fill the database for the problem that ``run`` compiles: SDPA at half of Inductor's latency, or at twice."""
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        run(Rewriting(assume_finite=True))
        problem = spy.problems[-1]
    torch._dynamo.reset()
    perfdb.database(policy.current().settings.perfdb.path).put(
        record(problem.context, kernel_id, length, latency_us)
        for length in lengths
        for kernel_id, latency_us in {
            "inductor": 100.0,
            "torch.sdpa": 50.0 if fast(length) else 200.0,
            "lz.blocked": 300.0,
        }.items()
    )


def record(context: SelectionContext, kernel_id: str, length: int, latency_us: float) -> PerfRecord:
    sizes = {**context.hints(), "seq_len_q": length, "seq_len_k": length}
    return PerfRecord(
        kernel_id=kernel_id,
        operation=context.operation,
        device_id=context.hardware.device_name,
        dtype=context.dtype_name,
        environment=environment("cpu"),
        workload=canonical(workload(context, None, sizes)),
        median_us=latency_us,
        p95_us=latency_us,
        samples=20,
        variance_us=0.0,
    )


def dynamic(module: nn.Module, backend: Any) -> Callable[..., Tensor]:
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=True)


def sequence(length: int) -> Tensor:
    return torch.randn(1, length, 24)


def kernels_of(backend: Rewriting) -> list[str | None]:
    return [match.kernel for match in backend.report.matches]


def check(compiled: Callable[..., Tensor], module: nn.Module, *inputs: Tensor) -> None:
    torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("is_dynamic", "compiles"), [pytest.param(True, 4, marks=pytest.mark.thorough), (None, 5)])
@torch.no_grad()
def test_lengths_compile_as_often_as_decisions_change(monkeypatch, is_dynamic, compiles):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    backend = Rewriting(assume_finite=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=is_dynamic)
    assert len(LENGTHS) == 24
    for length in LENGTHS:
        check(compiled, module, sequence(length))
    assert len(backend.graphs) == compiles
    assert kernels_of(backend)[-4:] == ["inductor", "torch.sdpa", "inductor", "torch.sdpa"]


@torch.no_grad()
def test_going_back_compiles_nothing_again(monkeypatch):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    for length in (*LENGTHS, *reversed(LENGTHS)):
        compiled(sequence(length))
    assert len(backend.graphs) == 4


@torch.no_grad()
def test_a_declared_range_gets_no_guard_inside_and_one_kernel(monkeypatch):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    backend = Rewriting(assume_finite=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for length in (length for length in LENGTHS if 32 <= length <= 3000):
        x = sequence(length)
        torch._dynamo.mark_dynamic(x, 1, min=32, max=3000)
        check(compiled, module, x)
    assert len(backend.graphs) == 1
    (match,) = backend.report.matches
    assert not match.guards


@torch.no_grad()
def test_more_than_six_decisions_compile_at_most_six_times(monkeypatch):
    module = Attention()
    measured(
        monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), lambda length: length.bit_length() % 2 == 0
    )
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    for length in (*given.POWERS[:8], *LENGTHS):
        check(compiled, module, sequence(length))
    assert 2 < len(backend.graphs) <= select.MAX_OUTCOMES
    assert DISPATCH not in kernels_of(backend)


@torch.no_grad()
@pytest.mark.parametrize("pays", [False, True])
def test_near_the_recompile_limit_nothing_is_asked_and_calls_choose_where_that_pays(monkeypatch, pays):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    monkeypatch.setattr(select._Selection, "_dispatch_pays", lambda *_: pays)  # whatever the shipped priors promise
    backend = Rewriting(assume_finite=True)
    with torch._dynamo.config.patch(recompile_limit=3):
        compiled = dynamic(module, backend)
        for length in LENGTHS:
            check(compiled, module, sequence(length))
    assert kernels_of(backend) == ["inductor", DISPATCH if pays else "torch.sdpa"]
    last = backend.report.matches[-1]
    assert not last.guards
    assert ("soon gives up" in last.why) is pays


def test_near_the_recompile_limit_training_takes_one_kernel_for_all_lengths(monkeypatch):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    backend = Rewriting(assume_finite=True)
    with torch._dynamo.config.patch(recompile_limit=3):
        compiled = dynamic(module, backend)
        for length in LENGTHS:
            check(compiled, module, sequence(length))
    assert len(backend.graphs) == 2
    assert kernels_of(backend)[-1] in ("inductor", "torch.sdpa")
    assert not backend.report.matches[-1].guards


@pytest.fixture
def data_decides_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def selection_of(length: int, total: int = 96) -> tuple[Tensor, Tensor]:
    return sequence(total), torch.randperm(total) < length


@pytest.mark.usefixtures("data_decides_sizes")
@torch.no_grad()
def test_a_size_that_data_decides_is_chosen_for_at_each_call(monkeypatch):
    module = Selected()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(*selection_of(40)), is_fast)
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    for length in (2, 7, 40, 90):
        check(compiled, module, *selection_of(length))
    assert kernels_of(backend) == [DISPATCH]
    assert "data decides u0" in backend.report.matches[0].why


@pytest.mark.usefixtures("data_decides_sizes")
@torch.no_grad()
def test_a_size_that_data_decides_needs_no_dispatch_where_it_changes_nothing(monkeypatch):
    module = Selected()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(*selection_of(40)), lambda _: False)
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    for length in (2, 7, 40, 90):
        check(compiled, module, *selection_of(length))
    assert kernels_of(backend) == ["inductor"]


@pytest.mark.usefixtures("data_decides_sizes")
@torch.no_grad()
def test_a_size_that_data_decides_is_dispatched_where_one_kernel_is_always_better(monkeypatch):
    module = Selected()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(*selection_of(40)), lambda _: True)
    backend = Rewriting(assume_finite=True)
    check(dynamic(module, backend), module, *selection_of(40))
    assert kernels_of(backend) == [DISPATCH]


@pytest.mark.usefixtures("data_decides_sizes")
def test_a_size_that_data_decides_is_left_to_inductor_in_training(monkeypatch):
    module = Selected()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(*selection_of(40)), is_fast)
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    x, is_selected = selection_of(40)
    compiled(x.requires_grad_(), is_selected).sum().backward()
    assert kernels_of(backend) == ["inductor"]
    assert x.grad is not None


@torch.no_grad()
def test_beyond_what_is_known_calls_choose_for_themselves(monkeypatch):
    module = Attention()
    monkeypatch.setattr(select, "kernels", without_priors)
    run = lambda backend: dynamic(module, backend)(sequence(64))  # noqa: E731
    measured(monkeypatch, run, lambda length: length >= 128, lengths=(32, 64, 128, 256))
    backend = Rewriting(assume_finite=True)
    compiled = dynamic(module, backend)
    for length in (40, 300, 1000, 2000):
        check(compiled, module, sequence(length))
    assert kernels_of(backend) == ["inductor", "torch.sdpa", DISPATCH]
    assert "the largest measured is 256" in backend.report.matches[-1].why


def without_priors(operation: str) -> dict[str, Any]:
    from dataclasses import replace

    from lz_compile.runtime.kernels import registry

    return {name: replace(spec, prior=()) for name, spec in registry.kernels(operation).items()}


@torch.no_grad()
def test_dispatch_never_wins_by_its_score(monkeypatch):
    module = Attention()
    backend = Rewriting(assume_finite=True)
    with lz.prefer(DISPATCH):
        torch.compile(module, backend=backend, fullgraph=True)(sequence(64))
    (match,) = backend.report.matches
    assert match.kernel != DISPATCH
    assert match.candidates[-1]["kernel"] != DISPATCH or not match.candidates[-1]["against"]


@torch.no_grad()
def test_dispatch_can_be_locked():
    module = Attention()
    backend = Rewriting(assume_finite=True, lock={"attention": DISPATCH})
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    check(compiled, module, sequence(64))
    assert kernels_of(backend) == [DISPATCH]
    assert any("layerzero.dispatch" in str(node.target) for node in backend.graphs[0].graph.nodes)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_compiles_as_often_as_decisions_change(monkeypatch):
    module = Attention()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(sequence(64)), is_fast)
    lz.clear_reports()
    compiled = torch.compile(
        module, backend=layerzero, fullgraph=True, dynamic=True, options={"layerzero.assume_finite": True}
    )
    for length in LENGTHS[::3]:
        check(compiled, module, sequence(length))
    assert len(lz.reports()) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("data_decides_sizes")
@torch.no_grad()
def test_inductor_compiles_the_dispatching_call(monkeypatch):
    module = Selected()
    measured(monkeypatch, lambda backend: dynamic(module, backend)(*selection_of(40)), is_fast)
    lz.clear_reports()
    options = {"layerzero.assume_finite": True, "layerzero.strict": True}
    compiled = torch.compile(module, backend=layerzero, fullgraph=True, dynamic=True, options=options)
    for length in (2, 7, 40, 90):
        check(compiled, module, *selection_of(length))
    (report,) = lz.reports()
    assert [match.kernel for match in report.matches] == [DISPATCH]
