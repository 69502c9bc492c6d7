"""A parameter server with torch.distributed.rpc, written as in its tutorials.

The server owns the parameters behind an RRef; each worker calls a method of it with `rpc_sync`, which adds the update
under a lock and returns the parameters. As in the tutorial they are returned without a copy, so a worker may see a
part of the next update; our server prevents that.

By default torch moves tensors between processes of one machine through shared memory; with "tcp" as the last argument
it uses the loopback device, as it would use the network between machines.

    python -m benchmarks.peers.rpc 100000 4 5
    python -m benchmarks.peers.rpc 100000 4 5 tcp
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import rpc

from benchmarks.peers import WARM_UP_S, Outcome, Rate, show, total, update_of
from benchmarks.peers.processes import LIMIT_S, Child, send_result, wait_until_closed


def measure(parameters: int, workers: int, seconds: float, tcp: bool = False) -> Rate:
    """Return the updates that a server applies per second, and their bytes."""
    return run(parameters, workers, seconds, tcp).rate()


def run(parameters: int, workers: int, seconds: float, tcp: bool = False) -> Outcome:
    """Measure, and return also the sums that show that each update was applied once."""
    asked = {"PEER_PARAMETERS": str(parameters), "PEER_SECONDS": str(seconds), "PEER_TCP": "1" if tcp else ""}
    with tempfile.TemporaryDirectory(prefix="stretto-rpc-") as folder, ExitStack() as stack:
        common = {"PEER_STORE": f"{folder}/store", "WORLD_SIZE": str(workers + 1), "TP_SOCKET_IFNAME": "lo", **asked}
        processes = []
        for rank in range(workers + 1):
            processes.append(Child(__spec__.name, "join", {"RANK": str(rank), **common}))
            stack.callback(processes[-1].close)
        return Outcome(**processes[0].receive(LIMIT_S + seconds, processes[1:]))


class ParameterServer:
    """Holds the parameters and adds updates."""

    def __init__(self, parameters: int) -> None:
        self.parameters = torch.zeros(parameters)
        self.lock = threading.Lock()

    @staticmethod
    def apply(server: rpc.RRef[ParameterServer], update: Tensor) -> Tensor:
        """Add the update and return the new parameters, in the server's process."""
        self = server.local_value()
        with self.lock:
            self.parameters += update
        return self.parameters


def join() -> None:
    """Run a process of the measurement: rank 0 is the server and runs the measurement, the others are workers."""
    torch.set_num_threads(1)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(_name(rank), rank=rank, world_size=processes, rpc_backend_options=_options())
    if rank == 0:
        run_measurement(int(os.environ["PEER_PARAMETERS"]), processes - 1, float(os.environ["PEER_SECONDS"]))
    wait_until_closed()
    rpc.shutdown(graceful=False)


def _name(rank: int) -> str:
    return f"worker-{rank - 1}" if rank else "server"


def _options() -> rpc.TensorPipeRpcBackendOptions:
    """Return the documented options; processes find each other through a file, so no port is open to other machines."""
    only_tcp = {"_transports": ["uv"], "_channels": ["basic"]} if os.environ["PEER_TCP"] else {}
    store = Path(os.environ["PEER_STORE"]).as_uri()
    return rpc.TensorPipeRpcBackendOptions(init_method=store, rpc_timeout=LIMIT_S, **only_tcp)


def run_measurement(parameters: int, workers: int, seconds: float) -> None:
    """Let all workers push for WARM_UP_S, then for `seconds`, and print the result."""
    server = rpc.RRef(ParameterServer(parameters))
    before = _all_push(server, workers, parameters, WARM_UP_S)
    counted = _all_push(server, workers, parameters, seconds)
    counts = [one + other for (one, _), (other, _) in zip(before, counted, strict=True)]
    send_result(
        parameters=parameters,
        updates=sum(counts),
        updates_per_s=sum(count / took_s for count, took_s in counted),
        pushed=sum(count * total(update_of(worker, parameters)) for worker, count in enumerate(counts)),
        change=total(server.local_value().parameters.numpy()),
    )


def _all_push(
    server: rpc.RRef[ParameterServer], workers: int, parameters: int, seconds: float
) -> list[tuple[int, float]]:
    """Return each worker's count of updates, and its seconds."""
    asked = partial(rpc.rpc_async, func=push, timeout=LIMIT_S + seconds)
    futures = [asked(_name(1 + worker), args=(server, worker, parameters, seconds)) for worker in range(workers)]
    return [one.wait() for one in futures]


def push(server: rpc.RRef[ParameterServer], worker: int, parameters: int, seconds: float) -> tuple[int, float]:
    """Push until `seconds` have passed, in the worker's process."""
    update = torch.from_numpy(update_of(worker, parameters))
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        rpc.rpc_sync(server.owner(), ParameterServer.apply, args=(server, update))
        count += 1
    return count, time.perf_counter() - began


if __name__ == "__main__":
    over_tcp = sys.argv[-1] == "tcp"
    if over_tcp:
        sys.argv.pop()
    show(partial(measure, tcp=over_tcp))
