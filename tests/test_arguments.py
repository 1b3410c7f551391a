"""Every public function with every argument spoilt in every way: errors of ours that name an argument, and none other."""

from __future__ import annotations

import cProfile
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import lz_compile as lz
from lz_compile.api import eager
from lz_compile.api.arguments import Arguments, remembered
from lz_compile.errors import ArgumentError
from lz_compile.ground import events, health
from lz_compile.lowering.kernels.sampling import cpp_sampling
from lz_compile.lowering.kernels.scan import cpp_launch as cpp_scan
from lz_compile.lowering.token_bits import pack
from lz_compile.runtime.policy import policy

B, T, H, K, V, N, W = 2, 3, 4, 5, 6, 7, 70


def _draw(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _blender(mode: lz.BlendMode = lz.BlendMode.CONVEX) -> lz.Blender:
    return lz.Blender(lz.BlenderConfig(mode), 0.3)


_LOGITS = {"logits": _draw(B, W), "seeds": torch.arange(B)}
_LIMITS = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
_MASK = {"bitmask": pack(_draw(B, W) < 0.9), "bias": _draw(W)}
_ADAPTER = {
    "x": _draw(B, T, N), "Vh": _draw(K, N), "U": _draw(V, K), "delta_S": _draw(K), "A_q": _draw(2, N), "B_q": _draw(V, 2),
    "v": _draw(K), "weight": _draw(V, N), "bias": _draw(V), "base": _draw(B, T, V), "threshold": 0.1, "arm": "grad",
}  # fmt: skip
_DELTA = {"q": _draw(B, T, H, K), "k": _draw(B, T, H, K), "v": _draw(B, T, H, V), "beta": _draw(B, T, H)}
_CACHE = {
    "key_cache": _draw(6, 4, 2, 8), "value_cache": _draw(6, 4, 2, 8), "block_table": torch.tensor([[0, 2], [1, 3]]).int(),
    "lengths": torch.tensor([5, 7]).int(),
}  # fmt: skip


def _written(**given: Any) -> tuple[Tensor, Tensor]:
    caches = {
        name: given[name].clone() if isinstance(given[name], Tensor) else given[name] for name in list(_CACHE)[:2]
    }
    lz.write_to_cache(**{**given, **caches})
    return caches["key_cache"], caches["value_cache"]


#: What is called, and with what it works.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (
        lz.attention,
        {
            "query": _draw(B, H, T, K), "key": _draw(B, 2, N, K), "value": _draw(B, 2, N, V), "scale": 0.2, "causal": False,
            "mask": _draw(B, 1, T, N) < 0.9, "dropout_p": 0.0, "layout": "BHSD",
        },
    ),
    "rms_norm": (lz.rms_norm, {"input": _draw(T, N), "weight": _draw(N), "eps": 1e-6}),
    "layer_norm": (
        lz.layer_norm,
        {"input": _draw(T, N), "normalized_shape": N, "weight": _draw(N), "bias": _draw(N), "eps": 1e-6},
    ),
    "rope": (lz.rope, {"input": _draw(T, 8), "cos": _draw(T, 6), "sin": _draw(T, 6), "rotary_dim": 6}),
    "alibi": (lz.alibi, {"slopes": _draw(H), "queries": 2, "keys": 3}),
    "linear": (lz.linear, {"input": _draw(T, N), "weight": _draw(K, N), "bias": _draw(K)}),
    "embedding": (lz.embedding, {"input": torch.tensor([1, 0, 2]), "weight": _draw(3, K), "padding_idx": 1}),
    "mlp_fused": (
        lz.mlp_fused,
        {
            "input": _draw(T, N), "gate_weight": _draw(K, N), "up_weight": _draw(K, N), "down_weight": _draw(V, K),
            "gate_bias": _draw(K), "up_bias": _draw(K), "down_bias": _draw(V), "activation": "silu",
        },
    ),
    "kda": (
        lz.kda,
        {
            **_DELTA, "alpha": _draw(B, T, H, K), "initial_state": _draw(B, H, K, V), "initial_output": _draw(B, H, V),
            "drop_mask": _draw(B, T) < 0.3, "active": _draw(B, T, H) < 0.7, "scale": 0.5, "head_first": False,
        },
    ),
    "kda of a step": (lz.kda, {name: each[:, :1] for name, each in {**_DELTA, "alpha": _draw(B, T, H)}.items()}),
    "linear_scan": (
        lz.linear_scan, {"decay": _draw(T, 1), "drive": _draw(B, T, K), "initial": _draw(K), "dim": 1},
    ),
    "linear_scan by a number": (lz.linear_scan, {"decay": 0.5, "drive": _draw(B, T, K), "dim": 1}),
    "sample": (lz.sample, {**_LOGITS, **_LIMITS, **_MASK, "generator": None}),
    "sample by rows": (
        lz.sample,
        {**_LOGITS, **{name: torch.tensor([each] * B) for name, each in _LIMITS.items()}, "seeds": 3},
    ),
    "sample_topk": (lz.sample_topk, {"logits": _draw(B, W), "k": 3, "temperature": 1.5, "seeds": 3}),
    "sample_topp": (lz.sample_topp, {"logits": _draw(B, W), "p": 0.3, "temperature": 1.5, "seeds": 3}),
    "sampling_probs": (lz.sampling_probs, {"logits": _draw(B, W), **_LIMITS, **_MASK}),
    "apply_token_bitmask": (lz.apply_token_bitmask, {"logits": _draw(B, W), "bitmask": _MASK["bitmask"]}),
    "domain_fusion": (
        lambda logits, hard, soft, weights, temperature: lz.domain_fusion(
            logits, [hard], [soft], weights, temperature
        ),
        {"logits": _draw(B, W), "hard": _draw(W) < 0.9, "soft": _draw(W), "weights": [0.5], "temperature": 0.7},
    ),
    "speculative_verify": (
        lz.speculative_verify,
        {
            "draft_tokens": torch.ones(B, T, dtype=torch.int64), "draft_probs": _draw(B, T, N).softmax(-1),
            "target_probs": _draw(B, T + 1, N).softmax(-1), "seeds": torch.arange(B),
        },
    ),
    "routed_adapter": (lz.routed_adapter, _ADAPTER),
    "routed_adapter by numbers": (lz.routed_adapter, {**_ADAPTER, "rollouts": torch.zeros(B, T).long(), "num_rollouts": 1}),
    "routed_adapter of packed tokens": (
        lz.routed_adapter,
        {**_ADAPTER, "x": _draw(5, N), "base": _draw(5, V), "cu_seqlens": torch.tensor([0, 2, 5])},
    ),
    "blend": (
        lz.blend,
        {
            "host": _draw(B, K, 4), "seed": _draw(B, K, 4), "alpha": torch.tensor(0.3), "logits": _draw(B, 4),
            "mode": lz.BlendMode.CONFIDENCE, "config": lz.BlenderConfig(),
        },
    ),
    "blend softly": (
        lz.blend,
        {
            "host": _draw(B, K), "seed": _draw(B, K), "alpha": torch.tensor(0.3), "gate_logits": _draw(B, 2),
            "mode": lz.BlendMode.SOFT_GATE,
        },
    ),
    "paged_attention": (lz.paged_attention, {"query": _draw(B, H, 8), **_CACHE, "scale": 0.3, "window": 4, "softcap": 3.0}),
    "paged_attention of parts": (
        lz.paged_attention,
        {"query": _draw(5, H, 8), **_CACHE, "query_starts": torch.tensor([0, 2, 5]).int(), "sinks": _draw(H)},
    ),
    "write_to_cache": (_written, {"key": _draw(B, 2, 8), "value": _draw(B, 2, 8), **_CACHE}),
    "Blender": (lz.Blender, {"config": None, "alpha": _draw(3), "target": _draw(3)}),
    "Blender.forward": (_blender(), {"host": _draw(B, K), "seed": _draw(B, K)}),
    "Blender.request": (lambda alpha: _blender().request(alpha), {"alpha": 0.4}),
    "Blender.aim": (lambda target: _blender().aim(target), {"target": torch.tensor(0.4)}),
    "Blender.configure": (
        lambda **numbers: _blender().configure(**numbers),
        {"gain": 2.0, "threshold": torch.tensor(0.1), "hysteresis": 0.1, "max_step": 0.2},
    ),
    "BlenderConfig": (
        lz.BlenderConfig,
        {
            "mode": lz.BlendMode.DELTA, "low": 0.1, "high": 0.9, "cap_above": 0.8, "cap_share": 0.5, "hysteresis": 0.02,
            "gain": 6.0, "threshold": 0.2, "max_step": 0.1, "ramp_batches": 9, "channel_dim": 1,
        },
    ),
    "SoftGate": (lz.SoftGate, {"features": 6, "width": 4}),
    "RoutingRecord": (lz.RoutingRecord, {"num_rollouts": 3, "rank": 2}),
}  # fmt: skip

