"""Replicas of several ranks at a parameter server train as whole workers do, over failures of ranks and servers."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import mostly_long
from layout_runs import SCRIPT, counts, difference, run
from replica_threads import DATA, in_stages, train, with_momentum
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.api import _current
from stretto.errors import LoaderError, NotFiniteError
from stretto.events import read_events
from stretto.interval import Interval
from stretto.parallel.rank_channels import Shares
from stretto.parameter_server import messages as m
from stretto.strategies.parameter_view import is_held
from stretto.training.worker_context import find_context

STAGES = 'pipeline(2, split="blocks.1")'
IN_ROUNDS = (
    "stale_synchronous(bound=0)",
    "stale_synchronous(bound=0, shards=3)",
    "Recipe(what=updates(), when=on_arrival(every=2, bound=0), whom=server(2), then=add(equal_share()))",
    "Recipe(what=updates(), when=on_arrival(collect=2, bound=0), whom=server(2), then=outer(0.5, 0.6))",
    "Recipe(what=parameters(), when=on_arrival(every=2, collect=2, bound=0), whom=server(), then=replace())",
    "stale_synchronous(bound=0, how=both_ways(cast('bf16')))",
)
"""Recipes whose workers wait for each other at a server, so that their results are those of any other run."""


@pytest.mark.parametrize("recipe", mostly_long(IN_ROUNDS, short=(1, 3, 5)))
def test_replicas_in_stages_equal_whole_workers_at_a_server(recipe: str) -> None:
    nets, evaluations = in_stages(2, 2, recipe, STAGES)
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: train(wholes[worker]), recipe)
    tolerance = 0.02 if "bf16" in recipe else 1e-12  # what rounding leaves out comes with the next difference
    assert largest_difference(joined(nets), joined(wholes[:1])) < tolerance
    assert max(abs(one - expected[0]) for one in evaluations) < tolerance


ASYNCHRONOUS = ("async_sgd", "downpour(every=2)", "elastic_averaging(every=2)", "soft_sync")


@pytest.mark.parametrize("recipe", mostly_long(ASYNCHRONOUS, short=(0, 2)))
def test_replicas_that_do_not_wait_train_each_sample_once(recipe: str, tmp_path: Path) -> None:
    _, evaluations = in_stages(2, 3, recipe, "pipeline(3)", run=tmp_path)
    assert evaluations[0] == evaluations[1] == evaluations[2]
    epochs = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert [one["sample_counts"] for one in epochs if not one.get("rank")] == 2 * [
        {"once": 46, "twice": 0, "never": 0, "dropped": 0}
    ]


class Normed(nn.Module):
    """A network of which the first part has buffers, the second no trained parameter, and the third is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.second = nn.Sequential(nn.Tanh(), nn.Linear(8, 8).requires_grad_(False))
        self.third = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


def normed() -> nn.Module:
    """Return the same network at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Normed().double()


def fit(net: nn.Module) -> None:
    """Train the network for two epochs."""
    optimizer = with_momentum(net)
    x = torch.randn(46, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader: Any = stretto.distribute(net, optimizer, DataLoader(data, batch_size=6))
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    stretto.finish()


@pytest.mark.parametrize("recipe", IN_ROUNDS[1:2])
def test_ranks_without_buffers_or_trained_parameters_take_part(recipe: str) -> None:
    nets, _ = in_stages(2, 3, recipe, 'pipeline(3, 1, split="second,third")', fit, normed)
    wholes = [normed() for _ in range(2)]
    run_workers(2, lambda worker: fit(wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
    statistics = dict(nets[0].named_buffers())["first.1.running_mean"]
    assert torch.allclose(statistics, dict(wholes[0].named_buffers())["first.1.running_mean"], atol=1e-12)


def broken_in_stage_1(net: nn.Module) -> None:
    """Train with one gradient that is not a number, of a parameter of the second stage."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        head = net.get_parameter("head.weight")
        if number == 1 and is_held(head) and head.grad is not None:
            head.grad[0, 0] = torch.nan
        optimizer.step()
    stretto.finish()


