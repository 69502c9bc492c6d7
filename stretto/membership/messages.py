"""Messages of the membership protocol between workers and the coordinator. Small structs; nothing else is decoded.

A *generation* is a set of workers that run collective operations together; generations are numbered upwards. An
*incarnation* is one start of a worker: a restarted worker has the same number and a greater incarnation. A worker is
one *replica* of the model, in one process or in several, its *ranks*, which fail together: the first exit of one of
them ends the replica, and the other ranks are evicted. Each rank has a connection of its own, named by
`connection_name`, so every message comes from one rank. Rank i of each replica exchanges with rank i of the others, so
a GenerationView that is sent to it has the reports of the ranks i. Barriers of the script and events of workers that do
not see the run directory have messages and connections of their own (`barriers.py`, `event_lines.py`).

    worker                              coordinator
      | -- Register -----------------------> |   repeated until there is a reply
      | <- Registered ---------------------- |
      | -- Heartbeat ----------------------> |   at a fifth of the failure timeout
      | -- ReadyReport(0) -----------------> |   paused, without state; repeated until there is a reply
      | <- GenerationView(1, members) ------ |   all continue with these members
      |                                      |
      | -- Broken(1, why) -----------------> |   a collective operation failed, or a worker missed its heartbeats
      | <- AbortGeneration(1, why) --------- |   to all members: abort pending operations and pause
      | -- ReadyReport(1, commits, ...) ---> |
      | <- GenerationView(2, members) ------ |   once all remaining members are paused
      |                                      |
      | <- PauseRequest(2) ----------------- |   to admit or release workers, or for a checkpoint
      | -- ReadyReport(2, ...) ------------> |   between two global steps, with no operation pending
      | <- Continue(2, step) --------------- |   others are further: pause again at or after this step
      | <- GenerationView(2 or 3, ...) ----- |   once all members are paused at the same global step
      |                                      |
      | -- Quit / Leave -------------------> |   leave gracefully at the next pause / finished
      | <- Evicted / Shutdown -------------- |   this incarnation is no member any more / the run cannot continue
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from stretto.membership.loop_positions import Waits

EXCHANGING = "exchanging"
"""Activity of a worker that waits in a collective operation."""


def connection_name(worker: int, incarnation: int, rank: int = 0, ranks: int = 1) -> bytes:
    """Return the name of the connection of one rank of a worker with this number of ranks.

    >>> connection_name(3, 1), connection_name(3, 1, 0, 2)
    (b'worker 3.1', b'worker 3.1 rank 0 of 2')
    """
    return b"worker %d.%d" % (worker, incarnation) + (b" rank %d of %d" % (rank, ranks) if ranks > 1 else b"")


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    def awaits_log(self, generation: int) -> bool:
        """Return True if the message is sent only once its decision is in the log, which has this generation."""
        return True


class _Request(_Message, frozen=True):
    """A message of the coordinator that one restored without its decision would send again, or would not contradict."""

    def awaits_log(self, generation: int) -> bool:
        return False


# --- of workers -----------------------------------------------------------------------------------------------------


class Register(_Message, frozen=True):
    """First message of a process, and of one that has reconnected to the coordinator."""

    host: str
    pid: int


class Heartbeat(_Message, frozen=True):
    """Sign of life, with the worker's generation and its activity since `for_s` seconds.

    `place` is the number of collective operations that the worker has begun; -1 before its first generation. `waits` is
    the operation that it waits in. `checkpoint_s` are the seconds that the last checkpoint has taken at the worker that
    wrote it, 0 at all others; infinite if its state can't be saved.
    """

    generation: int
    doing: str
    for_s: float
    global_step: int
    place: int = -1
    waits: Waits | None = None
    checkpoint_s: float = 0.0


class Broken(_Message, frozen=True):
    """Report that a collective operation of this generation failed; `forming`: its rendezvous did.

    `unreached` are the members that have not connected with this one in the time for that.
    """

    generation: int
    why: str
    forming: bool = False
    unreached: tuple[int, ...] = ()


class ReadyReport(_Message, frozen=True):
    """Report that the worker is paused: it starts no collective operation until a new generation. Repeated until then.

    `generation` is the worker's last one, at most 0 for a worker without state, which can only receive it. `commits` is
    the number of collective operations that it has completed, `rounds` the number of those that carried samples, and
    `global_step` the number of global steps that it was assigned. `between_steps` is True between two global steps with
    no operation pending (after a PauseRequest). `address` is where the next generation reaches it: its host, port and
    public key, or, without encryption, the store that it can host. `waits` is its pending operation.
    """

    generation: int
    commits: int = 0
    global_step: int = 0
    between_steps: bool = False
    address: str = ""
    rounds: int = 0
    waits: Waits | None = None

    @property
    def has_history(self) -> bool:
        """True if the worker has state that it can send to others."""
        return self.generation > 0

    @property
    def address_of_rank(self) -> str:
        """Address at which other ranks of its replica reach it."""
        return self.address

    @property
    def agreements(self) -> int:
        """Number of operations of tensors that it has committed together with the other ranks of its replica."""
        return 0

    @property
    def share_limit(self) -> int:
        """Largest share of a global step that it has memory for, after it has run out of memory; 0 if it has not."""
        return 0


class LimitedReport(ReadyReport, frozen=True):
    """Report of a worker that has run out of memory; `limit` is its `share_limit`."""

    limit: int = 0

    @property
    def share_limit(self) -> int:
        return self.limit


class RankReport(ReadyReport, frozen=True):
    """Report of a rank of a worker with several ranks; `committed_together` are its `agreements`.

    `own_address` is where the other ranks of its worker reach it, which connect in its first generation. `limit` is its
    `share_limit`.
    """

    committed_together: int = 0
    own_address: str = ""
    limit: int = 0

    @property
    def address_of_rank(self) -> str:
        return self.own_address

    @property
    def agreements(self) -> int:
        return self.committed_together

    @property
    def share_limit(self) -> int:
        return self.limit


AnyReport: TypeAlias = ReadyReport | LimitedReport | RankReport
"""Report of a worker or of one of its ranks."""


class Quit(_Message, frozen=True):
    """Notice that the worker was asked to end soon, and wants to leave gracefully."""


class Leave(_Message, frozen=True):
    """Notice that the worker has finished."""


# --- of a launcher --------------------------------------------------------------------------------------------------


class ProcessExited(_Message, frozen=True):
    """Report that a rank of a worker has exited, and whether the worker is restarted."""

    worker: int
    incarnation: int
    why: str
    will_restart: bool
    rank: int = 0


class Save(_Message, frozen=True):
    """Request for a checkpoint."""


class EndRun(_Message, frozen=True):
    """Request of the run's launcher that all workers write a checkpoint, if the run keeps any, and leave."""


