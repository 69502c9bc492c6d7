"""Simulated workers of several ranks: the model of whole workers, and the time and bytes of their ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import layout_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_runs import RECIPES
from safetensors.torch import load_file
from simulator.harness import Ended, simulated

from stretto.checkpoint.model_file import FINAL
from stretto.cli.main import command
from stretto.errors import LaunchError, StrettoError
from stretto.events import read_events
from stretto.parallel.schedule import Hop
from stretto.recipe.layout import whole
from stretto.simulator.compute.cost_model import CostModel, parse
from stretto.simulator.layouts.ranks import RankedReplica
from stretto.simulator.network.links import Links
from stretto.simulator.network.topology import Network
from stretto.transport.secure_connections import wire_bytes as sealed_bytes

BLOCK, BLOCKS, BATCH = 32, 8, 8
SCRIPT = f"""
import sys, torch, stretto
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear({BLOCK}, {BLOCK}) for _ in range({BLOCKS})))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(int(sys.argv[1]) * {BATCH} * int(sys.argv[2]), {BLOCK})
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size={BATCH})
loader = stretto.distribute(net, optimizer, loader)
for (a,) in loader:
    optimizer.zero_grad()
    loss = (net(a) - a).square().mean()
    loss.backward()
    optimizer.step()
    stretto.log(loss=loss)
