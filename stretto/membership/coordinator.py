"""The membership coordinator: the workers, their incarnations, and the generations that they form. A plain state
machine.

Its inputs are workers' messages, process exits that the launcher reports, and the time; its outputs are messages to
workers. Messages may be lost, duplicated and late: a worker repeats a message until it has the reply, and gets the same
reply again. `membership.messages` describes the protocol.

Two statements of a worker are final: that it is paused after an `AbortGeneration` of generation G (its `ReadyReport`
has that generation and is not at rest), and that it was in G without receiving any state (`ReadyReport` with -G, which
the others are shown as 0). A worker at rest may be sent on, so the global steps order its reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from stretto.membership.barriers import Awaited
from stretto.membership.loop_positions import Exchanges, Waits, explained, sentence
from stretto.membership.messages import (
    AbortGeneration,
    Broken,
    Continue,
    Evicted,
    GenerationView,
    Heartbeat,
    Leave,
    Member,
    PauseRequest,
    Quit,
    ReadyReport,
    Register,
    Registered,
    Said,
    Shutdown,
    Told,
)

COORDINATOR = -1000
"""Stands for the coordinator where an event has the number of a worker."""
ASKED = "it was asked to end"
UNKNOWN = "the run does not know the generation that it comes from"
STUCK = 5
"""Number of times in a row that the same members may abort the same collective operation."""
ANEW = "no worker with state is left: all restart from the last checkpoint"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message to one incarnation of a worker."""

    worker: int
    life: int
    told: Told


