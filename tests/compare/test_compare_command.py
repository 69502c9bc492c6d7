"""The command says what it found, and exits as it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compare.fake_runs import Pretend

from stretto.cli import compare, main
from stretto.compare import runner

RECIPES = ("--recipe", "allreduce", "--recipe", "local_sgd(every=10)")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def pretend(monkeypatch: pytest.MonkeyPatch, run: Pretend) -> Pretend:
    class Pretending(runner.Comparison):
        def __init__(self, *given: object) -> None:
            super().__init__(*given, run)  # type: ignore[arg-type]

    monkeypatch.setattr(compare, "Comparison", Pretending)
    return run


def test_tables_verdict_page_and_json_are_written(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pretend(monkeypatch, Pretend())
    asked = ["compare", "-n", "2", *RECIPES, "--target", "test_accuracy>=0.9", "--json", "found.json", "--out", "found"]
    assert main.command([*asked, str(script), "--lr", "0.1"]) == 0
    shown = capsys.readouterr()
    for text in ("Model distance", "Speed", "Bytes and rounds", "Time breakdown", "page: found/report.html"):
        assert text in shown.out
    assert "Stay on one machine" in shown.out
    assert "[4 of 4]" in shown.err
    found, kept = (json.loads(Path(path).read_text()) for path in ("found.json", "found/compare.json"))
    assert [one["folder"] for one in found["runs"]][:1] == ["found/single-process-seed0"]
    assert len(found["runs"]) == 4
    assert found | {"runs": []} == kept | {"runs": []}
    assert found["verdict"]["sentence"] in " ".join(shown.out.split())
    assert run.orders[0].args == ("--lr", "0.1")
    assert Path("found/report.html").stat().st_size < 1_000_000


STAGED = """
import torch, stretto
torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(64, 32))
loader = torch.utils.data.DataLoader(data, batch_size=8)
for (x,) in stretto.distribute(net, optimizer, loader):
    optimizer.zero_grad()
    loss = (net(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    stretto.log(loss=loss)
"""


@pytest.mark.long
def test_a_pipeline_has_a_row_with_its_measured_and_predicted_pass(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(STAGED)
    layouts = ("--layout", "whole()", "--layout", "pipeline(2)")
    assert main.command(["compare", "-n", "2", *layouts, "--json", "found.json", "--out", "found", str(script)]) == 0
    assert "Stages" in capsys.readouterr().out
    assert "predicted pass" in Path("found/report.html").read_text()
    stages = [one["stages"] for one in json.loads(Path("found.json").read_text())["runs"]]
    assert [one is not None for one in stages] == [False, False, False, True]
    assert stages[-1]["pass_s"] > 0 and stages[-1]["predicted_s"] > 0


def test_several_numbers_of_workers(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pretend(monkeypatch, Pretend())
    assert main.command(["compare", "--workers", "1,2", "--recipe", "allreduce", "--quiet", str(script)]) == 0
    assert [(order.workers, order.global_batch_of) for order in run.orders] == [(1, 1), (1, 2), (1, 1), (2, 1)]
    assert len(list(Path("runs").glob("*-compare-train"))) == 1


def test_servers_and_slow_workers_reach_the_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pretend(monkeypatch, Pretend())
    asked = ["--recipe", "allreduce", "--recipe", "async_sgd", "--servers", "2", "--stragglers", "1:3", "--quiet"]
    assert main.command(["compare", "-n", "2", *asked, str(script)]) == 0
    assert [order.stragglers for order in run.orders] == [None, None, "1:3", "1:3"]
    assert run.orders[-1].recipe == "async_sgd(shards=2)"


def test_a_failed_run_makes_the_exit_code(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, Pretend(failing=("allreduce-n2-seed0",)))
    assert main.command(["compare", "-n", "2", *RECIPES, str(script)]) == 1
    shown = capsys.readouterr()
    assert "failed: allreduce-n2-seed0: worker 1 failed: ValueError: boom" in shown.out
    assert "local_sgd(every=10)" in shown.out


def test_standard_output_holds_only_the_json(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, Pretend())
    assert main.command(["compare", "-n", "2", *RECIPES, "--json", "-", str(script)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out).keys() == {"question", "runs", "verdict"}
    assert "Model distance" in shown.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--recipe", "alreduce"],
        ["--recipe", "allreduce", "-n", "0"],
        ["--recipe", "allreduce", "--target", "accuracy"],
        ["--recipe", "allreduce", "--sedes", "3"],
        ["--recipe", "allreduce", "--seeds", "three"],
        ["--recipe", "allreduce", "--json", "no/such/folder.json"],
        ["--recipe", "allreduce", "--out", "full"],
        ["--recipe", "allreduce", "--servers", "2"],
        ["--recipe", "async_sgd", "--servers", "two"],
        ["--recipe", "async_sgd", "--servers", "0"],
        ["--recipe", "allreduce", "--stragglers", "4:2"],
        [],
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_starts(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    run = pretend(monkeypatch, Pretend())
    assert main.command(["compare", *wrong, str(script)]) in (1, 2)
    said = capsys.readouterr()
    assert said.err.count("stretto: ") == 1
    assert "Traceback" not in said.err
    assert not run.orders
    assert not Path("runs").exists()
