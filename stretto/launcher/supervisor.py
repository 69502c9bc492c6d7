"""A run is watched over: who dies is started again as long as that is allowed, and the end is seen."""

from __future__ import annotations

import contextlib
import heapq
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty
from typing import Literal

import msgspec

from stretto.errors import LogError
from stretto.events import Event, LogFile
from stretto.faults.plan import Happening
from stretto.launcher.exit_notifier import ExitNotifier
from stretto.launcher.failure_cause import Cause, first_cause, in_words, is_recovered
from stretto.launcher.log_relay import LogRelay
from stretto.launcher.process_specs import ProcessPlan, called, server_of
from stretto.launcher.processes import Exited, Inbox, ProcessTable, Signalled
from stretto.launcher.progress_display import Tail
from stretto.launcher.worker_main import AGAIN
from stretto.membership.coordinator import ASKED, COORDINATOR

CAUSE_S = 1.0
"""How long after a failure that another one led to its cause is waited for."""
LOOK_S = 0.2
"""How often it is looked who is missed, once a worker has come to its end."""
STILL_S = 0.5
"""How often it is looked who stands still before it is in."""
FIRST_S, LONGEST_S = 0.2, 10.0
"""Before a process is started again for the first time, and at most; each time it is twice as long, until a process has
lived longer than that.
"""
STRIKES = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "go_on": signal.SIGCONT}
State = Literal["there", "away", "lost", "done"]
"""A process is there; or has died and will be started again, or not; or has ended well."""


