"""What a model computes twice is one value to whoever reads it, where nobody can tell that it is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_variants import normal
from backends import Rewriting
from graphs import capture, effects_of, outputs_of
from torch import Tensor

from lz_compile.passes.formula.equal_values import numbers
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match

Function = Callable[..., Any]
LOCK = {"attention": "lz.blocked", "norm": "torch.norm", "mlp": "torch.mlp"}
WEIGHT = normal(16, 16, seed=7) / 4


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def _projected(x: Tensor) -> Tensor:
    return x @ WEIGHT


def _exponentials(s: Tensor) -> Tensor:
    return torch.exp(s - s.amax(-1, keepdim=True))


def _quotient(s: Callable[[], Tensor], v: Tensor) -> Tensor:
    return torch.exp(s() - s().amax(-1, keepdim=True)) / torch.exp(s() - s().amax(-1, keepdim=True)).sum(-1, True) @ v


def _of_scores(s: Tensor, v: Tensor) -> Tensor:
    return _quotient(lambda: s, v)


def _rms(x: Callable[[], Tensor]) -> Tensor:
    return x() * torch.rsqrt(x().square().mean(-1, keepdim=True) + 1e-6)


#: The op, and a function of three tensors [2, 3, 11, 16] that computes something of it twice.
TWICE: dict[str, tuple[str, Function]] = {
    "maximum": ("attention", lambda q, k, v: _of_scores(_scores(q, k), v)),
    "scores": ("attention", lambda q, k, v: _quotient(lambda: _scores(q, k), v)),
    "scores of projections": ("attention", lambda q, k, v: _quotient(lambda: _scores(_projected(q), _projected(k)), v)),
    "exponentials": ("attention", lambda q, k, v: _exponentials(_scores(q, k)) @ v
                     / _exponentials(_scores(q, k)).sum(-1, keepdim=True)),
    "maximum by max": ("attention", lambda q, k, v: torch.softmax(
        _scores(q, k) - _scores(q, k).max(-1, keepdim=True)[0], -1) @ v),
    "logsumexp": ("attention", lambda q, k, v: torch.exp(
        _scores(q, k) - torch.logsumexp(_scores(q, k), -1, keepdim=True)) @ v),
    "row of a norm": ("norm", lambda q, k, v: _rms(lambda: q + k)),
    "row of a norm, projected": ("norm", lambda q, k, v: _rms(lambda: _projected(q))),
    "layer norm": ("norm", lambda q, k, v: ((q + k) - (q + k).mean(-1, keepdim=True))
                   / (((q + k) - (q + k).mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    "gate": ("mlp", lambda q, k, v: _projected(q) * torch.sigmoid(_projected(q)) * (q @ WEIGHT.mT)),
}  # fmt: skip


def qkv() -> list[Tensor]:
    return [normal(2, 3, 11, 16, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_computed_twice_is_one_value(name: str, is_trained: bool) -> None:
    op, function = TWICE[name]
    torch._dynamo.reset()
    inputs = [each.requires_grad_(is_trained) for each in qkv()]
    backend, results = Rewriting(lock=LOCK, strict=True), []
    for run in (torch.compile(function, backend=backend, fullgraph=True), function):
        found = run(*inputs)
        gradients = torch.autograd.grad(found.square().sum(), inputs, allow_unused=True) if is_trained else ()
        results.append([found.detach(), *(each for each in gradients if each is not None)])
    assert [match.rewritten for match in backend.report.matches if match.op == op] == [True], backend.why_not()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_layers_that_compute_alike_what_they_need_stay_alike() -> None:
    def model(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            x = x + _quotient(lambda x=x: _scores(x, k), v)
        return x

    torch._dynamo.reset()
    backend, inputs = Rewriting(lock=LOCK, strict=True), qkv()
    torch.testing.assert_close(torch.compile(model, backend=backend)(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    assert [match.rewritten for match in backend.report.matches] == [True] * 3, backend.why_not()


# ---- what is no equal value ------------------------------------------------------------------------------------------


@torch.library.custom_op("equal_values::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _written(write: Callable[[Tensor], object]) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.clone()
        first = _scores(q, k)
        write(q)
        return _between(first, _scores(q, k), v)

    return function


def _between(first: Tensor, second: Tensor, v: Tensor) -> Tensor:
    return torch.exp(first - first.amax(-1, keepdim=True)) @ v / _exponentials(second).sum(-1, keepdim=True)


def _in_mode(mode: Callable[[], Any]) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = _scores(q, k)
        with mode():
            second = _scores(q, k)
        return _between(first, second.float(), v)

    return function


def _drawn(draw: Callable[[Tensor], Tensor]) -> Function:
    return lambda q, k, v: _between(draw(_scores(q, k)), draw(_scores(q, k)), v)


UNEQUAL: dict[str, Function] = {
    "overwritten": _written(lambda q: q.mul_(2)),
    "overwritten in part": _written(lambda q: q.__setitem__((slice(None), 0), 0.0)),
    "overwritten by a view": _written(lambda q: q.transpose(0, 1).view(3, 2, -1).zero_()),
    "overwritten by out": _written(lambda q: torch.add(q, 1, out=q)),
    "without gradients": _in_mode(torch.no_grad),
    "in autocast": _in_mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    "dropped out": _drawn(lambda s: F.dropout(s, 0.5)),
    "random": _drawn(lambda s: s + torch.rand(11, 11)),
    "of a user's operator": _drawn(noisy),
    "of another type": lambda q, k, v: _between(_scores(q, k) / 2, _scores(q, k) // 2, v),
    "with another number": lambda q, k, v: _between(_scores(q, k), q @ k.mT * 0.3000001, v),
}


TRAINED = ("without gradients", "dropped out")


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_may_differ_is_no_equal_value(name: str) -> None:
    function, backend = UNEQUAL[name], Rewriting(lock=LOCK, strict=True)
    torch._dynamo.reset()
    inputs = [each.requires_grad_(name in TRAINED) for each in qkv()]
    results = []
    for run in (torch.compile(function, backend=backend, fullgraph=True), function):
        torch.manual_seed(0)
        found = run(*inputs)
        gradients = torch.autograd.grad(found.square().sum(), inputs) if name in TRAINED else ()
        results.append([found.detach(), *gradients])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert [match.op for match in backend.report.matches] == [], backend.why_not()
    assert backend.report.near_misses or "operator" in name, "the quotient was read"


def test_two_results_are_two_tensors() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        one, other = _scores(q, k), _scores(q, k)
        return one, other, _between(one, other, v)

    torch._dynamo.reset()
    backend, inputs = Rewriting(strict=True), qkv()
    one, other, _ = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    other.zero_()
    torch.testing.assert_close(one, _scores(*inputs[:2]))


def test_constants_of_another_type_make_another_value() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.add(1), x.add(1.0), x.add(True), torch.add(x, 1), x.mul(0.0), x.mul(-0.0), x + float("nan")

    module = capture(function, torch.arange(3.0))
    found = numbers(effects_of(module))
    *sums, _ = [node for node in module.graph.nodes if node.op.startswith("call")]
    assert len({found[node] for node in sums}) == 5
    assert found[sums[0]] == found[sums[3]]


def _drops(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.dropout(x, 0.5, training=True), F.dropout(x, 0.5, training=True)


def _overwrites(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    one = torch.exp(y)
    y.mul_(2)
    return one, torch.exp(y)


def _under_other_modes(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        one = torch.exp(x.detach())
    return one, torch.exp(x.detach())


def _under_autocast(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        one = torch.exp(x)
    return one, torch.exp(x)


@pytest.mark.parametrize("function", [_drops, _overwrites, _under_other_modes, _under_autocast])
def test_equal_calls_that_give_other_values_have_other_numbers(function: Function) -> None:
    module = capture(function, torch.randn(4, 4, requires_grad=True))
    found, results = numbers(effects_of(module)), outputs_of(module)
    assert len({found[node] for node in results}) == len(results) == 2
    twice = capture(lambda x: (torch.exp(x), torch.exp(x)), torch.randn(4, 4))
    assert len({numbers(effects_of(twice))[node] for node in outputs_of(twice)}) == 1


def test_what_a_recogniser_did_not_meet_stays() -> None:
    """Values that are equal in two layers are no reason to read a graph again, nor to make layers differ."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = (_scores(q, k)).softmax(-1) @ v
        return (_scores(x, k) + (k[..., 0] > 0)[..., None, :].float()).softmax(-1) @ v + (
            (_scores(v, k) + (k[..., 0] > 0)[..., None, :].float()).softmax(-1) @ v
        )

    module = capture(function, *qkv())
    effects = effects_of(module)
    found = [each for read in recognisers().values() for each in read(module.graph, effects)]
    assert sum(isinstance(each, Match) for each in found) == 3
    assert not effects.met
