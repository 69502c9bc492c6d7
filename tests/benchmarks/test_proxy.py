"""The proxy of the hunt passes on every byte in its order; in a trouble later, or a part of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.proxy import TROUBLES, proxy

LIMIT_S = 60.0
MESSAGE = bytes(range(256)) * 2000


@pytest.fixture(scope="module")
def control() -> Iterator[tuple[str, int]]:
    """Yield the address of a proxy."""
    with proxy() as address:
        host, _, port = address.rpartition(":")
        yield host, int(port)


def ask(control: tuple[str, int], **request: Any) -> list[str]:
    with socket.create_connection(control, LIMIT_S) as connection, connection.makefile("rw") as lines:
        lines.write(json.dumps({"worker": "1.0", **request}) + "\n")
        lines.flush()
        return list(json.loads(lines.readline()))


def received(control: tuple[str, int], message: bytes) -> tuple[bytes, float]:
    """Return what comes out of the proxy, and after how many seconds, of a message that is sent through it."""
    arrived = list[bytes]()

    def take() -> None:
        with there.accept()[0] as connection:
            while True:
                try:
                    piece = connection.recv(1 << 20)
                except ConnectionResetError:
                    return
                if not piece:
                    return
                arrived.append(piece)

    with socket.create_server(("127.0.0.1", 0)) as there:
        taker = threading.Thread(target=take)
        taker.start()
        (address,) = ask(control, addresses=["{}:{}".format(*there.getsockname())])
        host, _, port = address.rpartition(":")
        began = time.monotonic()
        with socket.create_connection((host, int(port)), LIMIT_S) as connection:
            try:
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                assert not arrived or b"".join(arrived) != message
            taker.join(LIMIT_S)
    return b"".join(arrived), time.monotonic() - began


def test_without_a_trouble_a_message_arrives_as_it_was_sent(control: tuple[str, int]) -> None:
    assert received(control, MESSAGE)[0] == MESSAGE


@pytest.mark.parametrize("name", ["DELAY", "LOSS", "STALL"])
def test_message_in_a_trouble_arrives_whole_and_late(control: tuple[str, int], name: str) -> None:
    began = time.monotonic()
    ask(control, trouble=name)
    data, _ = received(control, MESSAGE)
    waited_s = TROUBLES[name].waits_s
    assert data == MESSAGE
    assert time.monotonic() - began > waited_s / 2


def test_torn_connection_has_the_beginning_of_a_message_and_no_more(control: tuple[str, int]) -> None:
    ask(control, trouble="TEAR")
    data, _ = received(control, MESSAGE)
    assert MESSAGE.startswith(data) and 0 < len(data) < len(MESSAGE)
    time.sleep(TROUBLES["TEAR"].lasts_s)
    assert received(control, MESSAGE)[0] == MESSAGE


def test_trouble_is_that_of_one_process(control: tuple[str, int]) -> None:
    ask(control, trouble="TEAR", worker="0.0")
    assert received(control, MESSAGE)[0] == MESSAGE
