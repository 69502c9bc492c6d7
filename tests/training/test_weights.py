"""The weights of an exchange: what the workers that are left were dealt since the last one, and nothing else."""

from hypothesis import example, given
from hypothesis import strategies as st

from stretto.data.assignment import BatchAssignment
from stretto.loader.sample_weights import Weights
from stretto.transport.single_worker import SingleWorkerTransport

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=24)


@given(sizes=SIZES, members=st.integers(1, 4), words=st.lists(st.sampled_from(["carried", 0, 1, 2, 3]), max_size=24))
@example(sizes=[1] * 12, members=2, words=[3, 0, 0, 0])
def test_those_who_are_gone_weigh_nothing(sizes: list[int], members: int, words: list[str | int]) -> None:
    """Against what each was dealt since the last exchange, written down hand by hand."""
    deal, weights = BatchAssignment(sizes, range(members)), Weights(SingleWorkerTransport())
    there, dealt, is_carried, me = set(range(members)), dict.fromkeys(range(members), 0), False, members - 1
    for word in words:
        if word == "carried":
            weights.carried()
            is_carried = True
        elif isinstance(word, int) and word < me:
            there ^= {word}  # it goes, or comes back
            deal.change(sorted(there), deal.global_step, deal.committed)
            if word not in there:
                weights.remove_failed([word])
                dealt[word] = 0
        if (portion := deal.next(me)) is None:
            break
        if is_carried:
            dealt, is_carried = dict.fromkeys(range(members), 0), False
        parts = deal.last_step_samples()
        for worker in there:
            dealt[worker] += parts(worker)
        weights.add(portion.samples, portion.total, parts)
        assert sum(map(parts, range(members))) == portion.total
        assert weights.share() == dealt[me] / sum(dealt.values())
