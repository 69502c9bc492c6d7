"""Teachers: parameters that no optimizer holds and that follow trained ones, such as those of a mean teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_workers import run_workers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

RECIPES = ["allreduce", "local_sgd(every=3)", "diloco(every=2)", "gossip", "async_sgd", "elastic_averaging(every=2)"]


class Pair(nn.Module):
    """A student, and a teacher that starts with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.teacher = copy.deepcopy(self.student)
        self.base = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of both."""
        return self.student(x), self.teacher(x)


@torch.no_grad()
def move(pair: Pair, step: int) -> None:
    """Move the teacher towards the student."""
    for one, other in zip(pair.teacher.parameters(), pair.student.parameters(), strict=True):
        one.lerp_(other, 0.1)


@torch.no_grad()
def copy_at_times(pair: Pair, step: int) -> None:
    """Copy the student to the teacher every fifth step."""
    if step % 5 == 4:
        pair.teacher.load_state_dict(pair.student.state_dict())


def training(follow: Callable[[Pair, int], None], frozen: bool) -> Callable[[int], list[Any]]:
    def work(worker: int) -> list[Any]:
        torch.manual_seed(1)
        pair = Pair()
        pair.teacher.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(pair.student.parameters(), lr=0.05, momentum=0.9)
        x = torch.linspace(-1, 1, 176).view(44, 4).roll(3, 1)  # a worker has no batch in the last step of an epoch
        loader: Any = DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=4)
        loader = stretto.distribute(pair, optimizer, loader)
        found, step, base = [], 0, pair.base.weight.clone()
        for _ in range(3):
            for inputs, targets in loader:
                output, taught = pair(inputs)
                loss = nn.functional.mse_loss(output, targets) + nn.functional.mse_loss(output, taught.detach())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(pair, step)
                step += 1
            found.append({name: one.clone() for name, one in pair.state_dict().items() if "track" not in name})
        assert torch.equal(pair.base.weight, base)
        return found

    return work


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("follow", "frozen"), [(move, True), (copy_at_times, False)])
def test_a_teacher_is_the_same_at_all_workers_after_each_epoch(
    recipe: str, follow: Callable[[Pair, int], None], frozen: bool
) -> None:
    found = run_workers(2, training(follow, frozen), recipe)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one if "teacher" in name and "running" not in name)
        assert all(torch.equal(one[name], other[name]) for name in one if "student" in name and "running" not in name)
    first, last = found[0][0], found[0][-1]
    assert not torch.equal(first["teacher.0.weight"], last["teacher.0.weight"])
