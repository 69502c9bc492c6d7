"""Sides take turns, and no worker process outlives its group or its parent."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.pace import ROOT, WorkerGroup, take_turns, worker_groups

LIMIT_S = 60.0


def ends(process: int) -> bool:
    """Return True if a process ends within the limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def group(code: str) -> WorkerGroup:
    return WorkerGroup([sys.executable, "-c", code], 1)


ECHO = """
from benchmarks.pace import Pace
pace = Pace(3)
pace.begin()
while True:
    pace.step()
"""


def test_sides_get_the_same_number_of_turns_and_their_workers_end():
    first, second = group(ECHO), group(ECHO)
    processes = [worker.pid for one in (first, second) for worker in one._workers]
    try:
        taken = take_turns({"first": first, "second": second}, 4)
    finally:
        first.close()
        second.close()
    assert {side: len(values) for side, values in taken.items()} == {"first": 4, "second": 4}
    assert all(one.wall > 0 for values in taken.values() for one in values)
    assert all(ends(process) for process in processes)


def test_failure_of_a_worker_is_reported_with_its_log():
    broken = group("raise ValueError('no such thing')")
    try:
        with pytest.raises(SystemExit, match="no such thing"):
            broken.segment()
    finally:
        broken.close()


def test_worker_ends_when_its_input_is_closed():
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, cwd=ROOT)
    worker.communicate(b"go\n", timeout=LIMIT_S)
    assert worker.returncode == 0


def test_both_sides_of_a_contest_train():
    with worker_groups("benchmarks.averaging", ("stretto", "by hand"), "0.8 M", 16, 2) as started:
        taken = take_turns(started, 1)
    assert all(values[0].wall > 0 for values in taken.values())
