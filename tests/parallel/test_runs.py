"""Runs of real processes with a layout: equal to a single process, over kills, over checkpoints, over other layouts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from layout_runs import SCRIPT, checkpointed, counts, difference, exported, run, shapes
from safetensors.torch import load_file
from staged_net import make_net

from stretto.events import counts_for_worker, read_events

LOGS = SCRIPT + "        stretto.log(loss=loss)\n"


def logs(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of each value that the script has logged at rank 0."""
    events = [event for event in read_events(folder / "events.jsonl") if event["event"] == "log"]
    return [(event["step"], event["values"]["loss"]) for event in events if counts_for_worker(event)]


def test_a_run_in_stages_equals_a_single_process_and_is_resumed_under_other_layouts(tmp_path: Path) -> None:
    saves = ("--checkpoint-every", "5 rounds")
    whole = run(tmp_path, "whole", "-n", "1", text=LOGS)
    staged = run(tmp_path, "staged", "-n", "2", "--layout", "pipeline(stages=2)", *saves, text=LOGS)
    assert difference(staged, whole) < 1e-6
    events = list(read_events(staged / "events.jsonl"))
    logged, expected = logs(staged), logs(whole)
    assert [step for step, _ in logged] == [step for step, _ in expected] == [*range(1, 25)]
    assert [loss for _, loss in logged] == pytest.approx([loss for _, loss in expected], abs=1e-5)
    assert not [event for event in events if event.get("what") == "failed"]
    (stages,) = (event for event in events if event["event"] == "stages")
    assert len(stages["computing"]) == len(stages["activations"]) == 2
    ends = [event for event in events if event["event"] == "end"]
    assert [one["stage"]["passes"] for one in ends] == [23, 23]  # all but the first
    assert all(0 < one["stage"]["waiting"] < one["stage"]["seconds"] for one in ends)
    assert sum(one["memory"]["parameters"] for one in ends) == 4 * sum(map(torch.Tensor.numel, make_net().parameters()))
    longer = run(tmp_path, "longer", "-n", "1", script=("3",))
    for name, options in {"three": ("-n", "3", "--layout", "pipeline(3)"), "one": ("-n", "1")}.items():
        resumed = run(tmp_path, name, *options, "--resume", "staged", script=("3",))
        assert difference(resumed, longer) < 1e-6
    final = load_file(staged / "final.safetensors")
    assert all(torch.equal(one, final[name]) for name, one in exported(staged).items())
    assert shapes(checkpointed(staged)) == shapes(final) == shapes(make_net().state_dict())


KILLS = [
    ("pipeline(stages=2)", "allreduce", ("1", "1", "7", "before")),
    ("sharded(over=2)", "allreduce", ("0", "0", "8", "after")),
    *(
        pytest.param(layout, "local_sgd(every=3)", ("0", "1", "7", "within"), marks=pytest.mark.long)
        for layout in ("pipeline(stages=2)", "sharded(over=2)")
    ),
]
"""Layout; recipe; worker and rank that is killed, the step, and the phase of the step."""
ALL_KILLS = [
    (layout, recipe, (worker, rank, "7", phase))
    for layout, recipe, worker, rank, phase in itertools.product(
        ("pipeline(stages=2)", "sharded(over=2)"),
        ("allreduce", "local_sgd(every=3)"),
        "01",
        "01",
        ("before", "within", "after"),
    )
]


@pytest.mark.parametrize(
    ("layout", "recipe", "victim"), [*KILLS, *(pytest.param(*one, marks=pytest.mark.long) for one in ALL_KILLS)]
)
def test_a_killed_rank_costs_its_replica_only(
    tmp_path: Path, layout: str, recipe: str, victim: tuple[str, ...]
) -> None:
    options = ("-n", "4", "--layout", layout, "--recipe", recipe, "--failure-timeout", "60s")
    folder = run(tmp_path, "run", *options, script=("6", *victim))
    events = read_events(folder / "events.jsonl")
    failed = [event for event in events if event.get("what") == "failed"]
    assert [(event["worker"], event.get("rank", 0), event["why"]) for event in failed] == [
        (int(victim[0]), int(victim[1]), "killed by SIGKILL")
    ]
    assert all(one == {"once": 60, "twice": 0, "never": 0, "dropped": 0} for one in counts(folder))
    assert len(counts(folder)) == 6
    assert not any(event["event"] == "error" for event in events)


