"""Shards of a parameter server on a host that ssh reaches, and workers on others: a real client, and a server."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import foreign_codec
import psutil
import pytest
from namespace_hosts import (
    HOSTS,
    HUB,
    assert_each_sample_counts_once,
    events,
    ip,
    joining,
    starts,
    three_hosts,
    write_script,
)
from run_place import Place, config_of, until
from ssh_hosts import STRETTO, SshHosts, ssh_hosts, ssh_servers

from stretto.errors import LaunchError
from stretto.launcher.shard_agent import serve

__all__ = ["ssh_hosts", "ssh_servers", "three_hosts"]

EPOCHS, LIMIT_S = 20, 120
ADDRESS = "10.79.0.1:7878"
CODEC = Path(foreign_codec.__file__).read_text()


class Run:
    """A run over two shards of a host, whose script ends soon after the file `enough` exists."""

    def __init__(
        self, place: Place, outside: pytest.TempPathFactory, *options: str, network: str = "", remote: str = STRETTO
    ) -> None:
        self.place, self.folder = place, place.folder / "run"
        self.enough = write_script(place.folder, outside, epochs=EPOCHS)
        place.recovers = True
        words = ["--failure-timeout", "5s", "--remote-stretto", remote, "--recipe", "async_sgd", "--out", "run"]
        self.process = place.stretto(
            "run", *words, *options, "train.py", "--lr", "0.01", network=network, stderr=subprocess.STDOUT
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition while the launcher runs."""
        until(lambda: self.process.poll() is not None or is_so(), LIMIT_S)
        assert self.process.poll() is None, self.process.communicate()[0].decode()

    def until_started(self, *workers: int) -> None:
        """Wait until these workers train."""
        self.until(lambda: set(workers) <= starts(self.folder).keys())

    def until_trained(self, *workers: int) -> None:
        """Wait until these workers have trained after this moment."""
        seen = len(events(self.folder))
        self.until(
            lambda: (
                set(workers)
                <= {event["worker"] for event in events(self.folder)[seen:] if event["event"] == "progress"}
            )
        )

    def happened(self, process: str, what: str) -> bool:
        """Return True if the log has this change of a process."""
        changes = (event for event in events(self.folder) if event["event"] == "membership")
        return any((event["process"], event["what"]) == (process, what) for event in changes)

    def shards(self) -> dict[int, psutil.Process]:
        """Return the running processes of the shards."""
        found = [(config_of(one), one) for one in self.place.left()]
        return {config["shard"]: one for config, one in found if config.get("type") == "shard"}

    def end(self) -> str:
        """Return what the launcher has printed until its end."""
        self.enough.touch()
        return self.process.communicate(timeout=LIMIT_S)[0].decode()


def network_of(process: psutil.Process) -> int:
    return os.stat(f"/proc/{process.pid}/ns/net").st_ino


