"""Positions of workers in their scripts' loops, compared in collective operations to detect loops of unequal length.

All workers run the same collective operations in the same order. Two workers that are in the operation of the same
number at different positions of the loop can never match again: this is detected here, before a timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from stretto.errors import explain

Kind: TypeAlias = Literal["tensors", "all_gather", "broadcast"]
"""Kind of a collective operation: a mean or codec messages; bytes of every worker; bytes of one worker."""
COMING, LOOP, BETWEEN, CLOSED, OVER = 1, 2, 3, 4, 5
"""Phases of a script: before its first epoch, in the loop, between two steps or where the script leaves the loop, after
the end of an epoch, after its last line."""
EVEN = (
    "for i, batch in enumerate(loader): ..., and break, continue or exit by what is the same on every worker: steps "
    "are stretto.steps(); (0 * loss).backward() and a step leave out a batch of one worker"
)
"""Correction that the error text suggests."""
KEPT = 4
"""Number of recent operations whose first worker's position is stored."""


class LoopPosition(msgspec.Struct, array_like=True, frozen=True):
    """Phase of the script, number of the epoch from 1, and number of the step: the one under way, or the last one."""

    phase: int = COMING
    epoch: int = 0
    step: int = 0

    @property
    def section(self) -> tuple[int, int]:
        """Part of the position that all workers in one operation have in common."""
        return self.phase, self.epoch if self.phase != OVER else 0


class Waits(msgspec.Struct, array_like=True, frozen=True):
    """Collective operation that a worker waits in: its number, its kind, and the worker's position."""

    exchange: int
    kind: Kind
    place: LoopPosition

    def fits(self, other: Waits) -> bool:
        """Return True if both can be one operation. A worker that has just joined fits everywhere."""
        if COMING in (self.place.phase, other.place.phase):
            return True
        return (self.kind, self.place.section) == (other.kind, other.place.section)


class Exchanges:
    """The last collective operations, by number. Detects two workers that are in different operations."""

    def __init__(self) -> None:
        self._first: dict[int, Waits] = {}

    def differs(self, waits: Waits) -> bool:
        """Note where a worker waits; return True if another worker's operation of that number differs."""
        if waits.place.phase == COMING:
            return False
        first_waits = self._first.setdefault(waits.exchange, waits)
        for old_exchange in sorted(self._first)[:-KEPT]:
            del self._first[old_exchange]
        return not waits.fits(first_waits)


def are_apart(places: Iterable[LoopPosition]) -> bool:
    """Return True if workers in one operation are at different positions of their loops."""
    return len({place.section for place in places if place.phase != COMING}) > 1


def explained(places: Mapping[int, LoopPosition]) -> str:
    """Return the error text for loops of unequal length.

    >>> print(explained({0: LoopPosition(LOOP, 1, 4), 1: LoopPosition(CLOSED, 1, 3)}).splitlines()[0])
    worker 1 has left the loop in epoch 1 at step 3, worker 0 waits at step 4
    """
    return explain(
        sentence(places),
        got="loops of unequal length, or a step that one worker has left out",
        expected="the same number of epochs and steps on every worker",
        to_type=EVEN,
    )


def sentence(places: Mapping[int, LoopPosition]) -> str:
    """Return a sentence with each worker's position, the furthest first.

    >>> sentence({0: LoopPosition(LOOP, 2, 13), 1: LoopPosition(OVER, 1, 12), 2: LoopPosition(LOOP, 2, 13)})
    'worker 1 has ended its script in epoch 1 at step 12, workers 0 and 2 wait in epoch 2 at step 13'
    """
    groups: dict[LoopPosition, list[int]] = {}
    for worker in sorted(places):
        groups.setdefault(places[worker], []).append(worker)
    ordered = sorted(
        (place for place in groups if place.phase != COMING), key=lambda place: (-place.phase, place.epoch, place.step)
    )
    phrases, epoch = [], None
    for place in ordered:
        phrases.append(f"{named(groups[place])} {_at(place, len(groups[place]) > 1, place.epoch != epoch)}")
        epoch = place.epoch
    return ", ".join(phrases)


def _at(place: LoopPosition, several: bool, with_epoch: bool) -> str:
    verb = {
        LOOP: "wait" if several else "waits",
        BETWEEN: "are between two steps" if several else "is between two steps",
        CLOSED: "have left the loop" if several else "has left the loop",
        OVER: "have ended their scripts" if several else "has ended its script",
    }[place.phase]
    return f"{verb}{f' in epoch {place.epoch}' * with_epoch} at step {place.step}"


def named(workers: list[int]) -> str:
    """Return how a sentence names these workers.

    >>> named([3]), named([0, 1, 2])
    ('worker 3', 'workers 0, 1 and 2')
    """
    if len(workers) == 1:
        return f"worker {workers[0]}"
    if len(workers) > 8:
        return f"workers {', '.join(map(str, workers[:7]))} and {len(workers) - 7} more"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"
