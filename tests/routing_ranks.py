"""Two processes that share a step of a routed model by gloo, each with half of the rollouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from models.routed_adapter import Arm, Rollouts
from tests.routing_exact import ExactLinear
from tests.routing_toys import loss_of, rollout_batch, routed


def run_ranks(form: str, directory: Path) -> list[dict[str, Tensor]]:
    """The gradients that each of two processes ends up with: ``gates`` outside of DDP, ``exact`` adapters within it."""
    mp.spawn(_rank, args=(form, str(directory)), nprocs=2)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def _rank(rank: int, form: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    x, weights = (each.chunk(2)[rank] for each in rollout_batch(4, 5))
    if form == "gates":
        routing = routed(Arm.GRAD_ROLLOUT)
        routing.begin(Rollouts(*x.shape[:2]))
        loss_of(routing.model(x), weights).backward()
        routing.collect()
        routing.restore(dist.group.WORLD)
        parameters = dict(routing.model.named_parameters())
    else:
        routing = routed(Arm.GRAD_ROLLOUT, layer_type=ExactLinear)
        routing.begin(Rollouts(*x.shape[:2]))
        model = DistributedDataParallel(routing.model)  # its hooks die with it
        loss_of(model(x), weights).backward()
        parameters = dict(routing.model.named_parameters())
    torch.save({name: each.grad for name, each in parameters.items()}, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()
