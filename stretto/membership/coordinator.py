"""The membership coordinator: the workers, their incarnations, and the generations that they form. A plain state
machine.

A worker is a replica of one or more ranks (`membership.replica`). Decisions are about replicas; a message is from one
rank, and a decision is sent to every rank of the replicas that it concerns.

Its inputs are workers' messages, process exits that the launcher reports, and the time; its outputs are messages to
workers. Messages may be lost, duplicated and late: a worker repeats a message until it has the reply, and gets the same
reply again. `membership.messages` describes the protocol.

Two statements of a worker are final: that it is paused after an `AbortGeneration` of generation G (its `ReadyReport`
has that generation and is not `between_steps`), and that it was in G without receiving any state (`ReadyReport` with
-G, which the others are shown as 0). A worker paused between two steps may be asked to continue to a later step, so the
global steps order its reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stretto.events import COORDINATOR, Event, of_process
from stretto.membership.announcements import Announcements
from stretto.membership.barriers import FirstValues, Position
from stretto.membership.coordinator_records import (
    AnyRecord,
    ContinuedTo,
    Ended,
    EndedByRank,
    Formed,
    Gave,
    NumbersGiven,
    Started,
    Stopped,
    decode_record,
    encode_record,
)
from stretto.membership.loop_positions import Exchanges, Waits, explained, sentence
from stretto.membership.messages import (
    AbortGeneration,
    Broken,
    Continue,
    CoordinatorMessage,
    Evicted,
    Failures,
    GenerationView,
    Heartbeat,
    Leave,
    MembersView,
    PauseRequest,
    Quit,
    ReadyReport,
    Register,
    Registered,
    Shutdown,
    WorkerMessage,
)
from stretto.membership.replica import ASKED, Rank, Replica
from stretto.membership.worker_table import WorkerTable

UNKNOWN = "the run does not know the generation that it comes from"
STUCK = 5
"""Number of times in a row that the same members may abort the same collective operation."""
UNREACHED = 3
"""Number of generations in which the same two processes may fail to connect."""
DIVIDED = "only some of its ranks have the state of the run"
NO_STATE_LEFT = "no worker with state is left: all restart from the last checkpoint"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message to one rank of an incarnation of a worker; `ranks` is the number of its ranks."""

    worker: int
    incarnation: int
    message: CoordinatorMessage
    rank: int = 0
    ranks: int = 1


Phase: TypeAlias = Literal["gathering", "running", "pausing", "aborting", "stopped"]


_Pair: TypeAlias = frozenset[tuple[int, int]]
"""Two workers, with their incarnations."""


