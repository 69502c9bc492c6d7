"""However a run of processes ends, its last line names the newest model on which its workers agreed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stretto
from stretto.checkpoint.model_file import FINAL, LAST, newest
from stretto.errors import RunFailedError
from stretto.launcher.program import RunResult

LIMIT_S = 120

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, stretto
from torch.utils.data import DataLoader, TensorDataset
how, width = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / width)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=8))
for epoch in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if (how, epoch, stretto.rank()) == ("uneven", 19, 1):
            sys.exit()
    if (how, epoch, stretto.rank()) == ("killed", 9, 0) and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if epoch == 18:
        stretto.save(model.state_dict(), "before.pt")
stretto.save(model.state_dict(), "own.pt")
if how == "finish":
    stretto.finish()
if how in ("raise", "finish", "killed") or how == f"raise at {stretto.rank()}":
    raise ValueError("the plot failed")
if how == "exit":
    sys.exit(3)
if how != "end":
    Path(f"over-{stretto.rank()}").touch()
    time.sleep(300)
"""
LARGE = 200_000
"""Width of a model that takes longer to write than its epochs: the newest is in memory only when the run ends."""


def started(folder: Path, how: str, width: int = 16, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--out", "run", "--quiet", *options]
    return subprocess.Popen(
        [*command, "train.py", how, str(width)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(is_so: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit, "that took too long"
        time.sleep(0.02)


def is_own(folder: Path, file: str, own_file: str = "own.pt") -> bool:
    """Return True if a model of the run has the bits that the script has saved itself, after its last epoch."""
    found, own = load_file(folder / "run" / file), torch.load(folder / own_file, weights_only=True)
    return found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: the plot failed"),
        ("raise at 1", "worker 1 failed: ValueError: the plot failed"),
        ("exit", "SystemExit: the script called sys.exit(3)"),
    ],
)
def test_failed_script_leaves_its_last_model(how: str, cause: str, tmp_path: Path) -> None:
    with ended(started(tmp_path, how, LARGE)) as process:
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    assert process.returncode == 1
    model = newest(tmp_path / "run")
    assert model is not None and not model.is_complete
    assert (model.epoch, model.step) == (20, 40)
    assert cause in str(model.cause)
    assert is_own(tmp_path, LAST)
    assert said[-1].startswith("the last model on which the workers agreed, after epoch 20, step 40: run/last.saf")
    command = [sys.executable, "-m", "stretto.cli", "export", "run", "out.safetensors"]
    exported = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "the last model on which the workers of an incomplete run agreed, after epoch 20" in exported.stdout
    assert cause in exported.stdout
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(tmp_path / "run" / LAST).keys()


@pytest.mark.parametrize("layout", ["pipeline(2)", "sharded(2)"])
def test_worker_of_several_processes_leaves_its_whole_last_model(layout: str, tmp_path: Path) -> None:
    with ended(started(tmp_path, "raise", options=["--layout", layout])) as process:
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    model = newest(tmp_path / "run")
    assert model is not None and (model.epoch, model.is_complete) == (20, False), said
    assert is_own(tmp_path, LAST)
    assert "run/last.safetensors" in said[-1]


def test_worker_that_leaves_its_last_epoch_alone_leaves_the_model_of_the_epoch_before(tmp_path: Path) -> None:
    with ended(started(tmp_path, "uneven")) as process:
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    assert process.returncode == 1
    model = newest(tmp_path / "run")
    assert model is not None and (model.epoch, model.step, model.is_complete) == (19, 38, False), said
    assert "left the loop" in str(model.cause) or "UnevenLoopsError" in str(model.cause), model.cause
    assert is_own(tmp_path, LAST, "before.pt")
    assert said[-1].startswith("the last model on which the workers agreed, after epoch 19, step 38: run/last.saf")


def test_error_after_a_kill_of_worker_0_leaves_the_last_model(tmp_path: Path) -> None:
    """Worker 0 is killed when an epoch has ended, starts again, and raises an error after its last epoch."""
    with ended(started(tmp_path, "killed")) as process:
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    assert process.returncode == 1
    assert (tmp_path / "killed").exists()
    model = newest(tmp_path / "run")
    assert model is not None and (model.epoch, model.is_complete) == (20, False), said
    assert "ValueError: the plot failed" in str(model.cause)
    assert is_own(tmp_path, LAST)
    assert "run/last.safetensors" in said[-1]


def test_torchrun_leaves_the_last_model_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "raise at 0", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    (run,) = (tmp_path / "runs").iterdir()
    model = newest(run)
    assert model is not None and (model.epoch, model.cause) == (20, "ValueError: the plot failed"), done.stderr
    assert f"stretto: the last model on which the workers agreed, after epoch 20, step 40: {model.path}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_run_leaves_its_last_model(number: signal.Signals, tmp_path: Path) -> None:
    """A killed launcher can't ask for the newest: it leaves the file that was written when it was due."""
    with ended(started(tmp_path, "sleep", LARGE if number == signal.SIGINT else 16)) as process:
        until(lambda: all((tmp_path / f"over-{worker}").exists() for worker in range(2)))
        if number == signal.SIGKILL:
            until(lambda: (model := newest(tmp_path / "run")) is not None and model.epoch == 20)
        process.send_signal(number)
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    model = newest(tmp_path / "run")
    assert model is not None and (model.epoch, model.step) == (20, 40)
    assert is_own(tmp_path, LAST)
    if number == signal.SIGINT:
        assert model.cause == "stopped by SIGINT"
        assert "run/last.safetensors" in said[-1]
    else:
        assert "its launcher was killed" in str(model.cause)


@pytest.mark.parametrize("how", ["end", "finish"])
def test_complete_run_leaves_the_final_model_alone(how: str, tmp_path: Path) -> None:
    with ended(started(tmp_path, how)) as process:
        said = process.communicate(timeout=LIMIT_S)[1].splitlines()
    assert process.returncode == (how == "finish")
    assert is_own(tmp_path, FINAL)
    assert not (tmp_path / "run" / LAST).exists()
    assert how == "end" or said[-1].startswith("the trained model: run/final.safetensors")


def test_error_of_a_failed_run_has_its_folder_and_its_result_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(RunFailedError, match="last.safetensors") as error:
        stretto.run(tmp_path / "train.py", "raise", 16, out=tmp_path / "run", quiet=True)
    result = RunResult(error.value.folder)
    assert result.model is not None and result.model.path == tmp_path / "run" / LAST
    assert result.model.cause == "worker 0 failed: ValueError: the plot failed"
