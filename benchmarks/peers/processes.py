"""Starts the processes of a measurement, hears their results, and ends them and all that they started."""

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
"""Nothing that is waited for may take longer, the seconds of measuring aside."""
LOOK_S = 0.2
END_S = 15.0
"""A process that was asked to end has this long to do so."""

MARK = "PEER_MARK"
"""Each child has one of its own in its environment, which all that it starts inherit."""


class Child:
    """One process that calls `module.function()`; it says its result as a line of JSON and ends when told to."""

    def __init__(self, module: str, function: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        pipe = subprocess.PIPE
        code = f"import {module} as module; module.{function}()"
        self._mark = uuid.uuid4().hex
        own = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], bufsize=0, stdin=pipe, stdout=pipe, stderr=self._log, env=own, cwd=ROOT
        )

    def tell(self, **order: Any) -> None:
        """A line of JSON on its standard input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            self.fail("ended before it was told more")

    def hear(self, limit_s: float = LIMIT_S, beside: Sequence[Child] = ()) -> dict[str, Any]:
        """The next line of JSON; other lines are passed over. None of those beside it may end before."""
        until = time.monotonic() + limit_s
        while not (line := self._line(until, beside)).startswith(b"{"):
            pass
        said: dict[str, Any] = json.loads(line)
        return said

    def _line(self, until: float, beside: Sequence[Child]) -> bytes:
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], LOOK_S)[0]:
            for one in beside:
                if one.process.poll() is not None:
                    one.fail("ended before the result")
            if time.monotonic() > until:
                self.fail("said nothing within the limit")
        line: bytes = self.process.stdout.readline()
        return line or self.fail("ended before its result")

    def fail(self, why: str) -> NoReturn:
        """Tell what went wrong with this process, and what it said itself."""
        self._log.seek(0)
        raise SystemExit(f"a process {why}; its last words:\n{self._log.read().decode(errors='replace')[-2000:]}")

    def close(self, patience_s: float = END_S) -> None:
        """Ask it to end; kill it and all that it started if that takes too long. A second time nothing is done."""
        if self._log.closed:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        psutil.wait_procs(_marked(self._mark), timeout=patience_s)
        while family := _marked(self._mark):  # a look misses who is just replacing its program: no environment yet
            for one in family:
                _kill(one)
        self.process.wait(END_S)
        self.process.stdout.close()
        self._log.close()


def told_to_end() -> None:
    """Called by a child: wait until its parent closes it, or is gone."""
    sys.stdin.read()


def say(**result: Any) -> None:
    """Called by a child: its result."""
    print(json.dumps(result), flush=True)


def _marked(mark: str) -> list[psutil.Process]:
    """A child and all below it, orphans too; psutil knows each by its number and the time it was started."""
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
