"""The kernels in C++ say what the reference says, to the bit, however many threads they use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combinations import pairwise
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto import kernels
from stretto.kernels import reference

reason = kernels.why_not_native()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native kernels: {reason}")
if reason is None:
    from stretto.kernels import native

LENGTHS = (0, 1, 2, 5, 63, 64, 65, 127, 511, 513, 4095, 4096, 4097, 10_000)
LARGE = 700_001
"""Numbers enough for several threads and for a guess from a sample."""

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -3e-42, 1.2e-38, 2e38, -2e38, 1e-20, 7.25)


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def whole(n: int, seed: int) -> Tensor:
    """Small whole numbers: many are equal in magnitude, many are zero."""
    return (normal(n, seed) * 1.5).round()


def special(n: int, seed: int) -> Tensor:
    drawn = torch.randint(len(SPECIAL), (n,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(SPECIAL)[drawn]


def wide(n: int, seed: int) -> Tensor:
    """Every size that float32 has."""
    drawn = torch.randint(-(2**31), 2**31 - 1, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found = drawn.view(torch.float32)
    return torch.where(found.isfinite(), found, torch.ones(())) * 0.25


def rare(n: int, seed: int) -> Tensor:
    """Zeros, but for one number in a hundred."""
    return normal(n, seed) * (normal(n, seed + 1) > 2.33)


law = settings(deadline=None)


def fading(n: int, seed: int) -> Tensor:
    """Decreasing numbers, for which the guess from earlier ones is too high."""
    return normal(n, seed) * torch.exp2(-torch.arange(n) / 4096)


KINDS = (normal, whole, special, wide, rare, fading)
Kernel = Callable[..., Any]


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    n, kind, seed = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(KINDS)), draw(st.integers(0, 10**6))
    return kind(n, seed), draw(st.sampled_from([None, kind(n, seed + 7) * 0.25, torch.zeros(n)]))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit: -0.0 is not 0.0."""
    bits = [t.view(torch.int32) if t.dtype == torch.float32 else t for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and bool((bits[0] == bits[1]).all())


def neighbours(one: Tensor, other: Tensor) -> bool:
    """Equal but for one rounding."""
    keys = [t.view(torch.int32).long() & 0x7FFFFFFF for t in (one, other)]
    return one.shape == other.shape and bool(((keys[0] - keys[1]).abs() <= 1).all())


def agree(name: str, x: Tensor, residual: Tensor | None, *rest: Any, threads: int = 1) -> None:
    """The native kernel and the reference return the same results and residuals."""
    expected_residual, residual = (None, None) if residual is None else (residual.clone(), residual.clone())
    expected = getattr(reference, name)(x.clone(), expected_residual, *rest)
    got = getattr(native, name)(x, residual, *rest, threads=threads)
    for one, other in zip(got, expected, strict=True):
        assert same(one, other)
    assert residual is None or expected_residual is None or same(residual, expected_residual)


TAUS = st.sampled_from([0.0, 1e-45, 0.5, 1.0, 2.5, 1e30, 3.4e38])


@law
@given(inputs(), st.sampled_from([0, 1, 2, 40, 64, 400, 4097, 10**6]))
def test_take_largest(given: tuple[Tensor, Tensor | None], k: int) -> None:
    agree("take_largest", *given, k)


@law
@given(inputs(), st.sampled_from([1, 3, 64, 100, 513, 4096, 10**6]), st.sampled_from([0, 1, 5, 64, 5000]))
def test_take_largest_per_chunk(given: tuple[Tensor, Tensor | None], chunk: int, k: int) -> None:
    agree("take_largest_per_chunk", *given, chunk, k)


@law
@given(inputs(), TAUS)
def test_take_above(given: tuple[Tensor, Tensor | None], tau: float) -> None:
    agree("take_above", *given, tau)


@law
@given(inputs(), TAUS)
def test_take_threshold(given: tuple[Tensor, Tensor | None], tau: float) -> None:
    agree("take_threshold", *given, tau)


@law
@given(inputs(), st.sampled_from(KINDS), st.sampled_from([0.0, 1e-40, 0.3, 1.0, 100.0]))
def test_take_moved(given: tuple[Tensor, Tensor | None], kind: Callable[[int, int], Tensor], scale: float) -> None:
    agree("take_larger_than_change", *given, kind(given[0].numel(), 11), scale)


BUCKETS = st.sampled_from([1, 3, 8, 13, 64, 100, 512, 2048, 10**6])


def agree_on_signs(x: Tensor, residual: Tensor | None, bucket: int, two: bool, threads: int = 1) -> None:
    """The bits are equal; means, summed in another order, up to one rounding; the residual is a - decoded."""
    a = x if residual is None else residual + x
    expected_bits, expected_means = reference.sign_pack(
        x.clone(), None if residual is None else residual.clone(), bucket, two
    )
    bits, means = native.sign_pack(x, residual, bucket, two, threads=threads)
    assert same(bits, expected_bits) and neighbours(means, expected_means)
    if residual is not None:
        decoded = torch.zeros_like(a)
        reference.add_sign(decoded, bits, means, bucket)
        assert bool((residual == a - decoded).all())


@law
@given(inputs(), BUCKETS, st.booleans())
def test_sign_pack(given: tuple[Tensor, Tensor | None], bucket: int, two: bool) -> None:
    agree_on_signs(*given, bucket, two)


LEVELS = st.sampled_from([127, 7, 1])
SEEDS = st.sampled_from([None, 0, 1, 2**31, 2**40 + 3])


@law
@given(inputs(), LEVELS, BUCKETS, SEEDS)
def test_quantise_by_the_largest(
    given: tuple[Tensor, Tensor | None], levels: int, bucket: int, seed: int | None
) -> None:
    agree("quantise", *given, levels, bucket, "max", seed)


def agree_on_lengths(
    x: Tensor, residual: Tensor | None, levels: int, bucket: int, seed: int | None, threads: int = 1
) -> None:
    """Norms are equal up to one rounding; if they are, so is the rest; the residual is a - decoded."""
    a, expected_residual = (x, None) if residual is None else (residual + x, residual.clone())
    expected_codes, expected_norms = reference.quantise(x.clone(), expected_residual, levels, bucket, "l2", seed)
    codes, norms = native.quantise(x, residual, levels, bucket, "l2", seed, threads=threads)
    assert neighbours(norms, expected_norms)
    if same(norms, expected_norms):
        assert same(codes, expected_codes)
    if residual is not None:
        decoded = torch.zeros_like(a)
        reference.add_quantised(decoded, codes, norms, levels, bucket)
        assert bool((residual == a - decoded).all())


@law
@given(inputs(), LEVELS, BUCKETS, SEEDS)
def test_quantise_by_the_length(
    given: tuple[Tensor, Tensor | None], levels: int, bucket: int, seed: int | None
) -> None:
    agree_on_lengths(*given, levels, bucket, seed)


@law
@given(inputs(), BUCKETS, st.booleans())
def test_add_sign(given: tuple[Tensor, Tensor | None], bucket: int, two: bool) -> None:
    x, _ = given
    packed, scales = reference.sign_pack(x, None, bucket, two)
    expected, got = normal(x.numel(), 3), normal(x.numel(), 3)
    reference.add_sign(expected, packed, scales, bucket)
    native.add_sign(got, packed, scales, bucket)
    assert same(got, expected)


@law
@given(inputs(), LEVELS, BUCKETS)
def test_add_quantised(given: tuple[Tensor, Tensor | None], levels: int, bucket: int) -> None:
    x, _ = given
    packed, scales = reference.quantise(x, None, levels, bucket, "max", None)
    expected, got = normal(x.numel(), 3), normal(x.numel(), 3)
    reference.add_quantised(expected, packed, scales, levels, bucket)
    native.add_quantised(got, packed, scales, levels, bucket)
    assert same(got, expected)


@law
@given(LEVELS, st.binary(min_size=200, max_size=200))
def test_invalid_codes_decode_alike_in_both(levels: int, packed: bytes) -> None:
    codes, scales = torch.frombuffer(bytearray(packed), dtype=torch.uint8), torch.ones(2)
    n = 200 if levels == 127 else 400 if levels == 7 else 1000
    expected, got = torch.zeros(n), torch.zeros(n)
    reference.add_quantised(expected, codes, scales, levels, 512)
    native.add_quantised(got, codes, scales, levels, 512)
    assert same(got, expected)


@law
@given(st.sampled_from(LENGTHS), st.integers(0, 10**6), st.sampled_from([0.0, 0.001, 0.01, 0.3, 0.99, 1.0]))
def test_indices(n: int, seed: int, share: float) -> None:
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share).nonzero().view(-1).int()
    message = native.pack_indices(indices, n)
    assert same(message, reference.pack_indices(indices, n))
    longer = torch.cat([message, message.new_full((3 if message.numel() else 0,), 255)])
    for one in (message, longer):
        found, used = native.unpack_indices(one, n)
        assert same(found, indices) and used == message.numel()
    expected, got = normal(n, 1), normal(n, 1)
    reference.add_at(expected, indices, normal(indices.numel(), 2))
    native.add_at(got, indices, normal(indices.numel(), 2))
    assert same(got, expected)