def test_shards_of_another_host_fail_and_return_while_workers_join_and_leave(
    place: Place, ssh_servers: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["-n", "1", "--hosts", "a", "--servers", "2@s", "--listen", ADDRESS]
    run = Run(place, tmp_path_factory, *options, network=HOSTS[0])
    run.until_started(0, 1)
    shards = run.shards()
    assert {network_of(shard) for shard in shards.values()} == {os.stat(f"/run/netns/{HOSTS[2]}").st_ino}
    key = (run.folder / "join.key").read_bytes()
    guest = joining(HOSTS[1], place.folder, key, ADDRESS, "-n", "1")
    run.until_started(2)
    run.until_trained(0, 1, 2)
    shards[1].kill()
    run.until(lambda: run.happened("server 1", "joined"))
    run.until_trained(0, 1, 2)
    guest.terminate()
    run.until(lambda: run.happened("worker 2", "left") or run.happened("worker 2", "failed"))
    guest.communicate(timeout=LIMIT_S)
    run.until_trained(0, 1)
    said = run.end()
    assert run.process.returncode == 0, said
    assert_each_sample_counts_once(run.folder, EPOCHS)
    assert "shards 0, 1 of the parameter server on s, at 10.79.0.3:" in said
    assert "server 1 failed (killed by SIGKILL); restarting it" in said
    assert not run.happened("server 0", "failed")
    assert json.loads((run.folder / "run.json").read_text())["servers"] == "2@s"
    assert list(ssh_servers.folder.glob("host1/runs/*")) == []


def test_secret_of_a_run_is_in_no_command_and_no_environment_of_the_shards(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = place.folder / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o600)
    options = ["-n", "2", "--servers", "1@a,1@b", "--listen", "127.0.0.1", "--secret-file", str(secret)]
    run = Run(place, tmp_path_factory, *options)
    run.until_started(0, 1)
    shards = run.shards()
    assert sorted(shards) == [0, 1]
    shown = ssh_hosts.commands + [" ".join(one.cmdline()) for one in place.left()]
    shown += [json.dumps(config_of(one)) for one in shards.values()]
    shown += [file.read_text() for file in ssh_hosts.folder.rglob("runs/**/*.json*")]
    said = run.end()
    assert run.process.returncode == 0, said
    assert not any("5e" * 32 in text for text in [*shown, said])
    assert_each_sample_counts_once(run.folder, EPOCHS)


def test_shards_of_other_hosts_have_codecs_of_the_script_and_injected_faults(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (place.folder / "own_codecs.py").write_text(CODEC)
    options = ["-n", "2", "--servers", "1@a", "--listen", "127.0.0.1", "--faults", "kill server 0 at 3s"]
    run = Run(place, tmp_path_factory, *options, "--recipe", "async_sgd(how=own_codecs.drifting())")
    run.until_started(0, 1)
    run.until(lambda: run.happened("server 0", "joined"))
    run.until_trained(0, 1)
    said = run.end()
    assert run.process.returncode == 0, said
    assert_each_sample_counts_once(run.folder, EPOCHS)
    assert [event["verb"] for event in events(run.folder) if event["event"] == "fault_injected"] == ["kill"]


def test_error_of_a_shard_on_another_host_ends_the_run_and_is_in_its_log(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    failing = "import sys\nif sys.argv[0].endswith('shard_main.py'): raise ValueError('no codec here')\n"
    (place.folder / "own_codecs.py").write_text(CODEC + failing)
    options = ["-n", "2", "--servers", "1@a", "--listen", "127.0.0.1"]
    run = Run(place, tmp_path_factory, *options, "--recipe", "async_sgd(how=own_codecs.drifting())")
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 1, said
    assert "server 0 failed: " in said and "no codec here" in said
    errors = [event for event in events(run.folder) if event["event"] == "error"]
    assert errors[0]["process"] == "server 0", errors


@pytest.mark.parametrize(
    ("host", "remote", "cause", "to_type"),
    [
        ("nowhere", STRETTO, "host nowhere cannot be reached", "ssh nowhere true"),
        ("stranger", STRETTO, "the key of host stranger is not known, or has changed", "ssh stranger true"),
        ("b", "~/no/stretto", "host b has no command ~/no/stretto", "--remote-stretto"),
        ("b", "old", "host b: this machine has another version of Stretto than the run", "pip"),
    ],
)
def test_host_that_starts_no_shard_ends_the_run_with_one_error(
    place: Place,
    ssh_hosts: SshHosts,
    tmp_path_factory: pytest.TempPathFactory,
    host: str,
    remote: str,
    cause: str,
    to_type: str,
) -> None:
    if remote == "old":
        old = tmp_path_factory.mktemp("old") / "stretto.py"
        old.write_text("import stretto\nstretto.__version__ = '0.0.9'\nfrom stretto.cli.main import main\nmain()\n")
        remote = f"{STRETTO.partition(' ')[0]} -P {old}"
    run = Run(place, tmp_path_factory, "-n", "2", "--servers", f"2@{host}", "--listen", "127.0.0.1", remote=remote)
    said = run.end()
    assert run.process.returncode == 1, said
    assert f"stretto: {cause}" in said and f"  try: {to_type}" in said
    assert (said.count("  try:"), said.count("Traceback")) == (1, 0), said
    assert not starts(run.folder)


def test_host_of_shards_that_vanishes_ends_the_run_with_one_error_and_it_can_be_resumed(
    place: Place, ssh_servers: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["-n", "2", "--listen", ADDRESS, "--failure-timeout", "3s", "--checkpoint-every", "500ms"]
    run = Run(place, tmp_path_factory, *options, "--servers", "2@s", network=HOSTS[0])
    run.until(lambda: len(list(run.folder.glob("checkpoints/round-*/manifest*"))) > 1)
    ip("-n", HUB, "link", "set", "port2", "nomaster")
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 1, said
    assert "shards 0, 1 of the parameter server are lost: the connection to host s has ended" in said
    assert (said.count("  try:"), said.count("Traceback")) == (1, 0), said
    resumed = Run(
        place, tmp_path_factory, *options, "--servers", "2@a", "--resume", "run", "--out", "resumed", network=HOSTS[0]
    )
    said = resumed.end()
    assert resumed.process.returncode == 0, said
    assert "continues from the checkpoint of round" in said
    ended = [event for event in events(place.folder / "resumed") if event["event"] == "epoch"]
    assert {(one["once"], one["twice"], one["never"]) for one in (event["sample_counts"] for event in ended)} == {
        (160, 0, 0)
    }


def test_shard_that_fails_too_often_ends_the_run_with_one_error(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["-n", "2", "--servers", "1@a", "--listen", "127.0.0.1", "--restarts", "0"]
    run = Run(place, tmp_path_factory, *options, remote=f"echo Welcome; {STRETTO}")
    run.until_started(0, 1)
    run.shards()[0].kill()
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 1, said
    assert "server 0 was killed by SIGKILL" in said and "Traceback" not in said
    assert "stretto: a: Welcome" in said


def test_workers_that_wait_for_each_other_exchange_through_shards_of_other_hosts_until_their_agent_is_asked_to_end(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["-n", "0", "--hosts", "a:2", "--servers", "1@b", "--listen", "127.0.0.1", "--recipe", "local_sgd"]
    run = Run(place, tmp_path_factory, *options)
    run.until_trained(0, 1)
    agents = [one for command, one in zip(ssh_hosts.commands, ssh_hosts.sessions, strict=True) if "serve" in command]
    assert len(agents) == 1
    agents[0].terminate()
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 1, said
    assert "stretto: shard 0 of the parameter server is lost: host b: stopped by SIGTERM" in said
    assert "Traceback" not in said


def test_launcher_that_is_stopped_while_it_waits_for_shards_leaves_no_process(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["-n", "2", "--servers", "1@a", "--listen", "127.0.0.1"]
    run = Run(place, tmp_path_factory, *options, remote=f"cat > read; {STRETTO}")
    run.until(lambda: bool(list(ssh_hosts.folder.glob("host1/read"))))
    run.process.send_signal(signal.SIGINT)
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == 128 + signal.SIGINT, said
    assert "stopped by SIGINT" in said and "Traceback" not in said
    place.await_ends()


def test_agent_of_shards_without_a_launcher_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="no launcher asks for shards") as caught:
        serve(io.BytesIO(b"{}\n"), 1)
    assert "try: stretto run --servers 2@HOST" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_launcher_ends_the_shards_of_other_hosts(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    run = Run(place, tmp_path_factory, "-n", "2", "--servers", "2@a", "--listen", "127.0.0.1")
    run.until_started(0, 1)
    run.process.send_signal(number)
    said = run.process.communicate(timeout=LIMIT_S)[0].decode()
    assert run.process.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    place.await_ends()
    assert list(Path(ssh_hosts.folder).glob("host1/runs/*")) == []
