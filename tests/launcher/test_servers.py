"""The servers of a run: they start beside the workers, are found by them, and end with them."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from run_place import Place, config_of, staff, until

from stretto.cli.main import command
from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher.config import settled
from stretto.launcher.endpoints import servers_for
from stretto.launcher.process_specs import ProcessPlan
from stretto.process_config import RECIPE, VARIABLE, ShardConfig, WorkerConfig
from stretto.report.run_record import record
from stretto.run_config import RunConfig, decode_path
from stretto.security import RunKeys

WITHIN_S = 60.0
TELL = """
import msgspec
config = msgspec.json.encode(place, enc_hook=str).decode()
os.write(1, (config + "\\n" + repr(dict(os.environ))).encode())
time.sleep(600)
"""
WAIT = """
import os, pathlib, time
rank, shards = str(config.worker), len(config.servers) - 1
while not all(pathlib.Path(f"server-{shard}.pid").exists() for shard in range(shards)):
    time.sleep(0.01)
"""
"""Script of a worker that continues when all servers serve."""
FOREVER = WAIT + "pathlib.Path('ready-' + rank).touch()\ntime.sleep(600)\n"
KEY = re.compile(r"^[!-~]{40}$")
"""Form in which ZeroMQ writes a key."""


def server_config(folder: Path, shard: int) -> tuple[ShardConfig, dict[str, str]]:
    """Return the configuration of a server that runs `TELL`, and its environment."""
    config, environment = (folder / f"server-{shard}.log").read_text().splitlines()
    return msgspec.json.decode(config, type=ShardConfig, dec_hook=decode_path), ast.literal_eval(environment)


def worker_configs(workers: int) -> list[WorkerConfig]:
    """Return the configurations of the workers that ran `KEEP`."""
    texts = [Path(f"config-{rank}.json").read_bytes() for rank in range(workers)]
    return [msgspec.json.decode(text, type=WorkerConfig, dec_hook=decode_path) for text in texts]


KEEP = WAIT + "import msgspec\nopen(f'config-{rank}.json', 'wb').write(msgspec.json.encode(config, enc_hook=str))\n"


def test_servers_get_their_configuration_and_workers_their_addresses(place: Place) -> None:
    place.service(TELL)
    asked: dict[str, Any] = {"recipe": "async_sgd", "servers": 2, "timeout_s": 12.5, "on_nan": "skip"}
    folder = place.run(KEEP, workers=3, **asked)
    for shard in range(2):
        config, given = server_config(folder, shard)
        assert (config.shard, config.shards, config.max_worker) == (shard, 2, 2)
        assert (config.run, given["OMP_NUM_THREADS"]) == (str(folder.resolve()), "1")
        assert (config.options.on_nan, config.options.timeout_s) == ("skip", 12.5)
        assert (config.dispatcher_fd is None) == (shard == 1)
        assert not {VARIABLE, RECIPE} & set(given)
    workers = worker_configs(3)
    assert len({one.servers for one in workers}) == 1
    addresses = workers[0].servers
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", one) for one in addresses)
    for one in workers:
        assert (one.options.recipe, one.options.on_nan) == ("async_sgd(shards=2)", "skip")


def test_servers_inherit_the_sockets_that_workers_connect_to(place: Place) -> None:
    """Each socket is identified by its number."""
    place.service(
        """
        for name, fd in (("coordinator", place.dispatcher_fd), (f"shard {place.shard}", place.listen_fd)):
            if fd is not None:
                socket.socket(fileno=fd).accept()[0].sendall(name.encode())
        time.sleep(600)
        """
    )
    folder = place.run(
        """
        import os, socket
        found = [one.rpartition(":") for one in config.servers]
        print([socket.create_connection((host, int(port))).makefile().read() for host, _, port in found])
        """,
        recipe="async_sgd(shards=3)",
    )
    assert (folder / "worker-0.log").read_text() == "['coordinator', 'shard 0', 'shard 1', 'shard 2']\n"


def test_only_the_server_holds_its_socket(place: Place) -> None:
    """If servers are not restarted, a failed server's port refuses connections: no other process has its socket."""
    place.service()
    process = place.stretto("run", "--recipe", "async_sgd", place.script(FOREVER))
    until(lambda: Path("ready-0").exists())
    found = [config_of(one).get("servers") for one in place.left()]
    ports = [int(one.rpartition(":")[2]) for one in next(filter(None, found))]
    assert [refuses(port) for port in ports] == [False, False]
    until(lambda: not ports_of(process.pid) & set(ports))  # it has passed the sockets on
    process.send_signal(signal.SIGSTOP)  # so that it cannot end the others
    os.kill(place.server(), signal.SIGKILL)

    def all_refuse() -> bool:
        try:
            return [refuses(port) for port in ports] == [True, True]
        except ConnectionResetError:  # of the moment in which a socket is closed
            return False

    until(all_refuse)
    until(lambda: len(place.left()) == 3)  # the launcher, its reaper, the worker
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 1