@law
@given(st.lists(st.integers(0, 2**31 - 2), unique=True, min_size=1, max_size=20))
def test_indices_that_lie_far_apart(places: list[int]) -> None:
    indices, n = torch.tensor(sorted(places), dtype=torch.int32), 2**31 - 1
    message = native.pack_indices(indices, n)
    found, used = native.unpack_indices(message, n)
    assert same(found, indices) and used == message.numel()


RICE = st.builds(lambda kind, rest: bytes([kind]) + rest, st.integers(0, 30), st.binary(max_size=40))
GARBAGE = st.one_of(st.binary(max_size=40), RICE)


def message_of(garbage: bytes) -> Tensor:
    return torch.tensor(list(garbage), dtype=torch.uint8)


def are_places(found: Tensor, n: int) -> bool:
    inside = found.numel() == 0 or (int(found.min()) >= 0 and int(found.max()) < n)
    return inside and bool((found.diff() > 0).all())


@settings(max_examples=examples(500))
@given(
    GARBAGE,
    st.sampled_from([0, 1, 7, 8, 64, 300, 10**5]),
)
def test_invalid_messages_are_refused_as_by_the_reference(garbage: bytes, n: int) -> None:
    message = message_of(garbage)
    try:
        expected, ended = reference.unpack_indices(message, n)
    except ValueError:
        with pytest.raises(ValueError, match="indices|bitmap"):
            native.unpack_indices(message, n)
        return
    found, used = native.unpack_indices(message, n)
    assert same(found, expected) and used == ended
    assert are_places(found, n)


