"""Records of the coordinator's write-ahead log, from which a restarted coordinator restores its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from stretto.membership.barriers import Position
from stretto.membership.messages import AnyReport, GenerationView, MemberRanks, ReadyReport, ViewOfRanks
from stretto.run_config import RunConfig

RETURN_S = 60.0
"""Seconds in which a restarted process should have imported torch, read its data and called `distribute`."""


class Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Record of the coordinator's write-ahead log."""


class Started(Record, frozen=True):
    """Log record of the start of the run, with its rules.

    `expected` workers form the first generation. Fewer than `min_workers` do not continue; more than `max_workers` are
    not admitted. A worker without a heartbeat for `failure_timeout_s` has failed; where the run cannot continue without
    it, a worker that is being restarted is awaited for `return_s`, by default as long. In `asynchronous` training no
    worker waits for another: joining workers are admitted immediately, and failures only reported. A run that `saves`
    writes a checkpoint before its last workers leave as they were asked to.
    """

    expected: int
    failure_timeout_s: float
    min_workers: int = 1
    max_workers: int | None = None
    asynchronous: bool = False
    return_s: float | None = None
    saves: bool = False

    @property
    def return_limit_s(self) -> float:
        """Seconds for which a worker that is being restarted is awaited."""
        return self.failure_timeout_s if self.return_s is None else self.return_s

    @property
    def reserved(self) -> int:
        """Number of workers that the run's launcher may start; workers that others add have numbers from there on."""
        return self.expected

    @property
    def begins_with(self) -> int:
        """Number of workers of the first generation with others that join; 0 if only the expected ones are awaited."""
        return 0


class StartedWithOthers(Started, frozen=True):
    """Log record of the start of a run that begins with `first_members` workers, of which others join by hand."""

    first_members: int = 0

    @property
    def begins_with(self) -> int:
        return self.first_members


class StartedOnCluster(Started, frozen=True):
    """Log record of the start of a run on a cluster, which may start as many workers as are `reserved_numbers`."""

    reserved_numbers: int = 0

    @property
    def reserved(self) -> int:
        return self.reserved_numbers


def rules_of(config: RunConfig, asynchronous: bool) -> Started:
    """Return the rules of a run. On a cluster, a lost worker waits for room, and the run waits for its last one."""
    saves = config.checkpoints is not None
    rules = config.awaited, config.failure_timeout_s, config.min_workers, config.max_workers, asynchronous
    if config.on is None:
        limits = max(RETURN_S, config.failure_timeout_s), saves
        if config.initial_workers > config.awaited:
            return StartedWithOthers(*rules, *limits, config.initial_workers)
        return Started(*rules, *limits)
    return StartedOnCluster(*rules, config.timeout_s, saves, reserved_numbers=config.most_workers)


class Formed(Record, frozen=True):
    """Log record of a generation; `left` are the workers that leave gracefully with it."""

    view: GenerationView
    left: list[int] = []

    def view_of(self, rank: int) -> GenerationView:
        """Return the generation as the ranks of this number see it."""
        return self.view

    def ranks(self) -> list[int]:
        """Return the number of ranks of each member."""
        return [1] * len(self.view.members)


class FormedOfRanks(Formed, frozen=True):
    """Log record of a generation of which a member has several ranks.

    `others` are the reports of the ranks 1, 2, ... of each member; those of rank 0 are in the view.
    """

    others: list[list[AnyReport]] = []

    def view_of(self, rank: int) -> GenerationView:
        """Return the generation as the ranks of this number see it. A member with fewer is shown by its rank 0."""
        members = [
            msgspec.structs.replace(member, report=reports[rank - 1]) if 0 < rank <= len(reports) else member
            for member, reports in zip(self.view.members, self.others, strict=True)
        ]
        view, each = self.view, zip(self.view.members, self.others, strict=True)
        ranks = [_ranks([member.report, *others]) for member, others in each]
        return ViewOfRanks(view.generation, members, view.departed, view.why, view.save, ranks)

    def ranks(self) -> list[int]:
        """Return the number of ranks of each member."""
        return [1 + len(reports) for reports in self.others]


def _ranks(reports: Sequence[ReadyReport]) -> MemberRanks:
    """Return the ranks of a member, given their reports."""
    rounds, agreements = (
        max(numbers) for numbers in zip(*((one.rounds, one.agreements) for one in reports), strict=True)
    )
    return MemberRanks([one.address_of_rank for one in reports], rounds, agreements)


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

    @property
    def failed_rank(self) -> int:
        """Rank whose failure has ended the incarnation."""
        return 0


class EndedByRank(Ended, frozen=True):
    """Log record of the end of an incarnation by its rank `rank`, which is not 0."""

    rank: int

    @property
    def failed_rank(self) -> int:
        """Rank whose failure has ended the incarnation."""
        return self.rank


class NumbersGiven(Record, frozen=True):
    """Log record of the numbers of workers that a joining launcher has been given: `count` of them from `first` on."""

    launcher: str
    first: int
    count: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers."""
        return tuple(range(self.first, self.first + self.count))


class Gave(Record, frozen=True):
    """Log record of the value that a worker has given at a position of the script."""

    position: Position
    value: bytes


class Stopped(Record, frozen=True):
    """Log record that the run cannot continue."""

    why: str
    uneven: bool = False


AnyRecord: TypeAlias = (
    Started
    | StartedWithOthers
    | StartedOnCluster
    | Formed
    | FormedOfRanks
    | ContinuedTo
    | Ended
    | EndedByRank
    | NumbersGiven
    | Gave
    | Stopped
)
_DECODER: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
_ENCODER = msgspec.msgpack.Encoder()


def encode_record(record: AnyRecord) -> bytes:
    """Return a record as bytes for the log."""
    return _ENCODER.encode(record)


def decode_record(record: bytes) -> AnyRecord:
    """Return a record of the log."""
    return _DECODER.decode(record)
