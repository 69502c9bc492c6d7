"""Simulated workers die, are taken for dead and come back: the live machines see to what becomes of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

import pytest
import torch
from drawn import TIMES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator.dying import (
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
from simulator.simulated import STEP_S, now, simulated
from torch import nn

import stretto
from stretto.errors import BrokenTransportError, LaunchError
from stretto.faults import plan
from stretto.launcher.config import RunConfig
from stretto.launcher.supervisor import pause_s
from stretto.report import incidents
from stretto.report.run_log import read
from stretto.report.run_record import record
from stretto.simulator.cluster import runtime
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.cluster.membership import NOTICED_S
from stretto.simulator.cluster.rendezvous import FORMED_S
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.network import topology
from stretto.simulator.network.topology import Links

# --- what holds whoever dies, and whenever ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*TOGETHER, THROUGH, *FREE])
def test_whenever_a_worker_dies_every_sample_counts_once(recipe: str) -> None:
    """Moments of all phases: meeting, computing, backward, exchanging, ends of passes; worker 0 has most to do."""
    length = lived(recipe, "kill worker 1 at 1h").seconds
    for number in range(10):
        moment, victim = number * length / 9, number % 2
        back = ", back after 15ms" * (number % 3 > 0)
        is_whole(lived(recipe, f"kill worker {victim} at {moment:.6f}s{back}"), recipe)


GIVER_DIES = (2, "kill worker 1 at 0.047918s, back after 0.036509s; kill worker 0 at 0.118634s, back after 0.069076s")
"""Worker 1 comes, and before it has got the state of worker 0 that is gone, too: nobody has one any more."""


@settings(max_examples=25 * TIMES)
@given(st.sampled_from(TOGETHER), faults())
@example("allreduce", GIVER_DIES)
def test_whoever_dies_every_sample_counts_once(recipe: str, drawn: tuple[int, str]) -> None:
    workers, fault = drawn
    is_whole(lived(recipe, fault, workers), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd", THROUGH])
def test_the_same_seed_gives_the_same_deaths_to_the_byte(recipe: str) -> None:
    fault = "kill worker every 60ms, back after 20ms; pause worker 1 for 200ms at 80ms; kill coordinator at 90ms"
    asks = {"failure_timeout_s": 0.1}
    logs = {lived(recipe, fault, 4, order=order, asks=asks).log for order in (None, None, [3, 1, 0, 2])}
    assert len(logs) == 1
    assert logs != {lived(recipe, fault, 4, seed=1, asks=asks).log}


@pytest.mark.parametrize(("recipe", "often"), [("allreduce", "300ms"), ("async_sgd", "25ms")])
def test_a_crowd_goes_on_under_deaths_that_come_again_and_again(recipe: str, often: str) -> None:
    ended = simulated(50, training(2, 401), recipe, net=NET, fault=f"kill worker every {often}, back after 20ms")
    assert len(told(ended, "failed")) >= 3
    assert max(life for _, life in told(ended, "joined")) >= 1
    assert {one["sample_counts"]["once"] for one in ended.of("epoch")} == {401}
    assert recipe == "async_sgd" or len({tuple(one.tolist()) for one in ended.found if one is not None}) == 1


# --- some deaths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd", THROUGH])
def test_who_dies_at_the_very_beginning_is_not_waited_for(recipe: str) -> None:
    ended = lived(recipe, "kill worker 1 at 0s", workers=2)
    assert ended.found[1] is None
    is_whole(ended, recipe)


def test_all_that_others_see_of_a_death() -> None:
    """Noticed, told, formed anew, what was lost dealt again; and who is born in its place takes part."""
    at = 0.035
    ended = lived("allreduce", f"kill worker 2 at {at}s, back after 50ms", workers=4, epochs=3)
    struck = [(one["t"], one["worker"], one["verb"], one["at"]) for one in ended.of("fault_injected")]
    assert struck == [(at, 2, "kill", at)]
    assert told(ended, "failed") == [(2, 0)]
    assert told(ended, "joined")[-1] == (2, 1)
    gone = next(one for one in ended.of("membership") if one["what"] == "failed")
    assert gone["t"] == pytest.approx(at + NOTICED_S)
    first, second = ended.of("generation_changed")
    assert first["members"] == [0, 1, 3]
    assert first["t"] == pytest.approx(at + NOTICED_S + 3 * LATENCY + FORMED_S + 2 * LATENCY, abs=1e-5)
    assert second["joined"] == [2]
    assert [(one["failed_worker"], one["incarnation"], one["samples"]) for one in ended.of("samples_reassigned")] == [
        (2, 0, 4)
    ]
    assert sum(one["samples"] for one in ended.of("end")) >= 3 * SAMPLES - 3 * 4, "a life's samples end with it"
    is_whole(ended, "allreduce", 3)


def test_the_report_tells_of_it(tmp_path: Path) -> None:
    lived("allreduce", "kill worker 2 at 55ms, back after 50ms", workers=4, folder=tmp_path)
    history = read(tmp_path / "run")
    assert history.ended
    (line,) = incidents.in_lines(history)
    assert line.startswith("worker 2, at 0.06")
    assert "failed (killed by SIGKILL, on purpose)" in line
    assert "back after" in line


def test_without_a_word_of_its_return_a_worker_stays_dead() -> None:
    ended = lived("allreduce", "kill worker 0 at 40ms")
    assert ended.found[0] is None
    assert told(ended, "joined") == [(0, 0), (1, 0), (2, 0)]
    assert [one["worker"] for one in ended.of("end")] == [1, 2]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd"])
def test_two_at_once(recipe: str) -> None:
    is_whole(lived(recipe, "kill workers 0,2 at 47ms, back after 20ms", workers=4), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd"])
def test_all_at_once_begin_anew(recipe: str) -> None:
    ended = lived(recipe, "kill workers 0-2 at 47ms, back after 20ms")
    assert {(0, 1), (1, 1), (2, 1)} <= set(told(ended, "joined"))
    assert all(one is not None for one in ended.found)
    is_whole(ended, recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_an_only_worker_that_is_cut_off_stops_before_another_begins_anew(recipe: str) -> None:
    """Otherwise both would come to an end, with models of their own."""
    fault = "kill worker 1 at 60ms, back after 94ms; cut workers 0 for 239ms at 140ms"
    ended = lived(recipe, fault, 2, 3, asks={"failure_timeout_s": 0.2})
    assert {(0, 1), (1, 1)} <= set(told(ended, "joined"))
    is_whole(ended, recipe, 3)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_when_nobody_is_left_the_run_ends_with_one_error(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        lived(recipe, "kill workers 0-2 at 47ms", folder=tmp_path)
    assert "the run cannot go on at 0.057 s of virtual time: too few workers are left" in str(raised.value)
    assert "got: 0 of 3" in str(raised.value)
    assert len(read(tmp_path / "run").of("error")) == 1


@pytest.mark.parametrize("coordinator", ["kill coordinator at 40ms, back after 1s", "pause coordinator for 1s at 40ms"])
@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd", THROUGH])
def test_when_nobody_is_left_the_coordinator_says_so_as_soon_as_it_can(recipe: str, coordinator: str) -> None:
    with pytest.raises(LaunchError, match=r"cannot go on at 1.04 s of virtual time: too few workers are left"):
        lived(recipe, f"{coordinator}; kill workers 0-2 at 47ms")


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        ("allreduce", "kill worker every 2ms, back after 5ms"),
        ("async_sgd", "kill server 0 every 5ms, back after 5ms"),
    ],
)
def test_deaths_that_let_nobody_come_further_end_the_run(
    recipe: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be simulated for ever."""
    monkeypatch.setattr(runtime, "MOST_DEATHS", 100)
    with pytest.raises(LaunchError, match=r"comes no further than \d+ samples at .* s of virtual time") as raised:
        lived(recipe, fault, 2, folder=tmp_path)
    assert "got: 100 deaths since" in str(raised.value)
    assert len(read(tmp_path / "run").of("error")) == 1


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_as_many_deaths_with_samples_between_them_are_survived(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_DEATHS", 3)
    ended = lived(recipe, "kill worker 1 every 40ms, back after 5ms", 2, 8)
    is_whole(ended, recipe, 8)
    assert len(told(ended, "failed")) > 20


def test_who_is_killed_when_it_has_left_takes_nothing_up_again(tmp_path: Path) -> None:
    """Its next life is of no generation, though its number is: the others have done with everything."""
    recipe = ALSO_THROUGH[0]
    fault = "kill worker 0 at 217.844ms, back after 19.975ms; pause server 0 for 87.162ms at 152.324ms"
    is_whole(lived(recipe, fault, 4, folder=tmp_path), recipe)
    assert record(tmp_path / "run")["failed"] is None
    assert told(lived(recipe, fault, 4), "joined") == told(lived(recipe, "kill worker 1 at 1h", 4), "joined")


@pytest.mark.parametrize("recipe", [*TOGETHER, *FREE, THROUGH])
@pytest.mark.parametrize(
    "fault",
    ["kill worker 1 at 47ms, back after 9ms", "kill worker 0 at 90ms, back after 9ms", "pause worker 2 for 1s at 30ms"],
)
def test_nobody_takes_up_a_stream_in_the_middle(recipe: str, fault: str) -> None:
    """Who comes back to one stays out, and the others go on."""

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
    assert ended.found[victim] is None
    assert None not in [ended.found[one] for one in range(3) if one != victim]
    assert len(ended.of("epoch")) == 3


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_who_is_not_there_is_not_struck(recipe: str) -> None:
    """It comes back no sooner than its end is noticed."""
    ended = lived(recipe, "kill worker 1 at 40ms, back after 2ms; kill worker 1 at 45ms")
    is_whole(ended, recipe)
    assert told(ended, "failed") == [(1, 0)]
    assert len(ended.of("fault_injected")) == 1
    assert [one["text"] for one in ended.of("warning")] == ["faults: worker 1 is not there (killed: worker 1)"]


def test_who_comes_back_does_so_once_for_each_death() -> None:
    """A worker stops by itself, and is killed while it is not there: that nobody comes back from."""
    fault = "cut worker 1 for 150ms at 55ms; kill worker 1 at 260ms, back after 40ms"
    ended = simulated(3, training(12), "allreduce", net=NET, fault=fault, asks={"failure_timeout_s": 0.1})
    stopped = next(one["t"] for one in ended.of("warning") if "worker 1 stops" in one["text"])
    (again,) = [one["t"] for one in ended.of("membership") if one["what"] == "joined" and one["incarnation"] == 1]
    assert again >= stopped + pause_s(0)
    is_whole(ended, "allreduce", 12)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_fewer_than_are_asked_for_do_not_go_on(recipe: str) -> None:
    with pytest.raises(LaunchError, match="expected: at least 3"):
        lived(recipe, "kill worker 1 at 47ms", asks={"min_workers": 3})
    is_whole(lived(recipe, "kill worker 1 at 47ms, back after 20ms", asks={"min_workers": 3}), recipe)


def test_the_batch_under_a_changed_membership() -> None:
    def steps(batch: str) -> int:
        ended = lived("allreduce", "kill worker 2 at 0s", epochs=1, asks={"batch": batch})
        return int(ended.of("end")[0]["step"])

    assert steps("global-batch") < steps("per-worker-batch")


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_who_comes_when_others_have_ended_is_not_born(recipe: str) -> None:
    ended = lived(recipe, "kill worker 1 at 47ms, back after 1h")
    assert ended.seconds < 1
    assert ended.found[1] is None
    is_whole(ended, recipe)


@pytest.mark.parametrize("recipe", ["async_sgd", "stale_synchronous(bound=1)"])
def test_a_run_that_some_come_too_late_to_has_come_to_its_end(recipe: str, tmp_path: Path) -> None:
    length, lefts = lived(recipe, "kill worker 1 at 1h").seconds, 0
    for back in range(0, 60, 2):
        ended = lived(recipe, f"kill worker 1 at {length - 0.08:.6f}s, back after {10 + back}ms", folder=tmp_path)
        found = record(tmp_path / "run")
        assert found["failed"] is None
        assert found["samples"] == 2 * SAMPLES
        lefts += bool(told(ended, "left"))
        rmtree(tmp_path / "run")
    assert lefts


# --- who is only taken for dead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd", THROUGH])
@pytest.mark.parametrize("fault", ["pause worker 1 for 300ms at 55ms", "cut worker 1 for 300ms at 55ms"])
def test_who_is_not_heard_of_is_taken_for_dead_and_comes_back_as_a_newcomer(recipe: str, fault: str) -> None:
    ended = lived(recipe, fault, epochs=12, asks={"failure_timeout_s": 0.1})
    gone = next(one for one in ended.of("membership") if one["what"] == "failed")
    assert gone["worker"] == 1
    assert 0.055 + 0.08 <= gone["t"] <= 0.055 + 0.1 + 0.02, "the last beat was up to a fifth of the timeout before"
    assert "nothing was heard of it" in gone["why"]
    assert (1, 1) in told(ended, "joined")
    others = [one for one in ended.of("epoch") if 0.2 < one["t"] < 0.35]
    assert others, "the others go on meanwhile"
    assert all(one is not None for one in ended.found)
    is_whole(ended, recipe, 12)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_who_is_patient_enough_loses_nobody(recipe: str) -> None:
    plain = lived(recipe, "kill worker 1 at 1h")
    paused = lived(recipe, "kill worker 1 at 1h; pause worker 1 for 300ms at 55ms", asks={"failure_timeout_s": 1.0})
    assert not told(paused, "failed")
    assert paused.seconds == pytest.approx(plain.seconds + 0.3, abs=0.02)
    assert torch.equal(paused.found[0], plain.found[0])


def test_who_dies_while_it_is_stopped_is_awake_when_it_is_born_again() -> None:
    ended = lived("allreduce", "pause worker 1 for 1h at 50ms; kill worker 1 at 80ms, back after 20ms", epochs=3)
    assert (1, 1) in told(ended, "joined")
    assert ended.seconds < 1
    is_whole(ended, "allreduce", 3)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_workers_do_not_miss_a_coordinator_that_dies(recipe: str) -> None:
    plain = lived(recipe, "kill worker 1 at 1h")
    ended = lived(recipe, "kill worker 1 at 1h; kill coordinator at 40ms")
    assert [one["verb"] for one in ended.of("fault_injected")] == ["kill"]
    assert [torch.equal(*both) for both in zip(ended.found, plain.found, strict=True)] == [True] * 3
    meanwhile = "kill coordinator at 40ms, back after 100ms; kill worker 1 at 45ms, back after 10ms"
    ended = lived(recipe, meanwhile, epochs=6)
    assert (1, 1) in told(ended, "joined")
    is_whole(ended, recipe, 6)


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_a_coordinator_that_stood_still_takes_nobody_for_dead(recipe: str) -> None:
    asks = {"failure_timeout_s": 0.1}
    plain = lived(recipe, "kill worker 1 at 1h", epochs=6, asks=asks)
    ended = lived(recipe, "kill worker 1 at 1h; pause coordinator for 250ms at 40ms", epochs=6, asks=asks)
    assert [one["verb"] for one in ended.of("fault_injected")] == ["pause", "go_on"]
    assert not told(ended, "failed")
    assert [torch.equal(*both) for both in zip(ended.found, plain.found, strict=True)] == [True] * 3


def test_that_nobody_could_be_heard_is_nobodys_fault() -> None:
    cut, asks = "cut worker 1 for 270ms at 30ms", {"failure_timeout_s": 0.1}
    assert told(lived("allreduce", cut, epochs=3, asks=asks), "failed")
    assert not told(lived("allreduce", cut + "; pause coordinator for 250ms at 40ms", epochs=3, asks=asks), "failed")


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_who_dies_while_the_coordinator_stands_still_is_missed_when_it_goes_on(recipe: str) -> None:
    faults = "pause coordinator for 150ms at 40ms; kill worker 1 at 45ms, back after 10ms"
    ended = lived(recipe, faults, epochs=9)
    [gone] = [one for one in ended.of("membership") if one["what"] == "failed"]
    assert (gone["worker"], gone["t"]) == (1, 0.19)
    assert (1, 1) in told(ended, "joined")
    is_whole(ended, recipe, 9)
    ended = lived(recipe, faults + "; kill coordinator at 100ms, back after 20ms", epochs=9)
    assert min(one["t"] for one in ended.of("membership") if (one["what"], one["worker"]) == ("failed", 1)) == 0.12
    is_whole(ended, recipe, 9)


# --- what is left as it was ---------------------------------------------------------------------------------------


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
def test_runs_whose_members_cannot_change_are_as_they_were(fault: str, mortal: bool) -> None:
    order = RunConfig(script=Path("train.py"), workers=2)
    simulation = Simulation(order, CostModel(STEP_S), faults=plan.parse(fault) if fault else ())
    assert simulation.workers_can_fail == mortal
    assert not replace(simulation, order=replace(order, workers=1)).workers_can_fail


def test_an_only_worker_takes_the_run_with_it() -> None:
    with pytest.raises(LaunchError, match="worker 0 was killed at 0.025 s of virtual time, as --faults asked"):
        lived("allreduce", "kill worker 0 at 25ms", workers=1)


# --- lives in a world ---------------------------------------------------------------------------------------------


class Scene:
    """A world whose workers may die, and do what a function says."""

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


def test_nothing_comes_of_what_the_dead_were_about_to_do() -> None:
    done: list[tuple[str, float]] = []

    def live(worker: Worker) -> None:
        try:
            worker.schedule(lambda: done.append(("begins", scene.engine.queue.now)))
            worker.compute(2.0)
            worker.schedule(lambda: done.append(("has worked", scene.engine.queue.now)))
        finally:
            worker.schedule(lambda: done.append(("ends", scene.engine.queue.now)))
            worker.compute(1.0)  # who is dead has no time left

    scene = Scene(1)
    first = scene.engine.workers[0]
    scene.kill(0, 1.0, 0.0)
    scene.engine.restart_pending = lambda: scene.engine.queue.now <= 1.0
    assert scene.lived(live).queue.now == pytest.approx(4.0)
    assert done == [("begins", 0.0), ("begins", 1.0), ("has worked", 3.0), ("ends", 3.0)]
    assert first.greenlet is not None
    assert first.greenlet.dead


def test_the_others_draw_on_as_if_nobody_had_died_and_who_is_born_draws_from_the_beginning() -> None:
    def drawn(dies: bool) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}

        def live(worker: Worker) -> None:
            mine = found.setdefault((worker.number, worker.life), [])
            try:
                for _ in range(6):
                    with torch.no_grad():
                        mine.append(torch.rand(()).item())
                        worker.compute(1.0 + worker.number / 10)
                    assert torch.is_grad_enabled()
            finally:
                torch.rand(3)  # of its own numbers, whose turn it ever was

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
def test_no_exchange_with_the_dead_ends_and_who_waits_is_told_when_it_is_known(asks_at: float) -> None:
    links = Links(topology.parse("8kbit/s"), 2)
    scene = Scene(2, links)
    table = SimGroup(scene.engine, links, (0, 1))
    wires = [table.wire(one, inf) for one in scene.engine.workers]
    scene.kill(1, 1.0)
    scene.engine.queue.schedule(1.0, table.end)
    scene.engine.queue.schedule(5.0, table.abort)
    told = []

    def live(worker: Worker) -> None:
        worker.compute(asks_at if worker.number == 0 else 0.1)
        with pytest.raises(BrokenTransportError):
            wires[worker.number].all_gather_bytes(bytes(1000))
        told.append(worker.now())

    scene.lived(live)
    assert told == [5.0]


def test_the_dead_take_nothing_of_a_processor() -> None:
    scene = Scene(2, processors=1.0)
    scene.kill(1, 2.0)
    assert scene.lived(lambda worker: worker.compute(4.0)).queue.now == pytest.approx(5.0)


def test_a_life_that_never_had_its_turn_can_end() -> None:
    scene = Scene(2)
    scene.kill(1, 0.0)
    assert scene.lived(lambda worker: worker.compute(1.0)).queue.now == pytest.approx(1.0)


def test_a_lone_worker_does_not_run_ahead_of_its_death() -> None:
    times: dict[int, list[float]] = {}

    def work(worker: int) -> None:
        training()(worker)
        times.setdefault(worker, []).append(now())

    ended = simulated(
        2, work, "allreduce", net=NET, fault="kill worker 1 at 0s; kill worker 0 at 80ms, back after 20ms"
    )
    assert all(one["t"] < 0.08 for one in ended.of("epoch") if one["step"] < 11)
    assert len(times[0]) == 1, "its first life did not come to its end"
