"""The examples in docstrings run, and what is public has a docstring."""

from __future__ import annotations

import contextvars
import doctest
import importlib
import inspect
import pkgutil

import pytest

import stretto

MODULES = sorted(one.name for one in pkgutil.walk_packages(stretto.__path__, "stretto."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    found = contextvars.copy_context().run(doctest.testmod, module)
    assert found.failed == 0


@pytest.mark.parametrize("name", ["distribute", "log", "no_sync", "parse", "Recipe"])
def test_the_face_has_examples(name: str) -> None:
    assert ">>>" in (inspect.getdoc(getattr(stretto, name)) or "")


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for thing in vars(module).values():
        if (
            (inspect.isroutine(thing) or inspect.isclass(thing))
            and thing.__module__ == name
            and not thing.__name__.startswith("_")
        ):
            assert inspect.getdoc(thing), f"{name}.{thing.__name__} has no docstring"
