"""Workers of hosts that reach the launcher and not each other exchange through its relay."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from namespace_hosts import (
    HOSTS,
    apart_hosts,
    assert_each_sample_counts_once,
    events,
    generations,
    joining,
    on,
    one_port_hosts,
    starts,
    until,
    write_script,
)
from run_place import Place, config_of

from stretto.cli.main import WORKERS_LOST
from stretto.errors import LaunchError
from stretto.launcher.config import check
from stretto.launcher.endpoints import servers_for
from stretto.launcher.join import route
from stretto.run_config import RunConfig

__all__ = ["apart_hosts", "one_port_hosts"]
ADDRESS = "10.79.0.1:7878"


def relay_of(place: Place) -> int:
    """Return the process of the relay."""
    return next(one.pid for one in place.left() if config_of(one).get("type") == "relay")


def started(run: Path, *numbers: int) -> bool:
    return set(numbers) <= starts(run).keys()


@pytest.mark.parametrize("recipe", ["allreduce", pytest.param("local_sgd(every=2)", marks=pytest.mark.long)])
def test_hosts_that_cannot_reach_each_other_train_each_sample_once(
    place: Place, apart_hosts: None, recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough, run = write_script(place.folder, tmp_path_factory), place.folder / "run"
    options = ["-n", "1", "--recipe", recipe, "--listen", ADDRESS, "--relay", "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists() and started(run, 0), here)
    key = (run / "join.key").read_bytes()
    there = joining(HOSTS[1], place.folder, key, ADDRESS, "-n", "2")
    until(lambda: started(run, 0, 1, 2), here, there)
    elsewhere = joining(HOSTS[2], place.folder, key, ADDRESS)
    until(lambda: [0, 1, 2, 3] in generations(run) and started(run, 3), here, there, elsewhere)
    killed = starts(run)[3]["pid"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: starts(run)[3]["pid"] != killed and generations(run)[-1] == [0, 1, 2, 3], here, there, elsewhere)
    formed = len(generations(run))
    os.kill(relay_of(place), signal.SIGKILL)
    until(lambda: len(generations(run)) > formed and generations(run)[-1] == [0, 1, 2, 3], here, there, elsewhere)
    enough.touch()
    said = [one.communicate(timeout=90)[0] for one in (here, there, elsewhere)]
    assert [one.returncode for one in (here, there, elsewhere)] == [0, 0, 0], said
    assert "workers of different hosts exchange through the relay at 10.79.0.1:" in said[0]
    assert "passes this port" not in said[0]
    assert_each_sample_counts_once(run)
    failed = {event["process"] for event in events(run) if event["event"] == "membership" and event["what"] == "failed"}
    assert failed == {"worker 3", "relay"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"host": None}, ("got: --relay", "--listen 10.0.0.1:7878 --relay")),
        ({"plain": True}, ("got: --relay --listen 10.0.0.1 --no-encryption",)),
        ({"recipe": "async_sgd"}, ("there is nothing to relay", "got: --relay --listen 10.0.0.1 --recipe async_sgd")),
    ],
)
def test_a_relay_that_no_worker_would_use_is_refused(place: Place, changed: dict[str, Any], words: list[str]) -> None:
    script = place.folder / "train.py"
    script.touch()
    config = RunConfig(script, workers=2, host="10.0.0.1", relay=True, recipe="allreduce")
    check(config)
    with pytest.raises(LaunchError) as refused:
        check(msgspec.structs.replace(config, **changed))
    assert all(word in str(refused.value) for word in words)


def test_a_run_says_which_way_workers_of_different_hosts_use() -> None:
    config = RunConfig(Path("train.py"), workers=2, host="127.0.0.1")
    said = []
    for shards, changed in (
        (0, {}),
        (0, {"relay": True}),
        (1, {}),
        (0, {"ports": "20000-20009"}),
        (0, {"plain": True}),
    ):
        options = msgspec.structs.replace(config, **changed)
        with servers_for(shards, plain=options.plain, coordinated=True, host="127.0.0.1") as servers:
            said.append("".join(route(options, servers)))
            assert options.plain or str(servers.relay_at) in said[-1]
    assert "workers of different hosts connect on free ports (--ports limits them)" in said[0]
    assert "exchange through the relay at 127.0.0.1:" in said[1]
    assert "workers connect with the parameter server on free ports" in said[2]
    assert "connect on the ports 20000-20009, or where these are closed through 127.0.0.1:" in said[3]
    assert said[4] == "workers of different hosts connect on free ports"


@pytest.mark.parametrize("recipe", ["allreduce", pytest.param("async_sgd(shards=2)", marks=pytest.mark.long)])
def test_one_open_port_of_the_launchers_host_suffices(
    place: Place, one_port_hosts: None, recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough, run = write_script(place.folder, tmp_path_factory), place.folder / "run"
    options = ["-n", "1", "--wait-for", "2", "--recipe", recipe, "--listen", ADDRESS, "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists(), here)
    there = joining(HOSTS[1], place.folder, (run / "join.key").read_bytes(), ADDRESS)
    until(lambda: started(run, 0, 1), here, there)
    enough.touch()
    said = [one.communicate(timeout=90)[0] for one in (here, there)]
    assert [one.returncode for one in (here, there)] == [0, 0], said
    assert generations(run)[-1] == [0, 1]
    assert_each_sample_counts_once(run)
    output = said[1].decode() + (run / "worker-1.log").read_text() + (run / "worker-0.log").read_text()
    if recipe == "allreduce":
        assert "no port of 10.79.0.1 was reached from here: what is sent to its workers passes the relay" in output
        shown = "what workers of 10.79.0.2 send to 10.79.0.1 passes this port, since 10.79.0.2 reached no port of it"
    else:
        assert f"the parameter server is reached through {ADDRESS}" in output
        shown = "10.79.0.2 reaches the parameter server through this port alone"
    assert said[0].count(f"stretto: relay: {shown}\n") == 1


def test_a_worker_that_cannot_reach_another_one_says_what_to_type_and_the_others_continue(
    place: Place, apart_hosts: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay refuses the requests of one host."""
    broken = tmp_path_factory.mktemp("broken")
    (broken / "sitecustomize.py").write_text("import stretto.relay\nstretto.relay.GREETING = b'not a greeting'\n")
    enough, run = write_script(place.folder, tmp_path_factory), place.folder / "run"
    options = ["-n", "1", "--recipe", "allreduce", "--listen", ADDRESS, "--failure-timeout", "4s", "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists() and started(run, 0), here)
    key = (run / "join.key").read_bytes()
    there = joining(HOSTS[1], place.folder, key, ADDRESS)
    until(lambda: started(run, 0, 1), here, there)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")]))
    elsewhere = joining(HOSTS[2], place.folder, key, ADDRESS)
    refusal = elsewhere.communicate(timeout=90)[0].decode()
    until(lambda: generations(run)[-1] == [0, 1], here, there)
    enough.touch()
    said = [one.communicate(timeout=90)[0] for one in (here, there)]
    assert [one.returncode for one in (here, there)] == [0, 0], said
    assert elsewhere.returncode == WORKERS_LOST, refusal
    assert re.search(r"worker 2 at 10.79.0.3:\d+ and worker 1 at 10.79.0.2:\d+ did not connect 3 times", refusal)
    assert "stretto run --listen" in refusal and "restart" not in refusal
    assert f"or where these are closed through {ADDRESS}, which suffices" in said[0]
    assert_each_sample_counts_once(run)
