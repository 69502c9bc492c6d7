"""Axes are parsed, and invalid grids are refused before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cli import simulate
from stretto.errors import LaunchError, RecipeError, StrettoError
from stretto.recipe.parser import parse as parse_recipe
from stretto.run_config import RunConfig
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.cost_model import parse as parse_tariff
from stretto.simulator.config import Simulation
from stretto.simulator.sweep.grid import OPTIONS, SweepConfig, axes, parse, points, with_option


def values(text: str) -> list[str]:
    return list(parse(text).values)


def config(tmp_path: Path, *sweep: str, **options: str) -> SweepConfig:
    script = tmp_path / "train.py"
    script.touch()
    return SweepConfig(RunConfig(script, ("--lr", "1")), sweep, options)


# Values


@given(st.integers(-50, 50), st.integers(-9, 9).filter(bool), st.integers(0, 40), st.integers(2, 3))
def test_dots_expand_equal_differences(first: int, step: int, more: int, before: int) -> None:
    whole = [str(first + step * i) for i in range(before + 1 + more)]
    assert values(f"every={','.join(whole[:before])},...,{whole[-1]}") == whole


@given(st.integers(1, 7), st.integers(2, 5), st.integers(0, 8), st.booleans())
def test_dots_expand_equal_ratios(first: int, ratio: int, more: int, falling: bool) -> None:
    whole = [str(first * ratio**i) for i in range(4 + more)]
    whole = whole[::-1] if falling else whole
    assert values(f"every={','.join(whole[:3])},...,{whole[-1]}") == whole


@given(st.integers(1, 400), st.integers(1, 99), st.integers(1, 30))
def test_last_value_off_the_pattern_is_refused(first: int, step: int, count: int) -> None:
    past = first + step * (count + 1)
    for end in range(past + 1, past + step):
        with pytest.raises(LaunchError, match=f"does not reach {end}"):
            parse(f"every={first},{first + step},...,{end}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workers=1,2,4,8,...,64", "1 2 4 8 16 32 64"),
        ("workers=1,2,...,5", "1 2 3 4 5"),
        ("every=0,5,...,20", "0 5 10 15 20"),
        ("every=1,2,4,...,16,20,24,...,32,100", "1 2 4 8 16 20 24 28 32 100"),
        ("--lr=0.1,0.2,...,0.5", "0.1 0.2 0.3 0.4 0.5"),
        ("--lr=0.001,0.01,0.1,...,10", "0.001 0.01 0.1 1 10"),
        ("--lr=1e-3,1e-2,1e-1,...,1e0", "1e-3 1e-2 1e-1 1e0"),
        ("every=10,8,...,2", "10 8 6 4 2"),
        ("every=2,4,6,...,8", "2 4 6 8"),
        (" step-time = 5ms , 1ms ", "5ms 1ms"),
    ],
)
def test_axis_texts_are_parsed(text: str, expected: str) -> None:
    assert values(text) == expected.split()


def test_commas_within_brackets_and_quotes_do_not_split() -> None:
    recipes = ["local_sgd(every=4, after=2)", "Recipe(how=chain(top_k(0.1), quantise(8)))"]
    assert values(f"recipe={','.join(recipes)}") == recipes
    hosts = "hosts of 8 on 10Gbit/s, 1Gbit/s between"
    assert values(f'network=100Mbit/s 20ms,"{hosts}"') == ["100Mbit/s 20ms", hosts]
    assert values("optimizer_state=\"keep\",'a,b'") == ['"keep"', "'a,b'"]  # a recipe's own value keeps its quotes
    assert values("""--text="a"b,'c' d""") == ['"a"b', "'c' d"]


@given(st.lists(st.text("abc123 ()'\"", min_size=1, max_size=8).map(str.strip), min_size=1, max_size=5, unique=True))
def test_axis_values_round_trip_or_are_refused(words: list[str]) -> None:
    try:
        found = values(f"name={','.join(words)}")
    except LaunchError:
        assert any(set(word) & set("()'\"") or not word for word in words)
    else:
        assert ",".join(found) == ",".join(words)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workers", "a name, = and values"),
        ("=1,2", "a name, = and values"),
        ("two words=1", "a name, = and values"),
        ("workers=", "a value on each side of a comma"),
        ("workers=1,,2", "a value on each side of a comma"),
        ("workers=1,2,", "a value on each side of a comma"),
        ("recipe=local_sgd(every=4", "matching quotes and brackets"),
        ("recipe=local_sgd)every=4(", "matching quotes and brackets"),
        ("network='instant", "matching quotes and brackets"),
        ("workers=1,2,1", "workers has the value 1 twice"),
        ("workers=1,...,8", "needs two values before it"),
        ("workers=...,8", "needs two values before it"),
        ("workers=1,2,...", "needs two values before it"),
        ("workers=1,1,...,8", "no pattern"),
        ("workers=1,2,5,...,50", "no pattern"),
        ("workers=0,0,0,...,5", "no pattern"),
        ("workers=0,1,5,...,9", "no pattern"),
        ("every=1,-2,4,...,16", "no pattern"),
        ("workers=1,2,4,...,1000", "does not reach 1000"),
        ("workers=1,2,...,2", "does not reach 2"),
        ("workers=2,4,...,1", "does not reach 1"),
        ("step_time=1ms,2ms,...,5ms", "is not between plain numbers"),
        ("workers=1,2,...,100000000", "too many values"),
        ("--lr=64,32,16,...,0", "too many values"),
    ],
)
def test_invalid_axis_is_refused_with_got_expected_and_example(text: str, problem: str) -> None:
    with pytest.raises(LaunchError) as refused:
        parse(text)
    said = str(refused.value)
    assert problem in said
    assert all(part in said for part in ("\n  got: ", "\n  expected: ", "\n  try: "))


# Options of a recipe


@pytest.mark.parametrize(
    ("recipe", "name", "value", "expected"),
    [
        ("local_sgd", "every", "4", "local_sgd(every=4)"),
        ("local_sgd()", "every", "4", "local_sgd(every=4)"),
        ("local_sgd(every=2, after=3)", "every", "4", "local_sgd(every=4, after=3)"),
        ("local_sgd(2, after=3)", "every", "4", "local_sgd(every=4, after=3)"),
        ("local_sgd(2)", "optimizer_state", '"average"', 'local_sgd(every=2, optimizer_state="average")'),
        ("local_sgd(every=2)", "how", "top_k(0.1)", "local_sgd(every=2, how=top_k(0.1))"),
        ("Recipe(how=top_k(0.5))", "how", "sign", "Recipe(how=sign())"),
    ],
)
def test_an_option_of_a_recipe_is_replaced_or_added(recipe: str, name: str, value: str, expected: str) -> None:
    found = with_option(recipe, name, value)
    assert parse_recipe(found) == parse_recipe(expected)
    assert with_option(found, name, value) == found


def test_unknown_recipe_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LaunchError, match="evry is no option") as refused:
        with_option("local_sgd", "evry", "4")
    assert "every, optimizer_state, after" in str(refused.value)
    assert '--sweep "every=..."' in str(refused.value)
    assert "called" not in str(refused.value)
    with pytest.raises(LaunchError, match="there is no recipe"):
        with_option(None, "every", "4")


@pytest.mark.parametrize("value", ["4 after=2", "__import__('os')", "x", "4) + (1", "=3", "*[1]", "0"])
def test_invalid_recipe_value_is_refused(value: str) -> None:
    with pytest.raises(RecipeError):
        with_option("local_sgd", "every", value)


# Points


def test_grid_is_the_product_and_points_have_simulate_arguments(tmp_path: Path) -> None:
    asked = config(tmp_path, "workers=2,3", "every=4,8", "--lr=0.1", recipe="local_sgd", workers="9", step_time="5ms")
    found = points(asked)
    assert [dict(one.values) for one in found] == [
        {"workers": w, "every": e, "--lr": "0.1"} for w in ("2", "3") for e in ("4", "8")
    ]
    words = found[3].words(asked, Path("there"))
    given = dict(zip(words[0:6:2], words[1:6:2], strict=True))
    assert given == {"--recipe": "local_sgd(every=8)", "--workers": "3", "--step-time": "5ms"}
    assert words[6:9] == ["--quiet", "--out", "there"]
    assert words[9:] == [str(asked.config.script), "--lr", "1", "--lr", "0.1"]
    assert len({one.name for one in found}) == 4


def test_a_swept_recipe_gets_the_swept_option(tmp_path: Path) -> None:
    found = points(config(tmp_path, "every=4,8", "recipe=local_sgd,diloco(every=2)"))
    assert [one.options["recipe"] for one in found] == [
        "local_sgd(every=4)",
        "diloco(every=4)",
        "local_sgd(every=8)",
        "diloco(every=8)",
    ]


@given(st.lists(st.text(min_size=1, max_size=90).filter(lambda text: "," not in text), min_size=2, unique=True))
def test_every_point_has_a_portable_folder_name(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    asked = config(tmp_path_factory.mktemp("any"), f"--text={','.join(texts)}")
    try:
        found = points(asked)
    except LaunchError:
        return
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert "/" not in one.name and "\0" not in one.name and len(one.name.encode()) < 70


@pytest.mark.parametrize(
    ("sweep", "problem"),
    [
        ((), "nothing to sweep"),
        (("workers=1,2", "workers=4"), "workers is swept twice"),
        (("step-time=5ms", "step_time=1ms"), "step_time is swept twice"),
        (("workers=1,0",), "the number of workers cannot be 0"),
        (("workers=1,two",), "the number of workers cannot be two"),
        (("seed=1.5",), "the seed cannot be 1.5"),
        (("network=instant,1Gbot/s",), "1Gbot/s"),
        (("speeds=equal,1 0",), "1 0"),
        (("step_time=1ms,fast",), "--step-time cannot be read: fast"),
        (("until=time=1h,time=0",), "--until cannot be 'time=0'"),
        (("workers=9,4", "faults=kill worker 7 at 1s"), "there is no worker 7 of 4"),
        (("recipe=async_sgd,local_sgd", "faults=kill server 0 at 1s"), "there is no parameter server"),
        (("every=1,x",), "no recipe or answer is called 'x'"),
        (("learning=1",), "learning is no option of a simulation, nor one of local_sgd"),
        (("recipe=local_sdg",), "no recipe or answer is called 'local_sdg'"),
        (("recipe=local_sgd,async_sgd", "every=2"), "every is no option of a simulation, nor one of async_sgd"),
    ],
)
def test_invalid_grid_is_refused(tmp_path: Path, sweep: tuple[str, ...], problem: str) -> None:
    with pytest.raises(StrettoError) as refused:
        points(config(tmp_path, *sweep, recipe="local_sgd"))
    assert problem in str(refused.value)
    assert "\n  try: " in str(refused.value)


EACH = {"recipe": "local_sgd", "network": "1Gbit/s", "speeds": "equal", "step_time": "1ms", "until": "time=1h"}
EACH |= {"faults": "pause worker 0 for 1s at 1s"}


def test_every_option_of_a_simulation_can_be_swept(tmp_path: Path) -> None:
    for name in OPTIONS:
        value = EACH.get(name, "1")
        assert points(config(tmp_path, f"{name}={value}"))[0].options[name] == value


def test_a_missing_script_and_no_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no script"):
        points(SweepConfig(RunConfig(tmp_path / "none.py"), ("workers=1",)))
    with pytest.raises(LaunchError, match="jobs cannot be 0"):
        SweepConfig(RunConfig(tmp_path), ("workers=1",), jobs=0).concurrency()


def test_configuration_changes_with_the_script(tmp_path: Path) -> None:
    asked = config(tmp_path, "workers=1,2")
    before = asked.asked()
    asked.config.script.write_text("pass")
    assert before["script_hash"] != asked.asked()["script_hash"]
    assert before["sweep"] == {axis.name: list(axis.values) for axis in axes(asked)} == {"workers": ["1", "2"]}


# Measuring


def test_costs_are_measured_once_per_group_and_the_script_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Simulation] = []

    def takes(one: Simulation, typed: str) -> CostModel:
        assert typed == "auto"
        measured.append(one)
        return CostModel(step_s=float(len(measured)), codec_s=float(len(measured)))

    monkeypatch.setattr(simulate, "_measure", takes)
    networks = "network=instant,1Gbit/s,10Gbit/s"
    asked = config(tmp_path, "recipe=allreduce,local_sgd(every=4)", networks, "seed=1,2", workers="4")
    found = simulate._measure_points(asked, "auto", lambda _text: None)
    assert [(str(one.config.recipe).partition("(")[0], one.has_network) for one in measured] == [
        ("allreduce", False),
        ("allreduce", True),
        ("local_sgd", False),
        ("local_sgd", True),
    ]
    times = [parse_tariff(one.options["step_time"]) for one in points(replace(asked, step_times=found))]
    assert [(one.step_s, one.codec_s) for one in times] == [(1, ask) for ask in (1, 1, *[2] * 4, 3, 3, *[4] * 4)]


def test_script_is_measured_once_per_contention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers contend for two processors, two and one do not; one worker has no network."""
    crowds: list[int | None] = []

    def takes(one: Simulation, _typed: str) -> CostModel:
        crowds.append(one.contending_processes)
        return CostModel(step_s=float(len(crowds)))

    monkeypatch.setattr(simulate, "_measure", takes)
    asked = config(tmp_path, "workers=4,2,1", recipe="allreduce", network="1Gbit/s", processors="2")
    found = simulate._measure_points(asked, "auto", lambda _text: None)
    assert [one is None for one in crowds] == [False, True, True]
    times = [parse_tariff(one.options["step_time"]) for one in points(replace(asked, step_times=found))]
    assert [one.step_s for one in times] == [1, 2, 2]


def test_swept_step_time_is_not_measured(tmp_path: Path) -> None:
    asked = config(tmp_path, "step_time=auto,5ms", workers="2")
    assert simulate._measure_points(asked, "auto", lambda _text: None) == {}
    assert [one.options["step_time"] for one in points(asked)] == ["auto", "5ms"]
