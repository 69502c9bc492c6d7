"""The ZeroMQ side of a parameter server: one socket, one thread and one request handler for each service.

Headers are checked before their tensors are received. The first shard's process also serves the dispatcher. Every
socket uses CURVE with keys generated for the run, unless encryption is switched off; clients with another key are
refused in the handshake.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.auth.thread

from stretto.errors import LaunchError, explain
from stretto.parameter_server import messages as m
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import LARGEST_FRAME, Assembly, FramingError, decode_header, encode, reason_of
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.message_memory import OfferedMemory
from stretto.parameter_server.service import Service
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import DiskStore
from stretto.parameter_server.state_log import RecordedClock, StateLog
from stretto.process_config import CoordinatorConfig, ShardConfig
from stretto.recipe.parser import parse
from stretto.security import (
    BACKLOG,
    COORDINATOR,
    PROOF,
    SMALL_BYTES,
    RunKeys,
    doorman,
    identity_of,
    log,
    name_in,
    router,
    run_keys,
)
from stretto.transport.malloc import keep_freed_memory

IDLE_MS = 200
DEATH_NOTIFIER = COORDINATOR
"""Socket identity of the process that reports failed workers to the services."""
_NAME = re.compile(rb"worker (\d{1,6})(?:\.(\d{1,6}))?")


def serve(config: ShardConfig) -> None:
    """Serve a shard until the process ends; without a coordinator the process of shard 0 serves the dispatcher, too."""
    torch.set_num_threads(1)
    options = config.options
    if options.recipe is not None:
        parse(options.recipe)  # imports its codecs
    store = DiskStore(Path(config.snapshots), f"shard{config.shard}") if config.snapshots else None
    server = ServerThreads(run_keys(config.keys, config.options.initial_workers), config.max_worker)
    if config.dispatcher_fd is not None:
        dispatcher = DispatcherHandler(options.initial_workers, time.monotonic)
        server.open(socket.socket(fileno=config.dispatcher_fd), Service(dispatcher))
    shard = ShardHandler(options.initial_workers, time.monotonic, options.on_nan, store, time.monotonic_ns())
    server.open(socket.socket(fileno=config.listen_fd), Service(shard))
    server.wait()


def serve_dispatcher(config: CoordinatorConfig, log: Path, restarted: bool) -> ServerThreads:
    """Start to serve the batch dispatcher in the coordinator's process; a `restarted` one continues from its log."""
    clock = RecordedClock(time.monotonic)
    handler = DispatcherHandler(config.options.initial_workers, clock, config.snapshot_interval_s)
    service = Service(handler, StateLog(log, handler, clock, restarted))
    server = ServerThreads(run_keys(config.keys, config.options.initial_workers), config.max_worker)
    server.open(socket.socket(fileno=config.dispatcher_fd), service)
    return server


