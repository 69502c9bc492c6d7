"""Runs on this machine: workers and services are started, supervised and ended together."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue

from msgspec import structs

from stretto.checkpoint.file_receiver import INCOMING
from stretto.checkpoint.model_file import left_in as model_left_in
from stretto.errors import LaunchError, LogError, RunFailedError, WorkersLostError, explain
from stretto.events import read_events
from stretto.launcher.config import (
    check,
    checkpoint_notice,
    described,
    on_engine,
    planned,
    server_notice,
    settled,
    with_hosts,
)
from stretto.launcher.endpoints import servers_for
from stretto.launcher.engines.agents import StartAgent
from stretto.launcher.engines.clusters import Cluster, connected
from stretto.launcher.engines.interface import Engine, Inbox, Signalled
from stretto.launcher.engines.local import LocalEngine
from stretto.launcher.engines.shard_hosts import ShardHosts
from stretto.launcher.engines.ssh import SshAgents
from stretto.launcher.failure_cause import Cause, readable
from stretto.launcher.join import JoinRequest, given_secret, invited, plan_of_join, route, write_join_key
from stretto.launcher.listeners import listening
from stretto.launcher.log_relay import Forward, LogRelay
from stretto.launcher.logs_elsewhere import LogsElsewhere
from stretto.launcher.output_sender import CLOSE_S, OutputSender
from stretto.launcher.process_specs import ProcessPlan
from stretto.launcher.progress_display import ProgressDisplay
from stretto.launcher.remote_workers import RemoteWorkers
from stretto.launcher.resume_hint import command_to_continue, left_in, left_out
from stretto.launcher.run_copy import check_place, copying
from stretto.launcher.script_watch import several_write
from stretto.launcher.signals import Stopped, handled
from stretto.launcher.supervisor import Supervisor
from stretto.membership.output_lines import log_of
from stretto.run_config import RunConfig
from stretto.run_dir import make_folder, write_run

__all__ = ["JoinRequest", "Stopped", "join", "run"]

MakeEngine = Callable[[Inbox], Engine]
LEAST_DESCRIPTORS = 64
"""Number of files that a process of a run may open, without those of the script: a coordinator of 4 workers has 52."""


def run(config: RunConfig, display: ProgressDisplay, make_engine: MakeEngine = LocalEngine) -> Path:
    """Run a script on the workers that an engine starts, by default on this machine, and return the run directory.

    Raises LaunchError or RecipeError before anything is started, LaunchError with the cause when a worker
    fails, and Stopped after SIGINT, SIGTERM or SIGHUP. However the run ends, none of its processes is left after 3 s,
    even if this process is killed.
    """
    config = on_engine(with_hosts(config))
    check(config)
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= descriptors < LEAST_DESCRIPTORS:
        raise LaunchError(
            explain(
                "the processes of a run may open too few files",
                got=f"{descriptors} descriptors",
                expected=f"at least {LEAST_DESCRIPTORS}, and those of the script",
                to_type="ulimit -n 65536",
            )
        )
    if config.copy_to is not None:
        check_place(config.copy_to)
    with connected(config) as cluster:
        if cluster is not None:
            config = structs.replace(config, host=config.host or cluster.address)
        notes = [*filter(None, (server_notice(config), checkpoint_notice(config)))]
        return _run(settled(config), notes, display, make_engine, cluster)


def _run(
    config: RunConfig, notes: list[str], display: ProgressDisplay, make_engine: MakeEngine, cluster: Cluster | None
) -> Path:
    secret = given_secret(config.secret_file) if config.secret_file is not None else None
    inbox: Inbox = SimpleQueue()
    with (
        listening(config.port) as listener,
        servers_for(
            config.servers or 0,
            config.plain,
            config.elastic,
            config.host,
            config.listen_port,
            config.server_hosts is not None,
            config.port_range,
        ) as servers,
        handled(lambda number: inbox.put(Signalled(number))),
    ):
        if secret is not None:
            servers = replace(servers, secret=secret)
        now = datetime.now()
        folder = make_folder(config.name, config.out, now)
        write_run(folder, config.record(), now)
        display.starting(f"{described(config)}, run folder {folder}")
        for line in filter(None, (left_out(config), *notes)):
            display.note(line)
        if config.host is not None:
            key = write_join_key(folder, servers)
            for line in [*invited(key, servers), *route(config, servers)]:
                display.note(line)
        with copying(folder, config.copy_to, display.note):
            # other hosts may read what the processes are told: not what the launcher alone needs
            told = structs.replace(config, retyped=(), copy_to=None, secret_file=None)
            plan = ProcessPlan(told, folder, listener, servers, time.perf_counter())
            try:
                _supervise(plan, inbox, display, make_engine, cluster)
            except Stopped as stop:
                for lines in (left_in(folder, config), model_left_in(folder, _first(stop))):
                    stop.add(lines)
                raise
            except LaunchError as error:
                ends = command_to_continue(folder, config), model_left_in(folder, _first(error))
                raise RunFailedError("\n".join(filter(None, [str(error), *ends])), folder) from error
            finally:
                shutil.rmtree(folder / INCOMING, ignore_errors=True)  # uploads that were given up
        return folder


def _first(end: BaseException) -> str:
    """Return the first line of a text, which says why the run has ended."""
    return str(end).partition("\n")[0]


def join(joining: JoinRequest, display: ProgressDisplay) -> Path:
    """Add workers of this machine to a running run, and return its directory when they have exited.

    Raises LaunchError and Stopped as `run` does; the run continues without these workers.
    """
    plan = plan_of_join(joining, display.note)
    inbox: Inbox = SimpleQueue()
    with handled(lambda number: inbox.put(Signalled(number))):
        count, folder = len(plan.joining), f", run folder {plan.folder}"
        display.starting(f"{count} worker{'s' * (count > 1)} for the run {joining.run}{folder * (not plan.sees_run)}")
        for line in route(plan.config, plan.servers):
            display.note(line)
        _supervise(plan, inbox, display)
        return plan.folder


def _supervise(
    plan: ProcessPlan,
    inbox: Inbox,
    display: ProgressDisplay,
    make_engine: MakeEngine = LocalEngine,
    cluster: Cluster | None = None,
) -> None:
    with contextlib.ExitStack() as after_output, _forwarding(plan) as forward:
        _supervise_with(plan, inbox, display, make_engine(inbox), cluster, forward, after_output)


@contextlib.contextmanager
def _forwarding(plan: ProcessPlan) -> Iterator[Forward | None]:
    """Yield the way of output to the directory of the run; None where this launcher writes it there itself."""
    if plan.sees_run:
        yield None
        return
    sender, limit_s = OutputSender(plan.servers, plan.config.failure_timeout_s), CLOSE_S
    sender.start()
    try:
        yield sender.add
    except Stopped:
        limit_s = 0.0
        raise
    finally:
        sender.close(limit_s)


def _supervise_with(
    plan: ProcessPlan,
    inbox: Inbox,
    display: ProgressDisplay,
    engine: Engine,
    cluster: Cluster | None,
    forward: Forward | None,
    after_output: contextlib.ExitStack,
) -> None:
    config, folder = plan.config, plan.folder
    elsewhere = LogsElsewhere(folder, plan.numbers_shown) if config.host is not None and not plan.joining else None
    relay = LogRelay(folder, config.output, display, forward, elsewhere)
    remote = RemoteWorkers(plan, _start_agent(config, cluster, inbox, relay), relay.note)
    engine = shard_hosts = ShardHosts(config, folder, engine, inbox, relay.note)
    try:
        plan = shard_hosts.begin(plan, display.note)
        supervisor = Supervisor(plan, engine, relay, inbox, planned(config), remote)
        after_output.callback(supervisor.close)  # once all launchers have ended, no coordinator takes output any more
        supervisor.start()
        if plan.listener is not None and not config.elastic:
            plan.listener.close()  # only worker 0 holds it now: a rendezvous without worker 0 fails immediately
            plan.servers.close()
        display.begin(folder, config)
        relay.start()
        cause = supervisor.wait()
        _report_shared_files(folder, relay)
    finally:
        remote.end()
        if not config.workers:  # those on other hosts may still send a model through the coordinator
            remote.close()
        engine.close()
        remote.close()
        relay.close()
    if cause is not None:
        is_lost = plan.joining and not (cause.reported and cause.of_script)
        raise (WorkersLostError if is_lost else LaunchError)(_text(cause, relay, folder))


def _start_agent(config: RunConfig, cluster: Cluster | None, inbox: Inbox, relay: LogRelay) -> StartAgent:
    """Return what starts agents: a cluster, or else ssh."""
    if cluster is not None:
        return cluster.agents(inbox.put, relay)
    return SshAgents(config.remote_stretto, config.failure_timeout_s, inbox.put, relay).start


def _report_shared_files(folder: Path, relay: LogRelay) -> None:
    """Report files that several workers have written, from the events of the workers."""
    with contextlib.suppress(LogError):
        if (text := several_write(read_events(folder / "events.jsonl"))) is not None:
            relay.note(text)


def _text(cause: Cause, relay: LogRelay, folder: Path) -> str:
    """Return the text of a cause; an error that a process reported is also written to its log file."""
    log = log_of(folder, cause.worker, cause.rank)
    if cause.reported:
        relay.append(cause.worker, cause.rank, f"{cause.headline}\n{cause.details}\n")
    return readable(cause, relay.tail, str(log))
