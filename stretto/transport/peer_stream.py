"""Exchanges of tensors with one peer, as messages over an ordered connection: a state machine without a socket.

    worker 0                                            worker 1
    Post(channel 0, number 1, float32, 10^6 numbers)    Post(channel 0, number 1, float32, 10^6 numbers)
    once worker 1's Post has arrived:                   once worker 0's Post has arrived:
    Piece(channel 0, number 1, from byte 0)    ----->   written to the tensor that this worker has posted
    Piece(channel 0, number 1, from byte 256 K) ---->   ...

A Post carries a small tensor itself. So a peer can store no more at a worker than `EAGER_BYTES` and `MAX_POSTS` posts,
and the tensors that the worker has asked for. Every message has the number of bytes of pieces that its sender has
received from the peer: a worker has at most `WINDOW_BYTES` of pieces on the way to each peer.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stretto.collective_ops import Exchange
from stretto.errors import BrokenTransportError, TransportError, explain
from stretto.transport.interface import nbytes

PIECE_BYTES = 1 << 20
WINDOW_BYTES = 8 * PIECE_BYTES
SMALL_BYTES = 1 << 16
"""Largest tensor in bytes that a post carries itself."""
EAGER_BYTES = 1 << 20
"""Bytes of such tensors for exchanges that the peer has not posted."""
MAX_POSTS = 1 << 15
"""Number of posts of a peer that this worker has not posted."""
WIRE_CHANNELS = 64
"""Number of channels, of which the first are those of callers."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Dtypes of tensors, by their codes in messages."""

HELLO, POST, PIECE, RECEIVED = range(4)
"""Kinds of messages. Hello is the first one of a connection; Received carries a number of received bytes only."""
_HEAD = struct.Struct("<BBHQQQ")
HEAD_BYTES = _HEAD.size

Payload: TypeAlias = Any
"""Bytes of a tensor, as an object with a buffer."""
Key: TypeAlias = tuple[int, int]
"""Channel and number of an exchange."""


class Head(NamedTuple):
    """Head of a message. `size` is the numbers in a Post's tensor, and the first byte of a Piece in its own."""

    kind: int
    received: int = 0
    channel: int = 0
    number: int = 0
    dtype: int = 0
    size: int = 0

    def packed(self) -> bytes:
        """Return the bytes of the head.

        >>> Head.unpacked(Head(PIECE, received=5, channel=1, number=2, size=9).packed()).size
        9
        """
        return _HEAD.pack(self.kind, self.dtype, self.channel, self.received, self.number, self.size)

    @classmethod
    def unpacked(cls, packed: bytes) -> Head:
        """Return the head of these `HEAD_BYTES` bytes."""
        kind, dtype, channel, received, number, size = _HEAD.unpack(packed)
        return cls(kind, received, channel, number, dtype, size)


class PairExchange:
    """Exchange in progress. Its events are set by the thread that receives, and by aborts."""

    def __init__(self, op: Exchange, number: int) -> None:
        self.peer, self.channel, self.number = op.peer, op.channel, number
        self.tensor = op.tensor.detach().reshape(-1).contiguous()
        self.dtype = dtype_code(self.tensor.dtype)
        into = op.into
        self._into = into if into is not None and into.device.type == "cpu" and into.is_contiguous() else None
        self.is_over = threading.Event()
        self.result: Tensor | None = None
        self.error: TransportError | None = None
        self.sent = 0
        """Bytes of this worker's tensor that were sent."""
        self._target: Tensor | None = None
        self._bytes = self._room = memoryview(b"")
        """Memory of the target, and the part of it that `room` has returned last."""
        self._missing = self._size = 0

    @property
    def key(self) -> Key:
        """Channel and number."""
        return self.channel, self.number

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's tensor."""
        return nbytes(self.tensor)

    def payload(self, start: int, stop: int) -> Payload:
        """Return bytes of this worker's tensor."""
        return self.tensor.view(torch.uint8)[start:stop].numpy() if self.nbytes else b""

    def expect(self, dtype: int, numbers: int, who: str, room: Callable[[], int]) -> None:
        """Take the peer's post. Raise TransportError if its tensor cannot be received."""
        check_dtype(self.tensor.dtype, dtype, who)
        if self._into is not None and numbers != self._into.numel():
            lengths = f"{self._into.numel()} and {numbers} numbers"
            raise TransportError(f"the workers submit means of tensors that differ in shape: {who} have {lengths}")
        self._size = self._missing = numbers * self.tensor.dtype.itemsize
        if self._into is None and self._size > EAGER_BYTES and self._size > (free := room()):
            problem = f"the tensors of {who} can't be exchanged, since one is too large"
            got = f"an announced tensor of {self._size} bytes"
            expected, to_type = f"at most {free} bytes, half of the free memory", "a smaller model, or more memory"
            raise TransportError(explain(problem, got=got, expected=expected, to_type=to_type))

    def room(self, start: int, length: int) -> memoryview | None:
        """Return the memory for the next bytes of the peer's tensor; None if they are not the next, or too many."""
        if start != self._size - self._missing or length > self._missing:
            return None
        if self._into is None and length == self._size:
            return _new_bytes(length)
        return self._place(start, length)

    def receive(self, start: int, payload: Payload) -> bool:
        """Take the next bytes of the peer's tensor; return False if they are not. All of it at once is not copied."""
        length = len(payload)
        if start != self._size - self._missing or length > self._missing:
            return False
        if self._into is None and length == self._size:
            self._target = as_tensor(payload, self.tensor.dtype)
        elif payload is not self._room:
            self._place(start, length)[:] = payload
        self._missing -= length
        return True

    def _place(self, start: int, length: int) -> memoryview:
        """Return the place of some bytes in the tensor that is received."""
        if self._target is None:
            dtype = self.tensor.dtype
            numbers = self._size // dtype.itemsize
            self._target = self._into if self._into is not None else torch.empty(numbers, dtype=dtype, device="cpu")
            self._bytes = self._target.view(-1).view(torch.uint8).numpy().data
        self._room = self._bytes[start : start + length]
        return self._room

    def end_if_complete(self) -> bool:
        """Set the result once all bytes of both tensors are sent and received; return True then."""
        if self._target is None or self._missing or self.sent < self.nbytes:
            return False
        self.result = self._target
        self.is_over.set()
        return True

    def fail(self, error: TransportError) -> None:
        """End the exchange with an error, unless it is over."""
        if self.result is None and self.error is None:
            self.error = error
            self.is_over.set()


