"""Shares: every worker has a part of every global step, and all loops have as many steps as the loader says."""

from __future__ import annotations

import functools
import shutil
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from thread_workers import regression, relative_distance, run_single_process, run_workers, sgd, small_net, training
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto.errors import LoaderError, RecipeError
from stretto.events import read_events
from stretto.interval import every
from stretto.launcher.worker_main import failure

RATIOS = "1:1:1:0.2"
"""Ratios of the speeds of four workers, of which one is five times slower."""
WAITING = ["allreduce", "local_sgd(every=3)", "diloco(every=2)", "gossip"]


def counting(
    samples: int, batch: int, limit: int | None = None, epochs: int = 2, dies_at: Any = None, **options: Any
) -> Any:
    """Return a script that notes the sizes of its batches, by epoch, and how often it has seen each sample.

    With a `limit` it counts its steps and ends within an epoch. It raises in its step (worker, number) `dies_at`.
    """

    def work(worker: int) -> tuple[int, list[list[int]], list[int]]:
        net = small_net()
        optimizer = sgd(net.parameters())
        data = TensorDataset(torch.arange(samples), *regression(samples).tensors)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=batch, shuffle=True, **options))
        sizes, seen, done = list[list[int]](), list[int](), 0
        for _ in range(epochs):
            sizes.append([])
            for number, x, y in islice(loader, limit - done if limit is not None else None):
                if (worker, done) == dies_at:
                    raise WorkerKilled
                sizes[-1].append(len(number))
                seen += number.tolist()
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                done += 1
            if done == limit:
                break
        stretto.finish()
        return len(loader), sizes, seen

    return work


@pytest.mark.parametrize("recipe", WAITING)
@pytest.mark.parametrize(("workers", "samples", "batch"), [(2, 36, 4), (3, 100, 10), (5, 44, 4), (3, 13, 8)])
def test_all_loops_are_equal_and_every_sample_is_seen_once(recipe: str, workers: int, samples: int, batch: int) -> None:
    found = run_workers(workers, counting(samples, batch), recipe)
    steps = -(-samples // (workers * batch))
    assert {length for length, _, _ in found} == {steps}
    assert {len(epoch) for _, sizes, _ in found for epoch in sizes} == {steps}
    assert sorted(one for _, _, seen in found for one in seen) == [one for one in range(samples) for _ in range(2)]
    for epoch in range(2):
        shares = [list(one) for one in zip(*(sizes[epoch] for _, sizes, _ in found), strict=True)]
        assert max(map(max, shares)) <= batch
        assert all(max(one) - min(one) <= 1 for one in shares)
        assert max(map(sum, shares)) - min(map(sum, shares)) <= 1


@pytest.mark.parametrize("recipe", WAITING)
def test_loops_that_count_their_steps_end_together(recipe: str) -> None:
    """36 samples in batches of 4 are 9 batches, 5 steps of 2 workers; the script ends after 8 steps."""
    found = run_workers(2, counting(36, 4, limit=8), recipe)
    assert [[len(epoch) for epoch in sizes] for _, sizes, _ in found] == [[5, 3]] * 2


def test_a_failure_leaves_the_number_of_steps(tmp_path: Path) -> None:
    """Worker 2 of 3 fails in its fourth step, whose samples the others train in the next six."""
    found, _ = run_elastic_workers(3, counting(100, 4, epochs=1, dies_at=(2, 3)), "allreduce", tmp_path)
    left = [one for one in found if one is not None]
    assert [(length, len(sizes[0])) for length, sizes, _ in left] == [(9, 9)] * 2
    assert [sum(one) for one in zip(*(sizes[0] for _, sizes, _ in left), strict=True)][:3] == [8, 8, 8]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "gossip"])
