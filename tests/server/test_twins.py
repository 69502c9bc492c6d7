"""Every recipe that adds what comes: a replica that takes over says what its server would have said, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from train.test_recipes import RECIPES

from stretto.how import Scene
from stretto.server import messages as m
from stretto.server.desk import Post
from stretto.server.pair import Reading
from stretto.server.shard_desk import ShardDesk
from stretto.then import pull
from stretto.typed import parse

NUMBERS, WORKERS, PUSHES = 96, 3, 24
SERVED = [one for one in RECIPES if parse(one).asynchronous]


def said(desk: ShardDesk, worker: int, number: int, body: m.Body, tensors: Sequence[Tensor]) -> list[Post]:
    head = m.Head(number, body, [(str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors])
    desk.expects(worker, head)
    return desk.take(worker, head, [[one.clone()] for one in tensors])


@dataclass
class World:
    """Workers, and a server whose replica hears what it hears. Some replies are under way for a while."""

    recipe: str
    seed: int
    told: list[tuple[int, m.Body, list[Tensor]]] = field(default_factory=list)
    """What the workers have been told."""

    def __post_init__(self) -> None:
        how = parse(self.recipe).how
        self._how, self._memories = how, [how.memory(torch.zeros(NUMBERS), Scene(0, WORKERS)) for _ in range(WORKERS)]
        self._twins = [ShardDesk(WORKERS, Reading(0.0), "stop", is_paired=True) for _ in range(2)]
        self._asked: dict[int, tuple[int, m.Push, list[Tensor]]] = {}
        self._versions, self._seqs = [0] * WORKERS, [0] * WORKERS
        self._under_way: list[Post] = []
        self._say(0, 1, m.Open(1, self.recipe, WORKERS), [torch.zeros(NUMBERS)])

    def play(self, dies_at: int, dies: bool) -> list[Tensor]:
        """Push in a drawn order; the server's parameters in the end. What is under way when it dies is lost."""
        rng, slow = random.Random(self.seed), self._says_what_no_other_does()
        for step in range(PUSHES):
            worker = rng.choice([one for one in range(WORKERS) if one not in self._asked])
            self._under_way += self._push(worker)
            if step == dies_at and dies:
                self._take_over()
            stays = rng.randrange(WORKERS) if slow and step != dies_at else 0
            while len(self._under_way) > min(stays, WORKERS - 1):
                self._deliver(self._under_way.pop(0))
            if len(self._asked) == WORKERS:
                self._deliver(self._under_way.pop(0))
        (found,) = said(self._twins[0], 0, 0, m.Read(flush=True), [])
        return list(found.tensors)

    def _says_what_no_other_does(self) -> bool:
        """Whether a reply that is lost has to come again; otherwise the newest parameters do as well."""
        found = parse(self.recipe)
        return found.how.reply is not None or isinstance(found.then, pull)

    def _push(self, worker: int) -> list[Post]:
        self._seqs[worker] += 1
        seq = self._seqs[worker]
        drawn = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1000 * worker + seq))
        message = self._how.encode(drawn, self._memories[worker])
        body = m.Push(1, seq, self._versions[worker], 8, 0.1)
        self._asked[worker] = seq + 1, body, [message]
        return self._say(worker, *self._asked[worker])

    def _say(self, worker: int, number: int, body: m.Body, tensors: list[Tensor]) -> list[Post]:
        posts = [said(one, worker, number, body, tensors) for one in self._twins]
        return [_as_sent(one) for one in posts[0]]

    def _take_over(self) -> None:
        """All who were not answered ask again."""
        del self._twins[0]
        self._under_way.clear()
        for worker, asked in sorted(self._asked.items()):
            self._under_way += self._say(worker, *asked)

    def _deliver(self, post: Post) -> None:
        number, *_ = self._asked.pop(post.worker)
        assert post.number == number
        assert isinstance(post.body, m.Go)
        self._versions[post.worker] = post.body.version
        self.told.append((post.worker, post.body, list(post.tensors)))


def _as_sent(post: Post) -> Post:
    found = Post(post.worker, post.number, post.body, [one.clone() for one in post.tensors])
    if post.sent is not None:
        post.sent()
    return found


def _by_worker(told: list[tuple[int, m.Body, list[Tensor]]]) -> list[Any]:
    return sorted(((worker, body.version, body, tensors) for worker, body, tensors in told), key=lambda one: one[:2])  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", SERVED)
@given(seed=st.integers(0, 10_000), dies_at=st.integers(0, PUSHES - 1))
@settings(max_examples=15, deadline=None)
def test_a_replica_that_takes_over_says_what_its_server_would_have_said(recipe: str, seed: int, dies_at: int) -> None:
    undisturbed, struck = World(recipe, seed), World(recipe, seed)
    wanted, found = undisturbed.play(dies_at, dies=False), struck.play(dies_at, dies=True)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    pairs = list(zip(_by_worker(struck.told), _by_worker(undisturbed.told), strict=True))
    for (worker, _, body, tensors), (other, _, wanted_body, wanted_tensors) in pairs:
        assert (worker, body) == (other, wanted_body)
        assert all(torch.equal(one, two) for one, two in zip(tensors, wanted_tensors, strict=True))
