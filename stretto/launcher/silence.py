"""Limit on the time in which a launcher that joined a run gets no reply from the coordinator.

A coordinator that is killed comes back, and a network may. The launcher of the run keeps the coordinator's port open
while the coordinator is restarted, so a refused connection means that this launcher has exited.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from stretto.errors import LaunchError, explain
from stretto.run_config import RunConfig
from stretto.units import spelled

CONNECT_S = 1.0
"""Limit of an attempt to connect."""


class Silence:
    """Time without a reply from the coordinator at an address, as far as this process has run; `note` shows a line."""

    def __init__(self, address: str, options: RunConfig, note: Callable[[str], None]) -> None:
        self._address, self._note = address, note
        self._every_s, self._limit_s = options.failure_timeout_s, options.timeout_s
        self._replies, self._silent_s, self._due_s = 0, 0.0, self._every_s

    def check(self, replies: int, passed_s: float) -> None:
        """Take the number of all replies, and the time since the last call. Raises LaunchError after the limit."""
        if replies != self._replies:
            if self._due_s > self._every_s:
                self._note(f"the coordinator at {self._address} answers again")
            self._replies, self._silent_s, self._due_s = replies, 0.0, self._every_s
            return
        self._silent_s += passed_s
        silent = f"no reply since {_clock(-self._silent_s)}"
        if self._silent_s >= self._limit_s:
            problem, expected = f"the coordinator at {self._address} does not answer", f"a reply within {self._option}"
            to_type = "stretto join again, once this machine reaches that of the run"
            raise LaunchError(explain(problem, got=silent, expected=expected, to_type=to_type))
        if self._silent_s < self._due_s:
            return
        if _is_refused(self._address):
            problem, expected = "the run has ended: its launcher was killed", "a launcher, which keeps its port open"
            got, to_type = f"{silent}; {self._address} refuses connections", "stretto run --resume RUN ... there"
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
        if self._due_s == self._every_s:
            until = _clock(self._limit_s - self._silent_s)
            self._note(f"the coordinator at {self._address}: {silent}; waiting until {until} ({self._option})")
        self._due_s += self._every_s

    @property
    def _option(self) -> str:
        return f"--timeout {spelled(self._limit_s)}s of stretto run"


def _clock(from_now_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + from_now_s))


def _is_refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
