"""Intervals between repeated actions: `5m` of time, `20 rounds`, or as often as a share of the time allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from stretto.call_syntax import SMALLEST, Words
from stretto.units import TIMES, quantity, spelled

ROUNDS = dict.fromkeys(("r", "round", "rounds"), Decimal(1))
NEVER = "never"
"""Word for an interval that does not end."""
SHARE = 0.03
"""Largest share of the time that work takes for which no user has typed an interval."""
MOST = 10
"""Largest number of times that such work is done in the time after which it is done first."""


def pause_after(cost_s: float) -> float:
    """Return the seconds after work of this cost until it is due again, if it may take `SHARE` of the time."""
    return cost_s / SHARE


@dataclass
class Interval:
    """Interval in seconds or rounds, printed as it can be typed.

    An interval that `follows_cost` was not typed: the action is due after these seconds first, and then as soon as its
    cost allows, at most `MOST` times in them. An action that fails ends no run.
    """

    seconds: float | None = None
    rounds: int | None = None
    follows_cost: bool = False
    cost_s: float = 0.0
    """Seconds that the last action has taken; 0 if that is not known, infinite if it is not to be tried again."""
    _last: tuple[float, int] | None = field(default=None, init=False, repr=False, compare=False)

    def due(self, now: float, rounds: int) -> bool:
        """Return True if the interval has passed since it was last due. The first call starts the first interval."""
        has_passed = self.has_passed(now, rounds)
        if has_passed:
            self._last = now, rounds
        return has_passed

    def has_passed(self, now: float, rounds: int) -> bool:
        """Return True if `due` would, which a caller then asks later."""
        last, wait_s = self._last or (now, rounds), self.seconds
        self._last = last
        if wait_s is None:
            return rounds - last[1] >= (self.rounds or 1)
        if self.follows_cost and self.cost_s:
            wait_s = max(wait_s / MOST, pause_after(self.cost_s))
        return now - last[0] >= wait_s

    @property
    def shortest_s(self) -> float | None:
        """Shortest time between two actions; None for one in rounds."""
        return self.seconds / MOST if self.seconds is not None and self.follows_cost else self.seconds

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
    words = Words(text, "--checkpoint-every", "5m", "a time (30s, 5m), rounds (20 rounds, 20r) or never")
    time = words.quantity(TIMES, SMALLEST)
    words.end()
    return Interval(seconds=time)
