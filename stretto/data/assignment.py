"""The deal of one pass to workers that all exchange together, some of whom may die, leave or come.

Nobody is asked who gets what: every member runs the same machine, tells it the same things, and comes to the same
pieces. A member that hears of a change later than others still deals the hands that they have been dealt, and ends
where they are. The machine knows positions in the order of the pass, not the samples that stand there.
"""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Range: TypeAlias = tuple[int, int]
"""Positions of the order: the first, and the one behind the last."""

Pieces: TypeAlias = tuple[Range, ...]
"""What one worker gets in one hand."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What a worker gets of one hand, and what it knows of the others.

    `own` is empty for an idle worker; `samples` are its own, `total` those of all whose work in this hand counts.
    `short` says that some of these got none.
    """

    own: Pieces
    samples: int
    total: int
    short: bool


class _Shape(Protocol):
    """How a hand is laid out."""

    @property
    def samples(self) -> int:
        """Those of all pieces."""
        ...

    @property
    def pieces(self) -> int:
        """How many there are; the first members have them."""
        ...

    def piece(self, rank: int) -> Pieces:
        """That of the member with so many before it."""
        ...


@dataclass(slots=True)
class _Batches:
    """Whole batches, one for each member."""

    bounds: Sequence[int]
    first: int
    stop: int

    @property
    def samples(self) -> int:
        return self.bounds[self.stop] - self.bounds[self.first]

    @property
    def pieces(self) -> int:
        return self.stop - self.first

    def piece(self, rank: int) -> Pieces:
        at = self.first + rank
        return ((self.bounds[at], self.bounds[at + 1]),) if at < self.stop else ()


@dataclass(slots=True)
class _Items:
    """Ranges, one for each member."""

    ranges: Pieces

    @property
    def samples(self) -> int:
        return _samples(self.ranges)

    @property
    def pieces(self) -> int:
        return len(self.ranges)

    def piece(self, rank: int) -> Pieces:
        return self.ranges[rank : rank + 1]


@dataclass(slots=True)
class _Even:
    """Ranges laid end to end and cut evenly; earlier members get the larger pieces."""

    ranges: Pieces
    members: int

    @property
    def samples(self) -> int:
        return _samples(self.ranges)

    @property
    def pieces(self) -> int:
        return min(self.samples, self.members)

    def piece(self, rank: int) -> Pieces:
        each, over = divmod(self.samples, self.members)
        start = each * rank + min(rank, over)
        return _cut(self.ranges, start, start + each + (rank < over))


