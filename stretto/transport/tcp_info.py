"""What the kernel knows of a TCP connection: the bytes that went over it."""

from __future__ import annotations

import os
import socket
import struct

# Offsets into Linux's struct tcp_info (include/uapi/linux/tcp.h).
TCP_INFO_BYTES = 256
BYTES_ACKED_AT = 120
BYTES_RECEIVED_AT = 128
BYTES_SENT_AT = 200


def tcp_bytes(descriptor: int) -> tuple[int, int] | None:
    """Bytes sent, repeats included, and received; None where the system does not tell or it is no such socket."""
    return _told(descriptor, BYTES_SENT_AT)


def tcp_arrived(descriptor: int) -> tuple[int, int] | None:
    """Bytes that have arrived at the other end, and here; None likewise."""
    return _told(descriptor, BYTES_ACKED_AT)


def _told(descriptor: int, sent_at: int) -> tuple[int, int] | None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except (OSError, AttributeError):
        return None
    if len(info) < BYTES_SENT_AT + 8:
        return None
    return struct.unpack_from("<Q", info, sent_at)[0], struct.unpack_from("<Q", info, BYTES_RECEIVED_AT)[0]
