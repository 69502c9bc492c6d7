"""A run on this machine: workers are started, watched over, and ended together."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from stretto.errors import LaunchError, explain
from stretto.folder import make_folder, write_run
from stretto.launch.cause import Cause, first_cause, readable
from stretto.launch.crew import Crew, Exited, Inbox, Signalled
from stretto.launch.order import Order, check
from stretto.launch.relay import Relay, log_of
from stretto.launch.watch import Tail, Watch

__all__ = ["Order", "Stopped", "run"]

HOME = "127.0.0.1"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CAUSE_S = 1.0
"""How long after a failure that another one led to its cause is waited for."""


class Stopped(BaseException):
    """The launcher was told to end, and has ended its workers. No Exception: it is not a failed run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def run(order: Order, watch: Watch) -> Path:
    """Run a script on workers of this machine and return the run folder.

    Raises LaunchError or RecipeError before anything is started, LaunchError with the cause when a worker
    fails, and Stopped after SIGINT, SIGTERM or SIGHUP. However it ends, no process of the run is left: within
    3 s, and even when this process is killed.
    """
    check(order)
    inbox: Inbox = SimpleQueue()
    with _listening(order.port) as listener, _signals_to(inbox):
        now = datetime.now()
        folder = make_folder(order.script.stem, order.out, now)
        write_run(folder, order.asked(), now)
        return _see_through(order, folder, listener, inbox, watch)


def _see_through(order: Order, folder: Path, listener: socket.socket, inbox: Inbox, watch: Watch) -> Path:
    crew, relay = Crew(inbox), Relay(folder, order.output, watch)
    try:
        for worker in range(order.workers):
            relay.listen(worker, crew.start(worker, order, folder, listener))
        listener.close()  # now only the lead has it: a meeting without the lead fails at once
        watch.begin(folder, order)
        relay.start()
        cause = _supervise(crew, order.workers, inbox, Tail(folder / "events.jsonl"))
    finally:
        crew.end()
        relay.close()
    if cause is None:
        return folder
    raise LaunchError(_told(cause, relay, folder))


def _supervise(crew: Crew, workers: int, inbox: Inbox, log: Tail) -> Cause | None:
    """Wait until all workers have ended well, or one has not: return the cause. Raises Stopped."""
    ends: list[Exited] = []
    while len(ends) < workers:
        news = inbox.get()
        if isinstance(news, Signalled):
            raise Stopped(news.number)
        crew.bury(news.worker)
        ends.append(news)
        if news.code != 0:
            return _find_cause(crew, ends, inbox, log)
    return None


def _find_cause(crew: Crew, ends: list[Exited], inbox: Inbox, log: Tail) -> Cause:
    """The cause of a failure. If another worker's led to it, that one is waited for a little."""
    events, limit = log.read(), time.monotonic() + CAUSE_S
    while True:
        cause = first_cause(ends, events)
        left_s = limit - time.monotonic()
        if cause.root or left_s <= 0:
            return cause
        with contextlib.suppress(Empty):
            news = inbox.get(timeout=min(0.05, left_s))
            if isinstance(news, Signalled):
                raise Stopped(news.number)
            crew.bury(news.worker)
            ends.append(news)
        events += log.read()


def _told(cause: Cause, relay: Relay, folder: Path) -> str:
    """The readable text; what a worker has told of its error goes into its log as well."""
    log = log_of(folder, cause.worker)
    if cause.said_so:
        with contextlib.suppress(OSError), log.open("a") as file:
            file.write(f"{cause.headline}\n{cause.details}\n")
    return readable(cause, relay.tail, str(log))


@contextlib.contextmanager
def _listening(port: int | None) -> Iterator[socket.socket]:
    """A socket that listens on a port, by default a free one. Raises LaunchError when the port is in use."""
    try:
        listener = socket.create_server((HOME, port or 0), backlog=1024)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        problem = f"port {port} is in use" if used else f"port {port} cannot be listened on: {error.strerror}"
        to_type = "leave --port away: a free one is taken"
        raise LaunchError(explain(problem, got=port, expected="a free port", to_type=to_type)) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _signals_to(inbox: Inbox) -> Iterator[None]:
    """Put signals that ask to end into the inbox. Those ignored from the start, as by nohup, stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, _frame: FrameType | None) -> None:
        inbox.put(Signalled(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
