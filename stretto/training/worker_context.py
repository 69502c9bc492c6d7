"""Where this worker sits: its number, how it reaches the others, and what the launcher asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stretto.errors import LaunchError, TransportError, explain
from stretto.interval import Interval, every
from stretto.loader.epoch_batches import Rule
from stretto.membership import variables
from stretto.membership.barrier_client import Barrier, by_environment
from stretto.membership.client import MembershipClient
from stretto.membership.messages import ReadyReport
from stretto.parameter_server.embedded import meet_at_lead
from stretto.parameter_server.messages import OVER
from stretto.parameter_server.rpc_channel import dial
from stretto.recipe.recipe import Recipe
from stretto.runtime.runtime import Runtime
from stretto.security import worker_keys
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport
from stretto.transport.single_worker import SingleWorkerTransport

DEFAULT_TIMEOUT_S = 600.0
RETURN_S = 30.0
"""How long a launcher may take to start a server again: its pause before that, and until a process has begun."""
FIRST_S = 60.0
"""How long a worker waits for the first word of a coordinator."""


def _solo(device: torch.device) -> Transport:  # noqa: ARG001
    return SingleWorkerTransport()


@dataclass(frozen=True)
class WorkerContext:
    """One worker's place in a run. `wire` is called once, with the device of the model."""

    worker: int = 0
    workers: int = 1
    wire: Callable[[torch.device], Transport] = _solo
    recipe: str | None = None
    run: Path | None = None
    opens_folder: bool = False
    """Whether worker 0 makes the run folder, since no launcher of ours has made one."""
    seed: int | None = None
    alone: bool = False
    join: int = 1
    split: bool = False
    """True if all workers share each batch of the script."""
    lr_factor: float = 1.0
    """The factor on the script's learning rate."""
    keep_states: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    around: Runtime = field(default_factory=Runtime)
    server: Callable[[Recipe], Transport] | None = None
    """How it reaches the parameter server that a launcher has started, if one has."""
    lead_host: str = "127.0.0.1"
    """Where worker 0 listens if it has to keep a parameter server itself."""
    slow: float = 1.0
    """How much longer its computing is made to last."""
    on_nan: str = "stop"
    life: int = 0
    """How often this worker was started before."""
    rule: Rule = "per-worker-batch"
    checkpoint: Interval | None = None
    keep: int = 3
    resume: Path | None = None
    """The folder of a run to go on from."""
    barrier: Barrier | None = None
    """Where the script waits for other workers; None if there are none."""

    def wire_for(self, recipe: Recipe | None, device: torch.device) -> Transport:
        """The wire that the recipe asks for. Without a server of a launcher's worker 0 keeps one in its process."""
        if recipe is None or not recipe.shards:
            return self.wire(device)
        if self.server is not None:
            return self.server(recipe)
        meeting = self.wire(torch.device("cpu"))
        return meet_at_lead(meeting, recipe.shards, self.on_nan, self.timeout_s, self.lead_host)

    def with_folder(self, run: Path | None) -> WorkerContext:
        """Return the same seat with another run folder, which is there."""
        return replace(self, run=run, opens_folder=False)

    def from_the_start(self) -> WorkerContext:
        """Return the same seat for a section whose start this process takes part in."""
        return replace(self, life=0, resume=None)

    def asked(self, recipe: Recipe | None) -> dict[str, Any]:
        """Return what `run.json` says of a run that no launcher of ours has started."""
        return {
            "recipe": str(recipe) if recipe else None,
            "workers": self.workers,
            "seed": self.seed or 0,
            "alone": self.alone,
            "join": self.join,
            "threads": torch.get_num_threads(),
        }


given_seat: ContextVar[WorkerContext | None] = ContextVar("given_seat", default=None)
"""A seat given by a host in this process (a test, the simulator); it goes before the environment."""


