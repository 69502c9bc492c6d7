"""Weights of an exchange: the samples assigned to the remaining workers since the last exchange, and nothing else."""

from hypothesis import example, given
from hypothesis import strategies as st

from stretto.data.assignment import BatchAssignment
from stretto.loader.sample_weights import Weights
from stretto.transport.single_worker import SingleWorkerTransport

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=24)


@given(sizes=SIZES, members=st.integers(1, 4), events=st.lists(st.sampled_from(["carried", 0, 1, 2, 3]), max_size=24))
@example(sizes=[1] * 12, members=2, events=[3, 0, 0, 0])
def test_failed_workers_have_weight_0(sizes: list[int], members: int, events: list[str | int]) -> None:
    """Compare with the samples assigned to each worker since the last exchange, summed explicitly step by step."""
    assignment, weights = BatchAssignment(sizes, range(members)), Weights(SingleWorkerTransport())
    running, assigned, is_carried, own = set(range(members)), dict.fromkeys(range(members), 0), False, members - 1
    for event in events:
        if event == "carried":
            weights.carried()
            is_carried = True
        elif isinstance(event, int) and event < own:
            running ^= {event}  # the worker fails, or joins again
            assignment.change(sorted(running), assignment.global_step, assignment.committed)
            if event not in running:
                weights.remove_failed([event])
                assigned[event] = 0
        if (batch := assignment.next(own)) is None:
            break
        if is_carried:
            assigned, is_carried = dict.fromkeys(range(members), 0), False
        parts = assignment.last_step_samples()
        for worker in running:
            assigned[worker] += parts(worker)
        weights.add(batch.samples, batch.total, parts)
        assert sum(map(parts, range(members))) == batch.total
        assert weights.share() == assigned[own] / sum(assigned.values())
