"""Workers that join or restart within an epoch over a stream: each batch is trained once, by as many workers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from streams import batch_of, has_weight, kinds
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stretto
from stretto.training.elasticity import ElasticAgent

BATCHES = 90
RECIPES = ["allreduce", "local_sgd(every=4)", "diloco(every=4)", "gossip(every=2)"]


class Stateful(IterableDataset[torch.Tensor]):
    """The same batches, by a stream that continues from a state."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        begins, self.at = self.at, 0
        for number in range(begins, BATCHES):
            self.at = number + 1
            yield batch_of(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


KINDS = kinds(BATCHES) | {"stateful": lambda: DataLoader(Stateful(), batch_size=None)}


class Trained:
    """The rows that each incarnation of a worker was given, and how many of them an exchange has carried."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = defaultdict[tuple[int, int], list[int]](list)
        self.carried = defaultdict[tuple[int, int], int](int)
        self.incarnations = defaultdict[int, int](int)
        carried = ElasticAgent.carried

        def noted(agent: ElasticAgent) -> None:
            who = agent._trainer.transport.number, agent._context.incarnation
            self.carried[who] = len(self.rows[who])
            carried(agent)

        patch.setattr(ElasticAgent, "carried", noted)

    def all(self) -> list[int]:
        """Return all rows that are in the agreed state: those of the last incarnations are."""
        last = {(worker, max(one for other, one in self.rows if other == worker)) for worker, _ in self.rows}
        return sorted(
            itertools.chain.from_iterable(
                rows if who in last else rows[: self.carried[who]] for who, rows in self.rows.items()
            )
        )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    return Trained(monkeypatch)


def counting(
    kind: str, trained: Trained, deaths: list[tuple[int, int, int]], epochs: int = 1
) -> Callable[[int], torch.Tensor]:
    """Return a script that trains a table, and whose workers fail at (worker, incarnation, step); it returns counts."""

    def work(worker: int) -> torch.Tensor:
        incarnation = trained.incarnations[worker]
        trained.incarnations[worker] += 1
        torch.manual_seed(worker)
        net = nn.Embedding(2 * BATCHES, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader = stretto.distribute(net, optimizer, KINDS[kind]())
        for _ in range(epochs):
            for step, x in enumerate(loader):
                if (worker, incarnation, step) in deaths:
                    raise WorkerKilled
                if has_weight():
                    trained.rows[worker, incarnation] += x.tolist()
                optimizer.zero_grad()
                net(x).sum().backward()
                optimizer.step()
                torch.rand(worker + 1)
                x.zero_()
        return -net.weight.detach().flatten()

    return work


@pytest.mark.parametrize("split", [False, True])
def test_worker_that_fails_at_the_beginning_of_an_epoch_returns_while_the_others_train_what_it_had_of_the_one_before(
    split: bool, trained: Trained
) -> None:
    work = counting("iterable", trained, [(1, 0, 1)], epochs=4)
    run_elastic_workers(3, work, "local_sgd(every=7)", again=1, split=split)
    assert trained.all() == sorted(4 * [*range(2 * BATCHES)])


DEATHS = [(1, 0, 5), (2, 0, 12), (1, 1, 3), (0, 0, 20), (2, 1, 4)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_stream_with_five_failures_has_as_many_workers_at_its_end_as_at_its_start(
    recipe: str, trained: Trained
) -> None:
    found, coordinator = run_elastic_workers(3, counting("iterable", trained, DEATHS), recipe, again=2)
    assert trained.all() == list(range(2 * BATCHES))
    assert len(coordinator.generations[-1].members) == 3
    assert coordinator.incarnations == {0: 1, 1: 2, 2: 2}
    assert all(bool((counts != 0).all()) for counts in found)


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("indices", True),
        ("indices", False),
        ("generator", True),
        ("iterable", True),
        ("list", False),
        ("stateful", False),
    ],
)
def test_batches_of_each_kind_of_stream_are_trained_once(kind: str, split: bool, trained: Trained) -> None:
    deaths = [(1, 0, 5), (0, 0, 20)]
    found, coordinator = run_elastic_workers(3, counting(kind, trained, deaths), "allreduce", again=1, split=split)
    assert trained.all() == list(range(2 * BATCHES))
    assert len(coordinator.generations[-1].members) == 3
    assert all(bool((counts > 0.3).all()) and torch.equal(counts, found[0]) for counts in found)
