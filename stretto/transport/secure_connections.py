"""Connections between two members of a generation, authenticated and encrypted, each for messages in one direction.

    sending worker                              receiving worker
      | -- preface: generation, own rank --------> |
      | -- first message of the handshake -------> |  its key is not that of this rank: closed
      | <- second message of the handshake ------- |
      | == length, sealed head, sealed payload ==> |  the first one confirms that the handshake was not an old one

Sockets do not block: each call does as much as it can without a wait. Connections have no locks.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

import numpy as np

from stretto.transport.noise import HANDSHAKE_BYTES, TAG_BYTES, AuthenticationError, Cipher, Handshake
from stretto.transport.peer_stream import HEAD_BYTES, PIECE_BYTES

Address: TypeAlias = tuple[socket.AddressFamily, Any]
PREFACE = struct.Struct("<8sIH")
MAGIC = b"stretto1"
LENGTH = struct.Struct("<I")
OVERHEAD_BYTES = LENGTH.size + HEAD_BYTES + TAG_BYTES
"""Bytes of a message without a payload."""
RETRY_S = 0.005
"""Seconds between two attempts to connect with a member that does not listen yet."""
HANDSHAKE_S = 2.0
"""Seconds after which a connection without a member's handshake is closed, on both sides."""
CONFIRM_S = 10.0
"""Seconds between a member's handshake and its first message after which the connection is closed."""
_RESET = struct.pack("ii", 1, 0)


class IncomingMessage:
    """Message that has arrived, whose payload is to be opened before the next one is received."""

    def __init__(self, head: bytes, sealed: memoryview | None, cipher: Cipher) -> None:
        self.head, self._sealed, self._cipher = head, sealed, cipher
        self.length = len(sealed) - TAG_BYTES if sealed is not None else 0
        """Bytes of the payload."""

    def open_into(self, target: memoryview) -> None:
        """Write the payload into a buffer of its length. Raise AuthenticationError if it was altered."""
        self._cipher.open_into(target, self._sealed)


class SendingConnection:
    """Connection to a member of the generation. Until the member proves its key, each failure begins another attempt.

    `handshake` returns a new one with the member, for the preface of its argument.
    """

    def __init__(self, address: Address, generation: int, rank: int, handshake: Callable[[bytes], Handshake]) -> None:
        self._address, self._handshake = address, handshake
        self._preface = PREFACE.pack(MAGIC, generation, rank)
        self.socket: socket.socket | None = None
        self.due = 0.0
        """Time of the next attempt, or, if there is a socket, at which this attempt has failed."""
        self.lost_at: float | None = None
        """Time at which the connection ended."""
        self._attempt: Iterator[None] = iter(())
        self._is_connecting = False
        self.is_refused = False
        """True if the last attempt was refused, as by a member that does not listen yet."""
        self._cipher: Cipher | None = None
        self._early = list[tuple[bytes, bytes]]()
        """Messages from before the end of the handshake."""
        self._unsent = deque[memoryview]()
        self._sent = 0
        """Bytes of the first of them that are sent."""
        self._spare = list[memoryview]()
        """Memory of sent pieces, for the next ones."""

    @property
    def events(self) -> int:
        """Events of the socket for which `proceed` waits."""
        return select.POLLOUT if self._is_connecting else select.POLLIN | (select.POLLOUT if self._unsent else 0)

    @property
    def has_connected(self) -> bool:
        """True once the member has proved its key."""
        return self._cipher is not None

    def redirect(self, address: Address) -> None:
        """Connect at another address, where this one did not lead to the member."""
        self._disconnect(is_abort=True)
        self._address, self.due = address, 0.0

    def send(self, head: bytes, payload: Any) -> bool:
        """Send a message, whose bytes are copied. Return True if the events or times to wait for have changed."""
        if self.lost_at is not None:
            return False
        if self._cipher is None:
            self._early.append((head, bytes(payload)))
            return False
        is_piece = len(payload) == PIECE_BYTES
        self._unsent.append(
            sealed(self._cipher, head, payload, self._spare.pop() if is_piece and self._spare else None)
        )
        if len(self._unsent) == 1:
            self._flush()
        return bool(self._unsent) or self.lost_at is not None

    def proceed(self) -> None:
        """Continue the attempt to connect, or send unsent messages."""
        try:
            if self.socket is None:
                self._attempt = self._connect()
            elif self.due <= time.monotonic():
                raise TimeoutError
            if self._cipher is None:
                next(self._attempt, None)
            if self._cipher is not None:
                self._flush()
                self._check_end()
        except (OSError, AuthenticationError) as error:
            self.is_refused = isinstance(error, ConnectionRefusedError)
            self._disconnect(is_abort=True)
            self.due = time.monotonic() + RETRY_S

    def close(self, limit: float | None) -> None:
        """Send the messages that are left, until a time at the latest, and close; without a limit, abort."""
        while limit is not None and self._unsent and (left := limit - time.monotonic()) > 0:
            assert self.socket is not None
            _is_writable(self.socket, left)
            self._flush()
        self._disconnect(is_abort=limit is None)
        self.lost_at = self.lost_at or time.monotonic()

    def _connect(self) -> Iterator[None]:
        """Connect and prove the keys. Each step ends where it would block."""
        family, address = self._address
        made = self.socket = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        # a relay replies once the member is there
        self.due = math.inf if family == socket.AF_UNIX else time.monotonic() + HANDSHAKE_S
        with contextlib.suppress(BlockingIOError):
            made.connect(address)
        self._is_connecting = True
        while not _is_writable(made):
            yield
        self._is_connecting = False
        if problem := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(problem, os.strerror(problem))
        without_delay(made)
        handshake = self._handshake(self._preface)
        made.send(self._preface + handshake.write())
        reply = memoryview(bytearray(HANDSHAKE_BYTES))
        yield from _received(made, reply)
        handshake.read(bytes(reply))
        self.due = math.inf
        self._cipher, _ = handshake.ciphers()
        self._unsent.extend(sealed(self._cipher, head, payload) for head, payload in self._early)
        self._early.clear()

    def _flush(self) -> None:
        try:
            while self._unsent and self.socket is not None:
                piece = self._unsent[0]
                self._sent += self.socket.send(piece[self._sent :])
                if self._sent == len(piece):
                    self._sent = 0
                    self._unsent.popleft()
                    if len(piece) == wire_bytes(PIECE_BYTES):
                        self._spare.append(piece)
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def _check_end(self) -> None:
        """Note the end of the connection, on which nothing else arrives."""
        if self.socket is None:
            return
        try:
            self.socket.recv(1)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lose()

    def _lose(self) -> None:
        self._disconnect(is_abort=True)
        self.lost_at = time.monotonic()

    def _disconnect(self, is_abort: bool) -> None:
        self._unsent.clear()
        if self.socket is not None:
            disconnect(self.socket, is_abort)
            self.socket = None


