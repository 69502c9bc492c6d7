"""Properties of whole trainings under recipes whose workers do not wait, for any order of arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value
from thread_workers import (
    flat,
    regression,
    relative_distance,
    run_one_worker,
    run_single_process,
    run_workers,
    sgd,
    small_net,
    training,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError
from stretto.events import Event, read_events
from stretto.recipe.named import ASYNCHRONOUS
from stretto.recipe.parser import parse

DOUBLE = torch.float64
NAMES = [make.__name__ for make in ASYNCHRONOUS]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.03, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize(
    ("recipe", "make"),
    each_value([*NAMES, "async_sgd(overlap=True)", "elastic_averaging(every=2, overlap=True)"], [sgd, momentum, adam]),
)
def test_one_worker_computes_the_plain_loop(recipe: str, make: Any) -> None:
    work = training(regression(100, DOUBLE), 8, make=make, dtype=DOUBLE)
    assert relative_distance(run_one_worker(work, recipe), run_single_process(work)) <= 1e-12


@pytest.mark.parametrize("recipe", ["stale_synchronous(bound=0)", "stale_synchronous(bound=0, shards=3)"])
def test_staleness_bound_0_equals_synchronous_training(recipe: str) -> None:
    for workers in (2, 4):
        work = training(regression(96, DOUBLE), 8, epochs=3, dtype=DOUBLE)
        assert (
            relative_distance(run_workers(workers, work, recipe)[0], run_workers(workers, work, "allreduce")[0])
            <= 1e-12
        )


def test_staleness_bound_0_equals_synchronous_training_with_local_steps() -> None:
    recipe = "Recipe(what=updates(), when=on_arrival(every=2, bound=0), whom=server(), then=add(weight=equal_share()))"
    work = training(regression(96, DOUBLE), 8, epochs=3, make=momentum, dtype=DOUBLE)
    assert relative_distance(run_workers(3, work, recipe)[0], run_workers(3, work, "local_sgd(every=2)")[0]) <= 1e-12


def test_collecting_all_updates_under_staleness_bound_0_is_synchronous() -> None:
    recipe = "Recipe(what=updates(), when=on_arrival(collect=4, bound=0), whom=server(), then=add())"
    work = training(regression(96, DOUBLE), 8, epochs=3, dtype=DOUBLE)
    assert relative_distance(run_workers(4, work, recipe)[0], run_workers(4, work, "allreduce")[0]) <= 1e-12


@pytest.mark.parametrize(
    ("over_server", "over_everyone"),
    [
        ("Recipe(whom=server(shards=2))", "allreduce"),
        (
            "Recipe(what=parameters(), when=together(every=3), whom=server(shards=3), then=replace())",
            "local_sgd(every=3)",
        ),
        ("Recipe(what=updates(), when=together(every=3), whom=server(), then=outer())", "diloco(every=3)"),
    ],
)
def test_synchronous_recipes_over_a_server_equal_those_without(over_server: str, over_everyone: str) -> None:
    """The batches are uneven, and one worker is idle in the last global step."""
    work = training(regression(101, DOUBLE), 8, epochs=3, make=momentum, dtype=DOUBLE)
    assert relative_distance(run_workers(3, work, over_server)[0], run_workers(3, work, over_everyone)[0]) <= 1e-12


@pytest.mark.parametrize("recipe", [*NAMES, "async_sgd(overlap=True, shards=2)", "downpour(every=100)"])
def test_every_update_is_recorded_once_and_all_samples_are_in_updates(recipe: str, tmp_path: Path) -> None:
    run_workers(3, training(regression(101), 8, epochs=3, recipe=recipe), run=tmp_path)
    recorded = [
        (event["worker"], *update) for event in events_of(tmp_path, "update_applied") for update in event["updates"]
    ]
    assert len({(worker, round_) for worker, round_, *_ in recorded}) == len(recorded)
    assert sum(samples for *_, samples in recorded) == 303
    assert all(staleness >= 0 for *_, staleness, _ in recorded)
    assert sum(end["rounds"] for end in events_of(tmp_path, "end")) == len(recorded)
    assert [event["sample_counts"]["once"] for event in events_of(tmp_path, "epoch")] == [101] * 3


def test_a_slow_worker_takes_fewer_samples(tmp_path: Path) -> None:
    work = training(regression(600), 4, epochs=3, recipe="async_sgd", after_step=lambda net, optimizer: busy())
    run_workers(3, work, run=tmp_path, slow={1: 5.0})
    samples = {end["worker"]: end["samples"] for end in events_of(tmp_path, "end")}
    assert sum(samples.values()) == 1800
    assert samples[1] < 0.8 * min(samples[0], samples[2])  # on an idle machine it is about a fifth


def test_blocked_time_is_recorded_only_under_a_staleness_bound(tmp_path: Path) -> None:
    run_workers(2, training(regression(40), 4, recipe="async_sgd"), run=tmp_path)
    assert not any("blocked_s" in end for end in events_of(tmp_path, "end"))


def busy() -> None:
    torch.ones(300, 300) @ torch.ones(300, 300)


def test_the_bound_blocks_a_fast_worker_and_the_blocked_time_is_recorded(tmp_path: Path) -> None:
    work = training(regression(400), 4, recipe="stale_synchronous(bound=1)", after_step=lambda net, optimizer: busy())
    run_workers(2, work, run=tmp_path, slow={1: 8.0})
    ends = {end["worker"]: end for end in events_of(tmp_path, "end")}
    assert ends[0]["blocked_s"] > 2 * ends[1]["blocked_s"]
    assert ends[0]["time_breakdown"]["waiting"] >= ends[0]["blocked_s"]
    assert abs(ends[0]["rounds"] - ends[1]["rounds"]) <= 2 * (1 + 1)


@pytest.mark.parametrize(
    "recipe", ["async_sgd", "downpour(every=4)", "elastic_averaging(every=3)", "soft_sync(collect=3)"]
)
def test_evaluations_are_made_after_every_n_batches_of_all_workers(recipe: str, tmp_path: Path) -> None:
    data = regression(320)

    def work(worker: int) -> Tensor:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = DataLoader(data, batch_size=8)
        loader = stretto.distribute(
            net,
            optimizer,
            loader,
            recipe=recipe,
            evaluate=lambda net: {"size": float(flat(net).norm())},
            evaluate_every=4,
        )
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    run_workers(2, work, run=tmp_path)
    evaluations = events_of(tmp_path, "evaluation")
    assert [one["samples"] for one in evaluations] == [64 * k for k in range(1, 11)]
    assert all(one["versions"] == sorted(one["versions"]) for one in evaluations)
    versions = [one["versions"][0] for one in evaluations]
    assert versions == sorted(versions)


@pytest.mark.parametrize("by", [{0, 1, 2}, {0}])
@pytest.mark.parametrize("recipe", ["async_sgd", "elastic_averaging(every=2)"])
def test_changes_by_the_script_after_an_epoch_are_kept(recipe: str, by: set[int]) -> None:
    """If the workers' scripts make different changes, the changes of worker 0 count."""
    data = regression(96, DOUBLE)

    def work(worker: int) -> tuple[Tensor, Tensor]:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8), recipe=recipe)
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            if epoch == 0 and worker in by:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.5)
        return flat(net), flat(small_net(DOUBLE))

    for found, start in run_workers(3, work):
        assert torch.equal(found, start / 2)


