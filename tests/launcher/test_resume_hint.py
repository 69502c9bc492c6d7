"""Tests of the lines about runs that are continued."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from stretto.launcher.resume_hint import left_out
from stretto.run_config import RunConfig
from stretto.run_dir import write_run

TYPED = RunConfig(Path("train.py"), workers=2, recipe="local_sgd(every=4)", lr_scale="linear", global_batch="keep")


def test_options_that_a_continued_run_leaves_out_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, TYPED.record(), datetime.now())
    line = left_out(RunConfig(Path("train.py"), workers=3, resume=tmp_path)) or ""
    assert "--recipe 'local_sgd(every=4)' --lr-scale linear," in line


def test_options_that_are_typed_again_or_chosen_otherwise_are_not_named(tmp_path: Path) -> None:
    write_run(tmp_path, TYPED.record(), datetime.now())
    chosen = RunConfig(Path("train.py"), recipe="allreduce", lr_scale="sqrt", resume=tmp_path)
    assert left_out(chosen) is None
    assert left_out(RunConfig(Path("train.py"))) is None
    write_run(tmp_path, RunConfig(Path("train.py")).record(), datetime.now())
    assert left_out(RunConfig(Path("train.py"), resume=tmp_path)) is None
