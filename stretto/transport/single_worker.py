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

    def start(self, ask: CollectiveOp) -> DoneHandle:
        """Answer at once."""
        return DoneHandle(ask)

    def gather(self, message: Message) -> list[bytes]:
        """The one message."""
        return [made(message)]

    def tell(self, message: Message, teller: int = 0) -> bytes:
        """The message."""
        return made(message)

    def traffic(self) -> Traffic:
        """Nothing."""
        return Traffic(0, 0, counted=True)

    def close(self) -> None:
        """Nothing to let go of."""
