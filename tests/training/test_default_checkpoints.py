"""Checkpoints for which no interval was typed: written after the first ten minutes, and no reason why a run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import mostly_long
from elastic_workers import ThreadCoordinator, run_elastic_workers
from thread_workers import flat, regression, run_one_worker, run_workers, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ScriptError
from stretto.events import read_events
from stretto.interval import Interval
from stretto.runtime.runtime import Runtime

FIRST_S, STEP_S = 600.0, 10.0
pytestmark = pytest.mark.usefixtures("every_checkpoint")


class HandClock(Runtime):
    """A runtime whose clock a test sets, which all workers share."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._lock = 0.0, threading.Lock()

    def clock(self) -> float:
        """Return the seconds that have passed."""
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self.now += seconds


def default() -> Interval:
    return Interval(FIRST_S, follows_cost=True)


def training(
    epochs: int, each_step: Callable[[int, int], None] = lambda _, __: None, unsaved: int | None = None
) -> Callable[[int], Any]:
    """Return a script that calls `each_step(worker, steps)`; worker `unsaved` keeps a value that no file can hold."""

    def work(worker: int) -> Any:
        net, kept = small_net(), stretto.checkpointed(seen=[])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        source = torch.Generator().manual_seed(3)
        data = DataLoader(regression(96), batch_size=4, shuffle=True, generator=source)
        loader = stretto.distribute(net, optimizer, data)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if worker == unsaved and not kept.seen:
                    kept.seen.append(object())
                each_step(worker, stretto.steps())
        return flat(net)

    return work


def rounds(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("round-*"))


def warnings(run: Path, about: str = "checkpoints") -> list[str]:
    texts = [event["text"] for event in read_events(run / "events.jsonl") if event["event"] == "warning"]
    return [text for text in texts if about in text]


def test_a_single_worker_writes_the_first_checkpoint_when_the_time_has_passed(tmp_path: Path) -> None:
    clock = HandClock()
    work = training(4, lambda _, __: clock.pass_by(9.0))  # 96 steps
    run_one_worker(work, run=tmp_path, checkpoint=default(), runtime=clock, keep=9)
    numbers = [int(name.removeprefix("round-")) for name in rounds(tmp_path)]
    assert numbers == [67, 74, 81, 88, 95], "after 600 s, then each 60 s, since one costs little; none at the end"


def test_a_run_that_ends_before_writes_nothing_and_trains_the_same_bits(tmp_path: Path) -> None:
    clock = HandClock()
    work = training(2, lambda _, __: clock.pass_by(STEP_S))
    found = run_one_worker(work, run=tmp_path, checkpoint=default(), runtime=clock)
    assert torch.equal(found, run_one_worker(training(2)))
    assert not (tmp_path / "checkpoints").exists()


def test_sections_share_the_time_up_to_the_first_checkpoint(tmp_path: Path) -> None:
    clock = HandClock()
    each = training(1, lambda _, __: clock.pass_by(STEP_S))  # 240 s

    def work(worker: int) -> None:
        for _ in range(4):
            each(worker)

    run_one_worker(work, run=tmp_path, checkpoint=default(), runtime=clock)
    assert not rounds(tmp_path) and rounds(tmp_path / "section-3")


def test_workers_over_a_server_write_at_the_first_epoch_end_after_the_time(tmp_path: Path) -> None:
    clock = HandClock()
    work = training(4, lambda _, __: clock.pass_by(STEP_S * 1.3))
    run_workers(2, work, "async_sgd", run=tmp_path, checkpoint=default(), runtime=clock)
    (first, *_) = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "checkpoint"]
    assert first["t"] >= FIRST_S and first["samples"] == 2 * 96


class Interrupted:
    """Asks a coordinator for a checkpoint when worker 0 has made some steps, and again later."""

    def __init__(self, coordinator: ThreadCoordinator, at: tuple[int, ...]) -> None:
        self._coordinator, self._at = coordinator, [*at]

    def __call__(self, worker: int, steps: int) -> None:
        if worker == 0 and self._at and steps >= self._at[0]:
            self._at.pop(0)
            self._coordinator.hold(save=True)