def ports_of(pid: int) -> set[int]:
    """Return the ports at which a process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_workers_are_started_before_servers(tmp_path: Path) -> None:
    order = RunConfig(Path("train.py"), workers=3)
    with socket.create_server(("127.0.0.1", 0)) as listener, servers_for(2, plain=True) as servers:
        found = [(part.number, str(part)) for part in ProcessPlan(order, tmp_path, listener, servers).all()]
    assert found[:3] == [(n, f"worker {n} of 3") for n in range(3)]
    assert found[3:] == [(-1, "server 0 of 2"), (-2, "server 1 of 2")]


@pytest.mark.parametrize(("recipe", "shards"), [("async_sgd", 1), ("async_sgd(shards=2)", 2), ("allreduce", 0)])
def test_recipe_with_a_server_starts_its_servers(place: Place, recipe: str, shards: int) -> None:
    place.service()
    text = "print(len(config.servers))" if not shards else KEEP
    folder = place.run(text, recipe=recipe)
    assert len(list(folder.glob("server-*.log"))) == shards
    assert json.loads((folder / "run.json").read_text())["servers"] == (shards or None)
    assert shards or (folder / "worker-0.log").read_text() == "0\n"


def test_run_without_servers_has_no_server_settings(place: Place) -> None:
    folder = place.run("print(config.servers, config.coordinator, config.keys)")
    assert (folder / "worker-0.log").read_text() == "() None None\n"
    asked = json.loads((folder / "run.json").read_text())
    assert (asked["servers"], asked["stragglers"]) == (None, None)


def test_servers_option_moves_a_recipe_to_a_server() -> None:
    def over(recipe: str | None, servers: int | None, **more: Any) -> tuple[str | None, int | None]:
        order = settled(RunConfig(Path("train.py"), recipe=recipe, servers=servers, **more))
        assert settled(order) == order
        return order.recipe, order.servers

    assert over("allreduce", 2) == ("Recipe(whom=server(shards=2))", 2)
    assert over("async_sgd(weight=0.5, shards=4)", 2) == ("async_sgd(weight=0.5, shards=2)", 2)
    assert over("async_sgd(shards=4)", None) == ("async_sgd(shards=4)", 4)
    assert over("allreduce", None) == ("allreduce", None)
    assert over(None, None) == (None, None)
    assert over("async_sgd", None, single_process=True) == ("async_sgd", None)


# Ends of servers


def test_servers_end_with_the_run_without_output(place: Place) -> None:
    place.service("print('serving')\ntime.sleep(600)")
    began = time.monotonic()
    process = place.stretto("run", "-n", "2", "--recipe", "async_sgd(shards=2)", "--out", "here", place.script(WAIT))
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert time.monotonic() - began < WITHIN_S
    place.await_ends()
    assert [Path(f"here/server-{shard}.log").read_text() for shard in range(2)] == ["serving\n"] * 2
    assert not Path("here/events.jsonl").exists()
    assert err.splitlines()[1:] == []


def test_server_with_other_threads_ends_immediately_on_sigterm(place: Place) -> None:
    """A server ended by SIGTERM exits with 0, even if it has threads that ignore the request."""
    place.service("import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\ntime.sleep(600)")
    given = os.environ | ShardConfig(run=".", shard=0, shards=1, listen_fd=0).environment()
    with subprocess.Popen([sys.executable, "-P", "-m", "stretto.launcher.shard_main"], env=given) as process:
        os.kill(place.server(), signal.SIGTERM)
        assert process.wait(timeout=WITHIN_S) == 0
    assert not Path("events.jsonl").exists()


@pytest.mark.parametrize("shard", [0, 1])
def test_killed_server_ends_the_run_with_one_clear_error(place: Place, shard: int) -> None:
    place.service("print('alive so far')\ntime.sleep(600)")
    line = ("-n", "2", "--recipe", "async_sgd", "--servers", "2", "--restarts", "0")
    process = place.stretto("run", *line, place.script(FOREVER))
    until(lambda: Path("ready-0").exists() and Path("ready-1").exists())
    until(lambda: len(place.left()) == staff(place) + 4)  # two workers, two servers
    began = time.monotonic()
    os.kill(place.server(shard), signal.SIGKILL)
    out, err = process.communicate(timeout=90)
    assert time.monotonic() - began < WITHIN_S
    assert (process.returncode, out) == (1, b"")
    _, _, said = err.decode().partition("\n")
    assert said.startswith(f"stretto: server {shard} was killed by SIGKILL\n")
    assert said.count("stretto: ") == said.count("SIGKILL") == 1
    assert "alive so far" in said
    assert said.endswith(f"/server-{shard}.log\n")
    place.await_ends()


def test_killed_server_is_the_cause_of_the_workers_errors(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of the workers arrive first, on a busy machine long before."""
    monkeypatch.setattr("stretto.launcher.supervisor.CAUSE_S", WITHIN_S)
    place.service(
        "until = time.monotonic() + 0.5\nwhile time.monotonic() < until: time.sleep(0.01)\nos.kill(os.getpid(), 9)"
    )
    text = WAIT + "from stretto.errors import TransportError\nraise TransportError('the server is gone')"
    with pytest.raises(LaunchError, match="^server 0 was killed by SIGKILL"):
        place.run(text, workers=2, recipe="async_sgd", restarts=0)


