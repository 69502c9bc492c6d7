"""Sockets of one worker in one generation: encrypted, and open to the members of the generation alone.

Each worker has a listening socket, and a sending connection for each other member (`secure_connections.py`). A
message's sender is the worker whose key the connection has.

    port reserved, connections are refused  ->  open to the keys of the members  ->  closed to new connections

The address of a worker is its host, its port, its public key, and a name of its machine. The secret key stays in the
process. With a relay (`stretto/relay.py`), connections between two machines that do not connect directly pass through
it, or all of them; nothing else differs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zmq.utils import z85

from stretto.errors import TransportError
from stretto.free_ports import PortsInUseError, at_free_port
from stretto.relay import network
from stretto.transport.host_memory import host_name
from stretto.transport.noise import AuthenticationError, Handshake
from stretto.transport.relay_tunnels import RelayAccess, RelayTunnels
from stretto.transport.secure_connections import (
    RETRY_S,
    Address,
    IncomingMessage,
    ReceivingConnection,
    SendingConnection,
    disconnect,
)
from stretto.transport.worker_endpoint import Endpoint

BACKLOG = 64
"""Connections that are accepted before the next messages are received."""
QUEUE = 1024
"""Connections that the kernel keeps until they are accepted."""
STRANGERS = 64
"""Connections beside those of members that may be without a confirmed handshake; a further one closes one of them."""
LINGER_S = 2.0
"""Seconds that the last messages may take to be sent when a worker leaves gracefully, and to arrive from a member that
accepts none."""
REFUSED = 2.5
"""Multiple of the time after which the relay is used for missing connections, for those that are refused: a member that
does not listen yet refuses them, too."""
ABORT_S = 0.05
"""Seconds that a relay may take to forward the end of connections when a generation is aborted."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret key of a worker process."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


class ReservedPort:
    """Port of the next generation, a free one of `ports`. Connections to it are refused until `MemberSockets` listens
    on it.
    """

    def __init__(self, host: str, keys: KeyPair, ports: range | None = None) -> None:
        self.keys = keys
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if ports is None:
                self.socket.bind((host, 0))
            else:
                at_free_port(ports, lambda port: self.socket.bind((host, port)))
        except PortsInUseError as error:
            self.socket.close()
            raise TransportError(str(error)) from error
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


