"""Who dies is started again, the others go on, and the coordinator hears of it; then the run ends as any other."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scene import Place, until

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.process_config import WorkerConfig

WITHIN_S = 3.0
HEAD = """
import os, pathlib, sys, time
from stretto.membership.coordinator import ASKED
rank, life = config.rank, config.incarnation
def until(*names):
    limit = time.monotonic() + 10
    while not all(pathlib.Path(name).exists() for name in names):
        assert time.monotonic() < limit, names
        time.sleep(0.01)
def say(name, text=""):
    pathlib.Path(name + ".new").write_text(text)
    os.rename(name + ".new", name)
def log(what, **carries):
    import json
    event = {"event": "membership", "t": 0.0, "what": what, "generation": 1} | carries
    with open(config.run + "/events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\\n")
"""


@pytest.fixture
def crew(place: Place) -> Place:
    """A place whose runs have a coordinator."""
    place.coordinator()
    return place


def told(place: Place) -> list[Any]:
    """What the coordinators were told."""
    return [what for _, name, what in place.heard() if name == "launcher 0"]


def failure(place: Place, text: str, **order: Any) -> str:
    """Why a run ends. Nothing is left of it."""
    with pytest.raises(LaunchError) as raised:
        place.run(HEAD + text, **order)
    assert place.left() == []
    return str(raised.value)


DIES = """
if rank == 1 and life < {deaths}:
    print("life", life, flush=True)
    {end}
if rank == 1:
    print("life", life)
    say("back")
until("back")
"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("os._exit(75)", "was taken for dead and stopped by itself"),
    ],
)
def test_who_dies_is_started_again_as_another_life(crew: Place, end: str, why: str) -> None:
    folder = crew.run(HEAD + DIES.format(deaths=2, end=end), workers=2)
    assert [line for line in (folder / "worker-1.log").read_text().splitlines() if line.startswith("life")] == [
        "life 0",
        "life 1",
        "life 2",
    ]
    assert told(crew) == [["ProcessExited", 1, 0, why, True], ["ProcessExited", 1, 1, why, True]]


def test_what_another_has_left_running_ends_with_it(crew: Place) -> None:
    crew.run(
        HEAD
        + """
if rank == 1 and life == 0:
    import subprocess
    say("child", str(subprocess.Popen(["sleep", "60"]).pid))
    os.kill(os.getpid(), 9)
if rank == 1:
    child = pathlib.Path("/proc", pathlib.Path("child").read_text(), "stat")
    say("back", str(child.exists() and child.read_text().split()[2] != "Z"))
until("back")
""",
        workers=2,
    )
    assert Path("back").read_text() == "False"


def test_without_restarts_the_others_go_on(crew: Place) -> None:
    text = """
if rank == 1:
    os.kill(os.getpid(), 9)
until("heard")
print("at the end")
"""
    folder = crew.run(HEAD + text, workers=3, restarts=0)
    assert [(folder / f"worker-{rank}.log").read_text() for rank in range(3)] == ["at the end\n", "", "at the end\n"]
    assert told(crew) == [["ProcessExited", 1, 0, "killed by SIGKILL", False]]


@pytest.mark.parametrize(("restarts", "lives"), [(0, 1), (2, 3)])
def test_fewer_than_the_least_number_end_the_run_with_the_cause(crew: Place, restarts: int, lives: int) -> None:
    text = """
if rank == 1:
    open(f"life-{life}", "w")
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    said = failure(crew, text, workers=3, min_workers=3, restarts=restarts)
    assert said.startswith("worker 1 was killed by SIGKILL\n")
    assert "2 of at least 3 workers are left (--min-workers)" in said
    assert ("it has been started again 2 times (--restarts)" in said) == (restarts == 2)
    assert len(list(crew.folder.glob("life-*"))) == lives
    assert said.endswith("worker-1.log")


def test_a_run_whose_workers_are_all_gone_fails_with_the_cause(crew: Place) -> None:
    said = failure(crew, "time.sleep(0.3 * rank)\nos.kill(os.getpid(), 9)", workers=2, restarts=0)
    assert said.startswith("worker 1 was killed by SIGKILL")


def test_an_error_of_the_script_ends_all_and_comes_before_deaths(crew: Place) -> None:
    text = """
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    raise ValueError("boom")
time.sleep(60)
"""
    began = time.monotonic()
    said = failure(crew, text, workers=3)
    assert said.startswith("worker 2 failed: ValueError: boom")
    assert time.monotonic() - began < 2 * WITHIN_S


def test_what_waits_in_vain_for_the_dead_is_a_consequence(crew: Place) -> None:
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    raise TransportError("nobody came")
time.sleep(60)
"""
    assert failure(crew, text, workers=3).startswith("worker 1 was killed by SIGKILL")


