"""Runs several workers in the threads of one process, connected by the in-memory transport."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from thread_pool import thread_pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import abandon, close
from stretto.training.worker_context import WorkerContext, current_context
from stretto.transport import in_memory

TIMEOUT_S = 60.0


def run_workers(
    workers: int, work: Callable[[int], Any], recipe: str | None = None, run: Path | None = None, **context: Any
) -> list[Any]:
    """Return the result of `work(worker)` of each worker; raise the first worker's error."""
    transports = in_memory.wires(workers, TIMEOUT_S)
    slow = context.pop("slow", {})
    contexts = [
        WorkerContext(
            worker,
            workers,
            lambda device, transport=transport: transport,
            recipe=recipe,
            run=run,
            **{"timeout_s": TIMEOUT_S, "slow": slow.get(worker, 1.0)} | context,
        )
        for worker, transport in enumerate(transports)
    ]

    def run_worker(context: WorkerContext) -> Any:
        current_context.set(context)
        try:
            result = work(context.worker)
            close()
            return result
        except BaseException as error:
            transports[context.worker].close()
            abandon(f"{type(error).__name__}: {error}")
            raise

    with thread_pool(workers) as pool:
        futures = [pool.submit(contextvars.Context().run, run_worker, context) for context in contexts]
        errors = [error for future in futures if (error := future.exception(timeout=3 * TIMEOUT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, stretto.errors.TransportError))
    return [future.result() for future in futures]


def run_one_worker(work: Callable[[int], Any], recipe: str | None = None, **context: Any) -> Any:
    """Return the result of `work(0)` in a run of one worker."""
    return run_workers(1, work, recipe, **context)[0]


def run_single_process(work: Callable[[int], Any], join: int = 1, **context: Any) -> Any:
    """Return the result of a single process without exchanges, which joins `join` batches of the script to one."""
    return run_workers(1, work, single_process=True, global_batch_of=join, **context)[0]


def regression(samples: int, dtype: torch.dtype = torch.float32, features: int = 6) -> TensorDataset:
    """Return a small regression task whose batches differ."""
    source = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, features, generator=source).to(dtype)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=source).to(dtype)
    return TensorDataset(x, y)


def small_net(dtype: torch.dtype = torch.float32, features: int = 6) -> nn.Module:
    """Return a small network with the same parameters at each call."""
    source = torch.Generator().manual_seed(7)
    net = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    with torch.no_grad():
        for one in net.parameters():
            one.copy_(torch.randn(one.shape, generator=source) * 0.3)
    return net


class Branching(nn.Module):
    """A network that uses `odd` only if the first number of a row is below -1.2, and never uses `never`."""

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
    """Return plain SGD."""
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
    """Return a function of the worker that runs a plain training loop and returns the final parameters, flat."""

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
    """Return a flat copy of all parameters."""
    return torch.cat([one.detach().reshape(-1).double() for one in net.parameters()])


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors, relative to the norm of the second."""
    return float((one - other).norm() / other.norm())


__all__ = [
    "flat",
    "regression",
    "relative_distance",
    "replace",
    "run_one_worker",
    "run_single_process",
    "run_workers",
    "sgd",
    "small_net",
    "training",
]
