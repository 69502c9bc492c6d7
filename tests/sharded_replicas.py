"""Ranks of sharded replicas as processes: `python sharded_replicas.py PLACE REPLICAS RANKS STORE JOB...`.

PLACE is replica * RANKS + rank. Each job trains a sharded model, and a whole one for comparison: in a plain loop where
there is one replica, else as whole workers under the same recipe. Place 0 prints for each job the largest differences
of a parameter and of a loss, or the error, as JSON.
"""

from __future__ import annotations

import contextvars
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged_net import loss_of, make_net, replace_forward, words
from thread_workers import run_workers
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto.api import close
from stretto.data.assignment import portion
from stretto.errors import StrettoError
from stretto.runtime.runtime import Runtime
from stretto.training.worker_context import WorkerContext, current_context
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.single_worker import SingleWorkerTransport

TIMEOUT_S = 60.0
SAMPLES, BATCH = 33, 6
DATA = TensorDataset(*words(0, SAMPLES))
SIZES = [min(BATCH, SAMPLES - start) for start in range(0, SAMPLES, BATCH)]
"""Samples of each batch. The last one has 3: of 4 ranks one is idle."""
Loop = Callable[[Any, torch.optim.Optimizer, Any], list[float]]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


def plain(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Train for two epochs; return the losses."""
    losses = []
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def clipped(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Clip the gradients, and change the learning rate by a scheduler."""
    losses = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def clipped_by_hand(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Scale gradients and parameters by norms that the loop reads as numbers."""
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        norm = sum(one.grad.norm().item() ** 2 for one in net.parameters()) ** 0.5
        for one in net.parameters():
            one.grad.mul_(min(1.0, 0.2 / norm))
        optimizer.step()
        with torch.no_grad():
            for one in net.parameters():
                if (length := float(one.norm())) > 2.5:
                    one.mul_(2.5 / length)
        losses.append(float(loss.detach()))
    return losses


def accumulated(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Accumulate the gradients of two batches, and call the model twice before each backward pass."""
    losses = []
    for number, (x, y) in enumerate(loader):
        loss = 0.5 * loss_of(net(x), y) + 0.5 * loss_of(net(x.flip(1)), y)
        if number % 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with stretto.no_sync():
                loss.backward()
        losses.append(float(loss.detach()))
    return losses


def evaluated(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Evaluate between steps, at all ranks alike."""
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
        losses.append(loss_after(net))
        assert {id(one) for one in net.parameters()} == {id(one) for one in optimizer.param_groups[0]["params"]}
    return losses


def scaled(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Scale the loss, and clip the gradients after they are unscaled."""
    losses = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def replaced(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Replace the last layer after an epoch."""
    losses = plain(net, optimizer, loader)
    net.head = nn.Linear(8, 11, bias=False)
    optimizer.add_param_group({"params": list(net.head.parameters())})
    return losses + plain(net, optimizer, loader)


def parted(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Train another model that has the parts of this one."""
    losses = plain(net, optimizer, loader)
    other = nn.Sequential(net, nn.Linear(11, 11))
    stretto.distribute(other, torch.optim.SGD(other.parameters(), lr=0.1), DataLoader(DATA, batch_size=BATCH))
    return losses


def saved(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Train an epoch, go back to the state after the fourth batch, and train another."""
    losses, states = [], []
    for _epoch in range(2):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if number == 3 and not states:
                states = [{k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()]
                assert [tuple(v.shape) for v in states[0].values()] == [
                    tuple(v.shape) for v in make_net().state_dict().values()
                ]
                states = as_in_a_file(states)
        net.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    return losses


def again(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Train in two sections: the second has another optimizer, batch size and number of epochs, and a loaded state."""
    plain(net, optimizer, loader)
    losses = [loss_after(net)]
    if isinstance(net, FSDPModule):
        with pytest.raises(StrettoError, match="would lack parts"):
            torch.save(net, io.BytesIO())
    net.load_state_dict({name: 0.9 * one for name, one in net.state_dict().items()}, assign=True)
    optimizer = OPTIMIZERS["adamw"](net)
    loader = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=BATCH + 3))
    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
        losses.append(loss_after(net))
    return losses


def initialised(net: Any, optimizer: torch.optim.Optimizer, loader: Any) -> list[float]:
    """Change values in place after an epoch: first values again, rows, noise, a table of the script's own."""
    losses = plain(net, optimizer, loader)
    torch.manual_seed(5)
    net.head.reset_parameters()
    net.embed.padding_idx = 3
    net.embed.reset_parameters()
    nn.init.orthogonal_(net.blocks[0].mix.weight)
    nn.init.trunc_normal_(net.blocks[1].mix.weight, std=0.1)
    with torch.no_grad():
        net.blocks[2].mix.weight[7].fill_(0.1)
        net.blocks[2].mix.weight[:, 1].mul_(2.0)
        net.blocks[3].mix.weight.add_(0.1 * torch.randn_like(net.blocks[3].mix.weight))
        net.place.copy_(torch.arange(8.0) / 8)
        net.norm.bias.add_(float(torch.rand(())))
    assert not net.embed.weight[3].sum().item()
    return losses + plain(net, optimizer, loader)


def loss_after(net: Any) -> float:
    """Return the loss of samples that all ranks evaluate."""
    net.eval()
    with torch.no_grad():
        loss = float(loss_of(net(words(7, 4)[0]), words(7, 4)[1]))
    net.train()
    return loss


def as_in_a_file(states: list[Any]) -> list[Any]:
    """Return a copy of saved states, as a file has them."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    found: list[Any] = torch.load(file, weights_only=True)
    return found


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "patched": plain,
    "clipped": clipped,
    "by-hand": clipped_by_hand,
    "accumulated": accumulated,
    "evaluated": evaluated,
    "scaled": scaled,
    "saved": saved,
    "again": again,
    "initialised": initialised,
    "streamed": plain,
    "unseeded": plain,
    "normalised": plain,
    "replaced": replaced,
    "parted": parted,
}
REFUSED = ("normalised", "replaced", "parted")
"""Loops that end in an error."""
OF_ALL = ("evaluated", "again")
"""Loops whose losses are of all ranks, and not of their parts of a batch."""


class Stream(IterableDataset[Any]):
    """The same samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Normalised(nn.Module):
    """A model with a batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = make_net(), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.net(x))
        return found


@dataclass(frozen=True)
class Job:
    """A training by a loop, with an optimizer of a model of a dtype, under a recipe."""

    loop: str
    optimizer: str
    dtype: str
    recipe: str

    def model(self, rank: int = 0) -> nn.Module:
        """Return the model, as a rank makes it."""
        net: nn.Module = Normalised() if self.loop == "normalised" else make_net()
        if self.loop == "patched":
            replace_forward(net)
        if self.loop == "unseeded":
            with torch.no_grad():
                for one in net.parameters():
                    one.add_(rank)
        return net.to(getattr(torch, self.dtype))

    def train(self, net: nn.Module, distribute: Callable[..., Any]) -> list[float]:
        """Train with an optimizer that was made, and has stepped, before the model is distributed."""
        optimizer = OPTIMIZERS[self.optimizer](net)
        if self.loop != "unseeded":
            x, y = words(8, 5)
            loss_of(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        data: Any = Stream() if self.loop == "streamed" else DATA
        return LOOPS[self.loop](net, optimizer, distribute(net, optimizer, DataLoader(data, batch_size=BATCH)))


class Place:
    """One process: a rank of a replica."""

    def __init__(self, place: int, replicas: int, ranks: int, store: str) -> None:
        self.replica, self.rank = divmod(place, ranks)
        self.replicas, self.ranks = replicas, ranks
        self._store = dist.FileStore(store, replicas * ranks)
        self._jobs = 0

    def context(self, recipe: str) -> WorkerContext:
        """Return the context of a worker of the next job."""
        self._jobs += 1
        inside = self._transport(f"inside {self.replica}", self.rank, self.ranks)
        between: Any = SingleWorkerTransport()
        if self.replicas > 1:
            between = self._transport(f"between {self.rank}", self.replica, self.replicas)
        between.siblings = inside
        runtime = Runtime(rank=self.rank, ranks=self.ranks)
        made: dict[str, Any] = {"recipe": recipe, "layout": f"sharded({self.ranks})", "runtime": runtime}
        return WorkerContext(self.replica, self.replicas, lambda _device: between, timeout_s=TIMEOUT_S, **made)

    def _transport(self, name: str, worker: int, workers: int) -> ProcessGroupTransport:
        return ProcessGroupTransport(PrefixStore(f"{self._jobs} {name}", self._store), worker, workers, TIMEOUT_S)

    def run(self, job: Job) -> dict[str, float]:
        """Return the largest differences of a parameter and of a loss."""
        net, sizes = job.model(self.rank), list[int]()
        net.register_forward_pre_hook(lambda _net, batch: sizes.append(len(batch[0])))
        found = contextvars.Context().run(self._train, net, job)
        if self.replicas == 1:
            whole = job.model()
            expected = job.train(whole, lambda _net, _optimizer, loader: loader)
            found = found if job.loop in OF_ALL else self._joined(found)
            if job.loop in ("plain", "streamed"):
                assert sizes[1:] == 2 * [max(1, stop - start) for start, stop in self._portions()]
            losses = max(abs(one - two) for one, two in zip(found, expected, strict=True))
            return {"parameters": difference(net, whole), "losses": losses}
        wholes = [job.model() for _ in range(self.replicas)]
        run_workers(self.replicas, lambda worker: job.train(wholes[worker], stretto.distribute), job.recipe)
        return {"parameters": difference(net, wholes[self.replica])}

    def error(self, job: Job) -> str:
        """Return the error of a job that is refused."""
        try:
            contextvars.Context().run(self._train, job.model(), job)
        except StrettoError as error:
            return str(error)
        raise AssertionError("the job was not refused")

    def _train(self, net: nn.Module, job: Job) -> list[float]:
        current_context.set(self.context(job.recipe))
        losses = job.train(net, stretto.distribute)
        stretto.finish()
        close()
        return losses

    def _portions(self) -> list[tuple[int, int]]:
        """Return the positions of this rank's part in each batch of an epoch."""
        return [portion(size, self.rank, self.ranks) for size in SIZES]

    def _joined(self, losses: Sequence[float]) -> list[float]:
        """Return the losses of whole batches, given those of this rank's parts."""
        shares = [(stop - start) / size for (start, stop), size in zip(self._portions(), SIZES, strict=True)]
        weighted = [loss * shares[number % len(shares)] for number, loss in enumerate(losses)]
        total = torch.tensor(weighted, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(loss) for loss in total]


def difference(net: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of a parameter; all ranks call this."""
    one, two = net.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def results(folder: Path, replicas: int, ranks: int, jobs: Sequence[str]) -> dict[str, Any]:
    """Run all jobs in new processes; return what each job has found."""
    count, store = replicas * ranks, str(folder / f"store-{replicas}-{ranks}")
    commands = [[sys.executable, __file__, *map(str, (place, replicas, ranks, store)), *jobs] for place in range(count)]
    processes = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for one in commands]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Place(*map(int, sys.argv[1:4]), sys.argv[4])
    jobs = {text: Job(*text.split("/")) for text in sys.argv[5:]}
    print(json.dumps({text: here.error(job) if job.loop in REFUSED else here.run(job) for text, job in jobs.items()}))
