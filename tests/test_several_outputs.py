"""A match may replace several nodes at once: all are proven, spliced and measured together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backends import shipped
from torch import fx
from torch._higher_order_ops.scan import scan

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import axes_of, fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.proof.surroundings import surrounded
from lz_compile.passes.proof.validate import forget, validate
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, Trial
from lz_compile.passes.rewriting.rewrite import Recipes, RewriteError, splice


@dataclass(frozen=True)
class _Attrs:
    def to_dict(self) -> dict[str, Any]:
        return {}

    def assuming_finite(self) -> _Attrs:
        return self

    def deterministic(self) -> _Attrs:
        return self


@dataclass(frozen=True)
class _Emitter:
    sources: tuple[fx.Node, ...]

    def operands(self, builder: Any) -> dict[str, Any]:
        return {f"input{index}": builder.value(source) for index, source in enumerate(self.sources)}

    def result(self, builder: Any, value: Any) -> Any:
        return value

    def attributes_at(self, sizes: Any) -> _Attrs:
        return _Attrs()

    def implied_value(self, node: fx.Node, builder: Any, given: torch.Tensor, sizes: Any) -> Any:
        raise LookupError(node.name)


def _captured(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def _match(module: fx.GraphModule, core: list[fx.Node], outputs: list[fx.Node], sources: list[fx.Node]) -> Match:
    dims = {source: fresh(shape_of(tensor_of(source))) for source in sources}
    pinned = frozenset(axis for each in dims.values() for axis in axes_of(each))
    inputs = {source: Input(each) for source, each in dims.items()}
    operands = {f"input{index}": source for index, source in enumerate(sources)}
    site = Site(
        output=outputs[0],
        output_dims=fresh(shape_of(tensor_of(outputs[0]))),
        core=tuple(core),
        ambient=Effects(module.graph).ambient(outputs[0]),
        where="here",
        extra_outputs=tuple(outputs[1:]),
    )
    return Match("norm", site, Found(_Attrs(), None, inputs, operands, _Emitter(tuple(sources))), Trial(pinned=pinned))


def _waves(x: torch.Tensor) -> torch.Tensor:
    a = x.sin()
    c = a * 2
    b = x.cos()
    return c + b


def _found() -> tuple[fx.GraphModule, Match]:
    module = _captured(_waves, torch.randn(3, 5, requires_grad=True))
    nodes = {str(node.target): node for node in module.graph.nodes}
    x = next(node for node in module.graph.nodes if node.op == "placeholder")
    return module, _match(module, [nodes["sin"], nodes["cos"]], [nodes["sin"], nodes["cos"]], [x])


def _both(x: dict[str, Any], attrs: Any) -> tuple[Any, Any]:
    return torch.sin(x["input0"]), torch.cos(x["input0"])


def _second_is_wrong(x: dict[str, Any], attrs: Any) -> tuple[Any, Any]:
    return torch.sin(x["input0"]), torch.cos(x["input0"]) * 1.01


def _second_has_no_gradient(x: dict[str, Any], attrs: Any) -> tuple[Any, Any]:
    return torch.sin(x["input0"]), torch.cos(x["input0"].detach())


def test_all_outputs_and_their_gradients_are_proven() -> None:
    forget()
    _, match = _found()
    verdict = validate(match, shipped("both"), _both, None)
    assert verdict.ok, verdict.reason
    assert verdict.grad_error is not None


@pytest.mark.parametrize(("call", "reason"), [(_second_is_wrong, "output b"), (_second_has_no_gradient, "gradient of")])
def test_a_fault_in_any_output_is_found(call: Callable[..., Any], reason: str) -> None:
    forget()
    _, match = _found()
    verdict = validate(match, shipped(call.__name__), call, None)
    assert not verdict.ok
    assert reason in verdict.reason


def test_all_outputs_are_replaced_where_the_first_was() -> None:
    module, match = _found()
    x = torch.randn(3, 5)
    splice(module.graph, match, _both, Recipes())
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert "sin" not in targets
    assert "cos" not in targets
    assert torch.allclose(module(x)[0], _waves(x))


def test_what_is_computed_after_the_first_output_cannot_be_read() -> None:
    module, match = _found()
    doubled = next(node for node in module.graph.nodes if node.name == "c")
    inputs = {**match.found.inputs, doubled: Input(match.site.output_dims)}
    late = replace(match, found=replace(match.found, inputs=inputs))
    before = str(module.graph)
    with pytest.raises(RewriteError, match="c is computed after"):
        splice(module.graph, late, _both, Recipes())
    assert str(module.graph) == before


def test_an_excerpt_runs_with_all_of_its_outputs() -> None:
    module, match = _found()
    found = surrounded(match, Effects(module.graph))
    inputs = found.make_inputs({})
    expected = found.function(None)(*inputs)
    torch.testing.assert_close(found.function(_both)(*inputs), expected)


def _running_sum(initial: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def step(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = carry.float() + x
        return new, new * 2

    last, all_of_them = scan(step, initial, given)
    return last + 1, all_of_them + 1


def _summed(x: dict[str, Any], attrs: Any) -> tuple[Any, Any]:
    sums = torch.cumsum(x["input1"], 0) + x["input0"]
    return sums[-1], sums * 2


def test_the_body_of_a_loop_is_part_of_what_is_proven() -> None:
    forget()
    module = _captured(_running_sum, torch.randn(4), torch.randn(6, 4))
    loop = next(node for node in module.graph.nodes if node.target is torch.ops.higher_order.scan)
    body = next(node for node in loop.all_input_nodes if node.op == "get_attr")
    parts = sorted(loop.users, key=lambda node: int(node.args[1]))  # type: ignore[arg-type]
    sources = [node for node in loop.all_input_nodes if node is not body]
    match = _match(module, [loop, *parts], parts, sources)
    verdict = validate(match, shipped("sums"), _summed, None)
    assert verdict.ok, verdict.reason
    found = surrounded(match, Effects(module.graph))
    inputs = found.make_inputs({})
    torch.testing.assert_close(found.function(_summed)(*inputs), found.function(None)(*inputs))
    splice(module.graph, match, _summed, Recipes())
    module.recompile()
    given = torch.randn(4), torch.randn(6, 4)
    torch.testing.assert_close(module(*given), _running_sum(*given))
