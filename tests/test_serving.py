"""Served models: no call waits for a compiler, every answer is the model's, and nothing of a compile is seen outside."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lz_compile
from lz_compile import ArgumentError, OptionError, Padding, Served, ServedState, serve
from lz_compile.ground import events, store
from lz_compile.lowering import frames
from lz_compile.tools import serving, serving_thread

pytestmark = pytest.mark.usefixtures("no_code_generation")

Compiler = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setattr(store, "used", set())
    with torch.no_grad():
        yield


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that compiled: graphs run as they are, which takes no time to compile."""
    threads: list[str] = []

    def compile_quickly(module: Any, _inputs: Any, **_: Any) -> Any:
        threads.append(threading.current_thread().name)
        return module.forward

    monkeypatch.setattr(serving_thread, "layerzero", compile_quickly)
    return threads


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiles end when it is set."""
    opened = threading.Event()

    def compile_slowly(module: Any, _inputs: Any, **_: Any) -> Any:
        while not opened.is_set():
            time.sleep(0.005)
        return module.forward

    monkeypatch.setattr(serving_thread, "layerzero", compile_slowly)
    yield opened
    opened.set()


class Model(nn.Module):
    """A small model that knows its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.up(x).tanh() * self.scale
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return y + y.sum(1, keepdim=True)


def settled(served: Served, *args: Any, **kwargs: Any) -> ServedState:
    """The state after a call of a new shape and its compile."""
    served(*args, **kwargs)
    assert served.wait(60)
    return served.state()


@pytest.mark.through_inductor
def test_through_inductor_a_new_shape_is_answered_and_then_compiled():
    model, x = Model(), torch.randn(2, 5, 4)
    with serve(model) as served:
        torch.testing.assert_close(served(x), model(x))
        assert served.wait(120)
        torch.testing.assert_close(served(x), model(x))
        state = served.state()
    assert (state.ready, state.compiled, dict(state.eager)) == (1, 1, {"new": 1})
    assert state.compile_s > 0
    assert state.to_dict()["ready"] == 1


def test_no_call_compiles(compiles: list[str]):
    model = Model()
    with serve(model) as served:
        for length in (3, 4, 3, 5, 4, 3):
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(served(x), model(x), rtol=0, atol=0)
            served.wait(60)
        state = served.state()
    assert compiles == ["lz_compile.serve"] * 3
    assert (state.ready, state.compiled, dict(state.eager)) == (3, 3, {"new": 3})


def test_calls_are_answered_while_a_shape_is_compiled(gate: threading.Event):
    model, x = Model(), torch.randn(2, 5, 4)
    with serve(model) as served:
        for _ in range(3):
            torch.testing.assert_close(served(x), model(x))
        assert not served.wait(0.05)
        assert dict(served.state().eager) == {"new": 1, "waiting": 2}
        gate.set()
        assert served.wait(60)
        served(x)
        assert served.state().compiled == 1


def test_where_the_queue_is_full_a_call_is_answered_and_asks_again(gate: threading.Event):
    model = Model()
    with serve(model, queued=1) as served:
        for length in range(3, 8):
            served(torch.randn(2, length, 4))
        eager = served.state().eager
        assert eager["full"] >= 2
        assert eager["new"] + eager["full"] == 5
        gate.set()
        served.wait(60)
        for length in range(3, 8):
            settled(served, torch.randn(2, length, 4))
        assert served.state().ready == 5


def test_no_more_shapes_are_compiled_than_are_asked_for(compiles: list[str]):
    with serve(Model(), most=2) as served:
        for length in (3, 4, 5, 5):
            settled(served, torch.randn(2, length, 4))
        assert served.state().ready == len(compiles) == 2
        assert served.state().eager == {"new": 2, "full": 2}


def test_what_cannot_be_compiled_is_eager_for_good(compiles: list[str]):
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    x = torch.ones(3)
    with serve(breaks) as served, events.collect() as happened:
        state = settled(served, x)
        assert state.ready == 0
        (failure,) = state.failures.values()
        assert "graph_break" in failure
        settled(served, x)
        torch.testing.assert_close(served(x), x + 1)
        assert served.state().eager == {"new": 2, "failed": 1}
        assert not happened, "events of the thread are its own"
    assert not compiles


