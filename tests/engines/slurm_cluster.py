"""A Slurm of two nodes on this machine, in a folder of its own, with its own key and without system services."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
START_S = 30.0
CONFIG = """
ClusterName=try
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/controller.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerType=sched/backfill
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=30
MessageTimeout=10
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=10 State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm's commands use the cluster; all its processes end with it."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing or os.geteuid() != 0:
        packages = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
        pytest.skip(f"Slurm needs root and: {packages} (no {', '.join(missing)})")
    for name in ("log", "state", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True)
    with ExitStack() as stack:
        text = CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        place = [f"--{name}={folder}/munge.{ending}" for name, ending in (("key-file", "key"), ("socket", "sock"))]
        logs = [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/log/munge.log", f"--seed-file={folder}/seed"]
        for command in (
            ["munged", "--foreground", "--force", *place, *logs],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            log = stack.enter_context((folder / "log" / f"{command[0]}.out").open("ab"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            if command[0] == "munged":
                _until((folder / "munge.sock").exists, folder)
        _until(lambda: _idle(environment) == 2, folder)
        yield environment


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "-h", "-N", "-o", "%t"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return found.stdout.split().count("idle")


def _until(is_so: object, folder: Path) -> None:
    limit = time.monotonic() + START_S
    while not is_so():  # type: ignore[operator]
        logs = "\n".join(path.read_text(errors="replace")[-500:] for path in (folder / "log").iterdir())
        assert time.monotonic() < limit, f"Slurm has not started:\n{logs}"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
