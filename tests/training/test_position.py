"""Position of a script in its loop: `steps`, `epoch_step` and `is_last_batch`, alone and among workers."""

from __future__ import annotations

import contextvars
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.harness import simulated
from thread_workers import regression, run_workers, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.interval import every

EPOCHS, BATCHES = 3, 7
RECIPES = ["allreduce", "local_sgd(every=2)", "gossip", "async_sgd(shards=2)", "stale_synchronous(bound=0)"]
pytestmark = pytest.mark.usefixtures("every_checkpoint")
Loop = list[tuple[int, int, bool]]


class Stream:
    """A stream without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(regression(4 * BATCHES), batch_size=4))


def loop(kind: str = "indexed", peeks: bool = False, leaves_at: int | None = None) -> Callable[[int], Any]:
    """Return a script that notes its position before each batch's step, and after each epoch."""

    def work(worker: int) -> tuple[list[Loop], list[tuple[int, int, bool]]]:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader: Any = Stream() if kind == "stream" else DataLoader(regression(4 * BATCHES), batch_size=4)
        loader = list(loader) if kind == "list" else loader
        loader = stretto.distribute(net, optimizer, loader)
        found, after = [], []
        if peeks:
            next(iter(loader))
        for _ in range(EPOCHS):
            found.append([])
            for x, y in loader:
                found[-1].append((stretto.steps(), stretto.epoch_step(), stretto.is_last_batch()))
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if stretto.epoch_step() == leaves_at:
                    break
            after.append((stretto.steps(), stretto.epoch_step(), stretto.is_last_batch()))
        return found, after

    return work


def expected(length: int) -> tuple[list[Loop], list[tuple[int, int, bool]]]:
    positions = [[(epoch * length + i, i, i + 1 == length) for i in range(length)] for epoch in range(EPOCHS)]
    return positions, [((epoch + 1) * length, length, False) for epoch in range(EPOCHS)]


@pytest.mark.parametrize("kind", ["indexed", "list", "stream"])
@pytest.mark.parametrize("peeks", [False, True])
def test_a_script_alone_counts_its_batches(kind: str, peeks: bool) -> None:
    assert contextvars.Context().run(loop(kind, peeks), 0) == expected(BATCHES)
    assert run_workers(1, loop(kind, peeks), "local_sgd(every=2)") == [expected(BATCHES)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_workers_count_global_batches(recipe: str) -> None:
    length = -(-BATCHES // 2)
    in_shares = recipe in ("allreduce", "local_sgd(every=2)", "gossip")
    for (found, after), worker in zip(run_workers(2, loop(), recipe), range(2), strict=True):
        assert after == expected(length)[1]
        if "async" in recipe:  # each worker gets as many batches as it asks for
            assert all(one[-1][2] and not any(last for *_, last in one[:-1]) for one in found if one)
            assert all(0 <= step < length for one in found for _, step, _ in one)
        else:
            batches = length if in_shares else length - worker  # worker 1 has no last whole batch
            wanted = [one[:batches] for one in expected(length)[0]]
            assert [[one[:2] for one in each] for each in found] == [[one[:2] for one in each] for each in wanted]
            assert "stale" in recipe or found == wanted


def test_a_loop_that_was_left_has_no_batch() -> None:
    def after(work: Callable[[Any, int], Any]) -> Any:
        return work(loop(leaves_at=2), 0)[1]

    wanted = [(3, 3, False), (6, 3, False), (9, 3, False)]
    assert after(contextvars.Context().run) == wanted
    assert after(lambda work, _: run_workers(1, work)[0]) == wanted
    assert after(lambda work, _: run_workers(2, work, "local_sgd(every=2)")[1]) == wanted


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd(shards=2)"])
def test_position_continues_after_a_resume(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    options: dict[str, Any] = {"checkpoint": every("1 rounds"), "keep": 99}
    whole = run_workers(2, loop(), recipe, run=tmp_path / "whole", **options)
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    for number, checkpoint in enumerate(checkpoints[:: max(len(checkpoints) // 3, 1)]):
        shutil.copytree(checkpoint, tmp_path / str(number) / "checkpoints" / checkpoint.name)
        for (found, after), (all_found, all_after) in zip(
            run_workers(2, loop(), recipe, resume=tmp_path / str(number)), whole, strict=True
        ):
            rest, all_rest = [one for each in found for one in each], [one for each in all_found for one in each]
            assert after[-1] == all_after[-1]
            assert "async" in recipe or rest == all_rest[len(all_rest) - len(rest) :]
            assert all(one[0] <= other[0] for one, other in pairwise(rest))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd(shards=2)"])
def test_position_is_that_of_the_others_after_a_restart(recipe: str) -> None:
    length = simulated(2, loop(), recipe, net="100Mbit/s 1ms").seconds
    for number in (4, 7):
        fault = f"kill worker 0 at {number * length / 10:.6f}s, back after 15ms"
        ended = simulated(2, loop(), recipe, net="100Mbit/s 1ms", fault=fault)
        assert "async" in recipe or ended.found[0][1][-1] == ended.found[1][1][-1]
        steps = [step for each in ended.found[0][0] for step, *_ in each]
        assert steps and steps[0] > 0
        assert "async" in recipe or all(two == one + 1 for one, two in pairwise(steps))


@pytest.mark.parametrize("moment", [0.2, 0.5, 0.8])
def test_a_batch_that_is_leased_ahead_counts_once_when_a_server_fails(moment: float) -> None:
    recipe, net = "async_sgd(shards=2)", "100Mbit/s 1ms"
    length = simulated(2, loop(), recipe, net=net).seconds
    ended = simulated(2, loop(), recipe, net=net, fault=f"kill server 1 at {moment * length:.6f}s, back after 15ms")
    counts = {one["epoch"]: one["sample_counts"] for one in ended.of("epoch")}
    assert all((one["once"], one["twice"], one["never"]) == (4 * BATCHES, 0, 0) for one in counts.values())
    assert torch.isfinite(torch.tensor(ended.seconds))


@pytest.mark.parametrize("steps_at_end", [False, True])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_gradients_that_an_epoch_leaves_are_stepped_or_named(
    recipe: str, steps_at_end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # the gradient of a batch is a power of ten, so the parameter shows which batches were stepped
    def work(worker: int) -> float:
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        data = TensorDataset(10.0 ** torch.arange(10, dtype=torch.float64)[:, None])
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=1))
        for (x,) in loader:
            net(x).sum().backward()
            if (stretto.epoch_step() + 1) % 3 == 0 or (steps_at_end and stretto.is_last_batch()):
                optimizer.step()
                optimizer.zero_grad()
        stretto.finish()
        return -net.weight.item()

    found = run_workers(2, work, recipe)
    share = 1 if recipe == "async_sgd" else 2
    all_of = 1111111111 / share
    is_named = "no step after them" in capsys.readouterr().err
    assert is_named == (not steps_at_end)
    if steps_at_end:
        assert found == pytest.approx([all_of] * 2)


@pytest.mark.parametrize("batches", [6, 7])
def test_workers_mark_the_last_step_of_a_stream(batches: int) -> None:
    def work(worker: int) -> list[bool]:
        net = small_net()
        optimizer, marks = sgd(net.parameters()), []
        loader = stretto.distribute(net, optimizer, iter(list(DataLoader(regression(4 * batches), batch_size=4))))
        for x, y in loader:
            marks.append(stretto.is_last_batch())
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return marks

    length = -(-batches // 2)
    marks = [step + 1 == length for step in range(length)]
    assert run_workers(2, work, "local_sgd(every=2)") == [marks, marks]
