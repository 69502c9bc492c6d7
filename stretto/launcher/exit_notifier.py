"""The launcher's word to the coordinator: it sees a process end before anybody misses it."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from stretto.launcher.endpoints import Servers
from stretto.membership.coordinator import Gone

RECONNECT_MS = 20


class ExitNotifier:
    """Tells the coordinator who is gone. What it has told is told again to one that was started again."""

    def __init__(self, servers: Servers, first: int = 0) -> None:
        """`first` is the lowest number of this launcher's workers, which tells it from others."""
        import zmq  # only where there is a coordinator

        assert servers.coordinator_at is not None
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"launcher %d" % first)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        if servers.keys is not None:
            own = servers.keys.worker
            self._socket.curve_serverkey = servers.keys.server.public.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = own.public.encode(), own.secret.encode()
        self._socket.connect(f"tcp://{servers.coordinator_at}")
        self._said: dict[int, bytes] = {}
        self._full = zmq.Again

    def gone(self, worker: int, life: int, why: str, will_return: bool) -> None:
        """This life of a worker has ended, and there will be another or not."""
        self._said[worker] = msgspec.msgpack.encode(Gone(worker, life, why, will_return))
        self._say(self._said[worker])

    def repeat(self) -> None:
        """Tell of all who are gone again."""
        for said in self._said.values():
            self._say(said)

    def _say(self, said: bytes) -> None:
        """Nobody waits for a coordinator that takes nothing; by its failure timeout it finds out for itself."""
        with contextlib.suppress(self._full):
            self._socket.send(said)

    def close(self) -> None:
        """Let go, whatever was not sent."""
        self._context.destroy(linger=0)
