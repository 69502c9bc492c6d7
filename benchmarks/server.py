"""Our parameter server's throughput over loopback, as a share of a bare connection's in the same run.

100 MB of parameters: workers push an update of their size, the server applies it, and the newest parameters come back
and are copied over the worker's. A bare pair of sockets moves the same 100 MB one way, and both ways at the same time,
in turns with ours. Then the same with an update of 4 KB: time of its exchange, and of a round trip of 4 KB on a bare
connection.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import in_turns
from benchmarks.peers import BYTES
from benchmarks.peers.sockets import PING, Pair
from benchmarks.push import Team, servers, team

QUESTION = "bytes both ways per second of push and pull of 100 MB, apply included, against a bare pair of sockets"
WANTED = 0.75
"""Wanted share of the bytes per second that the bare pair moves one way, without encryption."""
WANTED_MS = 0.3
"""Wanted milliseconds of an exchange of 4 KB."""
LARGE = 25_000_000
SMALL = 1000
STARTS = 3
REPETITIONS = 6
EXCHANGES = 3
"""Exchanges of 100 MB in one turn."""
PINGS = 300
"""Exchanges of 4 KB in one turn."""
ONE_WAY, BOTH_WAYS, BARE = "bare, one way", "bare, both ways", "bare"

Taken = Mapping[str, Sequence[Sequence[float]]]
"""Values of the turns, for each side and start."""


@dataclass(frozen=True)
class Way:
    """Number of workers that push at the same time, and True if their traffic is encrypted."""

    workers: int
    curve: bool


WAYS = {
    "plain, 1 worker": Way(1, False),
    "plain, 2 workers": Way(2, False),
    "CURVE, 1 worker": Way(1, True),
    "CURVE, 2 workers": Way(2, True),
}


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all sides, print the figures and write them to the results."""
    print(f"server: {QUESTION}", flush=True)
    large = _repeat(_measure_throughput, starts or STARTS)
    small = _repeat(_measure_round_trips, starts or STARTS)
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        "wanted_ms": WANTED_MS,
        "wanted_of": ONE_WAY,
        "bytes": BYTES * LARGE,
        "starts": starts or STARTS,
        "turns": REPETITIONS,
        "threads": 1,
        "bare": {name: _speed(large[name]).record() for name in (ONE_WAY, BOTH_WAYS)},
        "ways": {name: _shares(large, name) for name in WAYS},
        "round_trip_ms": {name: Spread.of(list(chain(*found))).record() for name, found in small.items()},
    }
    _show(record)
    print(f"  kept in {save('server', record, trial=starts is not None)}")
    return record


def _repeat(measure_once: Callable[[], Mapping[str, Sequence[float]]], starts: int) -> Taken:
    found = [measure_once() for _ in range(starts)]
    return {name: [one[name] for one in found] for name in found[0]}


def _measure_throughput() -> Mapping[str, Sequence[float]]:
    """Return nanoseconds per byte of all sides, which are connected at the same time: only one of them moves data."""
    with ExitStack() as stack:
        pair = stack.enter_context(closing(Pair()))
        sides: dict[str, Callable[[], float]] = {ONE_WAY: partial(_one_way, pair), BOTH_WAYS: partial(_both_ways, pair)}
        for name, way in WAYS.items():
            sides[name] = partial(_ours, stack.enter_context(connected_team(way, LARGE)), way.workers)
        return in_turns(sides, REPETITIONS)


def _measure_round_trips() -> Mapping[str, Sequence[float]]:
    """Return the median milliseconds of an exchange of 4 KB in each turn."""
    with ExitStack() as stack:
        pair = stack.enter_context(closing(Pair()))
        sides: dict[str, Callable[[], float]] = {BARE: partial(_pings, pair)}
        for name, way in {"plain": Way(1, False), "CURVE": Way(1, True)}.items():
            sides[name] = partial(_round_trips, stack.enter_context(connected_team(way, SMALL)))
        return in_turns(sides, REPETITIONS)


@contextmanager
def connected_team(way: Way, parameters: int) -> Iterator[Team]:
    """Connect workers to their own server, and check at the end that it has applied all pushed updates."""
    with (
        team(way.workers) as pushing,
        servers(way.workers, curve=way.curve) as server,
        pushing.connected_to(server, parameters),
    ):
        yield pushing
        pushing.outcome(0.0).rate()


def _one_way(pair: Pair) -> float:
    return 1e9 * sum(pair.one_way(BYTES * LARGE) for _ in range(EXCHANGES)) / (EXCHANGES * BYTES * LARGE)


def _both_ways(pair: Pair) -> float:
    return 1e9 * sum(pair.both_ways(BYTES * LARGE) for _ in range(EXCHANGES)) / (2 * EXCHANGES * BYTES * LARGE)


def _ours(pushing: Team, workers: int) -> float:
    """Return nanoseconds per byte: the bytes of all workers in the time of the slowest."""
    slowest = max(sum(one) for one in pushing.exchanges(EXCHANGES))
    return 1e9 * slowest / (2 * workers * EXCHANGES * BYTES * LARGE)


def _pings(pair: Pair) -> float:
    assert PING // BYTES >= SMALL
    return 1e3 * statistics.median(pair.pings(PINGS))


def _round_trips(pushing: Team) -> float:
    return 1e3 * statistics.median(pushing.exchanges(PINGS)[0])


def _speed(ns_a_byte: Sequence[Sequence[float]]) -> Spread:
    """Return the spread in GB/s."""
    return Spread.of([1 / one for one in chain(*ns_a_byte)])


def _shares(taken: Taken, name: str) -> dict[str, Any]:
    return {
        "gb_per_s": _speed(taken[name]).record(),
        "of_one_way": Ratio.of(taken[name], taken[ONE_WAY]).record(),
        "of_both_ways": Ratio.of(taken[name], taken[BOTH_WAYS]).record(),
    }


def _show(record: Mapping[str, Any]) -> None:
    for name, speed in record["bare"].items():
        print(f"  {name:18} {speed['median']:6.2f} GB/s")
    for name, one in record["ways"].items():
        shares = [f"{_shown(one[of])} of {of[3:].replace('_', ' ')}" for of in ("of_one_way", "of_both_ways")]
        asked = f" (wanted at least {WANTED:g} of one way)" if not WAYS[name].curve else ""
        print(f"  {name:18} {one['gb_per_s']['median']:6.2f} GB/s both ways together, {', '.join(shares)}{asked}")
    for name, one in record["round_trip_ms"].items():
        print(f"  4 KB round trip, {name:6} {one['median']:.3f} ms (wanted at most {WANTED_MS:g})")


def _shown(ratio: Mapping[str, float | None]) -> str:
    error = ratio["standard_error"]
    return f"{ratio['median']:.3f}" + (f" ± {error:.3f}" if error is not None else "")
