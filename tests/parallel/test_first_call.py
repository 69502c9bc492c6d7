"""A model in stages may be called first by some workers only: the others take part in its division."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value
from layout_runs import SCRIPT, run
from replica_threads import DATA, in_stages, with_momentum
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net, words
from thread_workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stretto
from stretto.events import read_events

RECIPES = ("allreduce", "local_sgd(every=2)", "gossip", "stale_synchronous(bound=0)")
STAGES = 'pipeline(2, split="blocks.1")'


def evaluate(model: Any) -> dict[str, float]:
    """Return the loss of a batch."""
    with torch.no_grad():
        return {"loss": float(loss_of(model(words(9, 5)[0]), words(9, 5)[1]))}


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    """Train for two epochs."""
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
    stretto.finish()


def evaluated_first(net: nn.Module) -> None:
    """Go through the data without the model, which is called first at the end of that epoch, by `evaluate=`."""
    optimizer = with_momentum(net)
    batches: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6), evaluate=evaluate)
    for x, _ in batches:
        x.sum()
    trained(net, optimizer, batches)


def called_by_worker_0(net: nn.Module) -> None:
    """Evaluate at worker 0 before the loop, in the script."""
    optimizer = with_momentum(net)
    batches: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    if stretto.rank() == 0:
        evaluate(net)
    trained(net, optimizer, batches)


def called_between_epochs(net: nn.Module) -> None:
    """Go through the data without the model, then evaluate at worker 0 in the script."""
    optimizer = with_momentum(net)
    batches: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
    for x, _ in batches:
        x.sum()
    if stretto.rank() == 0:
        evaluate(net)
    trained(net, optimizer, batches)


class Stream(IterableDataset[Any]):
    """The first samples as a stream: of one batch."""

    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[number] for number in range(4)])


def with_one_batch(net: nn.Module) -> None:
    """Train on a stream of one batch, which one worker has."""
    optimizer = with_momentum(net)
    batches: Any = stretto.distribute(net, optimizer, DataLoader(Stream(), batch_size=6), evaluate=evaluate)
    trained(net, optimizer, batches)


CASES: dict[str, Callable[[nn.Module], None]] = {
    "evaluate": evaluated_first,
    "worker 0": called_by_worker_0,
    "between epochs": called_between_epochs,
    "one batch": with_one_batch,
}


@pytest.mark.parametrize(("case", "recipe"), each_value([*CASES], RECIPES))
def test_workers_that_do_not_call_the_model_take_part_in_its_division(case: str, recipe: str) -> None:
    nets, _ = in_stages(2, 2, recipe, STAGES, CASES[case])
    wholes = [make_net().double() for _ in range(2)]
    run_workers(2, lambda worker: CASES[case](wholes[worker]), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12


def test_an_evaluation_within_an_epoch_calls_the_model_first() -> None:
    """Batches that are loaded ahead let the evaluation come before the first of them is trained."""

    def work(net: nn.Module) -> None:
        optimizer = with_momentum(net)
        loader = DataLoader(DATA, batch_size=6, num_workers=1)
        batches: Any = stretto.distribute(net, optimizer, loader, evaluate=evaluate, evaluate_every=1)
        trained(net, optimizer, batches)

    nets, _ = in_stages(2, 2, "async_sgd", STAGES, work)
    assert largest_difference(joined(nets), joined([make_net().double()])) > 1e-3


ALONE = SCRIPT.replace("step = 0\n", "if stretto.rank() == 0:\n    evaluate(net)\nstep = 0\n", 1)
STREAM = """
import torch, stretto
from staged_net import loss_of, make_net, words
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(list(zip(*words(0, 3))))
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(Stream(), batch_size=5)):
    optimizer.zero_grad()
    loss_of(net(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "async_sgd"])
def test_processes_may_call_the_model_first_at_worker_0_or_on_a_stream_of_one_batch(
    tmp_path: Path, recipe: str
) -> None:
    options = ("-n", "4", "--layout", "pipeline(2)", "--recipe", recipe)
    for name, text in {"alone": ALONE, "stream": STREAM}.items():
        folder = run(tmp_path, name, *options, text=text)
        assert not [one for one in read_events(folder / "events.jsonl") if one.get("what") == "failed"]
