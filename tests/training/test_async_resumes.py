"""Checkpoints over a parameter server, in the middle of a pass too: whoever goes on from one does the rest, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_workers, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint.background_writer import BackgroundWriter
from stretto.checkpoint.storage import Checkpoints, State
from stretto.events import read_events
from stretto.interval import every

SAMPLES = 97
MOMENTUM = "Recipe(what=updates(), when=on_arrival(every=2, collect=2), whom=server(2), then=outer(0.5, 0.6))"
OWES = "Recipe(what=updates(), how=error_feedback(top_k(0.2)), when=on_arrival(every=2), whom=server(2), then=add())"


@pytest.fixture(autouse=True)
def all_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that waits to be written is not replaced by a newer one."""
    submit = BackgroundWriter.submit

    def settled(writer: BackgroundWriter, state: State, number: int) -> None:
        submit(writer, state, number)
        assert writer.settle(30.0)

    monkeypatch.setattr(BackgroundWriter, "submit", settled)


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
            if samples == SAMPLES:  # else a worker may not have stepped at all
                schedule.step()
        return flat(net)

    return work


def crew(
    workers: int,
    epochs: int,
    recipe: str,
    run: Path,
    samples: int = SAMPLES,
    momentum: float = 0.0,
    evaluate_every: int | None = 2,
    leaves_after: int | None = None,
    often: str = "1 rounds",
    **seat: Any,
) -> list[Any]:
    run.mkdir(exist_ok=True)
    work = training(epochs, samples, momentum, evaluate_every, leaves_after)
    return run_workers(workers, work, recipe, run=run, checkpoint=every(often), keep=99, **seat)


