"""What the wires take of a processor on this machine: of an exchange, a message and a byte, at each of its two ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from stretto.collective_ops import AllReduceMean
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.embedded import host
from stretto.transport import Transport
from stretto.transport.process_group import ProcessGroupTransport

LIMIT_S = 60.0
CREW = 4
"""So many workers meet without a centre."""
SMALL, LARGE = 40, 6
"""How often a small exchange is measured, and a large one."""
PAUSE_S = 0.002
"""Between two of them; without it nobody falls asleep, and half of what it takes is not seen."""
NUMBERS = 1 << 20
MEGABYTES = 4 * NUMBERS / 1e6
"""What a large exchange is about."""


@dataclass(frozen=True)
class WireCosts:
    """Seconds of a processor, at one end: of an exchange without a centre, of its messages and bytes; of parcels.

    `telling_s` is what words take besides, which are made into an exchange and read from it, and `link_megabyte_s`
    what a megabyte of parcels takes besides that goes over a link, where links are processors' work.
    """

    exchange_s: float
    message_s: float
    megabyte_s: float
    telling_s: float
    parcel_s: float
    parcel_megabyte_s: float
    link_megabyte_s: float


def here(plain: bool) -> WireCosts:
    """What both wires take, measured over this machine's loopback in this process alone; `plain` is not encrypted."""
    with ThreadPoolExecutor(CREW) as crew:
        store = HashStore()
        wires = list(crew.map(lambda one: ProcessGroupTransport(store, one, CREW, LIMIT_S), range(CREW)))
        collective = next(crew.map(lambda one: of_collective(one, _share), wires))
        for one in wires:
            one.close()
    hosted = host(1, plain=plain)
    wire = hosted.wire(0, LIMIT_S)
    try:
        return WireCosts(*collective, *of_server(wire, time.process_time))
    finally:
        wire.close()
        hosted.see_out()


def _share() -> float:
    return time.process_time() / CREW


def of_collective(
    wire: Transport, clock: Callable[[], float], passing: Callable[[], float] | None = None, more: int = 1
) -> tuple[float, float, float, float]:
    """Of an exchange, a message, a megabyte, and of telling words, on a wire between workers who all call this.

    `clock` is the time of one worker's processors; `passing`, where workers share processors, its part of all of their
    time, idle or not: small messages wait for each other, and for whoever is to be awakened. Gloo's ring sums up in
    N-1 steps and hands round in as many; in each a worker sends two messages and receives two
    (`stretto.simulator.network.wire_bytes.mean_bytes`). Of a single number there is but one message in each step, of
    one worker to the next. Where messages that cross each other take more than those that don't, it is what crosses
    that counts: most exchanges are of more than a number. `more` times as much is measured as where somebody waits for
    it.
    """
    passing = passing or clock
    single, small = (_mean_s(wire, numbers, more * SMALL, passing) for numbers in (1, 1000))
    steps = 2 * (wire.workers - 1)
    exchange_s, message_s = _fit(single, small, 2 * steps / wire.workers, 4 * steps)
    gathered = _each(lambda: wire.all_gather_bytes(b""), more * SMALL, passing) - 2 * steps * message_s
    told = _each(lambda: wire.broadcast_bytes(b""), more * SMALL, passing) - 2 * (1 - 1 / wire.workers) * message_s
    telling_s = max((gathered + told) / 2 - exchange_s, 0.0)
    light, heavy = (_mean_s(wire, numbers, more * LARGE, clock) for numbers in (1000, NUMBERS))
    megabytes = 2 * steps / wire.workers * MEGABYTES
    return exchange_s, message_s, max(heavy - light, 0.0) / megabytes, telling_s


def _fit(one_s: float, other_s: float, few: float, many: float) -> tuple[float, float]:
    """What an exchange takes, and each of its messages, if one has few and the other many; both at least nothing."""
    message_s = max(other_s - one_s, 0.0) / (many - few)
    exchange_s = one_s - few * message_s
    return (exchange_s, message_s) if exchange_s >= 0.0 else (0.0, other_s / many)


def of_server(
    wire: ParameterServerClient, clock: Callable[[], float], busy: Callable[[], float] | None = None, more: int = 1
) -> tuple[float, float, float]:
    """Of a parcel, a megabyte of parcels and one over a link, on a wire to a server whose workers all call this.

    `clock` is the time of all their processors, and of the server's, idle or not where they share them: small parcels
    wait for whoever is to be awakened. `busy`, where links take of them as well, is how long the whole machine was at
    work, though by a coarse clock: then the server is where worker 0 is, and only the others use links. A message of
    each of N workers to all takes N parcels to the server and N back, each with two ends, and so does reading what the
    server has.
    """
    numbers = torch.ones(NUMBERS)
    if wire.worker == 0:
        wire.open(1, "async_sgd", [numbers])

    def take(_part: int, at: int, piece: Tensor) -> None:
        numbers[at : at + piece.numel()].copy_(piece)

    def read() -> None:
        wire.read([NUMBERS]).wait(take)

    def megabyte_s(read_s: float, readers: int) -> float:
        return max(read_s / (2 * readers) - 2 * parcel_s, 0.0) / MEGABYTES

    parcel_s = _each(lambda: wire.all_gather_bytes(b""), more * SMALL, clock) / (4 * wire.workers)
    wire.all_gather_bytes(b"")
    if busy is None or wire.workers == 1:
        return parcel_s, megabyte_s(_each(read, more * LARGE, clock), wire.workers), 0.0
    near_s = megabyte_s(_between(wire, wire.worker == 0, read, more * LARGE, busy), 1)
    far_s = megabyte_s(_between(wire, wire.worker > 0, read, more * LARGE, busy), wire.workers - 1)
    return parcel_s, near_s, max(far_s - near_s, 0.0)


def _between(wire: Transport, acts: bool, act: Callable[[], object], times: int, busy: Callable[[], float]) -> float:
    """What all processors do, for each time, while some act so often and the others wait for them.

    Nobody begins before all have looked at the clock, nor goes on before all have looked again.
    """
    if acts:
        act()
    wire.all_gather_bytes(b"")
    began = busy()
    wire.all_gather_bytes(b"")
    for _ in range(times if acts else 0):
        time.sleep(PAUSE_S)
        act()
    wire.all_gather_bytes(b"")
    ended = busy()
    wire.all_gather_bytes(b"")
    return (ended - began) / times


def _mean_s(wire: Transport, numbers: int, times: int, clock: Callable[[], float]) -> float:
    """Of one mean of so many numbers."""
    tensor = torch.ones(numbers)
    return _each(lambda: wire.submit(AllReduceMean(tensor)).wait(), times, clock)


def _each(what: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Of one, on the average, behind a pause as a training worker makes one: who is awakened finds nothing ready."""
    what()
    spent = []
    for act in (what, lambda: None):
        began = clock()
        for _ in range(times):
            time.sleep(PAUSE_S)
            act()
        spent.append(clock() - began)
    return max(spent[0] - spent[1], 0.0) / times
