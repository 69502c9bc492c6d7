"""Runs whose workers are started on other hosts by ssh: a real client, and a server on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from counted_models import assert_none_is_lost
from namespace_hosts import HOSTS, HUB, events, generations, hosts, ip, starts
from run_place import Place, until
from safetensors.torch import load_file
from ssh_hosts import STRETTO, SshHosts, ssh_elsewhere, ssh_hosts

__all__ = ["hosts", "ssh_elsewhere", "ssh_hosts"]

SAMPLES, EPOCHS = 96, 6
SCRIPT = f"""
import os, pathlib, sys, time, torch, stretto
torch.manual_seed(0)
x = torch.randn({SAMPLES}, 4); y = x.sum(1, keepdim=True)
net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
model = net
if COUNTS:  # the gradient of a number is 1 where its sample is trained in its epoch
    model = torch.nn.ModuleDict({{"net": net, "count": torch.nn.Embedding({SAMPLES}, {EPOCHS})}})
    torch.nn.init.zeros_(model["count"].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y, torch.arange({SAMPLES}))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
loader = stretto.distribute(model, optimizer, loader)
print("worker", stretto.rank(), "trains\\x1b[2J", flush=True)
enough = pathlib.Path(sys.argv[1])
(enough.parent / f"trains-{{os.getpid()}}").touch()
for epoch in range({EPOCHS}):
    for a, b, numbers in loader:
        assert not (enough.parent / f"fail{{stretto.rank()}}").exists(), "it was told to fail"
        optimizer.zero_grad()
        counted = model["count"](numbers)[:, epoch].sum() if COUNTS else 0
        (((net(a) - b) ** 2).mean() + counted).backward()
        optimizer.step()
        for _ in range(1 if epoch < {EPOCHS} - 1 else 100):  # a busy machine needs longer than all epochs take
            if not enough.exists():
                time.sleep(0.2)
"""
LIMIT_S = 120
"""Limit of the waits: a busy machine needs several times the seconds that they take."""
FAILURE_TIMEOUT = "5s"


class Run:
    """A run with hosts, whose script ends soon after the file `enough` exists."""

    def __init__(
        self, place: Place, both: Path, *options: str, remote: str = STRETTO, network: str = "", at: str = "127.0.0.1"
    ) -> None:
        self.enough = both / "enough"
        self.folder = place.folder / ("resumed" if "--resume" in options else "run")
        self.counts = "--layout" not in options
        (place.folder / "train.py").write_text(SCRIPT.replace("COUNTS", str(self.counts)))
        place.recovers = True
        words = ["--listen", at, "--failure-timeout", FAILURE_TIMEOUT, "--remote-stretto", remote]
        words += ["--recipe", "local_sgd(every=2)", "--out", str(self.folder), *options]
        self.process = place.stretto("run", *words, "train.py", self.enough, network=network, stderr=subprocess.STDOUT)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition while the launcher runs."""
        until(lambda: self.process.poll() is not None or is_so(), LIMIT_S)
        assert self.process.poll() is None, self.process.communicate()[0].decode()

    def until_started(self, *workers: int) -> None:
        """Wait until these workers have printed that they train."""
        self.until(lambda: set(workers) <= self.pids().keys() and all(self.trains(worker) for worker in workers))

    def trains(self, worker: int) -> bool:
        """Return whether the newest process of a worker has printed that it trains."""
        return (self.enough.parent / f"trains-{self.pids()[worker]}").exists()

    def pids(self) -> dict[int, int]:
        """Return the newest process of each worker."""
        return {worker: event["pid"] for worker, event in starts(self.folder).items()}

    def end(self) -> str:
        """Return what the launcher has printed until its end."""
        self.enough.touch()
        return self.process.communicate(timeout=LIMIT_S)[0].decode()

    def sample_counts(self) -> list[tuple[int, int, int]]:
        """Return how many samples of each epoch were trained once, twice and never.

        A model that counts lacks only samples that were lost after the end of an epoch and recovered in the next.
        """
        epochs = [event for event in events(self.folder) if event["event"] == "epoch"]
        model = self.folder / "final.safetensors"
        if self.counts and model.exists():
            assert_none_is_lost(load_file(model)["count.weight"], epochs)
        counts = [event["sample_counts"] for event in epochs]
        return [(one["once"], one["twice"], one["never"]) for one in counts]


