"""What a person sees while a sweep goes on: how many points are done, which run, how long it may still take."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status
from rich.text import Text

from stretto.report import formatting
from stretto.report.run_record import Record


class Progress:
    """A line that moves on a terminal, and a line for each point that has ended."""

    def __init__(self, console: Console, count: int, jobs: int, say: Callable[[str], None], quiet: bool) -> None:
        self._console, self._count, self._jobs, self._say = console, count, jobs, say
        self._moving: Status | None = console.status("") if console.is_terminal and not quiet else None
        self._begun: dict[str, float] = {}
        self._done, self._took = 0, list[float]()

    def kept(self, count: int) -> None:
        """So many points were whole before."""
        self._done = count
        if count:
            self._say(f"{count} of {formatting.plural(self._count, 'point')} were done before")

    def begin(self, name: str) -> None:
        """A point begins."""
        self._begun[name] = self._console.get_time()
        self._show()

    def end(self, name: str, found: Record) -> None:
        """A point has ended."""
        self._took.append(self._console.get_time() - self._begun.pop(name))
        self._done += 1
        texts = [outcome(found), f"{formatting.seconds(self._took[-1])} here", self.left()]
        self._say(f"[{self._done} of {self._count}] {name}: {', '.join(filter(None, texts))}")
        self._show()

    def left(self) -> str:
        """How long it may still take: as long for each point left as for those that have ended."""
        left = self._count - self._done
        if not self._took or not left:
            return ""
        seconds = left * sum(self._took) / len(self._took) / min(self._jobs, left)
        return f"about {formatting.duration(seconds)} left"

    def close(self) -> None:
        """Take the moving line away."""
        if self._moving is not None:
            self._moving.stop()

    def _show(self) -> None:
        if self._moving is None:
            return
        texts = [f"{self._done} of {self._count} points done", f"now {', '.join(self._begun)}", self.left()]
        self._moving.update(Text("; ".join(filter(None, texts))))
        self._moving.start()


def outcome(found: Record) -> str:
    """A point in a few words."""
    if found["failed"]:
        return f"failed: {found['failed']}"
    metrics = [f"{name} {formatting.figure(value, 4)}" for name, value in found["metrics"].items()]
    reached = found["seconds_to_target"]
    target = f"target after {formatting.seconds(reached)}" if reached is not None else ""
    return ", ".join(filter(None, [f"{formatting.seconds(found['seconds'])} of virtual time", target, *metrics]))
