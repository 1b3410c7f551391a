"""Every public call in every way that a call is made: compiled, exported, recorded, transformed, over tensors without numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from test_arguments import CALLS, B, N, T, V
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

import lz_compile as lz

Call = Callable[..., Any]
#: Calls that compute; the others make something, or change what they are called on.
COMPUTING = [call for call in CALLS if not call.startswith(("Blender", "SoftGate", "RoutingRecord"))]


def opened(call: str, given: Mapping[str, Any] | None = None) -> tuple[Call, tuple[Any, ...]]:
    """A call as a function of its tensors and numbers, and these."""
    function, known = CALLS[call][0], CALLS[call][1] if given is None else given
    names = [
        name for name, each in known.items() if isinstance(each, (Tensor, int, float)) and not isinstance(each, bool)
    ]
    others = {name: each for name, each in known.items() if name not in names}
    return lambda *them: function(**dict(zip(names, them, strict=True)), **others), tuple(known[name] for name in names)


def of_tensors(call: Call, given: tuple[Any, ...]) -> tuple[Call, tuple[Tensor, ...]]:
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]

    def run(*tensors: Tensor) -> Any:
        them = list(given)
        for place, tensor in zip(places, tensors, strict=True):
            them[place] = tensor
        return call(*them)

    return run, tuple(given[place] for place in places)


def compiled(call: Call, given: tuple[Any, ...]) -> Any:
    return torch.compile(call, backend="eager", fullgraph=True)(*given)


def compiled_for_any(call: Call, given: tuple[Any, ...]) -> Any:
    run = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    run(*(each * 0.5 if isinstance(each, float) and each <= 1 else each for each in given))
    return run(*given)


def exported(call: Call, given: tuple[Any, ...], strict: bool = False) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return run(*tensors)

    run, tensors = of_tensors(call, given)
    return torch.export.export(Module(), tensors, strict=strict).module()(*tensors)


def recorded(call: Call, given: tuple[Any, ...]) -> Any:
    run, tensors = of_tensors(call, given)
    return torch.jit.trace(run, tensors)(*tensors)


def traced(call: Call, given: tuple[Any, ...]) -> Any:
    run, tensors = of_tensors(call, given)
    return make_fx(run, tracing_mode="symbolic")(*tensors)(*tensors)


def strided(call: Call, given: tuple[Any, ...]) -> Any:
    return call(*(torch.stack((each, each), -1)[..., 0] if isinstance(each, Tensor) else each for each in given))


def batched(call: Call, given: tuple[Any, ...]) -> Any:
    run, tensors = of_tensors(call, given)
    found = torch.func.vmap(run, randomness="same")(*(torch.stack((each, each)) for each in tensors))
    return tree_map(lambda each: each[1], found)


WAYS: dict[str, Callable[[Call, tuple[Any, ...]], Any]] = {
    "compiled": compiled,
    "compiled for any sizes and numbers": compiled_for_any,
    "exported": exported,
    "exported by Dynamo": lambda *given: exported(*given, strict=True),
    "recorded": recorded,
    "recorded without kernels": recorded,
    "traced": traced,
    "strided": strided,
    "batched": batched,
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch: that torch.jit goes, and that sizes become numbers
@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", COMPUTING)
def test_a_call_gives_the_same_in_every_way(call: str, way: str) -> None:
    torch._dynamo.reset()
    function, given = opened(call)
    if way == "recorded without kernels":
        given = tuple(
            each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in given
        )
    expected = function(*given)
    if way == "batched" and call.startswith("routed_adapter"):
        with pytest.raises(lz.TransformUnsupportedError):
            WAYS[way](function, given)
        return
    torch.testing.assert_close(WAYS[way](function, given), expected, rtol=1e-4, atol=1e-5)
    memory = {each.untyped_storage().data_ptr() for each in given if isinstance(each, Tensor)}
    assert memory.isdisjoint(
        each.untyped_storage().data_ptr() for each in tree_leaves(expected) if isinstance(each, Tensor)
    )


def _without(size: int, each: Any) -> Any:
    if isinstance(each, Tensor):
        return (
            each.new_empty([0 if length == size else length for length in each.shape]) if size in each.shape else each
        )
    return 0 if each == size else each


@pytest.mark.sampled
@pytest.mark.parametrize("size", [B, T, N, V])
@pytest.mark.parametrize("call", COMPUTING)
def test_what_has_no_elements_is_refused_or_has_a_shape(call: str, size: int) -> None:
    function, given = opened(call, {name: _without(size, each) for name, each in CALLS[call][1].items()})
    try:
        expected = function(*given)
    except lz.LayerZeroError:
        return
    run, tensors = of_tensors(function, given)
    with FakeTensorMode() as mode:
        found = run(*map(mode.from_tensor, tensors))
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    wanted = [each.requires_grad_() for each in tensors if each.is_floating_point()]
    with contextlib.suppress(lz.GradientUnsupportedError):
        results = [each.sum() for each in tree_leaves(run(*tensors)) if isinstance(each, Tensor) and each.requires_grad]
        assert not results or torch.autograd.grad(results, wanted, allow_unused=True)


#: Calls whose gradients are those of what they compute, wherever their operands are.
DIFFERENTIABLE = [
    "attention", "rms_norm", "layer_norm", "rope", "alibi", "linear", "mlp_fused", "kda", "kda of a step", "linear_scan",
    "linear_scan by a number", "sampling_probs",
]  # fmt: skip


@pytest.mark.parametrize("call", DIFFERENTIABLE)
def test_gradients_are_those_of_what_is_computed(call: str) -> None:
    run, tensors = of_tensors(*opened(call))
    given = tuple(each.double().requires_grad_() if each.is_floating_point() else each for each in tensors)
    torch.autograd.gradcheck(run, given)
