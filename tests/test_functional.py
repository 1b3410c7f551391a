"""Functions of single ops: results and gradients against float64, eager and compiled by any backend; errors by their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lz_compile as lz
from lz_compile.api.functional import ACTIVATIONS
from lz_compile.backend import layerzero
from lz_compile.errors import ArgumentError, KernelExecutionError
from lz_compile.ground import events, health
from lz_compile.lowering.ops import norm as norm_op
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import policy

ROWS, HIDDEN = 5, 12


def draw(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, seed: int = 0) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        dtype
    )
    return tensor.requires_grad_(grad)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotation of pairs as a product of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles))
    return out.flatten(-2) if interleaved else out.transpose(-1, -2).flatten(-2)


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (
        lambda x, w: lz.rms_norm(x, w, 1e-3),
        lambda x, w: rms(x, w, 1e-3),
        ((2, ROWS, HIDDEN), (HIDDEN,)),
    ),
    "rms_norm without a weight": (lz.rms_norm, lambda x: rms(x, None, 1e-6), ((ROWS, HIDDEN),)),
    "layer_norm": (
        lambda x, w, b: lz.layer_norm(x, HIDDEN, w, b),
        lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b),
        ((2, ROWS, HIDDEN), (HIDDEN,), (HIDDEN,)),
    ),
    "layer_norm over two dimensions": (
        lambda x, w: lz.layer_norm(x, (ROWS, HIDDEN), w),
        lambda x, w: F.layer_norm(x, (ROWS, HIDDEN), w),
        ((2, ROWS, HIDDEN), (ROWS, HIDDEN)),
    ),
    "linear": (lz.linear, F.linear, ((ROWS, HIDDEN), (7, HIDDEN), (7,))),
    "mlp_fused": (
        lambda x, g, u, d: lz.mlp_fused(x, g, u, d, activation="gelu_tanh"),
        lambda x, g, u, d: (F.gelu(x @ g.T, approximate="tanh") * (x @ u.T)) @ d.T,
        ((ROWS, HIDDEN), (9, HIDDEN), (9, HIDDEN), (HIDDEN, 9)),
    ),
    "alibi": (
        lambda s: lz.alibi(s, 3, 5),
        lambda s: s[:, None, None] * (torch.arange(5)[None] - torch.arange(2, 5)[:, None]),
        ((4,),),
    ),
}
BACKENDS: dict[str, Any] = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor", "layerzero": layerzero}


@pytest.mark.sampled
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_the_definition(name: str, backend: str) -> None:
    function, definition, shapes = CALLS[name]
    torch._dynamo.reset()
    run = function if backend == "eager" else torch.compile(function, backend=BACKENDS[backend], fullgraph=True)
    given = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in given]
    got, want = run(*given), definition(*exact)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    weight = draw(*want.shape, dtype=torch.float64, grad=False, seed=9)
    ours = torch.autograd.grad(got, given, weight.float())
    theirs = torch.autograd.grad(want, exact, weight)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rope_turns_pairs(rotary_dim: int | None, interleaved: bool, per_pair: bool, compiled: bool) -> None:
    count = rotary_dim or HIDDEN
    x, angles = draw(2, 3, ROWS, HIDDEN), draw(ROWS, count // 2, grad=False)
    table = (
        angles if per_pair else (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))
    )

    def function(x: Tensor) -> Tensor:
        return lz.rope(x, table.cos(), table.sin(), interleaved, rotary_dim=rotary_dim)

    torch._dynamo.reset()
    got = (torch.compile(function, backend=layerzero, fullgraph=True) if compiled else function)(x)
    want = torch.cat((turned(x.double()[..., :count], angles.double(), interleaved), x.double()[..., count:]), -1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_without_a_gate_is_one_activation(activation: Any) -> None:
    x, weight, down, bias = draw(ROWS, HIDDEN), draw(9, HIDDEN), draw(HIDDEN, 9), draw(9)
    got = lz.mlp_fused(x, weight, None, down, activation=activation, gate_bias=bias)
    torch.testing.assert_close(got, ACTIVATIONS[activation](x @ weight.T + bias) @ down.T)


def test_embedding_looks_up_rows() -> None:
    weight = draw(7, HIDDEN)
    lz.embedding(torch.tensor([[1, 6], [1, 0]]), weight, padding_idx=0).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_rounds_once(weight_dtype: torch.dtype) -> None:
    x, weight = draw(64, 96, dtype=torch.bfloat16, grad=False), draw(96, dtype=weight_dtype, grad=False)
    got = lz.rms_norm(x, weight)
    assert got.dtype == torch.bfloat16
    want = rms(x.double(), weight.double(), 1e-6)
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 * 1.01).all()


def test_alibi_in_half_precision_holds_long_distances() -> None:
    bias = lz.alibi(torch.tensor([2.0**-8], dtype=torch.float16), 1, 70000)
    assert bias[0, 0, 0] == -273.5  # of 69,999 / 256
    assert bias.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    x = draw(ROWS, HIDDEN)
    with pytest.raises(ValueError, match=r"lz.rms_norm: expected weight \[D\] of shape \(12,\), received \(5,\)"):
        lz.rms_norm(x, draw(5))
    with pytest.raises(ValueError, match=r"lz.layer_norm: expected input that ends in \(5,\)"):
        lz.layer_norm(x, 5)
    with pytest.raises(
        ValueError, match=r"lz.rope: expected cos and sin of equal shape that end in 12 \(or 6.*rotary_dim"
    ):
        lz.rope(x, draw(ROWS, 8), draw(ROWS, 8))
    with pytest.raises(ValueError, match=r"lz.alibi: expected queries as a whole number from 0 to 3, received 5"):
        lz.alibi(draw(4), 5, 3)
    with pytest.raises(
        ValueError, match=r"lz.mlp_fused: expected activation as one of silu, .*'gelo' \(did you mean 'gelu'\?\)"
    ):
        lz.mlp_fused(x, draw(9, HIDDEN), None, draw(HIDDEN, 9), activation="gelo")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"lz.rope: expected cos that can be broadcast to the rows of input, \(5,\), received \(7,\)"
    ):
        lz.rope(x, draw(7, 6), draw(7, 6))
    with pytest.raises(ValueError, match=r"expected activation as one of silu, .* received None"):
        lz.mlp_fused(x, draw(9, HIDDEN), None, draw(HIDDEN, 9), activation=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"up_weight \[H, I\] of shape \(9, 12\), received \(1, 12\)"):
        lz.mlp_fused(x, draw(9, HIDDEN), draw(1, HIDDEN), draw(HIDDEN, 9))
    with pytest.raises(ValueError, match="expected up_bias with up_weight"):
        lz.mlp_fused(x, draw(9, HIDDEN), None, draw(HIDDEN, 9), up_bias=draw(9))


def test_what_is_no_row_of_floating_point_numbers_is_refused() -> None:
    x, integers = draw(ROWS, HIDDEN, grad=False), torch.arange(HIDDEN)
    tables = torch.polar(torch.ones(ROWS, 6), draw(ROWS, 6, grad=False))
    with pytest.raises(ValueError, match=r"lz.rms_norm: expected input \[..., D\], received \(\)"):
        lz.rms_norm(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"lz.rope: expected input \[..., D\], received \(\)"):
        lz.rope(torch.tensor(1.0), x, x)
    for call in (lz.rms_norm, lambda x: lz.layer_norm(x, HIDDEN)):
        with pytest.raises(
            ValueError, match=r"expected input .*of floating-point numbers, .*received torch.int64. Cast it"
        ):
            call(integers)
    with pytest.raises(
        ValueError, match=r"lz.layer_norm: expected normalized_shape of one dimension at least, received \(\)"
    ):
        lz.layer_norm(x, ())
    with pytest.raises(
        ValueError, match=r"lz.rope: expected cos .*of floating-point numbers, .*received torch.complex64"
    ):
        lz.rope(x, tables, tables)
    with pytest.raises(ValueError, match=r"lz.rope: expected sin .*of floating-point numbers, .*received torch.int64"):
        lz.rope(x, x, x.long())
    with pytest.raises(
        ValueError, match=r"lz.alibi: expected slopes .*of floating-point numbers, .*received torch.int64"
    ):
        lz.alibi(integers, 3)
    for sizes in ((-1, 3), (-2,), (0, -1), (4, 3)):
        with pytest.raises(ValueError, match=r"lz.alibi: expected (keys|queries) as a whole number.* received -?\d"):
            lz.alibi(draw(4), *sizes)


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        (None, np.int64(HIDDEN)),
        (None, [np.int32(ROWS), HIDDEN]),
        ("aot_eager", [ROWS, HIDDEN]),
        ("aot_eager", torch.Size((HIDDEN,))),
    ],
)
def test_whatever_counts_as_whole_numbers_is_a_shape(backend: str | None, shape: Any) -> None:
    torch._dynamo.reset()
    x = draw(2, ROWS, HIDDEN)
    call = torch.compile(lz.layer_norm, backend=backend, fullgraph=True) if backend else lz.layer_norm
    wanted = F.layer_norm(x, (ROWS, HIDDEN) if isinstance(shape, list) else (HIDDEN,))
    torch.testing.assert_close(call(x, shape), wanted)


@pytest.fixture
def other() -> Iterator[list[Tensor]]:
    """A kernel beside PyTorch's that is preferred; it notes its inputs."""
    seen: list[Tensor] = []

    def call(x: norm_op.Operands, attrs: Any) -> Tensor:
        seen.append(x.input)
        return norm_op.reference(x, attrs)

    given = registry.kernels("norm")["torch.norm"]
    registry.register(replace(given, kernel_id="test.norm", implementation=call, prior=(), is_opaque=True))
    policy.prefer("test.norm")
    yield seen
    registry.unregister_kernel("test.norm")
    health.restore("test.norm")


