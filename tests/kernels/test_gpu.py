"""The kernels in Triton say what the reference says, to the bit or to the stated rounding.

Without a GPU they run in Triton's interpreter on tensors of the CPU; what they compile to is looked at either way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import gpu_kernels, tables
from stretto import kernels
from stretto.kernels import gpu, reference
from stretto.kernels.gpu import select

pytestmark = pytest.mark.skipif(not gpu.THERE, reason="Triton is not installed: pip install 'stretto[gpu]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (0, 1, 2, 7, 8, 9, 63, 65, 2047, 2048, 2049, 5000)
BUCKETS = (1, 7, 64, 1000, 2048, 2049, 4096, 1 << 30)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -3e-42, 1.2e-38, 1e38, -1e38, 1e-20, 7.25)
FEW = settings(max_examples=25, derandomize=True)


def eighths(n: int, seed: int) -> Tensor:
    """Many equal magnitudes, and sums that float64 holds exactly."""
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 8).round() / 8


def special(n: int, seed: int) -> Tensor:
    return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=torch.Generator().manual_seed(seed))]


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    n, seed = draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 10**6))
    kind = draw(st.sampled_from([eighths, special, normal]))
    owed = draw(st.sampled_from([None, torch.zeros(n), kind(n, seed + 7)]))
    return kind(n, seed).to(DEVICE), None if owed is None else owed.to(DEVICE)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit: -0.0 is not 0.0."""
    bits = [t.cpu().view(torch.int32) if t.dtype == torch.float32 else t.cpu() for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def both(name: str, x: Tensor, owed: Tensor | None, *rest: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel gives and what the reference gives, each with the owed that it leaves."""
    ran = []
    for module in (gpu, reference):
        left = None if owed is None else owed.clone()
        ran.append([*getattr(module, name)(x.clone(), left, *rest), *([] if left is None else [left])])
    return ran[0], ran[1]


def agree(name: str, x: Tensor, owed: Tensor | None, *rest: Any) -> None:
    got, expected = both(name, x, owed, *rest)
    for one, other in zip(got, expected, strict=True):
        assert same(one, other)


def test_they_run_where_the_tests_believe() -> None:
    interpreted = type(select._count).__name__ == "InterpretedFunction"
    assert interpreted == (DEVICE == "cpu"), "Triton was imported before TRITON_INTERPRET was set"


def test_they_have_the_functions_of_the_reference() -> None:
    assert set(reference.__all__) - set(gpu.__all__) == {"noise"}


# --- selection --------------------------------------------------------------------------------------------------------


@FEW
@given(inputs(), st.sampled_from([0.0, 1e-45, 0.125, 1.5, 1e38]))
def test_take_above_equals_the_reference(given: tuple[Tensor, Tensor | None], tau: float) -> None:
    agree("take_above", *given, tau)


@FEW
@given(inputs(), st.sampled_from([1e-45, 0.1, 0.125, 1.5, 1e38]))
def test_take_threshold_equals_the_reference(given: tuple[Tensor, Tensor | None], tau: float) -> None:
    agree("take_threshold", *given, tau)


@FEW
@given(inputs(), st.sampled_from([0.0, 0.1, 1.0, 3e5]), st.integers(0, 99))
def test_take_moved_equals_the_reference(given: tuple[Tensor, Tensor | None], scale: float, seed: int) -> None:
    agree("take_moved", *given, eighths(given[0].numel(), seed).to(DEVICE), scale)


@FEW
@given(inputs(), st.sampled_from([0, 1, 5, 64, 2048, 10**6]))
def test_take_largest_equals_the_reference(given: tuple[Tensor, Tensor | None], k: int) -> None:
    agree("take_largest", *given, k)


@FEW
@given(inputs(), st.sampled_from([1, 2, 63, 64, 1000, 4096, 1 << 20]), st.sampled_from([0, 1, 3, 64, 5000]))
def test_take_largest_per_chunk_equals_the_reference(given: tuple[Tensor, Tensor | None], chunk: int, k: int) -> None:
    agree("take_largest_per_chunk", *given, chunk, k)


def test_chunks_that_no_program_holds_go_through_the_reference() -> None:
    chunk = select.LONGEST_CHUNK + 1
    x = eighths(chunk + 5, 0).to(DEVICE)
    agree("take_largest_per_chunk", x, torch.ones_like(x), chunk, 9)


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_of_equals_across_programs_the_first_are_taken(count: int) -> None:
    x = torch.zeros(3 * select.NUMBERS, device=DEVICE)
    x[:: select.NUMBERS // 2] = -2.0
    x[-1] = 3.0
    indices, values = gpu.take_largest(x, None, 1 + count)
    assert indices.tolist() == [*range(0, count * 1024, 1024), x.numel() - 1]
    assert values.tolist() == [-2.0] * count + [3.0]


def test_what_is_taken_and_what_is_owed_are_the_input() -> None:
    x, owed = normal(5000, 1).to(DEVICE), normal(5000, 2).to(DEVICE)
    whole = owed + x
    for take, argument in ((gpu.take_above, 1.0), (gpu.take_largest, 50)):
        left = owed.clone()
        indices, values = take(x.clone(), left, argument)
        gpu.add_at(left, indices, values)
        assert 0 < indices.numel() < 5000
        assert torch.equal(left, whole)


# --- every number in few bits -----------------------------------------------------------------------------------------


def one_rounding_apart(got: Tensor, expected: Tensor) -> bool:
    """Whether all are equal or neighbours among the float32."""
    up = torch.nextafter(expected, torch.full_like(expected, torch.inf))
    down = torch.nextafter(expected, torch.full_like(expected, -torch.inf))
    return bool(((got >= down) & (got <= up)).all())


def decoded(add: Any, n: int, *rest: Any) -> Tensor:
    total = torch.zeros(n, device=DEVICE)
    add(total, *rest)
    return total


@FEW
@given(st.sampled_from(LENGTHS), st.integers(0, 10**6), st.sampled_from(BUCKETS), st.booleans(), st.booleans())
def test_sign_pack_equals_the_reference(n: int, seed: int, bucket: int, two: bool, owes: bool) -> None:
    agree("sign_pack", eighths(n, seed).to(DEVICE), eighths(n, seed + 7).to(DEVICE) if owes else None, bucket, two)


@FEW
@given(inputs(), st.sampled_from(BUCKETS), st.booleans())
def test_means_are_the_references_or_their_neighbours(
    given: tuple[Tensor, Tensor | None], bucket: int, two: bool
) -> None:
    x, owed = given
    bucket = min(bucket, max(x.numel(), 1))
    got, expected = both("sign_pack", x, owed, bucket, two)
    assert same(got[0], expected[0])
    assert one_rounding_apart(got[1], expected[1])
    if owed is not None:
        assert same(got[2], owed + x - decoded(reference.add_sign, x.numel(), got[0], got[1], bucket))


@FEW
@given(inputs(), st.sampled_from(BUCKETS), st.booleans())
def test_add_sign_equals_the_reference(given: tuple[Tensor, Tensor | None], bucket: int, two: bool) -> None:
    x = given[0]
    said = reference.sign_pack(x, None, min(bucket, max(x.numel(), 1)), two)
    totals = [torch.full_like(x, 0.1) for _ in range(2)]
    gpu.add_sign(totals[0], *said, bucket)
    reference.add_sign(totals[1], *said, bucket)
    assert same(*totals)


LEVELS = st.sampled_from([127, 7, 1])
SEEDS = st.sampled_from([None, 0, 1, 2**31, 2**40 + 3])


@FEW
@given(inputs(), LEVELS, st.sampled_from(BUCKETS), SEEDS)
def test_quantise_by_the_largest_equals_the_reference(
    given: tuple[Tensor, Tensor | None], levels: int, bucket: int, seed: int | None
) -> None:
    agree("quantise", *given, levels, min(bucket, max(given[0].numel(), 1)), "max", seed)


@FEW
@given(inputs(), LEVELS, st.sampled_from(BUCKETS), SEEDS)
def test_quantise_by_the_norm_equals_the_reference_but_for_one_rounding_of_the_norm(
    given: tuple[Tensor, Tensor | None], levels: int, bucket: int, seed: int | None
) -> None:
    x, owed = given
    bucket = min(bucket, max(x.numel(), 1))
    got, expected = both("quantise", x, owed, levels, bucket, "l2", seed)
    assert one_rounding_apart(got[1], expected[1])
    if same(got[1], expected[1]):
        assert same(got[0], expected[0])
    if owed is not None:
        said = decoded(reference.add_quantised, x.numel(), got[0], got[1], levels, bucket)
        assert torch.equal(got[2], owed + x - said)


@FEW
@given(st.sampled_from(LENGTHS), LEVELS, st.sampled_from(BUCKETS), st.integers(0, 99))
def test_add_quantised_equals_the_reference_for_any_bytes(n: int, levels: int, bucket: int, seed: int) -> None:
    """Also for bytes that no packing gives: they come from other workers."""
    drawn = torch.Generator().manual_seed(seed)
    each = {127: 1, 7: 2, 1: 5}[levels]
    bucket = min(bucket, max(n, 1))
    packed = torch.randint(256, (-(-n // each),), generator=drawn, dtype=torch.uint8).to(DEVICE)
    scales = torch.rand(-(-n // bucket), generator=drawn).to(DEVICE)
    totals = [torch.full((n,), 0.1, device=DEVICE) for _ in range(2)]
    gpu.add_quantised(totals[0], packed, scales, levels, bucket)
    reference.add_quantised(totals[1], packed, scales, levels, bucket)
    assert same(*totals)


# --- what must not happen ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_nan_and_infinity_crash_nothing() -> None:
    x = normal(3000, 0).to(DEVICE)
    x[5], x[70], x[2100] = torch.nan, torch.inf, -torch.inf
    owed = torch.zeros_like(x)
    gpu.take_above(x, owed.clone(), 1.0)
    gpu.take_moved(x, owed.clone(), x, 1.0)
    gpu.take_threshold(x, owed.clone(), 1.0)
    for k in (1, 100, 3000):
        assert gpu.take_largest(x, owed.clone(), k)[0].numel() == k
        gpu.take_largest_per_chunk(x, owed.clone(), 100, k)
    gpu.sign_pack(x, owed.clone(), 64, True)
    for levels in (127, 7, 1):
        gpu.quantise(x, owed.clone(), levels, 64, "l2", 3)


@pytest.mark.parametrize(
    "owed",
    [torch.zeros(9), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]],
    ids=["another length", "another dtype", "with holes"],
)
def test_a_residual_that_no_kernel_can_read_is_refused(owed: Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous float32 tensors of one length"):
        gpu.take_above(torch.ones(10, device=DEVICE), owed.to(DEVICE), 0.5)


def test_tensors_of_a_gpu_get_these_kernels() -> None:
    """Seen without a GPU by a tensor that says it lies on one."""

    class Elsewhere:
        device, dtype = torch.device("cuda:0"), torch.float32

        def is_contiguous(self) -> bool:
            return True

    assert kernels.on(Elsewhere()) is gpu
    Elsewhere.dtype = torch.float64
    assert kernels.on(Elsewhere()) is reference


# --- how fast they are ------------------------------------------------------------------------------------------------


def test_the_benchmark_measures_every_case_in_turns_and_its_table_shows_all() -> None:
    """With a stopwatch that counts, as there may be no GPU: what is done is the same."""

    def stopwatch(work: Any) -> float:
        work()
        return 2.0

    found = gpu_kernels.measured(DEVICE, 2, 3000, stopwatch)
    assert found.keys() == gpu_kernels.CASES.keys()
    for one in found.values():
        assert one["gb_per_s"]["copy"]["median"] == pytest.approx(4 * 3000 / 2e9)
        assert one["of_copy"]["with residual"]["median"] == 1.0
    assert len(list(gpu_kernels.lines(found))) == len(found)
    rows = list(tables.TABLES["gpu"]({"gpu": "one", "numbers": 3000, "cases": found}))
    assert sum(row.startswith("|") for row in rows) == 2 + len(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        gpu_kernels.run()


# --- what they compile to ---------------------------------------------------------------------------------------------


def test_they_compile_for_a_gpu_and_round_every_result_by_itself(tmp_path: Path) -> None:
    """No product fused with a sum, no approximate quotient, no denormal flushed: then the bits are the reference's.

    `cvt.rmi.ftz` is `floor` of what is not negative, which is 0 for a denormal either way.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiled.py")), "90"]
    where = {"PYTHONPATH": str(Path(kernels.__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=kept | where, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert {name.split()[0] for name in made} == {
        *("_count", "_write", "_count_largest", "_write_largest", "_take_per_chunk"),
        *("_sum_signs", "_pack_signs", "_add_signs", "_sizes", "_pack_levels", "_add_levels"),
    }
    used = {instruction for one in made.values() for instruction in one}
    assert {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "add.rn.f64"} <= used
    loose = {one for one in used if one.startswith("fma") or {"full", "approx", "ftz"} & set(one.split("."))}
    assert loose <= {"cvt.rmi.ftz.f32.f32"}
