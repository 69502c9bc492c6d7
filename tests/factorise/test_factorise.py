"""`stretto factorise`: equal bit for bit to one process in the same order of blocks, over kills; factors by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from stretto import api, kernels
from stretto.cli.main import command
from stretto.events import read_events
from stretto.factorise.ratings import Ratings, read
from stretto.factorise.tiles import HELD_OUT, START, Tiles, tiles_of
from stretto.factorise.train import Factors, train

ROWS, COLUMNS, RATINGS = 40, 30, 900
reason = kernels.why_not_native()
needs_speed = pytest.mark.skipif(reason is not None, reason=f"no native kernels: {reason}")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A file with ratings that have a structure."""
    random = np.random.default_rng(0)
    rows, columns = random.integers(0, ROWS, RATINGS), random.integers(0, COLUMNS, RATINGS)
    values = 3 + random.normal(0, 1, ROWS)[rows] + random.normal(0, 1, COLUMNS)[columns]
    lines = [f"u{row},i{column},{value:.3f}" for row, column, value in zip(rows, columns, values, strict=True)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["user,item,rating", *lines]))
    return path


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "stretto.cli", "factorise", "ratings.csv", "--run", "run", *options]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **pipes)


def run(folder: Path, *options: str) -> str:
    """Run the command, and return its output."""
    process = started(folder, *options)
    shown, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return shown


def sequential(path: Path, folder: Path, parts: int, epochs: int, rank: int, lr: float) -> dict[str, torch.Tensor]:
    """Return the factors that one process trains, tile after tile in the order of the blocks."""
    folder.mkdir()
    Tiles(read(path, None), parts, 0.1, 0).write(folder, rank, epochs, 1, lr, 0.05)
    mean = json.loads((folder / "task.json").read_text())["mean"]
    model, tiles = Factors(load_file(folder / START)), [load_file(folder / tiles_of(part)) for part in range(parts)]
    places = [(row, (row + sub_epoch) % parts) for sub_epoch in range(parts) for row in range(parts)]
    for row, column in places * epochs:
        known = tuple(tiles[row][f"{name}.{column}"] for name in ("row", "column", "value"))
        kernels.on(known[2]).factor_steps(model.of_tile(row, column), known, mean, lr, 0.05)
    return {name: one.detach() for name, one in model.named_parameters()}


@needs_speed
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_equal_one_in_the_same_order_bit_for_bit(tmp_path: Path, table: Path, processes: int) -> None:
    options = (
        "-n",
        str(processes),
        "--rank",
        "5",
        "--epochs",
        "8",
        "--lr",
        "0.05",
        "--json",
        "-",
        "--evaluate-every",
        "3",
    )
    result = json.loads(run(tmp_path, *options))
    expected = sequential(table, tmp_path / "files", processes, 8, 5, 0.05)
    trained = load_file(tmp_path / "run" / "final.safetensors")
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    counts = {"ratings": RATINGS, "held_out": 90, "rows": ROWS, "columns": COLUMNS, "processes": processes, "rank": 5}
    assert {name: result[name] for name in counts} == counts
    factors = np.load(tmp_path / "factors.npz")
    assert factors["rows"].shape == (ROWS, 5)
    assert result["rmse"] == pytest.approx(error(factors, read(table, None), processes), rel=1e-5)
    assert result["rmse"] < 0.6


def error(factors: Any, ratings: Ratings, processes: int) -> float:
    """Return the error of the held-out ratings, from the names in the file of factors."""
    places = [{name: place for place, name in enumerate(factors[side])} for side in ("rows_names", "columns_names")]
    errors = []
    for one in Tiles(ratings, processes, 0.1, 0).held_out:
        row = places[0][ratings.row_names[ratings.rows[one]]]
        column = places[1][ratings.column_names[ratings.columns[one]]]
        found = factors["mean"] + factors["rows_bias"][row] + factors["columns_bias"][column]
        found += factors["rows"][row] @ factors["columns"][column]
        errors.append(ratings.values[one] - np.clip(found, ratings.values.min(), ratings.values.max()))
    return float(np.sqrt(np.mean(np.square(errors))))


def until(folder: Path, epochs: int, process: subprocess.Popen[str]) -> list[Any]:
    """Return the events of a run that has ended this number of epochs."""
    while True:
        events = [*read_events(folder / "events.jsonl")] if (folder / "events.jsonl").exists() else []
        if sum(event["event"] == "epoch" for event in events) >= epochs:
            return events
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def processes_of(events: list[Any]) -> list[int]:
    """Return the process ids in the order of the ranks."""
    starts = sorted((event.get("rank", 0), event["pid"]) for event in events if event["event"] == "start")
    return [pid for _, pid in starts]


