"""Tests of runs on a Slurm of two nodes, which the tests start. Skipped where Slurm is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_runs import assert_each_sample_counts_once, events, script
from slurm_cluster import slurm

pytestmark = pytest.mark.engine
SCRIPT = script("""\
pathlib.Path("trained-" + os.environ["SLURM_PROCID"]).touch()
if not pathlib.Path("enough").exists():
    time.sleep(0.2)""")
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as found:
        root = str(Path(__file__).resolve().parents[2])
        yield {**found, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def place(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a script; jobs that a test leaves are ended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    yield tmp_path
    subprocess.run(["scancel", "--full", "-u", "root"], env=environment, check=False, timeout=30)
    until(lambda: not subprocess.check_output(["squeue", "-h"], env=environment, timeout=30))


def srun(environment: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    survives = ["--kill-on-bad-exit=0", "--no-kill"]
    command = ["srun", "-N2", "-n3", *survives, sys.executable, "-m", "stretto.cli", "slurm", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=dict(environment), text=True, **pipes)


def until(is_so: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit, "it has not come so within the limit"
        assert all(one.poll() is None for one in processes), [one.communicate()[0] for one in processes]
        time.sleep(0.1)


def trains(run: Path) -> bool:
    """Return True once all three workers have trained together."""
    is_formed = any(event.get("members") == [0, 1, 2] for event in events(run, "membership"))
    return is_formed and len(list(run.parents[1].glob("trained-*"))) == 3


def checkpoints(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob("round-*"))


def run_of(place: Path) -> Path:
    return next(iter(sorted((place / "runs").glob("slurm-*"))), place / "none")


def task(number: int) -> psutil.Process:
    """Return the launcher of a task."""
    for process in psutil.process_iter():
        try:
            words, variables = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if "slurm" in words and variables.get("SLURM_PROCID") == str(number) and "srun" not in words[0]:
            return process
    raise AssertionError(f"there is no task {number}")


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "async_sgd"])
def test_killed_task_leaves_the_others_training(place: Path, environment: dict[str, str], recipe: str) -> None:
    options = ["--recipe", recipe, "--checkpoint-every", "1s", "--failure-timeout", "5s"]
    step = srun(environment, *options, "train.py")
    until(lambda: trains(run_of(place)), step)
    task(2).kill()
    (place / "enough").touch()
    output = step.communicate(timeout=LIMIT_S)[0]
    run = run_of(place)
    assert_each_sample_counts_once([run])
    assert any(event["what"] == "failed" and event["worker"] == 2 for event in events(run, "membership")), output
    assert output.count("epoch 3 ended") == 1  # one display


def test_signal_of_the_time_limit_ends_all_tasks_with_a_checkpoint(place: Path, environment: dict[str, str]) -> None:
    step = srun(environment, "--checkpoint-every", "1h", "train.py")
    until(lambda: trains(run_of(place)), step)
    job = run_of(place).name.removeprefix("slurm-").partition(".")[0]
    subprocess.run(["scancel", "--signal=TERM", job], env=environment, check=True, timeout=30)
    output = step.communicate(timeout=LIMIT_S)[0]
    assert step.returncode not in (0, None)
    assert "stopped by SIGTERM; the workers leave" in output
    assert len(checkpoints(run_of(place))) == 1, output
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(place) and one.pid != os.getpid()]


def test_requeued_job_continues_from_the_checkpoint_of_its_end(place: Path, environment: dict[str, str]) -> None:
    words = f"{sys.executable} -m stretto.cli slurm --checkpoint-every 1h train.py"
    (place / "job.sh").write_text(f"#!/bin/bash\n#SBATCH -N2 -n3 --requeue --output=out-%j\nexec srun {words}\n")
    submitted = subprocess.check_output(["sbatch", "--parsable", "job.sh"], env=environment, text=True, timeout=30)
    job = submitted.strip()
    run, second = place / "runs" / f"slurm-{job}.0", place / "runs" / f"slurm-{job}.0-1"
    until(lambda: trains(run))
    subprocess.run(["scontrol", "requeue", job], env=environment, check=True, timeout=30)
    until(lambda: not any(one.name() == "srun" for one in psutil.process_iter()))
    (place / "enough").touch()
    subprocess.run(["scontrol", "release", job], env=environment, check=False, timeout=30)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment, check=False, timeout=30)
    until(lambda: (second / "final.safetensors").exists() or events(second, "end"))
    output = (place / f"out-{job}").read_text()
    assert "continues from the checkpoint" in output
    assert_each_sample_counts_once([run, second], output=output)


def test_error_after_training_leaves_the_last_model(place: Path, environment: dict[str, str]) -> None:
    (place / "train.py").write_text(script(epochs=1) + "1 / 0\n")
    step = srun(environment, "train.py")
    output = step.communicate(timeout=LIMIT_S)[0]
    assert step.returncode not in (0, None) and "ZeroDivisionError: division by zero" in output, output
    assert (run_of(place) / "last.safetensors").exists() and "last.safetensors" in output, output


def test_plain_script_under_srun_is_distributed(place: Path, environment: dict[str, str]) -> None:
    (place / "enough").touch()
    variables = {**environment, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_RECIPE": "allreduce"}
    command = ["srun", "-N2", "-n3", sys.executable, "train.py"]
    done = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (place / "runs").iterdir()
    assert_each_sample_counts_once([run])
