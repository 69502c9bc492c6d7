"""Runtime of a simulated worker: virtual time, modelled speed, and a log shared by all workers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from stretto.errors import LaunchError, explain
from stretto.events import EventLog, LogFile
from stretto.recipe.recipe import Recipe
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.runtime.runtime import Runtime
from stretto.simulator.compute.speed import Pace as Speed
from stretto.simulator.engine import Worker
from stretto.simulator.layouts.replica import Replica
from stretto.strategies.optimizers import Optimizers

MAX_FAILURES = 1000
"""Number of failures without progress in samples after which a run ends with an error; at least ten per worker."""
RECORDED_WORKERS = 16
"""Number of workers whose values passed to `log` are recorded."""
MAX_PROGRESS_PER_S = 16.0
"""Largest number of progress events of all workers together per second of virtual time."""


class SharedLog(LogFile):
    """Event log shared by all workers, and one for each further training section; open until the simulation ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._section_logs: dict[Path, SharedLog] = {}

    def for_folder(self, folder: Path) -> SharedLog:
        """Return the log of a folder: this one, or that of a training section."""
        if folder == self.path.parent:
            return self
        if folder not in self._section_logs:
            self._section_logs[folder] = SharedLog(folder / self.path.name)
        return self._section_logs[folder]

    def close(self) -> None:
        """Do nothing: other workers may still write."""

    def end(self) -> None:
        """Close all logs."""
        super().close()
        for log in self._section_logs.values():
            log.end()


class Limit:
    """Early end of a simulation, after a number of samples of all workers or of virtual seconds.

    Synchronous workers end after the same step: the first that none of them had started when the limit was reached.
    A run also ends, with an error, if processes keep failing without progress in samples.
    """

    def __init__(self, samples: float = inf, time_s: float = inf, workers: int = 1) -> None:
        self._samples, self._time_s = samples, time_s
        self._failures, self._max_failures = 0, max(MAX_FAILURES, 10 * workers)
        self._samples_seen = 0
        self.is_timed = time_s < inf
        """True if there is a limit of virtual time."""
        self._steps_started = 0
        self._last_step: int | None = None
        self.has_ended = False
        """True if an asynchronous worker has reached the limit."""

    def reached(self, steps: int, samples: int, t: float, asynchronous: bool) -> bool:
        """Return True if a worker ends before its next step.

        `steps` is the number of its steps so far, `samples` the number of samples of all workers that it knows of. An
        `asynchronous` worker ends without regard to others.
        """
        if samples > self._samples_seen:
            self._samples_seen, self._failures = samples, 0
        if asynchronous:
            self.has_ended = self.has_ended or t >= self._time_s or self._samples_seen >= self._samples
            return self.has_ended
        if self._last_step is None and (t >= self._time_s or samples >= self._samples):
            self._last_step = max(self._steps_started, steps)
        if self._last_step is not None and steps >= self._last_step:
            return True
        self._steps_started = max(self._steps_started, steps + 1)
        return False

    def count_failure(self, t: float) -> None:
        """Count a killed process. Raises LaunchError after too many without progress."""
        self._failures += 1
        if self._failures > self._max_failures:
            problem = f"the run makes no progress beyond {self._samples_seen} samples at {t:g} s of virtual time"
            got = f"{self._max_failures} failures since that many samples were reached"
            expected = "faults that leave time for a step, and from one snapshot of a server to the next"
            to_type = '--faults "kill worker every 10m", or a longer time than the one given'
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


class SimPace:
    """Spends the virtual time of this worker's computing."""

    def __init__(self, worker: Worker, speed: Speed, replica: Replica, watch: Stopwatch) -> None:
        self._worker, self._speed, self._replica, self._watch = worker, speed, replica, watch
        self._begun = 0, 0.0
        """Number of the step under way, and its start in virtual time."""
        self._step_s: float | None = 0.0
        """Seconds of the step under way; None before it is known: the first step may split the model."""
        self._progress = 0.0
        self._samples = 0

    def begin_epoch(self) -> None:
        """Spend the time of an epoch besides its steps: starting the loader and closing the previous epoch."""
        self._worker.compute(self._worker.cost_model.epoch_s)

    def begin(self, samples: int) -> None:
        """Start a step."""
        self._samples = samples
        self._begun = self._worker.steps, self._worker.now()
        self._step_s, self._progress = None, 0.0
        self._worker.steps += 1

    def go_on(self, progress: float = 1.0) -> None:
        """Spend time until this fraction of the step's computing is done."""
        if self._step_s is None:
            self._step_s = self._replica.step_s(self._scaled, self._samples)
        progress = progress if self._replica.overlaps else 1.0
        seconds, self._progress = (progress - self._progress) * self._step_s, max(progress, self._progress)
        if seconds > 0:
            self._compute(seconds)

    def _scaled(self, seconds: float) -> float:
        """Return the seconds that this worker takes in this step for some computing."""
        return self._speed.step_s(self._worker.number, *self._begun, seconds)

    def _compute(self, seconds: float) -> None:
        if self._worker.in_backward:
            self._worker.after_backward(lambda: self._compute(seconds))
            return
        with self._watch.on("computing"):
            self._worker.compute(seconds)


class SimRuntime(Runtime):
    """The runtime of one worker."""

    waits_in_backward = False

    def __init__(
        self,
        worker: Worker,
        speed: Speed,
        limit: Limit,
        log: SharedLog | None,
        on_begin: Callable[[Worker, nn.Module, Optimizers, Any, Recipe | None], None],
        workers: int,
        replica: Replica,
    ) -> None:
        super().__init__()
        self._worker, self._speed, self._limit, self._log = worker, speed, limit, log
        self._on_begin, self._replica = on_begin, replica
        self.asynchronous = False
        """True if this worker trains with an asynchronous recipe."""
        self.progress_interval_s = max(Runtime.progress_interval_s, workers / MAX_PROGRESS_PER_S)
        self.writes_metrics = worker.number < RECORDED_WORKERS

    def clock(self) -> float:
        """Return this worker's virtual time in seconds."""
        return self._worker.now()

    def pace(self, watch: Stopwatch, slow: float) -> Pace:
        """Return the pace that the simulation's speeds determine."""
        return SimPace(self._worker, self._speed, self._replica, watch)

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Call a function after the backward pass and after all calls that it deferred."""
        self._worker.at_end_of_backward(callback)

    def log(self, folder: Path, worker: int) -> EventLog:
        """Return this worker's event log, on the shared file."""
        assert self._log is not None
        return EventLog(self._log.for_folder(folder), worker, max_buffered=0)

    def process_info(self) -> dict[str, Any]:
        """Return the facts of a start event; a simulated worker has no process."""
        return {"pid": 0, "host": "simulated"}

    def loader_processes(self, loader: DataLoader[Any]) -> int:
        """Return 0: batches are loaded in this process."""
        return 0

    def on_distribute(self, model: nn.Module, optimizers: Optimizers, loader: Any, recipe: Recipe | None) -> None:
        """Report the arguments of the script's call of `distribute` to the simulator."""
        self._on_begin(self._worker, model, optimizers, loader, recipe)

    def ends_before_step(self, steps: int, samples: int, t: float) -> bool:
        """Return True if this worker has reached the limit."""
        if self._limit.is_timed:
            self._worker.catch_up()  # workers must be asked in order of virtual time
        return self._limit.reached(steps, samples, t, self.asynchronous)

    def ended_within_epoch(self) -> bool:
        """Return True if an asynchronous worker has ended within an epoch: no worker then starts the next epoch."""
        return self._limit.has_ended
