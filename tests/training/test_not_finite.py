"""An update with a NaN or an infinity ends the run with an error that names it, or is left out as a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint.background_writer import BackgroundWriter
from stretto.errors import NotFiniteError
from stretto.events import read_events
from stretto.interval import every
from stretto.training.not_finite import GradientCheck
from stretto.transport import device_memory

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
    told = [one["samples"] for one in events if one["event"] == "epoch"]
    assert told == list(itertools.accumulate(one["once"] for one in seen))


def test_an_update_that_overflows_in_the_encoding_ends_the_run() -> None:
    with pytest.raises(NotFiniteError, match="in the encoding of the recipe"):
        run_workers(2, spoiling(1e6), 'async_sgd(how=cast("fp16"))')


class Stream:
    """The stream of a device, and an event in it."""

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        return None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the check of a gradient read its result after the next step, as on a GPU."""
    module = SimpleNamespace(current_stream=lambda _: Stream())
    monkeypatch.setattr(device_memory, "streams_of", lambda _: module)
    monkeypatch.setattr(device_memory.Writers, "join", lambda _: None)


@pytest.mark.usefixtures("late")
def test_no_checkpoint_is_written_after_a_gradient_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []

    def note(_: BackgroundWriter, state: Any, number: int) -> None:
        written.append(all(bool(torch.isfinite(one).all()) for one in state.tensors.values()))

    monkeypatch.setattr(BackgroundWriter, "submit", note)

    def work(_worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step, (x, y) in enumerate(stretto.distribute(net, optimizer, DataLoader(regression(160), batch_size=8))):
            optimizer.zero_grad()
            (nn.functional.mse_loss(net(x), y) * (math.nan if step == 3 else 1.0)).backward()
            optimizer.step()

    with pytest.raises(NotFiniteError, match="at step 4"):
        run_workers(2, work, "allreduce", tmp_path, checkpoint=every("1 rounds"))
    assert written == [True] * 3


class Sharded(Tensor):
    """A gradient that another library owns, of which a plain tensor takes no copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not Tensor.copy_ or not isinstance(args[1], Sharded), "a plain tensor takes no copy of a shard"
        return super().__torch_function__(func, types, args, kwargs or {})

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.usefixtures("late")
def test_the_gradient_of_a_sharded_parameter_is_checked_on_a_device() -> None:
    net = small_net()
    last = [*net.parameters()][-1]
    last.grad = torch.full_like(last, math.nan).detach().as_subclass(Sharded)
    check = GradientCheck(net)
    assert check.after_step(torch.optim.SGD(net.parameters()), 1) is None
    found = check.settle()
    assert found is not None
    assert found[1] == 1
