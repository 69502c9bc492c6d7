"""Intervals between repeated actions: `5m` of time, or `20 rounds`."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from stretto.call_syntax import SMALLEST, Words
from stretto.units import TIMES, quantity, spelled

ROUNDS = dict.fromkeys(("r", "round", "rounds"), Decimal(1))


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
    rounds = quantity(text.strip(), ROUNDS)
    if rounds and rounds.is_integer():
        return Interval(rounds=int(rounds))
    words = Words(text, "--checkpoint-every", "5m", "a time (30s, 5m) or rounds (20 rounds, 20r)")
    time = words.quantity(TIMES, SMALLEST)
    words.end()
    return Interval(seconds=time)
