"""What the wires take of a processor on this machine: of an exchange, a message and a byte, at each of its two ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import HashStore

from stretto.wire.collective import CollectiveWire
from stretto.wire.hosted import host
from stretto.wire.seam import Wire
from stretto.words import Mean

LIMIT_S = 60.0
SMALL, LARGE = 60, 6
"""How often a small exchange is measured, and a large one."""
BYTES = 1 << 22


@dataclass(frozen=True)
class WireCosts:
    """Seconds of a processor, at one end. The collective wire has exchanges, messages and bytes, a server's parcels."""

    exchange_s: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0
    parcel_s: float = 0.0
    parcel_byte_s: float = 0.0


def here(workers: int, shards: int, plain: bool) -> WireCosts:
    """What a run of so many workers will need to know, measured over this machine's loopback, all in this process."""
    if workers == 1:
        return WireCosts()
    if shards:
        hosted = host(1, plain=plain)
        wire = hosted.wire(0, LIMIT_S)
        try:
            return of_server(wire, time.process_time)
        finally:
            wire.close()
            hosted.see_out()
    with ThreadPoolExecutor(2) as both:
        store = HashStore()
        wires = list(both.map(lambda one: CollectiveWire(store, one, 2, LIMIT_S), range(2)))
        found = list(both.map(lambda one: of_collective(one, lambda: time.process_time() / 2), wires))
        for one in wires:
            one.close()
    return found[0]


def of_collective(wire: Wire, clock: Callable[[], float]) -> WireCosts:
    """Of a collective wire between two workers, who both call this. `clock` is the time of a worker's processors.

    One number goes round in one message, four in four (see `stretto.sim.costs.mean_bytes`); each goes to the other and
    back, so that a worker sees 2 ends and 8. Of a large tensor a worker sends and receives every byte once.
    """
    one = _processor_s(wire, 1, SMALL, clock)
    four = _processor_s(wire, 4, SMALL, clock)
    large = _processor_s(wire, BYTES // 4, LARGE, clock)
    message_s = max(four - one, 0.0) / 6
    return WireCosts(
        exchange_s=max(one - 2 * message_s, 0.0),
        message_s=message_s,
        byte_s=max(large - four, 0.0) / (2 * BYTES),
    )


def of_server(wire: Wire, clock: Callable[[], float]) -> WireCosts:
    """Of a wire to a server, whose workers all call this. `clock` is the time of all their processors, and its own.

    A message of each of N workers to all takes N parcels to the server and N back, each with two ends.
    """
    small, large = (_gather_s(wire, bytes(size), times, clock) for size, times in ((1, SMALL), (BYTES, LARGE)))
    workers = wire.workers
    return WireCosts(
        parcel_s=small / (4 * workers),
        parcel_byte_s=max(large - small, 0.0) / (2 * BYTES * (workers + workers**2)),
    )


def _processor_s(wire: Wire, numbers: int, times: int, clock: Callable[[], float]) -> float:
    """Of one mean of so many numbers."""
    tensor = torch.ones(numbers)
    return _each(lambda: wire.start(Mean(tensor)).wait(), times, clock)


def _gather_s(wire: Wire, message: bytes, times: int, clock: Callable[[], float]) -> float:
    return _each(lambda: wire.gather(message), times, clock)


def _each(what: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    what()
    began = clock()
    for _ in range(times):
        what()
    return (clock() - began) / times
