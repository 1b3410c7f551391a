"""Measuring kernels, on demand and while compiling. What is measured is real; which kernel wins decides no test."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import USUAL_MACHINE, Rewriting, known_instruction_sets
from problems import kernel, measured, problem_context
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lz_compile as lz
from lz_compile.backend import layerzero
from lz_compile.compile import choices, match_tuning, measuring
from lz_compile.compile.measuring import is_measured, runnable
from lz_compile.errors import UnknownOperationError
from lz_compile.ground import events, health
from lz_compile.lowering import inductor, ops
from lz_compile.lowering.kernels.attention import blocked, torch_sdpa
from lz_compile.lowering.ops.attention import Operands
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.measure import cost
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.measure.perfdb import database
from lz_compile.runtime.measure.timing import Timing
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem import context as contexts

pytestmark = pytest.mark.usefixtures("no_preference")

ON_MISS = {"layerzero.tune": "on-miss"}
_little = match_tuning.little  # tests are given no time for it
RUN_HERE = {"inductor", "lz.blocked", "torch.sdpa"}


@pytest.fixture(autouse=True)
def own_database(monkeypatch, tmp_path):
    """An empty one, and nothing that failed before."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measuring, "_failed", set())


@pytest.fixture
def timed(monkeypatch) -> list[set[str]]:
    """The kernels of every measurement. They are run once, and the clock is made up: Inductor first, others slower."""
    found: list[set[str]] = []

    def measure(calls: dict[str, Callable[[], Any]], device: torch.device, **_: Any) -> dict[str, Timing]:
        found.append(set(calls))
        for call in calls.values():
            call()
        return {name: Timing((100.0 + place, 101.0 + place)) for place, name in enumerate(calls)}

    monkeypatch.setattr(measuring, "measure", measure)
    return found


@pytest.fixture
def eagerly(monkeypatch):
    """Forms are not compiled."""
    monkeypatch.setattr(measuring.inductor, "compile_apart", lambda function, inputs: function)


@pytest.fixture
def given_kernels(monkeypatch):
    """Measure kernels of the test's own, which compute the reference."""

    def give(**calls: Callable[..., Tensor]) -> None:
        listed = {"inductor": kernel("inductor")}
        listed |= {name: kernel(name, implementation=call) for name, call in calls.items()}
        monkeypatch.setattr(measuring, "kernels", lambda _operation: listed)

    return give


def records(context: Any = None) -> list[PerfRecord]:
    found: list[PerfRecord] = []
    for operation in ("attention.causal", "attention.full"):
        for dtype in ("float32", "bfloat16", "float64"):
            found += database(None).lookup(operation, dtype, measuring.machine.environment("cpu"))
    return found


def codes(log: Sequence[events.Event]) -> list[str]:
    return [event.code for event in log]


SMALL: dict[str, Any] = {"seq_lens": [16, 32], "head_dim": 16, "num_heads": 2, "samples": 3, "device": "cpu"}

# ---- lz.tune -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tuning_measures_every_kernel_that_can_run_and_keeps_it():
    report = lz.tune("attention.full", **{**SMALL, "seq_lens": [16]})
    (found,) = report.measured
    assert set(found.latency_us) >= RUN_HERE
    assert all(0 < us < 1e7 for us in found.latency_us.values())
    assert {record.kernel_id: record.median_us for record in records()} == dict(found.latency_us)
    for record in records():
        assert (record.samples, record.operation, record.head_dim, record.seq_bucket) == (3, "attention.full", 16, 16)
        assert record.median_us <= record.p95_us
        assert record.capabilities_hash == registry.kernels("attention")[record.kernel_id].capabilities_hash
    assert (report.known, report.remaining) == (0, 0)


def test_the_grid_is_every_combination(timed, eagerly):
    report = lz.tune(dtype=[torch.float32, torch.bfloat16], seq_lens_k=[16, 48], batch_sizes=[1, 2], **SMALL)
    assert len(report.measured) == 2 * 2 * 4 * 2
    rows = {(c.operation, c.dtype_name, *(c.dims[n] for n in ("batch_size", "seq_len_q", "seq_len_k")))
            for c in (each.context for each in report.measured)}  # fmt: skip
    assert len(rows) == 32
    assert ("attention.causal", "bfloat16", 2, 32, 48) in rows
    assert all(each >= RUN_HERE or each >= {"inductor", "torch.sdpa"} for each in timed)


