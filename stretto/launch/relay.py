"""What the workers say: read without pause, kept in their logs, and shown as far as a person asked to see it.

One thread does all of it, so that a full pipe never holds up a worker, a slow terminal never holds up the
watching over processes, and nothing that is shown needs a lock.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from stretto.launch.order import Output
from stretto.launch.parts import called
from stretto.launch.watch import Watch

CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 13
TICK_S = 0.2
"""How often what is shown is renewed."""
DRAIN_S = 0.7
"""How long a pipe may stay open after the workers: a process that has left its group may hold it."""


def log_of(folder: Path, worker: int) -> Path:
    """Where the output of a worker is kept, or a server's."""
    return folder / f"{called(worker).replace(' ', '-')}.log"


@dataclass
class _Voice:
    """The output of one worker, or of a server, which has a number below 0."""

    worker: int
    pipe: IO[bytes]
    log: Path
    file: int | None
    tail: bytes = b""
    begun: bytes = field(default=b"")


class Relay(threading.Thread):
    """Reads all pipes until the last one closes."""

    def __init__(self, folder: Path, output: Output, watch: Watch) -> None:
        super().__init__(name="relay", daemon=True)
        self._folder = folder
        self._output = output
        self._watch: Watch | None = watch
        self._limit: float | None = None
        self._selector = selectors.DefaultSelector()
        self._voices: dict[int, _Voice] = {}

    def listen(self, worker: int, pipe: IO[bytes]) -> None:
        """Add a worker, before the thread is started. The pipe is closed at the end."""
        self._voices[worker] = voice = _voice(worker, pipe, self._folder)
        self._selector.register(pipe, selectors.EVENT_READ, voice)

    def run(self) -> None:
        """Pass on what comes, and renew what is shown."""
        due = time.monotonic()
        while self._selector.get_map() and not self._is_over():
            for key, _ in self._selector.select(timeout=TICK_S):
                self._read(key.data)
            if time.monotonic() >= due:
                self._show(lambda watch: watch.poll())
                due = time.monotonic() + TICK_S
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

    def _read(self, voice: _Voice) -> None:
        data = os.read(voice.pipe.fileno(), CHUNK_BYTES)
        if not data:
            self._selector.unregister(voice.pipe)
        voice.tail = (voice.tail + data)[-TAIL_BYTES:]
        self._keep(voice, data)
        self._pass_on(voice, data)

    def _let_go(self) -> None:
        for voice in self._voices.values():
            voice.pipe.close()
            if voice.file is not None:
                os.close(voice.file)
        self._selector.close()

    def _keep(self, voice: _Voice, data: bytes) -> None:
        while voice.file is not None and data:
            try:
                data = data[os.write(voice.file, data) :]
            except OSError as error:
                os.close(voice.file)
                voice.file = None
                self._warn(f"{voice.log} cannot be written any more: {error.strerror}; the run goes on")

    def _warn(self, text: str) -> None:
        self._show(lambda watch: watch.note(text))

    def _pass_on(self, voice: _Voice, data: bytes) -> None:
        if self._output == "lead" and voice.worker == 0:
            self._show(lambda watch: watch.say(data))
        if self._output == "all":
            lines = _whole_lines(voice, data)
            self._show(lambda watch: watch.say(lines))

    def _show(self, act: Callable[[Watch], None]) -> None:
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


def _voice(worker: int, pipe: IO[bytes], folder: Path) -> _Voice:
    log = log_of(folder, worker)
    with contextlib.suppress(OSError):
        return _Voice(worker, pipe, log, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    return _Voice(worker, pipe, log, None)


def _whole_lines(voice: _Voice, data: bytes) -> bytes:
    """The lines that `data` completes, each with who said it; no data means that no more will come."""
    *lines, voice.begun = (voice.begun + data).split(b"\n")
    if not data and voice.begun:
        lines.append(voice.begun)
    who = str(voice.worker) if voice.worker >= 0 else called(voice.worker)
    return b"".join(b"[%s] %s\n" % (who.encode(), line) for line in lines)
