"""A codec of another package, given by its import path, keeps its state wherever a built-in codec does."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_codec
import pytest
import torch
from elastic_workers import ThreadCoordinator, WorkerKilled, run_elastic_workers
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import RecipeError
from stretto.interval import every
from stretto.recipe.parser import parse

RECIPES = [
    "allreduce(how=foreign_codec.drifting(weight=0.05))",
    "local_sgd(every=3, how=foreign_codec.drifting(weight=0.05))",
    "Recipe(what=gradient_differences(beta=0.5), how=foreign_codec.drifting(weight=0.05))",
]


SCRIPT = """
import torch, stretto
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
for a, b in stretto.distribute(net, optimizer, loader):
    optimizer.zero_grad()
    ((net(a) - b) ** 2).mean().backward()
    optimizer.step()
"""


def undisturbed(_worker: int, _moment: int) -> None:
    """Do not disturb the run."""


def training(epochs: int, disturb: Callable[[int, int], None] = undisturbed) -> Callable[[int], Any]:
    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
        loader: Any = DataLoader(regression(96), batch_size=4, shuffle=False)
        loader = stretto.distribute(net, optimizer, loader)
        step = 0
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                disturb(worker, 2 * step)
                nn.functional.mse_loss(net(x), y).backward()
                disturb(worker, 2 * step + 1)
                optimizer.step()
                step += 1
        return flat(net)

    return work


def all_equal(found: list[Any]) -> bool:
    return all(torch.equal(one, found[0]) for one in found)


def test_an_import_path_is_parsed_and_printed_back() -> None:
    recipe = parse("allreduce(how=foreign_codec.drifting(0.25))")
    assert recipe.how == foreign_codec.drifting(0.25)
    assert parse(str(recipe)) == recipe
    assert parse(recipe.spelled()) == recipe


@pytest.mark.parametrize(
    ("path", "got"),
    [
        ("no_such_module.codec(1)", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("foreign_codec.missing()", "AttributeError: module 'foreign_codec' has no attribute 'missing'"),
        ("foreign_codec.factory()", "a function"),
        ("foreign_codec.Drift(3)", "class Drift"),
        ("foreign_codec.no_dataclass()", "class no_dataclass, which is no dataclass"),
        ("os.system('true')", "a builtin_function_or_method"),
    ],
)
def test_a_wrong_import_path_is_one_error(path: str, got: str) -> None:
    with pytest.raises(RecipeError, match="is not an answer that can be imported") as found:
        parse(f"allreduce(how={path})")
    assert f"got: {got}" in str(found.value)
    assert "stretto.how.Codec" in str(found.value)


def test_an_import_path_is_accepted_only_in_the_place_of_a_codec() -> None:
    for text in ("foreign_codec.drifting()", "allreduce(how=(1).real)", "allreduce(how=foreign_codec.drifting()())"):
        with pytest.raises(RecipeError, match="not a recipe|--recipe cannot be read"):
            parse(text)
    with pytest.raises(RecipeError, match="no option 'wight'"):
        parse("allreduce(how=foreign_codec.drifting(wight=1))")


def test_a_codec_with_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("drift", "foreign_codec:drifting", "stretto.codecs")

    def found(**asked: str) -> list[Any]:
        return [point] if asked == {"group": "stretto.codecs", "name": "drift"} else []

    monkeypatch.setattr("stretto.recipe.parser.entry_points", found)
    assert parse("allreduce(how=drift(0.5))").how == foreign_codec.drifting(0.5)
    with pytest.raises(RecipeError, match="no recipe or answer is called 'drifts'"):
        parse("allreduce(how=drifts(0.5))")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_repeated_round_starts_from_the_state_before_its_first_attempt(recipe: str, tmp_path: Path) -> None:
    quiet, _ = run_elastic_workers(3, training(epochs=1), recipe, tmp_path / "quiet")
    coordinator = ThreadCoordinator(3)
    left = {4, 9, 12}

    def disturb(worker: int, moment: int) -> None:
        if worker == 1 and moment in left:
            left.discard(moment)
            coordinator.abort(coordinator.generations[-1].generation)

    found, _ = run_elastic_workers(
        3, training(epochs=1, disturb=disturb), recipe, tmp_path / "broken", coordinator=coordinator
    )
    assert len(coordinator.generations) > 2, "rounds were repeated"
    if not recipe.startswith("Recipe"):  # gradient differences restart at 0 in each new generation
        assert all(torch.equal(one, quiet[0]) for one in found)
    assert all_equal(found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_equals_the_uninterrupted_run(recipe: str, tmp_path: Path) -> None:
    whole, _ = run_elastic_workers(2, training(epochs=2), recipe, tmp_path / "whole")
    run_elastic_workers(2, training(epochs=1), recipe, tmp_path / "one", checkpoint=every("1 rounds"))
    found, _ = run_elastic_workers(2, training(epochs=2), recipe, tmp_path / "two", resume=tmp_path / "one")
    assert all(torch.equal(one, whole[0]) for one in found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_codec_states_are_reset_when_members_fail_or_join(recipe: str, tmp_path: Path) -> None:
    foreign_codec.MEMBERS.clear()
    left = {(1, 3)}

    def disturb(worker: int, moment: int) -> None:
        if (worker, moment) in left:
            left.clear()
            raise WorkerKilled

    found, _ = run_elastic_workers(3, training(epochs=4, disturb=disturb), recipe, tmp_path, again=1)
    assert all_equal(found)
    assert all(isinstance(one, torch.Tensor) for one in found)
    assert set(foreign_codec.MEMBERS) == {2, 3}


def test_a_codec_beside_the_script_works_at_a_server(tmp_path: Path) -> None:
    """The servers import the codec too, though only the launcher and the workers know the script."""
    shutil.copy(foreign_codec.__file__, tmp_path / "beside_the_script.py")
    (tmp_path / "train.py").write_text(SCRIPT)
    recipe = "async_sgd(how=both_ways(beside_the_script.drifting(0.05), top_k(0.5)))"
    command = [sys.executable, "-m", "stretto.cli.main", "run", "-n", "2", "--recipe", recipe, "train.py"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
