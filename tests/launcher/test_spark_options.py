# ruff: noqa: N802, N803  methods of Spark's context
"""Options and agents of runs on Spark, without Spark: a module and a context take its place."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest
from run_place import Place

from stretto.errors import LaunchError
from stretto.host_list import Host
from stretto.launcher.config import check, described, on_engine, settled
from stretto.launcher.engines import spark
from stretto.launcher.engines.agents import AgentExited, AgentSpec
from stretto.launcher.engines.clusters import connected
from stretto.launcher.engines.spark_task import run_agent
from stretto.run_config import RunConfig

LOST = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, \
most recent failure: Lost task 0.0 in stage 1.0 (TID 1) (h executor 0): \
org.apache.spark.SparkException: Python worker exited
	at org.apache.spark.x"""


@dataclass
class Context:
    """Context of Spark with these settings and slots; its jobs return `result` or raise it."""

    settings: dict[str, str] = field(default_factory=dict)
    slots: int = 4
    result: Any = (0, b"")
    master: str = "local[4]"
    groups: list[str] = field(default_factory=list)
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def getConf(self) -> dict[str, str]:
        return {"spark.driver.host": "127.0.0.1", **self.settings}

    @property
    def _jsc(self) -> Context:
        return self

    def sc(self) -> Context:
        return self

    def resourceProfileManager(self) -> Context:
        return self

    def defaultResourceProfile(self) -> None:
        """Return nothing."""

    def maxNumConcurrentTasks(self, _profile: None) -> int:
        return self.slots

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:
        assert interruptOnCancel
        self.groups.append(group)

    def cancelJobGroup(self, group: str) -> None:
        assert group in self.groups
        self.is_cancelled.set()

    def parallelize(self, elements: list[int], slices: int) -> Context:
        assert (len(elements), slices) == (1, 1)
        return self

    def map(self, _task: Any) -> Context:
        return self

    def collect(self) -> list[Any]:
        if self.result is None:
            assert self.is_cancelled.wait(60)
            raise RuntimeError("[Job 0 cancelled]")
        if isinstance(self.result, Exception):
            raise self.result
        return [self.result]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return the context of a module that takes the place of PySpark."""
    context, module = Context(), ModuleType("pyspark")
    module.SparkContext = type("SparkContext", (), {"_active_spark_context": context})
    module.InheritableThread = threading.Thread
    module.TaskContext = type("TaskContext", (), {"get": staticmethod(lambda: None)})
    monkeypatch.setitem(sys.modules, "pyspark", module)
    return context


def config(place: Place, **fields: Any) -> RunConfig:
    (place.folder / "train.py").write_text("")
    return on_engine(RunConfig(Path("train.py"), **{"on": "spark", "workers": 3, **fields}))


def test_all_workers_are_in_tasks(place: Place, context: Context) -> None:
    found = config(place, resources="2 CPU")
    check(found)
    assert (found.workers, found.initial_workers, found.threads, found.elastic) == (0, 3, 2, True)
    assert described(settled(found)).startswith("3 workers (tasks of spark, each with 2 CPU) of train.py")
    with connected(config(place)) as cluster:
        assert cluster is not None
        assert cluster.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "fields", "got", "to_type"),
    [
        ({"spark.speculation": "true"}, {}, "spark.speculation=true", "spark-submit --conf spark.speculation=false"),
        ({}, {"resources": "2 CPU"}, "spark.task.cpus=1", "spark-submit --conf spark.task.cpus=2"),
        ({}, {"resources": "1 GPU"}, "gpu.amount=none", "spark-submit --conf spark.task.resource.gpu.amount=1"),
        ({}, {"resources": "1 disk"}, "1 disk", '--resources "1 GPU, 4 CPU"'),
        ({}, {"resources": "0.5 CPU"}, "0.5 CPU", '--resources "1 GPU, 4 CPU"'),
        ({}, {"workers": 5}, "4 slots of Spark", "-n 4, or spark-submit --total-executor-cores 5"),
    ],
)
def test_context_in_which_the_workers_cannot_run_is_refused(
    place: Place, context: Context, settings: dict[str, str], fields: dict[str, Any], got: str, to_type: str
) -> None:
    context.settings.update(settings)
    with pytest.raises(LaunchError) as caught, connected(config(place, **fields)):
        pass
    _, _, rest = str(caught.value).partition("got: ")
    assert got in rest.splitlines()[0]
    assert rest.partition("try: ")[2] == to_type


def test_executors_that_are_added_on_demand_are_not_counted(place: Place, context: Context) -> None:
    context.settings["spark.dynamicAllocation.enabled"] = "true"
    with connected(config(place, workers=9)) as cluster:
        assert cluster is not None


def test_missing_spark_is_one_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(LaunchError, match="it is not installed here") as caught, connected(config(place)):
        pass
    assert str(caught.value).endswith('  try: pip install "stretto[spark]"')


class Output:
    """Output of an agent, and its exit."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.exits: SimpleQueue[AgentExited] = SimpleQueue()

    def show(self, data: bytes) -> None:
        """Agents in tasks show no output of workers: the launcher shows their log files."""
        raise AssertionError(data)

    def note(self, text: str) -> None:
        self.notes.append(text)


