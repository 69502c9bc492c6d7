"""Models that the script changes past the optimizer: updates by hand, and layers that each worker draws again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from thread_workers import flat, regression, run_one_worker, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError, ReplicasDifferError, ScriptError

RECIPES = ["allreduce", "local_sgd(every=4)", "gossip()", "async_sgd"]


def by_hand(
    samples: int = 48, batch: int = 4, in_place: bool = False, distribute: bool = True
) -> Callable[[int], Tensor]:
    """Return a training that updates the parameters itself, beside an optimizer that never steps."""

    def work(_worker: int) -> Tensor:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = DataLoader(regression(samples), batch_size=batch)
        for x, y in stretto.distribute(net, optimizer, loader) if distribute else loader:
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            for one in net.parameters():
                assert one.grad is not None
                if in_place:
                    with torch.no_grad():
                        one.sub_(0.05 * one.grad)
                else:
                    one.data += -0.05 * one.grad
        return flat(net)

    return work


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_by_hand_beside_an_optimizer_that_never_steps_is_named(recipe: str, in_place: bool) -> None:
    with pytest.raises(ScriptError, match=r"the optimizer was never stepped, and the script has changed 0\.weight"):
        run_workers(2, by_hand(in_place=in_place), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_so_is_that_of_a_script_with_one_batch_for_all_workers(recipe: str) -> None:
    with pytest.raises(ScriptError, match="the optimizer was never stepped"):
        run_workers(3, by_hand(37, 37), recipe)


def test_a_single_worker_may_update_by_hand() -> None:
    assert torch.equal(run_one_worker(by_hand(), "allreduce"), by_hand(distribute=False)(0))


def redrawn(seeded: bool) -> Callable[[int], int]:
    """Return a training that draws a layer again before the second epoch; its result is the last epoch."""
    random_numbers = threading.Lock()  # the workers, threads here, have one generator

    def work(_worker: int) -> int:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader, reached = stretto.distribute(net, optimizer, DataLoader(regression(48), batch_size=4)), 0
        for epoch in range(3):
            if epoch == 1:
                with random_numbers:
                    if seeded:
                        torch.manual_seed(5)
                    net.get_submodule("2").reset_parameters()  # type: ignore[operator]
            for x, y in loader:
                assert epoch == 0 or seeded, "a batch was trained by models that differ"
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                reached = epoch
        return reached

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "power_sgd(rank=1)", "local_sgd(every=4)"])
def test_a_layer_that_each_worker_draws_again_is_named_before_the_next_batch(recipe: str) -> None:
    with pytest.raises(ReplicasDifferError, match=r"2\.weight of worker 1 differs(.*\n)*.*torch\.manual_seed"):
        run_workers(2, redrawn(seeded=False), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "power_sgd(rank=1)"])
def test_a_layer_that_all_workers_draw_alike_is_trained(recipe: str) -> None:
    assert run_workers(2, redrawn(seeded=True), recipe) == [2, 2]


def changed_within(
    change: Callable[[nn.Linear], object], at: int = 5, before_step: bool = False
) -> Callable[[int], int]:
    """Return a training that changes a layer of 8 x 6 values in a step of an epoch; its result is the batches trained.

    0 changes the layer in each step.
    """

    def work(_worker: int) -> int:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), small_net(features=8))
        layer, trained = net[0], 0
        with torch.no_grad():
            layer.weight.copy_(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
            layer.bias.zero_()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(96), batch_size=4))
        for _epoch in range(2):
            for x, y in loader:
                trained += 1
                if before_step and at in (0, trained):
                    change(layer)
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if not before_step and at in (0, trained):
                    change(layer)
        return trained

    return work


def reset_alike(layer: nn.Linear) -> None:
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))


DRAWS: dict[str, tuple[Callable[[nn.Linear], object], bool]] = {
    "in place": (nn.Linear.reset_parameters, False),
    "as data before a step": (lambda layer: layer.weight.data.normal_(), True),
    "with other memory": (lambda layer: setattr(layer.weight, "data", torch.randn(8, 6)), False),
}
CHANGES: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "clamped": (lambda layer: layer.weight.data.clamp_(-0.5, 0.5), "async_sgd"),
    "disturbed": (lambda layer: layer.weight.data.add_(torch.randn(8, 6), alpha=0.1), "local_sgd(every=4)"),
    "masked": (lambda layer: layer.weight.data.mul_(layer.weight.abs() > 0.3), "gossip()"),
    "reduced to signs": (lambda layer: layer.weight.data.sign_(), "async_sgd"),
    "cleared": (lambda layer: layer.weight.data.zero_(), "local_sgd(every=4)"),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("recipe", [*RECIPES, "diloco(every=4)"])
def test_a_layer_that_each_worker_draws_again_within_an_epoch_is_named(recipe: str, draw: str) -> None:
    change, before_step = DRAWS[draw]
    with pytest.raises((ModelError, ReplicasDifferError), match=r"drawn again.*0\.weight(.*\n)*.*torch\.manual_seed"):
        run_workers(2, changed_within(change, before_step=before_step), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_so_is_one_that_is_drawn_again_after_the_last_step_of_an_epoch(recipe: str) -> None:
    with pytest.raises((ModelError, ReplicasDifferError), match=r"torch\.manual_seed"):
        run_workers(2, changed_within(nn.Linear.reset_parameters, at=12), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)", "gossip()"])
def test_a_layer_that_all_workers_draw_alike_within_an_epoch_is_trained(recipe: str) -> None:
    assert run_workers(2, changed_within(reset_alike), recipe) == [24, 24]


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_each_worker_changes_in_each_step_are_not_taken_for_drawn_ones(change: str) -> None:
    act, recipe = CHANGES[change]
    assert sum(run_workers(2, changed_within(act, at=0, before_step=True), recipe)) == 48
