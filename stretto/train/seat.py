"""Where this worker sits: its number, how it reaches the others, and what the launcher asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.errors import LaunchError, explain
from stretto.recipe import Recipe
from stretto.server.service import WorkerKeys
from stretto.train.surroundings import Surroundings
from stretto.wire import Wire
from stretto.wire.hosted import meet_at_lead
from stretto.wire.link import dial
from stretto.wire.server import ServerWire
from stretto.wire.solo import SoloWire

DEFAULT_TIMEOUT_S = 600.0


def _solo(device: torch.device) -> Wire:  # noqa: ARG001
    return SoloWire()


@dataclass(frozen=True)
class Seat:
    """One worker's place in a run. `wire` is called once, with the device of the model."""

    worker: int = 0
    workers: int = 1
    wire: Callable[[torch.device], Wire] = _solo
    recipe: str | None = None
    run: Path | None = None
    opens_folder: bool = False
    """Whether worker 0 makes the run folder, since no launcher of ours has made one."""
    seed: int | None = None
    alone: bool = False
    join: int = 1
    keep_states: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    around: Surroundings = field(default_factory=Surroundings)
    server: Callable[[], ServerWire] | None = None
    """How it reaches the parameter server that a launcher has started, if one has."""
    lead_host: str = "127.0.0.1"
    """Where worker 0 listens if it has to keep a parameter server itself."""
    slow: float = 1.0
    """How much longer its computing is made to last."""
    on_nan: str = "stop"

    def wire_for(self, recipe: Recipe | None, device: torch.device) -> Wire:
        """The wire that the recipe asks for. Without a server of a launcher's worker 0 keeps one in its process."""
        if recipe is None or not recipe.shards:
            return self.wire(device)
        if self.server is not None:
            return self.server()
        meeting = self.wire(torch.device("cpu"))
        return meet_at_lead(meeting, recipe.shards, self.on_nan, self.timeout_s, self.lead_host)


given_seat: ContextVar[Seat | None] = ContextVar("given_seat", default=None)
"""A seat given by a host in this process (a test, the simulator); it goes before the environment."""


def find_seat(environment: Mapping[str, str] = os.environ) -> Seat | None:
    """The seat of this worker, or None when the script was started plainly.

    A launcher shows itself by WORLD_SIZE and RANK, as torchrun sets them, or by STRETTO_RUN.
    """
    given = given_seat.get()
    if given is not None:
        return given
    if "STRETTO_RUN" not in environment and "WORLD_SIZE" not in environment:
        return None
    workers, worker = _number(environment, "WORLD_SIZE", 1), _number(environment, "RANK", 0)
    timeout_s = float(environment.get("STRETTO_TIMEOUT", DEFAULT_TIMEOUT_S))
    return Seat(
        worker=worker,
        workers=workers,
        wire=_solo if workers == 1 else _collective(environment, worker, workers, timeout_s),
        recipe=environment.get("STRETTO_RECIPE") or None,
        run=Path(environment["STRETTO_RUN"]) if "STRETTO_RUN" in environment else None,
        opens_folder="STRETTO_RUN" not in environment,
        around=Surroundings(own_process=True),
        seed=_number(environment, "STRETTO_SEED", 0) if "STRETTO_SEED" in environment else None,
        alone=environment.get("STRETTO_ALONE") == "1",
        join=_number(environment, "STRETTO_JOIN", 1),
        keep_states=environment.get("STRETTO_KEEP_STATES") == "1",
        timeout_s=timeout_s,
        server=_server(environment, worker, workers, timeout_s),
        lead_host=environment.get("MASTER_ADDR", "127.0.0.1"),
        slow=float(environment.get("STRETTO_SLOW", "1")),
        on_nan=environment.get("STRETTO_ON_NAN", "stop"),
    )


def _server(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float
) -> Callable[[], ServerWire] | None:
    if "STRETTO_SERVERS" not in environment:
        return None
    addresses = [f"tcp://{one}" for one in environment["STRETTO_SERVERS"].split(",")]
    keys = environment.get("STRETTO_KEYS")
    mine = WorkerKeys(*(key.encode() for key in keys.split(","))) if keys else None
    return lambda: dial(worker, workers, addresses, mine, timeout_s)


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    try:
        return int(text)
    except ValueError:
        problem = f"the environment variable {name} is no number"
        raise LaunchError(
            explain(problem, got=text, expected="a whole number", to_type="stretto run, or torchrun")
        ) from None


def _collective(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float
) -> Callable[[torch.device], Wire]:
    def meet(device: torch.device) -> Wire:
        from stretto.wire.meet import meet_by_environment

        return meet_by_environment(environment, worker, workers, timeout_s, device)

    return meet
