"""A sweep runs its points as processes, continues an unfinished sweep, and ends its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from simulator import fake_simulate

from stretto.errors import LaunchError
from stretto.run_config import RunConfig
from stretto.simulator.sweep import worker_pool
from stretto.simulator.sweep.runner import SweepConfig, results, run

TRAIN = RunConfig(Path("train.py"))
COMMAND = (sys.executable, "-S", "-E", fake_simulate.__file__)
STOPPABLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as jobs under nohup ignore this
from pathlib import Path
from stretto.run_config import RunConfig
from stretto.simulator.sweep import worker_pool
from stretto.simulator.sweep.runner import SweepConfig, run
command, worker_pool.EXIT_TIMEOUT_S = tuple(sys.argv[1].split(":")), float(sys.argv[2])
try:
    run(SweepConfig(RunConfig(Path("train.py")), tuple(sys.argv[3:]), jobs=2, out=Path("swept")), print, command)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def swept(
    *sweep: str, command: tuple[str, ...] = COMMAND, order: RunConfig = TRAIN, **more: Any
) -> tuple[Path, list[str]]:
    said: list[str] = []
    return run(SweepConfig(order, sweep, out=Path("swept"), **more), said.append, command), said


def starts() -> list[str]:
    """Return the names of the points that were started, in order."""
    path = Path("starts")
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_sweep_measures_every_point_and_summarises() -> None:
    options = {"recipe": "local_sgd(every=1)", "network": "instant"}
    asked = ("workers=1,2,4,...,16", "every=1,16")
    folder, said = swept(*asked, options=options, target="test_accuracy>=0.9", json_to=Path("found.json"))
    kept = results.read(folder)
    assert len(kept["points"]) == len(starts()) == 10
    for one in kept["points"]:
        workers, every = (int(one["values"][name]) for name in ("workers", "every"))
        whole = fake_simulate.seconds(workers, every)
        shares = (part / 10 for part in range(1, 11) if fake_simulate.accuracy(part / 10, workers, every) >= 0.9)
        reached = next(shares, None)
        assert one["failed"] is None
        assert one["recipe"] == f"local_sgd(every={every})"
        assert one["workers"] == workers
        assert one["seconds"] == pytest.approx(whole)
        assert one["seconds_to_target"] == (None if reached is None else pytest.approx(reached * whole))
        assert one["samples_per_second"] == pytest.approx(fake_simulate.SAMPLES // workers * workers / whole)
        assert one["mean_staleness"] == workers - 1
    by_line = {one["line"]: one["workers"] for one in kept["stops_paying"]}
    assert by_line == {"every=1": 8, "every=16": None}
    assert (
        "every=1: beyond 8 workers more of them do not pay; there they are 1.84× as fast as one to the target." in said
    )
    assert said[-1] == f"page: {folder / 'report.html'}"
    assert sum(line.startswith("[") for line in said) == 10
    told = json.loads(Path("found.json").read_text())
    assert told == [{**one, "folder": str(folder / one["folder"])} for one in kept["points"]]
    assert all(Path(one["folder"], "whole").exists() for one in told)
    assert kept["asked"]["sweep"]["workers"] == ["1", "2", "4", "8", "16"]


def test_the_command_of_a_point_is_a_quiet_simulation_with_one_thread() -> None:
    order = RunConfig(Path("train.py"), ("--mode", "well"), failure_timeout_s=5.0)
    swept("--lr=0.1", "seed=3", order=order, options={"workers": "2", "step_time": "5ms"})
    run_json = json.loads(Path("swept/points/001-lr=0.1-seed=3/run.json").read_text())
    out = "swept/points/001-lr=0.1-seed=3"
    given = [
        "--workers",
        "2",
        "--step-time",
        "5ms",
        "--seed",
        "3",
        "--failure-timeout",
        "5s",
        "--quiet",
        "--out",
        out,
    ]
    assert run_json["args"] == [*given, "train.py", "--mode", "well", "--lr", "0.1"]
    assert Path("starts").read_text().split()[2] == "1"


def test_failed_point_is_reported_and_others_continue() -> None:
    said: list[str] = []
    order = SweepConfig(TRAIN, ("--mode=well,fail,torn",), out=Path("swept"), json_to=Path("f.json"))
    with pytest.raises(LaunchError, match="2 of 3 points failed; the same command with --out swept runs them again"):
        run(order, said.append, COMMAND)
    well, fail, torn = json.loads(Path("f.json").read_text())
    assert well["failed"] is None
    assert fail["failed"] == "the loss is not finite\n  got: nan"
    assert torn["failed"] == "the run did not finish"
    assert torn["seconds"] is None
    assert any("failed: the loss is not finite" in line for line in said)
    assert "the loss is not finite" in Path("swept/report.html").read_text()
    Path("starts").unlink()
    with pytest.raises(LaunchError, match="2 of 3 points failed"):
        run(order, said.append, COMMAND)
    assert sorted(name[:3] for name in starts()) == ["002", "003"]


@pytest.mark.parametrize(
    ("body", "told"),
    [("import sys; sys.exit(3)", "exit code 3 without output"), ("raise KeyError('x')", "KeyError: 'x'")],
)
def test_point_without_a_stretto_error_is_reported_by_its_last_output(body: str, told: str) -> None:
    with pytest.raises(LaunchError, match="1 of 1 point failed"):
        swept("workers=1", command=(sys.executable, "-c", body))
    assert told in results.read(Path("swept"))["points"][0]["failed"]


def test_unstartable_command_is_an_error_not_a_failed_point() -> None:
    with pytest.raises(LaunchError, match="cannot be started"):
        swept("workers=1", command=("./there-is-no-such-program",))


def test_complete_points_are_kept_and_incomplete_ones_run_again() -> None:
    asked = ("workers=1,2,4", "every=1,2")
    _, before = swept(*asked, options={"recipe": "local_sgd"})
    kept = Path("swept/sweep.json").read_text(), Path("swept/report.html").read_bytes()
    Path("starts").unlink()
    _, again = swept(*asked, options={"recipe": "local_sgd"})
    assert starts() == []
    assert "6 of 6 points were done before" in again
    half = Path("swept/points/003-workers=2-every=1")
    (half / "whole").unlink()
    (half / "rubbish").touch()
    unread = Path("swept/points/004-workers=2-every=2")
    (unread / "run.json").write_text("{")
    _, third = swept(*asked, options={"recipe": "local_sgd"})
    assert sorted(starts()) == [half.name, unread.name]
    assert not (half / "rubbish").exists()
    assert (Path("swept/sweep.json").read_text(), Path("swept/report.html").read_bytes()) == kept
    assert before[-3:] == again[-3:] == third[-3:]


def test_changed_target_is_applied_to_complete_points() -> None:
    swept("workers=1,2", target="test_accuracy>=0.9")
    first = results.read(Path("swept"))["points"][0]["seconds_to_target"]
    Path("starts").unlink()
    swept("workers=1,2", target="test_accuracy>=0.5")
    assert starts() == []
    assert results.read(Path("swept"))["points"][0]["seconds_to_target"] < first


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("sweep", {}),
        ("args", {"order": RunConfig(Path("train.py"), ("--mode", "well"))}),
        ("options", {"options": {"seed": "1"}}),
        ("also", {"order": RunConfig(Path("train.py"), failure_timeout_s=5.0, max_workers=8)}),
        ("script_hash", {}),
    ],
)
def test_folder_of_another_sweep_is_refused_with_the_difference(key: str, change: dict[str, object]) -> None:
    swept("workers=1,2")
    if key == "script_hash":
        Path("train.py").write_text("pass")
    with pytest.raises(LaunchError, match=f"swept holds another sweep: its {key} differs") as refused:
        swept("workers=1,2,4" if key == "sweep" else "workers=1,2", **change)
    assert "try: --out swept-2" in str(refused.value)
    Path("rubbish").mkdir()
    Path("rubbish/file").touch()
    with pytest.raises(LaunchError, match="is not empty"):
        run(SweepConfig(TRAIN, ("workers=1",), out=Path("rubbish")), print, COMMAND)


def test_target_without_a_metric_ends_the_sweep_immediately() -> None:
    with pytest.raises(LaunchError, match="`evaluate` does not return 'accuracy'"):
        swept("workers=1,2,4,...,64", "--mode=well,hang", target="accuracy>=0.9", jobs=2)
    assert len(starts()) <= 3
    assert not _alive()


def test_at_most_jobs_processes_run_concurrently() -> None:
    watch = """