class ReceivingConnection:
    """Connection from a member of the generation, or from a stranger.

    `handshake` returns a new one with the member of a rank, for a preface, or None if there is no such member. A first
    message that is one of `seen` is a copy, since a member draws a new one for each attempt; this one's is added.
    """

    def __init__(
        self,
        accepted: socket.socket,
        address: str,
        generation: int,
        handshake: Callable[[int, bytes], Handshake | None],
        seen: set[bytes],
    ) -> None:
        accepted.setblocking(False)
        without_delay(accepted)
        self.socket, self.address = accepted, address
        self._generation, self._handshake, self._seen = generation, handshake, seen
        self.until = time.monotonic() + HANDSHAKE_S
        """Time at which the connection is closed, if no member's handshake or, after it, no message has arrived."""
        self.rank: int | None = None
        """Rank of the member whose key the handshake has proved; None before."""
        self._arriving = self._receive()

    def messages(self) -> Iterator[IncomingMessage]:
        """Yield messages that have arrived.

        Raise OSError at the end of the connection, and AuthenticationError if no member sends what has arrived.
        """
        while (one := next(self._arriving)) is not None:
            yield one

    def close(self) -> None:
        """Close the connection."""
        disconnect(self.socket, is_abort=True)

    def _receive(self) -> Iterator[IncomingMessage | None]:
        """Yield messages, and None where all that has arrived is read."""
        cipher = yield from self._authenticate()
        first = memoryview(bytearray(OVERHEAD_BYTES))
        payloads = np.empty(PIECE_BYTES + TAG_BYTES, np.uint8).data
        while True:
            yield from _received(self.socket, first)
            head = cipher.open(first[LENGTH.size :], first[: LENGTH.size])
            (length,) = LENGTH.unpack_from(first)
            if length > PIECE_BYTES:
                raise AuthenticationError
            ciphertext = payloads[: length + TAG_BYTES] if length else None
            if ciphertext is not None:
                yield from _received(self.socket, ciphertext)
            yield IncomingMessage(head, ciphertext, cipher)

    def _authenticate(self) -> Generator[None, None, Cipher]:
        received = memoryview(bytearray(PREFACE.size + HANDSHAKE_BYTES))
        yield from _received(self.socket, received)
        preface = bytes(received[: PREFACE.size])
        magic, generation, rank = PREFACE.unpack(preface)
        if magic != MAGIC or generation != self._generation:
            raise ConnectionError("no preface of a member")
        first = bytes(received[PREFACE.size :])
        handshake = None if first in self._seen else self._handshake(rank, preface)
        if handshake is None:
            raise AuthenticationError
        handshake.read(first)
        self._seen.add(first)
        self.rank, self.until = rank, time.monotonic() + CONFIRM_S
        self.socket.send(handshake.write())
        return handshake.ciphers()[0]


def sealed(cipher: Cipher, head: bytes, payload: Any, into: memoryview | None = None) -> memoryview:
    """Return an encrypted message, in the memory `into` if that is given. The payload may have no bytes."""
    length = len(payload)
    made = np.empty(wire_bytes(length), np.uint8).data if into is None else into
    prefix = LENGTH.pack(length)
    made[:OVERHEAD_BYTES] = prefix + cipher.seal(head, prefix)
    if length:
        cipher.seal_into(made[OVERHEAD_BYTES:], payload)
    return made


def wire_bytes(payload: int) -> int:
    """Return the bytes of a message whose payload has this number of bytes."""
    return OVERHEAD_BYTES + (payload + TAG_BYTES if payload else 0)


def without_delay(one: socket.socket) -> None:
    """Send small messages immediately."""
    if one.family != socket.AF_UNIX:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def disconnect(one: socket.socket, is_abort: bool) -> None:
    """Close a connection, also if child processes have copies of its socket. An abort drops unsent bytes."""
    with contextlib.suppress(OSError):
        if is_abort:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _is_writable(one: socket.socket, limit_s: float = 0.0) -> bool:
    """Return True once the socket can send, or has failed to connect."""
    poller = select.poll()  # select() knows no descriptors above 1,023
    poller.register(one, select.POLLOUT)
    return bool(poller.poll(1000 * limit_s))


def _received(one: socket.socket, target: memoryview) -> Iterator[None]:
    """Fill a buffer with what arrives. Each step ends where it would block."""
    while len(target):
        try:
            count = one.recv_into(target)
        except BlockingIOError:
            yield None
            continue
        if not count:
            raise ConnectionResetError("the connection has ended")
        target = target[count:]
