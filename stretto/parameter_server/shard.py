"""One shard of a parameter server: it owns ranges of the parameters and applies what arrives. A plain state machine.

Versions count what was applied. A version's numbers never change once it is there, so a reader has one version whole
however long it takes to read. Every update carries its worker, its number, the version it was computed on and the
samples behind it; an update that comes twice is applied once.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stretto.parameter_server.framing import placed
from stretto.parameter_server.versioned_buffers import Version, Versions
from stretto.parameter_server.worker_record import Applied, Draft, WorkerRecord
from stretto.recipe.then import Arrived, OnParameters, Velocity, add, constant, delay_compensated, outer, pull, replace
from stretto.recipe.when import on_arrival

PIECE = 1 << 16
"""Numbers that are worked on at a time, so that the second operation finds them in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a worker sends: `numbers` are flat tensors, one for each range of the shard, each whole or cut in pieces.

    `seq` counts the worker's updates from 1; `version` is the one that it was computed on; `lr` is the learning rate
    inside it, for weights that need the gradient.
    """

    worker: int
    seq: int
    version: int
    samples: int
    numbers: Sequence[Sequence[Tensor]]
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker may go on, with this version; `applied` are its updates applied since its last reply.

    Whoever has read the version calls its `done`.
    """

    worker: int
    version: Version
    applied: tuple[Applied, ...]
    refused: tuple[int, ...] = ()
    """The numbers of updates that held NaN or infinity, and were left out."""


