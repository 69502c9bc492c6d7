"""Properties of the effective batch: `--batch split` equals one process, `--lr-scale` does not change schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.failures import NET
from simulator.harness import simulated
from thread_workers import flat, regression, relative_distance, run_single_process, run_workers, small_net, training
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.compare.trials import ask, trials
from stretto.errors import LaunchError, LoaderError
from stretto.launcher.config import check
from stretto.run_config import RunConfig

DOUBLE = torch.float64


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=1)"])
@pytest.mark.parametrize("samples", [64, 65, 70])
def test_workers_that_split_each_batch_equal_one_process_step_for_step(recipe: str, samples: int) -> None:
    """The last batch of 65 samples is smaller than the number of workers."""
    make = {"make": adam} if recipe == "allreduce" else {}
    work = training(regression(samples, DOUBLE), 8, dtype=DOUBLE, **make)
    found = run_workers(3, work, recipe, split=True)
    assert relative_distance(found[0], run_single_process(work)) <= 1e-12
    assert all(torch.equal(one, found[0]) for one in found)


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)).view(-1, 1))


def reading(data: Callable[[], Any], **options: Any) -> Callable[[int], list[list[float]]]:
    """Return a script that trains, and returns the numbers in each of its batches."""

    def work(worker: int) -> list[list[float]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        loader = stretto.distribute(net, optimizer, data(), **options)
        found = []
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            found.append(x.view(-1).tolist())
        return found

    return work


KINDS: dict[str, Callable[[], Any]] = {
    "map-style": lambda: DataLoader(numbers(24), batch_size=8),
    "stream": lambda: list(torch.arange(24.0).view(-1, 1).split(8)),
}
WHOLE = [torch.arange(26.0).view(-1, 1)]


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_gets_a_part_of_each_batch(kind: str, recipe: str) -> None:
    found = run_workers(4, reading(KINDS[kind]), recipe, split=True)
    assert sorted(x for one in found for batch in one for x in batch) == list(range(24))
    assert max(len(batch) for one in found for batch in one) == 2


def test_every_sample_of_split_batches_counts_once_when_a_worker_fails() -> None:
    ended = simulated(3, training(regression(64), 8), "allreduce", net=NET, fault="kill worker 1 at 40ms",
                      asks={"global_batch": "split"})  # fmt: skip
    assert [one["sample_counts"]["once"] for one in ended.of("epoch")] == [64, 64]


@pytest.mark.parametrize("deal", ["contiguous"])
def test_stretches_of_split_batches_are_refused(deal: Any) -> None:
    with pytest.raises(LoaderError, match="deal= does not fit"):
        run_workers(2, reading(KINDS["map-style"], deal=deal), "allreduce", split=True)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd", "delay_compensated"])
def test_a_scaled_rate_is_the_rate_times_the_factor(recipe: str) -> None:
    """One process with the larger rate makes the same steps; between steps the script reads its own rate."""
    data = regression(48, DOUBLE)

    def work(rate: float) -> Callable[[int], Tensor]:
        def run(worker: int) -> Tensor:
            net = small_net(DOUBLE)
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
            after = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
            for _ in range(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
                    after.step()
                before.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)
            return flat(net)

        return run

    assert (
        relative_distance(run_workers(1, work(0.01), recipe, lr_factor=4.0)[0], run_workers(1, work(0.04), recipe)[0])
        <= 1e-12
    )


def test_idle_workers_step_with_the_scaled_rate_too() -> None:
    found = run_workers(3, training(regression(65, DOUBLE), 8, dtype=DOUBLE), "allreduce", lr_factor=3.0)
    assert all(torch.equal(one, found[0]) for one in found)


def test_learning_rate_factors_depend_on_the_number_of_workers() -> None:
    script = Path(__file__)
    factors = [RunConfig(script, workers=4, lr_scale=scale).lr_factor for scale in ("none", "linear", "sqrt")]
    assert factors == [1, 4, 2]
    assert RunConfig(script, single_process=True, global_batch_of=4, lr_scale="linear").lr_factor == 4
    with pytest.raises(LaunchError, match="--lr-scale is for a larger batch"):
        check(RunConfig(script, workers=4, recipe="allreduce", global_batch="split", lr_scale="linear"))


def test_a_comparison_of_split_batches_refers_to_the_single_process() -> None:
    config = RunConfig(Path(__file__), global_batch="split")
    question = ask(config, workers="1,4", recipes=["allreduce"], seeds=1, target=None)
    assert [(one.workers, one.global_batch_of, one.reference) for one in trials(question)] == [
        (1, 1, None),
        (1, 1, "single-process-seed0"),
        (4, 1, "single-process-seed0"),
    ]
    assert "--batch split" in " ".join(question.command())


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("allreduce", "2 workers x 8 = 16 samples a global batch; learning rate as in the script"),
        ("local_sgd(every=4)", "2 workers x 8 = 16 samples a global batch; learning rate as in the script"),
        ("async_sgd", "2 workers that do not wait for each other, each with a batch of 8 samples; learning"),
        ("async_sgd", "the updates of 2 workers are added: a step of up to 2 x that rate"),
    ],
)
def test_a_run_prints_its_effective_batch_once(recipe: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_workers(2, training(regression(32), 8), recipe)
    assert capfd.readouterr().err.count(line) == 1


@pytest.mark.parametrize("batch", [37, 64])
@pytest.mark.parametrize(("recipe", "split", "line"), [
    ("allreduce", False, "3 workers share the batch of an epoch"),
    ("allreduce", True, "3 workers share each batch of 37 samples"),
    ("gossip()", False, "3 workers share the batch of an epoch"),
    ("async_sgd", False, "3 workers that do not wait for each other, 1 of them at a time with a batch of 37 samples;"),
])  # fmt: skip
def test_a_batch_of_all_data_is_shared_or_that_of_one_worker(
    batch: int, recipe: str, split: bool, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_workers(3, training(regression(37), batch), recipe, split=split)
    said = capfd.readouterr().err
    assert said.count(line) == 1, said
    assert "111" not in said


def test_of_a_list_the_number_of_batches_is_known(capfd: pytest.CaptureFixture[str]) -> None:
    run_workers(3, reading(lambda: WHOLE), "local_sgd(every=1)")
    assert "1 of 3 workers has a batch: 1 batch of the script's a global batch" in capfd.readouterr().err
