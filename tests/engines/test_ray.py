"""Tests of runs on a Ray cluster of two nodes, which the tests start. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_runs import assert_each_sample_counts_once, events, script

pytest.importorskip("ray", reason='Ray is not installed: pip install "stretto[ray]"')
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
SCRIPT = script("""\
if not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.3)""")
LIMIT_S = 120.0
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Yield a cluster whose head has no room for workers, and one node with room for two."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    head = {"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


class Run:
    """A run on the cluster, whose script ends soon after the file `enough` exists."""

    def __init__(self, nodes: Any, place: Path, workers: int, *options: str) -> None:
        (place / "train.py").write_text(SCRIPT)
        self.enough, self.folder = place / "enough", place / "run"
        words = ["run", "-n", str(workers), "--on", "ray", "--failure-timeout", "5s", "--out", str(self.folder)]
        words += ["--recipe", "local_sgd(every=2)", *options, "train.py", str(self.enough)]
        environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, "-m", "stretto.cli", *words]
        self.process = subprocess.Popen(command, cwd=place, env=environment, text=True, **pipes)

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait for a condition while the launcher runs."""
        limit = time.monotonic() + LIMIT_S
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < limit, "it has not come so within the limit"
            time.sleep(0.05)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.folder, kind)

    def generations(self) -> list[list[int]]:
        return [event["members"] for event in self.events("membership") if event["what"] == "formed"]

    def actor(self, worker: int) -> psutil.Process:
        """Return the actor that carries the agent of a worker."""
        self.until(lambda: worker in {event["worker"] for event in self.events("start")})
        pids = {event["worker"]: event["pid"] for event in self.events("start")}
        actor = psutil.Process(pids[worker]).parents()[1]
        assert "AgentActor" in actor.cmdline()[0]
        return actor

    def end(self) -> str:
        """Return what the launcher has printed until its end; each sample of each epoch has counted once."""
        self.enough.touch()
        output = self.process.communicate(timeout=LIMIT_S)[0]
        assert self.process.returncode == 0, output
        assert_each_sample_counts_once([self.folder], output=output)
        return output


@pytest.fixture
def start(nodes: Any, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield the function that starts a run; a run that the test leaves is ended, and nothing of it is left."""
    runs: list[Run] = []

    def begin(workers: int, *options: str) -> Run:
        runs.append(Run(nodes, tmp_path, workers, *options))
        return runs[0]

    yield begin
    for run in runs:
        run.process.terminate()
        run.process.wait(LIMIT_S)
    limit = time.monotonic() + LIMIT_S
    while left_in(tmp_path):
        assert time.monotonic() < limit, left_in(tmp_path)
        time.sleep(0.1)


def left_in(place: Path) -> list[str]:
    """Return the processes of a run, here or on a node."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "stretto" in words and str(place) in words:
            found.append(words)
    return found


def test_killed_actor_leaves_the_others_training_and_is_replaced(start: Callable[..., Run]) -> None:
    run = start(3, "--resources", "0.5 CPU")
    run.until(lambda: [0, 1, 2] in run.generations())
    secrets = [word for word in (run.folder / "join.key").read_text().split('"') if len(word) == 40]
    assert secrets and not any(secret in word for secret in secrets for word in left_in(run.folder.parent))
    actor, killed_s = run.actor(1), time.perf_counter()
    actor.kill()
    run.until(lambda: run.generations()[-2:] == [[0, 2], [0, 1, 2]])
    formed = [event["at"] - killed_s for event in run.events("membership") if event["what"] == "formed"]
    print(f"SIGKILL of an actor: next generation after {formed[-2]:.3f} s, worker back after {formed[-1]:.3f} s")
    output = run.end()
    lines = [line for line in output.splitlines() if line.startswith("stretto: worker 1 failed")]
    assert len(lines) == 1, lines
    assert "(its actor was lost" in lines[0] and "continuing with 2 workers, worker 1 is restarted" in lines[0]


def test_workers_of_a_removed_node_return_on_a_node_that_is_added(nodes: Any, start: Callable[..., Run]) -> None:
    second = nodes.add_node(**NODE)
    run = start(4)
    run.until(lambda: [0, 1, 2, 3] in run.generations())
    nodes.remove_node(second, allow_graceful=False)
    run.until(lambda: len(run.generations()[-1]) == 2)
    nodes.add_node(**NODE)
    run.until(lambda: run.generations()[-1] == [0, 1, 2, 3])
    run.end()


def test_workers_without_room_wait_and_one_line_says_so(nodes: Any, start: Callable[..., Run]) -> None:
    run = start(1, "--resources", "2 rare")
    printed: list[str] = []
    assert run.process.stdout is not None
    while "waits for room" not in "".join(printed[-1:]):
        printed.append(run.process.stdout.readline())
        assert printed[-1], printed
    run.process.send_signal(signal.SIGINT)
    output = "".join(printed) + run.process.communicate(timeout=LIMIT_S)[0]
    assert run.process.returncode == 130, output
    assert output.count("1 worker waits for room in the cluster: 2 rare each") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_launcher_that_ends_leaves_nothing_on_the_cluster(
    start: Callable[..., Run], number: signal.Signals, code: int
) -> None:
    run = start(2)
    run.until(lambda: [0, 1] in run.generations())
    carried = [run.actor(0), run.actor(1)]
    run.process.send_signal(number)
    assert run.process.wait(LIMIT_S) == code
    assert not psutil.wait_procs(carried, LIMIT_S)[1]
