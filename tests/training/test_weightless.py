"""Passes of weight 0: workers without a batch in a step of whole batches make the script's step, and nothing of it
counts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from thread_workers import (
    flat,
    regression,
    relative_distance,
    run_single_process,
    run_workers,
    sgd,
    small_net,
    training,
)
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

import stretto
from stretto.events import read_events

DOUBLE = torch.float64
WAITING = ["allreduce", "power_sgd(rank=1)", "local_sgd(every=2)", "diloco(every=2)", "gossip"]
WHOLE: dict[str, tuple[int, dict[str, Any]]] = {
    "drop_last": (34, {"batch_size": 4, "drop_last": True}),
    "one sample": (7, {"batch_size": 1}),
    "own batches": (8, {"batch_size": 1, "batch_sampler": [[0, 1], [2], [3, 4, 5], [6, 7]]}),
    "few samples": (3, {"batch_size": 8}),
}
"""Loaders whose batches are dealt whole, with their numbers of samples: 8, 7, 4 and 1 batches."""


def whole(kind: str, **more: Any) -> Callable[[int], Tensor]:
    samples, options = WHOLE[kind]
    return training(regression(samples, DOUBLE), 1, **({"dtype": DOUBLE} | options | more))


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize(("kind", "workers"), [("drop_last", 3), ("one sample", 2), ("own batches", 5)])
def test_loops_are_equal_and_each_sample_counts_once(recipe: str, kind: str, workers: int, tmp_path: Path) -> None:
    samples, options = WHOLE[kind]
    steps: list[list[float]] = [[] for _ in range(workers)]

    def work(worker: int) -> tuple[int, Tensor]:
        net = small_net(DOUBLE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(samples, DOUBLE), **options))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2 * len(loader))
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                stretto.log(loss=loss)
                steps[worker].append(optimizer.param_groups[0]["lr"])
        stretto.finish()
        return len(loader), flat(net)

    found = run_workers(workers, work, recipe, run=tmp_path)
    batches = len(DataLoader(regression(samples), **options))
    assert {length for length, _ in found} == {-(-batches // workers)}
    assert steps == [steps[0]] * workers
    assert len(steps[0]) == 2 * found[0][0]
    assert all(torch.equal(one, found[0][1]) for _, one in found)
    events = list(read_events(tmp_path / "events.jsonl"))
    counted = [one["sample_counts"] for one in events if one["event"] == "epoch"]
    dropped = samples % 4 if kind == "drop_last" else 0
    assert counted == [{"once": samples - dropped, "twice": 0, "never": 0, "dropped": dropped}] * 2
    logged = [one["worker"] for one in events if one["event"] == "log"]
    assert len(logged) == 2 * batches, "what a pass of weight 0 logs is left out"


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_gradients_are_those_of_one_process_with_the_same_global_steps(kind: str, workers: int) -> None:
    one = run_single_process(whole(kind), join=workers)
    for found in run_workers(workers, whole(kind), "allreduce"):
        assert relative_distance(found, one) <= 1e-12


class Normed(nn.Module):
    """A network with the buffers of batch-norm, and a parameter that no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = small_net(DOUBLE), nn.BatchNorm1d(6, dtype=DOUBLE)
        self.teacher = nn.Parameter(torch.zeros((), dtype=DOUBLE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.net(self.norm(x)))


def spoilt(recipe: str, spoil: float | None, log: bool = False) -> list[dict[str, Tensor]]:
    """Return the final state of three workers: 8 batches of 4; the loss of a pass of weight 0 is times `spoil`."""

    def work(worker: int) -> dict[str, Tensor]:
        net = Normed()
        optimizer = torch.optim.AdamW([*net.net.parameters(), *net.norm.parameters()], lr=0.01)
        data = DataLoader(regression(32, DOUBLE), batch_size=4, drop_last=True)
        loader = stretto.distribute(net, optimizer, data)
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                is_spoilt = spoil is not None and step == 2 and worker == 2
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss = nn.functional.mse_loss(net(x * spoil if is_spoilt and spoil is not None else x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                if log:
                    stretto.log(loss=loss)
        stretto.finish()
        return {name: value.clone() for name, value in net.state_dict().items()}

    return run_workers(3, work, recipe)


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize("spoil", [math.nan, 1e9])
def test_nothing_of_the_pass_enters_the_model(recipe: str, spoil: float) -> None:
    """Neither its gradient, nor its statistics, nor a NaN; under recipes of local steps no state of the optimizer."""
    plain = spoilt(recipe, None)
    for one, other in zip(spoilt(recipe, spoil, log=True), plain, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    ],
)
@pytest.mark.parametrize("recipe", ["local_sgd(every=50)", "gossip(every=50)"])
def test_a_worker_is_as_before_under_recipes_of_local_steps(recipe: str, make: Any) -> None:
    """Worker 1 has no batch in the third step: its model and its optimizer's state are as before, bit for bit."""

    def work(worker: int) -> bool:
        net = Normed()
        optimizer = make([*net.net.parameters(), *net.norm.parameters()])
        states = list[Any]()

        def note() -> None:
            states.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()["state"]]))

        data = DataLoader(regression(20, DOUBLE), batch_size=4, drop_last=True)
        for x, y in stretto.distribute(net, optimizer, data):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                return loss

            note()
            optimizer.step(closure)
            note()
        stretto.finish()
        return _alike(states[-2], states[-1])

    assert run_workers(2, work, recipe) == [False, True]


