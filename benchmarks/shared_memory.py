"""Rate of means in shared memory compared with gloo over the loopback, both by workers of one host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import Pace, take_turns, worker_groups
from stretto.collective_ops import AllReduceMean
from stretto.process_config import worker_config
from stretto.transport import Transport
from stretto.transport.env_rendezvous import open_store
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import SharedMemoryTransport, over_shared_memory

QUESTION = "means per second in shared memory against gloo over the loopback, float32"
TIMEOUT_S = 60.0
STARTS, REPETITIONS = 3, 8
OURS, THEIRS = "shared memory", "gloo"


@dataclass(frozen=True)
class Case:
    """Numbers in the tensor, workers, the wanted ratio of rates, and the number of means that are timed together."""

    numbers: int
    workers: int
    wanted: float
    segment: int

    @property
    def name(self) -> str:
        """Name in the results and on the command line of the workers."""
        return f"{self.numbers} numbers, {self.workers} workers"


CASES = {
    case.name: case
    for case in (
        Case(4_000, 2, 8, 500),
        Case(25_000, 2, 8, 300),
        Case(100_000, 2, 8, 200),
        Case(800_000, 2, 1.5, 40),
        Case(25_000_000, 2, 1.3, 3),
        Case(4_000, 4, 8, 80),
        Case(25_000, 4, 8, 80),
        Case(100_000, 4, 8, 60),
        Case(800_000, 4, 1.5, 20),
        Case(25_000_000, 4, 1.3, 2),
    )
}


def exchange(connect: Callable[[ProcessGroupTransport], Transport], case: str, pace: Pace) -> None:
    """Compute means of one tensor, one after another."""
    config = worker_config()
    assert config is not None
    store = open_store(config, TIMEOUT_S)
    transport = connect(ProcessGroupTransport(store, config.worker, config.world_size, TIMEOUT_S))
    tensor = torch.zeros(CASES[case].numbers)
    pace.begin()
    while True:
        transport.submit(AllReduceMean(tensor)).wait()
        pace.step()


def _shared(group: ProcessGroupTransport) -> Transport:
    transport = over_shared_memory(group)
    assert isinstance(transport, SharedMemoryTransport), "this machine's workers can't share memory"
    return transport


SIDES = {OURS: partial(exchange, _shared), THEIRS: partial(exchange, lambda group: group)}


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"shared_memory: {QUESTION}", flush=True)
    cases = {name: _case(case, starts or STARTS) for name, case in CASES.items()}
    record = {"question": QUESTION, "sides": [OURS, THEIRS], "starts": starts or STARTS, "cases": cases}
    print(f"  kept in {save('shared_memory', record, trial=starts is not None)}")
    return record


def _case(case: Case, starts: int) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for _ in range(starts):
        with worker_groups("benchmarks.shared_memory", tuple(SIDES), case.name, case.segment, case.workers) as started:
            for side, segments in take_turns(started, REPETITIONS).items():
                seconds[side].append([one.wall / case.segment for one in segments])
    ratio = Ratio.of(seconds[OURS], seconds[THEIRS])
    spreads = {
        side: Spread.of([1e3 * one for start in by_start for one in start]) for side, by_start in seconds.items()
    }
    times = ", ".join(f"{side} {spread.median:.3f} ms" for side, spread in spreads.items())
    print(f"  {case.name:<30} {times}; {ratio} times the rate, wanted at least {case.wanted:g}", flush=True)
    return {
        "numbers": case.numbers,
        "workers": case.workers,
        "wanted": case.wanted,
        "ratio": ratio.record(),
        "ms": {side: spread.record() for side, spread in spreads.items()},
    }
