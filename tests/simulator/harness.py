"""Simulates a function of the worker, or a script, in this process; `thread_workers.run_workers` runs it in threads."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import MappingProxyType
from typing import Any

import msgspec

from stretto.events import Event
from stretto.faults import plan
from stretto.run_config import RunConfig
from stretto.simulator.compute import speed as speeds
from stretto.simulator.config import Simulation, check
from stretto.simulator.engine import CostModel
from stretto.simulator.isolation.script import ForwardedOutput
from stretto.simulator.network import topology
from stretto.simulator.runner import create_run, simulate
from stretto.training.worker_context import current_context

STEP_S = 0.01
ACTING = "from simulator import harness\nharness.act()\n"
"""Script of a simulation whose workers call a function of the test."""
_work: list[Callable[[int], Any]] = []
_found: dict[int, Any] = {}


@dataclass(frozen=True)
class Ended:
    """The results of a simulation."""

    found: list[Any]
    """Return value of the function at each worker."""
    seconds: float
    """Virtual time at the end, in seconds."""
    log: bytes
    final: bytes
    """Bytes of the final model's file."""
    said: str

    @property
    def events(self) -> list[Event]:
        """The events of the log, in order."""
        return [msgspec.json.decode(line) for line in self.log.splitlines()]

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [one for one in self.events if one["event"] == kind]


def simulated(
    workers: int,
    work: Callable[[int], Any] | str,
    recipe: str | None = None,
    *,
    net: str = "instant",
    speed: str = "equal",
    fault: str = "",
    cost_model: CostModel = CostModel(STEP_S),  # noqa: B008
    order: Sequence[int] | None = None,
    args: tuple[str, ...] = (),
    folder: Path | None = None,
    seed: int = 0,
    asks: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Ended:
    """Simulate a function of the worker's number, or the text of a script; the first error is raised.

    `asks` holds fields of the run configuration.
    """
    with TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        script = place / "train.py"
        script.write_text(dedent(work) if isinstance(work, str) else ACTING)
        asked = RunConfig(script=script, workers=workers, recipe=recipe, args=args, seed=seed, **asks)
        settings = topology.parse(net), speeds.parse(speed), plan.parse(fault) if fault else ()
        simulation = check(Simulation(asked, cost_model, *settings, **more))
        run, said = create_run(simulation, place / "run"), io.BytesIO()
        _found.clear()
        _work[:] = [] if isinstance(work, str) else [work]
        engine = simulate(simulation, run, ForwardedOutput(said.write), lambda: None, order)
        final = run / "final.safetensors"
        return Ended(
            [_found.get(worker) for worker in range(workers)],
            engine.queue.now,
            (run / "events.jsonl").read_bytes(),
            final.read_bytes() if final.exists() else b"",
            said.getvalue().decode(),
        )


def act() -> None:
    """Call the function of the test, and store its result."""
    seat = current_context.get()
    assert seat is not None
    _found[seat.worker] = _work[0](seat.worker)


def now() -> float:
    """Return the virtual time of the current worker in seconds."""
    seat = current_context.get()
    assert seat is not None
    return seat.runtime.clock()
