"""Models of the meta device: built as a plain script builds them, by each process its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_runs import SCRIPT, counts, difference, run
from staged_net import make_net
from torch import nn

import stretto
from stretto.errors import ModelError
from stretto.events import read_events
from stretto.parallel.meta_start import build, place_meta, with_memory
from stretto.strategies.parameter_view import is_held

ON_META = """
class Whole(__import__("staged_net").Net):
    def reset_parameters(self):
        torch.nn.init.normal_(self.place)
with torch.device("meta"):
    net = Whole()
"""
META_SCRIPT = SCRIPT.replace("net = make_net()\n", ON_META)
SAVE_OWN = """
from stretto.strategies.parameter_view import is_held
state = lambda one: [one.detach(), *(optimizer.state[one][name] for name in ("exp_avg", "exp_avg_sq", "step"))]
held = {name: state(one) for name, one in net.named_parameters() if is_held(one)}
torch.save(held, f"{config.worker}-{config.rank}.pt")
"""
CPU = torch.device("cpu")


def make() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(9, 4),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)),
        nn.Conv1d(1, 2, 3),
        nn.Linear(4, 3, bias=False),
    )


def meta() -> nn.Module:
    with torch.device("meta"):
        model = make()
    place_meta(model, CPU)
    return model


def test_a_model_of_the_meta_device_gets_the_values_of_a_plain_one() -> None:
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    with torch.device("meta"):
        model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    place_meta(model, CPU)
    build(model)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, one), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(one is other for one, other in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))


@pytest.mark.parametrize("kept", ["", "0", "1", "2", "5"])
def test_a_part_has_the_values_of_the_whole_and_the_rest_no_memory(kept: str) -> None:
    torch.manual_seed(1)
    whole = make()
    model = meta()
    state = torch.Generator().manual_seed(1).get_state()
    build(model, state, lambda name: name.startswith(f"{kept}."))
    for name, one in model.named_parameters():
        if name.startswith(f"{kept}."):
            assert torch.equal(one, whole.get_parameter(name)) and is_held(one)
        else:
            assert one.untyped_storage().nbytes() == 4 and one.isnan().all() and not is_held(one)


def test_memory_for_a_measurement_is_given_back() -> None:
    model = meta()
    with with_memory(model[1]):
        assert model[1].linear1.weight.untyped_storage().nbytes() == 4 * 32
        assert not model[1].linear1.weight.any()
    assert all(one.untyped_storage().nbytes() == 4 for one in model.parameters())


def test_a_class_without_first_values_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(ModelError, match=r"the Scale 1 was built.*\n  got: gain of.*\n.*\n  try: def reset_parameters"):
        stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), [])


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    text = META_SCRIPT.replace("step = 0\n", 'torch.save(net.state_dict(), "model.pt")\n')
    said = run(tmp_path, "run", "-n", "2", "--layout", "pipeline(2)", text=text, fails=True)
    assert "no values before its first call" in said and not (tmp_path / "model.pt").exists()


def test_a_run_in_stages_that_begins_on_the_meta_device_equals_a_single_process(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", "-n", "1", text=META_SCRIPT)
    staged = run(tmp_path, "staged", "-n", "2", "--layout", "pipeline(stages=2)", text=META_SCRIPT)
    assert difference(staged, whole) < 1e-6


@pytest.mark.long
def test_a_run_that_began_on_the_meta_device_is_resumed_under_another_layout(tmp_path: Path) -> None:
    run(tmp_path, "two", "-n", "2", "--layout", "pipeline(2)", "--checkpoint-every", "5 rounds", text=META_SCRIPT)
    three = ("-n", "3", "--layout", "pipeline(3)", "--resume", "two")
    resumed = run(tmp_path, "three", *three, script=("3",), text=META_SCRIPT)
    assert difference(resumed, run(tmp_path, "whole", "-n", "1", script=("3",), text=META_SCRIPT)) < 1e-6


@pytest.mark.long
def test_a_killed_rank_of_a_model_of_the_meta_device_takes_the_state_of_another(tmp_path: Path) -> None:
    layout = ("-n", "4", "--layout", "pipeline(stages=2)", "--failure-timeout", "60s")
    folder = run(tmp_path, "run", *layout, script=("6", "1", "1", "7", "before"), text=META_SCRIPT + SAVE_OWN)
    failed = [event for event in read_events(folder / "events.jsonl") if event.get("what") == "failed"]
    assert [(event["worker"], event.get("rank", 0)) for event in failed] == [(1, 1)]
    assert all(one == {"once": 60, "twice": 0, "never": 0, "dropped": 0} for one in counts(folder))
    saved = [[torch.load(tmp_path / f"{worker}-{rank}.pt") for worker in range(2)] for rank in range(2)]
    assert sum(len(one) for one, _ in saved) == len([*make_net().parameters()])
    for one, other in saved:
        assert one.keys() == other.keys()
        assert all(torch.equal(own, others) for name in one for own, others in zip(one[name], other[name], strict=True))


MEMORY_SCRIPT = """
import ctypes, pathlib, sys, threading, torch, stretto
from stretto.process_config import worker_config
for parameter in (-1, -3):  # freed memory goes back to the system: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    assert ctypes.CDLL(None).mallopt(parameter, 65536)
def own_megabytes():
    return int(next(one for one in open("/proc/self/status") if one.startswith("RssAnon")).split()[1]) / 1024
def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, own_megabytes())
peak = before = own_megabytes()
ended, width = threading.Event(), int(sys.argv[2])
threading.Thread(target=watch, daemon=True).start()
with torch.device("meta"):
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
data = torch.utils.data.TensorDataset(torch.randn(8, width))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for epoch in range(int(sys.argv[1])):
    for (x,) in loader:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
stretto.finish()
pathlib.Path(f"peak-{worker_config().rank}").write_text(str(peak - before))
"""


def test_no_process_of_a_pipeline_holds_the_whole_model(tmp_path: Path) -> None:
    """Parameters of 32 MB at each of 4 stages, with gradients and momentum, saved in checkpoints and at the end."""
    layout = ("-n", "4", "--layout", 'pipeline(stages=4, split="2, 4, 6")', "--checkpoint-every", "4 rounds")

    def peaks(name: str, *options: str, epochs: str = "1", width: str = "2048") -> list[float]:
        run(tmp_path, name, *layout, *options, script=(epochs, width), text=MEMORY_SCRIPT)
        return [float((tmp_path / f"peak-{rank}").read_text()) for rank in range(4)]

    small, begun = peaks("small", width="16"), peaks("begun")
    for found in begun, peaks("resumed", "--resume", "begun", epochs="2"):
        first, *others = [large - small for large, small in zip(found, small, strict=True)]
        assert max(others) < 5 * 32
        assert first < 10 * 32  # one copy of what the checkpoint holds would be 8 * 32 more than the others have


@pytest.mark.long
def test_checkpoints_of_a_sharded_model_take_no_memory_for_the_whole(tmp_path: Path) -> None:
    layout = ("-n", "4", "--layout", "sharded(4)", "--checkpoint-every", "4 rounds")
    run(tmp_path, "run", *layout, script=("2", "2048"), text=MEMORY_SCRIPT)
    first, *others = (float((tmp_path / f"peak-{rank}").read_text()) for rank in range(4))
    assert first < max(others) + 3 * 32  # the checkpoint holds 8 * 32
