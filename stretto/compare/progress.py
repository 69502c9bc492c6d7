"""Progress of a comparison on the terminal: the current run, results, and an estimate of the time left."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from stretto.compare.trials import Trial
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report import formatting
from stretto.report.run_record import Record

Cost = tuple[Trial, float]


class LiveLineOnly(ProgressDisplay):
    """Display of a run with only its live line: the comparison prints a line when the run has ended."""

    def note(self, text: str) -> None:
        """Do not print notes of the run: its log has them."""


class Progress:
    """Prints the progress of a comparison. Times are measured by the terminal's clock, for the estimate only."""

    def __init__(self, trials: Sequence[Trial], console: Console, quiet: bool) -> None:
        self._trials, self._console, self._quiet = list(trials), console, quiet
        self._costs: list[Cost] = []
        self._started = 0.0

    def begin(self, trial: Trial) -> ProgressDisplay:
        """Print that a run starts, and return the display for it."""
        self._started = self._console.get_time()
        title = ", ".join(filter(None, [f"run {self._place(trial)}", f"seed {trial.seed}", self._time_left()]))
        if not self._console.is_terminal:
            self.say(f"{self._name(trial)} ...")
        return LiveLineOnly(quiet=self._quiet or not self._console.is_terminal, title=title)

    def end(self, trial: Trial, record: Record) -> None:
        """Print the result of a run."""
        took = self._console.get_time() - self._started
        self._costs.append((trial, took))
        outcome = "failed" if record["failed"] else self._outcome(record, took)
        self.say("; ".join(filter(None, [f"{self._name(trial)}: {outcome}", self._time_left()])))

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def _outcome(self, record: Record, took: float) -> str:
        metrics = [f"{name} {formatting.figure(value, 4)}" for name, value in record["metrics"].items()]
        training = f"{formatting.seconds(record['seconds'])} of training" if record["seconds"] else ""
        training += f" on {formatting.count(record['samples'])} samples" if training else ""
        return ", ".join(filter(None, [formatting.seconds(took), training, *metrics]))

    def _place(self, trial: Trial) -> str:
        return f"{self._trials.index(trial) + 1} of {len(self._trials)}"

    def _name(self, trial: Trial) -> str:
        joined = f" ×{trial.global_batch_of}" if trial.global_batch_of > 1 else ""
        seed = f", seed {trial.seed}" if self._trials[-1].seed else ""
        return f"[{self._place(trial)}] {trial.kind}{joined}, {_size(trial)}{seed}"

    def _time_left(self) -> str:
        seconds = estimate(self._trials[len(self._costs) :], self._costs)
        return f"about {formatting.duration(seconds)} left" if seconds else ""


def estimate(remaining: Sequence[Trial], costs: Sequence[Cost]) -> float | None:
    """Return the estimated seconds of the remaining trials, or None without costs.

    A trial takes the mean time of trials with the same recipe and workers, or of all trials if there are none.
    """
    if not costs:
        return None
    overall = statistics.fmean(seconds for _, seconds in costs)

    def expected(trial: Trial) -> float:
        similar = [seconds for measured_trial, seconds in costs if _is_similar(trial, measured_trial)]
        return statistics.fmean(similar) if similar else overall

    return sum(map(expected, remaining))


def _is_similar(a: Trial, b: Trial) -> bool:
    return (a.recipe, a.workers, a.global_batch_of) == (b.recipe, b.workers, b.global_batch_of)


def _size(trial: Trial) -> str:
    return f"{trial.workers} processes" if trial.layout else formatting.plural(trial.workers, "worker")
