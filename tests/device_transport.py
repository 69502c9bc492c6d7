"""Transport of tests that takes tensors of the second device alone, and bytes alone for bytes, as NCCL and gloo do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from second_device import CPU_KIND, as_device
from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp
from stretto.errors import TransportError
from stretto.transport.interface import Handle, Message, Traffic, Transport, made


class DeviceTransport(Transport):
    """One worker's end. The numbers travel through a transport of CPU tensors, so that sums have the same bits."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.worker, inner.workers)
        self._inner = inner

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. Raise TransportError for a tensor of another device."""
        if op.tensor.device.type != "far":
            shape = tuple(op.tensor.shape)
            raise TransportError(f"{type(op).__name__} of a tensor {shape} of {op.tensor.device}; expected far:0")
        near = as_device(op.tensor.detach(), CPU_KIND).clone()  # not counted as a read of the host
        return _Handle(op, self._inner.submit(replace(op, tensor=near)))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        return self._inner.all_gather_bytes(_bytes(message))

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message."""
        return self._inner.broadcast_bytes(_bytes(message) if self.worker == root else b"", root)

    def traffic(self) -> Traffic:
        """Return the bytes so far."""
        return self._inner.traffic()

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


@dataclass(slots=True)
class _Handle:
    op: CollectiveOp
    inner: Handle

    def wait(self) -> Answer:
        answer: Any = self.inner.wait()
        if isinstance(self.op, AllReduceMean):
            return self.op.tensor.copy_(answer)
        return answer.to("far") if isinstance(answer, Tensor) else [one.to("far") for one in answer]


def _bytes(message: Message) -> bytes:
    found: Any = made(message)
    if not isinstance(found, bytes):
        raise TransportError(f"a message of {type(found).__name__}; expected bytes")
    return found
