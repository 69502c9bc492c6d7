"""The progress display without a terminal, and the reading of a growing event log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.launcher import progress_display as room
from stretto.launcher.progress_display import ProgressDisplay, Tail
from stretto.run_config import RunConfig


def append(folder: Path, **event: object) -> None:
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({"t": 0.0, "worker": 0} | event) + "\n")


def test_every_event_is_read_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    lines = [b'{"event": "a"}\n', b'{"event": ', b'"b"}\n{"ev', b'ent": "c"}\n', b"no event\n", b'{"event": "d"}\n']
    found = []
    for line in lines:
        with path.open("ab") as log:
            log.write(line)
        found.append([event["event"] for event in tail.read()])
    assert found == [["a"], [], ["b"], ["c"], [], ["d"]]


def test_progress_is_printed_in_intervals_and_lines_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    display = ProgressDisplay()
    display.begin(tmp_path, RunConfig(Path("train.py")))
    for second in range(13):
        now[0] = float(second)
        append(tmp_path, event="log", step=second, values={"loss": 1.0})
        if second == 7:
            append(tmp_path, event="evaluation", epoch=1, step=7, training_s=7.0, metrics={"accuracy": 0.5})
        display.poll()
    display.end()
    assert capsys.readouterr().err.splitlines() == [
        "stretto: step 5, loss 1",
        "stretto: epoch 1, step 7: accuracy 0.5 (after 7.0 s of training)",
        "stretto: step 12, loss 1, accuracy 0.5",
    ]


def test_quiet_shows_only_the_output_of_the_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(quiet=True)
    display.begin(tmp_path, RunConfig(Path("train.py")))
    append(tmp_path, event="evaluation", epoch=1, step=7, training_s=7.0, metrics={"accuracy": 0.5})
    display.say(b"from the script\n")
    display.end()
    assert capfd.readouterr() == ("from the script\n", "")


def test_warning_is_shown_even_if_the_output_of_worker_0_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path, event="warning", text="mind this")
    for output in ("rank0", "none"):
        display = ProgressDisplay()
        display.begin(tmp_path, RunConfig(Path("train.py"), output=output))  # type: ignore[arg-type]
        display.end()
    assert capfd.readouterr().err == "stretto: note: mind this\n"


def test_only_the_visible_part_of_a_progress_bar_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar may be written whole, in halves, and with its carriage return first or last."""
    display = ProgressDisplay()
    for step in range(1000):
        display._print_above(b"\rtraining:%4d" % step)
        display._print_above(b" of 1000\r")
        assert display._partial == b"training:%4d of 1000\r" % step
    display._print_above(b"\rdone\nand ")
    assert display._partial == b"and "
    assert capsys.readouterr().err == "done\n"


def test_unchanged_progress_line_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PLAIN_S", 0.0)
    display = ProgressDisplay()
    display.begin(tmp_path, RunConfig(Path("train.py"), workers=2))
    for step in (3, 3, 4):
        append(tmp_path, event="log", step=step)
        display.poll()
        display.poll()
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2].rpartition(": ")[2] for line in told] == ["step 3", "step 4"]
