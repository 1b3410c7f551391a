"""The choice between kernels: policy, then what can run, then latencies with their noise; a reason for everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import Rewriting
from hypothesis import given
from hypothesis import strategies as st
from problems import kernel, measured, problem_context
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import lz_compile as lz
from lz_compile.compile.options import split
from lz_compile.errors import OptionError, UnknownKernelError
from lz_compile.ground import health
from lz_compile.passes.proof import validate
from lz_compile.runtime.choose import select
from lz_compile.runtime.choose.problem import Decision, Problem
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.capabilities import Prior
from lz_compile.runtime.measure.estimate import PRIOR_NOISE
from lz_compile.runtime.measure.perfdb import database
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.context import SymbolicDim

pytestmark = pytest.mark.usefixtures("no_preference", "by_priors")


@pytest.fixture(autouse=True)
def own_database(monkeypatch, tmp_path):
    """An empty one; kernels are planted here, and no verdict about them may be left for another test."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    yield
    validate.forget()


@pytest.fixture
def given_kernels(monkeypatch):
    """Choose among kernels of the test's own; ``prior`` by id, the first one being Inductor unless it is named."""

    def give(*specs: registry.KernelSpec) -> None:
        listed = {"inductor": kernel("inductor", priority=10), **{spec.kernel_id: spec for spec in specs}}
        monkeypatch.setattr(select, "kernels", lambda _operation: listed)

    return give


def choose(context=None, **options: Any) -> Decision:
    return select.select(Problem(context or problem_context(), **options), policy.current())


def put(*records) -> None:
    database(None).put(records)


def against(decision: Decision) -> dict[str, list[str]]:
    return {each.kernel.kernel_id: [reason.code for reason in each.against] for each in decision.candidates}


def scores(decision: Decision) -> dict[str, float]:
    return {each.kernel.kernel_id: round(each.score, 6) for each in decision.candidates}


def notes(decision: Decision) -> dict[str, list[str]]:
    return {each.kernel.kernel_id: [reason.message for reason in each.notes] for each in decision.candidates}


# ---- latencies ---------------------------------------------------------------------------------------------------------


def test_where_nothing_is_known_inductor_stays(given_kernels):
    given_kernels(kernel("torch.sdpa"), kernel("lz.blocked"))
    decision = choose()
    assert decision.kernel.kernel_id == "inductor"
    assert decision.why == "nothing is expected to be faster than Inductor's own code"
    assert scores(decision) == {"inductor": 100.0, "torch.sdpa": 100.0, "lz.blocked": 100.0}


@pytest.mark.parametrize(
    ("prior", "chosen"), [(1 - PRIOR_NOISE + 0.01, "inductor"), (1 - PRIOR_NOISE - 0.01, "torch.sdpa")]
)
def test_a_table_decides_only_where_it_promises_more_than_its_noise(given_kernels, prior, chosen):
    given_kernels(kernel("torch.sdpa", prior))
    assert choose().kernel.kernel_id == chosen


def test_a_choice_by_a_table_says_so(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.5))
    assert choose().why == "expected at 0.5 of Inductor's latency"


@pytest.mark.parametrize(
    ("median_us", "noise", "noise_of_inductor", "chosen"),
    [
        (98.0, 0.0, 0.0, "inductor"),  # within the margin of 3%
        (96.0, 0.0, 0.0, "torch.sdpa"),
        (90.0, 0.09, 0.0, "torch.sdpa"),
        (90.0, 0.11, 0.0, "inductor"),
        (90.0, 0.0, 0.11, "inductor"),  # the ratio is as uncertain as both of its sides
        (90.0, 0.08, 0.08, "inductor"),  # as squares: 0.113
        (90.0, 0.06, 0.06, "torch.sdpa"),
    ],
)
def test_a_measured_kernel_must_save_more_than_the_margin_and_the_noise(
    given_kernels, median_us, noise, noise_of_inductor, chosen
):
    given_kernels(kernel("torch.sdpa"))
    context = problem_context()
    put(
        measured("inductor", context, 100.0, noise=noise_of_inductor),
        measured("torch.sdpa", context, median_us, noise=noise),
    )
    assert choose(context).kernel.kernel_id == chosen