SLOW = SCRIPT.replace("import os,", "import time, os,")
SLOW = SLOW.replace("    step += 1\n", "    step += 1; time.sleep(0.1)\n", 1)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pipeline(stages=2)", "sharded(over=2)"])
@pytest.mark.parametrize("recipe", ["local_sgd(every=3)", "async_sgd(shards=2)"])
def test_ranks_that_are_killed_and_paused_again_and_again_cost_no_sample(
    tmp_path: Path, layout: str, recipe: str
) -> None:
    faults = "kill worker every 8s; pause worker for 1s every 8s"
    options = ("-n", "4", "--layout", layout, "--recipe", recipe, "--failure-timeout", "30s", "--restarts", "50")
    saves = ("--checkpoint-every", "6 rounds")  # at times no worker with state is left
    folder = run(tmp_path, "run", *options, *saves, "--faults", faults, script=("20",), text=SLOW)
    events = list(read_events(folder / "events.jsonl"))
    assert [event for event in events if event["event"] == "fault_injected"]
    assert len(counts(folder)) >= 20
    assert {(one["once"], one["twice"], one["never"]) for one in counts(folder)} == {(60, 0, 0)}
    assert not any(event["event"] == "error" for event in events)


def test_the_only_replica_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", "pipeline(stages=2)", "--checkpoint-every", "4 rounds")
    folder = run(tmp_path, "run", *layout, script=("2", "0", "1", "10", "within", "saved"))
    warnings = [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "warning"]
    assert any("continues from the checkpoint of round" in text for text in warnings), warnings
    assert difference(folder, run(tmp_path, "whole", "-n", "1")) < 1e-6


@pytest.mark.long
def test_a_sharded_run_equals_a_single_process_and_is_resumed_under_other_layouts(tmp_path: Path) -> None:
    saves = ("--checkpoint-every", "5 rounds")
    whole = run(tmp_path, "whole", "-n", "1", *saves)
    shared = run(tmp_path, "shared", "-n", "2", "--layout", "sharded(over=2)", *saves)
    assert difference(shared, whole) < 1e-5
    assert not [event for event in read_events(shared / "events.jsonl") if event.get("what") == "failed"]
    longer = run(tmp_path, "longer", "-n", "1", script=("3",))
    for name, origin, options in (
        ("three", "shared", ("-n", "3", "--layout", "sharded(3)")),
        ("staged", "shared", ("-n", "2", "--layout", "pipeline(2)")),
        ("one", "shared", ("-n", "1")),
        ("from_whole", "whole", ("-n", "2", "--layout", "sharded(2)")),
    ):
        resumed = run(tmp_path, name, *options, "--resume", origin, script=("3",))
        assert difference(resumed, longer) < 1e-5, name


def test_the_only_sharded_replica_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", "sharded(2)", "--checkpoint-every", "4 rounds")
    folder = run(tmp_path, "run", *layout, script=("2", "0", "1", "10", "within", "saved"))
    warnings = [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "warning"]
    (begun,) = [int(found[1]) for text in warnings if (found := re.search(r"the checkpoint of round (\d+)", text))]
    assert difference(folder, run(tmp_path, "whole", "-n", "1")) < 1e-5
    assert shapes(exported(folder)) == shapes(checkpointed(folder)) == shapes(make_net().state_dict())
    ends = [event for event in read_events(folder / "events.jsonl") if event["event"] == "end"]
    assert len(ends) == 2
    nbytes = sum(one.nbytes for one in make_net().state_dict().values())
    for end in ends:  # in each step the parameters are gathered twice, and the gradients are summed
        steps = end["step"] - begun
        assert steps * 3 / 2 * nbytes <= end["bytes_sent"] < steps * 2 * nbytes
        assert end["time_breakdown"]["waiting"] > 0 and not end["bytes_counted"]