class MembershipCoordinator:
    """Decides by the rules of the run which workers are members, and in which generation."""

    def __init__(self, rules: Started) -> None:
        self._rules = rules
        self.workers = WorkerTable(rules)
        self._phase: Phase = "running" if rules.asynchronous else "gathering"
        self._why = ""
        """Reason why the generation has ended, or why the run cannot continue."""
        self._limit: float | None = None
        """Time until which an aborted operation may remain without a known failure."""
        self._continue_to = 0
        """Global step that paused members were sent on to in this generation."""
        self._saves = False
        self._saved_last = 0
        """Generation whose members have written a checkpoint since all of them were asked to leave."""
        self._failed: dict[tuple[int, int], tuple[int, int]] = {}
        """Failed workers and incarnations, with the generation in which each failed, and its rank that failed first."""
        self._exchanges: dict[int, Exchanges] = defaultdict(Exchanges)
        """Collective operations of the ranks of each number, which exchange with each other."""
        self._is_exchange_broken = False
        """True if the generation was aborted because a collective operation failed, not for a failed worker or
        rendezvous."""
        self._last_abort: tuple[list[tuple[int, ...]], int] = [], 0
        """Members at the last aborted operation, with incarnations and ranks' commits, and the times in a row."""
        self._apart = set[_Pair]()
        """Members of this generation that have failed to connect with each other."""
        self._times_apart = Counter[_Pair]()
        """Earlier generations in which they have, since they were connected last."""
        self._is_unformed = False
        """True if the generation was aborted because its members did not connect."""
        self.uneven: str | None = None
        """Reason why the run cannot continue, if the workers' loops are of unequal length."""
        self._values = FirstValues()
        """Values that workers have given at positions of the script."""
        self._outgoing: list[Outgoing] = []
        self._records: list[bytes] = []
        self.announcements = Announcements()
        self._record(rules)

    @classmethod
    def restored(cls, records: Iterable[bytes], now: float) -> MembershipCoordinator:
        """Return the coordinator that wrote these records; the first one has its rules."""
        started, *further = (decode_record(record) for record in records)
        assert isinstance(started, Started), "a coordinator log begins with the rules"
        coordinator = cls(started)
        for record in further:
            coordinator._replay(record, now)
        coordinator._records.clear()
        return coordinator

    @property
    def rules(self) -> Started:
        """Rules of the run."""
        return self._rules

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.workers.generation

    @property
    def phase(self) -> Phase:
        """Phase of the coordinator."""
        return self._phase

    @property
    def members(self) -> dict[int, int]:
        """Members of the generation that have not failed, with their incarnations."""
        return self.workers.members

    @property
    def failures(self) -> Failures:
        """Failures so far, for the launchers."""
        return Failures(self.generation, [(*failed, *place) for failed, place in self._failed.items()])

    def view(self, launchers: int) -> MembersView:
        """Return the workers for the launcher of the run; `launchers` is the number of the others."""
        running, failed, left = (self.workers.numbers_in(*states) for states in (("new", "in"), ("gone",), ("left",)))
        stopped = self._why if self._phase == "stopped" else ""
        incarnations = {worker: replica.incarnation for worker, replica in self.workers.replicas.items()}
        finished = self.workers.finished_count()
        return MembersView(self.generation, running, failed, left, finished, launchers, stopped, incarnations)

    def ended_processes(self) -> list[Event]:
        """Return the failures of workers that have no later process, for services that may not know of them."""
        gone = (replica for replica in self.workers.replicas.values() if replica.state == "gone")
        return [{"what": "failed", "worker": one.worker, "incarnation": one.incarnation} for one in gone]

    def records(self) -> list[bytes]:
        """Return the records that must be on disk before any further message is sent; each once."""
        records, self._records = self._records, []
        return records

    def give(self, position: Position, value: bytes | None) -> bytes | None:
        """Give a value, unless it is None or the position has one; return that of the position, if there is one."""
        if value is not None and self._values.give(position, None) is None:
            self._record(Gave(position, value))
        return self._values.give(position, value)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def receive(
        self, worker: int, incarnation: int, message: WorkerMessage, now: float, rank: int = 0, ranks: int = 1
    ) -> list[Outgoing]:
        """Process a message of one rank of a worker that has this number of ranks; return the messages to send."""
        replica = self.workers.replicas.get(worker)
        reply: CoordinatorMessage | None = _refusal(replica, worker, incarnation, rank, ranks)
        if reply is not None:
            return [Outgoing(worker, incarnation, reply, rank, ranks)]
        if replica is None or incarnation > replica.incarnation:
            replica = self._begin(worker, incarnation, ranks, rank, now)
        if self._phase == "stopped":
            reply = Shutdown(self._why, self.uneven is not None)
        elif replica.state == "gone":
            reply = Evicted(replica.why, replica.is_unreachable)
        elif replica.state == "left":
            reply = self._reply_to_left(replica, rank, ranks, message)
        else:
            replica.ranks[rank].last_message, replica.ranks[rank].slow = now, False
            self._process_message(replica, replica.ranks[rank], message, now)
        if reply is not None:
            self._outgoing.append(Outgoing(worker, incarnation, reply, rank, ranks))
        return self._settled(now)

    def process_exited(
        self,
        worker: int,
        incarnation: int,
        now: float,
        will_restart: bool = False,
        why: str = "its process ended",
        rank: int = 0,
    ) -> list[Outgoing]:
        """Process the exit of a rank, which ends its worker; the launcher restarts the worker or not.

        Lines of `why` after the first are announced once, and not kept; of workers that the run began with, by their
        launcher.
        """
        replica = self.workers.replicas.get(worker)
        if replica is None or incarnation > replica.incarnation:
            replica = self._begin(worker, incarnation, rank + 1, rank, now)
        if incarnation == replica.incarnation and replica.state != "left":
            restart_note = f", worker {worker} is restarted" if will_restart else ""
            headline, _, details = why.partition("\n")
            is_news = replica.state != "gone"
            self._end(replica, headline, will_restart, now, restart_note=restart_note, rank=rank)
            if details and is_news and worker >= self._rules.expected:
                self.announcements.notices.append(details)
        return self._settled(now)

    def give_numbers(
        self, launcher: str, count: int, first: int | None = None, replaces: bool = False
    ) -> tuple[int, ...]:
        """Return the numbers of the workers of a launcher that joins, the same ones when it asks again.

        They begin at `first` if the run begins with these workers, and if their numbers are free, or belong to a
        launcher that this launcher `replaces`.
        """
        if launcher not in self.workers.given:
            given = self.workers.given[launcher] = self.workers.next_numbers(launcher, count, first, replaces)
            self._record(given)
        return self.workers.given[launcher].numbers

    def tick(self, now: float) -> list[Outgoing]:
        """Process the passing of time: failure timeouts may have run out."""
        for replica in self.workers.replicas.values():
            if replica.is_running:
                self._check_heartbeats(replica, now)
        self._check_limits(now)
        return self._settled(now)

    def _check_heartbeats(self, replica: Replica, now: float) -> None:
        for rank, silent in replica.silent_ranks(self._rules.failure_timeout_s, now):
            self._end(replica, f"no heartbeat for {silent:.1f} s", True, now, rank=rank.number)
            return
        for rank, silent in replica.silent_ranks(self._rules.failure_timeout_s / 2, now):
            if not rank.slow:
                rank.slow = True
                limit_s = self._rules.failure_timeout_s
                self.announcements.slow(replica, rank, self.generation, silent, limit_s, now)

    def extend_timeouts(self, seconds: float) -> None:
        """Extend all failure timeouts after a time in which no message was received."""
        for replica in self.workers.replicas.values():
            for rank in replica.ranks:
                rank.last_message = rank.last_message + seconds if rank.last_message is not None else None

    def save(self, now: float) -> list[Outgoing]:
        """Request a checkpoint, made when all members are paused between two steps."""
        self._saves = not self._rules.asynchronous
        return self._settled(now)

    def end_run(self, now: float) -> list[Outgoing]:
        """Let all workers leave as if each had asked to; those of an asynchronous run leave only if they ask."""
        for replica in () if self._rules.asynchronous else [*self.workers.replicas.values()]:
            if replica.is_running:
                self._on_quit(replica, now)
        return self._settled(now)

    def stop(self, why: str, now: float) -> list[Outgoing]:
        """End the run, since it cannot continue."""
        self._stop(why)
        return self._settled(now)

    def _process_message(self, replica: Replica, rank: Rank, message: WorkerMessage, now: float) -> None:
        match message:
            case Register():
                self._send(replica, rank, Registered(self._rules.asynchronous, self.generation))
            case Heartbeat():
                self._on_heartbeat(replica, rank, message, now)
            case Broken():
                self._on_broken(replica, rank, message, now)
            case ReadyReport():
                self._on_ready(replica, rank, message, now)
            case Quit():
                self._on_quit(replica, now)
            case Leave():
                self._end(replica, "it has left the loop", False, now, "left")

    def _reply_to_left(
        self, replica: Replica, rank: int, ranks: int, message: WorkerMessage
    ) -> CoordinatorMessage | None:
        """Return the reply to a rank of a worker that has left."""
        if isinstance(message, Register):
            return Registered(self._rules.asynchronous, self.generation)
        if not isinstance(message, ReadyReport):
            return None
        if replica.why != ASKED and ranks > 1:  # this rank waits for others, though its replica has finished
            return Evicted("another rank of this worker has left the loop")
        is_in = any(member.worker == replica.worker for member in self.workers.view.members)
        return None if is_in else self.workers.formed.view_of(rank)

    def _on_heartbeat(self, replica: Replica, rank: Rank, message: Heartbeat, now: float) -> None:
        rank.doing, rank.since, rank.place = message.doing, now - message.for_s, max(rank.place, message.place)
        if replica.state != "in" or message.generation != self.generation:
            return
        rank.global_step = max(rank.global_step, message.global_step)
        self._note_exchange(rank, message.waits)
        if self._phase == "aborting" and rank.report is None:
            self._send(replica, rank, AbortGeneration(self.generation, self._why))
        elif self._phase == "pausing" and rank.report is None:
            self._send(replica, rank, PauseRequest(self.generation))

    def _on_broken(self, replica: Replica, rank: Rank, message: Broken, now: float) -> None:
        is_news = replica.state == "in" and message.generation == self.generation
        if is_news and message.forming and not self._rules.asynchronous:
            others = (self.workers.replicas[one] for one in message.unreached if one in self.members)
            self._apart |= {_pair(replica, other) for other in others if other is not replica}
        if is_news and self._phase in ("running", "pausing") and not self._rules.asynchronous:
            problem = f"a collective operation of {replica.name_of(rank)} broke off"
            self.announcements.notices.append(f"{problem} ({message.why}); re-forming the group")
            self._abort(f"{problem}: {message.why}", now)
            self._is_exchange_broken, self._is_unformed = not message.forming, message.forming

    def _on_ready(self, replica: Replica, rank: Rank, message: ReadyReport, now: float) -> None:
        if replica.state == "new":
            self._on_ready_of_new(replica, rank, message, now)
        elif message.generation > self.generation:  # the log was damaged and lost this generation
            self._evict(replica, rank, UNKNOWN, now)
        elif abs(message.generation) < self.generation and (
            not self._rules.asynchronous or abs(message.generation) < replica.last_generation
        ):
            self._resend_generation(replica, rank)
        elif self._rules.asynchronous:
            self._admit(replica, rank, message, now)
        elif abs(message.generation) == self.generation and not message.between_steps:
            rank.report = message
            self._note_exchange(rank, message.waits)
            if self._phase in ("running", "pausing"):
                self._abort(f"{replica.name_of(rank)} paused", now)
        elif message.generation == self.generation and self._phase == "aborting":
            self._send(replica, rank, AbortGeneration(self.generation, self._why))
        elif message.generation == self.generation:
            self._on_ready_between_steps(replica, rank, message)

    def _note_exchange(self, rank: Rank, waits: Waits | None) -> None:
        """Note where a member waits. Loops of unequal length end the run: no later operation can match again."""
        if waits is None or self._rules.asynchronous or self._phase == "stopped":
            return
        rank.waits = waits
        if self._exchanges[rank.number].differs(waits):
            peers = {worker: self.workers.replicas[worker].ranks[rank.number :] for worker in self.members}
            waits_by_worker = {worker: ranks[0].waits for worker, ranks in peers.items() if ranks}
            positions = {
                worker: member_waits.place
                for worker, member_waits in waits_by_worker.items()
                if member_waits and member_waits.exchange >= waits.exchange
            }
            self._stop(explained(positions), uneven=True)

    def _on_ready_of_new(self, replica: Replica, rank: Rank, message: ReadyReport, now: float) -> None:
        if message.generation > replica.last_generation:
            self._evict(replica, rank, UNKNOWN, now)
        elif message.generation <= 0 and self.workers.is_over():
            self._send(replica, rank, self.workers.formed.view_of(rank.number))
        elif message.generation <= 0 and rank.report is None:
            limit = self._rules.max_workers
            others = (other for other in self.workers.new_replicas() if other is not replica)
            if limit is not None and len(self.members) + sum(other.is_any_ready for other in others) >= limit:
                self._evict(replica, rank, f"the run has its {limit} workers", now)
            elif self._rules.asynchronous:
                self._admit(replica, rank, message, now)
            else:
                rank.report = message

    def _on_ready_between_steps(self, replica: Replica, rank: Rank, message: ReadyReport) -> None:
        view = self.workers.formed.view_of(rank.number)
        stored_report = next(member.report for member in view.members if member.worker == replica.worker)
        if message == stored_report:
            self._send(replica, rank, view)
        elif message.global_step <= view.boundary_step:
            self._send(replica, rank, Continue(self.generation, view.boundary_step + 1))
        elif rank.report is None or message.global_step > rank.report.global_step:
            rank.report, rank.global_step = message, max(rank.global_step, message.global_step)

    def _resend_generation(self, replica: Replica, rank: Rank) -> None:
        """Send the current generation again to a member that missed it."""
        self._send(replica, rank, self.workers.formed.view_of(rank.number))
        if self._phase == "aborting":
            self._send(replica, rank, AbortGeneration(self.generation, self._why))

    def _evict(self, replica: Replica, rank: Rank, why: str, now: float) -> None:
        """End a replica because of a message of this rank, and notify the rank."""
        self._end(replica, why, False, now, rank=rank.number)
        self._send(replica, rank, Evicted(replica.why, replica.is_unreachable))

    def _on_quit(self, replica: Replica, now: float) -> None:
        replica.is_leaving = True
        if replica.state == "new":
            self._end(replica, ASKED, False, now, "left")
        elif self._rules.asynchronous:
            remaining = [member for member in self.members if member != replica.worker]
            self._form_asynchronous(remaining, ASKED, now, replica.worker)

    # --- rules -------------------------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[Outgoing]:
        """Take all steps that follow; return the messages to send."""
        while self._step(now):
            pass
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _step(self, now: float) -> bool:
        """Take one step that follows from the state; return False if there is none."""
        if self._phase == "gathering":
            return self._start_over(now, "")
        if self._phase == "stopped":
            return False
        if self._rules.asynchronous:
            return self._stop_if_few(now)
        if self._phase == "aborting":
            return self._form_after_abort(now)
        if self.workers.failed_members():
            return self._abort(self.workers.described_failures(self.workers.failed_members()), now)
        if not self.members and self.workers.new_replicas() and not self.workers.is_over():
            return self._start_over(now, NO_STATE_LEFT)
        return self._form_between_steps(now) if self._phase == "pausing" else self._request_pause()

    def _abort(self, why: str, now: float) -> bool:
        """End the generation: its remaining members have to pause."""
        self._phase, self._why = "aborting", why
        self._limit = None if self.workers.failed_members() else now + self._rules.failure_timeout_s
        for replica in self._member_replicas():
            for rank in replica.ranks:
                rank.report = None if rank.is_between_steps else rank.report
            self._send_all(replica, AbortGeneration(self.generation, why))
        return True

    def _request_pause(self) -> bool:
        """Ask all members to pause before their next step, if there is a reason."""
        members = self._member_replicas()
        is_wanted = (
            self._saves
            or self.workers.waiting_workers()
            or any(replica.is_leaving or replica.is_any_ready for replica in members)
        )
        if not members or not is_wanted:
            return False
        self._phase = "pausing"
        for replica in members:
            for rank in replica.running_ranks():
                self._send(replica, rank, PauseRequest(self.generation))
        return True

    def _form_between_steps(self, now: float) -> bool:
        """Pause all members at one global step; then admit and release workers, or make a checkpoint."""
        members = self._member_replicas()
        if not members:
            self._phase = "running"
            return False
        self._continue_late(members)
        if not all(replica.is_ready for replica in members):
            return False
        leaving = [replica.worker for replica in members if replica.is_leaving]
        remaining = sorted({*self.members, *self.workers.waiting_workers()} - set(leaving))
        if not remaining and self._rules.saves and self._saved_last != self.generation:
            self._saves, self._saved_last, remaining = True, self.generation, sorted(self.members)
        if remaining == [member.worker for member in self.workers.view.members]:
            self._continue_generation(remaining)
        else:
            self._form(remaining, self.workers.described_change(remaining, leaving), now, leaving)
            self._abort_if_few(remaining)
        return True

    def _continue_late(self, members: list[Replica]) -> None:
        """Send ranks that are paused before the furthest global step on to it."""
        ranks = [(replica, rank) for replica in members for rank in replica.ranks]
        furthest = max(self._continue_to, *(rank.global_step for _, rank in ranks))
        late = [(replica, rank) for replica, rank in ranks if rank.is_behind(furthest)]
        if late and furthest > self._continue_to:
            self._continue_to = furthest
            self._record(ContinuedTo(furthest))
        for replica, rank in late:
            rank.report = None
            self._send(replica, rank, Continue(self.generation, furthest))

    def _abort_if_few(self, remaining: list[int]) -> None:
        """Abort the generation if too few members remain after the others left."""
        if 0 < len(remaining) < self._rules.min_workers:
            self._abort(self._few(len(remaining)), 0.0)
            self._limit = None

    def _form_after_abort(self, now: float) -> bool:
        """Form the next generation of the members with state once all remaining members are paused."""
        members = self._member_replicas()
        if not all(replica.is_ready for replica in members):
            return False
        if self._end_unreachable(members, now):
            return True
        if self._is_unformed and not self._apart and self._is_stuck(members):
            return self._stop(self._stuck_reason(members))
        if (divided := next((replica for replica in members if replica.is_divided), None)) is not None:
            stateless = next(rank for rank in divided.ranks if not rank.has_history)
            self._end(divided, DIVIDED, True, now, rank=stateless.number)
            return True
        history = sorted(replica.worker for replica in members if replica.has_history)
        if not history:
            return self._start_over(now, NO_STATE_LEFT)
        stateless_count = len(self.workers.waiting_workers()) + len(members) - len(history)
        if len(history) + stateless_count + self.workers.finished_count() < self._rules.min_workers:
            return self._stop_if_few(now)
        if self._is_exchange_broken and self._is_stuck(members):
            return self._stop(self._stuck_reason(members))
        why = self._why
        if len(history) == 1 and len(self.workers.view.members) > 1:
            why += f"; worker {history[0]} continues alone: no other worker has what it commits now"
            self.announcements.notices.append(why)
        return self._form(history, why, now)

    def _end_unreachable(self, members: list[Replica], now: float) -> bool:
        """End a member that has failed to connect with another one in several generations; False without such members.

        It is the one with the most others that it failed to connect with, then one without state, then the one that
        joined last.
        """
        running = {(replica.worker, replica.incarnation) for replica in members}
        times = self._times_apart + Counter(self._apart)
        apart = [pair for pair, count in times.items() if count >= UNREACHED and pair <= running]
        if not apart:
            return False
        others = Counter(one for pair in apart for one in pair)
        by_worker = {replica.worker: replica for replica in members}
        worker, _ = max(others, key=lambda one: (others[one], not by_worker[one[0]].has_history, one))
        pair = next(pair for pair in apart if worker in dict(pair))
        (other,) = dict(pair).keys() - {worker}
        places = {member.worker: member.report.address.partition(" ")[0] for member in self.workers.view.members}
        own, there = (f"worker {one} at {places.get(one) or 'an unknown address'}" for one in (worker, other))
        by_worker[worker].is_unreachable = True
        self._evict(
            by_worker[worker], by_worker[worker].ranks[0], f"{own} and {there} did not connect {UNREACHED} times", now
        )
        return True

    def _is_stuck(self, members: list[Replica]) -> bool:
        """Return True if the same members have repeatedly aborted the same operation and none has completed it."""
        reports = sorted(
            (replica.worker, replica.incarnation, *(report.commits for report in replica.reports()))
            for replica in members
        )
        previous_reports, times = self._last_abort
        self._last_abort = reports, times + 1 if reports == previous_reports else 1
        return self._last_abort[1] >= STUCK

    def _stuck_reason(self, members: list[Replica]) -> str:
        positions = {replica.worker: replica.waits.place for replica in members if replica.waits is not None}
        return f"the same workers have aborted the same operation {STUCK} times: {sentence(positions) or self._why}"

    def _start_over(self, now: float, why: str) -> bool:
        """Start from the beginning, since no worker has state: wait for all that can come, and form a generation."""
        waiting = sorted(
            replica.worker for replica in self.workers.replicas.values() if replica.is_running and replica.is_ready
        )
        if self.workers.is_any_to_come(now) or self.workers.is_over():
            return self._stop_if_few(now)
        if not waiting or len(waiting) + self.workers.finished_count() < self._rules.min_workers:
            return self._stop(self._few(len(waiting)))
        if why:
            self.announcements.notices.append(why)
        return self._form(waiting, why, now)

    def _stop_if_few(self, now: float) -> bool:
        """Stop the run if too few workers are there or may still come."""
        available = sum(
            replica.is_running or self.workers.may_return(replica, now) for replica in self.workers.replicas.values()
        )
        if available + self.workers.unseen_count() + self.workers.finished_count() >= max(self._rules.min_workers, 1):
            return False
        return self._stop(self._few(available))

    def _few(self, available: int) -> str:
        return f"{_workers(available)} cannot continue, at least {max(self._rules.min_workers, 1)} are required"

    def _check_limits(self, now: float) -> None:
        limit_s = self._rules.failure_timeout_s
        if self._phase == "aborting" and self._limit is not None and now > self._limit:
            for replica in self._member_replicas():
                if (rank := next(replica.running_ranks(), None)) is not None:
                    self._end(replica, f"it did not pause within {limit_s:g} s", True, now, rank=rank.number)
        if self._phase in ("running", "pausing") and not self._rules.asynchronous and self.members:
            departed = [member for member in self.workers.view.members if self.workers.has_left(member)]
            if departed and all(now > self.workers.replicas[member.worker].ended_at + limit_s for member in departed):
                self._abort(f"worker {departed[0].worker} has left the loop", now)
                self._limit = None

    # --- transitions -------------------------------------------------------------------------------------------------

    def _begin(self, worker: int, incarnation: int, ranks: int, rank: int, now: float) -> Replica:
        """Note a new incarnation, of which this rank is seen; the previous one has ended."""
        previous = self.workers.replicas.get(worker)
        if previous is not None and previous.is_running:
            self._end(previous, "its next process has begun", True, now, rank=min(rank, len(previous.ranks) - 1))
        replica = self.workers.replicas[worker] = Replica(worker, incarnation, ranks)
        replica.ranks[rank].last_message = now
        return replica

    def _end(
        self,
        replica: Replica,
        why: str,
        will_restart: bool,
        now: float,
        state: Literal["gone", "left"] = "gone",
        restart_note: str = "",
        rank: int = 0,
    ) -> None:
        """Note the end of an incarnation, of which this rank is the cause; its other ranks are evicted."""
        if replica.state == "gone" and replica.will_restart == will_restart:
            return
        if replica.is_running:
            replica.why, replica.failed_rank = why, rank
        if replica.is_running and state == "gone":
            remaining = sum(member != replica.worker for member in self.members)
            self.announcements.failed(replica, self.generation, remaining, restart_note, now)
            self._send_all(replica, Evicted(why, replica.is_unreachable), without=rank)
        if state == "left":
            self._note("left", of_process(replica.worker), replica.incarnation, why)
        if replica.state == "in":
            self._limit = None
        replica.state, replica.will_restart, replica.ended_at = state, will_restart, now
        self._note_ended(replica)
        ended = replica.worker, replica.incarnation, state, replica.why, will_restart
        self._record(EndedByRank(*ended, replica.failed_rank) if replica.failed_rank else Ended(*ended))

    def _note_ended(self, replica: Replica) -> None:
        """Note a failed incarnation for the launchers."""
        if replica.state == "gone":
            failed = replica.worker, replica.incarnation
            self._failed.setdefault(failed, (self.generation, replica.failed_rank))

    def _admit(self, replica: Replica, rank: Rank, message: ReadyReport, now: float) -> None:
        """Admit a worker as soon as its ranks are ready, in asynchronous training; no other worker is notified.

        If the run begins with others that join, the first ones wait for them.
        """
        rank.report = message
        waiting = [replica.worker] if self.generation else self.workers.waiting_workers()
        begins_with = 0 if self.generation else self._rules.begins_with
        if replica.is_ready and (begins_with <= self._rules.expected or len(waiting) >= begins_with):
            for worker in waiting:
                why = f"worker {worker} joined"
                self._form_asynchronous([*self.members.keys() - {worker}, worker], why, now, worker)

    def _form_asynchronous(self, workers: list[int], why: str, now: float, notified: int) -> None:
        """Form a generation of which only the worker that caused it is notified."""
        for worker in workers:
            replica = self.workers.replicas[worker]
            for rank in replica.running_ranks():
                rank.report = ReadyReport(replica.last_generation)
        self._form(sorted(workers), why, now, [] if notified in workers else [notified], only=notified)

    def _form(
        self, workers: list[int], why: str, now: float, leaving: list[int] | None = None, only: int | None = None
    ) -> bool:
        """Form the next generation of these workers."""
        leaving = leaving or []
        previous = {member.worker: member.incarnation for member in self.workers.view.members}
        formed = self.workers.generation_of(workers, self.generation + 1, leaving, why)
        self._record(formed)  # it requests no checkpoint: joining workers could not take part
        self._enter(formed, now)
        for worker in [*workers, *leaving] if only is None else [only]:
            self._send_view(worker)
        for member in formed.view.members:
            if previous.get(member.worker) != member.incarnation:
                self._note("joined", of_process(member.worker), member.incarnation, why)
        for worker in leaving:
            self.announcements.left(self.workers.replicas[worker], self.generation, len(workers))
        self._note("formed", of_process(COORDINATOR), 0, why, members=workers)
        return True

    def _continue_generation(self, workers: list[int]) -> None:
        """Continue the same generation after a pause."""
        formed = self.workers.generation_of(workers, self.generation, [], "", self._saves)
        self._record(formed)
        self._enter(formed, 0.0)
        for worker in workers:
            self._send_view(worker)

    def _enter(self, formed: Formed, now: float) -> None:
        """Make a generation, new or read from the log, the current one."""
        previous, view = self.workers.view, formed.view
        self.workers.formed = formed
        self._exchanges.clear()
        self._note_apart(previous)
        self._is_exchange_broken = False
        self._phase, self._limit, self._continue_to = "running", None, 0
        self._saves = self._saves and not view.save
        for member in previous.members:
            replica = self.workers.replicas.get(member.worker)
            if replica is None or not self.workers.is_member(member) or member.worker in view.numbers:
                continue
            if member.worker in formed.left:
                replica.state, replica.why, replica.ended_at = "left", ASKED, now
            else:
                replica.state = "new"
        for member in view.members:
            self.workers.replicas[member.worker].enter(view.generation)

    def _note_apart(self, previous: GenerationView) -> None:
        """Count the pairs that were apart in a generation that ends; if its members were connected, count from 0."""
        if not self._is_unformed:
            members = {(member.worker, member.incarnation) for member in previous.members}
            self._times_apart = Counter(
                {pair: times for pair, times in self._times_apart.items() if not pair <= members}
            )
        self._times_apart.update(self._apart)
        self._apart, self._is_unformed = set(), False

    def _stop(self, why: str, uneven: bool = False) -> bool:
        """End the run. Workers whose loops are `uneven` raise it as an error of their scripts."""
        self._phase, self._why, self.uneven = "stopped", why, why if uneven else None
        self._record(Stopped(why, uneven))
        for replica in self.workers.replicas.values():
            if replica.is_running:
                self._send_all(replica, Shutdown(why, uneven))
        return True

    def _replay(self, record: AnyRecord, now: float) -> None:
        match record:
            case Formed(view):
                for member, ranks in zip(view.members, record.ranks(), strict=True):
                    replica = self.workers.replicas.get(member.worker)
                    if replica is None or replica.incarnation < member.incarnation:
                        self.workers.replicas[member.worker] = Replica(member.worker, member.incarnation, ranks, now)
                self._enter(record, now)
            case ContinuedTo(global_step):
                self._continue_to = global_step
            case NumbersGiven(launcher):
                self.workers.given[launcher] = record
            case Gave(position, value):
                self._values.give(position, value)
            case Ended():
                self._replay_end(record, now)
            case Stopped(why, uneven):
                self._phase, self._why, self.uneven = "stopped", why, why if uneven else None

    def _replay_end(self, record: Ended, now: float) -> None:
        replica = self.workers.replicas[record.worker] = Replica(record.worker, record.incarnation, 1, now)
        replica.state, replica.why, replica.failed_rank = record.state, record.why, record.failed_rank
        replica.will_restart, replica.ended_at = record.will_restart, now
        self._note_ended(replica)

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _member_replicas(self) -> list[Replica]:
        """Return the members of the generation that have not failed."""
        return [self.workers.replicas[worker] for worker in self.members]

    def _send(self, replica: Replica, rank: Rank, message: CoordinatorMessage) -> None:
        self._outgoing.append(Outgoing(replica.worker, replica.incarnation, message, rank.number, len(replica.ranks)))

    def _send_all(self, replica: Replica, message: CoordinatorMessage, without: int | None = None) -> None:
        """Send a message to all ranks from which one has arrived, or to those without one."""
        for rank in replica.ranks:
            if rank.number != without and rank.last_message is not None:
                self._send(replica, rank, message)

    def _send_view(self, worker: int) -> None:
        """Send each rank of a worker the current generation."""
        replica = self.workers.replicas[worker]
        for rank in replica.ranks:
            self._send(replica, rank, self.workers.formed.view_of(rank.number))

    def _record(self, record: AnyRecord) -> None:
        self._records.append(encode_record(record))

    def _note(self, change: str, process: Event, incarnation: int, why: str, **further: object) -> None:
        self.announcements.changed(change, process, incarnation, self.generation, why, **further)


def _refusal(
    replica: Replica | None, worker: int, incarnation: int, rank: int, ranks: int
) -> Evicted | Shutdown | None:
    """Return the reply to a rank whose message is refused, or None."""
    if rank >= ranks:
        return Shutdown(f"worker {worker} was started with rank {rank} of {ranks} ranks: ranks are numbered from 0")
    if replica is None or incarnation > replica.incarnation:
        return None
    if incarnation < replica.incarnation:
        return Evicted(f"a later process of worker {worker} has taken its place")
    if replica.is_running and ranks != len(replica.ranks):
        expected = len(replica.ranks)
        return Shutdown(
            f"rank {rank} of worker {worker} was started with {ranks} ranks, its other ranks with {expected}: "
            "all ranks of a worker are started with the same number"
        )
    return None


def _pair(one: Replica, other: Replica) -> _Pair:
    return frozenset(((one.worker, one.incarnation), (other.worker, other.incarnation)))


def _workers(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"