def test_a_choice_by_measurement_says_so_and_the_report_shows_the_figures(given_kernels):
    given_kernels(kernel("torch.sdpa"))
    context = problem_context()
    put(measured("inductor", context, 100.0), measured("torch.sdpa", context, 50.0))
    decision = choose(context)
    assert decision.why == "measured at 0.5 of Inductor's latency"
    first = decision.candidates[0].to_dict()
    assert (first["kernel"], first["score"], first["median_us"], first["samples"]) == ("torch.sdpa", 200.0, 50.0, 25)
    assert first["measured_at"] == context.hints()


def test_of_kernels_that_are_equally_fast_the_one_of_higher_priority_is_taken(given_kernels):
    context = problem_context()
    put(
        *(measured(name, context, us) for name, us in (("inductor", 100.0), ("lz.blocked", 50.0), ("torch.sdpa", 50.0)))
    )
    for first, second in (("torch.sdpa", "lz.blocked"), ("lz.blocked", "torch.sdpa")):
        given_kernels(kernel(first, priority=60), kernel(second, priority=50))
        assert choose(context).kernel.kernel_id == first


def test_a_kernel_that_is_slower_is_listed_after_inductor(given_kernels):
    given_kernels(
        kernel("torch.sdpa", 2.0), kernel("lz.blocked", 0.5), kernel("xformers", 0.1, platforms=frozenset({"tpu"}))
    )
    assert [each.kernel.kernel_id for each in choose().candidates] == [
        "lz.blocked",
        "inductor",
        "torch.sdpa",
        "xformers",
    ]


# ---- which measurements ------------------------------------------------------------------------------------------------

OTHERS = {
    "environment": {"environment": "another machine"},
    "dtype": {"dtype": "bfloat16"},
    "operation": {"operation": "attention.causal"},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_measurement_of_something_else_is_not_used(given_kernels, changes):
    given_kernels(kernel("torch.sdpa"))
    context = problem_context()
    put(*(measured(name, context, us, **changes) for name, us in (("inductor", 100.0), ("torch.sdpa", 10.0))))
    decision = choose(context)
    assert decision.kernel.kernel_id == "inductor"
    assert {each.estimate.origin for each in decision.candidates} == {"assumed"}


CONTEXTS = {
    "features": problem_context(training=True),
    "gqa": problem_context(heads=8, kv_heads=4),
    "head_dim": problem_context(head_dim=32),
    "symbolic": replace(problem_context(), dims={**problem_context().dims, "seq_len_q": SymbolicDim(128)}),
    "far": problem_context(256),
}


@pytest.mark.parametrize("other", CONTEXTS.values(), ids=CONTEXTS)
def test_a_measurement_of_another_problem_is_not_used(given_kernels, other):
    given_kernels(kernel("torch.sdpa"))
    context = problem_context()
    put(*(measured(name, other, us) for name, us in (("inductor", 100.0), ("torch.sdpa", 10.0))))
    assert choose(context).kernel.kernel_id == "inductor"
    assert choose(other).kernel.kernel_id == "torch.sdpa"


def test_without_a_database_the_tables_count(given_kernels, tmp_path):
    given_kernels(kernel("torch.sdpa", 0.5))
    context = problem_context()
    put(measured("inductor", context, 1.0), measured("torch.sdpa", context, 100.0))
    assert choose(context).kernel.kernel_id == "inductor"
    policy.configure(perfdb={"path": str(tmp_path / "other.sqlite")})
    assert choose(context).kernel.kernel_id == "torch.sdpa"
    policy.configure(perfdb={"enabled": False})
    assert choose(context).kernel.kernel_id == "torch.sdpa"


def test_a_source_that_calls_sdpa_gains_nothing_from_sdpa(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.5), kernel("lz.blocked", 0.4))
    decision = choose(source_kernel="torch.sdpa")
    assert scores(decision) == {"lz.blocked": 125.0, "inductor": 100.0, "torch.sdpa": 100.0}
    assert decision.kernel.kernel_id == "lz.blocked"
    context = problem_context()
    put(
        measured("inductor", context, 100.0),
        measured("torch.sdpa", context, 10.0),
        measured("lz.blocked", context, 12.0),
    )
    decision = choose(context, source_kernel="torch.sdpa")
    assert decision.kernel.kernel_id == "inductor", (
        "what was measured spelled out says that SDPA, the source, is faster"
    )
    assert scores(decision)["lz.blocked"] == pytest.approx(1000 / 12)
    put(*(measured(n, context, us, source="torch.sdpa") for n, us in (("inductor", 100.0), ("lz.blocked", 70.0))))
    decision = choose(context, source_kernel="torch.sdpa")
    assert (decision.kernel.kernel_id, decision.why) == ("lz.blocked", "measured at 0.7 of Inductor's latency")


