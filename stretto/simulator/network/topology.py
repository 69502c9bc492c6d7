"""The network of a simulation: what a person types for `--network`, and the links that it stands for.

Parts go by commas, in any order. Speeds are in bit/s, kbit/s, Mbit/s, Gbit/s or Tbit/s, times in us, ms or s.

| part | meaning |
| --- | --- |
| `100Mbit/s 20ms` | the link of every worker, up and down, and its one-way latency (default 0) |
| `100Mbit/s up 20Mbit/s down` | up and down apart |
| `instant` | infinitely fast (in the place of any speed); the network when nothing is typed |
| `hosts of 8 on 10Gbit/s 50us` | in place of a worker's link: groups of 8 workers, and the links inside one host |
| `1Gbit/s 1ms between` | with hosts: the uplink and the downlink that all workers of one host share |
| `server 1Gbit/s 5ms` | the link of each shard of the parameter server; default: as a worker's, or a host's |
| `servers with workers` | shard s is on the machine of worker s and has no link of its own |
| `servers in worker 0` | all shards are in its process, as where a script was started as a worker of several hosts |
| `burst 32kB` | after a rest a link carries so many bytes at once, as one behind a token bucket does (Linux's tbf) |
| `loss 1%` | lost packets: a link carries that much less |
| `ring`, `tree` | how an all-reduce goes; default: ring |

`between` and `server` take the latency of the link they stand in for when none is typed. The latency of `server`
holds for whatever goes to a shard or comes from one.
Loss is a lower bound of the harm: capacity times (1 - p) is the goodput of a sender that does nothing but send again;
TCP slows down with 1 / sqrt(p) besides (Mathis et al. 1997).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import inf
from typing import Final, Literal, NamedTuple, NoReturn

from stretto.errors import LaunchError, explain

EXAMPLE = '--network "100Mbit/s 20ms"'
RATES: Final = {"tbit/s": 12, "gbit/s": 9, "mbit/s": 6, "kbit/s": 3, "bit/s": 0}
TIMES: Final = {"s": 0, "ms": -3, "us": -6}
SIZES: Final = {"mb": 6, "kb": 3, "b": 0}
SHOWN: Final = {"tbit/s": "Tbit/s", "gbit/s": "Gbit/s", "mbit/s": "Mbit/s", "mb": "MB", "kb": "kB", "b": "B"}
"""The units whose usual spelling has a capital."""

NUMBER = r"[0-9]+(?:\.[0-9]*)?"
QUANTITY = re.compile(rf"({NUMBER}) *([a-z/%]+)", re.ASCII)
WORD = re.compile(rf"{NUMBER} *(?:[kmgt]?bit/s|[km]?b|[mu]?s|%)(?![^\s,])|,|[^\s,]+", re.ASCII | re.IGNORECASE)

Route = tuple[tuple[int, ...], float]
"""Resources, and one-way latency in seconds."""

Exchange = tuple[float, tuple[int, ...], float]
"""The bytes that every link of it carries, the links, and the seconds of latency in all."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one link carries, in bits per second, and the one-way latency in seconds of what goes over it."""

    up: float = inf
    down: float = inf
    latency: float = 0.0

    def typed(self, default: float = 0.0) -> str:
        """As it is typed where this latency is the default."""
        up, down = _written(self.up, RATES), _written(self.down, RATES)
        speed = up if up == down else f"{up} up {down} down"
        return speed if self.latency == default else f"{speed} {_written(self.latency, TIMES)}"


@dataclass(frozen=True, slots=True)
class Network:
    """A network; printed it is the text that `parse` reads."""

    link: Link = Link()
    """Of each worker; with hosts: inside a host."""
    hosts: int = 0
    """How many workers share a host; 0: there are no hosts."""
    between: Link | None = None
    """Of each host, where there are hosts."""
    server: Link | None = None
    """Of each shard; None: as a worker's, or as a host's."""
    with_workers: bool = False
    """Whether shards are on the machines of workers."""
    in_worker: bool = False
    """Whether all shards are in the process of worker 0, and share its processor where processors are counted."""
    loss: float = 0.0
    """The part of packets that is lost."""
    reduce: Literal["ring", "tree"] = "ring"
    burst: float = 0.0
    """The bytes that every link carries at once after it has carried nothing for a while."""

    def __str__(self) -> str:
        """The canonical text."""
        link, between, server = self.link, self.between, self.server
        parts = [f"hosts of {self.hosts} on {link.typed()}" if self.hosts else link.typed()]
        parts += [f"{between.typed(link.latency)} between"] if between else []
        parts += [f"server {server.typed((between or link).latency)}"] if server else []
        parts += ["servers with workers"] if self.with_workers else []
        parts += ["servers in worker 0"] if self.in_worker else []
        parts += [f"burst {_written(self.burst, SIZES)}"] if self.burst else []
        parts += [f"loss {_plain(Decimal(repr(self.loss)).scaleb(2))}%"] if self.loss else []
        parts += [self.reduce] if self.reduce != "ring" else []
        return ", ".join(parts)


