"""Agent of the shards of a parameter server on this host, which the launcher of a run starts by ssh: `stretto serve`.

The launcher decides which shards are started again. The agent holds their listening sockets, so a restarted shard has
the address of the one before, and a folder for their snapshots, which it removes at its end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from signal import Signals
from socket import socket
from typing import IO, Any

import msgspec
from msgspec.structs import replace

from stretto.errors import LaunchError, explain
from stretto.launcher.code_archive import unpack
from stretto.launcher.endpoints import address
from stretto.launcher.engines.interface import Exited, Signalled
from stretto.launcher.engines.local import LocalEngine, LocalProcess
from stretto.launcher.engines.shard_messages import (
    SERVE_SHARDS,
    TO_AGENT,
    FromAgent,
    ReleaseShard,
    ServeShards,
    ShardExited,
    ShardOutput,
    ShardsListen,
    SignalShard,
    StartShard,
    line,
)
from stretto.launcher.join import CODE, check_versions
from stretto.launcher.listeners import listening
from stretto.launcher.process_specs import server_of, service_spec
from stretto.launcher.signals import Stopped, handled
from stretto.run_dir import make_folder

CHUNK_BYTES = 1 << 16
INPUT_ENDED = None
"""Item of the queue after the last line of the input."""


def serve(requests: IO[bytes], replies: int) -> None:
    """Serve shards as the launcher at the other end asks, until `requests` ends; `replies` is a descriptor.

    Raises LaunchError if the launcher has another version of Stretto, and Stopped after a signal.
    """
    wanted = _read_first(requests)
    check_versions(wanted.versions)
    inbox: SimpleQueue[Any] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(handled(lambda number: inbox.put(Signalled(number))))
        own = _own_address(wanted.host)
        sockets = {shard: stack.enter_context(listening(host=own)) for shard in wanted.shards}
        folder = make_folder(f"shards-{wanted.name}", None, datetime.now()).resolve()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if wanted.code:
            unpack(wanted.code, folder / CODE)
        engine = LocalEngine(inbox)
        stack.callback(engine.close)
        agent = _ShardAgent(engine, sockets, folder, bool(wanted.code), replies)
        threading.Thread(target=_read_requests, args=(requests, inbox), name="requests", daemon=True).start()
        agent.send(ShardsListen(tuple(map(address, sockets.values()))))
        while (news := inbox.get()) is not INPUT_ENDED:
            agent.process(news)


def _read_first(requests: IO[bytes]) -> ServeShards:
    try:
        return SERVE_SHARDS.decode(requests.readline())
    except msgspec.MsgspecError:
        problem, expected = "no launcher asks for shards", "a start by `stretto run --servers 2@HOST`"
        to_type = "stretto run --servers 2@HOST --listen 10.0.0.1 --recipe async_sgd train.py"
        raise LaunchError(explain(problem, got="another input", expected=expected, to_type=to_type)) from None


def _own_address(host: str) -> str:
    from stretto.security import address_toward  # imports zmq

    try:
        return address_toward(host)
    except OSError as error:
        problem, expected = "this machine has no way to the launcher", f"a route to {host}"
        to_type = "stretto run --listen ADDRESS, with an address that both machines know"
        raise LaunchError(explain(problem, got=str(error), expected=expected, to_type=to_type)) from error


def _read_requests(requests: IO[bytes], inbox: SimpleQueue[Any]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for request in requests:
            inbox.put(TO_AGENT.decode(request))
    inbox.put(INPUT_ENDED)


class _ShardAgent:
    """Starts the shards that the launcher asks for, and reports their output and exits."""

    def __init__(
        self, engine: LocalEngine, sockets: dict[int, socket], folder: Path, has_code: bool, replies: int
    ) -> None:
        self._engine, self._sockets, self._folder, self._has_code = engine, sockets, folder, has_code
        self._replies, self._lock = replies, threading.Lock()
        self._processes: dict[int, LocalProcess] = {}
        """Processes by the number of their start."""
        self._events_read = 0

    def process(self, news: StartShard | SignalShard | ReleaseShard | Exited | Signalled) -> None:
        """Process a request, an exit or a signal, which raises Stopped."""
        match news:
            case StartShard():
                self._start(news)
            case SignalShard():
                process = self._processes[news.start]
                process.is_injected |= news.injected
                process.send(Signals(news.number))
            case ReleaseShard():
                self._processes[news.start].release()
            case Exited():
                start = next(start for start, process in self._processes.items() if process is news.process)
                self.send(ShardExited(start, news.code, news.injected, news.record, self._new_events()))
            case Signalled():
                raise Stopped(news.number)

    def _start(self, request: StartShard) -> None:
        config, options = request.config, request.config.options
        if self._has_code:
            options = replace(options, script=self._folder / CODE / options.script.name)
        listen_fd = self._sockets[config.shard].fileno()
        places = {"run": str(self._folder), "snapshots": str(self._folder / "snapshots")}
        config = replace(config, options=options, listen_fd=listen_fd, **places)
        spec = service_spec(server_of(config.shard), config.shards, "shard_main", config, [listen_fd])
        process = self._processes[request.start] = self._engine.start(spec)
        threading.Thread(target=self._relay, args=(request.start, process.output), daemon=True).start()

    def _relay(self, start: int, output: IO[bytes]) -> None:
        """Send the output of a process until its end."""
        with output:
            while data := os.read(output.fileno(), CHUNK_BYTES):
                self.send(ShardOutput(start, data))
        self.send(ShardOutput(start, b""))

    def _new_events(self) -> bytes:
        """Return the lines that processes have added to the event log in the folder."""
        with contextlib.suppress(OSError), (self._folder / "events.jsonl").open("rb") as log:
            log.seek(self._events_read)
            events = log.read()
            self._events_read += len(events)
            return events
        return b""

    def send(self, reply: FromAgent) -> None:
        """Send a reply. Without a connection nothing happens: the input ends, too."""
        left = memoryview(line(reply))
        with self._lock, contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._replies, left) :]


def main() -> None:
    """Serve shards for the launcher at the standard input and output."""
    serve(sys.stdin.buffer, sys.stdout.fileno())
