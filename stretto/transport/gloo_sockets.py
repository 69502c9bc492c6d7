"""Sockets of one process group: identified with certainty, counted, and shut from any thread."""

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
"""Seconds without traffic after which messages count as received, and for gloo to notice the end of reading."""
DRAIN_S = 0.05
"""Maximum of seconds to wait for messages in flight."""


class GroupSockets:
    """Connections of a gloo group, held under duplicated descriptors.

    Each member publishes its listening address in the store, and each connection of the group has one of these
    addresses at one end; no other socket of the process does. A duplicated descriptor stays valid when gloo closes its
    own and the number is reused, and it keeps the kernel's counters.
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
        """Shut all connections, so that waits at both ends fail.

        Gloo forgets an operation whose message is cut off, and its thread sleeps until the time-out. So messages in
        flight are received first; then reading is shut, which gloo notices as a regular end, and then writing.
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
        """Return the bytes sent and received as the kernel counts them, with retransmissions; None if it does not."""
        pairs = [pair for one in self._held if (pair := tcp_bytes(one.fileno())) is not None]
        if not pairs and not self._alone:
            return None
        return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)

    def close(self) -> None:
        """Close the duplicated descriptors."""
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
    """Return the descriptors of this process that are sockets, each with its socket's unique name.

    Empty if the system does not list them.
    """
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    return {int(entry): name for entry in entries if (name := _named(entry)).startswith("socket:")}


def shut_connections_to(host: str, port: int) -> None:
    """Shut the connections of this process to an address."""
    for descriptor in sockets_of_process():
        one = _connection(descriptor)
        if one is not None:
            with one, contextlib.suppress(OSError):
                there = one.getpeername()
                if there[0].removeprefix("::ffff:") == host and there[1] == port:
                    one.shutdown(socket.SHUT_RDWR)


def _published(store: Store, workers: int) -> list[bytes]:
    """Return the address that each member's gloo has published in the store; empty if it is not found there."""
    keys = [f"0/{one}" for one in range(workers)]
    return [store.get(key) for key in keys] if store.check(keys) else []


def _connection(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a descriptor if it is a TCP connection."""
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
    """Return True if a published entry contains this address as a `sockaddr`."""
    port = struct.pack("=H", family) + struct.pack(">H", address[1])
    host = socket.inet_pton(family, address[0].partition("%")[0])
    gap = b"" if family == socket.AF_INET else bytes(4)
    return any(port + gap + host in one for one in published)


def _named(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except OSError:
        return ""
