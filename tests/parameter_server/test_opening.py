"""Parameters are given once: whoever is first among the workers may give them, until work on them has come."""

from __future__ import annotations

import pytest
import torch
from handlers import replies_to

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import FramingError
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore

NUMBERS = 4


def opened(
    desk: ShardHandler, worker: int, arena: int = 1, recipe: str = "async_sgd", value: float = 0.0
) -> list[OutgoingMessage]:
    return replies_to(
        desk,
        worker,
        1,
        m.Open(arena, recipe, 2, recovery_epoch=max(desk._recovery_epoch, 0)),
        [torch.full((NUMBERS,), value)],
    )


def pushed(desk: ShardHandler, worker: int, arena: int = 1) -> list[OutgoingMessage]:
    return replies_to(
        desk, worker, 2, m.Push(arena, 1, 0, 8, 0.1, recovery_epoch=desk._recovery_epoch), [torch.ones(NUMBERS)]
    )


def read(desk: ShardHandler, worker: int) -> list[float]:
    (post,) = replies_to(desk, worker, 3, m.Read(False, desk._recovery_epoch))
    return [float(one) for one in post.tensors[0]]


def test_who_is_first_after_a_death_gives_them_though_the_shard_has_not_heard_of_it() -> None:
    desk = ShardHandler(2, lambda: 0.0, "stop")
    opened(desk, 0, value=1.0)
    assert opened(desk, 1, value=2.0)[0].body == m.Result()
    assert read(desk, 0) == [2.0] * NUMBERS


def test_who_is_first_gives_them_to_a_shard_that_was_started_again() -> None:
    kept = InMemoryStore()
    opened(ShardHandler(2, lambda: 0.0, "stop", kept), 0)
    desk = ShardHandler(2, lambda: 0.0, "stop", kept, boot_id=1)
    assert replies_to(desk, 1, 1, m.RequestRollback(1, 0, 1))[0].body == m.Result()
    assert opened(desk, 1, value=2.0)[0].body == m.Result()
    assert read(desk, 0) == [2.0] * NUMBERS


@pytest.mark.parametrize("recipe", ["async_sgd", "soft_sync(collect=2)"])
@pytest.mark.parametrize("giver", [0, 1])
def test_work_that_has_come_is_not_wiped_out(recipe: str, giver: int) -> None:
    """Not even what waits for that of others."""
    desk = ShardHandler(2, lambda: 0.0, "stop")
    opened(desk, 0, recipe=recipe)
    pushed(desk, 1)
    for arena in (1, 0):
        with pytest.raises(FramingError, match=rf"parameters {arena} where work on parameters 1 has come"):
            opened(desk, giver, arena, recipe)
    pushed(desk, 0)
    assert read(desk, 0) != [0.0] * NUMBERS
    opened(desk, giver, 2, recipe)
    assert read(desk, 0) == [0.0] * NUMBERS


def test_work_that_is_too_early_is_not_wiped_out() -> None:
    desk = ShardHandler(2, lambda: 0.0, "stop")
    opened(desk, 0, recipe="stale_synchronous(bound=1)")
    replies_to(desk, 1, 2, m.Push(1, 9, 0, 8, 0.1), [torch.ones(NUMBERS)])
    with pytest.raises(FramingError, match="work on parameters 1 has come"):
        opened(desk, 0, recipe="stale_synchronous(bound=1)")


def test_parameters_of_before_are_not_given_again() -> None:
    desk = ShardHandler(2, lambda: 0.0, "stop")
    opened(desk, 0, 2)
    with pytest.raises(FramingError, match="parameters 1 where"):
        opened(desk, 0, 1)


def test_parameters_of_an_age_that_is_over_are_not_taken() -> None:
    """The giver has not heard yet that all went back."""
    kept = InMemoryStore()
    desk = ShardHandler(2, lambda: 0.0, "stop", kept)
    opened(desk, 0)
    replies_to(desk, 0, 2, m.RequestRollback(1, 0, 0))
    (post,) = replies_to(desk, 0, 3, m.Open(2, "async_sgd", 2, recovery_epoch=0), [torch.ones(NUMBERS)])
    assert isinstance(post.body, m.StaleRequest)
    assert read(desk, 0) == [0.0] * NUMBERS