# ---- locks -------------------------------------------------------------------------------------------------------------


def test_the_strongest_lock_is_followed_and_named(given_kernels, monkeypatch):
    given_kernels(kernel("torch.sdpa", 2.0), kernel("lz.blocked", 3.0), kernel("xformers", 4.0))
    lz.configure(locks={"attention": "torch.sdpa"})
    assert (choose().kernel.kernel_id, choose().why) == ("torch.sdpa", "locked by lz.configure()")
    lz.lock("attention", "lz.blocked")
    assert (choose().kernel.kernel_id, choose().why) == ("lz.blocked", "locked by lz.lock()")
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "xformers")
    assert (choose().kernel.kernel_id, choose().why) == ("xformers", "locked by environment LAYERZERO_LOCK_ATTENTION")
    with lz.lock("attention.full", "torch.sdpa"):
        assert (choose().kernel.kernel_id, choose().why) == ("torch.sdpa", "locked by lz.lock()")
        held = policy.current().with_locks({"attention": "inductor"})
        decision = select.select(Problem(problem_context()), held)
    assert (decision.kernel.kernel_id, decision.why) == ("inductor", "locked by options['layerzero.lock']")
    assert decision.refused_lock is None


def test_a_lock_wins_over_every_measurement_and_preference(given_kernels):
    given_kernels(kernel("torch.sdpa", 5.0), kernel("lz.blocked", 0.1))
    lz.prefer("lz.blocked")
    lz.avoid("torch.sdpa")
    lz.lock("attention", "torch.sdpa")
    assert choose().kernel.kernel_id == "torch.sdpa"


def test_a_lock_of_another_variant_does_not_hold(given_kernels):
    given_kernels(kernel("torch.sdpa", 2.0))
    lz.lock("attention.causal", "torch.sdpa")
    assert choose().kernel.kernel_id == "inductor"
    assert choose(problem_context(is_causal=True)).kernel.kernel_id == "torch.sdpa"


def test_a_lock_that_cannot_be_followed_is_told_and_the_best_is_taken(given_kernels):
    given_kernels(kernel("torch.sdpa", dtypes=frozenset({"bfloat16"})), kernel("lz.blocked", 0.5))
    lz.lock("attention", "torch.sdpa")
    decision = choose()
    assert decision.kernel.kernel_id == "lz.blocked"
    assert decision.refused_lock is not None
    assert (decision.refused_lock.code, decision.refused_lock.message) == (
        "LOCK_NOT_POSSIBLE",
        "torch.sdpa (lz.lock()): torch.sdpa takes bfloat16, not float32",
    )


def test_a_lock_on_a_kernel_of_another_op_is_told(given_kernels):
    given_kernels(kernel("lz.blocked", 0.5))
    lz.lock("attention", "torch.sdpa")
    decision = choose()
    assert decision.kernel.kernel_id == "lz.blocked"
    assert decision.refused_lock is not None
    assert decision.refused_lock.message == "torch.sdpa (lz.lock()): no such kernel here"


