"""The simulation engine: workers run real code in greenlets, one at a time, on an event queue with virtual time.

A worker that only computes may run ahead of the event queue: its local time advances, and the messages that it sends
are scheduled at that local time. Before the worker reads anything that other workers or services can change, it waits
until the event queue has reached its local time. A step thus costs one greenlet switch, and all events are still
processed in order of time.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from contextvars import Context
from math import ceil
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from stretto.errors import LaunchError, TransportError
from stretto.faults.plan import FaultEvent
from stretto.simulator.cluster.fault_injector import FaultInjector
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.event_queue import EventQueue
from stretto.simulator.isolation.process_state import ProcessSnapshot, ProcessState
from stretto.simulator.isolation.profiler_patch import without_profiler_ranges
from stretto.simulator.network.flows import ARRIVAL, RESUME, Flows, SimNetwork
from stretto.simulator.network.links import Links

IDLE_EVENTS = 200_000
"""Number of events in a row without a switch to a worker after which only recurring faults can be left: a deadlock."""
MESSAGE_WEIGHT = 1e3
"""Weight of message processing over computing in the sharing of processors: a scheduler favours woken processes."""
READING_S = 1e-6
"""Least difference, in seconds, of two clock readings by one worker's script, which may divide by it."""
TICK_EVENTS = 256
"""Number of events between two calls of the `tick` function, which shows progress."""


