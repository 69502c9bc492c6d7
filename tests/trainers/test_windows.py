"""Windows of micro-batches: the seam between a loop that another library owns and the distributed batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_workers import regression, run_single_process, run_workers, small_net
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import stretto
from stretto.errors import ScriptError
from stretto.events import read_events
from stretto.trainers.windows import Empty, WindowedLoader, items_in

Made = tuple[list[list[int]], int, torch.Tensor]


class Numbered(TensorDataset):
    """A regression whose batches have the numbers of their samples."""

    def __init__(self, samples: int) -> None:
        super().__init__(*regression(samples).tensors, torch.arange(samples))


def library(
    loader: Callable[[], DataLoader[Any]], accumulation: int, epochs: int = 1, begins_at: int = 0
) -> Callable[[int], Made]:
    """Return a library's loop, by count: it returns the samples of each micro-batch, the length, and the model."""

    def work(worker: int) -> Made:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        batches = WindowedLoader(net, optimizer, loader(), accumulation)
        length, found = len(batches), list[list[int]]()
        for epoch in range(epochs):
            first = begins_at if not epoch else 0
            if first:
                batches.begin_at(first, leave_out=True)
            given = iter(batches)
            for start in range(first, length, accumulation):
                window = [next(given) for _ in range(min(accumulation, length - start))]
                full = [batch for batch in window if not isinstance(batch, Empty)]
                samples = sum(map(items_in, full))
                if not batches.is_alone:
                    stretto.weight(samples)
                optimizer.zero_grad()
                for number, batch in enumerate(full, 1):
                    with stretto.no_sync() if number < len(full) else torch.enable_grad():
                        (((net(batch[0]) - batch[1]) ** 2).sum() / samples).backward()
                optimizer.step()
                found += [batch[2].tolist() if len(batch) else [] for batch in window]
        stretto.finish()
        return found, length, torch.nn.utils.parameters_to_vector(net.parameters()).detach()

    return work


def plain(samples: int, batch: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbered(samples), batch_size=batch, generator=torch.Generator().manual_seed(5), **options)

    return loader


CASES = {
    "divisible": (2, 48, 4, 3, "keep"),
    "rest": (3, 53, 2, 4, "keep"),
    "fewer samples than micro-batches": (3, 50, 1, 8, "keep"),
    "no accumulation": (2, 31, 4, 1, "keep"),
    "last step of one sample": (2, 17, 2, 2, "split"),
    "split": (3, 40, 3, 4, "split"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_workers_count_the_same_micro_batches_and_each_sample_is_in_one(case: str) -> None:
    workers, samples, batch, accumulation, mode = CASES[case]
    work = library(plain(samples, batch), accumulation)
    each = run_workers(workers, work, split=mode == "split")
    global_batch = batch * accumulation * (1 if mode == "split" else workers)
    steps = -(-samples // global_batch)
    assert {length for _, length, _ in each} == {len(found) for found, _, _ in each} == {steps * accumulation}
    counts = Counter(number for found, _, _ in each for one in found for number in one)
    assert counts.keys() == set(range(samples))
    if mode == "keep":  # else a worker without a sample in the last step makes a pass of weight 0 over another's
        assert counts == dict.fromkeys(range(samples), 1)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_that_of_one_process_with_the_same_global_steps(case: str) -> None:
    workers, samples, batch, accumulation, mode = CASES[case]
    work = library(plain(samples, batch, shuffle=True), accumulation, epochs=2)
    each = run_workers(workers, work, split=mode == "split")
    alone = run_single_process(work, 1 if mode == "split" else workers)
    for _, _, model in each:
        assert (model - alone[2]).abs().max() < 1e-6


@pytest.mark.parametrize(("samples", "batch", "accumulation"), [(40, 4, 3), (41, 4, 2), (5, 1, 8)])
def test_a_single_worker_has_the_batches_of_the_script(samples: int, batch: int, accumulation: int) -> None:
    loader = plain(samples, batch, shuffle=True)
    found, length, _ = run_workers(1, library(loader, accumulation))[0]
    assert found == [one[2].tolist() for one in loader()]
    assert length == len(loader())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("samples", [48, 53])
def test_an_epoch_that_begins_later_has_the_rest_of_the_whole_one(workers: int, samples: int) -> None:
    loader = plain(samples, 4, shuffle=True)
    whole = run_workers(workers, library(loader, 2))
    later = run_workers(workers, library(loader, 2, begins_at=4))
    for (all_of, _, _), (rest, _, _) in zip(whole, later, strict=True):
        assert rest == all_of[4:]


@pytest.mark.parametrize(
    ("workers", "batch", "accumulation", "split"), [(2, 4, 2, True), (3, 5, 3, True), (2, 3, 2, False), (3, 4, 1, True)]
)
def test_workers_divide_the_micro_batches_of_one_process(
    workers: int, batch: int, accumulation: int, split: bool
) -> None:
    loader = plain(53, batch, shuffle=True)

    def work(worker: int) -> list[list[tuple[int, list[int]]]]:
        net = small_net()
        batches = WindowedLoader(
            net, torch.optim.SGD(net.parameters(), lr=0.05), loader(), accumulation, by_groups=True
        )
        found = []
        for window in batches.windows():
            full = [one[2].tolist() for one in window if not isinstance(one, Empty)]
            assert len(window) == accumulation
            found.append(list(zip(batches.groups, full if batches.has_own else [[]] * len(full), strict=True)))
        return found

    each = run_workers(workers, work, split=split)
    order, size, place = (
        [number for one in loader() for number in one[2].tolist()],
        batch * (1 if split else workers),
        0,
    )
    for windows in zip(*each, strict=True):
        step = [
            [n for window in windows for one, part in window if one == group for n in part]
            for group in range(accumulation)
        ]
        total = sum(map(len, step))
        assert step == [order[place : place + total][size * group :][:size] for group in range(accumulation)]
        place += total
    assert place == 53
    if split:
        assert max(len(part) for windows in each for window in windows for _, part in window) <= batch


def odd_batches() -> DataLoader[Any]:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11], [12]]
    return DataLoader(Numbered(13), batch_sampler=batches)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_a_batch_sampler_and_of_drop_last_stay_whole(workers: int) -> None:
    for loader in (odd_batches, plain(27, 4, drop_last=True)):
        each = run_workers(workers, library(loader, 3))
        found = sorted(one for micro, _, _ in each for one in micro if one)
        assert found == [one[2].tolist() for one in loader()]


def test_a_sampler_of_the_library_is_drawn_once_for_all_workers() -> None:
    def loader() -> DataLoader[Any]:
        data = Numbered(24)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))

    each = run_workers(2, library(loader, 1, epochs=2))
    counts = Counter(number for found, _, _ in each for one in found for number in one)
    assert counts == dict.fromkeys(range(24), 2)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return zip(*Numbered(self.samples).tensors, strict=True)


