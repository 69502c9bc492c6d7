"""Interface of request handlers, and the collective operations that all handlers share. No sockets, clocks or threads.

A handler takes a worker's message and returns the messages to send. Its clock is an argument, since replies that the
staleness bound delays carry the delay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from stretto.collective_ops import Exchange, swapped
from stretto.errors import TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.barrier import KeyedBarrier, MemberResult
from stretto.parameter_server.framing import Chunks, FramingError
from stretto.transport.interface import CHANNELS

UPDATE_REPLY = -1
"""Stands for an operation's number in requests that wait for the reply to an update."""


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to a worker, in reply to one of its requests. `sent` is called when ZeroMQ has read the tensors.

    `again` returns the reply to the same request if it comes again; by default it is this message.
    """

    worker: int
    request_id: int
    body: m.Body
    tensors: Sequence[Tensor] = ()
    sent: Callable[[], None] | None = None
    again: Callable[[], OutgoingMessage] | None = None


class RequestHandler(Protocol):
    """Processes a worker's messages."""

    def expects(self, worker: int, header: m.Header) -> None:
        """Check a header before its tensors are received. Raises FramingError if they would not fit."""
        ...

    def streams(self, worker: int, header: m.Header) -> bool:
        """Return True if the message is to be passed to `write` chunk by chunk while it arrives."""
        ...

    def write(self, worker: int, index: int, offset: int, chunk: Tensor) -> None:
        """Process a chunk of tensor `index` that begins at element `at`."""
        ...

    def take(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a complete message, without the chunks passed to `write`. Raises FramingError if it is malformed."""
        ...

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """Process the graceful end of a worker: operations that wait for it are refused."""
        ...

    def remove(self, worker: int, ended: m.IncarnationEnded | None = None) -> list[OutgoingMessage]:
        """Remove a worker; the others continue without it. Its incarnation may have `ended` with work that counts."""
        ...

    def work_of(self, worker: int) -> m.CountedWork:
        """Return the batches of the worker's updates at this service."""
        ...


class PendingRequests:
    """Requests that wait for a reply, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, worker: int, op: int, request_id: int) -> None:
        self._waiting[worker, op] = request_id, self._clock()

    def is_pending(self, worker: int, op: int) -> bool:
        return (worker, op) in self._waiting

    def pop(self, worker: int, op: int) -> tuple[int, float]:
        """Remove a request; return its id and the seconds that it has waited."""
        request_id, since_s = self._waiting.pop((worker, op))
        return request_id, self._clock() - since_s

    def forget(self, worker: int) -> None:
        """Drop all requests of a worker."""
        self._waiting = {pending: since_s for pending, since_s in self._waiting.items() if pending[0] != worker}


class CollectiveHandler:
    """Collective operations of all members, of any kind."""

    def __init__(
        self,
        members: Iterable[int],
        combine: Callable[[Mapping[int, Any]], Any],
        pending: PendingRequests,
    ) -> None:
        self._barrier: KeyedBarrier[Any, Any] = KeyedBarrier(members, combine)
        self._pending = pending
        self._names_contributors = False
        """True if results name the contributing members: after a change of members, as the last may be lost."""
        self._received: dict[int, int] = {}
        """By member: the last operation whose results have all arrived, where members report it."""

    @property
    def members(self) -> set[int]:
        return self._barrier.members

    @property
    def left(self) -> set[int]:
        return self._barrier.left

    def contribute(
        self, worker: int, op: int, request_id: int, contribution: object, received_up_to: int | None = None
    ) -> list[OutgoingMessage]:
        if received_up_to is not None:
            self._received[worker] = max(self._received.get(worker, 0), received_up_to)
        if not self._barrier.accepts(worker, op):
            return []
        self._pending.note(worker, op, request_id)
        return self._messages(self._barrier.contribute(worker, op, contribution))

    def leave(self, worker: int) -> list[OutgoingMessage]:
        return self._messages(self._barrier.leave(worker))

    def remove(self, worker: int) -> list[OutgoingMessage]:
        self._pending.forget(worker)
        self._received.pop(worker, None)
        self._names_contributors = True
        return self._messages(self._barrier.remove(worker))

    def join(self, worker: int) -> None:
        self._barrier.join(worker)

    def name_contributors(self) -> None:
        """Name the contributing members in all further results."""
        self._names_contributors = True

    def group(self, generation: int, members: Sequence[int]) -> bool:
        """Begin a generation, and drop the operations of older ones; return False if it is not new."""
        is_new = self._barrier.group(generation, members)
        if is_new:
            self._names_contributors = False
            self._received.clear()
        return is_new

    def state(self) -> Any:
        """Return the state as plain values; None while an operation is in progress."""
        barrier = self._barrier.state()
        return None if barrier is None else (barrier, self._names_contributors, self._received)

    def load_state(self, state: Any) -> None:
        """Load a state."""
        barrier, self._names_contributors, self._received = state
        self._barrier.load_state(barrier)

    def _messages(self, results: Sequence[MemberResult[Any]]) -> list[OutgoingMessage]:
        """Return the replies of one or several operations; the entries of one operation are consecutive."""
        messages = []
        received_up_to = self._received_by_all() if results else 0
        for _, entries in itertools.groupby(results, key=lambda result: result.op):
            same_op = list(entries)
            contributors = sorted(result.worker for result in same_op)
            body: m.Body = m.Result(received_up_to)
            if same_op[0].result is not None and self._names_contributors:
                body = m.MembersResult(contributors, received_up_to)
            messages += [self._message(result, body) for result in same_op]
        return messages

    def _received_by_all(self) -> int:
        remaining = self.members - self.left
        return min((self._received.get(worker, 0) for worker in remaining), default=0) if self._received else 0

    def _message(self, result: MemberResult[Any], body: m.Body) -> OutgoingMessage:
        request_id, _ = self._pending.pop(result.worker, result.op)
        if result.result is None:
            return OutgoingMessage(result.worker, request_id, m.Refused(result.problem, result.uneven))
        return OutgoingMessage(result.worker, request_id, body, result.result)


class ShardCollectives(CollectiveHandler):
    """Collective operations of all members, and exchanges of tensors between two of them.

    Each pair of members is, in each channel, a collective of two.
    """

    def __init__(
        self,
        members: Iterable[int],
        combine: Callable[[Mapping[int, Any]], Any],
        pending: PendingRequests,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(members, combine, pending)
        self._clock = clock
        self._pairs: dict[tuple[int, int, int], CollectiveHandler] = {}
        self._generation = 0

    def exchange(self, worker: int, request_id: int, body: m.ExchangeTensors, tensor: Tensor) -> list[OutgoingMessage]:
        """Store a worker's tensor; return the replies once both are there."""
        if body.peer == worker or body.peer not in self.members or not 0 <= body.channel < CHANNELS:
            raise FramingError(f"an exchange with worker {body.peer} in channel {body.channel}")
        first, second = sorted((worker, body.peer))
        pair = self._pairs.get((first, second, body.channel)) or self._begin(first, second, body.channel)
        op = Exchange(body.peer, tensor, body.channel)
        messages = pair.contribute(worker, body.op, request_id, op, body.received_up_to)
        return [replace(one, tensors=one.tensors[one.worker != first :][:1]) for one in messages]  # a refusal has none

    def leave(self, worker: int) -> list[OutgoingMessage]:
        return [*super().leave(worker), *(one for pair in self._pairs_of(worker) for one in pair.leave(worker))]

    def remove(self, worker: int) -> list[OutgoingMessage]:
        return [*super().remove(worker), *(one for pair in self._pairs_of(worker) for one in pair.remove(worker))]

    def join(self, worker: int) -> None:
        super().join(worker)
        self._pairs = {pair: handler for pair, handler in self._pairs.items() if worker not in pair[:2]}

    def group(self, generation: int, members: Sequence[int]) -> bool:
        is_new = super().group(generation, members)
        if is_new:
            self._generation = generation
            self._pairs.clear()
        return is_new

    def _begin(self, first: int, second: int, channel: int) -> CollectiveHandler:
        pair = CollectiveHandler((first, second), _swap, PendingRequests(self._clock))
        self._pairs[first, second, channel] = pair
        pair.group(self._generation, (first, second))
        for worker in self.left & {first, second}:
            pair.leave(worker)
        return pair

    def _pairs_of(self, worker: int) -> list[CollectiveHandler]:
        return [handler for pair, handler in self._pairs.items() if worker in pair[:2]]


def _swap(ops: Mapping[int, Exchange]) -> list[Tensor]:
    """Return the results of the two members, in the order of their numbers."""
    if len(ops) < 2:
        raise TransportError("the other worker failed")
    return swapped(list(ops.values()))


def listed(tensors: Sequence[tuple[str, int]]) -> str:
    """Return a text that lists tensors."""
    return ", ".join(f"{length} {dtype}" for dtype, length in tensors) or "nothing"
