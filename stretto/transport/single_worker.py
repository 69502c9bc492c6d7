"""Transport of a single worker, which sends nothing."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange, answer
from stretto.transport.interface import Message, Traffic, Transport, check_peer, made


@dataclass(slots=True)
class DoneHandle:
    """Completed operation."""

    ask: CollectiveOp

    def wait(self) -> Answer:
        """Return the result."""
        return self.ask.tensor if isinstance(self.ask, AllReduceMean) else answer([self.ask])


class SingleWorkerTransport(Transport):
    """Transport of the only worker: a mean is its own contribution, and no byte is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def submit(self, op: CollectiveOp) -> DoneHandle:
        """Return a completed operation."""
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
        return DoneHandle(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the worker's own message."""
        return [made(message)]

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the message."""
        return made(message)

    def traffic(self) -> Traffic:
        """Return zero bytes."""
        return Traffic(0, 0, counted=True)

    def close(self) -> None:
        """Do nothing: there is no connection."""