def begun(context: Context) -> tuple[spark.SparkAgent, Output]:
    output = Output()
    spec = AgentSpec(Host("task 1", 1), range(1, 2), ("join",), b"key")
    return spark.SparkAgent(spec, context, output.exits.put, output), output


@pytest.mark.parametrize(
    ("result", "code", "text", "is_replaceable"),
    [
        ((0, b"stretto: a line\n"), 0, "", False),
        ((1, b"warning\nstretto: it failed\n  got: x\n"), 1, "task 1: it failed\n  got: x", False),
        ((-15, b""), -15, "task 1: its agent was ended by SIGTERM", True),
        (ValueError(LOST), -9, "its task was lost: org.apache.spark.SparkException: Python worker exited", True),
        (
            ValueError("An error occurred while calling z.\n: a.b: stopped\n\tat"),
            -9,
            "its task was lost: a.b: stopped",
            True,
        ),
        (ValueError("\nno line of Spark"), -9, "its task was lost: no line of Spark", True),
    ],
)
def test_end_of_a_task_is_the_end_of_its_agent(
    context: Context, result: Any, code: int, text: str, is_replaceable: bool
) -> None:
    context.result = result
    agent, output = begun(context)
    exited = output.exits.get(timeout=60)
    assert exited.text.replace("host ", "") == text
    assert (exited.host, exited.code, exited.is_replaceable) == ("task 1", code, is_replaceable)
    assert output.notes == (["task 1: a line"] if not code else [])
    for _ in range(2):
        agent.end()
        agent.close(0.0)


def test_executor_without_stretto_ends_the_run_with_what_to_type(context: Context) -> None:
    context.result = ValueError("x\nModuleNotFoundError: No module named 'stretto'\n")
    _, output = begun(context)
    exited = output.exits.get(timeout=60)
    assert (exited.code, exited.is_replaceable) == (1, False)
    assert 'try: pip install "stretto[spark]" there' in exited.text


def test_job_of_an_agent_that_is_ended_is_cancelled(context: Context) -> None:
    context.result = None
    agent, output = begun(context)
    agent.close(0.0)
    assert output.exits.get(timeout=60).code == -9


def test_task_returns_the_exit_code_and_the_last_lines_of_its_agent(context: Context) -> None:
    code, printed = run_agent(["join", "127.0.0.1:1", "--key", "-"], b"no key\n")
    assert code == 1
    assert printed.startswith(b"stretto: - is not a key of a run")


def test_second_attempt_of_spark_runs_no_agent(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = type("Attempt", (), {"attemptNumber": lambda self: 1})()
    monkeypatch.setattr(sys.modules["pyspark"].TaskContext, "get", staticmethod(lambda: attempt))
    monkeypatch.setattr("subprocess.Popen", None)
    assert run_agent(["join"], b"key")[0] == -9
