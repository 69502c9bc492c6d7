"""Properties of the way on which events of workers reach the event log through the coordinator, without sockets."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.events import EventLog, LogFile, of_process, read_events
from stretto.membership.event_lines import (
    CHUNK_BYTES,
    UNKNOWN,
    AppendEvents,
    EventAppender,
    EventsAppended,
    LineSender,
    Writer,
)

LOG = "events.jsonl"


def line(worker: int = 0, rank: int = 0, event: Any = "log", t: Any = 1.0, **fields: Any) -> bytes:
    return msgspec.json.encode({"event": event, "t": t, **of_process(worker, rank), **fields}) + b"\n"


def send(appender: EventAppender, writer: Writer, lines: bytes) -> EventsAppended:
    """Append lines as a process whose first message this is."""
    return appender.receive(writer, AppendEvents(appender.receive(writer, AppendEvents(UNKNOWN)).count, lines))


def events_of(folder: Path, worker: int) -> list[dict[str, Any]]:
    return [one for one in read_events(folder / LOG) if one["worker"] == worker]


class Way:
    """Two workers, a coordinator that may be killed at any moment, and a network that loses and repeats messages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.appender = folder, EventAppender(folder)
        self.writers = [Writer(worker, 0) for worker in range(2)]
        self.senders = [LineSender(writer) for writer in self.writers]
        self.buffers = [bytearray(), bytearray()]
        self.replies: list[list[EventsAppended]] = [[], []]
        self.written = 0

    def write(self, worker: int, size: int) -> None:
        self.written += 1
        self.buffers[worker] += line(worker, t=float(self.written), text="x" * size)

    def deliver(self, worker: int, fate: str) -> None:
        """Send the due message, which may arrive twice, and whose reply may be lost, or followed by old ones."""
        if (message := self.senders[worker].message(self.buffers[worker])) is None:
            return
        replies = [self.appender.receive(self.writers[worker], message) for _ in range(1 + (fate == "twice"))]
        self.replies[worker] += replies
        if fate == "restart":
            self.appender = EventAppender(self.folder)
        elif fate != "reply lost":
            for reply in self.replies[worker] if fate == "stale replies" else replies:
                self.senders[worker].receive(reply)
            if fate == "stale replies":
                self.senders[worker].receive(self.replies[worker][0])

    def check(self) -> None:
        for worker in range(2):
            while self.senders[worker].message(self.buffers[worker]) is not None:
                self.deliver(worker, "arrives")
        found = [one["t"] for one in read_events(self.folder / LOG) if one["event"] == "log"]
        assert sorted(found) == [float(t) for t in range(1, self.written + 1)]
        for worker in range(2):
            own = [one["t"] for one in events_of(self.folder, worker) if one["event"] == "log"]
            assert own == sorted(own)


