"""Who is in a simulated world whose workers may die: the live program's roll, on the virtual clock.

Messages between workers and the coordinator take the network's latency, and those across a cut are lost; what is not
answered is said again with the next beat, as live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.errors import LaunchError, MemberOutError, UnevenLoopsError, explain
from stretto.launcher.config import RunConfig, is_free
from stretto.launcher.supervisor import pause_s
from stretto.membership.client_state import ALONE, CoordinatorConnection, MembershipClientState
from stretto.membership.coordinator import COORDINATOR, Event, MembershipCoordinator, Outgoing
from stretto.membership.loop_positions import Waits
from stretto.membership.messages import (
    Broken,
    Continue,
    GenerationView,
    Heartbeat,
    Leave,
    Quit,
    ReadyReport,
    Said,
    Told,
)
from stretto.parameter_server.messages import OVER
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.flows import ARRIVE
from stretto.simulator.network.topology import Links

NOTICED_S = 0.01
"""From the end of a process until the coordinator knows of it: seen live, on one machine."""
MOST_BEATS_S = 1.0
"""At least so often each worker says that it is there, and five times within the failure timeout."""
DESK = -1
"""The coordinator sits with the first server, whose end this is."""


def beat_s(failure_timeout_s: float) -> float:
    """Seconds between two beats of a worker."""
    return min(failure_timeout_s / 5, MOST_BEATS_S)


class Line(CoordinatorConnection):
    """A worker's line to the coordinator; what `stretto.membership.client` is live."""

    def __init__(self, members: SimCoordinator, worker: Worker) -> None:
        self._members, self.worker, self.life = members, worker, worker.life
        self.on_abort: Callable[[int, str], None] = lambda _generation, _why: None
        """Called with the generation that is over, and why."""
        known = MembershipClientState(
            worker.number, worker.life, lambda generation, why: self.on_abort(generation, why)
        )
        super().__init__(known)
        self._doing = ("starting", 0, worker.now())
        self.place: Callable[[], int] = lambda: -1
        self._waits: Waits | None = None
        self._broken = Broken(0, "")
        self._leaves = False
        self.heard_at = worker.now()
        """When the coordinator could be heard last."""

    def broken(self, generation: int, why: str, forming: bool = False) -> None:
        """An exchange of this generation has failed here, or its `forming`."""
        self._broken = Broken(generation, why, forming)
        self.speak()

    def doing(self, text: str, hand: int, waits: Waits | None = None) -> None:
        """What goes with the next beats; whoever waits for a further hand is told of it."""
        is_further = hand != self._doing[1]
        self._doing, self._waits = (text, hand, self.worker.now()), waits
        if is_further and self.held:
            self.speak(with_beat=True)

    def quit(self) -> None:
        """Ask to leave at the next rest."""
        self._members.say(self, Quit())

    def leave(self) -> None:
        """The run is over for this worker."""
        self._leaves = True
        self.speak()

    def close(self) -> None:
        """There is nothing to let go of."""

    def speak(self, with_beat: bool = False) -> None:
        """Say what is to be said, as often as it takes."""
        if with_beat:
            doing, hand, since = self._doing
            for_s = self._members.now - since
            beat = Heartbeat(self.attendance.generation, doing, for_s, hand, self.place(), self._waits)
            self._members.say(self, beat)
        if self._broken.generation > self.aborted:
            self._members.say(self, self._broken)
        for one in self.attendance.says():
            self._members.say(self, one)
        if self._leaves:
            self._members.say(self, Leave())

    def hear(self, told: Told) -> None:
        """The coordinator says something."""
        if self.attendance.told(told):
            self.speak(with_beat=self.held)
        self.worker.wake()

    def _stand(self, here: ReadyReport) -> GenerationView | Continue:
        known = self.attendance
        known.stand(here)
        self.speak()
        self.worker.until(
            lambda: known.answer is not None or known.out is not None, lambda: "the coordinator to say who goes on"
        )
        if known.answer is None:
            raise MemberOutError(f"worker {self.worker.number} is no member any more: {known.out}")
        return known.answer


