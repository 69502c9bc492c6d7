"""Deterministic assignment of an epoch's batches to workers that train in lockstep, under a changing membership.

No worker is asked which samples another one gets: every member runs the same state machine, applies the same membership
changes and computes the same assignment. A member that learns of a change later than the others still assigns the
global steps that they have assigned, and reaches the same state. The state machine knows positions in the epoch's
order, not the samples at these positions.
"""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stretto.data.shares import (
    SMALLEST_SHARE,
    UNLIMITED,
    Limits,
    Pace,
    Paces,
    limits_of,
    listed,
    of_members,
    portion,
    share_cuts,
    stricter,
    unlisted,
)

Range: TypeAlias = tuple[int, int]
"""Half-open range of positions in the epoch's order: first, stop."""

Ranges: TypeAlias = tuple[Range, ...]
"""Positions that one worker gets in one global step."""

Rule: TypeAlias = Literal["whole", "shares"]
"""Division of the batches into global steps and parts of them; see `BatchAssignment`."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One worker's part of a global step, with the sample count of the whole step.

    `ranges` holds the worker's positions; `samples` is their number. `total` is the number of samples of all workers
    whose work in this step counts. `loaded` are the positions that the worker loads: its own, or, if it has none, those
    of the first member, over which it makes a pass of weight 0. A worker that joined after the step loads nothing.
    """

    ranges: Ranges
    samples: int
    total: int
    loaded: Ranges


class _StepLayout(Protocol):
    """Division of a global step's positions among its members."""

    @property
    def samples(self) -> int:
        """Number of samples in all parts."""
        ...

    def part(self, rank: int) -> Ranges:
        """Return the positions of the member with index `rank` in the list of members; the first ones have some."""
        ...


@dataclass(slots=True)
class _WholeBatches:
    """Whole batches, one for each member."""

    bounds: Sequence[int]
    first: int
    stop: int

    @property
    def samples(self) -> int:
        return self.bounds[self.stop] - self.bounds[self.first]

    def part(self, rank: int) -> Ranges:
        batch = self.first + rank
        return ((self.bounds[batch], self.bounds[batch + 1]),) if batch < self.stop else ()


@dataclass(slots=True)
class _ReturnedRanges:
    """Ranges, one for each member."""

    ranges: Ranges

    @property
    def samples(self) -> int:
        return _samples(self.ranges)

    def part(self, rank: int) -> Ranges:
        return self.ranges[rank : rank + 1]


