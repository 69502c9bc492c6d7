"""Agents in tasks of Spark: one job of one task, one agent, one worker.

    launcher (driver)                     Spark                        Python process of a task
      | -- job: words, key ---------------> | -- task, once a slot is free -> | stretto join: connects to the launcher
      | <- exit code, last lines ---------- | <- result --------------------- |
      | <- error -------------------------- |   the task or its executor is lost
      | -- another job ------------------->                              the agent ends with the task: its input ends
      | -- cancels the job ---------------> | -- kills the task ------------> |

No barrier stage: in one, a lost task ends all others. Spark's own attempts at a failed task do nothing, since the
launcher submits another job. No tensor, and no message between workers, passes through Spark.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.agents import AgentExited, AgentOutput, AgentSpec, StartAgent
from stretto.launcher.engines.resources import described
from stretto.launcher.engines.spark_task import LOST, run_agent
from stretto.launcher.engines.ssh_errors import OURS, printed_error

FAILED = 1
"""Exit code of an agent that no executor can start."""
REGISTER_S = 60.0
"""Limit of the wait for the executors of a session."""
CANCEL_S = 10.0
"""Limit of the wait for a job that was cancelled."""
LOOK_S = 0.1
CAUSE = re.compile(r"^.*Lost task [^(]*\([^)]*\)(?: \([^)]*\))*: ")
"""Beginning of the line in which Spark tells the cause of a lost task."""
OWN = {"spark.task.maxFailures": "1", "spark.scheduler.mode": "FAIR", "spark.ui.showConsoleProgress": "false"}
"""Settings of a session that is started here."""
SPECULATION = {"spark.speculation": "false"}
"""Setting of any session: a second attempt at a task that runs would end the first."""
DEFAULTS = {"spark.speculation": "false", "spark.task.cpus": "1"}


@contextlib.contextmanager
def connected(on: str, workers: int, resources: Mapping[str, float]) -> Iterator[SparkCluster]:
    """Yield the connection with Spark: through the context of this process, or one for the run. Raises LaunchError."""
    try:
        from pyspark import SparkContext
    except ImportError as error:
        problem, expected = "workers cannot run on Spark: it is not installed here", "the package pyspark"
        got, to_type = str(error), 'pip install "stretto[spark]"'
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
    settings, running = _settings(resources), SparkContext._active_spark_context
    context = running if running is not None else _started(on, settings)
    try:
        _check(context, workers, settings)
        yield SparkCluster(context)
    finally:
        if running is None:
            context.stop()


def _started(on: str, settings: dict[str, str]) -> Any:
    """Return a new context. Raises LaunchError."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException

    configuration = SparkConf().setAppName("stretto").setAll(list((OWN | settings).items()))
    try:
        context = SparkContext(conf=configuration.setMaster(on) if "://" in on else configuration)
    except (PySparkException, OSError, RuntimeError) as error:
        got = str(error).strip().partition("\n")[0]
        if "JAVA" in got:
            problem, to_type = "Spark cannot be started without Java", "apt-get install openjdk-17-jre-headless"
            raise LaunchError(explain(problem, got=got, expected="Java 17", to_type=to_type)) from error
        problem, expected = f"there is no Spark at {on}", "the address of a running Spark"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--on spark://HEAD:7077")) from error
    context.setLogLevel("ERROR")
    return context


def _settings(resources: Mapping[str, float]) -> dict[str, str]:
    """Return the settings that reserve the resources for each task. Raises LaunchError for what Spark does not know."""
    processors, gpus = resources.get("CPU", 1.0), resources.get("GPU")
    if resources.keys() - {"CPU", "GPU"} or not processors.is_integer():
        problem, expected = "Spark cannot reserve this for a task", "GPUs, and a whole number of CPUs"
        got = f'--resources "{described({**resources})}"'
        raise LaunchError(explain(problem, got=got, expected=expected, to_type='--resources "1 GPU, 4 CPU"'))
    settings = {"spark.task.cpus": f"{processors:g}"}
    return settings if gpus is None else settings | {"spark.task.resource.gpu.amount": f"{gpus:g}"}