# ---- exclusions and preferences ----------------------------------------------------------------------------------------


def test_a_forbidden_kernel_is_never_taken_but_inductor_cannot_be_forbidden(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.1))
    lz.configure(rules=[{"match": {"operation": "attention"}, "forbid": ["*"]}])
    decision = choose()
    assert decision.kernel.kernel_id == "inductor"
    assert against(decision) == {"inductor": [], "torch.sdpa": ["POLICY_EXCLUDED"]}
    (reason,) = decision.candidates[1].against
    assert reason.message.startswith("torch.sdpa is forbidden by ")


def test_a_preference_adds_twenty_points_to_the_first_and_an_aversion_takes_fifty(given_kernels):
    given_kernels(
        kernel("torch.sdpa", 0.8), kernel("lz.blocked", 0.8), kernel("xformers", 0.8), kernel("flashinfer", 4.0)
    )
    lz.avoid("xformers", "flashinfer")
    lz.prefer("lz.blocked", "torch.sdpa")
    decision = choose()
    assert scores(decision) == {
        "lz.blocked": 145.0,
        "torch.sdpa": 144.0,
        "inductor": 100.0,
        "xformers": 75.0,
        "flashinfer": 1.0,
    }
    assert notes(decision) == {
        "lz.blocked": ["preferred by lz.prefer()"],
        "torch.sdpa": ["preferred by lz.prefer()"],
        "inductor": [],
        "xformers": ["avoided by lz.avoid()"],
        "flashinfer": ["avoided by lz.avoid()"],
    }
    assert {reason.code for each in decision.candidates for reason in each.notes} == {
        "POLICY_PREFERRED",
        "POLICY_AVOIDED",
    }
    assert decision.why == "expected at 0.8 of Inductor's latency (preferred by lz.prefer())"


def test_a_preference_is_worth_a_fifth_of_inductors_speed_and_no_more(given_kernels):
    given_kernels(kernel("torch.sdpa"))
    context = problem_context()
    lz.prefer("torch.sdpa")
    for median_us, chosen in ((110.0, "torch.sdpa"), (130.0, "inductor")):
        put(measured("inductor", context, 100.0), measured("torch.sdpa", context, median_us))
        assert choose(context).kernel.kernel_id == chosen


def test_inductor_can_be_preferred_and_avoided(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.88))
    with lz.prefer("inductor"):
        assert choose().kernel.kernel_id == "inductor"
        assert choose().why == "nothing is expected to be faster than Inductor's own code (preferred by lz.prefer())"
    given_kernels(kernel("torch.sdpa", 1.5))
    with lz.avoid("inductor"):
        assert choose().kernel.kernel_id == "torch.sdpa"


def test_switched_off_everything_is_left_to_inductor_and_says_by_whom(given_kernels, monkeypatch):
    given_kernels(kernel("torch.sdpa", 0.1))
    with lz.disabled():
        decision = choose()
        assert decision.kernel.kernel_id == "inductor"
        assert against(decision) == {"inductor": [], "torch.sdpa": ["POLICY_DISABLED"]}
        assert decision.candidates[1].against[0].message == "selection is switched off (lz.disabled())"
    monkeypatch.setenv("LAYERZERO_DISABLED", "1")
    assert choose().candidates[1].against[0].message == "selection is switched off (environment LAYERZERO_DISABLED)"


def test_a_retired_kernel_is_not_taken_until_it_is_restored(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.5))
    health.retire("torch.sdpa", "it crashed")
    try:
        decision = choose()
        assert decision.kernel.kernel_id == "inductor"
        assert against(decision)["torch.sdpa"] == ["KERNEL_RETIRED"]
    finally:
        health.restore("torch.sdpa")
    assert choose().kernel.kernel_id == "torch.sdpa"


