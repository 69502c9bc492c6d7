"""Workers that fail or leave within an epoch over a stream: the others train their batches, by the model's own count.

The model is a table that counts: a step subtracts each batch's share of the mean from its row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_workers import KillInExchange, ThreadCoordinator, WorkerKilled, run_elastic_workers
from streams import Endless, has_weight, kinds
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import LoaderError
from stretto.events import read_events
from stretto.loader.stream_reader import StreamReader
from stretto.training.elasticity import ElasticAgent

BATCHES = 41
RECIPES = ["allreduce", "local_sgd(every=4)", "diloco(every=4)", "gossip(every=2)"]
KINDS = kinds(BATCHES)


Given = dict[int, list[int]]
"""Numbers of the batches that each worker was given."""


def counting(kind: str, at: Callable[[int, int], None], given: Given | None = None) -> Callable[[int], torch.Tensor]:
    """Return a script that trains the table, calls `at(worker, step)` with each batch, and returns the counts."""

    def work(worker: int) -> torch.Tensor:
        net = nn.Embedding(2 * BATCHES, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for step, x in enumerate(stretto.distribute(net, optimizer, KINDS[kind]())):
            if given is not None and has_weight():
                given.setdefault(worker, []).append(int(x[0]) // 2)
            at(worker, step)
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            x.zero_()  # batches kept for other workers share no memory with the script's
        return -net.weight.detach().flatten()

    return work


def killed(*deaths: tuple[int, int]) -> Callable[[int, int], None]:
    def at(worker: int, step: int) -> None:
        if (worker, step) in deaths:
            raise WorkerKilled

    return at


def commits(given: Given, deaths: list[tuple[int, int]], every: int) -> list[int]:
    """Return the batches that were trained: all of a survivor, and those of a failed worker before its round."""
    kept = {worker: numbers[: dict(deaths).get(worker, BATCHES) // every * every] for worker, numbers in given.items()}
    survivors = {worker: numbers for worker, numbers in given.items() if worker not in dict(deaths)}
    return sorted(number for numbers in (kept | survivors).values() for number in numbers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("deaths", [[(0, 5), (2, 9)], [(1, 6), (2, 6)]])
def test_survivors_train_what_failed_workers_had_since_the_last_exchange_and_the_rest(
    recipe: str, deaths: list[tuple[int, int]]
) -> None:
    given: Given = {}
    found, _ = run_elastic_workers(4, counting("generator", killed(*deaths), given), recipe)
    counts = [one for one in found if one is not None]
    assert len(counts) == 4 - len(deaths)
    assert all(bool((one != 0).all()) for one in counts)
    every = {"allreduce": 1, "gossip(every=2)": 2}.get(recipe, 4)
    assert commits(given, deaths, every) == list(range(BATCHES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_batches_of_each_kind_of_stream_are_trained_by_survivors(kind: str, split: bool, recipe: str) -> None:
    found, _ = run_elastic_workers(2, counting(kind, killed((1, 6))), recipe, split=split)
    assert bool((found[0] != 0).all())
    assert found[0].max() <= 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_share_of_a_worker_that_leaves_is_trained_by_the_others(recipe: str) -> None:
    coordinator = ThreadCoordinator(3)

    def at(worker: int, step: int) -> None:
        if worker == 1 and step == 5:
            coordinator.quit(1)

    found, _ = run_elastic_workers(3, counting("generator", at), recipe, coordinator=coordinator)
    assert found[1] == "left"
    assert all(bool((found[worker] != 0).all()) for worker in (0, 2))


@pytest.mark.parametrize("op", range(1, 9))
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_survivors_deal_the_same_if_one_has_the_result_of_an_exchange_and_another_has_not(op: int, recipe: str) -> None:
    given: Given = {}
    coordinator = ThreadCoordinator(3, KillInExchange(op, 1, 0))
    found, _ = run_elastic_workers(3, counting("list", killed(), given), recipe, coordinator=coordinator)
    assert torch.equal(found[0], found[2])
    assert bool((found[0] != 0).all()) and found[0].max() <= 1
    assert not set(given[0]) & set(given[2])


def test_kept_batches_are_those_since_the_last_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    keep = StreamReader.keep_from

    def counted(self: StreamReader, position: int) -> None:
        nonlocal most
        most = max(most, len(self._kept))
        keep(self, position)

    monkeypatch.setattr(StreamReader, "keep_from", counted)
    run_elastic_workers(3, counting("generator", killed()), "local_sgd(every=4)")
    assert 0 < most <= 3 * 4


@pytest.mark.parametrize("deaths", [[(1, 6)], []])
def test_shard_that_is_lost_with_its_worker_is_named(deaths: list[tuple[int, int]], tmp_path: Path) -> None:
    def work(worker: int) -> int:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        shard = [torch.full((2, 1), float(worker))] * (12 + worker)
        for step, x in enumerate(stretto.distribute(net, optimizer, shard, deal="own")):
            killed(*deaths)(worker, step)
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
        return 0

    run_elastic_workers(3, work, "local_sgd(every=4)", tmp_path)
    lost = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "batches_lost"]
    assert len(lost) == len(deaths)
    assert all("the shard of worker 1 was lost with it: 6 samples" in event["text"] for event in lost)


def test_batch_that_was_read_and_not_kept_is_an_error_and_not_the_end_of_the_stream() -> None:
    reader = StreamReader([10, 11, 12, 13])
    assert reader.take(0) == 10
    reader.keep_from(1)
    assert [reader.take(3), reader.take(1), reader.take(2), reader.take(4)] == [13, 11, 12, None]
    reader.release(1)
    for position in (0, 1):
        with pytest.raises(LoaderError, match=f"batch {position + 1} of the stream was read before"):
            reader.take(position)


def test_kept_batches_have_no_more_bytes_than_the_limit_and_the_last_is_always_kept() -> None:
    batch = {"x": torch.zeros(10), "rows": [np.zeros(5), torch.zeros(5, dtype=torch.float64)]}
    reader = StreamReader([batch] * 9)
    reader.keep_from(1, most=400)
    reader.take(5)
    assert [reader.has(position) for position in range(7)] == [False] * 3 + [True] * 4
    reader.keep_from(4, most=400)
    reader.release(5)
    reader.take(7)
    assert [position for position in range(8) if reader.has(position)] == [4, 6, 7]
    reader.keep_from(7, most=1)
    reader.take(8)
    assert [position for position in range(9) if reader.has(position)] == [8]


@pytest.mark.parametrize("recipe", [None, "allreduce", "local_sgd(every=4)"])
@pytest.mark.parametrize("split", [False, True])
def test_batches_without_a_sample_do_not_end_a_stream(recipe: str | None, split: bool) -> None:
    empty = torch.arange(0)
    stream = [empty, empty, *(torch.tensor([one, one + 12]) for one in range(6)), empty, *torch.arange(6, 12).split(2)]
    rows: list[int] = []

    def work(worker: int) -> None:
        net = nn.Embedding(24, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for x in stretto.distribute(net, optimizer, stream):
            if has_weight():
                rows.extend(x.tolist())
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

    run_elastic_workers(1 if recipe is None else 2, work, recipe, split=split)
    assert sorted(rows) == [*range(12), *range(12, 18)]


ROWS, SPLIT = 12, 20
"""Numbers of rows of a batch and of batches in the tests of split batches."""


def rows_of(
    deaths: list[tuple[int, int]],
    patch: pytest.MonkeyPatch,
    stream: Callable[[], Any],
    leaves: int = 10**9,
    epochs: int = 1,
) -> tuple[Callable[[int], list[list[int]]], Callable[[], list[int]]]:
    """Return a script whose workers fail at (worker, step), and a function that returns the rows that were trained."""
    rows: dict[int, list[int]] = {}
    counted = dict.fromkeys(range(9), 0)
    carried = ElasticAgent.carried

    def noted(agent: ElasticAgent) -> None:
        number = agent._trainer.transport.number
        counted[number] = len(rows.get(number, []))
        carried(agent)

    patch.setattr(ElasticAgent, "carried", noted)

    def work(worker: int) -> list[list[int]]:
        net = nn.Embedding(ROWS * SPLIT, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader = stretto.distribute(net, optimizer, stream())
        step = 0
        for _ in range(epochs):
            for number, x in enumerate(loader, 1):
                if (worker, step) in deaths:
                    raise WorkerKilled
                step += 1
                if has_weight():
                    rows.setdefault(worker, []).extend(x.tolist())
                optimizer.zero_grad()
                net(x).sum().backward()
                optimizer.step()
                if number == leaves:
                    break
        return [[0]]

    def trained() -> list[int]:
        failed = {worker for worker, _ in deaths}
        return sorted(row for one, found in rows.items() for row in (found[: counted[one]] if one in failed else found))

    return work, trained


@pytest.mark.parametrize("deaths", [[(1, 6), (2, 8)], [(1, 6), (2, 9)], [(1, 7), (3, 10)]])
def test_second_failure_while_parts_of_the_first_are_outstanding_repeats_nothing(
    deaths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches are split; the second worker fails before all parts of the first one are trained again."""
    work, trained = rows_of(deaths, monkeypatch, lambda: list(torch.arange(ROWS * SPLIT).split(ROWS)))
    run_elastic_workers(4, work, "local_sgd(every=4)", split=True)
    assert trained() == list(range(ROWS * SPLIT))


