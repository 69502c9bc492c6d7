"""Factorisation of a matrix with 3.6 million known values: the speed of the kernel, and of two processes against one.

The values are synthetic: 60,000 rows, 15,000 columns drawn from a Zipf law, products of 8 factors and noise. The kernel
is measured on one core, on the half that each of two processes trains, in the order in which they train it; beside it
LIBMF, with one thread, on the same values. The errors on real ratings are those of MovieLens (ml-latest-small), if
$STRETTO_DATA has them, a tenth of which is held out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.torch import load_file

from benchmarks.measure import Ratio, save
from benchmarks.pace import ROOT
from benchmarks.peers.libmf import Libmf
from stretto.factorise.ratings import read
from stretto.factorise.tiles import START, Tiles, tiles_of
from stretto.factorise.train import Factors
from stretto.kernels import native

ROWS, COLUMNS, VALUES, RANK, EPOCHS, STARTS, ROUNDS = 60_000, 15_000, 3_600_000, 32, 12, 5, 15
WANTED, WANTED_RATE, WANTED_ERROR = 1.5, 35e6, 0.89
REAL_RATINGS, SEEDS = Path(os.environ.get("STRETTO_DATA", "")) / "ml-latest-small" / "ratings.csv", 3
OURS, THEIRS, LIBMF_EPOCHS = "kernel", "LIBMF", 4


def write_values(path: Path) -> None:
    """Write a file of synthetic values."""
    random = np.random.default_rng(0)
    row, column = random.integers(0, ROWS, VALUES), np.minimum(random.zipf(1.25, VALUES) - 1, COLUMNS - 1)
    rows, columns = random.normal(0, 0.4, (ROWS, 8)), random.normal(0, 0.4, (COLUMNS, 8))
    value = 3.5 + (rows[row] * columns[column]).sum(1) + random.normal(0, 0.3, VALUES)
    lines = zip(row.tolist(), column.tolist(), value.tolist(), strict=True)
    with path.open("w") as file:
        file.writelines(f"{one},{other},{found:.3f}\n" for one, other, found in lines)


def kernel_rates(values: Path, folder: Path) -> dict[str, list[float]]:
    """Return the values a second of processor time on the tile of a process: of the kernel, and of LIBMF, in turns."""
    Tiles(read(values, None), 2, 0.1, 0).write(folder, RANK, 1, 1, 0.01, 0.05)
    factors, tiles = Factors(load_file(folder / START)).of_tile(0, 0), load_file(folder / tiles_of(0))
    known = tiles["row.0"], tiles["column.0"], tiles["value.0"]
    rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
    peer = Libmf(folder)
    for _ in range(ROUNDS):
        began = time.thread_time()
        native.factor_steps(factors, known, 3.5, 0.01, 0.05)
        rates[OURS].append(len(known[2]) / (time.thread_time() - began))
        rates[THEIRS].append(peer.rate(known, RANK, LIBMF_EPOCHS))
    return rates


def factorised(values: Path, processes: int, *options: str) -> dict[str, Any]:
    """Run the command with this number of processes, and return what it reports."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "stretto.cli", "factorise", str(values), "-n", str(processes), *options]
        files = ["--json", "-", "--quiet", "--run", f"{place}/run", "--out", f"{place}/factors.npz"]
        done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seconds(values: Path, processes: int) -> float:
    """Return the seconds that this number of processes trains for."""
    numbers = {"--rank": RANK, "--epochs": EPOCHS, "--evaluate-every": EPOCHS}
    return float(factorised(values, processes, *(str(one) for pair in numbers.items() for one in pair))["seconds"])


def errors() -> dict[int, list[float]]:
    """Return the errors of real ratings that were held out, one for each seed, by the number of processes."""
    if not REAL_RATINGS.exists():
        return {}
    return {
        processes: [float(factorised(REAL_RATINGS, processes, "--seed", str(seed))["rmse"]) for seed in range(SEEDS)]
        for processes in (1, 2, 4)
    }


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure the kernel, then one process and two in turns; print the figures and write them to the results."""
    question = "values a second of a factorisation on one core beside LIBMF, and the speed of two processes against one"
    print(f"factorise: {question}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder, values = Path(place), Path(place) / "values.csv"
        write_values(values)
        rates = kernel_rates(values, folder)
        taken: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(starts or STARTS):
            for processes, found in taken.items():
                found.append(seconds(values, processes))
    ratio = Ratio.of([[one] for one in taken[2]], [[one] for one in taken[1]])
    for side, found in rates.items():
        shown = ", ".join(f"{name} {one(found) / 1e6:.1f}" for name, one in (("best", max), ("median", median)))
        print(f"    {side}: {shown} M values/s of processor time")
    print(f"    wanted of the kernel at least {WANTED_RATE / 1e6:.0f}")
    print(f"    speed of 2 processes / 1: {ratio}, wanted at least {WANTED}")
    by_processes = errors()
    for processes, found in by_processes.items():
        shown = ", ".join(f"{one:.4f}" for one in found)
        print(f"    error on MovieLens, {processes} processes: {shown}, wanted at most {WANTED_ERROR}")
    wanted = {"wanted": WANTED, "wanted_rate": WANTED_RATE, "wanted_error": WANTED_ERROR}
    record = {"question": question, **wanted, "rates": rates, "seconds": taken, "errors": by_processes}
    print(f"  kept in {save('factorise', record | {'ratio': ratio.record()}, trial=starts is not None)}")
    return record