@pytest.mark.parametrize("recipe", ["async_sgd", "soft_sync(collect=2)", "elastic_averaging(every=2)"])
def test_worker_0_evaluates_a_stream_after_every_n_of_its_own_steps(recipe: str, tmp_path: Path) -> None:
    batches = [(torch.ones(4, 6), torch.ones(4, 1))] * 10

    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        evaluate = lambda net: {"size": float(flat(net).norm())}  # noqa: E731
        loader = stretto.distribute(net, optimizer, batches, recipe=recipe, evaluate=evaluate, evaluate_every=2)
        for x, y in _batches(loader, 3):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    run_workers(2, work, run=tmp_path)
    evaluations = events_of(tmp_path, "evaluation")
    own = next(one["step"] for one in events_of(tmp_path, "end") if not one["worker"])  # which leases what it can train
    assert [one["step"] for one in evaluations[: own // 2]] == list(range(2, own + 1, 2))
    samples = [one["samples"] for one in evaluations]
    assert samples == sorted(samples)
    assert samples[-1] == 120
    assert len({one["metrics"]["size"] for one in evaluations}) > 4
    assert all(one["versions"] == sorted(one["versions"]) for one in evaluations)


def test_replicas_of_a_model_with_two_dtypes_are_equal_over_several_shards() -> None:
    data = regression(96, DOUBLE)

    def work(worker: int) -> Tensor:
        net = nn.Sequential(nn.Linear(6, 40, dtype=DOUBLE), nn.Tanh(), nn.Linear(40, 1))
        loader = stretto.distribute(net, optimizer := sgd(net.parameters()), DataLoader(data, batch_size=8))
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net[2](net[:2](x).float()), y.float()).backward()
                optimizer.step()
        return flat(net)

    found = run_workers(3, work, "async_sgd(shards=2)")
    assert all(torch.equal(one, found[0]) for one in found)


def test_asynchronous_gradients_need_an_optimizer_without_momentum() -> None:
    recipe = "Recipe(what=gradients(), when=on_arrival(), whom=server(), then=add())"
    with pytest.raises(ModelError, match=r"SGD\(momentum=0.9\)"):
        run_workers(2, training(regression(96), 8, make=momentum, recipe=recipe))
    work = training(regression(96, DOUBLE), 8, dtype=DOUBLE)
    assert relative_distance(run_one_worker(work, recipe), run_single_process(work)) <= 1e-12


def test_delay_compensation_needs_one_learning_rate() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}])

    with pytest.raises(ModelError, match="one for all parameter groups"):
        run_workers(2, training(regression(96), 8, make=make, recipe="delay_compensated"))