def test_an_update_that_is_not_finite_at_one_rank_is_left_out_whole(tmp_path: Path) -> None:
    nets, _ = in_stages(2, 2, "async_sgd", STAGES, broken_in_stage_1, on_nan="skip", run=tmp_path)
    assert all(torch.isfinite(one).all() for one in joined(nets).values())
    (epoch,) = (
        one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch" and not one.get("rank")
    )
    assert 0 < epoch["sample_counts"]["never"] <= 12
    with pytest.raises(NotFiniteError, match=r"head\.weight"):
        in_stages(2, 2, "async_sgd", STAGES, broken_in_stage_1)


def test_fewer_batches_than_workers_are_refused() -> None:
    def work(net: nn.Module) -> None:
        optimizer = with_momentum(net)
        for x, y in stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=40)):
            loss_of(net(x), y).backward()
            optimizer.step()

    with pytest.raises(LoaderError, match="at least 3"):
        in_stages(3, 2, "async_sgd", STAGES, work)


def plain(net: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train for an epoch."""
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("recipe", mostly_long(("stale_synchronous(bound=0)", "local_sgd(every=2)"), short=(0,)))
def test_a_stage_with_a_sparse_embedding_exchanges_the_whole_table(recipe: str) -> None:
    def sparse() -> nn.Module:
        net = make_net().double()
        net.embed.sparse = True
        return net

    def work(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        plain(net, stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6)), optimizer)
        stretto.finish()

    nets, _ = in_stages(2, 2, recipe, STAGES, work, sparse)
    wholes = [sparse() for _ in range(2)]
    run_workers(2, lambda worker: work(wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12


@pytest.mark.parametrize("evaluate_every", [None, 1])
def test_epochs_before_the_first_call_of_the_model(tmp_path: Path, evaluate_every: int | None) -> None:
    """A peek, and an epoch of statistics; barriers for evaluations come before all workers have called the model."""

    def work(net: nn.Module) -> None:
        optimizer = with_momentum(net)
        ahead = 1 if evaluate_every else 0
        loader = DataLoader(DATA, batch_size=6, num_workers=ahead)
        batches: Any = stretto.distribute(
            net, optimizer, loader, evaluate=lambda _: {"loss": 0.0}, evaluate_every=evaluate_every
        )
        if not ahead:
            next(iter(batches))
            for x, _ in batches:
                x.sum()
        plain(net, batches, optimizer)
        stretto.finish()

    in_stages(2, 2, "async_sgd", STAGES, work, run=tmp_path)
    counted = [
        one["sample_counts"]
        for one in read_events(tmp_path / "events.jsonl")
        if one["event"] == "epoch" and not one.get("rank")
    ]
    assert counted[-1] == {"once": 46, "twice": 0, "never": 0, "dropped": 0}


@pytest.mark.parametrize("recipe", ["async_sgd", "elastic_averaging(every=2)"])
def test_a_change_of_one_stage_between_epochs_is_taken_over_by_all(recipe: str) -> None:
    def work(net: nn.Module) -> None:
        optimizer = with_momentum(net)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
        plain(net, loader, optimizer)
        head = net.get_parameter("head.weight")
        if is_held(head):
            head.data.fill_(0.5)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.state.clear()
        plain(net, loader, optimizer)
        stretto.finish()

    nets, _ = in_stages(2, 2, recipe, STAGES, work)
    assert torch.equal(joined(nets)["head.weight"], torch.full((11, 8), 0.5, dtype=torch.float64))


def test_a_worker_leaves_when_all_its_ranks_are_asked_to() -> None:
    """The signal comes to each rank at another step."""
    steps: list[tuple[int, int]] = []

    def work(net: nn.Module) -> None:
        optimizer, context = with_momentum(net), find_context()
        assert context is not None
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=2))
        trainer: Any = _current.get()
        with suppress(SystemExit):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss_of(net(x), y).backward()
                optimizer.step()
                if (context.worker, step) == (1, context.runtime.rank):
                    trainer.agent.ask_to_leave()
                steps.append((context.worker, step))

    in_stages(2, 2, "async_sgd", STAGES, work)
    assert max(step for worker, step in steps if worker) == 1
    assert sum(not worker for worker, _ in steps) == 2 * 21


class TwoClocks(Interval):
    """An interval that has passed at every other rank that asks."""

    asked = itertools.count()

    def due(self, now: float, rounds: int) -> bool:
        """Return True at each second call, of all ranks together."""
        return next(self.asked) % 2 == 1


def test_one_rank_decides_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    in_stages(2, 2, "async_sgd", STAGES, checkpoint=TwoClocks(seconds=1.0), run=tmp_path)
    assert any(event["event"] == "checkpoint" for event in read_events(tmp_path / "events.jsonl"))


def test_a_reply_that_begins_again_replaces_its_first_part() -> None:
    shares = Shares([(m.Read(False, 0, 1), []), (m.Read(False, 0, 1), [])])
    own: list[Any] = []
    take = shares.sink(lambda *piece: own.append(piece))
    for index, at, length in ((0, 0, 4), (1, 0, 2), (0, 0, 4), (1, 0, 2), (1, 2, 3)):
        take(index, at, torch.arange(at, at + length))
    assert [torch.cat(chunks).tolist() for chunks in shares.of(1, shares.streamed())] == [[0, 1, 2, 3, 4]]
    assert len(own) == 2


KILLS = [
    ("pipeline(2)", "async_sgd(shards=2)", ("1", "1", "7", "before")),
    pytest.param("sharded(2)", "async_sgd", ("0", "0", "8", "after"), marks=pytest.mark.long),
    pytest.param("pipeline(2)", "downpour(every=2)", ("0", "1", "7", "within"), marks=pytest.mark.long),
]
"""Layout; recipe; worker and rank that is killed, the step, and the phase of the step."""
ALL_KILLS = [
    (layout, recipe, (worker, rank, "7", phase))
    for layout, recipe, worker, rank, phase in itertools.product(
        ("pipeline(2)", "sharded(2)"), ("async_sgd(shards=2)", "elastic_averaging"), "01", "01", ("before", "within")
    )
]


@pytest.mark.parametrize(
    ("layout", "recipe", "victim"), [*KILLS, *(pytest.param(*one, marks=pytest.mark.long) for one in ALL_KILLS)]
)
def test_a_killed_rank_costs_no_sample_at_a_server(
    tmp_path: Path, layout: str, recipe: str, victim: tuple[str, ...]
) -> None:
    options = ("-n", "4", "--layout", layout, "--recipe", recipe, "--failure-timeout", "60s")
    folder = run(tmp_path, "run", *options, script=("6", *victim))
    events = list(read_events(folder / "events.jsonl"))
    failed = [event for event in events if event.get("what") == "failed"]
    assert [(event["worker"], event.get("rank", 0), event["why"]) for event in failed] == [
        (int(victim[0]), int(victim[1]), "killed by SIGKILL")
    ]
    assert counts(folder) == 6 * [{"once": 60, "twice": 0, "never": 0, "dropped": 0}]
    assert not any(event["event"] == "error" for event in events)


SLOW = SCRIPT.replace("    step += 1\n", "    step += 1; time.sleep(0.1)\n", 1)


@pytest.mark.long
def test_a_killed_shard_rolls_all_ranks_back(tmp_path: Path) -> None:
    """A fixed time after the start, at which the script, which sleeps, trains for sure."""
    recipe = ("--recipe", "async_sgd(shards=2)", "--faults", "kill server 1 at 20s")
    folder = run(tmp_path, "run", "-n", "4", "--layout", "pipeline(2)", *recipe, script=("40",), text=SLOW)
    events = list(read_events(folder / "events.jsonl"))
    assert [event["process"] for event in events if event.get("what") == "failed"] == ["server 1"]
    assert counts(folder) == 40 * [{"once": 60, "twice": 0, "never": 0, "dropped": 0}]


def test_a_checkpoint_at_a_server_is_continued_under_other_layouts(tmp_path: Path) -> None:
    recipe = ("--recipe", "stale_synchronous(bound=0)")
    staged = ("-n", "4", "--layout", "pipeline(2)", *recipe)
    first = run(tmp_path, "first", *staged, "--checkpoint-every", "4 rounds")
    longer = run(tmp_path, "longer", "-n", "2", *recipe, script=("3",))
    for name, options in {
        "whole": ("-n", "2", *recipe),
        "sharded": ("-n", "4", "--layout", "sharded(2)", *recipe),
    }.items():
        resumed = run(tmp_path, name, *options, "--resume", first.name, script=("3",))
        assert difference(resumed, longer) < 1e-5, name
