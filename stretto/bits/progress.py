"""What a person sees while methods run."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from stretto.bits.outcome import Outcome
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report import formatting


class Silent(ProgressDisplay):
    """Watches a run with the live line alone."""

    def note(self, text: str) -> None:
        """Keep a run's own notes to its log."""


EVERY = 20


class Progress:
    """A line that moves on a terminal, and a line when a method has ended."""

    def __init__(self, console: Console, count: int, quiet: bool) -> None:
        self._console, self._count, self._quiet = console, count, quiet
        self._status: Status | None = None
        self._title, self._place, self._begun = "", 0, 0.0

    def say(self, text: str) -> None:
        """Print a line, unless only the result is wanted."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def begin(self, name: str) -> None:
        """Something begins that takes a while; what came before it has ended."""
        self.close()
        self._title, self._begun = name, self._console.get_time()
        if self._quiet:
            return
        if self._console.is_terminal:
            self._status = self._console.status(Text(f"{name} ..."))
            self._status.start()

    def method(self, name: str) -> None:
        """A method begins."""
        self._place += 1
        self.begin(f"[{self._place} of {self._count}] {name}")

    def seen(self, rounds: int, error: float) -> None:
        """So many rounds were made."""
        if self._status is not None and rounds % EVERY == 0:
            self._status.update(Text(f"{self._title}: round {rounds:,}, objective error {error:.1e}"))

    def end(self, outcome: Outcome, *, timed: bool = True) -> None:
        """A method has ended; how long it took is told where it ran just now."""
        took = f", {formatting.seconds(self._console.get_time() - self._begun)}" if timed else ""
        self.close()
        state = "reached" if outcome.reached else "not reached"
        rounds = formatting.plural(outcome.rounds, "round")
        self.say(f"{self._title}: {state} in {rounds}, {outcome.uplink_bits:,} bits{took}")

    def watch(self) -> ProgressDisplay:
        """What watches a method that runs on worker processes."""
        return Silent(quiet=self._quiet or not self._console.is_terminal, title=self._title)

    def close(self) -> None:
        """Take the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None
