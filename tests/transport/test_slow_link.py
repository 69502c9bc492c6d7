"""The limit of a wait is on silence: what takes longer than it over a slow link, but moves, comes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fork_server import NEW_NETWORK
from parameter_servers import ADDING_RECIPE, Servers, push, receive

from stretto.collective_ops import AllGather
from stretto.parameter_server.client import ParameterServerClient
from stretto.transport import process_group
from stretto.transport.process_group import ProcessGroupTransport

LIMIT_S = 2.0
RATE = "5mbit"
NBYTES = 3_000_000
"""This takes more than twice the limit."""
SHAPED = f"""
ip link set lo mtu 1500 up
tc qdisc add dev lo root tbf rate {RATE} burst 32kb limit 100kb
"""


def _together(act: Callable[[ProcessGroupTransport], object], elastic: bool) -> None:
    """Two workers do it."""
    store = dist.HashStore()

    def one(worker: int) -> None:
        wire = ProcessGroupTransport(store, worker, 2, LIMIT_S, elastic=elastic)
        act(wire)
        wire.all_gather_bytes(b"done")
        wire.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def _serve(act: Callable[[ParameterServerClient], object]) -> None:
    servers = Servers()
    wire = servers.client(servers.start(1), 0, LIMIT_S)
    act(wire)
    servers.close()


def _push(wire: ParameterServerClient) -> None:
    parts = [torch.ones(NBYTES // 4)]
    wire.open(1, ADDING_RECIPE, parts)
    receive(push(wire, 1, parts), parts)


def _told(wire: ProcessGroupTransport) -> None:
    assert wire.broadcast_bytes(bytes(NBYTES)) == bytes(NBYTES)


def _gathered(wire: ProcessGroupTransport) -> None:
    assert wire.all_gather_bytes(bytes(NBYTES // 2)) == [bytes(NBYTES // 2)] * 2


def _heard(wire: ProcessGroupTransport) -> None:
    for one in wire.submit(AllGather(torch.ones(NBYTES // 8))).wait():
        assert one.sum() == NBYTES // 8


CASES: dict[str, Callable[[], None]] = {
    "broadcast": lambda: _together(_told, elastic=True),
    "all_gather": lambda: _together(_gathered, elastic=False),
    "every": lambda: _together(_heard, elastic=True),
    "push": lambda: _serve(_push),
}


@pytest.mark.parametrize("case", CASES)
def test_data_on_a_slow_link_arrives_without_a_timeout(case: str) -> None:
    if os.geteuid() or not shutil.which("tc"):
        pytest.skip("a slow link needs root and iproute2")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, __file__, case], env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 2 * LIMIT_S


if __name__ == "__main__":
    import time

    if ctypes.CDLL(None).unshare(NEW_NETWORK):
        sys.exit("no network namespace can be made")
    subprocess.run(["sh", "-ec", SHAPED], check=True)
    process_group.PIECE_BYTES = 1 << 17
    began = time.monotonic()
    CASES[sys.argv[1]]()
    print(time.monotonic() - began)