class ServerThreads:
    """Services of one process, each in a thread; `close` ends them. No worker's number exceeds `max_worker`."""

    def __init__(self, keys: RunKeys | None, max_worker: int) -> None:
        keep_freed_memory()
        self._keys, self._max_worker = keys, max_worker
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.services: list[RpcServer] = []
        self._doorman = doorman(self._context, keys) if keys else None

    def open(self, listener: socket.socket, service: Service) -> str:
        """Serve a service at a listening socket; return its address."""
        server = RpcServer(self._context, listener, service, self._max_worker, self._keys)
        thread = threading.Thread(target=server.run, args=(self._stop,), name=server.address, daemon=True)
        self.services.append(server)
        self._threads.append(thread)
        thread.start()
        return server.address

    def wait(self) -> None:
        """Wait until all services have ended. Raises the first failure."""
        for thread in self._threads:
            thread.join()
        for service in self.services:
            if service.failure is not None:
                raise service.failure

    def await_leave(self, workers: int, limit_s: float) -> None:
        """Wait until this number of workers has left all services, at most `limit_s` seconds."""
        limit = time.monotonic() + limit_s
        for service in self.services:
            service.await_leave(workers, max(limit - time.monotonic(), 0.0))

    def close(self) -> None:
        """End all services. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._doorman is not None:
            self._doorman.stop()
            self._doorman = None
        self._context.destroy(linger=0)


class RpcServer:
    """Passes messages between one socket and one service."""

    def __init__(
        self,
        context: zmq.Context[Any],
        listener: socket.socket,
        service: Service,
        max_worker: int,
        keys: RunKeys | None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        self._service, self._max_worker, self._keys = service, max_worker, keys
        self._socket = router(context, keys, LARGEST_FRAME)
        self._assemblies: defaultdict[int, Assembly] = defaultdict(Assembly)
        self._memory = OfferedMemory()
        self._request_ids: dict[int, int] = {}
        """Id of each worker's last request."""
        self._streaming: set[int] = set()
        """Workers whose message is processed chunk by chunk as it arrives."""
        self._sending: deque[tuple[Any, Callable[[], None]]] = deque()
        self.refused = 0
        """Number of refused messages."""
        self.failure: BaseException | None = None
        self._left = threading.Condition()
        self._left_workers: set[int] = set()
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(self.address)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        try:
            while not stop.is_set():
                self._socket.rcvtimeo = 1 if self._sending else IDLE_MS
                self._take_all()
                self._note_sent()
        except BaseException as error:
            self.failure = error
            stop.set()
        finally:
            self._socket.close(linger=0)
            self._memory.close()
            self._service.close()

    def _take_all(self) -> None:
        """Wait for a message, and process all that have arrived."""
        flags = 0
        for _ in range(1000):
            try:
                identity, *frames = self._socket.recv_multipart(flags, copy=False)
            except zmq.Again:
                return
            self._take(bytes(identity), frames)
            flags = zmq.NOBLOCK

    def _take(self, identity: bytes, frames: Sequence[Any]) -> None:
        try:
            name = name_in(identity, self._keys)
        except ValueError as error:
            self._refuse(f"a message of {identity.partition(PROOF)[0]!r:.40}: {error}")
            return
        if name == DEATH_NOTIFIER and frames:
            self._process_notice(frames)
            return
        worker, incarnation = worker_of(name, self._max_worker)
        if worker is None or not frames:
            self._refuse(f"a message of {name!r:.40}, which is no worker's name")
            return
        messages = self._service.admit(worker, incarnation)
        if messages is None:
            self._refuse(f"a message of worker {worker}, which is not its process {incarnation} any more")
            return
        if len(frames[0]):
            self._left_workers.discard(worker)
        try:
            self._send_all([*messages, *self._read(worker, incarnation, frames)])
        except Exception as error:
            why = reason_of(error)
            self._assemblies[worker].reset()
            self._send_all([OutgoingMessage(worker, self._request_ids.get(worker, 0), m.Refused(why))])
            self._refuse(f"worker {worker}: {why}")

    def _read(self, worker: int, incarnation: int, frames: Sequence[Any]) -> list[OutgoingMessage]:
        assembly, handler = self._assemblies[worker], self._service.handler
        if len(frames[0]):
            self._streaming.discard(worker)
            self._request_ids[worker] = 0
            header = assembly.begin(frames[0])
            self._request_ids[worker] = header.request_id
            self._memory.arrives(worker, incarnation, header)
            handler.expects(worker, header)
        is_whole = assembly.add(frames[1:], partial(self._memory.find, worker))
        if len(frames[0]) and not is_whole and handler.streams(worker, assembly.header):
            self._streaming.add(worker)
        if worker in self._streaming:
            for index, offset, chunk in assembly.drain():
                handler.write(worker, index, offset, chunk)
        if not is_whole:
            return []
        header, tensors = assembly.take()
        if isinstance(header.body, m.Leave | m.Quit):
            self._note_left(worker)
        messages = self._service.take(worker, incarnation, header, tensors)
        if self._service.problem:
            self._refuse(f"worker {worker}: {self._service.problem}")
        return messages

    def _process_notice(self, frames: Sequence[Any]) -> None:
        """Process the notice that an incarnation has ended; reply with its work at this service."""
        try:
            header = decode_header(frames[0])
        except FramingError as error:
            self._refuse(f"a malformed notice: {error}")
            return
        ended = header.body
        if not isinstance(ended, m.IncarnationEnded) or not 0 <= ended.worker <= self._max_worker:
            self._refuse(f"a notice of type {type(ended).__name__}")
            return
        try:
            work, messages = self._service.end(ended)
            if self._service.is_ended(ended.worker):
                self._assemblies[ended.worker].reset()
                self._note_left(ended.worker)
            self._send_all(messages)
            notifier = identity_of(DEATH_NOTIFIER, self._keys)
            self._socket.send_multipart([notifier, *next(encode(header.request_id, work))])
        except Exception as error:
            self._refuse(f"the notice that worker {ended.worker} failed: {type(error).__name__}: {error}")

    def _note_left(self, worker: int) -> None:
        self._memory.drop(worker)
        with self._left:
            self._left_workers.add(worker)
            self._left.notify_all()

    def await_leave(self, workers: int, limit_s: float) -> None:
        """Wait until this number of workers has left, at most `limit_s` seconds."""
        with self._left:
            self._left.wait_for(lambda: len(self._left_workers) >= workers, limit_s)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        log(f"refused {why}")

    def _send_all(self, messages: Sequence[OutgoingMessage]) -> None:
        for outgoing in messages:
            self._send(outgoing)

    def _send(self, outgoing: OutgoingMessage) -> None:
        name, tracker = name_of(outgoing.worker, self._service.incarnation(outgoing.worker)), None
        identity = identity_of(name, self._keys)
        memory = self._memory.lend(outgoing.worker, outgoing.request_id, outgoing.tensors)
        small = memory is not None or sum(tensor.nbytes for tensor in outgoing.tensors) < SMALL_BYTES
        try:
            for message in encode(outgoing.request_id, outgoing.body, outgoing.tensors, memory=memory):
                tracker = self._socket.send_multipart([identity, *message], copy=small, track=not small)
        except zmq.ZMQError:
            tracker = None  # the worker has failed
        if outgoing.sent is not None and tracker is not None:
            self._sending.append((tracker, outgoing.sent))
        elif outgoing.sent is not None:
            outgoing.sent()

    def _note_sent(self) -> None:
        """Release sent tensors. Messages to one worker are sent in order, so that its last one suffices."""
        for _ in range(len(self._sending)):
            tracker, on_sent = self._sending.popleft()
            if tracker.done:
                on_sent()
            else:
                self._sending.append((tracker, on_sent))


def name_of(worker: int, incarnation: int = 0) -> bytes:
    """Return a worker's socket identity at the services; each incarnation has its own.

    >>> name_of(3), name_of(3, 1)
    (b'worker 3', b'worker 3.1')
    """
    return b"worker %d.%d" % (worker, incarnation) if incarnation else b"worker %d" % worker


def worker_of(name: bytes, max_worker: int) -> tuple[int | None, int]:
    """Return the worker and the incarnation of a socket identity; the worker is None if its number is too large."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) > max_worker:
        return None, 0
    return int(match[1]), int(match[2] or 0)


def listening(host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket at a free port. Raises LaunchError if the address is not one of this machine's."""
    try:
        return socket.create_server((host, 0), backlog=BACKLOG)
    except OSError as error:
        problem = f"a parameter server cannot listen at {host}: {error.strerror or error}"
        expected = "an address of the machine of worker 0"
        raise LaunchError(explain(problem, got=host, expected=expected, to_type="MASTER_ADDR=127.0.0.1")) from error
