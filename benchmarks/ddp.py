"""Is `allreduce` as fast as torch's DistributedDataParallel? Two workers of one host: shared memory against gloo."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import stretto
from benchmarks.contest import Contest
from benchmarks.pace import Pace
from benchmarks.tasks import BATCH, build, samples

WORKERS = 2


def with_stretto(case: str, pace: Pace) -> None:
    """Run the plain loop with the call of `stretto.distribute`."""
    model, optimizer, task = build(case)
    loader = DataLoader(samples(task, WORKERS), batch_size=BATCH, shuffle=True)
    loader = stretto.distribute(model, optimizer, loader, recipe="allreduce")
    pace.begin()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        pace.step()


def with_ddp(case: str, pace: Pace) -> None:
    """Run the same loop with DistributedDataParallel, as torch's tutorials write it."""
    model, optimizer, task = build(case)
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    data = samples(task, WORKERS)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    pace.begin()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        pace.step()


SIDES = {"stretto": with_stretto, "torch DDP": with_ddp}

CONTEST = Contest(
    name="ddp",
    question="steps per second of allreduce against torch's DistributedDataParallel (gloo), 2 workers on one host",
    wanted=0.97,
    workers=WORKERS,
    sides=tuple(SIDES),
    cases=("0.1 M", "0.8 M", "25 M"),
    wanted_of={"0.1 M": 2},
)

run = CONTEST.run
