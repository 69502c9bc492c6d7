"""Runs that a program starts with `stretto.run`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_place import Place

import stretto
from stretto.errors import LaunchError
from stretto.launcher import program
from stretto.launcher.program import OnCluster
from stretto.run_config import RunConfig

SCRIPT = """
import sys, torch, stretto
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
x = torch.randn(32, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
for a, b in stretto.distribute(net, optimizer, loader):
    optimizer.zero_grad()
    ((net(a) - b) ** 2).mean().backward()
    optimizer.step()
"""


def test_result_has_the_folder_the_trained_model_and_the_page(place: Place) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    result = stretto.run("train.py", 0.1, workers=2, recipe="local_sgd(every=2)", out="found", quiet=True)
    assert result.folder == Path("found") and result.report.read_text().startswith("<!doctype html>")
    assert {name: tuple(one.shape) for name, one in result.state.items()} == {"weight": (1, 4), "bias": (1,)}


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the list of configurations that are run, and do nothing."""
    found: list[RunConfig] = []
    monkeypatch.setattr(program, "run_locally", lambda config, _: found.append(config) or Path("run"))
    monkeypatch.setattr("stretto.report.summary.conclude", lambda *_, **__: None)
    return found


def test_arguments_are_those_of_the_command(configured: list[RunConfig]) -> None:
    on = stretto.ray("ray://head:10001", resources="1 GPU")
    assert on == OnCluster("ray://head:10001", "1 GPU")
    stretto.run("train.py", "--lr", 1, workers=4, on=on, elastic=(2, 16), out="found", copy_to=None)
    wanted = {"workers": 4, "on": on.on, "resources": "1 GPU", "min_workers": 2, "max_workers": 16}
    assert configured == [RunConfig(Path("train.py"), ("--lr", "1"), out=Path("found"), **wanted)]
    assert stretto.spark(address="spark://head:7077", resources="4 CPU") == OnCluster("spark://head:7077", "4 CPU")
    stretto.run("train.py", on="ray")
    assert (configured[1].on, configured[1].resources) == ("ray", None)


@pytest.mark.parametrize(
    ("arguments", "cause", "to_type"),
    [
        ({"recepi": "allreduce"}, "stretto.run has no option recepi", "recipe="),
        ({"single_process": True}, "stretto.run has no option single_process", ""),
        ({"workers": "four"}, "an option of stretto.run cannot be read: Expected `int`, got `str`", ""),
    ],
)
def test_wrong_arguments_are_refused(
    configured: list[RunConfig], arguments: dict[str, Any], cause: str, to_type: str
) -> None:
    with pytest.raises(LaunchError, match=cause) as caught:
        stretto.run("train.py", **arguments)
    assert to_type in str(caught.value).partition("try:")[2] and not configured


def test_session_of_spark_without_a_context_in_this_process_is_refused() -> None:
    assert stretto.spark(SimpleNamespace(sparkContext="context")).on == "spark"
    with pytest.raises(LaunchError, match="workers cannot run on this session of Spark"):
        stretto.spark(SimpleNamespace())


def test_a_function_of_this_program_runs_on_this_machine_with_its_values_and_modules(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.folder / "modules").mkdir()
    (place.folder / "modules" / "beside_the_program.py").write_text("START = 2.0")
    monkeypatch.syspath_prepend(place.folder / "modules")
    weight = torch.full((1, 4), 3.0)

    def train(lr: float) -> None:
        from beside_the_program import START  # type: ignore[import-not-found]

        net = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(net.bias, START)
        net.weight.data.copy_(weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=2)

        def values(net: torch.nn.Linear) -> dict[str, float]:
            return {"weight": net.weight[0, 0].item(), "bias": net.bias.item()}

        for _ in range(2):
            for (x,) in stretto.distribute(net, optimizer, loader, evaluate=values):
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()

    result = stretto.run(train, 0.5, workers=2, out="found", quiet=True)
    assert result.metrics == {"weight": 1.0, "bias": 0.0}  # two steps with gradients of one, in each of two sections
    assert result.state["weight"][0, 0] == 1.0
    assert result.record["samples"] == 8


def test_a_function_that_cannot_be_packed_is_refused(configured: list[RunConfig], tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file, pytest.raises(LaunchError, match="cannot be sent to the workers"):
        stretto.run(lambda: file.write("1"), workers=2)
    assert not configured
