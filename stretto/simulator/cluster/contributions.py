"""Contributions of workers to a simulated collective: each kind computes the result, its flows, and the work.

Where workers have several ranks, each rank's part takes the links of its own rank, and all parts travel concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp, Exchange, Messages, answer, swapped
from stretto.simulator.cluster.rank_peers import RankPeers
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.links import Exchange as Flow

Cut = Callable[[int, int], Sequence[int]]
"""Function from the bytes of a tensor, and of one item, to the bytes of each rank's part."""


class Work(NamedTuple):
    """Processor work of a collective for each process: messages sent and received, conversions from and to bytes."""

    messages: float
    conversions: int = 0


Combined = tuple[Any, list[Flow], Work]
"""Result of a collective, its concurrent flows, and the work of each process."""


class Exchanging(NamedTuple):
    """The workers of a collective: the processes of each rank, and how tensors are cut for them."""

    peers: Sequence[RankPeers]
    cut: Cut


@dataclass(frozen=True, slots=True)
class Submitted:
    """Contribution of a tensor to a mean or an all-gather."""

    operation: ClassVar[str] = "the collective of a step"
    op: CollectiveOp

    def combine(self, contributions: list[Submitted], among: Exchanging) -> Combined:
        """Return the mean, or all tensors."""
        ops = [one.op for one in contributions]
        if not isinstance(self.op, AllReduceMean):
            return self._gather(Messages(answer(ops)), among)
        item_bytes = self.op.tensor.element_size()
        parts = list(zip(among.peers, among.cut(self.op.tensor.nbytes, item_bytes), strict=True))
        messages = max(peers.mean_messages(part, item_bytes) for peers, part in parts)
        return answer(ops), [flow for peers, part in parts for flow in peers.all_reduce(part)], Work(messages)

    def _gather(self, gathered: Messages, among: Exchanging) -> Combined:
        sizes = zip(*(among.cut(one.nbytes, one.element_size()) for one in gathered), strict=True)
        flows = [_gathered(peers, of_rank) for peers, of_rank in zip(among.peers, sizes, strict=True)]
        return gathered, flows, Work(6 * (len(gathered) - 1), 1)


def _gathered(peers: RankPeers, sizes: Sequence[int]) -> Flow:
    """Return an all-gather of messages of these sizes: their lengths around a ring, then each to each other process."""
    busiest = max((len(sizes) - 1) * max(sizes), sum(sizes) - min(sizes))
    hops, path, latency_s = peers.gather(wire_bytes.LENGTH_BYTES)
    return hops + busiest, path, latency_s + peers.gather(0)[2] / max(len(sizes) - 1, 1)


@dataclass(frozen=True, slots=True)
class Paired:
    """Contribution to an exchange: a frame and then the tensor, in each direction over the links of this direction."""

    op: Exchange

    def combine_with(
        self, other: Paired, among: Exchanging, index: int, other_index: int
    ) -> tuple[list[Tensor], list[Flow], Work]:
        """Return both tensors, each for the other worker."""
        tensors = [paired.op.tensor for paired in (self, other)]
        parts = zip(*(among.cut(one.nbytes, one.element_size()) for one in tensors), strict=True)
        sizes = [tuple(wire_bytes.EXCHANGE_FRAME_BYTES + part for part in of_rank) for of_rank in parts]
        flows = [
            flow
            for peers, (sent, received) in zip(among.peers, sizes, strict=True)
            for flow in peers.pair(index, other_index, sent, received)
        ]
        messages = max(sum(map(wire_bytes.exchange_messages, pair)) for pair in sizes)
        return swapped([self.op, other.op]), flows, Work(messages, 1)


@dataclass(frozen=True, slots=True)
class GatherBytes:
    """Contribution of a message, which all workers receive; each of their ranks sends it."""

    operation: ClassVar[str] = "an all-gather of messages"
    message: bytes

    def combine(self, contributions: list[GatherBytes], among: Exchanging) -> Combined:
        """Return all messages."""
        messages = [contribution.message for contribution in contributions]
        longest = max(map(len, messages))
        is_long = longest > wire_bytes.FRAME_BYTES - wire_bytes.LENGTH_BYTES
        flows = []
        for peers in among.peers:
            sent, path, latency_s = peers.gather(wire_bytes.FRAME_BYTES)
            if is_long:
                sent_again, _, again_s = peers.gather(longest)
                sent, latency_s = sent + sent_again, latency_s + again_s
            flows.append((sent, path, latency_s))
        return messages, flows, Work(4 * (1 + is_long) * (len(contributions) - 1), 1 + is_long)


@dataclass(frozen=True, slots=True)
class BroadcastBytes:
    """Contribution to a broadcast: the root's message; each of its ranks sends it."""

    operation: ClassVar[str] = "a broadcast of a message"
    message: bytes
    root: int

    def combine(self, contributions: list[BroadcastBytes], among: Exchanging) -> Combined:
        """Return the root's message."""
        message = contributions[self.root].message
        is_long = len(message) > wire_bytes.FRAME_BYTES - wire_bytes.LENGTH_BYTES
        length = wire_bytes.FRAME_BYTES + len(message) * is_long
        work = Work(2 * (1 + is_long) * (1 - 1 / len(contributions)), 1 + is_long)
        return message, [peers.broadcast(self.root, length) for peers in among.peers], work


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Contribution to the rendezvous of a generation, which takes `seconds` after all members have arrived."""

    operation: ClassVar[str] = "the rendezvous of a group"
    seconds: float

    def combine(self, contributions: list[Rendezvous], among: Exchanging) -> Combined:
        """Return nothing, after this time."""
        return None, [(0.0, (), self.seconds)], Work(0.0)
