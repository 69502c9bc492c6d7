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

import msgspec

from stretto.errors import LogError
from stretto.events import COORDINATOR, Event, LogFile
from stretto.launcher.join import invitation_of, packed_code
from stretto.launcher.shard_main import leave, own_config
from stretto.launcher.worker_main import fail, log_in
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.coordinator_records import rules_of
from stretto.membership.invitations import Inviter
from stretto.membership.write_ahead_log import WriteAheadLog
from stretto.membership.write_ahead_log import read as read_records
from stretto.notices import printable
from stretto.process_config import CoordinatorConfig

WRITE_AHEAD_LOG = "coordinator.wal"
"""File name of the write-ahead log in the run directory."""
DISPATCHER_LOG = "dispatcher.wal"
"""File name of the dispatcher's log there."""
REPEAT_S = 2.0
"""Interval between repeated notices of failures: a restarted parameter server has lost the earlier ones."""


def main() -> None:
    """Serve until SIGTERM. An error goes to the launcher and the event log, and the process exits immediately."""
    signal.signal(signal.SIGTERM, leave)
    config = own_config(CoordinatorConfig)
    try:
        _coordinate(config)
    except BaseException as error:
        fail(error, COORDINATOR, log_in(config.run))


def _coordinate(config: CoordinatorConfig) -> None:
    from stretto.checkpoint.file_receiver import FileReceiver
    from stretto.checkpoint.folder import KEPT_CHECKPOINTS
    from stretto.membership.event_lines import EventAppender
    from stretto.membership.output_lines import OutputAppender
    from stretto.membership.server import MembershipServer
    from stretto.security import run_keys

    folder, options = Path(config.run or "."), config.options
    path = folder / WRITE_AHEAD_LOG
    records = read_records(path)
    if config.dispatcher_fd is not None:
        restarted, dispatcher_log = bool(records), folder / DISPATCHER_LOG
        if not restarted:
            dispatcher_log.touch()  # before any record: to a restarted process no file means a lost log
        threading.Thread(target=_serve_dispatcher, args=(config, dispatcher_log, restarted), daemon=True).start()
    log = WriteAheadLog(path)
    if log.cut_off:
        problem = f"{log.cut_off} bytes after record {len(records)} of the write-ahead log were damaged and are lost"
        print(problem, file=sys.stderr, flush=True)
    if records:
        coordinator = MembershipCoordinator.restored(records, time.monotonic())
    else:
        coordinator = MembershipCoordinator(rules_of(options, config.asynchronous))
    forwarder = _FailureForwarder(config.servers, config.keys) if config.servers else None
    if forwarder is not None:
        forwarder.enqueue(coordinator.ended_processes())
    MembershipServer(
        socket.socket(fileno=config.listen_fd),
        coordinator,
        log,
        run_keys(config.keys, options.initial_workers),
        _Publisher(LogFile(folder / "events.jsonl"), config.zero, forwarder).publish,
        [
            EventAppender(folder),
            OutputAppender(folder, options.workers),
            FileReceiver(folder, options.keep or KEPT_CHECKPOINTS, coordinator.workers.has_not_failed, options.resume),
            *([_inviter(config, coordinator)] if options.host is not None else []),
        ],
        due if (due := options.checkpoints) is not None and due.seconds is not None else None,
        options.timeout_s,
    ).run(threading.Event())  # never set: it serves until SIGTERM


def _inviter(config: CoordinatorConfig, coordinator: MembershipCoordinator) -> Inviter:
    options = config.options
    invite = invitation_of(options, config.services, config.keys)
    workers, ranks = coordinator.workers, options.ranks

    def give(name: str, processes: int, first: int | None, replaces: bool) -> tuple[int, ...]:
        first = None if first is not None and first < options.workers else first  # of this launcher's own worker
        return () if processes % ranks else coordinator.give_numbers(name, processes // ranks, first, replaces)

    return Inviter(invite, give, lambda: packed_code(options, config.keys or ()), workers.next_incarnation)


def _serve_dispatcher(config: CoordinatorConfig, log: Path, restarted: bool) -> None:
    """Serve the batch dispatcher in this thread: its modules take longer to import than membership may wait."""
    try:
        from stretto.parameter_server.rpc_server import serve_dispatcher

        serve_dispatcher(config, log, restarted).wait()
    except BaseException as error:
        fail(error, COORDINATOR, log_in(config.run))


class _FailureForwarder(threading.Thread):
    """Forwards failures and restarts of workers to the parameter server, and failures again every `REPEAT_S`."""

    def __init__(self, addresses: Sequence[str], keys: Sequence[str] | None) -> None:
        super().__init__(name="failure forwarder", daemon=True)
        self._addresses, self._keys = [f"tcp://{address}" for address in addresses], keys
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.start()

    def enqueue(self, events: Sequence[Event]) -> None:
        """Queue membership events."""
        for event in events:
            self._events.put(event)

    def run(self) -> None:
        """Forward events until the process ends."""
        from stretto.parameter_server.rpc_channel import DeathNotifier
        from stretto.parameter_server.rpc_server import DEATH_NOTIFIER
        from stretto.security import run_keys

        keys = run_keys(self._keys, 0)
        notifier = DeathNotifier(self._addresses, keys.client(DEATH_NOTIFIER) if keys is not None else None)
        repeat_at = time.monotonic() + REPEAT_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, repeat_at - time.monotonic()))
            except Empty:
                notifier.notify_again()
                repeat_at = time.monotonic() + REPEAT_S
                continue
            if event["what"] == "failed":
                notifier.notify_ended(event["worker"], event["incarnation"])
            elif event["what"] == "joined":
                notifier.note_restarted(event["worker"])


class _Publisher:
    """Takes the coordinator's notices (to stderr) and events (to the event log and the parameter server).

    Events that cannot be written are lost; the first error of a series is printed.
    """

    def __init__(self, log: LogFile, zero: float, forwarder: _FailureForwarder | None) -> None:
        self._log, self._zero, self._forwarder = log, zero, forwarder
        self._is_error_reported = False

    def publish(self, notices: Sequence[str], events: Sequence[Event]) -> None:
        """Print the notices and log the events with the time of the run."""
        for notice in notices:
            print(printable(notice), file=sys.stderr, flush=True)
        if self._forwarder is not None:
            self._forwarder.enqueue(events)
        now = time.perf_counter()
        timestamps = {"at": round(now, 6), "t": round(now - self._zero, 6)}
        lines = b"".join(msgspec.json.encode({**event, **timestamps}) + b"\n" for event in events)
        try:
            self._log.append(lines)
        except LogError as error:
            if not self._is_error_reported:
                print(f"coordinator: {error}", file=sys.stderr, flush=True)
            self._is_error_reported = True
        else:
            self._is_error_reported = False


if __name__ == "__main__":
    main()