@pytest.fixture
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the processes of all hosts see."""
    return tmp_path_factory.mktemp("both")


def test_run_begins_with_the_workers_of_all_hosts_and_a_killed_one_is_restarted(
    place: Place, ssh_hosts: SshHosts, both: Path
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a,b:2", "--threads", "1", "--output", "all")
    run.until_started(0, 1, 2, 3)
    secrets = [word for word in (run.folder / "join.key").read_text().split('"') if len(word) == 40]
    assert len(secrets) == 3
    assert len(ssh_hosts.commands) == 2
    shown = [" ".join(process.cmdline()) for process in place.left()] + ssh_hosts.commands
    assert not any(secret in text for secret in secrets for text in shown)
    sessions = {command.split(" -n ")[1][0]: psutil.Process(pid) for command, pid in ssh_hosts.pids()}
    children = {count: {child.pid for child in session.children()} for count, session in sessions.items()}
    assert run.pids()[1] in children["1"] and {run.pids()[2], run.pids()[3]} <= children["2"]
    killed = run.pids()[3]
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: run.pids()[3] != killed and run.trains(3))
    said = run.end()
    assert run.process.returncode == 0, said
    assert generations(run.folder)[0] == [0, 1, 2, 3]
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS
    assert "4 workers (1 here, 1 on a, 2 on b)" in said
    assert "stretto: b: starting 2 workers" in said and "stretto: a: starting 1 worker" in said
    assert [said.count(f"worker {worker} trains") for worker in range(4)] == [1, 1, 1, 2]


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", "async_sgd"])
def test_launcher_without_workers_shows_worker_0_of_a_host(
    place: Place, ssh_hosts: SshHosts, both: Path, recipe: str
) -> None:
    run = Run(place, both, "-n", "0", "--hosts", "a,b", "--lr-scale", "linear", "--recipe", recipe)
    run.until_started(0, 1)
    said = run.end()
    assert run.process.returncode == 0, said
    assert [0, 1] in generations(run.folder)
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS
    assert (said.count("worker 0 trains?[2J"), said.count("worker 1 trains"), said.count("\x1b")) == (1, 0, 0)
    assert "stretto: 2 workers" in said and "; learning rate 2 x the script's" in said


@pytest.fixture
def other_version(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the command of another version of Stretto."""
    path = tmp_path_factory.mktemp("other") / "stretto.py"
    text = "import stretto\nstretto.__version__ = '0.0.9'\nfrom stretto.cli.main import main\nmain()\n"
    path.write_text(text)
    return f"{sys.executable} -P {path}"


