"""Fault injection: the text that a user types, the faults, and the schedule of events that they cause.

Live and simulated processes use the same text, and the same seed gives the same schedule.

A fault occurs once, at a time, or repeatedly with exponential times between (a mean time between failures). Times and
victims that the text leaves open are drawn from the seed, with a separate random stream for each fault.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from stretto.call_syntax import Words
from stretto.errors import LaunchError, explain
from stretto.units import TIMES, spelled

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["worker", "server", "coordinator"]
Verb = Literal["kill", "back", "pause", "resume", "cut", "heal", "slow", "restore"]
SAID: dict[Verb, str] = {
    "kill": "killed:",
    "back": "started again:",
    "pause": "stopped:",
    "resume": "resumed:",
    "cut": "cut off:",
    "heal": "no longer cut off:",
    "slow": "slow link of",
    "restore": "whole link of",
}
STREAM = 2
"""Separates these random numbers from others of the same seed."""
SHORTEST_S = 1e-6
"""Minimum of seconds between or within faults: with less, virtual time might not advance."""
TIME = "a time such as 500ms, 10s, 2m, 1h, at least 0.001ms"
EXAMPLES = {
    "kill": "kill worker 3 at 10s, back after 5s",
    "pause": "pause worker 2 for 5s at 30s",
    "cut": "cut workers 0-3 for 10s at 20s",
    "slow": "slow link of worker 1 by 10 for 20s at 5s",
}


@dataclass(frozen=True, slots=True)
class At:
    """Once, `seconds` after the start."""

    seconds: float

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return f"at {spelled(self.seconds)}s"


@dataclass(frozen=True, slots=True)
class Every:
    """Repeatedly, with exponential times between of this mean, in seconds."""

    mean_s: float

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return f"every {spelled(self.mean_s)}s"


@dataclass(frozen=True, slots=True)
class Target:
    """Victim of a fault: a numbered worker or server shard, a random one without a number, or the coordinator."""

    kind: Kind
    number: int | None = None

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return self.kind if self.number is None else f"{self.kind} {self.number}"


@dataclass(frozen=True, slots=True)
class Kill:
    """A process is killed, and restarted after a while or never."""

    begins: ClassVar[Verb] = "kill"
    ends: ClassVar[Verb] = "back"
    who: Target
    when: At | Every
    back_after_s: float | None = None

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        restart = "" if self.back_after_s is None else f", back after {spelled(self.back_after_s)}s"
        return f"kill {self.who} {self.when}{restart}"


@dataclass(frozen=True, slots=True)
class Pause:
    """A process is stopped for a while, as between SIGSTOP and SIGCONT."""

    begins: ClassVar[Verb] = "pause"
    ends: ClassVar[Verb] = "resume"
    who: Target
    when: At | Every
    for_s: float

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return f"pause {self.who} for {spelled(self.for_s)}s {self.when}"


@dataclass(frozen=True, slots=True)
class Partition:
    """The network between these workers and all other processes, servers included, is cut for a while."""

    begins: ClassVar[Verb] = "cut"
    ends: ClassVar[Verb] = "heal"
    workers: tuple[int, ...]
    when: At | Every
    for_s: float

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return f"cut workers {_ranges(self.workers)} for {spelled(self.for_s)}s {self.when}"


@dataclass(frozen=True, slots=True)
class Slow:
    """The capacity of a link, up and down, is divided by `factor` for a while."""

    begins: ClassVar[Verb] = "slow"
    ends: ClassVar[Verb] = "restore"
    who: Target
    when: At | Every
    for_s: float
    factor: float

    def __str__(self) -> str:
        """Return the text that parses to this value."""
        return f"slow link of {self.who} by {spelled(self.factor)} for {spelled(self.for_s)}s {self.when}"


Fault = Kill | Pause | Partition | Slow


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """Event of a fault and its victims: numbers of workers or server shards; the coordinator is number 0 of its kind.

    `factor` is that of a slowed or restored link, else 1. `back_after_s`: seconds until a killed process restarts.
    """

    verb: Verb
    kind: Kind
    numbers: tuple[int, ...]
    factor: float = 1.0
    back_after_s: float | None = None

    def __str__(self) -> str:
        """Return a line for the user."""
        factor = f" by {spelled(self.factor)}" if self.verb == "slow" else ""
        return f"{SAID[self.verb]} {self.who()}{factor}"

    def who(self) -> str:
        """Return the victims as text."""
        return self.kind if self.kind == "coordinator" else f"{self.kind} {_ranges(self.numbers)}"

    def words(self) -> dict[str, Any]:
        """Return the fields of its event in the log."""
        return {"verb": self.verb, "kind": self.kind, "numbers": list(self.numbers), "text": str(self)}


def parse(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by `;`. Raise LaunchError with the wrong word marked.

    A fault of several workers, such as `kill workers 0-3 at 10s`, is one fault for each; a cut is one for all.

    >>> parse("kill worker 3 at 10s; pause worker for 500ms every 2m")[1]
    Pause(who=Target(kind='worker', number=None), when=Every(mean_s=120.0), for_s=0.5)
    >>> print(*parse("cut workers 2,0-1,7 for 10s at 20s"))
    cut workers 0-2,7 for 10s at 20s
    """
    words = Words(text, "--faults", "; ".join((EXAMPLES["kill"], EXAMPLES["pause"])), "a fault")
    return tuple(fault for _ in words.listed(";") for fault in _fault(words))