def test_what_is_measured_of_a_blend_is_what_a_blend_asks_for(timed, eagerly):
    sizes = {"num_rows": 4, "num_channels": (3, 5), "inner_size": 2, "num_classes": 9}
    assert len(lz.tune("blend.convex", sizes=sizes, device="cpu").measured) == 2
    host, seed = torch.randn(2, 4, 5, 2)
    assert lz.which("blend.convex", host=host, seed=seed, alpha=0.5)["origin"] == "measured"
    report = lz.tune("blend.margin", sizes=sizes, device="cpu")
    assert [each.context.hints() for each in report.measured] == [
        {"num_rows": 4, "num_channels": 1, "inner_size": 1, "num_classes": 9}
    ]
    assert report.known == 1, "a margin has no channels"


def test_what_is_measured_is_skipped_until_it_is_asked_for_anew(timed, eagerly):
    first = lz.tune(**SMALL)
    again = lz.tune(**SMALL)
    more = lz.tune(**{**SMALL, "seq_lens": [16, 32, 64]})
    anew = lz.tune(resume=False, **SMALL)
    assert [(len(r.measured), r.known) for r in (first, again, more, anew)] == [(4, 0), (0, 4), (2, 4), (4, 0)]


def test_what_was_measured_with_fewer_kernels_is_measured_again(timed, eagerly, given_kernels):
    given_kernels(fast=torch_sdpa.attention)
    lz.tune("attention.full", **SMALL)
    given_kernels(fast=torch_sdpa.attention, new=torch_sdpa.attention)
    assert len(lz.tune("attention.full", **SMALL).measured) == 2
    assert len(lz.tune("attention.full", **SMALL).measured) == 0


def test_the_budget_leaves_problems_for_the_next_time(timed, eagerly):
    report = lz.tune(budget_s=0.0, **SMALL)
    assert 1 <= len(report.measured) + report.remaining == 4 or report.remaining == 4
    assert report.remaining >= 3
    rest = lz.tune(**SMALL)
    assert rest.known + len(rest.measured) == 4
    assert rest.remaining == 0


def test_progress_is_told_before_every_problem(timed, eagerly):
    told: list[tuple[int, int, str]] = []
    lz.tune("attention.causal", on_progress=lambda *each: told.append(each), **SMALL)
    assert told == [
        (
            0,
            2,
            "attention.causal float32 batch_size=1 num_heads=2 num_kv_heads=2 seq_len_q=16 seq_len_k=16 head_dim=16 value_dim=16",
        ),
        (
            1,
            2,
            "attention.causal float32 batch_size=1 num_heads=2 num_kv_heads=2 seq_len_q=32 seq_len_k=32 head_dim=16 value_dim=16",
        ),
    ]


