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

from stretto.errors import MemberOutError, TransportError, UnevenLoopsError
from stretto.membership.client_state import ALONE, CoordinatorConnection, MembershipClientState
from stretto.membership.loop_positions import Waits
from stretto.membership.messages import (
    EXCHANGING,
    Broken,
    Continue,
    GenerationView,
    Heartbeat,
    Leave,
    Quit,
    ReadyReport,
    Register,
    Said,
    Told,
)
from stretto.security import WorkerKeys

LARGEST_TOLD = 1 << 24
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LINGER_MS = 1000
"""Time in ms that the last messages may take to be sent at the end."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Told)


class MembershipClient(CoordinatorConnection):
    """A worker's connection to the coordinator, in a thread of its own.

    The constructor registers the worker and waits for the reply: `settings` are those of the run. Raises TransportError
    if no coordinator replies for `limit_s`. A paused worker gets a MemberOutError if no coordinator replies for
    `failure_timeout_s`, and a TransportError if the run cannot continue.
    """

    def __init__(
        self,
        worker: int,
        life: int,
        address: str,
        keys: WorkerKeys | None,
        failure_timeout_s: float,
        limit_s: float = 60.0,
        on_abort: Callable[[int, str], None] = lambda _generation, _why: None,
    ) -> None:
        self.on_abort = on_abort
        """Called from the thread, with the generation and the reason, when the generation is aborted or the worker
        evicted."""
        super().__init__(MembershipClientState(worker, life, self._news))
        self._me = f"worker {worker}"
        self._address, self._patience_s = address, failure_timeout_s
        self._every_s = min(failure_timeout_s / 5, 1.0)
        self._doing = ("starting", 0, time.monotonic())
        self.place: Callable[[], int] = lambda: -1
        """Returns the number of collective operations that this worker has begun; called from the thread."""
        self._waits: Waits | None = None
        self._broken: Broken | None = None
        self._quits = self._leaves = self._ends = False
        self._heard = time.monotonic()
        self._problem = ""
        self._changed = threading.Condition()
        self._nudge, self._nudged = socket.socketpair()
        self._nudge.setblocking(False)
        self._nudged.setblocking(False)
        self._context = zmq.Context()
        self._dealer = _dealer(self._context, b"worker %d.%d" % (worker, life), keys, failure_timeout_s)
        self._monitor = self._dealer.get_monitor_socket(WATCHED)
        self._dealer.connect(address if "://" in address else f"tcp://{address}")
        self._thread = threading.Thread(target=self._run, name="companion", daemon=True)
        self._thread.start()
        try:
            self._wait(lambda: self.attendance.settings is not None, limit_s)
        except BaseException:
            self.close()
            raise

    # --- what the worker's main thread says --------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run, the same for all workers."""
        return self.attendance.settings or {}

    @property
    def generation(self) -> int:
        """Last generation that this worker was in."""
        return self.attendance.generation

    def broken(self, generation: int, why: str, forming: bool = False) -> None:
        """Report that a collective operation of this generation failed, or its rendezvous (`forming`)."""
        self._broken = Broken(generation, why, forming)
        self._wake()

    def doing(self, text: str, hand: int, waits: Waits | None = None) -> None:
        """Note this worker's next activity and its global step, for which others wait if necessary."""
        is_further = hand != self._doing[1]
        self._doing, self._waits = (text, hand, time.monotonic()), waits
        if is_further and self.attendance.held:
            self._wake()

    def quit(self) -> None:
        """Ask to leave gracefully at the next rest. May be called by a signal handler."""
        self._quits = True
        self._wake()

    def leave(self) -> None:
        """Report that this worker has finished."""
        self._leaves = True
        self._wake()

    def close(self) -> None:
        """End the thread once all messages are sent. Idempotent."""
        self._ends = True
        self._wake()
        self._thread.join()
        self._nudge.close()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _stand(self, here: ReadyReport) -> GenerationView | Continue:
        with self._changed:
            self.attendance.stand(here)
            self._wake()
        self._heard = max(self._heard, time.monotonic() - self._every_s)
        self._wait(lambda: self.attendance.answer is not None, self._patience_s)
        answer = self.attendance.answer
        assert answer is not None
        return answer

    def _wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition while the coordinator replies."""
        with self._changed:
            while not until():
                self._raise_if_over()
                if (left := self._heard + limit_s - time.monotonic()) <= 0:
                    raise self._unanswered(limit_s)
                self._changed.wait(left)

    def _raise_if_over(self) -> None:
        if self.attendance.out is not None:
            raise MemberOutError(f"{self._me} is no member any more: {self.attendance.out}")
        if (stop := self.attendance.stopped) is not None:
            raise UnevenLoopsError(stop.why) if stop.uneven else TransportError(f"the run cannot continue: {stop.why}")
        if self._problem:
            raise TransportError(f"the coordinator at {self._address} {self._problem}")

    def _unanswered(self, limit_s: float) -> TransportError:
        text = f"no coordinator answered {self._me} at {self._address} for {limit_s:g} s"
        return TransportError(text) if self.attendance.settings is None else MemberOutError(text)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._nudge.send(b"!")

    def _news(self, generation: int, why: str) -> None:
        self.on_abort(generation, why)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._dealer, self._monitor, self._nudged.fileno()):
            poller.register(one, zmq.POLLIN)
        try:
            due = time.monotonic()
            while not self._ends:
                if time.monotonic() >= due:
                    due = time.monotonic() + self._every_s
                    self._speak(with_beat=True)
                    self._mind_silence()
                ready = dict(poller.poll(max(int((due - time.monotonic()) * 1000) + 1, 0)))
                is_nudged = self._nudged.fileno() in ready and self._drain()
                is_new = self._heed()
                if self._listen() or is_new or is_nudged:
                    self._speak(with_beat=is_new or self.attendance.held)
            self._speak(with_beat=False)
        except BaseException as error:
            self._problem = f"cannot be spoken to: {type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._changed.notify_all()
            self._nudged.close()
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=LINGER_MS)
            self._context.term()

    def _mind_silence(self) -> None:
        """Abort the generation if the coordinator has been silent for the failure timeout while this worker waits for
        others.

        A worker that is alone in its generation waits for no other: it aborts earlier, before workers that it cannot
        see may begin without it.
        """
        doing, _, since = self._doing
        alone = self.attendance.is_alone and not self.settings.get("free", False)
        limit_s = ALONE * self._patience_s if alone else self._patience_s
        silent_s = time.monotonic() - (self._heard if alone else max(since, self._heard))
        if silent_s > limit_s and (alone or doing == EXCHANGING):
            self._news(self.attendance.generation, "the coordinator was not heard")

    def _drain(self) -> bool:
        return bool(self._nudged.recv(4096))

    def _heed(self) -> bool:
        """Process the events of the connection's monitor; return True if it is newly connected."""
        is_new = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_new = True
                self._say(Register(socket.gethostname(), os.getpid()))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = "refused this worker's key"
                with self._changed:
                    self._changed.notify_all()
        return is_new

    def _listen(self) -> bool:
        """Process all messages received; return True if one needs a reply."""
        is_to_answer = False
        while True:
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return is_to_answer
            with self._changed:
                self._heard = time.monotonic()
                if frame:
                    is_to_answer |= self.attendance.told(_DECODER.decode(frame))
                    self._changed.notify_all()

    def _speak(self, with_beat: bool) -> None:
        """Send the messages that are due, repeated until there is a reply."""
        with self._changed:
            said = self.attendance.says()
            generation, aborted = self.attendance.generation, self.attendance.aborted
            is_welcome = self.attendance.settings is not None
        if with_beat:
            doing, hand, since = self._doing
            self._say(Heartbeat(generation, doing, time.monotonic() - since, hand, self.place(), self._waits))
            if not is_welcome:
                self._say(Register(socket.gethostname(), os.getpid()))
        if self._broken is not None and self._broken.generation > aborted:
            self._say(self._broken)
        if self._quits:
            self._say(Quit())
        for one in said:
            self._say(one)
        if self._leaves:
            self._say(Leave())

    def _say(self, said: Said) -> None:
        with contextlib.suppress(zmq.Again):  # not connected; messages that matter are repeated
            self._dealer.send(_ENCODER.encode(said), zmq.NOBLOCK)


def _dealer(context: zmq.Context[Any], name: bytes, keys: WorkerKeys | None, failure_timeout_s: float) -> Any:
    dealer = context.socket(zmq.DEALER)
    for option, value in {
        zmq.IDENTITY: name,
        zmq.IMMEDIATE: 1,
        zmq.MAXMSGSIZE: LARGEST_TOLD,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.HEARTBEAT_IVL: max(int(failure_timeout_s * 200), 1),
        zmq.HEARTBEAT_TIMEOUT: max(int(failure_timeout_s * 1000), 1),
        zmq.HANDSHAKE_IVL: 0,
    }.items():
        dealer.setsockopt(option, value)
    if keys is not None:
        dealer.curve_serverkey = keys.servers
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
    return dealer
