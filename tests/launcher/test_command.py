"""The command `stretto` as a shell starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_place import PATH, Place, Terminal, staff, until

from stretto.cli.main import command
from stretto.recipe.named import NAMED

WITHIN_S = 60.0
"""Seconds in which all processes have to end on a busy machine; on a quiet one it takes less than one."""

SLEEPERS = """
import os, pathlib, signal, subprocess, time
subprocess.Popen(["sleep", "600"])
if config.worker == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"ready-{config.worker}").touch()
time.sleep(600)
"""
"""Two workers that never end, each with a child process; one worker ignores SIGTERM."""


def start_endless_run(place: Place, before: str = "") -> subprocess.Popen[bytes]:
    """Start a run and wait until all its processes run."""
    process = place.stretto("run", "-n", "2", place.script(SLEEPERS), before=before)
    until(lambda: Path("ready-0").exists() and Path("ready-1").exists())
    until(lambda: len(place.left()) == staff(place) + 4)  # two workers and their two children
    return process


def wait_for_end(place: Place, process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Wait for the end; return the exit code, standard output and standard error."""
    out, err = process.communicate(timeout=90)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_to_the_launcher_ends_all_processes(place: Place, number: signal.Signals, code: int) -> None:
    process = start_endless_run(place, f"import signal; signal.signal({int(number)}, signal.SIG_DFL); ")  # as no nohup
    began = time.monotonic()
    process.send_signal(number)
    returned, _, err = wait_for_end(place, process)
    assert time.monotonic() - began < WITHIN_S
    assert returned == code
    first, stopped, *_ = err.splitlines()
    assert first.startswith("stretto: starting 2 workers of ")
    assert stopped == f"stretto: stopped by {number.name}"
    place.await_ends()


def test_second_signal_ends_the_run_without_the_grace_period(place: Place) -> None:
    """The grace period is longer than the test's limit."""
    process = start_endless_run(
        place, "import stretto.launcher.engines.local; stretto.launcher.engines.local.GRACE_S = 600.0; "
    )
    process.send_signal(signal.SIGINT)
    until(lambda: len(place.left()) <= 4)  # worker 0 and its child have ended, worker 1 ignores SIGTERM
    process.send_signal(signal.SIGINT)
    assert wait_for_end(place, process)[0] == 130


def test_all_processes_end_when_the_launcher_is_killed(place: Place) -> None:
    process = start_endless_run(place)
    process.kill()
    place.await_ends()
    assert process.wait() == -signal.SIGKILL