def test_death_that_others_have_recovered_from_is_not_the_cause_of_a_later_failure(crew: Place) -> None:
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    log("failed", worker=1, incarnation=0)
    log("formed", worker=-1000, incarnation=0)
    raise TransportError("nobody came")
time.sleep(60)
"""
    assert failure(crew, text, workers=3).startswith("worker 2 failed: TransportError: nobody came")


def test_error_of_an_earlier_life_is_not_the_cause_of_a_later_failure(crew: Place) -> None:
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    log("unused", event="error", worker=1, kind="ValueError", text="recovered", traceback="", consequence=False)
    os.kill(os.getpid(), 9)
if rank == 1:
    log("joined", worker=1, incarnation=1)
    say("back")
until("back")
if rank == 2:
    raise TransportError("nobody came")
time.sleep(60)
"""
    assert failure(crew, text, workers=3).startswith("worker 2 failed: TransportError: nobody came")


@pytest.mark.parametrize("code", [0, 3])
def test_worker_that_ends_its_own_process_is_not_restarted_but_ends_the_run(crew: Place, code: int) -> None:
    text = f"""
if rank == 1:
    os._exit({code})
time.sleep(60)
"""
    said = failure(crew, text, workers=3)
    assert said.startswith(f"worker 1 ended with exit code {code} ")


def test_a_life_that_is_out_says_so_and_no_error(crew: Place) -> None:
    text = """
from stretto.errors import MemberOutError
if rank == 1 and life == 0:
    raise MemberOutError("nobody heard of it for 10 s")
if rank == 1:
    say("back")
until("back")
"""
    folder = crew.run(HEAD + text, workers=2)
    events = list(read_events(folder / "events.jsonl"))
    assert [(one["event"], one["worker"], one["text"]) for one in events if one["event"] != "written"] == [
        ("warning", 1, "worker 1 stops by itself: nobody heard of it for 10 s")
    ]
    assert told(crew) == [["ProcessExited", 1, 0, "was taken for dead and stopped by itself", True]]


def test_a_worker_is_away_longer_each_time(crew: Place) -> None:
    text = """
if rank == 1:
    say(f"begun-{life}")
    if life < 3:
        os.kill(os.getpid(), 9)
until("begun-3")
"""
    crew.run(HEAD + text, workers=2)
    times = [Path(f"begun-{life}").stat().st_mtime for life in range(4)]
    away = [after - before for before, after in pairwise(times)]
    assert [spent > least for spent, least in zip(away, (0.2, 0.4, 0.8), strict=True)] == [True] * 3
    assert sum(away) < 1.4 + 3 * 0.7


def test_once_a_worker_is_at_the_end_nobody_is_started_again(crew: Place) -> None:
    text = """
assert life == 0
def wait_for_the_end_of(name):
    until(name)
    while pathlib.Path("/proc", pathlib.Path(name).read_text()).exists():
        time.sleep(0.01)
say(f"worker-{rank}", str(os.getpid()))
if rank == 1:
    wait_for_the_end_of("worker-0")
    os.kill(os.getpid(), 9)
if rank == 2:
    wait_for_the_end_of("worker-1")
    until("heard")
    time.sleep(0.5)
"""
    crew.run(HEAD + text, workers=3)
    assert told(crew) == [["ProcessExited", 1, 0, "killed by SIGKILL", False]]


def test_restarted_worker_that_has_not_joined_is_not_waited_for_at_the_end(crew: Place) -> None:
    text = """
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
if life:
    say("restarted")
    time.sleep(60)
until("restarted")
"""
    began = time.monotonic()
    crew.run(HEAD + text, workers=2)
    assert time.monotonic() - began < 2 * WITHIN_S


