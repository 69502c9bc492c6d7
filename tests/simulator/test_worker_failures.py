"""Failing, evicted and restarted workers in the simulator, handled by the live state machines."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from pathlib import Path
from shutil import rmtree
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from combinations import each_value, mostly_long, thinned
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator.failures import (
    ALSO_THROUGH,
    FREE,
    LATENCY,
    NET,
    SAMPLES,
    THROUGH,
    TOGETHER,
    faults,
    is_whole,
    lived,
    told,
    training,
)
from simulator.harness import STEP_S, now, simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stretto
from stretto.errors import BrokenTransportError, LaunchError
from stretto.faults import plan
from stretto.launcher.supervised import pause_s
from stretto.loader import streamed_epoch
from stretto.report import incidents
from stretto.report.run_log import read
from stretto.report.run_record import record
from stretto.run_config import RunConfig
from stretto.simulator.cluster import runtime
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.cluster.membership import EXIT_NOTICE_S
from stretto.simulator.cluster.rendezvous import FORMED_S
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.network import topology
from stretto.simulator.network.links import Links

# --- any worker, at any time ---------------------------------------------------------------------------------------


EVERY = [*TOGETHER, THROUGH, *FREE]


@pytest.mark.parametrize("recipe", EVERY)
def test_every_sample_counts_once_whenever_a_worker_is_killed(recipe: str) -> None:
    """Faults in all phases: rendezvous, computing, backward, collectives, ends of epochs; mostly of worker 0."""
    length = lived(recipe, "kill worker 1 at 1h").seconds
    for number in thinned(range(10), 3, first=EVERY.index(recipe)):
        moment, victim = number * length / 9, number % 2
        back = ", back after 15ms" * (number % 4 > 0)
        is_whole(lived(recipe, f"kill worker {victim} at {moment:.6f}s{back}"), recipe)


GIVER_DIES = (2, "kill worker 1 at 0.047918s, back after 0.036509s; kill worker 0 at 0.118634s, back after 0.069076s")
"""Worker 1 joins, and worker 0 fails before its state is sent: no worker has the state any more."""


FAILS_IN_MORE_STEPS = (
    5,
    "kill worker 2 at 0.014043s, back after 0.001000s; kill worker 1 at 0.180674s; kill worker 0 at 0.260300s",
)
"""Worker 0 fails in the step that trains what worker 1 had at the end of the epoch."""


@settings(max_examples=examples(100))
@given(st.sampled_from(TOGETHER), faults())
@example("allreduce", GIVER_DIES)
@example("local_sgd(every=3)", FAILS_IN_MORE_STEPS)
def test_every_sample_counts_once_whichever_worker_is_killed(recipe: str, drawn: tuple[int, str]) -> None:
    workers, fault = drawn
    is_whole(lived(recipe, fault, workers), recipe)


@pytest.mark.parametrize("recipe", mostly_long(["allreduce", "local_sgd(every=3)", "async_sgd", THROUGH], short=(1, 2)))
def test_same_seed_gives_the_same_failures_to_the_byte(recipe: str) -> None:
    fault = "kill worker every 60ms, back after 20ms; pause worker 1 for 200ms at 80ms; kill coordinator at 90ms"
    asks = {"failure_timeout_s": 0.1}
    logs = {lived(recipe, fault, 4, order=order, asks=asks).log for order in (None, None, [3, 1, 0, 2])}
    assert len(logs) == 1
    assert logs != {lived(recipe, fault, 4, seed=1, asks=asks).log}


@pytest.mark.parametrize(("recipe", "often"), [("allreduce", "300ms"), ("async_sgd", "25ms")])
def test_many_workers_continue_under_recurring_kills(recipe: str, often: str) -> None:
    ended = simulated(50, training(2, 401), recipe, net=NET, fault=f"kill worker every {often}, back after 20ms")
    assert len(told(ended, "failed")) >= 3
    assert max(life for _, life in told(ended, "joined")) >= 1
    assert {one["sample_counts"]["once"] for one in ended.of("epoch")} == {401}
    assert recipe == "async_sgd" or len({tuple(one.tolist()) for one in ended.found if one is not None}) == 1


# --- examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd", THROUGH])
def test_worker_killed_at_the_start_is_not_waited_for(recipe: str) -> None:
    ended = lived(recipe, "kill worker 1 at 0s", workers=2)
    assert ended.found[1] is None
    is_whole(ended, recipe)


def test_events_of_a_killed_worker() -> None:
    """The failure is noticed, a generation formed, lost samples reassigned; the restarted worker takes part."""
    at = 0.035
    ended = lived("allreduce", f"kill worker 2 at {at}s, back after 50ms", workers=4, epochs=3)
    struck = [(one["t"], one["worker"], one["verb"], one["at"]) for one in ended.of("fault_injected")]
    assert struck == [(at, 2, "kill", at)]
    assert told(ended, "failed") == [(2, 0)]
    assert told(ended, "joined")[-1] == (2, 1)
    gone = next(one for one in ended.of("membership") if one["what"] == "failed")
    assert gone["t"] == pytest.approx(at + EXIT_NOTICE_S)
    first, second = ended.of("generation_changed")
    assert first["members"] == [0, 1, 3]
    assert first["t"] == pytest.approx(at + EXIT_NOTICE_S + 3 * LATENCY + FORMED_S + 2 * LATENCY, abs=1e-5)
    assert second["joined"] == [2]
    assert [(one["failed_worker"], one["incarnation"], one["samples"]) for one in ended.of("samples_reassigned")] == [
        (2, 0, 3)
    ]
    assert sum(one["samples"] for one in ended.of("end")) >= 3 * SAMPLES - 3 * 4, "a life's samples end with it"
    is_whole(ended, "allreduce", 3)


def test_report_shows_the_failure(tmp_path: Path) -> None:
    lived("allreduce", "kill worker 2 at 55ms, back after 50ms", workers=4, folder=tmp_path)
    history = read(tmp_path / "run")
    assert history.ended
    (line,) = incidents.in_lines(history)
    assert line.startswith("worker 2, at 0.06")
    assert "failed (killed by SIGKILL, injected)" in line
    assert "restarted after" in line


def test_killed_worker_without_back_after_is_not_restarted() -> None:
    ended = lived("allreduce", "kill worker 0 at 40ms")
    assert ended.found[0] is None
    assert told(ended, "joined") == [(0, 0), (1, 0), (2, 0)]
    assert [one["worker"] for one in ended.of("end")] == [1, 2]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd"])
def test_two_workers_killed_at_the_same_time(recipe: str) -> None:
    is_whole(lived(recipe, "kill workers 0,2 at 47ms, back after 20ms", workers=4), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd"])
def test_all_workers_killed_at_the_same_time_restart(recipe: str) -> None:
    ended = lived(recipe, "kill workers 0-2 at 47ms, back after 20ms")
    assert {(0, 1), (1, 1), (2, 1)} <= set(told(ended, "joined"))
    assert all(one is not None for one in ended.found)
    is_whole(ended, recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_isolated_sole_member_stops_before_another_worker_restarts(recipe: str) -> None:
    """Otherwise both would finish, with different models."""
    fault = "kill worker 1 at 60ms, back after 94ms; cut workers 0 for 239ms at 140ms"
    ended = lived(recipe, fault, 2, 6, asks={"failure_timeout_s": 0.2})
    assert {(0, 1), (1, 1)} <= set(told(ended, "joined"))
    is_whole(ended, recipe, 6)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_run_without_workers_ends_with_one_error(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        lived(recipe, "kill workers 0-2 at 47ms", folder=tmp_path)
    assert "the run cannot continue at 0.057 s of virtual time: too few workers are left" in str(raised.value)
    assert "got: 0 of 3" in str(raised.value)
    assert len(read(tmp_path / "run").of("error")) == 1


@pytest.mark.parametrize("coordinator", ["kill coordinator at 40ms, back after 1s", "pause coordinator for 1s at 40ms"])
@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd", THROUGH])
def test_coordinator_reports_a_run_without_workers_as_soon_as_it_resumes(recipe: str, coordinator: str) -> None:
    with pytest.raises(LaunchError, match=r"cannot continue at 1.04 s of virtual time: too few workers are left"):
        lived(recipe, f"{coordinator}; kill workers 0-2 at 47ms")


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        ("allreduce", "kill worker every 2ms, back after 5ms"),
        ("async_sgd", "kill server 0 every 5ms, back after 5ms"),
    ],
)
def test_failures_without_progress_end_the_run(
    recipe: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the simulation would never end."""
    monkeypatch.setattr(runtime, "MAX_FAILURES", 100)
    with pytest.raises(LaunchError, match=r"makes no progress beyond \d+ samples at .* s of virtual time") as raised:
        lived(recipe, fault, 2, folder=tmp_path)
    assert "got: 100 failures since" in str(raised.value)
    assert len(read(tmp_path / "run").of("error")) == 1


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_as_many_failures_with_progress_are_survived(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MAX_FAILURES", 3)
    ended = lived(recipe, "kill worker 1 every 40ms, back after 5ms", 2, 8)
    is_whole(ended, recipe, 8)
    assert len(told(ended, "failed")) > 20


def test_worker_killed_after_leaving_redoes_nothing(tmp_path: Path) -> None:
    """Its next incarnation belongs to no generation, since the others have finished all work."""
    recipe = ALSO_THROUGH[0]
    fault = "kill worker 0 at 217.844ms, back after 19.975ms; pause server 0 for 87.162ms at 152.324ms"
    is_whole(lived(recipe, fault, 4, folder=tmp_path), recipe)
    assert record(tmp_path / "run")["failed"] is None
    assert told(lived(recipe, fault, 4), "joined") == told(lived(recipe, "kill worker 1 at 1h", 4), "joined")


@pytest.mark.parametrize(
    ("recipe", "fault"),
    each_value(
        EVERY,
        [
            "kill worker 1 at 47ms, back after 9ms",
            "kill worker 0 at 90ms, back after 9ms",
            "pause worker 2 for 1s at 30ms",
        ],
    ),
)
def test_restarted_worker_rejoins_an_iterable_epoch(recipe: str, fault: str) -> None:
    def work(worker: int) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        x = torch.randn(40, 2)
        loader: Any = stretto.distribute(net, optimizer, [(one, one.sum(1, keepdim=True)) for one in x.split(2)])
        for _ in range(3):
            for a, b in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(a), b).backward()
                optimizer.step()
        return worker

    ended = simulated(3, work, recipe, net=NET, fault=fault, asks={"failure_timeout_s": 0.2})
    victim = int(fault.split()[2])
    assert [one is not None for one in ended.found] == [one != victim or "back" in fault for one in range(3)]
    assert len(ended.of("epoch")) == 3
    assert not ended.of("batches_lost")


