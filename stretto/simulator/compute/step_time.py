"""Measures the step time of a script on this machine: real steps of a few workers before the simulation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TextIO

from msgspec import structs
from torch import nn

from stretto.errors import ModelError
from stretto.recipe.recipe import Recipe
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.simulator.cluster.runtime import SimRuntime
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.speed import Equal
from stretto.simulator.config import Simulation
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.isolation.process_state import ProcessState
from stretto.simulator.isolation.script import DiscardedOutput
from stretto.simulator.layouts.replica import Measurement
from stretto.simulator.network.links import Links
from stretto.simulator.network.topology import Network
from stretto.simulator.runner import Simulator
from stretto.strategies.optimizers import Optimizers

MOST_STEPS = 200
LEAST_STEPS = 10
LONGEST_S = 4.0
"""Seconds after which the measurement ends, once LEAST_STEPS are measured; it always ends after MOST_STEPS."""
WARM_UP = 3
"""Number of first steps that are not counted."""
MEASURED_WORKERS = 2
"""Number of measured workers if the run has as many: a single worker does not encode."""
TURN_S = 1e-6
"""Virtual seconds per measured step, so that asynchronous workers take batches in turn."""
COMMUNICATION_PHASES = ("encoding", "exchanging", "waiting", "evaluating")


@dataclass(frozen=True)
class Measured:
    """Measured costs, and the layout with its measured values; None without a layout."""

    cost_model: CostModel
    layout: str | None


def measure(
    simulation: Simulation,
    wall_clock: Callable[[], float],
    tick: Callable[[], None],
    notice: Callable[[str], None] = lambda _: None,
    most: int = MEASURED_WORKERS,
) -> Measured:
    """Return the median times of a step of the script, and of encoding and applying under its recipe.

    The script is measured with its own batches, and with twice as large ones: the difference is the time of the
    samples. It counts as none where the script has no steps with larger batches, and where stages are measured.
    The measured workers, `most` of them at most, have one process each, whatever their layout. All workers are measured
    if the model cannot be trained by as few: L-BFGS needs a batch for each worker in each step.
    """
    config, measurement = simulation.config, simulation.replica(notice).measurement()
    workers = min(config.workers, most)
    measured = replace(
        simulation,
        config=structs.replace(config, workers=workers, ranks=1, layout=None, keep_states=False),
        cost_model=CostModel(0.0),
        network=Network(),
        speeds=Equal(),
        faults=(),
        processors=None,
        samples=inf,
        time_s=inf,
    )
    simulator = _MeasuringSimulator(measured, wall_clock, measurement)
    try:
        simulator.run(DiscardedOutput(), tick)
    except BaseException as error:
        if isinstance(error, ModelError) and workers < config.workers:
            return measure(simulation, wall_clock, tick, notice, config.workers)
        raise simulator.explained(error, "while its step time was measured") from None
    finally:
        simulator.shared_arrays.close()
    first_pace = simulator.paces[0]
    updates = simulator.engine.update_seconds
    sample_s = 0.0 if simulation.config.ranks > 1 else _sample_s(measured, first_pace, wall_clock, tick)
    whole = CostModel(
        step_s=first_pace.step_s() - sample_s * first_pace.samples(),
        sample_s=sample_s,
        epoch_s=first_pace.epoch_s(),
        codec_s=first_pace.encoding_s() / max(simulator.engine.workers[0].codec_calls, 1),
        update_s=statistics.median(updates) if updates else 0.0,
    )
    return Measured(measurement.cost_model(whole), str(measurement.layout) if config.layout is not None else None)


def _sample_s(
    simulation: Simulation, own: _StepRecorder, wall_clock: Callable[[], float], tick: Callable[[], None]
) -> float:
    """Return the seconds of a sample, from the steps of the script's own batches and of twice as large ones."""
    config = structs.replace(simulation.config, global_batch_of=2 * simulation.config.global_batch_of)
    larger = replace(simulation, config=config)
    simulator = _MeasuringSimulator(larger, wall_clock, larger.replica(lambda _: None).measurement())
    try:
        simulator.run(DiscardedOutput(), tick)
    except Exception:
        return 0.0  # a view of a fixed size, or too few samples
    finally:
        simulator.shared_arrays.close()
    twice = simulator.paces[0]
    samples = twice.samples() - own.samples()
    if samples <= 0 or not own.steps or not twice.steps:
        return 0.0
    return min(max((twice.step_s() - own.step_s()) / samples, 0.0), own.step_s() / own.samples())


