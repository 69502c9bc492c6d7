"""Docstrings, comments, pages and messages follow the rules of writing in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("stretto", "tests", "benchmarks", "experiments", "examples")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md")]
"""The log keeps the words of its time."""
FIRST_WORDS = re.compile(
    r"(What|Who|Whom|Whose|Whether|Those|Of|That|As|So|Where|Nobody|Somebody|Whoever|Others|How)\b"
)
"""Words that begin no docstring: a function's begins with a verb, a class's with a noun phrase."""
BANNED = re.compile(
    r"\b(anew|meanwhile|nobody|somebody|whoever|whomever|go on|goes on|went on|going on|is gone|are gone|so many"
    r"|so long|so much|the like|in good order|born|buried|bury|owed|owes|tell(s|ing)? on|told on|hear[sd]? of"
    r"|stands? still)\b",
    re.IGNORECASE,
)
THIS = Path(__file__)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file and their lines."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and attributes, and their lines."""
    for node in nodes(path):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a file that hold several words: texts of errors, notices, help and pages."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.lineno, node.value


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def banned(path: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    """Return the places of banned words, outside code within backticks."""
    found = ((line, BANNED.search(re.sub(r"`[^`]*`", "", text))) for line, text in texts)
    return [f"{path.relative_to(ROOT)}:{line}: {match[0]}" for line, match in found if match is not None]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_start_with_a_verb_or_a_noun(folder: str) -> None:
    paths = [path for path in CODE if path.is_relative_to(ROOT / folder)]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:40]}"
        for path in paths
        for line, text in docstrings(path)
        if FIRST_WORDS.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_use_plain_words(folder: str) -> None:
    paths = [path for path in CODE if path.is_relative_to(ROOT / folder) and path != THIS]
    wrong = [place for path in paths for texts in (docstrings, comments) for place in banned(path, texts(path))]
    assert not wrong, "\n".join(wrong)


def test_messages_use_plain_words() -> None:
    paths = [path for path in CODE if path.is_relative_to(ROOT / "stretto")]
    wrong = [place for path in paths for place in banned(path, messages(path))]
    assert not wrong, "\n".join(wrong)


def test_pages_use_plain_words() -> None:
    wrong = [place for path in PAGES for place in banned(path, paragraphs(path))]
    assert not wrong, "\n".join(wrong)
