"""Relay of the processes' output to their log files and, as far as `--output` asks for it, to the terminal.

One thread does all of it, so that a full pipe never blocks a worker, a slow terminal never blocks the supervisor, and
the display needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from stretto.events import COORDINATOR, RELAY, process_name
from stretto.launcher.logs_elsewhere import LogsElsewhere
from stretto.launcher.progress_display import OURS, ProgressDisplay, whole_lines
from stretto.membership.output_lines import log_of, open_log, plain
from stretto.membership.worker_status import ProcessRecord
from stretto.run_config import Output

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 13
TICK_S = 0.2
"""Interval between updates of the display."""
SOON_S = 0.02
"""Interval at which a new pipe, or the end, is looked for while all pipes are closed."""
DRAIN_S = 0.7
"""Time that a pipe may stay open after the workers: a process that left its group may hold it."""
LARGEST_PIPE = 1 << 20
"""Largest number of bytes that a pipe holds; more of them needs a privilege."""


Forward = Callable[[int, int, bytes], None]
"""Takes output of a worker's rank."""


@dataclass
class _Output:
    """Output of one process: its pipe and its log file."""

    worker: int
    rank: int
    pipe: IO[bytes]
    log: Path
    file: int | None
    tail: bytes = b""
    partial: bytes = field(default=b"")

    def close(self) -> None:
        """Close the pipe and the log file. Idempotent."""
        self.pipe.close()
        if self.file is not None:
            os.close(self.file)
            self.file = None


