"""The reference kernels do what their sentences say: against plain loops, number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.kernels import reference
from stretto.kernels.reference import index_coding as codes

ORDINARY = st.floats(-8, 8, width=32)
SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -3e-42, 1e38, -1e38, 2.5])
TIES = st.integers(-2, 2).map(float)
NUMBERS = st.one_of(st.lists(st.one_of(ORDINARY, SPECIAL), max_size=70), st.lists(TIES, max_size=70))
few = settings(max_examples=examples(80))


def pairs(x: list[float], seed: int) -> tuple[Tensor, Tensor]:
    """A contribution and a residual."""
    residual = torch.randn(len(x), generator=torch.Generator().manual_seed(seed)).round()
    return torch.tensor(x), residual


def check_taken(found: tuple[Tensor, Tensor], a: Tensor, residual: Tensor, expected: Sequence[int]) -> None:
    """The entries are those expected, with their values, and the residual is a without them, to the bit."""
    indices, values = found
    assert indices.dtype == torch.int32
    assert indices.tolist() == list(expected)
    assert torch.equal(values, a[list(expected)])
    left = a.clone()
    left[list(expected)] = 0
    assert torch.equal(residual, left)


@few
@given(NUMBERS, st.integers(0, 80), st.integers(0, 3))
def test_take_largest(x: list[float], k: int, seed: int) -> None:
    given_, residual = pairs(x, seed)
    a = residual + given_
    expected = sorted(sorted(range(len(x)), key=lambda i: (-abs(float(a[i])), i))[:k])
    check_taken(reference.take_largest(given_, residual, k), a, residual, expected)
    alone = reference.take_largest(a, None, k)
    assert alone[0].tolist() == expected


@few
@given(NUMBERS, st.integers(1, 20), st.integers(0, 25), st.integers(0, 3))
def test_take_largest_per_chunk(x: list[float], chunk: int, k: int, seed: int) -> None:
    given_, residual = pairs(x, seed)
    a = residual + given_
    expected: list[int] = []
    for start in range(0, len(x), chunk):
        members = range(start, min(start + chunk, len(x)))
        expected += sorted(sorted(members, key=lambda i: (-abs(float(a[i])), i))[:k])
    check_taken(reference.take_largest_per_chunk(given_, residual, chunk, k), a, residual, expected)


@few
@given(NUMBERS, st.sampled_from([0.5, 1.0, 2.5, 0.1, 1e38]), st.integers(0, 3))
def test_take_above_and_threshold(x: list[float], tau: float, seed: int) -> None:
    given_, residual = pairs(x, seed)
    a, tau32 = residual + given_, float(np.float32(tau))
    expected = [i for i in range(len(x)) if abs(float(a[i])) >= tau32]
    check_taken(reference.take_above(given_, residual, tau), a, residual, expected)
    given_, residual = pairs(x, seed)
    indices, negative = reference.take_threshold(given_, residual, tau)
    assert indices.tolist() == expected
    assert negative.tolist() == [int(float(a[i]) < 0) for i in expected]
    for i in expected:
        a[i] -= math.copysign(tau32, float(a[i]))
    assert torch.equal(residual, a)


@few
@given(NUMBERS, st.sampled_from([0.0, 0.3, 1.0, 30.0]), st.integers(0, 3))
def test_take_moved(x: list[float], scale: float, seed: int) -> None:
    given_, residual = pairs(x, seed)
    a = residual + given_
    moved = torch.randn(len(x), generator=torch.Generator().manual_seed(seed + 1)).round()
    limits = [np.float32(abs(float(one))) * np.float32(scale) for one in moved]
    expected = [i for i in range(len(x)) if np.float32(abs(float(a[i]))) > limits[i]]
    check_taken(reference.take_larger_than_change(given_, residual, moved, scale), a, residual, expected)


def test_without_a_residual_the_input_stays() -> None:
    x = torch.randn(50)
    before = x.clone()
    reference.take_largest(x, None, 5)
    reference.take_above(x, None, 1.0)
    reference.take_threshold(x, None, 1.0)
    reference.quantise(x, None, 7, 8, "max", 1)
    reference.sign_pack(x, None, 8, True)
    assert torch.equal(x, before)


# --- places -----------------------------------------------------------------------------------------------------------


def rice(indices: Sequence[int], low: int) -> str:
    """The stream of bits, by the sentence in `places`."""
    stream, previous = "", -1
    for index in indices:
        gap = index - previous - 1
        stream += "1" * (gap >> low) + "0" + "".join(str(gap >> bit & 1) for bit in range(low))
        previous = index
    return stream


def in_bytes(stream: str) -> list[int]:
    return [int(stream[at : at + 8][::-1], 2) for at in range(0, len(stream), 8)]


def varint(number: int) -> list[int]:
    return [number] if number < 128 else [number & 127 | 128, *varint(number >> 7)]


def message_about(indices: Sequence[int], n: int) -> list[int]:
    if not indices:
        return []
    if len(indices) == n:
        return [253]
    streams = [rice(indices, low) for low in range(20)]
    low = min(range(20), key=lambda one: len(streams[one]))
    coded = [low, *varint(len(indices)), *in_bytes(streams[low])]
    held = set(indices)
    bitmap = [254, *in_bytes("".join(str(int(i in held)) for i in range(n)))]
    return coded if len(coded) <= len(bitmap) else bitmap


@st.composite
def some_places(draw: st.DrawFn) -> tuple[list[int], int]:
    n = draw(st.sampled_from([0, 1, 2, 7, 8, 9, 64, 200, 3000]))
    most = draw(st.sampled_from([3, n // 3, n]))
    chosen = draw(st.sets(st.integers(0, n - 1), max_size=min(most, n))) if n else set()
    return sorted(chosen), n


@few
@given(some_places(), st.binary(max_size=9))
def test_indices_are_packed_by_the_format_and_unpacked(places: tuple[list[int], int], behind: bytes) -> None:
    indices, n = places
    message = reference.pack_indices(torch.tensor(indices, dtype=torch.int32), n)
    assert message.tolist() == message_about(indices, n)
    more = torch.tensor([*message.tolist(), *behind] if indices else [], dtype=torch.uint8)
    found, used = reference.unpack_indices(more, n)
    assert (found.tolist(), used, found.dtype) == (indices, message.numel(), torch.int32)


@few
@given(some_places())
def test_a_message_that_is_cut_off_is_refused(places: tuple[list[int], int]) -> None:
    indices, n = places
    message = reference.pack_indices(torch.tensor(indices, dtype=torch.int32), n)
    for end in range(1, min(message.numel(), 40)):
        with pytest.raises(ValueError, match="message|bitmap"):
            reference.unpack_indices(message[:end], n)


KINDS = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 2, 253, 254]))


@settings(max_examples=examples(400))
@given(KINDS, st.lists(st.sampled_from([0, 1, 5, 255, 128]) | st.integers(0, 255), max_size=30), st.integers(0, 300))
def test_garbage_is_refused_or_decodes_to_indices(kind: int, rest: list[int], n: int) -> None:
    message = torch.tensor([kind, *rest], dtype=torch.uint8)
    try:
        indices, used = reference.unpack_indices(message, n)
    except ValueError:
        return
    assert 0 < used <= message.numel()
    assert indices.tolist() == sorted(set(indices.tolist()))
    assert all(0 <= i < n for i in indices.tolist())


@few
@given(st.lists(st.one_of(st.integers(0, 6), st.integers(0, 1 << 20)), min_size=1, max_size=30))
@example([1, 1, 3])
@example([0, 0, 0, 0, 0, 9])
def test_the_best_code_is_among_those_tried(gaps: list[int]) -> None:
    held = torch.tensor(gaps)
    best = min((codes._rice_bits(held, low), low) for low in range(31))
    assert best == min((codes._rice_bits(held, low), low) for low in codes._low_bits_tried(sum(gaps), len(gaps)))


@pytest.mark.parametrize(
    ("message", "n"),
    [
        ([254, 0b1001], 3),
        ([0, 1, 0b10], 4),
        ([2, 1, 0b1000], 4),
        ([0, 0], 4),
        ([0, 128, 128], 4),
        ([253], 0),
        ([99], 9),
    ],
)
def test_bits_after_the_end_and_impossible_counts_are_refused(message: list[int], n: int) -> None:
    with pytest.raises(ValueError, match="indices|bitmap"):
        reference.unpack_indices(torch.tensor(message, dtype=torch.uint8), n)


@pytest.mark.parametrize("share", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_indices_cost_within_four_percent_of_the_entropy(share: float) -> None:
    n = 500_000
    indices = (torch.rand(n) < share).nonzero().view(-1).int()
    bits = 8 * reference.pack_indices(indices, n).numel()
    part = len(indices) / n
    entropy = -n * (part * math.log2(part) + (1 - part) * math.log2(1 - part))
    assert entropy < bits < 1.04 * entropy


def test_all_and_nothing_cost_a_byte_and_none() -> None:
    assert reference.pack_indices(torch.arange(1000, dtype=torch.int32), 1000).numel() == 1
    assert reference.pack_indices(torch.arange(0, dtype=torch.int32), 1000).numel() == 0


# --- dense ------------------------------------------------------------------------------------------------------------


def float32(number: float) -> float:
    return float(np.float32(min(max(number, -codes_most()), codes_most())))


def codes_most() -> float:
    return float(torch.finfo(torch.float32).max)


@few
@given(NUMBERS, st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_sign_pack(x: list[float], bucket: int, two: bool, seed: int) -> None:
    given_, residual = pairs(x, seed)
    a = residual + given_
    packed, scales = reference.sign_pack(given_, residual, bucket, two)
    assert packed.tolist() == in_bytes("".join(str(int(float(one) >= 0)) for one in a))
    values = []
    for row, start in enumerate(range(0, len(x), bucket)):
        held = a[start : start + bucket].tolist()
        low, high = [one for one in held if one < 0], [one for one in held if one >= 0]
        mean = float32(sum(abs(one) for one in held) / len(held))
        sides = [float32(sum(side) / max(len(side), 1)) for side in (low, high)] if two else [-mean, mean]
        assert scales[row].tolist() == sides
        values += [sides[one >= 0] for one in held]
    decoded = torch.tensor(values)
    assert torch.equal(residual, a - decoded)
    total = torch.ones(len(x))
    reference.add_sign(total, packed, scales, bucket)
    assert torch.equal(total, 1 + decoded)


def hashed(seed: int, i: int) -> float:
    word = 0xFFFFFFFF
    z = i + seed * 0x9E3779B9 & word
    z ^= z >> 16
    z = z * 0x7FEB352D & word
    z ^= z >> 15
    z = z * 0x846CA68B & word
    z ^= z >> 16
    return (z >> 8) * 2.0**-24


@few
@given(st.integers(-(1 << 40), 1 << 64))
def test_noise_is_the_hash_of_seed_and_index(seed: int) -> None:
    assert reference.noise(seed, 20).tolist() == [hashed(seed, i) for i in range(20)]


def test_noise_is_even() -> None:
    drawn = reference.noise(11, 100_000).double()
    assert abs(float(drawn.mean()) - 0.5) < 0.005
    assert abs(float(drawn.var()) - 1 / 12) < 0.002
    assert abs(float((drawn[1:] * drawn[:-1]).mean()) - 0.25) < 0.005


@few
@given(
    NUMBERS,
    st.sampled_from([127, 7, 1]),
    st.integers(1, 20),
    st.sampled_from(["max", "l2"]),
    st.none() | st.integers(0),
)
def test_quantise(x: list[float], levels: int, bucket: int, norm: str, seed: int | None) -> None:
    given_, residual = pairs(x, 1)
    a = residual + given_
    packed, scales = reference.quantise(given_, residual, levels, bucket, norm, seed)  # type: ignore[arg-type]
    said, values = [], []
    for i, number in enumerate(a.tolist()):
        held = [abs(one) for one in a[i // bucket * bucket :][:bucket].tolist()]
        scale = np.float32(float32(max(held) if norm == "max" else math.sqrt(sum(one * one for one in held))))
        assert scales[i // bucket] == float(scale)
        y = np.float32(abs(number)) / scale * np.float32(levels) if scale > 0 else np.float32(0)
        u = np.float32(0.5 if seed is None else hashed(seed, i))
        level = min(int(np.floor(y + u)), levels)
        said.append(levels + (level if number >= 0 else -level))
        values.append(float(np.float32(said[-1] - levels) * (scale / np.float32(levels))))
    assert packed.tolist() == packed_by_hand(said, levels)
    assert torch.equal(residual, a - torch.tensor(values))
    total = torch.ones(len(x))
    reference.add_quantised(total, packed, scales, levels, bucket)
    assert torch.equal(total, 1 + torch.tensor(values))


def test_no_noise_lifts_the_largest_above_the_highest_level() -> None:
    """In float32 127 + u is 128 for the largest u."""
    assert bool((127 + reference.noise(1, 1 << 20) == 128).any())
    packed, _ = reference.quantise(torch.ones(1 << 20), None, 127, 1, "max", 1)
    assert bool((packed == 254).all())


def packed_by_hand(said: list[int], levels: int) -> list[int]:
    base, count = {127: (256, 1), 7: (16, 2), 1: (3, 5)}[levels]
    return [sum(one * base**at for at, one in enumerate(said[i : i + count])) for i in range(0, len(said), count)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_keep_the_residual(dtype: torch.dtype) -> None:
    x = torch.randn(300).to(dtype)
    for levels in (127, 7, 1):
        residual, total = torch.zeros_like(x), torch.zeros_like(x)
        reference.add_quantised(total, *reference.quantise(x, residual, levels, 64, "l2", 3), levels, 64)
        assert torch.equal(residual, x - total)
    residual, total = torch.zeros_like(x), torch.zeros_like(x)
    reference.add_sign(total, *reference.sign_pack(x, residual, 64, True), 64)
    assert torch.equal(residual, x - total)


def test_nan_does_not_crash_the_reference() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 0.0] * 7)
    reference.take_largest(x, torch.zeros(35), 6)
    reference.take_largest_per_chunk(x, torch.zeros(35), 4, 2)
    reference.take_threshold(x, torch.zeros(35), 1.0)
    for levels in (127, 7, 1):
        reference.quantise(x, torch.zeros(35), levels, 8, "max", 1)
    reference.sign_pack(x, torch.zeros(35), 8, True)


def test_add_at_adds() -> None:
    total = torch.ones(5)
    reference.add_at(total, torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, -1.0]))
    assert total.tolist() == [1, 3, 1, 0, 1]
