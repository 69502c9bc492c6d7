"""Relay for workers whose hosts cannot reach each other, but all reach the launcher (`--relay`).

A stream is one direction between two workers in one generation. Both ask the relay for their end of it, signed with the
run's secret and a number that the relay draws for the connection; it joins the two ends and forwards bytes:

    worker 2, which sends                  relay                            worker 3, which receives
      | <- random number ----------------- |  -- random number -----------------> |
      | -- "s" 2, 3, generation, MAC ----> |  <-- "r" 2, 3, generation, MAC ----- |
      |                                    |  has both ends of the stream         |
      | <- joined ------------------------ |  -- joined ------------------------> |
      | <= handshake with the key of worker 3, encrypted messages ==============> |

Encryption and authentication are those of the two workers, so the relay reads nothing of a message, and a receiver
knows the sender by its key. The relay stores at most `BUFFERED_BYTES` of each direction, and a read: a slow receiver
slows its sender down. If one end closes, the other is closed. Nothing outlasts a connection, so a restarted relay is
like a new one: all generations break, and their workers connect again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from stretto.security import log

HANDSHAKE_S = 2.0
"""Seconds after which a connection without a signed request is closed."""
MAX_STRANGERS = 64
"""Connections without a signed request; one more closes the oldest."""
BUFFERED_BYTES = 1 << 18
NONCE_BYTES = ID_BYTES = MAC_BYTES = 16
_STREAM = struct.Struct(f"<c{ID_BYTES}s{ID_BYTES}sI")
REQUEST_BYTES = _STREAM.size + MAC_BYTES
JOINED = b"+"
IDLE_S, PROBE_S, PROBES = 5, 5, 3
"""Seconds without data after which the kernel probes the other end; between two probes; and lost ones that end it."""
End: TypeAlias = Literal[b"s", b"r"]
"""Sending or receiving end of a stream."""


class Stream(NamedTuple):
    """One direction between two workers in one generation, by the digests of their public keys."""

    sender: bytes
    receiver: bytes
    generation: int


def digest(public: bytes) -> bytes:
    """Return the name of a worker process at the relay."""
    return hashlib.blake2b(public, digest_size=ID_BYTES).digest()


def signed(end: End, stream: Stream, nonce: bytes, secret: bytes) -> bytes:
    """Return the request for an end of a stream.

    >>> request = signed(b"s", Stream(bytes(16), bytes(16), 7), b"random", b"secret")
    >>> checked(request, b"random", b"secret")[1].generation
    7
    """
    text = _STREAM.pack(end, *stream)
    return text + _mac(text, nonce, secret)


def checked(request: bytes, nonce: bytes, secret: bytes) -> tuple[bytes, Stream]:
    """Return the end and the stream of a request. Raise ValueError if it is not signed."""
    text = request[: _STREAM.size]
    if not hmac.compare_digest(request[_STREAM.size :], _mac(text, nonce, secret)):
        raise ValueError("a request without the key of this run")
    end, *stream = _STREAM.unpack(text)
    return end, Stream(*stream)


def _mac(text: bytes, nonce: bytes, secret: bytes) -> bytes:
    key = hashlib.blake2b(secret, person=b"stretto relay").digest()
    return hashlib.blake2b(nonce + text, key=key, digest_size=MAC_BYTES).digest()


class Pump(asyncio.Protocol):
    """One of two connections, `join`ed to forward what they receive to each other. If one ends, the other is closed."""

    def __init__(self) -> None:
        self._other: Pump | None = None
        self.transport: asyncio.Transport
        self.is_lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Limit the memory for bytes that wait."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFERED_BYTES)

    @property
    def is_joined(self) -> bool:
        """True if this connection is one of two."""
        return self._other is not None

    def join(self, other: Pump, received: bytes = b"") -> None:
        """Forward `received` bytes, and all later ones, to another connection."""
        self._other = other
        if other.is_lost.is_set():
            self.close()
        other.transport.write(received)
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Forward."""
        if self._other is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        """Read no more of the other connection while this one is slower."""
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read the other connection again."""
        if self._other is not None:
            self._other.transport.resume_reading()

    def close(self) -> None:
        """Close the connection once what it has to send is sent."""
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other connection."""
        self.is_lost.set()
        if self._other is not None:
            self._other.close()


