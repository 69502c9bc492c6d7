"""The command says what it found, keeps it, and refuses in one sentence what it can't do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bits import made

from stretto.bits import command, results, work
from stretto.bits.outcome import GD, Outcome
from stretto.cli import main

pytest.importorskip("scipy")

SEC = "gd_sec(beta=0.01, xi=100)"
KEYS = ["method", "workers", "rounds", "uplink_bits", "saved", "reached", "objective_error"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(made.write(tmp_path / "made"))


def asked(data: str, *more: str) -> list[str]:
    return ["bits", data, "--workers", "4", "--l2", "0.001", "--target", "1e-8", *more]


def test_the_table_the_page_and_the_json(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = asked(data, "--method", GD, "--method", SEC, "--float64", "--json", "found.json", "--out", "found")
    assert main.command(line) == 0
    shown = capsys.readouterr()
    assert "How many rounds, how many bits?" in shown.out
    assert f"Fewest bits: {SEC}" in shown.out
    assert "page: found/report.html" in shown.out
    assert f"[2 of 2] {SEC}: reached in" in shown.err
    gd, sec = found = json.loads(Path("found.json").read_text())
    assert [list(one) for one in found] == [KEYS, KEYS]
    assert gd["uplink_bits"] == 32 * made.WIDE * 4 * gd["rounds"]
    assert gd["saved"] == 0
    assert sec["saved"] == pytest.approx(1 - sec["uplink_bits"] / gd["uplink_bits"])
    assert sec["saved"] > 0.8
    assert all(one["reached"] and one["objective_error"] <= 1e-8 and one["workers"] == 4 for one in found)


def test_the_page_can_be_made_again_from_what_was_kept(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(asked(data, "--method", SEC, "--method", "gd", "--out", "found", "--quiet")) == 0
    page = Path("found/report.html")
    first = page.read_bytes()
    page.unlink()
    assert main.command(["report", "found"]) == 0
    assert page.read_bytes() == first
    assert b"<svg" in first
    assert b"bits sent by all workers" in first
    kept = results.read(Path("found"))
    assert kept["methods"][0]["curve"]["rounds"][-1] == kept["methods"][0]["rounds"]
    assert kept["optimum_slack"] < 1e-10
    assert capsys.readouterr().err == ""


def test_without_gd_bits_are_still_measured_by_it(data: str) -> None:
    assert main.command(asked(data, "--method", SEC, "--json", "found.json", "--quiet")) == 0
    (sec,) = json.loads(Path("found.json").read_text())
    assert 0.8 < sec["saved"] < 1


def test_a_choice_of_methods_when_none_is_named(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(asked(data, "--rounds", "3", "--json", "-")) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [one["method"] for one in found] == list(command.DEFAULTS)
    assert all(one["rounds"] == 3 and not one["reached"] and one["saved"] is None for one in found)
    assert "No method came within 1e-08 of the optimum." in shown.err


def test_the_lasso_and_linear_regression(data: str) -> None:
    for problem in ("lasso", "linear"):
        assert main.command(asked(data, "--problem", problem, "--method", SEC, "--json", "found.json", "--quiet")) == 0
        (sec,) = json.loads(Path("found.json").read_text())
        assert sec["reached"]


def test_an_unsteady_threshold_is_warned_of(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = asked(data, "--method", "gd_sec(beta=0.5, xi=100)", "--rounds", "5", "--out", "found")
    assert main.command(line) == 0
    assert "warning: gd_sec(beta=0.5, xi=100): alpha * beta * xi = 50 is above 1" in capsys.readouterr().err
    assert "alpha * beta * xi = 50 is above 1" in Path("found/report.html").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--method", "async_sgd"], "nobody waits"),
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
def test_what_it_refuses(data: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(asked(data, *more)) != 0
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert not Path("runs").exists()


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(["bits", "nothing"]) == 1
    assert "there is no nothing" in capsys.readouterr().err


def test_what_is_done_is_kept_when_it_is_stopped(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = work.descend

    def stopped(problem: object, best: object, method: object, *rest: object) -> Outcome:
        if method.name == SEC:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return real(problem, best, method, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(work, "descend", stopped)
    assert main.command(asked(data, "--method", GD, "--method", SEC, "--out", "found")) == 130
    assert "1 of 2 methods are done; the page of those: stretto report found" in capsys.readouterr().err
    assert [one["method"] for one in results.read(Path("found"))["methods"]] == [GD]
    assert main.command(["report", "found"]) == 0


def test_the_figures_of_the_field(tmp_path: Path) -> None:
    """a9a, first 5,000 rows, 10 workers: gradient descent needs 756 rounds, GD-SEC about 918 with 96.9% fewer bits."""
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        pytest.skip("STRETTO_DATA is not set")
    target = tmp_path / "found.json"
    line = ["bits", f"{folder}/a9a/a9a", "--rows", "5000", "--method", GD, "--method", SEC, "--float64", "--quiet"]
    assert main.command([*line, "--out", str(tmp_path / "found"), "--json", str(target)]) == 0
    gd, sec = json.loads(target.read_text())
    assert gd["rounds"] == 756
    assert sec["rounds"] == pytest.approx(918, rel=0.03)
    assert sec["saved"] >= 0.96
