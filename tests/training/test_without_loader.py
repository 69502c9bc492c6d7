"""Scripts without a DataLoader: a function that draws batches, one full batch, a graph, a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_single_process, run_workers, sgd, small_net
from torch import Tensor, nn

import stretto
from stretto.errors import LoaderError
from stretto.events import read_events

INPUTS, LABELS = regression(60, torch.float64).tensors


def drawing(seed: int | None = None) -> Callable[..., Tensor]:
    """Return a function that draws batches by a generator of the worker: threads share the global one."""
    source = torch.Generator().manual_seed(stretto.rank() if seed is None else seed)
    return lambda *_: torch.randint(len(INPUTS), (5,), generator=source)


def trained(loader: Any, rows: Any = None, epochs: int = 1, seed: int | None = None, **options: Any) -> Any:
    """Return a training whose batches are `rows(item)` of the samples, or drawn; its result has their indices, too."""

    def work(worker: int) -> tuple[Tensor, list[tuple[int, ...]]]:
        net, seen, draw = small_net(torch.float64), [], rows or drawing(seed)
        optimizer = sgd(net.parameters())
        distributed = stretto.distribute(net, optimizer, loader() if callable(loader) else loader, **options)
        for _ in range(epochs):
            for item in distributed:
                at = draw(item)
                optimizer.zero_grad()
                nn.functional.mse_loss(net(INPUTS)[at], LABELS[at]).backward()
                optimizer.step()
                seen.append(tuple(at.tolist()))
        return flat(net), seen

    return work


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "gossip(every=1)", "async_sgd"])
def test_steps_of_a_loop_that_draws_its_batches_are_dealt_and_each_worker_draws_others(recipe: str) -> None:
    """The second worker makes a pass of weight 0 in the last step, where workers wait."""
    (_, first), (_, second) = run_workers(2, trained(range(21)), recipe)
    assert len(first) + len(second) == 21 + (recipe != "async_sgd")
    assert not set(first) & set(second)


def test_numbers_of_steps_name_other_batches_at_each_worker(tmp_path: Path) -> None:
    work = trained(range(12), lambda step: torch.arange(5 * step, 5 * step + 5))
    found = run_workers(3, work, "allreduce", run=tmp_path)
    assert sorted(at for _, seen in found for batch in seen for at in batch) == list(range(60))
    assert all(one["numbers"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "start")


@pytest.mark.parametrize("loader", [[(INPUTS, LABELS)], [torch.arange(60)]], ids=["full batch", "graph"])
def test_a_full_batch_that_is_split_equals_one_process(loader: Any) -> None:
    def rows(item: Any) -> Tensor:
        if isinstance(item, Tensor):  # nodes of a graph
            return item
        return (INPUTS[:, None] == item[0][None]).all(2).nonzero()[:, 0]

    work = trained(loader, rows, epochs=5)
    found, (one, _) = run_workers(3, work, "allreduce", split=True), run_single_process(work)
    assert all((model - one).abs().max() < 1e-12 for model, _ in found)
    assert all(len({len(seen) for _, seen in found}) == 1 and len(seen[0]) == 20 for _, seen in found)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_a_generator_that_draws_gives_each_worker_batches_of_its_own(recipe: str) -> None:
    def batches() -> Iterator[Tensor]:
        draw = drawing()
        for _ in range(7):
            yield draw()

    (_, first), (_, second) = run_workers(2, trained(batches, lambda at: at, deal="own"), recipe)
    assert (len(first), len(second)) == (7, 7) and not set(first) & set(second)


SAME_ROWS = "workers 0 and 1 had the same losses in each of their first batches"


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "diloco(every=2)", "gossip(every=1)"])
def test_workers_that_draw_the_same_batches_are_named_once(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_workers(2, trained(range(16), epochs=2, seed=7), recipe)
    assert capsys.readouterr().err.count(SAME_ROWS) == 1


@pytest.mark.parametrize(
    "work",
    [
        trained(range(16), epochs=2),
        trained(range(16), lambda step: torch.arange(5 * (step % 12), 5 * (step % 12) + 5)),
        trained([(INPUTS, LABELS)], lambda batch: torch.arange(60), epochs=4),
        trained([LABELS.sum() * 0 + step for step in range(16)], lambda batch: torch.arange(60)),
    ],
    ids=["drawn", "numbered", "full batch", "tensors"],
)
def test_workers_with_rows_of_their_own_and_full_batches_are_not_named(
    work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_workers(2, work, "allreduce")
    assert SAME_ROWS not in capsys.readouterr().err


def get_batch() -> tuple[Tensor, Tensor]:
    return INPUTS, LABELS


def draws() -> Iterator[tuple[Tensor, Tensor]]:
    yield get_batch()


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (get_batch, "for step in stretto.distribute(model, optimizer, range(1000)): x, y = get_batch()"),
        (draws, 'stretto.distribute(model, optimizer, draws(), deal="own")'),
        (300, "stretto.distribute(model, optimizer, range(300))"),
        (None, "for step in stretto.distribute(model, optimizer, range(1000)): x, y = get_batch()"),
        ((INPUTS, LABELS), "stretto.distribute(model, optimizer, [(x, y)]), with --batch split"),
        (INPUTS, "stretto.distribute(model, optimizer, [(x, y)]), with --batch split"),
    ],
    ids=["function", "generator", "number", "nothing", "columns", "tensor"],
)
def test_what_is_no_loader_is_refused_with_the_line_that_trains(loader: Any, advice: str) -> None:
    net = small_net()
    given = () if loader is None else (loader,)
    with pytest.raises(LoaderError) as caught:
        stretto.distribute(net, sgd(net.parameters()), *given)
    assert advice in str(caught.value)


def test_numbers_of_steps_are_not_split() -> None:
    with pytest.raises(LoaderError, match="can't divide a batch that the script makes"):
        run_workers(2, trained(range(4)), "allreduce", split=True)
