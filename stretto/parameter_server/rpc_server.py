"""The ZeroMQ side of a server: one socket, one thread, one desk. What comes is checked before it is taken in.

A shard's process has the coordinator's socket too if it is the first. Every socket speaks CURVE with keys made for the
run, unless it was asked not to; whoever has another key is refused in the handshake.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.auth.thread

from stretto.errors import LaunchError, explain
from stretto.parameter_server import messages as m
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import LARGEST_FRAME, Assembly, FramingError, decode_head, encode
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import DiskStore
from stretto.process_config import ShardConfig
from stretto.security import BACKLOG, SMALL_BYTES, ServerKeys, doorman, log, router, server_keys
from stretto.transport.malloc import keep_freed_memory

IDLE_MS = 200
DEATH_NOTIFIER = b"herald"
"""The name of whoever tells the services that a worker is dead."""
_NAME = re.compile(rb"worker (\d{1,6})(?:\.(\d{1,6}))?")


def serve(config: ShardConfig) -> None:
    """Serve a shard, and the batch dispatcher in the process of shard 0, until the process ends."""
    torch.set_num_threads(1)
    names = (f"shard{config.shard}", "coordinator", "ends")
    snapshots = Path(config.snapshots) if config.snapshots else None
    own, shared, ends = (DiskStore(snapshots, name) if snapshots else None for name in names)
    house = ServerThreads(config.workers, server_keys(config.keys))
    if config.dispatcher_fd is not None:
        desk = DispatcherHandler(config.workers, time.monotonic, shared, config.snapshot_interval_s, ends)
        house.open(socket.socket(fileno=config.dispatcher_fd), desk)
    shard = ShardHandler(config.workers, time.monotonic, config.on_nan, own, time.monotonic_ns())
    house.open(socket.socket(fileno=config.listen_fd), shard)
    house.wait()


class ServerThreads:
    """The services of one process, each with a thread; `close` ends them."""

    def __init__(self, workers: int, keys: ServerKeys | None) -> None:
        keep_freed_memory()
        self._workers, self._keys = workers, keys
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.services: list[RpcServer] = []
        self._doorman = doorman(self._context, keys) if keys else None

    def open(self, listener: socket.socket, desk: RequestHandler) -> str:
        """Serve a desk at a listening socket; returns its address."""
        service = RpcServer(self._context, listener, desk, self._workers, self._keys)
        thread = threading.Thread(target=service.run, args=(self._stop,), name=service.address, daemon=True)
        self.services.append(service)
        self._threads.append(thread)
        thread.start()
        return service.address

    def wait(self) -> None:
        """Until all services have ended."""
        for thread in self._threads:
            thread.join()
        for service in self.services:
            if service.failure is not None:
                raise service.failure

    def await_leave(self, limit_s: float) -> None:
        """Until all workers have left all services, but no longer than that."""
        limit = time.monotonic() + limit_s
        for service in self.services:
            service.empty.wait(max(limit - time.monotonic(), 0.0))

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
    """Carries parcels between one socket and one desk."""

    def __init__(
        self,
        context: zmq.Context[Any],
        listener: socket.socket,
        desk: RequestHandler,
        workers: int,
        keys: ServerKeys | None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        self._desk, self._workers = desk, workers
        self._socket = router(context, keys, LARGEST_FRAME)
        self._lives = Incarnations(workers)
        """What a life that is over still says is refused."""
        self._assemblies = [Assembly() for _ in range(workers)]
        self._numbers = [0] * workers
        """That of each worker's parcel under way, or the last."""
        self._streams = [False] * workers
        """Whether a worker's parcel is taken piece by piece as it comes."""
        self._sending: deque[tuple[Any, Callable[[], None]]] = deque()
        self.refused = 0
        """Messages that were not taken, for whatever reason."""
        self.failure: BaseException | None = None
        self.empty = threading.Event()
        """Set once all workers have left."""
        self._left: set[int] = set()
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(self.address)

    def run(self, stop: threading.Event) -> None:
        """Serve until told to stop."""
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

    def _take_all(self) -> None:
        """Wait for something to come, and take in all that has."""
        flags = 0
        for _ in range(1000):
            try:
                name, *frames = self._socket.recv_multipart(flags, copy=False)
            except zmq.Again:
                return
            self._take(bytes(name), frames)
            flags = zmq.NOBLOCK

    def _take(self, name: bytes, frames: Sequence[Any]) -> None:
        if name == DEATH_NOTIFIER and frames:
            self._hear_of_death(frames)
            return
        worker, life = worker_of(name, self._workers)
        if worker is None or not frames:
            self._refuse(None, f"a message of {name!r:.40}, which is no worker's name")
            return
        if self._lives.is_over(worker, life):
            self._refuse(None, f"a message of worker {worker}, which is not its process {life} any more")
            return
        try:
            if (gone := self._lives.untold(worker, life)) is not None:
                self._bury(gone)
            self._lives.hear(worker, life)
            for post in self._read(worker, frames):
                self._send(post)
        except Exception as error:
            why = str(error) if isinstance(error, FramingError) else f"{type(error).__name__}: {error}"
            self._refuse(OutgoingMessage(worker, self._numbers[worker], m.Refused(why)), f"worker {worker}: {why}")

    def _read(self, worker: int, frames: Sequence[Any]) -> list[OutgoingMessage]:
        assembly = self._assemblies[worker]
        if len(frames[0]):
            self._streams[worker], self._numbers[worker] = False, 0
            head = assembly.begin(frames[0])
            self._numbers[worker] = head.number
            self._desk.expects(worker, head)
        is_whole = assembly.add(frames[1:])
        if len(frames[0]) and not is_whole:
            self._streams[worker] = self._desk.streams(worker, assembly.head)
        if self._streams[worker]:
            for index, at, piece in assembly.drain():
                self._desk.write(worker, index, at, piece)
        if not is_whole:
            return []
        head, tensors = assembly.take()
        if isinstance(head.body, m.Leave):
            return self._leave(worker)
        if isinstance(head.body, m.Quit):
            self._note_left(worker)
        return self._desk.take(worker, head, tensors)

    def _hear_of_death(self, frames: Sequence[Any]) -> None:
        """Somebody who knows says that a life of a worker is over; what this desk has of its work is answered."""
        try:
            head = decode_head(frames[0])
        except FramingError as error:
            self._refuse(None, f"news that are none: {error}")
            return
        gone = head.body
        if not isinstance(gone, m.Gone) or not 0 <= gone.worker < self._workers:
            self._refuse(None, f"news of {type(gone).__name__}")
            return
        try:
            is_last = self._lives.is_last(gone.worker, gone.life)
            left = self._desk.work_of(gone.worker) if is_last else m.Left(0, [])
            if not self._lives.is_over(gone.worker, gone.life):
                self._bury(gone)
                self._note_left(gone.worker)
            self._socket.send_multipart([DEATH_NOTIFIER, *next(encode(head.number, left))])
        except Exception as error:
            self._refuse(None, f"news of the death of worker {gone.worker}: {type(error).__name__}: {error}")

    def _bury(self, gone: m.Gone) -> None:
        """A worker's life is over, if it was in."""
        worker = gone.worker
        self._assemblies[worker].forget()
        self._left.discard(worker)
        if self._lives.end(worker, gone.life):
            for post in self._desk.gone(worker, gone.number, gone.batches, gone.torn):
                self._send(post)

    def _leave(self, worker: int) -> list[OutgoingMessage]:
        self._note_left(worker)
        return self._desk.leave(worker)

    def _note_left(self, worker: int) -> None:
        self._left.add(worker)
        if len(self._left) == self._workers:
            self.empty.set()

    def _refuse(self, post: OutgoingMessage | None, why: str) -> None:
        self.refused += 1
        log(f"refused {why}")
        if post is not None:
            self._assemblies[post.worker].forget()
            self._send(post)

    def _send(self, post: OutgoingMessage) -> None:
        name, tracker = name_of(post.worker, self._lives.present(post.worker)), None
        small = sum(one.nbytes for one in post.tensors) < SMALL_BYTES
        try:
            for message in encode(post.number, post.body, post.tensors):
                tracker = self._socket.send_multipart([name, *message], copy=small, track=not small)
        except zmq.ZMQError:
            tracker = None  # the worker is gone
        if post.sent is not None and tracker is not None:
            self._sending.append((tracker, post.sent))
        elif post.sent is not None:
            post.sent()

    def _note_sent(self) -> None:
        """Let go of what has left. Messages to one worker leave in order; the last to be sent is looked at."""
        for _ in range(len(self._sending)):
            tracker, sent = self._sending.popleft()
            if tracker.done:
                sent()
            else:
                self._sending.append((tracker, sent))


def name_of(worker: int, life: int = 0) -> bytes:
    """A worker's name at the sockets of a server; each life has its own.

    >>> name_of(3), name_of(3, 1)
    (b'worker 3', b'worker 3.1')
    """
    return b"worker %d.%d" % (worker, life) if life else b"worker %d" % worker


def worker_of(name: bytes, workers: int) -> tuple[int | None, int]:
    """The worker of a name, if it is one of so many, and its life."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) >= workers:
        return None, 0
    return int(found[1]), int(found[2] or 0)


def listening(host: str = "127.0.0.1") -> socket.socket:
    """A listening socket at a free port. Raises LaunchError when the address is not one of this machine's."""
    try:
        return socket.create_server((host, 0), backlog=BACKLOG)
    except OSError as error:
        problem = f"a parameter server cannot listen at {host}: {error.strerror or error}"
        expected = "an address of the machine of worker 0"
        raise LaunchError(explain(problem, got=host, expected=expected, to_type="MASTER_ADDR=127.0.0.1")) from error
