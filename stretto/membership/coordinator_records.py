"""Records of the coordinator's write-ahead log, from which a restarted coordinator restores its state."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from stretto.membership.messages import GenerationView


class Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Record of the coordinator's write-ahead log."""


class Started(Record, frozen=True):
    """Log record of the start of the run, with its settings."""

    settings: dict[str, Any]
    expected: int
    min_workers: int
    max_workers: int | None
    asynchronous: bool
    failure_timeout_s: float
    return_s: float


class Formed(Record, frozen=True):
    """Log record of a generation; `left` are the workers that leave gracefully with it."""

    view: GenerationView
    left: list[int] = []


class ContinuedTo(Record, frozen=True):
    """Log record that paused members were sent on to this global step: they do not pause at an earlier one."""

    global_step: int


class Ended(Record, frozen=True):
    """Log record of the end of an incarnation."""

    worker: int
    incarnation: int
    state: Literal["gone", "left"]
    why: str
    will_restart: bool


class Stopped(Record, frozen=True):
    """Log record that the run cannot continue."""

    why: str
    uneven: bool = False


AnyRecord: TypeAlias = Started | Formed | ContinuedTo | Ended | Stopped
_DECODER: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
_ENCODER = msgspec.msgpack.Encoder()


def encode_record(record: AnyRecord) -> bytes:
    """Return a record as bytes for the log."""
    return _ENCODER.encode(record)


def decode_record(record: bytes) -> AnyRecord:
    """Return a record of the log."""
    return _DECODER.decode(record)
