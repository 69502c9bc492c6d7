"""Checkpoints over a parameter server, also within an epoch: a resumed run trains the remaining batches once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value
from thread_workers import flat, regression, run_workers, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint.storage import Checkpoints
from stretto.events import read_events
from stretto.interval import every

SAMPLES = 97
pytestmark = pytest.mark.usefixtures("every_checkpoint")
WITH_OUTER_MOMENTUM = (
    "Recipe(what=updates(), when=on_arrival(every=2, collect=2), whom=server(2), then=outer(0.5, 0.6))"
)
WITH_RESIDUAL = (
    "Recipe(what=updates(), how=error_feedback(top_k(0.2)), when=on_arrival(every=2), whom=server(2), then=add())"
)


def training(
    epochs: int, samples: int, momentum: float, evaluate_every: int | None, leaves_after: int | None
) -> Callable[[int], Any]:
    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=momentum)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        source = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(regression(samples), batch_size=4, shuffle=True, generator=source)
        loader = stretto.distribute(
            net, optimizer, loader, evaluate=lambda _: {"loss": 1.0}, evaluate_every=evaluate_every
        )
        for _ in range(epochs):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if worker == 1 and number + 1 == leaves_after:
                    break
            if samples == SAMPLES:  # otherwise a worker may have made no step
                schedule.step()
        return flat(net)

    return work


def run_training(
    workers: int,
    epochs: int,
    recipe: str,
    run: Path,
    samples: int = SAMPLES,
    momentum: float = 0.0,
    evaluate_every: int | None = 2,
    leaves_after: int | None = None,
    often: str = "1 rounds",
    **options: Any,
) -> list[Any]:
    run.mkdir(exist_ok=True)
    work = training(epochs, samples, momentum, evaluate_every, leaves_after)
    return run_workers(workers, work, recipe, run=run, checkpoint=every(often), keep=99, **options)


def checkpoints_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def facts(checkpoint: Path) -> dict[str, Any]:
    facts_read: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
    return facts_read


def checkpoint_within_epoch_2(run: Path) -> Path:
    """Return a checkpoint of the second epoch, taken when a part of its batches was done."""
    checkpoints = [
        checkpoint
        for checkpoint in checkpoints_of(run)
        if facts(checkpoint)["epochs"] == 2 and facts(checkpoint)["assignment"] is not None
    ]
    return checkpoints[len(checkpoints) // 2]


def run_with_only(checkpoint: Path, run: Path) -> Path:
    """Copy the checkpoint into a run directory as its only one, and return the directory."""
    shutil.copytree(checkpoint, run / "checkpoints" / checkpoint.name)
    return run


def sample_counts_by_epoch(run: Path) -> list[Any]:
    return [
        (event["epoch"], event["sample_counts"])
        for event in read_events(run / "events.jsonl")
        if event["event"] == "epoch"
    ]


ONCE = {"once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        ("async_sgd(shards=2)", "async_sgd(shards=2)", 3),
        ("async_sgd(shards=2)", "stale_synchronous(bound=0)", 2),
        (WITH_OUTER_MOMENTUM, "async_sgd", 2),
        ("async_sgd(shards=2)", "allreduce", 2),
        ("allreduce", "async_sgd(shards=2)", 2),
        ("elastic_averaging(every=2)", "elastic_averaging(every=2)", 3),
    ],
)
def test_resumed_run_trains_the_rest_of_an_epoch_once(before: str, after: str, workers: int, tmp_path: Path) -> None:
    run_training(3, 3, before, tmp_path / "before", often="2 rounds")
    part = run_with_only(checkpoint_within_epoch_2(tmp_path / "before"), tmp_path / "part")
    done = facts(checkpoints_of(part)[0])["samples"] - SAMPLES
    assert 0 < done < SAMPLES
    run_training(workers, 3, after, tmp_path / "after", resume=part, often="9 rounds")
    assert sample_counts_by_epoch(tmp_path / "after") == [(2, ONCE), (3, ONCE)]
    told = [event["samples"] for event in read_events(tmp_path / "after" / "events.jsonl") if event["event"] == "epoch"]
    assert told == [2 * SAMPLES, 3 * SAMPLES]
    ends = [event for event in read_events(tmp_path / "after" / "events.jsonl") if event["event"] == "end"]
    assert sum(event["samples"] for event in ends) == 2 * SAMPLES - done


def test_newest_checkpoint_is_the_one_written_last(tmp_path: Path) -> None:
    """Under asynchronous recipes each worker counts its own rounds.

    A worker that joins late counts from 0, and may be the worker that writes the checkpoint.
    """
    run_training(2, 3, "async_sgd", tmp_path / "run")
    before = facts(checkpoints_of(tmp_path / "run")[-1])
    run_training(2, 1, "async_sgd", tmp_path / "run")
    after = facts(checkpoints_of(tmp_path / "run")[-1])
    assert (before["epochs"], after["epochs"]) == (3, 1)
    assert after["rounds"] < before["rounds"]


@pytest.mark.parametrize("recipe", ["async_sgd", WITH_OUTER_MOMENTUM, WITH_RESIDUAL])
def test_resumed_run_of_one_worker_equals_the_uninterrupted_run(recipe: str, tmp_path: Path) -> None:
    (whole,) = run_training(1, 3, recipe, tmp_path / "whole", often="3 rounds")
    part = run_with_only(checkpoint_within_epoch_2(tmp_path / "whole"), tmp_path / "part")
    (again,) = run_training(1, 3, recipe, tmp_path / "again", often="3 rounds", resume=part)
    assert torch.equal(again, whole)


@pytest.mark.parametrize(
    ("recipe", "shards"),
    each_value([WITH_OUTER_MOMENTUM, WITH_RESIDUAL, "elastic_averaging(every=2, shards=2)"], [2, 1, 3]),
)
def test_states_of_servers_and_workers_are_restored_on_resume(recipe: str, shards: int, tmp_path: Path) -> None:
    """The second run trains nothing, so its checkpoint equals that of the run it resumed."""
    run_training(3, 2, recipe, tmp_path / "before")
    again = recipe.replace("server(2)", f"server({shards})").replace("shards=2", f"shards={shards}")
    run_training(3, 2, again, tmp_path / "after", resume=tmp_path / "before")
    states = [Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("before", "after")]
    (_, one), (_, other) = (state for state in states if state is not None)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert any(name.startswith("server/") for name in one.tensors) == (recipe == WITH_OUTER_MOMENTUM)
    for worker, (_, tensors) in one.own.items():
        names = [name for name in tensors if name.startswith(("residual/", "own/", "optimizer/"))]
        assert bool(names) == (recipe != WITH_OUTER_MOMENTUM)
        for name in names:
            assert torch.equal(tensors[name], other.own[worker][1][name]), (worker, name)


@pytest.mark.parametrize("recipe", ["async_sgd", "allreduce"])
@pytest.mark.parametrize("is_saved_at_the_end", [False, True])
def test_run_resumed_after_an_epoch_draws_the_next_order(
    recipe: str, is_saved_at_the_end: bool, tmp_path: Path
) -> None:
    """The resumed run also has the learning rate of a script that changes the rate after each epoch."""
    (whole,) = run_training(1, 3, recipe, tmp_path / "whole", evaluate_every=None, often="9 rounds")
    if is_saved_at_the_end:
        run_training(1, 2, recipe, tmp_path / "part", evaluate_every=None, often="9 rounds")
        part = run_with_only(checkpoints_of(tmp_path / "part")[-1], tmp_path / "from")
    else:
        found = [one for one in checkpoints_of(tmp_path / "whole") if facts(one)["epochs"] == 2]
        part = run_with_only(found[-1], tmp_path / "from")
    assert recipe == "allreduce" or facts(checkpoints_of(part)[0])["assignment"] is None
    (again,) = run_training(1, 3, recipe, tmp_path / "again", evaluate_every=None, often="9 rounds", resume=part)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("after", ["async_sgd", "allreduce"])
def test_residuals_of_gradients_are_not_resumed_as_residuals_of_updates(after: str, tmp_path: Path) -> None:
    """Residuals of gradients have another sign and another scale than residuals of updates."""
    run_training(2, 2, "allreduce(how=error_feedback(top_k(0.05)))", tmp_path / "before")
    newest = Checkpoints(tmp_path / "before" / "checkpoints").newest()
    assert newest is not None
    assert any(
        one.any() for _, tensors in newest[1].own.values() for name, one in tensors.items() if "residual" in name
    )
    how = "error_feedback(top_k(0.05))"
    again = f"async_sgd(how={how})" if after == "async_sgd" else f"local_sgd(every=2, how={how})"
    run_training(2, 2, again, tmp_path / "after", resume=tmp_path / "before")
    newest = Checkpoints(tmp_path / "after" / "checkpoints").newest()
    assert newest is not None
    assert not any(
        one.any() for _, tensors in newest[1].own.values() for name, one in tensors.items() if "residual" in name
    )


@pytest.mark.parametrize("before", ["async_sgd", "local_sgd(every=2)"])
def test_workers_that_resume_under_allreduce_have_equal_optimizer_states(before: str, tmp_path: Path) -> None:
    run_training(2, 2, before, tmp_path / "before", momentum=0.9)
    found = run_training(2, 3, "allreduce", tmp_path / "after", resume=tmp_path / "before", momentum=0.9)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("evaluate_every", [None, 1])
def test_a_worker_without_batches_takes_part_in_the_end_of_the_epoch(
    evaluate_every: int | None, tmp_path: Path
) -> None:
    run_training(3, 2, "async_sgd", tmp_path / "run", samples=8, evaluate_every=evaluate_every)
    assert [seen["once"] for _, seen in sample_counts_by_epoch(tmp_path / "run")] == [8, 8]


@pytest.mark.parametrize("leaves_after", [1, 5])
def test_a_worker_that_leaves_an_epoch_early_reaches_the_barriers_of_all_workers(
    leaves_after: int, tmp_path: Path
) -> None:
    run_training(3, 3, "async_sgd(shards=2)", tmp_path / "run", leaves_after=leaves_after)
    assert sample_counts_by_epoch(tmp_path / "run") == [(1, ONCE), (2, ONCE), (3, ONCE)]


def test_local_steps_are_pushed_before_a_checkpoint(tmp_path: Path) -> None:
    """Otherwise a worker's optimizer would hold steps of batches that the checkpoint counts as undone."""
    recipe = "Recipe(what=updates(), when=on_arrival(every=4), whom=server(1), then=add())"
    (whole,) = run_training(1, 3, recipe, tmp_path / "whole", momentum=0.9, evaluate_every=3)
    found = [
        one
        for one in checkpoints_of(tmp_path / "whole")
        if facts(one)["epochs"] == 2 and facts(one)["assignment"] is not None
    ]
    assert len(found) > 3
    for one in found[1:3]:
        part = run_with_only(one, tmp_path / f"from-{one.name}")
        (again,) = run_training(1, 3, recipe, tmp_path / f"to-{one.name}", momentum=0.9, evaluate_every=3, resume=part)
        assert torch.allclose(again, whole, atol=1e-6), one.name


