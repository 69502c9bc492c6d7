"""Learning rates that schedulers choose by a number are equal at all workers, and at all processes of a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stage_threads import in_threads
from thread_workers import regression, run_workers, small_net
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ReplicasDifferError
from stretto.parallel.link import Link
from stretto.strategies.consistency_check import Rates, check_rates

DIFFER = r"learning rates differ by worker(.*\n)*  got: learning rates 0\.1; 0\.05(.*\n)*.*validation_loss"


def training(number: Callable[[int, int], float | None]) -> Callable[[int], float]:
    """Return a script that steps a scheduler with the number of a worker and an epoch, unless that is None."""

    def work(worker: int) -> float:
        net = small_net()
        optimizer = SGD(net.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(16), batch_size=4))
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                mse_loss(net(x), y).backward()
                optimizer.step()
            if (one := number(worker, epoch)) is not None:
                plateau.step(one)
        return float(optimizer.param_groups[0]["lr"])

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "diloco(every=2)", "gossip()"])
def test_a_scheduler_that_is_stepped_with_other_numbers_ends_the_run(recipe: str) -> None:
    with pytest.raises(ReplicasDifferError, match=DIFFER):
        run_workers(2, training(lambda worker, epoch: epoch if worker else -epoch), recipe)


def test_a_scheduler_that_one_worker_alone_steps_ends_the_run() -> None:
    with pytest.raises(ReplicasDifferError, match="got: learning rates 0.1; 0.05 by worker"):
        run_workers(2, training(lambda worker, epoch: epoch if worker else None), "local_sgd(every=2)")


def test_rates_that_a_script_sets_are_named_where_replicas_differ() -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = SGD(net.parameters(), lr=0.1)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(16), batch_size=4)):
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * worker
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()

    with pytest.raises(ReplicasDifferError, match="got: learning rates 0.1; 0.2 by worker"):
        run_workers(2, work, "allreduce")


@pytest.mark.parametrize("recipe", ["allreduce", "diloco(every=2)"])
def test_a_scheduler_that_is_stepped_with_the_same_numbers_chooses_for_all(recipe: str) -> None:
    assert run_workers(2, training(lambda _worker, epoch: epoch), recipe) == [0.025, 0.025]


def test_processes_of_a_worker_have_the_same_rates() -> None:
    def work(rates: float) -> Callable[[Link], None]:
        return lambda link: check_rates(link.gather(Rates([0.1 + rates * link.rank]).packed()), "process of a worker")

    in_threads(2, work(0.0))
    with pytest.raises(ReplicasDifferError, match=r"got: learning rates 0\.1; 0\.2 by process of a worker"):
        in_threads(2, work(0.1))


@pytest.mark.parametrize("recipe", ["allreduce", 'allreduce(how=cast("bf16"))', "power_sgd(rank=1)"])
def test_rates_that_a_counter_of_batches_changes_are_named_in_the_exchange_where_they_differ(recipe: str) -> None:
    """Worker 2 counts 4 of its 5 batches: it steps the scheduler a batch later in the second epoch."""

    def work(worker: int) -> None:
        net, batches = small_net(), 0
        optimizer = SGD(net.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.5)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(56), batch_size=4, drop_last=True))
        for epoch in range(3):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                mse_loss(net(x), y).backward()
                optimizer.step()
                is_counted = (worker, epoch, step) != (2, 0, 4)
                batches += is_counted
                if is_counted and batches % 2 == 0:
                    plateau.step(0.5)

    with pytest.raises(ReplicasDifferError, match="learning rates differ by worker at batch 2 of epoch 2") as caught:
        run_workers(3, work, recipe)
    assert "got: learning rates 0.025; 0.025; 0.05 by worker" in str(caught.value)
