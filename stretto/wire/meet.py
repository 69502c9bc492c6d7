"""How workers find each other: through a TCP store whose address the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.errors import LaunchError, WireError, explain
from stretto.wire.collective import CollectiveWire, reason


def meet_by_environment(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float, device: torch.device
) -> CollectiveWire:
    """Join the other workers at MASTER_ADDR and MASTER_PORT; worker 0 keeps the store unless torchrun's agent does."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        problem = f"{workers} workers are announced but not where they meet"
        expected = f"the environment variable {' and '.join(missing)}"
        raise LaunchError(explain(problem, got="neither", expected=expected, to_type="stretto run, or torchrun"))
    store = _store(environment, worker, workers, timeout_s)
    generation = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return CollectiveWire(PrefixStore(f"stretto/{generation}", store), worker, workers, timeout_s, device)


def _store(environment: Mapping[str, str], worker: int, workers: int, timeout_s: float) -> Store:
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = environment.get("STRETTO_LISTEN_FD")
    keeps = worker == 0 and not agent
    try:
        return TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            workers,
            keeps,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=os.dup(int(listening)) if keeps and listening else None,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise WireError(f"worker {worker} could not reach the meeting place {where}: {reason(error)}") from error
