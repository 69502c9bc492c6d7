"""Other ways to move updates between processes, which our parameter server is compared with.

    python -m benchmarks.peers.sockets 100000000        a bare TCP connection: GB/s, and a round trip
    python -m benchmarks.peers.rpc 100000 4 5           torch.distributed.rpc: parameters, workers, seconds
    python -m benchmarks.peers.ray_server 100000 4 5    Ray actors

A server holds float32 parameters. Each worker pushes an update of the same size as often as it can, the server adds
it, and the new parameters come back. All processes run on this machine, with one thread each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BYTES = 4
"""Bytes of one parameter."""
WARM_UP_S = 0.5
"""Seconds for which workers push before updates are counted."""


@dataclass(frozen=True)
class Rate:
    """Updates that a server applied per second, and the bytes per second of updates and parameters together."""

    updates_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Outcome:
    """One measurement. `pushed` is the sum of all elements of all updates, `change` that of the parameters' change."""

    parameters: int
    updates: int
    updates_per_s: float
    pushed: float
    change: float

    def rate(self) -> Rate:
        """Return the rate. Raise SystemExit if the server lost or doubled an update."""
        if self.pushed != self.change:
            raise SystemExit(f"updates of the sum {self.pushed:g} changed the parameters by {self.change:g}")
        return Rate(self.updates_per_s, self.updates_per_s * 2 * BYTES * self.parameters)


def update_of(worker: int, parameters: int) -> NDArray[np.float32]:
    """Return the update that a worker pushes every time: small integers, whose sums are exact below 2**24."""
    return (np.arange(parameters) % 5 + worker + 1).astype(np.float32)


def total(values: NDArray[np.float32]) -> float:
    """Return the exact sum of integers."""
    return float(values.sum(dtype=np.float64))


def show(measure: Callable[[int, int, float], Rate]) -> None:
    """Measure with the parameters, workers and seconds from the command line, and print the rate."""
    if len(sys.argv) != 4:
        raise SystemExit("asked for: PARAMETERS WORKERS SECONDS")
    rate = measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    print(f"{rate.updates_per_s:.1f} updates/s, {rate.bytes_per_s / 1e9:.3f} GB/s both ways together")
