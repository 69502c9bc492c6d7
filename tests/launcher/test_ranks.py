"""Runs whose workers have several ranks: the launcher starts, ends and restarts the ranks of a worker together."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from run_place import Place

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher import supervised

HEAD = """
import os, pathlib, time
from stretto.errors import MemberOutError
from stretto.membership.client import MembershipClient
from stretto.membership.messages import GenerationView, ReadyReport
from stretto.security import worker_keys

worker, rank, ranks, incarnation = config.worker, config.rank, config.ranks, config.incarnation
pathlib.Path(f"begun-{worker}-{rank}-{incarnation}").write_text(str(os.getpid()))
def until(*names):
    limit = time.monotonic() + 120
    while not all(pathlib.Path(name).exists() for name in names):
        assert time.monotonic() < limit, names
        time.sleep(0.01)
def until_exited(pid):
    limit = time.monotonic() + 120
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < limit, pid
        time.sleep(0.01)
def connect():
    keys, limit_s = worker_keys(config.keys), config.options.failure_timeout_s
    return MembershipClient(worker, incarnation, config.coordinator, keys, limit_s, 120.0, rank, ranks)
"""
MEMBERS = """
client = connect()
def is_formed_without_it():
    return '"members":[0]' in pathlib.Path(config.run, "events.jsonl").read_text()
while incarnation and not is_formed_without_it():  # a busy machine may restart a worker before the other continues
    time.sleep(0.01)
view = client.await_generation(ReadyReport(0))
assert (ranks, view.numbers) == (2, (0, 1)), view
until("begun-0-0-0", "begun-0-1-0", "begun-1-0-0", "begun-1-1-0")
if worker == 1 and incarnation == 0:
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)  # it does not notice that it is evicted
if worker == 1:
    until_exited(int(pathlib.Path("begun-1-0-0").read_text()))
step = 1
while len(view.members) == 1 or not view.members[1].incarnation:
    report = ReadyReport(view.generation, step, step)
    reply = None
    if client.aborted >= view.generation:
        reply = client.await_generation(report)
    elif client.pause_requested:
        reply = client.pause_between_steps(ReadyReport(view.generation, step, step, True))
    if isinstance(reply, GenerationView):
        view = reply
    step += 1
    time.sleep(0.01)
client.leave()
client.close()
"""
LEAVES = """
client = connect()
view = client.await_generation(ReadyReport(0))
until("begun-0-1-0")
if rank == 1:
    client.quit()
step = 1
while worker in view.numbers:
    if client.pause_requested:
        reply = client.pause_between_steps(ReadyReport(view.generation, step, step, True))
        view = reply if isinstance(reply, GenerationView) else view
    step += 1
    time.sleep(0.01)
client.close()
if rank == 0:
    until_exited(int(pathlib.Path("begun-0-1-0").read_text()))
"""


@pytest.fixture
def place_with_ranks(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place whose runs have workers of two ranks."""
    monkeypatch.setattr(place, "run", functools.partial(place.run, ranks=2))
    place.recovers = True
    return place


def changes(folder: Path) -> list[tuple[Any, ...]]:
    events = (event for event in read_events(folder / "events.jsonl") if event["event"] == "membership")
    return [
        (event["what"], event["members"]) if event["what"] == "formed" else (event["what"], event["worker"])
        for event in events
    ]


def test_a_rank_that_is_killed_ends_its_worker_which_is_restarted_as_a_whole(place_with_ranks: Place) -> None:
    place = place_with_ranks
    folder = place.run(HEAD + MEMBERS, workers=2, failure_timeout_s=20.0)
    happened = changes(folder)
    formations = [members for what, members in happened if what == "formed"]
    assert formations == [[0, 1], [0], [0, 1]], happened
    assert [change for change in happened if change[0] == "failed"] == [("failed", 1)]
    failure = next(event for event in read_events(folder / "events.jsonl") if event.get("what") == "failed")
    assert (failure["rank"], failure["why"]) == (1, "killed by SIGKILL")
    assert sorted(path.name for path in folder.glob("worker-*.log")) == [
        "worker-0-rank-1.log",
        "worker-0.log",
        "worker-1-rank-1.log",
        "worker-1.log",
    ]
    begun = sorted(path.name for path in place.folder.glob("begun-*"))
    assert begun == [f"begun-{name}" for name in ("0-0-0", "0-1-0", "1-0-0", "1-0-1", "1-1-0", "1-1-1")]
    place.await_ends()


