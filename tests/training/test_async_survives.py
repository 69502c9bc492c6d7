"""Parameter-server runs in which workers and servers fail at any point: every batch counts once, no process hangs."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from async_exchange import open_exchange
from example_counts import examples
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
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.flat_buffers import FlatParameters

BATCHES, SIZE, EPOCHS = 12, 2, 3
APART = 16
"""Distance between the elements that two consecutive batches change, so that every shard holds some of them."""
WIDTH = 3
"""Width of the rows of the table."""
STEPS = 20_000
"""Number of messages that is enough for any run here."""


class Results:
    """Results that the workers of a run record."""

    def __init__(self) -> None:
        self.counted: dict[int, list[int]] = {}
        self.last: torch.Tensor | None = None
        self.last_rows: torch.Tensor | None = None
        self.snapshots = 0
        """Number of snapshots taken in the middle of an epoch."""


def step_row(exchange: AsyncServer, rows: nn.Parameter, number: int) -> None:
    """Add 1 to a row of the table, as a loop does that looks it up."""
    for table in exchange.tables:
        table.look_up(torch.tensor([number, (number + APART) % len(rows)]))
    rows.grad = torch.sparse_coo_tensor(
        torch.tensor([[number]]), -torch.ones(1, WIDTH), rows.shape, check_invariants=True
    )
    exchange.before_step(0)
    with torch.no_grad():
        rows[number] += 1.0


def script(recipe: str, barrier_every: int | None, results: Results, has_table: bool) -> Any:
    """Return a worker's script: each batch adds 1 to its own element, and to its own row of a table, of which rows are
    exchanged alone. So the sums show which batches were applied.
    """

    def run(worker: Worker) -> None:
        client, net = worker.client, nn.Module()
        net.w = nn.Parameter(torch.zeros(BATCHES * APART))
        net.rows = nn.Parameter(torch.zeros(BATCHES * APART, WIDTH))
        named = [(name, cast("nn.Parameter", one)) for name, one in net.named_parameters()]
        arena = FlatParameters(named, tables=[id(net.rows)] if has_table else ())
        data = TensorDataset(torch.arange(BATCHES * SIZE) // SIZE)
        leases: list[Any] = []
        epochs: list[LeasedEpoch] = []

        def unsent() -> tuple[int, list[Any]]:
            now, leases[:] = list(leases), []
            return sum(lease.samples for lease in now), now

        optimizer = torch.optim.SGD(list(net.parameters()), lr=1.0)
        context = codecs.CodecContext(worker.number, worker.cluster.workers)
        exchange = open_exchange(
            client, arena, parse(recipe), optimizer, context, lambda settled: epochs[0].settle(settled)
        )

        def wait_at_barriers(times: int) -> None:
            for _ in range(times):
                exchange.wait_at_barrier(called=True)
                exchange.read()
                replies = client.all_gather_bytes(b"at a meeting")
                assert set(replies) == {b"at a meeting"}
                exchange.start_from_read()

        def take_snapshot(number: int) -> None:
            """Check a snapshot in the middle of an epoch: the parameters hold exactly the batches recorded as done."""
            exchange.wait_at_barrier()
            exchange.read()
            theta, rows = net.w.detach()[::APART].clone(), net.rows.detach()[::APART].clone()

            def check() -> bytes:
                try:
                    assignment = BatchAssignment.restored(epochs[0].at_rest().state(), ())
                except RollbackRequiredError:
                    return b"lost"
                _, done = parted(epochs[0].order, assignment.remaining())
                remaining = {start // SIZE for start, _ in assignment.remaining()}
                weight = 1 / worker.cluster.workers if recipe.startswith("stale") else 1.0
                wanted = [weight * (number - (batch in remaining)) for batch in range(BATCHES)]
                np.testing.assert_allclose(theta.numpy(), wanted, rtol=1e-5)
                np.testing.assert_allclose(rows.numpy(), np.tile(wanted, (WIDTH, 1)).T, rtol=1e-5)
                assert bool(done) == (len(remaining) < BATCHES)
                results.snapshots += 1
                return b"kept"

            client.broadcast_bytes(check)
            exchange.start_from_read()

        loader = DataLoader(data, batch_size=SIZE, shuffle=False)
        sampler = LeasedBatchSampler(
            lambda: draw(loader, client, 1),
            client,
            barrier_every,
            "in-turn" if parse(recipe).when.bound == 0 else "first-come",
        )
        batches = DataLoader(data, batch_sampler=sampler)
        for number in range(client.join_position.epoch_number if client.join_position is not None else 1, EPOCHS + 1):
            loop: Any = SimpleNamespace(
                push_all=lambda: exchange.finish(*unsent()),
                wait_at_barriers=wait_at_barriers,
                on_snapshot=functools.partial(take_snapshot, number),
            )
            epochs[:] = [LeasedEpoch(batches, sampler, loop, number)]
            while True:
                assigned = epochs[0].next()
                if assigned is None:
                    break
                element = APART * int(assigned.batch[0][0])
                step_row(exchange, cast("nn.Parameter", net.rows), element)
                with torch.no_grad():
                    net.w[element] += 1.0
                leases.append(assigned.lease)
                exchange.stepped()
                exchange.run(*unsent())
                if worker.is_to_quit:
                    exchange.finish(*unsent())
                    client.leave()
                    return
                epochs[0].ask_ahead()
            exchange.finish(*unsent())
            exchange.wait_at_barrier()
            exchange.read()
            client.all_gather_bytes(b"end of the pass")
            counted = epochs[0].audited()[0]
            assert counted is not None
            results.counted[number] = counted.tolist()
            results.last, results.last_rows = net.w.detach().clone(), net.rows.detach().clone()
            message = client.broadcast_bytes(lambda: b"evaluated")
            assert message == b"evaluated"
            exchange.start_from_read()
        client.close()

    return run


RECIPES = [
    "downpour(every=1)",
    "async_sgd",
    "async_sgd(overlap=True)",
    "stale_synchronous(bound=1)",
    "stale_synchronous(bound=0)",
]


def run_with_faults(cluster: FaultyCluster, faults: list[tuple[int, str, int]]) -> None:
    """Run the cluster with these faults at these steps; raise if it does not end within `STEPS` messages.

    The steps of faults `at the end` are counted from the moment when the first worker has finished.
    """
    cluster.start()
    due, ending = ([one for one in sorted(faults) if one[1].startswith(AT_END) == is_end] for is_end in (False, True))
    for at in range(STEPS):
        if ending and any(one.is_done for one in cluster.workers_now):
            due = sorted([*due, *((at + after, what.removeprefix(AT_END), number) for after, what, number in ending)])
            ending = []
        while due and due[0][0] <= at:
            _, what, number = due.pop(0)
            inject(cluster, what, number)
        if not cluster.step():
            cluster.report_and_restart_all()
            if not cluster.step() and cluster.is_done:
                return
        if at % 40 == 0:
            cluster.report_failure() if at % 80 else cluster.restart_worker()
    waiting = {
        f"{one.number}.{one.incarnation}": [list(channel.session.unanswered()) for channel in one.channels]
        for one in cluster.workers_now
    }
    raise AssertionError(f"no end: {cluster.history}; {waiting}")


AT_END = "at the end, "


def inject(cluster: FaultyCluster, what: str, number: int) -> None:
    if what == "worker":
        cluster.kill_worker(number % len(cluster.workers_now))
    elif what == "guest":
        cluster.add_guest()
    elif what == "server":
        cluster.kill_server(number % (len(cluster.processes) - 1))
    elif what == "coordinator":
        cluster.kill_coordinator()
    elif what == "quit":
        cluster.ask_to_quit(number % len(cluster.workers_now))
    else:
        cluster.break_connection()


def faults(*kinds: str, most: int = 4) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    return st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(kinds), st.integers(0, 3)), max_size=most)


def run(
    seed: int,
    workers: int,
    shards: int,
    recipe: str,
    barrier_every: int | None,
    planned: list[tuple[int, str, int]],
    has_table: bool = False,
) -> Results:
    results = Results()
    cluster = FaultyCluster(
        workers, shards, seed, script(recipe, barrier_every, results, has_table), snapshot_interval_s=60
    )
    grads = torch.is_grad_enabled()
    try:
        run_with_faults(cluster, planned)
    finally:
        cluster.close()
        torch.set_grad_enabled(grads)  # a worker killed while gradients were off leaves them off for all greenlets
    return results


CONFIGURATION = {
    "seed": st.integers(0, 10_000),
    "workers": st.integers(1, 4),
    "shards": st.integers(1, 2),
    "recipe": st.sampled_from(RECIPES),
    "barrier_every": st.sampled_from([None, 5]),
}
SETTINGS = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
Faults = list[tuple[int, str, int]]


def check_all_count_once(results: Results, recipe: str, workers: int) -> None:
    """Assert that every batch counts once in each epoch, and was applied as often to every shard."""
    assert results.counted == {number: [1] * (BATCHES * SIZE) for number in range(1, EPOCHS + 1)}
    assert results.last is not None
    assert results.last_rows is not None
    weight = 1 / workers if recipe.startswith("stale") else 1.0
    wanted = np.zeros(BATCHES * APART)
    wanted[::APART] = EPOCHS * weight
    np.testing.assert_allclose(results.last.numpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(results.last_rows.numpy(), np.tile(wanted, (WIDTH, 1)).T, rtol=1e-5)


def check_run(
    seed: int,
    workers: int,
    shards: int,
    recipe: str,
    barrier_every: int | None,
    planned: list[tuple[int, str, int]],
    has_table: bool = False,
) -> None:
    """Assert that a run with these faults ends, and that every batch counts once."""
    check_all_count_once(run(seed, workers, shards, recipe, barrier_every, planned, has_table), recipe, workers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_snapshots_are_taken_in_the_middle_of_an_epoch(recipe: str) -> None:
    assert run(0, 3, 2, recipe, None, []).snapshots >= EPOCHS


@given(**CONFIGURATION, planned=faults("server", "coordinator", "link"))
@SETTINGS
def test_updates_after_the_last_snapshot_are_repeated_when_servers_fail(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    check_run(seed, workers, shards, recipe, barrier_every, planned)


@given(**CONFIGURATION, planned=faults("worker"))
@SETTINGS
def test_every_batch_counts_once_when_workers_fail_and_restart(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    """This includes failures after which only some shards have the failed worker's last update."""
    check_run(seed, workers, shards, recipe, barrier_every, planned)


