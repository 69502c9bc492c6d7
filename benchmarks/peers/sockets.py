"""GB/s of a bare TCP connection between two processes over loopback: the upper limit for anything built on one.

python -m benchmarks.peers.sockets 100000000
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from benchmarks.peers.processes import LIMIT_S, Child

CHUNK = 1 << 19
"""Fastest of several sizes between 64 KB and 4 MB."""
OUTGOING, INCOMING = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK))
PING = 4096
PINGS = 1000
REQUEST = struct.Struct("!cQ")
"""Next operation of the far end, and its number of bytes or of repetitions."""


@dataclass(frozen=True)
class Line:
    """Figures of a connection: GB/s one way, GB/s of both directions together, and the median round trip of 4 KB."""

    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    ping_pong_ms: float


def measure(size: int, repetitions: int = 5) -> Line:
    """Return medians over some repetitions with `size` bytes each way."""
    with closing(Pair()) as pair:
        pair.both_ways(size)
        turns = [(pair.one_way(size), pair.both_ways(size)) for _ in range(repetitions)]
        one_way_s, both_ways_s = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        ping_s = statistics.median(pair.pings(PINGS))
    return Line(size / one_way_s / 1e9, 2 * size / both_ways_s / 1e9, 1000 * ping_s)


class Pair:
    """A connection to a process that sends and receives as requested. Each method returns the seconds that it took."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT_S)
            port = str(server.getsockname()[1])
            self._far = Child("benchmarks.peers.sockets", "far_end", {"PEER_PORT": port})
            try:
                self._connection = _with_timeouts(server.accept()[0])
            except BaseException:
                self._far.close(0.0)
                raise

    def one_way(self, size: int) -> float:
        """Send to the far end, until it confirms that it has received everything."""
        return self._timed(b">", size, send)

    def both_ways(self, size: int) -> float:
        """Send the same number of bytes in each direction at the same time."""
        return self._timed(b"=", size, exchange)

    def pings(self, times: int) -> list[float]:
        """Send 4 KB to the far end and back, `times` times."""
        self._request(b".", times)
        return [self._ping() for _ in range(times)]

    def _ping(self) -> float:
        began = time.perf_counter()
        send(self._connection, PING)
        receive(self._connection, PING)
        return time.perf_counter() - began

    def _request(self, kind: bytes, number: int) -> None:
        self._connection.sendall(REQUEST.pack(kind, number))
        receive(self._connection, 1)  # The far end is ready.

    def _timed(self, kind: bytes, size: int, work: Callable[[socket.socket, int], None]) -> float:
        self._request(kind, size)
        began = time.perf_counter()
        work(self._connection, size)
        receive(self._connection, 1)
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the connection and end the process."""
        self._connection.close()
        self._far.close()


def far_end() -> None:
    """Carry out the requested operations in the other process until the connection is closed."""
    with _with_timeouts(socket.create_connection(("127.0.0.1", int(os.environ["PEER_PORT"])), LIMIT_S)) as connection:
        while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
            kind, number = REQUEST.unpack(request)
            connection.sendall(b"!")
            {b">": receive_and_confirm, b"=": exchange_and_confirm, b".": echo}[kind](connection, number)


def receive_and_confirm(connection: socket.socket, size: int) -> None:
    """Receive, and confirm."""
    receive(connection, size)
    connection.sendall(b"!")


def exchange_and_confirm(connection: socket.socket, size: int) -> None:
    """Send and receive at the same time, and confirm."""
    exchange(connection, size)
    connection.sendall(b"!")


def echo(connection: socket.socket, times: int) -> None:
    """Return each 4 KB received."""
    for _ in range(times):
        receive(connection, PING)
        send(connection, PING)


def send(connection: socket.socket, size: int) -> None:
    """Send `size` bytes from one chunk of memory."""
    for _ in range(size // CHUNK):
        connection.sendall(OUTGOING)
    connection.sendall(OUTGOING[: size % CHUNK])


def receive(connection: socket.socket, size: int) -> None:
    """Receive `size` bytes into one chunk of memory."""
    while size:
        received = connection.recv_into(INCOMING[: min(CHUNK, size)])
        if not received:
            raise ConnectionError(f"the other end closed the connection, {size} bytes before the end")
        size -= received


def exchange(connection: socket.socket, size: int) -> None:
    """Send and receive `size` bytes at the same time."""
    sender = threading.Thread(target=send, args=(connection, size), daemon=True)
    sender.start()
    receive(connection, size)
    sender.join(LIMIT_S)


def _with_timeouts(connection: socket.socket) -> socket.socket:
    """Limit every wait with socket options: a blocking socket is faster than one with Python's own timeout."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for one in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, one, struct.pack("ll", int(LIMIT_S), 0))
    return connection


if __name__ == "__main__":
    line = measure(int(sys.argv[1]))
    print(f"{line.one_way_gb_per_s:.2f} GB/s one way, {line.both_ways_gb_per_s:.2f} GB/s both ways together, ", end="")
    print(f"{line.ping_pong_ms:.4f} ms for 4 KB round trip")