def parse(text: str) -> Network:
    """Read what was typed for `--network`.

    >>> print(parse("TREE, 1gbit/s down 0.5Gbit/s up 1500us, loss 1%"))
    500Mbit/s up 1Gbit/s down 1.5ms, loss 1%, tree

    Raises LaunchError, which marks the word that cannot be.
    """
    words = _Words(text)
    parts = _Parts(words)
    parts.read()
    while words.now:
        words.expect(",")
        parts.read()
    return parts.network()


class _Port(NamedTuple):
    """The way out of somewhere and the way in; () where it is infinitely fast."""

    up: tuple[int, ...]
    down: tuple[int, ...]


class _End(NamedTuple):
    """Where a worker or a shard is: its machine and host, the ports of both, and how late what crosses hosts is."""

    machine: int
    host: int
    inside: _Port
    outside: _Port
    latency: float


class Links:
    """The links of a network with so many workers and shards, as resources of a `Fluid`.

    Ends have numbers: worker w is w, shard s is -1 - s. The coordinator is with shard 0, so end -1 is always there.
    With more shards than workers, `servers with workers` puts shard s on the machine of worker s mod N.

    >>> links = Links(parse("100Mbit/s 20ms"), workers=2, shards=1)
    >>> links.capacities[links.up(0)], links.path(0, -1)
    (12500000.0, ((0, 5), 0.02))
    """

    def __init__(self, network: Network, workers: int, shards: int = 0) -> None:
        self.capacities: list[float] = []
        """Bytes per second of each resource."""
        self.burst = network.burst
        """The bytes that each carries at once after a rest."""
        self.in_worker = network.in_worker
        """Whether the shards are in the process of worker 0."""
        self._network = network
        self._workers = workers
        self._first: list[int] = []
        self._ends: list[_End] = []
        self._add_workers()
        self._add_shards(max(shards, 1))

    def up(self, end: int) -> int:
        """The resource that carries what this end sends (with hosts: what it sends inside its host)."""
        return self._first[end]

    def down(self, end: int) -> int:
        """The resource that carries what comes to this end (with hosts: what comes from inside its host)."""
        return self._first[end] + 1

    def machine(self, end: int) -> int:
        """Where an end is: a worker's machine has its number."""
        return self._ends[end].machine

    def path(self, source: int, target: int) -> Route:
        """The resources from one end to another, and the one-way latency.

        Inside a host these are the sender's link up and the receiver's link down, between hosts the uplink of one and
        the downlink of the other. What is infinitely fast is left out; on one machine there is nothing on the way.
        """
        here, there = self._ends[source], self._ends[target]
        if here.host != there.host:
            return here.outside.up + there.outside.down, (here if source < 0 else there).latency
        if here.machine != there.machine:
            return here.inside.up + there.inside.down, self._network.link.latency
        return (), 0.0

    def all_reduce(self, nbytes: float, among: Sequence[int] | None = None) -> Exchange:
        """The sum of `nbytes` of each of N workers, to all of them; of every worker when `among` is not given.

        As a ring T = 2 (N-1)/N B/b + 2 (N-1) L, B bytes, b the slowest link, L the slowest hop (Thakur et al. 2005;
        Patarasuk & Yuan 2009). It goes through the workers in order, and so crosses the uplink of each host once.
        As a binomial tree, a reduction and then a broadcast: T = 2 ceil(log2 N) (B/b + L). Its hops come one after
        another; that all of them are as slow as the slowest link is an upper bound.
        """
        members = self._members(among)
        if self._network.reduce == "ring":
            return self._over(_ring(members), 2 * (len(members) - 1), nbytes / len(members))
        down = _tree(members)
        up = [(child, parent) for parent, child in down]
        return self._over(up + down, 2 * _depth(members), nbytes)

    def gather(self, nbytes: float, among: Sequence[int] | None = None) -> Exchange:
        """To each of N workers the `nbytes` of each, as a ring: T = (N-1) (B/b + L)."""
        members = self._members(among)
        return self._over(_ring(members), len(members) - 1, nbytes)

    def broadcast(self, root: int, nbytes: float, among: Sequence[int] | None = None) -> Exchange:
        """To each of N workers what worker `root` has, as a binomial tree: T = ceil(log2 N) (B/b + L)."""
        members = self._members(among)
        first = members.index(root)
        members = members[first:] + members[:first]
        return self._over(_tree(members), _depth(members), nbytes)

    def _over(self, hops: Iterable[tuple[int, int]], steps: int, nbytes: float) -> Exchange:
        """So many steps, one after another, in which each of these hops may carry so many bytes."""
        routes = [self.path(*hop) for hop in hops]
        links = dict.fromkeys(resource for resources, _ in routes for resource in resources)
        return steps * nbytes, tuple(links), steps * max((latency for _, latency in routes), default=0.0)

    def _members(self, among: Sequence[int] | None) -> list[int]:
        return list(range(self._workers)) if among is None else sorted(among)

    def _add_workers(self) -> None:
        net, everyone = self._network, range(self._workers)
        self._first = [self._add(net.link) for _ in everyone]
        hosts = self._first
        if net.between:
            hosts = [self._add(net.between) for _ in range(0, self._workers, net.hosts)]
        inside, outside = [self._port(first) for first in self._first], [self._port(first) for first in hosts]
        for worker in everyone:
            host = worker // (net.hosts or 1)
            self._ends.append(_End(worker, host, inside[worker], outside[host], (net.between or net.link).latency))

    def _add_shards(self, shards: int) -> None:
        """Put shard s at place -1 - s of the lists."""
        link = self._network.server or self._network.between or self._network.link
        for shard in reversed(range(shards)):
            if self._network.with_workers or self._network.in_worker:
                host = shard % self._workers if self._network.with_workers else 0
                self._first.append(self._first[host])
                self._ends.append(self._ends[host])
            else:
                self._first.append(self._add(link))
                port = self._port(self._first[-1])
                self._ends.append(_End(-1 - shard, -1 - shard, port, port, link.latency))

    def _add(self, link: Link) -> int:
        """Two more resources, up and down; the number of the first."""
        self.capacities += [rate / 8 * (1 - self._network.loss) for rate in (link.up, link.down)]
        return len(self.capacities) - 2

    def _port(self, first: int) -> _Port:
        up, down = [(one,) if self.capacities[one] < inf else () for one in (first, first + 1)]
        return _Port(up, down)


