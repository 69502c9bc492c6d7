"""The world of a simulation: workers that run real code one after the other, and a virtual clock for what they do.

A worker is a greenlet. While it only computes it may run ahead of the clock: its own time is noted, what it says to
others is said at that time, and before it looks at anything that comes from outside, the clock catches up. So a step
costs one switch, and every event still happens in the order of time.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from contextvars import Context
from math import ceil
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from stretto.errors import LaunchError, TransportError
from stretto.faults.plan import Happening
from stretto.simulator.cluster.fault_injector import FaultInjector
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.event_queue import Queue
from stretto.simulator.isolation.process_state import Process, ProcessState
from stretto.simulator.isolation.profiler_patch import unmarked
from stretto.simulator.network.flows import ARRIVE, GO_ON, Flows, Net
from stretto.simulator.network.topology import Links

IDLE_EVENTS = 200_000
"""So many events in which no worker takes its turn are faults that come again and again, and nothing else."""
BEFORE = 1e3
"""By so much those who work on a message go before those who compute: who was asleep is let in first."""
READING_S = 1e-6
"""Least seconds between two readings of a clock by one worker's script, which may divide by the difference."""
TICK_EVENTS = 256
"""How many events happen before the one who waits for the simulation is shown that it goes on."""


class Worker:
    """One life of a simulated worker, which had so many before; `steps` are those of all."""

    def __init__(self, world: Engine, number: int, life: int = 0, steps: int = 0) -> None:
        self._world, self.number, self.life = world, number, life
        self.own: ProcessState | None = None
        self.is_over = self.is_dead = False
        """Whether it has come to its end, and whether it was killed."""
        self.steps, self.asks = steps, 0
        """How many hands it has computed, and how many asks or updates it has encoded or decoded."""
        self.away_s = 0.0
        """How long, on the clock of the one who simulates, it was not its turn."""
        self.job: int | None = None
        """What it works on, where processors are shared."""
        self._local = self._read = 0.0
        self._wakes = False
        self._in_backward = False
        self._deferred: deque[Callable[[], None]] = deque()
        self._last: deque[Callable[[], None]] = deque()
        self._waits_for: Callable[[], str] = str
        self.greenlet: greenlet | None = None
        self.computes: Callable[[float], None] = lambda _: None
        """Has it spend the time until so much of its hand's computing is done."""
        self.is_at_work: Callable[[], bool] = lambda: False
        """Whether its script computes a hand."""

    @property
    def tariff(self) -> CostModel:
        """What its work takes."""
        return self._world.tariff

    # --- time ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """This worker's time."""
        local, now = self._local, self._world.queue.now
        return local if local > now else now

    def read_clock(self, at: float) -> float:
        """Return the time that the worker's script reads at a moment: later than at any reading before.

        The event queue is not changed: the time of the next step makes up for the readings.
        """
        self._read = max(at, self._read + READING_S)
        return self._read

    def work(self, seconds: float) -> None:
        """Work for so long, on a processor of its own or on its share of those there are."""
        if not seconds:
            return
        if self._in_backward:
            self._deferred.append(lambda: self.work(seconds))
            return
        if self._world.processors is None:
            self._local = self._world.outages.end_of_work(self.number, self.now(), seconds)
        else:
            self._share_processors(self._world.processors, seconds)
        self._live_through()

    def _live_through(self) -> None:
        """Who may die meanwhile does not run ahead of the clock."""
        if self._world.is_mortal and not self._in_backward:
            self.catch_up()

    def _share_processors(self, processors: Flows, seconds: float) -> None:
        self.catch_up()
        queue, outages = self._world.queue, self._world.outages
        began, ended = queue.now, list[float]()

        def end() -> None:
            ended.append(queue.now)
            self.wake()

        self.job = processors.start(seconds, (0, 1 + self.number), end)
        self.until(lambda: bool(ended), lambda: "a processor")
        self._local = outages.end_of_work(self.number, queue.now, outages.paused(self.number, began, ended[0]))

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""
        self._local = self.now() + seconds
        self._live_through()

    def act(self, then: Callable[[], None]) -> None:
        """Have something happen in the world at this worker's time, if it lives to see it."""
        if self._in_backward:
            self._deferred.append(lambda: self.act(then))
            return
        self._world.queue.at(self.now(), lambda: None if self.is_dead else then(), GO_ON, self.number)

    def after_backward(self, then: Callable[[], None]) -> None:
        """Have this worker do something behind its backward pass, and behind what was put off before."""
        self._deferred.append(then)

    def at_end_of_backward(self, then: Callable[[], None]) -> None:
        """Have this worker do something when all that its backward pass has put off is done."""
        self._last.append(then)

    def catch_up(self) -> None:
        """Let the world come to this worker's time: what has come by then is there."""
        if self._local > self._world.queue.now:
            at = self._local
            self._world.queue.at(at, self.wake, GO_ON, self.number)
            self.until(lambda: self._world.queue.now >= at, lambda: f"its own time, {at:g} s")

    def until(self, is_so: Callable[[], bool], what: Callable[[], str], limit_s: float = float("inf")) -> None:
        """Wait, and let others go on, until something is so. Raises TransportError when nothing moved for too long."""
        began, moved_s = self.now(), self._world.net.moved_s()
        while not is_so():
            self._waits_for = what
            self._world.leave(self)
        waited = self.now() - began
        if waited > limit_s and waited - (self._world.net.moved_s() - moved_s) > limit_s:
            longer = f"longer than {limit_s:g} s; --timeout {ceil(waited)} would let it"
            raise TransportError(f"worker {self.number} waited {waited:g} s for {what()}, {longer}")

    def wake(self) -> None:
        """What it waits for may be so now."""
        if not self._wakes and not self.is_over:
            self._wakes = True
            awake = self._world.outages.awake(self.number, self._world.queue.now)
            self._world.queue.at(awake, self._go_on, GO_ON, self.number)

    def _go_on(self) -> None:
        self._wakes = False
        self._world.resume(self)

    # --- the script's side --------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether torch's engine is at work, in which no other worker may take its turn."""
        return self._in_backward

    def backward(self, original: Callable[[], None]) -> None:
        """A backward pass; what may not be done within it is done behind it, in the same order.

        One within another, as reentrant checkpointing makes it, is a part of that.
        """
        if self._in_backward:
            original()
            return
        self._in_backward = True
        try:
            original()
        except BaseException:
            self._deferred.clear()
            self._last.clear()
            raise
        finally:
            self._in_backward = False
        while next_ := self._deferred or self._last:
            next_.popleft()()

    def waiting(self) -> str:
        """What it waits for, in words."""
        return self._waits_for()