def test_a_script_that_calls_a_part_of_the_model_gets_one_error(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", 'pipeline(stages=2, split="blocks.9")')
    error = run(tmp_path, "run", *layout, fails=True)
    assert "no stage can begin with the module blocks.9" in error
    assert "expected: one of blocks.0, blocks.0.norm, blocks.0.mlp, blocks.1" in error


PENALTY = """
import torch, stretto
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
for x, y in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4)):
    (net(x).mean() + sum((one ** 2).sum() for one in net.parameters())).backward()
"""


def test_a_penalty_on_parts_of_parameters_says_what_to_do(tmp_path: Path) -> None:
    error = run(tmp_path, "run", "-n", "2", "--layout", "sharded(2)", fails=True, text=PENALTY)
    assert "weight_decay= of the optimizer in place of a penalty in the loss" in error


EVALUATED_ALONE = """
import threading, torch, stretto
from stretto.process_config import worker_config
net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
for x, y in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4)):
    if worker_config().rank:
        threading.Event().wait()
    net(x)
"""


@pytest.mark.parametrize(
    ("layout", "network"),
    [
        ("pipeline(2)", ()),
        pytest.param("sharded(2)", (), marks=pytest.mark.long),
        pytest.param("pipeline(2)", ("--listen", "127.0.0.1"), marks=pytest.mark.long),
    ],
)
def test_a_model_that_one_rank_calls_alone_ends_in_an_error(
    tmp_path: Path, layout: str, network: tuple[str, ...]
) -> None:
    options = ("-n", "2", "--layout", layout, "--timeout", "15", *network)
    error = run(tmp_path, "run", *options, fails=True, text=EVALUATED_ALONE)
    assert "expected: the same calls in all processes of a worker" in error


def test_no_rank_lays_the_whole_model_flat(tmp_path: Path) -> None:
    """Such buffers, of parameters and gradients, would be several times the model, until a collection frees them."""
    watched = """
from stretto.strategies import flat_buffers, gradient_allreduce
def zeros(length, slots, zeros=flat_buffers.zeros):
    print("laid", length, "of", sum(one.numel() for one in net.parameters()), flush=True)
    return zeros(length, slots)
flat_buffers.zeros = gradient_allreduce.zeros = zeros
loader = stretto.distribute("""
    text = SCRIPT.replace("loader = stretto.distribute(", watched)
    folder = run(tmp_path, "run", "-n", "2", "--layout", "pipeline(stages=2)", text=text)
    for log in folder.glob("worker-*.log"):
        laid = [line.split() for line in log.read_text().splitlines() if line.startswith("laid")]
        assert laid
        assert all(int(length) < 0.8 * int(whole) for _, length, _, whole in laid)


MOMENTUM_AT_A_SERVER = (
    "Recipe(what=updates(), when=on_arrival(collect=2, bound=0), whom=server(2), then=outer(0.5, 0.6))"
)


@pytest.mark.parametrize(
    ("recipe", "layout", "left_out"),
    [
        (MOMENTUM_AT_A_SERVER, "pipeline(2)", "momentum at the server"),
        ("diloco(every=2)", "sharded(2)", "momentum of the outer optimizer"),
        ("allreduce(how=error_feedback(top_k(0.1)))", "sharded(2)", "states of the codec, residuals"),
    ],
)
def test_a_checkpoint_of_whole_workers_says_what_another_layout_begins_again(
    tmp_path: Path, recipe: str, layout: str, left_out: str
) -> None:
    run(tmp_path, "whole", "-n", "2", "--recipe", recipe, "--checkpoint-every", "2 rounds", script=("1",))
    resumed = run(tmp_path, "on", "-n", "4", "--layout", layout, "--recipe", recipe, "--resume", "whole")
    warnings = [event["text"] for event in read_events(resumed / "events.jsonl") if event["event"] == "warning"]
    assert sum(f"the checkpoint's {left_out} belong to whole models" in text for text in warnings) == 1, warnings
    assert sum("encodes the part of each rank apart" in text for text in warnings) == ("top_k" in recipe), warnings
    assert counts(resumed)[-1] == {"once": 60, "twice": 0, "never": 0, "dropped": 0}