class Worker:
    """One incarnation of a simulated worker; `steps` counts the steps of all its incarnations."""

    def __init__(self, engine: Engine, number: int, incarnation: int = 0, steps: int = 0) -> None:
        self._engine, self.number, self.incarnation = engine, number, incarnation
        self.state: ProcessState | None = None
        self.has_ended = self.has_failed = False
        """True if its greenlet has ended; true if it was killed or evicted."""
        self.steps, self.codec_calls = steps, 0
        """Number of steps that it has computed; number of tensors or updates that it has encoded or decoded."""
        self.rank_bytes = 0
        """Bytes that its ranks have sent to each other in this incarnation, where it has several."""
        self.suspended_s = 0.0
        """Seconds of real time in which this worker's greenlet was suspended."""
        self.processor_flow: int | None = None
        """Number of its current flow over the processors, where processors are shared."""
        self._local_time = self._last_reading = 0.0
        self._wake_pending = False
        self._in_backward = False
        self._deferred_calls: deque[Callable[[], None]] = deque()
        self._final_calls: deque[Callable[[], None]] = deque()
        self._waiting_for: Callable[[], str] = str
        self.greenlet: greenlet | None = None

    @property
    def cost_model(self) -> CostModel:
        """The costs of its computing and communication."""
        return self._engine.cost_model

    # --- time ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return this worker's virtual time in seconds."""
        local, now = self._local_time, self._engine.queue.now
        return local if local > now else now

    def read_clock(self, at: float) -> float:
        """Return the time that the worker's script reads from a clock, later than every earlier reading.

        The event queue is not changed: the virtual time of the next step absorbs the differences.
        """
        self._last_reading = max(at, self._last_reading + READING_S)
        return self._last_reading

    def compute(self, seconds: float) -> None:
        """Compute for `seconds`, on the worker's own processor or on its share of the common processors."""
        if not seconds:
            return
        if self._in_backward:
            self._deferred_calls.append(lambda: self.compute(seconds))
            return
        if self._engine.processors is None:
            self._local_time = self._engine.fault_injector.end_of_computing(self.number, self.now(), seconds)
        else:
            self._use_shared_processors(self._engine.processors, seconds)
        self._catch_up_if_killable()

    def _catch_up_if_killable(self) -> None:
        """Wait for the event queue if workers can fail: a worker that may be killed must not run ahead of the queue."""
        if self._engine.workers_can_fail and not self._in_backward:
            self.catch_up()

    def _use_shared_processors(self, processors: Flows, seconds: float) -> None:
        self.catch_up()
        queue, fault_injector = self._engine.queue, self._engine.fault_injector
        began, ended = queue.now, list[float]()

        def end() -> None:
            ended.append(queue.now)
            self.wake()

        self.processor_flow = processors.start(seconds, (0, 1 + self.number), end)
        self.wait_until(lambda: bool(ended), lambda: "a processor")
        self._local_time = fault_injector.end_of_computing(
            self.number, queue.now, fault_injector.paused_s(self.number, began, ended[0])
        )

    def count_rank_bytes(self, nbytes: int) -> None:
        """Count bytes that one of its ranks sends to another."""
        self.rank_bytes += nbytes

    def sleep(self, seconds: float) -> None:
        """Advance this worker's virtual time by `seconds` without computing."""
        self._local_time = self.now() + seconds
        self._catch_up_if_killable()

    def schedule(self, callback: Callable[[], None]) -> None:
        """Schedule a callback at this worker's virtual time; it is skipped if the worker has failed by then."""
        if self._in_backward:
            self._deferred_calls.append(lambda: self.schedule(callback))
            return
        self._engine.queue.schedule(self.now(), lambda: None if self.has_failed else callback(), RESUME, self.number)

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Call a function after this worker's backward pass, after the calls deferred before it."""
        self._deferred_calls.append(callback)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call a function when all calls that were deferred until the end of the backward pass are done."""
        self._final_calls.append(callback)

    def catch_up(self) -> None:
        """Wait until the event queue has reached this worker's time, so that all earlier messages have arrived."""
        if self._local_time > self._engine.queue.now:
            local_time = self._local_time
            self._engine.queue.schedule(local_time, self.wake, RESUME, self.number)
            self.wait_until(lambda: self._engine.queue.now >= local_time, lambda: f"its own time, {local_time:g} s")

    def wait_until(
        self, condition: Callable[[], bool], description: Callable[[], str], limit_s: float = float("inf")
    ) -> None:
        """Suspend this worker until a condition holds.

        Raises TransportError if the worker waited longer than `limit_s`, not counting the time in which data was in
        transit.
        """
        began, active_before_s = self.now(), self._engine.network.active_s()
        while not condition():
            self._waiting_for = description
            self._engine.suspend(self)
        waited = self.now() - began
        if waited > limit_s and waited - (self._engine.network.active_s() - active_before_s) > limit_s:
            longer = f"longer than {limit_s:g} s; --timeout {ceil(waited)} would let it"
            raise TransportError(f"worker {self.number} waited {waited:g} s for {description()}, {longer}")

    def wake(self) -> None:
        """Schedule this worker to check the condition that it waits for."""
        if not self._wake_pending and not self.has_ended:
            self._wake_pending = True
            awake = self._engine.fault_injector.next_running_time(self.number, self._engine.queue.now)
            self._engine.queue.schedule(awake, self._resume, RESUME, self.number)

    def _resume(self) -> None:
        self._wake_pending = False
        self._engine.resume(self)

    # --- the script's side --------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True during a backward pass of torch's engine, in which this worker cannot be suspended."""
        return self._in_backward

    def backward(self, original: Callable[[], None]) -> None:
        """Run a backward pass, then make the calls that were deferred during it, in the same order.

        A nested backward pass (reentrant checkpointing) is a part of the outer one.
        """
        if self._in_backward:
            original()
            return
        self._in_backward = True
        try:
            original()
        except BaseException:
            self._deferred_calls.clear()
            self._final_calls.clear()
            raise
        finally:
            self._in_backward = False
        while next_ := self._deferred_calls or self._final_calls:
            next_.popleft()()

    def waiting_for(self) -> str:
        """Return a description of the condition that it waits for."""
        return self._waiting_for()


class RestartingLauncher(Protocol):
    """Restarts workers that have failed."""

    def restart_pending(self) -> bool:
        """Return True if a restart is pending while no worker is running."""
        ...


