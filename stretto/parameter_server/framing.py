"""Framing: a header and its tensors as ZeroMQ multipart messages, and back. Large tensors travel in chunks, uncopied.

Each multipart message carries at most `CHUNK_BYTES` of tensors, so that received chunks can be processed while the
others are in flight; in memory that both processes map it has the places of a few chunks. The first one begins with the
header, the others with an empty frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stretto.errors import TransportError
from stretto.parameter_server.message_memory import MemoryFile, in_memory
from stretto.parameter_server.messages import Body, Header, MemoryHeader
from stretto.transport.host_memory import Offer
from stretto.transport.tensor_bytes import octets

CHUNK_BYTES = 1 << 20
PLACED_BYTES = 1 << 22
"""Bytes of the chunks in memory whose places one message has."""
FEW_BYTES = 1 << 14
"""Largest chunk that is copied without a look at its alignment, since that takes longer."""
HEADER_BYTES = 1 << 20
"""A header lists batches: all that a worker has trained in an epoch, which may be a hundred thousand."""
LARGEST_FRAME = CHUNK_BYTES + HEADER_BYTES
DTYPES = {
    str(tensor).removeprefix("torch."): tensor
    for tensor in (
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
"""A flat tensor in chunks, in order."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MemoryHeader)


class FramingError(TransportError):
    """A malformed or unexpected message."""


def reason_of(error: Exception) -> str:
    """Return why a message is refused, as the sender is told: with the class of an error that was not expected."""
    return str(error) if isinstance(error, FramingError) else f"{type(error).__name__}: {error}"


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in headers."""
    return str(tensor.dtype).removeprefix("torch.")


def layout_of(tensors: Sequence[Tensor]) -> list[tuple[str, int]]:
    """Return the dtype and the length of each tensor, as a header has them."""
    return [(dtype_name(tensor), tensor.numel()) for tensor in tensors]


def encode(
    request_id: int,
    body: Body,
    tensors: Sequence[Tensor] = (),
    answered_below: int = 0,
    memory: MemoryFile | Offer | None = None,
) -> Iterator[list[Any]]:
    """Yield the frames of each multipart message. Tensors are flat, contiguous, on the CPU.

    They are not copied, or written to `memory` while the messages are sent.
    """
    layout, file = layout_of(tensors), memory if isinstance(memory, MemoryFile) else None
    header = (
        Header(request_id, body, layout, answered_below)
        if memory is None
        else MemoryHeader(request_id, body, layout, answered_below, memory if isinstance(memory, Offer) else True)
    )
    message: list[Any] = [_encoder.encode(header)]
    room = limit = CHUNK_BYTES if file is None else PLACED_BYTES
    for chunk in (chunk for tensor in tensors for chunk in _chunks(tensor)):
        if chunk.nbytes > room:
            yield message
            message, room = [b""], limit
        message.append(chunk if file is None else file.write(chunk))
        room -= chunk.nbytes
    yield message


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        numbers: Any = tensor.view(torch.uint8).numpy()
        data = memoryview(numbers)
        yield from (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))


def decode_header(frame: Any) -> Header:
    """Decode a header. Raises FramingError if it is malformed or has an unknown dtype."""
    if len(frame) > HEADER_BYTES:
        raise FramingError(f"a header of {len(frame)} bytes")
    try:
        header = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FramingError(f"no header: {error}") from None
    for dtype, length in header.tensors:
        if dtype not in DTYPES or length < 0:
            raise FramingError(f"a tensor of {length} {dtype:.20}")
    return header


class Assembly:
    """Reassembles one sender's messages. Holds no more than the received chunks."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._tensors: list[Chunks] = []
        self._missing: list[int] = []
        self._drained: list[int] = []

    @property
    def request_id(self) -> int:
        """Id of the request or reply being received; 0 if there is none."""
        return self._header.request_id if self._header is not None else 0

    @property
    def header(self) -> Header:
        """Header of the message being received. Raises FramingError if there is none."""
        if self._header is None:
            raise FramingError("a chunk without a header")
        return self._header

    def begin(self, frame: Any) -> Header:
        """Begin a message with this header, and drop an incomplete one. Raises FramingError."""
        self.reset()
        self._header = header = decode_header(frame)
        self._tensors = [[] for _ in header.tensors]
        self._missing = [length * DTYPES[dtype].itemsize for dtype, length in header.tensors]
        self._drained = [0] * len(header.tensors)
        return header

    def drain(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the chunks received since the last call as (tensor, first element, elements). They are not stored."""
        for index, chunks in enumerate(self._tensors):
            for chunk in chunks:
                offset = self._drained[index]
                self._drained[index] += chunk.numel()
                yield index, offset, chunk
            chunks.clear()

    def reset(self) -> None:
        """Drop the message being received."""
        self._header, self._tensors, self._missing = None, [], []

    def add(self, chunks: Sequence[Any], find: Callable[[Any], Any] | None = None) -> bool:
        """Add chunks, which `find` finds in memory; return True if the message is complete. Raises FramingError."""
        is_placed = self._header is not None and in_memory(self._header)
        for chunk in chunks:
            self._place(chunk if not is_placed else (find(chunk) if find is not None else None) or b"")
        return not any(self._missing)

    def take(self) -> tuple[Header, list[Chunks]]:
        """Return the complete message, without its drained chunks."""
        header, tensors = self.header, self._tensors
        self.reset()
        return header, tensors

    def _place(self, chunk: Any) -> None:
        """Add a chunk to the first incomplete tensor."""
        header = self.header
        index = next((index for index, missing_bytes in enumerate(self._missing) if missing_bytes), None)
        if index is None or not 0 < len(chunk) <= self._missing[index]:
            raise FramingError(f"a chunk of {len(chunk)} bytes where it does not fit")
        dtype = DTYPES[header.tensors[index][0]]
        if len(chunk) % dtype.itemsize:
            raise FramingError(f"a chunk of {len(chunk)} bytes in a tensor of {dtype}")
        self._missing[index] -= len(chunk)
        self._tensors[index].append(_tensor(chunk, dtype))


def _tensor(chunk: Any, dtype: torch.dtype) -> Tensor:
    """Return the elements of a frame, copied only if they are few or not aligned."""
    if len(chunk) <= FEW_BYTES:
        return torch.frombuffer(bytearray(chunk), dtype=dtype)
    elements = torch.frombuffer(chunk, dtype=torch.uint8)
    if elements.data_ptr() % dtype.itemsize:
        elements = elements.clone()
    return elements.view(dtype)


def with_offsets(chunks: Sequence[Tensor], start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield each chunk with the position of its first element; the first one is at `start`."""
    for chunk in chunks:
        yield start, chunk
        start += chunk.numel()


def blobs_of(tensors: Sequence[Chunks]) -> list[bytes]:
    """Return the bytes of each tensor of a message."""
    return [b"".join(octets(chunk).tobytes() for chunk in chunks) for chunks in tensors]


def chunks_of(header: Header, blobs: Sequence[bytes]) -> list[Chunks]:
    """Return the tensors of a message from their bytes."""
    return [
        [torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(DTYPES[dtype])] if blob else []
        for (dtype, _), blob in zip(header.tensors, blobs, strict=True)
    ]


def concatenated(chunks: Chunks, dtype: str) -> Tensor:
    """Return a tensor in one piece."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=DTYPES[dtype], device="cpu")
