"""A simulation from its order to its run folder."""

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

from stretto.api import abandon
from stretto.errors import BrokenTransportError, LaunchError, MemberOutError, StaysOutError, TransportError
from stretto.events import Event
from stretto.faults import plan as faults
from stretto.faults.plan import Happening
from stretto.launcher.seeding import seed_libraries
from stretto.launcher.supervisor import Stopped
from stretto.launcher.worker_main import failure
from stretto.membership.coordinator import COORDINATOR
from stretto.membership.messages import ReadyReport
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.messages import OVER
from stretto.recipe.recipe import Recipe
from stretto.run_dir import make_folder, write_run
from stretto.simulator.cluster.barriers import SimBarrier, SimBarriers
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.cluster.fault_injector import refuse
from stretto.simulator.cluster.membership import SimCoordinator
from stretto.simulator.cluster.rendezvous import Generations, TableFormer
from stretto.simulator.cluster.rpc_server import SimServers
from stretto.simulator.cluster.runtime import Limit, SharedLog, SimRuntime
from stretto.simulator.compute.speed import Pace
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.dataset_cache import ReadOnce
from stretto.simulator.isolation.memory_estimate import Forecast
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.isolation.script import Nowhere, Program, importable
from stretto.simulator.isolation.shared_memory import SharedArrays
from stretto.simulator.isolation.virtual_time import ScriptTime
from stretto.simulator.network.flows import ARRIVE
from stretto.simulator.network.topology import Links
from stretto.training.worker_context import WorkerContext, given_seat
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport
from stretto.transport.rendezvous import ServerRendezvous

STRIKES = ("kill", "pause", "go_on")
"""What is done to processes, and not to links."""
Ticked = Callable[[], None]


def simulate(
    simulation: Simulation,
    folder: Path,
    out: TextIO,
    tick: Ticked | None = None,
    order: Sequence[int] | None = None,
    err: TextIO | None = None,
) -> Engine:
    """Run the simulation into a run folder; `out` and `err` take what worker 0 says.

    Workers are made in the `order` given.

    Raises LaunchError with the cause when a worker fails, or nothing can happen any more.
    """
    folder = folder.absolute()
    log = SharedLog(folder / "events.jsonl")
    cast = Simulator(simulation, folder, log, err)
    try:
        cast.run(out, tick, order)
    except LaunchError as error:
        log.append(_error_line(error, cast.world.failed, cast.world.queue.now))
        raise
    except BaseException as error:
        worker = cast.world.failed
        now = worker.now() if worker is not None else cast.world.queue.now
        log.append(_error_line(error, worker, now))
        raise cast.told(error, f"at {now:g} s of virtual time") from None
    finally:
        cast.commons.close()
        log.end()
    return cast.world


def begin(simulation: Simulation, out: Path | None) -> Path:
    """Make the run folder."""
    now = datetime.now()
    folder = make_folder(simulation.order.name, out, now)
    write_run(folder, simulation.asked(), now)
    return folder


