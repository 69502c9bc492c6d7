"""Shares by speed: they follow the measured times of the workers, at workers that agree, without oscillation."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from elastic_workers import WorkerKilled, run_elastic_workers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thread_workers import regression, run_workers, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stretto
from stretto.data.shares import UNLIMITED, Paces, Timed, cuts, of_members, paces_of, proposed, shares_of, step_s
from stretto.events import read_events
from stretto.interval import every
from stretto.training.speed_shares import FEWEST_STEPS, StepTimes

SAMPLES, LEAST = 64, 2


def driven(
    times: Sequence[Callable[[int], tuple[float, float]]], steps: int, ahead: int = 0, noise: float = 0.0
) -> list[list[int]]:
    """Return the shares of each step, where each worker has a function from the step to its two times.

    The workers agree every few steps, and shares apply after steps that were loaded ahead.
    """
    drawn, own = random.Random(1), [StepTimes() for _ in times]
    members, now, waiting = range(len(times)), dict[int, tuple[float, float]](), list[tuple[int, Paces]]()
    division: Paces = {}
    found = []
    for step in range(steps):
        while waiting and waiting[0][0] <= step:
            division = waiting.pop(0)[1]
        shares = shares_of(SAMPLES, len(times), of_members(division, members), ())
        found.append(shares)
        for worker, share in enumerate(shares):
            fixed, each = times[worker](step)
            own[worker].note(share, (fixed + each * share) * (1 + noise * drawn.uniform(-1, 1)))
        if step % FEWEST_STEPS == FEWEST_STEPS - 1:
            last = [one.last() for one in own]
            if waiting or None in last:
                continue
            timed = {worker: Timed(*(last[worker] or (0, 0)), one.fixed) for worker, one in enumerate(own)}
            proposal = proposed(now, paces_of(timed, now), members, SAMPLES, {})
            if proposal.paces is not None:
                now = dict(proposal.paces)
                waiting.append((step + 1 + ahead, now))
    return found


def moves_of(found: list[list[int]]) -> int:
    return sum(one != after for one, after in pairwise(found))


PACES = st.tuples(st.floats(0, 5), st.floats(0.05, 5))


@given(st.lists(PACES, min_size=2, max_size=6), st.integers(12, 300))
def test_no_other_division_makes_a_step_faster(paces: list[tuple[float, float]], samples: int) -> None:
    """A sample that moves from one worker to another makes no step faster, and shares sum to the samples."""
    ends = cuts(samples, tuple(paces), (UNLIMITED,) * len(paces))
    shares = [stop - start for start, stop in pairwise(ends)]
    assert (ends[0], ends[-1]) == (0, samples) and min(shares) >= LEAST
    best = step_s(shares, paces)
    for taken in range(len(paces)):
        for given_to in range(len(paces)):
            other = shares.copy()
            other[taken], other[given_to] = other[taken] - 1, other[given_to] + 1
            assert other[taken] < LEAST or step_s(other, paces) >= best * (1 - 1e-9)


@settings(deadline=None)
@given(st.lists(PACES, min_size=2, max_size=5), st.sampled_from([0, 4]))
@example([(2.0, 3.625), (2.0, 3.625), (3.0, 1.234375), (3.5, 3.5625), (3.0, 1.234375)], 0)
def test_shares_reach_the_best_time_of_a_step_and_rest(paces: list[tuple[float, float]], ahead: int) -> None:
    """Also where a fixed cost dominates: shares in proportion to the speeds would run away from it."""
    found = driven([lambda step, pace=pace: pace for pace in paces], 120, ahead)
    best = step_s(shares_of(SAMPLES, len(paces), tuple(paces), ()), paces)
    assert step_s(found[-1], paces) <= 1.15 * best
    assert moves_of(found[80:]) == 0


@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_speed_by_2_is_followed_within_20_steps_without_oscillation(factor: float, ahead: int) -> None:
    def changing(step: int) -> tuple[float, float]:
        now = factor if step >= 50 else 1.0
        return 0.1 * now, 0.01 * now

    found = driven([changing, *[lambda _: (0.1, 0.01)] * 3], 150, ahead, noise=0.02)
    paces = [(0.1 * factor, 0.01 * factor), *[(0.1, 0.01)] * 3]
    best = step_s(shares_of(SAMPLES, 4, tuple(paces), ()), paces)
    assert {tuple(shares) for shares in found[:50]} == {(16, 16, 16, 16)}
    assert step_s(found[50 + 20 + ahead], paces) <= 1.1 * best or best >= 0.95 * step_s([16] * 4, paces)
    assert moves_of(found[50 + 40 + 2 * ahead :]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_with_varying_times_keep_even_shares(seed: int) -> None:
    drawn = random.Random(seed)
    found = driven([lambda step: (0.1 * drawn.uniform(0.9, 1.1), 0.01)] * 4, 200, noise=0.05)
    assert {tuple(shares) for shares in found} == {(16, 16, 16, 16)}


class Loaded(Dataset[Any]):
    """A data set that says which process has loaded a sample."""

    def __init__(self, samples: int) -> None:
        self.data = regression(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid(), *self.data[index]


def recording(samples: int, dies_at: Any = None, **options: Any) -> Any:
    """Return a worker's function that returns, by step, the samples of its batches and their loader processes.

    Worker 1 computes ten times slower than the others.
    """

    def work(worker: int) -> list[tuple[list[int], set[int]]]:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(Loaded(samples), batch_size=16, shuffle=True, **options))
        steps = list[tuple[list[int], set[int]]]()
        for numbers, processes, x, y in loader:
            if (worker, len(steps)) == dies_at:
                raise WorkerKilled
            optimizer.zero_grad()
            time.sleep(len(x) * (0.003 if worker == 1 else 0.0003))
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            steps.append((numbers.tolist(), set(processes.tolist())))
        stretto.finish()
        return steps

    return work


def moves_in(run: Path) -> list[Any]:
    return [one for one in read_events(run / "events.jsonl") if one["event"] == "shares" and one["after"] is not None]


@pytest.mark.parametrize("processes", [0, 2])
def test_shares_move_after_what_was_loaded_ahead_and_no_batch_is_lost(processes: int, tmp_path: Path) -> None:
    work = recording(1280, num_workers=processes)
    found = run_workers(2, work, "allreduce", run=tmp_path, shares="speed")
    assert sorted(one for steps in found for numbers, _ in steps for one in numbers) == [*range(1280)]
    assert [len(steps) for steps in found] == [40, 40]
    assert all(len(set.union(*(loaded for _, loaded in steps))) == max(processes, 1) for steps in found)
    sizes = [[len(numbers) for numbers, _ in steps] for steps in found]
    moves = moves_in(tmp_path)
    assert sizes[0][-1] > sizes[1][-1] > 0
    for move in moves[:1]:
        assert move["after"] >= FEWEST_STEPS + (2 * processes if processes else 0)
        assert sizes[0][: move["after"]] == [16] * move["after"]
        assert [one[move["after"]] for one in sizes] == move["shares"]


def test_shares_by_speed_survive_a_failure(tmp_path: Path) -> None:
    work = recording(960, dies_at=(2, 12))
    found, _ = run_elastic_workers(3, work, "allreduce", tmp_path, shares="speed")
    left = [steps for steps in found if steps is not None]
    assert {len(steps) for steps in left} == {20}
    seen = [one for steps in left for numbers, _ in steps for one in numbers]
    assert len(seen) == len(set(seen))
    record = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"][-1]
    assert record["sample_counts"] == {"once": 960, "twice": 0, "never": 0, "dropped": 0}
    sizes = [len(steps[-1][0]) for steps in left]
    assert sizes[0] > sizes[1]


@pytest.mark.usefixtures("every_checkpoint")
def test_a_resumed_run_continues_with_the_shares_and_the_moves_of_its_checkpoint(tmp_path: Path) -> None:
    work, kept = recording(640, num_workers=2), {"checkpoint": every("1 rounds"), "keep": 99}
    begun = run_workers(2, work, "allreduce", run=tmp_path, shares="speed", **kept)
    after = moves_in(tmp_path)[0]["after"]
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[after - 3]
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    found = run_workers(2, work, "allreduce", resume=tmp_path / "first", shares="speed")
    done = after - 2
    before, later = ([[len(numbers) for numbers, _ in steps] for steps in one] for one in (begun, found))
    assert [one[:4] for one in later] == [one[done : done + 4] for one in before]
    assert later[0][:2] == [16, 16]
    assert later[0][2] > 16
    seen = [one for steps in begun for numbers, _ in steps[:done] for one in numbers]
    assert sorted([*seen, *(one for steps in found for numbers, _ in steps for one in numbers)]) == [*range(640)]
