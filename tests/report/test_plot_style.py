"""Labels keep out of each other's way."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stretto.report.plot_style import _apart, short


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(sorted))
def test_labels_are_apart_in_order_and_below_the_top(wanted: list[float]) -> None:
    gaps = [0.1] * len(wanted)
    placed = _apart(wanted, gaps)
    assert all(above - below >= 0.1 - 1e-9 for below, above in itertools.pairwise(placed))
    assert placed[-1] <= 1 + 1e-9


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True).map(sorted))
def test_labels_that_have_room_stay_where_they_are(wanted: list[int]) -> None:
    heights = [0.2 * one for one in wanted]
    assert _apart(heights, [0.1] * len(heights)) == heights


def test_long_names_take_two_short_lines() -> None:
    assert short("allreduce()") == "allreduce()"
    lines = short("diloco(every=50, outer_lr=0.4, outer_momentum=0.8)").split("\n")
    assert len(lines) == 2
    assert max(map(len, lines)) <= 22
    assert short("stale_synchronous(bound=4)") == "stale_synchronous(\nbound=4)"
    assert short("elastic_averaging(every=10, alpha=0.1)") == "elastic_averaging(\nevery=10, alpha=0.1)"
    assert short("single process (global batch ×4)") == "single process\n(global batch ×4)"
    assert short("a_name_without_any_place_to_cut") == "a_name_without_any_pla\nce_to_cut"
