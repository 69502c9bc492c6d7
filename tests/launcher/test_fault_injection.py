"""Fault injection in real runs: the simulator's syntax, a plan that depends on the seed, and real signals."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from run_place import Place

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.faults.plan import FaultEvent, parse, schedule
from stretto.launcher.config import check, planned, settled
from stretto.run_config import RunConfig

LIVE = "kill worker every 20s; pause worker 2 for 5s at 30s; kill server at 40s; kill coordinator at 60s"

LOOP = """
import os, pathlib, signal, time
rank, life = config.worker, config.incarnation
def count(name, text):
    path = pathlib.Path(name)
    return path.read_text().count(text) if path.exists() else 0
def until(condition):
    limit = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)
with open(f"lives-{rank}", "a") as file:
    file.write(f"{life} {time.perf_counter()}\\n")
ends(rank, life)
limit, last, longest = time.monotonic() + 90, time.monotonic(), 0.0
while not pathlib.Path("enough").exists():
    assert time.monotonic() < limit
    time.sleep(0.005)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print("stood still for", longest)
"""
RETURNED = """
def ends(rank, life):
    if life:
        until(lambda: count("heard", "ProcessExited"))
        pathlib.Path("enough").touch()
"""
"""Lets the run end once a worker was restarted and the coordinator has received the report of its exit."""
ALL_RETURNED = """
def ends(rank, life):
    if rank == 3:
        until(lambda: count(config.run + "/events.jsonl", "fault_injected") == 4)
        until(lambda: count("lives-0", "1 ") and count("lives-1", "1 ") and count("heard", "ProcessExited") == 2)
        pathlib.Path("enough").touch()
"""
"""Lets the run end once all faults were injected, and the two killed workers are back."""


@pytest.fixture
def place_with_coordinator(place: Place) -> Place:
    """Return a place whose runs have a coordinator."""
    place.coordinator()
    return place


def faults_of(folder: Path) -> list[dict[str, Any]]:
    """Return the injected faults from a run's events."""
    events = list(read_events(folder / "events.jsonl"))
    return [event for event in events if event["event"] == "fault_injected"]


def planned_until(seconds: float, seed: int, text: str = LIVE, workers: int = 4) -> list[tuple[float, FaultEvent]]:
    """Return the planned faults of a supervised run."""
    plan = schedule(parse(text), workers, 1, seed, supervised=True)
    return list(takewhile(lambda turn: turn[0] <= seconds, plan))


def test_faults_of_a_real_run_are_parsed() -> None:
    assert [str(fault) for fault in parse(LIVE)] == LIVE.split("; ")


@given(st.integers(0, 2**32 - 1))
def test_same_seed_makes_the_same_plan(seed: int) -> None:
    assert planned_until(300, seed) == planned_until(300, seed)
    assert planned_until(300, seed) != planned_until(300, seed + 1)


@settings(max_examples=examples(30))
@given(st.integers(0, 1000), st.integers(1, 5))
def test_kills_never_end_in_a_supervised_run(seed: int, workers: int) -> None:
    """Every worker returns and is killed again, and at times all of them are away."""
    struck = list(islice(schedule(parse("kill worker every 20s"), workers, 0, seed, supervised=True), 300))
    assert len(struck) == 300
    counts = Counter(event.numbers[0] for _, event in struck)
    assert set(counts) == set(range(workers))
    mean_s = struck[-1][0] / 300
    assert 20 * 0.7 < mean_s < 20 * 1.4


def test_worker_that_is_away_gets_no_fault() -> None:
    """Two workers are killed often and stay away for long; a worker that is away gets no fault."""
    plan = schedule(parse("kill worker every 1s, back after 3s"), 2, 0, 0, supervised=True)
    away: set[int] = set()
    for _, event in islice(plan, 400):
        worker = event.numbers[0]
        if event.verb == "kill":
            assert worker not in away and event.back_after_s == 3
            away.add(worker)
        else:
            assert (event.verb, event.back_after_s) == ("back", None)
            away.remove(worker)


@pytest.mark.parametrize(
    ("faults", "order", "words"),
    [
        ("cut workers 0-1 for 1s at 1s", {}, ("links are cut and slowed in simulations only", "got: cut workers 0-1")),
        ("slow link of worker 1 by 3 for 1s at 2s", {}, ("links are cut and slowed in simulations only",)),
        ("kill worker 4 at 1s", {}, ("there is no worker 4 of 4",)),
        ("kill server at 1s", {}, ("there is no parameter server",)),
        ("kill server 1 at 1s", {"recipe": "async_sgd"}, ("there is no server 1 of 1",)),
        ("kill worker 1 at 3s, back after 2s", {"restarts": 0}, ("no process is restarted with --restarts 0",)),
        ("kill coordinator at 1s", {"workers": 1}, ("there is no coordinator for the fault",)),
        ("pause coordinator for 1s at 1s", {"workers": 1}, ("there is no coordinator for the fault",)),
        ("kill everybody at 1s", {}, ("--faults cannot be read: everybody", "^^^^^^^^^")),
        ("", {}, ("something is missing at the end",)),
    ],
)
def test_faults_impossible_in_a_real_run_are_refused(
    place_with_coordinator: Place, faults: str, order: dict[str, Any], words: tuple[str, ...]
) -> None:
    asked = {"workers": 4} | order
    with pytest.raises(LaunchError) as raised:
        check(RunConfig(place_with_coordinator.script(""), faults=faults, **asked))
    assert [word for word in words if word not in str(raised.value)] == []


