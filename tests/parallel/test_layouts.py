"""Layouts as values: parsed, printed, listed, and checked against the number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cli.main import command
from stretto.errors import LaunchError, RecipeError
from stretto.launcher.config import check, described, settled
from stretto.recipe.layout import LAYOUTS, Layout, blocks, catalogue, pipeline, sharded, whole
from stretto.recipe.parser import parse_layout
from stretto.run_config import RunConfig

PIPELINES = st.builds(
    pipeline, stages=st.integers(2, 256), micro_batches=st.integers(1, 99), recompute=st.booleans()
) | st.builds(pipeline, stages=st.just(3), split=st.just("blocks.1, blocks.4"))


@given(PIPELINES | st.just(whole()) | st.builds(sharded, over=st.integers(2, 256)))
def test_printed_layout_can_be_parsed(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipelin(2)", 'try: --layout "pipeline(stages=2)"'),
        ("local_sgd", "expected: a layout with its options (see `stretto layouts`)"),
        ("pipeline(stages=1)", "expected: a whole number at least 2 and at most 256"),
        ("pipeline(2, micro=3)", "try: pipeline(micro_batches=3)"),
        ('pipeline(3, split="a")', 'try: pipeline(stages=3, split="blocks.4, blocks.8")'),
        ("pipeline(3, split=4)", 'try: pipeline(3, split="name")'),
        ('pipeline(3, split="a, a")', "2 different names of modules"),
        ("pipeline(2) 3", "expected: the end"),
        ('blocks(("users", x), "items")', "expected: constants, with commas between them"),
        ('blocks(("users"', "expected: `,` or `)`"),
        ('blocks(("users", 2), "items")', "rows of blocks must be a name in quotes, got ('users', 2)"),
        ("sharded(over=1)", "expected: a whole number at least 2 and at most 256"),
        ("sharded(stages=2)", "expected: the options over"),
    ],
)
def test_wrong_layouts_are_refused_with_what_to_type(text: str, expected: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse_layout(text)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ('blocks(rows=("users",), columns=("items",))', blocks(rows=("users",), columns=("items",))),  # type: ignore[arg-type]
        ('blocks(["users", "bias"], "items", column_blocks=2)', blocks("users, bias", "items", column_blocks=2)),
        ("pipeline(3, split=['a', 'b'])", pipeline(3, split=["a", "b"])),  # type: ignore[arg-type]
    ],
)
def test_names_may_be_a_list(text: str, layout: Layout) -> None:
    assert parse_layout(text) == layout == parse_layout(str(layout))


def test_the_catalogue_has_all_layouts() -> None:
    assert [entry["name"] for entry in catalogue()] == list(LAYOUTS)
    assert catalogue()[1]["signature"] == 'pipeline(stages, micro_batches=4, split="measured", recompute=False)'


def test_layouts_are_listed_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["layouts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(catalogue()))
    assert command(["layouts"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are broken between words
    assert all(entry["signature"] in shown and entry["sentence"] in shown for entry in catalogue())


def config(tmp_path: Path, **options: Any) -> RunConfig:
    """Return the configuration of a run of an empty script."""
    script = tmp_path / "train.py"
    script.touch()
    return RunConfig(script, **{"layout": "pipeline(stages=4)", "workers": 8} | options)


def test_processes_are_divided_into_workers(tmp_path: Path) -> None:
    asked = config(tmp_path)
    check(asked)
    found = settled(asked)
    assert (found.workers, found.ranks, settled(found).workers) == (2, 4, 2)
    assert "2 workers of 4 processes each, pipeline(stages=4)" in described(found)
    assert settled(config(tmp_path, layout="sharded(2)")).workers == 4
    assert settled(config(tmp_path, layout="whole()")).workers == 8
    assert settled(config(tmp_path, workers=4)).elastic


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"workers": 6}, 'try: -n 8 --layout "pipeline(stages=4)"'),
        ({"workers": 3}, 'try: -n 4 --layout "pipeline(stages=4)"'),
        ({"recipe": "allreduce", "servers": 2}, "that wait for each other exchange without a parameter server"),
        ({"recovery": False}, "cannot run with --no-recovery yet"),
    ],
)
def test_layouts_that_the_processes_cannot_have_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(LaunchError) as raised:
        check(config(tmp_path, **options))
    assert expected in str(raised.value)
