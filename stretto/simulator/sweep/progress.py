"""Progress display of a sweep: points done, points running, and the estimated remaining time."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status
from rich.text import Text

from stretto.report import formatting
from stretto.report.run_record import Record


class Progress:
    """A status line on terminals, and a line for each point that has ended."""

    def __init__(self, console: Console, count: int, jobs: int, say: Callable[[str], None], quiet: bool) -> None:
        self._console, self._count, self._jobs, self._say = console, count, jobs, say
        self._status: Status | None = console.status("") if console.is_terminal and not quiet else None
        self._start_times: dict[str, float] = {}
        self._done, self._durations = 0, list[float]()

    def completed_before(self, count: int) -> None:
        """Report the number of points that an earlier run of the sweep has completed."""
        self._done = count
        if count:
            self._say(f"{count} of {formatting.plural(self._count, 'point')} were done before")

    def begin(self, name: str) -> None:
        """Report that a point has started."""
        self._start_times[name] = self._console.get_time()
        self._update()

    def end(self, name: str, result: Record) -> None:
        """Report that a point has ended."""
        self._durations.append(self._console.get_time() - self._start_times.pop(name))
        self._done += 1
        texts = [summary(result), f"{formatting.seconds(self._durations[-1])} here", self.left()]
        self._say(f"[{self._done} of {self._count}] {name}: {', '.join(filter(None, texts))}")
        self._update()

    def left(self) -> str:
        """Return the estimated remaining time, from the mean time of the points that have ended."""
        remaining = self._count - self._done
        if not self._durations or not remaining:
            return ""
        seconds = remaining * sum(self._durations) / len(self._durations) / min(self._jobs, remaining)
        return f"about {formatting.duration(seconds)} left"

    def close(self) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()

    def _update(self) -> None:
        if self._status is None:
            return
        texts = [f"{self._done} of {self._count} points done", f"now {', '.join(self._start_times)}", self.left()]
        self._status.update(Text("; ".join(filter(None, texts))))
        self._status.start()


def summary(result: Record) -> str:
    """Return a short description of a point's result."""
    if result["failed"]:
        return f"failed: {result['failed']}"
    metrics = [f"{name} {formatting.figure(value, 4)}" for name, value in result["metrics"].items()]
    reached = result["seconds_to_target"]
    target = f"target after {formatting.seconds(reached)}" if reached is not None else ""
    trained = (
        f"{formatting.seconds(result['seconds'])} of virtual time on {formatting.count(result['samples'])} samples"
    )
    return ", ".join(filter(None, [trained, target, *metrics]))
