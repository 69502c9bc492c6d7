"""Transport whose workers may fail: a sequence of generations, each with its own transport.

Operations that belong together form an *attempt*: those of a round, or one all-gather or broadcast. An attempt commits
at all workers under one generation, or the remaining workers repeat it from its beginning:

    worker 0            worker 1            worker 2
    attempt 7 ......... attempt 7 ......... attempt 7
    commits 7           fails               transport broken, 7 not committed
    ReadyReport(7)  -->  coordinator: GenerationView(2, members 0 and 2)  <--  ReadyReport(6)
    broadcasts the results of attempt 7  --------------------------------->  repeats 7 with these results
    attempt 8 ............................................................. attempt 8

When a group breaks, a worker can be one attempt ahead of another. It keeps the results of its last attempt (see
commit_log) and broadcasts them to the workers that lack them. The results of exchanges of pairs are other ones at each
worker, so an attempt *in pairs* ends with an agreement of all workers: once one has committed it, all have completed
its exchanges, and commit it with their own results.

If the workers have several ranks, each attempt of tensors commits at all ranks or at none. It ends with two agreements:
of the ranks of each replica, that all have completed its operations in this generation, then of the ranks with one
number. Once a rank has committed it, all ranks of all replicas have completed it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange
from stretto.errors import BrokenTransportError, MemberOutError, TransportError, UnreachedError, explain
from stretto.membership.client_state import GenerationObserver
from stretto.membership.loop_positions import Kind, LoopPosition, Waits
from stretto.membership.messages import EXCHANGING, Continue, GenerationView, LimitedReport, RankReport, ReadyReport
from stretto.transport.commit_log import Attempt, pack, unpack
from stretto.transport.interface import Change, Collectives, Found, Handle, Message, Traffic, Transport, made
from stretto.transport.peer_group import PeerGroup
from stretto.transport.positioned import opened, opened_all, sealed
from stretto.transport.siblings import Siblings

_MAKE, _MADE = b"make", b"made"
"""Beginnings of rank 0's messages to the other ranks: to make a message with it, and that a message was received."""


class AbortableTransport(Collectives, Protocol):
    """Transport of one generation."""

    def abort(self) -> None:
        """Make all waits raise BrokenTransportError. Callable from any thread. Idempotent."""
        ...