@settings(max_examples=examples(500))
@given(GARBAGE)
def test_invalid_messages_about_many_indices_are_refused_immediately(garbage: bytes) -> None:
    n = 2**31 - 1
    if not garbage.startswith(b"\xfd"):
        with contextlib.suppress(ValueError):
            assert are_places(native.unpack_indices(message_of(garbage), n)[0], n)


CALLS: dict[str, tuple[Any, ...]] = {
    "largest": ("take_largest", 7_000),
    "half": ("take_largest", 350_000),
    "few": ("take_largest", 3),
    "chunks": ("take_largest_per_chunk", 4096, 64),
    "above": ("take_above", 1.0),
    "threshold": ("take_threshold", 1.0),
    "bytes": ("quantise", 127, 2048, "max", 5),
    "nibbles": ("quantise", 7, 1001, "max", 5),
    "trits": ("quantise", 1, 333, "max", None),
}


@pytest.mark.parametrize(("call", "kind", "threads"), pairwise([*CALLS], KINDS, [1, 2, 3]))
def test_many_numbers_in_several_threads(call: str, kind: Callable[[int, int], Tensor], threads: int) -> None:
    name, *rest = CALLS[call]
    agree(name, kind(LARGE, 1), kind(LARGE, 2) * 0.25, *rest, threads=threads)
    agree(name, kind(LARGE, 1), None, *rest, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1000, 2048, 65536, LARGE])
def test_means_and_lengths_in_several_threads(bucket: int, threads: int) -> None:
    agree_on_signs(normal(LARGE, 1), normal(LARGE, 2), bucket, True, threads)
    agree_on_signs(normal(LARGE, 1), normal(LARGE, 2), bucket, False, threads)
    agree_on_lengths(normal(LARGE, 1), normal(LARGE, 2), 7, bucket, 5, threads)
    one, several = (native.sign_pack(normal(LARGE, 1), None, bucket, True, threads=some) for some in (1, threads))
    assert same(one[0], several[0]) and same(one[1], several[1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sums_in_several_threads(threads: int) -> None:
    x = normal(LARGE, 4)
    for levels, bucket in ((127, 2048), (7, 1001), (1, 333)):
        packed, scales = reference.quantise(x, None, levels, bucket, "max", None)
        expected, got = x.clone(), x.clone()
        reference.add_quantised(expected, packed, scales, levels, bucket)
        native.add_quantised(got, packed, scales, levels, bucket, threads=threads)
        assert same(got, expected)
    packed, scales = reference.sign_pack(x, None, 1001, True)
    expected, got = x.clone(), x.clone()
    reference.add_sign(expected, packed, scales, 1001)
    native.add_sign(got, packed, scales, 1001, threads=threads)
    assert same(got, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_does_not_crash(bad: float) -> None:
    x = normal(300_000, 1)
    x[::3] = bad
    for name, *rest in CALLS.values():
        for residual in (None, torch.zeros(300_000)):
            indices, _ = getattr(native, name)(x.clone(), residual, *rest)
            if name.startswith("take") and indices.numel():
                assert int(indices.min()) >= 0 and int(indices.max()) < 300_000


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = normal(100, 1)
    with pytest.raises(TypeError):
        native.take_above(x.double(), None, 1.0)
    with pytest.raises(TypeError):
        native.take_above(x[::2], None, 1.0)
    with pytest.raises(TypeError):
        native.take_above(x, normal(200, 1)[::2], 1.0)
    with pytest.raises(ValueError, match="another length"):
        native.take_above(x, normal(99, 1), 1.0)
    with pytest.raises(ValueError, match="outside"):
        native.add_at(x, torch.tensor([100], dtype=torch.int32), torch.ones(1))
    with pytest.raises(ValueError, match="outside"):
        native.add_at(x, torch.tensor([-1], dtype=torch.int32), torch.ones(1))
    with pytest.raises(ValueError, match="missing"):
        native.add_sign(x, torch.zeros(12, dtype=torch.uint8), torch.ones(1, 2), 100)
    with pytest.raises(ValueError, match="missing"):
        native.add_quantised(x, torch.zeros(19, dtype=torch.uint8), torch.ones(1), 1, 100)
    with pytest.raises(ValueError, match="ascend"):
        native.pack_indices(torch.tensor([3, 3], dtype=torch.int32), 10)
