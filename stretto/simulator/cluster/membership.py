"""Simulated membership: the live coordinator in virtual time, for simulations in which workers can fail.

Messages between workers and the coordinator take the network's latency, and are lost across a partition; unanswered
messages are sent again with the next heartbeat, as live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stretto.errors import LaunchError, MemberOutError, UnevenLoopsError, explain
from stretto.events import COORDINATOR, Event, of_process
from stretto.launcher.config import is_asynchronous
from stretto.launcher.supervised import pause_s
from stretto.membership.client_state import ALONE, CoordinatorConnection
from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import rules_of
from stretto.membership.messages import (
    Continue,
    CoordinatorMessage,
    GenerationView,
    ReadyReport,
    WorkerMessage,
)
from stretto.run_config import RunConfig
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.flows import ARRIVAL
from stretto.simulator.network.links import Links

EXIT_NOTICE_S = 0.01
"""Seconds from a process's exit until the coordinator is notified, as measured live on one machine."""
MAX_HEARTBEAT_S = 1.0
"""Longest interval of heartbeats in seconds; there are also at least five per failure timeout."""
COORDINATOR_ENDPOINT = -1
"""Endpoint of the coordinator, which runs beside the first shard."""


def heartbeat_s(failure_timeout_s: float) -> float:
    """Return the seconds between two heartbeats of a worker."""
    return min(failure_timeout_s / 5, MAX_HEARTBEAT_S)


class SimMembershipClient(CoordinatorConnection):
    """A worker's membership client: the counterpart of the live `stretto.membership.client`."""

    def __init__(self, coordinator: SimCoordinator, worker: Worker) -> None:
        self._coordinator, self.worker, self.incarnation = coordinator, worker, worker.incarnation
        super().__init__(worker.number, worker.incarnation)
        self.reachable_at = worker.now()
        """Virtual time at which the coordinator was last reachable."""

    def now(self) -> float:
        """Return the worker's virtual time."""
        return self.worker.now()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def wake(self, with_heartbeat: bool = False) -> None:
        """Send all messages that the coordinator has not answered yet."""
        for message in self.due_messages(with_heartbeat, self._coordinator.now):
            self._coordinator.send(self, message)

    def receive(self, message: CoordinatorMessage) -> None:
        """Process a message of the coordinator."""
        if self.state.receive(message):
            self.wake(with_heartbeat=self.pause_requested)
        self.worker.wake()

    def _pause(self, report: ReadyReport) -> GenerationView | Continue:
        state = self.state
        state.pause(report)
        self.wake()
        self.worker.wait_until(
            lambda: state.reply is not None or state.evicted is not None, lambda: "the coordinator's next generation"
        )
        if state.reply is None:
            raise MemberOutError(f"worker {self.worker.number} is no longer a member: {state.evicted}")
        return state.reply


