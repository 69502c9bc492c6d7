"""Reads the README and the pages under docs/: their code blocks, code spans, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
HISTORY = ("log.md", "CHANGELOG.md")
"""Pages that also name removed things."""
PRESENT = [page for page in PAGES if page.name not in HISTORY]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
_SPAN = re.compile(r"`([^`\n]+)`")


def blocks(page: Path, language: str | None = None) -> list[str]:
    """Return the code blocks of a page, of all languages or of one."""
    return [text for name, text in _FENCE.findall(page.read_text()) if language in (None, name)]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Return the code spans of a page."""
    return _SPAN.findall(prose(page))


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", _SPAN.sub("", prose(page)))


def headings(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(page: Path, *programs: str) -> Iterator[list[str]]:
    """Yield the command lines of a page that begin with one of the programs, in blocks and in spans."""
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    for line in [*lines, *spans(page)]:
        if not line.startswith(tuple(f"{program} " for program in programs)):
            continue
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            if words and "..." not in words:
                yield words