class _StepRecorder:
    """Records the seconds of each step without communication."""

    def __init__(self, watch: Stopwatch, worker: Worker) -> None:
        self._watch, self._worker = watch, worker
        self._started: float | None = None
        self._crosses_epochs = False
        self._latest_busy: float | None = None
        """Busy seconds at the latest progress of the current step."""
        self.steps: list[float] = []
        self.epoch_crossing_steps: list[float] = []
        """Steps that include the change from one epoch to the next."""
        self._samples: list[int] = []

    def begin_epoch(self) -> None:
        """Mark the current step as including a change of epochs."""
        self._crosses_epochs = True

    def step_s(self) -> float:
        """Return the median time of a step; with one step per epoch, that of an epoch; without steps, 0."""
        return statistics.median(self.steps[WARM_UP:] or self.steps or self.epoch_crossing_steps or [self._only_s()])

    def _only_s(self) -> float:
        return self._latest_busy - self._started if self._latest_busy is not None and self._started is not None else 0.0

    def epoch_s(self) -> float:
        """Return the time of an epoch besides its steps."""
        if not self.steps or not self.epoch_crossing_steps:
            return 0.0
        return max(statistics.median(self.epoch_crossing_steps) - statistics.median(self.steps), 0.0)

    def samples(self) -> float:
        """Return the median number of samples of a step; 0 without steps."""
        return statistics.median(self._samples) if self._samples else 0

    def begin(self, samples: int) -> None:
        """Record the previous step, and start another one."""
        self._samples.append(samples)
        now = self._busy()
        if self._started is not None:
            (self.epoch_crossing_steps if self._crosses_epochs else self.steps).append(now - self._started)
        self._started, self._crosses_epochs = now, False
        self._worker.compute(TURN_S)

    def go_on(self, progress: float = 1.0) -> None:
        """Record the progress of the current step; real time needs no advancing."""
        self._latest_busy = self._busy()

    def encoding_s(self) -> float:
        """Return the total seconds of encoding."""
        return self._watch.spent["encoding"]

    def _busy(self) -> float:
        self._watch.switch(self._watch.phase)
        return sum(seconds for phase, seconds in self._watch.spent.items() if phase not in COMMUNICATION_PHASES)


class _MeasuringSimulator(Simulator):
    """A simulation whose workers run in real time."""

    def __init__(self, simulation: Simulation, wall_clock: Callable[[], float], measurement: Measurement) -> None:
        self._wall_clock, self._began, self._measurement = wall_clock, wall_clock(), measurement
        self.paces: dict[int, _StepRecorder] = {}
        super().__init__(simulation, None, None, DiscardedOutput())  # the simulation will repeat the notices

    def _script_time(self) -> float | None:
        """Return the real seconds in which the current worker ran plus the virtual seconds that it slept."""
        worker = self.engine.current_worker
        if worker is None:
            return None
        return worker.read_clock(worker.now() + self._wall_clock() - self._began - worker.suspended_s)

    def make_state(self, worker: Worker, out: TextIO) -> ProcessState:
        """Return the initial process state of a worker, without error output, which the simulation will repeat."""
        return self.program.make_state(worker, out, DiscardedOutput())

    def make_engine(self, links: Links, shards: int) -> Engine:
        """Create an engine that measures real time."""
        return Engine(self._simulation.config.workers, links, CostModel(0.0), wall_clock=self._wall_clock)

    def on_distribute(
        self, worker: Worker, model: nn.Module, optimizers: Optimizers, loader: Any, recipe: Recipe | None
    ) -> None:
        """Measure the model of the first worker, too."""
        super().on_distribute(worker, model, optimizers, loader, recipe)
        if worker.number == 0:
            self._measurement.follow(model)

    def ends(self, steps: int, measured_enough: bool) -> bool:
        """Return True if all workers end after this step: the first not started when one had `measured_enough`."""
        return self._limit.reached(steps, steps if measured_enough else 0, 0.0, asynchronous=False)

    def runtime(self, worker: Worker) -> SimRuntime:
        """Create a runtime with the real clock."""
        return _MeasuringRuntime(self, worker, self._wall_clock)


class _MeasuringRuntime(SimRuntime):
    def __init__(self, simulator: _MeasuringSimulator, worker: Worker, wall_clock: Callable[[], float]) -> None:
        super().__init__(
            worker,
            simulator._speed,
            simulator._limit,
            None,
            simulator.on_distribute,
            simulator._simulation.config.workers,
            simulator.replica,
        )
        self._simulator, self._wall_clock = simulator, wall_clock
        self._began = wall_clock()

    def clock(self) -> float:
        """Return the real seconds in which this worker ran."""
        return self._wall_clock() - self._worker.suspended_s

    def pace(self, watch: Stopwatch, slow: float) -> Pace:
        """Return a pace that only measures."""
        self._simulator.paces[self._worker.number] = recorder = _StepRecorder(watch, self._worker)
        return recorder

    def ends_before_step(self, steps: int, samples: int, t: float) -> bool:
        """Return True if enough steps were measured; all workers end after the same step."""
        is_long = self._wall_clock() - self._began > LONGEST_S
        return self._simulator.ends(steps, (is_long and steps >= LEAST_STEPS) or steps >= MOST_STEPS)
