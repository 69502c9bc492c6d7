"""The one seam to other workers: what a wire does, whoever stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stretto.errors import WireError
from stretto.words import Answer, Ask, Mean


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that left and reached this worker. `counted` where they leave, or only worked out from the sizes."""

    bytes_sent: int
    bytes_received: int
    counted: bool


class Ticket(Protocol):
    """An ask that is under way."""

    def wait(self) -> Answer:
        """Wait for the answer. Raises WireError when a worker went away or did not come in time."""
        ...


class Wire(Protocol):
    """Carries asks and their answers. All workers make the same calls in the same order.

    Every wait has the limit that the wire was made with; what goes wrong is a WireError.
    """

    worker: int
    workers: int

    def start(self, ask: Ask) -> Ticket:
        """Begin an ask without waiting for it; its tensor may not be touched until the answer is there."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """The message of every worker, in their order."""
        ...

    def tell(self, message: bytes, teller: int = 0) -> bytes:
        """The message of the teller, at every worker; what the others pass is not looked at."""
        ...

    def traffic(self) -> Traffic:
        """The bytes so far."""
        ...

    def close(self) -> None:
        """Let go of the other workers. Idempotent."""
        ...


def answer(asks: Sequence[Ask]) -> Answer:
    """What the asks of all workers, in their order, are answered: the reference for every wire.

    Raises WireError when they do not ask the same thing.
    """
    tensors = [ask.tensor for ask in asks]
    if len({type(ask) for ask in asks}) > 1 or len({one.dtype for one in tensors}) > 1:
        raise WireError(f"the workers ask different things: {', '.join(_shown(ask) for ask in asks)}")
    if not isinstance(asks[0], Mean):
        return [one.clone() for one in tensors]
    if len({one.shape for one in tensors}) > 1:
        raise WireError(f"the workers' tensors differ in shape: {', '.join(_shown(ask) for ask in asks)}")
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total


def _shown(ask: Ask) -> str:
    return f"{type(ask).__name__} of {tuple(ask.tensor.shape)} {str(ask.tensor.dtype).removeprefix('torch.')}"


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def as_bytes(message: bytes) -> Tensor:
    """A flat tensor over a copy of the bytes."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
