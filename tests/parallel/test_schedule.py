"""Predicted time of a pass through stages: the closed form for equal stages, and bounds for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.parallel.schedule import Batch, Boundary, Hop, pipeline_schedule, sharded_seconds

seconds = st.floats(1e-4, 1.0)
counts = st.integers(1, 8)


@given(st.integers(2, 8), counts, seconds, st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1e6))
def test_equal_stages_take_the_closed_form(
    stages: int, batches: int, turn_s: float, load: float, latency_s: float, outputs: float
) -> None:
    hop = Hop(1e-6, latency_s)
    nbytes = load * turn_s / 3 / hop.byte_s  # a link carries a micro-batch faster than a stage computes it forward
    boundaries = [Boundary(nbytes, hop, hop)] * (stages - 1)
    found = pipeline_schedule([turn_s] * stages, boundaries, Batch(batches, outputs, hop))
    turns, ways = (batches + stages - 1) * turn_s, 2 * (stages - 1) * (latency_s + nbytes * hop.byte_s)
    assert found.seconds == pytest.approx(turns + ways + latency_s + (stages - 1) * outputs * hop.byte_s)


@given(st.integers(2, 8), counts)
def test_without_a_network_equal_stages_wait_for_the_textbook_bubble(stages: int, batches: int) -> None:
    found = pipeline_schedule([0.25] * stages, [Boundary()] * (stages - 1), Batch(batches))
    assert found.bubble == pytest.approx((stages - 1) / (batches + stages - 1))
    assert found.waiting == pytest.approx([(stages - 1) * 0.25] * stages)


@given(st.lists(seconds, min_size=2, max_size=6), counts)
def test_unequal_stages_wait_for_the_slowest_one(turns: list[float], batches: int) -> None:
    found = pipeline_schedule(turns, [Boundary()] * (len(turns) - 1), Batch(batches))
    assert found.seconds == pytest.approx(sum(turns) + (batches - 1) * max(turns))
    assert found.computing == pytest.approx([batches * one for one in turns])


def test_a_slow_link_carries_one_micro_batch_after_the_other() -> None:
    slow = Boundary(3.0, Hop(1.0, 0.5), Hop(2.0))
    found = pipeline_schedule([0.3, 0.3], [slow], Batch(4))
    assert found.seconds == pytest.approx((0.1 + 4 * 3 + 0.5 + 0.1) + (0.2 + 4 * 6 + 0.2))


@given(st.integers(2, 8), seconds, st.lists(st.floats(0, 1e6), max_size=5))
def test_a_sharded_step_is_a_part_of_the_computing_and_three_rings(
    ranks: int, step_s: float, groups: list[float]
) -> None:
    found = sharded_seconds(step_s, ranks, groups, Hop(1e-6, 0.01))
    rings = 3 * (ranks - 1) / ranks * sum(groups) * 1e-6
    assert found == pytest.approx(step_s / ranks + rings + 3 * (ranks - 1) * len(groups) * 0.01)