def _broken(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no such instruction")


def test_a_kernel_that_raises_is_an_event_and_left_out(timed, eagerly, given_kernels):
    given_kernels(broken=_broken, sound=torch_sdpa.attention)
    with events.collect() as log:
        report = lz.tune("attention.full", **SMALL)
    assert [set(each.latency_us) for each in report.measured] == [{"inductor", "sound"}] * 2
    assert codes(log) == ["MEASUREMENT_FAILED"] * 2
    assert "broken for attention.full" in log[0].message
    assert "RuntimeError: no such instruction" in log[0].message
    assert lz.tune("attention.full", **SMALL).known == 2, "what fails in this process is not tried again in it"


def test_where_inductor_itself_fails_nothing_is_kept(timed, eagerly, given_kernels, monkeypatch):
    given_kernels(sound=torch_sdpa.attention)
    monkeypatch.setattr("lz_compile.lowering.ops.attention.Sample.as_written", lambda self: _broken)
    with events.collect() as log:
        report = lz.tune("attention.full", **SMALL)
    assert (report.measured, records(), timed) == ((), [], [])
    assert codes(log) == ["MEASUREMENT_FAILED"] * 2


def test_what_a_fallback_did_is_not_the_measurement_of_a_kernel(eagerly, given_kernels, timed):
    def guarded(x: Operands, attrs: Any) -> Tensor:
        return health.guarded("broken", _broken, torch_sdpa.attention, x, attrs)

    given_kernels(broken=guarded, sound=torch_sdpa.attention)
    try:
        report = lz.tune("attention.full", **SMALL)
        assert [set(each.latency_us) for each in report.measured] == [{"inductor", "sound"}] * 2
        assert {record.kernel_id for record in records()} == {"inductor", "sound"}
        assert [spec.kernel_id for spec in runnable(problem_context())] == ["inductor", "sound"], "it is retired by now"
    finally:
        health.restore("broken")


def test_a_forbidden_kernel_is_not_run(timed, eagerly):
    lz.configure(rules=[{"match": {"operation": "attention"}, "forbid": ["lz.blocked"]}])
    lz.tune("attention.full", **SMALL)
    assert timed
    assert not any("lz.blocked" in each for each in timed)


@pytest.mark.usefixtures("eagerly")
def test_training_measures_forward_and_backward(timed, given_kernels):
    seen: list[str] = []

    def noted(x: Operands, attrs: Any) -> Tensor:
        seen.append("forward" if torch.is_grad_enabled() else "without gradients")
        if x.query.requires_grad:
            x.query.register_hook(lambda _: seen.append("backward"))
        return torch_sdpa.attention(x, attrs)

    given_kernels(noted=noted)
    report = lz.tune("attention.full", training=True, **{**SMALL, "seq_lens": [16]})
    assert seen == ["forward", "backward"] * 2
    assert report.measured[0].context.features.keys() >= {"training"}
    seen.clear()
    lz.tune("attention.full", **{**SMALL, "seq_lens": [16]})
    assert seen == ["without gradients"] * 2


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_masks_and_shared_heads_are_part_of_the_problem(timed, eagerly, mask):
    with events.collect() as log:
        (found,) = lz.tune("attention.causal", mask=mask, num_kv_heads=1, **{**SMALL, "seq_lens": [16]}).measured
    assert {f"{mask}_mask", "gqa", "causal"} <= found.context.features.keys()
    assert found.context.dims["num_kv_heads"] == 1
    assert codes(log) == []
    assert "inductor" in timed[0]
    assert len(timed[0]) > 1


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_problem_as_written_and_with_a_kernel_gives_the_same(mask, is_causal):
    sizes = {
        "batch_size": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "seq_len_q": 6,
        "seq_len_k": 9,
        "head_dim": 8,
        "value_dim": 8,
    }
    sample = ops.module("attention").sample(
        sizes, torch.float64, torch.device("cpu"), variant="causal" if is_causal else "full", mask=mask
    )
    written = sample.as_written()(*sample.inputs)
    for call in (torch_sdpa.attention, blocked.attention):
        torch.testing.assert_close(sample.with_kernel(call)(*sample.inputs), written, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("is_training", [False, True])
def test_what_is_measured_as_written_is_no_fused_attention_of_inductors(mask, is_training):
    """What it makes of others is asked, and takes what that kernel takes: both are told apart then."""
    sizes = dict.fromkeys(("num_heads", "num_kv_heads"), 2) | {"batch_size": 1, "seq_len_q": 16, "seq_len_k": 16}
    sizes |= dict.fromkeys(("head_dim", "value_dim"), 8)
    cpu = torch.device("cpu")
    sample = ops.module("attention").sample(sizes, torch.float32, cpu, mask=mask, is_training=is_training)
    asked = [sample.as_written(), sample.as_written(partial(torch.softmax, dim=-1, dtype=torch.float32))]
    fused = [inductor.fuses_attention(each, sample.inputs, cpu, is_training) for each in asked]
    assert fused == [False, mask == "none"]


def test_without_a_database_latencies_are_only_reported(timed, eagerly):
    policy.configure(perfdb={"enabled": False})
    assert len(lz.tune("attention.full", **SMALL).measured) == 2
    assert records() == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"operation": "atention"}, UnknownOperationError, "attention"),
        (
            {"mask": "boolean"},
            ValueError,
            r"mask as one of none, bool, float, .* received 'boolean' \(did you mean 'bool'\?\)",
        ),
        ({"num_kv_heads": 3}, ValueError, "query heads in a multiple of the key heads, received 2 and 3"),
        ({"seq_lens": [16, 0]}, ValueError, r"seq_len_q as a whole number, 1 or more, received 0"),
        ({"samples": 0}, ValueError, "1 or more, received 0"),
        ({"budget_s": -1}, ValueError, "expected budget_s as a finite number, 0 or more, received -1"),
        (
            {"headdim": 64},
            ValueError,
            r"received 'headdim' \(did you mean 'head_dim'\?\).*sizes of attention.* seq_len_q",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(timed, eagerly, options, error, text):
    with pytest.raises(error, match=text):
        lz.tune(**{**SMALL, **options})
    assert timed == []


def test_a_report_prints_as_json(timed, eagerly):
    found = lz.tune("attention.full", **SMALL).to_dict()
    assert set(found) == {"schema_version", "measured", "known", "remaining", "seconds"}
    assert set(found["measured"][0]["latency_us"]) >= {"inductor", "torch.sdpa"}


def test_kernels_of_a_record_are_compared_only_if_they_were_measured_together():
    context = problem_context()
    specs = [kernel("inductor"), kernel("torch.sdpa")]
    put = database(None).put
    put([measured("inductor", context, 1.0, surroundings="a"), measured("torch.sdpa", context, 1.0, surroundings="b")])
    assert not is_measured(context, specs, context.hints())
    put([measured("torch.sdpa", context, 1.0, surroundings="a")])
    assert is_measured(context, specs, context.hints())
    assert is_measured(context, specs, context.hints(), surroundings="a")
    assert not is_measured(context, specs, context.hints(), surroundings="b")
    assert not is_measured(context, specs, {**context.hints(), "seq_len_q": 127})
    old = [specs[0], replace(specs[1], package="torch")]
    put([measured("torch.sdpa", context, 1.0, surroundings="a", kernel_version="0.1")])
    assert not is_measured(context, old, context.hints())


# ---- what is the caller's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.usefixtures("eagerly", "timed")
def test_tuning_leaves_random_numbers_and_modes_alone(training):
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        report = lz.tune("attention.full", training=training, **SMALL)
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (False, True)
    assert torch.equal(torch.rand(3), want)
    assert {record.dtype for record in records()} == {"float32"}
    with torch.inference_mode():
        again = lz.tune("attention.full", training=training, resume=False, **SMALL)
        assert torch.is_inference_mode_enabled()
    assert [set(each.latency_us) for each in again.measured] == [set(each.latency_us) for each in report.measured]


# ---- while compiling ---------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.tanh((query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value)


def operands(length: int = 20, **options: Any) -> list[Tensor]:
    return [torch.randn(2, 3, length, 16, **options) for _ in range(3)]


def run(
    function: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = None,
    tune: str | None = "on-miss",
    **options: Any,
):
    """The result and the report of a compile that measures what it misses, without Inductor."""
    torch._dynamo.reset()
    backend = Rewriting(**options, **({} if tune is None else {"tune": tune}))
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return result, backend.report


@pytest.mark.usefixtures("eagerly")
def test_a_compile_measures_what_it_misses_and_the_next_one_does_not(timed):
    inputs = operands()
    result, report = run(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert [each >= {"inductor", "torch.sdpa"} for each in timed] == [True]
    assert report.events == []
    (match,) = report.matches
    origins = {each["kernel"]: each["origin"] for each in match.candidates}
    assert {origins[name] for name in timed[0]} == {"measured"}
    assert match.context["surroundings"] != ""
    run(attention, *inputs)
    assert len(timed) == 1
    run(attention, *operands(40))
    run(lambda *each: torch.exp(attention(*each)), *inputs)
    assert len(timed) == 3, "other sizes and other surroundings are other problems"


@pytest.mark.usefixtures("eagerly")
def test_without_being_asked_a_compile_measures_nothing(timed):
    run(attention, *operands(), tune="off")
    assert timed == []
    policy.configure(perfdb={"auto_tune": True})
    run(attention, *operands(), tune="off")
    assert timed == []
    torch._dynamo.reset()
    torch.compile(attention, backend=Rewriting())(*operands())
    assert len(timed) == 1
    with lz.disabled():
        run(attention, *operands(33))
    policy.configure(perfdb={"enabled": False})
    run(attention, *operands(34))
    assert len(timed) == 1


@pytest.fixture
def costs(monkeypatch):
    """What kernels take, in ms, by an estimate; 10 s may be spent on measuring."""

    def give(left_as: str | None = None, **found: float) -> None:
        monkeypatch.setattr(choices, "left_as", lambda _: left_as)
        named = {name.replace("_", "."): ms for name, ms in found.items()}
        parts = {name: {"product": 1e3 * ms} for name, ms in named.items()}
        monkeypatch.setattr(cost, "parts", lambda kernel_id, *_: parts.get(kernel_id, {"product": 1e6}))
        monkeypatch.setattr(match_tuning, "little", lambda _: 10.0)

    return give


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(
    ("found", "measured_kernels"),
    [
        ({"inductor": 50.0, "torch_sdpa": 47.0, "lz_blocked": 60.0}, {"inductor", "torch.sdpa"}),
        ({"inductor": 90.0, "torch_sdpa": 47.0, "lz_blocked": 50.0}, {"inductor", "torch.sdpa", "lz.blocked"}),
        ({"inductor": 50.0, "torch_sdpa": 40.0}, set()),  # the estimate tells
        ({"inductor": 0.5, "torch_sdpa": 0.49}, set()),  # a thousand calls save less than measuring takes
    ],
)
def test_by_default_what_no_estimate_tells_is_measured_where_that_pays(timed, costs, found, measured_kernels):
    costs(**found)
    _, report = run(attention, *operands(), tune=None)
    assert timed == [measured_kernels] * bool(measured_kernels)
    assert report.events == []
    origins = {each["kernel"]: each["origin"] for each in report.matches[0].candidates}
    assert {name for name, origin in origins.items() if origin == "measured"} == measured_kernels
    run(attention, *operands(), tune=None)
    assert len(timed) == bool(measured_kernels), "it is kept"
    policy.configure(perfdb={"auto_tune": False})
    run(attention, *operands(21), tune=None)
    assert len(timed) == bool(measured_kernels)


@pytest.mark.usefixtures("eagerly")
def test_what_inductor_makes_of_an_attention_by_itself_is_no_question(timed, costs):
    costs(left_as="torch.sdpa", **{"inductor torch.sdpa": 49.0, "torch_sdpa": 49.0})
    _, report = run(attention, *operands(), tune=None)
    assert (timed, report.matches[0].op) == ([], "attention")


@pytest.mark.usefixtures("eagerly")
def test_measuring_takes_a_tenth_of_what_compiling_will_and_five_seconds_at_most(timed, costs, monkeypatch):
    def graph(calls: int) -> torch.fx.Graph:
        made = torch.fx.Graph()
        node = made.placeholder("x")
        for _ in range(calls):
            node = made.call_function(torch.relu, (node,))
        return made

    assert 0 < _little(graph(400)) < 2
    assert _little(graph(400)) == pytest.approx(2 * _little(graph(200)))
    assert _little(graph(9000)) == 5.0
    costs(inductor=50.0, torch_sdpa=47.0)
    monkeypatch.setattr(match_tuning, "little", lambda _: 1.0)
    run(attention, *operands(), tune=None)
    assert timed == []
    run(attention, *operands(), tune="auto", tune_budget_s=60.0)
    assert timed == [{"inductor", "torch.sdpa"}]


def _future(query: Tensor, key: Tensor) -> Tensor:
    return torch.arange(key.shape[-2]) > torch.arange(query.shape[-2])[:, None]


#: Causal scores, of which no kernel reads the mask: it is made in the graph.
CAUSAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "tril": lambda s, q, k: s.masked_fill(~torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(), -torch.inf),
    "triu of minus infinity": lambda s, q, k: s + torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1),
    "positions": lambda s, q, k: s.masked_fill(_future(q, k), torch.finfo(s.dtype).min),
    "where": lambda s, q, k: torch.where(_future(q, k), torch.tensor(-torch.inf), s),
    "a product": lambda s, q, k: s + _future(q, k).float() * -1e30,
}