class Shard:
    """Ranges of the parameters, the workers that change them, and the rule by which.

    With one worker nothing is weighed or pulled: what it learned is taken as it is, so that it computes what it would
    alone.
    """

    def __init__(self, theta: Sequence[Tensor], when: on_arrival, then: OnParameters, workers: int) -> None:
        self._when, self._then, self._workers = when, then, workers
        if workers == 1:
            self._when = on_arrival(every=when.every, overlap=when.overlap)
            self._then = then if isinstance(then, replace) else _alone(then)
        self._weight = self._then.weight if isinstance(self._then, add) else constant(1.0)
        self.members = {worker: WorkerRecord() for worker in range(workers)}
        self._versions = Versions(theta)
        self._early: list[Update] = []
        self._group: list[tuple[Update, int]] = []
        self._sums: list[Tensor] = []
        self._velocity = [Velocity(one) for one in theta] if isinstance(self._then, outer) else []
        self._squares = self._mean_squares(theta)
        for member in self.members.values():
            self._remember(member)
        compensated = isinstance(self._weight, delay_compensated)
        self._drafts = isinstance(self._then, add) and self._when.collect == 1 and not compensated

    @property
    def current(self) -> Version:
        """The newest version."""
        return self._versions.newest

    @property
    def version(self) -> int:
        """How often something was applied."""
        return self.current.number

    @property
    def is_untouched(self) -> bool:
        """Whether no work on these parameters has come yet, not even what waits until it may be applied."""
        return not (self.version or self._group or self._early)

    # --- what workers say ---------------------------------------------------------------------------------------

    def push(self, update: Update) -> list[Reply]:
        """Take an update; apply it, once, when it is its time. Returns the replies that others were waiting for."""
        member = self.members.get(update.worker)
        if member is None or member.knows(update.seq):
            return []
        if member.outside or (member.rests and update.seq > member.since):
            member.rests = member.outside = False  # whoever goes on has met all
        if self._is_early(update.worker, update.seq):
            if all((one.worker, one.seq) != (update.worker, update.seq) for one in self._early):
                self._early.append(update)
            return []
        if self.moves_both and member.before is None:
            member.before = self.read()
        self._take(member, update)
        self._take_early()
        return self._release()

    def draft(self, worker: int, seq: int, version: int) -> bool:
        """Whether an update that begins to come in may be written piece by piece; `push` it when it is whole.

        Nothing of it is to be seen before that, and what others apply meanwhile is not lost.
        """
        self.drop(worker)
        member = self.members.get(worker)
        if member is None or seq != member.done + 1 or not self._drafts or self._is_early(worker, seq):
            return False
        staleness = self._staleness(member, version)
        member.draft = Draft(seq, self.read(), self._weight.of(staleness, self._workers), self._versions.spare())
        return True

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of the update has come: numbers `at` and following of a range."""
        draft = self.members[worker].draft
        assert draft is not None
        stop = at + piece.numel()
        draft.finite = draft.finite and is_finite((piece,))
        now, out = draft.base.ranges[index][at:stop], draft.following.ranges[index][at:stop]
        torch.add(now, piece, alpha=draft.weight, out=out)

    def drop(self, worker: int) -> None:
        """The rest of the update will not come: forget what has."""
        member = self.members.get(worker)
        if member is not None and (draft := member.draft) is not None:
            member.draft = None
            draft.base.done()
            self._versions.give_back(draft.following)

    @property
    def moves_both(self) -> bool:
        """Whether a worker and the server move by the same difference: it is told what was there before its update."""
        return isinstance(self._then, pull)

    def pull(self, worker: int) -> list[Reply]:
        """A worker asks for the newest version, and whether it may go on; it is answered now, or when it may."""
        if worker in self.members:
            self.members[worker].waits = True
        return self._release()

    def read(self, worker: int | None = None) -> Version:
        """The newest version, for a reader that calls its `done`; a worker may compute its next update on it."""
        if worker in self.members:
            self._remember(self.members[worker])
        return self._versions.read()

    def told(self, worker: int) -> tuple[Applied, ...]:
        """The worker's updates applied since it was last told."""
        member = self.members.get(worker)
        if member is None:
            return ()
        applied, member.applied = tuple(member.applied), []
        return applied

    def rest(self, worker: int, seq: int, meeting: int | None) -> list[Reply]:
        """A worker has come to a meeting of all after its update `seq`: it holds nobody back until all have come.

        From then on its rounds count anew. Without a meeting it only waits for what comes, and then goes on.
        """
        if member := self.members.get(worker):
            member.rests, member.outside = True, meeting is None
            if meeting is not None:
                member.since, member.meeting = max(seq, member.since), max(meeting, member.meeting)
        self._begin_anew()
        self._take_early()
        return self._release()

    def _begin_anew(self) -> None:
        """Whoever waited for all to come to its meeting rests no more once they have come to it, or to a later one.

        From where rounds count is each one's own, the same at all shards: a death may be heard before the last has come
        at one shard, and after it at another.
        """
        all_met = min((member.meeting for member in self.members.values()), default=0)
        for member in self.members.values():
            member.rests = member.rests and (member.outside or member.meeting > all_met)

    def flush(self) -> None:
        """Apply what has been collected though it is less than what was to be collected."""
        if self._group:
            self._apply_group()

    def join(self, worker: int) -> list[Reply]:
        """A newcomer, or a worker that begins anew; until it enters it holds nobody back."""
        replies = self.leave(worker)
        member = self.members[worker] = WorkerRecord(rests=True, outside=True)
        self._remember(member)
        return replies

    def all_outside(self) -> None:
        """All begin anew, and hold nobody back before they are heard of."""
        for member in self.members.values():
            member.rests = member.outside = True

    def has(self, worker: int, seq: int) -> bool:
        """Whether this update has come, though it may have to wait."""
        member = self.members.get(worker)
        early = any((one.worker, one.seq) == (worker, seq) for one in self._early)
        return early or (member is not None and member.knows(seq))

    def slowest(self) -> int:
        """The rounds of the slowest, where a newcomer may enter."""
        return int(found) if (found := self._slowest()) < math.inf else 0

    def enter(self, worker: int, clock: int) -> None:
        """A newcomer counts its rounds from there on, and others may have to wait for it."""
        if (member := self.members.get(worker)) is not None and member.outside:
            member.since, member.rests, member.outside = member.done - clock, False, False

    def leave(self, worker: int) -> list[Reply]:
        """A worker has left, or died: it holds nobody back any more, and nothing more is taken from it."""
        self.drop(worker)
        member = self.members.pop(worker, None)
        if member is None:
            return []
        for version in (*member.read.values(), *([member.before] if member.before else [])):
            version.done()
        self._early = [one for one in self._early if one.worker != worker]
        self._begin_anew()
        self._take_early()
        if self._group and len(self._group) >= self._enough:
            self._apply_group()
        return self._release()

    # --- a moment to come back to -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What has to be kept to come back to this moment, when nothing of any worker is under way."""
        self.flush()
        facts = {"ranges": len(self.current.ranges), "version": self.version, "arrivals": self.arrivals}
        return facts, [*self.current.ranges, *chain.from_iterable(self.memory().values())]

    def restore(self, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take up what was kept, in a shard that is new; its versions are counted on from there."""
        self.current.number = facts["version"]
        ranges, names = facts["ranges"], list(self.memory())
        for one, kept in zip(self.current.ranges, tensors[:ranges], strict=True):
            one.copy_(kept)
        self.take_up(named(names, tensors[ranges:], ranges), facts["arrivals"])
        for member in self.members.values():
            member.read.clear()
            self._remember(member)

    @property
    def arrivals(self) -> list[int]:
        """What has arrived of each range's momentum since it was last refreshed."""
        return [one.arrivals for one in self._velocity]

    def memory(self) -> dict[str, list[Tensor]]:
        """What the rule keeps besides the parameters, by name: a tensor for each range."""
        velocity = self._velocity
        kept = {"v": [one.v for one in velocity], "since": [one.since for one in velocity], "squares": self._squares}
        return {name: tensors for name, tensors in kept.items() if tensors}

    def take_up(self, kept: Mapping[str, Sequence[Tensor]], arrivals: Sequence[int]) -> None:
        """What a rule has kept, as far as this one keeps the like."""
        for name, tensors in self.memory().items():
            for one, before in zip(tensors, kept.get(name, tensors), strict=True):
                one.copy_(before)
        for velocity, arrived in zip(self._velocity, arrivals or self.arrivals, strict=bool(self._velocity)):
            velocity.arrivals = arrived

    # --- the bound ----------------------------------------------------------------------------------------------

    @property
    def _enough(self) -> int:
        """How many updates are applied at once: nobody waits for those of workers that are gone."""
        collect = self._when.collect
        return collect if collect > self._workers else min(collect, max(len(self.members), 1))

    def _slowest(self) -> float:
        """The rounds of the slowest of those that have not come to a meeting."""
        return min((member.clock for member in self.members.values() if not member.rests), default=math.inf)

    def _is_early(self, worker: int, seq: int) -> bool:
        """Whether an update's round, counted from 0, is beyond the bound."""
        bound, member = self._when.bound, self.members[worker]
        return bound is not None and not member.outside and seq - 1 - member.since > self._slowest() + bound

    def _take_early(self) -> None:
        while (fits := next((one for one in self._early if not self._is_early(one.worker, one.seq)), None)) is not None:
            self._early.remove(fits)
            self._take(self.members[fits.worker], fits)

    def _may_go_on(self, member: WorkerRecord) -> bool:
        bound = self._when.bound
        return bound is None or member.outside or member.clock + self._when.ahead - self._slowest() <= bound

    def _release(self) -> list[Reply]:
        """Answer all that wait and may go on."""
        free = [(worker, member) for worker, member in self.members.items() if member.waits]
        return [self._reply(worker, member) for worker, member in free if self._may_go_on(member)]

    def _reply(self, worker: int, member: WorkerRecord) -> Reply:
        member.waits = False
        applied = self.told(worker)
        refused, member.refused = tuple(member.refused), []
        self._remember(member)
        version, member.before = member.before or self.read(), None
        return Reply(worker, version, applied, refused)

    # --- applying -----------------------------------------------------------------------------------------------

    def _take(self, member: WorkerRecord, update: Update) -> None:
        member.note(update.seq)
        draft = self._draft_of(member, update)
        if not (draft.finite if draft is not None else all(map(is_finite, update.numbers))):
            member.refused.append(update.seq)
            if draft is not None:
                self.drop(update.worker)
            return
        staleness = self._staleness(member, update.version)
        if draft is not None:
            self._add_draft(member, update, draft, staleness)
        elif self._when.collect == 1 and isinstance(self._then, add):
            self._add(member, update, staleness)
        else:
            self._collect(member, update, staleness)
            if len(self._group) >= self._enough:
                self._apply_group()
        self._forget(member, update.version)

    def _draft_of(self, member: WorkerRecord, update: Update) -> Draft | None:
        """What was written of this update as it came in; forgotten if it has come whole after all."""
        if member.draft is None or member.draft.seq != update.seq:
            return None
        if any(update.numbers):
            self.drop(update.worker)
        return member.draft

    def _staleness(self, member: WorkerRecord, version: int) -> int:
        """Versions made since the one that was computed on, less those of the worker's own making."""
        own = len(member.own) - bisect.bisect_right(member.own, version)
        return max(self.version - version - own, 0)

    def _add(self, member: WorkerRecord, update: Update, staleness: int) -> None:
        """Asynchronous SGD: the next version in one pass over what came."""
        weight = self._weight.of(staleness, self._workers)
        following = self._versions.spare()
        numbers = self._compensated(member, update)
        for now, pieces, out in zip(self.current.ranges, numbers, following.ranges, strict=True):
            for at, piece in placed(pieces):
                stop = at + piece.numel()
                torch.add(now[at:stop], piece, alpha=weight, out=out[at:stop])
        self._publish_one(member, update, following, staleness)

    def _add_draft(self, member: WorkerRecord, update: Update, draft: Draft, staleness: int) -> None:
        """The next version has been written already, but perhaps on one that is no longer the newest."""
        member.draft = None
        weight = self._weight.of(staleness, self._workers)
        if draft.base is not self.current:
            for base, now, out in zip(draft.base.ranges, self.current.ranges, draft.following.ranges, strict=True):
                _rebase(out, base, now, weight / draft.weight if draft.weight else 0.0)
        draft.base.done()
        self._publish_one(member, update, draft.following, staleness)

    def _publish_one(self, member: WorkerRecord, update: Update, following: Version, staleness: int) -> None:
        self._versions.publish(following)
        member.own.append(self.version)
        member.applied.append(Applied(update.seq, self.version, staleness, update.samples))

    def _collect(self, member: WorkerRecord, update: Update, staleness: int) -> None:
        """Add the update, weighted by its staleness and its samples, to what waits to be applied."""
        if not self._sums:
            self._sums = [torch.empty_like(one) for one in self.current.ranges]
        if not self._group:
            for total in self._sums:
                total.zero_()
        weight = self._weight.of(staleness, self._workers) * max(update.samples, 0)
        for total, pieces in zip(self._sums, self._compensated(member, update), strict=True):
            for at, piece in placed(pieces):
                total[at : at + piece.numel()].add_(piece, alpha=weight)
        self._group.append((dataclasses.replace(update, numbers=()), staleness))  # they are in the sums

    def _apply_group(self) -> None:
        group, self._group = self._group, []
        samples = sum(max(update.samples, 0) for update, _ in group)
        arrived = Arrived(len(group), self._when.collect, self._workers)
        following = self._versions.spare()
        for index, (now, total, out) in enumerate(zip(self.current.ranges, self._sums, following.ranges, strict=True)):
            mean = total.div_(samples) if samples else self._nothing(now, total)
            self._then.arrive(now, mean, arrived, self._velocity[index] if self._velocity else None, out)
        self._versions.publish(following)
        for update, staleness in group:
            if member := self.members.get(update.worker):
                member.applied.append(Applied(update.seq, self.version, staleness, update.samples))
        if len({update.worker for update, _ in group}) == 1 and (only := self.members.get(group[0][0].worker)):
            only.own.append(self.version)

    def _nothing(self, now: Tensor, zeros: Tensor) -> Tensor:
        """What no samples say: no change, or where parameters are sent, that they are right."""
        return now if isinstance(self._then, replace | pull) else zeros

    # --- delay compensation ---------------------------------------------------------------------------------------

    def _mean_squares(self, theta: Sequence[Tensor]) -> list[Tensor]:
        weight = self._weight
        adaptive = isinstance(weight, delay_compensated) and weight.adaptive
        return [torch.zeros_like(one) for one in theta] if adaptive else []

    def _compensated(self, member: WorkerRecord, update: Update) -> Sequence[Sequence[Tensor]]:
        weight = self._weight
        if not isinstance(weight, delay_compensated) or not update.lr:
            return update.numbers
        old = member.read.get(update.version, self.current)
        whole = []
        for index, pieces in enumerate(update.numbers):
            squares = self._squares[index] if self._squares else None
            flat = torch.cat(tuple(pieces)) if pieces else self.current.ranges[index].new_empty(0)
            whole.append((weight.compensate(flat, update.lr, self.current.ranges[index], old.ranges[index], squares),))
        return whole

    def _remember(self, member: WorkerRecord) -> None:
        """The worker has the newest version now; what it computes on that may have to be compensated."""
        if isinstance(self._weight, delay_compensated) and self.version not in member.read:
            member.read[self.version] = self.read()

    def _forget(self, member: WorkerRecord, version: int) -> None:
        """Nothing more will come that was computed on a version before this one."""
        for number in [one for one in member.read if one < version]:
            member.read.pop(number).done()


def _alone(then: OnParameters) -> OnParameters:
    return replace() if isinstance(then, pull) else add()


def named(names: Sequence[str], tensors: Sequence[Tensor], ranges: int) -> dict[str, Sequence[Tensor]]:
    """For each name its tensors, of which there are as many as ranges."""
    return {name: tensors[at * ranges : (at + 1) * ranges] for at, name in enumerate(names)}


def is_finite(pieces: Sequence[Tensor]) -> bool:
    """Whether there is no NaN and no infinity in them."""
    return all(math.isfinite(one.sum()) or bool(torch.isfinite(one).all()) for one in pieces)


def _rebase(out: Tensor, base: Tensor, now: Tensor, scale: float) -> None:
    """`out = now + scale * (out - base)`: what was added to one version is added to another."""
    flat: tuple[Any, ...] = (out, base, now)
    for result, before, after in zip(*(one.split(PIECE) for one in flat), strict=True):
        result.sub_(before)
        torch.add(after, result, alpha=scale, out=result)
