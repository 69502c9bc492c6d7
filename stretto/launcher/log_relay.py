"""What the workers say: read without pause, kept in their logs, and shown as far as a person asked to see it.

One thread does all of it, so that a full pipe never holds up a worker, a slow terminal never holds up the
watching over processes, and nothing that is shown needs a lock.
"""

from __future__ import annotations

import contextlib
import functools
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

from stretto.launcher.config import Output
from stretto.launcher.process_specs import called
from stretto.launcher.progress_display import OURS, ProgressDisplay, whole_lines
from stretto.membership.coordinator import COORDINATOR

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 13
TICK_S = 0.2
"""How often what is shown is renewed."""
SOON_S = 0.02
"""How soon it is seen, when all pipes are closed, that there is a new one or that there will be none."""
DRAIN_S = 0.7
"""How long a pipe may stay open after the workers: a process that has left its group may hold it."""


def log_of(folder: Path, worker: int) -> Path:
    """Where the output of a worker is kept, or a server's."""
    return folder / f"{called(worker).removeprefix('the ').replace(' ', '-')}.log"


@dataclass
class _Voice:
    """The output of one worker, or of a server, which has a number below 0."""

    worker: int
    pipe: IO[bytes]
    log: Path
    file: int | None
    tail: bytes = b""
    begun: bytes = field(default=b"")

    def close(self) -> None:
        """Let go of the pipe and the log. Idempotent."""
        self.pipe.close()
        if self.file is not None:
            os.close(self.file)
            self.file = None


class LogRelay(threading.Thread):
    """Reads all pipes until it is closed and the last one is."""

    def __init__(self, folder: Path, output: Output, watch: ProgressDisplay) -> None:
        super().__init__(name="relay", daemon=True)
        self._folder = folder
        self._output = output
        self._watch: ProgressDisplay | None = watch
        self._limit: float | None = None
        self._selector = selectors.DefaultSelector()
        self._voices: dict[int, _Voice] = {}
        self._notes: SimpleQueue[str] = SimpleQueue()

    def listen(self, worker: int, pipe: IO[bytes], life: int = 0) -> None:
        """Add a worker, or one of its lives, whose output follows that of the last. The pipe is closed at its end."""
        voice = _voice(worker, pipe, self._folder)
        if life:
            voice.tail = self._voices[worker].tail
            self._keep(voice, b"stretto: %s is started again, for the %d. time\n" % (called(worker).encode(), life))
        self._voices[worker] = voice
        self._selector.register(pipe, selectors.EVENT_READ, voice)

    def note(self, text: str) -> None:
        """Show a line of the library's own, soon."""
        self._notes.put(text)

    def run(self) -> None:
        """Pass on what comes, and renew what is shown."""
        due = time.monotonic()
        while (self._limit is None or self._selector.get_map()) and not self._is_over():
            for key, _ in self._selector.select(timeout=TICK_S if self._selector.get_map() else SOON_S):
                self._read(key.data)
            self._say_notes()
            if time.monotonic() >= due:
                self._show(lambda watch: watch.poll())
                due = time.monotonic() + TICK_S
        self._say_notes()
        self._show(lambda watch: watch.end())
        self._let_go()

    def close(self) -> None:
        """Wait for the last output of workers that have ended, but no longer than `DRAIN_S`."""
        self._limit = time.monotonic() + DRAIN_S
        if self.ident is None:
            self._let_go()
        else:
            self.join(timeout=DRAIN_S + 2 * TICK_S)

    def tail(self, worker: int) -> str:
        """The last lines that a worker has written."""
        return self._voices[worker].tail.decode(errors="replace").strip("\n")

    def _is_over(self) -> bool:
        return self._limit is not None and time.monotonic() > self._limit

    def _say_notes(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                text = self._notes.get_nowait()
                self._show(functools.partial(_note, text=text))

    def _read(self, voice: _Voice) -> None:
        data = os.read(voice.pipe.fileno(), CHUNK_BYTES)
        voice.tail = (voice.tail + data)[-TAIL_BYTES:]
        self._keep(voice, data)
        self._pass_on(voice, data)
        if not data:
            self._selector.unregister(voice.pipe)
            voice.close()

    def _let_go(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _keep(self, voice: _Voice, data: bytes) -> None:
        while voice.file is not None and data:
            try:
                data = data[os.write(voice.file, data) :]
            except OSError as error:
                os.close(voice.file)
                voice.file = None
                self.note(f"{voice.log} cannot be written any more: {error.strerror}; the run goes on")

    def _pass_on(self, voice: _Voice, data: bytes) -> None:
        if self._output == "rank0" and voice.worker == 0:
            self._show(lambda watch: watch.say(data))
        elif self._output == "all" or voice.worker == COORDINATOR:
            lines = _whole_lines(voice, data)
            if voice.worker == COORDINATOR:
                self._note_lines(lines)
            else:
                self._show(lambda watch: watch.say(_named(voice.worker, lines)))

    def _note_lines(self, lines: Sequence[bytes]) -> None:
        """What the coordinator says is for a person to read."""
        for line in lines:
            self.note(line.removeprefix(OURS).decode(errors="replace"))

    def _show(self, act: Callable[[ProgressDisplay], None]) -> None:
        """Show something. A terminal that went away ends the showing, never the run."""
        if self._watch is None:
            return
        try:
            act(self._watch)
        except OSError:
            self._watch = None
        except Exception:
            self._watch = None
            traceback.print_exc()


def _note(watch: ProgressDisplay, text: str) -> None:
    watch.note(text)


def _voice(worker: int, pipe: IO[bytes], folder: Path) -> _Voice:
    log = log_of(folder, worker)
    with contextlib.suppress(OSError):
        return _Voice(worker, pipe, log, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    return _Voice(worker, pipe, log, None)


def _whole_lines(voice: _Voice, data: bytes) -> list[bytes]:
    """The lines that `data` completes; no data means that no more will come."""
    lines, voice.begun = whole_lines(voice.begun + data)
    return [*lines, voice.begun] if not data and voice.begun else lines


def _named(worker: int, lines: Sequence[bytes]) -> bytes:
    """Lines with who said them."""
    who = str(worker) if worker >= 0 else called(worker)
    return b"".join(b"[%s] %s\n" % (who.encode(), line) for line in lines)