#: Symbolic sizes are measured at several, which takes seconds: the first tier has them of one spelling.
@pytest.mark.sampled("True-triu of minus infinity", *(f"False-{name}" for name in CAUSAL if name[:4] != "triu"))
@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("spelling", CAUSAL)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_no_kernel_reads_is_what_it_is_while_measuring(timed, spelling, dynamic):
    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.tanh(CAUSAL[spelling](query @ key.transpose(-2, -1) * 0.3, query, key).softmax(-1) @ value)

    _, report = run(causal, *operands(), dynamic=dynamic)
    assert timed
    assert all(each >= {"inductor", "torch.sdpa", "lz.blocked"} for each in timed)
    assert report.events == []


@pytest.mark.usefixtures("eagerly")
def test_where_the_time_is_up_nothing_failed(timed, costs, monkeypatch):
    costs(inductor=50.0, torch_sdpa=47.0)
    monkeypatch.setattr(measuring.time, "perf_counter", itertools.count(0.0, 6.0).__next__)
    run(attention, *operands(), tune="auto", tune_budget_s=7.0)
    assert (timed, measuring._failed, records()) == ([], set(), [])


@pytest.mark.usefixtures("eagerly")
def test_a_fault_of_measuring_that_nobody_asked_for_breaks_no_strict_compile(costs, monkeypatch):
    def broken(*_: Any) -> None:
        raise ArithmeticError("planted")

    costs(inductor=50.0, torch_sdpa=47.0)
    monkeypatch.setattr(match_tuning, "tune_match", broken)
    _, report = run(attention, *operands(), tune=None, strict=True)
    assert codes(report.events) == ["MEASUREMENT_FAILED"]
    with pytest.raises(Exception, match="planted"):
        run(attention, *operands(), strict=True)


