"""Which objects and processes the hooks take, without any library."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

import stretto
from stretto import trainers
from stretto.errors import ScriptError


def test_an_unknown_trainer_is_refused_by_the_name_of_its_class() -> None:
    with pytest.raises(ScriptError, match=r"got: .*test_take.Mine(.|\n)*try: loader = stretto.distribute"):
        stretto.take(type("Mine", (), {"__module__": "test_take"})())


def test_libraries_are_watched_and_not_imported() -> None:
    watched = list[str]()

    def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
        watched.append(name)

    trainers.watch(after_import)
    assert watched == list(trainers.FILES)
