"""The script's own values in checkpoints, and the passing of finished epochs in a resumed run and by a new worker."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from simulator.harness import simulated
from thread_workers import regression, run_workers, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ScriptError
from stretto.events import read_events
from stretto.interval import every

RECIPES = ["allreduce", "local_sgd(every=2)", "async_sgd(shards=2)", "stale_synchronous(bound=0)"]
EPOCHS = 4
NET = "100Mbit/s 1ms"
pytestmark = pytest.mark.usefixtures("every_checkpoint")


def script(
    worker: int, folder: Path, early: bool = True, disturb: Callable[[int, int], None] = lambda epoch, step: None
) -> dict[str, Any]:
    """Train as a script that saves its best model does; return its values and what its code between epochs did."""

    def keep() -> Any:
        return stretto.checkpointed(
            best=math.inf,
            step=0,
            seen=[],
            mine=worker,
            total=torch.zeros(2),
            average=nn.Linear(1, 1),
            of={1: ("a", None)},
        )

    kept = keep() if early else None
    at_call = kept.step if early else None
    net = small_net()
    optimizer = sgd(net.parameters())
    loader: Any = DataLoader(regression(22), batch_size=4)
    loader = stretto.distribute(net, optimizer, loader, evaluate=lambda _: {"one": 1.0})
    kept = kept or keep()
    code = []
    for epoch in range(EPOCHS):
        for x, y in loader:
            disturb(epoch, kept.step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            kept.step += 1
            kept.total += 1
            with torch.no_grad():
                kept.average.weight.fill_(kept.step)
        value = [5.0, 3.0, 4.0, 6.0][epoch]  # noisy: the newest model is not the best one
        code.append(stretto.is_resuming())
        if value < kept.best:
            stretto.save({"epoch": epoch}, folder / "best.pt")
        kept.best = min(kept.best, value)
        kept.seen.append(epoch)
        stretto.log(value=value)
        stretto.print("end of", epoch)
    return {**vars(kept), "code": code, "at_call": at_call}


def facts(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
    return found


def only(checkpoint: Path, run: Path) -> Path:
    """Return a run folder with this checkpoint only."""
    shutil.copytree(checkpoint, run / "checkpoints" / checkpoint.name)
    return run


def train(workers: int, recipe: str, run: Path, resume: Path | None = None, early: bool = True) -> list[Any]:
    run.mkdir(exist_ok=True)
    return run_workers(
        workers,
        lambda worker: script(worker, run, early),
        recipe,
        run=run,
        checkpoint=every("2 rounds" if recipe == "allreduce" else "1 rounds"),
        keep=999,
        resume=resume,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_resumed_script_has_the_values_of_the_uninterrupted_one(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = train(2, recipe, tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    for checkpoint in checkpoints[1 :: max(len(checkpoints) // 3, 1)]:
        epochs, is_closed = facts(checkpoint)["epochs"], facts(checkpoint)["order"] is None
        passed = epochs - (facts(checkpoint)["closing_epoch"] or not is_closed)
        run = tmp_path / checkpoint.name
        run.mkdir()
        capsys.readouterr()
        found = train(2, recipe, run, only(checkpoint, tmp_path / f"only-{checkpoint.name}"), early=epochs % 2 == 1)
        assert [one["code"] for one in found] == [[epoch < passed for epoch in range(EPOCHS)]] * 2
        for one, other in zip(found, wanted, strict=True):
            assert (one["best"], one["seen"], one["mine"], one["of"]) == (
                3.0,
                [0, 1, 2, 3],
                other["mine"],
                {1: ("a", None)},
            )
            assert one["total"].tolist() == [one["step"]] * 2
            assert one["average"].weight.item() == one["step"]
            assert one["at_call"] is None or one["at_call"] > 0
        if recipe != "async_sgd(shards=2)":
            assert [one["step"] for one in found] == [one["step"] for one in wanted]
        printed = capsys.readouterr()
        assert printed.out.split("\n")[:-1] == [f"end of {epoch}" for epoch in range(passed, EPOCHS)]
        assert ("trained before" in printed.err) == (epochs > 1)
        logged = [one for one in read_events(run / "events.jsonl") if one["event"] == "log"]
        assert [one["values"]["value"] for one in logged if one["worker"] == 0] == [5.0, 3.0, 4.0, 6.0][passed:]
        assert (run / "best.pt").exists() == (passed < 2)
        assert passed >= 2 or torch.load(run / "best.pt") == {"epoch": 1}
        evaluations = [one for one in read_events(run / "events.jsonl") if one["event"] == "evaluation"]
        assert len(evaluations) == EPOCHS - (epochs - (not is_closed))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_code_that_is_passed_leaves_model_rates_and_momenta_as_the_checkpoint_has_them(
    recipe: str, tmp_path: Path
) -> None:
    def work(_worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(22), batch_size=4))
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            with torch.no_grad():  # the state that the checkpoint holds must not go through this twice
                for parameter in net.parameters():
                    parameter.mul_(0.9)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.25)

    def final(run: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
        run.mkdir()
        run_workers(2, work, recipe, run=run, checkpoint=every("1 rounds"), keep=999, resume=resume)
        return load_file(run / "final.safetensors")

    wanted = final(tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    for checkpoint in [*checkpoints[1:-1:2], checkpoints[-1]]:
        found = final(tmp_path / checkpoint.name, only(checkpoint, tmp_path / f"only-{checkpoint.name}"))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), checkpoint.name


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_number_of_workers_continues_with_the_values_of_the_first(recipe: str, tmp_path: Path) -> None:
    train(2, recipe, tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    checkpoint = next(one for one in checkpoints if facts(one)["epochs"] == 3)
    for workers in (1,) if recipe == "allreduce" else (3,):
        found = train(workers, recipe, tmp_path / str(workers), only(checkpoint, tmp_path / f"only-{workers}"))
        assert [one["mine"] for one in found] == [0] * workers
        assert [one["seen"] for one in found] == [[0, 1, 2, 3]] * workers
        assert all(one["step"] == one["total"][0] == one["average"].weight.item() for one in found)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd(shards=2)"])
@pytest.mark.parametrize("victim", [0, 1])
def test_restarted_worker_passes_epochs_with_the_values_of_the_first(recipe: str, victim: int, tmp_path: Path) -> None:
    length = simulated(2, lambda worker: script(worker, tmp_path), recipe, net=NET).seconds
    for number, early in ((5, True), (7, False), (8, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = f"kill worker {victim} at {number * length / 10:.6f}s, back after 15ms"
        ended = simulated(
            2, lambda worker, to=folder, early=early: script(worker, to, early), recipe, net=NET, fault=fault
        )
        again = ended.found[victim]
        assert (again["best"], again["seen"]) == (3.0, [0, 1, 2, 3])
        assert again["mine"] == 1 - victim or "async" in recipe  # the values of the first worker when the epoch began
        assert again["code"] == sorted(again["code"], reverse=True) and again["code"][0]
        assert again["at_call"] in (0, None)
        assert torch.load(folder / "best.pt") == {"epoch": 1}


def drawing_on(_worker: int) -> None:
    """Train 13 steps of 3 an epoch: where an iterator ends, the loop takes its next batch from a new one."""
    net = small_net()
    optimizer = sgd(net.parameters())
    loader = stretto.distribute(net, optimizer, DataLoader(regression(22), batch_size=4))
    batches = iter(loader)
    while stretto.steps() < 12:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_loop_that_takes_the_first_batch_of_the_next_epoch_where_one_ends_passes_epochs(
    recipe: str, tmp_path: Path
) -> None:
    def final(run: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
        run.mkdir()
        run_workers(2, drawing_on, recipe, run=run, checkpoint=every("1 rounds"), keep=999, resume=resume)
        return load_file(run / "final.safetensors")

    wanted = final(tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    within = [one for one in checkpoints if 1 < facts(one)["epochs"] < 4]
    assert len(within) > 2
    for checkpoint in within:
        found = final(tmp_path / checkpoint.name, only(checkpoint, tmp_path / f"only-{checkpoint.name}"))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), checkpoint.name


def test_restarted_worker_whose_loop_takes_the_first_batch_of_the_next_epoch_where_one_ends_trains_on() -> None:
    length = simulated(2, drawing_on, "allreduce", net=NET).seconds
    for tenth in (5, 7, 8):
        fault = f"kill worker 0 at {tenth * length / 10:.6f}s, back after 15ms"
        simulated(2, drawing_on, "allreduce", net=NET, fault=fault)


def test_values_that_cannot_be_saved_are_refused_by_name() -> None:
    kept = stretto.checkpointed(best=np.float32(0.5), counts=[np.float64(1.0)], generator=torch.Generator())
    assert type(kept.best) is float
    for value, got in {
        "tokenizer": (object(), "object"),
        "update": ({"a": [lambda: 0]}, "function"),
        "array": (np.zeros(2), "ndarray"),
        "table": (torch.zeros(2).to_sparse(), "sparse"),
        "large": (1 << 70, "ints"),
    }.items():
        with pytest.raises(ScriptError, match=rf"can't save {value}(.|\n)*{got[1]}(.|\n)*{value}=float"):
            stretto.checkpointed(**{value: got[0]})
        with pytest.raises(ScriptError, match=value):
            setattr(kept, value, got[0])
    with pytest.raises(AttributeError, match="was not given 'bets'; its values: best, counts"):
        kept.bets  # noqa: B018


def test_loop_that_leaves_out_finished_epochs_is_an_error(tmp_path: Path) -> None:
    train(2, "allreduce", tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    checkpoint = next(one for one in checkpoints if facts(one)["epochs"] == 3 and facts(one)["order"] is not None)

    def work(worker: int) -> None:
        net = small_net()
        loader = stretto.distribute(net, sgd(net.parameters()), DataLoader(regression(22), batch_size=4))
        for _ in range(2, EPOCHS):
            for _ in loader:
                pass

    with pytest.raises(ScriptError, match="continues in epoch 3, and the script ended after 2 loops"):
        run_workers(2, work, "allreduce", resume=only(checkpoint, tmp_path / "only"))
