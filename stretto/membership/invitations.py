"""Invitations to a run, for launchers on other machines: numbers of workers, options, and the code.

    joining launcher                        coordinator
      | -- AskToJoin(2) -------------------> |   every message is repeated until there is a reply
      | <- Invitation((4, 5), options, ...) -|   the same numbers, however often it asks
      | -- GetCode(0) ---------------------> |
      | <- CodePart(0, bytes) -------------- |   the archive from this byte on; empty while it is packed
      | -- GetCode(1000000) ---------------> |   until a part is empty

The numbers are in the coordinator's log before they are sent, so no number is given to two launchers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, TypeAlias

import msgspec

PART_BYTES = 1 << 20
MAX_JOINING = 4096
"""Largest number of workers that one launcher may join with."""
_LAUNCHER = re.compile(rb"(joining|agent) [0-9a-f]{32}")


class AskToJoin(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Request for the numbers of the workers of this many processes; from `first` on, if they are reserved for this
    launcher.

    `replaces` is True if an earlier launcher, which has been lost, may have these numbers.
    """

    processes: Annotated[int, msgspec.Meta(ge=1, le=MAX_JOINING)]
    first: Annotated[int, msgspec.Meta(ge=0)] | None = None
    replaces: bool = False


class GetCode(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Request for the code from this byte on."""

    offset: Annotated[int, msgspec.Meta(ge=0)]


class Invitation(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Numbers of the workers that join; addresses of the services, options of the run, and versions there."""

    numbers: tuple[int, ...]
    services: tuple[str, ...]
    """Addresses of the relay and, in a run over a parameter server, of the batch dispatcher and the shards."""
    options: bytes
    """RunConfig as JSON."""
    versions: dict[str, str]
    keys: dict[str, tuple[str, str, str]] = {}
    """Keys of the workers and of their launcher, by role; empty where traffic is not encrypted."""
    incarnation: int = 0
    """Incarnation that the workers begin with: above 0 where they replace those of a lost launcher."""


class CodePart(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Part of the archive from this byte on, empty at its end; or the reason why the code cannot be sent."""

    offset: int
    part: bytes = b""
    problem: str = ""


LauncherRequest: TypeAlias = AskToJoin | GetCode
_DECODER = msgspec.msgpack.Decoder(LauncherRequest)
_ENCODER = msgspec.msgpack.Encoder()


class Inviter:
    """Replies of the coordinator to joining launchers.

    `invite` makes an invitation with the numbers that `give_numbers` returns for a launcher, its number of processes
    and the first reserved number (none if these cannot be divided into workers), and with the incarnation that
    `next_incarnation` returns for a launcher that replaces another one. `pack` returns the code as an archive, or
    raises an error whose text the joining launcher is told. It runs once, in a thread, since members wait for their own
    replies; those to launchers are empty until it has ended.
    """

    needs_log = True

    def __init__(
        self,
        invite: Callable[[tuple[int, ...]], Invitation],
        give_numbers: Callable[[str, int, int | None, bool], tuple[int, ...]],
        pack: Callable[[], bytes],
        next_incarnation: Callable[[tuple[int, ...]], int] = lambda _: 0,
    ) -> None:
        self._invite, self._give_numbers, self._pack = invite, give_numbers, pack
        self._next_incarnation = next_incarnation
        self._code: Future[bytes] | None = None

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Return the reply, or None if this is no joining launcher. Raises ValueError for what no launcher sends."""
        match = _LAUNCHER.fullmatch(name)
        if match is None:
            return None
        request = _DECODER.decode(message)
        if isinstance(request, AskToJoin):
            if request.replaces and match[1] != b"agent":
                raise ValueError("only an agent of the launcher of the run may replace another one")
            numbers = self._give_numbers(name.decode(), request.processes, request.first, request.replaces)
            incarnation = self._next_incarnation(numbers) if request.replaces else 0
            return _ENCODER.encode(msgspec.structs.replace(self._invite(numbers), incarnation=incarnation))
        if self._code is None:
            self._code = ThreadPoolExecutor(1, "code").submit(self._pack)
        return _ENCODER.encode(_part(self._code, request.offset)) if self._code.done() else b""


def _part(code: Future[bytes], offset: int) -> CodePart:
    if (error := code.exception()) is not None:
        return CodePart(offset, problem=str(error))
    return CodePart(offset, code.result()[offset : offset + PART_BYTES])
