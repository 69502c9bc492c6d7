"""A worker's connections with the relay: between its sockets and the other machine's, in a thread.

The transport's sockets know nothing of relays. For each member on another machine a sending socket connects with this
thread, and this thread with the listening socket:

    sender -- local socket --> thread == relay == thread of the other worker -- its port --> receiver

Local sockets have names without a file, and accept this process alone (Linux).
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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.relay import JOINED, NONCE_BYTES, End, Pump, Stream, digest, signed

if TYPE_CHECKING:
    from stretto.transport.encrypted_sockets import Endpoint

RETRY_S = 0.1
"""Seconds between two attempts to connect with the relay."""
BACKLOG = 4
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class RelayAccess:
    """Address of the relay, host:port, and the secret of the run's workers."""

    address: str
    secret: bytes = field(repr=False)


class RelayTunnels:
    """Connects a worker with the members of these public keys, whichever are there, until `close`."""

    def __init__(self, relay: RelayAccess, own: Endpoint, generation: int, members: Sequence[bytes]) -> None:
        self._relay, self._own, self._generation = relay, own, generation
        with contextlib.ExitStack() as made:
            self._listeners = {public: made.enter_context(_listening()) for public in members}
            self._loop = asyncio.new_event_loop()
            made.pop_all()
        self._closing = asyncio.Event()
        self._limit_s = 0.0
        self._tasks, self._pumps = set[asyncio.Task[None]](), set[Pump]()
        self._thread = threading.Thread(target=self._run, name="relay tunnels", daemon=True)
        self._thread.start()

    def name(self, public: bytes) -> bytes:
        """Return the address at which a sending socket of this process reaches a member."""
        return bytes(self._listeners[public].getsockname())

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
        async with contextlib.AsyncExitStack() as servers:
            for public, listener in self._listeners.items():
                accepted = functools.partial(_Sending, self, public)
                await servers.enter_async_context(await self._loop.create_unix_server(accepted, sock=listener))
                self.begin(self._receive(public))
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
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

    async def send(self, local: Pump, public: bytes) -> None:
        """Join the connection of a sending socket with the relay. If that fails, the socket connects again."""
        try:
            relayed = await self._asked(b"s", self._stream(self._own.public, public))
        except OSError:
            await asyncio.sleep(RETRY_S)
            local.close()
            return
        local.join(relayed)
        relayed.join(local, relayed.received)

    async def _receive(self, public: bytes) -> None:
        """Join the relay with this worker's listening socket, again and again."""
        own, stream = self._own, self._stream(public, self._own.public)
        while True:
            with contextlib.suppress(OSError):
                relayed = await self._asked(b"r", stream)
                _, local = await self._loop.create_connection(Pump, own.host, own.port)
                self.note(local)
                local.join(relayed)
                relayed.join(local, relayed.received)
                await relayed.is_lost.wait()
            await asyncio.sleep(RETRY_S)

    def _stream(self, sender: bytes, receiver: bytes) -> Stream:
        return Stream(digest(sender), digest(receiver), self._generation)

    async def _asked(self, end: End, stream: Stream) -> _Relayed:
        """Return a connection with the relay that is joined with the other end of a stream. Raise OSError."""
        host, _, port = self._relay.address.rpartition(":")
        ask = functools.partial(signed, end, stream, secret=self._relay.secret)
        _, made = await self._loop.create_connection(lambda: _Relayed(ask), host, int(port))
        self.note(made)
        await made.has_reply.wait()
        if made.is_lost.is_set():
            raise ConnectionResetError("the relay has closed the connection")
        return made


class _Sending(Pump):
    """Connection of a sending socket of this process."""

    def __init__(self, tunnels: RelayTunnels, public: bytes) -> None:
        super().__init__()
        self._tunnels, self._public = tunnels, public

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._tunnels.note(self)
        credentials = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        if _CREDENTIALS.unpack(credentials)[0] != os.getpid():
            self.close()
            return
        self._tunnels.begin(self._tunnels.send(self, self._public))


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
