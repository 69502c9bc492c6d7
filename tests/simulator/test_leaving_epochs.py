"""Asynchronous workers, some of which leave an epoch early: the others train on the rest of it."""

from __future__ import annotations

from typing import Any

import pytest
from combinations import pairwise
from simulator.failures import ALL, FREE, NET, SAMPLES, is_whole, seen, training
from simulator.harness import simulated
from thread_workers import flat, regression, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import LaunchError

EVERY = [*FREE, "stale_synchronous(bound=0)"]


@pytest.mark.parametrize(("recipe", "after", "who"), pairwise(EVERY, [0, 1, 2], [0, 1]))
def test_batches_that_one_worker_leaves_are_done_by_others(recipe: str, after: int, who: int) -> None:
    ended = simulated(3, training(leaves=lambda worker, steps: worker == who and steps == after), recipe, net=NET)
    is_whole(ended, recipe)
    own = {one["worker"]: one["samples"] for one in ended.of("end")}
    assert own[who] == 2 * 4 * after


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_batches_that_all_workers_leave_are_not_done(recipe: str, after: int) -> None:
    """An epoch that all workers leave after one batch without a step is a peek, not an epoch."""
    ended = simulated(3, training(leaves=lambda _, steps: steps == after), recipe, net=NET)
    assert seen(ended) == [ALL | {"once": 12 * after, "never": SAMPLES - 12 * after}] * (2 if after else 0)
    assert [one["samples"] for one in ended.of("epoch")] == [12 * after, 24 * after] * bool(after)
    left = [(one["epoch"], one["samples"], one["batches"]) for one in ended.of("samples_left")]
    assert left == [(epoch, SAMPLES - 12 * after, 11 - 3 * after) for epoch in (1, 2) if after]
    assert len([one for one in ended.of("warning") if "no loop has asked for" in one["text"]]) == bool(after)


@pytest.mark.parametrize("every", [1, 2])
def test_worker_that_left_an_epoch_takes_part_in_collectives(every: int) -> None:
    def judged(net: nn.Module) -> dict[str, float]:
        return {"norm": float(flat(net).norm())}

    work = training(leaves=lambda worker, steps: worker == 1 and steps == 1, evaluate=judged, evaluate_every=every)
    ended = simulated(3, work, "async_sgd", net=NET)
    is_whole(ended, "async_sgd")
    assert len(ended.of("evaluation")) >= 2 * (SAMPLES // 4 // 3 // every)


@pytest.mark.parametrize("at", range(20, 240, 20))
def test_worker_that_left_an_epoch_stays_out_after_a_server_failure(at: int) -> None:
    work = training(leaves=lambda worker, steps: worker == 1 and steps == 1)
    ended = simulated(3, work, "async_sgd", net=NET, fault=f"kill server 0 at {at}ms, back after 10ms")
    is_whole(ended, "async_sgd")


@pytest.mark.parametrize(
    ("recipe", "workers", "until"),
    pairwise(FREE, [2, 3], [{"samples": SAMPLES}, {"samples": 2 * SAMPLES}, {"samples": 60}, {"time_s": 0.15}]),
)
def test_no_worker_starts_the_next_epoch_after_one_has_stopped(recipe: str, workers: int, until: Any) -> None:
    ended = simulated(workers, training(epochs=9), recipe, net=NET, **until)
    assert len(ended.of("end")) == workers
    assert ended.found == [None] * workers
    *before, last = seen(ended)
    assert before == [ALL] * len(before)
    assert last["twice"] == 0
    assert "time_s" in until or len(before) == (until["samples"] - 1) // SAMPLES


def test_an_iterator_that_ends_before_the_count_of_its_loop_is_explained() -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=4))
        batches = iter(loader)
        for _ in range(len(loader)):
            x, y = next(batches)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    with pytest.raises(LaunchError, match="StopIteration: an iterator has ended before the loop's count"):
        simulated(3, work, "async_sgd", net=NET)
