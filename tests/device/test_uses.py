"""Ways in which scripts train on a device have the bits of the CPU, whatever carries the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from child_process import call
from device_runs import GROUP, LIVE, REFUSING, results
from torch.utils.data import DataLoader, TensorDataset

from stretto.loader import epoch_order
from stretto.runtime.device_random import device_states, seed_devices, set_device_states

NAMES = [
    "clipping",
    "scaler",
    "buffers",
    "data on the device",
    "pinned data",
    "two devices",
    "Adam",
    "evaluation",
    "frozen, then thawed",
    "logged",
    "accumulation",
    "moved in memory",
    "several optimizers",
    "unused parameter",
    "averaged state of a fused optimizer",
]
RECIPES = ["allreduce", "local_sgd(every=2)", "power_sgd"]
REFUSED = {("several optimizers", "power_sgd")}
AVERAGES = 'local_sgd(every=2, optimizer_state="average")'
CASES = [f"{name}: {recipe}" for name in NAMES for recipe in RECIPES if (name, recipe) not in REFUSED]
CASES[-len(RECIPES) :] = [f"{NAMES[-1]}: {AVERAGES}"]


@pytest.mark.parametrize(
    "carrier", [pytest.param(LIVE, marks=pytest.mark.long), GROUP, pytest.param(REFUSING, marks=pytest.mark.long)]
)
def test_ways_of_training_have_the_bits_of_the_cpu(carrier: str, tmp_path: Path) -> None:
    """A transport that takes tensors of the device alone has no place for the parameters on the CPU."""
    cases = [case for case in CASES if carrier == LIVE or case.endswith("allreduce")]
    cases = [case for case in cases if carrier != REFUSING or "two devices" not in case]
    near, far = (results("uses", 2, tmp_path / one[:3], one, cases, carrier) for one in ("cpu", "far:0"))
    failed = [one["error"] for each in (*near, *far) for one in each.values() if "error" in one]
    assert not failed, failed[0]
    assert not [case for case in cases if near[0][case] != far[0][case] or near[1][case] != far[1][case]]


def test_workers_draw_different_numbers_on_their_devices(tmp_path: Path) -> None:
    (first, second) = results("random_numbers", 2, tmp_path / "far", "far:0", ["none", "evaluates"], LIVE)
    assert "error" not in first["none"], first["none"]["error"]
    assert first["none"] != second["none"]


def test_an_evaluation_moves_no_random_numbers_of_the_device(tmp_path: Path) -> None:
    (first, _) = results("random_numbers", 2, tmp_path / "far", "far:0", ["none", "evaluates"], LIVE)
    assert first["none"] == first["evaluates"]


def test_saved_random_states_hold_those_of_the_device() -> None:
    assert call("device_runs", "restores_random_states") == [True, True]


def test_random_states_need_nothing_newer_than_the_oldest_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.5 has no `torch.accelerator`."""
    monkeypatch.delattr(torch, "accelerator")
    states = device_states()
    set_device_states(states)
    seed_devices(1)


def test_pinned_rows_need_nothing_newer_than_the_oldest_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(DataLoader, "__iter__", lambda _: iter(()))  # that of a newer PyTorch needs it
    rows = epoch_order._Rows(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    assert [batch[0].tolist() for batch in rows] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}], ids=["fused", "capturable", "plain"])
def test_a_loaded_optimizer_has_its_counters_where_it_had_them(options: dict[str, bool]) -> None:
    before, after = call("device_runs", "counters_after_loading", options)
    assert before == after
