"""The op ``scan``: its definition, the kernel of PyTorch's own, and the functions ``lz.kda`` and ``lz.linear_scan``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from scan_problems import errors, problem, run
from torch import Tensor

import lz_compile as lz
from lz_compile.api import eager, scan_calls
from lz_compile.backend import layerzero
from lz_compile.errors import ArgumentError
from lz_compile.ground import events, health
from lz_compile.lowering.kernel_operator import asked, kernel_operator
from lz_compile.lowering.kernels.scan import chunked_scan, torch_scan
from lz_compile.lowering.ops import scan as op
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.problem import context as contexts

BACKENDS: dict[str, Any] = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor", "layerzero": layerzero}
B, T, H, K, V = 2, 9, 3, 4, 6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return function if backend == "eager" else torch.compile(function, backend=BACKENDS[backend], fullgraph=True)


# ---- the definition --------------------------------------------------------------------------------------------------


def by_elements(given: op.Operands, attrs: op.ScanAttrs) -> tuple[Tensor, Tensor]:
    """The legend of the op, written out with index notation over operands of full size."""
    sizes = op.sizes_of(given)
    full = {"B": sizes.batch, "H": sizes.heads, "T": sizes.length, "K": sizes.key_dim, "V": sizes.value_dim}
    full |= {"R": sizes.rank, "Q": sizes.reads}
    x = {name: each.expand([full[dim] for dim in op.DIMS[name]]) for name, each in given.given().items()}
    state = x.get("state", torch.zeros([full[dim] for dim in "BHKV"], dtype=torch.float64))
    reads = []
    for t in range(sizes.length):
        before = state
        state = before * x["decay"][:, :, t] if "decay" in x else before
        if "left" in x:
            right = x["right"][:, :, t]
            if "erase" in x:
                right = right - torch.einsum("bhrk,bhkv->bhrv", x["erase"][:, :, t], before)
            state = state + torch.einsum("bhrk,bhrv->bhkv", x["left"][:, :, t], right)
        state = state + x["drive"][:, :, t] if "drive" in x else state
        seen = before if attrs.reads == "before" else state
        reads.append(torch.einsum("bhqk,bhkv->bhqv", x["query"][:, :, t], seen) if "query" in x else seen)
    return torch.stack(reads, 2), state


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_is_the_definition(seed: int) -> None:
    given = problem(seed)
    for got, want in zip(
        op.reference(given.operands, given.attrs), by_elements(given.operands, given.attrs), strict=True
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_of_pytorchs_own_computes_in_float32_and_rounds_once(seed: int) -> None:
    given = problem(seed, T=5)
    found = errors(run(given, torch_scan.scan, torch.float32), run(given, op.reference))
    assert max(found.values()) < 1e-5, found


def test_an_operator_of_two_results_has_gradients_although_one_is_a_constant() -> None:
    scan = kernel_operator("test_scan_of_two_results", op, op.reference, backward=asked(op, op.reference))
    x = op.Operands(drive=draw(1, 1, 1, 1, 3).requires_grad_())
    reads, last = scan(x, op.ScanAttrs("before"))  # what is read before the first step are zeros
    assert not reads.any()
    assert torch.equal(*torch.autograd.grad(reads.sum() + 2 * last.sum(), x.drive), torch.full_like(x.drive, 2))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"decay": (1, 1, 3, 1)}, r"expected decay with the dimensions BHTKV, received \(1, 1, 3, 1\)"),
        (
            {"drive": (1, 1, 3, 1, 5), "decay": (2, 1, 4, 1, 5)},
            r"of size 1 or 4 in T of BHTKV, received \(1, 1, 3, 1, 5\)",
        ),
        ({"left": (1, 1, 3, 1, 5)}, "left and right together"),
        ({"drive": (1, 1, 3, 1, 5), "erase": (1, 1, 3, 1, 5)}, "and erase with them only"),
        ({"drive": (1, 1, 3, 4, 5)}, "expected a query of a state of 4 rows"),
        ({"state": (1, 1, 1, 5)}, "expected an operand that has steps"),
    ],
)
def test_operands_that_are_no_scan_are_refused(operands: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.reference(op.Operands(**{name: torch.zeros(shape) for name, shape in operands.items()}), op.ScanAttrs())


def test_features_name_what_a_kernel_must_take() -> None:
    given = problem(
        1, decay="key", drive=None, rank=2, erases=True, reads=1, has_state=True, at="before", B=2, T=9, K=4, V=5,
        broadcasts=False,
    )  # fmt: skip
    facts = op.facts_of(given.leaves(torch.float32))
    assert (facts.rank, facts.length, facts.structure.decay, facts.needs_grad) == (2, 9, "key", True)
    wanted = {"state", "key_decay", "updates", "rank", "erase", "query", "reads_before", "many_steps", "training"}
    assert op.features(given.attrs, facts).keys() == wanted
    short = replace(facts, length=4, rank=1, needs_grad=False)
    assert "many_steps" not in op.features(given.attrs, short)
    symbols = replace(facts, length=sympy.Symbol("t"), value_dim=sympy.Symbol("v"))
    assert {*op.features(given.attrs, symbols)} - wanted == {"symbolic_length", "symbolic_widths"}
    assert given.attrs.variant == "delta"
    context = contexts.of_facts("scan", given.attrs, facts)
    assert (context.operation, context.dims["batch_size"], context.dims["length"]) == ("scan.delta", 2, 9)


@pytest.mark.parametrize("variant", op.VARIANT_ATTRIBUTES)
def test_a_sample_is_the_same_written_out_and_by_a_kernel(variant: str) -> None:
    sizes = {"batch_size": 2, "num_heads": 3, "length": 5, "key_dim": 4, "value_dim": 6, "rank": 2, "reads": 2}
    sample = op.sample(sizes, torch.float32, torch.device("cpu"), variant=variant, is_training=True)
    assert sample.attrs.variant == variant
    got, want = sample.with_kernel(op.reference)(*sample.inputs), sample.as_written()(*sample.inputs)
    torch.testing.assert_close(got, want)
    assert contexts.sizes_of("scan", sample.facts) == sizes


# ---- lz.kda ----------------------------------------------------------------------------------------------------------


def kda_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    k = torch.nn.functional.normalize(draw(B, T, H, K, seed=1), dim=-1)
    given = {
        "q": draw(B, T, H, K),
        "k": k,
        "v": draw(B, T, H, V, seed=2),
        "alpha": torch.sigmoid(draw(B, T, H, K, seed=3)),
        "beta": torch.sigmoid(draw(B, T, H, seed=4)),
        "initial_state": draw(B, H, K, V, seed=5),
        "initial_output": draw(B, H, V, seed=6),
    }
    return {name: each.to(dtype).requires_grad_() for name, each in given.items()}


def masks() -> dict[str, Tensor]:
    dropped = draw(B, T, seed=7) < -0.3
    dropped[0, 0] = True
    return {"drop_mask": dropped, "active": draw(B, T, H, seed=8) > -0.8}


def spiking_loop(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, initial_state: Tensor, initial_output: Tensor,
    drop_mask: Tensor, active: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token: a dropped one is skipped and repeats, a silent head keeps its weights and is read."""
    state, last = initial_state, initial_output
    outputs = []
    for t in range(q.shape[1]):
        learned = alpha[:, t, :, :, None] * state
        found = torch.einsum("bhk,bhkv->bhv", k[:, t], learned)
        learned = learned + beta[:, t, :, None, None] * k[:, t, :, :, None] * (v[:, t] - found)[:, :, None]
        keeps = drop_mask[:, t, None] | ~active[:, t].bool()
        state = torch.where(keeps[:, :, None, None], state, learned)
        read = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
        last = torch.where(drop_mask[:, t, None, None], last, read)
        outputs.append(last)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", "inductor", pytest.param("layerzero", marks=pytest.mark.slow)]
)
def test_kda_is_the_spiking_loop_with_gradients(backend: str) -> None:
    given, masked = kda_inputs(), masks()

    def function(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        return lz.kda(**inputs, **masked)

    got, want = compiled(function, backend)(**given), spiking_loop(**given, **masked)
    weights = [draw(*each.shape, seed=9) for each in want]
    ours, theirs = (torch.autograd.grad(each, list(given.values()), weights) for each in (got, want))
    for one, other in zip((*got, *ours), (*want, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_sequence_in_parts_or_token_by_token_is_the_sequence() -> None:
    given, masked = kda_inputs(), masks()
    state, output = given.pop("initial_state"), given.pop("initial_output")
    with torch.no_grad():
        whole, last = lz.kda(**given, **masked, initial_state=state, initial_output=output)
        for size in (1, 4):
            current, found = (state, output), []
            for start in range(0, T, size):
                part = {name: each[:, start : start + size] for name, each in {**given, **masked}.items()}
                out, following = lz.kda(**part, initial_state=current[0], initial_output=current[1])
                current = following, out[:, -1]
                found.append(out)
            torch.testing.assert_close(torch.cat(found, 1), whole)
            torch.testing.assert_close(current[0], last)


def test_heads_may_come_first_and_decays_be_one_for_a_head() -> None:
    given = kda_inputs()
    given["alpha"] = given["alpha"][..., 0].detach()
    want, last = lz.kda(**{**given, "alpha": given["alpha"].unsqueeze(-1).expand(B, T, H, K)})
    state, output = given.pop("initial_state"), given.pop("initial_output")
    turned = {name: each.transpose(1, 2) for name, each in given.items()}
    got, other = lz.kda(**turned, initial_state=state, initial_output=output, head_first=True)
    torch.testing.assert_close(got.transpose(1, 2), want)
    torch.testing.assert_close(other, last)


def test_outputs_are_scaled_and_have_the_dtype_of_values() -> None:
    given = {name: each.detach().bfloat16() for name, each in kda_inputs().items() if not name.startswith("initial")}
    out, state = lz.kda(**given, scale=0.5)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, lz.kda(**given)[0] * 0.5, rtol=2e-2, atol=1e-2)


def test_all_tokens_dropped_change_nothing() -> None:
    given = kda_inputs()
    out, state = lz.kda(**given, drop_mask=torch.ones(B, T, dtype=torch.bool))
    assert torch.equal(state, given["initial_state"])
    assert torch.equal(out, given["initial_output"].unsqueeze(1).expand(B, T, H, V))
    given.pop("initial_output")
    assert not lz.kda(**given, drop_mask=torch.ones(B, T))[0].any()


@pytest.mark.parametrize("kernel", ["lz.rolled_scan", "torch.scan_sequential", "lz.chunked_scan"])
@pytest.mark.parametrize("names", [("q", "k", "v", "alpha", "beta"), ("k",), ("v",), ("q",)])
def test_what_a_dropped_token_holds_reaches_nothing(names: tuple[str, ...], kernel: str) -> None:
    dropped = torch.zeros(B, T, dtype=torch.bool)
    dropped[0, 3] = dropped[1, :2] = True
    given = {name: each.detach() for name, each in kda_inputs().items() if name in ("q", "k", "v", "alpha", "beta")}

    def holding(name: str, value: float) -> Tensor:
        return given[name].masked_fill(dropped.reshape(B, T, *(1,) * (given[name].dim() - 2)), value)

    inputs = {name: holding(name, 0.5) for name in given}
    spoilt = {name: holding(name, math.nan if name in names else 0.5) for name in given}
    results = []
    for each in (inputs, spoilt):
        leaves = {name: value.detach().requires_grad_() for name, value in each.items()}
        if kernel == "lz.chunked_scan":  # code for a compiler: over the operands that the call makes
            with mock.patch.object(scan_calls, "_selected", _in_chunks):
                found = lz.kda(**leaves, drop_mask=dropped)
        else:
            with lz.lock("scan", kernel):
                found = lz.kda(**leaves, drop_mask=dropped)
        gradients = torch.autograd.grad(sum(part.square().sum() for part in found), list(leaves.values()))
        results.append([*found, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _in_chunks(x: op.Operands, out_dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return chunked_scan.scan(x, scan_calls._problem(x, out_dtype, state_dtype)[0], chunk=4)


def test_a_head_that_is_not_active_keeps_its_state_whatever_the_token_holds() -> None:
    active = torch.ones(B, T, H)
    active[:, 4, 1] = 0
    given = {name: each.detach().clone() for name, each in kda_inputs().items()}
    clean = lz.kda(**given, active=active)
    given["k"][:, 4, 1] = given["v"][:, 4, 1] = given["beta"][:, 4, 1] = math.inf
    for ours, theirs in zip(lz.kda(**given, active=active), clean, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, s: lz.kda(**{**x, "initial_state": s.long()}), "expected initial_state .*floating-point .*int64"),
        (lambda x, s: lz.kda(**{**x, "v": x["v"].int()}), "expected v .*floating-point numbers.*int32.*float"),
        (
            lambda x, s: lz.kda(**{**x, "initial_state": s.to("meta")}),
            "expected initial_state on cpu as q is, received meta",
        ),
        (lambda x, s: lz.linear_scan(0.5, torch.ones(2, 3).long()), "expected drive .*floating-point numbers.*int64"),
        (lambda x, s: lz.linear_scan(torch.ones(2, 3).long(), torch.ones(2, 3)), "expected decay .*floating-point"),
        (
            lambda x, s: lz.linear_scan(0.5, torch.ones(2, 3), initial=torch.ones(2).long()),
            "expected initial .*floating",
        ),
        (
            lambda x, s: torch.ops.layerzero.scan.default(
                s.long(), x["v"][:, :, :, None, :1], None, None, None, None, x["v"], torch.float32, torch.float32, ""
            ),
            "expected state .*floating-point numbers.*int64",
        ),
    ],
)
def test_integers_and_other_devices_are_the_callers_error_and_retire_nothing(call: Any, message: str) -> None:
    before = health.retirements()
    with pytest.raises(ArgumentError, match=message):
        call(kda_inputs(), torch.zeros(B, H, K, V))
    assert health.retirements() == before


def test_a_scan_that_no_kernel_takes_says_so_in_one_line() -> None:
    drive = torch.randn(2, 3, 4, dtype=torch.complex64)
    eager.forget()
    with events.collect() as found:
        lz.linear_scan(drive, drive)
    (event,) = found
    assert event.code == "NO_KERNEL"
    assert "\n" not in event.message
    assert event.message.startswith("scan.diagonal in complex64 on cpu runs on torch.scan_sequential all the same")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"q": (B, T, H, K + 1)},
            r"lz.kda: expected k \[B, T, H, K\] of shape \(2, 9, 3, 5\), received \(2, 9, 3, 4\)",
        ),
        ({"beta": (B, T)}, r"expected beta \[B, T, H\] of shape \(2, 9, 3\)"),
        ({"k": (T, H, K)}, r"expected k \[B, T, H, K\] of shape \(2, 9, 3, 4\)"),
        ({"initial_state": (B, H, V, K)}, r"expected initial_state \[B, H, K, V\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changed: dict[str, tuple[int, ...]], message: str) -> None:
    given = {**kda_inputs(), **{name: torch.ones(shape) for name, shape in changed.items()}}
    with pytest.raises(ValueError, match=message):
        lz.kda(**given)


# ---- lz.linear_scan --------------------------------------------------------------------------------------------------


def average(decay: Tensor, drive: Tensor, initial: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    factors = decay.expand(drive.shape).unbind(dim)
    state = torch.zeros_like(drive.select(dim, 0)) if initial is None else initial.expand_as(drive.select(dim, 0))
    states = []
    for factor, value in zip(factors, drive.unbind(dim), strict=True):
        state = factor * state + value
        states.append(state)
    return torch.stack(states, dim), state


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("shape", "dim", "decay", "initial"),
    [
        ((2, 9, 5), 1, (2, 9, 5), None),
        ((2, 9, 5), 1, (5,), (5,)),
        ((2, 5, 9), -1, (5, 1), (2, 5)),
        ((9,), 0, (9,), ()),
        ((9, 2, 3, 4), 0, (9, 1, 3, 1), (3, 4)),
        ((2, 3, 9, 4, 5), 2, (3, 9, 1, 5), (2, 1, 4, 5)),
    ],
)
def test_linear_scan_is_the_loop_with_gradients(
    shape: tuple[int, ...], dim: int, decay: tuple[int, ...], initial: tuple[int, ...] | None, backend: str
) -> None:
    given = [torch.sigmoid(draw(*decay, seed=1)), draw(*shape, seed=2)]
    given += [] if initial is None else [draw(*initial, seed=3)]
    leaves = [each.requires_grad_() for each in given]

    def function(decay: Tensor, drive: Tensor, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return lz.linear_scan(decay, drive, initial=initial, dim=dim)

    got, want = (
        compiled(function, backend)(*leaves),
        average(*leaves[:2], leaves[2] if initial is not None else None, dim),
    )
    weights = [draw(*each.shape, seed=9) for each in want]
    ours, theirs = (torch.autograd.grad(each, leaves, weights) for each in (got, want))
    for one, other in zip((*got, *ours), (*want, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_number_is_a_decay_and_without_a_drive_states_are_products() -> None:
    drive = draw(2, 9, 5)
    torch.testing.assert_close(lz.linear_scan(0.5, drive), average(torch.tensor(0.5), drive, None, 1))
    factors = torch.rand(2, 9, 5)
    states, last = lz.linear_scan(factors, initial=torch.tensor(2.0))
    torch.testing.assert_close(states, 2 * factors.cumprod(1))
    torch.testing.assert_close(last, 2 * factors.prod(1))


def test_nothing_to_scan_gives_nothing() -> None:
    states, last = lz.linear_scan(0.5, torch.zeros(2, 0, 5), initial=torch.ones(5))
    assert states.shape == (2, 0, 5)
    assert torch.equal(last, torch.ones(2, 5))
    assert lz.linear_scan(0.5, torch.zeros(0, 3, 5))[0].shape == (0, 3, 5)


def test_what_is_no_linear_scan_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lz.linear_scan: expected dim as a dimension of drive, of which there are 3, received 3"
    ):
        lz.linear_scan(0.5, torch.zeros(2, 9, 5), dim=3)
    with pytest.raises(ValueError, match=r"expected decay that can be broadcast to \(2, 9, 5\), received \(9,\)"):
        lz.linear_scan(torch.zeros(9), torch.zeros(2, 9, 5))
    with pytest.raises(ValueError, match=r"expected initial that can be broadcast to \(2, 5\), received \(2, 9, 5\)"):
        lz.linear_scan(0.5, torch.zeros(2, 9, 5), initial=torch.zeros(2, 9, 5))
    with pytest.raises(ValueError, match=r"expected decay as a tensor, received float 0.5"):
        lz.linear_scan(0.5)


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Iterator[list[str]]:
    """A kernel that is locked; it notes its operands."""
    seen: list[str] = []

    def call(x: op.Operands, attrs: op.ScanAttrs) -> tuple[Tensor, Tensor]:
        seen.append(" ".join(sorted(x.given())))
        return op.reference(x, attrs)

    given = registry.kernels("scan")["lz.rolled_scan"]
    registry.register(replace(given, kernel_id="test.scan", implementation=call, prior=()))
    with lz.lock("scan", "test.scan"):
        yield seen
    registry.unregister_kernel("test.scan")
    health.restore("test.scan")


def test_policy_decides_which_kernel_runs_eagerly_and_compiled(other: list[str]) -> None:
    drive = draw(2, 9, 5)
    want = average(torch.tensor(0.5), drive, None, 1)
    torch.testing.assert_close(lz.linear_scan(0.5, drive), want)
    assert other == ["decay drive"]
    torch.testing.assert_close(compiled(lambda x: lz.linear_scan(0.5, x), "aot_eager")(drive), want)
    assert len(other) > 1
    count = len(other)
    with lz.lock("scan", "lz.rolled_scan"):
        torch.testing.assert_close(lz.linear_scan(0.5, drive), want)
    assert len(other) == count


def test_under_a_transform_the_reference_runs(other: list[str]) -> None:
    drive = draw(3, 2, 9, 5)
    got, _ = torch.func.vmap(lambda x: lz.linear_scan(0.5, x))(drive)
    torch.testing.assert_close(got, average(torch.tensor(0.5), drive, None, 2)[0])
    assert torch.func.grad(lambda x: lz.linear_scan(0.5, x)[0].sum())(drive[0]).shape == (2, 9, 5)
    assert not other


def test_few_steps_may_be_written_out_and_many_are_not() -> None:
    kernels = registry.kernels("scan")
    for length, refused in ((4, False), (5, True)):
        given = problem(1, decay="key", rank=1, drive=None, reads=1, T=length, K=4, V=4, broadcasts=False)
        context = contexts.of_facts("scan", given.attrs, op.facts_of(given.operands))
        codes = [str(reason.code) for reason in kernels["torch.scan_sequential"].check(context)]
        assert ("MANY_STEPS_UNSUPPORTED" in codes) is refused