def _ring(members: list[int]) -> list[tuple[int, int]]:
    return list(zip(members, members[1:] + members[:1], strict=True))


def _tree(members: list[int]) -> list[tuple[int, int]]:
    """From each parent to its child: without the last 1 of its place in binary, a child's place is its parent's."""
    return [(members[place & (place - 1)], members[place]) for place in range(1, len(members))]


def _depth(members: list[int]) -> int:
    """Rounded up, the logarithm to base 2 of their number."""
    return (len(members) - 1).bit_length()


class _Typed(NamedTuple):
    """A link as it was typed: no latency is not the same as a latency of 0."""

    up: float
    down: float
    latency: float | None

    def link(self, default: float = 0.0) -> Link:
        return Link(self.up, self.down, default if self.latency is None else self.latency)


class _Words:
    """The words of a text, one after another, in lower case; `now` is "" at the end."""

    def __init__(self, text: str) -> None:
        self._text = re.sub(r"\s", " ", text)
        self._words = [(match[0].lower(), match.start()) for match in WORD.finditer(text)]
        self._words.append(("", len(text)))
        self.at = 0

    @property
    def now(self) -> str:
        return self._words[self.at][0]

    def skip(self, word: str) -> bool:
        """Whether this word comes now; if so, go on behind it."""
        found = self.now == word
        self.at += found
        return found

    def expect(self, *words: str) -> None:
        for word in words:
            if not self.skip(word):
                self.refuse(f"`{word}`" if word != "," else "a comma, or the end")

    def whole(self) -> int:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", self.now, re.ASCII):
            self.refuse("how many workers a host has: a whole number of at least 1")
        self.at += 1
        return int(self._words[self.at - 1][0])

    def quantity(self, units: dict[str, int], good: Callable[[float], bool], expected: str) -> float:
        """A number with one of these units (and the power of ten that each stands for) that is good."""
        match = QUANTITY.fullmatch(self.now)
        value = float(Decimal(match[1]).scaleb(units[match[2]])) if match and match[2] in units else -1.0
        if not good(value):
            self.refuse(expected)
        self.at += 1
        return value

    def refuse(self, expected: str, at: int | None = None) -> NoReturn:
        """Say what should stand where the words are now, or at word number `at`."""
        word, start = self._words[self.at if at is None else at]
        mark = f"  {self._text}\n  {' ' * start}{'^' * max(len(word), 1)}"
        got = self._text[start : start + len(word)] or "the end"
        raise LaunchError(
            explain(f"--network cannot be read here:\n{mark}", got=got, expected=expected, to_type=EXAMPLE)
        )


