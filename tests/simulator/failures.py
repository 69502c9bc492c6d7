"""Training with fault injection in the simulator, and the checks of its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from counted_models import assert_none_is_lost
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from simulator.harness import Ended, simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.recipe.parser import parse

NET = "100Mbit/s 1ms"
LATENCY = 0.001
SAMPLES = 41
"""Number of samples; the last global step of an epoch is incomplete."""
TOGETHER = ["allreduce", "local_sgd(every=3)", "diloco(every=4)", "power_sgd(rank=1)"]
THROUGH = "Recipe(what=gradients(), when=together(every=1), whom=server(shards=2), then=step())"
ALSO_THROUGH = [
    "Recipe(what=gradients(), how=low_rank(rank=1), whom=server(shards=2))",
    "Recipe(what=parameters(), when=together(every=3), whom=server(shards=2), then=replace())",
]
"""Recipes over a server; the first has several concurrent requests."""
FREE = ["async_sgd", "async_sgd(shards=2)", "soft_sync(collect=2)", "stale_synchronous(bound=1)"]
ALL = {"once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}


def _stays(worker: int, steps: int) -> bool:
    return False


def training(
    epochs: int = 2,
    samples: int = SAMPLES,
    leaves: Callable[[int, int], bool] = _stays,
    peeks: bool = False,
    **more: Any,
) -> Callable[[int], Any]:
    """Return a training function whose model counts; a worker leaves an epoch where `leaves(worker, steps)` is true.

    If it `peeks`, it takes a batch before each epoch. `is_whole` reads the counts: the gradient of a number is 1 where
    its sample is trained in its epoch.
    """

    def work(worker: int) -> Any:
        net = nn.ModuleDict({"net": small_net(), "count": nn.Embedding(samples, epochs)})
        nn.init.zeros_(net["count"].weight)
        groups = [{"params": net["net"].parameters()}, {"params": net["count"].parameters(), "lr": 1.0}]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        data = TensorDataset(*regression(samples).tensors, torch.arange(samples))
        loader: Any = DataLoader(data, batch_size=4, shuffle=True)
        loader = stretto.distribute(net, optimizer, loader, **more)
        for epoch in range(epochs):
            assert not peeks or len(next(iter(loader))) == 3
            for steps, (x, y, numbers) in enumerate(loader):
                if leaves(worker, steps):
                    break
                optimizer.zero_grad()
                (nn.functional.mse_loss(net["net"](x), y) + net["count"](numbers)[:, epoch].sum()).backward()
                optimizer.step()
        return flat(net)

    return work


def lived(recipe: str, fault: str, workers: int = 3, epochs: int = 2, samples: int = SAMPLES, **more: Any) -> Ended:
    return simulated(workers, training(epochs, samples), recipe, net=NET, fault=fault, **more)


def seen(ended: Ended) -> list[dict[str, int]]:
    """Return the sample counts of each epoch, without the number of recovered samples."""
    return [
        {name: value for name, value in one["sample_counts"].items() if name != "recovered_samples"}
        for one in ended.of("epoch")
    ]


def is_whole(ended: Ended, recipe: str, epochs: int = 2) -> None:
    """Assert that each sample counted once per epoch, by the record and by the model; and that synchronous workers
    have equal parameters."""
    assert seen(ended)[-1] == ALL
    assert all(one == ALL for one in seen(ended))
    assert len(seen(ended)) >= epochs
    found = [one for one in ended.found if one is not None]
    assert found
    assert parse(recipe).asynchronous or all(torch.equal(one, found[0]) for one in found)
    assert parse(recipe).asynchronous or told_of_samples(ended) == SAMPLES * epochs
    _is_trained(ended, recipe, epochs)


def _is_trained(ended: Ended, recipe: str, epochs: int) -> None:
    """Assert that the final model has counted each sample in each epoch; where it has a unit, exactly once.

    Recovered samples count in the next epoch. Low ranks leave rows for later, and are not judged.
    """
    counts = -safetensors.torch.load(ended.final)["count.weight"]
    if "rank=" not in recipe:
        assert_none_is_lost(counts, ended.of("epoch"))
    if recipe.startswith("async_sgd"):
        assert counts.sum(1).tolist() == [epochs] * SAMPLES


def told_of_samples(ended: Ended) -> int:
    """Return the sample count at the end of the last epoch; redone samples count once."""
    return int(ended.of("epoch")[-1]["samples"])


def faults(servers: int = 0) -> SearchStrategy[tuple[int, str]]:
    """Return a strategy of (number of workers, faults); at least one worker is never killed for good."""
    return st.integers(2, 5).flatmap(lambda workers: st.tuples(st.just(workers), _faults(workers, servers)))


def _faults(workers: int, servers: int) -> SearchStrategy[str]:
    at, for_s = st.floats(0, 0.3), st.floats(0.001, 0.1)
    pausing = [*(f"worker {one}" for one in range(workers)), *(f"server {one}" for one in range(servers))]
    coming_back = [*pausing, *["coordinator"] * bool(servers)]
    kills = st.builds("kill {} at {:.6f}s, back after {:.6f}s".format, st.sampled_from(coming_back), at, for_s)
    kills_for_good = st.builds("kill worker {} at {:.6f}s".format, st.integers(0, workers - 2), at)
    pauses = st.builds("pause {} for {:.6f}s at {:.6f}s".format, st.sampled_from(pausing), for_s, at)
    return st.lists(st.one_of(kills, pauses, kills_for_good), min_size=1, max_size=4).map("; ".join)


def told(ended: Ended, what: str) -> list[tuple[int | str, int]]:
    """Return (worker or other process, incarnation) of the membership events of one kind."""
    events = (event for event in ended.of("membership") if event["what"] == what)
    return [(event.get("worker", event["process"]), event["incarnation"]) for event in events]
