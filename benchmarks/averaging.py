"""Is `local_sgd(every=16)` as fast as averaging written by hand? Two workers, gloo over the loopback.

By hand: one flat vector of all parameters, one all-reduce, and a copy back; each worker keeps its momentum. Ours does
the same with `optimizer_state="keep"`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import stretto
from benchmarks.contest import Contest
from benchmarks.pace import Pace
from benchmarks.tasks import BATCH, build, samples

WORKERS = 2
EVERY = 16


def with_stretto(case: str, pace: Pace) -> None:
    """Run the plain loop with the call of `stretto.distribute`."""
    model, optimizer, task = build(case)
    loader = DataLoader(samples(task, WORKERS), batch_size=BATCH, shuffle=True)
    recipe = stretto.recipes.local_sgd(every=EVERY, optimizer_state="keep")
    loader = stretto.distribute(model, optimizer, loader, recipe=recipe)
    pace.begin()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        pace.step()


def by_hand(case: str, pace: Pace) -> None:
    """Run the loop with the averaging written without a library."""
    model, optimizer, task = build(case)
    dist.init_process_group("gloo")
    data = samples(task, WORKERS)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    pace.begin()
    for step, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % EVERY == 0:
            average(model)
        pace.step()


@torch.no_grad()
def average(model: nn.Module) -> None:
    """Replace the parameters by their mean over all workers."""
    parameters = list(model.parameters())
    flat = torch.cat([one.flatten() for one in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for one, mean in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        one.copy_(mean.view_as(one))


SIDES = {"stretto": with_stretto, "by hand": by_hand}

CONTEST = Contest(
    name="averaging",
    question="steps per second of local_sgd(every=16) against averaging a flat vector by hand, 2 workers, gloo",
    wanted=0.97,
    workers=WORKERS,
    sides=tuple(SIDES),
    cases=("0.8 M", "25 M"),
)

run = CONTEST.run
