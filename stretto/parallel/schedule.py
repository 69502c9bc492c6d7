"""Predicted time of a step of a model that ranks share: closed forms, for a run before it steps and for the simulator.

A batch passes a pipeline of p stages in m micro-batches, forward and then back; between the two, the last stage sends
the outputs of the batch to all others. For equal stages, which compute a micro-batch in f + b, and a boundary's A bytes
of activations in each micro-batch, over links of B bytes per second with the latency L:

    (m + p - 1) (f + b) + 2 (p - 1) (L + A / B) + L + (p - 1) outputs / B

as long as a link carries a micro-batch faster than a stage computes it (Huang et al. 2018, GPipe). Sending is
concurrent with computing, one micro-batch after another on each link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.strategies.gradient_allreduce import FORWARD


@dataclass(frozen=True)
class Hop:
    """The way from one rank to another: seconds per byte, and the latency in seconds."""

    byte_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds in which the link is busy with a message."""
        return nbytes * self.byte_s


@dataclass(frozen=True)
class Boundary:
    """The way from a stage to the next one, and the bytes of a micro-batch's activations that take it."""

    nbytes: float = 0.0
    forward: Hop = Hop()
    backward: Hop = Hop()


@dataclass(frozen=True)
class Batch:
    """A batch: the number of micro-batches, and its outputs' bytes, which the last stage sends to each other one."""

    micro_batches: int
    output_bytes: float = 0.0
    outputs: Hop = Hop()
    """The slowest way from the last stage to another one."""


@dataclass(frozen=True)
class Schedule:
    """Predicted pass of a batch through the stages, forward and back."""

    seconds: float
    computing: tuple[float, ...]
    """Seconds for which each stage computes."""

    @property
    def waiting(self) -> tuple[float, ...]:
        """Seconds for which each stage waits for others."""
        return tuple(self.seconds - computing for computing in self.computing)

    @property
    def bubble(self) -> float:
        """Share of the pass for which a stage waits, on average."""
        return 1 - sum(self.computing) / len(self.computing) / self.seconds if self.seconds else 0.0


def pipeline_schedule(turns: Sequence[float], boundaries: Sequence[Boundary], batch: Batch) -> Schedule:
    """Return the schedule of a batch whose micro-batches each stage computes, forward and back, in these seconds."""
    m = batch.micro_batches
    ways = [(one.forward, one.nbytes) for one in boundaries]
    back = [(one.backward, one.nbytes) for one in reversed(boundaries)]
    forward_s = _pass_s([FORWARD * one for one in turns], ways, m)
    backward_s = _pass_s([(1 - FORWARD) * one for one in reversed(turns)], back, m)
    outputs_s = batch.outputs.seconds(batch.output_bytes) * len(boundaries) + batch.outputs.latency_s
    return Schedule(forward_s + outputs_s + backward_s, tuple(m * one for one in turns))


def _pass_s(turns: Sequence[float], ways: Sequence[tuple[Hop, float]], micro_batches: int) -> float:
    """Return the seconds until the last stage in this direction has computed all micro-batches."""
    computed, sent = [0.0] * len(turns), [0.0] * len(turns)
    for _ in range(micro_batches):
        arrival = 0.0
        for stage, turn_s in enumerate(turns):
            computed[stage] = max(arrival, computed[stage]) + turn_s
            if stage < len(ways):
                hop, nbytes = ways[stage]
                sent[stage] = max(computed[stage], sent[stage]) + hop.seconds(nbytes)
                arrival = sent[stage] + hop.latency_s
    return computed[-1]


def sharded_seconds(computing: float, ranks: int, group_bytes: Sequence[float], hop: Hop) -> float:
    """Return the seconds of a step of a sharded model, given the seconds of the whole batch in one process.

    Each rank computes its part of the batch. Each group of parameters, which are gathered together, goes around a ring
    three times: gathered for the forward and for the backward pass, and its gradients summed. `hop` is the slowest.
    """
    steps = 3 * (ranks - 1)
    return computing / ranks + sum(steps * (hop.seconds(one / ranks) + hop.latency_s) for one in group_bytes)
