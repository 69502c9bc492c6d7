"""Max-min fair sharing against a naive implementation in fractions, and closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, isclose

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.simulator.network.max_min_fairness import INFINITE_CAPACITY, FluidModel

RESOURCES = 6
capacities = st.lists(st.sampled_from([0, 1, 2, 3, 7, 10, 1000, inf]), min_size=RESOURCES, max_size=RESOURCES)
paths = st.lists(st.integers(0, RESOURCES - 1), min_size=1, max_size=4, unique=True)
flows = st.lists(st.tuples(st.integers(1, 50), paths, st.integers(1, 5)), min_size=1, max_size=10)
Asked = tuple[int, list[int], int]


def fair(capacity: Sequence[float], paths: dict[int, tuple[list[int], int]]) -> dict[int, Fraction]:
    """Return the rates of progressive filling: fix the flows of the resource with the smallest share, and repeat."""
    room = {number: Fraction(one) for number, one in enumerate(capacity) if one < inf}
    rates: dict[int, Fraction] = {}
    while open_ := {flow: path for flow, path in paths.items() if flow not in rates}:
        load = {one: sum(weight for path, weight in open_.values() if one in path) for one in room}
        share, full = min((room[one] / load[one], one) for one in room if load[one])
        for flow, (path, weight) in open_.items():
            if full in path:
                rates[flow] = weight * share
                for one in set(path) & set(room):
                    room[one] -= rates[flow]
    return rates


def slowly(capacity: Sequence[float], asked: list[tuple[float, Asked]]) -> dict[int, float]:
    """Return the exact end of each flow; flows that never end are left out."""
    now, ends = Fraction(0), {}
    waiting = {flow: (Fraction(begin), *one) for flow, (begin, one) in enumerate(asked)}
    left: dict[int, Fraction] = {}
    while waiting or left:
        for flow in [flow for flow, (begin, *_) in waiting.items() if begin <= now]:
            _, amount, path, _ = waiting.pop(flow)
            if all(capacity[one] == inf for one in path):
                ends[flow] = float(now)
            else:
                left[flow] = Fraction(amount)
        rates = fair(capacity, {flow: (asked[flow][1][1], asked[flow][1][2]) for flow in left})
        nexts = [now + left[flow] / rate for flow, rate in rates.items() if rate]
        nexts += [begin for begin, *_ in waiting.values()]
        if not nexts:
            break
        for flow, rate in rates.items():
            left[flow] -= rate * (min(nexts) - now)
        now = min(nexts)
        for flow in [flow for flow, amount in left.items() if amount == 0]:
            ends[flow] = float(now)
            del left[flow]
    return ends


def drain(fluid: FluidModel, until: float = inf) -> dict[int, float]:
    """Return the end of each flow up to a time."""
    ends = dict.fromkeys(fluid.ended(), fluid.now)
    while (end := fluid.next_end()) <= until and end < inf:
        fluid.advance(end)
        gone = fluid.ended()
        assert gone == sorted(gone) and gone
        ends |= dict.fromkeys(gone, end)
    if until < inf:
        fluid.advance(until)
    return ends


def begun(capacity: Sequence[float], asked: list[Asked]) -> FluidModel:
    fluid = FluidModel(capacity)
    for flow, (amount, path, weight) in enumerate(asked):
        fluid.start(flow, amount, path, weight)
    return fluid


@given(capacities, flows)
@settings(max_examples=examples(200))
def test_rates_equal_progressive_filling(capacity: list[float], asked: list[Asked]) -> None:
    fluid = begun(capacity, asked)
    at_once = fluid.ended()
    assert at_once == [flow for flow, (_, path, _) in enumerate(asked) if all(capacity[one] == inf for one in path)]
    expected = fair(capacity, {flow: one[1:] for flow, one in enumerate(asked) if flow not in at_once})
    assert fluid.rates() == pytest.approx({flow: float(rate) for flow, rate in expected.items()}, rel=1e-11)


@given(capacities, flows)
@settings(max_examples=examples(200))
def test_no_resource_exceeds_its_capacity_and_each_flow_has_a_bottleneck(
    capacity: list[float], asked: list[Asked]
) -> None:
    rates = begun(capacity, asked).rates()
    used = [sum(rate for flow, rate in rates.items() if one in asked[flow][1]) for one in range(RESOURCES)]
    assert all(amount <= limit * (1 + 1e-11) for amount, limit in zip(used, capacity, strict=True))
    for flow, rate in rates.items():
        level = rate / asked[flow][2]
        assert any(
            isclose(used[one], capacity[one], rel_tol=1e-11)
            and all(
                other / asked[number][2] <= level * (1 + 1e-11)
                for number, other in rates.items()
                if one in asked[number][1]
            )
            for one in asked[flow][1]
        )


@given(capacities, st.lists(st.tuples(st.integers(0, 20).map(lambda one: one / 4), flows.map(lambda all_: all_[0]))))
@settings(max_examples=examples(100))
def test_ends_equal_a_reference_computation(capacity: list[float], asked: list[tuple[float, Asked]]) -> None:
    fluid, ends = FluidModel(capacity), {}
    for flow, (begin, (amount, path, weight)) in sorted(enumerate(asked), key=lambda one: one[1][0]):
        ends |= drain(fluid, begin)
        fluid.start(flow, amount, path, weight)
    ends |= drain(fluid)
    assert ends == pytest.approx(slowly(capacity, asked), rel=1e-9)


@given(capacities, flows)
@settings(max_examples=examples(50))
def test_all_bytes_are_delivered(capacity: list[float], asked: list[Asked]) -> None:
    fluid = begun(capacity, asked)
    delivered = dict.fromkeys(range(len(asked)), 0.0)
    for flow in fluid.ended():
        delivered[flow] = asked[flow][0]
    while (end := fluid.next_end()) < inf:
        rates, before = fluid.rates(), fluid.now
        fluid.advance((before + end) / 2)
        for flow, rate in rates.items():
            delivered[flow] += rate * (end - before)
            half = asked[flow][0] - delivered[flow] + rate * (end - before) / 2
            assert fluid.remaining(flow) == pytest.approx(half, rel=1e-9, abs=1e-9)
        fluid.advance(end)
        fluid.ended()
    stuck = set(fluid.rates())
    assert stuck == {flow for flow, (_, path, _) in enumerate(asked) if any(capacity[one] == 0 for one in path)}
    for flow, (amount, _, _) in enumerate(asked):
        assert delivered[flow] == pytest.approx(0 if flow in stuck else amount, rel=1e-8)


@given(capacities, flows, st.randoms(use_true_random=False))
def test_order_of_starts_at_one_time_has_no_effect(capacity, asked, dice) -> None:
    asked = [(amount, path, weight / 7) for amount, path, weight in asked]
    order = list(enumerate(asked))
    dice.shuffle(order)
    other = FluidModel(capacity)
    for flow, (amount, path, weight) in order:
        other.start(flow, amount, path, weight)
    assert drain(begun(capacity, asked)) == drain(other)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 1000])
def test_k_equal_flows_take_k_times_as_long(k: int) -> None:
    ends = drain(begun([10.0], [(20, [0], 1)] * k))
    assert ends == dict.fromkeys(range(k), pytest.approx(2.0 * k))


def test_flow_started_halfway_slows_the_first() -> None:
    fluid = begun([100.0], [(100, [0], 1)])
    drain(fluid, 0.5)
    fluid.start(1, 100, [0])
    assert drain(fluid) == {0: 1.5, 1: 2.0}


def test_capacity_left_by_a_bottlenecked_flow_is_used() -> None:
    """The textbook example: three links in a row, one flow over all of them."""
    assert begun([10.0, 4.0, 9.0], [(1, [0, 1, 2], 1), (1, [0], 1), (1, [1], 1), (1, [2], 1)]).rates() == {
        0: 2.0,
        1: 8.0,
        2: 2.0,
        3: 7.0,
    }


def test_processors_are_shared_by_single_threaded_tasks() -> None:
    fluid = FluidModel([2.0, 1.0, 1.0, 1.0])
    for one in (1, 2, 3):
        fluid.start(one, float(one), [0, one])
    assert fluid.rates() == pytest.approx({1: 2 / 3, 2: 2 / 3, 3: 2 / 3})
    assert drain(fluid) == pytest.approx({1: 1.5, 2: 2.5, 3: 3.5})


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=1000), st.floats(1, 1000))
@settings(max_examples=examples(20))
def test_star_of_unequal_links_is_water_filled(links: list[float], server: float) -> None:
    fluid = begun([*links, server], [(1, [worker, len(links)], 1) for worker in range(len(links))])
    rates = np.array(list(fluid.rates().values()))
    level = rates.max()
    assert rates == pytest.approx(np.minimum(links, level))
    assert rates.sum() == pytest.approx(min(server, sum(links)))


def test_ring_has_the_rate_of_its_slowest_link() -> None:
    fluid = begun([10.0] * 1999 + [5.0], [(100, list(range(2000)), 1), (30, [3], 1)])
    assert drain(fluid) == {0: 20.0, 1: 6.0}


def test_equal_flows_end_together() -> None:
    fluid = begun([0.7], [(n, [0], n) for n in range(1, 101)])
    fluid.advance(1 / 3)
    fluid.start(200, fluid.remaining(9) / 10 * 7, [0], 7)
    fluid.advance(fluid.next_end())
    assert len(fluid.ended()) == 101


def test_small_flow_at_a_late_time_ends() -> None:
    fluid = FluidModel([1e12, 3e12])
    fluid.advance(1e9)
    for flow in range(50):
        fluid.start(flow, 1.0, [flow % 2])
    assert len(drain(fluid)) == 50 and fluid.now == pytest.approx(1e9)


def test_link_of_zero_capacity_carries_nothing() -> None:
    fluid = begun([10.0, 10.0], [(10, [0, 1], 1)])
    fluid.advance(0.5)
    fluid.set_capacity(1, 0.0)
    assert fluid.next_end() == inf and fluid.rates() == {0: 0.0}
    fluid.advance(100.0)
    fluid.set_capacity(1, 2.5)
    assert drain(fluid) == {0: 102.0}


def test_flow_without_limits_ends_immediately() -> None:
    fluid = FluidModel([inf, 5.0, inf])
    fluid.start(3, 1e9, [0])
    fluid.start(2, 1e9, [])
    fluid.start(1, 0.0, [1])
    fluid.start(0, 5.0, [0, 1, 2])
    assert fluid.next_end() == 0.0 and fluid.remaining(3) == 0.0
    assert fluid.ended() == [1, 2, 3] and fluid.ended() == []
    assert fluid.rates() == {0: 5.0} and fluid.next_end() == 1.0
    fluid.advance(0.25)
    fluid.set_capacity(1, inf)
    assert drain(fluid) == {0: 0.25}


def test_infinite_capacity_can_become_finite() -> None:
    fluid = FluidModel([inf, 5.0])
    fluid.start(0, 5.0, [0, 1])
    fluid.set_capacity(0, 1.0)
    assert drain(fluid) == {0: 5.0}


def test_stopped_flow_frees_its_share() -> None:
    fluid = begun([10.0, inf], [(10, [0], 1), (10, [0], 1), (10, [1], 1)])
    fluid.start(3, 10.0, [0])
    assert (fluid.stop(3), fluid.stop(2)) == (10.0, 0.0)
    fluid.advance(1.0)
    assert fluid.stop(1) == 5.0
    assert drain(fluid) == {0: 1.5}
    fluid.start(1, 1.0, [0])
    assert drain(fluid) == {1: 1.6}
    fluid.start(0, 0.0, [0])
    assert fluid.ended() == [0]


def test_invalid_numbers_are_refused() -> None:
    fluid = begun([10.0], [(10, [0], 1)])
    with pytest.raises(ValueError, match="flow 0 is active already"):
        fluid.start(0, 1.0, [0])
    for amount, weight in ((-1.0, 1.0), (inf, 1.0), (1.0, 0.0), (1.0, inf)):
        with pytest.raises(ValueError, match="flow 1 cannot send"):
            fluid.start(1, amount, [0], weight)
    with pytest.raises(ValueError, match="time cannot go from 0.0 to 1.5 when a flow ends at 1.0"):
        fluid.advance(1.5)
    fluid.advance(0.5)
    with pytest.raises(ValueError, match="time cannot go from 0.5"):
        fluid.advance(0.4)
    with pytest.raises(ValueError, match="there is no active flow 7"):
        fluid.stop(7)


def test_result_is_independent_of_the_infinite_capacity() -> None:
    """Infinite capacities are computed as finite ones, and never give NaN."""
    fluid = begun([inf, inf, 3.0], [(1, [0, 2], 1), (1, [1, 2], 2), (1, [0, 1, 2], 3)])
    fluid.advance(0.125)
    fluid.set_capacity(2, inf)
    assert all(1e299 < rate <= INFINITE_CAPACITY for rate in fluid.rates().values())
    assert drain(fluid) == {0: 0.125, 1: 0.125, 2: 0.125}
