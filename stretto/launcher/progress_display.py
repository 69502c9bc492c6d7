"""Terminal display of a running run: a live line on a terminal, plain lines elsewhere."""

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
from stretto.launcher.run_status import Progress
from stretto.membership.worker_status import ProcessRecord
from stretto.notices import printable
from stretto.run_config import RunConfig

STDERR = 2
OURS = b"stretto: "
"""Prefix of a line of Stretto's own."""
AFTER_A_BAR = re.compile(rb"(?<=[]|%#\r])" + OURS)
"""A line of ours that directly follows a progress bar."""
PLAIN_S = 5.0
"""Interval between plain lines of progress."""


class Tail:
    """Reader of what was appended to an event log since the last call. Malformed lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._torn = b""

    def read(self) -> list[Event]:
        """Return the events that are complete since the last call."""
        *lines, self._torn = (self._torn + self._appended()).split(b"\n")
        return [event for line in lines if line and (event := _event(line)) is not None]

    def _appended(self) -> bytes:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
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
    """Shows the progress of a run on stderr, and the output of its workers on the file descriptor `out`.

    `title` precedes the progress, for a comparison of several runs. With `quiet` only the output of the workers is
    shown. Not thread-safe.
    """

    def __init__(self, *, quiet: bool = False, title: str = "", out: int = 1) -> None:
        self.title = title
        self._quiet = quiet
        self._out: int | None = out
        self._partial = b""
        self._open: dict[int, bool] = {}
        self._live: Live | None = None
        self._console = Console(stderr=True)
        self._progress = Progress()
        self._last_progress = ""
        self._folder = Path(os.devnull)
        self._events = Tail(self._folder)
        self._section: Tail | None = None
        """Log of the current section; None in the first one, whose events are in the log of the run."""
        self._workers = 0
        self._started_at = self._shown_at = 0.0
        self._shown_facts: list[str] = []
        """Facts of the last plain line, which is not repeated while nothing changes."""

    def starting(self, what: str) -> None:
        """Announce a run before any of its processes is started."""
        self.note(f"starting {what}")

    def begin(self, folder: Path, config: RunConfig) -> None:
        """Start the display of a run. Notices are shown only if worker 0, which prints them, is not shown."""
        self._progress = Progress(notices=config.output == "none")
        self._folder, self._section = folder, None
        self._events = Tail(folder / "events.jsonl")
        self._workers = config.initial_workers
        self._started_at = self._shown_at = time.monotonic()
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
        """Show output of workers unchanged, above the live line on a terminal.

        It goes to `out`, or to the file descriptor `to`. A line of Stretto's own that a worker has printed starts on
        a new line.
        """
        to = self._out if to is None else to
        data = AFTER_A_BAR.sub(b"\n" + OURS, data)
        if self._live is not None and to is not None and os.isatty(to):
            self._print_above(b"\n" * bool(self._partial and data.startswith(OURS)) + data)
            return
        if data.startswith(OURS):
            self._end_lines()
        self._write(data, to)
        if to is not None:
            self._open[to] = is_open(data, self._open.get(to, False))

    def say_error(self, data: bytes) -> None:
        """Show what a worker has written to stderr, where stderr is separate from stdout."""
        self.say(data, STDERR)

    def _write(self, data: bytes, descriptor: int | None) -> None:
        try:
            while descriptor is not None and data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            self._out = None if descriptor == self._out else self._out

    def _end_lines(self) -> None:
        """End unfinished lines of the script on the terminal, so that a line of ours starts on a new one."""
        for descriptor, is_unfinished in self._open.items():
            if is_unfinished and _is_stderr(descriptor):
                self._write(b"\n", descriptor)
                self._open[descriptor] = False

    def _print_above(self, data: bytes) -> None:
        """Print complete lines; an unfinished one, such as a progress bar, is shown above the live line."""
        lines, self._partial = whole_lines(self._partial + data)
        for line in lines:
            self._console.out(_last_written(line), highlight=False)

    def note(self, text: str) -> None:
        """Show a line of Stretto's own."""
        text = printable(text)
        if self._live is not None:
            self._console.print(Text(text, style="dim"), soft_wrap=True)
        elif not self._quiet:
            self._end_lines()
            print(f"stretto: {text}", file=sys.stderr, flush=True)

    def follow(self, records: Sequence[ProcessRecord]) -> None:
        """Take the records of workers that this machine has added to a run, whose events it does not see."""
        if line := self._progress.follow(records):
            self.note(line)

    def poll(self) -> None:
        """Read new events and update the display."""
        for event in self._events.read():
            if event.get("event") == "section":
                self._read_section(self._section)
                self._section = Tail(self._folder / str(event.get("folder")) / "events.jsonl")
            self._take(event)
        self._read_section(self._section)
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        elif time.monotonic() - self._shown_at >= PLAIN_S:
            self._show_progress()

    def _read_section(self, section: Tail | None) -> None:
        for event in section.read() if section is not None else ():
            self._take(event)

    def _take(self, event: Event) -> None:
        if line := self._progress.take(event):
            self.note(line)
            self._shown_at = time.monotonic()

    def _show_progress(self) -> None:
        self._shown_at = time.monotonic()
        line = ", ".join(self._progress.facts())
        if (self._progress.step or self._progress.state) and line and line != self._last_progress:
            self.note(line)
        self._last_progress = line

    def end(self) -> None:
        """End the display and remove the live line."""
        self.poll()
        if self._live is not None:
            if self._partial:
                self._print_above(b"\n")
            self._live.stop()
            self._live = None
        self._end_lines()
        if not self._quiet and self._open.get(self._out or 0):
            self._write(b"\n", self._out)  # a summary follows on the same output
            self._open.clear()

    def _view(self) -> Text:
        """Return the unfinished line, then the facts in as few lines as the width allows."""
        seconds = int(time.monotonic() - self._started_at)
        workers = f"{self._workers} worker{'s' * (self._workers != 1)}"
        head = " · ".join(filter(None, [self.title, self._progress.recipe, workers]))
        facts = [*(self._progress.facts() or ["starting"]), f"{seconds // 60}:{seconds % 60:02d}"]
        view = Text("\n".join(_in_lines([head, *facts], self._console.width)))
        view.stylize("bold", 0, len(head))
        return Text.from_ansi(_last_written(self._partial) + "\n").append_text(view) if self._partial else view


def _in_lines(facts: Sequence[str], width: int) -> list[str]:
    """Return the facts joined into lines of at most this width."""
    lines = [""]
    for fact in facts:
        joined_line = f"{lines[-1]} · {fact}" if lines[-1] else fact
        if len(joined_line) < width:
            lines[-1] = joined_line
        else:
            lines.append(fact)
    return lines


def whole_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines, and what is visible of the unfinished one.

    >>> whole_lines(b"first\\n10%\\r20%\\r")
    ([b'first'], b'20%\\r')
    """
    *lines, partial = data.split(b"\n")
    return lines, _visible(partial)


def _is_stderr(number: int) -> bool:
    """Return True if a file descriptor leads where the standard error does."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(number, STDERR)
    return False


def is_open(data: bytes, before: bool) -> bool:
    """Return True if a line is left without an end, given whether one was before.

    >>> is_open(b"10%", False), is_open(b"", True), is_open(b"10%\\r", False), is_open(b"all\\n", True)
    (True, True, True, False)
    """
    lines, partial = whole_lines(data)
    return bool(partial.strip(b"\r")) or (before and not lines)


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line: text after the last carriage return."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _last_written(line: bytes) -> str:
    return _visible(line).rstrip(b"\r").decode(errors="replace")
