"""A simulation from its order to its run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from torch import nn

from stretto.errors import LaunchError, explain
from stretto.events import LogFile
from stretto.folder import make_folder, write_run
from stretto.launch.clocks import ScriptTime
from stretto.launch.order import Order, settled
from stretto.launch.order import check as check_order
from stretto.launch.seeding import sow
from stretto.launch.worker import failure
from stretto.recipe import Recipe
from stretto.sim import faults as faults_
from stretto.sim.around import Limit, SimAround
from stretto.sim.collective import Table
from stretto.sim.faults import Fault
from stretto.sim.forecast import Forecast
from stretto.sim.network import Links, Network
from stretto.sim.office import Offices
from stretto.sim.own import Own
from stretto.sim.readers import ReadOnce
from stretto.sim.script import Nowhere, Program, importable
from stretto.sim.share import Commons
from stretto.sim.speeds import Equal, Pace, Speeds
from stretto.sim.tariff import Tariff
from stretto.sim.world import Worker, World
from stretto.train.face import abandon
from stretto.train.seat import Seat, given_seat
from stretto.typed import parse
from stretto.wire import Wire

MOST_SHARDS = 16
"""Of a server that only the script's recipe asks for."""
Ticked = Callable[[], None]


@dataclass(frozen=True)
class Simulation:
    """An order, and the world in which it is to be carried out.

    `processors` are shared by all workers and servers, where each does not have its own. `samples` and `time_s` end
    the run before the script does.
    """

    order: Order
    tariff: Tariff
    network: Network = field(default_factory=Network)
    speeds: Speeds = field(default_factory=Equal)
    faults: tuple[Fault, ...] = ()
    processors: float | None = None
    samples: float = inf
    time_s: float = inf

    def asked(self) -> dict[str, Any]:
        """What `run.json` says was asked for."""
        ends = [f"samples={self.samples:g}"] * (self.samples < inf) + [f"time={self.time_s:g}s"] * (self.time_s < inf)
        simulated = {
            "network": str(self.network),
            "speeds": str(self.speeds),
            "step_time": str(self.tariff),
            "faults": "; ".join(map(str, self.faults)) or None,
            "processors": self.processors,
            "until": " ".join(ends) or None,
        }
        return {**self.order.asked(), "threads": 1, "simulated": simulated}


def check(simulation: Simulation) -> Simulation:
    """The same simulation with all that follows from it. Raises LaunchError or RecipeError when it cannot be run."""
    order = simulation.order
    check_order(order, live=False)
    order = settled(order)
    shards = parse(order.recipe).shards if order.recipe else MOST_SHARDS
    faults_.check(simulation.faults, order.workers, shards)
    for fault in simulation.faults:
        _refuse_idle(fault, simulation.network)
    Pace(simulation.speeds, order.workers, order.seed)
    Program(order.script, order.args, order.seed)
    return replace(simulation, order=order)


def _refuse_idle(fault: Fault, network: Network) -> None:
    """Raise LaunchError for a fault that would change nothing here."""
    if isinstance(fault, faults_.Pause) and fault.who.kind != "worker":
        problem, to_type = f"a {fault.who.kind} can't be paused in a simulation", "pause worker 1 for 5s at 30s"
        raise LaunchError(explain(problem, got=fault, expected="a pause of a worker", to_type=f'--faults "{to_type}"'))
    if isinstance(fault, faults_.Slow) and network == Network():
        problem, expected = "there is no link to be slow", "a network whose links have a speed"
        raise LaunchError(
            explain(problem, got="--network instant", expected=expected, to_type='--network "1Gbit/s 1ms"')
        )


def simulate(
    simulation: Simulation, folder: Path, out: TextIO, tick: Ticked | None = None, order: Sequence[int] | None = None
) -> World:
    """Run the simulation into a run folder; `out` takes what worker 0 says. Workers are made in the `order` given.

    Raises LaunchError with the cause when a worker fails, or nothing can happen any more.
    """
    log = _SharedLog(folder / "events.jsonl")
    cast = Cast(simulation, folder, log)
    cast.world.outages.tell = lambda time, what: log.append(_line("notice", 0, time, text=f"{what}, at {time:g} s"))
    try:
        cast.run(out, tick, order)
    except LaunchError as error:
        log.append(_error_line(error, cast.world.failed, cast.world.queue.now))
        raise
    except BaseException as error:
        worker = cast.world.failed
        now = worker.now() if worker is not None else cast.world.queue.now
        log.append(_error_line(error, worker, now))
        if worker is None or isinstance(error, KeyboardInterrupt):
            raise
        raise LaunchError(f"worker {worker.number} failed at {now:g} s of virtual time\n{failure(error)}") from None
    finally:
        cast.commons.close()
        log.end()
    return cast.world


