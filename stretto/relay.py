"""Relay at the port of a run with `--listen`: the one port of the launcher's machine that others have to reach.

The first bytes of a connection say where it leads. Those of ZeroMQ lead to the coordinator, which all joined processes
use: the relay forwards the connection. A worker's greeting of the relay asks for a stream, or for a shard or the batch
dispatcher, for workers that cannot connect with each other or with the ports of the services.

A stream is one direction between two workers in one generation. Both ask the relay for their end of it, signed with the
run's secret and a number that the relay draws for the connection; it joins the two ends and forwards bytes:

    worker 2, which sends                  relay                            worker 3, which receives
      | -- greeting ---------------------> |  <- greeting ----------------------- |
      | <- random number ----------------- |  -- random number -----------------> |
      | -- "s" 2, 3, generation, MAC ----> |  <-- "r" 2, 3, generation, MAC ----- |
      |                                    |  has both ends of the stream         |
      | <- joined ------------------------ |  -- joined ------------------------> |
      | <= handshake with the key of worker 3, encrypted messages ==============> |

A request for a service, "c", has the digest of its address in place of the receiver; the relay connects with it.

Encryption and authentication are those of the two ends, so the relay reads nothing of a message, and a receiver
knows the sender by its key. The relay stores at most `BUFFERED_BYTES` of each direction, and a read: a slow receiver
slows its sender down. If one end closes, the other is closed. Nothing outlasts a connection, so a restarted relay is
like a new one: all generations break, and their workers connect again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stretto.notices import say

HANDSHAKE_S = 2.0
"""Seconds after which a connection without a signed request is closed."""
DRAIN_S = 0.6
"""Seconds in which the last messages of ended services are forwarded; a launcher kills its processes a little later."""
MAX_STRANGERS = 1024
"""Connections without a signed request; one more closes one of a network that has the most of them."""
BUFFERED_BYTES = 1 << 18
NONCE_BYTES = ID_BYTES = MAC_BYTES = 16
_STREAM = struct.Struct(f"<c{ID_BYTES}s{ID_BYTES}sI")
REQUEST_BYTES = _STREAM.size + MAC_BYTES
JOINED = b"+"
GREETING = b"stretto relay 1\n"
"""First bytes of a worker that has a request."""
OF_ZEROMQ = b"\xff"
"""First byte of a connection of ZeroMQ."""
IDLE_S, PROBE_S, PROBES = 5, 5, 3
"""Seconds without data after which the kernel probes the other end; between two probes; and lost ones that end it."""
End: TypeAlias = Literal[b"s", b"r", b"c"]
"""Sending or receiving end of a stream, or connection with a service."""
Address: TypeAlias = tuple[str, int]


class Stream(NamedTuple):
    """One direction between two workers in one generation, by the digests of their public keys."""

    sender: bytes
    receiver: bytes
    generation: int


def digest(public: bytes) -> bytes:
    """Return the name of a worker process at the relay, by its public key, or of a service, by its address."""
    return hashlib.blake2b(public, digest_size=ID_BYTES).digest()


def stream_to(address: str) -> Stream:
    """Return what is requested for a connection with the service at an address."""
    return Stream(bytes(ID_BYTES), digest(address.encode()), 0)


def network(address: str) -> str:
    """Return an address's network that one host may have all of: an IPv4 address, or 64 bits of an IPv6 address.

    >>> network("10.0.0.7"), network("::ffff:10.0.0.7"), network("2001:db8::7"), network("2001:db8::1:0:0:7%eth0")
    ('10.0.0.7', '10.0.0.7', '2001:db8::', '2001:db8::')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))


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


def serve(
    listener: socket.socket,
    secret: bytes,
    coordinator: str | None = None,
    services: Sequence[str] = (),
    is_way: bool = False,
) -> None:
    """Serve at a listening socket until SIGTERM, and then until the last messages of the services are forwarded.

    Connections of ZeroMQ lead to the address of the coordinator, and requests to those of the services. Unless the
    relay `is_way` of all workers, it says once which hosts need it.
    """
    relay = Relay(secret, coordinator=coordinator, services=services, is_way=is_way)
    asyncio.new_event_loop().run_until_complete(_until_sigterm(listener, relay))


