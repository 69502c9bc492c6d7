"""How long the work of a script takes on this machine: a few of its steps, for real, before they are simulated."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TextIO

from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.simulator.cluster.runtime import SimRuntime
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.speed import Equal
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.isolation.script import Nowhere
from stretto.simulator.network.topology import Links, Network
from stretto.simulator.runner import Simulator

MOST_HANDS = 200
LEAST_HANDS = 10
LONGEST_S = 4.0
"""It is measured for so many hands, but no longer than this if those are too slow."""
WARM_UP = 3
"""Hands that are not counted."""
CREW = 2
"""So many workers, if there are as many: what one says to itself is not encoded."""
TURN_S = 1e-6
"""Virtual seconds that a step takes, so that workers that do not wait for each other take batches in turn."""
EXCHANGING = ("encoding", "exchanging", "waiting", "evaluating")


def measure(simulation: Simulation, stopclock: Callable[[], float], tick: Callable[[], None]) -> CostModel:
    """What a step of the script takes, and what encoding and applying take under its recipe: medians."""
    order = simulation.order
    small = replace(
        simulation,
        order=replace(order, workers=min(order.workers, CREW), keep_states=False),
        tariff=CostModel(0.0),
        network=Network(),
        speeds=Equal(),
        faults=(),
        processors=None,
        samples=inf,
        time_s=inf,
    )
    cast = _Measuring(small, stopclock)
    try:
        cast.run(Nowhere(), tick)
    except BaseException as error:
        raise cast.told(error, "while it was measured how long a step takes") from None
    finally:
        cast.commons.close()
    lead = cast.paces[0]
    updates = cast.world.updates
    return CostModel(
        step_s=lead.step_s(),
        pass_s=lead.pass_s(),
        ask_s=lead.encoding_s() / max(cast.world.workers[0].asks, 1),
        take_s=statistics.median(updates) if updates else 0.0,
    )


class _Measured:
    """Notes how long each hand took, all but the exchange."""

    def __init__(self, watch: Stopwatch, worker: Worker) -> None:
        self._watch, self._worker = watch, worker
        self._before: float | None = None
        self._crossed = False
        self._latest: float | None = None
        """How far the hand that is going on has come."""
        self.steps: list[float] = []
        self.crossings: list[float] = []
        """Those between whose beginnings a pass ended and another began."""

    def begin_pass(self) -> None:
        """The step that is going on ends in another pass."""
        self._crossed = True

    def step_s(self) -> float:
        """What a step takes. Where a pass has one, that takes all that a pass does; where there are none, nothing."""
        return statistics.median(self.steps[WARM_UP:] or self.steps or self.crossings or [self._only_s()])

    def _only_s(self) -> float:
        return self._latest - self._before if self._latest is not None and self._before is not None else 0.0

    def pass_s(self) -> float:
        """What a pass takes besides its steps."""
        if not self.steps or not self.crossings:
            return 0.0
        return max(statistics.median(self.crossings) - statistics.median(self.steps), 0.0)

    def begin(self) -> None:
        """A hand begins: the one before has ended."""
        now = self._busy()
        if self._before is not None:
            (self.crossings if self._crossed else self.steps).append(now - self._before)
        self._before, self._crossed = now, False
        self._worker.work(TURN_S)

    def go_on(self, progress: float = 1.0) -> None:
        """Time passes by itself."""
        self._latest = self._busy()

    def encoding_s(self) -> float:
        """All that was spent on encoding."""
        return self._watch.spent["encoding"]

    def _busy(self) -> float:
        self._watch.switch(self._watch.phase)
        return sum(seconds for phase, seconds in self._watch.spent.items() if phase not in EXCHANGING)


class _Measuring(Simulator):
    """Workers whose time is that of this machine."""

    def __init__(self, simulation: Simulation, stopclock: Callable[[], float]) -> None:
        self._stopclock, self._began = stopclock, stopclock()
        self.paces: dict[int, _Measured] = {}
        super().__init__(simulation, None, None)

    def _script_time(self) -> float | None:
        """Return the real seconds that the script has computed, and the virtual ones that it has slept."""
        worker = self.world.now_on
        if worker is None:
            return None
        return worker.read_clock(worker.now() + self._stopclock() - self._began - worker.away_s)

    def own(self, worker: Worker, out: TextIO) -> ProcessState:
        """What a worker has for itself; nobody listens to it, for it says all of it again."""
        return self.program.own(worker, out, Nowhere())

    def make_world(self, links: Links, shards: int) -> Engine:
        """One in which it is looked at how long things take."""
        return Engine(self._simulation.order.workers, links, CostModel(0.0), stopclock=self._stopclock)

    def enough(self, hands: int, seen: bool) -> bool:
        """Whether this is the hand after which all end: the first that none had begun when one had seen enough."""
        return self._limit.reached(hands, hands if seen else 0, 0.0, free=False)

    def around(self, worker: Worker) -> SimRuntime:
        """Surroundings with the machine's clock."""
        return _MeasuredAround(self, worker, self._stopclock)


class _MeasuredAround(SimRuntime):
    def __init__(self, cast: _Measuring, worker: Worker, stopclock: Callable[[], float]) -> None:
        super().__init__(worker, cast._speed, cast._limit, None, cast.begins, cast._simulation.order.workers)
        self._cast, self._stopclock = cast, stopclock
        self._began = stopclock()

    def clock(self) -> float:
        """How long it was this worker's turn so far."""
        return self._stopclock() - self._worker.away_s

    def pace(self, watch: Stopwatch, slow: float) -> Pace:
        """None: it is measured."""
        self._cast.paces[self._worker.number] = found = _Measured(watch, self._worker)
        return found

    def sees_enough(self, hands: int, samples: int, t: float) -> bool:
        """Whether enough was seen; all see it after the same hand."""
        long = self._stopclock() - self._began > LONGEST_S
        return self._cast.enough(hands, (long and hands >= LEAST_HANDS) or hands >= MOST_HANDS)