class GenerationSource(Protocol):
    """A worker's connection to the coordinator."""

    @property
    def pause_requested(self) -> bool:
        """True if all workers are requested to pause before their next global step."""
        ...

    @property
    def aborted(self) -> int:
        """Last generation that is known to have ended."""
        ...

    def attach(self, observer: GenerationObserver) -> None:
        """Notify an observer of the end of generations, from another thread."""
        ...

    def await_generation(self, report: ReadyReport) -> GenerationView:
        """Wait for the next generation. Raise MemberOutError if this worker is no member of it."""
        ...

    def pause_between_steps(self, report: ReadyReport) -> GenerationView | Continue:
        """Wait for the next generation between two global steps, or for Continue if other workers are further ahead."""
        ...

    def broken(self, generation: int, why: str, forming: bool = False, unreached: Sequence[int] = ()) -> None:
        """Report that an exchange of this generation has failed here, or its rendezvous (`forming`).

        `unreached` are the members that have not connected with this one in the time for that.
        """
        ...

    def doing(self, text: str, global_step: int, waits: Waits | None = None) -> None:
        """Set the status for the next heartbeats, and the exchange that this worker waits in."""
        ...

    def checkpoint_took(self, seconds: float) -> None:
        """Note the cost of the last checkpoint, for heartbeats."""
        ...

    def quit(self) -> None:
        """Request to leave at the next pause."""
        ...

    def leave(self) -> None:
        """Report that this worker has finished the run."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


class Rendezvous(Protocol):
    """Connects the members of a generation."""

    @property
    def address(self) -> str:
        """Address at which the members of the next generation reach this worker, in a text of its own form."""
        ...

    def form(self, form: GenerationView, rank: int) -> AbortableTransport:
        """Connect the members of a generation. Raise BrokenTransportError if one of them does not connect."""
        ...

    def abort(self, generation: int) -> None:
        """Abort a generation: its connecting, now or later, or its transport. Callable from any thread."""
        ...

    def close(self) -> None:
        """Close what outlasts generations. Idempotent."""
        ...


@dataclass(slots=True)
class _LoggedHandle:
    """Operation in progress, whose result is logged."""

    attempt: Attempt
    place: int
    ticket: Handle

    def wait(self) -> Answer:
        answer = self.ticket.wait()
        self.attempt.note(self.place, answer)
        return answer


@dataclass(slots=True)
class _KnownHandle:
    """Operation whose result was received from another worker."""

    answer: Any

    def wait(self) -> Answer:
        found: Answer = self.answer
        return found


class ElasticTransport(Transport):
    """One worker's end. `worker` is its rank in the present generation, `number` its permanent number.

    The loop is notified of every generation except the first.
    """

    repeats_attempts = can_leave = True

    def __init__(
        self,
        number: int,
        coordinator: GenerationSource,
        rendezvous: Rendezvous,
        ranks: Siblings | None = None,
        share_limit: int = 0,
    ) -> None:
        self._share_limit = share_limit
        self._number, self._coordinator, self._rendezvous, self._ranks = number, coordinator, rendezvous, ranks
        self._agreements = 0
        """Number of attempts that all ranks have committed."""
        self._waits: Waits | None = None
        self._inner: AbortableTransport | None = None
        self._form = GenerationView(0, [])
        self._generation = 0
        """Generation whose state this worker has; 0 before it has any."""
        self._commits = self._begun = 0
        self._open = Attempt(1)
        self._kept: list[Attempt] = []
        """Last attempts that this worker has committed, since the last attempt that needed all workers."""
        self._copies = False
        self._given: deque[Attempt] = deque()
        """Attempts that other workers have committed before this one."""
        self._refuses_pairs = False
        """True within an attempt that does not end with an agreement."""
        self._go_on = 0
        self._ended = Traffic(0, 0, counted=True)
        coordinator.attach(self)
        self._meet_again()
        self.arrives = _has_history(self._form)
        self.begins_again = self._form.generation > 1 or any(member.incarnation for member in self._form.members)
        if not self.arrives:
            self._generation = self._form.generation

    # --- transport -----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        """Rank in this generation."""
        return self.members.index(self._number)

    @property
    def share_limits(self) -> dict[int, int]:
        """Largest share of each member of this generation that has run out of memory."""
        return {one.worker: one.report.share_limit for one in self._form.members if one.report.share_limit}

    @property
    def workers(self) -> int:
        """Number of members of this generation."""
        return len(self._form.members)

    @property
    def number(self) -> int:
        """Permanent number of this worker."""
        return self._number

    @property
    def members(self) -> tuple[int, ...]:
        """Permanent numbers of the members."""
        return self._form.numbers

    @property
    def begun(self) -> int:
        """Number of exchanges among all that this worker has begun; the same at all workers between two of them."""
        return max(self._begun, self._commits)

    def operations_begun(self) -> int:
        """Return `begun`, for heartbeats."""
        return self.begun

    def _place(self) -> LoopPosition:
        return self._loop.place() or LoopPosition()

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation of the present attempt. Exchanges are not logged: see `attempt`."""
        if isinstance(op, Exchange):
            if self._refuses_pairs:
                problem = "workers may fail, and this attempt has an exchange of a pair but ends without an agreement"
                expected, to_type = "in_pairs=True at all workers", "attempt(act, in_pairs=True)"
                raise TransportError(explain(problem, got="in_pairs=False", expected=expected, to_type=to_type))
            return self._transport().submit(op)
        if self._given:
            return self._repeated(op)
        return _LoggedHandle(self._open, self._open.ask(), self._transport().submit(op))

    def group(self, ranks: Sequence[int]) -> PeerGroup:
        """Return a transport among the workers of these ranks, which ends with this generation."""
        generation = self._form.generation

        def check() -> None:
            if self._form.generation != generation:
                raise BrokenTransportError(f"the group of generation {generation} is over")

        return PeerGroup(self, ranks, check=check)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        place = self._place()
        found = self.attempt(
            lambda: self._single(lambda: self._transport().all_gather_bytes(sealed(place, message))), kind="all_gather"
        )
        return opened_all(self.members, found)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message, evaluated once. If the root has failed, the first remaining member is the root."""
        place, whole = self._place(), sealed(self._place(), message)
        who, once = self.members[root], functools.cache(lambda: made(whole))

        def reply() -> bytes:
            rank = self.members.index(who) if who in self.members else 0
            return self._transport().broadcast_bytes(once, rank)

        found: bytes = self.attempt(lambda: self._single(reply), alone=True, kind="broadcast")
        return opened(who, found, self._number, place)

    def broadcast_by_ranks(self, make: Callable[[], bytes]) -> bytes:
        """Return the first worker's message, which its ranks make together; rank 0 of each worker leads its ranks.

        The other ranks exchange nothing with other workers, so that all have the message of rank 0 if a worker fails.
        """
        if self._ranks is None:
            return self.broadcast_bytes(make)
        if self._ranks.rank:
            while (message := self._of_rank_0(b"")) == _MAKE:
                make()
            return message[len(_MAKE) :]

        def together() -> bytes:
            self._of_rank_0(_MAKE)
            return make()

        found = self.broadcast_bytes(together)
        self._of_rank_0(_MADE + found)
        return found

    def _of_rank_0(self, message: bytes) -> bytes:
        siblings = self.siblings
        assert siblings is not None
        with self.waiting():
            return siblings.broadcast_bytes(message)

    def attempt(
        self,
        act: Callable[[], Found],
        again: Callable[[], Found] | None = None,
        in_pairs: bool = False,
        alone: bool = False,
        kind: Kind = "tensors",
    ) -> Found:
        """Run an attempt. If it breaks, run `again` (or `act`) from the beginning among the remaining members.

        `in_pairs`: any worker may submit an Exchange in it, so it ends with an agreement. `alone`: one worker can
        commit it before others have begun it.
        """
        self._refuses_pairs = not in_pairs
        todo, self._begun, self._waits = act, self._commits + 1, Waits(self._commits + 1, kind, self._place())
        self._coordinator.doing(EXCHANGING, self._loop.counts()[0], self._waits)
        while True:
            try:
                found = todo()
            except BrokenTransportError as error:
                self._recover(str(error))
                todo = again or act
                continue
            if (in_pairs or self._is_of_ranks(kind)) and not self._agreed(kind):
                todo = again or act
                continue
            self._commit(alone)
            self._waits, self._refuses_pairs = None, False
            self.doing("computing", self._loop.counts()[0])
            return found

    def _is_of_ranks(self, kind: Kind) -> bool:
        """Return True if an attempt commits at all ranks of the replicas or at none."""
        return self._ranks is not None and kind == "tensors"

    def _agreed(self, kind: Kind) -> bool:
        """Return True once all workers have completed an attempt in pairs, and False if they have to repeat it.

        A worker that has committed it received this worker's agreement, so this worker commits it too.
        """
        is_complete = not self._is_of_ranks(kind) or self._is_complete_at_ranks()
        try:
            if is_complete and not self._is_committed:
                self._transport().all_gather_bytes(b"")
        except BrokenTransportError as error:
            self._recover(str(error))
            is_complete = False
        if not is_complete and not self._is_committed:
            return False
        self._open = Attempt(self._commits + 1)
        self._agreements += self._is_of_ranks(kind)
        return True

    @property
    def _is_committed(self) -> bool:
        """True if another worker, or a rank of one, has committed the attempt under way."""
        return bool(self._given) or _agreements(self._form) > self._agreements

    def _is_complete_at_ranks(self) -> bool:
        """Return True if all ranks of this replica have completed the attempt in this generation."""
        generation = self._form.generation
        while self._ranks is not None and self._form.generation == generation:
            with self.waiting():
                completed = self._ranks.completed_in(generation)
            if max(completed) > generation:
                break
            if min(completed) == generation:
                return self._form.generation == generation
        return False

    def traffic(self) -> Traffic:
        """Return the bytes of all generations, and those between the ranks of this worker."""
        own = self._traffic_of_generations()
        return own + self.siblings.traffic() if self.siblings is not None else own

    def _traffic_of_generations(self) -> Traffic:
        return self._ended + self._inner.traffic() if self._inner is not None else self._ended

    def close(self) -> None:
        """Leave the group gracefully."""
        if self._inner is not None:
            self._ended = self._traffic_of_generations()
            if self._ranks is not None:
                with suppress(TransportError), self.waiting():
                    self._ranks.completed_in(self._form.generation)  # nothing is on its way to a rank afterwards
            self._inner.close()
            self._inner = None
            self._coordinator.leave()
        if self._ranks is not None:
            self._ranks.close()
        self._rendezvous.close()
        self._coordinator.close()

    # --- pauses ------------------------------------------------------------------------------------------------

    def doing(self, text: str, global_step: int) -> None:
        """Set this worker's status for heartbeats."""
        self._coordinator.doing(text, global_step)

    def checkpoint_took(self, seconds: float) -> None:
        """Publish the cost of the last checkpoint, if this worker has written it, for the coordinator."""
        self._coordinator.checkpoint_took(seconds)

    def request_leave(self) -> None:
        """Request to leave gracefully at the next pause. May be called from a signal handler."""
        self._coordinator.quit()

    def is_to_rest(self) -> bool:
        """Return True if a pause is requested and this worker has reached the global step it must complete first."""
        return self._coordinator.pause_requested and self._loop.counts()[0] >= self._go_on

    def rest(self, frozen: Callable[[], bytes], state: Callable[[bool], bytes]) -> Change | None:
        """Pause until all workers do, and broadcast the state to workers that join. Return the change of membership.

        Returns None if this worker must first complete a later step.
        """
        global_step, rounds = self._loop.counts()
        reply = self._coordinator.pause_between_steps(self._report(between_steps=True))
        if isinstance(reply, Continue):
            self._go_on = reply.global_step
            return None
        if reply.generation == self._form.generation:
            return Change(reply.generation, self.members, (), (), global_step, rounds, reply.save)
        if self._number not in reply.numbers:
            self._let_go()
            return Change(reply.generation, reply.numbers, (self._number,), (), global_step, rounds)
        change = self._take(reply) or self._meet_again()
        if change.came:
            self._broadcast_state(frozen, state)
        return change

    def mend(self) -> None:
        """Join the next generation if this one has ended: other workers may wait for this outside of exchanges."""
        if self._inner is not None and self._coordinator.aborted >= self._form.generation:
            self._recover("the generation is over")

    @property
    def siblings(self) -> Collectives | None:  # type: ignore[override]
        """The ranks of this worker's replica."""
        return self._ranks.group if self._ranks is not None else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take part in new generations while this rank waits for another one of its replica."""
        assert self._ranks is not None
        self.mend()
        with self._ranks.waiting():
            if self._coordinator.aborted >= self._form.generation:
                self._ranks.on_abort(self.mend)
            yield

    def receive_state(self, frozen: Callable[[], bytes]) -> bytes:
        """Receive the state of the run, as a worker that arrives."""
        state = self._broadcast_state(frozen, None)
        self._generation = self._form.generation
        return state

    def _broadcast_state(self, frozen: Callable[[], bytes], state: Callable[[bool], bytes] | None) -> bytes:
        """Broadcast the state of the run from the first member that has it to joining members.

        Joining members, without a `state`, and the first one first exchange the checksums of their frozen tensors.
        """

        def exchange() -> bytes:
            transport, first = self._transport(), self._form.first
            tells = state is None or self.members.index(self._number) == first
            checksums = {*transport.all_gather_bytes(frozen() if tells else b"")} - {b""}
            return transport.broadcast_bytes(lambda: state(len(checksums) == 1) if state is not None else b"", first)

        found: bytes = self.attempt(lambda: self._single(exchange), alone=True, kind="broadcast")
        return found

    # --- generations --------------------------------------------------------------------------------------------

    def _transport(self) -> AbortableTransport:
        if self._inner is None:
            raise BrokenTransportError("the transport is closed")
        return self._inner

    def generation_aborted(self, generation: int, why: str) -> None:
        """Abort the generation, called from the membership client's thread."""
        self._rendezvous.abort(generation)
        if generation != self._form.generation:
            return
        if (inner := self._inner) is not None:
            inner.abort()
        if self._ranks is not None:
            self._ranks.on_abort(self.mend)

    def _report(self, between_steps: bool = False) -> ReadyReport:
        global_step, rounds = self._loop.counts()
        waits = None if between_steps else self._waits
        address = self._rendezvous.address
        counts, limit = (self._generation, self._commits, global_step), self._share_limit
        if self._ranks is not None:
            ranks = self._agreements, self._ranks.address, limit
            return RankReport(*counts, between_steps, address, rounds, waits, *ranks)
        if limit:
            return LimitedReport(*counts, between_steps, address, rounds, waits, limit)
        return ReadyReport(*counts, between_steps, address, rounds, waits)

    def _recover(self, why: str) -> None:
        """Report a broken attempt, and enter the next generation."""
        self._coordinator.broken(self._form.generation, why)
        self._meet_again()

    def _meet_again(self) -> Change:
        self._let_go()
        change = None
        while change is None:
            form = self._coordinator.await_generation(self._report())
            if self._number not in form.numbers:
                self._coordinator.close()
                raise SystemExit(0)  # the run has ended, or this worker was requested to leave
            change = self._take(form)
        return change

    def _take(self, form: GenerationView) -> Change | None:
        """Enter a generation; return None if it breaks too. Raise MemberOutError if no member has the run's state."""
        before = self._form
        self._let_go()
        if self.arrives and not self._generation and not _has_history(form):
            raise MemberOutError("no worker is left that has the state of the run; restarting this worker")
        self._form = form
        try:
            self._inner = self._form_unless_over(form)
            if self._ranks is not None:
                self._ranks.connect(form, self._number)
            self._catch_up(form)
        except BrokenTransportError as error:
            unreached = error.workers if isinstance(error, UnreachedError) else ()
            self._coordinator.broken(form.generation, str(error), forming=True, unreached=unreached)
            self._let_go()
            if self._generation:
                self._generation = form.generation
            return None
        change = self._change(before, form)
        if self._generation:
            self._generation = form.generation
            self._loop.on_generation(change)
        return change

    def _form_unless_over(self, form: GenerationView) -> AbortableTransport:
        """Return the transport of a generation, aborted if the generation ended while its members connected."""
        if self._coordinator.aborted >= form.generation:
            raise BrokenTransportError("the generation has already ended")
        inner = self._rendezvous.form(form, self.worker)
        if self._coordinator.aborted >= form.generation:
            inner.abort()
        return inner

    def _change(self, before: GenerationView, form: GenerationView) -> Change:
        old = set(before.numbers)
        came = tuple(member.worker for member in form.members if not member.report.has_history)
        gone = tuple(sorted(old - set(form.numbers) | (old & set(came))))
        with_state = [member.report for member in form.members if member.report.has_history]
        global_step = max((one.global_step for one in with_state), default=0)
        each = zip(form.members, form.ranks(), strict=True)
        rounds = max((ranks.rounds for member, ranks in each if member.report.has_history), default=0)
        behind = self._is_committed
        incarnations = tuple(
            member.incarnation for number in gone for member in before.members if member.worker == number
        )
        return Change(
            form.generation,
            self.members,
            gone,
            came,
            global_step,
            rounds,
            form.save,
            incarnations,
            behind,
            self.share_limits,
        )

    def _let_go(self) -> None:
        if self._inner is not None:
            self._inner.abort()
            self._ended = self._traffic_of_generations()
            self._inner.close()
        self._inner = None

    # --- workers one attempt apart ------------------------------------------------------------------------

    def _catch_up(self, form: GenerationView) -> None:
        """Broadcast the results of attempts that some members have not committed."""
        self._open = Attempt(self._commits + 1)
        known = [(rank, member.report.commits) for rank, member in enumerate(form.members) if member.report.has_history]
        most = max((commits for _, commits in known), default=0)
        least = min((commits for _, commits in known), default=0)
        if not self._generation:
            self._commits, self._open = most, Attempt(most + 1)
            self._agreements = _agreements(form)
        if least == most:
            return
        root = next(rank for rank, commits in known if commits == most)
        reply = self._transport().broadcast_bytes(lambda: pack(self._since(least)), root)
        if self._generation and self._commits < most:
            found = [one for one in unpack(reply) if one.number > self._commits]
            if [one.number for one in found] != list(range(self._commits + 1, most + 1)):
                raise MemberOutError("the results that this worker lacks are no longer available")
            self._given = deque(found)

    def _since(self, commits: int) -> list[Attempt]:
        kept = [one for one in self._kept if one.number > commits]
        return kept if all(one.intact for one in kept) else []

    def _repeated(self, ask: CollectiveOp) -> Handle:
        """Return another worker's result of this operation, and log it, since a third worker may still need it."""
        place = self._open.ask()
        answer = self._given[0].answers[place]
        answer = answer.to(ask.tensor.device) if isinstance(ask, AllReduceMean) else answer
        self._open.note(place, answer)
        return _KnownHandle(answer)

    def _single(self, act: Callable[[], Any]) -> Any:
        """Run an attempt of one operation on bytes."""
        answer = self._given[0].answers[0] if self._given else act()
        self._open = Attempt(self._commits + 1, [answer], [None])
        return answer

    def _commit(self, alone: bool) -> None:
        """Commit the attempt, and keep its results for members that have not received them."""
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


def _agreements(form: GenerationView) -> int:
    """Return the largest number of attempts that a rank has committed together with the others."""
    return max((ranks.agreements for ranks in form.ranks()), default=0)


def _has_history(form: GenerationView) -> bool:
    """Return True if a member has taken part in an earlier generation."""
    return any(member.report.has_history for member in form.members)
