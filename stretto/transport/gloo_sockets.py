"""The sockets of one process group: found for certain, counted to the end, and shut from any thread."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from torch._C._distributed_c10d import Store

from stretto.transport.interface import Traffic
from stretto.transport.tcp_info import tcp_bytes

STILL_S = 0.003
"""How long no byte has moved where messages have come in; and how long gloo has to hear that reading has ended."""
DRAIN_S = 0.05
"""The longest that messages on their way are waited for."""


class GroupSockets:
    """The connections of a gloo group, held under descriptors of our own.

    Each member has published in the store the address where it listens, and each connection has such an address at one
    of its ends: no other socket of the process does, whoever opens some meanwhile. A descriptor of our own stays what
    it is when gloo closes its one and the number is given to somebody else, and it keeps the kernel's counts.
    """

    def __init__(self, store: Store, worker: int, workers: int, opened: frozenset[int]) -> None:
        published = _published(store, workers)
        mine, others = published[worker : worker + 1], published[:worker] + published[worker + 1 :]
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._alone, self._shut = workers == 1, False
        for descriptor in sockets_of_process():
            one = _connection(descriptor)
            if one is None:
                continue
            certain = _is_in(one.getsockname(), one.family, mine) or _is_in(one.getpeername(), one.family, others)
            if certain or (not published and descriptor in opened):
                self._held.append(one)
            else:
                one.close()

    def __len__(self) -> int:
        return len(self._held)

    def shut(self) -> None:
        """Shut all connections; who waits at either end gets an error.

        Gloo forgets an operation whose message is cut in the middle, and its thread sleeps until the time-out. So
        messages on their way come in first; then reading ends, which gloo hears in good order, and then writing.
        """
        with self._lock:
            if self._shut:
                return
            self._wait_until_still()
            self._shut_all(socket.SHUT_RD)
            time.sleep(STILL_S)
            self._shut_all(socket.SHUT_RDWR)
            self._shut = True

    def traffic(self) -> Traffic | None:
        """The bytes that the kernel saw leave and come, repeats included; None where it does not tell."""
        pairs = [pair for one in self._held if (pair := tcp_bytes(one.fileno())) is not None]
        if not pairs and not self._alone:
            return None
        return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)

    def close(self) -> None:
        """Let go of our descriptors."""
        with self._lock:
            for one in self._held:
                one.close()
            self._held.clear()

    def __del__(self) -> None:
        self.close()

    def _wait_until_still(self) -> None:
        end, last = time.monotonic() + DRAIN_S, None
        while last != (now := self.traffic()) and time.monotonic() < end:
            last = now
            time.sleep(STILL_S)

    def _shut_all(self, how: int) -> None:
        for one in self._held:
            with contextlib.suppress(OSError):
                one.shutdown(how)


def sockets_of_process() -> dict[int, str]:
    """The descriptors of this process that are sockets, each with the name of its socket, which none has after it.

    Nothing where the system does not list them.
    """
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    return {int(entry): name for entry in entries if (name := _named(entry)).startswith("socket:")}


def shut_connections_to(host: str, port: int) -> None:
    """Shut the connections of this process whose other end is there."""
    for descriptor in sockets_of_process():
        one = _connection(descriptor)
        if one is not None:
            with one, contextlib.suppress(OSError):
                there = one.getpeername()
                if there[0].removeprefix("::ffff:") == host and there[1] == port:
                    one.shutdown(socket.SHUT_RDWR)


def _published(store: Store, workers: int) -> list[bytes]:
    """What each member's gloo has told of itself in the store; nothing where it is not where it is looked for."""
    keys = [f"0/{one}" for one in range(workers)]
    return [store.get(key) for key in keys] if store.check(keys) else []


def _connection(descriptor: int) -> socket.socket | None:
    """Another descriptor of the TCP connection that is behind this one, if one is."""
    try:
        one = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            one.getpeername()
            return one
    except OSError:
        pass
    one.close()
    return None


def _is_in(address: tuple[str, int], family: int, published: list[bytes]) -> bool:
    """Whether one of them holds this address as the system's `sockaddr` has it."""
    port = struct.pack("=H", family) + struct.pack(">H", address[1])
    host = socket.inet_pton(family, address[0].partition("%")[0])
    gap = b"" if family == socket.AF_INET else bytes(4)
    return any(port + gap + host in one for one in published)


def _named(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except OSError:
        return ""
