"""Links of a simulated network, as resources that transfers share, and the routes of collectives over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

from stretto.simulator.network.topology import Link, Network

SEGMENT_BYTES: Final = 4 << 20
"""Bytes of a mean that hosts exchange at a time."""

Route = tuple[tuple[int, ...], float]
"""Resources on the path, and the one-way latency in seconds."""

Exchange = tuple[float, tuple[int, ...], float]
"""A collective: bytes that each of its links carries, the links, and the total latency in seconds."""


class _Port(NamedTuple):
    """Resources out of and into a place; () where the speed is infinite."""

    up: tuple[int, ...]
    down: tuple[int, ...]


class _Place(NamedTuple):
    """Place of a worker or shard: machine, host, the ports of both, and the latency in seconds between hosts."""

    machine: int
    host: int
    inside: _Port
    outside: _Port
    latency: float


class Links:
    """The links of a network with N workers and a number of shards, as resources of a `FluidModel`.

    Endpoints are numbered: worker w is w, shard s is -1 - s. The coordinator runs beside shard 0, so endpoint -1 always
    exists. With more shards than workers, `servers with workers` puts shard s on the machine of worker s mod N.

    A worker of several `ranks` has a machine and a link for each, all in one host if it has room for them. Rank i of
    worker w is endpoint w + i N; rank 0 stands for the worker.

    >>> from stretto.simulator.network.topology import parse
    >>> links = Links(parse("100Mbit/s 20ms"), workers=2, shards=1)
    >>> links.capacities[links.up(0)], links.path(0, -1)
    (12500000.0, ((0, 5), 0.02))
    """

    def __init__(self, network: Network, workers: int, shards: int = 0, ranks: int = 1) -> None:
        self.capacities: list[float] = []
        """Capacity of each resource in bytes per second."""
        self.burst = network.burst
        """Bytes that an idle link carries immediately."""
        self.in_worker = network.in_worker
        """True if the shards run in the process of worker 0."""
        self.ranks = ranks
        """Number of processes of a worker."""
        self._network = network
        self._workers = workers
        self._first_resource: list[int] = []
        self._places: list[_Place] = []
        self._add_workers()
        self._add_shards(max(shards, 1))

    def up(self, endpoint: int) -> int:
        """Return the uplink of this endpoint (with hosts: inside its host)."""
        return self._first_resource[endpoint]

    def down(self, endpoint: int) -> int:
        """Return the downlink of this endpoint (with hosts: inside its host)."""
        return self._first_resource[endpoint] + 1

    def at_rank(self, rank: int, members: Sequence[int] | None = None) -> list[int]:
        """Return the endpoints of one rank of these workers (default: of all)."""
        return [worker + rank * self._workers for worker in self._members(members)]

    def processes(self, endpoint: int) -> list[int]:
        """Return the endpoints of all ranks of a worker, or that of a shard."""
        return [endpoint + rank * self._workers for rank in range(self.ranks if endpoint >= 0 else 1)]

    def machine(self, endpoint: int) -> int:
        """Return the machine of an endpoint; the machine of a worker has the worker's number."""
        return self._places[endpoint].machine

    def path(self, source: int, target: int) -> Route:
        """Return the resources from one endpoint to another, and the one-way latency in seconds.

        Inside a host these are the sender's uplink and the receiver's downlink, between hosts the uplink of one host
        and the downlink of the other. Links of infinite speed are left out; on one machine there are none.
        """
        source_place, target_place = self._places[source], self._places[target]
        if source_place.host != target_place.host:
            latency = (source_place if source < 0 else target_place).latency
            return source_place.outside.up + target_place.outside.down, latency
        if source_place.machine != target_place.machine:
            return source_place.inside.up + target_place.inside.down, self._network.link.latency
        return (), 0.0

    def hosts(self, members: Sequence[int] | None = None) -> list[list[int]]:
        """Return the members (default: all workers) of each host. Under `tree` workers do not add in their hosts."""
        hosts: dict[int, list[int]] = {}
        for worker in self._members(members):
            hosts.setdefault(self._places[worker].host if self._network.reduce == "ring" else worker, []).append(worker)
        return list(hosts.values())

    def all_reduce(self, nbytes: float, members: Sequence[int] | None = None) -> list[Exchange]:
        """Return the concurrent parts of the all-reduce of a tensor of B = `nbytes` bytes over N workers.

        Ring: T = 2 (N-1)/N B/b + 2 (N-1) L, b the slowest link, L the slowest hop (Thakur et al. 2005; Patarasuk & Yuan
        2009). H hosts of several workers add in their memory, and their first workers exchange the sums:
        T = 2 (H-1)/H B/b + 4 ceil(B/S) L, in segments of S bytes.
        Binomial tree, a reduction and then a broadcast: T = 2 ceil(log2 N) (B/b + L). Its hops are sequential; charging
        each hop with the slowest link is an upper bound.
        """
        members = self._members(members)
        hosts = self.hosts(members)
        if len(hosts) < len(members):
            return [self._in_hosts(hosts, nbytes), self._between(hosts, nbytes)]
        if self._network.reduce == "ring":
            return [self._over(_ring(members), 2 * (len(members) - 1), nbytes / len(members))]
        down = _tree(members)
        up = [(child, parent) for parent, child in down]
        return [self._over(up + down, 2 * _depth(members), nbytes)]

    def _in_hosts(self, hosts: Sequence[Sequence[int]], nbytes: float) -> Exchange:
        """Return the way of tensors into the memory of hosts of several workers, and of their mean back."""
        ports = [self._places[worker].inside for host in hosts if len(host) > 1 for worker in host]
        return nbytes, _resources(ports), 2 * self._network.link.latency

    def _between(self, hosts: Sequence[Sequence[int]], nbytes: float) -> Exchange:
        """Return the exchange of the sums of hosts: each first worker with each, in two rounds, a frame first."""
        places, others = [self._places[host[0]] for host in hosts], len(hosts) - 1
        segments = ceil(nbytes / SEGMENT_BYTES)
        latency = max(place.latency for place in places) if others else 0.0
        return 2 * others / len(hosts) * nbytes, _resources([place.outside for place in places]), 4 * segments * latency

    def gather(self, nbytes: float, members: Sequence[int] | None = None) -> Exchange:
        """Return the all-gather of B = `nbytes` bytes per worker, as a ring: T = (N-1) (B/b + L)."""
        members = self._members(members)
        return self._over(_ring(members), len(members) - 1, nbytes)

    def broadcast(self, root: int, nbytes: float, members: Sequence[int] | None = None) -> Exchange:
        """Return the broadcast of B = `nbytes` bytes from `root`, as a binomial tree: T = ceil(log2 N) (B/b + L)."""
        members = self._members(members)
        root_index = members.index(root)
        members = members[root_index:] + members[:root_index]
        return self._over(_tree(members), _depth(members), nbytes)

    def _over(self, hops: Iterable[tuple[int, int]], steps: int, nbytes: float) -> Exchange:
        """Return the exchange of a sequence of `steps`, in each of which every hop may carry `nbytes` bytes."""
        routes = [self.path(*hop) for hop in hops]
        links = dict.fromkeys(resource for resources, _ in routes for resource in resources)
        return steps * nbytes, tuple(links), steps * max((latency for _, latency in routes), default=0.0)

    def _members(self, members: Sequence[int] | None) -> list[int]:
        return list(range(self._workers)) if members is None else sorted(members)

    def _add_workers(self) -> None:
        net, everyone = self._network, range(self._workers * self.ranks)
        self._first_resource = [self._add(net.link) for _ in everyone]
        hosts = self._first_resource
        if net.between:
            hosts = [self._add(net.between) for _ in range(1 + max(map(self._host, everyone)))]
        inside, outside = (
            [self._port(resource) for resource in self._first_resource],
            [self._port(resource) for resource in hosts],
        )
        for process in everyone:
            host, latency = self._host(process), (net.between or net.link).latency
            self._places.append(_Place(process, host, inside[process], outside[host], latency))

    def _host(self, process: int) -> int:
        """Return the host of a process: hosts hold whole workers, or if they are too small, each a part of one."""
        (rank, worker), room = divmod(process, self._workers), self._network.hosts
        if not room:
            return process
        if room >= self.ranks:
            return worker // (room // self.ranks)
        return worker * ceil(self.ranks / room) + rank // room

    def _add_shards(self, shards: int) -> None:
        """Append the shards in reverse order, so that shard s has index -1 - s in the lists."""
        link = self._network.server or self._network.between or self._network.link
        for shard in reversed(range(shards)):
            if self._network.with_workers or self._network.in_worker:
                host = shard % self._workers if self._network.with_workers else 0
                self._first_resource.append(self._first_resource[host])
                self._places.append(self._places[host])
            else:
                self._first_resource.append(self._add(link))
                port = self._port(self._first_resource[-1])
                self._places.append(_Place(-1 - shard, -1 - shard, port, port, link.latency))

    def _add(self, link: Link) -> int:
        """Add two resources, up and down, and return the number of the first."""
        self.capacities += [rate / 8 * (1 - self._network.loss) for rate in (link.up, link.down)]
        return len(self.capacities) - 2

    def _port(self, first_resource: int) -> _Port:
        up, down = [
            (resource,) if self.capacities[resource] < inf else () for resource in (first_resource, first_resource + 1)
        ]
        return _Port(up, down)


def _resources(ports: Iterable[_Port]) -> tuple[int, ...]:
    return tuple(resource for port in ports for resource in port.up + port.down)


def _ring(members: list[int]) -> list[tuple[int, int]]:
    return list(zip(members, members[1:] + members[:1], strict=True))


def _tree(members: list[int]) -> list[tuple[int, int]]:
    """Return (parent, child) pairs: a child's position without its lowest binary 1 is its parent's position."""
    return [(members[position & (position - 1)], members[position]) for position in range(1, len(members))]


def _depth(members: list[int]) -> int:
    """Return ceil(log2 N)."""
    return (len(members) - 1).bit_length()
