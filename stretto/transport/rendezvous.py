"""Rendezvous of generations: connects process groups (gloo, NCCL), or workers through a parameter server."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.collective_ops import CollectiveOp
from stretto.errors import BrokenTransportError
from stretto.membership.messages import GenerationView
from stretto.parameter_server.client import ParameterServerClient
from stretto.transport.elastic import AbortableTransport
from stretto.transport.gloo_rendezvous import abort_forming, form, store_keeper
from stretto.transport.interface import Handle, Message, Traffic
from stretto.transport.peer_group import PeerGroup
from stretto.transport.shared_memory import over_shared_memory
from stretto.transport.single_worker import DoneHandle, SingleWorkerTransport


class LastWorkerTransport(SingleWorkerTransport):
    """Transport of the only remaining member. It can be aborted as any generation can."""

    def __init__(self) -> None:
        super().__init__()
        self._is_broken = False

    def abort(self) -> None:
        """Make all further operations raise BrokenTransportError."""
        self._is_broken = True

    def submit(self, op: CollectiveOp) -> DoneHandle:
        """Return a completed operation."""
        self._check()
        return super().submit(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the worker's own message."""
        self._check()
        return super().all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the message."""
        self._check()
        return super().broadcast_bytes(message, root)

    def _check(self) -> None:
        if self._is_broken:
            raise BrokenTransportError("the generation of one worker is over")


class GroupRendezvous:
    """Connects process groups, each within `failure_timeout_s`; every wait in a group ends after `timeout_s`."""

    def __init__(self, failure_timeout_s: float, timeout_s: float, device: torch.device | None) -> None:
        self._patience_s, self._timeout_s, self._device = failure_timeout_s, timeout_s, device

    @property
    def address(self) -> str:
        """Address of the store that this process can host."""
        return store_keeper().address

    def form(self, members: GenerationView, rank: int) -> AbortableTransport:
        """Connect with the members at the store of the first member with state, or else of the first member."""
        if len(members.members) == 1:
            return LastWorkerTransport()
        store, size = members.members[members.first].report.address, len(members.members)
        keeps, prefix = rank == members.first, self._prefix(members.generation)
        group = form(store, keeps, prefix, rank, size, self._patience_s, self._timeout_s)
        return over_shared_memory(group, self._device, self._patience_s)

    def abort(self, generation: int) -> None:
        """Abort a generation: its connecting, now or later, or its group."""
        abort_forming(self._prefix(generation))

    def _prefix(self, generation: int) -> str:
        return f"stretto/{generation}"

    def close(self) -> None:
        """Do nothing: no connection outlasts a generation."""


class _OfGeneration:
    """Parameter-server client in one generation; closing it leaves the client connected."""

    def __init__(self, client: ParameterServerClient) -> None:
        self._client, self._before = client, client.traffic()
        self.worker, self.workers = client.worker, client.workers

    def submit(self, op: CollectiveOp) -> Handle:
        """Start a collective operation."""
        return self._client.submit(op)

    def group(self, ranks: Sequence[int]) -> PeerGroup:
        """Return a transport among the workers of these ranks."""
        return PeerGroup(self, ranks)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        return self._client.all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the message of the root."""
        return self._client.broadcast_bytes(message, root)

    def abort(self) -> None:
        """Abort the operations in progress."""
        self._client.abort()

    def traffic(self) -> Traffic:
        """Return the bytes of this generation."""
        now = self._client.traffic()
        sent, received = now.bytes_sent - self._before.bytes_sent, now.bytes_received - self._before.bytes_received
        return Traffic(sent, received, now.counted)

    def close(self) -> None:
        """Do nothing: the next generation uses the same connections."""


class ServerRendezvous:
    """Generations of workers that exchange synchronously through one parameter server."""

    address = ""

    def __init__(self, client: ParameterServerClient) -> None:
        self._client = client

    def form(self, members: GenerationView, rank: int) -> AbortableTransport:
        """Send the members of the new generation to all services."""
        self._client.regroup(members.generation, members.numbers, members.numbers[rank])
        return _OfGeneration(self._client)

    def abort(self, generation: int) -> None:
        """Do nothing: connecting does not wait."""

    def close(self) -> None:
        """Disconnect from the server."""
        self._client.close()
