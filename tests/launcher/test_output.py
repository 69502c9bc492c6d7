"""Stretto's lines beside the output of a script: on lines of their own, the first one immediately."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_place import Place, Terminal

from stretto.cli.main import command
from stretto.launcher.progress_display import ProgressDisplay
from stretto.notices import say

EVALUATES = """
import json, os, time
def evaluation(step):
    event = {"event": "evaluation", "t": 0.0, "worker": 0, "epoch": 1, "step": step}
    event |= {"training_s": 1.0, "metrics": {"a": 1}}
    with open(config.run + "/events.jsonl", "a") as log:
        log.write(json.dumps(event) + "\\n")
    until_shown(f"step {step}:")
def until_shown(text):
    limit = time.monotonic() + 60
    while text not in open("shown").read():
        assert time.monotonic() < limit, text + " was not shown"
        time.sleep(0.02)
"""


def output_lines(place: Place, script: Path, *options: str) -> list[str]:
    """Return the lines of a run whose output and errors go to one file, which the script sees as `shown`."""
    shown = place.folder / "shown"
    with shown.open("wb") as file:
        place.stretto("run", *options, script, stdout=file, stderr=file).wait(timeout=60)
    return shown.read_bytes().decode().split("\n")[:-1]


def test_line_of_stretto_is_never_joined_to_a_partial_line_or_bar_of_the_script(place: Place) -> None:
    text = EVALUATES + "import sys\n"
    text += "print('half', end='', flush=True)\nuntil_shown('half')\nevaluation(1)\nprint(' a line')\n"
    text += "print('\\r 50%|##', end='\\r', file=sys.stderr, flush=True)\nuntil_shown('##')\nevaluation(2)\n"
    text += "print('no end', end='')\n"
    lines = output_lines(place, place.script(text), "--out", "here")
    first, half, one, rest, bar, two, last, *summary = lines
    assert first.startswith("stretto: starting 1 worker of ")
    assert (half, rest, bar.strip(), last) == ("half", " a line", "50%|##", "no end")
    assert one.startswith("stretto: epoch 1, step 1: a 1") and two.startswith("stretto: epoch 1, step 2: a 1")
    assert any(line.startswith("page: ") for line in summary)


@pytest.mark.plain_processes
def test_line_of_the_script_stays_whole_where_python_does_not_buffer_output(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PYTHONUNBUFFERED`, as images of containers set it, has each word of a line written by itself."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    text = EVALUATES + "class Slow:\n    def __str__(self):\n        evaluation(1)\n        return 'slow'\n"
    lines = output_lines(place, place.script(text + "print('a', Slow(), 'line')\n"), "--out", "here")
    assert "a slow line" in lines


def test_error_begins_a_line_even_if_only_the_script_is_shown(place: Place) -> None:
    script = place.script("print('no end', end='', flush=True)\nraise ValueError('boom')")
    lines = output_lines(place, script, "--quiet", "--out", "here")
    assert lines[:2] == ["no end", "stretto: worker 0 failed: ValueError: boom"]


def test_line_that_a_worker_prints_for_stretto_begins_a_line_on_a_terminal(place: Place) -> None:
    """The worker's own output may end without a newline."""
    script = place.script(
        "import pathlib, sys, time\n"
        "def until(name):\n    while not pathlib.Path(name).exists(): time.sleep(0.01)\n"
        "print('\\r 50%|##', end='', flush=True)\nuntil('bar')\n"
        "print('stretto: note', file=sys.stderr)\nuntil('note')\nprint('\\r100%|####')\n"
    )
    terminal = Terminal()
    process = terminal.start(place, "run", script)
    for name, shown in {"bar": " 50%|##", "note": "stretto: note"}.items():
        terminal.until(shown)
        Path(name).touch()
    text = terminal.read()
    assert process.wait(timeout=60) == 0
    assert " 50%|##\r\n" in text and "\x1b[2Kstretto: note\r\n" in text and "100%|####\r\n" in text
    assert "##stretto" not in text


@pytest.mark.plain_processes
def test_first_line_names_the_run_before_torch_is_imported(place: Place) -> None:
    script = place.script("print('from the script')")
    before = "import sys; from stretto.launcher.progress_display import ProgressDisplay as W; was = W.starting; "
    before += "W.starting = lambda watch, what: (was(watch, what), print('torch' in sys.modules, file=sys.stderr)); "
    line = ["-n", "2", "--recipe", "local_sgd(every=16)", "--out", "here"]
    process = place.stretto("run", *line, script, "--lr", "1", before=before)
    _, err = process.communicate(timeout=90)
    first, torch, *_ = err.decode().splitlines()
    assert first == f"stretto: starting 2 workers of {script} --lr 1, recipe local_sgd(every=16), run folder here"
    assert torch == "False"


def test_quiet_run_prints_no_first_line(capfd: pytest.CaptureFixture[str]) -> None:
    ProgressDisplay(quiet=True).starting("anything")
    assert capfd.readouterr() == ("", "")


def test_line_of_stretto_clears_a_tqdm_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say("alone")
    bars = SimpleNamespace(write=lambda text, file: print(f"cleared\n{text}\ndrawn", file=file))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bars))  # type: ignore[arg-type]
    say("beside a bar")
    assert capsys.readouterr().err == "stretto: alone\ncleared\nstretto: beside a bar\ndrawn\n"


def test_line_of_stretto_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports of workers of other machines are part of such lines."""
    raw, shown = "worker 2 failed (\x1b]0;title\x07\x1b[2J\r\x9b31mgone)", "worker 2 failed (?]0;title??[2J??31mgone)"
    ProgressDisplay().note(raw)
    say(raw)
    assert command(["report", raw]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"stretto: {shown}"] * 2 and shown in lines[2]
