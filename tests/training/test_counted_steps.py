"""Steps that are counted: those of an optimizer, and those left out at a worker for gradients that are not finite.

Loops accumulate gradients in the usual way, and as the examples of Hugging Face do (`i % k == 0 or i + 1 == n`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.harness import simulated
from thread_workers import flat, regression, relative_distance, run_single_process, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto import api
from stretto.errors import ReplicasDifferError
from stretto.events import read_events

DOUBLE = torch.float64
K = 3
IN_ROUNDS = ["local_sgd(every=4)", "diloco(every=4)", "gossip(every=4)"]


def is_due(style: str, i: int, batches: int) -> bool:
    """Return True if a loop steps after batch `i`, counted from 0."""
    return (i if style == "hf" else i + 1) % K == 0 or i + 1 == batches


def accumulating(
    style: str, samples: int, no_sync: bool = False, to_none: bool = True, epochs: int = 2, drop_last: bool = False
) -> Callable[[int], tuple[Tensor, int, int]]:
    """Return a training that accumulates gradients: its parameters, the script's steps, and those that are counted."""

    def work(_worker: int) -> tuple[Tensor, int, int]:
        net, steps = small_net(DOUBLE), 0
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        batches = DataLoader(regression(samples, DOUBLE), batch_size=4, drop_last=drop_last)
        loader = stretto.distribute(net, optimizer, batches)
        for _ in range(epochs):
            for i, (x, y) in enumerate(loader):
                with nullcontext() if is_due(style, i, len(loader)) or not no_sync else stretto.no_sync():
                    (nn.functional.mse_loss(net(x), y) / K).backward()
                if is_due(style, i, len(loader)):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
                    steps += 1
        trainer = api.training()
        return flat(net), steps, trainer.progress.steps if trainer is not None else 0

    return work


def end_of(run: Path) -> list[tuple[int, int]]:
    """Return the steps and the rounds that each worker has counted."""
    return [(one["step"], one["rounds"]) for one in read_events(run / "events.jsonl") if one["event"] == "end"]


@pytest.mark.parametrize("recipe", IN_ROUNDS)
@pytest.mark.parametrize(("style", "steps"), [("hf", 14), ("usual", 12)])
def test_rounds_count_the_steps_of_the_optimizer(recipe: str, style: str, steps: int, tmp_path: Path) -> None:
    """Each worker has 18 batches in an epoch: `hf` steps after 1, 4, ..., 16 and 18."""
    found = run_workers(2, accumulating(style, 144), recipe, run=tmp_path)
    assert [(made, counted) for _, made, counted in found] == [(steps, steps)] * 2
    assert end_of(tmp_path) == [(steps, steps // 4)] * 2


@pytest.mark.parametrize("recipe", ["allreduce", *IN_ROUNDS])
@pytest.mark.parametrize(("style", "samples"), [("hf", 144), ("usual", 100)])
def test_simulated_steps_and_exchanges_are_those_of_a_live_run(
    recipe: str, style: str, samples: int, tmp_path: Path
) -> None:
    """Worker 1 has a batch fewer than worker 0 where there are 100 samples."""
    live = run_workers(2, accumulating(style, samples), recipe, run=tmp_path)
    ended = simulated(2, accumulating(style, samples), recipe)
    assert [made for _, *made in ended.found] == [made for _, *made in live]
    assert [(one["step"], one["rounds"]) for one in ended.of("end")] == end_of(tmp_path)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(ended.found, live, strict=True))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "gossip()"])
