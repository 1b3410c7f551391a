"""Writes and draws that no name tells: nothing is read, moved or handed on past them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from backends import Traced
from torch import Tensor, fx

from lz_compile.passes.graph.view import read
from lz_compile.passes.graph.writes import is_pure, overwritten

Writer = Callable[[Tensor], object]


@pytest.fixture(autouse=True, scope="module")
def operators() -> Iterator[None]:
    """An operator that writes, and one that draws, as a user defines them."""
    library = torch.library.Library("writes_test", "DEF")
    library.define("grow(Tensor(a!) x) -> ()")
    library.define("grow.times(Tensor(a!) x, float times) -> ()")

    def grow(x: Tensor, times: float = 1.5) -> None:
        x.mul_(times)

    for name in ("grow", "grow.times"):
        library.impl(name, grow, "CompositeExplicitAutograd")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", torch.rand_like, "CompositeExplicitAutograd")
    yield
    library._destroy()


WRITERS: dict[str, Writer] = {
    "a packet of overloads": lambda x: torch.ops.writes_test.grow(x, 1.5),
    "an overload": lambda x: torch.ops.writes_test.grow.times(x, 1.5),
    "__iadd__": lambda x: x.__iadd__(1.0),
    "__imul__": lambda x: x.__imul__(1.5),
    "torch.Tensor.__isub__": lambda x: torch.Tensor.__isub__(x, 0.5),
    "embedding": lambda x: F.embedding(torch.arange(4), x, max_norm=0.1),
    "embedding, by position": lambda x: F.embedding(torch.arange(4), x, None, 0.1),
    "embedding_bag": lambda x: F.embedding_bag(torch.arange(4)[None], x, max_norm=0.1),
    "batch_norm": lambda x: F.batch_norm(_rows(x), x.view(-1), torch.ones(x.numel()), training=True),
    "native_batch_norm": lambda x: torch.ops.aten.native_batch_norm.default(
        _rows(x), None, None, x.view(-1), torch.ones(x.numel()), True, 0.1, 1e-5
    ),
    "instance_norm": lambda x: F.instance_norm(
        _rows(x)[..., None] * torch.arange(2), x.view(-1), torch.ones(x.numel())
    ),
}


def _rows(x: Tensor) -> Tensor:
    return torch.ones(5, x.numel()).cumsum(0)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_norm_is_not_read_across_a_write(writer: str):
    write = WRITERS[writer]

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        mean = y.pow(2).mean(-1, keepdim=True)
        write(y)
        return y * torch.rsqrt(mean + 1e-6) * w

    _same(function, torch.randn(4, 64), torch.randn(64), lock={"norm": "torch.norm"})


@pytest.mark.parametrize("writer", ["a packet of overloads", "__imul__", "embedding"])
def test_an_attention_is_not_read_across_a_write(writer: str):
    write = WRITERS[writer]

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = k.cumsum(1)
        scores = torch.einsum("bqd,bkd->bqk", q / 8, k)
        write(k[0])
        return scores.softmax(-1) @ v, k

    _same(function, *(torch.randn(2, 16, 8) for _ in range(3)), lock={"attention": "lz.blocked"})


def test_without_a_write_both_are_read():
    def normed(x: Tensor, w: Tensor) -> Tensor:
        y = F.embedding(torch.arange(4), x * 2)  # no norm is asked for: nothing is written
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    backend = _same(normed, torch.randn(4, 64), torch.randn(64), lock={"norm": "torch.norm"})
    assert any(match.rewritten for match in backend.report.matches)


def _same(function: Callable[..., object], *inputs: Tensor, **options: object) -> Traced:
    torch._dynamo.reset()
    expected = function(*(each.clone() for each in inputs))
    backend = Traced(**options)
    result = torch.compile(function, backend=backend)(*(each.clone() for each in inputs))
    torch.testing.assert_close(result, expected)
    return backend


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "batch_norm": lambda z, a, b: F.batch_norm(z, a, b, training=True),
    "packet": lambda z, a, b: torch.ops.writes_test.grow(a) or z + a,
    "__iadd__": lambda z, a, b: a.__iadd__(b) + z,
}


@pytest.mark.parametrize("step", STEPS)
def test_what_writes_stays_in_every_step_even_where_nothing_can_be_run(step: str):
    call = STEPS[step]

    def function(x: Tensor, z: Tensor, k: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        h, found = z, []
        for t in range(16):
            root = torch.linalg.cholesky(k)  # which takes no random matrix
            h = h * 0.5 + (x[:, t] + call(z, a, b)) @ root
            found.append(h)
        return h, torch.stack(found), a, b

    k = torch.eye(3) * 0.3
    _same(function, torch.randn(2, 16, 3), torch.randn(2, 3), k, torch.ones(3), torch.ones(3), loops="roll")


def test_what_a_user_writes_to_is_not_handed_on():
    def function(x: Tensor, z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        h, o = z, torch.zeros_like(x)
        for t in range(16):
            o[:, t] = h @ torch.linalg.cholesky(k)
            torch.ops.writes_test.grow(o)
            h = o[:, t] * 0.5 + x[:, t]
        return h, o

    _same(function, torch.randn(2, 16, 3), torch.randn(2, 3), torch.eye(3) * 0.3, loops="roll")


def _node(target: object, *args: object) -> fx.Node:
    return fx.Graph().call_function(target, args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target", [lambda: torch.ops.writes_test.noise, lambda: torch._standard_gamma, lambda: F.fractional_max_pool2d]
)
def test_what_draws_random_numbers_is_not_pure(target: Callable[[], object]):
    assert not is_pure(_node(target()))


def test_a_packet_writes_what_any_of_its_overloads_does():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in (torch.ops.writes_test.grow, torch.ops.aten.relu_):
        assert overwritten(read(graph.call_function(target, (x,)))) == [x]
    assert not overwritten(read(graph.call_function(torch.ops.aten.add, (x, x))))


def test_a_kernel_of_the_users_may_write_to_all_that_it_is_handed():
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"out": x}})
    assert overwritten(read(node)) == [x]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_trial_that_fails_inside_of_a_transform_leaves_it(transform: str):
    def root(k: Tensor) -> Tensor:
        if transform == "vmap":
            return torch.vmap(torch.linalg.cholesky)(k)[0]
        return torch.func.grad(lambda a: torch.linalg.cholesky(a).sum())(k[0])

    def function(x: Tensor, k: Tensor) -> Tensor:
        o = x.clone()
        for t in range(1, 8):
            o[:, t] += 0.5 * (o[:, t - 1] @ root(k))
        return o

    backend = _same(function, torch.randn(2, 8, 3), torch.eye(3).expand(2, 3, 3) * 0.3)
    assert backend.report.graphs


@pytest.mark.parametrize("is_graded", [True, False])
def test_a_loop_inside_of_vmap_stays(is_graded: bool):
    def function(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        def one(a: Tensor) -> tuple[Tensor, Tensor]:
            h, found = z, []
            for t in range(8):
                h = 0.5 * h + (y[:, t] * a[:, None]) @ w
                found.append(h)
            return a[:, None] * h, torch.stack(found)

        return torch.vmap(one)(x)

    inputs = [torch.randn(*shape, requires_grad=is_graded) for shape in ((4, 2), (2, 8, 3), (2, 3), (3, 3))]
    torch._dynamo.reset()
    backend = Traced(loops="roll")
    expected, result = function(*inputs), torch.compile(function, backend=backend)(*inputs)
    torch.testing.assert_close(result, expected)
    assert [each.stride() for each in result] == [each.stride() for each in expected]
    assert not backend.report.events
    assert not any(loop.rolled for loop in backend.report.loops)
