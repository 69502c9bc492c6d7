"""Configuration of a simulation: a run configuration, and the modelled machines, network and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from stretto.errors import LaunchError, mistyped
from stretto.faults import plan
from stretto.faults.plan import Fault
from stretto.launcher.config import check as check_config
from stretto.launcher.config import settled
from stretto.recipe.layout import as_option, whole
from stretto.recipe.parser import parse, parse_layout
from stretto.run_config import RunConfig
from stretto.simulator.cluster.membership import heartbeat_s
from stretto.simulator.compute.contention import copies
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.speed import Equal, Pace, Speeds
from stretto.simulator.isolation.script import Program
from stretto.simulator.layouts.replica import Replica, create_replica
from stretto.simulator.network.links import Links
from stretto.simulator.network.topology import Network
from stretto.units import spelled

MAX_SHARDS = 16
"""Number of shards assumed for faults where only the script's recipe decides it."""


@dataclass(frozen=True)
class Simulation:
    """A run configuration, and the modelled machines, network and faults.

    `processors` is the number of processors that all workers and servers share, None for one each. `samples` (of all
    workers) and `time_s` (virtual) end the run before the script does.
    """

    config: RunConfig
    cost_model: CostModel
    network: Network = field(default_factory=Network)
    speeds: Speeds = field(default_factory=Equal)
    faults: tuple[Fault, ...] = ()
    processors: float | None = None
    samples: float = inf
    time_s: float = inf

    @property
    def workers_can_fail(self) -> bool:
        """True if faults can change the membership: workers are killed, or declared failed after a long silence."""
        config = self.config
        silent_s = sum(map(_silence_s, self.faults))
        kills = any(isinstance(fault, plan.Kill) for fault in self.faults)
        can_time_out = silent_s + heartbeat_s(config.failure_timeout_s) > config.failure_timeout_s
        return config.workers > 1 and not config.single_process and (kills or can_time_out)

    @property
    def shards(self) -> int:
        """Number of shards of the parameter server, or the most that the script's recipe may ask for."""
        return parse(self.config.recipe).shards if self.config.recipe else MAX_SHARDS

    def replica(
        self,
        notice: Callable[[str], None],
        links: Links | None = None,
        write: Callable[..., None] = lambda *_, **__: None,
    ) -> Replica:
        """Return the workers as their layout divides them. Raise LaunchError if they cannot be simulated."""
        config = self.config
        layout = parse_layout(config.layout or str(whole()))
        if not layout.simulated_by:
            raise _not_simulated(config)
        links = links or Links(self.network, config.workers, 0, config.ranks)
        return create_replica(layout, links, self.cost_model, notice, write)

    @property
    def has_network(self) -> bool:
        """True if workers communicate over links of finite speed."""
        return self.config.workers * self.config.ranks > 1 and self.network != Network()

    @property
    def contending_processes(self) -> int | None:
        """Number of busy processes with which to measure under the same contention; None without shared processors."""
        workers = self.config.workers
        if self.processors is None or self.processors >= workers:
            return None
        return copies(workers, self.processors)

    @property
    def _limits(self) -> Sequence[tuple[str, float, str]]:
        return ("samples", self.samples, ""), ("time", self.time_s, "s")

    def record(self) -> dict[str, Any]:
        """Return the configuration for `run.json`."""
        limits = [f"{name}={spelled(value)}{unit}" for name, value, unit in self._limits if value < inf]
        simulated = {
            "network": str(self.network),
            "speeds": str(self.speeds),
            "step_time": str(self.cost_model),
            "faults": "; ".join(map(str, self.faults)) or None,
            "processors": self.processors,
            "until": " ".join(limits) or None,
        }
        return {**self.config.record(), "threads": 1, "simulated": simulated}


def check(simulation: Simulation) -> Simulation:
    """Return the simulation with its derived settings. Raises LaunchError or RecipeError if it cannot be run."""
    config = simulation.config
    check_config(config, live=False)
    config = settled(config)
    simulation = replace(simulation, config=config)
    plan.check(simulation.faults, config.workers, simulation.shards)
    for fault in simulation.faults:
        _refuse_ineffective(fault, simulation.network)
        _refuse_partial(fault, simulation.network)
    Pace(simulation.speeds, config.workers, config.seed)
    _check_layout(simulation)
    Program(config.script, config.args, config.seed, config.module)
    return simulation


def _check_layout(simulation: Simulation) -> None:
    """Raise LaunchError for workers of several processes that cannot be simulated."""
    simulation.replica(lambda _: None)
    if simulation.config.ranks > 1 and simulation.processors is not None:
        problem = "the processes of a worker have a processor each in a simulation"
        got = f"--processors {simulation.processors:g} {as_option(simulation.config.layout)}"
        raise mistyped(
            problem, got, "no --processors, or workers of one process", str(as_option(simulation.config.layout))
        )


def _not_simulated(config: RunConfig) -> LaunchError:
    problem = "processes that rotate blocks of a matrix exchange no models, and are not simulated"
    processes, option = config.workers * config.ranks, as_option(config.layout)
    expected = "whole(), pipeline(...) or sharded(...)"
    return mistyped(problem, option, expected, f"stretto run -n {processes} {option}, which runs them")


def _silence_s(fault: Fault) -> float:
    """Return for how many seconds a fault can silence a worker."""
    if isinstance(fault, plan.Partition) and isinstance(fault.when, plan.Every):
        return inf  # a recurring partition may begin before the previous one has ended
    can_time_out = isinstance(fault, plan.Partition) or (isinstance(fault, plan.Pause) and fault.who.kind == "worker")
    return fault.for_s if can_time_out else 0.0  # type: ignore[union-attr]


def _refuse_ineffective(fault: Fault, network: Network) -> None:
    """Raise LaunchError for a fault without an effect in this network."""
    if isinstance(fault, plan.Slow) and network == Network():
        problem, expected = "there is no link to slow", "a network whose links have a speed"
        raise mistyped(problem, "--network instant", expected, '--network "1Gbit/s 1ms"')


def _refuse_partial(fault: Fault, network: Network) -> None:
    """Raise LaunchError for a fault of worker 0 or a server if both run in one process."""
    kind, numbers = plan.victims_of(fault)
    is_other_worker = kind == "worker" and numbers and 0 not in numbers
    if network.in_worker and isinstance(fault, plan.Kill | plan.Pause) and not is_other_worker:
        problem = "worker 0 and the servers in its process can only fail together, which is not simulated"
        expected = "a fault of another worker, or servers that are processes of their own"
        raise mistyped(problem, fault, expected, '--network "..., servers with workers"')