def _fault(words: Words) -> Sequence[Fault]:
    words.expected = " or ".join(EXAMPLES)
    return READERS[words.choose(EXAMPLES)](words)


def _kill(words: Words) -> Sequence[Fault]:
    targets, when, back_after_s = _who(words, "worker", "server", "coordinator"), _when(words), None
    if words.skip(","):
        words.take("back")
        back_after_s = _time(words, "after")
    return [Kill(target, when, back_after_s) for target in targets]


def _pause(words: Words) -> Sequence[Fault]:
    targets, for_s, when = _who(words, "worker", "server", "coordinator"), _time(words, "for"), _when(words)
    return [Pause(target, when, for_s) for target in targets]


def _cut(words: Words) -> Sequence[Fault]:
    words.take("workers", "worker")
    workers, for_s = tuple(sorted(set(words.numbers()))), _time(words, "for")
    return [Partition(workers, _when(words), for_s)]


def _slow(words: Words) -> Sequence[Fault]:
    words.take("link")
    words.take("of")
    targets = _who(words, "worker", "server")
    words.take("by")
    factor = words.quantity(least=1, expected="a number, at least 1")
    for_s, when = _time(words, "for"), _when(words)
    return [Slow(target, when, for_s, factor) for target in targets]


READERS = {"kill": _kill, "pause": _pause, "cut": _cut, "slow": _slow}


def _who(words: Words, *kinds: Kind) -> list[Target]:
    kind = next((kind for kind in kinds if words.skip(kind) or words.skip(f"{kind}s")), None)
    if kind is None:
        raise words.refused(" or ".join(kinds))
    numbered = kind != "coordinator" and words.next[:1].isdigit()
    return [Target(kind, number) for number in words.numbers()] if numbered else [Target(kind)]


def _when(words: Words) -> At | Every:
    if words.take("at", "every") == "at":
        return At(words.quantity(TIMES, expected="a time such as 0s, 500ms, 2m, 1h"))
    return Every(words.quantity(TIMES, SHORTEST_S, expected=TIME))


def _time(words: Words, preposition: str) -> float:
    words.take(preposition)
    return words.quantity(TIMES, SHORTEST_S, expected=TIME)


