"""Stock scripts of transformers.Trainer under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import EMBEDDING, Trained, train

from stretto.errors import ScriptError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.trainers


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
    evaluated = two.events("evaluation")
    assert [(one["step"], [*one["metrics"]]) for one in evaluated] == [(5 * k, ["eval_loss"]) for k in (1, 2, 3, 4)]
    assert all(one["time_breakdown"]["evaluating"] > 0 for one in two.events("end"))


def test_a_mean_of_each_micro_batch_weighs_as_in_one_process_and_a_worker_that_returns_knows_it(tmp_path: Path) -> None:
    """Three workers divide each micro-batch, whose tokens only all of them know."""
    script = ["--mean", "--samples", "101", "--set", '{"optim": "sgd", "learning_rate": 0.1, "max_steps": 40}']
    alone = train(tmp_path, "alone", [], *script)
    three = train(tmp_path, "three", ["-n", "3", "--batch", "split"], *script)
    assert three.code == 0, three.output
    assert three.apart(alone) < 1e-6
    assert three.result["losses"] == pytest.approx(alone.result["losses"], abs=4e-6)
    killed = train(tmp_path, "killed", ["-n", "3", "--batch", "split"], *script, "--kill", "1:5:substep")
    assert killed.code == 0, killed.output
    assert killed.result["steps"] == 40


def test_three_workers_with_fewer_samples_than_micro_batches_and_local_steps(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    script = ["--samples", "100", "--set", json.dumps(sizes | {"max_steps": -1, "num_train_epochs": 2})]
    three = train(tmp_path, "three", ["-n", "3", "--recipe", "local_sgd(every=3)"], *script)
    assert three.code == 0, three.output
    assert three.result["steps"] == 2 * 5
    assert three.result["losses"][-1] < three.result["losses"][0]
    epochs = three.events("epoch")
    assert [one["sample_counts"]["once"] for one in epochs] == [100, 100]


def test_a_second_training_equals_that_of_one_process(tmp_path: Path) -> None:
    script = ["--trains", "2", "--set", '{"max_steps": 7, "eval_steps": 3, "save_steps": 3}']
    alone, two = train(tmp_path, "alone", [], *script), train(tmp_path, "two", ["-n", "2", "--batch", "split"], *script)
    assert two.code == 0, two.output
    assert two.apart(alone) < 1e-6
    assert two.result["loss"] == pytest.approx(alone.result["loss"], abs=2e-6)


@pytest.mark.parametrize(
    ("worker", "event", "recipe"),
    [
        (0, "saving", "allreduce"),
        (0, "evaluating", "local_sgd(every=4)"),
        (1, "substep", "allreduce"),
        (1, "epoch", "diloco(every=5)"),
    ],
)
def test_a_killed_worker_costs_no_step_no_sample_and_no_checkpoint(
    worker: int, event: str, recipe: str, tmp_path: Path
) -> None:
    often = {"max_steps": 60, "eval_steps": 13, "save_steps": 13}
    script = ["--kill", f"{worker}:10:{event}", "--set", json.dumps(often)]
    killed = train(tmp_path, "killed", ["-n", "3", "--recipe", recipe], *script)
    assert killed.code == 0, killed.output
    assert "(killed by SIGKILL)" in killed.output
    assert (killed.result["steps"], killed.result["rate"]) == (60, 0)
    checkpoints = [killed.folder / f"checkpoint-{step}" for step in (13, 26, 39, 52)]
    for one in checkpoints:
        names = {path.name for path in one.iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"} <= names
    logged = json.loads((killed.folder / "checkpoint-60/trainer_state.json").read_text())["log_history"]
    best = min((one for one in logged if "eval_loss" in one), key=lambda one: one["eval_loss"])
    assert killed.result["best"] == best["step"]
    best_model = load_file(killed.folder / f"checkpoint-{best['step']}/model.safetensors")
    assert all(torch.equal(one, best_model[name]) for name, one in killed.model.items())
    assert {one["sample_counts"]["once"] for one in killed.events("epoch")[:-1]} == {103}


@pytest.mark.parametrize("way", ["resume_from_checkpoint", "--resume"])
def test_a_training_that_continues_within_an_epoch_has_the_bits_of_the_whole(way: str, tmp_path: Path) -> None:
    script = ["--dropout", "0.1"]
    whole = train(tmp_path, "whole", ["-n", "3"], *script)
    if way == "--resume":
        every = ["--checkpoint-every", "3 rounds"]
        ends = ["--restarts", "0", "--min-workers", "3", *every]
        assert train(tmp_path, "ends", ["-n", "3", *ends], *script, "--kill", "1:11:step").code == 1
        later = train(tmp_path, "later", ["-n", "3", "--resume", str(tmp_path / "run-ends"), *every], *script)
    else:
        later = train(tmp_path, "later", ["-n", "3"], *script, "--resume", str(whole.folder / "checkpoint-10"))
    assert later.code == 0, later.output
    assert later.apart(whole) == 0
    assert later.result["losses"] == whole.result["losses"]


def test_without_trainers_the_run_ends_with_an_error(tmp_path: Path) -> None:
    apart = train(tmp_path, "apart", ["-n", "1", "--no-trainers"], "--set", '{"max_steps": 5}')
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


@pytest.mark.parametrize("name", ["GRPOTrainer", "DistillationTrainer"])
def test_trainers_of_groups_of_completions_are_refused_by_name(name: str) -> None:
    from stretto.trainers.hugging_face import _refuse

    plain = {"deepspeed": None, "fsdp": "", "n_gpu": 1, "auto_find_batch_size": False, "optim": "adamw_torch"}
    trainer = type("Mine", (type(name, (), {}),), {})()
    trainer.args, trainer.is_model_parallel = SimpleNamespace(**plain), False
    with pytest.raises(ScriptError, match="groups of completions"):
        _refuse(trainer)


@pytest.mark.parametrize(("kind", "is_sum"), [("GPT2LMHeadModel", True), ("BertForSequenceClassification", False)])
def test_a_model_that_leaves_the_number_of_items_unused_has_a_mean(kind: str, is_sum: bool) -> None:
    import transformers

    from stretto.trainers.hugging_face import Hooks

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    config = getattr(transformers, "GPT2Config" if is_sum else "BertConfig")(**sizes)
    model = getattr(transformers, kind)(config).train()
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "labels": ids if is_sum else ids[:, 0] % 2}
    arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
    hooks = Hooks(transformers.Trainer(model, arguments))
    before = torch.get_rng_state()
    hooks._look_at_loss(batch, 5)
    assert (hooks._loss.is_sum, hooks._loss.shifts) == (is_sum, is_sum)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
