"""A new op takes a recogniser, the op's module and a kernel with its descriptor: new files, and no edit of any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backends import USUAL_MACHINE, known_instruction_sets

import lz_compile

OP = '''
"""``log(1 + exp(x))``; in layout ``N``: a tensor of any shape."""

from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.lowering import operands as base
from lz_compile.lowering.operands import operands

LAYOUT = "N"
EXACT_DIMS = ()
BUCKETED_DIMS = (("num_elements",),)
TIMELESS_FEATURES = frozenset()


@dataclass(frozen=True)
class SoftplusAttrs:
    out_dtype: torch.dtype = torch.float32

    def deterministic(self) -> "SoftplusAttrs":
        return self

    def assuming_finite(self) -> "SoftplusAttrs":
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"out_dtype": str(self.out_dtype)}


@dataclass(frozen=True)
class SoftplusFacts:
    num_elements: "Size"
    dtype: torch.dtype
    device: str
    needs_grad: bool = False


Attributes = SoftplusAttrs


@operands
class Operands(base.Operands):
    input: torch.Tensor


def fake(x: Operands, attrs: SoftplusAttrs) -> torch.Tensor:
    return torch.empty_like(x.input, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: SoftplusAttrs) -> torch.Tensor:
    return torch.log1p(torch.exp(x.input)).to(attrs.out_dtype)


def features(attrs: SoftplusAttrs, facts: SoftplusFacts) -> dict[str, str]:
    return {"training": "gradients"} if facts.needs_grad else {}
'''

RECOGNISER = '''
"""``log(1 + exp(x))`` in all of its spellings."""

from dataclasses import dataclass, replace

import sympy

from lz_compile.lowering.ops.softplus import Operands, SoftplusAttrs, SoftplusFacts
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.ground.sizes import product, shape_of
from lz_compile.passes.formula.axes import axes_of, fresh
from lz_compile.passes.rewriting.core import find_core
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.rewriting.match import Driver
from lz_compile.passes.rewriting.match import Cell, TableEmitter
from lz_compile.passes.rewriting.match import Found, Input, Match, Site
from lz_compile.passes.graph.view import tensor_of


@dataclass(frozen=True)
class Emitter(TableEmitter):
    kind = Operands

    source: Leaf
    output_dims: tuple
    attrs: SoftplusAttrs

    @property
    def groups(self):
        return self.output_dims

    def table(self):
        return {"input": Cell(self.source, self.groups)}


def recognise(graph, effects):
    def is_log(node):
        call = effects.calls[node]
        return call is not None and call.name == "log"

    return Driver("softplus").walk(graph.nodes, is_log, lambda node: _read(effects, node))


def _read(effects, node):
    region, tensor = Region(effects, expand_masks=True), tensor_of(node)
    dims = fresh(shape_of(tensor))
    expression = region.express(node, dims)
    if len(region.leaves) != 1:
        return None
    ((symbol, leaf),) = region.leaves.items()
    if expression != sympy.log(1 + sympy.exp(symbol)) or leaf.dims != dims:
        return None
    core = find_core(effects, leaf.node, node)
    core = replace(core, nodes=tuple(each for each in core.nodes if each is not leaf.node))
    core.check(effects, {leaf.node: core.nodes[0]})
    source, attrs = tensor_of(leaf.node), SoftplusAttrs(tensor.dtype)
    needs_grad = grad_enabled(core.ambient) and source.requires_grad
    size = product(axis.size for axis in axes_of(dims))
    facts = SoftplusFacts(size, source.dtype, source.device.type, needs_grad)
    emitter = Emitter(leaf, dims, attrs)
    found = Found(attrs, facts, {leaf.node: Input(dims)}, {"input": leaf.node}, emitter)
    return Match("softplus", Site.of(core, dims, region.interior), found)
'''

KERNEL = '''
"""PyTorch's own softplus."""

import torch.nn.functional as F


def softplus(x, attrs):
    return F.softplus(x.input).to(attrs.out_dtype)
'''

DESCRIPTOR: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "torch.softplus",
    "source": "torch.nn.functional.softplus",
    "ops": {
        "softplus": [
            {
                "kernel_id": "torch.softplus",
                "platforms": ["cpu"],
                "dtypes": ["float64", "float32"],
                "requires_layouts": ["N"],
                "supports": ["training"],
                "is_cuda_graph_safe": True,
                "deterministic": True,
                "is_opaque": False,
                "priority": 50,
                "prior": [{"platform": "*", "dtypes": ["*"], "relative_latency": 0.5}],
                "prior_source": "a guess",
            }
        ]
    },
}

USE = """
import json
import logging

import torch
import torch.nn.functional as F

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.lowering import ops


def model(x, y):
    first = torch.log(1 + torch.exp(x))
    second = (y.exp() + 1.0).log()
    third = torch.log(2 + torch.exp(x))
    returned = torch.exp(y)
    return first * second, third, torch.log(1 + returned), returned


inputs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
got = torch.compile(model, backend=layerzero, fullgraph=True)(*inputs)
want = model(*inputs)
for one, other in zip(got, want, strict=True):
    torch.testing.assert_close(one, other)
gradients = [torch.autograd.grad(values[0].sum(), inputs) for values in (got, want)]
for one, other in zip(*gradients, strict=True):
    torch.testing.assert_close(one, other)
(report,) = lz_compile.reports()
found = [match for match in report.matches if match.op == "softplus"]
print(json.dumps({
    "ops": ops.names(),
    "kernels": [kernel.kernel_id for kernel in lz_compile.list_kernels("softplus")],
    "rewritten": [match.kernel for match in found if match.rewritten],
    "attributes": [match.attributes for match in found],
    "validated": [match.validation["ok"] for match in found if match.rewritten],
    "near_misses": [str(miss.reason.code) for miss in report.near_misses if miss.op == "softplus"],
    "events": [event.code for event in report.events],
}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with four files more."""
    source, copy = Path(lz_compile.__file__).parent, tmp_path / "lz_compile"
    shutil.copytree(source, copy)  # with what is compiled of it
    (copy / "lowering/ops/softplus.py").write_text(OP)
    for room in ("passes/softplus", "lowering/kernels/softplus"):
        (copy / room).mkdir()
        (copy / room / "__init__.py").touch()
    (copy / "passes/softplus/recogniser.py").write_text(RECOGNISER)
    (copy / "lowering/kernels/softplus/torch_softplus.py").write_text(KERNEL)
    (copy / "lowering/kernels/softplus/torch_softplus.json").write_text(json.dumps(DESCRIPTOR))
    return tmp_path


@pytest.mark.slow
def test_new_files_alone_make_an_op_that_is_recognised_proven_and_rewritten(package: Path) -> None:
    (package / "use.py").write_text(USUAL_MACHINE + USE)
    given = {"PYTHONPATH": str(package), "LAYERZERO_CACHE_DIR": str(package / "cache")}
    environment = {**os.environ, **known_instruction_sets(), **given}
    done = subprocess.run(
        [sys.executable, "use.py"],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "softplus" in told["ops"]
    assert set(told["kernels"]) == {"inductor", "torch.softplus"}
    assert told["rewritten"] == ["torch.softplus"] * 2
    assert told["attributes"] == [{"out_dtype": "torch.float32"}] * 2
    assert told["validated"] == [True, True]
    assert told["near_misses"] == ["INTERIOR_USED"]
    assert told["events"] == []
