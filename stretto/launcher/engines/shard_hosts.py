"""Shards of a parameter server on other hosts (`--servers 2@b`): ssh starts an agent on each host, `stretto serve`.

The supervisor starts, restarts and signals these shards as it does local ones; the messages are those of
`shard_messages`. A host that is lost ends the run: the parameters were there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty

from stretto.errors import LaunchError, LogError, explain
from stretto.events import LogFile
from stretto.host_list import Host
from stretto.host_list import parse as parse_hosts
from stretto.launcher.config import codec_folder
from stretto.launcher.engines.agents import AgentExited, AgentSpec
from stretto.launcher.engines.interface import Engine, EngineLost, Exited, Inbox, Process, Signalled
from stretto.launcher.engines.shard_messages import (
    FROM_AGENT,
    ReleaseShard,
    ServeShards,
    ShardExited,
    ShardOutput,
    ShardsListen,
    SignalShard,
    StartShard,
    ToAgent,
    line,
)
from stretto.launcher.engines.ssh import SshAgent, SshAgents
from stretto.launcher.join import packed_code
from stretto.launcher.process_specs import ProcessPlan, ProcessSpec, server_of
from stretto.launcher.signals import Stopped
from stretto.membership.worker_status import ProcessRecord
from stretto.process_config import ShardConfig
from stretto.run_config import RunConfig
from stretto.run_dir import versions

LISTEN_S, POLL_S = 60.0, 0.05
"""Limit of the wait for the agents, and its interval."""
END_S = 5.0
"""Time that agents have to end their shards."""
Send = Callable[[ToAgent], None]


class ShardHosts:
    """Engine of a run whose shards may be on other hosts; `engine` starts all other processes, or all."""

    def __init__(
        self, config: RunConfig, folder: Path, engine: Engine, inbox: Inbox, note: Callable[[str], None]
    ) -> None:
        self._config, self._folder, self._engine = config, folder, engine
        self._inbox, self._note = inbox, note
        self._hosts: list[_ShardHost] = []
        self._by_number: dict[int, _ShardHost] = {}

    def begin(self, plan: ProcessPlan, note: Callable[[str], None]) -> ProcessPlan:
        """Start the agents; return the plan with the addresses of their shards, which `note` shows.

        Raises LaunchError and Stopped.
        """
        first = 0
        for host in parse_hosts(self._config.server_hosts or ""):
            shards = range(first, first + host.workers)
            self._hosts.append(_ShardHost(host, shards, self._config, self._folder, self._inbox, self._note))
            self._by_number |= dict.fromkeys(map(server_of, shards), self._hosts[-1])
            self._hosts[-1].begin(plan.servers.secret)
            first = shards.stop
        limit = time.monotonic() + LISTEN_S
        while missing := [host for host in self._hosts if not host.addresses]:
            self._await_news(missing[0], limit)
        for ready in self._hosts:
            note(f"{ready} on {ready.name}, at {', '.join(ready.addresses)}")
        hosted = tuple(address for ready in self._hosts for address in ready.addresses)
        return replace(plan, servers=replace(plan.servers, hosted=hosted))

    def _await_news(self, missing: _ShardHost, limit: float) -> None:
        try:
            news = self._inbox.get(timeout=POLL_S)
        except Empty:
            if time.monotonic() < limit:
                return
            problem, expected = f"host {missing.name} starts no shards", f"addresses of shards within {LISTEN_S:g} s"
            to_type = f"ssh {missing.name} '{self._config.remote_stretto} --version'"
            raise LaunchError(explain(problem, got="no reply", expected=expected, to_type=to_type)) from None
        match news:
            case Signalled():
                raise Stopped(news.number)
            case EngineLost():
                raise LaunchError(news.text)

    def start(self, spec: ProcessSpec) -> Process:
        """Start a process. Raises LaunchError if it cannot be started."""
        host = self._by_number.get(spec.number)
        return self._engine.start(spec) if host is None else host.start(spec)

    def capacity(self) -> int | None:
        """Return how many more processes can be started on this machine; None without a limit."""
        return self._engine.capacity()

    def close(self) -> None:
        """End all processes, here and on the hosts. Idempotent."""
        for host in self._hosts:
            host.end()
        self._engine.close()
        limit = time.monotonic() + END_S
        for host in self._hosts:
            host.close(max(0.0, limit - time.monotonic()))


class _ShardHost:
    """Agent of a host, and the processes that it has started."""

    def __init__(
        self, host: Host, shards: range, config: RunConfig, folder: Path, inbox: Inbox, note: Callable[[str], None]
    ) -> None:
        self.name, self._shards, self._config, self._inbox = host.name, shards, config, inbox
        self.note = note
        self.addresses: tuple[str, ...] = ()
        """Addresses of the shards; empty until the agent has opened their sockets."""
        self._host, self._log = host, folder / "events.jsonl"
        self._agent: SshAgent | None = None
        self._processes: dict[int, ShardProcess] = {}
        """Processes by the number of their start."""
        self._starts = count()
        self._partial = b""
        self._is_ending = False

    def __str__(self) -> str:
        shards = ", ".join(map(str, self._shards))
        return f"shard{'s' * (len(self._shards) > 1)} {shards} of the parameter server"

    def begin(self, secret: str | None) -> None:
        """Start the agent; the code that it receives is without the run's secret.

        Raises LaunchError if ssh cannot be started.
        """
        config, secrets = self._config, [secret] if secret is not None else []
        code = packed_code(config, secrets) if codec_folder(config) is not None and not config.module else b""
        wanted = ServeShards(versions(), config.host or "", tuple(self._shards), config.name, code)
        agents = SshAgents(config.remote_stretto, config.failure_timeout_s, self._report_loss, self)
        self._agent = agents.start(AgentSpec(self._host, self._shards, ("serve",), line(wanted)))

    def start(self, spec: ProcessSpec) -> ShardProcess:
        """Start the process of a shard."""
        assert isinstance(spec.config, ShardConfig)
        start = next(self._starts)
        process = self._processes[start] = ShardProcess(spec.number, start, self._send)
        self._send(StartShard(start, spec.config))
        return process

    def end(self) -> None:
        """Let the agent end its processes and exit."""
        self._is_ending = True
        if self._agent is not None:
            self._agent.end()

    def close(self, limit_s: float) -> None:
        """Wait for the agent, at most this long."""
        if self._agent is not None:
            self._agent.close(limit_s)
        self._end_outputs()

    def show(self, data: bytes) -> None:
        """Process replies of the agent; what a shell there prints before is shown."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for reply in lines:
            try:
                self._process(FROM_AGENT.decode(reply))
            except ValueError:
                self.note(f"{self.name}: {reply.decode(errors='replace')}")

    def _process(self, reply: ShardsListen | ShardOutput | ShardExited) -> None:
        match reply:
            case ShardsListen():
                self.addresses = reply.addresses
            case ShardOutput():
                self._processes[reply.start].take_output(reply.data)
            case ShardExited():
                process = self._processes[reply.start]
                process.note_exit(reply.record)
                self._append(reply.events)
                exited = Exited(process.number, reply.code, reply.injected, reply.record, process)
                self._inbox.put(exited)

    def _append(self, events: bytes) -> None:
        """Append events to the log of the run. Events that cannot be written are lost."""
        with contextlib.suppress(LogError):
            LogFile(self._log).finish(bytearray(events))

    def _send(self, message: ToAgent) -> None:
        assert self._agent is not None
        self._agent.send(line(message))

    def _report_loss(self, exited: AgentExited) -> None:
        """Report that the agent has exited, with all its processes."""
        self._end_outputs()
        if not self._is_ending:
            text = exited.text or f"the agent on host {self.name} has ended"
            verb = "are" if len(self._shards) > 1 else "is"
            self._inbox.put(EngineLost(f"{self} {verb} lost: {text}" if self.addresses else text))

    def _end_outputs(self) -> None:
        for process in self._processes.values():
            process.take_output(b"")


