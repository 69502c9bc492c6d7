"""A run on this machine: workers, and the servers they need, are started, watched over, and ended together."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from stretto.errors import LaunchError
from stretto.folder import make_folder, write_run
from stretto.launch.cause import Cause, first_cause, readable
from stretto.launch.crew import Crew, Exited, Inbox, Signalled
from stretto.launch.order import Order, check, settled
from stretto.launch.parts import parts
from stretto.launch.relay import Relay, log_of
from stretto.launch.servers import Servers, servers_for
from stretto.launch.sockets import listening
from stretto.launch.watch import Tail, Watch

__all__ = ["Order", "Stopped", "run"]

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
    order = settled(order)
    inbox: Inbox = SimpleQueue()
    with listening(order.port) as listener, servers_for(order.servers or 0, order.plain) as servers, _signals_to(inbox):
        now = datetime.now()
        folder = make_folder(order.script.stem, order.out, now)
        write_run(folder, order.asked(), now)
        return _see_through(order, folder, listener, servers, inbox, watch)


def _see_through(
    order: Order, folder: Path, listener: socket.socket, servers: Servers, inbox: Inbox, watch: Watch
) -> Path:
    crew, relay = Crew(inbox), Relay(folder, order.output, watch)
    try:
        for part in parts(order, folder, listener, servers):
            relay.listen(part.number, crew.start(part))
        listener.close()  # now only the lead has it: a meeting without the lead fails at once
        servers.close()
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
    """Wait until all workers have ended well, or a process has not: return the cause. Raises Stopped.

    Servers are there as long as workers are: whatever it was that ended one, it was not asked to.
    """
    ends: list[Exited] = []
    while len(ends) < workers:
        news = inbox.get()
        if isinstance(news, Signalled):
            raise Stopped(news.number)
        crew.bury(news.worker)
        ends.append(news)
        if news.failed:
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
    """The readable text; what a process has told of its error goes into its log as well."""
    log = log_of(folder, cause.worker)
    if cause.said_so:
        with contextlib.suppress(OSError), log.open("a") as file:
            file.write(f"{cause.headline}\n{cause.details}\n")
    return readable(cause, relay.tail, str(log))


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
