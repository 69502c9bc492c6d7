"""Runs on Spark: the start of workers, a killed task, and ways of Spark's own beside them.

    python -m benchmarks.spark [--starts 3] [--values 1000000]

Spark is a cluster of two executors with two slots on this machine, started before anything is measured. The sides take
turns:

- seconds from the command to the first round of 4 workers: `stretto run --on spark`, `stretto run`, TorchDistributor
- from the SIGKILL of a task's Python to the next round, and the longest pause between two rounds after it
- seconds of a round of parameter averaging by Spark's reduce, as Deeplearning4j does it, and by `local_sgd`
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from stretto.events import read_events
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/scripts/clocked_rounds.py"
WORKERS = 4
LIMIT_S = 300.0
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
    yield session.sparkContext
    session.stop()


class Rounds:
    """A run in a thread, and the times of its rounds."""

    def __init__(self, seconds: float, pause: float, values: int = 0, workers: int = WORKERS, **fields: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="spark-"))
        self._file, self.folder = folder / "rounds", folder / "run"
        words = (str(self._file), str(seconds), str(pause), str(values))
        config = RunConfig(SCRIPT, words, workers=workers, recipe="allreduce", threads=1, out=self.folder, **fields)
        self.began = time.perf_counter()
        self._thread = threading.Thread(target=run, args=(config, ProgressDisplay(quiet=True)))
        self._thread.start()

    def times(self) -> list[float]:
        """Return the times of the rounds so far."""
        return [float(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []

    def first_s(self) -> float:
        """Return the seconds from the start to the first round."""
        while not (times := self.times()):
            assert self._thread.is_alive()
            time.sleep(0.01)
        return times[0] - self.began

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
    rounds = Rounds(0.2, 0.01, **fields)
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
    rounds = Rounds(30.0, 0.01, workers=3, on="spark")
    rounds.first_s()
    while len(rounds.times()) < 100:
        time.sleep(0.01)
    killed = time.perf_counter()
    rounds.task_of(1).kill()
    while not (formed := [at for at, members in rounds.formed() if members == [0, 2]]):
        time.sleep(0.01)
    while not (after := [at for at in rounds.times() if at > formed[0]]):
        time.sleep(0.01)
    time.sleep(1.0)
    times = [at for at in rounds.times() if killed - 0.1 < at < killed + 2.0]
    longest = max(late - early for early, late in pairwise(times))
    rounds.end()
    return formed[0] - killed, after[0] - killed, longest


def reduce_round_s(context: Any, values: int, rounds: int = 5) -> float:
    """Return the seconds of a round of averaging by Spark: broadcast, a task for each worker, a tree reduce."""
    parameters, durations = np.zeros(values, np.float32), []
    for _ in range(rounds):
        began = time.perf_counter()
        sent = context.broadcast(parameters)
        trained = context.parallelize(range(WORKERS), WORKERS).map(lambda one, sent=sent: sent.value + np.float32(one))
        parameters = trained.treeReduce(np.add) / np.float32(WORKERS)
        sent.destroy()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def exchange_round_s(values: int) -> float:
    """Return the seconds of a round of `allreduce` on Spark, with a training step on four samples."""
    rounds = Rounds(5.0, 0.0, values, on="spark")
    rounds.end()
    times = rounds.times()
    return statistics.median(late - early for early, late in pairwise(times))


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--values", type=int, default=1_000_000)
    asked = parser.parse_args(arguments)
    with spark() as context:
        sides: dict[str, Callable[[], float]] = {
            "stretto run": start_s,
            "stretto run --on spark": lambda: start_s(on="spark"),
            "TorchDistributor": distributor_s,
        }
        print(f"seconds to the first round of {WORKERS} workers")
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(asked.starts):
            for name, side in sides.items():
                found[name].append(side())
        for name, seconds in found.items():
            print(f"{name:24} {statistics.median(seconds):6.2f}   ({', '.join(f'{one:.2f}' for one in seconds)})")
        print("seconds after the SIGKILL of a task: next generation, its first round, longest pause of the rounds")
        for _ in range(asked.starts):
            print("   ".join(f"{one:.3f}" for one in killed_task_s()))
        print(f"seconds of a round that averages {asked.values} values: Spark's reduce, allreduce on Spark")
        print(f"{reduce_round_s(context, asked.values):.3f}   {exchange_round_s(asked.values):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
