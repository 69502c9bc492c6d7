"""What we are set against does its work: every update that was pushed is applied, and nobody is left behind."""

import subprocess
import sys
import time
import uuid
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import psutil
import pytest

from benchmarks.pace import ROOT
from benchmarks.peers import Outcome, Rate, ray_server, rpc, sockets, total, update_of
from benchmarks.peers.processes import Child

PATIENCE_S = 20.0
PARAMETERS = 1003


@pytest.fixture(autouse=True)
def none_left_behind(monkeypatch):
    """Whatever a test starts, and what that starts, inherits a mark, and has ended when the test has."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PEER_TEST", mark)
    yield
    assert [one for one in psutil.process_iter() if marked(one, mark)] == []


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("PEER_TEST") == mark
    except psutil.Error:
        return False


def test_the_mark_is_seen(monkeypatch):
    monkeypatch.setenv("PEER_TEST", "seen")
    script = "print('here', flush=True); input()"
    one = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert one.stdout is not None and one.stdout.readline() == b"here\n"  # the program shows its environment now
        assert [found.pid for found in psutil.process_iter() if marked(found, "seen")] == [one.pid]
    finally:
        one.communicate(b"\n", timeout=PATIENCE_S)


def test_updates_of_workers_differ_and_are_whole():
    first, second = update_of(0, PARAMETERS), update_of(1, PARAMETERS)
    assert first.dtype == np.float32
    assert np.array_equal(second - first, np.ones(PARAMETERS))
    assert np.array_equal(first, first.round())
    assert total(first) == sum(1 + place % 5 for place in range(PARAMETERS))


def test_the_rate_counts_bytes_both_ways():
    assert Outcome(100, 7, 10.0, 21.0, 21.0).rate() == Rate(10.0, 8000.0)


@pytest.mark.parametrize("change", [20.0, 22.0])
def test_a_lost_or_doubled_update_is_no_figure(change):
    with pytest.raises(SystemExit, match="changed the parameters"):
        Outcome(100, 7, 10.0, 21.0, change).rate()


def check(outcome: Outcome, workers: int) -> None:
    """Each worker pushed in both stretches, and the parameters changed by what was pushed."""
    assert outcome.updates >= 2 * workers
    assert outcome.updates_per_s > 0
    smallest, largest = (total(update_of(worker, PARAMETERS)) for worker in (0, workers - 1))
    assert outcome.updates * smallest <= outcome.change <= outcome.updates * largest
    assert outcome.change == outcome.pushed


@pytest.mark.parametrize("tcp", [True])
def test_rpc_applies_what_is_pushed(tcp):
    check(rpc.run(PARAMETERS, 2, 0.3, tcp), 2)


def test_rpc_says_which_process_failed():
    with pytest.raises(SystemExit, match=r"last words:[\s\S]*must be non-negative"):
        rpc.run(-1, 1, 0.1)


def test_ray_whose_driver_is_killed_leaves_nothing(monkeypatch):
    pytest.importorskip("ray", reason="Ray is optional")
    monkeypatch.setattr(Child, "hear", lambda child, limit_s: killed_with_actors(child))
    with pytest.raises(LookupError):
        ray_server.run(PARAMETERS, 1, 60.0)


def killed_with_actors(child: Child) -> None:
    """Kill a driver once it has actors."""
    driver, until = psutil.Process(child.process.pid), time.monotonic() + 60
    while not any("ray::ParameterServer" in one.name() for one in driver.children(recursive=True)):
        assert time.monotonic() < until
        time.sleep(0.05)
    child.process.kill()
    child.process.wait(PATIENCE_S)
    raise LookupError


def test_ray_applies_what_is_pushed():
    pytest.importorskip("ray", reason="Ray is optional")
    check(ray_server.run(PARAMETERS, 2, 0.3), 2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_one_line_says_so():
    command = [sys.executable, "-m", "benchmarks.peers.ray_server", "10", "1", "0.1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == ray_server.MISSING + "\n"


def test_sockets_move_what_they_are_asked_to():
    with closing(sockets.Pair()) as pair:
        for size in (0, 1, sockets.CHUNK - 1, 3 * sockets.CHUNK + 5):
            assert pair.one_way(size) > 0
            assert pair.both_ways(size) > 0
        assert len(pair.pings(3)) == 3


def test_sockets_time_the_whole_way():
    line = sockets.measure(20_000_000, 1)
    assert 0.01 < line.one_way_gb_per_s < 200
    assert 0.01 < line.both_ways_gb_per_s < 200
    assert 0 < line.ping_pong_ms < 100


def test_a_far_end_that_is_gone_is_an_error():
    with closing(sockets.Pair()) as pair:
        pair._far.process.kill()
        pair._far.process.wait(PATIENCE_S)
        with pytest.raises(OSError, match=r"gone|reset|[Bb]roken pipe"):
            pair.one_way(10 * sockets.CHUNK)


PARENT = """
import subprocess
import sys
from benchmarks.peers.processes import say

def main():
    below = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    say(below=below.pid)
    below.wait()

def fail():
    raise ValueError("no such thing")

def leave():
    pass
"""


@pytest.fixture
def child(tmp_path):
    """Starts children that call a function of PARENT, and ends them."""
    (tmp_path / "parent_of_one.py").write_text(PARENT)
    started = []

    def start(function: str) -> Child:
        started.append(Child("parent_of_one", function, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
        return started[-1]

    yield start
    for one in started:
        one.close(0.1)


def ends(process):
    """Whether it is gone, or only waits to be reaped, within a limit."""
    limit = time.monotonic() + PATIENCE_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def test_what_a_child_started_ends_with_it(child):
    parent = child("main")
    below = psutil.Process(parent.hear(PATIENCE_S)["below"])
    assert below.is_running()
    parent.close(0.1)
    assert ends(below)


def test_an_orphan_ends_too(child):
    parent = child("main")
    below = psutil.Process(parent.hear(PATIENCE_S)["below"])
    parent.process.kill()
    parent.process.wait(PATIENCE_S)
    assert below.is_running()
    parent.close(0.1)
    assert ends(below)


def test_silence_has_a_limit(child):
    parent = child("main")
    parent.hear(PATIENCE_S)
    with pytest.raises(SystemExit, match="said nothing"):
        parent.hear(0.3)


def test_a_failure_is_told_with_its_last_words(child):
    with pytest.raises(SystemExit, match=r"ended before its result[\s\S]*no such thing"):
        child("fail").hear(PATIENCE_S)


def test_one_that_ends_beside_ends_the_wait(child):
    parent = child("main")
    parent.hear(PATIENCE_S)
    with pytest.raises(SystemExit, match="ended before the result"):
        parent.hear(PATIENCE_S, [child("leave")])
