"""Answers to *whom*: with which processes does a worker exchange?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from stretto.spec import Answer, Range


class Whom(Answer):
    """Base of the answers to *whom*."""

    axis = "whom"
    example: ClassVar[str] = "everyone()"


@dataclass(frozen=True, repr=False)
class everyone(Whom):
    """All workers, without a server: an all-reduce.

    Cost: 2(N-1)/N times the bytes exchanged, per worker, on a ring.
    """


@dataclass(frozen=True, repr=False)
class server(Whom):
    """A parameter server of `shards` processes, each of which holds a range of the parameters.

    Cost: twice the bytes exchanged per worker, and N times them, divided by the shards, per shard.
    """

    shards: Annotated[int, Range(least=1, most=256)] = 1

    papers = ("Li et al. 2014 (parameter server)",)
