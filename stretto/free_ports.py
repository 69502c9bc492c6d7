"""Ports of `--ports A-B`, to which the sockets that other machines connect with are limited."""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable
from typing import TypeVar

from stretto.errors import LaunchError, explain

Made = TypeVar("Made")
RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
LAST = (1 << 16) - 1


class PortsInUseError(OSError):
    """No port of a range is free."""


def parse(text: str) -> range:
    """Return the ports of a text for `--ports`. Raise LaunchError for any other text.

    >>> parse("20000-20003")
    range(20000, 20004)
    """
    match = RANGE.fullmatch(text.strip())
    first, last = (int(one) for one in match.groups()) if match is not None else (0, 0)
    if not 0 < first <= last <= LAST:
        problem, expected = f"{text} is no range of ports", f"the first and the last port, from 1 to {LAST}"
        raise LaunchError(explain(problem, got=f"--ports {text}", expected=expected, to_type="--ports 20000-20100"))
    return range(first, last + 1)


def at_free_port(ports: range, make: Callable[[int], Made]) -> Made:
    """Return what `make` makes at the first port that is free, from a random one on. Raise PortsInUseError."""
    begin = secrets.randbelow(len(ports))
    for place in range(len(ports)):
        try:
            return make(ports[(begin + place) % len(ports)])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    got = f"--ports {ports[0]}-{ports[-1]}, all in use on this machine"
    expected, to_type = "two free ports for each process of a worker, and one for each shard", "--ports 20000-20100"
    raise PortsInUseError(errno.EADDRINUSE, explain("no port is free", got=got, expected=expected, to_type=to_type))
