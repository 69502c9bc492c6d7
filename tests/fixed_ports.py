"""Ports that are used again after they were closed, and that no other process gets in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

FIRST, COUNT = 30_000, 2_700
"""Ports below the range from which the system takes a port for a connection, or for a server without a fixed port."""
_numbers = itertools.count(50 * os.getpid())


def fixed_port() -> int:
    """Return a free port of the loopback interface that this process alone uses."""
    for number in _numbers:
        port = FIRST + number % COUNT
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError
