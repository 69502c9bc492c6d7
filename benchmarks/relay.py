"""Milliseconds of a mean of workers on the loopback interface: through a relay, beside connections with each other.

In turns in the same processes; the relay is a process of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.encryption import LIMIT_S, Case, connected, means_in_turns
from benchmarks.laboratory import PORT
from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import ROOT
from stretto.transport import encrypted_sockets
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.relay_tunnels import RelayAccess

QUESTION = "milliseconds of a mean, float32, loopback: through a relay against connections of the workers"
RELAYED, DIRECT = "relayed", "direct"
STARTS = 3
SECRET = "of the benchmark"
SERVE = """
import socket, sys
from stretto.relay import serve
serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].encode())
"""
CASES = tuple(
    Case(numbers, workers, 0.0, means, 0.5) for numbers, means in ((25_000, 50), (800_000, 10)) for workers in (2, 3)
)


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"relay: {QUESTION}; load {os.getloadavg()[0]:.1f}", flush=True)
    cases = [_case(case, starts or STARTS) for case in CASES]
    record = {"question": QUESTION, "starts": starts or STARTS, "cases": cases}
    print(f"  kept in {save('relay', record, trial=starts is not None)}; load {os.getloadavg()[0]:.1f}")
    return record


def _case(case: Case, starts: int) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {RELAYED: [], DIRECT: []}
    for _ in range(starts):
        for side, found in measure(case).items():
            seconds[side].append(found)
    ratio = Ratio.of(seconds[RELAYED], seconds[DIRECT])
    ms = {side: Spread.of([1e3 * one for start in found for one in start]) for side, found in seconds.items()}
    shown = ", ".join(f"{side} {spread.median:.2f} ms" for side, spread in ms.items())
    print(f"  {case.numbers} numbers, {case.workers} workers: {shown}; {ratio} times the rate", flush=True)
    return {
        "numbers": case.numbers,
        "workers": case.workers,
        "ratio": ratio.record(),
        "ms": {side: spread.record() for side, spread in ms.items()},
    }


def measure(case: Case) -> dict[str, list[float]]:
    """Run a relay and the workers once; return the seconds of a mean in each segment of each side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port, fd, target = listener.getsockname()[1], listener.fileno(), f"{folder}/found"
        relay = subprocess.Popen([sys.executable, "-c", SERVE, str(fd), SECRET], pass_fds=[fd], env=environment)
        try:
            words = [str(one) for one in (case.workers, case.numbers, case.means, port, target)]
            command = [sys.executable, "-m", "benchmarks.relay"]
            workers = [subprocess.Popen([*command, str(rank), *words], env=environment) for rank in range(case.workers)]
            codes = [one.wait(5 * LIMIT_S) for one in workers]
            if any(codes):
                raise SystemExit("relay: a worker has failed")
        finally:
            relay.kill()
            relay.wait()
        found: dict[str, list[float]] = json.loads(Path(target).read_text())
        return found


def work(rank: int, workers: int, numbers: int, means: int, relay: int, target: Path) -> None:
    """Compute means as one worker, of both sides in turns; rank 0 writes the seconds."""
    store = TCPStore("127.0.0.1", PORT, workers, rank == 0)
    gloo = ProcessGroupTransport(store, rank, workers, LIMIT_S, elastic=True)
    access = RelayAccess(f"127.0.0.1:{relay}", SECRET.encode())
    with patch.object(encrypted_sockets, "machine_name", return_value=""):  # each worker is on a machine of its own
        sides = {RELAYED: connected(gloo, "127.0.0.1", access), DIRECT: connected(gloo, "127.0.0.1")}
    seconds = means_in_turns(gloo, sides, torch.zeros(numbers), means)
    if rank == 0:
        target.write_text(json.dumps(seconds))
    for transport in sides.values():
        transport.close()
    gloo.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, workers, numbers, means, relay = map(int, sys.argv[1:6])
    work(rank, workers, numbers, means, relay, Path(sys.argv[6]))