class SimCoordinator:
    """The coordinator of a world, and what the launcher is live: it sees who dies, and has another life begin.

    `publish` writes an event; `say` shows a line to a person; `on_gone` hears of each life that is over where workers
    are `free`, which the first script says where the order names no recipe.
    """

    def __init__(
        self,
        world: Engine,
        links: Links,
        order: RunConfig,
        publish: Callable[[Event], None],
        say: Callable[[str], None],
        on_gone: Callable[[int, int], None],
    ) -> None:
        self._world, self._links, self._order = world, links, order
        self._publish, self._say, self._on_gone = publish, say, on_gone
        self.free = is_free(order)
        """Whether nobody waits for others."""
        self._made: MembershipCoordinator | None = None
        self._records: list[bytes] = []
        self._lines: dict[int, Line] = {}
        self._dead: dict[int, tuple[int, str, bool]] = {}
        """Whom the launcher has told of: the life that was over, why, and whether there would be another."""
        self._unnoticed: set[int] = set()
        """Workers whose end the launcher does not know of yet."""
        self._due: set[int] = set()
        """Those that are to come back as soon as it does."""
        self._coming: set[int] = set()
        self.is_away = False
        """Whether the coordinator's process is gone."""
        self._stopped_at: float | None = None
        """Since when the coordinator stands still, if it does."""
        self._unheard: list[Callable[[], None]] = []
        """What it hears when it goes on, or when it can know how the dead are missed."""
        self._life = 0
        """Of the coordinator's process."""
        self._every_s, self._beats_s = min(order.failure_timeout_s / 10, 0.2), beat_s(order.failure_timeout_s)
        self._beat_at = 0.0
        self._has_ended = False
        """Whether somebody has come to its end: then nobody is started again."""
        world.goes_on = lambda: (
            not self._has_ended and (bool(self._unnoticed or self._coming or self._unheard) or self.is_away)
        )
        world.queue.at(self._every_s, self._tick, ARRIVE)

    @property
    def now(self) -> float:
        """The time."""
        return self._world.queue.now

    @property
    def returning(self) -> set[int]:
        """The workers whose next life will begin."""
        return self._coming

    def line(self, worker: Worker) -> Line:
        """A worker's line."""
        found = self._lines[worker.number] = Line(self, worker)
        self._listen()
        return found

    # --- what the launcher is live ------------------------------------------------------------------------------

    def killed(self, worker: Worker, back_after_s: float | None) -> None:
        """A worker's process was killed, and another one is to begin or not."""
        self._ended(worker, "killed by SIGKILL", back_after_s)

    def stopped(self, worker: Worker, returns: bool) -> None:
        """A worker has found out that it is no member any more: its process ends, and another one begins or not."""
        why = "was taken for dead and stopped by itself" if returns else "it stays out"
        self._ended(worker, why, pause_s(worker.life) if returns else None)

    def comes_late(self, worker: Worker) -> None:
        """A worker has found out that the run is over: nothing is heard of it any more."""
        about = {"event": "membership", "worker": worker.number, "generation": self._roll.generation}
        self._publish({**about, "what": "left", "incarnation": worker.life, "why": OVER})

    def ended(self) -> None:
        """A worker has come to its end."""
        self._has_ended = True

    def _back(self, number: int) -> None:
        """Another life of a worker begins, unless others have come to their end meanwhile."""
        if number in self._unnoticed:
            self._due.add(number)
        elif number in self._coming and not self._has_ended:
            self._coming.discard(number)
            self._world.bear(number)

    def coordinator_killed(self, back_after_s: float | None) -> None:
        """The coordinator's process was killed: it begins again from its journal."""
        if self.is_away:
            return
        self.is_away, self._stopped_at = True, None
        self._unheard.clear()
        self.begin_again(COORDINATOR, self._life, back_after_s, self._restart)

    def coordinator_stops(self) -> None:
        """The coordinator's process stands still: what is said to it waits."""
        if not self.is_away and self._stopped_at is None:
            self._stopped_at = self.now

    def coordinator_goes_on(self) -> None:
        """It hears what was said meanwhile, and takes nobody for silent that it did not listen to."""
        if self._stopped_at is None:
            return
        slept_s, self._stopped_at = self.now - self._stopped_at, None
        if self._made is not None:
            self._made.slept(slept_s)
        self._listen()

    def _ended(self, worker: Worker, why: str, back_after_s: float | None) -> None:
        back_after_s = None if self._has_ended else back_after_s
        returns = back_after_s is not None
        self._unnoticed.add(worker.number)
        if back_after_s is not None:
            self._coming.add(worker.number)
            self._world.queue.at(self.now + back_after_s, lambda: self._back(worker.number), ARRIVE)
        self._world.queue.at(self.now + NOTICED_S, lambda: self._notice(worker, why, returns), ARRIVE, worker.number)

    def _notice(self, worker: Worker, why: str, returns: bool) -> None:
        number = worker.number
        self._unnoticed.discard(number)
        self._dead[number] = worker.life, why, returns
        self._tell_dead(number)
        if number in self._due:
            self._due.discard(number)
            self._back(number)

    def _tell_dead(self, number: int) -> None:
        life, why, returns = self._dead[number]
        self._come(lambda: self._tell(self._roll.gone(number, life, self.now, returns, why)))

    def _restart(self) -> None:
        self.is_away, self._life = False, self._life + 1
        if self._records:
            self._made = MembershipCoordinator.restored(self._records, self.now)
        for number in self._dead:
            self._tell_dead(number)
        for line in self._there():
            line.speak(with_beat=True)

    def begin_again(self, number: int, life: int, back_after_s: float | None, then: Callable[[], object]) -> None:
        """The life of a process that serves the workers was ended; another one begins, and does something."""
        about = {"event": "membership", "worker": number, "generation": 0}

        def begin() -> None:
            self._publish({**about, "what": "joined", "incarnation": life + 1, "why": "started again"})
            then()

        self._publish({**about, "what": "failed", "incarnation": life, "why": "killed by SIGKILL"})
        self._world.queue.at(self.now + (pause_s(life) if back_after_s is None else back_after_s), begin, ARRIVE)

    def again(self, numbers: Sequence[int]) -> None:
        """These workers can speak again, and do."""
        for number in numbers:
            if (line := self._lines.get(number)) is not None and self._is_there(line):
                line.speak(with_beat=True)

    # --- the coordinator ----------------------------------------------------------------------------------------

    @property
    def _roll(self) -> MembershipCoordinator:
        if self._made is None:
            order = self._order
            self._made = MembershipCoordinator(
                {},
                order.workers,
                order.min_workers,
                order.max_workers,
                self.free,
                failure_timeout_s=order.failure_timeout_s,
            )
        return self._made

    def _come(self, word: Callable[[], None]) -> None:
        """Something comes to the coordinator's process, if there is one, which hears it as soon as it can."""
        if not self.is_away:
            self._unheard.append(word)
            self._listen()

    def _listen(self) -> None:
        """Hear what has come, unless the process stands still, or knows too little to make anything of it."""
        if self._stopped_at is None and not self._is_early():
            unheard, self._unheard = self._unheard, []
            for one in unheard:
                one()

    def _is_early(self) -> bool:
        """Whether a script is still to name its recipe, before which nobody knows how the dead are missed."""
        living = any(not one.is_over for one in self._world.workers)
        return self._order.recipe is None and not self._lines and (living or bool(self._coming))

    def say(self, line: Line, said: Said) -> None:
        """A worker says something to the coordinator."""
        if self._is_there(line):
            number, life = line.worker.number, line.life
            self._later(line, lambda: self._come(lambda: self._hear(number, life, said)))

    def _hear(self, worker: int, life: int, said: Said) -> None:
        self._tell(self._roll.hear(worker, life, said, self.now))

    def _tick(self) -> None:
        """Time has passed: whoever lives and can be heard says so, and the coordinator looks who has not."""
        self._world.queue.at(self.now + self._every_s, self._tick, ARRIVE)
        if self.now >= self._beat_at:
            self._beat_at = self.now + self._beats_s
            for line in self._there():
                line.speak(with_beat=True)
        is_there = not self.is_away and self._stopped_at is None
        for line in self._lines.values():
            self._mind_silence(line, is_there)
        if is_there and self._made is not None:
            self._tell(self._made.tick(self.now))

    def _mind_silence(self, line: Line, is_there: bool) -> None:
        """Who is alone and hears nothing of the coordinator stops before others begin without it."""
        if is_there and self._is_there(line, awake=False):
            line.heard_at = self.now
        silent_s, alone = self.now - line.heard_at, line.attendance.is_alone and not self.free
        if alone and not line.worker.is_dead and silent_s > ALONE * self._order.failure_timeout_s:
            line.on_abort(line.attendance.generation, "the coordinator was not heard")

    def _tell(self, posts: Sequence[Outgoing]) -> None:
        roll = self._roll
        self._records += roll.records()
        for post in posts:
            line = self._lines.get(post.worker)
            if line is not None and line.life == post.life and self._is_there(line, awake=False):
                self._later(line, self._told(line, post.told))
        notices, roll.notices = roll.notices, []
        events, roll.events = roll.events, []
        for notice in notices:
            self._say(notice)
        for event in events:
            self._publish(event)
            if self.free and event["what"] == "failed":
                self._on_gone(event["worker"], event["incarnation"])
        if roll.uneven is not None:
            raise UnevenLoopsError(roll.uneven)
        if roll.phase == "stopped":
            raise self._few()

    def _told(self, line: Line, told: Told) -> Callable[[], None]:
        def come() -> None:
            awake = self._world.outages.awake(line.worker.number, self.now)
            if awake > self.now:
                self._world.queue.at(awake, come, ARRIVE, line.worker.number)
            elif self._is_there(line):
                line.hear(told)

        return come

    def _few(self) -> LaunchError:
        living = sum(not one.is_over for one in self._world.workers)
        problem = f"the run cannot go on at {self.now:g} s of virtual time: too few workers are left"
        least = max(self._order.min_workers, 1)
        to_type = '--faults "kill worker 1 at 3s, back after 2s"' + " or --min-workers 1" * (least > 1)
        return LaunchError(
            explain(problem, got=f"{living} of {self._order.workers}", expected=f"at least {least}", to_type=to_type)
        )

    # --- the way between ----------------------------------------------------------------------------------------

    def _there(self) -> list[Line]:
        return [line for line in self._lines.values() if self._is_there(line)]

    def _is_there(self, line: Line, awake: bool = True) -> bool:
        """Whether a worker can be heard now."""
        if line.worker.is_dead or self._world.net.is_cut_off(line.worker.number):
            return False
        return not awake or self._world.outages.awake(line.worker.number, self.now) <= self.now

    def _later(self, line: Line, then: Callable[[], None]) -> None:
        """Behind the latency. The run begins when its first workers have found each other."""
        number, is_first = line.worker.number, not line.life and not line.attendance.generation
        latency_s = 0.0 if is_first else self._links.path(number, DESK)[1]
        self._world.queue.at(self.now + latency_s, then, ARRIVE, number)
