"""The backend without Inductor: graphs are rewritten and validated as in a compile, and then run eagerly. Fast."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.scan import ScanAutogradImpl
from torch._inductor.cpu_vec_isa import pick_vec_isa

from lz_compile.compile.compiler import process
from lz_compile.compile.options import split
from lz_compile.report.report import GraphReport, Report
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels

#: Whether PyTorch compiles the backward of a scan over slices that gradients do not reach, as counters; 2.11 does not, and
#: loops that need it stay unrolled.
SCANS_TAKE_COUNTERS = hasattr(ScanAutogradImpl, "_break_bw_input_output_aliasing")

_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
trains_attention_in_float64 = pytest.mark.skipif(
    _IS_OLD and os.environ.get("LZ_TEST_DEVICE", "cpu") == "cpu",
    reason="Inductor before PyTorch 2.13 compiles no gradients of attention in float64 on a CPU (expected Double, found Float)",
)
shows_multi_head_attention = pytest.mark.skipif(
    _IS_OLD, reason="PyTorch's own multi-head attention reads contiguous().view() where it has reshape() since 2.13"
)
traces_the_fast_path = pytest.mark.skipif(
    _IS_OLD, reason="before PyTorch 2.13, Dynamo traces no _transformer_encoder_layer_fwd (no fake tensors)"
)
reads_autograd_functions = pytest.mark.skipif(
    _IS_OLD, reason="before PyTorch 2.13, Dynamo's graph of an autograd function's forward gives away every value of it"
)


class Rewriting:
    """A `torch.compile` backend that rewrites and runs eagerly; `report` holds what it did, `graphs` what it made.

    Loops that kernels know are rolled whatever that costs at the small sizes of tests, unless `loops` says otherwise.
    """

    def __init__(self, **options: Any) -> None:
        options = {"loops": "keep", **options}
        self._options = {f"layerzero.{name}": value for name, value in options.items()}
        self.report = Report([])
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(graph: fx.GraphModule, inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
            if report not in self.report.graphs:  # the original graph is compiled where the rewritten one is not
                self.report.graphs.append(report)
            self.graphs.append(graph)
            return self.compiled(graph, inputs)

        return process(module, inputs, split(self._options)[0], run)

    def compiled(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a rewritten graph."""
        return graph.forward

    def why_not(self) -> str:
        """Everything that speaks against a rewrite, for a failing assertion."""
        reasons = [str(reason) for match in self.report.matches for reason in match.reasons]
        misses = [f"{miss.reason} ({miss.where})" for miss in self.report.near_misses]
        events = [f"{event.code}: {event.message}" for event in self.report.events]
        return "\n".join(["not rewritten:", *reasons, *misses, *events])


class Traced(Rewriting):
    """The same, and graphs go through AOTAutograd: what it cannot compile is the event ``COMPILE_FAILED``."""

    def compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graphs that it makes of a graph, run eagerly."""
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]


class Beside:
    """Backends beside each other, on the graphs of one capture: what each gives is what the first one gives, bit by bit.

    A model is traced once for all of them; what it writes is written by each, so they are for models that write nothing.
    """

    def __init__(self, *backends: Callable[..., Any]) -> None:
        self._backends = backends

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        runs = [each(fx.GraphModule(module, copy.deepcopy(module.graph)), inputs) for each in self._backends]

        def run(*arguments: Any) -> Any:
            result, *others = [each(*arguments) for each in runs]
            for other in others:
                torch.testing.assert_close(other, result, rtol=0, atol=0, equal_nan=True)
            return result

        return run


#: What a program of a test's begins with that has empty caches: what the machine does in a second need not be measured (2 s).
USUAL_MACHINE = "from lz_compile.runtime.measure import cost; cost.rates = cost.usual\n"


def known_instruction_sets() -> dict[str, str]:
    """Environment of a process with empty caches: it need not build again (7 s) what shows that this compiler's code runs."""
    return {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if pick_vec_isa() else {}


def shipped(kernel_id: str) -> KernelSpec:
    """A kernel as if it were one of the package, for a proof of any function."""
    return replace(kernels("attention")["inductor"], kernel_id=kernel_id)


def rewritten(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """The function's result after a rewrite that must happen in every graph match."""
    torch._dynamo.reset()
    backend = Rewriting(**options)
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    assert any(match.rewritten for match in backend.report.matches), backend.why_not()
    return result
