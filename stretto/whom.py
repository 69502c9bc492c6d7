"""With whom does a worker exchange?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stretto.axis import Answer


class Whom(Answer):
    """Base of the answers to *whom*."""

    axis = "whom"
    example: ClassVar[str] = "everyone()"


@dataclass(frozen=True, repr=False)
class everyone(Whom):
    """With all workers at once, without a centre: an all-reduce.

    Cost: 2(N-1)/N times the bytes exchanged, per worker, on a ring.
    """