@pytest.mark.usefixtures("eagerly")
def test_what_inductor_takes_alone_is_not_kept(timed, given_kernels):
    given_kernels(**{"lz.blocked": _broken, "torch.sdpa": _broken})
    run(attention, *operands())
    assert records() == []


@pytest.mark.usefixtures("eagerly")
def test_equal_layers_are_measured_once(timed):
    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + attention(x, x, x)
        return x

    run(layers, operands()[0])
    assert 1 <= len(timed) <= 2, "the last layer has other surroundings at most"


@pytest.mark.usefixtures("eagerly")
def test_where_a_lock_decides_nothing_is_measured(timed):
    _, report = run(attention, *operands(), lock={"attention": "torch.sdpa"})
    assert (timed, report.matches[0].kernel) == ([], "torch.sdpa")


@pytest.mark.usefixtures("eagerly")
def test_what_the_source_calls_is_measured_as_inductors(timed):
    inputs = operands()
    result, report = run(lambda *each: torch.tanh(F.scaled_dot_product_attention(*each)), *inputs)
    torch.testing.assert_close(result, torch.tanh(F.scaled_dot_product_attention(*inputs)))
    if timed:  # another kernel can run it
        assert "torch.sdpa" not in timed[0]
        found = {each["kernel"]: each for each in report.matches[0].candidates}
        assert found["torch.sdpa"]["relative_latency"] == 1.0
        assert {record.entries()["source"] for record in records()} == {"torch.sdpa"}


