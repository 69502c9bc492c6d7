"""A failing run reports the cause first and once, and all its processes end in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_place import Place

from benchmarks.counting_model import run_counted
from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher import log_relay
from stretto.launcher.engines.interface import Exited
from stretto.launcher.failure_cause import first_cause
from stretto.launcher.script_watch import Written
from stretto.launcher.worker_main import _report_written
from stretto.membership.loop_positions import LoopPosition
from stretto.membership.worker_status import ProcessRecord, ReportedError, Status, make_record, read_record
from stretto.process_config import WorkerConfig
from stretto.report.summary import conclude

WITHIN_S = 60.0
"""Seconds within which a failed run must end."""

WAIT = """
import os, sys, time
rank = config.worker
open(f"started-{rank}", "w").close()
"""


def failure(place: Place, text: str, **order: object) -> str:
    """Return the text of a run's failure; it must come in time, counted from when the workers ran."""
    with pytest.raises(LaunchError) as raised:
        place.run(WAIT + text, **order)
    started = max(path.stat().st_mtime for path in place.folder.glob("started-*"))
    assert time.time() - started < WITHIN_S
    place.await_ends()
    return str(raised.value)


def test_exception_on_one_worker_ends_all_and_is_shown_from_the_script_on(place: Place) -> None:
    message = failure(
        place,
        """
def compute():
    raise ValueError("boom")

if rank == 2:
    print("last words")
    compute()
time.sleep(600)
""",
        workers=4,
    )
    lines = message.splitlines()
    assert lines[0] == "worker 2 failed: ValueError: boom"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in <module>" in lines[2]
    assert lines[-1].startswith("the whole log: runs/")
    assert lines[-1].endswith("/worker-2.log")
    assert message.count("boom") == 2
    assert not any(name in message for name in ("runpy", "stretto/launcher", "last words"))
    log = Path(lines[-1].removeprefix("the whole log: ")).read_text()
    assert log.index("last words") < log.index("ValueError: boom") < log.index("in compute")


def test_error_is_an_event(place: Place) -> None:
    failure(place, "raise KeyError('x')", out=Path("here"))
    events = list(read_events(Path("here/events.jsonl")))
    assert [(one["event"], one["worker"], one["kind"], one["text"]) for one in events] == [
        ("error", 0, "KeyError", "'x'")
    ]
    assert events[0]["consequence"] is False


@pytest.fixture
def slow_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long for a cause as a busy machine may need to start the worker that has it."""
    monkeypatch.setattr("stretto.launcher.supervisor.CAUSE_S", WITHIN_S)


@pytest.mark.usefixtures("slow_causes")
def test_cause_is_reported_before_its_consequences(place: Place) -> None:
    message = failure(
        place,
        """
from stretto.errors import TransportError
if rank != 1:
    raise TransportError("worker 1 is gone")
time.sleep(0.4)
raise ValueError("the cause")
""",
        workers=3,
    )
    assert message.startswith("worker 1 failed: ValueError: the cause")


def test_first_consequence_is_reported_if_there_is_no_cause(place: Place) -> None:
    message = failure(
        place,
        """
from stretto.errors import TransportError
if rank == 1:
    raise TransportError("nobody came within 5 s")
time.sleep(600)
""",
        workers=2,
    )
    assert message.startswith("worker 1 failed: TransportError: nobody came within 5 s")


def test_error_of_unequal_loops_does_not_name_a_waiting_worker_as_the_cause() -> None:
    text = "worker 1 has ended its script in epoch 1 at step 8, worker 0 waits in epoch 2 at step 9"
    error = ReportedError("UnevenLoopsError", text, "")
    ends = [Exited(1, 0), Exited(0, 1, record=ProcessRecord(error=error))]
    assert first_cause(ends, {}).headline == f"UnevenLoopsError: {text}"


def test_error_of_waiting_workers_names_the_worker_that_left_gracefully(place: Place) -> None:
    message = failure(
        place,
        """
