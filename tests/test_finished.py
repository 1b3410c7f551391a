"""Finished graphs: what they follow from is their key, they give the same bits elsewhere, and what does not fit is compiled."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from backends import USUAL_MACHINE, known_instruction_sets
from rich.console import Console
from torch import nn

import lz_compile
from lz_compile.compile import finished
from lz_compile.compile.finished import Attempt
from lz_compile.ground import events, health
from lz_compile.report.report import GraphReport
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perf_record import PerfRecord

HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    finished.forget()
    torch._dynamo.reset()
    yield
    finished.forget()


# ---- the key ---------------------------------------------------------------------------------------------------------


def attempt(function: Callable[..., Any], *inputs: Any, mode: Any = None, options: Any = None, **how: Any) -> Attempt:
    """What becomes of a function's graph, as Dynamo hands it over; by default without gradients."""
    found: list[Attempt] = []

    def backend(module: Any, given: Any) -> Any:
        found.append(Attempt.at(module, given, mode, options))
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(how.pop("grad", False)):
        torch.compile(function, backend=backend, **{"dynamic": False, **how})(*inputs)
    return found[0]


def scores(x: torch.Tensor, y: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return (x @ y.mT * scale).softmax(-1)


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(shape or (4, 8), dtype=dtype), torch.ones(shape or (4, 8), dtype=dtype)


def key(**how: Any) -> str:
    found = attempt(scores, *pair(), **how)
    assert found.key is not None, found.why
    return found.key


def test_the_same_graph_has_the_same_key():
    assert key() == key()


def _other_inputs() -> dict[str, tuple[Any, ...]]:
    x, y = pair()
    return {
        "a constant": (*pair(), 0.25),
        "a type of a constant": (*pair(), 1),
        "a shape": pair(5, 8),
        "a dtype": pair(dtype=torch.float64),
        "strides": (torch.ones(8, 4).mT, y),
        "an offset": (torch.ones(5, 8)[1:], y),
        "a parameter": (nn.Parameter(x), y),
        "a gradient": (x.clone().requires_grad_(), y),
        "one tensor twice": (x, x),
        "memory that is shared": (x, x.view(4, 8)),
    }


@pytest.mark.parametrize("what", _other_inputs())
def test_what_comes_in_otherwise_has_another_key(what: str):
    found = attempt(scores, *_other_inputs()[what])
    assert found.key not in (None, key()), found.why


@contextmanager
def _set(getter: Callable[[], Any], setter: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


_SETTINGS: dict[str, Callable[[], Any]] = {
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "the type of autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "threads": lambda: _set(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "the precision of products": lambda: _set(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic algorithms": lambda: _set(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "the default type": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "PyTorch's attention": lambda: _set(
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False
    ),
    "the order of a product of many": lambda: _set(
        lambda: torch.backends.opt_einsum.strategy,
        lambda strategy: setattr(torch.backends.opt_einsum, "strategy", strategy),
        "greedy",
    ),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "Inductor's settings": lambda: torch._inductor.config.patch("cpp.simdlen", 1),
    "AOTAutograd's settings": lambda: torch._functorch.config.patch(functionalize_rng_ops=True),
    "a preference": lambda: lz_compile.prefer("lz.blocked"),
    "an avoidance": lambda: lz_compile.avoid("torch.sdpa"),
    "a lock": lambda: lz_compile.lock("attention", "lz.blocked"),
    "the backend switched off": lz_compile.disabled,
}


@pytest.mark.parametrize("what", _SETTINGS)
def test_under_another_setting_a_graph_has_another_key(what: str):
    plain = key()
    with _SETTINGS[what]():
        assert key(grad=torch.is_grad_enabled()) != plain


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"layerzero.layers": "fold"}},
        {"options": {"layerzero.strict": True}},
        {"options": {"layerzero.tune": "off"}},
        {"options": {"layerzero.assume_finite": True}},
        {"options": {"layerzero.lock": {"attention": "torch.sdpa"}}},
        {"options": {"epilogue_fusion": False}},
    ],
    ids=str,
)
def test_under_another_option_a_graph_has_another_key(how: dict[str, Any]):
    assert key(**how) != key()


def test_another_dispatch_table_is_another_key(tmp_path: Path):
    table = tmp_path / "table.json"
    keys = [key()]
    for text in ("{}", "{ }"):
        table.write_text(text)
        keys.append(key(options={"layerzero.dispatch_table": str(table)}))
    assert len(set(keys)) == 3
    assert "cannot be read" in attempt(scores, *pair(), options={"layerzero.dispatch_table": str(table) + "x"}).why


def test_another_version_or_machine_is_another_key(monkeypatch: pytest.MonkeyPatch):
    keys = [key()]
    for name in ("code_runs_on", "environment"):
        with monkeypatch.context() as patched:
            patched.setattr(f"lz_compile.compile.finished_key.{name}", lambda *_: "another")
            keys.append(key())
    monkeypatch.setattr("lz_compile.ground.store.source_hash", lambda: "0" * 64)
    assert len({*keys, key()}) == 4


