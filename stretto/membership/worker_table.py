"""The workers that the coordinator knows: their newest incarnations, their generation, and missing workers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stretto.events import process_name
from stretto.membership.barriers import PAST, Awaited
from stretto.membership.coordinator_records import Formed, FormedOfRanks, NumbersGiven, Started
from stretto.membership.messages import GenerationView, Member, ReadyReport
from stretto.membership.replica import Replica, State


class WorkerTable:
    """Last known incarnation of each worker, and the current generation. `rules` are those of the run."""

    def __init__(self, rules: Started) -> None:
        self._rules = rules
        self.replicas: dict[int, Replica] = {}
        self.formed = Formed(GenerationView(0, []))
        """Current generation, as it was logged."""
        self.given: dict[str, NumbersGiven] = {}
        """Numbers of the workers of each launcher that joins the run."""

    @property
    def view(self) -> GenerationView:
        """Current generation, as its ranks 0 see it."""
        return self.formed.view

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.view.generation

    @property
    def members(self) -> dict[int, int]:
        """Members of the generation that have not failed, with their incarnations."""
        return {member.worker: member.incarnation for member in self.view.members if self.is_member(member)}

    def awaited(self, in_training: bool, now: float) -> dict[int, Awaited]:
        """Return the workers that a barrier of the script waits for, unless they are past it.

        In training they are the members, without a restarted worker in asynchronous training until it takes part. A
        worker is past all positions if it has finished, or is paused between two steps, where it waits for the others.
        Before training they are all workers that were started, until they are members: a failed worker that is
        restarted is awaited as well, since no other has begun without it.
        """
        if in_training:
            members, found = self.members, dict[int, Awaited]()
            for worker, replica in self.replicas.items():
                is_joining = self._rules.asynchronous and replica.incarnation and replica.place < 0
                if replica.has_finished or (worker in members and replica.is_between_steps):
                    found[worker] = Awaited(replica.incarnation, PAST)
                elif worker in members and not is_joining:
                    found[worker] = Awaited(replica.incarnation, replica.place)
            return found
        early = (worker for worker in range(self._rules.expected) if self._is_to_begin(worker, now))
        return {
            worker: Awaited(self.replicas[worker].incarnation if worker in self.replicas else 0, -1) for worker in early
        }

    def _is_to_begin(self, worker: int, now: float) -> bool:
        """Return True if a worker that was started has not reached the training yet, and still can."""
        replica = self.replicas.get(worker)
        if replica is None:
            return True
        return replica.state == "gone" and (self.may_return(replica, now) if self.generation else replica.will_restart)

    def next_incarnation(self, numbers: Iterable[int]) -> int:
        """Return an incarnation that is newer than those of all these workers."""
        known = (self.replicas[number].incarnation for number in numbers if number in self.replicas)
        return max(known, default=-1) + 1

    def next_numbers(self, launcher: str, count: int, first: int | None = None, replaces: bool = False) -> NumbersGiven:
        """Return the record of the next free numbers, for a launcher that has none.

        They are those from `first` on if these are reserved, and if they are free, or belong to a launcher that this
        launcher `replaces`.
        """
        given = {number for record in self.given.values() for number in record.numbers}
        wanted = range(first, first + count) if first is not None else ()
        if wanted and wanted[-1] < self._rules.reserved and (replaces or given.isdisjoint(wanted)):
            return NumbersGiven(launcher, wanted[0], count)
        return NumbersGiven(launcher, max(self._rules.reserved, *(number + 1 for number in given), 0), count)

    def launcher_of(self, worker: int) -> int | None:
        """Return the first worker of the launcher that joined with this worker; None for the launcher of the run."""
        return next((given.first for given in self.given.values() if worker in given.numbers), None)

    def may_report(self, first: int | None, worker: int) -> bool:
        """Return True if the launcher that joined with worker `first`, None for the run's own, may report this exit.

        The launcher of the run reports workers of reserved numbers also where others have started them.
        """
        return first == self.launcher_of(worker) or (first is None and worker < self._rules.reserved)

    def is_member(self, member: Member) -> bool:
        """Return True if this incarnation takes part in the generation."""
        replica = self.replicas[member.worker]
        return replica.incarnation == member.incarnation and replica.state == "in"

    def has_not_failed(self, worker: int, incarnation: int) -> bool:
        """Return True for the newest incarnation of a worker that has registered, unless it was declared failed."""
        replica = self.replicas.get(worker)
        return replica is not None and replica.incarnation == incarnation and replica.state != "gone"

    def has_left(self, member: Member) -> bool:
        """Return True if this incarnation has left gracefully or has finished."""
        replica = self.replicas[member.worker]
        return replica.incarnation == member.incarnation and replica.state == "left"

    def is_over(self) -> bool:
        """Return True if no member is left because some have finished."""
        return self.generation > 0 and not self.members and self.finished_count() > 0 and not self._rules.asynchronous

    def finished_count(self) -> int:
        """Return the number of workers that have finished their loop; if none waits, also of those asked to leave."""
        left = len(self.numbers_in("left"))
        return left if self._rules.asynchronous else sum(replica.has_finished for replica in self.replicas.values())

    def unseen_count(self) -> int:
        """Return the number of workers without a message so far that the run begins with.

        These are the expected ones, and if they are fewer than it begins with, any others that join.
        """
        if self.generation and not self._rules.asynchronous:
            return 0
        rules = self._rules
        unseen = sum(worker not in self.replicas for worker in range(rules.expected))
        begins_with = max(rules.begins_with, 0 if rules.expected else max(rules.min_workers, 1))
        if begins_with <= rules.expected:
            return unseen
        running = sum(replica.is_running or rules.asynchronous for replica in self.replicas.values())
        return max(unseen, begins_with - running)

    def numbers_in(self, *states: State) -> frozenset[int]:
        """Return the workers whose newest incarnation is in one of these states."""
        return frozenset(worker for worker, replica in self.replicas.items() if replica.state in states)

    def failed_members(self) -> list[int]:
        """Return the members that have failed."""
        return [
            member.worker for member in self.view.members if not self.is_member(member) and not self.has_left(member)
        ]

    def new_replicas(self) -> list[Replica]:
        """Return the running workers that are no members."""
        return [replica for replica in self.replicas.values() if replica.state == "new"]

    def waiting_workers(self) -> list[int]:
        """Return the workers that wait to be admitted."""
        return [replica.worker for replica in self.new_replicas() if replica.is_ready]

    def generation_of(self, workers: list[int], number: int, left: list[int], why: str, save: bool = False) -> Formed:
        """Return the record of a generation of these workers, which are ready; `left` leave gracefully with it."""
        replicas = [self.replicas[worker] for worker in workers]
        reports = [[_shown(report) for report in replica.reports()] for replica in replicas]
        members = [
            Member(replica.worker, replica.incarnation, shown[0])
            for replica, shown in zip(replicas, reports, strict=True)
        ]
        removed = sorted(member.worker for member in self.view.members if member.worker not in workers)
        view = GenerationView(number, members, removed, why, save)
        if all(len(shown) == 1 for shown in reports):
            return Formed(view, left)
        return FormedOfRanks(view, left, [shown[1:] for shown in reports])

    def may_return(self, replica: Replica, now: float) -> bool:
        """Return True while a failed worker that is restarted is awaited."""
        return replica.state == "gone" and replica.will_restart and now <= replica.ended_at + self._rules.return_limit_s

    def described_failures(self, failed: list[int]) -> str:
        """Return a sentence about failed members."""
        return "; ".join(
            f"{process_name(worker, self.replicas[worker].failed_rank)} failed{self.failure_cause(worker)}"
            for worker in failed
        )

    def failure_cause(self, worker: int) -> str:
        """Return the cause of a failure in brackets, if it is known."""
        replica = self.replicas[worker]
        return f" ({replica.why})" if replica.state == "gone" and replica.why else ""

    def described_change(self, next_members: list[int], leaving: list[int]) -> str:
        """Return the reason for a generation of `next_members`, without the workers that are `leaving`."""
        previous = [member.worker for member in self.view.members]
        reasons = [f"worker {worker} joined" for worker in next_members if worker not in previous]
        return "; ".join([*reasons, *(f"worker {worker} leaves gracefully" for worker in leaving)])

    def is_any_to_come(self, now: float) -> bool:
        """Return True if a worker has not reported yet and still can."""
        coming = (
            not replica.is_ready if replica.is_running else self.may_return(replica, now)
            for replica in self.replicas.values()
        )
        return self.unseen_count() > 0 or any(coming)


def _shown(report: ReadyReport) -> ReadyReport:
    """Return the report as other workers see it: its generation is 0 without state."""
    return msgspec.structs.replace(report, generation=max(report.generation, 0))
