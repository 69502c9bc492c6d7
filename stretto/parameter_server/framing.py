"""A head and its tensors as messages of frames, and back: large tensors travel in chunks, none is copied to be cut.

Each message carries at most `CHUNK_BYTES` of tensors, so that what was received can be worked on while the rest is
under way. The first message of a parcel begins with the head, the others with an empty frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stretto.errors import TransportError
from stretto.parameter_server.messages import Body, Header

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 20
"""A head names batches: all that a worker has done in a pass, of which there may be a hundred thousand."""
LARGEST_FRAME = CHUNK_BYTES + HEAD_BYTES
DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}

Chunks = list[Tensor]
"""A flat tensor in pieces, in order."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


class FramingError(TransportError):
    """Something came that is no parcel, or not one that fits."""


def kind(tensor: Tensor) -> str:
    """The name of a tensor's dtype, as a head has it."""
    return str(tensor.dtype).removeprefix("torch.")


def encode(number: int, body: Body, tensors: Sequence[Tensor] = ()) -> Iterator[list[Any]]:
    """The messages of a parcel, frame by frame. Tensors are flat, contiguous, on the CPU, and read where they lie."""
    kinds = [(kind(one), one.numel()) for one in tensors]
    message: list[Any] = [_encoder.encode(Header(number, body, kinds))]
    room = CHUNK_BYTES
    for chunk in (chunk for one in tensors for chunk in _chunks(one)):
        if chunk.nbytes > room:
            yield message
            message, room = [b""], CHUNK_BYTES
        message.append(chunk)
        room -= chunk.nbytes
    yield message


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        numbers: Any = tensor.view(torch.uint8).numpy()
        octets = memoryview(numbers)
        yield from (octets[at : at + CHUNK_BYTES] for at in range(0, len(octets), CHUNK_BYTES))


def decode_head(frame: Any) -> Header:
    """The head in a frame. Raises FramingError when it is none, or names a kind of tensor that does not exist."""
    if len(frame) > HEAD_BYTES:
        raise FramingError(f"a head of {len(frame)} bytes")
    try:
        head = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FramingError(f"no head: {error}") from None
    for dtype, length in head.tensors:
        if dtype not in DTYPES or length < 0:
            raise FramingError(f"a tensor of {length} {dtype:.20}")
    return head


class Assembly:
    """Puts one sender's messages together again. Holds no more than what has come."""

    def __init__(self) -> None:
        self._head: Header | None = None
        self._tensors: list[Chunks] = []
        self._missing: list[int] = []
        self._drained: list[int] = []

    @property
    def number(self) -> int:
        """That of the parcel under way; 0 when there is none."""
        return self._head.number if self._head is not None else 0

    @property
    def head(self) -> Header:
        """That of the parcel under way. Raises FramingError when there is none."""
        if self._head is None:
            raise FramingError("a chunk of no parcel")
        return self._head

    def begin(self, frame: Any) -> Header:
        """A parcel begins with this head; one that was not whole is forgotten. Raises FramingError."""
        self.forget()
        self._head = head = decode_head(frame)
        self._tensors = [[] for _ in head.tensors]
        self._missing = [length * DTYPES[dtype].itemsize for dtype, length in head.tensors]
        self._drained = [0] * len(head.tensors)
        return head

    def drain(self) -> Iterator[tuple[int, int, Tensor]]:
        """The pieces that have come since the last time: of which tensor, where they begin. They are not kept."""
        for index, pieces in enumerate(self._tensors):
            for piece in pieces:
                at = self._drained[index]
                self._drained[index] += piece.numel()
                yield index, at, piece
            pieces.clear()

    def forget(self) -> None:
        """Drop the parcel under way, and what has come of it."""
        self._head, self._tensors, self._missing = None, [], []

    def add(self, chunks: Sequence[Any]) -> bool:
        """Take chunks; whether the parcel is whole now. Raises FramingError."""
        for chunk in chunks:
            self._place(chunk)
        return not any(self._missing)

    def take(self) -> tuple[Header, list[Chunks]]:
        """The whole parcel, less what was drained of it."""
        head, tensors = self.head, self._tensors
        self.forget()
        return head, tensors

    def _place(self, chunk: Any) -> None:
        """A chunk belongs to the first tensor that is not whole yet."""
        head = self.head
        index = next((index for index, missing in enumerate(self._missing) if missing), None)
        if index is None or not 0 < len(chunk) <= self._missing[index]:
            raise FramingError(f"a chunk of {len(chunk)} bytes where it does not fit")
        dtype = DTYPES[head.tensors[index][0]]
        if len(chunk) % dtype.itemsize:
            raise FramingError(f"a chunk of {len(chunk)} bytes in a tensor of {dtype}")
        self._missing[index] -= len(chunk)
        self._tensors[index].append(_tensor(chunk, dtype))


def _tensor(chunk: Any, dtype: torch.dtype) -> Tensor:
    """The numbers in a frame, where they lie; copied when they lie across the processor's words."""
    found = torch.frombuffer(chunk, dtype=torch.uint8)
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype)


def placed(pieces: Sequence[Tensor], start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Each piece with where it begins, the first at `start`."""
    for piece in pieces:
        yield start, piece
        start += piece.numel()


def whole(pieces: Chunks, dtype: str) -> Tensor:
    """A tensor in one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=DTYPES[dtype])
