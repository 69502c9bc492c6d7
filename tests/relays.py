"""A relay in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from stretto.relay import Relay, serving
from stretto.transport.relay_tunnels import RelayAccess

SECRET = b"of the run"


def received(one: socket.socket, count: int) -> bytes:
    """Return this number of bytes of a connection, or fewer if it ends."""
    found = b""
    while len(found) < count and (piece := one.recv(count - len(found))):
        found += piece
    return found


class RecordingRelay(Relay):
    """Relay whose connections can all be closed, as by the end of its process."""

    def __init__(self, coordinator: str | None = None, services: Sequence[str] = ()) -> None:
        self.notices = list[str]()
        self._connections = dict[Any, None]()
        super().__init__(SECRET, self.notices.append, coordinator, services, is_way=True)

    @property
    def made(self) -> int:
        """Number of connections so far."""
        return len(self._connections)

    def arrived(self, connection: Any) -> None:
        """Note a connection."""
        self._connections[connection] = None
        super().arrived(connection)

    async def end(self) -> None:
        """Close all connections."""
        for one in self._connections:
            one.transport.abort()
        await asyncio.sleep(0)  # they are closed in the next iteration of the loop


class RelayThread:
    """Relay at a port of its own, which can be stopped and started again there."""

    def __init__(self, port: int = 0, coordinator: str | None = None, services: Sequence[str] = ()) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self.relay = RecordingRelay(coordinator, services)
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @property
    def access(self) -> RelayAccess:
        return RelayAccess(f"127.0.0.1:{self.port}", SECRET)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        task = self._loop.create_task(serving(self._listener, self.relay))
        await self._is_over.wait()
        self._loop.remove_reader(self._listener)  # an accepted connection has to be made before its server closes
        if others := asyncio.all_tasks() - {task, asyncio.current_task()}:
            await asyncio.wait(others)
        task.cancel()
        await asyncio.wait([task])
        await self.relay.end()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(60)


@contextlib.contextmanager
def relay(coordinator: str | None = None, services: Sequence[str] = ()) -> Iterator[RelayThread]:
    """Yield a relay."""
    made = RelayThread(0, coordinator, services)
    try:
        yield made
    finally:
        made.stop()


@functools.cache
def shared_relay() -> RelayThread:
    """Return the relay of this process, for tests that do not disturb it."""
    return RelayThread()
