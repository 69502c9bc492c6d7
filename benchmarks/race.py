"""One host's program in the laboratory: trains on MNIST in one way until a test accuracy is reached.

    python -m benchmarks.race "torch DDP" FOLDER TARGET SEED

All ways share the network, the optimizer, the order of the samples and the clock: seconds since the first batch at
host 0, less those in which it evaluates; the others wait meanwhile. After each evaluation host 0 adds a line to
FOLDER/evaluations.jsonl; when the target is reached it writes FOLDER/reached, and all end at the same step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import stretto
from benchmarks.averaging import average
from benchmarks.tasks import BATCH, convolution
from examples import datasets

LR, MOMENTUM = 0.05, 0.9
MOST_PASSES = 20


class Race:
    """This host's data, clock and finishing line. Host 0 is the referee."""

    def __init__(self, folder: Path, target: float, seed: int) -> None:
        train_x, train_y, self._test_x, self._test_y = datasets.mnist()
        self.data = TensorDataset(train_x, train_y)
        self.host, self.hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._folder, self._target = folder, target
        torch.manual_seed(seed)
        self.order = Shuffled(len(self.data), seed)
        self.model = convolution()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.steps = 0
        self._evaluating_s = 0.0
        self._began: float | None = None

    def batches(self, loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of as many passes as it takes to reach the target."""
        for _ in range(MOST_PASSES):
            for batch in loader:
                if self._began is None:
                    self._began = time.perf_counter()
                if self.over():
                    return
                self.steps += 1
                yield batch

    def over(self) -> bool:
        """Whether the target is reached. It changes only while all hosts wait for host 0's evaluation."""
        return (self._folder / "reached").exists()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The test accuracy, written down with the time it took to get there."""
        came = time.perf_counter()
        assert self._began is not None
        seconds = came - self._began - self._evaluating_s
        accuracy = self._accuracy(model)
        if self.over():
            return {"test_accuracy": accuracy}
        said = {"step": self.steps, "seconds": seconds, "accuracy": accuracy}
        with (self._folder / "evaluations.jsonl").open("a") as lines:
            lines.write(json.dumps(said) + "\n")
        if accuracy >= self._target:
            (self._folder / "reached").touch()
        self._evaluating_s += time.perf_counter() - came
        return {"test_accuracy": accuracy}

    @torch.no_grad()
    def _accuracy(self, model: nn.Module) -> float:
        model.eval()
        answers = [model(x).argmax(1) for x in self._test_x.split(1000)]
        model.train()
        return float((torch.cat(answers) == self._test_y).float().mean())

    def evaluate_if_due(self, model: nn.Module, every: int) -> None:
        """For the ways written by hand: host 0 evaluates each so many steps, the others wait for it."""
        if self.steps % every == 0:
            if self.host == 0:
                self.evaluate(model)
            if self.hosts > 1:
                dist.barrier()


class Shuffled(Sampler[int]):
    """All samples in an order that only the seed and the number of the pass decide."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._source = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._samples, generator=self._source).tolist()

    def __len__(self) -> int:
        return self._samples


class Shard(Sampler[list[int]]):
    """One host's batches of that order, dealt in turn, as Stretto deals them."""

    def __init__(self, order: Shuffled, host: int, hosts: int) -> None:
        self._order, self._host, self._hosts = order, host, hosts

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self._order)
        for at in range(self._host * BATCH, len(self) * BATCH * self._hosts, BATCH * self._hosts):
            yield indices[at : at + BATCH]

    def __len__(self) -> int:
        """Only rounds in which every host has a whole batch."""
        return len(self._order) // (BATCH * self._hosts)


def _learn(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def alone(race: Race, way: Way) -> None:
    """One process on one host."""
    for x, y in race.batches(_shared(race)):
        _learn(race.model, race.optimizer, x, y)
        race.evaluate_if_due(race.model, way.evaluate_every)


def ddp(race: Race, way: Way) -> None:
    """Torch's DistributedDataParallel, as it is or with its fp16 hook."""
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(race.model)
    if way.halves:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    for x, y in race.batches(_shared(race)):
        _learn(wrapped, race.optimizer, x, y)
        race.evaluate_if_due(race.model, way.evaluate_every)


def averaging(race: Race, way: Way) -> None:
    """Averaging the parameters each so many steps, written by hand."""
    dist.init_process_group("gloo")
    for one in race.model.parameters():
        dist.broadcast(one.data, 0)
    for x, y in race.batches(_shared(race)):
        _learn(race.model, race.optimizer, x, y)
        if race.steps % way.every == 0:
            average(race.model)
        race.evaluate_if_due(race.model, way.evaluate_every)


def ours(race: Race, way: Way) -> None:
    """The loop as it is alone, with the one line."""
    loader = DataLoader(race.data, batch_size=BATCH, sampler=race.order)
    loader = stretto.distribute(
        race.model,
        race.optimizer,
        loader,
        recipe=way.recipe,
        evaluate=race.evaluate,
        evaluate_every=way.evaluate_every,
    )
    for x, y in race.batches(loader):
        _learn(race.model, race.optimizer, x, y)


def _shared(race: Race) -> DataLoader[Any]:
    return DataLoader(race.data, batch_sampler=Shard(race.order, race.host, race.hosts))


@dataclass(frozen=True)
class Way:
    """A way to train. `against`: the way written by hand that ours may not be slower than."""

    train: Callable[[Race, Way], None]
    recipe: str = ""
    every: int = 1
    halves: bool = False
    hosts: int | None = None
    against: str = ""

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations: where all hosts hold the same model."""
        return max(16, self.every)


def _ours(recipe: str, every: int = 1, against: str = "") -> Way:
    return Way(ours, recipe=recipe, every=every, against=against)


WAYS: Mapping[str, Way] = {
    "alone": Way(alone, hosts=1),
    "torch DDP": Way(ddp),
    "allreduce": _ours("allreduce", against="torch DDP"),
    "torch DDP fp16": Way(ddp, halves=True),
    "allreduce fp16": _ours('allreduce(how=cast("fp16"))', against="torch DDP fp16"),
    "allreduce bf16": _ours('allreduce(how=cast("bf16"))', against="torch DDP fp16"),
    "averaging 16": Way(averaging, every=16),
    "local_sgd 16": _ours('local_sgd(every=16, optimizer_state="keep")', 16, "averaging 16"),
    "averaging 64": Way(averaging, every=64),
    "local_sgd 64": _ours('local_sgd(every=64, optimizer_state="keep")', 64, "averaging 64"),
    "diloco 64": _ours("diloco(every=64)", 64),
}


def main() -> None:
    """Train the way that is named."""
    _end_with_the_laboratory()
    way, folder, target, seed = sys.argv[1:]
    torch.set_num_threads(1)
    race = Race(Path(folder), float(target), int(seed))
    WAYS[way].train(race, WAYS[way])


def _end_with_the_laboratory() -> None:
    """Be killed when the process that started this one ends (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


if __name__ == "__main__":
    main()
