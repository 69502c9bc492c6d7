"""What workers and servers say to each other: small structs, in front of raw tensors. Nothing else is ever decoded.

A parcel is a head and tensors. The head is one of these in MessagePack with the kinds and lengths of the tensors, so
that a receiver knows what is to come before it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from stretto.membership.loop_positions import LoopPosition


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Open(_Message):
    """The first worker gives a shard its ranges of the parameters, and the rule; whatever it had before is gone.

    They are the first thing to come back to, as this `cut`. Behind them comes what a rule kept besides, as `Remembers`
    says it, if the run goes on from a checkpoint.
    """

    arena: int
    recipe: str
    workers: int
    cut: int = 0
    age: int = 0
    names: list[str] = []
    arrivals: list[int] = []


class Push(_Message):
    """A worker's update, encoded as the recipe says; it asks for the newest version in return.

    `batches` of pass `number` are the work in it. `age` counts how often the servers went back to a cut.
    """

    arena: int
    seq: int
    version: int
    samples: int
    lr: float
    age: int = 0
    number: int = 0
    batches: list[int] = []


class Snapshot(_Message):
    """All have met in exchange `op`, and nothing is under way: keep what there is, to come back to it.

    A shard says whether it `Has` it then. The coordinator keeps its part if all shards have `kept` theirs.
    """

    op: int
    age: int
    kept: bool = True


class ListSnapshots(_Message):
    """Which cuts are there?"""


class Rollback(_Message):
    """A server was lost in this `age`: to which of these cuts, that all shards have, do we go back?

    `births` are the shards' processes as this worker found them, `least` the greatest age that one of them is of.
    """

    age: int
    least: int
    cuts: list[int]
    births: list[int]
    calls: list[bool]
    """The meetings that this worker was told of so far: whether each was for a cut."""
    met: int
    """How many of them it has been to."""
    newest: int
    """The newest cut that the coordinator had before the shards were asked for theirs."""


class RequestRollback(_Message):
    """A new age begins at this cut, if this shard's process still is the one of this `birth`."""

    age: int
    cut: int
    birth: int


class Join(_Message):
    """A process that was started while the run is under way: where does it stand?"""


class ResumeClock(_Message):
    """A newcomer counts its rounds from this one."""

    clock: int


class EnterBarrier(_Message):
    """A worker comes to the `meeting` of all, after its update `seq`: nobody waits for it until the meeting is over.

    Without a meeting it has nothing to do, and nobody waits for it until its next update.
    """

    seq: int
    meeting: int | None = None
    age: int = 0


class Read(_Message):
    """The newest version, after what waited to be collected has been applied if `flush`."""

    flush: bool
    age: int = 0


class Recall(_Message):
    """All have met, and nothing is under way: what does the rule keep besides the parameters?"""

    age: int


class Contribute(_Message):
    """What all workers ask together in exchange `op`: the sum of everyone's tensor, or every tensor."""

    op: int
    kind: Literal["mean", "every"]
    heard: int = 0
    """All that this worker asked here in exchanges up to this one has been answered."""


class Gather(_Message):
    """Everyone's bytes in exchange `op`, or those of the `root` alone. `at` is where the worker is in its loop."""

    op: int
    root: int | None
    at: LoopPosition | None = None


class Keep(_Message):
    """The order of pass `number`, as the `root` tells it in exchange `op`; it is kept for newcomers."""

    op: int
    root: int
    number: int
    at: LoopPosition | None = None


class Barrier(_Message):
    """All come together in exchange `op`, with nothing under way.

    It is the `call`-th meeting that they were called to, perhaps for a `cut` alone, or that at the end of a pass if 0.
    """

    op: int
    call: int
    cut: bool = False


class Heard(_Message):
    """What exchange `op` of these `members` has come to, once more, for a coordinator that may have lost it.

    Some may lack the answer, and what the dead gave to it nobody else can say. It may have been the `call`-th meeting.
    """

    op: int
    members: list[int]
    call: int = 0
    cut: bool = False


class LeaveBarrier(_Message):
    """A worker has done with the meeting after exchange `op`, and goes on by itself; it was called to so many."""

    op: int
    met: int = 0


class ReplayResult(_Message):
    """The order of pass `number`, once more, for a coordinator that may have lost it."""

    number: int


class Group(_Message):
    """The worker exchanges with these from now on; what waits in older generations is dropped."""

    generation: int
    members: list[int]


class Begin(_Message):
    """Pass `number` begins. Its tensor is the samples of each batch; all meet after every `meet` batches.

    Batches go to whoever is free, or are `dealt` in turn. Those that are `settled` were done before.
    """

    number: int
    meet: int | None
    dealt: bool
    settled: list[int] = []