#: What no argument may be, whatever it is.
FOREIGN = {"an object": object(), "text": "nonsense", "a dictionary": {"a": 1}, "a list of text": ["a"]}
NUMBERS = {"nan": math.nan, "inf": math.inf, "negative": -3, "huge": 10**30, "half": 0.5, "zero": 0}


def _spoilt(value: Any) -> Iterator[tuple[str, Any]]:
    """An argument in other forms, most of which it must not have."""
    yield from FOREIGN.items()
    yield "None", None
    yield from NUMBERS.items()
    if not isinstance(value, Tensor):
        yield "a complex tensor", torch.zeros(3, dtype=torch.complex64)
        yield "three numbers", torch.zeros(3)
        yield "no numbers", torch.zeros(0)
        yield "on meta", torch.zeros((), device="meta")
        return
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.int64, torch.float64, torch.bool):
        yield str(dtype), value.to(dtype)
    yield "on meta", value.to("meta")
    yield "sparse", value.to_sparse()
    yield "one dimension more", value.unsqueeze(0)
    yield "without dimensions", value.flatten()[0]
    for dim in range(value.dim()):
        yield f"empty in {dim}", value.narrow(dim, 0, 0)
        yield f"short in {dim}", value.narrow(dim, 0, value.shape[dim] - 1)
        yield f"long in {dim}", torch.cat((value, value), dim)
    for name, number in (("nan", math.nan), ("inf", math.inf), ("negative", -3.0)):
        if value.is_floating_point():
            yield f"full of {name}", torch.full_like(value, number)
    if not value.is_floating_point() and value.dtype != torch.bool:
        yield "negative numbers", torch.full_like(value, -3)
        yield "large numbers", torch.full_like(value, 2**30)


