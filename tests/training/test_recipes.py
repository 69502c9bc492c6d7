"""Properties that every recipe has; a new recipe is added to RECIPES and to nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import mostly_long
from simulator.harness import simulated
from thread_workers import flat, regression, relative_distance, run_one_worker, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.codecs import exact
from stretto.events import Event, read_events
from stretto.interval import every
from stretto.recipe.named import NAMED
from stretto.recipe.parser import parse

DOUBLE = torch.float64
SMALL = {"ef21": "ef21(how=top_k(0.3))", "deep_gradient_compression": "deep_gradient_compression(ratio=0.2)"}
"""Recipes with a larger share of numbers: the default, one in a hundred, sends none of a model of 60 parameters."""
RECIPES = [
    *(SMALL.get(name, name) for name in NAMED),
    "local_sgd(every=3)",
    'local_sgd(every=4, optimizer_state="average")',
    'local_sgd(every=3, optimizer_state="reset", after=4)',
    "diloco(every=3)",
    "Recipe(what=updates(), when=together(every=2), then=add(weight=constant(0.5)))",
    'allreduce(how=cast("bf16"))',
    'local_sgd(every=2, how=cast("fp16"))',
    "Recipe(whom=server())",
    'Recipe(what=parameters(optimizer_state="average"), when=together(every=3), whom=server(shards=2), then=replace())',
    "async_sgd(shards=2, overlap=True)",
    "downpour(every=3, weight=0.5)",
    "staleness_aware(collect=3)",
    "soft_sync(collect=4, shards=3)",
    "stale_synchronous(bound=0)",
    "stale_synchronous(bound=1, overlap=True)",
    "elastic_averaging(every=2, alpha=0.3, overlap=True)",
    "async_diloco(every=3, outer_lr=0.5)",
    'async_sgd(how=cast("bf16"))',
    "Recipe(what=updates(), when=on_arrival(collect=2, bound=2), whom=server(), then=add(weight=exponential(lam=0.2)))",
    "Recipe(what=parameters(), when=on_arrival(every=2, collect=2), whom=server(), then=replace())",
    "gd_sec(xi=1, beta=0.5, groups=2)",
    "ef21(how=top_k(0.2, chunk=16))",
    "allreduce(how=quantise(4, bucket=16))",
    'allreduce(how=quantise(2, bucket=16, norm="l2"))',
    "allreduce(how=ternary())",
    "allreduce(how=error_feedback(sign(bucket=16)))",
    'allreduce(how=error_feedback(sign(means="one")))',
    "allreduce(how=error_feedback(top_k(0.2)))",
    "allreduce(how=error_feedback(random_k(0.5)))",
    'allreduce(how=error_feedback(chain(random_k(0.5), cast("bf16"))))',
    "allreduce(how=error_feedback(chain(top_k(0.2), quantise(8))))",
    "allreduce(how=by_size(error_feedback(top_k(0.2)), least=30))",
    "allreduce(how=when_it_pays(quantise(8), rounds=4, again=10))",
    "diloco(every=3, how=quantise(4))",
    "local_sgd(every=4, how=error_feedback(top_k(0.5)))",
    "Recipe(how=error_feedback(top_k(0.2)), whom=server(shards=2))",
    "power_sgd(rank=1)",
    "async_sgd(shards=3, how=error_feedback(top_k(0.2)))",
    "async_sgd(how=quantise(8), overlap=True)",
    "soft_sync(how=error_feedback(threshold(0.001)))",
    "downpour(every=3, how=error_feedback(random_k(0.5)))",
    "async_sgd(shards=2, how=both_ways(error_feedback(top_k(0.2)), top_k(0.5)))",
    "async_diloco(every=3, outer_lr=0.5, how=both_ways(chunked(16, 4), quantise(8)))",
    "stale_synchronous(bound=1, overlap=True, how=both_ways(error_feedback(sign(bucket=16)), top_k(0.5)))",
]
WORDS = [set(re.findall("[a-z_]*[a-z]", one)) for one in RECIPES]
WITH_A_NEW_WORD = [number for number, words in enumerate(WORDS) if words.difference(*WORDS[:number])]
"""Numbers of the recipes with a word that no recipe before them has."""
SYNCHRONOUS = [one for one in RECIPES if not parse(one).asynchronous]
TIMED = [one for one in SYNCHRONOUS if "when_it_pays" in one]
"""Recipes whose behaviour depends on measured times."""
COUNT_WORKERS = [one for one in SYNCHRONOUS if "gd_s" in one or "censoring" in one or "one_bit" in one]
"""Recipes whose rules contain the number of workers, including workers without data."""


def optimizer_for(recipe: str, net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that fits the recipe: Adam, plain SGD if the recipe has momentum, else SGD with momentum."""
    if "one_bit" in recipe:
        return torch.optim.Adam(net.parameters(), lr=0.02)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.0 if "deep_gradient" in recipe else 0.5)


