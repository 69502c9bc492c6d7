"""Properties of the separation of our options from the script's arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.exceptions import TyperException

from stretto.cli.script_arguments import hint, nearest, split

OPTIONS = {"-n": True, "--workers": True, "--recipe": True, "--seed": True, "--quiet": False, "--help": False}

words = st.text(st.characters(codec="ascii", exclude_characters="-", categories=("L", "N")), min_size=1)
ours = st.sampled_from([["-n", "4"], ["-n4"], ["--workers=4"], ["--recipe", "diloco()"], ["--seed", "-1"], ["--quiet"]])


@given(st.lists(ours), st.booleans(), words, st.lists(st.one_of(st.text(), st.sampled_from([*OPTIONS, "--"]))))
def test_options_end_at_the_script_and_all_later_words_are_its_arguments(
    before: list[list[str]], ended: bool, script: str, after: list[str]
) -> None:
    mine = [word for part in before for word in part]
    parts = split([*mine, *["--"] * ended, script, *after], OPTIONS)
    assert parts.ours == mine
    assert parts.script == [script, *after]


@pytest.mark.parametrize("line", [["--recpie", "x", "train.py"], ["-n", "4", "--recpie=x", "train.py"]])
def test_unknown_option_before_the_script_is_refused_with_the_three_nearest(line: list[str]) -> None:
    with pytest.raises(TyperException, match="there is no option --recpie") as raised:
        split(line, OPTIONS)
    assert (
        f"the nearest are {', '.join(nearest('--recpie', ['--recipe', '--quiet', '--workers', '--seed', '--help']))}"
        in str(raised.value)
    )
    assert "the nearest are --recipe, " in str(raised.value)


def test_script_option_before_the_script_is_refused() -> None:
    """It is unknown whether a value follows it, so it is unknown which word is the script."""
    with pytest.raises(TyperException, match="there is no option --lr") as raised:
        split(["--lr", "0.1", "train.py"], OPTIONS)
    assert "try: SCRIPT --lr" in str(raised.value)


def test_missing_value_is_left_to_the_parser() -> None:
    assert split(["-n"], OPTIONS).ours == ["-n"]


def test_hint_shows_the_command_if_all_options_follow_the_script() -> None:
    line = ["train.py", "--lr", "1", "-n", "4", "--recipe", "local_sgd(every=4)", "--", "-n"]
    said = hint("stretto run", split(line, OPTIONS), OPTIONS)
    assert said == (
        "arguments after train.py belong to it: -n 4 --recipe 'local_sgd(every=4)' is given to the script; options "
        "stand before the script: stretto run -n 4 --recipe 'local_sgd(every=4)' train.py --lr 1 -- -n"
    )


@pytest.mark.parametrize(
    "line",
    [
        ["-n", "2", "train.py", "--seed", "3"],
        ["--", "train.py", "--seed", "3"],
        ["train.py", "--", "--seed", "3"],
        ["train.py", "--lr", "3"],
        ["train.py", "--help"],
        [],
    ],
)
def test_intended_command_gets_no_hint(line: list[str]) -> None:
    assert hint("stretto run", split(line, OPTIONS), OPTIONS) is None
