"""One shard of a parameter server: it holds ranges of the parameters and applies updates. A plain state machine.

A version number counts the applied updates. The numbers of a version never change once it is published, so a reader
gets one version completely however long it reads. Every update carries its worker, its sequence number, the version
that it was computed on and its number of samples; an update that arrives twice is applied once.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stretto.parameter_server.framing import with_offsets
from stretto.parameter_server.row_tables import RowChange, split_by_width
from stretto.parameter_server.versioned_buffers import Version, Versions
from stretto.parameter_server.worker_record import Applied, Draft, WorkerRecord
from stretto.recipe.then import Arrived, OnParameters, Velocity, add, constant, delay_compensated, outer, pull, replace
from stretto.recipe.when import on_arrival

BLOCK = 1 << 16
"""Number of elements processed at a time, so that the second operation finds them in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Update:
    """A worker's update: `numbers` are flat tensors, one for each range of the shard, each in one or more chunks.

    `seq` counts the worker's updates from 1; `version` is the one that the update was computed on; `lr` is the learning
    rate in it, for weights that need the gradient.
    """

    worker: int
    seq: int
    version: int
    samples: int
    numbers: Sequence[Sequence[Tensor]]
    lr: float = 0.0
    rows: Sequence[RowChange] = ()
    """Changes of the rows of each table."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Permission for a worker to continue, with a version; `applied` are its updates applied since its last reply.

    The reader of the version calls its `done`.
    """

    worker: int
    version: Version
    applied: tuple[Applied, ...]
    refused: tuple[int, ...] = ()
    """Sequence numbers of updates that held NaN or infinity and were not applied."""


