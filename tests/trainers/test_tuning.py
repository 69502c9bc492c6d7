"""Stock scripts of TRL and PEFT under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from trainer_runs import train

for library in ("transformers", "trl", "peft", "datasets"):
    pytest.importorskip(library)
pytestmark = pytest.mark.trainers

TUNING = Path(__file__).parent / "tuning.py"


@pytest.mark.parametrize("kind", ["sft", "packing", "lora", "dpo", "reward", "kto", "seq2seq"])
def test_two_workers_equal_one_process_with_the_same_global_batch(kind: str, tmp_path: Path) -> None:
    """Texts of unequal lengths, and an epoch whose last step is of 4 and 3 samples."""
    alone = train(tmp_path, "alone", [], "--kind", kind, stock=TUNING).result
    two = train(tmp_path, "two", ["-n", "2", "--batch", "split"], "--kind", kind, stock=TUNING)
    assert two.code == 0, two.output
    assert two.result["steps"] == 12
    assert two.result["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-6)
    assert two.result["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    sent = re.search(r"([\d.]+) MB sent per worker in 12 rounds", two.output)
    assert sent is not None
    assert float(sent[1]) * 1e6 < 1.05 * 4 * 12 * two.result["trained"]


def test_a_preference_loss_with_a_mean_over_labels_is_named(tmp_path: Path) -> None:
    sizes = json.dumps({"max_steps": 2, "loss_type": ["sigmoid", "sft"]})
    two = train(tmp_path, "two", ["-n", "2"], "--kind", "dpo", "--set", sizes, stock=TUNING)
    assert two.code == 0, two.output
    assert two.output.count("DPO: the loss sft is no mean over samples") == 1


@pytest.mark.parametrize("recipe", ["local_sgd(every=4)", "diloco(every=4)", "power_sgd(rank=2)"])
def test_fewer_exchanges_train_an_adapter(recipe: str, tmp_path: Path) -> None:
    sizes = json.dumps({"max_steps": 24, "learning_rate": 0.02})
    three = train(tmp_path, "three", ["-n", "3", "--recipe", recipe], "--kind", "lora", "--set", sizes, stock=TUNING)
    assert three.code == 0, three.output
    assert three.result["steps"] == 24
    assert three.result["evaluated"][-1] < three.result["evaluated"][0]
