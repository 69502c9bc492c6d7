"""The final parameters of servers match the sample counts with failures, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from simulator.failures import NET, faults
from simulator.harness import Ended, simulated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.interval import every
from stretto.recipe.parser import parse
from stretto.simulator.cluster import rpc_server
from stretto.simulator.runner import Simulator

BATCHES, SIZE = 12, 2
APART = 16
"""Distance of the elements of two batches, so that every shard holds some."""
RECIPES = [
    "async_sgd",
    "async_sgd(shards=2)",
    "async_sgd(overlap=True)",
    "downpour(every=2)",
    "stale_synchronous(bound=1)",
]


@dataclass(frozen=True)
class Asked:
    """Parameters of a drawn training."""

    recipe: str
    workers: int = 2
    epochs: int = 1
    fault: str = ""
    evaluate_every: int | None = None
    checkpoint: str | None = None
    cut_every_s: float = 10.0
    accumulated: int = 1
    speed: str = "equal"


class Counter(nn.Module):
    """Each step with a batch adds 1 to the parameter of that batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(BATCHES * APART))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.w[APART * batch]


def counting(asked: Asked) -> Callable[[int], None]:
    def work(worker: int) -> None:
        net = Counter()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        data = TensorDataset(torch.arange(BATCHES * SIZE) // SIZE)
        more: dict[str, Any] = {}
        if asked.evaluate_every:
            more = {
                "evaluate_every": asked.evaluate_every,
                "evaluate": lambda model: {"sum": float(model.w.detach().sum())},
            }
        loader: Any = DataLoader(data, batch_size=SIZE, shuffle=False)
        loader = stretto.distribute(net, optimizer, loader, **more)
        for _ in range(asked.epochs):
            for hand, (batch,) in enumerate(loader, 1):
                if hand % asked.accumulated:
                    with stretto.no_sync():
                        net(batch[:1]).sum().backward()
                    continue
                net(batch[:1]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.zero_grad()

    return work


def ended(asked: Asked) -> Ended:
    real, cut_every_s = Simulator.context, asked.cut_every_s

    def context(simulator: Simulator, worker: Any) -> Any:
        due = every(asked.checkpoint) if asked.checkpoint else None
        return replace(real(simulator, worker), checkpoint=due)

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        patch.setattr(Simulator, "context", context)
        patch.setattr(rpc_server, "SNAPSHOT_INTERVAL_S", cut_every_s)
        return simulated(
            asked.workers,
            counting(asked),
            asked.recipe,
            net=NET,
            fault=asked.fault,
            speed=asked.speed,
            folder=Path(folder),
        )


def counts_once(asked: Asked) -> None:
    """Every batch is in the parameters once per epoch, except batches without an optimizer step."""
    found = ended(asked)
    lives = asked.workers + asked.fault.count("kill worker")
    for one in found.of("epoch"):
        seen = one["sample_counts"]
        assert (seen["once"] + seen["never"], seen["twice"], seen["dropped"]) == (BATCHES * SIZE, 0, 0)
        assert seen["never"] <= SIZE * lives * (asked.accumulated - 1), "one batch alone is no step"
    assert [one["epoch"] for one in found.of("epoch")] == list(range(1, asked.epochs + 1))
    share = 1 / asked.workers if asked.recipe.startswith("stale") else 1.0
    sums = load(found.final)["w"][::APART] / share
    if asked.accumulated == 1:
        torch.testing.assert_close(sums, torch.full((BATCHES,), float(asked.epochs)))
    else:
        assert float(sums.max()) <= asked.epochs


ALONE = Asked("async_sgd", workers=5, accumulated=2, fault="kill worker 0 at 0.000000s, back after 0.031250s")
"""The restarted worker gets one batch, without an optimizer step."""
LOOKS = Asked("async_sgd(shards=2)", evaluate_every=1, fault="kill server 0 at 0.050384s, back after 0.091730s")
"""A server fails between the barrier and the evaluation: the worker's earlier state is void."""
TELLS = Asked("async_sgd", evaluate_every=3, checkpoint="3r", fault="kill worker 0 at 48ms, back after 20ms")
"""A worker that asks if a checkpoint is due must know the members."""
CALLED = Asked(
    "async_sgd(overlap=True)",
    workers=3,
    evaluate_every=2,
    checkpoint="1r",
    cut_every_s=0.03,
    fault="kill server 0 at 0.113565s, back after 0.029407s; pause worker 2 for 0.045912s at 0.074223s",
)
"""A worker within a collective has not reported the barriers that it was called to."""
LETS_IN = Asked(
    "downpour(every=3, overlap=True)",
    epochs=2,
    checkpoint="1r",
    cut_every_s=0.01,
    fault="kill worker 1 at 0.189655s, back after 0.043825s",
)
"""A worker that sends its steps for a checkpoint is still in the barrier: a joining worker waits."""
ACCUMULATED = Asked("async_sgd", accumulated=2, fault="kill server 0 at 30ms, back after 5ms")
"""Gradients accumulated before a rollback are computed again."""


@pytest.mark.parametrize("asked", [ALONE, LOOKS, TELLS, CALLED, LETS_IN, ACCUMULATED])
def test_parameters_of_servers_match_the_records(asked: Asked) -> None:
    counts_once(asked)


@pytest.mark.parametrize("evaluate_every", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_checkpoint_queries_delay_no_worker(workers: int, evaluate_every: int) -> None:
    recipe, speed = "stale_synchronous(bound=1)", "lognormal(0.5)"
    counts_once(Asked(recipe, workers, epochs=2, evaluate_every=evaluate_every, checkpoint="3r", speed=speed))


@settings(max_examples=examples(100))
@given(
    st.sampled_from(RECIPES).flatmap(lambda one: st.tuples(st.just(one), faults(parse(one).shards))),
    st.integers(1, 2),
    st.none() | st.integers(1, 3),
    st.sampled_from([None, "1r", "3r"]),
    st.sampled_from([10.0, 0.03]),
    st.integers(1, 2),
    st.sampled_from(["equal", "lognormal(0.5)"]),
)
def test_parameters_of_servers_match_the_records_under_failures(
    drawn: tuple[str, tuple[int, str]],
    epochs: int,
    evaluate_every: int | None,
    checkpoint: str | None,
    cut_every_s: float,
    accumulated: int,
    speed: str,
) -> None:
    recipe, (workers, fault) = drawn
    counts_once(Asked(recipe, workers, epochs, fault, evaluate_every, checkpoint, cut_every_s, accumulated, speed))