def test_what_a_kernel_compile_raises_is_told(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(serving_thread, "layerzero", fails)
    with serve(Model()) as served:
        (failure,) = settled(served, torch.ones(1, 2, 4)).failures.values()
    assert "planted" in failure


def test_a_function_without_tensors_has_nothing_to_compile(compiles: list[str]):
    with serve(lambda x: x) as served:
        (failure,) = settled(served, 3).failures.values()
    assert "nothing in it to compile" in failure or "no compiled frames" in failure
    assert not compiles


def test_the_modes_of_a_call_are_its_own(compiles: list[str]):
    model, x = Model(), torch.randn(2, 3, 4)
    with serve(model) as served:
        settled(served, x)
        with torch.inference_mode():
            settled(served, x)
        with torch.autocast("cpu", torch.bfloat16):
            assert settled(served, x).ready == 3
            assert served(x).dtype is model(x).dtype
        with torch.enable_grad():
            settled(served, x)
            served(x).sum().backward()
        gradient = model.up.weight.grad
        assert gradient is not None
        model.zero_grad()
        with torch.enable_grad():
            model(x).sum().backward()
        torch.testing.assert_close(gradient, model.up.weight.grad)
        model.train(not model.training)
        assert settled(served, x).ready == 5
        assert served.state().compiled == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2, 3, 4), torch.ones(3, 2, 4).transpose(0, 1)),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.float64)),
        (torch.ones(2, 3, 4), 2),
        (2, 2.0),
        (1, True),
    ],
)
def test_calls_of_other_kinds_are_other_shapes(compiles: list[str], one: Any, other: Any):
    with serve(lambda x: torch.ones(3) + (x.double().sum() if isinstance(x, Tensor) else x)) as served:
        settled(served, one)
        assert settled(served, other).ready == len(compiles) == 2


def test_two_arguments_that_are_one_tensor_are_another_call(compiles: list[str]):
    def both(x: Tensor, y: Tensor) -> Tensor:
        return x + 2 * y

    x, y = torch.ones(3), torch.zeros(3)
    with serve(both) as served:
        settled(served, x, x)
        settled(served, x, y)
        torch.testing.assert_close(served(x, x), 3 * x)
        torch.testing.assert_close(served(x, y), x)
        assert served.state().compiled == len(compiles) == 2


@pytest.mark.parametrize("make", [lambda: bytearray(2), Model, object])
def test_arguments_that_cannot_be_told_apart_are_answered_and_let_go(compiles: list[str], make: Callable[[], Any]):
    class Cache:
        """Somebody's, of whatever."""

    with serve(lambda x, *_: x + 1) as served:
        torch.testing.assert_close(served(torch.ones(2), make()), torch.full((2,), 2.0))
        cache = Cache()
        gone = weakref.ref(cache)
        served(torch.ones(2), cache)
        del cache
        assert gone() is None
        assert served.state().eager == {"arguments": 2}
    assert not compiles


