"""The ranks of one worker at a parameter server: to the server they are a worker of one process.

All ranks run the client of the server with the same calls. Rank 0 is connected with the services; the other ranks give
it their tensors, and get from it what belongs to them. So leases, barriers, snapshots and rollbacks are those of the
worker, and all its ranks hold parameters of the same versions:

    rank 1                       rank 0                            shard
      | -- Push, own messages ---> |                                 |
      |                            | -- Push, messages of all -----> |
      |                            | <- PushReply, all parameters -- |
      | <- PushReply, own part --- |                                 |

Rank 0 holds the messages of all ranks until they are sent, and the replies until they are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp
from stretto.errors import TransportError
from stretto.parallel.link import Waiting
from stretto.parallel.rank_channels import FollowingChannel, LeadingChannel, RankMessages, Told
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import Channel
from stretto.transport.device_memory import host_copy
from stretto.transport.interface import Collectives, Handle, Traffic

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A mean that rank 0 computes with the others of its rank, for this rank."""

    messages: RankMessages
    tensor: Tensor

    def wait(self) -> Answer:
        _, (mean,) = self.messages.receive(0)
        self.tensor.copy_(mean.view(self.tensor.shape))
        return self.tensor


class RanksClient(ParameterServerClient):
    """One rank's client of a parameter server. `connected` are rank 0's channels to the dispatcher and the shards.

    `shards` is their number. Other ranks pass no channels.
    """

    def __init__(
        self,
        worker: int,
        workers: int,
        connected: Sequence[Channel],
        shards: int,
        siblings: Collectives,
        waiting: Waiting,
        elastic: bool = True,
    ) -> None:
        self._messages, self._waiting = RankMessages(siblings, waiting), waiting
        self._ranks = self.siblings = siblings
        dispatcher, *others = (
            [LeadingChannel(one, self._messages) for one in connected]
            if not siblings.worker
            else [FollowingChannel(self._messages) for _ in range(1 + shards)]
        )
        self._is_abandoned = False
        super().__init__(worker, workers, dispatcher, others, elastic)

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context of each wait for another rank of this worker."""
        return self._waiting()

    def agreed(self, is_so: bool) -> bool:
        """Return True if all ranks of this worker pass True; they call this together."""
        if self._messages.rank:
            self._messages.send(0, Told(is_so=is_so))
            return self._messages.agreed(is_so)
        return self._messages.agreed(
            all([is_so, *(self._messages.receive(rank)[0].is_so for rank in self._messages.others)])
        )

    # --- means among the workers, which not all ranks have ---------------------------------------------------------

    def submit(self, op: CollectiveOp) -> Handle:
        """Start a mean, within `attempt`: rank 0 computes that of another rank after its own."""
        if not self._messages.rank:
            return super().submit(op)
        if not isinstance(op, AllReduceMean):
            raise TransportError(f"{type(op).__name__} is no operation of a rank over a parameter server")
        self._messages.send(0, Told(), [host_copy(op.tensor.detach()).contiguous().reshape(-1)])
        return _Forwarded(self._messages, op.tensor)

    def attempt(
        self, act: Callable[[], Found], again: Callable[[], Found] | None = None, in_pairs: bool = False
    ) -> Found:
        """Run operations that belong together; all ranks call this, also a rank that then submits none."""
        found = act()
        if self._messages.rank:
            self._messages.send(0, Told(is_so=True))
        for rank in () if self._messages.rank else self._messages.others:
            self._submit_for(rank)
        return found

    def _submit_for(self, rank: int) -> None:
        """Compute the means that another rank asks for, until its attempt is over."""
        told, tensors = self._messages.receive(rank)
        while not told.is_so:
            mean = super().submit(AllReduceMean(*tensors)).wait()
            assert isinstance(mean, Tensor)
            self._messages.send(rank, Told(), [mean])
            told, tensors = self._messages.receive(rank)

    # --- the end ----------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Return the bytes of this rank's connections."""
        return super().traffic() + self._ranks.traffic()

    def abandon(self, stays_out: bool = False) -> None:
        """Let the launcher report the end of this worker, which it may start again, unless it `stays_out`."""
        self._is_abandoned = True
        if stays_out or not self.elastic:
            super().abandon(stays_out)

    def close(self) -> None:
        """Close the channels, once no rank needs them any more."""
        if not self._is_abandoned:
            self._is_abandoned = True
            with suppress(TransportError), self.waiting():
                self._ranks.all_gather_bytes(b"")
        super().close()
