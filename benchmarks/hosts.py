"""Means of two hosts with two workers each: the workers of a host as one, against one ring of all workers.

The hosts are those of a laboratory. Bytes are read from their links and from the sockets of the workers. In a ring of
all workers, a link carries as many streams as neighbours in the ring are on two hosts: one if the ranks of a host
follow each other, two if they alternate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.laboratory import LINK, PORT, Laboratory, address
from benchmarks.measure import Spread, save
from stretto.collective_ops import AllReduceMean
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig
from stretto.transport.env_rendezvous import open_store
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import HostsTransport, over_shared_memory

QUESTION = "bytes on a host's link and milliseconds of a mean, 2 hosts of 2 workers: hosts as one against a ring of all"
STARTS = 3
LIMIT_S = 120.0
AS_ONE, RING = "hosts as one", "ring of all"
PLACEMENTS = {"0 0 1 1": (0, 0, 1, 1), "0 1 0 1": (0, 1, 0, 1)}
"""Host of each rank."""


@dataclass(frozen=True)
class Case:
    """Numbers of float32 in a tensor, the rate of a link, and the number of means that are timed together."""

    numbers: int
    mbit: float
    means: int


CASES = (Case(1_000_000, 1000.0, 20), Case(1_000_000, 100.0, 5), Case(10_000, 1000.0, 100))


@dataclass(frozen=True)
class Outcome:
    """Result of one start: bytes that a host sent over its link for a mean, those of its workers' sockets, the time."""

    on_link: float
    on_sockets: Sequence[float]
    """Bytes that each worker has counted for a mean."""
    ms: float


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"hosts: {QUESTION}", flush=True)
    cases = [_case(case, placement, starts or STARTS) for case in CASES for placement in PLACEMENTS]
    record = {"question": QUESTION, "starts": starts or STARTS, "cases": cases}
    print(f"  kept in {save('hosts', record, trial=starts is not None)}")
    return record


def _case(case: Case, placement: str, starts: int) -> dict[str, Any]:
    outcomes: dict[str, list[Outcome]] = {AS_ONE: [], RING: []}
    with Laboratory(hosts=2, mbit=case.mbit) as laboratory:
        for start in range(starts):
            for side in (AS_ONE, RING) if start % 2 else (RING, AS_ONE):
                outcomes[side].append(measure(laboratory, case, PLACEMENTS[placement], side))
    sides = {
        side: {
            "bytes_on_link": fmean(outcome.on_link for outcome in of_side),
            "ms": Spread.of([outcome.ms for outcome in of_side]).record(),
        }
        for side, of_side in outcomes.items()
    }
    shown = "; ".join(
        f"{side} {one['bytes_on_link'] / 1e6:.3f} MB, {one['ms']['median']:.1f} ms" for side, one in sides.items()
    )
    fewer = sides[RING]["bytes_on_link"] / sides[AS_ONE]["bytes_on_link"]
    print(
        f"  {case.numbers} numbers at {case.mbit:g} Mbit/s, hosts {placement}: {shown}; {fewer:.2f} times fewer bytes"
    )
    return {"numbers": case.numbers, "mbit": case.mbit, "hosts": placement, "sides": sides, "times_fewer_bytes": fewer}


def measure(laboratory: Laboratory, case: Case, hosts: Sequence[int], side: str) -> Outcome:
    """Run the workers once in a laboratory of two hosts."""
    before = laboratory.traffic(0)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        processes = []
        for rank, host in enumerate(hosts):
            arguments = [str(rank), str(len(hosts)), side, str(case.numbers), str(case.means), f"{folder}/{rank}"]
            command = [sys.executable, "-m", "benchmarks.hosts", *arguments]
            environment = {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
            processes.append(laboratory.start(host, command, environment, log))
        codes = [process.wait(LIMIT_S) for process in processes]
        if any(codes):
            log.seek(0)
            raise SystemExit(f"hosts: a worker has failed\n{log.read().decode()}")
        records = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(len(hosts))]
    on_link = laboratory.traffic(0).since(before).sent / case.means
    return Outcome(on_link, [one["sent"] / case.means for one in records], max(one["ms"] for one in records))


def work(rank: int, workers: int, side: str, numbers: int, means: int, target: Path) -> None:
    """Compute means as one worker, and write its bytes and the milliseconds of a mean."""
    config = WorkerConfig(worker=rank, options=RunConfig(Path(), workers=workers), store=f"{address(0)}:{PORT}")
    group = ProcessGroupTransport(open_store(config, LIMIT_S), rank, workers, LIMIT_S)
    transport = over_shared_memory(group) if side == AS_ONE else group
    assert isinstance(transport, HostsTransport) == (side == AS_ONE)
    transport.all_gather_bytes(b"connected")
    before, began = transport.traffic().bytes_sent, time.perf_counter()
    for _ in range(means):
        mean: Any = transport.submit(AllReduceMean(torch.ones(numbers))).wait()
        assert bool((mean == workers).all())
    ms = (time.perf_counter() - began) * 1e3 / means
    transport.all_gather_bytes(b"received")
    target.write_text(json.dumps({"sent": transport.traffic().bytes_sent - before, "ms": ms}))
    transport.all_gather_bytes(b"done")
    transport.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, workers, side, numbers, means, target = sys.argv[1:]
    work(int(rank), int(workers), side, int(numbers), int(means), Path(target))