CASES = [(call, name) for call, (_, given) in CALLS.items() for name in given]


def _names(call: str) -> set[str]:
    function, given = CALLS[call]
    return {*given, *inspect.signature(function).parameters, "a number", "hard and soft", "weights / temperature"}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fits_passes(call: str) -> None:
    function, given = CALLS[call]
    with events.collect() as found:
        function(**given)
    assert not found


@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call}-{name}" for call, name in CASES])
def test_an_argument_that_does_not_fit_is_named(call: str, name: str) -> None:
    function, given = CALLS[call]
    before = health.retirements()
    for what, value in _spoilt(given[name]):
        try:
            function(**{**given, name: value})
        except ArgumentError as error:  # any of them, for it is with another that one does not fit
            named = error.argument in _names(call) and f"expected {error.argument}" in str(error)
            assert named, (what, str(error))  # noqa: PT017  # errors are what is tested
        except Exception as error:  # noqa: BLE001  # whatever it is
            pytest.fail(f"{name} as {what}: {type(error).__name__}: {str(error)[:200]}")
        else:
            assert what not in FOREIGN, f"{name} as {what} passed"
            assert what not in _NEVER.get(name, ("sparse", "torch.complex64")) or not isinstance(given[name], Tensor), (
                what
            )
            assert what != "on meta" or name == _first(given), what
    assert health.retirements() == before