"""
PARAMETER_BYTES = 4 * (BLOCK + 1) * BLOCK
"""Bytes of the parameters of one module."""


def run(processes: int, layout: str | None, steps: int = 4, recipe: str = "allreduce", **more: Any) -> Ended:
    """Simulate equal modules for this number of steps."""
    ranks = 1 if layout is None else int(layout.partition("=")[2].partition(",")[0].strip(")"))
    args = (str(steps), str(processes // ranks))
    return simulated(processes, SCRIPT, recipe, asks={"layout": layout} if layout else {}, args=args, **more)


def step_s(processes: int, layout: str | None, **more: Any) -> float:
    """Return the virtual seconds of one step."""
    return (run(processes, layout, 12, **more).seconds - run(processes, layout, 4, **more).seconds) / 8


# --- the model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("layout", "ranks"), [("pipeline(stages=3, micro_batches=2)", 3), ("sharded(over=2)", 2)])
def test_losses_and_the_trained_model_are_those_of_whole_workers_bit_for_bit(
    recipe: str, layout: str, ranks: int
) -> None:
    script = SCRIPT.replace("nn.Sequential(*", "nn.Sequential(nn.Dropout(0.2), *")
    whole = simulated(2, script, recipe, args=("5", "2"))
    split = simulated(2 * ranks, script, recipe, args=("5", "2"), asks={"layout": layout})
    assert split.final == whole.final
    assert len(whole.of("log")) == 10
    assert [one["values"] for one in split.of("log")] == [one["values"] for one in whole.of("log")]
    assert split.of("start")[0]["workers"] == 2


def test_a_model_of_the_meta_device_is_built_whole() -> None:
    script = SCRIPT.replace("net = ", "with torch.device('meta'):\n    net = ")
    whole = simulated(2, script, args=("3", "2"))
    assert whole.final
    assert simulated(4, script, args=("3", "2"), asks={"layout": "pipeline(stages=2)"}).final == whole.final


# --- time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 4), (4, 4), (8, 2)])
def test_a_step_of_equal_stages_takes_the_closed_form(stages: int, batches: int) -> None:
    turn_s = 0.012
    model = CostModel(0.002, turns_s=(turn_s,) * stages)
    layout = f"pipeline(stages={stages}, micro_batches={batches})"
    assert step_s(stages, layout, cost_model=model) == pytest.approx(0.002 + (batches + stages - 1) * turn_s)
    whole = CostModel(0.096)
    expected = (batches + stages - 1) * 0.096 / stages / batches
    assert step_s(stages, layout, cost_model=whole) == pytest.approx(expected)


def test_the_log_has_the_predicted_pass_of_the_stages() -> None:
    model = CostModel(0.002, turns_s=(0.01, 0.02))
    (event,) = run(2, "pipeline(stages=2, micro_batches=3)", cost_model=model).of("stages")
    assert (event["modules"], event["micro_batches"]) == (["0", str(BLOCKS // 2)], 3)
    assert event["predicted_s"] == pytest.approx(0.01 + 3 * 0.02)
    assert event["computing"] == pytest.approx([0.03, 0.06])
    assert event["balance"] == 0.75


def pipeline_s(stages: int, batches: int, hops: list[Hop], turn_s: float, last: Hop) -> float:
    """Return the closed form for equal stages on links that are faster than the stages."""
    nbytes = 4 * BLOCK * BATCH / batches
    ways = 2 * sum(hop.seconds(nbytes) + hop.latency_s for hop in hops)
    outputs = (stages - 1) * last.seconds(4 * BLOCK * BATCH) + last.latency_s
    agreement = max(hop.latency_s for hop in hops) + last.seconds((stages - 1) * sealed_bytes(1))
    return (batches + stages - 1) * turn_s + ways + outputs + agreement


def test_activations_take_the_links_between_the_ranks() -> None:
    hop = Hop(1 / 1e6, 0.003)
    found = step_s(
        4, "pipeline(stages=4, micro_batches=2)", net="8Mbit/s 3ms", cost_model=CostModel(0, turns_s=(0.012,) * 4)
    )
    assert found == pytest.approx(pipeline_s(4, 2, [hop] * 3, 0.012, hop))


@pytest.mark.parametrize(("room", "between"), [(4, 0), (5, 0), (2, 1), (1, 3)])
def test_ranks_of_a_worker_share_a_host_that_has_room_and_so_its_links(room: int, between: int) -> None:
    inside, outside = Hop(1 / 1e7, 0.001), Hop(1 / 1e6, 0.005)
    found = step_s(
        4,
        "pipeline(stages=4, micro_batches=2)",
        net=f"hosts of {room} on 80Mbit/s 1ms, 8Mbit/s 5ms between",
        cost_model=CostModel(0, turns_s=(0.012,) * 4),
    )
    hops = [inside] * (3 - between) + [outside] * between
    assert found == pytest.approx(pipeline_s(4, 2, hops, 0.012, outside if between else inside))


def test_slower_workers_compute_for_longer_and_send_as_fast() -> None:
    settings = {"net": "8Mbit/s 3ms", "cost_model": CostModel(0.001, turns_s=(0.012,) * 2)}
    once, thrice = (step_s(2, "pipeline(stages=2, micro_batches=3)", speed=one, **settings) for one in ("1", "3"))
    assert thrice - once == pytest.approx(2 * (0.001 + 4 * 0.012))


def test_each_rank_exchanges_its_part_over_links_of_its_own() -> None:
    settings: dict[str, Any] = {"net": "8Mbit/s", "cost_model": CostModel(0.0)}
    whole = step_s(2, None, **settings)
    alone = step_s(4, "pipeline(stages=4)", **settings)
    parted = step_s(8, "pipeline(stages=4)", **settings)
    mean_s = BLOCKS * PARAMETER_BYTES / 1e6
    assert whole == pytest.approx(mean_s, rel=0.05)
    assert parted - alone == pytest.approx(mean_s / 4, rel=0.1)


def test_a_step_of_a_sharded_model_takes_the_closed_form() -> None:
    rings = 3 * BLOCKS * (PARAMETER_BYTES / 2 / 1e6 + 0.003)
    agreement = 0.003 + sealed_bytes(1) / 1e6
    found = step_s(2, "sharded(over=2)", net="8Mbit/s 3ms", cost_model=CostModel(0.04))
    assert found == pytest.approx(0.04 / 2 + rings + agreement)


# --- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_a_sharded_model_send_three_times_its_parameters_a_step(ranks: int) -> None:
    def sent(steps: int) -> int:
        return sum(one["bytes_sent"] for one in run(ranks, f"sharded(over={ranks})", steps).of("end"))

    more = sent(12) - sent(4)
    expected = 8 * 3 * (ranks - 1) * BLOCKS * PARAMETER_BYTES
    assert expected <= more < 1.01 * expected  # agreements, too


def received(events: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return the bytes that all processes have received, the bytes of parts of the model, and the rounds.

    Received bytes are counted once; the kernel's count of sent bytes has repeats of TCP in it.
    """
    ends = [one for one in events if one["event"] == "end"]
    carried = sum(row[1] for one in ends for row in one["traffic"].values())
    return sum(one["bytes_received"] for one in ends), carried, max(one["rounds"] for one in ends)