def test_shapes_that_are_not_compiled_are_forgotten(compiles: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_MOST_NEW", 3)
    with serve(lambda x, y: x + y, most=1) as served:
        settled(served, torch.ones(2), 0.5)
        for step in range(20):
            served(torch.ones(2), step)
        assert len(served._shapes) == 4
        torch.testing.assert_close(served(torch.ones(2), 0.5), torch.full((2,), 1.5))
        assert served.state().compiled == 1


def test_a_zero_is_not_the_other_and_nan_is_one_shape(compiles: list[str]):
    with serve(lambda x, y: x * y) as served:
        for value in (0.0, -0.0, float("nan"), float("nan")):
            settled(served, torch.ones(2), value)
        assert served.state().ready == len(compiles) == 3
        assert served(torch.ones(2), -0.0).signbit().all()


def test_another_state_of_the_program_is_compiled_anew(compiles: list[str]):
    model, x = Model(), torch.randn(2, 3, 4)
    with serve(model) as served:
        settled(served, x)
        model.scale = 5.0
        torch.testing.assert_close(served(x), model(x))
        assert served.state().eager["guards"] == 1
        settled(served, x)
        for scale in (5.0, 2.0, 5.0, 2.0):
            model.scale = scale
            torch.testing.assert_close(served(x), model(x))
        assert served.state().compiled == 4
        assert len(compiles) == 2


def test_a_thread_with_another_number_of_threads_is_served(compiles: list[str]):
    model, x, before = Model(), torch.randn(2, 3, 4), torch.get_num_threads()
    with serve(model) as served:
        settled(served, x)
        try:
            torch.set_num_threads(before + 1)
            settled(served, x)
            served(x)
        finally:
            torch.set_num_threads(before)
        served(x)
        assert (served.state().compiled, served.state().ready) == (2, 2)


def test_new_weights_are_seen(compiles: list[str]):
    model, x = Model(), torch.randn(2, 3, 4)
    with serve(model) as served:
        settled(served, x)
        model.up.weight.mul_(3)
        torch.testing.assert_close(served(x), model(x), rtol=0, atol=0)
        assert served.state().compiled == 1


# ---- the background --------------------------------------------------------------------------------------------------


def test_random_numbers_that_are_drawn_meanwhile_are_those_that_come(monkeypatch: pytest.MonkeyPatch):
    began, ends = threading.Event(), threading.Event()

    def compile_by_seeds(module: Any, _inputs: Any, **_: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            began.set()
            while not ends.is_set():
                time.sleep(0.001)
        return module.forward

    monkeypatch.setattr(serving_thread, "layerzero", compile_by_seeds)
    model = Model()
    torch.manual_seed(0)
    expected = torch.rand(60)
    torch.manual_seed(0)
    with serve(model) as served:
        drawn = [torch.rand(20)]
        served(torch.ones(2, 3, 4))
        assert began.wait(60)
        drawn.append(torch.rand(20))
        ends.set()
        assert served.wait(60)
        drawn.append(torch.rand(20))
    torch.testing.assert_close(torch.cat(drawn), expected, rtol=0, atol=0)


def test_nothing_of_the_model_runs_in_the_background(compiles: list[str]):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    x = torch.randn(8, 4)
    with serve(model) as served:
        settled(served, x)
        assert norm.num_batches_tracked == 1
        served(x)
        assert norm.num_batches_tracked == 2
        assert served.state().compiled == len(compiles) == 1


@contextmanager
def stepping(turn: serving_thread.Turns) -> Iterator[list[int]]:
    """A compile in another thread: the number of its steps so far."""
    steps, done = [0], threading.Event()

    def count() -> None:
        steps[0] += 1

    def work() -> None:
        with turn.compile():
            while not done.is_set():
                count()

    thread = threading.Thread(target=work)
    thread.start()
    while not steps[0]:
        time.sleep(0.001)
    yield steps
    done.set()
    thread.join()


def test_a_compile_stands_still_while_a_call_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_thread, "PATIENCE_S", 10.0)
    turn = serving_thread.Turns()
    with stepping(turn) as steps:
        with turn.call(0.0):
            time.sleep(0.05)
            before = steps[0]
            time.sleep(0.2)
            assert steps[0] == before
        time.sleep(0.05)
        assert steps[0] > before


def test_calls_that_leave_no_time_between_them_do_not_stop_a_compile_for_good(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_thread, "PATIENCE_S", 0.02)
    turn, done = serving_thread.Turns(), threading.Event()

    def call() -> None:
        while not done.is_set():
            with turn.call(0.004):
                time.sleep(0.004)

    callers = [threading.Thread(target=call) for _ in range(3)]
    with stepping(turn) as steps:
        for caller in callers:
            caller.start()
        time.sleep(0.1)
        before = steps[0]
        time.sleep(0.5)
        assert steps[0] > before + 100
        done.set()
        for caller in callers:
            caller.join()


def test_settings_are_those_of_before_when_the_last_of_several_compiles_ends():
    gc.unfreeze()
    before = sys.getswitchinterval(), gc.get_threshold()
    with ExitStack() as second:
        with stepping(serving_thread.Turns()):
            second.enter_context(stepping(serving_thread.Turns()))
        assert gc.get_threshold() != before[1]
        assert gc.get_freeze_count()
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == (*before, 0)


def test_a_compile_that_holds_a_lock_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_thread, "DUTY", 0.0)
    turn, lock, holds = serving_thread.Turns(), threading.Lock(), threading.Event()

    def work() -> None:
        with turn.compile(), lock:
            holds.set()
            for _ in range(20):
                time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    assert holds.wait(10)
    start = time.monotonic()
    with turn.call(0.0), lock:
        assert time.monotonic() - start < 5, "it stands still once, and not at each of its steps"
    thread.join(10)
    assert not thread.is_alive()


