"""Program of one host in the laboratory: trains in one way until a target is reached.

All ways of a contest share the network, the order of the samples, the quality measure and the clock: seconds since the
first batch at host 0, without its evaluations, during which the other hosts wait. After each evaluation host 0 adds a
line to FOLDER/evaluations.jsonl; when the target is reached it writes FOLDER/reached, and all hosts stop, synchronous
ones at the same step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import stretto
from benchmarks.averaging import average
from benchmarks.learning_tasks import MNIST, Course
from benchmarks.tasks import BATCH
from stretto.api import close

LR, MOMENTUM = 0.05, 0.9
MOST_PASSES = 20
POLL_S = 0.005
ONE_BUCKET_MB = 1024


class Race:
    """This host's data, model, clock and target. Host 0 evaluates."""

    def __init__(self, way: Way, folder: Path, target: float, seed: int) -> None:
        self.way, self.course = way, way.course
        self.data, self._test = self.course.samples()
        self.host, self.hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._folder, self._target = folder, target
        torch.manual_seed(seed)
        self.order = Shuffled(len(self.data), seed)
        self.model = self.course.network()
        self.optimizer = way.optimizer(self.model.parameters())
        self._lr = self.optimizer.defaults["lr"]
        self.steps = 0
        self._evaluating_s = 0.0
        self._began: float | None = None

    def batches(self, loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of as many epochs as it takes to reach the target."""
        for _ in range(self.way.passes):
            for batch in loader:
                if self._began is None:
                    self._began = time.perf_counter()
                if self.is_over():
                    return
                self.steps += 1
                yield batch

    def is_over(self) -> bool:
        """Return True if the target is reached; that changes only while all hosts wait for host 0's evaluation."""
        while self.host and self._pause.exists():
            time.sleep(POLL_S)
        return (self._folder / "reached").exists()

    def learn(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        """Train one step."""
        if self.course.pace is not None:
            steps = self.way.passes * (len(self.order) // (BATCH * self.hosts))
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr * self.course.pace(self.steps - 1, steps)
        self.optimizer.zero_grad()
        self.course.loss(model(x), y).backward()
        if self.way.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.way.clip)
        self.optimizer.step()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate the model, and record its quality and the seconds until now."""
        reached_at = time.perf_counter()
        assert self._began is not None
        seconds = reached_at - self._began - self._evaluating_s
        self._pause.touch()
        quality = self.course.judge(model, self._test)
        if not (self._folder / "reached").exists():
            entry = {"step": self.steps, "seconds": seconds, "found": quality}
            with (self._folder / "evaluations.jsonl").open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
            if self.course.is_reached(quality, self._target):
                (self._folder / "reached").touch()
        self._evaluating_s += time.perf_counter() - reached_at
        self._pause.unlink()
        return {"found": quality}

    @property
    def _pause(self) -> Path:
        """File that exists while host 0 evaluates; asynchronous hosts wait until it is removed."""
        return self._folder / "evaluating"

    def evaluate_if_due(self, model: nn.Module) -> None:
        """Evaluate at host 0 every `evaluate_every` steps while the others wait, in ways written by hand."""
        if self.steps % self.way.evaluate_every == 0:
            if self.host == 0:
                self.evaluate(model)
            if self.hosts > 1:
                dist.barrier()


class Shuffled(Sampler[int]):
    """All samples in an order that depends only on the seed and the number of the epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._source = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._samples, generator=self._source).tolist()

    def __len__(self) -> int:
        return self._samples


class Shard(Sampler[list[int]]):
    """One host's batches of that order, assigned in turn, as Stretto assigns them."""

    def __init__(self, order: Shuffled, host: int, hosts: int) -> None:
        self._order, self._host, self._hosts = order, host, hosts

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self._order)
        for at in range(self._host * BATCH, len(self) * BATCH * self._hosts, BATCH * self._hosts):
            yield indices[at : at + BATCH]

    def __len__(self) -> int:
        """Return the number of global steps in which every host has a full batch."""
        return len(self._order) // (BATCH * self._hosts)


def alone(race: Race) -> None:
    """Train with one process on one host."""
    for x, y in race.batches(_loader(race)):
        race.learn(race.model, x, y)
        race.evaluate_if_due(race.model)


def ddp(race: Race) -> None:
    """Train with torch's DistributedDataParallel, with or without one of its hooks."""
    dist.init_process_group("gloo")
    wrapped = race.way.wrap(race.model)
    for x, y in race.batches(_loader(race)):
        race.learn(wrapped, x, y)
        race.evaluate_if_due(race.model)


def with_fp16_hook(model: nn.Module) -> DistributedDataParallel:
    """Return the wrapped model with the fp16 hook."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def with_power_sgd_hook(model: nn.Module, rank: int) -> DistributedDataParallel:
    """Return the model with the PowerSGD hook from its earliest step; in one bucket, since several hang with gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def averaging(race: Race) -> None:
    """Average the parameters every few steps, written by hand."""
    dist.init_process_group("gloo")
    for one in race.model.parameters():
        dist.broadcast(one.data, 0)
    for x, y in race.batches(_loader(race)):
        race.learn(race.model, x, y)
        if race.steps % race.way.every == 0:
            average(race.model)
        race.evaluate_if_due(race.model)


def stretto_way(race: Race) -> None:
    """Train with the single-process loop and the call of `stretto.distribute`."""
    loader = DataLoader(race.data, batch_size=BATCH, sampler=race.order)
    loader = stretto.distribute(
        race.model,
        race.optimizer,
        loader,
        recipe=race.way.recipe,
        evaluate=race.evaluate,
        evaluate_every=race.way.evaluate_every,
    )
    for x, y in race.batches(loader):
        race.learn(race.model, x, y)
    close()


def _loader(race: Race) -> DataLoader[Any]:
    return DataLoader(race.data, batch_sampler=Shard(race.order, race.host, race.hosts))


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum."""

    lr: float = LR
    momentum: float = MOMENTUM

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def __str__(self) -> str:
        return f"SGD {self.lr:g}, momentum {self.momentum:g}" if self.momentum else f"SGD {self.lr:g}"


@dataclass(frozen=True)
class AdamW:
    """AdamW with the settings of examples/shakespeare.py."""

    lr: float = 3e-3

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.1)

    def __str__(self) -> str:
        return f"AdamW {self.lr:g}"


@dataclass(frozen=True)
class Way:
    """A way to train. `against`: the way written by hand that ours should be at least as fast as."""

    train: Callable[[Race], None]
    recipe: str = ""
    every: int = 1
    wrap: Callable[[nn.Module], DistributedDataParallel] = DistributedDataParallel
    hosts: int | None = None
    against: str = ""
    course: Course = MNIST
    optimizer: Sgd | AdamW = Sgd()
    clip: float | None = None
    passes: int = MOST_PASSES
    """Epochs after which the run ends, and over which the learning rate follows the course's schedule."""
    least_between: int = 16

    @property
    def has_hook(self) -> bool:
        """True if the way is DDP with a hook that compresses gradients."""
        return self.train is ddp and self.wrap is not DistributedDataParallel

    @property
    def evaluate_every(self) -> int:
        """Number of steps between evaluations, at which all hosts hold the same model."""
        return max(self.least_between, self.every)
