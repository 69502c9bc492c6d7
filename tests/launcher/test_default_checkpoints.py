"""Runs without a typed interval: their checkpoints, the command that continues them, and the runs that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_place import Place

from stretto.errors import RunFailedError
from stretto.events import read_events
from stretto.launcher.config import check, checkpoint_notice, settled
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

SCRIPT = """
import os, sys, time, torch, stretto
from pathlib import Path
torch.manual_seed(0)
x = torch.randn(64, 8)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
is_resumed = len(sys.argv) > 1
for epoch in range(40):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        if 20 <= epoch < 30 and not is_resumed and not any(Path("first/checkpoints").glob("round-*")):
            time.sleep(0.3)  # at most 48 s in all; the next step may be the one at which all workers save
    if epoch == 30 and not is_resumed:
        assert any(Path("first/checkpoints").glob("round-*"))
        raise ValueError("enough")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_has_failed_is_continued_from_the_checkpoint_that_nothing_asked_for(
    workers: int, place: Place
) -> None:
    (script := place.folder / "train.py").write_text(SCRIPT)
    options: dict[str, Any] = {"workers": workers, "threads": 1, "recipe": "local_sgd(every=2)"}
    with pytest.raises(RunFailedError, match="continue from the last checkpoint: stretto run --resume first"):
        run(RunConfig(script, **options, out=Path("first"), first_checkpoint_s=0.02), ProgressDisplay(quiet=True))
    again = RunConfig(script, ("resumed",), **options, out=Path("second"), resume=Path("first"))
    run(again, ProgressDisplay(quiet=True))
    logs = [event for name in ("first", "second") for event in read_events(Path(name) / "events.jsonl")]
    counts = {event["epoch"]: event["sample_counts"] for event in logs if event["event"] == "epoch"}
    assert sorted(counts) == list(range(1, 41))
    assert all((one["once"], one["twice"], one["never"]) == (64, 0, 0) for one in counts.values())
    assert not Path("second/checkpoints").exists(), "a run that is shorter writes none"


def test_layout_without_default_checkpoints_says_so_and_what_to_type(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    blocks, fixed = (
        RunConfig(script, workers=2, layout='blocks("rows", "columns")'),
        RunConfig(script, workers=2, recovery=False),
    )
    check(blocks)
    assert '--checkpoint-every "4 rounds" writes them' in (checkpoint_notice(blocks) or "")
    assert settled(blocks).checkpoints is settled(fixed).checkpoints is None
    for config in (fixed, RunConfig(script), RunConfig(script, workers=2, checkpoint_every="never")):
        assert checkpoint_notice(config) is None
