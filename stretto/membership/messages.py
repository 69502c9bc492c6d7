"""What workers and the coordinator say to each other about who is in. Small structs; nothing else is ever decoded.

A *generation* is a set of workers that exchange with each other; generations are numbered and only grow. A *life* is
one process of a worker: a worker that is started again has the same number and a greater life.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from stretto.membership.loop_positions import Waits

EXCHANGING = "exchanging"
"""What a worker does that waits for others."""


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# --- a worker says --------------------------------------------------------------------------------------------------


class Register(_Message, frozen=True):
    """A process has begun, or has found its way back to the coordinator."""

    host: str
    pid: int


class Heartbeat(_Message, frozen=True):
    """It is alive, in this generation, doing this for so many seconds.

    `place` grows with each exchange among all that the worker begins; -1 before its first generation. `waits` is the
    exchange that it waits in.
    """

    generation: int
    doing: str
    for_s: float
    hand: int
    place: int = -1
    waits: Waits | None = None


class Broken(_Message, frozen=True):
    """Its exchange in this generation has failed: somebody is gone. `forming`: the generation was not formed yet."""

    generation: int
    why: str
    forming: bool = False


class ReadyReport(_Message, frozen=True):
    """It stands still and exchanges nothing until it is told a new generation. Said again until that comes.

    `generation` is the one it comes from, at most 0 for a worker without history, which takes and never gives.
    `commits` are the exchanges that it has ended, `rounds` those of them that carried samples, and `hand` the batches
    that it has been dealt. `at_rest` says that it stands between two hands with nothing unfinished (under a Hold), and
    not in the middle of an exchange. `store` is an address at which it can keep a store for others to meet at. The
    exchange that it was in the middle of is `waits`.
    """

    generation: int
    commits: int = 0
    hand: int = 0
    at_rest: bool = False
    store: str = ""
    rounds: int = 0
    waits: Waits | None = None

    @property
    def has_history(self) -> bool:
        """Whether it can give its state to others."""
        return self.generation > 0


class Quit(_Message, frozen=True):
    """It was asked to end soon, and wants to leave in good order."""


class Leave(_Message, frozen=True):
    """It has done with everything."""


# --- the coordinator says -------------------------------------------------------------------------------------------


class Registered(_Message, frozen=True):
    """The settings of the run, the same for all, and the generation that there is."""

    settings: dict[str, Any]
    generation: int


class AbortGeneration(_Message, frozen=True):
    """This generation is over: stand still and say Here."""

    generation: int
    why: str


class PauseRequest(_Message, frozen=True):
    """Stand still at the next rest between two hands, and say Here. Nothing is broken off."""

    generation: int


class Continue(_Message, frozen=True):
    """Others have come further: go on to the first rest at or behind this hand, and say Here again."""

    generation: int
    hand: int


class Member(msgspec.Struct, array_like=True, frozen=True):
    """One member of a generation, and where it stood."""

    worker: int
    life: int
    here: ReadyReport


class GenerationView(_Message, frozen=True):
    """The next generation: its members in the order of their numbers; a generation that is already there goes on.

    `gone` are those that were in the last one and are not in this. `save` asks for a checkpoint first,
    where a generation goes on.
    """

    generation: int
    members: list[Member]
    gone: list[int] = []
    why: str = ""
    save: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members' numbers."""
        return tuple(one.worker for one in self.members)

    @property
    def first(self) -> int:
        """The rank of the first member with a history, who gives to the others; of the first where nobody has one."""
        return next((rank for rank, one in enumerate(self.members) if one.here.has_history), 0)


class Evicted(_Message, frozen=True):
    """This life is no member any more: what it has is not the run's."""

    why: str


class Shutdown(_Message, frozen=True):
    """The run can't go on. `uneven`: since the workers' loops are of unequal length."""

    why: str
    uneven: bool = False


Said: TypeAlias = Register | Heartbeat | Broken | ReadyReport | Quit | Leave
Told: TypeAlias = Registered | AbortGeneration | PauseRequest | Continue | GenerationView | Evicted | Shutdown
