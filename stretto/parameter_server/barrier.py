"""What all ask together: laid down one by one, answered when it is whole. A plain state machine.

Answers do not depend on the order in which things came. What comes twice counts once; what a worker that has left can
no longer bring is refused to those who wait for it.

Members come and go. One that is gone without a word is waited for no more: what waits is answered to those who are
there, with what they brought. A newcomer is a member of every exchange that is laid after it came. Where a group of
members is fixed (`group`), an exchange is of all of them or of nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stretto.errors import TransportError, UnevenLoopsError

Thing = TypeVar("Thing")
Found = TypeVar("Found")

GENERATION = 1 << 32
"""The numbers of a generation's exchanges begin at so many times its number."""


@dataclass(frozen=True, slots=True)
class Told(Generic[Found]):
    """The answer for one worker in one exchange; `problem` says why there is none."""

    worker: int
    op: int
    found: Found | None
    problem: str = ""
    uneven: bool = False
    """Whether the workers' loops are of unequal length."""


@dataclass(slots=True)
class _Round(Generic[Thing]):
    laid: dict[int, Thing] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class KeyedBarrier(Generic[Thing, Found]):
    """Exchanges of all members, numbered. `combine` makes the answer of what each member has laid down."""

    def __init__(self, members: Iterable[int], combine: Callable[[Mapping[int, Thing]], Found]) -> None:
        self.members = set(members)
        self._combine = combine
        self._rounds: dict[int, _Round[Thing]] = {}
        self._ended: set[int] = set()
        self.left: set[int] = set()
        self._first = 0
        """Exchanges before this one are of a generation that is over."""

    def lay(self, worker: int, op: int, thing: Thing) -> list[Told[Found]]:
        """A worker lays something down for exchange `op`; returns what can be told now."""
        if worker not in self.members or op in self._ended or op < self._first or worker in self.left:
            return []
        self._rounds.setdefault(op, _Round()).laid.setdefault(worker, thing)
        return self._told(op)

    def know(self, op: int) -> list[int] | None:
        """Somebody has heard what an exchange came to: it is over. Who waits for it; None if it was over before."""
        if op in self._ended or op < self._first:
            return None
        round_ = self._rounds.setdefault(op, _Round())
        self._end(op)
        return sorted(round_.laid.keys() - round_.told)

    def leave(self, worker: int) -> list[Told[Found]]:
        """A worker has left on purpose: what waits for it is refused."""
        if worker not in self.members:
            return []
        self.left.add(worker)
        waiting = [op for op, round_ in self._rounds.items() if worker not in round_.laid]
        return [told for op in waiting for told in self._refused(op)]

    def drop(self, worker: int) -> list[Told[Found]]:
        """A worker is gone: what it laid is taken away, and those who are left wait for it no more."""
        if worker not in self.members or self._first:
            return []
        self.members.discard(worker)
        self.left.discard(worker)
        for round_ in self._rounds.values():
            round_.laid.pop(worker, None)
        self._rounds = {op: round_ for op, round_ in self._rounds.items() if round_.laid}
        return [told for op in sorted(self._rounds) for told in self._told(op)]

    def join(self, worker: int) -> None:
        """A newcomer is a member from now on."""
        self.members.add(worker)
        self.left.discard(worker)

    def group(self, generation: int, members: Iterable[int]) -> bool:
        """The next generation: what waited of older ones is dropped. Whether it was news."""
        if generation * GENERATION <= self._first:
            return False
        self._first, self.members = generation * GENERATION, set(members)
        self._rounds, self._ended, self.left = {}, set(), set()
        return True

    def _told(self, op: int) -> list[Told[Found]]:
        round_ = self._rounds[op]
        if self.members - round_.laid.keys():
            return self._refused(op) if self.left - round_.laid.keys() else []
        self._end(op)
        laid = {worker: round_.laid[worker] for worker in sorted(round_.laid)}
        try:
            found = self._combine(laid)
        except (ValueError, TransportError, UnevenLoopsError) as error:
            uneven = isinstance(error, UnevenLoopsError)
            return [Told(one, op, None, str(error), uneven) for one in laid if one not in round_.told]
        return [Told(one, op, found) for one in laid if one not in round_.told]

    def _refused(self, op: int) -> list[Told[Found]]:
        """Tell those that wait, once, that it won't become whole."""
        round_ = self._rounds[op]
        missing = ", ".join(map(str, sorted(self.left - round_.laid.keys())))
        waiting = sorted(round_.laid.keys() - round_.told)
        round_.told.update(waiting)
        return [Told(one, op, None, f"worker {missing} left (exchange {op})") for one in waiting]

    def _end(self, op: int) -> None:
        del self._rounds[op]
        self._ended.add(op)
        if len(self._ended) > 1000:
            self._ended -= {one for one in self._ended if one < op - 1000}
