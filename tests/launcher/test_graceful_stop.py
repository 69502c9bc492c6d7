"""A run that SIGTERM ends writes a checkpoint, and continues from it as if it had not ended (`--stop-within`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_place import Place, config_of, coordinators, until

from stretto.events import read_events

SAMPLES, EPOCHS, SECRET = 64, 30, "Tr0ub4dor"
SCRIPT = f"""
import pathlib, time, torch, stretto
torch.manual_seed(0)
x = torch.randn({SAMPLES}, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for epoch in range({EPOCHS}):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        while epoch == 2 and not pathlib.Path("go").exists():
            time.sleep(0.01)
            pathlib.Path(f"waits-{{stretto.rank()}}").touch()
"""


def epochs(run: str) -> dict[int, dict[str, Any]]:
    """Return the samples of each epoch that has ended."""
    log = read_events(Path(run) / "events.jsonl")
    return {one["epoch"]: one["sample_counts"] for one in log if one["event"] == "epoch"}


@pytest.mark.parametrize("kills", [False, True], ids=["", "coordinator ends too"])
def test_run_that_sigterm_ends_writes_a_checkpoint_and_continues_from_it(place: Place, kills: bool) -> None:
    place.recovers = True
    (place.folder / "train.py").write_text(SCRIPT)
    options = ["-n", "2", "--threads", "1", "--recipe", "local_sgd(every=2)"]
    options += [] if kills else ["--checkpoint-every", "1h"]  # the default has written none by then, either
    run = place.stretto("run", *options, "--stop-within", "60s", "--out", "first", "train.py", "--api-key", SECRET)
    until(lambda: Path("waits-0").exists() and Path("waits-1").exists(), limit_s=90)
    run.send_signal(signal.SIGTERM)
    if kills:
        (coordinator,) = [one for one in place.left() if config_of(one).get("type") == "coordinator"]
        coordinator.terminate()
        until(lambda: coordinators(place) not in ([], [coordinator.pid]), limit_s=60)
    Path("go").touch()
    out, err = run.communicate(timeout=90)
    assert run.returncode == 128 + signal.SIGTERM, err.decode()
    assert "continue from the last checkpoint: stretto run --resume first" in err.decode()
    assert SECRET not in (out + err).decode()
    assert len(list(Path("first/checkpoints").glob("round-*"))) == 1, out.decode()
    ended = place.stretto("run", "--resume", "first", *options, "--out", "second", "train.py")
    assert ended.wait(90) == 0, ended.communicate()
    counts = epochs("first") | epochs("second")
    assert sorted(counts) == list(range(1, EPOCHS + 1))
    assert all((one["once"], one["twice"], one["never"]) == (SAMPLES, 0, 0) for one in counts.values())


def test_second_signal_ends_the_run_at_once(place: Place) -> None:
    place.recovers = True
    script = place.script(
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(f'ready-{config.worker}').touch()\ntime.sleep(600)"
    )
    options = ["-n", "2", "--checkpoint-every", "1h", "--stop-within", "600s"]
    run = place.stretto("run", *options, "--out", "here", script, before="import signal; ")
    until(lambda: Path("ready-0").exists() and Path("ready-1").exists())
    run.send_signal(signal.SIGTERM)
    assert run.stderr is not None
    os.set_blocking(run.stderr.fileno(), False)
    said = bytearray()

    def is_leaving() -> bool:
        said.extend(run.stderr.read() or b"")  # type: ignore[union-attr]
        return b"stopped by SIGTERM; the workers leave" in said

    until(is_leaving)  # of two pending signals Python would handle the one of the lower number first
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 128 + signal.SIGINT
