"""The names of environment variables by which a launcher gives a worker its place.

`stretto run` uses names of its own: RANK and WORLD_SIZE make other libraries (Accelerate, transformers, Lightning) open
a process group at MASTER_PORT. Those names are torchrun's, and are read only where torchrun has set them.
"""

from __future__ import annotations

from collections.abc import Mapping

RANK, WORLD_SIZE, STORE = "STRETTO_RANK", "STRETTO_WORLD_SIZE", "STRETTO_STORE"
OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables that `stretto run` removes from its workers' environment."""


def is_ours(environment: Mapping[str, str]) -> bool:
    """True if a launcher of ours has given the place."""
    return WORLD_SIZE in environment


def names_of(environment: Mapping[str, str]) -> tuple[str, str]:
    """The names of the variables that hold the number of this worker and the number of all."""
    return (RANK, WORLD_SIZE) if is_ours(environment) else ("RANK", "WORLD_SIZE")


def address_in(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Host and port of the store at which workers find each other; None where the environment has none."""
    if is_ours(environment):
        host, _, port = environment.get(STORE, "").rpartition(":")
        return (host, port) if host else None
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return environment["MASTER_ADDR"], environment["MASTER_PORT"]
    return None