class Engine:
    """Workers, event queue and network; all workers share `processors` processors (None: each has its own).

    With `wall_clock` (seconds of real time), the engine measures the real time of the workers' code.
    """

    def __init__(
        self,
        workers: int,
        links: Links,
        cost_model: CostModel,
        plan: Iterable[tuple[float, FaultEvent]] = (),
        processors: float | None = None,
        servers: int = 0,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.queue = EventQueue()
        self.network = SimNetwork(self.queue, links)
        self.cost_model, self.wall_clock = cost_model, wall_clock
        self.processors: Flows | None = None
        self._serves_itself = links.in_worker
        """True if the process of worker 0 runs the servers."""
        if processors is not None:
            self.processors = Flows(self.queue, [processors, *[1.0] * (workers + 1 + servers)])
        self.workers = [Worker(self, number) for number in range(workers)]
        self.workers_can_fail = False
        """True if workers can be killed and restarted."""
        self._launcher: RestartingLauncher | None = None
        self.fault_injector = FaultInjector(self.queue, self.network, plan)
        self._message_queues: dict[int, deque[tuple[int, float, Callable[[], None]]]] = {}
        self.update_seconds: list[float] = []
        """Seconds of real time that a server took for each update, where that is measured."""
        self.switches = 0
        """Number of switches to a worker's greenlet."""
        self._hub: Any = None
        self._out, self._err = sys.stdout, sys.stderr
        self._running_count = 0
        self._current: Worker | None = None
        self._installed: Worker | None = None
        self._failed: tuple[Worker, BaseException] | None = None
        self._is_stopping = False

    def attach(self, launcher: RestartingLauncher) -> None:
        """Wait for the workers that this launcher will restart."""
        self._launcher = launcher

    def run(
        self,
        main: Callable[[Worker], None],
        make_state: Callable[[Worker], ProcessState],
        order: Sequence[int] | None = None,
        tick: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Run all workers until each has ended. The first error in a worker ends all workers and is raised.

        `make_state` returns the process state of a worker. Workers are created in the given `order`, which has no
        effect on results. Changes that `prepare` makes to the process are undone at the end.
        """
        self._hub, self._main, self._make_state = getcurrent(), main, make_state
        self._process = process = ProcessSnapshot()
        gc.freeze()  # excludes all existing objects from every later garbage collection
        try:
            if prepare is not None:
                prepare()
            with self._deferring_waits(), nullcontext() if self.wall_clock is not None else without_profiler_ranges():
                for number in order if order is not None else range(len(self.workers)):
                    self._start(self.workers[number])
                self._run_events(tick or (lambda: None))
        finally:
            self._stop_all()
            process.restore()
            gc.unfreeze()

    def _start(self, worker: Worker) -> None:
        def run_main() -> None:
            try:
                self._main(worker)
            except GreenletExit:
                pass
            except BaseException as error:
                if not worker.has_failed:
                    self._failed = self._failed or (worker, error)
            finally:
                self._mark_ended(worker)

        worker.state = self._make_state(worker)
        worker.greenlet = greenlet(run_main)
        worker.greenlet.gr_context = Context()
        self._running_count += 1
        worker.wake()

    def _mark_ended(self, worker: Worker) -> None:
        """Mark a worker as ended. Idempotent; also called for a greenlet that never ran, whose `main` marks nothing."""
        self._running_count -= not worker.has_ended
        worker.has_ended = True

    def kill(self, worker: Worker) -> None:
        """Kill a worker wherever it is suspended."""
        worker.has_failed = True
        assert worker.greenlet is not None
        self._install(worker)
        worker.greenlet.throw(GreenletExit)
        self._mark_ended(worker)
        if self.processors is not None and worker.processor_flow is not None:
            self.processors.stop(worker.processor_flow)
        self._install(None)

    def restart(self, number: int) -> None:
        """Start another incarnation of a worker."""
        previous = self.workers[number]
        self.workers[number] = Worker(self, number, previous.incarnation + 1, previous.steps)
        self._install(None)
        self._process.restore_modes()
        self._start(self.workers[number])

    def _run_events(self, tick: Callable[[], None]) -> None:
        """Process events until all workers have ended and no restart is pending; later events are dropped."""
        events = switches = idle = 0
        while self._running_count or (self._launcher is not None and self._launcher.restart_pending()):
            idle = idle + 1 if self.switches == switches else 0
            switches = self.switches
            if not self.queue.step() or idle > IDLE_EVENTS:
                raise self._deadlock()
            if self._failed is not None:
                raise self._failed[1]
            events += 1
            if events % TICK_EVENTS == 0:
                self._call_tick(tick)

    def _call_tick(self, tick: Callable[[], None]) -> None:
        """Call `tick` with the standard output and error of this process."""
        with redirect_stdout(self._out), redirect_stderr(self._err):
            tick()

    # --- processors ---------------------------------------------------------------------------------------------

    def resource_of_service(self, number: int) -> int:
        """Return the processor resource of the coordinator (number 0) or of server number - 1."""
        return 1 if self._serves_itself else 1 + len(self.workers) + number

    def use_processor(self, resource: int, seconds: float, callback: Callable[[], None]) -> None:
        """Spend `seconds` of processor time on a message, then call a function.

        `resource` is the limit of the worker or server of one processor; resource 0 has only the limit of all
        processors, for the work of links.
        """
        if self.processors is None:
            self.queue.schedule(self.queue.now + seconds, callback, ARRIVAL, resource)
        else:
            self.processors.start(seconds, (0, resource) if resource else (0,), callback, resource, MESSAGE_WEIGHT)

    def process_message(self, endpoint: int, resource: int, seconds: float, callback: Callable[[], None]) -> None:
        """Spend processor time on a message of this endpoint after all its earlier messages, in their order."""
        if not seconds:
            callback()
            return
        pending = self._message_queues.setdefault(endpoint, deque())
        pending.append((resource, seconds, callback))
        if len(pending) == 1:
            self._process_first(endpoint)

    def _process_first(self, endpoint: int) -> None:
        resource, seconds, _ = self._message_queues[endpoint][0]
        self.use_processor(resource, seconds, lambda: self._processed(endpoint))

    def _processed(self, endpoint: int) -> None:
        pending = self._message_queues[endpoint]
        _, _, callback = pending.popleft()
        if pending:
            self._process_first(endpoint)
        callback()

    # --- turns --------------------------------------------------------------------------------------------------

    @property
    def current_worker(self) -> Worker | None:
        """The worker whose greenlet runs now."""
        return self._current

    @property
    def failed(self) -> Worker | None:
        """The worker whose error ended the simulation."""
        return self._failed[0] if self._failed is not None else None

    def resume(self, worker: Worker) -> None:
        """Switch to a worker's greenlet, unless the worker has ended."""
        if worker.has_ended:
            return
        assert worker.greenlet is not None
        if worker is not self._installed:
            self._install(worker)
        self._current = worker
        self.switches += 1
        worker.greenlet.switch()
        self._current = None

    def _install(self, worker: Worker | None) -> None:
        """Save the process state of the installed worker, and install that of the given one, if any."""
        if self._installed is not None and self._installed.state is not None:
            self._installed.state.save()
        if worker is not None and worker.state is not None:
            worker.state.install()
        self._installed = worker

    def suspend(self, worker: Worker) -> None:
        """Suspend a worker until its next `resume`. Raises GreenletExit if it has failed or the simulation ended."""
        if worker.has_failed or self._is_stopping:
            raise GreenletExit
        if worker.in_backward:
            raise RuntimeError(f"worker {worker.number} cannot wait for {worker.waiting_for()} within a backward pass")
        if self.wall_clock is None:
            self._hub.switch()
            return
        suspended_at_s = self.wall_clock()
        self._hub.switch()
        worker.suspended_s += self.wall_clock() - suspended_at_s

    @contextmanager
    def _deferring_waits(self) -> Iterator[None]:
        """Defer waits to the end of a backward pass: torch keeps its state per thread, so passes cannot interleave."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            worker = self._current
            if worker is None:
                original(*args, **kwargs)
            else:
                worker.backward(lambda: original(*args, **kwargs))

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _stop_all(self) -> None:
        """End the greenlets of all workers; workers may still write their logs, but can no longer wait."""
        self._is_stopping = True
        for worker in self.workers:
            if worker.greenlet is not None and not worker.has_ended:
                worker.greenlet.throw(GreenletExit)

    def _deadlock(self) -> LaunchError:
        blocked = [worker for worker in self.workers if not worker.has_ended]
        waits = [f"  worker {worker.number} waits for {worker.waiting_for()}" for worker in blocked[:8]]
        further = [f"  and {len(blocked) - 8} other workers wait"] if len(blocked) > 8 else []
        ended_workers = [str(worker.number) for worker in self.workers if worker.has_ended][:8]
        ended = [f"  worker {', '.join(ended_workers)} has ended"] if ended_workers else []
        head = f"deadlock at {self.queue.now:g} s of virtual time: every worker waits, and no event will wake one"
        return LaunchError("\n".join([head, *waits, *further, *ended]))