def found_without_loss(recipe: str, fault: str, batch: str) -> list[Any]:
    """Return what three workers have counted in two epochs of a stream whose record has each sample once in each."""
    asks = {"failure_timeout_s": 0.2, "global_batch": batch}
    ended = simulated(3, summed(lambda _: BATCHES), recipe, net=NET, fault=fault, asks=asks)
    assert not ended.of("batches_lost")
    assert [sum(event["trained"].values()) for event in ended.of("epoch")] == [80, 80]
    assert [event["samples"] for event in ended.of("epoch")] == [80, 160]
    return ended.found


@pytest.mark.parametrize(
    ("recipe", "fault", "batch"),
    [
        ("async_sgd", "kill worker 1 at 47ms", "keep"),
        ("async_sgd(shards=2)", "kill worker 0 at 90ms", "keep"),
        ("downpour(every=3)", "kill worker 1 at 47ms; kill worker 2 at 300ms", "keep"),
        ("downpour(every=3)", "kill worker 0 at 90ms", "split"),
        # after the server has its first update, and before the dispatcher is told
        ("downpour(every=3)", "kill worker 1 at 73ms", "keep"),
        ("downpour(every=3)", "kill worker 0 at 74ms", "split"),
        ("async_sgd", "kill server 0 at 90ms", "keep"),
        ("async_sgd(shards=2)", "kill server 0 at 90ms; kill worker 2 at 330ms", "keep"),
        ("downpour(every=3)", "kill worker 1 at 47ms; kill server 0 at 90ms", "split"),
    ],
)
def test_each_sample_of_a_stream_is_trained_once_over_a_server_that_does_not_wait(
    recipe: str, fault: str, batch: str
) -> None:
    """The others train the batches of a failed worker, and batches that a rollback of the server has undone."""
    counts = next(one for one in found_without_loss(recipe, fault, batch) if one is not None)
    assert counts == [1.0] * 80 + [1.0] * 80


