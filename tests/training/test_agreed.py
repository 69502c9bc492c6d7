"""`stretto.agreed`: the agreed model in place between two steps of a loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from thread_workers import flat, regression, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto

DOUBLE = torch.float64


def train(at: int, calls: bool = True, dies: bool = False) -> Any:
    """Return a training that looks at the agreed model once, after step `at`: the parameters before, then, and last."""

    def work(worker: int) -> tuple[Tensor, Tensor, Tensor]:
        net, own, shown = small_net(DOUBLE), torch.zeros(()), torch.zeros(())
        optimizer, steps = sgd(net.parameters()), 0
        loader = stretto.distribute(net, optimizer, DataLoader(regression(96, DOUBLE), batch_size=4))
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                steps += 1
                if steps == at and calls:
                    own = flat(net).clone()
                    if dies and worker == 2:
                        raise WorkerKilled
                    with stretto.agreed():
                        shown = flat(net).clone()
                    assert torch.equal(flat(net), own)
        with stretto.agreed():
            return own, shown, flat(net).clone()

    return work


@pytest.mark.parametrize("recipe", ["local_sgd(every=4)", "diloco(every=4)", "gossip", "allreduce"])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_the_mean_is_in_place_and_training_is_as_without_it(recipe: str, at: int) -> None:
    found, without = run_workers(3, train(at), recipe), run_workers(3, train(at, calls=False), recipe)
    mean = torch.stack([own for own, _, _ in found]).mean(0)
    assert all(torch.allclose(shown, mean, rtol=0, atol=1e-12) for _, shown, _ in found)
    assert all(torch.equal(shown, found[0][1]) for _, shown, _ in found)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(found, without, strict=True))


def test_workers_that_do_not_wait_see_the_newest_model() -> None:
    found = run_workers(2, train(5), "async_sgd")
    assert all(torch.isfinite(shown).all() and shown.numel() for _, shown, _ in found)


@pytest.mark.parametrize("recipe", ["local_sgd(every=4)", "allreduce"])
def test_a_worker_that_fails_before_it_leaves_the_mean_of_the_others(recipe: str, tmp_path: Path) -> None:
    found, _ = run_elastic_workers(3, train(6, dies=True), recipe, tmp_path)
    left = [one for one in found if one is not None]
    mean = torch.stack([own for own, _, _ in left]).mean(0)
    assert len(left) == 2
    assert all(torch.allclose(shown, mean, rtol=0, atol=1e-12) for _, shown, _ in left)
    assert torch.equal(left[0][2], left[1][2])


def test_alone_nothing_changes() -> None:
    own, shown, _ = run_workers(1, train(3), "local_sgd(every=4)")[0]
    assert torch.equal(own, shown)
    with stretto.agreed() as nothing, nullcontext():
        assert nothing is None