class ShardProcess:
    """Process of a shard on another host."""

    def __init__(self, number: int, start: int, send: Send) -> None:
        self.number, self._start, self._send = number, start, send
        self._record = ProcessRecord()
        reading, self._writing = os.pipe()
        self.output = os.fdopen(reading, "rb", buffering=0)
        self._is_ended = False
        self._lock = threading.Lock()

    def record(self) -> ProcessRecord:
        """Return the record that the process had at its exit; an empty one before."""
        return self._record

    def is_stopped(self) -> bool:
        """Return False: the workers that wait for a shard notice that it does not reply."""
        return False

    def inject(self, number: signal.Signals) -> None:
        """Send a signal to the process, to inject a fault."""
        self._send(SignalShard(self._start, number, injected=True))

    def terminate(self) -> None:
        """Ask the process to end."""
        self._send(SignalShard(self._start, signal.SIGTERM, injected=False))

    def kill(self) -> None:
        """Kill the process."""
        self._send(SignalShard(self._start, signal.SIGKILL, injected=False))

    def release(self) -> None:
        """Kill the remaining processes of the group."""
        self._send(ReleaseShard(self._start))

    def note_exit(self, record: ProcessRecord) -> None:
        """Keep the last record."""
        self._record = record

    def take_output(self, data: bytes) -> None:
        """Pass output on while it is read; empty data is its end."""
        with self._lock, contextlib.suppress(OSError):
            if self._is_ended:
                return
            if not data:
                self._is_ended = True
                os.close(self._writing)
            while data:
                data = data[os.write(self._writing, data) :]
