"""Events of workers that do not see the run directory, over sockets to a coordinator that is a process of its own."""

from __future__ import annotations

import contextlib
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from coordinator_process import CoordinatorProcess

from stretto.errors import LogError
from stretto.events import EventLog, of_process, read_events
from stretto.membership import event_client
from stretto.membership.client import dealer
from stretto.membership.event_client import POLL_MS, RemoteLog
from stretto.membership.event_lines import AppendEvents, Writer
from stretto.security import RunKeys, role_of

KEYS = RunKeys.new()
TIMEOUT_S = 60.0


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoordinatorProcess]:
    """Return a running coordinator of two workers. The end of a log waits as long as a busy machine may need."""
    monkeypatch.setattr(event_client, "CLOSE_S", 60.0)
    with contextlib.closing(CoordinatorProcess(tmp_path, 2, KEYS)) as process:
        yield process


def remote(address: str, worker: int = 0) -> RemoteLog:
    return RemoteLog(Writer(worker, 0), address, KEYS.client(b"worker %d" % worker), TIMEOUT_S)


def times(folder: Path, worker: int) -> list[float]:
    """Return the times of a worker's log events in the order of the file."""
    path = folder / "events.jsonl"
    events = read_events(path) if path.exists() else iter(())
    return [one["t"] for one in events if one["event"] == "log" and one["worker"] == worker]


def test_each_event_is_written_once_while_the_coordinator_is_killed_and_restarted(
    coordinator: CoordinatorProcess,
) -> None:
    logs = [EventLog(remote(coordinator.address, worker), worker) for worker in range(2)]
    draw = random.Random(0)
    for t in range(3000):
        for log in logs:
            log.write("log", float(t), text="x" * draw.randrange(1000))
        if t % 50 == 0:
            for log in logs:
                log.flush()
        if t % 700 == 699:  # in the midst of messages
            while not times(coordinator.folder, 1):
                logs[1].flush()
            coordinator.kill()
            coordinator.start()
    for log in logs:
        log.close()
    for worker in range(2):
        assert times(coordinator.folder, worker) == [float(t) for t in range(3000)]


def test_full_disk_of_the_coordinator_is_reported_once_and_loses_nothing(
    coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    log, limit = EventLog(remote(coordinator.address), 0), 1 << 15
    log.write("log", 0.0)
    while not times(coordinator.folder, 0):
        log.flush()
    unlimited = resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, (limit, -1))
    out = ""
    for t in range(1, 1000):
        log.write("log", float(t), text="x" * 100)
    while "cannot be written" not in out:
        log.flush()
        out += capsys.readouterr().err
    for _ in range(10):
        log.flush()
    assert (coordinator.folder / "events.jsonl").stat().st_size <= limit
    resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, unlimited)
    while "can be written again" not in out:
        log.flush()
        out += capsys.readouterr().err
    log.close()
    assert out.count("cannot be written: File too large") == 1
    assert times(coordinator.folder, 0) == [float(t) for t in range(1000)]


def test_absent_coordinator_neither_stops_a_worker_nor_fills_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_client, "SILENT_S", 0.2)
    monkeypatch.setattr(event_client, "CLOSE_S", 0.2)
    log, size, longest = EventLog(remote("127.0.0.1:9"), 3, max_buffered=1 << 16), 0, 0
    started = time.monotonic()
    for t in range(2000):
        log.write("log", float(t), text="x" * 1000)
        log.flush()
        longest = max(longest, len(log._lines) if size else 0)
        size = time.monotonic() - started > 1.0  # the user is notified by then
        time.sleep(0.001)
    assert time.monotonic() - started < 2000 * POLL_MS / 1000 / 2, "it does not wait at each flush"
    assert longest < (1 << 16) + 2000
    err = capsys.readouterr().err
    assert err.count("worker 3: the coordinator at 127.0.0.1:9 has taken no events for") >= 2
    assert err.count("training continues") == 1
    assert "bytes of events are lost" in err
    with pytest.raises(LogError, match="has taken no events for"):
        log.close()


def test_lying_worker_neither_ends_the_coordinator_nor_writes_in_anothers_name(coordinator: CoordinatorProcess) -> None:
    context: Any = zmq.Context()
    honest = remote(coordinator.address, 0)
    event = msgspec.json.encode({"event": "log", "t": -1.0, **of_process(0)}) + b"\n"
    huge = b'{"x":"' + b"x" * 10_000_000 + b'"}\n'
    encode = msgspec.msgpack.encode
    frames = [b"", b"\xc1", encode(["AppendEvents", 1 << 60, event]), encode(AppendEvents(0, b"no end"))]
    frames += [encode(AppendEvents(i, text)) for i, text in enumerate((event, b"[" * 50_000 + b"\n", b"\xff\n"))]
    sent = [*frames, encode(AppendEvents(3, huge)), encode(huge)]  # a frame above the limit ends the connection
    names = [
        b"events 1.0 rank 0 section 1",
        b"events 1.0 rank 0 section 9",
        b"events 1.0",
        b"events 0.0 rank 00 section 1",
    ]
    for name in [*names, names[0]]:  # the first one may close before it was heard
        liar = dealer(context, name, KEYS.client(role_of(name)), TIMEOUT_S)
        liar.connect(f"tcp://{coordinator.address}")
        for frame in sent:
            liar.send(frame)
        honest.finish(bytearray(event.replace(b"-1.0", b"1.0")))
        liar.close(linger=0)
    context.term()
    assert coordinator.process.poll() is None
    assert times(coordinator.folder, 0) == [1.0] * (1 + len(names))
    assert times(coordinator.folder, 1) == []
    assert not (coordinator.folder / "section-9").exists()
    warnings = [one for one in read_events(coordinator.folder / "events.jsonl") if one["event"] == "warning"]
    assert {one["process"] for one in warnings} == {"worker 1"}
    assert any("got an event of 'worker 0', expected one of 'worker 1'" in one["text"] for one in warnings)
