"""Generated parts of the documents equal what the code says."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
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


def test_the_page_of_figures_equals_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from benchmarks import figures

    made = tmp_path / "figures.md"
    shutil.copy(ROOT / "docs" / "figures.md", made)
    figures.write(made)
    assert made.read_text() == (ROOT / "docs" / "figures.md").read_text(), (
        "python -m benchmarks figures writes it again"
    )


def test_the_page_of_experiments_equals_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from experiments import page

    made = tmp_path / "experiments.md"
    shutil.copy(ROOT / "docs" / "experiments.md", made)
    page.write(made)
    assert made.read_text() == (ROOT / "docs" / "experiments.md").read_text(), (
        "python -m experiments page writes it again"
    )
