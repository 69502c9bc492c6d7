"""Makes the wires of generations: groups that exchange over gloo or NCCL, or those who exchange through a server."""

from __future__ import annotations

import torch

from stretto.collective_ops import CollectiveOp
from stretto.errors import BrokenTransportError
from stretto.membership.messages import GenerationView
from stretto.parameter_server.client import ParameterServerClient
from stretto.transport.elastic import AbortableTransport
from stretto.transport.gloo_rendezvous import abort_forming, form, store_keeper
from stretto.transport.interface import Handle, Message, Traffic
from stretto.transport.single_worker import DoneHandle, SingleWorkerTransport


class LastWorkerTransport(SingleWorkerTransport):
    """The wire of the only member that is left. It can be broken off, as any generation can."""

    def __init__(self) -> None:
        self._is_broken = False

    def abort(self) -> None:
        """From now on everything breaks."""
        self._is_broken = True

    def submit(self, op: CollectiveOp) -> DoneHandle:
        """Answer at once."""
        self._check()
        return super().submit(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The one message."""
        self._check()
        return super().all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The message."""
        self._check()
        return super().broadcast_bytes(message, root)

    def _check(self) -> None:
        if self._is_broken:
            raise BrokenTransportError("the generation of one worker is over")


class GroupRendezvous:
    """Forms groups of processes: each within `failure_timeout_s`; every wait in a group ends after `timeout_s`."""

    def __init__(self, failure_timeout_s: float, timeout_s: float, device: torch.device | None) -> None:
        self._patience_s, self._timeout_s, self._device = failure_timeout_s, timeout_s, device
        self._prefix: str | None = None

    @property
    def address(self) -> str:
        """Where this process can keep a store for the others."""
        return store_keeper().address

    def form(self, members: GenerationView, rank: int) -> AbortableTransport:
        """Meet the members at the store of the first that has a history, or else of the first."""
        if len(members.members) == 1:
            return LastWorkerTransport()
        store, size = members.members[members.first].here.store, len(members.members)
        self._prefix = f"stretto/{members.generation}"
        return form(
            store, rank == members.first, self._prefix, rank, size, self._patience_s, self._timeout_s, self._device
        )

    def abort(self) -> None:
        """Break off the forming that is going on, or the group that it has given."""
        if self._prefix is not None:
            abort_forming(self._prefix)

    def close(self) -> None:
        """Nothing is kept between generations."""


class _OfGeneration:
    """A server's wire as one generation uses it: let go of, it stays connected."""

    def __init__(self, wire: ParameterServerClient) -> None:
        self._wire, self._before = wire, wire.traffic()
        self.worker, self.workers = wire.worker, wire.workers

    def submit(self, op: CollectiveOp) -> Handle:
        """Begin an ask."""
        return self._wire.submit(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The message of every worker."""
        return self._wire.all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The message of the root."""
        return self._wire.broadcast_bytes(message, root)

    def abort(self) -> None:
        """Break off what is under way."""
        self._wire.abort()

    def traffic(self) -> Traffic:
        """The bytes of this generation."""
        now = self._wire.traffic()
        sent, received = now.bytes_sent - self._before.bytes_sent, now.bytes_received - self._before.bytes_received
        return Traffic(sent, received, now.counted)

    def close(self) -> None:
        """The next generation uses the same connections."""


class ServerRendezvous:
    """Generations of workers that go together through one parameter server."""

    address = ""

    def __init__(self, wire: ParameterServerClient) -> None:
        self._wire = wire

    def form(self, members: GenerationView, rank: int) -> AbortableTransport:
        """Tell the services who exchanges from now on."""
        self._wire.regroup(members.generation, members.numbers, members.numbers[rank])
        return _OfGeneration(self._wire)

    def abort(self) -> None:
        """Nothing waits while a generation is formed."""

    def close(self) -> None:
        """Leave the server."""
        self._wire.close()
