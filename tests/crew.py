"""Runs several workers in the threads of one process, over the memory wire: fast, and as real as the wire is."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import abandon, close
from stretto.training.worker_context import WorkerContext, given_seat
from stretto.transport import in_memory

TIMEOUT_S = 20.0


def together(
    workers: int, work: Callable[[int], Any], recipe: str | None = None, run: Path | None = None, **seat: Any
) -> list[Any]:
    """What `work(worker)` returns at each worker of a crew; the first worker's error is raised."""
    ends = in_memory.wires(workers, TIMEOUT_S)
    slow = seat.pop("slow", {})
    seats = [
        WorkerContext(
            worker,
            workers,
            lambda device, end=end: end,
            recipe=recipe,
            run=run,
            **{"timeout_s": TIMEOUT_S, "slow": slow.get(worker, 1.0)} | seat,
        )
        for worker, end in enumerate(ends)
    ]

    def sit(place: WorkerContext) -> Any:
        given_seat.set(place)
        try:
            found = work(place.worker)
            close()
            return found
        except BaseException:
            ends[place.worker].close()
            abandon()
            raise

    with ThreadPoolExecutor(workers) as pool:
        done = [pool.submit(contextvars.Context().run, sit, place) for place in seats]
        errors = [error for one in done if (error := one.exception(timeout=3 * TIMEOUT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, stretto.errors.TransportError))
    return [one.result() for one in done]


def one_worker(work: Callable[[int], Any], recipe: str | None = None, **seat: Any) -> Any:
    """The same for a run of one worker."""
    return together(1, work, recipe, **seat)[0]


def alone(work: Callable[[int], Any], join: int = 1) -> Any:
    """One machine: no exchange; `join` batches of the script's loader make one."""
    return together(1, work, single_process=True, global_batch_of=join)[0]


def regression(samples: int, dtype: torch.dtype = torch.float32, features: int = 6) -> TensorDataset:
    """A small task whose batches differ."""
    source = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, features, generator=source).to(dtype)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=source).to(dtype)
    return TensorDataset(x, y)


def small_net(dtype: torch.dtype = torch.float32, features: int = 6) -> nn.Module:
    """A small net, the same each time."""
    source = torch.Generator().manual_seed(7)
    net = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    with torch.no_grad():
        for one in net.parameters():
            one.copy_(torch.randn(one.shape, generator=source) * 0.3)
    return net


class Branching(nn.Module):
    """Uses `odd` only for batches whose first number is negative, `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.odd = nn.Linear(6, 1, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)
        self.never = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] < -1.2
        out = self.base(x)
        return out + torch.where(rows[:, None], self.odd(x), 0.0) if rows.any() else out


Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.05)


def training(
    data: TensorDataset,
    batch: int,
    epochs: int = 2,
    make: Make = sgd,
    dtype: torch.dtype = torch.float32,
    recipe: Any = None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda net, optimizer: None,
    **loader_options: Any,
) -> Callable[[int], Tensor]:
    """A plain loop as a function of the worker; it returns the flat parameters at the end."""

    def work(worker: int) -> Tensor:
        net = small_net(dtype)
        optimizer = make(net.parameters())
        loader: Any = DataLoader(data, **({"batch_size": batch} | loader_options))
        loader = stretto.distribute(net, optimizer, loader, recipe=recipe)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                after_step(net, optimizer)
        return flat(net)

    return work


def flat(net: nn.Module) -> Tensor:
    """A copy of all parameters, flat."""
    return torch.cat([one.detach().reshape(-1).double() for one in net.parameters()])


def apart(one: Tensor, other: Tensor) -> float:
    """The relative distance."""
    return float((one - other).norm() / other.norm())


__all__ = [
    "alone",
    "apart",
    "flat",
    "one_worker",
    "regression",
    "replace",
    "sgd",
    "small_net",
    "together",
    "training",
]
