"""The laboratory: its links have the given rate, it removes all it created, its byte counts match Stretto's."""

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

LIMIT_S = 120.0


def reason_for_skipping() -> str:
    """Return why no laboratory can be built here; an empty string if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root and iproute2"
    try:
        with Laboratory(hosts=1):
            return ""
    except LabError as error:
        return str(error)


@pytest.fixture(scope="module", autouse=True)
def skip_unless_possible(only_laboratory):
    if reason := reason_for_skipping():
        pytest.skip(reason)


def test_namespaces_are_removed():
    with Laboratory(hosts=2):
        assert sorted(namespaces()) == ["stretto-lab-0", "stretto-lab-1", "stretto-lab-hub"]
    assert namespaces() == []


def test_error_inside_removes_namespaces_and_processes(tmp_path):
    sleepers = []

    def fail_inside() -> None:
        with (tmp_path / "log").open("wb") as log, Laboratory(hosts=1) as lab:
            sleepers.append(lab.start(0, ["sleep", "1000"], {}, log))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert sleepers[0].wait(LIMIT_S) == -signal.SIGKILL
    assert namespaces() == []


OPEN = """
import signal
from benchmarks.laboratory import Laboratory
with Laboratory(hosts=2):
    print("open", flush=True)
    signal.pause()
"""


def open_in_another_process() -> subprocess.Popen[bytes]:
    """Open a laboratory in another process, which keeps it open."""
    other = subprocess.Popen([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert other.stdout is not None
    assert other.stdout.readline() == b"open\n"
    return other


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_namespaces(number):
    other = open_in_another_process()
    other.send_signal(number)
    other.communicate(timeout=LIMIT_S)
    assert other.returncode != 0
    assert namespaces() == []


def test_namespaces_of_a_killed_laboratory_are_removed_by_the_next():
    other = open_in_another_process()
    other.kill()
    other.communicate(timeout=LIMIT_S)
    assert "stretto-lab-1" in namespaces()
    with Laboratory(hosts=1):
        assert sorted(namespaces()) == ["stretto-lab-0", "stretto-lab-hub"]
    assert namespaces() == []


def test_second_laboratory_is_refused_and_leaves_the_first_intact():
    other = open_in_another_process()
    try:
        with pytest.raises(LabError, match="another laboratory"), Laboratory(hosts=1):
            pass
        assert "stretto-lab-1" in namespaces()
    finally:
        other.terminate()
        other.communicate(timeout=LIMIT_S)


def test_laboratory_without_root_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"), Laboratory():
        pass


def test_laboratory_without_iproute2_is_refused(monkeypatch):
    monkeypatch.setattr(laboratory.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(LabError, match="no tc"), Laboratory():
        pass


@pytest.mark.parametrize(("hosts", "mbit"), [(0, 1.0), (300, 1.0), (4, 0.0)])
def test_invalid_sizes_and_rates_are_refused(hosts, mbit):
    with pytest.raises(LabError):
        Laboratory(hosts, mbit)


@pytest.mark.parametrize("mbit", [10.0, 100.0])
def test_a_link_carries_what_it_should_in_each_direction(mbit):
    with Laboratory(hosts=2, mbit=mbit) as lab:
        for sender, receiver in ((0, 1), (1, 0)):
            rates = (lab.measure_mbit(sender, receiver, 0.5) for _ in range(10))  # a busy machine may be late
            assert any(0.8 * mbit < rate < 1.1 * mbit for rate in rates)


def test_link_counts_sent_and_received_bytes():
    with Laboratory(hosts=2, mbit=100.0) as lab:
        before = [lab.traffic(host) for host in (0, 1)]
        lab.measure_mbit(0, 1, 0.1)
        sender, receiver = (lab.traffic(host).since(one) for host, one in zip((0, 1), before, strict=True))
    payload = 100e6 / 8 * 0.1
    assert payload < sender.sent < 1.1 * payload
    assert payload < receiver.received < 1.1 * payload
    assert receiver.sent < 0.1 * payload


def test_reported_bytes_match_the_bytes_on_the_links():
    if not (Path(os.environ.get("STRETTO_DATA", "nowhere")) / "mnist/train-images-idx3-ubyte.gz").is_file():
        pytest.skip("STRETTO_DATA has no mnist")
    terms = races.Terms(hosts=2, mbit=1000.0, target=0.0)
    with Laboratory(terms.hosts, terms.mbit) as lab:
        run = races.race(lab, "local_sgd 16", 0, terms)
    assert run.steps == 16
    assert run.seconds is not None
    assert 1.0 < run.count_ratio < 1.12
