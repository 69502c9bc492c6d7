"""Agents in actors of Ray, one worker each. This is the only module that imports Ray, and only when it is used.

An actor waits in the cluster until there is room for the resources of a worker. An actor that fails, or whose node
vanishes, is reported as a lost agent; the replacement is a new actor, which may have to wait as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.agents import AgentExited, AgentOutput, AgentSpec, StartAgent
from stretto.launcher.engines.ray_actor import CONCURRENCY, AgentActor, News
from stretto.launcher.engines.resources import described
from stretto.launcher.engines.ssh import AgentLines
from stretto.launcher.engines.ssh_errors import printed_error
from stretto.launcher.listeners import LOOPBACK_ADDRESS

ADDRESS = "RAY_ADDRESS"
CLIENT = "ray://"
LOCAL_STORE_BYTES = 100_000_000
"""Size of the object store of a cluster on this machine, in which Stretto stores nothing."""
WAIT_S = 10.0
"""Time after which a line says that actors wait for room."""
WATCH_S = 1.0
"""Interval at which nodes are looked for that will be taken away."""
WORKERS_LEFT = 3
"""Exit code of an agent whose workers have left as they were asked to, or were lost."""
UNSTARTED = 5
"""Number of actors in a row that may fail before they start their agent, such as on a node that has just vanished."""
PAUSE_S = 1.0
CALL_S = 2.0


def imported() -> Any:
    """Return the module of Ray. Raises LaunchError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        problem, expected = "workers cannot run on Ray: it is not installed here", "the package ray"
        got, to_type = str(error), 'pip install "stretto[ray]"'
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
    return ray


@contextlib.contextmanager
def connected(on: str, _workers: int, resources: Mapping[str, float]) -> Iterator[RayCluster]:
    """Connect to the cluster at `on`; yield the connection, for actors with these resources. Raises LaunchError."""
    ray = imported()
    if ray.is_initialized():  # by the program that calls `stretto.run`
        yield RayCluster(own_address(on if on.startswith(CLIENT) else "", ray.util.get_node_ip_address), resources)
        return
    address = on if on.startswith(CLIENT) else os.environ.get(ADDRESS)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    try:
        ray.init(**({"address": address} | options))
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        problem, expected = "the cluster of Ray cannot be reached", "a running cluster (ray start --head)"
        got, to_type = f"{address or 'a local cluster'}: {error}", "ray status, or --on ray://HEAD:10001"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
    try:
        yield RayCluster(own_address(address, ray.util.get_node_ip_address), resources)
    finally:
        ray.shutdown()


def own_address(cluster_address: str | None, of_node: Callable[[], str]) -> str:
    """Return the address of this machine for workers; `of_node` gives that of a machine that is a node itself."""
    if cluster_address is None:
        return LOOPBACK_ADDRESS
    if not cluster_address.startswith(CLIENT):
        return of_node()
    from stretto.security import address_toward  # imports zmq

    return address_toward(cluster_address.removeprefix(CLIENT).rpartition(":")[0].strip("[]"))


@dataclass(frozen=True)
class RayCluster:
    """Connection with a cluster: the address of this machine that its nodes reach, and the resources of each actor."""

    address: str
    resources: Mapping[str, float]

    def agents(self, report: Callable[[AgentExited], None], output: AgentOutput) -> StartAgent:
        """Return what starts agents in actors."""
        return RayAgents(self.resources, report, output).start


class RayAgents:
    """Starts agents in actors with these resources; the exit of each is given to `report`, its lines to `output`."""

    def __init__(
        self, resources: Mapping[str, float], report: Callable[[AgentExited], None], output: AgentOutput
    ) -> None:
        self._resources, self._report, self._output = dict(resources), report, output
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._is_noted = False
        self._running: dict[str, RayAgent] = {}
        """Newest agent of each name."""
        self._watcher = threading.Thread(target=self._watch_nodes, daemon=True)

    def start(self, spec: AgentSpec) -> RayAgent:
        """Request an actor, which starts the agent as soon as the cluster has room for it.

        Raises LaunchError for the first one if no node is large enough for it.
        """
        if not self._running:
            check_nodes(self._resources, [node["Resources"] for node in imported().nodes() if node["Alive"]])
        agent = RayAgent(spec, self._actor, self._report, self._output, self._note_started)
        with self._lock:
            self._waiting.add(spec.host.name)
        timer = threading.Timer(WAIT_S, self._note_waiting)
        timer.daemon = True
        timer.start()
        agent.start()
        self._running[spec.host.name] = agent
        if not self._watcher.is_alive():
            self._watcher.start()
        return agent

    def _watch_nodes(self) -> None:
        """Ask workers to leave nodes that will be taken away, until the process ends."""
        while imported().is_initialized():
            if nodes := draining_nodes():
                for agent in [*self._running.values()]:
                    agent.leave(nodes)
            time.sleep(WATCH_S)

    def _actor(self) -> Any:
        """Return a new actor, which may be pending."""
        ray, custom = imported(), dict(self._resources)
        options: dict[str, Any] = {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0)}
        options |= {
            "resources": custom,
            "max_restarts": 0,
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": "SPREAD",
        }
        return ray.remote(AgentActor).options(**options).remote()

    def _note_started(self, name: str) -> None:
        with self._lock:
            self._waiting.discard(name)
            self._is_noted = self._is_noted and bool(self._waiting)

    def _note_waiting(self) -> None:
        """Show one line about all actors that wait; another one only after all have started."""
        with self._lock:
            count, is_noted = len(self._waiting), self._is_noted
            self._is_noted = count > 0
        if count and not is_noted:
            workers = "1 worker waits" if count == 1 else f"{count} workers wait"
            self._output.note(f"{workers} for room in the cluster: {described(self._resources)} each")


