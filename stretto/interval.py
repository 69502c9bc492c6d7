"""Intervals between repeated actions: `5m` of time, or `20 rounds`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stretto.errors import LaunchError, explain
from stretto.units import seconds, spelled

ROUNDS = re.compile(r"([1-9][0-9]{0,8})\s*(?:r|rounds?)", re.ASCII | re.IGNORECASE)


@dataclass
class Interval:
    """Interval in seconds or rounds, printed as it can be typed."""

    seconds: float | None = None
    rounds: int | None = None
    _last: tuple[float, int] | None = field(default=None, init=False, repr=False, compare=False)

    def due(self, now: float, rounds: int) -> bool:
        """Return True if the interval has passed since it was last due. The first call starts the first interval."""
        last = self._last = self._last or (now, rounds)
        due = now - last[0] >= self.seconds if self.seconds is not None else rounds - last[1] >= (self.rounds or 1)
        if due:
            self._last = now, rounds
        return due

    def __str__(self) -> str:
        return f"{spelled(self.seconds)}s" if self.seconds is not None else f"{self.rounds}r"


def every(text: str) -> Interval:
    """Read a time or a number of rounds. Raise LaunchError for any other text.

    >>> str(every("5m")), str(every("500ms")), str(every("20 rounds")), str(every("20r"))
    ('300s', '0.5s', '20r', '20r')
    """
    words = text.strip()
    rounds, time = ROUNDS.fullmatch(words), seconds(words)
    if rounds is not None:
        return Interval(rounds=int(rounds[1]))
    if time:
        return Interval(seconds=time)
    problem, expected = f"a checkpoint cannot be written every {text!r}", "a time (30s, 5m) or rounds (20 rounds, 20r)"
    raise LaunchError(explain(problem, got=words or "nothing", expected=expected, to_type="--checkpoint-every 5m"))