def test_all_processes_end_when_the_launcher_is_killed(place: Place) -> None:
    place.service("import subprocess\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)")
    process = place.stretto("run", "--recipe", "async_sgd", place.script(FOREVER))
    until(lambda: Path("ready-0").exists() and len(place.left()) == 5)  # launcher, reaper, worker, server, its child
    process.kill()
    place.await_ends()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit(3)", "server 0 failed: SystemExit"),
        ("pass", "server 0 ended with exit code 0 and named no error"),
        ("os._exit(7)", "server 0 ended with exit code 7 and named no error"),
        (
            "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()",
            "server 0 ended with exit code 0",
        ),
        ("os.kill(os.getpid(), 15)\ntime.sleep(600)", "server 0 ended with exit code 0 and named no error"),
        ("raise ValueError('a shape that does not fit')", "server 0 failed: ValueError: a shape that does not fit"),
    ],
)
def test_every_early_exit_of_a_server_ends_the_run(place: Place, body: str, says: str) -> None:
    place.service(body)
    with pytest.raises(LaunchError) as raised:
        place.run("import time\ntime.sleep(600)", workers=2, recipe="async_sgd")
    assert str(raised.value).startswith(says)
    assert "server-0.log" in str(raised.value)


def test_error_of_a_server_is_an_event_and_in_the_record(place: Place) -> None:
    place.service("if place.shard == 1: raise ValueError('boom')\ntime.sleep(600)")
    with pytest.raises(LaunchError, match="^server 1 failed: ValueError: boom\nTraceback") as raised:
        place.run("import time\ntime.sleep(600)", recipe="async_sgd(shards=2)", out=Path("here"))
    assert not any(name in str(raised.value) for name in ("runpy", "serve.py"))
    (event,) = read_events(Path("here/events.jsonl"))
    assert event.pop("traceback").startswith("Traceback")
    assert event.pop("at") > 0
    said = {"event": "error", "t": 0.0, "kind": "ValueError", "text": "boom", "consequence": False}
    assert event == {**said, "process": "server 1"}
    assert record(Path("here"))["failed"] == "server 1 failed: ValueError: boom"
    assert "ValueError: boom" in Path("here/server-1.log").read_text()


