"""Strangers who hold connections to the services of a run open, whatever they send, use up their descriptors, and do
not end the run."""

from __future__ import annotations

import contextlib
import itertools
import socket
from pathlib import Path

import psutil
import pytest
from run_place import Place, config_of, coordinators, until

from stretto.events import read_events
from tests.strangers import FIRST_BYTES

SCRIPT = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(128, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
"""
FEW = 128
"""Descriptors that the launcher, and so each service, begins with; the system allows more."""


@pytest.mark.plain_processes
@pytest.mark.parametrize("recipe", [pytest.param("local_sgd(every=2)", marks=pytest.mark.long), "async_sgd"])
def test_connections_without_a_key_do_not_end_a_run(place: Place, recipe: str) -> None:
    place.recovers = True
    Path("train.py").write_text(SCRIPT)
    few = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({FEW}, r.getrlimit(r.RLIMIT_NOFILE)[1])); "
    words = ["-n", "2", "--recipe", recipe, "--listen", "127.0.0.1", "--out", "run"]
    run = place.stretto("run", *words, "train.py", before=few)
    until(lambda: coordinators(place) and _ports(place), limit_s=90)
    with contextlib.ExitStack() as strangers:
        for port in _ports(place):
            for _, sent in zip(range(2 * FEW), itertools.cycle(FIRST_BYTES.values())):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(sent)
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, (output + errors)[-2000:]
    found = list(read_events(Path("run/events.jsonl")))
    assert coordinators(place) == []
    assert not [event for event in found if event.get("what") == "failed"]
    counts = [event["sample_counts"] for event in found if event["event"] == "epoch"]
    assert counts and not any(one["twice"] or one["never"] for one in counts)


def _ports(place: Place) -> list[int]:
    """Return the ports at which the coordinator and the shards of a run listen."""
    services = [one for one in place.left() if config_of(one).get("type") in ("coordinator", "shard")]
    return [
        one.laddr.port
        for process in services
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