#: States of a recurrence may be complex.
_NEVER: dict[str, tuple[str, ...]] = dict.fromkeys(("decay", "drive", "initial"), ("sparse",))


def _first(given: dict[str, Any]) -> str:
    """The argument whose device the others are to be on."""
    return next((name for name, each in given.items() if isinstance(each, Tensor)), "")


@pytest.mark.filterwarnings("ignore")
def test_sizes_are_numbers_while_a_call_is_recorded() -> None:
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: lz.attention(x, x, x, scale=x.shape[-1] ** -0.25),
        lambda x: lz.alibi(x[0, 0, 0], x.shape[1], x.shape[2]),
        lambda x: lz.sampling_probs(x, top_k=x.shape[-1] // 2),
        lambda x: lz.routed_adapter(x[0], x[0, 0], x[0, 0].mT, x[0, 0, :, 0], x[0, 1], x[0, 1].mT, arm="none",
                                    rollouts=(x.shape[1], x.shape[2])),
    ]  # fmt: skip
    for call in calls:
        x = _draw(2, 3, 4, 5)
        torch.testing.assert_close(torch.jit.trace(call, (x,))(x), call(x))


@pytest.mark.parametrize(
    "call", ["kda of a step", "linear_scan", "sample", "apply_token_bitmask", "speculative_verify"]
)
def test_a_call_that_is_bound_heeds_what_looks_on(call: str) -> None:
    function, given = CALLS[call]
    expected = function(**given)
    with torch.inference_mode():
        torch.testing.assert_close(function(**given), expected)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(function(**given), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)  # type: ignore[arg-type]  # as it was
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {name: mode.from_tensor(each) if isinstance(each, Tensor) else each for name, each in given.items()}
    with mode:
        found = function(**fake)
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_what_passed_is_not_looked_at_again() -> None:
    seen = []

    @remembered
    def check(x: Tensor, eps: float) -> None:
        seen.append(eps)
        Arguments("nothing").tensor("x", x, "A B")

    for _ in range(3):
        check(torch.zeros(2, 3), 1.0)
        for wrong in (torch.zeros(3), torch.zeros(2, 3).long()):
            with pytest.raises(ArgumentError):
                check(wrong, 1.0)
    check(torch.zeros(2, 3), 2.0)
    check(torch.zeros(2, 4), 2.0)
    assert seen == [1.0, *[1.0] * 6, 2.0, 2.0]


