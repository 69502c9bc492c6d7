"""Stock scripts of Lightning under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer_runs import Trained, train

from stretto.errors import ScriptError

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.trainers

LIT = Path(__file__).parent / "lit.py"
EVEN = ["--samples", "104"]
ONE_BATCH = ["--set", '{"accumulate_grad_batches": 1, "max_epochs": 2}']


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("alone"), "python", [], *EVEN, "--fits", "2", stock=LIT)


def test_one_worker_computes_the_bits_of_python(alone: Trained, tmp_path: Path) -> None:
    one = train(tmp_path, "one", ["-n", "1"], *EVEN, "--fits", "2", stock=LIT)
    assert one.code == 0, one.output
    assert one.apart(alone) == 0
    assert one.result == alone.result


def test_two_workers_equal_one_process_in_two_fits(alone: Trained, tmp_path: Path) -> None:
    two = train(tmp_path, "two", ["-n", "2", "--batch", "split"], *EVEN, "--fits", "2", stock=LIT)
    assert two.code == 0, two.output
    assert two.apart(alone) < 1e-6
    for name in ("steps", "epochs", "rate", "best"):
        assert two.result[name] == alone.result[name], name
    assert two.result["val_loss"] == pytest.approx(alone.result["val_loss"], abs=1e-6)
    assert "in 39 rounds" in two.output
    files = [{path.relative_to(one.folder) for path in one.folder.rglob("*")} for one in (alone, two)]
    assert files[0] == files[1]
    assert "several workers" not in two.output
    assert any("val_loss" in one["values"] for one in two.events("log"))
    evaluated = [(one["step"], [*one["metrics"]]) for one in two.events("evaluation")]
    assert evaluated == [(13 * epoch, ["val_loss"]) for epoch in (1, 2, 3)]


def test_means_over_tokens_and_an_uneven_last_step_equal_one_process(tmp_path: Path) -> None:
    script = ["--tokens", "--samples", "103", *ONE_BATCH]
    one = train(tmp_path, "python", [], *script, stock=LIT)
    two = train(tmp_path, "two", ["-n", "2", "--batch", "split"], *script, stock=LIT)
    assert two.code == 0, two.output
    assert two.apart(one) < 1e-6


def test_three_workers_with_local_steps_train_each_sample_once(tmp_path: Path) -> None:
    sizes = ["--samples", "100", "--batch", "1", "--set", '{"accumulate_grad_batches": 8, "max_epochs": 3}']
    three = train(tmp_path, "three", ["-n", "3", "--recipe", "local_sgd(every=3)"], *sizes, stock=LIT)
    assert three.code == 0, three.output
    assert three.result["steps"] == 3 * 5
    assert {one["sample_counts"]["once"] for one in three.events("epoch")} == {100}
    assert three.result["val_loss"] == pytest.approx(three.result["logged"]["val_loss"], abs=1e-6)


def test_max_steps_end_the_training_within_an_epoch(tmp_path: Path) -> None:
    two = train(tmp_path, "two", ["-n", "2"], *EVEN, "--set", '{"max_steps": 24, "max_epochs": 9}', stock=LIT)
    assert two.code == 0, two.output
    assert two.result["steps"] == 24


def test_a_resumed_run_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    every = ["-n", "2", "--checkpoint-every", "3 rounds"]
    whole = train(tmp_path, "whole", every, *EVEN, stock=LIT)
    ends = [*every, "--restarts", "0", "--min-workers", "2"]
    assert train(tmp_path, "ends", ends, *EVEN, "--kill", "1:11:batch", stock=LIT).code == 1
    later = train(tmp_path, "later", [*every, "--resume", str(tmp_path / "run-ends")], *EVEN, stock=LIT)
    assert later.code == 0, later.output
    assert later.apart(whole) == 0
    assert later.result == whole.result


@pytest.mark.parametrize(
    ("worker", "event", "command"),
    [
        (0, "saving", ["--restarts", "0"]),
        (0, "evaluating", ["--recipe", "local_sgd(every=4)"]),
        (1, "pass", ["--restarts", "0", "--recipe", "diloco(every=5)"]),
        (1, "batch", []),
    ],
)
def test_a_killed_worker_costs_no_step_and_no_best_model(
    worker: int, event: str, command: list[str], tmp_path: Path
) -> None:
    script = ["--samples", "203", "--kill", f"{worker}:12:{event}", "--set", '{"max_epochs": 12}']
    killed = train(tmp_path, "killed", ["-n", "3", *command], *script, stock=LIT)
    assert killed.code == 0, killed.output
    assert "(killed by SIGKILL)" in killed.output
    assert (killed.result["steps"], killed.result["epochs"]) == (12 * 9, 12)
    logged: dict[int, float] = {}
    for path in killed.folder.rglob("metrics.csv"):
        with path.open() as file:
            logged |= {int(row["step"]) + 1: float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]}
    assert killed.result["score"] == pytest.approx(min(logged.values()), abs=1e-6)
    assert (killed.folder / "fit-0/last.ckpt").exists()
    best = torch.load(killed.folder / "fit-0" / killed.result["best"], weights_only=False)
    assert logged[best["global_step"]] == pytest.approx(killed.result["score"], abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("named", [{"strategy": "ddp"}, {"devices": 2}, {"num_nodes": 2}])
def test_a_trainer_that_divides_the_training_is_refused(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.trainers import lightning as ours

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **({"devices": 1} | named))
    monkeypatch.setattr(ours, "find_context", lambda: SimpleNamespace(workers=2))
    with pytest.raises(ScriptError, match=r"divides the training itself(.|\n)*got: .*DDPStrategy(.|\n)*try: "):
        ours.take(trainer)


@pytest.mark.parametrize(
    ("got", "loaders", "batches", "optimizer"),
    [
        ("CombinedLoader of 2", 2, 8, torch.optim.SGD),
        ("LBFGS", 1, 8, torch.optim.LBFGS),
        ("3 batches with accumulate_grad_batches=2", 1, 3, torch.optim.SGD),
    ],
)
def test_what_cannot_be_distributed_is_refused_before_the_first_step(
    got: str, loaders: int, batches: int, optimizer: Any
) -> None:
    from stretto.trainers.lightning import _Batches

    combined = SimpleNamespace(flattened=[None] * loaders)
    trainer = SimpleNamespace(
        accumulate_grad_batches=2,
        num_training_batches=batches,
        fit_loop=SimpleNamespace(_combined_loader=combined),
        strategy=SimpleNamespace(optimizers=[optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)]),
    )
    loader = DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=2)
    with pytest.raises(ScriptError, match=rf"got: .*{got}(.|\n)*try: "):
        next(iter(_Batches(trainer, loader)))


def test_weights_of_parts_of_a_window_are_refused(tmp_path: Path) -> None:
    refused = train(tmp_path, "refused", ["-n", "2"], *EVEN, "--tokens", stock=LIT)
    assert refused.code == 1
    assert "stretto.weight with accumulate_grad_batches=2" in refused.output