def test_output_of_servers_is_shown_with_output_all(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.service("print('hello')\ntime.sleep(600)")
    place.run(WAIT + "print('hi')", recipe="async_sgd", output="all")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hi", "[server 0] hello"]


def test_failure_to_start_a_server_is_reported_and_workers_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = subprocess.Popen

    def second_fails(line: list[str], **options: Any) -> Any:
        if '"shard":1,' in options.get("env", {}).get(VARIABLE, ""):
            raise BlockingIOError(11, os.strerror(11))
        return begin(line, **options)

    monkeypatch.setattr("stretto.launcher.engines.local.subprocess.Popen", second_fails)
    place.service()
    with pytest.raises(LaunchError, match="server 1 of 2 cannot be started: Resource temporarily"):
        place.run("import time; time.sleep(600)", recipe="async_sgd(shards=2)")
    place.await_ends()


def test_workers_do_not_wait_for_servers_to_start(place: Place) -> None:
    """A server that takes long to start delays only workers that need it."""
    place.service()
    (place.folder / "service/sitecustomize.py").write_text(
        "import os, time\nif '\"type\":\"shard\"' in os.environ.get('STRETTO_CONFIG', ''): time.sleep(600)"
    )
    place.run("import pathlib; pathlib.Path('ran').touch()", recipe="async_sgd")
    assert Path("ran").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_servers_too(place: Place, number: signal.Signals) -> None:
    place.service()
    process = place.stretto("run", "--recipe", "async_sgd", place.script(FOREVER))
    until(lambda: Path("ready-0").exists())
    process.send_signal(number)
    _, err = process.communicate(timeout=90)
    said = [line.removeprefix("stretto: ").split(":")[0] for line in err.decode().splitlines()]
    assert said[1:] == [f"stopped by {number.name}", "run folder", "page", "continue"]
    place.await_ends()


def test_paused_server_is_ended(place: Place) -> None:
    place.service("os.kill(os.getpid(), 19)\ntime.sleep(600)")
    place.run(WAIT, recipe="async_sgd")
    place.await_ends()


def test_ended_server_does_not_count_as_an_ended_worker(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"workers": 1}')
    (tmp_path / "events.jsonl").write_text('{"event": "end", "t": 1.0, "process": "server 0"}\n')
    assert record(tmp_path)["failed"] == "the run did not finish"


# Keys


def test_each_worker_has_its_own_keys_and_servers_the_secret_of_the_run(place: Place) -> None:
    place.service(TELL)
    folder = place.run(KEEP, workers=2, recipe="async_sgd", servers=2)
    (secret,) = {server_config(folder, shard)[0].keys for shard in range(2)}
    assert secret is not None
    run = RunKeys(*secret)
    for worker, config in enumerate(worker_configs(2)):
        assert config.keys == run.client(b"worker %d" % worker).texts
        assert zmq.curve_public(config.keys[2].encode()).decode() == config.keys[1]
        assert all(KEY.match(one) for one in config.keys)


def test_no_environment_holds_a_key(place: Place) -> None:
    """Neither that of a process, nor that of a process which a script or a server starts."""
    tell = """
    import os, subprocess
    print(*config.keys)
    print("own", dict(os.environ), open("/proc/self/environ").read())
    print("child", subprocess.check_output(["sh", "-c", "env; ls -l /proc/self/fd; cat /proc/$PPID/environ"]))
    """
    place.service(TELL)
    folder = place.run(WAIT + dedent(tell), workers=2, recipe="async_sgd")
    (secret,) = server_config(folder, 0)[0].keys or ()
    for worker in range(2):
        keys, *shown = (folder / f"worker-{worker}.log").read_text().splitlines()
        assert len(keys.split()) == 3
        assert len(shown) == 2
        assert not [key for key in (*keys.split(), secret) if any(key in line for line in shown)]
    assert secret not in str(server_config(folder, 0)[1])


def test_keys_are_new_in_each_run_and_never_written(place: Place) -> None:
    place.service("open(f'{place.run}.keys', 'w').write(*place.keys)\ntime.sleep(600)")
    write = "open(f'{config.run}.keys-' + rank, 'w').write(' '.join(config.keys))\n"
    runs = [
        place.stretto("run", "--recipe", "async_sgd", "--out", n, place.script(WAIT + write + FOREVER, f"{n}.py"))
        for n in "ab"
    ]

    def keys_used() -> set[str]:
        return {key for path in place.folder.glob("*.keys*") for key in path.read_text().split()}

    # A file is there before its keys are; of each run there are its secret and the three keys of its worker.
    until(lambda: len(keys_used()) == 8 and any(place.folder.glob("ready-*")))
    keys = keys_used()
    lines, kept = "\n".join(" ".join(one.cmdline()) for one in place.left()), ""
    for process in runs:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WITHIN_S)
        kept += out.decode() + err.decode()
    written = [path for folder in "ab" for path in (place.folder / folder).rglob("*") if path.is_file()]
    assert len({path.name for path in written} & {"run.json", "server-0.log", "worker-0.log"}) == 3
    kept += "\n".join(path.read_text() for path in written)
    assert [key for key in keys if key in lines or key in kept] == []


