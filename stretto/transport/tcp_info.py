"""Byte counters of a TCP connection, from the kernel (TCP_INFO)."""

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
    """Return the bytes sent, retransmissions included, and received; None if the kernel has no counters for it."""
    return _told(descriptor, BYTES_SENT_AT)


def tcp_arrived(descriptor: int) -> tuple[int, int] | None:
    """Return the bytes acknowledged by the other end, and received; None if the kernel has no counters for it."""
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