class Shard:
    """Ranges of the parameters, the records of the workers, and the update rule.

    With one worker nothing is weighted or pulled: updates are applied unchanged, so that training equals that of a
    single process.
    """

    def __init__(
        self,
        theta: Sequence[Tensor],
        when: on_arrival,
        then: OnParameters,
        workers: int,
        widths: Sequence[int] = (),
    ) -> None:
        self._when, self._then, self._first_workers = when, then, workers
        if workers == 1:
            self._when = on_arrival(every=when.every, overlap=when.overlap)
            self._then = then if isinstance(then, replace) else _for_single_worker(then)
        self._weight = self._then.weight if isinstance(self._then, add) else constant(1.0)
        self.members = {worker: WorkerRecord() for worker in range(workers)}
        theta, self.tables = split_by_width(theta, widths)
        self._versions = Versions(theta)
        self._held_back: list[Update] = []
        self._group: list[tuple[Update, int]] = []
        self._sums: list[Tensor] = []
        self._velocity = [Velocity(flat) for flat in theta] if isinstance(self._then, outer) else []
        self._squares = self._mean_squares(theta)
        for member in self.members.values():
            self._note_read(member)
        compensated = isinstance(self._weight, delay_compensated)
        self._drafts = isinstance(self._then, add) and self._when.collect == 1 and not compensated and not self.tables

    @property
    def _workers(self) -> int:
        """Number of workers in the weights of updates: of the first ones, or of the members if others have joined."""
        return max(self._first_workers, len(self.members))

    @property
    def current(self) -> Version:
        """Newest version."""
        return self._versions.newest

    @property
    def version(self) -> int:
        """Number of the newest version."""
        return self.current.number

    @property
    def is_untouched(self) -> bool:
        """True if no update has arrived, not even a waiting one."""
        return not (self.version or self._group or self._held_back)

    # --- requests of workers ------------------------------------------------------------------------------------

    def push(self, update: Update) -> list[Reply]:
        """Take an update and apply it, once, when the bound permits; return the replies that this releases."""
        member = self.members.get(update.worker)
        if member is None or member.has_received(update.seq):
            return []
        if member.exempt or (member.at_barrier and update.seq > member.rounds_at_barrier):
            member.at_barrier = member.exempt = False  # a worker that sends a later update has passed the barrier
        if self._is_beyond_bound(update.worker, update.seq):
            if all((held_back.worker, held_back.seq) != (update.worker, update.seq) for held_back in self._held_back):
                self._held_back.append(update)
            return []
        if self.moves_both and member.previous is None:
            member.previous = self.read()
        self._take(member, update)
        self._take_held_back()
        return self._release()

    def draft(self, worker: int, seq: int, version: int) -> bool:
        """Return True if an arriving update may be applied chunk by chunk; it takes effect with `push` when complete.

        No reader sees a part of it, and updates that other workers apply in between are not lost.
        """
        self.drop(worker)
        member = self.members.get(worker)
        if member is None or seq != member.completed + 1 or not self._drafts or self._is_beyond_bound(worker, seq):
            return False
        staleness = self._staleness(member, version)
        member.draft = Draft(seq, self.read(), self._weight.of(staleness, self._workers), self._versions.spare())
        return True

    def write(self, worker: int, index: int, offset: int, chunk: Tensor) -> None:
        """Apply a chunk of the update: elements from `at` on of a range."""
        draft = self.members[worker].draft
        assert draft is not None
        stop = offset + chunk.numel()
        draft.finite = draft.finite and is_finite((chunk,))
        current, out = draft.base.ranges[index][offset:stop], draft.following.ranges[index][offset:stop]
        torch.add(current, chunk, alpha=draft.weight, out=out)

    def drop(self, worker: int) -> None:
        """Discard the chunks of an update that will not be completed."""
        member = self.members.get(worker)
        if member is not None and (draft := member.draft) is not None:
            member.draft = None
            draft.base.release()
            self._versions.give_back(draft.following)

    @property
    def moves_both(self) -> bool:
        """True if worker and server move by the same difference: replies hold the version before the update."""
        return isinstance(self._then, pull)

    def pull(self, worker: int) -> list[Reply]:
        """Note that a worker asks for the newest version; return the replies that may be sent now."""
        if worker in self.members:
            self.members[worker].is_waiting = True
        return self._release()

    def read(self, worker: int | None = None) -> Version:
        """Return the newest version for a reader that calls its `done`; a worker may compute its next update on it."""
        if worker in self.members:
            self._note_read(self.members[worker])
        return self._versions.read()

    def read_rows(self, worker: int, table: int, numbers: Tensor) -> Tensor:
        """Return rows of a table, in the version that this worker has of the other parameters if there is a bound."""
        return self.tables[table].read(numbers, self.members[worker].version)

    def take_applied(self, worker: int) -> tuple[Applied, ...]:
        """Return the worker's updates applied since the last call."""
        member = self.members.get(worker)
        if member is None:
            return ()
        applied, member.applied = tuple(member.applied), []
        return applied

    def enter_barrier(self, worker: int, seq: int, barrier: int | None) -> list[Reply]:
        """Note that a worker has come to a barrier after its update `seq`: it holds no worker back until all have come.

        From then on its rounds are counted from the barrier. Without a barrier the worker only waits for batches.
        """
        if member := self.members.get(worker):
            member.at_barrier, member.exempt = True, barrier is None
            if barrier is not None:
                member.rounds_at_barrier, member.barrier = (
                    max(seq, member.rounds_at_barrier),
                    max(barrier, member.barrier),
                )
        self._end_barriers()
        self._take_held_back()
        return self._release()

    def _end_barriers(self) -> None:
        """End the barrier for workers whose barrier, or a later one, all members have come to.

        Each worker's own position at the barrier sets the origin of its rounds, so that it is the same at all shards:
        one shard may learn of a failure before the last worker comes to the barrier, and another shard after it.
        """
        all_met = min((member.barrier for member in self.members.values()), default=0)
        for member in self.members.values():
            member.at_barrier = member.at_barrier and (member.exempt or member.barrier > all_met)

    def flush(self) -> None:
        """Apply the collected updates even if they are fewer than `collect`."""
        if self._group:
            self._apply_group()

    def join(self, worker: int) -> list[Reply]:
        """Add a new or restarted worker; it holds no worker back until `enter`."""
        replies = self.leave(worker)
        member = self.members[worker] = WorkerRecord(at_barrier=True, exempt=True)
        self._note_read(member)
        return replies

    def exempt_all(self) -> None:
        """Restart the rounds of all workers: none holds others back before its next message."""
        for member in self.members.values():
            member.at_barrier = member.exempt = True

    def slowest_rounds(self) -> int:
        """Return the rounds of the slowest worker, from which a joining worker counts."""
        return int(rounds) if (rounds := self._slowest_rounds()) < math.inf else 0

    def enter(self, worker: int, clock: int) -> None:
        """Set the rounds of a joining worker to `clock`: from now on it may hold others back."""
        if (member := self.members.get(worker)) is not None and member.exempt:
            member.rounds_at_barrier, member.at_barrier, member.exempt = member.completed - clock, False, False

    def leave(self, worker: int) -> list[Reply]:
        """Remove a worker that has left or failed; its later updates are ignored."""
        self.drop(worker)
        member = self.members.pop(worker, None)
        if member is None:
            return []
        for version in (*member.read.values(), *([member.previous] if member.previous else [])):
            version.release()
        self._held_back = [update for update in self._held_back if update.worker != worker]
        self._end_barriers()
        self._take_held_back()
        if self._group and len(self._group) >= self._group_size:
            self._apply_group()
        return self._release()

    # --- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the state for a snapshot, when no request of any worker is pending."""
        self.flush()
        widths = [*(0 for _ in self.current.ranges), *(table.width for table in self.tables)]
        facts = {"ranges": len(widths), "widths": widths, "version": self.version, "arrivals": self.arrivals}
        return facts, [*self.parameters, *chain.from_iterable(self.rule_state().values())]

    @property
    def parameters(self) -> list[Tensor]:
        """Ranges of the newest version, and the tables, which change in place."""
        return [*self.current.ranges, *(table.flat for table in self.tables)]

    def restore(self, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Restore a state in a new shard; versions are counted from there."""
        self.current.number = facts["version"]
        ranges, names = facts["ranges"], list(self.rule_state())
        for flat, stored in zip(self.parameters, tensors[:ranges], strict=True):
            flat.copy_(stored)
        self.restore_rule(by_name(names, tensors[ranges:], ranges), facts["arrivals"])
        for member in self.members.values():
            member.read.clear()
            self._note_read(member)

    @property
    def arrivals(self) -> list[int]:
        """Amount of each range's momentum that has arrived since its last refresh."""
        return [velocity.arrivals for velocity in self._velocity]

    def rule_state(self) -> dict[str, list[Tensor]]:
        """Return the update rule's state besides the parameters: by name, a tensor for each range."""
        velocity = self._velocity
        stored = {
            "v": [range_velocity.v for range_velocity in velocity],
            "since": [range_velocity.since for range_velocity in velocity],
            "squares": self._squares,
        }
        return {name: tensors for name, tensors in stored.items() if tensors}

    def restore_rule(self, stored: Mapping[str, Sequence[Tensor]], arrivals: Sequence[int]) -> None:
        """Restore the rule's state, as far as this rule has the same names."""
        for name, tensors in self.rule_state().items():
            for flat, previous in zip(tensors, stored.get(name, tensors), strict=True):
                flat.copy_(previous)
        for velocity, arrived in zip(self._velocity, arrivals or self.arrivals, strict=bool(self._velocity)):
            velocity.arrivals = arrived

    # --- the bound ----------------------------------------------------------------------------------------------

    @property
    def _group_size(self) -> int:
        """Number of updates to apply together: at most one for each remaining worker if `collect` fits the workers."""
        collect = self._when.collect
        return collect if collect > self._workers else min(collect, max(len(self.members), 1))

    def _slowest_rounds(self) -> float:
        """Return the rounds of the slowest worker that is not at a barrier."""
        return min((member.clock for member in self.members.values() if not member.at_barrier), default=math.inf)

    def _is_beyond_bound(self, worker: int, seq: int) -> bool:
        """Return True if an update's round, counted from 0, is beyond the bound."""
        bound, member = self._when.bound, self.members[worker]
        return (
            bound is not None
            and not member.exempt
            and seq - 1 - member.rounds_at_barrier > self._slowest_rounds() + bound
        )

    def _take_held_back(self) -> None:
        while (
            fits := next(
                (update for update in self._held_back if not self._is_beyond_bound(update.worker, update.seq)), None
            )
        ) is not None:
            self._held_back.remove(fits)
            self._take(self.members[fits.worker], fits)

    def _may_continue(self, member: WorkerRecord) -> bool:
        bound = self._when.bound
        return bound is None or member.exempt or member.clock + self._when.ahead - self._slowest_rounds() <= bound

    def _release(self) -> list[Reply]:
        """Reply to all waiting workers that may continue."""
        waiting = [(worker, member) for worker, member in self.members.items() if member.is_waiting]
        return [self._reply(worker, member) for worker, member in waiting if self._may_continue(member)]

    def _reply(self, worker: int, member: WorkerRecord) -> Reply:
        member.is_waiting = False
        applied = self.take_applied(worker)
        refused, member.refused = tuple(member.refused), []
        self._note_read(member)
        version, member.previous = member.previous or self.read(), None
        return Reply(worker, version, applied, refused)

    # --- applying -----------------------------------------------------------------------------------------------

    def _take(self, member: WorkerRecord, update: Update) -> None:
        member.note(update.seq)
        draft = self._draft_of(member, update)
        numbers = [*update.numbers, *([change.changes] for change in update.rows)]
        if not (draft.finite if draft is not None else all(map(is_finite, numbers))):
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
            if len(self._group) >= self._group_size:
                self._apply_group()
        self._release_before(member, update.version)

    def _draft_of(self, member: WorkerRecord, update: Update) -> Draft | None:
        """Return the draft of this update; discard it if the update has arrived completely after all."""
        if member.draft is None or member.draft.seq != update.seq:
            return None
        if any(update.numbers):
            self.drop(update.worker)
        return member.draft

    def _staleness(self, member: WorkerRecord, version: int) -> int:
        """Return the number of versions since the update's, without those of the worker's own updates."""
        own_count = len(member.own_versions) - bisect.bisect_right(member.own_versions, version)
        return max(self.version - version - own_count, 0)

    def _add(self, member: WorkerRecord, update: Update, staleness: int) -> None:
        """Apply an update of asynchronous SGD in one pass over the chunks."""
        weight = self._weight.of(staleness, self._workers)
        following = self._versions.spare()
        numbers = self._compensated(member, update)
        for current, chunks, out in zip(self.current.ranges, numbers, following.ranges, strict=True):
            for offset, chunk in with_offsets(chunks):
                stop = offset + chunk.numel()
                torch.add(current[offset:stop], chunk, alpha=weight, out=out[offset:stop])
        self._publish_one(member, update, following, staleness)
        for table, change in zip(self.tables, update.rows, strict=True):
            table.add(change, weight, self._version_to_remember)

    def _add_draft(self, member: WorkerRecord, update: Update, draft: Draft, staleness: int) -> None:
        """Publish a version that was written while the update arrived, rebased if its base is no longer the newest
        version."""
        member.draft = None
        weight = self._weight.of(staleness, self._workers)
        if draft.base is not self.current:
            for base, current, out in zip(draft.base.ranges, self.current.ranges, draft.following.ranges, strict=True):
                _rebase(out, base, current, weight / draft.weight if draft.weight else 0.0)
        draft.base.release()
        self._publish_one(member, update, draft.following, staleness)

    def _publish_one(self, member: WorkerRecord, update: Update, following: Version, staleness: int) -> None:
        self._versions.publish(following)
        member.own_versions.append(self.version)
        member.applied.append(Applied(update.seq, self.version, staleness, update.samples))

    def _collect(self, member: WorkerRecord, update: Update, staleness: int) -> None:
        """Add the update, weighted by its staleness and its samples, to the sum of collected updates."""
        if not self._sums:
            self._sums = [torch.empty_like(flat) for flat in self.current.ranges]
        if not self._group:
            for total in self._sums:
                total.zero_()
        weight = self._weight.of(staleness, self._workers) * max(update.samples, 0)
        for total, chunks in zip(self._sums, self._compensated(member, update), strict=True):
            for offset, chunk in with_offsets(chunks):
                total[offset : offset + chunk.numel()].add_(chunk, alpha=weight)
        for table, change in zip(self.tables, update.rows, strict=True):
            table.collect(change, weight)
        self._group.append((dataclasses.replace(update, numbers=(), rows=()), staleness))  # their sum is in self._sums

    def _apply_group(self) -> None:
        group, self._group = self._group, []
        samples = sum(max(update.samples, 0) for update, _ in group)
        arrived = Arrived(len(group), self._when.collect, self._workers)
        following = self._versions.spare()
        for index, (current, total, out) in enumerate(
            zip(self.current.ranges, self._sums, following.ranges, strict=True)
        ):
            mean = total.div_(samples) if samples else self._mean_of_none(current, total)
            self._then.arrive(current, mean, arrived, self._velocity[index] if self._velocity else None, out)
        self._versions.publish(following)
        for table in self.tables:
            table.apply(samples, partial(self._arrive, arrived), self._version_to_remember)
        for update, staleness in group:
            if member := self.members.get(update.worker):
                member.applied.append(Applied(update.seq, self.version, staleness, update.samples))
        if len({update.worker for update, _ in group}) == 1 and (only := self.members.get(group[0][0].worker)):
            only.own_versions.append(self.version)

    def _arrive(self, arrived: Arrived, now: Tensor, mean: Tensor, out: Tensor) -> None:
        self._then.arrive(now, mean, arrived, None, out)

    @property
    def _version_to_remember(self) -> int | None:
        """Number of the newest version if tables have to remember the rows before it; workers may read them so."""
        return self.version if self._when.bound is not None else None

    def _mean_of_none(self, current: Tensor, zeros: Tensor) -> Tensor:
        """Return the mean of no samples: no change, or where parameters are sent, the current ones."""
        return current if isinstance(self._then, replace | pull) else zeros

    # --- delay compensation ---------------------------------------------------------------------------------------

    def _mean_squares(self, theta: Sequence[Tensor]) -> list[Tensor]:
        weight = self._weight
        is_adaptive = isinstance(weight, delay_compensated) and weight.adaptive
        return [torch.zeros_like(flat) for flat in theta] if is_adaptive else []

    def _compensated(self, member: WorkerRecord, update: Update) -> Sequence[Sequence[Tensor]]:
        weight = self._weight
        if not isinstance(weight, delay_compensated) or not update.lr:
            return update.numbers
        old_version = member.read.get(update.version, self.current)
        compensated = []
        for index, chunks in enumerate(update.numbers):
            squares = self._squares[index] if self._squares else None
            flat = torch.cat(tuple(chunks)) if chunks else self.current.ranges[index].new_empty(0)
            compensated.append(
                (weight.compensate(flat, update.lr, self.current.ranges[index], old_version.ranges[index], squares),)
            )
        return compensated

    def _note_read(self, member: WorkerRecord) -> None:
        """Store the newest version as one that the worker may compute on, if compensation needs it."""
        if isinstance(self._weight, delay_compensated) and self.version not in member.read:
            member.read[self.version] = self.read()
        member.version = self.version
        oldest = min(other.version for other in self.members.values())
        for table in self.tables:
            table.forget(oldest)

    def _release_before(self, member: WorkerRecord, version: int) -> None:
        """Release versions before `version`: no further update of the worker is computed on them."""
        for number in [read_version for read_version in member.read if read_version < version]:
            member.read.pop(number).release()


def _for_single_worker(then: OnParameters) -> OnParameters:
    return replace() if isinstance(then, pull) else add()


def by_name(names: Sequence[str], tensors: Sequence[Tensor], ranges: int) -> dict[str, Sequence[Tensor]]:
    """Return the tensors of each name, one for each range."""
    return {name: tensors[index * ranges : (index + 1) * ranges] for index, name in enumerate(names)}


def is_finite(chunks: Sequence[Tensor]) -> bool:
    """Return True if no element is NaN or infinite."""
    return all(math.isfinite(chunk.sum()) or bool(torch.isfinite(chunk).all()) for chunk in chunks)


def _rebase(out: Tensor, base: Tensor, current: Tensor, scale: float) -> None:
    """Compute `out = now + scale * (out - base)`: move an update from one version to another."""
    flat: tuple[Any, ...] = (out, base, current)
    for out_block, base_block, current_block in zip(*(tensor.split(BLOCK) for tensor in flat), strict=True):
        out_block.sub_(base_block)
        torch.add(current_block, out_block, alpha=scale, out=out_block)
