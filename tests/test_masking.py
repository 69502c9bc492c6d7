"""Arguments that look like secrets are in no file of a run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.synthetic_runs import write_run

from stretto import run_dir
from stretto.cli.main import command
from stretto.cli.script_arguments import hint, split
from stretto.compare.trials import Question
from stretto.errors import LaunchError
from stretto.launcher.config import described
from stretto.launcher.resume_hint import left_in
from stretto.launcher.run_copy import RunCopy, _unusable
from stretto.masking import MASK, masked
from stretto.report.html_report import write as write_page
from stretto.run_config import RunConfig
from stretto.run_dir import CHECKPOINTS, describe, make_folder
from stretto.simulator.sweep.grid import SweepConfig

SECRET = "Tr0ub4dor"
LINES = [
    ["--api-key", SECRET],
    ["--api-key=" + SECRET],
    ["--wandb_api_key", SECRET],
    ["--password", SECRET],
    ["--db-password=" + SECRET],
    ["--auth-token", SECRET],
    ["--hub-access-token", SECRET],
    ["-password", SECRET],
    [f"postgres://me:{SECRET}@host:5432/db"],
    ["--data", f"https://me:{SECRET}@host/file"],
    [f"hf_{SECRET}{SECRET}"],
    [f"--token=ghp_{SECRET}{SECRET}"],
    ["--token", f"sk-{SECRET}{SECRET}"],
]
HARMLESS = [
    ["--max-tokens", "128"],
    ["--tokenizer", "bert"],
    ["--pad-token", "<pad>"],
    ["--key", "label"],
    ["--sort-keys"],
    ["--password-file", "f"],
    ["--api-key"],
    ["--api-key", "--epochs", "3"],
    ["https://host:443/a@b"],
    ["me@host:/path"],
    ["-"],
    ["--"],
    ["sk-learn"],
]


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_secret_is_masked_and_nothing_else(line: list[str]) -> None:
    shown = masked(["--epochs", "3", *line, "--lr", "0.1"])
    assert SECRET not in "".join(shown)
    assert MASK in "".join(shown)
    assert (shown[:2], shown[-2:], len(shown)) == (["--epochs", "3"], ["--lr", "0.1"], 4 + len(line))


@pytest.mark.parametrize("line", HARMLESS, ids=" ".join)
def test_other_arguments_stay(line: list[str]) -> None:
    assert masked(line) == line


@given(st.lists(st.text()))
def test_masking_twice_changes_nothing_more(words: list[str]) -> None:
    assert masked(masked(words)) == masked(words)


def test_run_json_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stretto", "run", "train.py", "--api-key", SECRET])
    found = describe({"script": "train.py", "args": ("--api-key", SECRET)}, datetime.now())
    assert SECRET not in str(found)
    assert found["args"] == ("--api-key", MASK)


def test_the_page_of_a_run_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stretto", "run", "train.py", "--api-key", SECRET])
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=2)
    run_dir.write_run(folder, RunConfig(Path("train.py"), ("--api-key", SECRET)).record(), datetime.now())
    page = write_page(folder).read_text()
    assert MASK in page and SECRET not in page


def test_records_of_comparisons_and_sweeps_are_masked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    config = RunConfig(script, ("--api-key", SECRET))
    for record in (
        Question(config, (2,), ("allreduce",)).describe(),
        SweepConfig(config, ("workers=1,2",), {}).asked(),
    ):
        assert record["args"] == ["--api-key", MASK]
        assert SECRET not in str(record)


def test_the_line_that_announces_a_simulation_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert command(["simulate", "--recipe", "allreduce", "--network", "none", "train.py", "--api-key", SECRET]) > 0
    shown = capsys.readouterr().err
    assert "of train.py --api-key '(masked)', recipe allreduce" in shown and SECRET not in shown


def test_the_error_of_a_store_is_masked() -> None:
    """Packages of stores put addresses into their errors."""
    place = f"s3://me:{SECRET}@host/run"
    shown = str(_unusable(place, OSError(f"no {place}")))
    assert SECRET not in shown and "got: --copy-to s3://me:(masked)@host/run" in shown


def test_passwords_in_the_place_of_the_copy_are_masked(tmp_path: Path) -> None:
    place, shown = f"memory://me:{SECRET}@host/run", list[str]()
    found = describe(RunConfig(Path("train.py"), copy_to=place).record(), datetime.now())
    assert found["copy_to"] == "memory://me:(masked)@host/run" and SECRET not in str(found)
    (tmp_path / "run.json").touch()
    with RunCopy(tmp_path, place, shown.append) as copy:
        copy._attempt(lambda: 1 / 0)
        copy._attempt(lambda: None)
    with pytest.raises(LaunchError) as occupied, RunCopy(tmp_path, place, shown.append):
        pass
    with pytest.raises(LaunchError) as elsewhere:
        make_folder("train", Path(place), datetime.now())
    texts = [*shown, str(occupied.value), str(elsewhere.value)]
    assert len(texts) == 4 and all("me:(masked)@host" in text and SECRET not in text for text in texts)


def test_the_command_that_continues_a_run_is_masked(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS / "round-1").mkdir(parents=True)
    retyped = ("train.py", "--epochs", "3", "--api-key", SECRET)
    shown = left_in(tmp_path, RunConfig(Path("train.py"), retyped=retyped))
    assert f"--resume {tmp_path} train.py --epochs 3 --api-key '(masked)'" in shown


def test_the_hint_about_options_after_the_script_is_masked() -> None:
    options = {"-n": True, "--copy-to": True}
    line = ["train.py", "--api-key", SECRET, "-n", "4", "--copy-to", f"s3://me:{SECRET}@host/run"]
    shown = hint("stretto run", split(line, options), options)
    assert shown is not None and SECRET not in shown
    assert "-n 4 --copy-to 's3://me:(masked)@host/run' train.py --api-key '(masked)'" in shown


def test_the_line_that_announces_a_run_is_masked() -> None:
    shown = described(RunConfig(Path("train.py"), ("--epochs", "3", "--api-key", SECRET)))
    assert SECRET not in shown
    assert "train.py --epochs 3 --api-key '(masked)'" in shown
