"""Transport interface: collective operations on tensors, and on bytes, among the present workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from stretto.collective_ops import Answer, CollectiveOp
from stretto.membership.loop_positions import LoopPosition

Message: TypeAlias = bytes | Callable[[], bytes]
"""Bytes, or a function that returns them; of a broadcast it is called at the root only."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that this worker has sent and received: `counted` on its sockets, or else computed from the sizes."""

    bytes_sent: int
    bytes_received: int
    counted: bool


class Handle(Protocol):
    """Collective operation in progress."""

    def wait(self) -> Answer:
        """Wait for the result. Raise TransportError if a worker failed or did not contribute in time."""
        ...


class Transport(Protocol):
    """Collective operations among workers, which all make the same calls in the same order.

    Every wait has the time limit that the transport was created with; a failure raises TransportError.
    """

    @property
    def worker(self) -> int:
        """Rank of this worker among the present workers."""
        ...

    @property
    def workers(self) -> int:
        """Number of present workers."""
        ...

    def submit(self, op: CollectiveOp) -> Handle:
        """Start a collective operation. Its tensor must not be used until the handle's `wait` has returned."""
        ...

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers, in the order of ranks. A repeated operation calls a function again."""
        ...

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the message of the root at every worker; the messages of other workers are ignored.

        If workers may fail and the root has failed, another worker becomes the root and provides the message.
        """
        ...

    def traffic(self) -> Traffic:
        """Return the bytes so far."""
        ...

    def close(self) -> None:
        """Close the connections to other workers. Idempotent."""
        ...


@runtime_checkable
class KnowsPlace(Protocol):
    """Transport that compares the positions of the workers in their loops."""

    place: Callable[[], LoopPosition]
    """Returns this worker's position; the trainer sets it."""


def made(message: Message) -> bytes:
    """Return the bytes of a message."""
    return message if isinstance(message, bytes) else message()


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def as_bytes(message: bytes) -> Tensor:
    """Return a flat tensor with a copy of the bytes."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
