"""Trains small models under the backend in a process group of gloo, where every rank would choose another kernel by itself.

Run by torchrun; each rank writes what it found as JSON into the directory that it is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lz_compile as lz
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.policy.rules import Lock
from lz_compile.runtime.policy.settings import Layer
from lz_compile.runtime.ranks import job
from tests.routing_ranks import leave

WIDTH, HEADS, LENGTH = 16, 2, 8
#: What each rank prefers by itself.
PREFERRED = ("lz.tiled", "lz.blocked", "torch.sdpa", "inductor")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        size = WIDTH // HEADS
        query, key, value = (
            each(x_BSD).unflatten(-1, (-1, size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * size**-0.5
        return x_BSD + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def model() -> Attention:
    torch.manual_seed(0)
    return Attention()


def data(rank: int) -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(rank))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="layerzero", dynamic=False)


def whole_gradients(size: int) -> list[torch.Tensor]:
    """Of the mean over the data of all ranks, by one process without a compiler."""
    plain = model()
    sum(plain(data(rank)).square().mean() for rank in range(size)).div(size).backward()
    return [each.grad for each in plain.parameters()]


def ddp(rank: int, size: int) -> float:
    wrapped = nn.parallel.DistributedDataParallel(model())
    compiled(wrapped)(data(rank)).square().mean().backward()
    return largest([each.grad for each in wrapped.parameters()], whole_gradients(size))


def fsdp(rank: int, size: int) -> float:
    sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (size,)))
    compiled(sharded)(data(rank)).square().mean().backward()
    found = [each.grad.full_tensor() for each in sharded.parameters() if isinstance(each.grad, DTensor)]
    return largest(found, whole_gradients(size))


def tensor_parallel(rank: int, size: int) -> float:
    mesh = init_device_mesh("cpu", (size,))
    plan = {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "out": RowwiseParallel()}
    split = parallelize_module(model(), mesh, plan)
    expected = model()(data(0))
    return largest([compiled(split)(data(0))], [expected])


def pipeline(rank: int, size: int) -> float:
    """Two stages: the second waits for what the first gives, which it has to compile before."""
    if rank > 1:
        return 0.0
    stage, given = compiled(model()), data(0)
    if rank == 0:
        dist.send(stage(given).detach(), 1)
        return 0.0
    dist.recv(given, 0)
    plain = model()
    return largest([stage(given)], [plain(plain(data(0)))])


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)


CASES: dict[str, Callable[[int, int], float]] = {
    "pipeline": pipeline, "ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel,
}  # fmt: skip


def prefer(kernel_id: str) -> None:
    """Have this rank choose another kernel by itself than the others, as by other measurements."""
    said = Layer(locks=(Lock("attention", kernel_id, "this rank"),))

    def chosen(problem: Any, policy: Any, *args: Any, **named: Any) -> Any:
        return select(problem, policy if named.get("agreed") else policy.overlaid(said), *args, **named)

    job.select = chosen


def main() -> None:
    directory, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    prefer(PREFERRED[rank])
    lz.join_ranks()
    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        lz.clear_reports()
        error = CASES[name](rank, size)
        matches = [match for report in lz.reports() for match in report.matches if match.op == "attention"]
        found[name] = {
            "error": error,
            "kernels": [match.kernel for match in matches],
            "why": [match.why for match in matches],
            "events": [event.code for report in lz.reports() for event in report.events],
        }
    found["ranks"] = lz.ranks()
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
