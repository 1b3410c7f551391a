"""What must work on every supported PyTorch: one small thing of each kind, compiled by Inductor, held against eager.

``python scripts/smoke.py`` with ``lz_compile`` installed; ``scripts/versions.sh`` does so for several versions of PyTorch.
Exit code 1 where anything fails; the others are tried all the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lz_compile as lz
from lz_compile.ground.events import collect
from lz_compile.tools import command_line


def attention() -> None:
    """A causal attention by hand, forward and backward."""

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).masked_fill(future, -math.inf)
        return scores.softmax(-1) @ value

    inputs = [torch.randn(2, 3, 24, 16, requires_grad=True) for _ in range(3)]
    for kernel in ("lz.blocked", "torch.sdpa", "lz.tiled"):
        _same(model, inputs, "attention", kernel)
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    _same(model, doubles, "attention", "torch.sdpa", may_refuse=True)


def norm() -> None:
    """An RMSNorm by hand, forward and backward."""

    def model(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    _same(model, [torch.randn(4, 7, 32, requires_grad=True), torch.randn(32, requires_grad=True)], "norm", "torch.norm")


def loop() -> None:
    """A gated recurrence over time, forward and backward: rolled up, and run by the kernel for scans."""

    def model(decay: Tensor, drive: Tensor) -> Tensor:
        state, states = torch.zeros_like(drive[:, 0]), []
        for step in range(drive.shape[1]):
            state = decay[:, step].sigmoid() * state + drive[:, step]
            states.append(state)
        return torch.stack(states, 1)

    _same(model, [torch.randn(2, 20, 16, requires_grad=True) for _ in range(2)], "scan", "lz.rolled_scan")


def recurrence(drive: Tensor, weight: Tensor) -> Tensor:
    """Of which no kernel computes anything."""
    state, states = torch.zeros_like(drive[:, 0]), []
    for step in range(drive.shape[1]):
        state = torch.tanh(state @ weight + drive[:, step])
        states.append(state)
    return torch.stack(states, 1)


def rolled() -> None:
    """A recurrence that no kernel computes, forward and backward: rolled up, and run by PyTorch's own ``scan``."""
    for is_graded in (True, False):
        weight = (
            torch.randn(8, 8) / 8
        ).requires_grad_()  # larger ones are chaotic: they make differences of rounding errors
        _alike(recurrence, [torch.randn(2, 20, 8, requires_grad=is_graded), weight], {})
        loops = [loop.rolled for report in lz.reports() for loop in report.loops]
        _check(loops == [True], f"expected one loop, rolled, received {loops}")


def call() -> None:
    """The same by ``lz.roll_loops``, which proves with an example that one step, traced for all lengths, trains as well."""
    weight = (torch.randn(8, 8) / 8).requires_grad_()
    with collect() as events:
        asked = lz.roll_loops(recurrence, torch.randn(2, 20, 8), weight)
    _check(not events, f"expected a loop that is rolled, received {events}")
    _alike(asked, [torch.randn(2, 31, 8, requires_grad=True), weight], {})
    loops = [loop.rolled for report in lz.reports() for loop in report.loops]
    _check(loops == [True], f"expected one loop, rolled, received {loops}")


def sampling() -> None:
    """Top-k and temperature before a softmax, and a draw of our own."""

    def model(logits: Tensor) -> Tensor:
        scaled = logits / 0.7
        least = scaled.topk(5, dim=-1).values[..., -1:]
        return scaled.masked_fill(scaled < least, -math.inf).softmax(-1)

    _same(model, [torch.randn(3, 100)], "sampling", "lz.cpp_sampling")
    seeds = torch.arange(3)
    drawn = lz.sample_topk(torch.randn(3, 100), 5, seeds=seeds)
    _check(drawn.shape == (3,), f"expected a token for each of 3 rows, received {tuple(drawn.shape)}")


def explain() -> None:
    """A report for people and for machines."""
    query = torch.randn(2, 3, 24, 16)
    report = lz.explain(lambda x: (x @ x.mT).softmax(-1) @ x, query, print_report=False)
    _check(
        [match.op for match in report.matches] == ["attention"], f"expected one attention, received {report.matches}"
    )
    json.dumps(report.to_dict(), allow_nan=False)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        lz.explain(lambda x: (x @ x.mT).softmax(-1) @ x, query)
    _check("attention" in shown.getvalue(), "expected the printed report to name the attention")


def tune() -> None:
    """A measurement, on whatever device there is, and the choice that rests on it."""
    report = lz.tune("attention.causal", seq_lens=[32], num_heads=2, head_dim=16, samples=2)
    _check(len(report.measured) == 1, f"expected one problem measured, received {report.to_dict()}")


def doctor() -> None:
    """The command line on this installation."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = command_line.main(["doctor", "--json"])
    _check(code == 0, f"expected exit code 0, received {code}")
    broken = [issue for issue in json.loads(told.getvalue())["issues"] if issue["code"] not in EXPECTED]
    _check(not broken, f"expected no issue, received {broken}")


#: Issues of an installation that is new, or that has no GPU.
EXPECTED = ("NOT_MEASURED", "GPU_NOT_USABLE")
CHECKS = (attention, norm, loop, rolled, call, sampling, explain, tune, doctor)


def main() -> int:
    """Every check, one line each; the exit code."""
    failed = []
    print(f"torch {torch.__version__}, lz_compile {lz.__version__} from {os.path.dirname(lz.__file__)}")
    for check in CHECKS:
        start = time.perf_counter()
        try:
            check()
        except Exception:  # noqa: BLE001 printed and counted; the others are tried all the same
            failed.append(check)
            traceback.print_exc()
        print(
            f"{check.__name__:10} {'FAILED' if check in failed else 'ok'} {time.perf_counter() - start:6.1f} s",
            flush=True,
        )
    return 1 if failed else 0


def _same(
    model: Callable[..., Tensor], inputs: Sequence[Tensor], op: str, kernel: str, *, may_refuse: bool = False
) -> None:
    """Rewritten to a kernel (or to another one, if that may be refused), with the results and gradients of eager."""
    _alike(model, inputs, {"layerzero.lock": {op: kernel}})
    matches = [match for report in lz.reports() for match in report.matches]
    done = [(match.op, match.kernel, match.rewritten) for match in matches]
    _check(may_refuse or (op, kernel, True) in done, f"expected {op} to run on {kernel}, received {done}")


def _alike(model: Callable[..., Tensor], inputs: Sequence[Tensor], options: dict[str, Any]) -> None:
    """The results and gradients of eager, with all loops rolled."""
    torch._dynamo.reset()
    lz.clear_reports()
    compiled = torch.compile(model, backend="layerzero", options={**options, "layerzero.loops": "roll"})
    wants = [each for each in inputs if each.requires_grad]
    results = []
    for function in (model, compiled):
        out = function(*inputs)
        results.append([out, *(torch.autograd.grad(out.square().sum(), wants) if wants else ())])
    for expected, received in zip(*results, strict=True):
        torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-4)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lz_compile_smoke_") as cache:
        os.environ["LAYERZERO_CACHE_DIR"] = cache
        sys.exit(main())
