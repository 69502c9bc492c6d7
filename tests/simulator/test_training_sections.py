"""Several training sections in the simulator: every sample of each counts once under failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import thinned
from simulator.harness import Ended, simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader, Subset, random_split

import stretto
from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.recipe.parser import parse
from stretto.report.run_record import record
from stretto.report.summary import conclude

NET = "100Mbit/s 1ms"
SIZES = (41, 29, 35)
THROUGH = "Recipe(what=gradients(), when=together(every=1), whom=server(shards=2), then=step())"


def folds(epochs: int = 2, sizes: tuple[int, ...] = SIZES, by_hand: bool = False) -> Callable[[int], Any]:
    """Return a script of one training section per data size; `by_hand` ends one explicitly."""

    def work(worker: int) -> Any:
        found = []
        for number, size in enumerate(sizes):
            net = small_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05 + 0.01 * number)
            loader = stretto.distribute(net, optimizer, DataLoader(regression(size), batch_size=4, shuffle=True))
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
            if by_hand:
                stretto.finish()
            found.append(flat(net))
        return found

    return work


def simulate(recipe: str, folder: Path, fault: str = "", workers: int = 3, **more: Any) -> Ended:
    folder.mkdir()
    return simulated(workers, folds(), recipe, net=NET, fault=fault, folder=folder, **more)


def seen(folder: Path) -> list[dict[str, int]]:
    """Return the sample counts of each epoch."""
    found = {
        one["epoch"]: one["sample_counts"] for one in read_events(folder / "events.jsonl") if one["event"] == "epoch"
    }
    return [{name: one[name] for name in ("once", "twice", "never")} for one in found.values()]


def sections(run: Path) -> list[Path]:
    return [run, *(run / f"section-{number}" for number in range(2, len(SIZES) + 1))]


def are_whole(run: Path) -> None:
    for folder, size in zip(sections(run), SIZES, strict=True):
        assert seen(folder) == [{"once": size, "twice": 0, "never": 0}] * 2
        assert record(folder)["failed"] is None


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", THROUGH, "async_sgd(shards=2)"])
def test_each_section_has_its_own_records(recipe: str, tmp_path: Path) -> None:
    ended = simulate(recipe, tmp_path / "here", fault="")
    are_whole(tmp_path / "here" / "run")
    again = simulate(recipe, tmp_path / "there", fault="")
    assert ended.log == again.log
    for one, other in zip(*(sections(tmp_path / name / "run") for name in ("here", "there")), strict=True):
        assert (one / "events.jsonl").read_bytes() == (other / "events.jsonl").read_bytes()


EVERY = ["allreduce", "local_sgd(every=3)", "diloco(every=4)", THROUGH, "async_sgd"]


@pytest.mark.parametrize("recipe", EVERY)
def test_every_sample_of_each_section_counts_once_whenever_a_worker_is_killed(recipe: str, tmp_path: Path) -> None:
    length = simulate(recipe, tmp_path / "whole", "kill worker 1 at 1h").seconds
    for number in thinned(range(1, 6), 2, first=EVERY.index(recipe)):
        moment, victim = number * length / 6, number % 3
        fault = f"kill worker {victim} at {moment:.6f}s" + ", back after 15ms" * (number != 4)
        ended = simulate(recipe, tmp_path / str(number), fault)
        are_whole(tmp_path / str(number) / "run")
        found = [one[-1] for one in ended.found if one is not None]
        assert parse(recipe).asynchronous or all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("asks", [{}, {"shares": "1:4"}, {"max_batch": "0:7,1:4"}, {"shares": "speed"}])
def test_a_section_that_begins_with_one_worker_has_the_shares_of_all(asks: dict[str, str], tmp_path: Path) -> None:
    """Worker 1 returns in the section that worker 0 has begun alone: both know the same shares."""
    length = simulate("allreduce", tmp_path / "whole", "kill worker 1 at 1h", 2, asks=asks).seconds
    fault = f"kill worker 1 at {0.25 * length:.6f}s, back after {0.35 * length:.6f}s"
    ended = simulate("allreduce", tmp_path / "here", fault, 2, asks=asks)
    are_whole(tmp_path / "here" / "run")
    starts = [
        one["worker"]
        for folder in sections(tmp_path / "here" / "run")
        for one in read_events(folder / "events.jsonl")
        if one["event"] == "start"
    ]
    assert starts == [0, 1, 0, 0, 1]
    assert torch.equal(ended.found[0][-1], ended.found[1][-1])


def test_worker_that_joins_a_later_section_has_the_earlier_models(tmp_path: Path) -> None:
    tmp_path = tmp_path / "here"
    length = simulate("allreduce", tmp_path.with_name("whole"), "kill worker 1 at 1h").seconds
    ended = simulate("allreduce", tmp_path, f"kill worker 1 at {0.75 * length:.6f}s, back after 15ms")
    starts = [one["worker"] for one in read_events(tmp_path / "run/section-3/events.jsonl") if one["event"] == "start"]
    assert sorted(starts) == [0, 1, 1, 2]
    for mine, others in zip(ended.found[1], ended.found[0], strict=True):
        assert torch.equal(mine, others)
    (death,) = record(tmp_path / "run/section-3")["failures"]
    assert death["process"] == "worker 1" and 0 < death["seconds"] < length / 2
    assert record(tmp_path / "run")["failures"] == record(tmp_path / "run/section-2")["failures"] == []


def test_random_splits_after_finish_are_the_same_at_all_workers(tmp_path: Path) -> None:
    data = regression(40)

    def work(worker: int) -> list[list[int]]:
        parts = []
        for _ in range(3):
            part = random_split(data, [24, 16])[0]
            parts.append(list(part.indices))
            net = small_net().append(nn.Dropout(0.1))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            for x, y in stretto.distribute(net, optimizer, DataLoader(part, batch_size=4, shuffle=True)):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            stretto.finish()
        return parts

    length = simulated(3, work, "local_sgd(every=2)", net=NET, fault="kill worker 1 at 1h").seconds
    for fault in ("", f"kill worker 1 at {0.8 * length:.6f}s, back after 15ms"):
        first, *others = simulated(3, work, "local_sgd(every=2)", net=NET, fault=fault).found
        assert all(one == first for one in others)
        assert first[0] != first[1] != first[2]


def test_data_drawn_with_a_workers_own_random_numbers_are_refused(tmp_path: Path) -> None:
    def work(worker: int) -> None:
        for _ in range(2):
            net = small_net()
            part = Subset(regression(40), torch.randperm(40)[:24].tolist())
            for _ in stretto.distribute(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(part)):
                pass

    with pytest.raises(LaunchError, match="data of worker 1 differ") as found:
        simulated(2, work, "allreduce", net=NET)
    assert "stretto.finish() before the data are drawn" in str(found.value)


def test_a_limit_of_samples_counts_all_sections(tmp_path: Path) -> None:
    ended = simulate("allreduce", tmp_path / "here", samples=100)
    assert not (tmp_path / "here/run/section-3").exists()
    assert ended.found == [None] * 3
    last = seen(tmp_path / "here/run/section-2")
    assert len(last) <= 1


def test_the_summary_names_each_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate("allreduce", tmp_path / "here")
    run = tmp_path / "here/run"
    conclude(run, tmp_path / "record.json", silent=False)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("section")] == ["section 1", "section 2", "section 3"]
    assert [line for line in said if line.startswith("page")] == [f"page: {one}/report.html" for one in sections(run)]
    found = json.loads((tmp_path / "record.json").read_text())
    assert [one["samples"] for one in (found, *found["sections"])] == [2 * size for size in SIZES]
    assert all(one["seconds"] > 0 for one in found["sections"])
