"""What each kind of service does with what it is told: the machines behind the sockets, still without a socket.

A desk takes a parcel from a worker and returns the parcels to send. Its clock is given, since replies that the bound
holds back say for how long. What all desks have in common is here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.barrier import KeyedBarrier, Told
from stretto.parameter_server.framing import Chunks

REMEMBERED, SMALL_BYTES = 64, 1 << 16
"""So many answers are remembered, if they are no larger, where nobody says which ones it has."""
NEWS = -1
"""Stands for an exchange's number where a worker waits for news of its update."""


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A parcel to send: to which worker, in reply to which of its parcels. `sent` is called when it has been read."""

    worker: int
    number: int
    body: m.Body
    tensors: Sequence[Tensor] = ()
    sent: Callable[[], None] | None = None


class RequestHandler(Protocol):
    """Takes what a worker says; returns what is to be sent."""

    def expects(self, worker: int, head: m.Header) -> None:
        """Look at a head before its tensors are taken in. Raises ParcelError when they would not fit."""
        ...

    def streams(self, worker: int, head: m.Header) -> bool:
        """Whether a parcel that is still coming is to be given to `write` piece by piece."""
        ...

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of tensor `index` has come, which begins there."""
        ...

    def take(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """A whole parcel, less what was written before. Raises ParcelError when it makes no sense."""
        ...

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """A worker has left on purpose: those who wait for it are told that it won't come."""
        ...

    def gone(
        self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False
    ) -> list[OutgoingMessage]:
        """A worker is gone: the others go on without it. `batches` of pass `number` are its work that counts.

        Its last update is `torn` if only some shards have it.
        """
        ...

    def work_of(self, worker: int) -> m.Left:
        """What this desk has of a worker's work."""
        ...


class Asked:
    """Which parcels are waiting for an answer, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, worker: int, op: int, number: int) -> None:
        self._waiting[worker, op] = number, self._clock()

    def waits(self, worker: int, op: int) -> bool:
        return (worker, op) in self._waiting

    def answer(self, worker: int, op: int) -> tuple[int, float]:
        """The parcel's number, and how many seconds it has waited."""
        number, since = self._waiting.pop((worker, op))
        return number, self._clock() - since

    def forget(self, worker: int) -> None:
        """Nobody is there to be answered."""
        self._waiting = {asked: since for asked, since in self._waiting.items() if asked[0] != worker}


class CollectiveHandler:
    """Exchanges of all members, of whatever kind."""

    def __init__(
        self,
        workers: int,
        combine: Callable[[Mapping[int, Any]], Any],
        asked: Asked,
    ) -> None:
        self._meeting: KeyedBarrier[Any, Any] = KeyedBarrier(range(workers), combine)
        self._asked = asked
        self._says_who = False
        """Whether answers say who gave: once members have changed all do, for nobody may have heard the last."""
        self._heard: dict[int, int] = {}
        """Up to which exchange each member has its answers, where members say so."""
        self._answers: dict[int, tuple[m.Body, list[Tensor]]] = {}
        """Answers that may be asked for again, because they were lost: those that somebody may lack.

        Where nobody says what it has they are the last ones, if they are small.
        """
        self._refused: dict[tuple[int, int], m.Refused] = {}
        """The last refusals: to whom, and in which exchange."""
        self.last: tuple[int, m.Body, list[Tensor]] = 0, m.Result(), []
        """The very last, however large, and the number of its exchange.

        Where exchanges are asked one at a time it is the only one that anybody can lack.
        """

    @property
    def members(self) -> set[int]:
        return self._meeting.members

    @property
    def left(self) -> set[int]:
        return self._meeting.left

    def lay(self, worker: int, op: int, number: int, thing: object, heard: int | None = None) -> list[OutgoingMessage]:
        if heard is not None:
            self._heard[worker] = max(self._heard.get(worker, 0), heard)
        kept = self._answers.get(op) or (self.last[1:] if op == self.last[0] else None)
        if kept is not None:
            return [OutgoingMessage(worker, number, *kept)] if worker in self._meeting.members else []
        if (worker, op) in self._refused:
            return [OutgoingMessage(worker, number, self._refused[worker, op])]
        self._asked.note(worker, op, number)
        return self._posts(self._meeting.lay(worker, op, thing))

    def know(self, worker: int, op: int, gave: Sequence[int], found: list[Tensor]) -> list[OutgoingMessage]:
        """A worker has heard from another process what an exchange came to: whoever asks is told the same."""
        if worker not in self.members or (waiting := self._meeting.know(op)) is None:
            return []
        self._says_who, body = True, m.Among(list(gave))
        self._remember(op, body, found)
        return [OutgoingMessage(one, self._asked.answer(one, op)[0], body, found) for one in waiting]

    def leave(self, worker: int) -> list[OutgoingMessage]:
        return self._posts(self._meeting.leave(worker))

    def gone(self, worker: int) -> list[OutgoingMessage]:
        self._asked.forget(worker)
        self._heard.pop(worker, None)
        self._says_who = True
        return self._posts(self._meeting.drop(worker))

    def join(self, worker: int) -> None:
        self._meeting.join(worker)

    def tell_anew(self) -> None:
        """Answers say who gave from now on."""
        self._says_who = True

    def take_up(self, op: int, body: m.Body, found: list[Tensor]) -> None:
        """This was the last answer of another process."""
        self._remember(op, body, found)

    def group(self, generation: int, members: Sequence[int]) -> None:
        if self._meeting.group(generation, members):
            self._says_who = False
            self._heard.clear()
            self._answers.clear()
            self._refused.clear()
            self.last = 0, m.Result(), []

    def _posts(self, told: Sequence[Told[Any]]) -> list[OutgoingMessage]:
        """The answers of one exchange or several; all of one exchange come together."""
        if not told:
            return []
        posts, heard = [], self._heard_by_all()
        for _, answers in itertools.groupby(told, key=lambda one: one.op):
            together = list(answers)
            gave = sorted(one.worker for one in together)
            found = together[0].found
            body: m.Body = m.Result(heard)
            if found is not None and self._says_who:
                body = m.Among(gave, heard)
            if found is not None:
                self._remember(together[0].op, body, found)
            posts += [self._post(one, body) for one in together]
        self._forget_old(heard)
        return posts

    def _remember(self, op: int, body: m.Body, found: list[Tensor]) -> None:
        if self._heard or _is_small(found):
            self._answers[op] = body, found
        if op >= self.last[0]:
            self.last = op, body, found

    def _heard_by_all(self) -> int:
        there = self.members - self.left
        return min((self._heard.get(one, 0) for one in there), default=0) if self._heard else 0

    def _forget_old(self, heard: int) -> None:
        for op in [op for op in self._answers if op <= heard] if self._heard else sorted(self._answers)[:-REMEMBERED]:
            del self._answers[op]
        for told in list(self._refused)[:-REMEMBERED]:
            del self._refused[told]

    def _post(self, told: Told[Any], body: m.Body) -> OutgoingMessage:
        number, _ = self._asked.answer(told.worker, told.op)
        if told.found is None:
            refused = self._refused[told.worker, told.op] = m.Refused(told.problem, told.uneven)
            return OutgoingMessage(told.worker, number, refused)
        return OutgoingMessage(told.worker, number, body, told.found)


def _is_small(found: Sequence[Tensor]) -> bool:
    return sum(one.nbytes for one in found) <= SMALL_BYTES


def shown(tensors: Sequence[tuple[str, int]]) -> str:
    """What tensors are, in words."""
    return ", ".join(f"{length} {dtype}" for dtype, length in tensors) or "nothing"
