"""Rendezvous through a TCP store whose address is in the configuration of the worker."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.errors import LaunchError, TransportError, explain
from stretto.process_config import WorkerConfig
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport, reason
from stretto.transport.shared_memory import over_shared_memory


def connect(config: WorkerConfig, timeout_s: float, device: torch.device) -> Transport:
    """Join the other workers at the store of the run."""
    group = ProcessGroupTransport(open_store(config, timeout_s), config.worker, config.world_size, timeout_s)
    return over_shared_memory(group, device, notices_hosts=True)


def open_store(config: WorkerConfig, timeout_s: float) -> Store:
    """Return the store of this run, opened once in a process. Worker 0 keeps it, or torchrun's agent."""
    address = config.store_address
    if address is None:
        problem = f"{config.world_size} workers are announced, but no address for their rendezvous"
        expected = "the environment variables MASTER_ADDR and MASTER_PORT"
        raise LaunchError(explain(problem, got="neither", expected=expected, to_type="stretto run, or torchrun"))
    is_keeper = config.worker == 0 and not config.agent_store
    listen_fd = config.listen_fd if is_keeper else None
    store = _store(*address, config.worker, config.world_size, timeout_s, is_keeper, listen_fd)
    return PrefixStore(config.store_prefix, store)


@functools.lru_cache(maxsize=1)
def _store(
    host: str, port: int, worker: int, workers: int, timeout_s: float, is_keeper: bool, listen_fd: int | None
) -> Store:
    try:
        return TCPStore(
            host,
            port,
            workers,
            is_keeper,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=listen_fd is None,  # torch's own process group may use this port too
            master_listen_fd=os.dup(listen_fd) if listen_fd is not None else None,
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"worker {worker} could not reach the rendezvous at {host}:{port}: {reason(error)}"
        ) from error
