"""A joining launcher's connection to the coordinator, until its workers have numbers and code."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from stretto.errors import LaunchError, explain
from stretto.membership.invitations import AskToJoin, CodePart, GetCode, Invitation, LauncherRequest
from stretto.process_config import KeyTexts
from stretto.security import JOINING, address_toward, use_keys, worker_keys

Reply = TypeVar("Reply")
CONNECT_S, REPLY_S = 5.0, 20.0
"""Limits of the waits for a connection and for a reply: the coordinator may be being restarted."""
SHOWN_S = 5.0
"""Seconds between two lines on the code that has arrived."""
CLOSED_S, MOST_ATTEMPTS = 2.0, 32
"""Seconds after which an attempt to connect with a service has failed, and largest number of concurrent ones."""
REPEAT_MS = 500
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
MAX_REFUSALS = 3


class JoinClient:
    """Connection to the coordinator of a run. Raises LaunchError if there is no coordinator at the address."""

    def __init__(self, address: str, keys: KeyTexts | None, role: bytes = JOINING) -> None:
        self._address = address
        self.own_address = _connected_from(address)
        self._context: Any = zmq.Context()
        self._dealer: Any = self._context.socket(zmq.DEALER)
        use_keys(self._dealer, b"%s %s" % (role, os.urandom(16).hex().encode()), worker_keys(keys))
        self._monitor: Any = self._dealer.get_monitor_socket(REFUSALS)
        self._refused = 0
        self._dealer.connect(f"tcp://{address}")

    def __enter__(self) -> JoinClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dealer.disable_monitor()
        self._context.destroy(linger=0)

    def ask(self, workers: int, first: int | None = None, replaces: bool = False) -> Invitation:
        """Return the invitation for this many workers, of the numbers from `first` on if they are reserved.

        With `replaces` they are those of an earlier launcher, which has been lost.
        """
        request = AskToJoin(workers, first, replaces)
        return self._reply(request, lambda reply: reply if isinstance(reply, Invitation) else None)

    def code(self, note: Callable[[str], None]) -> bytes:
        """Return the archive of the code; `note` shows how much has arrived, if that takes long."""
        code, shown_at = b"", time.monotonic()
        while (part := self._part(len(code))).part:
            code += part.part
            if time.monotonic() - shown_at > SHOWN_S:
                note(f"{len(code) / 1e6:.1f} MB of the code of the run have arrived")
                shown_at = time.monotonic()
        if part.problem:
            raise LaunchError(part.problem)
        return code

    def _part(self, offset: int) -> CodePart:
        def at_offset(reply: Invitation | CodePart) -> CodePart | None:
            return reply if isinstance(reply, CodePart) and reply.offset == offset else None

        return self._reply(GetCode(offset), at_offset)

    def _reply(self, request: LauncherRequest, wanted: Callable[[Invitation | CodePart], Reply | None]) -> Reply:
        """Return the wanted reply to a request, which is repeated until it arrives."""
        limit = time.monotonic() + REPLY_S
        while time.monotonic() < limit:
            self._dealer.send(msgspec.msgpack.encode(request))
            while self._dealer.poll(REPEAT_MS if not self._is_refused() else 0):
                if not (data := self._dealer.recv()):  # the code is being packed
                    limit = time.monotonic() + REPLY_S
                    continue
                if (found := wanted(msgspec.msgpack.decode(data, type=Invitation | CodePart))) is not None:
                    return found
            if self._is_refused():
                break
        got = "it refuses the key" if self._is_refused() else f"no reply in {REPLY_S:g} s"
        problem, expected = f"the coordinator at {self._address} does not reply", "the key of this run"
        to_type = "the address and a copy of the join.key that belong to the same run"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))

    def _is_refused(self) -> bool:
        """Return True once the key has been refused, or the connection often enough: once may be a restart."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._refused += MAX_REFUSALS if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else 1
        return self._refused >= MAX_REFUSALS


def closed_ports(addresses: Sequence[str]) -> list[str]:
    """Return those of these addresses that this machine cannot connect with."""

    def is_closed(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CLOSED_S).close()
        except OSError:
            return True
        return False

    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), MOST_ATTEMPTS)) as attempts:
        found = list(attempts.map(is_closed, addresses))
    return [address for address, closed in zip(addresses, found, strict=True) if closed]


def _connected_from(address: str) -> str:
    """Return the address of this machine on the way to the coordinator, which must accept a connection."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
        return address_toward(host)
    except OSError as error:
        problem, expected = "the run has ended, or this machine cannot reach it", f"a coordinator at {address}"
        to_type = "stretto run --listen ADDRESS:PORT ..., with an address that both machines know"
        raise LaunchError(explain(problem, got=str(error), expected=expected, to_type=to_type)) from error
