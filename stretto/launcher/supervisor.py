"""Supervision of a run: failed processes are restarted within limits, and the end of the run is detected."""

from __future__ import annotations

import contextlib
import heapq
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from queue import Empty

import msgspec

from stretto.data.shares import smaller_share
from stretto.errors import LaunchError, LogError
from stretto.events import COORDINATOR, RELAY, LogFile, of_process, process_name
from stretto.faults.plan import FaultEvent
from stretto.launcher import supervised
from stretto.launcher.engines.agents import AgentExited
from stretto.launcher.engines.interface import Engine, EngineLost, Exited, Inbox, Process, Signalled
from stretto.launcher.exit_notifier import ExitNotifier
from stretto.launcher.failure_cause import Cause, first_cause, for_others, in_words
from stretto.launcher.log_relay import LogRelay
from stretto.launcher.oom_kills import oom_kills
from stretto.launcher.process_specs import ProcessPlan, ProcessSpec, server_of
from stretto.launcher.remote_workers import RemoteWorkers
from stretto.launcher.signals import TERMINATED, Stopped
from stretto.launcher.silence import Silence
from stretto.launcher.supervised import State, Supervised
from stretto.launcher.worker_main import EVICTED, OUT_OF_MEMORY, STAYS_OUT, UNREACHABLE, WAITS_OUT
from stretto.membership.messages import Failures, MembersView
from stretto.membership.worker_status import ReportedError

LAST_REPORT_MS = 500
"""Time in ms in which a launcher that joined a run reports the end of its workers, and that of the run an early end."""
CAUSE_S = 1.0
"""Time to wait for the cause of a failure that is the consequence of another one."""
OUT_S = 10.0
"""Seconds after which a worker that could not join an epoch under way is started again; they double each time."""
POLL_S = 0.5
"""Interval at which stopped workers are looked for, and failed ones once a worker has finished."""
SIGNALS = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "resume": signal.SIGCONT}


