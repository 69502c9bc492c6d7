"""Speed of the native kernels compared with copying memory, and with the same operation written in torch.

One thread, 25 million numbers. GB/s count the gradient once, 4n bytes a run, whatever else is read and written: a
kernel with the residual reads the gradient and the residual and writes the residual, memcpy reads and writes once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Ratio, Spread, save
from stretto import kernels

NUMBERS = 25_000_000
ROUNDS = 15
TIMES_TORCH = 10.0
BUCKET = 2048
TAU = 2.59
"""One number in a hundred of the sum of gradient and residual below is larger."""

KernelCall = Callable[[Tensor, Tensor | None], Any]


@dataclass(frozen=True)
class Case:
    """A kernel, the same operation written in torch, and the share of memcpy's speed that the kernel should reach."""

    ours: KernelCall
    torch: Callable[[Tensor, Tensor], Any]
    wanted: float | None = None


def torch_threshold(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Find values above the threshold with abs and nonzero, and subtract the values sent from the residual."""
    residual += x
    indices = (residual.abs() >= TAU).nonzero().view(-1)
    negative = residual[indices] < 0
    residual[indices] -= torch.where(negative, -TAU, TAU)
    return indices, negative


def torch_top_k(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Select with torch.topk of the magnitudes."""
    residual += x
    indices = residual.abs().topk(residual.numel() // 100).indices.sort().values
    values = residual[indices]
    residual[indices] = 0
    return indices, values


def torch_top_k_of_chunks(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Select with torch.topk of every row."""
    residual += x
    rows = residual[: residual.numel() // 4096 * 4096].view(-1, 4096)
    indices = rows.abs().topk(64, dim=1).indices
    values = rows.gather(1, indices)
    rows.scatter_(1, indices, 0.0)
    return indices, values


def torch_sign(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Encode signs with two means per bucket, and pack the bits by shifts."""
    residual += x
    rows = residual[: residual.numel() // BUCKET * BUCKET].view(-1, BUCKET)
    bits = rows >= 0
    count = bits.sum(1, keepdim=True)
    high = rows.clamp(min=0).sum(1, keepdim=True) / count.clamp(min=1)
    low = rows.clamp(max=0).sum(1, keepdim=True) / (BUCKET - count).clamp(min=1)
    rows -= torch.where(bits, high, low)
    eights = bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return eights.sum(1, dtype=torch.uint8), torch.cat([low, high], 1)


def torch_quantise(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Round at random to levels of each bucket's largest magnitude."""
    residual += x
    rows = residual[: residual.numel() // BUCKET * BUCKET].view(-1, BUCKET)
    scale = rows.abs().amax(1, keepdim=True)
    levels = (rows / scale * 127).add_(torch.rand_like(rows)).floor_().clamp_(-127, 127)
    rows -= levels * (scale / 127)
    return levels.add_(127).to(torch.uint8), scale


def cases() -> dict[str, Case]:
    """Return the native kernels to measure."""
    from stretto.kernels import native as n

    return {
        "threshold 1%": Case(lambda x, residual: n.take_threshold(x, residual, TAU), torch_threshold, 0.5),
        "top-k 1%": Case(lambda x, residual: n.take_largest(x, residual, x.numel() // 100), torch_top_k, 0.25),
        "top-64 of 4096": Case(
            lambda x, residual: n.take_largest_per_chunk(x, residual, 4096, 64), torch_top_k_of_chunks
        ),
        "sign, two means": Case(lambda x, residual: n.sign_pack(x, residual, BUCKET, True), torch_sign, 0.5),
        "8 bits, stochastic": Case(
            lambda x, residual: n.quantise(x, residual, 127, BUCKET, "max", 1), torch_quantise, 0.5
        ),
    }


def run(rounds: int | None = None, numbers: int = NUMBERS) -> None:
    """Measure all kernels, print the figures and write them to the results."""
    reason = kernels.why_not_native()
    if reason:
        raise SystemExit(f"there are no native kernels to measure: {reason}")
    torch.set_num_threads(1)
    results = {name: _measured(case, rounds or ROUNDS, numbers) for name, case in cases().items()}
    print("\n".join(_lines(results)))
    trial = numbers < NUMBERS or (rounds or ROUNDS) < ROUNDS
    path = save("kernels", {"numbers": numbers, "times_torch_wanted": TIMES_TORCH, "cases": results}, trial=trial)
    print(f"kept in {path}")


def _measured(case: Case, rounds: int, numbers: int) -> dict[str, Any]:
    """Measure the sides in turns; each finds the same residual, and memory that was touched before."""
    draw = torch.Generator().manual_seed(0)
    x, initial = (torch.randn(numbers, generator=draw) * size for size in (1.0, 0.1))
    residual, copy = initial.clone(), torch.empty(numbers)
    sides: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: copy.copy_(x),
        "with residual": lambda: case.ours(x, residual),
        "without": lambda: case.ours(x, None),
        "torch": lambda: case.torch(x, residual),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            residual.copy_(initial)
            begin = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - begin)
    return _record(case, {name: each[1:] for name, each in seconds.items()}, 4 * numbers / 1e9)


def _record(case: Case, seconds: dict[str, list[float]], gb: float) -> dict[str, Any]:
    def against(side: str, other: str) -> dict[str, float | None]:
        return Ratio.of([[one] for one in seconds[side]], [[one] for one in seconds[other]]).record()

    return {
        "gb_per_s": {name: Spread.of([gb / one for one in each]).record() for name, each in seconds.items()},
        "of_memcpy": against("with residual", "memcpy"),
        "of_memcpy_without": against("without", "memcpy"),
        "times_torch": against("with residual", "torch"),
        "wanted": case.wanted,
    }


def _lines(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, one in results.items():
        speeds = ", ".join(f"{side} {speed['median']:.2f}" for side, speed in one["gb_per_s"].items())
        yield f"{name}: {speeds} GB/s"
        wanted = f" (wanted {one['wanted']:g} and {TIMES_TORCH:g})" if one["wanted"] else ""
        share, times = one["of_memcpy"]["median"], one["times_torch"]["median"]
        yield f"  with residual {share:.2f} of memcpy, {times:.1f} times torch{wanted}"
