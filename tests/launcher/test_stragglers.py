"""Stragglers: `--stragglers` is parsed, or refused with an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_place import Place

from stretto.errors import LaunchError
from stretto.faults.stragglers import factors

WORKERS = 50
written = st.decimals(1, 1000, places=2).map(str)


@given(st.dictionaries(st.integers(0, WORKERS - 1), written, min_size=1))
def test_factors_are_parsed_per_worker(asked: dict[int, str]) -> None:
    text = ",".join(f"{worker}:{factor}" for worker, factor in asked.items())
    assert factors(text, WORKERS) == {worker: float(factor) for worker, factor in asked.items()}


def test_no_worker_is_slow_by_default() -> None:
    assert factors(None, 4) == {}


def test_spaces_and_integers_are_accepted() -> None:
    assert factors(" 1 : 2 , 3:5. ", 4) == {1: 2.0, 3: 5.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing at the end"),
        ("1:2,", "missing at the end"),
        ("1", "got: 1"),
        ("1:", "got: 1:"),
        (":2", "got: :2"),
        ("one:2", "got: one:2"),
        ("1:two", "got: 1:two"),
        ("1:2;3:5", "got: 1:2;3:5"),
        ("1=2", "got: 1=2"),
        ("-1:2", "got: -1:2"),
        ("1:-2", "got: 1:-2"),
        ("1.0:2", "got: 1.0:2"),
        ("1:2:3", "got: 1:2:3"),
        ("1:nan", "got: 1:nan"),
        ("1:inf", "got: 1:inf"),
        ("1:2_0", "got: 1:2_0"),
        ("²:2", "got: ²:2"),
        ("9" * 5000 + ":2", "--stragglers cannot be read"),
        ("1:" + "9" * 5000, "--stragglers cannot be read"),
        ("4:2", "there is no worker 4 of 4"),
        ("1:2,1:3", "worker 1 is slow twice"),
        ("1:0.5", "expected: a factor of at least 1"),
        ("1:0", "expected: a factor of at least 1"),
    ],
)
def test_invalid_factors_are_refused(text: str, says: str) -> None:
    with pytest.raises(LaunchError) as raised:
        factors(text, 4)
    assert says in str(raised.value)
    assert 'try: --stragglers "1:2.0,3:5.0"' in str(raised.value)


def test_only_the_straggler_gets_a_factor(place: Place) -> None:
    folder = place.run("print(config.slowdown)", workers=3, stragglers="1:2,2:1.5", out=Path("here"))
    assert [(folder / f"worker-{rank}.log").read_text() for rank in range(3)] == ["1.0\n", "2.0\n", "1.5\n"]
    assert '"stragglers": "1:2,2:1.5"' in (folder / "run.json").read_text()
