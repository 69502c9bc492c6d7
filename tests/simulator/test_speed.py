"""Speeds: parsing and error marks, the stated distributions, and independence of the draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.simulator.compute.speed import (
    Drifting,
    Equal,
    Exponential,
    Factors,
    Lognormal,
    Pace,
    Slow,
    Speeds,
    parse,
)
from stretto.units import seconds, spelled

above = st.floats(0, 1e300, exclude_min=True, allow_subnormal=False)
sigma = st.floats(0, 10)
part = st.floats(0, 1)
typed = st.one_of(
    st.just(Equal()),
    st.builds(Factors, st.lists(above, min_size=1, max_size=5).map(tuple)),
    st.builds(Lognormal, sigma, st.booleans()),
    st.builds(Exponential, part),
    st.builds(Slow, part.filter(bool), st.floats(1, 1e300)),
    st.builds(Drifting, sigma, above),
)
VARYING = ["lognormal(0.5, each=step)", "exponential", "shifted_exponential(0.5)", "drifting(0.3, 1s)"]
ALL = [*VARYING, "equal", "lognormal(0.5)", "slow(0.5, 5)", "1,2,3,4"]


def factors(text: str, steps: int, workers: int = 1, seed: int = 7, apart_s: float = 1.0) -> np.ndarray:
    """Return the factors as an array (workers, steps)."""
    pace = Pace(parse(text), workers, seed)
    return np.array([[pace.step_s(one, k, k * apart_s, 1.0) for k in range(steps)] for one in range(workers)])


@given(typed)
def test_text_round_trips(speeds: Speeds) -> None:
    assert parse(str(speeds)) == speeds


@given(st.lists(st.sampled_from([" ", "", "\t"]), min_size=6, max_size=6))
def test_spaces_are_ignored(gaps: list[str]) -> None:
    a, b, c, d, e, f = gaps
    assert parse(f"{a}lognormal{b}({c}.50{d},{e}each{f}={a}step{b}){c}") == Lognormal(0.5, each_step=True)
    assert parse(f"{a}1.{b},{c}2e0{d}") == Factors((1.0, 2.0))


@given(st.integers(0, 10**9), st.sampled_from([("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600)]))
def test_times_are_in_seconds(count: int, unit: tuple[str, float]) -> None:
    assert seconds(f"{count}{unit[0]}") == pytest.approx(count * unit[1], rel=1e-12)


def test_constant_times_are_exact() -> None:
    assert [seconds(one) for one in ("100ms", "300MS", "1.5s", "2m", "1h")] == [0.1, 0.3, 1.5, 120, 3600]
    assert [seconds(one) for one in ("", "s", "10", "-1s", "1 0s", "1d", "nans", "1e999s", "1e308h")] == [None] * 9


@given(st.floats(0, allow_infinity=False))
def test_numbers_are_printed_exactly(number: float) -> None:
    assert float(spelled(number)) == number


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("equl", "equl"),
        ("lognormal()", ")"),
        ("lognormal(x)", "x"),
        ("lognormal(-1)", "-1"),
        ("lognormal(11)", "11"),
        ("lognormal(nan)", "nan"),
        ("lognormal(0.5, each=stpe)", "stpe"),
        ("lognormal(0.5, each=step, 3)", ","),
        (" equal( 1 )", "1"),
        ("exponential(1)", "1"),
        ("shifted_exponential(1.1)", "1.1"),
        ("slow(0, 5)", "0"),
        ("slow(0.1, 0.5)", "0.5"),
        ("slow(1.5, 5)", "1.5"),
        ("slow(0.1)", ")"),
        ("slow(0.1, 5, 6)", ","),
        ("drifting(0.3, 60)", "60"),
        ("drifting(0.3, 0s)", "0s"),
        ("1, 2x, 3", "2x"),
        ("1,0", "0"),
        ("1e999", "1e999"),
        ("²", "²"),
        ("1_0", "1_0"),
        ("trace( )", ")"),
    ],
)
def test_invalid_text_is_refused_with_its_place_marked(text: str, wrong: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parse(text)
    shown, marks = str(raised.value).split("\n")[1:3]
    assert shown == f"  got: {text}"
    assert shown[marks.index("^") : marks.rindex("^") + 1] == wrong
    assert '  try: --speeds "' in str(raised.value)


@pytest.mark.parametrize(
    ("text", "place"), [("", 0), ("1,,2", 2), ("1,2,", 4), ("slow(,2)", 5), ("lognormal", 9), ("slow(0.1", 8)]
)
def test_missing_part_is_marked(text: str, place: int) -> None:
    with pytest.raises(LaunchError, match="--speeds cannot be read: (something is missing at the end|,)\n") as raised:
        parse(text)
    assert str(raised.value).split("\n")[2] == " " * (len("  got: ") + place) + "^"


def test_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(LaunchError, match=r'try: --speeds "drifting\(0.3, 60s\)"'):
        parse("drfiting(0.3, 60s)")


def test_list_must_match_the_number_of_workers() -> None:
    assert factors("1,2,4", 2, workers=3).tolist() == [[1, 1], [2, 2], [4, 4]]
    with pytest.raises(LaunchError, match="given for 3 workers, but there are 4"):
        Pace(parse("1,2,4"), 4, 0)


@pytest.mark.parametrize("text", ALL)
def test_order_of_calls_has_no_effect(text: str) -> None:
    """Worker by worker, step by step, and backwards: equal times."""
    workers, steps = 4, 300
    one, turns, back = (Pace(parse(text), workers, 3) for _ in range(3))
    first = {(w, k): one.step_s(w, k, 0.1 * k, 0.01) for w in range(workers) for k in range(steps)}
    second = {(w, k): turns.step_s(w, k, 0.1 * k, 0.01) for k in range(steps) for w in range(workers)}
    third = {(w, k): back.step_s(w, k, 0.1 * k, 0.01) for k in range(steps) for w in reversed(range(workers))}
    assert first == second == third


@pytest.mark.parametrize("text", VARYING)
def test_draws_depend_on_seed_worker_and_step(text: str) -> None:
    base = factors(text, 600, workers=3)
    assert np.array_equal(base, factors(text, 600, workers=3))
    assert np.array_equal(base[:2], factors(text, 600, workers=2)), "more workers change nobody's speed"
    both = np.concatenate([base, factors(text, 600, workers=3, seed=8)])
    assert len(np.unique(both)) == both.size


def test_a_workers_factor_does_not_depend_on_how_many_there_are() -> None:
    few, many = (Pace(parse("lognormal(0.5)"), workers, 1) for workers in (3, 30))
    assert [few.mean_factor(one) for one in range(3)] == [many.mean_factor(one) for one in range(3)]


def spread(values: np.ndarray, mean: float, std: float) -> None:
    """Assert that the mean is within five standard errors and the spread within 5%."""
    assert abs(values.mean() - mean) < 5 * std / values.size**0.5
    assert values.std() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("text", ["lognormal(0.5)", "lognormal(0.5, each=step)"])
def test_lognormal_factors(text: str) -> None:
    each = "each" in text
    values = factors(text, 4000 if each else 1, workers=5 if each else 8000).ravel()
    spread(values, 1, (exp(0.25) - 1) ** 0.5)
    spread(np.log(values), -0.125, 0.5)


@pytest.mark.parametrize(("text", "shift"), [("exponential", 0.0), ("shifted_exponential(0.3)", 0.3)])
def test_exponential_factors(text: str, shift: float) -> None:
    values = factors(text, 10_000, workers=4).ravel()
    assert values.min() == pytest.approx(shift, abs=1e-3)
    assert values.min() >= shift
    spread(values, 1, 1 - shift)
    assert np.quantile(values, 0.5) == pytest.approx(shift + (1 - shift) * log(2), rel=0.02)


def test_the_closed_form_of_k_sync_holds() -> None:
    """The K-th fastest of N exponential workers takes H_N - H_(N-K) (Dutta et al. 2018)."""
    workers, fastest = 16, 12
    kth = np.sort(factors("exponential", 4000, workers=workers), axis=0)[fastest - 1]
    expected = sum(1 / n for n in range(workers - fastest + 1, workers + 1))
    assert kth.mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("text", "workers", "count"), [("slow(0.1, 5)", 40, 4), ("slow(0.25, 5)", 10, 3), ("slow(0.01, 5)", 4, 1)]
)
def test_a_fraction_is_slow(text: str, workers: int, count: int) -> None:
    slow = {seed: factors(text, 2, workers, seed) for seed in range(20)}
    for values in slow.values():
        assert (values == 5).sum() == 2 * count
        assert (values == 1).sum() == 2 * (workers - count)
    assert len({values.tobytes() for values in slow.values()}) > 1, "the seed draws who"


def test_drifting_is_a_stationary_walk() -> None:
    """The mean is 1 at every time; logs have the given spread and autocorrelation."""
    values = factors("drifting(0.3, 10s)", 12, workers=6000, apart_s=2.5)
    for column in (0, 1, 11):
        spread(values[:, column], 1, (exp(0.09) - 1) ** 0.5)
        spread(np.log(values[:, column]), -0.045, 0.3)
    logs = np.log(values)
    for lag in (1, 4, 8):
        assert np.corrcoef(logs[:, 1], logs[:, 1 + lag])[0, 1] == pytest.approx(exp(-lag / 4), abs=0.05)


def test_drifting_factor_is_constant_without_time() -> None:
    values = factors("drifting(0.3, 10s)", 5, apart_s=0.0)
    assert len(np.unique(values)) == 1


@pytest.mark.parametrize("text", ALL)
def test_only_constant_speeds_have_a_mean_factor(text: str) -> None:
    pace = Pace(parse(text), 4, 0)
    for worker in range(4):
        assert pace.mean_factor(worker) == (None if text in VARYING else pace.step_s(worker, 3, 1.0, 1.0))


def trace(folder: Path, lines: Sequence[object], name: str = "steps.jsonl") -> str:
    (folder / name).write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return f"trace({folder / name})"


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    lines = [{"worker": 5, "step_s": 3}, {"worker": 2, "step_s": 0.5, "loss": None}, "", {"worker": 2, "step_s": 0.25}]
    pace = Pace(parse(trace(tmp_path, lines)), 3, 0)
    times = [[pace.step_s(worker, step, 0.0, 99.0) for step in range(3)] for worker in range(3)]
    assert times == [[0.5, 0.25, 0.5], [3, 3, 3], [0.5, 0.25, 0.5]]
    assert pace.mean_factor(0) is None


@pytest.mark.parametrize("name", ["a(1).jsonl", "a, b.jsonl", "a b)"])
def test_trace_text_round_trips(tmp_path: Path, name: str) -> None:
    text = trace(tmp_path, [{"worker": 0, "step_s": 1}], name)
    speeds = parse(f" trace( {text[6:-1]} )")
    assert str(speeds) == text
    assert parse(text) == speeds


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ("3", "line 2"),
        ("é", "line 2"),
        ("[" * 100_000, "line 2"),
        ('{"worker": 0}', "step_s"),
        ('{"step_s": 1}', "worker"),
        ('{"worker": 0, "step_s": "1"}', "float"),
        ('{"worker": 0, "step_s": -1}', "> 0"),
        ('{"worker": 0, "step_s": 0}', "> 0"),
        ('{"worker": 0, "step_s": NaN}', "line 2"),
        ('{"worker": 0, "step_s": 1e999}', "line 2"),
        ('{"worker": -1, "step_s": 1}', ">= 0"),
        ('{"worker": 0.5, "step_s": 1}', "int"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(LaunchError, match="line 2: ") as raised:
        parse(trace(tmp_path, [{"worker": 0, "step_s": 1}, line]))
    assert says in str(raised.value)


def test_a_file_that_cannot_be_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no measured steps can be read from .*nowhere"):
        parse(f"trace({tmp_path / 'nowhere'})")
    with pytest.raises(LaunchError, match="no measured steps"):
        parse(f"trace({tmp_path})")
    with pytest.raises(LaunchError, match="no measured steps"):
        parse("trace(a\0b)")
    with pytest.raises(LaunchError, match="got: no lines"):
        parse(trace(tmp_path, [""]))
