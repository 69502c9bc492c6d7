"""Measures the processor time of the transports on this machine, per operation, message and byte at each end."""

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
from stretto.parameter_server.embedded import start_server
from stretto.transport import Transport
from stretto.transport.process_group import ProcessGroupTransport

LIMIT_S = 60.0
GROUP_WORKERS = 4
"""Number of workers of the measured process group."""
SMALL_REPEATS, LARGE_REPEATS = 40, 6
"""Number of measurements of a small operation, and of a large one."""
PAUSE_S = 0.002
"""Seconds between two measurements; without a pause no thread sleeps, and half of the time, the wake-ups, is
missing."""
NUMBERS = 1 << 20
MEGABYTES = 4 * NUMBERS / 1e6
"""Size of a large tensor in MB."""


@dataclass(frozen=True)
class TransportCosts:
    """Processor seconds at one end; the fields are those of `CostModel`.

    `exchange_s`, `message_s`, `megabyte_s` and `conversion_s` are those of collectives, the others those of messages
    to and from a server; `link_megabyte_s` is what a MB over a link costs besides, where links use processors.
    """

    exchange_s: float
    message_s: float
    megabyte_s: float
    conversion_s: float
    rpc_message_s: float
    rpc_megabyte_s: float
    link_megabyte_s: float


def measure_transports(plain: bool) -> TransportCosts:
    """Measure both transports over the loopback interface within this process; with `plain`, without encryption."""
    with ThreadPoolExecutor(GROUP_WORKERS) as executor:
        store = HashStore()
        transports = list(
            executor.map(
                lambda transport: ProcessGroupTransport(store, transport, GROUP_WORKERS, LIMIT_S), range(GROUP_WORKERS)
            )
        )
        collective = next(executor.map(lambda transport: of_collective(transport, _share_of_process_time), transports))
        for transport in transports:
            transport.close()
    hosted = start_server(1, plain=plain)
    client = hosted.client(0, LIMIT_S)
    try:
        return TransportCosts(*collective, *of_server(client, time.process_time))
    finally:
        client.close()
        hosted.close_when_left()


def _share_of_process_time() -> float:
    return time.process_time() / GROUP_WORKERS


def of_collective(
    transport: Transport, clock: Callable[[], float], share_clock: Callable[[], float] | None = None, more: int = 1
) -> tuple[float, float, float, float]:
    """Measure the seconds per operation, message, MB and conversion of a process group whose workers all call this.

    `clock` is the processor time of one worker; `share_clock`, where workers share processors, its share of the time of
    all of them, idle or not, since small messages wait for each other and for wake-ups. Gloo's ring all-reduce has N-1
    steps of reduce-scatter and N-1 of all-gather; in each a worker sends two messages and receives two
    (`stretto.simulator.network.gloo_ring.all_reduce_bytes`). For a single number each step has only one message, from
    one worker to the next. Where concurrent messages take longer than separate ones, the concurrent ones count, since
    most tensors have more than one number. `more` multiplies the number of measurements.
    """
    share_clock = share_clock or clock
    workers, repeats = transport.workers, more * SMALL_REPEATS
    single_number_s, small_s = (_all_reduce_s(transport, numbers, repeats, share_clock) for numbers in (1, 1000))
    steps = 2 * (workers - 1)
    exchange_s, message_s = _fit(single_number_s, small_s, 2 * steps / workers, 4 * steps)
    gather_s = _mean_call_s(lambda: transport.all_gather_bytes(b""), repeats, share_clock)
    broadcast_s = _mean_call_s(lambda: transport.broadcast_bytes(b""), repeats, share_clock)
    gather_s -= 2 * steps * message_s
    broadcast_s -= 2 * (1 - 1 / workers) * message_s
    conversion_s = max((gather_s + broadcast_s) / 2 - exchange_s, 0.0)
    sizes = 1000, NUMBERS
    small_tensor_s, large_tensor_s = (_all_reduce_s(transport, n, more * LARGE_REPEATS, clock) for n in sizes)
    megabytes = 2 * steps / workers * MEGABYTES
    return exchange_s, message_s, max(large_tensor_s - small_tensor_s, 0.0) / megabytes, conversion_s


