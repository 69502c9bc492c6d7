"""Replicas whose parameters are DTensors: rank i of each replica is a thread of process i, and exchanges with rank i.

`python sharded_replicas.py RANK RANKS STORE` is the process of one rank of two replicas. It trains a plain model and
one sharded over RANKS processes under each recipe, and raises AssertionError if the parameters differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from thread_workers import regression, run_workers, small_net
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import stretto

REPLICAS = 2
RECIPES = ("allreduce", "local_sgd(every=2)", 'local_sgd(every=2, optimizer_state="average")', "diloco(every=2)")
DATA = regression(44, torch.float64, features=7)  # 7: a first layer of 16 x 7, and a last of 1 x 16, shard unevenly


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def training(make: Callable[[int], nn.Module]) -> Callable[[int], list[Tensor]]:
    """Return the function of a worker that trains the model of `make(worker)`, and returns its whole parameters."""

    def work(worker: int) -> list[Tensor]:
        net = make(worker)
        optimizer = momentum(net)
        evaluated: list[Tensor] = []

        def evaluate(model: nn.Module) -> dict[str, float]:
            evaluated.extend(whole(model))
            return {"values": float(len(evaluated))}

        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6), evaluate=evaluate)
        for _epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return [*evaluated, *whole(net)]

    return work


def whole(net: nn.Module) -> list[Tensor]:
    """Return a copy of all parameters, gathered from the ranks of their mesh."""
    values = (one.detach() for one in net.parameters())
    return [(one.full_tensor() if isinstance(one, DTensor) else one).clone() for one in values]


def sharded(meshes: Sequence[DeviceMesh]) -> Callable[[int], nn.Module]:
    """Return the function that makes a worker's model, with each layer sharded over the worker's mesh."""

    def make(worker: int) -> nn.Module:
        net = small_net(torch.float64, features=7)
        for layer in net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=meshes[worker])
        return fully_shard(net, mesh=meshes[worker])

    return make


def largest_difference(recipe: str, meshes: Sequence[DeviceMesh]) -> float:
    """Return the largest difference of a parameter of the sharded model from the plain one after the same training."""
    plain = run_workers(REPLICAS, training(lambda _: small_net(torch.float64, features=7)), recipe)
    found = run_workers(REPLICAS, training(sharded(meshes)), recipe)
    pairs = [pair for one, other in zip(plain, found, strict=True) for pair in zip(one, other, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def main(rank: int, ranks: int, store: str) -> None:
    """Compare all recipes in this rank of both replicas."""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    groups = [dist.new_group(list(range(ranks))) for _ in range(REPLICAS)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    for recipe in RECIPES:
        difference = largest_difference(recipe, meshes)
        assert difference < 1e-12, f"{recipe}: parameters differ by {difference}"
        print(recipe, difference, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
