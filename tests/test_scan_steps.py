"""Steps of loops, read as algebra: taken apart, recognised, and put back by a kernel with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import shipped
from step_spellings import KNOWN, UNKNOWN, Family, inputs
from torch import fx
from torch._higher_order_ops import scan
from torch.utils import _pytree as pytree

from lz_compile.lowering.ops.scan import reference
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.loops.recurrence.distribute import distribute
from lz_compile.passes.proof.validate import validate
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.rewrite import Recipes, splice
from lz_compile.passes.scan.matching import matches


class Compiler:
    """A backend that takes loops apart and puts the reference in the place of what is recognised; notes what it found."""

    def __init__(self, *, splices: bool = True, proves: bool = False) -> None:
        self.splices = splices
        self.proves = proves
        self.apart: list[Any] = []
        self.matches: list[Match] = []
        self.misses: list[NearMiss] = []
        self.verdicts: list[Any] = []

    def __call__(self, module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.apart.extend(distribute(module))
        found = list(matches(module.graph, Effects(module.graph)))
        self.matches.extend(each for each in found if isinstance(each, Match))
        self.misses.extend(each for each in found if isinstance(each, NearMiss))
        if self.proves:
            self.verdicts = [validate(match, shipped("reference"), reference, None) for match in self.matches]
        for match in reversed(self.matches if self.splices else []):
            splice(module.graph, match, reference, Recipes())
        module.graph.lint()
        module.recompile()
        return module.forward

    @property
    def structure(self) -> tuple[str, ...]:
        return tuple(
            f"{match.found.facts.structure.decay}{' e' * match.found.attributes.erases}{' b' * (match.found.attributes.reads == 'before')}"
            for match in self.matches
        )


def loop(family: Family) -> Callable[..., Any]:
    def run(init: Any, given: Any) -> Any:
        results = scan(lambda carry, x: _joined(family.step(carry, x)), init if len(init) > 1 else init[0], given)
        return pytree.tree_leaves(results)

    return run


def _joined(results: tuple[Any, ...]) -> tuple[Any, Any]:
    return results[0], results[1] if len(results) == 2 else results[1:]


def eager(family: Family, init: Any, given: Any) -> list[torch.Tensor]:
    """The loop as it is written."""
    carry, reads = init if len(init) > 1 else init[0], []
    for step in range(given[0].shape[0]):
        carry, reads_now = _joined(family.step(carry, tuple(each[step] for each in given)))
        reads.append(pytree.tree_leaves(reads_now))
    return [*pytree.tree_leaves(carry), *(torch.stack(each) for each in zip(*reads, strict=True))]


def compiled(family: Family, compiler: Compiler, init: Any, given: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(loop(family), backend=compiler, fullgraph=True)(init, given)


#: One of every structure and way to spell it.
_QUICK = frozenset(
    "kda_bmm kda_dense kda_transposed_state spike_kda delta rwkv6 linear_attention mamba1 ema_lerp grouped_queries".split()
)
_FAMILIES = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in KNOWN]


@pytest.mark.parametrize("name", _FAMILIES)
def test_every_family_is_recognised_and_equals_its_loop_with_gradients(name):
    family = KNOWN[name]
    init, given = inputs(family, grad=True)
    compiler = Compiler()
    got = compiled(family, compiler, init, given)
    assert compiler.structure == family.structure
    assert [miss.reason.message for miss in compiler.misses if family.missed not in miss.reason.message] == []
    want = eager(family, init, given)
    leaves = [each for each in (*init, *given) if each.requires_grad]
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in want]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if family.missed:
        return  # the part that is left is a scan, whose gradients are PyTorch's matter
    found = [
        torch.autograd.grad(
            sum((w * r).sum() for w, r in zip(weights, results, strict=True)), leaves, allow_unused=True
        )
        for results in (got, want)
    ]
    for leaf, one, other in zip(leaves, *found, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if one is None else one, zero if other is None else other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_is_refused_with_the_reason_and_left_alone(name):
    family, text = UNKNOWN[name]
    init, given = inputs(family)
    compiler = Compiler()
    with torch.no_grad():
        got = compiled(family, compiler, init, given)
    assert compiler.matches == []
    assert len(compiler.apart) == (name == "two_sided")  # whose product with the query leaves the loop
    (miss,) = compiler.misses
    assert text in miss.reason.message
    for one, other in zip(got, eager(family, init, given), strict=True):
        torch.testing.assert_close(one, other)