def test_failure_shows_no_key(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.service("open('keys', 'w').write(*place.keys)\nraise ValueError('boom')")
    with pytest.raises(LaunchError) as raised:
        place.run("import time\ntime.sleep(600)", recipe="async_sgd", out=Path("here"))
    kept = str(raised.value) + "".join(path.read_text() for path in Path("here").iterdir()) + str(capfd.readouterr())
    assert len(secret := Path("keys").read_text()) == 64
    assert secret not in kept


def test_printed_servers_hide_the_secret() -> None:
    with servers_for(1, plain=False) as servers:
        assert servers.secret is not None
        assert servers.secret not in repr(servers)


def test_no_encryption_means_no_keys(place: Place) -> None:
    place.service(TELL)
    script = place.script(KEEP)
    process = place.stretto("run", "--recipe", "async_sgd", "--no-encryption", "--out", "here", script)
    assert process.communicate(timeout=90)[1] is not None
    assert process.returncode == 0
    assert server_config(Path("here"), 0)[0].keys is None
    assert worker_configs(1)[0].keys is None
    assert worker_configs(1)[0].servers


def test_zeromq_without_encryption_is_an_error_with_the_option_to_use(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    with pytest.raises(LaunchError, match="try: --no-encryption"):
        place.run("", recipe="async_sgd")
    assert not Path("runs").exists()


# Options


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["--servers", "2"], 1, ("--servers needs --recipe", "got: --servers 2", "try: --recipe async_sgd")),
        (["--servers", "0", "--recipe", "async_sgd"], 1, ("got: 0", "at least 1", "try: --servers 2")),
        (["--servers=-1", "--recipe", "async_sgd"], 1, ("got: -1", "at least 1")),
        (["--servers", "257", "--recipe", "async_sgd"], 1, ("257", "at most 256")),
        (["--servers", "two", "--recipe", "async_sgd"], 2, ("got: two", "a whole number")),
        (["--servers", "2@b", "--recipe", "async_sgd"], 1, ("--servers needs --listen", "try: --servers 2@b --listen")),
        (
            ["--servers", "2@", "--recipe", "async_sgd"],
            2,
            ("--servers cannot be read: 2@", "expected: a number of shards"),
        ),
        (["--servers", "b@2@c", "--recipe", "async_sgd"], 2, ("--servers cannot be read", "try: --servers")),
        (["--servers", "1.5", "--recipe", "async_sgd"], 2, ("got: 1.5", "a whole number")),
        (["--sevrers", "2"], 2, ("no option --sevrers", "nearest are --servers")),
        (["--shares", "1:2", "-n", "3"], 1, ("has a number for each worker", "3 numbers", "try: --shares 1:1:1")),
        (["--shares", "fast", "-n", "2"], 1, ("--shares cannot be fast", "try: --shares 1:1:0.2")),
        (["--shares", "1:0", "-n", "2"], 1, ("--shares cannot be 1:0", "a number above 0")),
        (
            ["--shares", "1:2", "-n", "2", "--recipe", "async_sgd"],
            1,
            ("--shares 1:2 does not fit async_sgd", "do not wait"),
        ),
        (["--max-batch", "1:2", "-n", "3"], 1, ("--max-batch cannot be 1:2", "got: 1:2", "more than 2 samples")),
        (["--max-batch", "2:16", "-n", "2"], 1, ("limits shares of several workers", "numbers below 2")),
        (["--max-batch", "0:16", "-n", "2", "--recipe", "async_sgd"], 1, ("--max-batch 0:16 does not fit async_sgd",)),
        (["--stragglers", "1:2.0"], 1, ("there is no worker 1 of 1", 'try: --stragglers "1:2.0,3:5.0"')),
        (["--stragglers", "fast", "-n", "2"], 1, ("--stragglers cannot be read: fast", "got: fast", "WORKER:FACTOR")),
        (["--on-nan", "explode"], 2, ("explode", "stop")),
        (["--no-encryption=yes"], 2, ("--no-encryption",)),
    ],
)
def test_invalid_command_is_one_clear_error(
    place: Place, line: list[str], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    script = place.script("open('ran', 'w')")
    assert command(["run", *line, str(script)]) == code
    err = capsys.readouterr().err
    assert err.count("stretto: ") == 1
    assert "Traceback" not in err
    assert [word for word in words if word not in err] == []
    assert not Path("ran").exists() and not Path("runs").exists()


def test_command_without_hosts_refuses_shards_on_another_host(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", "-n", "2", "--recipe", "async_sgd", "--servers", "2@b", str(place.script(""))]
    assert command(line) == 2
    assert "stretto compare starts nothing on other hosts" in capsys.readouterr().err


def test_options_reach_the_servers(place: Place) -> None:
    place.service(TELL)
    line = [
        "--recipe",
        "async_sgd",
        "--servers",
        "2",
        "--on-nan",
        "skip",
        "--stragglers",
        "1:2",
        "-n2",
        "--out",
        "here",
    ]
    process = place.stretto("run", *line, place.script(KEEP), "--lr", "0.1")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert server_config(Path("here"), 1)[0].options.on_nan == "skip"
    options = worker_configs(2)[1].options
    assert (options.recipe, options.on_nan) == ("async_sgd(shards=2)", "skip")
    asked = json.loads(Path("here/run.json").read_text())
    assert (asked["servers"], asked["stragglers"], asked["args"]) == (2, "1:2", ["--lr", "0.1"])
