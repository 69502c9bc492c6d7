"""Checkpoints over a parameter server, in the middle of a pass too: whoever goes on from one does the rest, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import flat, regression, small_net, together
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.events import read_events
from stretto.often import every
from stretto.train.checkpoint import BackgroundWriter, Checkpoints, State

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


def training(epochs: int) -> Callable[[int], Any]:
    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        source = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(regression(SAMPLES), batch_size=4, shuffle=True, generator=source)
        loader = stretto.distribute(net, optimizer, loader, evaluate=lambda _: {"loss": 1.0}, evaluate_every=2)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    return work


def crew(workers: int, epochs: int, recipe: str, run: Path, **seat: Any) -> list[Any]:
    run.mkdir(exist_ok=True)
    return together(workers, training(epochs), recipe, run=run, checkpoint=every("1 rounds"), keep=99, **seat)


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
    return [(one["epoch"], one["seen"]) for one in read_events(run / "events.jsonl") if one["event"] == "epoch"]


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
    (whole,) = crew(1, 3, recipe, tmp_path / "whole")
    part = only(in_the_middle(tmp_path / "whole"), tmp_path / "part")
    (again,) = crew(1, 3, recipe, tmp_path / "again", resume=part)
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
        names = [name for name in tensors if name.startswith(("owed/", "own/", "optimizer/"))]
        assert bool(names) == (recipe != MOMENTUM)
        for name in names:
            assert torch.equal(tensors[name], other.own[worker][1][name]), (worker, name)
