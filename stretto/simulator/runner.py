"""Runs a simulation and writes its run directory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from torch import nn

from stretto import trainers
from stretto.api import abandon
from stretto.errors import (
    BrokenTransportError,
    LaunchError,
    MemberOutError,
    StaysOutError,
    UnevenLoopsError,
)
from stretto.events import COORDINATOR, Event, of_process
from stretto.faults import plan as faults
from stretto.faults.plan import FaultEvent
from stretto.launcher.script_watch import own_folders
from stretto.launcher.seeding import after_import, seed_libraries
from stretto.launcher.signals import Stopped
from stretto.launcher.worker_main import failure
from stretto.membership.messages import ReadyReport
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RunOverError
from stretto.recipe.layout import whole
from stretto.recipe.recipe import Recipe
from stretto.run_dir import make_folder, write_run
from stretto.simulator.cluster.barriers import SimBarrier, SimBarriers
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.cluster.fault_injector import refuse
from stretto.simulator.cluster.membership import SimCoordinator
from stretto.simulator.cluster.rendezvous import Generations, SimRendezvous
from stretto.simulator.cluster.rpc_server import SimServers
from stretto.simulator.cluster.runtime import Limit, SharedLog, SimRuntime
from stretto.simulator.compute.speed import Pace
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.dataset_cache import DatasetCache
from stretto.simulator.isolation.memory_estimate import MemoryEstimate
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.isolation.script import DiscardedOutput, Program, extend_path
from stretto.simulator.isolation.shared_memory import SharedArrays
from stretto.simulator.isolation.virtual_time import ScriptTime
from stretto.simulator.isolation.written_files import WrittenFiles
from stretto.simulator.layouts.replica import Replica
from stretto.simulator.network.flows import ARRIVAL
from stretto.simulator.network.links import Links
from stretto.strategies.optimizers import Optimizers
from stretto.training.worker_context import WorkerContext, current_context, fields_of
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport
from stretto.transport.rendezvous import ServerRendezvous

PROCESS_FAULTS = ("kill", "pause", "resume")
"""Verbs of faults that affect processes, not links."""
Tick = Callable[[], None]


def simulate(
    simulation: Simulation,
    folder: Path,
    out: TextIO,
    tick: Tick | None = None,
    order: Sequence[int] | None = None,
    err: TextIO | None = None,
) -> Engine:
    """Run a simulation into a run directory; `out` and `err` receive the output of worker 0.

    Workers are created in the given `order`, which has no effect on results.

    Raises LaunchError with the cause when a worker fails, or in a deadlock.
    """
    folder = folder.absolute()
    log = SharedLog(folder / "events.jsonl")
    simulator = Simulator(simulation, folder, log, err)
    try:
        simulator.run(out, tick, order)
    except LaunchError as error:
        log.append(_error_line(error, simulator.engine.failed, simulator.engine.queue.now))
        raise
    except BaseException as error:
        worker = simulator.engine.failed
        now = worker.now() if worker is not None else simulator.engine.queue.now
        log.append(_error_line(error, worker, now))
        raise simulator.explained(error, f"at {now:g} s of virtual time") from None
    finally:
        simulator.shared_arrays.close()
        log.end()
    return simulator.engine


def create_run(simulation: Simulation, out: Path | None) -> Path:
    """Create the run directory."""
    now = datetime.now()
    folder = make_folder(simulation.config.name, out, now)
    write_run(folder, simulation.record(), now)
    return folder


class Simulator:
    """A simulation: the engine, and the context, services and script of each worker."""

    def __init__(
        self, simulation: Simulation, folder: Path | None, log: SharedLog | None, err: TextIO | None = None
    ) -> None:
        config = simulation.config
        self._simulation, self._folder, self._log = simulation, folder, log
        shards = simulation.shards
        links = Links(simulation.network, config.workers, shards, config.ranks)
        self.engine = self.make_engine(links, shards)
        self.program = Program(config.script, config.args, config.seed, config.module)
        self.shared_arrays = SharedArrays()
        self._err = err or sys.stderr
        self._shown: set[str] = set()
        self._memory_estimate = MemoryEstimate(config.workers)
        self.replica = self.make_replica(links)
        self._group = SimGroup(self.engine, links, replica=self.replica)
        self._servers: SimServers | None = None
        self._postponed: list[tuple[float, FaultEvent]] = []
        """Faults of servers that are postponed until the first worker creates them."""
        self._failed_workers: list[tuple[int, int]] = []
        """Failed worker incarnations of which servers are notified when they are created."""
        self._may_have_servers = True
        """True if servers exist or may still be created."""
        self._generations = Generations(self.engine, links, self.replica)
        self._coordinator: SimCoordinator | None = None
        if simulation.workers_can_fail:
            self._coordinator = SimCoordinator(
                self.engine, links, config, self._publish, self._print, self._worker_failed
            )
            self.engine.workers_can_fail = True
        self._barriers = SimBarriers(self.engine, self._returning)
        self.engine.fault_injector.attach(self)
        self._speed = Pace(simulation.speeds, config.workers, config.seed)
        self._limit = Limit(simulation.samples, simulation.time_s, config.workers)

    def run(self, out: TextIO, tick: Tick | None = None, order: Sequence[int] | None = None) -> None:
        """Run all workers until they have ended, then restore the state of this process."""
        dataset_cache = DatasetCache()
        clock = ScriptTime(str(self.program.path), self._script_time, self._script_sleep, self._print_once)
        files = WrittenFiles(own_folders(str(self._folder or "")), self._current_number)
        clock.begin()
        files.begin()
        cancels = trainers.watch(after_import) if self._simulation.config.trainers else []
        try:
            self.engine.run(
                self.run_worker,
                lambda worker: self.make_state(worker, out),
                order,
                tick,
                lambda: self._prepare(dataset_cache),
            )
        finally:
            for cancel in cancels:
                cancel()
            files.end()
            dataset_cache.end()
            clock.end()
            if (text := files.several()) is not None:
                self._print(text)

    def explained(self, error: BaseException, when: str) -> BaseException:
        """Return the error with the number of the worker whose script raised it."""
        worker = self.engine.failed
        if worker is None or isinstance(error, KeyboardInterrupt | Stopped | LaunchError):
            return error
        if isinstance(error, UnevenLoopsError):  # raised at a worker that waits for a worker that left
            return LaunchError(f"the run failed {when}\n{failure(error)}")
        return LaunchError(f"worker {worker.number} failed {when}\n{failure(error)}")

    def _prepare(self, dataset_cache: DatasetCache) -> None:
        dataset_cache.begin()
        torch.set_num_threads(1)
        seed_libraries(self._simulation.config.seed)
        extend_path(self._simulation.config.script, self._simulation.config.module)

    def make_engine(self, links: Links, shards: int) -> Engine:
        """Create the engine."""
        simulation, config = self._simulation, self._simulation.config
        plan = faults.schedule(simulation.faults, config.workers, shards, config.seed)
        return Engine(config.workers, links, simulation.cost_model, plan, simulation.processors, shards)

    def make_replica(self, links: Links) -> Replica:
        """Create the workers as their layout divides them."""
        return self._simulation.replica(self._print_once, links, self._write)

    def make_state(self, worker: Worker, out: TextIO) -> ProcessState:
        """Return the initial process state of a worker."""
        is_shown = worker.number == 0 and self._simulation.config.output == "rank0"
        has_output = is_shown or self._simulation.config.output == "all"
        return self.program.make_state(
            worker, *((out, self._err) if has_output else (DiscardedOutput(), DiscardedOutput()))
        )

    def run_worker(self, worker: Worker) -> None:
        """Run a worker's script."""
        current_context.set(self.context(worker))
        try:
            self.program.run(worker)
        except BaseException as error:
            was_evicted = self._coordinator is not None and isinstance(error, MemberOutError | BrokenTransportError)
            if not worker.has_failed:
                with suppress(Exception):
                    abandon(None if was_evicted else f"{type(error).__name__}: {error}")
            if not was_evicted:
                raise
            self._evict(worker, error)
        else:
            if self._coordinator is not None:
                self._coordinator.worker_finished()

    # --- failures and faults ------------------------------------------------------------------------------------

    @property
    def _required_coordinator(self) -> SimCoordinator:
        assert self._coordinator is not None
        return self._coordinator

    def on_fault(self, time: float, event: FaultEvent) -> None:
        """Record a fault, and reconnect workers after a pause or partition."""
        number = event.numbers[0]
        target = {"worker": number, "server": -1 - number, "coordinator": COORDINATOR}[event.kind]
        if event.verb == "back":
            return
        if event.verb in PROCESS_FAULTS and not self._is_running(event):
            self._note(f"faults: {event.who()} is not there ({event})")
            return
        self._publish({"event": "fault_injected", **of_process(target), **event.words()})
        if event.verb == "kill":
            self._limit.count_failure(time)
        if self._coordinator is not None and event.verb in ("resume", "heal"):
            self.engine.queue.schedule(
                self.engine.queue.now, lambda: self._required_coordinator.reconnect(event.numbers), ARRIVAL
            )

    def _is_running(self, event: FaultEvent) -> bool:
        """True if the target process of a fault runs."""
        number = event.numbers[0]
        if event.kind == "worker":
            return not self.engine.workers[number].has_ended
        if event.kind == "coordinator":
            return self._coordinator is None or not self._coordinator.is_down
        return self._servers is None or number >= self._servers.shards or self._servers.is_running(number)

    def _publish(self, event: Event) -> None:
        now = self.engine.queue.now
        assert self._log is not None
        self._log.append(msgspec.json.encode({**event, "t": round(now, 6), "at": round(now, 6)}) + b"\n")

    def _write(self, kind: str, **fields: object) -> None:
        self._publish({"event": kind, **of_process(0), **fields})

    def _note(self, text: str, worker: int = 0) -> None:
        self._publish({"event": "warning", **of_process(worker), "text": text})

    def resolve(self, time: float, event: FaultEvent) -> FaultEvent | None:
        """Resolve a fault of a server that was drawn before the script's recipe decided the number of servers.

        Return None to postpone it until the first worker creates the servers.
        """
        if event.kind == "server" and self._servers is None and self._may_have_servers:
            self._postponed.append((time, event))
            return None
        named_workers = (number for fault in self._simulation.faults for number in faults.victims_of(fault)[1])
        if event.kind != "server" or self._servers is None or event.numbers[0] in named_workers:
            return event
        return replace(event, numbers=(event.numbers[0] % self._servers.shards,))

    def apply_fault(self, time: float, event: FaultEvent) -> None:
        """Kill, pause or resume a process."""
        number, back_after_s = event.numbers[0], event.back_after_s
        if event.kind == "server":
            self._apply_to_server(time, event, number)
        elif event.verb in ("pause", "resume"):
            self._pause_coordinator(event.verb == "pause")
        elif self._coordinator is None:
            refuse(time, event)
        elif event.kind == "coordinator" and event.verb == "kill":
            self._coordinator.coordinator_killed(back_after_s)
        elif event.kind == "worker" and event.verb == "kill":
            self._kill(self.engine.workers[number], back_after_s)

    def _kill(self, worker: Worker, back_after_s: float | None) -> None:
        if not worker.has_ended:
            self.engine.kill(worker)
            self._disconnect(worker)
            self._required_coordinator.worker_killed(worker, back_after_s)

    def _pause_coordinator(self, stops: bool) -> None:
        """Pause or resume the coordinator; without effect if workers cannot fail."""
        if self._coordinator is not None and stops:
            self._coordinator.coordinator_paused()
        elif self._coordinator is not None:
            self._coordinator.coordinator_resumed()

    def _apply_to_server(self, time: float, event: FaultEvent, number: int) -> None:
        servers = self._servers
        if servers is None or number >= servers.shards:
            refuse(time, event, "the recipe of this run has no such server")
        elif event.verb == "pause":
            servers.shard(number).pause()
        elif event.verb == "resume":
            servers.shard(number).resume()
        elif event.verb == "kill" and self._coordinator is None:
            refuse(time, event)
        elif event.verb == "kill" and (incarnation := servers.fail_shard(number)) is not None:
            restart = functools.partial(servers.restart_shard, number)
            self._required_coordinator.restart_service(-1 - number, incarnation, event.back_after_s, restart)

    def _evict(self, worker: Worker, error: BaseException) -> None:
        """End a worker that is no longer a member."""
        worker.has_failed = True
        self._note(f"worker {worker.number} stops: {error}", worker.number)
        self._disconnect(worker)
        self._required_coordinator.worker_evicted(worker, returns=not isinstance(error, StaysOutError))

    def _disconnect(self, worker: Worker) -> None:
        """Drop the messages and collectives of a worker that has failed."""
        self.engine.network.disconnect(worker.number)
        self._generations.worker_failed(worker.number)
        if self._servers is not None:
            self._servers.drop_replies(worker.number)

    def _worker_failed(self, worker: int, incarnation: int) -> None:
        if self._servers is not None:
            self._servers.worker_failed(worker, incarnation)
        else:
            self._failed_workers.append((worker, incarnation))

    def context(self, worker: Worker) -> WorkerContext:
        """Return a worker's context."""
        config = self._simulation.config
        runtime = self.runtime(worker)
        return SimWorkerContext(
            **fields_of(config) | {"layout": str(whole())},
            worker=worker.number,
            run=self._folder,
            seed=config.seed,
            runtime=runtime,
            incarnation=worker.incarnation,
            barrier=SimBarrier(self._barriers, worker, config.timeout_s) if config.workers > 1 else None,
            simulator=self,
        )

    def _returning(self) -> Collection[int]:
        """Return the workers that will be restarted."""
        return self._coordinator.returning if self._coordinator is not None else ()

    def runtime(self, worker: Worker) -> SimRuntime:
        """Create a worker's runtime."""
        workers = self._simulation.config.workers
        return SimRuntime(worker, self._speed, self._limit, self._log, self.on_distribute, workers, self.replica)

    def on_distribute(
        self, worker: Worker, model: nn.Module, optimizers: Optimizers, loader: Any, recipe: Recipe | None
    ) -> None:
        """Handle a script's call of `distribute`: share the data that all workers load, and check memory."""
        self.replica.follow(worker, model, optimizers, recipe)
        if processes := getattr(loader, "num_workers", 0):
            self._print_once(f"the loader's {processes} processes are not started: batches are loaded in this process")
        if hasattr(loader, "dataset"):
            self.shared_arrays.loader(loader)
        self.shared_arrays.names(vars(self.program.mains[worker.number]))
        self.shared_arrays.trim()
        self._memory_estimate.worker_started(model)

    def _print_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"stretto: {text}", file=self._err, flush=True)

    def _script_time(self) -> float | None:
        worker = self.engine.current_worker
        return worker.read_clock(worker.now()) if worker is not None else None

    def _current_number(self) -> int | None:
        worker = self.engine.current_worker
        return worker.number if worker is not None else None

    def _script_sleep(self, seconds: float) -> None:
        if self.engine.current_worker is not None:
            self.engine.current_worker.sleep(seconds)

    def transport(self, worker: int, recipe: Recipe | None) -> Transport:
        """Create a worker's transport."""
        sim_worker, limit_s = self.engine.workers[worker], self._simulation.config.timeout_s
        if recipe is None or not recipe.shards:
            self._may_have_servers = False
            self._catch_up()
        if self._coordinator is not None and recipe is not None:
            return self._elastic_transport(sim_worker, recipe)
        if recipe is None or not recipe.shards:
            return self._group.transport(sim_worker, limit_s)
        return self._server(recipe).client(sim_worker)

    def _server(self, recipe: Recipe) -> SimServers:
        config = self._simulation.config
        if self._servers is None:
            can_fail = self._coordinator is not None
            self._servers = SimServers(
                self.engine, recipe.shards, config.on_nan, not config.plain, config.timeout_s, can_fail
            )
            if self._coordinator is not None:
                self._coordinator.add_service(self._servers.dispatcher)
            for worker, incarnation in self._failed_workers:
                self._servers.worker_failed(worker, incarnation)
            self._catch_up()
        return self._servers

    def _catch_up(self) -> None:
        """Apply the postponed faults of servers, once it is known if servers exist."""
        postponed, self._postponed = self._postponed, []
        for time, event in postponed:
            self.engine.fault_injector.apply(time, event)

    def _elastic_transport(self, worker: Worker, recipe: Recipe) -> Transport:
        """Create a transport for workers that can fail: that of a live worker's context, from simulated parts."""
        self._required_coordinator.asynchronous = recipe.asynchronous
        membership = self._required_coordinator.client(worker)
        if not recipe.shards:
            rendezvous = SimRendezvous(self._generations, worker, self._simulation.config.timeout_s)
            return ElasticTransport(worker.number, membership, rendezvous)
        if not recipe.asynchronous:
            return ElasticTransport(worker.number, membership, ServerRendezvous(self._server(recipe).client(worker)))
        membership.await_generation(ReadyReport(0))
        client = self._server(recipe).client(worker, worker.incarnation)
        client.join_coordinator(membership)
        if worker.incarnation:
            self._join(worker, client)
        return client

    def _join(self, worker: Worker, client: ParameterServerClient) -> None:
        """Join a run in progress; end the worker if the run is finished."""
        try:
            client.join()
        except RunOverError:
            self._required_coordinator.joined_finished_run(worker)
            raise SystemExit(0) from None


@dataclass(frozen=True)
class SimWorkerContext(WorkerContext):
    """The context of a simulated worker."""

    simulator: Simulator | None = None

    def transport_for(self, recipe: Recipe | None, device: torch.device) -> Transport:
        """Create the simulated transport of the recipe."""
        assert self.simulator is not None
        assert isinstance(self.runtime, SimRuntime)
        self.runtime.asynchronous = recipe is not None and recipe.asynchronous
        return self.simulator.transport(self.worker, recipe)


def _error_line(error: BaseException, worker: Worker | None, t: float) -> bytes:
    fields = {
        "kind": type(error).__name__,
        "text": str(error),
        "traceback": "",
        "consequence": False,
        "at": round(t, 6),
    }
    return _line("error", worker.number if worker is not None else 0, t, **fields)


def _line(kind: str, worker: int, t: float, /, **carries: object) -> bytes:
    return msgspec.json.encode({"event": kind, "t": round(t, 6), **of_process(worker), **carries}) + b"\n"
