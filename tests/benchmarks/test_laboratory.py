"""A laboratory has the links it promises, leaves nothing behind, and counts what we count."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lab as races
from benchmarks import laboratory
from benchmarks.laboratory import LabError, Laboratory, namespaces
from benchmarks.pace import ROOT

PATIENCE_S = 30.0


def missing() -> str:
    """Why no laboratory can be built here; empty when it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root and iproute2"
    try:
        with Laboratory(hosts=1):
            return ""
    except LabError as error:
        return str(error)


@pytest.fixture(scope="module", autouse=True)
def able():
    if why := missing():
        pytest.skip(why)


def test_what_was_built_is_removed():
    with Laboratory(hosts=2):
        assert sorted(namespaces()) == ["stretto-lab-0", "stretto-lab-1", "stretto-lab-hub"]
    assert namespaces() == []


def test_an_error_inside_removes_it_and_its_processes(tmp_path):
    sleepers = []

    def fail_inside() -> None:
        with (tmp_path / "log").open("wb") as log, Laboratory(hosts=1) as lab:
            sleepers.append(lab.start(0, ["sleep", "1000"], {}, log))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert sleepers[0].wait(PATIENCE_S) == -signal.SIGKILL
    assert namespaces() == []


OPEN = """
import signal
from benchmarks.laboratory import Laboratory
with Laboratory(hosts=2):
    print("open", flush=True)
    signal.pause()
"""


def opened() -> subprocess.Popen[bytes]:
    """A laboratory in another process, which stays open."""
    other = subprocess.Popen([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert other.stdout is not None
    assert other.stdout.readline() == b"open\n"
    return other


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_it(number):
    other = opened()
    other.send_signal(number)
    other.communicate(timeout=PATIENCE_S)
    assert other.returncode != 0
    assert namespaces() == []


def test_what_a_killed_one_left_the_next_removes():
    other = opened()
    other.kill()
    other.communicate(timeout=PATIENCE_S)
    assert "stretto-lab-1" in namespaces()
    with Laboratory(hosts=1):
        assert sorted(namespaces()) == ["stretto-lab-0", "stretto-lab-hub"]
    assert namespaces() == []


def test_a_second_one_is_refused_and_harms_nothing():
    other = opened()
    try:
        with pytest.raises(LabError, match="another laboratory"), Laboratory(hosts=1):
            pass
        assert "stretto-lab-1" in namespaces()
    finally:
        other.terminate()
        other.communicate(timeout=PATIENCE_S)


def test_without_root_it_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"), Laboratory():
        pass


def test_without_iproute2_it_is_refused(monkeypatch):
    monkeypatch.setattr(laboratory.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(LabError, match="no tc"), Laboratory():
        pass


@pytest.mark.parametrize(("hosts", "mbit"), [(0, 1.0), (300, 1.0), (4, 0.0)])
def test_impossible_laboratories_are_refused(hosts, mbit):
    with pytest.raises(LabError):
        Laboratory(hosts, mbit)


@pytest.mark.parametrize("mbit", [10.0, 100.0])
def test_a_link_carries_what_it_should_in_each_direction(mbit):
    with Laboratory(hosts=2, mbit=mbit) as lab:
        for sender, receiver in ((0, 1), (1, 0)):
            assert 0.8 * mbit < lab.measure_mbit(sender, receiver, 0.5) < 1.1 * mbit


def test_the_link_counts_what_was_sent():
    with Laboratory(hosts=2, mbit=100.0) as lab:
        before = [lab.traffic(host) for host in (0, 1)]
        lab.measure_mbit(0, 1, 0.1)
        sender, receiver = (lab.traffic(host).since(one) for host, one in zip((0, 1), before, strict=True))
    payload = 100e6 / 8 * 0.1
    assert payload < sender.sent < 1.1 * payload
    assert payload < receiver.received < 1.1 * payload
    assert receiver.sent < 0.1 * payload


def test_what_we_say_we_sent_is_what_the_links_saw():
    if not (Path(os.environ.get("STRETTO_DATA", "nowhere")) / "mnist/train-images-idx3-ubyte.gz").is_file():
        pytest.skip("STRETTO_DATA has no mnist")
    terms = races.Terms(hosts=2, mbit=1000.0, target=0.0)
    with Laboratory(terms.hosts, terms.mbit) as lab:
        run = races.race(lab, "local_sgd 16", 0, terms)
    assert run.steps == 16
    assert run.seconds is not None
    assert 1.0 < run.count_ratio < 1.12