@pytest.mark.parametrize(
    ("recipe", "fault", "batch"),
    [
        ("async_sgd", "kill worker 1 at 47ms, back after 9ms", "keep"),
        (
            "async_sgd(shards=2)",
            "kill worker 0 at 60ms, back after 9ms; kill worker 0 at 150ms, back after 9ms",
            "keep",
        ),
        ("downpour(every=3)", "kill worker 1 at 47ms, back after 9ms; kill worker 2 at 90ms, back after 9ms", "keep"),
        ("downpour(every=3)", "kill worker 0 at 90ms, back after 9ms", "split"),
        ("async_sgd", "kill worker 1 at 47ms, back after 9ms; kill server 0 at 120ms", "keep"),
        ("async_sgd(shards=2)", "kill server 0 at 60ms; kill worker 2 at 130ms, back after 9ms", "keep"),
    ],
)
def test_restarted_worker_takes_part_in_a_stream_over_a_server_that_does_not_wait_again(
    recipe: str, fault: str, batch: str
) -> None:
    """Or it takes part from the end of the epoch on, if another worker waits there already."""
    assert found_without_loss(recipe, fault, batch) == [[1.0] * 160] * 3


LATE = "kill worker 1 at 1ms, back after 60ms"
"""Fault by which an epoch begins without worker 1, which joins in it."""


@pytest.mark.parametrize(
    ("recipe", "fault", "batch"),
    [
        ("async_sgd", LATE, "keep"),
        ("async_sgd(shards=2)", f"{LATE}; kill worker 1 at 170ms, back after 9ms", "split"),
        ("downpour(every=3)", f"kill worker 2 at 30ms; {LATE}", "keep"),
        ("downpour(every=3)", f"kill workers 0,2 at 1ms, back after 40ms; {LATE}; kill worker 0 at 150ms", "split"),
        ("async_sgd(overlap=True)", f"{LATE}; kill server 0 at 150ms", "keep"),
    ],
)
def test_worker_that_joins_a_stream_over_a_server_leases_batches_of_the_rest(
    recipe: str, fault: str, batch: str
) -> None:
    asks = {"failure_timeout_s": 0.2, "global_batch": batch}
    ended = simulated(3, summed(lambda _: BATCHES), recipe, net=NET, fault=fault, asks=asks)
    assert next(one for one in ended.found if one is not None) == [1.0] * 160
    assert ended.found[1] is not None
    first, second = ended.of("epoch")
    assert first["trained"]["1"] > 0
    assert (first["samples"], second["samples"]) == (80, 160) == (sum(first["trained"].values()), 160)


