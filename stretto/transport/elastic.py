"""A wire whose workers may die: one generation of workers after the other, each on a wire of its own.

What belongs together is *attempted*: asks, or one gather or tell. An attempt ends for all workers under one generation,
or it is done again from the beginning by those who are left. A worker can be one attempt ahead of another when the
group breaks; it keeps the answers of its last one, and gives them to those behind.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp
from stretto.errors import BrokenTransportError, MemberOutError
from stretto.membership.loop_positions import Kind, LoopPosition, Waits
from stretto.membership.messages import EXCHANGING, Continue, GenerationView, ReadyReport
from stretto.transport.commit_log import Attempt, pack, unpack
from stretto.transport.interface import Handle, Message, Traffic, Transport, made
from stretto.transport.positioned import opened, opened_all, sealed

Found = TypeVar("Found")


class AbortableTransport(Transport, Protocol):
    """The wire of one generation."""

    def abort(self) -> None:
        """Break off whatever waits, from any thread; it raises BrokenTransportError. Idempotent."""
        ...


class GenerationSource(Protocol):
    """A worker's connection to the coordinator."""

    on_abort: Callable[[int, str], None]
    """Called, from a thread, with the generation that is over, and why."""
    place: Callable[[], int]
    """Returns how many exchanges among all this worker has begun; may be called from a thread."""

    @property
    def held(self) -> bool:
        """Whether all are asked to stand still at their next rest."""
        ...

    @property
    def aborted(self) -> int:
        """The last generation that is known to be over."""
        ...

    def stand(self, here: ReadyReport) -> GenerationView:
        """Stand still until the next generation. Raises MemberOutError when there is none for this worker."""
        ...

    def at_rest(self, here: ReadyReport) -> GenerationView | Continue:
        """The same at a rest; others may have come further."""
        ...

    def broken(self, generation: int, why: str, forming: bool = False) -> None:
        """An exchange of this generation has failed here, or its `forming`."""
        ...

    def doing(self, text: str, hand: int, waits: Waits | None = None) -> None:
        """What goes with the next beats: also the exchange that is waited in."""
        ...

    def quit(self) -> None:
        """Ask to leave at the next rest."""
        ...

    def leave(self) -> None:
        """The run is over for this worker."""
        ...

    def close(self) -> None:
        """End the connection. Idempotent."""
        ...


class Rendezvous(Protocol):
    """Makes the wire of a generation."""

    @property
    def address(self) -> str:
        """Where this worker can keep a store for the others."""
        ...

    def form(self, form: GenerationView, rank: int) -> AbortableTransport:
        """Meet the members of a generation. Raises BrokenTransportError when one of them does not come."""
        ...

    def abort(self) -> None:
        """Break off the forming that is going on, from any thread; without one nothing happens."""
        ...

    def close(self) -> None:
        """Let go of what lasts over generations. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """A new generation, as a worker learns of it. Numbers are those that workers keep for good."""

    generation: int
    members: tuple[int, ...]
    gone: tuple[int, ...]
    came: tuple[int, ...]
    hand: int
    """The furthest hand that any member has been dealt."""
    rounds: int
    """The most rounds that any member has ended."""
    save: bool = False
    lives: tuple[int, ...] = ()
    """Those of the `gone` that have ended."""
    behind: bool = False
    """Whether others have ended the attempt that this worker is in."""


@dataclass(slots=True)
class _Noted:
    """An ask under way, whose answer is kept."""

    attempt: Attempt
    place: int
    ticket: Handle

    def wait(self) -> Answer:
        answer = self.ticket.wait()
        self.attempt.note(self.place, answer)
        return answer


@dataclass(slots=True)
class _Given:
    """An ask that another worker's answer is known of."""

    answer: Any

    def wait(self) -> Answer:
        found: Answer = self.answer
        return found


