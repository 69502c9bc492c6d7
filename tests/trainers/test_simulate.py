"""Simulations of scripts that train by another library (`make test-trainers`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import ALONE, LIMIT_S, STOCK, Trained, train

for library in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(library)
pytestmark = pytest.mark.trainers

LIT, LOOPS = STOCK.with_name("lit.py"), STOCK.with_name("loops.py")
UNEQUAL = ["--network", "10Mbit/s 1ms", "--speeds", "1,2,3"]


def simulated(folder: Path, name: str, command: list[str], *script: str, stock: Path = STOCK) -> Trained:
    """Simulate the script, which writes in private files of the run."""
    out, run = Path("out") / name, folder / f"run-{name}"
    line = [sys.executable, "-m", "stretto.cli", "simulate", "--step-time", "10ms", "--out", str(run), *command]
    done = subprocess.run(
        [*line, str(stock), str(out), *script],
        cwd=folder,
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Trained(done.returncode, done.stdout + done.stderr, run / "files" / out, run)


@pytest.mark.parametrize(
    ("stock", "script"),
    [(STOCK, ["--dropout", "0.1"]), (LIT, []), (LOOPS, ["--kind", "cv", "--dropout", "0.1", "--accumulation", "2"])],
    ids=lambda value: getattr(value, "stem", None),
)
def test_simulated_workers_compute_and_write_as_live_ones(stock: Path, script: list[str], tmp_path: Path) -> None:
    """Workers whose turns change within evaluations and micro-batches."""
    workers = ["-n", "3", "--recipe", "local_sgd(every=4)"]
    live = train(tmp_path, "live", workers, *script, stock=stock)
    done = simulated(tmp_path, "simulated", [*workers, *UNEQUAL], *script, stock=stock)
    assert (live.code, done.code) == (0, 0), live.output + done.output
    assert done.apart(live) < 1e-6
    assert done.result.keys() == live.result.keys()
    assert done.result["steps"] == live.result["steps"]
    files = [{path.relative_to(one.folder) for path in one.folder.rglob("*")} for one in (live, done)]
    assert files[0] == files[1]
    assert "several workers" not in done.output
    for path in (path for path in files[0] if path.suffix == ".csv"):
        assert (done.folder / path).read_text() == (live.folder / path).read_text()


def test_simulated_gradients_equal_one_process_with_the_same_global_batch(tmp_path: Path) -> None:
    """The step time is measured first, by another run of the script in the same process."""
    alone = train(tmp_path, "alone", [])
    measured = ["--step-time", "auto", "-n", "2", "--recipe", "allreduce", "--batch", "split"]
    two = simulated(tmp_path, "two", measured)
    assert two.code == 0, two.output
    assert two.apart(alone) < 1e-6
    assert two.result["losses"] == pytest.approx(alone.result["losses"], abs=2e-6)
    assert "in 20 rounds" in two.output
    assert [one["step"] for one in two.events("evaluation")] == [5, 10, 15, 20]


def test_a_simulation_with_killed_workers_has_the_same_bits_again(tmp_path: Path) -> None:
    faults = "kill worker 1 at 150ms, back after 100ms; kill worker 0 at 400ms, back after 50ms"
    command = ["-n", "3", "--recipe", "local_sgd(every=4)", *UNEQUAL, "--faults", faults]
    runs = [simulated(tmp_path, name, command, "--set", '{"max_steps": 40}') for name in ("one", "two")]
    assert [one.code for one in runs] == [0, 0], runs[0].output
    assert runs[0].output.count("(killed by SIGKILL, injected)") == 2
    assert runs[0].result["steps"] == 40
    assert runs[0].result == runs[1].result
    names = ("events.jsonl", "final.safetensors")
    first, second = ([(one.run / name).read_bytes() for name in names] for one in runs)
    assert first == second


@pytest.mark.parametrize(
    ("stock", "script", "announced", "samples"),
    [
        (STOCK, ["--set", '{"max_steps": 18, "optim": "sgd"}'], 3 * 103 + 3 * 3 * 8, 4 * 103),
        (LOOPS, ["--kind", "cv", "--samples", "103", "--epochs", "3"], 3 * 103, 3 * 103),
    ],
    ids=["Trainer", "Accelerate"],
)
def test_slow_workers_that_do_not_wait_make_fewer_steps_of_the_announced_ones(
    stock: Path, script: list[str], announced: int, samples: int, tmp_path: Path
) -> None:
    """The global steps are all made: three epochs, and of the Trainer's fourth the three steps that are announced."""
    command = ["-n", "3", "--recipe", "async_sgd", "--speeds", "1,2,3"]
    done = simulated(tmp_path, "slow", command, *script, stock=stock)
    assert done.code == 0, done.output
    assert "of worker 2 has had" in done.output
    assert announced <= sum(one["sample_counts"]["once"] for one in done.events("epoch")) <= samples
    assert [one["sample_counts"]["once"] for one in done.events("epoch")][:3] == [103] * 3


def test_lightning_refuses_recipes_that_do_not_wait_before_the_first_step(tmp_path: Path) -> None:
    done = simulated(tmp_path, "lit", ["-n", "2", "--recipe", "async_sgd"], stock=LIT)
    assert done.code == 1
    assert "expected: a recipe whose workers wait for each other" in done.output
    assert not done.events("epoch")
