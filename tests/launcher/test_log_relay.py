"""The relay of output at the end of a run: what processes have written is read, however late the relay is."""

from __future__ import annotations

import codecs
import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest
from run_place import until

from stretto.host_list import Host
from stretto.launcher import log_relay, logs_elsewhere
from stretto.launcher.engines.agents import AgentSpec
from stretto.launcher.engines.ssh import SshAgent
from stretto.launcher.log_relay import CHUNK_BYTES, LARGEST_PIPE, LogRelay
from stretto.launcher.logs_elsewhere import LogsElsewhere
from stretto.launcher.progress_display import ProgressDisplay
from stretto.membership.output_lines import log_of, plain


def full_pipe(data: bytes) -> tuple[IO[bytes], int]:
    """Return the ends of a pipe that holds the data."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, LARGEST_PIPE)
    assert os.write(writing, data) == len(data)
    return os.fdopen(reading, "rb", buffering=0), writing


@pytest.mark.parametrize("is_held", [False, True], ids=["ended", "held by a process that left its group"])
def test_output_that_waits_in_a_pipe_is_read_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    monkeypatch.setattr(log_relay, "DRAIN_S", 0.0)
    relay, data = LogRelay(tmp_path, "none", ProgressDisplay(quiet=True)), os.urandom(LARGEST_PIPE)
    reading, writing = full_pipe(data)
    if not is_held:
        os.close(writing)
    relay.add(0, reading)
    relay.start()
    relay.close()
    assert not relay.is_alive()
    assert (tmp_path / "worker-0.log").read_bytes() == data
    if is_held:
        os.close(writing)


def test_output_of_other_hosts_controls_no_terminal_and_keeps_progress_bars(tmp_path: Path) -> None:
    shown: list[bytes] = []
    display = ProgressDisplay(quiet=True)
    display.say = lambda data, to=None: shown.append(data)  # type: ignore[method-assign]
    relay = LogRelay(tmp_path, "rank0", display)
    relay.show(b"\x1b[2J 10%\r 20% \xc2\x9b\r\n")
    relay.start()
    relay.close()
    assert b"".join(shown) == b"?[2J 10%\r 20% ??\r\n"


class Shown:
    """Output of agents that was shown, without characters that control a terminal."""

    def __init__(self) -> None:
        self.data = b""

    def show(self, data: bytes) -> None:
        self.data += plain(data)

    def note(self, text: str) -> None:
        pass


def test_characters_that_a_pipe_cuts_are_shown() -> None:
    cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text, shown = "Grüße – \N{SNOWMAN}".encode(), Shown()
    agent = SshAgent(AgentSpec(Host("a", 1), range(1), (), b""), cat, "", lambda exited: None, shown)
    for number, byte in enumerate(text, 1):
        agent.send(bytes([byte]))
        whole = text[: codecs.utf_8_decode(text[:number])[1]]
        until(lambda whole=whole: shown.data == whole)
    agent.end()
    agent.close(60.0)


def test_long_lines_of_logs_are_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_elsewhere, "CHUNK_BYTES", 5)
    text = "ßßßß–––".encode()
    log_of(tmp_path, 1).write_bytes(text + b"\n")
    parts = [part for _, part in LogsElsewhere(tmp_path, ()).read()]
    assert b"".join(parts) == text + b"\n" and all(part.decode() for part in parts)


def test_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    log_of(tmp_path, 0).symlink_to(victim)
    relay = LogRelay(tmp_path, "none", ProgressDisplay(quiet=True))
    reading, writing = full_pipe(b"output\n")
    os.close(writing)
    relay.add(0, reading)
    relay.start()
    relay.close()
    relay.append(0, 0, "an error\n")
    assert victim.read_bytes() == b""


def test_the_end_waits_for_a_terminal_that_is_slow_and_shows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_relay, "DRAIN_S", 0.3)
    shown: list[bytes] = []
    display = ProgressDisplay(quiet=True)

    def say(data: bytes) -> None:
        time.sleep(0.05)
        shown.append(data)

    monkeypatch.setattr(display, "say", say)
    relay, data = LogRelay(tmp_path, "rank0", display), os.urandom(LARGEST_PIPE)
    reading, writing = full_pipe(data)
    os.close(writing)
    relay.add(0, reading)
    relay.start()
    relay.close()
    assert b"".join(shown) == data
    assert len(shown) > LARGEST_PIPE // CHUNK_BYTES  # the last one is the end