def _ranges(numbers: Sequence[int]) -> str:
    firsts = sorted(set(numbers) - {number + 1 for number in numbers})
    lasts = sorted(set(numbers) - {number - 1 for number in numbers})
    return ",".join(
        f"{first}-{last}" if first < last else f"{first}" for first, last in zip(firsts, lasts, strict=True)
    )


ABSENT = {
    "server": ("there is no parameter server", "a fault of workers, or a recipe with a server"),
    "worker": ("no worker runs on the launcher's machine", "a fault of the coordinator or of a server"),
}
"""Problem and expectation for a fault of a kind of process that is not there."""


def check(faults: Sequence[Fault], workers: int, shards: int) -> None:
    """Raise LaunchError for a fault whose victim does not exist among these workers and shards."""
    for fault in faults:
        kind, numbers = victims_of(fault)
        count = {"worker": workers, "server": shards, "coordinator": 1}[kind]
        missing = next((number for number in numbers if number >= count), None)
        if count == 0:
            raise _cannot(fault, *ABSENT[kind])
        if missing is not None:
            raise _cannot(fault, f"there is no {kind} {missing} of {count}", f"a {kind} from 0 to {count - 1}")
        if isinstance(fault, Partition) and len(numbers) == count:
            raise _cannot(fault, f"all {count} workers on one side of a cut", "at least one worker on the other side")


def _cannot(fault: Fault, problem: str, expected: str) -> LaunchError:
    return LaunchError(explain(problem, got=fault, expected=expected, to_type=f'--faults "{EXAMPLES[fault.begins]}"'))


def victims_of(fault: Fault) -> tuple[Kind, tuple[int, ...]]:
    """Return the kind and the numbers of a fault's victims; no numbers if they are drawn."""
    if isinstance(fault, Partition):
        return "worker", fault.workers
    if fault.who.kind == "coordinator":
        return "coordinator", (0,)
    return fault.who.kind, () if fault.who.number is None else (fault.who.number,)


def check_live(faults: Sequence[Fault], restarts: int) -> None:
    """Raise LaunchError for a fault that live processes with this number of restarts can't be subjected to."""
    for fault in faults:
        if isinstance(fault, Partition | Slow):
            problem, expected = "links are cut and slowed in simulations only", "a kill or a pause of a process"
            raise LaunchError(explain(problem, got=fault, expected=expected, to_type=f'--faults "{EXAMPLES["pause"]}"'))
        if isinstance(fault, Kill) and fault.back_after_s is not None and not restarts:
            problem, expected = "no process is restarted with --restarts 0", "a kill for good, or restarts"
            raise LaunchError(explain(problem, got=fault, expected=expected, to_type="--restarts 3"))


def schedule(
    faults: Sequence[Fault], workers: int, shards: int, seed: int, supervised: bool = False
) -> Iterator[tuple[float, FaultEvent]]:
    """Yield (seconds, event) in order of time; endless if a fault is repeated.

    The random numbers of a fault depend on the seed and its index in the list, not on other faults. A killed process is
    neither drawn nor killed or paused, and a paused one is not paused again. Each temporary kill has its `back`, each
    cut its `heal`, each slow link its `restore`, and each pause its `resume`, unless the process is killed before. Cuts
    and slow links may overlap: a link is restored when all of them have ended.
    A repeated fault ends when all its possible victims are killed permanently. `supervised` processes never are: a
    supervisor restarts a killed process without its own `back`. Servers and the coordinator are always supervised.

    >>> plan = schedule(parse("kill worker 1 at 10s, back after 5s"), workers=4, shards=0, seed=0)
    >>> [(time, event.verb, event.numbers) for time, event in plan]
    [(10.0, 'kill', (1,)), (15.0, 'back', (1,))]
    """
    import numpy as np  # only here: launchers without faults start sooner

    processes = _ProcessStates({"worker": workers, "server": shards, "coordinator": 1})
    rngs = [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(STREAM, one))) for one in range(len(faults))]
    queue: list[_Turn] = []
    for number, (fault, rng) in enumerate(zip(faults, rngs, strict=True)):
        heapq.heappush(queue, _Turn(_after(0.0, fault.when, rng), True, number, 0))
    while queue:
        turn = heapq.heappop(queue)
        if turn.ends is not None:
            if processes.end(turn.ends, turn):
                yield turn.time, turn.ends
            continue
        fault, rng = faults[turn.fault], rngs[turn.fault]
        event, lasts_s = processes.event_of(fault, rng), _lasts_s(fault)
        if event is not None:
            returns = supervised or event.kind != "worker"
            processes.begin(event, turn, is_removed=not returns or lasts_s is not None, for_good=lasts_s is None)
            yield turn.time, event
        if event is not None and lasts_s is not None:
            ends = replace(event, verb=fault.ends, back_after_s=None)
            heapq.heappush(queue, turn._replace(time=turn.time + lasts_s, begins=False, ends=ends))
        if isinstance(fault.when, Every) and not processes.lost(*victims_of(fault)):
            heapq.heappush(queue, turn._replace(time=_after(turn.time, fault.when, rng), again=turn.again + 1))


