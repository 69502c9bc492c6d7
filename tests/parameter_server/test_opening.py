"""Parameters are sent to a shard once, by the first of the workers, until an update of them has been received."""

from __future__ import annotations

import sys

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
    handler: ShardHandler, worker: int, arena: int = 1, recipe: str = "async_sgd", value: float = 0.0
) -> list[OutgoingMessage]:
    return replies_to(
        handler,
        worker,
        1,
        m.Open(arena, recipe, 2, recovery_epoch=max(handler._recovery_epoch, 0)),
        [torch.full((NUMBERS,), value)],
    )


def pushed(handler: ShardHandler, worker: int, arena: int = 1) -> list[OutgoingMessage]:
    return replies_to(
        handler, worker, 2, m.Push(arena, 1, 0, 8, 0.1, recovery_epoch=handler._recovery_epoch), [torch.ones(NUMBERS)]
    )


def read(handler: ShardHandler, worker: int) -> list[float]:
    (post,) = replies_to(handler, worker, 3, m.Read(False, handler._recovery_epoch))
    return [float(one) for one in post.tensors[0]]


def test_the_first_worker_after_a_failure_sends_parameters_before_the_shard_knows_of_the_failure() -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    opened(handler, 0, value=1.0)
    assert opened(handler, 1, value=2.0)[0].body == m.Result()
    assert read(handler, 0) == [2.0] * NUMBERS


def test_the_first_worker_sends_parameters_to_a_restarted_shard() -> None:
    kept = InMemoryStore()
    opened(ShardHandler(2, lambda: 0.0, "stop", kept), 0)
    handler = ShardHandler(2, lambda: 0.0, "stop", kept, boot_id=1)
    assert replies_to(handler, 1, 1, m.RequestRollback(1, 0, 1))[0].body == m.Result()
    assert opened(handler, 1, value=2.0)[0].body == m.Result()
    assert read(handler, 0) == [2.0] * NUMBERS


@pytest.mark.parametrize("recipe", ["async_sgd", "soft_sync(collect=2)"])
@pytest.mark.parametrize("giver", [0, 1])
def test_received_updates_are_not_overwritten(recipe: str, giver: int) -> None:
    """Updates that wait for those of other workers are not overwritten either."""
    handler = ShardHandler(2, lambda: 0.0, "stop")
    opened(handler, 0, recipe=recipe)
    pushed(handler, 1)
    for arena in (1, 0):
        with pytest.raises(FramingError, match=rf"outdated parameters {arena}: this shard trains parameters 1"):
            opened(handler, giver, arena, recipe)
    pushed(handler, 0)
    assert read(handler, 0) != [0.0] * NUMBERS
    opened(handler, giver, 2, recipe)
    assert read(handler, 0) == [0.0] * NUMBERS


def test_early_updates_are_not_overwritten() -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    opened(handler, 0, recipe="stale_synchronous(bound=1)")
    replies_to(handler, 1, 2, m.Push(1, 9, 0, 8, 0.1), [torch.ones(NUMBERS)])
    with pytest.raises(FramingError, match="this shard trains parameters 1"):
        opened(handler, 0, recipe="stale_synchronous(bound=1)")


def test_earlier_parameters_are_not_accepted_again() -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    opened(handler, 0, 2)
    with pytest.raises(FramingError, match="outdated parameters 1:"):
        opened(handler, 0, 1)


def test_parameters_of_an_earlier_recovery_epoch_are_not_accepted() -> None:
    """The sender does not know of the rollback yet."""
    kept = InMemoryStore()
    handler = ShardHandler(2, lambda: 0.0, "stop", kept)
    opened(handler, 0)
    replies_to(handler, 0, 2, m.RequestRollback(1, 0, 0))
    (post,) = replies_to(handler, 0, 3, m.Open(2, "async_sgd", 2, recovery_epoch=0), [torch.ones(NUMBERS)])
    assert isinstance(post.body, m.StaleRequest)
    assert read(handler, 0) == [0.0] * NUMBERS


def test_recipe_of_a_message_imports_no_module() -> None:
    """Only the recipe of the command line imports codecs: `wave` is a module that nothing here has imported."""
    handler = ShardHandler(1, lambda: 0.0, "stop")
    assert "wave" not in sys.modules
    with pytest.raises(FramingError, match="a message imports no module"):
        opened(handler, 0, recipe="async_sgd(how=wave.Wave_read(1))")
    assert "wave" not in sys.modules