RECIPES = mostly_long(["allreduce", "local_sgd(every=2)", "gossip", "power_sgd"], short=(0, 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_is_resumed_from_one_ends_with_the_bits_of_the_whole_run(recipe: str, tmp_path: Path) -> None:
    whole, _ = run_elastic_workers(2, training(3), recipe, tmp_path / "whole", checkpoint=default())
    coordinator = ThreadCoordinator(2)
    work = training(2, Interrupted(coordinator, (8,)))
    run_elastic_workers(2, work, recipe, tmp_path / "first", coordinator=coordinator, checkpoint=default())
    assert len(rounds(tmp_path / "first")) == 1 and not rounds(tmp_path / "whole")
    found, _ = run_elastic_workers(
        2, training(3), recipe, tmp_path / "second", resume=tmp_path / "first", checkpoint=default()
    )
    assert all(torch.equal(one, each) for one, each in zip(found, whole, strict=True))


@pytest.mark.parametrize("unsaved", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_that_cannot_be_saved_is_said_once_and_training_continues(
    recipe: str, unsaved: int, tmp_path: Path
) -> None:
    whole, _ = run_elastic_workers(2, training(2), recipe, tmp_path / "whole")
    coordinator = ThreadCoordinator(2)
    work = training(2, Interrupted(coordinator, (6,)), unsaved)
    options: dict[str, Any] = {"coordinator": coordinator, "checkpoint": default()}
    found, _ = run_elastic_workers(2, work, recipe, tmp_path / "run", **options)
    assert all(torch.equal(one, each) for one, each in zip(found, whole, strict=True))
    (said,) = warnings(tmp_path / "run")
    assert said == "no checkpoints are written, and training continues: stretto.checkpointed can't save seen[0]"
    assert not rounds(tmp_path / "run")


def test_over_a_server_it_is_said_once_as_well(tmp_path: Path) -> None:
    clock = HandClock()
    work = training(6, lambda _, __: clock.pass_by(STEP_S), unsaved=1)
    run_workers(2, work, "async_sgd", run=tmp_path, checkpoint=default(), runtime=clock)
    assert len(warnings(tmp_path)) == 1 and not rounds(tmp_path)


def test_a_typed_interval_still_refuses_a_state_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"stretto.checkpointed can't save seen\[0\]"):
        run_one_worker(training(1, unsaved=0), run=tmp_path, checkpoint=Interval(rounds=4))


def reading(each_step: Callable[[int, int], None], draws: bool) -> Callable[[int], list[float]]:
    """Return a script that trains on a stream, which may draw from the generators of the script."""

    def batches() -> Iterator[torch.Tensor]:
        for number in range(90):
            yield torch.full((2, 6), float(number)) + (torch.rand(2, 6) if draws else 0.0)

    def work(worker: int) -> list[float]:
        torch.manual_seed(0)
        net, found = small_net(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for x in stretto.distribute(net, optimizer, batches()):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            found.append(float(x.sum()))
            each_step(worker, len(found))
        return found

    return work


def test_a_stream_continues_from_a_checkpoint_with_the_same_batches(tmp_path: Path) -> None:
    clock = HandClock()
    work = reading(lambda _, __: clock.pass_by(STEP_S), draws=True)
    whole = run_one_worker(work, run=tmp_path, checkpoint=default(), runtime=clock, keep=9)
    (first, *_) = rounds(tmp_path)
    assert first == "round-00000061", "what proves the place is kept from the batch on at which the checkpoint is due"
    found = run_one_worker(reading(lambda _, __: None, draws=True), resume=tmp_path)
    assert found == whole[-len(found) :]
    assert len(warnings(tmp_path, "the stream has no state_dict: --resume reads it again to its place")) == 1


def test_workers_that_do_not_wait_meet_within_a_stream_only_when_the_time_has_passed(tmp_path: Path) -> None:
    clock = HandClock()
    work = reading(lambda _, __: clock.pass_by(STEP_S), draws=False)
    run_workers(2, work, "async_sgd", run=tmp_path, checkpoint=default(), runtime=clock)
    written = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "checkpoint"]
    assert written and written[0]["t"] >= FIRST_S
    assert written[0]["samples"] < 180, "before the end of the stream"
