"""Bandwidth shared fairly: bytes flow like water through links, and the rates are those of max-min fairness.

Rates are max-min fair when none can grow without taking from a flow that has no more (Bertsekas & Gallager, Data
Networks, 1992, section 6.5.2): each flow has a resource on its path that is full and on which no other flow has more.
Between two events rates are constant, so a flow of B bytes at rate x needs B / x seconds. Sharing the link of a
server among k equal transfers thus makes each take k times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, ulp

import numpy as np
from numpy.typing import NDArray

VAST = 1e300
"""An infinite capacity is counted as this many bytes per second, with which one can reckon."""

TOGETHER = 1e-9
"""When a flow ends, those that lack less than this part of their bytes end with it."""

TIE = 1e-12
"""Shares that differ by less than this part are taken to be equal."""

LEFT, AMOUNT, WEIGHT, RATE, END = range(5)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Fluid:
    """Flows over resources; a resource is a link, or the cores of a machine, that carries so much per second.

    One asks `next_end`, advances to that time or to an earlier one, and takes those that `ended`. Starting, stopping
    and changing a capacity happen at `now`. Rates are found anew when they are asked for, once for all such changes.

    >>> link = Fluid([100.0])
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
        """Seconds of virtual time up to which everything has flowed."""
        self._capacity = np.minimum(np.array(capacities, dtype=np.float64), VAST)
        self._flows: Ints = np.zeros(0, np.int64)
        self._table: Floats = np.zeros((5, 0))
        """A column for each flow, in the order of beginning: what was left at `_since`, and so on."""
        self._path: Ints = np.zeros(0, np.int64)
        """The paths of all flows, one after another; `_hops` says how long each is."""
        self._hops: Ints = np.zeros(0, np.int64)
        self._new: dict[int, tuple[float, float, Sequence[int]]] = {}
        self._known: set[int] = set()
        self._done: list[int] = []
        self._since = 0.0
        self._next = inf
        self._stale = False

    def capacity(self, resource: int, bytes_per_s: float) -> None:
        """Change what a resource carries from now on; 0 cuts it, and its flows stand still."""
        self._capacity[resource] = min(bytes_per_s, VAST)
        self._stale = True

    def start(self, flow: int, amount: float, path: Sequence[int], weight: float = 1) -> None:
        """Begin to send `amount` bytes over the resources of `path`, all at the same rate.

        Where flows compete, each gets in proportion to its weight. Nothing to send, or nothing on the way that holds
        it back: it ends at once. Raises ValueError for a flow that is under way, and for numbers that cannot be.
        """
        if flow in self._known:
            raise ValueError(f"flow {flow} is under way already")
        if not (0 <= amount < inf and 0 < weight < inf):
            raise ValueError(f"flow {flow} cannot send {amount} bytes with weight {weight}")
        self._known.add(flow)
        if amount > 0 and any(self._capacity[resource] < VAST for resource in path):
            self._new[flow] = (amount, weight, path)
            self._stale = True
        else:
            self._done.append(flow)

    def stop(self, flow: int) -> float:
        """Take a flow out before its end; returns the bytes that were not delivered."""
        left = self.remaining(flow)
        self._known.remove(flow)
        if flow in self._done:
            self._done.remove(flow)
        elif self._new.pop(flow, None) is None:
            self._keep(self._flows != flow)
        return left

    def advance(self, now: float) -> None:
        """Let everything flow until `now`, which is not before the time that it is and not after `next_end`."""
        if not self.now <= now <= self.next_end():
            raise ValueError(f"time cannot go from {self.now} to {now} when a flow ends at {self._next}")
        self.now = now

    def next_end(self) -> float:
        """When the next flow is done, in seconds; infinity when none moves."""
        if self._stale:
            self._settle()
            self._admit()
            self._find_rates()
        return self.now if self._done else self._next

    def ended(self) -> list[int]:
        """The flows that are done now, in the order of their numbers; they are gone from here."""
        done, self._done = self._done, []
        if self.now >= self._next:
            self._settle()
            left, amount, _, _, end = self._table
            over = (left <= TOGETHER * amount) | (end <= self.now + 4 * ulp(self.now))
            done += self._flows[over].tolist()
            self._keep(~over)
            self._next = inf
        self._known.difference_update(done)
        return sorted(done)

    def rates(self) -> dict[int, float]:
        """The bytes per second of each flow that is under way."""
        self.next_end()
        return dict(zip(self._flows.tolist(), self._table[RATE].tolist(), strict=True))

    def remaining(self, flow: int) -> float:
        """The bytes of a flow that are still to come."""
        if flow not in self._known:
            raise ValueError(f"there is no flow {flow} under way")
        if flow in self._done:
            return 0.0
        if flow in self._new:
            return self._new[flow][0]
        self._settle()
        return float(self._table[LEFT, self._flows == flow][0])

    def _settle(self) -> None:
        """Take what has flowed since the rates were found off what was left."""
        if self.now > self._since:
            left = self._table[LEFT]
            left -= self._table[RATE] * (self.now - self._since)
            np.maximum(left, 0.0, out=left)
            self._since = self.now

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._path = self._path.compress(kept.repeat(self._hops))
        self._hops = self._hops.compress(kept)
        self._flows = self._flows.compress(kept)
        self._table = self._table.compress(kept, axis=1)
        self._stale = True

    def _admit(self) -> None:
        """Put those that began at this instant into the table, in the order of their numbers."""
        if not self._new:
            return
        flows = sorted(self._new)
        columns = [(amount, amount, weight, 0.0, inf) for amount, weight, _ in map(self._new.__getitem__, flows)]
        paths = [self._new[flow][2] for flow in flows]
        self._flows = np.concatenate([self._flows, flows])
        self._table = np.concatenate([self._table, np.array(columns).T], axis=1)
        self._hops = np.concatenate([self._hops, [len(path) for path in paths]])
        self._path = np.concatenate([self._path, *(np.array(path, np.int64) for path in paths)])
        self._new = {}

    def _find_rates(self) -> None:
        left, amount, weight, rate, end = self._table
        rate[:] = max_min(self._capacity, self._path, self._hops, weight)
        end[:] = inf
        np.divide(left, rate, out=end, where=rate > 0)
        end[left <= TOGETHER * amount] = 0.0
        end += self.now
        self._next = float(end.min(initial=inf))
        self._stale = False


