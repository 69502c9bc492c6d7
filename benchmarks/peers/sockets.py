"""What does a bare TCP connection between two processes move over loopback? The ceiling for anything built on one.

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
"""The fastest of several sizes between 64 KB and 4 MB."""
GOING, COMING = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK))
PING = 4096
PINGS = 1000
ORDER = struct.Struct("!cQ")
"""What the far end shall do next, and with how many bytes, or how often."""


@dataclass(frozen=True)
class Line:
    """What a connection moved: GB/s one way, GB/s of both directions together, and the median round trip of 4 KB."""

    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    ping_pong_ms: float


def measure(size: int, repetitions: int = 5) -> Line:
    """Medians over some repetitions with `size` bytes each way."""
    with closing(Pair()) as pair:
        pair.both_ways(size)
        turns = [(pair.one_way(size), pair.both_ways(size)) for _ in range(repetitions)]
        one_way_s, both_ways_s = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        ping_s = statistics.median(pair.pings(PINGS))
    return Line(size / one_way_s / 1e9, 2 * size / both_ways_s / 1e9, 1000 * ping_s)


class Pair:
    """A connection to a process that sends and receives as it is told. Each call returns the seconds that it took."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT_S)
            port = str(server.getsockname()[1])
            self._far = Child("benchmarks.peers.sockets", "far_end", {"PEER_PORT": port})
            try:
                self._connection = _limited(server.accept()[0])
            except BaseException:
                self._far.close(0.0)
                raise

    def one_way(self, size: int) -> float:
        """To the far end, until it says that all is there."""
        return self._timed(b">", size, send)

    def both_ways(self, size: int) -> float:
        """The same number of bytes in each direction at once."""
        return self._timed(b"=", size, exchange)

    def pings(self, times: int) -> list[float]:
        """4 KB there and back, again and again."""
        self._order(b".", times)
        return [self._ping() for _ in range(times)]

    def _ping(self) -> float:
        began = time.perf_counter()
        send(self._connection, PING)
        receive(self._connection, PING)
        return time.perf_counter() - began

    def _order(self, kind: bytes, number: int) -> None:
        self._connection.sendall(ORDER.pack(kind, number))
        receive(self._connection, 1)  # The far end is ready.

    def _timed(self, kind: bytes, size: int, work: Callable[[socket.socket, int], None]) -> float:
        self._order(kind, size)
        began = time.perf_counter()
        work(self._connection, size)
        receive(self._connection, 1)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the connection and the process."""
        self._connection.close()
        self._far.close()


def far_end() -> None:
    """The other process: does what it is told until the connection ends."""
    with _limited(socket.create_connection(("127.0.0.1", int(os.environ["PEER_PORT"])), LIMIT_S)) as connection:
        while order := connection.recv(ORDER.size, socket.MSG_WAITALL):
            kind, number = ORDER.unpack(order)
            connection.sendall(b"!")
            {b">": take, b"=": swap, b".": pong}[kind](connection, number)


def take(connection: socket.socket, size: int) -> None:
    """Receive, and say that all is there."""
    receive(connection, size)
    connection.sendall(b"!")


def swap(connection: socket.socket, size: int) -> None:
    """The far end's half of both ways at once."""
    exchange(connection, size)
    connection.sendall(b"!")


def pong(connection: socket.socket, times: int) -> None:
    """Answer 4 KB with 4 KB."""
    for _ in range(times):
        receive(connection, PING)
        send(connection, PING)


def send(connection: socket.socket, size: int) -> None:
    """So many bytes, the same chunk of memory again and again."""
    for _ in range(size // CHUNK):
        connection.sendall(GOING)
    connection.sendall(GOING[: size % CHUNK])


def receive(connection: socket.socket, size: int) -> None:
    """So many bytes, over the same chunk of memory again and again."""
    while size:
        came = connection.recv_into(COMING[: min(CHUNK, size)])
        if not came:
            raise ConnectionError(f"the other end is gone, {size} bytes before the end")
        size -= came


def exchange(connection: socket.socket, size: int) -> None:
    """So many bytes in each direction at once."""
    sender = threading.Thread(target=send, args=(connection, size), daemon=True)
    sender.start()
    receive(connection, size)
    sender.join(LIMIT_S)


def _limited(connection: socket.socket) -> socket.socket:
    """No wait is longer than the limit. The socket stays a blocking one, which is faster than Python's own time-out."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for one in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, one, struct.pack("ll", int(LIMIT_S), 0))
    return connection


if __name__ == "__main__":
    line = measure(int(sys.argv[1]))
    print(f"{line.one_way_gb_per_s:.2f} GB/s one way, {line.both_ways_gb_per_s:.2f} GB/s both ways together, ", end="")
    print(f"{line.ping_pong_ms:.4f} ms for 4 KB there and back")
