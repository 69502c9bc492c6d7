"""What workers and servers say to each other: small structs, in front of raw tensors. Nothing else is ever decoded.

A parcel is a head and tensors. The head is one of these in MessagePack with the kinds and lengths of the tensors, so
that a receiver knows what is to come before it comes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class _Said(msgspec.Struct, array_like=True, tag=True):
    pass


class Open(_Said):
    """Worker 0 gives a shard its ranges of the parameters, and the rule; whatever it had before is gone."""

    arena: int
    recipe: str
    workers: int


class Push(_Said):
    """A worker's update, encoded as the recipe says; it asks for the newest version in return."""

    arena: int
    seq: int
    version: int
    samples: int
    lr: float


class Rest(_Said):
    """A worker has come to a meeting of all, after its update `seq`: nobody waits for it until the meeting is over."""

    seq: int


class Read(_Said):
    """The newest version, after what waited to be collected has been applied if `flush`."""

    flush: bool


class Ask(_Said):
    """What all workers ask together in exchange `op`: the sum of everyone's tensor, or every tensor."""

    op: int
    kind: Literal["mean", "every"]


class Gather(_Said):
    """Everyone's bytes in exchange `op`, or those of the `teller` alone."""

    op: int
    teller: int | None


class Begin(_Said):
    """Pass `number` begins. Its tensor is the samples of each batch; all meet after every `meet` batches.

    Batches go to whoever is free, or are `dealt` in turn.
    """

    number: int
    meet: int | None
    dealt: bool


class Lease(_Said):
    """A worker is free: it asks for a batch of the pass."""

    number: int


class Settle(_Said):
    """The work on these batches is in the server's parameters."""

    number: int
    batches: list[int]


class Leave(_Said):
    """A worker has done with everything."""


class Go(_Said):
    """A version of a shard, and what became of the worker's updates: (seq, version, staleness, samples) of each."""

    version: int
    applied: list[tuple[int, int, int, int]] = []
    refused: list[int] = []
    held_s: float = 0.0


class Answered(_Said):
    """The tensors that were asked for."""


class Leased(_Said):
    """A batch of the pass; None when none is left, or when all are to `meet`. `handed` counts samples handed out."""

    batch: int | None
    handed: int
    meet: bool = False


class Refused(_Said):
    """What was wrong with what was said."""

    text: str


Request: TypeAlias = Open | Push | Rest | Read | Ask | Gather | Begin | Lease | Settle | Leave
Reply: TypeAlias = Go | Answered | Leased | Refused
Body: TypeAlias = Request | Reply


class Head(msgspec.Struct, array_like=True):
    """The first frame of a parcel. `number` is the sender's; a reply carries that of what it replies to."""

    number: int
    body: Body
    tensors: list[tuple[str, int]] = []
    """The dtype and the length of each tensor that follows."""
