"""Sends the output of workers of this machine to the log files in the directory of the run that they have joined."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from stretto.launcher.endpoints import Servers
from stretto.membership.output_lines import OutputAppended, OutputStream, connection_of

POLL_S = 0.05
ANSWER_S = 1.0
"""Time in seconds after which a message without a reply is repeated."""
CLOSE_S = 2.0
"""Longest time in seconds without a reply to the last output at the end."""

_ENCODER = msgspec.msgpack.Encoder()
_REPLY = msgspec.msgpack.Decoder(OutputAppended)


class _Link:
    """Connection for the output of one process."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.stream = socket, OutputStream()
        self.sent_at = -ANSWER_S


class OutputSender(threading.Thread):
    """Thread that sends output, which `add` takes without a wait. What cannot be sent never stops a worker."""

    def __init__(self, servers: Servers, failure_timeout_s: float) -> None:
        super().__init__(name="output", daemon=True)
        self._servers, self._failure_timeout_s = servers, failure_timeout_s
        self._links: dict[tuple[int, int], _Link] = {}
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._limit: float | None = None
        self._silence_s = 0.0
        """Seconds without a reply after which the last output is given up."""

    def add(self, worker: int, rank: int, data: bytes) -> None:
        """Queue output of a process."""
        with self._lock:
            if (worker, rank) not in self._links:
                self._links[worker, rank] = self._connected(worker, rank)
            self._links[worker, rank].stream.add(data)
        self._wake.set()

    def run(self) -> None:
        """Send output until closed, and then the rest, while replies come."""
        while self._limit is None or time.monotonic() < self._limit:
            with self._lock:
                waiting = [link for link in self._links.values() if self._advance(link)]
            if self._limit is not None and not waiting:
                break
            self._wake.wait(POLL_S if waiting else None)
            self._wake.clear()
        for link in self._links.values():
            link.socket.close(linger=0)

    def close(self, limit_s: float) -> None:
        """Send the rest; give it up after this long without a reply."""
        self._silence_s, self._limit = limit_s, time.monotonic() + limit_s
        self._wake.set()
        self.join()

    def _advance(self, link: _Link) -> bool:
        """Take replies and send the message that is due; return True if output waits."""
        import zmq

        while link.socket.poll(0):
            if link.stream.receive(_REPLY.decode(link.socket.recv())):
                link.sent_at = -ANSWER_S
                self._wake.set()
                if self._limit is not None:
                    self._limit = time.monotonic() + self._silence_s
        if (message := link.stream.message()) is None:
            return False
        if time.monotonic() - link.sent_at >= ANSWER_S:
            try:
                link.socket.send(_ENCODER.encode(message), zmq.NOBLOCK)
                link.sent_at = time.monotonic()
            except zmq.Again:  # not connected yet
                pass
        return True

    def _connected(self, worker: int, rank: int) -> _Link:
        from stretto.membership.client import side_connection
        from stretto.security import worker_keys

        servers, name = self._servers, connection_of(worker, rank)
        assert servers.coordinator_at is not None
        keys = worker_keys(servers.keys_of(b"worker %d" % worker))
        return _Link(side_connection(name, servers.coordinator_at, keys, self._failure_timeout_s))
