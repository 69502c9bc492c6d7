"""Runs on a warm Spark of this machine: what the loss of a task, the start of a run, and a round take.

Spark has two executors of two slots, all in use once before anything is measured. The sides take turns:

- seconds from the command to the first round of 4 workers: `stretto run --on spark`, `stretto run`, TorchDistributor
- from the SIGKILL of a task's Python to the next round, and the longest pause between two rounds after it
- seconds of a round of parameter averaging by Spark's reduce, as Deeplearning4j does it, and by `allreduce`

It needs Java and PySpark, and pyarrow for TorchDistributor: pip install "stretto[spark]" pyarrow.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from benchmarks.measure import outcomes, save
from benchmarks.pace import ROOT
from stretto.events import read_events
from stretto.launcher import local
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

QUESTION = "seconds that a run on Spark takes for the loss of a task, for its start, and for a round"
KILLED, MORE = "task killed", "start on Spark more than on this machine"
WANTED_S = {KILLED: 1.5, MORE: 2.0}
STARTS, KILLS, VALUES = 3, 5, 1_000_000
SCRIPT = ROOT / "benchmarks/scripts/clocked_rounds.py"
WORKERS = 4
Found = TypeVar("Found")
ROUNDS = 20
LIMIT_S = 120.0
POLL_S = 0.01
STEADY, PAUSES_S = 100, 2.0
"""Rounds before a kill, and the time after it within which the longest pause is looked for."""
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.task.maxFailures": "1",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.executorEnv.OMP_NUM_THREADS": "1",
}


@contextmanager
def spark() -> Iterator[Any]:
    """Yield the context of a Spark of two executors with two slots each, all of them in use once."""
    from pyspark.sql import SparkSession

    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    builder = SparkSession.builder.master("local-cluster[2,2,512]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    session.sparkContext.parallelize(range(64), 64).map(lambda _: time.sleep(0.1)).collect()
    try:
        yield session.sparkContext
    finally:
        session.stop()


class Rounds:
    """A run in a thread, and the times of its rounds."""

    def __init__(self, rounds: int, pause: float, values: int = 0, workers: int = WORKERS, **fields: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="spark-"))
        self._file, self.folder = folder / "rounds", folder / "run"
        words = (str(self._file), str(4 * workers * rounds), str(pause), str(values))
        config = RunConfig(
            SCRIPT, words, workers=workers, recipe="allreduce", threads=1, output="none", out=self.folder, **fields
        )
        self.began = time.perf_counter()
        self._thread = threading.Thread(target=local.run, args=(config, ProgressDisplay(quiet=True)))
        self._thread.start()

    def times(self) -> list[float]:
        """Return the times of the rounds so far."""
        return [float(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []

    def first_s(self) -> float:
        """Return the seconds from the start to the first round."""
        return self.wait(self.times)[0] - self.began

    def wait(self, poll: Callable[[], list[Found]]) -> list[Found]:
        """Wait until a function returns something during the run, and return it."""
        limit = time.monotonic() + LIMIT_S
        while not (found := poll()):
            if not self._thread.is_alive() or time.monotonic() > limit:
                raise SystemExit("spark: the run has ended, or is too slow")
            time.sleep(POLL_S)
        return found

    def formed(self) -> list[tuple[float, list[int]]]:
        """Return the time and the members of each generation."""
        events = [one for one in read_events(self.folder / "events.jsonl") if one["event"] == "membership"]
        return [(one["at"], one["members"]) for one in events if one["what"] == "formed"]

    def task_of(self, worker: int) -> psutil.Process:
        """Return the Python of the task that carries a worker's agent."""
        starts = (one for one in read_events(self.folder / "events.jsonl") if one["event"] == "start")
        return psutil.Process({one["worker"]: one["pid"] for one in starts}[worker]).parents()[1]

    def end(self) -> None:
        """Wait for the end of the run."""
        self._thread.join(LIMIT_S)


def start_s(**fields: Any) -> float:
    """Return the seconds to the first round of a run."""
    rounds = Rounds(ROUNDS, 0.01, **fields)
    first = rounds.first_s()
    rounds.end()
    return first


def distributor_s() -> float:
    """Return the seconds to the first all-reduced step under TorchDistributor."""
    from pyspark.ml.torch.distributor import TorchDistributor

    began = time.time()
    distributor = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
    return float(distributor.run(first_step)) - began


def first_step() -> float:
    """Return the time at which a worker of TorchDistributor has made its first step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.randn(4, 8)).sum().backward()
    dist.destroy_process_group()
    return time.time()


def killed_task_s() -> tuple[float, float, float]:
    """Return seconds after the SIGKILL of a task: to the next generation, to its first round, and the longest pause."""
    rounds = Rounds(10 * STEADY, 0.01, workers=3, on="spark")
    rounds.wait(lambda: rounds.times()[STEADY:])
    task = rounds.task_of(1)
    killed = time.perf_counter()
    task.kill()
    formed = rounds.wait(lambda: [at for at, members in rounds.formed() if members == [0, 2]])
    after = rounds.wait(lambda: [at for at in rounds.times() if at > formed[0]])
    rounds.wait(lambda: [at for at in rounds.times() if at > killed + PAUSES_S])
    times = [at for at in rounds.times() if killed - 0.1 < at < killed + PAUSES_S]
    longest = max(late - early for early, late in pairwise(times))
    rounds.end()
    return formed[0] - killed, after[0] - killed, longest


def reduce_round_s(context: Any) -> list[float]:
    """Return the seconds of rounds of averaging by Spark: broadcast, a task for each worker, a tree reduce."""
    parameters, durations = np.zeros(VALUES, np.float32), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        sent = context.broadcast(parameters)
        trained = context.parallelize(range(WORKERS), WORKERS).map(lambda one, sent=sent: sent.value + np.float32(one))
        parameters = trained.treeReduce(np.add) / np.float32(WORKERS)
        sent.destroy()
        durations.append(time.perf_counter() - began)
    return durations


def exchange_round_s() -> list[float]:
    """Return the seconds of rounds of `allreduce` on Spark, each with a training step on four samples."""
    rounds = Rounds(2 * ROUNDS, 0.0, VALUES, on="spark")
    rounds.end()
    return [late - early for early, late in pairwise(rounds.times())][-ROUNDS:]


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all, print the figures and write them to the results."""
    print(f"spark: {QUESTION}", flush=True)
    sides: list[Callable[[], float]] = [start_s, lambda: start_s(on="spark"), distributor_s]
    with spark() as context:
        for side in sides:
            side()
        turns = [[side() for side in sides] for _ in range(starts or STARTS)]
        kills = [killed_task_s() for _ in range(starts or KILLS)]
        reduced, exchanged = reduce_round_s(context), exchange_round_s()
    here, there, theirs = map(list, zip(*turns, strict=True))
    formed, after, pauses = map(list, zip(*kills, strict=True))
    found = {
        KILLED: after,
        f"{KILLED}: next generation": formed,
        f"{KILLED}: longest pause of the rounds": pauses,
        "start on this machine": here,
        "start on Spark": there,
        MORE: [one - other for one, other in zip(there, here, strict=True)],
        "start of TorchDistributor": theirs,
        f"round of {VALUES:,} values, Spark's reduce": reduced,
        f"round of {VALUES:,} values, allreduce on Spark": exchanged,
    }
    record = {"question": QUESTION, "workers": WORKERS, "figures": outcomes(found, WANTED_S)}
    print(f"  kept in {save('spark', record, trial=starts is not None)}")
    return record