@pytest.mark.parametrize("recipe", ["allreduce", pytest.param("diloco(every=2)", marks=pytest.mark.long)])
def test_an_epoch_sends_as_many_bytes_as_a_live_one(tmp_path: Path, recipe: str) -> None:
    layout = 'pipeline(stages=2, micro_batches=3, split="blocks.2")'
    text = layout_runs.SCRIPT.replace("make_net()", "make_net(width=64)")
    found = {}
    for epochs in (1, 2):
        options = ("-n", "4", "--layout", layout, "--recipe", recipe)
        folder = layout_runs.run(tmp_path, f"live-{epochs}", *options, script=(str(epochs),), text=text)
        live = received(list(read_events(folder / "events.jsonl")))
        plain = text.replace("config = worker_config()", "config = None")
        split = simulated(4, plain, recipe, args=(str(epochs),), asks={"layout": layout})
        found[epochs] = live, received(split.events)
    live, split = (
        [second - first for first, second in zip(found[1][kind], found[2][kind], strict=True)] for kind in (0, 1)
    )
    rounds = live[2]
    assert split[2] == rounds > 0
    assert abs(split[1] - live[1]) <= rounds * 2 * 2 * 128  # padding and counts, of each rank of each worker
    first_stage = ("embed", "blocks.0", "blocks.1")
    kept = sum(one.nbytes for name, one in load_file(folder / FINAL).items() if not name.startswith(first_stage))
    live[0] -= kept  # rank 0 of worker 0 receives the other stage at an epoch's end; simulated ranks share memory
    assert 0.995 * live[0] - 40_000 < split[0] < 1.005 * live[0]  # a slow live run has more messages of the coordinator


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), st.integers(0, 99), st.integers(1, 8))
def test_the_parts_of_a_tensor_are_the_whole_in_the_ratio_of_the_ranks(
    weights: list[int], items: int, item_bytes: int
) -> None:
    replica = RankedReplica(whole(), Links(Network(), 2, ranks=len(weights)), CostModel(0.0), print)
    replica.weights = weights
    parts = replica.parts(items * item_bytes, item_bytes)
    assert sum(parts) == items * item_bytes
    for part, weight in zip(parts, weights, strict=True):
        assert part % item_bytes == 0
        assert abs(part / item_bytes - items * weight / sum(weights)) <= 1


def test_a_model_that_is_trained_in_two_sections_counts_once(tmp_path: Path) -> None:
    before, after = SCRIPT.split("loader = stretto")
    again = after.replace("(net, optimizer, loader)", "(net, optimizer, plain)")
    script = f"{before}plain = loader\nloader = stretto{after}stretto.finish()\nloader = stretto{again}"
    simulated(2, script, args=("4", "1"), asks={"layout": "pipeline(stages=2)"}, folder=tmp_path)
    first, second = (
        next(one["bytes_sent"] for one in read_events(tmp_path / run / "events.jsonl") if one["event"] == "end")
        for run in ("run", "run/section-2")
    )
    assert 0 < second <= first


# --- failures and refusals --------------------------------------------------------------------------------------


