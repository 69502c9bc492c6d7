"""The simulated wires of generations: those who are left meet anew, at a table of their own."""

from __future__ import annotations

from stretto.membership.messages import GenerationView
from stretto.simulator.cluster.collective import SimGroup
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.topology import Links
from stretto.transport.elastic import AbortableTransport
from stretto.transport.rendezvous import LastWorkerTransport

FORMED_S = 0.027
"""What it takes to form a group anew, besides the network's latency: live 14 to 40 ms were seen, with four processes of
one machine."""


class Generations:
    """The tables of all generations, of which one is in use."""

    def __init__(self, world: Engine, links: Links) -> None:
        self._world, self._links = world, links
        self._number = 0
        self._table: SimGroup | None = None

    def table(self, form: GenerationView) -> SimGroup:
        """Where a generation meets; one that others have left behind does not."""
        if self._table is not None and form.generation == self._number:
            return self._table
        table = SimGroup(self._world, self._links, form.numbers)
        if form.generation > self._number:
            self._number, self._table = form.generation, table
        else:
            table.abort()
        return table

    def seconds(self, form: GenerationView) -> float:
        """What it takes to meet; the run begins when the first generation has."""
        if form.generation == 1:
            return 0.0
        return FORMED_S + self._links.broadcast(form.numbers[0], 0.0, form.numbers)[2]

    def lose(self, worker: int) -> None:
        """A worker is gone: no exchange with it ends any more."""
        if self._table is not None and worker in self._table.members:
            self._table.end()


class TableFormer:
    """Makes the wires of one worker."""

    address = ""

    def __init__(self, generations: Generations, worker: Worker, limit_s: float) -> None:
        self._generations, self._worker, self._limit_s = generations, worker, limit_s
        self._table: SimGroup | None = None

    def form(self, form: GenerationView, rank: int) -> AbortableTransport:
        """Meet the members of a generation. Raises BrokenTransportError when one of them does not come."""
        if len(form.members) == 1:
            return LastWorkerTransport()
        self._table = self._generations.table(form)
        wire = self._table.wire(self._worker, self._limit_s)
        wire.meet(self._generations.seconds(form))
        return wire

    def abort(self) -> None:
        """Break off the forming that is going on."""
        if self._table is not None:
            self._table.abort()

    def close(self) -> None:
        """Nothing is kept between generations."""