def test_settings_ask_for_determinism_and_bound_memory(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.5, deterministic=False, workspace="batch_size * seq_len_q * 1048576"))
    assert choose().kernel.kernel_id == "torch.sdpa"
    lz.configure(deterministic=True, memory_headroom_mb=1)
    assert against(choose())["torch.sdpa"] == ["NON_DETERMINISTIC", "MEMORY_HEADROOM_EXCEEDED"]


# ---- what comes next ---------------------------------------------------------------------------------------------------


def test_what_is_taken_instead_of_a_wrong_kernel_beats_inductor_or_is_inductor(given_kernels):
    names = {"torch.sdpa": 0.5, "lz.blocked": 0.7, "xformers": 0.95, "flashinfer": 2.0}
    given_kernels(
        *(kernel(name, prior) for name, prior in names.items()), kernel("torch.flex", 0.1, dtypes=frozenset())
    )
    decision = choose()
    assert [spec.kernel_id for spec in decision.ranking] == ["torch.sdpa", "lz.blocked", "inductor"]


def test_after_a_locked_kernel_comes_the_best(given_kernels):
    given_kernels(kernel("torch.sdpa", 2.0), kernel("lz.blocked", 0.5), kernel("xformers", 0.8))
    lz.lock("attention", "torch.sdpa")
    assert [spec.kernel_id for spec in choose().ranking] == ["torch.sdpa", "lz.blocked", "xformers", "inductor"]


IDS = ["torch.sdpa", "lz.blocked", "xformers", "flashinfer"]
LATENCIES = st.dictionaries(st.sampled_from(IDS), st.floats(0.2, 3.0), max_size=4)


@given(
    priors=LATENCIES,
    latencies=LATENCIES,
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    broken=st.sets(st.sampled_from(IDS)),
    preferred=st.lists(st.sampled_from(IDS), max_size=2, unique=True),
    avoided=st.lists(st.sampled_from(IDS), max_size=2, unique=True),
)
def test_nothing_is_taken_that_cannot_run_or_does_not_beat_inductor(
    priors, latencies, noise, broken, preferred, avoided
):
    context = problem_context()
    specs = [kernel(name, priors.get(name), dtypes=frozenset({"bfloat16" if name in broken else "*"})) for name in IDS]
    listed = {spec.kernel_id: spec for spec in (kernel("inductor"), *specs)}
    records = [measured("inductor", context, 100.0, noise=noise)]
    records += [measured(name, context, 100.0 * ratio, noise=noise) for name, ratio in latencies.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "kernels", lambda _operation: listed)
        patch.setattr(select, "records_of", lambda *_: records)
        policy.reset()
        for name in avoided:
            lz.avoid(name)
        for name in preferred:
            lz.prefer(name)
        decision = choose(context)
    assert {each.kernel.kernel_id for each in decision.candidates} == set(listed)

    def speed(name: str) -> float:
        alone = 100 / latencies[name] if name in latencies else 100.0  # Inductor was measured: no prior counts
        wished = 20 - preferred[::-1].index(name) if name in preferred else -50 if name in avoided else 0
        return max(alone + wished, 1.0)

    def spread(name: str) -> float:
        return (noise**2 + (noise if name in latencies else PRIOR_NOISE) ** 2) ** 0.5

    able = [name for name in IDS if name not in broken]
    better = [name for name in able if 1 - 100 / speed(name) > max(0.03, spread(name)) + 1e-9]
    equal = [name for name in able if abs(1 - 100 / speed(name) - max(0.03, spread(name))) <= 1e-9]
    chosen = decision.kernel.kernel_id
    assert chosen in ([*better, *equal] if better else ["inductor", *equal])
    for each in decision.candidates:
        if each.kernel.kernel_id in able:
            assert each.score == pytest.approx(speed(each.kernel.kernel_id))
    ranking = [spec.kernel_id for spec in decision.ranking]
    assert (ranking[0], ranking[-1]) == (chosen, "inductor")
    assert chosen == "inductor" or set(ranking) - set(equal) == {"inductor", *better} - set(equal)