class Lease(_Message):
    """A worker is free: it asks for a batch of the pass."""

    number: int
    age: int = 0


class Close(_Message):
    """A worker has nothing left of the pass, and has settled all: it waits until that is so everywhere.

    One whose script has `left` the pass early gets no more of it, though there may be batches.
    """

    number: int
    age: int
    left: bool = False


class Count(_Message):
    """How often did each sample of the pass count?"""

    number: int
    age: int


class Settle(_Message):
    """The work on these batches is in the server's parameters."""

    number: int
    batches: list[int]
    age: int = 0


class Leave(_Message):
    """A worker has done with everything."""


class Finish(_Message):
    """The same, before it leaves: answered once a coordinator that is started again would know of it."""


class Quit(_Message):
    """A worker leaves in good order: the others go on without it."""


class Gone(_Message):
    """A life of a worker is over. `batches` of pass `number` are the work of it that is in the parameters.

    Its last update is `torn` if only some shards have it, or if nobody knows.
    """

    worker: int
    life: int
    number: int = 0
    batches: list[int] = []
    torn: bool = False


class PushReply(_Message):
    """A version of a shard, and what became of the worker's updates: (seq, version, staleness, samples) of each."""

    version: int
    applied: list[tuple[int, int, int, int]] = []
    refused: list[int] = []
    held_s: float = 0.0


class Result(_Message):
    """The tensors that were asked for."""

    heard: int = 0
    """Nobody lacks an answer of an exchange up to this one."""


class Among(_Message):
    """The same where members were lost since the last answer: who gave. Without tensors the root was lost."""

    members: list[int]
    heard: int = 0


class Leased(_Message):
    """A batch of the pass; None when none is left, or when all are to `meet`. `handed` counts samples handed out.

    A meeting may be for a `cut` alone.
    """

    batch: int | None
    handed: int
    meet: bool = False
    cut: bool = False


class Closed(_Message):
    """Whether the pass is over, or there are batches again."""

    over: bool


class Joined(_Message):
    """Where a newcomer stands. From the coordinator: the pass, the next exchange, how many meetings have been.

    From a shard: the arena, and the rounds of the slowest.
    """

    age: int
    number: int = 0
    op: int = 0
    met: int = 0
    members: list[int] = []
    calls: list[bool] = []
    arena: int = 0
    clock: int = 0


class Has(_Message):
    """The cuts that a service has, which process of it this is, and its age."""

    cuts: list[int]
    birth: int
    age: int


class Remembers(_Message):
    """What the rule keeps, a tensor for each range under each name; and how much of its momentum has arrived."""

    names: list[str]
    arrivals: list[int]


class StaleRequest(_Message):
    """What was said is of another age than the one that is here, or that of a process which knows of none yet."""

    age: int


class RolledBack(_Message):
    """The age that is now began at this cut, with these processes of the shards."""

    age: int
    cut: int
    births: list[int]


class Left(_Message):
    """What a dead worker's updates here were about."""

    number: int
    batches: list[int]


def told_of(worker: int, life: int, found: Sequence[Left], shards: int) -> Gone:
    """What the coordinator is told of a dead worker, after what those of so many shards have said that did."""
    number = max((one.number for one in found), default=0)
    sets = {frozenset(one.batches) if one.number == number else frozenset() for one in found}
    common = sorted(frozenset.intersection(*sets)) if len(found) == shards and sets else []
    return Gone(worker, life, number, common, torn=len(found) < shards or len(sets) > 1)


class Refused(_Message):
    """What was wrong with what was said. `uneven`: the workers' loops are of unequal length."""

    text: str
    uneven: bool = False


Request: TypeAlias = (
    Open
    | Push
    | EnterBarrier
    | Read
    | Recall
    | Contribute
    | Gather
    | Keep
    | ReplayResult
    | Barrier
    | Heard
    | LeaveBarrier
    | Group
    | Begin
    | Lease
    | Settle
    | Close
    | Count
    | Leave
    | Finish
    | Quit
    | Gone
    | Join
    | ResumeClock
    | Snapshot
    | ListSnapshots
    | Rollback
    | RequestRollback
)
Reply: TypeAlias = (
    PushReply | Result | Among | Leased | Closed | Joined | Has | Remembers | StaleRequest | RolledBack | Left | Refused
)
OVER = "the run is over"
"""What is said to a worker that comes when the others have done with everything."""
SILENT = (Settle, Leave, Heard, LeaveBarrier, ReplayResult, Group)
"""What is not replied to."""
Body: TypeAlias = Request | Reply


class Header(msgspec.Struct, array_like=True):
    """The first frame of a parcel. `number` is the sender's; a reply carries that of what it replies to."""

    number: int
    body: Body
    tensors: list[tuple[str, int]] = []
    """The dtype and the length of each tensor that follows."""