def test_statistics_of_batch_norm_are_as_before_under_recipes_of_gradients() -> None:
    """If the first worker fails later, those of the next one are the model's."""

    def work(worker: int) -> bool:
        net = Normed()
        optimizer = sgd([*net.net.parameters(), *net.norm.parameters()])
        data = DataLoader(regression(20, DOUBLE), batch_size=4, drop_last=True)
        for x, y in stretto.distribute(net, optimizer, data):
            before = copy.deepcopy(dict(net.named_buffers()))
            nn.functional.mse_loss(net(x), y).backward()
            is_as_before = _alike(before, dict(net.named_buffers()))
        return is_as_before

    assert run_workers(2, work, "allreduce") == [False, True]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return all(map(_alike, one, other)) if isinstance(one, list | tuple) else bool(one == other)


# --- loops of other kinds, under allreduce --------------------------------------------------


def data_of(kind: str) -> DataLoader[Any]:
    samples, options = WHOLE[kind]
    return DataLoader(regression(samples, DOUBLE), **options)


def accumulating(kind: str) -> Callable[[int], Tensor]:
    """Accumulate the gradients of two batches for a step, also at the end of an epoch."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, data_of(kind))
        for _ in range(3):
            for step, (x, y) in enumerate(loader):
                (nn.functional.mse_loss(net(x), y) / 2).backward()
                if step % 2 or step + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(net)

    return work


def scaled(kind: str) -> Callable[[int], Tensor]:
    """Scale the loss, clip the gradients and keep an average of the weights."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        teacher = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        loader = stretto.distribute(net, optimizer, data_of(kind))
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                for mean, one in zip(teacher.parameters(), net.parameters(), strict=True):
                    mean.data.lerp_(one.detach(), 0.25)
        return torch.cat([flat(net), flat(teacher), torch.tensor([scaler.get_scale()], dtype=DOUBLE)])

    return work


def two_models(kind: str) -> Callable[[int], Tensor]:
    """Step two optimizers in turn, each on a loss in which both models are."""

    def work(worker: int) -> Tensor:
        nets = [small_net(DOUBLE), small_net(DOUBLE)]
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
        loader = stretto.distribute(nets, optimizers, data_of(kind))
        for _ in range(3):
            for x, y in loader:
                for sign, optimizer in zip((1, -0.5), optimizers, strict=True):
                    optimizer.zero_grad()
                    (sign * nn.functional.mse_loss(nets[0](x) * nets[1](x), y)).backward()
                    optimizer.step()
        return torch.cat([flat(net) for net in nets])

    return work


