"""Workers of a run on other machines: of hosts whose agents this launcher starts, or joined by hand.

The run ends with an error if the agent of a host ends before its workers take part, or if a script fails there. A host
that is lost later is reported, and the others continue. On an engine's cluster a host is an actor with one worker: a
lost actor is replaced, and the worker keeps its number. Losses of actors whose workers took part are not counted: they
are those of nodes. With --max-workers, more actors are requested once the run has begun; each joins as it has room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from stretto.errors import LaunchError
from stretto.host_list import Host
from stretto.host_list import parse as parse_hosts
from stretto.launcher.engines.agents import Agent, AgentExited, AgentSpec, StartAgent
from stretto.launcher.engines.clusters import kind_of
from stretto.launcher.join import JoinKey
from stretto.launcher.process_specs import ProcessPlan
from stretto.membership.messages import MembersView
from stretto.run_config import RunConfig, typed_options

FAILED = 1
"""Exit code of an agent that could not join, or whose script failed."""
END_S = 5.0
"""Time that agents have to end their workers, and to report that their workers have failed."""
PASSED_ON = ("threads", "restarts")
"""Options of the run that its agents get too."""


ReportLost = Callable[[int, str, bool], None]
"""Takes the number of a worker whose agent was lost, the cause, and whether another agent starts the worker again."""


@dataclass
class _RemoteHost:
    """Workers of a host, and their agent."""

    spec: AgentSpec
    agent: Agent
    state: Literal["running", "done", "lost"] = "running"
    failed_at: float | None = None
    """Time since which all its workers have failed, as far as is known."""
    replacements: int = 0
    """Number of replaced agents since a worker has taken part."""

    def is_in(self, view: MembersView) -> bool:
        """Return True if a worker of its newest agent has been seen, and has not failed."""
        return not (view.running | view.left).isdisjoint(self.spec.numbers)

    def has_not_joined(self, view: MembersView) -> bool:
        """Return True if none of its workers has been seen."""
        return view.seen.isdisjoint(self.spec.numbers)

    def takes_part(self, view: MembersView) -> bool:
        """Return True if the run has begun, and all workers of the host have been seen."""
        return view.generation > 0 and view.seen.issuperset(self.spec.numbers)

    def has_failed(self, view: MembersView) -> bool:
        """Return True if all workers have failed, and the agent has had the time to exit with the cause."""
        if not view.failed.issuperset(self.spec.numbers):
            self.failed_at = None
            return False
        self.failed_at = time.monotonic() if self.failed_at is None else self.failed_at
        return time.monotonic() - self.failed_at > END_S


def agent_specs(plan: ProcessPlan, replaces: bool = False) -> list[AgentSpec]:
    """Return the agents of the hosts of a run. Their workers have the numbers after those of this machine, in order.

    With `replaces` they are those that take the places of lost ones.
    """
    config, servers, first = plan.config, plan.servers, plan.config.workers
    address, passed_on, specs = servers.joined_at or "", typed_options(config, PASSED_ON), []
    shown = ["--output", config.output]
    if config.on is not None:  # the run's log files have the output; a line for each of many workers would hide it
        shown = ["--output", "none", "--quiet"]
    for host in hosts_of(config):
        words = ("join", address, "--key", "-", "-n", str(host.workers * config.ranks), *shown)
        key = msgspec.json.encode(JoinKey(address, servers.keys_of(b"agent"), first, replaces)) + b"\n"
        specs.append(AgentSpec(host, range(first, first + host.workers), (*words, *passed_on), key))
        first += host.workers
    return specs


def hosts_of(config: RunConfig) -> tuple[Host, ...]:
    """Return the hosts of a run; on a cluster an actor or a task for each worker."""
    if config.on is None:
        return parse_hosts(config.hosts or "")
    place = kind_of(config.on).place
    return tuple(Host(f"{place} {number}", 1) for number in range(config.most_workers))


class RemoteWorkers:
    """Supervises the agents of a run. `view` is what the coordinator knows of all workers."""

    def __init__(self, plan: ProcessPlan, start_agent: StartAgent, note: Callable[[str], None]) -> None:
        self._specs, self._start_agent, self._note = agent_specs(plan), start_agent, note
        self._replacements = {spec.host.name: spec for spec in agent_specs(plan, replaces=True)}
        self._restarts, self._on_cluster = plan.config.restarts, plan.config.on is not None
        self._initial = plan.config.announced if self._on_cluster else len(self._specs)
        self._hosts: dict[str, _RemoteHost] = {}
        self._by_hand = not plan.config.workers and not self._specs
        """True if all workers are joined by hand."""
        self._is_open = plan.config.host is not None and not plan.joining and not self._on_cluster
        """True if other launchers may join."""
        self._loss = ""
        """Text about the host that was lost last."""

    def start(self) -> None:
        """Start the agents that the run begins with. Raises LaunchError if nothing can carry them."""
        self._start(self._specs[: self._initial])

    def grow(self, view: MembersView) -> None:
        """Start the other agents once the run has begun, so that none takes the room of the first ones."""
        if view.generation and len(self._hosts) < len(self._specs) and not view.stopped and not self.is_ending(view):
            self._start(self._specs[self._initial :])

    def _start(self, specs: Sequence[AgentSpec]) -> None:
        for spec in specs:
            self._hosts[spec.host.name] = _RemoteHost(spec, self._start_agent(spec))

    def watch(self, ask: Callable[[], None]) -> None:
        """Ask for a new view if there may be workers elsewhere."""
        if self._hosts or self._is_open:
            ask()

    def handle(self, exited: AgentExited, view: MembersView, report: ReportLost) -> None:
        """Handle the exit of an agent; `report` its loss. Raises LaunchError if it ends the run."""
        host = self._hosts[exited.host]
        host.state = "lost" if exited.code else "done"
        if not exited.code:
            return
        if exited.is_replaceable:
            is_asked = view.left.issuperset(host.spec.numbers)
            host.replacements = 0 if is_asked or (exited.code < 0 and host.is_in(view)) else host.replacements
            returns = host.replacements < self._restarts and not self.is_ending(view)
            for number in host.spec.numbers:
                report(number, exited.text.splitlines()[0], returns)
            if returns:
                self._replace(host)
                return
        if exited.code == FAILED or not host.takes_part(view):
            raise LaunchError(exited.text)
        self._loss = exited.text
        count = host.spec.host.workers
        workers = f"its {count} workers" if count > 1 else "its worker"
        self._note(f"{exited.text.splitlines()[0]}; continuing without {workers}")

    def _replace(self, host: _RemoteHost) -> None:
        """Start another agent for a host; the lost one has already exited."""
        host.agent.close(0.0)
        host.replacements += 1
        agent = self._start_agent(self._replacements[host.spec.host.name])
        host.state, host.failed_at, host.agent = "running", None, agent

    def count(self) -> int:
        """Return the number of workers of hosts that are not lost."""
        return sum(host.spec.host.workers for host in self._hosts.values() if host.state != "lost")

    def is_ending(self, view: MembersView) -> bool:
        """Return True if workers elsewhere have finished: no restart is needed then."""
        return any(host.state == "done" for host in self._hosts.values()) or (self._by_hand and view.finished > 0)

    def is_over(self, view: MembersView, is_ending: bool) -> bool:
        """Return True if the run needs no worker elsewhere: once it ends, not those of hosts that have failed."""
        if self._by_hand:
            return view.is_over or bool(view.stopped)
        if self._is_open and view.launchers and (is_ending or view.running):
            return False  # they train, or their last output and events are still on their way
        running = [host for host in self._hosts.values() if host.state == "running"]
        if self._on_cluster and view.stopped:
            return all(host.has_not_joined(view) or host.has_failed(view) for host in running)
        return all(is_ending and self._is_unneeded(host, view) for host in running)

    def _is_unneeded(self, host: _RemoteHost, view: MembersView) -> bool:
        """Return True for a host that has failed; on a cluster, for a host that waits for room or has not joined."""
        return not host.is_in(view) if self._on_cluster else host.has_failed(view)

    def raise_loss(self, view: MembersView) -> None:
        """Raise LaunchError for a run that has no workers any more, if those elsewhere are the cause."""
        if self._loss:
            raise LaunchError(self._loss)
        if view.stopped:
            raise LaunchError(f"the run cannot continue: {view.stopped}")

    def end(self) -> None:
        """Let all agents end their workers."""
        for host in self._hosts.values():
            host.agent.end()

    def close(self) -> None:
        """Wait for the agents, together at most END_S."""
        limit = time.monotonic() + END_S
        for host in self._hosts.values():
            host.agent.close(max(0.0, limit - time.monotonic()))