class _Parts:
    """The parts that were typed so far, each with the number of its first word."""

    def __init__(self, words: _Words) -> None:
        self._words = words
        self._at: dict[str, int] = {}
        self._link = self._between = self._server = _Typed(inf, inf, None)
        self._hosts = 0
        self._loss = self._burst = 0.0
        self._reduce: Literal["ring", "tree"] = "ring"

    def read(self) -> None:
        """Read one part. What is said in it may not have been said before."""
        at = self._words.at
        for name in self._part():
            if name in self._at:
                self._words.refuse(f"{name} only once", at)
            self._at[name] = at

    def _part(self) -> tuple[str, ...]:
        words = self._words
        if words.skip("hosts"):
            words.expect("of")
            self._hosts = words.whole()
            words.expect("on")
            self._link = self._typed("a speed, like 10Gbit/s")
            return "the link of workers", "hosts"
        if words.skip("servers"):
            if words.skip("in"):
                words.expect("worker", "0")
                return "the link of servers", "servers in worker 0"
            words.expect("with", "workers")
            return "the link of servers", "servers with workers"
        if words.skip("server"):
            self._server = self._typed("a speed, like 1Gbit/s")
            return "the link of servers", "server"
        if words.skip("loss"):
            self._loss = words.quantity({"%": -2}, lambda part: 0 <= part < 1, "from 0% to less than 100%")
            return ("loss",)
        if words.skip("burst"):
            self._burst = words.quantity(SIZES, lambda size: 0 <= size < inf, "a number of bytes, like 32kB")
            return ("burst",)
        if words.skip("tree"):
            self._reduce = "tree"
            return ("ring or tree",)
        if words.skip("ring"):
            return ("ring or tree",)
        link = self._typed(
            "a speed above 0 (like 100Mbit/s), instant, hosts, server, servers, burst, loss, ring or tree"
        )
        if words.skip("between"):
            self._between = link
            return ("between",)
        self._link = link
        return ("the link of workers",)

    def network(self) -> Network:
        """All parts together."""
        if "hosts" in self._at and "between" not in self._at:
            self._words.refuse("also what is between hosts, like `1Gbit/s 1ms between`", self._at["hosts"])
        if "between" in self._at and "hosts" not in self._at:
            self._words.refuse("also `hosts of 8 on 10Gbit/s`, or no `between`", self._at["between"])
        link = self._link.link()
        between = self._between.link(link.latency) if "between" in self._at else None
        server = self._server.link((between or link).latency) if "server" in self._at else None
        beside, inside = "servers with workers" in self._at, "servers in worker 0" in self._at
        return Network(link, self._hosts, between, server, beside, inside, self._loss, self._reduce, self._burst)

    def _typed(self, expected: str) -> _Typed:
        words = self._words
        up = down = self._speed(expected)
        if words.skip("up"):
            down = self._speed("the speed down, like `20Mbit/s down`")
            words.expect("down")
        elif words.skip("down"):
            up = self._speed("the speed up, like `20Mbit/s up`")
            words.expect("up")
        late = words.now[:1].isdigit()
        return _Typed(up, down, words.quantity(TIMES, lambda s: 0 <= s < inf, "a time, like 20ms") if late else None)

    def _speed(self, expected: str) -> float:
        if self._words.skip("instant"):
            return inf
        return self._words.quantity(RATES, lambda rate: 0 < rate < inf, expected)


def _plain(number: Decimal) -> str:
    """Digits and a point, without an exponent."""
    return f"{number.normalize():f}"


def _written(value: float, units: dict[str, int]) -> str:
    """The number in the largest unit that leaves it at least 1, exactly."""
    if value == inf:
        return "instant"
    exact = Decimal(repr(value))
    unit = next((unit for unit, power in units.items() if exact.scaleb(-power) >= 1), min(units, key=units.__getitem__))
    return f"{_plain(exact.scaleb(-units[unit]))}{SHOWN.get(unit, unit)}"
