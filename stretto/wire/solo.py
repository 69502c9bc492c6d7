"""The wire of a worker that is alone: nobody to wait for, nothing to send."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.wire.seam import Traffic
from stretto.words import Answer, Ask, Mean, answer


@dataclass(slots=True)
class _Answered:
    ask: Ask

    def wait(self) -> Answer:
        return self.ask.tensor if isinstance(self.ask, Mean) else answer([self.ask])


class SoloWire:
    """One worker, no other. Means are what was given; no byte leaves."""

    worker = 0
    workers = 1

    def start(self, ask: Ask) -> _Answered:
        """Answer at once."""
        return _Answered(ask)

    def gather(self, message: bytes) -> list[bytes]:
        """The one message."""
        return [message]

    def tell(self, message: bytes, teller: int = 0) -> bytes:
        """The message."""
        return message

    def traffic(self) -> Traffic:
        """Nothing."""
        return Traffic(0, 0, counted=True)

    def close(self) -> None:
        """Nothing to let go of."""
