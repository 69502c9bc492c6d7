"""The context of one worker: its number, its transport, and the options of the launcher."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stretto.checkpoint.file_client import FileClient
from stretto.checkpoint.folder import KEPT_CHECKPOINTS
from stretto.checkpoint.run_files import LocalFiles, RemoteFiles, RunFiles
from stretto.data.shares import EVEN, Limits, parse_limits
from stretto.events import EventLog, LineStore
from stretto.interval import Interval
from stretto.loader.epoch_batches import Rule
from stretto.membership.barrier_client import Barrier, barrier_of
from stretto.membership.client import MembershipClient
from stretto.membership.event_client import remote_log
from stretto.membership.messages import GenerationView, RankReport, ReadyReport
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RunOverError
from stretto.parameter_server.embedded import serve_at_rank0
from stretto.parameter_server.rpc_channel import connect_channels, connect_client, new_context
from stretto.parameter_server.rpc_server import name_of
from stretto.process_config import WorkerConfig, worker_config
from stretto.recipe.recipe import Recipe
from stretto.run_config import LrScale, ResumeStream, RunConfig
from stretto.run_dir import section_folder
from stretto.runtime.runtime import Runtime
from stretto.security import worker_keys
from stretto.transport import Transport
from stretto.transport.device_memory import accelerator
from stretto.transport.elastic import ElasticTransport, Rendezvous
from stretto.transport.relay_tunnels import RelayAccess, ServiceTunnels
from stretto.transport.siblings import Siblings
from stretto.transport.single_worker import SingleWorkerTransport

DEFAULT_TIMEOUT_S = 600.0
RETURN_S = 30.0
"""Seconds that a launcher may take to restart a server: its pause before the restart, and the process's start."""
REPORT_S = 5.0
"""Seconds from the end of the failure timeout in which a failure is reported to all processes."""
FIRST_S = 60.0
"""Seconds that a worker waits for the coordinator's first message."""
DIRECT_S = 2.0
"""Seconds in which workers of different hosts connect directly, before they use the relay."""
SENT_S = 2.0
"""Seconds that the last messages to a parameter server may take to reach the relay."""


def _single_worker(device: torch.device) -> Transport:  # noqa: ARG001
    return SingleWorkerTransport()


