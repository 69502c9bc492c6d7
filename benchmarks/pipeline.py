"""A plain loop over a pipeline against two schedules of torch: the same network, stages, batches and optimizer.

`python -m benchmarks pipeline` runs all sides in turns: ours by `stretto run --layout`, as a user does, torch's by
torchrun. `python -m benchmarks.pipeline SIDE` is the program of one process of a side.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto
from benchmarks.measure import Ratio, save
from benchmarks.pace import ROOT
from stretto.report.run_log import read
from stretto.report.stages import summary

STAGES, MICRO_BATCHES, BATCH, STEPS, STARTS = 2, 4, 16, 30, 5
WORDS, WIDTH, LENGTH, BLOCKS, WARM_UP = 65, 128, 64, 6, 3
CUT = 1 + BLOCKS // STAGES
MEASURED = f"pipeline({STAGES}, micro_batches={MICRO_BATCHES})"
LAYOUT = f'pipeline({STAGES}, micro_batches={MICRO_BATCHES}, split="{CUT}")'
RUN = ["stretto.cli", "run", "--quiet", "-n", str(STAGES), "--threads", "1", "--layout"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", str(STAGES)]
OURS = "stretto"
WANTED_PREDICTION = 0.1
"""Largest wanted difference of a predicted pass from the measured one, as a share of it."""
WANTED = {ScheduleGPipe.__name__: 1 / 1.05, Schedule1F1B.__name__: 1 / 1.25}
"""Wanted steps per second, as a multiple of those of each schedule."""


def network() -> nn.Sequential:
    """Return a small transformer of modules one after another."""
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def loader() -> Any:
    """Return the batches of all steps."""
    words = torch.randint(0, WORDS, (BATCH * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), batch_size=BATCH)


def with_stretto() -> list[float]:
    """Run the plain loop; return the readings of the clock after each step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    times = []
    for x, y in stretto.distribute(model, optimizer, loader()):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter())
    return times


def with_schedule(kind: type[ScheduleGPipe | Schedule1F1B]) -> list[float]:
    """Run a schedule of torch, whose last stage computes the loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = network()[CUT * rank : CUT if rank == 0 else None]
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-3)
    pipeline_stage = PipelineStage(stage, rank, STAGES, torch.device("cpu"))
    schedule = kind(pipeline_stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    times = []
    for x, y in loader():
        optimizer.zero_grad()
        _ = schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        optimizer.step()
        times.append(time.perf_counter())
    return times if rank else []


def seconds_a_step(side: str) -> float:
    """Run a side; return the median of the seconds of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [*RUN, LAYOUT, "--out", f"{folder}/run"] if side == OURS else TORCHRUN
        command = [sys.executable, "-m", *launch, "-m", "benchmarks.pipeline", side]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    found = next(line for line in done.stdout.splitlines() if line.startswith("seconds a step"))
    return float(found.split()[-1])


def predicted() -> float:
    """Run ours with a measured split; return the predicted seconds of a pass as a multiple of the measured ones."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *RUN, MEASURED, "--out", f"{folder}/run", "-m", "benchmarks.pipeline", OURS]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
        found = summary(read(Path(folder) / "run"))
    assert found is not None
    return float(found["predicted_s"] / found["pass_s"])


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all sides in turns, print the figures and write them to the results."""
    question = f"steps per second of a plain loop over pipeline({STAGES}) against schedules of torch, one host"
    print(f"pipeline: {question}", flush=True)
    taken: dict[str, list[float]] = {side: [] for side in (OURS, *WANTED)}
    predictions = []
    for _ in range(starts or STARTS):
        predictions.append(predicted())
        for side, seconds in taken.items():
            seconds.append(seconds_a_step(side))
    for side, seconds in taken.items():
        print(f"    {side:14} {1e3 * statistics.median(seconds):8.1f} ms a step, best {1e3 * min(seconds):.1f}")
    ratios = {side: Ratio.of([[one] for one in taken[OURS]], [[one] for one in taken[side]]) for side in WANTED}
    for side, ratio in ratios.items():
        print(f"    speed of {OURS} / {side}: {ratio}, wanted at least {WANTED[side]:.2f}")
    shown = ", ".join(f"{one:.2f}" for one in predictions)
    print(f"    predicted pass of a measured split / measured: {shown}, wanted within {WANTED_PREDICTION:.0%}")
    sides = {side: {"seconds_a_step": seconds} for side, seconds in taken.items()}
    found = {side: {"wanted": WANTED[side], "ratio": ratio.record()} for side, ratio in ratios.items()}
    record = {"question": question, "ratios": found, "steps": STEPS, "sides": sides}
    record |= {"predictions": predictions, "wanted_prediction": WANTED_PREDICTION}
    print(f"  kept in {save('pipeline', record, trial=starts is not None)}")
    return record


if __name__ == "__main__":
    schedules = {kind.__name__: kind for kind in (ScheduleGPipe, Schedule1F1B)}
    readings = with_stretto() if sys.argv[1] == OURS else with_schedule(schedules[sys.argv[1]])
    steps = [after - before for before, after in itertools.pairwise(readings)][WARM_UP:]
    if steps:
        print("seconds a step", statistics.median(steps), flush=True)
