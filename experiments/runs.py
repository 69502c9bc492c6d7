"""One simulation of an experiment: its command line and its results.

Simulations run one after another in this process, without the startup time and the page of each. Their results are
those of their command lines: `tests/experiments` compares both.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from stretto.errors import LaunchError
from stretto.report import run_log, run_record
from stretto.report.target import Target
from stretto.run_config import RunConfig
from stretto.run_dir import write_run
from stretto.simulator.compute import cost_model
from stretto.simulator.compute import speed as speeds
from stretto.simulator.config import Simulation, check
from stretto.simulator.isolation.script import DiscardedOutput
from stretto.simulator.network import topology as network
from stretto.simulator.runner import simulate

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path("experiments") / "task.py"
BEGAN = datetime(2000, 1, 1)
"""Date in the run directories; no result depends on it."""

CHANCE = 0.1
"""Accuracy of guessing among ten classes, and of runs that diverge."""

Found = dict[str, Any]
Values = Mapping[str, str | float]


@dataclass(frozen=True)
class Point:
    """Simulation of `task.py`; `values` is its position in the grid of the experiment."""

    values: Values
    workers: int
    recipe: str
    args: str
    seed: int = 0
    network: str = "instant"
    speeds: str = "equal"
    step_time: str = "5ms"
    target: str = field(default="")

    def words(self) -> list[str]:
        """Return the words of the command line after `stretto`."""
        named = (("--recipe", self.recipe), ("--network", self.network), ("--speeds", self.speeds))
        options = [word for name, value in named if value not in ("instant", "equal") for word in (name, value)]
        timed = ["--step-time", self.step_time, "--seed", str(self.seed)]
        return ["simulate", "-n", str(self.workers), *options, *timed, str(SCRIPT), *self.args.split()]

    def command(self) -> str:
        """Return the command line."""
        return shlex.join(["stretto", *self.words()])

    def simulation(self) -> Simulation:
        """Return the simulation for this process."""
        script, args = ROOT / SCRIPT, tuple(self.args.split())
        order = RunConfig(script, args, workers=self.workers, recipe=self.recipe, seed=self.seed, output="none")
        costs, links = cost_model.parse(self.step_time), network.parse(self.network)
        return check(Simulation(order, costs, links, speeds.parse(self.speeds)))

    def run(self) -> Found:
        """Simulate, and return the results."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(Path(folder))

    def _run(self, folder: Path) -> Found:
        simulation = self.simulation()
        write_run(folder, simulation.record(), BEGAN)
        try:
            simulate(simulation, folder, DiscardedOutput(), lambda: None)
        except LaunchError as error:
            if "finite" not in str(error):
                raise
        return {**self._place(), **measured(folder, self.target)}

    def _place(self) -> Found:
        return {"values": dict(self.values), "seed": self.seed, "workers": self.workers, "command": self.command()}


def measured(folder: Path, target: str = "") -> Found:
    """Return the results of a run directory. Seconds are virtual; `drift` is the mean over the ends of epochs.

    The drift is the largest relative distance of a worker's parameters from their mean, `|x_i - x| / |x|`.
    """
    found, told = run_record.record(folder), run_log.read(folder)
    reached = Target.parse(target).reached(found["evaluations"]) if target else None
    drifts = [event["drift"] for event in told.of("epoch") if event.get("drift") is not None]
    sent = found["bytes_sent"]
    return {
        "finite": found["failed"] is None,
        "accuracy": CHANCE if found["failed"] else found["metrics"].get("test_accuracy"),
        "loss": None if found["failed"] else found["metrics"].get("test_loss"),
        "seconds": found["seconds"],
        "seconds_to_target": reached and reached["seconds"],
        "samples_to_target": reached and reached["samples"],
        "samples_per_second": found["samples_per_second"],
        "samples": found["samples"],
        "staleness": found["staleness"],
        "drift": fmean(drifts) if drifts else None,
        "megabytes_a_worker": sum(sent) / len(sent) / 1e6,
    }


def where(points: Iterable[Found], values: Values) -> list[Found]:
    """Return the points with these values: one for each seed."""
    return [one for one in points if all(one["values"].get(name) == value for name, value in values.items())]


def distinct(points: Iterable[Found], name: str) -> list[Any]:
    """Return the values of one name, in the order of the grid."""
    return list(dict.fromkeys(one["values"][name] for one in points if name in one["values"]))


def mean(points: Sequence[Found], what: str) -> float | None:
    """Return the mean over points, or None if one of them has no value."""
    numbers = [one[what] for one in points]
    return None if not numbers or None in numbers else fmean(numbers)


def spread(points: Sequence[Found], what: str) -> float:
    """Return the standard deviation over points, 0 for a single point."""
    numbers = [one[what] for one in points]
    return stdev(numbers) if len(numbers) > 1 else 0.0
