"""A worker's connections with the relay: between its sockets and another machine's, in a thread.

The transport's sockets know nothing of relays. For each member on another machine a sending socket connects with this
thread, and this thread with the listening socket:

    sender -- local socket --> thread == relay == thread of the other worker -- its port --> receiver

Local sockets have names without a file, and accept this process alone (Linux). Those for services are ports of the
loopback interface, whose traffic the kernel counts; a service checks the keys of those who connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import struct
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stretto.relay import GREETING, HANDSHAKE_S, JOINED, NONCE_BYTES, End, Pump, Stream, digest, signed, stream_to
from stretto.transport.worker_endpoint import Endpoint

RETRY_S = 0.1
"""Seconds between two attempts to connect with the relay."""
BACKLOG = 4
LOOPBACK = "127.0.0.1"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class RelayAccess:
    """Address of the relay, host:port, and the secret of the run's workers.

    Members that have not connected with each other after `after_s` use the relay; all of them from the beginning if it
    is 0.
    """

    address: str
    secret: bytes = field(repr=False)
    after_s: float = 0.0


Request: TypeAlias = tuple[End, Stream]


class Tunnels:
    """Connects local sockets with the relay until `close`, each for its request.

    Streams of `receives` are connected with the socket that listens at the address `own`.
    """

    def __init__(
        self,
        relay: RelayAccess,
        listeners: Mapping[Request, socket.socket],
        receives: Sequence[Stream] = (),
        own: tuple[str, int] = ("", 0),
    ) -> None:
        self._relay, self._listeners, self._receives, self._own = relay, listeners, receives, own
        with contextlib.ExitStack() as made:
            for one in listeners.values():
                made.callback(one.close)
            self._loop = asyncio.new_event_loop()
            made.pop_all()
        self._closing = asyncio.Event()
        self._limit_s = 0.0
        self._tasks, self._pumps = set[asyncio.Task[None]](), set[Pump]()
        self._thread = threading.Thread(target=self._run, name="relay tunnels", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Close all connections, once closed sockets' messages have been sent or after this time."""
        self._limit_s = limit_s
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._connect_all())

    async def _connect_all(self) -> None:
        with contextlib.ExitStack() as servers:
            for request, listener in self._listeners.items():
                accepted = functools.partial(_Sending, self, request)
                is_local = listener.family == socket.AF_UNIX
                create = self._loop.create_unix_server if is_local else self._loop.create_server
                servers.callback((await create(accepted, sock=listener)).close)
            for stream in self._receives:
                self.begin(self._receive(stream))
            await self._closing.wait()
            for listener in self._listeners.values():
                self._loop.remove_reader(listener)  # an accepted connection has to be made before its server closes
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(others)
        for pump in self._pumps:
            if not pump.is_joined:
                pump.transport.abort()
        ends = [asyncio.create_task(pump.is_lost.wait()) for pump in self._pumps]
        if ends:
            await asyncio.wait(ends, timeout=self._limit_s)
        for pump in self._pumps:
            pump.transport.abort()
        await asyncio.gather(*ends)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task of the thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note(self, pump: Pump) -> None:
        """Note a connection, which is to be closed at the end."""
        self._pumps = {one for one in self._pumps if not one.is_lost.is_set()} | {pump}

    async def send(self, local: Pump, request: Request) -> None:
        """Join the connection of a local socket with the relay. If that fails, the socket connects again."""
        try:
            relayed = await self._asked(*request)
        except OSError:
            await asyncio.sleep(RETRY_S)
            local.close()
            return
        local.join(relayed)
        relayed.join(local, relayed.received)

    async def _receive(self, stream: Stream) -> None:
        """Join the relay with this worker's listening socket, again and again."""
        while True:
            with contextlib.suppress(OSError):
                relayed = await self._asked(b"r", stream)
                _, local = await self._loop.create_connection(Pump, *self._own)
                self.note(local)
                local.join(relayed)
                relayed.join(local, relayed.received)
                await relayed.is_lost.wait()
            await asyncio.sleep(RETRY_S)

    async def _asked(self, end: End, stream: Stream) -> _Relayed:
        """Return a connection with the relay that is joined with the other end of a stream. Raise OSError."""
        host, _, port = self._relay.address.rpartition(":")
        ask = functools.partial(signed, end, stream, secret=self._relay.secret)
        async with asyncio.timeout(HANDSHAKE_S):  # the kernel waits longer after each lost attempt
            _, made = await self._loop.create_connection(lambda: _Relayed(ask), host, int(port))
        self.note(made)
        await made.has_reply.wait()
        if made.is_lost.is_set():
            raise ConnectionResetError("the relay has closed the connection")
        return made


class RelayTunnels(Tunnels):
    """Connects a worker with the members of these public keys, whichever are there, until `close`."""

    def __init__(self, relay: RelayAccess, own: Endpoint, generation: int, members: Sequence[bytes]) -> None:
        self._names = dict[bytes, bytes]()
        me = digest(own.public)
        sends: dict[Request, socket.socket] = {}
        for public in members:
            listener = sends[b"s", Stream(me, digest(public), generation)] = _listening()
            self._names[public] = bytes(listener.getsockname())
        receives = [Stream(digest(public), me, generation) for public in members]
        super().__init__(relay, sends, receives, (own.host, own.port))

    def name(self, public: bytes) -> bytes:
        """Return the address at which a sending socket of this process reaches a member."""
        return self._names[public]


class ServiceTunnels(Tunnels):
    """Connects this process with services, at `addresses` of this machine in place of theirs."""

    def __init__(self, relay: RelayAccess, services: Sequence[str]) -> None:
        made: dict[Request, socket.socket] = {
            (b"c", stream_to(one)): socket.create_server((LOOPBACK, 0)) for one in services
        }
        self.addresses = ["{}:{}".format(*one.getsockname()) for one in made.values()]
        super().__init__(relay, made)


class _Sending(Pump):
    """Connection of a sending socket of this process."""

    def __init__(self, tunnels: Tunnels, request: Request) -> None:
        super().__init__()
        self._tunnels, self._request = tunnels, request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._tunnels.note(self)
        accepted = transport.get_extra_info("socket")
        if accepted.family == socket.AF_UNIX:
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[0] != os.getpid():
                self.close()
                return
        self._tunnels.begin(self._tunnels.send(self, self._request))


class _Relayed(Pump):
    """Connection with the relay, which reads no more from the moment when it is joined until it has another one."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self._ask = ask
        self._nonce = b""
        self.received = b""
        """First bytes of the other end."""
        self.has_reply = asyncio.Event()
        """Set once the relay has joined the stream, or has closed the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(GREETING)

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            super().data_received(data)
            return
        missing = NONCE_BYTES - len(self._nonce)
        self._nonce, data = self._nonce + data[:missing], data[missing:]
        if missing and len(self._nonce) == NONCE_BYTES:
            self.transport.write(self._ask(self._nonce))
        if data:
            self.received = data[len(JOINED) :]
            self.transport.pause_reading()
            self.has_reply.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.has_reply.set()


def _listening() -> socket.socket:
    """Return a listening socket with a name of its own, which is no file."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0stretto-{secrets.token_hex(12)}")
    made.listen(BACKLOG)
    return made
