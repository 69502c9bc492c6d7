"""The virtual clock: a queue of events, and a time that moves only when one of them happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class Event:
    """Something that will happen at `time`; `then` is None once it has happened or was cancelled."""

    __slots__ = ("then", "time")

    def __init__(self, time: float, then: Callable[[], None]) -> None:
        self.time = time
        self.then: Callable[[], None] | None = then


class Queue:
    """Events in the order of (time, priority, key, the order in which they were added).

    Nothing else moves `now`, so what happens depends on the events alone and is the same every time.

    >>> queue, said = Queue(), []
    >>> for word, time in ("world", 2.0), ("hello", 1.0):
    ...     _ = queue.at(time, lambda word=word: said.append((queue.now, word)))
    >>> while queue.step():
    ...     pass
    >>> said
    [(1.0, 'hello'), (2.0, 'world')]
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds of virtual time: when the event that was taken last happened."""
        self._heap: list[tuple[float, int, int, int, Event]] = []
        self._added = 0
        self._cancelled = 0

    def at(self, time: float, then: Callable[[], None], priority: int = 0, key: int = 0) -> Event:
        """Have `then` called at `time`; at one time the lower priority goes first, then the lower key.

        Raises ValueError for a time that has passed or that is not finite.
        """
        if not self.now <= time < inf:
            raise ValueError(f"no event can be at {time}: it is {self.now} already, and times are finite")
        event = Event(time, then)
        self._added += 1
        heapq.heappush(self._heap, (time, priority, key, self._added, event))
        return event

    def cancel(self, event: Event) -> None:
        """Have the event not happen. One that has happened or was cancelled before stays as it is."""
        if event.then is None:
            return
        event.then = None
        self._cancelled += 1
        if self._cancelled > 64 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[4].then is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def step(self) -> bool:
        """Let the next event happen: move `now` to its time and call it. False when there is none."""
        while self._heap:
            event = heapq.heappop(self._heap)[4]
            if event.then is None:
                self._cancelled -= 1
                continue
            then, event.then = event.then, None
            self.now = event.time
            then()
            return True
        return False

    def __len__(self) -> int:
        """How many events are still to happen."""
        return len(self._heap) - self._cancelled
