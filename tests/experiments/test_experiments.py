"""Experiments: short grids run, command lines give the same results, the page is built from the results only."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import averaging, bound, experiment, learners, links, page, runs, staleness, stragglers, weighting
from experiments.catalogue import EXPERIMENTS
from experiments.runs import Point
from stretto.cli.main import app
from stretto.errors import LaunchError
from stretto.recipe.parser import parse

ALL = list(EXPERIMENTS.values())
names = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the short grids of all experiments."""
    folder = tmp_path_factory.mktemp("results")
    for one in ALL:
        one.run(quick=True, folder=folder, say=lambda text: None)
    return folder


@names
def test_a_short_grid_gives_a_table_a_picture_and_a_sentence(one: experiment.Experiment, quick: Path) -> None:
    found = one.kept(quick)
    assert found is not None and len(found["points"]) == len(one.grid(True))
    table = [row for row in one.table(found) if row.startswith("|")]
    assert len(table) > 3 and len(one.verdict(found)) > 20
    assert one.picture(found).startswith("<svg ")


@names
def test_the_whole_grid_has_three_seeds_of_each_point(one: experiment.Experiment) -> None:
    grid = one.grid(False)
    places = [json.dumps(dict(point.values)) for point in grid]
    assert {places.count(place) for place in places} == {3}
    assert len({point.command() for point in grid}) == len(grid)
    assert all(point.step_time != "auto" and parse(point.recipe) for point in grid)


def test_the_page_is_made_of_results_without_running(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(point: Point) -> None:
        raise AssertionError(f"{point} was run")

    monkeypatch.setattr(Point, "run", run)
    written = tmp_path / "page.md"
    written.write_text(f"Before.\n{page.BEGIN}\nlast month\n{page.END}\nAfter.\n")
    page.write(written, quick)
    text = written.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "last month" not in text
    for one in ALL:
        found = one.kept(quick)
        assert found is not None
        assert f"## {one.title}" in text and one.verdict(found) in text and found["points"][0]["command"] in text
        assert f"](experiments/{one.name}.svg)" in text
        picture = (tmp_path / "experiments" / f"{one.name}.svg").read_text()
        assert "dc:date" not in picture and "/" + "tmp" not in picture
    page.write(written, quick)
    assert written.read_text() == text


def test_an_experiment_without_results_says_so(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(f"{page.BEGIN}{page.END}")
    page.write(written, tmp_path / "none")
    assert written.read_text().count("No results yet.") == len(ALL)


def test_what_is_run_here_is_what_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = "--batch 4 --lr 0.1 --samples 200 --epochs 2"
    point = Point({}, 4, "soft_sync(collect=2)", args, 3, "100Mbit/s 1ms", "exponential", "7ms", "test_accuracy>=0.1")
    words = shlex.split(point.command())
    monkeypatch.chdir(runs.ROOT)
    done = CliRunner().invoke(app, ["simulate", "--quiet", "--out", str(tmp_path), *words[2:]])
    assert done.exit_code == 0, done.output
    found = point.run()
    told = runs.measured(tmp_path, point.target)
    assert told == {name: found[name] for name in told}
    assert found["seconds_to_target"] > 0 and found["staleness"]["mean"] > 0


def test_a_run_twice_is_the_same() -> None:
    point = Point({}, 3, "async_sgd", "--batch 4 --samples 100 --epochs 1", speeds="exponential")
    assert point.run() == point.run()


def test_numbers_that_are_not_finite_count_as_chance_and_other_errors_are_raised() -> None:
    found = Point({}, 2, "async_sgd", "--batch 4 --samples 200 --epochs 2 --lr 1e30").run()
    assert (found["finite"], found["accuracy"], found["loss"]) == (False, runs.CHANCE, None)
    with pytest.raises(LaunchError, match="invalid choice"):
        Point({}, 2, "async_sgd", "--data letters").run()


def test_means_and_spreads() -> None:
    points = [{"a": 1.0, "b": None}, {"a": 3.0, "b": 1.0}]
    assert (runs.mean(points, "a"), runs.mean(points, "b"), runs.mean([], "a")) == (2.0, None, None)
    assert runs.spread(points, "a") == pytest.approx(math.sqrt(2))


def test_the_formulas_are_those_of_exponential_times() -> None:
    draws = np.sort(np.random.default_rng(0).exponential(stragglers.STEP_MS, (20000, stragglers.WORKERS)))
    for k in stragglers.KS:
        assert stragglers.k_sync_ms(k) == pytest.approx(draws[:, k - 1].mean(), rel=0.03)
    told = stragglers.drawn(False)["k_sync_drawn_ms"]
    assert all(told[str(k)] == pytest.approx(stragglers.k_sync_ms(k), rel=0.06) for k in stragglers.KS)
    arrivals = np.random.default_rng(1).exponential(stragglers.STEP_MS / stragglers.WORKERS, (20000, 4)).sum(axis=1)
    assert stragglers.k_batch_async_ms(4) == pytest.approx(arrivals.mean(), rel=0.03)


def test_late_is_more_than_two_n() -> None:
    told = [{"staleness": {"histogram": {"0": 5, "4": 2, "5": 3}}}, {"staleness": {"histogram": {"5": 10}}}]
    assert learners.late(told, 2) == 13 / 20
    assert learners.counts(told) == {0: 5, 4: 2, 5: 13}


def test_recipes_of_the_grids() -> None:
    assert learners.recipe(15, learners.RATES[0]) == "soft_sync(collect=2)"
    assert learners.recipe(30, learners.RATES[1]) == "staleness_aware(collect=1)"
    assert weighting.recipe(1, "1") == learners.recipe(30, learners.RATES[0]) == "async_sgd"
    assert bound.recipe("inf") == "async_sgd(weight=0.0625)"
    assert averaging.PASS == 199 * averaging.WORKERS * 4


def test_ratio_and_speed_up() -> None:
    assert links.ratio("1 Gbit/s") == pytest.approx(10 * links.ratio("10 Gbit/s"))
    alone = {"values": {"recipe": links.ONE}, "samples_per_second": 10.0, "seconds_to_target": 8.0}
    ours = {"values": {"recipe": "x", "network": "y"}, "samples_per_second": 40.0, "seconds_to_target": 4.0}
    found = {"points": [alone, ours]}
    assert links.speed_up(found, "x", "y", "samples_per_second") == 4.0
    assert links.speed_up(found, "x", "y", "seconds_to_target") == 2.0
    ours["seconds_to_target"] = None
    assert links.speed_up(found, "x", "y", "seconds_to_target") is None


def test_each_other_under_way_counts_once(quick: Path) -> None:
    found = EXPERIMENTS["staleness"].kept(quick)
    assert found is not None
    for workers in (2, 4):
        whole = workers - 1
        assert staleness.staleness(found, "exponential steps", workers) == pytest.approx(whole, rel=0.05)