class RunEnded(_Message, frozen=True):
    """Notice of the run's launcher that the run ends early; the reply, and the notice to launchers that joined, too."""

    why: str


class WatchFailures(_Message, frozen=True):
    """Request for Failures now and after each change; repeated, since a restarted coordinator does not know it."""


class WatchMembers(_Message, frozen=True):
    """Request for MembersView now and after each change, from the launcher of a run that has workers elsewhere."""


class LauncherEnded(_Message, frozen=True):
    """Notice that a launcher that joined the run has ended, after its workers."""


# --- of the coordinator ---------------------------------------------------------------------------------------------


class Registered(_Message, frozen=True):
    """Reply to Register: True if the run is asynchronous, and the current generation."""

    asynchronous: bool
    generation: int


class AbortGeneration(_Request, frozen=True):
    """Order to abort the generation's operations, pause and send a ReadyReport."""

    generation: int
    why: str


class PauseRequest(_Request, frozen=True):
    """Request to pause between two global steps and to send a ReadyReport. No operation is aborted."""

    generation: int


class Continue(_Request, frozen=True):
    """Order to pause again at or after this global step, since others are further."""

    generation: int
    global_step: int


class Member(msgspec.Struct, array_like=True, frozen=True):
    """One member of a generation, with its report: that of its rank with the receiver's number.

    A member that has fewer ranks is shown with the report of its rank 0.
    """

    worker: int
    incarnation: int
    report: AnyReport


class MemberRanks(msgspec.Struct, array_like=True, frozen=True):
    """The ranks of one member of a generation: addresses for each other, and the largest numbers in their reports."""

    addresses: list[str]
    rounds: int = 0
    agreements: int = 0


