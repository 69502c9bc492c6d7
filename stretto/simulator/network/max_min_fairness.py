"""Max-min fair sharing of bandwidth, as a fluid model.

Rates are max-min fair if no rate can grow without lowering that of a flow that has no more (Bertsekas & Gallager, Data
Networks, 1992, section 6.5.2): on its path, each flow has a full resource on which no other flow has a higher rate.
Between two events rates are constant, so a flow of B bytes at rate x needs B / x seconds. Sharing the link of a
server among k equal transfers thus makes each take k times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, ulp

import numpy as np
from numpy.typing import NDArray

INFINITE_CAPACITY = 1e300
"""Finite number of bytes per second that stands for an infinite capacity in the arithmetic."""

END_TOLERANCE = 1e-9
"""Fraction of a flow's bytes: when a flow ends, flows with less than this remaining end with it."""

SHARE_TOLERANCE = 1e-12
"""Relative difference below which two shares are equal."""

LEFT, AMOUNT, WEIGHT, RATE, END = range(5)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class FluidModel:
    """Flows over resources. A resource is a link, or the processors of a machine, with a capacity per second.

    The caller asks `next_end`, advances to that time or to an earlier one, and takes the flows that `ended`. Flows
    start and stop and capacities change at `now`. Rates are computed when they are next needed, once for all such
    changes.

    >>> link = FluidModel([100.0])
    >>> for flow in (1, 2):
    ...     link.start(flow, 50.0, path=[0])
    >>> link.rates(), link.next_end()
    ({1: 50.0, 2: 50.0}, 1.0)
    >>> link.advance(1.0)
    >>> link.ended()
    [1, 2]
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now = 0.0
        """Virtual time in seconds up to which the flows have advanced."""
        self._capacity = np.minimum(np.array(capacities, dtype=np.float64), INFINITE_CAPACITY)
        self._flows: Ints = np.zeros(0, np.int64)
        self._table: Floats = np.zeros((5, 0))
        """One column per flow in order of start; the rows are LEFT (bytes remaining at `_since`), AMOUNT, WEIGHT, RATE,
        END."""
        self._path: Ints = np.zeros(0, np.int64)
        """The paths of all flows, concatenated; `_hops` holds the length of each."""
        self._hops: Ints = np.zeros(0, np.int64)
        self._starting: dict[int, tuple[float, float, Sequence[int]]] = {}
        self._active: set[int] = set()
        self._ended: list[int] = []
        self._since = 0.0
        self._next = inf
        self._stale = False

    def set_capacity(self, resource: int, bytes_per_s: float) -> None:
        """Change the capacity of a resource from now on; with 0 its flows stop."""
        self._capacity[resource] = min(bytes_per_s, INFINITE_CAPACITY)
        self._stale = True

    def start(self, flow: int, amount: float, path: Sequence[int], weight: float = 1) -> None:
        """Start a flow of `amount` bytes, which has the same rate on all resources of `path`.

        Competing flows get rates in proportion to their weights. A flow of 0 bytes, or over resources of infinite
        capacity only, ends immediately. Raises ValueError for a flow that is active already, and for invalid numbers.
        """
        if flow in self._active:
            raise ValueError(f"flow {flow} is active already")
        if not (0 <= amount < inf and 0 < weight < inf):
            raise ValueError(f"flow {flow} cannot send {amount} bytes with weight {weight}")
        self._active.add(flow)
        if amount > 0 and any(self._capacity[resource] < INFINITE_CAPACITY for resource in path):
            self._starting[flow] = (amount, weight, path)
            self._stale = True
        else:
            self._ended.append(flow)

    def stop(self, flow: int) -> float:
        """Stop a flow before its end, and return the bytes that were not delivered."""
        remaining = self.remaining(flow)
        self._active.remove(flow)
        if flow in self._ended:
            self._ended.remove(flow)
        elif self._starting.pop(flow, None) is None:
            self._compress(self._flows != flow)
        return remaining

    def advance(self, now: float) -> None:
        """Advance all flows to `now`, which must be at least the current time and at most `next_end`."""
        if not self.now <= now <= self.next_end():
            raise ValueError(f"time cannot go from {self.now} to {now} when a flow ends at {self._next}")
        self.now = now

    def next_end(self) -> float:
        """Return the time in seconds at which the next flow ends; infinity if no flow has a rate above 0."""
        if self._stale:
            self._settle()
            self._admit()
            self._find_rates()
        return self.now if self._ended else self._next

    def ended(self) -> list[int]:
        """Remove the flows that have ended by now, and return their numbers in ascending order."""
        ended_flows, self._ended = self._ended, []
        if self.now >= self._next:
            self._settle()
            remaining, amount, _, _, end = self._table
            over = (remaining <= END_TOLERANCE * amount) | (end <= self.now + 4 * ulp(self.now))
            ended_flows += self._flows[over].tolist()
            self._compress(~over)
            self._next = inf
        self._active.difference_update(ended_flows)
        return sorted(ended_flows)

    def rates(self) -> dict[int, float]:
        """Return the rate of each active flow in bytes per second."""
        self.next_end()
        return dict(zip(self._flows.tolist(), self._table[RATE].tolist(), strict=True))

    def remaining(self, flow: int) -> float:
        """Return the bytes of a flow that are not delivered yet."""
        if flow not in self._active:
            raise ValueError(f"there is no active flow {flow}")
        if flow in self._ended:
            return 0.0
        if flow in self._starting:
            return self._starting[flow][0]
        self._settle()
        return float(self._table[LEFT, self._flows == flow][0])

    def _settle(self) -> None:
        """Subtract the bytes delivered since the rates were computed from the remaining bytes."""
        if self.now > self._since:
            remaining = self._table[LEFT]
            remaining -= self._table[RATE] * (self.now - self._since)
            np.maximum(remaining, 0.0, out=remaining)
            self._since = self.now

    def _compress(self, mask: NDArray[np.bool_]) -> None:
        self._path = self._path.compress(mask.repeat(self._hops))
        self._hops = self._hops.compress(mask)
        self._flows = self._flows.compress(mask)
        self._table = self._table.compress(mask, axis=1)
        self._stale = True

    def _admit(self) -> None:
        """Add the flows that started at this time to the table, in the order of their numbers."""
        if not self._starting:
            return
        flows = sorted(self._starting)
        columns = [(amount, amount, weight, 0.0, inf) for amount, weight, _ in map(self._starting.__getitem__, flows)]
        paths = [self._starting[flow][2] for flow in flows]
        self._flows = np.concatenate([self._flows, flows])
        self._table = np.concatenate([self._table, np.array(columns).T], axis=1)
        self._hops = np.concatenate([self._hops, [len(path) for path in paths]])
        self._path = np.concatenate([self._path, *(np.array(path, np.int64) for path in paths)])
        self._starting = {}

    def _find_rates(self) -> None:
        remaining, amount, weight, rate, end = self._table
        rate[:] = max_min(self._capacity, self._path, self._hops, weight)
        end[:] = inf
        np.divide(remaining, rate, out=end, where=rate > 0)
        end[remaining <= END_TOLERANCE * amount] = 0.0
        end += self.now
        self._next = float(end.min(initial=inf))
        self._stale = False


def max_min(capacity: Floats, path: Ints, hops: Ints, weight: Floats) -> Floats:
    """Return the max-min fair rates of flows, by progressive filling with many bottlenecks at a time.

    `path` holds the resources of flow 0, then of flow 1, and so on; flow f has `hops[f]` resources, at least one. The
    share of a resource is its free capacity divided by the weights of its flows, C_r / sum w_f. A resource whose share
    is the smallest on the path of every flow that uses it is a bottleneck, whatever happens elsewhere: its flows get
    w_f times that share, and their rates are subtracted from the other resources, whose shares can only grow. All such
    resources are handled in one round, not only the one with the smallest share, so in a star of links of 1,000
    different speeds a few rounds suffice.
    """
    if len(hops) == 1:
        return np.array([capacity[path].min()])
    rate = np.zeros(len(hops))
    flows = np.arange(len(hops))
    free_capacity, share = capacity.copy(), np.zeros(len(capacity))
    while len(flows):
        begin = np.cumsum(hops) - hops
        load = np.bincount(path, weight.repeat(hops), len(capacity))
        share = np.maximum(share, free_capacity / np.where(load > 0, load, 1.0))
        offered = share[path]
        lowest_share = np.minimum.reduceat(offered, begin)
        not_bottleneck = np.zeros(len(capacity), np.bool_)
        not_bottleneck[path[offered > (lowest_share * (1 + SHARE_TOLERANCE)).repeat(hops)]] = True
        unresolved = np.logical_and.reduceat(not_bottleneck[path], begin)
        rate[flows] = weight * lowest_share
        if not unresolved.any():
            break
        free_capacity -= np.bincount(path, np.where(unresolved, 0.0, weight * lowest_share).repeat(hops), len(capacity))
        path = path.compress(unresolved.repeat(hops))
        hops, flows, weight = hops.compress(unresolved), flows.compress(unresolved), weight.compress(unresolved)
    return rate
