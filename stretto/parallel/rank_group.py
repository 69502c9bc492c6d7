"""The process group of a worker's ranks, for libraries that divide a model over torch's default group.

Each operation is one of gloo or NCCL, within a wait for other ranks: in it this rank takes part in new generations of
the workers, and a rank that fails ends all ranks of its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.errors import BrokenTransportError, ScriptError, TransportError, explain
from stretto.parallel.link import Link, Waiting
from stretto.transport.device_groups import offered_device
from stretto.transport.gloo_rendezvous import store_keeper
from stretto.transport.process_group import reason
from stretto.transport.siblings import ranks_apart

NAME = "stretto"
VERBS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Operations of a process group, in any version of torch."""


class RankGroup(dist.ProcessGroup):
    """The ranks of one worker. `waiting` is entered around each operation of `inner`."""

    def __init__(self, inner: dist.ProcessGroup, rank: int, ranks: int, waiting: Waiting) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._inner, self._ranks, self._waiting = inner, ranks, waiting

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    @property
    def group_name(self) -> Any:
        """Name under which torch knows the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def run(self, verb: str, *args: Any, **options: Any) -> Any:
        """Run an operation, and return its handle once it has ended (on a GPU, once it is in the stream)."""
        with self._waiting():
            try:
                work = getattr(self._inner, verb)(*args, **options)
                if work is not None:  # NCCL returns nothing for an operation that is only put in the stream
                    work.wait()
            except RuntimeError as error:
                raise _failure(error) from error
        return work


def _runs(verb: str) -> Callable[..., Any]:
    def call(self: RankGroup, *args: Any, **options: Any) -> Any:
        return self.run(verb, *args, **options)

    return call


for _verb in VERBS:
    if hasattr(dist.ProcessGroup, _verb):
        setattr(RankGroup, _verb, _runs(_verb))


def mesh_of(link: Link, timeout_s: float) -> DeviceMesh:
    """Return the mesh of a worker's ranks, which are from now on torch's default group in this process."""
    if not dist.is_initialized():
        _refuse_shared_devices(link)
        _connect(link, timeout_s)
    elif dist.get_backend() != NAME:
        raise ScriptError(
            explain(
                "torch.distributed is initialised by the script, and the processes of a sharded worker use it",
                got=f"torch.distributed.init_process_group, of {dist.get_world_size()} processes",
                expected="a script without its own process group",
                to_type="stretto.distribute(model, optimizer, loader) in place of init_process_group",
            )
        )
    return init_device_mesh(link.device.type, (link.ranks,))


def _refuse_shared_devices(link: Link) -> None:
    """Raise ScriptError if two ranks have the same GPU, which NCCL does not connect."""
    places = set(link.gather(offered_device(link.device).encode()))
    if link.device.type == "cuda" and len(places) < link.ranks:
        raise ScriptError(
            explain(
                "processes of a sharded worker share a GPU",
                got=f"{link.ranks} processes on {len(places)} GPU{'s' * (len(places) > 1)}",
                expected="a GPU for each process",
                to_type='stretto run -n N, with a GPU each, or --layout "whole()"',
            )
        )


def _connect(link: Link, timeout_s: float) -> None:
    """Make the ranks of this worker torch's default group, connected at a store that rank 0 keeps."""
    address = link.broadcast(store_keeper().address.encode() if link.rank == 0 else b"").decode()
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    store = PrefixStore("sharded", TCPStore(host, int(port), None, False, limit, False))

    def create(prefixed: Any, rank: int, ranks: int, _limit: timedelta) -> RankGroup:
        inner = dist.ProcessGroup(prefixed, rank, ranks)
        kinds = dist.ProcessGroup.BackendType
        inner._register_backend(torch.device("cpu"), kinds.GLOO, dist.ProcessGroupGloo(prefixed, rank, ranks, limit))
        if link.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", prefixed), rank, ranks, options)
            inner._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        return RankGroup(inner, rank, ranks, lambda: link.waiting("exchanging"))

    dist.Backend.register_backend(NAME, create, devices=sorted({"cpu", link.device.type}))
    dist.init_process_group(NAME, store=store, rank=link.rank, world_size=link.ranks, timeout=limit)


def _failure(error: RuntimeError) -> TransportError:
    if not any(sign in str(error).lower() for sign in ("timed out", "mismatch")):
        return BrokenTransportError(reason(error))
    return TransportError(ranks_apart(reason(error)))
