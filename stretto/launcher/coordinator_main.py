"""Entry point of the coordinator process.

Started as `python -P -m stretto.launcher.coordinator_main`, with its configuration in the environment. A restarted
coordinator continues from its write-ahead log.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from stretto.errors import LogError
from stretto.events import COORDINATOR, Event, LogFile
from stretto.interval import every
from stretto.launcher.shard_main import leave, own_config
from stretto.launcher.worker_main import begin, fail
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.write_ahead_log import WriteAheadLog, read
from stretto.process_config import CoordinatorConfig, KeyTexts

WRITE_AHEAD_LOG = "coordinator.wal"
"""Name in the run directory."""
REPEAT_S = 2.0
"""Interval at which failures are reported again: a restarted server does not know them."""


def main() -> None:
    """Serve until SIGTERM. An error goes to the launcher and the event log, and the process exits immediately."""
    signal.signal(signal.SIGTERM, leave)
    config = own_config(CoordinatorConfig)
    begin(config)
    try:
        _coordinate(config)
    except BaseException as error:
        fail(error, COORDINATOR, config.run)


def _coordinate(config: CoordinatorConfig) -> None:
    from stretto.membership.server import MembershipServer
    from stretto.security import server_keys

    folder, settings = Path(config.run or "."), config.settings
    path = folder / WRITE_AHEAD_LOG
    records = read(path)
    log = WriteAheadLog(path)
    if log.cut_off:
        lost = f"{log.cut_off} bytes after it are lost"
        print(f"the write-ahead log is intact up to record {len(records)}: {lost}", file=sys.stderr, flush=True)
    coordinator = MembershipCoordinator.restored(records, time.monotonic()) if records else _new(settings)
    messenger = _DeathMessenger(config.servers, config.worker_keys) if config.servers else None
    MembershipServer(
        socket.socket(fileno=config.listen_fd),
        coordinator,
        log,
        server_keys(config.keys),
        settings["failure_timeout_s"],
        _Publisher(LogFile(folder / "events.jsonl"), config.zero, messenger).publish,
        every(settings["checkpoint"]).seconds if settings.get("checkpoint") else None,
    ).run(threading.Event())


def _new(settings: dict[str, Any]) -> MembershipCoordinator:
    """Return the coordinator of a new run."""
    return MembershipCoordinator(
        settings,
        settings["expected"],
        settings.get("min_workers", 1),
        settings.get("max_workers"),
        settings.get("asynchronous", False),
        failure_timeout_s=settings["failure_timeout_s"],
        return_s=settings.get("return_s"),
    )


class _DeathMessenger(threading.Thread):
    """Notifies a parameter server of failed workers, and a restarted server of all of them again."""

    def __init__(self, addresses: Sequence[str], keys: KeyTexts | None) -> None:
        super().__init__(name="messenger", daemon=True)
        self._addresses, self._keys = [f"tcp://{one}" for one in addresses], keys
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.start()

    def take(self, events: Sequence[Event]) -> None:
        """Queue events of membership."""
        for event in events:
            self._events.put(event)

    def run(self) -> None:
        """Forward events until the process ends."""
        from stretto.parameter_server.rpc_channel import DeathNotifier
        from stretto.security import worker_keys

        notifier = DeathNotifier(self._addresses, worker_keys(self._keys))
        while True:
            try:
                event = self._events.get(timeout=REPEAT_S)
            except Empty:
                notifier.notify_again()
                continue
            if event["what"] == "failed":
                notifier.notify_ended(event["worker"], event["incarnation"])
            elif event["what"] == "joined":
                notifier.note_restarted(event["worker"])


class _Publisher:
    """Prints notices for the launcher to show, and writes events to the log of the run."""

    def __init__(self, log: LogFile, zero: float, messenger: _DeathMessenger | None) -> None:
        self._log, self._zero, self._messenger = log, zero, messenger
        self._is_blocked = False

    def publish(self, notices: Sequence[str], events: Sequence[Event]) -> None:
        """Print the notices and log the events with the time of the run."""
        for notice in notices:
            print(notice, file=sys.stderr, flush=True)
        if self._messenger is not None:
            self._messenger.take(events)
        at = time.perf_counter()
        when = {"at": round(at, 6), "t": round(at - self._zero, 6)}
        lines = b"".join(msgspec.json.encode({**event, **when}) + b"\n" for event in events)
        try:
            self._log.append(lines)
        except LogError as error:
            if not self._is_blocked:
                print(f"coordinator: {error}", file=sys.stderr, flush=True)
            self._is_blocked = True
        else:
            self._is_blocked = False


if __name__ == "__main__":
    main()
