"""Records that a run writes about itself: time, samples, evaluations, states."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from thread_workers import flat, regression, run_single_process, run_workers, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.events import PHASES, read_events
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig
from stretto.training import evaluation
from stretto.training.worker_context import WorkerContext, find_context

RECIPES = ["allreduce", "local_sgd(every=3)", "diloco(every=4)"]


def work(
    worker: int,
    slow_s: float = 0.0,
    before_backward: Callable[[], None] = lambda: None,
    samples: int = 100,
    **options: Any,
) -> nn.Module:
    net = small_net()
    optimizer = sgd(net.parameters())
    loader = stretto.distribute(net, optimizer, DataLoader(regression(samples), batch_size=8), **options)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            before_backward()
            loss.backward()
            optimizer.step()
            stretto.log(loss=loss)
            time.sleep(slow_s if worker == 1 else 0)
    return net


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_time_breakdown_sums_to_the_wall_time(recipe: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    run_workers(3, lambda worker: work(worker, slow_s=0.02), recipe, run=tmp_path)
    wall_s = time.perf_counter() - began
    for end in events(tmp_path, "end"):
        assert set(end["time_breakdown"]) == set(PHASES)
        assert all(spent >= 0 for spent in end["time_breakdown"].values())
        assert sum(end["time_breakdown"].values()) == pytest.approx(end["t"], rel=0.02)
        assert end["t"] <= wall_s


def test_waiting_is_distinguished_from_exchanging(tmp_path: Path) -> None:
    """Worker 1 always comes last, and later by 0.03 s: the other workers wait for it, and it waits for none."""
    arrived = threading.Semaphore(0)

    def come(worker: int) -> None:
        if worker != 1:
            arrived.release()
            return
        for _ in range(2):
            assert arrived.acquire(timeout=90)
        time.sleep(0.03)

    def run(worker: int) -> None:
        work(worker, before_backward=lambda: come(worker), samples=96)  # each worker has a batch in each global step

    run_workers(3, run, "allreduce", run=tmp_path)
    waiting = [worker["time_breakdown"]["waiting"] for worker in events(tmp_path, "epoch")[-1]["workers"]]
    assert waiting[1] < 0.5 * min(waiting[0], waiting[2])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_samples_of_an_epoch_are_counted(recipe: str, workers: int, tmp_path: Path) -> None:
    run_workers(workers, work, recipe, run=tmp_path)
    epochs = events(tmp_path, "epoch")
    assert [one["sample_counts"] for one in epochs] == [{"once": 100, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert epochs[-1]["samples"] == sum(one["samples"] for one in epochs[-1]["workers"]) == 200


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("before", "seen"), [(False, 44), (True, 30)])
def test_an_epoch_left_early_counts_trained_samples_only(recipe: str, before: bool, seen: int, tmp_path: Path) -> None:
    """A batch that the script left without a step is not in the model, and does not count.

    Seven steps of 15 and 14 samples, of which it makes three, or two.
    """

    def early(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(100), batch_size=8))
        for number, (x, y) in enumerate(loader):
            if before and number == 2:
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            if number == 2:
                break

    run_workers(2, early, recipe, run=tmp_path)
    assert events(tmp_path, "epoch")[0]["sample_counts"] == {
        "once": seen,
        "twice": 0,
        "never": 100 - seen,
        "dropped": 0,
    }
    assert sum(one["samples"] for one in events(tmp_path, "epoch")[0]["workers"]) == seen


def test_samples_that_the_loader_drops_are_recorded(tmp_path: Path) -> None:
    def dropping(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = DataLoader(regression(100), batch_size=8, drop_last=True)
        for _ in stretto.distribute(net, optimizer, loader):
            optimizer.step()

    run_workers(2, dropping, "allreduce", run=tmp_path)
    assert events(tmp_path, "epoch")[0]["sample_counts"] == {"once": 96, "twice": 0, "never": 0, "dropped": 4}


class RecordingEvaluate:
    """An evaluate function that records the models it receives, and changes the mode and the random state."""

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []

    def __call__(self, net: nn.Module) -> dict[str, float]:
        net.eval()
        torch.rand(3)
        time.sleep(0.05)
        self.models.append(flat(net))
        return {"norm": float(flat(net).norm()), "loss": torch.tensor(0.5)}  # type: ignore[dict-item]


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluate_receives_the_averaged_model_and_does_not_change_the_training(recipe: str, tmp_path: Path) -> None:
    evaluate = RecordingEvaluate()
    evaluated = run_workers(3, lambda worker: work(worker, evaluate=evaluate), recipe, run=tmp_path)
    plain = run_workers(3, work, recipe)
    assert all(net.training for net in evaluated)
    for one, other in zip(evaluated, plain, strict=True):
        assert torch.equal(flat(one), flat(other))
    assert len(evaluate.models) == 2
    assert torch.equal(evaluate.models[-1], flat(plain[0]))
    found = events(tmp_path, "evaluation")
    assert [one["epoch"] for one in found] == [1, 2]
    assert found[-1]["metrics"]["norm"] == pytest.approx(float(flat(plain[0]).norm()))


def test_evaluate_draws_no_random_number_of_the_training() -> None:
    net = small_net()
    draws = (lambda: torch.rand(1).item(), random.random, lambda: np.random.rand())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    wanted = [draw() for draw in draws]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    evaluation.run(lambda net: {"drawn": sum(draw() for draw in draws)}, net)
    assert [draw() for draw in draws] == wanted


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "diloco(every=4)"])
def test_evaluating_between_exchanges_does_not_change_the_training(recipe: str, tmp_path: Path) -> None:
    evaluate = RecordingEvaluate()
    often = run_workers(3, lambda worker: work(worker, evaluate=evaluate, evaluate_every=2), recipe, run=tmp_path)
    never = run_workers(3, work, recipe)
    assert torch.equal(flat(often[0]), flat(never[0]))
    assert [one["step"] for one in events(tmp_path, "evaluation")] == [2, 4, 6, 8, 10]


def test_evaluating_is_not_training_time(tmp_path: Path) -> None:
    run_workers(2, lambda worker: work(worker, evaluate=RecordingEvaluate()), "allreduce", run=tmp_path)
    for end in events(tmp_path, "end"):
        assert end["time_breakdown"]["evaluating"] >= 0.1
        assert 0 < end["training_s"] < end["t"] - end["time_breakdown"]["evaluating"] + 0.01


def test_the_final_state_is_the_averaged_model(tmp_path: Path) -> None:
    nets = run_workers(3, work, "local_sgd(every=3)", run=tmp_path)
    state = load_file(tmp_path / "final.safetensors")
    assert set(state) == set(nets[0].state_dict())
    assert all(torch.equal(state[name], one) for name, one in nets[2].state_dict().items())
    assert not (tmp_path / "states").exists()


def test_the_model_loads_the_final_state(tmp_path: Path) -> None:
    """Tied weights are stored under both names, with integers, but without buffers that are not persistent."""

    class Tied(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
            self[1].weight = self[0].weight
            self.register_buffer("seen", torch.arange(3))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    def ties(worker: int) -> Tied:
        net = Tied()
        optimizer = sgd(net.parameters())
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(40), batch_size=8)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return net

    net, _ = run_workers(2, ties, "allreduce", run=tmp_path)
    found = Tied()
    found.load_state_dict(load_file(tmp_path / "final.safetensors"))
    assert torch.equal(flat(found), flat(net))


def test_states_and_predictions_are_kept_when_asked_for(tmp_path: Path) -> None:
    def scores(net: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"mean": float(net(torch.ones(5, 6)).mean())}

    def classify(worker: int) -> None:
        net = nn.Linear(6, 3)
        optimizer = sgd(net.parameters())
        loader = DataLoader(regression(40), batch_size=8)
        for x, _ in stretto.distribute(net, optimizer, loader, evaluate=scores):
            net(x).mean().backward()
            optimizer.step()

    run_workers(2, classify, "local_sgd(every=2)", run=tmp_path, keep_states=True)
    assert (tmp_path / "states" / "00000040.safetensors").exists()
    predictions = np.load(tmp_path / "final.predictions.npy")
    assert predictions.shape == (5,)
    assert predictions.dtype == np.int32


def test_the_recipe_of_the_command_line_takes_precedence_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stretto.recipe.named import diloco

    run_workers(2, lambda worker: work(worker, recipe=diloco(every=7)), "local_sgd(every=3)", run=tmp_path)
    warning = events(tmp_path, "warning")[0]["text"]
    assert "local_sgd(every=3)" in warning
    assert "diloco(every=7)" in warning
    assert warning in capsys.readouterr().err
    assert events(tmp_path, "start")[0]["recipe"] == "local_sgd(every=3)"


def test_a_single_process_with_the_global_batch_makes_its_number_of_steps(tmp_path: Path) -> None:
    run_workers(1, work, single_process=True, global_batch_of=4, run=tmp_path)
    assert events(tmp_path, "epoch")[-1]["step"] == 2 * 4
    assert events(tmp_path, "start")[0]["recipe"] == "single process"


def test_replicas_are_compared_during_the_run(tmp_path: Path) -> None:
    run_workers(3, work, "allreduce", run=tmp_path)
    assert all(one["equal"] for one in events(tmp_path, "check"))
    assert len(events(tmp_path, "check")) >= 2


def test_drift_between_exchanges_is_measured(tmp_path: Path) -> None:
    run_workers(3, work, "local_sgd(every=100)", run=tmp_path)
    assert all(one["drift"] > 1e-4 for one in events(tmp_path, "epoch"))


def test_without_a_run_logging_costs_nothing_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stretto.log(loss=float("nan"))
    with stretto.no_sync():
        run_single_process(work)
    assert not list(tmp_path.iterdir())


def test_the_worker_context_is_read_from_the_environment(tmp_path: Path) -> None:
    assert find_context({}) is None
    context = find_context(
        WorkerConfig(
            run=str(tmp_path), options=RunConfig(Path("train.py"), single_process=True, global_batch_of=4, seed=3)
        ).environment()
    )
    assert context is not None
    assert (context.run, context.single_process, context.global_batch_of, context.seed, context.workers) == (
        tmp_path,
        True,
        4,
        3,
        1,
    )
    torchrun = find_context({"RANK": "2", "WORLD_SIZE": "4", "STRETTO_RECIPE": "allreduce"})
    assert isinstance(torchrun, WorkerContext)
    assert (torchrun.worker, torchrun.workers, torchrun.recipe, torchrun.run) == (2, 4, "allreduce", None)
    with pytest.raises(stretto.StrettoError, match="WORLD_SIZE"):
        find_context({"WORLD_SIZE": "many"})