def test_all_processes_end_if_the_output_is_not_read(place: Place) -> None:
    """The pipe to the reader is full, and so is the worker's."""
    script = place.script("import pathlib\nwhile True:\n    print('x' * 1000)\n    pathlib.Path('alive').touch()")
    process = place.stretto("run", script)
    until(lambda: Path("alive").exists() and time.time() - Path("alive").stat().st_mtime > 0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert time.monotonic() - began < WITHIN_S


def test_failed_run_is_reported_once_with_exit_code_1(place: Place) -> None:
    script = place.script(
        """
        import os, time
        print("hello", flush=True)
        if config.worker == 0:
            raise ValueError("boom")
        time.sleep(600)
        """
    )
    code, out, err = wait_for_end(place, place.stretto("run", "-n", "2", "--out", "here", script))
    assert (code, out) == (1, "hello\n")
    _, _, err = err.partition("run folder here\n")
    assert err.startswith("stretto: worker 0 failed: ValueError: boom\nTraceback (most recent call last):\n")
    assert err.endswith("the whole log: here/worker-0.log\n")
    assert err.count("ValueError") == 2  # in the headline, and in the line of the script


def test_all_words_after_the_script_are_its_arguments(place: Place) -> None:
    place.script("import os, sys; print(sys.argv[1:], config.worker, config.world_size)")
    own = ["data.csv", "--seed", "5", "--workers=8", "--resume", "x", "--epochs", "1", "--recipe", "--help", "--", "-n"]
    line = ["run", "--seed", "3", "-n2", "--quiet", "--out=here", "train.py", *own]
    code, out, err = wait_for_end(place, place.stretto(*line))
    assert (code, err) == (0, "")
    assert out == f"{own} 0 2\n"
    asked = json.loads(Path("here/run.json").read_text())
    assert (asked["seed"], asked["workers"]) == (3, 2)
    assert asked["command"][1:] == ["run", "--no-recovery", *line[1:]]
    assert Path("here/report.html").exists()


def test_record_is_written_to_the_given_path(place: Place) -> None:
    script = place.script("print('from the script')")
    code, out, err = wait_for_end(place, place.stretto("run", "-n", "2", "--json", "-", script))
    assert code == 0
    record = json.loads(out)
    assert record["workers"] == 2
    assert "from the script" in err
    assert f"page: {record['folder']}/report.html" in err


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (
            ["run", "--recpie", "allreduce", "train.py"],
            2,
            ("no option --recpie", "the nearest are --recipe, ", "the script's own after it"),
        ),
        (["run", "--worker=4", "train.py"], 2, ("no option --worker", "nearest are --workers, --min-workers, ")),
        (["run", "--lr", "0.1", "train.py"], 2, ("no option --lr", "got: --lr")),
        (["run", "-n", "four", "train.py"], 2, ("got: four", "expected: a whole number")),
        (["run", "-n", "1.5", "train.py"], 2, ("got: 1.5", "expected: a whole number")),
        (["run", "-n", "0", "train.py"], 1, ("got: 0", "expected: a whole number, at least 1", "try: -n 4")),
        (["run", "-n"], 2, ("-n",)),
        (
            ["run", "--failure-timeout", "ten", "train.py"],
            2,
            ("ten is not a time", "expected: a time such as", "try: 10s"),
        ),
        (
            ["run", "--faults", "kil worker at 1s", "train.py"],
            1,
            ("--faults cannot be read: kil", "got: kil worker", "^^^"),
        ),
        (["run"], 2, ("SCRIPT",)),
        (["run", "trian.py"], 1, ("there is no script trian.py", "try: stretto run train.py")),
        (["run", "--out", ".", "train.py"], 1, ("exists and is not empty", "try: --out")),
        (["run", "--json", "no/such/file", "train.py"], 1, ("there is no folder no/such",)),
        (["run", "--json", "/proc/x.json", "train.py"], 1, ("/proc/x.json cannot be written", "try: --json run.json")),
        (["run", "--output", "some", "train.py"], 2, ("some", "rank0")),
        (["rnu", "train.py"], 2, ("rnu",)),
    ],
)
def test_invalid_command_is_one_clear_error(
    place: Place, line: list[str], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    place.script("open('ran', 'w')")
    assert command(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stretto: ")
    assert "Traceback" not in err
    assert [word for word in words if word not in err] == []
    assert not Path("ran").exists()


def test_progress_line_stays_below_the_scripts_output_on_a_terminal(place: Place) -> None:
    script = place.script(
        """
        import json, os, pathlib, time
        event = {"event": "log", "t": 0.0, "worker": 0, "step": 5, "values": {"loss": 0.25}}
        with open(config.run + "/events.jsonl", "w") as log:
            log.write(json.dumps(event) + "\\n")
        print("half a line", end="", flush=True)
        while not pathlib.Path("shown").exists():
            time.sleep(0.01)
        print(", and the rest")
        raise ValueError("enough")
        """
    )
    terminal = Terminal()
    process = terminal.start(place, "run", script)
    terminal.until("half a line\r\n")
    terminal.until("step 5 · loss 0.25")
    Path("shown").touch()
    text = terminal.read()
    assert process.wait(timeout=60) == 1
    assert "half a line\r\n" in text
    assert "half a line, and the rest\r\n" in text
    assert "step 5 · loss 0.25" in text
    assert text.index("\x1b[?25h") < text.index("stretto: worker 0 failed")  # the cursor is restored before the end


def test_reader_may_close_the_output(place: Place) -> None:
    script = place.script("for n in range(20000): print(n)\nopen('done', 'w')")
    process = place.stretto("run", "--quiet", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.wait(timeout=60) == 0
    assert Path("done").exists()


def test_recipes_are_listed_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["recipes", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(NAMED)
    assert command(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}(" in shown for name in NAMED)


@pytest.mark.parametrize("name", ["recipes", "layouts"])
def test_lists_are_broken_between_words_at_the_width_of_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for columns in (64, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert command([name]) == 0
        shown.append(capsys.readouterr().out)
        assert max(map(len, shown[-1].splitlines())) <= columns
    assert shown[0].split() == shown[1].split()
    assert shown[0] != shown[1]


def test_help_starts_no_other_process(place: Place) -> None:
    code, out, err = wait_for_end(place, place.stretto())
    assert (code, err) == (0, "")
    assert all(word in out for word in ("run", "report", "recipes"))
    assert wait_for_end(place, place.stretto("--version"))[1].startswith("stretto ")


@pytest.mark.plain_processes
def test_interrupt_during_the_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), PATH])}
    command = [sys.executable, "-m", "stretto.cli", "recipes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stretto: stopped\n")


def test_value_that_is_none_of_an_option_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "--batch", "splitt", "train.py"]) == 2
    assert capsys.readouterr().err == "stretto: Invalid value for '--batch': 'splitt' is not one of 'keep', 'split'.\n"
