"""The workers that the coordinator knows: their newest processes, their generation, and missing workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stretto.membership.barriers import Awaited
from stretto.membership.coordinator_records import Started
from stretto.membership.loop_positions import Waits
from stretto.membership.messages import GenerationView, Member, ReadyReport

ASKED = "it was asked to end"
State: TypeAlias = Literal["new", "in", "gone", "left"]


@dataclass(slots=True)
class WorkerProcess:
    """Last known incarnation of a worker."""

    incarnation: int
    last_message: float
    state: State = "new"
    report: ReadyReport | None = None
    """Its report that it is paused; None while it runs."""
    global_step: int = 0
    """Furthest global step that it is known to have been assigned in this generation."""
    place: int = -1
    """Number of collective operations that it has begun, from its heartbeats; -1 before its first generation."""
    doing: str = ""
    waits: Waits | None = None
    """Last collective operation of this generation that it is known to have waited in."""
    since: float = 0.0
    is_leaving: bool = False
    slow: bool = False
    last_generation: int = 0
    """Last generation that it was a member of."""
    ended_at: float = 0.0
    will_restart: bool = False
    why: str = ""

    @property
    def is_running(self) -> bool:
        """True if the process runs, as far as is known."""
        return self.state in ("new", "in")


class WorkerTable:
    """Last known process of each worker, and the current generation. `rules` are those of the run."""

    def __init__(self, rules: Started) -> None:
        self._rules = rules
        self.processes: dict[int, WorkerProcess] = {}
        self.view = GenerationView(0, [])

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.view.generation

    @property
    def members(self) -> dict[int, int]:
        """Members of the generation that have not failed, with their incarnations."""
        return {member.worker: member.incarnation for member in self.view.members if self.is_member(member)}

    def awaited(self, in_training: bool, now: float) -> dict[int, Awaited]:
        """Return the workers that a barrier of the script waits for.

        In training they are the members that can still come: a member paused between two steps waits for the workers at
        the barrier itself, and so may a restarted worker in asynchronous training until it takes part. Before training
        they are all workers that were started, until they are members: a failed worker that is restarted is
        awaited as well, since no other has begun without it.
        """
        if in_training:
            members = {worker: self.processes[worker] for worker in self.members}
            resting = {
                worker
                for worker, process in members.items()
                if process.report is not None and process.report.between_steps
            }
            joining = {
                worker
                for worker, process in members.items()
                if self._rules.asynchronous and process.incarnation and process.place < 0
            }
            expected = members.keys() - resting - joining
            return {worker: Awaited(members[worker].incarnation, members[worker].place) for worker in expected}
        early = (worker for worker in range(self._rules.expected) if self._is_to_begin(worker, now))
        return {
            worker: Awaited(self.processes[worker].incarnation if worker in self.processes else 0, -1)
            for worker in early
        }

    def _is_to_begin(self, worker: int, now: float) -> bool:
        """Return True if a worker that was started has not reached the training yet, and still can."""
        process = self.processes.get(worker)
        if process is None:
            return True
        return process.state == "gone" and (self.may_return(process, now) if self.generation else process.will_restart)

    def is_member(self, member: Member) -> bool:
        """Return True if this incarnation takes part in the generation."""
        process = self.processes[member.worker]
        return process.incarnation == member.incarnation and process.state == "in"

    def has_left(self, member: Member) -> bool:
        """Return True if this incarnation has left gracefully or has finished."""
        process = self.processes[member.worker]
        return process.incarnation == member.incarnation and process.state == "left"

    def is_over(self) -> bool:
        """Return True if no member is left because some have finished."""
        return self.generation > 0 and not self.members and self.finished_count() > 0 and not self._rules.asynchronous

    def finished_count(self) -> int:
        """Return the number of workers that have finished their loop without being asked to leave."""
        return sum(process.state == "left" and process.why != ASKED for process in self.processes.values())

    def unseen_count(self) -> int:
        """Return the number of initially expected workers without a message so far."""
        if self.generation and not self._rules.asynchronous:
            return 0
        return sum(worker not in self.processes for worker in range(self._rules.expected))

    def failed_members(self) -> list[int]:
        """Return the members that have failed."""
        return [
            member.worker for member in self.view.members if not self.is_member(member) and not self.has_left(member)
        ]

    def new_processes(self) -> dict[int, WorkerProcess]:
        """Return the running workers that are no members."""
        return {worker: process for worker, process in self.processes.items() if process.state == "new"}

    def waiting_workers(self) -> list[int]:
        """Return the workers that wait to be admitted."""
        return [worker for worker, process in self.new_processes().items() if process.report is not None]

    def may_return(self, process: WorkerProcess, now: float) -> bool:
        """Return True while a failed worker that is restarted is awaited."""
        return process.state == "gone" and process.will_restart and now <= process.ended_at + self._rules.return_limit_s

    def described_failures(self, failed: list[int]) -> str:
        """Return a sentence about failed members."""
        return "; ".join(f"worker {worker} failed" + self.failure_cause(worker) for worker in failed)

    def failure_cause(self, worker: int) -> str:
        """Return the cause of a failure in brackets, if it is known."""
        process = self.processes[worker]
        return f" ({process.why})" if process.state == "gone" and process.why else ""

    def described_change(self, next_members: list[int], leaving: list[int]) -> str:
        """Return the reason for a generation of `next_members`, without the workers that are `leaving`."""
        previous = [member.worker for member in self.view.members]
        reasons = [f"worker {worker} joined" for worker in next_members if worker not in previous]
        return "; ".join([*reasons, *(f"worker {worker} leaves gracefully" for worker in leaving)])

    def is_any_to_come(self, now: float) -> bool:
        """Return True if a worker has not reported yet and still can."""
        coming = (
            process.report is None if process.is_running else self.may_return(process, now)
            for process in self.processes.values()
        )
        return self.unseen_count() > 0 or any(coming)
