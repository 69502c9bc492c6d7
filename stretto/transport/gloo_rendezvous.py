"""The group of a generation: formed within a limit at a store that one member keeps, and broken off from any thread."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from datetime import timedelta
from weakref import WeakValueDictionary

import psutil
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stretto.errors import BrokenTransportError, TransportError
from stretto.process_config import worker_config
from stretto.security import address_toward
from stretto.transport.gloo_sockets import shut_connections_to
from stretto.transport.malloc import trim_freed_memory
from stretto.transport.process_group import ProcessGroupTransport, drop_parked, reason

LOOK_S = 0.02
"""Seconds between two checks for an abort."""


class StoreKeeper:
    """Host of the store for the rendezvous of generations, created when its address is first read.

    `host` is the address at which other processes reach this one.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: TCPStore | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Address of the store, as host:port."""
        with self._lock:
            if self._store is None:
                self._store = _listen(self._host)
            return f"{self._host}:{self._store.port}"


def own_address(toward: str) -> str:
    """Return this machine's address: of the interface set for gloo, or else of the route to `toward`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    for one in psutil.net_if_addrs().get(interface or "", []):
        if one.family == socket.AF_INET:
            return str(one.address)
    return address_toward(toward)


@functools.cache
def store_keeper() -> StoreKeeper:
    """Return the store keeper of this process, at its address toward the coordinator."""
    config = worker_config()
    return StoreKeeper(own_address(config.coordinator_host if config is not None else "127.0.0.1"))


def form(
    store_address: str | None,
    keeps: bool,
    prefix: str,
    rank: int,
    size: int,
    limit_s: float,
    timeout_s: float,
) -> ProcessGroupTransport:
    """Connect with the other members at a store, under the prefix of this generation.

    The member that `keeps` the store hosts it in its own `store_keeper`; other members pass its address. Raise
    BrokenTransportError if a member has not connected after `limit_s`, or immediately on `abort_forming`. Groups of
    former generations whose operations have ended are dropped.
    """
    address = store_keeper().address if keeps else store_address
    if address is None:
        raise TransportError(f"worker {rank} of {size} has no address of the store")
    forming = _Forming(address, prefix, rank, size, limit_s, timeout_s)
    transport = forming.result()
    drop_parked()
    trim_freed_memory()
    return transport


def abort_forming(prefix: str) -> None:
    """Abort the generation of this prefix in this process: its rendezvous, now or later, or its transport."""
    with _lock:
        _aborted.add(prefix)
        transport = _formed.get(prefix)
    if transport is not None:
        transport.abort()


_lock = threading.Lock()
_aborted: set[str] = set()
_formed: WeakValueDictionary[str, ProcessGroupTransport] = WeakValueDictionary()


class _Forming:
    """One rendezvous, in a thread that is abandoned on an abort, since gloo can't be interrupted."""

    def __init__(
        self,
        store_address: str,
        prefix: str,
        rank: int,
        size: int,
        limit_s: float,
        timeout_s: float,
    ) -> None:
        host, _, port = store_address.rpartition(":")
        self._host, self._port = host, int(port)
        self._prefix, self._rank, self._size = prefix, rank, size
        self._limit_s, self._timeout_s = limit_s, timeout_s
        self._transport: ProcessGroupTransport | None = None
        self._error = ""
        self._over, self._left = threading.Event(), False
        threading.Thread(target=self._run, daemon=True).start()

    def result(self) -> ProcessGroupTransport:
        """Wait for the transport within the limit."""
        end = time.monotonic() + self._limit_s
        while not self._over.wait(LOOK_S) and self._prefix not in _aborted and time.monotonic() < end:
            pass
        with _lock:
            broken = self._prefix in _aborted
            self._left = self._transport is None or broken
            if self._transport is not None and not broken:
                _formed[self._prefix] = self._transport
                return self._transport
        self._leave()
        raise self._why(broken)

    def _why(self, broken: bool) -> BrokenTransportError:
        who = f"worker {self._rank} of {self._size}"
        if broken:
            return BrokenTransportError(f"{who} stopped connecting because a member failed")
        why = f": {self._error}" if self._error else ""
        return BrokenTransportError(f"{who} could not connect with the others within {self._limit_s:g} s{why}")

    def _leave(self) -> None:
        """Wake waits at the store, and close a transport that was connected in the meantime."""
        shut_connections_to(self._host, self._port)
        if self._transport is not None:
            self._transport.abort()
            self._transport.close()

    def _run(self) -> None:
        try:
            store = TCPStore(self._host, self._port, None, False, timedelta(seconds=self._limit_s), False)
            transport = ProcessGroupTransport(
                PrefixStore(self._prefix, store), self._rank, self._size, self._timeout_s, elastic=True
            )
        except (RuntimeError, TransportError) as error:
            self._error = reason(error)
        else:
            with _lock:
                self._transport = transport
                left = self._left
            if left:
                transport.abort()
                transport.close()
        self._over.set()


def _listen(host: str) -> TCPStore:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind((host, 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return TCPStore(
            host, port, None, True, timedelta(seconds=300), False, master_listen_fd=os.dup(listening.fileno())
        )