def serve(listener: socket.socket, secret: bytes) -> None:
    """Serve at a listening socket until the process ends."""
    asyncio.run(serving(listener, Relay(secret)))


async def serving(listener: socket.socket, relay: Relay) -> None:
    """Serve at a listening socket until the task is cancelled."""
    server = await asyncio.get_running_loop().create_server(relay.connection, sock=listener)
    async with server:
        await server.serve_forever()


_Place: TypeAlias = tuple[bytes, Stream]


class Relay:
    """Connections that have not asked for a stream yet, ends that wait for their other end, and the number of refusals.

    All else is in the connections.
    """

    def __init__(self, secret: bytes, notice: Callable[[str], None] = log) -> None:
        self._secret, self._notice = secret, notice
        self._strangers: dict[_Connection, None] = {}
        self._waiting: dict[_Place, _Connection] = {}
        self._places: dict[_Connection, _Place] = {}
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Number of ends that wait for their other end."""
        return len(self._waiting)

    def connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Connection(self)

    def arrived(self, connection: _Connection) -> None:
        """Note a connection, and close the oldest if too many have asked for nothing."""
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.refuse(next(iter(self._strangers)), "the oldest of too many connections without a request")

    def refuse(self, connection: _Connection, why: str) -> None:
        """Close a connection, count it, and log the first, second, fourth, ... one."""
        self.left(connection)
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            self._notice(f"relay: a connection from {connection.address} was refused: {why} ({self.refused} so far)")
        connection.close()

    def asked(self, connection: _Connection, request: bytes, nonce: bytes) -> _Connection | None:
        """Return the other end of the stream, if it waits. Raise ValueError for a request that is not signed."""
        end, stream = checked(request, nonce, self._secret)
        del self._strangers[connection]
        other = self._waiting.get((b"r" if end == b"s" else b"s", stream))
        if other is not None:
            self.left(other)
            return other
        earlier = self._waiting.get((end, stream))
        if earlier is not None:  # its worker has connected again
            self.left(earlier)
            earlier.close()
        self._waiting[end, stream], self._places[connection] = connection, (end, stream)
        return None

    def left(self, connection: _Connection) -> None:
        """Forget a connection, unless it is one of two that were joined."""
        self._strangers.pop(connection, None)
        place = self._places.pop(connection, None)
        if place is not None:
            del self._waiting[place]


class _Connection(Pump):
    """One end of a stream, or a connection that has not asked for one."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._nonce, self._request = secrets.token_bytes(NONCE_BYTES), b""
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = str((transport.get_extra_info("peername") or ("?",))[0])
        _probe(transport.get_extra_info("socket"))
        self._relay.arrived(self)
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(HANDSHAKE_S, self._refuse, f"no request within {HANDSHAKE_S:g} s")
        self.transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            super().data_received(data)
            return
        self._request += data
        if len(self._request) > REQUEST_BYTES:
            self._refuse("more than a request")
        elif len(self._request) == REQUEST_BYTES:
            self._ask()

    def _ask(self) -> None:
        self._limit.cancel()
        try:
            other = self._relay.asked(self, self._request, self._nonce)
        except ValueError as error:
            self._refuse(str(error))
            return
        if other is not None:
            for one in (self, other):
                one.transport.write(JOINED)
            self.join(other)
            other.join(self)

    def _refuse(self, why: str) -> None:
        self._limit.cancel()
        if not self.transport.is_closing():
            self._relay.refuse(self, why)

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._relay.left(self)
        super().connection_lost(error)


def _probe(connection: socket.socket) -> None:
    """Let the kernel find out that the host of the other end has failed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
