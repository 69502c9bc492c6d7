"""The membership coordinator: the workers, their incarnations, and the generations that they form. A plain state
machine.

Its inputs are workers' messages, process exits that the launcher reports, and the time; its outputs are messages to
workers. Messages may be lost, duplicated and late: a worker repeats a message until it has the reply, and gets the same
reply again. `membership.messages` describes the protocol.

Two statements of a worker are final: that it is paused after an `AbortGeneration` of generation G (its `ReadyReport`
has that generation and is not `between_steps`), and that it was in G without receiving any state (`ReadyReport` with
-G, which the others are shown as 0). A worker paused between two steps may be asked to continue to a later step, so the
global steps order its reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from stretto.events import COORDINATOR, Event, of_process
from stretto.membership.coordinator_records import (
    AnyRecord,
    ContinuedTo,
    Ended,
    Formed,
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
    Member,
    PauseRequest,
    Quit,
    ReadyReport,
    Register,
    Registered,
    Shutdown,
    WorkerMessage,
)
from stretto.membership.worker_table import ASKED, WorkerProcess, WorkerTable

UNKNOWN = "the run does not know the generation that it comes from"
STUCK = 5
"""Number of times in a row that the same members may abort the same collective operation."""
NO_STATE_LEFT = "no worker with state is left: all restart from the last checkpoint"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message to one incarnation of a worker."""

    worker: int
    incarnation: int
    message: CoordinatorMessage


