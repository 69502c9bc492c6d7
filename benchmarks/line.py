"""Cost of the call of `stretto.distribute` with a single process: `python train.py` with and without it.

Two measurements: whole training steps in turns, which is the real case but no more precise than the machine's noise,
and a loop without any training, which shows the microseconds that Stretto adds to a step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import stretto
from benchmarks.contest import Contest
from benchmarks.pace import ROOT, Pace
from benchmarks.tasks import BATCH, build, samples


def with_stretto(case: str, pace: Pace) -> None:
    """Run the loop with Stretto, an evaluation that is not due, and a logged loss."""
    model, optimizer, task = build(case)
    loader = DataLoader(samples(task, 1), batch_size=BATCH, shuffle=True)
    loader = stretto.distribute(model, optimizer, loader, evaluate=never)
    pace.begin()
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)
        pace.step()


def never(model: nn.Module) -> dict[str, float]:
    """Raise an error: no evaluation is due within the measured epoch."""
    raise RuntimeError(f"evaluate was called with {model}")


def without_stretto(case: str, pace: Pace) -> None:
    """Run the loop without Stretto."""
    model, optimizer, task = build(case)
    loader = DataLoader(samples(task, 1), batch_size=BATCH, shuffle=True)
    pace.begin()
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        pace.step()


SIDES = {"with the line": with_stretto, "without": without_stretto, "without, once more": without_stretto}

CONTEST = Contest(
    name="line",
    question="steps per second of python train.py with the line against without it; twice without shows the noise",
    wanted=0.99,
    workers=1,
    sides=tuple(SIDES),
    cases=("0.8 M", "0.03 M"),
)

EMPTY_STEPS = 200_000


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure the contest, and the cost of Stretto in an empty loop."""
    added_us = cost_in_an_empty_loop()
    print(f"line: in an empty loop the line and the logged loss add {added_us:.2f} microseconds a step")
    return CONTEST.run(starts, added_us_a_step=added_us)


def cost_in_an_empty_loop() -> float:
    """Return the microseconds that Stretto and the logged loss add to a step, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.line"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return float(ended.stdout)


def _compare_empty_loops() -> float:
    """Return the difference of the median microseconds of an empty step with and without Stretto, measured in turns."""
    model, loss = nn.Linear(1, 1), torch.tensor(0.5)
    batches = [None] * EMPTY_STEPS
    loader = stretto.distribute(
        model, torch.optim.SGD(model.parameters()), batches, evaluate=never, evaluate_every=100 * EMPTY_STEPS
    )
    with_line, without = [], []
    for _ in range(9):
        began = time.perf_counter()
        for _ in loader:
            stretto.log(loss=loss)
        between = time.perf_counter()
        for _ in batches:
            pass
        with_line.append(between - began)
        without.append(time.perf_counter() - between)
    return 1e6 * (statistics.median(with_line) - statistics.median(without)) / EMPTY_STEPS


if __name__ == "__main__":
    print(_compare_empty_loops())