import os, pathlib, time
from stretto.errors import TransportError
pid = pathlib.Path("pid")
if rank == 0:
    pathlib.Path("writing").write_text(str(os.getpid()))
    os.rename("writing", "pid")
else:
    limit = time.monotonic() + 60
    while not pid.exists() or os.path.exists(f"/proc/{pid.read_text()}"):  # the launcher has seen that it ended
        assert time.monotonic() < limit
        time.sleep(0.01)
    raise TransportError("worker 0 is gone")
""",
        workers=2,
    )
    assert message.startswith("worker 1 failed: TransportError: worker 0 is gone")
    assert "ended before that without an error: worker 0" in message


@pytest.mark.usefixtures("slow_causes")
def test_killed_worker_is_the_cause_of_the_others_errors(place: Place) -> None:
    message = failure(
        place,
        """
from stretto.errors import TransportError
if rank == 0:
    time.sleep(0.2)
    raise TransportError("worker 1 is gone")
print("alive so far", flush=True)
os.kill(os.getpid(), 9)
""",
        workers=2,
    )
    assert message.startswith("worker 1 was killed by SIGKILL")
    assert "alive so far" in message


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("sys.exit(3)", "worker 1 failed: SystemExit: the script called sys.exit(3)"),
        ("sys.exit('no data')", "worker 1 failed: SystemExit: no data"),
        ("print('mute', flush=True); os._exit(7)", "worker 1 ended with exit code 7 and named no error"),
        ("os.abort()", "worker 1 was killed by SIGABRT"),
        ("exec(compile('x = = 1', 'train.py', 'exec'))", "worker 1 failed: SyntaxError: invalid syntax"),
    ],
)
def test_every_abnormal_exit_is_named(place: Place, end: str, expected: str) -> None:
    message = failure(place, f"if rank == 1: {end}\ntime.sleep(600)", workers=2, min_workers=2, restarts=0)
    assert message.startswith(expected)
    assert ("mute" in message) == ("mute" in end)


def test_stretto_error_is_shown_without_library_frames(place: Place) -> None:
    message = failure(
        place, "import pathlib, stretto.events\nlist(stretto.events.read_events(pathlib.Path('missing')))"
    )
    assert message.startswith("worker 0 failed: LogError: ")
    assert "in <module>" in message
    assert "events.py" not in message


def test_stretto_error_shows_only_causes_in_the_script(place: Place) -> None:
    """Shown is an exception raised in a function of the script, not one raised in a package."""
    message = failure(
        place,
        """
from stretto.errors import EvaluateError
import json
def accuracy():
    return 1 / 0
def evaluate():
    try:
        accuracy()
    except ZeroDivisionError as error:
        raise EvaluateError("evaluate raised") from error
evaluate()
""",
    )
    assert "in accuracy" in message
    assert "ZeroDivisionError" in message
    assert "The above exception was the direct cause" in message


def test_error_after_the_script_is_reported_like_any_other(place: Place) -> None:
    message = failure(place, "def fail(): raise OSError('in close')\nstub.api.close = fail")
    assert message.startswith("worker 0 failed: OSError: in close")


def test_error_is_reported_if_the_log_is_full(place: Place) -> None:
    message = failure(
        place,
        """
if rank == 1:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError("boom")
time.sleep(600)
""",
        workers=2,
    )
    assert message.startswith("worker 1 failed: ValueError: boom\n")


def test_worker_continues_without_its_log_on_a_full_disk(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_relay, "log_of", lambda *_: Path("/dev/full"))
    place.run("print('still here')")
    assert capfd.readouterr().out == "still here\n"


def test_worker_may_end_while_others_continue(place: Place) -> None:
    folder = place.run(
        """
        import os, pathlib, time
        rank, gone = config.worker, pathlib.Path("gone")
        if rank == 0:
            gone.write_text(str(os.getpid()))
        while not gone.exists() or (rank and pathlib.Path("/proc", gone.read_text() or "self").exists()):
            time.sleep(0.01)
        print("ended", rank)
        """,
        workers=3,
    )
    assert [(folder / f"worker-{rank}.log").read_text() for rank in range(3)] == [f"ended {n}\n" for n in range(3)]


@pytest.mark.parametrize(
    "stubborn", ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_worker_that_ignores_sigterm_is_killed(place: Place, stubborn: str) -> None:
    message = failure(
        place,
        f"""
