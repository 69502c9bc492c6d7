"""Stock scripts of transformers.Trainer under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stretto.errors import ScriptError
from stretto.events import read_events

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.trainers

STOCK = Path(__file__).parent / "stock.py"
LIMIT_S = 400
EMBEDDING = "transformer.wte.weight"
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Trained:
    """Result of a run of the script: its files and its output."""

    code: int
    output: str
    folder: Path
    run: Path

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "final/model.safetensors")

    def apart(self, other: Trained) -> float:
        """Return the distance of two models, as a part of their norm."""
        mine, theirs = (torch.cat([one.flatten() for one in each.model.values()]) for each in (self, other))
        return float((mine - theirs).norm() / theirs.norm())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in read_events(self.run / "events.jsonl") if one["event"] == kind]


def train(folder: Path, name: str, command: list[str], *script: str, stock: Path = STOCK) -> Trained:
    """Run the script by `python`, or by a command of Stretto."""
    out, run = folder / name, folder / f"run-{name}"
    line = [sys.executable]
    if command:
        line += ["-m", "stretto.cli", "run", "--threads", "1", "--out", str(run), *command]
    done = subprocess.run(
        [*line, str(stock), str(out), *script],
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0 or command, done.stderr
    return Trained(done.returncode, done.stdout + done.stderr, out, run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("alone"), "python", [])


def test_one_worker_computes_the_bits_of_python(alone: Trained, tmp_path: Path) -> None:
    one = train(tmp_path, "one", ["-n", "1"])
    assert one.code == 0, one.output
    assert one.apart(alone) == 0
    assert one.result == alone.result


def test_two_workers_equal_one_process_with_the_same_global_batch(alone: Trained, tmp_path: Path) -> None:
    """Texts of 4 to 24 words, epochs whose last step has 7 samples, and an end within an epoch."""
    two = train(tmp_path, "two", ["-n", "2", "--batch", "split"])
    assert two.code == 0, two.output
    assert two.apart(alone) < 1e-6
    assert two.result["losses"] == pytest.approx(alone.result["losses"], abs=2e-6)
    assert two.result["loss"] == pytest.approx(alone.result["loss"], abs=2e-6)
    assert (two.result["steps"], two.result["best"], two.result["rate"]) == (20, alone.result["best"], 0)
    assert "in 20 rounds" in two.output
    assert torch.equal(load_file(two.run / "final.safetensors")[EMBEDDING], two.model[EMBEDDING])
    assert "several workers" not in two.output
    assert "does not come to its end" not in two.output
    logged = [one["values"] for one in two.events("log") if "eval_loss" in one["values"]]
    assert len(logged) >= 4


def test_three_workers_with_fewer_samples_than_micro_batches_and_local_steps(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    script = ["--samples", "100", "--set", json.dumps(sizes | {"max_steps": -1, "num_train_epochs": 2})]
    three = train(tmp_path, "three", ["-n", "3", "--recipe", "local_sgd(every=3)"], *script)
    assert three.code == 0, three.output
    assert three.result["steps"] == 2 * 5
    assert three.result["losses"][-1] < three.result["losses"][0]
    epochs = three.events("epoch")
    assert [one["sample_counts"]["once"] for one in epochs] == [100, 100]


def test_without_trainers_the_run_ends_with_an_error(tmp_path: Path) -> None:
    short = {"max_steps": 2, "eval_strategy": "no", "load_best_model_at_end": False}
    apart = train(tmp_path, "apart", ["-n", "1", "--no-trainers"], "--set", json.dumps(short))
    assert apart.code == 1
    assert "transformers.Trainer imported" in apart.output


REFUSED = {
    "DeepSpeed": {"deepspeed": "config.json"},
    "FSDP": {"fsdp": "full_shard"},
    "2 GPUs": {"n_gpu": 2},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "adalomo": {"optim": "adalomo"},
    "galore_adamw_layerwise": {"optim": "galore_adamw_layerwise"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_that_cannot_be_distributed_is_refused_by_name(name: str) -> None:
    from stretto.trainers.hugging_face import _refuse

    plain = {"deepspeed": None, "fsdp": "", "n_gpu": 1, "auto_find_batch_size": False, "optim": "adamw_torch"}
    trainer = SimpleNamespace(args=SimpleNamespace(**plain), is_model_parallel=False)
    _refuse(trainer)
    vars(trainer.args).update(REFUSED[name])
    with pytest.raises(ScriptError, match=rf"got: .*{name}(.|\n)*try: "):
        _refuse(trainer)


def test_trainers_of_groups_of_completions_are_refused_by_name() -> None:
    from stretto.trainers.hugging_face import _refuse

    plain = {"deepspeed": None, "fsdp": "", "n_gpu": 1, "auto_find_batch_size": False, "optim": "adamw_torch"}
    trainer = type("Mine", (type("GRPOTrainer", (), {}),), {})()
    trainer.args, trainer.is_model_parallel = SimpleNamespace(**plain), False
    with pytest.raises(ScriptError, match="groups of completions"):
        _refuse(trainer)
