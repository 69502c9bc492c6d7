"""Learning-rate schedulers end as in one process, under every recipe, also if workers make unequal numbers of steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from simulator.harness import simulated
from thread_workers import regression, run_one_worker, run_workers, small_net
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

import stretto
from stretto import api
from stretto.data.assignment import step_bounds
from stretto.errors import ScriptError
from stretto.events import read_events
from stretto.interval import every
from stretto.recipe.parser import parse
from stretto.training.progress import LoopProgress
from stretto.training.schedule import Schedules

BATCH, EPOCHS = 4, 3
SAMPLES = 15 * BATCH + 3
EPOCH = math.ceil(SAMPLES / BATCH)
TOTAL = EPOCHS * EPOCH
"""Number of steps of one process."""
RECIPES = ["allreduce", "local_sgd(every=3)", "diloco(every=4)", "downpour(every=1)"]

Make = Callable[[torch.optim.Optimizer], Any]


def linear_decay(step: int, *, num_training_steps: int) -> float:
    """Return the factor of a linear decay, as transformers defines it."""
    return max(0.0, 1 - step / num_training_steps)


KINDS: dict[str, Make] = {
    "one cycle": lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=TOTAL),
    "cosine": lambda one: schedulers.CosineAnnealingLR(one, TOTAL),
    "lambda": lambda one: schedulers.LambdaLR(one, functools.partial(linear_decay, num_training_steps=TOTAL)),
    "sequential": lambda one: schedulers.SequentialLR(
        one, [schedulers.LinearLR(one, 0.1, total_iters=5), schedulers.CosineAnnealingLR(one, TOTAL - 5)], [5]
    ),
    "chained": lambda one: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(one, 0.5, 7), schedulers.ExponentialLR(one, 0.9)]
    ),
    "restarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 10, 2),
    "milestones": lambda one: schedulers.MultiStepLR(one, [TOTAL // 3, TOTAL - 5]),
}


def rates(
    make: Make,
    before: bool = True,
    distribute: bool = True,
    accumulate: int = 1,
    before_step: Callable[[int, int], None] = lambda worker, step: None,
    epochs: int = EPOCHS,
    **options: Any,
) -> Callable[[int], Any]:
    """Return a script that returns the learning rate after each call of the scheduler."""

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
        schedule = make(optimizer) if before else None
        loader: Any = DataLoader(regression(SAMPLES), batch_size=BATCH)
        if distribute:
            loader = stretto.distribute(net, optimizer, loader, **options)
        schedule = schedule or make(optimizer)
        found = []
        for _ in range(epochs):
            for number, (x, y) in enumerate(loader):
                before_step(worker, len(found))
                nn.functional.mse_loss(net(x), y).backward()
                if (number + 1) % accumulate == 0:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    found.append(optimizer.param_groups[0]["lr"])
        return found

    return work


def plain(make: Make, **options: Any) -> list[float]:
    """Return the learning rates of one process without `distribute`."""
    found: list[float] = rates(make, distribute=False, **options)(0)
    return found


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rates_equal_those_of_one_process_after_as_many_samples(kind: str, before: bool) -> None:
    single_process = plain(KINDS[kind])
    ends = [math.ceil(samples / BATCH) - 1 for samples in step_bounds(SAMPLES, 3 * BATCH)[1:]]
    expected = [single_process[EPOCH * epoch + at] for epoch in range(EPOCHS) for at in ends]
    for found in run_workers(3, rates(KINDS[kind], before), "allreduce"):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["one cycle", "lambda", "sequential"])
def test_schedules_reach_their_end_under_every_recipe(kind: str, recipe: str) -> None:
    single_process = plain(KINDS[kind])
    lasts = [found[-1] for found in run_workers(3, rates(KINDS[kind]), recipe)]
    assert min(abs(one - single_process[-1]) for one in lasts) < 1e-9
    if not parse(recipe).asynchronous:  # where no worker waits, the last step of a slow one may be far from the end
        assert all(one <= single_process[-6] for one in lasts)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_computes_the_plain_schedule(kind: str) -> None:
    assert run_one_worker(rates(KINDS[kind]), "allreduce") == plain(KINDS[kind])


def test_length_taken_from_the_distributed_loader_counts_global_steps() -> None:
    steps: list[list[int]] = []

    def work(worker: int) -> tuple[float, int]:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH))
        schedule = schedulers.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(loader), cycle_momentum=False)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                schedule.step()
        steps.append([schedule.last_epoch, EPOCHS * len(loader)])
        return optimizer.param_groups[0]["lr"], schedule.last_epoch

    run_workers(3, work, "allreduce")
    assert all(made == total for made, total in steps)
    steps.clear()
    run_workers(3, work, "downpour(every=1)")
    assert all(made <= total for made, total in steps)
    assert max(made - total for made, total in steps) >= -3


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_advances_once_for_each_step_of_one_process(accumulate: int) -> None:
    total = TOTAL // accumulate
    work = rates(lambda one: schedulers.LinearLR(one, 1.0, 0.0, total), accumulate=accumulate)
    found = run_workers(3, work, "allreduce")
    assert all(one[-1] <= 0.01 * 3.1 / total for one in found)
    assert all(one[-2] > 0 for one in found)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "diloco(every=2)"])
@pytest.mark.parametrize("steps_with", ["full windows", "left over batches, too"])
@pytest.mark.parametrize("batches", [38, 44])
def test_accumulation_that_restarts_in_each_epoch_ends_as_in_one_process(
    batches: int, steps_with: str, recipe: str
) -> None:
    """Batches left over at the end of an epoch are dropped, or make a step of their own, as in one process."""

    def work(distribute: bool) -> Callable[[int], list[int]]:
        def run(worker: int) -> list[int]:
            net = small_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            schedule = schedulers.CosineAnnealingLR(optimizer, 6 * batches)
            loader: Any = DataLoader(regression(4 * batches), batch_size=4)
            if distribute:
                loader = stretto.distribute(net, optimizer, loader)
            found = []
            for _ in range(6):
                optimizer.zero_grad()
                for i, (x, y) in enumerate(loader):
                    nn.functional.mse_loss(net(x), y).backward()
                    if (i + 1) % 4 == 0 or (steps_with != "full windows" and i + 1 == len(loader)):
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                found.append(schedule.last_epoch)
            return found

        return run

    single_process = work(distribute=False)(0)
    assert single_process[-1] == 6 * (batches // 4 if steps_with == "full windows" else math.ceil(batches / 4))
    found = run_workers(3, work(distribute=True), recipe)
    if steps_with == "full windows" and batches == 44:  # no step follows the last three global steps of an epoch
        single_process = [one - 2 for one in single_process]
    assert found == [single_process] * 3


ONCE = [
    ("allreduce", "after the loop"),
    ("allreduce", "after a break"),
    ("allreduce", "at the last batch"),
    ("downpour(every=1)", "after the loop"),
    ("downpour(every=1)", "after a break"),
]


@pytest.mark.parametrize(("recipe", "where"), ONCE)
def test_schedule_advanced_per_epoch_advances_once_per_epoch(recipe: str, where: str) -> None:
    def work(worker: int) -> int:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        schedule = schedulers.StepLR(optimizer, 1)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH))
        last = len(loader) - 1
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if where == "at the last batch" and number == last:
                    schedule.step()
                if where == "after a break" and number == 2:
                    break
            if where != "at the last batch":
                schedule.step()
        return schedule.last_epoch

    assert run_workers(3, work, recipe) == [EPOCHS] * 3


def test_plateau_scheduler_advances_once_per_call() -> None:
    def work(worker: int) -> int:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        schedule = schedulers.ReduceLROnPlateau(optimizer)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH)):
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            schedule.step(1.0)
        return schedule.last_epoch

    found = run_workers(3, work, "local_sgd(every=1)")
    assert found[0] == math.ceil(EPOCH / 3)


def test_schedule_of_another_optimizer_is_not_changed() -> None:
    def work(worker: int) -> int:
        net, other = small_net(), torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        schedule = schedulers.StepLR(torch.optim.SGD([other], lr=0.01), 1)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH)):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            schedule.optimizer.step()
            schedule.step()
        return schedule.last_epoch

    assert max(run_workers(3, work, "allreduce")) == math.ceil(EPOCH / 3)


def test_scheduler_class_with_its_own_step_reaches_its_end() -> None:
    class Halving(schedulers.LRScheduler):
        def get_lr(self) -> list[float]:
            return [base * 0.5**self.last_epoch for base in self.base_lrs]

        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)

    found = run_workers(3, rates(lambda one: Halving(one)), "allreduce")
    assert found[0][-1] == pytest.approx(0.01 * 0.5**TOTAL)


def test_a_stream_advances_by_the_batches_that_were_read() -> None:
    def work(worker: int) -> int:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        schedule = schedulers.OneCycleLR(optimizer, 0.1, total_steps=EPOCH, cycle_momentum=False)
        stream = list(DataLoader(regression(SAMPLES), batch_size=BATCH))
        for x, y in stretto.distribute(net, optimizer, stream):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            schedule.step()
        return schedule.last_epoch

    assert EPOCH in run_workers(3, work, "allreduce")


def test_schedule_is_not_advanced_past_its_end() -> None:
    """The script makes as many steps as the schedule has on each worker."""
    found = run_workers(3, rates(lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=TOTAL // 2)), "allreduce")
    assert found[0][-1] == found[0][-2]


def notices(run: Path) -> str:
    return "\n".join(one["text"] for one in read_events(run / "events.jsonl") if one["event"] == "warning")


@pytest.mark.parametrize("total", [TOTAL, TOTAL + 5])
def test_per_step_advances_as_called_and_reports_both_numbers_once(total: int, tmp_path: Path) -> None:
    make = functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=total)
    found = run_workers(3, rates(make, schedule="per-step"), "allreduce", run=tmp_path)
    made = EPOCHS * math.ceil(EPOCH / 3)
    assert found[0] == plain(make)[:made]
    warnings = notices(tmp_path)
    assert f"OneCycleLR has {total} steps" in warnings and f"{made}" in warnings
    assert warnings.count("OneCycleLR") == 1


def test_per_sample_is_reported_once(tmp_path: Path) -> None:
    run_workers(3, rates(KINDS["one cycle"]), "allreduce", run=tmp_path)
    warnings = notices(tmp_path)
    assert warnings.count("OneCycleLR") == 1 and f"{TOTAL} steps" in warnings and "makes 18 in 3 epochs" in warnings


def test_per_step_that_runs_out_under_unequal_steps_is_an_error_with_the_recipe() -> None:
    make = functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=4)
    with pytest.raises(ScriptError, match="OneCycleLR has run out: under .*unequal numbers of steps"):
        run_workers(2, rates(make, schedule="per-step"), "downpour(every=1)")


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScriptError, match="per-sample"):
        rates(KINDS["cosine"], schedule="by-luck")(0)
    assert api._current.get() is None


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_schedule_ends_when_workers_are_killed_and_return(recipe: str, tmp_path: Path) -> None:
    left = {(1, 2), (0, 9)}

    def before_step(worker: int, step: int) -> None:
        if (worker, step) in left:
            left.discard((worker, step))
            raise WorkerKilled

    single_process = plain(KINDS["lambda"], epochs=EPOCHS)
    found, _ = run_elastic_workers(3, rates(KINDS["lambda"], before_step=before_step), recipe, tmp_path, again=1)
    lasts = [one[-1] for one in found if one]
    assert lasts and min(lasts) == pytest.approx(single_process[-1], abs=1e-9)
    assert max(lasts) <= single_process[-4]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_resumed_run_continues_the_schedule(recipe: str, tmp_path: Path) -> None:
    make, first, second = KINDS["sequential"], tmp_path / "first", tmp_path / "second"
    run_elastic_workers(3, rates(make, epochs=2), recipe, first, checkpoint=every("9 rounds"))
    found, _ = run_elastic_workers(3, rates(make), recipe, second, resume=first)
    single_process = plain(make)
    assert all(one[-1] == pytest.approx(single_process[-1]) for one in found)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_schedule_of_a_simulated_worker_that_was_killed_ends_with_the_others(recipe: str) -> None:
    fault = "kill worker 1 at 60ms, back after 20ms"
    positions: dict[int, int] = {}

    def work(worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        schedule = schedulers.ExponentialLR(optimizer, 0.99)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH))
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                schedule.step()
                positions[worker] = schedule.last_epoch

    ended = simulated(3, work, recipe, net="100Mbit/s 1ms", fault=fault)
    assert [one["incarnation"] for one in ended.of("membership") if one["what"] == "joined"][-1] == 1
    assert max(positions.values()) == TOTAL
    assert min(positions.values()) >= TOTAL - 4


def test_batches_that_are_assigned_again_after_a_rollback_advance_a_schedule_once() -> None:
    epoch = SimpleNamespace(samples=10 * BATCH, order=SimpleNamespace())
    loader = DataLoader(regression(10 * BATCH), batch_size=BATCH)
    run = SimpleNamespace(loader=loader, epoch_batches=epoch, global_step=epoch, recipe=None)
    run.progress = LoopProgress(1, 0)
    run.transport, run.events = SimpleNamespace(workers=2), SimpleNamespace(notice=lambda _: None)
    optimizer = torch.optim.SGD(small_net().parameters(), lr=0.1)
    scheduler = schedulers.LambdaLR(optimizer, lambda _: 1.0)
    schedules = Schedules(run, [optimizer])  # type: ignore[arg-type]
    for batches in (2, 4, 6, 8, 4, 6, 8, 10):
        run.progress.follow_assignment(batches * BATCH)
        schedules.begin_global_step(has_stepped=True, streamed=0)
        schedules.call(scheduler, scheduler.step, has_arguments=False)
    assert scheduler.last_epoch == 10
