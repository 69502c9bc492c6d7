"""The wire of a worker that is alone: nobody to wait for, nothing to send."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, answer
from stretto.transport.interface import Message, Traffic, made


@dataclass(slots=True)
class DoneHandle:
    """An ask that is answered when it is made."""

    ask: CollectiveOp

    def wait(self) -> Answer:
        """The answer."""
        return self.ask.tensor if isinstance(self.ask, AllReduceMean) else answer([self.ask])


class SingleWorkerTransport:
    """One worker, no other. Means are what was given; no byte leaves."""

    worker = 0
    workers = 1

    def submit(self, op: CollectiveOp) -> DoneHandle:
        """Answer at once."""
        return DoneHandle(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The one message."""
        return [made(message)]

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The message."""
        return made(message)

    def traffic(self) -> Traffic:
        """Nothing."""
        return Traffic(0, 0, counted=True)

    def close(self) -> None:
        """Nothing to let go of."""