class MemberSockets:
    """Sockets of the worker of rank `rank` among the members' endpoints.

    Any thread may call `wake`; the other methods are called by one thread at a time. A wait of a `Watch` needs no lock.
    With a `relay`, connections with other machines pass through it, as connections of this generation: all of them, or
    those that are missing after a while. Machines that were not reached directly are added to `closed`, and connections
    with these pass through it from the beginning.
    """

    def __init__(
        self,
        port: ReservedPort,
        rank: int,
        members: Sequence[Endpoint],
        relay: RelayAccess | None = None,
        generation: int = 0,
        closed: set[str] | None = None,
    ) -> None:
        self._own, self._secret, self._relay, self._generation = port.endpoint, port.keys.secret, relay, generation
        self._ends, self._closed = members, closed if closed is not None else set()
        self._members = {one: end.public for one, end in enumerate(members) if one != rank}
        elsewhere = [one for one in self._members if relay is not None and self._is_elsewhere(members[one])]
        relayed = {one for one in elsewhere if self._is_relayed_at_first(members[one])}
        self._direct = set(elsewhere) - relayed
        """Ranks of the members to which connections pass through the relay if they are missing after a while."""
        self._relay_at = self._refused_until = math.inf
        if relay is not None and self._direct:
            self._relay_at, self._refused_until = (time.monotonic() + part * relay.after_s for part in (1, REFUSED))
        with contextlib.ExitStack() as made:
            made.callback(port.close)
            self._wake_sender, self._wake_receiver = (made.enter_context(one) for one in socket.socketpair())
            self._wake_sender.setblocking(False)
            port.socket.setblocking(False)
            port.socket.listen(QUEUE)
            self._tunnels = list[RelayTunnels]()
            self._local = self._through_relay(relayed)
            """Addresses that lead to members through the relay."""
            made.pop_all()
        self._listener: socket.socket | None = port.socket
        self._waking = threading.Lock()
        self._senders = {
            one: SendingConnection(
                self._local.get(one) or _address(members[one]), generation, rank, functools.partial(self._call, one)
            )
            for one in self._members
        }
        self._arriving = list[ReceivingConnection]()
        """Connections that have sent no message yet."""
        self._seen = set[bytes]()
        """First messages of members' handshakes."""
        self._receivers = dict[int, ReceivingConnection]()
        self._ended, self._refused, self._redirected = list[int](), list[str](), list[str]()
        self._accepting_from = 0.0
        """Time before which no connection is accepted, since this process had no descriptor for the last one."""

    def _is_elsewhere(self, other: Endpoint) -> bool:
        return not self._own.machine or self._own.machine != other.machine

    def _is_relayed_at_first(self, other: Endpoint) -> bool:
        assert self._relay is not None
        return not self._relay.after_s or other.machine in self._closed

    def _through_relay(self, ranks: Collection[int]) -> dict[int, Address]:
        """Open connections of these members with the relay; return the addresses that lead to them."""
        if not ranks:
            return {}
        assert self._relay is not None
        publics = {one: self._members[one] for one in ranks}
        made = RelayTunnels(self._relay, self._own, self._generation, [*publics.values()])
        self._tunnels.append(made)
        return {one: (socket.AF_UNIX, made.name(public)) for one, public in publics.items()}

    def _relay_missing(self, now: float) -> None:
        """Let connections that are missing pass through the relay; later those to members that may not listen yet."""
        is_last = now >= self._refused_until
        self._relay_at = math.inf if is_last else self._refused_until
        unsent = {one for one in self._direct if not self._senders[one].has_connected}
        unsent -= set() if is_last else {one for one in unsent if self._senders[one].is_refused}
        unreceived = {one for one in self._direct if one not in self._receivers}
        self._local |= self._through_relay((unsent | unreceived) - self._local.keys())
        for one in unsent:
            if not self._senders[one].is_refused:
                self._closed.add(self._ends[one].machine)
            self._senders[one].redirect(self._local[one])
            self._redirected.append(self._ends[one].host)
        self._direct -= unsent

    def _call(self, rank: int, preface: bytes) -> Handshake:
        return Handshake(True, z85.decode(self._secret), z85.decode(self._members[rank]), preface)

    def _answer(self, rank: int, preface: bytes) -> Handshake | None:
        public = self._members.get(rank)
        return None if public is None else Handshake(False, z85.decode(self._secret), z85.decode(public), preface)

    def send(self, rank: int, head: bytes, payload: Any) -> None:
        """Send a message, whose bytes are copied."""
        if self._senders[rank].send(head, payload):
            self.wake()

    def watch(self) -> Watch:
        """Return a wait for the next events of the sockets."""
        now, found = time.monotonic(), Watch(self._wake_receiver)
        if self._listener is not None:
            found.add(self._listener if self._accepting_from <= now else None, until=self._accepting_from)
        found.add(None, until=self._relay_at)
        for sender in self._senders.values():
            if sender.lost_at is None:
                found.add(None, until=sender.due)
                if sender.socket is not None:
                    found.add(sender.socket, sender.events)
        for one in self._arriving:
            found.add(one.socket)
            found.add(None, until=one.until)
        for rank, one in self._receivers.items():
            found.add(one.socket)
            if (lost_at := self._senders[rank].lost_at) is not None:
                found.add(None, until=lost_at + LINGER_S)
        return found

    def wake(self) -> None:
        """End a wait. Callable from any thread."""
        with self._waking, contextlib.suppress(OSError):
            self._wake_sender.send(b"!")

    def proceed(self, ready: Collection[int]) -> None:
        """Accept connections, connect with members, and send unsent messages."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        now = time.monotonic()
        if self._relay_at <= now:
            self._relay_missing(now)
        for sender in self._senders.values():
            is_ready = sender.due <= now or (sender.socket is not None and sender.socket.fileno() in ready)
            if is_ready and sender.lost_at is None:
                sender.proceed()

    def receive(self, ready: Collection[int], most: int) -> Iterator[tuple[int, IncomingMessage]]:
        """Yield ranks and messages that have arrived, equally many of each. Note the connections that have ended."""
        found = [one for one in (*self._arriving, *self._receivers.values()) if one.socket.fileno() in ready]
        for one in found:
            try:
                for message in itertools.islice(one.messages(), max(1, most // len(found))):
                    if not self._is_confirmed(one):
                        break
                    assert one.rank is not None
                    yield one.rank, message
            except (OSError, AuthenticationError) as error:
                self._end(one, isinstance(error, AuthenticationError))
        self._end_late_ones()

    def ended(self) -> list[int]:
        """Return the ranks of members whose connections have ended since the last call, after all their messages."""
        found, self._ended = self._ended, []
        return found

    def refused(self) -> list[str]:
        """Return the addresses of connections without a member's key since the last call."""
        found, self._refused = self._refused, []
        return found

    def redirected(self) -> list[str]:
        """Return the hosts of members to which the relay passes messages on, since they were not reached directly.

        Those since the last call.
        """
        found, self._redirected = self._redirected, []
        return found

    def accept_no_more(self) -> None:
        """Refuse further connections, and close those of strangers."""
        if self._listener is not None:
            disconnect(self._listener, is_abort=False)
            self._listener = None
        for one in self._arriving:
            one.close()
        self._arriving.clear()

    def close(self, linger_s: float | None, without: Collection[int] = ()) -> None:
        """Close all connections once the messages are sent, or after this time; without a time, abort them.

        Nothing more is sent to the members `without`.
        """
        self.accept_no_more()
        limit = None if linger_s is None else time.monotonic() + linger_s
        for rank, sender in self._senders.items():
            sender.close(None if rank in without else limit)
        for receiver in self._receivers.values():
            receiver.close()
        with self._waking:  # a descriptor that is closed during a send may be another file's before it
            self._wake_sender.close()
        self._wake_receiver.close()
        for tunnels in self._tunnels:
            tunnels.close(ABORT_S if linger_s is None else linger_s)

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(BACKLOG):
                accepted, address = listener.accept()
                one = ReceivingConnection(accepted, str(address[0]), self._generation, self._answer, self._seen)
                self._arriving.append(one)
                if len(self._arriving) > STRANGERS + len(self._members):
                    self._end(self._oldest_stranger())
        except BlockingIOError:
            pass
        except OSError:
            self._accepting_from = time.monotonic() + RETRY_S

    def _oldest_stranger(self) -> ReceivingConnection:
        """Return a connection to close: the oldest of those of one address and rank, where these are the most.

        It is never the last one with the handshake of a member: a member that was replied to does not connect again.
        """
        last = {one.rank: one for one in self._arriving}
        alike = Counter((network(one.address), one.rank) for one in self._arriving)
        others = (one for one in self._arriving if one.rank is None or last[one.rank] is not one)
        return max(others, key=lambda one: alike[network(one.address), one.rank])

    def _is_confirmed(self, one: ReceivingConnection) -> bool:
        """Return True if the connection is that of its member, which its first message shows."""
        assert one.rank is not None
        if one in self._arriving:
            self._arriving.remove(one)
            if self._receivers.setdefault(one.rank, one) is not one:
                one.close()
        return self._receivers.get(one.rank) is one

    def _end(self, one: ReceivingConnection, is_refused: bool = False) -> None:
        one.close()
        if one in self._arriving:
            self._arriving.remove(one)
            self._refused += [one.address] if is_refused else []
        elif one.rank is not None and self._receivers.get(one.rank) is one:
            self._receivers.pop(one.rank, None)
            self._ended.append(one.rank)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._arriving if one.until <= now]:
            self._end(one)
        for rank, one in [*self._receivers.items()]:
            lost_at = self._senders[rank].lost_at
            if lost_at is not None and lost_at + LINGER_S <= now:
                self._end(one)


def _address(end: Endpoint) -> Address:
    family, *_, address = socket.getaddrinfo(end.host, end.port, type=socket.SOCK_STREAM)[0]
    return family, address


class Watch:
    """Sockets, and times, for one of which to wait. Bytes that arrive at `wake` are read."""

    def __init__(self, wake: socket.socket) -> None:
        self._wake, self._poller, self._until = wake, select.poll(), math.inf
        self.add(wake)

    def add(self, one: socket.socket | None, events: int = select.POLLIN, until: float = 0.0) -> None:
        """Add events of a socket, or, without a socket, a time."""
        if one is None:
            self._until = min(self._until, until)
        else:
            self._poller.register(one, events)

    def wait(self) -> set[int]:
        """Return the descriptors of the sockets with events."""
        left_ms = 1000 * (self._until - time.monotonic())
        found = {one for one, _ in self._poller.poll(None if math.isinf(left_ms) else max(0, math.ceil(left_ms)))}
        if self._wake.fileno() in found:
            self._wake.recv(1 << 10)
        return found
