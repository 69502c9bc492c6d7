"""Our parameter server against one written with torch.distributed.rpc and one with Ray actors, as both document it.

Workers push updates as fast as they can, the server adds them, the new parameters come back: `benchmarks/peers`. Each
figure is of processes that have just been started; all sides take turns. torch.distributed.rpc is asked twice: as it
is, with shared memory between processes of one machine, and over TCP, as it would be between machines, and as ours
always is. Ray uses shared memory too. Ours is asked encrypted, as `stretto run` has it, and plain; no peer encrypts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.measure import Ratio, Spread, save
from benchmarks.peers import Rate, ray_server, rpc
from benchmarks.push import measure_with

QUESTION = "updates per second of our parameter server against others, with workers that only push"
STARTS = 1

Measure = Callable[[int, int, float], Rate]
"""Of so many parameters, by so many workers, in so many seconds."""

OURS = "stretto, plain"
SIDES: Mapping[str, Measure] = {
    OURS: measure_with(False),
    "stretto, CURVE": measure_with(True),
    "torch rpc": rpc.measure,
    "torch rpc, TCP": partial(rpc.measure, tcp=True),
}
RAY = "Ray actors"


@dataclass(frozen=True)
class Load:
    """A model's size, the workers that push, and for how long."""

    parameters: int
    workers: int
    seconds: float


LOADS = (Load(100_000, 4, 2.0), Load(25_000_000, 2, 4.0))


def run(starts: int | None = None) -> dict[str, Any]:
    """Take the figures, print them, keep them."""
    print(f"peers: {QUESTION}", flush=True)
    asked = sides()
    record = {
        "question": QUESTION,
        "wanted": None,
        "starts": starts or STARTS,
        "threads": 1,
        "sides": list(asked),
        "cases": [_case(load, asked, starts or STARTS) for load in LOADS],
    }
    print(f"  kept in {save('peers', record, trial=starts is not None)}")
    return record


def sides() -> Mapping[str, Measure]:
    """All that can be measured here."""
    if importlib.util.find_spec("ray") is None:
        print(f"  without Ray actors. {ray_server.MISSING}", flush=True)
        return SIDES
    return {**SIDES, RAY: ray_server.measure}


def _case(load: Load, asked: Mapping[str, Measure], starts: int) -> dict[str, Any]:
    print(f"  {load.parameters / 1e6:g} M parameters, {load.workers} workers, {load.seconds:g} s", flush=True)
    found = _take(load, asked, starts)
    shown = {name: _side(rates, found[OURS]) for name, rates in found.items()}
    for name, one in shown.items():
        speeds = f"{one['updates_per_s']['median']:9.1f} updates/s, {one['gb_per_s']:6.3f} GB/s both ways"
        ratio = "" if name == OURS else f", {OURS} / {name}: {one['ratio']['median']:.2f}"
        print(f"    {name:16} {speeds}{ratio}", flush=True)
    return {**vars(load), "sides": shown}


def _take(load: Load, asked: Mapping[str, Measure], starts: int) -> Mapping[str, Sequence[Rate]]:
    """Each side in each start, forwards and backwards."""
    found: dict[str, list[Rate]] = {name: [] for name in asked}
    names = list(asked)
    for number in range(starts):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(asked[name](load.parameters, load.workers, load.seconds))
    return found


def _side(rates: Sequence[Rate], ours: Sequence[Rate]) -> dict[str, Any]:
    """One side's speed, and how much faster ours is."""
    mine, theirs = ([[1 / one.updates_per_s] for one in each] for each in (ours, rates))
    return {
        "updates_per_s": Spread.of([one.updates_per_s for one in rates]).record(),
        "gb_per_s": Spread.of([one.bytes_per_s / 1e9 for one in rates]).median,
        "ratio": Ratio.of(mine, theirs).record(),
    }