def test_a_killed_worker_of_several_ranks_fails_and_returns_as_a_whole() -> None:
    found = run(4, "pipeline(stages=2)", 20, fault="kill worker 1 at 50ms, back after 20ms")
    changes = [(one["what"], one["worker"]) for one in found.of("membership") if "worker" in one]
    assert ("failed", 1) in changes
    assert ("joined", 1) in changes[changes.index(("failed", 1)) :]
    assert found.final


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"processes": 4, "layout": 'blocks("users", "items")'}, "are not simulated"),
    ({"processes": 4, "layout": "pipeline(stages=2)", "processors": 2.0}, "have a processor each"),
    ({"processes": 5, "layout": "pipeline(stages=2)"}, "cannot be divided into workers of 2"),
    (
        {"processes": 2, "layout": "pipeline(stages=2)", "cost_model": CostModel(0.0, turns_s=(1.0,) * 3)},
        "times of 3 stages are given, and the layout has 2",
    ),
    (
        {"processes": 2, "layout": "sharded(over=2)", "cost_model": CostModel(0.0, turns_s=(1.0,) * 2)},
        "times per micro-batch are those of stages",
    ),
    ({"processes": 9, "layout": "pipeline(stages=9)"}, "cannot be cut into 9 stages"),
    ({"processes": 2, "layout": 'pipeline(stages=2, split="head")'}, "no stage can begin with"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_simulated_gets_one_clear_error(given: dict[str, Any], text: str) -> None:
    options = {"asks": {"layout": given.pop("layout")}, **given}
    with pytest.raises(StrettoError) as raised:
        simulated(options.pop("processes"), SCRIPT, args=("2", "1"), **options)
    assert text in str(raised.value)
    assert all(part in str(raised.value) for part in ("got:", "expected:", "try:"))


MODELS = {
    "the batch normalisation 0 would see micro-batches": f"nn.Sequential(nn.BatchNorm1d({BLOCK}), *layers)",
    "the outputs of the micro-batches cannot be joined": "Scored(*layers)",
}


@pytest.mark.parametrize("text", MODELS)
def test_models_that_no_live_run_splits_are_refused_here_too(text: str) -> None:
    layers = f"layers = [nn.Linear({BLOCK}, {BLOCK}) for _ in range(4)]"
    scored = "class Scored(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x).sum()\n"
    script = re.sub(r"net = .*", f"{layers}\nnet = {MODELS[text]}", SCRIPT).replace("import nn", f"import nn\n{scored}")
    with pytest.raises(StrettoError) as raised:
        simulated(2, script, args=("2", "1"), asks={"layout": "pipeline(stages=2)"})
    assert text in str(raised.value)


def test_codecs_of_matrices_are_refused_with_parts_of_matrices() -> None:
    with pytest.raises(StrettoError) as raised:
        run(2, "sharded(over=2)", recipe="allreduce(how=low_rank(rank=1))")
    assert "factorises whole matrices" in str(raised.value)


def test_a_measured_simulation_is_repeated_by_the_options_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)

    def simulate(name: str, *options: str) -> str:
        code = command(
            ["simulate", "-n", "4", "--network", "1Gbit/s 1ms", "--out", name, *options, "train.py", "9", "2"]
        )
        shown = capfd.readouterr().err
        assert code == 0, shown
        return shown

    shown = simulate("measured", "--layout", "pipeline(stages=2)")
    line = next(one for one in shown.splitlines() if one.startswith("stretto: measured: "))
    options = shlex.split(line.removeprefix("stretto: measured: "))
    assert options[0] == "--layout"
    assert "per micro-batch" in options[3]
    simulate("again", *options)
    assert Path("again/events.jsonl").read_bytes() == Path("measured/events.jsonl").read_bytes()
    assert simulate("third", "--config", "again/run.json", "--recipe", "allreduce")


def test_a_sweep_with_a_layout_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    code = command(["simulate", "-n", "4", "--layout", "pipeline(stages=2)", "--sweep", "workers=2,4", "train.py"])
    assert code != 0
    assert "a sweep has workers of one process each" in capfd.readouterr().err


def test_times_of_stages_are_read_back_from_their_text() -> None:
    model = parse("3ms, 1ms 2.5ms per micro-batch, 0.1ms encoding")
    assert model.turns_s == (0.001, 0.0025)
    assert parse(str(model)) == model
    with pytest.raises(LaunchError, match="per micro-batch"):
        parse("3ms 1ms")
