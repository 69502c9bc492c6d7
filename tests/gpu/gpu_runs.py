"""Runs of `stretto run` whose model is on a device, and what they left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.events import read_events

SCRIPT = Path(__file__).with_name("train_on_device.py")
TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
STATE = re.compile(r"worker (\d+) on (.+): state ([0-9a-f]{16})")


@dataclass(frozen=True)
class Finished:
    """A run that has ended. `states` has the digest of each worker's model, `places` its device."""

    code: int
    output: str
    events: list[dict[str, Any]]

    @property
    def states(self) -> dict[int, str]:
        """Digests of the models by worker."""
        return {int(worker): state for worker, _, state in STATE.findall(self.output)}

    @property
    def losses(self) -> list[float]:
        """Losses of the evaluations, at rank 0 of a worker in stages."""
        evaluations = (one for one in self.events if one["event"] == "evaluation" and not one.get("rank"))
        return [one["metrics"]["loss"] for one in evaluations]

    @property
    def devices(self) -> set[str]:
        """Devices of the model in the event log."""
        return {event["device"].partition(":")[0] for event in self.events if event["event"] == "start"}

    @property
    def failures(self) -> int:
        """Number of workers that failed."""
        return sum(event["event"] == "membership" and event.get("what") == "failed" for event in self.events)

    def check(self, device: str, is_synchronous: bool = True) -> None:
        """Raise AssertionError unless the run has trained on the device, with each sample once."""
        assert self.code == 0, self.output[-3000:]
        assert self.devices == {"cuda" if device == "nccl" else device}
        assert self.losses[-1] < 0.9 * self.losses[0], self.losses
        assert len(set(self.states.values())) == 1 or not is_synchronous, self.states
        counts = [event["sample_counts"] for event in self.events if event["event"] == "epoch"]
        assert counts
        assert not any(one["twice"] or one["never"] for one in counts), counts


def train(
    folder: Path,
    device: str,
    recipe: str,
    *options: str,
    script: tuple[str, ...] = (),
    workers: int = 2,
    **variables: str,
) -> Finished:
    """Run the script with some workers on a device."""
    words = ["--recipe", recipe, *options, str(SCRIPT), "--device", device, *script]
    return run(folder, workers, words, variables)


def peaks(folder: Path, layout: str, layers: int) -> list[int]:
    """Return the peak of the memory of each process of a worker on the GPU, with this number of large layers."""
    words = ["--layout", layout, str(SCRIPT.with_name("memory_on_device.py")), str(layers)]
    done = run(folder, 2, words, {})
    assert done.code == 0, done.output[-3000:]
    return [int(peak) for peak in re.findall(r"peak of (\d+) bytes", done.output)]


def run(folder: Path, workers: int, words: Sequence[str], variables: Mapping[str, str]) -> Finished:
    """Run `stretto run` with these words."""
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", str(workers), "--out", str(folder)]
    command += ["--output", "all", *words]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    log = folder / "events.jsonl"
    return Finished(done.returncode, done.stdout + done.stderr, list(read_events(log)) if log.exists() else [])