def searching(kind: str) -> Callable[[int], Tensor]:
    """Step L-BFGS, which calls the loss as often as it needs it."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        for x, y in stretto.distribute(net, optimizer, data_of(kind)):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat(net)

    return work


def scheduled(kind: str) -> Callable[[int], Tensor]:
    """Step a scheduler by the loss of fixed rows after each step."""

    def work(worker: int) -> Tensor:
        net, (x_test, y_test) = small_net(DOUBLE), regression(16, DOUBLE).tensors
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, data_of(kind))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.02)
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                scheduler.step(nn.functional.mse_loss(net(x_test), y_test).item())
        return torch.cat([flat(net), torch.tensor([optimizer.param_groups[0]["lr"]], dtype=DOUBLE)])

    return work


@pytest.mark.parametrize("make", [accumulating, scaled, two_models, searching, scheduled], ids=lambda one: one.__name__)
@pytest.mark.parametrize(("kind", "workers"), [("drop_last", 3), ("one sample", 2), ("own batches", 5)])
def test_other_loops_are_those_of_one_process(make: Callable[[str], Any], kind: str, workers: int) -> None:
    one = run_single_process(make(kind), join=workers)
    for found in run_workers(workers, make(kind), "allreduce"):
        assert relative_distance(found, one) <= 1e-12


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "diloco(every=2)", "gossip"])
@pytest.mark.parametrize("make", [accumulating, scaled, two_models, searching], ids=lambda one: one.__name__)
def test_other_loops_end_with_equal_replicas(make: Callable[[str], Any], recipe: str) -> None:
    size = len(flat(small_net()))
    found = run_workers(3, make("drop_last"), recipe)
    assert all(torch.equal(one[:size], found[0][:size]) for one in found)


def test_gradients_accumulated_before_the_pass_are_stepped_under_local_steps() -> None:
    """Worker 1 of 2 has the second and the fourth of 5 batches, and steps after its third, of weight 0."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        data = DataLoader(regression(20, DOUBLE), batch_size=4, drop_last=True)
        for step, (x, y) in enumerate(stretto.distribute(net, optimizer, data)):
            nn.functional.mse_loss(net(x), y).backward()
            if step != 1:
                optimizer.step()
                found = flat(net)
                optimizer.zero_grad()
        return found

    net, (x, y) = small_net(DOUBLE), regression(20, DOUBLE).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for rows in (slice(4, 8), slice(12, 16)):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
    assert relative_distance(run_workers(2, work, "local_sgd(every=50)")[1], flat(net)) <= 1e-12


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize("limit", [1, 3, 4, 6, 8])
def test_loops_that_count_their_steps_end_well(recipe: str, limit: int, tmp_path: Path) -> None:
    """34 samples are 8 whole batches, 3 steps of 3 workers; the third and the sixth have weight 0 at worker 2."""

    def work(worker: int) -> int:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=4, drop_last=True))
        done = 0
        while done < limit:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                done += 1
                if done == limit:
                    break
        return done

    assert run_workers(3, work, recipe, run=tmp_path) == [limit] * 3
    assert (tmp_path / "final.safetensors").exists()


# --- failures ----------------------------------------------------


def dying(worker_dies: int, step_dies: int, after: str, scaler: bool = False) -> Callable[[int], list[Tensor]]:
    """Return a script of 3 workers over 7 batches of 4 whose worker dies in a step, `after` a part of it."""

    def work(worker: int) -> list[Tensor]:
        net = small_net(DOUBLE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        grads = GradScaler("cpu", enabled=scaler, init_scale=16.0)
        data = DataLoader(regression(28, DOUBLE), batch_size=4, drop_last=True)
        loader = stretto.distribute(net, optimizer, data)
        for epoch in range(2):
            for step, (x, y) in enumerate(loader):
                is_end = (worker, step, epoch) == (worker_dies, step_dies, 0)
                optimizer.zero_grad()
                if is_end and after == "nothing":
                    raise WorkerKilled
                grads.scale(nn.functional.mse_loss(net(x), y)).backward()
                if is_end and after == "backward":
                    raise WorkerKilled
                grads.step(optimizer)
                grads.update()
        stretto.finish()
        return [flat(net)]

    return work


def one_process(steps: list[list[int]]) -> Tensor:
    """Return the parameters of one process that makes these steps, each with the mean over these batches of 4."""
    net, (x, y) = small_net(DOUBLE), regression(28, DOUBLE).tensors
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for batches in steps:
        rows = [row for batch in batches for row in range(4 * batch, 4 * batch + 4)]
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return flat(net)


FIRST, SECOND = [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize(
    ("worker", "step", "after", "steps"),
    [
        (2, 2, "nothing", [*FIRST, [6]]),  # it had no batch
        (2, 2, "backward", [*FIRST, [6]]),
        (0, 2, "nothing", [*FIRST, [6]]),  # it alone had one: the others step without a sample, and then with it
        (0, 2, "backward", [*FIRST, [6]]),  # the exchange has carried its work
        (1, 1, "nothing", [[0, 1, 2], [3, 5], [4, 6]]),
    ],
)
def test_a_killed_worker_leaves_the_steps_of_one_process(
    worker: int, step: int, after: str, steps: list[list[int]], scaler: bool, tmp_path: Path
) -> None:
    found, _ = run_elastic_workers(3, dying(worker, step, after, scaler), "allreduce", tmp_path)
    one = one_process([*steps, *SECOND])
    left = [ended[0] for ended in found if ended is not None]
    assert len(left) == 2
    assert all(relative_distance(each, one) <= 1e-12 for each in left)
    counted = [one["sample_counts"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert [(one["once"], one["twice"], one["never"]) for one in counted] == [(28, 0, 0)] * 2