class GenerationView(_Message, frozen=True):
    """Members of a generation in the order of their numbers. A current generation that is sent again continues.

    `departed` are members of the previous generation that are not in this. `save` requests a checkpoint first, in a
    generation that continues.
    """

    generation: int
    members: list[Member]
    departed: list[int] = []
    why: str = ""
    save: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the members."""
        return tuple(member.worker for member in self.members)

    @property
    def first(self) -> int:
        """Rank of the first member with state, which sends it to the others; 0 if no member has state."""
        return next((rank for rank, member in enumerate(self.members) if member.report.has_history), 0)

    @property
    def boundary_step(self) -> int:
        """Global step at which the generation began or last paused; -1 if no member was between two steps."""
        return max((member.report.global_step for member in self.members if member.report.between_steps), default=-1)

    def awaits_log(self, generation: int) -> bool:
        return self.generation > generation

    def ranks(self) -> list[MemberRanks]:
        """Return the ranks of each member."""
        reports = (member.report for member in self.members)
        return [MemberRanks([one.address_of_rank], one.rounds, one.agreements) for one in reports]


class ViewOfRanks(GenerationView, frozen=True):
    """Members of a generation of which one has several ranks."""

    each: list[MemberRanks] = []

    def ranks(self) -> list[MemberRanks]:
        return self.each


class Evicted(_Message, frozen=True):
    """Notice that this incarnation is no member any more: its state is discarded.

    `unreachable`: since it could not connect with others, as its next incarnation could not either.
    """

    why: str
    unreachable: bool = False


class Shutdown(_Request, frozen=True):
    """Notice that the run cannot continue. `uneven`: since the workers' loops are of unequal length."""

    why: str
    uneven: bool = False


class Failures(_Message, frozen=True):
    """Failures that launchers are notified of: worker, incarnation, generation, and the rank that failed first."""

    generation: int = 0
    """Current generation."""
    failed: list[tuple[int, int, int, int]] = []

    def includes(self, worker: int, incarnation: int) -> bool:
        """Return True if this incarnation has failed."""
        return self.rank_of(worker, incarnation) is not None

    def rank_of(self, worker: int, incarnation: int) -> int | None:
        """Return the rank that failed first; None if this incarnation has not failed."""
        return next((failed[3] for failed in self.failed if failed[:2] == (worker, incarnation)), None)

    def is_recovered(self, worker: int, incarnation: int) -> bool:
        """Return True if the others have formed a generation since this incarnation failed.

        >>> [Failures(now, [(1, 0, 1, 0)]).is_recovered(1, 0) for now in (1, 2)]
        [False, True]
        """
        return any(failed[:2] == (worker, incarnation) and failed[2] < self.generation for failed in self.failed)


class MembersView(_Message, frozen=True):
    """Workers of a run as the coordinator knows them, for the launcher of the run."""

    generation: int = 0
    running: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    """Workers whose newest process has failed."""
    left: frozenset[int] = frozenset()
    """Workers that have finished or left gracefully."""
    finished: int = 0
    """Number of workers that have finished their loop."""
    launchers: int = 0
    """Number of launchers that joined the run and have not ended."""
    stopped: str = ""
    """Reason why the run cannot continue."""
    incarnations: dict[int, int] = {}
    """Newest incarnation of each worker that has been seen."""

    @property
    def seen(self) -> frozenset[int]:
        """Workers of which a process has been seen."""
        return self.running | self.failed | self.left

    @property
    def is_over(self) -> bool:
        """True if workers have finished, and no worker and no launcher that joined is left."""
        return self.finished > 0 and not self.running and not self.launchers


LauncherMessage: TypeAlias = ProcessExited | Save | EndRun | RunEnded | WatchFailures | WatchMembers | LauncherEnded
LauncherReply: TypeAlias = Failures | MembersView | RunEnded
WorkerMessage: TypeAlias = Register | Heartbeat | Broken | ReadyReport | LimitedReport | RankReport | Quit | Leave
CoordinatorMessage: TypeAlias = (
    Registered | AbortGeneration | PauseRequest | Continue | GenerationView | ViewOfRanks | Evicted | Shutdown
)
