"""Runs on Slurm: `srun stretto slurm` starts a task for each worker; task 0 launches the run, the others join it.

    task 0: launcher, worker 0                            task 1: worker 1
      | -- runs/slurm-JOB.STEP/join.key, mode 600, on a disk that all nodes see --> |
      | <-- joins -------------------------------------------------------------- |

A job that is requeued keeps its number: the run then continues from the newest checkpoint of its earlier starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from stretto.errors import LaunchError, StrettoError, explain
from stretto.launcher.config import check
from stretto.launcher.join import JOIN_KEY, JoinRequest
from stretto.run_config import RunConfig
from stretto.run_dir import CHECKPOINTS, RUNS

STOP_WITHIN_S = 25.0
"""Time for a last checkpoint after SIGTERM; scancel kills 30 s after it, unless KillWait differs."""
LOOK_S = 0.1
NUMBERS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")


@dataclass(frozen=True)
class SlurmTask:
    """Task of a job step, as Slurm describes it in the environment."""

    job: int
    step: int
    number: int
    tasks: int
    launched_from: str
    """Address of the node on which srun runs."""
    starts: int
    """Number of earlier starts of the job."""
    processors: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmTask:
        """Return the task of this process. Raises LaunchError outside of a task of srun."""
        missing = [name for name in NUMBERS if not environment.get(name, "").isdigit()]
        if missing:
            problem, expected = "this process is no task of Slurm", "a task of srun, in a job or by itself"
            to_type = "srun -N 2 -n 4 stretto slurm train.py"
            raise LaunchError(explain(problem, got=f"no {missing[0]}", expected=expected, to_type=to_type))
        job, step, number, tasks = (int(environment[name]) for name in NUMBERS)
        processors = int(environment.get("SLURM_CPUS_PER_TASK", "0")) or None
        launched_from = environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
        starts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        return cls(job, step, number, tasks, launched_from, starts, processors)

    def folder(self, config: RunConfig, start: int) -> Path:
        """Return the run directory of one of the starts of the job."""
        first = config.out or RUNS / f"slurm-{self.job}.{self.step}"
        return first.with_name(f"{first.name}-{start}") if start else first

    def configured(self, config: RunConfig) -> RunConfig:
        """Return the configuration of the run that task 0 launches."""
        earlier = [self.folder(config, start) for start in reversed(range(self.starts))]
        resumed = next((folder for folder in earlier if (folder / CHECKPOINTS).is_dir()), None)
        launched = replace(
            config,
            workers=1,
            announced=self.tasks - 1,
            threads=config.threads or self.processors,
            host=config.host or _address(self.launched_from),
            out=self.folder(config, self.starts),
            resume=config.resume or resumed,
        )
        if launched.stop_within_s or launched.checkpoints is None:
            return launched
        return replace(launched, stop_within_s=STOP_WITHIN_S)

    def joining(self, config: RunConfig) -> JoinRequest:
        """Return how a task other than the first joins the run. Waits for its key, at most `timeout_s`."""
        folder = self.folder(config, self.starts)
        limit = time.monotonic() + config.timeout_s
        while not (folder / JOIN_KEY).exists():
            if time.monotonic() > limit:
                problem = f"task {self.number} of {self.tasks} has found no run in {folder.absolute()}"
                expected, got = "a run of task 0, in a folder that all nodes see", f"nothing for {config.timeout_s:g} s"
                to_type = "stretto slurm --out /shared/NAME train.py"
                raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
            time.sleep(LOOK_S)
        threads = config.threads or self.processors
        return JoinRequest(str(folder), threads=threads, restarts=config.restarts, first=self.number)


def run_task(
    config: RunConfig,
    task: SlurmTask,
    launch: Callable[[RunConfig], Path],
    join: Callable[[JoinRequest], Path],
) -> Path | None:
    """Run a task until the end of the run; return the run directory at task 0. Raises as `run` and `join` do."""
    if task.number == 0:
        return launch(task.configured(config))
    try:
        check(task.configured(config))
    except StrettoError:  # task 0 prints it
        raise SystemExit(1) from None
    join(task.joining(config))
    return None


def _address(launched_from: str) -> str:
    from stretto.security import address_toward  # imports zmq

    return address_toward(launched_from)
