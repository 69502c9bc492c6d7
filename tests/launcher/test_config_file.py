"""`--config`: a TOML file of options, and `run.json` of a run that is done again."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from stretto.cli import main
from stretto.launcher.config import settled
from stretto.run_config import RunConfig, options, typed_options
from stretto.run_dir import write_run

VALUES: dict[str, Any] = {
    "module": True,
    "workers": 4,
    "recipe": "diloco(every=50)",
    "layout": "pipeline(stages=2)",
    "seed": 3,
    "threads": 2,
    "stragglers": "1:2.0",
    "global_batch": "split",
    "shares": "1:1:1:0.2",
    "uneven": "drop",
    "lr_scale": "linear",
    "servers": 2,
    "on_nan": "skip",
    "plain": True,
    "relay": True,
    "failure_timeout_s": 2.5,
    "timeout_s": 60.0,
    "restarts": 1,
    "recovery": False,
    "min_workers": 2,
    "max_workers": 8,
    "wait_for": 5,
    "on_resize": "per-worker-batch",
    "max_batch": "0:64,1:16",
    "trainers": False,
    "host": "10.0.0.1",
    "hosts": "a:2,b",
    "hostfile": Path("hosts"),
    "remote_stretto": "~/venv/bin/stretto",
    "on": "ray",
    "resources": "1 GPU, 4 CPU",
    "port": 7878,
    "ports": "20000-20100",
    "faults": "kill worker every 20s",
    "checkpoint_every": "5m",
    "keep": 2,
    "resume": Path("runs/old"),
    "resume_stream": "skip",
    "stop_within_s": 20.0,
    "copy_to": "s3://bucket/run",
    "secret_file": Path("secret"),
    "out": Path("runs/new"),
    "output": "all",
}
"""A value of each option that is not its default."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the function from a command line to the configuration of the run that it starts."""
    monkeypatch.chdir(tmp_path)
    found: list[RunConfig] = []

    def start(config: RunConfig, *_: Any) -> Path:
        found.append(structs.replace(config, retyped=()))
        return tmp_path

    monkeypatch.setattr("stretto.cli.main.run_locally", start)
    monkeypatch.setattr("stretto.report.summary.conclude", lambda *_, **__: None)

    def configure(*line: str) -> RunConfig:
        found.clear()
        assert main.command(["run", *line]) == 0
        return found[0]

    return configure


def toml(values: dict[str, Any]) -> str:
    lines = (f"{name} = {json.dumps(value, default=str)}" for name, value in values.items())
    return "\n".join(lines)


def test_every_option_has_a_value_here() -> None:
    defaults = RunConfig(Path("train.py"))
    assert set(VALUES) == set(options())
    assert not [name for name, value in VALUES.items() if getattr(defaults, name) == value]


@pytest.mark.parametrize("name", list(VALUES))
def test_an_option_is_the_same_typed_and_in_a_file(configured: Any, name: str) -> None:
    wanted = RunConfig(Path("train.py"), ("--lr", "1"), **{name: VALUES[name]})
    words = [word.strip(" /") for word in typed_options(wanted, [name])]
    assert configured(*words, "train.py", "--lr", "1") == wanted
    Path("run.toml").write_text(toml({"script": "train.py", "args": ["--lr", "1"], name: VALUES[name]}))
    assert configured("--config", "run.toml") == wanted


@pytest.mark.parametrize("key", ["failure-timeout", "failure_timeout"])
def test_a_file_takes_the_names_and_texts_of_the_command_line(configured: Any, key: str) -> None:
    Path("run.toml").write_text(f'script = "train.py"\nbatch = "split"\n{key} = "500ms"\n')
    found = configured("--config", "run.toml")
    assert (found.failure_timeout_s, found.global_batch) == (0.5, "split")


def test_typed_options_and_scripts_take_precedence(configured: Any) -> None:
    Path("run.toml").write_text('script = "train.py"\nargs = ["--lr", "1"]\nworkers = 4\nseed = 2\n')
    assert configured("--config", "run.toml", "-n", "2") == RunConfig(
        Path("train.py"), ("--lr", "1"), workers=2, seed=2
    )
    assert configured("--config", "run.toml", "other.py") == RunConfig(Path("other.py"), workers=4, seed=2)


def test_run_json_of_a_run_starts_the_same_run(configured: Any, tmp_path: Path) -> None:
    several = RunConfig(Path("train.py"), ("--lr", "1"), **{**VALUES, "out": None})
    single = RunConfig(Path("train.py"), single_process=True, global_batch_of=4, keep_states=True, threads=1)
    for config in (several, single, structs.replace(several, servers=3, server_hosts="a:2,user@b:1")):
        write_run(tmp_path, config.record(), datetime(2026, 11, 24))
        assert configured("--config", "run.json") == config


def test_run_json_of_a_run_with_a_layout_starts_as_many_processes(configured: Any, tmp_path: Path) -> None:
    typed = RunConfig(tmp_path / "train.py", workers=4, layout="pipeline(stages=2)", threads=1)
    typed.script.touch()
    assert settled(typed).workers == 2
    write_run(tmp_path, settled(typed).record(), datetime(2026, 11, 24))
    assert configured("--config", "run.json") == typed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker = 4", "sets worker, which is no option here"),
        ('workers = "four"', "four is not a whole number"),
        ("workers = 2.5", "2.5 is not a whole number"),
        ('batch = "half"', "half"),
        ('failure_timeout = "soon"', "soon is not a time"),
        ("workers =", "run.toml cannot be read"),
        (None, "run.toml cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("run.toml").write_text(text)
    assert main.command(["run", "--config", "run.toml", "train.py"]) > 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 6


def test_a_masked_argument_has_to_be_typed_again(
    configured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = RunConfig(Path("train.py"), ("--api-key", "a1b2"), workers=3)
    write_run(tmp_path, asked.record(), datetime.now())
    assert main.command(["run", "--config", "run.json"]) == 1
    shown = capsys.readouterr().err
    assert "got: --api-key (masked)" in shown
    assert "try: --config run.json train.py ARGUMENTS" in shown
    again = configured("--config", "run.json", "train.py", "--api-key", "a1b2")
    assert (again.args, again.workers) == (asked.args, 3)
