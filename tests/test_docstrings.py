"""Docstring examples run, and the public API is documented."""

from __future__ import annotations

import contextvars
import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import stretto
from stretto import trainers

MODULES = sorted(one.name for one in pkgutil.walk_packages(stretto.__path__, "stretto."))
LIBRARIES = {f"{trainers.__name__}.{file}": name.partition(".")[0] for name, file in trainers.FILES.items()}
"""By module of the package: the library that it needs."""


def imported(name: str) -> ModuleType:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = imported(name)
    found = contextvars.copy_context().run(doctest.testmod, module)
    assert found.failed == 0


@pytest.mark.parametrize("name", ["distribute", "log", "no_sync", "parse", "Recipe"])
def test_public_api_has_examples(name: str) -> None:
    assert ">>>" in (inspect.getdoc(getattr(stretto, name)) or "")


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name: str) -> None:
    module = imported(name)
    assert module.__doc__
    for thing in vars(module).values():
        if (
            (inspect.isroutine(thing) or inspect.isclass(thing))
            and thing.__module__ == name
            and not thing.__name__.startswith("_")
        ):
            assert inspect.getdoc(thing), f"{name}.{thing.__name__} has no docstring"