@pytest.mark.parametrize("recipe", NAMES)
def test_every_shard_is_updated_over_several_shards(recipe: str) -> None:
    """The numbers differ, because the order of arrival differs, but no shard is left out."""
    short = parse(recipe)
    work = training(regression(160), 8, recipe=f"{recipe}(shards=4)")
    start, found = flat(small_net()), run_workers(2, work)[0]
    moved = (found - start).abs().reshape(-1)
    assert short.asynchronous
    assert bool((moved[:32] > 0).any())
    assert bool((moved[-16:] > 0).any())


class Sum(nn.Module):
    """A model whose gradient is 1 everywhere, for all parameters, so that the applied steps can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.sum() + 0 * x[:, :1]


def counted(recipe: str, workers: int, epochs: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Return the server's parameters after epochs of 20 steps down a slope of 1, and each worker's own at the end."""
    data = regression(160, DOUBLE)

    def work(worker: int) -> tuple[Tensor, Tensor]:
        net, own = Sum(), torch.zeros(100, dtype=DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for x, _ in _batches(stretto.distribute(net, optimizer, DataLoader(data, batch_size=8), recipe=recipe), epochs):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            own = flat(net)
        return flat(net), own

    found = run_workers(workers, work)
    return found[0][0], [own for _, own in found]


def _batches(loader: Any, epochs: int) -> Any:
    for _ in range(epochs):
        yield from loader


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("async_sgd", 60),
        ("async_sgd(overlap=True, shards=2)", 60),
        ("async_sgd(weight=0.25)", 15),
        ("downpour(every=3)", 60),
        ("downpour(every=7, overlap=True)", 60),
        ("soft_sync(collect=2)", 30),
        ("soft_sync(collect=4, overlap=True)", 15),
        ("stale_synchronous(bound=2)", 20),
        ("stale_synchronous(bound=3, overlap=True)", 20),
    ],
)
def test_every_local_step_is_applied_once(recipe: str, steps: int) -> None:
    """No step is lost or counted twice between epochs, or when a server collects fewer updates than it waits for."""
    assert torch.allclose(counted(recipe, workers=3)[0], torch.full((100,), -float(steps), dtype=DOUBLE), atol=1e-9)


@pytest.mark.parametrize(
    "recipe", ["elastic_averaging(every=1, alpha=0.3)", "elastic_averaging(every=1, overlap=True)"]
)
def test_elastic_averaging_moves_worker_and_server_by_the_same(recipe: str) -> None:
    """Only local steps change `sum_i x_i + c`. Under overlap a worker has not applied the last reply yet."""
    workers = 3
    centre, own = counted(recipe, workers)
    whole = float((torch.stack(own).sum(0) + centre)[0])
    assert whole == pytest.approx(-60.0, abs=1e-9 if "overlap" not in recipe else 3.0)


def test_workers_compute_each_round_on_one_version_under_staleness_bound_0(tmp_path: Path) -> None:
    """The first of three updates that are applied one after another has staleness 0 and the last has staleness 2."""
    run_workers(3, training(regression(96), 8, recipe="stale_synchronous(bound=0)"), run=tmp_path)
    stale = [staleness for one in events_of(tmp_path, "update_applied") for _, _, staleness, _ in one["updates"]]
    assert sorted(stale) == sorted([0, 1, 2] * 8)
