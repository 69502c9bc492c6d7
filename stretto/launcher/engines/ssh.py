"""Agents on hosts that the system's ssh client reaches, with the user's keys, agent and configuration.

Each host has one connection, which carries the agent from its start to its end. A connection that the user's own
configuration shares (ControlPath) is used; none is left open.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import shlex
import subprocess
import threading
from collections.abc import Callable
from typing import IO

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.agents import AgentExited, AgentOutput, AgentSpec
from stretto.launcher.engines.ssh_errors import explained
from stretto.launcher.progress_display import OURS

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 14
CONNECT_S = 15
HELD_S = 1.0
"""Time for which a single line is held back."""
LAST_S = 1.0
"""Limit of the wait for the last output of an agent that has exited."""
MISSED = 3
"""Number of unanswered messages after which ssh ends a connection."""


def ssh_command(spec: AgentSpec, remote_stretto: str, failure_timeout_s: float) -> list[str]:
    """Return the command that starts an agent. It holds no key.

    >>> from stretto.host_list import Host
    >>> ssh_command(AgentSpec(Host("b", 2), range(2), ("join", "10.0.0.1:7878"), b""), "~/venv/bin/stretto", 9.0)[-3:]
    ['--', 'b', '~/venv/bin/stretto join 10.0.0.1:7878']
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ControlMaster": "no",
        "ServerAliveInterval": max(1, round(failure_timeout_s / MISSED)),
        "ServerAliveCountMax": MISSED,
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "LogLevel": "ERROR",
    }
    typed = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *typed, "--", spec.host.name, f"{remote_stretto} {shlex.join(spec.words)}"]


class SshAgents:
    """Starts agents by ssh; the exit of each is given to `report`, its output to `output`."""

    def __init__(
        self,
        remote_stretto: str,
        failure_timeout_s: float,
        report: Callable[[AgentExited], None],
        output: AgentOutput,
    ) -> None:
        self._remote_stretto, self._failure_timeout_s = remote_stretto, failure_timeout_s
        self._report, self._output = report, output

    def start(self, spec: AgentSpec) -> SshAgent:
        """Start an agent. Raises LaunchError if there is no ssh client."""
        command = ssh_command(spec, self._remote_stretto, self._failure_timeout_s)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            problem, expected = f"hosts cannot be reached: ssh cannot be started: {error.strerror}", "an ssh client"
            to_type = "apt install openssh-client, or stretto join on each host"
            raise LaunchError(
                explain(problem, got=f"host {spec.host.name}", expected=expected, to_type=to_type)
            ) from error
        return SshAgent(spec, process, self._remote_stretto, self._report, self._output)


class SshAgent:
    """An agent that an ssh client carries."""

    def __init__(
        self,
        spec: AgentSpec,
        process: subprocess.Popen[bytes],
        remote_stretto: str,
        report: Callable[[AgentExited], None],
        output: AgentOutput,
    ) -> None:
        self._spec, self._process, self._remote_stretto = spec, process, remote_stretto
        self._report, self._output = report, output
        self._lines = AgentLines(lambda text: output.note(f"{spec.host.name}: {text}"))
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._lines.read, args=(_pipe(process.stderr),), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.send(spec.key)
        self._waiter = threading.Thread(target=self._await, daemon=True)
        self._waiter.start()

    def send(self, data: bytes) -> None:
        """Write to the standard input of the agent. After the exit, which is reported, nothing happens."""
        with contextlib.suppress(OSError, ValueError):
            left = memoryview(data)
            while left:
                left = left[os.write(_pipe(self._process.stdin).fileno(), left) :]

    def end(self) -> None:
        """Let the agent end its workers and exit: its standard input ends. What it prints then is not shown."""
        self._lines.is_shown = False
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()

    def close(self, limit_s: float) -> None:
        """Wait for the exit, at most this long, and end the connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self._process.kill()
        self._waiter.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                _pipe(pipe).close()

    def _read_output(self) -> None:
        pipe, decoder = _pipe(self._process.stdout).fileno(), codecs.getincrementaldecoder("utf-8")("replace")
        while data := os.read(pipe, CHUNK_BYTES):
            self._output.show(decoder.decode(data).encode())

    def _await(self) -> None:
        """Report the exit, after the last output."""
        code = self._process.wait()
        for reader in self._readers:
            reader.join(LAST_S)
        text = explained(self._spec.host.name, code, self._lines.tail.decode(errors="replace"), self._remote_stretto)
        if not code:
            self._lines.flush()
        self._report(AgentExited(self._spec.host.name, code, text if code else ""))


class AgentLines:
    """Lines on the standard error of an agent, which are shown as they come, except the last ones.

    The last line that begins with Stretto's name, and all after it, are held back: they may be the error with which the
    agent exits, which the launcher shows itself. A single line is no error, if HELD_S pass.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.tail = self._partial = b""
        self._held: list[bytes] = []
        self.is_shown = True

    def read(self, pipe: IO[bytes]) -> None:
        """Read lines until the end; the last ones stay held back."""
        while True:
            if len(self._held) == 1 and not select.select([pipe], [], [], HELD_S)[0]:
                self._show(1)
            if not (data := os.read(pipe.fileno(), CHUNK_BYTES)):
                self._held += [self._partial] if self._partial else []
                return
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._held += lines
            self._show(max((number for number, line in enumerate(self._held) if line.startswith(OURS)), default=0))

    def flush(self) -> None:
        """Show the lines that are held back."""
        self._show(len(self._held))

    def _show(self, count: int) -> None:
        shown, self._held = self._held[:count], self._held[count:]
        for line in shown if self.is_shown else ():
            self._note(line.removeprefix(OURS).decode(errors="replace").rstrip("\r"))


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
