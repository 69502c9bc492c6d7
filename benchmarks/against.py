"""Our parameter server against torch.distributed.rpc and Ray actors, both written as their documentation does.

Workers push updates as fast as they can, the server adds them and returns the new parameters: see `benchmarks/peers`.
Each figure is of newly started processes; all sides take turns. torch.distributed.rpc is measured twice: with its
default transports, which use shared memory between processes of one machine, and over TCP, which it would use between
machines and which ours always uses. Ray uses shared memory too. Ours is measured encrypted, as `stretto run` starts it,
and plain; no peer encrypts.
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
"""Measures a rate, given the number of parameters, the number of workers and the seconds to measure for."""

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
    """Number of parameters, number of workers that push, and seconds for which they push."""

    parameters: int
    workers: int
    seconds: float


LOADS = (Load(100_000, 4, 2.0), Load(25_000_000, 2, 4.0))


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all sides under all loads, print the figures and write them to the results."""
    print(f"peers: {QUESTION}", flush=True)
    measures = sides()
    record = {
        "question": QUESTION,
        "wanted": None,
        "starts": starts or STARTS,
        "threads": 1,
        "sides": list(measures),
        "cases": [_case(load, measures, starts or STARTS) for load in LOADS],
    }
    print(f"  kept in {save('peers', record, trial=starts is not None)}")
    return record


def sides() -> Mapping[str, Measure]:
    """Return the sides that can be measured on this machine."""
    if importlib.util.find_spec("ray") is None:
        print(f"  without Ray actors. {ray_server.MISSING}", flush=True)
        return SIDES
    return {**SIDES, RAY: ray_server.measure}


def _case(load: Load, measures: Mapping[str, Measure], starts: int) -> dict[str, Any]:
    print(f"  {load.parameters / 1e6:g} M parameters, {load.workers} workers, {load.seconds:g} s", flush=True)
    rates_by_side = _take(load, measures, starts)
    shown = {name: _side(rates, rates_by_side[OURS]) for name, rates in rates_by_side.items()}
    for name, one in shown.items():
        speeds = f"{one['updates_per_s']['median']:9.1f} updates/s, {one['gb_per_s']:6.3f} GB/s both ways"
        ratio = "" if name == OURS else f", {OURS} / {name}: {one['ratio']['median']:.2f}"
        print(f"    {name:16} {speeds}{ratio}", flush=True)
    return {**vars(load), "sides": shown}


def _take(load: Load, measures: Mapping[str, Measure], starts: int) -> Mapping[str, Sequence[Rate]]:
    """Return the rates of each side in each start; the order of the sides is reversed in every second start."""
    rates_by_side: dict[str, list[Rate]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(starts):
        for name in names if number % 2 == 0 else names[::-1]:
            rates_by_side[name].append(measures[name](load.parameters, load.workers, load.seconds))
    return rates_by_side


def _side(rates: Sequence[Rate], ours: Sequence[Rate]) -> dict[str, Any]:
    """Return one side's speed, and how much faster ours is."""
    mine, theirs = ([[1 / one.updates_per_s] for one in each] for each in (ours, rates))
    return {
        "updates_per_s": Spread.of([one.updates_per_s for one in rates]).record(),
        "gb_per_s": Spread.of([one.bytes_per_s / 1e9 for one in rates]).median,
        "ratio": Ratio.of(mine, theirs).record(),
    }
