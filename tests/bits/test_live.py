"""Worker processes need the rounds that workers in memory need, and their log counts the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bits import made

from stretto.bits.outcome import GD
from stretto.cli import main

pytest.importorskip("scipy")

WORKERS = 3
SEC = "gd_sec(beta=0.1, xi=5)"


def found(data: str, *more: str) -> list[dict[str, object]]:
    line = ["bits", data, "-n", str(WORKERS), "--l2", "0.001", "--target", "1e-4", "--json", "found.json", *more]
    assert main.command([*line, "--method", GD, "--method", SEC, "--quiet"]) == 0
    records: list[dict[str, object]] = json.loads(Path("found.json").read_text())
    return records


def test_live_is_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = str(made.write(tmp_path / "made"))
    (gd, sec), (live_gd, live_sec) = found(data), found(data, "--live", "--out", "live")
    assert live_gd["rounds"] == gd["rounds"]
    assert live_gd["uplink_bits"] == 32 * (made.WIDE + 2) * WORKERS * int(str(gd["rounds"]))
    assert live_gd["saved"] == 0
    assert live_gd["reached"]
    assert live_sec["reached"]
    assert live_sec["rounds"] == pytest.approx(sec["rounds"], rel=0.05)
    assert live_sec["uplink_bits"] == pytest.approx(sec["uplink_bits"], rel=0.1)
    assert Path("live/report.html").exists()
    assert Path("live/live-1/events.jsonl").exists()


def test_live_in_double_precision_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(made.write(tmp_path / "made"))
    assert main.command(["bits", data, "--live", "--float64"]) == 1
    assert "live workers send numbers as they compute them" in capsys.readouterr().err
