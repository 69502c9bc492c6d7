"""Tests of runs on a Spark of two executors, which the tests start. Skipped where Spark or Java is not installed."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_runs import NOTEBOOK_PRINTS, assert_each_sample_counts_once, events, notebook, script

from stretto.errors import LaunchError
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

pyspark = pytest.importorskip("pyspark", reason='Spark is not installed: pip install "stretto[spark]"')
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless", allow_module_level=True)
SCRIPT = (
    script("""\
if not pathlib.Path(sys.argv[1]).exists():
    time.sleep(2)""")
    + 'print("trained", flush=True)\n'
)
LIMIT_S = 120.0
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield the context of a Spark of two executors with two slots each."""
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable)
    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_WORKER_DIR"] = str(folder)
    settings = SETTINGS | {"spark.local.dir": str(folder)}
    found = pyspark.SparkConf().setMaster("local-cluster[2,2,512]").setAppName("test").setAll(list(settings.items()))
    context = pyspark.SparkContext(conf=found)
    context.setLogLevel("OFF")
    yield context
    context.stop()


class Run:
    """A run on the cluster, in a thread; its script ends soon after the file `enough` exists."""

    def __init__(self, place: Path, workers: int, **fields: Any) -> None:
        (place / "train.py").write_text(SCRIPT)
        self.enough, self.folder = place / "enough", place / "run"
        fields = {"recipe": "local_sgd(every=2)", "failure_timeout_s": 5.0, **fields}
        self.config = RunConfig(
            place / "train.py", (str(self.enough),), workers=workers, on="spark", out=self.folder, **fields
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run(self.config, ProgressDisplay(quiet=True))
        except BaseException as error:
            self._error = error

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait for a condition during the run."""
        limit = time.monotonic() + LIMIT_S
        while not is_so():
            assert self._thread.is_alive(), self._error
            assert time.monotonic() < limit, "it has not come so within the limit"
            time.sleep(0.01)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.folder, kind)

    def generations(self) -> list[list[int]]:
        return [event["members"] for event in self.events("membership") if event["what"] == "formed"]

    def changes(self, worker: int) -> set[Any]:
        """Return what has happened to a worker, alone and with the incarnation."""
        changes = [event for event in self.events("membership") if event.get("worker") == worker]
        return {one["what"] for one in changes} | {(one["what"], one["incarnation"]) for one in changes}

    def above(self, worker: int) -> list[psutil.Process]:
        """Return the processes above a worker: its agent, the task's Python, Spark's daemon, the executor."""
        self.until(lambda: worker in {event["worker"] for event in self.events("start")})
        pids = {event["worker"]: event["pid"] for event in self.events("start")}
        above = psutil.Process(pids[worker]).parents()
        assert "pyspark.daemon" in above[1].cmdline()
        assert above[3].name() == "java"
        return above

    def end(self) -> None:
        """Wait for the end; each sample of each epoch has counted once."""
        self.enough.touch()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        assert_each_sample_counts_once([self.folder])


@pytest.fixture
def start(context: Any, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield the function that starts a run, which leaves no process."""
    runs: list[Run] = []

    def begin(workers: int, **fields: Any) -> Run:
        runs.append(Run(tmp_path, workers, **fields))
        return runs[-1]

    yield begin
    limit = time.monotonic() + LIMIT_S
    for one in runs:
        one.enough.touch()
    while left := [word for process in psutil.process_iter() for word in words_of(process) if str(tmp_path) in word]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if "java" not in process.name() else []
    except psutil.Error:
        return []


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "async_sgd"])
def test_killed_task_leaves_the_others_training_and_is_replaced(start: Callable[..., Run], recipe: str) -> None:
    run = start(3, recipe=recipe)
    run.until(lambda: [0, 1, 2] in run.generations())
    key = (run.folder / "join.key").read_text().split('"')
    secrets = [word for word in key if len(word) == 40]
    assert secrets
    assert not any(secret in word for one in psutil.process_iter() for word in words_of(one) for secret in secrets)
    agent, task, *_ = run.above(1)
    task.kill()
    run.until(lambda: {"failed", "left"} & run.changes(1))
    run.until(lambda: ("joined", 1) in run.changes(1))
    run.end()
    assert not agent.is_running()


def test_killed_executor_leaves_the_others_training_and_is_replaced(start: Callable[..., Run]) -> None:
    run = start(3)
    run.until(lambda: [0, 1, 2] in run.generations())
    executors = {worker: run.above(worker)[3] for worker in range(3)}
    lost = [worker for worker in range(3) if executors[worker] == executors[0]]
    executors[0].kill()
    remaining = sorted({0, 1, 2} - {*lost})
    run.until(lambda: remaining in run.generations() or not remaining)
    run.until(lambda: run.generations()[-1] == [0, 1, 2])
    run.end()


def test_function_of_a_notebook_runs_on_the_session_of_the_notebook(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.chdir(tmp_path)
    program = notebook("", "stretto.spark(spark)", "spark.range(3).count() == 3")
    names = {"__name__": "__main__", "spark": SparkSession(context)}
    running = threading.Thread(target=exec, args=(program, names), daemon=True)
    running.start()
    running.join(LIMIT_S)
    assert NOTEBOOK_PRINTS in capsys.readouterr().out
    assert_each_sample_counts_once([tmp_path / "run"], epochs=1)


def test_more_workers_than_slots_are_refused(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.launcher.engines.spark.REGISTER_S", 0.0)
    with pytest.raises(LaunchError, match=r"9 workers would wait(.|\n)*got: 4 slots(.|\n)*try: -n 4"):
        start(9).end()


def test_resources_of_another_context_are_refused(start: Callable[..., Run]) -> None:
    with pytest.raises(LaunchError, match=r"got: spark.task.cpus=1(.|\n)*try: spark-submit --conf spark.task.cpus=2"):
        start(1, resources="2 CPU").end()


def test_output_of_the_first_worker_is_shown(start: Callable[..., Run], capfd: pytest.CaptureFixture[str]) -> None:
    start(2).end()
    assert capfd.readouterr().out.splitlines().count("trained") == 1


def test_error_after_training_ends_the_run_and_leaves_the_last_model(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(2)
    (tmp_path / "train.py").write_text(script(epochs=1) + "raise ValueError('boom')")
    with pytest.raises(LaunchError, match="ValueError: boom"):
        run.end()
    assert list(tmp_path.rglob("last.safetensors"))