class _Turn(NamedTuple):
    """Begin or end of a fault, in order of time; at equal times, ends come before begins."""

    time: float
    begins: bool
    fault: int
    again: int
    ends: FaultEvent | None = None


def _after(time: float, when: At | Every, rng: np.random.Generator) -> float:
    return when.seconds if isinstance(when, At) else time + rng.exponential(when.mean_s)


def _lasts_s(fault: Fault) -> float | None:
    return fault.back_after_s if isinstance(fault, Kill) else fault.for_s


class _ProcessStates:
    """Killed processes, for a while or permanently, and paused ones with the turn that paused them."""

    def __init__(self, sizes: dict[Kind, int]) -> None:
        self._sizes = sizes
        self._gone: dict[tuple[Kind, int], bool] = {}
        self._paused: dict[tuple[Kind, int], tuple[int, int]] = {}

    def event_of(self, fault: Fault, rng: np.random.Generator) -> FaultEvent | None:
        """Return the event of a fault now, with a random victim if it names none; None if no victim is left."""
        kind, victims = victims_of(fault)
        numbers = victims or tuple(rng.permutation(self._sizes[kind]).tolist())
        if not victims or isinstance(fault, Kill | Pause):
            excluded = self._gone.keys() | self._paused.keys() if isinstance(fault, Pause) else self._gone.keys()
            numbers = next(((one,) for one in numbers if (kind, one) not in excluded), ())
        factor = fault.factor if isinstance(fault, Slow) else 1.0
        back_after_s = fault.back_after_s if isinstance(fault, Kill) else None
        return FaultEvent(fault.begins, kind, numbers, factor, back_after_s) if numbers else None

    def begin(self, event: FaultEvent, turn: _Turn, is_removed: bool, for_good: bool) -> None:
        """Note the begin of a fault, and whether a kill removes the process, permanently or not."""
        process = event.kind, event.numbers[0]
        if event.verb == "kill":
            self._paused.pop(process, None)
            if is_removed:
                self._gone[process] = for_good
        elif event.verb == "pause":
            self._paused[process] = turn.fault, turn.again

    def end(self, event: FaultEvent, turn: _Turn) -> bool:
        """Note the end of a fault. Return False if a pause has ended earlier, with the process."""
        process = event.kind, event.numbers[0]
        if event.verb == "back":
            del self._gone[process]
        elif event.verb == "resume":
            if self._paused.get(process) != (turn.fault, turn.again):
                return False
            del self._paused[process]
        return True

    def lost(self, kind: Kind, numbers: tuple[int, ...]) -> bool:
        """Return True if all possible victims of a fault are killed permanently."""
        return all(self._gone.get((kind, number), False) for number in numbers or range(self._sizes[kind]))
