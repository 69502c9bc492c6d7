"""Collective operations among a changing set of members: results once all members have contributed. A state machine.

Results do not depend on the order of arrival, and a contribution that arrives twice counts once. If a worker has left
and can contribute no more, the workers that wait for it get a refusal.

When a failed member is removed, pending operations complete with the contributions of the others. A joining member
takes part in every operation that is still pending or begins later. In a fixed generation (`group`) an operation
completes with all members or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stretto.errors import TransportError, UnevenLoopsError

ContributionT = TypeVar("ContributionT")
ResultT = TypeVar("ResultT")

GENERATION = 1 << 32
"""Operations of a generation are numbered from this multiple of the generation's number."""


@dataclass(frozen=True, slots=True)
class MemberResult(Generic[ResultT]):
    """Result of one operation for one worker, or the `problem` if there is none."""

    worker: int
    op: int
    result: ResultT | None
    problem: str = ""
    uneven: bool = False
    """True if the workers' loops are of unequal length."""


@dataclass(slots=True)
class _Round(Generic[ContributionT]):
    contributions: dict[int, ContributionT] = field(default_factory=dict)
    notified: set[int] = field(default_factory=set)


class KeyedBarrier(Generic[ContributionT, ResultT]):
    """Numbered collective operations of all members. `combine` computes the result from the members' contributions."""

    def __init__(self, members: Iterable[int], combine: Callable[[Mapping[int, ContributionT]], ResultT]) -> None:
        self.members = set(members)
        self._combine = combine
        self._rounds: dict[int, _Round[ContributionT]] = {}
        self._ended: set[int] = set()
        self.left: set[int] = set()
        self._first = 0
        """Operations with a smaller number belong to an earlier generation."""

    def contribute(self, worker: int, op: int, contribution: ContributionT) -> list[MemberResult[ResultT]]:
        """Store a worker's contribution to operation `op`; return the results that are complete now."""
        if not self.accepts(worker, op):
            return []
        self._rounds.setdefault(op, _Round()).contributions.setdefault(worker, contribution)
        return self._completed(op)

    def accepts(self, worker: int, op: int) -> bool:
        """Return True if a worker may contribute to operation `op`, which is not over."""
        return worker in self.members and op not in self._ended and op >= self._first and worker not in self.left

    def leave(self, worker: int) -> list[MemberResult[ResultT]]:
        """Note that a worker has left: operations that wait for it are refused."""
        if worker not in self.members:
            return []
        self.left.add(worker)
        waiting = [op for op, round_ in self._rounds.items() if worker not in round_.contributions]
        return [notified for op in waiting for notified in self._refusals(op)]

    def remove(self, worker: int) -> list[MemberResult[ResultT]]:
        """Remove a failed worker with its contributions; the others do not wait for it any more."""
        if worker not in self.members or self._first:
            return []
        self.members.discard(worker)
        self.left.discard(worker)
        for round_ in self._rounds.values():
            round_.contributions.pop(worker, None)
        self._rounds = {op: round_ for op, round_ in self._rounds.items() if round_.contributions}
        return [notified for op in sorted(self._rounds) for notified in self._completed(op)]

    def join(self, worker: int) -> None:
        """Add a member."""
        self.members.add(worker)
        self.left.discard(worker)

    def group(self, generation: int, members: Iterable[int]) -> bool:
        """Begin a generation and drop pending operations of older ones; return False if it is not new."""
        if generation * GENERATION <= self._first:
            return False
        self._first, self.members = generation * GENERATION, set(members)
        self._rounds, self._ended, self.left = {}, set(), set()
        return True

    def state(self) -> Any:
        """Return the state as plain values; None while an operation is in progress."""
        if any(round_.contributions for round_ in self._rounds.values()):
            return None
        return sorted(self.members), sorted(self.left), sorted(self._ended), self._first

    def load_state(self, state: Any) -> None:
        """Load a state."""
        self.members, self.left, self._ended = map(set, state[:3])
        self._first = state[3]

    def _completed(self, op: int) -> list[MemberResult[ResultT]]:
        round_ = self._rounds[op]
        if self.members - round_.contributions.keys():
            return self._refusals(op) if self.left - round_.contributions.keys() else []
        self._end(op)
        contributions = {worker: round_.contributions[worker] for worker in sorted(round_.contributions)}
        try:
            result = self._combine(contributions)
        except (ValueError, TransportError, UnevenLoopsError) as error:
            uneven = isinstance(error, UnevenLoopsError)
            return [
                MemberResult(worker, op, None, str(error), uneven)
                for worker in contributions
                if worker not in round_.notified
            ]
        return [MemberResult(worker, op, result) for worker in contributions if worker not in round_.notified]

    def _refusals(self, op: int) -> list[MemberResult[ResultT]]:
        """Refuse a pending operation, once, to the workers that wait for it."""
        round_ = self._rounds[op]
        missing = ", ".join(map(str, sorted(self.left - round_.contributions.keys())))
        waiting = sorted(round_.contributions.keys() - round_.notified)
        round_.notified.update(waiting)
        return [MemberResult(worker, op, None, f"worker {missing} left (exchange {op})") for worker in waiting]

    def _end(self, op: int) -> None:
        del self._rounds[op]
        self._ended.add(op)
        if len(self._ended) > 1000:
            self._ended -= {ended_op for ended_op in self._ended if ended_op < op - 1000}
