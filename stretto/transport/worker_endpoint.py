"""Address of a worker, as the others know it."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from zmq.utils import z85

from stretto.errors import TransportError, explain
from stretto.transport.noise import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a worker: where it listens, its public key, and the name of its machine, empty if unknown."""

    host: str
    port: int
    public: bytes
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port} {self.public.decode()} {self.machine}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint that a text describes.

        >>> str(Endpoint.parse("10.0.0.1:7 rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"))
        '10.0.0.1:7 rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'
        """
        place, public, machine = (*text.split(" "), "", "")[:3]
        host, _, port = place.rpartition(":")
        if not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16 or not _is_key(public):
            problem, expected = "a worker's address can't be read", "IP address:port, a space, and a public key"
            to_type = "the same options and the same version of Stretto on all hosts"
            raise TransportError(explain(problem, got=repr(text[:100]), expected=expected, to_type=to_type))
        return cls(host, int(port), public.encode(), machine)


def _is_host(text: str) -> bool:
    """Return True for an IP address: a name would have to be looked up."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_key(text: str) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False
