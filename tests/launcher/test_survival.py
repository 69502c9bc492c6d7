"""A failed worker is restarted while the others continue, the coordinator is notified, and the run ends normally."""

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
from run_place import Place, until

from stretto.checkpoint.storage import Checkpoints, State
from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher import supervisor
from stretto.launcher.exit_notifier import ExitNotifier
from stretto.process_config import WorkerConfig
from stretto.run_config import decode_path

WITHIN_S = 60.0
HEAD = """
import os, pathlib, sys, time
from stretto.membership.worker_status import ReportedError, status
rank, life = config.worker, config.incarnation
def until(*names):
    limit = time.monotonic() + 60
    while not all(pathlib.Path(name).exists() and pathlib.Path(name).stat().st_size for name in names):
        assert time.monotonic() < limit, names
        time.sleep(0.01)
def until_heard(count):
    limit = time.monotonic() + 60
    while not os.path.exists("heard") or open("heard").read().count("ProcessExited") < count:
        assert time.monotonic() < limit
        time.sleep(0.01)
def until_exited(name):
    until(name)
    while pathlib.Path("/proc", pathlib.Path(name).read_text()).exists():
        time.sleep(0.01)
def say(name, text="yes"):
    pathlib.Path(name + ".new").write_text(text)
    os.rename(name + ".new", name)
def declare(generation, *failed):
    import msgspec, zmq
    from stretto.membership.messages import Failures
    from stretto.security import use_keys, worker_keys
    socket = zmq.Context().socket(zmq.DEALER)
    use_keys(socket, b"worker %d" % rank, worker_keys(config.keys))
    socket.connect("tcp://" + config.coordinator)
    socket.send(msgspec.msgpack.encode(Failures(generation, list(failed))))
    assert socket.poll(60_000)
"""


@pytest.fixture
def place_with_coordinator(place: Place) -> Place:
    """Return a place whose runs have a coordinator."""
    place.coordinator()
    return place


def launcher_messages(place: Place) -> list[Any]:
    """Return the messages that the coordinators received from the launcher."""
    return [what for _, name, what in place.messages_received() if name == "launcher"]


def failure(place: Place, text: str, **order: Any) -> str:
    """Return the error of a run; check that none of its processes is left."""
    with pytest.raises(LaunchError) as raised:
        place.run(HEAD + text, **order)
    place.await_ends()
    return str(raised.value)


DIES = """
if rank == 1 and life < {deaths}:
    print("life", life, flush=True)
    {end}
if rank == 1:
    print("life", life)
    until_heard({deaths})
    say("back")
until("back")
"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("os._exit(75)", "was declared failed and ended"),
    ],
)
def test_failed_worker_is_restarted_as_a_new_incarnation(place_with_coordinator: Place, end: str, why: str) -> None:
    folder = place_with_coordinator.run(HEAD + DIES.format(deaths=2, end=end), workers=2)
    assert [line for line in (folder / "worker-1.log").read_text().splitlines() if line.startswith("life")] == [
        "life 0",
        "life 1",
        "life 2",
    ]
    assert launcher_messages(place_with_coordinator) == [
        ["ProcessExited", 1, 0, why, True, 0],
        ["ProcessExited", 1, 1, why, True, 0],
    ]


def test_children_of_a_failed_worker_end_with_it(place_with_coordinator: Place) -> None:
    place_with_coordinator.run(
        HEAD
        + """
if rank == 1 and life == 0:
    import subprocess
    say("child", str(subprocess.Popen(["sleep", "600"]).pid))
    os.kill(os.getpid(), 9)
if rank == 1:
    child = pathlib.Path("/proc", pathlib.Path("child").read_text(), "stat")
    say("back", str(child.exists() and child.read_text().split()[2] != "Z"))
until("back")
""",
        workers=2,
    )
    assert Path("back").read_text() == "False"


def test_others_continue_without_restarts(place_with_coordinator: Place) -> None:
    text = """
if rank == 1:
    os.kill(os.getpid(), 9)
