"""State machine of a worker's membership: its knowledge and its messages. No socket, clock or thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from stretto.membership.loop_positions import Waits
from stretto.membership.messages import (
    AbortGeneration,
    Broken,
    Continue,
    CoordinatorMessage,
    Evicted,
    GenerationView,
    Heartbeat,
    Leave,
    PauseRequest,
    Quit,
    ReadyReport,
    Registered,
    Shutdown,
    WorkerMessage,
)

ALONE = 0.7
"""Share of the failure timeout for which a worker that is alone continues without a message of the coordinator."""


class MembershipClientState:
    """A worker's knowledge of its membership, and the messages that follow from it.

    `on_abort` is called for each abort of the current generation, and for eviction and shutdown.
    """

    def __init__(self, worker: int, incarnation: int, on_abort: Callable[[int, str], None]) -> None:
        self._me = worker, incarnation
        self._on_abort = on_abort
        self.asynchronous: bool | None = None
        """True if no worker waits for another; None before the coordinator has registered this worker."""
        self.generation = 0
        """Last generation that this worker was in."""
        self.aborted = 0
        """Last generation that is known to have ended."""
        self.pause_requested = False
        """True if the worker has to pause before its next step."""
        self.is_alone = False
        """True if no other worker is in its generation."""
        self.evicted: Evicted | None = None
        self.stopped: Shutdown | None = None
        self.reply: GenerationView | Continue | None = None
        """The reply to a paused worker."""
        self._report: ReadyReport | None = None
        self._boundary_step = -1
        """Global step at which this generation began or last paused."""

    def pause(self, report: ReadyReport) -> None:
        """Pause the worker until there is a `reply`."""
        sign = 1 if report.generation > 0 else -1
        report = msgspec.structs.replace(
            report, generation=sign * self.generation, between_steps=report.between_steps and sign > 0
        )
        self.reply, self._report = None, report
        if report.between_steps and self.aborted >= self.generation:
            self._report = msgspec.structs.replace(report, between_steps=False)
        elif report.between_steps and report.global_step <= self._boundary_step:
            self._reply(Continue(self.generation, self._boundary_step + 1))

    def pending_messages(self) -> list[WorkerMessage]:
        """Return the messages to send now, and again until there is a reply."""
        if self._report is None:
            return []
        is_broken = self.generation > self.aborted and not self._report.between_steps
        return [*([Broken(self.generation, "it paused")] if is_broken else []), self._report]

    def receive(self, message: CoordinatorMessage) -> bool:
        """Process a message of the coordinator; return True if a message has to be sent immediately."""
        match message:
            case Registered():
                self.asynchronous = message.asynchronous
            case AbortGeneration():
                return self._abort(message.generation, message.why)
            case PauseRequest():
                is_news = message.generation == self.generation > self.aborted and not self.pause_requested
                self.pause_requested = self.pause_requested or is_news
                return is_news
            case Continue():
                report = self._report
                if (
                    report is not None
                    and report.between_steps
                    and report.generation == message.generation
                    and report.global_step < message.global_step
                ):
                    self._reply(message)
            case GenerationView():
                return self._form(message)
            case Evicted():
                self.evicted = self.evicted or message
                self.aborted = max(self.aborted, self.generation)  # another rank of this worker may be waited for
                self._on_abort(self.generation, message.why)
            case Shutdown():
                self.stopped = self.stopped or message
                self._on_abort(self.generation, message.why)
        return False

    def _abort(self, generation: int, why: str) -> bool:
        if generation < max(self.generation, self.aborted):
            return False
        is_first, report = generation > self.aborted, self._report
        self.aborted, self.pause_requested = generation, False
        if report is not None and report.between_steps:
            self._report = msgspec.structs.replace(report, between_steps=False)
        self._on_abort(generation, why)
        return is_first and report is not None

    def _form(self, view: GenerationView) -> bool:
        report = self._report
        if report is None:
            return False
        own_member = next((member for member in view.members if (member.worker, member.incarnation) == self._me), None)
        if own_member is None:  # though an earlier incarnation of this worker may be in it
            other_members = [member for member in view.members if member.worker != self._me[0]]
            self._reply(msgspec.structs.replace(view, members=other_members))
        elif view.generation == self.generation:
            if report.between_steps and own_member.report == report:
                self._enter(view)
        elif view.generation > self.generation:
            if view.generation > self.aborted:
                self._enter(view)
                return False
            self.generation = view.generation  # it ended before this worker entered it
            sign = 1 if report.generation > 0 else -1
            self._report = msgspec.structs.replace(report, generation=sign * view.generation, between_steps=False)
            return True
        return False

    def _enter(self, view: GenerationView) -> None:
        self.generation, self.pause_requested, self._boundary_step = view.generation, False, view.boundary_step
        self.is_alone = len(view.members) == 1
        self._reply(view)

    def _reply(self, reply: GenerationView | Continue) -> None:
        self.reply, self._report = reply, None


class GenerationObserver(Protocol):
    """The part of a worker that uses a generation. Its methods may be called from another thread."""

    def generation_aborted(self, generation: int, why: str) -> None:
        """Abort what waits for other workers: this generation has ended."""
        ...

    def operations_begun(self) -> int:
        """Return the number of collective operations that the worker has begun, for its heartbeats."""
        ...


class CoordinatorConnection(ABC):
    """A worker's connection to the coordinator, live or simulated: what it sends, and when.

    A subclass carries the messages, and calls `due_messages` at intervals and after each change.
    """

    def __init__(self, worker: int, incarnation: int) -> None:
        self.state = MembershipClientState(worker, incarnation, self.abort)
        self._observer: GenerationObserver | None = None
        self._doing = ("starting", 0, self.now())
        self._waits: Waits | None = None
        self._checkpoint_s = 0.0
        self._broken: Broken | None = None
        self._is_leaving = self._has_finished = False

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds."""

    @abstractmethod
    def wake(self, with_heartbeat: bool = False) -> None:
        """Send the messages that are due, soon; with a heartbeat if it tells something new."""

    def attach(self, observer: GenerationObserver) -> None:
        """Notify an observer of generations that end, and of an eviction."""
        self._observer = observer

    def abort(self, generation: int, why: str) -> None:
        """Notify the observer that a generation has ended."""
        if self._observer is not None:
            self._observer.generation_aborted(generation, why)

    def broken(self, generation: int, why: str, forming: bool = False, unreached: Sequence[int] = ()) -> None:
        """Report that a collective operation of this generation failed, or its rendezvous (`forming`)."""
        self._broken = Broken(generation, why, forming, tuple(unreached))
        self.wake()

    def doing(self, text: str, global_step: int, waits: Waits | None = None) -> None:
        """Note this worker's next activity and its global step, for which others wait if necessary."""
        is_further = global_step != self._doing[1]
        self._doing, self._waits = (text, global_step, self.now()), waits
        if is_further and self.state.pause_requested:
            self.wake(with_heartbeat=True)

    def checkpoint_took(self, seconds: float) -> None:
        """Note the cost of the last checkpoint, by which the coordinator asks for the next one."""
        self._checkpoint_s = seconds

    def quit(self) -> None:
        """Ask to leave gracefully at the next pause. May be called by a signal handler."""
        self._is_leaving = True
        self.wake()

    def leave(self) -> None:
        """Report that this worker has finished."""
        self._has_finished = True
        self.wake()

    def due_messages(self, with_heartbeat: bool, now: float) -> list[WorkerMessage]:
        """Return the messages to send at this time, and again until there is a reply."""
        messages: list[WorkerMessage] = []
        if with_heartbeat:
            doing, global_step, since_s = self._doing
            place = self._observer.operations_begun() if self._observer is not None else -1
            for_s, cost_s = now - since_s, self._checkpoint_s
            messages.append(Heartbeat(self.state.generation, doing, for_s, global_step, place, self._waits, cost_s))
        if self._broken is not None and self._broken.generation > self.state.aborted:
            messages.append(self._broken)
        if self._is_leaving:
            messages.append(Quit())
        messages += self.state.pending_messages()
        return [*messages, Leave()] if self._has_finished else messages

    @property
    def pause_requested(self) -> bool:
        """True if all workers are asked to pause before their next step."""
        return self.state.pause_requested

    @property
    def aborted(self) -> int:
        """Last generation that is known to have ended; a generation may end before its rendezvous completes."""
        return self.state.aborted

    def await_generation(self, report: ReadyReport) -> GenerationView:
        """Pause until the next generation is formed. A generation without this worker asks it to leave.

        Raises MemberOutError if this incarnation is no member any more, and errors of the connection.
        """
        reply = self._pause(msgspec.structs.replace(report, between_steps=False))
        assert isinstance(reply, GenerationView)
        return reply

    def pause_between_steps(self, report: ReadyReport) -> GenerationView | Continue:
        """Pause between two global steps, because of `pause_requested`; others may be further.

        Raises as `await_generation` does.
        """
        return self._pause(msgspec.structs.replace(report, between_steps=True))

    @abstractmethod
    def _pause(self, report: ReadyReport) -> GenerationView | Continue:
        """Report that the worker is paused, and wait for the reply."""
