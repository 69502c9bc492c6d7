"""The peers of our parameter server: every pushed update is applied, and no process is left running."""

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

pytestmark = pytest.mark.plain_processes
LIMIT_S = 60.0
PARAMETERS = 1003


@pytest.fixture(autouse=True)
def check_processes_have_ended(monkeypatch):
    """Mark all processes that a test starts, and check that they have ended at its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PEER_TEST", mark)
    yield
    assert [one for one in psutil.process_iter() if marked(one, mark)] == []


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("PEER_TEST") == mark
    except psutil.Error:
        return False


def test_mark_of_a_process_is_visible(monkeypatch):
    monkeypatch.setenv("PEER_TEST", "seen")
    script = "print('here', flush=True); input()"
    one = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert one.stdout is not None and one.stdout.readline() == b"here\n"  # the environment is visible from now on
        assert [found.pid for found in psutil.process_iter() if marked(found, "seen")] == [one.pid]
    finally:
        one.communicate(b"\n", timeout=LIMIT_S)


def test_updates_of_workers_are_different_integers():
    first, second = update_of(0, PARAMETERS), update_of(1, PARAMETERS)
    assert first.dtype == np.float32
    assert np.array_equal(second - first, np.ones(PARAMETERS))
    assert np.array_equal(first, first.round())
    assert total(first) == sum(1 + place % 5 for place in range(PARAMETERS))


def test_rate_counts_bytes_in_both_directions():
    assert Outcome(100, 7, 10.0, 21.0, 21.0).rate() == Rate(10.0, 8000.0)


@pytest.mark.parametrize("change", [20.0, 22.0])
def test_lost_or_doubled_update_is_an_error(change):
    with pytest.raises(SystemExit, match="changed the parameters"):
        Outcome(100, 7, 10.0, 21.0, change).rate()


def check(outcome: Outcome, workers: int) -> None:
    """Check that each worker pushed in both intervals, and that the parameters changed by the sum of the updates."""
    assert outcome.updates >= 2 * workers
    assert outcome.updates_per_s > 0
    smallest, largest = (total(update_of(worker, PARAMETERS)) for worker in (0, workers - 1))
    assert outcome.updates * smallest <= outcome.change <= outcome.updates * largest
    assert outcome.change == outcome.pushed


@pytest.mark.parametrize("tcp", [True])
def test_rpc_applies_all_updates(tcp):
    check(rpc.run(PARAMETERS, 2, 0.3, tcp), 2)


def test_rpc_reports_the_log_of_a_failed_process():
    with pytest.raises(SystemExit, match=r"end of its log:[\s\S]*must be non-negative"):
        rpc.run(-1, 1, 0.1)


def test_actors_end_when_the_ray_driver_is_killed(monkeypatch):
    pytest.importorskip("ray", reason="Ray is optional")
    monkeypatch.setattr(Child, "receive", lambda child, limit_s: kill_with_actors(child))
    with pytest.raises(LookupError):
        ray_server.run(PARAMETERS, 1, 60.0)


def kill_with_actors(child: Child) -> None:
    """Kill a driver once it has actors."""
    driver, until = psutil.Process(child.process.pid), time.monotonic() + 120
    while not any("ray::ParameterServer" in one.name() for one in driver.children(recursive=True)):
        assert time.monotonic() < until
        time.sleep(0.05)
    child.process.kill()
    child.process.wait(LIMIT_S)
    raise LookupError


def test_ray_applies_all_updates():
    pytest.importorskip("ray", reason="Ray is optional")
    check(ray_server.run(PARAMETERS, 2, 0.3), 2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is here")
def test_missing_ray_is_reported_in_one_line():
    command = [sys.executable, "-m", "benchmarks.peers.ray_server", "10", "1", "0.1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 1
    assert ended.stderr == ray_server.MISSING + "\n"


def test_sockets_move_any_number_of_bytes():
    with closing(sockets.Pair()) as pair:
        for size in (0, 1, sockets.CHUNK - 1, 3 * sockets.CHUNK + 5):
            assert pair.one_way(size) > 0
            assert pair.both_ways(size) > 0
        assert len(pair.pings(3)) == 3


def test_socket_figures_are_plausible():
    line = sockets.measure(20_000_000, 1)
    assert 0.01 < line.one_way_gb_per_s < 200
    assert 0.01 < line.both_ways_gb_per_s < 200
    assert 0 < line.ping_pong_ms < 100


def test_killed_far_end_is_an_error():
    with closing(sockets.Pair()) as pair:
        pair._far.process.kill()
        pair._far.process.wait(LIMIT_S)
        with pytest.raises(OSError, match=r"closed|reset|[Bb]roken pipe"):
            pair.one_way(10 * sockets.CHUNK)


PARENT = """
import subprocess
import sys
from benchmarks.peers.processes import send_result

def main():
    below = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    send_result(below=below.pid)
    below.wait()

def fail():
    raise ValueError("no such thing")

def leave():
    pass
"""


@pytest.fixture
def child(tmp_path):
    """Return a function that starts a child with a function of PARENT; end all children after the test."""
    (tmp_path / "parent_of_one.py").write_text(PARENT)
    started = []

    def start(function: str) -> Child:
        started.append(Child("parent_of_one", function, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
        return started[-1]

    yield start
    for one in started:
        one.close(0.1)


def ends(process):
    """Return True if a process ends, or only waits to be reaped, within the limit."""
    limit = time.monotonic() + LIMIT_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def test_descendants_end_with_the_child(child):
    parent = child("main")
    descendant = psutil.Process(parent.receive(LIMIT_S)["below"])
    assert descendant.is_running()
    parent.close(0.1)
    assert ends(descendant)


def test_orphaned_descendants_end_too(child):
    parent = child("main")
    descendant = psutil.Process(parent.receive(LIMIT_S)["below"])
    parent.process.kill()
    parent.process.wait(LIMIT_S)
    assert descendant.is_running()
    parent.close(0.1)
    assert ends(descendant)


def test_wait_for_a_result_has_a_limit(child):
    parent = child("main")
    parent.receive(LIMIT_S)
    with pytest.raises(SystemExit, match="sent no result"):
        parent.receive(0.3)


def test_failure_is_reported_with_the_log(child):
    with pytest.raises(SystemExit, match=r"ended before its result[\s\S]*no such thing"):
        child("fail").receive(LIMIT_S)


def test_exit_of_another_child_ends_the_wait(child):
    parent = child("main")
    parent.receive(LIMIT_S)
    with pytest.raises(SystemExit, match="ended before the result of another"):
        parent.receive(LIMIT_S, [child("leave")])