# ---- symbolic sizes ----------------------------------------------------------------------------------------------------


@dataclass
class Symbol:
    hint: int
    lower: int = 2
    upper: int | None = None
    name: str = "s0"
    questions: list[int] = field(default_factory=list)

    @property
    def is_declared(self) -> bool:
        return self.upper is not None or self.lower > 2

    def is_below(self, edge: int) -> bool:
        self.questions.append(edge)
        return self.hint < edge


class Lengths(SimpleNamespace):
    """Both lengths are one symbol."""

    def at(self, values: Mapping[str, int]) -> dict[str, int]:
        return {**problem_context().hints(), "seq_len_q": values["s0"], "seq_len_k": values["s0"]}

    def names_in(self, dims: tuple[str, ...]) -> list[str]:
        return ["s0"] if {"seq_len_q", "seq_len_k"} & set(dims) else []


def choose_over(symbol: Symbol) -> Decision:
    context = problem_context(128)
    size = SymbolicDim(symbol.hint, symbol.lower, symbol.upper, "s0")
    context = replace(context, dims={**context.dims, "seq_len_q": size, "seq_len_k": size})
    return choose(context, symbols=Lengths(symbols={"s0": symbol}, hidden={}))


def growing(*limits: tuple[int, float]):
    return tuple(Prior("*", frozenset({"*"}), ratio, limits={"seq_len_q": (least, None)}) for least, ratio in limits)


@pytest.mark.parametrize(("length", "chosen"), [(64, "inductor"), (8192, "torch.sdpa")])
def test_a_decision_over_a_symbol_asks_on_which_side_of_the_crossover_it_is(given_kernels, length, chosen):
    given_kernels(replace(kernel("torch.sdpa"), prior=growing((0, 2.0), (1024, 0.5))))
    symbol = Symbol(length)
    decision = choose_over(symbol)
    assert decision.kernel.kernel_id == chosen
    (edge,) = symbol.questions
    assert 512 < edge <= 1024
    assert decision.asked == (f"s0 {'<' if length < edge else '>='} {edge}",)
    assert decision.why.endswith(f" while {decision.asked[0]}")


def test_where_one_kernel_wins_at_every_size_nothing_is_asked(given_kernels):
    given_kernels(kernel("torch.sdpa", 0.5))
    symbol = Symbol(64)
    decision = choose_over(symbol)
    assert (decision.kernel.kernel_id, symbol.questions, decision.asked) == ("torch.sdpa", [], ())


def test_nothing_is_asked_inside_a_declared_range(given_kernels):
    given_kernels(replace(kernel("torch.sdpa"), prior=growing((0, 2.0), (1024, 0.5))))
    symbol = Symbol(600, lower=512, upper=4096)
    assert choose_over(symbol).kernel.kernel_id in ("inductor", "torch.sdpa")
    assert symbol.questions == []


def test_a_preferred_kernel_is_taken_at_sizes_of_which_nothing_is_known(given_kernels):
    given_kernels(replace(kernel("torch.sdpa"), prior=growing((1024, 0.5))))
    assert choose_over(Symbol(64)).kernel.kernel_id == "inductor"
    lz.prefer("torch.sdpa")
    assert choose_over(Symbol(64)).kernel.kernel_id == "torch.sdpa"


def test_a_locked_kernel_asks_nothing(given_kernels):
    given_kernels(replace(kernel("torch.sdpa"), prior=growing((0, 2.0), (1024, 0.5))))
    lz.lock("attention", "torch.sdpa")
    symbol = Symbol(64)
    assert choose_over(symbol).kernel.kernel_id == "torch.sdpa"
    assert symbol.questions == []


# ---- in a compile ------------------------------------------------------------------------------------------------------


