"""PowerSGD: exact where the rank suffices, nothing lost where it does not, the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.codecs import Block, CodecContext, low_rank
from stretto.codecs.conformance import check_codec, hold
from stretto.codecs.low_rank import orthonormal
from stretto.collective_ops import AllReduceMean
from stretto.errors import NotFiniteError, RecipeError
from stretto.state import Members


def blocks_of(*shapes: tuple[int, ...], gap: int = 0) -> list[Block]:
    found, at = [], 0
    for number, shape in enumerate(shapes):
        found.append(Block(str(number), at, at + math.prod(shape), shape))
        at = found[-1].stop + gap
    return found


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def of_rank(rank: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return drawn(rows, rank, seed=seed) @ drawn(rank, columns, seed=seed + 1)


def exchange(codec: low_rank, xs, states, residual=None):
    residual = residual or [None] * len(xs)
    return hold([codec.average(x.clone(), m, o) for x, m, o in zip(xs, states, residual, strict=True)])


@pytest.mark.parametrize("codec", [low_rank(), low_rank(1), low_rank(40)], ids=str)
def test_low_rank_has_the_properties_of_every_codec(codec: low_rank) -> None:
    check_codec(codec, 3, dtypes=[torch.float32, torch.float64, torch.bfloat16])


@given(
    rank=st.integers(1, 3),
    rows=st.integers(8, 40),
    columns=st.integers(8, 40),
    workers=st.integers(1, 3),
    more=st.integers(0, 2),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)
@settings(max_examples=examples(60))
def test_the_mean_of_a_matrix_of_that_rank_is_exact(rank, rows, columns, workers, more, size) -> None:
    codec, context = low_rank(rank + more), CodecContext(blocks=blocks_of((rows, columns)))
    left, right = drawn(rows, rank), drawn(rank, columns, seed=1)
    xs = [size * ((left * drawn(rank, seed=9 + worker)) @ right).flatten() / workers for worker in range(workers)]
    results, _ = exchange(codec, xs, [codec.init_state(x, context) for x in xs])
    exact = torch.stack(xs).sum(0)
    assert float((results[0] - exact).abs().max()) <= 1e-4 * float(exact.abs().max())


def test_a_matrix_of_that_rank_is_exact_in_double_precision() -> None:
    x = (drawn(30, 2, dtype=torch.float64) @ drawn(2, 50, seed=1, dtype=torch.float64)).flatten()
    codec = low_rank(2)
    results, _ = exchange(codec, [x], [codec.init_state(x, CodecContext(blocks=blocks_of((30, 50))))])
    assert float((results[0] - x).abs().max()) < 1e-12


def test_a_rank_too_small_is_not_exact_and_the_first_direction_is_found_in_time() -> None:
    codec, context = low_rank(1), CodecContext(blocks=blocks_of((30, 40)))
    u, s, v = torch.linalg.svd(of_rank(3, 30, 40), full_matrices=False)
    x, best = of_rank(3, 30, 40).flatten(), s[0] * torch.outer(u[:, 0], v[0]).flatten()
    state, apart = codec.init_state(x, context), []
    for _ in range(60):
        results, _ = exchange(codec, [x], [state])
        apart.append(float((results[0] - best).norm() / best.norm()))
    assert apart[0] > 0.1
    assert apart[-1] < 1e-3


def test_matrices_take_two_all_reduces_and_other_parameters_are_exact() -> None:
    shapes = [(20, 30), (30,), (16, 3, 3, 3), (2, 50), (5,)]
    context = CodecContext(blocks=blocks_of(*shapes, gap=3))
    length = context.blocks[-1].stop
    codec = low_rank(3)
    xs = [torch.zeros(length) for _ in range(2)]
    for worker, x in enumerate(xs):
        for block in context.blocks:
            x[block.start : block.stop] = drawn(math.prod(block.shape), seed=worker)
    results, turns = exchange(codec, xs, [codec.init_state(x, context) for x in xs])
    plain = 30 + 2 * 50 + 5
    assert [turn[0].tensor.numel() for turn in turns] == [3 * 20 + 3 * 16 + plain, 3 * 30 + 3 * 27]
    assert all(isinstance(ask, AllReduceMean) for turn in turns for ask in turn)
    assert codec.bytes_of(xs[0], context) == sum(turn[0].tensor.nbytes for turn in turns)
    exact = xs[0] + xs[1]
    for place, block in enumerate(context.blocks):
        same = torch.equal(results[0][block.start : block.stop], exact[block.start : block.stop])
        assert same == (place not in (0, 2))


@pytest.mark.parametrize(("shape", "rank", "turns"), [((6, 3), 2, 1), ((6, 3), 1, 2), ((4, 4), 2, 1), ((1, 999), 1, 1)])
def test_only_matrices_that_become_smaller_are_factored(shape, rank, turns) -> None:
    codec, x = low_rank(rank), drawn(math.prod(shape))
    _, asked = exchange(codec, [x], [codec.init_state(x, CodecContext(blocks=blocks_of(shape)))])
    assert len(asked) == turns


def test_a_block_that_is_a_piece_of_its_parameter_is_sent_exactly() -> None:
    codec, x = low_rank(1), drawn(300)
    results, turns = exchange(codec, [x], [codec.init_state(x, CodecContext(blocks=[Block("cut", 0, 300, (40, 40))]))])
    assert len(turns) == 1
    assert torch.equal(results[0], x)


@given(numbers=st.integers(0, 5000))
@settings(max_examples=examples(50))
def test_without_parameters_nearly_all_is_one_matrix_that_is_nearly_square(numbers: int) -> None:
    codec, x = low_rank(1), drawn(numbers)
    state = codec.init_state(x)
    _, turns = exchange(codec, [x], [state])
    assert sum(turn[0].tensor.nbytes for turn in turns) == codec.bytes_of(x)
    if numbers > 400:
        (matrix,), side = state.matrices, math.isqrt(numbers)
        assert max(side - 64, side / 2) < matrix.rows <= side
        assert 0 <= numbers - matrix.rows * matrix.columns < side / 4 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_over_rounds_results_and_residuals_sum_to_the_inputs(dtype: torch.dtype) -> None:
    codec, context = low_rank(2), CodecContext(blocks=blocks_of((20, 30), (7,), (12, 9)))
    length, workers = context.blocks[-1].stop, 3
    residual = [torch.zeros(length, dtype=dtype) for _ in range(workers)]
    states = [codec.init_state(one, context) for one in residual]
    given_, applied = torch.zeros(length).double(), torch.zeros(length).double()
    for round_ in range(25):
        xs = [drawn(length, seed=100 * round_ + worker, dtype=dtype) / workers for worker in range(workers)]
        given_ += torch.stack(xs).double().sum(0)
        results, _ = exchange(codec, xs, states, residual)
        applied += results[0].double()
    left = torch.stack(residual).double().sum(0)
    assert float((applied + left - given_).abs().max()) < 100 * torch.finfo(dtype).eps * float(left.abs().max())
    assert float(left.abs().max()) > 1
    assert not left[600:607].any()


def test_with_a_residual_steady_gradients_arrive_whole_in_the_mean() -> None:
    codec, x, rounds = low_rank(1), drawn(20 * 20), 400
    residual, state, applied = (
        torch.zeros_like(x),
        codec.init_state(x, CodecContext(blocks=blocks_of((20, 20)))),
        torch.zeros_like(x),
    )
    for _ in range(rounds):
        results, _ = exchange(codec, [x], [state], [residual])
        applied += results[0]
    assert float((applied / rounds - x).norm() / x.norm()) < 0.1


def test_the_state_is_equal_at_all_workers_and_depends_on_the_run() -> None:
    codec, context = low_rank(2), blocks_of((20, 30), (9, 9))
    length = context[-1].stop
    states = [
        codec.init_state(torch.zeros(length), CodecContext(worker=worker, seed=5, blocks=context))
        for worker in range(3)
    ]
    for round_ in range(5):
        results, _ = exchange(codec, [drawn(length, seed=10 * round_ + worker) for worker in range(3)], states)
        assert all(torch.equal(one, results[0]) for one in results)
        for state in states:
            assert all(map(torch.equal, state.q, states[0].q))
            assert all(map(torch.equal, state.bases(), states[0].bases()))
    other = codec.init_state(torch.zeros(length), CodecContext(seed=6, blocks=context))
    fresh = codec.init_state(torch.zeros(length), CodecContext(seed=5, blocks=context))
    assert not torch.equal(other.bases()[0], fresh.bases()[0])


def test_all_workers_have_equal_bases_after_one_has_joined() -> None:
    codec, context, zeros = low_rank(2), CodecContext(blocks=blocks_of((20, 30))), torch.zeros(600)
    old, new = codec.init_state(zeros, context), codec.init_state(zeros, context)
    exchange(codec, [drawn(600)], [old])
    old.reset(Members(2))
    assert not torch.equal(old.bases()[0], new.bases()[0])
    old.reset(Members(2, joined=True))
    assert torch.equal(old.bases()[0], new.bases()[0])


def test_the_bits_do_not_depend_on_the_threads() -> None:
    factors, threads = [drawn(3, 70_001), drawn(3, 501)], torch.get_num_threads()
    codec, x = low_rank(3), drawn(500_000)
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            state = codec.init_state(x)
            talk = codec.average(x.clone(), state)
            next(talk)
            talk.send(AllReduceMean(drawn(3 * sum(one.rows for one in state.matrices) + _tail(state))).tensor)
            with pytest.raises(StopIteration) as end:
                talk.send(drawn(3 * sum(one.columns for one in state.matrices)))
            found.append([*orthonormal(factors), end.value.value])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def _tail(state) -> int:
    return sum(len(run) for run in state.rest)


def test_a_zero_direction_contributes_nothing_and_is_drawn_again() -> None:
    codec, context = low_rank(2), CodecContext(blocks=blocks_of((20, 30)))
    zeros, x = torch.zeros(600), of_rank(2, 20, 30).flatten()
    state = codec.init_state(zeros, context)
    for _ in range(3):
        results, _ = exchange(codec, [zeros], [state])
        assert not results[0].any()
    results, _ = exchange(codec, [x], [state])
    assert torch.allclose(results[0], x, atol=1e-4)


@given(
    rank=st.integers(1, 6),
    length=st.integers(1, 70),
    size=st.sampled_from([1e-40, 1e-20, 1.0, 1e37]),
    same=st.booleans(),
)
@settings(max_examples=examples(80))
def test_rows_become_orthonormal_and_span_what_they_spanned(rank: int, length: int, size: float, same: bool) -> None:
    factor = drawn(rank, length, seed=rank)
    if same:
        factor[1:] = factor[0] * torch.arange(2.0, rank + 1)[:, None]
    (found,) = orthonormal([size * factor])
    norms = found.double().norm(dim=1)
    products = found.double() @ found.double().T
    assert bool(((norms - 1).abs() < 1e-5).logical_or(norms == 0).all())
    assert float((products - torch.diag(norms**2)).abs().max()) < 1e-5
    spanned = factor.double() @ found.double().T @ found.double()
    coarse = 1e-5 if size > 1e-40 else 1e-3
    assert float((spanned - factor.double()).abs().max()) <= coarse * float(factor.abs().max())
    assert int((norms > 0).sum()) <= min(rank, length)


def test_nearly_parallel_rows_are_orthogonal_in_the_end() -> None:
    factor = drawn(1, 200, dtype=torch.float64) + 1e-9 * drawn(5, 200, seed=1, dtype=torch.float64)
    (found,) = orthonormal([factor])
    assert float((found @ found.T - torch.eye(5)).abs().max()) < 1e-14


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_refused_before_any_state_changes(bad: float) -> None:
    codec, x, residual = low_rank(1), drawn(100), torch.ones(100)
    state = codec.init_state(x)
    x[3] = bad
    with pytest.raises(NotFiniteError):
        next(codec.average(x, state, residual))
    assert torch.equal(residual, torch.ones(100))
    assert not state.q[0].any()


def test_a_sum_that_is_too_large_is_refused_at_all_workers_and_nothing_changes() -> None:
    codec, x, residual = low_rank(1), drawn(100), torch.zeros(100)
    state = codec.init_state(x)
    for turns in (1, 2):
        talk = codec.average(x.clone(), state, residual)
        asked = next(talk)
        for _ in range(turns - 1):
            asked = talk.send(asked.tensor)
        with pytest.raises(NotFiniteError):
            talk.send(torch.full_like(asked.tensor, math.inf))
    assert not residual.any()
    assert not state.q[0].any()


def test_a_rank_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least 1"):
        low_rank(0)