def test_parts_without_a_sample_are_loaded_by_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers split batches of three indices; two share the part of the failed one."""
    work, trained = rows_of(
        [(1, 6)],
        monkeypatch,
        lambda: DataLoader(torch.arange(2 * BATCHES), batch_size=3, sampler=Endless(2 * BATCHES)),  # type: ignore[arg-type]
    )
    run_elastic_workers(3, work, "allreduce", split=True)
    assert trained() == list(range(2 * BATCHES))


@pytest.mark.parametrize("is_iterator", [True, False])
def test_iterator_that_the_loop_leaves_continues_with_what_a_failed_worker_had(
    is_iterator: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker fails in the last window before the loop is left; a line says so of a stream that is read again."""
    batches = torch.arange(ROWS * SPLIT).split(4)
    work, trained = rows_of(
        [(1, 7)], monkeypatch, lambda: iter(batches) if is_iterator else list(batches), 8, 9 if is_iterator else 1
    )
    run_elastic_workers(3, work, "local_sgd(every=4)", tmp_path)
    rows, texts = trained(), [event.get("text", "") for event in read_events(tmp_path / "events.jsonl")]
    assert rows == list(range(ROWS * SPLIT)) if is_iterator else len(rows) == 4 * (2 * 8 + 4)
    assert any("left before 4 batches of the stream, which a failed worker had" in text for text in texts)


