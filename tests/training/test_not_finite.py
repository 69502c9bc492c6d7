"""A NaN or an infinity in what a worker is about to send: it ends the run by name, or is left out whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import NotFiniteError
from stretto.events import read_events

RECIPES = [
    "async_sgd",
    "async_sgd(overlap=True, shards=2)",
    "soft_sync(collect=2)",
    "stale_synchronous(bound=1)",
    "delay_compensated",
    "async_diloco(every=1)",
    "elastic_averaging(every=1, shards=2)",
    "Recipe(what=parameters(), when=on_arrival(), whom=server(), then=replace())",
]


def spoiling(value: float, at_worker: int = 1, at_step: int = 3) -> Callable[[int], Tensor]:
    """A training in which one worker's optimizer writes a value into the first weight, once; its gradients are fine."""
    data = regression(160)

    def work(worker: int) -> Tensor:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
        steps = 0

        def spoil(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if (worker, steps) == (at_worker, at_step):
                with torch.no_grad():
                    next(iter(net.parameters()))[0, 0] = value

        optimizer.register_step_post_hook(spoil)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    return work


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_run_ends_and_names_parameter_step_and_worker(recipe: str, value: float) -> None:
    with pytest.raises(NotFiniteError, match=r"the update of 0\.weight is NaN or infinite.*step 3, worker 1"):
        run_workers(2, spoiling(value), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_left_out_it_harms_nobody_and_its_samples_do_not_count(recipe: str, tmp_path: Path) -> None:
    found = run_workers(2, spoiling(math.nan), recipe, run=tmp_path, on_nan="skip")
    assert all(bool(torch.isfinite(one).all()) for one in found)
    events = list(read_events(tmp_path / "events.jsonl"))
    notices = [one for one in events if one["event"] == "warning"]
    assert [one["worker"] for one in notices] == [1]
    assert "8 samples do not count" in notices[0]["text"]
    seen = [one["sample_counts"] for one in events if one["event"] == "epoch"]
    assert sum(one["never"] for one in seen) == 8
    assert sum(one["once"] for one in seen) == 4 * 160 - 8


def test_too_large_for_the_encoding_is_infinite() -> None:
    with pytest.raises(NotFiniteError, match="in the encoding of the recipe"):
        run_workers(2, spoiling(1e6), 'async_sgd(how=cast("fp16"))')
