"""Network topology of a simulation: the text of `--network`, and the links that it describes.

The text is a list of parts separated by commas, in any order. Speeds are in bit/s, kbit/s, Mbit/s, Gbit/s or Tbit/s,
times in us, ms or s.

| part | meaning |
| --- | --- |
| `100Mbit/s 20ms` | the link of every worker, up and down, and its one-way latency (default 0) |
| `100Mbit/s up 20Mbit/s down` | different speeds up and down |
| `instant` | infinite speed (in place of any speed); the default network |
| `hosts of 8 on 10Gbit/s 50us` | in place of the workers' links: hosts of 8 workers, and the links inside a host |
| `1Gbit/s 1ms between` | with hosts: the uplink and the downlink that all workers of a host share |
| `server 1Gbit/s 5ms` | the link of each shard of the parameter server; default: that of a worker, or of a host |
| `servers with workers` | shard s runs on the machine of worker s and has no link of its own |
| `servers in worker 0` | all shards run in the process of worker 0, as when scripts are started without a launcher |
| `burst 32kB` | bytes that an idle link carries immediately, as with a token bucket (Linux's tbf) |
| `loss 1%` | packet loss: lowers the capacity of every link by this fraction |
| `ring`, `tree` | the algorithm of an all-reduce; default: ring |

Without a latency of their own, `between` and `server` have that of the link that they replace. The latency of `server`
applies to all messages to and from a shard.
The model of loss p is a lower bound of the harm: capacity times (1 - p) is the goodput of a sender that only
retransmits; TCP also slows down with 1 / sqrt(p) (Mathis et al. 1997).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, inf, nextafter
from typing import Any, Final, Literal, NamedTuple

from stretto.call_syntax import SMALLEST, Words
from stretto.units import TIMES

RATES: Final = {
    "Tbit/s": Decimal("1e12"),
    "Gbit/s": Decimal("1e9"),
    "Mbit/s": Decimal("1e6"),
    "kbit/s": Decimal("1e3"),
    "bit/s": Decimal(1),
}
SIZES: Final = {"MB": Decimal("1e6"), "kB": Decimal("1e3"), "B": Decimal(1)}
LATENCIES: Final = {unit: TIMES[unit] for unit in ("s", "ms", "us")}
PERCENT: Final = {"%": Decimal("0.01")}
SEGMENT_BYTES: Final = 4 << 20
"""Bytes of a mean that hosts exchange at a time."""
LINK, HOSTS, BETWEEN, SERVER = "the link of workers", "hosts", "between", "the link of servers"

Route = tuple[tuple[int, ...], float]
"""Resources on the path, and the one-way latency in seconds."""

Exchange = tuple[float, tuple[int, ...], float]
"""A collective: bytes that each of its links carries, the links, and the total latency in seconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link: capacity up and down in bits per second, and one-way latency in seconds."""

    up: float = inf
    down: float = inf
    latency: float = 0.0

    def text(self, default: float = 0.0) -> str:
        """Return its text; the latency is left out where it equals `default`."""
        up, down = _format_quantity(self.up, RATES), _format_quantity(self.down, RATES)
        speed = up if up == down else f"{up} up {down} down"
        return speed if self.latency == default else f"{speed} {_format_quantity(self.latency, LATENCIES)}"


@dataclass(frozen=True, slots=True)
class Network:
    """A network; its `str` is the canonical text, which `parse` reads."""

    link: Link = Link()
    """Link of each worker; with hosts: inside a host."""
    hosts: int = 0
    """Number of workers per host; 0 without hosts."""
    between: Link | None = None
    """Link of each host; None without hosts."""
    server: Link | None = None
    """Link of each shard; None: that of a worker, or of a host."""
    with_workers: bool = False
    """True if shard s runs on the machine of worker s."""
    in_worker: bool = False
    """True if all shards run in the process of worker 0, and share its processor where processors are limited."""
    loss: float = 0.0
    """Fraction of packets that are lost."""
    reduce: Literal["ring", "tree"] = "ring"
    burst: float = 0.0
    """Bytes that an idle link carries immediately."""

    def __str__(self) -> str:
        """Return the canonical text."""
        link, between, server = self.link, self.between, self.server
        parts = [f"hosts of {self.hosts} on {link.text()}" if self.hosts else link.text()]
        parts += [f"{between.text(link.latency)} between"] if between else []
        parts += [f"server {server.text((between or link).latency)}"] if server else []
        parts += ["servers with workers"] if self.with_workers else []
        parts += ["servers in worker 0"] if self.in_worker else []
        parts += [f"burst {_format_quantity(self.burst, SIZES)}"] if self.burst else []
        parts += [f"loss {_format_decimal(Decimal(repr(self.loss)).scaleb(2))}%"] if self.loss else []
        parts += [self.reduce] if self.reduce != "ring" else []
        return ", ".join(parts)


def parse(text: str) -> Network:
    """Parse the text of `--network`.

    >>> print(parse("TREE, 1gbit/s down 0.5Gbit/s up 1500us, loss 1%"))
    500Mbit/s up 1Gbit/s down 1.5ms, loss 1%, tree

    Raises LaunchError, which marks the invalid word.
    """
    words = Words(text, "--network", "100Mbit/s 20ms", "a speed, like 100Mbit/s")
    parts: dict[str, Any] = {}
    starts: dict[str, int] = {}
    for start in words.listed(","):
        for name, value in _part(words).items():
            if name in parts:
                raise words.refused(f"{name} only once", start)
            parts[name], starts[name] = value, start
    if HOSTS in parts and BETWEEN not in parts:
        raise words.refused("also what is between hosts, like `1Gbit/s 1ms between`", starts[HOSTS])
    if BETWEEN in parts and HOSTS not in parts:
        raise words.refused("also `hosts of 8 on 10Gbit/s`, or no `between`", starts[BETWEEN])
    link = parts.get(LINK, _ParsedLink(inf, inf, None)).link()
    between = parts[BETWEEN].link(link.latency) if BETWEEN in parts else None
    server = parts.get(SERVER)
    return Network(
        link,
        parts.get(HOSTS, 0),
        between,
        server.link((between or link).latency) if isinstance(server, _ParsedLink) else None,
        with_workers=server == "with",
        in_worker=server == "in",
        loss=parts.get("loss", 0.0),
        reduce=parts.get("ring or tree", "ring"),
        burst=parts.get("burst", 0.0),
    )


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

    >>> links = Links(parse("100Mbit/s 20ms"), workers=2, shards=1)
    >>> links.capacities[links.up(0)], links.path(0, -1)
    (12500000.0, ((0, 5), 0.02))
    """

    def __init__(self, network: Network, workers: int, shards: int = 0) -> None:
        self.capacities: list[float] = []
        """Capacity of each resource in bytes per second."""
        self.burst = network.burst
        """Bytes that an idle link carries immediately."""
        self.in_worker = network.in_worker
        """True if the shards run in the process of worker 0."""
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
        net, everyone = self._network, range(self._workers)
        self._first_resource = [self._add(net.link) for _ in everyone]
        hosts = self._first_resource
        if net.between:
            hosts = [self._add(net.between) for _ in range(0, self._workers, net.hosts)]
        inside, outside = (
            [self._port(resource) for resource in self._first_resource],
            [self._port(resource) for resource in hosts],
        )
        for worker in everyone:
            host = worker // (net.hosts or 1)
            self._places.append(_Place(worker, host, inside[worker], outside[host], (net.between or net.link).latency))

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


