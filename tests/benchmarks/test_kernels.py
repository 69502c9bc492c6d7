"""The benchmark of the kernels: all sides do the same work, and the stored record makes a table."""

import json

import pytest
import torch

from benchmarks import kernels, measure, tables

pytestmark = pytest.mark.skipif(kernels.kernels.why_not_native() is not None, reason="no native kernels")
NUMBERS = 409_600


@pytest.mark.parametrize("name", ["threshold 1%", "top-k 1%", "top-64 of 4096", "sign, two means"])
def test_torch_and_kernel_leave_the_same_residual(name):
    case = kernels.cases()[name]
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.full((NUMBERS,), 0.25) for _ in range(2))
    case.ours(x, ours)
    case.torch(x, theirs)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_eight_bit_residual_is_below_one_level():
    case = kernels.cases()["8 bits, stochastic"]
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1))
    for side in (case.ours, case.torch):
        residual = torch.zeros(NUMBERS)
        side(x, residual)
        assert 0 < float(residual.abs().max()) <= float(x.abs().max()) / 127 * 1.001


def test_trial_is_stored_and_makes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "save", lambda *about, **more: measure.save(*about, **more, folder=tmp_path))
    kernels.run(rounds=1, numbers=NUMBERS)
    assert "of memcpy" in capsys.readouterr().out
    record = json.loads((tmp_path / "kernels-trial.json").read_text())
    table = list(tables.kernels(record))
    assert len([line for line in table if "at least 0.5" in line]) == 3
