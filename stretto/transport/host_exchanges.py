"""Exchanges between workers of one host: large tensors go through memory, and messages of a transport say where.

    worker 0                                            worker 1
    writes its tensor to a slot of its memory           writes its tensor to a slot of its memory
    Description(slot 0) ------------ exchange ------------ Description(slot 0)
    copies the tensor from worker 1's memory            copies the tensor from worker 0's memory
    ...
    Description(..., read: slot 0) - exchange ------------ ... (worker 1 may write to that slot again)

A slot holds one tensor at a time. Its worker may exit before the tensor is read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import Exchange
from stretto.errors import BrokenTransportError, TransportError
from stretto.transport.host_memory import ROOM_BYTES, HostMemory
from stretto.transport.interface import Collectives, Handle, as_bytes, check_peer
from stretto.transport.peer_stream import as_tensor, check_dtype, dtype_code

SMALLEST_BYTES = 1 << 16
"""Bytes from which a tensor goes through memory; a smaller one follows its description."""
ALIGNMENT = 64
HEAD_BYTES = 4
"""Bytes of the length of a description."""
_Natural = Annotated[int, msgspec.Meta(ge=0, le=ROOM_BYTES)]


class Description(msgspec.Struct, array_like=True):
    """A tensor: its dtype, and its slot in the memory of its worker; without a slot, its bytes follow."""

    dtype: _Natural
    read: list[_Natural]
    """Slots of the receiver whose tensors the sender has read."""
    slot: _Natural | None = None
    start: _Natural = 0
    numbers: _Natural = 0


_DESCRIPTION = msgspec.msgpack.Decoder(Description)


@dataclass(slots=True)
class _Slot:
    start: int
    nbytes: int
    is_free: bool = False


class HostExchanges:
    """One worker's exchanges: with the workers of its host through their memory, if it has some."""

    def __init__(self, inner: Collectives, memory: HostMemory | None) -> None:
        self._inner, self._memory = inner, memory
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._read = defaultdict[int, list[int]](list)
        """By rank: slots whose tensors were read since the last description that was sent to it."""
        self.sent = self.received = 0
        """Bytes of tensors that went through memory."""

    def submit(self, op: Exchange) -> Handle:
        """Start an exchange."""
        check_peer(op, self._inner.worker, self._inner.workers)
        with self._lock:
            if self._memory is None or op.peer not in self._memory.ranks:
                return self._inner.submit(op)
            message = self._message(op, self._memory)
            return _HostExchange(self, op, self._inner.submit(Exchange(op.peer, message, op.channel)))

    def close(self) -> None:
        """Use the memory no more."""
        with self._lock:
            self._memory = None

    def take(self, op: Exchange, message: Tensor) -> Tensor:
        """Return the tensor of another worker, which has sent this message."""
        octets = memoryview(message.numpy().data)
        end = HEAD_BYTES + int.from_bytes(octets[:HEAD_BYTES], "little")
        with self._lock:
            try:
                told = _DESCRIPTION.decode(octets[HEAD_BYTES:end])
                check_dtype(op.tensor.dtype, told.dtype, f"workers {self._inner.worker} and {op.peer}")
                for slot in told.read:
                    self._slots[slot].is_free = True
            except (IndexError, msgspec.MsgspecError) as error:
                raise TransportError(f"worker {op.peer} has sent no description of a tensor: {error}") from error
            if told.slot is None:
                return as_tensor(octets[end:], op.tensor.dtype)
            self._read[op.peer].append(told.slot)
            return self._read_from(op, told)

    def _read_from(self, op: Exchange, told: Description) -> Tensor:
        """Return a tensor that is in the memory of another worker."""
        if self._memory is None:
            raise BrokenTransportError("the transport is closed")
        into = op.into
        if into is None or not into.is_contiguous():
            into = torch.empty(told.numbers, dtype=op.tensor.dtype, device="cpu")
        if into.numel() != told.numbers or not self._memory.read(op.peer, told.start, into):
            raise TransportError(f"worker {op.peer} has no tensor of {told.numbers} numbers at byte {told.start}")
        self.received += into.nbytes
        return into

    def _message(self, op: Exchange, memory: HostMemory) -> Tensor:
        """Return the description of a tensor, and its bytes unless they are in memory now."""
        tensor = op.tensor.detach().reshape(-1).contiguous()
        octets = tensor.view(torch.uint8)
        told = Description(dtype_code(tensor.dtype), self._read.pop(op.peer, []))
        if octets.nbytes >= SMALLEST_BYTES and (number := self._slot_for(octets.nbytes)) is not None:
            slot = self._slots[number]
            if memory.write(slot.start, octets):
                slot.is_free = False
                told.slot, told.start, told.numbers = number, slot.start, tensor.numel()
                self.sent, octets = self.sent + octets.nbytes, octets[:0]
        head = msgspec.msgpack.encode(told)
        return torch.cat([as_bytes(len(head).to_bytes(HEAD_BYTES, "little") + head), octets])

    def _slot_for(self, nbytes: int) -> int | None:
        """Return the number of the smallest free slot that is large enough, or of a new one; None without room."""
        slots = self._slots
        fitting = [number for number, slot in enumerate(slots) if slot.is_free and slot.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda number: slots[number].nbytes)
        if all(slot.is_free for slot in slots):
            slots.clear()
        start = -(-(slots[-1].start + slots[-1].nbytes) // ALIGNMENT) * ALIGNMENT if slots else 0
        if start + nbytes > ROOM_BYTES:
            return None
        slots.append(_Slot(start, nbytes, is_free=True))
        return len(slots) - 1


@dataclass(slots=True)
class _HostExchange:
    exchanges: HostExchanges
    op: Exchange
    inner: Handle
    result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            message = self.inner.wait()
            assert isinstance(message, Tensor)
            self.result = self.exchanges.take(self.op, message)
        return self.result