@pytest.mark.usefixtures("eagerly")
def test_a_budget_that_is_used_up_is_an_event(timed):
    _, report = run(attention, *operands(), tune_budget_s=0.0)
    assert timed == []
    assert codes(report.events) == ["NOT_MEASURED"]
    assert "the tuning budget is used up" in report.events[0].message


@pytest.mark.usefixtures("eagerly")
def test_a_kernel_that_fails_to_be_measured_breaks_no_compile(timed, given_kernels):
    given_kernels(**{"lz.blocked": _broken, "torch.sdpa": torch_sdpa.attention})
    inputs = operands()
    result, report = run(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert codes(report.events) == ["MEASUREMENT_FAILED"]
    _, report = run(attention, *inputs)
    assert (len(timed), report.events) == (1, [])


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("wrong", [lambda out: out * 1.5, lambda out: out / 0, lambda out: out.roll(1, -1)])
def test_what_is_compiled_to_something_else_is_told_and_not_timed(timed, given_kernels, wrong):
    given_kernels(**{"torch.sdpa": lambda x, attrs: wrong(torch_sdpa.attention(x, attrs))})
    inputs = operands()
    result, report = run(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert codes(report.events) == ["MEASUREMENT_FAILED"]
    assert "what is compiled of it is off by" in report.events[0].message
    assert "torch.sdpa" not in {name for names in timed for name in names}


def test_a_fault_of_measuring_breaks_no_compile(monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(measuring, "compile_forms", fail)
    inputs = operands()
    result, report = run(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert codes(report.events) == ["MEASUREMENT_FAILED"]
    assert "no clock" in report.events[0].message


@pytest.mark.usefixtures("eagerly")
def test_dynamic_sizes_are_measured_at_powers_of_two_the_nearest_first(timed, monkeypatch):
    monkeypatch.setattr(match_tuning, "MAX_ELEMENTS", 6 * 256 * 256)
    sizes: list[int] = []
    original = measuring.keep

    def keep(context: Any, specs: Any, timings: Any, at: dict[str, int], **options: Any) -> None:
        sizes.append(at["seq_len_q"])
        original(context, specs, timings, at, **options)

    monkeypatch.setattr(measuring, "keep", keep)
    inputs = operands(40)
    torch._dynamo.mark_dynamic(inputs[0], 2)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 2)
    result, report = run(attention, *inputs)
    torch.testing.assert_close(result, attention(*inputs))
    assert sizes == [32, 64, 16, 128, 256]
    assert report.events == []
    assert {tuple(record.entries()["symbolic"]) for record in records()} == {("seq_len_k", "seq_len_q")}
    assert {record.entries()["dims"]["seq_len_k"] for record in records()} == set(sizes), "both lengths move together"


@pytest.mark.usefixtures("eagerly")
def test_a_cache_of_dynamic_length_is_measured_at_powers_of_two_too(timed, monkeypatch):
    monkeypatch.setattr(match_tuning, "MAX_ELEMENTS", 6 * 128)
    query, key, value = torch.randn(2, 3, 1, 16), *(torch.randn(2, 3, 40, 16) for _ in range(2))
    for each in (key, value):
        torch._dynamo.mark_dynamic(each, 2)
    result, _ = run(attention, query, key, value)
    torch.testing.assert_close(result, attention(query, key, value))
    assert sorted({record.entries()["dims"]["seq_len_k"] for record in records()}) == [16, 32, 64, 128]


@pytest.mark.usefixtures("eagerly")
def test_a_declared_range_is_not_left(timed):
    inputs = operands(100)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 2, min=60, max=300)
    run(attention, *inputs)
    assert sorted({record.entries()["dims"]["seq_len_q"] for record in records()}) == [64, 128, 256]


@pytest.mark.usefixtures("eagerly", "timed")
def test_everything_dynamic_is_measured():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return torch.tanh(attention(query, key, value).transpose(1, 2).reshape(x.shape))

    inputs = torch.randn(2, 20, 32), torch.randn(32, 96)
    result, report = run(block, *inputs, dynamic=True)
    torch.testing.assert_close(result, block(*inputs))
    assert report.events == []
    assert {record.entries()["dims"]["seq_len_q"] for record in records()} >= {16, 32, 64}


@pytest.mark.usefixtures("eagerly")
def test_a_part_with_static_sizes_of_a_dynamic_graph_is_measured(timed):
    def block(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(torch.cumsum(x, -1)[:, :, :8], key, value) * x.shape[2]

    x = torch.randn(2, 3, 20, 16)
    torch._dynamo.mark_dynamic(x, 2)
    inputs = x, *operands(8)[1:]
    result, report = run(block, *inputs)
    torch.testing.assert_close(result, block(*inputs))
    assert (report.events, len(timed)) == ([], 1)


class Grouped(nn.Module):
    """Grouped heads, a mask, dropout after the attention, and activation checkpointing."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.project, self.checkpoints = nn.Linear(32, 64), checkpoints
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.block, x, mask, use_reentrant=False)
        return self.block(x, mask)

    def block(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x).split([32, 16, 16], -1)
        query, key, value = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (query, key, value))
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        scores = (query @ key.transpose(-2, -1) * 8**-0.5).masked_fill(~mask[:, None, None], -1e9)
        out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return x + out * self.scale


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.usefixtures("eagerly")
def test_a_model_in_training_is_measured_and_nothing_of_its_own_is_touched(timed, checkpoints):
    model, x = Grouped(checkpoints=checkpoints), torch.randn(2, 24, 32, requires_grad=True)
    mask = torch.arange(24) < torch.tensor([[7], [24]])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    result, report = run(model, x, mask)
    assert torch.equal(torch.rand(2), want)
    assert report.events == []
    assert len(timed) == 1
    assert {"training", "gqa", "bool_mask"} & {f for record in records() for f in record.entries()["features"]} >= {
        "training"
    }
    assert all(parameter.grad is None for parameter in (*model.parameters(), x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    torch.testing.assert_close(result, model(x, mask))
    result.square().sum().backward()
    ours = [parameter.grad.clone() for parameter in (*model.parameters(), x)]
    for parameter in (*model.parameters(), x):
        parameter.grad = None
    model(x, mask).square().sum().backward()
    for got, parameter in zip(ours, (*model.parameters(), x), strict=True):
        torch.testing.assert_close(got, parameter.grad)


@pytest.mark.usefixtures("eagerly")
def test_modes_around_a_compile_hold_while_measuring_and_afterwards(timed):
    inputs = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, report = run(attention, *inputs)
        assert torch.is_autocast_enabled("cpu")
        torch.testing.assert_close(result, attention(*inputs), rtol=2e-2, atol=2e-2)
        assert result.dtype == attention(*inputs).dtype
    assert (report.events, len(timed)) == ([], 1)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result, report = run(attention, *operands(22 if mode is torch.no_grad else 23))
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert report.events == []
    assert len(timed) == 3
    with torch.no_grad():
        run(attention, *operands(24, requires_grad=True))
    assert not any("training" in record.entries()["features"] for record in records())


@pytest.mark.usefixtures("eagerly", "timed")
def test_a_model_that_draws_random_numbers_draws_the_same_with_and_without_measuring():
    def noisy(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout(attention(F.dropout(query, 0.3), key, value), 0.3) + torch.rand(())

    inputs = operands()

    def drawn(tune: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        return run(noisy, *inputs, tune=tune, lock={} if tune == "on-miss" else {"attention": "inductor"})[
            0
        ], torch.rand(4)

    (ours, after), (theirs, without) = drawn("on-miss"), drawn("off")
    assert records()
    assert torch.equal(after, without)
    torch.testing.assert_close(ours, theirs)


# ---- with Inductor -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"options": {**ON_MISS}}, pytest.param({"mode": "max-autotune-no-cudagraphs"}, marks=pytest.mark.thorough)],
)
def test_the_backend_measures_once_and_gives_the_same(monkeypatch, options):
    monkeypatch.setattr(measuring, "measure", lambda calls, device, **_: {n: Timing((1.0, 1.0)) for n in calls})
    inputs = operands()
    torch.manual_seed(5)
    result = torch.compile(attention, backend=layerzero, **options)(*inputs)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    torch.testing.assert_close(result, attention(*inputs))
    first = records()
    assert {record.kernel_id for record in first} >= {"inductor", "torch.sdpa"}
    assert lz.reports()[-1].events == []
    torch._dynamo.reset()
    torch.compile(attention, backend=layerzero, **options)(*inputs)
    assert [record.measured_at for record in records()] == [record.measured_at for record in first]


@pytest.mark.thorough
@pytest.mark.slow
def test_training_and_dynamic_sizes_are_measured_as_inductor_compiles_them(monkeypatch):
    def timings(calls: dict[str, Callable[[], Any]], device: torch.device, **_: Any) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing((1.0, 1.0)) for name in calls}

    monkeypatch.setattr(measuring, "measure", timings)
    monkeypatch.setattr(match_tuning, "MAX_ELEMENTS", 1)
    model, mask = Grouped(checkpoints=True), torch.ones(2, 24, dtype=torch.bool)
    x = torch.randn(2, 24, 32, requires_grad=True)
    options = {**ON_MISS, "layerzero.tune_budget_s": 600.0}  # a loaded machine compiles slowly
    compiled = torch.compile(model, backend=layerzero, options=options, dynamic=True)
    result = compiled(x, mask)
    torch.testing.assert_close(result, model(x, mask))
    (gradient,), (wanted,) = (torch.autograd.grad(each.square().sum(), x) for each in (result, model(x, mask)))
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
    assert [event.message for report in lz.reports() for event in report.events] == []
    assert any("training" in record.entries()["features"] for record in records())


PROGRAM = """
import sys; sys.path[:0] = {path!r}
{usual_machine}
import torch, lz_compile as lz
from lz_compile.compile import measuring
from lz_compile.backend import layerzero
from lz_compile.lowering.ops.attention import Operands
original, count = measuring.measure, []
measuring.measure = lambda *a, **k: count.append(1) or original(*a, **{{**k, "rounds": 3}})
torch.manual_seed(0)
x = torch.randn(2, 3, 12, 16)
f = lambda q, k, v: torch.nn.functional.gelu((q @ k.mT * 0.3).softmax(-1) @ v)
out = torch.compile(f, backend=layerzero, options={{"layerzero.tune": "on-miss"}})(x, x, x)
torch.testing.assert_close(out, f(x, x, x))
faults = [e.message for e in lz.reports()[0].events if e.code != "MACHINE_BUSY"]
print(len(count), lz.reports()[0].matches[0].candidates[0]["origin"], faults)
"""


@pytest.mark.slow
def test_another_process_does_not_measure_again(tmp_path):
    program = PROGRAM.format(usual_machine=USUAL_MACHINE, path=[entry for entry in sys.path if entry])
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, check=False, timeout=500,
            env={**os.environ, **known_instruction_sets(), "LAYERZERO_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.strip())
    assert lines == ["1 measured []", "0 measured []"]


# ---- what it costs -----------------------------------------------------------------------------------------------------


def test_twelve_layers_select_quickly_from_a_filled_database(monkeypatch):
    """Printed, not judged, but for a bound that only something quadratic would miss."""
    monkeypatch.setattr(choices, "left_as", lambda _: None)  # Inductor is asked once for each kind

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for heads, weight in enumerate(weights, 1):  # no two layers are equal, so that each selects
            query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (x @ weight).chunk(3, -1))
            x = x + (query @ key.transpose(-2, -1) * 0.3).softmax(-1).matmul(value).transpose(1, 2).flatten(2)[..., :1]
        return x

    filled = []
    for length in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        for batch in (1, 2, 4, 8):
            for head_dim in (8, 16, 32, 64, 128):
                context = problem_context(length, batch=batch, head_dim=head_dim)
                filled += [measured(name, context, 10.0 + place) for place, name in enumerate(sorted(RUN_HERE))]
    database(None).put(filled)
    x, weights = torch.randn(2, 12, 32), [torch.randn(32, 3 * 8 * heads) * 0.1 for heads in range(1, 13)]
    _, report = run(layers, x, *weights, tune="off")
    (graph,) = report.graphs
    assert len(report.matches) == 12
    print(f"selecting for 12 layers from {len(filled)} measurements: {graph.seconds['select'] * 1e3:.1f} ms")
    assert graph.seconds["select"] < 1.0


@pytest.mark.parametrize(("op", "differs"), [("attention", True), ("norm", False), ("rope", False), ("mlp", False)])
def test_what_is_the_same_code_to_inductor_is_not_measured(op: str, differs: bool) -> None:
    sizes = dict.fromkeys(contexts.dim_names(op), 64)
    sample = ops.module(op).sample(sizes, torch.float32, torch.device("cpu"))
    assert measuring.may_differ(contexts.of_facts(op, sample.attrs, sample.facts)) is differs
