"""How workers find each other: through a TCP store whose address the environment names."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.errors import LaunchError, TransportError, explain
from stretto.membership.variables import address_in
from stretto.transport.process_group import ProcessGroupTransport, reason


def meet_by_environment(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float, device: torch.device
) -> ProcessGroupTransport:
    """Join the other workers at the address in the environment; worker 0 keeps the store, or the agent of torchrun."""
    store = store_by_environment(environment, worker, workers, timeout_s)
    return ProcessGroupTransport(store, worker, workers, timeout_s, device)


def store_by_environment(environment: Mapping[str, str], worker: int, workers: int, timeout_s: float) -> Store:
    """Our part of the store of this run. The same store is given each time, since worker 0 can keep it only once."""
    address = address_in(environment)
    if address is None:
        problem = f"{workers} workers are announced but not where they meet"
        expected = "the environment variables MASTER_ADDR and MASTER_PORT"
        raise LaunchError(explain(problem, got="neither", expected=expected, to_type="stretto run, or torchrun"))
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = environment.get("STRETTO_LISTEN_FD") if worker == 0 and not agent else None
    store = _store(*address, worker, workers, timeout_s, worker == 0 and not agent, listening)
    return PrefixStore(f"stretto/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@functools.lru_cache(maxsize=1)
def _store(
    host: str, port: str, worker: int, workers: int, timeout_s: float, keeps: bool, listening: str | None
) -> Store:
    try:
        return TCPStore(
            host,
            int(port),
            workers,
            keeps,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=listening is None,  # torch's own process group may be opened at this port too
            master_listen_fd=os.dup(int(listening)) if listening else None,
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"worker {worker} could not reach the meeting place {host}:{port}: {reason(error)}"
        ) from error
