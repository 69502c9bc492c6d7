"""Network topology of a simulation: the text of `--network`.

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

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import inf, nextafter
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
LINK, HOSTS, BETWEEN, SERVER = "the link of workers", "hosts", "between", "the link of servers"


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
