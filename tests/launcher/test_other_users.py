"""A launcher and guests of another user, on hosts that share no network, no mount and no file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from namespace_hosts import (
    HOSTS,
    HUB,
    assert_each_sample_counts_once,
    events,
    hosts,
    ip,
    on,
    starts,
    until,
    write_script,
)
from other_users import USER, hidden_folder, joining_as_user
from run_place import Place

__all__ = ["hosts"]
ADDRESS, EPOCHS = "10.79.0.1:7878", 100


def times(run: Path, worker: int, what: str) -> int:
    """Return how often the log has this change of a worker."""
    changes = [event for event in events(run) if event["event"] == "membership" and event["what"] == what]
    return sum(event["process"] == f"worker {worker}" for event in changes)


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", pytest.param("async_sgd(shards=2)", marks=pytest.mark.long)])
def test_guests_of_another_user_who_see_nothing_of_the_launcher_train_fail_leave_and_vanish(
    place: Place, hosts: None, tmp_path_factory: pytest.TempPathFactory, recipe: str
) -> None:
    hidden = hidden_folder(place.folder)
    enough, run = write_script(place.folder, tmp_path_factory, epochs=EPOCHS), place.folder / "run"
    options = ["-n", "2", "--recipe", recipe, "--listen", ADDRESS, "--failure-timeout", "5s", "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists(), here)
    key = (run / "join.key").read_bytes()
    stays = joining_as_user(HOSTS[1], hidden, key, ADDRESS, "-n", "1")
    until(lambda: {0, 1, 2} <= starts(run).keys(), here, stays)
    guest = psutil.Process(starts(run)[2]["pid"])
    assert set(guest.uids()) == {USER}
    assert not Path(f"/proc/{guest.pid}/root/{place.folder}").exists()
    for kind in ("mnt", "net"):
        assert os.readlink(f"/proc/{guest.pid}/ns/{kind}") != os.readlink(f"/proc/{here.pid}/ns/{kind}")
    leaves = joining_as_user(HOSTS[1], hidden, key, ADDRESS, "-n", "1")
    guest.kill()
    until(lambda: starts(run)[2]["pid"] != guest.pid and 3 in starts(run), here, stays, leaves)
    os.kill(starts(run)[3]["pid"], signal.SIGTERM)
    until(lambda: times(run, 3, "left") == 1, here, stays)
    said = leaves.communicate(timeout=90)[0].decode()
    assert (leaves.returncode, said.count("Traceback")) == (3, 0), said
    assert "all workers left before the end, as they were asked to" in said
    assert times(run, 2, "failed") == 1
    ip("-n", HUB, "link", "set", "port1", "nomaster")
    until(lambda: times(run, 2, "failed") == 2, here)
    enough.touch()
    said = here.communicate(timeout=90)[0]
    assert here.returncode == 0, said
    assert_each_sample_counts_once(run, EPOCHS)
    for worker in (2, 3):
        assert "-joined-train/code/nets.py" in (run / f"worker-{worker}.log").read_text()
    assert all(path.stat().st_uid == os.geteuid() for path in run.rglob("*"))
    stays.terminate()
    assert "Traceback" not in stays.communicate(timeout=90)[0].decode()
