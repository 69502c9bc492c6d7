"""Loops that count their steps: what a failed worker had at an epoch's end is trained, or named.

Where workers do not wait, a fast one reaches a count over several epochs in an earlier epoch than the others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.failures import NET, seen
from simulator.harness import simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto import api
from stretto.errors import LaunchError

EPOCHS, BATCH = 3, 4
SAMPLES = 44
"""Number of samples: eleven batches, of which the last global step has too few for all workers where they are whole."""
WAITING = ["allreduce", "local_sgd(every=3)", "local_sgd(every=16)", "gossip", "local_sgd(every=overhead(0.2))"]


def looping(counts: bool, whole: bool, steps: list[list[int]]) -> Callable[[int], Any]:
    """Return a training function whose loop `counts` to `len(loader)`, or asks for all batches; it notes its steps.

    Its batches are divided into shares unless they are `whole`.
    """

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = DataLoader(regression(SAMPLES), batch_size=BATCH, shuffle=True, drop_last=whole)
        loader = stretto.distribute(net, optimizer, loader)
        steps.append([])
        for _ in range(EPOCHS):
            done = 0
            for x, y in islice(loader, len(loader)) if counts else loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                done += 1
            steps[-1].append(done)
        stretto.finish()
        return flat(net)

    return work


def check_moment(recipe: str, workers: int, counts: bool, whole: bool, moment: float, fault: str) -> None:
    """Kill a worker at a moment, from 0 for the begin of the run to 1 for its end."""
    at = moment * simulated(workers, looping(counts, whole, []), recipe, net=NET).seconds
    steps = list[list[int]]()
    ended = simulated(workers, looping(counts, whole, steps), recipe, net=NET, fault=fault.format(at))
    left = sum(one["samples"] for one in ended.of("samples_left"))
    assert ended.of("epoch")[-1]["samples"] == EPOCHS * SAMPLES - left
    assert [one["twice"] for one in seen(ended)] == [0] * EPOCHS
    assert any("were not trained again" in one["text"] for one in ended.of("warning")) == (left > 0)
    found = [one for one in ended.found if one is not None]
    assert all(torch.equal(one, found[0]) for one in found)
    length = -(-SAMPLES // (workers * BATCH))
    if counts:
        assert max(done for of_worker in steps for done in of_worker) == length
    else:
        assert left == 0
        assert [one["never"] for one in seen(ended)] == [0] * EPOCHS
        assert max(of_worker[-1] for of_worker in steps if of_worker) >= length


@settings(max_examples=examples(20))
@given(
    st.sampled_from(WAITING),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.floats(0, 0.99),
    st.sampled_from(["kill worker 0 at {:.6f}s", "kill worker 1 at {:.6f}s, back after 15ms"]),
)
def test_each_sample_is_trained_or_named_whenever_a_worker_is_killed(
    recipe: str, workers: int, counts: bool, whole: bool, moment: float, fault: str
) -> None:
    check_moment(recipe, workers, counts, whole, moment, fault)


@pytest.mark.parametrize("recipe", WAITING[:2])
def test_samples_of_the_last_step_are_trained_in_the_next_epoch(recipe: str) -> None:
    """Worker 1 of 2 fails in the last step of the first epoch: the loop has made as many steps as it counts."""
    at = simulated(2, looping(True, False, []), recipe, net=NET).seconds * (6 / 23)
    ended = simulated(2, looping(True, False, []), recipe, net=NET, fault=f"kill worker 1 at {at:.6f}s")
    first, second, third = (one["sample_counts"] for one in ended.of("epoch"))
    assert first["never"] > 0
    assert second["recovered_samples"] == first["never"]
    assert third == {"once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}


def test_samples_of_the_last_step_of_the_last_epoch_are_named() -> None:
    check_moment("allreduce", 2, True, False, 21 / 23, "kill worker 0 at {:.6f}s")


@pytest.mark.parametrize(
    ("recipe", "workers", "moment"), [("local_sgd(every=16)", 2, 0.967), ("local_sgd(every=3)", 3, 0.2931)]
)
def test_a_worker_that_fails_while_the_others_end_an_epoch_loses_nothing(
    recipe: str, workers: int, moment: float
) -> None:
    """Their loops have ended by their count: what it had waits for the next epoch, or is in the last model."""
    check_moment(recipe, workers, True, True, moment, "kill worker 1 at {:.6f}s, back after 15ms")


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
@pytest.mark.parametrize("moment", [0.2, 0.4, 0.412, 0.7])
def test_a_late_worker_steps_after_other_batches_of_an_accumulating_loop(recipe: str, moment: float) -> None:
    """Each worker steps after three batches of its own count: a loop with a way out asks the others between steps."""

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        data = DataLoader(regression(120), batch_size=BATCH, shuffle=True)
        loader = stretto.distribute(net, optimizer, data, evaluate=norm, evaluate_every=5)
        for _ in range(2):
            for number, (x, y) in enumerate(loader, 1):
                is_step = number % 3 == 0 or stretto.is_last_batch()
                with torch.enable_grad() if is_step else stretto.no_sync():
                    nn.functional.mse_loss(net(x), y).backward()
                if is_step:
                    optimizer.step()
                    optimizer.zero_grad()
                if number > 80:
                    break
        stretto.finish()
        return flat(net)

    at = moment * simulated(3, work, recipe, net=NET).seconds
    ended = simulated(3, work, recipe, net=NET, fault=f"kill worker 1 at {at:.6f}s, back after 15ms")
    assert [one["never"] + one["twice"] for one in seen(ended)] == [0, 0]
    found = [one for one in ended.found if one is not None]
    assert all(torch.equal(one, found[0]) for one in found)


def limited(limit: int, after: Callable[[int], None] = lambda epoch: None) -> Callable[[int], Any]:
    """Return a training function whose loop ends after this number of steps of its worker, in whichever epoch that is.

    It calls `after` with the number of each epoch that the loop leaves.
    """

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(
            net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH, shuffle=True), evaluate=norm
        )
        step = epoch = 0
        while step < limit:
            epoch += 1
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                step += 1
                if step == limit:
                    break
            after(epoch)
        stretto.finish()
        return step, flat(net)

    return work


def counting(
    limit: int, whole: bool = False, every: int | None = None, is_limit_of_epochs: bool = False
) -> Callable[[int], tuple[int, torch.Tensor]]:
    """Return a training function that counts its steps from 0 in each process; it gathers after `every` k-th one.

    The loop over the epochs may end by the count, too.
    """

    def work(worker: int) -> tuple[int, torch.Tensor]:
        net, step = small_net(), 0
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = DataLoader(regression(SAMPLES), batch_size=BATCH, shuffle=True, drop_last=whole)
        loader = stretto.distribute(net, optimizer, loader)
        trainer = api.training()
        assert trainer is not None
        for _ in range(EPOCHS):
            if is_limit_of_epochs and step >= limit:
                break
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                step += 1
                if every is not None and step % every == 0:
                    trainer.transport.all_gather_bytes(b"one more")
                if step >= limit:
                    break
        stretto.finish()
        return step, flat(net)

    return work


COMES_LATE = "kill worker {} at {:.6f}s, back after {:.6f}s"


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from(["allreduce", "power_sgd(rank=1)", "local_sgd(every=3)", "diloco(every=4)", "gossip"]),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.99), st.floats(0.001, 0.05)), min_size=1, max_size=3),
)
def test_a_worker_that_comes_late_and_counts_its_own_steps_ends_its_loop_with_the_others(
    recipe: str, workers: int, whole: bool, is_limit_of_epochs: bool, kills: list[tuple[int, float, float]]
) -> None:
    """The last worker is never killed: it leaves the last epoch within, by its count."""
    limit = (1 if is_limit_of_epochs else 2) * -(-SAMPLES // (workers * BATCH)) + 1
    work = counting(limit, whole, is_limit_of_epochs=is_limit_of_epochs)
    seconds = simulated(workers, work, recipe, net=NET).seconds
    fault = "; ".join(COMES_LATE.format(who % (workers - 1), at * seconds, after) for who, at, after in kills)
    ended = simulated(workers, work, recipe, net=NET, fault=fault)
    steps, model = ended.found[-1]
    assert limit <= steps <= limit + EPOCHS  # fewer workers make more steps of whole batches
    assert all(torch.equal(one[1], model) for one in ended.found if one is not None)
    assert [one["twice"] for one in seen(ended)] == [0] * len(seen(ended))


@pytest.mark.parametrize(("recipe", "last"), [("allreduce", 10), ("local_sgd(every=4)", 11)])
def test_the_line_of_a_loop_that_ends_with_the_others(recipe: str, last: int) -> None:
    """Worker 0 begins again after its third step, and evaluates after its loop as the others do.

    After local steps its samples are trained again in two steps more, so that the second epoch ends with step 10.
    """
    ended = simulated(3, counting(10), recipe, net=NET, fault=COMES_LATE.format(0, 0.05, 0.015))
    (line,) = (one["text"] for one in ended.of("warning") if "ends its loop" in one["text"])
    assert line.startswith(f"worker 0 ends its loop with the others, in epoch 3 at step {last}: its script counts ")
    assert "if stretto.steps() + 1 >= max_steps: break" in line
    assert ended.found[0][0] < last == ended.found[1][0] == ended.found[2][0]
    assert [one["twice"] for one in seen(ended)] == [0, 0, 0]


def test_the_worker_that_has_counted_most_ends_the_loops_where_each_was_restarted() -> None:
    """Worker 0 begins again after five steps of both, worker 1 later: a limit of 10 steps comes after 15."""
    fault = f"{COMES_LATE.format(0, 0.05, 0.015)}; {COMES_LATE.format(1, 0.12, 0.015)}"
    ended = simulated(2, counting(10), "allreduce", net=NET, fault=fault)
    (line,) = (one["text"] for one in ended.of("warning") if "no worker is left" in one["text"])
    assert "has counted the first 5 steps: a limit of steps that it counts itself comes 5 steps too late" in line
    assert ended.found[1][0] < ended.found[0][0] == 10
    assert torch.equal(ended.found[0][1], ended.found[1][1])
    assert ended.of("epoch")[-1]["step"] == 15


def test_workers_ask_each_other_once_an_epoch_where_all_loops_take_all_batches() -> None:
    """The loops differ in a way out that is never taken; exchanges of one step are as many with it as without."""

    def exchanges(leaves: bool, recipe: str, fault: str | None) -> list[int]:
        def work(worker: int) -> int:
            net = small_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            loader: Any = stretto.distribute(net, optimizer, DataLoader(regression(SAMPLES), batch_size=BATCH))
            trainer, step = api.training(), 0
            assert trainer is not None
            for _ in range(EPOCHS):
                if leaves:
                    for x, y in loader:
                        step += train(net, optimizer, x, y)
                        if step >= 100:
                            break
                else:
                    for x, y in loader:
                        step += train(net, optimizer, x, y)
            return trainer.transport.operations_begun()

        found: list[int] = simulated(2, work, recipe, net=NET, fault=fault).found
        return found

    for recipe in ("allreduce", "local_sgd(every=4)"):
        fault = COMES_LATE.format(0, 0.02, 0.005)
        without, seldom, often = (
            exchanges(True, recipe, None),
            exchanges(False, recipe, fault),
            exchanges(True, recipe, fault),
        )
        assert without == exchanges(False, recipe, None)
        assert often[1] - seldom[1] >= 10
        assert seldom[1] - without[1] <= 2 * EPOCHS + 3


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> int:
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    return 1


def test_a_late_worker_passes_the_epochs_that_the_others_do_not_begin() -> None:
    """A limit of 5 steps is in the second of three epochs: worker 0 has counted 2 then, and begins the third."""
    work = counting(5, is_limit_of_epochs=True)
    ended = simulated(3, work, "allreduce", net=NET, fault=COMES_LATE.format(0, 0.05, 0.015))
    assert ended.found[0][0] < 5 == ended.found[1][0] == ended.found[2][0]
    assert all(torch.equal(one[1], ended.found[1][1]) for one in ended.found)
    assert [one["step"] for one in ended.of("epoch")] == [4, 5]
    said = "worker 0 passes the epochs after 2: the others have ended their loops"
    assert [one["text"] for one in ended.of("warning")].count(said) == 1


def test_a_late_worker_that_only_its_count_would_end_ends_the_run() -> None:
    said = "workers 1 and 2 have ended their scripts in epoch 2 at step 5, worker 0 waits in epoch 3"
    with pytest.raises(LaunchError, match=said):
        simulated(3, limited(5), "allreduce", net=NET, fault=COMES_LATE.format(0, 0.05, 0.015))


def test_a_script_that_exchanges_by_its_own_count_ends_the_run() -> None:
    said = "worker 0 is between two steps in epoch 2 at step 5, workers 1 and 2 wait at step 5"
    with pytest.raises(LaunchError, match=said):
        simulated(3, counting(10, every=5), "allreduce", net=NET, fault=COMES_LATE.format(0, 0.08, 0.015))


def norm(net: nn.Module) -> dict[str, float]:
    return {"norm": float(flat(net).norm())}


@pytest.mark.parametrize(
    ("recipe", "limit", "speed"),
    [
        ("async_sgd", 8, "1,1,4"),
        ("async_sgd(shards=2)", 11, "6,1,1"),
        ("soft_sync(collect=2)", 23, "1,20"),
        ("stale_synchronous(bound=1)", 15, "1,3,9"),
        ("stale_synchronous(bound=0)", 15, "1,20"),
        ("elastic_averaging(every=2)", 23, "1,20"),
    ],
)
def test_a_worker_with_its_count_leaves_later_epochs_to_the_others(recipe: str, limit: int, speed: str) -> None:
    workers = len(speed.split(","))
    ended = simulated(workers, limited(limit), recipe, net=NET, speed=speed)
    assert [steps for steps, _ in ended.found] == [limit] * workers
    assert all(torch.equal(model, ended.found[0][1]) for _, model in ended.found) and ended.final
    counts, left = seen(ended), {one["epoch"]: one["samples"] for one in ended.of("samples_left")}
    assert sum(one["once"] for one in counts) == workers * limit * BATCH
    assert [one["twice"] for one in counts] == [0] * len(counts)
    assert {epoch: one["never"] for epoch, one in enumerate(counts, 1) if one["never"]} == left
    assert set(left) <= {len(counts)}  # whatever one worker leaves, the others train, but for the last epoch


def test_a_worker_that_ends_its_loops_first_is_named_and_another_one_is_main() -> None:
    mains = list[tuple[int, int]]()

    def note(epoch: int) -> None:
        if stretto.is_main():
            mains.append((epoch, stretto.rank()))

    ended = simulated(3, limited(8, note), "async_sgd", net=NET, speed="1,1,4")
    assert [one["text"] for one in ended.of("warning") if "ended their loops" in one["text"]] == [
        "workers 0 and 1 ended their loops before epoch 3, which the other workers train"
    ]
    assert mains == [(1, 0), (2, 0), (3, 2)]


@pytest.mark.parametrize(
    "fault",
    [
        "kill worker 0 at 0.9s",
        "kill worker 0 at 1.1s, back after 15ms",
        "kill worker 2 at 1.3s",
        "kill worker 2 at 0.8s, back after 15ms",
        "kill server 0 at 1s, back after 10ms",
        "kill server 0 at 1.47s, back after 10ms",
    ],
)
def test_a_failure_after_some_loops_have_ended_is_survived(fault: str) -> None:
    """Worker 2 trains alone from 0.41 to 1.6 s, where it ends without a fault."""
    ended = simulated(3, limited(15), "async_sgd", net=NET, speed="1,1,9", fault=fault)
    counts, left = seen(ended), {one["epoch"]: one["samples"] for one in ended.of("samples_left")}
    assert [one["twice"] for one in counts] == [0] * len(counts)
    assert {epoch: one["never"] for epoch, one in enumerate(counts, 1) if one["never"]} == left
    assert ended.final
