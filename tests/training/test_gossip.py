"""Gossip: workers mix their parameters with those of some peers; the mean stays, and the replicas come closer to it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import ThreadCoordinator, run_elastic_workers
from hypothesis import given
from hypothesis import strategies as st
from thread_workers import flat, regression, run_one_worker, run_single_process, run_workers, small_net, training
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.errors import ModelError, RecipeError
from stretto.interval import every
from stretto.recipe.parser import parse
from stretto.recipe.whom import Whom, check_topology, everyone, mixing_matrix, neighbours
from stretto.strategies.gossip import weighted_by_samples

GRAPHS = ("ring", "torus", "exponential")
DOUBLE = torch.float64


def matrix(whom: Whom, number: int, workers: int) -> Tensor:
    """Return the mixing matrix of a round."""
    found = torch.zeros(workers, workers, dtype=DOUBLE)
    for rank, row in enumerate(mixing_matrix(whom, number, workers)):
        for peer, weight in row.items():
            found[rank, peer] = weight
    return found


def second_eigenvalue(w: Tensor) -> float:
    """Return the second largest absolute eigenvalue of a symmetric matrix."""
    return float(torch.linalg.eigvalsh(w).abs().sort().values[-2])


# --- mixing matrices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", [everyone(), *map(neighbours, GRAPHS)], ids=str)
def test_mixing_matrices_are_doubly_stochastic_and_give_neighbours_equal_weights(whom: Whom) -> None:
    check_topology(whom, 20)
    for workers in range(1, 20):
        assert all(len(set(row.values())) == 1 for row in mixing_matrix(whom, 1, workers))


@pytest.mark.parametrize("workers", [3, 4, 7, 16])
def test_the_ring_contracts_by_its_known_second_eigenvalue(workers: int) -> None:
    expected = max(abs(1 + 2 * math.cos(2 * math.pi * k / workers)) / 3 for k in range(1, workers))
    assert second_eigenvalue(matrix(neighbours(), 1, workers)) == pytest.approx(expected, abs=1e-12)


def test_the_torus_contracts_faster_than_the_ring() -> None:
    assert second_eigenvalue(matrix(neighbours("torus"), 1, 16)) == pytest.approx(0.6)  # (1 + 2 + 2 cos(pi / 2)) / 5
    assert second_eigenvalue(matrix(neighbours("ring"), 1, 16)) > 0.9


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_the_exponential_graph_has_the_mean_after_the_logarithm_of_the_workers(rounds: int) -> None:
    workers, product = 2**rounds, torch.eye(2**rounds, dtype=DOUBLE)
    for number in range(5, 5 + rounds):  # from any round on
        product = matrix(neighbours("exponential"), number, workers) @ product
    torch.testing.assert_close(product, torch.full((workers, workers), 1 / workers, dtype=DOUBLE))


@dataclass(frozen=True, repr=False)
class star(Whom):
    """A topology that changes the mean: all workers take the parameters of the first."""

    def weights(self, number: int, rank: int, workers: int) -> dict[int, float]:
        return {0: 0.5, rank: 0.5} if rank else {0: 1.0}


def test_a_topology_that_changes_the_mean_is_refused() -> None:
    with pytest.raises(RecipeError, match="worker 0 of 2 is given in round 1 the weights {0: 1.0, 1: 0.5}, of sum 1.5"):
        check_topology(star())


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.just(0.0) | st.floats(1e-6, 1))
def test_equal_samples_leave_the_weights_and_none_leave_a_worker_out(row: list[float], share: float) -> None:
    weights = {peer: weight / sum(row) for peer, weight in enumerate(row)}
    assert weighted_by_samples(weights, dict.fromkeys(weights, share)) == pytest.approx(weights)
    others = weighted_by_samples(weights, dict.fromkeys(weights, 0.5) | {0: 0.0})
    assert others[0] == 0
    assert sum(others.values()) == pytest.approx(1)


# --- training ---------------------------------------------------------------------------------------------------------


def rounds(recipe: str, workers: int, steps: int, pull: Callable[[int, int], float]) -> tuple[Tensor, Tensor]:
    """Return the parameters of all workers before and after each exchange, (steps, workers, 3).

    The gradient of worker i in step s is `pull(s, i)` in all numbers.
    """

    def work(worker: int) -> tuple[list[Tensor], list[Tensor]]:
        net = nn.Linear(3, 1, bias=False, dtype=DOUBLE)
        optimizer, before, after = torch.optim.SGD(net.parameters(), lr=1.0), list[Tensor](), list[Tensor]()
        optimizer.register_step_post_hook(lambda *_: before.append(flat(net)))  # runs before the exchange's hook
        loader: Any = DataLoader(TensorDataset(torch.ones(steps * workers, 3, dtype=DOUBLE)), batch_size=1)
        for step, (x,) in enumerate(stretto.distribute(net, optimizer, loader)):
            optimizer.zero_grad()
            (pull(step, worker) * net(x).sum()).backward()
            optimizer.step()
            after.append(flat(net))
        return before, after

    found = run_workers(workers, work, recipe)
    return tuple(torch.stack([torch.stack(one[side]) for one in found], 1) for side in (0, 1))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("workers", [2, 5, 6])
def test_the_mean_of_all_parameters_is_conserved_to_rounding(graph: str, workers: int) -> None:
    recipe = f'gossip(graph="{graph}")'
    before, after = rounds(recipe, workers, 6, lambda step, worker: math.sin(7 * step + 3 * worker))
    torch.testing.assert_close(before.mean(1), after.mean(1), rtol=0, atol=1e-14)
    for number, (own, mixed) in enumerate(zip(before, after, strict=True), start=1):
        expected = matrix(parse(recipe).whom, number, workers) @ own
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-14)


def test_replicas_on_a_ring_come_closer_by_the_second_eigenvalue() -> None:
    """The first gradients are its eigenvector, and all later ones zero."""
    workers = 6
    _, after = rounds("gossip", workers, 8, lambda step, i: (step == 0) * math.cos(2 * math.pi * i / workers))
    distances = (after - after.mean(1, keepdim=True)).norm(dim=(1, 2))
    expected = (1 + 2 * math.cos(2 * math.pi / workers)) / 3
    torch.testing.assert_close(distances[1:] / distances[:-1], torch.full((7,), expected, dtype=DOUBLE))


def test_parameters_that_are_equal_everywhere_stay_bit_for_bit() -> None:
    before, after = rounds("gossip", 3, 4, lambda step, _: math.sin(step))
    assert torch.equal(before, after)


def test_between_two_rounds_workers_train_alone() -> None:
    before, after = rounds("gossip(every=3)", 3, 6, lambda step, worker: math.sin(5 * step + worker))
    equal = [bool(torch.equal(own, mixed)) for own, mixed in zip(before, after, strict=True)]
    assert equal == [True, True, False, True, True, False]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_complete_graph_equals_the_mean_of_everyone(steps: int) -> None:
    work = training(regression(48, DOUBLE), batch=4, dtype=DOUBLE)
    mixed = run_workers(3, work, f"Recipe(what=parameters(), when=together(every={steps}), then=mix())")
    averaged = run_workers(3, work, f"local_sgd(every={steps})")
    torch.testing.assert_close(mixed, averaged, rtol=0, atol=1e-14)


def test_one_worker_has_the_bits_of_the_plain_loop() -> None:
    work = training(regression(41), batch=4)
    assert torch.equal(run_one_worker(work, "gossip(every=2)"), run_single_process(work))


@pytest.mark.parametrize("graph", GRAPHS)
def test_gossip_reaches_nearly_the_loss_of_averaging_all(graph: str) -> None:
    data, net = regression(240, DOUBLE), small_net(DOUBLE)
    work = training(data, batch=5, epochs=12, dtype=DOUBLE)

    def loss(recipe: str) -> float:
        nn.utils.vector_to_parameters(run_workers(6, work, recipe)[0], net.parameters())
        return float(nn.functional.mse_loss(net(data.tensors[0]), data.tensors[1]).detach())

    assert loss(f'gossip(graph="{graph}")') < 1.05 * loss("local_sgd(every=1)")


def test_the_mean_of_all_workers_is_evaluated_and_each_continues_from_its_own() -> None:
    def work(worker: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(DOUBLE)
        optimizer, own, evaluated = torch.optim.SGD(net.parameters(), lr=0.1), list[Tensor](), list[Tensor]()

        def evaluate(model: nn.Module) -> dict[str, float]:
            evaluated.append(torch.cat([flat(model), model[1].running_mean]))
            return {"norm": float(evaluated[-1].norm())}

        loader: Any = DataLoader(regression(64, DOUBLE), batch_size=4)
        loader = stretto.distribute(net, optimizer, loader, evaluate=evaluate)
        for epoch in range(2):
            for step, (x, y) in enumerate(loader):
                if (epoch, step) == (1, 0):
                    own.append(torch.cat([flat(net), net[1].running_mean]))
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if (epoch, step) == (0, 3):
                    own.append(torch.cat([flat(net), net[1].running_mean]))
        return evaluated, *own, torch.cat([flat(net), net[1].running_mean])

    found = run_workers(4, work, "gossip")
    own = torch.stack([one[1] for one in found])
    assert len({tuple(one.tolist()) for one in own}) == 4
    torch.testing.assert_close(found[0][0][0], own.mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.stack([one[2] for one in found])[:, :-4], own[:, :-4], rtol=0, atol=0)
    assert all(torch.equal(one[3], found[0][3]) for one in found), "at the end all have the mean"


def test_parameters_that_begin_to_train_within_an_epoch_are_refused() -> None:
    def work(worker: int) -> None:
        net = small_net().requires_grad_(False)
        net[2].requires_grad_(True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(40), batch_size=4)):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            net.requires_grad_(True)

    with pytest.raises(ModelError, match="began to train in the middle of an epoch, where gossip can't follow"):
        run_workers(2, work, "gossip")


# --- failures and checkpoints -----------------------------------------------------------------------------------------


def test_a_repeated_round_gives_the_same_bits(tmp_path: Path) -> None:
    coordinator, left = ThreadCoordinator(4), {4, 9, 12}

    def disturbed(worker: int) -> Any:
        def after_step(net: nn.Module, optimizer: Any) -> None:
            step = len(steps)
            steps.append(step)
            if worker == 1 and step in left:
                left.discard(step)
                coordinator.abort(coordinator.generations[-1].generation)

        steps: list[int] = []
        return training(regression(96), batch=2, epochs=1, after_step=after_step)(worker)

    work = training(regression(96), batch=2, epochs=1)
    quiet, _ = run_elastic_workers(4, work, "gossip", tmp_path / "quiet")
    broken, _ = run_elastic_workers(4, disturbed, "gossip", tmp_path / "broken", coordinator=coordinator)
    assert len(coordinator.generations) > 2, "rounds were repeated"
    assert all(torch.equal(one, other) for one, other in zip(quiet, broken, strict=True))


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize("round_", [5, 12], ids=["within an epoch", "after the last round of an epoch"])
def test_a_resumed_run_continues_from_the_own_parameters_of_each_worker(tmp_path: Path, round_: int) -> None:
    work = training(regression(96), batch=2, epochs=2)
    whole, _ = run_elastic_workers(4, work, "gossip", tmp_path / "whole", checkpoint=every("1 rounds"), keep=50)
    name = f"round-{round_:08}"
    shutil.copytree(tmp_path / "whole" / "checkpoints" / name, tmp_path / "part" / "checkpoints" / name)
    resumed, _ = run_elastic_workers(4, work, "gossip", tmp_path / "again", resume=tmp_path / "part")
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_a_run_that_is_resumed_by_another_number_of_workers_has_the_work_of_all(tmp_path: Path, workers: int) -> None:
    """The model counts: the gradient of each sample's number is 1. At the checkpoint no worker has the work of all."""

    def work(_worker: int) -> Tensor:
        counts = nn.Embedding(64, 1)
        nn.init.zeros_(counts.weight)
        optimizer = torch.optim.SGD(counts.parameters(), lr=1.0)
        for x in stretto.distribute(counts, optimizer, DataLoader(torch.arange(64), batch_size=2)):
            optimizer.zero_grad()
            counts(x).sum().backward()
            optimizer.step()
        return counts.weight.detach().flatten()

    run_elastic_workers(4, work, "gossip", tmp_path / "run", checkpoint=every("1 rounds"), keep=50)
    name = "round-00000005"
    shutil.copytree(tmp_path / "run" / "checkpoints" / name, tmp_path / "part" / "checkpoints" / name)
    found, _ = run_elastic_workers(workers, work, "gossip", tmp_path / "again", resume=tmp_path / "part")
    assert all(bool((one != 0).all()) for one in found)