class ElasticTransport:
    """One worker's end. `worker` is its rank in the present generation, `number` is its own for good.

    `position` says how far it has come: hands dealt and rounds ended. `on_change` hears of every new generation but the
    first, before anything is exchanged in it.
    """

    def __init__(self, number: int, standing: GenerationSource, former: Rendezvous) -> None:
        self.number = number
        self._standing, self._former = standing, former
        self.position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.place: Callable[[], LoopPosition] = LoopPosition
        """Where the script is in its loop: all that take part in an exchange must be in the same epoch."""
        self._waits: Waits | None = None
        self.on_change: Callable[[Change], None] = lambda _change: None
        self._inner: AbortableTransport | None = None
        self._form = GenerationView(0, [])
        self._generation = 0
        """The one whose state this worker has; 0 while it has none."""
        self._commits = self._begun = 0
        self._open = Attempt(1)
        self._kept: list[Attempt] = []
        """Its last attempts, from the last one that took all workers on."""
        self._copies = False
        self._given: deque[Attempt] = deque()
        """Attempts that others have ended before this worker."""
        self._go_on = 0
        self._ended = Traffic(0, 0, counted=True)
        self.arrives = False
        """Whether it comes to workers that have begun: it takes their state first."""
        standing.on_abort, standing.place = self._abort, lambda: self.begun
        self._meet_again()
        self.arrives = _has_history(self._form)
        self.begins_again = any(one.life for one in self._form.members)
        """Whether some of those who begin together have lived before."""
        if not self.arrives:
            self._generation = self._form.generation

    # --- the seam -----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        """The rank in this generation."""
        return self.members.index(self.number)

    @property
    def workers(self) -> int:
        """How many there are in this generation."""
        return len(self._form.members)

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers."""
        return self._form.numbers

    @property
    def begun(self) -> int:
        """Number of exchanges among all that this worker has begun; the same at all workers between two of them."""
        return max(self._begun, self._commits)

    def submit(self, op: CollectiveOp) -> Handle:
        """Begin an ask of the present attempt."""
        if self._given:
            return self._repeated(op)
        return _Noted(self._open, self._open.ask(), self._wire().submit(op))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The message of every worker."""
        here = self.place()
        found = self.attempt(
            lambda: self._single(lambda: self._wire().all_gather_bytes(sealed(here, message))), kind="all_gather"
        )
        return opened_all(self.members, found)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The message of the root, made once; when that is gone the first of those who are left tells."""
        here, whole = self.place(), sealed(self.place(), message)
        who, once = self.members[root], functools.cache(lambda: made(whole))

        def told() -> bytes:
            rank = self.members.index(who) if who in self.members else 0
            return self._wire().broadcast_bytes(once, rank)

        found: bytes = self.attempt(lambda: self._single(told), alone=True, kind="broadcast")
        return opened(who, found, self.number, here)

    def attempt(
        self,
        act: Callable[[], Found],
        again: Callable[[], Found] | None = None,
        alone: bool = False,
        kind: Kind = "tensors",
    ) -> Found:
        """Do what belongs together; when it breaks, do it `again` from the beginning among those who are left.

        `alone` says that one worker can be done with it before others have begun.
        """
        todo, self._begun, self._waits = act, self._commits + 1, Waits(self._commits + 1, kind, self.place())
        self._standing.doing(EXCHANGING, self.position()[0], self._waits)
        while True:
            try:
                found = todo()
            except BrokenTransportError as error:
                self._recover(str(error))
                todo = again or act
                continue
            self._commit(alone)
            self._waits = None
            self.doing("computing", self.position()[0])
            return found

    def traffic(self) -> Traffic:
        """The bytes of all generations."""
        return _sum(self._ended, self._inner.traffic()) if self._inner is not None else self._ended

    def close(self) -> None:
        """Let go of the other workers, in good order."""
        if self._inner is not None:
            self._ended = self.traffic()
            self._inner.close()
            self._inner = None
            self._standing.leave()
        self._former.close()
        self._standing.close()

    # --- resting ------------------------------------------------------------------------------------------------

    def doing(self, text: str, hand: int) -> None:
        """What this worker does, for those who ask."""
        self._standing.doing(text, hand)

    def quit(self) -> None:
        """Ask to leave in good order, at the next rest; a signal's handler may."""
        self._standing.quit()

    def is_to_rest(self) -> bool:
        """Whether all are asked to stand still, and this worker has come as far as it must."""
        return self._standing.held and self.position()[0] >= self._go_on

    def rest(self) -> Change | None:
        """Stand still until all do. Returns what comes of it; None when this worker is to go on to a further hand."""
        hand, rounds = self.position()
        told = self._standing.at_rest(self._here(at_rest=True))
        if isinstance(told, Continue):
            self._go_on = told.hand
            return None
        if told.generation == self._form.generation:
            return Change(told.generation, self.members, (), (), hand, rounds, told.save)
        if self.number not in told.numbers:
            self._let_go()
            return Change(told.generation, told.numbers, (self.number,), (), hand, rounds)
        return self._take(told) or self._meet_again()

    def mend(self) -> None:
        """Take part in forming the next generation if this one is over: others may wait for that outside exchanges."""
        if self._inner is not None and self._standing.aborted >= self._form.generation:
            self._recover("the generation is over")

    def tell_state(self, message: Message) -> bytes:
        """What the first worker with a history tells those that have come."""

        found: bytes = self.attempt(
            lambda: self._single(lambda: self._wire().broadcast_bytes(message, self._form.first)),
            alone=True,
            kind="broadcast",
        )
        return found

    def arrived(self) -> None:
        """The state of the others has been taken: this worker has a history now."""
        self._generation = self._form.generation

    # --- generations --------------------------------------------------------------------------------------------

    def _wire(self) -> AbortableTransport:
        if self._inner is None:
            raise BrokenTransportError("the wire is closed")
        return self._inner

    def _abort(self, generation: int, why: str) -> None:
        """From the companion's thread: this generation is over."""
        if generation == self._form.generation:
            (self._inner or self._former).abort()

    def _here(self, at_rest: bool = False) -> ReadyReport:
        hand, rounds = self.position()
        waits = None if at_rest else self._waits
        return ReadyReport(self._generation, self._commits, hand, at_rest, self._former.address, rounds, waits)

    def _recover(self, why: str) -> None:
        """An attempt has broken: stand still, and go on in the next generation."""
        self._standing.broken(self._form.generation, why)
        self._meet_again()

    def _meet_again(self) -> Change:
        self._let_go()
        change = None
        while change is None:
            form = self._standing.stand(self._here())
            if self.number not in form.numbers:
                self._standing.close()
                raise SystemExit(0)  # the others have done with everything, or this worker was asked to leave
            change = self._take(form)
        return change

    def _take(self, form: GenerationView) -> Change | None:
        """Enter a generation; None when that has broken as well. Raises MemberOutError if no state is left to take."""
        before = self._form
        self._let_go()
        if self.arrives and not self._generation and not _has_history(form):
            raise MemberOutError("nobody is left who knows the state of the run; this worker begins anew")
        self._form = form
        try:
            self._inner = self._form_unless_over(form)
            self._catch_up(form)
        except BrokenTransportError as error:
            self._standing.broken(form.generation, str(error), forming=True)
            self._let_go()
            if self._generation:
                self._generation = form.generation
            return None
        change = self._change(before, form)
        if self._generation:
            self._generation = form.generation
            self.on_change(change)
        return change

    def _form_unless_over(self, form: GenerationView) -> AbortableTransport:
        """The wire of a generation. What is heard of its end before it is there must not get lost."""
        if self._standing.aborted >= form.generation:
            raise BrokenTransportError("the generation is over already")
        inner = self._former.form(form, self.worker)
        if self._standing.aborted >= form.generation:
            inner.abort()
        return inner

    def _change(self, before: GenerationView, form: GenerationView) -> Change:
        old = set(before.numbers)
        came = tuple(one.worker for one in form.members if not one.here.has_history)
        gone = tuple(sorted(old - set(form.numbers) | (old & set(came))))
        with_state = [one.here for one in form.members if one.here.has_history]
        hand = max((one.hand for one in with_state), default=0)
        rounds = max((one.rounds for one in with_state), default=0)
        behind = bool(self._given)
        lives = tuple(one.life for number in gone for one in before.members if one.worker == number)
        return Change(form.generation, self.members, gone, came, hand, rounds, form.save, lives, behind)

    def _let_go(self) -> None:
        if self._inner is not None:
            self._inner.abort()
            self._ended = self.traffic()
            self._inner.close()
        self._inner = None

    # --- who is ahead, and who is behind ------------------------------------------------------------------------

    def _catch_up(self, form: GenerationView) -> None:
        """Those ahead give the answers that others lack."""
        self._open = Attempt(self._commits + 1)
        known = [(rank, one.here.commits) for rank, one in enumerate(form.members) if one.here.has_history]
        most = max((commits for _, commits in known), default=0)
        least = min((commits for _, commits in known), default=0)
        if not self._generation:
            self._commits, self._open = most, Attempt(most + 1)
        if least == most:
            return
        root = next(rank for rank, commits in known if commits == most)
        told = self._wire().broadcast_bytes(lambda: pack(self._since(least)), root)
        if self._generation and self._commits < most:
            found = [one for one in unpack(told) if one.number > self._commits]
            if [one.number for one in found] != list(range(self._commits + 1, most + 1)):
                raise MemberOutError("the answers that this worker lacks are not there any more")
            self._given = deque(found)

    def _since(self, commits: int) -> list[Attempt]:
        kept = [one for one in self._kept if one.number > commits]
        return kept if all(one.intact for one in kept) else []

    def _repeated(self, ask: CollectiveOp) -> Handle:
        """What others were answered in this attempt, noted as if it were answered now: somebody may still lack it."""
        place = self._open.ask()
        answer = self._given[0].answers[place]
        answer = answer.to(ask.tensor.device) if isinstance(ask, AllReduceMean) else answer
        self._open.note(place, answer)
        return _Given(answer)

    def _single(self, act: Callable[[], Any]) -> Any:
        """An attempt of one gather or tell."""
        answer = self._given[0].answers[0] if self._given else act()
        self._open = Attempt(self._commits + 1, [answer], [None])
        return answer

    def _commit(self, alone: bool) -> None:
        """The attempt has ended here. What others may still lack of it is kept."""
        if self._given:
            self._given.popleft()
        ended, self._commits = self._open, self._commits + 1
        self._open = Attempt(self._commits + 1)
        if self._kept and not self._copies and not self._kept[-1].intact:
            self._copies = True
        if self._copies:
            ended.keep_copies(self._kept[-1] if self._kept and not alone else None)
        if not alone:
            self._kept.clear()
        self._kept.append(ended)


def _has_history(form: GenerationView) -> bool:
    """Whether any member has taken part in an earlier generation."""
    return any(one.here.has_history for one in form.members)


def has_others(wire: Transport) -> bool:
    """Whether there is somebody to exchange with, or may be one day."""
    return wire.workers > 1 or isinstance(wire, ElasticTransport)


def attempted(wire: Transport, act: Callable[[], Found], again: Callable[[], Found] | None = None) -> Found:
    """Do asks that belong together; over a wire whose workers may die they are done again when one does."""
    return wire.attempt(act, again) if isinstance(wire, ElasticTransport) else act()


def _sum(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(
        one.bytes_sent + other.bytes_sent, one.bytes_received + other.bytes_received, one.counted and other.counted
    )
