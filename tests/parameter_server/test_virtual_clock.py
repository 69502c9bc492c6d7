"""Workers on a virtual clock: staleness and rate of updates against theory and papers.

A worker computes for a while, pushes, is answered at once and computes on. Equal workers differ by a jitter of up to
20 % each time, unless it says otherwise.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from stretto.parameter_server.shard import Shard, Update
from stretto.recipe.then import add
from stretto.recipe.when import on_arrival


@dataclass
class Run:
    """Measurements after the warm-up."""

    staleness: list[int]
    elapsed: float
    versions: int

    @property
    def mean(self) -> float:
        return sum(self.staleness) / len(self.staleness)

    def beyond(self, limit: int) -> float:
        """Return the fraction of updates that are staler than this."""
        return sum(one > limit for one in self.staleness) / len(self.staleness)


def jitter(rng: random.Random) -> float:
    """Return a service time around 1."""
    return rng.uniform(0.8, 1.2)


def exponential(rng: random.Random) -> float:
    """Return an exponential service time of rate 1."""
    return rng.expovariate(1.0)


def run(when: on_arrival, workers: int, pushes: int, service: Callable[[random.Random], float], seed: int = 0) -> Run:
    """Run a number of pushes in the order of the clock. The first 20 of each worker are its warm-up.

    With overlap an update is computed on what its worker had when it began: the reply to its last push but one.
    """
    rng = random.Random(seed)
    shard = Shard([torch.zeros(1)], when, add(), workers)
    nothing = [[torch.zeros(1)]]
    computed_on, heard, seqs = [0] * workers, [0] * workers, [0] * workers
    events = [(service(rng), worker) for worker in range(workers)]
    heapq.heapify(events)
    warm, began, first = 20 * workers, 0.0, 0
    staleness: list[int] = []
    for turn in range(warm + pushes):
        now, worker = heapq.heappop(events)
        seqs[worker] += 1
        shard.push(Update(worker, seqs[worker], computed_on[worker], 1, nothing))
        (reply,) = shard.pull(worker)
        reply.version.release()
        if turn >= warm:
            staleness += [one.staleness for one in reply.applied]
        else:
            began, first = now, shard.version
        computed_on[worker] = heard[worker] if when.overlap else reply.version.number
        heard[worker] = reply.version.number
        heapq.heappush(events, (now + service(rng), worker))
    return Run(staleness, now - began, shard.version - first)


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 30])
def test_staleness_of_equal_workers_is_the_number_of_others(workers: int) -> None:
    seen = run(on_arrival(), workers, pushes=100 * workers, service=jitter)
    assert seen.mean == pytest.approx(workers - 1, rel=0.1)


@pytest.mark.parametrize("workers", [2, 8, 30])
def test_overlap_doubles_staleness(workers: int) -> None:
    seen = run(on_arrival(overlap=True), workers, pushes=100 * workers, service=jitter)
    assert seen.mean == pytest.approx(2 * (workers - 1), rel=0.1)


@pytest.mark.parametrize("n", [1, 15, 30])
def test_staleness_of_softsync_equals_the_papers_measurement(n: int) -> None:
    """n-softsync of 30 workers applies after c = floor(N / n) updates."""
    seen = run(on_arrival(collect=30 // n), 30, pushes=6000, service=jitter)
    assert seen.mean == pytest.approx(n, rel=0.15)
    assert seen.beyond(2 * n) < 0.001


def test_softsync_of_one_has_no_update_staler_than_two() -> None:
    seen = run(on_arrival(collect=30), 30, pushes=6000, service=jitter)
    assert set(seen.staleness) <= {0, 1, 2}


@pytest.mark.parametrize(("workers", "k"), [(4, 1), (4, 4), (8, 3), (30, 10)])
def test_k_batch_async_applies_at_the_rate_of_k_updates(workers: int, k: int) -> None:
    """K-batch-async: the mean time between versions is K / (N mu), with exponential service times."""
    seen = run(on_arrival(collect=k), workers, pushes=15_000, service=exponential)
    assert seen.elapsed / seen.versions == pytest.approx(k / workers, rel=0.03)


@pytest.mark.parametrize("bound", [0, 2])
def test_the_staleness_bound_blocks_and_releases_fast_workers(bound: int) -> None:
    """One of four workers is ten times slower; no update is of a round past the bound, and all have its pace."""
    rng = random.Random(1)
    shard = Shard([torch.zeros(1)], on_arrival(bound=bound), add(), 4)
    slow = [10.0, 1.0, 1.0, 1.0]
    events = [(slow[worker] * jitter(rng), worker) for worker in range(4)]
    rounds, ahead = [0] * 4, 0
    heapq.heapify(events)
    now = 0.0
    while events and now < 1000:
        now, worker = heapq.heappop(events)
        assert rounds[worker] <= min(rounds) + bound
        rounds[worker] += 1
        ahead = max(ahead, max(rounds) - min(rounds))
        pushed = shard.push(Update(worker, rounds[worker], shard.version, 1, [[torch.zeros(1)]]))
        for reply in [*pushed, *shard.pull(worker)]:
            reply.version.release()
            heapq.heappush(events, (now + slow[reply.worker] * jitter(rng), reply.worker))
    assert now >= 1000
    assert shard.version == sum(rounds)
    assert rounds[0] == pytest.approx(100, abs=10)
    assert ahead == bound + 1
