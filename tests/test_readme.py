"""The README is short and matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from stretto.recipe.named import NAMED
from stretto.recipe.parser import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LONGEST = 150


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= LONGEST


def test_recipes_of_the_readme_exist_and_their_number_is_right() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| [A-Z]", README, re.M)
    named = [text for text in rows if text.partition("(")[0] in NAMED]
    assert len(named) == 11
    for text in named:
        assert parse(text)
    assert f"All {len(NAMED)} with their options" in README


def test_every_command_is_in_the_table() -> None:
    from stretto.cli.main import app

    names = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    assert not [name for name in names if f"stretto {name}" not in README]


def test_every_page_is_linked() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [name for name in pages if f"]({name})" not in index]
    assert not [name for name in pages - {"api.md"} if f"](docs/{name})" not in README]


def test_situations_of_the_readme_are_the_first_of_the_page_on_choosing() -> None:
    """The README's answers may be shorter."""
    choosing = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs" / "choosing.md").read_text(), re.M)
    start = choosing.index(("your situation", "start with"))
    readme = re.findall(r"^\| (.+?) \| (.+) \|$", README, re.M)
    at = readme.index(("your situation", "start with"))
    for (situation, answer), (full_situation, full_answer) in zip(
        readme[at + 1 : at + 6], choosing[start + 1 : start + 6], strict=True
    ):
        assert situation == full_situation and full_answer.startswith(answer)