def test_modules_are_called_as_ever_while_another_thread_traces():
    model, x, traced = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(1, 4), threading.Event()
    done = threading.Event()

    def traced_slowly(x: Any) -> Any:
        traced.set()
        done.wait(10)
        return x

    def trace() -> None:
        with frames.traces_apart():
            torch.fx.symbolic_trace(traced_slowly)

    before = nn.Module.__call__
    thread = threading.Thread(target=trace)
    thread.start()
    assert traced.wait(10)
    assert nn.Module.__call__ is not before
    model(x)
    done.set()
    thread.join()
    assert nn.Module.__call__ is before
    assert torch.fx.symbolic_trace(model).graph.find_nodes(op="call_module", target="0")


def test_what_dynamo_raises_while_another_thread_traces_is_answered_eagerly(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch
):
    model, x = Model(), torch.randn(2, 3, 4)
    with serve(model) as served:
        settled(served, x)
        fx = torch.fx._symbolic_trace
        if hasattr(fx, "_is_fx_tracing_flag"):
            monkeypatch.setattr(fx, "_is_fx_tracing_flag", True)
        else:  # since 2.14 each thread has its own: what is left is a trace in this one
            monkeypatch.setattr(fx, "_get_is_fx_tracing", lambda: True)
        torch.testing.assert_close(served(x), model(x))
        monkeypatch.undo()
        assert served.state().eager == {"new": 1, "guards": 1}
        served(x)
        assert served.state().compiled == 1


def test_a_compile_that_fails_for_a_reason_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    left = [1]

    def fails_once(module: Any, *_: Any, **__: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise SystemExit("planted")
        return module.forward

    monkeypatch.setattr(serving_thread, "layerzero", fails_once)
    model, x = Model(), torch.ones(1, 2, 4)
    with serve(model) as served:
        assert "planted" in next(iter(settled(served, x).failures.values()))
        assert settled(served, x).ready == 1
        assert not served.state().failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_serves_what_was_compiled(compiles: list[str]):
    model, x, y = Model(), torch.ones(1, 2, 4), torch.ones(1, 3, 4)
    with serve(model) as served:
        settled(served, x)
        child = os.fork()
        if not child:
            served(x)
            served(y)
            state = served.state()
            is_right = state.compiled == 1 and state.eager.get("closed") == 1 and served.wait(5)
            os._exit(0 if is_right and served.warmup(progress=False).ready == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_settings_of_the_process_are_those_of_before(compiles: list[str]):
    import sys

    gc.unfreeze()
    before = sys.getswitchinterval(), gc.get_freeze_count(), gc.isenabled(), gc.get_threshold()
    with serve(Model()) as served:
        settled(served, torch.ones(2, 3, 4))
    assert (sys.getswitchinterval(), gc.get_freeze_count(), gc.isenabled(), gc.get_threshold()) == before


def test_closing_ends_a_compile_and_calls_are_answered_as_before(gate: threading.Event):
    model, x, y = Model(), torch.ones(2, 3, 4), torch.ones(2, 4, 4)
    served = serve(model)
    gate.set()
    settled(served, x)
    gate.clear()
    served(y)
    start = time.monotonic()
    served.close()
    served.close()
    assert time.monotonic() - start < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "lz_compile.serve"]
    torch.testing.assert_close(served(x), model(x))
    torch.testing.assert_close(served(y), model(y))
    assert served.state().compiled == 1
    assert served.state().eager["closed"] == 1
    assert served.wait(1)
    assert served.warmup(progress=False).ready == 1


def test_the_thread_ends_with_what_is_served(compiles: list[str]):
    served = serve(Model())
    settled(served, torch.ones(2, 3, 4))
    del served
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "lz_compile.serve"]


def test_many_threads_call(compiles: list[str]):
    model = Model()
    wrong: list[Any] = []

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for step in range(30):
                x = torch.randn(2, 3 + step % 4, 4, generator=generator)
                if not torch.equal(served(x), model(x)):
                    wrong.append(x)

    with serve(model) as served:
        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert served.wait(60)
        state = served.state()
    assert not wrong
    assert state.ready == len(compiles) == 4
    assert state.compiled + sum(state.eager.values()) == 180


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_calls_are_padded_to_sizes_that_are_compiled(compiles: list[str]):
    model, padding = Model(), Padding(1, (4, 8))

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return model(x, mask)

    with serve(masked, padding=padding) as served:
        for length in (3, 2, 3, 7, 4, 6, 9, 9):
            x, mask = torch.randn(2, length, 4), torch.ones(2, length)
            result = served(x, mask=mask)
            torch.testing.assert_close(result, masked(x, mask))
            assert result.shape == (2, length, 4)
            served.wait(60)
        state = served.state()
    assert (state.ready, state.padded, state.compiled) == (3, 3, 2)
    assert state.eager == {"new": 3}
    assert len(compiles) == 3


