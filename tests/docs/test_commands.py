"""Command lines in the documents can be typed: programs, options, their values, recipes and make targets exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from documents import PRESENT, ROOT, blocks, commands, spans

from stretto import free_ports
from stretto.cli.main import app
from stretto.faults import plan
from stretto.recipe.parser import parse
from stretto.simulator.compute import speed
from stretto.simulator.network import topology

GROUP: Any = typer.main.get_command(app)
VALUES = {"network": topology.parse, "speeds": speed.parse, "faults": plan.parse, "ports": free_ports.parse}
"""Parser of each option's text."""

pages = pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)


def check(words: list[str]) -> None:
    """Read a command line of stretto without running it."""
    _, name, *arguments = words
    if name.startswith("-") or name == "COMMAND":
        return
    assert name in GROUP.commands, f"no command {name}"
    root = GROUP.make_context("stretto", [name], resilient_parsing=True)
    try:
        given = GROUP.commands[name].make_context(name, arguments, parent=root).params
    except Exception as error:
        if type(error).__name__ == "MissingParameter":  # a mention of a command, not a whole line
            return
        raise
    for recipe in given["recipe"] if isinstance(given.get("recipe"), list) else [given.get("recipe")]:
        if recipe is not None and re.fullmatch("[A-Z]", recipe) is None:
            parse(recipe)
    for option, read in VALUES.items():
        if given.get(option):
            read(given[option])


@pages
def test_command_lines_of_stretto_can_be_typed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("run.toml", "runs/RUN/run.json"):  # the documents name these files
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}" if file.endswith("json") else "workers = 2\n")
    for words in commands(page, "stretto"):
        try:
            check(words)
        except Exception as error:
            raise AssertionError(f"{page.name}: {' '.join(words)}: {error}") from error


def test_a_command_line_with_an_unknown_option_is_found() -> None:
    for line in ("stretto run --no-such train.py", "stretto no-such", "stretto run --recipe no_such train.py"):
        with pytest.raises(Exception, match="no"):
            check(line.split())


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for _, *names in commands(page, "make"):
        assert {name for name in names if "=" not in name} <= targets, f"{page.name}: make {' '.join(names)}"


@pytest.mark.parametrize("program", ["benchmarks", "experiments"])
def test_names_of_benchmarks_and_experiments_exist(program: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"[\w-]+", shown.stdout)) | {"convex"}
    for page in PRESENT:
        for words in commands(page, "python"):
            if words[1:3] == ["-m", program] and words[3:]:
                asked = [words[3], *(word for word in words[4:] if word.startswith("--"))]
                unknown = set() if words[3] == "convex" else {word.removeprefix("--") for word in asked} - known
                assert not unknown, f"{page.name}: {' '.join(words)}"


@pages
def test_recipes_in_code_can_be_typed(page: Path) -> None:
    named = re.compile(r"(?:allreduce|local_sgd|diloco|sparse_loco|power_sgd|async_sgd|soft_sync|Recipe)\(.*\)")
    for span in spans(page):
        if named.fullmatch(span) and "..." not in span and not re.search(r"\b[kgnN]\b", span):
            parse(span)


@pytest.mark.parametrize(("title", "read"), [("Networks", topology.parse), ("Speeds", speed.parse)])
def test_networks_and_speeds_of_the_page_can_be_typed(title: str, read: Any) -> None:
    section = (ROOT / "docs" / "simulate.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    texts = [
        text.strip('"') for text in re.findall(r'`("[^`]+"|\w+)`', section) if text.startswith('"') or text == "equal"
    ]
    assert len(texts) > 4
    for text in texts:
        if "FILE" not in text:
            read(text)


def test_scripts_in_blocks_are_python() -> None:
    for page in PRESENT:
        for text in blocks(page, "python"):
            compile(text, page.name, "exec")