@pytest.mark.parametrize("samples", [96, 100, 97])
def test_steps_are_counted_alike_where_a_worker_has_fewer_batches(recipe: str, samples: int, tmp_path: Path) -> None:
    found = run_workers(3, accumulating("hf", samples), recipe, run=tmp_path)
    assert len({counted for _, _, counted in found}) == 1
    assert found[0][1] == found[0][2]
    assert len(set(end_of(tmp_path))) == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("recipe", "samples"), [("local_sgd(every=4)", 40), ("gossip(every=4)", 36), ("allreduce", 36)]
)
def test_gradients_that_are_stepped_are_not_named(
    recipe: str, samples: int, drop_last: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run_workers(2, accumulating("usual", samples, drop_last=drop_last), recipe)
    assert "with gradients of" not in capfd.readouterr().err


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("style", ["hf", "usual"])
@pytest.mark.parametrize(("samples", "drop_last"), [(96, False), (97, False), (92, True), (100, True)])
def test_accumulation_equals_one_process(samples: int, drop_last: bool, style: str, to_none: bool) -> None:
    """In shares, and in 23 or 25 whole batches, of which two or one of three workers have the last."""
    work = accumulating(style, samples, to_none=to_none, drop_last=drop_last)
    whole = run_single_process(lambda worker: work(worker)[0], join=3)
    for found, *_ in run_workers(3, work, "allreduce"):
        assert relative_distance(found, whole) < 1e-12


@pytest.mark.parametrize("samples", [100, 92])
def test_gradients_accumulated_under_no_sync_have_their_weight_where_a_worker_has_no_batch(samples: int) -> None:
    """The gradient of a step is the mean of those that the workers have accumulated, weighted by their samples."""
    style, workers = "usual", 3
    batches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(workers)]

    def draw(worker: int) -> int:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        data = DataLoader(regression(samples, DOUBLE), batch_size=4, drop_last=True)
        loader = stretto.distribute(net, optimizer, data)
        trainer = api.training()
        assert trainer is not None
        for x, y in loader:
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            batches[worker] += [(x, y)] if not trainer.global_steps.is_weightless else []
        return len(loader)

    length = run_workers(workers, draw, "allreduce")[0]
    assert len({len(one) for one in batches}) == 2
    net, window = small_net(DOUBLE), list[int]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for i in range(length):
        window.append(i)
        if is_due(style, i, length):
            drawn = [one[each] for one in batches for each in window if each < len(one)]
            by_worker = [[one[each] for each in window if each < len(one)] for one in batches]
            total = sum(len(x) for x, _ in drawn)
            optimizer.zero_grad()
            for own in by_worker:
                share = sum(len(x) for x, _ in own) / total
                for x, y in own:
                    (nn.functional.mse_loss(net(x), y) * share / K).backward()
            optimizer.step()
            window.clear()
    for found, *_ in run_workers(
        workers, accumulating(style, samples, no_sync=True, epochs=1, drop_last=True), "allreduce"
    ):
        assert relative_distance(found, flat(net)) < 1e-12


Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, bool, bool], None]


