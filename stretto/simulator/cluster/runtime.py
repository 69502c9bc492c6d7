"""What a simulated worker stands in: the world's clock, the world's pace, one log for all."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from stretto.errors import LaunchError, explain
from stretto.events import EventLog, LogFile
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.runtime.runtime import Runtime
from stretto.simulator.compute.speed import Pace as Speed
from stretto.simulator.engine import Worker

MOST_DEATHS = 1000
"""So many in a row, or ten of each worker where those are more, and no more samples seen: it would go on for ever."""
RECORDING = 16
"""Of so many workers the script's own numbers are kept."""
LINES_PER_S = 16.0
"""Progress of all workers together, in events per second of virtual time, where there are many."""


class SharedLog(LogFile):
    """The log of all workers, and one for each further section of them: open until the simulation has ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._others: dict[Path, SharedLog] = {}

    def of(self, folder: Path) -> SharedLog:
        """Return the log in a folder: this one, or that of a section."""
        if folder == self.path.parent:
            return self
        if folder not in self._others:
            self._others[folder] = SharedLog(folder / self.path.name)
        return self._others[folder]

    def close(self) -> None:
        """A worker has no more to say."""

    def end(self) -> None:
        """All have ended."""
        super().close()
        for one in self._others.values():
            one.end()


class Limit:
    """When a simulation ends before the script does: after so many samples of all, or so many virtual seconds.

    Workers that exchange together end after the same hand: the first that none of them had begun when it was time.
    And it ends when processes die again and again, and all that comes of it is what there was before.
    """

    def __init__(self, samples: float = inf, time_s: float = inf, workers: int = 1) -> None:
        self._samples, self._time_s = samples, time_s
        self._deaths, self._most_deaths = 0, max(MOST_DEATHS, 10 * workers)
        self._most_samples = 0
        self.is_timed = time_s < inf
        """Whether it depends on when a worker asks."""
        self._begun = 0
        self._last: int | None = None
        self.is_over = False
        """Whether a worker that waits for nobody has been told to end."""

    def reached(self, hands: int, samples: int, t: float, free: bool) -> bool:
        """Whether a worker ends before its next hand, after so many. `samples` are those of all, as far as it knows.

        One that is `free` waits for nobody.
        """
        if samples > self._most_samples:
            self._most_samples, self._deaths = samples, 0
        if free:
            self.is_over = self.is_over or t >= self._time_s or self._most_samples >= self._samples
            return self.is_over
        if self._last is None and (t >= self._time_s or samples >= self._samples):
            self._last = max(self._begun, hands)
        if self._last is not None and hands >= self._last:
            return True
        self._begun = max(self._begun, hands + 1)
        return False

    def died(self, t: float) -> None:
        """A process was killed. Raises LaunchError when there have been too many for anything to come of it."""
        self._deaths += 1
        if self._deaths > self._most_deaths:
            problem = f"the run comes no further than {self._most_samples} samples at {t:g} s of virtual time"
            got = f"{self._most_deaths} deaths since that many were seen first"
            expected = "faults that leave time for a step, or from one cut of a server to the next"
            to_type = '--faults "kill worker every 10m", or a longer time than the one given'
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))


class SimPace:
    """Lets a hand's computing last as long as this worker takes for it."""

    def __init__(self, worker: Worker, speed: Speed, watch: Stopwatch) -> None:
        self._worker, self._speed, self._watch = worker, speed, watch
        self._step_s = self._done = 0.0

    def begin_pass(self) -> None:
        """A pass begins: so long it takes to make the loader's batches anew, and the books of the one before."""
        self._worker.work(self._worker.tariff.pass_s)

    def begin(self) -> None:
        """A hand begins."""
        worker = self._worker
        self._step_s = self._speed.step_s(worker.number, worker.steps, worker.now(), worker.tariff.step_s)
        self._done = 0.0
        worker.steps += 1

    def is_on(self) -> bool:
        """Whether a hand is being computed."""
        return self._watch.phase == "computing"

    def go_on(self, progress: float = 1.0) -> None:
        """So much of the hand's computing is done."""
        seconds, self._done = (progress - self._done) * self._step_s, max(progress, self._done)
        if seconds > 0:
            self._work(seconds)

    def _work(self, seconds: float) -> None:
        if self._worker.in_backward:
            self._worker.after_backward(lambda: self._work(seconds))
            return
        with self._watch.on("computing"):
            self._worker.work(seconds)


class SimRuntime(Runtime):
    """The surroundings of one worker."""

    def __init__(
        self,
        worker: Worker,
        speed: Speed,
        limit: Limit,
        log: SharedLog | None,
        on_begin: Callable[[Worker, nn.Module, Any], None],
        workers: int,
    ) -> None:
        super().__init__()
        self._worker, self._speed, self._limit, self._log = worker, speed, limit, log
        self._on_begin = on_begin
        self.free = False
        """Whether this worker waits for nobody."""
        self.flush_every_s = max(Runtime.flush_every_s, workers / LINES_PER_S)
        self.records = worker.number < RECORDING

    def clock(self) -> float:
        """This worker's virtual time."""
        return self._worker.now()

    def pace(self, watch: Stopwatch, slow: float) -> Pace:
        """The pace that the simulation asks for."""
        found = SimPace(self._worker, self._speed, watch)
        self._worker.computes, self._worker.is_at_work = found.go_on, found.is_on
        return found

    def after_backward(self, then: Callable[[], None]) -> None:
        """Behind the backward pass, when torch's engine is out of the way, and all that it has set off has left."""
        self._worker.at_end_of_backward(then)

    def log(self, folder: Path, worker: int) -> EventLog:
        """The log that all share."""
        assert self._log is not None
        return EventLog(self._log.of(folder), worker, keeps=0)

    def facts(self) -> dict[str, Any]:
        """A simulated worker is no process."""
        return {"pid": 0, "host": "simulated"}

    def loads(self, loader: DataLoader[Any]) -> int:
        """Batches are made in this process."""
        return 0

    def begins(self, model: nn.Module, loader: Any) -> None:
        """The script's data and model are known."""
        self._on_begin(self._worker, model, loader)

    def sees_enough(self, hands: int, samples: int, t: float) -> bool:
        """Whether it is time to end."""
        if self._limit.is_timed:
            self._worker.catch_up()  # who is asked later has begun later
        return self._limit.reached(hands, samples, t, self.free)

    def has_seen_enough(self) -> bool:
        """Whether one has ended before its last hand of the pass: nobody goes on to the next without it."""
        return self._limit.is_over
