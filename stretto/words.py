"""What may be said in a conversation between workers.

A codec is a generator. It yields what it wants answered and never learns who answers: the same codec runs over an
all-reduce, through a server or in the simulator. The number and the kind of its turns may not depend on the data,
since all workers must say the same words in the same order.

    def low_rank(x, memory):
        p = orthogonalise((yield Mean(x @ memory.q)))
        memory.q = yield Mean(x.T @ p)
        return p @ memory.q.T
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Mean:
    """Ask for the weighted mean over all workers, which may be summed on the way.

    Each worker gives its *contribution*: its value times its share of the samples, so that the mean is the sum of
    the contributions, `mean = sum_i (n_i / sum_j n_j) x_i`. The tensor is given away: the answer may come in it.
    All workers give tensors of one shape and dtype. Cost: 2(N-1)/N times its bytes per worker on a ring.
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Every:
    """Ask for the message of every worker, whole, in the order of the workers.

    Messages are flat tensors of one dtype whose lengths may differ. Cost: (N-1) messages per worker.
    """

    tensor: Tensor


Ask = Mean | Every
Answer: TypeAlias = "Tensor | Sequence[Tensor]"
Conversation: TypeAlias = "Generator[Ask, Answer, Tensor]"
"""Yields asks, is sent their answers (a tensor for Mean, a sequence for Every), returns the decoded result."""