@dataclass(frozen=True, slots=True)
class _Run:
    """Hands that were dealt to the same members: those behind hand `after`, from `batch` on.

    A hand with something in it that was given back is a run by itself: `taken` is all that is in it.
    """

    after: int
    members: tuple[int, ...]
    batch: int
    taken: Pieces


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of members that takes effect behind hand `after`; `back` is what is given back then."""

    members: tuple[int, ...]
    after: int
    committed: int
    back: list[Range] = field(default_factory=list)


class BatchAssignment:
    """Deals the batches of one pass, hand by hand. `sizes` are their samples, in order.

    In a global step each member gets one piece, or none when there are too few; the first in the order of `members`
    have them. Returned positions are assigned first, lowest first. Under the rule "per-worker-batch" a piece is a
    batch, or returned positions. Under "global-batch" a global step has the samples of `base` batches for any number of
    members, cut evenly; with `base` members and nothing returned, each gets a batch as under "per-worker-batch".

    `bounds` can be given in place of counting them (see `bounds_of`), for many deals over the same batches.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        members: Sequence[int],
        rule: Literal["per-worker-batch", "global-batch"] = "per-worker-batch",
        base: int | None = None,
        bounds: array[int] | None = None,
    ) -> None:
        self.hand = 0
        """The hands dealt so far in this pass."""
        self._bounds = bounds if bounds is not None else bounds_of(sizes)
        self._members = tuple(members)
        self._rule: Literal["per-worker-batch", "global-batch"] = rule
        self._base = base if base is not None else len(self._members)
        self._committed = 0
        self._batch, self._pool = 0, list[Range]()
        self._more = 0
        """Samples behind those of the batches."""
        self._found: tuple[int, int, Pieces] = (0, 0, ())
        """What was dealt before this machine began: the batches before this one, and so many more samples, without
        these ranges."""
        self._runs: list[_Run] = []
        self._open = False
        """Whether the last run goes on."""
        self._lost: dict[int, set[int]] = {}
        """By hand: those whose piece of it was given back."""
        self._coming: list[_Change] = []
        self._since: dict[int, int] = {}
        """By member: the hand after which it came, where that is not the beginning."""

    def next(self, me: int) -> RankBatch | None:
        """Deal the next hand; None when nothing is left for anybody, unless somebody gives something back."""
        if not self._pool and self._batch == len(self._bounds) - 1:
            return None
        if self._pool or not self._open:
            self._runs.append(_Run(self.hand, self._members, self._batch, self._take()))
            self._open = not self._runs[-1].taken
        if self._open:
            self._batch = min(self._batch + self._step(self._members), len(self._bounds) - 1)
        self.hand += 1
        for change in self._coming:
            self._give_back(change, self.hand)
        portion = self._portion(me)
        self._take_effect()
        return portion

    def commit(self) -> None:
        """All hands dealt so far are in the agreed state."""
        self._committed = max(self._committed, self.hand)

    def change(self, members: Sequence[int], after: int, committed: int) -> None:
        """Let others be members from the hand behind `after` on; until then hands are dealt as before.

        Hands up to `committed` count, with the work of those who are gone; what later hands up to `after` give to
        these goes back. A worker that is gone and comes back later is a newcomer. A change waits for those that were
        told before it, even where those who are left have not come so far yet.
        """
        until = max([after, *(change.after for change in self._coming)])
        if not (self.hand <= after and self._committed <= committed <= until):
            known = f"{self.hand} with {self._committed} are known"
            raise ValueError(f"{after} hands with {committed} committed, but {known}")
        before, self._committed = self._latest, committed
        self._coming.append(_Change(tuple(members), until, committed))
        for number in range(committed + 1, self.hand + 1):
            self._give_back(self._coming[-1], number)
        there = set(before)
        self._since = {worker: self._since.get(worker, 0) if worker in there else until for worker in members}
        self._take_effect()

    def pending(self, worker: int) -> int:
        """The samples of a worker in hands that are not committed."""
        numbers = range(self._committed + 1, self.hand + 1)
        return sum(_samples(self._piece(self._run(number), number, worker)) for number in numbers)

    def uncommitted(self, worker: int) -> Pieces:
        """What a worker has in hands that are not committed."""
        numbers = range(self._committed + 1, self.hand + 1)
        return tuple(one for number in numbers for one in self._piece(self._run(number), number, worker))

    def end(self) -> None:
        """All that members knew of has been dealt: changes that were to come behind further hands have come."""
        self._coming = [replace(change, after=min(change.after, self.hand)) for change in self._coming]
        self._take_effect()

    def undealt(self) -> Pieces:
        """What was given back and not dealt again so far."""
        return tuple(sorted([*self._pool, *chain.from_iterable(change.back for change in self._coming)]))

    def extend(self, samples: int) -> None:
        """Put so many samples behind all others: work of an earlier pass that was lost, and is to be done again."""
        start = self._bounds[-1] + self._more
        self._more += samples
        (self._coming[-1].back if self._coming else self._pool).append((start, start + samples))

    def parts(self) -> Callable[[int], int]:
        """Tells of each worker its samples in the last hand, less what was given back until now.

        Nothing is computed before somebody is asked for: that is seldom, and there may be many workers.
        """
        run, number, lost = self._runs[-1], self.hand, self._lost.get(self.hand, ())
        return lambda worker: 0 if worker in lost else _samples(self._dealt(run, number, worker))

    def departed(self) -> NDArray[np.uint8]:
        """How often the committed work of ended lives has each position, and all work from before this machine.

        With `own` of all members it adds up to 1 everywhere when the pass is done: a machine that was restored when
        its worker came has the others' earlier work in here, so take this of the worker that has been there longest.
        """
        batch, more, without = self._found
        counts = np.zeros(self._bounds[-1] + self._more, np.uint8)
        counts[: self._bounds[batch]] = 1
        counts[self._bounds[-1] : self._bounds[-1] + more] = 1
        for start, stop in without:
            counts[start:stop] = 0
        for run, numbers in self._count():
            for worker in set(run.members) - self._alive(run):
                self._add(counts, run, numbers, worker)
        return counts

    def own(self, me: int) -> NDArray[np.uint8]:
        """How often each position is in the committed work of a member since it came."""
        counts = np.zeros(self._bounds[-1] + self._more, np.uint8)
        for run, numbers in self._count():
            if me in self._alive(run):
                self._add(counts, run, numbers, me)
        return counts

    def ahead(self, me: int) -> Iterator[Pieces]:
        """A worker's pieces of the hands to come, as long as nothing is heard that is not known now. Deals nothing."""
        twin = self.twin()
        return (portion.own for portion in iter(lambda: twin.next(me), None))

    def twin(self) -> BatchAssignment:
        """Another that stands where this one does."""
        twin = copy.copy(self)
        twin._pool, twin._runs, twin._lost = self._pool.copy(), self._runs.copy(), self._lost.copy()
        twin._coming = [replace(change, back=change.back.copy()) for change in self._coming]
        return twin

    def state(self) -> dict[str, Any]:
        """All there is to know when nothing is uncommitted: numbers and bytes. What was not dealt is not committed."""
        if self._committed != self.hand or self._coming:
            raise ValueError(f"of {self.hand} hands only {self._committed} are committed, or a change is to come")
        return {
            "hand": self.hand,
            "batch": self._batch,
            "more": self._more,
            "pool": list(chain.from_iterable(self._pool)),
            "rule": self._rule,
            "base": self._base,
            "sizes": _packed(self._bounds),
        }

    @classmethod
    def restored(cls, state: dict[str, Any], members: Sequence[int]) -> BatchAssignment:
        """Go on from a state with these members. All work in it is that of ended lives."""
        deal = cls((), members, state["rule"], state["base"], _unpacked(state["sizes"]))
        deal.hand = deal._committed = state["hand"]
        deal._batch, deal._more = state["batch"], state["more"]
        deal._pool = list(zip(state["pool"][::2], state["pool"][1::2], strict=True))
        deal._found = (deal._batch, deal._more, tuple(deal._pool))
        return deal

    @classmethod
    def of_settled(cls, bounds: array[int], settled: Iterable[int], workers: int) -> BatchAssignment:
        """That of batches which were handed out one by one: what is not settled was given back."""
        deal, done = cls((), (), base=workers, bounds=bounds), set(settled)
        deal._batch = max(done, default=-1) + 1
        deal._pool = [(bounds[one], bounds[one + 1]) for one in range(deal._batch) if one not in done]
        return deal

    def left(self) -> Pieces:
        """All that is still to be dealt, in order: what was given back, and the batches that nobody has had."""
        batches = zip(self._bounds[self._batch : -1], self._bounds[self._batch + 1 :], strict=True)
        return tuple(sorted([*self.undealt(), *batches]))

    @property
    def samples(self) -> int:
        """Those of the batches, without what was put behind them."""
        return self._bounds[-1]

    @property
    def handed(self) -> int:
        """Those that were dealt and not given back, with what was put behind the batches."""
        return self._bounds[self._batch] + self._more - _samples(self.undealt())

    @property
    def committed(self) -> int:
        """The hands whose work is in the agreed state."""
        return self._committed

    @property
    def members(self) -> tuple[int, ...]:
        """Who gets something in the next hand."""
        return self._members

    @property
    def _latest(self) -> tuple[int, ...]:
        """The members behind all changes that are known."""
        return self._coming[-1].members if self._coming else self._members

    def _step(self, members: tuple[int, ...]) -> int:
        """The batches in a hand with nothing given back."""
        return len(members) if self._rule == "per-worker-batch" else self._base

    def _take(self) -> Pieces:
        """What is in the next hand, when something was given back."""
        if not self._pool:
            return ()
        if self._rule == "per-worker-batch":
            self._refill(self._batch + len(self._members) - len(self._pool))
            taken, self._pool = self._pool[: len(self._members)], self._pool[len(self._members) :]
            return tuple(taken)
        full = max(self._bounds[min(self._base, len(self._bounds) - 1)], 1)
        lacks = self._bounds[self._batch] + full - _samples(self._pool)
        self._refill(bisect_left(self._bounds, lacks, self._batch))
        pool, self._pool = self._pool, list(_cut(self._pool, full, _samples(self._pool)))
        return _cut(pool, 0, full)

    def _refill(self, stop: int) -> None:
        """Put whole batches up to `stop` behind what was given back."""
        stop = max(self._batch, min(stop, len(self._bounds) - 1))
        self._pool += zip(self._bounds[self._batch : stop], self._bounds[self._batch + 1 : stop + 1], strict=True)
        self._batch = stop

    def _shape(self, run: _Run, number: int) -> _Shape:
        members = len(run.members)
        if run.taken:
            return _Items(run.taken) if self._rule == "per-worker-batch" else _Even(run.taken, members)
        step = self._step(run.members)
        first = run.batch + (number - run.after - 1) * step
        stop = min(first + step, len(self._bounds) - 1)
        if step == members:
            return _Batches(self._bounds, first, stop)
        return _Even(((self._bounds[first], self._bounds[stop]),), members)

    def _run(self, number: int) -> _Run:
        """The run that a hand is in."""
        return self._runs[bisect_left(self._runs, number, key=lambda run: run.after) - 1]

    def _piece(self, run: _Run, number: int, worker: int) -> Pieces:
        """What a worker got in a hand and has not given back."""
        return () if worker in self._lost.get(number, ()) else self._dealt(run, number, worker)

    def _dealt(self, run: _Run, number: int, worker: int) -> Pieces:
        rank = bisect_left(run.members, worker)
        return self._shape(run, number).piece(rank) if run.members[rank : rank + 1] == (worker,) else ()

    def _portion(self, me: int) -> RankBatch:
        """What `me` gets of the last hand."""
        run, lost = self._runs[-1], self._lost.get(self.hand)
        shape = self._shape(run, self.hand)
        mine = self._since.get(me, 0) <= run.after  # else it was that of an earlier life
        own = self._piece(run, self.hand, me) if mine else ()
        if not lost:
            return RankBatch(own, _samples(own), shape.samples, shape.pieces < len(run.members))
        counting = [shape.piece(rank) for rank, worker in enumerate(run.members) if worker not in lost]
        return RankBatch(own, _samples(own), sum(map(_samples, counting)), () in counting)

    def _give_back(self, change: _Change, number: int) -> None:
        """Keep for a change what a hand gave to those who are gone by then."""
        run, lost = self._run(number), self._lost.get(number, set())
        gone = set(run.members).difference(change.members, lost) if number > change.committed else set()
        for worker in gone:
            change.back.extend(one for one in self._piece(run, number, worker) if one[0] < one[1])
        if gone:
            self._lost[number] = lost | gone

    def _take_effect(self) -> None:
        """Change the members when all hands before are dealt."""
        while self._coming and self._coming[0].after == self.hand:
            change = self._coming.pop(0)
            self._members, self._open = change.members, False
            self._pool = sorted(self._pool + change.back)

    def _alive(self, run: _Run) -> set[int]:
        """Those who are members now and were the same life in this run."""
        return {worker for worker in self._latest if self._since.get(worker, 0) <= run.after}

    def _count(self) -> Iterator[tuple[_Run, range]]:
        """The runs with their committed hands."""
        ends = [*(run.after for run in self._runs[1:]), self.hand]
        for run, end in zip(self._runs, ends, strict=False):
            yield run, range(run.after + 1, min(end, self._committed) + 1)

    def _add(self, counts: NDArray[np.uint8], run: _Run, numbers: range, worker: int) -> None:
        for start, stop in chain.from_iterable(self._piece(run, number, worker) for number in numbers):
            counts[start:stop] += 1


def bounds_of(sizes: Sequence[int]) -> array[int]:
    """Where the batches begin, and the end: to be shared by many deals."""
    return array("q", accumulate(sizes, initial=0))


def _samples(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _cut(ranges: Sequence[Range], start: int, stop: int) -> Pieces:
    """The samples `start` to `stop` of ranges that are laid end to end."""
    found: list[Range] = []
    for low, high in ranges:
        first, last = low + max(start, 0), min(high, low + stop)
        if first < last:
            found.append((first, last))
        start, stop = start - (high - low), stop - (high - low)
    return tuple(found)


def _packed(bounds: Sequence[int]) -> bytes:
    """The sizes of batches: how many of one size come in a row, and the size."""
    rows = groupby(stop - start for start, stop in pairwise(bounds))
    return np.array([(len(list(row)), size) for size, row in rows], "<i8").tobytes()


@lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> array[int]:
    """Where the batches begin. Deals of one process that are restored from the same state share it."""
    numbers = np.frombuffer(packed, "<i8")
    return bounds_of(np.repeat(numbers[1::2], numbers[::2]).tolist())
