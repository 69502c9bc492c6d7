"""Listening sockets of this machine, made by the launcher and handed on, so that no port is lost in between."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from stretto.errors import LaunchError, explain

HOME = "127.0.0.1"
BACKLOG = 1024


@contextlib.contextmanager
def listening(port: int | None = None) -> Iterator[socket.socket]:
    """A socket that listens on a port, by default a free one. Raises LaunchError when it cannot."""
    try:
        listener = socket.create_server((HOME, port or 0), backlog=BACKLOG)
    except OSError as error:
        raise _refused(port, error) from error
    with listener:
        yield listener


def _refused(port: int | None, error: OSError) -> LaunchError:
    if not port:
        return LaunchError(f"no port can be listened on: {error.strerror}")
    used = error.errno == errno.EADDRINUSE
    problem = f"port {port} is in use" if used else f"port {port} cannot be listened on: {error.strerror}"
    to_type = "leave --port away: a free one is taken"
    return LaunchError(explain(problem, got=port, expected="a free port", to_type=to_type))