def _fit(few_messages_s: float, many_messages_s: float, few: float, many: float) -> tuple[float, float]:
    """Solve time = exchange + messages * message for an operation of few messages and one of many; both at least 0."""
    message_s = max(many_messages_s - few_messages_s, 0.0) / (many - few)
    exchange_s = few_messages_s - few * message_s
    return (exchange_s, message_s) if exchange_s >= 0.0 else (0.0, many_messages_s / many)


def of_server(
    client: ParameterServerClient, clock: Callable[[], float], busy: Callable[[], float] | None = None, more: int = 1
) -> tuple[float, float, float]:
    """Measure the seconds per message, per MB and per MB over a link, with a server whose workers all call this.

    `clock` is the processor time of all workers and the server, idle or not where they share processors, since small
    messages wait for wake-ups. `busy`, where links use processors as well, is the busy time of the whole machine by a
    coarse clock; the server then runs beside worker 0, and only the other workers use links. An all-gather of bytes of
    N workers takes N messages to the server and N back, each with two ends, and so does reading the parameters.
    """
    numbers = torch.ones(NUMBERS, device="cpu")
    if client.worker == 0:
        client.open(1, "async_sgd", [numbers])

    def take(_part: int, offset: int, chunk: Tensor) -> None:
        numbers[offset : offset + chunk.numel()].copy_(chunk)

    def read() -> None:
        client.read([NUMBERS]).wait(take)

    def megabyte_s(read_s: float, readers: int) -> float:
        return max(read_s / (2 * readers) - 2 * rpc_message_s, 0.0) / MEGABYTES

    rpc_message_s = _mean_call_s(lambda: client.all_gather_bytes(b""), more * SMALL_REPEATS, clock) / (
        4 * client.workers
    )
    client.all_gather_bytes(b"")
    if busy is None or client.workers == 1:
        return rpc_message_s, megabyte_s(_mean_call_s(read, more * LARGE_REPEATS, clock), client.workers), 0.0
    local_s = megabyte_s(_between(client, client.worker == 0, read, more * LARGE_REPEATS, busy), 1)
    remote_s = megabyte_s(_between(client, client.worker > 0, read, more * LARGE_REPEATS, busy), client.workers - 1)
    return rpc_message_s, local_s, max(remote_s - local_s, 0.0)


def _between(
    transport: Transport, acts: bool, act: Callable[[], object], repeats: int, busy: Callable[[], float]
) -> float:
    """Return the busy seconds of all processors per call while some workers call `act` and the others wait.

    All workers read the clock between two barriers, so no work of before or after is counted.
    """
    if acts:
        act()
    transport.all_gather_bytes(b"")
    began = busy()
    transport.all_gather_bytes(b"")
    for _ in range(repeats if acts else 0):
        time.sleep(PAUSE_S)
        act()
    transport.all_gather_bytes(b"")
    ended = busy()
    transport.all_gather_bytes(b"")
    return (ended - began) / repeats


def _all_reduce_s(transport: Transport, numbers: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one all-reduce of this many numbers."""
    tensor = torch.ones(numbers, device="cpu")
    return _mean_call_s(lambda: transport.submit(AllReduceMean(tensor)).wait(), repeats, clock)


def _mean_call_s(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Return the mean seconds of one call after a pause, as in training, so that the time of wake-ups is included."""
    call()
    totals = []
    for act in (call, lambda: None):
        began = clock()
        for _ in range(repeats):
            time.sleep(PAUSE_S)
            act()
        totals.append(clock() - began)
    return max(totals[0] - totals[1], 0.0) / repeats
