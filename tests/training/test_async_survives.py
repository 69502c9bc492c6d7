"""Runs over a parameter server in which workers and servers die at any point: every batch counts once, nobody hangs."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import pytest
import torch
from example_counts import EXAMPLES_FACTOR
from faulty_servers import FaultyCluster, Worker
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto import codecs
from stretto.data.assignment import BatchAssignment
from stretto.loader.epoch_order import draw, parted
from stretto.loader.leased_batches import LeasedBatchSampler, LeasedEpoch
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.recipe.parser import parse
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.traffic_counters import Tally

BATCHES, SIZE, PASSES = 12, 2, 3
APART = 16
"""The numbers of two batches are so far apart, so that every shard has some."""
STEPS = 20_000
"""So many messages are enough for any run here."""


class Books:
    """What the workers of a run wrote down."""

    def __init__(self) -> None:
        self.counted: dict[int, list[int]] = {}
        self.last: torch.Tensor | None = None
        self.kept = 0
        """How many states were kept in the middle of a pass."""


def script(recipe: str, meet: int | None, books: Books) -> Any:
    """What a worker does: each batch adds 1 to a number of its own, so that the sum tells what was applied."""

    def run(worker: Worker) -> None:
        wire, net = worker.client, nn.Module()
        net.w = nn.Parameter(torch.zeros(BATCHES * APART))
        arena = FlatParameters([("w", cast("nn.Parameter", net.w))])
        data = TensorDataset(torch.arange(BATCHES * SIZE) // SIZE)
        leases: list[Any] = []
        hands: list[LeasedEpoch] = []

        def unsent() -> tuple[int, list[Any]]:
            now, leases[:] = list(leases), []
            return sum(one.samples for one in now), now

        exchange = AsyncServer(
            arena,
            1,
            parse(recipe),
            wire,
            Stopwatch(lambda: 0.0),
            Tally(codecs.CodecContext(worker.number, worker.cluster.workers)),
            Optimizers([torch.optim.SGD([cast("nn.Parameter", net.w)], lr=1.0)]),
            lambda found: hands[0].settle(found),
            lambda blocked_s: None,
            False,
        )

        def meet_all(times: int) -> None:
            for _ in range(times):
                exchange.wait_at_barrier(called=True)
                exchange.read()
                told = wire.all_gather_bytes(b"at a meeting")
                assert set(told) == {b"at a meeting"}
                exchange.start_from_read()

        def keep_state(number: int) -> None:
            """What is kept in the middle of a pass: the books say what is in the parameters, and nothing else."""
            exchange.wait_at_barrier()
            exchange.read()
            theta = arena.parts[0].theta[: BATCHES * APART : APART].clone()

            def keep() -> bytes:
                try:
                    deal = BatchAssignment.restored(hands[0].at_rest().state(), ())
                except RollbackRequiredError:
                    return b"lost"
                _, done = parted(hands[0].order, deal.remaining())
                left = {start // SIZE for start, _ in deal.remaining()}
                share = 1 / worker.cluster.workers if recipe.startswith("stale") else 1.0
                wanted = [share * (number - (batch in left)) for batch in range(BATCHES)]
                np.testing.assert_allclose(theta.numpy(), wanted, rtol=1e-5)
                assert bool(done) == (len(left) < BATCHES)
                books.kept += 1
                return b"kept"

            wire.broadcast_bytes(keep)
            exchange.start_from_read()

        loader = DataLoader(data, batch_size=SIZE, shuffle=False)
        share = LeasedBatchSampler(lambda: draw(loader, wire, 1), wire, meet, in_turn=parse(recipe).when.bound == 0)
        mine = DataLoader(data, batch_sampler=share)
        for number in range(wire.join_position.epoch_number if wire.join_position is not None else 1, PASSES + 1):
            hands[:] = [LeasedEpoch(mine, share, number)]
            hands[0].on_snapshot = functools.partial(keep_state, number)
            hands[0].push_all = lambda: exchange.finish(*unsent()) and None
            hands[0].wait_at_barriers = meet_all
            while True:
                hand = hands[0].next()
                meet_all(hands[0].barriers_due())
                if hand is None:
                    break
                with torch.no_grad():
                    arena.parts[0].theta[APART * int(hand.batch[0][0])] += 1.0
                leases.append(hand.lease)
                exchange.stepped()
                exchange.run(*unsent())
                if worker.is_to_quit:
                    exchange.finish(*unsent())
                    wire.quit()
                    return
                hands[0].ask_ahead()
            exchange.finish(*unsent())
            exchange.wait_at_barrier()
            exchange.read()
            wire.all_gather_bytes(b"end of the pass")
            counted = hands[0].counted()
            assert counted is not None
            books.counted[number] = counted.tolist()
            books.last = arena.parts[0].theta[: BATCHES * APART : APART].clone()
            told = wire.broadcast_bytes(lambda: b"evaluated")
            assert told == b"evaluated"
            exchange.start_from_read()
        wire.close()

    return run


RECIPES = [
    "downpour(every=1)",
    "async_sgd",
    "async_sgd(overlap=True)",
    "stale_synchronous(bound=1)",
    "stale_synchronous(bound=0)",
]


def follow(cluster: FaultyCluster, faults: list[tuple[int, str, int]]) -> None:
    """Run to the end, with these faults at these steps; it must come within so many messages.

    Steps of what happens `at the end` are counted from when a worker has come to it.
    """
    cluster.start()
    due, ending = ([one for one in sorted(faults) if one[1].startswith(AT_END) == is_end] for is_end in (False, True))
    for at in range(STEPS):
        if ending and any(one.is_done for one in cluster.workers_now):
            due = sorted([*due, *((at + after, what.removeprefix(AT_END), number) for after, what, number in ending)])
            ending = []
        while due and due[0][0] <= at:
            _, what, number = due.pop(0)
            happen(cluster, what, number)
        if not cluster.step():
            cluster.report_and_restart_all()
            if not cluster.step() and cluster.is_done:
                return
        if at % 40 == 0:
            cluster.report_failure() if at % 80 else cluster.restart_worker()
    waiting = {
        f"{one.number}.{one.incarnation}": [list(channel.pending.values()) for channel in one.channels]
        for one in cluster.workers_now
    }
    raise AssertionError(f"no end: {cluster.history}; {waiting}")


AT_END = "at the end, "


def happen(cluster: FaultyCluster, what: str, number: int) -> None:
    if what == "worker":
        cluster.kill_worker(number % cluster.workers)
    elif what == "server":
        cluster.kill_server(number % (len(cluster.services) - 1))
    elif what == "quit":
        cluster.ask_to_quit(number % cluster.workers)
    else:
        cluster.break_connection()


def faults(*kinds: str, most: int = 4) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    return st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(kinds), st.integers(0, 3)), max_size=most)


def run(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: list[tuple[int, str, int]]
) -> Books:
    books = Books()
    cluster = FaultyCluster(workers, shards, seed, script(recipe, meet, books), snapshot_interval_s=60)
    grads = torch.is_grad_enabled()
    try:
        follow(cluster, planned)
    finally:
        torch.set_grad_enabled(grads)  # a worker may have died where it was off, for all greenlets
    return books


PLACE = {
    "seed": st.integers(0, 10_000),
    "workers": st.integers(1, 4),
    "shards": st.integers(1, 2),
    "recipe": st.sampled_from(RECIPES),
    "meet": st.sampled_from([None, 5]),
}
SETTINGS = settings(max_examples=15 * EXAMPLES_FACTOR, suppress_health_check=list(HealthCheck))
Faults = list[tuple[int, str, int]]


def all_count_once(books: Books, recipe: str, workers: int) -> None:
    """Every batch counts once in each pass, and is in the parameters of every shard so often."""
    assert books.counted == {number: [1] * (BATCHES * SIZE) for number in range(1, PASSES + 1)}
    assert books.last is not None
    share = 1 / workers if recipe.startswith("stale") else 1.0
    np.testing.assert_allclose(books.last.numpy(), np.full(BATCHES, PASSES * share), rtol=1e-5)


def holds(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: list[tuple[int, str, int]]
) -> None:
    """Whatever happens, the run comes to its end, and every batch counts once."""
    all_count_once(run(seed, workers, shards, recipe, meet, planned), recipe, workers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_is_kept_in_the_middle_of_a_pass(recipe: str) -> None:
    assert run(0, 3, 2, recipe, None, []).kept >= PASSES


@given(**PLACE, planned=faults("server", "link"))
@SETTINGS
def test_servers_die_and_what_came_after_the_cut_is_undone_and_done_again(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: Faults
) -> None:
    holds(seed, workers, shards, recipe, meet, planned)


@given(**PLACE, planned=faults("worker"))
@SETTINGS
def test_workers_die_and_come_back_and_every_batch_counts_once(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: Faults
) -> None:
    """Also where only some shards have the last update of the dead."""
    holds(seed, workers, shards, recipe, meet, planned)


LATE = [(627, "worker", 0), (746, "server", 0), (1196, "link", 0)]
DEALT = [(470, "worker", 0), (681, "server", 0)]
JOINING = [(572, "worker", 0), (637, "worker", 0), (648, "server", 0)]
TELLER = [(739, "server", 0), (740, "worker", 0)]
ENDING = [(466, "worker", 0), (636, "server", 0)]
AGAIN = [(381, "worker", 0), (570, "worker", 0), (597, "server", 2), (694, "server", 0)]
NOBODY = [(277, "worker", 0), (298, "worker", 1), (299, "server", 0)]
BEHIND = [(577, "server", 0), (579, "worker", 0)]
UNTOLD = [(313, "worker", 0), (337, "worker", 1), (337, "server", 0)]
TOO_LATE = [(535, "worker", 0), (556, "worker", 1), (544, "server", 0)]
TORN = [(171, "worker", 0), (680, "worker", 1)]
HEARD = [(10, "worker", 0), (11, "server", 0)]
PASSED = [(608, "server", 0), (1024, "server", 0), (1290, "server", 0), (1456, "server", 0)]


CALLED_TWICE = [
    (1, "at the end, server", 1),
    (22, "worker", 4),
    (145, "worker", 0),
    (300, "worker", 0),
    (929, "server", 1),
    (1451, "server", 2),
]
NOBODY_KNOWS = [
    (539, "server", 0),
    (541, "worker", 1),
    (584, "server", 0),
    (593, "worker", 0),
    (5, AT_END + "worker", 0),
]


@given(**PLACE, planned=faults("worker", "server", "link"))
@example(seed=34, workers=3, shards=1, recipe="async_sgd", meet=None, planned=LATE)
@example(seed=60, workers=3, shards=2, recipe="stale_synchronous(bound=0)", meet=None, planned=DEALT)
@example(seed=124, workers=3, shards=1, recipe="async_sgd", meet=None, planned=JOINING)
@example(seed=5024, workers=3, shards=1, recipe="stale_synchronous(bound=1)", meet=None, planned=TELLER)
@example(seed=5060, workers=3, shards=1, recipe="async_sgd(overlap=True)", meet=None, planned=ENDING)
@example(seed=690, workers=4, shards=1, recipe="async_sgd", meet=None, planned=AGAIN)
@example(seed=5064, workers=2, shards=1, recipe="async_sgd", meet=None, planned=NOBODY)
@example(seed=33, workers=3, shards=2, recipe="stale_synchronous(bound=0)", meet=None, planned=BEHIND)
@example(seed=10364, workers=2, shards=1, recipe="downpour(every=1)", meet=None, planned=UNTOLD)
@example(seed=10928, workers=2, shards=1, recipe="async_sgd(overlap=True)", meet=None, planned=TOO_LATE)
@example(seed=700008, workers=3, shards=2, recipe="async_sgd(overlap=True)", meet=None, planned=TORN)
@example(seed=973331, workers=4, shards=2, recipe="async_sgd", meet=5, planned=PASSED)
@example(seed=554979, workers=4, shards=1, recipe="async_sgd(overlap=True)", meet=5, planned=HEARD)
@example(seed=20203, workers=5, shards=2, recipe="stale_synchronous(bound=0)", meet=None, planned=CALLED_TWICE)
@example(seed=86692, workers=2, shards=1, recipe="async_sgd", meet=5, planned=NOBODY_KNOWS)
@example(seed=203, workers=2, shards=2, recipe="stale_synchronous(bound=1)", meet=None, planned=[(2, "server", 0)])
@SETTINGS
def test_all_of_them_die_in_any_order(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: Faults
) -> None:
    holds(seed, workers, shards, recipe, meet, planned)


LAST = [(6, "at the end, server", 0), (8, "at the end, worker", 1)]
AT_THE_END = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([AT_END + "server", AT_END + "worker"]), st.integers(0, 3)),
    min_size=1,
    max_size=2,
)


@given(**PLACE, planned=AT_THE_END)
@example(seed=700006, workers=4, shards=1, recipe="downpour(every=1)", meet=None, planned=LAST)
@SETTINGS
def test_who_dies_when_some_have_come_to_the_end_leaves_nobody_waiting(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: Faults
) -> None:
    """Those who are left may lack the last answer, and those who have ended say nothing again."""
    holds(seed, workers, shards, recipe, meet, planned)


QUIT_AND_BACK = [(311, "quit", 3), (351, "worker", 1), (430, "server", 0)]


@given(**PLACE, planned=faults("quit", "server", "worker"))
@example(seed=34, workers=4, shards=2, recipe="async_sgd", meet=None, planned=[(334, "quit", 1), (498, "server", 0)])
@example(seed=592344, workers=2, shards=1, recipe="async_sgd", meet=5, planned=QUIT_AND_BACK)
@SETTINGS
def test_who_quits_is_not_waited_for_by_servers_that_are_started_again(
    seed: int, workers: int, shards: int, recipe: str, meet: int | None, planned: Faults
) -> None:
    holds(seed, workers, shards, recipe, meet, planned)