import pathlib, signal
if rank == 0:
    pathlib.Path("ready").touch()
    {stubborn}
while not pathlib.Path("ready").exists():
    time.sleep(0.01)
if rank == 1:
    raise ValueError("boom")
time.sleep(600)
""",
        workers=2,
    )
    assert message.startswith("worker 1 failed: ValueError: boom")


@pytest.mark.parametrize("end", ["pass", "raise ValueError", "os.kill(os.getpid(), 9)"])
def test_children_of_workers_end_with_them(place: Place, end: str) -> None:
    text = f"""
import subprocess
subprocess.Popen(["sleep", "600"])
{end}
"""
    if end == "pass":
        place.run(WAIT + text, workers=2)
    else:
        failure(place, text, workers=2)
    place.await_ends()


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """Yield a run folder whose event log is on a full disk."""
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    return tmp_path


def test_list_of_written_files_on_a_full_disk_does_not_fail_the_run(full_disk: Path) -> None:
    written = Written([])
    written.note("/somewhere/model.pt")
    _report_written(written, WorkerConfig(run=str(full_disk)))


def test_error_that_does_not_fit_into_the_log_is_printed_and_recorded(full_disk: Path) -> None:
    record = make_record()
    begin = f"from stretto.launcher.worker_main import begin, fail, log_in; begin(WorkerConfig(status_fd={record}))"
    end = f"fail(ValueError('boom'), 0, log_in({str(full_disk)!r}))"
    program = f"from stretto.process_config import WorkerConfig; {begin}; {end}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[record])
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    cause = first_cause([Exited(0, done.returncode, record=read_record(record))], {})
    assert cause.headline == "worker 0 failed: ValueError: boom"


@pytest.mark.parametrize("text", ["boom " * 100_000, "\N{GRINNING FACE}" * 100_000])
def test_record_of_a_long_error_is_cut(text: str) -> None:
    record, status = make_record(), Status()
    status.open(os.dup(record))
    status.note(LoopPosition(2, 3, 4))
    status.fail(ReportedError("ValueError", text, text))
    found = read_record(record)
    assert found.place == LoopPosition(2, 3, 4)
    assert found.error is not None
    assert text.endswith(found.error.text) and len(found.error.text) > 10_000


def test_run_whose_folder_was_removed_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "final.safetensors").write_bytes(b"")
    conclude(tmp_path, None, silent=False)
    message = capsys.readouterr().err
    assert message.startswith(
        f"stretto: the run has finished; the trained model is in {tmp_path}/final.safetensors. Its"
    )
    assert message.count("\n") == 1


@pytest.mark.parametrize("restarts", [0, 2])
def test_run_does_not_wait_for_a_stopped_worker_if_no_other_trains(restarts: int, tmp_path: Path) -> None:
    """Worker 1 is stopped and declared failed, and then worker 0 is killed; both are restarted, or none."""
    script = ["--pause", "0.05", "--strike", "1:STOP:stepped:3", "--strike", "0:KILL:stepped:6"]
    options = ["-n", "2", "--failure-timeout", "1s", "--restarts", f"{restarts}"]
    done = run_counted(tmp_path, "allreduce", options=options, script=script, limit_s=WITHIN_S)
    assert done.code == (0 if restarts else 1)
    assert len([*tmp_path.glob("counts/sent-*")]) == 2
    assert done.epochs == ([{1: 240}] * 2 if restarts else [])
