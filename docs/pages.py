"""The parts of docs/recipes.md that are made from code.

`python docs/pages.py` writes them; `tests/docs/test_pages.py` checks that the page equals the code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path

from stretto import codecs
from stretto.recipe import then, what, when, whom
from stretto.recipe.named import catalogue, markdown_table
from stretto.recipe.then import Weight
from stretto.spec import Answer, literal

PAGE = Path(__file__).parent / "recipes.md"


def answers(module: object, base: type[Answer] | None = None) -> list[type[Answer]]:
    """Return the answers of a module in the order of their definition; only those derived from `base`, if given."""
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Answer)]
    own = [one for one in found if one.__name__.islower() and (base is None or issubclass(one, base))]
    return sorted(own, key=lambda one: (one.__module__, inspect.getsourcelines(one)[1]))


def signature(answer: type[Answer]) -> str:
    """Return the call of an answer with the defaults of its fields."""
    return f"{answer.__name__}({', '.join(map(_field, fields(answer)))})"  # type: ignore[arg-type]


def _field(field: Field[object]) -> str:
    return field.name if field.default is MISSING else f"{field.name}={literal(field.default)}"


def sentence(answer: type[Answer]) -> str:
    """Return the first paragraph of a docstring, as a cell of a table."""
    return " ".join((inspect.getdoc(answer) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def table(head: str, rows: Iterable[type[Answer]]) -> str:
    """Return a table in Markdown: an answer, its meaning, its papers."""
    lines = [f"| `{signature(one)}` | {sentence(one)} | {'; '.join(one.papers)} |" for one in rows]
    return "\n".join([f"| {head} | meaning | papers |", "| --- | --- | --- |", *lines])


def _then() -> list[type[Answer]]:
    return [one for one in answers(then) if not issubclass(one, Weight)]


PARTS: dict[str, Callable[[], str]] = {
    "recipes": lambda: markdown_table(catalogue()),
    "what": lambda: table("what", answers(what)),
    "when": lambda: table("when", answers(when)),
    "whom": lambda: table("whom", answers(whom)),
    "then": lambda: table("then", _then()),
    "weights": lambda: table("weight", answers(then, Weight)),
    "codecs": lambda: table("codec", answers(codecs)),
}
"""The parts of the page by the name in their marks."""


def render(page: str) -> str:
    """Return the page with each part between its marks replaced by what the code says today."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"docs/recipes.md has no marks for {name}")
        page = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    text = render(PAGE.read_text())
    if sys.argv[1:] == ["--check"]:
        sys.exit(text != PAGE.read_text())
    PAGE.write_text(text)
