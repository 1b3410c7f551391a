"""Two processes that share a step of a routed model by gloo, each with half of the rollouts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from models.routed_adapter import Arm, Rollouts
from tests.routing_exact import ExactLinear
from tests.routing_toys import loss_of, rollout_batch, routed

FORMS = ("gates", "exact")


def run_ranks(directory: Path) -> dict[str, list[dict[str, Tensor]]]:
    """The gradients that each of two processes ends up with: ``gates`` outside of DDP, ``exact`` adapters within it."""
    mp.spawn(_rank, args=(str(directory),), nprocs=2)
    return {form: [torch.load(directory / f"{form}_{rank}.pt") for rank in range(2)] for form in FORMS}


def _rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    x, weights = (each.chunk(2)[rank] for each in rollout_batch(4, 5))
    for form in FORMS:
        found = _gradients(form, x, weights)
        torch.save(found, Path(directory) / f"{form}_{rank}.pt")
    leave()


def leave() -> None:
    """End this process: together, and without the interpreter's end, in which threads of gloo may abort (once in 1,000)."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _gradients(form: str, x: Tensor, weights: Tensor) -> dict[str, Tensor | None]:
    routing = routed(Arm.GRAD_ROLLOUT, **({"layer_type": ExactLinear} if form == "exact" else {}))
    routing.begin(Rollouts(*x.shape[:2]))
    if form == "exact":
        model = DistributedDataParallel(routing.model)  # its hooks die with it
        loss_of(model(x), weights).backward()
    else:
        loss_of(routing.model(x), weights).backward()
        routing.collect()
        routing.restore(dist.group.WORLD)
    return {name: each.grad for name, each in routing.model.named_parameters()}