@dataclass(frozen=True)
class WorkerContext:
    """One worker's context in a run. `transport` is called once, with the device of the model."""

    worker: int = 0
    workers: int = 1
    transport: Callable[[torch.device], Transport] = _single_worker
    recipe: str | None = None
    layout: str | None = None
    """Layout that the run was started with; None if it was started without one."""
    run: Path | None = None
    opens_folder: bool = False
    """True if worker 0 creates the run folder, since no launcher of Stretto's has created one."""
    section: int = 1
    """Number of the section that this is the context of."""
    store: Callable[[int], LineStore] | None = None
    """Returns the store for the events of a section, where the worker does not see the run directory."""
    remote_files: Callable[[int, bool], RunFiles] | None = None
    """Returns the place for the files of a section, where the worker does not see the run directory.

    With True, the place is in the directory of the run that is resumed.
    """
    seed: int | None = None
    single_process: bool = False
    global_batch_of: int = 1
    split: bool = False
    """True if all workers share each batch of the script."""
    shares: str = EVEN
    """Division of each global step among the workers, as typed."""
    limits: Limits = field(default_factory=dict)
    """Largest share of some workers."""
    drops_uneven: bool = False
    """True if a last step that has fewer whole batches than workers is dropped."""
    lr_factor: float = 1.0
    """Factor on the script's learning rate."""
    lr_scale: LrScale = "none"
    """Growth of this factor with the global batch."""
    keep_states: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    ranks_timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait of a rank for another rank of its worker."""
    runtime: Runtime = field(default_factory=Runtime)
    server: Callable[[Recipe], Transport] | None = None
    """Connects to the parameter server that a launcher has started; None if there is none."""
    lead_host: str = "127.0.0.1"
    """Host on which worker 0 listens if it has to run a parameter server itself."""
    slow: float = 1.0
    """Factor by which this worker's computing is slowed down."""
    on_nan: str = "stop"
    incarnation: int = 0
    """Number of earlier starts of this worker."""
    rule: Rule = "global-batch"
    checkpoint: Interval | None = None
    keep: int = KEPT_CHECKPOINTS
    resume: Path | None = None
    """Folder of the run to resume, on the machine of the launcher."""
    resume_stream: ResumeStream | None = None
    """Way to continue a stream of the resumed run; None to bring it to its place."""
    barrier: Barrier | None = None
    """Barrier of the script's workers; None for a single worker."""

    def transport_for(self, recipe: Recipe | None, device: torch.device) -> Transport:
        """Return the transport for a recipe. Without a launcher's server, worker 0 runs one in its process."""
        if recipe is None or not recipe.shards:
            return self.transport(device)
        if self.server is not None:
            return self.server(recipe)
        meeting = self.transport(torch.device("cpu"))
        return serve_at_rank0(meeting, recipe.shards, self.on_nan, self.timeout_s, self.lead_host)

    def event_log(self, worker: int) -> EventLog | None:
        """Return the event log of this worker in a section; None without a run folder."""
        if self.store is not None:
            return EventLog(self.store(self.section), worker, rank=self.runtime.rank)
        return self.runtime.log(self.run, worker) if self.run is not None else None

    def lr_factor_of(self, workers: int) -> float:
        """Return the factor on the learning rate for the global batch of this number of workers."""
        growth = workers / self.workers
        return self.lr_factor * {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[self.lr_scale]

    @property
    def files(self) -> RunFiles | None:
        """Place for the files of this section; None without a run folder."""
        if self.remote_files is not None:
            return self.remote_files(self.section, False)
        return LocalFiles(self.run) if self.run is not None else None

    @property
    def resumed_files(self) -> RunFiles | None:
        """Files of the run that is resumed; None where no run is resumed."""
        if self.resume is None:
            return None
        return self.remote_files(1, True) if self.remote_files is not None else LocalFiles(self.resume)

    def with_folder(self, run: Path | None) -> WorkerContext:
        """Return the same context with another run folder, which exists."""
        return replace(self, run=run, opens_folder=False)

    def at_section(self, section: int) -> WorkerContext:
        """Return the same context for a section, whose folder is in that of the first section, which this is for."""
        run = section_folder(self.run, section) if self.run is not None else None
        return replace(self, run=run, section=section, opens_folder=False)

    def from_first_section(self) -> WorkerContext:
        """Return the same context for a section that this process takes part in from its start."""
        return replace(self, incarnation=0, resume=None)

    def asked(self, recipe: Recipe | None) -> dict[str, Any]:
        """Return the contents of `run.json` for a run that no launcher of Stretto's has started."""
        return {
            "recipe": str(recipe) if recipe else None,
            "workers": self.workers,
            "seed": self.seed or 0,
            "single_process": self.single_process,
            "global_batch_of": self.global_batch_of,
            "threads": torch.get_num_threads(),
        }


current_context: ContextVar[WorkerContext | None] = ContextVar("current_context", default=None)
"""The context set by a host in this process (a test, the simulator); it overrides the environment."""


def find_context(environment: Mapping[str, str] = os.environ) -> WorkerContext | None:
    """Return the context of this worker, or None for a plain `python train.py`."""
    given = current_context.get()
    if given is not None:
        return given
    config = worker_config(environment)
    return _context(config) if config is not None else None


def fields_of(options: RunConfig) -> dict[str, Any]:
    """Return the fields of a context that the options of the run determine, live and simulated."""
    return {
        "workers": options.initial_workers,
        "recipe": options.recipe,
        "layout": options.layout,
        "single_process": options.single_process,
        "global_batch_of": options.global_batch_of,
        "split": options.global_batch == "split",
        "shares": options.shares,
        "limits": parse_limits(options.max_batch),
        "drops_uneven": options.uneven == "drop",
        "lr_factor": options.lr_factor,
        "lr_scale": options.lr_scale,
        "keep_states": options.keep_states,
        "timeout_s": options.timeout_s,
        "on_nan": options.on_nan,
        "rule": options.on_resize,
    }


@functools.lru_cache(maxsize=4)
def _context(config: WorkerConfig) -> WorkerContext:
    """Return the context that a configuration describes, cached, since its barrier holds a connection."""
    address, options = config.store_address, config.options
    return WorkerContext(
        **fields_of(options),
        worker=config.worker,
        transport=_transport(config),
        run=Path(config.run) if config.run else None,
        opens_folder=config.run is None and not config.sends_events,
        store=functools.partial(remote_log, config) if config.sends_events else None,
        remote_files=functools.partial(_remote_files, config) if config.sends_events else None,
        runtime=Runtime(own_process=True, rank=config.rank, ranks=config.ranks),
        seed=options.seed if config.run or config.sends_events else None,
        server=_server(config),
        lead_host=address[0] if address is not None else "127.0.0.1",
        slow=config.slowdown,
        incarnation=config.incarnation,
        checkpoint=options.checkpoints,
        keep=options.keep or KEPT_CHECKPOINTS,
        resume=options.resume,
        resume_stream=options.resume_stream,
        barrier=barrier_of(config),
        ranks_timeout_s=_longest_wait_s(options),
    )


def _longest_wait_s(options: RunConfig) -> float:
    """Return the longest wait for another rank of the same worker, or for a reply that depends on another worker.

    A process that has stopped is declared failed before that. So after it the process is there, and runs another call.
    """
    return max(options.timeout_s, options.failure_timeout_s + REPORT_S)


def _remote_files(config: WorkerConfig, section: int, resumed: bool) -> RunFiles:
    """Return the place for a section's files in a run directory, which this worker does not see."""
    assert config.coordinator is not None
    keys, failure_timeout_s = worker_keys(config.keys), config.options.failure_timeout_s
    client = FileClient(config.worker, config.incarnation, config.coordinator, keys, failure_timeout_s)
    return RemoteFiles(client, section, section_folder(Path(config.options.name), section).name, resumed)


def _transport(config: WorkerConfig) -> Callable[[torch.device], Transport]:
    if config.coordinator is not None:
        return functools.partial(_elastic, config)
    if config.world_size == 1:
        return _single_worker
    return functools.partial(_process_group, config)


def _elastic(config: WorkerConfig, device: torch.device) -> Transport:
    """Return a transport over the generations of a coordinator."""
    meeting = _membership(config), _rendezvous(config, device), _siblings(config)
    return ElasticTransport(config.worker, *meeting, config.share_limit)


def _rendezvous(config: WorkerConfig, device: torch.device) -> Rendezvous:
    """Return the rendezvous of generations: encrypted if workers of other hosts may join, or no worker has a GPU."""
    if config.keys is not None and (config.options.host is not None or accelerator() is None):
        relay = None if config.relay is None else _relay_access(config)
        return _encrypted_rendezvous(config, device, config.options.timeout_s, relay)
    from stretto.transport.rendezvous import GroupRendezvous

    return GroupRendezvous(config.options.failure_timeout_s, config.options.timeout_s, device)


def _encrypted_rendezvous(
    config: WorkerConfig, device: torch.device, timeout_s: float, relay: RelayAccess | None = None
) -> Rendezvous:
    from stretto.transport.encrypted_rendezvous import EncryptedRendezvous

    limits_s = config.options.failure_timeout_s, timeout_s
    return EncryptedRendezvous(config.coordinator_host, *limits_s, device, relay, config.options.port_range)


def _relay_access(config: WorkerConfig) -> RelayAccess:
    """Return the access of a worker to the relay, which it uses for members that it does not reach in a while."""
    assert config.relay is not None
    assert config.keys is not None
    after_s = 0.0 if config.options.relay else min(DIRECT_S, config.options.failure_timeout_s / 4)
    return RelayAccess(config.relay, config.keys[3].encode(), after_s)


def _siblings(config: WorkerConfig) -> Siblings | None:
    """Return the connection with the other ranks of this worker; None if it has one rank.

    It is encrypted also on one host: a thread for each exchange, as over gloo, costs more than the cipher. No relay is
    needed there.
    """
    if config.ranks == 1:
        return None
    rendezvous = _encrypted_rendezvous(config, torch.device("cpu"), _longest_wait_s(config.options))
    return Siblings(config.rank, config.ranks, rendezvous)


def _process_group(config: WorkerConfig, device: torch.device) -> Transport:
    from stretto.transport.env_rendezvous import connect

    return connect(config, config.options.timeout_s, device)


def _server(config: WorkerConfig) -> Callable[[Recipe], Transport] | None:
    """Return the connection to the launcher's parameter server. With a coordinator a run survives failed servers."""
    if not config.servers:
        return None
    keys, is_elastic = worker_keys(config.keys), config.coordinator is not None
    options = config.options
    away_s = options.failure_timeout_s + RETURN_S if is_elastic else None
    limit_s = _longest_wait_s(options) if is_elastic else options.timeout_s

    def open_client(*further: Any) -> ParameterServerClient:
        addresses, tunnels = _server_addresses(config)
        client = connect_client(config.worker, config.world_size, addresses, keys, limit_s, *further)
        if tunnels is not None:
            client.on_close(functools.partial(tunnels.close, SENT_S))
        return client

    def connect(recipe: Recipe) -> Transport:
        if not is_elastic:
            return open_client()
        membership = _membership(config)
        if not recipe.asynchronous:
            from stretto.transport.rendezvous import ServerRendezvous

            meeting = ServerRendezvous(open_client(config.incarnation, away_s))
            return ElasticTransport(config.worker, membership, meeting, share_limit=config.share_limit)
        siblings = _siblings(config)
        report = ReadyReport(0) if siblings is None else RankReport(0, own_address=siblings.address)
        view = membership.await_generation(report)
        try:
            client = (
                open_client(config.incarnation, away_s, config.joins)
                if siblings is None
                else _client_of_ranks(config, siblings, view, away_s)
            )
        except RunOverError:
            membership.leave()
            membership.close()
            raise SystemExit(0) from None
        client.join_coordinator(membership)
        return client

    return connect


def _server_addresses(config: WorkerConfig) -> tuple[list[str], ServiceTunnels | None]:
    """Return the addresses of the parameter server, and connections through the relay if its ports are not reached."""
    tunnels = ServiceTunnels(_relay_access(config), config.servers) if config.servers_by_relay else None
    return [f"tcp://{one}" for one in (tunnels.addresses if tunnels is not None else config.servers)], tunnels


def _client_of_ranks(
    config: WorkerConfig, siblings: Siblings, view: GenerationView, away_s: float | None
) -> ParameterServerClient:
    """Return one rank's client of the launcher's parameter server."""
    from stretto.parallel.server_ranks import RanksClient

    siblings.connect(view, config.worker)
    assert siblings.group is not None
    name, keys = name_of(config.worker, config.incarnation), worker_keys(config.keys)
    shards, group, waiting = len(config.servers) - 1, siblings.group, siblings.waiting
    if config.rank:
        client = RanksClient(config.worker, config.world_size, [], shards, group, waiting)
    else:
        context = new_context()
        addresses, tunnels = _server_addresses(config)
        channels = connect_channels(context, addresses, name, keys, _longest_wait_s(config.options), away_s)
        client = RanksClient(config.worker, config.world_size, channels, shards, group, waiting)
        client.on_close(context.term)
        if tunnels is not None:
            client.on_close(functools.partial(tunnels.close, SENT_S))
    client.on_close(siblings.close)
    if config.joins:
        client.join()
    return client


def _membership(config: WorkerConfig) -> MembershipClient:
    """Return the membership client. A restarted worker may start before the network is up."""
    assert config.coordinator is not None
    incarnation, limit_s = config.incarnation, config.options.timeout_s if config.incarnation else FIRST_S
    keys = worker_keys(config.keys)
    return MembershipClient(
        config.worker,
        incarnation,
        config.coordinator,
        keys,
        config.options.failure_timeout_s,
        limit_s,
        config.rank,
        config.ranks,
    )
