"""Event queue with virtual time, which advances only when an event is processed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class Event:
    """An event at virtual time `time` (seconds); `callback` is None once it was called or cancelled."""

    __slots__ = ("callback", "time")

    def __init__(self, time: float, callback: Callable[[], None]) -> None:
        self.time = time
        self.callback: Callable[[], None] | None = callback


class EventQueue:
    """Events ordered by (time, priority, key, order of insertion).

    Only `step` advances `now`, so a simulation depends on its events alone and is deterministic.

    >>> queue, log = EventQueue(), []
    >>> for word, time in ("world", 2.0), ("hello", 1.0):
    ...     _ = queue.schedule(time, lambda word=word: log.append((queue.now, word)))
    >>> while queue.step():
    ...     pass
    >>> log
    [(1.0, 'hello'), (2.0, 'world')]
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time in seconds: the time of the last event processed."""
        self._heap: list[tuple[float, int, int, int, Event]] = []
        self._scheduled_count = 0
        self._cancelled_count = 0

    def schedule(self, time: float, callback: Callable[[], None], priority: int = 0, key: int = 0) -> Event:
        """Schedule `callback` at `time`; events of the same time are ordered by priority and key, lowest first.

        Raises ValueError for a time that is in the past or not finite.
        """
        if not self.now <= time < inf:
            raise ValueError(
                f"cannot schedule an event at {time}: the time is {self.now} already, and times are finite"
            )
        event = Event(time, callback)
        self._scheduled_count += 1
        heapq.heappush(self._heap, (time, priority, key, self._scheduled_count, event))
        return event

    def cancel(self, event: Event) -> None:
        """Cancel the event. Has no effect on an event that was processed or cancelled before."""
        if event.callback is None:
            return
        event.callback = None
        self._cancelled_count += 1
        if self._cancelled_count > 64 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[4].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled_count = 0

    def step(self) -> bool:
        """Process the next event: advance `now` to its time and call its callback. Return False if there is none."""
        while self._heap:
            event = heapq.heappop(self._heap)[4]
            if event.callback is None:
                self._cancelled_count -= 1
                continue
            callback, event.callback = event.callback, None
            self.now = event.time
            callback()
            return True
        return False

    def __len__(self) -> int:
        """Return the number of pending events."""
        return len(self._heap) - self._cancelled_count