class Simulator:
    """The workers of a simulation, each with its seat and its script."""

    def __init__(
        self, simulation: Simulation, folder: Path | None, log: SharedLog | None, err: TextIO | None = None
    ) -> None:
        order = simulation.order
        self._simulation, self._folder, self._log = simulation, folder, log
        shards = simulation.shards
        links = Links(simulation.network, order.workers, shards)
        self.world = self.make_world(links, shards)
        self.program = Program(order.script, order.args, order.seed, order.module)
        self.commons = SharedArrays()
        self._err = err or sys.stderr
        self._said: set[str] = set()
        self._forecast = Forecast(order.workers)
        self._table = SimGroup(self.world, links)
        self._offices: SimServers | None = None
        self._early: list[tuple[float, Happening]] = []
        """What happens to a server before there is one."""
        self._buried: list[tuple[int, int]] = []
        """Which lives were over before there was one."""
        self._is_served = True
        """Whether there is a server, or may be one yet."""
        self._generations = Generations(self.world, links)
        self._members: SimCoordinator | None = None
        self.world.outages.tell = self._happens
        if simulation.is_mortal:
            self._members = SimCoordinator(self.world, links, order, self._publish, self._say, self._bury)
            self.world.is_mortal = True
        self._board = SimBarriers(self.world, self._returning)
        self.world.outages.settle, self.world.outages.strike = self._settled, self._struck
        self._speed = Pace(simulation.speeds, order.workers, order.seed)
        self._limit = Limit(simulation.samples, simulation.time_s, order.workers)

    def run(self, out: TextIO, tick: Ticked | None = None, order: Sequence[int] | None = None) -> None:
        """Let all live until they have come to their end. The process is as it was before, when they have."""
        readers = ReadOnce()
        clock = ScriptTime(str(self.program.path), self._script_time, self._script_sleeps, self._say_once)
        clock.begin()
        try:
            self.world.run(self.live, lambda one: self.own(one, out), order, tick, lambda: self._prepare(readers))
        finally:
            readers.end()
            clock.end()

    def told(self, error: BaseException, when: str) -> BaseException:
        """The error as a person reads it: which worker's script it is of."""
        worker = self.world.failed
        if worker is None or isinstance(error, KeyboardInterrupt | Stopped | LaunchError):
            return error
        return LaunchError(f"worker {worker.number} failed {when}\n{failure(error)}")

    def _prepare(self, readers: ReadOnce) -> None:
        readers.begin()
        torch.set_num_threads(1)
        seed_libraries(self._simulation.order.seed)
        importable(self._simulation.order.script, self._simulation.order.module)

    def make_world(self, links: Links, shards: int) -> Engine:
        """The world they live in."""
        one, order = self._simulation, self._simulation.order
        plan = faults.schedule(one.faults, order.workers, shards, order.seed)
        return Engine(order.workers, links, one.tariff, plan, one.processors, shards)

    def own(self, worker: Worker, out: TextIO) -> ProcessState:
        """What a worker has for itself."""
        shown = worker.number == 0 and self._simulation.order.output == "rank0"
        heard = shown or self._simulation.order.output == "all"
        return self.program.own(worker, *((out, self._err) if heard else (Nowhere(), Nowhere())))

    def live(self, worker: Worker) -> None:
        """A worker's life."""
        given_seat.set(self.seat(worker))
        try:
            self.program.live(worker)
        except BaseException as error:
            is_out = self._members is not None and isinstance(error, MemberOutError | BrokenTransportError)
            if not worker.is_dead:
                with suppress(Exception):
                    abandon()
            if not is_out:
                raise
            self._stop(worker, error)
        else:
            if self._members is not None:
                self._members.ended()

    # --- who may die --------------------------------------------------------------------------------------------

    @property
    def _mortals(self) -> SimCoordinator:
        assert self._members is not None
        return self._members

    def _happens(self, time: float, happening: Happening) -> None:
        """Write down what goes wrong, and who can speak again."""
        number = happening.numbers[0]
        who = {"worker": number, "server": -1 - number, "coordinator": COORDINATOR}[happening.kind]
        if happening.verb == "back":
            return
        if happening.verb in STRIKES and not self._is_there(happening):
            self._note(f"faults: {happening.who()} is not there ({happening})")
            return
        self._publish({"event": "fault_injected", "worker": who, **happening.words()})
        if happening.verb == "kill":
            self._limit.died(time)
        if self._members is not None and happening.verb in ("go_on", "heal"):
            self.world.queue.at(self.world.queue.now, lambda: self._mortals.again(happening.numbers), ARRIVE)

    def _is_there(self, happening: Happening) -> bool:
        """Whether there is a process that can be struck."""
        number = happening.numbers[0]
        if happening.kind == "worker":
            return not self.world.workers[number].is_over
        if happening.kind == "coordinator":
            return self._members is None or not self._members.is_away
        return self._offices is None or number >= self._offices.shards or self._offices.is_there(number)

    def _publish(self, event: Event) -> None:
        now = self.world.queue.now
        assert self._log is not None
        self._log.append(msgspec.json.encode({**event, "t": round(now, 6), "at": round(now, 6)}) + b"\n")

    def _note(self, text: str, worker: int = 0) -> None:
        self._publish({"event": "warning", "worker": worker, "text": text})

    def _settled(self, time: float, happening: Happening) -> Happening | None:
        """A server may have been drawn when nobody knew how many the script's recipe has.

        What befalls one before the first worker has asked for it does so then.
        """
        if happening.kind == "server" and self._offices is None and self._is_served:
            self._early.append((time, happening))
            return None
        named = (number for fault in self._simulation.faults for number in faults.aim(fault)[1])
        if happening.kind != "server" or self._offices is None or happening.numbers[0] in named:
            return happening
        return replace(happening, numbers=(happening.numbers[0] % self._offices.shards,))

    def _struck(self, time: float, happening: Happening) -> None:
        """A process is killed or stopped, or goes on."""
        number, back_after_s = happening.numbers[0], happening.back_after_s
        if happening.kind == "server":
            self._strike_server(time, happening, number)
        elif happening.verb in ("pause", "go_on"):
            self._pause_coordinator(happening.verb == "pause")
        elif self._members is None:
            refuse(time, happening)
        elif happening.kind == "coordinator" and happening.verb == "kill":
            self._members.coordinator_killed(back_after_s)
        elif happening.kind == "worker" and happening.verb == "kill":
            self._kill(self.world.workers[number], back_after_s)

    def _kill(self, worker: Worker, back_after_s: float | None) -> None:
        if not worker.is_over:
            self.world.kill(worker)
            self._lose(worker)
            self._mortals.killed(worker, back_after_s)

    def _pause_coordinator(self, stops: bool) -> None:
        """It is not missed where nobody dies."""
        if self._members is not None and stops:
            self._members.coordinator_stops()
        elif self._members is not None:
            self._members.coordinator_goes_on()

    def _strike_server(self, time: float, happening: Happening, number: int) -> None:
        offices = self._offices
        if offices is None or number >= offices.shards:
            refuse(time, happening, "the recipe of this run has no such server")
        elif happening.verb == "pause":
            offices.server_stops(number)
        elif happening.verb == "go_on":
            offices.server_goes_on(number)
        elif happening.verb == "kill" and self._members is None:
            refuse(time, happening)
        elif happening.verb == "kill" and (life := offices.server_lost(number)) is not None:
            back = functools.partial(offices.server_back, number)
            self._mortals.begin_again(-1 - number, life, happening.back_after_s, back)

    def _stop(self, worker: Worker, error: BaseException) -> None:
        """A worker has found out that it is no member any more."""
        worker.is_dead = True
        self._note(f"worker {worker.number} stops: {error}", worker.number)
        self._lose(worker)
        self._mortals.stopped(worker, returns=not isinstance(error, StaysOutError))

    def _lose(self, worker: Worker) -> None:
        """What a worker that is dead had to do with others is over."""
        self.world.net.leave(worker.number)
        self._generations.lose(worker.number)
        if self._offices is not None:
            self._offices.lose(worker.number)

    def _bury(self, worker: int, life: int) -> None:
        if self._offices is not None:
            self._offices.gone(worker, life)
        else:
            self._buried.append((worker, life))

    def seat(self, worker: Worker) -> WorkerContext:
        """A worker's place."""
        order = self._simulation.order
        around = self.around(worker)
        return SimSeat(
            worker=worker.number,
            workers=order.workers,
            recipe=order.recipe,
            run=self._folder,
            seed=order.seed,
            single_process=order.single_process,
            global_batch_of=order.global_batch_of,
            split=order.global_batch == "split",
            lr_factor=order.lr_factor,
            keep_states=order.keep_states,
            timeout_s=order.timeout_s,
            around=around,
            on_nan=order.on_nan,
            life=worker.life,
            rule=order.batch,
            barrier=SimBarrier(self._board, worker, order.timeout_s) if order.workers > 1 else None,
            cast=self,
        )

    def _returning(self) -> Collection[int]:
        """The workers that are started again."""
        return self._members.returning if self._members is not None else ()

    def around(self, worker: Worker) -> SimRuntime:
        """A worker's surroundings."""
        workers = self._simulation.order.workers
        return SimRuntime(worker, self._speed, self._limit, self._log, self.begins, workers)

    def begins(self, worker: Worker, model: nn.Module, loader: Any) -> None:
        """A script has said what it trains on what: what all have alike is kept once."""
        if processes := getattr(loader, "num_workers", 0):
            self._say_once(f"the loader's {processes} processes are left out: batches are made in this one")
        if hasattr(loader, "dataset"):
            self.commons.loader(loader)
        self.commons.names(vars(self.program.mains[worker.number]))
        self.commons.tidy()
        self._forecast.begun(model)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _say(self, text: str) -> None:
        print(f"stretto: {text}", file=self._err, flush=True)

    def _script_time(self) -> float | None:
        worker = self.world.now_on
        return worker.read_clock(worker.now()) if worker is not None else None

    def _script_sleeps(self, seconds: float) -> None:
        if self.world.now_on is not None:
            self.world.now_on.sleep(seconds)

    def wire(self, worker: int, recipe: Recipe | None) -> Transport:
        """A worker's wire."""
        one, limit_s = self.world.workers[worker], self._simulation.order.timeout_s
        if recipe is None or not recipe.shards:
            self._is_served = False
            self._catch_up()
        if self._members is not None and recipe is not None:
            return self._enduring(one, recipe)
        if recipe is None or not recipe.shards:
            return self._table.wire(one, limit_s)
        return self._server(recipe).wire(one)

    def _server(self, recipe: Recipe) -> SimServers:
        order = self._simulation.order
        if self._offices is None:
            elastic = self._members is not None
            self._offices = SimServers(
                self.world, recipe.shards, order.on_nan, not order.plain, order.timeout_s, elastic
            )
            for worker, life in self._buried:
                self._offices.gone(worker, life)
            self._catch_up()
        return self._offices

    def _catch_up(self) -> None:
        """What was to happen to a server happens, now that it is known whether there is one."""
        early, self._early = self._early, []
        for time, happening in early:
            self.world.outages.happen(time, happening)

    def _enduring(self, worker: Worker, recipe: Recipe) -> Transport:
        """A wire of a worker that may die, or whose peers may: what the live seat makes, of simulated parts."""
        self._mortals.free = recipe.asynchronous
        line = self._mortals.line(worker)
        if not recipe.shards:
            former = TableFormer(self._generations, worker, self._simulation.order.timeout_s)
            return ElasticTransport(worker.number, line, former)
        if not recipe.asynchronous:
            return ElasticTransport(worker.number, line, ServerRendezvous(self._server(recipe).wire(worker)))
        line.stand(ReadyReport(0))
        wire = self._server(recipe).wire(worker, worker.life)
        line.on_abort = lambda _generation, _why: wire.abort()
        wire.doing = line.doing
        wire.when_closed(line.leave)
        if worker.life:
            self._join(worker, wire)
        return wire

    def _join(self, worker: Worker, wire: ParameterServerClient) -> None:
        """Join a run that is under way; one that is over needs nobody."""
        try:
            wire.join()
        except TransportError as error:
            if OVER not in str(error):
                raise
            self._mortals.comes_late(worker)
            raise SystemExit(0) from None


@dataclass(frozen=True)
class SimSeat(WorkerContext):
    """A seat in a simulated world."""

    cast: Simulator | None = None

    def wire_for(self, recipe: Recipe | None, device: torch.device) -> Transport:
        """The simulated wire that the recipe asks for."""
        assert self.cast is not None
        assert isinstance(self.around, SimRuntime)
        self.around.free = recipe is not None and recipe.asynchronous
        return self.cast.wire(self.worker, recipe)


def _error_line(error: BaseException, worker: Worker | None, t: float) -> bytes:
    said = {"kind": type(error).__name__, "text": str(error), "traceback": "", "consequence": False, "at": round(t, 6)}
    return _line("error", worker.number if worker is not None else 0, t, **said)


def _line(kind: str, worker: int, t: float, /, **carries: object) -> bytes:
    return msgspec.json.encode({"event": kind, "t": round(t, 6), "worker": worker, **carries}) + b"\n"
