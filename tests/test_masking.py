"""Arguments that look like secrets are in no file of a run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.launcher.config import described
from stretto.masking import MASK, masked
from stretto.run_config import RunConfig
from stretto.run_dir import describe

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


def test_the_line_that_announces_a_run_is_masked() -> None:
    shown = described(RunConfig(Path("train.py"), ("--epochs", "3", "--api-key", SECRET)))
    assert SECRET not in shown
    assert "train.py --epochs 3 --api-key '(masked)'" in shown
