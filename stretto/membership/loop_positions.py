"""Where workers are in their scripts' loops: exchanges of all are compared, so that loops of unequal length are named.

All workers make the same exchanges in the same order. Two workers that take part in the exchange of the same number at
different places of the loop will never agree again: that is found here, before a time-out is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from stretto.errors import explain

Kind: TypeAlias = Literal["tensors", "all_gather", "broadcast"]
"""Kind of an exchange: a mean or messages of a codec; the bytes of every worker; the bytes of one worker."""
COMING, LOOP, CLOSED, OVER = 1, 2, 3, 4
"""Phases of a script: before its first epoch, in the loop, after the end of an epoch, after its last line."""
EVEN = "for batch in loader: ..., and break or exit by what is the same on every worker"
"""What to type for loops of equal length."""
KEPT = 4
"""Number of exchanges of which it is remembered where the first worker was."""


class LoopPosition(msgspec.Struct, array_like=True, frozen=True):
    """Phase of the script, number of the epoch from 1, and number of the step: the one under way, or the last one."""

    phase: int = COMING
    epoch: int = 0
    step: int = 0

    @property
    def section(self) -> tuple[int, int]:
        """What all workers that take part in one exchange have in common."""
        return self.phase, self.epoch if self.phase != OVER else 0


class Waits(msgspec.Struct, array_like=True, frozen=True):
    """The exchange that a worker waits in: its number, its kind, and where the worker is."""

    exchange: int
    kind: Kind
    place: LoopPosition

    def fits(self, other: Waits) -> bool:
        """Return whether both can be one exchange. A worker that has just come fits everywhere."""
        if COMING in (self.place.phase, other.place.phase):
            return True
        return (self.kind, self.place.section) == (other.kind, other.place.section)


class Exchanges:
    """The last exchanges of all, by number. Finds two workers that do not take part in the same one."""

    def __init__(self) -> None:
        self._first: dict[int, Waits] = {}

    def differs(self, waits: Waits) -> bool:
        """Note where a worker waits; return whether another one waits elsewhere in the exchange of that number."""
        if waits.place.phase == COMING:
            return False
        first = self._first.setdefault(waits.exchange, waits)
        for old in sorted(self._first)[:-KEPT]:
            del self._first[old]
        return not waits.fits(first)


def are_apart(places: Iterable[LoopPosition]) -> bool:
    """Return whether workers that take part in one exchange are at different places of their loops."""
    return len({one.section for one in places if one.phase != COMING}) > 1


def explained(places: Mapping[int, LoopPosition]) -> str:
    """Return the error text for loops of unequal length.

    >>> print(explained({0: LoopPosition(LOOP, 1, 4), 1: LoopPosition(CLOSED, 1, 3)}).splitlines()[0])
    worker 1 has left the loop in epoch 1 at step 3, worker 0 waits at step 4
    """
    return explain(
        sentence(places),
        got="loops of unequal length",
        expected="the same number of epochs and steps on every worker",
        to_type=EVEN,
    )


def sentence(places: Mapping[int, LoopPosition]) -> str:
    """Return where each worker is, those that are furthest first.

    >>> sentence({0: LoopPosition(LOOP, 2, 13), 1: LoopPosition(OVER, 1, 12), 2: LoopPosition(LOOP, 2, 13)})
    'worker 1 has ended its script in epoch 1 at step 12, workers 0 and 2 wait in epoch 2 at step 13'
    """
    groups: dict[LoopPosition, list[int]] = {}
    for worker in sorted(places):
        groups.setdefault(places[worker], []).append(worker)
    ordered = sorted((one for one in groups if one.phase != COMING), key=lambda one: (-one.phase, one.epoch, one.step))
    parts, epoch = [], None
    for place in ordered:
        parts.append(f"{named(groups[place])} {_at(place, len(groups[place]) > 1, place.epoch != epoch)}")
        epoch = place.epoch
    return ", ".join(parts)


def _at(place: LoopPosition, several: bool, with_epoch: bool) -> str:
    verb = {
        LOOP: "wait" if several else "waits",
        CLOSED: "have left the loop" if several else "has left the loop",
        OVER: "have ended their scripts" if several else "has ended its script",
    }[place.phase]
    return f"{verb}{f' in epoch {place.epoch}' * with_epoch} at step {place.step}"


def named(workers: list[int]) -> str:
    """Return how workers are called in a sentence.

    >>> named([3]), named([0, 1, 2])
    ('worker 3', 'workers 0, 1 and 2')
    """
    if len(workers) == 1:
        return f"worker {workers[0]}"
    if len(workers) > 8:
        return f"workers {', '.join(map(str, workers[:7]))} and {len(workers) - 7} more"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"
