"""Simulated rendezvous: the members of each generation connect in a group of their own."""

from __future__ import annotations

from stretto.membership.messages import GenerationView
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.layouts.replica import Replica
from stretto.simulator.network.links import Links
from stretto.transport.elastic import AbortableTransport
from stretto.transport.rendezvous import LastWorkerTransport

FORMED_S = 0.027
"""Seconds to form a group after the first generation, without the network's latency. Live runs took 14 to 40 ms with
four processes of one machine."""


class Generations:
    """The group of the newest generation."""

    def __init__(self, engine: Engine, links: Links, replica: Replica) -> None:
        self._engine, self._links, self._replica = engine, links, replica
        self._generation = 0
        self._group: SimGroup | None = None

    def group(self, form: GenerationView) -> SimGroup:
        """Return the group of a generation; for a generation that is superseded, an aborted one."""
        if self._group is not None and form.generation == self._generation:
            return self._group
        group = SimGroup(self._engine, self._links, form.numbers, self._replica)
        if form.generation > self._generation:
            self._generation, self._group = form.generation, group
        else:
            group.abort()
        return group

    def rendezvous_s(self, form: GenerationView) -> float:
        """Return the seconds of a rendezvous; 0 for the first generation, after which the run's time starts."""
        if form.generation == 1:
            return 0.0
        return FORMED_S + self._links.broadcast(form.numbers[0], 0.0, form.numbers)[2]

    def worker_failed(self, worker: int) -> None:
        """Stop the collectives of a group with a worker that failed."""
        if self._group is not None and worker in self._group.members:
            self._group.stop()


class SimRendezvous:
    """Creates the transports of one worker."""

    address = ""

    def __init__(self, generations: Generations, worker: Worker, limit_s: float) -> None:
        self._generations, self._worker, self._limit_s = generations, worker, limit_s
        self._group: SimGroup | None = None
        self._generation = 0

    def form(self, form: GenerationView, rank: int) -> AbortableTransport:
        """Return a transport between the members of a generation. Raises BrokenTransportError if a member fails."""
        if len(form.members) == 1:
            return LastWorkerTransport()
        self._group, self._generation = self._generations.group(form), form.generation
        transport = self._group.transport(self._worker, self._limit_s)
        transport.rendezvous(self._generations.rendezvous_s(form))
        return transport

    def abort(self, generation: int) -> None:
        """Abort the rendezvous in progress."""
        if self._group is not None and self._generation <= generation:
            self._group.abort()

    def close(self) -> None:
        """Do nothing: no resources are kept between generations."""
