"""An optimizer whose `step` calls that of its base class steps once: each step is counted and exchanged once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_workers import run_workers
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.strategies.step_hooks import StepHooks
from stretto.training.effective_batch import ScaledRate


class Derived(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture(autouse=True)
def base_class_is_in_use() -> None:
    """Torch wraps the step of a class when the first optimizer of it is created."""
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("kind", [SGD, Derived])
def test_hooks_are_called_once_a_step_even_after_a_step_that_failed(kind: type[SGD]) -> None:
    calls: list[str] = []
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = kind([parameter], lr=0.1)
    hooks = StepHooks(optimizer, lambda *_: calls.append("before"), lambda *_: calls.append("after"))

    def fail() -> float:
        raise ArithmeticError

    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    optimizer.step()
    assert calls == ["before", "after", "before", "before", "after"]
    hooks.remove()
    optimizer.step()
    assert len(calls) == 5


def test_a_scaled_rate_is_scaled_once_and_restored() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Derived([parameter], lr=0.5)
    rate = ScaledRate(optimizer, 2.0)
    parameter.grad = torch.ones(3)
    for steps in (1, 2):
        optimizer.step()
        assert parameter.tolist() == [-1.0 * steps] * 3
        assert optimizer.param_groups[0]["lr"] == 0.5
    rate.release()


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "allreduce"])
def test_a_derived_optimizer_trains_as_its_base_class(recipe: str) -> None:
    def train(kind: type[SGD]) -> list[list[float]]:
        def work(_worker: int) -> list[float]:
            model = nn.Linear(4, 1, bias=False)
            with torch.no_grad():
                model.weight.fill_(0.5)
            optimizer = kind(model.parameters(), lr=0.05)
            x = torch.arange(64.0).reshape(16, 4) / 64
            data = TensorDataset(x, x.sum(1, keepdim=True))
            loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=2))
            for _ in range(3):
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    ((model(inputs) - targets) ** 2).mean().backward()
                    optimizer.step()
            return model.weight.detach().flatten().tolist()

        return run_workers(2, work, recipe)

    assert train(Derived) == train(SGD)
