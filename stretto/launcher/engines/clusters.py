"""Clusters that start agents with one worker each: Ray, Spark. The module of each is imported only when it is used."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.agents import AgentExited, AgentOutput, StartAgent
from stretto.launcher.engines.resources import parse
from stretto.run_config import RunConfig


@dataclass(frozen=True)
class Kind:
    """Kind of a cluster: its name, the module of its engine, what carries an agent there, and another value of `--on`.

    The module has `connected(on, workers, resources)`, a context that yields a `Cluster`. The module `packer`, of the
    cluster's own package, packs functions, also those of a notebook, and unpacks them.
    """

    name: str
    module: str
    place: str
    address: str
    packer: str


KINDS = {
    "ray": Kind("Ray", "stretto.launcher.engines.ray", "actor", "ray://HEAD:PORT", "ray.cloudpickle"),
    "spark": Kind("Spark", "stretto.launcher.engines.spark", "task", "spark://HEAD:PORT", "pyspark.cloudpickle"),
}
ADDRESS = re.compile(r"([a-z]+)(?:://[^\s/]+:\d{1,5})?", re.ASCII)


class Cluster(Protocol):
    """Connection with a cluster."""

    @property
    def address(self) -> str:
        """Address of this machine at which the nodes of the cluster reach it."""
        ...

    def agents(self, report: Callable[[AgentExited], None], output: AgentOutput) -> StartAgent:
        """Return what starts agents, whose exits are given to `report`; those without room wait."""
        ...


def kind_of(on: str) -> Kind:
    """Return the kind of the cluster of `--on`. Raises LaunchError for a text that names none.

    >>> kind_of("ray://10.0.0.1:10001").place
    'actor'
    """
    match = ADDRESS.fullmatch(on)
    if match is None or match[1] not in KINDS:
        expected = "; ".join(f"{name}, or {kind.address}" for name, kind in KINDS.items())
        problem, got = f"the engine cannot be --on {on}", f"--on {on}"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--on ray"))
    return KINDS[match[1]]


@contextlib.contextmanager
def connected(config: RunConfig) -> Iterator[Cluster | None]:
    """Yield the connection with the cluster of a run; None without one. Raises LaunchError."""
    if config.on is None:
        yield None
        return
    engine = importlib.import_module(kind_of(config.on).module)
    with engine.connected(config.on, config.initial_workers, parse(config.resources)) as cluster:
        yield cluster