import os, pathlib, time
mine, limit = pathlib.Path(f"on-{os.getpid()}"), time.monotonic() + 60
mine.touch()
while (n := len(list(pathlib.Path().glob("on-*")))) < 3 and not os.path.exists("most") and time.monotonic() < limit:
    time.sleep(0.01)
with open("most", "a") as file:
    file.write(f"{n}\\n")
mine.unlink()
"""
    with pytest.raises(LaunchError, match="6 of 6 points failed"):
        swept("seed=1,2,...,6", jobs=3, command=(sys.executable, "-c", watch))
    assert max(map(int, Path("most").read_text().split())) == 3


# Stopping


def _alive() -> list[psutil.Process]:
    """Return the processes of points that still run."""
    ids = [int(line.split()[1]) for line in Path("starts").read_text().splitlines()]
    return [psutil.Process(one) for one in ids if psutil.pid_exists(one)]


def _until(done: Iterator[bool]) -> None:
    limit = time.monotonic() + 90
    while not next(done):
        assert time.monotonic() < limit
        time.sleep(0.02)


def _stopped(
    number: signal.Signals, *sweep: str, failure_timeout_s: float = worker_pool.EXIT_TIMEOUT_S
) -> tuple[int, str, float]:
    """Start a sweep, signal it when two points hang, and return exit code, output and duration."""
    command = [sys.executable, "-c", STOPPABLE, ":".join(COMMAND), str(failure_timeout_s), *sweep]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        _until(iter(lambda: len(list(Path().glob("swept/points/*/began"))) == 2, None))
        began = time.monotonic()
        os.kill(process.pid, number)
        try:
            said, _ = process.communicate(timeout=90)
        finally:
            process.kill()
    return process.returncode, said, time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_processes_and_complete_points_remain(number: signal.Signals) -> None:
    code, said, took = _stopped(number, "--mode=well,torn,hang", "seed=1,2", failure_timeout_s=60.0)
    assert code == 130
    assert took < 30
    assert not _alive()
    assert "4 of 6 points are done; the same command with --out swept continues the sweep" in said
    kept = results.read(Path("swept"))["points"]
    assert [one["failed"] is None for one in kept] == [True, True, False, False]
    assert sorted(path.parent.name[:3] for path in Path().glob("swept/points/*/whole")) == ["001", "002"]
    if number == signal.SIGINT:
        _goes_on()


def _goes_on() -> None:
    """The same command runs the incomplete points again, with a program that does not hang."""
    Path("starts").unlink()
    program = Path("healed.py")
    program.write_text(
        Path(fake_simulate.__file__).read_text().replace('("hang", "stubborn")', "()").replace('"torn"', '""')
    )
    folder, said = swept("--mode=well,torn,hang", "seed=1,2", command=(sys.executable, "-S", "-E", str(program)))
    assert "2 of 6 points were done before" in said
    assert sorted(name[:3] for name in starts()) == ["003", "004", "005", "006"]
    assert [one["failed"] for one in results.read(folder)["points"]] == [None] * 6


def test_process_that_ignores_termination_is_killed() -> None:
    code, _, took = _stopped(signal.SIGINT, "--mode=stubborn", "seed=1,2", failure_timeout_s=8.0)
    assert code == 130
    assert 8 < took < 15.9  # one timeout for both processes
    assert not _alive()


def test_ctrl_c_reaches_points_only_through_the_sweep() -> None:
    """On a terminal a signal reaches the sweep's process group; points have groups of their own."""
    told = "import os, sys; sys.exit('stretto: %d %d' % (os.getpid(), os.getpgid(0)))"
    with pytest.raises(LaunchError, match="1 of 1 point failed"):
        swept("workers=1", command=(sys.executable, "-c", told))
    process, group = results.read(Path("swept"))["points"][0]["failed"].split()
    assert process == group


@pytest.mark.plain_processes
def test_sweep_runs_without_torch() -> None:
    script = (
        "import sys, stretto.simulator.sweep.runner; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=150).returncode == 0
