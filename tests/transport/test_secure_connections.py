"""Ends of encrypted connections: last messages, aborts, and connections that end in one direction alone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stretto.collective_ops import Exchange
from stretto.errors import BrokenTransportError
from stretto.transport import encrypted_sockets
from stretto.transport.secure_connections import SendingConnection
from tests.encrypted_ends import LIMIT_S, encrypted


def test_last_messages_arrive_at_a_worker_that_can_send_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, tensors = encrypted(2), [torch.full((3000,), float(number)) for number in range(64)]
    sender, receiver = ends[1]._sockets._senders[0], ends[1]._sockets._receivers[0]
    messages, is_lost = receiver.messages, threading.Event()

    def late() -> Iterator[Any]:
        """Yield messages once the sending connection has been lost for a while."""
        if sender.lost_at is None or time.monotonic() < sender.lost_at + 0.2:
            return iter(())
        is_lost.set()
        return messages()

    monkeypatch.setattr(receiver, "messages", late)
    handles = [[end.submit(Exchange(1 - end.worker, one)) for one in tensors] for end in ends]
    assert all(torch.equal(handle.wait(), one) for handle, one in zip(handles[0], tensors, strict=True))
    ends[0].close()
    assert is_lost.wait(LIMIT_S)
    assert all(torch.equal(handle.wait(), one) for handle, one in zip(handles[1], tensors, strict=True))
    with pytest.raises(BrokenTransportError, match="worker 0 has failed, or has left"):
        ends[1].submit(Exchange(0, torch.ones(4))).wait()
    ends[1].close()


def test_an_abort_ends_connections_whose_sockets_a_child_process_has() -> None:
    """The processes of a DataLoader have such sockets."""
    ends = encrypted(2)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    try:
        waiting = ends[1].submit(Exchange(0, torch.ones(4)))
        ends[0].abort()
        with pytest.raises(BrokenTransportError, match="worker 0 has failed, or has left"):
            waiting.wait()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    for end in ends:
        end.close()


def test_a_connection_that_ends_in_one_direction_ends_the_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_sockets, "LINGER_S", 0.1)
    sent = list[SendingConnection]()
    proceed = SendingConnection.proceed

    def noting(self: SendingConnection) -> None:
        sent.append(self)
        proceed(self)

    monkeypatch.setattr(SendingConnection, "proceed", noting)
    ends = encrypted(2)
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(1 << 20))) for end in ends]
    assert all(torch.equal(one.wait(), torch.ones(1 << 20)) for one in waiting)
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(4), 1)) for end in ends[:1]]
    assert sent[0].socket is not None
    sent[0].socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenTransportError, match="worker . has failed, or has left|was aborted"):
        waiting[0].wait()
    for end in ends:
        end.close()