LATE = [(627, "worker", 0), (746, "server", 0), (1196, "link", 0)]
WORKER_THEN_SERVER = [(470, "worker", 0), (681, "server", 0)]
JOINING = [(572, "worker", 0), (637, "worker", 0), (648, "server", 0)]
SERVER_THEN_ROOT = [(739, "server", 0), (740, "worker", 0)]
ENDING = [(466, "worker", 0), (636, "server", 0)]
AGAIN = [(381, "worker", 0), (570, "worker", 0), (597, "server", 2), (694, "server", 0)]
ALL_WORKERS_THEN_SERVER = [(277, "worker", 0), (298, "worker", 1), (299, "server", 0)]
SERVER_THEN_WORKER = [(577, "server", 0), (579, "worker", 0)]
SERVER_WITH_LAST_WORKER = [(313, "worker", 0), (337, "worker", 1), (337, "server", 0)]
TOO_LATE = [(535, "worker", 0), (556, "worker", 1), (544, "server", 0)]
TORN = [(171, "worker", 0), (680, "worker", 1)]
AT_THE_START = [(10, "worker", 0), (11, "server", 0)]
PASSED = [(608, "server", 0), (1024, "server", 0), (1290, "server", 0), (1456, "server", 0)]


CALLED_TWICE = [
    (1, "at the end, server", 1),
    (22, "worker", 4),
    (145, "worker", 0),
    (300, "worker", 0),
    (929, "server", 1),
    (1451, "server", 2),
]
SERVER_AND_WORKER_TWICE = [
    (539, "server", 0),
    (541, "worker", 1),
    (584, "server", 0),
    (593, "worker", 0),
    (5, AT_END + "worker", 0),
]