def scaled() -> Step:
    """Return a step with a gradient scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, is_bad: bool, due: bool) -> None:
        scaler.scale(loss * (math.inf if is_bad else 1.0)).backward()
        if due:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step


def cleared_after(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, is_bad: bool, due: bool) -> None:
    """Step if all gradients are finite, then clear them."""
    (loss * (math.nan if is_bad else 1.0)).backward()
    if due:
        if torch.isfinite(nn.utils.clip_grad_norm_(net.parameters(), 1.0)):
            optimizer.step()
        net.zero_grad()


def cleared_before(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, is_bad: bool, due: bool) -> None:
    """Clear the gradients, then step if all are finite."""
    optimizer.zero_grad()
    (loss * (math.nan if is_bad else 1.0)).backward()
    if not is_bad:
        optimizer.step()


def omitted(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, is_bad: bool, due: bool) -> None:
    """Leave out a step with finite gradients."""
    optimizer.zero_grad()
    loss.backward()
    if not is_bad:
        optimizer.step()


def passed(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, is_bad: bool, due: bool) -> None:
    """Leave out the backward pass and the step."""
    if not is_bad:
        omitted(net, optimizer, loss, False, due)


def leaving_out(make: Callable[[], Step], accumulated: int = 1, last: bool = False) -> Callable[[int], int]:
    """Return a training in which worker 1 leaves out a step, in the third batch of epoch 2 or the last one of all."""

    def work(worker: int) -> int:
        net, step = small_net(), make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(96), batch_size=4))
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                is_bad = worker == 1 and (epoch, i) == ((2, len(loader) - 1) if last else (1, 2))
                due = (i + 1) % accumulated == 0 or i + 1 == len(loader)
                step(net, optimizer, nn.functional.mse_loss(net(x), y), is_bad, due)
        trainer = api.training()
        assert trainer is not None
        return trainer.progress.steps

    return work


@pytest.mark.parametrize("recipe", IN_ROUNDS)
@pytest.mark.parametrize(
    ("make", "accumulated", "steps"),
    [
        (scaled, 1, 36),
        (scaled, 5, 9),
        (lambda: cleared_after, 1, 36),
        (lambda: cleared_after, 5, 9),
        (lambda: cleared_before, 1, 36),
    ],
    ids=["scaler", "scaler, accumulated", "cleared after", "cleared after, accumulated", "cleared before"],
)
def test_a_step_left_out_for_gradients_that_are_not_finite_keeps_the_rounds_aligned(
    recipe: str, make: Callable[[], Step], accumulated: int, steps: int, tmp_path: Path
) -> None:
    assert run_workers(2, leaving_out(make, accumulated), recipe, run=tmp_path) == [steps] * 2
    assert end_of(tmp_path) == [(steps, steps // 4)] * 2


@pytest.mark.parametrize("recipe", ["local_sgd(every=4)", "gossip()", "async_sgd"])
def test_an_exchange_in_place_of_a_step_that_a_scaler_skips_is_no_change_by_the_script(recipe: str) -> None:
    """Each worker has trained rows of its own, so that the mean has little to do with the values before."""

    def work(worker: int) -> Tensor:
        rows = nn.Embedding(96, 1)
        nn.init.zeros_(rows.weight)
        optimizer, step = torch.optim.SGD(rows.parameters(), lr=1.0), scaled()
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(torch.arange(96)), batch_size=4, shuffle=True)
        loader = stretto.distribute(rows, optimizer, data)
        for epoch in range(2):
            for i, (row,) in enumerate(loader):
                step(rows, optimizer, rows(row).sum(), worker == 1 and (epoch, i) == (1, 3), True)
        return rows.weight.detach().flatten()

    for trained in run_workers(3, work, recipe):
        assert bool((trained <= 0).all()) and len(trained.unique()) > 1


@pytest.mark.parametrize("step", [omitted, passed])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)", "local_sgd(every=50)", "diloco(every=4)"])
def test_any_other_step_that_a_worker_leaves_out_is_named(recipe: str, step: Step) -> None:
    named = r"worker 0 stepped after batch 3 of epoch 2, worker 1 did not"
    if (recipe, step) == ("allreduce", passed):  # worker 0 is still in batch 3 when it meets worker 1 in batch 4
        named = r"one exchange of epoch 2 is in batch 3 at worker 0, 4 at worker 1"
    with pytest.raises(ReplicasDifferError, match=named):
        run_workers(2, leaving_out(lambda: step), recipe)


def test_pairs_that_mix_after_different_batches_are_named() -> None:
    with pytest.raises(ReplicasDifferError, match="one exchange of epoch 2 is in batch 4 at worker 0, 5 at worker 1"):
        run_workers(2, leaving_out(lambda: omitted), "gossip(every=4)")


def test_a_step_left_out_after_the_last_round_is_named_at_the_end_of_the_epoch() -> None:
    with pytest.raises(ReplicasDifferError, match="worker 0 stepped after batch 12 of epoch 3, worker 1 did not"):
        run_workers(2, leaving_out(lambda: omitted, last=True), "local_sgd(every=50)")


def test_calls_of_other_optimizers_scalers_and_models_are_left_alone() -> None:
    """Wrapped methods do what torch's do outside of a run, and for objects that no worker has distributed."""

    def work(_worker: int) -> Any:
        found: list[bool] = []
        net, other = small_net(), small_net()
        optimizer, beside = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other))
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(16), batch_size=4)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            nn.functional.mse_loss(other(x), y).backward()
            beside.zero_grad()
            other.zero_grad(set_to_none=False)
            found.append(all(one.grad is None for one in other.parameters()))
        return found

    assert all(map(all, run_workers(2, work, "local_sgd(every=2)")))