class LogRelay(threading.Thread):
    """Thread that reads all pipes until it is closed and the last pipe is closed.

    `forward` receives all output that goes to the log files; `elsewhere` reads those of workers on other machines.
    """

    def __init__(
        self,
        folder: Path,
        output: Output,
        display: ProgressDisplay,
        forward: Forward | None = None,
        elsewhere: LogsElsewhere | None = None,
    ) -> None:
        super().__init__(name="relay", daemon=True)
        self._folder, self._forward, self._elsewhere = folder, forward, elsewhere
        self._output = output
        self._display: ProgressDisplay | None = display
        self._limit: float | None = None
        self._reads = 0
        """Number of reads of pipes, which tells that this thread is not blocked."""
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[tuple[int, int], _Output] = {}
        """Outputs by worker and rank."""
        self._due: SimpleQueue[Callable[[ProgressDisplay], None]] = SimpleQueue()
        """Updates of the display that other threads have asked for."""

    def add(self, worker: int, pipe: IO[bytes], life: int = 0, rank: int = 0) -> None:
        """Add the output of a process. That of a later incarnation is appended to the same log file."""
        source = _output_of(worker, rank, pipe, self._folder)
        if life:
            source.tail = self._outputs[worker, rank].tail if (worker, rank) in self._outputs else b""
            self._store(source, b"stretto: restart %d of %s\n" % (life, process_name(worker, rank).encode()))
        self._outputs[worker, rank] = source
        self._selector.register(pipe, selectors.EVENT_READ, source)

    def note(self, text: str) -> None:
        """Show a line of Stretto's own, soon."""
        self._due.put(lambda display: display.note(text))

    def follow(self, records: Sequence[ProcessRecord]) -> None:
        """Show the progress of workers whose events this launcher does not see."""
        self._due.put(lambda display: display.follow(records))

    def show(self, data: bytes) -> None:
        """Show output of workers of other hosts, soon, without characters that control a terminal.

        No character is cut at its ends.
        """
        shown = b"\r".join(plain(part) for part in data.split(b"\r"))  # a progress bar stays on its line
        self._due.put(lambda display: display.say(shown))

    def run(self) -> None:
        """Relay output and update the display until closed."""
        due_s = time.monotonic()
        while (self._limit is None or self._selector.get_map()) and not self._is_over():
            for key, _ in self._selector.select(timeout=TICK_S if self._selector.get_map() else SOON_S):
                self._read(key.data)
            self._show_due()
            if time.monotonic() >= due_s:
                self._relay_elsewhere()
                self._show(lambda display: display.poll())
                due_s = time.monotonic() + TICK_S
        self._read_rest()
        self._relay_elsewhere()
        self._show_due()
        self._show(lambda display: display.end())
        self._close_all()

    def close(self) -> None:
        """Wait for the last output of exited processes: DRAIN_S, and as long as output is read and shown after that."""
        self._limit = time.monotonic() + DRAIN_S
        if self.ident is None:
            self._close_all()
            return
        reads = -1
        while self.is_alive() and reads != self._reads:
            reads = self._reads
            self.join(timeout=DRAIN_S + 2 * TICK_S)

    def tail(self, worker: int, rank: int = 0) -> str:
        """Return the last lines of a process."""
        return self._outputs[worker, rank].tail.decode(errors="replace").strip("\n")

    def _is_over(self) -> bool:
        return self._limit is not None and time.monotonic() > self._limit

    def _show_due(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._show(self._due.get_nowait())

    def _read_rest(self) -> None:
        """Read what the pipes hold, without a wait: on a busy machine the time limit passes before the last output."""
        for _ in range(LARGEST_PIPE // CHUNK_BYTES + 1):
            for key, _ in self._selector.select(timeout=0):
                self._read(key.data)

    def _read(self, source: _Output) -> None:
        self._reads += 1
        data = os.read(source.pipe.fileno(), CHUNK_BYTES)
        source.tail = (source.tail + data)[-TAIL_BYTES:]
        self._store(source, data)
        self._relay(source, data)
        if not data:
            self._selector.unregister(source.pipe)
            source.close()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def append(self, worker: int, rank: int, text: str) -> None:
        """Add lines of Stretto's own to the log file of a process here, once it has exited."""
        with contextlib.suppress(OSError), open(open_log(log_of(self._folder, worker, rank)), "a") as file:
            file.write(text)

    def _relay_elsewhere(self) -> None:
        """Show new output of workers on other machines, as that of workers here."""
        for (worker, rank), data in self._elsewhere.read() if self._elsewhere is not None else ():
            if self._output == "rank0" and (worker, rank) == (0, 0):
                self.show(data)
            elif self._output == "all":
                self.show(_labelled(worker, rank, data.splitlines()))

    def _store(self, source: _Output, data: bytes) -> None:
        if self._forward is not None and data:
            self._forward(source.worker, source.rank, data)
        while source.file is not None and data:
            try:
                data = data[os.write(source.file, data) :]
            except OSError as error:
                os.close(source.file)
                source.file = None
                self.note(f"{source.log} cannot be written any more: {error.strerror}; the run continues")

    def _relay(self, source: _Output, data: bytes) -> None:
        if self._output == "rank0" and (source.worker, source.rank) == (0, 0):
            self._show(lambda display: display.say(data))
        elif self._output == "all" or source.worker in (COORDINATOR, RELAY):
            lines = _whole_lines(source, data)
            if source.worker in (COORDINATOR, RELAY):
                self._note_lines(lines)
            else:
                self._show(lambda display: display.say(_labelled(source.worker, source.rank, lines)))

    def _note_lines(self, lines: Sequence[bytes]) -> None:
        """Show lines of the coordinator or the relay as notes."""
        for line in lines:
            self.note(line.removeprefix(OURS).decode(errors="replace"))

    def _show(self, act: Callable[[ProgressDisplay], None]) -> None:
        """Update the display. A closed terminal ends the display, never the run."""
        if self._display is None:
            return
        try:
            act(self._display)
        except OSError:
            self._display = None
        except Exception:
            self._display = None
            traceback.print_exc()


def _output_of(worker: int, rank: int, pipe: IO[bytes], folder: Path) -> _Output:
    output = _Output(worker, rank, pipe, log_of(folder, worker, rank), None)
    with contextlib.suppress(OSError):
        output.file = open_log(output.log)
    return output


def _whole_lines(source: _Output, data: bytes) -> list[bytes]:
    """Return the lines that `data` completes; empty data is the end of the output."""
    lines, source.partial = whole_lines(source.partial + data)
    return [*lines, source.partial] if not data and source.partial else lines


def _labelled(worker: int, rank: int, lines: Sequence[bytes]) -> bytes:
    """Return the lines, each with the process that printed it."""
    process_label = str(worker) if worker >= 0 and not rank else process_name(worker, rank)
    return b"".join(b"[%s] %s\n" % (process_label.encode(), line) for line in lines)
