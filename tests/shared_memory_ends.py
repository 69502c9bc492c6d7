"""Ends of transports that share memory, in the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from shared_memory_workers import TIMEOUT_S

from stretto.transport import shared_memory
from stretto.transport.host_memory import Offer
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import over_shared_memory

Connect = Callable[[Any, int], Transport]


def connected(workers: int, timeout_s: float = TIMEOUT_S, elastic: bool = False) -> list[Any]:
    """Return the ends of one transport, in the threads of this process."""
    store = dist.HashStore()

    def connect(worker: int) -> Transport:
        return over_shared_memory(ProcessGroupTransport(store, worker, workers, timeout_s, elastic=elastic))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(connect, range(workers)))


def on_hosts(
    hosts: list[int], timeout_s: float = TIMEOUT_S, elastic: bool = False, made: Connect | None = None
) -> list[Any]:
    """Return the ends of one transport, in the threads of this process, as if they were on these hosts.

    `made` returns the end of a worker with a store.
    """
    store, offer = dist.HashStore(), shared_memory.offer_memory
    of_thread = threading.local()

    def offer_of_thread(*arguments: Any) -> Offer:
        return msgspec.structs.replace(offer(*arguments), host=f"host {of_thread.host}")

    def connect(worker: int) -> Transport:
        of_thread.host = hosts[worker]
        if made is not None:
            return made(store, worker)
        group = ProcessGroupTransport(store, worker, len(hosts), timeout_s, elastic=elastic)
        return over_shared_memory(group)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(hosts)) as pool:
        patch.setattr(shared_memory, "offer_memory", offer_of_thread)
        return list(pool.map(connect, range(len(hosts))))


def closed(ends: list[Any]) -> None:
    for end in ends:
        end.close()