def saved(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def facts(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
    return found


def in_the_middle(run: Path) -> Path:
    """A checkpoint in the second pass, when some of it was done."""
    found = [one for one in saved(run) if facts(one)["passes"] == 2 and facts(one)["deal"] is not None]
    return found[len(found) // 2]


def only(checkpoint: Path, run: Path) -> Path:
    """A run that has this checkpoint alone."""
    shutil.copytree(checkpoint, run / "checkpoints" / checkpoint.name)
    return run


def passes(run: Path) -> list[Any]:
    return [
        (one["epoch"], one["sample_counts"]) for one in read_events(run / "events.jsonl") if one["event"] == "epoch"
    ]


ONCE = {"once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        ("async_sgd(shards=2)", "async_sgd(shards=2)", 3),
        ("async_sgd(shards=2)", "stale_synchronous(bound=0)", 2),
        (MOMENTUM, "async_sgd", 2),
        ("async_sgd(shards=2)", "allreduce", 2),
        ("allreduce", "async_sgd(shards=2)", 2),
        ("elastic_averaging(every=2)", "elastic_averaging(every=2)", 3),
    ],
)
def test_the_rest_of_a_pass_is_done_once(before: str, after: str, workers: int, tmp_path: Path) -> None:
    crew(3, 3, before, tmp_path / "before")
    part = only(in_the_middle(tmp_path / "before"), tmp_path / "part")
    done = facts(saved(part)[0])["samples"] - SAMPLES
    assert 0 < done < SAMPLES
    crew(workers, 3, after, tmp_path / "after", resume=part)
    assert passes(tmp_path / "after") == [(2, ONCE), (3, ONCE)]
    ends = [one for one in read_events(tmp_path / "after" / "events.jsonl") if one["event"] == "end"]
    assert sum(one["samples"] for one in ends) == 2 * SAMPLES - done


def test_the_newest_is_that_which_was_written_last(tmp_path: Path) -> None:
    """Where nobody waits rounds are each worker's own: one that comes late counts from 0, and may have to write."""
    crew(2, 3, "async_sgd", tmp_path / "run")
    before = facts(saved(tmp_path / "run")[-1])
    crew(2, 1, "async_sgd", tmp_path / "run")
    after = facts(saved(tmp_path / "run")[-1])
    assert (before["passes"], after["passes"]) == (3, 1)
    assert after["rounds"] < before["rounds"]


@pytest.mark.parametrize("recipe", ["async_sgd", MOMENTUM, OWES])
def test_one_worker_that_goes_on_computes_what_it_would_have(recipe: str, tmp_path: Path) -> None:
    (whole,) = crew(1, 3, recipe, tmp_path / "whole", often="3 rounds")
    part = only(in_the_middle(tmp_path / "whole"), tmp_path / "part")
    (again,) = crew(1, 3, recipe, tmp_path / "again", often="3 rounds", resume=part)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("shards", [2, 1, 3])
@pytest.mark.parametrize("recipe", [MOMENTUM, OWES, "elastic_averaging(every=2, shards=2)"])
def test_what_servers_and_workers_keep_is_taken_up(recipe: str, shards: int, tmp_path: Path) -> None:
    """Nothing is trained in the second run, so its checkpoint is the one that it went on from."""
    crew(3, 2, recipe, tmp_path / "before")
    again = recipe.replace("server(2)", f"server({shards})").replace("shards=2", f"shards={shards}")
    crew(3, 2, again, tmp_path / "after", resume=tmp_path / "before")
    states = [Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("before", "after")]
    (_, one), (_, other) = (state for state in states if state is not None)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert any(name.startswith("server/") for name in one.tensors) == (recipe == MOMENTUM)
    for worker, (_, tensors) in one.own.items():
        names = [name for name in tensors if name.startswith(("residual/", "own/", "optimizer/"))]
        assert bool(names) == (recipe != MOMENTUM)
        for name in names:
            assert torch.equal(tensors[name], other.own[worker][1][name]), (worker, name)


@pytest.mark.parametrize("recipe", ["async_sgd", "allreduce"])
@pytest.mark.parametrize("is_saved_at_the_end", [False, True])
def test_who_goes_on_behind_a_pass_draws_the_next_order(recipe: str, is_saved_at_the_end: bool, tmp_path: Path) -> None:
    """And has the learning rate of a script that changes it after each pass."""
    (whole,) = crew(1, 3, recipe, tmp_path / "whole", evaluate_every=None, often="9 rounds")
    if is_saved_at_the_end:
        crew(1, 2, recipe, tmp_path / "part", evaluate_every=None, often="9 rounds")
        part = only(saved(tmp_path / "part")[-1], tmp_path / "from")
    else:
        found = [one for one in saved(tmp_path / "whole") if facts(one)["passes"] == 2]
        part = only(found[-1], tmp_path / "from")
    assert recipe == "allreduce" or facts(saved(part)[0])["deal"] is None
    (again,) = crew(1, 3, recipe, tmp_path / "again", evaluate_every=None, often="9 rounds", resume=part)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("after", ["async_sgd", "allreduce"])
def test_who_owes_gradients_owes_no_updates(after: str, tmp_path: Path) -> None:
    """They have another sign, and another size."""
    crew(2, 2, "allreduce(how=error_feedback(top_k(0.05)))", tmp_path / "before")
    newest = Checkpoints(tmp_path / "before" / "checkpoints").newest()
    assert newest is not None
    assert any(
        one.any() for _, tensors in newest[1].own.values() for name, one in tensors.items() if "residual" in name
    )
    how = "error_feedback(top_k(0.05))"
    again = f"async_sgd(how={how})" if after == "async_sgd" else f"local_sgd(every=2, how={how})"
    crew(2, 2, again, tmp_path / "after", resume=tmp_path / "before")
    newest = Checkpoints(tmp_path / "after" / "checkpoints").newest()
    assert newest is not None
    assert not any(
        one.any() for _, tensors in newest[1].own.values() for name, one in tensors.items() if "residual" in name
    )


@pytest.mark.parametrize("before", ["async_sgd", "local_sgd(every=2)"])
def test_who_goes_on_in_step_has_one_optimizer(before: str, tmp_path: Path) -> None:
    crew(2, 2, before, tmp_path / "before", momentum=0.9)
    found = crew(2, 3, "allreduce", tmp_path / "after", resume=tmp_path / "before", momentum=0.9)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("evaluate_every", [None, 1])
def test_a_worker_that_gets_no_batch_takes_part_in_the_end(evaluate_every: int | None, tmp_path: Path) -> None:
    crew(3, 2, "async_sgd", tmp_path / "run", samples=8, evaluate_every=evaluate_every)
    assert [seen["once"] for _, seen in passes(tmp_path / "run")] == [8, 8]


@pytest.mark.parametrize("leaves_after", [1, 5])
def test_who_leaves_a_pass_comes_to_what_all_were_called_to(leaves_after: int, tmp_path: Path) -> None:
    crew(3, 3, "async_sgd(shards=2)", tmp_path / "run", leaves_after=leaves_after)
    assert passes(tmp_path / "run") == [(1, ONCE), (2, ONCE), (3, ONCE)]


def test_what_was_stepped_with_is_brought_before_a_state_is_kept(tmp_path: Path) -> None:
    """Else a worker's optimizer would have steps that the books call undone."""
    recipe = "Recipe(what=updates(), when=on_arrival(every=4), whom=server(1), then=add())"
    (whole,) = crew(1, 3, recipe, tmp_path / "whole", momentum=0.9, evaluate_every=3)
    found = [one for one in saved(tmp_path / "whole") if facts(one)["passes"] == 2 and facts(one)["deal"] is not None]
    assert len(found) > 3
    for one in found[1:3]:
        part = only(one, tmp_path / f"from-{one.name}")
        (again,) = crew(1, 3, recipe, tmp_path / f"to-{one.name}", momentum=0.9, evaluate_every=3, resume=part)
        assert torch.allclose(again, whole, atol=1e-6), one.name
