"""Checkpoints from within an epoch, saved under one layout and resumed under another one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from layout_runs import SCRIPT, counts, difference, run

OPTIMIZERS = {
    "momentum": "torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
    "adamw": "torch.optim.AdamW(net.parameters(), lr=0.01)",
}
LAYOUTS = {"whole": ("-n", "1")} | {
    name: ("-n", name[-2], "--layout", name) for name in ("pipeline(4)", "pipeline(2)", "sharded(2)")
}
STOPS = """
        while len(sys.argv) > 2 and step == 17:
            if [*pathlib.Path(config.run).glob("checkpoints/round-*15/manifest*")]:
                raise SystemExit("stopped after the checkpoint of round 15")
            time.sleep(0.02)
        optimizer.step()
        scheduler.step()
"""


def script(optimizer: str) -> str:
    """Return a script that stops in its second epoch, in step 17, if it has a second argument."""
    made = f"optimizer = {OPTIMIZERS[optimizer]}\n"
    made += "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=36)\n"
    text = SCRIPT.replace("optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)\n", made)
    return text.replace("\n        optimizer.step()\n", STOPS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a whole run with an optimizer."""

    @functools.cache
    def folder(optimizer: str) -> Path:
        found: Path = run(tmp_path_factory.mktemp(optimizer), "whole", "-n", "1", script=("3",), text=script(optimizer))
        return found

    return folder


SOME = [("momentum", "sharded(2)", "pipeline(2)"), ("adamw", "pipeline(4)", "whole")]
TABLE = [
    (optimizer, *pair)
    for optimizer, pair in itertools.product(OPTIMIZERS, itertools.permutations(LAYOUTS, 2))
    if ("pipeline(4)" in pair or "whole" not in pair) and (optimizer, *pair) not in SOME
]


@pytest.mark.parametrize(
    ("optimizer", "before", "after"), [*SOME, *(pytest.param(*one, marks=pytest.mark.long) for one in TABLE)]
)
def test_a_run_that_is_resumed_under_another_layout_equals_an_undisturbed_run(
    tmp_path: Path, undisturbed: Callable[[str], Path], optimizer: str, before: str, after: str
) -> None:
    text, saves = script(optimizer), ("--checkpoint-every", "5 rounds")
    stopped = run(tmp_path, "stopped", *LAYOUTS[before], *saves, script=("3", "stops"), text=text, fails=True)
    assert "stopped after the checkpoint of round 15" in stopped
    resumed = run(tmp_path, "resumed", *LAYOUTS[after], "--resume", "stopped", script=("3",), text=text)
    assert len(counts(resumed)) == 2
    assert difference(resumed, undisturbed(optimizer)) < 1e-5