def loss_of(net: nn.Module, data: TensorDataset) -> float:
    return nn.functional.mse_loss(net(data.tensors[0]), data.tensors[1]).item()


def train(recipe: str, samples: int, epochs: int = 3, enough: float | None = None, whole: bool = False) -> Any:
    """Return a training that ends after the epochs, or after the first with a loss below `enough`.

    Its batches are divided into shares unless they are `whole`.
    """
    data = regression(samples, DOUBLE)

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = optimizer_for(recipe, net)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8, drop_last=whole))
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
            if enough is not None and loss_of(net, data) < enough:
                break
        return flat(net)

    return work


@dataclass(frozen=True)
class Run:
    """A run of four workers: the parameters of each worker at the end, and its events."""

    recipe: str
    found: list[Tensor]
    events: list[Event]


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    found = run_workers(4, train(recipe, 50), recipe, run=folder)
    return Run(recipe, found, list(read_events(folder / "events.jsonl")))


def test_after_an_epoch_all_workers_hold_the_same_bits(run: Run) -> None:
    assert all(torch.equal(one, run.found[0]) for one in run.found)


@pytest.mark.parametrize("recipe", sorted(set(SYNCHRONOUS) - set(TIMED)), scope="module")
def test_the_same_run_gives_the_same_bits(run: Run) -> None:
    assert torch.equal(run_workers(4, train(run.recipe, 50), run.recipe)[0], run.found[0])


@pytest.mark.parametrize("recipe", sorted(set(SYNCHRONOUS) - set(TIMED) - set(COUNT_WORKERS)))
def test_a_worker_without_data_has_weight_0(recipe: str) -> None:
    """Two batches for two workers, or for three workers of which one is idle."""
    close = 1e-2 if "cast" in recipe else 1e-12
    work = train(recipe, 16, whole=True)
    assert relative_distance(run_workers(3, work, recipe)[2], run_workers(2, work, recipe)[0]) <= close


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, short=WITH_A_NEW_WORD))
def test_training_reduces_the_loss(recipe: str) -> None:
    """The workers are simulated, which is faster and does not affect the result. They end once they have learned."""
    data, net = regression(160, DOUBLE), small_net(DOUBLE)
    enough = 0.8 * loss_of(net, data)
    epochs = 35 if any(word in recipe for word in ("soft", "weight", "elastic", "collect")) else 15
    for one in simulated(2, train(recipe, 160, epochs, enough), recipe).found:
        nn.utils.vector_to_parameters(one, net.parameters())
        assert loss_of(net, data) < enough


def test_each_sample_counts_once_and_the_time_is_accounted_for(run: Run) -> None:
    counts = [one["sample_counts"] for one in run.events if one["event"] == "epoch"]
    assert counts == [{"once": 50, "twice": 0, "never": 0, "dropped": 0}] * 3
    for end in (one for one in run.events if one["event"] == "end"):
        assert sum(end["time_breakdown"].values()) == pytest.approx(end["t"], rel=0.02)