@pytest.mark.parametrize(
    ("hosts", "cause", "to_type"),
    [
        ("a,stranger:2", "the key of host stranger is not known, or has changed", "ssh stranger true"),
        ("a,nowhere:2", "host nowhere cannot be reached", "ssh nowhere true"),
    ],
)
def test_host_that_ssh_cannot_reach_ends_the_run_with_one_error(
    place: Place, ssh_hosts: SshHosts, both: Path, hosts: str, cause: str, to_type: str
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", hosts)
    said = run.end()
    assert run.process.returncode == 1, said
    assert cause in said and f"  try: {to_type}" in said
    assert said.count("  try:") == 1
    assert "Traceback" not in said


def test_refused_key_ends_the_run_with_one_error(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    ssh_hosts.is_refusing = True
    run = Run(place, both, "-n", "1", "--hosts", "b")
    said = run.end()
    assert run.process.returncode == 1, said
    assert "host b refuses the keys of this user" in said and "  try: ssh-copy-id b" in said
    assert said.count("Permission denied") == 1


def test_missing_stretto_ends_the_run_with_one_error(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "b", remote="~/venv/bin/stretto")
    said = run.end()
    assert run.process.returncode == 1, said
    assert "host b has no command ~/venv/bin/stretto" in said and "  try: --remote-stretto" in said


def test_missing_package_ends_the_run_with_one_error(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    remote = f"{sys.executable} -I -m no_such_stretto"
    run = Run(place, both, "-n", "1", "--hosts", "b", remote=remote)
    said = run.end()
    assert run.process.returncode == 1, said
    assert "the command on host b ended with exit code 1" in said and "No module named no_such_stretto" in said
    assert f"  try: ssh b '{remote} --version'" in said


def test_another_version_of_stretto_ends_the_run_with_one_error(
    place: Place, ssh_hosts: SshHosts, both: Path, other_version: str
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "b", remote=other_version)
    said = run.end()
    assert run.process.returncode == 1, said
    assert "host b: this machine has another version of Stretto than the run\n  got: 0.0.9" in said
    assert said.count("another version") == 1


def test_script_error_on_a_host_ends_the_run(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a:2")
    run.until_started(0, 1, 2)
    (both / "fail2").touch()
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 1, said
    assert "host a: worker 2 failed: AssertionError: it was told to fail" in said
    assert said.count("Traceback") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_launcher_ends_all_processes_of_all_hosts(
    place: Place, ssh_hosts: SshHosts, both: Path, number: signal.Signals
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a,b")
    run.until_started(0, 1, 2)
    run.process.send_signal(number)
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    place.await_ends()
    assert all(session.poll() is not None for session in ssh_hosts.sessions)


def test_launcher_killed_while_hosts_join_leaves_no_process(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a,b")
    run.until(lambda: bool(ssh_hosts.commands))
    run.process.kill()
    run.process.communicate(timeout=LIMIT_S)
    place.await_ends()


def test_machine_without_an_ssh_client_is_explained(place: Place, both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(both))
    said = Run(place, both, "-n", "1", "--hosts", "a").end()
    assert "hosts cannot be reached: ssh cannot be started: No such file" in said
    assert "  try: apt install openssh-client, or stretto join on each host" in said


def test_agent_that_is_asked_to_end_leaves_and_the_others_continue(
    place: Place, ssh_hosts: SshHosts, both: Path
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a:2")
    run.until_started(0, 1, 2)
    ssh_hosts.sessions[0].terminate()
    run.until(lambda: generations(run.folder)[-1] == [0] and ssh_hosts.sessions[0].poll() is not None)
    said = run.end()
    assert run.process.returncode == 0, said
    assert "stretto: host a: stopped by SIGTERM; continuing without its 2 workers" in said
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS


def test_broken_connection_ends_the_host_and_the_others_continue(place: Place, ssh_hosts: SshHosts, both: Path) -> None:
    (both / "hosts").write_text("a slots=2\n")
    run = Run(place, both, "-n", "1", "--hostfile", str(both / "hosts"))
    run.until_started(0, 1, 2)
    ssh_hosts.break_connections()
    run.until(lambda: generations(run.folder)[-1] == [0])
    assert ssh_hosts.sessions[0].wait(LIMIT_S)
    said = run.end()
    assert run.process.returncode == 0, said
    assert said.count("host a") == 1, said
    assert "the connection to host a has ended; continuing without its 2 workers" in said
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS


def test_stopped_run_with_hosts_is_resumed_by_the_workers_of_all_hosts(
    place: Place, ssh_hosts: SshHosts, both: Path
) -> None:
    options = ["-n", "1", "--hosts", "a", "--checkpoint-every", "1 rounds"]
    run = Run(place, both, *options)
    run.until(lambda: len(list(run.folder.glob("checkpoints/round-*/manifest*"))) > 1)
    run.process.terminate()
    assert "stretto run --resume" in run.process.communicate(timeout=LIMIT_S)[0].decode()
    resumed = Run(place, both, *options, "--resume", "run")
    said = resumed.end()
    assert resumed.process.returncode == 0, said
    assert "continues from the checkpoint of round" in said
    assert generations(resumed.folder)[0] == [0, 1]
    counts = run.sample_counts() + resumed.sample_counts()
    assert set(counts) == {(SAMPLES, 0, 0)} and len(counts) >= EPOCHS


def test_workers_of_a_host_that_vanishes_fail_and_the_others_continue(
    place: Place, ssh_elsewhere: SshHosts, both: Path
) -> None:
    options = ["-n", "1", "--hosts", "a:2", "--failure-timeout", "3s"]
    run = Run(place, both, *options, network=HOSTS[0], at="10.79.0.1")
    run.until_started(0, 1, 2)
    ip("-n", HUB, "link", "set", "port1", "nomaster")
    client = next(child for child in psutil.Process(run.process.pid).children() if child.name() == "ssh")
    run.until(lambda: generations(run.folder)[-1] == [0] and not client.is_running())
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS
    assert said.count("host a") == 1, said
    assert "the connection to host a has ended; continuing without its 2 workers" in said


def test_host_whose_workers_are_lost_for_good_is_named_and_the_others_continue(
    place: Place, ssh_hosts: SshHosts, both: Path
) -> None:
    run = Run(place, both, "-n", "1", "--hosts", "a", "--restarts", "0")
    run.until_started(0, 1)
    os.kill(run.pids()[1], signal.SIGKILL)
    run.until(lambda: generations(run.folder)[-1] == [0] and ssh_hosts.sessions[0].poll() is not None)
    said = run.end()
    assert run.process.returncode == 0, said
    assert "stretto: host a: worker 1 was killed by SIGKILL; continuing without its worker" in said
    assert run.sample_counts() == [(SAMPLES, 0, 0)] * EPOCHS
