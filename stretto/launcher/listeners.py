"""Listening sockets that the launcher opens and child processes inherit, so that no other process takes the port."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator

import psutil

from stretto.errors import LaunchError, explain
from stretto.free_ports import PortsInUseError, at_free_port

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""Loopback interface."""
BACKLOG = 1024


@contextlib.contextmanager
def listening(port: int | None = None, host: str | None = None, ports: range | None = None) -> Iterator[socket.socket]:
    """Listen on a port, by default a free one of `ports`, of the address `host`, by default loopback.

    Raises LaunchError.
    """

    def opened(one: int) -> socket.socket:
        return socket.create_server((host or LOOPBACK_ADDRESS, one), backlog=BACKLOG)

    try:
        listener = opened(port or 0) if port is not None or ports is None else at_free_port(ports, opened)
    except OSError as error:
        if host is not None and error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise _not_ours(host) from error
        raise _refused(port, error) from error
    with listener:
        yield listener


def is_address(text: str) -> bool:
    """Return True for HOST:PORT.

    >>> is_address("10.0.0.1:7878"), is_address("runs/one"), is_address("host:99999")
    (True, False, False)
    """
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


def interface_of(address: str) -> str:
    """Return the network interface with this address, or the loopback interface."""
    for name, ends in psutil.net_if_addrs().items():
        if any(end.address == address for end in ends):
            return str(name)
    return LOOPBACK


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, that of loopback first."""
    return [end.address for ends in psutil.net_if_addrs().values() for end in ends if end.family == socket.AF_INET]


def _not_ours(host: str) -> LaunchError:
    addresses = own_addresses()
    problem, expected = f"{host} is not an address of this machine", f"one of {', '.join(addresses)}"
    return LaunchError(explain(problem, got=f"--listen {host}", expected=expected, to_type=f"--listen {addresses[-1]}"))


def _refused(port: int | None, error: OSError) -> LaunchError:
    if isinstance(error, PortsInUseError):
        return LaunchError(str(error))
    if not port:
        return LaunchError(f"no port can be listened on: {error.strerror}")
    is_in_use = error.errno == errno.EADDRINUSE
    problem = f"port {port} is in use" if is_in_use else f"port {port} cannot be listened on: {error.strerror}"
    to_type = "leave --port away: a free one is taken"
    return LaunchError(explain(problem, got=port, expected="a free port", to_type=to_type))