def max_min(capacity: Floats, path: Ints, hops: Ints, weight: Floats) -> Floats:
    """The max-min fair rates of flows, by progressive filling, many bottlenecks at a time.

    `path` holds the resources of flow 0, then of flow 1, and so on; flow f has `hops[f]` of them, at least one.
    The share of a resource is its room divided by the weights that want it, C_r / sum w_f. A resource whose share is
    the smallest on the way of every flow that uses it is full in the end, whatever happens elsewhere: its flows get
    w_f times that share, and what they take is taken off the other resources, whose shares can only grow by that.
    (All such resources at once, not only the one with the smallest share of all; so in a star of links of 1,000
    different speeds a few rounds do.)
    """
    if len(hops) == 1:
        return np.array([capacity[path].min()])
    rate = np.zeros(len(hops))
    flows = np.arange(len(hops))
    room, share = capacity.copy(), np.zeros(len(capacity))
    while len(flows):
        begin = np.cumsum(hops) - hops
        load = np.bincount(path, weight.repeat(hops), len(capacity))
        share = np.maximum(share, room / np.where(load > 0, load, 1.0))
        offered = share[path]
        least = np.minimum.reduceat(offered, begin)
        loose = np.zeros(len(capacity), np.bool_)
        loose[path[offered > (least * (1 + TIE)).repeat(hops)]] = True
        open_ = np.logical_and.reduceat(loose[path], begin)
        rate[flows] = weight * least
        if not open_.any():
            break
        room -= np.bincount(path, np.where(open_, 0.0, weight * least).repeat(hops), len(capacity))
        path = path.compress(open_.repeat(hops))
        hops, flows, weight = hops.compress(open_), flows.compress(open_), weight.compress(open_)
    return rate
