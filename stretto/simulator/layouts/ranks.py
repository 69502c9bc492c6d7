"""Layouts of several ranks in a simulation: ways between ranks, parts of tensors, agreements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from stretto.parallel.schedule import Hop
from stretto.simulator.layouts.replica import Replica
from stretto.simulator.network import wire_bytes
from stretto.transport.secure_connections import wire_bytes as sealed_bytes


class RankedReplica(Replica):
    """A worker of several ranks. `weights` are the bytes of the parameters of each, which its parts are in ratio to."""

    overlaps = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights: Sequence[float] = [1.0] * self.ranks

    def parts(self, nbytes: int, item_bytes: int) -> Sequence[int]:
        """Return the bytes of each rank's part of a tensor, in whole items."""
        total, items = sum(self.weights), nbytes // item_bytes
        ends = [round(items * one / total) * item_bytes for one in accumulate(self.weights, initial=0.0)]
        return [stop - start for start, stop in pairwise([*ends[:-1], nbytes])]

    def hop(self, source: int, target: int) -> Hop:
        """Return the way from one rank to another of the first worker; all workers have the same ways."""
        first, second = self.links.processes(0)[source], self.links.processes(0)[target]
        resources, latency_s = self.links.path(first, second)
        return Hop(max((1 / self.links.capacities[one] for one in resources), default=0.0), latency_s)

    def slowest(self, pairs: Iterable[tuple[int, int]]) -> Hop:
        """Return the slowest way between any of these pairs of ranks."""
        hops = [self.hop(*pair) for pair in pairs]
        return Hop(max(one.byte_s for one in hops), max(one.latency_s for one in hops))

    @property
    def largest_share(self) -> float:
        """Largest share of the parameters that a rank holds."""
        return max(self.weights) / sum(self.weights)

    @property
    def ring(self) -> Hop:
        """Slowest way from a rank to the next one around the ring of all."""
        return self.slowest((rank, (rank + 1) % self.ranks) for rank in range(self.ranks))

    @property
    def agreement_s(self) -> float:
        """Seconds of an all-gather of a small message among the ranks of a worker."""
        hop = self.ring
        return hop.seconds((self.ranks - 1) * sealed_bytes(1)) + hop.latency_s

    @property
    def agreement_bytes(self) -> int:
        """Bytes of an all-gather of a small message among the ranks of a worker, which all of them send together."""
        return wire_bytes.sealed_gather_bytes(self.ranks, 1)