Phase: TypeAlias = Literal["gathering", "running", "pausing", "aborting", "stopped"]


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
        self._failed: dict[tuple[int, int], int] = {}
        """Failed workers and incarnations, with the generation in which each failed."""
        self._exchanges = Exchanges()
        self._is_exchange_broken = False
        """True if the generation was aborted because a collective operation failed, not for a failed worker or
        rendezvous."""
        self._last_abort: tuple[list[tuple[int, int, int]], int] = [], 0
        """Members at the last aborted operation, with incarnations and commits, and the times in a row."""
        self.uneven: str | None = None
        """Reason why the run cannot continue, if the workers' loops are of unequal length."""
        self._outgoing: list[Outgoing] = []
        self._records: list[bytes] = []
        self.notices: list[str] = []
        """Notices for the user since they were last taken."""
        self.events: list[Event] = []
        """Events for the event log since they were last taken."""
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
        return Failures(self.generation, [(*failed, generation) for failed, generation in self._failed.items()])

    def ended_processes(self) -> list[Event]:
        """Return the failures of workers that have no later process, for services that may not know of them."""
        gone = ((worker, process) for worker, process in self.workers.processes.items() if process.state == "gone")
        return [{"what": "failed", "worker": worker, "incarnation": process.incarnation} for worker, process in gone]

    def records(self) -> list[bytes]:
        """Return the records that must be on disk before any further message is sent; each once."""
        records, self._records = self._records, []
        return records

    # --- inputs ------------------------------------------------------------------------------------------------------

    def receive(self, worker: int, incarnation: int, message: WorkerMessage, now: float) -> list[Outgoing]:
        """Process a worker's message; return the messages to send."""
        process = self.workers.processes.get(worker)
        if process is not None and incarnation < process.incarnation:
            return [Outgoing(worker, incarnation, Evicted(f"a later process of worker {worker} has taken its place"))]
        if process is None or incarnation > process.incarnation:
            process = self._begin(worker, incarnation, now)
        if self._phase == "stopped":
            self._send(worker, Shutdown(self._why, self.uneven is not None))
        elif process.state == "gone":
            self._send(worker, Evicted(process.why))
        else:
            process.last_message, process.slow = now, False
            self._process_message(worker, process, message, now)
        return self._settled(now)

    def process_exited(
        self, worker: int, incarnation: int, now: float, will_restart: bool = False, why: str = "its process ended"
    ) -> list[Outgoing]:
        """Process the exit of a process, which the launcher restarts or not."""
        process = self.workers.processes.get(worker)
        if process is None or incarnation > process.incarnation:
            process = self._begin(worker, incarnation, now)
        if incarnation == process.incarnation and process.state != "left":
            self._end(
                worker, why, will_restart, now, restart_note=f", worker {worker} is restarted" if will_restart else ""
            )
        return self._settled(now)

    def tick(self, now: float) -> list[Outgoing]:
        """Process the passing of time: failure timeouts may have run out."""
        for worker, process in self.workers.processes.items():
            silent = now - process.last_message
            if process.is_running and silent > self._rules.failure_timeout_s:
                self._end(worker, f"no heartbeat for {silent:.1f} s", True, now)
            elif process.is_running and silent > self._rules.failure_timeout_s / 2 and not process.slow:
                process.slow = True
                self._note_slow(worker, silent, now)
        self._check_limits(now)
        return self._settled(now)

    def extend_timeouts(self, seconds: float) -> None:
        """Extend all failure timeouts after a time in which no message was received."""
        for process in self.workers.processes.values():
            process.last_message += seconds

    def save(self, now: float) -> list[Outgoing]:
        """Request a checkpoint, made when all members are paused between two steps."""
        self._saves = not self._rules.asynchronous
        return self._settled(now)

    def _process_message(self, worker: int, process: WorkerProcess, message: WorkerMessage, now: float) -> None:
        match message:
            case Register():
                self._send(worker, Registered(self._rules.asynchronous, self.generation))
            case Heartbeat():
                self._on_heartbeat(worker, process, message, now)
            case Broken():
                self._on_broken(worker, process, message, now)
            case ReadyReport():
                self._on_ready(worker, process, message, now)
            case Quit():
                self._on_quit(worker, process, now)
            case Leave():
                self._on_leave(worker, process, now)

    def _on_heartbeat(self, worker: int, process: WorkerProcess, message: Heartbeat, now: float) -> None:
        process.doing, process.since, process.place = (
            message.doing,
            now - message.for_s,
            max(process.place, message.place),
        )
        if process.state != "in" or message.generation != self.generation:
            return
        process.global_step = max(process.global_step, message.global_step)
        self._note_exchange(process, message.waits)
        if self._phase == "aborting" and process.report is None:
            self._send(worker, AbortGeneration(self.generation, self._why))
        elif self._phase == "pausing" and process.report is None:
            self._send(worker, PauseRequest(self.generation))

    def _on_broken(self, worker: int, process: WorkerProcess, message: Broken, now: float) -> None:
        is_news = process.state == "in" and message.generation == self.generation
        if is_news and self._phase in ("running", "pausing") and not self._rules.asynchronous:
            self.notices.append(
                f"a collective operation of worker {worker} broke off ({message.why}); re-forming the group"
            )
            self._abort(f"a collective operation of worker {worker} broke off: {message.why}", now)
            self._is_exchange_broken = not message.forming

    def _on_ready(self, worker: int, process: WorkerProcess, message: ReadyReport, now: float) -> None:
        if process.state == "left":
            self._resend_generation(worker, message)
        elif process.state == "new":
            self._on_ready_of_new(worker, process, message, now)
        elif message.generation > self.generation:  # the log was damaged and lost this generation
            self._end(worker, UNKNOWN, False, now)
            self._send(worker, Evicted(process.why))
        elif abs(message.generation) < self.generation and (
            not self._rules.asynchronous or abs(message.generation) < process.last_generation
        ):
            self._resend_generation(worker, message)
        elif self._rules.asynchronous:
            self._admit(worker, process, message, now)
        elif abs(message.generation) == self.generation and not message.between_steps:
            process.report = message
            self._note_exchange(process, message.waits)
            if self._phase in ("running", "pausing"):
                self._abort(f"worker {worker} paused", now)
        elif message.generation == self.generation and self._phase == "aborting":
            self._send(worker, AbortGeneration(self.generation, self._why))
        elif message.generation == self.generation:
            self._on_ready_between_steps(worker, process, message)

    def _note_exchange(self, process: WorkerProcess, waits: Waits | None) -> None:
        """Note where a member waits. Loops of unequal length end the run: no later operation can match again."""
        if waits is None or self._rules.asynchronous or self._phase == "stopped":
            return
        process.waits = waits
        if self._exchanges.differs(waits):
            waits_by_worker = {worker: self.workers.processes[worker].waits for worker in self.members}
            positions = {
                worker: member_waits.place
                for worker, member_waits in waits_by_worker.items()
                if member_waits and member_waits.exchange >= waits.exchange
            }
            self._stop(explained(positions), uneven=True)

    def _on_ready_of_new(self, worker: int, process: WorkerProcess, message: ReadyReport, now: float) -> None:
        if message.generation > process.last_generation:
            self._end(worker, UNKNOWN, False, now)
            self._send(worker, Evicted(process.why))
        elif message.generation <= 0 and self.workers.is_over():
            self._send(worker, self.workers.view)
        elif message.generation <= 0 and process.report is None:
            limit = self._rules.max_workers
            admitted = len(self.members) + sum(
                new_process.report is not None for new_process in self.workers.new_processes().values()
            )
            if limit is not None and admitted >= limit:
                self._end(worker, f"the run has its {limit} workers", False, now)
                self._send(worker, Evicted(process.why))
            elif self._rules.asynchronous:
                self._admit(worker, process, message, now)
            else:
                process.report = message

    def _on_ready_between_steps(self, worker: int, process: WorkerProcess, message: ReadyReport) -> None:
        boundary_step = self.workers.view.boundary_step
        stored_report = next(member.report for member in self.workers.view.members if member.worker == worker)
        if message == stored_report:
            self._send(worker, self.workers.view)
        elif message.global_step <= boundary_step:
            self._send(worker, Continue(self.generation, boundary_step + 1))
        elif process.report is None or message.global_step > process.report.global_step:
            process.report, process.global_step = message, max(process.global_step, message.global_step)

    def _resend_generation(self, worker: int, message: ReadyReport) -> None:
        """Send the current generation again to a worker that missed it or is not in it."""
        is_in = any(member.worker == worker for member in self.workers.view.members)
        if is_in == (self.workers.processes[worker].state == "in"):
            self._send(worker, self.workers.view)
            if is_in and self._phase == "aborting":
                self._send(worker, AbortGeneration(self.generation, self._why))

    def _on_quit(self, worker: int, process: WorkerProcess, now: float) -> None:
        process.is_leaving = process.is_running
        if process.state == "new":
            self._end(worker, ASKED, False, now, "left")
        elif process.state == "in" and self._rules.asynchronous:
            self._form_asynchronous([member for member in self.members if member != worker], ASKED, now, worker)

    def _on_leave(self, worker: int, process: WorkerProcess, now: float) -> None:
        if process.is_running:
            self._end(worker, "it has left the loop", False, now, "left")

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
        if not self.members and self.workers.new_processes() and not self.workers.is_over():
            return self._start_over(now, NO_STATE_LEFT)
        return self._form_between_steps(now) if self._phase == "pausing" else self._request_pause()

    def _abort(self, why: str, now: float) -> bool:
        """End the generation: its remaining members have to pause."""
        self._phase, self._why = "aborting", why
        self._limit = None if self.workers.failed_members() else now + self._rules.failure_timeout_s
        for worker in self.members:
            if (report := self.workers.processes[worker].report) is not None and report.between_steps:
                self.workers.processes[worker].report = None
            self._send(worker, AbortGeneration(self.generation, why))
        return True

    def _request_pause(self) -> bool:
        """Ask all members to pause before their next step, if there is a reason."""
        members = [self.workers.processes[worker] for worker in self.members]
        is_wanted = (
            self._saves
            or self.workers.waiting_workers()
            or any(process.is_leaving or process.report is not None for process in members)
        )
        if not members or not is_wanted:
            return False
        self._phase = "pausing"
        for worker in self.members:
            if self.workers.processes[worker].report is None:
                self._send(worker, PauseRequest(self.generation))
        return True

    def _form_between_steps(self, now: float) -> bool:
        """Pause all members at one global step; then admit and release workers, or make a checkpoint."""
        members = {worker: self.workers.processes[worker] for worker in self.members}
        if not members:
            self._phase = "running"
            return False
        furthest = max(self._continue_to, *(process.global_step for process in members.values()))
        late = [
            worker
            for worker, process in members.items()
            if process.report is not None and process.report.global_step < furthest
        ]
        if late and furthest > self._continue_to:
            self._continue_to = furthest
            self._record(ContinuedTo(furthest))
        for worker in late:
            members[worker].report = None
            self._send(worker, Continue(self.generation, furthest))
        if any(process.report is None for process in members.values()):
            return False
        leaving = [worker for worker, process in members.items() if process.is_leaving]
        remaining = sorted({*members, *self.workers.waiting_workers()} - set(leaving))
        if remaining == [member.worker for member in self.workers.view.members]:
            self._continue_generation(remaining)
        else:
            self._form(remaining, self.workers.described_change(remaining, leaving), now, leaving)
            self._abort_if_few(remaining)
        return True

    def _abort_if_few(self, remaining: list[int]) -> None:
        """Abort the generation if too few members remain after the others left."""
        if 0 < len(remaining) < self._rules.min_workers:
            self._abort(self._few(len(remaining)), 0.0)
            self._limit = None

    def _form_after_abort(self, now: float) -> bool:
        """Form the next generation of the members with state once all remaining members are paused."""
        members = {worker: self.workers.processes[worker] for worker in self.members}
        if any(process.report is None for process in members.values()):
            return False
        history = sorted(
            worker for worker, process in members.items() if process.report and process.report.generation > 0
        )
        if not history:
            return self._start_over(now, NO_STATE_LEFT)
        stateless = len(self.workers.waiting_workers()) + len(members) - len(history) + self.workers.finished_count()
        if len(history) + stateless < self._rules.min_workers:
            return self._stop_if_few(now)
        if self._is_exchange_broken and self._is_stuck(members):
            return self._stop(self._stuck_reason(members))
        why = self._why
        if len(history) == 1 and len(self.workers.view.members) > 1:
            why += f"; worker {history[0]} continues alone: no other worker has what it commits now"
            self.notices.append(why)
        return self._form(history, why, now)

    def _is_stuck(self, members: dict[int, WorkerProcess]) -> bool:
        """Return True if the same members have repeatedly aborted the same operation and none has completed it."""
        reports = sorted(
            (worker, process.incarnation, process.report.commits if process.report else 0)
            for worker, process in members.items()
        )
        previous_reports, times = self._last_abort
        self._last_abort = reports, times + 1 if reports == previous_reports else 1
        return self._last_abort[1] >= STUCK

    def _stuck_reason(self, members: dict[int, WorkerProcess]) -> str:
        positions = {worker: process.waits.place for worker, process in members.items() if process.waits is not None}
        return f"the same workers have aborted the same operation {STUCK} times: {sentence(positions) or self._why}"

    def _start_over(self, now: float, why: str) -> bool:
        """Start from the beginning, since no worker has state: wait for all that can come, and form a generation."""
        waiting = sorted(
            worker
            for worker, process in self.workers.processes.items()
            if process.is_running and process.report is not None
        )
        if self.workers.is_any_to_come(now) or self.workers.is_over():
            return self._stop_if_few(now)
        if not waiting or len(waiting) + self.workers.finished_count() < self._rules.min_workers:
            return self._stop(self._few(len(waiting)))
        if why:
            self.notices.append(why)
        return self._form(waiting, why, now)

    def _stop_if_few(self, now: float) -> bool:
        """Stop the run if too few workers are there or may still come."""
        available = sum(
            process.is_running or self.workers.may_return(process, now) for process in self.workers.processes.values()
        )
        if available + self.workers.unseen_count() + self.workers.finished_count() >= max(self._rules.min_workers, 1):
            return False
        return self._stop(self._few(available))

    def _few(self, available: int) -> str:
        return f"{_workers(available)} cannot continue, at least {max(self._rules.min_workers, 1)} are required"

    def _check_limits(self, now: float) -> None:
        limit_s = self._rules.failure_timeout_s
        if self._phase == "aborting" and self._limit is not None and now > self._limit:
            for worker in self.members:
                if self.workers.processes[worker].report is None:
                    self._end(worker, f"it did not pause within {limit_s:g} s", True, now)
        if self._phase in ("running", "pausing") and not self._rules.asynchronous and self.members:
            departed = [member for member in self.workers.view.members if self.workers.has_left(member)]
            if departed and all(now > self.workers.processes[member.worker].ended_at + limit_s for member in departed):
                self._abort(f"worker {departed[0].worker} has left the loop", now)
                self._limit = None

    # --- transitions -------------------------------------------------------------------------------------------------

    def _begin(self, worker: int, incarnation: int, now: float) -> WorkerProcess:
        """Note a new incarnation; the previous one has ended."""
        if worker in self.workers.processes and self.workers.processes[worker].is_running:
            self._end(worker, "its next process has begun", True, now)
        self.workers.processes[worker] = WorkerProcess(incarnation, now)
        return self.workers.processes[worker]

    def _end(
        self,
        worker: int,
        why: str,
        will_restart: bool,
        now: float,
        state: Literal["gone", "left"] = "gone",
        restart_note: str = "",
    ) -> None:
        """Note the end of an incarnation."""
        process = self.workers.processes[worker]
        if process.state == "gone" and process.will_restart == will_restart:
            return
        if process.is_running and state == "gone":
            self._note_failed(worker, process, why, restart_note, now)
        if state == "left":
            self._note("left", worker, process.incarnation, why)
        if process.state == "in":
            self._limit = None
        process.why, process.will_restart, process.ended_at = (
            why if process.is_running else process.why,
            will_restart,
            now,
        )
        process.state = state
        self._note_ended(worker, process)
        self._record(Ended(worker, process.incarnation, state, process.why, will_restart))

    def _note_ended(self, worker: int, process: WorkerProcess) -> None:
        """Note a failed incarnation for the launchers."""
        if process.state == "gone":
            self._failed.setdefault((worker, process.incarnation), self.generation)

    def _admit(self, worker: int, process: WorkerProcess, message: ReadyReport, now: float) -> None:
        """Admit a worker immediately, in asynchronous training; no other worker is notified."""
        process.report = message
        self._form_asynchronous([*self.members.keys() - {worker}, worker], f"worker {worker} joined", now, worker)

    def _form_asynchronous(self, workers: list[int], why: str, now: float, notified: int) -> None:
        """Form a generation of which only the worker that caused it is notified."""
        for worker in workers:
            self.workers.processes[worker].report = self.workers.processes[worker].report or ReadyReport(
                self.workers.processes[worker].last_generation
            )
        self._form(sorted(workers), why, now, [] if notified in workers else [notified], only=notified)

    def _form(
        self, workers: list[int], why: str, now: float, leaving: list[int] | None = None, only: int | None = None
    ) -> bool:
        """Form the next generation of these workers."""
        previous = {member.worker: member.incarnation for member in self.workers.view.members}
        members = [
            Member(worker, self.workers.processes[worker].incarnation, _shown(self.workers.processes[worker].report))
            for worker in workers
        ]
        removed = sorted(worker for worker in previous if worker not in workers)
        view = GenerationView(
            self.generation + 1, members, removed, why
        )  # no checkpoint: joining workers could not take part
        notified = [*workers, *(leaving or [])]
        joined = [member for member in members if previous.get(member.worker) != member.incarnation]
        self._record(Formed(view, leaving or []))
        self._enter(view, leaving or [], now)
        for worker in notified if only is None else [only]:
            self._send(worker, view)
        for member in joined:
            self._note("joined", member.worker, member.incarnation, why)
        for worker in leaving or []:
            self._note("left", worker, self.workers.processes[worker].incarnation, ASKED)
        self._note("formed", COORDINATOR, 0, why, members=workers)
        return True

    def _continue_generation(self, workers: list[int]) -> None:
        """Continue the same generation after a pause."""
        members = [
            Member(worker, self.workers.processes[worker].incarnation, _shown(self.workers.processes[worker].report))
            for worker in workers
        ]
        view = GenerationView(self.generation, members, save=self._saves)
        self._record(Formed(view))
        self._enter(view, [], 0.0)
        for worker in workers:
            self._send(worker, view)

    def _enter(self, view: GenerationView, leaving: list[int], now: float) -> None:
        """Make a generation, new or read from the log, the current one."""
        previous, self.workers.view = self.workers.view, view
        self._exchanges, self._is_exchange_broken = Exchanges(), False
        self._phase, self._limit, self._continue_to = "running", None, 0
        self._saves = self._saves and not view.save
        remaining = {member.worker for member in view.members}
        for member in previous.members:
            process = self.workers.processes.get(member.worker)
            if (
                process is None
                or process.incarnation != member.incarnation
                or process.state != "in"
                or member.worker in remaining
            ):
                continue
            if member.worker in leaving:
                process.state, process.why, process.ended_at = "left", ASKED, now
            else:
                process.state = "new"
        for member in view.members:
            process = self.workers.processes[member.worker]
            process.waits = None
            process.state, process.report, process.global_step, process.last_generation = "in", None, 0, view.generation

    def _stop(self, why: str, uneven: bool = False) -> bool:
        """End the run. Workers whose loops are `uneven` raise it as an error of their scripts."""
        self._phase, self._why, self.uneven = "stopped", why, why if uneven else None
        self._record(Stopped(why, uneven))
        if not uneven:
            self.notices.append(f"the run cannot continue: {why}")
        for worker, process in self.workers.processes.items():
            if process.is_running:
                self._send(worker, Shutdown(why, uneven))
        return True

    def _replay(self, record: AnyRecord, now: float) -> None:
        match record:
            case Formed(view, left):
                for member in view.members:
                    process = self.workers.processes.get(member.worker)
                    if process is None or process.incarnation < member.incarnation:
                        self.workers.processes[member.worker] = WorkerProcess(member.incarnation, now)
                self._enter(view, left, now)
            case ContinuedTo(global_step):
                self._continue_to = global_step
            case Ended(worker, incarnation, state, why, will_restart):
                self.workers.processes[worker] = WorkerProcess(
                    incarnation, now, state, why=why, will_restart=will_restart, ended_at=now
                )
                self._note_ended(worker, self.workers.processes[worker])
            case Stopped(why, uneven):
                self._phase, self._why, self.uneven = "stopped", why, why if uneven else None

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _send(self, worker: int, message: CoordinatorMessage) -> None:
        self._outgoing.append(Outgoing(worker, self.workers.processes[worker].incarnation, message))

    def _record(self, record: AnyRecord) -> None:
        self._records.append(encode_record(record))

    def _note(self, change: str, worker: int, incarnation: int, why: str, **further: object) -> None:
        fields = {"what": change, "incarnation": incarnation, "generation": self.generation, "why": why}
        self.events.append({"event": "membership", **of_process(worker), **fields, **further})

    def _note_failed(self, worker: int, process: WorkerProcess, why: str, restart_note: str, now: float) -> None:
        remaining_count = sum(member != worker for member in self.members)
        doing = f" while {process.doing} for {max(now - process.since, 0.0):.1f} s" if process.doing else ""
        noun = "worker" if remaining_count == 1 else "workers"
        self.notices.append(
            f"worker {worker} failed ({why}){doing}; continuing with {remaining_count} {noun}{restart_note}"
        )
        self._note("failed", worker, process.incarnation, why)

    def _note_slow(self, worker: int, silent: float, now: float) -> None:
        process = self.workers.processes[worker]
        doing = f" It was {process.doing} for {max(now - process.since - silent, 0.0):.1f} s." if process.doing else ""
        remaining_s = self._rules.failure_timeout_s - silent
        self.notices.append(
            f"worker {worker} has sent no heartbeat for {silent:.1f} s.{doing} In {max(remaining_s, 0.0):.1f} s it is "
            "declared failed"
        )
        self._note("slow", worker, process.incarnation, f"no heartbeat for {silent:.1f} s")


def _shown(report: ReadyReport | None) -> ReadyReport:
    """Return the report as other workers see it: its generation is 0 without state."""
    assert report is not None, "a member has sent a ReadyReport"
    return msgspec.structs.replace(report, generation=max(report.generation, 0))


def _workers(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"