def test_where_each_worker_keeps_its_batch_two_share_the_rest_of_three(recipe: str, tmp_path: Path) -> None:
    """Worker 2 of 3 fails in its fourth step, when 34 of 100 samples are trained; no share is above a batch of 4."""
    work = counting(100, 4, dies_at=(2, 3))
    found, _ = run_elastic_workers(3, work, recipe, tmp_path, rule="per-worker-batch")
    left = [one for one in found if one is not None]
    assert [(length, *map(len, sizes)) for length, sizes, _ in left] == [(13, 12, 13)] * 2
    assert max(size for _, sizes, _ in left for epoch in sizes for size in epoch) <= 4
    counts = [one["sample_counts"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert counts == [{"once": 100, "twice": 0, "never": 0, "dropped": 0}] * 2


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize(("now", "steps"), [(1, [11, 25]), (2, [6, 13]), (3, [4, 9]), (5, [3, 5])])
def test_where_each_worker_keeps_its_batch_others_resume_with_steps_of_their_own(
    now: int, steps: list[int], tmp_path: Path
) -> None:
    """Three workers have trained 56 of 100 samples in 5 of 9 steps."""
    work, kept = counting(100, 4), {"checkpoint": every("1 rounds"), "keep": 99, "rule": "per-worker-batch"}
    begun = run_workers(3, work, "allreduce", run=tmp_path, **kept)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[4]
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    found = run_workers(now, work, "allreduce", resume=tmp_path / "first", rule="per-worker-batch")
    assert [(length, *map(len, sizes)) for length, sizes, _ in found] == [(steps[1], *steps)] * now
    before = [one for _, sizes, seen in begun for one in seen[: sum(sizes[0][:5])]]
    after = [one for _, _, seen in found for one in seen]
    assert sorted([*before, *after]) == [one for one in range(100) for _ in range(2)]


@pytest.mark.usefixtures("every_checkpoint")
def test_a_run_of_one_worker_that_several_resume_says_that_its_batches_stay_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_workers(1, counting(96, 4), "allreduce", run=tmp_path, checkpoint=every("1 rounds"), keep=99)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[4]
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    scaled: dict[str, Any] = {"lr_scale": "linear", "lr_factor": 3.0}
    found = run_workers(3, counting(96, 4), "allreduce", resume=tmp_path / "first", **scaled)
    assert [sizes[-1] for _, sizes, _ in found] == [[4] * 8] * 3
    assert "3 workers x 4 = 12 samples a global batch; learning rate 3 x the script's" in capfd.readouterr().err


def test_uneven_epochs_in_shares_equal_one_process_with_the_same_global_steps() -> None:
    data = regression(97, torch.float64)
    work: Any = training(data, 8, epochs=4, dtype=torch.float64)
    whole: Tensor = run_single_process(work, join=5)
    assert all(relative_distance(one, whole) <= 1e-12 for one in run_workers(5, work, "allreduce"))


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize("now", [1, 2, 5])
def test_a_run_that_is_resumed_by_other_workers_has_the_same_steps(
    now: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three workers have made 5 steps of 9; the rest of the epoch and the next one have as many as with three.

    The learning rate is scaled for their global batch, too.
    """
    begun = run_workers(3, counting(100, 4), "allreduce", run=tmp_path, checkpoint=every("1 rounds"), keep=99)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[4]
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    capfd.readouterr()
    scaled: dict[str, Any] = {"lr_scale": "linear", "lr_factor": float(now)}
    found = run_workers(now, counting(100, 4), "allreduce", resume=tmp_path / "first", **scaled)
    assert "3 x 4 = 12 samples a global batch, as the run began; learning rate 3 x" in capfd.readouterr().err
    assert {length for length, _, _ in found} == {9}
    assert [[len(epoch) for epoch in sizes] for _, sizes, _ in found] == [[4, 9]] * now
    before = [one for _, sizes, seen in begun for one in seen[: sum(sizes[0][:5])]]
    after = sorted(one for _, _, seen in found for one in seen)
    assert sorted([*before, *after]) == [one for one in range(100) for _ in range(2)]


@pytest.mark.parametrize(("samples", "split"), [(99, False), (100, False), (100, True)])
def test_the_error_of_a_script_with_views_of_a_fixed_size_names_the_share(samples: int, split: bool) -> None:
    """Three workers have shares of 8 and 9 samples, where batches of the script have 10."""

    def work(worker: int, **options: Any) -> str:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(samples), batch_size=10, **options))
        try:
            for x, y in loader:
                nn.functional.mse_loss(net(x.view(10, x.size(1))), y).backward()
                optimizer.step()
        except RuntimeError as error:
            return failure(error)
        return ""

    way = "without --batch split each" if split else "with DataLoader(..., drop_last=True) each"
    for text in run_workers(3, work, "allreduce", split=split):
        assert "where the script's batches have 10" in text
        assert way in text
    if not split:
        assert run_workers(3, functools.partial(work, drop_last=True), "allreduce") == [""] * 3


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_last_step_without_a_batch_for_each_worker_is_dropped(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two workers train all of 10 batches, and three leave out the last one."""
    work = counting(43, 4, drop_last=True)
    found = run_workers(workers, work, "allreduce", drops_uneven=True)
    steps = 10 // workers
    assert [length for length, _, _ in found] == [steps] * workers
    assert [[len(epoch) for epoch in sizes] for _, sizes, _ in found] == [[steps] * 2] * workers
    assert len([one for _, _, seen in found for one in seen]) == 2 * 4 * steps * workers
    assert ("--uneven drop: " in capfd.readouterr().err) == (workers == 3)


def test_one_process_with_the_global_batch_drops_the_same_step() -> None:
    data = regression(43, torch.float64)
    work: Any = training(data, 4, epochs=2, dtype=torch.float64, drop_last=True)
    whole: Tensor = run_single_process(work, join=3, drops_uneven=True)
    found = run_workers(3, work, "allreduce", drops_uneven=True)
    assert all(relative_distance(one, whole) <= 1e-12 for one in found)
    assert relative_distance(found[0], run_workers(3, work, "allreduce")[0]) > 1e-6


def test_whole_batches_stay_whole_when_a_worker_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = counting(100, 4, epochs=1, dies_at=(2, 3), drop_last=True)
    found, _ = run_elastic_workers(3, work, "allreduce", tmp_path)
    left = [one for one in found if one is not None]
    assert {size for _, sizes, _ in left for size in sizes[0]} == {4}
    assert [length for length, _, _ in left] == [9, 9]
    assert max(len(sizes[0]) for _, sizes, _ in left) == 3 + 8  # of 25 batches 16 are left for two
    assert "whole batches are dealt" in capfd.readouterr().err


def sizes_of(found: list[Any], epoch: int = 0) -> list[tuple[int, ...]]:
    """Return the shares of the workers in each global step."""
    return list(zip(*(sizes[epoch] for _, sizes, _ in found), strict=True))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "diloco(every=2)"])
def test_each_worker_has_its_share_of_every_step_and_every_sample_is_seen_once(recipe: str) -> None:
    found = run_workers(4, counting(320, 16), recipe, shares=RATIOS)
    assert {length for length, _, _ in found} == {5}
    assert sizes_of(found) == sizes_of(found, 1) == [(20, 20, 20, 4)] * 5
    assert sorted(one for _, _, seen in found for one in seen) == [one for one in range(320) for _ in range(2)]


@pytest.mark.parametrize("split", [False, True])
def test_unequal_shares_equal_one_process_with_the_same_global_steps(split: bool) -> None:
    work: Any = training(regression(97, torch.float64), 12, epochs=3, dtype=torch.float64)
    whole = run_single_process(work, join=1 if split else 4)
    found = run_workers(4, work, "allreduce", shares=RATIOS, split=split)
    assert all(relative_distance(one, whole) <= 1e-12 for one in found)


def test_equal_ratios_are_even_shares() -> None:
    even, ratios = (run_workers(3, counting(100, 10), "allreduce", shares=one) for one in ("even", "2:2:2"))
    assert sizes_of(even) == sizes_of(ratios)


def test_loader_processes_load_unequal_shares() -> None:
    found = run_workers(2, counting(60, 5, epochs=1, num_workers=2), "allreduce", shares="4:1")
    assert sizes_of(found) == [(8, 2)] * 6


def test_the_rest_of_an_epoch_is_shared_in_ratios_when_a_worker_fails(tmp_path: Path) -> None:
    work = counting(540, 45, epochs=1, dies_at=(1, 1))
    found, _ = run_elastic_workers(3, work, "allreduce", tmp_path, shares="4:4:1")
    shares = sizes_of([one for one in found if one is not None])
    assert [shares[0], shares[1]] == [(60, 15), (60, 15)]
    assert [sum(one) for one in shares[2:]] == [135 + 30, 135 + 30]
    assert shares[2:] == [(132, 33)] * 2


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize("now", ["even", "1:4"])
def test_a_resumed_run_has_the_shares_of_its_own_options(now: str, tmp_path: Path) -> None:
    work, kept = counting(100, 5, epochs=1), {"checkpoint": every("1 rounds"), "keep": 99}
    begun = run_workers(2, work, "allreduce", run=tmp_path, shares="4:1", **kept)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[4]
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    found = run_workers(2, work, "allreduce", resume=tmp_path / "first", shares=now)
    assert sizes_of(begun) == [(8, 2)] * 10
    assert sizes_of(found) == [(5, 5) if now == "even" else (2, 8)] * 5
    before = [one for _, sizes, seen in begun for one in seen[: sum(sizes[0][:5])]]
    assert sorted([*before, *found[0][2], *found[1][2]]) == [*range(100)]


class Stream(IterableDataset[Any]):
    """A stream of rows."""

    def __iter__(self) -> Any:
        return iter(regression(12))


@pytest.mark.parametrize(
    ("loader", "got"),
    [
        (lambda: DataLoader(regression(12), batch_size=2, drop_last=True), "drop_last=True"),
        (lambda: DataLoader(regression(12), batch_size=1), "whole batches"),
        (lambda: DataLoader(Stream(), batch_size=2), "a stream"),
    ],
)
def test_shares_of_whole_batches_are_refused(loader: Any, got: str) -> None:
    def work(worker: int) -> None:
        net = small_net()
        stretto.distribute(net, sgd(net.parameters()), loader())

    with pytest.raises(LoaderError, match=f"(?s)--shares 2:1 divides.*got: {got}"):
        run_workers(2, work, "allreduce", shares="2:1")


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
@pytest.mark.parametrize("shares", ["even", "1:1:5"])
def test_no_worker_has_more_samples_than_it_has_memory_for(recipe: str, shares: str) -> None:
    found = run_workers(3, counting(300, 20), recipe, shares=shares, limits={2: 8})
    assert sizes_of(found) == sizes_of(found, 1) == [(26, 26, 8)] * 5
    assert sorted(one for _, _, seen in found for one in seen) == [one for one in range(300) for _ in range(2)]


def test_limited_shares_equal_one_process_with_the_same_global_steps() -> None:
    work: Any = training(regression(97, torch.float64), 12, epochs=3, dtype=torch.float64)
    whole = run_single_process(work, join=3)
    found = run_workers(3, work, "allreduce", limits={0: 20, 1: 5})
    assert all(relative_distance(one, whole) <= 1e-12 for one in found)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_a_worker_that_has_run_out_of_memory_returns_with_a_smaller_share(recipe: str, tmp_path: Path) -> None:
    """Worker 2 of 3 fails in its fourth step of 20 samples, and has room for 8; the others have the rest."""
    failures = iter([(2, 3)])

    def work(worker: int) -> Any:
        return counting(1200, 20, dies_at=next(failures, None) if worker == 2 else None)(worker)

    found, _ = run_elastic_workers(3, work, recipe, tmp_path, again=1, share_limits={(2, 1): 8})
    assert set(found[2][1][-1]) == {8}
    assert [found[worker][1][-1][-1] for worker in (0, 1)] == [26, 26]
    counts = [one["sample_counts"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert counts == [{"once": 1200, "twice": 0, "never": 0, "dropped": 0}] * 2


def test_a_worker_that_joins_has_no_limit_of_an_earlier_incarnation_of_another_one(tmp_path: Path) -> None:
    """Worker 2 returns with room for 8 samples, then worker 1 returns, then worker 2 on another machine, with room."""
    incarnations, returned = Counter[int](), threading.Event()

    def work(worker: int) -> list[int]:
        incarnations[worker] += 1
        net, sizes = small_net(), list[int]()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(240), batch_size=20, shuffle=True))
        for _ in range(60):
            for number, (x, y) in enumerate(loader):
                if (worker, incarnations[worker]) == (2, 1) and number == 2:
                    raise WorkerKilled
                if (worker, incarnations[worker]) == (1, 1) and len(x) == 26:
                    raise WorkerKilled
                if (worker, incarnations[worker]) == (1, 2):
                    returned.set()
                if (worker, incarnations[worker]) == (2, 2) and returned.is_set():
                    raise WorkerKilled
                sizes.append(len(x))
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return sizes

    found, _ = run_elastic_workers(3, work, "allreduce", tmp_path, again=2, share_limits={(2, 1): 8})
    assert incarnations == {0: 1, 1: 2, 2: 3}
    assert [sizes[-4:] for sizes in found] == [[20] * 4] * 3
    counts = [one["sample_counts"]["once"] for one in read_events(tmp_path / "events.jsonl") if one["event"] == "epoch"]
    assert counts == [240] * 60


@pytest.mark.usefixtures("every_checkpoint")
@pytest.mark.parametrize(("typed", "shares"), [({}, (26, 26, 8)), ({2: 12}, (24, 24, 12))])
def test_a_resumed_run_keeps_the_limit_of_a_worker_that_has_run_out_of_memory(
    typed: dict[int, int], shares: tuple[int, ...], tmp_path: Path
) -> None:
    """The checkpoint is within the first epoch; limits that are typed then replace those of the run before."""
    failures = iter([(2, 3)])

    def work(worker: int) -> Any:
        return counting(1200, 20, dies_at=next(failures, None) if worker == 2 else None)(worker)

    kept = {"checkpoint": every("12 rounds"), "keep": 99}
    run_elastic_workers(3, work, "allreduce", tmp_path / "run", again=1, share_limits={(2, 1): 8}, **kept)
    checkpoint = min((tmp_path / "run" / "checkpoints").iterdir())
    shutil.copytree(checkpoint, tmp_path / "first" / "checkpoints" / checkpoint.name)
    found = run_workers(3, counting(1200, 20), "allreduce", resume=tmp_path / "first", limits=typed)
    assert set(sizes_of(found, -1)) == {shares}


def test_an_epoch_has_more_steps_where_those_left_have_no_room_for_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Worker 2 fails in the fourth of 5 steps of 60 samples; the others have room for 40, and 80 samples to train."""
    work = counting(300, 20, epochs=1, dies_at=(2, 3))
    found, _ = run_elastic_workers(3, work, "allreduce", tmp_path, limits={0: 30, 1: 10, 2: 20})
    assert sizes_of([one for one in found if one is not None]) == [(30, 10)] * 6
    assert "more steps than len(loader) says" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("drop_last", "got"), [(False, "0:8,1:8, 16 samples in all, for steps of 24"), (True, "drop_l")]
)
def test_limits_that_leave_no_room_are_refused(drop_last: bool, got: str) -> None:
    with pytest.raises(LoaderError, match=f"(?s)--max-batch.*{got}"):
        run_workers(2, counting(60, 12, drop_last=drop_last), "allreduce", limits={0: 8, 1: 8})


def test_shares_do_not_fit_gossip() -> None:
    with pytest.raises(RecipeError, match="--max-batch does not fit gossip"):
        run_workers(2, counting(40, 4), "gossip", limits={0: 4})
    with pytest.raises(RecipeError, match="--shares 2:1 does not fit gossip"):
        run_workers(2, counting(40, 4), "gossip", shares="2:1")