@pytest.mark.parametrize("batch", ["keep", "split"])
@pytest.mark.parametrize(
    "fault",
    [
        LATE,
        "kill worker 1 at 90ms, back after 200ms",
        f"{LATE}; kill worker 0 at 200ms, back after 9ms; kill workers 1-2 at 300ms, back after 30ms",
    ],
)
def test_each_batch_of_an_endless_stream_is_trained_once_by_workers_that_join_and_return(
    fault: str, batch: str
) -> None:
    """Each worker leaves its loop after its first batch from 150 on."""

    def work(worker: int) -> list[float]:
        net = nn.Embedding(2_000, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader: Any = stretto.distribute(net, optimizer, (torch.tensor([one, one + 1]) for one in count(step=2)))
        for x in loader:
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            if int(x[0]) >= 300:
                break
        stretto.finish()
        return (-net.weight.detach().flatten()).tolist()

    asks = {"failure_timeout_s": 0.2, "global_batch": batch}
    ended = simulated(3, work, "async_sgd", net=NET, fault=fault, asks=asks)
    assert None not in ended.found
    assert ended.found[0][:300] == [1.0] * 300
    assert set(ended.found[0][300:]) <= {0.0, 1.0}
    (event,) = ended.of("epoch")
    assert event["trained"]["1"] > 0
    assert sum(event["trained"].values()) == event["samples"] == sum(ended.found[0])


ENDLESS = 120
"""Batch of an endless stream from which on each worker leaves its loop, long after the last fault."""


def endless(stream: Callable[[Callable[[], Iterator[torch.Tensor]]], Any]) -> Callable[[int], list[float]]:
    """Return a script whose table counts how often a server that adds has trained each row of an endless stream."""

    def work(worker: int) -> list[float]:
        net = nn.Embedding(3 * ENDLESS, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader: Any = stretto.distribute(
            net, optimizer, stream(lambda: (torch.tensor([one, one + 1]) for one in count(step=2)))
        )
        for x in loader:
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            if int(x[0]) >= 2 * ENDLESS:
                break
        stretto.finish()
        return (-net.weight.detach().flatten()).tolist()

    return work


class Again(IterableDataset[torch.Tensor]):
    """A stream that can be read again."""

    def __init__(self, begin: Callable[[], Iterator[torch.Tensor]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._begin()


@settings(max_examples=examples(4), deadline=None)
@given(
    faults(servers=2), st.sampled_from(["async_sgd", "async_sgd(shards=2)", "async_sgd(overlap=True)"]), st.booleans()
)
@example((3, "kill worker 1 at 200ms"), "async_sgd", False)
@example((3, "kill worker 1 at 200ms; kill worker 0 at 300ms"), "async_sgd(shards=2)", True)
@example((3, "kill server 0 at 200ms"), "async_sgd", False)
@example((3, "kill server 0 at 200ms; kill worker 1 at 210ms"), "async_sgd(overlap=True)", True)
def test_each_batch_of_an_endless_stream_is_trained_once_whatever_fails(
    fault: tuple[int, str], recipe: str, divided: bool
) -> None:
    """The others train the pieces of a failed worker, and pieces that a rollback has undone, within the epoch."""
    workers, text = fault
    text = text.replace("server 1", "server 0") if "shards" not in recipe else text
    asks = {"failure_timeout_s": 0.2, "global_batch": "split" if divided else "keep"}
    ended = simulated(
        workers,
        endless(lambda begin: DataLoader(Again(begin), batch_size=None)),
        recipe,
        net=NET,
        fault=text,
        asks=asks,
        cost_model=CostModel(3 * STEP_S),
    )
    counts = next(one for one in ended.found if one is not None)
    assert counts[: 2 * ENDLESS] == [1.0] * (2 * ENDLESS)
    assert set(counts) <= {0.0, 1.0}
    assert not ended.of("batches_lost")
    (event,) = ended.of("epoch")
    assert sum(event["trained"].values()) == event["samples"] == sum(counts)


def test_batches_of_a_worker_that_fails_are_kept_of_an_endless_iterator() -> None:
    """An iterator does not give them again."""
    fault = "kill worker 1 at 200ms; kill worker 2 at 400ms"
    work = endless(lambda begin: begin())
    ended = simulated(4, work, "async_sgd", net=NET, fault=fault, cost_model=CostModel(3 * STEP_S))
    assert ended.found[0][: 2 * ENDLESS] == [1.0] * (2 * ENDLESS)
    assert not ended.of("batches_lost")


@pytest.mark.parametrize("is_iterator", [False, True])
def test_batches_beyond_the_limit_of_memory_are_read_again_and_of_an_iterator_they_are_named(
    is_iterator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_epoch, "KEPT_BYTES", 0)
    work = endless(
        (lambda begin: begin()) if is_iterator else (lambda begin: DataLoader(Again(begin), batch_size=None))
    )
    fault = "pause worker 1 for 150ms at 100ms; kill worker 1 at 240ms"
    ended = simulated(4, work, "async_sgd", net=NET, fault=fault, cost_model=CostModel(3 * STEP_S))
    lost = sum(one == 0 for one in ended.found[0][: 2 * ENDLESS]) // 2
    assert bool(lost) == is_iterator
    assert sum(int(event["text"].split()[0]) for event in ended.of("batches_lost")) == lost


@pytest.mark.parametrize("fault", ["kill server 0 at 90ms", "kill server 0 at 190ms; kill worker 1 at 200ms"])
def test_batches_that_an_iterator_does_not_give_again_are_named(fault: str) -> None:
    """A rollback has undone what workers had trained."""
    work = summed(lambda _: iter(BATCHES), epochs=1)
    ended = simulated(3, work, "async_sgd", net=NET, fault=fault, asks={"failure_timeout_s": 0.4})
    counts = next(one for one in ended.found if one is not None)
    lost = [number for number in range(40) if counts[2 * number] == 0]
    assert lost
    assert sum(int(event["text"].split()[0]) for event in ended.of("batches_lost")) == len(lost)
    assert set(counts) <= {0.0, 1.0}


@pytest.mark.parametrize("recipe", ["async_sgd", "async_sgd(shards=2)", "downpour(every=3)"])
@pytest.mark.parametrize(
    "fault", ["kill server 0 at 90ms", "kill server 0 at 190ms", "kill worker 1 at 47ms; kill server 0 at 90ms"]
)
def test_record_of_workers_with_shards_of_their_own_is_what_the_server_has(recipe: str, fault: str) -> None:
    """Work that a rollback has undone is named, and does not count."""
    work = summed(lambda worker: iter(BATCHES[worker::3]), epochs=1, deal="own")
    ended = simulated(3, work, recipe, net=NET, fault=fault, asks={"failure_timeout_s": 0.2})
    counts = next(one for one in ended.found if one is not None)
    assert set(counts) <= {0.0, 1.0}
    assert ended.of("batches_lost") or 0.0 not in counts
    (event,) = ended.of("epoch")
    assert sum(event["trained"].values()) == event["samples"] == sum(counts)


@pytest.mark.parametrize(
    "fault",
    [
        "kill workers 0-2 at 60ms, back after 9ms",  # the epoch has no worker for a moment
        # the second epoch is dealt among workers 1 and 2, and ends with worker 0 alone
        "kill worker 0 at 124ms, back after 5ms; kill worker 0 at 239ms, back after 9ms; "
        "kill worker 2 at 350ms; kill worker 1 at 392ms",
    ],
)
def test_each_sample_of_a_stream_is_trained_once_if_all_workers_that_it_was_dealt_to_fail(fault: str) -> None:
    asks = {"failure_timeout_s": 0.2}
    ended = simulated(3, summed(lambda _: BATCHES), "async_sgd(shards=2)", net=NET, fault=fault, asks=asks)
    assert ended.found[0] == [1.0] * 160
    assert not ended.of("batches_lost")
    assert [event["samples"] for event in ended.of("epoch")] == [80, 160]


@pytest.mark.parametrize("fault", ["kill worker 1 at 47ms, back after 9ms", "kill workers 0,2 at 80ms, back after 9ms"])
def test_each_batch_of_an_iterator_is_trained_once_if_workers_are_restarted(fault: str) -> None:
    work = summed(lambda _: iter(BATCHES), epochs=1)
    ended = simulated(3, work, "async_sgd", net=NET, fault=fault, asks={"failure_timeout_s": 0.2})
    assert ended.found == [[1.0] * 80] * 3
    assert not ended.of("batches_lost")


def test_restarted_worker_whose_stream_gives_other_batches_stays_out() -> None:
    """A digest of its first batches shows the difference."""
    begun = {0: 0, 1: 0, 2: 0}

    def stream(worker: int) -> list[torch.Tensor]:
        begun[worker] += 1
        return BATCHES if begun[worker] == 1 else BATCHES[::-1]

    fault = "kill worker 1 at 120ms, back after 9ms"
    ended = simulated(3, summed(stream), "async_sgd", net=NET, fault=fault, asks={"failure_timeout_s": 0.2})
    assert [one is None for one in ended.found] == [False, True, False]
    assert ended.found[0] == [1.0] * 160
    assert not ended.of("batches_lost")


BATCHES = [torch.tensor([2 * number, 2 * number + 1]) for number in range(40)]


def summed(stream: Callable[[int], Any], epochs: int = 2, **more: Any) -> Callable[[int], list[float]]:
    """Return a script whose table counts how often a server that adds has trained each row in each epoch."""

    def work(worker: int) -> list[float]:
        net = nn.Embedding(80 * epochs, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader: Any = stretto.distribute(net, optimizer, stream(worker), **more)
        for epoch in range(epochs):
            for x in loader:
                optimizer.zero_grad()
                net(x + 80 * epoch).sum().backward()
                optimizer.step()
        return (-net.weight.detach().flatten()).tolist()

    return work


class Shuffled(IterableDataset[torch.Tensor]):
    """Batches in an order that is drawn from the global generators while they are read."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rest = list(range(40))
        while rest:
            number = 2 * rest.pop(int(torch.randint(len(rest), ())))
            yield torch.tensor([number, number + 1])


ALONE = "kill worker 1 at 40ms, back after 560ms"
"""Fault by which an epoch begins with one worker of two, and the other one joins in it."""


@pytest.mark.parametrize(
    ("recipe", "workers", "fault", "draws", "joins", "batch"),
    [
        ("allreduce", 3, "kill worker 1 at 60ms, back after 9ms", True, True, "keep"),
        ("local_sgd(every=3)", 3, "kill worker 0 at 90ms, back after 9ms; kill worker 2 at 150ms", True, True, "keep"),
        (
            THROUGH,
            3,
            "kill worker 0 at 90ms, back after 9ms; kill worker 0 at 300ms, back after 9ms",
            True,
            True,
            "keep",
        ),
        ("allreduce", 2, ALONE, False, True, "keep"),
        ("allreduce", 2, ALONE, False, True, "split"),
        ("local_sgd(every=3)", 2, ALONE, True, False, "keep"),
    ],
)
def test_samples_of_a_stream_that_draws_random_numbers_are_trained_once_by_workers_that_rejoin(
    recipe: str, workers: int, fault: str, draws: bool, joins: bool, batch: str
) -> None:
    """A worker stays out if the only other one has drawn from one generator in turn with the stream."""

    def work(worker: int) -> list[list[float]]:
        net = nn.Embedding(80, 1)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(Shuffled(), batch_size=None))
        counts = [[0.0] * 80]
        for _ in range(2):
            for x in loader:
                optimizer.zero_grad()
                if draws:
                    torch.rand(worker + 3)
                net(x).sum().backward()
                optimizer.step()
            counts.append((-net.weight.detach().flatten()).tolist())
        return [[now - then for then, now in zip(*each, strict=True)] for each in pairwise(counts)]

    ended = simulated(
        workers, work, recipe, net=NET, fault=fault, asks={"failure_timeout_s": 0.2, "global_batch": batch}
    )
    victim = int(fault.split()[2])
    assert (ended.found[victim] is not None) == joins
    assert not ended.of("batches_lost")
    for counts in next(one for worker, one in enumerate(ended.found) if one is not None and worker != victim):
        assert min(counts) > 0.2
        assert {round(one, 2) for one in counts} <= {0.33, 0.5, 1.0} or "local" in recipe


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_fault_of_an_absent_worker_has_no_effect(recipe: str) -> None:
    """A worker is restarted only after its exit is noticed."""
    ended = lived(recipe, "kill worker 1 at 40ms, back after 2ms; kill worker 1 at 45ms")
    is_whole(ended, recipe)
    assert told(ended, "failed") == [(1, 0)]
    assert len(ended.of("fault_injected")) == 1
    assert [one["text"] for one in ended.of("warning")] == ["faults: worker 1 is not there (killed: worker 1)"]


def test_worker_restarts_once_per_failure() -> None:
    """A worker stops, and a kill while it is absent has no effect."""
    fault = "cut worker 1 for 150ms at 55ms; kill worker 1 at 260ms, back after 40ms"
    ended = simulated(3, training(12), "allreduce", net=NET, fault=fault, asks={"failure_timeout_s": 0.1})
    stopped = next(one["t"] for one in ended.of("warning") if "worker 1 stops" in one["text"])
    (again,) = [one["t"] for one in ended.of("membership") if one["what"] == "joined" and one["incarnation"] == 1]
    assert again >= stopped + pause_s(0)
    is_whole(ended, "allreduce", 12)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_run_ends_below_min_workers(recipe: str) -> None:
    with pytest.raises(LaunchError, match="expected: at least 3"):
        lived(recipe, "kill worker 1 at 47ms", asks={"min_workers": 3})
    is_whole(lived(recipe, "kill worker 1 at 47ms, back after 20ms", asks={"min_workers": 3}), recipe)


def test_the_batch_under_a_changed_membership() -> None:
    def steps(batch: str) -> int:
        ended = lived("allreduce", "kill worker 2 at 0s", epochs=1, asks={"on_resize": batch})
        return int(ended.of("end")[0]["step"])

    assert steps("global-batch") < steps("per-worker-batch")


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_worker_is_not_restarted_after_others_have_finished(recipe: str) -> None:
    ended = lived(recipe, "kill worker 1 at 47ms, back after 1h")
    assert ended.seconds < 1
    assert ended.found[1] is None
    is_whole(ended, recipe)


@pytest.mark.parametrize("recipe", ["async_sgd", "stale_synchronous(bound=1)"])
def test_run_that_restarted_workers_join_too_late_is_complete(recipe: str, tmp_path: Path) -> None:
    length, lefts = lived(recipe, "kill worker 1 at 1h").seconds, 0
    for back in thinned(range(0, 60, 2), 4, first=0):
        ended = lived(recipe, f"kill worker 1 at {length - 0.08:.6f}s, back after {10 + back}ms", folder=tmp_path)
        found = record(tmp_path / "run")
        assert found["failed"] is None
        assert found["samples"] == 2 * SAMPLES
        lefts += bool(told(ended, "left"))
        rmtree(tmp_path / "run")
    assert lefts


# --- workers declared failed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "fault"),
    each_value(
        ["allreduce", "local_sgd(every=3)", "async_sgd", THROUGH],
        ["pause worker 1 for 300ms at 55ms", "cut worker 1 for 300ms at 55ms"],
    ),
)
def test_silent_worker_is_declared_failed_and_rejoins(recipe: str, fault: str) -> None:
    ended = lived(recipe, fault, epochs=12, asks={"failure_timeout_s": 0.1})
    gone = next(one for one in ended.of("membership") if one["what"] == "failed")
    assert gone["worker"] == 1
    assert 0.055 + 0.08 <= gone["t"] <= 0.055 + 0.1 + 0.02, "the last beat was up to a fifth of the timeout before"
    assert "no heartbeat" in gone["why"]
    assert (1, 1) in told(ended, "joined")
    others = [one for one in ended.of("epoch") if 0.2 < one["t"] < 0.35]
    assert others, "the others go on meanwhile"
    assert all(one is not None for one in ended.found)
    is_whole(ended, recipe, 12)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_long_failure_timeout_loses_no_worker(recipe: str) -> None:
    plain = lived(recipe, "kill worker 1 at 1h")
    paused = lived(recipe, "kill worker 1 at 1h; pause worker 1 for 300ms at 55ms", asks={"failure_timeout_s": 1.0})
    assert not told(paused, "failed")
    assert paused.seconds == pytest.approx(plain.seconds + 0.3, abs=0.02)
    assert torch.equal(paused.found[0], plain.found[0])


def test_worker_killed_while_paused_restarts_unpaused() -> None:
    ended = lived("allreduce", "pause worker 1 for 1h at 50ms; kill worker 1 at 80ms, back after 20ms", epochs=3)
    assert (1, 1) in told(ended, "joined")
    assert ended.seconds < 1
    is_whole(ended, "allreduce", 3)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_workers_survive_a_killed_coordinator(recipe: str) -> None:
    plain = lived(recipe, "kill worker 1 at 1h")
    ended = lived(recipe, "kill worker 1 at 1h; kill coordinator at 40ms")
    assert [one["verb"] for one in ended.of("fault_injected")] == ["kill"]
    assert [torch.equal(*both) for both in zip(ended.found, plain.found, strict=True)] == [True] * 3
    meanwhile = "kill coordinator at 40ms, back after 100ms; kill worker 1 at 45ms, back after 10ms"
    ended = lived(recipe, meanwhile, epochs=6)
    assert (1, 1) in told(ended, "joined")
    is_whole(ended, recipe, 6)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_paused_coordinator_declares_no_worker_failed(recipe: str) -> None:
    asks = {"failure_timeout_s": 0.1}
    plain = lived(recipe, "kill worker 1 at 1h", epochs=6, asks=asks)
    ended = lived(recipe, "kill worker 1 at 1h; pause coordinator for 250ms at 40ms", epochs=6, asks=asks)
    assert [one["verb"] for one in ended.of("fault_injected")] == ["pause", "resume"]
    assert not told(ended, "failed")
    assert [torch.equal(*both) for both in zip(ended.found, plain.found, strict=True)] == [True] * 3


def test_silence_during_a_coordinator_pause_fails_no_worker() -> None:
    cut, asks = "cut worker 1 for 270ms at 30ms", {"failure_timeout_s": 0.1}
    assert told(lived("allreduce", cut, epochs=3, asks=asks), "failed")
    assert not told(lived("allreduce", cut + "; pause coordinator for 250ms at 40ms", epochs=3, asks=asks), "failed")


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_worker_killed_during_a_coordinator_pause_is_noticed_after_it(recipe: str) -> None:
    faults = "pause coordinator for 150ms at 40ms; kill worker 1 at 45ms, back after 10ms"
    ended = lived(recipe, faults, epochs=9)
    [gone] = [one for one in ended.of("membership") if one["what"] == "failed"]
    assert (gone["worker"], gone["t"]) == (1, 0.19)
    assert (1, 1) in told(ended, "joined")
    is_whole(ended, recipe, 9)
    ended = lived(recipe, faults + "; kill coordinator at 100ms, back after 20ms", epochs=9)
    assert (
        min(one["t"] for one in ended.of("membership") if (one["what"], one["process"]) == ("failed", "worker 1"))
        == 0.12
    )
    is_whole(ended, recipe, 9)


# --- unchanged runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "mortal"),
    [
        ("", False),
        ("slow link of worker 1 by 2 for 1h at 0s", False),
        ("pause worker 1 for 7s at 1s", False),
        ("pause worker 1 for 9500ms at 1s", True),
        ("cut worker 1 for 6s at 1s; cut worker 1 for 6s at 5s", True),
        ("kill server at 1s", True),
        ("pause server for 20s at 1s", False),
        ("kill worker at 1s", True),
        ("kill coordinator at 1s", True),
    ],
)
def test_runs_with_fixed_membership_are_unchanged(fault: str, mortal: bool) -> None:
    order = RunConfig(script=Path("train.py"), workers=2)
    simulation = Simulation(order, CostModel(STEP_S), faults=plan.parse(fault) if fault else ())
    assert simulation.workers_can_fail == mortal
    assert not replace(simulation, config=msgspec.structs.replace(order, workers=1)).workers_can_fail


def test_killed_single_worker_ends_the_run() -> None:
    with pytest.raises(LaunchError, match="worker 0 was killed at 0.025 s of virtual time, as --faults asked"):
        lived("allreduce", "kill worker 0 at 25ms", workers=1)


# --- incarnations in an engine ----------------------------------------------------------------------------------


class Scene:
    """An engine whose workers can fail and call a function."""

    def __init__(self, workers: int, links: Links | None = None, **more: Any) -> None:
        self.engine = Engine(workers, links or Links(topology.parse("instant"), workers), CostModel(0.0), **more)
        self.engine.workers_can_fail = True

    def lived(self, live: Callable[[Worker], None]) -> Engine:
        self.engine.run(live, self._own)
        return self.engine

    def _own(self, worker: Worker) -> ProcessState:
        torch.manual_seed(worker.number)
        return ProcessState(ModuleType("__main__"), [], io.StringIO(), io.StringIO())

    def kill(self, worker: int, at: float, back: float | None = None) -> None:
        self.engine.queue.schedule(at, lambda: self.engine.kill(self.engine.workers[worker]))
        if back is not None:
            self.engine.queue.schedule(at + back, lambda: self.engine.restart(worker))


def test_killed_worker_schedules_nothing_more() -> None:
    done: list[tuple[str, float]] = []

    def live(worker: Worker) -> None:
        try:
            worker.schedule(lambda: done.append(("begins", scene.engine.queue.now)))
            worker.compute(2.0)
            worker.schedule(lambda: done.append(("has worked", scene.engine.queue.now)))
        finally:
            worker.schedule(lambda: done.append(("ends", scene.engine.queue.now)))
            worker.compute(1.0)  # a killed worker computes no more

    scene = Scene(1)
    first = scene.engine.workers[0]
    scene.kill(0, 1.0, 0.0)
    scene.engine.attach(SimpleNamespace(restart_pending=lambda: scene.engine.queue.now <= 1.0))
    assert scene.lived(live).queue.now == pytest.approx(4.0)
    assert done == [("begins", 0.0), ("begins", 1.0), ("has worked", 3.0), ("ends", 3.0)]
    assert first.greenlet is not None
    assert first.greenlet.dead


def test_failures_do_not_change_other_workers_random_numbers_and_restarts_begin_with_the_seed() -> None:
    def drawn(dies: bool) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}

        def live(worker: Worker) -> None:
            mine = found.setdefault((worker.number, worker.incarnation), [])
            try:
                for _ in range(6):
                    with torch.no_grad():
                        mine.append(torch.rand(()).item())
                        worker.compute(1.0 + worker.number / 10)
                    assert torch.is_grad_enabled()
            finally:
                torch.rand(3)  # independent of the switches of workers

        scene = Scene(3)
        if dies:
            scene.kill(1, 3.05, 1.02)
        scene.lived(live)
        return found

    plain, found = drawn(False), drawn(True)
    assert [found[one, 0] for one in (0, 2)] == [plain[one, 0] for one in (0, 2)]
    assert found[1, 0] == plain[1, 0][:3]
    assert found[1, 1] == plain[1, 0]


@pytest.mark.parametrize("asks_at", [0.5, 2.0], ids=["under way", "not begun"])
def test_collective_with_a_failed_worker_is_aborted_once_the_failure_is_known(asks_at: float) -> None:
    links = Links(topology.parse("8kbit/s"), 2)
    scene = Scene(2, links)
    table = SimGroup(scene.engine, links, (0, 1))
    wires = [table.transport(one, inf) for one in scene.engine.workers]
    scene.kill(1, 1.0)
    scene.engine.queue.schedule(1.0, table.stop)
    scene.engine.queue.schedule(5.0, table.abort)
    told = []

    def live(worker: Worker) -> None:
        worker.compute(asks_at if worker.number == 0 else 0.1)
        with pytest.raises(BrokenTransportError):
            wires[worker.number].all_gather_bytes(bytes(1000))
        told.append(worker.now())

    scene.lived(live)
    assert told == [5.0]


def test_killed_worker_frees_its_processor() -> None:
    scene = Scene(2, processors=1.0)
    scene.kill(1, 2.0)
    assert scene.lived(lambda worker: worker.compute(4.0)).queue.now == pytest.approx(5.0)


def test_worker_killed_before_its_first_step_ends() -> None:
    scene = Scene(2)
    scene.kill(1, 0.0)
    assert scene.lived(lambda worker: worker.compute(1.0)).queue.now == pytest.approx(1.0)


def test_single_worker_does_not_run_ahead_of_its_kill() -> None:
    times: dict[int, list[float]] = {}

    def work(worker: int) -> None:
        training()(worker)
        times.setdefault(worker, []).append(now())

    ended = simulated(
        2, work, "allreduce", net=NET, fault="kill worker 1 at 0s; kill worker 0 at 80ms, back after 20ms"
    )
    assert all(one["t"] < 0.08 for one in ended.of("epoch") if one["step"] < 11)
    assert len(times[0]) == 1, "its first life did not finish"


def test_a_worker_that_is_alone_may_draw_a_layer_again() -> None:
    """Raise an error only where others remain: the server would add the change of each worker."""

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(regression(64), batch_size=4))
        for epoch in range(2):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if (epoch, step) == (1, 0):
                    nn.init.normal_(next(net.parameters()))
        return flat(net)

    fault = "kill worker 1 at 0.05s"
    assert simulated(2, work, "async_sgd", net=NET, fault=fault).found[0] is not None
    with pytest.raises(LaunchError, match="a layer was drawn again"):
        simulated(3, work, "async_sgd", net=NET, fault=fault)


@pytest.mark.parametrize("recipe", ["async_sgd(shards=2)", "stale_synchronous(bound=1)"])
@pytest.mark.parametrize("back", ["102ms", "106ms", "110ms"])
def test_a_worker_that_returns_at_the_end_of_an_epoch_averages_the_statistics_of_batch_norm(
    recipe: str, back: str
) -> None:
    """It has trained no batch, and does not know by itself which buffers change."""

    def work(_worker: int) -> list[float]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(48), batch_size=4), recipe=recipe)
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return [float(one) for name, one in net.state_dict().items() if "running" in name for one in one]

    ended = simulated(2, work, recipe, fault=f"kill worker 1 at 65ms, back after {back}")
    assert [one["sample_counts"]["once"] for one in ended.of("epoch")] == [48] * 3
    assert ended.found[0] == ended.found[1]


@pytest.mark.parametrize("fault", ["kill worker 1 at {:.6f}s", "kill worker 1 at {:.6f}s, back after 15ms"])
@pytest.mark.parametrize("moment", [0.45, 0.46, 0.468, 0.48])
def test_what_a_worker_has_when_the_others_close_an_epoch_over_a_stream_is_trained_in_the_next(
    fault: str, moment: float
) -> None:
    """The first epoch is closed at 0.48 of the time without a failure; its last round is exchanged in the second."""

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(84))

    def work(worker: int) -> list[list[float]]:
        table = nn.Embedding(84, 2)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        loader = stretto.distribute(table, optimizer, DataLoader(Numbers(), batch_size=8))
        for epoch in range(2):
            for numbers in loader:
                optimizer.zero_grad()
                table(numbers)[:, epoch].sum().backward()
                optimizer.step()
        stretto.finish()
        return (-table.weight.detach()).tolist()

    seconds = simulated(3, work, "local_sgd(every=3)", net=NET).seconds
    ended = simulated(3, work, "local_sgd(every=3)", net=NET, fault=fault.format(moment * seconds))
    counts = next(one for one in ended.found if one is not None)
    assert ended.of("epoch")[-1]["samples"] == 2 * 84
    assert all(second > 0.55 for first, second in counts if not first)  # a worker's share of a mean is 0.5 at most
    assert all(second > 0 for _, second in counts)
