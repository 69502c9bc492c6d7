"""The README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from stretto.recipe.named import catalogue, markdown_table
from stretto.recipe.parser import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_recipes_is_the_codes() -> None:
    begin, end = "<!-- made by `stretto recipes --markdown` -->\n", "<!-- end -->"
    assert README.partition(begin)[2].partition(end)[0].strip() == markdown_table(catalogue())


def test_recipes_that_the_documents_name_can_be_typed() -> None:
    documents = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    named = re.compile(r"[`\"]((?:allreduce|local_sgd|diloco|Recipe)\([^`]*?\))[`\"]")
    found = {text for document in documents for text in named.findall(document)}
    assert len(found) >= 3
    for text in found:
        if "..." not in text and "k," not in text:
            parse(text)


def test_every_file_that_the_readme_names_is_there() -> None:
    named = set(re.findall(r"`((?:tests|docs|examples|benchmarks)/[\w./]+)`|\]\(([\w./]+)\)", README))
    for pair in named:
        assert (ROOT / (pair[0] or pair[1])).exists(), pair