def test_a_model_that_gives_something_else_for_it_is_not_padded(compiles: list[str]):
    def mean(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    with serve(mean, padding=Padding(1, (8,))) as served:
        with events.collect() as happened:
            for length in (3, 3, 5, 3, 3):
                x = torch.randn(2, length, 4)
                torch.testing.assert_close(served(x), mean(x))
                served.wait(60)
        state = served.state()
    assert [event.code for event in happened] == ["PADDING_DIFFERS"]
    assert "is off by" in happened[0].message
    assert (state.padded, state.compiled, state.ready) == (1, 1, 3)


def test_values_to_pad_with_are_given_by_name_or_position(compiles: list[str]):
    def largest(x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y).amax(1)

    for values in ({0: -torch.inf, "y": -torch.inf}, {"x": -torch.inf, 1: -torch.inf}):
        with serve(largest, padding=Padding(1, (4,), values)) as served:
            for call in (0, 1, 2, 3):
                x, y = -torch.rand(2, 3), -torch.rand(2, 3)
                result = served(x, y) if call % 2 else served(x, y=y)
                torch.testing.assert_close(result, largest(x, y))
                served.wait(60)
            assert served.state().padded == 2
            assert served.state().ready == 2


# ---- before traffic --------------------------------------------------------------------------------------------------


def test_shapes_are_remembered_for_the_next_process(compiles: list[str], capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    model, x, mask = Model(), torch.randn(2, 5, 4), torch.ones(2, 5)
    with serve(model) as served:
        settled(served, x, mask)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            settled(served, x.transpose(0, 1), mask=None)
    assert store.used, "what is remembered goes with the artifacts"
    compiles.clear()
    with serve(Model(), calls=[((torch.ones(1, 2, 4),), {})]) as served:
        assert served.warmup().ready == len(compiles) == 3
        assert "3/3" in capsys.readouterr().err
        served(x, mask)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            served(x.transpose(0, 1), mask=None)
        served(torch.ones(1, 2, 4))
        state = served.warmup(progress=False)
    assert (state.compiled, dict(state.eager), state.ready) == (3, {}, 3)
    assert len(compiles) == 3
    other = Model()
    other.up = nn.Linear(4, 4, bias=False)
    with serve(other) as served:
        assert served.warmup(progress=False).ready == 0, "another model"


def test_what_cannot_be_remembered_is_an_event(compiles: list[str], caplog: pytest.LogCaptureFixture):
    with serve(lambda x, _: x + 1) as served:
        settled(served, torch.ones(2), torch.float32)
    assert (
        "[SHAPE_NOT_KEPT] a call with [2] is not remembered for the next process: an argument is a dtype" in caplog.text
    )


def test_what_is_remembered_and_cannot_be_made_is_an_event(compiles: list[str], caplog: pytest.LogCaptureFixture):
    model = Model()
    told = {"call": {"list": [{"list": [{"tensor": [[2], [1], "no_dtype", "cpu", False]}]}, {"dict": {}}]}, "modes": {}}
    store.Store("shapes").save(serving_thread.key_of(model), {"a": told})
    with serve(model) as served:
        assert served.warmup(progress=False).ready == 0
    assert "[SHAPE_NOT_MADE]" in caplog.text


def test_arguments_that_are_wrong_say_so():
    with pytest.raises(ArgumentError, match=r"lz\.serve: expected queued as a whole number, 1 or more, received 0"):
        serve(Model(), queued=0)
    with pytest.raises(ArgumentError, match=r"lz\.serve: expected padding with sizes that grow, received \(8, 4\)"):
        serve(Model(), padding=Padding(1, (8, 4)))
    with pytest.raises(ArgumentError, match=r"lz\.serve: expected padding with values for x, mask, received masks"):
        serve(Model(), padding=Padding(1, (8,), {"masks": 1}))
    with pytest.raises(OptionError):
        serve(Model(), options={"layerzero.nothing": 1})
    assert lz_compile.serve is serve