def test_workers_that_are_pulled_to_a_servers_model_resume_an_epoch_with_their_own_parameters(tmp_path: Path) -> None:
    recipe = "elastic_averaging(every=2)"
    run_training(2, 3, recipe, tmp_path / "before", often="2 rounds")
    part = run_with_only(checkpoint_within_epoch_2(tmp_path / "before"), tmp_path / "part")
    newest = Checkpoints(part / "checkpoints").newest()
    assert newest is not None
    (tmp_path / "after").mkdir()

    def first_parameters(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        source = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(regression(SAMPLES), batch_size=4, shuffle=True, generator=source)
        loader = stretto.distribute(net, optimizer, loader)
        for epoch in range(2):
            for _ in loader:
                assert epoch == 1
                return flat(net)
        return None

    found = run_workers(2, first_parameters, recipe, run=tmp_path / "after", resume=part)
    for worker, parameters in enumerate(found):
        own = newest[1].own[worker][1]["own/0"].to(parameters.dtype)
        assert torch.equal(parameters.sort().values, own[own != 0].sort().values), worker


def test_resumed_run_in_which_the_loops_of_one_worker_have_ended_trains_the_rest(tmp_path: Path) -> None:
    """Worker 1 has its count two epochs before the checkpoint that is continued; it loops no more after the resume."""

    def work(worker: int) -> tuple[int, Any]:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        loader: Any = DataLoader(regression(40), batch_size=4, shuffle=True)
        kept = stretto.checkpointed(step=0)
        loader = stretto.distribute(net, optimizer, loader, evaluate=lambda _: {"loss": 1.0}, evaluate_every=2)
        while kept.step < (38, 2)[worker]:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                kept.step += 1
                if kept.step == (38, 2)[worker]:
                    break
        stretto.finish()
        return kept.step, flat(net)

    def run(name: str, **more: Any) -> list[dict[str, int]]:
        (tmp_path / name).mkdir()
        options: dict[str, Any] = {"run": tmp_path / name, "checkpoint": every("1 rounds"), "keep": 99}
        (steps, model), (other_steps, other) = run_workers(2, work, "async_sgd", **options, **more)
        assert (steps, other_steps) == (38, 2) and torch.equal(model, other)
        return [counts for _, counts in sample_counts_by_epoch(tmp_path / name)]

    whole = {"once": 40, "twice": 0, "never": 0, "dropped": 0}
    assert run("before") == [whole] * 4
    within = [
        one for one in checkpoints_of(tmp_path / "before") if facts(one)["epochs"] == 3 and facts(one)["assignment"]
    ]
    assert run("after", resume=run_with_only(within[0], tmp_path / "part")) == [whole] * 2