class Engine:
    """Workers, the clock and the network. `processors` are how many the workers share; None if each has its own.

    `stopclock` is given to measure how long the workers' code takes here; then their time is that.
    """

    def __init__(
        self,
        workers: int,
        links: Links,
        tariff: CostModel,
        plan: Iterable[tuple[float, Happening]] = (),
        processors: float | None = None,
        servers: int = 0,
        stopclock: Callable[[], float] | None = None,
    ) -> None:
        self.queue = Queue()
        self.net = Net(self.queue, links)
        self.tariff, self.stopclock = tariff, stopclock
        self.processors: Flows | None = None
        self._serves_itself = links.in_worker
        """Whether worker 0 has the servers in its process."""
        if processors is not None:
            self.processors = Flows(self.queue, [processors, *[1.0] * (workers + 1 + servers)])
        self.workers = [Worker(self, number) for number in range(workers)]
        self.is_mortal = False
        """Whether workers may die, and others be born in their place."""
        self.goes_on: Callable[[], bool] = lambda: False
        """Whether there will be somebody again when nobody is."""
        self.outages = FaultInjector(self.queue, self.net, plan)
        self._lines: dict[int, deque[tuple[int, float, Callable[[], None]]]] = {}
        self.updates: list[float] = []
        """How long each update took a server, where that is measured."""
        self.turns = 0
        """How often a worker has taken its turn."""
        self._hub: Any = None
        self._out, self._err = sys.stdout, sys.stderr
        self._living = 0
        self._now: Worker | None = None
        self._last: Worker | None = None
        self._failed: tuple[Worker, BaseException] | None = None
        self._is_over = False

    def run(
        self,
        live: Callable[[Worker], None],
        own: Callable[[Worker], ProcessState],
        order: Sequence[int] | None = None,
        tick: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Let all workers live until each has come to its end. The first error of one ends all, and is raised.

        `own` gives each what it has for itself. Workers are made in the `order` given, which changes nothing. What
        `prepare` does to the process before is undone behind it.
        """
        self._hub, self._live, self._own = getcurrent(), live, own
        self._process = process = Process()
        gc.freeze()  # what was there before is not looked through for garbage, again and again
        try:
            if prepare is not None:
                prepare()
            with self._backwards_apart(), nullcontext() if self.stopclock is not None else unmarked():
                for number in order if order is not None else range(len(self.workers)):
                    self._begin(self.workers[number])
                self._go_round(tick or (lambda: None))
        finally:
            self._end_all()
            process.restore()
            gc.unfreeze()

    def _begin(self, worker: Worker) -> None:
        def course() -> None:
            try:
                self._live(worker)
            except GreenletExit:
                pass
            except BaseException as error:
                if not worker.is_dead:
                    self._failed = self._failed or (worker, error)
            finally:
                self._end(worker)

        worker.own = self._own(worker)
        worker.greenlet = greenlet(course)
        worker.greenlet.gr_context = Context()
        self._living += 1
        worker.wake()

    def _end(self, worker: Worker) -> None:
        """Once: a worker that never had its turn has no course to end."""
        self._living -= not worker.is_over
        worker.is_over = True

    def kill(self, worker: Worker) -> None:
        """End a life, wherever it is: nothing more comes of it."""
        worker.is_dead = True
        assert worker.greenlet is not None
        self._hand_over(worker)
        worker.greenlet.throw(GreenletExit)
        self._end(worker)
        if self.processors is not None and worker.job is not None:
            self.processors.stop(worker.job)
        self._hand_over(None)

    def bear(self, number: int) -> None:
        """Begin another life of a worker."""
        before = self.workers[number]
        self.workers[number] = Worker(self, number, before.life + 1, before.steps)
        self._hand_over(None)
        self._process.modes()
        self._begin(self.workers[number])

    def _go_round(self, tick: Callable[[], None]) -> None:
        """What would happen when all workers are over does not happen."""
        events = turns = idle = 0
        while self._living or self.goes_on():
            idle = idle + 1 if self.turns == turns else 0
            turns = self.turns
            if not self.queue.step() or idle > IDLE_EVENTS:
                raise self._deadlock()
            if self._failed is not None:
                raise self._failed[1]
            events += 1
            if events % TICK_EVENTS == 0:
                self._show(tick)

    def _show(self, tick: Callable[[], None]) -> None:
        """Let whoever waits for the simulation look at it, with the output of this process in place."""
        with redirect_stdout(self._out), redirect_stderr(self._err):
            tick()

    # --- processors ---------------------------------------------------------------------------------------------

    def share_of_service(self, number: int) -> int:
        """Which share of the processors the coordinator has (number 0), or a server (1 and so on)."""
        return 1 if self._serves_itself else 1 + len(self.workers) + number

    def busy(self, share: int, seconds: float, then: Callable[[], None]) -> None:
        """Have a processor work so long on a message, as that of a worker or server with this share; then go on.

        Share 0 is nobody's: links work on whatever processors there are.
        """
        if self.processors is None:
            self.queue.at(self.queue.now + seconds, then, ARRIVE, share)
        else:
            self.processors.start(seconds, (0, share) if share else (0,), then, share, BEFORE)

    def handle(self, end: int, share: int, seconds: float, then: Callable[[], None]) -> None:
        """The same behind what this end of links was given before: messages leave and come in their order."""
        if not seconds:
            then()
            return
        line = self._lines.setdefault(end, deque())
        line.append((share, seconds, then))
        if len(line) == 1:
            self._handle_first(end)

    def _handle_first(self, end: int) -> None:
        share, seconds, _ = self._lines[end][0]
        self.busy(share, seconds, lambda: self._handled(end))

    def _handled(self, end: int) -> None:
        line = self._lines[end]
        _, _, then = line.popleft()
        if line:
            self._handle_first(end)
        then()

    # --- turns --------------------------------------------------------------------------------------------------

    @property
    def now_on(self) -> Worker | None:
        """The worker whose turn it is."""
        return self._now

    @property
    def failed(self) -> Worker | None:
        """The worker whose error ended the world."""
        return self._failed[0] if self._failed is not None else None

    def resume(self, worker: Worker) -> None:
        """Give a worker its turn."""
        if worker.is_over:
            return
        assert worker.greenlet is not None
        if worker is not self._last:
            self._hand_over(worker)
        self._now = worker
        self.turns += 1
        worker.greenlet.switch()
        self._now = None

    def _hand_over(self, worker: Worker | None) -> None:
        """Keep what the last worker has for itself, and put that of the next one in its place, if there is one."""
        if self._last is not None and self._last.own is not None:
            self._last.own.keep()
        if worker is not None and worker.own is not None:
            worker.own.take()
        self._last = worker

    def leave(self, worker: Worker) -> None:
        """A worker gives its turn back; one that is dead has none to give, and nothing comes when all is over."""
        if worker.is_dead or self._is_over:
            raise GreenletExit
        if worker.in_backward:
            raise RuntimeError(f"worker {worker.number} can't wait for {worker.waiting()} within a backward pass")
        if self.stopclock is None:
            self._hub.switch()
            return
        left = self.stopclock()
        self._hub.switch()
        worker.away_s += self.stopclock() - left

    @contextmanager
    def _backwards_apart(self) -> Iterator[None]:
        """torch's engine keeps its place in the thread, so no two workers may be within a backward pass at once."""
        original = torch.autograd.backward

        def backward(*given: Any, **named: Any) -> None:
            worker = self._now
            if worker is None:
                original(*given, **named)
            else:
                worker.backward(lambda: original(*given, **named))

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _end_all(self) -> None:
        """Workers may still write down what they know; what they would have to wait for does not come."""
        self._is_over = True
        for worker in self.workers:
            if worker.greenlet is not None and not worker.is_over:
                worker.greenlet.throw(GreenletExit)

    def _deadlock(self) -> LaunchError:
        waiting = [one for one in self.workers if not one.is_over]
        shown = [f"  worker {one.number} waits for {one.waiting()}" for one in waiting[:8]]
        more = [f"  and {len(waiting) - 8} others wait"] if len(waiting) > 8 else []
        over = [str(one.number) for one in self.workers if one.is_over][:8]
        ended = [f"  worker {', '.join(over)} has come to its end"] if over else []
        head = f"nothing can happen any more at {self.queue.now:g} s of virtual time: everybody waits for another"
        return LaunchError("\n".join([head, *shown, *more, *ended]))
