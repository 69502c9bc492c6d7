"""Runs that a program starts with `stretto.run`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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


def test_function_needs_a_cluster_that_sends_it(configured: list[RunConfig]) -> None:
    def train() -> None:
        raise AssertionError("it does not run here")

    with pytest.raises(LaunchError, match="a function runs on a cluster only") as caught:
        stretto.run(train, workers=2)
    assert "on=stretto.ray()" in str(caught.value) and not configured
