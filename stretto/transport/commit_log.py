"""Results of the last attempts, kept by reference, and packed for workers that have not received them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from stretto.transport.tensor_bytes import Packed, packed, unpacked


@dataclass(slots=True)
class Attempt:
    """Results of one attempt; results in tensors of other owners are kept with their version counter."""

    number: int
    answers: list[Any] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    copied: bool = False
    """True if the tensors are copies that only the log refers to."""

    def ask(self) -> int:
        """Note that an operation was submitted; return its index in the attempt."""
        self.answers.append(None)
        self.versions.append(None)
        return len(self.answers) - 1

    def note(self, place: int, answer: Any) -> None:
        """Note the result of an operation."""
        self.answers[place] = answer
        self.versions[place] = answer._version if isinstance(answer, Tensor) else None

    @property
    def intact(self) -> bool:
        """True if no result has been modified since."""
        return all(
            version is None or one._version == version for one, version in zip(self.answers, self.versions, strict=True)
        )

    def keep_copies(self, over: Attempt | None) -> None:
        """Copy the results, into the copies of the attempt that is `over` if they fit.

        Memory allocated at every step faults on every page, which can take as long as the copy.
        """
        spare = over.answers if over is not None and over.copied else []
        pairs = itertools.zip_longest(self.answers, spare[: len(self.answers)])
        self.answers = [_copied(one, old) if isinstance(one, Tensor) else one for one, old in pairs]
        self.versions, self.copied = [None] * len(self.answers), True


def _copied(answer: Tensor, spare: Any) -> Tensor:
    if isinstance(spare, Tensor) and _sort(spare) == _sort(answer):
        return spare.copy_(answer)
    return answer.clone()


def _sort(one: Tensor) -> tuple[Any, ...]:
    return one.shape, one.dtype, one.device


_Answer = tuple[str, list[Packed], list[bytes]]
"""One of "tensor", "tensors", "bytes" and "messages"; the tensors; the messages."""


class _Told(msgspec.Struct):
    """Attempts in a message: number and results of each."""

    attempts: list[tuple[int, list[_Answer]]]


_TOLD = msgspec.msgpack.Decoder(_Told)


def pack(attempts: Sequence[Attempt]) -> bytes:
    """Pack attempts for workers that have not received their results."""
    told = [(one.number, [_packed(found) for found in one.answers]) for one in attempts]
    return msgspec.msgpack.encode(_Told(told))


def _packed(answer: Any) -> _Answer:
    if isinstance(answer, Tensor):
        return "tensor", [packed(answer)], []
    if isinstance(answer, bytes):
        return "bytes", [], [answer]
    if answer and isinstance(answer[0], Tensor):
        return "tensors", [packed(one) for one in answer], []
    return "messages", [], list(answer)


def unpack(told: bytes) -> list[Attempt]:
    """Return the packed attempts."""
    attempts = _TOLD.decode(told).attempts
    return [Attempt(number, [_unpacked(*one) for one in found], [None] * len(found)) for number, found in attempts]


def _unpacked(sort: str, tensors: list[Packed], messages: list[bytes]) -> Any:
    if sort in ("bytes", "messages"):
        return messages[0] if sort == "bytes" else messages
    found = [unpacked(one) for one in tensors]
    return found[0] if sort == "tensor" else found
