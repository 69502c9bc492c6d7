"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stretto.events import Event
from stretto.launcher.config import RunConfig
from stretto.launcher.run_status import Progress

STDERR = 2
OURS = b"stretto: "
"""The beginning of a line of the library's own."""
AT_A_BAR = re.compile(rb"(?<=[]|%#\r])" + OURS)
"""One right behind a progress bar, where both have come together."""
PLAIN_S = 5.0
"""Between two plain lines of progress."""


class Tail:
    """Reads what was appended to an event log since the last time. A line that is no event is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._torn = b""

    def read(self) -> list[Event]:
        """The events that have become whole."""
        *lines, self._torn = (self._torn + self._appended()).split(b"\n")
        return [event for line in lines if line and (event := _event(line)) is not None]

    def _appended(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
            return data
        return b""


def _event(line: bytes) -> Event | None:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=Event)
    return None


class ProgressDisplay:
    """Shows a run's progress on the standard error and what its workers say on `out`, a file descriptor.

    `title` stands before the progress, for a comparison to say where it is. `quiet` leaves only what the
    workers say. One thread at a time may call it.
    """

    def __init__(self, *, quiet: bool = False, title: str = "", out: int = 1) -> None:
        self.title = title
        self._quiet = quiet
        self._out: int | None = out
        self._begun = b""
        self._open: dict[int, bool] = {}
        self._live: Live | None = None
        self._console = Console(stderr=True)
        self._progress = Progress()
        self._folder = Path(os.devnull)
        self._events = Tail(self._folder)
        self._section: Tail | None = None
        """The log of the section that began last, but for the first, whose events are among the run's."""
        self._workers = 0
        self._since = self._said = 0.0

    def starting(self, what: str) -> None:
        """Announce a run before any of its processes is started."""
        self.note(f"starting {what}")

    def begin(self, folder: Path, order: RunConfig) -> None:
        """A run begins in a folder. The lead says notices itself, so they are only shown when it is not."""
        self._progress = Progress(notices=order.output == "none")
        self._folder, self._section = folder, None
        self._events = Tail(folder / "events.jsonl")
        self._workers = order.workers
        self._since = self._said = time.monotonic()
        sys.stdout.flush()
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            self._live = Live(
                self._view(),
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def say(self, data: bytes, to: int | None = None) -> None:
        """Show what workers have said, as it is; below it, on a terminal, goes the live line.

        It goes to `out`, or to the file descriptor `to`. A line of the library's own that a worker has printed begins
        on a line of its own here too.
        """
        to = self._out if to is None else to
        data = AT_A_BAR.sub(b"\n" + OURS, data)
        if self._live is not None and to is not None and os.isatty(to):
            self._say_above(b"\n" * bool(self._begun and data.startswith(OURS)) + data)
            return
        if data.startswith(OURS):
            self._end_lines()
        self._write(data, to)
        if to is not None:
            self._open[to] = is_open(data, self._open.get(to, False))

    def say_error(self, data: bytes) -> None:
        """Show what a worker has written to its standard error, where that is apart from its output."""
        self.say(data, STDERR)

    def _write(self, data: bytes, to: int | None) -> None:
        try:
            while to is not None and data:
                data = data[os.write(to, data) :]
        except OSError:
            self._out = None if to == self._out else self._out

    def _end_lines(self) -> None:
        """End the lines of the script that have no end yet and go where ours go, so that ours begin a line."""
        for to, is_begun in self._open.items():
            if is_begun and _is_stderr(to):
                self._write(b"\n", to)
                self._open[to] = False

    def _say_above(self, data: bytes) -> None:
        """Print whole lines; what has no end yet, like a progress bar, stands above the live line."""
        lines, self._begun = whole_lines(self._begun + data)
        for line in lines:
            self._console.out(_last_written(line), highlight=False)

    def note(self, text: str) -> None:
        """Show a line of the library's own."""
        if self._live is not None:
            self._console.print(Text(text, style="dim"), soft_wrap=True)
        elif not self._quiet:
            self._end_lines()
            print(f"stretto: {text}", file=sys.stderr, flush=True)

    def poll(self) -> None:
        """Take in what has happened and show it."""
        for event in self._events.read():
            if event.get("event") == "section":
                self._take_all(self._section)
                self._section = Tail(self._folder / str(event.get("folder")) / "events.jsonl")
            self._take(event)
        self._take_all(self._section)
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        elif time.monotonic() - self._said >= PLAIN_S:
            self._say_progress()

    def _take_all(self, section: Tail | None) -> None:
        for event in section.read() if section is not None else ():
            self._take(event)

    def _take(self, event: Event) -> None:
        if line := self._progress.take(event):
            self.note(line)
            self._said = time.monotonic()

    def _say_progress(self) -> None:
        self._said = time.monotonic()
        if self._progress.step and (facts := self._progress.facts()):
            self.note(", ".join(facts))

    def end(self) -> None:
        """The run has ended; the live line goes."""
        self.poll()
        if self._live is not None:
            if self._begun:
                self._say_above(b"\n")
            self._live.stop()
            self._live = None
        self._end_lines()
        if not self._quiet and self._open.get(self._out or 0):
            self._write(b"\n", self._out)  # a summary follows on the same output
            self._open.clear()

    def _view(self) -> Text:
        """What a line without an end holds so far, then the facts in as few lines as the width allows."""
        seconds = int(time.monotonic() - self._since)
        workers = f"{self._workers} worker{'s' * (self._workers != 1)}"
        head = " · ".join(filter(None, [self.title, self._progress.recipe, workers]))
        facts = [*(self._progress.facts() or ["starting"]), f"{seconds // 60}:{seconds % 60:02d}"]
        view = Text("\n".join(_in_lines([head, *facts], self._console.width)))
        view.stylize("bold", 0, len(head))
        return Text.from_ansi(_last_written(self._begun) + "\n").append_text(view) if self._begun else view


def _in_lines(facts: Sequence[str], width: int) -> list[str]:
    """Facts side by side as long as they fit."""
    lines = [""]
    for fact in facts:
        together = f"{lines[-1]} · {fact}" if lines[-1] else fact
        if len(together) < width:
            lines[-1] = together
        else:
            lines.append(fact)
    return lines


def whole_lines(said: bytes) -> tuple[list[bytes], bytes]:
    """The lines that are whole, and what is left to see of the one that is begun.

    >>> whole_lines(b"first\\n10%\\r20%\\r")
    ([b'first'], b'20%\\r')
    """
    *lines, begun = said.split(b"\n")
    return lines, _left_to_see(begun)


def _is_stderr(number: int) -> bool:
    """Return True if a file descriptor leads where the standard error does."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(number, STDERR)
    return False


def is_open(said: bytes, before: bool) -> bool:
    """Return True if a line is left without an end, given whether one was before.

    >>> is_open(b"10%", False), is_open(b"", True), is_open(b"10%\\r", False), is_open(b"all\\n", True)
    (True, True, True, False)
    """
    lines, begun = whole_lines(said)
    return bool(begun.strip(b"\r")) or (before and not lines)


def _left_to_see(line: bytes) -> bytes:
    """A carriage return begins a line anew, once something is behind it."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _last_written(line: bytes) -> str:
    return _left_to_see(line).rstrip(b"\r").decode(errors="replace")