def test_who_was_asked_to_leave_has_not_come_to_the_end(crew: Place) -> None:
    text = """
if rank == 0:
    log("left", worker=0, incarnation=0, why=ASKED)
    say("quit", str(os.getpid()))
    sys.exit()
until("quit")
while pathlib.Path("/proc", pathlib.Path("quit").read_text()).exists():
    time.sleep(0.01)
if life == 0:
    os.kill(os.getpid(), 9)
say("whole")
"""
    crew.run(HEAD + text, workers=2)
    assert Path("whole").exists()


def test_a_run_that_all_have_left_before_its_end_is_no_whole_one(crew: Place) -> None:
    said = failure(crew, 'log("left", worker=rank, incarnation=0, why=ASKED)', workers=2)
    assert said.startswith("all workers have left before the end, as they were asked to")


def test_who_is_taken_for_dead_is_not_waited_for_at_the_end(crew: Place) -> None:
    text = """
if rank == 1:
    say("stopped")
    os.kill(os.getpid(), 19)
    time.sleep(60)
until("stopped")
log("failed", worker=1, incarnation=0)
"""
    began = time.monotonic()
    crew.run(HEAD + text, workers=2)
    assert time.monotonic() - began < 2 * WITHIN_S


def test_a_coordinator_that_dies_is_started_again_where_it_was_and_told_again(crew: Place) -> None:
    text = """
import signal
def lives(): return open("coordinators").read().split("\\n")[:-1] if os.path.exists("coordinators") else []
def heard(): return open("heard").read().count("ProcessExited") if os.path.exists("heard") else 0
def wait(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
wait(lambda: heard() >= 1)
if rank == 0:
    os.kill(int(lives()[0].split()[0]), 9)
wait(lambda: len(lives()) == 2 and heard() == 2)
say(f"well-{rank}", config.coordinator)
until("well-0", "well-1")
"""
    folder = crew.run(HEAD + text, workers=2)
    first, second = crew.coordinators()
    assert crew.heard() == [
        [pid, "launcher 0", ["ProcessExited", 1, 0, "killed by SIGKILL", True]] for pid in (first, second)
    ]
    assert Path("well-0").read_text() == Path("well-1").read_text()
    events = list(read_events(folder / "events.jsonl"))
    assert [(one["worker"], one["what"], one["incarnation"]) for one in events if one["event"] == "membership"] == [
        (-1000, "failed", 0),
        (-1000, "joined", 1),
    ]


def test_a_coordinator_that_dies_again_and_again_ends_the_run(crew: Place) -> None:
    (crew.folder / "service/sitecustomize.py").write_text(
        "import os\n"
        "if '\"type\":\"coordinator\"' in os.environ.get('STRETTO_CONFIG', ''):\n"
        "    os._exit(open('coordinators', 'a').write('.') + 2)"
    )
    said = failure(crew, "time.sleep(60)", workers=2, restarts=1)
    assert said.startswith("the coordinator ended with exit code 3 and named no error")
    assert Path("coordinators").read_text() == ".."


def test_a_killed_server_is_started_again_at_its_socket(place: Place) -> None:
    place.service(
        """
        pathlib.Path("servers").open("a").write(str(int(place.restarted)))
        said = f"server {len(pathlib.Path('servers').read_text())}"
        socket.socket(fileno=place.listen_fd).accept()[0].sendall(said.encode())
        time.sleep(60)
        """
    )
    place.coordinator()
    text = """
import signal, socket
def ask():
    host, port = config.servers[1].split(":")
    return socket.create_connection((host, int(port)), timeout=10).makefile().readline
if rank == 0:
    first, number = ask(), 0
    until("servers")
    time.sleep(0.2)
    os.kill(int(open("server-0.pid").read()), 9)
    assert ask()() == "server 2"
    say("asked")
until("asked")
"""
    folder = place.run(HEAD + text, workers=2, recipe="async_sgd")
    assert Path("servers").read_text() == "01"
    events = list(read_events(folder / "events.jsonl"))
    assert [(one["worker"], one["what"], one["incarnation"]) for one in events if one["event"] == "membership"] == [
        (-1, "failed", 0),
        (-1, "joined", 1),
    ]