class RayAgent:
    """An agent in an actor."""

    def __init__(
        self,
        spec: AgentSpec,
        new_actor: Callable[[], Any],
        report: Callable[[AgentExited], None],
        output: AgentOutput,
        note_started: Callable[[str], None],
    ) -> None:
        self._spec, self._new_actor, self._report, self._output = spec, new_actor, report, output
        self._note_started = note_started
        self._lines = AgentLines(lambda text: output.note(f"{spec.host.name}: {text}"))
        reading, self._writing = os.pipe()
        self._errors = os.fdopen(reading, "rb", buffering=0)
        self._reader = threading.Thread(target=self._lines.read, args=(self._errors,), daemon=True)
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._actor: Any = None
        self._is_started = self._is_leaving = False
        self._is_ending = threading.Event()

    def start(self) -> None:
        """Request the actor."""
        self._actor = self._new_actor()
        self._reader.start()
        self._follower.start()

    def end(self) -> None:
        """Let the agent end its workers and exit; a pending actor is cancelled. What it prints then is not shown."""
        self._lines.is_shown = False
        self._is_ending.set()
        if self._is_started:
            with contextlib.suppress(imported().exceptions.RayError):
                self._actor.end.remote()
        else:
            self._kill()

    def leave(self, nodes: Collection[str]) -> None:
        """Ask the workers to leave if their node is one of these: another agent starts elsewhere then."""
        if self._is_started and not self._is_leaving and _node_of(self._actor) in nodes:
            self._is_leaving = True
            self._actor.leave.remote()

    def close(self, limit_s: float) -> None:
        """Wait for the exit, at most this long, and kill the actor."""
        if threading.current_thread() is not self._follower:
            self._follower.join(limit_s)
        self._is_ending.set()
        self._kill()
        self._follower.join(CALL_S)

    def _kill(self) -> None:
        with contextlib.suppress(imported().exceptions.RayError, ValueError):
            imported().kill(self._actor)

    def _follow(self) -> None:
        """Start the agent, pass on what it prints, and report its exit."""
        code, why = self._run()
        for _ in range(UNSTARTED):
            if self._is_started or code is not None or self._is_ending.wait(PAUSE_S):
                break
            self._actor = self._new_actor()
            code, why = self._run()
        self._note_started(self._spec.host.name)
        self._kill()
        os.close(self._writing)
        self._reader.join()
        self._errors.close()
        self._report(self._exited(code, why))

    def _run(self) -> tuple[int | None, str]:
        """Return the exit code of the agent, or None and the reason why its actor was lost."""
        ray = imported()
        try:
            ray.get(self._actor.start.remote(sys.executable, self._spec.words, self._spec.key))
            while True:
                for news in ray.get(self._actor.read.remote()):
                    if (code := self._handle(news)) is not None:
                        return code, ""
        except Exception as error:  # a lost actor is a RayError; a disconnected driver raises errors of many kinds
            return None, f"{type(error).__name__}: {_first_line(error)}"

    def _handle(self, news: News) -> int | None:
        """Handle news of the agent; return its exit code."""
        match news:
            case "started", _:
                self._is_started = True
                self._note_started(self._spec.host.name)
                if self._is_ending.is_set():
                    self._actor.end.remote()
            case "lines", bytes(data):
                os.write(self._writing, data)
            case "exited", int(code):
                return code
        return None

    def _exited(self, code: int | None, why: str) -> AgentExited:
        name = self._spec.host.name
        if code is None:
            return AgentExited(name, -signal.SIGKILL, f"its actor was lost: {why}", is_replaceable=True)
        if code < 0:
            text = f"its agent was ended by {signal.Signals(-code).name}"
            return AgentExited(name, code, text, is_replaceable=True)
        if code == 0:
            self._lines.flush()
            return AgentExited(name, 0)
        text = printed_error(name, code, self._lines.tail.decode(errors="replace"))
        return AgentExited(name, code, text, is_replaceable=code == WORKERS_LEFT)


def check_nodes(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise LaunchError if none of the nodes, given by their resources, could ever hold a worker."""
    if any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        return
    largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in wanted}
    problem = f"no node of the cluster can hold a worker with {described(dict(wanted))}"
    got = f"{len(nodes)} node{'s' * (len(nodes) != 1)}, at most {described(largest)}"
    fitting = {name: min(amount, largest[name]) for name, amount in wanted.items() if largest[name]} or {"CPU": 1.0}
    to_type = f'--resources "{described(fitting)}", or start such a node first'
    raise LaunchError(explain(problem, got=got, expected="a node with these resources", to_type=to_type))


def draining_nodes() -> set[str]:
    """Return the nodes that will be taken away, as the cluster was told; none where Ray does not say so."""
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except Exception:  # no public function tells it, and a client of a cluster is not told
        return set()


def _node_of(actor: Any) -> str:
    from ray._private.state import state

    try:
        return str(state.actor_table(actor._actor_id.hex())["Address"]["NodeID"])
    except Exception:
        return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason")
