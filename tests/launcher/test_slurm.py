"""Tests of what a task of Slurm makes of its environment; `tests/engines/test_slurm.py` runs them on Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.errors import LaunchError
from stretto.launcher.join import JoinRequest
from stretto.launcher.slurm import SlurmTask, run_task
from stretto.process_config import worker_config
from stretto.run_config import RunConfig

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return RunConfig(tmp_path / "train.py", recipe="allreduce")


def test_first_task_launches_and_the_run_begins_with_all_tasks(script: RunConfig) -> None:
    launched: list[RunConfig] = []

    def launch(config: RunConfig) -> Path:
        launched.append(config)
        return Path("folder")

    task = SlurmTask.of({**TASK, "SLURM_CPUS_PER_TASK": "3"})
    assert run_task(script, task, launch, lambda _: Path("joined")) == Path("folder")
    (config,) = launched
    assert (config.workers, config.initial_workers, config.threads, config.host) == (1, 4, 3, "127.0.0.1")
    assert (config.out, config.resume) == (Path("runs/slurm-7.0"), None)
    assert config.checkpoints is not None and config.checkpoints.follows_cost and config.stop_within_s == 25.0
    assert "announced" not in config.record()


def test_a_job_without_checkpoints_ends_immediately_when_it_is_asked_to(script: RunConfig) -> None:
    config = SlurmTask.of(TASK).configured(replace(script, checkpoint_every="never"))
    assert (config.checkpoints, config.stop_within_s) == (None, 0.0)


def test_other_tasks_join_by_the_key_of_the_run_under_their_numbers(script: RunConfig) -> None:
    joined: list[JoinRequest] = []
    folder = Path("runs/slurm-7.0")
    folder.mkdir(parents=True)
    (folder / "join.key").touch()

    def join(request: JoinRequest) -> Path:
        joined.append(request)
        return folder

    task = SlurmTask.of({**TASK, "SLURM_PROCID": "3"})
    assert run_task(script, task, lambda _: Path("launched"), join) is None
    assert [(one.run, one.workers, one.first, one.key) for one in joined] == [(str(folder), 1, 3, None)]


def test_task_that_finds_no_run_names_the_folder(script: RunConfig) -> None:
    task = SlurmTask.of({**TASK, "SLURM_PROCID": "3"})
    with pytest.raises(LaunchError, match=r"task 3 of 4 has found no run in .*runs/slurm-7.0") as raised:
        run_task(replace(script, timeout_s=0.2), task, lambda _: Path(), lambda _: Path())
    assert "a folder that all nodes see" in str(raised.value)


def test_requeued_job_continues_from_the_newest_start_that_has_checkpoints(script: RunConfig) -> None:
    Path("runs/slurm-7.0/checkpoints").mkdir(parents=True)
    Path("runs/slurm-7.0-1").mkdir(parents=True)
    config = SlurmTask.of({**TASK, "SLURM_RESTART_COUNT": "2"}).configured(script)
    assert (config.out, config.resume) == (Path("runs/slurm-7.0-2"), Path("runs/slurm-7.0"))
    chosen = SlurmTask.of({**TASK, "SLURM_RESTART_COUNT": "1"}).configured(replace(script, out=Path("shared/x")))
    assert (chosen.out, chosen.resume) == (Path("shared/x-1"), None)


def test_error_of_the_configuration_is_printed_once(script: RunConfig) -> None:
    bad = replace(script, recipe="alreduce")
    with pytest.raises(SystemExit):
        run_task(bad, SlurmTask.of({**TASK, "SLURM_PROCID": "1"}), lambda _: Path(), lambda _: Path())


def test_command_outside_of_slurm_is_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto.cli", "slurm", "train.py"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 1
    for words in ("no task of Slurm", "got: no SLURM_JOB_ID", "try: srun -N 2 -n 4 stretto slurm train.py"):
        assert words in done.stderr


def test_task_of_plain_srun_is_a_worker() -> None:
    config = worker_config(SRUN)
    assert config is not None
    assert (config.worker, config.world_size) == (2, 4)
    assert config.store == "gpu07:20113"
    chosen = worker_config({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert chosen is not None
    assert chosen.store == "10.0.0.1:29500"


def test_single_task_and_the_script_of_a_batch_job_are_no_workers() -> None:
    assert worker_config({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert worker_config({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