def test_plan_follows_the_run_configuration(place_with_coordinator: Place) -> None:
    order = settled(RunConfig(place_with_coordinator.script(""), workers=4, recipe="async_sgd", seed=3, faults=LIVE))
    check(order)
    assert list(islice(planned(order), 20)) == list(islice(schedule(parse(LIVE), 4, 1, 3, supervised=True), 20))
    assert list(planned(RunConfig(place_with_coordinator.script(""), workers=4))) == []


def test_killed_worker_is_restarted_and_paused_worker_continues(place_with_coordinator: Place) -> None:
    faults = "kill worker 1 at 4s; pause worker 2 for 800ms at 4s; kill worker 0 at 4200ms, back after 1500ms"
    folder = place_with_coordinator.run(ALL_RETURNED + LOOP, workers=4, faults=faults)
    done = faults_of(folder)
    assert [(one["verb"], one["worker"], one["kind"], one["numbers"]) for one in done] == [
        ("kill", 1, "worker", [1]),
        ("pause", 2, "worker", [2]),
        ("kill", 0, "worker", [0]),
        ("resume", 2, "worker", [2]),
    ]
    assert [one["t"] for one in done] == sorted(one["t"] for one in done)
    for one, due in zip(done, (4.0, 4.0, 4.2, 4.8), strict=True):
        assert due <= one["t"] < due + 10
        assert one["at"] > 0
    lives = [[line.split() for line in Path(f"lives-{rank}").read_text().splitlines()] for rank in range(4)]
    assert [one[-1][0] for one in lives] == ["1", "1", "0", "0"]
    stood = [float((folder / f"worker-{rank}.log").read_text().split()[-1]) for rank in range(4)]
    assert stood[2] >= 0.7
    gone = {what[1]: what for _, _, what in place_with_coordinator.messages_received()}
    assert gone == {
        0: ["ProcessExited", 0, 0, "killed by SIGKILL", True, 0],
        1: ["ProcessExited", 1, 0, "killed by SIGKILL", True, 0],
    }
    assert float(lives[0][-1][1]) - done[2]["at"] >= 1.5


def test_faults_are_shown_on_the_terminal_and_in_the_report(place_with_coordinator: Place) -> None:
    script = place_with_coordinator.script(RETURNED + LOOP)
    line = ("run", "-n", "2", "--faults", "kill worker 1 at 500ms", "--out", "here", script)
    _, err = place_with_coordinator.stretto(*line).communicate(timeout=90)
    assert b"stretto: fault: killed: worker 1\n" in err
    assert json.loads(Path("here/run.json").read_text())["faults"] == "kill worker 1 at 500ms"


def test_failed_worker_is_not_killed_again(place_with_coordinator: Place) -> None:
    """Two kills in a short time kill once."""
    script = place_with_coordinator.script(RETURNED + LOOP)
    faults = "kill worker 1 at 500ms; kill worker 1 at 510ms"
    _, err = place_with_coordinator.stretto("run", "-n", "2", "--faults", faults, "--out", "here", script).communicate(
        timeout=90
    )
    assert len(faults_of(Path("here"))) + err.count(b"faults: worker 1 is not running") == 2
    assert [what[1] for _, _, what in place_with_coordinator.messages_received() if what[0] == "ProcessExited"].count(
        1
    ) == 1


def test_coordinator_and_server_get_faults_too(place: Place) -> None:
    place.service()
    place.coordinator()
    text = """
import os, pathlib, time
limit, log, started = time.monotonic() + 90, pathlib.Path(config.run, "events.jsonl"), pathlib.Path("coordinators")
def is_restarted():
    texts = [path.read_text() if path.exists() else "" for path in (log, started)]
    runs = [pid for pid in (line.split()[0] for line in texts[1].splitlines()) if os.path.exists(f"/proc/{pid}")]
    return texts[0].count("fault_injected") == 2 and texts[0].count('"what":"joined"') == 2 and runs
while not is_restarted():
    assert time.monotonic() < limit
    time.sleep(0.01)
"""
    folder = place.run(text, workers=2, recipe="async_sgd", faults="kill server at 1500ms; kill coordinator at 1500ms")
    assert [(one["process"], one["kind"], one["numbers"]) for one in faults_of(folder)] == [
        ("server 0", "server", [0]),
        ("coordinator", "coordinator", [0]),
    ]


def test_kill_ends_a_run_without_recovery(place: Place) -> None:
    text = "import time\ntime.sleep(600)"
    with pytest.raises(LaunchError, match="worker 0 was killed by SIGKILL\n--faults sent it"):
        place.run(text, faults="kill worker at 500ms")
