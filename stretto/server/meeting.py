"""What all workers ask together: laid down one by one, answered when it is whole. A plain state machine.

Answers do not depend on the order in which things came. What comes twice counts once; what a worker that has left can
no longer bring is refused to those who wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stretto.errors import WireError

Thing = TypeVar("Thing")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Told(Generic[Found]):
    """The answer for one worker in one exchange; `problem` says why there is none."""

    worker: int
    op: int
    found: Found | None
    problem: str = ""


@dataclass(slots=True)
class _Round(Generic[Thing]):
    laid: dict[int, Thing] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class Meeting(Generic[Thing, Found]):
    """Exchanges of all workers, numbered. `combine` makes the answer of what all have laid down, in their order."""

    def __init__(self, workers: int, combine: Callable[[Sequence[Thing]], Found]) -> None:
        self._workers = workers
        self._combine = combine
        self._rounds: dict[int, _Round[Thing]] = {}
        self._ended: set[int] = set()
        self.gone: set[int] = set()

    def lay(self, worker: int, op: int, thing: Thing) -> list[Told[Found]]:
        """A worker lays something down for exchange `op`; returns what can be told now."""
        if not 0 <= worker < self._workers or op in self._ended or worker in self.gone:
            return []
        round_ = self._rounds.setdefault(op, _Round())
        round_.laid.setdefault(worker, thing)
        if len(round_.laid) < self._workers:
            return self._refused(op) if self.gone - round_.laid.keys() else []
        self._end(op)
        try:
            found = self._combine([round_.laid[one] for one in range(self._workers)])
        except (ValueError, WireError) as error:
            return [Told(one, op, None, str(error)) for one in range(self._workers)]
        return [Told(one, op, found) for one in range(self._workers)]

    def leave(self, worker: int) -> list[Told[Found]]:
        """A worker has left: what waits for it is refused."""
        self.gone.add(worker)
        waiting = [op for op, round_ in self._rounds.items() if worker not in round_.laid]
        return [told for op in waiting for told in self._refused(op)]

    def _refused(self, op: int) -> list[Told[Found]]:
        """Tell those that wait, once, that it won't become whole."""
        round_ = self._rounds[op]
        missing = ", ".join(map(str, sorted(self.gone - round_.laid.keys())))
        waiting = sorted(round_.laid.keys() - round_.told)
        round_.told.update(waiting)
        return [Told(one, op, None, f"worker {missing} left (exchange {op})") for one in waiting]

    def _end(self, op: int) -> None:
        del self._rounds[op]
        self._ended.add(op)
        self._ended -= {one for one in self._ended if one < op - 1000}
