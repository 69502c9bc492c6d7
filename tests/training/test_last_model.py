"""The newest model on which the workers agreed is in the run folder, though the script does not reach its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from thread_workers import regression, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint.model_file import LAST, ModelFile, in_section, newest
from stretto.checkpoint.storage import Checkpoints
from stretto.errors import ReplicasDifferError
from stretto.recipe.named import catalogue
from stretto.runtime.runtime import Runtime
from stretto.training.last_model import LastModel

LIMIT_S = 60.0
FAMILIES = ("allreduce", "local_sgd(every=3)", "gossip", "async_sgd")
RECIPES = sorted({entry.signature.partition("(")[0] for entry in catalogue()})
"""Every recipe by its name, with the defaults of its options."""


class BoomError(Exception):
    """The error of a script."""


def trained(
    run: Path, recipe: str, epochs: int = 3, workers: int = 2, at_step: Callable[..., None] = lambda *_: None
) -> list[dict[str, Tensor]]:
    """Train with a script that fails after its last epoch; return the model of worker 0 after each epoch."""
    run.mkdir(exist_ok=True)
    models: list[dict[str, Tensor]] = []

    def work(worker: int) -> None:
        net = nn.Sequential(small_net(), nn.BatchNorm1d(1))
        net.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        make = torch.optim.Adam if recipe == "one_bit" else sgd
        optimizer = make(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(64), batch_size=8))
        for epoch in range(epochs):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                (net(x) - y).square().mean().backward()
                optimizer.step()
                at_step(worker, epoch, step, net)
            if worker == 0:
                models.append({name: one.clone() for name, one in net.state_dict().items()})
        raise BoomError("the plot failed")

    with pytest.raises((BoomError, stretto.errors.StrettoError)):
        run_workers(workers, work, recipe, run=run)
    return models


def is_same(run: Path, model: dict[str, Tensor]) -> bool:
    found = load_file(run / LAST)
    return found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_script_that_fails_after_its_last_epoch_leaves_the_model_of_its_last_epoch(recipe: str, tmp_path: Path) -> None:
    models = trained(tmp_path / "run", recipe)
    assert is_same(tmp_path / "run", models[-1])
    assert not is_same(tmp_path / "run", models[-2])
    found = newest(tmp_path / "run")
    assert found is not None and not found.is_complete
    assert (found.epoch, found.cause) == (3, "BoomError: the plot failed")
    assert found.step is not None and found.step > 0


def test_one_worker_leaves_its_model_too(tmp_path: Path) -> None:
    assert is_same(tmp_path / "run", trained(tmp_path / "run", "allreduce", workers=1)[-1])


@pytest.mark.parametrize("recipe", FAMILIES)
def test_model_with_a_nan_is_not_kept(recipe: str, tmp_path: Path) -> None:
    def poison(_worker: int, epoch: int, _step: int, net: nn.Module) -> None:
        if epoch == 2:
            with torch.no_grad():
                net.get_parameter("0.0.bias")[0] = float("nan")

    models = trained(tmp_path / "run", recipe, at_step=poison)
    found = newest(tmp_path / "run")
    assert found is not None and found.epoch == 2
    assert is_same(tmp_path / "run", models[1])


def test_replicas_that_differ_leave_the_model_on_which_they_agreed(tmp_path: Path) -> None:
    def change(worker: int, epoch: int, step: int, net: nn.Module) -> None:
        if (worker, epoch, step) == (1, 2, 1):
            with torch.no_grad():
                net.get_parameter("0.0.bias").add_(1)

    models = trained(tmp_path / "run", "allreduce", at_step=change)
    found = newest(tmp_path / "run")
    assert found is not None and found.epoch == 2
    assert ReplicasDifferError.__name__ in str(found.cause)
    assert is_same(tmp_path / "run", models[1])


def test_final_model_replaces_the_last_one(tmp_path: Path) -> None:
    def work(_worker: int) -> None:
        for _ in range(2):  # sections
            net = small_net()
            optimizer = sgd(net.parameters())
            loader = stretto.distribute(net, optimizer, DataLoader(regression(64), batch_size=8))
            for x, y in loader:
                optimizer.zero_grad()
                (net(x) - y).square().mean().backward()
                optimizer.step()
            assert not (tmp_path / LAST).exists() or _ == 0

    (tmp_path / LAST).write_bytes(b"of an earlier epoch")
    run_workers(2, work, "allreduce", run=tmp_path)
    assert not list(tmp_path.rglob(LAST))
    assert newest(tmp_path) == ModelFile(tmp_path / "section-2" / "final.safetensors")
    assert in_section(tmp_path) == ModelFile(tmp_path / "final.safetensors")


@pytest.mark.parametrize(
    ("workers", "recipe", "batches_a_step", "steps"),
    [
        (1, "allreduce", 1, 100),
        (2, "allreduce", 1, 101),
        (2, "allreduce", 2, 50),
        (2, "local_sgd(every=1)", 1, 101),
        (2, "local_sgd(every=16)", 1, 128),
        (2, "diloco(every=40)", 1, 160),
        (2, "async_sgd", 1, 100),
    ],
)
def test_loop_that_is_left_within_its_epoch_leaves_the_newest_model_on_which_workers_agreed(
    workers: int, recipe: str, batches_a_step: int, steps: int, tmp_path: Path
) -> None:
    """The last comparison is at most 100 batches old, or as old as the last exchange where these are rarer."""

    def work(_worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(8000), batch_size=8))
        for step, (x, y) in enumerate(loader):
            ((net(x) - y).square().mean() / batches_a_step).backward()
            if (step + 1) % batches_a_step == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step == 190 if recipe.startswith("diloco") else step == 140:
                break
        raise BoomError("the plot failed")

    with pytest.raises(BoomError):
        run_workers(workers, work, recipe, run=tmp_path)
    found = newest(tmp_path)
    assert found is not None
    assert (found.epoch, found.step) == (0, steps)


class Files:
    """Files of a run that take one second of the clock for each write."""

    place = name = "run"
    exists = True

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.written = clock, list[float]()

    def checkpoints(self, keep: int = 3) -> Checkpoints:
        return Checkpoints(Path("nowhere"), keep)

    def write(self, kind: str, content: Callable[[], Any], number: int = 0) -> None:
        assert (kind, number) == ("last", 0)
        self.clock[0] += len([*content()]) and 1.0
        self.written.append(self.clock[0])


def test_writing_takes_three_percent_of_the_time_and_the_newest_model_is_written_at_the_end() -> None:
    clock, net = [0.0], small_net()
    files, runtime = Files(clock), Runtime(own_process=True)
    runtime.clock = lambda: clock[0]  # type: ignore[method-assign]
    context = SimpleNamespace(files=files, runtime=runtime)
    trainer: Any = SimpleNamespace(
        model=net,
        transport=SimpleNamespace(worker=0, siblings=None),
        events=SimpleNamespace(notice=pytest.fail, say=pytest.fail),
        progress=SimpleNamespace(steps=0),
        rank_parts=stretto.parallel.rank_parts.RankParts(),
    )
    last = LastModel(trainer, context)  # type: ignore[arg-type]
    settled = threading.Event()
    for epoch in range(200):
        clock[0] += 1.0
        last.keep(epoch)
        for _ in range(1000):
            with last._condition:
                is_due = last._is_unwritten and clock[0] >= last._write_at
                if not last._is_writing and not is_due:
                    break
            settled.wait(0.01)
    assert files.written[0] == 2.0, "the first is written immediately"
    assert 5 <= len(files.written) <= 1 + 0.03 * clock[0]
    last.write("ValueError")
    assert len(files.written) <= 2 + 0.03 * clock[0]
    thread = last._thread
    assert thread is not None
    last.give_up()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_header_has_room_for_the_cause_and_the_tensors_stay(tmp_path: Path) -> None:
    trained(tmp_path / "run", "allreduce", epochs=1)
    before = load_file(tmp_path / "run" / LAST)
    found = newest(tmp_path / "run")
    assert found is not None
    for cause in ("worker 1 failed: é \N{SNOWMAN}", "x" * 10_000, "stopped by SIGINT"):
        stretto.checkpoint.model_file.note_cause(found, cause)
        changed = newest(tmp_path / "run")
        assert changed is not None and changed.cause is not None and cause.startswith(changed.cause)
        after = load_file(tmp_path / "run" / LAST)
        assert all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(tmp_path / "run" / LAST, "pt") as file:
        assert file.metadata() == {"format": "pt", "epoch": "1", "step": str(found.step), "cause": "stopped by SIGINT"}
