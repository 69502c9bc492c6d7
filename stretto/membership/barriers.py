"""Barriers of the script at the coordinator: the positions of workers, and the workers still missing. A state machine.

A worker that comes to a barrier reports its `Position`, and asks again until no worker is missing:

    worker                       coordinator
      | -- Arrive(position, of) --> |     noted; the same message may come again
      | <-- Missing(workers) ------ |     empty: the worker continues; itself: it acts for all

The coordinator sends only replies, so neither a lost message nor a restarted coordinator can leave a worker waiting:
its next question has the same reply. A worker is not waited for when it is past the position: it has reported one that
is as far, or its heartbeats show a collective operation that the asking worker has not begun; such a worker waits for
the asking one there. A worker that failed, has left, or is being restarted is not waited for once training has begun.
A position of one worker `of`, which acts for all, is noted when it has acted; if it failed before, the first of the
others acts in its place.

A worker that acts may give a value. The first one of a position is that of all workers, also of a
restarted worker that comes to it again; it is kept in the coordinator's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

EVERYBODY = -1
NOBODY = -2
PAST = 1 << 62
"""Place of a worker that is past any position."""


class Position(msgspec.Struct, array_like=True, frozen=True):
    """A position in the script that is the same for all workers.

    `section` counts the calls of `distribute` (0 before the first), `place` the collective operations begun, and
    `index` the calls of this `label` since: workers that omit the calls of one label still meet at another.
    """

    section: int
    place: int
    label: str
    index: int

    @property
    def stretch(self) -> tuple[int, int]:
        """Part of the script between two collective operations."""
        return self.section, self.place


class Arrive(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Arrival of a worker at this position; `of` is the worker that it waits for, or one of two constants."""

    position: Position
    of: int = EVERYBODY
    value: bytes | None = None
    """Value that this worker gives to all, unless another one has."""


class Missing(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Workers that have not reached the position; the asking one alone, if it is to act in place of one that failed."""

    workers: list[int]
    value: bytes | None = None
    """Value of the position, once it was given."""


class Awaited(NamedTuple):
    """A worker that others may wait for: its incarnation, and the place in its heartbeats."""

    incarnation: int
    place: int


class Attendees(Protocol):
    """Source of the workers that a barrier waits for."""

    def awaited(self, in_training: bool, now: float) -> Mapping[int, Awaited]:
        """Return the workers that can still reach a barrier or are past it, before training or in it."""
        ...


class Values(Protocol):
    """The values that workers have given, by position."""

    def give(self, position: Position, value: bytes | None) -> bytes | None:
        """Give a value, unless it is None or the position has one; return that of the position, if there is one."""
        ...


class FirstValues:
    """The first value of each position."""

    def __init__(self) -> None:
        self._values: dict[Position, bytes] = {}

    def give(self, position: Position, value: bytes | None) -> bytes | None:
        """Give a value, unless it is None or the position has one; return that of the position, if there is one."""
        if value is not None:
            self._values.setdefault(position, value)
        return self._values.get(position)


class _Reached:
    """Progress of one incarnation: a part of the script, and the calls of each label in it."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._stretch = (0, -1)
        self._calls: dict[str, int] = {}

    def note(self, position: Position) -> None:
        """Note a position that the worker has reached; reports may be late."""
        if position.stretch > self._stretch:
            self._stretch, self._calls = position.stretch, {}
        if position.stretch == self._stretch:
            self._calls[position.label] = max(position.index, self._calls.get(position.label, 0))

    def is_as_far(self, position: Position) -> bool:
        """Return True if the worker has reached this position."""
        if position.stretch != self._stretch:
            return self._stretch > position.stretch
        return self._calls.get(position.label, 0) >= position.index


class Positions:
    """Positions that workers have reported."""

    def __init__(self) -> None:
        self._reached: dict[int, _Reached] = {}

    def note(self, worker: int, incarnation: int, position: Position) -> None:
        """Note a position of an incarnation."""
        if worker not in self._reached or self._reached[worker].incarnation < incarnation:
            self._reached[worker] = _Reached(incarnation)
        if self._reached[worker].incarnation == incarnation:
            self._reached[worker].note(position)

    def is_past(self, worker: int, known: Awaited, position: Position) -> bool:
        """Return True if this incarnation, or before training an earlier one, has reached a position."""
        reached = self._reached.get(worker)
        counts = reached is not None and (reached.incarnation == known.incarnation or not position.section)
        if counts and reached is not None and reached.is_as_far(position):
            return True
        return position.section > 0 and known.place > position.place

    def acting_for(self, of: int, worker: int, awaited: Mapping[int, Awaited], position: Position) -> int:
        """Return worker `of`, or the one that acts in its place: the first of the others and the asking `worker`."""
        # a restarted worker that is further may only have passed the position
        able = {n for n, known in awaited.items() if not known.incarnation or known.place <= position.place}
        has_acted = any(reached.is_as_far(position) for reached in self._reached.values())
        is_over = not position.section or has_acted or any(awaited[n].place > position.place for n in able)
        return of if is_over or of in able else min({*able, worker})


class Barriers:
    """The coordinator's replies to workers at barriers."""

    def __init__(self, attendees: Attendees, values: Values) -> None:
        self._attendees, self._values, self._positions = attendees, values, Positions()

    def receive(self, worker: int, incarnation: int, message: Arrive, now: float) -> Missing:
        """Note a worker's position; reply with the workers that have not reached it, and its value."""
        value = self._values.give(message.position, message.value)
        return Missing(self._missing(worker, incarnation, message, now) if value is None else [], value)

    def _missing(self, worker: int, incarnation: int, message: Arrive, now: float) -> list[int]:
        position, of = message.position, message.of
        if of in (EVERYBODY, NOBODY):
            self._positions.note(worker, incarnation, position)
        if of == NOBODY:
            return []
        awaited = self._attendees.awaited(position.section > 0, now)
        of = self._positions.acting_for(of, worker, awaited, position) if of != EVERYBODY else of
        if of == worker:
            return [worker]
        expected = (member for member in awaited if member != worker and of in (member, EVERYBODY))
        return sorted(member for member in expected if not self._positions.is_past(member, awaited[member], position))