until("heard")
print("at the end")
"""
    folder = place_with_coordinator.run(HEAD + text, workers=3, restarts=0)
    assert [(folder / f"worker-{rank}.log").read_text() for rank in range(3)] == ["at the end\n", "", "at the end\n"]
    assert launcher_messages(place_with_coordinator) == [["ProcessExited", 1, 0, "killed by SIGKILL", False, 0]]


@pytest.mark.parametrize(("returns", "lives"), [(True, 4), (False, 2)])
def test_worker_that_stays_out_of_an_epoch_uses_up_no_restart(
    place_with_coordinator: Place, returns: bool, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again for a later epoch, after longer pauses, or not at all if it can't join any."""
    monkeypatch.setattr(supervisor, "OUT_S", 0.01)
    text = f"""
from stretto.errors import StaysOutError
if rank == 1:
    say(f"life-{{life}}")
    if life == 0:
        os.kill(os.getpid(), 9)
    if life < 3:
        raise StaysOutError("an epoch is under way", returns={returns})
    say("back")
until_heard({lives - 1 if returns else lives})
if {returns}:
    until("back")
"""
    place_with_coordinator.run(HEAD + text, workers=2, restarts=1)
    assert len(list(Path().glob("life-*"))) == lives
    told = [message[3:5] for message in launcher_messages(place_with_coordinator)]
    waits = "could not join the epoch under way and ended"
    assert told == [["killed by SIGKILL", True], *([[waits, True]] * 2 if returns else [[waits, False]])]


@pytest.mark.parametrize(("restarts", "lives"), [(0, 1), (2, 3)])
def test_run_below_the_minimum_of_workers_ends_with_the_cause(
    place_with_coordinator: Place, restarts: int, lives: int
) -> None:
    text = """
if rank == 1:
    open(f"life-{life}", "w")
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    message = failure(place_with_coordinator, text, workers=3, min_workers=3, restarts=restarts)
    assert message.startswith("worker 1 was killed by SIGKILL\n")
    assert "2 of at least 3 workers are left (--min-workers)" in message
    assert ("it was restarted 2 times (--restarts)" in message) == (restarts == 2)
    assert len(list(place_with_coordinator.folder.glob("life-*"))) == lives
    assert message.endswith("worker-1.log")


FAILING_IN_TURN = """
say(f"pid-{rank}", str(os.getpid()))
if rank == 1:
    until_exited("pid-0")
os.kill(os.getpid(), 9)
"""


def test_run_whose_workers_all_failed_ends_with_the_cause(place_with_coordinator: Place) -> None:
    message = failure(place_with_coordinator, FAILING_IN_TURN, workers=2, restarts=0)
    assert message.startswith("worker 1 was killed by SIGKILL")


def test_error_of_the_script_ends_all_workers_and_precedes_failures(place_with_coordinator: Place) -> None:
    text = """
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    raise ValueError("boom")
time.sleep(600)
"""
    began = time.monotonic()
    message = failure(place_with_coordinator, text, workers=3)
    assert message.startswith("worker 2 failed: ValueError: boom")
    assert time.monotonic() - began < 2 * WITHIN_S


def test_timeout_of_a_worker_waiting_for_a_failed_one_is_a_consequence(place_with_coordinator: Place) -> None:
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    raise TransportError("nobody came")
time.sleep(600)
"""
    assert failure(place_with_coordinator, text, workers=3).startswith("worker 1 was killed by SIGKILL")


