"""Workers fail, quit and join: the remaining workers agree, and every sample counts exactly once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import pairwise, thinned
from elastic_workers import LIMIT_S, KillInExchange, ThreadCoordinator, WorkerKilled, run_elastic_workers
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto.api import _current
from stretto.checkpoint.storage import Checkpoints
from stretto.events import read_events
from stretto.interval import every

RECIPES = [
    "allreduce",
    "allreduce(how=cast('fp16'))",
    "local_sgd(every=3)",
    "local_sgd(every=3, optimizer_state='average')",
    "diloco(every=4)",
    "gossip(every=3, graph='exponential')",
    "power_sgd(rank=1)",
    "gradient_sharing(tau=0.01)",
    "gd_sec",
    "deep_gradient_compression(ratio=0.1)",
]
COLUMNS = 6
"""Most epochs that a script counts."""


def undisturbed(_worker: int, _moment: int) -> None:
    """Do not disturb the run."""


def training(
    epochs: int = 2, disturb: Callable[[int, int], None] = undisturbed, samples: int = 97, batch: int = 4
) -> Callable[[int], Any]:
    """Return a script whose model counts: `is_lost` reads its counts from the result."""

    def work(worker: int) -> Any:
        net = nn.ModuleDict({"net": small_net(), "count": nn.Embedding(samples, COLUMNS)})
        nn.init.zeros_(net["count"].weight)
        groups = [
            {"params": net["net"].parameters()},
            {"params": net["count"].parameters(), "lr": 1.0, "momentum": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
        data = TensorDataset(*regression(samples).tensors, torch.arange(samples))
        loader: Any = DataLoader(data, batch_size=batch, shuffle=False)
        loader = stretto.distribute(net, optimizer, loader)
        step = 0
        for epoch in range(epochs):
            for x, y, numbers in loader:
                optimizer.zero_grad()
                disturb(worker, 2 * step)
                (nn.functional.mse_loss(net["net"](x), y) + net["count"](numbers)[:, epoch].sum()).backward()
                disturb(worker, 2 * step + 1)
                optimizer.step()
                step += 1
        return torch.cat([net["count"].weight.detach().flatten(), flat(net["net"])])

    return work


def killing(*plan: tuple[int, int]) -> Callable[[int, int], None]:
    pending = set(plan)

    def disturb(worker: int, moment: int) -> None:
        if (worker, moment) in pending:
            pending.discard((worker, moment))
            raise WorkerKilled

    return disturb


def sample_counts(run: Path) -> list[dict[str, int]]:
    found = [one["sample_counts"] for one in read_events(run / "events.jsonl") if one["event"] == "epoch"]
    return [{name: value for name, value in one.items() if name != "recovered_samples"} for one in found]


def all_equal(found: list[Any]) -> bool:
    running = [one for one in found if one is not None and not isinstance(one, str)]
    return bool(running) and all(torch.equal(one, running[0]) for one in running)


def is_lost(found: list[Any], recipe: str, run: Path, samples: int = 97) -> bool:
    """Return True if a model has not counted a sample in an epoch, nor the next epoch done it again for that one.

    Codecs that leave rows for later have no count.
    """
    counts = [one[: samples * COLUMNS].reshape(samples, COLUMNS) for one in found if isinstance(one, torch.Tensor)]
    epochs = [one["sample_counts"] for one in read_events(run / "events.jsonl") if one["event"] == "epoch"]
    again = [one.get("recovered_samples", 0) for one in epochs[1:]] + [0]
    lost = [int((one[:, epoch] == 0).sum()) > again[epoch] for one in counts for epoch in range(len(epochs))]
    return recipe not in RECIPES[6:] and any(lost)


@pytest.mark.parametrize(("recipe", "killed", "moment"), pairwise(RECIPES, [0, 2], [0, 7, 16, 18]))
def test_the_remaining_workers_continue(recipe: str, killed: int, moment: int, tmp_path: Path) -> None:
    found, coordinator = run_elastic_workers(3, training(disturb=killing((killed, moment))), recipe, tmp_path)
    assert found[killed] is None
    assert all_equal(found)
    assert not is_lost(found, recipe, tmp_path)
    assert sample_counts(tmp_path) == [{"once": 97, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert [view.generation for view in coordinator.generations] == [1, 2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_concurrent_failures_and_a_later_failure_lose_no_samples(recipe: str, tmp_path: Path) -> None:
    found, _ = run_elastic_workers(4, training(disturb=killing((0, 4), (3, 4), (1, 19))), recipe, tmp_path)
    assert [one is None for one in found] == [True, True, False, True]
    assert not is_lost(found, recipe, tmp_path)
    assert sample_counts(tmp_path) == [{"once": 97, "twice": 0, "never": 0, "dropped": 0}] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_restarted_worker_takes_part(recipe: str, tmp_path: Path) -> None:
    found, coordinator = run_elastic_workers(
        3, training(epochs=6, disturb=killing((1, 3), (0, 20))), recipe, tmp_path, again=1
    )
    assert all(one is not None for one in found)
    assert all_equal(found)
    assert not is_lost(found, recipe, tmp_path)
    assert sample_counts(tmp_path) == [{"once": 97, "twice": 0, "never": 0, "dropped": 0}] * 6
    assert len(coordinator.generations[-1].members) == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_worker_asked_to_quit_leaves_no_samples_to_reassign(recipe: str, tmp_path: Path) -> None:
    coordinator = ThreadCoordinator(3)

    def disturb(worker: int, moment: int) -> None:
        if (worker, moment) == (1, 4):
            coordinator.quit(1)

    found, _ = run_elastic_workers(3, training(epochs=3, disturb=disturb), recipe, tmp_path, coordinator=coordinator)
    assert found[1] == "left"
    assert all_equal(found)
    assert not is_lost(found, recipe, tmp_path)
    assert sample_counts(tmp_path) == [{"once": 97, "twice": 0, "never": 0, "dropped": 0}] * 3
    again = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "samples_reassigned"]
    assert [(one["failed_worker"], one["samples"]) for one in again] == [(1, 0)]


def test_a_pause_that_a_worker_in_a_checkpoint_has_missed_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    """One worker saves after the last step, and the other one is asked to pause before it has begun to save."""
    coordinator, saves = ThreadCoordinator(2), threading.Event()

    def disturb(worker: int, moment: int) -> None:
        trainer: Any = _current.get()
        if (worker, moment) == (1, 0):
            save = trainer.agent.checkpoints.save

            def save_late() -> None:
                coordinator.hold()
                saves.set()
                save()

            trainer.agent.checkpoints.save = save_late
        if (worker, moment) == (0, 7):
            assert saves.wait(LIMIT_S)

    asked = {"checkpoint": every("4 rounds"), "coordinator": coordinator}
    found, _ = run_elastic_workers(2, training(disturb=disturb), "allreduce", tmp_path, **asked)
    assert saves.is_set()
    assert all_equal(found)
    assert sample_counts(tmp_path) == [{"once": 97, "twice": 0, "never": 0, "dropped": 0}] * 2


def test_a_pause_that_a_worker_at_the_next_batch_of_a_stream_has_missed_does_not_keep_the_others_from_it(
    tmp_path: Path,
) -> None:
    """One worker has begun to exchange the sample counts of the next step, and the other one is asked to pause."""
    coordinator, counts = ThreadCoordinator(2), threading.Event()

    class Stream(IterableDataset[Any]):
        """Batches of which worker 1 reads the fifth one when worker 0 is still in the step before."""

        def __init__(self, worker: int) -> None:
            self._worker = worker

        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(self._worker)
            for number in range(12):
                if (self._worker, number) == (1, 4):
                    coordinator.hold()
                    counts.set()
                yield torch.randn(6, generator=generator), torch.randn(1, generator=generator)

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(Stream(worker), batch_size=1), deal="own")
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            if (worker, step) == (0, 3):
                assert counts.wait(LIMIT_S)
            optimizer.step()
        return flat(net)

    found, _ = run_elastic_workers(2, work, "allreduce", tmp_path, coordinator=coordinator)
    assert counts.is_set()
    assert all_equal(found)


def test_an_evaluation_that_outlasts_the_wait_is_made_once(tmp_path: Path) -> None:
    """The other workers' wait has a limit; when the group has formed again, the result of the evaluation is there."""
    coordinator, made = ThreadCoordinator(3), [0]

    def evaluate(net: nn.Module) -> dict[str, float]:
        made[0] += 1
        if made[0] == 1:
            coordinator.abort(1)
        return {"norm": float(flat(net).norm())}

    def work(_worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = DataLoader(regression(24), batch_size=4)
        for x, y in stretto.distribute(net, optimizer, loader, evaluate=evaluate):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    run_elastic_workers(3, work, "allreduce", tmp_path, coordinator=coordinator)
    assert made[0] == 1
    assert [one["event"] for one in read_events(tmp_path / "events.jsonl")].count("evaluation") == 1
    assert len(coordinator.generations) == 2


@pytest.mark.parametrize("rule", ["per-worker-batch", "global-batch"])
def test_the_resize_rule_sets_the_number_of_steps_after_a_failure(rule: str, tmp_path: Path) -> None:
    steps = []

    def disturb(worker: int, moment: int) -> None:
        if worker == 0 and moment % 2 == 0:
            steps.append(moment // 2)
        if (worker, moment) == (2, 0):
            raise WorkerKilled

    run_elastic_workers(3, training(epochs=1, disturb=disturb, samples=120), "allreduce", tmp_path, rule=rule)
    assert len(steps) == {"per-worker-batch": 15, "global-batch": 10}[rule]


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize("recipe", [*RECIPES, "local_sgd(every=3, optimizer_state='reset')"])
def test_a_resumed_run_equals_the_uninterrupted_run(recipe: str, tmp_path: Path) -> None:
    def work(epochs: int) -> Callable[[int], Any]:
        def train(worker: int) -> Any:
            net = small_net()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            source = torch.Generator().manual_seed(3)
            loader: Any = DataLoader(regression(65), batch_size=4, shuffle=True, generator=source)
            loader = stretto.distribute(net, optimizer, loader)
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    (nn.functional.mse_loss(net(x), y)).backward()
                    optimizer.step()
                schedule.step()
            return flat(net)

        return train

    options = {"checkpoint": every("2 rounds"), "keep": 50}
    whole, _ = run_elastic_workers(2, work(3), recipe, tmp_path / "whole", **options)
    saved = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(saved) > 1
    for one in (saved[0], saved[len(saved) // 2]):
        part = tmp_path / f"to-{one.name}"
        (part / "checkpoints").mkdir(parents=True)
        shutil.copytree(one, part / "checkpoints" / one.name)
        again, _ = run_elastic_workers(2, work(3), recipe, tmp_path / f"from-{one.name}", resume=part)
        assert torch.equal(again[0], whole[0]), one.name
        assert torch.equal(again[1], whole[1]), one.name


def test_a_run_resumes_with_fewer_workers_and_another_recipe(tmp_path: Path) -> None:
    run_elastic_workers(3, training(epochs=2), "allreduce", tmp_path / "one", checkpoint=every("4 rounds"))
    found, _ = run_elastic_workers(
        2, training(epochs=3), "local_sgd(every=2)", tmp_path / "two", resume=tmp_path / "one"
    )
    assert all_equal(found)
    assert sample_counts(tmp_path / "two")[-1] == {"once": 97, "twice": 0, "never": 0, "dropped": 0}


@pytest.mark.parametrize("kept", [False, True])
def test_workers_that_start_together_agree_on_the_checkpoint_though_some_are_restarted(
    kept: bool, tmp_path: Path
) -> None:
    """A worker was killed before all had connected; or all workers were killed, and a new worker joins.

    The checkpoint of the run is newer than the checkpoint of the run that it resumed.
    """
    run, asked = tmp_path / "run", {"checkpoint": every("4 rounds")}
    if kept:
        run_elastic_workers(3, training(epochs=1), "allreduce", tmp_path / "first", **asked)
        run_elastic_workers(3, training(epochs=2), "allreduce", run, resume=tmp_path / "first", **asked)
    coordinator = ThreadCoordinator(3)
    coordinator.incarnations[1] = 1
    found, _ = run_elastic_workers(3, training(epochs=2 + kept), "allreduce", run, coordinator=coordinator, **asked)
    assert all_equal(found)
    assert len(sample_counts(run)) == 2
    assert sample_counts(run)[-1] == {"once": 97, "twice": 0, "never": 0, "dropped": 0}


def test_a_run_resumed_by_one_worker_encodes_as_with_several(tmp_path: Path) -> None:
    """The worker takes over all residuals, and encodes by the recipe though it sends to no worker at first."""
    recipe = "power_sgd(rank=1)"
    run_elastic_workers(3, training(epochs=1), recipe, tmp_path / "one", checkpoint=every("4 rounds"))
    found, _ = run_elastic_workers(1, training(epochs=2), recipe, tmp_path / "two", resume=tmp_path / "one")
    assert len(found) == 1
    assert sample_counts(tmp_path / "two")[-1] == {"once": 97, "twice": 0, "never": 0, "dropped": 0}


@pytest.mark.parametrize(
    "recipe",
    ["gradient_sharing(tau=0.01)", "sparse_loco(every=3)", "local_sgd(every=3, how=error_feedback(top_k(0.1)))"],
)
def test_a_single_worker_has_no_residual(recipe: str, tmp_path: Path) -> None:
    """The worker's model holds all of its updates: a worker that joins would receive a residual a second time.

    The whole model counts as averaged.
    """
    run_elastic_workers(1, training(epochs=1, samples=96), recipe, tmp_path, checkpoint=every("1 rounds"))
    found = Checkpoints(tmp_path / "checkpoints").newest()
    assert found is not None
    _, state = found[1].own[0]
    assert not any(one.any() for name, one in state.items() if name.startswith("residual/"))
    assert any(name.startswith("residual/") for name in state)
    averaged = [one for name, one in found[1].tensors.items() if name == "outer/0/0"]
    model = torch.cat([one.flatten() for name, one in found[1].tensors.items() if name.startswith("model/")])
    assert len(averaged) == 1
    assert torch.allclose(averaged[0].sum(), model.sum(), atol=1e-4)


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3, optimizer_state='average')", *RECIPES[6:9]])
def test_workers_with_the_result_send_it_to_workers_without(recipe: str, failed: int, tmp_path: Path) -> None:
    op, ends = failed, False
    while not ends:
        op += thinned((2, 7), 2, first=1)[0]
        coordinator = ThreadCoordinator(3, KillInExchange(op, failed, 2))
        run = tmp_path / str(op)
        found, _ = run_elastic_workers(3, training(epochs=2, samples=41), recipe, run, coordinator=coordinator)
        ends = coordinator.generations[-1].generation == 1
        assert all_equal(found), op
        assert not is_lost(found, recipe, run, 41), op
        assert sample_counts(run) == [{"once": 41, "twice": 0, "never": 0, "dropped": 0}] * 2, op
    assert op > 20
