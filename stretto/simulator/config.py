"""What is to be simulated: an order, and the world in which it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from stretto.errors import mistyped
from stretto.faults import plan
from stretto.faults.plan import Fault
from stretto.launcher.config import RunConfig, settled
from stretto.launcher.config import check as check_order
from stretto.recipe.parser import parse
from stretto.simulator.cluster.membership import beat_s
from stretto.simulator.compute.contention import copies
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.speed import Equal, Pace, Speeds
from stretto.simulator.isolation.script import Program
from stretto.simulator.network.topology import Network
from stretto.units import spelled

MOST_SHARDS = 16
"""Of a server that only the script's recipe asks for."""


@dataclass(frozen=True)
class Simulation:
    """An order, and the world in which it is to be carried out.

    `processors` are shared by all workers and servers, where each does not have its own. `samples` and `time_s` end
    the run before the script does.
    """

    order: RunConfig
    tariff: CostModel
    network: Network = field(default_factory=Network)
    speeds: Speeds = field(default_factory=Equal)
    faults: tuple[Fault, ...] = ()
    processors: float | None = None
    samples: float = inf
    time_s: float = inf

    @property
    def is_mortal(self) -> bool:
        """Whether what goes wrong may change who exchanges: workers die, or are taken for dead."""
        order = self.order
        silent_s = sum(map(_silent_s, self.faults))
        dies = any(isinstance(one, plan.Kill) for one in self.faults)
        is_missed = silent_s + beat_s(order.failure_timeout_s) > order.failure_timeout_s
        return order.workers > 1 and not order.single_process and (dies or is_missed)

    @property
    def shards(self) -> int:
        """How many shards a server has, or may have."""
        return parse(self.order.recipe).shards if self.order.recipe else MOST_SHARDS

    @property
    def has_wires(self) -> bool:
        """Whether there is a network at all."""
        return self.order.workers > 1 and self.network != Network()

    @property
    def crowd(self) -> int | None:
        """How many copies of a worker make it as crowded here; None where each has a processor of its own."""
        workers = self.order.workers
        if self.processors is None or self.processors >= workers:
            return None
        return copies(workers, self.processors)

    @property
    def _ends(self) -> Sequence[tuple[str, float, str]]:
        return ("samples", self.samples, ""), ("time", self.time_s, "s")

    def asked(self) -> dict[str, Any]:
        """What `run.json` says was asked for."""
        ends = [f"{what}={spelled(value)}{unit}" for what, value, unit in self._ends if value < inf]
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
    simulation = replace(simulation, order=order)
    plan.check(simulation.faults, order.workers, simulation.shards)
    for fault in simulation.faults:
        _refuse_idle(fault, simulation.network)
        _refuse_parted(fault, simulation.network)
    Pace(simulation.speeds, order.workers, order.seed)
    Program(order.script, order.args, order.seed, order.module)
    return simulation


def _silent_s(fault: Fault) -> float:
    """For how long a worker is not heard of."""
    if isinstance(fault, plan.Cut) and isinstance(fault.when, plan.Every):
        return inf  # one may begin before the last has ended
    is_missed = isinstance(fault, plan.Cut) or (isinstance(fault, plan.Pause) and fault.who.kind == "worker")
    return fault.for_s if is_missed else 0.0  # type: ignore[union-attr]


def _refuse_idle(fault: Fault, network: Network) -> None:
    """Raise LaunchError for a fault that would change nothing here."""
    if isinstance(fault, plan.Slow) and network == Network():
        problem, expected = "there is no link to be slow", "a network whose links have a speed"
        raise mistyped(problem, "--network instant", expected, '--network "1Gbit/s 1ms"')


def _refuse_parted(fault: Fault, network: Network) -> None:
    """Raise LaunchError for a fault that would part a server from the process that it is in."""
    kind, numbers = plan.aim(fault)
    is_beside = kind == "worker" and numbers and 0 not in numbers
    if network.in_worker and isinstance(fault, plan.Kill | plan.Pause) and not is_beside:
        problem = "worker 0 and the servers in its process live and die together, which is not simulated"
        expected = "a fault of another worker, or servers that are processes of their own"
        raise mistyped(problem, fault, expected, '--network "..., servers with workers"')
