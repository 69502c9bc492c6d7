"""Sockets of one worker in one generation: encrypted (CURVE), and open to the members of the generation alone.

Each worker has a listening socket, and a sending socket for each other member. The two connections of two workers carry
messages in one direction each. A message's sender is the worker whose key the connection has, whatever it claims.

    port reserved, connections are refused  ->  open to the keys of the members  ->  closed to new connections

The address of a worker is its host, its port, its public key, and a name of its machine. The secret key stays in the
process. With a relay (`stretto/relay.py`), connections between two machines pass through it; nothing else differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import encode

from stretto.errors import TransportError, explain
from stretto.transport.host_memory import host_name
from stretto.transport.relay_tunnels import RelayAccess, RelayTunnels

HANDSHAKE_MS = 2000
"""Milliseconds after which a connection without the key of a member is closed."""
RETRY_MS = 5
"""Milliseconds between two attempts to connect with a member that does not listen yet."""
BACKLOG = 64
WAITING = 16
"""Messages of one member that are received before this worker reads them; then its connection is not read."""
LINGER_MS = 2000
"""Milliseconds that the last messages may take to be sent when a worker leaves gracefully."""
ABORT_MS = 50
"""Milliseconds that the notice of an abort may take."""
SO_ATTACH_FILTER, DROP_ALL = 26, struct.pack("HBBI", 0x06, 0, 0, 0)
"""Option of Linux that filters the packets of a socket, and the filter that drops those of new connections."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a worker: where it listens, its public key, and the name of its machine, empty if unknown."""

    host: str
    port: int
    public: bytes
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port} {self.public.decode()} {self.machine}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint that a text describes.

        >>> str(Endpoint.parse("10.0.0.1:7 rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"))
        '10.0.0.1:7 rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'
        """
        place, public, machine = (*text.split(" "), "", "")[:3]
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or len(public) != 40:
            problem, expected = "a worker's address can't be read", "host:port, a space, and a public key"
            to_type = "the same options and the same version of Stretto on all hosts"
            raise TransportError(explain(problem, got=repr(text[:100]), expected=expected, to_type=to_type))
        return cls(host, int(port), public.encode(), machine)

    @property
    def url(self) -> str:
        """Address for ZeroMQ."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret key of a worker process."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


class ReservedPort:
    """Port of the next generation. Connections to it are refused until `MemberSockets` listens on it."""

    def __init__(self, host: str, keys: KeyPair) -> None:
        self.keys = keys
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.bind((host, 0))
        except OSError:
            self.socket.close()
            raise
        self.endpoint = Endpoint(host, self.socket.getsockname()[1], keys.public, machine_name())

    def close(self) -> None:
        """Release the port."""
        self.socket.close()


@functools.cache
def machine_name() -> str:
    """Return a name of this machine and its network, a digest; empty if there is none."""
    with contextlib.suppress(OSError):
        return hashlib.blake2b(host_name().encode(), digest_size=16).hexdigest()
    return ""


@dataclass(frozen=True, slots=True)
class Received:
    """Message of the member of a rank."""

    rank: int
    frames: Sequence[Any]
    descriptor: int
    """Connection that the message came by."""


