"""The processes of one rank in several workers of a simulation, which exchange with each other alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from stretto.simulator.network import wire_bytes
from stretto.simulator.network.links import Exchange as Flow
from stretto.simulator.network.links import Links
from stretto.transport import gloo_ring

_all_reduce_bytes = gloo_ring.all_reduce_bytes
_all_reduce_messages = functools.lru_cache(gloo_ring.all_reduce_messages)
_sum_bytes = functools.lru_cache(wire_bytes.sum_bytes)
_sum_messages = functools.lru_cache(wire_bytes.sum_messages)


class RankPeers:
    """The processes of one rank in these workers, or of all workers without `members`."""

    def __init__(self, links: Links, rank: int, members: Sequence[int] | None) -> None:
        self._links, self._processes = links, links.at_rank(rank, members)
        self._leaders = [host[0] for host in links.hosts(self._processes)]
        """First process of each host, which exchanges the sum of its processes; each one if none shares a host."""

    def mean_bytes(self, index: int, nbytes: int, item_bytes: int) -> tuple[int, int]:
        """Return the bytes of a mean on a process's sockets; within one host, as computed for memory."""
        leaders, process = self._leaders, self._processes[index]
        if len(leaders) in (1, len(self._processes)):
            return _all_reduce_bytes(index, len(self._processes), nbytes, item_bytes)
        if process not in leaders:
            return 0, 0
        return _sum_bytes(leaders.index(process), len(leaders), nbytes, item_bytes)

    def mean_messages(self, nbytes: int, item_bytes: int) -> float:
        """Return the number of messages of a mean that a process sends and receives."""
        if len(self._leaders) == len(self._processes):
            return _all_reduce_messages(0, len(self._processes), nbytes, item_bytes)
        return _sum_messages(len(self._leaders), nbytes, item_bytes)

    def all_reduce(self, nbytes: float) -> list[Flow]:
        """Return the concurrent parts of an all-reduce."""
        return self._links.all_reduce(nbytes, self._processes)

    def gather(self, nbytes: float) -> Flow:
        """Return an all-gather of this number of bytes of each process."""
        return self._links.gather(nbytes, self._processes)

    def broadcast(self, index: int, nbytes: float) -> Flow:
        """Return a broadcast from the process of the worker of this index."""
        return self._links.broadcast(self._processes[index], nbytes, self._processes)

    def pair(self, index: int, other: int, sent: int, received: int) -> list[Flow]:
        """Return an exchange between the processes of two workers, which send this number of bytes."""
        first, second = self._processes[index], self._processes[other]
        routes = self._links.path(first, second), self._links.path(second, first)
        return [(size, path, 2 * latency_s) for size, (path, latency_s) in zip((sent, received), routes, strict=True)]
