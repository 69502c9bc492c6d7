"""When do workers exchange, and who waits?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from stretto.axis import Answer, Range


class When(Answer):
    """Base of the answers to *when*."""

    axis = "when"
    example: ClassVar[str] = "together()"


@dataclass(frozen=True, repr=False)
class together(When):
    """All workers exchange after every k local steps, and wait for each other.

    Until step `after` they exchange at every step; from there on at every k-th.
    """

    every: Annotated[int, Range(least=1)] = 1
    after: Annotated[int, Range(least=0)] = 0

    papers = ("Lin et al. 2018 (1808.07217)",)

    def sources(self) -> tuple[str, ...]:
        """The paper of `after`, where that is used."""
        return self.papers if self.after else ()

    def due(self, step: int) -> bool:
        """Whether an exchange follows local step `step`, counted from 1.

        >>> [step for step in range(1, 11) if together(every=3, after=2).due(step)]
        [1, 2, 5, 8]
        """
        return step <= self.after or (step - self.after) % self.every == 0