FATES = st.sampled_from(["arrives", "twice", "reply lost", "stale replies", "restart", "cut off"])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40_000), FATES), min_size=1, max_size=20))
def test_each_line_is_in_the_log_once_and_in_order_whatever_is_lost(steps: list[tuple[int, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        way = Way(Path(name))
        (way.folder / LOG).touch()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for worker, size, fate in steps:
            way.write(worker, size)
            room = (way.folder / LOG).stat().st_size + size // 2 if fate == "cut off" else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            try:
                way.deliver(worker, fate)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        way.check()


def test_a_restarted_coordinator_does_not_count_events_that_others_wrote_about_a_worker(tmp_path: Path) -> None:
    writer = Writer(1, 0)
    assert send(EventAppender(tmp_path), writer, line(1, t=1.0)).count == 1
    for event in ("membership", "fault_injected"):
        LogFile(tmp_path / LOG).append(line(1, event=event))
    LogFile(tmp_path / LOG).append(line(0) + line(1, 1))
    assert EventAppender(tmp_path).receive(writer, AppendEvents(UNKNOWN)).count == 1


def test_a_restarted_coordinator_appends_the_rest_of_a_line_that_was_cut_off(tmp_path: Path) -> None:
    lines = line(1, t=1.0) + line(1, t=2.0) + line(1, t=3.0)
    for size in range(len(lines)):
        (tmp_path / LOG).write_bytes(lines[:size])
        assert EventAppender(tmp_path).receive(Writer(1, 0), AppendEvents(0, lines)).count == 3
        found = [one["t"] for one in read_events(tmp_path / LOG) if one["event"] == "log"]
        assert found == [1.0, 2.0, 3.0], size


def test_the_next_incarnation_continues_and_the_one_before_is_refused(tmp_path: Path) -> None:
    appender = EventAppender(tmp_path)
    send(appender, Writer(1, 0), line(1, t=1.0))
    send(appender, Writer(1, 1), line(1, t=2.0))
    with pytest.raises(ValueError, match="got events of incarnation 0, expected those of 1"):
        appender.receive(Writer(1, 0), AppendEvents(1, line(1, t=3.0)))
    assert [one["t"] for one in events_of(tmp_path, 1)] == [1.0, 2.0]


def test_sections_and_ranks_have_counts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "section-2").mkdir()
    appender = EventAppender(tmp_path)
    assert send(appender, Writer(0, 0), line(0)).count == 1
    assert send(appender, Writer(0, 0, rank=1), line(0, 1)).count == 1
    assert send(appender, Writer(0, 0, section=2), line(0)).count == 1
    assert len(events_of(tmp_path, 0)) == 2 and len(events_of(tmp_path / "section-2", 0)) == 1
    assert "cannot be written: No such file" in send(appender, Writer(0, 0, section=3), line(0)).problem
    assert not (tmp_path / "section-3").exists()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (line(0), "got an event of 'worker 0', expected one of 'worker 1'"),
        (line(1, 1), "got an event of 'worker 1 rank 1', expected one of 'worker 1'"),
        (line(1, event="membership"), "Invalid enum value 'membership'"),
        (line(1, event=["log"]), "Expected `str`, got `array`"),
        (line(1, t="soon"), "Expected `float`, got `str`"),
        (line(1).replace(b":1}", b":true}"), "Expected `int`, got `bool`"),
        (b"[]\n", "Expected `object`, got `array`"),
        (b"\n", "Input data was truncated"),
        (line(1)[:-1] + line(1), "JSON is malformed"),
        (b'{"event":"log","t":1.0,"process":"worker 1","worker":1,"x":"\xff"}\n', "utf-8"),
        (b'{"event":"log","t":1.0,"process":"worker 1","worker":1,"x":' + b"[" * 50_000 + b"\n", "recursion"),
    ],
)
def test_a_line_that_the_sender_may_not_write_becomes_a_warning(tmp_path: Path, bad: bytes, why: str) -> None:
    appender, before, after = EventAppender(tmp_path), line(1, t=1.0), line(1, t=2.0)
    assert send(appender, Writer(1, 0), before + bad + after) == EventsAppended(3)
    first, warning, last = read_events(tmp_path / LOG)
    assert (first["t"], last["t"]) == (1.0, 2.0)
    assert (warning["event"], warning["process"]) == ("warning", "worker 1")
    assert "an event of worker 1 is lost, since the coordinator does not take it" in warning["text"]
    assert why.lower() in warning["text"].lower()


def test_part_of_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a part of a line, expected whole lines"):
        EventAppender(tmp_path).receive(Writer(0, 0), AppendEvents(0, line(0)[:-1]))


def test_a_line_that_fits_into_no_message_is_replaced_by_a_warning() -> None:
    sender, lines = LineSender(Writer(1, 0)), bytearray(line(1, text="x" * CHUNK_BYTES) + line(1))
    sender.receive(EventsAppended(0))
    message = sender.message(lines)
    assert message is not None and len(message.lines) < CHUNK_BYTES
    assert f"expected at most {CHUNK_BYTES}" in msgspec.json.decode(message.lines)["text"]
    sender.receive(EventsAppended(1))
    assert sender.message(lines) == AppendEvents(1, line(1))


def test_event_log_is_bounded_when_its_events_are_stored_too_slowly(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow:
        """Store that takes every third line."""

        def drain(self, lines: bytearray) -> None:
            nonlocal calls
            calls += 1
            del lines[: (lines.find(b"\n") + 1) * (calls % 3 == 0)]

        def finish(self, lines: bytearray) -> None:
            lines.clear()

    calls = longest = 0
    log = EventLog(Slow(), 0, max_buffered=1 << 20)
    for number in range(10_000):
        log.write("log", float(number), text="x" * 1000)
        longest = max(longest, len(log._lines))
    assert longest < 2 << 20
    assert "events are written faster than they can be stored" in capsys.readouterr().err
