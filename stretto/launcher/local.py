"""A run on this machine: workers, and the servers they need, are started, watched over, and ended together."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher.config import RunConfig, check, in_server_words, planned, settled
from stretto.launcher.endpoints import servers_for
from stretto.launcher.failure_cause import Cause, readable
from stretto.launcher.join import JoinRequest, cast_of, invite
from stretto.launcher.listeners import listening
from stretto.launcher.log_relay import LogRelay, log_of
from stretto.launcher.process_specs import ProcessPlan
from stretto.launcher.processes import Inbox, ProcessTable, Signalled
from stretto.launcher.progress_display import ProgressDisplay
from stretto.launcher.resume_hint import left_in
from stretto.launcher.script_watch import several_write
from stretto.launcher.signals import heeded
from stretto.launcher.supervisor import Stopped, Supervisor
from stretto.run_dir import make_folder, write_run

__all__ = ["JoinRequest", "RunConfig", "Stopped", "join", "run"]


def run(order: RunConfig, watch: ProgressDisplay) -> Path:
    """Run a script on workers of this machine and return the run folder.

    Raises LaunchError or RecipeError before anything is started, LaunchError with the cause when a worker
    fails, and Stopped after SIGINT, SIGTERM or SIGHUP. However it ends, no process of the run is left: within
    3 s, and even when this process is killed.
    """
    check(order)
    said = in_server_words(order)
    order = settled(order)
    inbox: Inbox = SimpleQueue()
    with (
        listening(order.port) as listener,
        servers_for(order.servers or 0, order.plain, order.endures, order.host) as servers,
        heeded(lambda number: inbox.put(Signalled(number))),
    ):
        now = datetime.now()
        folder = make_folder(order.name, order.out, now)
        write_run(folder, order.asked(), now)
        watch.starting(f"{order}, run folder {folder}")
        if said is not None:
            watch.note(said)
        if order.host is not None:
            invite(folder, order, servers)
        try:
            _see_through(ProcessPlan(order, folder, listener, servers, time.perf_counter()), inbox, watch)
        except Stopped as stop:
            stop.add(left_in(folder, order.retyped))
            raise
        return folder


def join(guests: JoinRequest, watch: ProgressDisplay) -> Path:
    """Add workers of this machine to a run of another, and return its folder when they have ended.

    Raises LaunchError and Stopped as `run` does; the run goes on without its guests.
    """
    inbox: Inbox = SimpleQueue()
    with heeded(lambda number: inbox.put(Signalled(number))):
        cast = cast_of(guests)
        watch.starting(f"{len(cast.guests)} workers that join the run in {cast.folder}")
        _see_through(cast, inbox, watch)
        return cast.folder


def _see_through(cast: ProcessPlan, inbox: Inbox, watch: ProgressDisplay) -> None:
    order, folder = cast.order, cast.folder
    crew, relay = ProcessTable(inbox), LogRelay(folder, order.output, watch)
    supervisor = Supervisor(cast, crew, relay, inbox, planned(order))
    try:
        supervisor.start()
        if cast.listener is not None and not order.endures:
            cast.listener.close()  # now only the lead has it: a meeting without the lead fails at once
            cast.servers.close()
        watch.begin(folder, order)
        relay.start()
        cause = supervisor.see_through()
        _note_files(folder, relay)
    finally:
        crew.end()
        supervisor.close()
        relay.close()
    if cause is not None:
        raise LaunchError(_told(cause, relay, folder))


def _note_files(folder: Path, relay: LogRelay) -> None:
    """Say which files several workers have written; a run whose workers wrote no event has none to compare."""
    log = folder / "events.jsonl"
    if log.exists() and (text := several_write(read_events(log))) is not None:
        relay.note(text)


def _told(cause: Cause, relay: LogRelay, folder: Path) -> str:
    """The readable text; what a process has told of its error goes into its log as well."""
    log = log_of(folder, cause.worker)
    if cause.said_so:
        with contextlib.suppress(OSError), log.open("a") as file:
            file.write(f"{cause.headline}\n{cause.details}\n")
    return readable(cause, relay.tail, str(log))