@given(**CONFIGURATION, planned=faults("worker", "server", "coordinator", "link"))
@example(seed=34, workers=3, shards=1, recipe="async_sgd", barrier_every=None, planned=LATE)
@example(
    seed=60, workers=3, shards=2, recipe="stale_synchronous(bound=0)", barrier_every=None, planned=WORKER_THEN_SERVER
)
@example(seed=124, workers=3, shards=1, recipe="async_sgd", barrier_every=None, planned=JOINING)
@example(
    seed=5024, workers=3, shards=1, recipe="stale_synchronous(bound=1)", barrier_every=None, planned=SERVER_THEN_ROOT
)
@example(seed=5060, workers=3, shards=1, recipe="async_sgd(overlap=True)", barrier_every=None, planned=ENDING)
@example(seed=690, workers=4, shards=1, recipe="async_sgd", barrier_every=None, planned=AGAIN)
@example(seed=5064, workers=2, shards=1, recipe="async_sgd", barrier_every=None, planned=ALL_WORKERS_THEN_SERVER)
@example(
    seed=33, workers=3, shards=2, recipe="stale_synchronous(bound=0)", barrier_every=None, planned=SERVER_THEN_WORKER
)
@example(
    seed=10364, workers=2, shards=1, recipe="downpour(every=1)", barrier_every=None, planned=SERVER_WITH_LAST_WORKER
)
@example(seed=10928, workers=2, shards=1, recipe="async_sgd(overlap=True)", barrier_every=None, planned=TOO_LATE)
@example(seed=700008, workers=3, shards=2, recipe="async_sgd(overlap=True)", barrier_every=None, planned=TORN)
@example(seed=973331, workers=4, shards=2, recipe="async_sgd", barrier_every=5, planned=PASSED)
@example(seed=554979, workers=4, shards=1, recipe="async_sgd(overlap=True)", barrier_every=5, planned=AT_THE_START)
@example(seed=20203, workers=5, shards=2, recipe="stale_synchronous(bound=0)", barrier_every=None, planned=CALLED_TWICE)
@example(seed=86692, workers=2, shards=1, recipe="async_sgd", barrier_every=5, planned=SERVER_AND_WORKER_TWICE)
@example(
    seed=203, workers=2, shards=2, recipe="stale_synchronous(bound=1)", barrier_every=None, planned=[(2, "server", 0)]
)
@SETTINGS
def test_every_batch_counts_once_when_workers_servers_and_connections_fail(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    check_run(seed, workers, shards, recipe, barrier_every, planned)


@given(**CONFIGURATION, planned=faults("worker", "server", "coordinator", "link"))
@SETTINGS
def test_every_row_counts_once_where_rows_are_exchanged_alone(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    check_run(seed, workers, shards, recipe, barrier_every, planned, has_table=True)


LAST = [(6, "at the end, server", 0), (8, "at the end, worker", 1)]
AT_THE_END = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from([AT_END + "server", AT_END + "coordinator", AT_END + "worker"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=2,
)


@given(**CONFIGURATION, planned=AT_THE_END)
@example(seed=700006, workers=4, shards=1, recipe="downpour(every=1)", barrier_every=None, planned=LAST)
@SETTINGS
def test_failures_at_the_end_leave_no_process_waiting(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    """The remaining workers may lack the last reply, and workers that finished do not send it again."""
    check_run(seed, workers, shards, recipe, barrier_every, planned)


QUIT_AND_BACK = [(311, "quit", 3), (351, "worker", 1), (430, "server", 0)]


@given(**CONFIGURATION, planned=faults("quit", "server", "coordinator", "worker"))
@example(
    seed=34, workers=4, shards=2, recipe="async_sgd", barrier_every=None, planned=[(334, "quit", 1), (498, "server", 0)]
)
@example(seed=592344, workers=2, shards=1, recipe="async_sgd", barrier_every=5, planned=QUIT_AND_BACK)
@SETTINGS
def test_restarted_servers_do_not_wait_for_a_worker_that_quit(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    check_run(seed, workers, shards, recipe, barrier_every, planned)


@given(
    **{**CONFIGURATION, "workers": st.integers(2, 3), "recipe": st.sampled_from(RECIPES[:3])},
    planned=faults("guest", "quit", "server", "coordinator", "worker", most=6),
)
@SETTINGS
def test_every_batch_counts_once_when_guests_join_and_leave(
    seed: int, workers: int, shards: int, recipe: str, barrier_every: int | None, planned: Faults
) -> None:
    check_run(seed, workers, shards, recipe, barrier_every, planned)
