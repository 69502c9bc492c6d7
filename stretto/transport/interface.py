"""The one seam to other workers: what a wire does, whoever stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from stretto.collective_ops import Answer, CollectiveOp

Message: TypeAlias = bytes | Callable[[], bytes]
"""What a worker says, or what makes it: of a tell it is called at the root alone."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that left and reached this worker. `counted` where they leave, or only worked out from the sizes."""

    bytes_sent: int
    bytes_received: int
    counted: bool


class Handle(Protocol):
    """An ask that is under way."""

    def wait(self) -> Answer:
        """Wait for the answer. Raises TransportError when a worker went away or did not come in time."""
        ...


class Transport(Protocol):
    """Carries asks and their answers. All workers make the same calls in the same order.

    Every wait has the limit that the wire was made with; what goes wrong is a TransportError.
    """

    @property
    def worker(self) -> int:
        """This worker's place among those that are there."""
        ...

    @property
    def workers(self) -> int:
        """How many are there."""
        ...

    def submit(self, op: CollectiveOp) -> Handle:
        """Begin an ask without waiting for it; its tensor may not be touched until the answer is there."""
        ...

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The message of every worker, in their order. Where it is asked for anew it is made anew."""
        ...

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The message of the root, at every worker; what the others pass is not looked at, or made.

        Where workers may die another one becomes the root when the root is gone; then it makes the message.
        """
        ...

    def traffic(self) -> Traffic:
        """The bytes so far."""
        ...

    def close(self) -> None:
        """Let go of the other workers. Idempotent."""
        ...


def made(message: Message) -> bytes:
    """A root's message."""
    return message if isinstance(message, bytes) else message()


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def as_bytes(message: bytes) -> Tensor:
    """A flat tensor over a copy of the bytes."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