class _Post(NamedTuple):
    head: Head
    payload: Payload | None


class PeerStream:
    """Exchanges with one peer, which is `named` in errors. `room` returns the bytes that a large tensor may have."""

    def __init__(self, worker: str, named: str, room: Callable[[], int]) -> None:
        self._named, self._pair, self._room = named, f"{worker} and {named}", room
        self._begun, self._posted = Counter[int](), Counter[int]()
        """Numbers of the exchanges that this worker has submitted, and that the peer has posted, by channel."""
        self._open: dict[Key, PairExchange] = {}
        self._posts: dict[Key, _Post] = {}
        """Posts of the peer for exchanges that this worker has not submitted."""
        self._eager: dict[Key, int] = {}
        """Bytes that were sent with posts for exchanges that the peer has not posted."""
        self._stored = 0
        """Bytes of tensors in `_posts`."""
        self._heads: deque[tuple[Head, Payload | None]] = deque()
        self._cleared: deque[PairExchange] = deque()
        self._sent = self._acknowledged = self._received = self._reported = 0
        self.error: TransportError | None = None
        """Reason why there are no further exchanges with the peer."""

    def submit(self, op: Exchange) -> PairExchange:
        """Begin an exchange."""
        exchange = PairExchange(op, self._begun[op.channel] + 1)
        self._begun[op.channel] += 1
        if self.error is not None:
            exchange.fail(self.error)
            return exchange
        post = self._posts.pop(exchange.key, None)
        self._open[exchange.key] = exchange
        self._announce(exchange, is_posted=post is not None)
        if post is not None:
            self._stored -= len(post.payload) if post.payload is not None else 0
            self._begin(exchange, post)
        return exchange

    def room(self, head: Head, length: int) -> memoryview:
        """Return memory for the payload of a message, which `receive` then takes; that of its tensor, if it has one."""
        exchange = self._open.get((head.channel, head.number)) if head.kind == PIECE else None
        found = exchange.room(head.size, length) if exchange is not None else None
        return _new_bytes(length) if found is None else found

    def receive(self, head: Head, payload: Payload | None) -> None:
        """Take a message of the peer. Raise TransportError if it can't be one of an honest worker."""
        self._acknowledge(head.received)
        if head.kind == POST:
            self._take_post(_Post(head, payload))
        elif head.kind == PIECE:
            self._take_piece(head, payload)
        elif head.kind != RECEIVED or payload is not None:
            raise self._dishonest(f"a message of kind {head.kind}")

    def due(self) -> Iterator[tuple[bytes, Payload | None]]:
        """Yield the heads and payloads of messages that can be sent now."""
        while self._heads:
            head, payload = self._heads.popleft()
            yield self._stamped(head), payload
        while self._cleared and self._sent - self._acknowledged < WINDOW_BYTES:
            yield self._next_piece(self._cleared[0])
        if self._received - self._reported >= WINDOW_BYTES // 2:
            yield self._stamped(Head(RECEIVED)), None

    def end(self, error: TransportError) -> None:
        """End all exchanges with an error, now and later. Nothing more is sent."""
        self.error = self.error or error
        for exchange in self._open.values():
            exchange.fail(self.error)
        for held in (self._open, self._posts, self._heads, self._cleared, self._eager):
            held.clear()

    def _stamped(self, head: Head) -> bytes:
        self._reported = self._received
        return head._replace(received=self._received).packed()

    def _announce(self, exchange: PairExchange, is_posted: bool) -> None:
        size = exchange.nbytes
        is_eager = size <= SMALL_BYTES and (is_posted or sum(self._eager.values()) + size <= EAGER_BYTES)
        if is_eager and not is_posted:
            self._eager[exchange.key] = size
        head = Head(POST, 0, *exchange.key, exchange.dtype, exchange.tensor.numel())
        payload = exchange.payload(0, size) if is_eager and size else None
        exchange.sent = size if is_eager else 0
        self._heads.append((head, payload))

    def _next_piece(self, exchange: PairExchange) -> tuple[bytes, Payload | None]:
        start, stop = exchange.sent, min(exchange.sent + PIECE_BYTES, exchange.nbytes)
        head = self._stamped(Head(PIECE, 0, *exchange.key, 0, start))
        exchange.sent, self._sent = stop, self._sent + stop - start
        payload = exchange.payload(start, stop)
        if stop == exchange.nbytes:
            self._cleared.popleft()
            self._end_if_complete(exchange)
        return head, payload

    def _end_if_complete(self, exchange: PairExchange) -> None:
        if exchange.end_if_complete():
            self._open.pop(exchange.key, None)

    def _acknowledge(self, received: int) -> None:
        if not self._acknowledged <= received <= self._sent:
            raise self._dishonest(f"a receipt of {received} bytes, of which {self._sent} were sent")
        self._acknowledged = received

    def _take_post(self, post: _Post) -> None:
        head, payload = post
        key = head.channel, head.number
        self._check_post(head, payload)
        self._posted[head.channel] = head.number
        self._eager.pop(key, None)
        exchange = self._open.get(key)
        if exchange is not None:
            self._begin(exchange, post)
            return
        self._stored += len(payload) if payload is not None else 0
        if self._stored > EAGER_BYTES or len(self._posts) >= MAX_POSTS:
            raise self._dishonest(f"{len(self._posts) + 1} posts of {self._stored} bytes before the exchanges begin")
        self._posts[key] = post

    def _check_post(self, head: Head, payload: Payload | None) -> None:
        if head.dtype >= len(DTYPES) or head.channel >= WIRE_CHANNELS:
            raise self._dishonest(f"a tensor of dtype {head.dtype} in channel {head.channel}")
        if head.number != self._posted[head.channel] + 1:
            raise self._dishonest(f"exchange {head.number} after {self._posted[head.channel]}")
        size = head.size * DTYPES[head.dtype].itemsize
        if payload is not None and not len(payload) == size <= SMALL_BYTES:
            raise self._dishonest(f"{len(payload)} bytes as a tensor of {size}")

    def _begin(self, exchange: PairExchange, post: _Post) -> None:
        """Receive the tensor that the peer has posted, and clear this worker's."""
        head, payload = post
        try:
            exchange.expect(head.dtype, head.size, self._pair, self._room)
        except TransportError as error:
            exchange.fail(error)
            self._open.pop(exchange.key, None)
            return
        if payload is not None or not head.size:
            exchange.receive(0, payload if payload is not None else b"")
        if exchange.sent < exchange.nbytes:
            self._cleared.append(exchange)
        self._end_if_complete(exchange)

    def _take_piece(self, head: Head, payload: Payload | None) -> None:
        exchange = self._open.get((head.channel, head.number))
        is_posted = head.number <= self._posted[head.channel]
        length = len(payload) if payload is not None else 0
        if exchange is None or not is_posted or not length:
            raise self._dishonest(f"{length} bytes for exchange {head.number} of channel {head.channel}")
        self._received += length
        if not exchange.receive(head.size, payload):
            raise self._dishonest(f"{length} bytes from byte {head.size} on, which are not the next of its tensor")
        self._end_if_complete(exchange)

    def _dishonest(self, got: str) -> TransportError:
        problem = f"{self._named} does not keep to the protocol of exchanges"
        expected, to_type = "the next message of an exchange", "the same version of Stretto on all hosts"
        return TransportError(explain(problem, got=got, expected=expected, to_type=to_type))


def ended(named: str) -> BrokenTransportError:
    """Return the error of exchanges with a worker whose connection has ended."""
    return BrokenTransportError(f"{named} has failed, or has left the generation")


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype. Raise TransportError if it has none."""
    if dtype in DTYPES:
        return DTYPES.index(dtype)
    problem, expected = "a tensor of this dtype can't be exchanged", ", ".join(str(one) for one in DTYPES)
    raise TransportError(explain(problem, got=str(dtype), expected=expected, to_type="tensor.view(torch.uint8)"))


def check_dtype(mine: torch.dtype, code: int, who: str) -> None:
    """Raise TransportError if the tensor of another worker, by the code of its dtype, has another dtype than mine."""
    if mine != DTYPES[code]:
        raise TransportError(f"the tensors of {who} differ in dtype: {mine} and {DTYPES[code]}")


def _new_bytes(count: int) -> memoryview:
    return np.empty(count, np.uint8).data


def as_tensor(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Return a tensor of received bytes, in their own memory if it is aligned for the dtype."""
    if not len(payload):
        return torch.empty(0, dtype=dtype, device="cpu")
    flat = torch.frombuffer(payload, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)
