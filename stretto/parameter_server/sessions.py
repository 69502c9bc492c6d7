"""Sessions: requests and replies that survive a broken connection. The client's side and the service's side.

A client numbers its requests from 1 and keeps those without a reply, and messages without a reply until the reply to a
later request has come. Over a new connection it sends them again, in order. A service processes each number once: it
stores its replies until the client has them, and sends the stored reply if a request comes again.

    client                                 service
      | -- 7: Lease ------------------------> |
      | <- 7: Leased -------- (lost) -------- |
      | -- 8: Settle -------- (lost) -------> |
      |   the connection breaks               |
      | -- 7: Lease ------------------------> |   the stored reply
      | -- 8: Settle -----------------------> |   processed
      | <- 7: Leased ------------------------ |
      | -- 9: Lease, all below 8 are answered |   the reply to 7 is forgotten
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from stretto.parameter_server.handler import OutgoingMessage

RequestT = TypeVar("RequestT")


class ClientSession(Generic[RequestT]):
    """The client's side: its requests without a reply. `last` is the number of the last request before."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self._requests: dict[int, RequestT] = {}
        """Requests without a reply, and messages that no later reply has confirmed, in order."""
        self._oneway: set[int] = set()
        """Numbers of messages without a reply."""

    def number(self, request: RequestT, has_reply: bool = True) -> int:
        """Number a request."""
        self.last += 1
        self._requests[self.last] = request
        if not has_reply:
            self._oneway.add(self.last)
        return self.last

    @property
    def answered_below(self) -> int:
        """Number below which nothing has to be sent again."""
        return next(iter(self._requests), self.last + 1)

    def is_pending(self, number: int) -> bool:
        """Return True if this request has no reply yet."""
        return number in self._requests

    def answer(self, number: int) -> bool:
        """Note the reply to a request; return False if it is not waited for. Earlier messages have arrived, too."""
        if number not in self._requests:
            return False
        del self._requests[number]
        for oneway in [oneway for oneway in self._oneway if oneway < number]:
            del self._requests[oneway]
            self._oneway.remove(oneway)
        return True

    def discard(self, number: int) -> None:
        """Stop waiting for the reply to a request."""
        self._requests.pop(number, None)

    def reset(self) -> None:
        """Stop waiting for all replies."""
        self._requests.clear()
        self._oneway.clear()

    def unanswered(self) -> Iterator[tuple[int, RequestT]]:
        """Yield the requests to send again, with their numbers, in order."""
        yield from list(self._requests.items())


class WorkerSession:
    """The service's side of one client: the last request processed, and the replies that may have to be sent again."""

    def __init__(self, last: int = 0, replies: dict[int, OutgoingMessage] | None = None) -> None:
        self.last = last
        self.replies = replies or {}

    def is_repeated(self, number: int, answered_below: int) -> bool:
        """Note a request; return True if it was processed before. Number 0 is outside of the session."""
        for old in [old for old in self.replies if old < answered_below]:
            del self.replies[old]
        if not number:
            return False
        is_repeated = number <= self.last
        self.last = max(number, self.last)
        return is_repeated

    def store(self, reply: OutgoingMessage) -> None:
        """Store a reply until the client has it, without its tensors if it can be made again."""
        worker, request_id, body, again = reply.worker, reply.request_id, reply.body, reply.again
        if request_id:
            tensors = () if again is not None else reply.tensors
            self.replies[request_id] = OutgoingMessage(worker, request_id, body, tensors, None, again)

    def repeat(self, number: int) -> list[OutgoingMessage]:
        """Return the stored reply to a request; nothing if there is none yet."""
        stored = self.replies.get(number)
        if stored is None:
            return []
        return [stored if stored.again is None else stored.again()]
