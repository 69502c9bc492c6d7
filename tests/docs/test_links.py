"""Links, anchors and paths in the documents lead to something that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import PAGES, PRESENT, ROOT, headings, links, spans

PATH = re.compile(r"(?:stretto|tests|docs|examples|benchmarks|experiments)/[\w./-]+")
TEST = re.compile(r"\b(tests/[\w/-]+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in headings(target), f"{page.name}: no heading for {link}"


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_paths_in_code_spans_exist(page: Path) -> None:
    for span in spans(page):
        if PATH.fullmatch(span):
            assert (ROOT / span).exists(), f"{page.name}: {span}"


def test_tests_that_the_page_on_security_names_exist() -> None:
    named = TEST.findall((ROOT / "docs" / "security.md").read_text())
    assert named
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_pages_of_the_site_link_to_pages_of_the_site() -> None:
    outside = [f"{page.name}: {link}" for page in (ROOT / "docs").glob("*.md") for link in links(page) if ".." in link]
    assert not outside


def test_every_page_is_in_the_index_and_in_the_menu_of_the_site() -> None:
    """The first page of both is "Getting started"."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    menu = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    listed = [link.partition("#")[0] for link in links(ROOT / "docs" / "index.md") if link.endswith(".md")]
    assert set(listed) == pages and set(menu) == pages | {"index.md"}
    assert listed[0] == menu[1] == "getting-started.md"
