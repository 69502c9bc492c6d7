"""What a person sees while a comparison goes on: where it is, and how long it may still take."""

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


class Silent(ProgressDisplay):
    """Watches a run with the live line alone: a comparison says a line of its own when a run has ended."""

    def note(self, text: str) -> None:
        """Keep a run's own notes to its log."""


class Progress:
    """Says where a comparison is. The time is the terminal's; only the estimate is made from it."""

    def __init__(self, trials: Sequence[Trial], console: Console, quiet: bool) -> None:
        self._trials, self._console, self._quiet = list(trials), console, quiet
        self._costs: list[Cost] = []
        self._begun = 0.0

    def begin(self, trial: Trial) -> ProgressDisplay:
        """A run begins: what shall watch it."""
        self._begun = self._console.get_time()
        title = ", ".join(filter(None, [f"run {self._place(trial)}", f"seed {trial.seed}", self._left()]))
        if not self._console.is_terminal:
            self.say(f"{self._name(trial)} ...")
        return Silent(quiet=self._quiet or not self._console.is_terminal, title=title)

    def end(self, trial: Trial, record: Record) -> None:
        """A run has ended."""
        took = self._console.get_time() - self._begun
        self._costs.append((trial, took))
        outcome = "failed" if record["failed"] else self._outcome(record, took)
        self.say("; ".join(filter(None, [f"{self._name(trial)}: {outcome}", self._left()])))

    def say(self, text: str) -> None:
        """Print a line, unless only the result is wanted."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def _outcome(self, record: Record, took: float) -> str:
        metrics = [f"{name} {formatting.figure(value, 4)}" for name, value in record["metrics"].items()]
        training = f"{formatting.seconds(record['seconds'])} of training" if record["seconds"] else ""
        return ", ".join(filter(None, [formatting.seconds(took), training, *metrics]))

    def _place(self, trial: Trial) -> str:
        return f"{self._trials.index(trial) + 1} of {len(self._trials)}"

    def _name(self, trial: Trial) -> str:
        joined = f" ×{trial.global_batch_of}" if trial.global_batch_of > 1 else ""
        seed = f", seed {trial.seed}" if self._trials[-1].seed else ""
        return f"[{self._place(trial)}] {trial.kind}{joined}, {formatting.plural(trial.workers, 'worker')}{seed}"

    def _left(self) -> str:
        seconds = estimate(self._trials[len(self._costs) :], self._costs)
        return f"about {formatting.duration(seconds)} left" if seconds else ""


def estimate(left: Sequence[Trial], costs: Sequence[Cost]) -> float | None:
    """Seconds that the trials left will take: as long as their like took, else as long as the others."""
    if not costs:
        return None
    everyone = statistics.fmean(seconds for _, seconds in costs)

    def one(trial: Trial) -> float:
        alike = [seconds for other, seconds in costs if _alike(trial, other)]
        return statistics.fmean(alike) if alike else everyone

    return sum(map(one, left))


def _alike(a: Trial, b: Trial) -> bool:
    return (a.recipe, a.workers, a.global_batch_of) == (b.recipe, b.workers, b.global_batch_of)
