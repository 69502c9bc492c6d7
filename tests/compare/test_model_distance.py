"""Distances of states whose distance is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from stretto.compare.model_distance import compared, parameter_distance, prediction_disagreement
from stretto.errors import LogError


def save(path: Path, **tensors: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def test_equal_states_are_at_distance_zero(tmp_path: Path) -> None:
    state = {"w": torch.randn(5, 3), "b": torch.zeros(3), "h": torch.randn(4).to(torch.bfloat16)}
    assert parameter_distance(save(tmp_path / "a", **state), save(tmp_path / "b", **state)) == 0.0


def test_a_known_perturbation_has_its_exact_distance(tmp_path: Path) -> None:
    reference = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    moved = {"w": torch.tensor([3.0, 0.3]), "b": torch.tensor([[4.4]])}
    found = parameter_distance(save(tmp_path / "a", **moved), save(tmp_path / "b", **reference))
    assert found == pytest.approx(0.1, rel=1e-6)


@given(scale=st.floats(1e-3, 1e3))
def test_the_distance_is_relative(tmp_path_factory: pytest.TempPathFactory, scale: float) -> None:
    folder = tmp_path_factory.mktemp("scaled")
    a, b = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    plain = parameter_distance(save(folder / "a", w=a), save(folder / "b", w=b))
    scaled = parameter_distance(save(folder / "c", w=scale * a), save(folder / "d", w=scale * b))
    assert scaled == pytest.approx(plain)


def test_integers_and_running_statistics_do_not_count(tmp_path: Path) -> None:
    w = torch.ones(3)
    mine = {"w": w, "bn.num_batches_tracked": torch.tensor(1), "bn.running_mean": torch.ones(2)}
    its = {"w": w, "bn.num_batches_tracked": torch.tensor(9), "bn.running_mean": torch.zeros(2)}
    assert parameter_distance(save(tmp_path / "a", **mine), save(tmp_path / "b", **its)) == 0.0


def test_states_that_are_not_finite_have_no_distance(tmp_path: Path) -> None:
    whole = save(tmp_path / "a", w=torch.ones(2))
    assert parameter_distance(save(tmp_path / "b", w=torch.tensor([1.0, math.nan])), whole) is None
    assert parameter_distance(whole, save(tmp_path / "c", w=torch.zeros(2))) is None


def test_states_of_different_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    state = save(tmp_path / "a", w=torch.ones(2))
    with pytest.raises(LogError, match="same parameters"):
        parameter_distance(state, save(tmp_path / "b", v=torch.ones(2)))
    with pytest.raises(LogError, match="shape"):
        parameter_distance(state, save(tmp_path / "c", w=torch.ones(3)))
    (tmp_path / "d").write_bytes(b"half a fi")
    with pytest.raises(LogError, match="cannot be read"):
        parameter_distance(state, tmp_path / "d")


def test_the_share_of_predictions_that_differ(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 1], [2, 3]], np.int32))
    np.save(tmp_path / "b.npy", np.array([[0, 1], [2, 4]], np.int32))
    np.save(tmp_path / "c.npy", np.array([0, 1], np.int32))
    assert prediction_disagreement(tmp_path / "a.npy", tmp_path / "b.npy") == 0.25
    assert prediction_disagreement(tmp_path / "a.npy", tmp_path / "a.npy") == 0.0
    assert prediction_disagreement(tmp_path / "a.npy", tmp_path / "c.npy") is None
    assert prediction_disagreement(tmp_path / "a.npy", tmp_path / "none.npy") is None


def test_pickled_predictions_are_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(LogError):
        prediction_disagreement(tmp_path / "a.npy", tmp_path / "a.npy")


def test_distances_over_time_are_at_sample_counts_of_both_runs(tmp_path: Path) -> None:
    for run, times in (("mine", 1.1), ("its", 1.0)):
        for samples in (100, 200, 300) if run == "mine" else (200, 300, 1000):
            save(tmp_path / run / "states" / f"{samples:08d}.safetensors", w=times * torch.ones(2))
        save(tmp_path / run / "final.safetensors", w=times * torch.ones(2))
        predictions = [0, 1, 1, 1] if run == "mine" else [0, 1, 2, 2]
        np.save(tmp_path / run / "final.predictions.npy", np.array(predictions, np.int32))
    found = compared(tmp_path / "mine", tmp_path / "its")
    assert found["compared_with"] == "its"
    assert found["parameter_distance"] == pytest.approx(0.1, rel=1e-5)
    assert found["prediction_disagreement"] == 0.5
    assert [one["samples"] for one in found["distances"]] == [200, 300]
    assert all(one["parameter_distance"] == pytest.approx(0.1, rel=1e-5) for one in found["distances"])


def test_runs_without_states_have_no_distances(tmp_path: Path) -> None:
    found = compared(tmp_path / "mine", tmp_path / "its")
    assert found["parameter_distance"] is None
    assert found["distances"] == []