class Stopped(BaseException):
    """The launcher was told to end, and has ended its workers. No Exception: it is not a failed run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number

    def add(self, text: str) -> None:
        """Add lines to the text."""
        self.args = (f"{self}\n{text}",)


def pause_s(restart: int) -> float:
    """Seconds before the restart of this number, from 0.

    >>> [pause_s(restart) for restart in (0, 1, 2, 5, 9000)]
    [0.2, 0.4, 0.8, 6.4, 10.0]
    """
    return min(FIRST_S * 2.0 ** min(restart, 30), LONGEST_S)


@dataclass
class _Process:
    """A process of the run, over all its lives. `back_after_s` is how long it was asked to stay away this time,
    `hasty` how many lives in a row were short, `still_s` for how long it was seen to stand still before it was in.
    """

    number: int
    began: float
    life: int = 0
    hasty: int = 0
    state: State = "there"
    back_after_s: float | None = None
    still_s: float = 0.0


class Supervisor:
    """Starts the processes of a run and sees it to its end. `plan` is what is done to them on purpose, and when."""

    def __init__(
        self,
        cast: ProcessPlan,
        crew: ProcessTable,
        relay: LogRelay,
        inbox: Inbox,
        plan: Iterator[tuple[float, Happening]],
    ) -> None:
        self._cast, self._order = cast, cast.order
        self._crew, self._relay, self._inbox = crew, relay, inbox
        self._plan = plan
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._turns = count()
        self._log = Tail(cast.folder / "events.jsonl")
        self._events: list[Event] = []
        """Those of errors and of members."""
        self._well: list[Exited] = []
        """Those of workers without an error."""
        self._deaths: list[tuple[Exited, int]] = []
        """Those that the run has gone on after, and of which life."""
        self._processes: dict[int, _Process] = {}
        first = min(cast.guests, default=0)
        self._herald = ExitNotifier(cast.servers, first) if cast.servers.coordinator_at is not None else None

    def start(self) -> None:
        """Start all processes."""
        for part in self._cast.all():
            self._relay.listen(part.number, self._crew.start(part))
            self._processes[part.number] = _Process(part.number, time.perf_counter())
        self._strike_next()
        if self._order.endures:
            self._look_who_stands_still()

    def see_through(self) -> Cause | None:
        """Wait for the end of the run: None for a good one, else its cause. Raises Stopped."""
        while not self._is_over():
            news = self._next()
            cause = self._take(news) if news is not None else None
            if cause is not None:
                return cause
            self._do_what_is_due()
        return None if self._is_ending() else self._abandoned()

    def close(self) -> None:
        """Let go of the coordinator."""
        if self._herald is not None:
            self._herald.close()

    # What comes

    def _next(self) -> Exited | None:
        """The next end of a process; None when something else is due."""
        soon = [due for due, *_ in self._due[:1]] + [time.perf_counter() + LOOK_S] * self._is_ending()
        try:
            news = self._inbox.get(timeout=max(0.0, min(soon) - time.perf_counter()) if soon else None)
        except Empty:
            return None
        if isinstance(news, Signalled):
            raise Stopped(news.number)
        return news

    def _take(self, end: Exited) -> Cause | None:
        """A process has ended: the cause if that ends the run."""
        one = self._processes[end.worker]
        if not end.failed:
            self._crew.bury(one.number)
            one.state = "done"
            self._well.append(end)
            return None
        if not self._is_death(end):
            self._crew.bury(one.number)
            one.state = "lost"
            return self._find_cause(end)
        return self._go_on_after(one, end)

    def _is_death(self, end: Exited) -> bool:
        """Whether others may go on: the process itself has found no fault with the script."""
        if not self._order.endures:
            return False
        return end.code < 0 or (end.code == AGAIN if end.worker >= 0 else end.code == 0 or end.worker == COORDINATOR)

    def _go_on_after(self, one: _Process, end: Exited) -> Cause | None:
        """Tell of a death, and see to it that somebody comes back; the cause if the run can't go on."""
        returns = one.life < self._order.restarts and not (one.number >= 0 and self._is_ending())
        one.state = "away" if returns else "lost"
        stood = f"stood still for {one.still_s:g} s before it was in, and was "
        self._tell(one, stood * (one.still_s > self._order.failure_timeout_s) + in_words(end), returns)
        self._crew.bury(one.number)
        self._deaths.append((end, one.life))
        if returns:
            now = time.perf_counter()
            one.hasty = 0 if now - one.began > LONGEST_S else one.hasty
            wait_s = pause_s(one.hasty) if one.back_after_s is None else one.back_after_s
            self._later(now + wait_s, lambda: self._start_again(one))
            return None
        return self._too_few(end)

    def _tell(self, one: _Process, why: str, returns: bool) -> None:
        """The coordinator tells of workers; of itself and of servers the launcher does."""
        if one.number >= 0:
            assert self._herald is not None
            self._herald.gone(one.number, one.life, why, returns)
            return
        self._write("membership", one.number, what="failed", incarnation=one.life, generation=0, why=why)
        if returns:
            self._relay.note(f"{called(one.number)} is gone ({why}); it is started again")

    def _too_few(self, end: Exited) -> Cause | None:
        """The cause if too few are left after an end for good."""
        least = 1 if self._cast.guests else self._order.min_workers
        left = len(self._in("there", "away", "done"))
        if end.worker >= 0 and (left >= least or not self._in("there", "away")):
            return None
        cause = first_cause([end], self._read())
        told = [cause.details] if cause.details else []
        if self._order.restarts:
            told.append(f"it has been started again {self._order.restarts} times (--restarts)")
        if end.worker >= 0 and left:
            told.append(f"{left} of at least {least} workers are left (--min-workers)")
        return replace(cause, details="\n".join(told))

    def _find_cause(self, end: Exited) -> Cause:
        """The cause of a failure. If another worker's led to it, that one is waited for a little."""
        ends, limit = [*self._well, end], time.perf_counter() + CAUSE_S
        while True:
            deaths = [end for end, life in self._deaths if not is_recovered(end.worker, life, self._read())]
            cause = first_cause(ends, self._read(), deaths)
            left_s = limit - time.perf_counter()
            if cause.root or left_s <= 0:
                return cause
            with contextlib.suppress(Empty):
                news = self._inbox.get(timeout=min(0.05, left_s))
                if isinstance(news, Signalled):
                    raise Stopped(news.number)
                self._crew.bury(news.worker)
                ends.append(news)

    def _abandoned(self) -> Cause:
        """Nobody is left, and nobody has come to the end."""
        if self._deaths:
            return first_cause([self._deaths[-1][0]], self._read())
        return Cause(0, "all workers have left before the end, as they were asked to", "", True, True)

    # What is due

    def _later(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._turns), act))

    def _do_what_is_due(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter():
            heapq.heappop(self._due)[2]()

    def _look_who_stands_still(self) -> None:
        """Kill, after the failure timeout, a worker that was stopped before it registered."""
        self._later(time.perf_counter() + STILL_S, self._look_who_stands_still)
        for one in self._in("there"):
            is_missed = self._crew.is_stopped(one.number) and (one.number, one.life) not in self._told("joined")
            one.still_s = one.still_s + STILL_S if is_missed else 0.0
            if one.still_s > self._order.failure_timeout_s:
                self._crew.kill(one.number)

    def _start_again(self, one: _Process) -> None:
        one.life, one.hasty, one.state, one.back_after_s = one.life + 1, one.hasty + 1, "there", None
        one.still_s = 0.0
        self._events = [event for event in self._read() if event["event"] != "error" or event["worker"] != one.number]
        one.began = time.perf_counter()
        self._relay.listen(one.number, self._crew.start(self._cast.part(one.number, one.life)), one.life)
        if one.number < 0:
            self._write(
                "membership", one.number, what="joined", incarnation=one.life, generation=0, why="started again"
            )
        if one.number == COORDINATOR and self._herald is not None:
            self._herald.repeat()

    def _strike_next(self) -> None:
        """See to what is next done on purpose."""
        moment, happening = next(self._plan, (0.0, None))
        if happening is not None:
            self._later(self._cast.zero + moment, lambda: self._strike(happening))

    def _strike(self, happening: Happening) -> None:
        self._strike_next()
        struck = STRIKES.get(happening.verb)  # who was killed comes back by itself
        if struck is None:
            return
        number = self._number(happening)
        if self._processes[number].state != "there":
            self._relay.note(f"faults: {called(number)} is not there ({happening})")
            return
        self._write("fault_injected", number, **happening.words())
        if happening.verb == "kill":
            self._processes[number].back_after_s = happening.back_after_s
        self._crew.strike(number, struck)

    def _number(self, happening: Happening) -> int:
        """Return the number of the process that the fault is for."""
        if happening.kind == "coordinator":
            return COORDINATOR
        first = happening.numbers[0]
        return first if happening.kind == "worker" else server_of(first)

    # What is known

    def _in(self, *states: State) -> list[_Process]:
        """The workers in one of these states."""
        return [one for one in self._processes.values() if one.number >= 0 and one.state in states]

    def _is_ending(self) -> bool:
        """Whether a worker has come to its end, and was not asked to leave before: nobody need come back then."""
        return any((one.number, one.life) not in self._told("left", ASKED) for one in self._in("done"))

    def _is_over(self) -> bool:
        """Nobody is there any more, or those that are will never end: they are missed by those who have."""
        if not self._is_ending():
            return not self._in("there", "away")
        missed = self._told("failed")
        return all((one.number, one.life) in missed for one in self._in("there"))

    def _told(self, what: str, why: str | None = None) -> set[tuple[int, int]]:
        """Workers and their lives of whom the coordinator has written this."""
        members = (one for one in self._read() if one["event"] == "membership" and one.get("what") == what)
        return {(one["worker"], one.get("incarnation", 0)) for one in members if why is None or one.get("why") == why}

    def _read(self) -> Sequence[Event]:
        """Errors and what became of members until now."""
        found = (event for event in self._log.read() if isinstance(event.get("worker"), int))
        self._events += [event for event in found if event.get("event") in ("error", "membership")]
        return self._events

    def _write(self, event: str, number: int, /, **carries: object) -> None:
        """Add an event to the log. A full disk costs the event."""
        at = time.perf_counter()
        told = {"event": event, "t": round(at - self._cast.zero, 6), "worker": number, "at": at, **carries}
        with contextlib.suppress(LogError):
            log = LogFile(self._cast.folder / "events.jsonl")
            try:
                log.append(msgspec.json.encode(told) + b"\n")
            finally:
                log.close()