def test_an_eager_norm_runs_the_kernel_that_policy_asks_for(other: list[Tensor]) -> None:
    x, weight = draw(2, ROWS, HIDDEN), draw(HIDDEN)
    torch.testing.assert_close(lz.rms_norm(x, weight), rms(x, weight, 1e-6))
    assert [tuple(each.shape) for each in other] == [(2 * ROWS, HIDDEN)]
    with lz.lock("norm", "torch.norm"):
        lz.rms_norm(x, weight)
    assert len(other) == 1


def test_weights_that_no_kernel_takes_are_left_to_pytorch(other: list[Tensor]) -> None:
    """Of another device, they are an error of the caller's, for which no kernel is retired."""
    x = draw(ROWS, HIDDEN)
    torch.testing.assert_close(lz.rms_norm(x, torch.arange(HIDDEN)), rms(x, torch.arange(HIDDEN), 1e-6))
    with pytest.raises(ArgumentError, match="expected weight on cpu as input is, received meta"):
        lz.rms_norm(x, torch.ones(HIDDEN, device="meta"))
    assert not other
    assert health.retired("test.norm") is None


def test_a_wider_weight_widens_what_a_kernel_computes_in(other: list[Tensor], monkeypatch: Any) -> None:
    given: list[Any] = []

    def reference(x: norm_op.Operands, attrs: Any) -> Tensor:
        given.append(attrs.compute_dtype)
        return exact(x, attrs)

    exact = norm_op.reference
    monkeypatch.setattr(norm_op, "reference", reference)
    x = draw(ROWS, HIDDEN)
    computed = []
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        weight = draw(HIDDEN, dtype=dtype)
        lz.rms_norm(x, weight)  # the kernel is held against the definition
        given.clear()
        torch.testing.assert_close(lz.rms_norm(x, weight), rms(x.double(), weight, 1e-6).float())
        computed += given
    assert computed == [torch.float32, torch.float64, torch.float32]


