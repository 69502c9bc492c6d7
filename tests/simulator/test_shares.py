"""Time of steps with shares: a worker takes a fixed time a step and a time a sample; the slowest is waited for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from simulator.harness import Ended, now, simulated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.data.shares import shares_of, step_s
from stretto.errors import LaunchError
from stretto.simulator.compute.cost_model import CostModel

SLOW = "1,1,1,5"
"""Four workers, the last of which is five times slower."""


def counting(samples: int, batch: int, epochs: int = 1) -> Any:
    """Return a worker's function that returns the sizes of its batches, and the virtual time after each."""

    def work(worker: int) -> list[tuple[int, float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        data = TensorDataset(torch.ones(samples, 1), torch.ones(samples, 1))
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=batch, shuffle=True))
        steps = []
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                steps.append((len(x), now()))
        return steps

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=1)"])
@pytest.mark.parametrize(("shares", "sizes"), [("even", (16, 16, 16, 16)), ("1:1:1:0.2", (20, 20, 20, 4))])
def test_a_step_takes_its_fixed_time_and_that_of_its_samples(recipe: str, shares: str, sizes: tuple[int, ...]) -> None:
    cost = CostModel(0.01, sample_s=0.001)
    ended = simulated(4, counting(640, 16), recipe, speed=SLOW, cost_model=cost, asks={"shares": shares})
    slowest = max((0.01 + 0.001 * size) * factor for size, factor in zip(sizes, (1, 1, 1, 5), strict=True))
    assert [tuple(size for size, _ in step) for step in zip(*ended.found, strict=True)] == [sizes] * 10
    assert ended.seconds == pytest.approx(10 * slowest)


def sizes_of(ended: Ended) -> list[tuple[int, ...]]:
    """Return the shares of the workers in each global step."""
    return [tuple(size for size, _ in step) for step in zip(*ended.found, strict=True)]


def step_times(ended: Ended) -> list[float]:
    """Return the time of each global step, to the end of its slowest worker."""
    ends = [0.0, *(max(at for _, at in step) for step in zip(*ended.found, strict=True))]
    return [after - before for before, after in pairwise(ends)]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_shares_by_speed_train_nearly_as_fast_as_all_workers_together(recipe: str) -> None:
    """Workers at speeds 1:1:1:0.2 have 3.2 times the speed of one; even shares have 0.8."""
    cost = CostModel(0.0, sample_s=0.001)
    even, fast = (
        simulated(4, counting(3200, 16), recipe, speed=SLOW, cost_model=cost, asks={"shares": shares})
        for shares in ("even", "speed")
    )
    assert even.seconds == pytest.approx(50 * 0.08)
    assert sum(step_times(even)[22:]) / sum(step_times(fast)[22:]) >= 3.6
    assert {sum(step) for step in sizes_of(fast)} == {64}
    assert sizes_of(fast)[-1] in [(20, 20, 20, 4), (21, 20, 20, 3)]
    line = (
        "worker 3 is 5.0 times slower than the fastest of 4 workers: --shares speed would train up to 4.0 times as fast"
    )
    assert [line in [one["text"] for one in ended.of("warning")] for ended in (even, fast)] == [True, False]


@pytest.mark.parametrize(("fixed_s", "sample_s"), [(0.02, 0.001), (0.1, 0.001), (0.1, 0.0)])
def test_shares_by_speed_are_the_best_where_a_step_has_a_fixed_cost(fixed_s: float, sample_s: float) -> None:
    """In proportion to the speeds they would run away to the smallest share, and gain nothing."""
    asks = {"shares": "speed"}
    cost = CostModel(fixed_s, sample_s=sample_s)
    ended = simulated(4, counting(2560, 16), "allreduce", speed=SLOW, cost_model=cost, asks=asks)
    paces = tuple((fixed_s * factor, sample_s * factor + 1e-9) for factor in (1, 1, 1, 5))
    best = step_s(shares_of(64, 4, paces, ()), paces)
    assert step_times(ended)[20:] == pytest.approx([best] * 20, rel=0.1)


def test_equal_workers_keep_even_shares() -> None:
    cost, asks = CostModel(0.001, sample_s=0.001), {"shares": "speed"}
    ended = simulated(4, counting(2560, 16), "allreduce", speed="lognormal(0.1, each=step)", cost_model=cost, asks=asks)
    assert set(sizes_of(ended)) == {(16, 16, 16, 16)}
    assert [one["after"] for one in ended.of("shares")] == [None]


def test_shares_by_speed_give_the_model_of_even_shares() -> None:
    cost = CostModel(0.001, sample_s=0.001)
    even, fast = (
        simulated(4, counting(1280, 16), "allreduce", speed=SLOW, cost_model=cost, asks={"shares": shares})
        for shares in ("even", "speed")
    )
    whole, found = safetensors.load(even.final), safetensors.load(fast.final)
    assert sizes_of(fast)[-1] != (16, 16, 16, 16)
    assert all(torch.allclose(whole[name], found[name], rtol=1e-6) for name in whole)


def test_the_shares_of_a_run_are_repeated_exactly(tmp_path: Path) -> None:
    cost = CostModel(0.005, sample_s=0.001)
    work = counting(960, 16, 2)
    first = simulated(4, work, "allreduce", speed=SLOW, cost_model=cost, asks={"shares": "speed"}, folder=tmp_path)
    again = simulated(4, work, "local_sgd(every=4)", asks={"shares": str(tmp_path / "run")})
    moves = [one for one in first.of("shares") if one["after"] is not None]
    assert len(moves) >= 2
    assert sizes_of(first) == sizes_of(again)
    assert first.of("shares")[-1]["measured_s"] == pytest.approx(moves[-1]["predicted_s"], rel=0.1)


def test_the_shares_of_a_run_with_even_ones_are_refused(tmp_path: Path) -> None:
    simulated(2, counting(64, 16), "allreduce", folder=tmp_path)
    with pytest.raises(LaunchError, match="there are no shares to repeat"):
        simulated(2, counting(64, 16), "allreduce", asks={"shares": str(tmp_path / "run")})


@pytest.mark.parametrize(("recipe", "at"), [("allreduce", 60), ("allreduce", 687), ("local_sgd(every=4)", 231)])
def test_a_worker_that_returns_agrees_on_speeds_when_the_others_do(recipe: str, at: int) -> None:
    ended = simulated(
        4,
        counting(1280, 16, 2),
        recipe,
        speed=SLOW,
        cost_model=CostModel(0.005, sample_s=0.001),
        fault=f"kill worker {at % 4} at {at}ms, back after {40 + at % 130}ms",
        asks={"shares": "speed"},
    )
    counts = [one["sample_counts"] for one in ended.of("epoch")]
    assert counts == [{"once": 1280, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert [one["shares"] for one in ended.of("shares") if one["after"] is not None and one["t"] > 0.001 * at]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_every_sample_is_trained_once_where_workers_fail_and_return_while_shares_move(recipe: str) -> None:
    ended = simulated(
        4,
        counting(1280, 16, 2),
        recipe,
        speed=SLOW,
        cost_model=CostModel(0.005, sample_s=0.001),
        fault="kill worker 1 at 250ms, back after 300ms; kill worker 3 at 900ms, back after 200ms",
        asks={"shares": "speed"},
    )
    counts = [one["sample_counts"] for one in ended.of("epoch")]
    assert counts == [{"once": 1280, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert [one for one in ended.of("shares") if one["after"] is not None]
    assert len(ended.of("generation_changed")) == 4