def find_seat(environment: Mapping[str, str] = os.environ) -> WorkerContext | None:
    """The seat of this worker, or None when the script was started plainly.

    `stretto run` sets STRETTO_RUN, STRETTO_RANK and STRETTO_WORLD_SIZE; torchrun sets RANK and WORLD_SIZE.
    """
    given = given_seat.get()
    if given is not None:
        return given
    rank_name, size_name = variables.names_of(environment)
    if "STRETTO_RUN" not in environment and size_name not in environment:
        return None
    workers, worker = _number(environment, size_name, 1), _number(environment, rank_name, 0)
    timeout_s = float(environment.get("STRETTO_TIMEOUT", DEFAULT_TIMEOUT_S))
    return WorkerContext(
        worker=worker,
        workers=workers,
        wire=_way_to_others(environment, worker, workers, timeout_s),
        recipe=environment.get("STRETTO_RECIPE") or None,
        run=Path(environment["STRETTO_RUN"]) if "STRETTO_RUN" in environment else None,
        opens_folder="STRETTO_RUN" not in environment,
        around=Runtime(own_process=True),
        seed=_number(environment, "STRETTO_SEED", 0) if "STRETTO_SEED" in environment else None,
        alone=environment.get("STRETTO_ALONE") == "1",
        join=_number(environment, "STRETTO_JOIN", 1),
        split=environment.get("STRETTO_SPLIT") == "1",
        lr_factor=float(environment.get("STRETTO_LR_FACTOR", "1")),
        keep_states=environment.get("STRETTO_KEEP_STATES") == "1",
        timeout_s=timeout_s,
        server=_server(environment, worker, workers, timeout_s),
        lead_host=(variables.address_in(environment) or ("127.0.0.1", ""))[0],
        slow=float(environment.get("STRETTO_SLOW", "1")),
        on_nan=environment.get("STRETTO_ON_NAN", "stop"),
        life=_number(environment, "STRETTO_LIFE", 0),
        rule="global-batch" if environment.get("STRETTO_BATCH") == "global-batch" else "per-worker-batch",
        checkpoint=every(environment["STRETTO_CHECKPOINT"]) if environment.get("STRETTO_CHECKPOINT") else None,
        keep=_number(environment, "STRETTO_KEEP", 3),
        resume=Path(environment["STRETTO_RESUME"]) if environment.get("STRETTO_RESUME") else None,
        barrier=_barrier(environment, worker, workers, timeout_s),
    )


def _barrier(environment: Mapping[str, str], worker: int, workers: int, timeout_s: float) -> Barrier | None:
    """The barrier of this process, made once, since it holds a connection."""
    if _barriers.get("made", (None, None))[0] is not environment:
        life, keys = _number(environment, "STRETTO_LIFE", 0), worker_keys(environment.get("STRETTO_KEYS"))
        _barriers["made"] = environment, by_environment(environment, worker, workers, life, keys, timeout_s)
    return _barriers["made"][1]


_barriers: dict[str, tuple[Mapping[str, str], Barrier | None]] = {}


def _way_to_others(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float
) -> Callable[[torch.device], Transport]:
    if "STRETTO_COORDINATOR" in environment:
        return _enduring(environment, worker, timeout_s)
    if workers == 1:
        return _solo
    return _collective(environment, worker, workers, timeout_s)


def _enduring(environment: Mapping[str, str], worker: int, timeout_s: float) -> Callable[[torch.device], Transport]:
    def meet(device: torch.device) -> Transport:
        from stretto.transport.rendezvous import GroupRendezvous

        companion = _companion(environment, worker, timeout_s)
        return ElasticTransport(worker, companion, GroupRendezvous(_patience_s(environment), timeout_s, device))

    return meet


def _server(
    environment: Mapping[str, str], worker: int, workers: int, timeout_s: float
) -> Callable[[Recipe], Transport] | None:
    """Through the servers of a launcher. With a coordinator the run goes on without those that die."""
    if "STRETTO_SERVERS" not in environment:
        return None
    addresses = [f"tcp://{one}" for one in environment["STRETTO_SERVERS"].split(",")]
    keys, life = worker_keys(environment.get("STRETTO_KEYS")), _number(environment, "STRETTO_LIFE", 0)
    endures = "STRETTO_COORDINATOR" in environment
    away_s = _patience_s(environment) + RETURN_S if endures else None

    def reach(recipe: Recipe) -> Transport:
        if not endures:
            return dial(worker, workers, addresses, keys, timeout_s)
        standing = _companion(environment, worker, timeout_s)
        if not recipe.asynchronous:
            from stretto.transport.rendezvous import ServerRendezvous

            wire = dial(worker, workers, addresses, keys, timeout_s, 0, away_s)
            return ElasticTransport(worker, standing, ServerRendezvous(wire))
        standing.stand(ReadyReport(0))
        try:
            free = dial(worker, workers, addresses, keys, timeout_s, life, away_s)
        except TransportError as error:
            if life and OVER in str(error):
                standing.leave()
                standing.close()
                raise SystemExit(0) from None
            raise
        standing.on_abort = lambda _generation, _why: free.abort()
        free.doing = standing.doing
        standing.place = lambda: free.exchanges_begun()
        free.when_closed(standing.leave)
        free.when_closed(standing.close)
        return free

    return reach


def _companion(environment: Mapping[str, str], worker: int, timeout_s: float) -> MembershipClient:
    """A worker that comes back may do so before the network does."""
    life = _number(environment, "STRETTO_LIFE", 0)
    at, keys = environment["STRETTO_COORDINATOR"], worker_keys(environment.get("STRETTO_KEYS"))
    return MembershipClient(worker, life, at, keys, _patience_s(environment), timeout_s if life else FIRST_S)


def _patience_s(environment: Mapping[str, str]) -> float:
    return float(environment.get("STRETTO_FAILURE_TIMEOUT", "10"))


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
) -> Callable[[torch.device], Transport]:
    def meet(device: torch.device) -> Transport:
        from stretto.transport.env_rendezvous import meet_by_environment

        return meet_by_environment(environment, worker, workers, timeout_s, device)

    return meet
