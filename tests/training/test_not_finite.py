"""An update with a NaN or an infinity ends the run with an error that names it, or is left out as a whole."""

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
    """Return a training: one worker's optimizer writes `value` into the first weight once; gradients stay finite."""
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
def test_the_run_ends_with_the_names_of_parameter_step_and_worker(recipe: str, value: float) -> None:
    with pytest.raises(NotFiniteError, match=r"the update of 0\.weight is NaN or infinite.*step 3, worker 1"):
        run_workers(2, spoiling(value), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_update_changes_no_worker_and_its_samples_do_not_count(recipe: str, tmp_path: Path) -> None:
    found = run_workers(2, spoiling(math.nan), recipe, run=tmp_path, on_nan="skip")
    assert all(bool(torch.isfinite(one).all()) for one in found)
    events = list(read_events(tmp_path / "events.jsonl"))
    notices = [one for one in events if one["event"] == "warning"]
    assert [one["worker"] for one in notices] == [1]
    assert "8 samples do not count" in notices[0]["text"]
    seen = [one["sample_counts"] for one in events if one["event"] == "epoch"]
    assert sum(one["never"] for one in seen) == 8
    assert sum(one["once"] for one in seen) == 4 * 160 - 8


def test_an_update_that_overflows_in_the_encoding_ends_the_run() -> None:
    with pytest.raises(NotFiniteError, match="in the encoding of the recipe"):
        run_workers(2, spoiling(1e6), 'async_sgd(how=cast("fp16"))')
