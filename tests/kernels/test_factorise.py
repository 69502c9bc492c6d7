"""The kernels that factorise a matrix equal their reference bit for bit, and refuse numbers outside of the matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import kernels
from stretto.kernels import reference
from stretto.kernels.reference.factorise import Factors, Known

reason = kernels.why_not_native()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native kernels: {reason}")
if reason is None:
    from stretto.kernels import native


def drawn(rows: int, columns: int, rank: int, count: int, seed: int) -> tuple[Factors, Known]:
    """Return random factors, and known values of some of their products."""
    torch.manual_seed(seed)
    factors = torch.randn(rows, rank) / 4, torch.randn(rows), torch.randn(columns, rank) / 4, torch.randn(columns)
    row, column = (torch.randint(size, (count,), dtype=torch.int32) for size in (rows, columns))
    return factors, (row, column, torch.randn(count))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([8, 16, 24, 32, 64, 72]),
    st.integers(0, 40),
    st.integers(0, 2**16),
)
def test_steps_and_errors_equal_the_reference(rows: int, columns: int, rank: int, count: int, seed: int) -> None:
    factors, known = drawn(rows, columns, rank, count, seed)
    copied = tuple(one.clone() for one in factors)
    native.factor_steps(factors, known, 0.3, 0.01, 0.02)
    reference.factor_steps(copied, known, 0.3, 0.01, 0.02)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(factors, copied, strict=True))
    found, expected = (each.factor_errors(factors, known, 0.3, -1.0, 1.0) for each in (native, reference))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_steps_descend_the_squared_error() -> None:
    factors, known = drawn(20, 30, 8, 200, 0)
    before = native.factor_errors(factors, known, 0.0, -9.0, 9.0)
    for _ in range(200):
        native.factor_steps(factors, known, 0.0, 0.02, 0.0)
    assert native.factor_errors(factors, known, 0.0, -9.0, 9.0) < 0.2 * before


@pytest.mark.parametrize("place", [-1, 4, 2**31 - 1])
def test_values_outside_the_matrix_are_refused(place: int) -> None:
    factors, (row, column, value) = drawn(4, 4, 8, 5, 0)
    row[3] = place
    for known in ((row, column, value), (column, row, value)):
        with pytest.raises(ValueError, match="a value is outside the matrix"):
            native.factor_steps(factors, known, 0.0, 0.1, 0.0)
        with pytest.raises(ValueError, match="a value is outside the matrix"):
            native.factor_errors(factors, known, 0.0, -1.0, 1.0)


def test_tables_that_do_not_fit_are_refused() -> None:
    factors, known = drawn(4, 4, 12, 5, 0)
    with pytest.raises(ValueError, match="no multiple of 8"):
        native.factor_steps(factors, known, 0.0, 0.1, 0.0)
    (rows, _, columns, column_bias), known = drawn(4, 4, 8, 5, 0)
    with pytest.raises(ValueError, match="other numbers of rows"):
        native.factor_steps((rows, torch.zeros(2), columns, column_bias[:3]), known, 0.0, 0.1, 0.0)