class Gone(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Report of the launcher that a process has exited, and whether it is restarted."""

    worker: int
    life: int
    why: str
    will_return: bool


class Save(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Request of the launcher for a checkpoint."""


class _Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


class Began(_Record, frozen=True):
    """Log record of the start of the run, with its settings."""

    settings: dict[str, Any]
    expected: int
    min_workers: int
    max_workers: int | None
    free: bool
    failure_timeout_s: float
    return_s: float


class Formed(_Record, frozen=True):
    """Log record of a generation; `left` are the workers that leave gracefully with it."""

    form: GenerationView
    left: list[int] = []


class Onward(_Record, frozen=True):
    """Log record that members at rest were sent on to this global step: they will not rest at an earlier one."""

    hand: int


class Ended(_Record, frozen=True):
    """Log record of the end of an incarnation."""

    worker: int
    life: int
    state: Literal["gone", "left"]
    why: str
    returns: bool


class Stopped(_Record, frozen=True):
    """Log record that the run cannot continue."""

    why: str
    uneven: bool = False


_DECODER = msgspec.msgpack.Decoder(Began | Formed | Onward | Ended | Stopped)
_ENCODER = msgspec.msgpack.Encoder()

State: TypeAlias = Literal["new", "in", "gone", "left"]
Phase: TypeAlias = Literal["gathering", "running", "holding", "aborting", "stopped"]
Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Process:
    """Last known incarnation of a worker."""

    life: int
    heard: float
    state: State = "new"
    here: ReadyReport | None = None
    """Its report that it is paused; None while it runs."""
    hand: int = 0
    """Furthest global step that it is known to have been assigned in this generation."""
    place: int = -1
    """Number of collective operations that it has begun, from its heartbeats; -1 before its first generation."""
    doing: str = ""
    waits: Waits | None = None
    """Last collective operation of this generation that it is known to have waited in."""
    since: float = 0.0
    quits: bool = False
    slow: bool = False
    entered: int = 0
    """Last generation that it was a member of."""
    ended: float = 0.0
    returns: bool = False
    why: str = ""

    @property
    def lives(self) -> bool:
        """True if the process runs, as far as is known."""
        return self.state in ("new", "in")


class MembershipCoordinator:
    """Decides which workers are members, and in which generation.

    `expected` workers form the first generation. Fewer than `min_workers` do not continue; more than `max_workers` are
    not admitted. A worker without a heartbeat for `failure_timeout_s` has failed; where it matters, a worker that is
    being restarted is awaited for `return_s`, by default as long. If `free` (asynchronous training) no worker waits for
    another: joining workers are admitted immediately, and failures only reported.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        expected: int,
        min_workers: int = 1,
        max_workers: int | None = None,
        free: bool = False,
        *,
        failure_timeout_s: float,
        return_s: float | None = None,
    ) -> None:
        self._began = Began(
            settings,
            expected,
            min_workers,
            max_workers,
            free,
            failure_timeout_s,
            failure_timeout_s if return_s is None else return_s,
        )
        self._all: dict[int, _Process] = {}
        self._formed = GenerationView(0, [])
        self._phase: Phase = "running" if free else "gathering"
        self._why = ""
        """Reason why the generation has ended, or why the run cannot continue."""
        self._limit: float | None = None
        """Time until which an aborted operation may remain without a known failure."""
        self._onward = 0
        """Global step that members at rest were sent on to in this generation."""
        self._saves = False
        self._exchanges = Exchanges()
        self._is_exchange_broken = False
        """True if the generation was aborted because a collective operation failed, not for a failed worker or
        rendezvous."""
        self._broken_off: tuple[list[tuple[int, int, int]], int] = [], 0
        """Members at the last aborted operation, with incarnations and commits, and the times in a row."""
        self.uneven: str | None = None
        """Reason why the run cannot continue, if the workers' loops are of unequal length."""
        self._posts: list[Outgoing] = []
        self._records: list[bytes] = []
        self.notices: list[str] = []
        """Notices for the user since they were last taken."""
        self.events: list[Event] = []
        """Events for the event log since they were last taken."""
        self._record(self._began)

    @classmethod
    def restored(cls, records: Iterable[bytes], now: float) -> MembershipCoordinator:
        """Return the coordinator that wrote these records; the first one has its settings."""
        began, *others = (_DECODER.decode(one) for one in records)
        assert isinstance(began, Began), "a journal of the roll begins with the settings"
        roll = cls(
            began.settings,
            began.expected,
            began.min_workers,
            began.max_workers,
            began.free,
            failure_timeout_s=began.failure_timeout_s,
            return_s=began.return_s,
        )
        for one in others:
            roll._replay(one, now)
        roll._records.clear()
        return roll

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self._formed.generation

    @property
    def phase(self) -> Phase:
        """Phase of the coordinator."""
        return self._phase

    @property
    def members(self) -> dict[int, int]:
        """Members of the generation that have not failed, with their incarnations."""
        return {one.worker: one.life for one in self._formed.members if self._is_in(one)}

    def awaited(self, in_training: bool, now: float) -> dict[int, Awaited]:
        """Return the workers that a barrier of the script waits for.

        In training they are the members that can still come: a member at rest waits for the workers at the barrier
        itself, and so may a restarted worker in asynchronous training until it takes part. Before training they are all
        workers that were started, until they are members: a failed one that is restarted is awaited as well, since none
        has begun without it.
        """
        if in_training:
            found = {worker: self._all[worker] for worker in self.members}
            resting = {worker for worker, one in found.items() if one.here is not None and one.here.at_rest}
            joining = {worker for worker, one in found.items() if self._began.free and one.life and one.place < 0}
            free = found.keys() - resting - joining
            return {worker: Awaited(found[worker].life, found[worker].place) for worker in free}
        early = (worker for worker in range(self._began.expected) if self._is_to_begin(worker, now))
        return {worker: Awaited(self._all[worker].life if worker in self._all else 0, -1) for worker in early}

    def _is_to_begin(self, worker: int, now: float) -> bool:
        """Return True if a worker that was started has not reached the training yet, and still can."""
        one = self._all.get(worker)
        if one is None:
            return True
        return one.state == "gone" and (self._returns(one, now) if self.generation else one.returns)

    def records(self) -> list[bytes]:
        """Return the records that must be on disk before any further message is sent; each once."""
        records, self._records = self._records, []
        return records

    # --- inputs ------------------------------------------------------------------------------------------------------

    def hear(self, worker: int, life: int, said: Said, now: float) -> list[Outgoing]:
        """Process a worker's message; return the messages to send."""
        one = self._all.get(worker)
        if one is not None and life < one.life:
            return [Outgoing(worker, life, Evicted(f"a later process of worker {worker} has taken its place"))]
        if one is None or life > one.life:
            one = self._begin(worker, life, now)
        if self._phase == "stopped":
            self._tell(worker, Shutdown(self._why, self.uneven is not None))
        elif one.state == "gone":
            self._tell(worker, Evicted(one.why))
        else:
            one.heard, one.slow = now, False
            self._take(worker, one, said, now)
        return self._settled(now)

    def gone(
        self, worker: int, life: int, now: float, will_return: bool = False, why: str = "its process ended"
    ) -> list[Outgoing]:
        """Process the exit of a process, which the launcher restarts or not."""
        one = self._all.get(worker)
        if one is None or life > one.life:
            one = self._begin(worker, life, now)
        if life == one.life and one.state != "left":
            self._end(worker, why, will_return, now, again=f", worker {worker} is restarted" if will_return else "")
        return self._settled(now)

    def tick(self, now: float) -> list[Outgoing]:
        """Process the passing of time: failure timeouts may have run out."""
        for worker, one in self._all.items():
            silent = now - one.heard
            if one.lives and silent > self._began.failure_timeout_s:
                self._end(worker, f"no heartbeat for {silent:.1f} s", True, now)
            elif one.lives and silent > self._began.failure_timeout_s / 2 and not one.slow:
                one.slow = True
                self._note_slow(worker, silent, now)
        self._heed_limits(now)
        return self._settled(now)

    def slept(self, seconds: float) -> None:
        """Extend all failure timeouts after a time in which no message was received."""
        for one in self._all.values():
            one.heard += seconds

    def save(self, now: float) -> list[Outgoing]:
        """Request a checkpoint, made when all members are at rest."""
        self._saves = not self._began.free
        return self._settled(now)

    def _take(self, worker: int, one: _Process, said: Said, now: float) -> None:
        match said:
            case Register():
                self._tell(worker, Registered(self._began.settings, self.generation))
            case Heartbeat():
                self._beat(worker, one, said, now)
            case Broken():
                self._broken(worker, one, said, now)
            case ReadyReport():
                self._here(worker, one, said, now)
            case Quit():
                self._quit(worker, one, now)
            case Leave():
                self._leave(worker, one, now)

    def _beat(self, worker: int, one: _Process, said: Heartbeat, now: float) -> None:
        one.doing, one.since, one.place = said.doing, now - said.for_s, max(one.place, said.place)
        if one.state != "in" or said.generation != self.generation:
            return
        one.hand = max(one.hand, said.hand)
        self._note_exchange(one, said.waits)
        if self._phase == "aborting" and one.here is None:
            self._tell(worker, AbortGeneration(self.generation, self._why))
        elif self._phase == "holding" and one.here is None:
            self._tell(worker, PauseRequest(self.generation))

    def _broken(self, worker: int, one: _Process, said: Broken, now: float) -> None:
        is_news = one.state == "in" and said.generation == self.generation
        if is_news and self._phase in ("running", "holding") and not self._began.free:
            self.notices.append(f"worker {worker} failed in a collective operation ({said.why}); re-forming the group")
            self._abort(f"worker {worker} failed in a collective operation: {said.why}", now)
            self._is_exchange_broken = not said.forming

    def _here(self, worker: int, one: _Process, said: ReadyReport, now: float) -> None:
        if one.state == "left":
            self._tell_again(worker, said)
        elif one.state == "new":
            self._here_new(worker, one, said, now)
        elif said.generation > self.generation:  # the log was damaged and lost this generation
            self._end(worker, UNKNOWN, False, now)
            self._tell(worker, Evicted(one.why))
        elif abs(said.generation) < self.generation and (not self._began.free or abs(said.generation) < one.entered):
            self._tell_again(worker, said)
        elif self._began.free:
            self._admit(worker, one, said, now)
        elif abs(said.generation) == self.generation and not said.at_rest:
            one.here = said
            self._note_exchange(one, said.waits)
            if self._phase in ("running", "holding"):
                self._abort(f"worker {worker} paused", now)
        elif said.generation == self.generation and self._phase == "aborting":
            self._tell(worker, AbortGeneration(self.generation, self._why))
        elif said.generation == self.generation:
            self._here_at_rest(worker, one, said)

    def _note_exchange(self, one: _Process, waits: Waits | None) -> None:
        """Note where a member waits. Loops of unequal length end the run: no later operation can match again."""
        if waits is None or self._began.free or self._phase == "stopped":
            return
        one.waits = waits
        if self._exchanges.differs(waits):
            known = {worker: self._all[worker].waits for worker in self.members}
            found = {worker: it.place for worker, it in known.items() if it and it.exchange >= waits.exchange}
            self._stop(explained(found), uneven=True)

    def _here_new(self, worker: int, one: _Process, said: ReadyReport, now: float) -> None:
        if said.generation > one.entered:
            self._end(worker, UNKNOWN, False, now)
            self._tell(worker, Evicted(one.why))
        elif said.generation <= 0 and self._is_over():
            self._tell(worker, self._formed)
        elif said.generation <= 0 and one.here is None:
            limit = self._began.max_workers
            others = len(self.members) + sum(other.here is not None for other in self._new().values())
            if limit is not None and others >= limit:
                self._end(worker, f"the run has its {limit} workers", False, now)
                self._tell(worker, Evicted(one.why))
            elif self._began.free:
                self._admit(worker, one, said, now)
            else:
                one.here = said

    def _here_at_rest(self, worker: int, one: _Process, said: ReadyReport) -> None:
        last = rested(self._formed)
        mine = next(each.here for each in self._formed.members if each.worker == worker)
        if said == mine:
            self._tell(worker, self._formed)
        elif said.hand <= last:
            self._tell(worker, Continue(self.generation, last + 1))
        elif one.here is None or said.hand > one.here.hand:
            one.here, one.hand = said, max(one.hand, said.hand)

    def _tell_again(self, worker: int, said: ReadyReport) -> None:
        """Send the current generation again to a worker that missed it or is not in it."""
        is_in = any(each.worker == worker for each in self._formed.members)
        if is_in == (self._all[worker].state == "in"):
            self._tell(worker, self._formed)
            if is_in and self._phase == "aborting":
                self._tell(worker, AbortGeneration(self.generation, self._why))

    def _quit(self, worker: int, one: _Process, now: float) -> None:
        one.quits = one.lives
        if one.state == "new":
            self._end(worker, ASKED, False, now, "left")
        elif one.state == "in" and self._began.free:
            self._form_free([other for other in self.members if other != worker], ASKED, now, worker)

    def _leave(self, worker: int, one: _Process, now: float) -> None:
        if one.lives:
            self._end(worker, "it has left the loop", False, now, "left")

    # --- rules -------------------------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[Outgoing]:
        """Take all steps that follow; return the messages to send."""
        while self._step(now):
            pass
        posts, self._posts = self._posts, []
        return posts

    def _step(self, now: float) -> bool:
        """Take one step that follows from the state; return False if there is none."""
        if self._phase == "gathering":
            return self._begin_anew(now, "")
        if self._phase == "stopped":
            return False
        if self._began.free:
            return self._stop_if_few(now)
        if self._phase == "aborting":
            return self._form_behind_abort(now)
        if self._lost():
            return self._abort(self._said_of(self._lost()), now)
        if not self.members and self._new() and not self._is_over():
            return self._begin_anew(now, ANEW)
        return self._form_at_rest(now) if self._phase == "holding" else self._hold()

    def _abort(self, why: str, now: float) -> bool:
        """End the generation: its remaining members have to pause."""
        self._phase, self._why = "aborting", why
        self._limit = None if self._lost() else now + self._began.failure_timeout_s
        for worker in self.members:
            if (here := self._all[worker].here) is not None and here.at_rest:
                self._all[worker].here = None
            self._tell(worker, AbortGeneration(self.generation, why))
        return True

    def _hold(self) -> bool:
        """Ask all members to pause at their next rest, if there is a reason."""
        members = [self._all[worker] for worker in self.members]
        is_wanted = self._saves or self._standing() or any(one.quits or one.here is not None for one in members)
        if not members or not is_wanted:
            return False
        self._phase = "holding"
        for worker in self.members:
            if self._all[worker].here is None:
                self._tell(worker, PauseRequest(self.generation))
        return True

    def _form_at_rest(self, now: float) -> bool:
        """Bring all members to rest at one global step; then admit and release workers, or make a checkpoint."""
        members = {worker: self._all[worker] for worker in self.members}
        if not members:
            self._phase = "running"
            return False
        furthest = max(self._onward, *(one.hand for one in members.values()))
        behind = [worker for worker, one in members.items() if one.here is not None and one.here.hand < furthest]
        if behind and furthest > self._onward:
            self._onward = furthest
            self._record(Onward(furthest))
        for worker in behind:
            members[worker].here = None
            self._tell(worker, Continue(self.generation, furthest))
        if any(one.here is None for one in members.values()):
            return False
        left = [worker for worker, one in members.items() if one.quits]
        after = sorted({*members, *self._standing()} - set(left))
        if after == [one.worker for one in self._formed.members]:
            self._go_on(after)
        else:
            self._form(after, self._change(after, left), now, left)
            self._stop_short(after)
        return True

    def _stop_short(self, after: list[int]) -> None:
        """Abort the generation if too few members remain after the others left."""
        if 0 < len(after) < self._began.min_workers:
            self._abort(self._few(len(after)), 0.0)
            self._limit = None

    def _form_behind_abort(self, now: float) -> bool:
        """Form the next generation of the members with state once all remaining members are paused."""
        members = {worker: self._all[worker] for worker in self.members}
        if any(one.here is None for one in members.values()):
            return False
        history = sorted(worker for worker, one in members.items() if one.here and one.here.generation > 0)
        if not history:
            return self._begin_anew(now, ANEW)
        others = len(self._standing()) + len(members) - len(history) + self._done()
        if len(history) + others < self._began.min_workers:
            return self._stop_if_few(now)
        if self._is_exchange_broken and self._is_stuck(members):
            return self._stop(self._same_again(members))
        why = self._why
        if len(history) == 1 and len(self._formed.members) > 1:
            why += f"; worker {history[0]} continues alone: no other worker has what it commits now"
            self.notices.append(why)
        return self._form(history, why, now)

    def _is_stuck(self, members: dict[int, _Process]) -> bool:
        """Return True if the same members have repeatedly aborted the same operation and none has completed it."""
        now = sorted((worker, one.life, one.here.commits if one.here else 0) for worker, one in members.items())
        before, times = self._broken_off
        self._broken_off = now, times + 1 if now == before else 1
        return self._broken_off[1] >= STUCK

    def _same_again(self, members: dict[int, _Process]) -> str:
        places = {worker: one.waits.place for worker, one in members.items() if one.waits is not None}
        return f"the same workers have aborted the same operation {STUCK} times: {sentence(places) or self._why}"

    def _begin_anew(self, now: float, why: str) -> bool:
        """Start from the beginning, since no worker has state: wait for all that can come, and form a generation."""
        standing = sorted(worker for worker, one in self._all.items() if one.lives and one.here is not None)
        if self._is_somebody_to_come(now) or self._is_over():
            return self._stop_if_few(now)
        if not standing or len(standing) + self._done() < self._began.min_workers:
            return self._stop(self._few(len(standing)))
        if why:
            self.notices.append(why)
        return self._form(standing, why, now)

    def _is_somebody_to_come(self, now: float) -> bool:
        coming = (one.here is None if one.lives else self._returns(one, now) for one in self._all.values())
        return self._unseen() > 0 or any(coming)

    def _stop_if_few(self, now: float) -> bool:
        """Stop the run if too few workers are there or may still come."""
        there = sum(one.lives or self._returns(one, now) for one in self._all.values())
        if there + self._unseen() + self._done() >= max(self._began.min_workers, 1):
            return False
        return self._stop(self._few(there))

    def _few(self, there: int) -> str:
        return f"{_workers(there)} cannot continue, at least {max(self._began.min_workers, 1)} are required"

    def _heed_limits(self, now: float) -> None:
        limit_s = self._began.failure_timeout_s
        if self._phase == "aborting" and self._limit is not None and now > self._limit:
            for worker in self.members:
                if self._all[worker].here is None:
                    self._end(worker, f"it did not pause within {limit_s:g} s", True, now)
        if self._phase in ("running", "holding") and not self._began.free and self.members:
            left = [one for one in self._formed.members if self._has_left(one)]
            if left and all(now > self._all[one.worker].ended + limit_s for one in left):
                self._abort(f"worker {left[0].worker} has left the loop", now)
                self._limit = None

    # --- transitions -------------------------------------------------------------------------------------------------

    def _begin(self, worker: int, life: int, now: float) -> _Process:
        """Note a new incarnation; the previous one has ended."""
        if worker in self._all and self._all[worker].lives:
            self._end(worker, "its next process has begun", True, now)
        self._all[worker] = _Process(life, now)
        return self._all[worker]

    def _end(
        self, worker: int, why: str, returns: bool, now: float, state: Literal["gone", "left"] = "gone", again: str = ""
    ) -> None:
        """Note the end of an incarnation."""
        one = self._all[worker]
        if one.state == "gone" and one.returns == returns:
            return
        if one.lives and state == "gone":
            self._note_gone(worker, one, why, again, now)
        if state == "left":
            self._note("left", worker, one.life, why)
        if one.state == "in":
            self._limit = None
        one.why, one.returns, one.ended = why if one.lives else one.why, returns, now
        one.state = state
        self._record(Ended(worker, one.life, state, one.why, returns))

    def _admit(self, worker: int, one: _Process, said: ReadyReport, now: float) -> None:
        """Admit a worker immediately, in asynchronous training; no other worker is notified."""
        one.here = said
        self._form_free([*self.members.keys() - {worker}, worker], f"worker {worker} joined", now, worker)

    def _form_free(self, workers: list[int], why: str, now: float, told: int) -> None:
        """Form a generation of which only the worker that caused it is notified."""
        for worker in workers:
            self._all[worker].here = self._all[worker].here or ReadyReport(self._all[worker].entered)
        self._form(sorted(workers), why, now, [] if told in workers else [told], only=told)

    def _form(
        self, workers: list[int], why: str, now: float, left: list[int] | None = None, only: int | None = None
    ) -> bool:
        """Form the next generation of these workers."""
        former = {one.worker: one.life for one in self._formed.members}
        members = [Member(worker, self._all[worker].life, _shown(self._all[worker].here)) for worker in workers]
        gone = sorted(worker for worker in former if worker not in workers)
        form = GenerationView(
            self.generation + 1, members, gone, why
        )  # no checkpoint: joining workers could not take part
        told = [*workers, *(left or [])]
        joined = [one for one in members if former.get(one.worker) != one.life]
        self._record(Formed(form, left or []))
        self._enter(form, left or [], now)
        for worker in told if only is None else [only]:
            self._tell(worker, form)
        for one in joined:
            self._note("joined", one.worker, one.life, why)
        for worker in left or []:
            self._note("left", worker, self._all[worker].life, ASKED)
        self._note("formed", COORDINATOR, 0, why, members=workers)
        return True

    def _go_on(self, workers: list[int]) -> None:
        """Continue the same generation from this rest."""
        members = [Member(worker, self._all[worker].life, _shown(self._all[worker].here)) for worker in workers]
        form = GenerationView(self.generation, members, save=self._saves)
        self._record(Formed(form))
        self._enter(form, [], 0.0)
        for worker in workers:
            self._tell(worker, form)

    def _enter(self, form: GenerationView, left: list[int], now: float) -> None:
        """Make a generation, new or read from the log, the current one."""
        former, self._formed = self._formed, form
        self._exchanges, self._is_exchange_broken = Exchanges(), False
        self._phase, self._limit, self._onward = "running", None, 0
        self._saves = self._saves and not form.save
        within = {one.worker for one in form.members}
        for one in former.members:
            process = self._all.get(one.worker)
            if process is None or process.life != one.life or process.state != "in" or one.worker in within:
                continue
            if one.worker in left:
                process.state, process.why, process.ended = "left", ASKED, now
            else:
                process.state = "new"
        for one in form.members:
            process = self._all[one.worker]
            process.waits = None
            process.state, process.here, process.hand, process.entered = "in", None, 0, form.generation

    def _stop(self, why: str, uneven: bool = False) -> bool:
        """End the run. Workers whose loops are `uneven` raise it as an error of their scripts."""
        self._phase, self._why, self.uneven = "stopped", why, why if uneven else None
        self._record(Stopped(why, uneven))
        if not uneven:
            self.notices.append(f"the run cannot continue: {why}")
        for worker, one in self._all.items():
            if one.lives:
                self._tell(worker, Shutdown(why, uneven))
        return True

    def _replay(self, record: Began | Formed | Onward | Ended | Stopped, now: float) -> None:
        match record:
            case Formed(form, left):
                for one in form.members:
                    known = self._all.get(one.worker)
                    if known is None or known.life < one.life:
                        self._all[one.worker] = _Process(one.life, now)
                self._enter(form, left, now)
            case Onward(hand):
                self._onward = hand
            case Ended(worker, life, state, why, returns):
                self._all[worker] = _Process(life, now, state, why=why, returns=returns, ended=now)
            case Stopped(why, uneven):
                self._phase, self._why, self.uneven = "stopped", why, why if uneven else None

    # --- queries -----------------------------------------------------------------------------------------------------

    def _is_in(self, member: Member) -> bool:
        one = self._all[member.worker]
        return one.life == member.life and one.state == "in"

    def _has_left(self, member: Member) -> bool:
        one = self._all[member.worker]
        return one.life == member.life and one.state == "left"

    def _is_over(self) -> bool:
        """Return True if no member is left because some have finished."""
        return self.generation > 0 and not self.members and self._done() > 0 and not self._began.free

    def _done(self) -> int:
        """Return the number of workers that have finished their loop without being asked to leave."""
        return sum(one.state == "left" and one.why != ASKED for one in self._all.values())

    def _unseen(self) -> int:
        """Return the number of initially expected workers without a message so far."""
        if self.generation and not self._began.free:
            return 0
        return sum(worker not in self._all for worker in range(self._began.expected))

    def _lost(self) -> list[int]:
        """Return the members that have failed."""
        return [one.worker for one in self._formed.members if not self._is_in(one) and not self._has_left(one)]

    def _new(self) -> dict[int, _Process]:
        """Return the running workers that are no members."""
        return {worker: one for worker, one in self._all.items() if one.state == "new"}

    def _standing(self) -> list[int]:
        """Return the workers that wait to be admitted."""
        return [worker for worker, one in self._new().items() if one.here is not None]

    def _returns(self, one: _Process, now: float) -> bool:
        return one.state == "gone" and one.returns and now <= one.ended + self._began.return_s

    def _said_of(self, lost: list[int]) -> str:
        return "; ".join(f"worker {worker} failed" + self._cause(worker) for worker in lost)

    def _cause(self, worker: int) -> str:
        one = self._all[worker]
        return f" ({one.why})" if one.state == "gone" and one.why else ""

    def _change(self, after: list[int], left: list[int]) -> str:
        former = [one.worker for one in self._formed.members]
        said = [f"worker {worker} joined" for worker in after if worker not in former]
        return "; ".join([*said, *(f"worker {worker} leaves gracefully" for worker in left)])

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _tell(self, worker: int, told: Told) -> None:
        self._posts.append(Outgoing(worker, self._all[worker].life, told))

    def _record(self, record: _Record) -> None:
        self._records.append(_ENCODER.encode(record))

    def _note(self, what: str, worker: int, life: int, why: str, **more: object) -> None:
        said = {"what": what, "worker": worker, "incarnation": life, "generation": self.generation, "why": why}
        self.events.append({"event": "membership", **said, **more})

    def _note_gone(self, worker: int, one: _Process, why: str, again: str, now: float) -> None:
        others = sum(other != worker for other in self.members)
        doing = f" while {one.doing} for {max(now - one.since, 0.0):.1f} s" if one.doing else ""
        noun = "worker" if others == 1 else "workers"
        self.notices.append(f"worker {worker} failed ({why}){doing}; continuing with {others} {noun}{again}")
        self._note("failed", worker, one.life, why)

    def _note_slow(self, worker: int, silent: float, now: float) -> None:
        one = self._all[worker]
        doing = f" It was {one.doing} for {max(now - one.since - silent, 0.0):.1f} s." if one.doing else ""
        left = self._began.failure_timeout_s - silent
        self.notices.append(
            f"worker {worker} has sent no heartbeat for {silent:.1f} s.{doing} In {max(left, 0.0):.1f} s it is "
            "declared failed"
        )
        self._note("slow", worker, one.life, f"no heartbeat for {silent:.1f} s")


def rested(form: GenerationView) -> int:
    """Return the global step at which a generation began or last rested; -1 if its members were not at rest."""
    return max((one.here.hand for one in form.members if one.here.at_rest), default=-1)


def _shown(here: ReadyReport | None) -> ReadyReport:
    """Return the report as other workers see it: its generation is 0 without state."""
    assert here is not None, "who enters a generation has said where it stands"
    return msgspec.structs.replace(here, generation=max(here.generation, 0))


def _workers(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"