def test_an_error_of_a_server_ends_the_run(place: Place) -> None:
    place.service('raise ValueError("in the shard")')
    place.coordinator()
    said = failure(place, "time.sleep(60)", workers=2, recipe="async_sgd")
    assert said.startswith("server 0 failed: ValueError: in the shard")


@pytest.mark.parametrize("plain", [False, True])
def test_workers_and_coordinator_are_told_what_they_must_know(crew: Place, plain: bool) -> None:
    (crew.folder / "old").mkdir()
    (crew.folder / "old/checkpoints").mkdir()
    text = """
import json
say(f"config-{rank}", os.environ["STRETTO_CONFIG"])
until("coordinators")
"""
    crew.run(
        HEAD + text,
        workers=2,
        plain=plain,
        failure_timeout_s=2.5,
        min_workers=2,
        max_workers=3,
        batch="global-batch",
        checkpoint_every="5m",
        resume=Path("old"),
        recipe="local_sgd(every=4)",
    )
    configs = [msgspec.json.decode(Path(f"config-{rank}").read_bytes(), type=WorkerConfig) for rank in range(2)]
    for config in configs:
        assert (config.incarnation, config.failure_timeout_s, config.on_resize) == (0, 2.5, "global-batch")
        assert (config.checkpoint_every, config.keep) == ("300s", 3)
        assert config.resume == str(crew.folder / "old")
        assert config.coordinator == configs[0].coordinator is not None
        assert (config.keys is None) == plain
    settings = json.loads(Path("coordinators").read_text().partition(" ")[2])
    assert settings == {
        "expected": 2,
        "min_workers": 2,
        "max_workers": 3,
        "asynchronous": False,
        "failure_timeout_s": 2.5,
        "batch": "global-batch",
        "checkpoint": "300s",
    }


@pytest.mark.parametrize(("order", "there"), [({"workers": 2}, True), ({"workers": 1}, False)])
def test_a_worker_by_itself_needs_no_coordinator(crew: Place, order: dict[str, Any], there: bool) -> None:
    text = "print(config.coordinator is not None)"
    folder = crew.run(text, **order)
    assert (folder / "worker-0.log").read_text() == f"{there}\n"
    assert (folder / "coordinator.log").exists() == there


def test_the_coordinator_is_heard_on_the_terminal(crew: Place) -> None:
    text = HEAD + DIES.format(deaths=1, end="os.kill(os.getpid(), 9)") + "until('heard')\ntime.sleep(0.3)"
    process = crew.stretto("run", "-n", "2", "--out", "here", crew.script(text))
    _, err = process.communicate(timeout=15)
    assert process.returncode == 0
    assert b"stretto: heard it\n" in err
    assert b"stretto: and more\n" in err
    assert Path("here/coordinator.log").read_text() == "stretto: heard it\nand more\n"
    assert "stretto: worker 1 is started again, for the 1. time" in Path("here/worker-1.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_launcher_ends_everything(crew: Place, number: signal.Signals, code: int) -> None:
    text = HEAD + "say(f'ready-{rank}')\ntime.sleep(60)"
    process = crew.stretto("run", "-n", "2", crew.script(text))
    until(lambda: Path("ready-0").exists() and Path("ready-1").exists() and Path("coordinators").exists())
    assert len(crew.left()) == 5  # the launcher, its warden, the coordinator, two workers
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=10) == code
    until(lambda: crew.left() == [], limit_s=WITHIN_S)
    assert time.monotonic() - began < WITHIN_S


def test_while_somebody_is_away_the_run_can_be_ended(crew: Place) -> None:
    text = HEAD + "say(f'ready-{rank}')\nif life or rank: time.sleep(60)\nuntil('ready-1')\nos.kill(os.getpid(), 9)"
    process = crew.stretto("run", "-n", "2", "--restarts", "30", crew.script(text))
    until(lambda: Path("heard").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=WITHIN_S) == 130
    assert crew.left() == []
    assert os.path.exists("ready-0")