def _check(context: Any, workers: int, settings: dict[str, str]) -> None:
    """Raise LaunchError for settings under which the workers cannot run, and for too few slots."""
    for name, value in (SPECULATION | settings).items():
        if (got := context.getConf().get(name, DEFAULTS.get(name, "none"))) != value:
            problem, expected = "this Spark cannot run the workers with its settings", f"{name}={value}"
            to_type = f"spark-submit --conf {expected}"
            raise LaunchError(explain(problem, got=f"{name}={got}", expected=expected, to_type=to_type))
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") != "true":
        _check_slots(context, workers)


def _check_slots(context: Any, workers: int) -> None:
    """Raise LaunchError if the executors have fewer slots than workers, after a wait for their registration."""
    limit = time.monotonic() + REGISTER_S * (not context.master.startswith("local["))
    while (slots := _slots(context)) < workers:
        if time.monotonic() > limit:
            problem, got = f"{workers} workers would wait for each other for ever", f"{slots} slots of Spark"
            to_type = f"-n {max(slots, 1)}, or spark-submit --total-executor-cores {workers}"
            raise LaunchError(explain(problem, got=got, expected=f"at least {workers} slots", to_type=to_type))
        time.sleep(LOOK_S)


def _slots(context: Any) -> int:
    """Return the number of tasks that run at a time; PySpark has no function for it."""
    java = context._jsc.sc()
    return int(java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile()))


class SparkCluster:
    """Connection with Spark through a context."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def address(self) -> str:
        """Address at which executors reach the driver."""
        return socket.gethostbyname(self._context.getConf().get("spark.driver.host", "127.0.0.1"))

    def agents(self, report: Callable[[AgentExited], None], output: AgentOutput) -> StartAgent:
        """Return what starts agents in tasks."""
        return lambda spec: SparkAgent(spec, self._context, report, output)


class SparkAgent:
    """An agent in a job of one task. The task ends when the job is cancelled, and with it the agent's input."""

    def __init__(
        self, spec: AgentSpec, context: Any, report: Callable[[AgentExited], None], output: AgentOutput
    ) -> None:
        from pyspark import InheritableThread

        self._spec, self._context, self._report, self._output = spec, context, report, output
        self._group = f"stretto {os.urandom(8).hex()}"
        self._is_ended = False
        self._follower = InheritableThread(target=self._follow, daemon=True)
        self._follower.start()

    def end(self) -> None:
        """Cancel the job."""
        self._is_ended = True
        if self._follower.is_alive():
            with contextlib.suppress(Exception):  # the session has ended, and the job with it
                self._context.cancelJobGroup(self._group)

    def close(self, limit_s: float) -> None:
        """Wait for the end of the job, at most this long, and cancel it, even while it is submitted."""
        if threading.current_thread() is self._follower:
            return
        self._follower.join(limit_s)
        limit = time.monotonic() + CANCEL_S
        while self._follower.is_alive() and time.monotonic() < limit:
            self.end()
            self._follower.join(LOOK_S)

    def _follow(self) -> None:
        """Run the job, and report the exit of the agent."""
        name, task = self._spec.host.name, functools.partial(run_agent, self._spec.words, self._spec.key)
        try:
            self._context.setJobGroup(self._group, f"Stretto: {name}", interruptOnCancel=True)
            code, printed = self._context.parallelize([0], 1).map(task).collect()[0]
        except Exception as error:  # errors of Py4J, of Java and of PySpark have no class in common
            self._report(_lost(name, str(error)))
            return
        if code < 0:
            text = f"{name}: its agent was ended by {signal.Signals(-code).name}"
            self._report(AgentExited(name, code, text, is_replaceable=True))
            return
        text = printed.decode(errors="replace")
        for line in text.splitlines() if not code and not self._is_ended else ():
            self._output.note(f"{name}: {line.removeprefix(OURS)}")
        self._report(AgentExited(name, code, printed_error(name, code, text) if code else ""))


def _lost(name: str, error: str) -> AgentExited:
    """Return the exit of an agent whose job has failed."""
    if "No module named 'stretto'" in error:
        problem, expected = f"{name}: the executor has no Stretto", "Stretto in the Python of the executors"
        got, to_type = "No module named 'stretto'", 'pip install "stretto[spark]" there, and PYSPARK_PYTHON=PYTHON'
        return AgentExited(name, FAILED, explain(problem, got=got, expected=expected, to_type=to_type))
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no reason"]
    lost = [line for line in lines if "Lost task" in line]
    of_java = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    cause = CAUSE.sub("", [*lost, *of_java, *lines][0])
    return AgentExited(name, LOST, f"its task was lost: {cause}", is_replaceable=True)