def test_what_passed_as_an_mlp_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to a remembered check is a tensor or can be hashed: it would run at every call without a word."""
    seen: list[str] = []
    told = Arguments.tensor
    monkeypatch.setattr(Arguments, "tensor", lambda *given, **named: (seen.append(given[1]), told(*given, **named))[1])
    operands = _draw(2, 31), _draw(37, 31), _draw(37, 31), _draw(31, 37)
    lz.mlp_fused(*operands)
    assert "down_weight" in seen
    seen.clear()
    lz.mlp_fused(*operands)
    assert "down_weight" not in seen


#: Calls that decoding makes at every token, and the operations and Python calls that each may take: by half more than it does.
DECODING = {
    "kda of a step": (6, 100),
    "linear_scan": (6, 100),
    "sample": (8, 270),
    "apply_token_bitmask": (5, 110),
    "speculative_verify": (8, 140),
}


@pytest.mark.parametrize("call", DECODING)
def test_a_call_at_every_token_does_little_but_its_work(call: str) -> None:
    function, given = CALLS[call]
    operations, calls = DECODING[call]
    for _ in range(2):
        function(**given)
    profile = cProfile.Profile()
    profile.enable()
    function(**given)
    profile.disable()
    assert sum(each.callcount for each in profile.getstats()) <= calls
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function(**given)
    assert len([each for each in seen.events() if each.name.startswith("aten::")]) <= operations


@pytest.mark.parametrize("call", DECODING)
def test_what_is_said_to_the_library_holds_from_the_next_call_on(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call that is bound is bound anew after every documented way to change settings."""
    function, given = CALLS[call]
    file = tmp_path / "settings.yaml"
    file.write_text("enabled: false\n")

    def by_variable() -> None:
        monkeypatch.setenv("LAYERZERO_DISABLED", "1")
        policy.refresh()

    changes = [partial(lz.configure, enabled=False), by_variable, partial(lz.load_config, file)]
    for change in changes:
        function(**given)
        with mock.patch.object(eager, "kernel_for", wraps=eager.kernel_for) as chosen:
            function(**given)
            assert not chosen.called
            change()
            function(**given)
            assert chosen.called
            with lz.disabled():
                function(**given)
        monkeypatch.delenv("LAYERZERO_DISABLED", raising=False)
        policy.reset()


@pytest.mark.parametrize("call", ["kda of a step", "kda", "linear_scan", "sample", "apply_token_bitmask", "blend"])
def test_what_lies_in_memory_with_another_sign_is_read_as_what_it_is(call: str) -> None:
    function, given = CALLS[call]
    floating = {name: each for name, each in given.items() if isinstance(each, Tensor) and each.is_floating_point()}
    expected = function(**given)
    for name, each in floating.items():
        turned = torch._neg_view(-each)
        assert turned.is_neg()
        torch.testing.assert_close(function(**{**given, name: turned}), expected, msg=name)


@pytest.mark.parametrize("lies", ["expanded", "column", "negative"])
def test_seeds_are_read_as_they_lie_in_memory(lies: str) -> None:
    function, given = CALLS["speculative_verify"]
    rows = given["draft_tokens"].shape[0]
    seeds = torch.randint(1, 2**62, (rows, 2))
    if lies == "expanded":
        own = seeds[:1, 0].expand(rows)
    else:
        own = seeds[:, 0] if lies == "column" else torch._neg_view(-seeds[:, 0].contiguous())
    plain = torch.tensor(own.tolist())
    for found, expected in zip(function(**{**given, "seeds": own}), function(**{**given, "seeds": plain}), strict=True):
        assert torch.equal(found, expected)


#: What a first call does before it can run.
PREPARING = ((cpp_scan, "_forward"), (cpp_sampling, "prepare"))


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("call", ["sample", "linear_scan", "kda of a step"])
def test_threads_may_make_the_first_call_together(call: str) -> None:
    function, given = CALLS[call]
    expected = function(**given)
    eager.forget()
    found, together = list[Any](), threading.Barrier(4)

    def run() -> None:
        together.wait()
        found.append(function(**given))

    preparing = [mock.patch.object(each, name, slowly(getattr(each, name))) for each, name in PREPARING]
    with events.collect() as happened, preparing[0], preparing[1]:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not happened
    for each in found:
        torch.testing.assert_close(each, expected)
    assert len(found) == 4
    assert not health.retirements()


@pytest.mark.parametrize("call", DECODING)
def test_a_call_that_is_bound_refuses_what_it_refused_before(call: str) -> None:
    """After a good call with the same shapes, and the second time, with the same words."""
    function, given = CALLS[call]
    name = next(name for name, each in given.items() if isinstance(each, Tensor) and each.is_floating_point())
    good: Tensor = given[name]
    for wrong in ("text", good.to(torch.int32), good.to(torch.float8_e5m2), good.to_sparse(), good[None, None, None]):
        texts = []
        for _ in range(2):
            function(**given)
            with pytest.raises(ArgumentError) as caught:
                function(**{**given, name: wrong})
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
