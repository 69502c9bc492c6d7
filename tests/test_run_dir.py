"""Properties of run directories."""

from __future__ import annotations

import os
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from stretto import run_dir
from stretto.errors import LaunchError, LogError
from stretto.launcher.config import check
from stretto.run_config import RunConfig
from stretto.run_dir import CHECKPOINTS, describe, make_folder, write_run

NOW = datetime(2026, 11, 21, 10, 45)


def test_runs_started_in_the_same_second_get_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [str(make_folder("train", None, NOW)) for _ in range(3)]
    assert made == [f"runs/20261121-104500-train{suffix}" for suffix in ("", "-2", "-3")]


def test_run_never_overwrites_another(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "here"
    assert make_folder("train", out, NOW) == out
    assert make_folder("train", out, NOW) == out  # still empty
    (out / "run.json").write_text("{}")
    with pytest.raises(LaunchError, match="exists and is not empty") as raised:
        make_folder("train", out, NOW)
    assert f"try: --out {out}-2" in str(raised.value)
    with pytest.raises(LaunchError, match="is a file"):
        make_folder("train", out / "run.json", NOW)
    with pytest.raises(
        LogError, match=r"cannot be created: Not a directory\n  got: --out .*run.json/one\n  expected: .*"
    ):
        make_folder("train", out / "run.json" / "one", NOW)


def test_run_configuration_is_stored() -> None:
    order = RunConfig(Path("a/train.py"), args=("--lr", "1"), workers=2, recipe="diloco()", seed=3, threads=5)
    asked = describe(order.record(), NOW)
    assert (asked["script"], asked["args"], asked["recipe"]) == ("a/train.py", ("--lr", "1"), "diloco()")
    assert (asked["workers"], asked["seed"], asked["threads"]) == (2, 3, 5)
    assert (asked["single_process"], asked["global_batch_of"]) == (False, 1)
    assert asked["started"].startswith("2026-11-21T10:45:00")
    assert set(asked["versions"]) == {"python", "torch", "numpy"}
    assert asked["versions"]["torch"][0].isdigit()
    assert asked["machine"]["memory_gib"] > 0


def test_run_folder_is_private(tmp_path: Path) -> None:
    """Also a folder that existed; no other user can put a link into it."""
    (tmp_path / "old").mkdir(mode=0o777)
    for out in (tmp_path / "old", tmp_path / "new", tmp_path / "deep/new"):
        assert stat.S_IMODE(make_folder("a", out, NOW).stat().st_mode) == 0o700


def test_a_link_that_the_group_of_a_folder_places_before_the_run_owns_it_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, victim, check = tmp_path / "run", tmp_path / "victim", run_dir.check_owner
    out.mkdir()
    out.chmod(0o770)
    victim.write_text("untouched")

    def place(folder: Path, option: str, **more: Any) -> None:
        check(folder, option, **more)
        (folder / "run.json").symlink_to(victim)

    monkeypatch.setattr(run_dir, "check_owner", place)
    with pytest.raises(LaunchError, match="exists and is not empty"):
        write_run(make_folder("a", out, NOW), {}, NOW)
    assert victim.read_text() == "untouched"


def test_folders_that_other_users_may_write_are_refused(tmp_path: Path) -> None:
    """Before a run uses one: a link in it would lead its files elsewhere, and a checkpoint in it may be forged."""
    open_to_all = tmp_path / "all"
    (open_to_all / CHECKPOINTS).mkdir(parents=True)
    for mode in (0o770, 0o777):
        open_to_all.chmod(mode)
        with pytest.raises(LaunchError, match=rf"--resume .*all, owner \d+, mode {mode:o}") as caught:
            check(RunConfig(script=Path(__file__), resume=open_to_all))
        assert f"try: chmod go-w {open_to_all}, or a copy" in str(caught.value)
    (open_to_all / CHECKPOINTS).rmdir()
    with pytest.raises(LaunchError, match=r"--out .*all, owner \d+, mode 777"):
        make_folder("a", open_to_all, NOW)
    if os.geteuid() == 0:
        open_to_all.chmod(0o700)
        os.chown(open_to_all, 12345, -1)
        with pytest.raises(LaunchError, match=r"owner 12345") as caught:
            make_folder("a", open_to_all, NOW)
        assert "--out" in str(caught.value)


def test_address_of_a_store_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--copy-to s3://bucket/run"):
        make_folder("a", Path("s3://bucket/run"), NOW)
    assert not Path("s3:").exists()
