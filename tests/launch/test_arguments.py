"""Laws of telling our options from the script's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.exceptions import TyperException

from stretto.launch.arguments import split

OPTIONS = {"-n": True, "--workers": True, "--recipe": True, "--seed": True, "--quiet": False, "--help": False}

words = st.text(st.characters(codec="ascii", exclude_characters="-", categories=("L", "N")), min_size=1)
ours = st.sampled_from([["-n", "4"], ["-n4"], ["--workers=4"], ["--recipe", "diloco()"], ["--seed", "-1"], ["--quiet"]])
theirs = st.sampled_from([["--lr", "0.1"], ["-v"], ["--lr=0.1"], ["data"], ["-0.5"], ["-"], ["--nesterov"]])


@given(st.lists(ours), words, st.lists(st.one_of(ours, theirs)), st.lists(st.text()))
def test_every_word_goes_to_one_side_in_its_order(
    before: list[list[str]], script: str, after: list[list[str]], untouched: list[str]
) -> None:
    mine = [word for part in [*before, *after] if part in OURS for word in part]
    rest = [word for part in after if part not in OURS for word in part]
    line = [word for part in before for word in part] + [script] + [word for part in after for word in part]
    parts = split([*line, "--", *untouched], OPTIONS)
    assert parts.ours == mine
    assert parts.script == [script, *rest, *untouched]


OURS = [["-n", "4"], ["-n4"], ["--workers=4"], ["--recipe", "diloco()"], ["--seed", "-1"], ["--quiet"]]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--recpie", "--recipe"), ("--worker", "--workers"), ("--sead=3", "--seed"), ("--quite", "--quiet")],
)
def test_a_slip_is_refused_with_the_nearest(typed: str, meant: str) -> None:
    for line in (["train.py", typed, "x"], [typed, "x", "train.py"]):
        with pytest.raises(TyperException, match=f"there is no option {typed.partition('=')[0]}") as raised:
            split(line, OPTIONS)
        assert f"expected: {meant}" in str(raised.value)
        assert "everything after -- goes to the script untouched" in str(raised.value)
    assert split(["train.py", "--", typed], OPTIONS).script == ["train.py", typed]


def test_an_option_of_the_script_before_it_is_refused() -> None:
    """Whether a value follows it is not known, so neither is which word is the script."""
    with pytest.raises(TyperException, match="there is no option --lr"):
        split(["--lr", "0.1", "train.py"], OPTIONS)


def test_a_missing_value_is_left_to_the_parser() -> None:
    assert split(["train.py", "-n"], OPTIONS).ours == ["-n"]
