"""Residual norms in the record of a short run are those of its exchanges, not of the time before them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from thread_workers import regression, run_workers, training

from stretto.codecs import CodecContext, top_k
from stretto.codecs.error_feedback import error_feedback
from stretto.report.run_record import record
from stretto.strategies.traffic_counters import Tally

RESIDUALS = [
    "power_sgd(rank=1)",
    "local_sgd(every=2, how=error_feedback(top_k(0.1)))",
    "deep_gradient_compression(ratio=0.1)",
    "downpour(every=1, how=error_feedback(top_k(0.1)))",
]


@pytest.mark.parametrize("recipe", RESIDUALS)
def test_short_run_records_a_residual(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"workers": 2}')
    run_workers(2, training(regression(64), 4), recipe, run=tmp_path)
    assert record(tmp_path)["residual_share"] > 0.01


def test_norms_of_a_short_run_are_those_of_its_later_half() -> None:
    tally, codec = Tally(CodecContext(0, 2, clock=lambda: 0.0)), error_feedback(top_k(0.1))
    state = codec.init_state(torch.zeros(10), CodecContext(0, 2))
    measured = []
    for number in range(1, 21):
        given = torch.arange(10.0) + number
        norm = tally.norm_of([given])
        codec.encode(given, state)
        tally.measure_residual_later(norm, codec, [state])
        if norm is not None:
            measured.append(number)
    assert measured == [1, 2, 4, 8, 16]
    assert tally.figures()["residual_norms"][0] == pytest.approx((torch.arange(10.0) + 16).norm().item())
