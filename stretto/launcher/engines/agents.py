"""Interface of what starts agents: launchers of joining workers, `stretto join`, on other hosts.

    launcher                          carrier (ssh, Ray)          agent on the host
      | -- start(AgentSpec) ------------> | -- stretto join ... ------> |
      | -- key, on standard input --------|---------------------------> | joins the run, starts its workers
      | <- its output and its lines ------|---------------------------- |
      | <- AgentExited -------------------| <- exit code -------------- |   its workers have exited
      | -- end of standard input ---------|---------------------------> |   the launcher ends, or has been killed

The agent ends its workers when its standard input ends, so nothing is left on a host that loses its launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from stretto.host_list import Host


@dataclass(frozen=True)
class AgentSpec:
    """Agent to start on a host: the words after `stretto`, and the line for its standard input, which holds keys."""

    host: Host
    numbers: range
    """Numbers of its workers."""
    words: tuple[str, ...]
    key: bytes = field(repr=False)


class Agent(Protocol):
    """An agent that was started; its exit is reported. Each method may be called at any time, also after the exit."""

    def end(self) -> None:
        """Let the agent end its workers and exit."""
        ...

    def close(self, limit_s: float) -> None:
        """Wait for the exit, at most this long, and release what carries the agent. Idempotent."""
        ...


@dataclass(frozen=True)
class AgentExited:
    """Exit of the agent of a host. `text` explains a code that is not 0: cause, and what to type.

    `is_replaceable` is True if the same host, which an engine chooses, can be given another agent.
    """

    host: str
    code: int
    text: str = ""
    is_replaceable: bool = False


class AgentOutput(Protocol):
    """Receiver of what agents print, called from any thread."""

    def show(self, data: bytes) -> None:
        """Show output of workers."""
        ...

    def note(self, text: str) -> None:
        """Show a line."""
        ...


StartAgent = Callable[[AgentSpec], Agent]
"""Starts an agent. Raises LaunchError if nothing can carry it."""
