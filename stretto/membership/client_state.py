"""State machine of a worker's membership: its knowledge and its messages. No socket, clock or thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.membership.coordinator import rested
from stretto.membership.messages import (
    AbortGeneration,
    Broken,
    Continue,
    Evicted,
    GenerationView,
    PauseRequest,
    ReadyReport,
    Registered,
    Said,
    Shutdown,
    Told,
)

ALONE = 0.7
"""Share of the failure timeout for which a worker that is alone continues without a message of the coordinator."""


class MembershipClientState:
    """A worker's knowledge of its membership, and the messages that follow from it.

    `news` is called for each abort of the current generation, and for eviction and shutdown.
    """

    def __init__(self, worker: int, life: int, news: Callable[[int, str], None]) -> None:
        self._me = worker, life
        self._news = news
        self.settings: dict[str, Any] | None = None
        self.generation = 0
        """Last generation that this worker was in."""
        self.aborted = 0
        """Last generation that is known to have ended."""
        self.held = False
        """True if the worker has to pause at its next rest."""
        self.is_alone = False
        """True if no other worker is in its generation."""
        self.out: str | None = None
        self.stopped: Shutdown | None = None
        self.answer: GenerationView | Continue | None = None
        """The reply to a paused worker."""
        self._standing: ReadyReport | None = None
        self._rested = -1
        """Global step at which this generation began or last rested."""

    def stand(self, here: ReadyReport) -> None:
        """Pause the worker until there is an `answer`."""
        sign = 1 if here.generation > 0 else -1
        here = msgspec.structs.replace(here, generation=sign * self.generation, at_rest=here.at_rest and sign > 0)
        self.answer, self._standing = None, here
        if here.at_rest and self.aborted >= self.generation:
            self._standing = msgspec.structs.replace(here, at_rest=False)
        elif here.at_rest and here.hand <= self._rested:
            self._reply(Continue(self.generation, self._rested + 1))

    def says(self) -> list[Said]:
        """Return the messages to send now, and again until there is a reply."""
        if self._standing is None:
            return []
        is_broken = self.generation > self.aborted and not self._standing.at_rest
        return [*([Broken(self.generation, "it paused")] if is_broken else []), self._standing]

    def told(self, told: Told) -> bool:
        """Process a message of the coordinator; return True if a message has to be sent immediately."""
        match told:
            case Registered():
                self.settings = told.settings
            case AbortGeneration():
                return self._abort(told.generation, told.why)
            case PauseRequest():
                news = told.generation == self.generation > self.aborted and not self.held
                self.held = self.held or news
                return news
            case Continue():
                here = self._standing
                if here is not None and here.at_rest and here.generation == told.generation and here.hand < told.hand:
                    self._reply(told)
            case GenerationView():
                return self._form(told)
            case Evicted():
                self.out = self.out or told.why
                self._news(self.generation, told.why)
            case Shutdown():
                self.stopped = self.stopped or told
                self._news(self.generation, told.why)
        return False

    def _abort(self, generation: int, why: str) -> bool:
        if generation < max(self.generation, self.aborted):
            return False
        is_first, here = generation > self.aborted, self._standing
        self.aborted, self.held = generation, False
        if here is not None and here.at_rest:
            self._standing = msgspec.structs.replace(here, at_rest=False)
        self._news(generation, why)
        return is_first and here is not None

    def _form(self, form: GenerationView) -> bool:
        here = self._standing
        if here is None:
            return False
        mine = next((one for one in form.members if (one.worker, one.life) == self._me), None)
        if mine is None:  # though an earlier life of this worker may be in it
            others = [one for one in form.members if one.worker != self._me[0]]
            self._reply(msgspec.structs.replace(form, members=others))
        elif form.generation == self.generation:
            if here.at_rest and mine.here == here:
                self._enter(form)
        elif form.generation > self.generation:
            if form.generation > self.aborted:
                self._enter(form)
                return False
            self.generation = form.generation  # over before it began
            sign = 1 if here.generation > 0 else -1
            self._standing = msgspec.structs.replace(here, generation=sign * form.generation, at_rest=False)
            return True
        return False

    def _enter(self, form: GenerationView) -> None:
        self.generation, self.held, self._rested = form.generation, False, rested(form)
        self.is_alone = len(form.members) == 1
        self._reply(form)

    def _reply(self, answer: GenerationView | Continue) -> None:
        self.answer, self._standing = answer, None


class CoordinatorConnection(ABC):
    """A worker's connection to the coordinator, over any transport."""

    def __init__(self, attendance: MembershipClientState) -> None:
        self.attendance = attendance

    @property
    def held(self) -> bool:
        """True if all workers are asked to pause at their next rest."""
        return self.attendance.held

    @property
    def aborted(self) -> int:
        """Last generation that is known to have ended; a generation may end before its rendezvous completes."""
        return self.attendance.aborted

    def stand(self, here: ReadyReport) -> GenerationView:
        """Pause until the next generation is formed. A generation without this worker asks it to leave.

        Raises MemberOutError if this incarnation is no member any more, and errors of the connection.
        """
        answer = self._stand(msgspec.structs.replace(here, at_rest=False))
        assert isinstance(answer, GenerationView)
        return answer

    def at_rest(self, here: ReadyReport) -> GenerationView | Continue:
        """Pause between two global steps, because `held`; others may be further. Raises as `stand` does."""
        return self._stand(msgspec.structs.replace(here, at_rest=True))

    @abstractmethod
    def _stand(self, here: ReadyReport) -> GenerationView | Continue:
        """Report that the worker is paused, and wait for the reply."""