def test_under_a_transform_pytorchs_own_function_runs(other: list[Tensor]) -> None:
    x = draw(3, ROWS, HIDDEN, grad=False)
    torch.testing.assert_close(torch.func.vmap(lz.rms_norm)(x), rms(x, None, 1e-6))
    assert torch.func.grad(lambda x: lz.rms_norm(x).sum())(x).shape == x.shape
    assert not other


def test_a_kernel_that_fails_is_retired_and_the_call_completed(other: list[Tensor], monkeypatch: Any) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise ValueError("broken")

    monkeypatch.setattr(norm_op, "reference", fails)
    x = draw(ROWS, HIDDEN)
    with events.collect() as happened:
        torch.testing.assert_close(lz.rms_norm(x), rms(x, None, 1e-6))
    assert happened
    lz.configure(fallback_enabled=False)
    health.restore("test.norm")
    with pytest.raises(KernelExecutionError, match=r"running test.norm.*broken"):
        lz.rms_norm(x)


def test_shapes_are_asked_for_on_a_meta_device_and_where_nothing_is_turned() -> None:
    x, first, last = (torch.ones(shape, device="meta") for shape in ((2, 4), (5, 4), (3, 5)))
    assert lz.linear(x, first).shape == (2, 5)
    assert lz.mlp_fused(x, first, first, last).shape == (2, 3)
    assert lz.rope(torch.ones(1, 2, 3, 0), torch.ones(3, 0), torch.ones(3, 0)).shape == (1, 2, 3, 0)
