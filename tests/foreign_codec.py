"""A codec of another package: its state is nested, and its attributes have names of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.codecs import Members, SingleRound, State, error_feedback, top_k
from stretto.codecs.base import refuse_not_finite

INNER = error_feedback(top_k(0.5))
MEMBERS: list[int] = []
"""Numbers of workers that states were reset to."""


class Drift(State):
    """Decaying sum of the encoded tensors."""

    def __init__(self, like: Tensor) -> None:
        self.runs = torch.zeros_like(like)
        self.rest: list[Any] = [0, {"clock": 1.0}]

    def reset(self, members: Members) -> None:
        super().reset(members)
        MEMBERS.append(members.workers)


@dataclass(frozen=True, repr=False)
class drifting(SingleRound):
    """Send x and a part of earlier inputs: a lost state changes the result."""

    weight: float = 0.1

    keeps_residual = True
    conserves = False

    def init_state(self, like: Tensor, context: Any = None) -> dict[str, Any]:
        return {"scene": 0, "nested": (Drift(like), {"inner": INNER.init_state(like)})}

    def encode(self, x: Tensor, state: Any) -> Tensor:
        drift, inner = state["nested"]
        refuse_not_finite(x, self)
        scale = 1 + self.weight * (drift.rest[0] % 3 + state["scene"] % 2 + drift.rest[1]["clock"])
        message = INNER.encode(scale * x + self.weight * drift.runs, inner["inner"])
        drift.runs = 0.5 * drift.runs + x
        drift.rest[0] += 1
        drift.rest[1]["clock"] *= 0.5
        state["scene"] += 1
        return message

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return INNER.decode(message, like)

    def residual(self, state: Any) -> Tensor | None:
        return INNER.residual(state["nested"][1]["inner"])

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return INNER.values_sent(message, like)

    @property
    def fixed_size(self) -> bool:
        return False

    def bytes_of(self, x: Tensor) -> int:
        return INNER.bytes_of(x)


class no_dataclass(SingleRound):
    """Refused: its options are not known."""


def factory() -> drifting:
    """Refused: code is not run by a recipe."""
    return drifting()
