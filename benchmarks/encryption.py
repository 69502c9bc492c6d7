"""Milliseconds of a mean between hosts: encrypted, against gloo, which is not. In turns in the same processes.

On the loopback interface encryption costs processors; on links of a laboratory, one host a worker, the network is the
limit. A segment of means of one side follows one of the other, and neighbours in time are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import zmq
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from benchmarks.laboratory import LINK, PORT, Laboratory, address
from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import ROOT
from stretto.collective_ops import AllReduceMean
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import KeyPair, ReservedPort
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.worker_endpoint import Endpoint

QUESTION = "milliseconds of a mean, float32, one worker a host: encrypted against gloo"
OURS, THEIRS = "encrypted", "gloo"
STARTS, SEGMENTS = 3, 8
LIMIT_S = 120.0


@dataclass(frozen=True)
class Case:
    """Numbers in the tensor, workers, Mbit/s of a link (0: loopback), means of a segment, and the wanted rate ratio."""

    numbers: int
    workers: int
    mbit: float
    means: int
    wanted: float


CASES = (
    *(Case(25_000, workers, 0.0, 100, 0.7) for workers in (2, 4)),
    *(Case(800_000, workers, 0.0, 20, 0.7) for workers in (2, 4)),
    *(Case(25_000_000, workers, 0.0, 1, 0.7) for workers in (2, 4)),
    *(Case(800_000, workers, 100.0, 1, 0.97) for workers in (2, 4)),
    *(Case(800_000, workers, 1000.0, 5, 0.97) for workers in (2, 4)),
    *(Case(25_000_000, workers, 1000.0, 1, 0.97) for workers in (2, 4)),
)


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"encryption: {QUESTION}", flush=True)
    cases = [_case(case, starts or STARTS) for case in CASES]
    record = {"question": QUESTION, "starts": starts or STARTS, "cases": cases}
    print(f"  kept in {save('encryption', record, trial=starts is not None)}")
    return record


def _case(case: Case, starts: int) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {OURS: [], THEIRS: []}
    with ExitStack() as stack:
        lab = stack.enter_context(Laboratory(case.workers, case.mbit)) if case.mbit else None
        for _ in range(starts):
            for side, found in measure(case, lab).items():
                seconds[side].append(found)
    ratio = Ratio.of(seconds[OURS], seconds[THEIRS])
    ms = {side: Spread.of([1e3 * one for start in found for one in start]) for side, found in seconds.items()}
    where = f"{case.mbit:g} Mbit/s" if case.mbit else "loopback"
    shown = ", ".join(f"{side} {spread.median:.2f} ms" for side, spread in ms.items())
    name = f"{case.numbers} numbers, {case.workers} workers, {where}"
    print(f"  {name:<50} {shown}; {ratio} times the rate, wanted at least {case.wanted:g}", flush=True)
    return {
        "numbers": case.numbers,
        "workers": case.workers,
        "mbit": case.mbit,
        "wanted": case.wanted,
        "ratio": ratio.record(),
        "ms": {side: spread.record() for side, spread in ms.items()},
    }


def measure(case: Case, lab: Laboratory | None) -> dict[str, list[float]]:
    """Run the workers once; return the seconds of a mean in each segment of each side."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        arguments = [str(case.workers), str(case.numbers), str(case.means), "1" if lab else "", f"{folder}/found"]
        processes = [_start(rank, arguments, lab, log) for rank in range(case.workers)]
        codes = [process.wait(5 * LIMIT_S) for process in processes]
        if any(codes):
            log.seek(0)
            raise SystemExit(f"encryption: a worker has failed\n{log.read().decode()}")
        found: dict[str, list[float]] = json.loads((Path(folder) / "found").read_text())
        return found


def _start(rank: int, arguments: list[str], lab: Laboratory | None, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.encryption", str(rank), *arguments]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": LINK if lab else "lo"}
    if lab is not None:
        return lab.start(rank, command, environment, log)
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})


def work(rank: int, workers: int, numbers: int, means: int, hosts: bool, target: Path) -> None:
    """Compute means as one worker, of both sides in turns; rank 0 writes the seconds."""
    store = TCPStore(address(0) if hosts else "127.0.0.1", PORT, workers, rank == 0)
    gloo = ProcessGroupTransport(store, rank, workers, LIMIT_S, elastic=True)
    encrypted = connected(gloo, address(rank) if hosts else "127.0.0.1")
    seconds = means_in_turns(gloo, {OURS: encrypted, THEIRS: gloo}, torch.zeros(numbers), means)
    if rank == 0:
        target.write_text(json.dumps(seconds))
    encrypted.close()
    gloo.close()


def connected(gloo: ProcessGroupTransport, host: str, relay: RelayAccess | None = None) -> EncryptedTransport:
    """Return a transport of the workers of a process group, which listens at this address."""
    port = ReservedPort(host, KeyPair(*zmq.curve_keypair()))
    ends = [Endpoint.parse(one.decode()) for one in gloo.all_gather_bytes(str(port.endpoint).encode())]
    made = EncryptedTransport(port, 1, gloo.worker, list(enumerate(ends)), LIMIT_S, relay)
    made.connect(LIMIT_S)
    return made


def means_in_turns(
    gloo: ProcessGroupTransport, sides: Mapping[str, Transport], tensor: Tensor, means: int
) -> dict[str, list[float]]:
    """Return the seconds of a mean in each segment of each of two sides; they begin in turns, all workers together."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for segment in range(SEGMENTS + 1):
        for side in sides if segment % 2 else reversed([*sides]):
            gloo.all_gather_bytes(b"begin")
            began = time.perf_counter()
            for _ in range(means):
                sides[side].submit(AllReduceMean(tensor)).wait()
            if segment:  # the first is not measured
                seconds[side].append((time.perf_counter() - began) / means)
    gloo.all_gather_bytes(b"done")
    return seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, workers, numbers, means = map(int, sys.argv[1:5])
    work(rank, workers, numbers, means, bool(sys.argv[5]), Path(sys.argv[6]))