class MemberSockets:
    """Sockets of the worker of rank `rank` among the members' endpoints.

    `receive`, `ended`, `admit` and `poll` are calls of one thread. `send` may be called by others, one at a time. With
    a `relay`, connections with other machines pass through it; they are those of this generation.
    """

    def __init__(
        self,
        port: ReservedPort,
        rank: int,
        members: Sequence[Endpoint],
        largest: int,
        relay: RelayAccess | None = None,
        generation: int = 0,
    ) -> None:
        self._ranks = {one.public: other for other, one in enumerate(members) if other != rank}
        self._own, self._relay = port.endpoint, relay
        self._context: zmq.Context[Any] = zmq.Context()
        self._admission = self._context.socket(zmq.REP)
        self._admission.bind("inproc://zeromq.zap.01")  # before the port is open: without it all keys are admitted
        self._listener, self._guarded = self._listen(port, largest)
        self._tunnels = None
        if relay is not None and (relayed := [end.public for end in members if self._is_relayed(end)]):
            self._tunnels = RelayTunnels(relay, port.endpoint, generation, relayed)
        self._senders = {one: self._connect(port.keys, end) for one, end in enumerate(members) if one != rank}
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        for one in (self._listener, self._admission, self._monitor, self._wake_receiver):
            self._poller.register(one, zmq.POLLIN)

    def _listen(self, port: ReservedPort, largest: int) -> tuple[Any, socket.socket]:
        made = self._socket(zmq.PULL, port.keys)
        made.curve_server = True
        made.rcvhwm, made.maxmsgsize = WAITING, largest
        self._monitor = made.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        guarded = port.socket.dup()
        port.socket.listen(BACKLOG)
        made.setsockopt(zmq.USE_FD, port.socket.detach())
        made.bind(port.endpoint.url)
        return made, guarded

    def _connect(self, keys: KeyPair, end: Endpoint) -> Any:
        made = self._socket(zmq.PUSH, keys)
        made.curve_serverkey = end.public
        made.sndhwm, made.reconnect_ivl = 0, RETRY_MS
        if self._is_relayed(end):
            assert self._tunnels is not None
            made.handshake_ivl = 0  # the relay waits for the other end
            made.connect(self._tunnels.url(end.public))
        else:
            made.connect(end.url)
        return made

    def _is_relayed(self, other: Endpoint) -> bool:
        own = self._own
        return self._relay is not None and other != own and (not own.machine or own.machine != other.machine)

    def _socket(self, kind: int, keys: KeyPair) -> Any:
        made = self._context.socket(kind)
        made.ipv6 = True
        made.handshake_ivl = HANDSHAKE_MS
        made.curve_publickey, made.curve_secretkey = keys.public, keys.secret
        return made

    def send(self, rank: int, frames: Sequence[Any]) -> bool:
        """Send a message, whose bytes are copied. Return False if the member has refused the connection."""
        try:
            self._senders[rank].send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def poll(self) -> None:
        """Wait until a call of `receive`, `admit` or `ended` may have a result, or until `wake`."""
        if self._wake_receiver in dict(self._poller.poll()):
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(1 << 10, socket.MSG_DONTWAIT)

    def wake(self) -> None:
        """End a `poll`. Callable from any thread."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"!")

    def receive(self, most: int | None) -> Iterator[Received]:
        """Yield the messages that have arrived, or the first of them."""
        for _ in itertools.count() if most is None else range(most):
            try:
                frames = self._listener.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            rank, descriptor = int(frames[0].get("User-Id")), int(frames[0].get(zmq.SRCFD))
            yield Received(rank, [frame.buffer for frame in frames], descriptor)

    def ended(self) -> list[int]:
        """Return the connections of others to this worker that have ended."""
        found = []
        while self._monitor.poll(0):
            found.append(int(recv_monitor_message(self._monitor)["value"]))
        return found

    def admit(self) -> list[str]:
        """Admit the connections whose keys are those of members. Return the addresses of refused ones."""
        refused = []
        while self._admission.poll(0):
            version, request, _, address, _, mechanism, *credentials = self._admission.recv_multipart()
            key = encode(credentials[0]) if mechanism == b"CURVE" and len(credentials[0]) == 32 else b""
            rank = self._ranks.get(key)
            if rank is None:
                refused.append(address.decode(errors="replace"))
            verdict = (b"400", b"not a member", b"") if rank is None else (b"200", b"OK", b"%d" % rank)
            self._admission.send_multipart([version, request, *verdict, b""])
        return refused

    def accept_no_more(self) -> None:
        """Drop the packets of further connections, so that no number of them uses up this process's descriptors.

        Only Linux can do so; elsewhere a connection without a key is closed after `HANDSHAKE_MS`.
        """
        instructions = ctypes.create_string_buffer(DROP_ALL)
        program = struct.pack("HP", 1, ctypes.addressof(instructions))
        with contextlib.suppress(OSError):
            self._guarded.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def close(self, linger_ms: int, without: Collection[int] = ()) -> None:
        """Close all sockets once the messages are sent, or after this time. Nothing more is sent to some members."""
        for rank, sender in self._senders.items():
            sender.close(0 if rank in without else linger_ms)
        self._listener.disable_monitor()
        for one in (self._monitor, self._listener, self._admission):
            one.close(0)
        for other in (self._guarded, self._wake_sender, self._wake_receiver):
            other.close()
        self._context.term()
        if self._tunnels is not None:
            self._tunnels.close(linger_ms)