@pytest.mark.parametrize("kind", ["list", "indices"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("deaths", [[(1, 15)], [(1, 15), (2, 15)], [(1, 15), (2, 17)], [(1, 18)]])
def test_work_at_the_end_of_a_stream_that_no_exchange_has_carried_is_trained_in_the_next_epoch(
    deaths: list[tuple[int, int]], split: bool, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An epoch has 14 steps of a worker, of which the last two are exchanged with the first two of the next one."""
    batches = torch.arange(ROWS * SPLIT).split(6)[:14] if split else torch.arange(ROWS * SPLIT).split(4)[:42]
    rows = sum(map(len, batches))

    def stream() -> Any:
        if kind == "list":
            return list(batches)
        return DataLoader(torch.arange(rows), batch_size=len(batches[0]), sampler=Endless(rows))  # type: ignore[arg-type]

    work, trained = rows_of(deaths, monkeypatch, stream, epochs=2)
    run_elastic_workers(3, work, "local_sgd(every=4)", tmp_path, split=split)
    assert trained() == sorted(2 * [*range(rows)])
    events = [*read_events(tmp_path / "events.jsonl")]
    assert not [event for event in events if event["event"] == "batches_lost"]
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [sum(event["trained"].values()) for event in epochs] == [rows, rows]
    assert [event["samples"] for event in epochs] == [rows, 2 * rows]


@pytest.mark.parametrize(
    ("deaths", "again", "split"),
    [([(1, 6)], 0, False), ([(1, 6), (2, 9)], 0, True), ([(1, 6)], 1, False), ([(1, 15)], 0, False)],
)
def test_epochs_count_what_each_worker_has_trained_of_a_stream(
    deaths: list[tuple[int, int]], again: int, split: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = torch.arange(ROWS * SPLIT).split(2)[:84]
    work, _ = rows_of(deaths, monkeypatch, lambda: list(batches), epochs=2)
    killed_before = set[int]()

    def once(worker: int) -> Any:
        if worker in killed_before:
            deaths.clear()
        killed_before.add(worker)
        return work(worker)

    recipe = "local_sgd(every=4)"
    run_elastic_workers(6 if (1, 15) in deaths else 3, once, recipe, tmp_path, again, split=split)
    epochs = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "epoch"]
    assert [sum(event["trained"].values()) for event in epochs] == [168, 168]
    assert [event["samples"] for event in epochs] == [168, 336]
    assert all(set(event["trained"]) <= set("012345") for event in epochs)