def begin(simulation: Simulation, out: Path | None) -> Path:
    """Make the run folder."""
    now = datetime.now()
    folder = make_folder(simulation.order.script.stem, out, now)
    write_run(folder, simulation.asked(), now)
    return folder


class _SharedLog(LogFile):
    """The log of all workers: open until the simulation has ended."""

    def close(self) -> None:
        """A worker has no more to say."""

    def end(self) -> None:
        """All have ended."""
        super().close()


class Cast:
    """The workers of a simulation, each with its seat and its script."""

    def __init__(self, simulation: Simulation, folder: Path | None, log: LogFile | None) -> None:
        order = simulation.order
        self._simulation, self._folder, self._log = simulation, folder, log
        shards = parse(order.recipe).shards if order.recipe else MOST_SHARDS
        links = Links(simulation.network, order.workers, shards)
        self.world = self.make_world(links, shards)
        self.program = Program(order.script, order.args, order.seed)
        self.commons = Commons()
        self._err = sys.stderr
        self._said: set[str] = set()
        self._forecast = Forecast(order.workers)
        self._table = Table(self.world, links)
        self._offices: Offices | None = None
        self._speed = Pace(simulation.speeds, order.workers, order.seed)
        self._limit = Limit(simulation.samples, simulation.time_s)

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

    def _prepare(self, readers: ReadOnce) -> None:
        readers.begin()
        torch.set_num_threads(1)
        sow(self._simulation.order.seed)
        importable(self._simulation.order.script)

    def make_world(self, links: Links, shards: int) -> World:
        """The world they live in."""
        one, order = self._simulation, self._simulation.order
        plan = faults_.schedule(one.faults, order.workers, shards, order.seed)
        return World(order.workers, links, one.tariff, plan, one.processors, shards)

    def own(self, worker: Worker, out: TextIO) -> Own:
        """What a worker has for itself."""
        shown = worker.number == 0 and self._simulation.order.output == "lead"
        heard = shown or self._simulation.order.output == "all"
        return self.program.own(worker, *((out, self._err) if heard else (Nowhere(), Nowhere())))

    def live(self, worker: Worker) -> None:
        """A worker's life."""
        given_seat.set(self.seat(worker))
        try:
            self.program.live(worker)
        except BaseException:
            with suppress(Exception):
                abandon()
            raise

    def seat(self, worker: Worker) -> Seat:
        """A worker's place."""
        order = self._simulation.order
        around = self.around(worker)
        return SimSeat(
            worker=worker.number,
            workers=order.workers,
            recipe=order.recipe,
            run=self._folder,
            seed=order.seed,
            alone=order.alone,
            join=order.join,
            keep_states=order.keep_states,
            timeout_s=order.timeout_s,
            around=around,
            on_nan=order.on_nan,
            cast=self,
        )

    def around(self, worker: Worker) -> SimAround:
        """A worker's surroundings."""
        workers = self._simulation.order.workers
        return SimAround(worker, self._speed, self._limit, self._log, self.begins, workers)

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
            print(f"stretto: {text}", file=self._err, flush=True)

    def _script_time(self) -> float | None:
        worker = self.world.now_on
        return worker.now() if worker is not None else None

    def _script_sleeps(self, seconds: float) -> None:
        if self.world.now_on is not None:
            self.world.now_on.sleep(seconds)

    def wire(self, worker: int, recipe: Recipe | None) -> Wire:
        """A worker's wire."""
        order, one = self._simulation.order, self.world.workers[worker]
        if recipe is None or not recipe.shards:
            return self._table.wire(one, order.timeout_s)
        if self._offices is None:
            self._offices = Offices(self.world, recipe.shards, order.on_nan, not order.plain, order.timeout_s)
        return self._offices.wire(worker)


@dataclass(frozen=True)
class SimSeat(Seat):
    """A seat in a simulated world."""

    cast: Cast | None = None

    def wire_for(self, recipe: Recipe | None, device: torch.device) -> Wire:
        """The simulated wire that the recipe asks for."""
        assert self.cast is not None
        assert isinstance(self.around, SimAround)
        self.around.free = recipe is not None and recipe.asynchronous
        return self.cast.wire(self.worker, recipe)


def _error_line(error: BaseException, worker: Worker | None, t: float) -> bytes:
    said = {"kind": type(error).__name__, "text": str(error), "traceback": "", "consequence": False}
    return _line("error", worker.number if worker is not None else 0, t, **said)


def _line(kind: str, worker: int, t: float, /, **carries: object) -> bytes:
    return msgspec.json.encode({"event": kind, "t": round(t, 6), "worker": worker, **carries}) + b"\n"