class _ParsedLink(NamedTuple):
    """A parsed link; a latency of None (not given) differs from 0."""

    up: float
    down: float
    latency: float | None

    def link(self, default: float = 0.0) -> Link:
        return Link(self.up, self.down, default if self.latency is None else self.latency)


def _part(words: Words) -> dict[str, Any]:
    """Consume one part of the text and return its values by name."""
    if words.skip("hosts"):
        words.take("of")
        hosts = words.whole(1, 10**9 - 1, "how many workers a host has: a whole number of at least 1")
        words.take("on")
        return {LINK: _parsed_link(words, "a speed, like 10Gbit/s"), HOSTS: hosts}
    if words.skip("servers"):
        location = words.take("with", "in")
        for word in ("workers",) if location == "with" else ("worker", "0"):
            words.take(word)
        return {SERVER: location}
    if words.skip("server"):
        return {SERVER: _parsed_link(words, "a speed, like 1Gbit/s")}
    if words.skip("loss"):
        return {"loss": words.quantity(PERCENT, 0, nextafter(1, 0), "from 0% to less than 100%")}
    if words.skip("burst"):
        return {"burst": words.quantity(SIZES, expected="a number of bytes, like 32kB")}
    if words.next.lower() in ("ring", "tree"):
        return {"ring or tree": words.take("ring", "tree")}
    link = _parsed_link(
        words, "a speed above 0 (like 100Mbit/s), instant, hosts, server, servers, burst, loss, ring or tree"
    )
    return {BETWEEN if words.skip("between") else LINK: link}


def _parsed_link(words: Words, expected: str) -> _ParsedLink:
    up = down = _speed(words, expected)
    if words.skip("up"):
        down = _speed(words, "the speed down, like `20Mbit/s down`")
        words.take("down")
    elif words.skip("down"):
        up = _speed(words, "the speed up, like `20Mbit/s up`")
        words.take("up")
    has_latency = words.next[:1].isdigit()
    return _ParsedLink(up, down, words.quantity(TIMES, expected="a time, like 20ms") if has_latency else None)


def _speed(words: Words, expected: str) -> float:
    return inf if words.skip("instant") else words.quantity(RATES, SMALLEST, expected=expected)


def _format_decimal(number: Decimal) -> str:
    """Return the decimal notation without an exponent."""
    return f"{number.normalize():f}"


def _format_quantity(value: float, units: Mapping[str, Decimal]) -> str:
    """Return the exact number in the largest unit in which it is at least 1, or in the last one."""
    if value == inf:
        return "instant"
    exact = Decimal(repr(value))
    unit = next((unit for unit, scale in units.items() if exact >= scale), [*units][-1])
    return f"{_format_decimal(exact / units[unit])}{unit}"