def test_failure_that_others_recovered_from_is_not_the_cause_of_a_later_one(
    place_with_coordinator: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ExitNotifier.watch

    def watch_and_tell(notifier: ExitNotifier) -> None:
        watch(notifier)
        if notifier.failures().failed:
            Path("known").write_text("yes")

    monkeypatch.setattr(ExitNotifier, "watch", watch_and_tell)
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
until("heard")
if rank == 2:
    declare(2, (1, 0, 1, 0))
    until("known")
    raise TransportError("nobody came")
time.sleep(600)
"""
    assert failure(place_with_coordinator, text, workers=3).startswith("worker 2 failed: TransportError: nobody came")


def test_error_of_an_earlier_incarnation_is_not_the_cause_of_a_later_failure(place_with_coordinator: Place) -> None:
    text = """
from stretto.errors import TransportError
if rank == 1 and life == 0:
    status.fail(ReportedError("ValueError", "recovered", ""))
    os.kill(os.getpid(), 9)
if rank == 1:
    status.join()
    say("back")
until("back")
if rank == 2:
    raise TransportError("nobody came")
time.sleep(600)
"""
    assert failure(place_with_coordinator, text, workers=3).startswith("worker 2 failed: TransportError: nobody came")


@pytest.mark.parametrize("code", [0, 3])
def test_worker_that_ends_its_own_process_is_not_restarted_but_ends_the_run(
    place_with_coordinator: Place, code: int
) -> None:
    text = f"""
if rank == 1:
    os._exit({code})
time.sleep(600)
"""
    message = failure(place_with_coordinator, text, workers=3)
    assert message.startswith(f"worker 1 ended with exit code {code} ")


def test_evicted_incarnation_reports_its_eviction_and_no_error(place_with_coordinator: Place) -> None:
    text = """
from stretto.errors import MemberOutError
if rank == 1 and life == 0:
    raise MemberOutError("nobody heard of it for 10 s")
if rank == 1:
    until_heard(1)
    say("back")
until("back")
"""
    folder = place_with_coordinator.run(HEAD + text, workers=2)
    events = list(read_events(folder / "events.jsonl"))
    assert [(one["event"], one["worker"], one["text"]) for one in events if one["event"] != "written"] == [
        ("warning", 1, "worker 1 stops itself: nobody heard of it for 10 s")
    ]
    assert launcher_messages(place_with_coordinator) == [
        ["ProcessExited", 1, 0, "was declared failed and ended", True, 0]
    ]


def test_delay_of_restarts_grows(place_with_coordinator: Place) -> None:
    text = """
if rank == 1:
    say(f"begun-{life}")
    if life < 3:
        os.kill(os.getpid(), 9)
until("begun-3")
"""
    place_with_coordinator.run(HEAD + text, workers=2)
    times = [Path(f"begun-{life}").stat().st_mtime for life in range(4)]
    away = [after - before for before, after in pairwise(times)]
    assert [spent > least for spent, least in zip(away, (0.2, 0.4, 0.8), strict=True)] == [True] * 3
    assert sum(away) < WITHIN_S


def test_no_worker_is_restarted_once_one_has_finished(place_with_coordinator: Place) -> None:
    text = """
assert life == 0
say(f"worker-{rank}", str(os.getpid()))
if rank == 1:
    until_exited("worker-0")
    os.kill(os.getpid(), 9)
if rank == 2:
    until_exited("worker-1")
    until("heard")
    time.sleep(0.5)
"""
    place_with_coordinator.run(HEAD + text, workers=3)
    assert launcher_messages(place_with_coordinator) == [["ProcessExited", 1, 0, "killed by SIGKILL", False, 0]]


def test_restarted_worker_that_has_not_joined_is_not_waited_for_at_the_end(place_with_coordinator: Place) -> None:
    text = """
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
if life:
    say("restarted")
    time.sleep(600)
until("restarted")
"""
    began = time.monotonic()
    place_with_coordinator.run(HEAD + text, workers=2)
    assert time.monotonic() - began < 2 * WITHIN_S


def test_worker_that_was_asked_to_leave_has_not_finished(place_with_coordinator: Place) -> None:
    text = """
if rank == 0:
    status.leave()
    say("quit", str(os.getpid()))
    sys.exit()
until_exited("quit")
if life == 0:
    os.kill(os.getpid(), 9)
say("whole")
"""
    place_with_coordinator.run(HEAD + text, workers=2)
    assert Path("whole").exists()


def test_worker_that_has_left_and_is_killed_while_python_ends_is_not_restarted(place_with_coordinator: Place) -> None:
    text = """
import atexit
if rank == 0:
    assert life == 0
    atexit.register(os.kill, os.getpid(), 9)
    status.leave()
    say("quit", str(os.getpid()))
    sys.exit()
until_exited("quit")
time.sleep(0.5)
"""
    place_with_coordinator.run(HEAD + text, workers=2)
    assert launcher_messages(place_with_coordinator) == []


def test_run_that_all_workers_left_early_is_not_complete(place_with_coordinator: Place) -> None:
    message = failure(place_with_coordinator, "status.leave()", workers=2)
    assert message.startswith("all workers left before the end, as they were asked to")


def test_worker_declared_failed_is_not_waited_for_at_the_end(place_with_coordinator: Place) -> None:
    text = """
if rank == 1:
    say("stopped")
    os.kill(os.getpid(), 19)
    time.sleep(600)
until("stopped")
declare(1, (1, 0, 1, 0))
"""
    began = time.monotonic()
    place_with_coordinator.run(HEAD + text, workers=2)
    assert time.monotonic() - began < 2 * WITHIN_S


def test_failed_coordinator_is_restarted_at_its_address_and_notified_again(place_with_coordinator: Place) -> None:
    text = """
import signal
def lives(): return open("coordinators").read().split("\\n")[:-1] if os.path.exists("coordinators") else []
def heard(): return open("heard").read().count("ProcessExited") if os.path.exists("heard") else 0
def wait(condition):
    limit = time.monotonic() + 60
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
    folder = place_with_coordinator.run(HEAD + text, workers=2)
    first, second = place_with_coordinator.coordinators()
    assert place_with_coordinator.messages_received() == [
        [pid, "launcher", ["ProcessExited", 1, 0, "killed by SIGKILL", True, 0]] for pid in (first, second)
    ]
    assert Path("well-0").read_text() == Path("well-1").read_text()
    events = list(read_events(folder / "events.jsonl"))
    assert [(one["process"], one["what"], one["incarnation"]) for one in events if one["event"] == "membership"] == [
        ("coordinator", "failed", 0),
        ("coordinator", "joined", 1),
    ]


def test_coordinator_that_fails_repeatedly_ends_the_run(place_with_coordinator: Place) -> None:
    (place_with_coordinator.folder / "service/sitecustomize.py").write_text(
        "import os\n"
        "if '\"type\":\"coordinator\"' in os.environ.get('STRETTO_CONFIG', ''):\n"
        "    os._exit(open('coordinators', 'a').write('.') + 2)"
    )
    message = failure(place_with_coordinator, "time.sleep(600)", workers=2, restarts=1)
    assert message.startswith("coordinator ended with exit code 3 and named no error")
    assert Path("coordinators").read_text() == ".."


def test_killed_server_is_restarted_at_its_socket(place: Place) -> None:
    place.service(
        """
        pathlib.Path("servers").open("a").write(str(int(place.restarted)))
        said = f"server {len(pathlib.Path('servers').read_text())}"
        socket.socket(fileno=place.listen_fd).accept()[0].sendall(said.encode())
        time.sleep(600)
        """
    )
    place.coordinator()
    text = """
import signal, socket
def ask():
    host, port = config.servers[1].split(":")
    return socket.create_connection((host, int(port)), timeout=60).makefile().readline
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
    assert [(one["process"], one["what"], one["incarnation"]) for one in events if one["event"] == "membership"] == [
        ("server 0", "failed", 0),
        ("server 0", "joined", 1),
    ]


def test_error_of_a_server_ends_the_run(place: Place) -> None:
    place.service('raise ValueError("in the shard")')
    place.coordinator()
    message = failure(place, "time.sleep(600)", workers=2, recipe="async_sgd")
    assert message.startswith("server 0 failed: ValueError: in the shard")


@pytest.mark.parametrize("plain", [False, True])
def test_configuration_of_workers_and_coordinator(place_with_coordinator: Place, plain: bool) -> None:
    (place_with_coordinator.folder / "old").mkdir()
    Checkpoints(place_with_coordinator.folder / "old/checkpoints").write(State({}, {}, {}), 1)
    text = """
import json
import msgspec
say(f"config-{rank}", msgspec.json.encode(config, enc_hook=str).decode())
until("coordinators")
"""
    place_with_coordinator.run(
        HEAD + text,
        workers=2,
        plain=plain,
        failure_timeout_s=2.5,
        min_workers=2,
        max_workers=3,
        on_resize="global-batch",
        checkpoint_every="5m",
        resume=Path("old"),
        recipe="local_sgd(every=4)",
    )
    configs = [
        msgspec.json.decode(Path(f"config-{rank}").read_bytes(), type=WorkerConfig, dec_hook=decode_path)
        for rank in range(2)
    ]
    for config in configs:
        options = config.options
        assert (config.incarnation, options.failure_timeout_s, options.on_resize) == (0, 2.5, "global-batch")
        assert (options.checkpoint_every, options.keep) == ("5m", None)
        assert options.resume == place_with_coordinator.folder / "old"
        assert config.coordinator == configs[0].coordinator is not None
        assert (config.keys is None) == plain
    options = json.loads(Path("coordinators").read_text().partition(" ")[2])
    assert (options["workers"], options["min_workers"], options["max_workers"]) == (2, 2, 3)
    assert (options["failure_timeout_s"], options["checkpoint_every"]) == (2.5, "5m")


@pytest.mark.parametrize(("order", "there"), [({"workers": 2}, True), ({"workers": 1}, False)])
def test_single_worker_needs_no_coordinator(place_with_coordinator: Place, order: dict[str, Any], there: bool) -> None:
    text = "print(config.coordinator is not None)"
    folder = place_with_coordinator.run(text, **order)
    assert (folder / "worker-0.log").read_text() == f"{there}\n"
    assert (folder / "coordinator.log").exists() == there


UNTIL_PRINTED = """
while "and more" not in open(config.run + "/coordinator.log").read():
    time.sleep(0.01)
"""


def test_output_of_the_coordinator_is_shown_on_the_terminal(place_with_coordinator: Place) -> None:
    text = HEAD + DIES.format(deaths=1, end="os.kill(os.getpid(), 9)") + UNTIL_PRINTED
    process = place_with_coordinator.stretto("run", "-n", "2", "--out", "here", place_with_coordinator.script(text))
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0
    assert b"stretto: heard it\n" in err
    assert b"stretto: and more\n" in err
    assert Path("here/coordinator.log").read_text() == "stretto: heard it\nand more\n"
    assert "stretto: restart 1 of worker 1" in Path("here/worker-1.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_all_processes_end_with_the_launcher(place_with_coordinator: Place, number: signal.Signals, code: int) -> None:
    text = HEAD + "say(f'ready-{rank}')\ntime.sleep(600)"
    process = place_with_coordinator.stretto("run", "-n", "2", place_with_coordinator.script(text))
    until(lambda: Path("ready-0").exists() and Path("ready-1").exists() and Path("coordinators").exists())
    until(lambda: len(place_with_coordinator.left()) == 5)  # the launcher, its reaper, the coordinator, two workers
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    place_with_coordinator.await_ends()
    assert time.monotonic() - began < WITHIN_S


def test_run_can_be_ended_while_a_worker_is_away(place_with_coordinator: Place) -> None:
    text = HEAD + "say(f'ready-{rank}')\nif life or rank: time.sleep(600)\nuntil('ready-1')\nos.kill(os.getpid(), 9)"
    process = place_with_coordinator.stretto("run", "-n", "2", "--restarts", "30", place_with_coordinator.script(text))
    until(lambda: Path("heard").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=WITHIN_S) == 130
    place_with_coordinator.await_ends()
    assert os.path.exists("ready-0")