class ServiceProcess(Protocol):
    """A service that runs in the coordinator's process."""

    def fail(self) -> None: ...
    def restart(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class SimCoordinator:
    """The coordinator of a simulation, with the launcher's part: it notices failed workers and restarts them.

    `publish` writes an event; `notify` shows a line to the user; `on_failure` is called with each failed incarnation
    where training is `asynchronous`, which the first script decides if the configuration names no recipe.
    """

    def __init__(
        self,
        engine: Engine,
        links: Links,
        config: RunConfig,
        publish: Callable[[Event], None],
        notify: Callable[[str], None],
        on_failure: Callable[[int, int], None],
    ) -> None:
        self._engine, self._links, self._config = engine, links, config
        self._publish, self._notify, self._on_failure = publish, notify, on_failure
        self.asynchronous = is_asynchronous(config)
        """True if the recipe is asynchronous."""
        self._membership: MembershipCoordinator | None = None
        self._records: list[bytes] = []
        self._clients: dict[int, SimMembershipClient] = {}
        self._exits: dict[int, tuple[int, str, bool]] = {}
        """Exits that the coordinator was notified of, by worker: incarnation, reason, and if a restart follows."""
        self._unnoticed_exits: set[int] = set()
        """Workers whose exit the launcher has not noticed yet."""
        self._restart_when_noticed: set[int] = set()
        """Workers to restart as soon as the launcher notices their exit."""
        self._restarting: set[int] = set()
        self.is_down = False
        """True if the coordinator's process has failed and is not restarted yet."""
        self._paused_at: float | None = None
        """Virtual time since which the coordinator is paused; None if it runs."""
        self._inbox: list[Callable[[], None]] = []
        """Messages that wait until the coordinator resumes, or until the recipe is known."""
        self._incarnation = 0
        """Incarnation of the coordinator's process."""
        self._tick_s, self._heartbeat_s = min(config.failure_timeout_s / 10, 0.2), heartbeat_s(config.failure_timeout_s)
        self._next_heartbeat = 0.0
        self._services: list[ServiceProcess] = []
        """Services that run in the coordinator's process."""
        self._run_finished = False
        """True if a worker has finished the run, after which no worker is restarted."""
        engine.attach(self)
        engine.queue.schedule(self._tick_s, self._tick, ARRIVAL)

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._engine.queue.now

    @property
    def returning(self) -> set[int]:
        """The workers that will be restarted."""
        return self._restarting

    def add_service(self, service: ServiceProcess) -> None:
        """Run a service in the coordinator's process: it fails, pauses and restarts with it."""
        self._services.append(service)
        if self.is_down:
            service.fail()
        elif self._paused_at is not None:
            service.pause()

    def client(self, worker: Worker) -> SimMembershipClient:
        """Return a new membership client of a worker."""
        client = self._clients[worker.number] = SimMembershipClient(self, worker)
        self._process_inbox()
        return client

    # --- the launcher's part ------------------------------------------------------------------------------------

    def worker_killed(self, worker: Worker, back_after_s: float | None) -> None:
        """Handle a killed worker process, which is restarted unless `back_after_s` is None."""
        self._process_exited(worker, "killed by SIGKILL", back_after_s)

    def worker_evicted(self, worker: Worker, returns: bool) -> None:
        """Handle a worker that stopped since it is no longer a member, and restart it if it `returns`."""
        why = "was declared failed and stopped" if returns else "it cannot rejoin"
        self._process_exited(worker, why, pause_s(worker.incarnation) if returns else None)

    def joined_finished_run(self, worker: Worker) -> None:
        """Record that a restarted worker has left, since the run was finished before it joined."""
        about = {"event": "membership", **of_process(worker.number), "generation": self._active_membership.generation}
        self._publish({**about, "what": "left", "incarnation": worker.incarnation, "why": "the run is over"})

    def worker_finished(self) -> None:
        """Record that a worker has finished the run."""
        self._run_finished = True

    def restart_pending(self) -> bool:
        """Return True if a restart is pending while no worker is running."""
        is_pending = bool(self._unnoticed_exits or self._restarting or self._inbox) or self.is_down
        return not self._run_finished and is_pending

    def _restart_worker(self, number: int) -> None:
        """Restart a worker, unless another worker has finished the run."""
        if number in self._unnoticed_exits:
            self._restart_when_noticed.add(number)
        elif number in self._restarting and not self._run_finished:
            self._restarting.discard(number)
            self._engine.restart(number)

    def coordinator_killed(self, back_after_s: float | None) -> None:
        """Handle a killed coordinator process, which is restored from its write-ahead log."""
        if self.is_down:
            return
        self.is_down, self._paused_at = True, None
        self._inbox.clear()
        for service in self._services:
            service.fail()
        self.restart_service(COORDINATOR, self._incarnation, back_after_s, self._restore)

    def coordinator_paused(self) -> None:
        """Pause the coordinator: messages to it wait."""
        if not self.is_down and self._paused_at is None:
            self._paused_at = self.now
            for service in self._services:
                service.pause()

    def coordinator_resumed(self) -> None:
        """Resume the coordinator: it processes the waiting messages; its pause does not count as silence of workers."""
        if self._paused_at is None:
            return
        paused_s, self._paused_at = self.now - self._paused_at, None
        for service in self._services:
            service.resume()
        if self._membership is not None:
            self._membership.extend_timeouts(paused_s)
        self._process_inbox()

    def _process_exited(self, worker: Worker, why: str, back_after_s: float | None) -> None:
        back_after_s = None if self._run_finished else back_after_s
        returns = back_after_s is not None
        self._unnoticed_exits.add(worker.number)
        if back_after_s is not None:
            self._restarting.add(worker.number)
            self._engine.queue.schedule(self.now + back_after_s, lambda: self._restart_worker(worker.number), ARRIVAL)
        noticed_at = self.now + EXIT_NOTICE_S
        self._engine.queue.schedule(noticed_at, lambda: self._report_exit(worker, why, returns), ARRIVAL, worker.number)

    def _report_exit(self, worker: Worker, why: str, returns: bool) -> None:
        number = worker.number
        self._unnoticed_exits.discard(number)
        self._exits[number] = worker.incarnation, why, returns
        self._deliver_exit(number)
        if number in self._restart_when_noticed:
            self._restart_when_noticed.discard(number)
            self._restart_worker(number)

    def _deliver_exit(self, number: int) -> None:
        incarnation, why, returns = self._exits[number]
        self._deliver(
            lambda: self._dispatch(self._active_membership.process_exited(number, incarnation, self.now, returns, why))
        )

    def _restore(self) -> None:
        self.is_down, self._incarnation = False, self._incarnation + 1
        for service in self._services:
            service.restart()
        if self._records:
            self._membership = MembershipCoordinator.restored(self._records, self.now)
        for number in self._exits:
            self._deliver_exit(number)
        for client in self._reachable_clients():
            client.wake(with_heartbeat=True)

    def restart_service(
        self, number: int, incarnation: int, back_after_s: float | None, callback: Callable[[], object]
    ) -> None:
        """Record that a service process was killed, and call a function when its next incarnation starts."""
        about = {"event": "membership", **of_process(number), "generation": 0}

        def start() -> None:
            self._publish({**about, "what": "joined", "incarnation": incarnation + 1, "why": "started again"})
            callback()

        self._publish({**about, "what": "failed", "incarnation": incarnation, "why": "killed by SIGKILL"})
        delay_s = pause_s(incarnation) if back_after_s is None else back_after_s
        self._engine.queue.schedule(self.now + delay_s, start, ARRIVAL)

    def reconnect(self, numbers: Sequence[int]) -> None:
        """Send heartbeats of workers that are reachable again."""
        for number in numbers:
            if (client := self._clients.get(number)) is not None and self._is_reachable(client):
                client.wake(with_heartbeat=True)

    # --- the coordinator ----------------------------------------------------------------------------------------

    @property
    def _active_membership(self) -> MembershipCoordinator:
        if self._membership is None:
            config = self._config
            self._membership = MembershipCoordinator(rules_of(config, self.asynchronous))
        return self._membership

    def _deliver(self, message: Callable[[], None]) -> None:
        """Queue a message to the coordinator, unless its process is down."""
        if not self.is_down:
            self._inbox.append(message)
            self._process_inbox()

    def _process_inbox(self) -> None:
        """Process the queued messages, unless the coordinator is paused or the recipe is still unknown."""
        if self._paused_at is None and not self._recipe_unknown():
            messages, self._inbox = self._inbox, []
            for message in messages:
                message()

    def _recipe_unknown(self) -> bool:
        """True if a script may still name the recipe, which decides how failures are handled."""
        running = any(not worker.has_ended for worker in self._engine.workers)
        return self._config.recipe is None and not self._clients and (running or bool(self._restarting))

    def send(self, client: SimMembershipClient, message: WorkerMessage) -> None:
        """Send a message of a worker to the coordinator."""
        if self._is_reachable(client):
            number, incarnation = client.worker.number, client.incarnation
            self._after_latency(client, lambda: self._deliver(lambda: self._receive(number, incarnation, message)))

    def _receive(self, worker: int, incarnation: int, message: WorkerMessage) -> None:
        self._dispatch(self._active_membership.receive(worker, incarnation, message, self.now))

    def _tick(self) -> None:
        """Send due heartbeats of reachable workers, and let the coordinator check failure timeouts."""
        self._engine.queue.schedule(self.now + self._tick_s, self._tick, ARRIVAL)
        if self.now >= self._next_heartbeat:
            self._next_heartbeat = self.now + self._heartbeat_s
            for client in self._reachable_clients():
                client.wake(with_heartbeat=True)
        is_running = not self.is_down and self._paused_at is None
        for client in self._clients.values():
            self._abort_if_isolated(client, is_running)
        if is_running and self._membership is not None:
            self._dispatch(self._membership.tick(self.now))

    def _abort_if_isolated(self, client: SimMembershipClient, is_running: bool) -> None:
        """Abort the generation of a sole member that cannot reach the coordinator, before others form the next one."""
        if is_running and self._is_reachable(client, awake=False):
            client.reachable_at = self.now
        silent_s, alone = self.now - client.reachable_at, client.state.is_alone and not self.asynchronous
        if alone and not client.worker.has_failed and silent_s > ALONE * self._config.failure_timeout_s:
            client.abort(client.state.generation, "the coordinator is unreachable")

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        membership = self._active_membership
        self._records += membership.records()
        for message in outgoing:
            client = self._clients.get(message.worker)
            is_current = client is not None and client.incarnation == message.incarnation
            if client is not None and is_current and self._is_reachable(client, awake=False):
                self._after_latency(client, self._delivery(client, message.message))
        notices, events = membership.announcements.take()
        for notice in notices:
            self._notify(notice)
        for event in events:
            self._publish(event)
            if self.asynchronous and event["what"] == "failed":
                self._on_failure(event["worker"], event["incarnation"])
        if membership.uneven is not None:
            raise UnevenLoopsError(membership.uneven)
        if membership.phase == "stopped":
            raise self._too_few_error()

    def _delivery(self, client: SimMembershipClient, message: CoordinatorMessage) -> Callable[[], None]:
        def receive() -> None:
            awake = self._engine.fault_injector.next_running_time(client.worker.number, self.now)
            if awake > self.now:
                self._engine.queue.schedule(awake, receive, ARRIVAL, client.worker.number)
            elif self._is_reachable(client):
                client.receive(message)

        return receive

    def _too_few_error(self) -> LaunchError:
        running = sum(not worker.has_ended for worker in self._engine.workers)
        problem = f"the run cannot continue at {self.now:g} s of virtual time: too few workers are left"
        min_workers = max(self._config.min_workers, 1)
        to_type = '--faults "kill worker 1 at 3s, back after 2s"' + " or --min-workers 1" * (min_workers > 1)
        return LaunchError(
            explain(
                problem, got=f"{running} of {self._config.workers}", expected=f"at least {min_workers}", to_type=to_type
            )
        )

    # --- delivery of messages -----------------------------------------------------------------------------------

    def _reachable_clients(self) -> list[SimMembershipClient]:
        return [client for client in self._clients.values() if self._is_reachable(client)]

    def _is_reachable(self, client: SimMembershipClient, awake: bool = True) -> bool:
        """True if a worker can send messages now (with `awake` false: can receive them)."""
        if client.worker.has_failed or self._engine.network.is_partitioned(client.worker.number):
            return False
        return not awake or self._engine.fault_injector.next_running_time(client.worker.number, self.now) <= self.now

    def _after_latency(self, client: SimMembershipClient, callback: Callable[[], None]) -> None:
        """Call a function after the network's latency, which is 0 before the first generation, when the run starts."""
        number, is_first = client.worker.number, not client.incarnation and not client.state.generation
        latency_s = 0.0 if is_first else self._links.path(number, COORDINATOR_ENDPOINT)[1]
        self._engine.queue.schedule(self.now + latency_s, callback, ARRIVAL, number)