def test_a_killed_rank_is_named_if_the_exit_of_one_that_noticed_it_comes_first(
    place_with_ranks: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "SIBLING_S", 10.0)
    noticed = """    if rank == 1:
        os._exit(75)
    until_exited(int(pathlib.Path("begun-1-1-0").read_text()))
    os.kill(os.getpid(), 9)
"""
    killed = MEMBERS[MEMBERS.index("    if rank == 1:") : MEMBERS.index("if worker == 1:\n")]
    folder = place_with_ranks.run(HEAD + MEMBERS.replace(killed, noticed), workers=2, failure_timeout_s=20.0)
    (failure,) = [event for event in read_events(folder / "events.jsonl") if event.get("what") == "failed"]
    assert (failure["worker"], failure.get("rank", 0), failure["why"]) == (1, 0, "killed by SIGKILL")


DECLARED = """
until("begun-0-0-0", "begun-0-1-0", "begun-1-0-0", "begun-1-1-0")
if (worker, rank, incarnation) == (0, 1, 0):
    import msgspec, zmq
    from stretto.membership.messages import Failures
    from stretto.security import use_keys
    socket = zmq.Context().socket(zmq.DEALER)
    use_keys(socket, b"worker 0", worker_keys(config.keys))
    socket.connect("tcp://" + config.coordinator)
    socket.send(msgspec.msgpack.encode(Failures(1, [(1, 0, 1, 1)])))
    assert socket.poll(60_000)
if worker == 1 and incarnation == 0:
    if rank == 1:
        os.kill(os.getpid(), 19)
    time.sleep(600)  # it does not notice that it is evicted
until("begun-1-0-1", "begun-1-1-1")
"""


def test_a_stopped_rank_that_is_declared_failed_ends_its_worker_which_is_restarted(place_with_ranks: Place) -> None:
    place_with_ranks.coordinator()
    place_with_ranks.run(HEAD + DECLARED, workers=2, failure_timeout_s=120.0)
    reports = [what for _, name, what in place_with_ranks.messages_received() if name == "launcher"]
    assert reports == [["ProcessExited", 1, 0, "was declared failed and ended", True, 1]]
    place_with_ranks.await_ends()


def test_the_error_of_a_rank_names_it_and_ends_the_run(place_with_ranks: Place) -> None:
    text = """
until("begun-0-0-0", "begun-0-1-0", "begun-1-0-0", "begun-1-1-0")
if (worker, rank) == (1, 1):
    raise ValueError("a wrong shape")
time.sleep(600)
"""
    with pytest.raises(LaunchError) as raised:
        place_with_ranks.run(HEAD + text, workers=2)
    assert str(raised.value).startswith("worker 1 rank 1 failed: ValueError: a wrong shape")
    assert "worker-1-rank-1.log" in str(raised.value)
    place_with_ranks.await_ends()


def test_a_worker_has_finished_when_all_its_ranks_have(place_with_ranks: Place) -> None:
    text = """
if rank == 1 or worker == 0:
    pathlib.Path(f"ended-{worker}-{rank}").touch()
else:
    for name in ("0-0", "0-1", "1-1"):
        until(f"ended-{name}")
        until_exited(int(pathlib.Path(f"begun-{name}-0").read_text()))
    time.sleep(1)  # in which the launcher would end a run that it holds for finished
    pathlib.Path("last").touch()
"""
    place_with_ranks.run(HEAD + text, workers=2)
    assert (place_with_ranks.folder / "last").exists()


FAULTY = """
limit, log = time.monotonic() + 120, pathlib.Path(config.run, "events.jsonl")
while not log.exists() or log.read_text().count("fault_injected") < 2:
    assert time.monotonic() < limit
    time.sleep(0.01)
"""


def test_injected_faults_are_for_one_rank_after_the_other(place_with_ranks: Place) -> None:
    faults = "kill worker 1 every 500ms, back after 1ms"
    folder = place_with_ranks.run(HEAD + FAULTY, workers=2, faults=faults, failure_timeout_s=20.0, restarts=100)
    struck = [event for event in read_events(folder / "events.jsonl") if event["event"] == "fault_injected"]
    assert [event["rank"] for event in struck[:2]] == [0, 1]
    assert [event["text"] for event in struck[:2]] == ["killed: worker 1 rank 0", "killed: worker 1 rank 1"]


def test_run_whose_worker_leaves_as_one_of_its_ranks_was_asked_to_is_not_complete(place_with_ranks: Place) -> None:
    with pytest.raises(LaunchError, match="all workers left before the end, as they were asked to"):
        place_with_ranks.run(HEAD + LEAVES, workers=1, failure_timeout_s=20.0)
