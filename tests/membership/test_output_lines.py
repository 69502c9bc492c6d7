"""Properties of the way on which output of workers reaches log files through the coordinator, without sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.membership.output_lines import (
    CHUNK_BYTES,
    MAX_BUFFERED_BYTES,
    UNKNOWN,
    AppendOutput,
    OutputAppended,
    OutputAppender,
    OutputStream,
    connection_of,
    log_of,
    plain,
)

FATES = st.sampled_from(["arrives", "twice", "reply lost", "stale replies", "restart"])


@given(st.lists(st.tuples(st.binary(max_size=300), st.integers(1, 400), FATES), max_size=20))
def test_output_is_in_the_log_once_and_in_order_whatever_is_lost(steps: list[tuple[bytes, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        run, stream = Path(name), OutputStream()
        appender, replies, written = OutputAppender(run, 1), list[OutputAppended](), b""
        for text, times, fate in steps:
            data = text.hex().encode() * times
            stream.add(data)
            written += data
            if (message := stream.message()) is None:
                continue
            replies += [appender.receive(1, 0, message) for _ in range(1 + (fate == "twice"))]
            if fate == "restart":
                appender = OutputAppender(run, 1)
            elif fate != "reply lost":
                for reply in [replies[-1], replies[0]] if fate == "stale replies" else replies[-2:]:
                    stream.receive(reply)
        while (message := stream.message()) is not None:
            stream.receive(appender.receive(1, 0, message))
        assert not written or log_of(run, 1).read_bytes() == written


@given(st.binary(max_size=200) | st.text(st.sampled_from("aäß–\x9b\U0001f600")).map(str.encode), st.data())
def test_written_output_has_the_same_length_and_controls_no_terminal(data: bytes, cuts: st.DataObject) -> None:
    """Characters that are cut between two messages are kept, and controls are replaced."""
    with tempfile.TemporaryDirectory() as name:
        appender, number = OutputAppender(Path(name), 0), 0
        while number < len(data):
            end = cuts.draw(st.integers(number + 1, len(data)))
            number = appender.receive(0, 0, AppendOutput(number, data[number:end])).size
        text = log_of(Path(name), 0).read_bytes() if data else b""
    assert text == plain(data) or b"\xc2" in data
    assert len(text) == len(data)
    assert not set(text) & {*range(32), 127} - set(b"\t\n")
    assert not any(127 < ord(one) < 160 for one in text.decode(errors="replace"))


@pytest.mark.parametrize(
    "name", [b"output 1", b"output 1 rank 0 x", b"output ../x rank 0", b"events 1.0 rank 0 section 1"]
)
def test_connections_of_other_services_are_left_to_them(tmp_path: Path, name: bytes) -> None:
    assert OutputAppender(tmp_path, 0).reply(name, b"") is None


def test_output_of_the_launchers_own_workers_and_from_a_wrong_place_is_refused(tmp_path: Path) -> None:
    appender = OutputAppender(tmp_path, 2)
    with pytest.raises(ValueError, match="worker 1, expected that of a worker on another machine"):
        appender.receive(1, 0, AppendOutput(0, b"x"))
    with pytest.raises(ValueError, match="from byte 5 on, expected it from 0 on"):
        appender.receive(2, 0, AppendOutput(5, b"x"))
    message = msgspec.msgpack.encode(AppendOutput(0, bytes(CHUNK_BYTES + 1)))
    with pytest.raises(msgspec.MsgspecError):
        appender.reply(connection_of(2, 0), message)
    assert not log_of(tmp_path, 1).exists() and log_of(tmp_path, 2).read_bytes() == b""


def test_link_in_the_place_of_a_log_is_refused(tmp_path: Path) -> None:
    log_of(tmp_path, 0).symlink_to(tmp_path / "victim")
    assert OutputAppender(tmp_path, 0).receive(0, 0, AppendOutput(0, b"x")).size == UNKNOWN
    assert not (tmp_path / "victim").exists()


def test_log_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.membership.output_lines.LARGEST_LOG", 10)
    appender = OutputAppender(tmp_path, 0)
    assert appender.receive(0, 0, AppendOutput(0, b"x" * 10)) == OutputAppended(10)
    assert appender.receive(0, 0, AppendOutput(10, b"x")) == OutputAppended(10, "the log has 10 bytes")


def test_memory_of_output_that_cannot_be_sent_is_bounded_and_the_loss_is_named(tmp_path: Path) -> None:
    stream, appender, line = OutputStream(), OutputAppender(tmp_path, 0), b"a line of output\n" * 60
    for _ in range(3 * MAX_BUFFERED_BYTES // len(line)):
        stream.add(line)
    assert len(stream._buffer) <= MAX_BUFFERED_BYTES
    while (message := stream.message()) is not None:
        assert message.number == UNKNOWN or message.data
        stream.receive(appender.receive(0, 0, message))
    stream.add(b"the end\n")
    while (message := stream.message()) is not None:
        stream.receive(appender.receive(0, 0, message))
    assert b"bytes of output are lost\nthe end\n" in log_of(tmp_path, 0).read_bytes()