async def _until_sigterm(listener: socket.socket, relay: Relay) -> None:
    is_ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_ended.set)
    server = await asyncio.get_running_loop().create_server(relay.connection, sock=listener)
    await is_ended.wait()
    server.close()
    await relay.drained(DRAIN_S)


def _parts(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def serving(listener: socket.socket, relay: Relay) -> None:
    """Serve at a listening socket until the task is cancelled."""
    server = await asyncio.get_running_loop().create_server(relay.connection, sock=listener)
    async with server:
        await server.serve_forever()


_Place: TypeAlias = tuple[bytes, Stream]
_Group: TypeAlias = tuple[str, bool]
"""Network of connections without a request, and whether they have greeted the relay."""


class Relay:
    """Connections that have not asked for a stream yet, ends that wait for their other end, and the number of refusals.

    All else is in the connections.
    """

    def __init__(
        self,
        secret: bytes,
        notice: Callable[[str], None] = say,
        coordinator: str | None = None,
        services: Sequence[str] = (),
        is_way: bool = False,
    ) -> None:
        """Without a secret, no request is signed. A relay that is the way of all workers says of none that it is."""
        self._secret, self._notice = secret, notice
        self._coordinator = _parts(coordinator) if coordinator is not None else None
        self._services = {stream_to(one): _parts(one) for one in services}
        self._connecting = set[asyncio.Task[None]]()
        self._forwarded = set[_Connection]()
        """Connections with services."""
        self._strangers: dict[_Group, dict[_Connection, None]] = {}
        self._is_making_room = False
        self._waiting: dict[_Place, _Connection] = {}
        self._places: dict[_Connection, _Place] = {}
        self._is_way, self._said = is_way, set[str]()
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Number of ends that wait for their other end."""
        return len(self._waiting)

    def connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Connection(self)

    def arrived(self, connection: _Connection) -> None:
        """Note a connection without a request, and close one of too many once all that has arrived is read."""
        self._strangers.setdefault(connection.group, {})[connection] = None
        if not self._is_making_room:
            self._is_making_room = True
            asyncio.get_running_loop().call_later(0, self._make_room)

    def _make_room(self) -> None:
        """Close connections of the largest groups. Any one of a group: a member's among a flood's has a chance, too."""
        self._is_making_room = False
        for _ in range(sum(map(len, self._strangers.values())) - MAX_STRANGERS):
            largest = max(self._strangers.values(), key=lambda group: (len(group), secrets.randbits(32)))
            self.refuse(secrets.choice([*largest]), "one of too many connections without a request")

    def greeted(self, connection: _Connection) -> None:
        """Note the greeting of a connection, whose request is awaited now."""
        self._forget_stranger(connection)
        connection.group = (connection.group[0], True)
        self.arrived(connection)

    def _forget_stranger(self, connection: _Connection) -> None:
        group = self._strangers.get(connection.group, {})
        group.pop(connection, None)
        if not group:
            self._strangers.pop(connection.group, None)

    def refuse(self, connection: _Connection, why: str) -> None:
        """Close a connection, count it, and log the first, second, fourth, ... one."""
        self.left(connection)
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            self._notice(f"relay: a connection from {connection.address} was refused: {why} ({self.refused} so far)")
        connection.close()

    def asked(self, connection: _Connection, request: bytes, nonce: bytes) -> _Connection | None:
        """Return the other end of the stream, if it waits, or connect with the service.

        Raise ValueError for a request that is not signed, and for an unknown service.
        """
        end, stream = checked(request, nonce, self._secret) if self._secret else (b"", None)
        if stream is None or end not in (b"s", b"r", b"c") or (end == b"c" and stream not in self._services):
            raise ValueError("a request that no worker of this run sends")
        self._forget_stranger(connection)
        if end == b"c":
            self._say_once(f"relay: {connection.address} reaches the parameter server through this port alone")
            self._connect(connection, self._services[stream], JOINED)
            return None
        other = self._waiting.get((b"r" if end == b"s" else b"s", stream))
        if other is not None:
            self.left(other)
            sender, receiver = (one.address for one in ((connection, other) if end == b"s" else (other, connection)))
            closed = f"since {sender} reached no port of it"
            self._say_once(f"relay: what workers of {sender} send to {receiver} passes this port, {closed}")
            return other
        earlier = self._waiting.get((end, stream))
        if earlier is not None:  # its worker has connected again
            self.left(earlier)
            earlier.close()
        self._waiting[end, stream], self._places[connection] = connection, (end, stream)
        return None

    def _say_once(self, text: str) -> None:
        if not self._is_way and text not in self._said:
            self._said.add(text)
            self._notice(text)

    def greeted_by_zeromq(self, connection: _Connection, received: bytes) -> None:
        """Connect with the coordinator, which closes the connection of a stranger. Raise ValueError without one."""
        if self._coordinator is None:
            raise ValueError("a connection of ZeroMQ")
        self._forget_stranger(connection)
        self._connect(connection, self._coordinator, received=received)

    def _connect(self, connection: _Connection, to: Address, reply: bytes = b"", received: bytes = b"") -> None:
        """Join a connection with a service, send it a reply, and forward what was received."""
        connection.transport.pause_reading()
        task = asyncio.get_running_loop().create_task(self._connected(connection, to, reply, received))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, connection: _Connection, to: Address, reply: bytes, received: bytes) -> None:
        try:
            _, service = await asyncio.get_running_loop().create_connection(_Service, *to)
        except OSError:  # it is being restarted, and the other end connects again
            connection.close()
            return
        connection.transport.write(reply)
        self._forwarded.add(connection)
        service.join(connection)
        connection.join(service, received)

    async def drained(self, limit_s: float) -> None:
        """Wait until the services have closed all connections, and what they have sent is forwarded, or this time."""
        ends = [asyncio.ensure_future(one.is_lost.wait()) for one in self._forwarded]
        if ends:
            await asyncio.wait(ends, timeout=limit_s)

    def left(self, connection: _Connection) -> None:
        """Forget a connection, unless it is one of two that were joined."""
        self._forget_stranger(connection)
        self._forwarded.discard(connection)
        place = self._places.pop(connection, None)
        if place is not None:
            del self._waiting[place]


class _Service(Pump):
    """Connection with a service, which is not read before it is joined."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()


class _Connection(Pump):
    """One end of a stream, or a connection that has not asked for one."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._nonce, self._request = b"", b""
        self.address, self.group = "", ("", False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = str((transport.get_extra_info("peername") or ("?",))[0])
        self.group = (network(self.address), False)
        _probe(transport.get_extra_info("socket"))
        self._relay.arrived(self)
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(HANDSHAKE_S, self._refuse, f"no request within {HANDSHAKE_S:g} s")

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            super().data_received(data)
            return
        self._request += data
        if not self._nonce and self._request.startswith(OF_ZEROMQ):
            self._forward()
        elif not self._nonce and not GREETING.startswith(self._request):
            self._refuse("no greeting of a worker")
        elif not self._nonce and self._request == GREETING:
            self._nonce, self._request = secrets.token_bytes(NONCE_BYTES), b""
            self._relay.greeted(self)
            self.transport.write(self._nonce)
        elif len(self._request) > REQUEST_BYTES:
            self._refuse("more than a request")
        elif self._nonce and len(self._request) == REQUEST_BYTES:
            self._ask()

    def _forward(self) -> None:
        self._limit.cancel()
        try:
            self._relay.greeted_by_zeromq(self, self._request)
        except ValueError as error:
            self._refuse(str(error))

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
