"""What became of a method."""

from __future__ import annotations

from dataclasses import dataclass

GD = "gd"
"""Gradient descent, which is `allreduce` with everybody's whole batch: what the others are measured by."""


@dataclass(frozen=True)
class Outcome:
    """What became of a method: objective error and uplink bits so far, before every round and after the last."""

    method: str
    workers: int
    errors: tuple[float, ...]
    bits: tuple[int, ...]
    reached: bool

    @property
    def rounds(self) -> int:
        """The rounds that were made."""
        return len(self.errors) - 1

    @property
    def uplink_bits(self) -> int:
        """All bits that all workers said."""
        return self.bits[-1]

    @property
    def error(self) -> float:
        """The objective error in the end."""
        return self.errors[-1]
