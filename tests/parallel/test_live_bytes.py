"""Bytes that a rank sends to its counterpart in another worker, by the event log of a run: its part of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_runs import SCRIPT, run
from staged_net import make_net

from stretto.events import read_events

WIDTH = 48
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("pipeline(2)", "diloco(every=2)"),
        pytest.param("pipeline(2)", "allreduce", marks=LONG),
        pytest.param("pipeline(3)", "local_sgd(every=2)", marks=LONG),
        pytest.param("sharded(2)", "allreduce", marks=LONG),
        pytest.param("sharded(2)", "diloco(every=2)", marks=LONG),
    ],
)
def test_a_rank_sends_its_part_of_the_model_in_a_round(tmp_path: Path, layout: str, recipe: str) -> None:
    ranks, text = int(layout[-2]), SCRIPT.replace("make_net()", f"make_net(width={WIDTH})")
    options = ("-n", str(2 * ranks), "--layout", layout, "--recipe", recipe)
    folder = run(tmp_path, "run", *options, script=("1",), text=text)
    ends = [event for event in read_events(folder / "events.jsonl") if event["event"] == "end"]
    assert len(ends) == 2 * ranks
    tensors = list(make_net(width=WIDTH).parameters())
    more = 64 * (len(tensors) + 1)  # tensors begin at multiples of 64 bytes, and the samples are counted
    for end in ends:
        share = end["memory"]["parameters"]  # as large as the measured times of the stages have divided the model
        sent = sum(row[1] for purpose, row in end["traffic"].items() if purpose != "evaluation_sync") / end["rounds"]
        assert share <= sent <= share + more
    whole = 4 * sum(one.numel() for one in tensors)
    assert sum(end["memory"]["parameters"] for end in ends) == 2 * whole
