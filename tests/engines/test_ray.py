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
from engine_runs import NOTEBOOK_PRINTS, assert_each_sample_counts_once, events, notebook, script

pytest.importorskip("ray", reason='Ray is not installed: pip install "stretto[ray]"')
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
SCRIPT = """
import subprocess, sys
subprocess.Popen(["sleep", "600", sys.argv[1]])  # stands for a process of a DataLoader
""" + script("""\
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

    def worker(self, number: int, after: psutil.Process | None = None) -> psutil.Process:
        """Return the newest process of a worker, at least the next one `after` another."""
        before = None if after is None else after.pid
        self.until(lambda: self._pids().get(number, before) != before)
        return psutil.Process(self._pids()[number])

    def _pids(self) -> dict[int, int]:
        return {event["worker"]: event["pid"] for event in self.events("start")}

    def actor(self, worker: int) -> psutil.Process:
        """Return the actor that carries the agent of a worker."""
        actor = self.worker(worker).parents()[1]
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
        if str(place) in words:
            found.append(words)
    return found


def test_killed_actor_leaves_the_others_training_and_is_replaced(start: Callable[..., Run]) -> None:
    run = start(3, "--resources", "0.5 CPU")
    run.until(lambda: [0, 1, 2] in run.generations())
    secrets = [word for word in (run.folder / "join.key").read_text().split('"') if len(word) == 40]
    assert secrets and not any(secret in word for secret in secrets for word in left_in(run.folder.parent))
    actor = run.actor(1)
    run.until(lambda: [one for one in actor.children(recursive=True) if one.name() == "sleep"])
    ended = actor.children(recursive=True)
    actor.kill()
    assert not psutil.wait_procs(ended, LIMIT_S)[1]
    run.until(lambda: run.generations()[-2:] == [[0, 2], [0, 1, 2]])
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


def test_killed_worker_is_started_again_by_its_agent(start: Callable[..., Run]) -> None:
    run = start(2)
    run.until(lambda: [0, 1] in run.generations())
    actor, worker = run.actor(1), run.worker(1)
    worker.kill()
    run.until(lambda: run.generations()[-2:] == [[0], [0, 1]])
    assert run.worker(1, after=worker).parents()[1] == actor
    run.end()


def test_workers_join_by_hand_and_as_the_cluster_has_room(nodes: Any, start: Callable[..., Run]) -> None:
    nodes.add_node(**NODE, resources={"late": 1})
    run = start(1, "--max-workers", "4", "--resources", "1 CPU, 1 late")
    run.until(lambda: run.generations()[-1:] == [[0]])
    nodes.add_node(**NODE, resources={"late": 1})
    run.until(lambda: run.generations()[-1:] and len(run.generations()[-1]) == 2)
    members = run.generations()[-1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    joining = subprocess.Popen([sys.executable, "-m", "stretto.cli", "join", str(run.folder)], env=environment)
    run.until(lambda: run.generations()[-1:] == [[*members, 4]])
    run.end()
    assert joining.wait(LIMIT_S) == 0


def test_workers_leave_a_node_that_is_taken_away_and_return_elsewhere(nodes: Any, start: Callable[..., Run]) -> None:
    leased = nodes.add_node(**NODE, resources={"leased": 1})
    nodes.add_node(**NODE, resources={"leased": 1})
    run = start(2, "--resources", "1 CPU, 1 leased")
    run.until(lambda: run.generations() == [[0, 1]])
    drain(nodes, leased.node_id)
    run.until(lambda: len(run.generations()[-1]) == 1)
    nodes.add_node(**NODE, resources={"leased": 1})
    run.until(lambda: run.generations()[-1] == [0, 1])
    run.end()
    changes = [event["what"] for event in run.events("membership") if event["what"] != "formed"]
    assert changes[:4] == ["joined", "joined", "left", "joined"]


def drain(nodes: Any, node: str) -> None:
    """Announce that a node is taken away in a minute, as a cloud does."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 60) * 1000)
    GcsClient(address=nodes.address).drain_node(node, preempted, "it is taken away", deadline_ms)


def test_workers_without_room_wait_and_one_line_says_so(nodes: Any, start: Callable[..., Run]) -> None:
    nodes.add_node(**NODE, resources={"rare": 3})
    run = start(2, "--resources", "2 rare")
    printed: list[str] = []
    assert run.process.stdout is not None
    while "waits for room" not in "".join(printed[-1:]):
        printed.append(run.process.stdout.readline())
        assert printed[-1], printed
    run.process.send_signal(signal.SIGINT)
    output = "".join(printed) + run.process.communicate(timeout=LIMIT_S)[0]
    assert run.process.returncode == 130, output
    assert output.count("1 worker waits for room in the cluster: 2 rare each") == 1


def test_what_no_node_can_hold_is_one_error(start: Callable[..., Run]) -> None:
    run = start(1, "--resources", "1 CPU, 1 GPU")
    output = run.process.communicate(timeout=LIMIT_S)[0]
    assert run.process.returncode == 1
    assert "no node of the cluster can hold a worker with 1 CPU, 1 GPU" in output


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


def test_error_after_training_ends_the_run_with_its_traceback_and_the_last_model(start: Callable[..., Run]) -> None:
    run = start(2)
    (run.folder.parent / "train.py").write_text(script(epochs=1) + "1 / 0\n")
    output = run.process.communicate(timeout=LIMIT_S)[0]
    assert run.process.returncode == 1 and "ZeroDivisionError: division by zero" in output, output
    assert (run.folder / "last.safetensors").exists() and "last.safetensors" in output.splitlines()[-1], output


def test_function_of_a_notebook_runs_on_the_cluster_of_the_notebook(nodes: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": nodes.address}
    program = notebook("import ray\nray.init()", "stretto.ray()", "ray.is_initialized()")
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert NOTEBOOK_PRINTS in ended.stdout
    assert_each_sample_counts_once([tmp_path / "run"], epochs=1, output=ended.stdout)