@dataclass(slots=True)
class _Split:
    """Concatenated ranges that are split evenly, the larger parts first, or as `paces` and `limits` of the members say.

    If the parts would have fewer than `SMALLEST_SHARE` samples, the first members have such parts, the others none.
    """

    ranges: Ranges
    members: int
    paces: tuple[Pace, ...] = ()
    limits: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return _samples(self.ranges)

    @property
    def parts(self) -> int:
        return min(max(self.samples // SMALLEST_SHARE, 1), self.members)

    def part(self, rank: int) -> Ranges:
        if (found := share_cuts(self.samples, self.members, self.paces, self.limits)) is not None:
            return _slice(self.ranges, *found[rank : rank + 2])
        return _slice(self.ranges, *portion(self.samples, rank, self.parts)) if rank < self.parts else ()


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive global steps with the same members: those after step `after`, starting at batch `batch`.

    A global step that contains returned positions is a segment of one step: `ranges` holds all its positions. Under the
    rule "shares" `ranges` holds the returned positions that are spread over the `steps` steps of the segment.
    """

    after: int
    members: tuple[int, ...]
    batch: int
    ranges: Ranges
    steps: int = 0
    paces: tuple[Pace, ...] = ()
    """Paces of the members, by which they have shares; none for even shares."""
    limits: tuple[int, ...] = ()
    """Largest shares of the members; none if no worker has one."""

    def spread(self, step: int) -> int:
        """Return the number of returned positions in the first `step` steps; the last steps have the larger parts."""
        each, over = divmod(_samples(self.ranges), self.steps)
        return each * step + max(step - (self.steps - over), 0)


@dataclass(frozen=True, slots=True)
class _PendingChange:
    """A change of members that takes effect after global step `after`; `returned`: the positions that it returns."""

    members: tuple[int, ...]
    after: int
    committed: int
    limits: Limits
    returned: list[Range] = field(default_factory=list)


class BatchAssignment:
    """Assigns the batches of one epoch, one global step at a time. `sizes` are their numbers of samples, in order.

    In a global step each member gets one part, or none when there are too few; the first in the order of `members` have
    them. Under the rule "whole" a part is a batch, or a range of returned positions, which are assigned first.

    Under "shares" each batch is one global step, whose samples are divided evenly among the members of that moment:
    so there are as many global steps as batches. Returned positions are spread over the remaining ones,

        batches         0..11   12..23        24..34         35..45      (see `step_bounds`)
        members 0 1 2    0..3   12..15 |                                  worker 0; worker 2 had 20..23
        members 0 1                    | 20 21 24..28   22 23 35..39      worker 0

    as evenly as the larger batches allow: batches that differ by one sample stay so with them. No step gets more than
    the largest batch has; positions that are left then, or returned in the last step, make further steps. A share has
    at least `SMALLEST_SHARE` samples, so a step of fewer samples goes to the first members. With `paces` all members
    need about the same time for their shares (see `cuts`); `move` changes the paces. `limits` are the largest shares of
    some workers. With `share`, a step has at most that number of samples for each member. Where the number of members
    changes then, or samples are returned, or where the limits leave no room for a batch, all that is left is divided
    again, into as few steps of about one size as that allows.

    `bounds` replaces `sizes` (see `bounds_of`), so that many assignments over the same batches share one array.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        members: Sequence[int],
        rule: Rule = "whole",
        base: int | None = None,
        bounds: array[int] | None = None,
        paces: Paces | None = None,
        share: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.global_step = 0
        """Number of global steps assigned so far in this epoch."""
        self._bounds = bounds if bounds is not None else bounds_of(sizes)
        self._members = tuple(members)
        self._rule: Rule = rule
        self._base = base if base is not None else len(self._members)
        self._share, self._limits = share, limits or {}
        self._divided = self.largest_step()
        """Largest step by which the samples that are left were divided last."""
        self._shared_steps = len(self._bounds) - 1
        self._committed = 0
        self._next_batch, self._returned = 0, list[Range]()
        self._extra_samples = 0
        """Number of samples after those of the batches."""
        self._restored: tuple[int, int, Ranges] = (0, 0, ())
        """Work that was assigned before this object was restored: the number of batches, the number of extra samples,
        and the ranges of both that were not assigned."""
        self._segments: list[_Segment] = []
        self._is_open = False
        """True if the last segment can be continued with further global steps."""
        self._lost: dict[int, set[int]] = {}
        """By global step: the workers whose part of the step was returned."""
        self._pending: list[_PendingChange] = []
        self._paces: Paces = paces or {}
        self._moves: list[tuple[int, Paces]] = []
        """Paces that apply after a global step, in order."""
        self._joined_after: dict[int, int] = {}
        """By member: the global step after which it joined, unless it is a member from the start."""
        self.is_extended = False
        """True if all loops ask for more global steps than `steps`."""

    def next(self, me: int) -> RankBatch | None:
        """Assign the next global step and return the part of worker `me`; None if nothing is left to assign.

        A later membership change can return positions; then there is a next global step again.
        """
        if self._rule == "shares":
            if not self._enter_shares():
                return None
        else:
            if not self._returned and self._next_batch == len(self._bounds) - 1:
                return None
            if self._returned or not self._is_open:
                taken = self._take_returned()
                self._segments.append(_Segment(self.global_step, self._members, self._next_batch, taken))
                self._is_open = not taken
            if self._is_open:
                self._next_batch = min(self._next_batch + len(self._members), len(self._bounds) - 1)
        self.global_step += 1
        for change in self._pending:
            self._return_parts(change, self.global_step)
        rank_batch = self._rank_batch(me)
        self._take_effect()
        return rank_batch

    def commit(self) -> None:
        """Note that all global steps assigned so far are in the agreed state."""
        self._committed = max(self._committed, self.global_step)

    def change(self, members: Sequence[int], after: int, committed: int, limits: Limits = MappingProxyType({})) -> None:
        """Replace the members from the global step after `after` on; earlier steps are assigned as before.

        Global steps up to `committed` count, with the work of removed members; the parts of removed members in later
        steps up to `after` are returned. A worker that is removed and joins again counts as a new member. A change
        takes effect after all earlier changes, even if the remaining members have not reached these yet. From then on
        `limits` hold, too.
        """
        effective_after = max([after, *(change.after for change in self._pending)])
        if not (self.global_step <= after and self._committed <= committed <= effective_after):
            state = f"{self.global_step} are assigned and {self._committed} committed"
            raise ValueError(f"change after {after} global steps with {committed} committed, but {state}")
        previous_members, self._committed = self._latest_members, committed
        limits = stricter(self._latest_limits, limits)
        self._pending.append(_PendingChange(tuple(members), effective_after, committed, limits))
        for number in range(committed + 1, self.global_step + 1):
            self._return_parts(self._pending[-1], number)
        former = set(previous_members)
        self._joined_after = {
            worker: self._joined_after.get(worker, 0) if worker in former else effective_after for worker in members
        }
        self._take_effect()

    def move(self, paces: Paces, after: int) -> None:
        """Divide the global steps after `after` by these paces.

        Moves take effect in their order. All members call this between the same two global steps.
        """
        self._moves.append((max([after, self.global_step, *(step for step, _ in self._moves)]), paces))
        self._take_effect()

    def uncommitted_samples(self, worker: int) -> int:
        """Return the number of a worker's samples in global steps that are not committed."""
        numbers = range(self._committed + 1, self.global_step + 1)
        return sum(_samples(self._part(self._segment_of(number), number, worker)) for number in numbers)

    def uncommitted_ranges(self, worker: int) -> Ranges:
        """Return the positions of a worker in global steps that are not committed."""
        numbers = range(self._committed + 1, self.global_step + 1)
        return tuple(span for number in numbers for span in self._part(self._segment_of(number), number, worker))

    def apply_pending(self) -> None:
        """Apply all pending changes now: no further global step will be assigned before them."""
        self._pending = [replace(change, after=min(change.after, self.global_step)) for change in self._pending]
        self._take_effect()

    def returned_ranges(self) -> Ranges:
        """Return the positions that were returned and have not been assigned again."""
        pending = chain.from_iterable(change.returned for change in self._pending)
        return tuple(sorted([*self._returned, *self._unspread(), *pending]))

    def append_samples(self, samples: int) -> None:
        """Append samples after all others: work of an earlier epoch that was lost and has to be repeated."""
        start = self._bounds[-1] + self._extra_samples
        self._extra_samples += samples
        if not self._pending:
            self._close_segment()
        (self._pending[-1].returned if self._pending else self._returned).append((start, start + samples))

    def last_step_samples(self) -> Callable[[int], int]:
        """Return a function from a worker to its number of samples in the last global step, without returned ones.

        Nothing is computed before the function is called: calls are rare, and there may be many workers.
        """
        segment, number, removed = self._segments[-1], self.global_step, self._lost.get(self.global_step, ())
        return lambda worker: 0 if worker in removed else _samples(self._assigned(segment, number, worker))

    def counts_of_departed(self) -> NDArray[np.uint8]:
        """Return how often each position is in committed work of ended incarnations or in work from before `restored`.

        Added to `own_counts` of all members, the counts are 1 everywhere at the end of the epoch. An object that was
        restored when its worker joined counts the other members' earlier work here; so use the counts of the worker
        that joined first.
        """
        batch, extra, unassigned = self._restored
        counts = np.zeros(self._bounds[-1] + self._extra_samples, np.uint8)
        counts[: self._bounds[batch]] = 1
        counts[self._bounds[-1] : self._bounds[-1] + extra] = 1
        for start, stop in unassigned:
            counts[start:stop] = 0
        for segment, numbers in self._committed_steps():
            for worker in set(segment.members) - self._unrestarted(segment):
                self._add(counts, segment, numbers, worker)
        return counts

    def samples_of_departed(self) -> dict[int, int]:
        """Return the number of samples in `counts_of_departed` by worker; -1 has the work from before `restored`."""
        batch, extra, unassigned = self._restored
        before = self._bounds[batch] + extra - _samples(unassigned)
        samples = {-1: before} if before else {}
        for segment, numbers in self._committed_steps():
            for worker in set(segment.members) - self._unrestarted(segment):
                parts = (_samples(self._part(segment, number, worker)) for number in numbers)
                samples[worker] = samples.get(worker, 0) + sum(parts)
        return samples

    def own_counts(self, me: int) -> NDArray[np.uint8]:
        """Return how often each position is in the committed work of a member since it joined."""
        counts = np.zeros(self._bounds[-1] + self._extra_samples, np.uint8)
        for segment, numbers in self._committed_steps():
            if me in self._unrestarted(segment):
                self._add(counts, segment, numbers, me)
        return counts

    def upcoming(self, me: int) -> Iterator[Ranges]:
        """Yield the positions that a worker loads in the coming steps if no further change happens. Assigns nothing."""
        return self.copied().rest(me)

    def rest(self, me: int) -> Iterator[Ranges]:
        """Yield the positions that a worker loads in the coming global steps; assign each step when it is requested."""
        return (rank_batch.loaded for rank_batch in iter(lambda: self.next(me), None))

    def copied(self) -> BatchAssignment:
        """Return an independent copy in the same state."""
        assignment = copy.copy(self)
        assignment._returned, assignment._segments, assignment._lost = (
            self._returned.copy(),
            self._segments.copy(),
            self._lost.copy(),
        )
        assignment._pending = [replace(change, returned=change.returned.copy()) for change in self._pending]
        assignment._moves = self._moves.copy()
        return assignment

    def state(self) -> dict[str, Any]:
        """Return the whole state as numbers and bytes. Raises ValueError if a global step is not committed or a change
        is pending.

        Positions that are not assigned yet count as not committed.
        """
        if self._committed != self.global_step or self._pending:
            raise ValueError(
                f"only {self._committed} of {self.global_step} global steps are committed, or a change is pending"
            )
        return {
            "global_step": self.global_step,
            "batch": self._next_batch,
            "extra_samples": self._extra_samples,
            "returned": list(chain.from_iterable(self.returned_ranges())),
            "rule": self._rule,
            "base": self._base,
            "sizes": _packed(self._bounds),
            "paces": listed(self._paces),
            "moves": [(step, listed(paces)) for step, paces in self._moves],
            "limits": [*self._limits.items()],
            "is_extended": self.is_extended,
            "divided": self._divided,
            "steps": self._shared_steps,
        }

    @classmethod
    def restored(
        cls, state: dict[str, Any], members: Sequence[int], share: int | None = None, limits: Limits | None = None
    ) -> BatchAssignment:
        """Return an assignment that continues from a state with these members. All work in the state is that of ended
        incarnations.

        A state of an earlier version, with another rule than today's, continues with whole batches.
        """
        rule: Rule = "shares" if state["rule"] == "shares" else "whole"
        paces = unlisted(state.get("paces", []))
        assignment = cls((), members, rule, state["base"], _unpacked(state["sizes"]), paces, share, limits)
        assignment._divided = state.get("divided", assignment.largest_batch())
        assignment._shared_steps = state.get("steps", len(assignment._bounds) - 1)
        assignment._moves = [(step, unlisted(rows)) for step, rows in state.get("moves", [])]
        assignment.global_step = assignment._committed = state["global_step"]
        assignment._next_batch, assignment._extra_samples = state["batch"], state["extra_samples"]
        assignment._returned = list(zip(state["returned"][::2], state["returned"][1::2], strict=True))
        assignment.is_extended = state.get("is_extended", False)
        assignment._restored = (assignment._next_batch, assignment._extra_samples, tuple(assignment._returned))
        return assignment

    @classmethod
    def from_settled(cls, bounds: array[int], settled: Iterable[int], workers: int) -> BatchAssignment:
        """Return the assignment of batches that were leased one by one; batches that are not settled are returned."""
        assignment, settled_batches = cls((), (), base=workers, bounds=bounds), set(settled)
        assignment._next_batch = max(settled_batches, default=-1) + 1
        assignment._returned = [
            (bounds[batch], bounds[batch + 1])
            for batch in range(assignment._next_batch)
            if batch not in settled_batches
        ]
        return assignment

    def remaining(self) -> Ranges:
        """Return all positions that are still to be assigned, in order: returned ones and batches not assigned yet.

        Batches that are whole global steps are divided among `base` workers.
        """
        batches: Iterable[Range] = zip(
            self._bounds[self._next_batch : -1], self._bounds[self._next_batch + 1 :], strict=True
        )
        if self._rule == "shares":
            whole = [_Split((batch,), self._base) for batch in batches]
            batches = chain.from_iterable(one.part(rank) for one in whole for rank in range(one.parts))
        return tuple(sorted([*self.returned_ranges(), *batches]))

    @property
    def samples(self) -> int:
        """Number of samples of the batches, without extra samples."""
        return self._bounds[-1]

    @property
    def assigned_samples(self) -> int:
        """Number of samples that were assigned and not returned, including extra samples."""
        return self._bounds[self._next_batch] + self._extra_samples - _samples(self.returned_ranges())

    @property
    def has_more(self) -> bool:
        """True if positions are still to be assigned, or were returned."""
        return self._next_batch < len(self._bounds) - 1 or bool(self.returned_ranges())

    @property
    def steps(self) -> int:
        """Number of global steps of an epoch in which no worker fails, as it was divided last."""
        return self._shared_steps if self._rule == "shares" else -(-(len(self._bounds) - 1) // max(self._base, 1))

    @property
    def is_at_end(self) -> bool:
        """True if no step follows, or only such as a failure has added, for which no loop has asked."""
        return not self.has_more or (self.global_step >= self.steps and not self.is_extended)

    @property
    def has_moves(self) -> bool:
        """True if a move has not taken effect."""
        return bool(self._moves)

    @property
    def committed(self) -> int:
        """Number of global steps whose work is in the agreed state."""
        return self._committed

    @property
    def rule(self) -> Rule:
        """Division of the batches into global steps."""
        return self._rule

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the next global step."""
        return self._members

    @property
    def _latest_members(self) -> tuple[int, ...]:
        """Members after all known changes."""
        return self._pending[-1].members if self._pending else self._members

    @property
    def _latest_limits(self) -> Limits:
        """Limits after all known changes."""
        return self._pending[-1].limits if self._pending else self._limits

    def _enter_shares(self) -> bool:
        """Enter the next global step under the rule "shares"; return False if nothing is left to assign."""
        if not self._is_open:
            self._divide_again()
        batches = len(self._bounds) - 1 - self._next_batch
        if not self._is_open:
            returned = _samples(self._returned)
            if not (batches or returned):
                return False
            taken, steps = returned, batches
            if returned:
                largest = max(self.largest_step(), SMALLEST_SHARE)
                room = min(largest, self._room - largest)
                taken = min(returned, batches * room) if batches else returned
                steps = batches or -(-returned // largest)
            ranges, self._returned = _slice(self._returned, 0, taken), list(_slice(self._returned, taken, returned))
            paces, limits = of_members(self._paces, self._members), limits_of(self._limits, self._members)
            self._segments.append(
                _Segment(self.global_step, self._members, self._next_batch, ranges, steps, paces, limits)
            )
        self._next_batch += batches > 0
        self._is_open = self.global_step + 1 < self._segments[-1].after + self._segments[-1].steps
        return True

    def _divide_again(self) -> None:
        """Divide all that is left into other steps, if the members have other room than that of the batches."""
        largest, end = self.largest_step(), len(self._bounds) - 1
        has_changed = self._share is not None and (bool(self._returned) or largest != self._divided)
        if has_changed or (self._next_batch < end and largest < self.largest_batch()):
            self._returned = sorted([*self._returned, (self._bounds[self._next_batch], self._bounds[-1])])
            self._next_batch, self._divided = end, largest
            self._shared_steps = self.global_step + -(-_samples(self._returned) // largest)

    def largest_step(self) -> int:
        """Return the largest number of samples of a global step, without returned ones."""
        return min(self._share * len(self._members) if self._share else self.largest_batch(), self._room)

    @property
    def _room(self) -> int:
        """Number of samples for which the members of the next global step have room."""
        return sum(limits_of(self._limits, self._members)) if self._limits else UNLIMITED

    @property
    def has_room(self) -> bool:
        """True if the members after all known changes have room for the largest batch."""
        limits = limits_of(self._latest_limits, self._latest_members)
        return not limits or sum(limits) >= self.largest_batch()

    def largest_batch(self) -> int:
        """Return the number of samples of the largest batch."""
        return int(np.diff(np.frombuffer(self._bounds, np.int64)).max(initial=0))

    def _unspread(self) -> Ranges:
        """Return the positions that the last segment spreads over global steps which are not assigned yet."""
        if not (self._is_open and self._segments[-1].ranges and self._rule == "shares"):
            return ()
        segment = self._segments[-1]
        return _slice(segment.ranges, segment.spread(self.global_step - segment.after), _samples(segment.ranges))

    def _close_segment(self) -> None:
        """End the last segment; positions that it has not spread are returned."""
        self._returned = sorted([*self._returned, *self._unspread()])
        self._is_open = False

    def _take_returned(self) -> Ranges:
        """Remove and return the positions of the next global step if there are returned positions, else ()."""
        if not self._returned:
            return ()
        self._refill(self._next_batch + len(self._members) - len(self._returned))
        spans, self._returned = self._returned[: len(self._members)], self._returned[len(self._members) :]
        return tuple(spans)

    def _refill(self, stop: int) -> None:
        """Append whole batches up to batch `stop` to the returned positions."""
        stop = max(self._next_batch, min(stop, len(self._bounds) - 1))
        self._returned += zip(
            self._bounds[self._next_batch : stop], self._bounds[self._next_batch + 1 : stop + 1], strict=True
        )
        self._next_batch = stop

    def _layout(self, segment: _Segment, number: int) -> _StepLayout:
        members = len(segment.members)
        if self._rule == "shares":
            step = number - segment.after - 1
            batch = segment.batch + step
            ranges = _slice(segment.ranges, segment.spread(step), segment.spread(step + 1)) if segment.ranges else ()
            if batch < len(self._bounds) - 1:
                ranges = *ranges, (self._bounds[batch], self._bounds[batch + 1])
            return _Split(ranges, members, segment.paces, segment.limits)
        if segment.ranges:
            return _ReturnedRanges(segment.ranges)
        first = segment.batch + (number - segment.after - 1) * members
        return _WholeBatches(self._bounds, first, min(first + members, len(self._bounds) - 1))

    def _segment_of(self, number: int) -> _Segment:
        """Return the segment that contains a global step."""
        return self._segments[bisect_left(self._segments, number, key=lambda segment: segment.after) - 1]

    def _part(self, segment: _Segment, number: int, worker: int) -> Ranges:
        """Return a worker's positions in a global step, without returned ones."""
        return () if worker in self._lost.get(number, ()) else self._assigned(segment, number, worker)

    def _assigned(self, segment: _Segment, number: int, worker: int) -> Ranges:
        rank = bisect_left(segment.members, worker)
        return self._layout(segment, number).part(rank) if segment.members[rank : rank + 1] == (worker,) else ()

    def _rank_batch(self, me: int) -> RankBatch:
        """Return the part of worker `me` in the last global step."""
        segment, removed = self._segments[-1], self._lost.get(self.global_step, ())
        layout = self._layout(segment, self.global_step)
        is_mine = self._joined_after.get(me, 0) <= segment.after  # else the part was an earlier incarnation's
        own_ranges = self._part(segment, self.global_step, me) if is_mine else ()
        lost = sum(_samples(layout.part(rank)) for rank, worker in enumerate(segment.members) if worker in removed)
        loaded = own_ranges or (layout.part(0) if is_mine and me in segment.members else ())
        return RankBatch(own_ranges, _samples(own_ranges), layout.samples - lost, loaded)

    def _return_parts(self, change: _PendingChange, number: int) -> None:
        """Add the parts that removed members had in a global step to the positions that a change returns."""
        segment, earlier = self._segment_of(number), self._lost.get(number, set())
        removed = set(segment.members).difference(change.members, earlier) if number > change.committed else set()
        for worker in removed:
            change.returned.extend(span for span in self._part(segment, number, worker) if span[0] < span[1])
        if removed:
            self._lost[number] = earlier | removed

    def _take_effect(self) -> None:
        """Apply changes and moves whose preceding global steps are all assigned."""
        while self._moves and self._moves[0][0] <= self.global_step:
            self._paces = self._moves.pop(0)[1]
            self._close_segment()
        while self._pending and self._pending[0].after == self.global_step:
            change = self._pending.pop(0)
            self._close_segment()
            self._members, self._limits = change.members, change.limits
            self._returned = sorted(self._returned + change.returned)

    def _unrestarted(self, segment: _Segment) -> set[int]:
        """Return the current members that have not been restarted since this segment."""
        return {worker for worker in self._latest_members if self._joined_after.get(worker, 0) <= segment.after}

    def _committed_steps(self) -> Iterator[tuple[_Segment, range]]:
        """Yield each segment with its committed global steps."""
        ends = [*(segment.after for segment in self._segments[1:]), self.global_step]
        for segment, end in zip(self._segments, ends, strict=False):
            yield segment, range(segment.after + 1, min(end, self._committed) + 1)

    def _add(self, counts: NDArray[np.uint8], segment: _Segment, numbers: range, worker: int) -> None:
        for start, stop in chain.from_iterable(self._part(segment, number, worker) for number in numbers):
            counts[start:stop] += 1


def bounds_of(sizes: Sequence[int]) -> array[int]:
    """Return the first position of each batch, and the end. Many assignments can share the result."""
    return array("q", accumulate(sizes, initial=0))


def step_bounds(samples: int, global_batch: int) -> array[int]:
    """Return the bounds of the fewest global steps that have at most `global_batch` samples each.

    They differ by at most one sample; the first ones are the larger ones.

    >>> list(step_bounds(23, 6)), list(step_bounds(24, 6)), list(step_bounds(0, 6))
    ([0, 6, 12, 18, 23], [0, 6, 12, 18, 24], [0])
    """
    steps = -(-samples // global_batch)
    return array("q", [portion(samples, step, steps)[0] for step in range(steps)] + [samples])


def _samples(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _slice(ranges: Sequence[Range], start: int, stop: int) -> Ranges:
    """Return the samples `start` to `stop` of concatenated ranges."""
    slices: list[Range] = []
    for low, high in ranges:
        first, last = low + max(start, 0), min(high, low + stop)
        if first < last:
            slices.append((first, last))
        start, stop = start - (high - low), stop - (high - low)
    return tuple(slices)


def _packed(bounds: Sequence[int]) -> bytes:
    """Return the batch sizes, run-length encoded."""
    rows = groupby(stop - start for start, stop in pairwise(bounds))
    return np.array([(len(list(row)), size) for size, row in rows], "<i8").tobytes()


@lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> array[int]:
    """Return the bounds of batches. Assignments that one process restores from the same state share the array."""
    numbers = np.frombuffer(packed, "<i8")
    return bounds_of(np.repeat(numbers[1::2], numbers[::2]).tolist())
