"""Interface of an engine, which starts the processes of a run, and the events that it reports to the supervisor."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import IO, Protocol

from stretto.launcher.engines.agents import AgentExited
from stretto.launcher.process_specs import ProcessSpec
from stretto.membership.worker_status import ProcessRecord

FINISHED = ProcessRecord(finished=True)


class Process(Protocol):
    """A process that was started. Each method may be called at any time, also after the exit."""

    @property
    def output(self) -> IO[bytes]:
        """Reading end of the output of the process, with a file descriptor; closed when the process has exited."""
        ...

    def record(self) -> ProcessRecord:
        """Return the newest record of the process."""
        ...

    def is_stopped(self) -> bool:
        """Return True if the process is stopped, as by SIGSTOP."""
        ...

    def inject(self, number: signal.Signals) -> None:
        """Send a signal to this process, not to its children, to inject a fault."""
        ...

    def terminate(self) -> None:
        """Ask the process to end, by SIGTERM: a worker leaves gracefully."""
        ...

    def kill(self) -> None:
        """Kill the process; its exit is reported like any other."""
        ...

    def release(self) -> None:
        """Kill the children of an exited process, and free the resources that the engine holds for it. Idempotent."""
        ...


class Engine(Protocol):
    """Starts processes and puts each exit into the inbox that it was made with.

    An exit may be reported late, twice or never: the supervisor compares `Exited.process` with the process that it
    runs under that number, and the coordinator detects a failure that no engine reports.
    """

    def start(self, spec: ProcessSpec) -> Process:
        """Start a process. Raises LaunchError if it cannot be started."""
        ...

    def capacity(self) -> int | None:
        """Return how many more processes can be started; None without a limit."""
        ...

    def close(self) -> None:
        """End all processes: SIGTERM, a short wait or until the next signal to the launcher, SIGKILL. Idempotent."""
        ...


@dataclass(frozen=True)
class Exited:
    """Exit of a process. Servers and the coordinator have numbers below 0; `code` is negative for a signal.

    `injected` is True if this launcher sent a signal to inject a fault. `record` is the last record of the process;
    `record.finished` is False for a worker that called os._exit in the middle of its training.
    """

    worker: int
    code: int
    injected: bool = False
    record: ProcessRecord = FINISHED
    process: Process | None = field(default=None, compare=False, repr=False)
    rank: int = 0
    """Rank of the process within its worker, which the supervisor fills in."""

    @property
    def failed(self) -> bool:
        """True unless a worker finished: a server must not exit while workers run.

        A worker that has left, as it was asked to, and whose script has ended, may be killed while its process ends.
        """
        if self.worker >= 0 and self.code < 0 and self.record.left and self.record.finished:
            return False
        return self.code != 0 or self.worker < 0 or not self.record.finished


@dataclass(frozen=True)
class Signalled:
    """Signal that asks the launcher to end."""

    number: int


@dataclass(frozen=True)
class EngineLost:
    """Loss of a host and of all processes that an engine runs there, which ends the run. `text` is the error."""

    text: str


Inbox = SimpleQueue[Exited | AgentExited | EngineLost | Signalled]
