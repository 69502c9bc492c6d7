"""The event queue: a total order of events, and no event in the past."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.simulator.event_queue import EventQueue

times = st.floats(0, 10) | st.integers(0, 3).map(float)
entries = st.lists(st.tuples(times, st.integers(-2, 2), st.integers(0, 2)), max_size=30)


@given(entries)
def test_events_are_ordered_by_time_priority_key_and_insertion(asked: list[tuple[float, int, int]]) -> None:
    queue, seen = EventQueue(), []
    for number, (time, priority, key) in enumerate(asked):
        queue.schedule(time, partial(seen.append, number), priority, key)
    clock = []
    while queue.step():
        clock.append(queue.now)
    assert seen == sorted(range(len(asked)), key=lambda number: (*asked[number], number))
    assert clock == sorted(time for time, _, _ in asked)


@given(entries, st.sets(st.integers(0, 29)))
def test_cancelled_event_is_not_processed(asked: list[tuple[float, int, int]], gone: set[int]) -> None:
    queue, seen = EventQueue(), []
    events = [queue.schedule(time, partial(seen.append, number)) for number, (time, _, _) in enumerate(asked)]
    for number in gone & set(range(len(events))):
        queue.cancel(events[number])
        queue.cancel(events[number])
    kept = set(range(len(asked))) - gone
    assert len(queue) == len(kept)
    while queue.step():
        pass
    assert set(seen) == kept and len(queue) == 0


def test_event_may_schedule_others_at_its_own_time() -> None:
    queue, seen = EventQueue(), []

    def again(left: int) -> None:
        seen.append((queue.now, left))
        if left:
            queue.schedule(queue.now, partial(again, left - 1))

    queue.schedule(1.0, partial(again, 2))
    queue.schedule(1.0, partial(seen.append, "other"))
    while queue.step():
        pass
    assert seen == [(1.0, 2), "other", (1.0, 1), (1.0, 0)]


def test_processed_event_cannot_be_cancelled() -> None:
    queue = EventQueue()
    event = queue.schedule(1.0, int)
    queue.schedule(2.0, int)
    assert len(queue) == 2 and queue.step()
    queue.cancel(event)
    assert len(queue) == 1


@pytest.mark.parametrize("time", [0.5, -1.0, inf, nan])
def test_event_in_the_past_or_at_infinity_is_refused(time: float) -> None:
    queue = EventQueue()
    queue.schedule(1.0, int)
    queue.step()
    with pytest.raises(ValueError, match="the time is 1.0 already"):
        queue.schedule(time, int)


def test_cancelled_events_are_removed() -> None:
    queue, seen = EventQueue(), []
    for number in range(10):
        queue.schedule(number, partial(seen.append, number))
    for _ in range(10_000):
        queue.cancel(queue.schedule(1e9, int))
    assert len(queue) == 10 and len(queue._heap) < 1000
    while queue.step():
        pass
    assert seen == list(range(10)) and queue.now == 9
