"""Starts the processes of a measurement, reads their results, and ends them and their descendants."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import psutil

from benchmarks.pace import ROOT

LIMIT_S = 120.0
"""Limit of every wait, without the seconds of measuring."""
POLL_S = 0.2
END_S = 15.0
"""Seconds within which a process must end after its input was closed."""

MARK = "PEER_MARK"
"""Environment variable with a value of its own for each child, which its descendants inherit."""


class Child:
    """One process that calls `module.function()`, prints results as lines of JSON and ends when its input is closed."""

    def __init__(self, module: str, function: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        pipe = subprocess.PIPE
        code = f"import {module} as module; module.{function}()"
        self._mark = uuid.uuid4().hex
        own = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], bufsize=0, stdin=pipe, stdout=pipe, stderr=self._log, env=own, cwd=ROOT
        )

    def send(self, **message: Any) -> None:
        """Send a line of JSON to the child's standard input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self.fail("ended before it received all messages")

    def receive(self, limit_s: float = LIMIT_S, others: Sequence[Child] = ()) -> dict[str, Any]:
        """Return the next line of JSON; skip other lines. Raise SystemExit if one of the `others` ends before."""
        until = time.monotonic() + limit_s
        while not (line := self._line(until, others)).startswith(b"{"):
            pass
        result: dict[str, Any] = json.loads(line)
        return result

    def _line(self, until: float, others: Sequence[Child]) -> bytes:
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], POLL_S)[0]:
            for one in others:
                if one.process.poll() is not None:
                    one.fail("ended before the result of another")
            if time.monotonic() > until:
                self.fail("sent no result within the limit")
        line: bytes = self.process.stdout.readline()
        return line or self.fail("ended before its result")

    def fail(self, why: str) -> NoReturn:
        """Raise SystemExit with the reason and the end of the child's log."""
        self._log.seek(0)
        raise SystemExit(f"a process {why}; the end of its log:\n{self._log.read().decode(errors='replace')[-2000:]}")

    def close(self, timeout_s: float = END_S) -> None:
        """Close the child's input; kill it and its descendants after the timeout. Do nothing if called again."""
        if self._log.closed:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        psutil.wait_procs(_family_of(self._mark), timeout=timeout_s)
        while family := _family_of(
            self._mark
        ):  # misses a process that is just replacing its program: it has no environment
            for one in family:
                _kill(one)
        self.process.wait(END_S)
        self.process.stdout.close()
        self._log.close()


def wait_until_closed() -> None:
    """Wait until the parent closes this child's input or ends."""
    sys.stdin.read()


def send_result(**result: Any) -> None:
    """Print a result for the parent."""
    print(json.dumps(result), flush=True)


def _family_of(mark: str) -> list[psutil.Process]:
    """Return a child and its descendants, orphans included; psutil identifies each by its pid and start time."""
    return [one for one in psutil.process_iter() if _mark_of(one) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
    psutil.wait_procs([process], timeout=END_S)