@pytest.mark.parametrize("samples", [40, 41, 45, 46])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_each_sample_of_a_stream_in_windows_is_trained_once_and_counts_once(
    workers: int, samples: int, split: bool, tmp_path: Path
) -> None:
    """A window has micro-batches of unequal sizes at the end of the stream, and a last one is cut into shares."""

    def work(worker: int) -> list[int]:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        found = []
        batches = WindowedLoader(net, optimizer, DataLoader(Stream(samples), batch_size=4), 2)
        for window in batches.windows():
            full = [batch for batch in window if not isinstance(batch, Empty)]
            for number, batch in enumerate(full, 1):
                with stretto.no_sync() if number < len(full) else torch.enable_grad():
                    ((net(batch[0]) - batch[1]) ** 2).mean().backward()
                found += batch[2].tolist() if batches.has_own else []
            optimizer.step()
        return found

    found = run_workers(workers, work, run=tmp_path, split=split)
    assert sorted(chain.from_iterable(found)) == list(range(samples))
    epochs = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert [one["samples"] for one in epochs] == [samples]


def test_windows_of_a_stream_are_dealt_among_the_workers() -> None:
    def work(worker: int) -> list[int]:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        batches = WindowedLoader(net, optimizer, DataLoader(Stream(40), batch_size=2), 3)
        with pytest.raises(TypeError):
            len(batches)
        found = []
        for number, batch in enumerate(batches, 1):
            if isinstance(batch, Empty):
                continue
            with stretto.no_sync() if number % 3 else torch.enable_grad():
                ((net(batch[0]) - batch[1]) ** 2).mean().backward()
            if not number % 3:
                optimizer.step()
            found += batch[2].tolist()
        return found

    first, second = run_workers(2, work)
    assert sorted({*first, *second}) == list(range(40))
    assert first[:6] == list(range(6))
    assert second[:6] == list(range(6, 12))


def test_steps_that_follow_the_number_of_workers_are_refused() -> None:
    with pytest.raises(ScriptError, match="got: --on-resize per-worker-batch"):
        run_workers(2, library(plain(24, 4), 2), rule="per-worker-batch")


def test_items_are_labels_that_count_or_samples() -> None:
    assert items_in({"labels": torch.tensor([[-100, 5], [-100, -100]]), "x": torch.ones(2, 2)}) == 1
    assert items_in({"labels": torch.ones(2), "x": torch.ones(2, 2)}) == 2
    assert items_in([torch.ones(3, 2)]) == 3