@torch.library.custom_op("finished_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _WithConstant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0])


REFUSED: dict[str, tuple[Callable[[], Attempt], str]] = {
    "symbols": (lambda: attempt(scores, *pair(), dynamic=True), "symbolic"),
    "a size of the data": (lambda: attempt(lambda x: x[x > 0] * 2, pair()[0], dynamic=False), "symbolic"),
    "gradients": (lambda: attempt(scores, nn.Parameter(pair()[0]), pair()[1], grad=True), "a backward pass follows"),
    "an operator of the program's": (lambda: attempt(lambda x: twice(x) + 1, pair()[0]), "of the program's own"),
    "a checkpoint": (
        lambda: attempt(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), pair()[0]),
        "graph",
    ),
    "places of memory": (lambda: attempt(lambda x: x.as_strided((2,), (1,), 1), pair()[0]), "places of its memory"),
    "a dump": (lambda: attempt(scores, *pair(), options={"layerzero.dump": "x"}), "its graph is asked for"),
    "verification": (
        lambda: attempt(scores, *pair(), options={"layerzero.verify": "always"}),
        "its graph is asked for",
    ),
    "another device": (lambda: attempt(scores, *(each.to("meta") for each in pair())), "another device"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_told_in_full_is_compiled_in_every_process(what: str):
    made, why = REFUSED[what]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = made()
    assert found.key is None
    assert why in found.why


def test_kernels_of_the_program_faults_and_passes_are_met_in_every_process(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setitem(registry._state.registered, ("attention", "mine"), None)
        assert "registered by the program" in attempt(scores, *pair()).why
    health.retire("lz.blocked", "a test")
    assert "retired" in attempt(scores, *pair()).why
    health.restore("lz.blocked")
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert "passes of the program's" in attempt(scores, *pair()).why
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "PyTorch is to keep nothing" in attempt(scores, *pair()).why


def test_a_graph_that_cannot_be_told_is_an_event_and_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lz_compile.compile.finished.key_of", lambda *_: 1 // 0)
    with events.collect() as happened:
        found = attempt(scores, *pair())
    assert found.key is None
    assert [event.code for event in happened] == ["FINISHED_NOT_TOLD"]


# ---- from a file, in this process ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Writes to a buffer, hands out a view of what it was handed, and attends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        query = self.linear(x)
        return (query @ x.mT / 4).softmax(-1) @ x * self.calls, x[:, 1:]


class Masked(nn.Module):
    """A mask of the program's own, whose values a kernel's choice rests on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).tril().log())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT / 4 + self.mask).softmax(-1) @ x


def _compiled(model: Callable[..., Any], *inputs: Any) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend="layerzero", dynamic=False)(*inputs)


@dataclass
class Saved:
    """A file with a finished block, that block as it was, its input, what it gave, and what was told of it."""

    path: Path
    model: Block
    x: torch.Tensor
    result: Any
    report: GraphReport


@pytest.fixture(scope="module")
def known() -> list[Saved]:
    """What was saved once, under what holds for each test."""
    return []


@pytest.fixture
def saved(known: list[Saved], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    if not known:
        directory = tmp_path_factory.mktemp("saved")
        torch.manual_seed(0)
        model, x = Block().eval(), torch.randn(2, 8, 16)
        _compiled(Masked(), x)
        assert not finished._made, "it holds for those values only"
        result = _compiled(model, x)
        lz_compile.save_artifacts(directory / "a.zip")
        known.append(Saved(directory / "a.zip", model, x, result, lz_compile.reports()[-1]))
    known[0].model.calls.zero_()
    finished.forget()
    return known[0]


def _again(saved: Saved, path: Path | None = None) -> tuple[Any, GraphReport]:
    lz_compile.load_artifacts(path or saved.path)
    result = _compiled(saved.model, saved.x)
    return result, lz_compile.reports()[-1]


def _is_equal(ones: Any, others: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_a_finished_graph_gives_the_same_bits_writes_and_views(saved: Saved):
    found, report = _again(saved)
    assert report.loaded
    assert not saved.report.loaded
    assert report.graph_id != saved.report.graph_id
    assert set(report.seconds) == {"load"}
    console = Console(file=io.StringIO(), width=200)
    console.print(lz_compile.Report([report]))
    assert "1 of 1 graphs from a file of artifacts" in console.file.getvalue()
    assert [match.to_dict() for match in report.matches] == [match.to_dict() for match in saved.report.matches]
    assert _is_equal(found, saved.result)
    assert saved.model.calls == 1
    assert found[1].untyped_storage().data_ptr() == saved.x.untyped_storage().data_ptr()
    assert not _is_equal(_compiled(saved.model, saved.x), saved.result), "the buffer is read anew in every call"


def test_constants_of_a_finished_graph_are_there_again(tmp_path: Path):
    def weighed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.tensor([float(i) for i in range(64)])
        return weights, x * weights

    wanted = _compiled(weighed, torch.ones(64))
    lz_compile.save_artifacts(tmp_path / "a.zip")
    lz_compile.load_artifacts(tmp_path / "a.zip")
    for _ in range(2):
        found = _compiled(weighed, torch.ones(64))
        assert lz_compile.reports()[-1].loaded
        assert _is_equal(found, wanted)
        found[0].zero_()


def test_another_mask_in_a_buffer_is_read_anew(tmp_path: Path):
    """What was decided for a mask of no use to any kernel says nothing of a causal one."""

    class Useless(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))

    x = torch.randn(2, 8, 16)
    wanted = _compiled(Useless(), x)
    assert finished._made, "nothing rests on those values"
    lz_compile.save_artifacts(tmp_path / "a.zip")
    finished.forget()
    lz_compile.load_artifacts(tmp_path / "a.zip")
    assert torch.equal(_compiled(Useless(), x), wanted)
    assert lz_compile.reports()[-1].loaded
    model = Useless()
    model.mask.copy_(Masked().mask)
    found = _compiled(model, x)
    assert not lz_compile.reports()[-1].loaded
    torch.testing.assert_close(found, model(x))


def test_other_measurements_compile_a_finished_graph_anew(saved: Saved):
    lz_compile.load_artifacts(saved.path)
    (data,) = finished._told.values()
    question = msgspec.msgpack.decode(data, type=finished.Finished).asked[0].question
    what = ("torch.sdpa", question.operation, "cpu", question.dtype, question.environment, question.match)
    perfdb.database().put([PerfRecord(*what, 3.0, 3.0, 9)])
    found, report = _again(saved)
    assert not report.loaded
    torch.testing.assert_close(found, saved.result)


def test_what_was_taken_up_is_saved_again(saved: Saved, tmp_path: Path):
    assert _again(saved)[1].loaded
    kinds = {part.kind: part.count for part in lz_compile.save_artifacts(tmp_path / "b.zip").parts}
    assert kinds["finished"] == 1
    finished.forget()
    saved.model.calls.zero_()
    found, report = _again(saved, tmp_path / "b.zip")
    assert report.loaded
    assert _is_equal(found, saved.result)


def test_what_pytorch_did_not_write_is_an_event_and_compiled(saved: Saved):
    lz_compile.load_artifacts(saved.path)
    ((name, data),) = finished._told.items()
    made = msgspec.msgpack.decode(data, type=finished.Finished)
    for broken in (
        replace(made, pickled=b"nothing"),
        replace(made, code=replace(made.code, source="call = nobody")),
        replace(made, code=replace(made.code, operators=("no_such_operator",))),
    ):
        finished._told[name] = msgspec.msgpack.encode(broken)
        saved.model.calls.zero_()
        found = _compiled(saved.model, saved.x)
        assert not lz_compile.reports()[-1].loaded
        torch.testing.assert_close(found, saved.result)
    with pytest.raises(msgspec.MsgspecError):
        finished.offer(name, b"nothing")


# ---- in other processes ----------------------------------------------------------------------------------------------

_PROGRAM = """
import sys, torch, lz_compile
from pathlib import Path
import torch.nn.functional as F
from torch import nn
path, how, results = sys.argv[1:]
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 32))
    def forward(self, x):
        q, k, v = ((w * x).unflatten(-1, (2, 16)).transpose(1, 2) for w in self.w)
        return F.dropout(((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2), 0.25) + x
torch.manual_seed(0)
model, x = Attention(), torch.randn(2, 24, 32)
if how == "load":
    assert not lz_compile.load_artifacts(path).left_out
if how == "damage":
    lz_compile.load_artifacts(path)
    for library in Path(torch._inductor.runtime.cache_dir_utils.cache_dir()).glob("*/*.so"):
        library.unlink()
torch.manual_seed(1)
with torch.no_grad(), lz_compile.prefer("lz.tiled"):
    found = torch.compile(model, backend="layerzero", dynamic=False)(x)
(report,) = lz_compile.reports()
if how == "save":
    lz_compile.save_artifacts(path)
    torch.save(found, results)
same = torch.equal(found, torch.load(results))
print(report.loaded, same, "torch._inductor.compile_fx" in sys.modules, *(each.kernel for each in report.matches))
"""


def _run(tmp_path: Path, how: str, **variables: str) -> list[str]:
    caches = {name: str(tmp_path / f"{how}-{name}") for name in ("LAYERZERO_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", USUAL_MACHINE + _PROGRAM, str(tmp_path / "a.zip"), how, str(tmp_path / "results.pt")],
        env={**os.environ, "OMP_NUM_THREADS": "2", **caches, **known_instruction_sets(), **variables},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].split()


def test_another_process_takes_up_a_graph_without_inductor_and_draws_the_same_numbers(tmp_path: Path):
    saved = _run(tmp_path, "save")
    assert saved[:2] == ["False", "True"]
    assert _run(tmp_path, "load") == ["True", "True", str("lz.tiled" in saved), *saved[3:]]
    assert _run(tmp_path, "damage")[0] == "False", "its libraries are gone"