@needs_speed
def test_a_process_reads_the_tiles_of_its_rows_only(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Tiles(read(table, None), 3, 0.1, 0).write(tmp_path, 8, 2, 1, 0.01, 0.05)
    for others in (0, 2):
        (tmp_path / tiles_of(others)).unlink()
    monkeypatch.setattr(api, "distribute", lambda *_: [(1, 1), (1, 2), (1, 0)])
    train(tmp_path)
    assert "epoch 2 of 2" in capsys.readouterr().out


@needs_speed
def test_a_killed_process_costs_no_rating(tmp_path: Path, table: Path) -> None:
    process = started(tmp_path, "-n", "2", "--rank", "8", "--epochs", "400", "--checkpoint-every", "5")
    while not list((tmp_path / "run").glob("checkpoints/round-*/manifest*")):  # it is written in the background
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(processes_of(until(tmp_path / "run", 20, process))[1], signal.SIGKILL)
    shown, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "epoch 400 of 400" in shown
    texts = [event["text"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "warning"]
    assert any("continues from the checkpoint of round" in text for text in texts), texts
    expected = sequential(table, tmp_path / "files", 2, 400, 8, 0.01)
    trained = load_file(tmp_path / "run" / "final.safetensors")
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


@needs_speed
@pytest.mark.usefixtures("table")
def test_checkpoints_are_as_many_epochs_apart_however_often_the_processes_hold_all_factors(tmp_path: Path) -> None:
    run(tmp_path, "-n", "2", "--epochs", "7", "--evaluate-every", "7", "--checkpoint-every", "4")
    rounds = 7 * 2 - 1
    saved = sorted(int(one.name[6:]) for one in (tmp_path / "run" / "checkpoints").glob("round-*"))
    assert saved == [rounds * 4 // 7, rounds]


@needs_speed
def test_ctrl_c_ends_all_processes_and_the_run_is_continued(tmp_path: Path, table: Path) -> None:
    process = started(tmp_path, "-n", "2", "--rank", "8", "--epochs", "1000000", "--checkpoint-every", "5")
    while not list((tmp_path / "run").glob("checkpoints/round-*/manifest*")):  # it is written in the background
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    events = until(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in errors
    assert "continue from the last checkpoint: stretto factorise --resume run ..." in errors
    assert not (tmp_path / "factors.npz").exists()
    limit = time.monotonic() + 60
    while any(Path("/proc", str(pid)).exists() for pid in processes_of(events)):
        assert time.monotonic() < limit
        time.sleep(0.01)
    rounds = max(int(one.parent.name[6:]) for one in (tmp_path / "run").glob("checkpoints/round-*/manifest*"))
    epochs = str(rounds + 3)  # an epoch of two sub-epochs has one round
    run(tmp_path, "-n", "2", "--rank", "8", "--epochs", epochs, "--resume", "run", "--run", "again")
    expected = sequential(table, tmp_path / "files", 2, rounds + 3, 8, 0.01)
    trained = load_file(tmp_path / "again" / "final.safetensors")
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


@needs_speed
@pytest.mark.usefixtures("table")
def test_factors_that_diverge_end_in_one_error(tmp_path: Path) -> None:
    process = started(tmp_path, "--lr", "10", "--epochs", "50")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a smaller --lr may help" in errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-n", "31"], "try: -n 30"),
        (["-n", "0"], "got: -n 0"),
        (["--rank", "0"], "got: --rank 0"),
        (["--lr", "0"], "try: --lr 0.01"),
        (["--l2", "nan"], "try: --l2 0.05"),
        (["--held-out", "1"], "from 0 to below 1"),
        (["--out", "nowhere/factors.npz"], "a file in a folder that exists"),
    ],
)
def test_options_that_no_factorisation_can_have_are_refused(
    table: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["factorise", str(table), *options]) == 1
    assert expected in capsys.readouterr().err


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=2), st.floats(0, 0.9))
def test_each_rating_is_in_one_tile_or_held_out(
    tmp_path_factory: pytest.TempPathFactory, parts: int, pairs: list[tuple[int, int]], held_out: float
) -> None:
    folder = tmp_path_factory.mktemp("tiles")
    path = folder / "ratings.csv"
    path.write_text("".join(f"u{row},i{column},{number}\n" for number, (row, column) in enumerate(pairs)))
    Tiles(read(path, None), parts, held_out, 1).write(folder, 3, 1, 1, 0.1, 0.0)
    files = [folder / HELD_OUT, *(folder / tiles_of(part) for part in range(parts))]
    tensors = [(name, values) for file in files for name, values in load_file(file).items()]
    found = [value for name, values in tensors if name.startswith("value") for value in values.tolist()]
    assert sorted(found) == [*range(len(pairs))]
