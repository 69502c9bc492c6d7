"""Intervals that follow the cost of an action keep to their share of the time, whatever the action costs."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from stretto.interval import MOST, SHARE, Interval

FIRST_S = 600.0


@given(st.lists(st.floats(0.001, 300.0), min_size=1, max_size=8))
def test_an_interval_that_follows_the_cost_takes_a_share_of_the_time(costs: list[float]) -> None:
    interval, now = Interval(FIRST_S, follows_cost=True), 0.0
    interval.due(now, 0)
    for cost_s in costs:
        before, limit = now, FIRST_S + max(costs) / SHARE + 1.0
        while not interval.due(now, 0):
            now += 1.0
            assert now - before < limit
        waited = now - before
        assert waited >= (interval.cost_s / SHARE if interval.cost_s else FIRST_S)
        assert waited >= FIRST_S / MOST
        interval.cost_s = cost_s


def test_an_action_that_is_not_to_be_tried_again_is_never_due() -> None:
    interval = Interval(FIRST_S, follows_cost=True)
    assert [interval.due(now, 0) for now in (0.0, FIRST_S)] == [False, True]
    interval.cost_s = math.inf
    assert not any(interval.due(FIRST_S * 10.0**power, 0) for power in range(9))


def test_without_a_reported_cost_the_first_interval_is_repeated() -> None:
    interval = Interval(FIRST_S, follows_cost=True)
    due = [now for now in range(2000) if interval.due(float(now), 0)]
    assert due == [600, 1200, 1800]


def test_a_typed_interval_does_not_follow_the_cost() -> None:
    interval = Interval(seconds=10.0, cost_s=100.0)
    due = [now for now in range(100) if interval.due(float(now), 0)]
    assert [later - now for now, later in itertools.pairwise(due)] == [10] * 8
