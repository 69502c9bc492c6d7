"""The strategy of recipes that mix the parameters of each worker with those of some peers, among workers that wait.

The replicas differ until an evaluation sync, which puts the mean of all in place. A worker that joins begins with the
parameters of the first member.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import CollectiveCoroutine, Exchange
from stretto.errors import NotFiniteError, ReplicasDifferError
from stretto.membership.loop_positions import named
from stretto.recipe.whom import mixing_matrix
from stretto.strategies.averaged_model import AveragedModel
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.consistency_check import NO_RATES, Rates
from stretto.strategies.flat_buffers import in_buffers
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.redraws import refused
from stretto.strategies.round_strategy import RoundStrategy
from stretto.strategies.tensor_sync import FlatTensors
from stretto.strategies.traffic_counters import Account


class GossipStrategy(RoundStrategy):
    """Sets each worker's parameters to its row of the mixing matrix times those of all, after every k local steps.

    `x_i += sum_j w_ij (x_j - x_i)`, so that numbers that are equal at all workers stay bit for bit. With n_j samples of
    worker j in the round, `w_ij = W_ij n_j / sum_k W_ik n_k`, which is W_ij if all have equally many. Floating-point
    buffers are mixed with the parameters of the optimizer that trains their module.
    """

    _has_differed = False
    """True if an optimizer has stepped since all workers had the same parameters."""

    def after_step(self, index: int, steps: int) -> bool:
        """Mix this optimizer's parameters if that is due. Return False: the parameters of the workers differ."""
        self._has_differed = True
        super().after_step(index, steps)
        return False

    @torch.no_grad()
    def exchange(self, parameter_set: ParameterSet, number: int) -> None:
        """Mix the parameters with those of the peers of this round."""
        self.buffers.agree(again=False)
        buffers = FlatTensors(self.buffers.floating(parameter_set.optimizers))
        with in_buffers(parameter_set.parts):
            theta = [part.theta for part in parameter_set.parts]
            own = [one.clone() for one in theta] + buffers.flat()  # peers may read these when theta has changed
            mixed = self.attempt(
                lambda: self._mixed(own, parameter_set.weights.share(), number, parameter_set.redrawn), in_pairs=True
            )
            if not all(bool(torch.isfinite(one.sum())) for one in mixed):
                raise NotFiniteError("a parameter of this worker or of a peer is NaN or infinite; nothing was mixed")
            for one, result in zip(theta, mixed, strict=False):
                one.copy_(result)
            buffers.take(mixed[len(theta) :])
        parameter_set.redrawn = {}

    def _mixed(self, own: Sequence[Tensor], share: float, number: int, redrawn: Mapping[str, int]) -> list[Tensor]:
        """Return the mixed tensors. A worker sends empty tensors to a peer that gives it no weight.

        The last message says the share, in which global step the worker does the round, and what it has drawn again.
        """
        rank, rows = self._transport.worker, mixing_matrix(self.recipe.whom, number, self._transport.workers)
        row, tally = rows[rank], self._context.tally
        message = [(one, tally.account("parameters")) for one in own]
        device = own[0].device if own else torch.device("cpu")
        drawn = float(zlib.crc32(msgspec.msgpack.encode(redrawn)))
        place = torch.tensor([share, self._observer.batch(), drawn], dtype=torch.float64, device=device)
        message.append((place, tally.account("counts")))
        runners = {
            peer: [self._swap(peer, one if rank in other else one[:0], account) for one, account in message]
            for peer, other in enumerate(rows)
            if peer != rank and (rank in other or peer in row)
        }
        received = {peer: finish(each) for peer, each in runners.items()}
        places = {peer: each[-1].tolist() for peer, each in received.items() if each[-1].numel()}
        if any(batch != self._observer.batch() for _, batch, _ in places.values()):
            self._observer.refuse_apart({peer: int(batch) for peer, (_, batch, _) in places.items()})
        apart = [self._transport.members[peer] for peer, (*_, other) in places.items() if other != drawn]
        if apart:
            raise ReplicasDifferError(refused(redrawn, f"{named(sorted(apart))} has drawn other values, or none"))
        shares = {peer: places[peer][0] if peer != rank else share for peer in row}
        weights = weighted_by_samples(row, shares)
        mixed = [one.clone() for one in own]
        for peer in sorted(received.keys() & row.keys()):
            for one, before, other in zip(mixed, own, received[peer], strict=False):
                one.add_(other - before, alpha=weights[peer])
        return mixed

    def _swap(self, peer: int, tensor: Tensor, account: Account | None) -> CollectiveRunner:
        if account is not None:
            account.count_raw(tensor.nbytes)
        return CollectiveRunner(self._transport, _exchange(peer, tensor), account)

    # --- the averaged model ---------------------------------------------------------------------------------------

    @property
    def has_stepped(self) -> bool:
        """True if the parameters of the workers differ."""
        return self._has_differed

    @property
    def keeps_own_model(self) -> bool:
        """True unless the mean is in place."""
        return self._averaged is None

    @property
    def replicas_differ(self) -> bool:
        """True from the first step until the mean is in place."""
        return self._averaged is None and self._has_differed

    def load_difference(self, differs: bool) -> None:
        """Take part in the mean by which the epoch of a loaded state ends, also if no step is left in it."""
        self._has_differed = differs

    def _share_in_evaluation(self, parameter_set: ParameterSet) -> Callable[[], float]:
        return lambda: 1 / self._transport.workers

    def _put_back(self, averaged: AveragedModel, own: bool) -> bool:
        is_changed = super()._put_back(averaged, own)
        self._has_differed = self._has_differed and not is_changed
        return is_changed

    def check(self, when: str, rates: Rates = NO_RATES, steps: Sequence[int] = ()) -> bool:
        """Compare the replicas if they must be equal now. Return False if there is nothing to compare."""
        return (self._averaged is not None or not self._has_differed) and super().check(when, rates, steps)


def weighted_by_samples(row: Mapping[int, float], shares: Mapping[int, float]) -> Mapping[int, float]:
    """Return a row of the mixing matrix, weighted by the shares of these workers in the samples of the round.

    >>> weighted_by_samples({0: 0.5, 1: 0.25, 2: 0.25}, {0: 0.2, 1: 0.4, 2: 0.0})
    {0: 0.5, 1: 0.5, 2: 0.0}
    """
    total = sum(weight * shares[peer] for peer, weight in row.items())
    return {peer: weight * shares[peer] / total for peer, weight in row.items()} if total else row


def _exchange(peer: int, tensor: Tensor) -> CollectiveCoroutine:
    return cast("Tensor", (yield Exchange(peer, tensor)))
