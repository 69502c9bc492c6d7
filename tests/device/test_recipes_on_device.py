"""Every recipe on the second device, over a transport that takes tensors of that device alone, as NCCL does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from child_process import call
from device_runs import REFUSING, Outcome, results
from training.test_recipes import RECIPES, SYNCHRONOUS, TIMED

from stretto.recipe.parser import parse

UNTIMED = [one for one in SYNCHRONOUS if one not in TIMED]
ASYNCHRONOUS = [one for one in RECIPES if one not in SYNCHRONOUS]
IN_TURN = [one for one in ASYNCHRONOUS if not getattr(parse(one).when, "overlap", False)]
"""Recipes of a server that give one worker the same bits each time: no reply arrives while it computes."""


def both(tmp_path: Path, workers: int, cases: Sequence[str]) -> tuple[list[dict[str, Outcome]], ...]:
    """Return the outcomes of the workers on the CPU, and on the device."""
    near, far = (
        results("recipe", workers, tmp_path / device[:3], device, cases, REFUSING) for device in ("cpu", "far:0")
    )
    return near, far


def wrong(near: list[dict[str, Outcome]], far: list[dict[str, Outcome]]) -> dict[str, object]:
    """Return the cases whose outcome on the device is not that on the CPU."""
    pairs = {case: ([one[case] for one in near], [one[case] for one in far]) for case in near[0]}
    return {case: pair for case, pair in pairs.items() if pair[0] != pair[1] or any("error" in one for one in pair[1])}


@pytest.mark.parametrize("recipes", [UNTIMED[::4], pytest.param(UNTIMED, marks=pytest.mark.long)], ids=["few", "all"])
def test_recipes_of_workers_that_wait_have_the_bits_of_the_cpu(recipes: list[str], tmp_path: Path) -> None:
    assert not wrong(*both(tmp_path, 2, recipes))


@pytest.mark.parametrize("recipes", [IN_TURN[::4], pytest.param(IN_TURN, marks=pytest.mark.long)], ids=["few", "all"])
def test_recipes_of_a_server_have_the_bits_of_the_cpu(recipes: list[str], tmp_path: Path) -> None:
    assert not wrong(*both(tmp_path, 1, recipes))


@pytest.mark.long
def test_simulated_workers_have_the_bits_of_the_cpu() -> None:
    """In virtual time the updates of several workers arrive in the same order on both devices."""
    assert not call("device_runs", "simulated_recipes", [*ASYNCHRONOUS, "allreduce", "local_sgd(every=2)", "gossip"])


@pytest.mark.long
def test_workers_of_a_server_hold_the_same_bits_at_the_end(tmp_path: Path) -> None:
    first, second = results("recipe", 2, tmp_path / "far", "far:0", [*ASYNCHRONOUS, *TIMED], REFUSING)
    apart = {case: (first[case], second[case]) for case in first if first[case] != second[case]}
    assert not apart
    assert not [one for one in first.values() if "error" in one]