def attention(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def operands(**options):
    return [torch.randn(2, 3, 24, 16, **options) for _ in range(3)]


def compiled(**options) -> Rewriting:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    inputs = operands()
    torch.testing.assert_close(torch.compile(attention, backend=backend, fullgraph=True)(*inputs), attention(*inputs))
    return backend


def test_a_compile_tells_of_a_lock_that_cannot_be_followed_and_rewrites_with_the_best(monkeypatch):
    found = registry.kernels("attention")
    specs = {
        "inductor": found["inductor"],
        "lz.blocked": replace(found["lz.blocked"], dtypes=frozenset({"float64"})),
        "torch.sdpa": replace(found["torch.sdpa"], prior=(Prior("*", frozenset({"*"}), 0.5),)),
    }
    monkeypatch.setattr(select, "kernels", lambda _operation: specs)
    backend = compiled(lock={"attention": "lz.blocked"})
    (match,), (event,) = backend.report.matches, backend.report.events
    assert (match.kernel, match.rewritten) == ("torch.sdpa", True)
    text = "lz.blocked (options['layerzero.lock']): lz.blocked takes float64, not float32"
    assert [(reason.code, reason.message) for reason in match.reasons] == [("LOCK_NOT_POSSIBLE", text)]
    assert event.code == "LOCK_NOT_POSSIBLE"
    assert event.message.endswith(text)
    with pytest.raises(BackendCompilerFailed, match=r"RewriteFailedError: \[LOCK_NOT_POSSIBLE\] lz\.blocked .*float64"):
        compiled(lock={"attention": "lz.blocked"}, strict=True)


def test_a_kernel_that_proves_wrong_gives_way_to_the_next(monkeypatch):
    found = registry.kernels("attention")

    def wrong(x, attrs):
        return found["torch.sdpa"].call(x, attrs) * 1.5

    def listed(slower: float):
        specs = {
            "inductor": found["inductor"],
            "torch.sdpa": replace(
                found["torch.sdpa"], implementation=wrong, prior=(Prior("*", frozenset({"*"}), 0.5),)
            ),
            "lz.blocked": replace(found["lz.blocked"], prior=(Prior("*", frozenset({"*"}), slower),)),
        }
        monkeypatch.setattr(select, "kernels", lambda _operation: specs)
        validate.forget()

    listed(0.8)
    (match,) = compiled().report.matches
    assert (match.kernel, match.rewritten) == ("lz.blocked", True)
    assert [reason.code for reason in match.reasons] == ["VALIDATION_FAILED"]
    listed(0.95)
    (match,) = compiled().report.matches
    assert (match.kernel, match.rewritten) == ("inductor", False), "within the noise Inductor stays"


def test_a_lock_on_an_unknown_kernel_or_op_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownKernelError, match=r"no kernel 'torch\.spda'.*did you mean 'torch\.sdpa'"):
        split({"layerzero.lock": {"attention": "torch.spda"}})
    with pytest.raises(OptionError, match=r"no op 'atention' to lock \(did you mean 'attention'\?\)"):
        split({"layerzero.lock": {"atention": "torch.sdpa"}})
    for wrong in (3, None):
        with pytest.raises((UnknownKernelError, OptionError), match=str(wrong)):
            split({"layerzero.lock": {"attention": wrong}})


@pytest.mark.parametrize("device", ["meta", "cuda", "mps", "xla"])
def test_for_a_device_that_computes_nothing_here_no_kernel_is_asked_for(device: str) -> None:
    if device != "meta" and hasattr(torch, device) and torch.get_device_module(device).is_available():
        pytest.skip(f"there is such a device: {device}")
    backend = Rewriting(lock={"attention": "lz.blocked"})  # it runs on all devices
    with FakeTensorMode():
        query, key, value = torch.empty(3, 2, 4, 8, device=device)
        got = torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend=backend)(query, key, value)
    assert got.device.type == device
    (match,) = backend.report.matches
    assert [reason.code for reason in match.reasons] == ["NO_NUMBERS"]
    assert not backend.report.events
