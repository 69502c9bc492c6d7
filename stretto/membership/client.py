"""A worker's membership client: a thread that sends heartbeats and receives the coordinator's messages.

`stretto.membership.client_state` is its state machine, without a socket or a clock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.utils.garbage  # its handler at exit has to be registered before ours, which runs first
from zmq.utils.monitor import parse_monitor_message

from stretto.errors import MemberOutError, TransportError, UnevenLoopsError, UnreachableError, explain
from stretto.events import process_name
from stretto.membership.client_state import ALONE, CoordinatorConnection
from stretto.membership.messages import (
    EXCHANGING,
    Continue,
    CoordinatorMessage,
    GenerationView,
    ReadyReport,
    Register,
    WorkerMessage,
    connection_name,
)
from stretto.membership.worker_status import status
from stretto.security import WorkerKeys, use_keys

LARGEST_MESSAGE = 1 << 24
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LINGER_MS = 1000
"""Time in ms that the last messages may take to be sent at the end."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(CoordinatorMessage)


class MembershipClient(CoordinatorConnection):
    """A worker's connection to the coordinator, in a thread of its own.

    The constructor registers the worker and waits for the reply: `settings` are those of the run. Raises TransportError
    if no coordinator replies for `limit_s`. A paused worker gets a MemberOutError if no coordinator replies for
    `failure_timeout_s`, and a TransportError if the run cannot continue. Each of the `ranks` of a worker has a client.
    """

    def __init__(
        self,
        worker: int,
        incarnation: int,
        address: str,
        keys: WorkerKeys | None,
        failure_timeout_s: float,
        limit_s: float = 60.0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(worker, incarnation)
        self._worker, self._name = worker, process_name(worker, rank)
        self._address, self._failure_timeout_s = address, failure_timeout_s
        self._every_s = min(failure_timeout_s / 5, 1.0)
        self._is_closing = False
        self._last_message = time.monotonic()
        self._problem = ""
        self._changed = threading.Condition()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._context = zmq.Context()
        self._dealer = dealer(self._context, connection_name(worker, incarnation, rank, ranks), keys, failure_timeout_s)
        self._monitor = self._dealer.get_monitor_socket(WATCHED)
        self._dealer.connect(url(address))
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()
        try:
            self._wait(lambda: self.state.asynchronous is not None, limit_s)
        except BaseException:
            self.close()
            raise

    # --- calls of the worker's main thread ---------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Last generation that this worker was in."""
        return self.state.generation

    def close(self) -> None:
        """End the thread once all messages are sent. Idempotent."""
        self._is_closing = True
        self.wake()
        self._thread.join()
        self._wake_sender.close()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _pause(self, report: ReadyReport) -> GenerationView | Continue:
        with self._changed:
            self.state.pause(report)
            self.wake()
        self._last_message = max(self._last_message, time.monotonic() - self._every_s)
        self._wait(lambda: self.state.reply is not None, self._failure_timeout_s)
        reply = self.state.reply
        assert reply is not None
        if self.state.generation:
            status.join()
        if isinstance(reply, GenerationView) and self._worker not in reply.numbers:  # a rank of it was asked to leave
            status.leave()
        return reply

    def _wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition while the coordinator replies."""
        with self._changed:
            while not until():
                self._raise_if_ended()
                if (remaining_s := self._last_message + limit_s - time.monotonic()) <= 0:
                    raise self._no_reply_error(limit_s)
                self._changed.wait(remaining_s)

    def _raise_if_ended(self) -> None:
        if (evicted := self.state.evicted) is not None:
            if evicted.unreachable:
                got, expected = "no connection", "hosts that reach each other, or both the port of the run's launcher"
                to_type = "stretto run --listen ADDRESS:PORT, with an address and a port that all hosts reach"
                raise UnreachableError(explain(evicted.why, got=got, expected=expected, to_type=to_type))
            raise MemberOutError(f"{self._name} is no member any more: {evicted.why}")
        if (stop := self.state.stopped) is not None:
            raise UnevenLoopsError(stop.why) if stop.uneven else TransportError(f"the run cannot continue: {stop.why}")
        if self._problem:
            raise TransportError(f"the coordinator at {self._address} {self._problem}")

    def _no_reply_error(self, limit_s: float) -> TransportError:
        text = f"no coordinator answered {self._name} at {self._address} for {limit_s:g} s"
        return TransportError(text) if self.state.asynchronous is None else MemberOutError(text)

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def wake(self, with_heartbeat: bool = False) -> None:
        """Let the thread send the messages that are due; it adds a heartbeat while a pause is requested."""
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._wake_sender.send(b"!")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket_ in (self._dealer, self._monitor, self._wake_receiver.fileno()):
            poller.register(socket_, zmq.POLLIN)
        try:
            due_s = time.monotonic()
            while not self._is_closing:
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + self._every_s
                    self._send_pending(with_heartbeat=True)
                    self._abort_if_silent()
                ready = dict(poller.poll(max(int((due_s - time.monotonic()) * 1000) + 1, 0)))
                is_woken = self._wake_receiver.fileno() in ready and self._drain_wakes()
                is_new = self._process_monitor()
                if self._receive_all() or is_new or is_woken:
                    self._send_pending(with_heartbeat=is_new or self.state.pause_requested)
            self._send_pending(with_heartbeat=False)
        except BaseException as error:
            self._problem = f"cannot be reached: {type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._changed.notify_all()
            self._wake_receiver.close()
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=LINGER_MS)
            self._context.term()

    def _abort_if_silent(self) -> None:
        """Abort the generation if the coordinator has been silent for the failure timeout while this worker waits for
        others.

        A worker that is alone in its generation waits for no other: it aborts earlier, before workers that it cannot
        see may begin without it.
        """
        doing, _, since_s = self._doing
        alone = self.state.is_alone and not self.state.asynchronous
        limit_s = ALONE * self._failure_timeout_s if alone else self._failure_timeout_s
        silent_s = time.monotonic() - (self._last_message if alone else max(since_s, self._last_message))
        if silent_s > limit_s and (alone or doing == EXCHANGING):
            self.abort(self.state.generation, "the coordinator was not heard")

    def _drain_wakes(self) -> bool:
        return bool(self._wake_receiver.recv(4096))

    def _process_monitor(self) -> bool:
        """Process the events of the connection's monitor; return True if it is newly connected."""
        is_new = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_new = True
                self._send(Register(socket.gethostname(), os.getpid()))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = "refused this worker's key"
                with self._changed:
                    self._changed.notify_all()
        return is_new

    def _receive_all(self) -> bool:
        """Process all messages received; return True if one needs a reply."""
        needs_reply = False
        while True:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return needs_reply
            with self._changed:
                self._last_message = time.monotonic()
                if frame:
                    needs_reply |= self.state.receive(_DECODER.decode(frame))
                    self._changed.notify_all()

    def _send_pending(self, with_heartbeat: bool) -> None:
        """Send the messages that are due, repeated until there is a reply."""
        with self._changed:
            messages = self.due_messages(with_heartbeat, time.monotonic())
            is_registered = self.state.asynchronous is not None
        if with_heartbeat and not is_registered:
            self._send(Register(socket.gethostname(), os.getpid()))
        for message in messages:
            self._send(message)

    def _send(self, message: WorkerMessage) -> None:
        with contextlib.suppress(zmq.Again):  # not connected; messages that matter are repeated
            self._dealer.send(_ENCODER.encode(message), zmq.NOBLOCK)


def side_connection(name: bytes, address: str, keys: WorkerKeys | None, failure_timeout_s: float) -> Any:
    """Return a socket that is connected with the coordinator, beside the membership connection. Nothing lingers."""
    context: Any = zmq.Context.instance()
    made = dealer(context, name, keys, failure_timeout_s)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(url(address))
    return made


def url(address: str) -> str:
    """Return the address of the coordinator with its protocol."""
    return address if "://" in address else f"tcp://{address}"


def dealer(context: zmq.Context[Any], name: bytes, keys: WorkerKeys | None, failure_timeout_s: float) -> Any:
    """Return a socket for the coordinator, which sends nothing while it is not connected."""
    made = context.socket(zmq.DEALER)
    for option, value in {
        zmq.IMMEDIATE: 1,
        zmq.MAXMSGSIZE: LARGEST_MESSAGE,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.HEARTBEAT_IVL: max(int(failure_timeout_s * 200), 1),
        zmq.HEARTBEAT_TIMEOUT: max(int(failure_timeout_s * 1000), 1),
        zmq.HANDSHAKE_IVL: 0,
    }.items():
        made.setsockopt(option, value)
    use_keys(made, name, keys)
    return made
