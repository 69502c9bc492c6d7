"""Connection between the ranks of a replica: tensors for one of them, over any transport that has exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, Exchange
from stretto.parallel.mapped_tables import moved_to_file
from stretto.transport.device_memory import device_copy, host_copy
from stretto.transport.interface import Collectives, Handle, Message, as_bytes
from stretto.transport.tensor_bytes import dtype_name, dtype_of

FORWARD, BACKWARD, OUTPUT = range(3)
"""Channels of activations, of their gradients, and of what the model returns."""
CPU = torch.device("cpu")
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

Waiting = Callable[..., AbstractContextManager[object]]
"""Context of a wait for another rank; its argument is the phase of this rank's time, `waiting` without one."""


@dataclass(slots=True)
class Incoming:
    """Tensor that another rank sends."""

    link: Link
    handle: Handle

    def wait(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor, which has this shape and dtype."""
        with self.link.waiting():
            received: Any = self.handle.wait()
        tensor: Tensor = received
        return device_copy(tensor.view(dtype).view(shape), self.link.device)


class Link:
    """One rank's end. `waiting` is entered around each wait for another rank.

    A tensor travels as bytes, so that its receiver need not know its dtype when it begins to wait for it. Tensors of a
    `device` travel through the memory of the hosts.
    """

    def __init__(self, siblings: Collectives, waiting: Waiting = nullcontext, device: torch.device = CPU) -> None:
        self._siblings, self.waiting, self.device = siblings, waiting, device
        self.rank, self.ranks = siblings.worker, siblings.workers
        self._sends: list[Handle] = []

    def send(self, tensor: Tensor, rank: int, channel: int) -> None:
        """Send a tensor, which must not change before `flush`."""
        self._sends.append(self.exchange(tensor, rank, channel).handle)

    def receive(self, rank: int, channel: int) -> Incoming:
        """Begin to receive the next tensor of a rank."""
        return self.exchange(_NOTHING, rank, channel)

    def exchange(self, tensor: Tensor, rank: int, channel: int, into: Tensor | None = None) -> Incoming:
        """Begin to send a tensor to a rank, and to receive one from it, if possible `into` memory of its size.

        Neither may change before the end of both.
        """
        octets = _octets(host_copy(tensor).contiguous())
        room = _octets(into) if into is not None and into.is_contiguous() and into.device == CPU else None
        return Incoming(self, self._siblings.submit(Exchange(rank, octets, channel, room)))

    def flush(self) -> None:
        """Wait until all tensors are sent."""
        sends, self._sends = self._sends, []
        with self.waiting():
            for handle in sends:
                handle.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks."""
        with self.waiting():
            found: Any = self._siblings.submit(AllReduceMean(tensor)).wait()
        total: Tensor = found
        return total

    def broadcast(self, message: Message, root: int = 0) -> bytes:
        """Return the message of one rank at all ranks."""
        with self.waiting():
            return self._siblings.broadcast_bytes(message, root)

    def gather(self, message: Message) -> list[bytes]:
        """Return the messages of all ranks."""
        with self.waiting():
            return self._siblings.all_gather_bytes(message)

    def collect(self, message: bytes, tensors: Sequence[Tensor]) -> list[tuple[bytes, list[Tensor]]]:
        """Return, at rank 0, the messages and tensors of the other ranks, in their order. Large tensors are in files.

        Tensors travel one after another, so that no rank has the memory of all of them.
        """
        if self.rank:
            kinds = [(dtype_name(one), list(one.shape)) for one in tensors]
            head = msgspec.msgpack.encode((message, kinds))
            for tensor in (as_bytes(head), *tensors):
                self.send(tensor, 0, OUTPUT)
                self.flush()
            return []
        return [self._collected(rank) for rank in range(1, self.ranks)]

    def _collected(self, rank: int) -> tuple[bytes, list[Tensor]]:
        with self.waiting():
            head: Any = self.receive(rank, OUTPUT).handle.wait()
        message, kinds = msgspec.msgpack.decode(head.numpy().data, type=tuple[bytes, list[tuple[str, list[int]]]])
        found = []
        for name, shape in kinds:
            with self.waiting():
                received: Any = self.receive(rank, OUTPUT).handle.wait()
            found.append(moved_to_file(received.view(dtype_of(name)).view(shape)))
        return message, found


def _octets(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