def test_a_printed_recipe_is_parsed_back(recipe: str) -> None:
    assert parse(str(parse(recipe))) == parse(parse(recipe).spelled()) == parse(recipe)


# --- checkpoints ------------------------------------------------------------------------------------------------------

OFTEN: dict[str, Any] = {"checkpoint": every("1 rounds")}
NEXT = [*zip(RECIPES, [*RECIPES[1:], RECIPES[0]], strict=True)]
"""Pairs of recipes, each recipe once as the first and once as the second."""


def check_continued(folder: Path, before: tuple[int, str], after: tuple[int, str]) -> Tensor:
    """Train an epoch with a number of workers and a recipe, continue with others for a second one, and return the
    parameters. They are finite and the same at all workers, and each sample counts once.
    """
    for name, (workers, recipe), resume in (("before", before, None), ("after", after, folder / "before")):
        (folder / name).mkdir()
        work = train(before[1] + after[1], 50, 1 if resume is None else 2)
        found = run_workers(workers, work, recipe, run=folder / name, resume=resume, **OFTEN)
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.isfinite(found[0]).all()
    epochs = [one for one in read_events(folder / "after" / "events.jsonl") if one["event"] == "epoch"]
    assert epochs[-1]["epoch"] == 2
    assert all(one["sample_counts"] == {"once": 50, "twice": 0, "never": 0, "dropped": 0} for one in epochs)
    return found[0]


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, short=WITH_A_NEW_WORD))
def test_one_worker_continues_to_the_bits_of_a_run_without_checkpoints(recipe: str, tmp_path: Path) -> None:
    """A server that sends lossy answers draws other numbers after a resume."""
    found = check_continued(tmp_path, (1, recipe), (1, recipe))
    lossy = parse(recipe).asynchronous and parse(recipe).how != exact()
    assert relative_distance(found, run_one_worker(train(recipe, 50, 2), recipe)) <= (0.05 if lossy else 0)


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, short=WITH_A_NEW_WORD[::2]))
def test_three_workers_continue_the_run_of_one(recipe: str, tmp_path: Path) -> None:
    check_continued(tmp_path, (1, recipe), (3, recipe))


@pytest.mark.parametrize("recipe", mostly_long(RECIPES, short=WITH_A_NEW_WORD[1::2]))
def test_one_worker_continues_the_run_of_three(recipe: str, tmp_path: Path) -> None:
    check_continued(tmp_path, (3, recipe), (1, recipe))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("recipes", mostly_long(NEXT, short=WITH_A_NEW_WORD[::3]), ids=" to ".join)
def test_another_recipe_continues(recipes: tuple[str, str], workers: int, tmp_path: Path) -> None:
    before, after = recipes
    check_continued(tmp_path, (2, before), (workers, after))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            (2, "deep_gradient_compression(ratio=0.2)"),
            (1, "deep_gradient_compression(ratio=0.2)"),
            "one worker exchanges nothing",
        ),
        (
            (2, "allreduce(how=error_feedback(top_k(0.2)))"),
            (2, "local_sgd(every=2)"),
            "this run exchanges in another way",
        ),
        (
            (3, "allreduce(how=error_feedback(top_k(0.2)))"),
            (2, "allreduce(how=error_feedback(sign(bucket=16)))"),
            "",
        ),
        ((2, "allreduce"), (1, "deep_gradient_compression(ratio=0.2)"), ""),
    ],
)
def test_it_is_said_why_residuals_are_left_out(
    before: tuple[int, str], after: tuple[int, str], reason: str, tmp_path: Path
) -> None:
    check_continued(tmp_path, before, after)
    warnings = [one["text"] for one in read_events(tmp_path / "after" / "events.jsonl") if one["event"] == "warning"]
    found = [text.rpartition(": ")[2] for text in warnings if "residuals of the checkpoint" in text]
    assert set(found) == {reason} - {""}