class Supervisor:
    """Starts the processes of a run and watches them until its end. `faults` are the faults to inject, with times."""

    def __init__(
        self,
        plan: ProcessPlan,
        engine: Engine,
        relay: LogRelay,
        inbox: Inbox,
        faults: Iterator[tuple[float, FaultEvent]],
        remote: RemoteWorkers,
    ) -> None:
        self._plan, self._config = plan, plan.config
        self._engine, self._relay, self._inbox = engine, relay, inbox
        self._faults, self._remote = faults, remote
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._finished: list[Exited] = []
        """Exits of workers without a failure."""
        self._survived: list[tuple[Exited, int]] = []
        """Failures that the run survived, with the incarnation."""
        self._members: dict[int, Supervised] = {}
        first = min(plan.joining, default=None)
        self._cause: Cause | None = None
        """Cause of the end of the run."""
        self._stop: Stopped | None = None
        """Signal after which the workers leave."""
        coordinator_at = plan.servers.coordinator_at
        self._exit_notifier = ExitNotifier(plan.servers, first) if coordinator_at is not None else None
        self._oom_kills = oom_kills()
        """Number of processes that had been killed for want of memory when a process failed last."""
        self._silence = Silence(coordinator_at or "", plan.config, relay.note)

    def start(self) -> None:
        """Start all processes, here and on the hosts."""
        for spec in self._plan.all():
            first = Supervised(spec.number, [], time.perf_counter(), self._plan.incarnation)
            member = self._members.setdefault(spec.number, first)
            member.processes.append(self._started(spec, member.incarnation))
        self._remote.start()
        self._schedule_fault()
        if self._config.elastic:
            self._poll()

    def _started(self, spec: ProcessSpec, incarnation: int = 0) -> Process:
        process = self._engine.start(spec)
        self._relay.add(spec.number, process.output, incarnation, spec.rank)
        return process

    def wait(self) -> Cause | None:
        """Wait for the end of the run; return None for a good one, else its cause. Raises Stopped.

        After SIGTERM the workers leave, if the configuration gives them time for that. Launchers that joined end, too,
        if the run ends early.
        """
        try:
            self._cause = self._wait()
        except (Stopped, LaunchError) as end:
            self._report_end(str(end))
            raise
        if self._cause is not None:
            self._report_end(for_others(self._cause))
        return self._cause

    def _report_end(self, why: str) -> None:
        if self._exit_notifier is not None and self._config.host is not None and not self._plan.joining:
            self._exit_notifier.report_end(why, LAST_REPORT_MS)

    def _wait(self) -> Cause | None:
        while not self._is_over():
            news = self._next()
            match news:
                case Exited():
                    if (cause := self._handle(news)) is not None:
                        return cause
                case AgentExited():
                    self._remote.handle(news, self._view(), self._report_lost)
            self._run_due()
        if self._stop is not None and not self._in("done") and not self._view().finished:
            raise self._stop
        return None if self._is_ending() else self._abandoned()

    def close(self) -> None:
        """Close the connection to the coordinator, after a report of the workers that joined and are ended here."""
        if self._exit_notifier is None:
            return
        joined = [member for member in self._members.values() if self._plan.joining]
        for member in joined:
            is_cause = self._cause is not None and self._cause.worker == member.number
            why = for_others(self._cause) if self._cause is not None and is_cause else "its launcher has ended"
            if member.state not in ("left", "done"):
                self._exit_notifier.gone(member.number, member.incarnation, why, False)
        if joined:
            self._exit_notifier.end_joined()
        self._exit_notifier.close(LAST_REPORT_MS if joined else 0)

    # Exits of processes

    def _next(self) -> Exited | AgentExited | None:
        """Return the next exit of a process or an agent, or None when something else is due. Raises LaunchError."""
        soon = [due_s for due_s, *_ in self._due[:1]] + [time.perf_counter() + POLL_S] * self._is_ending()
        try:
            news = self._inbox.get(timeout=max(0.0, min(soon) - time.perf_counter()) if soon else None)
        except Empty:
            return None
        if isinstance(news, Signalled):
            self._end_gracefully(Stopped(news.number))
            return None
        if isinstance(news, EngineLost):
            raise LaunchError(news.text)
        return news

    def _end_gracefully(self, stop: Stopped) -> None:
        """Let the workers write a checkpoint and leave, after SIGTERM; raise `stop` if there is no time for that."""
        limit_s = self._config.stop_within_s
        if stop.exit_code != TERMINATED or self._stop is not None or self._exit_notifier is None or not limit_s:
            raise stop
        self._stop = stop
        self._later(time.perf_counter() + limit_s, self._give_up)
        self._relay.note(f"stopped by SIGTERM; the workers leave, within {limit_s:g} s")
        for member in self._in("restarting"):
            member.state = "lost"
        for process in (process for member in self._in("running") for process in member.processes):
            process.terminate()

    def _give_up(self) -> None:
        assert self._stop is not None
        raise self._stop

    def _handle(self, end: Exited) -> Cause | None:
        """Handle the exit of a process; return the cause if it ends the run."""
        member, process = self._members[end.worker], end.process
        rank = member.rank_of(process)
        if process is None or rank is None or member.state != "running" or rank in member.finished:
            if process is not None:  # reported late or twice, or killed after another rank of its worker
                process.release()
            return None
        end = replace(end, rank=rank)
        if not end.failed:
            self._note_finished(member, end, process)
            return None
        if end.code == EVICTED and member.may_follow(rank):  # that failure is handled first
            process.release()
            self._later(time.perf_counter() + supervised.SIBLING_S, lambda: self._inbox.put(end))
            return None
        if not self._is_survivable(end):
            process.release()  # its other ranks end with the run, after the first of them has written its last model
            member.state = "lost"
            return self._find_cause(end)
        return self._survive(member, end, process)

    def _note_finished(self, member: Supervised, end: Exited, process: Process) -> None:
        """Note a rank that exited without a failure; its worker has finished when all its ranks have."""
        process.release()
        member.finished.add(end.rank)
        if len(member.finished) == len(member.processes):
            member.state = "left" if end.record.left else "done"
            self._finished.append(end)
            self._follow()  # it may have joined and ended since the last poll

    def _is_survivable(self, end: Exited) -> bool:
        """Return True if the others may continue: the process did not report an error of the script."""
        if not self._config.elastic:
            return False
        return end.code < 0 or (
            end.code in (EVICTED, UNREACHABLE, STAYS_OUT, WAITS_OUT, OUT_OF_MEMORY)
            if end.worker >= 0
            else end.code == 0 or end.worker in (COORDINATOR, RELAY)
        )

    def _survive(self, member: Supervised, end: Exited, process: Process) -> Cause | None:
        """Report a failure and schedule the restart; return the cause if the run cannot continue."""
        is_ending = self._is_ending() or self._stop is not None
        member.waits_out += end.code == WAITS_OUT and member.number >= 0
        self._shrink_share(member, end)
        has_restarts = member.incarnation - member.waits_out - member.out_of_memory < self._config.restarts
        returns = has_restarts and not (member.number >= 0 and (is_ending or end.code in (UNREACHABLE, STAYS_OUT)))
        member.state = "restarting" if returns else "lost"
        if member.is_declared_failed and end.code != UNREACHABLE:
            end = replace(end, code=EVICTED)
        stopped = f"was stopped for {member.stopped_s:g} s before it registered, and was "
        why = stopped * (member.stopped_s > self._config.failure_timeout_s) + in_words(end)
        self._report(member, why, returns, end.rank)
        member.end_ranks(process)
        self._survived.append((end, member.incarnation))
        if returns:
            now = time.perf_counter()
            pause_s = OUT_S * 2.0 ** min(member.waits_out, 6) if end.code == WAITS_OUT else member.next_pause_s(now)
            self._later(now + pause_s, lambda: self._restart(member))
            return None
        return self._too_few(end)

    def _shrink_share(self, member: Supervised, end: Exited) -> None:
        """Limit the share of a worker that has run out of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        is_killed = end.code == -signal.SIGKILL and not end.injected and self._oom_kills > before
        is_out_of_memory = is_killed or end.code == OUT_OF_MEMORY
        limit = smaller_share(end.record.share, end.record.largest) if is_out_of_memory else 0
        if limit:
            member.out_of_memory, member.share_limit = member.out_of_memory + 1, limit
            self._relay.note(
                f"worker {member.number} has run out of memory with {end.record.share} samples of a global step: it "
                f"returns with at most {limit}, and others have the rest"
            )

    def _report(self, member: Supervised, why: str, returns: bool, rank: int) -> None:
        """Report a failure: of a worker's rank to the coordinator; of a server or the coordinator to the event log."""
        if member.number >= 0:
            assert self._exit_notifier is not None
            self._exit_notifier.gone(member.number, member.incarnation, why, returns, rank)
            return
        self._write("membership", member.number, what="failed", incarnation=member.incarnation, generation=0, why=why)
        if returns:
            self._relay.note(f"{process_name(member.number)} failed ({why}); restarting it")

    def _report_lost(self, number: int, why: str, returns: bool) -> None:
        """Report the failure of a worker whose agent was lost, and whether another agent starts it again."""
        assert self._exit_notifier is not None
        self._exit_notifier.gone(number, self._view().incarnations.get(number, 0), why, returns)

    def _too_few(self, end: Exited) -> Cause | None:
        """Return the cause of the end if too few workers are left after a failure for good."""
        min_workers = 1 if self._plan.joining else self._config.min_workers
        remaining = len(self._in("running", "restarting", "left", "done")) + self._remote.count()
        if end.worker >= 0 and (remaining >= min_workers or not self._in("running", "restarting")):
            return None
        cause = first_cause([end], self._errors())
        details = [cause.details] if cause.details else []
        if self._config.restarts:
            details.append(f"it was restarted {self._config.restarts} times (--restarts)")
        if end.worker >= 0 and remaining:
            details.append(f"{remaining} of at least {min_workers} workers are left (--min-workers)")
        return replace(cause, details="\n".join(details))

    def _find_cause(self, end: Exited) -> Cause:
        """Return the cause of a failure. If it is the consequence of another one, wait up to CAUSE_S for that one."""
        ends, limit = [*self._finished, end], time.perf_counter() + CAUSE_S
        while True:
            failures = [end for end, incarnation in self._survived if not self._is_recovered(end.worker, incarnation)]
            cause = first_cause(ends, self._errors(), failures)
            left_s = limit - time.perf_counter()
            if cause.root or left_s <= 0:
                return cause
            with contextlib.suppress(Empty):
                news = self._inbox.get(timeout=min(0.05, left_s))
                if isinstance(news, Signalled):
                    raise Stopped(news.number)
                if isinstance(news, EngineLost):
                    raise LaunchError(news.text)
                if isinstance(news, AgentExited):
                    continue
                member = self._members[news.worker]
                rank = member.rank_of(news.process)
                if news.process is not None:
                    news.process.release()
                if rank is not None and member.state == "running":
                    ends.append(replace(news, rank=rank))

    def _errors(self) -> dict[int, ReportedError]:
        """Return the errors that running processes have recorded before their exits."""
        running = (member for member in self._members.values() if member.state == "running")
        records = ((member.number, process.record()) for member in running for process in reversed(member.processes))
        return {number: record.error for number, record in records if record.error is not None}

    def _abandoned(self) -> Cause:
        """Return the cause where no worker is left and none has finished."""
        self._remote.raise_loss(self._view())
        if self._survived:
            return first_cause([self._survived[-1][0]], {})
        first = min(self._plan.joining, default=0)
        return Cause(first, "all workers left before the end, as they were asked to", "", True, not self._plan.joining)

    # Scheduled actions

    def _later(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._sequence), act))

    def _run_due(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter():
            heapq.heappop(self._due)[2]()

    def _poll(self) -> None:
        """Ask the coordinator, which may have been restarted, for failures again, and look for stopped workers."""
        self._later(time.perf_counter() + POLL_S, self._poll)
        if self._exit_notifier is not None:
            self._exit_notifier.watch()
            if self._plan.joining:
                if (why := self._exit_notifier.run_ended()) is not None:
                    raise LaunchError(f"the run has ended: {why}")
                self._silence.check(self._exit_notifier.replies, POLL_S)
            self._remote.watch(self._exit_notifier.watch_members)
            if self._waits_outside():
                self._exit_notifier.watch_members()
            self._remote.grow(self._view())
            if self._stop is not None and not self._plan.joining:
                self._exit_notifier.end_run()
                self._exit_notifier.watch_members()
        self._follow()
        self._kill_stopped()
        failures = self._failures()
        for member in self._in("running"):
            if (rank := failures.rank_of(member.number, member.incarnation)) is not None:
                member.declare_failed(rank)

    def _follow(self) -> None:
        """Show the progress of workers that joined a run whose events are not seen here."""
        if self._plan.joining and not self._plan.sees_run:
            self._relay.follow([member.processes[0].record() for member in self._in("running", "done", "left")])

    def _kill_stopped(self) -> None:
        """Kill a worker that was stopped before it registered, after the failure timeout, and stopped ones if no other
        worker trains: restarted ones wait for their exits.
        """
        for member in self._in("running"):
            stopped = [process for process in member.processes if process.is_stopped()]
            is_unregistered = stopped and not self._has_joined(member)
            member.stopped_s = member.stopped_s + POLL_S if is_unregistered else 0.0
            if member.stopped_s > self._config.failure_timeout_s:
                stopped[0].kill()
        failed = [one for one in self._in("running") if one.is_declared_failed and one.processes[0].is_stopped()]
        others = [one for one in self._in("running") if one not in failed and self._has_joined(one)]
        if not others and not self._in("done") and not self._remote.count():
            for member in failed:
                member.processes[0].kill()

    def _restart(self, member: Supervised) -> None:
        if member.state != "restarting":
            return
        member.restart(time.perf_counter())
        parts = self._plan.parts(member.number, member.incarnation, member.share_limit)
        member.processes = [self._started(part, member.incarnation) for part in parts]
        if member.number < 0:
            self._write(
                "membership",
                member.number,
                what="joined",
                incarnation=member.incarnation,
                generation=0,
                why="started again",
            )
        if member.number == COORDINATOR and self._exit_notifier is not None:
            self._exit_notifier.repeat()

    def _schedule_fault(self) -> None:
        """Schedule the next fault."""
        moment, event = next(self._faults, (0.0, None))
        if event is not None:
            self._later(self._plan.zero + moment, lambda: self._inject(event))

    def _inject(self, event: FaultEvent) -> None:
        self._schedule_fault()
        signum = SIGNALS.get(event.verb)  # a killed process is restarted by the supervisor
        if signum is None:
            return
        number = self._number(event)
        if self._members[number].state != "running":
            self._relay.note(f"faults: {process_name(number)} is not running ({event})")
            return
        member, words = self._members[number], event.words()
        rank = member.struck(begins=event.verb != "resume")
        if len(member.processes) > 1:
            words |= {"rank": rank, "text": f"{event} rank {rank}"}
        self._write("fault_injected", number, **words)
        if event.verb == "kill":
            member.back_after_s = event.back_after_s
        member.processes[rank].inject(signum)

    def _number(self, event: FaultEvent) -> int:
        """Return the number of the process that the fault is for."""
        if event.kind == "coordinator":
            return COORDINATOR
        first = event.numbers[0]
        return first if event.kind == "worker" else server_of(first)

    # State of the run

    def _in(self, *states: State) -> list[Supervised]:
        """Return the workers in one of these states."""
        return [member for member in self._members.values() if member.number >= 0 and member.state in states]

    def _is_ending(self) -> bool:
        """Return True if a worker finished without having been asked to leave: no restart is needed then."""
        return bool(self._in("done")) or self._remote.is_ending(self._view())

    def _waits_outside(self) -> bool:
        """Return True if workers of a run that was joined wait until they can join an epoch: it may end before."""
        return bool(self._plan.joining) and any(one.waits_out for one in self._in("restarting"))

    def _is_over(self) -> bool:
        """Return True if no worker runs that is needed.

        Once a worker has finished, failed workers are not needed, nor restarted ones that have not joined.
        """
        if self._stop is not None:
            return not self._in("running", "restarting") and bool(self._plan.joining or not self._view().running)
        if self._waits_outside() and self._view().finished:
            return not self._in("running")
        is_ending = self._is_ending()
        if not self._remote.is_over(self._view(), is_ending):
            return False
        if not is_ending:
            return not self._in("running", "restarting")
        failures = self._failures()
        return all(
            failures.includes(member.number, member.incarnation)
            or (member.incarnation > 0 and not self._has_joined(member))
            for member in self._in("running")
        )

    def _failures(self) -> Failures:
        """Return the failures that the coordinator has detected, or was notified of."""
        return self._exit_notifier.failures() if self._exit_notifier is not None else Failures()

    def _view(self) -> MembersView:
        """Return the workers of all hosts, as the coordinator knows them."""
        return self._exit_notifier.members() if self._exit_notifier is not None else MembersView()

    def _has_joined(self, member: Supervised) -> bool:
        """Return True if a running worker is or was a member."""
        return member.processes[0].record().joined

    def _is_recovered(self, number: int, incarnation: int) -> bool:
        """Return True if the others have formed a generation without a failed process, or if it has been restarted."""
        member = self._members[number]
        is_restarted = member.state == "running" and member.incarnation > incarnation
        is_back = is_restarted and (number < 0 or self._has_joined(member))
        return is_back or self._failures().is_recovered(number, incarnation)

    def _write(self, event: str, number: int, /, **carries: object) -> None:
        """Append an event to the log. An event that cannot be written is lost."""
        time_s = time.perf_counter()
        line = {"event": event, "t": round(time_s - self._plan.zero, 6), **of_process(number), "at": time_s, **carries}
        with contextlib.suppress(LogError):
            log = LogFile(self._plan.folder / "events.jsonl")
            try:
                log.append(msgspec.json.encode(line) + b"\n")
            finally:
                log.close()
