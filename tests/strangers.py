"""Bytes that strangers send first to a port of ZeroMQ, where a client with a key sends a greeting and a HELLO."""

from __future__ import annotations

import random

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + random.Random(1).randbytes(120)
"""A HELLO of random bytes: its length is right, its box is not."""
FIRST_BYTES = {
    "nothing": b"",
    "half a greeting": GREETING[:20],
    "a greeting": GREETING,
    "a greeting without encryption": GREETING.replace(b"CURVE", b"NULL\0"),
    "half a HELLO": GREETING + HELLO[:100],
    "a HELLO of garbage": GREETING + HELLO,
    "garbage": random.Random(2).randbytes(5000),
    "garbage after a greeting": GREETING + random.Random(3).randbytes(5000),
    "a web request": b"GET / HTTP/1.1\r\n\r\n",
}
