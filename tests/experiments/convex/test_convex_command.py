"""The command prints a table and a verdict, writes JSON records, and refuses bad input in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import small_problems as made

from experiments.convex import command
from experiments.convex.methods import GD

pytest.importorskip("scipy")

SEC = "gd_sec(beta=0.01, xi=100)"
KEYS = ["method", "workers", "rounds", "uplink_bits", "saved", "reached", "objective_error"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(made.write(tmp_path / "made"))


def arguments(data: str, *more: str) -> list[str]:
    return [data, "--workers", "4", "--l2", "0.001", "--target", "1e-8", *more]


def test_table_and_json_agree(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = arguments(data, "--method", GD, "--method", SEC, "--float64", "--json", "found.json")
    assert command.main(line) == 0
    shown = capsys.readouterr()
    assert f"Fewest bits: {SEC}" in shown.out
    assert f"[2 of 2] {SEC}: reached in" in shown.err
    gd, sec = records = json.loads(Path("found.json").read_text())
    assert [list(record) for record in records] == [KEYS, KEYS]
    assert gd["uplink_bits"] == 32 * made.FEATURES * 4 * gd["rounds"]
    assert gd["saved"] == 0
    assert sec["saved"] == pytest.approx(1 - sec["uplink_bits"] / gd["uplink_bits"])
    assert sec["saved"] > 0.8
    assert all(record["reached"] and record["objective_error"] <= 1e-8 for record in records)
    assert f"{sec['uplink_bits']:,}" in shown.out


def test_bits_are_compared_with_gd_even_if_gd_is_not_asked_for(data: str) -> None:
    assert command.main(arguments(data, "--method", SEC, "--json", "found.json")) == 0
    (sec,) = json.loads(Path("found.json").read_text())
    assert 0.8 < sec["saved"] < 1


def test_seven_methods_run_by_default(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments(data, "--rounds", "3", "--json", "-")) == 0
    shown = capsys.readouterr()
    records = json.loads(shown.out)
    assert [record["method"] for record in records] == list(command.DEFAULTS)
    assert all(record["rounds"] == 3 and not record["reached"] and record["saved"] is None for record in records)
    assert "No method came within 1e-08 of the optimum." in shown.err


@pytest.mark.parametrize("problem", ["lasso", "linear"])
def test_gd_sec_reaches_the_target(data: str, problem: str) -> None:
    assert command.main(arguments(data, "--problem", problem, "--method", SEC, "--json", "found.json")) == 0
    (sec,) = json.loads(Path("found.json").read_text())
    assert sec["reached"]


def test_unstable_threshold_gives_a_warning(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments(data, "--method", "gd_sec(beta=0.5, xi=100)", "--rounds", "5")) == 0
    assert "warning: gd_sec(beta=0.5, xi=100): alpha * beta * xi = 50 is above 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "async_sgd"], "workers do not wait"),
        (["--method", "gdd"], "no recipe or answer is called"),
        (["--target", "0"], "the target can't be 0"),
        (["--workers", "61"], "from 1 to the 60 rows"),
        (["--rows", "0"], "the number of rows can't be 0"),
        (["--rounds", "0"], "the limit of rounds can't be 0"),
        (["--l2", "-1"], "--l2 can't be -1"),
        (["--problem", "ridge"], "--problem"),
        (["--labels", "even"], "needs two classes"),
        (["--json", "nowhere/found.json"], "there is no folder nowhere"),
    ],
)
def test_bad_options_are_refused(data: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments(data, *more)) != 0
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nothing"]) == 1
    assert "there is no nothing" in capsys.readouterr().err


def test_figures_of_the_literature_on_a9a(tmp_path: Path) -> None:
    """a9a, first 5,000 rows, 10 workers: gradient descent needs 756 rounds, GD-SEC about 918 with 96.9% fewer bits."""
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        pytest.skip("STRETTO_DATA is not set")
    target = tmp_path / "found.json"
    line = [f"{folder}/a9a/a9a", "--rows", "5000", "--method", GD, "--method", SEC, "--float64"]
    assert command.main([*line, "--json", str(target)]) == 0
    gd, sec = json.loads(target.read_text())
    assert gd["rounds"] == 756
    assert sec["rounds"] == pytest.approx(918, rel=0.03)
    assert sec["saved"] >= 0.96
