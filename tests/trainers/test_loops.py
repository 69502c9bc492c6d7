"""Stock loops of Accelerate under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import Trained, train

from stretto.errors import ScriptError
from stretto.training.worker_context import WorkerContext, current_context

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.trainers

LOOPS = Path(__file__).parent / "loops.py"
CV = ["--kind", "cv"]
SPLIT = ["-n", "2", "--batch", "split"]


def loop(folder: Path, name: str, command: list[str], *script: str) -> Trained:
    done = train(folder, name, command, *script, stock=LOOPS)
    assert done.code == 0, done.output
    return done


def same_steps(one: Trained, other: Trained) -> None:
    """Check that two runs have made the same steps, at the same rates, and evaluated all samples."""
    assert one.result["steps"] == other.result["steps"]
    assert one.result["rates"] == pytest.approx(other.result["rates"], abs=1e-12)
    assert one.result["seen"] == other.result["seen"] == 26


@pytest.mark.parametrize("script", [["--accumulation", "2"], ["--form", "distribute"]])
def test_one_worker_computes_the_bits_of_python(script: list[str], tmp_path: Path) -> None:
    given = [*CV, "--samples", "101", "--dropout", "0.1", *script]
    alone, one = loop(tmp_path, "alone", [], *given), loop(tmp_path, "one", ["-n", "1"], *given)
    assert one.apart(alone) == 0
    assert one.result == alone.result


def test_tokens_and_an_uneven_last_step_equal_one_process(tmp_path: Path) -> None:
    given = ["--samples", "103", "--epochs", "1"]
    alone, two = loop(tmp_path, "alone", [], *given), loop(tmp_path, "two", SPLIT, *given)
    assert two.apart(alone) < 1e-6
    same_steps(two, alone)
    assert "in 26 rounds" in two.output


def test_accumulated_tokens_of_three_workers_equal_one_process_with_the_global_batch(tmp_path: Path) -> None:
    limit = ["--samples", "96", "--max_train_steps", "6", "--epochs", "1"]
    alone = loop(tmp_path, "alone", [], *limit, "--batch", "24")
    three = loop(tmp_path, "three", ["-n", "3"], *limit, "--batch", "4", "--accumulation", "2")
    assert three.apart(alone) < 1e-6
    assert three.result["rates"] == pytest.approx(alone.result["rates"], abs=1e-12)
    assert three.result["processes"] == 3
    assert three.result["steps"] == 6
    assert "in 6 rounds" in three.output


def test_a_classifier_with_accumulation_equals_one_process_and_comes_to_the_end_of_its_schedule(tmp_path: Path) -> None:
    given = ["--kind", "nlp", "--samples", "96", "--epochs", "2", "--lr", "1e-3"]
    alone = loop(tmp_path, "alone", [], *given, "--batch", "8", "--accumulation", "2")
    two = loop(tmp_path, "two", ["-n", "2"], *given, "--accumulation", "2")
    assert two.apart(alone) < 1e-6
    same_steps(two, alone)
    assert two.result["rates"][-1] == 0
    assert two.result["evaluated"] == alone.result["evaluated"]


def test_a_script_that_distributes_itself_keeps_its_meaning(tmp_path: Path) -> None:
    given = [*CV, "--form", "distribute", "--samples", "104", "--epochs", "1"]
    without = loop(tmp_path, "without", ["-n", "2", "--no-trainers"], *given)
    two = loop(tmp_path, "two", ["-n", "2"], *given)
    assert two.apart(without) == 0
    assert two.result["rates"] == without.result["rates"]
    assert two.result["evaluated"] == without.result["evaluated"]


def test_a_saved_state_continues_with_its_counts_and_rates(tmp_path: Path) -> None:
    given = [*CV, "--samples", "104", "--epochs", "2", "--checkpointing_steps", "10"]
    whole = loop(tmp_path, "whole", ["-n", "2", "--recipe", "local_sgd(every=4)"], *given)
    saved = whole.folder / "step_10"
    assert {path.name for path in saved.glob("*.pkl")} == {"random_states_0.pkl", "random_states_1.pkl"}
    kept = load_file(saved / "model.safetensors")
    assert {name: one.shape for name, one in kept.items()} == {name: one.shape for name, one in whole.model.items()}
    again = ["--resume_from_checkpoint", str(saved)]
    later = loop(tmp_path, "later", ["-n", "2"], *given, *again)
    assert later.result["steps"] == whole.result["steps"] == 26
    assert later.result["rates"] == whole.result["rates"][10:]
    assert [one["sample_counts"]["once"] for one in later.events("epoch")] == [24, 104]


@pytest.mark.parametrize(
    ("worker", "event", "command"),
    [(0, "evaluating", ["--recipe", "local_sgd(every=4)"]), (1, "batch", ["--restarts", "0"])],
)
def test_a_killed_worker_costs_no_step(worker: int, event: str, command: list[str], tmp_path: Path) -> None:
    script = [*CV, "--samples", "403", "--epochs", "3", "--kill", f"{worker}:30:{event}"]
    killed = loop(tmp_path, "killed", ["-n", "3", *command], *script)
    assert "(killed by SIGKILL)" in killed.output
    assert event == "evaluating" or killed.result["steps"] == 3 * 34  # a restarted worker counts its own steps
    assert len(killed.events("epoch")) == 3
    assert {one["sample_counts"]["once"] for one in killed.events("epoch")} == {403}
    assert killed.result["seen"] == 26  # the last evaluation is divided by the workers that are left
    assert ("lack a part" in killed.output) == (event == "evaluating")


@pytest.mark.parametrize(("worker", "recipe"), [(0, "allreduce"), (1, "local_sgd(every=4)")])
def test_a_restarted_worker_ends_its_loop_with_the_others(worker: int, recipe: str, tmp_path: Path) -> None:
    """Its `completed_steps` begins at 0; the others leave the second epoch at their 250th step, of 334 in two."""
    script = [*CV, "--samples", "2003", "--max_train_steps", "250", "--kill", f"{worker}:20:batch", "--slow"]
    killed = loop(tmp_path, "killed", ["-n", "3", "--recipe", recipe], *script)
    assert killed.output.count(f"worker {worker} ends its loop with the others, in epoch 2 at step 250") == 1
    assert [one["sample_counts"]["twice"] for one in killed.events("epoch")] == [0, 0]
    first, second = (one["sample_counts"]["once"] for one in killed.events("epoch"))
    assert first == 2003
    assert second == pytest.approx(83 * 12, abs=12)
    assert killed.result["seen"] == 26  # all workers take part in the last evaluation
    assert (worker == 0) == (killed.result["steps"] < 250)


@pytest.fixture
def a_run() -> object:
    token = current_context.set(WorkerContext(workers=2))
    yield
    current_context.reset(token)


def test_batches_that_the_library_splits_are_refused(a_run: object) -> None:
    from stretto.trainers import accelerate as ours

    own = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ScriptError, match="--batch split"):
        ours.take(own)


def test_a_worker_of_a_run_is_one_of_several_processes(a_run: object) -> None:
    from stretto.trainers import accelerate as ours

    own = ours.take(accelerate.Accelerator(cpu=True))
    assert own.num_processes == 2
    assert torch.equal(own.gather(torch.ones(2)), torch.ones(2))
    ours.be_only_process()
    assert own.num_processes == 1


@pytest.mark.parametrize(
    ("state", "loader", "advice"),
    [
        ({"_has_passed": True, "_is_last": False}, None, "accelerator.accumulate"),
        ({"_has_passed": False, "_factor": 1.5}, None, r"accelerator.backward\(loss\)"),
        ({"_has_passed": True}, object(), "in this order"),
    ],
)
def test_a_loop_that_treats_micro_batches_otherwise_is_refused(
    state: dict[str, object], loader: object, advice: str, a_run: object
) -> None:
    from stretto.trainers import accelerate as ours

    hooks = ours.take(accelerate.Accelerator(cpu=True))._stretto
    vars(hooks).update(state, _trains=loader)
    with pytest.raises(ScriptError, match=rf"got: (.|\n)*try: (.|\n)*{advice}"):
        hooks._check(SimpleNamespace(is_weighed=False), 2)


def test_tensors_that_share_a_buffer_are_saved_apart_and_tied_ones_together() -> None:
    from stretto.trainers import accelerate as ours

    buffer = torch.arange(6.0)
    apart = ours._apart({"a": buffer[:2], "tied": buffer[:2], "b": buffer[2:], "name": "text"})
    assert apart["a"] is apart["tied"]
    assert apart["a"].untyped_storage().data_ptr() != apart["b"].untyped_storage().data_ptr()
    assert apart["b"].tolist() == [2, 3, 4, 5]
    assert apart["name"] == "text"
