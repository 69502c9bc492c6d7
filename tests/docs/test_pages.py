"""Generated parts of the documents equal what the code says."""

from __future__ import annotations

import runpy

from documents import ROOT

from stretto import codecs
from stretto.recipe.named import NAMED, catalogue, markdown_table


def test_the_page_of_recipes_equals_the_code() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    made = runpy.run_path(str(ROOT / "docs" / "pages.py"))["render"](page)
    assert page == made, "docs/recipes.md differs from the code; python docs/pages.py writes it again"


def test_the_page_has_the_table_that_the_command_prints() -> None:
    assert markdown_table(catalogue()) in (ROOT / "docs" / "recipes.md").read_text()


def test_the_page_has_every_recipe_and_every_codec() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    lower = [name for name in codecs.__all__ if name.islower()]
    assert not [name for name in (*NAMED, *lower) if f"`{name}(" not in page and f"`{name}`" not in page]
