"""The sender of the output of joined workers at their end."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from stretto.launcher import output_sender
from stretto.launcher.output_sender import OutputSender
from stretto.membership.output_lines import CHUNK_BYTES, UNKNOWN, AppendOutput, OutputAppended

REPLY_S = 0.1
DECODER = msgspec.msgpack.Decoder(AppendOutput)


class SlowCoordinator:
    """A connection to a coordinator that replies to each message after a while, or to none."""

    def __init__(self, replies: bool) -> None:
        self.written, self._replies, self._due = b"", replies, float("inf")

    def send(self, message: bytes, _flags: int) -> None:
        append = DECODER.decode(message)
        if append.number != UNKNOWN:
            assert append.number == len(self.written)
            self.written += append.data
        self._due = time.monotonic() + REPLY_S if self._replies else self._due

    def poll(self, _limit_ms: int) -> bool:
        return time.monotonic() >= self._due

    def recv(self) -> bytes:
        self._due = float("inf")
        return msgspec.msgpack.encode(OutputAppended(len(self.written)))

    def close(self, linger: int) -> None:
        """Do nothing."""


@pytest.mark.parametrize("replies", [True, False])
def test_last_output_takes_as_long_as_the_coordinator_confirms_it(
    monkeypatch: pytest.MonkeyPatch, replies: bool
) -> None:
    unused: Any = None
    coordinator, output, limit_s = SlowCoordinator(replies), b"x" * (16 * CHUNK_BYTES), 1.0
    sender = OutputSender(unused, 10.0)
    monkeypatch.setattr(sender, "_connected", lambda *_: output_sender._Link(coordinator))
    sender.start()
    sender.add(3, 0, output)
    began = time.monotonic()
    sender.close(limit_s)
    assert time.monotonic() - began > limit_s
    assert coordinator.written == (output if replies else b"")
